"""Write docs/reference/error-codes.md from the errors that the code raises: python -m tests.error_codes"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.error_cures import CAUSES, CURES
from tests.syntax import FUNCTIONS, all_nodes

ROOT = Path(__file__).parents[1]
PACKAGES = ("tessera", "tessera_compat")
PAGE = ROOT / "docs" / "reference" / "error-codes.md"
SUBJECTS = {
    "recipe": "Recipes and options",
    "environment": "The environment: packages, variables, files of the machine",
    "device": "Devices",
    "model": "Models",
    "tokenizer": "Tokenizers and chat templates",
    "data": "Data sets and samples",
    "media": "Images, videos and sound",
    "weights": "Weights and their files",
    "adapter": "Adapters",
    "checkpoint": "Checkpoints",
    "layout": "Parallel layouts",
    "memory": "Memory",
    "run": "Runs and run folders",
    "task": "Tasks and losses",
    "generation": "Generation of text, images and videos",
    "evaluation": "Evaluation",
    "output": "Files and folders that a command writes",
    "hub": "Hubs: downloads and uploads",
    "parity": "Recordings and their comparison",
    "framework": "Training on MindSpore",
    "job": "Jobs of MindSpeed-MM",
    "megatron": "Megatron's Python surface and files",
}
LISTED = "use a value that the message lists"
CODE = re.compile(rf"({'|'.join(SUBJECTS)})\.[a-z0-9]+(-[a-z0-9]+){{0,5}}")
HEAD = """# Error codes

The last line of an error is its code. A code stays the same when the words change: search for it here, or match it in
scripts (`error.code` in Python). Words in `<angle brackets>` are values of your run, `…` is a longer text. Exit codes
and frequent errors: [errors](errors.md). This page is generated from the source: `python -m tests.error_codes`.
"""


@dataclass(frozen=True)
class Raised:
    """One construction of a `TesseraError` in the source."""

    where: str  # file and line
    code: str | None  # None: the call has no code that can be listed; "": its code comes from a listed error or call
    cause: str
    cure: str


def error_classes(classes: Iterable[ast.ClassDef]) -> set[str]:
    """Return the names of `TesseraError` and of all its subclasses."""
    bases = [(node.name, {last_name(base) for base in node.bases}) for node in classes]
    names = {"TesseraError"}
    while more := {name for name, parents in bases if parents & names} - names:
        names |= more
    return names


def last_name(node: ast.expr) -> str:
    """Return `c` for `c` and for `a.b.c`, and nothing for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def own_codes(classes: Iterable[ast.ClassDef], names: set[str]) -> set[str]:
    """Return the subclasses whose `__init__` sets the code, so that their calls need none."""
    return {c.name for c in classes if c.name in names - {"TesseraError"} and "code=" in ast.unparse(c)}


def template(node: ast.expr | None, scope: ast.AST) -> str:
    """Return the text of an expression, with a placeholder for each value."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(template(value, scope) for value in node.values)
    if isinstance(node, ast.FormattedValue):
        if isinstance(node.value, ast.Name):
            return f"<{node.value.id.strip('_')}>"
        if isinstance(node.value, ast.Attribute):
            return f"<{node.value.attr.strip('_')}>"
        return "…"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left, scope) + template(node.right, scope)
    if isinstance(node, ast.IfExp):
        return template(node.body if not _is_none(node.body) else node.orelse, scope)
    if isinstance(node, ast.Name):
        values = [
            assign.value
            for assign in ast.walk(scope)
            if isinstance(assign, ast.Assign)
            and ast.unparse(assign.targets[0]) == node.id
            and assign.lineno <= node.lineno
            and assign.value is not node
        ]
        value = max(values, key=lambda value: value.lineno, default=None)
        if value and not any(isinstance(inner, ast.Name) and inner.id == node.id for inner in ast.walk(value)):
            return template(value, scope)
    return "" if node is None else "…"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def codes_of(value: ast.expr | None, scope: ast.AST) -> list[str | None]:
    """Return the codes of an argument `code=`: a text, or one text or the other.

    The code of another error, and a parameter that only keywords set, are listed elsewhere: they are "". All else,
    such as a variable, is None: its codes would not be listed.
    """
    if isinstance(value, ast.Constant):
        return [value.value]
    if isinstance(value, ast.IfExp):
        return codes_of(value.body, scope) + codes_of(value.orelse, scope)
    if isinstance(value, ast.Attribute) and value.attr == "code":
        return [""]
    listed: list[ast.arg] = []
    if isinstance(scope, ast.FunctionDef):  # the calls of `fail` are listed with their positional codes
        listed = scope.args.args if scope.name == "fail" else scope.args.kwonlyargs
    return [""] if isinstance(value, ast.Name) and value.id in [one.arg for one in listed] else [None]


def code_texts(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the texts of a tree that can only be codes: names of files, modules and recipe keys have no hyphen."""
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts if "-" in text and CODE.fullmatch(text)}


