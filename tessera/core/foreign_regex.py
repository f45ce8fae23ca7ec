"""Regular expressions from files of somebody else: matched within a time, however they are written.

A few characters suffice for an expression that takes longer than the world has existed, and nothing stops a match that
runs in this process. So all but plain ones are matched in a process of their own, which is ended when the time is over.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence

from tessera.core.errors import TesseraError

_SECONDS = 20.0
_MAX_CHARACTERS = 1000
_MAX_PATTERNS = 20_000
# Letters, digits and what stands for itself or for one character: there is one way at most in which these match.
_PLAIN = re.compile(r"(?:[\w.^$-]|\\[.\-_])*")
_MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
found = {}
compiled = [re.compile(p) for p in patterns]
for name in names:
    found[name] = next((n for n, p in enumerate(compiled) if p.match(name)), None)
json.dump(found, sys.stdout)
"""


def first_matches(
    written: Sequence[str],
    names: Collection[str],
    *,
    within: str = "{}",
    where: str,
    seconds: float = _SECONDS,
) -> dict[str, int | None]:
    """For each name the number of the first pattern that matches at its beginning, as `re.match` does; None: none.
    `within`: what each pattern is put into first, in the place of the braces."""
    patterns = [within.replace("{}", pattern) for pattern in written]
    if len(patterns) > _MAX_PATTERNS:
        raise TesseraError(f"{len(patterns)} regular expressions", where=where, allowed=[f"{_MAX_PATTERNS} at most"])
    for pattern in patterns:
        if len(pattern) > _MAX_CHARACTERS:
            raise TesseraError(f"a regular expression of {len(pattern)} characters: {pattern[:60]}...", where=where)
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise TesseraError(f"not a regular expression: {pattern!r}: {error}", where=where) from None
    if all(map(_PLAIN.fullmatch, written)):
        compiled = [re.compile(pattern) for pattern in patterns]
        return {name: next((n for n, one in enumerate(compiled) if one.match(name)), None) for name in names}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input=json.dumps([list(patterns), list(names)]),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise TesseraError(
            f"regular expressions that take longer than {seconds:g} s to match",
            where=where,
            fix="write them without repetitions inside of repetitions, or name the modules one by one",
        ) from None
    except (subprocess.CalledProcessError, OSError) as error:
        raise TesseraError(f"the regular expressions could not be matched: {error}", where=where) from None
    found: dict[str, int | None] = json.loads(done.stdout)
    return found
