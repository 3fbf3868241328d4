"""Acceptance cases C16 and C17: the hand-over of KV is paid once, and blocks are held until they are fetched.

Figures are those of the cases; times are exact to 0.001 ms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from toy import CASES, Run, run

from policies.cluster.controller import Controller
from policies.cluster.ids import RequestId, WorkerId
from policies.resilience.migration import Migration, MigrationSettings
from traces.load import open_trace
from twin.cluster import build_groups
from twin.config import Config
from twin.config_read import load
from twin.deciding import build_policy
from twin.legs import handoff_plan, priced_for_legs
from twin.mocker.clock import Order
from twin.mocker.handoff import Handoff
from twin.mocker.requests import OpenRequest
from twin.mocker.sinks import MemorySinks
from twin.mocker.world import MockWorld
from twin.replay import demand_of, read_options

Keys = dict[str, object]
TOY_KEYS: Keys = {"chunked_prefill": "false", "exclusive_prefill": "true"}
HELD = 'first_token = "prefill"\nkv_bytes_per_token = 0\nbandwidth_gb_per_s = 50.0'


def config_file(folder: Path, *, prefill: Keys, decode: Keys, table: str) -> Path:
    lines = [f"[trace]\nhash_block_tokens = 16\n[disaggregation]\n{table}\n"]
    for role, keys in (("prefill", prefill), ("decode", decode)):
        engine_keys = TOY_KEYS | keys
        per_token, count = engine_keys.pop("prefill_s_per_token", 0.001), engine_keys.pop("count", 1)
        engine = "\n".join(f"{key} = {value}" for key, value in engine_keys.items())
        lines.append(
            f'[[workers]]\nname = "{role}"\nrole = "{role}"\ncount = {count}\n'
            f"[workers.engine]\n{engine}\n"
            f'[workers.latency]\nmodel = "fixed"\nprefill_s_per_token = {per_token}\ndecode_s = 0.01\n'
        )
    file = folder / "run.toml"
    file.write_text("".join(lines))
    return file


def split(name: str, out: Path, *, prefill: Keys, decode: Keys, table: str) -> Run:
    """One prefill and one decode worker of the TOY engine, from a TOML file as a user would write it."""
    return run(CASES / name, out, config_file=config_file(out.parent, prefill=prefill, decode=decode, table=table))


@dataclass
class Watched:
    """What was seen of a split run: blocks in use (prefill, decode) at instants, and its requests with their status."""

    blocks: dict[float, tuple[int, ...]] = field(default_factory=dict)
    requests: dict[int, OpenRequest] = field(default_factory=dict)
    handoffs: dict[int, Handoff | None] = field(default_factory=dict)
    status: dict[int, str] = field(default_factory=dict)
    made: dict[int, object] = field(default_factory=dict)
    steps: list[tuple[Any, ...]] = field(default_factory=list)
    leases_expired: int = 0
    gone_s: dict[WorkerId, float] = field(default_factory=dict)

    def parts_ms(self, row: int) -> dict[str, float]:
        """The parts of a request's latency, from its stamps."""
        request = self.requests[row]
        handoff, prefill, seq = self.handoffs[row], request.prefill, request.sequence
        assert handoff is not None
        assert prefill is not None
        assert seq is not None
        stamps = [request.arrival_s, prefill.admit_s, handoff.held_s, handoff.reserved_s, handoff.activated_s]
        arrival_s, prefill_s, held_s, reserved_s, activated_s = (_known(at_s) for at_s in stamps)
        decode_s, ready_s = _known(seq.admit_s), max(held_s, reserved_s)
        parts = {
            "queue": prefill_s - arrival_s,
            "prefill": held_s - prefill_s,
            "room": ready_s - held_s,
            "transfer": activated_s - ready_s,
            "decode queue": decode_s - activated_s,
            "decode": _known(request.last_s) - decode_s,
        }
        return {name: round(part * 1e3, 6) for name, part in parts.items()}

    def latency_ms(self, row: int) -> float:
        request = self.requests[row]
        return round((_known(request.last_s) - request.arrival_s) * 1e3, 6)


def _known(at_s: float | None) -> float:
    assert at_s is not None
    return at_s


