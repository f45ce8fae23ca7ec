"""Transcribe recordings: greedy or sampled decoding of windows, restricted by generation_config.json.

A recording that is longer than the encoder's window is read in windows one after another. A window begins
after the last complete sentence of the one before, as its time stamps say (`after_stamps`).

The model detects the language of a recording whose prompt names none, in the first window: the most likely language as
the first token after the start. It is the first token of the answer.
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
LANGUAGES = "languages"  # language tokens to choose from if the prompt names no language; may be empty
STAMPS = "stamps"  # [3]: tokens of the time stamp 0.00, of the end, and of the latest time stamp at the beginning

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
    """Return the transcript of each recording, without the tokens of the prompt and the stop token. It begins with the
    token of the language if the prompt names none.

    `max_new_tokens`: largest number of tokens of each window. A stop token separates the windows of a recording.
    """
    rules = _Rules.of(batch)
    prompts = [part.tolist() for part in torch.split(batch["tokens"], list(batch.segments["text"].lengths))]
    lengths = list(batch.segments[MEMORY].lengths)
    # The second column of `mel_positions` is the number of frames of a recording.
    counts = [int(part[0, 1]) for part in torch.split(batch["mel_positions"], lengths)]
    recordings = [frames_of(part)[:n] for part, n in zip(torch.split(batch["mel"], lengths), counts, strict=True)]
    window = module.get_submodule(module.stream.module).shape.positions
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
        decode = _Windows(module, mel, len(active), module.text.shape.positions)
        if rules is not None and not all(map(rules.names_language, prompts)):  # detect languages
            before, prompts = prompts, rules.with_languages(decode([prompt[:1] for prompt in prompts]), prompts)
            for row, prompt in enumerate(prompts):
                if len(prompt) > len(before[row]):
                    answers[row].append(prompt[1])
                    report(row, prompt[1])
        most = min(max_new_tokens, module.text.shape.positions - max(map(len, prompts)))
        texts = _transcribe(decode, [prompts[row] for row in active], most, frozenset(stop_tokens), chosen, rules)
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
    """Return the tokens of a window to keep, and after how many of its frames the next window begins.

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
    """Hold which tokens may be generated."""

    suppressed: Tensor
    suppressed_first: Tensor
    stamps: tuple[int, int, int]
    languages: Tensor

    @staticmethod
    def of(batch: Batch) -> _Rules | None:
        if STAMPS not in batch:
            return None
        first, end, latest = batch[STAMPS].tolist()
        return _Rules(batch[SUPPRESSED], batch[SUPPRESSED_FIRST], (first, end, latest), batch[LANGUAGES])

    def timed(self, prompt: Sequence[int]) -> bool:
        """Return whether time stamps are generated. A special token in the prompt turns them off."""
        return prompt[-1] != self.stamps[0] - 1

    def names_language(self, prompt: Sequence[int]) -> bool:
        """Return whether the prompt has a language token, or the model (of English only) has none."""
        return not len(self.languages) or prompt[1] in self.languages.tolist()

    def with_languages(self, logits: Tensor, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Return the prompts. Add the likeliest language to those without one.

        `logits`: those that predict the second token.
        """
        likely = self.languages[logits[:, self.languages].argmax(-1)].tolist()
        return [
            prompt if self.names_language(prompt) else [prompt[0], language, *prompt[1:]]
            for prompt, language in zip(prompts, likely, strict=True)
        ]

    def restrict(self, logits: Tensor, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Tensor:
        """Return the logits of the next token of each row, minus infinity for tokens that Whisper's rules forbid."""
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


class _Windows:
    """Run the decoder on windows of equal length, one for each row. The encoder runs once."""

    def __init__(self, module: Any, mel: Tensor, rows: int, size: int) -> None:
        self._module, self._size, self._device = module, size, mel.device
        self._cache = module.new_cache(rows, size)
        self.cached = [0] * rows
        positions = mel.shape[0] // rows
        self._memory = Segments.of([positions] * rows).to(mel.device)
        index = torch.arange(positions, device=mel.device)
        bounds = torch.stack([index, torch.full_like(index, positions * STRIDE)], dim=1)
        self._media = {"mel": mel, "mel_positions": bounds.repeat(rows, 1)}

    def __call__(self, new: Sequence[Sequence[int]]) -> Tensor:
        """Add tokens to the cache of each row, and return the logits of the token that follows them."""
        rows = enumerate(zip(self.cached, new, strict=True))
        entries = [CacheRow([row], cached, len(tokens)) for row, (cached, tokens) in rows]
        step = CacheStep.of(entries, self._size, self._device)
        tensors = {
            "tokens": torch.tensor([token for tokens in new for token in tokens], device=self._device),
            "positions": torch.cat([torch.arange(entry.cached, entry.cached + entry.new) for entry in entries]),
            **self._media,
        }
        segments = {"text": step.segments, "audio": self._memory, MEMORY: self._memory}
        batch = Batch(tensors, segments).to(self._device)
        logits: Tensor = self._module(batch, logits="last", cache=self._cache, step=step)[LOGITS].float()
        self.cached, self._media = [entry.cached + entry.new for entry in entries], {}
        return logits


def _transcribe(
    decode: _Windows,
    prompts: Sequence[Sequence[int]],
    most: int,
    stops: frozenset[int],
    choose: _Active,
    rules: _Rules | None,
) -> list[list[int]]:
    """Return the generated tokens of each prompt. `decode` may have the beginning of the prompts in its cache."""
    texts: list[list[int]] = [[] for _ in prompts]
    done = [False] * len(prompts)
    new: Sequence[Sequence[int]] = [prompt[cached:] for prompt, cached in zip(prompts, decode.cached, strict=True)]
    while len(texts[0]) < most and not all(done):
        logits = decode(new)
        logits = logits if rules is None else rules.restrict(logits, prompts, texts)
        logits[[row for row in range(len(done)) if done[row]]] = 0.0  # finished rows: their tokens are dropped
        chosen = choose(logits)
        for row, token in enumerate(chosen):
            done[row] = done[row] or token in stops
            texts[row].append(token)
        new = [[token] for token in chosen]
    return [_until(text, stops) for text in texts]


def _until(tokens: Sequence[int], stops: frozenset[int]) -> list[int]:
    at = next((number for number, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:at])
