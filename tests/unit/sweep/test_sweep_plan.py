"""Grids and lists into points: what is refused before the first run, what is a failed point, and what names a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import ConfigError
from twin.sweep_plan import MAX_RUNS, NO_LIST, Listed, Plan, Vary, parse_vary, plan_sweep, read_list


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "two.csv"
    path.write_text("arrival_s,isl,osl\n0,100,10\n0.5,200,20\n", encoding="utf-8")
    return path


def planned(
    trace: Path | None,
    *grid: str,
    listed: Listed = NO_LIST,
    seeds: int = 1,
    sets: tuple[str, ...] = (),
    **flags: object,
) -> Plan:
    given = {"TRACE": trace} | {f"--{name}": value for name, value in flags.items()}
    return plan_sweep(
        file=None, flags=given, sets=sets, grid=[parse_vary(one) for one in grid], listed=listed, seeds=seeds
    )


# ---------------------------------------------------------------- the words of the line


def test_a_varied_key_has_its_values_as_text() -> None:
    assert parse_vary("router.mode=kv, random") == Vary("router.mode", ("kv", "random"))


def test_a_value_with_commas_stands_in_quotes() -> None:
    given = 'workers.engine.accept_rates="0.85,0.3",0.5'
    assert parse_vary(given) == Vary("workers.engine.accept_rates", ("0.85,0.3", "0.5"))


@pytest.mark.parametrize("given", ["router.mode", "router.mode=", "=kv", "router.mode=kv,,random"])
def test_a_key_without_values_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="--vary"):
        parse_vary(given)


def test_a_value_that_is_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="the value 2 is given 2 times"):
        parse_vary("workers.count=2,3,2")


@pytest.mark.parametrize("given", ["router.mode=random,Random", "trace.speedup=2,2.0"])
def test_values_that_mean_the_same_are_refused(trace: Path, given: str) -> None:
    with pytest.raises(ConfigError, match=r"is the same point as .*; once is enough"):
        planned(trace, given)


# ---------------------------------------------------------------- points


def test_a_grid_has_every_combination_the_last_key_fastest(trace: Path) -> None:
    plan = planned(trace, "workers.count=1,2", "router.mode=kv,random,round-robin")
    assert plan.keys == ("workers.count", "router.mode")
    assert plan.points == (
        ("1", "kv"), ("1", "random"), ("1", "round-robin"), ("2", "kv"), ("2", "random"), ("2", "round-robin")
    )  # fmt: skip
    config = plan.runs[4].recipe.config()
    assert (config.workers[0].count, config.router.mode) == (2, "random")
    assert config.origins["router.mode"] == "--vary"


def test_a_list_is_taken_point_by_point_with_the_whole_grid(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("workers.count,router.mode\n1,kv\n\n3,random\n", encoding="utf-8")
    plan = planned(trace, "workers.tp=2,4", listed=read_list(path))
    assert plan.points == (("1", "kv", "2"), ("1", "kv", "4"), ("3", "random", "2"), ("3", "random", "4"))
    assert plan.runs[2].recipe.config().origins["router.mode"] == f"{path}:4"


def test_a_toml_list_may_nest_its_keys(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "points.toml"
    path.write_text(
        '[[points]]\nworkers.count = 1\nrouter.mode = "kv"\n[[points]]\n"router.mode" = "random"\nworkers.count = 2\n',
        encoding="utf-8",
    )
    listed = read_list(path)
    assert dict(zip(listed.keys, listed.rows[1][1], strict=True)) == {"workers.count": "2", "router.mode": "random"}
    assert len(planned(trace, listed=listed).points) == 2


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("p.csv", "router.mode,workers.count\nkv\n", "p.csv:2: has 1 values where the header has 2"),
        ("p.csv", "router.mode\nkv\nkv\n", r"p.csv:3: is the same point as .*p.csv:2"),
        ("p.csv", "router.mode\n", "has no points"),
        ("p.csv", "router.mode,\nkv,1\n", "p.csv:1: the first line must name the keys"),
        (
            "p.toml",
            "[[points]]\na = 1\n[[points]]\nb = 1\n",
            r"point 2 does not have the keys of the first one \(a, b\)",
        ),
        ("p.toml", "[points]\na = 1\n", r"begin each point with the line \[\[points\]\]"),
        ("p.toml", "points = [", "not valid TOML"),
        ("p.txt", "", "must end in .csv"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused_with_its_place(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=complaint):
        read_list(tmp_path / name)


def test_seeds_go_up_from_the_configured_one(trace: Path) -> None:
    plan = planned(trace, "workers.count=1,2", seeds=3, seed="7")
    assert plan.seeds == (7, 8, 9)
    assert [(run.point, run.seed, run.recipe.config().seed) for run in plan.runs] == [
        (0, 7, 7), (0, 8, 8), (0, 9, 9), (1, 7, 7), (1, 8, 8), (1, 9, 9)
    ]  # fmt: skip


# ---------------------------------------------------------------- refused before the first run


@pytest.mark.parametrize(
    ("grid", "complaint"),
    [
        (("router.mod=kv,random",), "there is no key mod in .router.; did you mean mode"),
        (("rooter.mode=kv,random",), "there is no table .rooter.; did you mean router"),
        (("workers.count=1,0",), r'workers.pool.count = "0": must be 1 or more'),
        (("router.mode=kv,round-robin", "workers.count=1,many"), r'"many": must be a whole number'),
        (("router.mode=kv,kvv",), "did you mean kv"),
        (("workers.count=1,2", "workers.count=3,4"), "workers.count is varied 2 times"),
        ((), "nothing to vary"),
    ],
)
def test_a_wrong_key_or_value_is_refused_whatever_else_is_varied(
    trace: Path, grid: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        planned(trace, *grid)


def test_what_is_varied_is_not_given_as_well(trace: Path) -> None:
    with pytest.raises(ConfigError, match=r"workers\.count is varied, and --workers is given as well"):
        planned(trace, "workers.count=1,2", workers="3")
    with pytest.raises(ConfigError, match=r"workers\.pool\.count is varied, and --workers is given as well"):
        planned(trace, "workers.pool.count=1,2", workers="3")
    assert len(planned(trace, "workers.latency.model=roofline", model="llama-3.1-70b").points) == 1
    with pytest.raises(ConfigError, match=r"router\.mode is varied, and --set router.mode=kv is given"):
        planned(trace, "router.mode=kv,random", sets=("router.mode=kv",))
    with pytest.raises(ConfigError, match="both say which seeds"):
        planned(trace, "seed=1,2", seeds=2)


def test_a_missing_trace_is_told_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        planned(tmp_path / "none.csv", "workers.count=1,2")
    with pytest.raises(ConfigError, match="no trace given"):
        planned(None, "workers.count=1,2")


def test_a_grid_beyond_all_measure_is_refused_at_once(trace: Path) -> None:
    many = ",".join(str(n) for n in range(1, 201))
    with pytest.raises(ConfigError, match=f"would be 40,000 runs, the limit is {MAX_RUNS:,}"):
        planned(trace, f"workers.count={many}", f"workers.engine.max_num_seqs={many}")


def test_a_combination_that_cannot_be_is_a_failed_point_and_no_more(trace: Path) -> None:
    plan = planned(trace, "router.mode=kv,random", "router.router_temperature=0,0.5")
    errors = {plan.points[run.point]: run.error for run in plan.runs}
    assert [values for values, error in errors.items() if error] == [("random", "0.5")]
    assert "router.router_temperature has no effect: mode random does not read it" in str(errors["random", "0.5"])


# ---------------------------------------------------------------- what names a run


def test_a_run_keeps_its_name_when_the_grid_grows(trace: Path) -> None:
    first = {run.folder for run in planned(trace, "workers.count=1,2").runs}
    grown = {run.folder for run in planned(trace, "workers.count=4,2,1").runs}
    assert first < grown
    assert len(grown) == 3


def test_a_run_gets_another_name_when_the_trace_has_other_rows(trace: Path) -> None:
    before = planned(trace, "workers.count=1").runs[0].folder
    trace.write_text("arrival_s,isl,osl\n0,100,11\n", encoding="utf-8")
    assert planned(trace, "workers.count=1").runs[0].folder != before


def test_two_files_of_one_name_are_two_runs(trace: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / trace.name
    other.parent.mkdir()
    other.write_text("arrival_s,isl,osl\n0,100,11\n", encoding="utf-8")
    plan = planned(None, f"trace.path={trace},{other}")
    assert len({run.folder for run in plan.runs}) == 2
    assert all("/" not in run.folder for run in plan.runs)
