"""Read the launch script of a job without running it, and find the command that starts the ranks.

Assignments, arithmetic, `if`, `case`, loops over words, functions and tests of files are followed as bash would follow
them in this folder, without arguments. Programs are not run: what depends on one is not known, and it is an error
where a flag, or whether the job starts at all, depends on it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.shell.conditions import arithmetic_status, matches, status_of_test
from tessera_compat.mindspeed_mm.shell.launch import Launch, ShellJob
from tessera_compat.mindspeed_mm.shell.syntax import (
    Assignment,
    Block,
    Choice,
    Command,
    Function,
    Group,
    If,
    Loop,
    Parser,
    Simple,
    unreadable,
)
from tessera_compat.mindspeed_mm.shell.values import Values, is_unknown, refuse_unknown, unknown

MAX_BYTES = 1 << 18
MAX_COMMANDS = 5_000  # commands that are looked at, those of loops each time
MAX_CALLS = 20  # of functions in functions and commands in commands
LAUNCHERS = ("torchrun", "msrun", "accelerate", "python", "python3")
_WRAPPERS = {"exec", "nohup", "time", "env", "command", "sudo", "numactl", "taskset", "stdbuf", "timeout", "nice"}
_DECLARE = ("export", "local", "readonly", "declare", "typeset")
_ENVIRONMENT_FILES = re.compile(
    r"set_env\.sh|env_npu\.sh|setvars\.sh|activate|\.bashrc|\.bash_profile|\.profile|profile"
)

_COUNTED = re.compile(r"(?:cat (?=.*wc)|wc -l *<? *)(?P<file>[^\s|<>;&]+)( *\| *wc -l)?")  # lines of a file


class _End(Exception):
    """Raised where the script, or a function of it, ends."""

    def __init__(self, line: int, function: bool) -> None:
        self.line, self.function = line, function


def read_shell(path: Path, environment: Mapping[str, str] | None = None, *, machines: int = 1) -> ShellJob:
    """Return the launch of a script.

    `environment`: variables that are set before the script begins; they also replace values that the script takes from
    the output of a command. `machines`: number of lines of a host file that is not on this machine.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TesseraError("too large to be a launch script", where=str(path), code="job.script-too-large")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TesseraError(f"cannot be read: {error}", where=str(path), code="job.file-unreadable") from None
    if "\x00" in text:
        raise TesseraError("not a text file", where=str(path), code="job.file-unreadable")
    reader = _Reader(path, environment or {}, machines)
    block, ended = Parser(text.replace("\r\n", "\n"), str(path)).parse(), None
    try:
        reader.run(block)
    except _End as end:
        ended = end
    if not reader.job.launches:
        raise TesseraError(
            "the script ends here, before it starts anything" if ended else "the script starts no entry point",
            where=f"{path}:{ended.line}" if ended else str(path),
            allowed=[f"{launcher} ... pretrain_vlm.py ..." for launcher in LAUNCHERS[:2]],
            fix="make the condition before it hold on this machine"
            if ended
            else "a line has to start torchrun with a Python file",
            code="job.script-ends-early" if ended else "job.script-starts-nothing",
        )
    return reader.job


