"""Losses, gradients and updates of MindSpore are those of torch."""

from __future__ import annotations

import math

import needed  # noqa: F401
import pytest
import torch
from models_of_both import NAMES, batch_of, mindspore_of, mindspore_results, model_of, torch_results

from tessera.core.batch import Batch
from tessera.mindspore.functions import from_torch
from tessera.mindspore.optimizer import clipping
from tessera.optim.adamw import AdamW
from tests.close import assert_as_close, distance, queries_for_keys, size

pytestmark = pytest.mark.mindspore
CASES = [*NAMES, "qwen2 tied", "qwen2 lora", "qwen2_vl lora"]
EPS = torch.finfo(torch.float32).eps


def batches_of(family: str) -> list[Batch]:
    """Two micro-batches of different lengths; of a vision family the second has no image."""
    second = batch_of("qwen2", 2, (12,))
    if family == "qwen2_vl":
        second = second.with_tensors(positions=second["positions"].expand(3, -1))
    return [batch_of(family, 1), second]


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients(case: str) -> None:
    """In float64 they differ by what torch rounds to float32 (rotations, angles); in float32 MindSpore is not much
    further from float64 than torch: its exponential and logarithm err by 4 roundings, those of torch by half of one."""
    family, _, more = case.partition(" ")
    wide, narrow = (
        model_of(family, dtype, tied=more == "tied", lora=more == "lora") for dtype in (torch.float64, torch.float32)
    )
    batches = batches_of(family)
    exact, peer = torch_results(wide, batches), torch_results(narrow, batches)
    same, ours = mindspore_results(wide, batches), mindspore_results(narrow, batches)
    assert exact.keys() == same.keys() == ours.keys()
    for name, tensor in exact.items():
        terms = exact[queries_for_keys(name)]
        assert size(tensor) > 0, name
        assert distance(same[name], tensor) <= 8 * EPS * max(size(tensor), size(terms)), name
        assert_as_close(ours[name], peer[name], tensor, k=8.0, roundings=2.0, what=name, terms=terms)


def test_a_wrong_formula_is_seen() -> None:
    """The limits are narrow enough to see a scale of adapters that is wrong by a millionth."""
    module = model_of("qwen2", torch.float64, lora=True)
    exact = torch_results(module, batches_of("qwen2"))
    for part in module.modules():
        if hasattr(part, "adapter"):
            part.adapter = type(part.adapter)(part.adapter.rank, part.adapter.scale * (1 + 3e-6))
    wrong = mindspore_results(module, batches_of("qwen2"))
    assert any(distance(wrong[name], tensor) > 8 * EPS * size(tensor) for name, tensor in exact.items())


# Numbers such as the betas are float32 in operators of MindSpore, also beside tensors of float64.
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, EPS / 2), (torch.float32, 4 * EPS)])
@pytest.mark.parametrize("clip", [None, 0.5, 100.0])
def test_updates_are_those_of_adamw(dtype: torch.dtype, limit: float, clip: float | None) -> None:
    """Six updates from the same gradients, with weight decay, a rate that changes, clipping and a dropped step."""
    ours, theirs = (model_of("qwen2", dtype) for _ in range(2))
    _, state, optimizer = mindspore_of(ours)
    groups = [{"params": list(theirs.parameters()), "lr": 1e-2, "weight_decay": 0.1}]
    peer = AdamW(groups, (0.9, 0.95), 1e-8, fused=False)
    clip_ours = clipping(state, optimizer, clip)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        gradients = {n: torch.randn(p.shape, generator=generator).to(dtype) for n, p in theirs.named_parameters()}
        for name, parameter in theirs.named_parameters():
            parameter.grad = gradients[name]
        state.gradients = {name: from_torch(gradient) for name, gradient in gradients.items()}
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), math.inf if clip is None else clip)
        assert math.isclose(float(clip_ours()), float(norm), rel_tol=16 * EPS)
        for group in (*optimizer.param_groups, *peer.param_groups):
            group["lr"] = 1e-2 / (step + 1)
        if step != 3:  # dropped by the guard
            optimizer.step()
            peer.step()
        optimizer.zero_grad()
        peer.zero_grad()
        state.store(optimizer)
        for (name, mine), reference in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert distance(mine, reference) <= (step + 1) * limit * size(reference), (step, name)
            for key in ("exp_avg", "exp_avg_sq"):
                held, expected = optimizer.state[mine][key], peer.state[reference][key]
                assert distance(held, expected) <= (step + 1) * 20 * limit * size(expected), (step, name, key)
            assert float(optimizer.state[mine]["step"]) == float(peer.state[reference]["step"])
