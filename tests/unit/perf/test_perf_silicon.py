"""The optional `silicon` model: what is asked of a package of kernel tables, and how its answers become our steps.

A stand-in whose tables are formulas takes the package's place; the last tests ask the real one where it is installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from test_perf_build import built

from policies.errors import CapabilityError, ConfigError
from twin.perf.protocol import PrefillChunk


class Tables:
    """Milliseconds by formulas; what no table has raises, as in the package."""

    asked: list[tuple[object, ...]]

    def __init__(self, asked: list[tuple[object, ...]]) -> None:
        self.asked = asked

    @classmethod
    def compile(cls, model: str, system: str, backend: str, **options: object) -> Tables:
        made = cls([(model, system, backend, options)])
        if options["tp_size"] == 8:
            raise AssertionError("no such layout\nand more of it")
        return made

    def _shared(self, tokens: int) -> float:
        return 5.0 + 0.01 * tokens

    def _attention(self, new: int, past: int) -> float:
        return 1e-6 * (new * past + new * new / 2)

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int) -> float:
        self.asked.append(("prefill", bs, isl, prefix))
        return self._shared(bs * (isl - prefix)) + bs * self._attention(isl - prefix, prefix)

    def predict_decode_latency(self, bs: int, isl: int, osl: int) -> float:
        assert osl == 2
        self.asked.append(("decode", bs, isl))
        if bs > 1000:
            raise LookupError("no table goes so far")
        return self._shared(bs) + 1e-4 * bs * isl + 1e-8 * isl * isl

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int, prefix: int
    ) -> tuple[float, float, float, float]:
        assert osl == 2
        shared = self._shared(ctx_tokens + gen_tokens)
        prompts = self._attention(isl - prefix, prefix) * ctx_tokens / isl
        decodes = 1e-4 * gen_tokens * isl
        return shared + prompts + decodes, shared, prompts, decodes


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, installed."""
    sdk = ModuleType("aiconfigurator_core.sdk")
    sdk.EngineHandle = Tables  # type: ignore[attr-defined]
    versions = ModuleType("aiconfigurator_core.sdk.perf_database")
    versions.resolve_query_version = lambda system, backend, slot: "1.2"  # type: ignore[attr-defined]
    for module in (ModuleType("aiconfigurator_core"), sdk, versions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return


def prompt(new: int, past: int = 0, again: int = 0) -> PrefillChunk:
    return PrefillChunk(new, past, again, True)


@pytest.mark.usefixtures("package")
def test_the_worker_is_named_in_the_words_of_the_package() -> None:
    dense = built("silicon")._handle.asked[0]  # type: ignore[attr-defined]
    assert dense == (
        "meta-llama/Meta-Llama-3.1-70B",
        "h100_sxm",
        "vllm",
        {"tp_size": 4, "kvcache_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16", "gemm_quant_mode": "fp8"},
    )
    worker = {"model": "qwen3-235b-a22b", "gpu": "b200_sxm", "engine": "sglang", "tp": 4, "ep": 2, "kv": "fp8"}
    experts = built("silicon", {"gemm_quant_mode": "fp8"}, **worker)._handle.asked[0]  # type: ignore[attr-defined]
    assert experts == (
        "Qwen/Qwen3-235B-A22B",
        "b200_sxm",
        "sglang",
        {
            "tp_size": 4,
            "kvcache_quant_mode": "fp8",
            "gemm_quant_mode": "fp8",
            "moe_ep_size": 2,
            "moe_tp_size": 2,
            "moe_quant_mode": "fp8_block",
        },
    )
    found = built("silicon", weights="mxfp4", model="gpt-oss-120b", tp=2)._handle.asked[0]  # type: ignore[attr-defined]
    assert "gemm_quant_mode" not in found[3]
    assert "moe_quant_mode" not in found[3]


@pytest.mark.usefixtures("package")
def test_a_step_is_put_together_from_its_answers() -> None:
    tables, model = Tables([]), built("silicon")
    assert model.step_s([prompt(512, 1024)], 0, 0, 0, 0) == pytest.approx(
        tables.predict_prefill_latency(1, 1536, 1024) / 1e3
    )
    attention = tables._attention(512, 1024) + tables._attention(100, 0)
    mixed_ms = tables._shared(612 + 8) + attention + 1e-4 * 8 * 1000
    assert model.step_s([prompt(512, 1024), prompt(90, 0, 10)], 8, 8000, 0, 0) == pytest.approx(mixed_ms / 1e3)
    assert model.step_s([prompt(0, 512)], 8, 8000, 0, 0) == model.decode_piece(8, 8000).g0
    assert model.step_s([], 0, 0, 2, 2000) == model.decode_piece(2, 2000).g0
    assert model.step_s([], 0, 0, 0, 0) == 0.0


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("batch", "ctx_tokens"), [(1, 1), (1, 255), (8, 8 * 256), (7, 3001), (3, 3 * 255 + 2)])
def test_decode_steps_follow_each_other_without_a_jump(batch: int, ctx_tokens: int) -> None:
    model = built("silicon")
    piece = model.decode_piece(batch, ctx_tokens)
    assert 1 <= piece.steps <= 256
    ends_s = piece.g0 + piece.g1 * piece.steps
    behind = model.decode_piece(batch, ctx_tokens + batch * piece.steps)
    assert (ctx_tokens + batch * piece.steps) // batch % 256 == 0
    assert ends_s == pytest.approx(behind.g0, rel=1e-5)


