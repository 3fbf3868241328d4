"""A name is a candidate again, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiconfig.candidate import Candidate, Pool
from aiconfig.names import candidate_of
from aiconfig.serving import Serving
from policies.errors import ConfigError
from twin.perf.layout import Layout

SIZES = st.integers(1, 64)
POOLS = st.builds(
    Pool,
    role=st.just("mixed"),
    gpu=st.sampled_from(["h100_sxm", "my-own_gpu", "x-bf16-kvbf16"]),
    layout=st.builds(Layout, tp=SIZES, pp=SIZES, dp=SIZES, ep=SIZES),
    replicas=SIZES,
    weights=st.sampled_from(["bf16", "fp8", "nvfp4"]),
    kv=st.sampled_from(["bf16", "fp8", "fp8_ds_mla"]),
    max_num_seqs=SIZES,
    max_num_batched_tokens=SIZES,
)


SERVINGS = st.builds(
    Serving,
    router=st.sampled_from(["round-robin", "least-loaded", "kv", "kv:router_temperature=1e-05:use_kv_events=false"]),
    host_kv_bytes=st.sampled_from([0, 64 * 2**30, 1_500_000_000, 10**12, 123_456_789]),
    disk_kv_bytes=st.sampled_from([0, 2**40, 10**9]),
)


def as_role(pool: Pool, role: str) -> Pool:
    return Pool(**{name: getattr(pool, name) for name in pool.__slots__} | {"role": role})


@given(POOLS, POOLS, st.sampled_from(["vllm", "sglang", "trtllm"]), st.integers(0, 5), st.booleans(), SERVINGS)
def test_a_name_read_back_is_the_candidate(
    first: Pool, second: Pool, engine: str, nextn: int, split: bool, serving: Serving
) -> None:
    pools = (as_role(first, "prefill"), as_role(second, "decode")) if split else (first,)
    candidate = Candidate(model="m", engine=engine, pools=pools, nextn=nextn, serving=serving)
    assert candidate_of(candidate.name, "m") == candidate


@pytest.mark.parametrize(
    "name",
    [
        "",
        "vllm",
        "vllm-agg-",
        "nim-agg-1xtp1-h100_sxm-bf16-kvbf16-b1-t1",
        "vllm-agg-0xtq1-h100_sxm-bf16-kvbf16-b1-t1",
        "vllm-agg-1xtp0-h100_sxm-bf16-kvbf16-b1-t1",
        "vllm-disagg-P1xtp1-h100_sxm-bf16-kvbf16-b1-t1",
        "vllm-agg-01xtp1-h100_sxm-bf16-kvbf16-b1-t1",
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        candidate_of(name, "m")
