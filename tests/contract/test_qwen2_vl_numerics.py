"""Our Qwen2-VL against transformers', in fp32: logits, loss, every gradient; theirs sample by sample, ours packed."""

from __future__ import annotations

import pytest
import torch
from parity import compare_gradients, relative
from qwen2_vl_cases import (
    SHAPES,
    Case,
    Shape,
    config_of,
    make_case,
    pack,
    reference_inputs,
    reference_model,
    theirs_to_ours,
)
from torch import Tensor
from transformers import Qwen2VLForConditionalGeneration

from tessera.core.errors import TesseraError
from tessera.core.types import IGNORE
from tessera.models.qwen2_vl import SPEC
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.nn.vlm import VisionLanguageModel
from tessera.ops.loss import linear_cross_entropy

TOLERANCE = 2e-5  # seen: below 5e-6


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


def pair(shape: Shape, seed: int) -> tuple[Qwen2VLConfig, Qwen2VLForConditionalGeneration, VisionLanguageModel]:
    config = config_of(shape)
    reference = reference_model(config, seed)
    return config, reference, theirs_to_ours(config, reference.state_dict()).train()


def reference_pass(
    config: Qwen2VLConfig, reference: Qwen2VLForConditionalGeneration, cases: list[Case]
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
    assert out.logits is not None
    assert count == sum(int((case.labels[1:] != IGNORE).sum()) for case in cases)
    real = batch["tokens"].numel() - padding
    assert relative(out.logits[:real], torch.cat(expected)) < TOLERANCE
    assert relative(loss, expected_loss) < TOLERANCE
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    compare_gradients(SPEC, config, model, theirs, TOLERANCE, canonical)


def canonical(name: str) -> str:
    return name.replace("model.visual.", "visual.").replace("model.language_model.", "model.")


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
        reference_inputs(reference, config, case)
    batch = pack(config, cases, 3)
    other = theirs_to_ours(config.model_copy(update={"attention": implementation}), reference.state_dict())
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
        cache = model.new_cache(3, max(case.tokens.numel() for case in cases))
        first = model(pack(config, prompts), logits="last", cache=cache)
        assert cache.lengths.tolist() == [p.tokens.numel() for p in prompts]
        got = [first.logits]
        for step in range(steps):
            at = step - steps
            batch = pack(config, prompts).with_tensors(
                tokens=torch.stack([case.tokens[at] for case in cases]),
                positions=torch.stack([case.positions[:, at] for case in cases], dim=1),  # type: ignore[index]
            )
            got.append(model(batch, logits=True, cache=cache).logits)
    for step, logits in enumerate(got):
        assert relative(logits, full[ends - 1 - steps + step]) < TOLERANCE
    assert cache.lengths.tolist() == [case.tokens.numel() for case in cases]


def test_a_full_cache_and_a_wrong_number_of_rows_are_errors() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    case = make_case(config, [], 1)
    reference_inputs(reference, config, case)
    with pytest.raises(TesseraError, match="cache holds 2 tokens"):
        model(pack(config, [case]), cache=model.new_cache(1, 2))
    with pytest.raises(TesseraError, match="1 segments do not fit a cache of 2 rows"):
        model(pack(config, [case]), cache=model.new_cache(2, 50))


def test_pictures_that_do_not_fit_their_places_are_an_error_with_both_counts() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    case = make_case(config, [("image", (1, 4, 4))], 1)
    reference_inputs(reference, config, case)
    batch = pack(config, [case])
    with pytest.raises(TesseraError, match="has 3 places for visual tokens, its pictures make 4"):
        model(batch.with_tensors(media_slots=batch["media_slots"][:3]))


@pytest.mark.parametrize("training", [True, False])
def test_an_idle_tower_changes_nothing_and_gets_zero_gradients(training: bool) -> None:
    config, reference, model = pair(SHAPES[0], 5)
    model.train(training)
    case = make_case(config, [], 1)
    reference_inputs(reference, config, case)
    batch = pack(config, [case])
    out = model(batch)
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(out.hidden, plain)
    out.hidden.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None or name == "head.weight", name
        if name.startswith(("vision.", "projector.")):
            assert parameter.grad is not None
            assert not parameter.grad.any(), name


def test_bf16_weights_take_fp32_pixels_and_stay_near_fp32() -> None:
    config, reference, model = pair(SHAPES[0], 5)
    case = make_case(config, media_of(2)["mixed"], 1)
    reference_inputs(reference, config, case)
    batch = pack(config, [case])
    wide = model(batch, logits=True).logits
    narrow = model.bfloat16()(batch, logits=True).logits
    assert narrow.dtype == torch.bfloat16
    assert relative(narrow.float(), wide) < 0.1
