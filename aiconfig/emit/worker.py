"""One worker of a plan as words of a command and as options in a file, each with where its value came from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from aiconfig.candidate import Pool
from aiconfig.emit import sglang, trtllm, vllm
from aiconfig.emit.flags import Flags, Plain
from aiconfig.emit.found import Found, Shape
from aiconfig.emit.plan import SEARCH, Item, Plan
from aiconfig.emit.served import host_settings
from policies.frozen import frozen

Node = None | bool | int | float | str | list["Node"] | dict[str, "Node"]
"""What YAML and JSON can hold."""

ITEMS: Mapping[str, Callable[[Plan, Pool], Iterator[Item]]] = {
    "vllm": vllm.items,
    "sglang": sglang.items,
    "trtllm": trtllm.items,
}
SHAPES: Mapping[str, Callable[[Found], Shape]] = {"vllm": vllm.shape, "sglang": sglang.shape, "trtllm": trtllm.shape}
TITLES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


@frozen
class Words:
    """Words of a command that belong together, and where their value came from."""

    key: str
    words: tuple[str, ...]
    origin: str


@frozen
class Options:
    """A file of options: a tree, and the origin of each of its values by path."""

    tree: dict[str, Node]
    origins: Mapping[tuple[str, ...], str]

    def comments(self, document: int = 0) -> dict[tuple[str | int, ...], str]:
        """The origins as comments of that document of a YAML file."""
        return {(document, *path): origin for path, origin in self.origins.items()}


def worker_items(plan: Plan, pool: Pool) -> tuple[Item, ...]:
    """The settings of one worker of the pool, in the order in which they are written."""
    host = host_settings(plan.candidate, pool, plan.flags)
    return (*ITEMS[plan.engine](plan, pool), *(Item(key=key, value=host[key], origin=SEARCH) for key in host))


def worker_words(plan: Plan, pool: Pool) -> tuple[Words, ...]:
    """The command of one worker, without address and hosts. Its file of options, if it needs one, is not named."""
    return words_of(plan.flags, worker_items(plan, pool))


def words_of(flags: Flags, items: Iterable[Item]) -> tuple[Words, ...]:
    """The items that stand on the command line, as its words."""
    made = []
    for item in items:
        flag = flags[item.key]
        if flag.yaml is None:
            words = flag.words(item.value)
            if words:
                made.append(Words(key=item.key, words=words, origin=item.origin))
    return tuple(made)


def last_words(parts: Iterable[Words]) -> dict[int, str]:
    """The origin of each part by the number of its last word, when all are put in one list."""
    found, at = {}, -1
    for part in parts:
        at += len(part.words)
        found[at] = part.origin
    return found


def options_of(flags: Flags, items: Iterable[Item], whole: bool = False) -> Options:
    """The items that stand in a file of options; with `whole` also those that could stand on the command line."""
    tree: dict[str, Node] = {}
    origins: dict[tuple[str, ...], str] = {}
    for item in items:
        flag = flags[item.key]
        place = flag.yaml or (flag.yaml_too if whole else None)
        if place is not None:
            path = tuple(place.split("."))
            _put(tree, path, flag.spelled(item.value))
            origins[path] = item.origin
    return Options(tree=tree, origins=origins)


def _put(tree: dict[str, Node], path: tuple[str, ...], value: Plain) -> None:
    at = tree
    for part in path[:-1]:
        inner = at.setdefault(part, {})
        assert isinstance(inner, dict)
        at = inner
    at[path[-1]] = dict(value) if isinstance(value, Mapping) else value
