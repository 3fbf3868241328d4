"""TensorRT-LLM admission and ranks in step, written for reading (specs: engine 7 and 9).

Like the engine that it builds on, it shares no code with `twin.engine`.
"""

from __future__ import annotations

from naive_engine import Job, NaiveEngine


class NaiveTrtllm(NaiveEngine):
    """Guaranteed no evict adds up what everybody who runs may still need; else as the vLLM one, newest preempted."""

    guaranteed = True

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

    def __init__(self, ranks: list[NaiveEngine], interval: int = 1) -> None:
        self.ranks, self.interval = ranks, interval
        self.steps, self.turn = 0, 0
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
        for at, rank in enumerate(self.ranks):
            chance = self.steps % self.interval == 0 or self.left[at] or not rank.running
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
