"""Write the scores of generated samples as JSON, and as an HTML page that shows samples."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tessera.data.media.images import small_copy
from tessera.errors import TesseraError, first_line
from tessera.evaluation.generation.samples import GeneratedSample
from tessera.evaluation.generation.scores import CLIP_SCORE, Scores
from tessera.runtime import html
from tessera.runtime.files import replace_file

JSON_FILE, PAGE_FILE = "scores.json", "scores.html"
MOST_SHOWN = 48
_FRAMES = 3  # limit of the frames of a video on the page: the first, the middle and the last
_STYLE = """
.samples{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(260px,1fr))}
.samples .strip{display:flex;gap:4px}.samples img{flex:1 1 0;min-width:0;width:100%;border-radius:4px;display:block}
.samples figcaption{display:block;font-weight:400;overflow-wrap:anywhere;margin-top:8px}
"""


def write_scores(out: Path, scores: Scores) -> tuple[Path, Path]:
    """Write `scores.json` and `scores.html`. Return their paths."""
    content = json.dumps(scores.dump(), indent=2, ensure_ascii=False) + "\n"
    page = _page(scores)
    files = out / JSON_FILE, out / PAGE_FILE
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path, text in zip(files, (content, page), strict=True):
            replace_file(path, text.encode())
    except OSError as error:
        raise TesseraError(
            f"scores.json and scores.html cannot be written to the folder {out}: {first_line(error)}",
            where="--out",
            code="output.not-writable",
        ) from None
    return files


def _page(scores: Scores) -> str:
    samples = scores.samples
    kind = "videos" if samples.are_videos else "images"
    title = f"Scores of {len(samples.samples)} {kind}"
    facts = [(name, _number(value["value"])) for name, value in scores.values.items()]
    facts += [(kind, f"{len(samples.samples):,}"), ("protocol", scores.fingerprint)]
    warnings = "".join(f"<p>{html.escape(text)}</p>" for text in scores.warnings)
    cells = [
        [html.escape(name), _number(value["value"]), _interval(value["interval_95"]), html.escape(_facts(value))]
        for name, value in scores.values.items()
    ]
    table = html.table(["score", "value", "95 % interval", "details"], cells)
    protocol = html.escape(json.dumps(scores.protocol, indent=2, ensure_ascii=False)[:100_000])
    body = [
        f'<p class="soft">{html.escape(samples.folder.name)}</p><h1>{html.escape(title)}</h1>',
        html.facts(facts),
        html.section("Scores", table),
        html.section("Warnings", warnings) if warnings else "",
        _samples(scores),
        html.section("Protocol", f"<pre>{protocol}</pre>"),
    ]
    return html.page(title, body, _STYLE)


def _samples(scores: Scores) -> str:
    chosen = _chosen([row.get(CLIP_SCORE) for row in scores.rows])
    cards = "".join(_card(scores.samples.samples[number], scores.rows[number]) for number in chosen)
    scored = bool(scores.rows) and CLIP_SCORE in scores.rows[0]
    order = "lowest CLIP score first" if scored else "evenly chosen"
    note = f'<p class="soft">{len(chosen)} of {len(scores.rows)}; {order}.</p>'
    return html.section("Samples", f'{note}<div class="samples">{cards}</div>')


def _chosen(values: Sequence[float | None]) -> list[int]:
    """Return the indices of the samples to show: those with the lowest and the highest values; without values, evenly
    spaced ones.
    """
    if any(value is None for value in values):
        stride = max(1, len(values) // MOST_SHOWN)
        return list(range(0, len(values), stride))[:MOST_SHOWN]
    order = sorted(range(len(values)), key=lambda number: values[number] or 0.0)
    half = MOST_SHOWN // 2
    return order if len(order) <= MOST_SHOWN else [*order[:half], *order[-half:]]


def _card(sample: GeneratedSample, row: dict[str, Any]) -> str:
    frames = sample.frames()
    count = min(_FRAMES, len(frames))
    numbers = [round(at * (len(frames) - 1) / max(1, count - 1)) for at in range(count)]
    images = "".join(_image(Image.fromarray(frames[number])) for number in numbers)
    facts = [f"{name} {_number(row[name])}" for name in (CLIP_SCORE, "frame_consistency") if name in row]
    facts += [f"seed {row['seed']}"] if isinstance(row["seed"], int) else []
    text = html.escape((sample.prompt or sample.path.name)[:300])
    return (
        f'<figure><div class="strip">{images}</div><figcaption>{text}'
        f'<p class="soft">{html.escape(", ".join(facts))}</p></figcaption></figure>'
    )


def _image(image: Image.Image) -> str:
    content, kind = small_copy(image)
    return f'<img alt="" src="data:image/{kind};base64,{base64.b64encode(content).decode()}">'


def _number(value: float) -> str:
    return f"{value:.5g}"


def _interval(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{_number(interval[0])} to {_number(interval[1])}"


def _facts(value: dict[str, Any]) -> str:
    extra = {key: item for key, item in value.items() if key not in ("value", "interval_95") and item is not None}
    return ", ".join(f"{key} {item:.5g}" if isinstance(item, float) else f"{key} {item}" for key, item in extra.items())
