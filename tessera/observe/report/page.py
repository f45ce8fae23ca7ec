"""Write `report.html` of a run, or one page with several runs side by side."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.observe.report.answers import (
    STYLE,
    accuracy_by_group,
    answers_section,
    compared_answers,
    previews_section,
)
from tessera.observe.report.charts import charts_of, charts_of_several, run_style
from tessera.observe.report.history import RunSession
from tessera.observe.report.recorded import RecordedRun, read_run, smooth
from tessera.runtime import html
from tessera.runtime.files import check_regular, read_text

REPORT = "report.html"
REFRESH_S = 60  # a page that was opened as a file is drawn anew so often while the run goes on
MOST_RUNS = 16
MOST_DIFFERENCES = 80
_HOW = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped: a resume goes on",
    "failed": "failed",
    "killed": "killed: a resume goes on",
    "silent": "no sign of life",
}
_STYLE = (
    STYLE
    + """
.how{font-weight:600}.how.failed,.how.killed{color:var(--bad)}.how.running,.how.finished{color:var(--good)}
.reason{border:1px solid var(--bad);border-radius:10px;padding:10px 14px;white-space:pre-wrap;overflow-wrap:anywhere}
td.value{white-space:normal;overflow-wrap:anywhere;max-width:420px}
"""
)


def report(run: str | Path, *others: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, and return its file: `RUN/report.html` unless `out` says otherwise.

    With several runs, one page shows them side by side; then `out` is needed.
    """
    if others and out is None:
        raise TesseraError(
            "a page with several runs belongs to none of them", where="--out", fix="name a file: --out compare.html"
        )
    if out is None:
        try:
            return write_report(run)
        except OSError as error:
            raise TesseraError(
                f"{Path(run) / REPORT} cannot be written: {error.strerror}",
                where=str(run),
                fix="name a file elsewhere: --out report.html",
            ) from None
    runs, path = [read_run(folder) for folder in (run, *others)], Path(out)
    if path.is_dir():
        raise TesseraError(f"{path} is a folder", where="--out", fix=f"name a file: {path / 'compare.html'}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(path, comparison_page(runs) if others else report_page(runs[0]))
    except OSError as error:
        raise TesseraError(f"{path} cannot be written: {error.strerror}", where="--out") from None
    return path


def write_report(folder: str | Path) -> Path:
    """Write `report.html` of a run from what it recorded; the run may still be going on."""
    run = read_run(folder)
    path = run.folder / REPORT
    write_page(path, report_page(run, REFRESH_S if run.running else None))
    return path


def write_page(path: Path, page: str) -> None:
    """Write a page in one step: no reader sees a part of it, two writers do no harm, and no link is followed."""
    if path.exists():
        check_regular(path)
    fresh = fresh_page(path, os.getpid())
    fresh.unlink(missing_ok=True)
    try:
        fresh.write_text(page, encoding="utf-8")
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise


def fresh_page(path: Path, pid: int) -> Path:
    """Return the file that a process writes before it becomes the page."""
    return path.with_name(f"{path.name}.{pid}.new")


def report_page(run: RecordedRun, refresh_s: int | None = None, note: str = "") -> str:
    """Return the page of one run. `note`: markup below the title."""
    body = [
        f'<h1>{html.escape(run.name)}</h1><div class="soft">{html.escape(_subtitle(run))}</div>{state_of(run)}{note}',
        html.facts(facts_of(run)),
        html.section("Training", f'<div class="charts">{"".join(charts_of(run))}</div>'),
        previews_section(run.folder),
        answers_section(run),
        _sessions(run.sessions),
        _settings(run.folder),
    ]
    return html.page(f"{run.name} · Tessera", body, _STYLE, refresh_s)


def comparison_page(runs: Sequence[RecordedRun], refresh_s: int | None = None, note: str = "") -> str:
    """Return a page with several runs side by side: figures, curves, answers to the same samples, and settings."""
    if len(runs) > MOST_RUNS:
        raise TesseraError(f"{len(runs)} runs on one page cannot be told apart", fix=f"name at most {MOST_RUNS}")
    names = names_of(runs)
    colors = [
        f'<span class="key {run_style(number)}"><i></i></span>{html.escape(name)}' for number, name in enumerate(names)
    ]
    facts = [dict(facts_of(run)) for run in runs]
    keys = list(dict.fromkeys(key for one in facts for key in one))
    rows = [[html.escape(key), *(html.escape(one.get(key, "—")) for one in facts)] for key in keys]
    above = "<tr><th></th>" + "".join(f"<th>{name}</th>" for name in colors) + "</tr>"
    figures = html.table(["", *(_how(run) for run in runs)], rows, above=above)
    charts = "".join(charts_of_several(runs, names))
    body = [
        f"<h1>{len(runs)} runs side by side</h1>{note}",
        html.section("Figures", figures),
        html.section("Training", f'<div class="charts">{charts}</div>'),
        compared_answers(runs, names),
        _differences(runs, names),
    ]
    return html.page(f"{', '.join(names)[:120]} · Tessera", body, _STYLE, refresh_s)


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return names to tell runs apart: those of equal names with as much of their folders as is needed."""
    names = [run.name for run in runs]
    parts = [run.folder.absolute().parts for run in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        if len(set(names)) == len(names):
            break
        doubled = [names.count(name) > 1 for name in names]
        names = [
            "/".join(own[-depth:]) if again else name for own, name, again in zip(parts, names, doubled, strict=True)
        ]
    return names


def _subtitle(run: RecordedRun) -> str:
    model, train = run.section("model"), run.section("train")
    origin = " ".join(str(model[key]) for key in ("family", "preset", "path") if model.get(key))
    length = f"{train['steps']} steps" if train.get("steps") is not None else f"{train.get('epochs')} epochs"
    return f"{origin} · {length} · global batch {train.get('global_batch')} · seed {train.get('seed')}"


def state_of(run: RecordedRun) -> str:
    """Return a line about how and where the run goes, or went, and why it failed."""
    if not run.sessions:
        return ""
    last = run.sessions[-1]
    when = f"{_moment(last)}" + (f" · {last.hardware}" if last.device else "")
    line = f'<p><span class="how {html.escape(last.how)}">{html.escape(_how(run))}</span> · {html.escape(when)}</p>'
    reason = f'<p class="reason">{html.escape(last.reason[:4000])}</p>' if last.reason else ""
    return line + reason


def _how(run: RecordedRun) -> str:
    if not run.sessions:
        return ""
    last = run.sessions[-1]
    if last.how == "silent":
        return f"no sign of life since {last.last:%Y-%m-%d %H:%M} UTC"
    return _HOW.get(last.how, last.how)


def _moment(session: RunSession) -> str:
    return f"started {session.began:%Y-%m-%d %H:%M} UTC"


def facts_of(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the figures of a run, each with its name."""
    facts: list[tuple[str, str]] = []
    if run.sessions:
        facts += [("started", f"{run.sessions[0].began:%Y-%m-%d}")]
        facts += [("time at work", duration(sum(session.seconds for session in run.sessions)))]
    if run.train_rows:
        facts.append(("steps", f"{run.train_rows[-1]['step']:,}"))
    if epochs := run.points("epoch"):
        facts.append(("epochs", f"{epochs[-1][1]:.3g}"))
    if losses := run.points("loss"):
        facts.append(("loss of the last step", f"{losses[-1][1]:.4f}"))
    if held_out := run.held_out("loss"):
        facts.append(("held-out loss", f"{held_out[-1][1]:.4f}"))
    for name in run.metric_names():
        if name in ("accuracy", "margin"):  # of preferences
            # Without a finite value among them, the last one says why.
            last = (smooth(run.points(name)) or run.points(name))[-1][1]
            facts.append((f"{name} of pairs", f"{last:.4g}"))
    for group, right, total in accuracy_by_group(run.answers):
        facts.append((f"accuracy, {group}", f"{right / total:.1%}"))
    seconds = run.points("step_seconds")
    if seconds:
        facts.append(("median step", _step_time(statistics.median_low(y for _, y in seconds))))
    rates = dict.fromkeys(name for row in run.train_rows for name in row if name.endswith("_per_s"))
    for rate in rates:
        if median := statistics.median_low([y for _, y in run.points(rate)] or [0]):
            facts.append((rate.replace("_per_s", "/s"), f"{median:,.0f}" if median >= 10 else f"{median:.2g}"))
    for key, name, shown in (("mfu", "MFU", "{:.1%}"), ("data_wait", "data wait", "{:.1%}")):
        if points := run.points(key):
            facts.append((name, shown.format(statistics.median_low(y for _, y in points))))
    if memory := run.points("peak_memory_gib"):
        facts.append(("peak memory", f"{max(y for _, y in memory):.2f} GiB"))
    return facts


def duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _step_time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _sessions(sessions: Sequence[RunSession]) -> str:
    """Return when and where the run was at work, and by which versions."""
    if not sessions:
        return ""
    rows = [
        (
            f"{session.began:%Y-%m-%d %H:%M:%S}",
            duration(session.seconds),
            f"{session.first_step:,} to {session.last_step:,}",
            html.escape(session.hardware),
            html.escape(", ".join(f"{name} {number}" for name, number in session.versions.items())),
            html.escape(_HOW.get(session.how, session.how)),
        )
        for session in sessions[-50:]
    ]
    head = ("started (UTC)", "time at work", "steps", "hardware", "versions", "end")
    return html.section("Sessions", html.table(head, rows))


def _settings(folder: Path) -> str:
    text = html.escape(read_text(folder / "config.yaml"))
    return html.section("Settings", f"<details><summary>the resolved recipe</summary><pre>{text}</pre></details>")


def _differences(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """Return the settings in which the runs differ."""
    flat = [dict(_flattened(run.config)) for run in runs]
    keys = [key for key in dict.fromkeys(key for one in flat for key in one) if len({one.get(key) for one in flat}) > 1]
    if not keys:
        return html.section("Settings", '<p class="soft">All settings are the same.</p>')
    cells = [
        "<tr>"
        + f"<td><code>{html.escape(key)}</code></td>"
        + "".join(f'<td class="value">{html.escape(one.get(key, "—")[:200])}</td>' for one in flat)
        + "</tr>"
        for key in keys[:MOST_DIFFERENCES]
    ]
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ("key", *names))
    more = len(keys) - MOST_DIFFERENCES
    note = f'<p class="soft">Only what differs{f"; {more} more keys are not shown" if more > 0 else ""}.</p>'
    return html.section("Settings", f'{note}<div class="wide"><table><tr>{head}</tr>{"".join(cells)}</table></div>')


def _flattened(config: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        found += _flattened(value, f"{above}{key}.") if isinstance(value, dict) else [(f"{above}{key}", str(value))]
    return found
