"""Apply, pass on or explain the environment variables that launch scripts of MindSpeed-MM and Megatron set.

`check_environment` refuses invalid values and returns a line for each variable that is set; launchers call it.
`prepare_rank` binds the process of a rank to cores. `begin_job` does both for the rank of a job file, and turns its
variables into settings.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tessera.core.callback import Callback
from tessera.errors import TesseraError, nearest
from tessera.runtime import device as devices
from tessera.runtime.distributed import environment_ranks
from tessera_compat.cpu_affinity import VARIABLE as AFFINITY
from tessera_compat.cpu_affinity import bind_rank, parse_affinity
from tessera_compat.debug import check_debug, wait_for_debugger

Treatment = Literal["honoured", "passed on", "no effect"]


@dataclass(frozen=True)
class AllowedValues:
    """List the valid values of an environment variable: a pattern, and words for the error message."""

    pattern: str
    allowed: tuple[str, ...]


@dataclass(frozen=True)
class Variable:
    """Describe how a run treats an environment variable."""

    treatment: Treatment
    meaning: str  # effect of the variable in other systems, and the setting of Tessera that replaces it
    values: AllowedValues | None = None  # None: any value
    setting: str = ""  # recipe key that gets the value when a job file is translated


_SWITCH = AllowedValues(r"[01]", ("0", "1"))
_SECONDS = AllowedValues(r"\d{1,9}", ("seconds, such as 1200",))
_TRUE = AllowedValues(r"(?i:true|false|0|1)", ("true", "false"))
_TO_ASCEND = "for the runtime of Ascend"

VARIABLES: dict[str, Variable] = {
    AFFINITY: Variable("honoured", "binds each rank to CPU cores, on every device"),
    "TASK_QUEUE_ENABLE": Variable(
        "passed on",
        "depth of Ascend's dispatch queue; other devices need no setting",
        AllowedValues(r"[012]", ("0 (off)", "1", "2")),
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": Variable(
        "passed on",
        "Megatron needs 1, FSDP2 of MindSpeed-MM more; Tessera does not depend on it",
        AllowedValues(r"[1-9]|[12]\d|3[0-2]", ("1 to 32",)),
    ),
    "HCCL_CONNECT_TIMEOUT": Variable(
        "honoured",
        "how long ranks wait for each other; in a recipe: parallel.join_timeout_s",
        _SECONDS,
        setting="parallel.join_timeout_s",
    ),
    "HCCL_EXEC_TIMEOUT": Variable(
        "honoured",
        "how long a collective may take; in a recipe: parallel.timeout_s",
        _SECONDS,
        setting="parallel.timeout_s",
    ),
    "HCCL_DETERMINISTIC": Variable(
        "passed on",
        "order of sums in Ascend's collectives",
        AllowedValues(r"(?i:true|false|strict|0|1)", ("true", "false", "strict")),
    ),
    "HCCL_WHITELIST_DISABLE": Variable("passed on", f"{_TO_ASCEND}: whether only listed hosts can connect", _SWITCH),
    "HCCL_BUFFSIZE": Variable(
        "passed on", f"{_TO_ASCEND}: MiB of a communication buffer", AllowedValues(r"\d{1,6}", ("MiB",))
    ),
    "HCCL_SOCKET_IFNAME": Variable("passed on", "network interface of Ascend's collectives"),
    "GLOO_SOCKET_IFNAME": Variable("honoured", "network interface of gloo; torch reads it"),
    "PYTORCH_NPU_ALLOC_CONF": Variable(
        "passed on", "Ascend's caching allocator; for other devices set PYTORCH_ALLOC_CONF"
    ),
    "COMBINED_ENABLE": Variable("passed on", f"{_TO_ASCEND}: merges operations on strided tensors", _SWITCH),
    "ASCEND_GLOBAL_LOG_LEVEL": Variable(
        "passed on",
        f"{_TO_ASCEND}: log level",
        AllowedValues(r"[0-4]", ("0 (debug) to 4 (nothing)",)),
    ),
    "ASCEND_SLOG_PRINT_TO_STDOUT": Variable("passed on", f"{_TO_ASCEND}: destination of its log", _SWITCH),
    "ASCEND_LAUNCH_BLOCKING": Variable(
        "passed on", "waits after each operation on Ascend; CUDA_LAUNCH_BLOCKING=1 does so on CUDA", _SWITCH
    ),
    "ASCEND_RT_VISIBLE_DEVICES": Variable(
        "passed on", "which Ascend devices a process sees; CUDA_VISIBLE_DEVICES for CUDA"
    ),
    "ACLNN_CACHE_LIMIT": Variable(
        "passed on", f"{_TO_ASCEND}: cache of operations", AllowedValues(r"\d{1,9}", ("a number",))
    ),
    "MULTI_STREAM_MEMORY_REUSE": Variable(
        "passed on", f"{_TO_ASCEND}: allocator", AllowedValues(r"[012]", ("0", "1", "2"))
    ),
    "NPU_ASD_ENABLE": Variable(
        "passed on",
        "Ascend's detection of silent errors; the guard of a run does this on every device (docs: survive bad steps)",
        AllowedValues(r"[0-3]", ("0 (off) to 3",)),
    ),
    "CLOSE_MATMUL_K_SHIFT": Variable("passed on", f"{_TO_ASCEND}: order of sums in matrix products", _SWITCH),
    "TOKENIZERS_PARALLELISM": Variable("honoured", "threads of tokenizers; off in worker processes"),
    "OMP_NUM_THREADS": Variable("honoured", "threads of torch on the CPU"),
    "NON_MEGATRON": Variable("no effect", "selects one of two trainers in MindSpeed-MM; Tessera has one", _TRUE),
    "VP_SIZE": Variable("no effect", "virtual pipeline stages come from --virtual-pipeline-model-parallel-size"),
    "ENABLE_GC_THRESHOLD": Variable(
        "no effect", "sets Python's garbage collector in MindSpeed-MM; Tessera does not change it", _SWITCH
    ),
    "HF_SAVE_WAIT_MODE": Variable(
        "no effect", "for saving Hugging Face folders in MindSpeed-MM; Tessera renames a complete export"
    ),
    "MM_FORCE_EP_BALANCE": Variable("no effect", "a debugging aid: it routes tokens evenly, which changes results"),
    "VLLM_USE_V1": Variable("no effect", "for a library that Tessera does not use"),
    "JSONARGPARSE_DEFAULT_ENV": Variable(
        "honoured", "true: mm-convert reads options from environment variables, too", _TRUE
    ),
}
_FOREIGN = re.compile(r"(?:ASCEND|HCCL|ACLNN|NPU|PYTORCH_NPU)_\w+")


def check_environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Raise for an invalid value. Return a line for each variable that has no effect, or another effect, in Tessera."""
    lines = []
    for name, value in sorted(environ.items()):
        variable = VARIABLES.get(name)
        if variable is None and not _FOREIGN.fullmatch(name):
            continue
        if variable is None:
            near = nearest(name, VARIABLES)
            hint = f"; did you mean {near}?" if near else ""
            lines.append(f"{name}={value}: passed on unchanged; Tessera does not read it{hint}")
            continue
        if variable.values and not re.fullmatch(variable.values.pattern, value):
            raise TesseraError(
                f"invalid value of an environment variable: {name}={value}",
                where="environment",
                allowed=variable.values.allowed,
                fix=f"change or unset {name}",
                code="environment.invalid-value",
            )
        if name == AFFINITY:
            parse_affinity(value)
        if variable.treatment != "honoured" or variable.setting:
            treatment = "honoured in job files" if variable.setting else variable.treatment
            lines.append(f"{name}={value}: {treatment}: {variable.meaning}")
    return lines


