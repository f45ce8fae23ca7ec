"""Limits that are derived let another order of adding pass, and nothing that is wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.close import assert_as_close, assert_within_rounding, queries_for_keys, rounding, with_moved_weights


@pytest.mark.parametrize("terms", [10, 1000])
def test_another_order_of_adding_is_within_rounding_and_a_lost_term_is_not(terms: int) -> None:
    numbers = torch.randn(terms, 500, generator=torch.Generator().manual_seed(terms))
    exact = numbers.double().sum(0)
    size = numbers.double().square().sum(0).sqrt()
    one_by_one = numbers.cumsum(0)[-1]
    assert float(((one_by_one - exact) / size).abs().max()) <= rounding(terms)
    assert float(((one_by_one - numbers[3] - exact) / size).abs().max()) > rounding(terms)


def test_ours_may_be_as_far_from_float64_as_a_peer_and_not_much_further() -> None:
    exact = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    peer, ours = exact.bfloat16(), (exact * 1.0001).bfloat16()
    assert_as_close(ours, peer, exact)
    assert_as_close(exact.float(), exact.float(), exact.float().double())  # a peer without any error
    with pytest.raises(AssertionError, match="from float64"):
        assert_as_close((exact * 1.02).bfloat16(), peer, exact)
    with pytest.raises(AssertionError, match="from float64"):
        assert_as_close(ours.float(), exact.float(), exact)


class Cancels(nn.Module):
    """A bias whose gradient is a small difference of large terms, as that of keys in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().sum() - (x + 1e-3).square().sum()


def gradients(net: Cancels, x: Tensor) -> dict[str, Tensor]:
    values = torch.autograd.grad(net(x), list(net.parameters()))
    return dict(zip((name for name, _ in net.named_parameters()), values, strict=True))


def test_what_cancels_may_differ_by_more_and_a_wrong_gradient_is_found() -> None:
    torch.manual_seed(0)
    net, x = Cancels(), torch.randn(40, 24)
    plain, *moved = with_moved_weights(net.parameters(), lambda: gradients(net, x))
    again = gradients(net, x)
    assert all(torch.equal(again[name], plain[name]) for name in plain)  # the weights are as they were
    parts = [gradients(net, part) for part in x.flip(0).split(7)]
    other = {name: torch.stack([part[name] for part in parts]).sum(0) for name in plain}
    assert any(not torch.equal(other[name], plain[name]) for name in plain)
    assert_within_rounding(other, plain, *moved)
    for name in plain:
        with pytest.raises(AssertionError, match=name):
            assert_within_rounding({**other, name: other[name] * 1.01}, plain, *moved)


def test_a_sum_that_cancels_may_have_the_roundings_of_its_terms_and_no_more() -> None:
    keys = torch.randn(256, 8, generator=torch.Generator().manual_seed(3))
    terms = torch.cat([keys, -keys]).double()
    exact, other_order = terms.sum(0), torch.full((8,), 8 * 1.2e-7 * 16.0)
    with pytest.raises(AssertionError, match="from float64"):
        assert_as_close(other_order, exact.float(), exact)
    assert_as_close(other_order, exact.float(), exact, roundings=8.0, terms=terms.square().sum(0).sqrt())
    with pytest.raises(AssertionError, match="from float64"):
        assert_as_close(other_order * 100, exact.float(), exact, roundings=8.0, terms=terms.square().sum(0).sqrt())
    assert queries_for_keys("blocks.1.attn1.norm_k.bias") == "blocks.1.attn1.norm_q.bias"
    assert queries_for_keys("vision.layers.0.k_proj.bias") == "vision.layers.0.q_proj.bias"
    assert queries_for_keys("attn.add_k_proj.bias") == "attn.add_k_proj.bias"  # of the keys of text alone
    assert queries_for_keys("attn.norm_k.weight") == "attn.norm_k.weight"