def watch(
    name: str,
    folder: Path,
    *,
    prefill: Keys,
    decode: Keys,
    table: str,
    looks_ms: Sequence[float] = (),
    leaves: tuple[int, float] | None = None,
    dies: tuple[int, float] | None = None,
    late_ms: Mapping[int, float] | None = None,
    acts: Sequence[tuple[float, Callable[[MockWorld], object]]] = (),
    leap: bool = True,
) -> Watched:
    """The same deployment in memory, looked at in given ms; `leaves`: a row and when its client goes (ms); `dies`: a
    worker and when (ms), known at once; `late_ms`: workers that are ready only then; `acts`: what else is done to the
    world, and when (ms).
    """
    file = config_file(folder, prefill=prefill, decode=decode, table=table)
    config: Config = load(file, {"TRACE": str(CASES / name)})
    assert config.trace.path is not None
    trace = open_trace(config.trace.path, read_options(config.trace))
    groups = priced_for_legs(config, build_groups(config, leap=leap))
    seen, sinks = Watched(), MemorySinks()
    migration = Migration(MigrationSettings(limit=3, max_seq_len=None))

    def ended(request: OpenRequest, status: str) -> None:
        seen.requests[request.row.row], seen.status[request.row.row] = request, status
        seen.handoffs[request.row.row] = request.handoff

    world = MockWorld(
        controller=Controller([build_policy(config, groups[0].settings.block_size), migration]),
        workers=[
            replace(spec, ready_s=(late_ms or {}).get(spec.worker_id, 0.0) / 1e3)
            for group in groups
            for spec in group.workers
        ],
        demand=demand_of(config, trace),
        sinks=sinks,
        router=config.router.mode,
        key_tokens=trace.info.hash_block_tokens,
        handoff=handoff_plan(config, groups),
        on_end=ended,
    )

    def look(at_ms: float) -> None:
        seen.blocks[at_ms] = tuple(worker.engine.pool.active for _, worker in sorted(world.workers.items()))

    def leave(row: int) -> None:
        (request_id,) = [request_id for request_id, request in world.open.items() if request.row.row == row]
        world.churn.cancel(RequestId(request_id))

    for at_ms in looks_ms:
        world.call(at_ms / 1e3, Order.FAULT, lambda at_ms=at_ms: look(at_ms))  # type: ignore[misc]
    if leaves is not None:
        row, at_ms = leaves
        world.call(at_ms / 1e3, Order.FAULT, lambda: leave(row))
    if dies is not None:
        world.call(dies[1] / 1e3, Order.FAULT, lambda: world.churn.lose(WorkerId(dies[0]), "died"))
    for at_ms, act in acts:
        world.call(at_ms / 1e3, Order.FAULT, lambda act=act: act(world))  # type: ignore[misc]
    world.run()
    world.audit()
    seen.leases_expired = world.handoffs.leases_expired if world.handoffs is not None else 0
    seen.gone_s = world.gone_s
    look(float("inf"))
    seen.steps = list(sinks.steps)
    seen.made = {row: cells[14] for row, cells in sinks.requests.items()}
    return seen


@pytest.mark.parametrize(("first", "ttft_ms"), [("prefill", 50.0), ("decode", 63.621)])
def test_c16_the_hand_over_is_paid_once_and_the_parts_add_up(first: str, ttft_ms: float, tmp_path: Path) -> None:
    done = split(
        "c16_disagg.jsonl",
        tmp_path / "run",
        prefill={"prefill_s_per_token": 0.00005},
        decode={},
        table=f'first_token = "{first}"\nkv_bytes_per_token = 131072\nbandwidth_gb_per_s = 50.0\nsetup_s = 0.001',
    )
    assert done.ms("ttft_s") == [ttft_ms]
    if first == "prefill":
        assert done.ms("e2e_s") == [153.621]
        gaps = [row for row in done.rows("steps") if row["kind"] == "gap"]
        assert [round(row["gap0_s"] * 1e3, 5) for row in gaps] == [13.62144], "the second token comes at 63.62144"
    else:
        assert done.ms("e2e_s") == [163.621], "the decode worker makes the first token too: one step more"


def test_c17_prefill_keeps_its_blocks_until_they_are_fetched(tmp_path: Path) -> None:
    done = split(
        "c17_held.jsonl",
        tmp_path / "run",
        prefill={"kv_blocks": 20, "max_num_seqs": 1},
        decode={"kv_blocks": 10},
        table='first_token = "prefill"\nkv_bytes_per_token = 0\nbandwidth_gb_per_s = 50.0',
    )
    assert done.ms("e2e_s") == [416, 736]
    held = [row for row in done.rows("steps") if row["worker_id"] == 1 and row["kind"] != "gap"]
    assert max(row["active_blocks"] for row in held) <= 10
    assert done.report.preemptions == 0


