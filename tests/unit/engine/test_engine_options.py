"""TensorRT-LLM admission, ranks and speculation in cases that a person can follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simulate import Seen, engine_settings, simulate, trace_row

from policies.cluster.blocks import ContentTree
from policies.cluster.ids import RequestId, WorkerId
from twin.engine.build import build_engine
from twin.engine.drafts import Drafts
from twin.engine.ranks import RankedEngine, slowest
from twin.engine.sequence import Sequence
from twin.engine.settings import Speculation
from twin.engine.trtllm import TrtllmSettings
from twin.perf.fixed import FixedLatency
from twin.perf.polynomial import PolynomialLatency
from twin.perf.protocol import DecodePiece

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.010)


def trtllm(policy: str, **changes: object) -> TrtllmSettings:
    base = engine_settings(**changes)
    return TrtllmSettings(**{name: getattr(base, name) for name in base.__dataclass_fields__}, capacity_policy=policy)


def sequence(name: str, isl: int, osl: int) -> Sequence:
    tree = ContentTree(16, 16)
    own = tree.private()
    return Sequence(RequestId(name), isl, osl, tree.path([1, 2, 3, 4], isl), own)


# ---------------------------------------------------------------- TensorRT-LLM


def test_guaranteed_no_evict_waits_until_a_newcomer_can_grow_to_its_end() -> None:
    """10 blocks of 4, and each of two will fill 6: the second waits for the end of the first, or is preempted later."""
    rows = [trace_row(0, 0.0, 8, 16), trace_row(1, 0.0, 8, 16)]
    sizes: dict = {"block_size": 4, "blocks": 10, "prefix_caching": False}
    careful = simulate(rows, [(trtllm("guaranteed_no_evict", **sizes), TOY)])
    bold = simulate(rows, [(trtllm("max_utilization", **sizes), TOY)])
    assert careful.ms("admit_s") == [0.0, 158.0]  # 8 tokens of prompt, 15 decode steps
    assert bold.ms("admit_s") == [0.0, 0.0]
    assert preemptions(careful) == [0, 0]
    assert preemptions(bold) == [0, 1]


def test_max_utilization_preempts_the_newest() -> None:
    rows = [trace_row(n, 0.001 * n, 8, 20) for n in range(3)]
    seen = simulate(rows, [(trtllm("max_utilization", block_size=4, blocks=10, prefix_caching=False), TOY)])
    assert preemptions(seen)[0] == 0
    assert all(preemptions(seen)[1:])
    assert {status for _, status in seen.ended.values()} == {"completed"}


def preemptions(seen: Seen) -> list[int]:
    return [request.sequence.readmissions for _, (request, _) in sorted(seen.ended.items()) if request.sequence]


def test_a_prompt_that_is_cached_whole_costs_a_decode() -> None:
    rows = [trace_row(0, 0.0, 32, 2, [1, 2]), trace_row(1, 1.0, 32, 2, [1, 2])]
    seen = simulate(rows, [(trtllm("guaranteed_no_evict"), TOY)], key_tokens=16)
    assert seen.ms("first_token_s") == [32.0, 10.0]
    vllm = simulate(rows, [(engine_settings(), TOY)], key_tokens=16)
    assert vllm.ms("first_token_s") == [32.0, 16.0]  # the last block is computed again


def test_outputs_are_cut_to_the_pool_and_a_prompt_that_fills_it_is_refused() -> None:
    rows = [trace_row(0, 0.0, 30, 20), trace_row(1, 0.0, 40, 1)]
    seen = simulate(rows, [(trtllm("guaranteed_no_evict", block_size=4, blocks=10), TOY)])
    request, status = seen.ended[0]
    assert status == "completed"
    assert request.sequence is not None
    assert request.sequence.outputs == 10
    assert seen.ended[1][1] == "rejected"


# ---------------------------------------------------------------- ranks


def test_tokens_of_all_ranks_appear_at_the_end_of_the_slowest() -> None:
    """40 and 10 prompt tokens at once: both first tokens after 40 ms, then in step."""
    rows = [trace_row(0, 0.0, 40, 3), trace_row(1, 0.0, 10, 3)]
    seen = simulate(rows, [(engine_settings(ranks=2), TOY)])
    assert seen.ms("first_token_s") == [40.0, 40.0]
    assert seen.ms("last_token_s") == [60.0, 60.0]


def test_a_rank_without_work_does_not_hold_up_the_others() -> None:
    rows = [trace_row(0, 0.0, 10, 3), trace_row(1, 1.0, 10, 3)]
    seen = simulate(rows, [(engine_settings(ranks=4), TOY)])
    assert seen.ms("last_token_s") == [30.0, 30.0]


def test_the_record_has_one_row_for_all_ranks() -> None:
    rows = [trace_row(n, 0.0, 10, 5) for n in range(4)]
    seen = simulate(rows, [(engine_settings(ranks=2), TOY)])
    steps = [row for row in seen.sinks.steps if row[1] != "gap"]
    prompts, leap = steps[0], steps[1:]
    assert (prompts[7], prompts[8], prompts[9]) == (4, 40, 4)  # prefills, their tokens, running
    assert sum(row[4] for row in leap) == 4
    assert {row[5] for row in leap} == {4}  # decodes
    assert leap[0][6] == 4 * 11  # context tokens
    gaps = sum(row[4] * row[14] for row in seen.sinks.steps)
    assert gaps == 4 * 4


def test_a_block_is_gone_from_a_worker_when_its_last_rank_has_lost_it() -> None:
    """Both ranks cache the same prompt; when one evicts it the worker still has it."""
    settings = engine_settings(block_size=16, blocks=4, ranks=2)
    engine = build_engine(settings, TOY, kv_events=True)
    assert isinstance(engine, RankedEngine)
    tree = ContentTree(16, 16)

    def run(name: str, key: int) -> None:
        engine.submit(Sequence(RequestId(name), 48, 1, tree.path([key, key + 1, key + 2], 48), tree.private()))
        now_s = 0.0
        while (plan := engine.plan(now_s)) is not None:
            now_s = plan.end_s
            engine.commit(plan)

    run("a", 1)  # rank 0
    run("b", 1)  # rank 1
    engine.pool.stored = []
    run("c", 11)  # rank 0 evicts two of its blocks
    assert engine.pool.evictions == 2
    assert engine.pool.removed == []
    run("d", 21)  # rank 1 evicts them too
    assert sum(run.hi - run.lo for run in engine.pool.removed) == 2


def test_the_pace_is_that_of_the_slowest_until_another_overtakes() -> None:
    flat, steep = DecodePiece(0.010, 0.0, 0.0, 1000), DecodePiece(0.009, 0.0001, 0.0, 500)
    assert slowest([flat, steep]) == DecodePiece(0.010, 0.0, 0.0, 10)
    assert slowest([steep, steep]) == steep
    assert slowest([flat, DecodePiece(0.010, 0.001, 0.0, 50)])[3] == 50


@pytest.mark.parametrize("interval", [1, 4])
def test_new_prompts_wait_for_the_groups_next_chance(interval: int) -> None:
    """A request that comes during step 1 starts with step 2, or with step 4."""
    rows = [trace_row(0, 0.0, 10, 20), trace_row(1, 0.0, 10, 20), trace_row(2, 0.015, 10, 2)]
    seen = simulate(rows, [(engine_settings(ranks=2, prefill_interval=interval), TOY)])
    assert seen.ms("admit_s")[2] == (5.0 if interval == 1 else 25.0)


def test_a_worker_announces_all_its_ranks() -> None:
    seen = simulate([trace_row(0, 0.0, 4, 1)], [(engine_settings(ranks=3, blocks=50, max_num_seqs=7), TOY)])
    up = seen.world.workers[WorkerId(0)].up
    assert (up.total_blocks, up.max_num_seqs) == (150, 21)


# ---------------------------------------------------------------- speculation


def test_a_draw_depends_on_the_request_and_its_position_alone() -> None:
    """Alone or in a crowd, preempted or not, a request makes the same bursts."""
    speculation = Speculation(accept_rates=(0.6, 0.5), seed=9)
    alone = [trace_row(0, 0.0, 8, 24)]
    crowd = [*alone, *[trace_row(n, 0.0, 8, 24) for n in range(1, 4)]]
    roomy = engine_settings(block_size=4, speculation=speculation)
    steps = []
    for rows, settings in ((alone, roomy), (crowd, roomy)):
        seen = simulate(rows, [(settings, FixedLatency(prefill_s=0.0, prefill_s_per_token=0.0, decode_s=0.010))])
        seq = seen.ended[0][0].sequence
        assert seq is not None
        assert seq.first_token_s is not None
        assert seq.last_token_s is not None
        steps.append(round((seq.last_token_s - seq.first_token_s) / 0.010))
    assert steps[0] == steps[1]


def test_the_mean_burst_is_what_the_rates_say() -> None:
    """1 + 0.8 + 0.8 * 0.5 = 2.2; variance 0.56, so 20,000 bursts have a mean within 0.02 (4 sigma)."""
    drafts = Drafts(Speculation(accept_rates=(0.8, 0.5), seed=1, in_prefill=True), room_tokens=10**9)
    seq = sequence("r", 10, 10**6)
    seq.computed = seq.length
    made = 0
    for _ in range(20_000):
        burst = drafts.burst(seq)
        made += burst
        seq.outputs += burst
        seq.computed = seq.length
    assert made / 20_000 == pytest.approx(2.2, abs=0.02)


def test_room_for_a_burst_is_taken_before_a_step_and_given_back_after_it() -> None:
    """8 tokens and 5 drafts in blocks of 4: 3 blocks while a step verifies, 2 when none has held."""
    speculation = Speculation(accept_rates=(0.0,) * 5, seed=1)
    engine = build_engine(engine_settings(block_size=4, prefix_caching=False, speculation=speculation), TOY)
    engine.submit(sequence("r", 7, 20))
    first = engine.plan(0.0)
    assert first is not None
    engine.commit(first)
    assert engine.pool.active == 2
    second = engine.plan(first.end_s)
    assert second is not None
    assert engine.pool.active == 4  # 7 computed, 1 now, 5 drafts: 13 tokens
    engine.commit(second)
    assert engine.pool.active == 2
    engine.audit()


def test_a_burst_ends_with_the_output_and_its_gaps_are_nothing() -> None:
    speculation = Speculation(accept_rates=(1.0, 1.0, 1.0), seed=1)
    seen = simulate([trace_row(0, 0.0, 10, 7)], [(engine_settings(speculation=speculation), TOY)])
    assert seen.ms("last_token_s") == [30.0]  # 1, then 4, then 2
    gaps = [(row[14], row[15]) for row in seen.sinks.steps if row[1] == "gap"]
    assert sum(count for count, gap_s in gaps if gap_s == 0.0) == 4
    assert sum(count for count, gap_s in gaps if gap_s > 0.0) == 2


def test_a_shortage_caused_by_drafts_preempts_and_everybody_still_ends() -> None:
    speculation = Speculation(accept_rates=(0.5,) * 3, seed=4)
    rows = [trace_row(n, 0.0, 8, 20) for n in range(3)]
    settings = engine_settings(block_size=4, blocks=12, speculation=speculation)
    seen = simulate(rows, [(settings, PolynomialLatency(48))])
    assert sum(preemptions(seen)) > 0
    assert [request.sequence.outputs for request, _ in seen.ended.values() if request.sequence] == [20] * 3
    plain = simulate(rows, [(replace(settings, speculation=None), PolynomialLatency(48))])
    assert {status for _, status in plain.ended.values()} == {"completed"}
