"""Describe the shards of a rank as boxes of unsharded tensors: the contents of `sharded_state_dict` and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera_compat.megatron import parallel_state

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a block in a tensor


@dataclass
class ShardedTensor:
    """Describe a rank's shard of a tensor, with the name of the full tensor.

    With a `stride` above 1, the full tensor consists of `stride` equal parts along the split axis, such as the gate and
    up projections of a gated layer. The shard contains a block of each part.
    """

    key: str
    data: Tensor | None
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0
    prepend_axis_num: int = 0
    stride: int = 1
    split_axis: int = 0

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: int | tuple[int, ...] = 0,
        prepend_axis_num: int = 0,
        stride: int = 1,
    ) -> ShardedTensor:
        """Describe a shard by (axis, index of the part, number of parts) for each axis that is split."""
        local = (1,) * prepend_axis_num + tuple(data.shape)
        offset, shape, parts = [0] * len(local), list(local), [1] * len(local)
        for axis, position, count in rank_offsets:
            if not (0 <= axis < len(local) and 0 <= position < count):
                raise TesseraError(
                    f"a tensor with {len(local)} axes has no part {position} of {count} on axis {axis}",
                    where=f"ShardedTensor {key!r}",
                    code="megatron.shard-axis",
                )
            offset[axis], shape[axis], parts[axis] = position * local[axis], count * local[axis], count
        axis = rank_offsets[-1][0] if rank_offsets else 0
        boxes = (local, tuple(shape), tuple(offset), tuple(parts))
        return cls(key, data, data.dtype, *boxes, replica_id, prepend_axis_num, stride, axis)

    @property
    def is_main_replica(self) -> bool:
        """Return whether this rank writes the shard. Other ranks with copies of it do not."""
        ids = self.replica_id if isinstance(self.replica_id, tuple) else (self.replica_id,)
        return not any(ids)

    def boxes(self) -> Iterator[tuple[Tensor, Box]]:
        """Yield the blocks of the local shard with their offsets in the full tensor."""
        assert self.data is not None, f"{self.key} holds no data"
        data = self.data.detach().reshape(self.local_shape)
        axis, count = self.split_axis, self.axis_fragmentations[self.split_axis] if self.axis_fragmentations else 1
        if self.stride == 1 or count == 1:
            yield data, (self.global_offset, self.local_shape)
            return
        size = self.local_shape[axis] // self.stride
        position = self.global_offset[axis] // self.local_shape[axis]
        for number, block in enumerate(torch.split(data, size, dim=axis)):
            offset = list(self.global_offset)
            offset[axis] = (number * count + position) * size
            yield block, (tuple(offset), tuple(block.shape))


@dataclass
class ShardedObject:
    """Describe a value that is no tensor, with its name. It must be serializable to JSON."""

    key: str
    data: Any
    global_shape: tuple[int, ...] = (1,)
    global_offset: tuple[int, ...] = (0,)
    replica_id: int | tuple[int, ...] = 0

    @property
    def unique_key(self) -> str:
        return f"{self.key}/{'.'.join(map(str, self.global_offset))}/{'.'.join(map(str, self.global_shape))}"

    @property
    def is_main_replica(self) -> bool:
        ids = self.replica_id if isinstance(self.replica_id, tuple) else (self.replica_id,)
        return not any(ids)


@dataclass
class LocalNonpersistentObject:
    """Wrap a value that is not saved. Loading returns the value that the caller passed."""

    obj: Any

    def unwrap(self) -> Any:
        return self.obj


@runtime_checkable
class Shardable(Protocol):
    """Protocol of modules with a `sharded_state_dict` method."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]: ...


def make_sharded_tensors_for_checkpoint(
    state_dict: Mapping[str, Tensor],
    prefix: str,
    tensor_parallel_layers_axis_map: Mapping[str, int] | None = None,
    sharded_offsets: Any = (),
    stride: int = 1,
) -> dict[str, ShardedTensor]:
    """Describe the tensors of a module.

    `tensor_parallel_layers_axis_map`: name of each tensor that tensor parallelism splits -> the split axis.
    """
    ranks, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    before = len(sharded_offsets)
    shards = {}
    for name, tensor in state_dict.items():
        axis = (tensor_parallel_layers_axis_map or {}).get(name)
        split = () if axis is None else ((axis + before, rank, ranks),)
        shards[prefix + name] = ShardedTensor.from_rank_offsets(
            prefix + name,
            tensor,
            *sharded_offsets,
            *split,
            replica_id=(0, 0 if split else rank, replica),
            prepend_axis_num=before,
            stride=stride if split else 1,
        )
    return shards


def sharded_state_dict_default(
    module: nn.Module, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
) -> dict[str, Any]:
    """Return the sharded state dict of a module.

    Modules without a method `sharded_state_dict` have the same tensors on all ranks.
    """
    if isinstance(module, Shardable):
        return module.sharded_state_dict(prefix, sharded_offsets, metadata)
    return make_sharded_tensors_for_checkpoint(module.state_dict(keep_vars=True), prefix, {}, sharded_offsets)


def renamed_keys(shards: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Replace the prefix `old` of the keys in the checkpoint by `new`. The keys of `shards` do not change."""
    return {
        name: replace(shard, key=new + shard.key.removeprefix(old)) if shard.key.startswith(old) else shard
        for name, shard in shards.items()
    }