@pytest.mark.usefixtures("package")
def test_the_band_is_unknown_and_the_source_named() -> None:
    line = built("silicon").provenance.line()
    assert "meta-llama/Meta-Llama-3.1-70B on h100_sxm TP4, fp8, bfloat16 KV" in line
    assert "engine vllm 1.2" in line
    assert line.endswith("error band unknown")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("worker", "params", "words"),
    [
        ({"gpu": "mi300x"}, {}, "gpu = mi300x has no counterpart"),
        ({"model": "qwen2.5-72b"}, {}, "model = qwen2.5-72b has no counterpart"),
        ({"dp": 2, "model": "deepseek-v3"}, {}, "dp = 2 and pp = 1"),
        ({"pp": 2}, {}, "dp = 1 and pp = 2"),
        ({"tp": 8}, {}, "no price for llama-3.1-70b fp8 on h100_sxm TP8 with vllm.*AssertionError: no such layout$"),
    ],
)
def test_what_it_cannot_price_is_refused_before_the_run(worker: dict, params: dict, words: str) -> None:
    with pytest.raises(CapabilityError, match=words) as refusal:
        built("silicon", params, **worker)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("package")
def test_a_name_that_would_be_looked_for_online_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_id = 'some/where' is neither a directory"):
        built("silicon", {"model_id": "some/where"})
    (tmp_path / "config.json").write_text("{}")
    own = built("silicon", {"model_id": str(tmp_path)}, model="qwen2.5-72b")
    assert own._handle.asked[0][0] == str(tmp_path)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("package")
def test_a_step_beyond_its_tables_says_so() -> None:
    with pytest.raises(CapabilityError, match="LookupError: no table goes so far"):
        built("silicon").decode_piece(2000, 2000)


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)  # as if it were not installed
    with pytest.raises(CapabilityError, match="pip install 'dynatwin\\[silicon\\]'") as refusal:
        built("silicon")
    assert "\n" not in str(refusal.value)


# ---------------------------------------------------------------- the real one

real = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None,
    reason="the package aiconfigurator-core is not installed: pip install 'dynatwin[silicon]'",
)


@real
def test_the_real_package_prices_the_default_worker() -> None:
    """Within a factor of two of the roofline, and what the document says of it."""
    ours, theirs = built("roofline"), built("silicon")
    steps = (
        lambda model: model.decode_piece(8, 8000).g0,
        lambda model: model.step_s([prompt(2048)], 0, 0, 0, 0),
        lambda model: model.step_s([prompt(512, 3584)], 8, 8000, 0, 0),
    )
    for step in steps:
        assert 0.5 < step(theirs) / step(ours) < 2.0
    assert "aiconfigurator-core 0.12.0" in theirs.provenance.source


@real
def test_of_the_real_package_a_chunk_costs_the_same_alone_and_in_parts() -> None:
    """What is said of `mixed_step_breakdown` in `Handle` holds: our sum of parts is its own price of a prompt."""
    model = built("silicon")
    whole_s = model.step_s([prompt(512, 3584)], 0, 0, 0, 0)
    shared_ms = model._handle.mixed_step_breakdown(512, 0, 512, 2, 0)[1]  # type: ignore[attr-defined]
    assert whole_s * 1e3 == pytest.approx(shared_ms + model._attention_ms(512, 3584), rel=1e-6)  # type: ignore[attr-defined]
