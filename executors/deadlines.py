"""How long an engine may take: one table for the world, which gives requests to others, and for adapters, which ask.

The deadlines are ours: longer than a full queue takes, shorter than clients wait; no engine is trusted to keep one.
"""

from __future__ import annotations

from policies.frozen import frozen
from twin.config import Config, ResilienceConfig
from twin.config_live import LiveConfig

_USUAL = LiveConfig()


@frozen
class Deadlines:
    """In seconds: from the dispatch of a leg to its first token, from tokens to the next (None: no deadline), to take a
    connection, and for an answer to anything but a leg."""

    first_token_s: float | None = _USUAL.first_token_s
    between_tokens_s: float | None = ResilienceConfig().response_inactivity_s
    connect_s: float = _USUAL.connect_s
    control_s: float = _USUAL.control_s

    @classmethod
    def of(cls, config: Config) -> Deadlines:
        """Those of a configuration. In its table 0 is no deadline."""
        live = config.live
        between_s = live.between_tokens_s
        if between_s is None:
            between_s = config.resilience.response_inactivity_s
        return cls(
            first_token_s=live.first_token_s or None,
            between_tokens_s=between_s or None,
            connect_s=live.connect_s,
            control_s=live.control_s,
        )


USUAL = Deadlines()
