"""How long it takes until a prompt whose blocks come from below can go on: loading and computing, one after the other
or overlapped, in one hop or two.

Formulas for loads that are alone on their links; shared links are the world's to simulate.
"""

from __future__ import annotations


def inter_layer_s(load_s: float, compute_s: float) -> float:
    """Everything is loaded, then the rest is computed."""
    return load_s + compute_s


def intra_layer_s(load_s: float, compute_s: float, layers: int) -> float:
    """A layer is computed as soon as it has come; the next one comes meanwhile."""
    load, compute = load_s / layers, compute_s / layers
    return load + (layers - 1) * max(load, compute) + compute


def direct_s(load_bytes: int, disk_bytes_per_s: float, host_bytes_per_s: float) -> float:
    """From disk to the device in one hop, at the pace of the slower link."""
    return load_bytes / min(disk_bytes_per_s, host_bytes_per_s)


def bounce_s(load_bytes: int, disk_bytes_per_s: float, host_bytes_per_s: float) -> float:
    """Through host memory, all of it on one hop before any of it on the next."""
    return load_bytes / disk_bytes_per_s + load_bytes / host_bytes_per_s


def piped_bounce_s(blocks: int, block_bytes: int, disk_bytes_per_s: float, host_bytes_per_s: float) -> float:
    """Through host memory, block by block: one is on the second hop while the next is on the first."""
    disk_s, host_s = block_bytes / disk_bytes_per_s, block_bytes / host_bytes_per_s
    return disk_s + host_s + (blocks - 1) * max(disk_s, host_s)
