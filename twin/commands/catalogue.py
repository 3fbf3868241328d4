"""`twin models` and `twin hardware`: what can be named by --model and --gpu, with the figures behind the names."""

from __future__ import annotations

from collections.abc import Sequence

from twin.commands.options import Json
from twin.errors import Exit

GIB = 2**30


def models(json: Json = False) -> int:
    """List the models that can be replayed, with their sizes."""
    from twin.perf.memory import kv_shape
    from twin.perf.models import models as known

    table = [("model", "weights", "active", "layers", "KV bytes/token (BF16)", "")]
    rows = []
    for name, model in known().items():
        shape = kv_shape(model, "bf16")
        kv_bytes = shape.sequence_bytes(1) - shape.state_bytes
        alias_of = None if name == model.name else model.name
        rows.append(
            {
                "name": name,
                "params": model.params(),
                "active_params": model.active_params(),
                "layers": model.layers,
                "kv_bytes_per_token": kv_bytes,
                "alias_of": alias_of,
            }
        )
        sizes = (f"{model.params() / 1e9:,.1f} B", f"{model.active_params() / 1e9:,.1f} B")
        table.append((name, *sizes, str(model.layers), f"{kv_bytes:,}", f"same as {alias_of}" if alias_of else ""))
    return _print_json(rows) if json else _print_table(table)


def hardware(json: Json = False) -> int:
    """List the GPUs that can be simulated, with their data-sheet rates."""
    from dataclasses import asdict

    from twin.perf.hardware import gpus

    found = gpus()
    if json:
        return _print_json([asdict(gpu) for gpu in found.values()])
    table = [("gpu", "memory GiB", "TB/s", "BF16 TFLOPS", "FP8 TFLOPS", "link GB/s", "GPUs/domain", "source")]
    for gpu in found.values():
        fp8 = "-" if gpu.fp8_flops is None else f"{gpu.fp8_flops / 1e12:,.0f}"
        link = (gpu.scale_up_bytes_per_s or gpu.pcie_bytes_per_s) / 1e9
        table.append(
            (
                gpu.name,
                f"{gpu.mem_bytes / GIB:.1f}",
                f"{gpu.mem_bytes_per_s / 1e12:.2f}",
                f"{gpu.bf16_flops / 1e12:,.0f}",
                fp8,
                f"{link:,.0f}",
                str(gpu.domain_gpus),
                gpu.source,
            )
        )
    return _print_table(table)


def _print_json(rows: Sequence[object]) -> int:
    from json import dumps

    print(dumps(rows, indent=1))
    return Exit.OK


def _print_table(rows: Sequence[Sequence[str]]) -> int:
    """Print aligned columns below the first row: numbers to the right, the first and the last column to the left."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    last = len(widths) - 1
    for row in rows:
        cells = [
            cell.ljust(w) if at in (0, last) else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())
    return Exit.OK
