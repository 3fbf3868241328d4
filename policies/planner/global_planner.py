"""Many deployments, one pool of GPUs: who may grow.

The ceiling is hard, the floor gives way by one worker. What was asked for and could not be is remembered for a while,
and a request that breaks a bound is tried together with remembered ones of the opposite sign: what frees goes before
what takes. A smaller rank goes first, then whoever has waited longest. It orders nothing: it answers, and says what
goes first; whoever holds the lease carries that out.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from policies.errors import ConfigError
from policies.frozen import frozen


class Answer(Enum):
    """What becomes of a request."""

    SUCCESS = "success"
    REJECTED = "rejected"
    ERROR = "error"
    """Asked of somebody who does not lead."""


@frozen
class Want:
    """Workers of one pool (a role of a deployment) that its planner wants; `gpus` of one worker."""

    pool: str
    workers: int
    gpus: int


@frozen
class ScaleRequest:
    """What one caller wants now. Smaller `rank` goes first."""

    caller: str
    wants: tuple[Want, ...]
    rank: int = 0


@frozen
class Step:
    """From how many to how many workers of a caller's pool."""

    caller: str
    pool: str
    before: int
    after: int
    gpus: int

    @property
    def change(self) -> int:
        """GPUs that it takes (or frees, below 0)."""
        return (self.after - self.before) * self.gpus


@frozen
class Granted:
    """The answer: steps in the order in which they are to be carried out, and GPUs in all after them. `partial`: less
    than was asked for."""

    answer: Answer
    steps: tuple[Step, ...] = ()
    total: int = 0
    partial: bool = False
    reason: str = ""


@frozen
class GlobalSettings:
    """GPUs in all: at most, at least (None: no bound); how long a request is remembered, at least twice the slowest
    interval of a planner."""

    max_total: int | None
    min_total: int | None = None
    ttl_s: float = 360.0

    def __post_init__(self) -> None:
        if self.ttl_s <= 0:
            raise ConfigError(f"global_planner.ttl_s is {self.ttl_s}, it must be above 0")
        if self.max_total is not None and self.min_total is not None and self.min_total > self.max_total:
            raise ConfigError(f"global_planner.min_total is {self.min_total}, above max_total ({self.max_total})")


@frozen
class _Intent:
    caller: str
    want: Want
    rank: int
    at_s: float


