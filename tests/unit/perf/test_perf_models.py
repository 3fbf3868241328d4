"""Parameter counts follow from the shapes: exact where the count is public, else to the digits that are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.errors import ConfigError
from twin.perf.checkpoint import read_config
from twin.perf.layout import Layout
from twin.perf.memory import kv_shape
from twin.perf.models import find_model, models


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-405b", 405_853_388_800),
        ("qwen3-32b", 32_762_123_264),
        ("qwen2.5-7b", 7_615_616_512),
    ],
)
def test_dense_counts_are_exact(name: str, params: int) -> None:
    assert find_model(name).params() == params


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mistral-7b-v0.1", 7.242, 7.242),
        ("qwen2.5-72b", 72.706, 72.706),
        ("qwen3-8b", 8.191, 8.191),
        ("mixtral-8x7b", 46.70, 12.88),
        ("mixtral-8x22b", 140.6, 39.2),
        ("qwen3-30b-a3b", 30.53, 3.35),
        ("qwen3-235b-a22b", 235.1, 22.2),
        ("qwen3-coder-480b-a35b", 480.2, 35.5),
        ("gpt-oss-20b", 20.9, 4.2),
        ("gpt-oss-120b", 116.8, 5.7),
        ("minimax-m2", 228.7, 11.0),
        ("qwen3.5-397b-a17b", 396.3, 17.3),
        ("deepseek-v3", 671.0, 37.6),
        ("kimi-k2", 1026.0, 32.9),
    ],
)
def test_published_totals_and_active_counts(name: str, total: float, active: float) -> None:
    model = find_model(name)
    assert model.params() / 1e9 == pytest.approx(total, rel=1e-3)
    assert model.active_params() / 1e9 == pytest.approx(active, rel=8e-3)


def test_glm_5_without_its_indexer() -> None:
    """The published 743 and 41 billion leave the scorer of sparse attention out; we count it (0.7 billion)."""
    glm = find_model("glm-5")
    scorer = glm.layers * (2048 * 32 * 128 + 6144 * (128 + 32))
    assert (glm.params() - scorer) / 1e9 == pytest.approx(743.2, rel=1e-3)
    assert (glm.active_params() - scorer) / 1e9 == pytest.approx(41, rel=5e-3)


def test_latent_attention_of_deepseek() -> None:
    assert find_model("deepseek-v3").attention_layer_params() == 187_105_280


def test_experts_of_qwen3_235b() -> None:
    model = find_model("qwen3-235b-a22b")
    assert model.expert_params() == 227_096_395_776
    assert model.params(norms=False) == 235_092_836_352


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("mistral-7b-v0.1", 131_072),
        ("qwen2.5-7b", 57_344),
        ("qwen2.5-72b", 327_680),
        ("qwen3-8b", 147_456),
        ("qwen3-32b", 262_144),
        ("mixtral-8x7b", 131_072),
        ("mixtral-8x22b", 229_376),
        ("qwen3-30b-a3b", 98_304),
        ("qwen3-235b-a22b", 192_512),
        ("qwen3-coder-480b-a35b", 253_952),
        ("gpt-oss-20b", 2 * 24_576),
        ("gpt-oss-120b", 2 * 36_864),
        ("minimax-m2", 253_952),
        ("qwen3.5-397b-a17b", 30_720),
        ("deepseek-v3", 70_272),
        ("kimi-k2", 70_272),
        ("glm-5", 89_856 + 78 * 128),
    ],
)
def test_kv_bytes_per_token(name: str, kv_bytes: int) -> None:
    shape = kv_shape(find_model(name))
    assert shape.full_bytes + shape.window_bytes == kv_bytes


def test_aliases_are_the_same_model() -> None:
    assert find_model("llama-3.3-70b") is find_model("llama-3.1-70b")
    assert find_model("DeepSeek-R1") is find_model("deepseek-v3")


def test_every_model_can_run_on_eight_gpus() -> None:
    for model in models().values():
        Layout(tp=4 if model.heads % 8 else 8).check(model)


def test_a_typo_names_the_nearest_model() -> None:
    with pytest.raises(ConfigError, match=r"'llama-3\.1-7b' is not known; did you mean 'llama-3\.1-70b'"):
        find_model("llama-3.1-7b")


# config.json

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "vocab_size": 129280,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
GPT_OSS_120B = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "attention_bias": True,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
}
QWEN_35 = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_hidden_layers": 60,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 248320,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
        "linear_num_value_heads": 64,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
    },
}
QWEN_25_7B = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "sliding_window": 131072,
    "use_sliding_window": False,
}


def written(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA_70B, "llama-3.1-70b"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (GPT_OSS_120B, "gpt-oss-120b"),
        (QWEN_35, "qwen3.5-397b-a17b"),
        (QWEN_25_7B, "qwen2.5-7b"),
    ],
)
def test_a_config_json_gives_the_model_of_our_table(tmp_path: Path, config: dict[str, Any], key: str) -> None:
    read, known = find_model(str(written(tmp_path, config))), find_model(key)
    assert read.params() == known.params()
    assert read.active_params() == known.active_params()
    assert kv_shape(read) == kv_shape(known)


def test_a_checkpoint_says_what_it_keeps_in_16_bits(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, GPT_OSS_120B)).bf16_modules == ("embedding", "attention")
    assert read_config(written(tmp_path, DEEPSEEK_V3)).bf16_modules == ("embedding",)
    assert read_config(written(tmp_path, LLAMA_70B)).bf16_modules == ()


def test_a_folder_stands_for_its_config_json(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_70B)
    assert find_model(str(tmp_path)).name == tmp_path.name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        ("{}", "num_hidden_layers or n_layer is missing"),
        (json.dumps({**LLAMA_70B, "hidden_size": -1}), "hidden_size = -1 is not a whole number"),
        (json.dumps({k: v for k, v in LLAMA_70B.items() if k != "intermediate_size"}), "intermediate_size or ffn_dim"),
    ],
)
def test_a_bad_config_json_costs_one_line(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        find_model(str(file))


def test_a_missing_config_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: cannot be read"):
        find_model(str(tmp_path / "nowhere" / "config.json"))
