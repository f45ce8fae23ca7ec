"""Add to error messages about recipe keys the flags and file keys that the user of a job has written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.flags import FLAGS
from tessera_compat.mindspeed_mm.report import JobReport, recipe_keys

_NEW_RUN = re.compile(
    r"model\.path=(.+?) name=(\w+)"
)  # settings in the `fix` of an error, which start a new run from the weights of another run


@contextmanager
def in_words_of_job(report: JobReport) -> Iterator[None]:
    """Add the flags of the job to errors of this block that mention recipe keys."""
    try:
        yield
    except TesseraError as error:
        error.fix = _NEW_RUN.sub(r"--load \1 --save \2", error.fix) if error.fix else None
        keys = dict.fromkeys(recipe_keys(f"{error.where or ''} {error.what} {error.fix or ''}"))
        names = {key: flags_of(key, report) for key in keys}
        words = [f"{key} is {name}" for key, name in names.items() if name != key]
        if words:
            error.where = f"{error.where or 'recipe'} (in this job {'; '.join(words)})"
        error.args = (error.render(),)
        raise


def flags_of(key: str, report: JobReport) -> str:
    """Return the flags or file keys of a job that set a recipe key; the recipe key itself if there are none."""
    if key == "model.freeze":  # the note of `freeze: false` names no recipe key, so collect all `freeze` keys
        freezes = [entry.key for entry in report.entries if entry.key.endswith("freeze")]
        return ", ".join(freezes) or report.places.get(key, key)
    mapped = [(entry.key, recipe_keys(entry.note)) for entry in report.entries if entry.outcome == "mapped"]
    other = [(place, [one]) for one, place in report.places.items()]
    honoured = [(flag.name, recipe_keys(flag.note)) for flag in FLAGS.values() if flag.state == "honoured"]
    for names in (mapped, other, honoured):
        exact = [name for name, keys in names if key in keys]
        around = [name for name, keys in names if any(f"{key}.".startswith(f"{one}.") for one in keys)]
        inside = [name for name, keys in names if any(one.startswith(f"{key}.") for one in keys)]
        if exact or around or inside:
            return ", ".join(dict.fromkeys(exact or around or inside))
    return key