@pytest.mark.parametrize(("first", "decode_ms"), [("prefill", 100.0), ("decode", 110.0)])
def test_c16_the_parts_of_the_latency_are_as_stated_and_sum_to_it(first: str, decode_ms: float, tmp_path: Path) -> None:
    seen = watch(
        "c16_disagg.jsonl",
        tmp_path,
        prefill={"prefill_s_per_token": 0.00005},
        decode={},
        table=f'first_token = "{first}"\nkv_bytes_per_token = 131072\nbandwidth_gb_per_s = 50.0\nsetup_s = 0.001',
    )
    parts = seen.parts_ms(0)
    assert list(parts.values()) == [0, 50, 0, 3.62144, 0, decode_ms]
    assert sum(parts.values()) == pytest.approx(seen.latency_ms(0), abs=1e-6)
    assert seen.latency_ms(0) == (153.62144 if first == "prefill" else 163.62144)


def test_the_parts_sum_to_the_latency_where_a_request_waits_for_room_too(tmp_path: Path) -> None:
    """C17 (a): the second request waits 96 ms for its prefill and, from 192 to 416, for room."""
    prefill: Keys = {"kv_blocks": 20, "max_num_seqs": 1}
    seen = watch("c17_held.jsonl", tmp_path, prefill=prefill, decode={"kv_blocks": 10}, table=HELD)
    assert list(seen.parts_ms(0).values()) == [0, 96, 0, 0, 0, 320]
    assert list(seen.parts_ms(1).values()) == [96, 96, 224, 0, 0, 320]
    for row, latency_ms in enumerate((416, 736)):
        assert seen.latency_ms(row) == latency_ms
        assert sum(seen.parts_ms(row).values()) == pytest.approx(latency_ms, abs=1e-6)


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_c17_blocks_in_use_while_they_are_held_and_in_the_end(leap: bool, tmp_path: Path) -> None:
    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"kv_blocks": 20, "max_num_seqs": 1},
        decode={"kv_blocks": 10},
        table=HELD,
        looks_ms=[300, *range(5, 740, 10)],
        leap=leap,
    )
    assert seen.blocks[300][0] == 6, "the second request's, which nobody has fetched"
    assert max(decode for _, decode in seen.blocks.values()) <= 10
    recorded = [row[11] for row in seen.steps if row[0] == 1 and row[1] != "gap"]
    assert max(recorded) == 8, "a leap's blocks reach the pool when it ends; the record has them"
    assert seen.blocks[415][0] == 6
    assert seen.blocks[425][0] == 0
    assert seen.blocks[float("inf")] == (0, 0)


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_c17_a_client_that_leaves_while_its_kv_is_held_frees_it(leap: bool, tmp_path: Path) -> None:
    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"kv_blocks": 20, "max_num_seqs": 1},
        decode={"kv_blocks": 10},
        table=HELD,
        looks_ms=[299, 310, *range(315, 415, 10)],
        leaves=(1, 300),
        leap=leap,
    )
    assert seen.status == {0: "completed", 1: "cancelled"}
    assert seen.blocks[299][0] == 6
    assert seen.blocks[310][0] == 0
    assert seen.latency_ms(0) == 416
    handoff, seq = seen.handoffs[1], seen.requests[1].sequence
    assert handoff is not None
    assert (handoff.reserved_s, handoff.activated_s) == (None, None), "no room was ever taken for it"
    assert seq is None or seq.admit_s is None
    assert max(decode for at_ms, (_, decode) in seen.blocks.items() if at_ms < 416) == 8
    ends = [row[3] for row in seen.steps if row[0] == 1 and row[1] != "gap"]
    assert max(ends) == pytest.approx(0.416), "the decode worker runs nothing after the first request"
    assert seen.blocks[float("inf")] == (0, 0)


