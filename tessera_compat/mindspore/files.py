"""Convert launch scripts in files: one, or all of a folder that start ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from tessera.errors import TesseraError, first_line, nearest
from tessera.runtime.files import read_text, replace_file
from tessera_compat.mindspore.convert import ConvertedScript, Form, convert
from tessera_compat.mindspore.script_text import launches_in, without_comments

SUFFIX = "_mindspore.sh"
MAX_BYTES = 1 << 18
_LLM, _RL = ("pretrain_gpt.py", "posttrain_gpt.py", "inference.py", "evaluation.py"), ("train_grpo.py", "train_ppo.py")


def scripts_of(path: Path) -> Iterator[Path]:
    """Yield the script, or the scripts of a folder that start ranks with torchrun."""
    if not path.is_dir():
        yield path
        return
    for script in sorted(path.rglob("*.sh")):
        if script.name.endswith(SUFFIX) or not script.is_file() or script.is_symlink():
            continue
        try:
            text = without_comments(read_text(script, MAX_BYTES))
        except TesseraError:
            yield script  # converting the script reports the error
            continue
        if any("msrun" not in text[launch.launcher.start : launch.launcher.end] for launch in launches_in(text)):
            yield script


def form_of(text: str) -> Form:
    """Return the form of a job from the file that it starts: language models, reinforcement learning or multimodal."""
    code = without_comments(text)
    if any(name in code for name in _RL):
        return "rl"
    return "llm" if any(name in code for name in _LLM) else "mm"


@dataclass
class ConvertedFiles:
    """Store the report on several scripts."""

    lines: list[str] = field(default_factory=list)
    is_incomplete: bool = False  # whether something has to be changed by hand, or a script could not be converted


def convert_all(paths: Sequence[Path], output: Path | None, form: str | None, overwrite: bool) -> ConvertedFiles:
    """Convert scripts and folders of scripts. A script that cannot be converted does not stop the others."""
    if form is not None and form not in get_args(Form):
        raise TesseraError(
            f"--form {form} does not exist", where="--form", allowed=get_args(Form),
            nearest=nearest(form, get_args(Form)), code="job.unknown-form",
        )  # fmt: skip
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise TesseraError(
            f"no such file or folder: {missing}", where="tessera migrate mindspore", code="job.file-missing"
        )
    scripts = [script for path in paths for script in scripts_of(path)]
    if not scripts:
        raise TesseraError(
            "no script of the folder starts ranks with torchrun", where=str(paths[0]), code="job.script-starts-nothing"
        )
    if output is not None and len(scripts) > 1:
        raise TesseraError(
            f"--output names one script, and there are {len(scripts)}", where="--output",
            fix="leave it out: each script is written beside its original", code="job.several-jobs",
        )  # fmt: skip
    done = ConvertedFiles()
    for script in scripts:
        try:
            target, converted = convert_file(script, output, cast("Form | None", form), overwrite)
        except TesseraError as error:
            if len(scripts) == 1:
                raise
            done.lines.append(f"{script}: {error}")
            done.is_incomplete = True
            continue
        done.lines += [f"{script}:", *(f"  {line}" for line in converted.lines()), f"wrote {target}"]
        done.is_incomplete |= bool(converted.by_hand)
    return done


def convert_file(source: Path, target: Path | None, form: Form | None, overwrite: bool) -> tuple[Path, ConvertedScript]:
    """Convert a script, and write it beside the original unless `target` names a file."""
    text = read_text(source, MAX_BYTES)
    if "\x00" in text:
        raise TesseraError("the launch script is not a text file", where=str(source), code="job.file-unreadable")
    newline = "\r\n" if "\r\n" in text else "\n"
    converted = convert(text.replace("\r\n", "\n"), str(source), form or form_of(text))
    target = target or source.with_name(source.stem + SUFFIX)
    if target.exists() and not overwrite:
        raise TesseraError(
            f"{target} already exists",
            where="--output",
            fix="add --overwrite, or choose another name",
            code="output.already-exists",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, converted.text.replace("\n", newline).encode())
        os.chmod(target, source.stat().st_mode & 0o777)
    except OSError as error:
        raise TesseraError(
            f"cannot write {target}: {first_line(error)}", where="--output", code="output.not-writable"
        ) from None
    return target, converted
