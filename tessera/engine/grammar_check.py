"""Compile a grammar in a process whose CPU time and memory are limited: python grammar_check.py SECONDS GIB < GRAMMAR

Compilation may take exponential time, and a thread cannot be ended. At a limit, a signal ends this process; whether the
grammar is valid is not checked. This file imports nothing else of the package, so it starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import resource
import sys


def main(seconds: int, gib: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with contextlib.suppress(OSError, ValueError):  # some systems do not support this limit
        resource.setrlimit(resource.RLIMIT_AS, (gib << 30, gib << 30))
    import llguidance

    # The effort of compiling a grammar does not depend on the vocabulary, so a vocabulary of single bytes is enough.
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), sys.stdin.read(), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
