"""How far the roofline is from measured serving runs: the error table of docs/accuracy.md.

    python benchmarks/accuracy.py                                  # folds over the shared table
    python benchmarks/accuracy.py --table mine.csv                 # over a table of yours
    python benchmarks/accuracy.py --fit a.parquet --score b.parquet
    python benchmarks/accuracy.py --peer                           # beside aiconfigurator-core, where it answers
    python benchmarks/accuracy.py --plot docs/accuracy.png         # predicted / measured, as a picture

No row is ever scored with a fit that has seen it. Seeded; the same table gives the same figures.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from accuracy_goals import FOLDED, goal_table, ranking
from accuracy_plot import draw

from policies.errors import ConfigError
from twin.calibrate import folds
from twin.calibrate.bands import Metrics
from twin.calibrate.columns import parse_columns
from twin.calibrate.errors import errors_of
from twin.calibrate.fit import fit, uncalibrated
from twin.calibrate.fitted import Design
from twin.calibrate.measured import read_table
from twin.calibrate.pricing import Means
from twin.calibrate.study import design_of, errors_by_slice
from twin.calibrate.tables import markdown_table, text_table
from twin.sweep_pool import usable_cores

SHARED = Path(os.environ.get("DYNATWIN_SHARED", Path(__file__).resolve().parents[2] / "shared"))
TABLE = SHARED / "validation" / "silicon" / "agg_train.parquet"
FLOOR = """\
repeat-noise floor (median / mean difference of the same configuration measured again, from the table's README):
  same image, another day           TPOT 0.6 % / 1.8 %   TTFT 3.5 % /  7.9 %   (116 configurations)
  any engine version, months apart  TPOT 1.0 % / 3.6 %   TTFT 4.7 % / 13.6 %   (160 configurations)"""


def never_measured(design: Design) -> dict[str, Metrics]:
    """Predictions of what a fit lacks altogether, and of no fit at all."""
    rows = design.rows
    pairs = folds.still_known(rows, folds.by_pair, folds.by_model, folds.by_gpu)
    versions = folds.still_known(rows, folds.by_version, folds.by_block)
    versions &= np.array([folds.by_version(row) != folds.ALWAYS_SEEN for row in rows])
    return {
        "model never measured": part(design, folds.unseen(design, folds.by_model)),
        "engine version never measured": part(design, folds.unseen(design, folds.by_version), versions),
        "model and GPU seen, never together": part(design, folds.unseen(design, folds.by_pair), pairs),
        "engine never measured on this GPU family": part(design, folds.unseen(design, folds.by_block)),
        "no calibration": part(design, design.predict(uncalibrated())),
    }


def part(design: Design, predicted: Means, rows: np.ndarray | None = None) -> Metrics:
    """The errors of some rows, or of all."""
    found = []
    for metric in ("tpot", "ttft"):
        measured = getattr(design.measured, metric)
        kept = measured if rows is None else np.where(rows, measured, math.nan)
        found.append(errors_of(getattr(predicted, metric), kept))
    return Metrics(tpot=found[0], ttft=found[1])


def main() -> None:
    args = _arguments()
    began = time.process_time()
    show = markdown_table if args.markdown else text_table
    try:
        table, design = design_of(read_table(args.fit or args.table, args.columns), jobs=args.jobs, seed=args.seed)
        if args.score is None:
            ours = folds.unseen(design, folds.by_group)
        else:
            found = fit(design)
            table, design = design_of(read_table(args.score, args.columns), jobs=args.jobs, seed=args.seed)
            ours = design.predict(found)
    except ConfigError as error:
        sys.exit(f"accuracy: {error}")
    left_out = ", ".join(f"{count} {why}" for why, count in sorted(table.left_out.items())) or "none"
    print(f"{table.name} ({table.digest}), {len(design.rows):,} runs, seed {args.seed}; left out: {left_out}; in %")
    by_slice = errors_by_slice(design, ours)
    print(f"\n{f'fitted to {args.fit.name}' if args.score else f'{folds.FOLDS} folds over configurations'}")
    print(show(by_slice))
    if args.score is None:
        lacking = never_measured(design)
        print(f"\nnever measured\n{show(lacking)}")
        by_slice |= {FOLDED: by_slice["overall"], **lacking}
    print(f"\ngoals\n{goal_table(by_slice)}")
    order = ranking(design, ours)
    if order is not None:
        print("", *order.lines(), sep="\n")
    if args.peer:
        _beside_peer(design, ours, show)
    if args.plot is not None:
        draw(design, ours, args.plot)
    print(f"\n{FLOOR}")
    print(f"{time.process_time() - began:.0f} CPU seconds in this process", file=sys.stderr)


def _beside_peer(design: Design, ours: Means, show: Callable[[Mapping[str, Metrics]], str]) -> None:
    from accuracy_peer import peer_means

    peer = peer_means(design)
    answered = ~np.isnan(peer.tpot)
    same = {"aiconfigurator-core": part(design, peer, answered), "ours": part(design, ours, answered)}
    print(f"\naiconfigurator-core, refusals as 100 %\n{show(errors_by_slice(design, peer))}")
    print(f"\nboth, where it answers\n{show(same)}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, help="table to fold over (columns: docs/calibration.md)")
    parser.add_argument("--fit", type=Path, help="fit to this table ...")
    parser.add_argument("--score", type=Path, help="... and score this one")
    parser.add_argument("--columns", type=lambda text: parse_columns([text]), default={}, help="FIELD=COLUMN,...")
    parser.add_argument("--peer", action="store_true", help="score aiconfigurator-core too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw predicted / measured by users and lengths")
    parser.add_argument("--markdown", action="store_true", help="tables for a document")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=usable_cores())
    args = parser.parse_args()
    if (args.fit is None) != (args.score is None):
        parser.error("--fit and --score go together")
    return args


if __name__ == "__main__":
    main()
