"""Prompts to token ids, beside the event loop, and whether they fit: before any engine hears of the request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from executors.frontend.errors import ApiError, invalid, unsupported
from executors.frontend.metrics import Metrics
from executors.frontend.requests.wanted import ChatPrompt, Prompt, TextPrompt, TokenPrompt, Wanted
from executors.frontend.services import Model, Services
from executors.frontend.tokens import ServedTokenizer
from policies.frozen import frozen


@frozen
class Encoded:
    """A prompt as token ids; `text` None where it came as token ids. `max_tokens` is the budget of each answer."""

    token_ids: Sequence[int]
    text: str | None
    max_tokens: int


async def encode(services: Services, model: Model, wanted: Wanted) -> list[Encoded]:
    """All prompts of a request. Raises ApiError for one that is empty, too long, or beyond the vocabulary."""
    stage = services.metrics.stage.labels("preprocess")
    with services.metrics.stage_requests.labels("preprocess").track_inprogress(), stage.time():
        return [await _encode(services, model, wanted, prompt) for prompt in wanted.prompts]


async def _encode(services: Services, model: Model, wanted: Wanted, prompt: Prompt) -> Encoded:
    tokenizer, asked = model.tokenizer, wanted.extensions
    if asked.token_data is not None:
        prompt = TokenPrompt(token_ids=asked.token_data)
    if isinstance(prompt, ChatPrompt) and tokenizer.chat is None and not asked.raw_prompt:
        raise unsupported("messages", "the model has no chat template; use /v1/completions")
    work = partial(_ids, services.metrics, tokenizer, prompt, asked.raw_prompt)
    text, ids = await asyncio.get_running_loop().run_in_executor(services.pool, work)
    return Encoded(token_ids=ids, text=text, max_tokens=_budget(services, wanted, ids, tokenizer))


def _ids(metrics: Metrics, tokenizer: ServedTokenizer, prompt: Prompt, raw: bool) -> tuple[str | None, Sequence[int]]:
    """Runs on a thread of the pool."""
    match prompt:
        case TokenPrompt():
            return None, prompt.token_ids
        case TextPrompt():
            text = prompt.text
        case ChatPrompt() if raw:
            text = "".join(str(message["content"]) for message in prompt.messages)
        case ChatPrompt():
            with metrics.template.time():
                parts = tokenizer.fill(prompt.messages)
            with metrics.tokenize.time():
                return "".join(part.text for part in parts), tokenizer.encode_parts(parts)
    with metrics.tokenize.time():
        return text, tokenizer.encode(text, raw=raw)


def _budget(services: Services, wanted: Wanted, ids: Sequence[int], tokenizer: ServedTokenizer) -> int:
    """How many tokens an answer may have: what was asked for, or what is left of the context."""
    count, context = len(ids), services.backend.serving().context_tokens
    if not ids:
        raise invalid("prompt", "has no tokens")
    if max(ids) >= tokenizer.vocab_size:
        raise invalid("prompt", f"token id {max(ids)} is beyond the vocabulary of {tokenizer.vocab_size}")
    if count > context - 1:
        raise _too_long(f"the prompt is too long: {count} > {context - 1} tokens (context {context}, 1 for the answer)")
    left = context - count
    if wanted.max_tokens is None:
        return left
    if wanted.max_tokens > left:
        asked = f"{count} prompt tokens and max_tokens {wanted.max_tokens}"
        raise _too_long(f"{asked} do not fit into the context of {context}; at most {left} are left")
    if wanted.sampling.min_tokens > wanted.max_tokens:
        raise invalid("min_tokens", f"{wanted.sampling.min_tokens} is above max_tokens {wanted.max_tokens}")
    return wanted.max_tokens


def _too_long(message: str) -> ApiError:
    return invalid("prompt", message, "context_length_exceeded")
