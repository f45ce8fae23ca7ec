"""Draw texts of the library for a reader's test.

    python -m tests.readers --seed 7             120 texts, numbered, without the code around them
    python -m tests.readers --seed 7 --sources   the same texts with file and line, to check explanations

A reader who has not seen the code explains each text in one sentence. An explanation is right if it agrees with the
code at the first reading. The project asks for 95 % with two readers and two fresh seeds.
"""

from __future__ import annotations

import argparse
import ast
import io
import random
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("tessera", "tessera_compat")
SHARES = {"docstring": 50, "comment": 35, "message": 35}  # of 120 texts
LEAST_WORDS = 4  # shorter texts explain nothing


@dataclass(frozen=True)
class Text:
    kind: str
    text: str
    where: str  # file and line
    name: str  # of the classes and the function around it, which a reader would see as well


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the docstrings, comments and error messages of a file."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    place = str(path.relative_to(ROOT))
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]

    def around(line: int) -> str:
        inside = [scope for scope in scopes if scope.lineno <= line <= (scope.end_lineno or 0)]
        return ".".join(scope.name for scope in sorted(inside, key=lambda scope: scope.lineno)) or path.stem

    for scope in scopes:
        if (text := ast.get_docstring(scope)) is not None:
            yield Text("docstring", text, f"{place}:{scope.lineno}", around(scope.lineno))
    for node in ast.walk(tree):
        raised = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Error") and node.args
        if isinstance(node, ast.Call) and raised and isinstance(node.args[0], ast.Constant | ast.JoinedStr):
            others = (
                f"  {key.arg}: {ast.unparse(key.value)}"
                for key in node.keywords
                if key.arg in ("where", "allowed", "fix")
            )
            text = ast.unparse(node.args[0]) + "".join(others)
            yield Text("message", text, f"{place}:{node.lineno}", around(node.lineno))
    for number, text in comments(source):
        yield Text("comment", text, f"{place}:{number}", around(number))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment, with the line of code that it stands at."""
    code = source.splitlines()
    lines: dict[int, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "#!", "# ---")):
            lines[token.start[0]] = token.string.lstrip("# ").partition("  # noqa")[0]
    for number, line in lines.items():
        before = code[number - 1].partition("#")[0].strip()
        if before:
            yield number, f"{line}  (at: {before})"
        elif number - 1 not in lines or code[number - 2].partition("#")[0].strip():
            end = number
            while end + 1 in lines and not code[end].partition("#")[0].strip():
                end += 1
            following = code[end].strip() if end < len(code) else ""
            yield number, f"{' '.join(lines[n] for n in range(number, end + 1))}  (above: {following})"


def draw(seed: int) -> list[Text]:
    """Return 120 texts, drawn by the seed from all files."""
    paths = sorted(
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "examples" not in path.parts
    )
    texts = [text for path in paths for text in texts_of(path) if len(text.text.split()) >= LEAST_WORDS]
    chance = random.Random(seed)
    drawn = [
        text for kind, count in SHARES.items() for text in chance.sample([t for t in texts if t.kind == kind], count)
    ]
    chance.shuffle(drawn)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--sources", action="store_true")
    options = parser.parse_args()
    for number, text in enumerate(draw(options.seed), start=1):
        print(f"{number}. [{text.kind} of {text.name}] {text.text}")
        if options.sources:
            print(f"    {text.where}")


if __name__ == "__main__":
    main()
