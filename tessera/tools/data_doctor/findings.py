"""What can be wrong with a data set: the catalogue, with how to mend it, and the tally of what was found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["loss", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("loss", "warning", "note")
MOST_LOCATIONS = 5  # of each finding, named to the user
DETAIL = 240  # characters of a reason that are kept


@dataclass(frozen=True)
class Kind:
    """Describe a kind of fault in a data set, and how to mend it.

    Severity `loss`: a run leaves such samples out or ends at them; `warning`: a run trains on them, but probably not as
    the user meant; `note`: for information.
    """

    severity: Severity
    title: str
    mend: str


KINDS: dict[str, Kind] = {
    "set-refused": Kind("loss", "Rows that end a run", "keep one form of rows per file, and list several files"),
    "bad-row": Kind("loss", "Rows that cannot be read", "correct or remove these rows"),
    "missing-file": Kind(
        "loss", "Missing files", "mend the paths, or set `root` of the set to the folder they start at"
    ),
    "outside-root": Kind(
        "loss",
        "Paths outside the root",
        "set `root` of the set to a folder above the files, and write paths relative to it",
    ),
    "by-url": Kind(
        "loss", "Media named by URL", "let images be fetched with data.urls={}, or download them and name the files"
    ),
    "unreadable-media": Kind("loss", "Unreadable or corrupt media", "fetch or encode these files again"),
    "damaged-media": Kind("loss", "Media whose header is sound and whose pixels are not", "fetch these files again"),
    "too-large": Kind(
        "loss", "Media whose header claims too much", "make them smaller, or raise data.max_image_pixels"
    ),
    "stuck": Kind("loss", "Samples that crash or hold up their reader", "remove these files or encode them again"),
    "placeholders": Kind(
        "loss",
        "Placeholders that do not match the media",
        "write one <image>, <video> or <audio> for each file that the row lists",
    ),
    "unknown-role": Kind(
        "loss", "Unknown roles", "use system, user, assistant and tool, or name yours under `columns` of the set"
    ),
    "unfit": Kind(
        "loss", "Samples the model cannot take", "remove these samples, or make their media of another shape"
    ),
    "nothing-trained": Kind(
        "loss", "Nothing to train on", "add an answer, or say whose words are trained on with data.train_on"
    ),
    "too-long": Kind(
        "loss", "Longer than a row", "raise data.length, lower max_pixels of data.processor, or set data.truncate=turns"
    ),
    "empty-caption": Kind("loss", "Empty captions", "write captions, or remove these rows"),
    "huge-caption": Kind("loss", "Captions too long to be any", "shorten them; check that the right column is read"),
    "long-caption": Kind(
        "warning",
        "Captions longer than the model reads",
        "shorten them: what is beyond is cut; data.processor.long_captions=leave_out leaves such samples out",
    ),
    "empty-answer": Kind("warning", "Empty answers", "remove these turns: a model learns from them to say nothing"),
    "turn-order": Kind(
        "warning", "Turns out of order", "let user and assistant take turns, a system message come first"
    ),
    "all-trained": Kind("warning", "All of it trained on", "check the roles: questions should not be the assistant's"),
    "special-word": Kind(
        "warning",
        "Special words written out in a text",
        "remove them: they are read as plain text, and the model learns to write them",
    ),
    "loose-placeholder": Kind(
        "warning", "Placeholders in texts without media", "list the media of these rows, or remove the placeholders"
    ),
    "mojibake": Kind(
        "warning", "Text decoded with the wrong encoding", "read the original as UTF-8 and export it again"
    ),
    "control-character": Kind("warning", "Control characters in texts", "strip them when the data is exported"),
    "repeated-content": Kind(
        "warning", "Same conversation more than once", "remove the copies, or weigh the set instead"
    ),
    "one-answer": Kind("warning", "One answer for many questions", "check that the answers were exported as meant"),
    "repeated-id": Kind(
        "note", "Ids given more than once", "none needed: repeated ids get a suffix in ledgers and lists"
    ),
    "short-answer": Kind("note", "Answers of one or two characters", "none needed where that is the task"),
    "shared-media": Kind("note", "Same file in many samples", "none needed where several questions are about one file"),
    "enlarged": Kind(
        "note", "Images enlarged to the least size", "lower min_pixels: enlarged images cost tokens and add nothing"
    ),
    "shrunk": Kind("note", "Images shrunk below half their side", "raise max_pixels where small print matters"),
}

# Which kind a reason means, in the words that sources and media readers use; the first that matches.
_REASONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(words, re.IGNORECASE), kind)
    for words, kind in (
        (r"caption is empty", "empty-caption"),
        (r"a caption of [\d,]+ (?:characters|tokens)", "huge-caption"),
        (r"placeholder|token count that cannot match", "placeholders"),
        (r"unknown (?:role|speaker)", "unknown-role"),
        (r"no such file|not a file|does not exist", "missing-file"),
        (r"not from URLs", "by-url"),
        (r"outside the|'\.\.'|link to somewhere|leads out", "outside-root"),
        (r"took longer than|crashed|signal|no answer for|ended by itself", "stuck"),
        (r"too many|too large|claims", "too-large"),
        (r"nothing to train on", "nothing-trained"),
        (r"too narrow|too wide|has no \w+ input", "unfit"),
    )
)


def kind_of(reason: str, otherwise: str) -> str:
    """Return which kind of finding a reason means; `otherwise`, where its words do not tell."""
    return next((kind for words, kind in _REASONS if words.search(reason)), otherwise)


@dataclass(frozen=True)
class SampleLocation:
    where: str  # file and row
    id: str
    detail: str


@dataclass
class Finding:
    """Hold how many samples (or what else the title of the kind names) have a fault, and where the first ones are."""

    count: int = 0
    locations: list[SampleLocation] = field(default_factory=list)

    def add(self, location: SampleLocation) -> None:
        self.count += 1
        if len(self.locations) < MOST_LOCATIONS:
            self.locations.append(SampleLocation(location.where, location.id[:DETAIL], location.detail[:DETAIL]))


class Tally:
    """Count the faults of each kind, and keep the locations of the first few."""

    def __init__(self) -> None:
        self.findings: dict[str, Finding] = {}

    def add(self, kind: str, where: str, id: str, detail: str = "") -> None:
        assert kind in KINDS, kind
        self.findings.setdefault(kind, Finding()).add(SampleLocation(where, id, detail))

    def count(self, kind: str, count: int, locations: Iterable[SampleLocation]) -> None:
        """Set the finding of a kind that the caller has counted over the whole data set."""
        if count:
            self.findings[kind] = Finding(count, list(locations)[:MOST_LOCATIONS])

    def merge(self, other: Mapping[str, Finding]) -> None:
        for kind, finding in other.items():
            mine = self.findings.setdefault(kind, Finding())
            mine.count += finding.count
            mine.locations += finding.locations[: MOST_LOCATIONS - len(mine.locations)]

    def sorted(self) -> dict[str, Finding]:
        """Return findings, worst first, and of one severity the most frequent first."""
        names = sorted(
            self.findings, key=lambda name: (SEVERITIES.index(KINDS[name].severity), -self.findings[name].count, name)
        )
        return {name: self.findings[name] for name in names}
