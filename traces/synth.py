"""Draws traces: the shapes of Azure and Mooncake from fitted figures, and Poisson and gamma arrivals.

What is drawn is marked synthetic, with generator and seed, and depends on nothing else: the same call gives the same
rows on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from traces import arrow
from traces.draw import Floats, Ints, Stream
from traces.errors import TraceError
from traces.rows import IdLists
from traces.schema import (
    ARRIVAL,
    HASH_IDS,
    ISL,
    META_BLOCK,
    META_GENERATOR,
    META_LICENCE,
    META_SEED,
    META_SOURCE,
    META_SYNTHETIC,
    OSL,
    SPAN_LIMIT_S,
    TOKENS_LIMIT,
    canonical_schema,
)

_MICROSECONDS = 6
"""Arrivals are rounded to whole microseconds: finer than any recording, coarser than what two machines disagree on."""

_AZURE_SOURCE = "figures fitted to the Azure LLM inference trace 2023 (conversation and code), first 45 minutes"
_AZURE_LICENCE = "figures derived from data under CC-BY-4.0; cite Patel et al., Splitwise, ISCA 2024"
_MOONCAKE_SOURCE = "figures fitted to the Mooncake FAST25 conversation trace, first 45 minutes"
_MOONCAKE_LICENCE = "figures derived from data under Apache-2.0; cite Qin et al., Mooncake, FAST 2025"
_FIRST_GUESS = 1.2
"""How much longer than expected the first draw is when a number of rows is asked for."""

_MOST_ROWS = 100_000_000
"""Rows are held in memory until they are written."""

_WIDEST_CV = 100.0
"""Beyond it nearly every gap is too small for a float, and no number of gaps gets anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """What to draw. `rows` or `duration_s`, not both; by default what the generator calls whole.

    `rate_rps`, `isl`, `osl` and `lengths` are for `poisson` and `gamma`, `cv` (of the gaps) for `gamma`: an option that
    a generator does not use is an error. `lengths`: "fixed" or "geometric" with means `isl` and `osl`, or "azure", the
    conversation service's, which is the default without `isl` and `osl`.
    """

    seed: int = 0
    rows: int | None = None
    duration_s: float | None = None
    rate_rps: float | None = None
    cv: float | None = None
    isl: int | None = None
    osl: int | None = None
    lengths: str | None = None


class Drawn(NamedTuple):
    """Requests in order of arrival."""

    arrival_s: Floats
    isl: Ints
    osl: Ints
    ids: IdLists | None = None


Draw = Callable[[float, SynthOptions], Drawn]


class Synthesiser(NamedTuple):
    """A generator: what it is, how it draws a duration, and which options it takes beyond seed, rows and duration.

    `whole_s` is how long a trace is unless asked otherwise, `usual_rps` roughly how many requests it has per second
    (None: the rate is an option).
    """

    about: str
    draw: Draw
    whole_s: float
    usual_rps: float | None
    takes: frozenset[str] = frozenset()
    source: str | None = None
    licence: str | None = None
    hash_block_tokens: int | None = None


def synthesise(name: str, options: SynthOptions | None = None) -> pa.Table:
    """A canonical trace drawn by the generator `name`, with its metadata. Raises TraceError for options that clash."""
    options = options or SynthOptions()
    if name not in SYNTHESISERS:
        raise TraceError(f"there is no generator {name!r}; there are {', '.join(SYNTHESISERS)}")
    generator = SYNTHESISERS[name]
    _check(name, generator, options)
    drawn = _by_rows(generator, options, options.rows) if options.rows else _by_duration(generator, options)
    return _table(name, generator, options, drawn)


def _by_duration(generator: Synthesiser, options: SynthOptions) -> Drawn:
    drawn = generator.draw(options.duration_s or generator.whole_s, options)
    if not len(drawn.arrival_s):
        raise TraceError(f"no request arrives within {options.duration_s} s; draw a longer time, or give rows instead")
    return drawn


def _by_rows(generator: Synthesiser, options: SynthOptions, rows: int) -> Drawn:
    """The first `rows` requests: every draw is a prefix of a longer one, so draw until there are enough."""
    duration_s = _FIRST_GUESS * rows / (generator.usual_rps or options.rate_rps or 1.0)
    if generator.usual_rps is not None:  # a fitted rate is a mean over minutes
        duration_s = max(60.0, duration_s)
    while len((drawn := generator.draw(duration_s, options)).arrival_s) < rows:
        duration_s *= 2
        if duration_s > 4 * SPAN_LIMIT_S:
            raise _too_long(duration_s)
    ids = None if drawn.ids is None else drawn.ids.take(np.arange(rows))
    return Drawn(drawn.arrival_s[:rows], drawn.isl[:rows], drawn.osl[:rows], ids)


