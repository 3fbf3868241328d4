"""TensorRT-LLM admission and ranks in step, written for reading (specs: engine 7 and 9).

Like the engine that it builds on, it shares no code with `twin.engine`.
"""

from __future__ import annotations

from naive_engine import Job, NaiveEngine


class NaiveTrtllm(NaiveEngine):
    """Guaranteed no evict adds up what everybody who runs may still need; else as the vLLM one, newest preempted."""

    guaranteed = True
    wait_steps, wait_ratio, waited = 0, 0.0, 0

    def schedule(self, now_s: float) -> float:
        if self.wait_steps:
            decoding = sum(1 for job in self.running if job.outputs)
            tokens = sum(len(job) for job in self.waiting) + decoding
            self.shut = bool(
                self.waiting and decoding and self.waited < self.wait_steps and tokens < self.wait_ratio * self.budget
            )
            self.waited += self.shut
        return super().schedule(now_s)

    def admit(self, now_s: float, parts: dict[Job, tuple[int, int]], budget: int) -> tuple[bool, int]:
        ok, used = super().admit(now_s, parts, budget)
        if ok:
            self.waited = 0
        return ok, used

    def findable(self, job: Job) -> int:
        return len(job)

    def fits(self, job: Job, active_hits: int) -> bool:
        if not self.guaranteed:
            return super().fits(job, active_hits)
        promised = sum(self.at_end(other) - len(other.blocks) for other in self.running)
        return self.at_end(job) - active_hits <= self.room() - promised

    def at_end(self, job: Job) -> int:
        return -(-(len(job.prompt) + job.limit) // self.bs)

    def refuses(self, job: Job) -> bool:
        room = self.capacity * self.bs - len(job.prompt)
        job.limit = min(job.limit, max(room, 0))
        return room <= 0 or super().refuses(job)


class NaiveGroup:
    """Ranks that begin and end every step together; requests go to them in turn."""

    def __init__(self, ranks: list[NaiveEngine], interval: int = 1, balance: int = 0) -> None:
        self.ranks, self.interval, self.balance = ranks, interval, balance
        self.steps, self.turn, self.unbalanced = 0, 0, 0
        self.left = [False] * len(ranks)

    @property
    def busy(self) -> bool:
        return any(rank.waiting or rank.running for rank in self.ranks)

    @property
    def done(self) -> list[Job]:
        return [job for rank in self.ranks for job in rank.done]

    def step(self, now_s: float) -> float:
        ends = [now_s]
        working = []
        waits = self.waits()
        for at, rank in enumerate(self.ranks):
            chance = self.steps % self.interval == 0 or self.left[at] or not rank.running
            chance = chance and not waits
            rank.shut = not chance
            if rank.waiting or rank.running:
                working.append(rank)
                ends.append(rank.schedule(now_s))
            if chance:
                self.left[at] = bool(rank.waiting)
        for rank in working:
            rank.emit(max(ends))
        self.steps += 1
        return max(ends)

    def waits(self) -> bool:
        """Whether prompts wait for prompts on other ranks."""
        if not self.balance:
            return False
        all_decode = all(any(job.outputs for job in rank.running) for rank in self.ranks)
        if not all_decode or all(rank.waiting and len(rank.running) < rank.slots for rank in self.ranks):
            self.unbalanced = 0
            return False
        self.unbalanced += 1
        if self.unbalanced >= self.balance:
            self.unbalanced = 0
            return False
        return True

    def run(self, jobs: list[Job]) -> None:
        coming = sorted(jobs, key=lambda j: j.arrival_s)
        now_s = 0.0
        while coming or self.busy:
            if not self.busy:
                now_s = max(now_s, coming[0].arrival_s)
            while coming and coming[0].arrival_s <= now_s:
                job = coming.pop(0)
                rank = self.ranks[self.turn % len(self.ranks)]
                self.turn += 1
                (rank.done if rank.refuses(job) else rank.waiting).append(job)
            if self.busy:
                now_s = self.step(now_s)
