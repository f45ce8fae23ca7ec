from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tessera.core.batch import IGNORE
from tessera.ops.loss import linear_cross_entropy

COMPILED = pytest.param("compiled", marks=pytest.mark.slow)  # to compile takes half a minute


def example(rows: int = 23, vocab: int = 17) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, 8, generator=generator, requires_grad=True)
    weight = torch.randn(vocab, 8, generator=generator, requires_grad=True)
    labels = torch.randint(vocab, (rows,), generator=generator)
    labels[::3] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize(
    ("way", "chunk"),
    [
        ("chunked", 1),
        ("chunked", 5),
        ("chunked", 23),
        ("chunked", 100),
        pytest.param("compiled", 5, marks=pytest.mark.slow),
    ],
)
def test_chunks_equal_eager(way: str, chunk: int) -> None:
    hidden, weight, labels = example()
    results = []
    for implementation in ("eager", way):
        total, count = linear_cross_entropy(hidden, weight, labels, chunk=chunk, implementation=implementation)
        assert count.item() == 15
        assert total.dtype == torch.float32
        results.append([total.detach(), *torch.autograd.grad(total * 0.7, (hidden, weight))])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


class Largest(TorchDispatchMode):
    """The most rows of logits that were held in fp32 at once."""

    rows = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dtype == torch.float32 and out.shape[1:] == (17,):
            self.rows = max(self.rows, out.shape[0])
        return out


@pytest.mark.parametrize("implementation", ["chunked", COMPILED])
def test_a_loss_without_gradients_holds_no_more_than_a_chunk(implementation: str) -> None:
    """Twice as many positions at a time are for the compiled form alone, which has no logits in fp32."""
    hidden, weight, labels = (x.detach() for x in example())
    with torch.no_grad(), Largest() as largest:
        linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, chunk=6, implementation=implementation)
    assert largest.rows == 6


@pytest.mark.parametrize("implementation", ["eager", "chunked", COMPILED])
def test_a_row_with_nothing_to_train_gives_zero_and_zero_gradients(implementation: str) -> None:
    hidden, weight, labels = example()
    total, count = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORE), implementation=implementation)
    total.backward()
    assert total.item() == 0
    assert count.item() == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert not hidden.grad.any()
    assert not weight.grad.any()


def test_a_tied_weight_receives_both_gradients() -> None:
    _, weight, labels = example()
    tokens = torch.arange(labels.numel()) % weight.shape[0]
    grads = []
    for implementation in ("eager", "chunked"):
        total, _ = linear_cross_entropy(
            F.embedding(tokens, weight) * 1.5, weight, labels, chunk=4, implementation=implementation
        )
        grads.extend(torch.autograd.grad(total, weight))
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_receives_none() -> None:
    hidden, weight, labels = example()
    total, _ = linear_cross_entropy(hidden, weight.detach(), labels, chunk=4)
    (grad,) = torch.autograd.grad(total, hidden)
    total, _ = linear_cross_entropy(hidden, weight.detach(), labels, implementation="eager")
    torch.testing.assert_close(grad, torch.autograd.grad(total, hidden)[0], rtol=1e-5, atol=1e-5)


def test_without_gradients_the_value_is_the_same() -> None:
    hidden, weight, labels = example()
    with torch.no_grad():
        total, _ = linear_cross_entropy(hidden, weight, labels, chunk=4)
    reference, _ = linear_cross_entropy(hidden, weight, labels, implementation="eager")
    assert not total.requires_grad
    torch.testing.assert_close(total, reference.detach(), rtol=1e-6, atol=1e-6)


def test_bf16_inputs_give_an_fp32_sum_and_gradients_near_those_of_fp32() -> None:
    hidden, weight, labels = example(rows=64)
    exact, _ = linear_cross_entropy(hidden, weight, labels, implementation="eager")
    reference = torch.autograd.grad(exact / 3, (hidden, weight))
    narrow = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    total, _ = linear_cross_entropy(narrow[0], narrow[1], labels, chunk=10)
    assert total.dtype == torch.float32
    for ours, wide in zip(torch.autograd.grad(total / 3, narrow), reference, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - wide).abs().max() < 0.03 * wide.abs().max()
