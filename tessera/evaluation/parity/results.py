"""Print a comparison, and write it as an HTML page, as JSON and as a table with the column names of msprobe."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.evaluation.parity.findings import PHASES, Comparison, ParityFinding
from tessera.runtime import html
from tessera.runtime.files import finite_json, replace_file

AROUND = 5  # findings before and after the first difference that are printed
_MOST_ROWS = 4000  # limit of rows of the table on the page
_STATISTICS = ("max", "min", "mean", "norm")
_COSINE, _ABSOLUTE, _RELATIVE = 0.9999, 0.001, 0.001  # limits of msprobe, for its column "Accuracy Reached or Not"
_MSPROBE = (
    *("NPU Name", "Bench Name", "NPU Dtype", "Bench Dtype", "NPU Tensor Shape", "Bench Tensor Shape"),
    *("NPU Requires_grad", "Bench Requires_grad"),
    *("Cosine", "EucDist", "MaxAbsErr", "MaxRelativeErr"),
    *("One Thousandth Err Ratio", "Five Thousandths Err Ratio"),
    *(f"{side} {name}" for side in ("NPU", "Bench") for name in ("max", "min", "mean", "l2norm")),
    *("Requires_grad Consistent", "Result", "Accuracy Reached or Not", "Err_message", "NPU_Stack_Info", "Data_name"),
)


def lines(comparison: Comparison) -> list[str]:
    """Return the lines for the terminal: the first difference and the findings around it."""
    compared, first = len(comparison.findings), comparison.first
    # labels of recordings are untrusted: remove line ends
    a, b = (" ".join(label.split()) for label in comparison.labels)
    out = [f"A: {a}", f"B: {b}", f"compared: {compared} tensors and numbers; {len(comparison.different)} differ"]
    if comparison.skipped:
        out.append(f"not comparable: {len(comparison.skipped)}, such as {comparison.skipped[0]}")
    if comparison.not_finite:
        example = comparison.not_finite[0]
        out.append(f"NaN or infinite in both recordings: {len(comparison.not_finite)}, the first: {example.line}")
    if first is None:
        return [*out, "no difference beyond what rounding explains", *_settings(comparison)]
    out.append(f"first difference: {first.line}")
    if comparison.note:
        out.append(f"  {comparison.note}")
    at = comparison.findings.index(first)
    out.append("in the order of execution:")
    for number in range(max(0, at - AROUND), min(compared, at + AROUND + 1)):
        finding = comparison.findings[number]
        mark = ">>" if number == at else " x" if finding.differs else "  "
        out.append(f" {mark} {_phase(finding):<16} {finding.name:<48} {_size(finding)}")
    return [*out, *_settings(comparison)]


def _settings(comparison: Comparison) -> list[str]:
    count = len(comparison.settings)
    return [f"numbers of modules that differ: {count}", *comparison.settings[:AROUND]] if count else []


def _phase(finding: ParityFinding) -> str:
    return finding.phase.replace("_", " ")


def _size(finding: ParityFinding) -> str:
    apart = finding.difference
    if apart is None:
        return finding.reason[:70] or "the same"
    return f"max {apart.max_abs:.2e} of {apart.limit_max:.2e}, rms {apart.rms:.2e} of {apart.limit_rms:.2e}"


def write_results(comparison: Comparison, folder: Path) -> list[Path]:
    """Write `parity.html`, `parity.json` and `parity.csv` into a folder."""
    texts = {"html": _page(comparison), "json": json.dumps(as_json(comparison), indent=1), "csv": _table(comparison)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for kind, text in texts.items():
            replace_file(folder / f"parity.{kind}", text.encode())
    except OSError as error:
        raise TesseraError(
            f"the results cannot be written: {error.strerror}",
            where=str(folder),
            fix="name another folder with --out",
            code="parity.results-not-writable",
        ) from None
    return [folder / f"parity.{kind}" for kind in texts]


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as plain data. Numbers that are not finite are text."""
    first = comparison.first
    return {
        "a": comparison.labels[0],
        "b": comparison.labels[1],
        "same": first is None,
        "first": None if first is None else _row(first),
        "note": comparison.note,
        "findings": [_row(finding) for finding in comparison.findings],
        "skipped": comparison.skipped,
        "settings": comparison.settings,
    }


def _row(finding: ParityFinding) -> dict[str, Any]:
    apart = finding.difference
    numbers = {} if apart is None else {k: v for k, v in vars(apart).items() if k != "positions"}
    row: dict[str, Any] = finite_json(
        {
            "step": finding.step,
            "kind": finding.phase,
            "name": finding.name,
            "rows": finding.rows,
            "differs": finding.differs,
            "reason": finding.reason,
            "not_finite_on_both_sides": finding.not_finite,
            "samples": list(finding.samples),
            "a": finding.sides[0],
            "b": finding.sides[1],
            **numbers,
        }
    )
    return row


