"""Split embeddings and linear layers over tensor-parallel ranks, as `megatron.core.tensor_parallel.layers`.

Weights are plain parameters that hold this rank's rows or columns. With `use_cpu_initialization` every rank draws the
unsharded weight on the host and stores its slice, so all layouts start from the same numbers; otherwise each rank draws
its slice on the current device. Where input and weight differ in type, the product is computed in that of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.config import ModelParallelConfig
from tessera_compat.megatron.mappings import (
    VocabUtility,
    check_ids,
    copy_to_tensor_model_parallel_region,
    divide,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from tessera_compat.megatron.random import model_parallel_stream
from tessera_compat.megatron.sharding import ShardedTensor, make_sharded_tensors_for_checkpoint


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set attributes on a parameter that tell a user's optimizer or checkpoint how it is split."""
    tensor.tensor_model_parallel = is_parallel  # type: ignore[attr-defined]
    tensor.partition_dim = dim  # type: ignore[attr-defined]
    tensor.partition_stride = stride  # type: ignore[attr-defined]


def own_slice(whole: Tensor, dim: int, stride: int = 1) -> Tensor:
    """Return this rank's slice of an unsharded weight. Each of `stride` equal blocks is split over all ranks."""
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    size = divide(whole.shape[dim], ranks * stride)
    blocks = torch.split(whole, size, dim=dim)
    return torch.cat([blocks[block * ranks + rank] for block in range(stride)], dim=dim)


