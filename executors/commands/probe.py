"""`twin probe`: what this host can do live."""

from __future__ import annotations

import os

from twin.commands.options import Json
from twin.errors import Exit


def probe(json: Json = False) -> int:
    """Say which engines and backends are usable on this host, and what installs those that are not."""
    from executors.probe import Host, as_json, as_table, environments
    from executors.probe import probe as look

    host = Host.here()
    findings = look(host, environments(os.environ))
    print(as_json(host, findings) if json else as_table(findings))
    return Exit.OK
