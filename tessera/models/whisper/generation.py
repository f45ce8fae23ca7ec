"""Transcribe recordings: greedy or sampled decoding of windows, restricted by generation_config.json.

A recording that is longer than the encoder's window is read in windows one after another. Each window begins at the
last time stamp that the model has written in the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.outputs import LOGITS
from tessera.models.whisper.config import STRIDE
from tessera.models.whisper.model import frames_of, windows_of
from tessera.nn.encoder_decoder import MEMORY

# Batch tensors of a prompt, with token ids.
SUPPRESSED = "suppressed"  # tokens that are never generated
SUPPRESSED_FIRST = "suppressed_first"  # tokens that are not generated as the first token
STAMPS = "stamps"  # [3]: the first time stamp, the end of a transcript, the latest time stamp that may be the first one

Choose = Callable[[Tensor], Tensor]  # logits [rows, vocabulary] -> tokens [rows]


@torch.no_grad()
def generate(
    module: Any,
    batch: Batch,
    *,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    choose: Choose,
    greedy: bool = False,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return the transcript of each recording, without the tokens of the prompt and the stop token.

    `max_new_tokens`: largest number of tokens of each window. A stop token separates the windows of a recording.
    """
    rules = _Rules.of(batch)
    prompts = [part.tolist() for part in torch.split(batch["tokens"], list(batch.segments["text"].lengths))]
    lengths = list(batch.segments[MEMORY].lengths)
    # The second column of `mel_positions` is the number of frames of a recording.
    counts = [int(part[0, 1]) for part in torch.split(batch["mel_positions"], lengths)]
    recordings = [frames_of(part)[:n] for part, n in zip(torch.split(batch["mel"], lengths), counts, strict=True)]
    window = module.get_submodule(module.stream.module).shape.positions
    room = module.text.shape.positions - max(map(len, prompts))
    answers: list[list[int]] = [[] for _ in prompts]
    seek = [0] * len(prompts)

    def report(row: int, token: int) -> None:
        if on_token is not None:
            on_token(row, token)

    while active := [row for row, frames in enumerate(recordings) if seek[row] < len(frames)]:
        chosen = _Active(active, len(prompts), choose)
        for row in active:
            if seek[row]:
                answers[row].append(next(iter(stop_tokens)))
                report(row, answers[row][-1])
        mel = torch.cat([windows_of(recordings[row][seek[row] :], window) for row in active])
        texts = _transcribe(
            module,
            mel,
            [prompts[row] for row in active],
            min(max_new_tokens, room),
            frozenset(stop_tokens),
            chosen,
            rules,
        )
        for row, tokens in zip(active, texts, strict=True):
            frames = min(len(recordings[row]) - seek[row], window * STRIDE)
            if rules is not None and rules.timed(prompts[row]):
                tokens, frames = after_stamps(tokens, rules.stamps[0], frames)
            answers[row] += tokens
            seek[row] += max(STRIDE, frames)
            for token in tokens:
                report(row, token)
    return answers


def after_stamps(tokens: Sequence[int], first: int, frames: int) -> tuple[list[int], int]:
    """Return the tokens of a window that are kept, and the number of frames after which the next window begins.

    `first`: id of the time stamp 0.00. `frames`: number of frames in the window. Two time stamps in a row are the end
    of a sentence and the beginning of the next one. The window may cut off the sentence after the last such pair, so
    the next window begins there. A single time stamp at the end means that no speech follows.
    """
    stamps = [token >= first for token in tokens]
    pairs = [at + 1 for at in range(len(tokens) - 1) if stamps[at] and stamps[at + 1]]
    if not pairs or stamps[-2:] == [False, True]:
        return list(tokens), frames
    return list(tokens[: pairs[-1] + 1]), (tokens[pairs[-1] - 1] - first) * STRIDE


