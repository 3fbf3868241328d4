"""What a client wants, whichever API it spoke: parsed, checked, and no longer JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from executors.engines.protocol import Sampling
from policies.cluster.events import TaintWeight
from policies.cluster.ids import WorkerId
from policies.frozen import frozen

Extra = Literal["worker_id", "timing", "decision", "kv"]
Annotation = Literal["formatted_prompt", "token_ids"]


@frozen
class ChatPrompt:
    """Messages for a chat template: role, content as a string, sometimes a name."""

    messages: tuple[Mapping[str, object], ...]


@frozen
class TextPrompt:
    text: str


@frozen
class TokenPrompt:
    token_ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@frozen
class Extensions:
    """`nvext` and its headers: hints for the router, the client's own limits, and what to tell beside the answer."""

    priority: int = 0
    strict_priority: int = 0
    osl_tokens: int | None = None
    required_taints: tuple[str, ...] = ()
    preferred_taints: tuple[TaintWeight, ...] = ()
    policy_class: str | None = None
    session_id: str | None = None
    worker: WorkerId | None = None
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    cache_salt: str | None = None
    token_data: tuple[int, ...] | None = None
    raw_prompt: bool = False
    greedy: bool = False
    extra_fields: frozenset[Extra] = frozenset()
    annotations: tuple[Annotation, ...] = ()


@frozen
class Wanted:
    """One request of a client. Every prompt gets `n` answers. `logprobs` of tokens are returned where
    `sampling.logprobs` is set. `running_usage`: usage so far stands in every chunk."""

    model: str
    prompts: tuple[Prompt, ...]
    max_tokens: int | None = None
    n: int = 1
    stops: tuple[str, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    stream: bool = False
    include_usage: bool = False
    running_usage: bool = False
    extensions: Extensions = field(default_factory=Extensions)
    echoed: Mapping[str, object] = field(default_factory=dict)
    """What the answer repeats of the request (Responses API)."""
