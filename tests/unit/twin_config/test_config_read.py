"""The configuration: which layer wins, where each value came from, and what is refused with which words."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.router.build import MODES
from twin.config import (
    AffinityConfig,
    BusyConfig,
    ClassConfig,
    Config,
    DisaggregationConfig,
    EngineConfig,
    KvbmConfig,
    LatencyConfig,
    LinkConfig,
    ObserveConfig,
    PathConfig,
    QueueConfig,
    RouterConfig,
    StartupConfig,
    TraceConfig,
    WorkerGroup,
)
from twin.config_effect import foreign_keys
from twin.config_read import FLAGS, TABLES, load
from twin.config_schema import NAMES as LIST
from twin.config_schema import Entry, keys_of
from twin.config_text import show, to_plain, to_toml
from twin.perf.build import MODELS
from twin.routing import queue_classes

TOY = """
seed = 7
[trace]
path = "burst.jsonl"
on_bad_row = "skip"

[[workers]]
count = 1
[workers.engine]
chunked_prefill = false
exclusive_prefill = true
max_num_seqs = 1
[workers.latency]
model = "fixed"
prefill_s = 0
prefill_s_per_token = 0.001
decode_s = 0.010
"""


@pytest.fixture
def toml(tmp_path: Path):
    def write(text: str) -> Path:
        file = tmp_path / "cluster.toml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def refusal(*, file: Path | None = None, flags: dict[str, object] | None = None, sets: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, flags, sets)
    return str(caught.value)


# ---------------------------------------------------------------- layers


def test_without_anything_the_defaults_of_the_architecture_hold() -> None:
    config = load()
    (group,) = config.workers
    assert (group.count, group.role, group.model, group.gpu, group.tp) == (4, "mixed", "llama-3.1-70b", "h100_sxm", 4)
    assert (group.weights, group.kv, group.latency.model) == ("fp8", "bf16", "roofline")
    engine = group.engine
    assert (engine.kind, engine.block_size, engine.max_num_seqs, engine.max_num_batched_tokens) == (
        "vllm",
        16,
        256,
        8192,
    )
    assert engine.prefix_caching
    assert engine.chunked_prefill
    assert engine.kv_blocks is None
    assert config.router.mode == "round-robin"
    assert set(config.origins.values()) == {"default"}


def test_a_file_gives_the_toy_engine_of_the_cases(toml) -> None:
    file = toml(TOY)
    config = load(file)
    (group,) = config.workers
    assert group.engine == EngineConfig(chunked_prefill=False, exclusive_prefill=True, max_num_seqs=1)
    assert group.latency.model == "fixed"
    assert dict(group.latency.params) == {"prefill_s": 0.0, "prefill_s_per_token": 0.001, "decode_s": 0.01}
    assert config.trace.path == file.parent / "burst.jsonl"
    assert config.origins["workers.pool.engine.max_num_seqs"] == f"{file}:12"
    assert config.origins["workers.pool.latency.decode_s"] == f"{file}:17"
    assert config.origins["seed"] == f"{file}:2"


def test_flags_win_over_the_file_and_set_over_both(toml) -> None:
    file = toml(TOY)
    config = load(file, {"--seed": 8, "--workers": 3, "--limit": None}, ["seed=9"])
    assert config.seed == 9
    assert config.workers[0].count == 3
    assert config.origins["seed"] == "--set"
    assert config.origins["workers.pool.count"] == "--workers"
    assert config.origins["trace.limit"] == "default"


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_every_flag_leads_to_a_key(flag: str) -> None:
    path, _, name = FLAGS[flag].rpartition(".")
    if path == "sla":
        return
    of_the_model = MODELS["roofline"].keys if path == "workers.latency" else ()
    assert name in {*(entry.name for entry in keys_of(TABLES[path])), *of_the_model}


@pytest.mark.parametrize(
    ("text", "kind", "model"),
    [
        ('engine = "vllm"\nlatency = "polynomial"', "vllm", "polynomial"),
        ('engine.kind = "vllm"\nlatency.model = "fixed"', "vllm", "fixed"),
        ('engine = { kind = "vllm" }\nlatency = { model = "table" }', "vllm", "table"),
    ],
)
def test_engine_and_latency_may_be_one_word_or_a_table(toml, text: str, kind: str, model: str) -> None:
    (group,) = load(toml(f"[[workers]]\n{text}\n")).workers
    assert (group.engine.kind, group.latency.model) == (kind, model)


def test_one_table_of_workers_is_a_group(toml) -> None:
    (group,) = load(toml("[workers]\ncount = 9\n")).workers
    assert group.count == 9


def test_groups_are_told_apart_by_name(toml) -> None:
    file = toml('[[workers]]\nname = "big"\ntp = 8\n[[workers]]\nname = "small"\n[workers.engine]\nblock_size = 32\n')
    config = load(file, sets=["workers.big.engine.block_size=64", "workers.small.count=2"])
    assert [(g.name, g.tp, g.count, g.engine.block_size) for g in config.workers] == [
        ("big", 8, 4, 64),
        ("small", 4, 2, 32),
    ]
    assert config.origins["workers.small.engine.block_size"] == f"{file}:7"
    assert "say which one" in refusal(file=file, flags={"--workers": 3})


def test_the_modes_are_those_of_the_router() -> None:
    (mode,) = (entry for entry in keys_of(RouterConfig) if entry.name == "mode")
    assert set(mode.limits.choices) == set(MODES)


@pytest.mark.parametrize("mode", ["kv", "KV", "round_robin", "Round-Robin", "least_loaded", "power-of-two"])
def test_mode_names_take_dashes_underscores_and_any_case(mode: str) -> None:
    assert load(sets=[f"router.mode={mode}"]).router.mode == mode.lower().replace("_", "-")


def test_a_concurrency_means_a_closed_loop() -> None:
    config = load(flags={"--concurrency": 4})
    assert config.trace.arrivals == "closed"
    assert config.origins["trace.arrivals"] == "implied by trace.concurrency"
    assert "needs --concurrency" in refusal(sets=("trace.arrivals=closed",))


@pytest.mark.parametrize("text", ["seed", "trace.speedup", "router.mode"])
def test_set_without_a_value_says_how(text: str) -> None:
    assert refusal(sets=(text,)) == f"--set {text}: no '='; write it like --set router.mode=kv"


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[workers.engine]\nblock_sizes = 3", 2, ["block_sizes", "[workers.engine]", "did you mean block_size"]),
        ("block_size = 3", 1, ["no key block_size in the top level", "belongs to [workers.engine]"]),
        ("[router]\nspeedup = 2.0", 2, ["belongs to [trace]"]),
        ("[trace]\nseed = 1", 2, ["belongs above the first table"]),
        ("[ruoter]\nmode = 'kv'", 1, ["no table [ruoter]", "did you mean router"]),
        ("router = 3", 1, ["router is a table"]),
        ("workers = 3", 1, ["[[workers]]"]),
        ("[workers.engine]\nkv_blocks = 0", 2, ["workers.pool.engine.kv_blocks = 0", "1 or more"]),
        ("[workers.engine]\nkv_blocks = 'many'", 2, ['= "many"', "a whole number"]),
        ("[workers.engine]\nkv_blocks = 2.5", 2, ["a whole number"]),
        ("[workers.engine]\nkv_blocks = true", 2, ["a whole number"]),
        ("[workers.engine]\ngpu_memory_utilization = 1.5", 2, ["1 or less", "the default is 0.9"]),
        ("[workers.engine]\nprefix_caching = 1", 2, ["true or false"]),
        ("[trace]\nspeedup = 0", 2, ["more than 0"]),
        ("[trace]\nspeedup = nan", 2, ["finite"]),
        ("[trace]\nspeedup = '2'", 2, ["a number"]),
        ("[trace]\nrate_rps = inf", 2, ["finite"]),
        ("[trace]\nformat = ''", 2, ["not be empty"]),
        ("[trace]\nstart_s = 9\nend_s = 3", 3, ["more than trace.start_s, 9"]),
        ("[trace]\nrate_rps = 3.0\nspeedup = 2.0", 2, ["both set the rate"]),
        ("[trace]\non_bad_row = 'ignore'", 2, ["error or skip"]),
        ("[router]\nmode = 'least-load'", 2, ["did you mean least-loaded"]),
        ("[router]\nhost_cache_hit_weight = 2", 2, ["1 or less"]),
        ("[router]\nprefill_load_scale = 1e308", 2, ["1000000 or less"]),
        ("[router.thunder]\ntick_s = 1e300", 2, ["1000000000 or less"]),
        ("[workers.latency]\nmodel = 'fixed'\ndecode_s = [1]", 3, ["one number, text, true or false"]),
        ("[workers.latency]\nmodel = 'fixed'\ndecode_s = nan", 3, ["finite"]),
        ("seed = -1", 1, ["seed = -1", "0 or more"]),
        ("seed = 9223372036854775808", 1, ["9223372036854775807 or less"]),
        ("[[workers]]\nname = 'engine'", 2, ["not the name of a key"]),
        ("[[workers]]\nname = 'a.b'", 2, ["letters, digits"]),
    ],
)
def test_a_bad_file_is_refused_in_one_line_with_its_place(toml, text: str, line: int, words: list[str]) -> None:
    file = toml(text + "\n")
    told = refusal(file=file)
    assert told.startswith(f"{file}:{line}: ")
    assert "\n" not in told
    for word in words:
        assert word in told


def test_two_groups_of_one_name_are_refused(toml) -> None:
    assert "2 groups of workers are named pool" in refusal(file=toml("[[workers]]\n[[workers]]\n"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"seed = = 1\n", "c.toml:1: not valid TOML"),
        (b"\xff\xfe", "not UTF-8 text at byte 0"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "c.toml"
    if content is not None:
        file.write_bytes(content)
    assert words in refusal(file=file)


@pytest.mark.parametrize("value", ["1e400", "nan", "-inf", "fast", "", "0x10", "--2"])
def test_text_that_is_no_number_is_refused(value: str) -> None:
    assert "trace.speedup" in refusal(sets=(f"trace.speedup={value}",))


# ---------------------------------------------------------------- links

LINKS = """
[[links]]
name = "spine"
per = "run"
bandwidth_gb_per_s = 400
[[workers]]
links.kv = "nic+spine"
[[links]]
name = "nic"
latency_s = 0.001
"""


def test_links_are_tables_of_their_own(toml) -> None:
    file = toml(LINKS)
    config = load(file, sets=["links.nic.discipline=fifo", "allow_no_effect=true"])
    assert [(link.name, link.kind, link.per, link.bandwidth_gb_per_s) for link in config.links] == [
        ("spine", "nic", "run", 400.0),
        ("nic", "nic", None, None),
    ]
    assert (config.links[1].latency_s, config.links[1].discipline) == (0.001, "fifo")
    assert config.workers[0].links.kv == "nic+spine"
    assert config.origins["links.spine.bandwidth_gb_per_s"] == f"{file}:5"
    assert config.origins["links.nic.latency_s"] == f"{file}:10"
    assert len(config.no_effect) == 3, "nothing moves without prefill workers"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[[links]]\nkind = 'nic'", 1, ["no name", "name = ..."]),
        ("[links]\nname = 'a'", 1, ["[[links]]"]),
        ("[[links]]\nname = 'a'\n[[links]]\nname = 'a'", 4, ["2 links are named a"]),
        ("[[links]]\nname = 'a:b'", 2, ["letters, digits, - and _"]),
        ("[[links]]\nname = 'a'\nkind = 'string'", 3, ["nvlink, pcie, nic, storage or disk"]),
        ("[[links]]\nname = 'a'\nbandwidth_gb_per_s = 0", 3, ["more than 0"]),
        ("[[links]]\nname = 'a'\nspeed = 0", 3, ["there is no key speed in [links]"]),
        ("[workers.links]\nkv = 'nic+spin'", 2, ['there is no link "spin"', "disk, nic, nvlink, pcie, storage"]),
    ],
)
def test_a_bad_link_is_refused_with_its_place(toml, text: str, line: int, words: list[str]) -> None:
    file = toml(text + "\n")
    told = refusal(file=file)
    assert told.startswith(f"{file}:{line}: "), told
    for word in words:
        assert word in told


def test_a_link_that_no_file_declares_cannot_be_set() -> None:
    assert "there is no link nic; there are none" in refusal(sets=("links.nic.latency_s=1",))


# ---------------------------------------------------------------- classes, queue, taints

CLASSES = """
[router.queue]
prefill_busy_share = 2
order = "wspt"
[[classes]]
name = "short"
[[classes]]
name = "long"
min_tokens = 4000
quantum_tokens = 2000
order = "fcfs"
"""


def test_classes_and_the_tables_of_the_router(toml) -> None:
    file = toml(CLASSES)
    config = load(file, sets=["classes.long.waits=false", "router.busy.engine_queue=16", "allow_no_effect=true"])
    assert [(one.name, one.min_tokens, one.quantum_tokens, one.order, one.waits) for one in config.classes] == [
        ("short", 0, 8192, None, True),
        ("long", 4000, 2000, "fcfs", False),
    ]
    assert (config.router.queue.prefill_busy_share, config.router.queue.order) == (2.0, "wspt")
    assert config.router.busy.engine_queue == 16
    assert config.origins["classes.long.min_tokens"] == f"{file}:9"
    assert [(one.name, one.order) for one in queue_classes(config)] == [("short", "wspt"), ("long", "fcfs")]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[[classes]]\nmin_tokens = 5", 1, ["this class has no name"]),
        ("[classes]\nname = 'a'", 1, ["[[classes]]"]),
        ("[router]\nqueue = 5", 2, ["router.queue is a table; write [router.queue]"]),
        ("[router.queue]\nbusy_worker_share = 0", 2, ["more than 0"]),
        ("[router.busy]\nengine_queue = 1", 2, ["2 or more"]),
        ("[router.affinity]\nmode = 'firm'", 2, ["off, hard or soft"]),
        ("[router.affinity]\nttl_s = 0.5", 2, ["1 or more"]),
        ("[router]\npreferred_taints = ['zone=a']", 2, ["a taint, a colon and a number"]),
        ("[router]\nrequired_taints = ['zone=a']", 2, ["no group of workers has them all", "workers.taints"]),
        (
            "[router.queue]\nprefill_busy_tokens = 5\n[[classes]]\nname = 'a'\nmin_tokens = 5",
            4,
            ["one at min_tokens = 0"],
        ),
        (
            "[router.queue]\nprefill_busy_tokens = 5\n[[classes]]\nname = 'a'\n[[classes]]\nname = 'b'",
            4,
            ["from 0, 0 tokens on"],
        ),
        (
            "[router.queue]\nprefill_busy_tokens = 5\n[[classes]]\nname = 'a'\nfamily = 'x'",
            4,
            ["no class has family 'default'"],
        ),
    ],
)
def test_a_bad_table_of_the_router_is_refused_with_its_place(toml, text: str, line: int, words: list[str]) -> None:
    file = toml(text + "\n")
    told = refusal(file=file)
    assert told.startswith(f"{file}:{line}: "), told
    for word in words:
        assert word in told


# ---------------------------------------------------------------- options without effect


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["router.overlap_score_credit=2"], "router.overlap_score_credit"),
        (["router.mode=kv", "router.host_cache_hit_weight=0.5"], "router.host_cache_hit_weight"),
        (["router.mode=kv", "router.track_output_blocks=true"], "router.track_output_blocks"),
        (
            ["router.mode=kv", "router.overlap_score_weight=2", "router.prefill_load_scale=3"],
            "router.prefill_load_scale",
        ),
        (["router.mode=kv", "router.track_active_blocks=false", "router.decode_basis=active"], "router.decode_basis"),
        (
            ["router.mode=kv", "router.track_prefill_tokens=false", "router.overlap_score_credit=2"],
            "router.overlap_score_credit",
        ),
        (["router.tie_break=lowest_id"], "router.tie_break"),
        (["observe.kv_event_lag_s=1"], "observe.kv_event_lag_s"),
        (["observe.report_lag_s=1"], "observe.report_lag_s"),
        (["trace.concurrency=3", "trace.rate_rps=2"], "trace.rate_rps"),
        (["trace.concurrency=3", "trace.speedup=2"], "trace.speedup"),
        (["trace.concurrency=3", "trace.arrivals=recorded"], "trace.concurrency"),
        (
            ["workers.engine.kv_blocks=9", "workers.engine.gpu_memory_utilization=0.5"],
            "workers.pool.engine.gpu_memory_utilization",
        ),
        (["workers.engine.kv_blocks=9", "workers.latency=fixed", "workers.gpu=a100"], "workers.pool.gpu"),
        (["workers.latency.decode_s=1"], "workers.pool.latency.decode_s"),
        (["workers.startup_s=30"], "workers.pool.startup_s"),
        (["workers.startup.weights_from=peer"], "workers.pool.startup.weights_from"),
        (["workers.engine.nextn=2", "workers.engine.accept_rates=0.9,0.5,0.1"], "workers.pool.engine.accept_rates"),
        (["workers.links.kv=nvlink"], "workers.pool.links.kv"),
        (["router.queue.max_wait_s=3"], "router.queue.max_wait_s"),
        (["router.affinity.ttl_s=3"], "router.affinity.ttl_s"),
        (["router.busy.engine_running=3"], "router.busy.engine_running"),
        (["router.prefill_tokens_per_s=1000"], "router.prefill_tokens_per_s"),
        (["router.device_ratio=4"], "router.device_ratio"),
        (["router.mode=device-aware-weighted", "router.device_ratio=4"], "router.device_ratio"),
        (["workers.on_cpu=true"], "workers.pool.on_cpu"),
        (["workers.taints=zone=a"], "workers.pool.taints"),
        (["workers.taints=zone=a", "router.preferred_taints=zone=a:1"], "router.preferred_taints"),
        (["router.mode=kv", "router.preferred_taints=zone=a:1"], "router.preferred_taints"),
        (["router.use_kv_events=false"], "router.use_kv_events"),
        (["router.mode=kv", "router.index_policy=lru"], "router.index_policy"),
        (["router.mode=kv", "router.approximate_ttl_s=5"], "router.approximate_ttl_s"),
        (
            ["router.mode=kv", "router.use_kv_events=false", "router.index_policy=lru", "router.approximate_ttl_s=5"],
            "router.approximate_ttl_s",
        ),
        (["router.mode=kv", "router.use_kv_events=false", "router.predicted_ttl_s=5"], "router.predicted_ttl_s"),
        (["router.mode=kv", "router.use_kv_events=false", "observe.kv_event_lag_s=1"], "observe.kv_event_lag_s"),
        (
            ["router.mode=kv", "router.use_kv_events=false", "replicas.count=2", "replicas.kv_event_lag_s=1"],
            "replicas.kv_event_lag_s",
        ),
        (
            [
                "router.mode=kv",
                "router.use_kv_events=false",
                "workers.kvbm.cpu_cache_gb=1",
                "router.host_cache_hit_weight=0.5",
            ],
            "router.host_cache_hit_weight",
        ),
        (
            ["router.mode=kv", "router.track_active_blocks=false", "router.busy.decode_blocks_share=0.9"],
            "router.busy.decode_blocks_share",
        ),
        (["workers.kvbm.cpu_latency_s=1"], "workers.pool.kvbm.cpu_latency_s"),
        (["workers.kvbm.remote=true", "workers.kvbm.disk_gb_per_s=1"], "workers.pool.kvbm.disk_gb_per_s"),
        (["workers.kvbm.remote=true", "workers.kvbm.cpu_eviction=lru"], "workers.pool.kvbm.cpu_eviction"),
        (["workers.kvbm.cpu_cache_gb=1", "workers.kvbm.min_lfu_count=1"], "workers.pool.kvbm.min_lfu_count"),
        (["workers.kvbm.cpu_cache_gb=1", "workers.kvbm.cpu_cache_tokens=1"], "workers.pool.kvbm.cpu_cache_tokens"),
        (["workers.kvbm.cpu_cache_gb=1", "workers.kvbm.onboard_deadline_s=1"], "workers.pool.kvbm.onboard_deadline_s"),
        (
            ["router.mode=kv", "workers.kvbm.cpu_cache_gb=1", "router.shared_cache_multiplier=0.5"],
            "router.shared_cache_multiplier",
        ),
        (["workers.kvbm.events=dedupe"], "workers.pool.kvbm.events"),
        (["workers.kvbm.cpu_cache_gb=1", "workers.kvbm.events=dedupe"], "workers.pool.kvbm.events"),
        (
            [
                "router.mode=kv",
                "router.use_kv_events=false",
                "workers.kvbm.cpu_cache_gb=1",
                "workers.kvbm.events=dedupe",
            ],
            "workers.pool.kvbm.events",
        ),
        (
            [
                "router.mode=kv",
                "workers.kvbm.cpu_cache_gb=1",
                "workers.kvbm.events=dedupe",
                "router.host_cache_hit_weight=0.5",
            ],
            "router.host_cache_hit_weight",
        ),
        (["workers.engine.host_offload=on_store"], "--set: workers.pool.engine.host_offload"),
        (
            ["workers.engine.host_blocks=9", "workers.links.host=pcie", "workers.engine.host_load_gb_per_s=3"],
            "--set: workers.pool.engine.host_load_gb_per_s",
        ),
    ],
)
def test_an_option_without_effect_is_refused_or_listed(sets: list[str], key: str) -> None:
    told = refusal(sets=tuple(sets))
    assert f"{key} has no effect: " in told
    assert "--allow-no-effect" in told
    allowed = load(sets=[*sets, "allow_no_effect=true"])
    assert [line for line in allowed.no_effect if f"{key} has no effect: " in line]


@pytest.mark.parametrize(
    "sets",
    [
        ["router.overlap_score_credit=1.0"],
        ["router.mode=kv", "router.overlap_score_credit=2", "observe.kv_event_lag_s=1", "router.tie_break=lowest-id"],
        ["router.mode=least-loaded", "router.tie_break=least_recent"],
        ["router.mode=kv", "router.use_kv_events=false", "router.approximate_ttl_s=5"],
        ["router.mode=kv", "router.use_kv_events=false", "router.index_policy=lru"],
        ["router.mode=kv", "router.predicted_ttl_s=5"],
        ["workers.engine.kv_blocks=9", "workers.gpu=a100"],
        ["workers.latency=fixed", "workers.latency.decode_s=1"],
        ["router.mode=kv", "workers.kvbm.cpu_cache_gb=1", "router.host_cache_hit_weight=0.5", "workers.kvbm.flush_s=1"],
        ["workers.kvbm.remote=true", "workers.kvbm.cpu_gb_per_s=1", "workers.kvbm.min_lfu_count=1"],
        ["router.mode=kv", "workers.kvbm.cpu_cache_gb=1", "workers.kvbm.events=dedupe"],
        ["workers.kvbm.cpu_cache_gb=1", "workers.links.host=pcie"],
    ],
)
def test_an_option_with_effect_or_at_its_default_is_taken(sets: list[str]) -> None:
    assert load(sets=sets).no_effect == ()


# ---------------------------------------------------------------- round trip

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(string.ascii_letters + string.digits, min_size=1, max_size=8).map(lambda name: f"team-{name}")

TAINTS = st.builds("{}:{!r}".format, TEXTS.map(str.strip).filter(bool), NUMBERS).filter(lambda text: "," not in text)


def values(entry: Entry) -> st.SearchStrategy:
    """Any legal value of a key, absent included."""
    limits = entry.limits
    drawn: st.SearchStrategy
    if limits.choices:
        drawn = st.sampled_from(limits.choices)
    elif entry.kind == "int":
        drawn = st.integers(int(limits.low or 0), int(limits.high or 100))
    elif entry.kind == "float":
        low = limits.low if limits.low is not None else limits.above
        drawn = st.floats(low, limits.high, exclude_min=limits.low is None, allow_infinity=False, allow_nan=False)
    elif entry.kind == "bool":
        drawn = st.booleans()
    elif entry.kind == LIST:
        drawn = st.lists(TEXTS.map(str.strip).filter(bool), unique=True, max_size=3).map(tuple)
    elif entry.kind == "Path":
        drawn = TEXTS.filter(lambda t: "\0" not in t and "/" not in t and t.strip(".")).map(lambda t: Path("/tmp") / t)
    else:
        drawn = TEXTS
    return st.none() | drawn if entry.default is None else drawn


def tables(cls: type, **fixed: st.SearchStrategy) -> st.SearchStrategy:
    return st.builds(cls, **{**{entry.name: values(entry) for entry in keys_of(cls)}, **fixed})


def latencies() -> st.SearchStrategy[LatencyConfig]:
    keys = st.text(string.ascii_lowercase + "_é.", min_size=1, max_size=6).filter(
        lambda key: key not in ("model", "path", "hardware")
    )
    params = st.dictionaries(keys, NUMBERS | st.booleans() | TEXTS, max_size=4).map(MappingProxyType)
    return tables(LatencyConfig, params=params).filter(lambda latency: not foreign_keys(latency))


def traces() -> st.SearchStrategy[TraceConfig]:
    def sensible(trace: TraceConfig) -> TraceConfig:
        if trace.concurrency is None and trace.arrivals == "closed":
            trace = replace(trace, arrivals="poisson")
        if trace.rate_rps is not None:
            trace = replace(trace, speedup=1.0)
        return replace(trace, start_s=None) if trace.end_s is not None else trace

    return tables(TraceConfig).map(sensible)


@given(
    tables(
        Config,
        allow_no_effect=st.just(True),
        sla=st.none(),
        trace=traces(),
        workers=st.lists(
            tables(
                WorkerGroup,
                name=NAMES,
                role=st.just("mixed"),
                loras=st.lists(TEXTS.map(str.strip).filter(bool), unique=True, max_size=3).map(tuple),
                engine=tables(
                    EngineConfig,
                    block_size=st.just(16),  # one for all: the router may be kv
                    accept_rates=st.just("0.5,0.25"),
                    cuda_graph_sizes=st.none() | st.just("1,2"),
                ),
                latency=latencies(),
                startup=tables(StartupConfig),
                kvbm=tables(KvbmConfig),
                links=st.builds(PathConfig, kv=st.sampled_from(["nic", "nvlink", "nic+storage"])),
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda group: group.name,
        ).map(tuple),
        links=st.lists(tables(LinkConfig, name=NAMES), max_size=2, unique_by=lambda link: link.name).map(tuple),
        router=tables(
            RouterConfig,
            required_taints=st.none(),
            preferred_taints=st.none() | st.lists(TAINTS, unique=True, max_size=3).map(tuple),
            queue=tables(QueueConfig),
            busy=tables(BusyConfig),
            affinity=tables(AffinityConfig),
        ),
        classes=st.lists(tables(ClassConfig, name=NAMES), max_size=3, unique_by=lambda one: one.name).map(
            lambda found: tuple(replace(one, family="default", min_tokens=at) for at, one in enumerate(found))
        ),
        observe=tables(ObserveConfig),
        disaggregation=tables(DisaggregationConfig),
    )
)
def test_a_config_loads_back_from_its_text(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load(file) == config
    file.write_text(show(config), encoding="utf-8")
    assert load(file) == config


def test_the_text_is_complete_and_puts_the_trace_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml
) -> None:
    monkeypatch.chdir(tmp_path)
    text = to_toml(load(flags={"TRACE": "t.parquet"}))
    assert f'path = "{tmp_path / "t.parquet"}"' in text
    for table, header in [(TraceConfig, "[trace]"), (EngineConfig, "[workers.engine]"), (RouterConfig, "[router]")]:
        part = text.split(f"{header}\n")[1].split("\n\n")[0]
        named = {line.split(" = ")[0] for line in part.splitlines()}
        optional = {entry.name for entry in keys_of(table) if entry.default is None}
        assert {entry.name for entry in keys_of(table)} - optional <= named


def test_files_are_named_from_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml) -> None:
    file = toml("trace.path = 't.csv'\n[workers.latency]\nmodel = 'table'\npath = 'steps.csv'\n")
    monkeypatch.chdir(tmp_path.parent)
    config = load(file, sets=["workers.latency.source=here"])
    assert config.trace.path == tmp_path / "t.csv"
    assert config.workers[0].latency.params["path"] == str(tmp_path / "steps.csv")
    assert (
        load(sets=["workers.latency=table", "workers.latency.path=p.csv"]).workers[0].latency.params["path"] == "p.csv"
    )
    plain = to_plain(config)
    assert plain["workers"]["pool"]["latency"]["path"] == "steps.csv"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load(file) == config


def test_a_latency_key_of_another_model_is_left_out_when_allowed() -> None:
    config = load(sets=["workers.latency=fixed", "workers.latency.decode_s=1", "workers.latency.extrapolate=true",
                        "allow_no_effect=true"])  # fmt: skip
    assert dict(config.workers[0].latency.params) == {"decode_s": 1.0}
    assert "belongs to the table model" in config.no_effect[0]


def test_the_view_with_origins_names_flag_file_and_set(toml) -> None:
    file = toml(TOY)
    text = show(load(file, {"--seed": 3}, ["workers.count=2"]))
    assert "seed = 3                                  # --seed" in text
    assert f"max_num_seqs = 1                          # {file}:12" in text
    assert "count = 2                                 # --set" in text
    assert "# kv_blocks: what fits into memory beside the weights" in text


def test_plain_values_do_not_say_where_the_trace_lies(tmp_path: Path) -> None:
    here, there = (to_plain(load(flags={"TRACE": folder / "t.csv"})) for folder in (tmp_path, tmp_path / "b"))
    assert here == there
    assert here["trace"]["path"] == "t.csv"
    assert here["workers"]["pool"]["engine"]["block_size"] == 16
