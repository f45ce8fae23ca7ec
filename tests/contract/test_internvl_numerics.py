"""Our InternVL against transformers', in fp32: logits, loss, every gradient; theirs sample by sample, ours packed."""

from __future__ import annotations

import pytest
import torch
from internvl_cases import MEDIA, SHAPES, Case, make_case, pack, pair, reference_inputs
from parity import compare_gradients, from_foreign, relative
from test_language_families import saved, spread
from torch import Tensor
from transformers import InternVLForConditionalGeneration

from tessera.core.errors import TesseraError
from tessera.core.types import IGNORE
from tessera.models.internvl import SPEC
from tessera.ops.loss import linear_cross_entropy

TOLERANCE = 1e-4  # seen: below 5e-6


def reference_pass(reference: InternVLForConditionalGeneration, cases: list[Case]) -> tuple[Tensor, Tensor]:
    """Logits of all cases and the summed loss; gradients are left in the model."""
    logits, total = [], torch.zeros(())
    for case in cases:
        out = reference(**reference_inputs(case)).logits[0]
        shifted = torch.cat([case.labels[1:], torch.tensor([IGNORE])])
        total = total + torch.nn.functional.cross_entropy(out, shifted, ignore_index=IGNORE, reduction="sum")
        logits.append(out)
    total.backward()
    return torch.cat(logits), total


def compare(number: int, seed: int, names: list[str], padding: int) -> None:
    config, reference, model = pair(number, seed)
    cases = [make_case(config, MEDIA[name], seed + at) for at, name in enumerate(names)]
    expected, expected_loss = reference_pass(reference, cases)
    batch = pack(config, cases, padding)
    out = model(batch, logits=True)
    loss, count = linear_cross_entropy(out.hidden, out.head.weight, batch["labels"], chunk=16)
    loss.backward()
    assert count == sum(int((case.labels[1:] != IGNORE).sum()) for case in cases)
    real = batch["tokens"].numel() - padding
    assert relative(out.logits[:real], expected) < TOLERANCE
    assert relative(loss, expected_loss) < TOLERANCE
    assert SPEC.weights is not None
    grads = {name: p.grad for name, p in reference.named_parameters()}
    known = spread({name: grad for name, grad in grads.items() if grad is not None})
    idle = {name: None for name, grad in grads.items() if grad is None}
    canonical = SPEC.weights(config).canonical
    compare_gradients(SPEC, config, model, {**known, **idle}, TOLERANCE, canonical, queries_for_keys)


def queries_for_keys(name: str) -> str:
    return name.replace("k_proj.bias", "q_proj.bias") if name.startswith("vision_tower.") else name


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_packed_batches_of_everything(number: int) -> None:
    compare(number, 10 * number, ["one", "text", "mixed", "several", "video"], padding=number)


@pytest.mark.parametrize("name", sorted(MEDIA))
def test_single_samples(name: str) -> None:
    compare(0, 3, [name], padding=5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_attention_gives_the_same_logits(implementation: str) -> None:
    config, reference, model = pair(1, 1)
    batch = pack(config, [make_case(config, MEDIA[name], 7) for name in ("mixed", "text")], 3)
    other = from_foreign(SPEC, config.model_copy(update={"attention": implementation}), saved(reference))
    torch.testing.assert_close(other(batch, logits=True).logits, model(batch, logits=True).logits, rtol=1e-4, atol=1e-4)


def test_cached_decoding_equals_the_full_forward() -> None:
    config, _, model = pair(2, 5)
    model.eval()
    cases = [make_case(config, MEDIA[name], 20 + n) for n, name in enumerate(("one", "text", "video"))]
    full = model(pack(config, cases), logits=True).logits
    ends = torch.tensor([case.tokens.numel() for case in cases]).cumsum(0)
    steps = 3  # every sample ends with at least four words, none of them a picture
    prompts = [Case(case.tokens[:-steps], case.labels[:-steps], case.tiles) for case in cases]
    with torch.no_grad():
        cache = model.new_cache(3, max(case.tokens.numel() for case in cases))
        got = [model(pack(config, prompts), logits="last", cache=cache).logits]
        for at in range(-steps, 0):
            batch = pack(config, prompts).with_tensors(
                tokens=torch.stack([case.tokens[at] for case in cases]),
                positions=torch.tensor([case.tokens.numel() + at for case in cases]),
            )
            got.append(model(batch, logits=True, cache=cache).logits)
    for step, logits in enumerate(got):
        assert relative(logits, full[ends - 1 - steps + step]) < TOLERANCE


def test_an_idle_tower_changes_nothing_and_gets_zero_gradients() -> None:
    config, _, model = pair(1, 5)
    batch = pack(config, [make_case(config, [], 1)])
    out = model(batch)
    plain = model.text(model.text.embed(batch["tokens"]), batch["positions"], batch.segments["text"])
    assert torch.equal(out.hidden, plain)
    out.hidden.sum().backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision.", "projector.")):
            assert parameter.grad is not None, name
            assert not parameter.grad.any(), name


def test_tiles_that_do_not_fit_their_places_are_an_error_with_both_counts() -> None:
    config, _, model = pair(0, 5)
    batch = pack(config, [make_case(config, [1], 1)])
    with pytest.raises(TesseraError, match="has 3 places for visual tokens, its pictures make 4"):
        model(batch.with_tensors(media_slots=batch["media_slots"][:3]))


def test_bf16_weights_take_fp32_pixels_and_stay_near_fp32() -> None:
    config, _, model = pair(0, 5)
    batch = pack(config, [make_case(config, MEDIA["mixed"], 1)])
    wide = model(batch, logits=True).logits
    narrow = model.bfloat16()(batch, logits=True).logits
    assert narrow.dtype == torch.bfloat16
    assert relative(narrow.float(), wide) < 0.1
