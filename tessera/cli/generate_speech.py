"""The part of the command `tessera generate` for models that speak."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tessera.cli.run import check_output
from tessera.errors import TesseraError

if TYPE_CHECKING:
    from tessera.inference.speech import Speech


def speak(options: Mapping[str, Any], adapters: Mapping[Path, float]) -> None:
    """Write the speech of a text to --out. `options`: the options that the user set, by argument name."""
    if "question" not in options:
        raise TesseraError(
            "the command needs a text to speak",
            where="tessera generate",
            fix='tessera generate MODEL "Good evening." -o hello.wav',
            code="generation.no-prompt",
        )
    out = _output(options)
    recordings, transcripts = options.get("audio", []), options.get("transcript", [])
    if len(recordings) != len(transcripts):
        raise TesseraError(
            f"{len(recordings)} recordings of the voice have {len(transcripts)} transcripts",
            where="--transcript",
            fix='write what is said after each recording: --audio a.wav --transcript "Good morning."',
            code="generation.recording-without-transcript",
        )
    from tessera.inference.speech import SpeechSampling, load_speaker
    from tessera.runtime import log

    names = ("temperature", "top_k", "top_p", "seed", "max_seconds")
    chosen = SpeechSampling(**{name: options[name] for name in names if name in options})
    chosen.sampling(1.0)  # raise for wrong values before the model is loaded
    with log.on_screen():
        speaker = load_speaker(options["model"], **_loading(options), adapters=adapters)
        speech = speaker.say(
            options["question"],
            speaker=options.get("speaker", ""),
            examples=[(str(path), words) for path, words in zip(recordings, transcripts, strict=True)],
            sampling=chosen,
        )
    _write(speech, out)


def speak_answer(options: Mapping[str, Any], adapters: Mapping[Path, float]) -> None:
    """Answer a question, print the answer, and write its speech to --out."""
    if "question" not in options:
        raise TesseraError(
            "the model needs a question",
            where="tessera generate",
            fix='tessera generate MODEL "What is it?" -o answer.wav',
            code="generation.no-prompt",
        )
    out = _output(options)
    from tessera.inference.sampling_options import sampling_of
    from tessera.inference.speech import SpeechSampling
    from tessera.inference.spoken_answers import load_answer_speaker
    from tessera.runtime import log

    limits = {"max_seconds": options["max_seconds"]} if "max_seconds" in options else {}
    sampling = SpeechSampling(seed=options["seed"], **limits)
    of_text = {name: options[name] for name in ("temperature", "top_k", "top_p", "seed") if name in options}
    chosen = sampling_of(**of_text)  # raise for wrong values before the model is loaded
    with log.on_screen():
        speaker = load_answer_speaker(options["model"], **_loading(options), adapters=adapters)
        answer = speaker.ask(
            options["question"],
            images=options.get("image", []),
            videos=options.get("video", []),
            audios=options.get("audio", []),
            sampling=chosen,
            speaker=options.get("speaker", ""),
            speech=sampling,
            on_text=lambda text: typer.echo(text, nl=False),
            **{name: options[name] for name in ("system", "max_new_tokens") if name in options},
        )
    typer.echo()
    _write(answer.speech, out)


def _loading(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for loading the model."""
    return {name: options[name] for name in ("device", "codec", "family", "trust") if name in options}


def _output(options: Mapping[str, Any]) -> Path:
    """Return --out. Raise unless it is a WAV file that can be written."""
    out: Path | None = options.get("out")
    if out is None or out.suffix.lower() != ".wav":
        raise TesseraError(
            "speech is written to a WAV file" if out is None else f"speech is written to a WAV file, not to {out.name}",
            where="--out",
            fix="-o hello.wav",
            code="generation.no-output-file",
        )
    check_output(out, "--out")
    return out


def _write(speech: Speech, out: Path) -> None:
    from tessera.runtime.files import replace_file

    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, speech.wav())
    ending = "" if speech.complete else ", where it was cut off: raise --max-seconds"
    typer.echo(f"wrote {out}: {len(speech.sound) / speech.rate:.2f} s{ending}")
