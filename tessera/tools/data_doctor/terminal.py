"""A diagnosis in a terminal. What comes from data is made harmless first: it may hold codes that move the cursor."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from tessera.tools.data_doctor.findings import Severity
from tessera.tools.data_doctor.histogram import bars, short
from tessera.tools.data_doctor.show import Shown

if TYPE_CHECKING:
    from tessera.tools.data_doctor.diagnosis import Diagnosis

_WIDE = 110
_COLOURS = {"loss": "31", "warning": "33", "note": "36", "good": "32", "bold": "1", "soft": "2", "trained": "30;42"}
_MARKS: dict[Severity, str] = {"loss": "✗", "warning": "!", "note": "·"}
_SAMPLE = 700  # characters of a sample


def terminal_lines(diagnosis: Diagnosis, *, colour: bool, samples: int) -> list[str]:
    paint = _Paint(colour)
    worst = diagnosis.worst
    head = "good" if worst in ("sound", "note") else worst
    lines = [paint(diagnosis.verdict, head, "bold"), ""]
    lines += ["   ".join(f"{name} {paint(value, 'bold')}" for name, value in diagnosis.facts()), ""]
    if len(diagnosis.sets) > 1:
        lines += [f"  {one.usable:>12,} of {one.rows:>12,} usable   {harmless(one.path)}" for one in diagnosis.sets]
        lines.append("")
    for _, kind, found in diagnosis.findings():
        lines.append(f"{paint(_MARKS[kind.severity], kind.severity)} {paint(kind.title, 'bold')}: {found.count:,}")
        for place in found.places:
            name = f" ({harmless(place.id)})" if place.id and place.id != place.where else ""
            lines += _wrapped(f"{harmless(place.where)}{name}: {harmless(place.detail)}", "      ")
        lines += [paint(line, "soft") for line in _wrapped(f"mend: {kind.mend}", "      ")]
    if diagnosis.found:
        lines.append("")
    for one in diagnosis.histograms:
        lines.append(f"{one.title:>24} {short(one.low):>7} {bars(one)} {short(one.high)}")
        lines.append(paint(f"{'':>24}         {one.summary()}", "soft"))
    lines += _forecast(diagnosis, paint)
    for shown in diagnosis.samples[:samples]:
        lines += ["", *_sample(shown, paint)]
    lines += ["", *(paint(line, "soft") for note in diagnosis.notes() for line in _wrapped(note, ""))]
    return lines


def _forecast(diagnosis: Diagnosis, paint: _Paint) -> list[str]:
    if not diagnosis.forecast:
        return []
    lines = [
        "",
        paint(
            "   row length     dropped   tokens lost   cut by turns   tokens lost   padding       rows   heaviest",
            "bold",
        ),
    ]
    for rung in diagnosis.forecast:
        line = (
            f"{'>' if rung.chosen else ' '} {rung.length:>11,} {rung.dropped_share:>11.2%} {rung.tokens_lost:>13.2%}"
            f" {rung.cut_share:>14.2%} {rung.cut_tokens_lost:>13.2%} {rung.padding:>9.2%} {rung.rows:>10,}"
            f" {'' if rung.work is None else f'{rung.work:.2f} x':>10}"
        )
        lines.append(paint(line, "bold") if rung.chosen else line)
    if any(rung.estimated for rung in diagnosis.forecast):
        lines.append(paint("  cutting and packing are estimated from a part of the samples", "soft"))
    return lines


def _sample(shown: Shown, paint: _Paint) -> list[str]:
    counts = "" if shown.tokens is None else f"  {shown.tokens:,} tokens, {shown.trained:,} trained on"
    lines = [paint(f"── {harmless(shown.place)} ({harmless(shown.id)}){counts}", "bold")]
    if shown.problem:
        lines.append(paint(harmless(shown.problem), "loss"))
    for thumb in shown.media:
        tokens = "" if thumb.tokens is None else f", {thumb.tokens:,} tokens"
        lines.append(paint(f"   {harmless(thumb.name)}: {thumb.size}{tokens}", "note"))
    text, room = "", _SAMPLE
    for piece in shown.pieces:
        words = harmless(piece.text, keep_lines=True)
        words = words if len(words) <= room else words[: max(0, room)] + "…"
        room -= len(words)
        style = {"trained": ("trained",), "media": ("note",), "context": ()}[piece.kind]
        # Without colours brackets tell what is trained on.
        plain = f"⟦{words}⟧" if piece.kind == "trained" else f"[{words}]" if piece.kind == "media" else words
        text += "\n".join(paint(line, *style) if line else "" for line in words.split("\n")) if paint.on else plain
        if room <= 0:
            break
    return [*lines, *text.rstrip("\n").split("\n")]


def harmless(text: str, *, keep_lines: bool = False) -> str:
    """Control characters become pictures of themselves."""
    kept = "\n\t" if keep_lines else ""
    return "".join(
        char
        if char.isprintable() or char in kept
        else chr(0x2400 + ord(char))
        if ord(char) < 0x20
        else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDE, initial_indent=indent, subsequent_indent=indent + "  ") or [indent]


class _Paint:
    def __init__(self, on: bool) -> None:
        self.on = on

    def __call__(self, text: str, *styles: str) -> str:
        if not self.on or not styles:
            return text
        return f"\x1b[{';'.join(_COLOURS[style] for style in styles)}m{text}\x1b[0m"
