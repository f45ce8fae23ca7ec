"""Compare all ranks before the first collective, and report ranks that are missing or differ, such as in versions.

Every rank writes its `RankInfo` into a store. Rank 0 compares them and writes the verdict, an error text or "", which
all ranks read. No process group is needed.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from tessera.errors import TesseraError, first_line
from tessera.version import __version__

JOIN_TIMEOUT_S = 30.0
_POLL_S = 0.05
_VERDICT_MARGIN_S = 5.0  # other ranks wait this many seconds longer than rank 0
_INFOS, _REFUSED = "infos", "refused"  # keys in the store: infos/RANK, and the error of a rank that cannot start
_MUST_AGREE = {
    "size": "world size",
    "python": "Python version",
    "torch": "torch version",
    "tessera": "Tessera version",
    "config": "configuration",
}


@dataclass(frozen=True)
class RankInfo:
    """Describe a rank: its machine, process and versions."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    pid: int
    python: str
    torch: str
    tessera: str
    config: str  # "section=hash" for each section of the recipe; must be equal on all ranks

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> RankInfo:
        return RankInfo(**json.loads(text))


def rank_info(rank: int, size: int, local_rank: int, config: str = "") -> RankInfo:
    return RankInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 0)),
        host=socket.gethostname(),
        pid=os.getpid(),
        # ranks may have different patch releases of Python, so only major and minor are compared
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch.version.__version__,
        tessera=__version__,
        config=config,
    )


def open_store(rank: int, size: int, timeout_s: float, env: Mapping[str, str] = os.environ) -> Store:
    """Return the `TCPStore` that all ranks use: torchrun's, or one that rank 0 serves."""
    address, port = _address(size, env)
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not by_agent
    timeout = datetime.timedelta(seconds=timeout_s)
    if not serves:
        # First wait with a plain socket: torch's client prints a C++ stack for each failed attempt.
        reach(address, port, timeout_s, f"{'the launcher' if by_agent else 'rank 0'} is missing for rank {rank}")
    try:
        if serves:
            store = serve_store(address, port, timeout, size)
        else:
            store = TCPStore(address, port, size, False, timeout, wait_for_workers=False, multi_tenant=True)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise TesseraError(
            f"rank {rank} of {size} could not open the store at {address}:{port}: {first_line(error)}",
            where="MASTER_ADDR, MASTER_PORT",
            fix="choose a free port on the machine of rank 0, the same for every rank",
            code="environment.port-in-use",
        ) from None
    # torchrun restarts ranks with the same store: a prefix hides the values of earlier attempts.
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(f"tessera/{attempt}", store)


def serve_store(address: str, port: int, timeout: datetime.timedelta, size: int | None = None) -> TCPStore:
    """Serve a store in this process. Later calls for the same port return the same store.

    At a loopback address it listens on that interface only. Torch would listen on all interfaces, where other machines
    could read and write the store.
    """
    try:
        local = ipaddress.ip_address(socket.gethostbyname(address)).is_loopback
    except OSError:
        local = False
    if not local:
        return TCPStore(address, port, size, True, timeout, wait_for_workers=False, multi_tenant=True)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise dist.DistNetworkError(f"port {port}: {error.strerror}") from None
        listening.listen(socket.SOMAXCONN)
        # Duplicate the descriptor, because the store closes it when the store is deleted.
        listening_fd = os.dup(listening.fileno())
    return TCPStore(
        address, port, size, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=listening_fd
    )


def _address(size: int, env: Mapping[str, str]) -> tuple[str, int]:
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address or not port:
        raise TesseraError(
            f"WORLD_SIZE is {size} but MASTER_ADDR and MASTER_PORT are not set",
            where="environment",
            fix="start with `tessera train --nproc N recipe.yaml` or with torchrun",
            code="environment.no-master-address",
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise TesseraError(
            f"MASTER_PORT is {port!r}, not a port",
            where="environment",
            allowed=["1 to 65535"],
            code="environment.master-port",
        )
    try:
        socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise TesseraError(
            f"this machine ({socket.gethostname()}) cannot resolve {address!r}: {error.strerror}",
            where="MASTER_ADDR",
            fix="give an IP address or a name that every machine knows",
            code="environment.address-not-resolved",
        ) from None
    return address, int(port)


def reach(address: str, port: int, timeout_s: float, otherwise: str) -> None:
    """Wait until the port accepts connections. After `timeout_s`, raise an error that begins with `otherwise`."""
    deadline = time.monotonic() + timeout_s
    reason = "no answer"
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=remaining).close()
            return
        except OSError as error:
            reason = error.strerror or "no answer"
            time.sleep(min(0.2, remaining))
    raise TesseraError(
        f"{otherwise}: {socket.gethostname()} got no answer from {address}:{port} within {timeout_s:g} s "
        f"({reason.lower()})",
        fix="check that the first machine was started, that the address belongs to it, and that no "
        "firewall blocks the port",
        code="environment.no-answer",
    )


