"""The one definition of each metric, with its formula in its docstring.

Everything here is a pure function of numpy columns (seconds, tokens; NaN: undefined). What is undefined is None or
NaN, never 0: a one-token answer has no time per token, and a run without hash ids has no hit rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from policies.frozen import frozen
from reports.columns import F64, Columns
from reports.gaps import expand, gap_rows, lerp, summarise

QUANTILES = (0.50, 0.90, 0.95, 0.99)

CI_BATCHES = 20
CI_MIN_PER_BATCH = 10
CI_STUDENT_T = 2.093024054408263
"""Two-sided 95 % point of Student's t with CI_BATCHES - 1 = 19 degrees of freedom."""

CI_METHOD = f"batch means: {CI_BATCHES} batches in order of arrival, Student's t, 95 %"

PERCENTILE_METHOD = "linear interpolation between closest ranks, rank (n-1)q"


@frozen
class Distribution:
    """A sample in figures. Everything but `count` is None for an empty sample; std is that of the population."""

    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None
    mean_ci95: tuple[float, float] | None = None

    def statistic(self, name: str) -> float | None:
        """One of mean, p50, p90, p95, p99, max, min by name."""
        value = getattr(self, name)
        return None if value is None else float(value)


# --- per request ------------------------------------------------------------------------------------------------------


def queue_wait_s(arrival_s: F64, admit_s: F64) -> F64:
    """First admission by an engine - arrival. It is part of TTFT."""
    return admit_s - arrival_s


def router_wait_s(arrival_s: F64, dispatch_s: F64) -> F64:
    """First dispatch to a worker - arrival: the time in the router's queue. It is part of the queue wait."""
    return dispatch_s - arrival_s


def ttft_s(arrival_s: F64, first_token_s: F64) -> F64:
    """Time to first token = first token - arrival at the frontend; it includes all queueing."""
    return first_token_s - arrival_s


def tpot_s(first_token_s: F64, last_token_s: F64, output_tokens: F64) -> F64:
    """Time per output token = (last token - first token) / (output tokens - 1), one value per request.

    Undefined (NaN) for an answer of one token. Other tools call this the request's ITL.
    """
    gaps = np.where(output_tokens > 1, output_tokens - 1, np.nan)
    return (last_token_s - first_token_s) / gaps


def e2e_s(arrival_s: F64, last_token_s: F64) -> F64:
    """End-to-end latency = last token - arrival."""
    return last_token_s - arrival_s


def tokens_per_s_per_user(tpot: F64) -> F64:
    """Speed one user sees = 1 / TPOT, one value per request; its mean is the mean of 1/TPOT, not 1 / mean TPOT."""
    return 1.0 / np.where(tpot > 0.0, tpot, np.nan)


# --- samples into figures ---------------------------------------------------------------------------------------------


