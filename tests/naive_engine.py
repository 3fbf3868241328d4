"""An engine written for reading, not for speed: single blocks, single steps, token lists (specs: engine 2, 5 and 6).

It shares no code with `twin.engine`, so that agreement means something. Only for small traces.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twin.perf.protocol import LatencyModel, PrefillChunk


@dataclass(eq=False)
class Copy:
    """One physical block; `key` is its content and all before it, None while private."""

    key: tuple | None = None
    refs: int = 1


@dataclass(eq=False)
class Job:
    row: int
    arrival_s: float
    prompt: list[tuple]
    limit: int
    outputs: int = 0
    computed: int = 0
    blocks: list[Copy] = field(default_factory=list)
    admit_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    reused: int = 0
    first_reuse: int = 0
    readmissions: int = 0
    failed: bool = False
    lora: str | None = None

    def tokens(self) -> list[tuple]:
        return self.prompt + [("made", self.row, i) for i in range(self.outputs)]

    def __len__(self) -> int:
        return len(self.prompt) + self.outputs


class NaiveEngine:
    def __init__(
        self,
        latency: LatencyModel,
        *,
        block_size: int,
        blocks: int,
        max_num_seqs: int,
        budget: int,
        caching: bool = True,
        chunked: bool = True,
        exclusive: bool = False,
        preemption: str = "lifo",
        max_loras: int | None = None,
    ) -> None:
        self.latency = latency
        self.bs, self.capacity, self.slots, self.budget = block_size, blocks, max_num_seqs, budget
        self.caching, self.chunked, self.exclusive, self.preemption = caching, chunked, exclusive, preemption
        self.max_loras = max_loras
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.found: dict[tuple, list[Copy]] = {}
        self.idle_copies: list[Copy] = []  # oldest first
        self.in_use = 0
        self.done: list[Job] = []
        self.doomed: list[Job] = []
        self.shut = False  # nobody may be admitted beside those who run
        self.parts: dict[Job, tuple[int, int]] = {}

    # ---- blocks

    def free(self) -> int:
        return self.capacity - self.in_use - len(self.idle_copies)

    def room(self) -> int:
        return self.capacity - self.in_use

    def fresh(self) -> Copy:
        if not self.free():
            old = self.idle_copies.pop(0)
            self.found[old.key].remove(old)
            if not self.found[old.key]:
                del self.found[old.key]
        self.in_use += 1
        return Copy()

    def content(self, job: Job, block: int) -> tuple:
        return tuple(job.tokens()[: (block + 1) * self.bs])

    def publish(self, job: Job) -> None:
        if not self.caching:
            return
        for i in range(job.computed // self.bs):
            copy = job.blocks[i]
            if copy.key is None:
                copy.key = self.content(job, i)
                self.found.setdefault(copy.key, []).append(copy)

    def release(self, job: Job) -> None:
        for copy in reversed(job.blocks):
            copy.refs -= 1
            if copy.refs == 0:
                self.in_use -= 1
                if copy.key is not None:
                    self.idle_copies.append(copy)
        job.blocks = []
        job.computed = 0

    def findable(self, job: Job) -> int:
        """Tokens that a look-up may find; the last one is always computed."""
        return len(job) - 1

    def hits(self, job: Job) -> list[Copy]:
        hits: list[Copy] = []
        if self.caching:
            for i in range(self.findable(job) // self.bs):
                copies = self.found.get(self.content(job, i))
                if not copies:
                    break
                hits.append(copies[0])
        return hits

    # ---- one step

    def extend(self, job: Job, want: int) -> bool:
        need = -(-(job.computed + want) // self.bs) - len(job.blocks)
        if need > self.room():
            return False
        job.blocks += [self.fresh() for _ in range(need)]
        job.computed += want
        self.publish(job)
        return True

    def step(self, now_s: float) -> float:
        """Schedule and carry out one step; returns when it ends."""
        end_s = self.schedule(now_s)
        self.emit(end_s)
        return end_s

    def schedule(self, now_s: float) -> float:
        """Decide what the step computes; returns when it ends."""
        budget, preempted = self.budget, False
        parts: dict[Job, tuple[int, int]] = {}  # want, context before
        only_prompt = False
        if self.exclusive and self.waiting and len(self.running) < self.slots:
            only_prompt = self.admit(now_s, parts, budget)[0]
        if not only_prompt:
            i = 0
            while i < len(self.running) and budget > 0:
                job = self.running[i]
                want = min(len(job) - job.computed, budget)
                if not self.chunked and job.computed < len(job.prompt) and len(job) - job.computed > budget:
                    break
                if -(-(job.computed + want) // self.bs) > self.capacity:
                    self.running.remove(job)
                    self.doomed.append(job)
                    continue
                past = job.computed
                gone = False
                while not self.extend(job, want):
                    victim = self.running.pop(-1 if self.preemption == "lifo" else 0)
                    preempted = True
                    if victim in parts:
                        budget += parts.pop(victim)[0]
                    self.release(victim)
                    self.waiting.insert(0, victim)
                    gone = victim is job
                    if gone:
                        break
                    if self.preemption == "fifo":
                        i -= 1
                if gone:
                    continue
                parts[job] = (want, past)
                budget -= want
                i += 1
            if not preempted and not self.exclusive and not self.shut:
                while self.waiting and len(self.running + self.doomed) < self.slots and budget > 0:
                    ok, used = self.admit(now_s, parts, budget)
                    if not ok:
                        break
                    budget -= used
        if not self.running and not self.doomed and self.waiting and not parts:
            job = self.waiting[0]
            if -(-len(job) // self.bs) > self.capacity or (not self.chunked and len(job) > self.budget):
                self.waiting.pop(0)
                job.failed = True
                self.done.append(job)
        self.parts = parts
        return self.price(now_s, parts, only_prompt)

    def emit(self, end_s: float) -> None:
        """The scheduled step ends; who has outgrown the pool goes."""
        for job in self.doomed:
            self.release(job)
            job.failed = True
        self.done += self.doomed
        self.doomed = []
        for job in list(self.running):
            if job in self.parts and job.computed >= len(job):
                job.outputs += 1
                job.first_s = end_s if job.first_s is None else job.first_s
                job.last_s = end_s
                if job.outputs >= job.limit:
                    self.running.remove(job)
                    self.release(job)
                    self.done.append(job)

    def fits(self, job: Job, active_hits: int) -> bool:
        return -(-len(job) // self.bs) - active_hits <= self.room()

    def refuses(self, job: Job) -> bool:
        return -(-len(job.prompt) // self.bs) > self.capacity or (not self.chunked and len(job.prompt) > self.budget)

    def next_up(self) -> Job | None:
        """The first who waits and whose adapter is not one too many."""
        loras = {job.lora for job in self.running + self.doomed if job.lora}
        for job in self.waiting:
            if self.max_loras is None or not job.lora or len(loras | {job.lora}) <= self.max_loras:
                return job
        return None

    def admit(self, now_s: float, parts: dict[Job, tuple[int, int]], budget: int) -> tuple[bool, int]:
        job = self.next_up()
        if job is None:
            return False, 0
        hits = self.hits(job)
        if not self.fits(job, sum(1 for c in hits if c.refs)):
            return False, 0
        if not self.chunked and len(job) - len(hits) * self.bs > budget:
            return False, 0
        self.waiting.remove(job)
        for copy in hits:
            if not copy.refs:
                self.idle_copies.remove(copy)
                self.in_use += 1
            copy.refs += 1
        job.blocks = list(hits)
        job.computed = len(hits) * self.bs
        if job.admit_s is None:
            job.admit_s, job.first_reuse = now_s, job.computed
        else:
            job.readmissions += 1
        job.reused = max(job.reused, job.computed)
        self.running.append(job)
        past = job.computed
        want = min(len(job) - job.computed, budget)
        assert self.extend(job, want)
        parts[job] = (want, past)
        return True, want

    def price(self, now_s: float, parts: dict[Job, tuple[int, int]], only_prompt: bool) -> float:
        chunks, batch, ctx, resumed, resumed_ctx = [], 0, 0, 0, 0
        for job, (want, past) in parts.items():
            new = max(0, min(past + want, len(job.prompt)) - past)
            emits = job.computed >= len(job)
            again = emits and job.outputs > 0
            if new or want - new > 1 or (want and not again):
                chunks.append(PrefillChunk(new, past, want - new, past < len(job.prompt) <= past + want))
                if again:
                    resumed += 1
                    resumed_ctx += len(job)
            else:
                batch += 1
                ctx += len(job)
        if only_prompt:
            resumed = resumed_ctx = 0
        if chunks:
            took = self.latency.step_s(chunks, batch, ctx, resumed, resumed_ctx)
        else:
            took = self.latency.decode_piece(batch, ctx).g0 if batch else 0.0
        return round(now_s + took, 9)

    # ---- a whole trace

    def run(self, jobs: list[Job]) -> None:
        coming = sorted(jobs, key=lambda j: j.arrival_s)
        now_s = 0.0
        while coming or self.waiting or self.running:
            if not self.waiting and not self.running:
                now_s = max(now_s, coming[0].arrival_s)
            while coming and coming[0].arrival_s <= now_s:
                job = coming.pop(0)
                (self.done if self.refuses(job) else self.waiting).append(job)
            if self.waiting or self.running:
                now_s = self.step(now_s)


def tokens_of(keys: list[int], key_tokens: int, isl: int) -> list[tuple]:
    """The tokens that a row's hash ids stand for: token j of id h is (h, j)."""
    return [(h, j) for h in keys for j in range(key_tokens)][:isl]
