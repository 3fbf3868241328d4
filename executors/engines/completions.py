"""`/v1/completions` with token ids in and out, as vLLM and TensorRT-LLM speak it: bodies to send, answers to read.

Nothing of a client's reaches a body but its prompt, its budget and its sampling: every field is written here by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from executors.engines.protocol import LegFailed, LegRequest, Logprob, Piece, Sampling
from policies.cluster.ids import LossCause

_AS_IT_IS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
)
"""Settings that engines call as we do; left out where they are the engine's own."""

_ENDS_WELL = ("stop", "length")


def sampling_body(sampling: Sampling, min_tokens: str = "min_tokens") -> dict[str, Any]:
    """How tokens are drawn; `min_tokens` is the engine's name of that field."""
    body = {name: value for name in _AS_IT_IS if (value := getattr(sampling, name)) is not None}
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.min_tokens:
        body[min_tokens] = sampling.min_tokens
    return body


def completion_body(request: LegRequest, model: str) -> dict[str, Any]:
    """A leg that streams its answer."""
    return {
        "model": request.lora or model,
        "prompt": list(request.token_ids),
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling_body(request.sampling),
    }


def prefill_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a leg that only computes the prompt: one token, which nobody is shown, in one answer."""
    left_out = ("stream_options", "min_tokens", "logprobs")
    return {key: value for key, value in body.items() if key not in left_out} | {"stream": False, "max_tokens": 1}


async def read_stream(
    events: AsyncIterator[Mapping[str, Any]], ended: Callable[[object, object], LegFailed], logprobs: bool
) -> AsyncIterator[Piece]:
    """The pieces in the chunks of a stream. `ended` makes the failure of a reason to end that is none of success.

    The last piece waits for the chunk behind it, which tells how much of the prompt was cached.
    """
    finish, cached = None, None
    async for chunk in events:
        cached = cached_tokens(chunk) if cached is None else cached
        for choice in chunk.get("choices") or ():
            tokens = tuple(choice.get("token_ids") or ())
            if tokens:
                yield Piece(token_ids=tokens, logprobs=read_logprobs(choice, tokens) if logprobs else ())
            finish = finish or choice.get("finish_reason")
            if finish not in (None, *_ENDS_WELL):
                raise ended(finish, choice.get("stop_reason") or "")
    if finish is not None:
        yield Piece(finish=finish, cached_tokens=cached)


def read_prefill(answer: Mapping[str, Any], ended: Callable[[object, object], LegFailed]) -> Mapping[str, Any]:
    """The one choice of an answer that ended well; raises LegFailed for any other."""
    choices = answer.get("choices") or ()
    if not choices:
        raise LegFailed(LossCause.INCOMPLETE, "the engine answered a prefill with no choice at all")
    if choices[0].get("finish_reason") not in _ENDS_WELL:
        raise ended(choices[0].get("finish_reason"), choices[0].get("stop_reason") or "")
    choice: Mapping[str, Any] = choices[0]
    return choice


def cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """How much of the prompt was cached, where an answer tells."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details")
    return details.get("cached_tokens") if details else None


def read_logprobs(choice: Mapping[str, Any], tokens: tuple[int, ...]) -> tuple[Logprob, ...]:
    """Probabilities of the tokens of a chunk; names of tokens are `token_id:7`."""
    told = choice.get("logprobs")
    if not told:
        return ()
    tops = told.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        Logprob(token_id=token, logprob=value, top=tuple((_token_id(name), p) for name, p in (top or {}).items()))
        for token, value, top in zip(tokens, told["token_logprobs"], tops, strict=True)
    )


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))
