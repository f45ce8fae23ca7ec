"""Several machines from one recipe: what is asked for is checked, and the jobs that are written hold together."""

from __future__ import annotations

import shlex
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch._C._distributed_c10d import HashStore
from typer.testing import CliRunner

from tessera.cli.cluster import Cluster, Job, kubernetes_manifest, parse_cluster, slurm_script
from tessera.cli.main import app
from tessera.errors import TesseraError
from tessera.runtime.rendezvous import RankInfo, _differences, check_ranks, spans
from tests.toys.chat_set import chat_recipe

WORDS = ["my recipes/r.yaml", "optim.lr=1e-4", "name=it's"]
JOB = Job(WORDS, "vlm-7b", 4, 8)


def test_one_machine_static_and_elastic() -> None:
    assert parse_cluster() == Cluster()
    assert not parse_cluster().launches
    assert parse_cluster(nproc=2).launches
    assert parse_cluster(nproc=8, port=29501).endpoint == "127.0.0.1:29501"
    static = parse_cluster(nproc=8, nnodes="4", node_rank=3, master="node-0:29500")
    assert static == Cluster(8, 4, 4, 3, "node-0:29500", False, 0)
    assert parse_cluster(nnodes="2", node_rank=0, master="10.0.0.1:1").launches  # one rank on each of two machines
    elastic = parse_cluster(nproc=8, nnodes="2:4", rdzv="[fe80::1]:29500", restarts=3)
    assert elastic == Cluster(8, 2, 4, 0, "[fe80::1]:29500", True, 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": "0"}, "job.machines-not-a-number"),
        ({"nnodes": "4:2"}, "job.machines-not-a-number"),
        ({"nnodes": "two"}, "job.machines-not-a-number"),
        ({"nnodes": "2:4"}, "job.range-without-rendezvous"),
        ({"nnodes": "4", "node_rank": 0}, "job.machine-not-numbered"),
        ({"nnodes": "4", "master": "a:1"}, "job.machine-not-numbered"),
        ({"nnodes": "4", "master": "a:1", "node_rank": 4}, "job.machine-out-of-range"),
        ({"nnodes": "4", "master": "a:1", "node_rank": 1, "restarts": 1}, "job.restarts-need-rendezvous"),
        ({"nnodes": "4", "master": "a:1", "rdzv": "a:1"}, "job.master-and-rendezvous"),
        ({"nnodes": "4", "master": "a", "node_rank": 1}, "job.not-an-endpoint"),
        ({"nnodes": "4", "master": "a:70000", "node_rank": 1}, "job.not-an-endpoint"),
        ({"nnodes": "4", "master": "a b:1", "node_rank": 1}, "job.not-an-endpoint"),
        ({"nnodes": "2", "rdzv": "a:1", "node_rank": 1}, "job.option-without-effect"),
        ({"master": "a:1"}, "job.option-without-effect"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TesseraError) as error:
        parse_cluster(**options)
    assert words in str(error.value)


def test_the_slurm_script_is_a_shell_script_that_keeps_every_word(tmp_path: Path) -> None:
    text = slurm_script(JOB)
    script = tmp_path / "job.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)
    options = dict(
        line[len("#SBATCH --") :].split("=", 1) for line in text.splitlines() if "SBATCH" in line and "=" in line
    )
    assert options["nodes"] == "4"
    assert options["ntasks-per-node"] == "1"
    assert options["gpus-per-node"] == "8"
    srun = shlex.split(text.splitlines()[-1])
    assert srun[-3:] == WORDS
    assert '--nnodes 4 --node-rank "$SLURM_NODEID" --master "$MASTER"' in srun[4]


def test_the_slurm_script_runs_with_its_scheduler_played(tmp_path: Path) -> None:
    """Each command that the script calls is replaced by one that tells what it was given."""
    tools = {
        "scontrol": "printf 'alpha\\nbeta\\n'",
        "srun": 'shift; SLURM_NODEID=1 exec "$@"',
        "tessera": 'printf "%s\\n" "$@"',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "alpha,beta", "SLURM_JOB_ID": "20007"}
    done = subprocess.run(["bash", "-c", slurm_script(JOB)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == (
        ["train", *WORDS, "--or-resume", "--nproc", "8", "--nnodes", "4", "--node-rank", "1", "--master", "alpha:20007"]
    )


def test_the_manifest_is_a_pytorchjob() -> None:
    text = kubernetes_manifest(JOB, image="registry.io/team/tessera:1", pvc="datasets")
    manifest = yaml.safe_load(text)
    assert "&id" not in text
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert manifest["metadata"] == {"name": "vlm-7b"}
    roles = manifest["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 3}
    pod = roles["Worker"]["template"]["spec"]
    container = pod["containers"][0]
    assert container["name"] == "pytorch"
    assert container["args"] == WORDS
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}} in pod["volumes"]
    # The shell of the pod, with the operator's variables.
    env = {"PATH": "/usr/bin:/bin", "RANK": "2", "MASTER_ADDR": "vlm-7b-master-0", "MASTER_PORT": "29500"}
    words = ["sh", "-c", container["command"][2].replace("exec tessera", "printf '%s\\n'"), "sh", *container["args"]]
    said = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[:4] == ["train", *WORDS]
    assert said[-4:] == ["--node-rank", "2", "--master", "vlm-7b-master-0:29500"]


def test_one_machine_needs_no_meeting_point() -> None:
    single = Job(["r.yaml"], "one", 1, 8)
    assert "--master" not in slurm_script(single)
    assert "Worker" not in yaml.safe_load(kubernetes_manifest(single, image="i"))["spec"]["pytorchReplicaSpecs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slurm", "name=a b"], "name"),
        (["--kubernetes"], "--image"),
        (["--kubernetes", "--image", "i", "name=Upper_Case"], "name"),
        (["--kubernetes", "--image", "i", "--pvc", "../x"], "--pvc"),
        (["--slurm", "--kubernetes"], "job.no-scheduler"),
        ([], "job.no-scheduler"),
    ],
)
def test_a_job_that_cannot_be_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(chat_recipe(tmp_path, tmp_path)))
    result = CliRunner().invoke(app, ["launch", str(recipe), *words])
    assert isinstance(result.exception, TesseraError)
    assert message in str(result.exception)


