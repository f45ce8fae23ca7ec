"""Call two functions of the C library that Python lacks: `memcmp` and `sync_file_range`."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def same_bytes(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> bool:
    """Return whether two arrays have the same bytes. Other threads can run meanwhile (the GIL is released)."""
    if first.nbytes != second.nbytes:
        return False
    assert first.flags.c_contiguous
    assert second.flags.c_contiguous
    return _memcmp()(first.ctypes.data, second.ctypes.data, first.nbytes) == 0


def begin_write_back(handle: int, offset: int, length: int) -> None:
    """Start writing a part of a file from the page cache to the disk, without waiting.

    Does nothing where `sync_file_range` is not available, as on other systems than Linux.
    """
    function = _sync_file_range()
    if function is not None and length:
        function(handle, offset, length, _WRITE)


@functools.cache
def _memcmp() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None).memcmp
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    compare: Callable[[int, int, int], int] = function
    return compare


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int
    begin: Callable[[int, int, int, int], int] = function
    return begin
