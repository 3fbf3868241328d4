"""The SGLang scheduler written page by page and step by step, as literally as its rules are stated.

It shares no code with `twin.engine`, so that agreement means something. Only for small traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from twin.perf.protocol import LatencyModel, PrefillChunk


@dataclass(eq=False)
class Node:
    """A stretch of pages in the tree; a page is the tuple of its tokens."""

    pages: list[tuple]
    parent: Node | None
    stamp: int
    locks: int = 0
    children: dict[tuple, Node] = field(default_factory=dict)


@dataclass(eq=False)
class Job:
    row: int
    arrival_s: float
    prompt: list[tuple]
    limit: int
    outputs: int = 0
    slots: int = 0  # tokens whose KV has a place
    node: Node | None = None
    in_tree: int = 0  # leading pages that are the tree's
    private: int = 0  # pages of its own
    admit_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None
    reused: int = 0
    first_reuse: int = 0
    readmissions: int = 0
    from_host: int = 0  # pages, at its first admission
    told: int = 0  # pages that the host has been told of
    has_drafts: bool = False
    failed: bool = False

    def tokens(self) -> list[tuple]:
        return self.prompt + [("made", self.row, i) for i in range(self.outputs)]

    def __len__(self) -> int:
        return len(self.prompt) + self.outputs

    @property
    def left(self) -> int:
        return self.limit - self.outputs


class NaiveHost:
    """Host memory as a list of pages, each named by all tokens up to its end; the oldest first."""

    def __init__(self, capacity: int, load_s: float, *, on_store: bool, overlap: bool) -> None:
        self.capacity, self.load_s, self.on_store, self.overlap = capacity, load_s, on_store, overlap
        self.pages: list[tuple] = []
        self.pinned: list[tuple] = []
        self.due: list[list[tuple]] = []
        self.free_s = 0.0
        self.loaded = 0

    def put(self, page: tuple) -> None:
        if page in self.pages or page in self.pinned:
            return
        if len(self.pages) + len(self.pinned) >= self.capacity:
            if not self.pages:
                return
            self.pages.pop(0)
        self.pages.append(page)

    def pin(self, pages: list[tuple]) -> None:
        self.due.append(pages)
        for page in pages:
            self.pages.remove(page)
            self.pinned.append(page)

    def end_s(self, now_s: float, took_s: float) -> float:
        pages = sum(len(load) for load in self.due)
        if not pages:
            return round(now_s + took_s, 9)
        self.loaded += pages
        self.free_s = round(max(now_s, self.free_s) + pages * self.load_s, 9)
        return round(max(self.free_s, now_s + took_s) if self.overlap else self.free_s + took_s, 9)

    def came_up(self) -> None:
        for load in self.due:
            for page in reversed(load):
                self.pinned.remove(page)
                self.pages.append(page)
        self.due = []


class NaiveSglang:
    def __init__(
        self,
        latency: LatencyModel,
        *,
        block_size: int,
        blocks: int,
        max_num_seqs: int,
        policy: str = "fifo",
        chunk: int = 8192,
        max_prefill: int = 16384,
        conservativeness: float = 1.0,
        clip: int = 4096,
        interval: int = 0,
        recv: int = 1,
        caching: bool = True,
        host: NaiveHost | None = None,
        drafts: int = 0,
        holds: Callable[[Job, int], bool] = lambda job, k: False,
    ) -> None:
        self.latency = latency
        self.bs, self.capacity, self.slots = block_size, blocks, max_num_seqs
        self.policy, self.chunk, self.max_prefill, self.clip = policy, chunk, max_prefill, clip
        self.interval, self.caching = interval, caching
        self.initial = 0.7 * conservativeness
        self.floor = self.initial * 0.14
        self.base, self.decays = self.initial, 0
        self.waiting: list[Job] = []
        self.recv, self.since = recv, recv  # decode steps between looks at who has come
        self.unseen: list[Job] = []
        self.running: list[Job] = []
        self.root = Node([], None, 0)
        self.free = blocks
        self.clock = 0
        self.closed = 0  # steps until prompts are admitted again
        self.shut = False  # nobody may begin a prompt in this step
        self.host, self.drafts, self.holds = host, drafts, holds
        self.todo: tuple[str, list[Job], dict[Job, int]] = ("", [], {})
        self.done: list[Job] = []

    # ---- the tree

    def nodes(self) -> list[Node]:
        found, todo = [], [self.root]
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found[1:]

    def evictable(self) -> int:
        return sum(len(n.pages) for n in self.nodes() if not n.locks)

    def room(self) -> int:
        return self.free + self.evictable()

    def split(self, node: Node, at: int) -> Node:
        assert node.parent is not None
        front = Node(node.pages[:at], node.parent, node.stamp, node.locks)
        node.parent.children[node.pages[0]] = front
        node.pages = node.pages[at:]
        node.parent = front
        front.children[node.pages[0]] = node
        return front

    def walk(self, node: Node, pages: list[tuple]) -> tuple[Node, int]:
        """As far as the tree goes; splits where it goes only part of a stretch, refreshes what is passed whole."""
        gone = 0
        while gone < len(pages):
            child = node.children.get(pages[gone])
            if child is None:
                break
            same = 0
            while same < len(child.pages) and gone + same < len(pages) and child.pages[same] == pages[gone + same]:
                same += 1
            gone += same
            if same < len(child.pages):
                return self.split(child, same), gone
            child.stamp = self.clock
            node = child
        return node, gone

    def pages(self, job: Job, tokens: int) -> list[tuple]:
        known = job.tokens()
        return [tuple(known[i * self.bs : (i + 1) * self.bs]) for i in range(tokens // self.bs)]

    def match(self, job: Job) -> tuple[Node, int]:
        self.clock += 1
        if not self.caching:
            return self.root, 0
        return self.walk(self.root, self.pages(job, len(job) - 1))

    def peek(self, job: Job, tokens: int) -> int:
        """How many leading pages of the first `tokens` tokens are in the tree; leaves no trace."""
        pages, node, gone = self.pages(job, tokens), self.root, 0
        while self.caching and gone < len(pages) and pages[gone] in node.children:
            node, same = node.children[pages[gone]], 0
            while same < len(node.pages) and gone < len(pages) and node.pages[same] == pages[gone]:
                same, gone = same + 1, gone + 1
            if same < len(node.pages):
                break
        return gone

    def lock(self, node: Node | None, by: int) -> None:
        while node is not None:
            node.locks += by
            node = node.parent

    def take(self, pages: int) -> bool:
        if pages > self.room():
            return False
        while self.free < pages:
            leaf = min((n for n in self.nodes() if not n.locks and not n.children), key=lambda n: n.stamp)
            gone = min(len(leaf.pages), pages - self.free)
            first = leaf.pages[0]
            if self.host is not None and not self.host.on_store:
                above = self.above(leaf)
                for at in range(len(leaf.pages), len(leaf.pages) - gone, -1):
                    self.host.put(tuple(above + leaf.pages[:at]))
            del leaf.pages[len(leaf.pages) - gone :]
            self.free += gone
            if not leaf.pages:
                assert leaf.parent is not None
                del leaf.parent.children[first]
        self.free -= pages
        return True

    def above(self, node: Node) -> list[tuple]:
        """The pages on the way to a node."""
        pages: list[tuple] = []
        at = node.parent
        while at is not None:
            pages = at.pages + pages
            at = at.parent
        return pages

    def store(self, job: Job) -> None:
        """With a host that keeps copies: what a job has in the tree goes down too."""
        if self.host is not None and self.host.on_store:
            pages = self.pages(job, job.slots)
            for at in range(job.in_tree, job.told, -1):
                self.host.put(tuple(pages[:at]))
            job.told = job.in_tree

    def below(self, job: Job, cached: int) -> list[tuple]:
        """The pages behind the `cached` ones that host memory has; short stretches do not count."""
        if self.host is None:
            return []
        pages, found = self.pages(job, len(job) - 1), []
        for at in range(cached + 1, len(pages) + 1):
            name = tuple(pages[:at])
            if name not in self.host.pages and name not in self.host.pinned:
                break
            found.append(name)
        return found if len(found) * self.bs >= 10 else []

    def publish(self, job: Job) -> None:
        new = self.pages(job, job.slots)[job.in_tree :]
        if not self.caching or not new:
            return
        self.clock += 1
        start = job.node
        assert start is not None
        above: Node | None = start
        while above is not None:
            above.stamp = self.clock
            above = above.parent
        node, known = self.walk(start, new)
        self.free += known
        job.private -= len(new)
        job.in_tree += len(new)
        new = new[known:]
        if new:
            if node is start and node is not self.root and node.locks == 1 and not node.children:
                node.pages += new
            else:
                child = Node(list(new), node, self.clock)
                node.children[new[0]] = child
                node = child
        self.lock(node, 1)
        self.lock(start, -1)
        job.node = node

    def give_back(self, job: Job) -> None:
        self.store(job)
        job.has_drafts = False
        self.free += job.private
        self.lock(job.node, -1)
        job.node, job.private, job.in_tree, job.slots = None, 0, 0, 0

    # ---- one step

    def ratio(self) -> float:
        return max(self.base - self.decays * (self.initial - self.floor) / 600, min(self.floor, self.base))

    def whole(self, tokens: int) -> int:
        return -(-tokens // self.bs) * self.bs

    def reorder(self) -> None:
        if self.policy != "lpm" or len(self.waiting) > 128:
            return
        seen: set[tuple] = set()
        keys = {}
        for job in self.waiting:
            cached = self.peek(job, len(job)) * self.bs
            twin = False
            if cached <= 32:
                start = tuple(self.pages(job, 32 // self.bs * self.bs))
                if len(job) >= 32:
                    twin = start in seen
                    seen.add(start)
            keys[job] = (twin, -cached)
        self.waiting.sort(key=lambda j: keys[j])

    def admit(self, now_s: float) -> list[tuple[Job, PrefillChunk]]:
        self.reorder()
        promised = sum(min(j.left, self.clip) for j in self.running) * self.ratio()
        total = self.room() * self.bs - promised
        budget, chunk = self.max_prefill, self.chunk
        work: list[tuple[Job, PrefillChunk]] = []
        while self.waiting and chunk > 0 and len(self.running) + len(work) < self.slots:
            job = self.waiting[0]
            goes_on = job.slots > 0
            node = job.node
            more: list[tuple] = []
            if goes_on:
                start = job.slots
            else:
                cached = self.peek(job, len(job) - 1)
                more = self.below(job, cached)
                start = (cached + len(more)) * self.bs
            ext = len(job) - start
            take = ext if self.whole(ext) <= chunk else chunk // self.bs * self.bs
            if not take:
                break
            charge = self.whole(take)
            reserve = min(job.left, self.clip) if take == ext else 0
            if charge + reserve + len(more) * self.bs >= total or charge > budget or charge > chunk:
                break
            if not goes_on:
                node = self.match(job)[0]
                self.lock(node, 1)
            if self.host is not None and more and charge // self.bs + len(more) <= self.room():
                self.host.pin(more)
            if not self.take(charge // self.bs + len(more)):
                if not goes_on:
                    self.lock(node, -1)
                break
            self.waiting.pop(0)
            if not goes_on:
                job.node, job.in_tree = node, start // self.bs - len(more)
                job.private, job.slots = len(more), start
                self.publish(job)
                job.told = job.in_tree
                if job.admit_s is None:
                    job.admit_s, job.first_reuse = now_s, start
                    job.from_host = len(more)
                else:
                    job.readmissions += 1
                job.reused = max(job.reused, start)
            job.private += charge // self.bs
            job.slots = start + take
            total -= charge + reserve + len(more) * self.bs
            budget -= charge
            chunk -= charge
            work.append((job, PrefillChunk(take, start, 0, start < len(job.prompt) <= job.slots)))
        return work

    def step(self, now_s: float) -> float:
        """Schedule and carry out one step; returns when it ends."""
        end_s = self.schedule(now_s)
        self.emit(end_s)
        return end_s

    def schedule(self, now_s: float) -> float:
        """Decide what the step computes; returns when it ends."""
        self.todo = ("", [], {})
        if self.since >= self.recv:
            self.look()
        work = [] if self.shut or (self.closed and self.running) else self.admit(now_s)
        if work:
            self.closed = self.interval
            self.since = self.recv
            self.todo = ("prompts", [j for j, _ in work], {})
            took_s = self.latency.step_s([c for _, c in work], 0, 0, 0, 0)
            return round(now_s + took_s, 9) if self.host is None else self.host.end_s(now_s, took_s)
        if self.running:
            return self.decode(now_s)
        if self.unseen:
            self.look()
            return self.schedule(now_s)
        if self.waiting:
            self.base, self.decays = min(self.base, self.floor), 0  # empty steps until it falls no more
            self.stuck()
        return now_s

    def look(self) -> None:
        self.waiting += self.unseen
        self.unseen = []
        self.since = 0

    def emit(self, end_s: float) -> None:
        """The scheduled step ends."""
        what, jobs, ahead = self.todo
        if what == "prompts":
            if self.host is not None:
                self.host.came_up()
            self.end_prefill(jobs, end_s)
        elif what == "decode":
            self.end_decode(ahead, end_s)

    def refuses(self, job: Job) -> bool:
        return self.whole(len(job.prompt) + 1) > self.capacity * self.bs

    def stuck(self) -> None:
        """Nobody can enter an empty engine: prompts begun behind the head start again, else the head ends."""
        begun = [job for job in self.waiting[1:] if job.slots]
        for job in begun:
            self.give_back(job)
        if not begun:
            job = self.waiting.pop(0)
            if job.slots:
                self.give_back(job)
            job.failed = True
            self.done.append(job)

    def end_prefill(self, jobs: list[Job], end_s: float) -> None:
        for job in reversed(jobs):
            if job.slots < len(job):
                self.publish(job)
                self.store(job)
                self.waiting.insert(0, job)
        for job in jobs:
            if job.slots < len(job):
                continue
            if not job.left:
                self.publish(job)
                self.store(job)
                self.finish(job)
                continue
            if job.left > 1:
                need = 1 if job.slots % self.bs == 0 else 0
                if not self.take(need):
                    self.running.append(job)
                    continue
                job.private += need
                job.slots += 1
            self.make(job, end_s)
            self.publish(job)
            self.store(job)
            if not job.left:
                self.finish(job)
            else:
                job.has_drafts = True
                self.running.append(job)

    def make(self, job: Job, end_s: float, tokens: int = 1) -> None:
        job.outputs += tokens
        job.first_s = end_s if job.first_s is None else job.first_s
        job.last_s = end_s

    def finish(self, job: Job) -> None:
        self.give_back(job)
        self.done.append(job)

    def ahead(self, job: Job) -> int:
        """Drafts that a job verifies in the next step."""
        if not job.has_drafts:
            return 0
        slots = self.capacity * self.bs - 1 - len(job)
        if len(self.running) == 1:
            slots = (-(-job.slots // self.bs) + self.room()) * self.bs - job.slots - 1
        return max(0, min(self.drafts, job.left - 1, slots))

    def growth(self) -> int:
        return sum(self.more(job, 1 + self.ahead(job)) for job in self.running)

    def more(self, job: Job, tokens: int) -> int:
        return -(-(job.slots + tokens) // self.bs) - -(-job.slots // self.bs)

    def decode(self, now_s: float) -> float:
        retracted = False
        while self.growth() > self.room() and len(self.running) > 1:
            victim = self.running[-1] if self.drafts else min(self.running, key=lambda j: j.outputs)
            self.running.remove(victim)
            self.give_back(victim)
            self.waiting.append(victim)
            retracted = True
        if self.growth() > self.room():
            begun = [job for job in self.waiting if job.slots]
            for job in begun:  # prompts computed in part stand in the way: they start again
                self.give_back(job)
            if begun:
                return now_s
            job = self.running.pop()
            self.give_back(job)
            if self.whole(len(job) + 1) > self.capacity * self.bs:
                job.failed = True
                self.done.append(job)
            else:
                self.waiting.append(job)
            return now_s
        if retracted:
            made = sum(j.outputs for j in self.running) + 20 * len(self.running)
            self.base = min(1.0, made / (sum(j.limit for j in self.running) + 1))
            self.decays = 0
        else:
            self.decays += 1
        ahead = {job: self.ahead(job) for job in self.running}
        self.taken = self.growth()
        self.take(self.taken)
        self.todo = ("decode", [], ahead)
        self.closed = max(0, self.closed - 1)  # a step of no time is none
        self.since += 1
        return round(now_s + self.latency.decode_piece(len(self.running), sum(len(j) for j in self.running)).g0, 9)

    def end_decode(self, ahead: dict[Job, int], end_s: float) -> None:
        self.free += self.taken
        for job in list(self.running):
            made = 1
            while made <= ahead[job] and self.holds(job, made - 1):
                made += 1
            pages = self.more(job, made)
            self.free -= pages
            job.private += pages
            job.slots += made
            self.make(job, end_s, made)
            self.publish(job)
            job.has_drafts = True
            if not job.left:
                self.running.remove(job)
                self.finish(job)

    # ---- a whole trace

    def run(self, jobs: list[Job]) -> None:
        coming = sorted(jobs, key=lambda j: j.arrival_s)
        now_s, steps = 0.0, 0
        while coming or self.waiting or self.running or self.unseen:
            if not self.waiting and not self.running and not self.unseen:
                now_s = max(now_s, coming[0].arrival_s)
            while coming and coming[0].arrival_s <= now_s:
                job = coming.pop(0)
                (self.done if self.refuses(job) else self.unseen).append(job)
            if self.waiting or self.running or self.unseen:
                now_s = self.step(now_s)
                steps += 1
                assert steps < 20_000, "no end in sight"
