"""What the searched deployment must serve: lengths and arrivals, or a trace of the user's own.

One object for the closed form (means) and for the simulation (rows), so that both mean the same demand.
"""

from __future__ import annotations

from pathlib import Path

from policies.errors import ConfigError
from policies.frozen import frozen

ARRIVALS = ("closed", "poisson", "recorded")


@frozen
class Workload:
    """Requests of `isl` prompt and `osl` output tokens, uniform between `min_ratio` times that and that.

    `prefix_tokens` of every prompt are the same in all (0: nothing is shared). With `trace` lengths, arrivals and
    prefixes are those of its rows, isl, osl and prefix_tokens are its means, and `max_isl` and `max_tokens` the longest
    prompt and the longest request in it (`aiconfig.trace_workload` reads them). `requests` is how many a simulation
    plays.
    """

    isl: int
    osl: int
    min_ratio: float = 1.0
    prefix_tokens: int = 0
    arrivals: str = "closed"
    requests: int | None = None  # None: see aiconfig.demand
    trace: Path | None = None
    seed: int = 0
    max_isl: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("isl", self.isl), ("osl", self.osl)):
            if value < 1:
                raise ConfigError(f"--{name} {value}: a request has at least 1 such token")
        if not 0.0 < self.min_ratio <= 1.0:
            raise ConfigError(
                f"--min-ratio {self.min_ratio}: lengths lie between this share of isl and isl; above 0, at most 1"
            )
        if not 0 <= self.prefix_tokens < self.isl:
            raise ConfigError(
                f"--prefix {self.prefix_tokens}: the shared part of a prompt of {self.isl} tokens is shorter than it"
            )
        if self.requests is not None and self.requests < 1:
            raise ConfigError(f"--requests {self.requests}: a simulation plays at least 1")
        if self.arrivals not in ARRIVALS:
            raise ConfigError(f"--arrivals {self.arrivals!r}: known are {', '.join(ARRIVALS)}")

    @property
    def mean_isl(self) -> float:
        """Tokens of the mean prompt."""
        return self.isl * (1.0 + self.min_ratio) / 2.0

    @property
    def mean_osl(self) -> float:
        """Tokens of the mean answer."""
        return self.osl * (1.0 + self.min_ratio) / 2.0

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return self.isl if self.max_isl is None else self.max_isl

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return self.isl + self.osl if self.max_tokens is None else self.max_tokens
