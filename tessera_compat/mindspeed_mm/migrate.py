"""Translate a job file to a recipe, and create a workspace: a folder in which the commands of such jobs work."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tessera.config.reader import apply_overrides, parse_overrides
from tessera.config.run_config import load_config
from tessera.config.yaml12 import StrictDumper
from tessera.errors import TesseraError
from tessera_compat.environment import VARIABLES, job_settings
from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.command_lines import ENTRIES, FEATURES, RECIPE, commands_of
from tessera_compat.mindspeed_mm.config_files import read_job_yaml
from tessera_compat.mindspeed_mm.flags import FLAGS
from tessera_compat.mindspeed_mm.fsdp_yaml import recipe_of_yaml
from tessera_compat.mindspeed_mm.job import recipe_of
from tessera_compat.mindspeed_mm.report import JobReport, Outcome
from tessera_compat.mindspeed_mm.shell.launch import Launch, ShellJob
from tessera_compat.mindspeed_mm.shell.reader import read_shell
from tessera_compat.served import ROOTS, TAKES_OVER

HERE = Path(__file__).parent
FSDP_TRAINER = Path("mindspeed_mm/fsdp/train/trainer.py")
TOOLS = Path("mindspeed_mm/tools/tools.json")
YAML_READER = Path("mindspeed_mm/configs/read_yaml_config.py")  # pretrain_transformers.py starts this file by its path
# Source of packages in a workspace: `torchrun script.py` imports Megatron and MindSpeed-MM from Tessera.
_PACKAGE = f'''"""Serve {{root}} from Tessera, to scripts that are started in this folder."""

{TAKES_OVER}

take_over(__name__)
'''
_TRAINING = (
    *("pretrain_vlm.py", "pretrain_omni.py", "pretrain_sora.py", "pretrain_transformers.py"),
    *("posttrain_qwen2vl_dpo.py", "posttrain_sora_dpo.py"),
    *(
        "pretrain_internvl.py",
        "pretrain_qwen2vl.py",
        "pretrain_llava.py",
    ),  # entry points of earlier releases, now pretrain_vlm.py
)
_EMPTY = ("logs", "data", "ckpt")
SHELL = Path(__file__).parent / "workspace"  # shell commands that jobs and guides of MindSpeed-MM call by these names


@dataclass(frozen=True)
class MigratedJob:
    """Store the recipe of a job, and a report on each flag and key."""

    recipe: dict[str, Any]  # empty: the commands need no recipe
    report: JobReport
    world_size: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)  # environment variables for the start command
    machines: int = 1
    port: int = 29500  # rendezvous port, for a job on several machines
    commands: tuple[str, ...] = ()  # commands of a job that does not train

    def start(self, recipe: Path) -> str:
        """Return the commands that run the job, one per line. With several machines, R stands for --node-rank."""
        path = shlex.quote(str(recipe))
        if self.commands:
            return "\n".join(command.replace(RECIPE, path) for command in self.commands)
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        ranks = str(self.world_size // self.machines)
        if self.recipe.get("framework") == "mindspore":
            return " ".join([*variables, *self._msrun(ranks), "tessera", "train", path])
        words = ["tessera", "train", path, "--nproc", ranks]
        if self.machines > 1:
            words += ["--nnodes", str(self.machines), "--node-rank", "R", "--master", f"HOST:{self.port}"]
        return " ".join([*variables, *words])

    def _msrun(self, ranks: str) -> list[str]:
        """Return the words that start `ranks` ranks on each machine by msrun. A single rank needs no launcher."""
        if self.world_size == 1:
            return []
        words = ["msrun", "--worker_num", str(self.world_size), "--local_worker_num", ranks, "--join", "True"]
        if self.machines > 1:
            words += ["--node_rank", "R", "--master_addr", "HOST", "--master_port", str(self.port)]
        return [*words, "--log_dir", "msrun_log"]

    def text(self) -> str:
        """Return the recipe as YAML."""
        return yaml.dump(self.recipe, Dumper=StrictDumper, sort_keys=False, allow_unicode=True, width=110)


def migrate(
    path: str | Path, *, world_size: int | None = None, environment: Mapping[str, str] | None = None
) -> MigratedJob:
    """Translate a launch script (.sh) or YAML job to a recipe, or to commands if it does not train.

    The script is not executed. `world_size`: number of ranks; default: as many as the script starts, 1 for a YAML file.
    `environment`: variables that are set when the script begins.
    """
    path = Path(path)
    if path.suffix in (".yaml", ".yml"):
        data = read_job_yaml(path)
        if "gpt_args" in data:
            return _by_flags([str(path)], world_size or 1)
        if "training" in data:
            return _checked(*recipe_of_yaml(data, str(path), world_size or 1), world_size or 1)
        raise TesseraError(
            "the YAML file is no job: it has no section gpt_args and no section training",
            where=str(path),
            allowed=["gpt_args, data, model", "parallel, model, data, training"],
            code="job.not-a-job",
        )
    if path.suffix != ".sh":
        raise TesseraError(
            f"{path.name} is neither a launch script nor a YAML job",
            where=str(path),
            allowed=["*.sh", "*.yaml"],
            code="job.not-a-job",
        )
    job, launch, joined = _read_script(path, environment)
    ranks = launch.world_size if world_size is None else world_size
    machines = ranks // launch.ranks_per_machine if ranks % launch.ranks_per_machine == 0 else 1
    commands_report = JobReport()
    if other := commands_of(launch.entry, launch.argv, ranks, commands_report):
        migrated = MigratedJob(other[0], commands_report, ranks, commands=other[1])
    elif Path(launch.entry).name == FSDP_TRAINER.name:
        if not launch.argv:
            raise TesseraError(
                f"the script starts {launch.entry} without a YAML file", where=launch.where, code="job.yaml-missing"
            )
        data = apply_overrides(read_job_yaml(Path(launch.argv[0])), parse_overrides(launch.argv[1:]), launch.argv[0])
        migrated = _checked(*recipe_of_yaml(data, launch.argv[0], ranks), ranks)
    else:
        migrated = _by_flags(launch.argv, ranks)
    _report_rest(migrated.report, job, launch)
    lines = path.read_text(encoding="utf-8").splitlines()
    for flag, value in joined.items():
        at = next((f" in line {number}" for number, text in enumerate(lines, 1) if value in text), "")
        note = f"a placeholder of several words{at}, read as one value: replace it"
        migrated.report.add("script", flag, value, "differs", note)
    migrated = migrated if migrated.commands else _with_environment(migrated, launch)
    return replace(migrated, machines=max(1, machines), port=launch.port)


def _read_script(path: Path, environment: Mapping[str, str] | None) -> tuple[ShellJob, Launch, dict[str, str]]:
    """Read a launch script, and join values that consist of several words.

    If the host file is on another machine, assume the smallest number of machines that the parallel sizes need.
    """
    job = read_shell(path, environment)
    launch = _launch_of(job)
    fewest = -(-launch.model_ranks // launch.ranks_per_machine)
    if job.hosts and fewest > 1:
        job = read_shell(path, environment, machines=fewest)
        launch = _launch_of(job)
    argv, joined = join_values(launch.argv)
    return job, replace(launch, argv=argv), joined


def join_values(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Join values that consist of several words. Return all words, and the joined values.

    They are placeholders that the user has not replaced, such as `--save path to save your weights`.
    """
    words: list[str] = []
    joined: dict[str, str] = {}
    for word in argv:
        flag = FLAGS.get(words[-2]) if len(words) > 1 else None
        if flag is not None and flag.kind == "str" and not word.startswith("-") and not words[-1].startswith("-"):
            words[-1] = joined[flag.name] = f"{words[-1]} {word}"
        else:
            words.append(word)
    return words, joined


