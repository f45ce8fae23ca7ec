"""Parse the part of the shell language that launch scripts use into commands. Nothing is executed or expanded.

Words keep their quotes and variables: `values` expands them, at the moment at which a shell would.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from tessera.errors import TesseraError

MAX_DEPTH = 40  # of quotes in commands in quotes, and of compound commands
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|&>>?|<<<|<<-?|<>|>>|[<>]&|>\||[;&|()<>\n]")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=", re.DOTALL)
_PLAIN = re.compile(r"[^\s'\"`$\\;&|()<>]+")
_NAME = re.compile(r"[A-Za-z_]\w*")
_HEREDOC_WORD = re.compile(r"[ \t]*([\"']?)([A-Za-z_]\w*)\1")
_BEFORE_COMMANDS = {"for", "if", "elif", "while", "until", "then", "else", "do", "!", "{"}
_PARTS_OF_OTHERS = {"then", "elif", "else", "fi", "do", "done", "esac", "}", ";;", ")"}


@dataclass(frozen=True)
class Token:
    """Hold a word as it is written, or an operator, with its line."""

    text: str
    line: int
    is_word: bool = True


@dataclass(frozen=True)
class Assignment:
    """Hold `NAME=value`, `NAME+=value` or `NAME=(words)`."""

    name: str
    adds: bool
    value: str | list[str]


@dataclass
class Simple:
    """Hold one command: the assignments before it, and its words. `[[ ... ]]` and `(( ... ))` are words, too."""

    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


@dataclass
class Block:
    """Hold a list of commands. `joins[i]` ("&&", "||", ";") precedes command i; `piped`: it is part of a pipe;
    `negated`: `!` precedes it."""

    items: list[Command] = field(default_factory=list)
    joins: list[str] = field(default_factory=list)
    piped: list[bool] = field(default_factory=list)
    negated: list[bool] = field(default_factory=list)


@dataclass
class Group:
    """Hold `{ ... }`, or `( ... )`, whose assignments end with it."""

    line: int
    body: Block
    inside: bool  # a shell of its own


@dataclass
class If:
    """Hold conditions with their commands; `else` has the condition None."""

    line: int
    branches: list[tuple[Block | None, Block]]


@dataclass
class Loop:
    """Hold a loop: over words (`name`), or while a condition holds, or until it does."""

    line: int
    body: Block
    name: str = ""
    words: list[str] | None = None  # None: numbers that are counted
    condition: Block | None = None
    until: bool = False


@dataclass
class Choice:
    """Hold `case word in pattern) ... ;; esac`."""

    line: int
    word: str
    choices: list[tuple[list[str], Block]]


@dataclass
class Function:
    """Hold the commands behind a name."""

    line: int
    name: str
    body: Block


Command = Simple | Group | If | Loop | Choice | Function


def unreadable(what: str, where: str) -> TesseraError:
    return TesseraError(
        f"not readable as a launch script: {what}",
        where=where,
        fix="write it out in plain commands",
        code="job.script-unreadable",
    )


def end_of(text: str, start: int, where: str, depth: int = 0) -> int:
    """Return where the quote, variable, command or escaped letter that begins at `start` ends."""
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
        raise TesseraError(f"{opened} is opened and never closed", where=where, code="job.script-unreadable")
    return end


def tokens_of(text: str, path: str, line: int = 1) -> list[Token]:
    """Return words and operators. Comments and the texts of here-documents are dropped."""
    tokens: list[Token] = []
    documents: list[tuple[str, bool]] = []  # end word, whether tabs may precede it
    at, size = 0, len(text)
    while at < size:
        letter = text[at]
        if letter in " \t\r":
            at += 1
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif letter == "#":
            end = text.find("\n", at)
            at = size if end < 0 else end
        elif text.startswith("((", at) and (
            not tokens or not tokens[-1].is_word or tokens[-1].text in _BEFORE_COMMANDS
        ):
            end = end_of(text, at, f"{path}:{line}")
            tokens.append(Token(text[at:end], line))
            line += text.count("\n", at, end)
            at = end
        elif operator := _OPERATOR.match(text, at):
            if operator[0][0] in "<>" and tokens and tokens[-1].text.isdecimal() and text[at - 1].isdigit():
                tokens.pop()  # the 2 of 2>&1
            tokens.append(Token(operator[0], line, is_word=False))
            at = operator.end()
            if operator[0] in ("<<", "<<-") and (word := _HEREDOC_WORD.match(text, at)):
                documents.append((word[2], operator[0] == "<<-"))
            elif operator[0] == "\n":
                line += 1
                for end_word, tabs in documents:
                    at, line = _after_document(text, at, line, end_word, tabs, path)
                documents = []
        else:
            end = _end_of_word(text, at, f"{path}:{line}")
            tokens.append(Token(text[at:end], line))
            line += text.count("\n", at, end)
            at = end
    if documents:
        raise TesseraError(
            f"the text after <<{documents[0][0]} has no end", where=f"{path}:{line}", code="job.script-unreadable"
        )
    return [*tokens, Token("\n", line, is_word=False)]


def _after_document(text: str, at: int, line: int, end_word: str, tabs: bool, path: str) -> tuple[int, int]:
    started = line
    while at < len(text):
        end = text.find("\n", at)
        end = len(text) if end < 0 else end
        text_line = text[at:end]
        at, line = end + 1, line + 1
        if (text_line.lstrip("\t") if tabs else text_line) == end_word:
            return at, line
    raise TesseraError(
        f"the text after <<{end_word} has no end", where=f"{path}:{started}", code="job.script-unreadable"
    )


def _end_of_word(text: str, at: int, where: str) -> int:
    start = at
    while at < len(text):
        if plain := _PLAIN.match(text, at):
            at = plain.end()
        elif text[at] == "(" and _ASSIGNMENT.fullmatch(text, start, at):
            at = end_of(text, at, where)  # an array
        elif text[at] in "'\"`$\\":
            at = end_of(text, at, where)
        else:
            break
    return at


class Parser:
    """Turn tokens into commands."""

    def __init__(self, text: str, path: str, line: int = 1) -> None:
        self.path = path
        self.tokens = tokens_of(text, path, line)
        self.at = self.depth = 0

    def parse(self) -> Block:
        block = self._block(())
        if self.at < len(self.tokens):
            self._fail(f"{self.tokens[self.at].text!r} was not expected")
        return block

    def _fail(self, what: str) -> NoReturn:
        line = self.tokens[min(self.at, len(self.tokens) - 1)].line
        raise unreadable(what, f"{self.path}:{line}")

    def _peek(self) -> str:
        return self.tokens[self.at].text if self.at < len(self.tokens) else ""

    def _next(self) -> Token:
        if self.at >= len(self.tokens):
            self._fail("the script ends inside of a command")
        self.at += 1
        return self.tokens[self.at - 1]

    def _take(self, *expected: str) -> str:
        token = self._next()
        if token.text not in expected:
            self.at -= 1
            self._fail(f"{' or '.join(expected)} was expected, not {token.text[:80]!r}")
        return token.text

    def _skip_lines(self) -> None:
        while self._peek() in ("\n", ";") and self.at < len(self.tokens):
            self.at += 1

    def _block(self, ends: tuple[str, ...]) -> Block:
        """Parse commands until one of the words, which is left for the caller."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self._fail("commands are nested too deeply")
        block, join = Block(), ";"
        while True:
            self._skip_lines()
            if self.at >= len(self.tokens) or self._peek() in ends:
                self.depth -= 1
                return block
            negated = self._peek() == "!"
            self.at += negated
            command = self._command()
            sign = self._peek()
            piped = sign in ("|", "|&")
            block.items.append(command)
            block.joins.append(";" if join == "|" else join)
            block.piped.append(piped or join == "|")
            block.negated.append(negated)
            if sign in ("&&", "||", ";", "&", "\n", "|", "|&"):
                self.at += 1
                join = "|" if piped else sign if sign in ("&&", "||") else ";"
            elif sign not in ends and self.at < len(self.tokens):
                self._fail(f"{sign[:80]!r} was not expected")
            else:
                join = ";"

    def _command(self) -> Command:
        token = self.tokens[self.at]
        word = token.text
        if word in _PARTS_OF_OTHERS:
            self._fail(f"{word!r} was not expected")
        following = self.tokens[self.at + 1].text if self.at + 1 < len(self.tokens) else ""
        if word == "function" or (token.is_word and following == "(" and _NAME.fullmatch(word.replace("-", "_"))):
            return self._function()
        loops = {"for": self._for, "select": self._for, "while": self._while, "until": self._while}
        if word in loops:
            return self._after(loops[word]())
        if word in ("if", "case"):
            return self._after(self._if() if word == "if" else self._case())
        if word in ("{", "("):
            self.at += 1
            body = self._block(("}" if word == "{" else ")",))
            self._take("}", ")")
            return self._after(Group(token.line, body, word == "("))
        return self._simple()

    def _after(self, command: Command) -> Command:
        """Pass over the redirections of a compound command."""
        while self._peek()[:1] in ("<", ">") or self._peek().startswith("&>"):
            self.at += 2
        return command

    def _simple(self) -> Simple:
        command = Simple(self.tokens[self.at].line)
        double = self._peek() == "[["
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if double and token.text != "\n":
                command.words.append(token.text)
                double = token.text != "]]"
            elif not token.is_word and (token.text[0] in "<>" or token.text.startswith("&>")):
                self.at += 1  # and the word after it
            elif not token.is_word:
                break
            elif not command.words and (match := _ASSIGNMENT.match(token.text)):
                value: str | list[str] = token.text[match.end() :]
                if isinstance(value, str) and value.startswith("("):
                    inner = tokens_of(value[1:-1], self.path, token.line)
                    value = [one.text for one in inner if one.is_word]
                command.assignments.append(Assignment(match[1], bool(match[2]), value))
            else:
                command.words.append(token.text)
            self.at += 1
        return command

    def _if(self) -> If:
        line = self._next().line
        branches: list[tuple[Block | None, Block]] = []
        sign = "if"
        while sign in ("if", "elif"):
            condition = self._block(("then",))
            self._take("then")
            branches.append((condition, self._block(("elif", "else", "fi"))))
            sign = self._take("elif", "else", "fi")
        if sign == "else":
            branches.append((None, self._block(("fi",))))
            self._take("fi")
        return If(line, branches)

    def _for(self) -> Loop:
        line, name = self._next().line, self._next().text
        words: list[str] | None = ['"$@"']
        if name.startswith("(("):
            words = None
        elif self._peek() == "in":
            self.at += 1
            words = []
            while self.at < len(self.tokens) and self.tokens[self.at].is_word:
                words.append(self._next().text)
        return Loop(line, self._do(), name, words)

    def _while(self) -> Loop:
        token = self._next()
        condition = self._block(("do",))
        return Loop(token.line, self._do(), condition=condition, until=token.text == "until")

    def _do(self) -> Block:
        self._skip_lines()
        self._take("do")
        body = self._block(("done",))
        self._take("done")
        return body

    def _case(self) -> Choice:
        line, word = self._next().line, self._next().text
        self._skip_lines()
        self._take("in")
        choices: list[tuple[list[str], Block]] = []
        self._skip_lines()
        while self._peek() != "esac":
            self.at += self._peek() == "("
            patterns = [self._next().text]
            while self._take("|", ")") == "|":
                patterns.append(self._next().text)
            body = self._block((";;", "esac"))
            choices.append((patterns, body))
            self.at += self._peek() == ";;"
            self._skip_lines()
        self._take("esac")
        return Choice(line, word, choices)

    def _function(self) -> Function:
        line = self.tokens[self.at].line
        self.at += self._peek() == "function"
        name = self._next().text
        if self._peek() == "(":
            self.at += 1
            self._take(")")
        self._skip_lines()
        body = self._command()
        if not isinstance(body, Group):
            self._fail(f"the function {name} has no {{ }}")
        return Function(line, name, body.body)