def test_the_verb_writes_the_file(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(yaml.safe_dump(chat_recipe(tmp_path, tmp_path)))
    result = CliRunner().invoke(
        app, ["launch", str(recipe), "optim.lr=2e-5", "--slurm", "-o", str(tmp_path / "job.sh")]
    )
    assert result.exit_code == 0, result.output
    assert "optim.lr=2e-5" in (tmp_path / "job.sh").read_text()
    assert "--job-name=chat" in (tmp_path / "job.sh").read_text()


CARD = RankInfo(0, 4, 0, 2, "alpha", 1, "3.11", "2.13.0", "0.1.0", "model=1 data=2")


def cards(**changes: Any) -> list[str]:
    job = [replace(CARD, rank=rank, local_rank=rank % 2, host="alpha" if rank < 2 else "beta") for rank in range(4)]
    return [card.dump() for card in [*job[:3], replace(job[3], **changes)]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        (
            {"torch": "2.11.0"},
            "not the same torch version everywhere: 2.11.0 on rank 3 (beta), 2.13.0 on rank 0 (alpha)",
        ),
        ({"config": "model=1 data=3"}, "not the same configuration (data) everywhere: another one on rank 3 (beta)"),
        ({"size": 8}, "not the same world size"),
    ],
)
def test_ranks_that_differ_are_named(changes: dict[str, Any], words: str) -> None:
    assert _differences(cards(**changes)) == words if not words else words in _differences(cards(**changes))


def meet_in_threads(folders: list[Path | None], patience_s: float = 3.0, **changes: Any) -> list[str]:
    """Two ranks at one store; what each was told."""
    store = HashStore()
    pair = [replace(CARD, size=2), replace(CARD, size=2, rank=1, local_rank=1, host="beta", **changes)]
    told = ["", ""]

    def meet(rank: int) -> None:
        try:
            met = check_ranks(store, pair[rank], patience_s, folders[rank])
            told[rank] = f"met {len(met)}"
        except TesseraError as error:
            told[rank] = error.what

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return told


def test_all_ranks_get_the_same_verdict(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    assert meet_in_threads([shared, shared]) == ["met 2", "met 2"]
    assert list(shared.iterdir()) == []  # nothing is left behind
    first, second = meet_in_threads([None, None], tessera="9.9")
    assert first == second
    assert "not the same Tessera version everywhere: 9.9 on rank 1 (beta)" in first


def test_a_folder_that_is_not_shared_is_named(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = meet_in_threads([tmp_path / "a", tmp_path / "b"])
    assert first == second
    assert "rank 1 (on beta): does not see the folder that rank 0 made" in first
    assert list((tmp_path / "a").iterdir()) == []
    (tmp_path / "file").touch()
    first, second = meet_in_threads([tmp_path / "file", tmp_path / "file"])
    assert first == second
    assert "rank 0 cannot write there" in first


def test_spans() -> None:
    assert spans([5, 0, 1, 2]) == "0-2, 5"
    assert spans([7]) == "7"
