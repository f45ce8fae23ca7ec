"""Our Qwen3-VL against transformers', in fp32: logits, loss, every gradient; theirs sample by sample, ours packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import compare_gradients, from_foreign, relative
from qwen3_vl_cases import SHAPES, Case, Shape, config_of, make_case, pack, pair, reference_inputs
from torch import Tensor
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from tessera.core.types import IGNORE, Batch
from tessera.data.patches import block_positions
from tessera.models.qwen3_vl import SPEC
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.positions import between_entries
from tessera.ops.loss import linear_cross_entropy

TOLERANCE = 1e-4


def media_of(merge: int) -> dict[str, list[tuple[str, tuple[int, int, int]]]]:
    """Media lists by name, in grids of patches; odd in merged tokens, tall, wide, one token small."""
    m = merge
    return {
        "text": [],
        "one": [("image", (1, 3 * m, 5 * m))],
        "several": [("image", (1, m, 4 * m)), ("image", (1, 3 * m, m)), ("image", (1, m, m))],
        "video": [("video", (3, 2 * m, 3 * m))],
        "mixed": [("video", (2, m, 2 * m)), ("image", (1, 2 * m, 3 * m)), ("video", (1, 3 * m, m))],
    }


def reference_pass(config: Qwen3VLConfig, reference: Any, cases: list[Case]) -> tuple[list[Tensor], Tensor]:
    """Logits of each case and the summed loss of all; gradients are left in the model."""
    logits, total = [], torch.zeros(())
    for case in cases:
        out = reference(**reference_inputs(reference, config, case)).logits[0]
        shifted = torch.cat([case.labels[1:], torch.tensor([IGNORE])])
        total = total + torch.nn.functional.cross_entropy(out, shifted, ignore_index=IGNORE, reduction="sum")
        logits.append(out)
    total.backward()
    return logits, total


def theirs_as_saved(config: Qwen3VLConfig, reference: Any) -> dict[str, Tensor | None]:
    """Their gradients as the hub's folders store weights: of experts, turned."""
    grads: dict[str, Tensor | None] = {}
    for name, parameter in reference.named_parameters():
        grad = parameter.grad
        turned = grad is not None and ".experts." in name and grad.shape[-1] != grad.shape[-2]
        grads[name] = grad.transpose(-1, -2) if turned and grad is not None else grad
    return grads


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
    compare_gradients(SPEC, config, model, theirs_as_saved(config, reference), TOLERANCE)


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_packed_batches_of_everything(number: int) -> None:
    compare(SHAPES[number], 10 * number, ["one", "text", "mixed", "several", "video"], padding=number)


@pytest.mark.parametrize("name", ["text", "one", "several", "video", "mixed"])
@pytest.mark.parametrize("number", [0, 6])
def test_single_samples(number: int, name: str) -> None:
    compare(SHAPES[number], 3, [name], padding=5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_gives_the_same_logits(implementation: str) -> None:
    config, reference, model = pair(SHAPES[2], 1)
    cases = [make_case(config, media_of(2)[name], 7) for name in ("mixed", "text")]
    for case in cases:
        reference_inputs(reference, config, case)
    batch = pack(config, cases, 3)
    other = from_foreign(SPEC, config_of(SHAPES[2], attention=implementation), reference.state_dict())
    torch.testing.assert_close(other(batch, logits=True).logits, model(batch, logits=True).logits, rtol=1e-4, atol=1e-4)


def test_cached_decoding_equals_the_full_forward() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    model.eval()
    cases = [make_case(config, media_of(2)[name], 20 + n) for n, name in enumerate(("one", "text", "video"))]
    for case in cases:
        reference_inputs(reference, config, case)
    full = model(pack(config, cases), logits=True).logits
    ends = torch.tensor([case.tokens.numel() for case in cases]).cumsum(0)
    steps = 3  # every sample ends with at least four words, none of them a picture
    prompts = [
        Case(c.tokens[:-steps], c.labels[:-steps], c.media, c.positions[:, :-steps])  # type: ignore[index]
        for c in cases
    ]
    with torch.no_grad():
        cache = model.new_cache(3, max(case.tokens.numel() for case in cases))  # type: ignore[operator]
        got = [model(pack(config, prompts), logits="last", cache=cache).logits]
        for step in range(steps):
            at = step - steps
            batch = pack(config, prompts).with_tensors(
                tokens=torch.stack([case.tokens[at] for case in cases]),
                positions=torch.stack([case.positions[:, at] for case in cases], dim=1),  # type: ignore[index]
            )
            got.append(model(batch, logits=True, cache=cache).logits)
    for step, logits in enumerate(got):
        assert relative(logits, full[ends - 1 - steps + step]) < TOLERANCE


@pytest.mark.parametrize("number", [0, 6])
def test_an_idle_tower_changes_nothing_and_gets_zero_gradients(number: int) -> None:
    config, reference, model = pair(SHAPES[number], 5)
    case = make_case(config, [], 1)
    reference_inputs(reference, config, case)
    batch = pack(config, [case])
    out = model(batch)
    text: Any = model.text
    plain = text(text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(out.hidden, plain)
    out.hidden.sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_features_of_every_depth_reach_the_words() -> None:
    """What a tap gives matters, and so does the layer after which it is added."""
    config, reference, model = pair(SHAPES[1], 2)
    case = make_case(config, media_of(2)["one"], 2)
    reference_inputs(reference, config, case)
    batch = pack(config, [case])
    before = model(batch, logits=True).logits
    for tap in (0, 1, 2):
        merger: Any = model.projector.taps[tap]  # type: ignore[union-attr, index]
        with torch.no_grad():
            merger.down.bias.add_(1.0)
            assert relative(model(batch, logits=True).logits, before) > 1e-3
            merger.down.bias.sub_(1.0)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (3, 10, 2), (1, 48, 48), (1, 50, 70), (2, 2, 94)])
def test_entries_between_which_patches_lie(grid: tuple[int, int, int]) -> None:
    t, h, w = grid
    index, weights = between_entries(block_positions(h, w, 2), h, w, 48)
    expected = get_vision_interpolation_indices_and_weights(
        torch.tensor([grid]), 48, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    assert torch.equal(torch.from_numpy(index).repeat(t, 1), expected[0])
    assert torch.equal(torch.from_numpy(weights).repeat(t, 1), expected[1])


def test_bf16_weights_take_fp32_pixels_and_stay_near_fp32() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    case = make_case(config, media_of(2)["mixed"], 1)
    reference_inputs(reference, config, case)
    batch: Batch = pack(config, [case])
    wide = model(batch, logits=True).logits
    narrow = model.bfloat16()(batch, logits=True).logits
    assert narrow.dtype == torch.bfloat16
    assert relative(narrow.float(), wide) < 0.1
