"""Events and bodies of /v1/messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from executors.frontend import errors
from executors.frontend.answers.writer import Result, Writer, named
from executors.frontend.errors import ApiError
from executors.frontend.run import Done, Text


class MessagesWriter(Writer):
    """One answer, in one block of text. The stream ends with its last event: there is no `[DONE]`."""

    prefix = "msg_"
    keep_alive = named({"type": "ping"})

    def start(self) -> bytes:
        begun = self._message([], None, output_tokens=0)
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return named({"type": "message_start", "message": begun}) + named(block)

    def text(self, event: Text) -> bytes:
        delta = {"type": "text_delta", "text": event.text}
        return named({"type": "content_block_delta", "index": 0, "delta": delta})

    def done(self, event: Done) -> bytes:
        delta = {"stop_reason": _reason(event), "stop_sequence": event.stop}
        ended: dict[str, object] = {"type": "message_delta", "delta": delta, "usage": self._usage(event.tokens)}
        echo = self.run.echo()
        if echo is not None:
            ended["nvext"] = echo
        return named({"type": "content_block_stop", "index": 0}) + named(ended)

    def end(self) -> bytes:
        return named({"type": "message_stop"})

    def error(self, error: ApiError) -> bytes:
        return named(errors.body(error, "anthropic"))

    def body(self, results: Sequence[Result]) -> Mapping[str, object]:
        (one,) = results
        block = {"type": "text", "text": one.text}
        made = self._message([block], one.done, output_tokens=one.done.tokens)
        echo = self.run.echo()
        if echo is not None:
            made["nvext"] = echo
        return made

    def _message(self, content: list[dict[str, str]], done: Done | None, *, output_tokens: int) -> dict[str, object]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.run.model.name,
            "content": content,
            "stop_reason": None if done is None else _reason(done),
            "stop_sequence": None if done is None else done.stop,
            "usage": self._usage(output_tokens),
        }

    def _usage(self, output_tokens: int) -> dict[str, object]:
        usage = self.run.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "output_tokens": output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        }


def _reason(done: Done) -> str:
    if done.stop is not None:
        return "stop_sequence"
    return "max_tokens" if done.finish == "length" else "end_turn"
