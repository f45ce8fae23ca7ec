"""Decide when so many samples cannot be used that a run should not go on without them: `data.max_bad_share`.

A run that skips bad samples would also skip most of its data, where a folder is missing or a disk fails, and succeed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from tessera.config.run_config import SourceSection
from tessera.errors import TesseraError

KEY = "data.max_bad_share"
_MIN_READ = 20  # samples: a few bad ones in a row mean little where data is not shuffled
_MIN_UNUSED = 5  # samples in a row from the start
_DOUBT = math.log(1e6)  # a share at its limit ends one run in so many by chance


def check_measured(
    bad: int, total: int, limit: float, sections: Sequence[SourceSection], reasons: Sequence[tuple[str, str]] = ()
) -> None:
    """Raise if too many of the samples that were measured cannot be used. A single one never ends a run.

    `sections`: the data sets they are of. `reasons`: (id, reason) of the first bad ones.
    """
    if bad > max(1.0, limit * total):
        listed = "".join(f"\n    {id}: {reason}" for id, reason in reasons[:3])
        names = ", ".join(str(section.path) for section in sections)
        raise TesseraError(
            f"{bad} of {total} samples cannot be used, which is more than {KEY} allows ({limit:.0%})"
            + (f"; the first reasons:{listed}" if listed else ""),
            where=names,
            fix=f"{doctor_command(sections)} lists all reasons; mend the data"
            + (f", or set {KEY}={_above(bad / total):g} to go on without them" if bad < total else ""),
            code="data.too-many-bad-samples",
        )


def check_read(bad: int, read: int, limit: float) -> None:
    """Raise if so many of the samples that a run has read so far were bad that it is no accident.

    By Chernoff's bound, of n samples with a share p of bad ones, a share s > p or more is bad with a probability of at
    most exp(-n * KL(s, p)).
    """
    share = bad / max(1, read)
    if read < _MIN_READ or share <= limit:
        return
    divergence = share * math.log(share / limit)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - limit))
    if read * divergence > _DOUBT:
        raise TesseraError(
            f"{bad} of the {read} samples that this rank has read could not be used, and {KEY} allows {limit:.0%}",
            where="quarantine.jsonl in the run's folder, which lists them with the reasons",
            fix="mend the data, for which `tessera data doctor --decode --recipe RECIPE` reads all of it, and resume; "
            f"or resume with {KEY}={_above(share):g}",
            code="data.too-many-bad-samples",
        )


def check_any_used(read: int) -> None:
    """Raise if `read` samples, none of which could be used, are enough to refuse the data."""
    if read >= _MIN_UNUSED:
        raise TesseraError(
            f"none of the {read} samples that were read so far could be used: nothing is trained",
            where="quarantine.jsonl in the run's folder, which lists them with the reasons",
            fix="mend the data; `tessera data doctor --decode --recipe RECIPE` reads all of it",
            code="data.no-usable-sample",
        )


def doctor_command(sections: Sequence[SourceSection]) -> str:
    """Return the command that lists the problems of data sets."""
    roots = {str(section.root) for section in sections if section.root is not None}
    options = ["--root", *roots] if len(roots) == 1 else []
    return shlex.join(["tessera", "data", "doctor", *(str(section.path) for section in sections), *options])


def _above(share: float) -> float:
    """Return the next two digits above a share."""
    return min(1.0, math.floor(share * 100 + 1) / 100)
