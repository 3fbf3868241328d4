"""The error of this room. A text names file and row, what is wrong, and the next step."""

from __future__ import annotations


class TraceError(Exception):
    """A trace cannot be read or made as asked; `rows` lists the 1-based lines or rows at fault, when known."""

    def __init__(self, message: str, rows: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.rows = rows
