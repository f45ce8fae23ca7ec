"""Check the command line options about machines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tessera.errors import TesseraError

_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):(?P<port>\d{1,5})")
_MAX_NODES = 100_000


@dataclass(frozen=True)
class Cluster:
    """Describe the machines of a run: one, several with a fixed --node-rank each, or a varying number (elastic)."""

    nproc: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None  # HOST:PORT of the rendezvous
    elastic: bool = False
    restarts: int = 0

    @property
    def ranks(self) -> int | None:
        """Return the number of ranks on all machines; None if the number of machines may vary."""
        return self.nproc * self.max_nodes if self.min_nodes == self.max_nodes else None

    @property
    def launches(self) -> bool:
        """Return whether this process must start the ranks as child processes; otherwise it is the only rank itself."""
        return self.nproc > 1 or self.endpoint is not None or self.restarts > 0


def parse_cluster(
    *,
    nproc: int = 1,
    nnodes: str = "1",
    node_rank: int | None = None,
    master: str | None = None,
    rdzv: str | None = None,
    restarts: int = 0,
    port: int | None = None,
) -> Cluster:
    low, high = _node_range(nnodes)
    if master is not None and rdzv is not None:
        raise TesseraError(
            "--master and --rdzv exclude each other",
            fix="use --master for a fixed number of machines, --rdzv for a range",
            code="job.master-and-rendezvous",
        )
    if rdzv is not None:
        _refuse("--rdzv", {"--node-rank": node_rank, "--port": port}, "the rendezvous numbers elastic machines")
        return Cluster(nproc, low, high, 0, _endpoint(rdzv, "--rdzv"), True, restarts)
    if low != high:
        raise TesseraError(
            f"--nnodes {nnodes} is a range of machines, which needs a rendezvous",
            where="--nnodes",
            fix="add --rdzv HOST:PORT",
            code="job.range-without-rendezvous",
        )
    if high == 1:
        _refuse("--nnodes 1", {"--node-rank": node_rank or None, "--master": master}, "one machine needs neither")
        endpoint = None if port is None else _endpoint(f"127.0.0.1:{port}", "--port")
        return Cluster(nproc, 1, 1, 0, endpoint, False, restarts)
    if master is None or node_rank is None:
        missing = "--master" if master is None else "--node-rank"
        raise TesseraError(
            f"{missing} is missing for {high} machines",
            where=missing,
            fix="on each machine, add its own --node-rank (from 0) and the same --master HOST:PORT",
            code="job.machine-not-numbered",
        )
    if not 0 <= node_rank < high:
        raise TesseraError(
            f"--node-rank {node_rank} is out of range for {high} machines",
            where="--node-rank",
            allowed=[f"0 to {high - 1}"],
            code="job.machine-out-of-range",
        )
    if restarts:
        raise TesseraError(
            "--restarts does not work with --master",
            where="--restarts",
            fix="use --rdzv in place of --master",
            code="job.restarts-need-rendezvous",
        )
    _refuse("--master", {"--port": port}, "--master contains the port")
    return Cluster(nproc, high, high, node_rank, _endpoint(master, "--master"), False, 0)


def _refuse(beside: str, options: dict[str, object | None], why: str) -> None:
    names = [name for name, value in options.items() if value is not None]
    if names:
        raise TesseraError(
            f"{names[0]} has no effect with {beside}: {why}",
            where=names[0],
            fix=f"leave {names[0]} out",
            code="job.option-without-effect",
        )


def _node_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= _MAX_NODES:
        raise TesseraError(
            f"--nnodes must be a number or a range of machines, got {text!r}",
            where="--nnodes",
            allowed=["4", "2:4 (elastic)"],
            code="job.machines-not-a-number",
        )
    return low, high


def _endpoint(text: str, where: str) -> str:
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise TesseraError(
            f"{where} must be HOST:PORT, got {text!r}",
            where=where,
            allowed=["node-0:29500", "10.0.0.1:29500"],
            code="job.not-an-endpoint",
        )
    return text