class _Reader:
    """Follow the commands of a script. A status is True, False, or None if it depends on running a program."""

    def __init__(self, path: Path, environment: Mapping[str, str], machines: int) -> None:
        self.path, self.job = path, ShellJob()
        self.environment, self.machines = environment, machines
        self.values = Values(environment, str(path), self._output)
        self.exports: dict[str, str] = {}
        self.functions: dict[str, Block] = {}
        self.folder = Path.cwd()
        self.commands = self.calls = 0
        self.doubt: list[int] = []  # lines of the conditions around this command that cannot be decided
        self.printed: list[str] | None = None  # inside of a command substitution

    def where(self, line: int) -> str:
        return f"{self.path}:{line}"

    # ------------------------------------------------------------------------------------------ compound commands

    def run(self, block: Block) -> bool | None:
        """Follow commands in a row and return the status of the last one."""
        status: bool | None = True
        for number, (command, join, piped) in enumerate(zip(block.items, block.joins, block.piped, strict=True)):
            if (join == "&&" and status is False) or (join == "||" and status is True):
                continue
            # After `program &&` a command is followed as if the program had succeeded, except for its assignments.
            undecided = join != ";" and status is None
            with self._doubting(command.line, undecided and (join == "||" or not self._launches(command))):
                if piped:
                    with self._own_shell():
                        status = self._command(command)
                    status = None
                else:
                    status = self._command(command)
            if block.negated[number] and status is not None:
                status = not status
        return status

    @contextmanager
    def _doubting(self, line: int, doubtful: bool) -> Iterator[None]:
        self.doubt += [line] * doubtful
        yield
        del self.doubt[len(self.doubt) - doubtful :]

    @contextmanager
    def _own_shell(self) -> Iterator[None]:
        """Forget assignments and the folder at the end, as after `( ... )`."""
        variables, exports, folder = dict(self.values.variables), dict(self.exports), self.folder
        with suppress(_End):
            yield
        self.values.variables, self.exports, self.folder = variables, exports, folder

    def _command(self, command: Command) -> bool | None:
        self.commands += 1
        if self.commands > MAX_COMMANDS:
            raise unreadable("it has too many commands, or a loop that does not end", self.where(command.line))
        if isinstance(command, Simple):
            return self._simple(command)
        if isinstance(command, Group):
            if not command.inside:
                return self.run(command.body)
            with self._own_shell():
                return self.run(command.body)
            return None
        if isinstance(command, Function):
            self.functions[command.name] = command.body
            return True
        if isinstance(command, If):
            return self._if(command)
        return self._case(command) if isinstance(command, Choice) else self._loop(command)

    def _if(self, command: If) -> bool | None:
        undecided = False
        for condition, body in command.branches:
            status = True if condition is None else self.run(condition)
            if status is False:
                continue
            undecided = undecided or status is None
            with self._doubting(command.line, undecided):
                result = self.run(body)
            if status:
                return None if undecided else result
        return None if undecided else True

    def _case(self, command: Choice) -> bool | None:
        word, undecided = self.values.text(command.word, command.line), False
        for patterns, body in command.choices:
            texts = [self.values.text(one, command.line) for one in patterns]
            decided = not is_unknown(word) and not any(map(is_unknown, texts))
            if decided and not any(matches(word, text) for text in texts):
                continue
            undecided = undecided or not decided
            with self._doubting(command.line, undecided):
                self.run(body)
            if decided:
                break
        return None if undecided else True

    def _loop(self, loop: Loop) -> bool | None:
        if loop.condition is None and loop.words is not None:
            words = self.values.words(loop.words, loop.line)
            if not any(is_unknown(word) or re.search(r"[*?]|\{.*(,|\.\.).*\}", word) for word in words):
                for word in words:
                    self.values.set(loop.name, word, loop.line)
                    self.run(loop.body)
                return True
        while loop.condition is not None:
            status = self.run(loop.condition)
            if status is None:
                break
            if status is loop.until:
                return True
            self.run(loop.body)
        with self._doubting(loop.line, True):
            if loop.name.isidentifier():
                self._assign(Assignment(loop.name, False, "$?"), loop.line)
            self.run(loop.body)
        return None

    # ------------------------------------------------------------------------------------------ simple commands

    def _assign(self, assignment: Assignment, line: int, *, exported: bool = False) -> None:
        before = self.values.variables.get(assignment.name, [] if isinstance(assignment.value, list) else "")
        hosts = len(self.job.hosts)
        value: str | list[str]
        if isinstance(assignment.value, list):
            value = self.values.words(assignment.value, line)
            value = [*before, *value] if assignment.adds and isinstance(before, list) else value
        else:
            value = self.values.text(assignment.value, line)
            value = before + value if assignment.adds and isinstance(before, str) else value
        if (
            isinstance(value, str)
            and (is_unknown(value) or len(self.job.hosts) > hosts)
            and self._is_in_environment(assignment.name)
        ):
            value = self.environment[assignment.name]
            self.job.from_environment[assignment.name] = line
            del self.job.hosts[hosts:]
        if self.doubt and self.values.variables.get(assignment.name) != value:
            value = unknown("i", self.doubt[-1])
        self.values.set(assignment.name, value, line)
        if (exported or assignment.name in self.exports) and isinstance(value, str):
            self.exports[assignment.name] = value

    def _is_in_environment(self, name: str) -> bool:
        return bool(self.environment.get(name))

    def _simple(self, command: Simple) -> bool | None:
        line = command.line
        if not command.words:
            for assignment in command.assignments:
                self._assign(assignment, line)
            return (
                None
                if any(
                    "$(" in str(assignment.value) or "`" in str(assignment.value) for assignment in command.assignments
                )
                else True
            )
        first = command.words[0]
        if first.startswith("(("):
            return arithmetic_status(self.values, first[2:-2], line)
        if first == "[[":
            self.values.absent = ""
            return status_of_test(self.values, command.words[1:-1], line, self.folder, double=True)
        if first in _DECLARE:
            return self._declare(command)
        unset = dict(self.values.unset)
        words = [word for word in self.values.words(command.words, line) if word != "\\"]
        name = words[0] if words else ":"
        if name in ("[", "test"):
            self.values.absent = ""
            return status_of_test(self.values, words[1 : -1 if name == "[" else None], line, self.folder)
        if name in self.functions:
            return self._call(name, words[1:], line)
        if self._launch(words, command, {k: v for k, v in self.values.unset.items() if k not in unset}):
            return None
        return self._builtin(name, words[1:], line)

    def _declare(self, command: Simple) -> bool:
        exported = command.words[0] == "export"
        for raw in command.words[1:]:
            inner = Parser(raw, str(self.path), command.line).parse().items
            declaration = inner[0] if len(inner) == 1 and isinstance(inner[0], Simple) else Simple(command.line)
            exported = exported or (raw.startswith("-") and "x" in raw)
            for assignment in declaration.assignments:
                self._assign(assignment, command.line, exported=exported)
            value = self.values.variables.get(raw)
            if exported and isinstance(value, str):
                self.exports[raw] = value
        return True

    def _builtin(self, name: str, words: list[str], line: int) -> bool | None:
        """Follow a builtin of the shell. Other programs are not run, and their status is unknown."""
        text = " ".join(words)
        if name in ("true", ":", "set", "echo", "shift", "trap", "ulimit", "alias", "wait"):
            if name == "echo" and self.printed is not None:
                self.printed.append(text)
            return True
        if name in ("false", "getopts"):  # a script without arguments has no options
            return False
        if name in ("exit", "return"):
            if name == "exit" and self.values.absent:  # where the job runs, the file is there
                self.job.absent.append((line, self.values.absent))
            elif not self.doubt:
                raise _End(line, name == "return")
        elif name in ("read", "mapfile", "readarray", "let", "unset"):
            for word in words:
                if match := re.match(r"[A-Za-z_]\w*", word):
                    self.values.set(match[0], unknown("c", line), line)
                    if name == "unset" and not self.doubt:
                        self.values.variables.pop(match[0], None)
        elif name == "eval" and not is_unknown(text):
            return self._nested(text, line)
        elif name in ("source", ".", "eval", "bash", "sh"):
            is_environment = name in ("source", ".") and words and _ENVIRONMENT_FILES.fullmatch(Path(words[0]).name)
            if not is_environment and (words or name in ("bash", "sh")):  # without a word it reads a pipe
                command_text = re.sub("\x00[^\x00]*\x00", "(output of a command)", f"{name} {text}".strip())[:200]
                self.job.unread.append((line, command_text, "its effects are unknown"))
        elif name == "cd":
            return self._change_folder(words, line)
        elif self.printed is not None:
            self._print(name, words)
        return None

    def _change_folder(self, words: list[str], line: int) -> bool | None:
        target = words[-1] if words else ""
        if is_unknown(target) or target in ("", "-") or self.doubt:
            if self.printed is None:
                self.job.unread.append((line, "cd", "relative paths after it begin in a folder that is not known"))
            else:
                self.printed.append("\x00")
            return None
        self.folder = Path(os.path.normpath(self.folder / target))
        return True

    def _print(self, name: str, words: list[str]) -> None:
        """Store the output of a few programs that only transform names; other output is unknown."""
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
        """Return the output of a command substitution that needs no program."""
        if counted := _COUNTED.fullmatch(text.strip()):
            return self._lines(counted["file"], line)
        outer, self.printed, self.doubt = (self.printed, self.doubt, self.calls), [], []
        try:
            with self._own_shell():
                self._nested(text, line)
            printed = "\n".join(self.printed)
        except TesseraError:
            printed = "\x00"
        finally:
            self.printed, self.doubt, self.calls = outer
        return unknown("c", line) if is_unknown(printed) or not printed else printed

    def _lines(self, word: str, line: int) -> str:
        """Return the number of lines of a file; for a host file on another machine, the number of the caller."""
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
        status = self.run(Parser(text, str(self.path), line).parse())
        self.calls -= 1
        return status

    def _call(self, name: str, arguments: list[str], line: int) -> bool | None:
        self.calls += 1
        if self.calls > MAX_CALLS:
            raise unreadable(f"the function {name} calls itself too often", self.where(line))
        outer, self.values.arguments = self.values.arguments, arguments
        status: bool | None = None
        try:
            status = self.run(self.functions[name])
        except _End as end:
            if not end.function:
                raise
        self.values.arguments = outer
        self.calls -= 1
        return status

    # ------------------------------------------------------------------------------------------ launches

    def _launches(self, command: Command) -> bool:
        return isinstance(command, Simple) and bool(command.words) and Path(command.words[0]).name in LAUNCHERS

    def _launch(self, words: list[str], command: Simple, unset: Mapping[str, int]) -> bool:
        """Keep a command that starts a Python file; return whether it is one."""
        begin = 0
        if words and words[0] in _WRAPPERS:
            begin = next((at for at, word in enumerate(words) if Path(word).name in LAUNCHERS), 0)
        words = words[begin:]
        if not words or Path(words[0]).name not in LAUNCHERS or self.printed is not None:
            return False
        where = self.where(command.line)
        at = next((position for position, word in enumerate(words) if word.endswith(".py")), None)
        if at is None:
            if Path(words[0]).name == "torchrun" and len(words) > 1 and not words[1].endswith(("help", "version")):
                raise TesseraError(
                    "torchrun starts no Python file",
                    where=where,
                    fix="torchrun ... pretrain_vlm.py ...",
                    code="job.script-starts-nothing",
                )
            return False
        if self.doubt:
            refuse_unknown(unknown("i", self.doubt[-1]), f"whether line {command.line} starts the job", str(self.path))
        if self.folder != Path.cwd():
            raise TesseraError(
                f"the script changes to {self.folder} before it starts the job",
                where=where,
                fix=f"cd {self.folder}, and begin there",
                code="job.script-folder",
            )
        for word in words[at:]:
            refuse_unknown(word, "a flag", str(self.path))
        assigned = {one.name: self.values.text(str(one.value), command.line) for one in command.assignments}
        exports = {name: value for name, value in {**self.exports, **assigned}.items() if not is_unknown(value)}
        self.job.launches.append(Launch(self.path, command.line, words[:at], words[at], words[at + 1 :], exports))
        self.job.unset |= unset
        return True
