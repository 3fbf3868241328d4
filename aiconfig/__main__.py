"""`python -m aiconfig`: the `aiconfig` command, where its script is not on the path."""

from __future__ import annotations

from aiconfig.cli import main

if __name__ == "__main__":
    main()
