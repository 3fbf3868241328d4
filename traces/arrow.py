"""Arrow arrays straight from numpy buffers, and back.

`pyarrow.array` and `Array.to_numpy` import pandas on first use (0.2 s of CPU, measured with pyarrow 26), so nothing on
the path of a replay may use them. Nothing is copied that need not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Flags = npt.NDArray[np.bool_]

INT_LISTS = pa.list_(pa.field("element", pa.int64()))
"""Lists of int64, with the child named as parquet names it, so that a schema survives being written and read."""


def numbers(values: npt.NDArray[Any], missing: Flags | None = None) -> pa.Array:
    """A primitive array of the type of `values`, null where `missing`."""
    values = np.ascontiguousarray(values)
    validity, nulls = _validity(missing)
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(values)], nulls)


def strings(values: Sequence[str | None]) -> pa.Array:
    """A string array; None is null."""
    missing = np.fromiter((value is None for value in values), np.bool_, len(values))
    if missing.all():
        return pa.nulls(len(values), pa.string())
    encoded = [b"" if value is None else value.encode("utf-8", "replace") for value in values]
    offsets = _offsets(np.fromiter(map(len, encoded), np.int64, len(encoded)))
    validity, nulls = _validity(missing)
    buffers = [validity, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers, nulls)


def int_lists(lengths: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> pa.Array:
    """Lists of int64 from the items of all lists in a row; an empty list is null."""
    validity, nulls = _validity(lengths == 0)
    buffers = [validity, pa.py_buffer(_offsets(lengths))]
    return pa.Array.from_buffers(INT_LISTS, len(lengths), buffers, nulls, children=[numbers(values)])


def valid_flags(array: pa.Array) -> Flags:
    """Which values are not null."""
    if not array.null_count:
        return np.ones(len(array), np.bool_)
    if pa.types.is_null(array.type):
        return np.zeros(len(array), np.bool_)
    start, end = array.offset, array.offset + len(array)
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    return np.unpackbits(bits, count=end, bitorder="little")[start:].astype(np.bool_)


def values_under(array: pa.Array) -> npt.NDArray[Any]:
    """The values of a primitive array, 0 where null."""
    start, end = array.offset, array.offset + len(array)
    values = np.frombuffer(array.buffers()[1], array.type.to_pandas_dtype(), count=end)[start:]
    return np.where(valid_flags(array), values, values.dtype.type(0)) if array.null_count else values


def _validity(missing: Flags | None) -> tuple[pa.Buffer | None, int]:
    nulls = 0 if missing is None else int(np.count_nonzero(missing))
    if missing is None or not nulls:
        return None, 0
    return pa.py_buffer(np.packbits(~missing, bitorder="little")), nulls


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
