"""Service levels: the `--sla` grammar, read once for every command, as plain values.

A limit is inclusive and has one unit inside: seconds for latencies. What is not understood is refused with the
nearest thing that would be; nothing is ever ignored.
"""

from __future__ import annotations

import re
from typing import Final

from policies.errors import ConfigError
from policies.frozen import frozen
from reports.columns import F64, Bools

LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")
METRICS: Final = (*LATENCIES, "goodput", "tps_user")
STATISTICS: Final = ("mean", "p50", "p90", "p95", "p99", "max")
DEFAULT_STATISTIC: Final = "p95"

ALIASES: Final = {
    "time_to_first_token": "ttft",  # AIPerf
    "inter_token_latency": "itl",
    "request_latency": "e2e",
    "output_token_throughput_per_user": "tps_user",
    "e2el": "e2e",  # vLLM
    "time_per_output_token": "tpot",
    "e2e_latency": "e2e",
    "end_to_end_latency": "e2e",
}
TIME_UNITS: Final = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
NEAR_UNITS: Final = {
    "sec": "s", "secs": "s", "second": "s", "seconds": "s", "msec": "ms", "millis": "ms", "milliseconds": "ms",
    "usec": "us", "micros": "us", "µs": "us", "m": "min", "mins": "min", "minute": "min", "minutes": "min",
}  # fmt: skip
OTHER_UNITS: Final = {"tps_user": ("tok/s", "tps"), "goodput": ("%", "rps", "req/s")}

SLACK_S: Final = 1e-9
"""Equal is enough, and equal means to the nanosecond: time stamps of a week are no finer than 0.1 ns."""

EXAMPLE: Final = "write for example ttft=200ms,itl=50ms@p95 or p99:e2e<20s"

_ITEM: Final = re.compile(
    r"(?:(?P<before>[a-z]+\d*):)?(?P<metric>[a-z][a-z0-9_]*)(?P<op><=|>=|[<>=:])(?P<number>[-+]?[0-9.]+(?:e[-+]?\d+)?)"
    r"(?P<unit>[a-zµ/%]*)(?:@(?P<after>\w+))?"
)


@frozen
class Slo:
    """One limit: `statistic` of `metric` stays at most (goodput, tps_user: at least) `limit`, in `unit`.

    `unit` is "s" for latencies, "tok/s" for tps_user, and "share" or "rps" for goodput, which has no statistic.
    Percentiles of tps_user count from the slow end: p95 is the speed that 95 % of the requests reach.
    """

    metric: str
    limit: float
    unit: str
    statistic: str | None

    @property
    def upper(self) -> bool:
        """True where the limit bounds from above."""
        return self.metric in LATENCIES

    @property
    def bound(self) -> float:
        """The limit with the slack that makes "equal is enough" true of floats."""
        return self.limit + SLACK_S if self.upper else self.limit * (1.0 - SLACK_S)

    def holds(self, value: float) -> bool:
        """Whether a value keeps the limit; equal is enough, NaN never is."""
        return value <= self.bound if self.upper else value >= self.bound

    def hold(self, values: F64) -> Bools:
        """`holds` for each of the values."""
        return values <= self.bound if self.upper else values >= self.bound

    def __str__(self) -> str:
        limit = {
            "s": f"{self.limit * 1e3:.6g}ms" if self.limit < 1.0 else f"{self.limit:.6g}s",
            "share": f"{self.limit * 100:.6g}%",
        }.get(self.unit, f"{self.limit:.6g} {self.unit}")
        statistic = f"{self.statistic} " if self.statistic else ""
        return f"{statistic}{self.metric} {'<=' if self.upper else '>='} {limit}"


@frozen
class Sla:
    """The limits of one `--sla`, in the order given, and the text they came from."""

    slos: tuple[Slo, ...]
    text: str

    @property
    def per_request(self) -> tuple[Slo, ...]:
        """The limits that a single request can keep or break: all but goodput."""
        return tuple(slo for slo in self.slos if slo.metric != "goodput")


def parse_sla(text: str) -> Sla:
    """Read `ttft=200ms,itl=50ms@p95`, `p95:ttft<500ms; p99:e2e<20s; goodput>=0.95`, `ttft:200 itl:50`.

    Raises ConfigError with the item at fault and what to write instead.
    """
    slos: list[Slo] = []
    for item in _items(text):
        slo = _read_item(item)
        if any((slo.metric, slo.statistic) == (other.metric, other.statistic) for other in slos):
            raise _refuse(item, f"{slo.statistic or ''} {slo.metric} has a limit already".strip() + "; give one")
        slos.append(slo)
    if not slos:
        raise ConfigError(f"--sla {text!r}: no limit in it; {EXAMPLE}")
    return Sla(slos=tuple(slos), text=text.strip())


