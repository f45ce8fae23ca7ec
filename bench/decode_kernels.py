"""Compare ways to launch the kernels of decoding, at the shapes of a 3B model, in graphs as they run in the engine.

    python bench/decode_kernels.py --seconds 60

The best of each kind is the last of its lines. Its numbers belong into `LAUNCHES` of `tessera/ops/decode_kernels.py`,
and into `LAUNCH` of `tessera/ops/paged_attention.py`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.cache import CacheRow, CacheStep
from tessera.ops import decode_kernels, paged_attention
from tessera.ops.decode_kernels import vector_linear
from tessera.runtime.device import Graph

DEVICE = torch.device(torch.accelerator.current_accelerator() or "cpu")
COLD = 400e6  # bytes that the launches of a graph read: more than the device caches
HEADS, KV_HEADS, SIZE, BLOCK, LENGTH, WIDTH = 16, 2, 128, 16, 400, 512

# Rows of the weight, elements of each at once, warps, stages of loads.
LINEAR = [
    *((1, 1024, 2, 1), (1, 2048, 4, 1), (1, 2048, 8, 1), (2, 512, 2, 1), (2, 1024, 4, 1), (2, 2048, 4, 1)),
    *((2, 2048, 8, 1), (4, 512, 4, 1), (4, 1024, 4, 1), (4, 1024, 8, 1), (8, 512, 4, 1), (8, 512, 8, 1)),
    *((2, 1024, 4, 3), (4, 512, 4, 3), (4, 512, 4, 5), (4, 1024, 8, 3), (8, 512, 8, 3), (8, 256, 4, 4)),
]
# Tokens of a part, parts of a row, tokens at once, warps, stages of loads, warps that combine parts (4).
ATTENTION = [
    *((512, 64, 64, 4, 4), (256, 64, 64, 4, 4), (256, 64, 64, 4, 5), (256, 64, 128, 8, 2)),
    *((128, 64, 64, 4, 4), (128, 64, 64, 4, 2), (128, 64, 64, 4, 1), (128, 64, 128, 8, 1), (128, 64, 128, 4, 2)),
    *((64, 64, 64, 4, 1), (64, 64, 64, 8, 1), (64, 64, 64, 4, 2), (64, 64, 32, 4, 4)),
    *((128, 64, 128, 4, 2, 1), (128, 64, 128, 4, 2, 2), (64, 64, 64, 4, 2, 1), (256, 64, 128, 4, 2, 1)),
    *((512, 64, 128, 4, 2), (512, 64, 128, 8, 2), (512, 64, 128, 4, 3), (256, 64, 64, 4, 3, 1)),
]


def measured(run: Callable[[], Any], launches: int) -> float:
    """Return the microseconds of a launch, of several in a graph. `run` starts them all."""
    graph = Graph(DEVICE, run)
    times = []
    for _ in range(8):
        torch.accelerator.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            graph.launch()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - began)
    return min(times) / 4 / launches * 1e6


@dataclass(frozen=True)
class Product:
    """Hold one of the products of a layer for a row alone, with several weights that are read in turn."""

    kind: str
    x: Tensor
    weights: list[Tensor]
    options: dict[str, Any]

    @staticmethod
    def of(kind: str, inputs: int, outputs: int, **options: Any) -> Product:
        count = max(4, int(COLD / (inputs * outputs * 2)))
        x = torch.randn(1, inputs, device=DEVICE, dtype=torch.bfloat16)
        weights = [torch.randn(outputs, inputs, device=DEVICE, dtype=torch.bfloat16) / 64 for _ in range(count)]
        size = outputs // 2 if options.get("gate") else outputs
        vector = torch.randn(max(size, inputs), device=DEVICE, dtype=torch.bfloat16)
        terms = {"residual": vector[:size][None], "bias": vector[:size], "norm": (vector[:inputs], 1e-6), "gate": True}
        return Product(kind, x, weights, {name: terms[name] for name, used in options.items() if used})

    def once(self, launch: decode_kernels.LinearLaunch | None) -> Tensor:
        return vector_linear(self.x, self.weights[0], **self.options, launch=launch)

    def expected(self) -> Tensor:
        x = self.x.double()
        if "norm" in self.options:
            weight, eps = self.options["norm"]
            x = x * torch.rsqrt(x.square().mean() + eps) * weight.double()
        out = F.linear(x, self.weights[0].double())
        if self.options.get("gate"):
            gate, up = out.chunk(2, dim=1)
            out = F.silu(gate) * up
        return out + self.options.get("residual", 0) + self.options.get("bias", 0)

    def time(self, launch: decode_kernels.LinearLaunch | None) -> float:
        def run() -> Tensor:
            for weight in self.weights:
                out = (
                    F.linear(self.x, weight)
                    if launch is None
                    else vector_linear(self.x, weight, **self.options, launch=launch)
                )
            return out

        return measured(run, len(self.weights))


def show(kind: str, launches: Iterable[Any], measure: Callable[[Any], dict[str, Any]], deadline: float) -> None:
    """Print a line for each launch, the fastest last."""
    lines = []
    for launch in launches:
        if time.perf_counter() < deadline:
            try:
                line = measure(launch)
            except Exception as error:
                line = {"us": 1e9, "error": f"{type(error).__name__}: {error}"[:300]}
            lines.append({"kind": kind, "launch": "F.linear" if launch is None else [*launch], **line})
    for line in sorted(lines, key=lambda line: -line["us"]):
        print(json.dumps(line), flush=True)


def products(deadline: float) -> None:
    every = [
        Product.of("gate", 2048, 22016, norm=True, gate=True),
        Product.of("wide", 11008, 2048, residual=True),
        Product.of("small", 2048, 2560, norm=True, bias=True),
        Product.of("small", 2048, 2048, residual=True),
    ]
    launches = [decode_kernels.LinearLaunch(*numbers) for numbers in LINEAR]
    compiled((product.once, launch) for product in every for launch in launches)
    for kind in ("gate", "wide", "small"):
        group = [product for product in every if product.kind == kind]
        show(kind, [None, *launches], Measure(group, [product.expected() for product in group]), deadline)


@dataclass(frozen=True)
class Measure:
    """Time products of a kind. None as the launch: the product alone, by `F.linear`."""

    products: list[Product]
    exact: list[Tensor]

    def __call__(self, launch: decode_kernels.LinearLaunch | None) -> dict[str, Any]:
        for product, out in zip(self.products, self.exact, strict=True) if launch else ():
            error, rounding = float((product.once(launch) - out).norm()), float((out.bfloat16() - out).norm())
            assert error < 3 * rounding, f"the output is wrong by {error}; rounding alone makes {rounding}"
        us = [product.time(launch) for product in self.products]
        speed = sum(product.weights[0].nbytes for product in self.products) / sum(us) / 1e3
        return {"us": round(sum(us), 2), "each": [round(x, 2) for x in us], "GB_s": round(speed)}


class Attention:
    """Hold caches of several layers with `rows` rows, which are read in turn."""

    def __init__(self, rows: int) -> None:
        blocks = -(-LENGTH // BLOCK)
        self.bytes = rows * LENGTH * KV_HEADS * SIZE * 4
        self.layers = max(1, int(COLD / self.bytes)) if rows > 1 else 256  # of one row: 100 MB
        self.q = torch.randn(rows, HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
        shape = (2, self.layers, rows * blocks, BLOCK, KV_HEADS, SIZE)
        self.keys, self.values = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        order = torch.randperm(rows * blocks).tolist()
        of_rows = [CacheRow(order[row * blocks : (row + 1) * blocks], LENGTH - 1, 1) for row in range(rows)]
        self.step = CacheStep.of(of_rows, BLOCK, DEVICE, WIDTH // BLOCK)

    def once(self, launch: paged_attention.AttentionLaunch, layer: int = 0) -> Tensor:
        step, keys, values = self.step, self.keys[layer], self.values[layer]
        return paged_attention.paged_attention(
            self.q, keys, values, step.table, step.lengths, WIDTH, SIZE**-0.5, launch
        )

    def time(self, launch: paged_attention.AttentionLaunch) -> float:
        def run() -> Tensor:
            for layer in range(self.layers):
                out = self.once(launch, layer)
            return out

        return measured(run, self.layers)


def attention(deadline: float) -> None:
    cases = [Attention(1), Attention(64)]
    launches = [paged_attention.AttentionLaunch(*numbers) for numbers in ATTENTION]
    compiled((case.once, launch) for case in cases for launch in launches)
    first = [case.once(launches[0]).float() for case in cases]

    def measure(launch: paged_attention.AttentionLaunch) -> dict[str, Any]:
        for case, out in zip(cases, first, strict=True):
            error = float((case.once(launch) - out).norm() / out.norm())
            assert error < 0.01, f"the output is wrong by {error}"
        of_1, of_64 = (case.time(launch) for case in cases)
        line = {"us": round(of_1 + of_64, 2), "of_1": round(of_1, 2), "of_64": round(of_64, 2)}
        return line | {"GB_s_of_64": round(cases[1].bytes / of_64 / 1e3)}

    show("attention", launches, measure, deadline)


def compiled(calls: Iterable[tuple[Callable[[Any], Tensor], Any]]) -> None:
    """Compile kernels in threads. One that cannot be compiled raises its error later."""
    with ThreadPoolExecutor(12) as threads:
        for future in [threads.submit(run, launch) for run, launch in calls]:
            future.exception()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="skip what is left after so many")
    began, seconds = time.perf_counter(), parser.parse_args().seconds
    torch.manual_seed(0)
    attention(began + seconds)
    products(began + seconds)
    print(json.dumps({"seconds": round(time.perf_counter() - began, 1), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
