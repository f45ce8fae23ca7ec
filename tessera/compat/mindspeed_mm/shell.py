"""Read the launch script of a job without running it: variables, arithmetic, continued lines, the command.

The part of the shell language is small on purpose: assignments, `export`, `$VAR`, `${VAR}`, `${VAR:-default}`,
`$((...))`, quotes, comments and line continuations. A command substitution is a word that nobody needs (dates of log
files); where a flag would depend on one, it is an error. Nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tessera.core.errors import TesseraError

UNKNOWN = "\x00"  # stands for the output of a command that is not run
MAX_BYTES = 1 << 20
MAX_COMMAND = 1 << 17
MAX_EXPANDED = 16 << 20  # letters of all values together
LAUNCHERS = ("torchrun", "msrun", "accelerate", "python", "python3")
_ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_PLAIN_ASSIGNMENT = re.compile(r"(export\s+|local\s+|readonly\s+)?[A-Za-z_]\w*\+?=[^\s;\"'`()]*")
_HEREDOC = re.compile(
    r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\(\(|<<<|<<(?P<tabs>-?)\s*(?P<quote>[\"']?)(?P<word>[A-Za-z_]\w*)(?P=quote)",
    re.DOTALL,
)
_VARIABLE = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?:(?P<form>:?-)(?P<default>(?:[^{}]|\$\{[^{}]*\})*))?\}|(?P<plain>[A-Za-z_]\w*))"
)
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass
class ShellJob:
    """Hold what a script starts: launcher, entry point and the words after it, with all variables replaced."""

    path: Path
    launcher: list[str] = field(default_factory=list)  # torchrun and its options
    entry: str = ""  # pretrain_vlm.py
    argv: list[str] = field(default_factory=list)
    exports: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Return how many ranks the script starts on all machines."""
        sizes = {name: self._launcher_int(name) for name in ("nproc_per_node", "nnodes")}
        return sizes["nproc_per_node"] * sizes["nnodes"]

    def _launcher_int(self, name: str) -> int:
        for position, word in enumerate(self.launcher):
            key, sign, value = word.lstrip("-").replace("-", "_").partition("=")
            if key == name and word.startswith("--"):
                value = value if sign else (self.launcher[position + 1 : position + 2] or [""])[0]
                if not value.isdecimal() or len(value) > 6:
                    raise TesseraError(f"--{name} {value or '(nothing)'} is no number", where=str(self.path))
                return int(value)
        return 1


