"""TensorRT-LLM, ranks in step and speculation do what they do block by block and step by step, leaping or not."""

from __future__ import annotations

from dataclasses import replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from naive_engine import Job, NaiveEngine, tokens_of
from naive_trtllm import NaiveGroup, NaiveTrtllm
from simulate import KEY_TOKENS, Seen, engine_settings, leap_or_not, simulate
from test_engine_against_naive import _agree, engines, replace_arrival, traces

from twin.engine.settings import EngineSettings, Speculation
from twin.engine.trtllm import TrtllmSettings
from twin.mocker.demand import Row
from twin.perf.fixed import FixedLatency
from twin.perf.polynomial import PolynomialLatency
from twin.perf.protocol import LatencyModel

POLICIES = st.sampled_from(["guaranteed_no_evict", "max_utilization"])
WAITS = st.sampled_from([(0, 0.0), (0, 0.0), (2, 1.0), (5, 0.5), (30, 0.1), (30, 1.0)])
BALANCES = st.sampled_from([0, 0, 2, 5, 30])
FIXED = FixedLatency(prefill_s=0.005, prefill_s_per_token=0.001, decode_s=0.01)


def trtllm_settings(options: dict, policy: str, **more: object) -> TrtllmSettings:
    base = engine_settings(**options)
    sizes = {name: getattr(base, name) for name in base.__dataclass_fields__}
    return TrtllmSettings(
        **sizes | {"exclusive_prefill": False, "preemption": "lifo", "capacity_policy": policy} | more
    )


def naive_of(
    options: dict, latency: LatencyModel, policy: str | None, wait: tuple[int, float] = (0, 0.0)
) -> NaiveEngine:
    kind = NaiveEngine if policy is None else NaiveTrtllm
    engine = kind(
        latency,
        block_size=options["block_size"],
        blocks=options["blocks"],
        max_num_seqs=options["max_num_seqs"],
        budget=options["max_num_batched_tokens"],
        caching=options["prefix_caching"],
        chunked=options["chunked_prefill"] and not (options["exclusive_prefill"] and policy is None),
        exclusive=options["exclusive_prefill"] and policy is None,
        preemption=options["preemption"] if policy is None else "lifo",
    )
    if isinstance(engine, NaiveTrtllm):
        engine.guaranteed = policy == "guaranteed_no_evict"
        engine.wait_steps, engine.wait_ratio = wait
    return engine


def waiting(wait: tuple[int, float]) -> dict:
    return {"batch_wait_iters": wait[0], "batch_wait_ratio": wait[1]}


def jobs_of(rows: list[Row]) -> list[Job]:
    return [Job(r.row, r.arrival_s or 0.0, tokens_of(r.keys or [], KEY_TOKENS, r.isl), r.osl) for r in rows]


def untied(rows: list[Row]) -> list[Row]:
    return [replace_arrival(r, (r.arrival_s or 0.0) * 1.000123 + 1e-4 * r.row) for r in rows]


def compare(seen: Seen, done: list[Job], tolerance_s: float) -> None:
    assert seen.ended.keys() == {job.row for job in done}
    for job in done:
        _agree(job, *seen.ended[job.row], tolerance_s)


# ---------------------------------------------------------------- against the naive ones


@given(traces(), engines(), POLICIES, WAITS)
def test_trtllm_agrees_to_the_instant_with_ties(
    rows: list[Row], options: dict, policy: str, wait: tuple[int, float]
) -> None:
    naive = naive_of(options, FIXED, policy, wait)
    naive.run(jobs_of(rows))
    seen = simulate(rows, [(trtllm_settings(options, policy, **waiting(wait)), FIXED)], key_tokens=KEY_TOKENS)
    compare(seen, naive.done, 1e-12)
    if policy == "guaranteed_no_evict":
        assert not any(request.sequence.readmissions for request, _ in seen.ended.values() if request.sequence)


@given(traces(), engines(), POLICIES, WAITS)
def test_trtllm_agrees_with_step_times_that_depend_on_context(
    rows: list[Row], options: dict, policy: str, wait: tuple[int, float]
) -> None:
    rows = untied(rows)
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    naive = naive_of(options, latency, policy, wait)
    naive.run(jobs_of(rows))
    seen = simulate(rows, [(trtllm_settings(options, policy, **waiting(wait)), latency)], key_tokens=KEY_TOKENS)
    compare(seen, naive.done, 1e-6)


@given(traces(), engines(), st.integers(2, 4), st.none() | POLICIES, st.sampled_from([1, 1, 3, 4]), BALANCES)
def test_ranks_in_step_agree(
    rows: list[Row], options: dict, ranks: int, policy: str | None, interval: int, balance: int
) -> None:
    if options["exclusive_prefill"]:
        interval = 1  # prompts first: the interval has no part to play, and is refused
    balance = balance if policy is not None else 0
    group = NaiveGroup([naive_of(options, FIXED, policy) for _ in range(ranks)], interval, balance)
    group.run(jobs_of(rows))
    seen = simulate(rows, [(ranked(options, policy, ranks, interval, balance), FIXED)], key_tokens=KEY_TOKENS)
    compare(seen, group.done, 1e-12)


