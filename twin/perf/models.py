"""Shapes of models and the parameter counts that follow from them; from `data/models.toml` or a config.json on disk.

Counts are computed from the shape, never typed in. Nothing here reads a network, or knows a GPU or an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.names import unknown
from twin.perf.tables import Entry, shipped

MODULES = ("attention", "mlp", "experts", "embedding")


@frozen
class Experts:
    """Routed experts of each mixture-of-experts layer, and the width of the expert that every token passes."""

    count: int
    per_token: int
    ffn: int
    shared_ffn: int = 0


@frozen
class Latent:
    """Multi-head latent attention: one vector of kv_rank + rope_dim values per token and layer. q_rank None: no query
    compression."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@frozen
class Window:
    """Layers that attend to the last `tokens` tokens only."""

    layers: int
    tokens: int


@frozen
class Linear:
    """Linear-attention layers: a constant state per sequence instead of KV (gated delta rule)."""

    layers: int
    value_heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def state_values(self) -> int:
        """Values of the recurrent state of one sequence, all layers."""
        return self.layers * self.value_heads * self.key_dim * self.value_dim

    @property
    def conv_values(self) -> int:
        """Values of the convolution state of one sequence, all layers."""
        return self.layers * self._conv_channels * (self.conv - 1)

    @property
    def _conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def layer_params(self, hidden: int) -> int:
        """Weights of one such layer: query, key, value, gate and decay projections, convolution, output."""
        values = self.value_heads * self.value_dim
        projections = hidden * (self._conv_channels + values + 2 * self.value_heads)
        return projections + self.conv * self._conv_channels + values * hidden


@frozen
class Indexer:
    """Sparse attention: a small scorer reads every token, attention only the `top_k` best."""

    heads: int
    dim: int
    top_k: int


