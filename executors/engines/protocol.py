"""What a live engine can do, whatever it is: token ids in, token ids out, one leg of a request at a time.

Adapters (`vllm`, `sglang`, `trtllm`, `mock`) carry this out over processes and sockets; the world knows nothing else
of them. Nothing here imports an engine. Times are seconds, lengths are tokens.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import field
from enum import Enum
from types import MappingProxyType
from typing import Final, Literal, Protocol

from policies.cluster.actions import RequestIndexDump, RequestIndexReplay
from policies.cluster.blocks import BlockPath, Branch
from policies.cluster.events import Event
from policies.cluster.ids import Leg, LossCause, RequestId, Role, WorkerId
from policies.frozen import frozen

Finish = Literal["stop", "length"]
"""Why an answer ended well: an end token or stop token was made, or the budget is used up."""

NOTHING: Final[Mapping[str, object]] = MappingProxyType({})


@frozen
class Sampling:
    """How tokens are drawn; names and ranges are those of OpenAI and vLLM. None: the engine's own default.

    `logprobs`: how many alternatives of each token are told (None: no probabilities at all). `grammar` is what guides
    the answer: {"json_schema": ...}, {"regex": ...}, {"choice": [...]} or {"grammar": ...}.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    grammar: Mapping[str, object] = field(default_factory=lambda: NOTHING)


GREEDY: Final = Sampling(temperature=0.0)


class Moves(Enum):
    """How the KV of a prompt gets from the leg that computes it to the leg that answers."""

    AFTER = "after"
    """The prefill leg ends with parameters, which the decode leg is given (vLLM, TensorRT-LLM)."""
    TOGETHER = "together"
    """Both legs are sent at once with a meeting point that we choose (SGLang)."""


