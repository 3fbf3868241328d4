"""How a model is spread over the GPUs of one worker, and what lands on one GPU (a rank): weights per pipeline stage.

A layout that an engine would refuse is an error here, never rounded to a legal one.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.errors import ConfigError
from policies.frozen import frozen
from twin.perf.formats import weight_bytes
from twin.perf.models import Model


@frozen
class Layout:
    """Parallelism of one worker: it has tp*pp*dp GPUs. dp is attention data parallelism, ep splits routed experts."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp), ("dp", self.dp), ("ep", self.ep)):
            if value < 1:
                raise ConfigError(f"{name} = {value}: a worker needs at least 1")

    @property
    def ranks(self) -> int:
        """GPUs of one pipeline stage; they share the routed experts."""
        return self.tp * self.dp

    @property
    def moe_tp(self) -> int:
        """Ranks that share one expert."""
        return self.ranks // self.ep

    def check(self, model: Model) -> None:
        """Raises `ConfigError` if the model cannot be split so."""
        if model.heads % self.tp:
            raise ConfigError(f"{model.name} has {model.heads} attention heads, which tp = {self.tp} does not divide")
        if self.pp > model.layers:
            raise ConfigError(f"{model.name} has {model.layers} layers, fewer than pp = {self.pp}")
        if self.ep > 1 and model.experts is None:
            raise ConfigError(f"{model.name} has no experts, so ep = {self.ep} has no effect; leave ep at 1")
        if model.experts is None:
            return
        if self.ranks % self.ep or model.experts.count % self.ep:
            raise ConfigError(
                f"ep = {self.ep} must divide tp*dp = {self.ranks} and the {model.experts.count} experts of {model.name}"
            )
        if model.experts.ffn % self.moe_tp:
            raise ConfigError(
                f"experts of {model.name} are {model.experts.ffn} wide, which tp*dp/ep = {self.moe_tp} does not divide"
            )

    def label(self) -> str:
        """For people: "TP4", "TP4 PP2"."""
        named = (("TP", self.tp), ("PP", self.pp), ("DP", self.dp), ("EP", self.ep))
        return " ".join(f"{name}{value}" for name, value in named if value > 1 or name == "TP")


@frozen
class Stage:
    """The layers of one pipeline stage by kind (a layer counts once as attention or linear, once as MLP or experts)."""

    attention_layers: int
    window_layers: int  # of the attention layers
    linear_layers: int
    mlp_layers: int
    expert_layers: int
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        return self.attention_layers + self.linear_layers


def stages(model: Model, pp: int) -> Iterator[Stage]:
    """Stages of nearly equal depth. Window and linear layers alternate with the others, so each gets its share of them,
    rounded up."""
    for k in range(pp):
        first, last = model.layers * k // pp, model.layers * (k + 1) // pp
        layers = last - first
        linear = -(-model.linear_layers * layers // model.layers)
        attention = layers - linear
        dense = max(0, min(last, model.mlp_layers) - first) if model.experts else layers
        yield Stage(
            attention_layers=attention,
            window_layers=min(attention, -(-model.window_layers * layers // model.layers)),
            linear_layers=linear,
            mlp_layers=dense,
            expert_layers=layers - dense,
            embedding=k == 0,
            head=k == pp - 1,
        )


@frozen
class RankParams:
    """Weights on one rank, by module."""

    attention: float
    mlp: float  # dense MLP, shared experts, router
    experts: float
    head: float
    embedding: float
    norms: int


def rank_params(model: Model, layout: Layout, stage: Stage) -> RankParams:
    """Weights on one rank of `stage`. Key and value heads are repeated once there are fewer than ranks; down
    projections of latent attention, routers and norms are whole on every rank."""
    tp = layout.tp
    if model.latent:
        down = model.latent_down_params(model.latent)
        attention = down + (model.attention_layer_params() - down) / tp
    else:
        attention = model.grouped_layer_params(-(-model.kv_heads // tp) * tp) / tp
    linear = model.linear.layer_params(model.hidden) / tp if model.linear else 0.0
    mlp = stage.mlp_layers * 3 * model.hidden * model.ffn / tp
    experts = 0.0
    if model.experts:
        mlp += stage.expert_layers * model.hidden * (3 * model.experts.shared_ffn / tp + model.experts.count)
        experts = stage.expert_layers * model.experts.count * 3 * model.hidden * model.experts.ffn / layout.ranks
    head = model.head_params() / tp
    # With pp = 1 a tied head and embedding are one matrix.
    tied = model.tied_embeddings and stage.head
    return RankParams(
        attention=stage.attention_layers * attention + stage.linear_layers * linear,
        mlp=mlp,
        experts=experts,
        head=head if stage.head else 0.0,
        embedding=head if stage.embedding and not tied else 0.0,
        norms=model.norm_params() * stage.layers // model.layers,
    )


def module_bytes(model: Model, weights: str, module: str) -> float:
    """Bytes per weight of one of the `MODULES` in a checkpoint of format `weights`."""
    per_weight = weight_bytes(weights)
    return max(per_weight, 2.0) if keeps_bf16(model, weights, module) else per_weight


def keeps_bf16(model: Model, weights: str, module: str) -> bool:
    """Whether that module stays in 16 bits: named by the model, or latent attention in an NVFP4 release."""
    latent_nvfp4 = weights == "nvfp4" and module == "attention" and model.latent is not None
    return module in model.bf16_modules or latent_nvfp4


def rank_weight_bytes(model: Model, layout: Layout, weights: str, stage: Stage) -> float:
    """Bytes of weights on one rank of `stage`; norms in 16 bits."""
    params = rank_params(model, layout, stage)
    return (
        params.attention * module_bytes(model, weights, "attention")
        + params.mlp * module_bytes(model, weights, "mlp")
        + params.experts * module_bytes(model, weights, "experts")
        + (params.head + params.embedding) * module_bytes(model, weights, "embedding")
        + params.norms * 2
    )
