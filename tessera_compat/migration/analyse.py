"""Analyse the code of a folder by the rules, without running it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import first_line
from tessera.runtime.progress import WorkProgress
from tessera_compat.migration.fix import FixedFile, fix
from tessera_compat.migration.names import Program, Resolver, parse
from tessera_compat.migration.rules import Kind, RuleTable, Work, rule_table
from tessera_compat.migration.scan import Match, Scanned, Scanner
from tessera_compat.migration.sources import SourceFile, Unread, read_sources

_OF_A_CLASS = (".__init__", ".forward")  # methods that run when a class or a module is called
_TOO_DEEP = "nested too deeply"
_CUDA_FILE = "a CUDA source: write the operation in torch, or as an operator in Ascend C"


@dataclass(frozen=True)
class MigrationFinding:
    """Store a place in the code, the operation that it uses, and the replacement."""

    file: str
    start: int
    end: int
    operation: str
    kind: Kind
    work: Work
    tip: str
    source: str = ""


@dataclass(frozen=True)
class Analysis:
    """Store the findings of an analysis, and the files that --fix writes."""

    root: Path
    files: list[SourceFile]
    findings: list[MigrationFinding]
    unread: list[Unread]
    callers: list[MigrationFinding]  # calls of functions of the folder that use something unsupported
    fixed: list[FixedFile]

    @property
    def code_lines(self) -> int:
        return sum(len(file.lines()) for file in self.files)

    def count(self, work: Work) -> int:
        return sum(finding.work == work for finding in self.findings)

    @property
    def by_hand(self) -> int:
        """Return the number of places that --fix does not rewrite and that have to change."""
        return self.count("line") + self.count("code")

    def estimate(self) -> list[str]:
        """Return the remaining work as lines of text."""
        files = len(by_file(finding for finding in self.findings if finding.work in ("line", "code")))
        size = f"{counted(len(self.files), 'file')}, {counted(self.code_lines, 'line')}"
        return [
            f"{size}: {counted(len(self.findings), 'place')}",
            f"  rewritten by --fix      {self.count('fix')}",
            f"  a changed line each     {self.count('line')}",
            f"  other code              {self.count('code')}",
            f"  advice, works as it is  {self.count('none')}",
            f"{counted(self.by_hand, 'place')} in {counted(files, 'file')} left after --fix",
        ]


def analyse(root: Path, rules: RuleTable | None = None) -> Analysis:
    """Analyse a folder or a file. Files that cannot be read or parsed are listed, and the others are analysed."""
    rules = rules or rule_table()
    files, unread = read_sources(root)
    programs: list[Program] = []
    findings: list[MigrationFinding] = []
    with WorkProgress("parsing", len(files), "files") as progress:
        for file in files:
            progress.count()
            findings += _shell_findings(file, rules)
            if file.kind == "kernel":
                findings.append(MigrationFinding(file.name, 1, 1, file.path.suffix, "source", "code", _CUDA_FILE))
            elif file.kind != "shell":
                programs += _parsed(file, root if root.is_dir() else root.parent, unread)
    resolver = Resolver(programs)
    scanned: list[Scanned] = []
    fixed: list[FixedFile] = []
    with WorkProgress("analysing", len(programs), "files") as progress:
        for program in programs:
            progress.count()
            try:
                result = Scanner(program, resolver, rules).run()
            except RecursionError:
                unread.append(Unread(program.file.name, _TOO_DEEP))
                continue
            scanned.append(result)
            by_hand = frozenset(range(len(result.matches)))
            if program.file.kind == "python":
                fixed.append(fix(result, resolver))
                by_hand = fixed[-1].by_hand
            pairs = enumerate(result.matches)
            findings += [_finding(program, match, number in by_hand) for number, match in pairs]
    findings.sort(key=lambda finding: (finding.file, finding.start))
    return Analysis(root, files, findings, unread, _callers(scanned), fixed)


def _parsed(file: SourceFile, root: Path, unread: list[Unread]) -> list[Program]:
    """Parse a file. If that fails, add the reason to `unread`."""
    try:
        return [parse(file, root)]
    except SyntaxError as error:
        where, line = file.position(error.lineno or 1)
        unread.append(Unread(where, f"does not parse: {_reason(error)}", line))
    except (ValueError, RecursionError, MemoryError) as error:
        unread.append(Unread(file.name, f"does not parse: {first_line(error) if str(error) else _TOO_DEEP}"))
    return []


def _reason(error: SyntaxError) -> str:
    text = error.msg or "invalid syntax"
    is_python_2 = "print" in text or "exec" in text or "multiple exception types" in text
    return f"{text} (Python 2?)" if is_python_2 else text


def _finding(program: Program, match: Match, by_hand: bool) -> MigrationFinding:
    file, start = program.file.position(match.start)
    rule = match.rule
    end = start + match.end - match.start
    work: Work = "line" if rule.work == "fix" and by_hand else rule.work
    return MigrationFinding(file, start, end, match.operation, rule.kind, work, rule.tip, rule.source)


def _shell_findings(file: SourceFile, rules: RuleTable) -> list[MigrationFinding]:
    return [
        MigrationFinding(*cell_and_line, cell_and_line[1], operation, rule.kind, rule.work, rule.tip, rule.source)
        for number, line in file.commands
        for cell_and_line in [file.position(number)]
        for operation, rule in rules.by_shell_line(line)
    ]


def _callers(scanned: Iterable[Scanned]) -> list[MigrationFinding]:
    """Return the calls of functions that use something unsupported, directly or through other functions."""
    scanned = list(scanned)
    modules = {name for result in scanned for name in result.program.modules}
    calls: dict[
        str, list[tuple[str, str, int]]
    ] = {}  # name of a function or class -> (caller, file, line) of its calls
    reasons: dict[str, str] = {}  # function -> the unsupported operation that it uses
    for result in scanned:
        for caller, names, line in result.calls:
            file, number = result.program.file.position(line)
            for name in names:
                calls.setdefault(name, []).append((caller, file, number))
        for match in result.matches:
            if match.rule.kind == "unsupported" or (match.rule.kind == "library" and match.rule.work == "code"):
                reasons.setdefault(result.inside[match.node], match.operation)
    waiting = [name for name in reasons if name not in modules]
    findings: dict[tuple[str, int, str], MigrationFinding] = {}
    while waiting:
        function = waiting.pop()
        operation = reasons[function]
        for name in (function, *(function.removesuffix(end) for end in _OF_A_CLASS if function.endswith(end))):
            for caller, file, number in calls.get(name, ()):
                if caller == function:
                    continue
                row = MigrationFinding(file, number, number, name, "unsupported", "none", f"uses {operation}")
                findings.setdefault((file, number, name), row)
                if caller not in modules and caller not in reasons:
                    reasons[caller] = operation
                    waiting.append(caller)
    return sorted(findings.values(), key=lambda finding: (finding.file, finding.start, finding.operation))


def by_file(findings: Iterable[MigrationFinding]) -> Counter[str]:
    return Counter(re.sub(r"#cell-\d+\Z", "", finding.file) for finding in findings)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: 1 file, 2 files."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