@frozen
class LegRequest:
    """One leg for one worker. `leg_id` is ours, never used twice, and what `abort` takes.

    `token_ids` is the prompt, with what the client has already behind it where an answer goes on. `max_tokens` is what
    is left of the budget; a prefill leg makes one token, which nobody is shown. `handoff` is what the other leg left
    for this one, in the engine's own words: never anything of a client's. `path` is the content of the prompt in
    blocks and `own` what the answer fills, for engines that keep no tokens (the mock). `out_tokens` is how long the
    answer will be, where a replay knows it; real engines are never told.
    """

    leg_id: str
    request_id: RequestId
    leg: Leg
    token_ids: Sequence[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    handoff: Mapping[str, object] = field(default_factory=lambda: NOTHING)
    dp_rank: int | None = None
    lora: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    path: BlockPath | None = None
    own: Branch | None = None
    out_tokens: int | None = None


@frozen
class Logprob:
    """The probability of a token, and of `top` alternatives: (token id, logarithm)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class Piece:
    """What came of a leg: tokens, and with the last piece how it ended.

    `cached_tokens`: of the prompt, found in a cache of the worker (told once, with the first or the last piece).
    `handoff`: with the last piece of a prefill leg, what the decode leg is to be given. `prefilled`: the prompt is
    computed, though no token is shown for it (a prefill leg without tokens of its own).
    """

    token_ids: tuple[int, ...] = ()
    finish: Finish | None = None
    cached_tokens: int | None = None
    logprobs: tuple[Logprob, ...] = ()
    handoff: Mapping[str, object] = field(default_factory=lambda: NOTHING)
    prefilled: bool = False


class LegFailed(Exception):
    """A leg did not come to its end. `cause` is how; `refused`: the engine took nothing of it, and says why.

    A refusal ends the request (`RequestRejected`), except for want of room (`LossCause.OVERLOAD`); any other cause
    interrupts it, and the policies decide.
    """

    def __init__(self, cause: LossCause, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.cause = cause
        self.reason = reason
        self.refused = refused


@frozen
class Facts:
    """What a worker says of itself when it is ready; the router's block size must be `block_size`."""

    engine: str
    version: str
    role: Role
    models: tuple[str, ...]
    block_size: int
    total_blocks: int | None
    max_batched_tokens: int | None
    max_num_seqs: int
    context_tokens: int
    dp_ranks: int = 1
    gpus: int = 1
    on_cpu: bool = False
    loras: tuple[str, ...] | None = None
    compatibility: str | None = None
    """Of two workers that say the same, one can take over KV of the other (None: not told)."""


@frozen
class Load:
    """A worker's own account, as of `measured_s` of the world's clock; gauges of an idle engine may be old.

    `cached_blocks` are held and in no request's use; 0 where nobody follows its KV events. `late_fetches`: how often KV
    was fetched that it had let go of, since it started.
    """

    measured_s: float
    running: int
    waiting: int
    active_blocks: int
    cached_blocks: int
    late_fetches: int = 0


class Ability(Enum):
    """What not every engine can do."""

    ABORT = "abort a request by its id"
    PAUSE = "pause, and go on with what was running"
    DRAIN = "take no new work and end when the open work has"
    REPLAY = "say KV events again"
    SPLIT = "compute prompts for other workers"
    TIERS = "keep KV below the device"
    LOGPROBS = "tell probabilities"
    GRAMMAR = "answer within a grammar"


class Engine(Protocol):
    """One engine that is up, or about to be. Everything raises within a deadline of its own: nothing hangs for ever."""

    @property
    def name(self) -> str:
        """For people: what and where."""
        ...

    @property
    def moves(self) -> Moves:
        """How KV is handed over between two of these."""
        ...

    @property
    def abilities(self) -> frozenset[Ability]: ...

    async def ready(self, deadline_s: float) -> Facts:
        """Wait until it takes work. Raises `EngineError` with the end of its log if it does not within `deadline_s`
        seconds or will not at all."""
        ...

    def generate(self, request: LegRequest) -> AsyncGenerator[Piece, None]:
        """Run a leg. The last piece has `finish`, or `handoff` or `prefilled` for a prefill leg; a stream that ends
        without is a `LegFailed`. Closing the iterator stops the leg (`abort` included)."""
        ...

    def meeting_point(self) -> Mapping[str, object]:
        """For `Moves.TOGETHER`, of the prefill worker: where both legs of one attempt meet, never the same twice."""
        ...

    async def abort(self, leg_id: str) -> None:
        """Stop a leg, which may be over or unknown already. Returns when the engine has been told."""
        ...

    async def alive(self) -> bool:
        """Whether it answers health checks now."""
        ...

    async def load(self) -> Load | None:
        """What it has to do; None where it does not say."""
        ...

    async def drain(self, deadline_s: float) -> None:
        """Nothing new comes any more and nothing of ours is open: let the process end."""
        ...

    async def close(self) -> None:
        """Let go of sockets; kill what is left of a process that we started. May be called twice."""
        ...


class KvFollower(Protocol):
    """Follows what all ranks of a worker say of their blocks, and posts what it hears."""

    @property
    def heard_s(self) -> float | None:
        """When the worker last said anything of its blocks, by the world's clock; None while it has not, or where its
        silence means nothing for nobody can ask."""
        ...

    async def stands(self, deadline_s: float) -> None:
        """Returns when it listens to every rank and has asked for what came before. Raises EngineError where that takes
        longer than `deadline_s`, or cannot be."""
        ...

    def ask(self, action: RequestIndexReplay | RequestIndexDump) -> None:
        """What a rank holds, or that nobody knows it, is posted as soon as it is known."""
        ...

    async def close(self) -> None:
        """Stop. May be called twice."""
        ...


class TellsKv(Engine, Protocol):
    """One that tells of its KV blocks."""

    def follow(self, worker_id: WorkerId, epoch: int, post: Callable[[Event], None]) -> KvFollower | None:
        """Begin to follow its events, from the first one on, once it is ready: `post` gets each, in the order of its
        rank, and the answers to what is asked, never before this returns. None where it was started without."""
        ...
