"""Parse speech that records contain as codes: the tokens of a neural codec, frame by frame."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tessera.core.sample import Message, Part
from tessera.data.sources.container import fail
from tessera.data.sources.fields import ColumnMap, has, text_of

_SPEECH = ("codes", "audio")  # types of parts
_SPEAKER_NUMBER = re.compile(r"[0-9]{1,6}")


def codes_part(value: Any, key: str) -> Part:
    """Return speech as a part: int64 [frames, codebooks]. `value`: a list of frames, each a list of codes."""
    try:
        codes = np.asarray(value)
    except ValueError:
        fail("data.bad-codes", f"{key}: the frames have different numbers of codes")
    if codes.ndim != 2 or not codes.size or codes.dtype.kind not in "iu":
        fail("data.bad-codes", f"{key}: must be a list of frames, each with an integer for every codebook")
    if codes.min() < 0:
        fail("data.bad-codes", f"{key}: codes cannot be negative")
    return Part("codes", codes.astype(np.int64))


def parse_speech(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    """Return the text and the codes of a record as an answer, after the question if the record has one."""
    text = next((record[key] for key in names.text if has(record, key)), None)
    if not isinstance(text, str) or not text.strip():
        fail("data.no-text", f"no text under {' or '.join(map(repr, names.text))}")
    if not has(record, names.codes):
        fail("data.no-codes", f"no codes under {names.codes!r}: `tessera data features` makes them from recordings")
    spoken = (Part("text", text_of(text).strip()), codes_part(record[names.codes], names.codes))
    question = next((record[key] for key in (names.prompt, "prompt") if has(record, key)), None)
    before = [Message("user", (Part("text", text_of(question)),))] if question else []
    return (*before, Message("assistant", spoken, speaker_of(record, names)))


def speaker_of(record: Mapping[str, Any], names: ColumnMap) -> str:
    """Return the name or the number of the speaker of a row; empty: not named."""
    speaker = record.get(names.speaker)
    if isinstance(speaker, float) and speaker.is_integer():
        speaker = int(speaker)  # a column of a table that has numbers and empty cells
    if speaker is None or (isinstance(speaker, float) and speaker != speaker):
        return ""
    if isinstance(speaker, bool) or not isinstance(speaker, (str, int)):
        fail("data.bad-speaker", f"{names.speaker}: must be a name or a number, not {speaker!r:.40}")
    return text_of(str(speaker))


def speaker_of_turn(turn: Mapping[str, Any], names: ColumnMap) -> str:
    """Return the speaker of a turn with speech; empty: not named, or the turn has no speech."""
    content = turn.get(names.content)
    if not isinstance(content, list) or not any(isinstance(p, dict) and p.get("type") in _SPEECH for p in content):
        return ""
    return numbered_speaker(turn, names) or ("" if names.speaker == names.role else speaker_of(turn, names))


def numbered_speaker(turn: Mapping[str, Any], names: ColumnMap) -> str:
    """Return the role of a turn if it is the number of a speaker, as in conversations for CSM; else an empty text."""
    role, content = turn.get(names.role), turn.get(names.content)
    if isinstance(content, list) and isinstance(role, str) and _SPEAKER_NUMBER.fullmatch(role):
        return role
    return ""
