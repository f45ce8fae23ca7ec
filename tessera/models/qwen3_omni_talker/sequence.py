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
from torch import Tensor

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
    codes: int  # codes of the first codebook and control codes
    speakers: tuple[tuple[str, int], ...]
    media: tuple[int, ...]  # tokens in the place of images, videos and sound

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
            codes=config.text.vocab_size,
            speakers=tuple(config.speaker_id.items()),
            media=(config.thinker.image_token_id, config.thinker.video_token_id, config.thinker.audio_token_id),
        )

    def speaker(self, name: str) -> int:
        """Return the control code of a voice. For an empty name: of Ethan, as in transformers, or the first."""
        codes = {voice.lower(): code for voice, code in self.speakers}
        first = next(iter(codes.values()), None)
        code = codes.get(name.lower()) if name else codes.get("ethan", first)
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


@dataclass(frozen=True)
class Opening:
    """Hold what a talker reads before the first frame of speech, and the text that runs beside the frames."""

    text: tuple[int, ...]  # tokens before the first frame
    control: tuple[int, ...]  # control codes at the last positions of `text`
    beside: tuple[int, ...]  # tokens of text at the positions of the first frames: one per frame until the text ends

    @staticmethod
    def of(tokens: Sequence[int], ids: TalkerIds, speaker: int) -> Opening:
        """`tokens`: a conversation that ends with the text to speak."""
        turns = SpokenTurns.of(tokens, ids)
        if not turns.words:
            raise TesseraError("the last answer has no text to speak", code="data.no-text")
        control = (*ids.prefix, speaker, ids.code_pad, ids.code_begin)
        first, *words = (tokens[index] for index in turns.words)
        before = [tokens[index] for index in (*turns.read, *turns.header)]
        text = (*before, *[ids.pad] * (len(control) - 2), ids.begin, first)
        return Opening(text, control, (*words, ids.stop))

    def codes(self, codebooks: int) -> Tensor:
        """Return the codes at the positions before the first frame, [codebooks, positions]; IGNORE: no code."""
        codes = torch.full((codebooks, len(self.text)), IGNORE)
        codes[0, len(self.text) - len(self.control) :] = torch.tensor(self.control)
        return codes


def spoken_sequence(
    sample_id: str, tokens: Sequence[int], codes: np.ndarray, ids: TalkerIds, speaker: int
) -> SpokenSample:
    """Return the sequence of a conversation. `codes`: speech of its last answer, [frames, codebooks]."""
    opening, frames = Opening.of(tokens, ids, speaker), torch.from_numpy(codes).T
    count, (codebooks, spoken) = len(opening.text), frames.shape
    if len(opening.beside) > spoken + 1:
        raise TesseraError(
            f"the answer has {len(opening.beside)} tokens and {spoken} frames of speech, which end before its text",
            fix="check that text and recording belong together",
            code="data.speech-too-short",
        )
    beside = [*opening.beside, *[ids.pad] * (spoken + 1 - len(opening.beside))]
    end = torch.full((codebooks, 1), IGNORE)  # the end of speech has a code in the first codebook alone
    end[0] = ids.code_stop
    read = torch.cat([opening.codes(codebooks), frames, end], dim=1)
    labels, targets = read[0].clone(), read.clone()
    labels[:count] = IGNORE
    targets[:, :count] = IGNORE
    targets[:, -1] = IGNORE
    return SpokenSample(
        sample_id,
        torch.tensor([*opening.text, *beside]),
        labels,
        torch.arange(count + spoken + 1),
        {},
        {"samples": 1, "tokens": count + spoken + 1, "trained": spoken + 1, "images": 0, "frames": 0},
        read,
        targets,
    )


def positions_of_turns(positions: Tensor, turns: SpokenTurns, length: int) -> Tensor:
    """Return the positions [3, length] of the sequence that begins with the user's turns.

    `positions` [3, L]: those of the conversation. A turn of the user follows the one before it as if there were no
    other turns between them; within it, media keep their positions.
    """
    read = torch.tensor(turns.read, dtype=torch.int64)
    bounds = [index + 1 for index in (read.diff() != 1).nonzero().flatten().tolist()]
    parts, following = [], positions.new_zeros(())
    for turn in torch.tensor_split(positions[:, read], bounds, dim=1):
        if turn.numel():
            parts.append(turn - turn[:, :1] + following)
            following = parts[-1].max() + 1
    rest = torch.arange(length - len(read), dtype=positions.dtype)
    return torch.cat([*parts, (rest + following).expand(3, -1)], dim=1)


def opening_sequence(sample_id: str, opening: Opening, codebooks: int) -> SpokenSample:
    """Return the prompt for an answer."""
    codes, length = opening.codes(codebooks), len(opening.text)
    nothing = torch.full_like(codes, IGNORE)
    counts = {"samples": 1, "tokens": length}
    text, positions = torch.tensor(opening.text), torch.arange(length)
    return SpokenSample(sample_id, text, nothing[0], positions, {}, counts, codes, nothing)
