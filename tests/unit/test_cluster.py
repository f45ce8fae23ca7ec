"""Several machines from one recipe: options are checked, and the job files of the page start every machine."""

from __future__ import annotations

import re
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from torch._C._distributed_c10d import HashStore

from tessera.cli.cluster import Cluster, parse_cluster
from tessera.cli.main import app
from tessera.errors import TesseraError
from tessera.runtime.rendezvous import RankInfo, _differences, check_ranks, spans

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "many-machines.md"


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


def job_file(language: str) -> str:
    """Return a job file of the page that users copy."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if "--or-resume" in block)


def machine_of(line: list[str]) -> Cluster:
    """Return the cluster that `tessera train` makes of the words of a job, by its own parser."""
    with typer.main.get_command(app).make_context("tessera", line, resilient_parsing=True) as context:
        command = context.command.get_command(context, "train")  # type: ignore[attr-defined]
        params = command.make_context("train", list(line[1:])).params
    assert params["or_resume"]
    assert params["overrides"] == ["name=my-run"]
    return parse_cluster(**{key: params[key] for key in ("nproc", "nnodes", "node_rank", "master")})


def test_the_sbatch_file_of_the_page_starts_each_machine(tmp_path: Path) -> None:
    """Commands that the script calls are replaced by scripts that print their arguments."""
    tools = {
        "scontrol": "printf 'alpha\\nbeta\\n'",
        "srun": 'shift; SLURM_NODEID=1 exec "$@"',
        "tessera": 'printf "%s\\n" "$@"',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"SLURM_JOB_NODELIST": "alpha,beta", "SLURM_JOB_ID": "20007", "SLURM_NNODES": "4"}
    env["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", job_file("bash")], env=env, capture_output=True, text=True, check=True)
    assert machine_of(done.stdout.splitlines()) == Cluster(8, 4, 4, 1, "alpha:20007", False, 0)


def test_the_manifest_of_the_page_starts_each_machine() -> None:
    manifest = yaml.safe_load(job_file("yml"))
    roles = manifest["spec"]["pytorchReplicaSpecs"]
    assert {role: spec["replicas"] for role, spec in roles.items()} == {"Master": 1, "Worker": 3}
    assert roles["Worker"]["template"] == roles["Master"]["template"]
    container = roles["Worker"]["template"]["spec"]["containers"][0]
    env = {"PATH": "/usr/bin:/bin", "RANK": "2", "MASTER_ADDR": "my-run-master-0", "MASTER_PORT": "29500"}
    program = container["command"][2].replace("exec tessera", "printf '%s\\n'")
    words = [*container["command"][:2], program, *container["command"][3:], *container["args"]]
    lines = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert machine_of(lines) == Cluster(8, 4, 4, 2, "my-run-master-0:29500", False, 0)


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
