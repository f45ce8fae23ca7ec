"""Generate speech as codes: frame by frame with the text decoder, and codebook by codebook with the depth decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tessera.core.batch import Batch
from tessera.core.cache import CacheRow, CacheStep
from tessera.core.outputs import HIDDEN, LOGITS
from tessera.core.sample import Sample
from tessera.nn.cache import KVCache
from tessera.nn.codes import CODES, DepthDecoder, SpeechModel

Choose = Callable[[Tensor, Sequence[int]], Tensor]  # (logits [n, codes], the n rows) -> codes [n]
_HIDDEN = (HIDDEN,)


@dataclass(frozen=True)
class SpeechPrompts:
    """Hold prompts for speech, and what is read and predicted after them."""

    batch: Batch  # one segment for each prompt; its last position predicts the first frame
    beside: tuple[tuple[int, ...], ...]  # tokens of each row that are read at the positions of its frames, in order
    filler: int  # token that is read at the positions of all further frames
    end: int  # code of the frame that ends speech; the frame is not a part of it
    # Number of codebooks, counted from the first, that have the code `end` in the last frame. If it is 1, the depth
    # decoder does not decode the last frame.
    ends: int
    suppressed: tuple[int, ...] = ()  # codes of the first codebook that are never generated
    repetition_penalty: float = 1.0  # applied to codes of the first codebook only, as in transformers


@runtime_checkable
class Speaks(Protocol):
    """Declare the members of processors of models that speak."""

    @property
    def codebooks(self) -> int:
        """Return the number of codes in a frame."""
        ...

    def speech_prompts(self, samples: Sequence[Sample]) -> SpeechPrompts:
        """Return prompts for the speech of each sample's last message. Earlier messages may contain codes of speech."""
        ...


@runtime_checkable
class SpeaksAnswers(Speaks, Protocol):
    """Declare the members of processors of models that speak the answers of another model."""

    def answer_prompt(self, prompt: Batch, answer: Sequence[int], speaker: str) -> SpeechPrompts:
        """Return the prompt for the speech of an answer. `prompt`: the prompt of the model that wrote the answer."""
        ...


@torch.no_grad()
def generate_codes(
    module: SpeechModel,
    prompts: SpeechPrompts,
    *,
    max_frames: int,
    first: Choose,
    others: Choose,
    encode: Callable[[Batch], Batch] = lambda batch: batch,
    on_frame: Callable[[int, Tensor], None] | None = None,
) -> list[Tensor]:
    """Return the codes [frames, codebooks] of each prompt, on the host.

    `first` chooses the codes of the main head, `others` those of the depth decoder. `encode` adds the outputs of frozen
    components to a batch. `on_frame(row, codes)` is called for each frame.
    """
    assert module.depth is not None
    steps = _Frames(module, prompts, max_frames, encode)
    depth, device = _DepthSteps(module.depth), prompts.batch["tokens"].device
    suppressed = torch.tensor(prompts.suppressed, dtype=torch.int64, device=device)
    speech: list[list[Tensor]] = [[] for _ in prompts.beside]
    rows = list(range(len(speech)))
    logits, hidden = steps.read_prompts()
    for frame in range(max_frames):
        chosen = first(logits.index_fill(1, suppressed, -torch.inf), rows)
        going = chosen != prompts.end if prompts.ends == 1 else torch.ones_like(chosen, dtype=torch.bool)
        codes = depth.frame(hidden[going], chosen[going], others, _of(rows, going))
        if prompts.ends > 1:
            going = ~(codes[: prompts.ends] == prompts.end).all(0)
            codes = codes[:, going]
        rows = _of(rows, going)
        for row, of_row in zip(rows, codes.T.cpu(), strict=True):
            speech[row].append(of_row)
            if on_frame is not None:
                on_frame(row, of_row)
        if not rows or frame == max_frames - 1:
            break
        logits, hidden = steps.read_frame(rows, frame, codes)
    count = len(module.depth.heads) + 1
    return [torch.stack(frames) if frames else torch.empty(0, count, dtype=torch.int64) for frames in speech]


