"""CPU time of one plain replay at two revisions: what a change costs those who do not use it.

Both revisions are checked out into worktrees of their own, which are gone afterwards, and run in turn with this
interpreter. What is measured is the replay of benchmarks/replay_azure.py. A ratio is that of two runs next to each
other: load on the machine then touches both. The goal is 1.10 at most.

    python benchmarks/before_after.py BEFORE [AFTER] [--pairs 7] [--rows 10000] [--trace FILE]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from measure import Cost, alternate, measure, median, peak, show
from replay_azure import azure, command

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a revision that git knows")
    parser.add_argument("after", nargs="?", default="HEAD", help="another one; what is not committed does not count")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    trace = (args.trace or azure()).resolve()
    revisions = {"before": commit(args.before), "after": commit(args.after)}
    with ExitStack() as stack:
        room = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trees = {name: stack.enter_context(worktree(rev, room / name)) for name, rev in revisions.items()}
        commands = {name: command(trace, args.rows, room / f"run-{name}") for name in revisions}
        for name in revisions:
            measure(commands[name], trees[name])  # compiles what it imports
        costs = alternate(commands, args.pairs, trees)
    show(
        "before_after",
        {
            "trace": trace.name,
            "rows": args.rows,
            "revisions": {name: rev[:7] for name, rev in revisions.items()},
            "cpu_s": {name: round(median(costs[name]), 3) for name in costs},
            "peak_mib": {name: round(peak(costs[name]), 1) for name in costs},
            "after_over_before": ratios(costs["before"], costs["after"]),
            "goal": {"after_over_before": 1.10},
        },
    )


def commit(revision: str) -> str:
    """The full id of a revision; the benchmark ends here if git does not know it."""
    found = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", check=False)
    if not found:
        sys.exit(f"{revision}: git knows no such commit in {REPOSITORY}; try git log --oneline")
    return found


@contextmanager
def worktree(revision: str, folder: Path) -> Iterator[Path]:
    """A checkout of a revision in a folder of its own, while it is needed."""
    git("worktree", "add", "--detach", "--quiet", str(folder), revision)
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))


def ratios(before: list[Cost], after: list[Cost]) -> dict[str, object]:
    """After over before, pair by pair: the median, the middle half and the whole range; and that of the cheapest runs,
    which other load on the machine has touched least."""
    pairs = sorted(b.cpu_s / a.cpu_s for a, b in zip(before, after, strict=True))
    spread: dict[str, object] = {"median": round(statistics.median(pairs), 4)}
    if len(pairs) > 3:
        low, _, high = statistics.quantiles(pairs, n=4, method="inclusive")
        spread["middle_half"] = [round(low, 4), round(high, 4)]
    best = min(cost.cpu_s for cost in after) / min(cost.cpu_s for cost in before)
    return spread | {"range": [round(pairs[0], 4), round(pairs[-1], 4)], "pairs": len(pairs), "of_best": round(best, 4)}


def git(*args: str, check: bool = True) -> str:
    """What git prints; its failure ends the benchmark with git's own words."""
    done = subprocess.run(["git", "-C", str(REPOSITORY), *args], capture_output=True, text=True)
    if check and done.returncode:
        sys.exit(f"git {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
