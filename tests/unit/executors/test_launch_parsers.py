"""What `twin serve --live` starts on GPU hosts, before the argument parsers of real engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_parsers import before

from executors.engines.launch import Launch, Place, Ports, launch
from twin.config import EngineConfig, WorkerGroup

PORTS = Ports(host="127.0.0.1", http=8000, events=8001, replay=8003, side=8005)


def start(kind: str, role: str, folder: Path, *, nextn: int = 0) -> Launch:
    engine = EngineConfig(kind=kind, block_size=32, max_num_seqs=64, max_model_len=4096, nextn=nextn)
    group = WorkerGroup(name="w", role=role, tp=2, count=1, kv="fp8", weights="fp8", engine=engine)
    place = Place(name="w-0", model="m", served_as="s", ports=PORTS, folder=str(folder), gpus=("0", "1"))
    return launch(group, place)


@pytest.mark.parametrize("kind", [pytest.param("vllm", marks=pytest.mark.live), "sglang"])
def test_the_engine_takes_every_line_and_means_what_we_meant(kind: str, tmp_path: Path) -> None:
    """All in one process of the engine's: its imports take many seconds."""
    cases = [(role, nextn) for role in ("mixed", "prefill", "decode") for nextn in (0, 2)]
    lines = []
    for role, nextn in cases:
        argv = [*start(kind, role, tmp_path, nextn=nextn).argv]
        argv = argv[2:] if argv[0] == "-m" else argv
        lines.append(argv if kind == "sglang" else ["serve", *argv])
    _, (*told, wrong) = before(kind, [*lines, [*lines[0], "--no-such-flag", "1"]])
    assert "refused" in wrong
    for (role, _), one in zip(cases, told, strict=True):
        assert "refused" not in one, one
        wanted = {"port": 8000, "tensor_parallel_size": 2, "max_num_seqs": 64}
        if kind == "sglang":
            wanted = {"port": 8000, "tp_size": 2, "max_running_requests": 64, "page_size": 32}
            roles = {"mixed": "null", "prefill": "prefill", "decode": "decode"}
            assert one["disaggregation_mode"] == roles[role]
        assert {key: one[key] for key in wanted} == wanted
