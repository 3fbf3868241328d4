"""Whose content a branch of blocks is, where requests name their tenant.

Tenants share no content, so a branch is of the tenant whose request brought it in. Kept as long as the branch lives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from policies.cluster.blocks import BlockRun, Branch


class Owners:
    """Tenants by branch, of one run. `known`: some request named its tenant."""

    __slots__ = ("_tenants", "known")

    def __init__(self) -> None:
        self.known = False
        self._tenants: WeakKeyDictionary[Branch, str] = WeakKeyDictionary()

    def brings(self, tenant: str, branches: Iterable[Branch]) -> None:
        """A request of a tenant has this content."""
        self.known = True
        for branch in branches:
            self._tenants.setdefault(branch, tenant)

    def of(self, branch: Branch) -> str | None:
        """Whose content this is; None where nobody said."""
        return self._tenants.get(branch)


class Shares:
    """Blocks in one tier by tenant."""

    __slots__ = ("_blocks", "_owners")

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        self._blocks: Counter[str] = Counter()

    def change(self, is_store: bool, runs: Iterable[BlockRun]) -> None:
        """Blocks came into the tier, or left it."""
        for branch, lo, hi in runs:
            tenant = self._owners.of(branch)
            if tenant is not None:
                self._blocks[tenant] += hi - lo if is_store else lo - hi

    def blocks_of(self, tenant: str, on_their_way: Iterable[BlockRun]) -> int:
        """Blocks of a tenant, those that are on their way into the tier included."""
        coming = sum(hi - lo for branch, lo, hi in on_their_way if self._owners.of(branch) == tenant)
        return self._blocks[tenant] + coming

    def clear(self) -> None:
        """The tier has lost everything."""
        self._blocks.clear()

    def all(self) -> dict[str, int]:
        """Blocks by tenant, those that have any."""
        return {tenant: blocks for tenant, blocks in sorted(self._blocks.items()) if blocks}
