"""Chunks and bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from executors.engines.protocol import Logprob
from executors.frontend import errors
from executors.frontend.answers.writer import DONE, Result, Writer, comment, frame
from executors.frontend.errors import ApiError
from executors.frontend.run import Done, Run, Text


class OpenAiWriter(Writer):
    """What the two APIs share: the frame of a chunk, usage, the end."""

    chunk_object: ClassVar[str]
    body_object: ClassVar[str]

    def start(self) -> bytes:
        asked = self.run.wanted.extensions.annotations
        told = [(one.text, list(one.token_ids)) for one in self.run.prompts]
        pick = {"formatted_prompt": 0, "token_ids": 1}
        return b"".join(comment(name, [one[pick[name]] for one in told]) for name in asked)

    def end(self) -> bytes:
        if not self.run.wanted.include_usage:
            return DONE
        last = self._chunk([])
        last["usage"] = self._usage()
        self._add_echo(last)
        return frame(last) + DONE

    def error(self, error: ApiError) -> bytes:
        return frame(errors.body(error, "openai")) + DONE

    def body(self, results: Sequence[Result]) -> Mapping[str, object]:
        made = self._head(self.body_object)
        made["choices"] = [self._whole(one) for one in results]
        made["usage"] = self._usage()
        self._add_echo(made)
        return made

    def _whole(self, result: Result) -> dict[str, object]:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.run.created_s, "model": self.run.model.name}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        chunk = self._head(self.chunk_object)
        chunk["choices"] = choices
        if self.run.wanted.running_usage:
            chunk["usage"] = self._usage()
        elif self.run.wanted.include_usage:
            chunk["usage"] = None
        return chunk

    def _last(self, chunk: dict[str, object]) -> bytes:
        """A chunk with a finish reason; it is the last of the stream where no usage follows."""
        if self.run.open == 0 and not self.run.wanted.include_usage:
            self._add_echo(chunk)
        return frame(chunk)

    def _add_echo(self, told: dict[str, object]) -> None:
        echo = self.run.echo()
        if echo is not None:
            told["nvext"] = echo

    def _usage(self) -> dict[str, object]:
        usage = self.run.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }


class ChatWriter(OpenAiWriter):
    prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    body_object = "chat.completion"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._begun: set[int] = set()

    def text(self, event: Text) -> bytes:
        delta = self._delta(event.choice)
        delta["content"] = event.text
        return frame(self._chunk([self._choice(event.choice, delta, self._logprobs(event.logprobs), None)]))

    def done(self, event: Done) -> bytes:
        delta = self._delta(event.choice)
        if delta:
            delta["content"] = ""
        return self._last(self._chunk([self._choice(event.choice, delta, None, event.finish)]))

    def _delta(self, choice: int) -> dict[str, object]:
        """The first of an answer says whose it is."""
        if choice in self._begun:
            return {}
        self._begun.add(choice)
        return {"role": "assistant"}

    def _choice(
        self, index: int, delta: dict[str, object], logprobs: dict[str, object] | None, finish: str | None
    ) -> dict[str, object]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _whole(self, result: Result) -> dict[str, object]:
        return {
            "index": result.done.choice,
            "message": {"role": "assistant", "content": result.text, "refusal": None},
            "logprobs": self._logprobs(result.logprobs),
            "finish_reason": result.done.finish,
        }

    def _logprobs(self, tokens: Sequence[Logprob]) -> dict[str, object] | None:
        if not tokens:
            return None
        return {"content": [self._token(one.token_id, one.logprob, one.top) for one in tokens], "refusal": None}

    def _token(
        self, token_id: int, logprob: float, top: Sequence[tuple[int, float]] | None = None
    ) -> dict[str, object]:
        text = self.run.model.tokenizer.token(token_id)
        told: dict[str, object] = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        if top is not None:
            told["top_logprobs"] = [self._token(*one) for one in top]
        return told


class CompletionWriter(OpenAiWriter):
    prefix = "cmpl-"
    chunk_object = body_object = "text_completion"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._offsets: dict[int, int] = {}

    def text(self, event: Text) -> bytes:
        return frame(self._chunk([self._choice(event.choice, event.text, event.logprobs, None)]))

    def done(self, event: Done) -> bytes:
        return self._last(self._chunk([self._choice(event.choice, "", (), event.finish)]))

    def _whole(self, result: Result) -> dict[str, object]:
        return self._choice(result.done.choice, result.text, result.logprobs, result.done.finish)

    def _choice(self, index: int, text: str, logprobs: Sequence[Logprob], finish: str | None) -> dict[str, object]:
        told = self._logprobs(index, logprobs)
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish}

    def _logprobs(self, index: int, tokens: Sequence[Logprob]) -> dict[str, object] | None:
        if not tokens:
            return None
        token = self.run.model.tokenizer.token
        texts = [token(one.token_id) for one in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": [{token(token_id): value for token_id, value in one.top} for one in tokens],
            "text_offset": offsets,
        }
