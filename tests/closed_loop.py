"""A closed loop on the real clock of a latency model, and rows of tables, for the tests of calibration."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from policies.cluster.blocks import NO_BLOCKS, Branch
from policies.cluster.ids import RequestId
from twin.calibrate.measured import Measurement
from twin.calibrate.protocol import closed_loop
from twin.calibrate.served import engine_settings
from twin.engine.build import build_engine
from twin.engine.sequence import Sequence
from twin.perf.coefficients import Block, Coefficients
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout
from twin.perf.memory import Placement
from twin.perf.models import find_model
from twin.perf.protocol import LatencyModel
from twin.perf.roofline import RooflineLatency

KNOWN = Coefficients(
    e_bw=0.75, e_gemm=0.55, e_moe_bw=0.8, e_moe=0.2, e_kv=0.6, e_attn=0.3, alpha_s=2e-6, e_link=0.4,
    t_launch_s=45e-6, h0_s=5e-4, h_seq_s=15e-6, h_prefill_s=4e-3, client_s=0.04,
)  # fmt: skip
"""A cluster to measure."""


def row(
    *,
    model: str = "llama-3.1-8b",
    gpu: str = "h100_sxm",
    engine: str = "vllm",
    tp: int = 1,
    dp: int = 1,
    ep: int = 1,
    weights: str = "fp8",
    users: int = 4,
    isl: int = 256,
    osl: int = 32,
    ttft_s: float | None = None,
    tpot_s: float | None = None,
    poll_steps: int = 1,
    client: str = "bench",
) -> Measurement:
    placed = Placement(
        model=find_model(model),
        gpu=find_gpu(gpu),
        layout=Layout(tp=tp, dp=dp, ep=ep),
        weights=weights,
        kv="bf16",
    )
    group = f"{model}/{gpu}/{engine}/{weights}/{tp}/{dp}/{ep}"
    return Measurement(
        name=f"{group}/{users}/{isl}/{osl}", group=group, client=client, engine=engine, engine_version="1.0",
        placed=placed, isl=isl, osl=osl, users=users, prompts=10 * users, length_ratio=0.8, max_num_seqs=256,
        max_num_batched_tokens=2048, poll_steps=poll_steps, wait_steps=0, wait_share=0.0, ttft_s=ttft_s, tpot_s=tpot_s,
    )  # fmt: skip


def roofline(one: Measurement, coefficients: Coefficients) -> RooflineLatency:
    block = Block(
        label="known", engine=one.engine, family=one.family, engine_version=None, origin="a test", error_band=None,
        values=coefficients,
    )  # fmt: skip
    return RooflineLatency(one.placed, block)


def simulated(one: Measurement, latency: LatencyModel, seed: int = 0) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) of the row's loop, from the times of single tokens. Engines see arrivals at once."""
    loop = closed_loop(one, seed)
    engine = build_engine(engine_settings(one), latency)
    sent: dict[int, float] = {}
    first: dict[int, float] = {}
    tpots: list[float] = []
    now = 0.0

    def send() -> None:
        at = len(sent)
        if at < len(loop.prompts):
            sent[at] = now
            name = RequestId(str(at))
            assert (
                engine.submit(Sequence(name, loop.prompts[at], loop.outputs[at], NO_BLOCKS, Branch(at), row=at)) is None
            )

    for _ in range(loop.users):
        send()
    while not engine.idle:
        step = engine.plan(now)
        assert step is not None
        now = step.end_s
        outcome = engine.commit(step)
        for seq in outcome.firsts:
            first[seq.row] = now
        for seq in outcome.ended:
            if loop.outputs[seq.row] > 1:
                tpots.append((now - first[seq.row]) / (loop.outputs[seq.row] - 1))
            send()
    ttft = sum(first[at] - sent[at] for at in sent) / len(sent)
    return ttft, sum(tpots) / len(tpots)


def measured_by(one: Measurement, coefficients: Coefficients, seed: int = 0) -> Measurement:
    """The row with times as a cluster with these coefficients, and their path outside the engine, would give."""
    ttft, tpot = simulated(one, roofline(one, coefficients), seed)
    prompts = closed_loop(one, seed).prompts
    outside = coefficients.client_s + coefficients.client_s_per_token * sum(prompts) / len(prompts)
    return replace(one, ttft_s=ttft + outside, tpot_s=tpot)


def write_table(path: Path, rows: list[Measurement]) -> None:
    """The rows as a CSV file that `read_table` reads."""
    head = ("engine", "arch", "gpu", "weights", "attn_tp", "isl", "osl", "len_min_ratio", "concurrency", "num_prompts",
            "max_num_batched_tokens", "max_num_seqs", "kv_cache_dtype", "ttft_ms", "tpot_ms")  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for one in rows:
            assert one.ttft_s is not None
            assert one.tpot_s is not None
            writer.writerow((
                one.engine, one.model, one.placed.gpu.name, one.placed.weights, one.placed.layout.tp, one.isl, one.osl,
                one.length_ratio, one.users, one.prompts, one.max_num_batched_tokens, one.max_num_seqs, one.placed.kv,
                one.ttft_s * 1e3, one.tpot_s * 1e3,
            ))  # fmt: skip
