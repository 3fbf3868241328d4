"""What a candidate is predicted to do at one load, and how far that can be trusted.

Plain values, whoever computed them: the closed form (means only), a simulated run or a measurement (percentiles).
Seconds and tokens; what is undefined is None and never counts as meeting a limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from types import MappingProxyType

from aiconfig.candidate import Candidate
from policies.errors import ConfigError
from policies.frozen import frozen

CLOSED_FORM = "closed form"
SIMULATED = "simulated"
MEASURED = "measured"
"""Levels of an estimate; what was measured has no band."""

NO_BANDS: Mapping[str, Band | None] = MappingProxyType({})


@frozen
class Load:
    """Demand on a whole deployment: `users` in a closed loop, or `rps` requests a second; exactly one is given."""

    users: int | None = None
    rps: float | None = None

    def __post_init__(self) -> None:
        if (self.users is None) == (self.rps is None):
            raise ConfigError("a load is either --users or --rate, and one of them")
        if self.users is not None and self.users < 1:
            raise ConfigError(f"--users {self.users}: a closed loop has at least 1 user")
        if self.rps is not None and not self.rps > 0:
            raise ConfigError(f"--rate {self.rps}: requests a second are more than 0")

    def __str__(self) -> str:
        if self.users is None:
            return f"{self.rps:.4g} requests/s"
        return f"{self.users} user{'' if self.users == 1 else 's'}"


@frozen
class Band:
    """Relative errors of the latency model, as measured where it was calibrated: half of the predictions are within
    `typical`, nine in ten within `wide` (None: not known). `level` says for which rows that was measured.
    `outside_s` is the path outside the engine (client, HTTP, tokeniser) that those measurements had and estimates have
    not."""

    typical: float
    wide: float | None
    level: str
    outside_s: float = 0.0


@frozen
class Estimate:
    """One candidate at one load.

    `stats[metric][statistic]` is in seconds for ttft, tpot, itl and e2e and in tokens/s for tps_user; the closed form
    knows "mean" alone. Rates are of the whole deployment; `kv_share` is the fullest pool's peak use. `bound` is what
    limits it most ("weights", "compute", "kv", "links", "host", ...). `goodput_share` is the share of requests that
    meet all per-request limits, None without such or without a simulation; `hit_share` that of prompt tokens that were
    found cached, None where nothing is known of that. `bands` are those of ttft and tpot. What lies outside the range
    that they were measured in: `unmeasured` of the deployment, whatever the load, and `beyond_load` of the load.
    """

    candidate: Candidate
    load: Load
    level: str
    stats: Mapping[str, Mapping[str, float | None]]
    requests_per_s: float
    output_tokens_per_s: float
    kv_share: float
    bound: str
    goodput_share: float | None = None
    hit_share: float | None = None
    power_w: float | None = None  # of all its GPUs, on average
    energy_j: float | None = None  # of the whole run
    output_tokens: int | None = None  # of the whole run
    requests: int | None = None  # that were played
    bands: Mapping[str, Band | None] = field(default_factory=lambda: NO_BANDS)
    unmeasured: tuple[str, ...] = ()
    beyond_load: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def value(self, metric: str, statistic: str) -> float | None:
        """One figure, or None where it is not known."""
        return self.stats.get(metric, {}).get(statistic)

    @property
    def beyond(self) -> tuple[str, ...]:
        """All that lies outside the calibrated range."""
        return self.unmeasured + self.beyond_load

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Output tokens a second for each GPU that is used."""
        return self.output_tokens_per_s / self.candidate.gpus

    @property
    def tokens_per_s_per_user(self) -> float | None:
        """1 / mean TPOT."""
        tpot_s = self.value("tpot", "mean")
        return 1.0 / tpot_s if tpot_s else None
