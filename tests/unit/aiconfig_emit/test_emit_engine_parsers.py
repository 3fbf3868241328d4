"""Emitted commands before the engines' own argument parsers, and the table of flags before the engines' own sources.

Engines need gigabytes, so these run only where somebody says where they are:
DYNATWIN_VLLM_PYTHON, DYNATWIN_SGLANG_PYTHON: an interpreter that has the engine (a CPU build will do);
DYNATWIN_ENGINE_SOURCES: a folder with unpacked wheels named like vllm-0.32.0 and sglang-0.5.23.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
from emit_builders import agg, disagg, plan, wide
from engine_parsers import before, installed

from aiconfig.candidate import Candidate
from aiconfig.emit.bench import words as bench_words
from aiconfig.emit.flags import find_flags, releases
from aiconfig.emit.plan import Plan
from aiconfig.emit.worker import worker_words
from twin.perf.layout import Layout

CANDIDATES = {
    "agg": agg(),
    "kv16": agg(kv="bf16", weights="bf16"),
    "pipeline": agg(layout=Layout(tp=4, pp=2), nextn=2),
    "wide": wide(),
    "prefill": disagg(),
}


def of(engine: str, name: str) -> Plan:
    made = CANDIDATES[name]
    candidate = Candidate(model=made.model, engine=engine, pools=made.pools, nextn=made.nextn)
    return plan(candidate, engine_version=installed(engine))


def words(made: Plan) -> list[str]:
    return [word for part in worker_words(made, made.candidate.pools[0]) for word in part.words]


@pytest.mark.parametrize("name", CANDIDATES)
def test_vllm_takes_the_command_and_means_what_we_meant(name: str) -> None:
    made = of("vllm", name)
    pool = made.candidate.pools[0]
    _, (told, wrong) = before("vllm", [["serve", *words(made)], ["serve", *words(made), "--no-such-flag", "1"]])
    assert "refused" not in told, told
    assert "refused" in wrong
    wanted = {
        "model_tag": made.loads,
        "tensor_parallel_size": pool.layout.tp,
        "pipeline_parallel_size": pool.layout.pp,
        "data_parallel_size": pool.layout.dp,
        "enable_expert_parallel": pool.layout.ep > 1,
        "max_num_seqs": pool.max_num_seqs,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        "max_model_len": made.max_model_len.value,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.9,
    }
    assert {key: told[key] for key in wanted} == wanted


def test_the_client_of_vllm_takes_the_benchmark() -> None:
    made = of("vllm", "agg")
    line = [word for part in bench_words(made) for word in part.words]
    _, (told, wrong) = before("vllm", [["bench", *line], ["bench", *line, "--no-such-flag", "1"]])
    assert "refused" not in told, told
    assert "refused" in wrong
    assert (told["max_concurrency"], told["num_prompts"], told["random_input_len"]) == (32, 320, 3600)


@pytest.mark.parametrize("name", CANDIDATES)
def test_sglang_takes_the_command_and_means_what_we_meant(name: str) -> None:
    made = of("sglang", name)
    pool = made.candidate.pools[0]
    _, (told, wrong) = before("sglang", [words(made), [*words(made), "--no-such-flag", "1"]])
    assert "refused" not in told, told
    assert "refused" in wrong
    wanted = {
        "model_path": made.loads,
        "tp_size": pool.layout.ranks,
        "pp_size": pool.layout.pp,
        "ep_size": pool.layout.ep,
        "max_running_requests": pool.max_num_seqs * pool.layout.dp,
        "chunked_prefill_size": pool.max_num_batched_tokens * pool.layout.dp,
        "context_length": made.max_model_len.value,
    }
    assert {key: told[key] for key in wanted} == wanted


# ---------------------------------------------------------------- sources

SOURCES = os.environ.get("DYNATWIN_ENGINE_SOURCES")


@cache
def source(engine: str, release: str) -> str:
    if not SOURCES:
        pytest.skip("needs unpacked wheels of the engines: name their folder in DYNATWIN_ENGINE_SOURCES")
    folder = Path(SOURCES) / f"{engine}-{release}"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py")))


def has(text: str, flag: str) -> bool:
    """Whether a source declares a flag: as a string, or (SGLang) as a field that a flag is made of."""
    field = flag.removeprefix("--").replace("-", "_")
    return f'"{flag}"' in text or f"'{flag}'" in text or bool(re.search(rf"^    {field}: A\[", text, re.M))


@pytest.mark.parametrize(
    ("engine", "release"), [(engine, release) for engine in ("vllm", "sglang") for release in releases(engine)]
)
def test_every_flag_and_word_of_the_table_is_in_the_release_and_none_before_it(engine: str, release: str) -> None:
    text, flags = source(engine, release), find_flags(engine, release)
    for flag in flags.by_key.values():
        for name in (flag.name, *flag.also):
            begins = any(full.startswith(f"{name}-") for full in (flag.name, *flag.also) if name)
            assert not name or has(text, name) or begins, f"{engine} {release} has no {name}"
        for word in flag.spell.values():
            assert f'"{word}"' in text, f"{engine} {release} has no word {word} for {flag.name}"
    earlier = releases(engine)[: releases(engine).index(release)]
    if earlier:
        before_it = source(engine, earlier[-1])
        old = {name for flag in find_flags(engine, earlier[-1]).by_key.values() for name in (flag.name, *flag.also)}
        new = {flag.name for flag in flags.by_key.values()} - old
        assert not [name for name in new if has(before_it, name)], "since is later than it could be"
