"""Recordings in questions to a model: on the command line, in a chat, and in Python."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tessera
from tessera.cli.chat import Terminal
from tessera.cli.main import app
from tests.errors import raises
from tests.toys import speech
from tests.toys.audio_folder import audio_folder
from tests.toys.media_zoo import tone

pytest.importorskip("av")
RATE = 16_000
QUESTION = "Write down what is said."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio_folder(tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return tessera.load(folder, device="cpu")


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    (tmp_path / "q.wav").write_bytes(speech.wav(speech.steps(3, RATE), RATE))
    return tmp_path / "q.wav"


def test_every_spelling_of_a_recording_gives_the_same_answer(loaded: Any, wav: Path) -> None:
    model, processor = loaded
    second = speech.steps(3, RATE)[RATE : 2 * RATE]
    data = speech.wav(second, RATE, -32)
    encoded = base64.b64encode(data).decode()
    parts: list[dict[str, Any]] = [
        {"type": "audio", "audio": data},
        {"type": "audio", "audio": second},
        {"type": "audio", "audio": {"array": second, "sampling_rate": RATE}},
        {"type": "audio", "path": _write(wav.with_name("second.wav"), data)},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{encoded}"}},
        {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}},
    ]
    answers = set()
    for part in parts:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": QUESTION}]}]
        answers.add(model.generate(processor(messages), 8))
    assert len(answers) == 1
    # Another part of the recording, of 16 bits, is heard as such.
    clip = model.chat(QUESTION, audios=[f"{wav}#t=1,2"], max_new_tokens=8)
    assert clip in answers
    assert model.chat(QUESTION, audios=[f"{wav}#t=0,0.5"], max_new_tokens=8) not in answers
    assert model.chat(QUESTION, max_new_tokens=8) not in answers


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_recordings_that_cannot_be_read(loaded: Any, wav: Path) -> None:
    _, processor = loaded
    bad: list[tuple[Any, str]] = [
        (str(wav), "media.audio-too-long"),
        (f"{wav}#t=2,9", "media.clip-outside"),
        (f"{wav}#t=2,1", "media.bad-clip"),
        (str(wav.with_name("none.wav")), "media.no-such-file"),
        (b"no sound", "media.unreadable-file"),
        ({"array": tone(0.5, RATE), "sampling_rate": 3}, "media.unreadable-file"),
        ({"array": tone(0.5, RATE)}, "media.wrong-array"),
        (3.5, "generation.bad-messages"),
        ({"data": 3, "format": "wav"}, "generation.bad-messages"),
    ]
    for value, code in bad:
        with raises(code):
            processor([{"role": "user", "content": [{"type": "audio", "audio": value}]}])


def test_generate_with_audio(folder: Path, loaded: Any, wav: Path) -> None:
    words = ["generate", str(folder), QUESTION, "--audio", f"{wav}#t=1,2", "--max-new-tokens", "8", "--device", "cpu"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == loaded[0].chat(QUESTION, audios=[f"{wav}#t=1,2"], max_new_tokens=8)


def test_chat_with_audio(
    loaded: Any, wav: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = tessera.inference.chat.Chat(*loaded, max_new_tokens=8)
    saved = wav.with_name("said.jsonl")
    lines = [f"/audio {wav}#t=1,2", QUESTION, f"/save {saved}", "And now?", "/audio nowhere.wav"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    with raises("media.file-missing"):
        Terminal(chat).run()
    first = loaded[0].chat(QUESTION, audios=[f"{wav}#t=1,2"], max_new_tokens=8)
    assert chat.turns[1]["content"] == first
    assert first in capsys.readouterr().out
    (question, _) = json.loads(saved.read_text())["messages"]
    assert question["content"][0] == {"type": "audio", "audio": f"{wav}#t=1,2"}
    assert chat.turns[3]["content"] == loaded[0].generate(loaded[1](chat.messages[:-1]), 8)


@pytest.mark.slow  # seconds of training
def test_transcripts_of_librispeech_train_adapters(folder: Path, tmp_path: Path) -> None:
    """From a folder of recordings to a run whose loss falls, with a validation set of a manifest."""
    chapter = tmp_path / "train" / "1" / "2"
    chapter.mkdir(parents=True)
    (chapter / "1-2.trans.txt").write_text("".join(f"1-2-{number:04} ONE TWO\n" for number in range(6)))
    for number in range(6):
        sound = speech.encoded(tone(1, RATE, 300 + 100 * number), RATE, "flac", "flac")
        (chapter / f"1-2-{number:04}.flac").write_bytes(sound)
    rows = [{"audio_filepath": "1/2/1-2-0000.flac", "offset": 0.2, "duration": 0.5, "text": "ONE TWO"}]
    (tmp_path / "train" / "held-out.manifest").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "model": {"path": folder, "lora": {"rank": 4}},
        "data": {
            "train": [{"path": tmp_path / "train", "instruction": "Write."}],
            "eval": [{"path": tmp_path / "train" / "held-out.manifest", "instruction": "Write."}],
            "length": 128,
        },
        "train": {"steps": 6, "global_batch": 2, "eval_every": 6, "device": "cpu"},
        "optim": {"lr": 0.01, "schedule": {"kind": "constant"}},
        "out": tmp_path / "run",
    }
    run = tessera.train(recipe)
    losses = [row["loss"] for row in run.metrics if row["kind"] == "train"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow  # seconds of training
def test_rows_in_memory_and_answers_that_are_played(folder: Path, tmp_path: Path) -> None:
    """Decoded audio of a data set is stored with the run, whose report plays the recordings of held-out questions."""
    sounds = [tone(1, RATE, 300 + 100 * number) for number in range(4)]
    rows: list[dict[str, Any]] = [
        {"audio": {"array": sound, "sampling_rate": RATE, "path": None}, "text": "ONE TWO"} for sound in sounds
    ]
    rows += [{"audio": {"bytes": speech.wav(sounds[0], RATE), "path": "a.wav"}, "sentence": "ONE"}]
    recipe = {
        "model": {"path": folder, "lora": {"rank": 4}},
        "data": {"length": 128},
        "train": {"steps": 2, "global_batch": 1, "device": "cpu", "generate_every": 2},
        "out": tmp_path / "run",
    }
    run = tessera.train(recipe, dataset=rows, eval_dataset=rows[:2])
    stored = sorted((run.folder / "data" / "media").iterdir())
    assert len(stored) == 5
    assert sum(file.suffix == ".wav" for file in stored) == 4
    (answers,) = run.folder.glob("answers-step-*.jsonl")
    assert {json.loads(line)["group"] for line in answers.read_text().splitlines()} == {"1 recording"}
    page = tessera.report(run.folder).read_text(encoding="utf-8")
    assert page.count("<audio controls") == 2
