"""One candidate of a finished search, by name or place: its estimate or the rule that it breaks, and why it is not in.

Candidates that the search did not keep in full are scored again by the closed form, which gives the same figures.
"""

from __future__ import annotations

from pathlib import Path

from aiconfig.candidate import Candidate
from aiconfig.evaluation import rejection
from aiconfig.legality import budget_rejection
from aiconfig.memory import fit
from aiconfig.names import candidate_of
from aiconfig.outcome import Scored
from aiconfig.outputs import CANDIDATES
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.result import RESULT_JSON, Result, read_result
from aiconfig.scoring import Scoring
from aiconfig.space import Legal
from policies.errors import ConfigError
from policies.frozen import frozen


@frozen
class Looked:
    """A candidate in a search. `scored` is None for one that `left_out` refuses before anything is estimated."""

    candidate: Candidate
    scored: Scored | None
    place: int | None  # among those in the answer, from 1
    left_out: Rejection | None


def find_search(folder: Path | None) -> tuple[Path, Result]:
    """The search in a folder (or its result.json); without one the newest below runs/."""
    if folder is None:
        found = sorted(Path("runs").glob(f"*/{RESULT_JSON}"), key=lambda path: (path.stat().st_mtime_ns, str(path)))
        if not found:
            raise ConfigError("there is no search below runs/; give --search DIR, or search first")
        folder = found[-1].parent
    return (folder if folder.is_dir() else folder.parent), read_result(folder)


def look_up(result: Result, folder: Path, name: str) -> Looked:
    """The candidate of that name, or at that place of the table. Raises ConfigError for what is neither."""
    one = result.named(name)
    if one is None and name.isdecimal():
        raise ConfigError(f"candidate {name}: the answer has {len(result.found)}, counted from 1")
    if one is not None:
        place = result.found.index(one) + 1
        return Looked(candidate=one.candidate, scored=one, place=place, left_out=None)
    candidate = candidate_of(name, result.request.model)
    left_out = _reason(folder / CANDIDATES, candidate)
    scored = score(candidate, result.request)
    if isinstance(scored, Rejection):
        return Looked(candidate=candidate, scored=None, place=None, left_out=left_out or scored)
    return Looked(candidate=candidate, scored=scored, place=None, left_out=left_out)


def score(candidate: Candidate, request: SearchRequest) -> Scored | Rejection:
    """A candidate by the closed form, as the search of that request scores it; or the first rule that it breaks."""
    broken = rejection(candidate, request.physics) or budget_rejection(candidate.name, candidate.gpus, request.gpus)
    if broken is not None:
        return broken
    room = fit(candidate, request.workload, None, request.hardware)
    if isinstance(room, Rejection):
        return room
    return Scoring(request).of(Legal(candidate=candidate, pools=room.pools))


def _reason(path: Path, candidate: Candidate) -> Rejection | None:
    """What the table of the search says of it; a rule on one worker stands there under the name of that worker."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if not path.exists():
        return None
    table = pq.read_table(path, columns=["name", "reason", "needs", "has", "unit", "detail"])
    found = table.filter(pc.equal(table["name"], candidate.name)).to_pylist()
    if not found or found[0]["reason"] is None:
        return None
    row = found[0]
    return Rejection(
        name=candidate.name,
        reason=row["reason"],
        needs=row["needs"],
        has=row["has"],
        unit=row["unit"] or "",
        detail=row["detail"] or "",
    )
