"""Build models for training and print from one rank, as `megatron.training`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tessera.errors import TesseraError
from tessera.runtime import device as devices
from tessera_compat import state
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.distributed import DistributedDataParallel, DistributedDataParallelConfig
from tessera_compat.megatron.mappings import broadcast_data
from tessera_compat.megatron.module import Float16Module, ModelType, get_model_config

Provider = Callable[..., nn.Module]


def _argument(name: str, default: Any) -> Any:
    """Return an argument of the run, or the default if the script has parsed no arguments."""
    args = state.current().args
    return default if args is None else vars(args).get(name, default)


def _provided(provider: Provider, pre_process: bool, post_process: bool) -> nn.Module:
    """Call `model_provider` for a pipeline stage. Without pipeline parallelism the function needs no parameters."""
    names = inspect.signature(provider).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in names.values())
    if takes_all or {"pre_process", "post_process"} <= set(names):
        return provider(pre_process=pre_process, post_process=post_process)
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        raise TesseraError(
            "model_provider must take pre_process and post_process: they select the first and the last pipeline stage",
            where="get_model",
            fix="def model_provider(pre_process=True, post_process=True)",
            code="megatron.model-provider-parameters",
        )
    return provider()


def get_model(
    model_provider_func: Provider,
    model_type: ModelType = ModelType.encoder_or_decoder,
    wrap_with_ddp: bool = True,
) -> list[nn.Module]:
    """Build the model chunks of this rank on its device, in the configured dtype, wrapped for data parallelism."""
    if model_type is not ModelType.encoder_or_decoder:
        raise TesseraError(
            f"{model_type} is not supported",
            where="get_model",
            allowed=["ModelType.encoder_or_decoder"],
            code="megatron.model-type",
        )
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    models: list[nn.Module] = []
    for chunk in range(chunks or 1):
        if chunks is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        model = _provided(model_provider_func, first, last)
        model.model_type = model_type  # type: ignore[assignment]
        models.append(model)
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        count = sum(parameter.numel() for model in models for parameter in model.parameters())
        ranks = (parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank())
        print(f" > number of parameters on (tensor, pipeline) model parallel rank {ranks}: {count}", flush=True)
    models = [model.to(devices.current()) for model in models]
    config: Any = get_model_config(models[0])
    if config.fp16 or config.bf16:
        models = [Float16Module(config, model) for model in models]
    if wrap_with_ddp:
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=bool(_argument("accumulate_allreduce_grads_in_fp32", False)),
            check_for_nan_in_grad=bool(_argument("check_for_nan_in_loss_and_grad", False)),
        )
        wrapped = [DistributedDataParallel(config, ddp_config, model) for model in models]
        if _argument("data_parallel_random_init", False):
            for wrapper in wrapped:
                wrapper.broadcast_params()
        models = list(wrapped)
    return models


def _is_rank(rank: int) -> bool:
    return not dist.is_initialized() or dist.get_rank() == rank % dist.get_world_size()


def print_rank_0(message: object) -> None:
    """Print on rank 0, or in a process without a process group."""
    if _is_rank(0):
        print(message, flush=True)


def get_batch_on_this_tp_rank(data_iterator: Iterator[dict[str, torch.Tensor]] | None) -> dict[str, Any]:
    """Return the next batch on all tensor-parallel ranks. The first rank reads it and broadcasts it."""
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    if first and data_iterator is None:
        raise TesseraError(
            "the first tensor-parallel rank has no data iterator",
            where="get_batch_on_this_tp_rank",
            code="megatron.no-data-on-first-rank",
        )
    data = next(data_iterator) if first and data_iterator is not None else None
    types: list[Any] = [None if data is None else {name: tensor.dtype for name, tensor in data.items()}]
    source, group = (
        parallel_state.get_tensor_model_parallel_src_rank(),
        parallel_state.get_tensor_model_parallel_group(),
    )
    dist.broadcast_object_list(types, src=source, group=group)
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    batch: dict[str, Any] = dict.fromkeys(names)
    for name, dtype in types[0].items():
        batch.update(broadcast_data([name], data, dtype))
    return batch


def get_batch_on_this_cp_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's part of every sequence, for context parallelism.

    Rank n gets the n-th slice from the front and the n-th from the end, so that causal attention costs the same on all
    ranks.
    """
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if ranks == 1:
        return batch
    shards = {}
    for name, tensor in batch.items():
        if tensor is not None:
            dim = 2 if name == "attention_mask" else 1
            slices = torch.tensor_split(tensor, 2 * ranks, dim=dim)
            if tensor.shape[dim] % (2 * ranks):
                raise TesseraError(
                    f"a sequence of length {tensor.shape[dim]} cannot be divided into {2 * ranks} equal slices",
                    code="megatron.sequence-not-divisible",
                )
            tensor = torch.cat([slices[rank], slices[-1 - rank]], dim=dim)
        shards[name] = tensor
    return shards


def average_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Average losses over data-parallel ranks."""
    group = parallel_state.get_data_parallel_group()
    together = torch.stack([loss.detach().clone().reshape(()) for loss in losses])
    dist.all_reduce(together, group=group)
    return together.div_(group.size())
