"""Sampling a space that is too large to be searched exactly: Optuna proposes, whoever calls scores, a file remembers.

Optuna (the extra `study`) is imported when a study begins. The sampler works in memory; finished trials alone go to the
storage, each in one transaction, so that a study that is killed has every trial that was finished and no half of one.
"""

from __future__ import annotations

import importlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import xxhash

from aiconfig.axes import Taken, Tree
from aiconfig.candidate import Candidate
from policies.errors import CapabilityError, ConfigError
from policies.frozen import frozen

if TYPE_CHECKING:
    from types import ModuleType

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

STARTUP_TRIALS: Final = 20
"""Trials that are drawn at random before TPE makes anything of them."""
POPULATION: Final = 50
"""Trials of a generation of NSGA-II: its own default."""
GENERATION: Final = "NSGAIISampler:generation"
"""Where Optuna's sampler notes the generation of a trial."""
WANTED: Final = "optuna is not installed: a sampled search needs it; pip install 'dynatwin[study]'"


@frozen
class Score:
    """What a candidate came to: `values` of the objectives (larger is better), or none and `why`.

    `violation` is by how much the worst limit is missed, as a share of it (0 or less: none is). `note` is kept with the
    trial as it is.
    """

    values: tuple[float, ...] = ()
    violation: float = 0.0
    why: str = ""
    note: Mapping[str, Json] | None = None


Scorer: TypeAlias = Callable[[Sequence[Candidate]], Sequence[Score]]
"""Scores of candidates, in their order."""


@frozen
class StudyOptions:
    """`trials` is how many there are in the end, those of the storage included; `timeout_s` bounds this sitting.

    `width` trials are asked for before the first of them is told. `about` tells one search from another: a storage that
    holds a study of the same `name` and another search is refused. `storage` is an URL like sqlite:///search.db.
    """

    objectives: int = 1
    trials: int = 500
    timeout_s: float | None = None
    seed: int = 0
    width: int = 1
    storage: str | None = None
    name: str = "aiconfig"
    about: str = ""

    def __post_init__(self) -> None:
        for option, value in (("trials", self.trials), ("jobs", self.width)):
            if value < 1:
                raise ConfigError(f"--{option} {value}: a study has at least 1")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"--timeout {self.timeout_s}: seconds, more than 0")


@frozen
class Trial:
    """A finished trial."""

    candidate: Candidate
    score: Score


@frozen
class Studied:
    """Finished trials in their order; `kept` of them were there before. `space`: how many candidates there are.
    Not `complete` after Ctrl-C or when time was up."""

    trials: tuple[Trial, ...]
    kept: int
    space: int
    complete: bool
    sampler: str


def run_study(candidates: Sequence[Candidate], score: Scorer, options: StudyOptions) -> Studied:
    """Score up to `options.trials` different candidates, the more promising ones first.

    One objective is sampled by TPE, several by NSGA-II. The same candidates, scores and options give the same trials,
    also if the study was stopped and goes on from its storage. Raises CapabilityError without Optuna, and ConfigError
    for a storage that cannot be used.
    """
    study = _Study(candidates, options)
    kept = len(study.trials)
    until_s = None if options.timeout_s is None else time.monotonic() + options.timeout_s
    complete = True
    try:
        while len(study.trials) < options.trials and study.left:
            if until_s is not None and time.monotonic() >= until_s:
                complete = False
                break
            asked = study.ask(min(options.width, options.trials - study.settled))
            todo = [taken for taken in asked if not study.knows(taken)]
            told = dict(zip((one.place for one in todo), score([candidates[one.place] for one in todo]), strict=True))
            study.tell(asked, told)
    except KeyboardInterrupt:
        complete = False
    return Studied(
        trials=tuple(study.trials), kept=kept, space=len(candidates), complete=complete, sampler=study.sampler
    )


