"""Run in a process with the stand-in NPU: compare the fused operators with the eager reference, in float64 terms."""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from torch import Tensor

from tessera.core.batch import Segments
from tessera.ops.attention import packed_attention
from tessera.ops.cross_attention import packed_cross_attention
from tessera.ops.pointwise import Rope, rms_norm, rotate, swiglu
from tessera.optim.adamw import AdamW
from tessera.runtime import device as devices

NPU = torch.device("npu", 0)
LENGTHS = (5, 0, 1, 9, 3)


def segments(device: torch.device, lengths: tuple[int, ...] = LENGTHS, on_host: bool = True) -> Segments:
    all_known = Segments.of(lengths)
    return (all_known if on_host else Segments(all_known.bounds, all_known.longest)).to(device)


def run(call: Callable[..., Tensor], inputs: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    leaves = [x.detach().to(device, dtype).requires_grad_() for x in inputs]
    out = call(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    grads = torch.autograd.grad((out.cpu().double() * weights).sum(), leaves)
    return [x.detach().cpu().double() for x in (out, *grads)]


def cases() -> dict[str, tuple[Callable[..., Callable[..., Tensor]], list[Tensor]]]:
    """Return name -> (a function of device and implementation that returns the operation, its inputs)."""
    tokens = sum(LENGTHS)
    q, k, v = (torch.randn(tokens, heads, 16) for heads in (4, 2, 2))
    keys = (2, 3, 0, 1, 4)
    ck, cv = (torch.randn(sum(keys), 4, 16) for _ in range(2))
    rope = Rope(12, 10_000.0)

    def attention(causal: bool, on_host: bool = True) -> Callable[..., Callable[..., Tensor]]:
        return lambda device, name: (
            lambda q, k, v: packed_attention(
                q, k, v, segments(device, on_host=on_host), causal=causal, implementation=name
            )
        )

    def cross(device: torch.device, name: str) -> Callable[..., Tensor]:
        return lambda q, k, v: packed_cross_attention(
            q, k, v, segments(device), segments(device, keys), implementation=name
        )

    def turn(pairs: bool) -> Callable[..., Callable[..., Tensor]]:
        return lambda device, name: (
            lambda x: rotate(x, rope.angles(torch.arange(tokens, device=device)), pairs=pairs, implementation=name)
        )

    many = tuple(index % 3 for index in range(2500))
    long = [torch.randn(sum(many), 1, 4) for _ in range(3)]
    return {
        "attention, causal": (attention(True), [q, k, v]),
        "attention, full": (attention(False), [q, k, v]),
        "attention, lengths on the device": (attention(True, on_host=False), [q, k, v]),
        "attention, 2500 segments": (
            lambda device, name: (
                lambda q, k, v: packed_attention(q, k, v, segments(device, many), causal=True, implementation=name)
            ),
            long,
        ),
        "cross attention": (cross, [q, ck, cv]),
        "rms_norm": (
            lambda device, name: lambda x, w: rms_norm(x, w, 1e-6, implementation=name),
            [torch.randn(7, 3, 32), torch.rand(32)],
        ),
        "swiglu": (
            lambda device, name: lambda gate, up: swiglu(gate, up, implementation=name),
            [torch.randn(7, 32), torch.randn(7, 32)],
        ),
        "rotate, halves": (turn(False), [q]),
        "rotate, pairs": (turn(True), [q]),
    }


def errors() -> dict[str, dict[str, float]]:
    """Return for each case and dtype the largest error of both implementations, and which one `auto` chooses."""
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    for name, (make, inputs) in cases().items():
        for dtype in (torch.float32, torch.bfloat16):
            rounded = [x.to(dtype) for x in inputs]
            exact = run(make(torch.device("cpu"), "eager"), rounded, torch.float64, torch.device("cpu"))
            auto, eager = (run(make(NPU, which), rounded, dtype, NPU) for which in ("auto", "eager"))
            for part, truth in enumerate(exact):
                results[f"{name}, {dtype}, {'out' if part == 0 else f'gradient {part}'}"] = {
                    "ours": float((auto[part] - truth).abs().max()),
                    "eager": float((eager[part] - truth).abs().max()),
                    "size": float(truth.abs().max()),
                    "eps": torch.finfo(dtype).eps,
                }
    return results


def updates() -> float:
    """Return the largest difference of parameters after three clipped updates on the device and on the CPU."""
    torch.manual_seed(1)
    start, grads = torch.randn(40, 8), [torch.randn(40, 8) for _ in range(3)]
    after = []
    for device in (NPU, torch.device("cpu")):
        param = torch.nn.Parameter(start.to(device))
        fused = devices.supports(device, "fused_optimizer")
        assert fused
        optimizer = AdamW([{"params": [param], "lr": 1e-2, "weight_decay": 0.1}], (0.9, 0.95), 1e-8, fused=fused)
        for grad in grads:
            param.grad = grad.to(device)
            optimizer.clip_factor = torch.tensor(0.5, device=device)
            optimizer.step()
        assert optimizer.state[param]["step"].device.type == device.type
        after.append(param.detach().cpu())
    return float((after[0] - after[1]).abs().max())


if __name__ == "__main__":
    from torch_npu.operators import CALLS

    torch.manual_seed(0)
    for make, inputs in cases().values():
        make(NPU, "eager")(*(x.to(NPU) for x in inputs))
    eager_calls = CALLS.total()
    print(json.dumps({"errors": errors(), "update": updates(), "calls": list(CALLS), "eager calls": eager_calls}))
