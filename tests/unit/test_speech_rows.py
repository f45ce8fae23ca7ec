"""Rows with speech as codes: their formats, their checks, and the packing of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.config.run_config import SourceSection
from tessera.core.batch import IGNORE
from tessera.core.sample import Sample
from tessera.data.index.measure import content_hash
from tessera.data.media.files import Limits
from tessera.data.media.read import decode, probe
from tessera.data.media.video_frames import VideoSampling
from tessera.data.sources.container import RecordError
from tessera.data.sources.source import open_source
from tessera.models.speech.processor import SpokenSample, checked_frames, packed_codes
from tessera.tools.data_convert import convert
from tests.errors import raises

CODES = [[1, 2, 3], [4, 5, 6]]


def read(folder: Path, row: dict[str, Any], **section: Any) -> Sample:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return open_source(SourceSection(path=path, **section)).read(0)


def turn(role: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": "hello"}, {"type": "codes", "codes": CODES}], **more}


def test_flat_rows_are_answers_with_text_and_codes(tmp_path: Path) -> None:
    sample = read(tmp_path, {"text": "hello", "audio_codes": CODES, "speaker": 3, "audio": "a.wav"})
    (message,) = sample.messages
    text, codes = message.parts
    assert (message.role, message.speaker, text.value, codes.kind) == ("assistant", "3", "hello", "codes")
    assert codes.value.tolist() == CODES
    assert codes.value.dtype == np.int64
    size = probe(codes, tmp_path, Limits(), VideoSampling())
    assert (size.frames, size.samples) == (2, 0)
    assert decode(codes, tmp_path, Limits(), VideoSampling()) is codes.value


@pytest.mark.parametrize("key", ["prompt", "instruction"])
def test_the_question_of_a_flat_row_is_the_users_turn(tmp_path: Path, key: str) -> None:
    sample = read(tmp_path, {key: "how are you?", "text": "well", "audio_codes": CODES})
    assert [(message.role, message.parts[0].value) for message in sample.messages] == [
        ("user", "how are you?"),
        ("assistant", "well"),
    ]


def test_columns_rename_codes_and_speaker(tmp_path: Path) -> None:
    columns = {"codes": "tokens", "speaker": "source", "text": "words"}
    sample = read(tmp_path, {"words": "hello", "tokens": CODES, "source": "Ana"}, format="speech", columns=columns)
    assert sample.messages[0].speaker == "Ana"


@pytest.mark.parametrize(("role", "more", "speaker"), [("assistant", {"speaker": 2}, "2"), ("1", {}, "1")])
def test_turns_of_conversations_have_codes_and_speakers(
    tmp_path: Path, role: str, more: dict[str, Any], speaker: str
) -> None:
    sample = read(tmp_path, {"messages": [turn(role, **more), turn("user")]})
    assert [(message.role, message.speaker) for message in sample.messages] == [("assistant", speaker), ("user", "")]
    assert [part.kind for part in sample.media()] == ["codes", "codes"]


def test_numbers_are_roles_only_with_parts(tmp_path: Path) -> None:
    with pytest.raises(RecordError) as caught:
        read(tmp_path, {"messages": [{"role": "1", "content": "hello"}]})
    assert caught.value.code == "data.unknown-speaker"


@pytest.mark.parametrize("codes", [[[1, 2], [3]], [], [1, 2], [[0.5]], [[-1, 2]], "abc", [[True, False]]])
def test_codes_of_other_forms_are_refused(tmp_path: Path, codes: Any) -> None:
    with pytest.raises(RecordError) as caught:
        read(tmp_path, {"text": "hello", "audio_codes": codes}, format="speech")
    assert caught.value.code == "data.bad-codes"


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"text": "hello", "audio_codes": None}, "data.no-codes"),
        ({"text": "hello"}, "data.no-codes"),
        ({"text": "hello", "audio": "a.wav"}, "data.no-codes"),
        ({"text": None, "audio_codes": CODES}, "data.no-text"),
        ({"text": "hello", "audio_codes": [[2**70]]}, "data.bad-codes"),
    ],
)
def test_incomplete_rows_are_bad_samples_of_their_set(tmp_path: Path, row: dict[str, Any], code: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps({'text': 'hello', 'audio_codes': CODES})}\n{json.dumps(row)}\n")
    (_, good), (_, bad) = open_source(SourceSection(path=path)).scan(range(2))
    assert isinstance(good, Sample)
    assert isinstance(bad, RecordError)
    assert bad.code == code


def test_a_row_may_name_its_recording_in_place_of_codes(tmp_path: Path) -> None:
    row = {"text": "hello", "audio_codes": None, "audio": "a.wav"}
    assert [part.kind for part in read(tmp_path, row).media()] == ["audio"]


@pytest.mark.parametrize(("speaker", "name"), [(1.0, "1"), (None, ""), (float("nan"), "")])
def test_speakers_of_tables_are_numbers(tmp_path: Path, speaker: Any, name: str) -> None:
    row = {"text": "hello", "audio_codes": CODES, "speaker": speaker}
    assert read(tmp_path, row, format="speech").messages[0].speaker == name


@pytest.mark.parametrize("speaker", [[1], {"id": 1}, 1.5, True])
def test_speakers_of_other_types_are_refused(tmp_path: Path, speaker: Any) -> None:
    with pytest.raises(RecordError) as caught:
        read(tmp_path, {"text": "hello", "audio_codes": CODES, "speaker": speaker}, format="speech")
    assert caught.value.code == "data.bad-speaker"


def test_the_hash_of_a_row_includes_its_codes(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "text": "hello", "audio_codes": codes} for codes in (CODES, [[*CODES[0]]], [[1, 2, 3], [4, 5, 7]])
    ]
    assert len({content_hash(read(tmp_path, row)) for row in rows}) == 3


def test_converted_rows_keep_codes_and_speaker(tmp_path: Path) -> None:
    path = tmp_path / "flat.jsonl"
    path.write_text(json.dumps({"text": "hello", "audio_codes": CODES, "speaker": 1}) + "\n")
    convert(SourceSection(path=path), tmp_path / "out.jsonl")
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row["messages"] == [turn("assistant", speaker="1")]


def test_codes_must_fit_the_codebooks_of_the_model() -> None:
    assert checked_frames(np.array(CODES), (5, 6, 7)).tolist() == CODES
    for sizes in ((5, 6), (5, 5, 7)):
        with raises("data.other-codebooks"):
            checked_frames(np.array(CODES), sizes)


def spoken(length: int, first: int) -> SpokenSample:
    codes = torch.full((2, length), IGNORE)
    codes[:, first:] = torch.arange(2 * (length - first)).view(2, -1)
    positions = torch.arange(length)
    return SpokenSample("a", positions, positions, positions, codes=codes, targets=codes)


def test_codes_are_packed_beside_tokens_and_targets_one_position_ahead() -> None:
    first, second = spoken(4, 2), spoken(3, 0)
    codes = packed_codes([[first, second], [second]], [8, 4], 2, "codes")
    following = packed_codes([[first, second], [second]], [8, 4], 2, "targets", ahead=1)
    assert codes.shape == following.shape == (2, 12)
    assert torch.equal(codes[:, :4], first.codes)
    assert torch.equal(codes[:, 4:7], second.codes)
    assert torch.equal(codes[:, 8:11], second.codes)
    assert torch.equal(following[:, :3], first.codes[:, 1:])
    assert (following[:, [3, 6, 7, 10, 11]] == IGNORE).all()
    assert torch.equal(following[:, 4:6], second.codes[:, 1:])