def raised(nodes: list[ast.AST], where: str, names: set[str], with_own_code: set[str]) -> Iterator[Raised]:
    """Yield the errors that a file constructs, from all nodes of its tree, the root first."""
    scopes = [node for node in nodes if isinstance(node, FUNCTIONS)]
    subclasses = names - {"TesseraError"}
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name in subclasses]
    initializers = {
        id(node): kind.name
        for kind in classes
        for node in ast.walk(kind)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"
    }
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = initializers.get(id(node), last_name(node.func))
        if name == "fail" and len(node.args) == 2:  # of a bad record: fail(code, reason)
            code = str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else ""
            yield Raised(f"{where}:{node.lineno}", code, template(node.args[1], nodes[0]), "")
        keywords = {key.arg: key.value for key in node.keywords}
        if name not in names and "code" not in keywords:
            continue
        around = [scope for scope in scopes if scope.lineno <= node.lineno <= (scope.end_lineno or 0)]
        scope: ast.AST = max(around, key=lambda scope: scope.lineno) if around else nodes[0]
        codes = codes_of(keywords.get("code"), scope)
        if name not in names:  # a function that makes the error
            codes = [code for code in codes if isinstance(code, str) and CODE.fullmatch(code)]
        elif "code" not in keywords and (name in with_own_code or None in keywords):
            codes = [""]
        cause = template(node.args[0] if node.args else keywords.get("what"), scope)
        cure = template(keywords.get("fix"), scope)
        if not cure.strip("… ") and {"allowed", "nearest"} & keywords.keys():
            cure = LISTED
        yield from (Raised(f"{where}:{node.lineno}", code, cause, cure) for code in codes)


@cache
def parsed() -> dict[Path, list[ast.AST]]:
    """Return the nodes of every file of the library and the second package, parsed once per process."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {path: all_nodes(path.read_text(encoding="utf-8")) for path in paths}


@cache
def all_raised() -> tuple[Raised, ...]:
    """Return every error that the two packages construct."""
    files = parsed()
    classes = [node for nodes in files.values() for node in nodes if isinstance(node, ast.ClassDef)]
    names = error_classes(classes)
    with_own_code = own_codes(classes, names)
    return tuple(
        error
        for path, nodes in files.items()
        for error in raised(nodes, str(path.relative_to(ROOT)), names, with_own_code)
    )


def page() -> str:
    """Return the text of the page: a table for each subject, a row for each code."""
    rows: dict[str, list[Raised]] = {}
    for error in all_raised():
        if error.code:
            rows.setdefault(error.code, []).append(error)
    sections = [HEAD]
    for subject, title in SUBJECTS.items():
        lines = [
            f"| `{code}` | {CAUSES.get(code) or _cell(rows[code], 'cause')} | {_cure(code, rows[code])} |"
            for code in sorted(rows)
            if code.startswith(f"{subject}.")
        ]
        if lines:
            sections.append("\n".join([f"\n## {title}\n", "| code | cause | cure |", "|---|---|---|", *lines, ""]))
    return "".join(sections)


def _cure(code: str, errors: list[Raised]) -> str:
    cure = _cell(errors, "cure")
    return CURES.get(code, cure) if cure in ("", LISTED) else cure


def _cell(errors: list[Raised], field: str) -> str:
    texts = dict.fromkeys(" ".join(str(getattr(error, field)).split()) for error in errors)
    lines = [text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*") for text in texts if text.strip("… ")]
    return "<br>".join(lines[:3])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