def _launch_of(job: ShellJob) -> Launch:
    """Return the training command of a script. A script without one gives its first inference or evaluation command.

    Two training commands raise an error.
    """
    training = [one for one in job.launches if Path(one.entry).name in (*_TRAINING, FSDP_TRAINER.name)]
    if len(training) > 1:
        lines = " and ".join(str(one.line) for one in training)
        raise TesseraError(
            f"the script starts {len(training)} training jobs, in lines {lines}; a recipe describes only one",
            where=training[1].where,
            fix="split it into a script for each job",
            code="job.several-jobs",
        )
    asking = [one for one in job.launches if Path(one.entry).name in ENTRIES]
    launch = (training or asking or job.launches)[0]
    _check_entry(launch)
    return launch


def _report_rest(report: JobReport, job: ShellJob, launch: Launch) -> None:
    """Report the other commands of a script: further Python files that it starts, and commands with unknown effects."""
    for line, command, what in job.unread:
        report.add(
            "script",
            f"line {line}",
            command,
            "not supported",
            f"not evaluated: {what}; write the result into the script",
        )
    for other_launch in job.launches:
        if other_launch.line != launch.line:
            report.add(
                "script",
                f"line {other_launch.line}",
                other_launch.entry,
                "not needed",
                "does not train: start it separately",
            )
    for line, name in job.hosts:
        note = (
            f"{name} is not on this machine: {launch.machines} machines are assumed, enough for the model; "
            "NNODES=N tessera migrate sets another number"
        )
        report.add("script", f"line {line}", f"lines of {name}", "differs", note)
    for line, name in job.absent:
        note = f"{name} is not on this machine; the script exits if it is missing"
        report.add("script", f"line {line}", "exit", "not needed", note)
    for name, line in job.from_environment.items():
        report.add(
            "script",
            f"line {line}",
            f"${name}",
            "mapped",
            "value of the environment, instead of the output of a command",
        )
    for name, line in job.unset.items():
        report.add("script", f"line {line}", f"${name}", "not needed", "not set: empty, as in a shell")


