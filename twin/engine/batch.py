"""The decode batch: requests that make one token per step, kept as running totals.

Nothing here loops over the batch in a step. A member's length follows from the step counter; `ring[i]` counts the
members that need a new block at steps congruent to i; a heap knows who finishes next (specs: engine section 16).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from twin.engine.sequence import Phase, Sequence


class DecodeBatch:
    """`size` members whose lengths sum to `ctx_tokens`, at step `step` of the engine's decode counter.

    A step needs room for all tokens known before it, or with `newest_has_slot` for the one that it makes as well.
    """

    __slots__ = ("_finish", "_ring", "_without_kv", "block_size", "ctx_tokens", "size", "step")

    def __init__(self, block_size: int, *, newest_has_slot: bool = False) -> None:
        self.block_size = block_size
        self._without_kv = 0 if newest_has_slot else 1  # tokens without KV
        self.size = 0
        self.ctx_tokens = 0
        self.step = 0
        self._ring = [0] * block_size
        self._finish: list[tuple[int, int, Sequence]] = []

    def join(self, seq: Sequence) -> None:
        """Take in a sequence that has just emitted; it emits again at the end of every further step."""
        length = seq.prompt + seq.outputs
        step = self.step
        seq.phase = Phase.DECODE
        seq.join_step = step
        seq.join_len = length
        self._ring[(step + self._without_kv - length) % self.block_size] += 1
        self.size += 1
        self.ctx_tokens += length
        heappush(self._finish, (step + seq.outputs_limit - seq.outputs, seq.order, seq))

    def length(self, seq: Sequence) -> int:
        """Tokens of a member as of the current step."""
        return seq.join_len + self.step - seq.join_step

    def leave(self, seq: Sequence) -> None:
        """Take a member out and write its state (outputs, computed, owned blocks) as of the current step."""
        length = seq.join_len + self.step - seq.join_step
        seq.outputs = length - seq.prompt
        seq.computed = computed = length - self._without_kv
        seq.owned = -(-computed // self.block_size)
        self._ring[(seq.join_step + self._without_kv - seq.join_len) % self.block_size] -= 1
        self.size -= 1
        self.ctx_tokens -= length

    def forget(self, seq: Sequence) -> None:
        """A member that left before its end may join again: nobody waits for its end any more."""
        self._finish = [entry for entry in self._finish if entry[2] is not seq]
        heapify(self._finish)

    def next_finish(self) -> int:
        """Number of steps until the next member makes its last token. The batch must not be empty."""
        finish = self._finish
        while finish[0][2].phase is not Phase.DECODE:
            heappop(finish)
        return finish[0][0] - self.step

    def pop_finished(self) -> list[Sequence]:
        """Members whose last token is made at the current step, in running order; they leave."""
        finish, step = self._finish, self.step
        done = []
        while finish and finish[0][0] <= step:
            seq = heappop(finish)[2]
            if seq.phase is Phase.DECODE:
                self.leave(seq)
                done.append(seq)
        return done

    def advance(self, steps: int) -> None:
        """Every member has made `steps` more tokens."""
        self.step += steps
        self.ctx_tokens += steps * self.size

    def crossings(self, steps: int) -> int:
        """New blocks that the next `steps` steps take."""
        bs = self.block_size
        if steps == 1:
            return self._ring[self.step % bs]
        laps, rest = divmod(steps, bs)
        blocks = laps * self.size
        if rest:
            at = self.step % bs
            blocks += sum(self._ring[at : at + rest])
            if at + rest > bs:
                blocks += sum(self._ring[: at + rest - bs])
        return blocks

    def steps_within(self, steps: int, room: int) -> int:
        """The largest number of steps, at most `steps`, whose new blocks fit in `room`."""
        bs = self.block_size
        if self.size * (steps // bs + 1) <= room or self.crossings(steps) <= room:
            return steps
        laps = room // self.size if self.size else 0
        fitting = min(laps * bs, steps)
        used = laps * self.size
        ring, at = self._ring, self.step
        while fitting < steps:
            used += ring[(at + fitting) % bs]
            if used > room:
                break
            fitting += 1
        return fitting

    def dissolve(self, members: list[Sequence]) -> None:
        """Take everybody out, in one go; `members` are the running sequences."""
        for seq in members:
            if seq.phase is Phase.DECODE:
                self.leave(seq)
        self._finish.clear()
