"""Generated codes equal the likeliest codes of whole sequences, in rows of different lengths and with every end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.core.outputs import HIDDEN, LOGITS
from tessera.models.speech.generation import SpeechPrompts, generate_codes
from tessera.models.text.decoder import TextConfig, build_text, text_shape
from tessera.nn.codes import CODES, CodeEmbedding, DepthDecoder, SpeechModel

SIZES = (12, 9, 9, 9)
FILLER = 3


def config(vocabulary: int, hidden: int) -> TextConfig:
    return TextConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )


def model(projected: bool) -> SpeechModel:
    torch.manual_seed(0)
    width = 16 if projected else 24
    codes = CodeEmbedding(SIZES, 24)
    depth = DepthDecoder(text_shape(config(9, width), "eager"), SIZES, codes, projected)
    head = nn.Linear(24, SIZES[0], bias=False)
    module = SpeechModel(build_text(config(20, 24), "eager"), head, codes, depth, 0.3, replaces=projected)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.double().eval()


def batch(texts: Sequence[Sequence[int]], codes: Tensor | None = None) -> Batch:
    lengths = [len(text) for text in texts]
    tensors = {
        "tokens": torch.tensor([token for text in texts for token in text]),
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        CODES: torch.full((len(SIZES), sum(lengths)), IGNORE) if codes is None else codes,
    }
    return Batch(tensors, {"text": Segments.of(lengths)})


def likeliest(logits: Tensor, rows: Sequence[int]) -> Tensor:
    assert len(logits) == len(rows)
    return logits.argmax(-1)


def whole(module: SpeechModel, text: Sequence[int], beside: Sequence[int], frames: Tensor) -> Tensor:
    """Return the likeliest codes [frames, codebooks] after a text, from the whole sequence without a cache."""
    tokens = [*text, *beside, *[FILLER] * len(frames)][: len(text) + len(frames) - 1]
    codes = torch.full((len(SIZES), len(tokens)), IGNORE)
    codes[:, len(text) :] = frames[:-1].T
    read = replace(batch([tokens], codes), outputs=(HIDDEN,))
    with torch.no_grad():
        outputs = module(read, logits=True)
        hidden = outputs[HIDDEN][len(text) - 1 :]
        assert module.depth is not None
        decoded = module.depth(hidden, frames.T[:-1])
        others = [head(decoded[:, number]).argmax(-1) for number, head in enumerate(module.depth.heads, 1)]
        first: Tensor = outputs[LOGITS][len(text) - 1 :].argmax(-1)
    return torch.stack([first, *others], dim=1)


@pytest.mark.parametrize("projected", [True, False])
def test_codes_are_those_of_the_whole_sequence(projected: bool) -> None:
    module, texts, beside = model(projected), [[5, 6, 7, 8], [9, 4]], ((11, 12, 13), ())
    prompts = SpeechPrompts(batch(texts), beside, FILLER, end=-1, ends=1)
    heard: list[int] = []
    speech = generate_codes(
        module, prompts, max_frames=9, first=likeliest, others=likeliest, on_frame=lambda row, _: heard.append(row)
    )
    assert heard == [0, 1] * 9
    for text, words, codes in zip(texts, beside, speech, strict=True):
        assert len(codes.unique(dim=0)) > 4, "the model repeats itself"
        assert torch.equal(codes, whole(module, text, words, codes))
    alone = generate_codes(
        module,
        SpeechPrompts(batch(texts[1:]), beside[1:], FILLER, end=-1, ends=1),
        max_frames=4,
        first=likeliest,
        others=likeliest,
    )
    assert torch.equal(alone[0], speech[1][:4])


def test_rows_end_with_their_frame_of_the_end() -> None:
    module, texts = model(True), [[5, 6, 7, 8], [9, 4]]
    prompts = SpeechPrompts(batch(texts), ((), ()), FILLER, end=-1, ends=1)

    def speak(**changes: int | tuple[int, ...]) -> list[Tensor]:
        changed = replace(prompts, **changes)  # type: ignore[arg-type]
        return generate_codes(module, changed, max_frames=8, first=likeliest, others=likeliest)

    free = speak()
    for end in range(SIZES[0]):
        for codes, full in zip(speak(end=end), free, strict=True):
            first = full[:, 0].tolist()
            assert torch.equal(codes, full[: first.index(end) if end in first else 8])

    def chosen(logits: Tensor, rows: Sequence[int]) -> Tensor:
        return torch.full((len(rows),), 4)

    both = generate_codes(module, replace(prompts, end=4, ends=3), max_frames=8, first=likeliest, others=chosen)
    for codes in both:
        assert 4 not in codes[:, 0].tolist()
    assert all(codes.shape[1] == len(SIZES) for codes in [*both, *speak(suppressed=tuple(range(11)), end=11)])
    assert [len(codes) for codes in speak(suppressed=tuple(range(11)), end=11)] == [0, 0]
