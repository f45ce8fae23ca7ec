"""Move activations between tensor-parallel ranks, and compute the loss of a vocabulary that is split over them.

The backward pass of a mapping is its counterpart: a copy becomes a sum, a gather becomes a split. The names are those
of `megatron.core.tensor_parallel`; hidden states are [sequence, batch, hidden].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tessera.errors import TesseraError
from tessera.parallel.collectives import as_it_is, gathered, scattered, summed, with_backward
from tessera.runtime import device as devices
from tessera_compat.megatron import parallel_state


def _tensor_group() -> Any:
    return parallel_state.get_tensor_model_parallel_group()


def divide(numerator: int, denominator: int) -> int:
    """Divide two integers. Raise if there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ensure_divisibility(numerator: int, denominator: int) -> None:
    if numerator % denominator:
        raise TesseraError(
            f"{numerator} is not a multiple of {denominator}",
            fix="change one of the two sizes",
            code="megatron.not-a-multiple",
        )


class VocabUtility:
    """Compute the range of token ids whose embeddings a rank stores."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        size = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(size, rank, world_size)


def _mapped(x: Tensor, forward: Callable[[Tensor, Any], Tensor], backward: Callable[[Tensor, Any], Tensor]) -> Tensor:
    group = _tensor_group()
    if group.size() == 1:
        return x
    return with_backward(x, lambda t: forward(t, group), lambda t: backward(t, group))


def _same(x: Tensor, group: Any) -> Tensor:
    return as_it_is(x)


def _own_part(x: Tensor, group: Any, dim: int) -> Tensor:
    ensure_divisibility(x.shape[dim], group.size())
    return x.chunk(group.size(), dim=dim)[dist.get_rank(group)].contiguous()


def _own_columns(x: Tensor, group: Any) -> Tensor:
    return _own_part(x, group, -1)


def _own_rows(x: Tensor, group: Any) -> Tensor:
    return _own_part(x, group, 0)


def _all_columns(x: Tensor, group: Any) -> Tensor:
    parts = gathered(x.unsqueeze(0), group)
    return torch.cat(list(parts), dim=-1)


def copy_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Return the input. Backward sums its gradient over tensor-parallel ranks."""
    return _mapped(input_, _same, summed)


def reduce_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Sum over tensor-parallel ranks. Backward passes the gradient on unchanged."""
    return _mapped(input_, summed, _same)


def scatter_to_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Return this rank's slice of the last dimension."""
    return _mapped(input_, _own_columns, _all_columns)


def gather_from_tensor_model_parallel_region(input_: Tensor) -> Tensor:
    """Return the slices of all ranks, joined along the last dimension."""
    return _mapped(input_, _all_columns, _own_columns)


def scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """Return this rank's slice of the sequence."""
    return _mapped(input_, _own_rows, gathered)


def gather_from_sequence_parallel_region(input_: Tensor, tensor_parallel_output_grad: bool = True) -> Tensor:
    """Gather the full sequence from all ranks. Backward sums the gradients if each rank computes a part of them."""
    return _mapped(input_, gathered, scattered if tensor_parallel_output_grad else _own_rows)


def reduce_scatter_to_sequence_parallel_region(input_: Tensor) -> Tensor:
    """Sum over tensor-parallel ranks, and return this rank's slice of the sequence."""
    return _mapped(input_, scattered, gathered)


def broadcast_data(keys: Sequence[str], data: Mapping[str, Tensor] | None, datatype: torch.dtype) -> dict[str, Tensor]:
    """Broadcast the tensors of the first tensor-parallel rank to the others, which pass None as `data`."""
    group, source = _tensor_group(), parallel_state.get_tensor_model_parallel_src_rank()
    device = devices.current()
    header: list[Any] = [None, None]  # broadcast before the tensors: missing keys, and shapes
    if dist.get_rank() == source:
        tensors = data or {}
        header[0] = [key for key in keys if key not in tensors or tensors[key].dtype != datatype]
        header[1] = [list(tensors[key].shape) for key in keys if key in tensors]
    dist.broadcast_object_list(header, src=source, group=group)
    missing, shapes = header
    if missing:
        raise TesseraError(
            f"these keys of the batch are missing or not {datatype}: {', '.join(missing)}",
            where="broadcast_data",
            fix="cast the tensors before broadcast_data",
            code="megatron.batch-type",
        )
    result = {}
    for key, shape in zip(keys, shapes, strict=True):
        tensor = (
            data[key].to(device).contiguous() if data is not None else torch.empty(shape, dtype=datatype, device=device)
        )
        dist.broadcast(tensor, src=source, group=group)
        result[key] = tensor
    return result


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Compute the loss of each token from logits that are split over ranks, without gathering them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, label_smoothing: float, group: Any) -> Tensor:
        logits = logits if logits.dtype is torch.float64 else logits.float()
        largest = logits.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        size = logits.shape[-1]
        local = target - dist.get_rank(group) * size
        here = (local >= 0) & (local < size)
        local = local.where(here, 0)
        predicted = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).where(here, 0.0)
        weights = logits.exp()
        total = weights.sum(dim=-1)
        # One collective sums the three values over the vocabulary.
        sums = torch.stack([predicted, total, logits.sum(dim=-1)])
        dist.all_reduce(sums, group=group)
        predicted, total, all_logits = sums.unbind(0)
        vocabulary = size * group.size()
        smoothing = label_smoothing * vocabulary / (vocabulary - 1) if label_smoothing else 0.0
        loss = total.log() - (1.0 - smoothing) * predicted - smoothing / vocabulary * all_logits
        ctx.save_for_backward(weights / total.unsqueeze(-1), local, here)
        ctx.smoothing, ctx.vocabulary = smoothing, vocabulary
        return torch.as_tensor(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, local, here = ctx.saved_tensors
        grad = probabilities.clone()
        hit = here.to(grad.dtype).unsqueeze(-1) * (1.0 - ctx.smoothing)
        grad.scatter_add_(-1, local.unsqueeze(-1), -hit)
        if ctx.smoothing:
            grad -= ctx.smoothing / ctx.vocabulary
        return grad * grads[0].unsqueeze(-1), None, None, None


def vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each token, in float32 or wider, from logits [..., vocabulary / ranks] and targets [...]."""
    if not 0.0 <= label_smoothing < 1.0:
        raise TesseraError(
            f"label_smoothing must be at least 0 and below 1, not {label_smoothing}", code="megatron.label-smoothing"
        )
    group = _tensor_group()
    if target.device.type == "cpu":
        vocabulary = vocab_parallel_logits.shape[-1] * group.size()
        check_ids(target.clamp(min=0), vocabulary, "labels")  # negative labels are masked out of the loss
    loss: Tensor = _VocabParallelCrossEntropy.apply(  # type: ignore[no-untyped-call]
        vocab_parallel_logits, target, label_smoothing, group
    )
    return loss


def check_ids(ids: Tensor, vocabulary: int, what: str) -> None:
    """Raise for token ids outside the vocabulary. Only tensors on the host are checked: others would need a sync."""
    if ids.numel() and (int(ids.max()) >= vocabulary or int(ids.min()) < 0):
        raise TesseraError(
            f"{what} contain ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {vocabulary} tokens",
            fix="set vocab_size to that of the tokenizer, and mask padding in loss_mask",
            code="megatron.ids-outside-vocabulary",
        )
