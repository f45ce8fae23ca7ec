"""Starting this program under torch's own launcher, one process per rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tessera.core.dist import free_port, port_is_free
from tessera.core.errors import TesseraError


def launch(words: Sequence[str], nproc: int, port: int | None = None) -> None:
    """Runs `tessera WORDS` on `nproc` ranks of this machine and waits; a rank's exit code becomes ours."""
    if port is not None and not port_is_free(port):
        raise TesseraError(f"port {port} is in use", where="--port", fix="leave --port out to take a free one")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port or free_port()}",
        rdzv_configs={"rank": 0, "timeout": 60},
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(settings, sys.executable)("-m", "tessera.cli.main", *words)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        print(f"rank {rank} failed with exit code {first.exitcode}", file=sys.stderr)
        raise SystemExit(first.exitcode if first.exitcode > 0 else 1) from None
    except SignalException as error:
        # The ranks were told to stop and have saved by now.
        print(f"stopped by {error.sigval.name}; `tessera resume` goes on", file=sys.stderr)
        raise SystemExit(0) from None
