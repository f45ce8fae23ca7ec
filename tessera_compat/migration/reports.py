"""Write an analysis as text, JSON, HTML, and as the CSV files of Ascend's PyTorch Analyse."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tessera.errors import TesseraError, first_line
from tessera.runtime.html import escape, facts, page, section, table
from tessera_compat.migration.analyse import Analysis, MigrationFinding, by_file
from tessera_compat.migration.rules import Kind

COLUMNS = ("File", "Start Line", "End Line", "OP", "Tips")
TITLES: Mapping[Kind, str] = {
    "library": "Libraries",
    "source": "Custom CUDA sources",
    "unsupported": "Unsupported operations",
    "device": "Bound to CUDA devices",
    "precision": "Other precision",
    "dynamic": "Dynamic shapes",
    "performance": "Performance",
    "affinity": "Fused operators",
    "unknown": "Not decidable",
}
# File names of Ascend's analyser. It has no file for static findings of dynamic shapes.
_FILES: Mapping[Kind, str] = {
    "unsupported": "unsupported_api.csv",
    "unknown": "unknown_api.csv",
    "device": "cuda_op_list.csv",
    "precision": "api_precision_advice.csv",
    "performance": "api_performance_advice.csv",
    "source": "cuda_op.csv",
    "affinity": "affinity_api_call.csv",
    "dynamic": "dynamic_shape.csv",
}
_REPLACED, _UNSUPPORTED, _CALLERS = (
    "migration_needed_op.csv", "framework_unsupported_op.csv", "full_unsupported_results.csv"
)  # fmt: skip
_MOST_IN_TERMINAL = 200


def text_lines(analysis: Analysis, most: int | None = None) -> list[str]:
    """Return the report as lines of text: findings by kind, files that were not read, and what is left to do."""
    lines: list[str] = []
    for kind, title in TITLES.items():
        findings = [finding for finding in analysis.findings if finding.kind == kind]
        if findings:
            lines.append(f"{title}: {len(findings)}")
            lines += [f"  {_line(finding)}" for finding in findings[:most]]
            if most is not None and len(findings) > most:
                lines.append(f"  ... and {len(findings) - most} more: -o DIR writes all")
    if analysis.unread:
        lines.append(f"Not analysed: {len(analysis.unread)}")
        lines += [f"  {file.name}{f':{file.line}' if file.line else ''}: {file.reason}" for file in analysis.unread]
    if counts := by_file(analysis.findings).most_common(10):
        lines.append("Files with the most places:")
        lines += [f"  {count:5d}  {name}" for name, count in counts]
    printable = ("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line) for line in lines)
    return [*printable, *analysis.estimate()]


def terminal_lines(analysis: Analysis) -> list[str]:
    return text_lines(analysis, _MOST_IN_TERMINAL)


def _line(finding: MigrationFinding) -> str:
    fixed = "  [--fix]" if finding.work == "fix" else ""
    return f"{finding.file}:{finding.start}: {finding.operation}: {finding.tip}{fixed}"


def to_json(analysis: Analysis) -> str:
    """Return the analysis as JSON."""
    data = {
        "path": str(analysis.root),
        "files": len(analysis.files),
        "lines": analysis.code_lines,
        "places": {work: analysis.count(work) for work in ("fix", "line", "code", "none")},
        "findings": [asdict(finding) for finding in analysis.findings],
        "callers": [asdict(finding) for finding in analysis.callers],
        "not_analysed": [asdict(file) for file in analysis.unread],
    }
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def to_html(analysis: Analysis) -> str:
    """Return the analysis as an HTML page without external resources."""
    body = [f"<main><h1>{escape(analysis.root.name or str(analysis.root))}</h1>"]
    body.append(facts([
        ("files", str(len(analysis.files))), ("lines", f"{analysis.code_lines:,}"),
        ("places", str(len(analysis.findings))), ("rewritten by --fix", str(analysis.count("fix"))),
        ("a changed line each", str(analysis.count("line"))), ("other code", str(analysis.count("code"))),
        ("not analysed", str(len(analysis.unread))),
    ]))  # fmt: skip
    for kind, title in TITLES.items():
        rows = [_cells(finding) for finding in analysis.findings if finding.kind == kind]
        if rows:
            head = ("file", "lines", "operation", "what to write", "rule from")
            body.append(section(f"{title} ({len(rows)})", table(head, rows, text=True)))
    if analysis.callers:
        rows = [_cells(finding) for finding in analysis.callers]
        heading = f"Calls that lead to them ({len(rows)})"
        body.append(section(heading, table(("file", "lines", "call", "why", ""), rows, text=True)))
    if analysis.unread:
        reasons = [[escape(f"{file.name}:{file.line}"), escape(file.reason)] for file in analysis.unread]
        body.append(section("Not analysed", table(("file", "reason"), reasons, text=True)))
    return page(f"Analysis of {analysis.root.name}", [*body, "</main>"])


def _cells(finding: MigrationFinding) -> list[str]:
    lines = str(finding.start) if finding.start == finding.end else f"{finding.start}-{finding.end}"
    return [escape(text) for text in (finding.file, lines, finding.operation, finding.tip, finding.source)]


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a CSV file. A cell that a spreadsheet would interpret as a formula gets an apostrophe in front."""
    target = io.StringIO()
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([f"'{cell}" if str(cell).startswith(("=", "+", "-", "@", "\t")) else cell for cell in row])
    return target.getvalue()