def _table(comparison: Comparison) -> str:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_MSPROBE)
    for finding in comparison.findings:
        if finding.sides[0]:
            writer.writerow([_safe(cell) if isinstance(cell, str) else cell for cell in _cells(finding)])
    return text.getvalue()


def _cells(finding: ParityFinding) -> list[Any]:
    apart, shape = finding.difference, str(list(finding.shape))
    name = f"{finding.phase}.{finding.name}" + (f".rows-{finding.rows}" if finding.rows else "")
    sides = [[side.get(key, "N/A") for key in _STATISTICS] for side in finding.sides]
    if apart is None:
        errors: list[Any] = ["N/A"] * 6
        reached = not finding.differs
    else:
        euclid = apart.rms * math.sqrt(max(1, math.prod(finding.shape)))
        errors = [apart.cosine, euclid, apart.max_abs, apart.max_rel, 1 - apart.beyond_01, 1 - apart.beyond_05]
        reached = apart.cosine >= _COSINE and (apart.max_abs <= _ABSOLUTE or apart.max_rel <= _RELATIVE)
    consistent = finding.requires_grad[0] == finding.requires_grad[1]
    return [
        *(name, name, *finding.dtypes, shape, shape, *finding.requires_grad, *errors, *sides[0], *sides[1]),
        *(consistent, "error" if finding.differs else "pass", "Yes" if reached else "No"),
        *(finding.reason, "None", name),
    ]


def _safe(text: str) -> str:
    """Return text that a spreadsheet does not interpret as a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text


def _page(comparison: Comparison) -> str:
    first, a, b = comparison.first, *comparison.labels
    verdict = "no difference beyond rounding" if first is None else f"first difference: {first.what}"
    body = [f"<h1>{html.escape(verdict)}</h1>", f"<p>A: {html.escape(a)}<br>B: {html.escape(b)}</p>"]
    if first is not None:
        body.append(f"<p>{html.escape(first.line)}</p><p class='soft'>{html.escape(comparison.note)}</p>")
    findings = comparison.findings
    body.append(
        html.facts(
            [
                ("compared", f"{len(findings):,}"),
                ("different", f"{len(comparison.different):,}"),
                ("not comparable", f"{len(comparison.skipped):,}"),
                ("NaN or infinite in both recordings", f"{len(comparison.not_finite):,}"),
            ]
        )
    )
    charts = [_chart(findings, phase) for phase in ("output", "output_gradient", "gradient", "update")]
    body.append(f'<div class="charts">{"".join(charts)}</div>')
    chosen = _chosen(findings)
    head = ["step", "kind", "name", "rows", "max error", "allowed", "rms error", "allowed", "cosine",
            "> 0.1 %", "> 0.5 %", "what differs"]  # fmt: skip
    marked = [number for number, finding in enumerate(chosen) if finding.differs]
    body.append(html.section("In the order of execution", html.table(head, map(_markup, chosen), chosen=marked)))
    if len(chosen) < len(findings):
        body.append(f"<p class='soft'>{len(findings) - len(chosen):,} more rows are in parity.json</p>")
    if comparison.skipped:
        rows = [[html.escape(text)] for text in comparison.skipped[:200]]
        body.append(html.section("Not comparable", html.table(["tensor and shapes"], rows, text=True)))
    if comparison.settings:
        rows = [[html.escape(text)] for text in comparison.settings[:200]]
        body.append(
            html.section("Numbers of modules that differ", html.table(["module, number, A and B"], rows, text=True))
        )
    return html.page("Parity", body, ".chosen td{color:var(--bad)}")


def _chosen(findings: Sequence[ParityFinding]) -> list[ParityFinding]:
    """Return the findings for the table: all, or those around the first difference."""
    at = next((number for number, finding in enumerate(findings) if finding.differs), 0)
    first = max(0, min(at - _MOST_ROWS // 4, len(findings) - _MOST_ROWS))
    return list(findings[first : first + _MOST_ROWS])


def _chart(findings: Sequence[ParityFinding], phase: str) -> str:
    assert phase in PHASES
    points = [
        (float(number), max(finding.difference.excess, 1e-6))
        for number, finding in enumerate(finding for finding in findings if finding.phase == phase)
        if finding.difference is not None
    ]
    title = f"{phase.replace('_', ' ')}: difference as a multiple of what rounding explains"
    return html.line_chart(title, [html.Series("difference", points, dots=True)], log_scale=True)


def _markup(finding: ParityFinding) -> list[str]:
    apart = finding.difference
    numbers = [""] * 7
    if apart is not None:
        errors = (apart.max_abs, apart.limit_max, apart.rms, apart.limit_rms)
        shares = (f"{apart.cosine:.6f}", f"{apart.beyond_01:.2%}", f"{apart.beyond_05:.2%}")
        numbers = [*(f"{value:.2e}" for value in errors), *shares]
    samples = f" ({', '.join(finding.samples[:3])})" if finding.samples else ""
    texts = [str(finding.step), _phase(finding), finding.name, finding.rows]
    return [html.escape(text) for text in (*texts, *numbers, (finding.reason + samples)[:160])]
