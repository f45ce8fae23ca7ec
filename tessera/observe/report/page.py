"""Write `report.html` of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from tessera.errors import TesseraError
from tessera.observe.report.answers import STYLE, accuracy_by_group, answers_section, previews_section
from tessera.observe.report.charts import charts_of
from tessera.observe.report.history import RunSession
from tessera.observe.report.recorded import RecordedRun, read_run, smooth
from tessera.runtime import html
from tessera.runtime.files import check_regular, read_text, replacing

REPORT = "report.html"
_HOW = {
    "running": "running",
    "finished": "finished",
    "stopped": "stopped: a resume goes on",
    "failed": "failed",
    "killed": "killed: a resume goes on",
    "silent": "no new rows",
}
_STYLE = (
    STYLE
    + """
.how{font-weight:600}.how.failed,.how.killed{color:var(--bad)}.how.running,.how.finished{color:var(--good)}
.reason{border:1px solid var(--bad);border-radius:10px;padding:10px 14px;white-space:pre-wrap;overflow-wrap:anywhere}
"""
)


def report(run: str | Path, *, out: str | Path | None = None) -> Path:
    """Write the report of a run, and return its path: `RUN/report.html`, or `out`."""
    path = Path(run) / REPORT if out is None else Path(out)
    if path.is_dir():
        raise TesseraError(
            f"{path} is a folder, and a report is one file",
            where="--out",
            fix=f"name a file: {path / REPORT}",
            code="output.is-folder",
        )
    try:
        if out is None:
            return write_report(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_page(path, report_page(read_run(run)))
    except OSError as error:
        raise TesseraError(
            f"{path} cannot be written: {error.strerror}",
            where=str(run) if out is None else "--out",
            fix="name a file in another folder: --out report.html",
            code="output.not-writable",
        ) from None
    return path


def write_report(folder: str | Path) -> Path:
    """Write `RUN/report.html`. The run may still be running."""
    run = read_run(folder)
    path = run.folder / REPORT
    write_page(path, report_page(run))
    return path


def write_page(path: Path, page: str) -> None:
    """Write a page to a new file and rename it, so that no reader sees an incomplete page. Links are not followed."""
    if path.exists():
        check_regular(path)
    with replacing(path) as fresh:
        fresh.write_text(page, encoding="utf-8")


def report_page(run: RecordedRun) -> str:
    """Return the report of a run as HTML."""
    body = [
        f'<h1>{html.escape(run.name)}</h1><div class="soft">{html.escape(_subtitle(run))}</div>{state_of(run)}',
        html.facts(facts_of(run)),
        html.section("Training", f'<div class="charts">{"".join(charts_of(run))}</div>'),
        previews_section(run.folder),
        answers_section(run),
        _sessions(run.sessions),
        _settings(run.folder),
    ]
    return html.page(f"{run.name} · Tessera", body, _STYLE)


def _subtitle(run: RecordedRun) -> str:
    model, train = run.section("model"), run.section("train")
    origin = " ".join(str(model[key]) for key in ("family", "preset", "path") if model.get(key))
    length = f"{train['steps']} steps" if train.get("steps") is not None else f"{train.get('epochs')} epochs"
    return f"{origin} · {length} · global batch {train.get('global_batch')} · seed {train.get('seed')}"


def state_of(run: RecordedRun) -> str:
    """Return HTML with the state of a run, its start and hardware, and the reason of a failure."""
    if not run.sessions:
        return ""
    last = run.sessions[-1]
    when = f"started {last.began:%Y-%m-%d %H:%M} UTC" + (f" · {last.hardware}" if last.device else "")
    line = f'<p><span class="how {html.escape(last.how)}">{html.escape(_how(last))}</span> · {html.escape(when)}</p>'
    reason = f'<p class="reason">{html.escape(last.reason[:4000])}</p>' if last.reason else ""
    return line + reason


def _how(last: RunSession) -> str:
    if last.how == "silent":
        return f"no new rows since {last.last:%Y-%m-%d %H:%M} UTC"
    return _HOW.get(last.how, last.how)


def facts_of(run: RecordedRun) -> list[tuple[str, str]]:
    """Return the figures of a run: (name, value), such as ("median step", "521 ms")."""
    facts: list[tuple[str, str]] = []
    if run.sessions:
        facts += [("started", f"{run.sessions[0].began:%Y-%m-%d}")]
        facts += [("training time", duration(sum(session.seconds for session in run.sessions)))]
    if run.train_rows:
        facts.append(("steps", f"{run.train_rows[-1]['step']:,}"))
    if epochs := run.points("epoch"):
        facts.append(("epochs", f"{epochs[-1][1]:.3g}"))
    if losses := run.points("loss"):
        facts.append(("loss of the last step", f"{losses[-1][1]:.4f}"))
    if held_out := run.held_out("loss"):
        facts.append(("held-out loss", f"{held_out[-1][1]:.4f}"))
    for name in run.metric_names():
        if name in ("accuracy", "margin"):  # metrics of preference objectives
            # Smoothing drops values that are not finite. If no value is finite, show the last recorded value.
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
    for key, name, text in (("mfu", "MFU", "{:.1%}"), ("data_wait", "data wait", "{:.1%}")):
        if points := run.points(key):
            facts.append((name, text.format(statistics.median_low(y for _, y in points))))
    if memory := run.points("peak_memory_gib"):
        facts.append(("peak memory", f"{max(y for _, y in memory):.2f} GiB"))
    return facts


def duration(seconds: float) -> str:
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded} s"
    if rounded < 3600:
        return f"{rounded // 60} min {rounded % 60} s"
    return f"{rounded // 3600} h {rounded % 3600 // 60} min"


def _step_time(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def _sessions(sessions: Sequence[RunSession]) -> str:
    """Return a table of the last 50 sessions: time, steps, hardware and versions."""
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
    head = ("started (UTC)", "training time", "steps", "hardware", "versions", "end")
    return html.section("Sessions", html.table(head, rows))


def _settings(folder: Path) -> str:
    text = html.escape(read_text(folder / "config.yaml"))
    return html.section("Settings", f"<details><summary>the resolved recipe</summary><pre>{text}</pre></details>")