@frozen
class Model:
    """The shape of a decoder-only transformer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the dense MLP; 0 if every layer has experts
    vocab: int
    dense_layers: int = 0  # layers with the dense MLP, first ones; meaningful with experts only
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gated_query: bool = False  # the query projection also makes an output gate
    experts: Experts | None = None
    latent: Latent | None = None
    window: Window | None = None
    linear: Linear | None = None
    indexer: Indexer | None = None
    bf16_modules: tuple[str, ...] = ()  # kept in 16 bits by quantised checkpoints

    def __post_init__(self) -> None:
        for what, layers in (("window", self.window), ("linear", self.linear)):
            if layers is not None and layers.layers > self.layers:
                raise ConfigError(f"model {self.name}: {layers.layers} {what} layers of {self.layers} layers")
        if self.experts is not None and self.experts.per_token > self.experts.count:
            raise ConfigError(
                f"model {self.name}: {self.experts.per_token} experts per token of {self.experts.count} experts"
            )
        if self.mlp_layers and not self.ffn:
            raise ConfigError(
                f"model {self.name}: {self.mlp_layers} layers have a dense MLP, but its width ffn is missing"
            )

    # layers by kind

    @property
    def linear_layers(self) -> int:
        return self.linear.layers if self.linear else 0

    @property
    def attention_layers(self) -> int:
        """Layers that keep KV."""
        return self.layers - self.linear_layers

    @property
    def window_layers(self) -> int:
        return self.window.layers if self.window else 0

    @property
    def expert_layers(self) -> int:
        return self.layers - self.mlp_layers

    @property
    def mlp_layers(self) -> int:
        """Layers with the dense MLP."""
        return self.dense_layers if self.experts else self.layers

    # weights

    def attention_layer_params(self) -> int:
        """Projections of one attention layer (biases and indexer included, norms not)."""
        return self.latent_layer_params(self.latent) if self.latent else self.grouped_layer_params()

    def grouped_layer_params(self, kv_heads: int | None = None) -> int:
        """The same for multi-head and grouped-query attention; `kv_heads`: as if there were that many."""
        q = self.heads * self.head_dim
        kv = (self.kv_heads if kv_heads is None else kv_heads) * self.head_dim
        query = q * (2 if self.gated_query else 1)
        bias = query + 2 * kv if self.qkv_bias else 0
        return self.hidden * (query + 2 * kv) + q * self.hidden + bias

    def latent_layer_params(self, latent: Latent) -> int:
        """The same for latent attention."""
        return self.latent_down_params(latent) + self.heads * (
            (latent.q_rank or self.hidden) * (latent.nope_dim + latent.rope_dim)
            + latent.kv_rank * (latent.nope_dim + latent.value_dim)
            + latent.value_dim * self.hidden
        )

    def latent_down_params(self, latent: Latent) -> int:
        """The part of it that does not depend on heads: down projections and indexer."""
        down = self.hidden * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_dim)
        if self.indexer:
            scorer = self.indexer.heads * self.indexer.dim
            down += (latent.q_rank or self.hidden) * scorer + self.hidden * (self.indexer.dim + self.indexer.heads)
        return down

    def attention_params(self) -> int:
        """All layers, linear attention included."""
        linear = self.linear.layers * self.linear.layer_params(self.hidden) if self.linear else 0
        return self.attention_layers * self.attention_layer_params() + linear

    def mlp_params(self) -> int:
        """Dense MLPs, shared experts and routers."""
        dense = self.mlp_layers * 3 * self.hidden * self.ffn
        if self.experts is None:
            return dense
        return dense + self.expert_layers * self.hidden * (3 * self.experts.shared_ffn + self.experts.count)

    def expert_params(self) -> int:
        """Routed experts, all of them."""
        if self.experts is None:
            return 0
        return self.expert_layers * self.experts.count * 3 * self.hidden * self.experts.ffn

    def dense_params(self) -> int:
        """Weights that every token is multiplied with: no routed expert, no embedding, no head, no norm."""
        return self.attention_params() + self.mlp_params()

    def head_params(self) -> int:
        """The output head; as many again in the embedding, unless they are tied."""
        return self.vocab * self.hidden

    def embedding_params(self) -> int:
        """Embedding and head together."""
        return self.head_params() * (1 if self.tied_embeddings else 2)

    def norm_params(self) -> int:
        per_layer = 2 * self.hidden
        if self.latent:
            per_layer += (self.latent.q_rank or 0) + self.latent.kv_rank
        qk_norms = 2 * self.head_dim * self.attention_layers if self.qk_norm else 0
        return self.layers * per_layer + qk_norms + self.hidden

    def params(self, *, norms: bool = True) -> int:
        """All weights."""
        return (
            self.dense_params() + self.expert_params() + self.embedding_params() + (self.norm_params() if norms else 0)
        )

    def active_params(self) -> int:
        """Weights that one token uses; embedding and head are both counted in full."""
        used = self.expert_params() * self.experts.per_token // self.experts.count if self.experts else 0
        return self.dense_params() + used + self.embedding_params()


_PARTS: dict[str, tuple[str, ...]] = {
    "experts": ("count", "per_token", "ffn", "shared_ffn"),
    "mla": ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim"),
    "window": ("layers", "tokens"),
    "linear": ("layers", "value_heads", "key_heads", "key_dim", "value_dim", "conv"),
    "indexer": ("heads", "dim", "top_k"),
}
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
_FLAGS = ("tied_embeddings", "qkv_bias", "qk_norm", "gated_query")
_KEYS = (*_SHAPE, "ffn", "dense_layers", *_FLAGS, *_PARTS, "bf16_modules", "aliases")


def find_model(name: str) -> Model:
    """A model by its key or alias, or from the path of a config.json (or of the folder that holds one)."""
    path = Path(name)
    if path.suffix == ".json" or path.is_dir():
        from twin.perf.checkpoint import read_config

        return read_config(path)
    known = models()
    if name.lower() in known:
        return known[name.lower()]
    raise unknown("model (a key, or the path of a config.json)", name, known)


@cache
def models() -> Mapping[str, Model]:
    """Every model of `data/models.toml`, by key and by alias."""
    found: dict[str, Model] = {}
    for name, values in shipped("models.toml").items():
        entry = Entry.of(f"models.toml: [{name}]", values, _KEYS)
        found[name] = _model(name, entry)
        found.update(dict.fromkeys(entry.texts("aliases"), found[name]))
    return found


def _model(name: str, entry: Entry) -> Model:
    parts = {key: entry.table(key, fields) for key, fields in _PARTS.items()}
    experts, mla, window, linear, indexer = parts.values()
    return Model(
        name=name,
        layers=entry.integer("layers"),
        hidden=entry.integer("hidden"),
        heads=entry.integer("heads"),
        kv_heads=entry.integer("kv_heads"),
        head_dim=entry.integer("head_dim"),
        vocab=entry.integer("vocab"),
        tied_embeddings=entry.flag("tied_embeddings"),
        qkv_bias=entry.flag("qkv_bias"),
        qk_norm=entry.flag("qk_norm"),
        gated_query=entry.flag("gated_query"),
        ffn=entry.integer("ffn", 0, at_least=0),
        dense_layers=entry.integer("dense_layers", 0, at_least=0),
        experts=Experts(**_integers(experts, shared_ffn=0)) if experts else None,
        latent=Latent(**_integers(mla)) if mla else None,
        window=Window(**_integers(window)) if window else None,
        linear=Linear(**_integers(linear)) if linear else None,
        indexer=Indexer(**_integers(indexer)) if indexer else None,
        bf16_modules=entry.texts("bf16_modules"),
    )


def _integers(entry: Entry, **defaults: int) -> dict[str, int]:
    keys = _PARTS[entry.where.rpartition(".")[2]]
    return {key: entry.integer(key, defaults.get(key)) for key in keys}
