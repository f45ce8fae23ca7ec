"""Find launch commands and their options in the text of a shell script, with positions, so that it can be rewritten."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LAUNCHERS = r"(?:\S*/)?torchrun|python3?\s+-m\s+torch\.distributed\.(?:run|launch)|msrun"
_LAUNCH = re.compile(
    rf"^(?P<before>[ \t]*(?:[A-Za-z_]\w*=\S*[ \t]+|nohup[ \t]+|exec[ \t]+|time[ \t]+)*)(?P<launcher>{LAUNCHERS})(?=\s)",
    re.MULTILINE,
)
_VALUE = r"\"[^\"\n]*\"|'[^'\n]*'|\$\(\([^\n]*?\)\)|\$\([^()\n]*\)|(?:[^\s\\\"'|&;()<>]|\\[^\n])+"
_OPTION = re.compile(
    rf"(?<![\w$-])--(?P<name>[A-Za-z][\w.-]*)(?:=(?P<joined>{_VALUE})|(?P<gap>[ \t]+)(?P<value>(?!-)(?:{_VALUE})))?"
)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


@dataclass(frozen=True)
class Span:
    """Mark a part of the script."""

    start: int
    end: int


@dataclass(frozen=True)
class LaunchOption:
    """Store an option of a command, with its position in the script."""

    name: str  # underscores instead of dashes, such as nproc_per_node
    value: str | None
    span: Span


@dataclass(frozen=True)
class LaunchCommand:
    """Store the position of a command that starts ranks."""

    launcher: Span
    command: Span  # from the launcher to a redirection, a pipe or the end of the line; `\` continues a line
    options: tuple[Span, ...]  # where options of the launcher may be: the command, and values of variables in it

    def options_of(self, text: str) -> list[LaunchOption]:
        return [option for part in self.options for option in options_in(text, part)]


def without_comments(text: str) -> str:
    """Return the text with comments replaced by blanks, so that positions do not change."""
    lines = []
    for line in text.splitlines(keepends=True):
        match = re.match(r"(?:[^#'\"\\]|\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"|(?<=[^\s])#)*", line.rstrip("\r\n"))
        end = match.end() if match else 0
        is_comment = end < len(line.rstrip("\r\n")) and line[end] == "#"
        rest = line[end:].rstrip("\r\n")
        lines.append(line[:end] + " " * len(rest) + line[end + len(rest) :] if is_comment else line)
    return "".join(lines)


def launches_in(text: str) -> Iterator[LaunchCommand]:
    """Yield the commands of a text without comments that start ranks with torchrun or msrun."""
    for match in _LAUNCH.finditer(text):
        end = _end_of_command(text, match.end())
        entry = re.search(r"(?<=\s)(?:-m[ \t]+[\w.]+|\S+\.py)\b", text[match.end() : end])
        split = match.end() + entry.start() if entry else end
        names = _VARIABLE.findall(text[match.end() : split])
        parts = [Span(match.end(), split)]
        for name in dict.fromkeys(names):
            parts += _assignments(text, name)
        launcher = Span(match.start("launcher"), match.end("launcher"))
        yield LaunchCommand(launcher, Span(match.start("launcher"), end), tuple(parts))


def _assignments(text: str, name: str) -> Iterator[Span]:
    """Yield the contents of `NAME="..."` and `NAME=(...)`. Only contents with options are yielded."""
    for match in re.finditer(rf"^[ \t]*(?:export[ \t]+)?{name}\+?=(?P<open>[\"'(])", text, re.MULTILINE):
        closing = {"(": ")"}.get(match["open"], match["open"])
        end = text.find(closing, match.end())
        if end > 0 and "--" in text[match.end() : end]:
            yield Span(match.end(), end)


def _end_of_command(text: str, start: int) -> int:
    """Return the end of the arguments of a command: a redirection, a pipe, `;`, `&`, or the end of its last line."""
    at, quote = start, ""
    while at < len(text):
        letter = text[at]
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif text.startswith(("$(", "${"), at):
            closing = text.find(")" if text[at + 1] == "(" else "}", at)
            at = closing if closing > 0 else at
        elif letter == "\\":
            at += 2 if text.startswith("\\\r\n", at) else 1
        elif letter == "\n" or letter in "|;&>":
            before = at - 1 if letter == ">" and text[at - 1].isdigit() and text[at - 2].isspace() else at
            return before
        at += 1
    return len(text)


def options_in(text: str, part: Span) -> list[LaunchOption]:
    """Return the options in a part of a script."""
    options = []
    for match in _OPTION.finditer(text, part.start, part.end):
        value = match["joined"] if match["joined"] is not None else match["value"]
        options.append(LaunchOption(match["name"].replace("-", "_"), value, Span(match.start(), match.end())))
    return options


def line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def separator_at(text: str, position: int, part: Span) -> str:
    """Return the separator between the option at a position and the next one: blanks, or a line break with
    indentation.
    """
    line_start = text.rfind("\n", 0, position) + 1
    indent = re.match(r"[ \t]*", text[line_start:])
    blanks = indent[0] if indent else ""
    lines = text[part.start : part.end].count("\n")
    if not lines:
        return " "
    if "\\" not in text[part.start : part.end]:
        return f"\n{blanks}"
    return f" \\\n{blanks or '    '}"


def end_of_arguments(text: str, end: int, start: int) -> int:
    """Return the end of the last argument before `end`: without blanks and continued lines after it."""
    while end > start and (text[end - 1].isspace() or text[end - 1] == "\\"):
        end -= 1
    return end