def distribution(values: F64, *, interval: bool = False) -> Distribution:
    """Mean, population std, min, max and percentiles (linear interpolation) of the defined values.

    `interval` adds the 95 % interval of the mean; the values must then be in order of arrival.
    """
    defined = values[~np.isnan(values)]
    if not len(defined):
        return Distribution(count=0)
    p50, p90, p95, p99 = quantiles(defined, QUANTILES)
    return Distribution(
        count=len(defined),
        mean=float(defined.mean()),
        std=float(defined.std()),
        min=float(defined.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=float(defined.max()),
        mean_ci95=mean_ci95(defined) if interval else None,
    )


def quantiles(values: F64, shares: Sequence[float]) -> list[float]:
    """Quantiles (0..1) of a sample without NaN, interpolated linearly between closest ranks: rank (n-1)q.

    What numpy's quantile gives, bit for bit, without its import of numpy.ma. Next to an infinite value there is no
    interpolation: the quantile is then infinite.
    """
    places = [(len(values) - 1) * share for share in shares]
    ranks = sorted({rank for place in places for rank in (int(place), math.ceil(place))})
    ranked = np.partition(values, ranks)
    ends = ((float(ranked[int(place)]), float(ranked[math.ceil(place)]), place - int(place)) for place in places)
    return [high if math.isinf(high) else lerp(low, high, share) for low, high, share in ends]


def itl_s(
    batches: Callable[[], Iterable[Columns]], since_s: float | None = None, bounds_s: F64 | None = None
) -> Distribution:
    """Inter-token latency = every gap between two tokens of one answer, of all answers pooled.

    `batches` starts the batches of steps.parquet (columns reports.gaps.GAP_COLUMNS) anew on each call. The gaps are
    those of steps, leaps and "gap" rows alike, whatever became of the request; percentiles are exact. With `since_s`
    rows that began before are left out (and the batches have start_s); `bounds_s` as in `gap_rows`.
    """
    summary = summarise(
        lambda: (piece for batch in batches() for piece in expand(gap_rows(batch, since_s, bounds_s))), QUANTILES
    )
    if summary is None:
        return Distribution(count=0)
    p50, p90, p95, p99 = summary.quantiles
    return Distribution(
        count=summary.count,
        mean=summary.mean,
        std=summary.std,
        min=summary.min,
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        max=summary.max,
    )


def rank_percentile(values: F64, quantile: float) -> float | None:
    """The value at index floor((n-1)q + 0.5) of the sorted sample: the peer's rule, for parity only."""
    defined = np.sort(values[~np.isnan(values)])
    return float(defined[int((len(defined) - 1) * quantile + 0.5)]) if len(defined) else None


def mean_ci95(values: F64) -> tuple[float, float] | None:
    """95 % interval of the mean of a correlated series: mean +- t * std(batch means) / sqrt(batches).

    The series, in order of arrival, is cut into CI_BATCHES batches of equal size (up to one value). None where a
    batch would hold fewer than CI_MIN_PER_BATCH values: no honest interval can be given then.
    """
    if len(values) < CI_BATCHES * CI_MIN_PER_BATCH:
        return None
    edges = np.arange(CI_BATCHES + 1) * len(values) // CI_BATCHES
    means = np.add.reduceat(values, edges[:-1]) / np.diff(edges)
    half = CI_STUDENT_T * float(means.std(ddof=1)) / CI_BATCHES**0.5
    centre = float(values.mean())
    return centre - half, centre + half


# --- the run as a whole -----------------------------------------------------------------------------------------------


def run_span_s(arrival_s: F64, last_token_s: F64, last_step_s: float = math.nan) -> tuple[float, float] | None:
    """When a run starts and ends: first arrival to the latest of last token, last arrival and end of the last step.
    None when nothing elapsed.
    """
    if np.isnan(arrival_s).all():
        return None
    start_s = float(np.nanmin(arrival_s))
    end_s = max(
        float(np.nanmax(times)) for times in (arrival_s, last_token_s, last_step_s) if not np.isnan(times).all()
    )
    return (start_s, end_s) if end_s > start_s else None


def makespan_s(arrival_s: F64, last_token_s: F64, last_step_s: float = math.nan) -> float | None:
    """First arrival to the last token, or to what came after it: an arrival that got none, the end of a step. Quiet
    spells are included. None when nothing elapsed.
    """
    span = run_span_s(arrival_s, last_token_s, last_step_s)
    return None if span is None else span[1] - span[0]


def per_second(amount: float, elapsed_s: float | None) -> float | None:
    """Throughput = work / elapsed virtual time. None when nothing elapsed.

    requests/s counts completed requests, output tokens/s the tokens of completed requests, both over the makespan.
    """
    return amount / elapsed_s if elapsed_s else None


def busy_share(busy_s: float, elapsed_s: float | None) -> float | None:
    """Share of the makespan that a worker spent in steps = time in steps / makespan; overall: the mean of workers."""
    return per_second(busy_s, elapsed_s)


def hit_rate(cached_tokens: F64 | float, prompt_tokens: F64 | float) -> float | None:
    """Prefix hit rate = cached prompt tokens / prompt tokens, summed over admitted requests (token-weighted).

    None when no request was admitted. Whether hash ids were known is the caller's to say: without them it is n/a.
    """
    asked = float(np.sum(prompt_tokens))
    return float(np.nansum(cached_tokens)) / asked if asked else None


def upper_bound_hit_rate(ideal_blocks: float, prompt_blocks: float) -> float | None:
    """Highest hit rate that any router could reach = prompt blocks that one endless cache for the whole cluster would
    have held / full prompt blocks, of all requests in order of arrival; a prompt's last token is always computed.

    So of each prompt at most (isl - 1) // block_size blocks count as held (the n-1 rule). It is weighted by blocks, and
    every request counts, whatever became of it. None where there are no full blocks. Others call it SOL, the speed of
    light.
    """
    return ideal_blocks / prompt_blocks if prompt_blocks else None


def block_hit_rate(cached_tokens: F64, prompt_tokens: F64, block_size: int) -> float | None:
    """Hit rate in blocks = full blocks of the prompt found cached / full prompt blocks, summed over admitted requests:
    what the run reached of the upper bound.
    """
    asked = float(np.sum(prompt_tokens // block_size))
    return float(np.nansum(cached_tokens // block_size)) / asked if asked else None


def kv_peak_share(peak_blocks: int, total_blocks: int | None) -> float | None:
    """Peak share of the KV pool in use by running requests = max active blocks / blocks of the pool."""
    return peak_blocks / total_blocks if total_blocks else None


def jain_fairness(loads: F64) -> float | None:
    """Jain's index of the requests (or tokens) per worker = (sum x)^2 / (n * sum x^2): 1 for equal shares, 1/n for one
    worker that has all.
    """
    squares = float((loads**2).sum())
    return float(loads.sum()) ** 2 / (len(loads) * squares) if squares else None


def share_range(loads: F64) -> tuple[float, float] | None:
    """Smallest and largest share of a worker = its requests (or its prompt and output tokens) / those of all workers of
    its role; 1/n each is even. None where nobody had anything.
    """
    total = float(loads.sum())
    return (float(loads.min()) / total, float(loads.max()) / total) if total else None


def routing_effectiveness(differing: int, decisions: int) -> float | None:
    """Share of routing decisions in which the eligible workers differed in cached blocks of the prompt: elsewhere a
    router that looks at caches could only balance load. None without decisions.
    """
    return differing / decisions if decisions else None


def overlap_lost(chosen_blocks: int, eligible_blocks: Sequence[int]) -> int:
    """Overlap lost of a decision = most cached blocks on an eligible worker - cached blocks on the chosen one (0 or
    more), as the router saw them. Decisions that lost any are non-max-overlap selections.
    """
    return max(max(eligible_blocks, default=0) - chosen_blocks, 0)


def cost_regret(chosen_cost: float, eligible_costs: Sequence[float]) -> float:
    """Cost regret of a decision, in blocks = cost of the chosen worker - lowest cost of an eligible one, as the router
    saw them; above 0 only where a temperature, a pin or an affinity decided.
    """
    return chosen_cost - min(eligible_costs, default=chosen_cost)


def oracle_regret_s(chosen_ttft_s: float, ttfts_s: Sequence[float]) -> float:
    """Oracle regret of a decision = TTFT on the chosen worker - shortest TTFT on an eligible one, each from the true
    state of the worker at that moment, run on without what arrives later. In simulations only, for a sample.
    """
    return chosen_ttft_s - min(ttfts_s, default=chosen_ttft_s)


def slo_attainment(good: int, counted: int) -> float | None:
    """Good requests / all requests. Rejected, failed and open requests are counted and not good; cancelled ones left
    by their own wish and are not counted.
    """
    return good / counted if counted else None


def goodput_rps(good: int, elapsed_s: float | None) -> float | None:
    """Requests that keep every limit (limits are inclusive), per second of the makespan."""
    return per_second(good, elapsed_s)


def goodput_rps_per_gpu(good: int, gpu_s: float | None) -> float | None:
    """Good requests / GPU-seconds held. A GPU is held from the order of its worker to its stop: starting and draining
    count, and so do quiet spells.
    """
    return per_second(good, gpu_s)


DEFINITIONS: dict[str, Callable[..., object]] = {
    "TTFT": ttft_s,
    "TPOT": tpot_s,
    "ITL": itl_s,
    "E2E": e2e_s,
    "queue wait": queue_wait_s,
    "router wait": router_wait_s,
    "tokens/s per user": tokens_per_s_per_user,
    "makespan": makespan_s,
    "requests/s, output tokens/s": per_second,
    "busy share": busy_share,
    "hit rate": hit_rate,
    "hit rate in blocks": block_hit_rate,
    "upper bound of the hit rate": upper_bound_hit_rate,
    "KV peak": kv_peak_share,
    "fairness": jain_fairness,
    "smallest and largest share": share_range,
    "routing effectiveness": routing_effectiveness,
    "overlap lost": overlap_lost,
    "cost regret": cost_regret,
    "oracle regret": oracle_regret_s,
    "95 % interval": mean_ci95,
    "attainment": slo_attainment,
    "goodput": goodput_rps,
    "goodput per GPU": goodput_rps_per_gpu,
}
"""What a report shows, and the function whose docstring defines it."""


def definition(name: str) -> str:
    """The definition of a metric in words: the first paragraph of its docstring."""
    text = DEFINITIONS[name].__doc__ or ""
    return " ".join(text.strip().split("\n\n")[0].split())