def csv_files(analysis: Analysis) -> dict[str, str]:
    """Return the CSV files by their names."""
    groups: dict[str, list[MigrationFinding]] = {name: [] for name in (*_FILES.values(), _REPLACED, _UNSUPPORTED)}
    for finding in analysis.findings:
        library = _UNSUPPORTED if finding.work == "code" else _REPLACED
        groups[library if finding.kind == "library" else _FILES[finding.kind]].append(finding)
    groups[_CALLERS] = analysis.callers
    return {
        name: csv_text(COLUMNS, ((row.file, row.start, row.end, row.operation, row.tip) for row in rows))
        for name, rows in groups.items()
    }


def write_reports(analysis: Analysis, folder: Path) -> list[str]:
    """Write all reports to a new folder. Return their names."""
    texts = {
        **csv_files(analysis),
        "pytorch_analysis.txt": "\n".join(text_lines(analysis)) + "\n",
        "analysis.json": to_json(analysis),
        "analysis.html": to_html(analysis),
    }
    with new_folder(folder, "--output") as stage:
        for name, text in texts.items():
            (stage.path / name).write_text(text, encoding="utf-8", errors="backslashreplace")
    return list(texts)


class new_folder:
    """Fill a folder under a temporary name, and rename it at the end. If the block fails, nothing is written."""

    def __init__(self, target: Path, option: str) -> None:
        self.target, self.option = target, option
        self.path = target

    def __enter__(self) -> new_folder:
        check_new(self.target, self.option)
        try:
            self.target.absolute().parent.mkdir(parents=True, exist_ok=True)
            self.path = Path(tempfile.mkdtemp(prefix=f".{self.target.name}.", dir=self.target.absolute().parent))
            self.path.chmod(0o755)
        except OSError as error:
            raise self._not_writable(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            try:
                os.rename(self.path, self.target)
                return
            except OSError as failure:
                error = failure
        shutil.rmtree(self.path, ignore_errors=True)
        if isinstance(error, OSError):
            raise self._not_writable(error) from None

    def _not_writable(self, error: OSError) -> TesseraError:
        return TesseraError(
            f"cannot write {self.target}: {first_line(error)}", where=self.option, code="output.not-writable"
        )


def check_new(folder: Path, option: str) -> None:
    """Raise if a folder to write exists."""
    if folder.exists() or folder.is_symlink():
        raise TesseraError(
            f"{folder} already exists", where=option, fix="name a folder that does not exist yet",
            code="output.already-exists",
        )  # fmt: skip
