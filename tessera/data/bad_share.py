"""Refuse data sets of which too large a share is unusable: `data.max_bad_share`.

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


def check_measured(
    bad: int, total: int, limit: float, sections: Sequence[SourceSection], first: Sequence[BadSample] = ()
) -> None:
    """Raise if more than the allowed share of samples is unusable. A single unusable sample never ends a run.

    `total`: number of samples that were read. `sections`: their data sets. `first`: some of the unusable samples.
    """
    if bad > max(1.0, limit * total):
        listed = "".join(f"\n    {bad_sample}" for bad_sample in first[:3])
        names = ", ".join(str(section.path) for section in sections)
        raise TesseraError(
            f"{bad} of {total} samples are unusable; {KEY} allows {limit:.0%}"
            + (f"; the first reasons:{listed}" if listed else ""),
            where=names,
            fix=_fix(sections, first)
            + (f", or set {KEY}={rounded_up(bad / total):g} to skip them" if bad < total else ""),
            code="data.too-many-bad-samples",
        )


def _fix(sections: Sequence[SourceSection], first: Sequence[BadSample]) -> str:
    if first and all(
        bad_sample.code == "media.kind-not-supported" and "audio" in bad_sample.reason for bad_sample in first
    ):
        return (
            "a model that speaks is trained on codes of recordings: write them with `tessera data features RECIPE -o "
            "codes`, and set data.train=codes; leave out samples with other recordings, such as those of questions, "
            "unless the model can hear them (that of a talker does with model.config.reads_media=true)"
        )
    return f"list all reasons with {doctor_command(sections)} and correct the data"


def doctor_command(sections: Sequence[SourceSection]) -> str:
    """Return the shell command that lists the problems of data sets."""
    roots = {str(section.root) for section in sections if section.root is not None}
    options = ["--root", *roots] if len(roots) == 1 else []
    return shlex.join(["tessera", "data", "doctor", *(str(section.path) for section in sections), *options])


def rounded_up(share: float) -> float:
    """Return a share rounded up to the next percent."""
    return min(1.0, math.floor(share * 100 + 1) / 100)
