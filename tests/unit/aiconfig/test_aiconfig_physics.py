"""Whose step times a search rests on, how far off these may be, and what lies beyond what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from aiconfig_builders import agg, disagg, estimated

from aiconfig.closed_form import ClosedForm
from aiconfig.deployment import Setting, from_config, to_config
from aiconfig.estimate import SIMULATED, Band, Estimate, Load
from aiconfig.judge import judge
from aiconfig.memory import Fit, fit
from aiconfig.physics import SHIPPED, Physics, physics_of
from aiconfig.request import search_request
from aiconfig.search import search
from aiconfig.workload import Workload
from policies.errors import ConfigError
from reports.sla import parse_sla
from twin.config import LatencyConfig
from twin.config_read import load

WORKLOAD = Workload(isl=1024, osl=256)
SEVENTY = {"model": "llama-3.1-70b", "tp": 4, "weights": "fp8"}


def priced(candidate: object = None, users: int = 8, physics: Physics = SHIPPED, **given: object) -> Estimate:
    one = candidate if candidate is not None else agg(**(SEVENTY | given))
    room = fit(one, WORKLOAD)  # type: ignore[arg-type]
    assert isinstance(room, Fit)
    found = ClosedForm(WORKLOAD, physics).estimate(one, Load(users=users), room)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_an_estimate_has_the_bands_of_the_calibration_and_what_they_have_beside_it() -> None:
    found = priced()
    assert found.beyond == ()
    ttft, tpot = found.bands["ttft"], found.bands["tpot"]
    assert ttft is not None
    assert tpot is not None
    assert 0.0 < tpot.typical < ttft.typical < (ttft.wide or 0.0)
    assert ttft.level == tpot.level == "the same engine, GPU family and model"
    assert 0.02 < ttft.outside_s < 0.1
    assert tpot.outside_s == 0.0


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (agg(model="llama-3.1-70b", tp=4, pp=2, weights="fp8"), "2 pipeline stages"),
        (disagg(), "prefill and decode apart"),
        (agg(model="qwen2.5-7b"), "this model was not measured there"),
    ],
)
def test_what_was_never_measured_is_named(one: object, text: str) -> None:
    assert any(text in line for line in priced(one).beyond)


def test_a_load_beyond_what_was_measured_is_named() -> None:
    assert priced(users=100).beyond == ()
    (line,) = priced(users=300).beyond
    assert line.startswith("batch of 2")
    assert line.endswith(": measured up to 128")


def test_sure_is_only_what_holds_with_the_band_and_the_path_outside_the_engine() -> None:
    band = Band(typical=0.1, wide=0.2, level="measured near", outside_s=0.05)
    one = estimated(agg(), level=SIMULATED, bands={"ttft": band, "tpot": band}, ttft={"p95": 0.1})
    verdicts = {ms: judge(one, parse_sla(f"ttft={ms}ms@p95")).verdict for ms in (187, 188, 100, 99, 84, 83)}
    # (100 + 50) / 0.8 = 187.5 ms at worst, 100 / 1.2 = 83.3 ms at best
    assert verdicts == {188: "meets", 187: "likely", 100: "likely", 99: "unlikely", 84: "unlikely", 83: "fails"}
    assert judge(replace(one, unmeasured=("no such GPU",)), parse_sla("ttft=1s@p95")).verdict == "likely"
    assert judge(replace(one, beyond_load=("more than that",)), parse_sla("ttft=1s@p95")).verdict == "likely"
    unbounded = replace(band, wide=1.0)
    far = replace(one, bands={"ttft": unbounded, "tpot": unbounded})
    assert judge(far, parse_sla("ttft=1000s@p95")).verdict == "likely"


def test_a_strict_search_finds_only_what_was_measured() -> None:
    given = {"model": "llama-3.1-70b", "gpus": 8, "load": Load(users=16), "modes": ("agg",)}
    loose, strict = (search(search_request({**given, "strict": strict})) for strict in (False, True))
    assert any(one.estimate.beyond for one in loose.ranked)
    assert strict.ranked
    assert not any(one.estimate.beyond for one in strict.ranked)
    assert strict.counts["uncalibrated"] > 0


def test_a_strict_search_without_a_load_stays_within_the_measured_batches() -> None:
    given = {"model": "llama-3.1-70b", "gpus": 4, "modes": ("agg",), "sla": parse_sla("tpot=1s@mean"), "strict": True}
    best = search(search_request(given)).best
    assert best is not None
    assert best.load.users is not None
    assert 100 < best.load.users / best.candidate.pools[0].replicas < 140  # measured up to 128 decodes of a worker


def test_a_calibration_of_ones_own_prices_the_search_and_goes_into_best_toml(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    rates = "".join(f"{name} = 0.5\n" for name in ("e_bw", "e_gemm", "e_moe_bw", "e_moe", "e_kv", "e_attn", "e_link"))
    file.write_text(f"[mine]\n{rates}alpha_s = 1e-6\nt_launch_s = 1e-5\n", encoding="utf-8")
    physics = Physics(coefficients=str(file))
    assert priced(physics=physics).value("tpot", "mean") != priced().value("tpot", "mean")
    config = to_config(agg(), WORKLOAD, Load(users=4), tmp_path / "rows", Setting(physics=physics))
    latency = config.workers[0].latency
    assert latency.params["coefficients"] == str(file)
    assert physics_of(latency, "there") == physics
    assert from_config(config) == agg()


def test_coefficients_are_found_beside_the_configuration_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "c.toml").write_text('[workers.latency]\ncoefficients = "own.toml#mine"\n', encoding="utf-8")
    config = load(tmp_path / "inner" / "c.toml")
    assert config.workers[0].latency.params["coefficients"] == str(tmp_path / "inner" / "own.toml#mine")


@pytest.mark.parametrize("name", ["calibratd", "nowhere.toml"])
def test_coefficients_that_are_not_there_are_refused_at_once(name: str) -> None:
    with pytest.raises(ConfigError, match=r"calibrated|nowhere\.toml: cannot be read"):
        search_request({"coefficients": name})


def test_what_a_search_cannot_price_is_named() -> None:
    with pytest.raises(ConfigError, match="candidates are priced by the model 'roofline'"):
        physics_of(LatencyConfig(model="polynomial"), "workers.a.latency")
