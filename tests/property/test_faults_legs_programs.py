"""Random faults over prefill and decode workers: whatever dies, hangs or leaves in whatever stage of a hand-off, each
request ends once, nothing leaks on whoever lives, no token is lost or made twice, and leaping changes nothing.
"""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from simulate import engine_settings, trace_row
from test_engine_against_naive import KEY_TOKENS
from test_faults_programs import Blow, blows
from test_legs_programs import Program, carry_out, programs

from twin.engine.settings import EngineSettings
from twin.mocker.demand import Row
from twin.mocker.handoff import HandoffRules
from twin.mocker.sinks import MemorySinks

EXAMPLES = examples(300)


def _keys(n: int, isl: int) -> list[int]:
    """Content of its own for the n-th prompt, as long as it is."""
    return [1000 + 100 * n + i for i in range(-(-isl // KEY_TOKENS))]


def _carry_out(program: Program, blown: list[Blow], *, leap: bool) -> MemorySinks:
    acts = [(blow.later_s(), blow.act) for blow in blown]
    return carry_out(program, leap=leap, acts=acts)[0]


def _program(
    rows: tuple[Row, ...],
    engine: EngineSettings,
    workers: tuple[int, int],
    *,
    lease_s: float | None = None,
    router: str = "round-robin",
    order: str = "prefill_first",
    move_s: float = 0.0,
) -> Program:
    """So many prefill and decode workers of one engine; the decode worker makes the first token."""
    rules = HandoffRules(
        first_token="decode", lease_s=lease_s, missing_only=False, one_at_a_time=False, block_size=engine.block_size
    )
    return Program(
        rows=rows,
        prefill=engine,
        decode=engine,
        workers=workers,
        rules=rules,
        router=router,
        order=order,
        move_s=move_s,
        shared=False,
    )


@EXAMPLES
@given(programs(), blows(ties=True))
def test_faults_in_every_stage_of_a_hand_off(program: Program, blown: list[Blow]) -> None:
    leaping = _carry_out(program, blown, leap=True)
    assert leaping.requests.keys() == {row.row for row in program.rows}
    for row in program.rows:
        record = leaping.requests[row.row]
        status, first_s, last_s, outputs, migrations = record[6], record[12], record[13], record[14], record[17]
        assert (first_s is None) == (outputs == 0), record
        assert (last_s is None) == (outputs == 0), record
        assert isinstance(outputs, int)
        assert isinstance(migrations, int)
        assert migrations <= 2
        if status == "completed":
            assert outputs == row.osl
        else:
            assert outputs < row.osl or status == "failed"
    stepping = _carry_out(program, blown, leap=False)
    assert leaping.requests == stepping.requests
    assert leaping.decisions == stepping.decisions


def test_a_prompt_whose_lease_ended_and_whose_worker_died_is_computed_elsewhere() -> None:
    """Found by a random program: it waited for ever for a prefill worker that was gone."""
    engine = engine_settings(block_size=2, blocks=8, max_num_batched_tokens=8, prefix_caching=False, max_num_seqs=1)
    program = _program(
        rows=tuple(trace_row(n, 0.0, 1, 4 if n == 1 else 1, [1000 + 20 * n]) for n in range(9)),
        engine=engine,
        workers=(1, 1),
        lease_s=0.03,
    )
    requests = _carry_out(program, [Blow(50, "kill", 0)], leap=True).requests
    assert [row[6] for _, row in sorted(requests.items())] == ["completed"] * 9
    assert [row[17] for _, row in sorted(requests.items())] == [0, 0, *[1] * 7]


def test_a_client_that_leaves_at_the_instant_a_step_ends_inside_a_leap_leaves_within_the_step() -> None:
    """Found among 10,000 programs: what leaves comes before the step ends of its instant, leapt or not."""
    engine = engine_settings(
        block_size=4, blocks=8, prefix_caching=False, max_num_seqs=1, chunked_prefill=False, exclusive_prefill=True
    )
    lengths = [(32, 1), (21, 3), *[(1, 1)] * 5]
    program = _program(
        rows=tuple(trace_row(n, 0.055, isl, osl, _keys(n, isl)) for n, (isl, osl) in enumerate(lengths)),
        engine=engine,
        workers=(1, 1),
        move_s=0.001,
    )
    blown = [Blow(140, "cancel", 1)]
    assert _carry_out(program, blown, leap=True).requests == _carry_out(program, blown, leap=False).requests


def test_a_kept_prompt_that_may_not_be_sent_again_is_let_go() -> None:
    """Found by random programs: refused by the limit, its blocks stayed with the prefill worker for ever."""
    engine = engine_settings(block_size=2, blocks=22, max_num_batched_tokens=8, prefix_caching=False, max_num_seqs=1)
    lengths = [(1, 1), (34, 10), (33, 1), (1, 1)]
    program = _program(
        rows=tuple(trace_row(n, 0.0, isl, osl, _keys(n, isl)) for n, (isl, osl) in enumerate(lengths)),
        engine=engine,
        workers=(2, 2),
        move_s=0.017,
    )
    blown = [Blow(270, "kill", 2), Blow(170, "kill", 3), Blow(170, "kill", 0)]
    requests = _carry_out(program, blown, leap=True).requests
    assert [row[6] for _, row in sorted(requests.items())] == ["completed", "failed", "completed", "completed"]


def test_where_room_comes_first_a_prompt_whose_room_is_lost_is_computed_again() -> None:
    """Found by random programs: held without room, and room without a prompt, would wait for each other for ever."""
    engine = engine_settings(block_size=4, blocks=8, max_num_batched_tokens=64, prefix_caching=False, max_num_seqs=1)
    program = _program(
        rows=tuple(trace_row(n, 0.0, 20, 1, _keys(n, 20)) for n in range(2)),
        engine=engine,
        workers=(1, 2),
        order="decode_first",
        move_s=0.017,
    )
    # 30 ms: the first prompt is computed and on its way; the second has room on the other worker and waits for blocks
    requests = _carry_out(program, [Blow(30, "kill", 1)], leap=True).requests
    assert {row[6] for row in requests.values()} == {"completed"}


@pytest.mark.parametrize("kind", ["island", "cut"])
def test_room_for_a_prompt_whose_lease_ended_and_whose_worker_is_cut_off(kind: str) -> None:
    """Found among 10,000 programs: it waited for ever for a prefill worker that had been taken for lost."""
    engine = engine_settings(block_size=2, blocks=8, max_num_batched_tokens=8, prefix_caching=False, max_num_seqs=1)
    program = _program(
        rows=tuple(trace_row(n, 0.0, 1, 4 if n == 1 else 1, [1000 + 20 * n]) for n in range(12)),
        engine=engine,
        workers=(1, 1),
        lease_s=0.03,
    )
    for leap in (True, False):
        requests = _carry_out(program, [Blow(20, kind, 0, 45.0)], leap=leap).requests
        assert {row[6] for row in requests.values()} == {"completed"}


def test_a_draining_prefill_worker_that_an_interruption_lets_go() -> None:
    """Found among 10,000 programs: what the loss of a decode worker frees is the last that a draining worker held."""
    engine = engine_settings(
        block_size=4, blocks=8, prefix_caching=False, max_num_seqs=1, chunked_prefill=False, exclusive_prefill=True
    )
    program = _program(
        rows=(
            trace_row(0, 0.0, 1, 1, [1000]),
            *(trace_row(n, 0.055, 1, 20 if n == 2 else 1, [1000 + 20 * n]) for n in range(1, 7)),
        ),
        engine=engine,
        workers=(1, 2),
        router="kv",
    )
    blown = [Blow(350, "cut", 1, 45.0), Blow(270, "kill", 2, 45.0), Blow(320, "drain", 0)]
    assert _carry_out(program, blown, leap=True).requests == _carry_out(program, blown, leap=False).requests
