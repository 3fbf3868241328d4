"""Turns on a Ray cluster of several nodes (all on this machine): the answer of one process, with and without losses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiconfig_eval_builders import candidate, workload

from aiconfig.estimate import Load
from aiconfig.finalists import Turn
from aiconfig.load_point import Searched
from aiconfig.reasons import Rejection
from aiconfig.request import SearchRequest
from aiconfig.spread import on_ray, simulated_turn
from policies.errors import ConfigError

ray = pytest.importorskip("ray", reason="a cluster needs ray: pip install 'dynatwin[distributed]'")
pytestmark = [pytest.mark.optional, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

REQUEST = SearchRequest(workload=workload(), load=Load(users=4))
TURNS = [
    Turn(request=REQUEST, candidate=candidate(engine, mode, replicas=replicas), load=Load(users=4))
    for engine in ("vllm", "sglang")
    for mode in ("agg", "disagg")
    for replicas in (1, 2)
]


@pytest.fixture
def cluster(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """A head without room for work, and two nodes with one core each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(root), str(root / "tests")]))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        made.add_node(num_cpus=1)
    made.wait_for_nodes()
    yield made
    made.shutdown()


def test_a_cluster_gives_the_answer_of_one_process(cluster) -> None:
    bad = Turn(request=REQUEST, candidate=candidate(model="llama-3.1-405b"), load=Load(users=4))
    told: list[tuple[int, int]] = []
    outcomes = on_ray(cluster.address, lambda over, all_: told.append((over, all_)))([*TURNS, bad])
    assert list(outcomes[:-1]) == [simulated_turn(turn) for turn in TURNS]
    assert isinstance(outcomes[-1], Rejection)
    assert told[-1] == (9, 9)
    assert not ray.is_initialized(), "whoever joins leaves again"


def test_a_node_that_is_lost_has_its_turns_run_elsewhere(cluster) -> None:
    lost = iter([cluster.list_all_nodes()[-1]])

    def lose_one(over: int, all_: int) -> None:
        for node in lost:
            cluster.remove_node(node, allow_graceful=False)

    outcomes = on_ray(cluster.address, lose_one)(TURNS)
    assert all(isinstance(outcome, Searched) for outcome in outcomes)
    assert list(outcomes) == [simulated_turn(turn) for turn in TURNS]


def test_no_cluster_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no cluster there") as refused:
        on_ray("127.0.0.1:1")(TURNS)
    assert "\n" not in str(refused.value)
