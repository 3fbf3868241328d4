"""The options of `twin replay`, and a quick reading of plain lines.

Typer costs 0.15 CPU seconds at every start. A line of known options needs none of it; anything else (help, a typo, a
missing value) is left to typer, which gets the same table. Both readings of a line are equal: a test holds that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Option(NamedTuple):
    """One option: without a `metavar` it is a switch; `many` may be given several times. TRACE is the argument."""

    flag: str
    metavar: str
    help: str
    many: bool = False
    short: str = ""

    @property
    def name(self) -> str:
        """Its name as a keyword."""
        return self.flag.lstrip("-").replace("-", "_").lower()


OPTIONS = (
    Option("TRACE", "TRACE", "Trace file; its format is sniffed."),
    Option("--config", "FILE", "TOML file (docs/config.md)."),
    Option("--workers", "N", "Number of workers."),
    Option("--engine", "NAME", "Whose scheduler: vllm, sglang, trtllm."),
    Option("--model", "NAME", "Model served (twin models)."),
    Option("--gpu", "NAME", "Device (twin hardware)."),
    Option("--tp", "N", "GPUs of one worker."),
    Option("--block-size", "N", "Tokens in a KV block."),
    Option("--kv-blocks", "N", "KV blocks of a worker; otherwise what fits into memory."),
    Option("--latency", "MODEL", "Step latency: roofline, fixed, linear, polynomial, table, silicon."),
    Option("--router", "MODE", "round-robin, random, least-loaded, power-of-two, direct or kv."),
    Option("--planner", "NAME", "Who adds and drains workers: throughput, load, hybrid, lookahead (docs/planner.md)."),
    Option("--faults", "FILE", "Scenario of what goes wrong (docs/faults.md); exit 3 if an expectation is missed."),
    Option("--sla", "LIMITS", "Limits, e.g. ttft=200ms,itl=50ms@p95; exit 3 if they are missed."),
    Option("--seed", "N", "Seed of every random draw."),
    Option("--limit", "N", "Replay only the first N rows."),
    Option("--speedup", "X", "Divide arrival times by this."),
    Option("--concurrency", "N", "Closed loop: N requests in flight."),
    Option("--set", "KEY=VALUE", "Any key of the configuration, e.g. router.router_temperature=0.5.", many=True),
    Option("--format", "NAME", "Name of the trace's format instead of looking."),
    Option("--on-bad-row", "WHAT", "error stops at a bad row, skip leaves it out and counts it."),
    Option("--time-unit", "UNIT", "Unit of the arrival column: s, ms, us or ns."),
    Option("--hash-block-tokens", "N", "Tokens that one hash id stands for."),
    Option("--default-osl", "N", "Output length of rows without one."),
    Option("--keep-zero-output", "", "Keep rows that made no output."),
    Option("--sort", "", "Sort rows whose arrivals go back in time."),
    Option("--strict", "", "Refuse what is outside the calibrated range of the step times, instead of a warning."),
    Option("--allow-no-effect", "", "List options without effect in the report instead of refusing them."),
    Option("--out", "DIR", "Folder of the run."),
    Option("--name", "NAME", "Name of the run, below runs/."),
    Option("--json", "", "Print report.json and nothing else."),
    Option("--no-html", "", "Write no report.html."),
    Option("--journal", "", "Write journal.jsonl: every event and what was done about it."),
    Option("--perfetto", "", "Write perfetto.json for ui.perfetto.dev."),
    Option("--explain", "", "Record the terms of each candidate with each decision; docs/decisions.md."),
    Option("--no-leap", "", "Compute every step on its own; the results are the same."),
    Option("--show-config", "", "Print every setting with where it came from, and stop."),
    Option("--quiet", "", "No progress and no notices on stderr.", short="-q"),
)
TRACE = OPTIONS[0]
_BY_FLAG = {flag: option for option in OPTIONS for flag in (option.flag, option.short) if flag.startswith("-")}
_NUMBER = re.compile(r"-\d")

Values = Mapping[str, Any]


def quick(args: Sequence[str]) -> Values | None:
    """The values of a line that needs no help: text, True for a switch, a list for `many`. None: leave it to typer."""
    values: dict[str, Any] = {}
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        option = _BY_FLAG.get(flag)
        if option is None:
            if arg.startswith("-") or not arg or TRACE.name in values:
                return None
            values[TRACE.name] = arg
        elif not option.metavar:
            if equals:
                return None
            values[option.name] = True
        else:
            given = value if equals else next(rest, None)
            if given is None or (given.startswith("-") and not _NUMBER.match(given)):
                return None
            if option.many:
                values.setdefault(option.name, []).append(given)
            else:
                values[option.name] = given
    return values