def _table(name: str, generator: Synthesiser, options: SynthOptions, drawn: Drawn) -> pa.Table:
    if drawn.arrival_s[-1] - drawn.arrival_s[0] > SPAN_LIMIT_S:
        raise _too_long(float(drawn.arrival_s[-1]))
    for option, drawn_tokens in ((ISL, drawn.isl), (OSL, drawn.osl)):
        if int(drawn_tokens.max()) > TOKENS_LIMIT:
            raise TraceError(f"{option} was drawn above {TOKENS_LIMIT} tokens, the most a trace holds; lower its mean")
    arrival_s = np.round(drawn.arrival_s - drawn.arrival_s[0], _MICROSECONDS)
    columns = {
        ARRIVAL: arrow.numbers(arrival_s),
        ISL: arrow.numbers(drawn.isl.astype(np.int32)),
        OSL: arrow.numbers(drawn.osl.astype(np.int32)),
    }
    asked = {f.name: getattr(options, f.name) for f in fields(options) if f.name != "seed"}
    words = " ".join(f"{key}={value}" for key, value in asked.items() if value is not None)
    metadata = {
        META_SYNTHETIC: "true",
        META_GENERATOR: f"twin synth {name} {words}".strip(),
        META_SEED: str(options.seed),
    }
    if drawn.ids is not None:
        columns[HASH_IDS] = drawn.ids.to_arrow()
        metadata[META_BLOCK] = str(generator.hash_block_tokens)
    if generator.source and generator.licence:
        metadata |= {META_SOURCE: generator.source, META_LICENCE: generator.licence}
    return pa.Table.from_arrays(list(columns.values()), schema=canonical_schema(columns, metadata))


# ---------------------------------------------------------------- the generators


def _azure(duration_s: float, options: SynthOptions) -> Drawn:
    from traces.synth_azure import draw_azure

    return Drawn(*draw_azure(duration_s, options.seed))


def _mooncake(duration_s: float, options: SynthOptions) -> Drawn:
    from traces.synth_mooncake import draw_mooncake

    return Drawn(*draw_mooncake(duration_s, options.seed))


def _poisson(duration_s: float, options: SynthOptions) -> Drawn:
    return _renewal(duration_s, options, lambda stream, count: -np.log1p(-stream.uniform(count)))


def _gamma(duration_s: float, options: SynthOptions) -> Drawn:
    shape = (options.cv or 1.0) ** -2
    return _renewal(duration_s, options, lambda stream, count: stream.gamma(shape, count))


def _renewal(duration_s: float, options: SynthOptions, gaps: Callable[[Stream, int], Floats]) -> Drawn:
    """Independent gaps, in units of the mean one; the first arrival is at 0."""
    assert options.rate_rps is not None
    stream = Stream(options.seed, "gaps")
    parts, reached_s = [np.zeros(1)], 0.0
    while reached_s < duration_s:
        arrival_s = reached_s + np.cumsum(gaps(stream, 4096)) / options.rate_rps
        parts.append(arrival_s)
        reached_s = float(arrival_s[-1])
    arrival_s = np.concatenate(parts)
    arrival_s = arrival_s[arrival_s < duration_s]
    return Drawn(arrival_s, *_lengths(len(arrival_s), options))


def _lengths(count: int, options: SynthOptions) -> tuple[Ints, Ints]:
    kind = options.lengths or ("azure" if options.isl is None else "fixed")
    if kind == "azure":
        from traces.synth_azure import draw_lengths

        return draw_lengths(count, options.seed)
    means = {"isl": options.isl or 1, "osl": options.osl or 1}
    if kind == "fixed":
        return np.full(count, means["isl"], np.int64), np.full(count, means["osl"], np.int64)
    isl, osl = (_geometric(mean, Stream(options.seed, name).uniform(count)) for name, mean in means.items())
    return isl, osl


def _geometric(mean: int, u: Floats) -> Ints:
    """Whole numbers of at least 1 with this mean."""
    if mean == 1:
        return np.ones(len(u), np.int64)
    drawn: Ints = np.maximum(np.ceil(np.log1p(-u) / np.log1p(-1.0 / mean)), 1).astype(np.int64)
    return drawn