@given(traces(), engines(), st.integers(2, 3), st.none() | POLICIES, BALANCES)
def test_ranks_wait_for_the_slowest(
    rows: list[Row], options: dict, ranks: int, policy: str | None, balance: int
) -> None:
    rows = untied(rows)
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    balance = balance if policy is not None else 0
    group = NaiveGroup([naive_of(options, latency, policy) for _ in range(ranks)], balance=balance)
    group.run(jobs_of(rows))
    seen = simulate(rows, [(ranked(options, policy, ranks, balance=balance), latency)], key_tokens=KEY_TOKENS)
    compare(seen, group.done, 1e-6)


def ranked(options: dict, policy: str | None, ranks: int, interval: int = 1, balance: int = 0) -> EngineSettings:
    more = {"ranks": ranks, "prefill_interval": interval, "balance_wait": balance}
    return engine_settings(**options, **more) if policy is None else trtllm_settings(options, policy, **more)


# ---------------------------------------------------------------- leaping


@examples(150)
@given(
    traces(),
    engines(),
    st.none() | POLICIES,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 4]),
    st.booleans(),
    st.sampled_from([0.0, 0.004]),
    WAITS,
    BALANCES,
)
def test_leaping_changes_nothing(
    rows: list[Row],
    options: dict,
    policy: str | None,
    ranks: int,
    interval: int,
    events: bool,
    lag_s: float,
    wait: tuple[int, float],
    balance: int,
) -> None:
    if options["exclusive_prefill"]:
        interval = 1
    leaping_on = ranked(options, policy, ranks, interval, balance if ranks > 1 and policy is not None else 0)
    if ranks == 1 and policy is not None:
        leaping_on = replace(leaping_on, **waiting(wait))
    same_either_way(rows, leaping_on, events=events, lag_s=lag_s)


@given(
    traces(),
    engines(),
    st.none() | POLICIES,
    st.sampled_from([1, 2]),
    st.sampled_from([(), (0.0,), (1.0, 0.5)]),
    WAITS,
    BALANCES,
)
def test_leaping_is_no_matter_with_speculation(
    rows: list[Row],
    options: dict,
    policy: str | None,
    ranks: int,
    rates: tuple[float, ...],
    wait: tuple[int, float],
    balance: int,
) -> None:
    options = options | {"exclusive_prefill": False}
    more: dict = {"speculation": Speculation(accept_rates=rates, seed=7)}
    if policy is not None:
        more |= {"balance_wait": balance} if ranks > 1 else waiting(wait)
    same_either_way(rows, replace(ranked(options, policy, ranks), **more), events=True, lag_s=0.0)


@examples(150)
@given(traces(), engines(), POLICIES, st.sampled_from([2, 3]), st.sampled_from([2, 5, 30]), st.booleans())
def test_leaping_changes_nothing_where_ranks_wait_for_each_other(
    rows: list[Row], options: dict, policy: str, ranks: int, balance: int, events: bool
) -> None:
    same_either_way(rows, ranked(options, policy, ranks, balance=balance), events=events, lag_s=0.0)


def same_either_way(rows: list[Row], setting: EngineSettings, *, events: bool, lag_s: float) -> None:
    leap_or_not(rows, setting, PolynomialLatency(setting.blocks * setting.block_size), events=events, lag_s=lag_s)


# ---------------------------------------------------------------- speculation


@given(traces(), engines(), st.none() | POLICIES)
def test_drafts_that_never_hold_change_nothing_but_room(rows: list[Row], options: dict, policy: str | None) -> None:
    """With chance 0 every burst is one token; in a pool with room for the drafts the run is the one without them."""
    options = options | {"blocks": 2000, "exclusive_prefill": False}
    plain = ranked(options, policy, 1)
    drafted = replace(plain, speculation=Speculation(accept_rates=(0.0, 0.5), seed=1))
    runs = [simulate(rows, [(each, FIXED)], key_tokens=KEY_TOKENS) for each in (plain, drafted)]
    assert runs[0].sinks.requests == runs[1].sinks.requests


@given(traces(), engines(), st.none() | POLICIES, st.integers(1, 5))
def test_drafts_that_always_hold_come_in_full_bursts(
    rows: list[Row], options: dict, policy: str | None, drafts: int
) -> None:
    """One request at a time: a first token, then bursts of 1 + drafts, the last one cut."""
    options = options | {"blocks": 2000, "max_num_seqs": 1, "max_num_batched_tokens": 4096, "exclusive_prefill": False}
    speculation = Speculation(accept_rates=(1.0,) * drafts, seed=1)
    seen = simulate(
        rows, [(replace(ranked(options, policy, 1), speculation=speculation), FIXED)], key_tokens=KEY_TOKENS
    )
    for request, status in seen.ended.values():
        seq = request.sequence
        assert status == "completed"
        assert seq is not None
        assert seq.outputs == request.row.osl
        assert seq.first_token_s is not None
        assert seq.last_token_s is not None
        steps = -(-(seq.outputs - 1) // (1 + drafts))
        assert abs(seq.last_token_s - seq.first_token_s - steps * 0.01) < 1e-9
