"""Decisions of every mode on one fixed history: the same in every process, and the same as when this was written.

The digest covers request, worker, rule and overlap of every decision. Beside it stand the invariants (the scene checks
them at every step), and the laws of the property tests: were a digest wrong, something else would fail.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import Scene, router

from policies.cluster.draws import draw, pick

DIGESTS = {
    "round-robin": "bffe8365b5787a21",
    "random": "2cd46e35f77cabba",
    "least-loaded": "8ce07436082663de",
    "power-of-two": "e8788ad4b7e26640",
    "device-aware-weighted": "8ce07436082663de",
    "kv": "8b3b65d3531b4d59",
}


def chance(what: str, n: int, below: int) -> int:
    return pick(draw(7, what, str(n)), below)


def decisions(mode: str, requests: int = 300) -> list[str]:
    """Prompts that share and part, some pinned, ends of all kinds, one worker lost and one drained on the way."""
    scene = Scene(router(mode, seed=42), workers=5)
    taken: list[str] = []
    open_: list[str] = []
    for n in range(requests):
        family = chance("family", n, 6)
        keys = [0, family, *(100 * family + k for k in range(chance("shared", n, 8))), 10_000 + n, 20_000 + n]
        request_id = f"r{n}"
        sent = scene.arrive(request_id, isl=len(keys) * 64 - chance("tail", n, 64), keys=keys)
        taken.append(f"{request_id} {scene.where[request_id]} {sent.rule} {sent.overlap_blocks}")  # type: ignore[union-attr]
        open_.append(request_id)
        if chance("token", n, 4):
            scene.first_token(request_id)
            scene.stored(scene.where[request_id], keys[: len(keys) - 1])
        if chance("cut", n, 10) == 0:
            scene.removed(scene.where[request_id], keys[:4], lo=2)
        while len(open_) > 6 + chance("depth", n, 20):
            done = open_.pop(chance("end", n, len(open_)))
            lost = scene.where[done] not in scene.view.workers
            [scene.finish, scene.fail, scene.cancel][1 if lost else chance("how", n, 3)](done)
        if n == 100:
            scene.lost(1)
        if n == 200:
            scene.draining(3)
    for request_id in open_:
        scene.fail(request_id)
    scene.invariants.finish()
    return taken


def digest(mode: str) -> str:
    return hashlib.sha256("\n".join(decisions(mode)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("mode", DIGESTS)
def test_decisions_are_as_they_were(mode: str) -> None:
    assert digest(mode) == DIGESTS[mode]


def test_the_history_is_worth_a_digest() -> None:
    """Every rule of kv decides somewhere, caches matter, and the lost worker is not chosen after its loss."""
    taken = [line.split() for line in decisions("kv")]
    assert {rule for _, _, rule, _ in taken} == {"min", "tie"}
    assert sum(int(overlap) > 0 for *_, overlap in taken) > 100
    assert {worker for _, worker, _, _ in taken[:101]} == {"0", "1", "2", "3", "4"}
    assert {worker for _, worker, _, _ in taken[101:201]} == {"0", "2", "3", "4"}
    assert {worker for _, worker, _, _ in taken[201:]} == {"0", "2", "4"}


def test_decisions_do_not_depend_on_the_process(root: Path) -> None:
    here = Path(__file__).parent
    code = f"import {Path(__file__).stem} as t; print(*(t.digest(m) for m in t.DIGESTS))"
    path = os.pathsep.join(map(str, (root, root / "tests", here)))
    for hash_seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.split() == list(DIGESTS.values())
