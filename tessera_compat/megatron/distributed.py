"""Average gradients over data-parallel ranks: `DistributedDataParallel` and `finalize_model_grads`.

Gradients stay in `param.grad`, where any optimizer finds them, and `param.main_grad` is the same tensor once they are
synchronized. They are exchanged when `finish_grad_sync` or `finalize_model_grads` is called, not during backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tessera.errors import TesseraError
from tessera.runtime.log import logger
from tessera_compat.megatron import parallel_state
from tessera_compat.megatron.config import CheckedFields, ModelParallelConfig
from tessera_compat.megatron.module import ModelWrapper

_REFUSED = {
    "use_distributed_optimizer": "the optimizer is the script's own; recipes of Tessera shard optimizer state",
    "fp8_param_gather": "parameters have 16 or 32 bit",
    "use_custom_fsdp": "recipes of Tessera shard parameters (`parallel.backend: fsdp2`)",
}
_HINTS = (
    *("overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "bucket_size"),
    *("average_in_collective", "check_for_large_grads"),
)


@dataclass
class DistributedDataParallelConfig(CheckedFields):
    """Configure how gradients are averaged."""

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True

    def __post_init__(self) -> None:
        """Refuse unsupported settings, and log settings without effect once."""
        for name, reason in _REFUSED.items():
            if vars(self)[name]:
                raise TesseraError(
                    f"{name}=True is not supported: {reason}",
                    where="DistributedDataParallelConfig",
                    code="megatron.unsupported-field",
                )
        if self.num_distributed_optimizer_instances != 1:
            raise TesseraError(
                "num_distributed_optimizer_instances above 1 is not supported",
                code="megatron.unsupported-field",
            )
        if self.data_parallel_sharding_strategy != "no_shard":
            raise TesseraError(
                "only data_parallel_sharding_strategy='no_shard' is supported", code="megatron.unsupported-field"
            )
        hinted = [name for name in _HINTS if vars(self)[name]]
        if hinted:
            logger().info("%s: without effect here, gradients are exchanged after backward", ", ".join(hinted))


class DistributedDataParallel(ModelWrapper):
    """Average gradients over data-parallel ranks. Each of these ranks stores all parameters."""

    def __init__(
        self,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
    ) -> None:
        super().__init__(config)
        self.ddp_config = ddp_config
        self.module = module
        self.is_last_microbatch = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange no gradients after the backward passes in this block: more micro-batches follow."""
        self.is_last_microbatch = False
        try:
            yield
        finally:
            self.is_last_microbatch = True

    def start_grad_sync(self, *unused: Any) -> None:
        """Do nothing: `finish_grad_sync` exchanges the gradients."""

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Do nothing: every rank stores all parameters."""

    def finish_grad_sync(self) -> None:
        """Average the gradients over data-parallel ranks, in place."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # the collective needs a gradient from every rank
        wide = torch.float32 if self.ddp_config.grad_reduce_in_fp32 else None
        # With a loss per token, gradients are divided by the number of tokens later: sum them here.
        per_token = bool(vars(self.config).get("calculate_per_token_loss", False))
        reduce_together(
            [p.grad for p in parameters if p.grad is not None], group, wide, 1 if per_token else group.size()
        )
        for parameter in parameters:
            parameter.main_grad = parameter.grad
            if self.ddp_config.check_for_nan_in_grad and not bool(torch.isfinite(parameter.grad).all()):
                raise TesseraError(
                    "a gradient contains NaN or infinity",
                    where="DistributedDataParallel.check_for_nan_in_grad",
                    code="megatron.gradient-not-finite",
                )

    def zero_grad_buffer(self) -> None:
        """Set all gradients to None."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def scale_gradients(self, scaling_factor: float) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scaling_factor)

    def broadcast_params(self) -> None:
        """Broadcast the parameters of the first data-parallel rank to the others."""
        source = parallel_state.get_data_parallel_src_rank(with_context_parallel=True)
        for parameter in self.module.parameters():
            dist.broadcast(
                parameter.data, source, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
            )


def reduce_together(grads: list[Tensor], group: Any, dtype: torch.dtype | None = None, divisor: int = 1) -> None:
    """Sum gradients over a group in place, with one collective per dtype, and divide the sums."""
    if group.size() == 1:
        return
    by_type: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for grad in grads:
        by_type.setdefault((grad.dtype, grad.device), []).append(grad)
    for same in by_type.values():
        flat = torch.cat([grad.reshape(-1) for grad in same])
        flat = flat if dtype is None else flat.to(dtype)
        flat /= divisor
        dist.all_reduce(flat, group=group)
        for grad, part in zip(same, torch.split(flat, [grad.numel() for grad in same]), strict=True):
            grad.copy_(part.view_as(grad))


def finalize_model_grads(model: list[nn.Module], num_tokens: Tensor | None = None) -> None:
    """Sum the gradients of all model chunks over the ranks that have a part of them.

    Data-parallel ranks have parts of all gradients, sequence-parallel ranks of those of norms, and the first and last
    stage of that of a shared embedding. With `num_tokens` the loss is a sum, so gradients are divided by the number of
    tokens on all data-parallel ranks.
    """
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_grad_sync()
    for chunk in model:
        # All tensor-parallel ranks store a copy of these weights. Each has computed a part of their gradients, from its
        # heads or its slice of the sequence.
        partial = [
            parameter.grad
            for name, parameter in chunk.named_parameters()
            if parameter.grad is not None
            and (vars(parameter).get("sequence_parallel") or "q_layernorm" in name or "k_layernorm" in name)
        ]
        reduce_together(partial, parallel_state.get_tensor_model_parallel_group())
    if parallel_state.get_pipeline_model_parallel_world_size() > 1 and parallel_state.is_rank_in_embedding_group(
        ignore_virtual=True
    ):
        group = parallel_state.get_embedding_group()
        shared = [p.grad for chunk in model for p in chunk.parameters() if vars(p).get("shared_embedding")]
        reduce_together([grad for grad in shared if grad is not None], group)
    if num_tokens is not None:
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(num_tokens, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        dist.all_reduce(num_tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        for chunk in model:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad /= num_tokens.clamp(min=1)