_RENEWAL_OPTIONS = frozenset({"rate_rps", "isl", "osl", "lengths"})

SYNTHESISERS: Mapping[str, Synthesiser] = {
    "azure": Synthesiser(
        about="conversation and code requests in the shape of Azure's 2023 trace, no prefix content",
        draw=_azure,
        whole_s=2623.3,
        usual_rps=9.0,
        source=_AZURE_SOURCE,
        licence=_AZURE_LICENCE,
    ),
    "mooncake": Synthesiser(
        about="long chats that share prefixes, in the shape of Mooncake's conversation trace",
        draw=_mooncake,
        whole_s=2700.0,
        usual_rps=3.3,
        source=_MOONCAKE_SOURCE,
        licence=_MOONCAKE_LICENCE,
        hash_block_tokens=512,
    ),
    "poisson": Synthesiser(
        about="independent arrivals at a constant rate",
        draw=_poisson,
        whole_s=2700.0,
        usual_rps=None,
        takes=_RENEWAL_OPTIONS,
    ),
    "gamma": Synthesiser(
        about="gamma gaps: more bursty than Poisson with a cv above 1, steadier below",
        draw=_gamma,
        whole_s=2700.0,
        usual_rps=None,
        takes=_RENEWAL_OPTIONS | {"cv"},
    ),
}
"""The generators by name; `whole_s` of the first two is the recorded time that their figures were fitted to."""


def _check(name: str, generator: Synthesiser, options: SynthOptions) -> None:
    for option in ("rate_rps", "cv", "isl", "osl", "lengths"):
        if getattr(options, option) is not None and option not in generator.takes:
            raise TraceError(f"{option} has no effect on {name}: its figures are fitted; leave it out")
    if options.rows is not None and options.duration_s is not None:
        raise TraceError(
            f"rows {options.rows} and duration_s {options.duration_s} both set the length; give one of them"
        )
    for option in ("rows", "duration_s", "rate_rps", "cv", "isl", "osl"):
        value = getattr(options, option)
        if value is not None and not 0 < value < np.inf:
            raise TraceError(f"{option} is {value}; a finite number above 0 is needed")
    for option in ("isl", "osl"):
        if (getattr(options, option) or 0) > TOKENS_LIMIT:
            raise TraceError(f"{option} is {getattr(options, option)}; a trace holds at most {TOKENS_LIMIT} tokens")
    if options.seed < 0:
        raise TraceError(f"seed is {options.seed}; a whole number of at least 0 is needed")
    if generator.usual_rps is None and options.rate_rps is None:
        raise TraceError(f"{name} needs rate_rps, the mean arrivals per second")
    rate_rps = generator.usual_rps or options.rate_rps or 0.0
    duration_s = options.duration_s or (options.rows / rate_rps if options.rows else generator.whole_s)
    if duration_s > SPAN_LIMIT_S:
        raise _too_long(duration_s)
    if (options.rows or duration_s * rate_rps) > _MOST_ROWS:
        raise TraceError(
            f"{name} would have about {options.rows or duration_s * rate_rps:.3g} requests; at most {_MOST_ROWS:,} are"
            " drawn: give fewer rows, a shorter duration_s or a lower rate_rps"
        )
    if options.cv is not None and options.cv > _WIDEST_CV:
        raise TraceError(f"cv is {options.cv}; at most {_WIDEST_CV:g} can be drawn")
    if "cv" in generator.takes and options.cv is None:
        raise TraceError(f"{name} needs cv, the coefficient of variation of the gaps (1 is Poisson)")
    _check_lengths(options)


def _too_long(duration_s: float) -> TraceError:
    return TraceError(
        f"the trace would last {duration_s:.3g} s, and one holds at most {SPAN_LIMIT_S:.0f} s: ask for a shorter"
        " duration_s, fewer rows or a higher rate_rps"
    )


def _check_lengths(options: SynthOptions) -> None:
    given = [name for name in ("isl", "osl") if getattr(options, name) is not None]
    if options.lengths not in (None, "fixed", "geometric", "azure"):
        raise TraceError(f"lengths is {options.lengths!r}; it is one of fixed, geometric, azure")
    if options.lengths == "azure" and given:
        raise TraceError(f"{given[0]} has no effect with lengths azure, which are fitted; leave one of the two out")
    if len(given) == 1 or (options.lengths in ("fixed", "geometric") and not given):
        raise TraceError("isl and osl belong together: give both, or neither for the lengths of azure")
