"""Every router mode keeps the contract: plain, with a queue, with limits on load, with sessions, with all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import SETTINGS, router_settings, worker
from contract.policy_contract import RouterContract

from policies.cluster.controller import Policy
from policies.cluster.events import WorkerUp
from policies.router.affinity import AffinitySettings
from policies.router.build import MODES, build
from policies.router.overload import BusySettings
from policies.router.queue import QueueClass, QueueSettings

SHORT = QueueClass(name="short", family="default", min_tokens=0, quantum_tokens=500, order="fcfs", waits=True)
QUEUE = QueueSettings(
    prefill_busy_share=None,
    prefill_busy_tokens=1500,
    busy_worker_share=1.0,
    requests_per_worker=None,
    tokens_per_worker=None,
    max_wait_s=None,
    classes=(SHORT, replace(SHORT, name="long", min_tokens=600, order="wspt")),
)
BUSY = BusySettings(decode_blocks_share=0.2, engine_running=4, engine_queue=4)
BOND = AffinitySettings(bond="soft", ttl_s=0.5 + 0.5, sessions=8)

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "explained": {"explain": True},
    "queue": {"queue": QUEUE},
    "busy": {"busy": BUSY},
    "soft": {"affinity": BOND},
    "hard": {"affinity": replace(BOND, bond="hard"), "busy": BUSY},
    "all": {"queue": QUEUE, "busy": BUSY, "affinity": BOND, "explain": True, "prefill_tokens_per_s": 5000.0},
}


@pytest.mark.parametrize("variant", VARIANTS, scope="class")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "thunder"], scope="class")
class TestModes(RouterContract):
    """All modes in all variants."""

    @pytest.fixture(autouse=True)
    def _chosen(self, mode: str, variant: str) -> None:
        self.settings = router_settings(mode, **VARIANTS[variant])

    def make(self) -> Policy:
        return build(self.settings)


KV: tuple[dict[str, object], ...] = (
    {"tie_break": "least_recent"},
    {"router_temperature": 0.5},
    {"assume_kv_reuse": False},
    {"track_output_blocks": True},
)


@pytest.mark.parametrize("change", KV)
class TestKv(RouterContract):
    """What mode kv can be told to do."""

    @pytest.fixture(autouse=True)
    def _chosen(self, change: dict[str, object]) -> None:
        self.settings = router_settings("kv", **change)

    def make(self) -> Policy:
        return build(self.settings)


GUESSES: tuple[dict[str, object], ...] = (
    {"use_kv_events": False, "approximate_ttl_s": 0.003},
    {"use_kv_events": False, "index_policy": "lru"},
    {"use_kv_events": False, "index_policy": "lru", "queue": QUEUE, "busy": BUSY, "affinity": BOND, "explain": True},
    {"predicted_ttl_s": 0.003},
    {"predicted_ttl_s": 0.003, "queue": QUEUE, "busy": BUSY, "affinity": BOND, "explain": True},
)


@pytest.mark.parametrize("change", GUESSES)
class TestGuesses(RouterContract):
    """Mode kv that guesses what is cached: what it remembers ends with time, or with the room of few blocks."""

    @pytest.fixture(autouse=True)
    def _chosen(self, change: dict[str, object]) -> None:
        self.settings = router_settings("kv", **change)

    def make(self) -> Policy:
        return build(self.settings)

    def workers(self) -> list[WorkerUp]:
        return [worker(n, total_blocks=24) for n in range(4)]


PRESSED = replace(SETTINGS.programs, tick_s=0.005, force_resume_s=0.05)
THUNDER: dict[str, dict[str, object]] = {
    "plain": {},
    "pressed": {"programs": PRESSED},
    "explained": {"programs": PRESSED, "explain": True, "tie_break": "least_recent"},
    "busy": {"programs": PRESSED, "busy": BUSY, "affinity": BOND},
}


@pytest.mark.parametrize("variant", THUNDER)
class TestThunder(RouterContract):
    """Programs in pools of 24 blocks, so that they are paused, resumed, forced and forgotten all the time."""

    @pytest.fixture(autouse=True)
    def _chosen(self, variant: str) -> None:
        self.settings = router_settings("thunder", **THUNDER[variant])

    def make(self) -> Policy:
        return build(self.settings)

    def workers(self) -> list[WorkerUp]:
        return [worker(n, total_blocks=24) for n in range(4)]
