"""Make the Tessera recipe of a job file, and lay out a folder in which the commands of such jobs work."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tessera.compat.environment import VARIABLES, job_settings
from tessera.compat.mindspeed_mm.arguments import parse_args
from tessera.compat.mindspeed_mm.config_files import read_job_yaml
from tessera.compat.mindspeed_mm.fsdp_yaml import recipe_of_yaml
from tessera.compat.mindspeed_mm.job import recipe_of
from tessera.compat.mindspeed_mm.report import JobReport, Outcome
from tessera.compat.mindspeed_mm.shell import ShellJob, read_shell
from tessera.core.config import apply_overrides, parse_overrides
from tessera.core.errors import TesseraError
from tessera.core.run_config import load_config
from tessera.core.yaml12 import StrictDumper

HERE = Path(__file__).parent
FSDP_TRAINER = Path("mindspeed_mm/fsdp/train/trainer.py")
TOOLS = Path("mindspeed_mm/tools/tools.json")
_TRAINING = ("pretrain_vlm.py", "pretrain_transformers.py", "posttrain_qwen2vl_dpo.py")
_EMPTY = ("logs", "data", "ckpt")


@dataclass(frozen=True)
class MigratedJob:
    """Hold a recipe that does what a job did, and the report on each key of the job."""

    recipe: dict[str, Any]
    report: JobReport
    world_size: int

    def text(self) -> str:
        """Return the recipe as YAML."""
        return yaml.dump(self.recipe, Dumper=StrictDumper, sort_keys=False, allow_unicode=True, width=110)


def migrate(path: Path, *, world_size: int | None = None, environment: Mapping[str, str] | None = None) -> MigratedJob:
    """Return the recipe of a launch script (.sh) or a YAML job. Nothing of it is executed.

    `world_size`: number of ranks; default: what the script starts, or 1 for a YAML file. `environment`: variables that
    are set when the script begins.
    """
    if path.suffix in (".yaml", ".yml"):
        data = read_job_yaml(path)
        if "gpt_args" in data:
            return _by_flags([str(path)], world_size or 1)
        if "training" in data:
            return _checked(*recipe_of_yaml(data, str(path), world_size or 1), world_size or 1)
        raise TesseraError(
            "this is no job: it has neither gpt_args nor training",
            where=str(path),
            allowed=["gpt_args, data, model", "parallel, model, data, training"],
        )
    if path.suffix != ".sh":
        raise TesseraError(f"{path.name} is no job file", where=str(path), allowed=["*.sh", "*.yaml"])
    job = read_shell(path, environment)
    ranks = job.world_size if world_size is None else world_size
    _check_entry(job)
    if Path(job.entry).name == FSDP_TRAINER.name:
        if not job.argv:
            raise TesseraError(f"{job.entry} is started without a YAML file", where=str(path))
        data = apply_overrides(read_job_yaml(Path(job.argv[0])), parse_overrides(job.argv[1:]), job.argv[0])
        migrated = _checked(*recipe_of_yaml(data, job.argv[0], ranks), ranks)
    else:
        migrated = _by_flags(job.argv, ranks)
    return _with_environment(migrated, job)


def _with_environment(migrated: MigratedJob, job: ShellJob) -> MigratedJob:
    """Add what the exported variables of the script say to the recipe and to the report."""
    recipe = apply_overrides(migrated.recipe, job_settings(job.exports), str(job.path))
    for name, value in job.exports.items():
        if name in VARIABLES:
            known = VARIABLES[name]
            outcome: Outcome = "mapped" if known.treatment == "honoured" else "not needed"
            migrated.report.add("environment", name, value, outcome, known.setting or known.meaning)
    return _checked(recipe, migrated.report, migrated.world_size)


def _by_flags(argv: list[str], world_size: int) -> MigratedJob:
    args = parse_args(argv, allow_refused=True, world_size=world_size)
    return _checked(*recipe_of(args), world_size)


def _checked(recipe: dict[str, Any], report: JobReport, world_size: int) -> MigratedJob:
    load_config(recipe)  # a recipe that no run would take is not written
    return MigratedJob(recipe, report, world_size)


def _check_entry(job: ShellJob) -> None:
    launcher, name = Path(job.launcher[0]).name, Path(job.entry).name
    if launcher in ("msrun", "accelerate"):
        raise TesseraError(
            f"{launcher} starts another framework or trainer", where=str(job.path), fix="start the ranks with torchrun"
        )
    if name not in (*_TRAINING, FSDP_TRAINER.name):
        raise TesseraError(
            f"{name} trains nothing that has a recipe",
            where=str(job.path),
            allowed=[*_TRAINING, str(FSDP_TRAINER)],
            fix="tessera generate and tessera eval ask a model; see tessera --help",
        )


def lay_out(folder: Path) -> list[Path]:
    """Write entry points, examples and empty folders where commands of such jobs expect them; return what is new.

    Files that are already there are left as they are.
    """
    if folder.exists() and not folder.is_dir():
        raise TesseraError(f"{folder} is a file", where="tessera migrate workspace", fix="name a folder")
    sources = {path.name: path for path in sorted((HERE / "entry").glob("*.py")) if path.name != "__init__.py"}
    files = {Path(name): path for name, path in sources.items() if name != "fsdp_trainer.py"}
    files[FSDP_TRAINER] = sources["fsdp_trainer.py"]
    examples = [path for path in sorted((HERE / "examples").rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    files |= {Path("examples") / path.relative_to(HERE / "examples"): path for path in examples}
    tools = Path("examples/tools.json")
    files[TOOLS] = files.pop(tools)
    written: list[Path] = []
    try:
        for empty in _EMPTY:
            (folder / empty).mkdir(parents=True, exist_ok=True)
        for name, source in files.items():
            target = folder / name
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
                written.append(target)
    except OSError as error:
        raise TesseraError(f"{folder} cannot be written: {error.strerror}", where="tessera migrate workspace") from None
    return written
