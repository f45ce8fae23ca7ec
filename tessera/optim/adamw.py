"""AdamW that clips gradients as part of the update.

On accelerators one kernel launch clips and updates all tensors with equal dtypes. Torch's fused kernel uses little more
than half of the memory bandwidth in bf16, and needs another pass to scale gradients. On other devices gradients are
scaled first, and torch's AdamW updates. State names and dtypes are torch's, so a run may be resumed with either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tessera.runtime import device as devices
from tessera.runtime.gradients import scale_gradients
from tessera.runtime.modules import local_shard
from tessera.runtime.torch_internals import foreach_add_, foreach_sub_, init_adamw_group

_WIDE = 16  # maximum number of bytes of one load instruction
_UP_TO_FP32 = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that fp32 represents exactly


class AdamW(torch.optim.AdamW):
    """Update like torch's AdamW, with gradients multiplied by `clip_factor`.

    `together`: update all tensors with equal dtypes in one kernel launch, which needs a device that runs Triton.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        betas: tuple[float, float],
        eps: float,
        *,
        fused: bool = True,
        together: bool = False,
    ) -> None:
        super().__init__(groups, betas=betas, eps=eps, fused=fused)
        # Factor that the next `step` multiplies gradients with inside of the update. The gradients do not change.
        self.clip_factor: Tensor | None = None
        self._together = together
        self._blocks: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters, unless the tensor `found_inf` is 1, as in torch's AdamW."""
        assert closure is None, "gradients are there already"
        scale, self.clip_factor = self.clip_factor, None
        if not self._together:
            if scale is not None:
                scale_gradients((p.grad for group in self.param_groups for p in group["params"]), scale)
            super().step()
            return
        bad: Tensor | None = getattr(self, "found_inf", None)  # torch's gradient scaler sets it; not 0: skip the update
        by_kind: dict[Any, list[_LocalState]] = {}
        for group in self.param_groups:
            for five in zip(*init_adamw_group(self, group), strict=True):
                param, grad, mean, square, step = map(local_shard, five)
                local = _LocalState(param, grad, mean, square, step, group["lr"], group["weight_decay"])
                # Include empty shards, because their step counts increase, too.
                by_kind.setdefault(local.kind, []).append(local)
        for kind, states in by_kind.items():
            if isinstance(kind, _TensorKind):
                self._step_in_one_launch(kind, states, scale, bad)
            else:
                self._step_by_torch(states, scale, bad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.clip_factor = None  # the factor was computed for the gradients that are cleared here
        super().zero_grad(set_to_none)

    def _step_in_one_launch(
        self, kind: _TensorKind, states: Sequence[_LocalState], scale: Tensor | None, bad: Tensor | None
    ) -> None:
        import triton.language as tl  # Triton is not installed on every machine

        from tessera.optim.adamw_kernel import BLOCK, WARPS, adamw_update

        (beta1, beta2), eps = self.defaults["betas"], self.defaults["eps"]
        device = states[0].param.device
        scale = torch.ones((), device=device) if scale is None else scale.float()
        bad = torch.zeros((), device=device) if bad is None else bad.float()
        steps = [state.step for state in states]
        foreach_add_(steps, 1)
        foreach_sub_(steps, [bad] * len(steps))  # a list, because torch would copy a single tensor to the host
        count = torch.stack(steps)
        rates = devices.send([state.rate for state in states], torch.float32, device)
        shrinks = devices.send([1 - state.rate * state.decay for state in states], torch.float32, device)
        addresses = [
            tensor.data_ptr() for same in zip(*(state.tensors for state in states), strict=True) for tensor in same
        ]
        sizes, owners, numbers = self._blocks_of([state.param.numel() for state in states], BLOCK, device)
        param, grad, state = (getattr(tl, str(dtype).removeprefix("torch.")) for dtype in kind.dtypes)
        adamw_update[(owners.numel(),)](
            *(devices.send(addresses, torch.int64, device), sizes, owners, numbers),
            *(rates / (1 - beta1**count), (1 - beta2**count).sqrt(), shrinks, scale, bad),
            *(len(states), beta1, beta2, eps),
            PARAM=param,
            GRAD=grad,
            STATE=state,
            ALIGNED=kind.aligned,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )

    def _blocks_of(self, sizes: Sequence[int], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return `sizes` (elements of each tensor) as a tensor; for each block of elements the index of its tensor; and
        the index of the block in that tensor. The result is cached, because it is the same in every step."""
        key = tuple(sizes)
        if key not in self._blocks:
            blocks = torch.tensor([-(-size // block) for size in sizes])
            owners = torch.arange(len(sizes)).repeat_interleave(blocks)
            numbers = torch.arange(owners.numel()) - (blocks.cumsum(0) - blocks)[owners]
            self._blocks[key] = (
                torch.tensor(sizes).to(device),
                owners.to(device, torch.int32),
                numbers.to(device, torch.int32),
            )
        return self._blocks[key]

    def _step_by_torch(self, states: Sequence[_LocalState], scale: Tensor | None, bad: Tensor | None) -> None:
        by_rate: dict[tuple[float, float], list[_LocalState]] = {}
        for state in states:
            by_rate.setdefault((state.rate, state.decay), []).append(state)
        for (rate, decay), some in by_rate.items():
            adamw(
                *([state.param for state in some], [state.grad for state in some]),
                *([state.mean for state in some], [state.square for state in some]),
                *([], [state.step for state in some]),
                fused=True,
                grad_scale=None if scale is None else scale.reciprocal().float(),
                found_inf=bad,
                amsgrad=False,
                beta1=self.defaults["betas"][0],
                beta2=self.defaults["betas"][1],
                lr=rate,
                weight_decay=decay,
                eps=self.defaults["eps"],
                maximize=False,
            )


@dataclass(frozen=True)
class _TensorKind:
    """Hold the properties that tensors of one kernel launch have in common."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # dtypes of parameters, gradients and moments
    aligned: int  # common alignment of addresses in bytes; gradients may be slices of a buffer


@dataclass(frozen=True)
class _LocalState:
    """Hold this rank's shards of a parameter, its gradient and its state."""

    param: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    rate: float
    decay: float

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.param, self.grad, self.mean, self.square

    @property
    def kind(self) -> _TensorKind | None:
        """Return the properties for a kernel launch; None if a tensor is not contiguous or not exact in fp32."""
        if not all(x.is_contiguous() and x.dtype in _UP_TO_FP32 for x in self.tensors):
            return None
        dtypes = (self.param.dtype, self.grad.dtype, self.mean.dtype)
        return _TensorKind(dtypes, math.gcd(_WIDE, *(x.data_ptr() for x in self.tensors)))
