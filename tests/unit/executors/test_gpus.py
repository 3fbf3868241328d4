"""GPUs of workers: each its own, none twice, and back when its process is gone."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from executors.gpus import GpuAllocator, gpus_here
from executors.starter import HostStarter, Model
from policies.errors import CapabilityError
from twin.config import WorkerGroup


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def starter(folder: Path, *groups: WorkerGroup, gpus: tuple[str, ...]) -> HostStarter:
    named = {group.name: group for group in groups}
    model = Model(checkpoint="/models/m", served_as="m")
    return HostStarter(named, model, {"vllm": Path("/opt/python")}, lambda: 0.0, folder, gpus=gpus)


def test_workers_have_gpus_of_their_own_whoever_starts_them() -> None:
    one, other = GpuAllocator("0123"), GpuAllocator("0123")
    assert one.take("a", 2) == ("0", "1")
    assert other.take("b", 1) == ("2",)
    with pytest.raises(CapabilityError, match="worker c needs 2 GPUs, and 1 of the 4 here are free"):
        other.take("c", 2)
    one.release("a")
    assert other.take("c", 2) == ("0", "1")
    other.close()
    assert one.take("d", 4) == ("0", "1", "2", "3")
    one.close()


def test_where_none_are_known_engines_look_for_themselves() -> None:
    assert GpuAllocator(()).take("a", 8) == ()


@pytest.mark.parametrize(
    ("environment", "files", "found"),
    [
        ({}, ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"), ("2", "10")),
        ({"CUDA_VISIBLE_DEVICES": "4, GPU-8f"}, ("nvidia0",), ("4", "GPU-8f")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ("nvidia0",), ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ("nvidia0",), ()),
        ({}, (), ()),
    ],
)
def test_gpus_are_those_that_cuda_may_see(
    tmp_path: Path, environment: dict[str, str], files: tuple[str, ...], found: tuple[str, ...]
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    assert gpus_here(environment, tmp_path) == found


def test_a_plan_gives_each_worker_its_gpus_and_leaves_nothing(tmp_path: Path) -> None:
    groups = WorkerGroup(name="p", role="prefill", tp=2, count=1), WorkerGroup(name="d", role="decode", tp=1, count=2)
    folder = tmp_path / "logs"
    for _ in range(2):
        planned = starter(folder, *groups, gpus=tuple("0123")).plan()
        assert [(one.name, one.env["CUDA_VISIBLE_DEVICES"]) for one in planned] == [
            ("p-0", "0,1"), ("d-0", "2"), ("d-1", "3")
        ]  # fmt: skip
    assert not folder.exists()
    with pytest.raises(CapabilityError, match="worker d-1 needs 1 GPUs, and 0 of the 3 here are free"):
        starter(folder, *groups, gpus=tuple("012")).plan()


def test_workers_on_the_cpu_take_none(tmp_path: Path) -> None:
    (planned,) = starter(tmp_path, WorkerGroup(name="w", tp=1, count=1, on_cpu=True), gpus=("0",)).plan()
    assert "CUDA_VISIBLE_DEVICES" not in planned.env