def _with_environment(migrated: MigratedJob, launch: Launch) -> MigratedJob:
    """Translate the exported variables of the script, and report them."""
    recipe = apply_overrides(migrated.recipe, job_settings(launch.exports), str(launch.path))
    exported: dict[str, str] = {}
    for name, value in launch.exports.items():
        variable = VARIABLES.get(name)
        if variable is None:
            continue
        outcome: Outcome = "mapped" if variable.treatment == "honoured" else "not needed"
        note = variable.setting or variable.meaning
        if outcome == "mapped" and not variable.setting:
            exported[name], note = value, "not a recipe key: the start command sets the variable"
        migrated.report.add("environment", name, value, outcome, note)
    return replace(_checked(recipe, migrated.report, migrated.world_size), environment=exported)


def _by_flags(argv: list[str], world_size: int) -> MigratedJob:
    args = parse_args(argv, allow_refused=True, world_size=world_size, mindspore=True)
    return _checked(*recipe_of(args), world_size)


def _checked(recipe: dict[str, Any], report: JobReport, world_size: int) -> MigratedJob:
    load_config(recipe)  # raises for an invalid recipe before it is written
    return MigratedJob(recipe, report, world_size)


def _check_entry(launch: Launch) -> None:
    launcher, name = Path(launch.launcher[0]).name, Path(launch.entry).name
    if launcher == "accelerate":
        raise TesseraError(
            f"the launcher {launcher} is not supported",
            where=launch.where,
            fix="start the ranks with torchrun",
            code="job.unknown-launcher",
        )
    if name not in (*_TRAINING, *ENTRIES, FSDP_TRAINER.name):
        raise TesseraError(
            f"the Python script {name} is not supported",
            where=launch.where,
            allowed=[*_TRAINING, *ENTRIES, str(FSDP_TRAINER)],
            code="job.unknown-entry",
        )


def _update_imports(file: Path) -> bool:
    """Replace `tessera.compat`, the earlier name of this package, in a file; return whether the file changed."""
    text = file.read_text(encoding="utf-8")
    updated = text.replace("from tessera.compat.", "from tessera_compat.")
    if updated != text:
        file.write_text(updated, encoding="utf-8")
    return updated != text


def lay_out(folder: Path) -> list[Path]:
    """Create a workspace: entry points, examples, packages to import, and empty folders. Return the written files.

    Existing files are not replaced; imports of this package under its earlier name are updated in them.
    """
    if folder.exists() and not folder.is_dir():
        raise TesseraError(
            f"{folder} is a file", where="tessera migrate workspace", fix="pass a folder", code="output.not-a-folder"
        )
    sources = {path.name: path for path in sorted((HERE / "entry").glob("*.py")) if path.name != "__init__.py"}
    features = sources.pop(FEATURES[0])
    files = {Path(name): path for name, path in sources.items() if name != "fsdp_trainer.py"}
    files[FSDP_TRAINER] = sources["fsdp_trainer.py"]
    files |= {Path(name): sources["pretrain_vlm.py"] for name in _TRAINING if name not in sources}
    files |= {Path("mindspeed_mm/tools/feature_extraction") / name: features for name in FEATURES}
    files |= {Path(path.name): path for path in sorted(SHELL.iterdir())}
    examples = [path for path in sorted((HERE / "examples").rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    files |= {Path("examples") / path.relative_to(HERE / "examples"): path for path in examples}
    tools = Path("examples/tools.json")
    files[TOOLS] = files.pop(tools)
    texts = {Path(root) / "__init__.py": _PACKAGE.format(root=root) for root in ROOTS}
    texts[YAML_READER] = '"""Do nothing: the parser of flags reads YAML jobs itself."""\n'
    written: list[Path] = []
    try:
        for empty in _EMPTY:
            (folder / empty).mkdir(parents=True, exist_ok=True)
        for name in (*files, *texts):
            target = folder / name
            if target.exists():
                written += [target] if target.suffix == ".py" and _update_imports(target) else []
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in texts:
                target.write_text(texts[name], encoding="utf-8")
            else:
                shutil.copy(files[name], target)
            written.append(target)
    except OSError as error:
        raise TesseraError(
            f"{folder} cannot be written: {error.strerror}",
            where="tessera migrate workspace",
            code="output.not-writable",
        ) from None
    return written
