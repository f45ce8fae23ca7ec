"""Add LoRA adapters to chosen linear layers and experts of a module on the meta device.

All other parameters are frozen, except those of `modules_to_save`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.config.model import WeightBits
from tessera.config.pattern import home, matches, select_trees
from tessera.config.run_config import LoraSection
from tessera.core.model_plan import ModelPlan, TensorStyle
from tessera.errors import TesseraError
from tessera.lora.select import (
    Adapter,
    Adapters,
    adapter_for,
    choose,
    factor_names,
    factor_shapes,
    start_names,
    weight_names,
)
from tessera.nn.moe import ExpertAdapter
from tessera.ops.linear import adapted_linear, dequantize, dora_linear, packed_sizes, quantized_linear
from tessera.ops.linear import quantize as quantized
from tessera.ops.moe import LowRank
from tessera.runtime.modules import EXPERT_WEIGHTS, StackedExperts, clean_name

PACKED, SCALES = "packed", "scales"


class Factor(nn.Module):
    """Hold one parameter of an adapter. The module is never called."""

    def __init__(self, *shape: int, like: Tensor, trained: bool = True) -> None:
        super().__init__()
        empty = torch.empty(shape, device=like.device, dtype=like.dtype)
        self.weight = nn.Parameter(empty, requires_grad=trained)


class LoraLinear(nn.Linear):
    """Compute a linear layer with a LoRA adapter. It replaces the layer and takes its weight, bias and name."""

    def __init__(self, linear: nn.Linear, adapter: Adapter, dropout: float = 0.0) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.adapter = adapter
        self.dropout = dropout
        sizes_a, sizes_b = (adapter.rank, linear.in_features), (linear.out_features, adapter.rank)
        self.lora_a, self.lora_b = Factor(*sizes_a, like=linear.weight), Factor(*sizes_b, like=linear.weight)
        self.lora_m = Factor(linear.out_features, like=linear.weight) if adapter.dora else None
        self.lora_a0 = Factor(*sizes_a, like=linear.weight, trained=False) if adapter.pissa else None
        self.lora_b0 = Factor(*sizes_b, like=linear.weight, trained=False) if adapter.pissa else None
        self.adapted = True  # False: the adapter is skipped

    def forward(self, x: Tensor) -> Tensor:
        product = self.product(x)
        if not self.adapted:
            return product
        dropout = self.dropout if self.training else 0.0
        a, b, scale = self.lora_a.weight, self.lora_b.weight, self.adapter.scale
        if self.lora_m is not None:
            weight = self.base_weight(product.dtype)
            return dora_linear(x, product, weight, self.bias, (a, b, self.lora_m.weight), scale, dropout)
        out = adapted_linear(x, product, a, b, scale, dropout)
        if self.lora_a0 is not None and self.lora_b0 is not None:
            out = adapted_linear(x, out, self.lora_a0.weight, self.lora_b0.weight, -scale)
        return out

    def base_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight of the layer without its adapter."""
        return self.weight

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class QuantizedLoraLinear(LoraLinear):
    """Compute an adapted linear layer with a quantized weight: two buffers (values, scales), unsharded.

    Scales are fp32 values stored as int32 bits, so that a cast of the module does not change them.
    """

    packed: Tensor
    scales: Tensor
    frozen_buffers = (PACKED, SCALES)

    def __init__(self, linear: nn.Linear, adapter: Adapter, dropout: float = 0.0, bits: WeightBits = "nf4") -> None:
        super().__init__(linear, adapter, dropout)
        self.bits: WeightBits = bits
        self.register_parameter("weight", None)
        count, blocks = packed_sizes(linear.out_features, linear.in_features, bits)
        device = linear.weight.device
        self.register_buffer(PACKED, torch.zeros(count, dtype=torch.uint8, device=device))
        self.register_buffer(SCALES, torch.zeros(blocks, dtype=torch.int32, device=device))

    def product(self, x: Tensor) -> Tensor:
        scales = self.scales.view(torch.float32)
        shape = (self.out_features, self.in_features)
        return quantized_linear(x, self.packed, scales, shape, self.bias, self.bits)

    def base_weight(self, dtype: torch.dtype) -> Tensor:
        scales = self.scales.view(torch.float32)
        return dequantize(self.packed, scales, self.out_features, self.in_features, dtype, self.bits)

    @torch.no_grad()
    def keep(self, weight: Tensor) -> None:
        """Quantize and store the weight of the layer."""
        packed, scales = quantized(weight, self.bits)
        self.packed.copy_(packed)
        self.scales.copy_(scales.view(torch.int32))


class LoraExperts(ExpertAdapter):
    """Hold the adapter of stacked experts: two matrices for each expert.

    The module is never called. Its parent, the module of experts, reads `factors`.
    """

    def __init__(self, weight: Tensor, adapter: Adapter, dropout: float = 0.0) -> None:
        """Make the adapter of stacked weights like `weight` [experts, out, in]."""
        super().__init__()
        self.adapter = adapter
        self.dropout = dropout
        sizes_a, sizes_b = factor_shapes(adapter, weight.shape)
        self.lora_a, self.lora_b = Factor(*sizes_a, like=weight), Factor(*sizes_b, like=weight)
        self.adapted = True  # False: the adapter is skipped

    def factors(self) -> LowRank | None:
        """Return the current matrices; None while the adapter is skipped."""
        if not self.adapted:
            return None
        dropout = self.dropout if self.training else 0.0
        return LowRank(self.lora_a.weight, self.lora_b.weight, self.adapter.scale, dropout)


