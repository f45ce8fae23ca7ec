"""Our LLaVA against transformers', in fp32: logits, loss, every gradient; theirs sample by sample, ours packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from llava_cases import (
    SHAPES,
    Shape,
    config_of,
    conversation,
    media_of,
    processor_of,
    reference_inputs,
    reference_model,
)
from parity import compare_gradients, from_foreign, randomize, relative
from torch import Tensor, nn

from tessera.core.errors import TesseraError
from tessera.core.run_config import LoraSection
from tessera.core.types import IGNORE, Batch
from tessera.models.llava import SPEC
from tessera.models.llava.config import LlavaConfig
from tessera.nn.lora import find_adapters
from tessera.ops.loss import linear_cross_entropy

TOLERANCE = 1e-4  # seen: below 1e-5
EVERYTHING = ["one", "text", "several", "small", "wide", "tall", "video", "mixed"]


def pair(shape: Shape, seed: int) -> tuple[LlavaConfig, Any, nn.Module]:
    config = config_of(shape)
    reference = reference_model(config).train()
    randomize(reference, seed)
    return config, reference, from_foreign(SPEC, config, reference.state_dict()).train()


def unread(config: LlavaConfig, name: str) -> bool:
    """Whether a weight of transformers' model has no part in what it answers."""
    parts = name.split(".")
    if "post_layernorm" in parts:
        return True
    return "encoder" in parts and int(parts[parts.index("layers") + 1]) >= config.blocks_read


def compare(shape: Shape, seed: int, names: list[str], folder: Path, padding: int) -> None:
    config, reference, model = pair(shape, seed)
    processor = processor_of(shape, folder)
    media = {name: found for name, found in media_of(shape).items() if name in names}
    encoded = [processor.encode(conversation(m, n), m) for n, m in enumerate(media.values())]
    expected, total = [], torch.zeros(())
    for item, shown in zip(encoded, media.values(), strict=True):
        out = reference(**reference_inputs(processor, item, shown)).logits[0]
        shifted = torch.cat([item.labels[1:], torch.tensor([IGNORE])])
        total = total + torch.nn.functional.cross_entropy(out, shifted, ignore_index=IGNORE, reduction="sum")
        expected.append(out)
    total.backward()
    length = sum(len(item.tokens) for item in encoded)
    batch = processor.collate([encoded], length + padding)
    out = model(batch, logits=True)
    loss, count = linear_cross_entropy(out.hidden, out.head.weight, batch["labels"], chunk=16)
    loss.backward()
    assert count == sum(int((item.labels[1:] != IGNORE).sum()) for item in encoded)
    found = [relative(out.logits[:length], torch.cat(expected)), relative(loss, total)]
    assert max(found) < TOLERANCE
    grads = {name: p.grad for name, p in reference.named_parameters() if not unread(config, name)}
    assert all(p.grad is None for name, p in reference.named_parameters() if unread(config, name))
    assert SPEC.weights is not None
    compare_gradients(SPEC, config, model, grads, TOLERANCE, SPEC.weights(config).canonical, beside_queries)


def beside_queries(name: str) -> str:
    """Without turning positions the bias of keys moves nothing: its gradient is rounding, beside that of queries."""
    return name.replace("k_proj.bias", "q_proj.bias") if name.startswith("vision_tower.") else name


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_packed_batches_of_everything(number: int, tmp_path: Path) -> None:
    compare(SHAPES[number], 10 * number, EVERYTHING, tmp_path, padding=number)


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("name", EVERYTHING)
def test_single_samples(number: int, name: str, tmp_path: Path) -> None:
    if name in media_of(SHAPES[number]):
        compare(SHAPES[number], 3, [name], tmp_path, padding=5)


@pytest.mark.parametrize("number", [0, 3])
def test_cached_decoding_equals_the_full_forward(number: int, tmp_path: Path) -> None:
    config, _, model = pair(SHAPES[number], 5)
    model.eval()
    processor = processor_of(SHAPES[number], tmp_path)
    media = [media_of(SHAPES[number])[name] for name in ("one", "text", "several")]
    samples = [conversation(m, n) for n, m in enumerate(media)]
    items = [processor.encode(sample, m) for sample, m in zip(samples, media, strict=True)]
    length = sum(len(item.tokens) for item in items)
    with torch.no_grad():
        full = model(processor.collate([items], length), logits=True).logits
        prompt = processor.prompt(samples, media)
        lengths = list(prompt.segments["text"].lengths)
        cache = model.new_cache(3, max(len(item.tokens) for item in items))
        got = [model(prompt, logits="last", cache=cache).logits]
        for step in range(2):
            tokens = torch.stack([item.tokens[n + step] for item, n in zip(items, lengths, strict=True)])
            positions = torch.tensor([n + step for n in lengths])
            got.append(model(Batch({"tokens": tokens, "positions": positions}), logits=True, cache=cache).logits)
    starts = torch.tensor([0, *(len(item.tokens) for item in items)]).cumsum(0)[:-1]
    for step, logits in enumerate(got):
        at = starts + torch.tensor(lengths) - 1 + step
        assert relative(logits, full[at]) < TOLERANCE
    assert config.text.vocab_size == full.shape[1]


@pytest.mark.parametrize("number", [0, 3])
def test_an_idle_tower_changes_nothing_and_gets_zero_gradients(number: int, tmp_path: Path) -> None:
    _, _, model = pair(SHAPES[number], 5)
    item = processor_of(SHAPES[number], tmp_path).encode(conversation([]), [])
    batch = processor_of(SHAPES[number], tmp_path).collate([[item]], len(item.tokens))
    out = model(batch)
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(out.hidden, plain)
    out.hidden.sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            assert zero(parameter.grad) == parameter.requires_grad, name


def zero(grad: Tensor | None) -> bool:
    return grad is not None and not bool(grad.any())


def test_what_is_not_read_is_there_and_frozen() -> None:
    config, _, model = pair(SHAPES[0], 0)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert config.blocks_read == 2
    assert {name.split(".")[1] for name in frozen} == {"blocks", "norm_after"}
    assert {name.split(".")[2] for name in frozen if name.startswith("vision.blocks")} == {"2"}
    changed = {name: p + 1 for name, p in model.named_parameters() if name in frozen}
    tokens = torch.arange(20)
    example = SPEC.example(config, 20).with_tensors(tokens=tokens)  # type: ignore[misc]
    with torch.no_grad():
        before = model(example, logits=True).logits
        for name, parameter in model.named_parameters():
            if name in changed:
                parameter.copy_(changed[name])
        assert torch.equal(model(example, logits=True).logits, before)


def test_what_is_not_read_gets_no_adapter() -> None:
    config, _, model = pair(SHAPES[0], 0)
    section = LoraSection.model_validate({"rank": 2, "targets": ["vision.blocks.{*}.attn.qkv"]})
    assert list(find_adapters(section, model, SPEC.plan(config))) == [f"vision.blocks.{n}.attn.qkv" for n in (0, 1)]
    section = LoraSection.model_validate({"rank": 2, "targets": ["vision.blocks.2.mlp.up"]})
    with pytest.raises(TesseraError, match="kept for the folder alone"):
        find_adapters(section, model, SPEC.plan(config))
