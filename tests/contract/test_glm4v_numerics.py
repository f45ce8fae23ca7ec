"""GLM-4.1V against transformers, in fp32: logits, loss and the gradient of every parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from glm4v_cases import SHAPES, Case, Shape, make_case, pack, pair, reference_inputs
from parity import compare_gradients, relative
from torch import Tensor
from transformers import Glm4vForConditionalGeneration

from tessera.core.types import IGNORE
from tessera.core.weightmap import HalvesOfPairs, LinearOfConvolution
from tessera.data.patches import block_positions
from tessera.models.glm4v import SPEC
from tessera.models.glm4v.positions import between_entries
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


def reference_pass(reference: Glm4vForConditionalGeneration, cases: list[Case]) -> tuple[list[Tensor], Tensor]:
    """Logits of each case and the summed loss of all; gradients are left in the model."""
    logits, total = [], torch.zeros(())
    for case in cases:
        out = reference(**reference_inputs(reference, case)).logits[0]
        shifted = torch.cat([case.labels[1:], torch.tensor([IGNORE])])
        total = total + torch.nn.functional.cross_entropy(out, shifted, ignore_index=IGNORE, reduction="sum")
        logits.append(out)
    total.backward()
    return logits, total


def compare(shape: Shape, seed: int, names: list[str], padding: int) -> None:
    config, reference, model = pair(shape, seed)
    media = media_of(shape.merge)
    cases = [make_case(config, media[name], seed + number) for number, name in enumerate(names)]
    expected, expected_loss = reference_pass(reference, cases)
    batch = pack(config, cases, padding)
    out = model(batch, logits=True)
    loss, count = linear_cross_entropy(out.hidden, out.head.weight, batch["labels"], chunk=16)
    loss.backward()
    assert count == sum(int((case.labels[1:] != IGNORE).sum()) for case in cases)
    real = batch["tokens"].numel() - padding
    assert relative(out.logits[:real], torch.cat(expected)) < TOLERANCE
    assert relative(loss, expected_loss) < TOLERANCE
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    compare_gradients(SPEC, config, model, theirs, TOLERANCE)


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_packed_batches_of_everything(number: int) -> None:
    compare(SHAPES[number], 10 * number, ["one", "text", "mixed", "several", "video"], padding=number)


@pytest.mark.parametrize("name", ["text", "one", "several", "video", "mixed"])
def test_single_samples(name: str) -> None:
    compare(SHAPES[0], 3, [name], padding=5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_gives_the_same_logits(implementation: str) -> None:
    config, reference, model = pair(SHAPES[2], 1)
    cases = [make_case(config, media_of(2)[name], 7) for name in ("mixed", "text")]
    for case in cases:
        reference_inputs(reference, case)
    batch = pack(config, cases, 3)
    other = SPEC.build(config.model_copy(update={"attention": implementation}))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(batch, logits=True).logits, model(batch, logits=True).logits, rtol=1e-4, atol=1e-4)


def test_cached_decoding_equals_the_full_forward() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    cases = [make_case(config, media_of(2)[name], 20 + n) for n, name in enumerate(("one", "text", "video"))]
    for case in cases:
        reference_inputs(reference, case)
    full = model.eval()(pack(config, cases), logits=True).logits
    ends = torch.tensor([case.tokens.numel() for case in cases]).cumsum(0)
    steps = 3  # every sample ends with at least four words, none of them a picture
    prompts = [
        Case(c.tokens[:-steps], c.labels[:-steps], c.kinds[:-steps], c.media, c.positions[:, :-steps])  # type: ignore[index]
        for c in cases
    ]
    with torch.no_grad():
        cache = model.new_cache(3, max(case.tokens.numel() for case in cases))
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


def test_an_idle_tower_changes_nothing_and_gets_zero_gradients() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    case = make_case(config, [], 1)
    reference_inputs(reference, case)
    batch = pack(config, [case])
    out = model(batch)
    assert model.text is not None
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(out.hidden, plain)
    out.hidden.sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            assert parameter.grad is not None
            assert not parameter.grad.any(), name


def test_bf16_weights_take_fp32_pixels_and_stay_near_fp32() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    case = make_case(config, media_of(2)["mixed"], 1)
    reference_inputs(reference, case)
    batch = pack(config, [case])
    wide = model(batch, logits=True).logits
    narrow = model.bfloat16()(batch, logits=True).logits
    assert narrow.dtype == torch.bfloat16
    assert relative(narrow.float(), wide) < 0.1


@pytest.mark.parametrize(("height", "width", "side"), [(24, 24, 24), (2, 2, 24), (6, 40, 5), (50, 34, 24), (4, 2, 1)])
def test_positions_between_entries_are_those_of_grid_sample(height: int, width: int, side: int) -> None:
    table = torch.randn(side * side, 7, generator=torch.Generator().manual_seed(0))
    places = block_positions(height, width, 2)
    index, weights = between_entries(places, height, width, side)
    ours = (table[torch.from_numpy(index)] * torch.from_numpy(weights)[..., None]).sum(1)
    at = torch.from_numpy((places[:, ::-1].astype(np.float32) + 0.5) / np.float32([width, height]) * 2 - 1)
    picture = table.view(1, side, side, 7).permute(0, 3, 1, 2)
    sampled = torch.nn.functional.grid_sample(
        picture, at[None, :, None], mode="bicubic", align_corners=False, padding_mode="border"
    )
    assert relative(ours, sampled[0, :, :, 0].T) < 1e-5
    assert weights.sum(1) == pytest.approx(1.0, abs=1e-6)


def test_weight_operations_go_both_ways() -> None:
    theirs = torch.arange(24.0).reshape(12, 2)
    turned = HalvesOfPairs(head_dim=6, turned=4)
    ours = turned.to_ours([theirs])
    assert ours[:, 0].div(2).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert torch.equal(turned.to_theirs(ours)[0], theirs)
    assert turned.to_ours([theirs[:, 0]]).shape == (12,)
    convolution = torch.nn.Conv2d(3, 4, 2, stride=2, bias=False)
    linear = LinearOfConvolution(2).to_ours([convolution.weight])
    patches = torch.randn(5, 2, 2, 3)
    expected = convolution(patches.permute(0, 3, 1, 2)).flatten(1)
    torch.testing.assert_close(patches.flatten(1) @ linear.T, expected)
    assert torch.equal(LinearOfConvolution(2).to_theirs(linear)[0], convolution.weight)
