"""SGLang's ranks, draft tokens and host tier in cases that a person can follow."""

from __future__ import annotations

import pytest
from simulate import Seen, sglang_settings, simulate, trace_row

from policies.cluster.blocks import BlockRun, Branch, ContentTree
from policies.cluster.ids import RequestId
from twin.engine.build import build_engine
from twin.engine.host import HostTier
from twin.engine.radix import RadixCache
from twin.engine.sequence import Sequence
from twin.engine.settings import HostTierSettings, SglangSettings, Speculation
from twin.mocker.demand import Row
from twin.perf.fixed import FixedLatency

TOY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.010)
ALWAYS = Speculation(accept_rates=(1.0, 1.0), seed=1)
NEVER = Speculation(accept_rates=(0.0, 0.0), seed=1)


def run(rows: list[Row], settings: SglangSettings, **more: object) -> Seen:
    return simulate(rows, [(settings, TOY)], **more)  # type: ignore[arg-type]


def admitted_again(seen: Seen) -> list[int]:
    return [request.sequence.readmissions for _, (request, _) in sorted(seen.ended.items()) if request.sequence]


# ---------------------------------------------------------------- ranks


def test_a_rank_decodes_once_beside_another_ones_prompt_and_waits_for_it() -> None:
    """Row 0 decodes on rank 0; at 15 ms row 1 brings 40 tokens to rank 1, whose step of 40 ms starts at 20 ms."""
    rows = [trace_row(0, 0.0, 10, 5), trace_row(1, 0.015, 40, 2)]
    seen = run(rows, sglang_settings(ranks=2))
    assert seen.ms("first_token_s") == [10.0, 45.0]
    assert seen.ms("last_token_s") == [80.0, 55.0]  # 20, then 60 beside the prompt, then 70, 80 in step


def test_on_one_rank_the_prompt_stalls_the_batch_instead() -> None:
    rows = [trace_row(0, 0.0, 10, 5), trace_row(1, 0.015, 40, 2)]
    seen = run(rows, sglang_settings())
    assert seen.ms("last_token_s") == [90.0, 55.0]  # 20, the prompt until 60, then 70, 80, 90


def test_each_rank_has_a_cache_of_its_own() -> None:
    """The second of a pair of equal prompts comes to the other rank and finds nothing; the third finds the first."""
    rows = [trace_row(n, 1.0 * n, 12, 1, [1, 2]) for n in range(3)]
    seen = run(rows, sglang_settings(ranks=2), key_tokens=6)
    reused = [request.sequence.reused_tokens for _, (request, _) in sorted(seen.ended.items()) if request.sequence]
    assert reused == [0, 0, 11]


def test_a_page_is_gone_from_a_worker_when_its_last_rank_has_lost_it() -> None:
    engine = build_engine(sglang_settings(blocks=20, ranks=2), TOY, kv_events=True)
    tree = ContentTree(6, 1)

    def end(name: str, keys: list[int]) -> None:
        engine.submit(Sequence(RequestId(name), 12, 1, tree.path(keys, 12), tree.private()))
        now_s = 0.0
        while (plan := engine.plan(now_s)) is not None:
            now_s = plan.end_s
            engine.commit(plan)

    end("a", [1, 2])  # rank 0
    end("b", [1, 2])  # rank 1
    end("c", [11, 12])  # rank 0 evicts four pages of it
    assert engine.pool.removed == []
    end("d", [21, 22])  # rank 1 evicts them too
    assert sum(run.hi - run.lo for run in engine.pool.removed) == 4


def test_a_radix_cache_tells_what_it_lacks_of_a_branch() -> None:
    tree = ContentTree(4, 1)
    cache = RadixCache(100)
    path, fork = tree.path([1, 2, 3], 12), tree.path([1, 2, 9], 12)
    for pages, where in ((10, path), (12, fork)):
        node, cached = cache.match(where.pieces, pages, (0, 0, 0))
        cache.lock(node)
        cache.take(pages - cached)
        cache.unlock(cache.publish(node, where.pieces, cached, pages, (0, 0, 0)).node)
    (stem, _), (branch, _) = fork.pieces
    assert cache.lacking(stem, [(0, 8)]) == []
    assert cache.lacking(stem, [(2, 12)]) == [(10, 12)]
    assert cache.lacking(branch, [(8, 12)]) == []
    cache.take(100 - cache.inactive)
    cache.take(3)
    assert cache.lacking(branch, [(8, 10), (10, 12)]) or cache.lacking(stem, [(8, 10)])


# ---------------------------------------------------------------- draft tokens