class GlobalPlanner:
    """Counts of every pool, and what was wanted of it. `leads`: whether this one holds the lease."""

    def __init__(self, settings: GlobalSettings, *, leads: bool = True) -> None:
        self._settings = settings
        self.leads = leads
        self._have: dict[tuple[str, str], Want] = {}
        self._intents: dict[tuple[str, str], _Intent] = {}

    @property
    def total(self) -> int:
        """GPUs of all pools as granted."""
        return sum(have.workers * have.gpus for have in self._have.values())

    def know(self, caller: str, wants: tuple[Want, ...]) -> None:
        """What a caller has, as it says itself: at its start, or after somebody changed it."""
        for have in wants:
            self._have[caller, have.pool] = have

    def remember(self, caller: str, want: Want, rank: int, at_s: float) -> None:
        """What a caller wants, whether or not it gets it."""
        self._have.setdefault((caller, want.pool), Want(pool=want.pool, workers=0, gpus=want.gpus))
        self._intents[caller, want.pool] = _Intent(caller=caller, want=want, rank=rank, at_s=at_s)

    def request(self, request: ScaleRequest, at_s: float) -> Granted:
        """Answer a request. Every request, even a rejected one, is remembered as what its caller wants."""
        if not self.leads:
            return Granted(answer=Answer.ERROR, total=self.total, reason="another one leads")
        self._intents = {k: i for k, i in self._intents.items() if at_s - i.at_s <= self._settings.ttl_s}
        for want in request.wants:
            self.remember(request.caller, want, request.rank, at_s)
        own = [self._step(request.caller, want, want.workers) for want in request.wants]
        asked = [step for step in own if step.change]
        steps = self._within(asked, request)
        if asked and not steps:
            return Granted(answer=Answer.REJECTED, total=self.total, reason=self._why(asked))
        for step in steps:
            self._have[step.caller, step.pool] = Want(pool=step.pool, workers=step.after, gpus=step.gpus)
            self._settle(step)
        mine = {(s.caller, s.pool): s.after for s in steps}
        partial = any(mine.get((s.caller, s.pool), s.before) != s.after for s in asked)
        return Granted(answer=Answer.SUCCESS, steps=tuple(steps), total=self.total, partial=partial)

    # ------------------------------------------------------------ bounds

    def _within(self, asked: list[Step], request: ScaleRequest) -> list[Step]:
        """The steps of a request within the bounds, with as much of opposite intents as it takes; none where nothing
        of it can be done."""
        change = sum(step.change for step in asked)
        over, under = self._over(change), self._under(change, asked)
        if not over and not under:
            return _ordered(asked)
        paired: list[Step] = []
        for intent in self._opposite(request, grows=over > 0):
            if not (over or under):
                break
            step = self._some_of(intent, over or -under)
            if step.change:
                paired.append(step)
                change += step.change
                over, under = self._over(change), self._under(change, [*asked, *paired])
        if over or under:
            asked = _less(asked, over or -under)
        change = sum(step.change for step in [*asked, *paired])
        if not asked or self._over(change) or self._under(change, [*asked, *paired]):
            return []
        return _ordered([*asked, *paired])

    def _over(self, change: int) -> int:
        """GPUs above the ceiling after a change; what is above it already, and shrinks, is not held against it."""
        most = self._settings.max_total
        return 0 if most is None or change <= 0 else max(0, self.total + change - most)

    def _under(self, change: int, steps: list[Step]) -> int:
        """GPUs below the floor after a change, less a tolerance of one worker where both bounds are set."""
        least = self._settings.min_total
        if least is None or change >= 0:
            return 0
        tolerance = max((step.gpus for step in steps), default=0) if self._settings.max_total is not None else 0
        return max(0, least - tolerance - (self.total + change))

    def _opposite(self, request: ScaleRequest, *, grows: bool) -> list[_Intent]:
        """Remembered wants of the other sign: the caller's own first, then by rank, then the oldest."""
        asked = {(request.caller, want.pool) for want in request.wants}
        found = [
            intent
            for key, intent in self._intents.items()
            if key not in asked and (self._step(intent.caller, intent.want, intent.want.workers).change < 0) == grows
            and self._have[key].workers != intent.want.workers
        ]  # fmt: skip
        return sorted(found, key=lambda i: (i.caller != request.caller, i.rank, i.at_s, i.caller, i.want.pool))

    def _some_of(self, intent: _Intent, gpus: int) -> Step:
        """As many workers of an intent as make up for `gpus` too many (or, below 0, too few)."""
        whole = self._step(intent.caller, intent.want, intent.want.workers)
        needed = -(-abs(gpus) // whole.gpus)
        moved = min(abs(whole.after - whole.before), needed)
        after = whole.before + (moved if whole.after > whole.before else -moved)
        return self._step(intent.caller, intent.want, after)

    def _step(self, caller: str, want: Want, after: int) -> Step:
        return Step(
            caller=caller, pool=want.pool, before=self._have[caller, want.pool].workers, after=after, gpus=want.gpus
        )

    def _settle(self, step: Step) -> None:
        """An intent that has been met is one no more."""
        intent = self._intents.get((step.caller, step.pool))
        if intent is not None and intent.want.workers == step.after:
            del self._intents[step.caller, step.pool]

    def _why(self, asked: list[Step]) -> str:
        change = sum(step.change for step in asked)
        bound = f"at most {self._settings.max_total}" if change > 0 else f"at least {self._settings.min_total}"
        return f"{self.total} GPUs are in use, {change:+d} were asked for, and there are to be {bound}"


def _ordered(steps: list[Step]) -> list[Step]:
    """What frees before what takes."""
    return sorted(steps, key=lambda step: step.change > 0)


def _less(asked: list[Step], gpus: int) -> list[Step]:
    """The steps with as many workers taken back as make `gpus` too many (below 0: too few) right; without those that
    come to nothing."""
    kept = []
    for step in asked:
        wrong = step.change > 0 if gpus > 0 else step.change < 0
        if gpus and wrong:
            back = min(abs(step.after - step.before), -(-abs(gpus) // step.gpus))
            sign = 1 if step.change > 0 else -1
            step = Step(
                caller=step.caller, pool=step.pool, before=step.before, after=step.after - sign * back, gpus=step.gpus
            )
            gpus = max(0, gpus - back * step.gpus) if gpus > 0 else min(0, gpus + back * step.gpus)
        if step.change:
            kept.append(step)
    return kept


def leader(holders: Mapping[str, float], now_s: float) -> str | None:
    """Who leads: of those whose lease has not ended (name: when it does), the first by name; None: nobody has."""
    return min((name for name, ends_s in holders.items() if ends_s > now_s), default=None)
