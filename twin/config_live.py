"""Tables of the configuration that count for serving alone (`twin serve`, `twin worker`): the simulator reads none.

What the simulator and the live world mean alike is one setting, and stands in a table of the simulator's:
`disaggregation.lease_s`, `resilience.grace_s`, `resilience.drain_timeout_s`, `resilience.response_inactivity_s`.
"""

from __future__ import annotations

from dataclasses import field

from policies.frozen import frozen
from twin.config_schema import LARGEST, LONGEST_S, key

MAX_STOPS = 32
"""Stop strings: what vLLM and Dynamo take; OpenAI takes 4."""


@frozen
class FrontendLimits:
    """`[live.frontend.limits]`: how much one client may ask, say or hold open."""

    body_bytes: int = key(16 * 1024 * 1024, "body of a request at most", low=1, high=LARGEST)
    json_depth: int = key(64, "nesting of JSON at most", low=1, high=1000)
    messages: int = key(10_000, "messages of a request at most", low=1, high=LARGEST)
    string_chars: int = key(1_000_000, "characters of one text at most", low=1, high=LARGEST)
    headers: int = key(100, "headers of a request at most", low=1, high=10_000)
    header_bytes: int = key(16 * 1024, "head of a request at most", low=256, high=2**24)
    prompts: int = key(128, "prompts of one request at most", low=1, high=LARGEST)
    n: int = key(4, "answers to one prompt at most", low=1, high=LARGEST)
    stops: int = key(4, "stop strings of a request at most", low=1, high=MAX_STOPS)
    connections: int = key(4096, "open connections at most", low=1, high=LARGEST)
    connections_per_address: int = key(512, "open connections of one address at most", low=1, high=LARGEST)
    in_flight: int = key(1024, "requests that are handled at a time; more are refused", low=1, high=LARGEST)
    tokenizer_threads: int = key(2, "threads that tokenise", low=1, high=1024)
    queued_chunks: int = key(256, "parts of an answer that wait for a slow client", low=1, high=LARGEST)


@frozen
class FrontendDeadlines:
    """`[live.frontend.deadlines]`: how long anything of a client may take."""

    header_s: float = key(5.0, "to the end of a request's head", above=0, high=LONGEST_S)
    body_s: float = key(10.0, "to the end of its body, and longer by body_bytes_per_s", above=0, high=LONGEST_S)
    body_bytes_per_s: float = key(1024.0, "the slowest that a body may come", above=0, high=1e12)
    idle_s: float = key(75.0, "a connection without requests is kept", low=1, high=LONGEST_S)
    stall_s: float = key(30.0, "a client may let its answer wait", above=0, high=LONGEST_S)
    keep_alive_s: float = key(15.0, "silence of a stream before a comment is sent", above=0, high=LONGEST_S)
    total_s: float | None = key(None, "from a request's arrival to its end", above=0, high=LONGEST_S, absent="no limit")
    first_token_s: float | None = key(
        None,
        "from a request's arrival to its first token, its waiting counted",
        above=0,
        high=LONGEST_S,
        absent="no limit but that of each leg",
    )


@frozen
class FrontendAccess:
    """`[live.frontend.access]`: who may ask, and how often."""

    metrics_open: bool = key(True, "/metrics needs no API key")
    untrusted_pins: str = key(
        "refuse", "what a client without trust that names a worker gets", choices=("refuse", "ignore")
    )
    tenant_isolation: str = key("none", "prefixes are shared by all, or within an API key", choices=("none", "key"))
    requests_per_s: float | None = key(None, "requests of one API key", above=0, high=LARGEST, absent="no limit")
    tokens_per_min: float | None = key(None, "tokens of one API key", above=0, high=2**53, absent="no limit")
    allowed_hosts: tuple[str, ...] = key((), "names that a Host header may have; none: any")
    cors_origins: tuple[str, ...] = key((), "origins whose pages may ask; none: no other page")


@frozen
class FrontendConfig:
    """`[live.frontend]`: what the HTTP server of `twin serve` does."""

    aliases: tuple[str, ...] = key((), 'other names of models, as in ["gpt-4o=llama"]')
    loras: tuple[str, ...] = key((), 'adapters and the models they sit on, as in ["sql=llama"]')
    anthropic: bool = key(True, "serve Anthropic's API too")
    allow_unknown: bool = key(False, "unknown parameters are let pass and counted, not refused")
    overload_status: int = key(529, "status of a request that there is no room for", choices=("429", "503", "529"))
    retry_after_s: float = key(1.0, "when such a client is told to come again", low=0, high=LONGEST_S)
    metrics_prefix: str = key("dynamo_frontend", "what names of metrics begin with")
    bucket_profile: str = key(
        "superset", "buckets of times: Dynamo's, or those and round limits", choices=("superset", "dynamo")
    )
    limits: FrontendLimits = field(default=FrontendLimits())
    deadlines: FrontendDeadlines = field(default=FrontendDeadlines())
    access: FrontendAccess = field(default=FrontendAccess())


@frozen
class LiveConfig:
    """`[live]`: deadlines of engines and upkeep of workers. `twin serve` and `twin worker` read it, the simulator does
    not."""

    first_token_s: float = key(
        120.0, "from the dispatch of a leg to its first token; 0: no deadline", low=0, high=LONGEST_S
    )
    between_tokens_s: float | None = key(
        None,
        "from tokens of a leg to the next; 0: no deadline",
        low=0,
        high=LONGEST_S,
        absent="resilience.response_inactivity_s",
    )
    connect_s: float = key(5.0, "until an engine takes a connection", above=0, high=LONGEST_S)
    control_s: float = key(5.0, "until an engine answers anything but a leg", above=0, high=LONGEST_S)
    ready_s: float = key(600.0, "until a worker that starts takes work", above=0, high=LONGEST_S)
    health_every_s: float = key(2.0, "between health checks of a worker", above=0, high=LONGEST_S)
    misses: int = key(3, "health checks in a row that fail before a worker is lost", low=1, high=1000)
    report_every_s: float = key(1.0, "between questions how much a worker has to do", above=0, high=LONGEST_S)
    frontend: FrontendConfig = field(default=FrontendConfig())


TABLES: dict[str, type] = {
    "live": LiveConfig,
    "live.frontend": FrontendConfig,
    "live.frontend.limits": FrontendLimits,
    "live.frontend.deadlines": FrontendDeadlines,
    "live.frontend.access": FrontendAccess,
}
"""Each table by its name, in the order in which they are written."""
