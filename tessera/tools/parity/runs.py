"""Record steps of a recipe or of an existing run, without changing the run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from tessera.config.run_config import load_config
from tessera.core.callback import Callback
from tessera.errors import TesseraError
from tessera.evaluation.parity.recorder import Budget
from tessera.evaluation.parity.recording import check_target
from tessera.runtime.collective import Ranks
from tessera.runtime.distributed import environment_ranks
from tessera.runtime.scratch import scratch_folder
from tessera.tools.parity.steps import RecordSteps
from tessera.training.run import resume, resume_config, train
from tessera.training.setup import build_meta_model

_SHARED = "TESSERA_RECORD_FOLDER"
_PREFIX = "tessera-record-"
_LAST_LINES = 8  # number of log lines in an error message
_STEP = re.compile(r"step-(\d{8,12})")
_QUIET: Mapping[str, Any] = {
    **{"checkpoint.at_end": False, "checkpoint.every": 0, "checkpoint.export": False},
    **{"log.trackers": [], "log.every": 1},
}


def parse_steps(text: str) -> tuple[int, int]:
    """Return first and last step of `3` or `1-2`, counted from 1."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or not 0 < int(first) <= int(last or first):
        raise TesseraError(
            f"not a range of steps: {text!r}",
            where="--steps",
            allowed=["3", "1-2 (steps are counted from 1)"],
            code="parity.wrong-steps",
        )
    return int(first), int(last or first)


def record(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    steps: str = "1",
    nproc: int = 1,
    budget: Budget | None = None,
    rounding: int = 2,
    trust: bool = False,
    journal: Path | None = None,
) -> Path:
    """Record steps of a recipe or a run into the folder `out`, and return the folder.

    A run is not changed: its newest checkpoint before the first step is resumed in a temporary copy. `nproc`: number of
    ranks; with more than one, `recipe` must be a file or a run. `journal`: file that gets the log of the training, in
    place of the terminal.
    """
    folder, (first, last), budget = Path(out), parse_steps(steps), budget or Budget()
    check_target(folder)
    if nproc > 1 and environment_ranks()[1] == 1:
        if isinstance(recipe, Mapping):
            raise TesseraError(
                "a recipe in memory can be recorded on one rank only",
                where="nproc",
                fix="write the recipe to a YAML file and name the file",
                code="parity.recipe-in-memory",
            )
        words = [f"{key}={_spelled(value)}" for key, value in (overrides or {}).items()]
        options = ["--steps", steps, "--rounding", str(rounding), "--elements", str(budget.elements)]
        options += ["--megabytes", str(budget.bytes >> 20), "--nproc", str(nproc), *(["--trust"] if trust else [])]
        _command(["record", str(recipe), *words, "--out", str(folder), *options], journal)
        return folder

    def callback(plan: Any) -> Callback:
        return RecordSteps(folder, first, last, plan=plan, budget=budget, rounding=rounding, label=_label(recipe))

    with logged_to(journal):
        observe(recipe, overrides, first, callback, trust=trust)
    if Ranks.current().rank == 0 and not folder.is_dir():
        raise TesseraError(
            f"the run ended before step {last}",
            where="--steps",
            fix="name earlier steps, or raise train.steps",
            code="parity.run-too-short",
        )
    return folder


def observe(
    recipe: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None,
    first: int,
    callback: Callable[[Any], Callback],
    *,
    trust: bool = False,
) -> None:
    """Train a recipe or continue a copy of a run in a temporary folder, with a callback.

    `first`: first step of interest; a run is resumed from its newest checkpoint before this step.
    """
    settings = {**(overrides or {}), **_QUIET}
    world = environment_ranks()[1]
    shared = os.environ.get(_SHARED)  # the launcher sets the same folder for all ranks
    with scratch_folder(_PREFIX) as temporary:
        out = temporary if shared is None else Path(shared)
        if isinstance(recipe, (str, Path)) and is_run(Path(recipe)):
            copy = out / "run"
            if int(os.environ.get("RANK", "0")) == 0:
                _copy_before(Path(recipe), copy, first)
            plan = build_meta_model(resume_config(Path(recipe), settings, trust), world).plan
            resume(copy, settings, trust=trust, callbacks=[callback(plan)])
        else:
            settings |= {"out": str(out), "name": "run"}
            plan = build_meta_model(load_config(recipe, settings), world).plan
            train(recipe, settings, callbacks=[callback(plan)])


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def _copy_before(run: Path, copy: Path, first: int) -> None:
    """Copy a run with its newest checkpoint before a step. Files of checkpoints never change, so they are linked."""
    checkpoints = run / "checkpoints"
    folders = {path: _STEP.fullmatch(path.name) for path in checkpoints.glob("step-*")}
    numbered = {path: int(match[1]) for path, match in folders.items() if match is not None}
    newest = max((path for path, step in numbered.items() if step < first), key=numbered.__getitem__, default=None)
    skipped = {"checkpoints", "logs", "index", "tensorboard", "report.html", "hf"}
    shutil.copytree(run, copy, ignore=lambda folder, names: skipped & set(names) if Path(folder) == run else set())
    (copy / "checkpoints").mkdir()
    if newest is not None:
        shutil.copytree(newest, copy / "checkpoints" / newest.name, copy_function=_link)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # hard links do not work across file systems
        shutil.copy2(source, target)


@contextmanager
def shared_folder() -> Iterator[None]:
    """Create a temporary folder in which all ranks train that are started inside of the `with` block."""
    with scratch_folder(_PREFIX) as shared:
        os.environ[_SHARED] = str(shared)
        try:
            yield
        finally:
            del os.environ[_SHARED]


@contextmanager
def logged_to(journal: Path | None) -> Iterator[None]:
    """Write log lines of this process to a file during the `with` block; None: to the terminal."""
    if journal is None:
        yield
        return
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file, redirect_stderr(file):
        yield


def _command(words: Sequence[str], journal: Path | None) -> None:
    command, last = [sys.executable, "-m", "tessera.cli.main", *words], ""
    if journal is None:
        code = subprocess.run(command).returncode
    else:
        journal.parent.mkdir(parents=True, exist_ok=True)
        with journal.open("ab") as file:
            code = subprocess.run(command, stdout=file, stderr=file).returncode
        last = "".join(f"\n    {line}" for line in journal.read_text(errors="replace").splitlines()[-_LAST_LINES:])
    if code:
        raise TesseraError(
            f"the recording failed with exit code {code}{last and ':'}{last}",
            where=" ".join(words[:2]),
            fix="read the messages above",
            code="parity.recording-failed",
        )


def _spelled(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, str) else value


def _label(recipe: str | Path | Mapping[str, Any]) -> str:
    return str(recipe.get("name", "recipe")) if isinstance(recipe, Mapping) else str(recipe)
