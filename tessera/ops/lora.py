"""A linear layer with a low-rank adapter. Over ranks that compute the layer together nothing more is sent than without.

There a layer's weight is a `DTensor`, and so is what comes in. Cut by columns, each rank has all of A and its rows of
B; cut by rows, its columns of A and all of B. Either way the adapter's part is placed as the layer's own product is
and joins it before it is summed. Of the factor that is whole each rank finds a part of the gradient: whoever deals the
layer out sums it when the step ends.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from tessera.core.tensors import local_part


def adapted_linear(x: Tensor, product: Tensor, a: Tensor, b: Tensor, scale: float, dropout: float = 0.0) -> Tensor:
    """`product` of the layer itself, plus `scale` x A [rank, in] and B [out, rank] applied to `x`. Dropout draws from
    torch's own stream: each rank that computes the layer draws its own."""
    if not isinstance(product, DTensor):
        return product + scale * _low_rank(x, a, b, dropout)
    assert isinstance(x, DTensor), "a layer that is dealt out gets its input from ranks that share it"
    # What each rank's columns add to the gradient of the input is a part of it, as it is for the layer itself.
    slope = [Partial() if placement.is_replicate() else placement for placement in x.placements]
    own = _low_rank(x.to_local(grad_placements=slope), local_part(a), local_part(b), dropout)
    beside = DTensor.from_local(
        scale * own,
        product.device_mesh,
        product.placements,
        run_check=False,
        shape=product.shape,
        stride=product.stride(),
    )
    joined: Tensor = product + beside
    return joined


def _low_rank(x: Tensor, a: Tensor, b: Tensor, dropout: float) -> Tensor:
    return F.linear(F.linear(F.dropout(x, dropout) if dropout else x, a), b)
