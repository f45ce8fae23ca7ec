"""One recipe as a job of a scheduler: an sbatch file for Slurm, a PyTorchJob manifest for Kubernetes. Text only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tessera.core.errors import TesseraError

_SLURM_WORD = re.compile(r"[\w.,:@%/\-]+")
_SLURM_NAME = re.compile(r"[\w.\-]+")
_DNS_LABEL = re.compile(
    r"[a-z0-9](?:[a-z0-9\-]{0,51}[a-z0-9])?"
)  # shorter than the limit: the operator adds -worker-NNN
_IMAGE = re.compile(r"[\w][\w./:@\-]*")
_RESOURCE = re.compile(r"[a-z0-9.\-]+/[A-Za-z0-9._\-]+")
_MASTER_PORT = 29500
_RESTARTS = 3


@dataclass(frozen=True)
class Job:
    """What every scheduler needs to know. `words` are those of `tessera train` before the machines come in."""

    words: Sequence[str]
    name: str
    nodes: int
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise TesseraError(f"{self.nodes} machines", where="--nodes", allowed=["1 or more"])
        if self.ranks_per_node < 1:
            raise TesseraError(f"{self.ranks_per_node} devices", where="--gpus-per-node", allowed=["1 or more"])

    def start_line(self, node_rank: str, endpoint: str) -> str:
        """For `sh -c LINE sh WORDS...`: the shell sees the words only as "$@", whatever they hold.

        A scheduler starts a job again after a machine was lost; then it goes on with the run.
        """
        line = f'exec tessera train "$@" --or-resume --nproc {self.ranks_per_node}'
        if self.nodes > 1:
            line += f' --nnodes {self.nodes} --node-rank "{node_rank}" --master "{endpoint}"'
        return line


def slurm_script(
    job: Job,
    *,
    partition: str | None = None,
    account: str | None = None,
    time_limit: str | None = None,
    cpus_per_rank: int | None = None,
    setup: str | None = None,
) -> str:
    _check(_SLURM_NAME, job.name, "--name", "letters, digits, dots, dashes")
    options: list[tuple[str, object]] = [
        ("job-name", job.name),
        ("nodes", job.nodes),
        ("ntasks-per-node", 1),
        ("gpus-per-node", job.ranks_per_node),
        ("output", "%x-%j.log"),
    ]
    for name, value in (("partition", partition), ("account", account), ("time", time_limit)):
        if value is not None:
            options.append((name, _check(_SLURM_WORD, value, f"--{name}", "one word")))
    if cpus_per_rank is not None:
        if cpus_per_rank < 1:
            raise TesseraError(f"{cpus_per_rank} cores per rank", where="--cpus-per-rank", allowed=["1 or more"])
        options.append(("cpus-per-task", cpus_per_rank * job.ranks_per_node))
    start = shlex.quote(job.start_line("$SLURM_NODEID", "$MASTER"))
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{name}={value}" for name, value in options),
        "#SBATCH --requeue",
        "",
        "set -euo pipefail",
        *([setup] if setup else []),
        "# The first machine is where all meet; the port differs from job to job.",
        'FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        'export MASTER="$FIRST:$((20000 + SLURM_JOB_ID % 20000))"',
        "# One launcher per machine; when one ends badly, Slurm ends the others.",
        f"srun --kill-on-bad-exit=1 sh -c {start} sh {shlex.join(job.words)}",
    ]
    return "\n".join(lines) + "\n"


def kubernetes_manifest(
    job: Job,
    *,
    image: str | None,
    pvc: str | None = None,
    mount: str = "/data",
    namespace: str | None = None,
    resource: str = "nvidia.com/gpu",
    workdir: str | None = None,
) -> str:
    label = "a lower-case name of letters, digits and dashes, at most 53"
    _check(_DNS_LABEL, job.name, "--name", label)
    if image is None:
        raise TesseraError("Kubernetes needs a container image", where="--image", fix="add --image REGISTRY/NAME:TAG")
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": _check(_IMAGE, image, "--image", "REGISTRY/NAME:TAG"),
        # The operator sets these variables in every pod; RANK there is the pod's number.
        "command": ["sh", "-c", job.start_line("$RANK", "$MASTER_ADDR:$MASTER_PORT"), "sh"],
        "args": list(job.words),
        "ports": [{"name": "pytorchjob-port", "containerPort": _MASTER_PORT}],
        "resources": {
            "limits": {_check(_RESOURCE, resource, "--resource", "such as nvidia.com/gpu"): job.ranks_per_node}
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    # Loader workers hand batches over in shared memory; a pod has 64 MiB of it unless told otherwise.
    volumes: list[dict[str, Any]] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if workdir is not None:
        container["workingDir"] = _absolute(workdir, "--workdir")
    if pvc is not None:
        claim = _check(_DNS_LABEL, pvc, "--pvc", label)
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
        container["volumeMounts"].append({"name": "data", "mountPath": _absolute(mount, "--mount")})
    metadata: dict[str, Any] = {"name": job.name}
    if namespace is not None:
        metadata["namespace"] = _check(_DNS_LABEL, namespace, "--namespace", label)

    def replicas(count: int) -> dict[str, Any]:
        pod = {"spec": {"containers": [container], "volumes": volumes}}
        return {"replicas": count, "restartPolicy": "OnFailure", "template": pod}

    roles = {"Master": replicas(1)}
    if job.nodes > 1:
        roles["Worker"] = replicas(job.nodes - 1)
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "runPolicy": {"backoffLimit": _RESTARTS, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": roles,
        },
    }
    return yaml.dump(manifest, Dumper=_NoAliases, sort_keys=False)


class _NoAliases(yaml.SafeDumper):
    """Master and Worker share objects here; in the file each is written out, for people."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _check(pattern: re.Pattern[str], value: str, where: str, allowed: str) -> str:
    if not pattern.fullmatch(value):
        raise TesseraError(f"not usable here: {value!r}", where=where, allowed=[allowed])
    return value


def _absolute(path: str, where: str) -> str:
    if not re.fullmatch(r"/[\w./\-]*", path) or ".." in path.split("/"):
        raise TesseraError(f"not an absolute path inside a container: {path!r}", where=where, allowed=["/data"])
    return path