def find_adapters(
    section: LoraSection, module: nn.Module, plan: ModelPlan, origin: str | None = None
) -> dict[str, Adapter]:
    """Return layer -> adapter for the layers that `model.lora` of a recipe selects.

    `origin`: the file that `targets` come from; None: the recipe.
    """
    layers: list[str] = []
    refused: dict[str, str] = {}
    experts: dict[str, tuple[str, ...]] = {}
    for path, part in module.named_modules():
        if isinstance(part, StackedExperts) and part.adapted_weights:
            experts |= {f"{path}.{name}": weights for name, weights in part.adapted_weights.items()}
        elif any(matches(pattern, path) for pattern in plan.experts):
            refused[path] = f"{type(part).__name__} stacks the weights of experts and supports no adapters"
        elif any(matches(pattern, path) for pattern in plan.fsdp_root):
            refused[path] = "its weight is also used outside of its forward pass"
        elif isinstance(part, nn.Linear) and not part.weight.requires_grad:
            refused[path] = "it is not used in the forward pass, only stored in the folder"
        elif type(part) is nn.Linear:
            layers.append(path)
        elif next(part.parameters(recurse=False), None) is not None:
            refused[path] = f"{type(part).__name__} is not a plain linear layer"
    streams = [stream for stream in plan.streams.values() if not stream.read_at]
    encoders = [path for stream in streams for path in (stream.module, stream.projector) if path]
    blocks = [path for path, _ in module.named_modules() if any(matches(pattern, path) for pattern in plan.blocks)]
    usual = [path for path in layers if home(path, blocks) is not None and home(path, encoders) is None]
    if plan.decoder:
        usual = [path for path in usual if home(path, [plan.decoder]) is not None]
    return choose(section, layers, usual, refused, experts, origin)


def add_adapters(
    module: nn.Module,
    adapters: Adapters,
    dropout: float = 0.0,
    quantize: WeightBits | None = None,
    trained: Sequence[str] = (),
) -> None:
    """Add adapters to `module` in place and freeze everything else.

    `quantize`: format of the frozen weights of adapted layers, which `QuantizedLoraLinear.keep` fills; None: none.
    `trained`: other parameters that are not frozen.
    """
    module.requires_grad_(False)
    for name in trained:
        module.get_parameter(name).requires_grad_(True)
    for path, adapter in adapters.items():
        parent, _, name = path.rpartition(".")
        if adapter.stacked:
            weight = module.get_parameter(weight_names(path, adapter)[0])
            setattr(module.get_submodule(parent), name, LoraExperts(weight, adapter, dropout))
            continue
        layer = module.get_submodule(path)
        assert isinstance(layer, nn.Linear)
        adapted = LoraLinear(layer, adapter, dropout)
        if quantize is not None:
            adapted = QuantizedLoraLinear(layer, adapter, dropout, quantize)
        setattr(module.get_submodule(parent), name, adapted)


def trained_in_full(section: LoraSection, module: nn.Module, adapters: Adapters) -> list[str]:
    """Return the parameters of all modules in `modules_to_save`, which are trained fully beside the adapters."""
    if not section.modules_to_save:
        return []
    used = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    names = select_trees(section.modules_to_save, used, "model.lora.modules_to_save")
    for name in names:
        if adapter_for(name, adapters) is not None:
            layer = name.removesuffix(".weight")
            raise TesseraError(
                f"{layer} has an adapter and is also in model.lora.modules_to_save",
                where="model.lora.modules_to_save",
                fix="remove it from model.lora.targets or from modules_to_save",
                code="adapter.trained-in-full",
            )
    return names


def with_adapters(plan: ModelPlan) -> ModelPlan:
    """Return the plan with tensor-parallel styles for adapters, derived from the styles of their layers."""
    styles: dict[str, TensorStyle] = {}
    for pattern, style in plan.tensor.items():
        path, _, kind = pattern.rpartition(".")
        if style not in ("column", "row", "replicate") or not path:
            continue
        adapted = [f"{path}.{name}" for name, weights in EXPERT_WEIGHTS.items() if matches(kind, weights[0])]
        for layer in [*adapted, *([path] if matches(kind, "weight") else [])]:
            # The style "heads" replicates a parameter and sums its partial gradients over ranks.
            of_a: TensorStyle = "heads" if style == "column" else style
            of_b: TensorStyle = "heads" if style == "row" else style
            for a, b in (factor_names(layer), start_names(layer)):
                styles |= {a: of_a, b: of_b}
    return replace(plan, tensor={**plan.tensor, **styles})


@torch.no_grad()
def start_factor(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill an unsharded adapter parameter with its initial values: A random, B zero, so the output is unchanged.

    Parameters of DoRA and PiSSA depend on the weights and are filled later.
    """
    if name == factor_names(name.rsplit(".", 2)[0])[0]:
        bound = 1 / math.sqrt(tensor.shape[-1])  # Kaiming uniform with a = sqrt(5), as in PEFT and nn.Linear
        tensor.uniform_(-bound, bound, generator=generator)
    else:
        tensor.zero_()


def adapted_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted linear layers of this module by name, without experts."""
    parts = ((clean_name(name + ".")[:-1], part) for name, part in module.named_modules())
    return {name: part for name, part in parts if isinstance(part, LoraLinear)}


@contextlib.contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Skip all adapters inside the context, so that the model computes like the base model."""
    layers = [part for part in module.modules() if isinstance(part, LoraLinear | LoraExperts)]
    for layer in layers:
        layer.adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapted = True
