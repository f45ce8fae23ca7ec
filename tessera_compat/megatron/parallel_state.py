"""Keep the process groups of tensor, pipeline, data, context and expert parallelism, as `megatron.core.parallel_state`.

`initialize_model_parallel` builds one `ParallelState`; the functions of this module read it. Ranks are ordered by
`order`, whose first axis varies fastest: `tp-cp-ep-dp-pp` as in release 0.12.1.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from tessera.errors import TesseraError
from tessera.runtime.log import logger
from tessera_compat.state import current

Group = dist.ProcessGroup | None
WHERE = "initialize_model_parallel"
AXES = ("tp", "cp", "ep", "dp", "pp")


def rank_groups(world: int, sizes: dict[str, int], order: Sequence[str], axes: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that differ only in their coordinates on `axes`, each in ascending order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        rest, fixed = rank, []
        for axis in order:
            rest, coordinate = divmod(rest, sizes[axis])
            if axis not in axes:
                fixed.append(coordinate)
        groups.setdefault(tuple(fixed), []).append(rank)
    return list(groups.values())


@dataclass
class ParallelState:
    """Store the size of each parallel axis, and the process groups of this rank: `groups["tp"]`, `groups["dp-cp"]`."""

    sizes: dict[str, int]
    expert_sizes: dict[str, int]
    order: tuple[str, ...]
    timeout: datetime.timedelta
    virtual_size: int | None
    virtual_rank: int | None
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    ranks: dict[str, list[int]] = field(default_factory=dict)

    def make(self, name: str, axes: str, sizes: dict[str, int] | None = None) -> None:
        """Create all process groups over `axes`, such as "dp-cp", and store that of this rank. All ranks call it."""
        for ranks in rank_groups(dist.get_world_size(), sizes or self.sizes, self.order, axes.split("-")):
            self.make_group(name, ranks)

    def make_group(self, name: str, ranks: list[int]) -> None:
        group = dist.new_group(ranks, timeout=self.timeout)
        if dist.get_rank() in ranks:
            self.groups[name], self.ranks[name] = group, ranks

    def size(self, name: str) -> int:
        return len(self.ranks[name])

    def rank(self, name: str) -> int:
        return self.ranks[name].index(dist.get_rank())


def _refuse(what: str, *, where: str, fix: str | None = None, code: str) -> TesseraError:
    return TesseraError(what, where=f"{WHERE}: {where}", fix=fix, code=code)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_split_rank: int | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = "tp-cp-ep-dp-pp",
    encoder_tensor_model_parallel_size: int = 0,
    encoder_pipeline_model_parallel_size: int | None = 0,
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    create_gloo_process_groups: bool = True,
) -> None:
    """Create the process groups of all parallel axes. Every rank calls it with the same sizes."""
    if not dist.is_initialized():
        fix = "call torch.distributed.init_process_group before it"
        raise _refuse("the process group is missing", where="first", fix=fix, code="megatron.process-group-missing")
    if current().parallel is not None:
        raise _refuse(
            "model parallelism is initialized already",
            where="twice",
            fix="call destroy_model_parallel() first",
            code="megatron.initialized-twice",
        )
    for name, value, nothing in (
        ("pipeline_model_parallel_split_rank", pipeline_model_parallel_split_rank, None),
        ("hierarchical_context_parallel_sizes", hierarchical_context_parallel_sizes, None),
        ("num_distributed_optimizer_instances", num_distributed_optimizer_instances, 1),
        ("encoder_tensor_model_parallel_size", encoder_tensor_model_parallel_size, 0),
        ("encoder_pipeline_model_parallel_size", encoder_pipeline_model_parallel_size or 0, 0),
    ):
        if value != nothing:
            what = f"{name}={value} is not supported: models have one stack of layers"
            raise _refuse(what, where=name, code="megatron.unsupported-argument")
    if use_sharp or nccl_communicator_config_path:
        logger().info("use_sharp and nccl_communicator_config_path: without effect, groups take torch's settings")
    world = dist.get_world_size()
    tp, pp, cp, ep = (
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        context_parallel_size,
        expert_model_parallel_size,
    )
    etp = expert_tensor_parallel_size or tp
    for what, product in (("tensor x pipeline x context", tp * pp * cp), ("expert layers", etp * ep * pp)):
        if product < 1 or world % product:
            raise _refuse(
                f"{world} ranks cannot be split: {what} parallelism needs a multiple of {product}",
                where=f"tensor {tp}, pipeline {pp}, context {cp}, expert {ep}",
                fix="change the sizes or the number of ranks",
                code="megatron.rank-count",
            )
    if virtual_pipeline_model_parallel_size is not None and pp < 2:
        raise _refuse(
            "an interleaved schedule needs two pipeline stages or more",
            where="pipeline_model_parallel_size",
            code="megatron.interleaved-stages",
        )
    state = ParallelState(
        sizes={"tp": tp, "cp": cp, "ep": 1, "dp": world // (tp * pp * cp), "pp": pp},
        expert_sizes={"tp": etp, "cp": 1, "ep": ep, "dp": world // (etp * ep * pp), "pp": pp},
        order=_axis_order(order, (tp, cp, ep, 0, pp)),
        timeout=datetime.timedelta(minutes=distributed_timeout_minutes),
        virtual_size=virtual_pipeline_model_parallel_size,
        virtual_rank=None if virtual_pipeline_model_parallel_size is None else 0,
    )
    _make_groups(state)
    for ranks in rank_groups(world, state.sizes, state.order, ["pp"]):
        ends = [ranks[0], ranks[-1]] if len(ranks) > 1 else ranks
        state.make_group("embedding", get_embedding_ranks(ranks) if get_embedding_ranks else ends)
    current().parallel = state


def _axis_order(order: str, sizes: Sequence[int]) -> tuple[str, ...]:
    """Parse `order` to a tuple of axes, innermost first, and append omitted axes of size 1. `sizes`: of `AXES`."""
    names = tuple(order.lower().split("-"))
    if sorted(set(names)) != sorted(names) or not set(names) <= set(AXES):
        raise _refuse(
            f"order {order!r} must name each of {', '.join(AXES)} at most once",
            where="order",
            code="megatron.axis-order",
        )
    missing = [axis for axis, size in zip(AXES, sizes, strict=True) if size > 1 and axis not in names]
    if missing:
        raise _refuse(
            f"order {order!r} leaves out {', '.join(missing)}, whose size is above 1",
            where="order",
            code="megatron.axis-order",
        )
    return names + tuple(axis for axis in AXES if axis not in names)


def _make_groups(state: ParallelState) -> None:
    """Create the groups of all axes."""
    for name in ("tp", "pp", "dp", "cp", "dp-cp"):
        state.make(name, name)
    # Gradients have a group of their own, so that they never wait for activations. Messages from the last stage to the
    # first one, which only several model chunks per stage need, have groups of their own, too.
    state.make("pp backward", "pp")
    if state.virtual_size is not None:
        state.make("pp wrap", "pp")
        state.make("pp wrap backward", "pp")
    for name, axis in (("ep", "ep"), ("etp", "tp")):
        state.make(name, axis, state.expert_sizes)


def destroy_model_parallel() -> None:
    """Remove the groups, so that `initialize_model_parallel` can be called again."""
    current().parallel = None


def model_parallel_is_initialized() -> bool:
    return current().parallel is not None


def is_initialized() -> bool:
    return model_parallel_is_initialized()


def _state() -> ParallelState:
    state: ParallelState | None = current().parallel
    if state is None:
        raise TesseraError(
            "model parallelism is not initialized",
            where="parallel_state",
            fix=f"call parallel_state.{WHERE}(tp, pp)",
            code="megatron.not-initialized",
        )
    return state


def _group(name: str, check_initialized: bool = True) -> Any:
    state = _state() if check_initialized else current().parallel
    return state.groups.get(name) if state is not None else None


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Any:
    return _group("tp", check_initialized)


def get_tensor_model_parallel_world_size() -> int:
    return _state().size("tp")


def get_tensor_model_parallel_rank() -> int:
    return _state().rank("tp")


def get_tensor_model_parallel_src_rank() -> int:
    """Return the global rank of the first rank in this rank's tensor-parallel group."""
    return _state().ranks["tp"][0]


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Any:
    return _group("pp", check_initialized)


