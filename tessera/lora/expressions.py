"""Match names by regular expressions of a file that somebody else wrote, within a time limit.

Some expressions take longer than the age of the universe for one name, and Python cannot interrupt a match. So they run
in a process of their own, which is killed after the time limit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Collection, Sequence

from tessera.errors import TesseraError

_SECONDS = 20.0
# Without repetitions and alternatives there is at most one way to match: these expressions need no limit.
_PLAIN = re.compile(r"(?:[\w.^$-]|\\[.\-_])*")
_MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
compiled = [re.compile(pattern) for pattern in patterns]
json.dump({name: next((n for n, p in enumerate(compiled) if p.match(name)), None) for name in names}, sys.stdout)
"""


def first_matches(
    expressions: Sequence[str], names: Collection[str], *, within: str = "{}", where: str, seconds: float = _SECONDS
) -> dict[str, int | None]:
    """Return for each name the number of the first expression that matches at its beginning, or None.

    `within`: a template whose braces are replaced by each expression.
    """
    patterns = [within.replace("{}", expression) for expression in expressions]
    if all(map(_PLAIN.fullmatch, expressions)):
        compiled = [re.compile(pattern) for pattern in patterns]
        return {name: next((n for n, p in enumerate(compiled) if p.match(name)), None) for name in names}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input=json.dumps([patterns, list(names)]),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise TesseraError(
            f"the regular expressions take longer than {seconds:g} s to match",
            where=where,
            fix="write them without repetitions inside of repetitions, or name the modules one by one",
            code="adapter.expression-too-slow",
        ) from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [str(error)])[-1][:300]
        raise TesseraError(
            f"not all of the regular expressions can be compiled: {reason}",
            where=where,
            fix="write them in the syntax of Python's re",
            code="adapter.not-an-expression",
        ) from None
    numbers: dict[str, int | None] = json.loads(done.stdout)
    return numbers
