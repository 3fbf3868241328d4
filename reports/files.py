"""Files that are whole or not there, and Ctrl-C that waits for them.

Nothing here knows what is in a file. Holding Ctrl-C back is for moments; what may take long is not held.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file to write, which takes its place only when the block ends well."""
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("w", encoding="utf-8") as out:
            yield out
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, then does what it would have done; a second one does not wait.

    Where Ctrl-C is ignored, and in threads (the main one alone gets it), nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    pressed = False

    def note(_signum: int, _frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        before(signal.SIGINT, None)