def make_weight(
    config: ModelParallelConfig, shape: tuple[int, ...], dim: int, init_method: Callable[[Tensor], Any], stride: int = 1
) -> Parameter:
    """Return this rank's slice of a new weight with the unsharded `shape`, split along `dim`."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    local = list(shape)
    local[dim] = divide(shape[dim], ranks)
    if config.use_cpu_initialization:
        weight = Parameter(torch.empty(local, dtype=config.params_dtype))
        if config.perform_initialization:
            whole = torch.empty(shape, dtype=torch.float32)
            init_method(whole)
            weight.data.copy_(own_slice(whole, dim, stride))
    else:
        weight = Parameter(torch.empty(local, dtype=config.params_dtype, device=devices.current()))
        if config.perform_initialization:
            with model_parallel_stream():
                init_method(weight)
    set_tensor_model_parallel_attributes(weight, True, dim, stride)
    return weight


def make_bias(config: ModelParallelConfig, size: int) -> Parameter:
    """Return a new bias of zeros."""
    device = torch.device("cpu") if config.use_cpu_initialization else devices.current()
    return Parameter(torch.zeros(size, dtype=config.params_dtype, device=device))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer in the dtype of its weight. Inputs are cast: norms may return float32."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    return F.linear(x, weight, bias)


class VocabParallelEmbedding(nn.Module):
    """Split the rows of an embedding over tensor-parallel ranks."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], Any],
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.tensor_model_parallel_size = parallel_state.get_tensor_model_parallel_world_size()
        if num_embeddings % self.tensor_model_parallel_size:
            raise TesseraError(
                f"a vocabulary of {num_embeddings} does not divide over {self.tensor_model_parallel_size} ranks",
                where="VocabParallelEmbedding",
                fix="pad vocab_size to a multiple of the tensor-parallel size",
                code="megatron.vocabulary-not-divisible",
            )
        self.vocab_start_index, self.vocab_end_index = VocabUtility.vocab_range_from_global_vocab_size(
            num_embeddings, parallel_state.get_tensor_model_parallel_rank(), self.tensor_model_parallel_size
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        self.weight = make_weight(config, (num_embeddings, embedding_dim), 0, init_method)

    def forward(self, input_: Tensor) -> Tensor:
        if input_.device.type == "cpu":
            check_ids(input_, self.num_embeddings, "tokens")
        if self.tensor_model_parallel_size == 1:
            return F.embedding(input_, self.weight)
        row = input_ - self.vocab_start_index
        here = (row >= 0) & (row < self.num_embeddings_per_partition)
        embedded = F.embedding(row.where(here, 0), self.weight).where(here.unsqueeze(-1), 0.0)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(embedded.transpose(0, 1).contiguous())
        return reduce_from_tensor_model_parallel_region(embedded)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        return make_sharded_tensors_for_checkpoint({"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets)


class ColumnParallelLinear(nn.Module):
    """Split a linear layer over ranks by outputs. It returns (output, bias); without `skip_bias_add` bias is None."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_options(
            "ColumnParallelLinear",
            is_expert=is_expert,
            keep_master_weight_for_test=keep_master_weight_for_test,
            **options,
        )
        self.input_size = input_size
        self.output_size = output_size
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.config = config
        self.stride = stride
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.output_size_per_partition = divide(output_size, self.ranks)
        self.sequence_parallel = config.sequence_parallel
        self.weight = (
            None
            if skip_weight_param_allocation
            else make_weight(config, (output_size, input_size), 0, init_method, stride)
        )
        if bias:
            self.bias = make_bias(config, self.output_size_per_partition)
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)
        else:
            self.register_parameter("bias", None)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        weight = self.weight if weight is None else weight
        if weight is None:
            raise TesseraError(
                "this layer has no weight of its own",
                where="ColumnParallelLinear",
                fix="pass the shared weight: forward(input, weight)",
                code="megatron.layer-without-weight",
            )
        if self.sequence_parallel:
            input_ = gather_from_sequence_parallel_region(input_)
        else:
            input_ = copy_to_tensor_model_parallel_region(input_)
        output = linear(input_, weight, None if self.skip_bias_add else self.bias)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather_from_tensor_model_parallel_region(output)
        return output, self.bias if self.skip_bias_add else None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        tensors = {
            name: tensor for name, tensor in (("weight", self.weight), ("bias", self.bias)) if tensor is not None
        }
        return make_sharded_tensors_for_checkpoint(
            tensors, prefix, {"weight": 0, "bias": 0}, sharded_offsets, stride=self.stride
        )

    def __repr__(self) -> str:
        # Megatron 0.12.1 prints bias=False for every layer, and scripts compare the printed text.
        sizes = f"in_features={self.input_size}, out_features={self.output_size}"
        return f"{type(self).__name__}({sizes}, bias=False, TP={self.ranks})"


class RowParallelLinear(nn.Module):
    """Split a linear layer over ranks by inputs, and sum the products. It returns (output, bias)."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse_options(
            "RowParallelLinear", is_expert=is_expert, keep_master_weight_for_test=keep_master_weight_for_test, **options
        )
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.config = config
        self.ranks = parallel_state.get_tensor_model_parallel_world_size()
        self.input_size_per_partition = divide(input_size, self.ranks)
        self.sequence_parallel = config.sequence_parallel
        if self.sequence_parallel and not input_is_parallel:
            raise TesseraError(
                "sequence_parallel needs input_is_parallel=True",
                where="RowParallelLinear",
                code="megatron.input-not-parallel",
            )
        self.weight = make_weight(config, (output_size, input_size), 1, init_method, stride)
        if bias:
            self.bias = make_bias(config, output_size)
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_)
        output = linear(input_, self.weight)
        if self.sequence_parallel:
            output = reduce_scatter_to_sequence_parallel_region(output)
        else:
            output = reduce_from_tensor_model_parallel_region(output)
        if self.skip_bias_add:
            return output, self.bias
        return (output if self.bias is None else output + self.bias), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, ShardedTensor]:
        tensors = {
            name: tensor for name, tensor in (("weight", self.weight), ("bias", self.bias)) if tensor is not None
        }
        return make_sharded_tensors_for_checkpoint(tensors, prefix, {"weight": 1}, sharded_offsets)

    def __repr__(self) -> str:
        sizes = f"in_features={self.input_size}, out_features={self.output_size}"
        return f"{type(self).__name__}({sizes}, bias=False, TP={self.ranks})"


def refuse_options(layer: str, **options: Any) -> None:
    """Raise if an unsupported option is switched on."""
    for name, value in options.items():
        if value:
            raise TesseraError(
                f"{name}={value!r} is not supported",
                where=layer,
                fix="remove it",
                code="megatron.unsupported-argument",
            )
