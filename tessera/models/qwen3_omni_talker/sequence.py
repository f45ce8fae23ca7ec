"""The sequence that a talker reads: turns of the user, the header of the answer, then speech beside the answer's text.

    text  | user turns | <|im_start|> assistant \\n | pad     pad       pad       pad     bos | w0  | w1     ... eos pad
    codes | -          | -            -         -   | nothink think_bos think_eos speaker pad | bos | frame0 ...

Earlier answers and system messages are not part of it. The text of the answer runs beside the frames: one token for
each frame, until it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tessera.core.batch import IGNORE
from tessera.errors import TesseraError
from tessera.models.qwen3_omni_talker.config import TalkerConfig
from tessera.models.speech.processor import SpokenSample

HEADER = 3  # tokens of the header of an answer: <|im_start|>, assistant and a newline


@dataclass(frozen=True)
class TalkerIds:
    """Hold the ids of tokens and control codes."""

    start: int
    end: int
    user: int
    assistant: int
    pad: int
    begin: int
    stop: int
    prefix: tuple[int, ...]  # control codes before the code of the speaker
    code_pad: int
    code_begin: int
    code_stop: int
    speakers: tuple[tuple[str, int], ...]

    @staticmethod
    def of_model(config: TalkerConfig) -> TalkerIds:
        return TalkerIds(
            start=config.im_start_token_id,
            end=config.im_end_token_id,
            user=config.user_token_id,
            assistant=config.assistant_token_id,
            pad=config.tts_pad_token_id,
            begin=config.tts_bos_token_id,
            stop=config.tts_eos_token_id,
            prefix=(config.codec_nothink_id, config.codec_think_bos_id, config.codec_think_eos_id),
            code_pad=config.codec_pad_id,
            code_begin=config.codec_bos_id,
            code_stop=config.codec_eos_token_id,
            speakers=tuple(config.speaker_id.items()),
        )

    def speaker(self, name: str) -> int:
        """Return the control code of a voice; of the first voice for an empty name."""
        codes = dict(self.speakers)
        code = codes.get(name.lower(), next(iter(codes.values()), None) if not name else None)
        if code is None:
            raise TesseraError(
                f"the model has no voice {name!r}" if name else "the model names no voices",
                allowed=sorted(codes),
                fix="name one of its voices, or add one to model.config.speaker_id",
                code="data.unknown-speaker",
            )
        return code


@dataclass(frozen=True)
class SpokenTurns:
    """Hold the parts of a tokenized conversation that a talker reads."""

    read: tuple[int, ...]  # indices of the tokens of the user's turns
    header: tuple[int, ...]  # indices of the header of the last answer
    words: tuple[int, ...]  # indices of the text of the last answer

    @staticmethod
    def of(tokens: Sequence[int], ids: TalkerIds) -> SpokenTurns:
        starts = [index for index, token in enumerate(tokens) if token == ids.start]
        ends = [*starts[1:], len(tokens)]
        read: list[int] = []
        for start, end in zip(starts, ends, strict=True):
            if start + 1 < end and tokens[start + 1] == ids.user:
                read += range(start, end)
        last = starts[-1] if starts else 0
        if not starts or last + HEADER > len(tokens) or tokens[last + 1] != ids.assistant:
            raise TesseraError("the conversation does not end with an answer to speak", code="data.no-answer")
        words: list[int] = []
        for index in range(last + HEADER, len(tokens)):
            if tokens[index] == ids.end:
                break
            words.append(index)
        return SpokenTurns(tuple(read), tuple(range(last, last + HEADER)), tuple(words))


def spoken_sequence(
    sample_id: str, tokens: Sequence[int], codes: np.ndarray, ids: TalkerIds, speaker: int
) -> SpokenSample:
    """Return the sequence of a conversation. `codes`: speech of its last answer, [frames, codebooks]."""
    turns, frames = SpokenTurns.of(tokens, ids), torch.from_numpy(codes).T
    words = [tokens[index] for index in turns.words]
    if not words:
        raise TesseraError("the answer has speech and no text", code="data.no-text")
    if len(words) > frames.shape[1] + 1:
        raise TesseraError(
            f"the answer has {len(words)} tokens and {frames.shape[1]} frames of speech, which end before its text",
            fix="check that text and recording belong together",
            code="data.speech-too-short",
        )
    control = [*ids.prefix, speaker, ids.code_pad, ids.code_begin]
    before = [tokens[index] for index in (*turns.read, *turns.header)]
    first = len(before) + len(control)  # position of the first frame
    length = first + frames.shape[1] + 1
    beside = [*before, *[ids.pad] * (len(control) - 2), ids.begin, *words, ids.stop]
    text = torch.tensor([*beside, *[ids.pad] * (length - len(beside))])
    read = torch.full((frames.shape[0], length), IGNORE)
    read[0, len(before) : first] = torch.tensor(control)
    read[:, first : length - 1] = frames
    read[0, length - 1] = ids.code_stop
    labels = torch.full((length,), IGNORE)
    labels[first:] = read[0, first:]
    targets = read.clone()
    targets[:, :first] = IGNORE
    targets[:, length - 1] = IGNORE  # the frame that ends the speech has no other codes
    counts = {"samples": 1, "tokens": length, "trained": frames.shape[1] + 1, "images": 0, "frames": 0}
    positions = torch.arange(length)
    return SpokenSample(sample_id, text[:length], labels, positions, {}, counts, read, targets)
