"""Events and bodies of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Final

from executors.frontend.answers.writer import Result, Writer, named
from executors.frontend.errors import ApiError
from executors.frontend.run import Done, Run, Text

_INCOMPLETE: Final = "incomplete"


class ResponsesWriter(Writer):
    """One message with one part of text. Events are numbered from 0 without gaps."""

    prefix = "resp_"

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._numbers = count()
        self._text = ""
        self._item_id = f"msg_{run.id}"

    def start(self) -> bytes:
        begun = self._response("in_progress", [])
        return (
            self._event("response.created", response=begun)
            + self._event("response.in_progress", response=begun)
            + self._event("response.output_item.added", output_index=0, item=self._item("in_progress", []))
            + self._of_part("response.content_part.added", part=_part(""))
        )

    def text(self, event: Text) -> bytes:
        self._text += event.text
        return self._of_part("response.output_text.delta", delta=event.text, logprobs=[])

    def done(self, event: Done) -> bytes:
        status = _status(event)
        item = self._item(status, [_part(self._text)])
        return (
            self._of_part("response.output_text.done", text=self._text, logprobs=[])
            + self._of_part("response.content_part.done", part=_part(self._text))
            + self._event("response.output_item.done", output_index=0, item=item)
            + self._event(f"response.{status}", response=self._response(status, [item]))
        )

    def end(self) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        failed = self._response("failed", [self._item(_INCOMPLETE, [_part(self._text)])])
        failed["error"] = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=failed)

    def body(self, results: Sequence[Result]) -> Mapping[str, object]:
        (one,) = results
        status = _status(one.done)
        return self._response(status, [self._item(status, [_part(one.text)])])

    def _event(self, kind: str, **told: object) -> bytes:
        return named({"type": kind, "sequence_number": next(self._numbers), **told})

    def _of_part(self, kind: str, **told: object) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **told)

    def _item(self, status: str, content: list[dict[str, object]]) -> dict[str, object]:
        return {"id": self._item_id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[dict[str, object]]) -> dict[str, object]:
        over = status in ("completed", _INCOMPLETE)
        made: dict[str, object] = {
            "id": self.id,
            "object": "response",
            "created_at": self.run.created_s,
            "status": status,
            "model": self.run.model.name,
            "output": output,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == _INCOMPLETE else None,
            "usage": self._usage() if over else None,
            "store": False,
            "background": False,
            "previous_response_id": None,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            **self.run.wanted.echoed,
        }
        echo = self.run.echo() if over else None
        return made if echo is None else {**made, "nvext": echo}

    def _usage(self) -> dict[str, object]:
        usage = self.run.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part(text: str) -> dict[str, object]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(done: Done) -> str:
    return _INCOMPLETE if done.finish == "length" else "completed"