def test_the_step_of_a_prompt_emits_one_token_and_every_decode_step_a_burst() -> None:
    seen = run([trace_row(0, 0.0, 10, 8)], sglang_settings(speculation=ALWAYS))
    assert seen.ms("first_token_s") == [10.0]
    assert seen.ms("last_token_s") == [40.0]  # 1, then 3, 3 and 1
    gaps = [(row[14], row[15]) for row in seen.sinks.steps if row[1] == "gap"]
    assert sum(count for count, gap_s in gaps if gap_s == 0.0) == 4
    assert sum(count for count, gap_s in gaps if gap_s > 0.0) == 3


def test_slots_for_a_burst_are_taken_before_a_step_and_only_what_held_stays() -> None:
    """Ten tokens and two drafts: 13 slots while the step verifies, 12 when none has held; the tree has those 12."""
    engine = build_engine(sglang_settings(speculation=NEVER), TOY)
    tree = ContentTree(16, 1)
    engine.submit(Sequence(RequestId("r"), 10, 3, tree.path([1], 10), tree.private()))
    first = engine.plan(0.0)
    assert first is not None
    engine.commit(first)
    assert engine.pool.active == 11  # the newest token has a slot
    second = engine.plan(first.end_s)
    assert second is not None
    assert engine.pool.active == 13  # one that is certain, and the draft that may still count
    engine.commit(second)
    assert engine.pool.active == 12
    third = engine.plan(second.end_s)
    assert third is not None
    engine.commit(third)
    assert (engine.pool.active, engine.pool.inactive) == (0, 13)  # type: ignore[attr-defined]
    engine.audit()


def test_with_drafts_the_newest_is_retracted_not_the_one_with_the_fewest_tokens() -> None:
    """SGLang can only cut a batch with drafts from its end."""
    rows = [trace_row(0, 0.0, 8, 20), trace_row(1, 0.0, 8, 20)]
    sizes: dict = {"blocks": 36, "prefix_caching": False, "clip_max_new_tokens": 1}
    plain, drafted = run(rows, sglang_settings(**sizes)), run(rows, sglang_settings(**sizes, speculation=NEVER))
    assert admitted_again(plain) == [1, 0]
    assert [count > 0 for count in admitted_again(drafted)] == [False, True]


# ---------------------------------------------------------------- host tier


def tier(**changes: object) -> HostTierSettings:
    usual: dict = {"blocks": 100, "block_bytes": 1000, "load_bytes_per_s": 1e6, "trigger": "on_evict"}
    return HostTierSettings(**usual | changes)


def three_prompts(shared_tokens: int, host: HostTierSettings) -> Seen:
    """A prompt, another one that pushes it out, and one that begins like the first; pages of a token, 1 ms each."""
    keys = [1, 2, 3, 4, 5]
    rows = [
        trace_row(0, 0.0, shared_tokens + 1, 1, keys),
        trace_row(1, 1.0, 29, 1, [11, 12, 13, 14, 15]),
        trace_row(2, 2.0, shared_tokens + 1, 1, keys),
    ]
    return run(rows, sglang_settings(blocks=31, host=host), key_tokens=6)


@pytest.mark.parametrize(("tokens", "loaded", "ttft_ms"), [(12, 10, 10.0), (11, 0, 10.0)])
def test_fewer_than_ten_tokens_are_computed_again(tokens: int, loaded: int, ttft_ms: float) -> None:
    """Two pages are left on the device. Ten in the host come up in 10 ms beside one that is computed; nine do not."""
    seen = three_prompts(tokens, tier())
    assert seen.world.tiers["loaded_blocks"] == loaded
    assert seen.ms("first_token_s")[2] == ttft_ms


@pytest.mark.parametrize(("overlap", "ttft_ms"), [(True, 10.0), (False, 11.0)])
def test_a_prompt_waits_for_what_comes_up_in_its_own_step(overlap: bool, ttft_ms: float) -> None:
    seen = three_prompts(12, tier(overlap=overlap))
    assert seen.ms("first_token_s") == [13.0, 29.0, ttft_ms]
    assert seen.ms("admit_s") == [0.0, 0.0, 0.0], "it does not wait beside the queue"


def test_blocks_that_go_down_in_one_go_lie_as_if_they_had_come_one_by_one() -> None:
    """Six pages into a tier of four that has one of them already: either way the first four stay."""
    branch = Branch(1, keys=[7])
    at_once, one_by_one = HostTier(4, 1), HostTier(4, 1)
    for host in (at_once, one_by_one):
        host.put(branch, 2, 3)
        host.put(Branch(2, keys=[8]), 0, 3)
    at_once.put(branch, 0, 6)
    for page in range(5, -1, -1):
        one_by_one.put(branch, page, page + 1)
    for host in (at_once, one_by_one):
        assert host.match(((branch, 6),), 6, 0).blocks == 4
        assert BlockRun(branch, 4, 6) not in host.match(((branch, 6),), 6, 4).parts
        host.audit()
