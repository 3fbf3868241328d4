"""Any schedule of worker counts, on any kind of cluster: no request is lost, and leaping changes nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from toy import run

CLUSTERS = {
    "mixed": ("[[workers]]\ncount = 2\n", ("mixed",)),
    "sglang": ('[[workers]]\ncount = 2\nengine = "sglang"\n', ("mixed",)),
    "ranks": ('[[workers]]\ncount = 2\ntp = 1\ndp = 2\nmodel = "llama-3.1-8b"\n', ("mixed",)),
    "legs": (
        '[[workers]]\nname = "p"\nrole = "prefill"\ncount = 2\n[[workers]]\nname = "d"\nrole = "decode"\ncount = 2\n',
        ("prefill", "decode"),
    ),
    "legs, destination first": (
        '[[workers]]\nname = "p"\nrole = "prefill"\ncount = 2\n[[workers]]\nname = "d"\nrole = "decode"\ncount = 2\n'
        '[disaggregation]\norder = "decode-first"\n',
        ("prefill", "decode"),
    ),
}


def schedule(rng: random.Random, roles: tuple[str, ...]) -> str:
    at_s = sorted(round(rng.uniform(0.1, 25), 3) for _ in range(12))
    return ", ".join(f"{at} {' '.join(f'{role}={rng.randint(1, 5)}' for role in roles)}" for at in at_s)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("migrations", [0, 9])
@pytest.mark.parametrize("kind", CLUSTERS)
def test_no_schedule_loses_a_request(kind: str, migrations: int, seed: int, tmp_path: Path) -> None:
    rng = random.Random(f"{kind} {migrations} {seed}")
    groups, roles = CLUSTERS[kind]
    trace, scenario, file = tmp_path / "t.csv", tmp_path / "s.toml", tmp_path / "c.toml"
    at_s = sorted(round(rng.uniform(0, 25), 3) for _ in range(150))
    rows = [f"{at},{rng.randint(1, 4000)},{rng.choice([1, 2, 50, 900])}\n" for at in at_s]
    trace.write_text("arrival_s,isl,osl\n" + "".join(rows), encoding="utf-8")
    scenario.write_text('version = 1\nfaults = []\nexpect = [{invariants = "all"}]\n', encoding="utf-8")
    file.write_text(
        groups
        + f'[planner]\nname = "schedule"\nschedule = "{schedule(rng, roles)}"\ndrain_timeout_s = 1\n'
        + "[resilience]\ngrace_s = 0.5\n"
        + (f"migration_limit = {migrations}\n" if migrations else ""),
        encoding="utf-8",
    )
    names = [line.split('"')[1] + "." for line in groups.splitlines() if line.startswith("name")] or [""]
    startup_s = rng.choice([0, 3])
    sets = ["router.mode=least-loaded", *(f"workers.{name}startup_s={startup_s}" for name in names)]
    flags: dict[str, object] = {"--faults": str(scenario)}
    done = [run(trace, tmp_path / str(leap), *sets, flags=flags, config_file=file, leap=leap) for leap in (True, False)]
    for one in done:
        assert one.report.counts.completed == len(rows)
        assert one.requests("output_tokens") == one.requests("osl")
    tables = [pq.read_table(one.folder / "requests.parquet") for one in done]
    assert tables[0].equals(tables[1])
