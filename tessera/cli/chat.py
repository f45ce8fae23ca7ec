"""The command `tessera chat MODEL`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tessera.cli.run import AdapterOption, FamilyOption, StrengthOption, TrustFlag, check_path, parse_strengths
from tessera.errors import TesseraError, nearest

if TYPE_CHECKING:
    from tessera.inference.chat import Chat

HELP = {
    "/image PATH": "add an image to the next question",
    "/video PATH": "add a video to the next question",
    "/audio PATH": "add a recording to the next question; a.wav#t=3,7.5 is a part of it",
    "/system TEXT": "set the system message; without a text, remove it",
    "/undo": "remove the last question and its answer",
    "/clear": "remove all questions and answers",
    "/save FILE": "append the conversation to a .jsonl file, as training reads it",
    "/help": "this list",
    "/exit": "end; so does Ctrl-D",
}
_WORDS = [line.split()[0] for line in HELP]


def chat(
    model: Annotated[Path, typer.Argument(help="run, checkpoint, adapters or Hugging Face folder")],
    system: Annotated[str | None, typer.Option("--system", help="system message")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="limit of the tokens of an answer")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="0: no limit")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="share of probability to sample from")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="seed of sampled answers")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or an accelerator")] = "auto",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="float32, bfloat16 or float16; default: as stored")
    ] = None,
    family: FamilyOption = None,
    trust: TrustFlag = False,
    adapter: AdapterOption = None,
    strength: StrengthOption = None,
) -> None:
    """Chat with a model in the terminal. /image PATH adds an image to the next question, /help lists all commands.

    Without a terminal, each line of standard input is a question.
    """
    check_path(model)
    from tessera.inference.chat import Chat
    from tessera.inference.load import load
    from tessera.inference.sampling_options import sampling_of

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    sampling_of(**sampling)  # type: ignore[arg-type]  # refuse wrong values before the model is loaded
    if max_new_tokens < 1:
        raise TesseraError(
            f"--max-new-tokens must be 1 or more, got {max_new_tokens}",
            where="--max-new-tokens",
            allowed=["1 and above"],
            code="generation.max-tokens-too-small",
        )
    adapters = parse_strengths(adapter, strength)
    loaded, processor = load(model, device, dtype, family=family, trust=trust, adapters=adapters)
    loaded.freeze()
    Terminal(Chat(loaded, processor, system, max_new_tokens, sampling)).run()


@dataclass
class Terminal:
    """Read questions and commands from standard input, and print each answer while it is generated."""

    chat: Chat
    images: list[Path] = field(default_factory=list)  # sent with the next question
    videos: list[Path] = field(default_factory=list)
    audios: list[Path] = field(default_factory=list)

    def run(self) -> None:
        """Answer questions until the input ends."""
        person = sys.stdin.isatty()
        if person:
            with contextlib.suppress(ImportError):  # importing readline adds line editing and history to input()
                import readline  # noqa: F401
            typer.echo("ask, or /help; Ctrl-C stops an answer, Ctrl-D ends", err=True)
        while True:
            try:
                line = input(self._prompt() if person else "").strip()
            except (EOFError, KeyboardInterrupt):
                if person:
                    typer.echo("", err=True)
                return
            try:
                if line in ("/exit", "/quit"):
                    return
                self._take(line)
            except TesseraError as error:
                if not person:
                    raise
                typer.echo(str(error), err=True)  # the conversation goes on after a mistake

    def _prompt(self) -> str:
        count = len(self.images) + len(self.videos) + len(self.audios)
        return f"({count} added) > " if count else "> "

    def _take(self, line: str) -> None:
        if not line:
            return
        if line.startswith("/"):
            word, _, rest = line.partition(" ")
            self._command(word, rest.strip())
            return
        try:
            media = {"images": self.images, "videos": self.videos, "audios": self.audios}
            self.chat.ask(line, **media, on_text=lambda text: typer.echo(text, nl=False))
        except KeyboardInterrupt:
            typer.echo("\n(stopped; the question was removed)", err=True)
            return
        typer.echo("")
        self._forget_media()

    def _command(self, word: str, rest: str) -> None:
        media = {"/image": self.images, "/video": self.videos, "/audio": self.audios}
        if word in media:
            path = Path(rest.strip("'\"")).expanduser()
            file = Path(str(path).partition("#t=")[0]) if word == "/audio" else path
            if not rest or not file.is_file():
                raise TesseraError(
                    f"no such file: {rest or '(no path)'}", where=word, fix=f"{word} PATH", code="media.file-missing"
                )
            media[word].append(path)
        elif word == "/system":
            self.chat.system = rest or None
        elif word == "/undo":
            typer.echo("removed the last turn" if self.chat.undo() else "there is no turn to remove", err=True)
        elif word == "/clear":
            self.chat.clear()
            self._forget_media()
        elif word == "/save":
            self._save(rest)
        elif word == "/help":
            for name, what in HELP.items():
                typer.echo(f"{name:14} {what}", err=True)
        else:
            raise TesseraError(
                f"unknown chat command {word}",
                where="chat",
                allowed=_WORDS,
                nearest=nearest(word, _WORDS),
                code="generation.unknown-chat-command",
            )

    def _forget_media(self) -> None:
        for paths in (self.images, self.videos, self.audios):
            paths.clear()

    def _save(self, name: str) -> None:
        if not name.endswith(".jsonl"):
            raise TesseraError(
                f"conversations are saved to .jsonl files, got {name or 'no file name'!r}",
                where="/save",
                fix="/save FILE.jsonl",
                code="output.not-writable",
            )
        if not self.chat.turns:
            raise TesseraError("the conversation is empty", where="/save", code="generation.nothing-to-save")
        path = Path(name).expanduser()
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"messages": self.chat.plain_messages()}, ensure_ascii=False) + "\n")
        except OSError as error:
            raise TesseraError(
                f"cannot write the file: {error.strerror}", where=str(path), code="output.not-writable"
            ) from None
        typer.echo(f"appended to {path}", err=True)
