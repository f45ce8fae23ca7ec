"""Write the sections of a report with generated answers and their images, and with previews of a generation model."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.observe.report.recorded import RecordedRun
from tessera.runtime import html
from tessera.runtime.files import leads_out, read_bytes, read_jsonl, step_of

MOST_ANSWERS = 60
MOST_IMAGES = 6  # maximum number of images that are shown for one answer
SHORT = 28  # answers of up to this many characters are written in large letters
FOLDED = 360  # characters of a long text that are visible before a click opens the rest
MOST_TEXT = 20_000
MOST_PREVIEWS = 8  # maximum number of steps whose previews are shown
MOST_PREVIEW_BYTES = 4 << 20
RECORDING = ".mp3"  # suffix of previews of recordings
_MOST_RECORDING_BYTES = 1 << 20

STYLE = """
.answers{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,250px),1fr));align-items:start}
.answers.words{grid-template-columns:repeat(auto-fill,minmax(160px,1fr))}
.answer{padding:10px 12px;background:var(--card);border:1px solid var(--line);border-radius:10px;overflow:hidden}
.words .answer{text-align:center}
.images{display:flex;flex-wrap:wrap;gap:6px;margin-bottom:6px}.words .images{justify-content:center}
.image{line-height:0}.image img{max-width:100%;max-height:300px;border-radius:4px;background:#000}
.image audio{max-width:100%;height:34px}
.image img.tiny{image-rendering:pixelated;height:84px;min-width:40px;object-fit:contain}
.text{white-space:pre-wrap;overflow-wrap:anywhere}.text.word{font-size:20px;font-weight:600}
.right .text.said{color:var(--good)}.wrong .text.word.said{color:var(--bad)}.wrong{border-color:var(--bad)}
.answer .soft{overflow-wrap:anywhere;font-size:13.5px}details.long summary{cursor:pointer;list-style:none}
details.long[open] summary span{display:none}details.long summary i{color:var(--main);font-style:normal}
.previews{display:flex;gap:10px;overflow-x:auto;padding-bottom:10px}.previews figure{flex:none;padding:8px}
.previews img{height:220px;display:block;image-rendering:auto;border-radius:4px}
"""


def answers_section(run: RecordedRun) -> str:
    """Return a section with a selection of the answers to held-out samples, wrong answers first."""
    if not run.answers:
        return ""
    wrong = [row for row in run.answers if not row["correct"]][: MOST_ANSWERS // 2]
    right = [row for row in run.answers if row["correct"]]
    stride = max(1, len(right) // max(1, MOST_ANSWERS - len(wrong)))
    rows = wrong + right[::stride][: MOST_ANSWERS - len(wrong)]
    words = all(len(text) <= SHORT for row in rows for text in (row["answer"], row["expected"]))
    cards = "".join(_card(row, run) for row in rows)
    legend = " Boxes: expected in green, answered in orange." if any(row["regions"] for row in rows) else ""
    note = f'<p class="soft">{len(rows)} of {len(run.answers)}; mistakes first.{legend}</p>'
    generated = any(path.endswith(".gif") for row in rows for path in row["images"])
    title = "Judged samples" if generated else "Held-out answers"
    return html.section(title, f'{note}<div class="answers{" words" if words else ""}">{cards}</div>')


def accuracy_by_group(answers: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    groups: dict[str, list[bool]] = {}
    for row in answers:
        groups.setdefault(row["group"], []).append(row["correct"])
    return [(name, sum(marks), len(marks)) for name, marks in sorted(groups.items())]


def previews_section(folder: Path) -> str:
    """Return a section with previews of a generation model: a row of images for each prompt and seed."""
    rows = [row for row in read_jsonl(folder / "previews.jsonl") if step_of(row) is not None]
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return ""
    chosen = {steps[round(at * (len(steps) - 1) / max(1, MOST_PREVIEWS - 1))] for at in range(MOST_PREVIEWS)}
    cards: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        uri = _media(folder, str(row.get("file"))) if row["step"] in chosen else None
        if uri is not None:
            image = f'<figure><img alt="" src="{uri}"><p>step {row["step"]}</p></figure>'
            cards.setdefault((str(row.get("prompt")), str(row.get("seed", 0))), []).append(image)
    parts = [
        f'<p>{html.escape(prompt[:200])} <span class="soft">seed {html.escape(seed)}</span></p>'
        f'<div class="previews">{"".join(images)}</div>'
        for (prompt, seed), images in cards.items()
    ]
    return html.section("Previews", "".join(parts))


def _card(row: Mapping[str, Any], run: RecordedRun) -> str:
    question = f'<div class="soft">{folded(row["question"])}</div>'
    expected = "" if row["correct"] else f'<div class="soft">expected</div>{text_block(row["expected"], "")}'
    kind = "right" if row["correct"] else "wrong"
    return (
        f'<div class="answer {kind}">{_images(row, run)}{question}{text_block(row["answer"], "said")}{expected}</div>'
    )


def text_block(text: str, kind: str) -> str:
    """Return HTML of an answer or an expected answer, in large letters if it is short."""
    size = " word" if len(text) <= SHORT else ""
    return f'<div class="text {kind}{size}">{folded(text) or "—"}</div>'


def folded(text: str) -> str:
    """Return text as HTML. A long text shows its beginning, and a click opens the rest."""
    if len(text) <= FOLDED:
        return html.escape(text)
    cut = "" if len(text) <= MOST_TEXT else f"\n[{len(text) - MOST_TEXT:,} more characters]"
    beginning = html.escape(text[: FOLDED - 60].rstrip())
    return (
        f'<details class="long"><summary><span>{beginning}… </span><i>{len(text):,} characters</i></summary>'
        f"{html.escape(text[:MOST_TEXT] + cut)}</details>"
    )


def _images(row: Mapping[str, Any], run: RecordedRun) -> str:
    copies = [*row["copies"], *[None] * len(row["images"])]
    sizes = [*row["sizes"], *[None] * len(row["images"])]
    images = "".join(
        embedded_media(run.folder, copy or path, regions_overlay(row["regions"], number, sizes[number]))
        for number, (path, copy) in enumerate(zip(row["images"][:MOST_IMAGES], copies, strict=False))
    )
    more = len(row["images"]) - MOST_IMAGES
    return f'<div class="images">{images}{f"<span>and {more} more</span>" if more > 0 else ""}</div>' if images else ""


def regions_overlay(regions: Iterable[Mapping[str, Any]], image: int, size: tuple[int, int] | None) -> str:
    """Return the expected and the answered boxes and points of an image as SVG. The row may be malicious."""
    shapes = []
    for region in regions if size is not None else ():
        numbers, kind = region.get("numbers"), "good" if region.get("of") == "expected" else "held"
        if region.get("image") != image or not isinstance(numbers, list):
            continue
        if all(type(number) in (int, float) and abs(number) < 1e9 for number in numbers):
            label = f"{region.get('of')}: {region.get('label') or ''}".strip(": ")
            shapes.append(html.Shape(tuple(map(float, numbers)), label, kind))
    return html.overlay(*size, shapes) if size is not None else ""


def embedded_image(folder: Path, path: str, overlay: str) -> str:
    """Return HTML that embeds an image file of a folder; empty if the file cannot be read, or is outside of it."""
    # Imported here because these modules import torch, which a page without images does not need.
    from tessera.data.media.files import Limits
    from tessera.data.media.images import TINY, read_image, small_copy

    if path.endswith(".gif"):  # embedded unchanged, so that it stays animated
        uri = _media(folder, path)
        return "" if uri is None else f'<div class="image"><img class="tiny" alt="" src="{uri}"></div>'
    file = _inside(folder, path)
    try:
        image = None if file is None else read_image(file, Limits())
    except TesseraError:
        return ""
    if image is None:
        return ""
    tiny = ' class="tiny"' if max(image.size) <= TINY else ""
    content, kind = small_copy(image)
    uri = f"data:image/{kind};base64," + base64.b64encode(content).decode()
    return f'<div class="image drawn"><img{tiny} alt="" src="{uri}">{overlay}</div>'


def embedded_media(folder: Path, path: str, overlay: str) -> str:
    """Return HTML that embeds a recording, or an image with its overlay; empty if the file cannot be read."""
    return embedded_recording(folder, path) if path.endswith(RECORDING) else embedded_image(folder, path, overlay)


def embedded_recording(folder: Path, path: str) -> str:
    """Return HTML that embeds a preview of a recording; empty if it cannot be read, or is outside of the folder."""
    file = _inside(folder, path)
    try:
        content = None if file is None else read_bytes(file, _MOST_RECORDING_BYTES)
    except TesseraError:
        return ""
    if content is None:
        return ""
    uri = f"data:audio/mpeg;base64,{base64.b64encode(content).decode()}"
    return f'<div class="image"><audio controls preload="none" src="{uri}"></audio></div>'


def _media(folder: Path, name: str) -> str | None:
    """Return a PNG or GIF as a data URI; None if it is too large, of another type, or outside of the run folder."""
    path = _inside(folder, name)
    kind = None if path is None else {".png": "png", ".gif": "gif"}.get(path.suffix)
    if path is None or kind is None:
        return None
    try:
        content = read_bytes(path, MOST_PREVIEW_BYTES)
    except TesseraError:
        return None
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def _inside(folder: Path, name: str) -> Path | None:
    """Return the path of a file; None if it is outside of the run folder, since the records may be malicious."""
    path = folder / name
    try:
        return path if path.is_file() and not leads_out(path, folder) else None
    except (OSError, ValueError):  # such as a name with a NUL character
        return None