def _items(text: str) -> list[str]:
    """Split at commas, semicolons and spaces, after closing the gaps around operators and before units."""
    tight = re.sub(r"\s*(<=|>=|[<>=:@])\s*", r"\1", text.strip().lower())
    units = "|".join(sorted([*TIME_UNITS, *NEAR_UNITS, "tok/s", "tps", "rps", "req/s", "%"], key=len, reverse=True))
    tight = re.sub(rf"(?<=\d)\s+(?=(?:{units})(?:[,;@\s]|$))", "", tight)
    return [item for item in re.split(r"[,;\s]+", tight) if item]


def _read_item(item: str) -> Slo:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _refuse(item, _why_unreadable(item))
    metric = _metric(item, match["metric"])
    _check_direction(item, metric, match["op"])
    limit, unit = _limit(item, metric, match["op"], match["number"], match["unit"])
    return Slo(
        metric=metric, limit=limit, unit=unit, statistic=_statistic(item, metric, match["before"], match["after"])
    )


def _metric(item: str, name: str) -> str:
    metric = ALIASES.get(name, name)
    if name in STATISTICS:
        raise _refuse(item, "the statistic goes before the metric (p95:ttft<200ms) or at the end (ttft<200ms@p95)")
    if metric not in METRICS:
        raise _refuse(
            item, f"unknown metric {name!r}{_nearest(name, [*METRICS, *ALIASES])}; known: {', '.join(METRICS)}"
        )
    return metric


def _check_direction(item: str, metric: str, op: str) -> None:
    if metric in LATENCIES and ">" in op:
        raise _refuse(item, f"{metric} is limited from above; write {metric}<=...")
    if metric not in LATENCIES and "<" in op:
        raise _refuse(item, f"{metric} is limited from below; write {metric}>=...")


def _statistic(item: str, metric: str, before: str | None, after: str | None) -> str | None:
    if before and after:
        raise _refuse(item, f"two statistics, {before} and {after}; keep one")
    name = before or after
    if metric == "goodput":
        if name:
            raise _refuse(item, f"goodput is one figure and has no {name}; leave the statistic out")
        return None
    if name is None:
        return DEFAULT_STATISTIC
    if name not in STATISTICS:
        hint = _nearest(name, STATISTICS)
        raise _refuse(item, f"unknown statistic {name!r}{hint}; known: {', '.join(STATISTICS)}")
    return name


def _limit(item: str, metric: str, op: str, number: str, unit: str) -> tuple[float, str]:
    try:
        value = float(number)
    except ValueError:
        raise _refuse(item, f"{number!r} is no number; {EXAMPLE}") from None
    if not 0.0 < value < 1e12:
        raise _refuse(item, f"a limit of {number}{unit} is out of range; it must be above 0 and below 1e12")
    if metric == "goodput":
        return _goodput_limit(item, value, unit)
    if metric == "tps_user":
        if unit and unit not in OTHER_UNITS[metric]:
            raise _refuse(item, f"unknown unit {unit!r} for tps_user; write {metric}>={number}tok/s")
        return value, "tok/s"
    if not unit and op == ":":
        unit = "ms"  # the form of AIPerf's and vLLM's --goodput
    if not unit:
        raise _refuse(item, f"which unit? did you mean {metric}{op}{number}ms? units: {', '.join(TIME_UNITS)}")
    if unit not in TIME_UNITS:
        near = f"; did you mean {NEAR_UNITS[unit]!r}?" if unit in NEAR_UNITS else ""
        raise _refuse(item, f"unknown unit {unit!r}{near}; units: {', '.join(TIME_UNITS)}")
    return value * TIME_UNITS[unit], "s"


def _goodput_limit(item: str, value: float, unit: str) -> tuple[float, str]:
    if unit in ("rps", "req/s"):
        return value, "rps"
    if unit not in ("", "%"):
        raise _refuse(item, f"unknown unit {unit!r} for goodput; write a share (0.95 or 95%) or a rate (5rps)")
    share = value / 100.0 if unit == "%" else value
    if share > 1.0:
        raise _refuse(item, f"a share is at most 1, not {value:g}{unit}; write 0.95, 95% or, for a rate, 5rps")
    return share, "share"


def _why_unreadable(item: str) -> str:
    if item in METRICS or item in ALIASES:
        return f"how much? {EXAMPLE}"
    if not re.search(r"[<>=:]", item):
        return f"no limit in it{_nearest(item, [*METRICS, *ALIASES])}; {EXAMPLE}"
    return f"not understood; {EXAMPLE}"


def _nearest(name: str, known: list[str] | tuple[str, ...]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _refuse(item: str, why: str) -> ConfigError:
    return ConfigError(f"--sla {item!r}: {why}")
