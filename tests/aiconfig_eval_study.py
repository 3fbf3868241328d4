"""A space of made-up deployments with a score that can be computed by hand, and a process that is killed in a study.

    python -m aiconfig_eval_study STORAGE LOG N

scores candidates one by one, notes each in LOG before it is scored, and kills itself at the N-th trial of the study.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path

from aiconfig_eval_builders import candidate

from aiconfig.candidate import Candidate
from aiconfig.study import Score, StudyOptions, run_study


def space(count: int) -> list[Candidate]:
    """The first of 1,000 deployments."""
    sizes = product(
        ("vllm", "sglang"), (1, 2, 4, 8), (64, 128, 256, 512, 1024), (1024, 2048, 4096, 8192, 16384), range(1, 11)
    )
    made = (
        candidate(engine, tp=tp, max_num_seqs=seqs, max_num_batched_tokens=tokens, replicas=replicas)
        for engine, tp, seqs, tokens, replicas in sizes
    )
    return list(islice(made, count))


def scores(candidates: Sequence[Candidate]) -> list[Score]:
    """Best are 7 replicas of TP 4 with 256 sequences; engine and budget make no difference."""
    pools = [one.pools[0] for one in candidates]
    return [
        Score(values=(-abs(p.replicas - 7) - abs(p.layout.tp - 4) - abs(p.max_num_seqs - 256) / 256.0,)) for p in pools
    ]


def two_scores(candidates: Sequence[Candidate]) -> list[Score]:
    """More replicas, or fewer sequences."""
    pools = [one.pools[0] for one in candidates]
    return [Score(values=(float(p.replicas), -p.max_num_seqs * p.layout.tp / 100.0)) for p in pools]


def finished_in(storage: str) -> list[str]:
    """Names of the finished trials of a storage, in order; read without our code."""
    import optuna

    study = optuna.load_study(study_name="aiconfig", storage=storage)
    return [trial.user_attrs["candidate"] for trial in study.get_trials()]


def main(storage: str, log: str, kill_at: int) -> None:
    """Run until killed."""
    known = len(finished_in(storage)) if Path(storage.removeprefix("sqlite:///")).exists() else 0
    asked = known

    def noted(candidates: Sequence[Candidate]) -> list[Score]:
        nonlocal asked
        with open(log, "a", encoding="utf-8") as file:
            file.writelines(f"{one.name}\n" for one in candidates)
        asked += len(candidates)
        if asked >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return scores(candidates)

    run_study(space(1000), noted, StudyOptions(trials=1000, storage=storage))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
