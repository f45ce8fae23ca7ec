"""End a run if too large a share of its samples is unusable: `data.max_bad_share`.

A run that skips every bad sample would skip most of its data, if a media folder is missing or a disk fails, and still
succeed.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from tessera.config.run_config import SourceSection
from tessera.core.sample import BadSample
from tessera.errors import TesseraError

KEY = "data.max_bad_share"
_MIN_READ = 20  # samples that a run must have read before `check_read` may end it
_MIN_UNUSED = 5  # a run ends if the first 5 or more samples that it reads are all bad
_DOUBT = math.log(1e6)  # if the true share of bad samples is at the limit, a run ends with probability 1e-6 at most


def check_measured(
    bad: int, total: int, limit: float, sections: Sequence[SourceSection], first: Sequence[BadSample] = ()
) -> None:
    """Raise if too large a share of the measured samples is bad. A single bad sample never ends a run.

    `sections`: the data sets of the samples. `first`: some of the bad samples.
    """
    if bad > max(1.0, limit * total):
        listed = "".join(f"\n    {bad_sample}" for bad_sample in first[:3])
        names = ", ".join(str(section.path) for section in sections)
        raise TesseraError(
            f"{bad} of {total} samples are unusable; {KEY} allows {limit:.0%}"
            + (f"; the first reasons:{listed}" if listed else ""),
            where=names,
            fix=f"list all reasons with {doctor_command(sections)} and correct the data"
            + (f", or set {KEY}={_above(bad / total):g} to skip them" if bad < total else ""),
            code="data.too-many-bad-samples",
        )


def check_read(bad: int, read: int, limit: float) -> None:
    """Raise if the share of bad samples that a run has read is significantly above the limit.

    By Chernoff's bound: if a share p of all samples is bad, then of n random samples a share of at least s > p is bad
    with a probability of at most exp(-n * KL(s, p)).
    """
    share = bad / max(1, read)
    if read < _MIN_READ or share <= limit:
        return
    divergence = share * math.log(share / limit)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - limit))
    if read * divergence > _DOUBT:
        raise TesseraError(
            f"{bad} of the {read} samples that this rank has read were unusable; {KEY} allows {limit:.0%}",
            where="quarantine.jsonl in the run folder, which lists the samples and the reasons",
            fix="check all samples with `tessera data doctor --decode --recipe RECIPE`, correct the data and resume; "
            f"or resume with {KEY}={_above(share):g}",
            code="data.too-many-bad-samples",
        )


def check_any_used(read: int) -> None:
    """Raise if the first `read` samples, which the caller found to be all bad, are 5 or more."""
    if read >= _MIN_UNUSED:
        raise TesseraError(
            f"none of the first {read} samples is usable: the run trains on nothing",
            where="quarantine.jsonl in the run folder, which lists the samples and the reasons",
            fix="check all samples with `tessera data doctor --decode --recipe RECIPE`, and correct the data",
            code="data.no-usable-sample",
        )


def doctor_command(sections: Sequence[SourceSection]) -> str:
    """Return the shell command that lists the problems of data sets."""
    roots = {str(section.root) for section in sections if section.root is not None}
    options = ["--root", *roots] if len(roots) == 1 else []
    return shlex.join(["tessera", "data", "doctor", *(str(section.path) for section in sections), *options])


def _above(share: float) -> float:
    """Return a share rounded up to the next percent."""
    return min(1.0, math.floor(share * 100 + 1) / 100)
