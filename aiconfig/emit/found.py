"""What a command or a file of options says, in the words of the table of flags; and what follows for a pool.

Between the parser (`commands.py`) and the engines' own meanings (`vllm.py`, `sglang.py`, `trtllm.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from aiconfig.candidate import Pool
from aiconfig.emit.flags import Flags, Plain
from policies.errors import ConfigError
from policies.frozen import frozen
from twin.config import EngineConfig
from twin.perf.layout import Layout

USUAL = EngineConfig()


@frozen
class Found:
    """Flags of one worker by key, as the engine spells their values. `facts` are what a file of ours says beside them
    (GPU, replicas, formats). `where` names the file for errors."""

    flags: Flags
    values: Mapping[str, Plain]
    facts: Mapping[str, str]
    where: str

    def integer(self, key: str, default: int) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.where}: {self._name(key)} {value!r} is not a whole number")
        if value < 1 and key not in ("max_num_batched_tokens",):
            raise ConfigError(f"{self.where}: {self._name(key)} {value}: at least 1")
        return value

    def on(self, key: str) -> bool:
        return self.values.get(key, False) is True

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        return None if value is None else str(value)

    def ours(self, key: str, absent: str) -> tuple[str, str | None]:
        """Our value of a flag with spellings, and a notice if more than one of ours is spelled so. What a file of ours
        states decides; an unknown word is an error."""
        word = self.text(key)
        if word is None:
            return self.facts.get(key, absent), None
        if word == "auto" and not self.flags[key].ours(word):
            return self.facts.get(key, absent), f"{self._name(key)} auto: taken as {self.facts.get(key, absent)}"
        meant = self.flags[key].ours(word)
        if not meant:
            known = ", ".join(sorted(set(self.flags[key].spell.values())))
            raise ConfigError(f"{self.where}: {self._name(key)} {word!r} has no counterpart here (known: {known})")
        stated = self.facts.get(key)
        if stated in meant:
            return stated, None
        return meant[0], f"{self._name(key)} {word}: taken as {meant[0]}" if len(meant) > 1 else None

    def sizes(self) -> tuple[int, int, tuple[str, ...]]:
        """`max_num_seqs` and `max_num_batched_tokens` as the flags have them, with a notice for each that is absent."""
        notices = []
        for key in ("max_num_seqs", "max_num_batched_tokens"):
            if key not in self.values:
                notices.append(f"{self._name(key)} is not given: taken as {getattr(USUAL, key)}, our default")
        seqs = self.integer("max_num_seqs", USUAL.max_num_seqs)
        tokens = self.integer("max_num_batched_tokens", USUAL.max_num_batched_tokens)
        return seqs, tokens, tuple(notices)

    def _name(self, key: str) -> str:
        flag = self.flags[key]
        return flag.name or flag.yaml or key


@frozen
class Shape:
    """What flags say of one worker. `role` and `weights` are None where flags do not say."""

    model: str
    layout: Layout
    kv: str
    max_num_seqs: int
    max_num_batched_tokens: int
    nextn: int = 0
    role: str | None = None
    weights: str | None = None
    notices: tuple[str, ...] = ()

    def pool(self, role: str, gpu: str, replicas: int, weights: str) -> Pool:
        return Pool(
            role=role,
            gpu=gpu,
            layout=self.layout,
            replicas=replicas,
            weights=weights,
            kv=self.kv,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


QUANTISED = {
    "fp8": "fp8", "modelopt": "fp8", "w8a8_fp8": "fp8", "fbgemm_fp8": "fp8", "modelopt_fp8": "fp8",
    "awq": "int4", "awq_marlin": "int4", "gptq": "int4", "gptq_marlin": "int4", "w8a8_int8": "int8",
    "modelopt_fp4": "nvfp4", "nvfp4": "nvfp4", "petit_nvfp4": "nvfp4", "mxfp4": "mxfp4",
}  # fmt: skip
"""Our weight format of an engine's quantisation method."""


def stated_weights(found: Found) -> tuple[str | None, str | None]:
    """The weight format that flags say, None if none, and a notice where they say what we have no word for."""
    method = found.text("quantization")
    if method is not None:
        if method not in QUANTISED:
            return None, f"{found.flags['quantization'].name} {method} has no counterpart here; say --weights"
        return QUANTISED[method], None
    if found.text("dtype") in ("float16", "half"):
        return "fp16", None
    return None, None


def model_of(found: Found, flag: str = "model") -> str:
    """What the command loads; an error if it names no model."""
    model = found.text(flag)
    if model is None:
        raise ConfigError(f"{found.where}: no model in the command (it stands first, or after --model or --model-path)")
    return model


def kept(*notices: str | None) -> tuple[str, ...]:
    """The notices that there are."""
    return tuple(notice for notice in notices if notice)