def get_pipeline_message_group(wraps: bool, backward: bool) -> Any:
    """Return the group for one kind of message between pipeline stages. Megatron has no function of this name."""
    group = _group("pp" + " wrap" * wraps + " backward" * backward)
    if group is None:
        raise _refuse(
            "the groups for several model chunks are missing",
            where="virtual_pipeline_model_parallel_size",
            fix=f"give it to {WHERE}",
            code="megatron.virtual-size-missing",
        )
    return group


def get_pipeline_model_parallel_world_size() -> int:
    return _state().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    return _state().rank("pp")


def get_pipeline_model_parallel_last_rank() -> int:
    return _state().ranks["pp"][-1]


def get_pipeline_model_parallel_next_rank() -> int:
    state = _state()
    return state.ranks["pp"][(state.rank("pp") + 1) % len(state.ranks["pp"])]


def get_pipeline_model_parallel_prev_rank() -> int:
    state = _state()
    return state.ranks["pp"][state.rank("pp") - 1]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return _state().virtual_size


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    return _state().virtual_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    _state().virtual_rank = rank


def is_pipeline_first_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Return whether this rank, in its current model chunk, embeds the tokens."""
    state = _state()
    chunk = state.virtual_rank if vp_stage is None else vp_stage
    if not ignore_virtual and state.virtual_size is not None and chunk != 0:
        return False
    return state.rank("pp") == 0


def is_pipeline_last_stage(ignore_virtual: bool = False, vp_stage: int | None = None) -> bool:
    """Return whether this rank, in its current model chunk, computes the loss."""
    state = _state()
    chunk = state.virtual_rank if vp_stage is None else vp_stage
    if not ignore_virtual and state.virtual_size is not None and chunk != state.virtual_size - 1:
        return False
    return state.rank("pp") == state.size("pp") - 1


def is_rank_in_embedding_group(ignore_virtual: bool = False) -> bool:
    if "embedding" not in _state().ranks:
        return False
    return ignore_virtual or is_pipeline_first_stage() or is_pipeline_last_stage()


def get_embedding_group(check_initialized: bool = True) -> Any:
    return _group("embedding", check_initialized)


def _data_name(with_context_parallel: bool) -> str:
    return "dp-cp" if with_context_parallel else "dp"


def get_data_parallel_group(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
    return _group(_data_name(with_context_parallel))


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return _state().size(_data_name(with_context_parallel))


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    return _state().rank(_data_name(with_context_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    return _state().ranks[_data_name(with_context_parallel)][0]


def get_context_parallel_world_size() -> int:
    state = current().parallel
    return 1 if state is None else state.size("cp")


def get_context_parallel_rank() -> int:
    state = current().parallel
    return 0 if state is None else state.rank("cp")


def get_expert_model_parallel_rank() -> int:
    return _state().rank("ep")


def get_expert_tensor_parallel_rank() -> int:
    return _state().rank("etp")
