"""Wrap every private symbol of torch and transformers that the library uses.

No other file uses one (`tests/unit/test_house.py`), so only this file must be checked for a new release. Each entry
states its purpose and the public alternative, and works with torch 2.11 to 2.15 and transformers 5.17 to 5.23 unless it
names others. `tests/unit/test_torch_internals.py` fails if a symbol is missing. Slow imports are inside of functions.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import PipelineStage

# ActivationWrapper, checkpoint_wrapper: recompute. Public alternative: a wrapper of our own around
#   `torch.utils.checkpoint.checkpoint`.
# TorchDispatchMode: intercepts every operation, to count collectives. Documented by torch, but its module is private.
# tree_leaves, tree_map_only: nested containers of tensors. Public alternative:
# `torch.utils.pytree` once it exists.
__all__ = [
    "ActivationWrapper",
    "TorchDispatchMode",
    "checkpoint_wrapper",
    "tree_leaves",
    "tree_map_only",
]

# ------------------------------------------------------------------------------------------------ processes and meshes


def default_store() -> dist.Store:
    """Return the store of the default process group.

    Public alternative: pass our own store to `init_process_group`, which is impossible if the caller made the group.
    """
    return _get_default_store()


@contextmanager
def without_advice_on_gathers() -> Iterator[None]:
    """Silence torch's warning that all-gathers of tensors sharded by tp and FSDP should be merged.

    An export gathers one tensor at a time on purpose. Public alternative: none.
    """
    advice = logging.getLogger("torch.distributed.tensor._redistribute")
    level = advice.level
    advice.setLevel(logging.ERROR)
    try:
        yield
    finally:
        advice.setLevel(level)


def fake_store() -> dist.Store:
    """Return the store of the process group "fake", which simulates any number of ranks in one process.

    Public alternative: none; the backend itself is a test utility of torch.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def fake_tensor_mode() -> FakeTensorMode:
    """Return a mode in which new tensors have shapes but no memory.

    Public alternative: the meta device, which loses the requested device. In torch 2.11 the fake form of `addmm` with
    `out_dtype` is wrong, so its `out` argument is returned.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Mode(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.addmm.dtype_out:
                return kwargs["out"]
            return super().__torch_dispatch__(func, types, args, kwargs)

    return Mode(allow_non_fake_inputs=True)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the axes of a mesh joined into one axis. Public alternative: `DeviceMesh.flatten`, when it is released."""
    return mesh._flatten(name)


