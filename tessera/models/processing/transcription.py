"""How a model is asked to transcribe a recording, and what of its answer is the transcript."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from tessera.errors import TesseraError


class Transcript(NamedTuple):
    """Hold a transcript, with its time stamps if it has any, and the language that the answer names, if any."""

    text: str
    language: str | None = None


@runtime_checkable
class Transcriber(Protocol):
    """Declare the methods of a processor whose model is trained to transcribe and has its own prompt format."""

    def transcription_instruction(self, language: str | None, prompt: str | None, timestamps: bool) -> str:
        """Return the text of the user beside a recording. Arguments: see the module's function of this name."""
        ...

    def transcript(self, answer: str) -> Transcript:
        """Return the transcript in an answer."""
        ...


def transcription_instruction(processor: object, language: str | None, prompt: str | None, timestamps: bool) -> str:
    """Return the text of the user beside a recording that is to be transcribed.

    `prompt`: the user's own text. `timestamps`: the transcript needs time stamps such as <|1.52|>, in seconds.
    """
    if isinstance(processor, Transcriber):
        return processor.transcription_instruction(language, prompt, timestamps)
    if timestamps:
        raise no_time_stamps()
    return prompt or "Transcribe the speech." + (f" The language is {language}." if language else "")


def transcript(processor: object, answer: str) -> Transcript:
    """Return the transcript in an answer."""
    return processor.transcript(answer) if isinstance(processor, Transcriber) else Transcript(answer)


def no_time_stamps() -> TesseraError:
    return TesseraError(
        "this model writes no time stamps", fix="ask for json or text", code="generation.no-time-stamps"
    )
