"""The peak of a process's own memory."""

from __future__ import annotations

import re
from pathlib import Path


def peak_mib() -> float:
    """Not `ru_maxrss`: a program begins with that of the process which started it, so after large tests it hides all
    that the program takes. `VmHWM` begins anew with every program, and in a fork with what is in use."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    match = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert match is not None, "Linux says this of every process"
    return int(match[1]) / 1024
