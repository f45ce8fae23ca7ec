"""Meeting before the first collective: every rank shows a card, and all get one verdict instead of a silent wait.

The main rank gathers the cards through the store, says who is missing or different, and the others hear it from the
store as well. Nothing here needs a process group; the deadline is the caller's.
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
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tessera.core.errors import TesseraError, first_line

JOIN_TIMEOUT_S = 30.0
_POLL_S = 0.05
_VERDICT_MARGIN_S = 5.0  # the others wait this much longer than the main rank, which is the one to decide
_MUST_AGREE = {
    "size": "world size",
    "python": "Python version",
    "torch": "torch version",
    "tessera": "Tessera version",
    "config": "configuration",
}


@dataclass(frozen=True)
class Card:
    """What a rank says of itself."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    pid: int
    python: str
    torch: str
    tessera: str
    config: str  # a hash: what matters is whether it is the same
    device: str
    device_count: int

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Card:
        return Card(**json.loads(text))


def make_card(rank: int, size: int, local_rank: int, device: torch.device, config: str = "") -> Card:
    return Card(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", 0)),
        host=socket.gethostname(),
        pid=os.getpid(),
        python=".".join(platform.python_version_tuple()[:2]),  # patch releases work together
        torch=torch.__version__,
        tessera=_own_version(),
        config=config,
        device=device.type,
        device_count=0 if device.type == "cpu" else torch.accelerator.device_count(),
    )


def _own_version() -> str:
    try:
        return metadata.version("tessera-mm")
    except metadata.PackageNotFoundError:  # run from the source tree
        return "source"


def open_store(rank: int, size: int, patience_s: float, env: Mapping[str, str] = os.environ) -> Store:
    """The store where the ranks meet: torchrun's own where there is one, otherwise served by the main rank."""
    address, port = _address(size, env)
    by_agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not by_agent
    timeout = datetime.timedelta(seconds=patience_s)
    if not serves:
        # torch's client reports each failed try with a C++ stack; a plain socket can wait in silence.
        reach(address, port, patience_s, f"{'the launcher' if by_agent else 'rank 0'} is missing for rank {rank}")
    try:
        if serves:
            store = serve_store(address, port, timeout, size)
        else:
            store = TCPStore(address, port, size, False, timeout, wait_for_workers=False, multi_tenant=True)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise TesseraError(
            f"rank {rank} of {size} could not open the meeting point {address}:{port}: {first_line(error)}",
            where="MASTER_ADDR, MASTER_PORT",
            fix="choose a free port on the machine of rank 0, the same for every rank",
        ) from None
    # A store may outlive a restart of the ranks; words of the last attempt must not be heard in this one.
    attempt = f"{env.get('TORCHELASTIC_RUN_ID', '')}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(f"tessera/{attempt}", store)


def serve_store(address: str, port: int, timeout: datetime.timedelta, size: int | None = None) -> TCPStore:
    """A store served by this process, which shares it with whoever asks for the same port here.

    At a loopback address it listens there alone: torch itself would listen on all interfaces, and whoever reaches the
    port could read and write what the ranks tell each other."""
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
        # The store closes its own copy of the socket when it goes.
        handed = os.dup(listening.fileno())
    return TCPStore(
        address, port, size, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=handed
    )


def _address(size: int, env: Mapping[str, str]) -> tuple[str, int]:
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address or not port:
        raise TesseraError(
            f"WORLD_SIZE is {size} but MASTER_ADDR and MASTER_PORT are not set",
            where="environment",
            fix="start with `tessera train --nproc N recipe.yaml` or with torchrun",
        )
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise TesseraError(f"MASTER_PORT is {port!r}, not a port", where="environment", allowed=["1 to 65535"])
    try:
        socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise TesseraError(
            f"this machine ({socket.gethostname()}) cannot resolve {address!r}: {error.strerror}",
            where="MASTER_ADDR",
            fix="give an IP address or a name that every machine knows",
        ) from None
    return address, int(port)


def reach(address: str, port: int, patience_s: float, otherwise: str) -> None:
    """Waits until something listens there; `otherwise` opens the error."""
    deadline = time.monotonic() + patience_s
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), timeout=left).close()
            return
        except OSError as error:
            reason = error.strerror or "no answer"
            time.sleep(min(0.2, left))
    raise TesseraError(
        f"{otherwise}: nothing answered {socket.gethostname()} at {address}:{port} within {patience_s:g} s "
        f"({reason.lower()})",
        fix="check that the first machine was started, that the address is its own, and that no firewall is between",
    )


def meet(store: Store, card: Card, patience_s: float = JOIN_TIMEOUT_S, folder: Path | None = None) -> list[Card]:
    """All ranks' cards, or the same error on every rank. With `folder`, also proves that it is one shared folder."""
    deadline = time.monotonic() + patience_s
    table = _Table(store, card, patience_s)
    cards = [Card.load(text) for text in table.round("cards", card.dump(), _differences, deadline)]
    if folder is not None:
        token = table.tell("token", _place_token(folder) if card.rank == 0 else None, deadline)
        try:
            table.round("folder", _try_folder(folder, token, deadline), _folder_problems(folder, cards), deadline)
        finally:
            if card.rank == 0 and token:  # an empty one would name the whole folder
                shutil.rmtree(folder / token, ignore_errors=True)
    return cards