def _of(rows: Sequence[int], chosen: Tensor) -> list[int]:
    return [row for row, going in zip(rows, chosen.tolist(), strict=True) if going]


class _Frames:
    """Run the text decoder on prompts, then on one frame of each row that continues, with a KV cache."""

    def __init__(
        self, module: SpeechModel, prompts: SpeechPrompts, max_frames: int, encode: Callable[[Batch], Batch]
    ) -> None:
        self._module, self._prompts, self._encode = module, prompts, encode
        self._lengths = list(prompts.batch.segments["text"].lengths)
        self._size = max(self._lengths) + max_frames
        self._cache = module.new_cache(len(self._lengths), self._size)
        positions = prompts.batch["positions"]
        self._axes = positions.shape[:-1]
        # Media may take fewer positions than tokens, so that the next position is not the number of tokens.
        # With videos, positions may be fractions.
        self._next = [part.max().item() + 1 for part in torch.split(positions, self._lengths, dim=-1)]

    def read_prompts(self) -> tuple[Tensor, Tensor]:
        """Return logits of the first codes [rows, codes], and the hidden states [rows, D] that they come from."""
        rows = [CacheRow([row], 0, length) for row, length in enumerate(self._lengths)]
        return self._run(rows, self._prompts.batch)

    def read_frame(self, rows: Sequence[int], frame: int, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Add a frame with this index to each of `rows`. `codes`: [codebooks, rows]."""
        device, beside = codes.device, self._prompts.beside
        tokens = [beside[row][frame] if frame < len(beside[row]) else self._prompts.filler for row in rows]
        positions = torch.tensor([self._next[row] + frame for row in rows], device=device)
        tensors = {
            "tokens": torch.tensor(tokens, device=device),
            "positions": positions.expand(*self._axes, -1).contiguous(),
            CODES: codes,
        }
        return self._run([CacheRow([row], self._lengths[row] + frame, 1) for row in rows], Batch(tensors))

    def _run(self, rows: Sequence[CacheRow], batch: Batch) -> tuple[Tensor, Tensor]:
        step = CacheStep.of(rows, self._size, batch["tokens"].device)
        batch = replace(batch, segments={**batch.segments, "text": step.segments}, outputs=_HIDDEN)
        outputs = self._module(self._encode(batch), logits="last", cache=self._cache, step=step)
        return outputs[LOGITS].float(), outputs[HIDDEN].index_select(0, step.last)


class _DepthSteps:
    """Run the depth decoder on one code of each frame at a time, with a KV cache."""

    def __init__(self, depth: DepthDecoder) -> None:
        self._depth = depth
        self._count = len(depth.heads) + 1
        # Number of frames -> steps, which are the same for all frames of a recording.
        self._steps: dict[int, list[CacheStep]] = {}

    def frame(self, hidden: Tensor, first: Tensor, choose: Choose, rows: Sequence[int]) -> Tensor:
        """Return all codes [codebooks, N] of N frames.

        `hidden` [N, D]: states from which the main head predicted codebook 0, `first` [N]. `rows`: passed to `choose`.
        """
        if not len(rows):
            return first.new_empty(self._count, 0)
        codes, cache = [first], KVCache(len(rows), self._count)
        states = torch.stack([hidden, self._depth.embedded(0, first).to(hidden.dtype)], dim=1).flatten(0, 1)
        for number, (head, step) in enumerate(
            zip(self._depth.heads, self._of(len(rows), hidden.device), strict=True), 1
        ):
            decoded = self._depth.advance(states, cache, step)
            codes.append(choose(head(decoded).float(), rows))
            if number < len(self._depth.heads):
                states = self._depth.embedded(number, codes[-1]).to(hidden.dtype)
        return torch.stack(codes)

    def _of(self, rows: int, device: torch.device) -> list[CacheStep]:
        """Return the steps of a frame. The first reads the hidden state and the first code."""
        if rows not in self._steps:
            entries = [(0, 2), *((length, 1) for length in range(2, self._count))]
            self._steps[rows] = [
                CacheStep.of([CacheRow([row], cached, new) for row in range(rows)], self._count, device)
                for cached, new in entries
            ]
        return self._steps[rows]
