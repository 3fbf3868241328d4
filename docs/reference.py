"""Writes docs/cli.md, docs/aiconfig-cli.md and docs/config.md from the command lines and the configuration themselves.

    python docs/reference.py          writes them
    python docs/reference.py --check  says whether they are up to date, and writes nothing

A test runs the check, so the documents cannot drift from what they describe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiconfig.commands.tree import PLACES
from aiconfig.commands.tree import root as aiconfig_root
from twin.commands.tree import BUILT_IN, root
from twin.config_file import MANY
from twin.config_read import FLAGS, TABLES
from twin.config_schema import LARGEST, NAMES, Entry, keys_of
from twin.config_values import toml_value
from twin.errors import Exit
from twin.perf.build import MODELS

HERE = Path(__file__).parent

CLI_HEAD = """# The `twin` command

Made by `python docs/reference.py` from the command itself. Results go to stdout; progress and notices go to stderr.
An error is one line on stderr: what, where, the value, the limit, the next step.

| exit code | meaning |
|---|---|
"""
AICONFIG_HEAD = """# The `aiconfig` command

Made by `python docs/reference.py` from the command itself; [aiconfig.md](aiconfig.md) says how to use it. Results go to
stdout; progress and notices go to stderr. An error is one line on stderr: what, where, the value, the limit, the next
step. Exit codes are those of [`twin`](cli.md): 0 something keeps the limits, 3 nothing does, 2 bad input, 130 Ctrl-C.
"""
EXITS = {
    Exit.OK: "done",
    Exit.BUG: "a bug of ours; `--debug` anywhere on the line shows the traceback",
    Exit.BAD_INPUT: "bad input or configuration",
    Exit.MISSED: "done, and the SLA (or a check) is not met",
    Exit.LIVE_CUT: "a live stop had to cut streams",
    Exit.INTERRUPTED: "Ctrl-C; what there is was kept",
}

CONFIG_HEAD = """# Configuration

Made by `python docs/reference.py` from `twin/config.py` and `twin/config_live.py`, where the defaults live.

`twin replay --config FILE` reads one TOML file. Flags win over the file, `--set KEY=VALUE` wins over both, and
`--show-config` prints every value with where it came from. `config.toml` in the folder of a run is complete: replaying
it gives the same run.

```toml
seed = 7

[trace]
path = "traces/azure.parquet"   # relative to this file

[[workers]]                     # one table for each group of equal workers
count = 8
engine = "vllm"                 # short for [workers.engine] kind = "vllm"

[workers.latency]               # or in short: latency = "roofline"
model = "fixed"
prefill_s_per_token = 0.001     # a latency model's own keys stand beside its name
decode_s = 0.01

[router]
mode = "least-loaded"

[sla]
limits = "ttft=200ms,itl=50ms@p95"
```

* With one group of workers, `--workers 8` and `--set workers.engine.block_size=32` mean that group. With several,
  name them: `--set workers.NAME.count=8`.
* Mode names are written with dashes; underscores and capitals are accepted.
* `trace.concurrency` implies `arrivals = "closed"`.
* `[live]` and the tables below it are of serving alone (`twin serve`, `twin worker`): a replay takes a file that has
  them, and passes over them. What a simulation and a live cluster mean alike is one setting of both:
  `disaggregation.lease_s`, `resilience.grace_s`, `drain_timeout_s` and `response_inactivity_s`, retries, canaries and
  breakers.
* An unknown key is refused, with the nearest name and the table that has it. So is an option that changes nothing in
  the run at hand (a parameter of `kv` under `round-robin`, say); with `allow_no_effect` it is listed in the report.
