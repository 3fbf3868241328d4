"""What a worker says of itself to whoever may send it work, and how that is written: one JSON object or TOML table.

Records are read by other releases too: a store's record with a key that we do not know is read without it, a file that
a person wrote is not. No secrets in here, and no address with a password in it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import xxhash

from policies.cluster.ids import Role
from policies.errors import ConfigError
from policies.frozen import frozen

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SCHEMES: Final = ("http", "https", "mock", "tcp")
SCHEMA: Final = 1
FRONTEND: Final = "frontend"
"""The engine of records that are no worker's: a frontend, which takes no work from others."""
_TEXT_LISTS: Final = frozenset({"models", "taints"})
_COUNTS: Final = frozenset({"incarnation", "pid", "block_size", "dp_ranks", "gpus"})


@frozen
class WorkerRecord:
    """One life of one worker.

    `incarnation` rises with every start of a worker of this `name`: of two at one name or one `url` the newer counts.
    `kv_events` and `kv_replay` are the ZMQ endpoints of data-parallel rank 0 (None: it tells nothing of its blocks, or
    not again), `handoff` is host:port of its side channel or bootstrap server. `fingerprint` names the tokenizer,
    `compatibility` the layout of its KV: it is handed over only between equal ones. `draining`: it takes no new work.
    `group` is the worker group of the configuration that it was started from.

    A frontend that shares bookings has a record too: engine `FRONTEND`, its tcp:// address, its number as incarnation.
    """

    name: str
    incarnation: int
    engine: str
    url: str
    role: Role
    group: str | None = None
    models: tuple[str, ...] = ()
    version: str | None = None
    host: str | None = None
    pid: int | None = None
    block_size: int | None = None
    dp_ranks: int = 1
    gpus: int = 1
    kv_events: str | None = None
    kv_replay: str | None = None
    handoff: str | None = None
    fingerprint: str | None = None
    compatibility: str | None = None
    taints: tuple[str, ...] = ()
    draining: bool = False


_OPTIONAL: Final = {one.name: one.default for one in fields(WorkerRecord) if one.default is not MISSING}
_KEYS: Final = tuple(one.name for one in fields(WorkerRecord))


def new_incarnation() -> int:
    """One that is higher than any before on hosts whose clocks agree: nanoseconds since 1970."""
    return time.time_ns()


def fingerprint_of(folder: Path) -> str | None:
    """Names the tokenizer of a model's folder: workers and frontends that say the same mean the same by a token id.
    None where there is no tokenizer.json."""
    try:
        text = (folder / "tokenizer.json").read_bytes()
    except OSError:
        return None
    return f"tokenizer:{xxhash.xxh3_128_hexdigest(text)}"


def to_plain(record: WorkerRecord) -> dict[str, object]:
    """The record as JSON values, without what is at its default."""
    plain = {key: getattr(record, key) for key in _KEYS if getattr(record, key) != _OPTIONAL.get(key, MISSING)}
    return {key: _written(value) for key, value in plain.items()}


def from_plain(plain: object, where: str, *, strict: bool = False) -> WorkerRecord:
    """Read a record. Raises ConfigError, which names `where`, the key and its value; `strict` refuses unknown keys."""
    if not isinstance(plain, Mapping):
        raise ConfigError(f"{where}: a worker is a table of keys, not {type(plain).__name__}")
    unknown = sorted(set(plain) - set(_KEYS))
    if strict and unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; a worker has {', '.join(_KEYS)}")
    missing = [key for key in _KEYS if key not in plain and key not in _OPTIONAL]
    if missing:
        raise ConfigError(f"{where}: {missing[0]!r} is missing")
    read = {key: _read(key, plain[key], f"{where}: {key}") for key in _KEYS if key in plain}
    return WorkerRecord(**read)  # type: ignore[arg-type]  # _read has checked each


def write_entry(record: WorkerRecord, lease_s: float) -> bytes:
    """A record with its lease (seconds), as stores keep it."""
    return json.dumps({"schema": SCHEMA, "lease_s": lease_s, "worker": to_plain(record)}).encode()


def read_entry(text: bytes, where: str) -> tuple[WorkerRecord, float]:
    """What `write_entry` wrote. Raises ConfigError."""
    try:
        entry = json.loads(text)
        schema, lease_s = entry["schema"], float(entry["lease_s"])
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{where}: is no worker's entry ({type(error).__name__}: {error})") from error
    if schema != SCHEMA or not 0 < lease_s < float("inf"):
        raise ConfigError(f"{where}: schema {schema!r} with lease_s = {lease_s:g}; read here: {SCHEMA}, above 0")
    return from_plain(entry.get("worker"), where), lease_s


def _written(value: object) -> object:
    match value:
        case Role():
            return value.value
        case tuple():
            return list(value)
        case _:
            return value


def _read(key: str, value: object, where: str) -> object:
    if value is None and key in _OPTIONAL and _OPTIONAL[key] is None:
        return None
    if key in _TEXT_LISTS:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        raise ConfigError(f"{where} = {value!r} is not a list of texts")
    if key in _COUNTS:
        least = 0 if key == "incarnation" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        raise ConfigError(f"{where} = {value!r} is not a whole number of {least} or more")
    if key == "draining":
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{where} = {value!r} is not true or false")
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} = {value!r} is not a text")
    return _read_text(key, value, where)


def _read_text(key: str, value: str, where: str) -> object:
    match key:
        case "role":
            roles = {role.value: role for role in Role}
            if value not in roles:
                raise ConfigError(f"{where} = {value!r} is none of {', '.join(roles)}")
            return roles[value]
        case "name" if not NAME.fullmatch(value):
            raise ConfigError(f"{where} = {value!r}: up to 128 letters, digits, dots, dashes and underscores")
        case "url":
            parts = urlsplit(value)
            if parts.scheme not in SCHEMES or not parts.hostname:
                raise ConfigError(f"{where} = {value!r} is no address; write http://host:port")
            if parts.username is not None or parts.password is not None:
                raise ConfigError(f"{where} has a user in it; credentials never belong into a record")
            return value.rstrip("/")
        case _:
            return value
