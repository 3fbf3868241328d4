"""From text to token ids and back: the tokenizer of a served model and its chat template.

Text of a client is text: what looks like a control token in it is encoded as characters, never as that token. Only the
chat template, and clients that may send raw prompts, can make control tokens. Encoding takes milliseconds for a long
prompt: callers run it beside the event loop.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from executors.frontend.template import ChatTemplate
from policies.errors import ConfigError

Message = Mapping[str, object]


class Part(NamedTuple):
    """A piece of a prompt. `is_text`: it is a client's, though it looks like a control token."""

    text: str
    is_text: bool


class ServedTokenizer:
    """The tokenizer of one model. `chat` None: the model has no chat template."""

    def __init__(self, tokenizer_json: str, chat: ChatTemplate | None = None) -> None:
        self._control = Tokenizer.from_str(tokenizer_json)
        self._plain = Tokenizer.from_str(tokenizer_json)
        self._plain.encode_special_tokens = True  # of the two, this one reads them as text
        self.chat = chat
        self.vocab_size = self._control.get_vocab_size(with_added_tokens=True)
        specials = [token.content for token in self._control.get_added_tokens_decoder().values() if token.special]
        longest_first = sorted(specials, key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, longest_first))) if specials else None

    @classmethod
    def from_folder(cls, folder: Path) -> ServedTokenizer:
        """Read `tokenizer.json`, and the template in `chat_template.jinja` or `tokenizer_config.json`, if any."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing; name the folder of a model with its tokenizer.json")
        return cls(path.read_text(encoding="utf-8"), _template(folder))

    def encode(self, text: str, *, raw: bool = False) -> list[int]:
        """Token ids of a whole prompt, begin token included. `raw`: control tokens in `text` are meant."""
        return list((self._control if raw else self._plain).encode(text).ids)

    def fill(self, messages: Sequence[Message]) -> list[Part]:
        """The prompt that the template makes of `messages`, in parts.

        Control tokens that a client wrote are cut out before the template is filled and are parts of their own, so
        that only those of the template itself have effect. Raises ApiError where it takes no such messages.
        """
        if self.chat is None:
            raise ConfigError("the model has no chat template")
        kept = _Kept(self._specials)
        return kept.parts(self.chat.render([kept.without(message) for message in messages]))

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of a filled template."""
        ids: list[int] = []
        for part in parts:
            tokenizer = self._plain if part.is_text else self._control
            ids.extend(tokenizer.encode(part.text, add_special_tokens=False).ids)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, control tokens left out."""
        return str(self._control.decode(list(token_ids), skip_special_tokens=True))

    def token(self, token_id: int) -> str:
        """One token as text, for lists of probabilities."""
        return str(self._control.decode([token_id], skip_special_tokens=False))


class _Kept:
    """Control tokens in a client's text, kept aside while a template is filled; a mark that nobody can guess stands
    for each."""

    def __init__(self, specials: re.Pattern[str] | None) -> None:
        self._specials = specials
        self._nonce = secrets.token_hex(8)
        self._marks = re.compile(rf"\ue000{self._nonce}:(\d+)\ue001")
        self._texts: list[str] = []

    def without(self, value: Message) -> Message:
        return {name: self._cut(one) for name, one in value.items()}

    def _cut(self, value: object) -> object:
        match value:
            case str() if self._specials is not None:
                return self._specials.sub(self._keep, value)
            case dict():
                return {name: self._cut(one) for name, one in value.items()}
            case list() | tuple():
                return [self._cut(one) for one in value]
            case _:
                return value

    def _keep(self, found: re.Match[str]) -> str:
        self._texts.append(found.group())
        return f"\ue000{self._nonce}:{len(self._texts) - 1}\ue001"

    def parts(self, rendered: str) -> list[Part]:
        pieces = self._marks.split(rendered)  # text, number, text, number, ... text
        parts = [Part(self._texts[int(one)], True) if at % 2 else Part(one, False) for at, one in enumerate(pieces)]
        return [part for part in parts if part.text]


def _template(folder: Path) -> ChatTemplate | None:
    config_path, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    tokens = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    named = {name: text for name, text in tokens.items() if text is not None}
    if own.is_file():
        return ChatTemplate(own.read_text(encoding="utf-8"), named)
    source = config.get("chat_template")
    if isinstance(source, list):
        source = {one["name"]: one["template"] for one in source}.get("default")
    return None if source is None else ChatTemplate(source, named)


def _content(token: object) -> str | None:
    """A token as configurations write it: its text, or an object with its text."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