def check_ranks(
    store: Store, info: RankInfo, timeout_s: float = JOIN_TIMEOUT_S, folder: Path | None = None
) -> list[RankInfo]:
    """Return the `RankInfo` of every rank, or raise the same error on all ranks.

    `folder`: also check that all ranks can write into it.
    """
    deadline = time.monotonic() + timeout_s
    exchange = RankExchange(store, info, timeout_s)
    infos = [RankInfo.load(text) for text in exchange.gather(_INFOS, info.dump(), _differences, deadline)]
    if folder is not None:
        token = exchange.broadcast("token", _make_token(folder) if info.rank == 0 else None, deadline)
        try:
            exchange.gather("folder", _try_folder(folder, token, deadline), _folder_problems(folder, infos), deadline)
        finally:
            if info.rank == 0 and token:  # with an empty token, this would remove the run folder itself
                shutil.rmtree(folder / token, ignore_errors=True)
    return infos


def report_refusal(error: TesseraError, env: Mapping[str, str] = os.environ) -> None:
    """Send the error of this rank to the other ranks, so that they stop waiting for it.

    Does nothing if this rank has joined already, or if the store cannot be reached.
    """
    # Stores raise `RuntimeError` for all failures.
    with contextlib.suppress(TesseraError, RuntimeError, ValueError, KeyError):
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        store = open_store(rank, size, JOIN_TIMEOUT_S, env)
        if store.check([f"{_INFOS}/{rank}"]):
            return
        where = f" (where: {error.where})" if error.where else ""
        refusal = f"rank {rank} on {socket.gethostname()} refused to start: {error.what}{where}"
        store.set(f"{_INFOS}/verdict" if rank == 0 else _REFUSED, refusal)
        # Rank 0 waits until the other ranks have read the error, because its process may serve the store.
        deadline = time.monotonic() + (_VERDICT_MARGIN_S if rank == 0 else 0)
        while time.monotonic() < deadline and store.add(f"{_INFOS}/heard", 0) < size - 1:
            time.sleep(_POLL_S)


