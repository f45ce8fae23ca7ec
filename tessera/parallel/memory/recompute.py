"""Activations that are computed again in backward instead of kept: all of a module's, or all but the dear ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tessera.parallel.planning.modules import Keep, Recompute
from tessera.parallel.wrapping import wrap_submodule

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "_scaled_mm", "_grouped_mm"})
_ATTENTION_WORD = "attention"  # every fused kernel has it in its name


def apply_recompute(module: nn.Module, parts: Sequence[Recompute], use_reentrant: bool = False) -> None:
    for part in parts:
        wrap_submodule(module, part.path, partial(_wrapped, keep=part.keep, use_reentrant=use_reentrant))


def _wrapped(module: nn.Module, keep: Keep, use_reentrant: bool) -> nn.Module:
    if use_reentrant:
        return ReentrantRecompute(module)
    if keep == "none":
        return checkpoint_wrapper(module)
    return checkpoint_wrapper(module, context_fn=partial(create_selective_checkpoint_contexts, partial(_policy, keep)))


def _policy(keep: Keep, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().split("::")[-1].split(".")[0]
    kept = _ATTENTION_WORD in name or (keep == "matmul" and name in _PRODUCTS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class ReentrantRecompute(ActivationWrapper):
    """torch's older form. It sees only tensors among the arguments, and its result has a gradient only if one of them
    has: an input made up for that purpose keeps a trained block behind a frozen one from going untrained."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._checkpoint_wrapped_module
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        trained = next((p for p in inner.parameters() if p.requires_grad), None)
        anchor = None if trained is None else torch.empty(0, device=trained.device, requires_grad=True)

        def run(_: Any, *given: Any) -> Any:
            return inner(*given, **kwargs)

        return checkpoint(run, anchor, *args, use_reentrant=True)
