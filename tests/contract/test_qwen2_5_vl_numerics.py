"""Our Qwen2.5-VL against transformers', in fp32: logits, loss, every gradient; theirs sample by sample, ours packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import compare_gradients, from_foreign, relative
from qwen2_5_vl_cases import (
    SHAPES,
    Shape,
    canonical,
    config_of,
    make_case,
    media_of,
    pack,
    reference_inputs,
    reference_model,
)
from qwen2_vl_cases import Case
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.vision_utils import get_vision_window_index

from tessera.core.types import IGNORE
from tessera.models.qwen2_5_vl import SPEC
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.windows import window_order, window_sizes
from tessera.nn.vlm import VisionLanguageModel
from tessera.ops.loss import linear_cross_entropy

TOLERANCE = 2e-5  # seen: below 6e-6


def pair(shape: Shape, seed: int) -> tuple[Qwen25VLConfig, Qwen2_5_VLForConditionalGeneration, VisionLanguageModel]:
    config = config_of(shape)
    reference = reference_model(config, seed)
    model = from_foreign(SPEC, config, reference.state_dict()).train()
    assert isinstance(model, VisionLanguageModel)
    return config, reference, model


def reference_pass(
    config: Qwen25VLConfig, reference: Qwen2_5_VLForConditionalGeneration, cases: list[Case]
) -> tuple[list[Tensor], Tensor]:
    """Logits of each case and the summed loss of all; gradients are left in the model."""
    logits, total = [], torch.zeros(())
    for case in cases:
        out = reference(**reference_inputs(reference, config, case)).logits[0]
        shifted = torch.cat([case.labels[1:], torch.tensor([IGNORE])])
        total = total + torch.nn.functional.cross_entropy(out, shifted, ignore_index=IGNORE, reduction="sum")
        logits.append(out)
    total.backward()
    return logits, total


def compare(shape: Shape, seed: int, names: list[str], padding: int) -> None:
    config, reference, model = pair(shape, seed)
    media = media_of(shape.merge)
    cases = [make_case(config, media[name], seed + number) for number, name in enumerate(names)]
    expected, expected_loss = reference_pass(config, reference, cases)
    batch = pack(config, cases, padding)
    out = model(batch, logits=True)
    loss, count = linear_cross_entropy(out.hidden, out.head.weight, batch["labels"], chunk=16)
    loss.backward()
    assert count == sum(int((case.labels[1:] != IGNORE).sum()) for case in cases)
    real = batch["tokens"].numel() - padding
    assert relative(out.logits[:real], torch.cat(expected)) < TOLERANCE
    assert relative(loss, expected_loss) < TOLERANCE
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    compare_gradients(SPEC, config, model, theirs, TOLERANCE, canonical)


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_packed_batches_of_everything(number: int) -> None:
    compare(SHAPES[number], 10 * number, ["one", "text", "mixed", "several", "video"], padding=number)


@pytest.mark.parametrize("name", ["text", "one", "several", "video", "mixed"])
def test_single_samples(name: str) -> None:
    compare(SHAPES[0], 3, [name], padding=5)


def test_windows_matter() -> None:
    """What is compared above would differ if windows were ignored, and if all blocks kept to them."""
    config, reference, model = pair(SHAPES[0], 3)
    case = make_case(config, media_of(2)["one"], 3)
    reference_inputs(reference, config, case)
    batch = pack(config, [case])
    right = model(batch, logits=True).logits
    for full in ((), (0, 1, 2)):
        changed = config.vision.model_copy(update={"fullatt_block_indexes": full})
        other = SPEC.build(config.model_copy(update={"vision": changed}))
        other.load_state_dict(model.state_dict())
        assert relative(other(batch, logits=True).logits, right) > 1e-2


@pytest.mark.parametrize("side", [1, 2, 3, 4, 8])
def test_windows_are_the_references(side: int) -> None:
    for rows, columns in ((1, 1), (4, 4), (5, 9), (8, 3), (2, 17)):
        grid = torch.tensor([[1, 2 * rows, 2 * columns]])
        index, bounds = get_vision_window_index(grid, spatial_merge_size=2, window_size=side * 28, patch_size=14)
        assert np.array_equal(window_order(rows, columns, side), index.numpy())
        assert [4 * size for size in window_sizes(rows, columns, side)] == bounds.diff().tolist()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_gives_the_same_logits(implementation: str) -> None:
    config, reference, model = pair(SHAPES[2], 1)
    cases = [make_case(config, media_of(2)[name], 7) for name in ("mixed", "text", "one")]
    for case in cases:
        reference_inputs(reference, config, case)
    batch = pack(config, cases, 3)
    other = from_foreign(SPEC, config.model_copy(update={"attention": implementation}), reference.state_dict())
    torch.testing.assert_close(other(batch, logits=True).logits, model(batch, logits=True).logits, rtol=1e-4, atol=1e-4)


def test_cached_decoding_equals_the_full_forward() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    model.eval()
    cases = [make_case(config, media_of(2)[name], 20 + n) for n, name in enumerate(("one", "text", "video"))]
    for case in cases:
        reference_inputs(reference, config, case)
    full = model(pack(config, cases), logits=True).logits
    ends = torch.tensor([case.tokens.numel() for case in cases]).cumsum(0)
    prompts = [Case(c.tokens[:-1], c.labels[:-1], c.media, c.positions[:, :-1]) for c in cases]  # type: ignore[index]
    with torch.no_grad():
        cache = model.new_cache(3, max(case.tokens.numel() for case in cases))
        first = model(pack(config, prompts), logits="last", cache=cache).logits
        batch = pack(config, prompts).with_tensors(
            tokens=torch.stack([case.tokens[-1] for case in cases]),
            positions=torch.stack([case.positions[:, -1] for case in cases], dim=1),  # type: ignore[index]
        )
        second = model(batch, logits=True, cache=cache).logits
    assert relative(first, full[ends - 2]) < TOLERANCE
    assert relative(second, full[ends - 1]) < TOLERANCE


def test_an_idle_tower_changes_nothing_and_gets_zero_gradients() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    case = make_case(config, [], 1)
    reference_inputs(reference, config, case)
    batch = pack(config, [case])
    out = model(batch)
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(out.hidden, plain)
    out.hidden.sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_a_pass_forward_and_back_asks_the_device_for_nothing() -> None:
    """On the meta device there are no numbers: whoever wanted one, or a shape that depends on one, would fail."""
    config = config_of(SHAPES[0])
    reference = reference_model(config)
    cases = [make_case(config, media_of(2)[name], n) for n, name in enumerate(("mixed", "text", "several"))]
    for case in cases:
        reference_inputs(reference, config, case)
    batch = pack(config, cases, 3).to("meta")
    model = SPEC.build(config).to("meta")
    out = model(batch, logits=True)
    assert out.logits.shape == (batch["tokens"].shape[0], config.text.vocab_size)
    out.logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
