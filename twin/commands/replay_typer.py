"""`twin replay` as typer reads it."""

from __future__ import annotations

from twin.commands.replay import replay as run
from twin.commands.replay_line import OPTIONS
from twin.commands.typed import command_of

replay = command_of(run, OPTIONS, "Simulate a trace on a cluster and write a report.")
