"""Find the first step, or the first commit, from which two trainings differ by more than rounding explains."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tessera.core.callback import Callback, StepResult
from tessera.errors import TesseraError
from tessera.evaluation.parity.compare import compare_recordings
from tessera.evaluation.parity.findings import Comparison
from tessera.evaluation.parity.judge import ROUNDINGS
from tessera.evaluation.parity.recorder import move_weights
from tessera.evaluation.parity.recording import is_recording, read_recording
from tessera.runtime.files import read_metrics
from tessera.runtime.scratch import scratch_folder
from tessera.tools.parity.runs import is_run, observe
from tessera.training.run import resume_config
from tessera.training.setup import resolve_precision

Curve = dict[int, dict[str, float]]
_NAMES = ("loss", "grad_norm")


@dataclass
class Curves(Callback):
    """Collect loss and gradient norm of each step.

    `seed`: if set, add a random rounding error to each weight before the first step.
    """

    last: int
    compute: torch.dtype = torch.float32
    seed: int | None = None
    curve: Curve = field(default_factory=dict)

    def on_start(self, trainer: Any) -> None:
        if self.seed is not None:
            move_weights(trainer.module, self.compute, self.seed)

    def on_step_end(self, trainer: Any, result: StepResult) -> None:
        numbers = result.numbers()
        self.curve[result.step] = {name: numbers[name] for name in _NAMES}
        if result.step >= self.last:
            trainer.end_early("the compared steps are done")


def first_step(
    a: tuple[str | Path | Mapping[str, Any], Mapping[str, Any]],
    b: tuple[str | Path | Mapping[str, Any], Mapping[str, Any]],
    last: int,
    trust: bool = False,
) -> tuple[int | None, str]:
    """Return the first step in which the loss or gradient norm of `a` and `b` differ by more than rounding explains.

    None: no step differs. With it, return a line for the terminal.

    For two run folders without overrides, their `metrics.jsonl` are compared; the limit is a relative difference of
    sqrt(eps) of the less precise dtype. Otherwise both are trained up to step `last`. Then the limit is measured: `a`
    is trained a second time, with a rounding error added to each weight before its first step.
    """
    folders = [Path(side[0]) for side in (a, b) if isinstance(side[0], (str, Path)) and is_run(Path(side[0]))]
    if len(folders) == 2 and not a[1] and not b[1]:
        curves = [_metrics(folder) for folder in folders]
        types = [resolve_precision(resume_config(folder)).compute for folder in folders]
        drift = max(torch.finfo(getattr(torch, name)).eps for name in types) ** 0.5
        return _first(curves[0], curves[1], lambda step, name, value: drift * abs(value))
    plain, other, moved = (_trained(side, last, seed, trust) for side, seed in ((a, None), (b, None), (a, 0)))
    largest: dict[tuple[int, str], float] = {}
    for name in _NAMES:
        drift = 0.0
        for step in sorted(plain):
            drift = max(drift, abs(plain[step][name] - moved.get(step, plain[step])[name]))
            largest[step, name] = drift
    eps = torch.finfo(torch.float32).eps
    return _first(plain, other, lambda step, name, value: ROUNDINGS * largest[step, name] + 2 * eps * abs(value))


def _trained(side: tuple[Any, Mapping[str, Any]], last: int, seed: int | None, trust: bool) -> Curve:
    curves: list[Curves] = []

    def callback(plan: Any) -> Callback:
        curves.append(Curves(last, plan.precision.compute, seed))
        return curves[0]

    observe(side[0], side[1], 1, callback, trust=trust)
    return curves[0].curve


def _metrics(folder: Path) -> Curve:
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    return {row["step"]: {n: float(row[n]) for n in _NAMES if isinstance(row.get(n), (int, float))} for row in rows}


def _first(a: Curve, b: Curve, allowed: Callable[[int, str, float], float]) -> tuple[int | None, str]:
    steps = sorted(a.keys() & b.keys())
    if not steps:
        raise TesseraError(
            "the two runs or recipes have no step in common",
            where="--over steps",
            fix="name runs with metrics.jsonl, or recipes",
            code="parity.no-common-step",
        )
    for step in steps:
        for name in _NAMES:
            if name in a[step] and name in b[step]:
                value, other = a[step][name], b[step][name]
                limit = allowed(step, name, value)
                if not abs(value - other) <= limit:
                    difference = f"first step whose {name} differs: {step}"
                    return step, f"{difference} ({value:.8g} and {other:.8g}; allowed {limit:.2g})"
    return None, f"steps {steps[0]} to {steps[-1]}: loss and gradient norm agree"


# ---------------------------------------------------------------------------------------------- commits


@dataclass(frozen=True)
class FirstCommit:
    """Hold the first commit whose recording differs from that of the good commit; `commit` None: none differs."""

    commit: str | None
    subject: str
    comparison: Comparison
    tested: int


def first_commit(good: str, bad: str, command: str, repository: str | Path = ".") -> FirstCommit:
    """Find the first commit after `good`, up to `bad`, whose recording differs. The user's working tree is not touched.

    `command` makes a recording in the folder `{out}`, for which a path is inserted. It runs in a temporary worktree of
    each tested commit, and imports Tessera from there.
    """
    if "{out}" not in command:
        raise TesseraError(
            "the command does not contain {out}, the folder for its recording",
            where="--command",
            fix="write {out} in place of the folder: 'tessera record recipe.yaml --out {out}'",
            code="parity.command-without-out",
        )
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise TesseraError(
            f"the command cannot be split into words: {error}",
            where="--command",
            fix="write it as for a shell, with all quotes closed",
            code="parity.wrong-command",
        ) from None
    root = Path(repository).resolve()
    first, last = (
        _git(root, "rev-parse", "--verify", "--end-of-options", f"{name}^{{commit}}") for name in (good, bad)
    )
    commits = [first, *_git(root, "rev-list", "--reverse", "--ancestry-path", f"{first}..{last}").split()]
    if len(commits) < 2:
        raise TesseraError(
            f"{good} is no ancestor of {bad}",
            where="--over commits",
            fix="name the good commit first, then a later one",
            code="parity.no-commit-range",
        )
    with _ended_by_exception(), scratch_folder("tessera-bisect-") as work:

        def compared(number: int) -> Comparison:
            for at in (0, number):
                if not (work / f"recording-{at}").exists():
                    _record_commit(root, commits[at], words, work, work / f"recording-{at}")
            first_side, other = (read_recording(work / f"recording-{at}") for at in (0, number))
            return compare_recordings(first_side, other)

        low, high, comparison = 0, len(commits) - 1, compared(len(commits) - 1)
        tested = 2
        if comparison.first is None:
            return FirstCommit(None, "", comparison, tested)
        while high - low > 1:
            middle = (low + high) // 2
            result, tested = compared(middle), tested + 1
            if result.first is None:
                low = middle
            else:
                high, comparison = middle, result
        subject = _git(root, "log", "-1", "--format=%h %s", commits[high])
        return FirstCommit(commits[high], subject, comparison, tested)


def _record_commit(root: Path, commit: str, command: Sequence[str], work: Path, out: Path) -> None:
    with _worktree(root, commit, work / "tree") as tree:
        words = [word.replace("{out}", str(out)) for word in command]
        path = os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        try:
            done = subprocess.run(words, cwd=tree, env={**os.environ, "PYTHONPATH": path, "PATH": programs})
            failure = f"ended with exit code {done.returncode}" if done.returncode else ""
        except OSError as error:
            failure = f"cannot be started: {error.strerror}"
    if failure or not is_recording(out):
        raise TesseraError(
            f"at commit {commit[:12]} the command {failure or 'wrote no recording'}",
            where="--command",
            fix="run it by hand in a worktree of this commit, or name a later good commit",
            code="parity.command-failed",
        )


@contextmanager
def _worktree(root: Path, commit: str, tree: Path) -> Iterator[Path]:
    try:
        _git(root, "worktree", "add", "--detach", "--force", str(tree), commit)
        yield tree
    finally:
        with suppress(TesseraError):  # `--force` twice: an interrupted `add` leaves the worktree locked
            _git(root, "worktree", "remove", "--force", "--force", str(tree))


@contextmanager
def _ended_by_exception() -> Iterator[None]:
    """Raise SystemExit at SIGTERM inside of the `with` block, so that worktrees and processes are removed.

    Only the main thread can set the handler; in other threads nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _git(root: Path, *words: str) -> str:
    arguments: Sequence[str] = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(root), *words]
    try:
        done = subprocess.run(arguments, capture_output=True, text=True)
    except OSError as error:
        raise _no_git(str(error.strerror)) from None
    if done.returncode:
        raise _no_git((done.stderr.strip().splitlines() or ["no message"])[-1])
    return done.stdout.strip()


def _no_git(why: str) -> TesseraError:
    return TesseraError(
        f"git refused: {why}",
        where="--over commits",
        fix="run the command in the repository, and name commits of that repository",
        code="parity.git-failed",
    )
