"""The part of the command `tessera generate` for models that speak."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from tessera.cli.run import check_output
from tessera.errors import TesseraError


def speak(options: Mapping[str, Any], adapters: Mapping[Path, float]) -> None:
    """Write the speech of a text to --out. `options`: the options that the user set, by argument name."""
    if "question" not in options:
        raise TesseraError(
            "the command needs a text to speak",
            where="tessera generate",
            fix='tessera generate MODEL "Good evening." -o hello.wav',
            code="generation.no-prompt",
        )
    out = options.get("out")
    if out is None or out.suffix.lower() != ".wav":
        raise TesseraError(
            "speech is written to a WAV file" if out is None else f"speech is written to a WAV file, not to {out.name}",
            where="--out",
            fix="-o hello.wav",
            code="generation.no-output-file",
        )
    check_output(out, "--out")
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
    from tessera.runtime.files import replace_file

    names = ("temperature", "top_k", "top_p", "seed", "max_seconds")
    chosen = SpeechSampling(**{name: options[name] for name in names if name in options})
    chosen.sampling(1.0)  # raise for wrong values before the model is loaded
    with log.on_screen():
        speaker = load_speaker(
            options["model"],
            options["device"],
            codec=options.get("codec"),
            adapters=adapters,
            family=options.get("family"),
            trust=options.get("trust", False),
        )
        speech = speaker.say(
            options["question"],
            speaker=options.get("speaker", ""),
            examples=[(str(path), words) for path, words in zip(recordings, transcripts, strict=True)],
            options=chosen,
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, speech.wav())
    ending = "" if speech.complete else ", where it was cut off: raise --max-seconds"
    typer.echo(f"wrote {out}: {len(speech.sound) / speech.rate:.2f} s{ending}")
