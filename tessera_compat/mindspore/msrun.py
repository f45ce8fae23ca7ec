"""Start the ranks of an msrun command with torchrun: python -m tessera_compat.mindspore.msrun OPTIONS SCRIPT ARGUMENTS

A command that asks for MindSpore by name (`--ai-framework mindspore`) starts MindSpore's own msrun, unchanged.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tessera.errors import TesseraError, nearest, reported
from tessera.mindspore.limits import check_installed
from tessera_compat.mindspeed_mm.shell.launch import MSRUN_RANKS, Launch

_OPTIONS = {
    *("worker_num", "local_worker_num", "master_addr", "master_port", "node_rank", "log_dir", "join"),
    *("cluster_time_out", "bind_core"),
}
_WITHOUT_EFFECT = {
    "join": "torchrun always waits for its ranks and passes on their exit code",
    "cluster_time_out": "ranks wait for each other as long as torchrun does",
}


def torchrun_command(words: Sequence[str]) -> tuple[list[str], dict[str, str], list[str]]:
    """Translate the arguments of msrun. Return those of torchrun, environment variables, and notes."""
    at = next((position for position, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        raise TesseraError(
            "the msrun command names no Python file to start",
            where="msrun",
            fix="write msrun ... pretrain_vlm.py ...",
            code="job.script-starts-nothing",
        )
    options, job = _options(words[:at]), list(words[at:])
    launch = Launch(Path("msrun"), 1, ["msrun", *words[:at]], job[0], job[1:], {})
    arguments = ["--nnodes", str(launch.machines), "--nproc_per_node", str(launch.ranks_per_machine)]
    arguments += ["--master_port", str(launch.port)]
    for name in ("master_addr", "node_rank"):
        if name in options:
            arguments += [f"--{name}", options[name]]
    notes = [f"--{name}: {why}" for name, why in _WITHOUT_EFFECT.items() if name in options]
    environment: dict[str, str] = {}
    if "log_dir" in options:
        arguments += ["--log-dir", options["log_dir"], "--tee", "3"]
    if options.get("bind_core", "").lower() == "true" and "CPU_AFFINITY_CONF" not in os.environ:
        environment["CPU_AFFINITY_CONF"] = "1"
        notes.append("--bind_core: CPU_AFFINITY_CONF=1 binds each rank to cores")
    if not {"worker_num", "local_worker_num"} & set(options):
        notes.append(f"{MSRUN_RANKS} ranks, as msrun starts without --worker_num")
    return [*arguments, *job], environment, notes


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the options before the script by their names."""
    options: dict[str, str] = {}
    waiting = ""
    for word in words:
        name, sign, _ = word.lstrip("-").replace("-", "_").partition("=")
        if waiting and not word.startswith("--"):
            options[waiting], waiting = word, ""
        elif word.startswith("--") and name in _OPTIONS:
            options[name] = word.partition("=")[2] if sign else ""
            waiting = "" if sign else name
        else:
            raise TesseraError(
                f"msrun has no option {word}, or the option has no equivalent in Tessera",
                where="msrun",
                allowed=[f"--{option}" for option in sorted(_OPTIONS)],
                nearest=nearest(name, _OPTIONS),
                code="job.unknown-option",
            )
    return options


def asks_for_mindspore(words: Sequence[str]) -> bool:
    """Return whether a command line contains `--ai-framework mindspore`."""
    return "--ai-framework=mindspore" in words or ("--ai-framework", "mindspore") in itertools.pairwise(words)


def main() -> None:
    with reported():
        if asks_for_mindspore(sys.argv):
            check_installed()
            os.execv(sys.executable, [sys.executable, "-m", "mindspore.parallel.cluster.run", *sys.argv[1:]])
        arguments, environment, notes = torchrun_command(sys.argv[1:])
    for note in notes:
        print(f"msrun: {note}", file=sys.stderr)
    os.environ.update(environment)
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])


if __name__ == "__main__":
    main()