def test_c17_a_lease_that_ends_costs_a_second_prefill(tmp_path: Path) -> None:
    """Resilience table E2: held 200 ms, given up at 392, computed again once a decode slot is free, done at 832."""
    done = split(
        "c17_held.jsonl",
        tmp_path / "run",
        prefill={"kv_blocks": 20, "max_num_seqs": 1, "prefix_caching": "false"},
        decode={"kv_blocks": 10},
        table='first_token = "prefill"\nkv_bytes_per_token = 0\nbandwidth_gb_per_s = 50.0\nlease_s = 0.2',
    )
    assert done.ms("e2e_s") == [416, 832]


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_e3_a_prompt_that_is_held_is_kept_for_another_decode_worker(leap: bool, tmp_path: Path) -> None:
    """Resilience table E3: the decode worker dies at 300. The second request, held since 192, goes on from its KV on
    the worker that is ready by then; the first, which had 21 tokens, is computed again (117 tokens, done at 417) and
    finds room on it when the second is done.
    """
    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"kv_blocks": 20, "max_num_seqs": 1, "prefix_caching": "false"},
        decode={"kv_blocks": 10, "count": 2},
        table=HELD,
        looks_ms=[299, 305],
        dies=(1, 300),
        late_ms={2: 250},
        leap=leap,
    )
    assert seen.status == {0: "completed", 1: "completed"}
    assert seen.made == {0: 33, 1: 33}
    first, second = seen.requests[0], seen.requests[1]
    assert (first.migrations, second.migrations) == (1, 1)
    assert (first.carried, second.carried) == (21, 0)
    handoff = seen.handoffs[1]
    assert handoff is not None
    assert (handoff.held_s, handoff.activated_s) == (0.192, 0.3), "no second prefill"
    assert seen.latency_ms(1) == 300 + 32 * 10
    assert seen.latency_ms(0) == 300 + 117 + 203 + 11 * 10
    assert seen.blocks[299][0] == 6
    prefill, _, survivor = seen.blocks[float("inf")]
    assert (prefill, survivor) == (0, 0)


def test_e4_a_held_prompt_whose_prefill_worker_dies_is_computed_on_another(tmp_path: Path) -> None:
    """Resilience table E4: the first request decodes on, unaffected; the second is computed again on the survivor, with
    the token that its client has (97 tokens), and makes its second token there.
    """
    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"kv_blocks": 20, "max_num_seqs": 1, "count": 2},
        decode={"kv_blocks": 10},
        table=HELD,
        dies=(0, 300),
        late_ms={1: 250},
    )
    assert seen.status == {0: "completed", 1: "completed"}
    assert seen.latency_ms(0) == 416
    handoff = seen.handoffs[1]
    assert handoff is not None
    assert handoff.held_s == 0.3 + 0.097
    assert seen.latency_ms(1) == 416 + 31 * 10, "it had to wait for room until 416 anyway"


def test_layers_that_were_sent_during_the_computation_are_not_sent_again(tmp_path: Path) -> None:
    """C16 with room taken first: 50 ms of computing cover all of the transfer but set-up and the last layer of 80."""
    done = split(
        "c16_disagg.jsonl",
        tmp_path / "run",
        prefill={"prefill_s_per_token": 0.00005},
        decode={},
        table='order = "decode-first"\noverlap = true\nfirst_token = "prefill"\nkv_bytes_per_token = 131072\n'
        "bandwidth_gb_per_s = 50.0\nsetup_s = 0.001",
    )
    assert done.ms("ttft_s") == [50]
    last_layer_ms = 131072 * 1000 / 50e9 * 1e3 / 80
    assert done.ms("e2e_s") == [pytest.approx(50 + 1 + last_layer_ms + 100, abs=0.001)]


FIVE_MS = 'first_token = "prefill"\nkv_bytes_per_token = 52083\nbandwidth_gb_per_s = 1.0\nlease_s = 0.1'
"""The KV of a prompt of 96 tokens takes 5 ms."""


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_e5_a_lost_acknowledgement_costs_the_source_its_blocks_until_the_lease_ends(leap: bool, tmp_path: Path) -> None:
    """Resilience table E5. The second prompt is held at 192 and fetched from 201 to 206, into a step that ends at 211;
    the workers are parted at 208, so that the source never hears of it.
    """

    def part(world: MockWorld) -> None:
        world.partitions.part("apart", frozenset((WorkerId(0),)), frozenset((WorkerId(1),)))

    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"max_num_seqs": 1, "prefix_caching": "false"},
        decode={},
        table=FIVE_MS,
        looks_ms=[207, 310, 312],
        acts=[(208, part), (900, lambda world: world.partitions.join("apart"))],
        leap=leap,
    )
    assert seen.status == {0: "completed", 1: "completed"}
    assert [seen.blocks[at_ms][0] for at_ms in (207, 310, 312)] == [6, 6, 0]
    assert round(seen.latency_ms(1)) == 211 + 320, "its reader goes on"
    assert seen.leases_expired == 1


