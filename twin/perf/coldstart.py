"""How long a worker takes to come up: boot, weights over their load path, engine warm-up.

Weights are read once for each rank that holds them, all ranks side by side. By the formula the slowest stretch of the
path sets the pace, and nobody notices anybody; over links of the run the simulation says how long it takes. Boot and
warm-up are constants of the configuration. It is an estimate, and says of what it is made.
"""

from __future__ import annotations

from typing import Final, Literal

from policies.frozen import frozen
from twin.perf.layout import rank_weight_bytes, stages
from twin.perf.memory import Placement

Source = Literal["disk", "object", "peer"]

PINNED_COPY_SHARE: Final = 0.85
"""Of the host link's rate, what copies from pinned memory reach."""


@frozen
class Startup:
    """One start by the formula, in parts that follow each other."""

    boot_s: float
    load_s: float
    warmup_s: float
    load_bytes: int  # of all ranks
    source: Source
    limit: str  # the stretch that sets the pace of loading

    @property
    def total_s(self) -> float:
        """From the order to the first request."""
        return self.boot_s + self.load_s + self.warmup_s

    def label(self) -> str:
        """For people: the parts and what limits loading."""
        return (
            f"{self.total_s:.1f} s to start: boot {self.boot_s:g}, {self.load_bytes / 1e9:.1f} GB of weights from "
            f"{self.source} {self.load_s:.1f} by formula (limited by the {self.limit}), "
            f"warm-up {self.warmup_s:g} (estimates)"
        )


@frozen
class LinkedStart:
    """One start whose weights cross links of the run: what is known of it before it is simulated."""

    boot_s: float
    warmup_s: float
    rank_bytes: tuple[int, ...]
    source: Source
    path: tuple[str, ...]  # names of the links, from the GPU outwards

    @property
    def fixed_s(self) -> float:
        """What the start takes beside its weights."""
        return self.boot_s + self.warmup_s

    def label(self) -> str:
        """For people: the parts, and which links the weights cross."""
        return (
            f"to start: boot {self.boot_s:g} s, {sum(self.rank_bytes) / 1e9:.1f} GB of weights from {self.source} "
            f"over {'+'.join(self.path)} (simulated links), warm-up {self.warmup_s:g} s (estimates)"
        )


def startup(
    placed: Placement, *, source: Source, read_bytes_per_s: float | None, boot_s: float, warmup_s: float
) -> Startup:
    """The start of one worker.

    `read_bytes_per_s` is what the whole worker reads from disk or object store at; it is not used for `peer`, where
    each rank is sent its weights by its counterpart over the network (or the cap that is given, if that is less).
    """
    per_rank = rank_bytes(placed)
    total = sum(per_rank)
    largest = max(per_rank)
    pace = [(largest / (placed.gpu.pcie_bytes_per_s * PINNED_COPY_SHARE), "host link")]
    if source == "peer":
        pace = [(largest / placed.gpu.network_bytes_per_s(), "network card")]
        if read_bytes_per_s is not None:
            pace.append((total / read_bytes_per_s, "peer"))
    elif read_bytes_per_s is not None:
        pace.append((total / read_bytes_per_s, "disk" if source == "disk" else "object store"))
        if source == "object" and placed.gpu.nic_bytes_per_s is not None:
            pace.append((largest / placed.gpu.nic_bytes_per_s, "network card"))
    load_s, limit = max(pace)
    return Startup(boot_s=boot_s, load_s=load_s, warmup_s=warmup_s, load_bytes=round(total), source=source, limit=limit)


def rank_bytes(placed: Placement) -> list[float]:
    """Weights of each rank of the worker."""
    layout = placed.layout
    return [
        rank_weight_bytes(placed.model, layout, placed.weights, stage)
        for stage in stages(placed.model, layout.pp)
        for _ in range(layout.ranks)
    ]
