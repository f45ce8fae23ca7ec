"""Split a launch script into words and operators. Nothing is executed or expanded.

Words keep their quotes and variables. The module `values` expands them later.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tessera.errors import TesseraError

MAX_DEPTH = 40  # nesting depth of quotes, commands and `if`
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|&>>?|<<<|<<-?|<>|>>|[<>]&|>\||[;&|()<>\n]")
_PLAIN = re.compile(r"[^\s'\"`$\\;&|()<>]+")
_HEREDOC = re.compile(r"<<(-?)[ \t]*([\"']?)([A-Za-z_]\w*)\2")


@dataclass(frozen=True)
class Token:
    """Store a word with its quotes, or an operator, and its line."""

    text: str
    line: int
    is_word: bool = True

    @property
    def redirects(self) -> bool:
        """Return whether the token is a redirection operator such as `>` or `>&`, which a file or number follows."""
        return not self.is_word and self.text.startswith(("<", ">", "&>"))


def unreadable(what: str, where: str) -> TesseraError:
    return TesseraError(
        f"not readable as a launch script: {what}",
        where=where,
        fix="write the launch with plain commands",
        code="job.script-unreadable",
    )


def end_of(text: str, start: int, where: str, depth: int = 0) -> int:
    """Return the end of the quote, variable, command or escaped character that begins at `start`."""
    if depth > MAX_DEPTH:
        raise unreadable("quotes and commands are nested too deeply", where)
    letter = text[start]
    if letter == "\\":
        return min(len(text), start + 2)
    if letter == "'":
        end = text.find("'", start + 1)
        return _closed(end + 1, letter, where)
    if letter in '"`':
        at = start + 1
        while at < len(text) and text[at] != letter:
            nested = text[at] == "\\" or (letter == '"' and text[at] in "$`")
            at = end_of(text, at, where, depth + 1) if nested else at + 1
        return _closed(at + 1 if at < len(text) else 0, letter, where)
    if text.startswith(("$(", "${", "("), start):
        at = text.index("{" if text.startswith("${", start) else "(", start) + 1
        opens, closes, open_now = text[at - 1], {"(": ")", "{": "}"}[text[at - 1]], 1
        while at < len(text) and open_now:
            if text[at] in "'\"`\\" or text.startswith(("$(", "${"), at):
                at = end_of(text, at, where, depth + 1)
                continue
            open_now += (text[at] == opens) - (text[at] == closes)
            at += 1
        return _closed(0 if open_now else at, text[start : start + (2 if letter == "$" else 1)], where)
    if text.startswith("$'", start):
        return end_of(text, start + 1, where, depth)
    return start + 1


def _closed(end: int, opened: str, where: str) -> int:
    if not end:
        raise TesseraError(f"{opened} is not closed", where=where, code="job.script-unreadable")
    return end


def tokens_of(text: str, path: str, line: int = 1) -> list[Token]:
    """Return words and operators, without comments and here-documents. The last token is a line break."""
    tokens: list[Token] = []
    documents: list[re.Pattern[str]] = []  # ends of the here-documents that begin in this line
    at, size = 0, len(text)
    while at < size:
        letter, where = text[at], f"{path}:{line}"
        if letter in " \t\r":
            at += 1
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif letter == "#":
            end = text.find("\n", at)
            at = size if end < 0 else end
        elif operator := _OPERATOR.match(text, at):
            if letter in "<>" and tokens and tokens[-1].text.isdecimal() and text[at - 1].isdigit():
                tokens.pop()  # the last token is a file descriptor, such as the 2 in `2>&1`, and no argument
            if document := _HEREDOC.match(text, at):
                tabs = r"\t*" if document[1] else ""
                documents.append(re.compile(rf"^{tabs}{document[3]}$", re.MULTILINE))
            tokens.append(Token(operator[0], line, is_word=False))
            at = operator.end()
            if letter == "\n":
                line += 1
                while documents:
                    end_line = documents.pop(0).search(text, at)
                    if end_line is None:
                        raise unreadable("a here-document has no end", where)
                    line += text.count("\n", at, end_line.end())
                    at = end_line.end()
        else:
            end = _end_of_word(text, at, where)
            tokens.append(Token(text[at:end], line))
            line += text.count("\n", at, end)
            at = end
    if documents:
        raise unreadable("a here-document has no end", f"{path}:{line}")
    return [*tokens, Token("\n", line, is_word=False)]


def _end_of_word(text: str, at: int, where: str) -> int:
    start = at
    while at < len(text):
        if plain := _PLAIN.match(text, at):
            at = plain.end()
        elif text[at] == "(" and ASSIGNMENT.fullmatch(text, start, at):
            at = end_of(text, at, where)  # the value is an array
        elif text[at] in "'\"`$\\":
            at = end_of(text, at, where)
        else:
            break
    return at


def end_of_command(tokens: Sequence[Token], at: int) -> int:
    """Return the position behind the last word of a simple command."""
    if tokens[at].text == "[[":
        ends = (position + 1 for position in range(at, len(tokens)) if tokens[position].text in ("]]", "\n"))
        return next(ends, len(tokens))
    while at < len(tokens) and (tokens[at].is_word or tokens[at].redirects):
        at += 2 if tokens[at].redirects else 1
    return at
