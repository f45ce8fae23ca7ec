"""What an examination found, for people in a terminal or a browser, and for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tessera.tools.data_doctor.findings import KINDS, SEVERITIES, Finding, Kind
from tessera.tools.data_doctor.forecast import Rung
from tessera.tools.data_doctor.histogram import Histogram
from tessera.tools.data_doctor.page import html_page
from tessera.tools.data_doctor.show import Shown
from tessera.tools.data_doctor.terminal import terminal_lines

WITHOUT_A_MODEL = (
    "Lengths are in characters: with --recipe or --model the doctor also counts tokens, says what is trained on, "
    "forecasts what a row length drops, and weighs each sample."
)


@dataclass(frozen=True)
class SetFacts:
    """One data set. Tokens are those of its usable samples."""

    path: str
    rows: int
    usable: int
    lost: int
    too_long: int
    characters: int
    tokens: int
    trained: int
    media_tokens: int
    images: int
    videos: int
    audios: int

    @property
    def media(self) -> int:
        return self.images + self.videos + self.audios


@dataclass(frozen=True)
class Diagnosis:
    sets: tuple[SetFacts, ...]
    found: tuple[tuple[str, Finding], ...]  # worst first
    histograms: tuple[Histogram, ...]
    forecast: tuple[Rung, ...]
    samples: tuple[Shown, ...]
    length: int | None  # None: without a processor
    decoded: bool
    seconds: float

    @property
    def worst(self) -> Literal["sound", "note", "warning", "loss"]:
        for severity in SEVERITIES:
            if any(KINDS[name].severity == severity for name, _ in self.found):
                return severity
        return "sound"

    @property
    def exit_code(self) -> int:
        """1 when a run would leave samples out."""
        return 1 if self.worst == "loss" else 0

    @property
    def verdict(self) -> str:
        rows, usable = self.total("rows"), self.total("usable")
        if self.worst == "loss":
            return f"{rows - usable:,} of {rows:,} samples will not be trained on"
        if self.worst == "warning":
            return f"All {rows:,} samples can be used, some look wrong"
        return f"All {rows:,} samples are sound"

    def findings(self) -> list[tuple[str, Kind, Finding]]:
        return [(name, KINDS[name], found) for name, found in self.found]

    def total(self, name: str) -> int:
        return sum(getattr(one, name) for one in self.sets)

    def facts(self) -> list[tuple[str, str]]:
        """The first things to know, named."""
        rows = self.total("rows")
        known = [("samples", f"{rows:,}"), ("usable", f"{self.total('usable') / max(1, rows):.2%}")]
        if self.length is None:
            known.append(("characters", f"{self.total('characters'):,}"))
        else:
            tokens = max(1, self.total("tokens"))
            known += [
                ("tokens", f"{self.total('tokens'):,}"),
                ("trained on", f"{self.total('trained') / tokens:.1%}"),
                ("tokens of media", f"{self.total('media_tokens') / tokens:.1%}"),
            ]
            padding = next((rung.padding for rung in self.forecast if rung.chosen), None)
            if padding is not None:
                known.append((f"padding at {self.length:,}", f"{padding:.1%}"))
        known += [(kind, f"{self.total(kind):,}") for kind in ("images", "videos", "audios") if self.total(kind)]
        return known

    def notes(self) -> list[str]:
        """What a reader should know of how this was found out."""
        said = [] if self.length is not None else [WITHOUT_A_MODEL]
        if self.decoded:
            said.append("Every picture and clip was decoded.")
        elif self.total("media"):
            said.append("Media was judged by headers; --decode reads all of it.")
        return said

    # ------------------------------------------------------------------------------------------ forms

    def lines(self, *, colour: bool = False, samples: int = 3) -> list[str]:
        return terminal_lines(self, colour=colour, samples=samples)

    def html(self) -> str:
        return html_page(self)

    def json(self) -> str:
        facts: dict[str, Any] = {
            "worst": self.worst,
            "verdict": self.verdict,
            "rows": self.total("rows"),
            "usable": self.total("usable"),
            "length": self.length,
            "decoded": self.decoded,
            "seconds": round(self.seconds, 2),
            "sets": [asdict(one) for one in self.sets],
            "findings": [
                {
                    "kind": name,
                    "severity": kind.severity,
                    "title": kind.title,
                    "count": found.count,
                    "mend": kind.mend,
                    "places": [asdict(place) for place in found.places],
                }
                for name, kind, found in self.findings()
            ],
            "histograms": [one.facts() for one in self.histograms],
            "forecast": [asdict(rung) for rung in self.forecast],
        }
        return json.dumps(facts, indent=2, ensure_ascii=True)
