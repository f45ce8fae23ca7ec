"""How watches talk: beats and one verdict, through the store where the ranks met, over a connection of their own.

Every call to a store can block for as long as its server is stopped. So only the talking thread calls it, and the rest
of the watch reads what that thread last left here.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from tessera.core.dist import World, barrier
from tessera.core.process import Process
from tessera.train.verdict import Beat, Verdict

_PUBLISH_S = 2.0  # telling a verdict must not take longer: the store may be what is lost


class SideChannel:
    """Making one is collective. `look` tells this rank's beat of the moment; `beats` and `verdict` were heard."""

    def __init__(self, world: World, interval: float, look: Callable[[], Beat]) -> None:
        self.rank, self.size, self.interval, self.look = world.rank, world.size, interval, look
        self.kept_by_main_rank = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self.verdict: Verdict | None = None
        self._store = _own_connection()
        self._store.set(f"process/{self.rank}", json.dumps(Process.this().dump()))
        self._store.set(f"beat/{self.rank}", look().dump())
        barrier()  # from here on every key exists, and no read waits for one
        self.neighbours = self._find_neighbours()
        self.beats: dict[int, Beat] = {}
        self._news_at: dict[int, float] = {}
        self._heard_at = time.monotonic()
        # All see the main rank, the one that may vouch for it, and their own machine; the main rank sees everyone.
        self._seen = range(self.size) if self.rank == 0 else sorted({0, 1, *self.neighbours})
        self._exchange()
        self._stop = threading.Event()
        self._talker = threading.Thread(target=self._talk, name="tessera-beat", daemon=True)
        self._talker.start()

    def _find_neighbours(self) -> dict[int, Process]:
        """This machine's ranks, itself among them. torchrun numbers them in a row."""
        local = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        first = self.rank - int(os.environ.get("LOCAL_RANK", self.rank))
        ranks = range(max(0, first), min(self.size, first + local))
        words = self._store.multi_get([f"process/{rank}" for rank in ranks])
        found = {rank: Process.load(json.loads(word)) for rank, word in zip(ranks, words, strict=True)}
        return {rank: process for rank, process in found.items() if process.visible()}

    # ------------------------------------------------------------------------------------------ the talking thread

    def _talk(self) -> None:
        while not self._stop.wait(self.interval):
            with contextlib.suppress(RuntimeError):  # every error of a store is one; silence tells the rest
                self._exchange()

    def _exchange(self) -> None:
        self._store.set(f"beat/{self.rank}", self.look().dump())
        words = self._store.multi_get([f"beat/{rank}" for rank in self._seen])
        if self._store.check(["verdict"]):
            self.verdict = Verdict.load(self._store.get("verdict").decode())
        now = time.monotonic()
        for rank, word in zip(self._seen, words, strict=True):
            beat = Beat.load(word.decode())
            if rank not in self.beats or beat.count != self.beats[rank].count:
                self.beats[rank] = beat
                self._news_at[rank] = now
        self._heard_at = now

    # ------------------------------------------------------------------------------------------ for the watch

    def silence(self) -> float:
        """Seconds since the store last answered."""
        return time.monotonic() - self._heard_at

    def silence_of_ranks(self) -> dict[int, float]:
        """Seconds from each rank's last new beat to the store's last answer: a mute store is not a mute rank."""
        heard = self._heard_at
        return {rank: max(0.0, heard - at) for rank, at in self._news_at.items()}

    def forgive(self) -> None:
        now = time.monotonic()
        self._heard_at = now
        self._news_at = dict.fromkeys(self._news_at, now)

    def lowest_survivor(self, blamed: Sequence[int]) -> int:
        """Of this machine's ranks, the one that speaks for all."""
        ranks = sorted({self.rank, *self.neighbours})
        return next((rank for rank in ranks if rank not in blamed), ranks[0])

    def publish(self, verdict: Verdict) -> Verdict:
        """Tells it to the others; gives back the one that counts, which is the first."""
        box = [self.verdict or verdict]

        def tell() -> None:
            if self._store.add("settled", 1) == 1:
                self._store.set("verdict", verdict.dump())
            else:
                box[0] = Verdict.load(self._store.get("verdict").decode())

        if self.verdict is None:
            _within(_PUBLISH_S, tell)
        return box[0]

    def let_others_read(self) -> None:
        """The store goes with the main rank where that keeps it; the others need two beats to hear a verdict."""
        if self.rank == 0 and self.kept_by_main_rank:
            time.sleep(2 * self.interval + 0.2)

    def close(self) -> None:
        self._stop.set()
        self._talker.join(self.interval + 1)


def _own_connection() -> Store:
    """A second connection to the default group's store, under a name that no earlier run of this process has used."""
    nonce = torch.randint(2**62, (1,), dtype=torch.int64, generator=_unseeded())
    dist.broadcast(nonce, src=0)
    connection: Store = _get_default_store().clone()  # type: ignore[attr-defined]
    return PrefixStore(f"watch/{int(nonce)}", connection)


def _unseeded() -> torch.Generator:
    generator = torch.Generator()
    generator.seed()  # not from the run's streams: watching must not change what is trained
    return generator


def _within(seconds: float, call: Callable[[], Any]) -> None:
    def guarded() -> None:
        with contextlib.suppress(RuntimeError):
            call()

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
