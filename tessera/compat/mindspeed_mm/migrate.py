"""Make the Tessera recipe of a job file, and lay out a folder in which the commands of such jobs work."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tessera.compat.environment import VARIABLES, job_settings
from tessera.compat.mindspeed_mm.arguments import parse_args
from tessera.compat.mindspeed_mm.config_files import read_job_yaml
from tessera.compat.mindspeed_mm.fsdp_yaml import recipe_of_yaml
from tessera.compat.mindspeed_mm.job import recipe_of
from tessera.compat.mindspeed_mm.report import JobReport, Outcome
from tessera.compat.mindspeed_mm.shell.launch import Launch, ShellJob
from tessera.compat.mindspeed_mm.shell.reader import read_shell
from tessera.core.config import apply_overrides, parse_overrides
from tessera.core.errors import TesseraError
from tessera.core.run_config import load_config
from tessera.core.yaml12 import StrictDumper

HERE = Path(__file__).parent
FSDP_TRAINER = Path("mindspeed_mm/fsdp/train/trainer.py")
TOOLS = Path("mindspeed_mm/tools/tools.json")
_TRAINING = (
    *("pretrain_vlm.py", "pretrain_sora.py", "pretrain_transformers.py"),
    *("posttrain_qwen2vl_dpo.py", "posttrain_sora_dpo.py"),
)
FEATURES = ("get_sora_feature.py", "get_wan_feature.py", "get_hunyuan_feature.py")  # one program, by the names of all
_EMPTY = ("logs", "data", "ckpt")


@dataclass(frozen=True)
class MigratedJob:
    """Hold a recipe that does what a job did, and the report on each key of the job."""

    recipe: dict[str, Any]
    report: JobReport
    world_size: int
    environment: Mapping[str, str] = field(default_factory=dict)  # variables that its start has to set

    def start(self, recipe: Path) -> str:
        """Return the command that starts the recipe."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        words = ["tessera", "train", shlex.quote(str(recipe)), "--nproc", str(self.world_size)]
        return " ".join([*variables, *words])

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
    launch = _training_launch(job)
    ranks = launch.world_size if world_size is None else world_size
    if Path(launch.entry).name == FSDP_TRAINER.name:
        if not launch.argv:
            raise TesseraError(f"{launch.entry} is started without a YAML file", where=launch.where)
        data = apply_overrides(read_job_yaml(Path(launch.argv[0])), parse_overrides(launch.argv[1:]), launch.argv[0])
        migrated = _checked(*recipe_of_yaml(data, launch.argv[0], ranks), ranks)
    else:
        migrated = _by_flags(launch.argv, ranks)
    _report_rest(migrated.report, job, launch)
    return _with_environment(migrated, launch)


def _training_launch(job: ShellJob) -> Launch:
    """Return the command of a script that trains; a script that starts two such jobs has no single recipe."""
    training = [one for one in job.launches if Path(one.entry).name in (*_TRAINING, FSDP_TRAINER.name)]
    if len(training) > 1:
        lines = " and ".join(str(one.line) for one in training)
        raise TesseraError(
            f"the script starts {len(training)} jobs, in lines {lines}, and a recipe is one",
            where=training[1].where,
            fix="make a script of each",
        )
    launch = (training or job.launches)[0]
    _check_entry(launch)
    return launch


def _report_rest(report: JobReport, job: ShellJob, launch: Launch) -> None:
    """Add what a script does beside the launch, and what of it was not read."""
    for line, command, what in job.unread:
        report.add("script", f"line {line}", command, "not supported", f"not read: {what}; write it into the script")
    for one in job.launches:
        if one is not launch:
            report.add("script", f"line {one.line}", one.entry, "not needed", "no training: start it by itself")
    for name, line in job.unset.items():
        report.add("script", f"line {line}", f"${name}", "not needed", "not set here: nothing, as in a shell")


def _with_environment(migrated: MigratedJob, launch: Launch) -> MigratedJob:
    """Add what the exported variables of the script say to the recipe and to the report."""
    recipe = apply_overrides(migrated.recipe, job_settings(launch.exports), str(launch.path))
    kept: dict[str, str] = {}
    for name, value in launch.exports.items():
        known = VARIABLES.get(name)
        if known is None:
            continue
        outcome: Outcome = "mapped" if known.treatment == "honoured" else "not needed"
        note = known.setting or known.meaning
        if outcome == "mapped" and not known.setting:
            kept[name], note = value, "no key of a recipe: the command that starts it sets the variable"
        migrated.report.add("environment", name, value, outcome, note)
    return _checked(recipe, migrated.report, migrated.world_size, kept)


def _by_flags(argv: list[str], world_size: int) -> MigratedJob:
    args = parse_args(argv, allow_refused=True, world_size=world_size)
    return _checked(*recipe_of(args), world_size)


def _checked(
    recipe: dict[str, Any], report: JobReport, world_size: int, environment: Mapping[str, str] | None = None
) -> MigratedJob:
    load_config(recipe)  # a recipe that no run would take is not written
    return MigratedJob(recipe, report, world_size, environment or {})


def _check_entry(launch: Launch) -> None:
    launcher, name = Path(launch.launcher[0]).name, Path(launch.entry).name
    if launcher in ("msrun", "accelerate"):
        raise TesseraError(
            f"{launcher} starts another framework or trainer", where=launch.where, fix="start the ranks with torchrun"
        )
    if name not in (*_TRAINING, FSDP_TRAINER.name):
        raise TesseraError(
            f"{name} trains nothing that has a recipe",
            where=launch.where,
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
    features = sources.pop(FEATURES[0])
    files = {Path(name): path for name, path in sources.items() if name != "fsdp_trainer.py"}
    files[FSDP_TRAINER] = sources["fsdp_trainer.py"]
    files |= {Path("mindspeed_mm/tools/feature_extraction") / name: features for name in FEATURES}
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
