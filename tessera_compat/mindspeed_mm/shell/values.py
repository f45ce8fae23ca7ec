"""Hold the variables of a launch script and expand its words: variables, defaults, arithmetic, quotes, arrays.

In a value, the unknown output of a program is a marker with the reason and the line. Only code that needs the value
raises an error: a date in the name of a log file is harmless.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.shell.syntax import end_of

MAX_VALUE = 1 << 20
MAX_ARITHMETIC = 2000
MAX_EXPANDED = 16 << 20  # total length of all values
_MARKER = re.compile("\x00([a-z])(\\d+)\x00")
_REASONS = {
    "c": "the output of a command, which is not run",
    "f": "a form of a variable that is not read",
    "i": "a condition that cannot be decided without running something",
    "r": "a random number or another value that the shell makes",
}
_BRACED = re.compile(r"(#?)([A-Za-z_]\w*|[@*#?$!]|\d+)(\[[^\]]*\])?(:?[-=+?])?(.*)", re.DOTALL)
_LITERAL = re.compile(r"[^'\"`$\\]+")
_NAMED = re.compile(r"\$([A-Za-z_]\w*|[@*#?$!\d])")
_MADE_BY_THE_SHELL = ("RANDOM", "SRANDOM", "SECONDS", "EPOCHSECONDS", "HOSTNAME", "PPID", "UID", "EUID")
_NUMBER_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
    ast.Div: lambda a, b: _quotient(a, b),
}
_COMPARISONS: Mapping[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def unknown(reason: str, line: int) -> str:
    """Return the marker of an unknown value. `reason` is a key of `_REASONS`."""
    return f"\x00{reason}{line}\x00"


def is_unknown(text: str) -> bool:
    return "\x00" in text


def refuse_unknown(text: str, what: str, path: str) -> None:
    """Raise if the text contains an unknown value."""
    marker = _MARKER.search(text)
    if marker:
        raise TesseraError(
            f"{what} depends on {_REASONS[marker[1]]}",
            where=f"{path}:{marker[2]}",
            fix="write the value in the script, or set the variable: NAME=VALUE tessera migrate JOB",
            code="job.script-unknown-value",
        )


class Values:
    """Store the variables of a script, and expand words. `output` evaluates command substitutions."""

    def __init__(self, variables: Mapping[str, str], path: str, output: Callable[[str, int], str]) -> None:
        self.variables: dict[str, str | list[str]] = dict(variables)
        self.path, self.output = path, output
        self.unset: dict[str, int] = {}  # unset variables that were read -> line
        self.letters = 0
        self.absent = ""  # path whose file test failed in the last `[ ]`; empty: none failed

    def set(self, name: str, value: str | list[str], line: int) -> None:
        """Set a variable. Raise if the values of a script become too long."""
        self.letters += len(value) if isinstance(value, str) else sum(map(len, value))
        if self.letters > MAX_EXPANDED:
            raise TesseraError(
                "the values of the script's variables are too long",
                where=f"{self.path}:{line}",
                code="job.script-too-large",
            )
        self.variables[name] = value

    def get(self, name: str, line: int) -> str | list[str] | None:
        """Return the value of a variable, a list for an array; None if it is not set."""
        if name in "@*":
            return []  # a script is read as if it had no arguments
        if name == "#":
            return "0"
        if name in self.variables:
            return self.variables[name]
        if name in ("BASH_SOURCE", "0"):
            return self.path
        return unknown("r", line) if name in ("?", "$", "!", *_MADE_BY_THE_SHELL) else None

    # ------------------------------------------------------------------------------------------ words

    def text(self, raw: str, line: int) -> str:
        """Expand a word to one string, as in an assignment."""
        return " ".join(self._fields(raw, line, split=False))

    def words(self, raws: Sequence[str], line: int) -> list[str]:
        """Expand words. Unquoted values are split at blanks."""
        fields = [field for raw in raws for field in self._fields(raw, line, split=True)]
        if sum(map(len, fields)) > MAX_VALUE:
            raise TesseraError(
                "a command is too long for a launch script", where=f"{self.path}:{line}", code="job.script-too-large"
            )
        return fields

    def _fields(self, raw: str, line: int, *, split: bool) -> list[str]:
        fields: list[list[str]] = []  # each field as a list of parts
        open_field, size = False, 0
        for piece, divides in self._pieces(raw, line):
            text = piece if isinstance(piece, str) and divides and split else ""
            words = piece if isinstance(piece, list) else text.split() if divides and split else [piece]
            open_field = open_field and not text[:1].isspace()
            for number, word in enumerate(words):
                if number or not open_field:
                    fields.append([])
                fields[-1].append(word)
                size += len(word)
            open_field = open_field or bool(words)
            open_field = open_field and not text[-1:].isspace()
            if size > MAX_VALUE:
                raise TesseraError(
                    "an expanded word is too long", where=f"{self.path}:{line}", code="job.script-too-large"
                )
        return ["".join(parts) for parts in fields]

    def _pieces(self, raw: str, line: int) -> Iterator[tuple[str | list[str], bool]]:
        """Yield the expanded parts of a word, and whether blanks in a part split the word."""
        where, at = f"{self.path}:{line}", 0
        if raw.startswith("~") and raw[1:2] in ("", "/"):
            raw = "${HOME}" + raw[1:]
        while at < len(raw):
            if literal := _LITERAL.match(raw, at):
                yield literal[0], False
                at = literal.end()
                continue
            letter, end = raw[at], end_of(raw, at, where)
            if letter == "\\":
                yield ("" if raw[at + 1 : end] == "\n" else raw[at + 1 : end]), False
            elif letter == "'":
                yield raw[at + 1 : end - 1], False
            elif raw.startswith("$'", at):
                yield raw[at + 2 : end - 1], False
            elif letter == '"':
                inner = raw[at + 1 : end - 1]
                arrays = inner in ("$@", "${@}") or re.fullmatch(r"\$\{[A-Za-z_]\w*\[@\]\}", inner)
                value = self._value(inner, line) if arrays else self._quoted(inner, line)
                if value or not arrays:
                    yield value, False
            else:
                name = _NAMED.match(raw, at)
                end = name.end() if name else end
                value = self._value(raw[at:end], line)
                yield (value if isinstance(value, str) else " ".join(value)), True
            at = end

    def _quoted(self, text: str, line: int) -> str:
        """Expand a text between double quotes, or the default of a variable."""
        parts: list[str] = []
        at = 0
        while at < len(text):
            plain = re.compile(r"[^\\$`]+").match(text, at)
            if plain:
                parts.append(plain[0])
                at = plain.end()
            elif text[at] == "\\":
                following = text[at + 1 : at + 2]
                parts.append("" if following == "\n" else following if following in '"\\$`' else "\\" + following)
                at += 2
            else:
                name = _NAMED.match(text, at)
                end = name.end() if name else end_of(text, at, f"{self.path}:{line}")
                value = self._value(text[at:end], line)
                parts.append(value if isinstance(value, str) else " ".join(value))
                at = end
        return "".join(parts)

    # ------------------------------------------------------------------------------------------ values

    def _value(self, text: str, line: int) -> str | list[str]:
        """Expand `$NAME`, `${...}`, `$(...)`, `$((...))` or a command in backquotes."""
        if text.startswith("$((") and text.endswith("))"):
            return self.computed(text[3:-2], line)
        if text.startswith("$("):
            return self.output(text[2:-1], line)
        if text.startswith("`"):
            return self.output(re.sub(r"\\([`\\$])", r"\1", text[1:-1]), line)
        if text.startswith("${"):
            return self._braced(text[2:-1], line)
        if text == "$":
            return text
        value = self.get(text[1:], line)
        if value is None:
            self.unset.setdefault(text[1:], line)
        return "" if value is None else value if text in ("$@", "$*") or isinstance(value, str) else value[0]

    def _braced(self, inner: str, line: int) -> str | list[str]:
        match = _BRACED.fullmatch(inner)
        if match is None:
            return unknown("f", line)
        length, name, index, form, rest = match.groups()
        value = self.get(name, line)
        if index in ("[@]", "[*]") or name in "@*":
            value = [] if value is None else value if isinstance(value, list) else [value]
        elif isinstance(value, list):
            number = index.strip("[]") if index else "0"
            value = value[int(number)] if number.isdecimal() and int(number[:6]) < len(value) else None
        elif index not in (None, "[0]"):
            return unknown("f", line)
        if length:
            return str(len(value or ""))
        if not form:
            if value is None:
                self.unset.setdefault(name, line)
            return unknown("f", line) if rest else "" if value is None else value
        missing = value is None or (form.startswith(":") and not value)
        if form[-1] == "+":
            return "" if missing else self._quoted_default(rest, line)
        if not missing:
            return value if value is not None else ""
        if form[-1] == "?":
            raise TesseraError(
                f"the script exits in this line: the variable {name} is not set",
                where=f"{self.path}:{line}",
                fix=f"set it: {name}=VALUE tessera migrate JOB",
                code="job.variable-missing",
            )
        default = self._quoted_default(rest, line)
        if form[-1] == "=":
            self.set(name, default, line)
        return default

    def _quoted_default(self, text: str, line: int) -> str:
        return self.text(text, line) if text[:1] in "'\"" else self._quoted(text, line)

    # ------------------------------------------------------------------------------------------ arithmetic

    def computed(self, text: str, line: int) -> str:
        """Return the value of an arithmetic expression."""
        plain = self._quoted(text, line) if len(text) < MAX_ARITHMETIC else ""

        def number(match: re.Match[str]) -> str:
            value = self.get(match[0], line)
            return (value[:MAX_ARITHMETIC] if isinstance(value, str) else "0") or "0"

        for _ in range(3):  # the value of a variable may be the name of another variable
            if len(plain) < MAX_ARITHMETIC:
                plain = re.sub(r"(?<![\w\x00])[A-Za-z_]\w*", number, plain)
        if marker := _MARKER.search(plain):
            return marker[0]
        plain = plain.strip().replace("&&", " and ").replace("||", " or ")
        try:
            if len(plain) >= MAX_ARITHMETIC:
                raise ValueError
            return str(int(_number(ast.parse(plain, mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError, KeyError, MemoryError, RecursionError):
            raise TesseraError(
                f"$(({text.strip()[:200]})) is not a valid arithmetic expression",
                where=f"{self.path}:{line}",
                fix="write the result as a number",
                code="job.script-arithmetic",
            ) from None


def _quotient(a: int, b: int) -> int:
    """Divide and round towards zero, as the shell does."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _NUMBER_OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return -_number(node.operand) if isinstance(node.op, ast.USub) else _number(node.operand)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _COMPARISONS[type(node.ops[0])](_number(node.left), _number(node.comparators[0]))
    if isinstance(node, ast.BoolOp):
        values = [bool(_number(one)) for one in node.values]
        return all(values) if isinstance(node.op, ast.And) else any(values)
    raise ValueError("not arithmetic")
