"""Who is to blame, from what the ranks last said of themselves. Pure functions: no clock, no process, no network."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from tessera.core.errors import first_line
from tessera.core.join import name_ranks
from tessera.train.activity import AT_WORK, COMPILING, COMPUTING, ON_DEVICE, UNEXPLAINED

DISAGREE_S = 20.0  # all ranks wait in collectives, but not in the same place: no link is slow for so long
# What a rank does while it has done so many steps, in order.
STEP_WORK = (
    "reporting",
    "agreeing to go on",
    "loading data",
    "running the model",
    "finishing gradients",
    "updating weights",
)


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life."""

    rank: int
    count: int  # rises with every beat
    step: int  # steps done
    doing: str  # the trainer's word
    module: str  # the block it is in, with the direction; empty outside of the model
    still_s: float  # how long its main thread has been at this place
    collective: str  # the collective its main thread waits in, if it does
    host: str
    activity: str  # what explains that it stands still (see `train.activity`)
    vouches: tuple[int, ...] = ()  # ranks of its machine that are silent and use the processor all the same

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def load(text: str) -> Beat:
        fields = json.loads(text)
        return Beat(**{**fields, "vouches": tuple(fields["vouches"])})

    @property
    def at_work(self) -> bool:
        """It will come along, however long others wait for it."""
        return not self.collective and self.activity in AT_WORK

    @property
    def place(self) -> tuple[int, str, str, bool]:
        """Two ranks at the same place do the same thing: also that both wait, or neither."""
        return self.step, self.doing, self.module, bool(self.collective)

    def where(self) -> str:
        inside = f", {self.module}" if self.module and self.doing == "running the model" else ""
        waits = f", waiting in {self.collective}" if self.collective else ""
        if not self.collective and self.activity in (COMPILING, COMPUTING, ON_DEVICE):
            waits = f", {self.activity}"
        begun = self.doing in STEP_WORK[2:]
        return f"step {self.step + 1 if begun else self.step}, {self.doing}{inside}{waits}"


@dataclass(frozen=True)
class Verdict:
    kind: str  # lost, stalled, disagree, failed
    ranks: tuple[int, ...]  # those to blame
    text: str

    def dump(self) -> str:
        return json.dumps({"kind": self.kind, "ranks": list(self.ranks), "text": self.text})

    @staticmethod
    def load(text: str) -> Verdict:
        found = json.loads(text)
        return Verdict(found["kind"], tuple(found["ranks"]), found["text"])


@dataclass(frozen=True)
class Patience:
    silence_s: float
    stall_s: float
    timeout_s: float


def lost(beat: Beat, how: str, witness: Beat) -> Verdict:
    """A beat may be older than the end it came to; the ranks go in step, so a witness's own place tells the rest."""
    text = f"rank {beat.rank} on {beat.host} {how}; its last beat came from {beat.where()}"
    return Verdict("lost", (beat.rank,), f"{text}; rank {witness.rank} now stands in {witness.where()}")


def failed(beat: Beat, error: BaseException) -> Verdict:
    words = f"{type(error).__name__}: {first_line(error)}"
    return Verdict("failed", (beat.rank,), f"rank {beat.rank} on {beat.host} failed in {beat.where()}: {words}")


def judge(
    beats: Mapping[int, Beat],
    silent_s: Mapping[int, float],
    patience: Patience,
    witness: Beat,
    vouched: Collection[int] = (),
) -> Verdict | None:
    """`silent_s`: seconds since a rank's last new beat, by the clock of the witness, who judges. `vouched`: ranks that
    give no sign and are seen to compute all the same: a long call into C keeps their other threads from running."""
    for beat in (beats[rank] for rank in sorted(beats)):
        quiet = silent_s[beat.rank]
        if quiet > (patience.timeout_s if beat.rank in vouched else patience.silence_s):
            return lost(beat, f"gave no sign of life for {quiet:.0f} s (dead, stopped or cut off)", witness)
    present = [
        replace(beats[rank], activity=COMPUTING, collective="", still_s=silent_s[rank])
        if rank in vouched
        else beats[rank]
        for rank in sorted(beats)
    ]
    if len(present) < 2 or any(beat.activity == COMPILING for beat in present):
        return None
    still = min(beat.still_s for beat in present)
    working = any(beat.at_work for beat in present)
    if len({beat.place for beat in present}) == 1:
        if still > patience.timeout_s and not working:  # nobody waits for a rank that works at the same place
            text = f"all ranks have stood still for {still:.0f} s in {present[0].where()}"
            return Verdict("stalled", tuple(sorted(beats)), text)
        return None
    if all(beat.collective for beat in present):
        if still > min(DISAGREE_S, patience.stall_s):
            return _disagreement(present)
        return None
    # While one is at work, the others may be waiting for it, whether that can be seen or not. Ranks that wait for their
    # devices may wait for each other there, and the backend of the collectives ends that.
    unexplained = any(not beat.collective and beat.activity == UNEXPLAINED for beat in present)
    if still > (patience.stall_s if unexplained and not working else patience.timeout_s):
        return _holds_up(present, still)
    return None


def _disagreement(present: Sequence[Beat]) -> Verdict:
    """Each waits for the others to come to a collective that these have passed, or will never reach."""
    places = [beat.place for beat in present]
    # The largest party is taken to be right; among equals, that of the lowest rank.
    right = max(dict.fromkeys(places), key=places.count)
    wrong = [beat for beat in present if beat.place != right]
    pattern = next(beat for beat in present if beat.place == right)
    text = (
        f"{_name(wrong)} out of step: {wrong[0].where()}; while {_name([b for b in present if b.place == right])} in "
        f"{pattern.where()}"
    )
    return Verdict("disagree", tuple(beat.rank for beat in wrong), text)


def _holds_up(present: Sequence[Beat], still: float) -> Verdict:
    # Who waits in a collective waits for someone; who does not is the one waited for, first of all one that nothing
    # explains. Where no rank can be seen waiting (an accelerator's queue waits, not its host), the one furthest behind
    # is.
    idle = [beat for beat in present if not beat.collective]
    idle = [beat for beat in idle if beat.activity == UNEXPLAINED] or idle
    if len(idle) == len(present):
        behind = min((beat.step, _order(beat.doing)) for beat in present)
        idle = [beat for beat in present if (beat.step, _order(beat.doing)) == behind]
    text = f"{_name(idle)} holding up the others: no progress for {still:.0f} s in {idle[0].where()}"
    return Verdict("stalled", tuple(beat.rank for beat in idle), text)


def _order(doing: str) -> int:
    return STEP_WORK.index(doing) if doing in STEP_WORK else -1


def _name(beats: Sequence[Beat]) -> str:
    who = name_ranks([beat.rank for beat in beats])
    return f"{who} on {beats[0].host} is" if len(beats) == 1 else f"{who} are"
