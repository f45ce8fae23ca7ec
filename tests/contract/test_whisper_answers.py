"""Transcripts of Whisper beside those of transformers' own `generate`: the same tokens, with every restriction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from typer.testing import CliRunner
from whisper_cases import END, RATE, SECONDS, START, extractor, pair, sounds, write_tokenizer_files

import tessera
from tessera.cli.main import app
from tessera.engine.request import GREEDY
from tessera.inference.own_generation import OwnGeneration
from tests.errors import raises
from tests.toys import speech
from tests.toys.audio_folder import audio_folder

NEW = 24
SUPPRESSED, FIRST = list(range(3, 40)), [50, 51, END]
NUMBERS = [0, *(pytest.param(number, marks=[pytest.mark.slow]) for number in (1, 3))]
PROMPT = {"language": "de", "task": "translate"}


def folder_of(tmp_path: Path, number: int, **generation: Any) -> Path:
    """A folder with random weights that transformers has written, and settings of what may be generated."""
    _, config, reference, _ = pair(number)
    reference.save_pretrained(tmp_path)
    write_tokenizer_files(tmp_path, config)
    ids = {name: START + at for at, name in enumerate(["<|en|>", "<|de|>", "translate", "transcribe"], 1)}
    settings = {
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "no_timestamps_token_id": START + 8,
        "is_multilingual": True,
        "lang_to_id": {name: id for name, id in ids.items() if name.startswith("<")},
        "task_to_id": {name: id for name, id in ids.items() if not name.startswith("<")},
        **generation,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return tmp_path


def our_tokens(folder: Path, clips: list[np.ndarray], **options: Any) -> tuple[list[list[int]], list[str]]:
    model, processor = tessera.load(folder, processor={**PROMPT, **options})
    talks = [[{"role": "user", "content": [{"type": "audio", "audio": clip}]}] for clip in clips]
    batch, inner = processor(talks), processor.processor
    assert model.spec.generate is not None
    tokens = OwnGeneration(model.module, model.spec.generate).answer(
        batch, max_new_tokens=NEW, stop_tokens=inner.stop_tokens, sampling=GREEDY
    )
    return tokens, [inner.decode(row) for row in tokens]


def their_tokens(folder: Path, clips: list[np.ndarray], **options: Any) -> list[list[int]]:
    reference = transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    config: Any = tessera.load(folder)[0].config
    longest = max(map(len, clips)) > SECONDS * RATE
    how = {"truncation": False, "padding": "longest"} if longest else {}
    features = extractor(config)(clips, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **how)
    out = reference.generate(**features, max_new_tokens=NEW, **{**PROMPT, **options})
    return [[token for token in row if token != END] for row in out.tolist()]


def without_end(rows: list[list[int]]) -> list[list[int]]:
    return [[token for token in row if token != END] for row in rows]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "settings",
    [pytest.param({}, marks=pytest.mark.slow), {"suppress_tokens": SUPPRESSED, "begin_suppress_tokens": FIRST}],
    ids=["all tokens", "suppressed"],
)
def test_transcripts_are_those_of_transformers(number: int, settings: dict[str, Any], tmp_path: Path) -> None:
    folder, clips = folder_of(tmp_path, number, **settings), sounds(number, 3)
    ours, _ = our_tokens(folder, clips)
    assert without_end(ours) == their_tokens(folder, clips)
    assert ours == [our_tokens(folder, [clip])[0][0] for clip in clips], "a batch changes no transcript"
    if settings:
        assert not {token for row in ours for token in row}.intersection(SUPPRESSED)


@pytest.mark.parametrize("number", NUMBERS)
def test_time_stamps_are_those_of_transformers(number: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, number, max_initial_timestamp_index=10, suppress_tokens=SUPPRESSED)
    clips = sounds(number, 3)
    ours, texts = our_tokens(folder, clips, timestamps=True)
    assert without_end(ours) == their_tokens(folder, clips, return_timestamps=True)
    assert all(text.startswith("<|0.") for text in texts)


@pytest.mark.parametrize("number", NUMBERS)
def test_long_recordings_are_those_of_transformers(number: int, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, number, max_initial_timestamp_index=10, suppress_tokens=SUPPRESSED)
    (clip,) = sounds(number, 1, seconds=3.33)
    ours, _ = our_tokens(folder, [clip])
    assert without_end(ours) == their_tokens(folder, [clip], return_timestamps=True)
    assert END in ours[0], "several windows"


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("seconds", [pytest.param(2.5, marks=[pytest.mark.slow]), 1], ids=["windows", "one window"])
def test_detected_languages_are_those_of_transformers(number: int, seconds: float, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, number, max_initial_timestamp_index=10, suppress_tokens=SUPPRESSED)
    clips, timed = sounds(number, 2, seconds), seconds > SECONDS
    reference = transformers.WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager")
    for clip in clips:
        (ours,), (text,) = our_tokens(folder, [clip], language=None, task="transcribe")
        mel = extractor(tessera.load(folder)[0].config)([clip], sampling_rate=RATE, return_tensors="pt")
        (expected,) = reference.detect_language(mel.input_features).tolist()
        assert ours[0] == expected in (START + 1, START + 2)
        how = {"language": None, "task": "transcribe", "return_timestamps": timed}
        assert without_end([ours[1:]]) == their_tokens(folder, [clip], **how)
        assert "<|" not in text, "the language is not part of the transcript"


@pytest.mark.slow
def test_each_recording_has_its_own_language(tmp_path: Path) -> None:
    """Rows whose prompt names a language keep it; the languages of the others do not depend on their neighbours."""
    folder = folder_of(tmp_path, 0, suppress_tokens=SUPPRESSED)
    clips = [*sounds(0, 3), *sounds(5, 2, 2.2)]
    both, _ = our_tokens(folder, clips, language=None)
    assert both == [our_tokens(folder, [clip], language=None)[0][0] for clip in clips]
    assert not {START + 1, START + 2}.intersection(our_tokens(folder, clips, language="German")[0][0])
    model, processor = tessera.load(folder)
    talks = [
        [{"role": "user", "content": [{"type": "audio", "audio": clip}, {"type": "text", "text": text}]}]
        for clip, text in zip(clips, ("de", "", "en", "", ""), strict=True)
    ]
    rows = OwnGeneration(model.module, model.spec.generate).answer(
        processor(talks), max_new_tokens=3, stop_tokens={END}, sampling=GREEDY
    )
    assert [bool(row) and row[0] in (START + 1, START + 2) for row in rows] == [False, True, False, True, True]


def test_the_language_of_generation_config_is_not_detected(tmp_path: Path) -> None:
    folder, (clip,) = folder_of(tmp_path, 0, language="German"), sounds(0, 1)
    assert our_tokens(folder, [clip], language=None) == our_tokens(folder, [clip])


def test_time_stamps_of_later_windows_count_from_the_beginning(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, 0)
    processor: Any = tessera.load(folder, processor={"timestamps": True})[1].processor
    first = START + 9  # 0.00
    words, end = [97, 98], [99]
    # The first window ends in a pair at 0.80, so the second begins there; a single stamp ends the second.
    tokens = [first, *words, first + 40, first + 40, END, first + 5, *end, first + 20]
    texts = [processor.encoder.decode(part) for part in (words, end)]
    assert processor.decode(tokens) == f"<|0.00|>{texts[0]}<|0.80|><|0.80|><|0.90|>{texts[1]}<|1.20|>"


@pytest.mark.parametrize("seconds", [0.7, pytest.param(2.2, marks=pytest.mark.slow)], ids=["one window", "windows"])
def test_a_recording_is_transcribed_without_a_question(seconds: float, tmp_path: Path) -> None:
    pytest.importorskip("av")
    folder = folder_of(tmp_path / "model", 0, suppress_tokens=SUPPRESSED)
    (clip,) = sounds(0, 1, seconds)
    (tmp_path / "q.wav").write_bytes(speech.wav(clip, RATE, -32))
    model, processor = tessera.load(folder)
    ask = [{"role": "user", "content": [{"type": "audio", "audio": clip}]}]
    expected = model.generate(processor(ask), NEW)
    assert isinstance(expected, str)
    pieces: list[str] = []
    recordings = [tmp_path / "q.wav"]
    answer = tessera.generate(folder, audios=recordings, max_new_tokens=NEW, device="cpu", on_text=pieces.append)
    assert pieces == [answer] == [expected.strip()]
    words = ["generate", str(folder), "--audio", str(tmp_path / "q.wav"), "--max-new-tokens", str(NEW)]
    result = CliRunner().invoke(app, [*words, "--device", "cpu"], catch_exceptions=False)
    assert result.stdout == answer + "\n"


def test_other_models_need_a_question(tmp_path: Path) -> None:
    folder = audio_folder(tmp_path / "chat")
    (tmp_path / "q.wav").write_bytes(speech.wav(speech.steps(1, RATE), RATE))
    for path, recordings in ((folder, [tmp_path / "q.wav"]), (folder_of(tmp_path / "whisper", 0), [])):
        with raises("generation.no-prompt", "question"):
            tessera.generate(path, audios=recordings, device="cpu")
