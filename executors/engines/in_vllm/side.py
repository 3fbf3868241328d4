"""What the tiers of one engine have in common: content, counts of uses, the clock, and the books of each tier."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

from vllm.v1.kv_offload.base import ReqContext

from executors.engines.in_vllm.books import EVICT, GROUP_BYTES, Books, Contents, Counting, Key, Prompt
from policies.kvbm.offload import OffloadFilter


class _Prompts:
    """The prompts of one request, by KV group: how many of its keys they have taken up."""

    def __init__(self) -> None:
        self.by_group: dict[bytes, Prompt] = {}
        self.alone: dict[Key, Prompt] = {}
        self.seen = 0


class Side:
    """Made by the scheduler's process from what its engine was started with (`kv_tiers.settings`).

    `blocks` are the sizes of the tiers that have one, by name."""

    def __init__(self, told: dict[str, Any], blocks: dict[str, int]) -> None:
        self.contents = Contents()
        self._counting = Counting()
        self._began_s = time.monotonic()
        self.when_full: str = told.get("when_full", EVICT)
        settings = self._counting.settings(told, sum(blocks.values()))
        self.books: dict[str, Books] = {}
        self.filters: dict[str, OffloadFilter] = {}
        for name, tier in told["tiers"].items():
            passes = self._counting.filter(tier["offload"], settings)
            self.filters[name] = passes
            if name in blocks:
                self.books[name] = Books(name, blocks[name], tier["eviction"], passes, settings)

    def now_s(self) -> float:
        """Seconds since the engine began."""
        return time.monotonic() - self._began_s

    def prompt(self, request: ReqContext, key: Key) -> Prompt:
        """The prompt of a request that a block is of."""
        state = request.get_state(_Prompts)
        if state is None:
            state = _Prompts()
            request.set_state(state)
        positions = request._offload_key_positions
        if len(positions) > state.seen:
            self._take_up(state, list(islice(positions, state.seen, None)))
        prompt = state.by_group.get(key[-GROUP_BYTES:])
        if prompt is None or key not in prompt.at:  # the tail of a block, of engines that keep such
            prompt = state.alone.get(key)
            if prompt is None:
                prompt = state.alone[key] = Prompt()
                self.contents.extend(prompt, [key])
        return prompt

    def _take_up(self, state: _Prompts, keys: list[Key]) -> None:
        state.seen += len(keys)
        fresh: dict[bytes, list[Key]] = {}
        for key in keys:
            fresh.setdefault(key[-GROUP_BYTES:], []).append(key)
        for group, more in fresh.items():
            self.contents.extend(state.by_group.setdefault(group, Prompt()), more)

    def by_prompt(self, request: ReqContext, keys: Iterable[Key]) -> list[tuple[Prompt, list[Key]]]:
        """Blocks of a request, by prompt."""
        found: dict[int, tuple[Prompt, list[Key]]] = {}
        for key in keys:
            prompt = self.prompt(request, key)
            found.setdefault(id(prompt), (prompt, []))[1].append(key)
        return list(found.values())

    def used(self, prompt: Prompt, hi: int) -> None:
        """The first `hi` blocks of a prompt are complete."""
        self._counting.used(prompt, hi, self.now_s())
