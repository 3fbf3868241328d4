"""The errors of dynatwin. A text says what, where, the value, the limit and the next step."""

from __future__ import annotations


class TwinError(Exception):
    """Base of every error that is the user's to fix, or a promise of ours that was broken."""


class ConfigError(TwinError):
    """A setting is unknown, out of range, or contradicts another one."""


class CapabilityError(TwinError):
    """Something was asked for that this world, engine or host cannot do."""


class EngineError(TwinError):
    """An engine cannot go on, for example because no open request can make progress."""


class JournalError(TwinError):
    """A journal is cut, damaged, or written in another form than this version reads."""


class InvariantError(TwinError):
    """A promise inside dynatwin was broken: a bug, never bad input."""
