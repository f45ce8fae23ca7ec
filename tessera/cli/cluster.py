"""Which machines a run is started on: the words of the command line, checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tessera.core.errors import TesseraError

_ENDPOINT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):(?P<port>\d{1,5})")
_MAX_NODES = 100_000


@dataclass(frozen=True)
class Cluster:
    """One machine, several with fixed numbers (static), or as many as come within a range (elastic)."""

    nproc: int = 1
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int = 0
    endpoint: str | None = None  # HOST:PORT where the machines meet
    elastic: bool = False
    restarts: int = 0

    @property
    def ranks(self) -> int | None:
        """In all; None where that depends on who comes."""
        return self.nproc * self.max_nodes if self.min_nodes == self.max_nodes else None

    @property
    def launches(self) -> bool:
        """Whether the ranks are children of this process; otherwise it is itself the one rank."""
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
    if nproc < 1:
        raise TesseraError(f"{nproc} ranks per machine", where="--nproc", allowed=["1 or more"])
    if restarts < 0:
        raise TesseraError(f"{restarts} restarts", where="--restarts", allowed=["0 or more"])
    low, high = _node_range(nnodes)
    if master is not None and rdzv is not None:
        raise TesseraError("both --master and --rdzv are given", fix="--master for fixed machines, --rdzv for elastic")
    if rdzv is not None:
        _refuse("--rdzv", {"--node-rank": node_rank, "--port": port}, "elastic machines number themselves")
        return Cluster(nproc, low, high, 0, _endpoint(rdzv, "--rdzv"), True, restarts)
    if low != high:
        raise TesseraError(
            f"a range of machines ({nnodes}) needs a place for them to meet",
            where="--nnodes",
            fix="add --rdzv HOST:PORT",
        )
    if high == 1:
        _refuse("--nnodes 1", {"--node-rank": node_rank or None, "--master": master}, "one machine needs neither")
        endpoint = None if port is None else _endpoint(f"127.0.0.1:{port}", "--port")
        return Cluster(nproc, 1, 1, 0, endpoint, False, restarts)
    if master is None or node_rank is None:
        missing = "--master" if master is None else "--node-rank"
        raise TesseraError(
            f"{high} machines need {missing}",
            where=missing,
            fix="add --node-rank 0…N-1 (another on each machine) and --master HOST:PORT (the same on all)",
        )
    if not 0 <= node_rank < high:
        raise TesseraError(f"machine {node_rank} of {high}", where="--node-rank", allowed=[f"0 to {high - 1}"])
    if restarts:
        raise TesseraError(
            "machines with fixed numbers are not restarted", where="--restarts", fix="use --rdzv in place of --master"
        )
    _refuse("--master", {"--port": port}, "its port is part of --master")
    return Cluster(nproc, high, high, node_rank, _endpoint(master, "--master"), False, 0)


def _refuse(beside: str, options: dict[str, object | None], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise TesseraError(f"{given[0]} does not go with {beside}: {why}", where=given[0], fix=f"leave {given[0]} out")


def _node_range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= _MAX_NODES:
        raise TesseraError(f"not a number of machines: {text!r}", where="--nnodes", allowed=["4", "2:4 (elastic)"])
    return low, high


def _endpoint(text: str, where: str) -> str:
    found = _ENDPOINT.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise TesseraError(f"not HOST:PORT: {text!r}", where=where, allowed=["node-0:29500", "10.0.0.1:29500"])
    return text
