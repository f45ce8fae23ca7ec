"""Compare two sides of any kind: recordings, recipes, runs, or a model folder and another implementation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tessera.config.registry import IMPORT_PATH
from tessera.errors import TesseraError
from tessera.evaluation.parity.compare import compare_recordings
from tessera.evaluation.parity.findings import Comparison
from tessera.evaluation.parity.recorder import Budget
from tessera.evaluation.parity.recording import Recording, is_recording, read_recording
from tessera.evaluation.parity.results import lines, write_results
from tessera.hub.config import local_model
from tessera.runtime import log
from tessera.runtime.scratch import scratch_folder
from tessera.tools.parity.bisect import FirstCommit, first_commit, first_step
from tessera.tools.parity.models import LIBRARIES, record_beside
from tessera.tools.parity.runs import logged_to, parse_steps, record
from tessera.tools.parity.tokens import TokenParity, compare_tokens

ENGINE = "engine"
_PREFIX = "tessera-parity-"
Over = Literal["data", "steps", "commits"]
Side = str | Path | Mapping[str, Any]


@dataclass
class ParityResult:
    """Hold the result of a comparison: lines for the terminal, the findings, and the files that were written."""

    text: list[str]
    comparison: Comparison | None = None
    tokens: TokenParity | None = None
    commit: FirstCommit | None = None
    step: int | None = None
    files: list[Path] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Return whether there is no difference beyond rounding."""
        if self.tokens is not None:
            return self.tokens.first is None
        return self.step is None and (self.comparison is None or self.comparison.first is None)


def parity(
    a: Side,
    b: Side | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    over: Over | None = None,
    steps: str = "1",
    out: str | Path | None = None,
    data: str | Path | None = None,
    command: str | None = None,
    nproc: tuple[int, int] = (1, 1),
    budget: Budget | None = None,
    family: str | None = None,
    root: str | Path | None = None,
    max_samples: int | None = None,
    max_new_tokens: int = 32,
    trust: bool = False,
) -> ParityResult:
    """Compare two sides, and name the first module, sample or number that differs by more than rounding explains.

    `a`, `b`: recordings, recipes or runs; or `a` is a model folder and `b` is `transformers`, `diffusers`, an import
    path `package.module:function`, or `engine`. `b` None: the recipe `a` with other overrides. `overrides`: keys that
    begin with `a.` or `b.` change only that side. `over`: search for the first different sample ("data"), step or
    commit. `out`: folder for the results as HTML, JSON and CSV.
    """
    sides = _overrides(overrides or {})
    if over not in (None, "data", "steps", "commits"):
        raise TesseraError(
            f"unknown search: {over!r}",
            where="--over",
            allowed=["data", "steps", "commits"],
            code="parity.unknown-over",
        )
    if over == "commits":
        return _over_commits(str(a), str(b), command or "", out)
    if b == ENGINE:
        if data is None:
            raise TesseraError(
                "the comparison with the engine needs questions",
                where="--data",
                fix="add --data FILE with chat samples",
                code="parity.engine-without-data",
            )
        how: dict[str, Any] = {"root": root, "max_samples": max_samples, "max_new_tokens": max_new_tokens}
        tokens = compare_tokens(str(a), data, **how, trust=trust)
        return ParityResult(tokens.lines(), tokens=tokens)
    if isinstance(b, str) and (b in LIBRARIES or (IMPORT_PATH.fullmatch(b) and not Path(b).exists())):
        first, second = record_beside(local_model(str(a)), b, family, budget or Budget())
        return _result(compare_recordings(first, second), out, over)
    other = a if b is None else b
    text: list[str] = []
    step: int | None = None
    if over == "steps":
        _say("training both sides, and the first one twice")
        with scratch_folder(_PREFIX) as temporary, logged_to((temporary if out is None else Path(out)) / "steps.log"):
            step, line = first_step((a, sides[0]), (other, sides[1]), parse_steps(steps)[1], trust)
        text = [line]
        if step is None:
            return ParityResult(text)
        steps = f"{max(1, step - 1)}-{step}"  # record also the step before: its update may be the cause
    with scratch_folder(_PREFIX) as temporary:
        recordings: list[Recording] = []
        for name, side, changes, ranks in zip("ab", (a, other), sides, nproc, strict=True):
            if isinstance(side, (str, Path)) and is_recording(Path(side)):
                recordings.append(read_recording(Path(side)))
                continue
            where = temporary / name
            words = " ".join(f"{key}={value}" for key, value in changes.items())
            journal = (temporary if out is None else Path(out)) / f"{name}.log"
            _say(f"recording {name}: {side if isinstance(side, (str, Path)) else 'a recipe'} {words}".rstrip())
            record(side, changes, out=where, steps=steps, nproc=ranks, budget=budget, trust=trust, journal=journal)
            recordings.append(read_recording(where))
            recordings[-1].label += f" {words}" if words else ""
        result = _result(compare_recordings(recordings[0], recordings[1]), out, over)
    result.text = [*text, *result.text]
    result.step = step
    return result


def _say(line: str) -> None:
    """Log a message. Show it in the terminal, too: each training changes the configuration of the logger."""
    with log.on_screen():
        log.logger().info(line)


def _overrides(overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the overrides of both sides: `a.key` and `b.key` belong to one of them."""
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for key, value in overrides.items():
        for number, prefix in enumerate(("a.", "b.")):
            if not key.startswith(("a.", "b.")):
                sides[number][key] = value
            elif key.startswith(prefix):
                sides[number][key.removeprefix(prefix)] = value
    return sides


def _result(comparison: Comparison, out: str | Path | None, over: Over | None) -> ParityResult:
    text = lines(comparison)
    if over == "data":
        text += _by_sample(comparison)
    files = [] if out is None else write_results(comparison, Path(out))
    return ParityResult(text, comparison, files=files)


def _by_sample(comparison: Comparison) -> list[str]:
    """Return a line for each sample that differs, with its first difference."""
    firsts: dict[str, str] = {}
    for finding in comparison.different:
        for sample in finding.samples:
            firsts.setdefault(sample, finding.what)
    rows = [f"  {sample}: first in {what}" for sample, what in firsts.items()]
    return [f"samples that differ: {len(rows)}", *rows[:50]]


def _over_commits(good: str, bad: str, command: str, out: str | Path | None) -> ParityResult:
    search = first_commit(good, bad, command)
    text = [f"recordings made: {search.tested}"]
    if search.commit is None:
        return ParityResult([*text, f"{bad} computes the same as {good}"], search.comparison, commit=search)
    text.append(f"first commit that differs: {search.subject}")
    files = [] if out is None else write_results(search.comparison, Path(out))
    return ParityResult([*text, *lines(search.comparison)], search.comparison, commit=search, files=files)
