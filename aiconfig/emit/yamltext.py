"""YAML that every reader takes the same way: strings that any version of YAML could read as something else are quoted.

PyYAML writes `y` bare because it reads it as text; Kubernetes' reader and YAML 1.1 read a truth value. So a string
stands bare only if it begins with a letter or a slash (flags: behind their dashes), is made of plain characters, and
is none of the words that mean something.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from aiconfig.emit.worker import Node

if TYPE_CHECKING:
    import yaml

_BARE = re.compile(r"(?:--?)?[A-Za-z/][A-Za-z0-9_./@+-]*(?::[A-Za-z0-9_./@+-]+)*")
_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})

Path = tuple[str | int, ...]
Comments = Mapping[Path, str]
"""Comments behind values: by number of the document, then keys and indices."""


def dump(documents: Iterable[Node], comments: Comments | None = None, head: Iterable[str] = ()) -> str:
    """The documents as YAML, keys in the order given, one value a line.

    `comments` are put behind values; `head` are comment lines on top.
    """
    import yaml

    dumper = _dumper()
    parts = [
        yaml.dump(one, Dumper=dumper, sort_keys=False, width=10**9, allow_unicode=True, default_flow_style=False)
        for one in documents
    ]
    texts = [_commented(text, n, comments or {}) for n, text in enumerate(parts)]
    top = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return top + "---\n".join(texts)


def load(text: str, where: str) -> list[Node]:
    """The documents of a YAML text; `ConfigError` with the line that is at fault."""
    import yaml

    from policies.errors import ConfigError

    try:
        return [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{where}{line}: no YAML: {getattr(error, 'problem', None) or error}") from None


def is_bare(text: str) -> bool:
    """Whether a string may stand without quotes."""
    return bool(_BARE.fullmatch(text)) and text.lower().lstrip("-") not in _WORDS


def one_line(text: str) -> str:
    """The text for a comment: no line break or other control character can end it."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _dumper() -> type[yaml.SafeDumper]:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Safe, never an alias, lists indented, strings by our own rule."""

        def ignore_aliases(self, data: object) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        if "\n" in value and all(line.isprintable() and line == line.rstrip() for line in value.split("\n")):
            return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|")
        quote = "'" if '"' in value and value.isprintable() else '"'
        style = None if is_bare(value) else quote
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper


def _commented(text: str, document: int, comments: Comments) -> str:
    wanted = {path[1:]: comment for path, comment in comments.items() if path[0] == document}
    if not wanted:
        return text
    lines = text.split("\n")
    for path, node in _scalars(_composed(text), ()):
        if path in wanted:
            lines[node.end_mark.line] += f"  # {one_line(wanted[path])}"
    return "\n".join(lines)


def _composed(text: str) -> yaml.Node:
    import yaml

    node = yaml.compose(text)
    assert node is not None, "a document that we wrote is not empty"
    return node


def _scalars(node: yaml.Node, path: Path) -> Iterable[tuple[Path, yaml.ScalarNode]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _scalars(value, (*path, key.value))
    elif isinstance(node, yaml.SequenceNode):
        for n, value in enumerate(node.value):
            yield from _scalars(value, (*path, n))
    elif isinstance(node, yaml.ScalarNode):
        yield path, node