@dataclass(frozen=True)
class _Rules:
    """Hold the rules for the tokens that may be generated."""

    suppressed: Tensor
    suppressed_first: Tensor
    stamps: tuple[int, int, int]

    @staticmethod
    def of(batch: Batch) -> _Rules | None:
        if STAMPS not in batch:
            return None
        first, end, latest = batch[STAMPS].tolist()
        return _Rules(batch[SUPPRESSED], batch[SUPPRESSED_FIRST], (first, end, latest))

    def timed(self, prompt: Sequence[int]) -> bool:
        """Return whether time stamps are generated. A special token in the prompt turns them off."""
        return prompt[-1] != self.stamps[0] - 1

    def restrict(self, logits: Tensor, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of the next token of each row, minus infinity for tokens that may not follow `texts`."""
        logits = logits.index_fill(1, self.suppressed, -torch.inf)
        if not texts[0]:
            logits = logits.index_fill(1, self.suppressed_first, -torch.inf)
        for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            if self.timed(prompt):
                self._restrict_stamps(logits[row], text)
        return logits

    def _restrict_stamps(self, logits: Tensor, text: Sequence[int]) -> None:
        """Mask tokens so that time stamps begin the transcript, ascend, and stand before and after each sentence."""
        first, end, latest = self.stamps
        logits[first - 1] = -torch.inf
        if not text:
            logits[:first] = -torch.inf
            logits[latest + 1 :] = -torch.inf
        last, before = (len(text) > 0 and text[-1] >= first), (len(text) < 2 or text[-2] >= first)
        if last and before:
            logits[first:] = -torch.inf
        elif last:
            logits[:end] = -torch.inf
        stamps = [token for token in text if token >= first]
        if stamps:
            logits[first : stamps[-1] + (0 if last and not before else 1)] = -torch.inf
        # A time stamp must follow if the summed probability of all time stamps is above that of any text token.
        likely = logits.log_softmax(-1)
        logits[:first].masked_fill_(likely[first:].logsumexp(-1) > likely[:first].max(), -torch.inf)


@dataclass(frozen=True)
class _Active:
    """Choose tokens for `rows`, whose recordings continue, out of `count`. `choose` gets logits of `count` rows."""

    rows: Sequence[int]
    count: int
    choose: Choose

    def __call__(self, logits: Tensor) -> list[int]:
        full = logits.new_zeros(self.count, logits.shape[1])
        full[list(self.rows)] = logits
        tokens: list[int] = self.choose(full)[list(self.rows)].tolist()
        return tokens


def _transcribe(
    module: Any,
    mel: Tensor,
    prompts: Sequence[Sequence[int]],
    most: int,
    stops: frozenset[int],
    choose: _Active,
    rules: _Rules | None,
) -> list[list[int]]:
    """Return the tokens that follow each prompt, for windows of equal length. The encoder runs once."""
    rows, device, positions = len(prompts), mel.device, mel.shape[0] // len(prompts)
    size = max(map(len, prompts)) + most
    cache = module.new_cache(rows, size)
    memory = Segments.of([positions] * rows).to(device)
    index = torch.arange(positions, device=device)
    media = {
        "mel": mel,
        "mel_positions": torch.stack([index, torch.full_like(index, positions * STRIDE)], dim=1).repeat(rows, 1),
    }
    texts: list[list[int]] = [[] for _ in prompts]
    done = [False] * rows
    new: Sequence[Sequence[int]] = prompts
    while len(texts[0]) < most and not all(done):
        cached = [len(p) + len(t) - len(n) for p, t, n in zip(prompts, texts, new, strict=True)]
        entries = [
            CacheRow([row], held, len(tokens)) for row, (held, tokens) in enumerate(zip(cached, new, strict=True))
        ]
        step = CacheStep.of(entries, size, device)
        starts = [torch.arange(held, held + len(tokens)) for held, tokens in zip(cached, new, strict=True)]
        tensors = {
            "tokens": torch.tensor([token for tokens in new for token in tokens], device=device),
            "positions": torch.cat(starts).to(device),
            **media,
        }
        batch = Batch(tensors, {"text": step.segments, "audio": memory, MEMORY: memory})
        logits = module(batch, logits="last", cache=cache, step=step)[LOGITS].float()
        logits = logits if rules is None else rules.restrict(logits, prompts, texts)
        logits[[row for row in range(rows) if done[row]]] = 0.0  # rows that have ended: the choice has no effect
        chosen = choose(logits)
        media = {}
        for row, token in enumerate(chosen):
            done[row] = done[row] or token in stops
            texts[row].append(token)
        new = [[token] for token in chosen]
    return [_until(text, stops) for text in texts]


def _until(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    at = next((number for number, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:at])
