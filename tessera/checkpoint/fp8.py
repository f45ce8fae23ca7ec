"""Write folders with fp8 projections, in two formats that inference servers read.

`fp8`: one scale for each output feature, as compressed-tensors stores them (`weight_scale`). `fp8-block`: one scale for
each block of 128 x 128, as DeepSeek and Qwen publish them (`weight_scale_inv`). Activations are scaled when a model is
served. `checkpoint.quantized` reads both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tessera.checkpoint.forms import main_dtype
from tessera.config.pattern import matches
from tessera.errors import TesseraError, nearest
from tessera.weights.map import WeightMap
from tessera.weights.rows import TensorRows

Quantization = Literal["fp8", "fp8-block"]
BLOCK = 128
_UNITS = {"fp8": 16, "fp8-block": BLOCK}  # the rows and columns of a projection must be multiples of this
_LARGEST = 448.0  # largest value of float8_e4m3fn
_HEAD = "lm_head"  # always listed as unquantized: readers look for it even if a tied head has no tensor in the files
_log = logging.getLogger("tessera")


@dataclass(frozen=True)
class Fp8Map(WeightMap):
    """Write the projections of a text decoder as fp8 with scales, and all other tensors unquantized.

    Embeddings, head, norms, biases, routers and image encoders stay unquantized, as in published fp8 folders:
    quantizing them costs more quality than it saves memory.
    """

    kind: Quantization = "fp8"
    quantized: frozenset[str] = frozenset()  # native names of the weights to quantize
    unquantized: tuple[str, ...] = ()  # module names in the written folder whose weight stays unquantized
    dtype: torch.dtype = torch.bfloat16  # dtype of the projections before quantization

    @classmethod
    def of(
        cls, weights: WeightMap, kind: str, tensors: Mapping[str, Tensor], projections: Sequence[str], where: str
    ) -> Fp8Map:
        """Return the weight map that writes a model quantized.

        `tensors`: all tensors of the model. `projections`: name patterns of the weights to quantize.
        """
        if kind not in get_args(Quantization):
            allowed = get_args(Quantization)
            raise TesseraError(
                f"no such quantization: {kind!r}",
                where="--quantize",
                allowed=allowed,
                nearest=nearest(kind, allowed),
                code="weights.unknown-quantization",
            )
        chosen = [name for name in tensors if any(matches(pattern, name) for pattern in projections)]
        if not chosen:
            raise TesseraError(
                "this family has no text decoder with projections to quantize",
                where=where,
                fix="leave out --quantize",
                code="weights.no-quantizable-projection",
            )
        if kind == "fp8":
            _check_single(weights, tensors, chosen)
        quantized = _divisible(kind, tensors, chosen)
        matrices = [name for name, tensor in tensors.items() if name not in quantized and tensor.dim() > 1]
        unquantized = [_module(foreign) for name in matrices for foreign in _foreign(weights, tensors, name)]
        return cls(
            **vars(weights),
            kind="fp8" if kind == "fp8" else "fp8-block",
            quantized=quantized,
            unquantized=tuple(name for name in dict.fromkeys([_HEAD, *unquantized]) if name),
            dtype=main_dtype(tensors[name] for name in quantized),
        )

    def to_foreign_rows(self, native: Mapping[str, TensorRows]) -> dict[str, TensorRows]:
        foreign = super().to_foreign_rows(native)
        if self.quantized.isdisjoint(native):
            return foreign
        # Write scales before their fp8 weights, so that the float32 scales are aligned in the file.
        quantize = _quantize_rows if self.kind == "fp8" else _quantize_blocks
        parts = [part for name, rows in foreign.items() for part in quantize(name, rows.whole()).items()]
        return {name: TensorRows.of(tensor) for name, tensor in parts}

    def scale_of(self, foreign: str) -> str:
        """Return the name of a weight's scale tensor in the written folder."""
        return f"{foreign}_scale" if self.kind == "fp8" else f"{foreign}_scale_inv"

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json with the quantization settings that readers need."""
        named = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
        settings = _rows_settings(self.unquantized) if self.kind == "fp8" else _blocks_settings(self.unquantized)
        return {**config, named: str(self.dtype).removeprefix("torch."), "quantization_config": settings}


def _check_single(weights: WeightMap, tensors: Mapping[str, Tensor], projections: Iterable[str]) -> None:
    for name in projections:
        for foreign, blank in _foreign(weights, tensors, name).items():
            if blank.dim() != 2:
                raise TesseraError(
                    f"{foreign} stacks all experts: fp8 with one scale per output feature is not defined for it",
                    where="--quantize fp8",
                    fix="--quantize fp8-block",
                    code="weights.stacked-experts-quantization",
                )


def _divisible(kind: str, tensors: Mapping[str, Tensor], projections: Sequence[str]) -> frozenset[str]:
    """Return the projections whose rows and columns are multiples of `_UNITS[kind]`.

    If one projection of a module does not fit, none of the module is quantized: inference servers fuse them."""
    unit = _UNITS[kind]
    odd = {_parent(name): name for name in projections if any(size % unit for size in tensors[name].shape[-2:])}
    chosen = frozenset(name for name in projections if _parent(name) not in odd)
    example = next((f"{name} {list(tensors[name].shape)}" for name in odd.values()), "")
    if not chosen:
        raise TesseraError(
            f"no projection has sizes that are multiples of {unit}: {example}",
            where=f"--quantize {kind}",
            fix="--quantize fp8" if kind != "fp8" else "leave out --quantize: this model is too small to gain from it",
            code="weights.quantization-block-size",
        )
    if odd:
        _log.warning(
            "%d modules stay unquantized: their sizes are not multiples of %d, for example %s", len(odd), unit, example
        )
    return chosen


def _parent(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]


def _quantize_rows(name: str, weight: Tensor) -> dict[str, Tensor]:
    stored, scale = _quantize(name, weight.float(), (1,))
    return {f"{name}_scale": scale, name: stored}


def _quantize_blocks(name: str, weight: Tensor) -> dict[str, Tensor]:
    *stack, rows, columns = weight.shape
    blocks = weight.float().reshape(*stack, rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    stored, scale = _quantize(name, blocks, (-3, -1))
    return {f"{name}_scale_inv": scale.squeeze(-1).squeeze(-2), name: stored.reshape(weight.shape)}


def _quantize(name: str, weight: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a weight as fp8 and its scales. Values along `dims` share a scale, which maps the largest to 448.

    The rounding error of a value is at most 1/16 of the value, or 2^-10 of the scale for tiny values.
    """
    largest = weight.abs().amax(dim=dims, keepdim=True)
    if not weight.is_meta and not bool(torch.isfinite(largest).all()):
        raise TesseraError(
            f"{name} contains NaN or infinite values, which cannot be quantized",
            fix="the weights are damaged: download them again, or use an earlier checkpoint",
            code="weights.not-finite",
        )
    # A scale must not be 0, as a divisor, nor denormal, which GPUs may treat as 0. A group of zeros gets the scale 1.
    scale = (largest / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(largest > 0, scale, torch.ones_like(scale))
    return (weight / scale).to(torch.float8_e4m3fn), scale


def _rows_settings(unquantized: Sequence[str]) -> dict[str, Any]:
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**number, "strategy": "channel", "dynamic": False},
        "input_activations": {**number, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
        "kv_cache_scheme": None,
    }


def _blocks_settings(unquantized: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(unquantized),
    }


def _foreign(weights: WeightMap, tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return, on the meta device, the tensors that the model's tensor `name` is written to (name -> tensor)."""
    group = {n: torch.empty(tensors[n].shape, dtype=tensors[n].dtype, device="meta") for n in weights.group_of(name)}
    return weights.to_foreign(group)


def _module(foreign: str) -> str:
    """Return the module name of a weight, such as `a.q_proj` of `a.q_proj.weight`, or of stacked experts; else ""."""
    module, _, kind = foreign.rpartition(".")
    return module if kind == "weight" or module.endswith(".experts") else ""
