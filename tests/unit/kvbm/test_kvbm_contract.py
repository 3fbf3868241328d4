"""Every eviction order and offload filter keeps the contract, those of docs/kvbm.md too; and these run from outside."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvbm_contract import EvictionContract, OffloadContract
from toy import toy

from policies.kvbm.build import EVICTIONS, OFFLOADS, KvSettings, build_eviction, build_offload
from policies.kvbm.eviction.order import EvictionOrder
from policies.kvbm.offload import OffloadFilter
from policies.kvbm.sketch import Sketch

DOCUMENT = Path(__file__).parents[3] / "docs" / "kvbm.md"


def recipes() -> dict[str, Any]:
    """What the Python of the document defines."""
    found: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, str(DOCUMENT), "exec"), found)
    return found


RECIPES = recipes()


def settings() -> KvSettings:
    sketch = Sketch(64)
    return KvSettings(sketch=lambda: sketch, min_lfu_count=1, decay_s=5.0, quota_blocks=30)


class TestLru(EvictionContract):
    def make(self) -> EvictionOrder:
        return build_eviction("lru", settings())


class TestLineage(EvictionContract):
    def make(self) -> EvictionOrder:
        return build_eviction("lineage", settings())


class TestMultiLru(EvictionContract):
    def make(self) -> EvictionOrder:
        return build_eviction("multi_lru", settings())


class TestFifo(EvictionContract):
    def make(self) -> EvictionOrder:
        return build_eviction("fifo", settings())


class TestRecipeDeepest(EvictionContract):
    def make(self) -> EvictionOrder:
        made: EvictionOrder = RECIPES["make_deepest"](settings())
        return made


class TestPassAll(OffloadContract):
    def make(self) -> OffloadFilter:
        return build_offload("pass_all", settings())


class TestPresence(OffloadContract):
    def make(self) -> OffloadFilter:
        return build_offload("presence", settings())


class TestPresenceLfu(OffloadContract):
    def make(self) -> OffloadFilter:
        return build_offload("presence_lfu", settings())


class TestFrequencyFilter(OffloadContract):
    def make(self) -> OffloadFilter:
        return build_offload("frequency_filter", settings())


class TestPriority(OffloadContract):
    def make(self) -> OffloadFilter:
        return build_offload("priority", settings())


class TestTenantQuota(OffloadContract):
    def make(self) -> OffloadFilter:
        return build_offload("tenant_quota", settings())


class TestRecipeFirstBlocks(OffloadContract):
    def make(self) -> OffloadFilter:
        made: OffloadFilter = RECIPES["make_first_blocks"](settings())
        return made


def test_no_policy_is_left_out() -> None:
    covered = {
        kind().make().name  # type: ignore[attr-defined]
        for name, kind in globals().items()
        if name.startswith("Test") and "Recipe" not in name
    }
    assert covered == {*EVICTIONS, *OFFLOADS} - {"presence_lfu"} | {"chained"}


def test_policies_of_other_packages_run_by_name(
    tmp_path: Path, install: Callable[[str, str, dict[str, str]], None]
) -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL))
    install("mine", code, {"eviction.deepest": "mine:make_deepest", "offload.first_blocks": "mine:make_first_blocks"})
    tier = [
        "workers.engine.block_size=64", "workers.engine.kv_blocks=3", "workers.kvbm.block_bytes=8388608",
        "workers.kvbm.cpu_cache_tokens=256", "workers.kvbm.cpu_trigger=on_evict",
        "workers.kvbm.cpu_eviction=deepest", "workers.kvbm.cpu_offload=first_blocks",
    ]  # fmt: skip
    run = toy("c20_tiers.jsonl", tmp_path / "run", *tier, key_tokens=64)
    assert run.report.meta.kvbm["hits"]["g2"] == 2


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, dict[str, str]], None]:
    """Put a package with entry points of `dynatwin.kv_policies` where Python finds it."""

    def put(name: str, code: str, points: dict[str, str]) -> None:
        site = tmp_path / "site"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{name}.py").write_text(code, encoding="utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        lines = "".join(f"{point} = {target}\n" for point, target in points.items())
        (info / "entry_points.txt").write_text(f"[dynatwin.kv_policies]\n{lines}", encoding="utf-8")
        monkeypatch.syspath_prepend(str(site))

    return put
