"""Shell scripts that start workers: one for each role, its command as a bash array with the origin of every flag.

Everything that a user could have named is quoted for the shell, and no comment can end early.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from aiconfig.candidate import Pool
from aiconfig.emit.plan import BOOTSTRAP_PORT, NIXL_PORT, PORT, Plan
from aiconfig.emit.served import router_policy
from aiconfig.emit.worker import TITLES, Node, Words, options_of, worker_items, worker_words
from aiconfig.emit.yamltext import dump, one_line
from policies.errors import CapabilityError

MARK = "aiconfig:"
"""Begins the line that says what flags cannot: role, GPU, replicas, formats."""
SGLANG_ROUTER: tuple[str, ...] = ("python3", "-m", "sglang_router.launch_router")
TRTLLM_ROUTER: tuple[str, ...] = ("trtllm-serve", "disaggregated")
VLLM_ROUTER: tuple[str, ...] = ("vllm-router",)
NAMES = "Names like prefill-0 stand for the addresses of your workers."


def launch_files(plan: Plan) -> Mapping[str, str]:
    """The scripts and option files by path."""
    files: dict[str, str] = {}
    for pool in plan.candidate.pools:
        files[f"launch/{pool.role}.sh"] = script(plan, pool)
        options = options_of(plan.flags, worker_items(plan, pool))
        if options.tree:
            head = [f"{TITLES[plan.engine]} options of a {pool.role} worker, read by launch/{pool.role}.sh"]
            files[f"launch/{pool.role}.yml"] = dump([options.tree], options.comments(), head)
    if plan.candidate.mode == "disagg":
        files.update(_front(plan))
    return files


def script(plan: Plan, pool: Pool) -> str:
    """The bash script that starts one worker of the pool."""
    words = worker_words(plan, pool)
    title, *notes = (f"# {one_line(line)}" for line in _head(plan, pool))
    lines = ["#!/usr/bin/env bash", title, f"# {MARK} {facts_line(plan, pool)}", *notes]
    lines += ["set -euo pipefail", *_setup(plan, pool), *array("command", plan.flags.program, words)]
    if plan.engine == "trtllm":
        extra = plan.flags["extra"].name
        lines.append(f'command+=({extra} "$(dirname "${{BASH_SOURCE[0]}}")/{pool.role}.yml")')
    lines += _hosts(plan, pool)
    lines.append(_exec(_prefix(plan, pool)))
    return "\n".join(lines) + "\n"


def array(name: str, program: tuple[str, ...], words: tuple[Words, ...]) -> list[str]:
    """A bash array of a command: a line for each flag, with its origin behind it."""
    rows = [(shlex.join(part.words), part.origin) for part in words]
    first = next((part for part in words if not part.words[0].startswith("-")), None)
    if first is not None and first is words[0]:  # the model stands in the program's line
        rows[0] = (f"{shlex.join(program)} {rows[0][0]}", rows[0][1])
    else:
        rows.insert(0, (shlex.join(program), ""))
    width = max(len(text) for text, _ in rows) + 2
    body = [f"  {text:<{width}}# {one_line(origin)}" if origin else f"  {text}" for text, origin in rows]
    return [f"{name}=(", *body, ")"]


def facts(plan: Plan, pool: Pool) -> dict[str, str]:
    """What flags cannot say of a pool, for whoever reads the file back."""
    return {
        "role": pool.role,
        "replicas": str(pool.replicas),
        "gpu": pool.gpu,
        "model": plan.candidate.model,
        "weights": pool.weights,
        "kv": pool.kv,
        "version": plan.version,
    }


def facts_line(plan: Plan, pool: Pool) -> str:
    """The same as one line, quoted as a shell would."""
    return " ".join(f"{key}={shlex.quote(value)}" for key, value in facts(plan, pool).items())


def _head(plan: Plan, pool: Pool) -> Iterator[str]:
    hosts = plan.hosts_of(pool)
    on = f"{pool.worker_gpus} x {pool.gpu}" + (f" on {hosts} hosts" if hosts > 1 else "")
    yield f"{TITLES[plan.engine]} {plan.version}, {pool.role} worker of {plan.candidate.name}: {on}"
    if pool.replicas > 1:
        yield (
            f"Start {pool.replicas} of these, each with GPUs of its own (CUDA_VISIBLE_DEVICES) and a PORT of its own "
            f"on a shared host."
        )
    if hosts > 1 and plan.engine == "trtllm":
        yield f"Start it once, within a Slurm allocation of {hosts} hosts: srun starts its ranks there."
    elif hosts > 1:
        yield f"Start it on each of the {hosts} hosts, NODE_RANK 0 to {hosts - 1} and LEADER the address of rank 0."
    if plan.candidate.mode == "agg" and pool.replicas > 1 and plan.candidate.serving.mode != "kv":
        yield "Put a load balancer in front that spreads requests evenly: that is what was predicted."
    for notice in plan.notices():
        yield f"note: {notice}"


def _setup(plan: Plan, pool: Pool) -> list[str]:
    if plan.engine != "vllm" or pool.role == "mixed":
        return []
    return [
        "# Where other workers fetch KV: an address that they reach, and a port of its own for each worker of a host.",
        'export VLLM_NIXL_SIDE_CHANNEL_HOST="${NIXL_HOST:-127.0.0.1}"',
        f'export VLLM_NIXL_SIDE_CHANNEL_PORT="${{NIXL_PORT:-{NIXL_PORT}}}"',
    ]


def _hosts(plan: Plan, pool: Pool) -> list[str]:
    hosts = plan.hosts_of(pool)
    if hosts == 1 or plan.engine == "trtllm":
        return []
    ask = [f': "${{NODE_RANK:?0 to {hosts - 1}}}" "${{LEADER:?address of the host with rank 0}}"']
    flags = plan.flags
    if plan.engine == "sglang":
        named = f'{flags["host_rank"].name} "$NODE_RANK" {flags["leader"].name} "$LEADER:20000"'
        return [*ask, f"command+=({flags['hosts'].name} {hosts} {named})"]
    local = local_ranks(plan, pool)
    headless = f'[ "$NODE_RANK" = 0 ] || command+=({flags["headless"].name})'
    if local:
        start = f'{flags["dp_start"].name} "$((NODE_RANK * {local}))"'
        named = f'{flags["dp_local"].name} {local} {flags["dp_leader"].name} "$LEADER" {start}'
        return [*ask, f"command+=({named})", headless]
    named = f'{flags["host_rank"].name} "$NODE_RANK" {flags["leader"].name} "$LEADER"'
    return [*ask, f"command+=({flags['hosts'].name} {hosts} {named})", headless]


def local_ranks(plan: Plan, pool: Pool) -> int:
    """vLLM over several hosts: data-parallel ranks of one host, 0 if one rank takes more than a host. Refused where no
    flag says it."""
    layout, per_host = pool.layout, plan.gpus_per_host(pool)
    rank_gpus = layout.tp * layout.pp
    if layout.dp > 1 and per_host % rank_gpus == 0:
        return per_host // rank_gpus
    if layout.dp > 1:
        raise CapabilityError(
            f"vllm: {layout.dp} data-parallel ranks of {rank_gpus} GPUs do not fill hosts of {per_host} evenly, which "
            f"is not rendered; take tp*pp that divides {per_host}"
        )
    if "hosts" not in plan.flags:
        raise CapabilityError(
            f"vllm {plan.flags.version} starts a rank over several hosts with Ray, which is not rendered; take 0.12.0 "
            f"or later"
        )
    return 0


def _prefix(plan: Plan, pool: Pool) -> str:
    hosts = plan.hosts_of(pool)
    if hosts == 1 or plan.engine != "trtllm":
        return ""
    return f"srun -N {hosts} --ntasks-per-node {plan.gpus_per_host(pool)} --mpi=pmix trtllm-llmapi-launch "


def _front(plan: Plan) -> dict[str, str]:
    """What stands in front of prefill and decode workers."""
    prefill, decode = plan.candidate.pools
    urls = {pool.role: [f"{pool.role}-{n}" for n in range(pool.replicas)] for pool in (prefill, decode)}
    if plan.engine == "trtllm":
        tree = trtllm_router(urls["prefill"], urls["decode"])
        return {"launch/router.yml": dump([tree], head=[f"Start with: {' '.join(TRTLLM_ROUTER)} -c router.yml", NAMES])}
    return {"launch/router.sh": _router_script(plan, urls)}


def _router_script(plan: Plan, urls: Mapping[str, list[str]]) -> str:
    lines = ["#!/usr/bin/env bash", f"# Router in front of prefill and decode workers. {NAMES}"]
    program, mode, bootstrap = SGLANG_ROUTER, "--pd-disaggregation", [str(BOOTSTRAP_PORT)]
    if plan.engine == "vllm":
        lines.append("# vLLM itself brings none; this one is of the vLLM project: pip install vllm-router")
        program, mode, bootstrap = VLLM_ROUTER, "--vllm-pd-disaggregation", []
    words = [
        Words(key="pd", words=(mode,), origin=""),
        Words(key="policy", words=("--policy", router_policy(plan.candidate.serving)), origin="as was predicted"),
    ]
    for url in urls["prefill"]:
        words.append(Words(key="p", words=("--prefill", f"http://{url}:{PORT}", *bootstrap), origin=""))
    for url in urls["decode"]:
        words.append(Words(key="d", words=("--decode", f"http://{url}:{PORT}"), origin=""))
    lines += ["set -euo pipefail", *array("command", program, tuple(words)), _exec("")]
    return "\n".join(lines) + "\n"


def _exec(prefix: str) -> str:
    """The line that starts the command where the environment says."""
    address = '--host "${HOST:-0.0.0.0}" --port "${PORT:-' + str(PORT) + '}"'
    return f'exec {prefix}"${{command[@]}}" {address} "$@"'


def trtllm_router(prefill: list[str], decode: list[str]) -> Node:
    """The file of TensorRT-LLM's router, from the hosts of both roles."""
    servers = {"context_servers": _servers(prefill), "generation_servers": _servers(decode)}
    return {"hostname": "0.0.0.0", "port": PORT, **servers}


def _servers(names: list[str]) -> Node:
    return {"num_instances": len(names), "urls": [f"{name}:{PORT}" for name in names]}
