"""Which errors are the user's to fix, and what each way of ending costs in exit codes.

The errors themselves are raised by the rooms below; nothing here prints or exits.
"""

from __future__ import annotations

from enum import IntEnum

from policies.errors import CapabilityError, ConfigError, EngineError, InvariantError, TwinError
from traces.errors import TraceError

__all__ = [
    "CapabilityError",
    "ConfigError",
    "EngineError",
    "Exit",
    "InvariantError",
    "Stopped",
    "TraceError",
    "TwinError",
]


class Exit(IntEnum):
    """What the `twin` command returns to the shell."""

    OK = 0
    BUG = 1  # ours: a traceback under --debug, a line without
    BAD_INPUT = 2  # yours: one line says what, where, the limit and the next step
    MISSED = 3  # a result: the SLA, or a check, is not met
    LIVE_CUT = 4  # a live stop had to cut streams
    INTERRUPTED = 130  # Ctrl-C; what there is was kept


class Stopped(KeyboardInterrupt):
    """Ctrl-C that left something behind; its text says what and where."""


def exit_for(error: BaseException) -> Exit:
    """The exit code that an error costs. A broken promise of ours is a bug, whatever its base class."""
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED
    if isinstance(error, InvariantError):
        return Exit.BUG
    if isinstance(error, TwinError | TraceError):
        return Exit.BAD_INPUT
    return Exit.BUG
