"""Start-up times and the figures of energy: worked out by hand from the parameter counts and the hardware table."""

from __future__ import annotations

import pytest

from twin.cluster import power_of, startup_of, startup_s_of
from twin.config_read import load
from twin.perf.coldstart import Source, startup
from twin.perf.energy import power
from twin.perf.hardware import find_gpu
from twin.perf.layout import Layout
from twin.perf.memory import Placement
from twin.perf.models import find_model

LLAMA_70B_BYTES = 70_553_706_496 * 2  # BF16


def placed(model: str = "llama-3.1-70b", gpu: str = "h100_sxm", weights: str = "bf16", **layout: int) -> Placement:
    return Placement(
        model=find_model(model), gpu=find_gpu(gpu), layout=Layout(**{"tp": 4, **layout}), weights=weights, kv="bf16"
    )


def test_the_parts_of_a_start_follow_each_other() -> None:
    start = startup(placed(), source="disk", read_bytes_per_s=10e9, boot_s=10, warmup_s=60)
    assert start.load_bytes == pytest.approx(LLAMA_70B_BYTES, rel=1e-3)  # norms are on every rank
    assert start.load_s == pytest.approx(14.11, rel=1e-3)
    assert start.total_s == start.boot_s + start.load_s + start.warmup_s
    assert "limited by the disk" in start.label()


@pytest.mark.parametrize(
    ("source", "rate", "gpu", "seconds", "limit"),
    [
        ("object", 5e9, "h100_sxm", 141.1 / 5, "object store"),
        ("object", 400e9, "h100_sxm", 141.1 / 4 / 50, "network card"),
        ("disk", 400e9, "h100_sxm", 141.1 / 4 / (64 * 0.85), "host link"),
        ("peer", None, "h100_sxm", 141.1 / 4 / 50, "network card"),
        ("peer", 20e9, "h100_sxm", 141.1 / 20, "peer"),
    ],
)
def test_the_slowest_stretch_of_the_path_sets_the_pace(
    source: Source, rate: float | None, gpu: str, seconds: float, limit: str
) -> None:
    start = startup(placed(gpu=gpu), source=source, read_bytes_per_s=rate, boot_s=0, warmup_s=0)
    assert start.load_s == pytest.approx(seconds, rel=2e-3)
    assert start.limit == limit


def test_a_smaller_format_and_a_faster_source_never_start_later() -> None:
    def load_s(weights: str, rate: float) -> float:
        return startup(placed(weights=weights), source="disk", read_bytes_per_s=rate, boot_s=0, warmup_s=0).load_s

    assert load_s("fp8", 10e9) < load_s("bf16", 10e9)
    times = [load_s("bf16", rate) for rate in (1e9, 5e9, 20e9, 1e12, 1e15)]
    assert times == sorted(times, reverse=True)


def test_the_configuration_says_what_a_start_is_made_of() -> None:
    def group(*sets: str):
        return load(sets=[*(f"workers.{text}" for text in sets), "allow_no_effect=true"]).workers[0]

    assert startup_s_of(group()) == 0.0, "nothing said: at once"
    assert startup_s_of(group("startup_s=30", "startup.weights_from=disk")) == 30.0
    start = startup_of(group("startup.weights_from=disk"))
    assert start is not None
    assert (start.boot_s, start.warmup_s) == (10.0, 60.0)
    assert start.load_s == pytest.approx(7.057, rel=1e-3), "70.6 GB of FP8 at 10 GB/s"
    assert startup_s_of(group("startup.weights_from=disk", "engine.kind=trtllm")) == pytest.approx(
        start.total_s - 60 + 45
    )
    quick = startup_of(group("startup.weights_from=object", "startup.bandwidth_gb_per_s=20", "startup.warmup_s=1"))
    assert quick is not None
    assert quick.total_s == pytest.approx(10 + 70.57 / 20 + 1, rel=1e-3)


# ---------------------------------------------------------------- energy


def test_a_decode_step_reads_all_weights_once() -> None:
    figures = power(placed())
    assert figures.tdp_w == 700
    in_step = LLAMA_70B_BYTES - 128_256 * 8192 * 2  # the embedding is looked up, not read
    assert figures.step_read_s == pytest.approx(in_step / 4 / 3.35e12, rel=1e-3)
    assert figures.token_multiply_s == pytest.approx(2 * (in_step / 2 - 128_256 * 8192) / 4 / 989.4e12, rel=1e-3)
    assert figures.ctx_token_read_s == pytest.approx(81_920 / 3.35e12)
    assert figures.experts_read_s == 0.0


def test_attention_data_parallelism_and_stages_leave_each_gpu_its_share() -> None:
    one, two = power(placed(tp=4)), power(placed(tp=4, dp=2))
    assert two.token_multiply_s == pytest.approx(one.token_multiply_s / 2)
    assert two.step_read_s == pytest.approx(one.step_read_s), "every rank reads its own copy"
    assert power(placed(tp=4, pp=2)).step_read_s == pytest.approx(one.step_read_s / 2)


def test_no_energy_where_nothing_says_what_the_hardware_is() -> None:
    fixed = load(sets=["workers.latency=fixed", "workers.engine.kv_blocks=9"]).workers[0]
    assert power_of(fixed) is None
    assert power_of(load().workers[0]) is not None