def read_shell(path: Path, environment: Mapping[str, str] | None = None) -> ShellJob:
    """Return what a launch script starts. `environment`: variables that are set before the script begins."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TesseraError("too large to be a launch script", where=str(path))
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TesseraError(f"cannot be read: {error}", where=str(path)) from None
    job = ShellJob(path, variables=dict(environment or {}))
    letters = 0
    for line, command in _commands(text.replace("\r\n", "\n")):
        where = f"{path}:{line}"
        assigned = _ASSIGNMENT.match(command)
        if assigned:
            name = assigned.group(1)
            before = job.variables.get(name, "") if assigned.group(2) else ""
            job.variables[name] = before + _value(command[assigned.end() :], job.variables, where)
            letters += len(job.variables[name])
            if letters > MAX_EXPANDED:
                raise TesseraError("the values of its variables are too long for a launch script", where=where)
            if command.startswith("export"):
                job.exports[name] = job.variables[name]
            continue
        words = _words(command, job.variables, where)
        if words[:1] == ["eval"] and _ASSIGNMENT.match(" ".join(words[1:])):
            raise TesseraError("eval sets a variable, which is not read", where=where, fix="assign it without eval")
        if words and Path(words[0]).name in LAUNCHERS and not job.entry:
            _split(job, words, where)
    if not job.entry:
        raise TesseraError(
            "the script starts no entry point",
            where=str(path),
            allowed=[f"{launcher} ... pretrain_vlm.py ..." for launcher in LAUNCHERS[:2]],
            fix="a line has to start torchrun with a Python file",
        )
    return job


def _commands(text: str) -> list[tuple[int, str]]:
    """Return the commands of a script with the number of their first line; quoted text may span lines."""
    commands: list[tuple[int, str]] = []
    current, quote, start = "", "", 1
    documents: list[tuple[str, bool]] = []  # here-documents whose text follows: end word, whether tabs may precede it
    for number, line in enumerate(text.split("\n"), 1):
        if documents and not current:
            if (line.lstrip("\t") if documents[0][1] else line) == documents[0][0]:
                documents.pop(0)
            continue
        if not current:
            start = number
        position = 0
        while position < len(line):
            letter = line[position]
            if letter == "\\" and quote != "'" and position + 1 < len(line):
                current += line[position : position + 2]
                position += 2
                continue
            if letter in "\"'" and quote in ("", letter):
                quote = "" if quote else letter
            elif letter == "#" and not quote and (not current or current[-1] in " \t;"):
                break
            current += letter
            position += 1
        if current.endswith("\\"):
            current = current[:-1] + " "
        elif quote:
            current += "\n"
        else:
            found = list(_HEREDOC.finditer(current)) if "<<" in current else []
            if not any(one.group() == "((" for one in found):
                documents = [(one["word"], bool(one["tabs"])) for one in found if one["word"]]
            commands += [(start, one) for one in _separate(current.strip()) if one]
            current = ""
    if documents:
        raise TesseraError(f"the text after <<{documents[0][0]} has no end", where=f"line {start}")
    if quote:
        raise TesseraError(f"a quote ({quote}) is opened and never closed", where=f"line {start}")
    return commands


def _separate(command: str) -> list[str]:
    """Return the assignments that stand on one line (`A=1; B=2`, `export A=1 B=2`), and what follows them."""
    found: list[str] = []
    while one := _PLAIN_ASSIGNMENT.match(command):
        rest = command[one.end() :].lstrip(" \t")
        if rest.startswith(";"):
            rest = rest.lstrip("; \t")
        elif one[1] and _ASSIGNMENT.match(rest):
            rest = one[1] + rest
        else:
            break
        found.append(one.group())
        command = rest
    return [*found, command]


def _value(text: str, variables: Mapping[str, str], where: str) -> str:
    """Return the value of an assignment: the first word, with its quotes taken off."""
    text = text.strip()
    if text.startswith("'"):
        return text[1 : text.index("'", 1)] if "'" in text[1:] else text[1:]
    if text.startswith('"'):
        inner, position = "", 1
        while position < len(text) and text[position] != '"':
            step = 2 if text[position] == "\\" and text[position + 1 : position + 2] in ('"', "\\", "$") else 1
            inner += text[position + step - 1]
            position += step
        return _expanded(inner, variables, where)
    if text.startswith(("$((", "`", "$(")):
        return _expanded(text, variables, where)
    word = re.split(r"[\s;]", text, maxsplit=1)[0] if text else ""
    return _expanded(word, variables, where)


def _words(command: str, variables: Mapping[str, str], where: str) -> list[str]:
    """Return the words of a command up to a pipe or redirection."""
    text = re.sub(r"(?<=\s)\d+(?=>)", "", _expanded(command, variables, where))  # the 2 of 2>&1
    if len(text) > MAX_COMMAND:
        raise TesseraError("a command is too long for a launch script", where=where)
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        for word in lexer:
            if set(word) <= set("|&;<>()"):
                break
            words.append(word)
    except ValueError as error:
        raise TesseraError(f"not readable as a command: {error}", where=where) from None
    return [word for word in words if word not in ("\\", "exec", "nohup")]


def _expanded(text: str, variables: Mapping[str, str], where: str) -> str:
    """Return the text with arithmetic and variables replaced; output of commands is unknown."""
    pieces, done = [], 0
    while (start := text.find("$((", done)) >= 0:
        end = _arithmetic_end(text, start + 3)
        if end < 0:
            raise TesseraError("$(( is opened and never closed", where=where)
        inner = _plain(text[start + 3 : end], variables, where)
        pieces += [text[done:start], _computed(inner, variables, where)]
        done = end + 2
    text = "".join([*pieces, text[done:]])
    for _ in range(20):  # commands in commands
        text, count = re.subn(r"`[^`]*`|\$\([^()]*\)", UNKNOWN, text)
        if not count:
            break
    return _plain(text, variables, where)


def _arithmetic_end(text: str, position: int) -> int:
    """Return where the parentheses of `$((` close, or -1."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, position):
        depth += 1 if found.group() == "(" else -1
        if depth < 0:
            return found.start() if text.startswith("))", found.start()) else -1
    return -1


def _plain(text: str, variables: Mapping[str, str], where: str) -> str:
    letters = 0

    def replaced(found: re.Match[str]) -> str:
        name = found["braced"] or found["plain"]
        value = variables.get(name)
        default = found["default"]
        if default is not None and (value is None or (found["form"] == ":-" and not value)):
            value = _plain(default, variables, where)
        nonlocal letters
        letters += len(value or "")
        if letters > MAX_BYTES:
            raise TesseraError("what its variables stand for is too long for a launch script", where=where)
        return value or ""

    return _VARIABLE.sub(replaced, text)


def _computed(text: str, variables: Mapping[str, str], where: str) -> str:
    names = re.sub(r"[A-Za-z_]\w*", lambda found: variables.get(found.group(), "0"), text)
    try:
        return str(_number(ast.parse(names.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, KeyError, MemoryError, RecursionError):
        raise TesseraError(f"$(({text.strip()[:200]})) cannot be computed", where=where) from None


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return int(_OPERATORS[type(node.op)](_number(node.left), _number(node.right)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    raise ValueError("not arithmetic")


def _split(job: ShellJob, words: list[str], where: str) -> None:
    """Find the entry point: the first Python file of the command."""
    at = next((position for position, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        return
    job.launcher, job.entry, job.argv = words[:at], words[at], words[at + 1 :]
    for word in job.argv:
        if "${" in word:
            raise TesseraError(
                f"{word[:200]}: this form of a variable is not read",
                where=where,
                allowed=["$VAR", "${VAR}", "${VAR:-default}"],
                fix="write the value into the script",
            )
        if UNKNOWN in word or word.endswith("$"):
            raise TesseraError(
                "a flag depends on the output of a command, which is not run",
                where=where,
                fix="write the value into the script, or set the variable before tessera migrate",
            )
