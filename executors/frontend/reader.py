"""One answer's deltas to pieces of text: detokenized, cut at a stop string, with their probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from executors.backend import Delta
from executors.engines.protocol import Logprob
from executors.frontend.detokenize import Detokenizer, StopStrings
from executors.frontend.tokens import ServedTokenizer
from policies.frozen import frozen


@frozen
class Piece:
    """Text that may be shown, with the probabilities of the tokens since the last piece."""

    text: str
    logprobs: tuple[Logprob, ...] = ()


class Reader:
    """`min_tokens` tokens come before stop strings are looked for."""

    def __init__(self, tokenizer: ServedTokenizer, stops: Sequence[str], min_tokens: int) -> None:
        self._detokenizer = Detokenizer(tokenizer.decode)
        self._stops = StopStrings(stops)
        self._by_token = bool(stops)
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens of the answer, the one that completed a stop string included."""
        self.stop: str | None = None
        """The stop string that was found."""

    def push(self, delta: Delta) -> Piece:
        if not self._by_token:
            self.tokens += len(delta.token_ids)
            return Piece(text=self._detokenizer.push(delta.token_ids), logprobs=delta.logprobs)
        text = ""
        before = self.tokens
        for token_id in delta.token_ids:
            self.tokens += 1
            text += self._look(self._detokenizer.push((token_id,)))
            if self.stop is not None:
                break
        return Piece(text=text, logprobs=delta.logprobs[: self.tokens - before])

    def flush(self) -> str:
        """The rest, once no more tokens come."""
        found = self._look(self._detokenizer.flush())
        return found if self.stop is not None else found + self._stops.flush()

    def _look(self, text: str) -> str:
        if self.tokens < self._min_tokens:
            return text
        found = self._stops.push(text)
        self.stop = found.stop
        return found.text
