"""What all chunks found, put together: a few numbers for each row and each media, never their text.

About a hundred bytes a row. What only shows over the whole (repeated ids, conversations, answers, pictures) is found
here by hashes; the rows that are named are read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tessera.core.errors import TesseraError
from tessera.core.types import Sample
from tessera.data.sources.base import Source
from tessera.data.sources.forms import RowError
from tessera.tools.data_doctor.diagnosis import SetFacts
from tessera.tools.data_doctor.findings import PLACES, Place, Tally
from tessera.tools.data_doctor.look import LOST, MEDIA_KINDS, TOO_LONG, USABLE, Seen
from tessera.tools.data_doctor.talk import listen, media_hash, media_name

ONE_ANSWER = 0.3  # share of the rows that one answer may have
SHARED = 0.01  # share of the samples that one file may be in
FEW = 20  # rows below which shares say nothing


class Collection:
    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self.starts = np.cumsum([0, *(len(source) for source in sources)])
        total = int(self.starts[-1])
        self.state = np.zeros(total, dtype=np.uint8)
        self.columns: dict[str, np.ndarray] = {}
        self.hashes = {name: np.zeros(total, dtype=np.uint64) for name in ("id", "content", "answer")}
        self.tally = Tally()
        self._media: dict[str, list[np.ndarray]] = {}

    def add(self, seen: Seen) -> None:
        first = int(self.starts[seen.chunk.set])
        at = slice(first + seen.chunk.rows.start, first + seen.chunk.rows.stop)
        self.state[at] = seen.state
        for name, values in seen.columns.items():
            if name not in self.columns:
                self.columns[name] = np.zeros(len(self.state), dtype=np.int64)
            self.columns[name][at] = values
        for name, values in seen.hashes.items():
            self.hashes[name][at] = values
        for name, values in seen.media.items():
            self._media.setdefault(name, []).append(values + first if name == "row" else values)
        self.tally.merge(seen.found)

    def media(self, name: str) -> np.ndarray:
        found = self._media.get(name, [])
        return np.concatenate(found) if found else np.empty(0)

    def column(self, name: str, keep: np.ndarray) -> np.ndarray:
        found = self.columns.get(name)
        return np.zeros(len(keep), dtype=np.int64) if found is None else found[keep]

    def locate(self, row: int) -> tuple[Source, int]:
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.sources[part], row - int(self.starts[part])

    def sets(self) -> list[SetFacts]:
        rows_of_media, kinds = self.media("row"), self.media("kind")
        facts = []
        for number, source in enumerate(self.sources):
            first, last = int(self.starts[number]), int(self.starts[number + 1])
            state = self.state[first:last]
            usable = first + np.flatnonzero(state == USABLE)
            mine = kinds[(rows_of_media >= first) & (rows_of_media < last)]
            sums = {
                name: int(self.column(name, usable).sum())
                for name in ("characters", "tokens", "trained", "media_tokens")
            }
            facts.append(
                SetFacts(
                    str(source.path),
                    last - first,
                    len(usable),
                    int((state == LOST).sum()),
                    int((state == TOO_LONG).sum()),
                    **sums,
                    **{f"{kind}s": int((mine == at).sum()) for at, kind in enumerate(MEDIA_KINDS)},
                )
            )
        return facts

    # ------------------------------------------------------------------------------------------ over the whole

    def find_repeats(self) -> None:
        for name, kind in (("id", "repeated-id"), ("content", "repeated-content")):
            count, groups = _repeated(self.hashes[name])
            places = [self._place(again, f"also {self._where(first)}; {times} times") for first, again, times in groups]
            self.tally.count(kind, count, places)
        self._find_one_answer()
        self._find_shared_media()

    def _find_one_answer(self) -> None:
        answers = self.hashes["answer"]
        values, firsts, counts = np.unique(answers, return_index=True, return_counts=True)
        counts[values == 0] = 0
        answered = int(counts.sum())
        if answered < FEW:
            return
        most = int(counts.argmax())
        if counts[most] > ONE_ANSWER * answered:
            row = int(firsts[most])
            sample = self._sample(row)
            said = "" if sample is None else (listen(sample).answer or "")[:80]
            share = f"{counts[most] / answered:.0%} of the last answers are {said!r}"
            self.tally.count("one-answer", int(counts[most]), [self._place(row, share)])

    def _find_shared_media(self) -> None:
        hashes, rows = self.media("hash"), self.media("row")
        if not len(hashes):
            return
        values, firsts, counts = np.unique(hashes, return_index=True, return_counts=True)
        shared = np.flatnonzero(counts > max(FEW, SHARED * len(self.state)))
        shared = shared[np.argsort(-counts[shared], kind="stable")]
        places = []
        for at in shared[:PLACES].tolist():
            row = int(rows[firsts[at]])
            places.append(self._place(row, f"{self._media_name(row, int(values[at]))}: used {counts[at]:,} times"))
        self.tally.count("shared-media", len(shared), places)

    # ------------------------------------------------------------------------------------------ rows by number

    def _where(self, row: int) -> str:
        source, number = self.locate(row)
        return source.place(number)

    def _place(self, row: int, detail: str) -> Place:
        sample = self._sample(row)
        return Place(self._where(row), "" if sample is None else sample.id, detail)

    def _sample(self, row: int) -> Sample | None:
        source, number = self.locate(row)
        try:
            return source.read(number)
        except (RowError, TesseraError):
            return None

    def _media_name(self, row: int, mark: int) -> str:
        sample, (source, _) = self._sample(row), self.locate(row)
        parts = [] if sample is None else sample.media()
        return next((media_name(part) for part in parts if media_hash(part, source.root) == mark), "a file")


def _repeated(hashes: np.ndarray) -> tuple[int, list[tuple[int, int, int]]]:
    """How many rows repeat an earlier one, and (first row, the next with the same, how often) of the first few."""
    order = np.argsort(hashes, kind="stable")
    ranked = hashes[order]
    starts = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]])) if len(ranked) else np.empty(0, int)
    counts = np.diff(np.append(starts, len(ranked)))
    again = (counts > 1) & (ranked[starts] != 0)
    starts, counts = starts[again], counts[again]
    seconds = order[starts + 1]
    first_few = np.argsort(seconds, kind="stable")[:PLACES]
    groups = [(int(order[starts[at]]), int(seconds[at]), int(counts[at])) for at in first_few]
    return int((counts - 1).sum()), groups