class _Study:
    """A study under way: the tree of what is left, the sampler's own trials, and the storage.

    Trials are told in whole batches. What a storage has of a batch that was cut off is known when the batch is asked
    for again, so that the sampler sees what it would have seen.
    """

    def __init__(self, candidates: Sequence[Candidate], options: StudyOptions) -> None:
        self._optuna = _optuna()
        self._candidates, self._options = candidates, options
        self._places = {candidate.name: place for place, candidate in enumerate(candidates)}
        self._tree = Tree(candidates)
        directions = ["maximize"] * options.objectives
        self._memory = self._optuna.create_study(directions=directions)
        self._stored = _open(self._optuna, directions, options, _digest(candidates, options.about))
        stored = [self._restored(trial) for trial in _finished(self._optuna, self._stored)]
        self.trials = [trial for _, trial, _ in stored]
        whole = len(stored) // options.width * options.width
        self.settled = 0
        generation = None
        for place, trial, system in stored[:whole]:
            if system.get(GENERATION) != generation:
                self._choose_parents()
                generation = system.get(GENERATION)
            self._memory.add_trial(self._frozen(self._tree.mark(place), trial.score, system))
            self.settled += 1
        self._drafts: dict[int, Any] = {}
        self._cut_off = {place: trial.score for place, trial, _ in stored[whole:]}

    @property
    def sampler(self) -> str:
        return "TPE" if self._options.objectives == 1 else "NSGA-II"

    @property
    def left(self) -> int:
        """Candidates without a finished trial."""
        return len(self._candidates) - len(self.trials)

    def knows(self, taken: Taken) -> bool:
        """Whether the storage has this trial already."""
        return taken.place in self._cut_off

    def ask(self, count: int) -> list[Taken]:
        """The next candidates; the sampler's draws depend on the seed and on how many trials it was told of."""
        if self._options.objectives > 1:
            self._choose_parents()
        self._memory.sampler = self._new_sampler()
        asked: list[Taken] = []
        for _ in range(min(count, self._tree.left)):
            draft = self._memory.ask()
            taken = self._tree.take(draft.suggest_categorical)
            self._drafts[taken.place] = draft
            asked.append(taken)
        return asked

    def _made(self, draft: Any) -> dict[str, Any]:
        """What the sampler notes of a trial that it proposes."""
        return dict(self._memory.get_trials(deepcopy=False)[draft.number].system_attrs)

    def _choose_parents(self) -> None:
        """Have NSGA-II choose the parents of a generation that begins here, apart from the first draw of it.

        It has them in one order when it chooses them and in another ever after; a study that goes on would draw
        otherwise than one that was never stopped.
        """
        axis, choices = max(self._tree.choices.items(), key=lambda found: len(found[1]))  # one choice is no draw
        self._memory.sampler = self._new_sampler()
        draft = self._memory.ask()
        draft.suggest_categorical(axis, choices)
        self._memory.tell(draft, state=self._optuna.trial.TrialState.FAIL)

    def tell(self, asked: Sequence[Taken], scores: Mapping[int, Score]) -> None:
        """Add the trials of a batch in the order in which they were asked for.

        A draft is closed as failed, which samplers pass over: what they learn of is the candidate that was scored.
        """
        optuna = self._optuna
        for taken in asked:
            draft = self._drafts.pop(taken.place)
            made = self._made(draft)
            self._memory.tell(draft, state=optuna.trial.TrialState.FAIL)
            known = self._cut_off.pop(taken.place, None)
            score = scores[taken.place] if known is None else known
            frozen_trial = self._frozen(taken, score, made)
            self._memory.add_trial(frozen_trial)
            if known is None:
                if self._stored is not None:
                    self._stored.add_trial(frozen_trial)
                self.trials.append(Trial(candidate=self._candidates[taken.place], score=score))
            self.settled += 1

    def _frozen(self, taken: Taken, score: Score, system: dict[str, Any]) -> Any:
        """A finished trial as Optuna keeps it: rejected candidates are pruned ones, worse than all others."""
        optuna = self._optuna
        state = optuna.trial.TrialState.COMPLETE if score.values else optuna.trial.TrialState.PRUNED
        kinds = {axis: optuna.distributions.CategoricalDistribution(self._tree.choices[axis]) for axis in taken.axes}
        told = {"candidate": self._candidates[taken.place].name, "violation": score.violation, "why": score.why}
        if score.note is not None:
            told["note"] = json.dumps(score.note, sort_keys=True)
        return optuna.trial.create_trial(
            state=state,
            values=list(score.values) if score.values else None,
            params=dict(taken.axes),
            distributions=kinds,
            user_attrs=told,
            system_attrs=system,
            constraints={"limits": score.violation},
        )

    def _restored(self, frozen_trial: Any) -> tuple[int, Trial, dict[str, Any]]:
        """(place of the candidate, the trial, what the sampler noted of it); a storage does not keep the order of
        parameters, so the trial that the sampler is told of is made anew."""
        told = frozen_trial.user_attrs
        place = self._places[told["candidate"]]
        complete = frozen_trial.state == self._optuna.trial.TrialState.COMPLETE
        score = Score(
            values=tuple(frozen_trial.values) if complete else (),
            violation=told["violation"],
            why=told["why"],
            note=json.loads(told["note"]) if "note" in told else None,
        )
        system = {name: value for name, value in frozen_trial.system_attrs.items() if name.startswith("NSGAII")}
        return place, Trial(candidate=self._candidates[place], score=score), system

    def _new_sampler(self) -> Any:
        """A sampler whose draws follow from the seed and the number of trials, not from how it came there."""
        samplers = self._optuna.samplers
        seed = xxhash.xxh32_intdigest(f"{self._options.seed} {self.settled}".encode())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of its options are marked experimental
            if self._options.objectives == 1:
                return samplers.TPESampler(seed=seed, n_startup_trials=STARTUP_TRIALS)
            return samplers.NSGAIISampler(seed=seed, population_size=POPULATION)


def _optuna() -> ModuleType:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise CapabilityError(WANTED) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _digest(candidates: Sequence[Candidate], about: str) -> str:
    digest = xxhash.xxh3_64(about.encode())
    for candidate in candidates:
        digest.update(candidate.name.encode() + b"\n")
    return digest.hexdigest()


def _open(optuna: ModuleType, directions: list[str], options: StudyOptions, digest: str) -> Any:
    """The study in the storage, made if there is none; None without a storage."""
    if options.storage is None:
        return None
    try:
        study = optuna.create_study(
            storage=options.storage, study_name=options.name, directions=directions, load_if_exists=True
        )
        known = study.user_attrs.get("search")
        if known is None and not study.get_trials(deepcopy=False):
            study.set_user_attr("search", digest)
            known = digest
    except Exception as error:
        raise ConfigError(
            f"--storage {options.storage}: cannot be used ({_first_line(error)}); write it like sqlite:///search.db"
        ) from None
    if known != digest:
        raise ConfigError(
            f"--storage {options.storage}: its study {options.name} is of another search; name another with "
            "--study-name, or another file"
        )
    return study


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _finished(optuna: ModuleType, study: Any) -> Iterator[Any]:
    if study is None:
        return
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    yield from study.get_trials(deepcopy=False, states=states)