def slice_flattened_mesh(root: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a submesh whose axes may include those of `flatten_mesh`.

    Torch warns that this is deprecated; its successor (`DeviceMesh._concatenate`) is private, too.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return root[names]


# ------------------------------------------------------------------------------------------------ tensors and modules


def wrapped_module(wrapper: ActivationWrapper) -> nn.Module:
    """Return the module inside a recompute or offload wrapper. Public alternative: a wrapper of our own."""
    inner: nn.Module = wrapper._checkpoint_wrapped_module
    return inner


def is_compiled(module: nn.Module) -> bool:
    """Return whether `nn.Module.compile` was called. Public alternative: keep a list of the compiled modules."""
    return module._compiled_call_impl is not None


def tensor_identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two views of the same memory with equal shape, strides and version counter.

    The key is valid while the storage exists. Public alternative: none; torch has no public API for `_version`.
    """
    storage = tensor.untyped_storage()
    return (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of; None if it is not a view. Public alternative: none."""
    return tensor._base


def local_chunks(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """Return offsets and sizes of the local chunks of a DTensor, without empty chunks; one chunk for other tensors.

    Public alternative: none; torch's own checkpoint planners ask a DTensor by this method.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if not hasattr(tensor, "__create_chunk_list__"):
        return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]
    return [chunk for chunk in tensor.__create_chunk_list__() if 0 not in chunk.sizes]


def tensor_of_chunk(tensor: Tensor, offsets: torch.Size) -> Tensor:
    """Return the chunk of a DTensor at offsets that `local_chunks` returned; any other tensor is returned itself.

    Public alternative: none; torch's own checkpoint planners use it.
    """
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.utils import find_tensor_shard

    return find_tensor_shard(tensor.detach(), MetadataIndex("", offsets))


# ------------------------------------------------------------------------------------------------ optimizers

# Operations on a list of tensors with one kernel launch. All except the norm work in place. Public alternative: a loop,
# which launches a kernel for each tensor and is slower.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub_ = torch._foreach_sub_


def init_adamw_group(
    optimizer: torch.optim.AdamW, group: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Create missing AdamW state of a parameter group; return parameters, gradients, moments and steps.

    Public alternative: to create the state without torch's optimizer.
    """
    params: list[Tensor] = []
    grads: list[Tensor] = []
    means: list[Tensor] = []
    squares: list[Tensor] = []
    largest: list[Tensor] = []  # filled only with amsgrad
    steps: list[Tensor] = []
    optimizer._init_group(group, params, grads, means, squares, largest, steps)
    return params, grads, means, squares, steps


# ------------------------------------------------------------------------------------------------ attention kernels


def flash_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention inside each segment and its log-sum-exp. `bounds`, `longest`: (of queries, of keys).

    Public alternative: `torch.nn.attention.varlen.varlen_attn`, which cannot compute gradients for a part of the keys.
    """
    outputs = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, *longest, 0.0, causal, return_debug_mask=False, scale=scale
    )
    return outputs[0], outputs[1]


def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. `out` and `lse` may come from more keys than `k`."""
    dropout_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # required even without dropout
    unused = torch.empty(0, device=q.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *bounds, *longest, 0.0, causal, dropout_state, unused, scale=scale
    )
    return gradients


def cudnn_attention_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention over [B, H, L, D] and its log-sum-exp.

    Public alternative: `scaled_dot_product_attention` under `sdpa_kernel`, which does not return the log-sum-exp.
    """
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, lse


def cudnn_attention_backward(
    tensors: Sequence[Tensor], lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values. `tensors`: gradient of the output, q, k, v, output.

    The gradient is copied to the strides of the output. The plan cache of torch 2.11 ignores the strides of the
    gradient: a plan for other strides would read outside of the tensor.
    """
    grad, q, k, v, out = tensors
    if grad.stride() != out.stride():
        grad = torch.empty_like(out).copy_(grad)
    dropout_state = torch.empty((), dtype=torch.int64, device=q.device)  # required even without dropout
    lengths = (q.shape[2], k.shape[2])
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(grad, q, k, v, out, lse, dropout_state, dropout_state, None, None, None, *lengths, 0.0, causal),
        scale=scale,
    )
    return gradients


# ------------------------------------------------------------------------------------------------ pipelines


def self_loop_stage() -> type[PipelineStage]:
    """Return a class of pipeline stages that send no initial message to their own rank.

    Before 2.13 torch sends a message to the neighbours of each stage. In some schedules a neighbour is on the same
    rank, and not every backend can send to itself. Public alternative: `PipelineStage`, when 2.13 is the oldest
    release.
    """
    from torch.distributed.pipelining import PipelineStage

    class SelfLoopStage(PipelineStage):
        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            operations: list[dist.P2POp] = super()._get_init_p2p_neighbors_ops()
            return [greeting for greeting in operations if greeting.group_peer != self.group_rank]

    return SelfLoopStage


def lone_stage() -> type[PipelineStage]:
    """Return a class of pipeline stages that do not exchange shapes, for one process in a fake world.

    In torch 2.13 and 2.14 stages agree by messages whether shapes are declared. Public alternative: `PipelineStage`,
    since 2.15.
    """

    class Agreed:
        def item(self) -> int:
            return 1

    class LoneStage(self_loop_stage()):  # type: ignore[misc]
        def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
            return Agreed()

        def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
            return Agreed()

    return LoneStage


def schedule_actions(
    schedule: Callable[..., Any], stages: Iterable[int], num_stages: int, ranks: int, microbatches: int
) -> dict[int, list[Any]]:
    """Return the actions of each rank in a multi-stage schedule of torch, in order, with None for idle steps.

    `stages` are those of rank 0. Public alternative: none; the order is an attribute of a schedule with real stages.
    """

    class StageOutline:
        """Hold the attributes of a stage that schedules read in their constructor."""

        def __init__(self, stage: int) -> None:
            self.stage_index, self.num_stages = stage, num_stages
            self.group_size, self.group_rank = ranks, 0
            self.is_first, self.is_last = stage == 0, stage == num_stages - 1
            self.submod = nn.Identity()
            self.stage_index_to_group_rank: dict[int, int] = {}

    instance = schedule([StageOutline(stage) for stage in stages], microbatches)
    order: dict[int, list[Any]] = instance.pipeline_order
    return order


# ------------------------------------------------------------------------------------------------ compiling, profiling


def raise_recompile_limit(limit: int) -> None:
    """Raise the limit of compiled variants of a function, for torch 2.11 and 2.12.

    Public alternative: the argument `recompile_limit` of `torch.compile`, when 2.13 is the oldest release.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, limit)


def open_range(name: str) -> Callable[[], None]:
    """Begin a named range of the profiler; return the function that ends it.

    Public alternative: `torch.profiler.record_function`, which costs ten times as much for each range.
    """
    opened = _RecordFunctionFast(name)
    opened.__enter__()
    return lambda: opened.__exit__(None, None, None)


def generates_code(kind: str) -> bool:
    """Return whether `torch.compile` has a code generator for this kind of device. Public alternative: none."""
    from torch._inductor.codegen.common import get_scheduling_for_device, init_backend_registration

    init_backend_registration()
    return get_scheduling_for_device(kind) is not None


def has_fused_adamw() -> bool:
    """Return whether the extension of another device has a kernel for fused AdamW. Public alternative: none."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_adamw_", "PrivateUse1"))