class RankExchange:
    """Gather one string from each rank through the store. Rank 0 checks them, and all ranks read its verdict."""

    def __init__(self, store: Store, info: RankInfo, timeout_s: float) -> None:
        self.store, self.info, self.timeout_s = store, info, timeout_s

    def gather(self, name: str, value: str, check: Callable[[Sequence[str]], str], deadline: float) -> list[str]:
        self.store.set(f"{name}/{self.info.rank}", value)
        keys = [f"{name}/{rank}" for rank in range(self.info.size)]
        verdict: str | None = None
        if self.info.rank == 0:
            verdict = self._missing(keys, deadline) or check(self._values(keys))
        verdict = self.broadcast(f"{name}/verdict", verdict, deadline)
        if verdict:
            self._leave_together(name, keys)
            raise TesseraError(
                verdict,
                fix="start every rank with the same command, folder and versions; if the machine was too busy to "
                "import torch in time, try again",
                code="environment.ranks-differ",
            )
        return self._values(keys)

    def broadcast(self, key: str, value: str | None, deadline: float) -> str:
        """Return the value of rank 0. Other ranks pass None and wait for it."""
        if value is not None:
            self.store.set(key, value)
            return value
        timeout = max(0.0, deadline - time.monotonic()) + _VERDICT_MARGIN_S
        try:
            self.store.wait([key], datetime.timedelta(seconds=timeout))
            return self.store.get(key).decode()
        except RuntimeError:  # all errors of a store have this type
            raise TesseraError(
                f"rank 0 ended or does not respond; rank {self.info.rank} (on {self.info.host}) waited for it",
                fix="read the error of rank 0; if it has none, the machine may have been too busy to import torch "
                "in time: try again",
                code="environment.rank-0-left",
            ) from None

    def _missing(self, keys: Sequence[str], deadline: float) -> str:
        while not self.store.check(list(keys)):
            if self.store.check([_REFUSED]):
                return self._values([_REFUSED])[0]
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                return self._name_missing(absent, keys) if absent else ""
            time.sleep(_POLL_S)
        return ""

    def _name_missing(self, absent: Sequence[int], keys: Sequence[str]) -> str:
        here = [rank for rank in range(self.info.size) if rank not in set(absent)]
        text = f"{name_ranks(absent)} missing: {len(here)} of {self.info.size} ranks joined within {self.timeout_s:g} s"
        if self.info.local_size:
            nodes = sorted({rank // self.info.local_size for rank in absent})
            text += f"; missing ranks belong to node {spans(nodes)} of {self.info.size // self.info.local_size}"
        if keys[0].startswith(_INFOS):
            hosts: dict[str, list[int]] = {}
            for rank in here:
                hosts.setdefault(RankInfo.load(self._values([keys[rank]])[0]).host, []).append(rank)
            text += "; here are " + ", ".join(f"{spans(ranks)} on {host}" for host, ranks in hosts.items())
        return text

    def _values(self, keys: Sequence[str]) -> list[str]:
        return [value.decode() for value in self.store.multi_get(list(keys))]

    def _leave_together(self, name: str, keys: Sequence[str]) -> None:
        """Let rank 0 wait until the other ranks have read the verdict, because its process may serve the store."""
        with contextlib.suppress(RuntimeError):
            heard = self.store.add(f"{name}/heard", 1)
            came = sum(self.store.check([key]) for key in keys) if self.info.rank == 0 else 0
            deadline = time.monotonic() + 3
            while heard < came and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                heard = self.store.add(f"{name}/heard", 0)


def _differences(texts: Sequence[str]) -> str:
    infos = [RankInfo.load(text) for text in texts]
    first = infos[0]
    for field, label in _MUST_AGREE.items():
        other = [info for info in infos if getattr(info, field) != getattr(first, field)]
        if other:
            theirs, ours = getattr(other[0], field), getattr(first, field)
            if field == "config":
                sections = sorted({word.partition("=")[0] for word in {*theirs.split()} ^ {*ours.split()}})
                label, theirs, ours = f"configuration ({', '.join(sections)})", "another one", "this one"
            return (
                f"not the same {label} everywhere: {theirs} on {name_ranks([info.rank for info in other])} "
                f"({other[0].host}), {ours} on rank 0 ({first.host})"
            )
    return ""


def _make_token(folder: Path) -> str:
    """On rank 0, create a folder in the run folder and return its name; "" if that fails (see `_try_folder`)."""
    name = f".start-{secrets.token_hex(8)}"
    try:
        (folder / name).mkdir(parents=True)
    except OSError:
        return ""
    return name


def _try_folder(folder: Path, token: str, deadline: float) -> str:
    """Return why this rank cannot write into the folder from `_make_token`; "" if it can."""
    if not token:
        return "rank 0 cannot write there"
    shared = folder / token
    while not shared.is_dir():
        if time.monotonic() > deadline - 1:  # a new folder may appear late on a network file system
            return "does not see the folder that rank 0 made"
        time.sleep(_POLL_S)
    try:
        (shared / f"{socket.gethostname()}-{os.getpid()}").touch()
    except OSError as error:
        return f"cannot write: {error.strerror}"
    return ""


def _folder_problems(folder: Path, infos: Sequence[RankInfo]) -> Callable[[Sequence[str]], str]:
    def check(answers: Sequence[str]) -> str:
        bad = [(info, answer) for info, answer in zip(infos, answers, strict=True) if answer]
        if not bad:
            return ""
        who = name_ranks([info.rank for info, _ in bad])
        return f"the run folder {folder} is not shared and writable: {who} (on {bad[0][0].host}): {bad[0][1]}"

    return check


def name_ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {spans(numbers)}"


def spans(numbers: Sequence[int]) -> str:
    """Return sorted integers as text with ranges: [0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
