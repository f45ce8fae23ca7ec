"""`report.html` beside every run: one file that needs nothing else, for whoever would rather look than read."""

from __future__ import annotations

import base64
import html
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from tessera.core.config import read_mapping
from tessera.core.errors import TesseraError
from tessera.core.files import keep_inside
from tessera.data.media.images import Limits, read_image
from tessera.train.callbacks import Callback
from tessera.train.charts import Series, line_chart, smooth
from tessera.train.jsonl import read_jsonl, read_metrics

if TYPE_CHECKING:
    from tessera.train.trainer import Trainer

MOST_ANSWERS = 60
THUMBNAIL = 96

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--soft:#667;--line:#d8dbe2;--page:#fbfbfc;--card:#fff;--main:#2f5fd0;
--held:#d9622b;--good:#2e8b57;--bad:#c23b3b}
@media(prefers-color-scheme:dark){:root{--ink:#e8eaee;--soft:#9aa3b2;--line:#343a46;--page:#14171c;--card:#1c2027;
--main:#7da2ff;--held:#ff9b66;--good:#63c793;--bad:#ff7d7d}}*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--page);margin:0 auto;padding:28px;
max-width:1240px}h1{font-size:26px;margin:0}h2{font-size:18px;margin:34px 0 12px}.soft{color:var(--soft)}
.facts,.charts,.answers{display:grid;gap:14px}
.facts{grid-template-columns:repeat(auto-fit,minmax(150px,1fr));margin-top:18px}
.fact,figure,.answer{background:var(--card);border:1px solid var(--line);border-radius:10px}
.fact{padding:12px 14px}.fact b{display:block;font-size:21px;font-variant-numeric:tabular-nums}
.charts{grid-template-columns:repeat(auto-fit,minmax(460px,1fr))}figure{margin:0;padding:12px 14px}
figcaption{font-weight:600}svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:11px}
.grid{stroke:var(--line)}polyline{fill:none;stroke-width:2}
polyline.raw{stroke:var(--main);opacity:.25;stroke-width:1}polyline.main{stroke:var(--main)}
circle.held{fill:var(--held)}.legend{font-size:12px;color:var(--soft)}.key{margin-right:14px}
.key:before{content:"";display:inline-block;width:14px;height:3px;margin-right:5px;vertical-align:middle;
background:var(--main)}.key.raw:before{opacity:.3}.key.held:before{background:var(--held)}
.answers{grid-template-columns:repeat(auto-fill,minmax(150px,1fr))}.answer{padding:10px;text-align:center}
.answer img{image-rendering:pixelated;width:56px;height:56px;object-fit:contain;margin:0 2px;border-radius:4px;
background:#000}.answer .said{font-size:20px;font-weight:600}.right .said{color:var(--good)}
.wrong .said{color:var(--bad)}.wrong{border-color:var(--bad)}table{border-collapse:collapse}
td,th{padding:4px 14px 4px 0;text-align:left;border-bottom:1px solid var(--line)}
pre{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px;overflow:auto;
font-size:12.5px}
"""


class Report(Callback):
    def on_end(self, trainer: Trainer) -> None:
        if trainer.world.is_main:
            write_report(trainer.config.folder)


def write_report(folder: str | Path) -> Path:
    """Reads what the run recorded (`metrics.jsonl`, `answers.jsonl`, `config.yaml`) and draws it."""
    folder = Path(folder)
    if not (folder / "metrics.jsonl").is_file():
        raise TesseraError(f"{folder} is not a run: it has no metrics.jsonl")
    rows = read_metrics(folder / "metrics.jsonl")
    answers = list(read_jsonl(_newest_answers(folder)))
    config = read_mapping(folder / "config.yaml")
    body = [
        f"<h1>{html.escape(str(config['name']))}</h1>",
        f'<div class="soft">{html.escape(_subtitle(config))}</div>',
        _facts(rows, answers),
        f'<h2>Training</h2><div class="charts">{"".join(_charts(rows))}</div>',
        _answers(answers),
        _settings(folder),
    ]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(str(config['name']))} · Tessera</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(body)}</body></html>"
    )
    path = folder / "report.html"
    keep_inside(path)
    path.write_text(page, encoding="utf-8")
    return path


def _newest_answers(folder: Path) -> Path:
    """Of an evaluation of the whole run, or the last ones that were given on the way."""
    whole = folder / "answers.jsonl"
    on_the_way = sorted(folder.glob("answers-step-*.jsonl"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    return whole if whole.exists() or not on_the_way else on_the_way[-1]


def _subtitle(config: dict[str, Any]) -> str:
    model, train = config["model"], config["train"]
    origin = " ".join(str(model[k]) for k in ("family", "preset", "path") if model.get(k))
    return f"{origin} · {train['steps']} steps · global batch {train['global_batch']} · seed {train['seed']}"


def _facts(rows: list[dict[str, Any]], answers: list[dict[str, Any]]) -> str:
    train = [r for r in rows if r["kind"] == "train"]
    timed = [r for r in train if "step_seconds" in r]
    facts: list[tuple[str, str]] = []
    if train:
        facts += [("steps", str(train[-1]["step"])), ("last loss", f"{train[-1]['loss']:.4f}")]
    held = [r for r in rows if "eval_loss" in r]
    if held:
        facts.append(("held-out loss", f"{held[-1]['eval_loss']:.4f}"))
    for group, right, total in accuracy_by_group(answers):
        facts.append((f"accuracy, {group}", f"{right / total:.1%}"))
    if timed:
        middle = sorted(timed, key=lambda r: r["step_seconds"])[len(timed) // 2]
        facts.append(("median step", f"{middle['step_seconds'] * 1000:.0f} ms"))
        facts += [(k.replace("_per_s", "/s"), f"{v:,.0f}") for k, v in middle.items() if k.endswith("_per_s") and v]
        facts.append(("data wait", f"{middle['data_wait']:.1%}"))
        facts.append(("peak memory", f"{max(r['peak_memory_gib'] for r in timed):.2f} GiB"))
    cards = "".join(f'<div class="fact"><span class="soft">{html.escape(k)}</span><b>{v}</b></div>' for k, v in facts)
    return f'<div class="facts">{cards}</div>'


def _charts(rows: list[dict[str, Any]]) -> list[str]:
    train = [r for r in rows if r["kind"] == "train"]
    held = [(r["step"], r["eval_loss"]) for r in rows if "eval_loss" in r]
    exact = [(r["step"], r["eval_exact_match"]) for r in rows if "eval_exact_match" in r]

    def column(key: str) -> list[tuple[float, float]]:
        return [(r["step"], r[key]) for r in train if key in r]

    loss, norm = column("loss"), column("grad_norm")
    charts = [
        line_chart(
            "Loss (logarithmic)",
            [
                Series("each step", loss, "raw"),
                Series("smoothed", smooth(loss), "main"),
                Series("held-out", held, "held", dots=True),
            ],
            log_scale=all(y > 0 for _, y in loss if math.isfinite(y)),
        ),
        line_chart(
            "Gradient norm (logarithmic)",
            [Series("each step", norm, "raw"), Series("smoothed", smooth(norm), "main")],
            log_scale=all(y > 0 for _, y in norm if math.isfinite(y)),
        ),
        line_chart("Learning rate", [Series("learning rate", column("lr"), "main")]),
        line_chart("Seconds per step", [Series("seconds", column("step_seconds"), "main")]),
    ]
    if exact:
        charts.append(line_chart("Exact answers to held-out samples", [Series("share", exact, "held", dots=True)]))
    return charts


def accuracy_by_group(answers: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    groups: dict[str, list[bool]] = {}
    for row in answers:
        groups.setdefault(row["group"], []).append(row["correct"])
    return [(name, sum(marks), len(marks)) for name, marks in sorted(groups.items())]


def _answers(answers: list[dict[str, Any]]) -> str:
    if not answers:
        return ""
    # Every mistake is worth seeing; then right ones, spread over the whole set.
    wrong = [a for a in answers if not a["correct"]][: MOST_ANSWERS // 2]
    right = [a for a in answers if a["correct"]]
    stride = max(1, len(right) // max(1, MOST_ANSWERS - len(wrong)))
    shown = wrong + right[::stride][: MOST_ANSWERS - len(wrong)]
    cards = []
    for row in shown:
        pictures = "".join(f'<img alt="" src="{uri}">' for uri in map(_thumbnail, row["images"]) if uri)
        verdict = "" if row["correct"] else f'<div class="soft">expected {html.escape(row["expected"])}</div>'
        cards.append(
            f'<div class="answer {"right" if row["correct"] else "wrong"}">{pictures}'
            f'<div class="soft">{html.escape(row["question"][:80])}</div>'
            f'<div class="said">{html.escape(row["answer"][:80]) or "—"}</div>{verdict}</div>'
        )
    return (
        f'<h2>Held-out answers</h2><p class="soft">{len(shown)} of {len(answers)}; mistakes first.</p>'
        f'<div class="answers">{"".join(cards)}</div>'
    )


def _thumbnail(path: str) -> str | None:
    try:
        image = read_image(Path(path), Limits())
    except TesseraError:
        return None
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def _settings(folder: Path) -> str:
    text = (folder / "config.yaml").read_text(encoding="utf-8")
    return f"<h2>Settings</h2><details><summary>the resolved recipe</summary><pre>{html.escape(text)}</pre></details>"