class _Table:
    """Rounds of one word from each rank, judged by the main rank, the verdict heard by all."""

    def __init__(self, store: Store, card: Card, patience_s: float) -> None:
        self.store, self.card, self.patience_s = store, card, patience_s

    def round(self, name: str, word: str, judge: Callable[[Sequence[str]], str], deadline: float) -> list[str]:
        self.store.set(f"{name}/{self.card.rank}", word)
        keys = [f"{name}/{rank}" for rank in range(self.card.size)]
        verdict: str | None = None
        if self.card.rank == 0:
            verdict = self._missing(keys, deadline) or judge(self._words(keys))
        verdict = self.tell(f"{name}/verdict", verdict, deadline)
        if verdict:
            self._leave_together(name, keys)
            raise TesseraError(verdict, fix="start every rank with the same command, folder and versions")
        return self._words(keys)

    def tell(self, key: str, word: str | None, deadline: float) -> str:
        """The main rank's word, given by itself and read by the others."""
        if word is not None:
            self.store.set(key, word)
            return word
        left = max(0.0, deadline - time.monotonic()) + _VERDICT_MARGIN_S
        try:
            self.store.wait([key], datetime.timedelta(seconds=left))
            return self.store.get(key).decode()
        except RuntimeError:  # every error of a store is one
            raise TesseraError(
                f"rank 0 left or fell silent while rank {self.card.rank} (on {self.card.host}) waited for its verdict",
                fix="look at what rank 0 said",
            ) from None

    def _missing(self, keys: Sequence[str], deadline: float) -> str:
        while not self.store.check(list(keys)):
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                return self._name_missing(absent, keys) if absent else ""
            time.sleep(_POLL_S)
        return ""

    def _name_missing(self, absent: Sequence[int], keys: Sequence[str]) -> str:
        here = [rank for rank in range(self.card.size) if rank not in set(absent)]
        text = f"{name_ranks(absent)} missing: {len(here)} of {self.card.size} ranks came within {self.patience_s:g} s"
        if self.card.local_size:
            nodes = sorted({rank // self.card.local_size for rank in absent})
            text += f"; missing ranks belong to node {spans(nodes)} of {self.card.size // self.card.local_size}"
        if keys[0].startswith("cards"):
            hosts: dict[str, list[int]] = {}
            for rank in here:
                hosts.setdefault(Card.load(self._words([keys[rank]])[0]).host, []).append(rank)
            text += "; here are " + ", ".join(f"{spans(ranks)} on {host}" for host, ranks in hosts.items())
        return text

    def _words(self, keys: Sequence[str]) -> list[str]:
        return [value.decode() for value in self.store.multi_get(list(keys))]

    def _leave_together(self, name: str, keys: Sequence[str]) -> None:
        """Rank 0 may be serving the store: it goes last, or the others would lose the verdict with the connection."""
        with contextlib.suppress(RuntimeError):
            heard = self.store.add(f"{name}/heard", 1)
            came = sum(self.store.check([key]) for key in keys) if self.card.rank == 0 else 0
            deadline = time.monotonic() + 3
            while heard < came and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                heard = self.store.add(f"{name}/heard", 0)


def _differences(texts: Sequence[str]) -> str:
    cards = [Card.load(text) for text in texts]
    first = cards[0]
    for field, label in _MUST_AGREE.items():
        other = [card for card in cards if getattr(card, field) != getattr(first, field)]
        if other:
            return (
                f"not the same {label} everywhere: {getattr(other[0], field)} on {name_ranks([c.rank for c in other])} "
                f"({other[0].host}), {getattr(first, field)} on rank 0 ({first.host})"
            )
    seats: dict[tuple[str, int], int] = {}
    for card in cards:
        if card.device_count and card.local_rank >= card.device_count:
            return f"rank {card.rank} on {card.host} is local rank {card.local_rank} of {card.device_count} devices"
        taken = seats.setdefault((card.host, card.local_rank), card.rank)
        if card.device_count and taken != card.rank:
            return f"ranks {taken} and {card.rank} on {card.host} would share device {card.local_rank}"
    return ""


def _place_token(folder: Path) -> str:
    """The name of a fresh folder inside the shared one; a failure is an empty name, told in the round that follows."""
    name = f".start-{secrets.token_hex(8)}"
    try:
        (folder / name).mkdir(parents=True)
    except OSError:
        return ""
    return name


def _try_folder(folder: Path, token: str, deadline: float) -> str:
    """Empty when this rank sees the main rank's folder and can write into it."""
    if not token:
        return "rank 0 cannot write there"
    place = folder / token
    while not place.is_dir():
        if time.monotonic() > deadline - 1:  # network folders show new names late; but the verdict must come in time
            return "does not see what rank 0 wrote"
        time.sleep(_POLL_S)
    try:
        (place / f"{socket.gethostname()}-{os.getpid()}").touch()
    except OSError as error:
        return f"cannot write: {error.strerror}"
    return ""


def _folder_problems(folder: Path, cards: Sequence[Card]) -> Callable[[Sequence[str]], str]:
    def judge(words: Sequence[str]) -> str:
        bad = [(card, word) for card, word in zip(cards, words, strict=True) if word]
        if not bad:
            return ""
        who = name_ranks([card.rank for card, _ in bad])
        return f"the run folder {folder} is not shared and writable: {who} (on {bad[0][0].host}): {bad[0][1]}"

    return judge


def name_ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {spans(numbers)}"


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
