"""Queue, load limits and sessions in the simulated world: who waits and goes when, what is shed, leaping or not."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace as replaced
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from builders import router_settings
from simulate import engine_settings, simulate, trace_row
from toy import Run

from policies.cluster import journal
from policies.cluster.controller import Policy
from policies.cluster.events import BusyThresholdsChanged, Threshold
from policies.router.affinity import AffinitySettings
from policies.router.build import build
from policies.router.overload import BusySettings
from policies.router.queue import QueueClass, QueueSettings
from reports.tables import report_text
from twin.config_read import load
from twin.deciding import build_policy
from twin.perf.fixed import FixedLatency
from twin.replay import replay

LATENCY = FixedLatency(prefill_s=0.0, prefill_s_per_token=0.001, decode_s=0.010)
TOY = engine_settings(chunked_prefill=False, exclusive_prefill=True)
ONE = QueueClass(name="all", family="default", min_tokens=0, quantum_tokens=1000, order="fcfs", waits=True)


def queue(**changes: object) -> QueueSettings:
    usual: dict = {
        "prefill_busy_share": None,
        "prefill_busy_tokens": 100,
        "busy_worker_share": 1.0,
        "requests_per_worker": None,
        "tokens_per_worker": None,
        "max_wait_s": None,
        "classes": (ONE,),
    }
    return QueueSettings(**(usual | changes))


def policy(mode: str = "least-loaded", **changes: object) -> Policy:
    return build(router_settings(mode, block_size=16, tie_break="lowest_id", **changes))


def statuses(seen: object) -> list[str]:
    return [status for _, (_, status) in sorted(seen.ended.items())]  # type: ignore[attr-defined]


def test_requests_wait_in_the_router_until_a_prompt_is_computed() -> None:
    """Two workers, prompts of 1 s; the third goes when the first is computed, the fourth with the second."""
    rows = [trace_row(n, 0.1 * n, 1000, 2) for n in range(4)]
    seen = simulate(rows, [(TOY, LATENCY)] * 2, policies=[policy(queue=queue())])
    sent = [seen.ended[n][0].dispatch_s for n in range(4)]
    assert sent == [0.0, 0.1, 1.0, 1.1]
    rules = [(row[1], row[5]) for row in seen.sinks.decisions]
    assert rules == [(0, "tie"), (1, "min"), (2, "queue"), (3, "queue"), (2, "tie"), (3, "min")]
    assert set(statuses(seen)) == {"completed"}


def test_a_jump_in_the_queue_comes_from_the_priority_of_the_row() -> None:
    rows = [trace_row(0, 0.0, 1000, 2), *(trace_row(n, 0.1 * n, 1000, 2, priority=9 * (n == 3)) for n in range(1, 4))]
    seen = simulate(rows, [(TOY, LATENCY)], policies=[policy(queue=queue())])
    assert [seen.ended[n][0].dispatch_s for n in range(4)] == [0.0, 2.0, 3.0, 1.0]


def test_a_refused_request_costs_no_gpu_time() -> None:
    """The engine cap is 1 + 2: the fourth of each burst is shed, and the steps are those of a run without it."""
    limits = BusySettings(engine_running=1, engine_queue=2)
    burst = [trace_row(n, 0.0, 100, 5) for n in range(5)]
    shed = simulate(burst, [(TOY, LATENCY)], policies=[policy(busy=limits)])
    assert statuses(shed) == ["completed"] * 3 + ["rejected"] * 2
    assert [row[7] for row in map(shed.sinks.requests.get, (3, 4))] == [  # type: ignore[index]
        "engine_limit: all 1 workers that could are overloaded or full; one is full: 3 requests there"
    ] * 2
    assert shed.sinks.requests[3][10:14] == (None, None, None, None)
    bare = simulate(burst[:3], [(TOY, LATENCY)], policies=[policy(busy=limits)])
    assert shed.sinks.steps == bare.sinks.steps
    assert sum(row[10] for row in shed.sinks.steps if row[1] != "gap") > 0


def test_who_waits_too_long_is_refused_at_that_moment() -> None:
    rows = [trace_row(0, 0.0, 1000, 2), trace_row(1, 0.1, 10, 2), trace_row(2, 0.6, 10, 2)]
    seen = simulate(rows, [(TOY, LATENCY)], policies=[policy(queue=queue(max_wait_s=0.5))])
    assert statuses(seen) == ["completed", "rejected", "completed"]
    ends = [event for event in seen.events if event[0] == "RequestRejected"]
    assert ends == [("RequestRejected", 0.6, "1")]


def test_limits_of_load_change_while_it_runs() -> None:
    rows = [trace_row(n, 0.1 * n, 1000, 2) for n in range(4)]
    opened = BusyThresholdsChanged(at_s=0.25, changes=(Threshold(name="prefill_tokens", limit=None),))
    router = policy(busy=BusySettings(prefill_tokens=500))
    seen = simulate(rows, [(TOY, LATENCY)], policies=[router], events=[opened])
    assert statuses(seen) == ["completed", "rejected", "rejected", "completed"]


def test_sessions_stay_on_their_worker() -> None:
    rows = [trace_row(n, 0.5 * n, 100, 5, session_id=f"s{n % 3}") for n in range(12)]
    bond = AffinitySettings(bond="soft", ttl_s=100, sessions=10)
    seen = simulate(rows, [(TOY, LATENCY)] * 3, policies=[policy("round-robin", affinity=bond)])
    assert [seen.ended[n][0].worker_id for n in range(12)] == [0, 1, 2] * 4


def test_a_prompt_that_all_share_does_not_flood_one_worker() -> None:
    """Five workers, more demand than they can take, the whole prompt shared: kv spreads it all the same."""
    keys = list(range(40))
    rows = [trace_row(n, 0.02 * n, 640, 50, keys=keys) for n in range(400)]
    small = engine_settings(max_num_seqs=8)
    seen = simulate(rows, [(small, LATENCY)] * 5, key_tokens=16, policies=[policy("kv")])
    share = Counter(seen.ended[n][0].worker_id for n in range(400))
    assert len(share) == 5
    assert sum(share.values()) ** 2 / (5 * sum(n * n for n in share.values())) >= 0.9  # Jain's index


# ---------------------------------------------------------------- through twin replay


BUSY_TOML = """
[[workers]]
{workers}
[workers.engine]
kv_blocks = 400
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.0004
decode_s = 0.01
[router]
mode = "{mode}"
{keys}
[router.queue]
prefill_busy_tokens = 900
{queue}
"""


def trace(path: Path, rows: int = 220) -> Path:
    """Prompts of very different length that share beginnings, some at one instant, some with a priority."""
    lines = []
    for n in range(rows):
        isl = 40 + (n * 7919) % 1500
        ids = [n % 9, *(100 * (n % 9) + k for k in range(30)), *(10_000 + 100 * n + k for k in range(70))]
        row = {"timestamp": 110 * (n - n % 3), "input_length": isl, "output_length": 3 + (n * 31) % 40}
        lines.append(json.dumps(row | {"hash_ids": ids[: -(-isl // 16)], "priority": 3 * (n % 11 == 0)}))
    file = path / "demand.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def run(tmp_path: Path, text: str, name: str, *, leap: bool = True, faults: str | None = None) -> Run:
    file = tmp_path / "c.toml"
    file.write_text(text)
    flags: dict[str, object] = {"TRACE": str(trace(tmp_path)), "--hash-block-tokens": 16}
    if faults is not None:
        scenario = tmp_path / "faults.toml"
        scenario.write_text(faults)
        flags["--faults"] = str(scenario)
    done = replay(load(file, flags), out=tmp_path / name, html=False, journal=True, leap=leap)
    assert done.missed == ()
    return Run(done.folder, done.report)


QUEUES = {
    "plain": "",
    "wspt": 'order = "wspt"\nmax_wait_s = 2.0\nrequests_per_worker = 6',
    "classes": '[[classes]]\nname = "short"\nquantum_tokens = 500\n[[classes]]\nname = "long"\nmin_tokens = 800\n',
}
MIXED = "count = 2"
LEGS = 'name = "p"\nrole = "prefill"\ncount = 2'
DECODE = """
[[workers]]
name = "d"
role = "decode"
count = 2
[workers.engine]
kv_blocks = 400
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.0004
decode_s = 0.01
"""


@pytest.mark.parametrize("kind", QUEUES)
@pytest.mark.parametrize("mode", ["kv", "least-loaded"])
def test_leaping_changes_nothing_for_who_waits(tmp_path: Path, mode: str, kind: str) -> None:
    text = BUSY_TOML.format(workers=MIXED, mode=mode, keys="", queue=QUEUES[kind])
    leapt, stepped = (run(tmp_path, text, f"r{leap}", leap=leap) for leap in (True, False))
    _same(leapt, stepped)
    assert Counter(rules(leapt))["queue"] > 20


@pytest.mark.parametrize("order", ["prefill-first", "decode-first"])
def test_the_prefill_leg_waits_and_leaping_changes_nothing(tmp_path: Path, order: str) -> None:
    text = BUSY_TOML.format(workers=LEGS, mode="kv", keys="", queue="") + DECODE
    text += f'[disaggregation]\norder = "{order}"\nbandwidth_gb_per_s = 50\nkv_bytes_per_token = 1000\n'
    leapt, stepped = (run(tmp_path, text, f"r{leap}", leap=leap) for leap in (True, False))
    _same(leapt, stepped)
    assert Counter(rules(leapt))["queue"] > 20
    assert Counter(leapt.requests("status")) == {"completed": 220}


def _same(leapt: Run, stepped: Run) -> None:
    for name in ("status", "reason", "worker_id", "dispatch_s", "admit_s", "first_token_s", "last_token_s"):
        assert leapt.requests(name) == stepped.requests(name), name


def rules(done: Run) -> list[str]:
    rules: list[str] = pq.read_table(done.folder / "decisions.parquet", columns=["rule"]).column("rule").to_pylist()
    return rules


FAULTS = """
version = 1
seed = 3
migration_limit = 5
detection_delay_ms = 50
faults = [
  {at_ms = 3000, kind = "worker_down", worker = "any", for_ms = 4000},
  {at_ms = 12000, kind = "worker_hang", worker = "any", for_ms = 1500},
  {at_ms = 16000, kind = "worker_down", worker = "any", for_ms = 2000},
  {kind = "client_disconnect", rate = 0.2, within_ms = 1500},
]
expect = [{invariants = "all"}]
"""


def test_the_journal_of_a_run_with_a_queue_replays(tmp_path: Path) -> None:
    """The same events through a fresh router give the same orders, timers included."""
    text = BUSY_TOML.format(workers=MIXED, mode="kv", keys="", queue=QUEUES["wspt"] + "\n" + QUEUES["classes"])
    done = run(tmp_path, text, "journal")
    lines = (done.folder / "journal.jsonl").read_text().splitlines()
    assert sum('"type":"Enqueue"' in line for line in lines) > 20
    config = load(done.folder / "config.toml")
    assert journal.replay(lines, [build_policy(config, 16)]) is None
    other = replaced(config, router=replaced(config.router, queue=replaced(config.router.queue, max_wait_s=1.0)))
    assert journal.replay(lines, [build_policy(other, 16)]) is not None


def test_the_time_in_the_router_is_part_of_the_queue_wait(tmp_path: Path) -> None:
    done = run(tmp_path, BUSY_TOML.format(workers=MIXED, mode="kv", keys="", queue=""), "waits")
    routers, wholes = done.requests("router_wait_s"), done.requests("queue_wait_s")
    waits = list(zip(routers, wholes, strict=True))
    assert all(0 <= router <= whole for router, whole in waits)
    assert max(router for router, _ in waits) == done.report.latency.router_wait_s.max
    assert ("router wait" in report_text(done.report, path="")) is True
    plain = run(tmp_path, BUSY_TOML.format(workers=MIXED, mode="kv", keys="", queue="").replace("900", "9000000"), "no")
    assert plain.report.latency.router_wait_s.max == 0
    assert "router wait" not in report_text(plain.report, path="")


TWO_KINDS = """
[[workers]]
name = "fast"
count = 2
taints = ["zone=a"]
[workers.engine]
kv_blocks = 400
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.0001
decode_s = 0.01
[[workers]]
name = "slow"
count = 2
on_cpu = {on_cpu}
[workers.engine]
kv_blocks = 400
[workers.latency]
model = "fixed"
prefill_s_per_token = 0.001
decode_s = 0.05
[router]
{router}
"""


@pytest.mark.parametrize(
    ("router", "on_cpu", "most"),
    [
        ('mode = "device-aware-weighted"\ndevice_ratio = 2', "true", 0.5),
        ('mode = "round-robin"\nrequired_taints = ["zone=a"]', "false", 0.0),
        ('mode = "kv"\npreferred_taints = ["zone=a:1"]', "false", 0.4),
    ],
)
def test_kinds_of_workers_and_their_taints(tmp_path: Path, router: str, on_cpu: str, most: float) -> None:
    text = TWO_KINDS.format(router=router, on_cpu=on_cpu)
    if "taints" not in router:  # what nobody asks for is refused
        text = text.replace('taints = ["zone=a"]', "")
    done = run(tmp_path, text, "kinds")
    share = sum(worker > 1 for worker in done.requests("worker_id")) / 220
    assert share <= most
    assert share > 0 or not most


def test_explanations_change_nothing_and_whoever_waited_has_one(tmp_path: Path) -> None:
    text = BUSY_TOML.format(workers=MIXED, mode="kv", keys="", queue="")
    text += "[router.busy]\nengine_running = 2\nengine_queue = 2\n"
    file = tmp_path / "c.toml"
    file.write_text(text)
    config = load(file, {"TRACE": str(trace(tmp_path)), "--hash-block-tokens": 16})
    plain, told = (replay(config, out=tmp_path / f"told{told}", explain=told) for told in (False, True))
    one, two = (Run(done.folder, done.report) for done in (plain, told))
    _same(one, two)
    rows = two.rows("decisions")
    waited = sum(row["rule"] == "queue" for row in rows)
    assert waited > 20
    assert [row["candidates"] is None for row in rows] == [row["worker_id"] is None for row in rows]
    assert sum(row["worker_id"] is None for row in rows) == waited
    assert told.report.routing.explained is not None
    assert told.report.routing.explained.decisions == len(rows) - waited
    assert "in the router" in (told.folder / "report.html").read_text()


def test_a_full_worker_is_never_sent_more(tmp_path: Path) -> None:
    """Several that waited go at one instant: each is counted before the next is placed."""
    text = BUSY_TOML.format(workers=MIXED, mode="kv", keys="", queue="")
    done = run(tmp_path, text + "[router.busy]\nengine_running = 2\nengine_queue = 2\n", "full")
    sent = [
        (at_s, change, worker)
        for worker, start_s, end_s in zip(*map(done.requests, ("worker_id", "dispatch_s", "last_token_s")), strict=True)
        if start_s is not None
        for at_s, change in ((start_s, 1), (end_s, -1))
    ]
    open_ = Counter[int]()
    most = 0
    for _, change, worker in sorted(sent):
        open_[worker] += change
        most = max(most, open_[worker])
    assert most == 4


def test_shedding_is_in_the_report(tmp_path: Path) -> None:
    text = BUSY_TOML.format(workers=MIXED, mode="kv", keys="", queue="").replace("[router.queue]", "[router.busy]")
    done = run(tmp_path, text.replace("prefill_busy_tokens", "prefill_tokens"), "shed")
    counts = done.report.counts
    assert counts.rejected > 10
    assert counts.rejected + counts.completed == 220
    assert all(reason.startswith("all_busy: ") for reason in counts.reasons)
    assert "overloaded above 900 prompt tokens" in report_text(done.report, path="")


@pytest.mark.parametrize("legs", [False, True])
@pytest.mark.parametrize("kind", QUEUES)
def test_losses_with_a_queue_keep_every_promise(tmp_path: Path, kind: str, legs: bool) -> None:
    """Workers die and come back, requests are sent again and clients leave, while others wait."""
    text = BUSY_TOML.format(workers=LEGS if legs else MIXED, mode="kv", keys="", queue=QUEUES[kind])
    text += DECODE + "[disaggregation]\nbandwidth_gb_per_s = 50\nkv_bytes_per_token = 1000\n" if legs else ""
    done = run(tmp_path, text, "faults", faults=FAULTS)
    ends = Counter(done.requests("status"))
    assert sum(ends.values()) == 220
    assert ends["cancelled"] > 5
    assert sum(done.requests("migrations")) > 0
    unlucky = {r for r, s in zip(done.requests("reason"), done.requests("status"), strict=True) if s == "failed"}
    assert all(reason.startswith("queue_timeout") for reason in unlucky)
    never_sent = [s for s, d in zip(done.requests("status"), done.requests("dispatch_s"), strict=True) if d is None]
    assert "cancelled" in never_sent, "somebody left while waiting"
