"""How a model is asked to transcribe a recording."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from tessera.errors import TesseraError


@runtime_checkable
class Transcriber(Protocol):
    """Declare the method of a processor whose model is trained to transcribe, and is asked in words of its own."""

    def transcription_instruction(self, language: str | None, prompt: str | None, timestamps: bool) -> str:
        """Return the text of the user beside the recording. The arguments are those of the function below."""
        ...


def transcription_instruction(processor: object, language: str | None, prompt: str | None, timestamps: bool) -> str:
    """Return the text of the user beside a recording that is to be transcribed.

    `prompt`: the user's own text. `timestamps`: the transcript needs time stamps such as <|1.52|>, in seconds.
    """
    if isinstance(processor, Transcriber):
        return processor.transcription_instruction(language, prompt, timestamps)
    if timestamps:
        raise TesseraError(
            "this model writes no time stamps", fix="ask for json or text", code="generation.no-time-stamps"
        )
    return prompt or "Transcribe the speech." + (f" The language is {language}." if language else "")
