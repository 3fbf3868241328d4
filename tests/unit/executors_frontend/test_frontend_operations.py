"""What operators see: readiness, metrics with their names and buckets, limits, decisions, the dashboard."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from frontend_builders import (
    ANSWER,
    MODEL,
    Script,
    ScriptedBackend,
    Shadowed,
    chat,
    chunks,
    frames,
    ids_of,
    run,
    served,
    shadow,
)

from executors.frontend.live import Live, percentile_ms
from executors.frontend.metrics import Metrics
from executors.frontend.settings import Settings
from policies.cluster.ids import WorkerId

CHAT = "/v1/chat/completions"


@run
async def test_readiness_names_what_is_missing_and_liveness_does_not_care() -> None:
    backend = ScriptedBackend()
    async with served(backend) as it:
        assert (await it.http.get("/ready")).json() == {"ready": True, "missing": []}
        assert (await it.http.get("/health")).json()["status"] == "ready"
        backend.gone("decode workers of tiny: 0 of 1")
        for path in ("/ready", "/health"):
            answer = await it.http.get(path)
            assert answer.status_code == 503
            assert answer.json()["missing"] == ["decode workers of tiny: 0 of 1"]
        assert (await it.http.get("/live")).status_code == 200
        assert (await it.http.get("/v1/models")).json()["data"] == []
        ready = await it.http.get(f"/v1/models/{MODEL}/ready")
        assert (ready.status_code, ready.json()["missing"]) == (503, ["decode workers of tiny: 0 of 1"])
        assert (await it.metrics())['dynamo_frontend_model_ready{model="tiny"}'] == 0


@run
async def test_a_model_that_only_the_tokenizer_knows_is_not_ready() -> None:
    backend = ScriptedBackend()
    backend.state = replace(backend.state, models=("other",), ready=("other",))
    async with served(backend) as it:
        answer = await it.http.get("/ready")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["no model is ready"])


@run
async def test_case_01_reads_off_the_buckets() -> None:
    clock = [0.0]
    waits = iter((0.1, 0.3, 0.5))

    def script(ask: object) -> Script:
        first = next(waits)
        return Script(says=ids_of(ANSWER), times=[first + 0.01 * at for at in range(len(ids_of(ANSWER)))])

    async with served(ScriptedBackend(script, now=lambda: clock[0])) as it:
        for _ in range(3):
            assert (await it.post(CHAT, chat(max_tokens=10))).status_code == 200
        samples = await it.metrics()
    name, label = "dynamo_frontend_time_to_first_token_seconds", 'model="tiny"'
    assert samples[f"{name}_count{{{label}}}"] == 3
    assert samples[f"{name}_sum{{{label}}}"] == pytest.approx(0.9)
    cumulative = [samples[f'{name}_bucket{{le="{le}",{label}}}'] for le in ("0.1", "0.25", "0.5", "+Inf")]
    assert cumulative == [1, 1, 3, 3]
    itl = "dynamo_frontend_inter_token_latency_seconds"
    assert samples[f"{itl}_count{{{label}}}"] == 27
    assert samples[f"{itl}_sum{{{label}}}"] == pytest.approx(0.27)
    assert samples[f'{itl}_bucket{{le="0.011",{label}}}'] == 27


@run
async def test_tokens_of_one_step_are_counted_as_tokens_not_as_chunks() -> None:
    clock = [0.0]
    backend = ScriptedBackend(
        Script(says=ids_of(ANSWER)[:8], steps=[4, 4], times=[0.1 * at for at in range(1, 9)]), now=lambda: clock[0]
    )
    async with served(backend) as it:
        told = chunks((await it.post(CHAT, chat(stream=True))).text)
        samples = await it.metrics()
    assert len(told) == 3
    assert samples['dynamo_frontend_inter_token_latency_seconds_count{model="tiny"}'] == 7
    assert samples['dynamo_frontend_inter_token_latency_seconds_sum{model="tiny"}'] == pytest.approx(0.4)


def test_buckets_of_both_profiles() -> None:
    def les(fine: bool) -> list[str]:
        metrics = Metrics("p", fine=fine)
        metrics.ttft.labels("m").observe(1)
        text = metrics.exposition().decode()
        return re.findall(r'p_time_to_first_token_seconds_bucket\{le="([^"]+)"', text)

    dynamo = "0.0 0.0022 0.0047 0.01 0.022 0.047 0.1 0.22 0.47 1.0 2.2 4.7 10.0 22.0 48.0 100.0 220.0 480.0 +Inf"
    assert les(False) == dynamo.split()
    assert set(les(True)) == {*dynamo.split(), "0.001", "0.002", "0.005", "0.05", "0.25", "0.5", "2.5"}
    assert [float(one) for one in les(True)] == sorted(float(one) for one in les(True))


@run
async def test_metrics_have_the_names_of_the_contract() -> None:
    async with served(ScriptedBackend(Script(says=ids_of(ANSWER), cached_tokens=3))) as it:
        await it.post(CHAT, chat(nvext={"router": {"ttft_target": 100_000, "itl_target": 0.000001}}))
        await it.post(CHAT, chat(n=9))
        names = {name.partition("{")[0] for name in await it.metrics()}
        samples = await it.metrics()
    for name in (
        "requests_total", "requests_started_total", "failures_total", "disconnected_clients", "active_requests",
        "inflight_requests", "queued_requests", "time_to_first_token_seconds_bucket",
        "inter_token_latency_seconds_bucket", "request_duration_seconds_bucket", "input_sequence_tokens_bucket",
        "cached_tokens_bucket", "output_sequence_tokens_bucket", "output_tokens_total",
        "stage_duration_seconds_bucket", "stage_requests", "template_seconds_bucket", "tokenize_seconds_bucket",
        "event_loop_delay_seconds_bucket", "model_ready", "model_context_length", "model_workers",
        "worker_last_time_to_first_token_seconds", "worker_last_inter_token_latency_seconds",
        "worker_last_input_sequence_tokens",
    ):  # fmt: skip
        assert f"dynamo_frontend_{name}" in names, name
    for name in ("queue_wait_seconds_bucket", "slow_reader_total", "unknown_parameter_total", "body_bytes_bucket"):
        assert f"dynatwin_frontend_{name}" in names, name
    assert samples['dynatwin_frontend_own_target_total{met="true",metric="ttft"}'] == 1
    assert samples['dynatwin_frontend_own_target_total{met="false",metric="itl"}'] == 1
    labels = 'endpoint="chat_completions",error_type="",model="tiny",request_type="unary",status="success"'
    assert samples[f"dynamo_frontend_requests_total{{{labels}}}"] == 1
    assert samples['dynamo_frontend_worker_last_input_sequence_tokens{dp_rank="0",worker_id="7"}'] > 0


@run
async def test_gauges_rise_while_work_is_open() -> None:
    hold, more = asyncio.Event(), asyncio.Event()
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), before={0: hold, 1: more}))
    gauges = ("active_requests", "inflight_requests", "queued_requests")
    names = [f'dynamo_frontend_{name}{{model="tiny"}}' for name in gauges]
    async with served(backend) as it:
        open_one = asyncio.create_task(it.post(CHAT, chat(stream=True)))
        await backend.arrived.wait()
        samples = await it.metrics()
        assert [samples[name] for name in names] == [1, 1, 1]
        hold.set()
        while (samples := await it.metrics())[names[2]]:
            pass
        assert [samples[name] for name in names] == [1, 1, 0]
        more.set()
        await open_one
        samples = await it.metrics()
        assert [samples[name] for name in names] == [0, 0, 0]


@run
async def test_workers_that_are_starting_are_counted_and_have_no_gauges() -> None:
    backend = ScriptedBackend()
    one = backend.workers()[0]
    starting = replace(one, worker_id=WorkerId(-1), state="starting", in_flight=0)
    backend.workers = lambda: [one, starting, starting]  # type: ignore[method-assign]
    async with served(backend) as it:
        samples = await it.metrics()
    assert samples['dynamo_frontend_model_workers{role="mixed",state="starting"}'] == 2
    assert [name for name in samples if "worker_in_flight" in name] == [
        'dynamo_frontend_worker_in_flight{dp_rank="0",worker_id="7"}'
    ]


@run
async def test_a_twin_beside_the_cluster_tells_predicted_and_measured() -> None:
    name = "dynatwin_shadow"
    async with served() as it:
        assert not [sample for sample in await it.metrics() if sample.startswith(name)]
        assert (await it.http.get("/dashboard/data")).json()["shadow"] is None
    async with served(Shadowed(shadow())) as it:
        told = {key.removeprefix(f"{name}_"): value for key, value in (await it.metrics()).items() if name in key}
        assert told == {
            "up": 1,
            "compared_total": 7,
            'not_compared_total{reason="cancelled"}': 2,
            "arrivals_dropped_total": 0,
            "lag_seconds": 0.25,
            "delay_seconds": 4,
            "open_requests": 1,
            "window_seconds": 300,
            "window_requests": 5,
            'predicted_seconds{metric="ttft",stat="mean"}': 0.2,
            'predicted_seconds{metric="ttft",stat="p50"}': 0.1,
            'predicted_seconds{metric="ttft",stat="p95"}': 0.4,
            'predicted_seconds{metric="itl",stat="mean"}': 0.02,
            'measured_seconds{metric="ttft",stat="mean"}': 0.25,
            'measured_seconds{metric="ttft",stat="p50"}': 0.2,
            'measured_seconds{metric="ttft",stat="p95"}': 0.5,
            'measured_seconds{metric="itl",stat="mean"}': 0.01,
            'drift_ratio{metric="ttft"}': 0.8,
            'drift_ratio{metric="itl"}': 2,
            'error_ratio{metric="ttft"}': 0.25,
        }
        seen = (await it.http.get("/dashboard/data")).json()
        assert seen["shadow"]["drift"] == {"ttft": 0.8, "itl": 2.0}
        assert seen["predicted"]["itl_ms"] == [[-1.0, 20.0]]


@run
async def test_a_twin_that_has_ended_leaves_no_stale_figures() -> None:
    async with served(Shadowed(shadow(up=False, why="signal 9"))) as it:
        told = {key for key in await it.metrics() if key.startswith("dynatwin_shadow")}
    assert told == {
        "dynatwin_shadow_up",
        "dynatwin_shadow_compared_total",
        'dynatwin_shadow_not_compared_total{reason="cancelled"}',
        "dynatwin_shadow_arrivals_dropped_total",
    }


@run
async def test_metrics_can_have_the_other_prefix_and_buckets() -> None:
    async with served(settings=Settings(metrics_prefix="own", bucket_profile="dynamo")) as it:
        await it.post(CHAT, chat())
        samples = await it.metrics()
    assert samples['own_active_requests{model="tiny"}'] == 0
    assert 'own_time_to_first_token_seconds_bucket{le="0.25",model="tiny"}' not in samples


@run
async def test_limits_can_be_read_set_and_cleared() -> None:
    async with served() as it:
        assert (await it.http.get("/busy_threshold")).json() == {"active_decode_blocks": None}
        assert (await it.post("/busy_threshold", {"active_decode_blocks": 0.9})).json() == {"active_decode_blocks": 0.9}
        assert (await it.post("/busy_threshold", {"active_decode_blocks": None})).json() == {
            "active_decode_blocks": None
        }
        for bad in ({"speed": 1}, {"active_decode_blocks": "x"}, {"active_decode_blocks": -1}, {}):
            assert (await it.post("/busy_threshold", bad)).status_code == 400


@run
async def test_decisions_and_state_are_there_only_when_asked_for() -> None:
    async with served() as it:
        assert (await it.http.get("/debug/decisions")).status_code == 404
    async with served(settings=Settings(debug=True)) as it:
        for _ in range(3):
            await it.post(CHAT, chat())
        told = (await it.http.get("/debug/decisions", params={"n": "2"})).json()["decisions"]
        assert [one["request_id"] for one in told] == [ask.request_id for ask in it.backend.asks[:0:-1]]
        state = (await it.http.get("/debug/state")).json()
        assert state["workers"][0]["kv_share"] == 0.25
        assert (await it.http.get("/debug/decisions", params={"n": "0"})).status_code == 400


@run
async def test_the_last_chunk_echoes_what_was_asked_for() -> None:
    ask = {"extra_fields": ["worker_id", "timing", "kv", "decision"]}
    backend = ScriptedBackend(Script(says=ids_of(ANSWER), cached_tokens=4, migrations=1))
    async with served(backend) as it:
        body = (await it.post(CHAT, chat(nvext=ask))).json()
        last = chunks((await it.post(CHAT, chat(nvext=ask, stream=True))).text)[-1]
        asked = chat(nvext=ask, stream=True, stream_options={"include_usage": True})
        usage = chunks((await it.post(CHAT, asked)).text)[-1]
    for told in (body["nvext"], last["nvext"], usage["nvext"]):
        assert told["worker_id"] == {"decode_worker": "w0", "prefill_worker": "w0"}
        assert told["timing"]["migrated"] == 1
        assert told["timing"]["total_time_ms"] >= told["timing"]["ttft_ms"] >= 0
        assert told["kv"]["cached_tokens"] == 4
        assert told["decision"]["reason"] == "only one"


@run
async def test_annotations_are_comments_before_the_first_chunk() -> None:
    async with served() as it:
        body = chat(nvext={"annotations": ["formatted_prompt", "token_ids"]}, stream=True)
        text = (await it.post(CHAT, body)).text
        ids = list(it.backend.asks[0].token_ids)
    first, second = text.split("\n\n")[:2]
    assert json.loads(first.removeprefix(": formatted_prompt ")) == [
        "<s><|im_start|>user\nCount the apples, please.<|im_end|>\n<|im_start|>assistant\n"
    ]
    assert json.loads(second.removeprefix(": token_ids ")) == [ids]
    assert frames(text)[-1] == "[DONE]"


@run
async def test_hints_of_the_body_and_the_headers_reach_the_router() -> None:
    nvext = {
        "agent_hints": {"priority": -3, "osl": 40, "latency_sensitivity": 0.5, "speculative_prefill": True},
        "routing_constraints": {"required_taints": ["gpu"], "preferred_taints": {"near": 0.5}},
        "token_data": [1, 2, 3], "cache_salt": "s", "greed_sampling": True, "request_timestamp_ms": 1,
    }  # fmt: skip
    headers = {"x-dynamo-session-id": "s-1", "x-dynamo-meta-policy-class": "gold"}
    async with served() as it:
        await it.post(CHAT, chat(nvext=nvext, temperature=1), headers=headers)
        bad = await it.post(CHAT, chat(), headers={"x-dynamo-session-id": "a b"})
        (ask,) = it.backend.asks
    assert bad.status_code == 400
    assert (ask.priority, ask.session_id, ask.cache_salt, list(ask.token_ids)) == (-3, "s-1", "s", [1, 2, 3])
    assert ask.sampling.temperature == 0
    assert ask.hints is not None
    assert (ask.hints.osl_tokens, ask.hints.required_taints, ask.hints.policy_class) == (40, ("gpu",), "gold")
    assert [(one.taint, one.weight) for one in ask.hints.preferred_taints] == [("near", 0.5)]


@run
async def test_the_dashboard_needs_no_other_host() -> None:
    async with served() as it:
        page = await it.http.get("/dashboard")
        assert page.headers["content-security-policy"].startswith("default-src 'self';")
        found = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert sorted(found) == ["/dashboard/dashboard.css", "/dashboard/dashboard.js", "data:,"]
        texts = [page.text] + [(await it.http.get(path)).text for path in found if path.startswith("/")]
    assert not any(re.search(r"https?://(?!www\.w3\.org)", text) for text in texts)
    assert "prefers-color-scheme: dark" in texts[1] + texts[2]
    assert "style=" not in page.text


@run
async def test_the_dashboard_says_what_is_measured_and_what_was_predicted() -> None:
    backend = ScriptedBackend()
    async with served(backend) as it:
        await it.post(CHAT, chat())
        bare = (await it.http.get("/dashboard/data")).json()
        backend.predicted = lambda: {"ttft_ms": [[-1, 20.0]]}  # type: ignore[attr-defined]
        told = (await it.http.get("/dashboard/data")).json()
    assert bare["predicted"] == {}
    assert told["predicted"] == {"ttft_ms": [[-1, 20.0]]}
    assert told["worker_list"][0]["name"] == "w0"
    assert told["decisions"][0]["worker"] == "w0"
    assert set(told["measured"]) >= {"ttft_ms_p50", "itl_ms_p95", "tokens_per_s"}
    script = Path(__file__).parents[3] / "executors" / "frontend" / "static" / "dashboard.js"
    used = set(re.findall(r'"([a-z0-9]+_(?:ms|per_s)(?:_p\d+)?)"', script.read_text(encoding="utf-8")))
    assert used - {"ttft_ms", "itl_ms"} <= set(told["measured"])


def test_seconds_are_kept_apart_and_only_whole_ones_are_shown() -> None:
    live = Live()
    for at_s, ttft_s in ((10.1, 0.2), (10.9, 0.1), (11.5, 0.4), (10.95, 0.3)):
        live.first_token(at_s, ttft_s)
    live.tokens(11.6, 3, 0.01)
    live.end(11.7, failed=True)
    live.end(12.1, failed=False)
    assert [(one.at_s, one.ttft) for one in live.seconds(12.5)] == [(10, [0.1, 0.2, 0.3]), (11, [0.4])]
    assert [(one.tokens, one.ended, one.failed) for one in live.seconds(12.5)] == [(0, 0, 0), (3, 1, 1)]
    assert live.seconds(400.0) == []
    assert percentile_ms([0.1, 0.2, 0.3], 0.5) == 200.0
    assert percentile_ms([], 0.5) is None