def inside_backward() -> bool:
    """Return whether this thread runs a backward pass. Public alternative: none."""
    return torch._C._current_graph_task_id() != -1


def record_allocations(device: torch.device, enabled: bool) -> None:
    """Start or stop recording the allocations of an accelerator. Public alternative: none."""
    torch.get_device_module(device).memory._record_memory_history("all" if enabled else None)


def dump_allocations(device: torch.device, path: Path) -> None:
    """Write the recorded allocations as https://pytorch.org/memory_viz reads them. Public alternative: none."""
    torch.get_device_module(device).memory._dump_snapshot(str(path))


# ------------------------------------------------------------------------------------------------ transformers


def build_from_config(kind: Any, settings: Any, dtype: torch.dtype, attention: str) -> Any:
    """Return a model of a transformers class with random weights.

    Public alternative: `AutoModel.from_config`, which supports registered classes only.
    """
    return kind._from_config(settings, dtype=dtype, attn_implementation=attention)


def unsplit_modules(module: nn.Module) -> set[str]:
    """Return names of module classes that transformers never splits over devices. Public alternative: none."""
    return set(getattr(module, "_no_split_modules", None) or ())


def auto_class_mapping(auto: Any) -> Any:
    """Return config class -> model class of an auto class; None if it has no mapping. Public alternative: none."""
    return getattr(auto, "_model_mapping", None)


def ignored_weight_patterns(module: Any) -> tuple[str, ...]:
    """Return regular expressions of weight names in files that a transformers model does not load."""
    return tuple(module._keys_to_ignore_on_load_unexpected or ())


def weight_conversions(module: Any) -> tuple[list[Any], list[Any], Any]:
    """Return the renamings from names in files to a model's names, the renamings back, and None.

    If a conversion is more than a renaming, return empty lists and the first such conversion. `rename_source_key`
    applies the renamings in order. Public alternative: none; these are tables of the loader.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightRenaming

    table = get_model_conversion_mapping(module, add_legacy=False)
    other = next((entry for entry in table if not isinstance(entry, WeightRenaming)), None)
    if other is not None:
        return [], [], other
    # Reverse each renaming, the last one first, as transformers does on saving. A dropped prefix is not added again.
    backward = [entry.reverse_transform() for entry in reversed(table) if not isinstance(entry, PrefixChange)]
    return table, backward, None


# ------------------------------------------------------------------------------------------------ names in files

# Functions and classes that torch's pickle files refer to: `torch.save` describes tensors by the first three, and
# `torch.distributed.checkpoint` its metadata by the others. They are compared and written as text, never imported.
# Public alternative: none; they are parts of file formats.
SAVED_TENSOR = ("torch._utils", "_rebuild_tensor_v2")
SAVED_TENSOR_WITH_DTYPE = ("torch._utils", "_rebuild_tensor_v3")
SAVED_PARAMETER = ("torch._utils", "_rebuild_parameter")
DCP_LAYOUT = ("torch.serialization", "_get_layout")
DCP_MEMORY_FORMAT = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
DCP_STORAGE_INFO = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
DCP_STORAGE_PREFIX = ("torch.distributed.checkpoint.filesystem", "_StoragePrefix")
