"""Files that put a candidate to work: launch commands, manifests, a benchmark, and back from commands to a candidate.

Text in, text out: nothing here starts, measures or sends anything. Flags stand in one table, `flags.toml`.
"""
