"""AdamW that is told by what to multiply gradients: the division by the count of a summed loss, and clipping.

On accelerators that is done on the way, in one launch for all tensors of a kind: torch's fused kernel moves bf16 at
little more than half of the memory's speed, and needs a pass of scaling before it. Elsewhere it is torch's own AdamW
behind such a pass. The state is torch's, by name and by type: a run may be resumed with the one or the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tessera.core import device as devices
from tessera.core.tensors import local_part

_WIDE = 16  # bytes that one instruction moves at most
_UP_TO_FP32 = (torch.float32, torch.bfloat16, torch.float16)  # what may be computed in fp32


class AdamW(torch.optim.AdamW):
    """`together`: all tensors in one launch, which takes a device that runs Triton."""

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
        self.scale: Tensor | None = None  # what gradients are multiplied by in the next step, and in that one alone
        self._together = together
        self._blocks: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing if `found_inf` is set and is 1 by the time that kernels run, as torch's own."""
        assert closure is None, "gradients are there already"
        scale, self.scale = self.scale, None
        if not self._together:
            if scale is not None:
                _multiply((p.grad for group in self.param_groups for p in group["params"]), scale)
            super().step()
            return
        bad: Tensor | None = getattr(self, "found_inf", None)
        by_kind: dict[Any, list[_Own]] = {}
        for group in self.param_groups:
            found: tuple[list[Tensor], ...] = ([], [], [], [], [], [])
            self._init_group(group, *found)  # type: ignore[no-untyped-call]
            params, grads, means, squares, _, steps = found
            for five in zip(params, grads, means, squares, steps, strict=True):
                param, grad, mean, square, step = map(local_part, five)
                own = _Own(param, grad, mean, square, step, group["lr"], group["weight_decay"])
                by_kind.setdefault(own.kind, []).append(own)  # also empty parts: their steps count with the others'
        for kind, owned in by_kind.items():
            if isinstance(kind, _Flat):
                self._step_all_at_once(kind, owned, scale, bad)
            else:
                self._step_as_torch_does(owned, scale, bad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.scale = None  # it was of those gradients, which a bad step drops without an update
        super().zero_grad(set_to_none)

    def _step_all_at_once(self, kind: _Flat, owned: Sequence[_Own], scale: Tensor | None, bad: Tensor | None) -> None:
        import triton.language as tl  # not on every machine

        from tessera.optim.adamw_kernel import BLOCK, WARPS, adamw_update

        (beta1, beta2), eps = self.defaults["betas"], self.defaults["eps"]
        device = owned[0].param.device
        scale = torch.ones((), device=device) if scale is None else scale.float()
        bad = torch.zeros((), device=device) if bad is None else bad.float()
        steps = [one.step for one in owned]
        torch._foreach_add_(steps, 1)
        torch._foreach_sub_(steps, [bad] * len(steps))  # as a list: the host would read a single one
        count = torch.stack(steps)
        rates = _send([one.rate for one in owned], torch.float32, device)
        shrinks = _send([1 - one.rate * one.decay for one in owned], torch.float32, device)
        table = [getattr(one, name).data_ptr() for name in ("param", "grad", "mean", "square") for one in owned]
        sizes, owners, numbers = self._dealt([one.param.numel() for one in owned], BLOCK, device)
        param, grad, state = (getattr(tl, str(dtype).removeprefix("torch.")) for dtype in kind.dtypes)
        adamw_update[(owners.numel(),)](
            *(_send(table, torch.int64, device), sizes, owners, numbers),
            *(rates / (1 - beta1**count), (1 - beta2**count).sqrt(), shrinks, scale, bad),
            *(len(owned), beta1, beta2, eps),
            PARAM=param,
            GRAD=grad,
            STATE=state,
            ALIGNED=kind.aligned,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )

    def _dealt(self, sizes: Sequence[int], block: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Sizes, and of each block its tensor and which one of that it is. They are the same in every step."""
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

    def _step_as_torch_does(self, owned: Sequence[_Own], scale: Tensor | None, bad: Tensor | None) -> None:
        by_rate: dict[tuple[float, float], list[_Own]] = {}
        for one in owned:
            by_rate.setdefault((one.rate, one.decay), []).append(one)
        for (rate, decay), some in by_rate.items():
            adamw(
                *([one.param for one in some], [one.grad for one in some]),
                *([one.mean for one in some], [one.square for one in some]),
                *([], [one.step for one in some]),
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
class _Flat:
    """A kind of tensors that one launch walks through."""

    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  # of parameters, gradients and moments
    aligned: int  # bytes that all their addresses are multiples of; gradients may be slices of what was summed up


@dataclass(frozen=True)
class _Own:
    """This rank's part of a parameter and of what belongs to it."""

    param: Tensor
    grad: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    rate: float
    decay: float

    @property
    def kind(self) -> _Flat | None:
        """None: not in the order of its numbers, or of more bits."""
        four = (self.param, self.grad, self.mean, self.square)
        if not all(x.is_contiguous() and x.dtype in _UP_TO_FP32 for x in four):
            return None
        dtypes = (self.param.dtype, self.grad.dtype, self.mean.dtype)
        return _Flat(dtypes, math.gcd(_WIDE, *(x.data_ptr() for x in four)))


def _multiply(grads: Iterable[Tensor | None], scale: Tensor) -> None:
    """Gradients may lie elsewhere than `scale`: in host memory, when they are offloaded."""
    by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        if grad is not None:
            local = local_part(grad)
            by_place.setdefault((local.device, local.dtype), []).append(local)
    for (device, dtype), tensors in by_place.items():
        if dtype.itemsize >= 4:
            torch._foreach_mul_(tensors, scale.to(device=device, dtype=dtype))
            continue
        # A factor that is rounded to bf16 first would be off by the same part of a percent for every gradient of the
        # step: products are made in fp32 and rounded once.
        factor = scale.to(device=device, dtype=torch.float32)
        for tensor in tensors:
            tensor.copy_(tensor.float() * factor)


def _send(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Without waiting for the device."""
    made = torch.tensor(values, dtype=dtype)
    return made.pin_memory().to(device, non_blocking=True) if devices.supports(device, "pinned_memory") else made
