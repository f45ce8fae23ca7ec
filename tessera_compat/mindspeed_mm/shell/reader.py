"""Read the launch script of a job without running it, and find the command that starts the ranks.

Assignments, arithmetic, arrays, `if` and tests of files are followed as bash would follow them in this folder, without
arguments. Programs are not run, and loops, functions, `case` and `( ... )` are skipped. A value that depends on one of
these is unknown. It is an error if a flag depends on an unknown value, or if it decides whether the job starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.shell.conditions import status_of_test
from tessera_compat.mindspeed_mm.shell.launch import Launch, ShellJob
from tessera_compat.mindspeed_mm.shell.syntax import ASSIGNMENT, MAX_DEPTH, Token, end_of_command, tokens_of, unreadable
from tessera_compat.mindspeed_mm.shell.values import Values, is_unknown, refuse_unknown, unknown

MAX_BYTES = 1 << 18
MAX_CALLS = 20  # nesting depth of eval and $(...)
LAUNCHERS = ("torchrun", "msrun", "accelerate", "python", "python3")
_WRAPPERS = {"exec", "nohup", "time", "env", "command", "sudo", "numactl", "taskset", "stdbuf", "timeout", "nice"}
_DECLARE = ("export", "local", "readonly", "declare", "typeset")
_ENVIRONMENT_FILES = re.compile(
    r"set_env\.sh|env_npu\.sh|setvars\.sh|activate|\.bashrc|\.bash_profile|\.profile|profile"
)
_COUNTED = re.compile(
    r"(?:cat (?=.*wc)|wc -l *<? *)(?P<file>[^\s|<>;&]+)( *\| *wc -l)?"
)  # commands that count the lines of a file
# Commands that are skipped, with the words that end them.
_SKIPPED = {
    **dict.fromkeys(("for", "while", "until", "select"), "done"),
    **{"case": "esac", "function": "}", "(": ")"},
}
_BEFORE_COMMANDS = {"if", "elif", "then", "else", "do", "while", "until", "!", "{"}
_PARTS_OF_IF = ("then", "elif", "else", "fi", "}")


class _End(Exception):
    """Raised by `exit`: the script ends."""

    def __init__(self, line: int) -> None:
        self.line = line


@dataclass
class _Branch:
    """Describe an `if`, or the braces of `{ ... }`, around the current command."""

    line: int
    outer: bool | None  # whether the `if` itself is reached; None: unknown
    runs: bool | None  # whether the current commands run
    passed: bool = False  # whether an earlier condition of the `if` is true
    doubtful: bool = False  # whether an earlier condition of the `if` is unknown

    def enter(self, condition: bool | None) -> None:
        """Set the state for the commands after `then`. For `else`, pass the condition True."""
        doubtful = self.doubtful or condition is None or self.outer is None
        self.runs = False if self.passed or False in (self.outer, condition) else None if doubtful else True
        self.passed = self.passed or (condition is True and not self.doubtful)
        self.doubtful = self.doubtful or condition is None


def read_shell(path: Path, environment: Mapping[str, str] | None = None, *, machines: int = 1) -> ShellJob:
    """Read a launch script, and return its launches.

    `environment`: variables that are set before the script begins; they also replace values that the script takes from
    the output of a command. `machines`: number of lines of a host file that is not on this machine.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TesseraError(
                "the file is too large for a launch script", where=str(path), code="job.script-too-large"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TesseraError(
            f"the launch script cannot be read: {error}", where=str(path), code="job.file-unreadable"
        ) from None
    if "\x00" in text:
        raise TesseraError("the launch script is not a text file", where=str(path), code="job.file-unreadable")
    reader = _Reader(path, environment or {}, machines)
    ended: int | None = None
    try:
        reader.run(tokens_of(text.replace("\r\n", "\n"), str(path)))
    except _End as end:
        ended = end.line
    if not reader.job.launches:
        allowed = [f"{launcher} ... pretrain_vlm.py ..." for launcher in LAUNCHERS[:2]]
        if ended is not None:
            raise TesseraError(
                "the script exits in this line, before it starts a job",
                where=f"{path}:{ended}",
                allowed=allowed,
                fix="change the condition before the exit, or the files that it tests",
                code="job.script-ends-early",
            )
        raise TesseraError(
            "the script starts no entry point",
            where=str(path),
            allowed=allowed,
            fix="add a line that starts torchrun with a Python file",
            code="job.script-starts-nothing",
        )
    return reader.job


class _Reader:
    """Evaluate the commands of a script. A status is True, False, or None if it depends on running a program."""

    def __init__(self, path: Path, environment: Mapping[str, str], machines: int) -> None:
        self.path, self.job = path, ShellJob()
        self.environment, self.machines = environment, machines
        self.values = Values(environment, str(path), self._output)
        self.exports: dict[str, str] = {}
        self.folder = Path.cwd()
        self.calls = 0
        self.branches: list[_Branch] = []
        self.printed: list[str] | None = None  # output so far inside of `$(...)`; None outside of it

    def where(self, line: int) -> str:
        return f"{self.path}:{line}"

    @property
    def doubt(self) -> int | None:
        """Return the line of the innermost unknown condition around this command; None if all conditions are known."""
        return next((branch.line for branch in reversed(self.branches) if branch.runs is None), None)

    # ------------------------------------------------------------------------------------------ lists of commands

    def run(self, tokens: Sequence[Token]) -> bool | None:
        """Interpret commands in order. Return the status of the last; None: unknown."""
        status: bool | None = True
        at, join, depth, negated = 0, ";", len(self.branches), False
        while at < len(tokens):
            token = tokens[at]
            word, line = token.text, token.line
            if token.redirects:
                at += 2
            elif not token.is_word and word != "(":
                join, at = word if word in ("&&", "||", "|", "|&") else ";", at + 1
            elif word == "!":
                negated, at = True, at + 1
            elif word in _PARTS_OF_IF:
                status = self._continue_if(word, line, status, depth)
                join, at = ";", at + 1
            elif word in ("if", "{"):
                runs = self._runs(tokens, at, join, status)
                self.branches.append(_Branch(line, runs, runs))
                if len(self.branches) > MAX_DEPTH:
                    raise unreadable("commands are nested too deeply", self.where(line))
                join, at = ";", at + 1
            elif (end := self._skip(tokens, at)) > at:
                self._forget(tokens[at:end])
                status, at = None, end
            else:
                end = end_of_command(tokens, at)
                piped = join in ("|", "|&") or (end < len(tokens) and tokens[end].text in ("|", "|&"))
                self.branches.append(_Branch(line, runs := self._runs(tokens, at, join, status), runs))
                if all(branch.runs is not False for branch in self.branches):
                    with self._own_shell() if piped else nullcontext():
                        status = self._simple(tokens[at:end])
                    status = None if piped else status
                    status = not status if negated and status is not None else status
                self.branches.pop()
                at, negated = end, False
        if len(self.branches) > depth:
            raise unreadable("the script ends inside of a command", self.where(self.branches[-1].line))
        return status

    @staticmethod
    def _runs(tokens: Sequence[Token], at: int, join: str, status: bool | None) -> bool | None:
        """Return whether the command after `&&` or `||` runs; None: unknown.

        After `program &&` a launch is followed as if the program had succeeded.
        """
        if join not in ("&&", "||"):
            return True
        if status is None:
            return True if join == "&&" and Path(tokens[at].text).name in LAUNCHERS else None
        return status is (join == "&&")

    def _continue_if(self, word: str, line: int, status: bool | None, depth: int) -> bool | None:
        """Apply `then`, `elif`, `else`, `fi` or `}` to the innermost branch. Return the status after it."""
        if len(self.branches) <= depth:
            raise unreadable(f"{word!r} was not expected", self.where(line))
        branch = self.branches[-1]
        if word in ("fi", "}"):
            self.branches.pop()
            return None if branch.doubtful or branch.outer is None else status
        if word == "elif":
            branch.runs = False if branch.passed else None if branch.doubtful else branch.outer
        else:
            branch.enter(status if word == "then" else True)
        return True

    def _skip(self, tokens: Sequence[Token], at: int) -> int:
        """Return the end of a loop, function, `case` or `( ... )`; `at` if no such command begins there."""
        word = tokens[at].text
        following = "".join(token.text for token in tokens[at + 1 : at + 3])
        opens, closes = word, _SKIPPED.get(word, "")
        if word == "function" or following == "()":
            opens, closes = "{", "}"
        if not closes:
            return at
        inside = 0
        for position in range(at, len(tokens)):
            text, before = tokens[position].text, tokens[position - 1]
            if position > at and before.is_word and before.text not in _BEFORE_COMMANDS and text not in "(){":
                continue  # an argument such as in `echo done` closes no loop
            inside += (_SKIPPED.get(text) == closes) if closes in ("done", "esac") else text == opens
            inside -= text == closes
            if not inside and text == closes:
                return position + 1
        raise unreadable(f"{word} is opened and never closed", self.where(tokens[at].line))

    def _forget(self, tokens: Sequence[Token]) -> None:
        """Mark variables that a skipped command sets as unknown."""
        if any(branch.runs is False for branch in self.branches):
            return
        first, line = tokens[0].text, tokens[0].line
        if any(Path(token.text).name in LAUNCHERS[:3] for token in tokens):
            raise unreadable(f"a loop, function, case or ( ) starts the job: {first}", self.where(line))
        names = [match[1] for token in tokens if (match := ASSIGNMENT.match(token.text))]
        names += [tokens[1].text] if first == "for" and len(tokens) > 1 else []
        for name in names if first != "(" else []:
            if name.isidentifier():
                self.values.set(name, unknown("i", line), line)

    @contextmanager
    def _own_shell(self) -> Iterator[None]:
        """Restore variables and the folder after the block: a subshell runs the commands."""
        variables, exports, folder = dict(self.values.variables), dict(self.exports), self.folder
        with suppress(_End):
            yield
        self.values.variables, self.exports, self.folder = variables, exports, folder

    # ------------------------------------------------------------------------------------------ simple commands

    def _assign(self, word: str, line: int, *, exported: bool = False) -> None:
        """Evaluate `NAME=value`, `NAME+=value` or `NAME=(words)`."""
        match = ASSIGNMENT.match(word)
        assert match is not None
        name, adds, raw = match[1], bool(match[2]), word[match.end() :]
        hosts = len(self.job.hosts)
        value: str | list[str]
        if raw.startswith("("):
            inner = tokens_of(raw[1:-1], str(self.path), line)
            value = self.values.words([token.text for token in inner if token.is_word], line)
        else:
            value = self.values.text(raw, line)
        before = self.values.variables.get(name)
        if adds and isinstance(before, str) and isinstance(value, str):
            value = before + value
        elif adds and isinstance(before, list) and isinstance(value, list):
            value = [*before, *value]
        uncertain = isinstance(value, str) and (is_unknown(value) or len(self.job.hosts) > hosts)
        if uncertain and self.environment.get(name):
            value = self.environment[name]
            self.job.from_environment[name] = line
            del self.job.hosts[hosts:]
        if self.doubt is not None and before != value:
            value = unknown("i", self.doubt)
        self.values.set(name, value, line)
        if (exported or name in self.exports) and isinstance(value, str):
            self.exports[name] = value

    def _simple(self, tokens: Sequence[Token]) -> bool | None:
        line = tokens[0].line
        if tokens[0].text == "[[":
            self.values.absent = ""
            raws = [token.text for token in tokens[1:-1]]
            return status_of_test(self.values, raws, line, self.folder, double=True)
        raws = [
            token.text
            for before, token in zip([None, *tokens], tokens, strict=False)
            if token.is_word and not (before is not None and before.redirects)
        ]
        count = next((at for at, raw in enumerate(raws) if not ASSIGNMENT.match(raw)), len(raws))
        assignments, raws = raws[:count], raws[count:]
        if not raws:
            for assignment in assignments:
                self._assign(assignment, line)
            return None if any("$(" in one or "`" in one for one in assignments) else True
        if raws[0] in _DECLARE:
            return self._declare(raws, line)
        unset = dict(self.values.unset)
        words = [word for word in self.values.words(raws, line) if word != "\\"]
        name = words[0] if words else ":"
        if name in ("[", "test"):
            self.values.absent = ""
            return status_of_test(self.values, words[1 : -1 if name == "[" else None], line, self.folder)
        if self._launch(words, line, assignments, {k: v for k, v in self.values.unset.items() if k not in unset}):
            return None
        return self._builtin(name, words[1:], line)

    def _declare(self, raws: Sequence[str], line: int) -> bool:
        exported = raws[0] == "export"
        for raw in raws[1:]:
            exported = exported or (raw.startswith("-") and "x" in raw)
            if ASSIGNMENT.match(raw):
                self._assign(raw, line, exported=exported)
            value = self.values.variables.get(raw)
            if exported and isinstance(value, str):
                self.exports[raw] = value
        return True

    def _builtin(self, name: str, words: list[str], line: int) -> bool | None:
        """Evaluate a builtin of the shell. Other programs are not run, and their status is unknown."""
        text = " ".join(words)
        if name in ("true", ":", "set", "echo", "shift", "trap", "ulimit", "alias", "wait"):
            if name == "echo" and self.printed is not None:
                self.printed.append(text)
            return True
        if name == "false":
            return False
        if name in ("exit", "return"):
            if name == "exit" and self.values.absent:  # the file may be missing only on this machine: do not exit
                self.job.absent.append((line, self.values.absent))
            elif self.doubt is None:
                raise _End(line)
        elif name in ("read", "mapfile", "readarray", "let", "unset"):
            for word in words:
                if match := re.match(r"[A-Za-z_]\w*", word):
                    self.values.set(match[0], unknown("c", line), line)
                    if name == "unset" and self.doubt is None:
                        self.values.variables.pop(match[0], None)
        elif name == "eval" and not is_unknown(text):
            return self._nested(text, line)
        elif name in ("source", ".", "eval", "bash", "sh"):
            is_environment = name in ("source", ".") and words and _ENVIRONMENT_FILES.fullmatch(Path(words[0]).name)
            if not is_environment and (words or name in ("bash", "sh")):  # `source` without a file name reads a pipe
                command_text = re.sub("\x00[^\x00]*\x00", "(output of a command)", f"{name} {text}".strip())[:200]
                self.job.unread.append((line, command_text, "its effects are unknown"))
        elif name == "cd":
            return self._change_folder(words, line)
        elif self.printed is not None:
            self._print(name, words)
        return None

    def _change_folder(self, words: list[str], line: int) -> bool | None:
        target = words[-1] if words else ""
        if is_unknown(target) or target in ("", "-") or self.doubt is not None:
            if self.printed is None:
                self.job.unread.append((line, "cd", "relative paths after it begin in a folder that is not known"))
            else:
                self.printed.append("\x00")
            return None
        self.folder = Path(os.path.normpath(self.folder / target))
        return True

    def _print(self, name: str, words: list[str]) -> None:
        """Store the output of pwd, dirname, basename, readlink and realpath. Output of other programs is unknown."""
        assert self.printed is not None
        words = words[1:] if words[:1] == ["--"] else words
        last = words[-1] if words else ""
        if name == "pwd":
            self.printed.append(str(self.folder))
        elif name == "dirname" and len(words) == 1:
            self.printed.append(os.path.dirname(last) or ".")
        elif name == "basename" and 1 <= len(words) <= 2:
            self.printed.append(os.path.basename(words[0]).removesuffix(last if len(words) == 2 else ""))
        elif (name == "readlink" and words[:-1] == ["-f"]) or (name == "realpath" and len(words) == 1):
            self.printed.append(os.path.realpath(self.folder / last))
        else:
            self.printed.append("\x00")

    def _output(self, text: str, line: int) -> str:
        """Return the output of a command substitution; a marker if it is unknown."""
        if counted := _COUNTED.fullmatch(text.strip()):
            return self._lines(counted["file"], line)
        outer, self.printed, self.branches = (self.printed, self.branches, self.calls), [], []
        try:
            with self._own_shell():
                self._nested(text, line)
            printed = "\n".join(self.printed)
        except TesseraError:
            printed = "\x00"
        finally:
            self.printed, self.branches, self.calls = outer
        return unknown("c", line) if is_unknown(printed) or not printed else printed

    def _lines(self, word: str, line: int) -> str:
        """Return the number of lines of a file. For a missing host file, return the assumed number of machines."""
        name = self.values.text(word, line)
        if is_unknown(name):
            return unknown("c", line)
        file = self.folder / name
        with suppress(OSError):
            if file.is_file() and file.stat().st_size <= MAX_BYTES:
                return str(file.read_bytes().count(b"\n"))
        if "host" not in file.name and "node" not in file.name:
            return unknown("c", line)
        self.job.hosts.append((line, name))
        return str(self.machines)

    def _nested(self, text: str, line: int) -> bool | None:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise unreadable("commands are nested too deeply", self.where(line))
        status = self.run(tokens_of(text, str(self.path), line))
        self.calls -= 1
        return status

    # ------------------------------------------------------------------------------------------ launches

    def _launch(self, words: list[str], line: int, assignments: Sequence[str], unset: Mapping[str, int]) -> bool:
        """Add the command to the launches if it starts a Python file; return whether it does."""
        begin = 0
        if words and words[0] in _WRAPPERS:
            begin = next((at for at, word in enumerate(words) if Path(word).name in LAUNCHERS), 0)
        words = words[begin:]
        if not words or Path(words[0]).name not in LAUNCHERS or self.printed is not None:
            return False
        at = next((position for position, word in enumerate(words) if word.endswith(".py")), None)
        if at is None:
            if Path(words[0]).name == "torchrun" and len(words) > 1 and not words[1].endswith(("help", "version")):
                raise TesseraError(
                    "the torchrun command names no Python file to start",
                    where=self.where(line),
                    fix="write torchrun ... pretrain_vlm.py ...",
                    code="job.script-starts-nothing",
                )
            return False
        if self.doubt is not None:
            refuse_unknown(unknown("i", self.doubt), f"whether line {line} starts the job", str(self.path))
        if self.folder != Path.cwd():
            raise TesseraError(
                f"the script changes to {self.folder} before it starts the job",
                where=self.where(line),
                fix=f"remove the cd from the script, and run tessera migrate in {self.folder}",
                code="job.script-folder",
            )
        for word in words[at:]:
            refuse_unknown(word, "a flag", str(self.path))
        named = {raw.partition("=")[0]: self.values.text(raw.partition("=")[2], line) for raw in assignments}
        exports = {name: value for name, value in {**self.exports, **named}.items() if not is_unknown(value)}
        self.job.launches.append(Launch(self.path, line, words[:at], words[at], words[at + 1 :], exports))
        self.job.unset |= unset
        return True