"""


def cli() -> str:
    """docs/cli.md."""
    exits = "".join(f"| {code.value} | {EXITS[code]} |\n" for code in Exit)
    tree = root()
    commands = (part for name in BUILT_IN for part in _command(f"twin {name}", tree.get_command(None, name)))
    return CLI_HEAD + exits + "".join(commands)


def aiconfig_cli() -> str:
    """docs/aiconfig-cli.md."""
    tree = aiconfig_root()
    commands = (part for name in PLACES for part in _command(f"aiconfig {name}", tree.get_command(None, name)))
    return AICONFIG_HEAD + "".join(commands)


def _command(path: str, command: Any) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner:
        for name, sub in inner.items():
            yield from _command(f"{path} {name}", sub)
        return
    arguments = [param for param in command.params if not param.opts[0].startswith("-")]
    options = [param for param in command.params if param.opts[0].startswith("-")]
    usage = " ".join(_argument(param) for param in arguments)
    yield f"\n## {path}\n\n{command.help}\n\n    {path} {usage + ' ' if usage else ''}[OPTIONS]\n\n"
    yield "| option | meaning |\n|---|---|\n"
    for param in (*arguments, *options):
        yield f"| `{_shown(param)}` | {param.help}{_default(param)} |\n"


def _argument(param: Any) -> str:
    return str(param.metavar) if param.required else f"[{param.metavar}]"


def _shown(param: Any) -> str:
    if not param.opts[0].startswith("-"):
        return str(param.metavar)
    return f"{', '.join(param.opts)}{f' {param.metavar}' if param.metavar else ''}"


def _default(param: Any) -> str:
    if param.required:
        return " Required." if param.opts[0].startswith("-") else ""
    return f" Default: {param.default}." if isinstance(param.default, str | int) and param.default is not False else ""


def config() -> str:
    """docs/config.md."""
    return CONFIG_HEAD + "".join(_table(path, table) for path, table in TABLES.items()) + _latency_keys()


def _latency_keys() -> str:
    rows = (f"| `{model}` | {', '.join(f'`{key}`' for key in kind.keys)} |\n" for model, kind in MODELS.items())
    return "\n## Keys of the latency models\n\n| model | its own keys |\n|---|---|\n" + "".join(rows)


def _table(path: str, table: type) -> str:
    many = {name: f"`[[{name}]]`" for name in MANY}
    header = ({"": "Top level, and `[sla]`"} | many).get(path, f"`[{path}]`")
    rows = "".join(_key(path, entry) for entry in keys_of(table))
    return f"\n## {header}\n\n| key | default | may be | meaning | flag |\n|---|---|---|---|---|\n{rows}"


def _key(path: str, entry: Entry) -> str:
    name = "sla.limits" if path == "" and entry.name == "sla" else entry.name
    full = name if path == "" else f"{path}.{name}"
    flags = ", ".join(f"`{flag}`" for flag, key in FLAGS.items() if key == full)
    usual = entry.limits.absent if entry.default is None else f"`{toml_value(entry.default)}`"
    return f"| `{name}` | {usual} | {_may_be(entry)} | {entry.limits.meaning} | {flags} |\n"


def _may_be(entry: Entry) -> str:
    limits = entry.limits
    if limits.choices:
        plugged = ", or the name of a plug-in" if limits.plugins else ""
        return ", ".join(f"`{choice}`" for choice in limits.choices) + plugged
    words = {"int": "whole number", "float": "number", "bool": "`true`, `false`", "str": "text", "Path": "path"}
    words[NAMES] = "list of names"
    if limits.low is not None and limits.low == limits.high:
        return f"{limits.low} (more in a later version)"
    parts = [words[entry.kind]]
    if limits.low is not None:
        parts.append(f"≥ {limits.low:,}")
    if limits.above is not None:
        parts.append(f"> {limits.above:,}")
    if limits.high is not None and limits.high < LARGEST:
        parts.append(f"≤ {limits.high:,}")
    return " ".join(parts)


def main() -> int:
    """Write the documents, or say which of them are out of date."""
    stale = []
    for name, text in (("cli.md", cli()), ("aiconfig-cli.md", aiconfig_cli()), ("config.md", config())):
        path = HERE / name
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path)
    for path in stale:
        print(f"{path} is out of date: run python docs/reference.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
