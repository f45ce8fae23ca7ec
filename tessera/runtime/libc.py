"""Call functions of the C library that Python lacks: `memcmp`, `renameat2` and `sync_file_range`."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_WORKING_FOLDER, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def same_bytes(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> bool:
    """Return whether two arrays have the same bytes. Other threads can run meanwhile (the GIL is released)."""
    if first.nbytes != second.nbytes:
        return False
    assert first.flags.c_contiguous
    assert second.flags.c_contiguous
    return _memcmp()(first.ctypes.data, second.ctypes.data, first.nbytes) == 0


def exchange(first: Path, second: Path) -> bool:
    """Exchange two files or folders by one atomic rename. Return False where that fails or is not available.

    Other systems than Linux and some network file systems do not support it.
    """
    function = _renameat2()
    if function is None:
        return False
    return function(_WORKING_FOLDER, os.fsencode(first), _WORKING_FOLDER, os.fsencode(second), _EXCHANGE) == 0


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
def _renameat2() -> Callable[[int, bytes, int, bytes, int], int] | None:
    try:
        function = ctypes.CDLL(None).renameat2
    except AttributeError:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    rename: Callable[[int, bytes, int, bytes, int], int] = function
    return rename


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
