"""Write `report.html` beside every run: its numbers, curves, held-out answers and settings on one page."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from tessera.core import html
from tessera.core.callback import Callback, TrainerHandle
from tessera.core.config import read_mapping
from tessera.core.errors import TesseraError
from tessera.core.files import keep_inside, leads_out, read_bytes, read_jsonl, read_metrics, step_of
from tessera.data.media.files import Limits
from tessera.data.media.images import read_image

MOST_ANSWERS = 60
THUMBNAIL = 96
MOST_PREVIEWS = 8  # steps, spread over the run
MOST_PREVIEW_BYTES = 4 << 20

_STYLE = """
.answers{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(150px,1fr))}
.answer{padding:10px;text-align:center;background:var(--card);border:1px solid var(--line);border-radius:10px}
.answer img{image-rendering:pixelated;width:56px;height:56px;object-fit:contain;margin:0 2px;border-radius:4px;
background:#000}.answer .text{font-size:20px;font-weight:600}.right .text{color:var(--good)}
.wrong .text{color:var(--bad)}.wrong{border-color:var(--bad)}
.previews{display:flex;gap:10px;overflow-x:auto;padding-bottom:10px}.previews figure{flex:none;padding:8px}
.previews img{height:160px;display:block;image-rendering:auto;border-radius:4px}
"""


class Report(Callback):
    """Write the report when the run ends."""

    def on_end(self, trainer: TrainerHandle) -> None:
        if trainer.world.is_main:
            write_report(trainer.config.folder)


def write_report(folder: str | Path) -> Path:
    """Write the report from what the run recorded: `metrics.jsonl`, answers, previews and `config.yaml`."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise TesseraError(f"{folder} is not a run: it has no metrics.jsonl")
    rows = read_metrics(folder / "metrics.jsonl")
    answers = list(read_jsonl(_newest_answers(folder)))
    config = read_mapping(folder / "config.yaml")
    body = [
        f'<h1>{html.escape(str(config["name"]))}</h1><div class="soft">{html.escape(_subtitle(config))}</div>',
        html.facts(_facts(rows, answers)),
        html.section("Training", f'<div class="charts">{"".join(_charts(rows))}</div>'),
        _previews(folder),
        _answers(answers),
        _settings(folder),
    ]
    page = html.page(f"{config['name']} · Tessera", body, _STYLE)
    path = folder / "report.html"
    keep_inside(path)
    path.write_text(page, encoding="utf-8")
    return path


def _newest_answers(folder: Path) -> Path:
    """Return the file of the evaluation of the whole run, or of the last evaluation during the run."""
    whole = folder / "answers.jsonl"
    of_steps = sorted(folder.glob("answers-step-*.jsonl"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    return whole if whole.exists() or not of_steps else of_steps[-1]


def _subtitle(config: dict[str, Any]) -> str:
    model, train = config["model"], config["train"]
    origin = " ".join(str(model[k]) for k in ("family", "preset", "path") if model.get(k))
    length = f"{train['steps']} steps" if train.get("steps") is not None else f"{train.get('epochs')} epochs"
    return f"{origin} · {length} · global batch {train['global_batch']} · seed {train['seed']}"


def _facts(rows: list[dict[str, Any]], answers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    train = [r for r in rows if r["kind"] == "train"]
    timed = [r for r in train if "step_seconds" in r]
    facts: list[tuple[str, str]] = []
    if train:
        facts += [("steps", str(train[-1]["step"])), ("last loss", f"{train[-1]['loss']:.4f}")]
    evaluated = [r for r in rows if "eval_loss" in r]
    if evaluated:
        facts.append(("held-out loss", f"{evaluated[-1]['eval_loss']:.4f}"))
    for group, right, total in accuracy_by_group(answers):
        facts.append((f"accuracy, {group}", f"{right / total:.1%}"))
    if timed:
        middle = sorted(timed, key=lambda r: r["step_seconds"])[len(timed) // 2]
        facts.append(("median step", f"{middle['step_seconds'] * 1000:.0f} ms"))
        facts += [(k.replace("_per_s", "/s"), f"{v:,.0f}") for k, v in middle.items() if k.endswith("_per_s") and v]
        facts.append(("data wait", f"{middle['data_wait']:.1%}"))
        facts.append(("peak memory", f"{max(r['peak_memory_gib'] for r in timed):.2f} GiB"))
    return facts


def _charts(rows: list[dict[str, Any]]) -> list[str]:
    train = [r for r in rows if r["kind"] == "train"]
    held_out = [(r["step"], r["eval_loss"]) for r in rows if "eval_loss" in r]
    exact = [(r["step"], r["eval_exact_match"]) for r in rows if "eval_exact_match" in r]

    def column(key: str) -> list[tuple[float, float]]:
        return [(r["step"], r[key]) for r in train if key in r]

    def logarithmic(title: str, key: str, *others: html.Series) -> str:
        points = column(key)
        series = [html.Series("each step", points, "raw"), html.Series("smoothed", _smooth(points)), *others]
        scale = all(y > 0 for _, y in points if math.isfinite(y))
        return html.line_chart(f"{title} (logarithmic)", series, html.Frame(log_scale=scale))

    charts = [
        logarithmic("Loss", "loss", html.Series("held-out", held_out, "held", dots=True)),
        logarithmic("Gradient norm", "grad_norm"),
        html.line_chart("Learning rate", [html.Series("learning rate", column("lr"))]),
        html.line_chart("Seconds per step", [html.Series("seconds", column("step_seconds"))]),
    ]
    if exact:
        series = html.Series("share", exact, "held", dots=True)
        charts.append(html.line_chart("Exact answers to held-out samples", [series]))
    return charts


def _smooth(points: Sequence[html.Point], weight: float = 0.9) -> list[html.Point]:
    """Return the exponential average, without a pull towards zero at the start."""
    out: list[html.Point] = []
    total = norm = 0.0
    for x, y in points:
        if math.isfinite(y):
            total, norm = weight * total + (1 - weight) * y, weight * norm + (1 - weight)
            out.append((x, total / norm))
    return out


def accuracy_by_group(answers: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    groups: dict[str, list[bool]] = {}
    for row in answers:
        groups.setdefault(row["group"], []).append(row["correct"])
    return [(name, sum(marks), len(marks)) for name, marks in sorted(groups.items())]


def _answers(answers: list[dict[str, Any]]) -> str:
    if not answers:
        return ""
    # Mistakes first, then correct answers spread evenly over the whole set.
    wrong = [a for a in answers if not a["correct"]][: MOST_ANSWERS // 2]
    right = [a for a in answers if a["correct"]]
    stride = max(1, len(right) // max(1, MOST_ANSWERS - len(wrong)))
    shown = wrong + right[::stride][: MOST_ANSWERS - len(wrong)]
    cards = []
    for row in shown:
        images = "".join(f'<img alt="" src="{uri}">' for uri in map(_thumbnail, row["images"]) if uri)
        verdict = "" if row["correct"] else f'<div class="soft">expected {html.escape(row["expected"])}</div>'
        cards.append(
            f'<div class="answer {"right" if row["correct"] else "wrong"}">{images}'
            f'<div class="soft">{html.escape(row["question"][:80])}</div>'
            f'<div class="text">{html.escape(row["answer"][:80]) or "—"}</div>{verdict}</div>'
        )
    note = f'<p class="soft">{len(shown)} of {len(answers)}; mistakes first.</p>'
    generated = any(str(path).endswith(".gif") for row in shown for path in row["images"])
    title = "Judged samples" if generated else "Held-out answers"
    return html.section(title, f'{note}<div class="answers">{"".join(cards)}</div>')


def _previews(folder: Path) -> str:
    """Return samples of a generation model: a row for each prompt, from the first step to the last."""
    rows = [row for row in read_jsonl(folder / "previews.jsonl") if step_of(row) is not None]
    steps = sorted({row["step"] for row in rows})
    if not steps:
        return ""
    shown = {steps[round(at * (len(steps) - 1) / max(1, MOST_PREVIEWS - 1))] for at in range(MOST_PREVIEWS)}
    cards: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        uri = _media(folder, str(row.get("file"))) if row["step"] in shown else None
        if uri is not None:
            image = f'<figure><img alt="" src="{uri}"><p>step {row["step"]}</p></figure>'
            cards.setdefault((str(row.get("prompt")), int(row.get("seed", 0))), []).append(image)
    parts = [
        f'<p>{html.escape(prompt[:200])} <span class="soft">seed {seed}</span></p>'
        f'<div class="previews">{"".join(images)}</div>'
        for (prompt, seed), images in cards.items()
    ]
    return html.section("Previews", "".join(parts))


def _media(folder: Path, name: str) -> str | None:
    """Return a file of the run as a data address; None for what is no small PNG or GIF inside the run."""
    path = folder / name
    kind = {".png": "png", ".gif": "gif"}.get(path.suffix)
    if kind is None or not path.is_file() or leads_out(path, folder):
        return None
    try:
        content = read_bytes(path, MOST_PREVIEW_BYTES)
    except TesseraError:
        return None
    return f"data:image/{kind};base64," + base64.b64encode(content).decode()


def _thumbnail(path: str) -> str | None:
    file = Path(path)
    if file.suffix == ".gif":  # as it is, so that it moves
        return _media(file.parent, file.name)
    try:
        image = read_image(file, Limits())
    except TesseraError:
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _settings(folder: Path) -> str:
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    recipe = f"<details><summary>the resolved recipe</summary><pre>{html.escape(text)}</pre></details>"
    return html.section("Settings", recipe)
