"""Start the ranks of this machine under torch's launcher, one process per rank."""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed import Store, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tessera.cli.cluster import Cluster
from tessera.config.run_config import RunConfig
from tessera.errors import TesseraError, first_line
from tessera.observe.watchdog.watchdog import FAILURE_FILE
from tessera.runtime.distributed import RankFailure, free_port, port_is_free
from tessera.runtime.launcher import announce_launcher
from tessera.runtime.rendezvous import reach, serve_store, spans
from tessera.training.setup import build_meta_model


def launch(words: Sequence[str], cluster: Cluster, config: RunConfig) -> None:
    """Run `tessera WORDS` on the ranks of this machine. If a rank fails, exit with its exit code.

    The plan is made before any rank starts, so that a wrong layout is reported once. After a failure, the watchdog's
    report in the run folder names the rank that failed first.
    """
    if cluster.ranks is not None:
        build_meta_model(config, cluster.ranks)
    start_ranks(words, cluster, config.parallel.join_timeout_s, config.folder)


def start_ranks(words: Sequence[str], cluster: Cluster, join_timeout_s: float, folder: Path | None = None) -> None:
    """Run `tessera WORDS` on the ranks of this machine. `folder`: the run folder; None: the command does not train."""
    _quiet_launcher()
    announce_launcher()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // cluster.nproc)))
    began = time.time()
    rendezvous_store = None
    if cluster.endpoint is None:
        cluster = replace(cluster, endpoint=f"127.0.0.1:{free_port()}")
    try:
        # The store must live until the end: torch's launcher uses the same open port on the machine that serves it.
        rendezvous_store = _check_nodes(cluster, join_timeout_s)
        elastic_launch(_settings(cluster, join_timeout_s), sys.executable)("-m", "tessera.cli.main", *words)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        if folder is None or not _is_reported(folder, began):
            print(f"rank {rank} {_how_it_ended(first.exitcode)}", file=sys.stderr)
        raise SystemExit(first.exitcode if first.exitcode > 0 else RankFailure.exit_code) from None
    except (RendezvousError, dist.DistNetworkError, dist.DistStoreError) as error:
        raise TesseraError(
            f"{cluster.min_nodes} machines did not join the rendezvous at {cluster.endpoint} within "
            f"{join_timeout_s:g} s "
            f"({first_line(error)})",
            fix="start the same command on every machine; --nnodes is the number of machines",
            code="job.machines-did-not-join",
        ) from None
    except SignalException as error:
        # The ranks have received the same signal, and have saved a checkpoint.
        goes_on = "" if folder is None else "; `tessera resume` continues the run"
        print(f"stopped by {error.sigval.name}{goes_on}", file=sys.stderr)
        raise SystemExit(0 if folder is not None else 1) from None
    finally:
        del rendezvous_store


def _quiet_launcher() -> None:
    """Hide log lines of torch's launcher, unless TESSERA_WARNINGS is set: ranks report their failures themselves."""
    if not os.environ.get("TESSERA_WARNINGS"):
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)


def _settings(cluster: Cluster, join_timeout_s: float) -> LaunchConfig:
    timeout = int(join_timeout_s) + 1
    if cluster.elastic:
        rendezvous: dict[str, object] = {"join_timeout": timeout, "last_call_timeout": 3, "timeout": timeout}
        rendezvous["read_timeout"] = timeout
    else:
        rendezvous = {"rank": cluster.node_rank, "timeout": timeout}
    return LaunchConfig(
        min_nodes=cluster.min_nodes,
        max_nodes=cluster.max_nodes,
        nproc_per_node=cluster.nproc,
        run_id="tessera",  # must be equal on all machines of a run; runs differ by their endpoint
        rdzv_backend="c10d" if cluster.elastic else "static",
        rdzv_endpoint=cluster.endpoint or "",
        rdzv_configs=rendezvous,
        max_restarts=cluster.restarts,
        monitor_interval=0.1,
    )


def _check_nodes(cluster: Cluster, timeout_s: float) -> Store | None:
    """Wait until the machines of all --node-rank values have joined. Raise an error that names the missing ones.

    Machines with the same --node-rank, or with different --nproc, are refused. Return the store of the rendezvous; a
    single machine serves its own store on localhost. Elastic machines are not checked, and None is returned.
    """
    if cluster.elastic:
        return None
    assert cluster.endpoint is not None
    host, _, port = cluster.endpoint.rpartition(":")
    timeout = datetime.timedelta(seconds=timeout_s + 5)
    if cluster.node_rank == 0 and not port_is_free(int(port), ""):
        where = "--port" if cluster.max_nodes == 1 else "--master"
        raise TesseraError(
            f"port {port} is in use",
            where=where,
            fix="choose another port; on a single machine, --port may be left out",
            code="job.port-in-use",
        )
    if cluster.max_nodes == 1:
        return serve_store(host, int(port), timeout)
    deadline = time.monotonic() + timeout_s
    serves = cluster.node_rank == 0
    if not serves:
        reach(host.strip("[]"), int(port), timeout_s, "machine 0 is missing")
    store = TCPStore(host.strip("[]"), int(port), None, serves, timeout, wait_for_workers=False, multi_tenant=True)
    mine = f"nodes/{cluster.node_rank}"
    if store.add(f"{mine}/taken", 1) > 1:
        raise TesseraError(
            f"another machine has joined with --node-rank {cluster.node_rank}",
            where="--node-rank",
            fix="give each machine its own --node-rank",
            code="job.machine-number-taken",
        )
    store.set(mine, json.dumps([socket.gethostname(), cluster.nproc, cluster.max_nodes]))
    keys = [f"nodes/{node}" for node in range(cluster.max_nodes)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [node for node, key in enumerate(keys) if not store.check([key])]
            word = f"machines {spans(missing)} are" if len(missing) > 1 else f"machine {missing[0]} is"
            raise TesseraError(
                f"{word} missing: {len(keys) - len(missing)} of {len(keys)} joined {cluster.endpoint} within "
                f"{timeout_s:g} s",
                fix="start the same command on the missing machines, each with its own --node-rank",
                code="job.machines-did-not-join",
            )
        time.sleep(0.05)
    for node, text in enumerate(store.multi_get(keys)):
        name, nproc, nodes = json.loads(text)
        if (nproc, nodes) != (cluster.nproc, cluster.max_nodes):
            raise TesseraError(
                f"machine {node} ({name}) was started with --nproc {nproc} --nnodes {nodes}, machine "
                f"{cluster.node_rank} with --nproc {cluster.nproc} --nnodes {cluster.max_nodes}",
                fix="use the same --nproc and --nnodes on every machine",
                code="job.machines-disagree",
            )
    return store


def _is_reported(folder: Path, began: float) -> bool:
    """Return whether the watchdog has reported a failed rank after the time `began`."""
    try:
        return float(json.loads((folder / FAILURE_FILE).read_text(encoding="utf-8"))["time"]) >= began
    except (OSError, ValueError, KeyError):
        return False


def _how_it_ended(exitcode: int) -> str:
    return f"was ended by signal {-exitcode}" if exitcode < 0 else f"failed with exit code {exitcode}"
