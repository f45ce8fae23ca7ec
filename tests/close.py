"""How far apart two computations of the same thing may be: limits that are derived, not tuned to one machine.

Machines add in different orders, so two right results differ by rounding, and how much depends on the computation: a
gradient that is a small difference of large terms loses more than a plain sum. Three ways to say what is allowed:

- `assert_as_close`: ours is no further from a float64 result than a few times what a plain peer of our type is.
- `assert_within_rounding`: two ways differ by no more than a few times what one of them moves by when every weight
  moves by one rounding. Any order of adding gives the exact result of inputs that were moved by so little.
- `rounding`: for a plain sum, a few roundings times the root of the number of terms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor


def rounding(terms: int = 1, dtype: torch.dtype = torch.float32, k: float = 8.0) -> float:
    """The error of a sum of `terms` numbers, in units of the root of the sum of their squares."""
    return float(k * torch.finfo(dtype).eps * terms**0.5)


def distance(computed: Tensor, exact: Tensor) -> float:
    """The root of the mean square of differences, in float64: one unlucky element does not decide it."""
    apart = computed.detach().double().cpu() - exact.detach().double().cpu()
    return float(apart.square().mean().sqrt())


def size(tensor: Tensor) -> float:
    """The root of the mean square of its elements."""
    return distance(tensor, torch.zeros_like(tensor))


def queries_for_keys(name: str) -> str:
    """The name of the same bias of queries, for that of keys. What is added to all keys moves all scores of a query
    alike, and the softmax takes it away: where no positions turn the keys, the gradient of their bias is the sum of
    terms as large as those of queries, and is zero but for rounding."""
    return re.sub(r"\bk((?:_proj)?\.bias)$", r"q\1", re.sub(r"_k\.bias$", "_q.bias", name))


def assert_as_close(
    ours: Tensor,
    peer: Tensor,
    exact: Tensor,
    k: float = 3.0,
    roundings: float = 0.5,
    what: str = "",
    terms: Tensor | None = None,
) -> None:
    """`ours` and `peer` are in the same type, `exact` in float64. Where the peer happens to be nearly exact (it is by
    luck, in small tensors), ours may still have its `roundings`: half a unit of the type is one. `terms`: something as
    large as the terms of a sum that cancels."""
    assert ours.shape == peer.shape == exact.shape, what
    least = roundings * torch.finfo(peer.dtype).eps * max(size(exact), 0.0 if terms is None else size(terms))
    error, limit = distance(ours, exact), k * max(distance(peer, exact), least)
    assert error <= limit, f"{what}: {error:.3g} from float64, the peer {distance(peer, exact):.3g}"


def with_moved_weights(
    weights: Iterable[Tensor], compute: Callable[[], Mapping[str, Tensor]]
) -> list[Mapping[str, Tensor]]:
    """What `compute` gives from the weights as they stand, and twice more with all of them moved by one rounding."""
    weights = list(weights)
    originals = [weight.detach().clone() for weight in weights]
    results = [{name: tensor.detach().clone() for name, tensor in compute().items()}]
    for seed in (0, 1):
        move_by_a_rounding(weights, seed)
        results.append({name: tensor.detach().clone() for name, tensor in compute().items()})
        with torch.no_grad():
            for weight, before in zip(weights, originals, strict=True):
                weight.copy_(before)
    return results


def assert_within_rounding(
    computed: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    *moved: Mapping[str, Tensor],
    k: float = 8.0,
    roundings: float = 1.0,
) -> None:
    """`computed` are `plain` computed another way; `moved` are they from weights moved by one rounding. Each
    tensor as a whole: its largest difference. `roundings`: of a result that are due to something else than weights."""
    assert computed.keys() == plain.keys()
    apart = {}
    for name, tensor in plain.items():
        sizes = [float((other[name].detach() - tensor.detach()).abs().max()) for other in moved]
        rounding = roundings * torch.finfo(tensor.dtype).eps * float(tensor.detach().abs().max())
        limit = k * (max(sizes) + rounding)
        error = float((computed[name].detach() - tensor.detach()).abs().max())
        apart[name] = error / limit if error > 0 else 0.0
    worst = max(apart, key=apart.__getitem__)
    share_of_limit = apart[worst]
    assert share_of_limit <= 1, f"{worst} moved {share_of_limit * k:.1f} times as far as by one rounding of the weights"


def move_by_a_rounding(weights: Iterable[Tensor], seed: int) -> None:
    """Every element one rounding up or down."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in weights:
            signs = torch.randint(0, 2, weight.shape, generator=chance).to(weight) * 2 - 1
            weight.addcmul_(weight, signs, value=torch.finfo(weight.dtype).eps)
