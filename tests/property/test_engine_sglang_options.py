"""SGLang with ranks, draft tokens and a host tier does what it does page by page and step by step, leaping or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from naive_sglang import Job, NaiveHost, NaiveSglang
from naive_trtllm import NaiveGroup
from simulate import KEY_TOKENS, Seen, leap_or_not, sglang_settings, simulate
from test_engine_against_naive import traces
from test_engine_sglang import engines, jobs_of, naive_of
from test_engine_trtllm_and_ranks import FIXED, compare, untied

from policies.cluster.draws import draw
from policies.cluster.ids import RequestId
from twin.engine.settings import EngineSettings, HostTierSettings, Speculation
from twin.mocker.demand import Row
from twin.perf.polynomial import PolynomialLatency
from twin.perf.protocol import LatencyModel

RATES = st.sampled_from([(0.7, 0.5), (1.0, 0.5, 0.9), (0.0,), (0.9,) * 5])
SEED = 3


@st.composite
def tiers(draw: st.DrawFn) -> HostTierSettings:
    load_s = draw(st.sampled_from([1e-6, 4e-4, 5e-3]))
    return HostTierSettings(
        blocks=draw(st.integers(1, 90)),
        block_bytes=1000,
        load_bytes_per_s=1000 / load_s,
        trigger=draw(st.sampled_from(["on_evict", "on_store"])),
        overlap=draw(st.booleans()),
    )


def host_of(tier: HostTierSettings | None) -> NaiveHost | None:
    if tier is None:
        return None
    load_s = tier.block_bytes / tier.load_bytes_per_s
    return NaiveHost(tier.blocks, load_s, on_store=tier.trigger == "on_store", overlap=tier.overlap)


def holds_at(rates: tuple[float, ...]) -> Callable[[Job, int], bool]:
    """Whether the k-th draft of a job holds: a function of the seed, the request and the position alone."""
    return lambda job, k: draw(SEED, "drafts", RequestId(str(job.row)), job.outputs * 8 + k) < rates[k]


def naive(
    options: dict,
    latency: LatencyModel,
    *,
    rates: tuple[float, ...] = (),
    tier: HostTierSettings | None = None,
) -> NaiveSglang:
    return naive_of(options, latency, host=host_of(tier), drafts=len(rates), holds=holds_at(rates))


def settings_of(
    options: dict, *, ranks: int = 1, rates: tuple[float, ...] = (), tier: HostTierSettings | None = None
) -> EngineSettings:
    speculation = Speculation(accept_rates=rates, seed=SEED) if rates else None
    if ranks > 1:
        options = options | {"recv_interval": 1}  # refused with ranks
    return sglang_settings(**options, ranks=ranks, speculation=speculation, host=tier)


def run(rows: list[Row], setting: EngineSettings, latency: LatencyModel) -> Seen:
    return simulate(rows, [(setting, latency)], key_tokens=KEY_TOKENS)


def cached(options: dict) -> dict:
    return options | {"prefix_caching": True}


# ---------------------------------------------------------------- against the naive ones


@given(traces(), engines(), st.integers(2, 4))
def test_ranks_in_step_agree(rows: list[Row], options: dict, ranks: int) -> None:
    group = NaiveGroup([naive(options, FIXED) for _ in range(ranks)])  # type: ignore[misc]
    group.run(jobs_of(rows))
    compare(run(rows, settings_of(options, ranks=ranks), FIXED), group.done, 1e-12)


@given(traces(), engines(), st.integers(2, 3))
def test_ranks_wait_for_the_slowest(rows: list[Row], options: dict, ranks: int) -> None:
    rows = untied(rows)
    latency = PolynomialLatency(options["blocks"] * options["block_size"])
    group = NaiveGroup([naive(options, latency) for _ in range(ranks)])  # type: ignore[misc]
    group.run(jobs_of(rows))
    compare(run(rows, settings_of(options, ranks=ranks), latency), group.done, 1e-6)


@given(traces(), engines(), RATES)
def test_drafts_agree(rows: list[Row], options: dict, rates: tuple[float, ...]) -> None:
    engine = naive(options, FIXED, rates=rates)
    engine.run(jobs_of(rows))
    compare(run(rows, settings_of(options, rates=rates), FIXED), engine.done, 1e-12)


@examples(150)
@given(traces(), engines(), tiers())
def test_a_host_tier_agrees(rows: list[Row], options: dict, tier: HostTierSettings) -> None:
    engine = naive(cached(options), FIXED, tier=tier)
    engine.run(jobs_of(rows))
    seen = run(rows, settings_of(cached(options), tier=tier), FIXED)
    compare(seen, engine.done, 1e-12)
    for job in engine.done:
        seq = seen.ended[job.row][0].sequence
        assert seq is not None
        assert seq.host_blocks == job.from_host
    assert engine.host is not None
    assert seen.world.tiers["loaded_blocks"] == engine.host.loaded


@given(traces(), engines(), st.integers(1, 3), RATES, tiers())
def test_all_of_them_agree(
    rows: list[Row], options: dict, ranks: int, rates: tuple[float, ...], tier: HostTierSettings
) -> None:
    options = cached(options) | {"recv_interval": 1}
    group = NaiveGroup([naive(options, FIXED, rates=rates, tier=tier) for _ in range(ranks)])  # type: ignore[misc]
    group.run(jobs_of(rows))
    compare(run(rows, settings_of(options, ranks=ranks, rates=rates, tier=tier), FIXED), group.done, 1e-12)


# ---------------------------------------------------------------- leaping


@examples(150)
@given(
    traces(),
    engines(),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([(), (), (0.7, 0.5)]),
    st.none() | tiers(),
    st.booleans(),
    st.sampled_from([0.0, 0.004]),
)
def test_leaping_changes_nothing(
    rows: list[Row],
    options: dict,
    ranks: int,
    rates: tuple[float, ...],
    tier: HostTierSettings | None,
    events: bool,
    lag_s: float,
) -> None:
    if tier is not None:
        options = cached(options)
    setting = settings_of(options, ranks=ranks, rates=rates, tier=tier)
    leap_or_not(rows, setting, PolynomialLatency(setting.blocks * setting.block_size), events=events, lag_s=lag_s)


# ---------------------------------------------------------------- drafts


@given(traces(), engines())
def test_drafts_that_never_hold_change_nothing_but_room(rows: list[Row], options: dict) -> None:
    options = options | {"blocks": 4000}
    plain = settings_of(options)
    drafted = replace(plain, speculation=Speculation(accept_rates=(0.0, 0.5), seed=1))
    assert run(rows, plain, FIXED).sinks.requests == run(rows, drafted, FIXED).sinks.requests


@given(traces(), engines(), st.integers(1, 5))
def test_drafts_that_always_hold_come_in_full_bursts(rows: list[Row], options: dict, drafts: int) -> None:
    """One request at a time: a first token, then bursts of 1 + drafts, the last one cut."""
    options = options | {"blocks": 4000, "max_num_seqs": 1, "chunked_prefill_size": 4096, "max_prefill_tokens": 4096}
    seen = run(rows, settings_of(options, rates=(1.0,) * drafts), FIXED)
    for request, status in seen.ended.values():
        seq = request.sequence
        assert status == "completed"
        assert seq is not None
        assert seq.first_token_s is not None
        assert seq.last_token_s is not None
        steps = -(-(seq.outputs - 1) // (1 + drafts))
        assert abs(seq.last_token_s - seq.first_token_s - steps * 0.01) < 1e-9