def check_run(world_size: int | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Check the variables before ranks start, and print once per run what each does.

    Return recipe settings for ranks that wait for a debugger, else {}. `world_size` is None while it is unknown.
    """
    lines = check_environment(environ)
    launched_here = (
        environ.get("TORCHELASTIC_RUN_ID") == "tessera"
    )  # then Tessera's launcher has printed the lines already
    if environment_ranks(environ)[0] == 0 and not launched_here:
        for line in lines:
            print(line, file=sys.stderr)
    return check_debug(world_size, environ)


def job_settings(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Translate environment variables of a job to recipe keys: {"parallel.join_timeout_s": 1200.0}."""
    check_environment(environ)
    return {
        variable.setting: float(environ[name])
        for name, variable in VARIABLES.items()
        if variable.setting and name in environ and float(environ[name]) > 0  # 0 means no timeout in these variables
    }


def prepare_rank(environ: Mapping[str, str] = os.environ) -> list[Callback]:
    """Wait for a debugger if `TESSERA_DEBUG` names this rank, and bind it to cores if `CPU_AFFINITY_CONF` is set.

    Return callbacks that bind threads which start later. Call it before the process group is created: threads and
    processes inherit the cores of their parent.
    """
    wait_for_debugger(environ)
    conf = parse_affinity(environ.get(AFFINITY, ""))
    if conf.mode == 0:
        return []
    if devices.binds_cores_itself():
        return []
    rank, _, local = environment_ranks(environ)
    ranks_here = max(1, local + 1, int(environ.get("LOCAL_WORLD_SIZE", 1)))
    return bind_rank(conf, local, devices.pci_addresses(ranks_here), warn=rank == 0)


@dataclass(frozen=True)
class JobStart:
    """Store the settings and callbacks that environment variables add to a job."""

    settings: dict[str, Any]  # recipe keys and their values
    callbacks: list[Callback]


def begin_job(prepared: list[Callback] | None = None) -> JobStart:
    """Check and report the environment variables of a job, wait for a debugger, and prepare this rank.

    `prepared`: the callbacks of `prepare_rank`, if it was called before the script started.
    """
    settings = {**job_settings(), **check_run(environment_ranks()[1])}
    return JobStart(settings, prepare_rank() if prepared is None else prepared)
