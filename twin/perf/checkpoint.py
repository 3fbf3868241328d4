"""Reads the shape of a model from the config.json of a Hugging Face checkpoint on disk.

Never opens a network, never guesses a size: what the file does not say is an error that names the key. What it says
about quantisation decides which modules stay in 16 bits.
"""

from __future__ import annotations

import json
from pathlib import Path

from policies.errors import ConfigError
from twin.perf.models import Experts, Indexer, Latent, Linear, Model, Window
from twin.perf.tables import Table

_QKV_BIAS = ("qwen2", "qwen2_moe", "gpt_oss")
_QK_NORM = ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "minimax_m2")
_GATED_QUERY = ("qwen3_next", "qwen3_5", "qwen3_5_moe")


def read_config(path: Path) -> Model:
    """The model whose config.json is at `path` (the file, or its folder)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not the configuration of a model (expected an object)")
    text = content.get("text_config")  # multimodal checkpoints keep the language model there
    return _Config(file, {**content, **text} if isinstance(text, dict) else content).model()


class _Config:
    """One config.json; looks keys up under the names that the families use for the same thing."""

    def __init__(self, file: Path, values: Table) -> None:
        self.file = file
        self.values = values
        self.family = str(values.get("model_type", ""))

    def size(self, *names: str) -> int:
        """A positive integer that must be there, under one of these names."""
        value = self.size_or(None, *names)
        if value is None:
            raise ConfigError(f"{self.file}: {' or '.join(names)} is missing; is this the config.json of a model?")
        return value

    def size_or(self, default: int | None, *names: str) -> int | None:
        """A positive integer under one of these names; `default` if absent or null."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self.file}: {name} = {value!r} is not a whole number >= 0")
            if value:
                return value
        return default

    def flag(self, name: str) -> bool:
        return self.values.get(name) is True

    def model(self) -> Model:
        layers = self.size("num_hidden_layers", "n_layer")
        hidden = self.size("hidden_size", "n_embd")
        heads = self.size("num_attention_heads", "n_head")
        latent = self._latent()
        head_dim = latent.nope_dim + latent.rope_dim if latent else self.size_or(hidden // heads, "head_dim")
        experts = self._experts()
        dense_layers = self._dense_layers(layers) if experts else 0
        has_mlp = experts is None or dense_layers > 0
        return Model(
            name=self._name(),
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=self.size_or(heads, "num_key_value_heads") or heads,
            head_dim=head_dim or hidden // heads,
            ffn=self.size("intermediate_size", "ffn_dim") if has_mlp else 0,
            vocab=self.size("vocab_size"),
            dense_layers=dense_layers,
            tied_embeddings=self.flag("tie_word_embeddings"),
            qkv_bias=self.flag("attention_bias") or self.family in _QKV_BIAS,
            qk_norm=self.family in _QK_NORM,
            gated_query=self.family in _GATED_QUERY,
            experts=experts,
            latent=latent,
            window=self._window(layers),
            linear=self._linear(layers),
            indexer=self._indexer(),
            bf16_modules=self._bf16_modules(),
        )

    def _name(self) -> str:
        named = self.values.get("_name_or_path")
        return str(named) if named else self.file.resolve().parent.name

    def _experts(self) -> Experts | None:
        count = self.size_or(None, "n_routed_experts", "num_local_experts", "num_experts")
        if count is None:
            return None
        ffn = self.size("moe_intermediate_size", "intermediate_size")
        shared = self.size_or(0, "shared_expert_intermediate_size") or 0
        shared += (self.size_or(0, "n_shared_experts") or 0) * ffn
        return Experts(
            count=count, per_token=self.size("num_experts_per_tok", "top_k_experts"), ffn=ffn, shared_ffn=shared
        )

    def _dense_layers(self, layers: int) -> int:
        mlp_only = self.values.get("mlp_only_layers")
        every = self.size_or(1, "decoder_sparse_step", "moe_layer_freq") or 1
        dense = self.size_or(0, "first_k_dense_replace") or 0
        if isinstance(mlp_only, list):
            dense += len(mlp_only)
        return max(dense, layers - layers // every)

    def _latent(self) -> Latent | None:
        kv_rank = self.size_or(None, "kv_lora_rank")
        if kv_rank is None:
            return None
        return Latent(
            q_rank=self.size_or(None, "q_lora_rank"),
            kv_rank=kv_rank,
            nope_dim=self.size("qk_nope_head_dim"),
            rope_dim=self.size("qk_rope_head_dim"),
            value_dim=self.size("v_head_dim"),
        )

    def _layers_of(self, kind: str) -> int | None:
        types = self.values.get("layer_types")
        return sum(1 for name in types if name == kind) if isinstance(types, list) else None

    def _window(self, layers: int) -> Window | None:
        tokens = self.size_or(None, "sliding_window")
        if tokens is None or self.values.get("use_sliding_window") is False:
            return None
        named = self._layers_of("sliding_attention")
        count = layers if named is None else named
        return Window(layers=count, tokens=tokens) if count else None

    def _linear(self, layers: int) -> Linear | None:
        if "linear_num_value_heads" not in self.values:
            return None
        count = self._layers_of("linear_attention")
        if count is None:
            count = layers - layers // self.size("full_attention_interval")
        return Linear(
            layers=count,
            value_heads=self.size("linear_num_value_heads"),
            key_heads=self.size("linear_num_key_heads"),
            key_dim=self.size("linear_key_head_dim"),
            value_dim=self.size("linear_value_head_dim"),
            conv=self.size("linear_conv_kernel_dim"),
        )

    def _indexer(self) -> Indexer | None:
        heads = self.size_or(None, "index_n_heads")
        if heads is None:
            return None
        return Indexer(heads=heads, dim=self.size("index_head_dim"), top_k=self.size("index_topk"))

    def _bf16_modules(self) -> tuple[str, ...]:
        quantisation = self.values.get("quantization_config")
        if not isinstance(quantisation, dict):
            return ()
        kept: list[str] = ["embedding"]  # no public quantised checkpoint packs its embedding or head
        for key in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules"):
            names = quantisation.get(key)
            if isinstance(names, list) and any("attn" in str(name) for name in names):
                kept.append("attention")
                break
        return tuple(kept)