def test_e6_blocks_are_held_until_the_slowest_rank_has_fetched_its_heads(tmp_path: Path) -> None:
    """Resilience table E6: four ranks on each side, and one card of the reader's at a thousandth of its speed.

    A prompt of 96 tokens is 31.5 MB, 7.9 MB for each pair of ranks: 0.157 ms at 50 GB/s, 157 ms at a thousandth, during
    which the second prompt's heads begin to share that card (at 192). Three of four ranks have theirs at once.
    """
    file = config_file(
        tmp_path,
        prefill={"max_num_seqs": 1, "prefix_caching": "false"},
        decode={"kv_blocks": 100},
        table='first_token = "prefill"',
    )
    faults = tmp_path / "slow.json"
    slow = {"at_ms": 1, "kind": "link_slow", "link": "nic:decode-0:1", "factor": 0.001}
    faults.write_text(json.dumps({"faults": [slow]}), encoding="utf-8")
    quick = run(CASES / "c17_held.jsonl", tmp_path / "quick", config_file=file)
    late = run(CASES / "c17_held.jsonl", tmp_path / "late", f"faults.path={faults}", config_file=file)
    alone_ms = 96 * 327_680 / 4 / 50e9 * 1e3
    assert quick.ms("moved_s")[0] == pytest.approx(96 + alone_ms, abs=0.001)
    assert late.ms("moved_s")[0] == pytest.approx(96 + 96 + 2 * (1000 * alone_ms - 96), abs=0.3)
    assert late.requests("status") == ["completed", "completed"]


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_b6_a_client_that_leaves_while_its_kv_is_moved_frees_both_sides(leap: bool, tmp_path: Path) -> None:
    """Resilience table B6: the first prompt moves from 96 to 101 and its client leaves at 98."""
    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"max_num_seqs": 1},
        decode={},
        table=FIVE_MS,
        looks_ms=[97, 197],
        leaves=(0, 98),
        leap=leap,
    )
    assert seen.status == {0: "cancelled", 1: "completed"}
    assert seen.made[0] == 1, "the token that came with its prompt"
    prefill, decode = seen.blocks[97]
    assert prefill >= 6
    assert decode == 7, "for 97 tokens"
    assert seen.blocks[197][1] == 7, "the second request's alone"
    assert seen.blocks[float("inf")] == (0, 0)


@pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])
def test_d6_a_draining_prefill_worker_stays_until_its_kv_is_fetched(leap: bool, tmp_path: Path) -> None:
    """Resilience table D6: both prompts are computed by 192; the second is fetched when the decode worker has room."""
    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"kv_blocks": 20, "max_num_seqs": 1},
        decode={"kv_blocks": 10},
        table=HELD,
        acts=[(150, lambda world: world.churn.drain(WorkerId(0)))],
        leap=leap,
    )
    assert seen.status == {0: "completed", 1: "completed"}
    assert seen.gone_s == {WorkerId(0): 0.416}


def test_d6_or_until_its_lease_ends(tmp_path: Path) -> None:
    seen = watch(
        "c17_held.jsonl",
        tmp_path,
        prefill={"kv_blocks": 20, "max_num_seqs": 1},
        decode={"kv_blocks": 10},
        table=f"{HELD}\nlease_s = 0.1",
        acts=[(150, lambda world: world.churn.drain(WorkerId(0)))],
    )
    assert seen.gone_s == {WorkerId(0): 0.292}
    assert seen.status[0] == "completed"


@pytest.mark.parametrize(
    ("lease", "says"),
    [
        (
            "lease_s = 0.1",
            "leases that ended before anybody had fetched the KV, or said so (disaggregation.lease_s = 0.1): 1",
        ),
        (
            "lease_s = 0.1\nkv_bytes_per_token = 100000",
            "lease_s = 0.1 is shorter than the transfer of the longest prompt, 0.32 s",
        ),
        ("", None),
    ],
)
def test_a_lease_that_is_too_short_is_pointed_out(lease: str, says: str | None, tmp_path: Path) -> None:
    usual = "" if "kv_bytes" in lease else "\nkv_bytes_per_token = 0"
    done = split(
        "c17_held.jsonl",
        tmp_path / "run",
        prefill={"kv_blocks": 20, "max_num_seqs": 1},
        decode={"kv_blocks": 10} if "kv_bytes" not in lease else {"kv_blocks": 200},
        table=f'first_token = "prefill"\nbandwidth_gb_per_s = 1.0\n{lease}{usual}',
    )
    found = [text for text in done.report.meta.warnings if "lease" in text]
    assert len(found) == (says is not None)
    if says is not None:
        assert says in found[0]
