"""Dequantize the weights of a folder: fp8, bitsandbytes NF4 and FP4, GPTQ, AWQ.

Each format stores one weight as several tensors. `find_quantized` recognises the tensors by name and describes each
weight. Readers of a folder see weights under their usual names, in the dtype of config.json.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tessera.errors import TesseraError

Shapes = Mapping[str, tuple[int, ...]]
_FP8 = ("F8_E4M3", "F8_E5M2")
_FLOATS = ("F64", "F32", "F16", "BF16")
_STATE = ".quant_state.bitsandbytes__"
_LARGEST_BLOCK = 1 << 16  # values per scale; bitsandbytes uses 64 to 4096
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # order in which AWQ packs eight 4-bit values into 32 bits


def _damaged(where: str, what: str) -> TesseraError:
    return TesseraError(f"damaged quantized weights: {what}", where=where, code="weights.damaged-quantization")


@dataclass(frozen=True)
class QuantizedWeight(ABC):
    """Describe a quantized weight: its shape, and the names of its stored tensors."""

    shape: tuple[int, ...]
    parts: tuple[str, ...]

    @abstractmethod
    def dequantize(self, parts: list[Tensor]) -> Tensor:
        """Return the weight in float32."""


@dataclass(frozen=True)
class ScaledFloat8(QuantizedWeight):
    """Dequantize an fp8 tensor with one scale, one scale per row, or one per block of the last two dimensions."""

    block: tuple[int, int] | None = None

    def dequantize(self, parts: list[Tensor]) -> Tensor:
        weight, scale = parts[0].float(), parts[1].float()
        if self.block is None:
            rows = scale.numel() == weight.shape[0] and scale.numel() > 1
            return weight * (scale.reshape(-1, *[1] * (weight.dim() - 1)) if rows else scale.reshape(()))
        for dim, size in zip((-2, -1), self.block, strict=True):
            size = min(size, weight.shape[dim])
            scale = scale.repeat_interleave(size, dim=dim).narrow(dim, 0, weight.shape[dim])
        return weight * scale


@dataclass(frozen=True)
class FourBit(QuantizedWeight):
    """Dequantize a 4-bit tensor of bitsandbytes. A byte holds two indices into a table; each block has a scale."""

    blocksize: int = 64
    nested_blocksize: int = 0
    nested_offset: float = 0.0

    def dequantize(self, parts: list[Tensor]) -> Tensor:
        packed, absmax, table = parts[0].reshape(-1), parts[1], parts[2].float()
        if self.nested_blocksize:  # double quantization: the scales are quantized, too
            outer = parts[3].float().repeat_interleave(self.nested_blocksize)[: absmax.numel()]
            scales = parts[4].float()[absmax.long()] * outer + self.nested_offset
        else:
            scales = absmax.float()
        values = table[torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1).long()]
        count = math.prod(self.shape)
        scaled = values[:count] * scales.repeat_interleave(self.blocksize)[:count]
        return scaled.reshape(self.shape)


@dataclass(frozen=True)
class GptqWeight(QuantizedWeight):
    """Dequantize a GPTQ layer: values are packed along the inputs, zero points along the outputs."""

    bits: int = 4
    zero_offset: int = 1  # added to stored zero points: GPTQ version 1 stores them minus one

    def dequantize(self, parts: list[Tensor]) -> Tensor:
        qweight, qzeros, scales = parts[:3]
        inputs = self.shape[1]
        values = _unpack(qweight.t().contiguous(), self.bits)[:, :inputs]  # [outputs, inputs]
        zeros = (_unpack(qzeros, self.bits)[:, : self.shape[0]] + self.zero_offset) & ((1 << self.bits) - 1)
        if len(parts) > 3:
            groups = parts[3].long()
            if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[0]:
                raise TesseraError(
                    f"{self.parts[3]} contains a group index outside of 0 to {scales.shape[0] - 1}",
                    code="weights.damaged-quantization",
                )
        else:
            groups = torch.arange(inputs) // -(-inputs // scales.shape[0])
        return (values.float() - zeros.t()[:, groups].float()) * scales.t()[:, groups].float()


@dataclass(frozen=True)
class AwqWeight(QuantizedWeight):
    """Dequantize an AWQ layer: values and zero points are packed along the outputs, in `_AWQ_ORDER`."""

    def dequantize(self, parts: list[Tensor]) -> Tensor:
        qweight, qzeros, scales = parts
        order = torch.tensor(_AWQ_ORDER)
        values, zeros = (
            _unpack(packed, 4).reshape(packed.shape[0], -1, 8)[:, :, order].reshape(packed.shape[0], -1)
            for packed in (qweight, qzeros)
        )  # values [inputs, outputs], zeros [groups, outputs]
        each = values.shape[0] // zeros.shape[0]
        zeros, spread = zeros.repeat_interleave(each, dim=0), scales.float().repeat_interleave(each, dim=0)
        return ((values - zeros).float() * spread).t().contiguous()


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Unpack the 32-bit words of the last dimension into values of `bits` bits, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (packed.to(torch.int32).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.reshape(*packed.shape[:-1], -1)


# ---------------------------------------------------------------------------------------------- recognition


def find_quantized(
    shapes: Shapes, kinds: Mapping[str, str], states: Mapping[str, Tensor], config: Mapping[str, Any], where: str
) -> tuple[dict[str, QuantizedWeight], set[str]]:
    """Return the quantized weights by their usual names, and the names of all their stored tensors.

    `kinds`: dtypes as safetensors names them. `states`: the JSON tensors that describe weights of bitsandbytes.
    `config`: `quantization_config` of config.json, or an empty mapping.
    """
    weights: dict[str, QuantizedWeight] = {}
    for name in shapes:
        weight = name.removesuffix("_inv").removesuffix("_scale")
        if name in (f"{weight}_scale", f"{weight}_scale_inv") and kinds.get(weight) in _FP8:
            weights[weight] = _float8(weight, name, shapes, config, where)
            _check_kinds(kinds, {name: _FLOATS}, where)
        elif _STATE in name:
            weight, _, kind = name.partition(_STATE)
            four = _four_bit(weight, name, kind, shapes, states, where)
            scales: tuple[str, ...] = ("U8",) if four.nested_blocksize else _FLOATS
            wanted: list[tuple[str, ...]] = [("U8",), scales, *[_FLOATS] * 3]
            _check_kinds(kinds, dict(zip(four.parts, wanted, strict=False)), where)
            weights[weight] = four
        elif name.endswith(".qweight"):
            prefix = name.removesuffix("qweight")
            layer = _integers(prefix, shapes, config, where)
            wanted = [("I32",), ("I32",), _FLOATS, ("I32", "I64")]
            _check_kinds(kinds, dict(zip(layer.parts, wanted, strict=False)), where)
            weights[prefix + "weight"] = layer
    used = {part for weight in weights.values() for part in weight.parts}
    used |= {name for name in shapes if _STATE in name and name.partition(_STATE)[0] in weights}
    # Count static activation scales as used, without reading them: Tessera does not quantize activations.
    used |= {name for name in shapes if name.endswith((".input_scale", ".activation_scale", ".input_scale_inv"))}
    alone = [name for name in shapes if kinds[name] in _FP8 and name not in used]
    if alone:
        raise _damaged(where, f"{alone[0]} is stored in fp8 without its scales")
    return weights, used


def _check_kinds(kinds: Mapping[str, str], wanted: Mapping[str, tuple[str, ...]], where: str) -> None:
    for name, allowed in wanted.items():
        if kinds[name] not in allowed:
            raise _damaged(where, f"{name} is stored as {kinds[name]}, not as {' or '.join(allowed)}")


def _float8(weight: str, scale: str, shapes: Shapes, config: Mapping[str, Any], where: str) -> ScaledFloat8:
    """Describe an fp8 weight with one scale, one per row (`_scale`), or one per block (`_scale_inv`)."""
    shape, scales = shapes[weight], shapes[scale]
    count, by_block = math.prod(scales), scale.endswith("_inv")
    if shape and (count == 1 or (not by_block and count == shape[0])):
        return ScaledFloat8(shape, (weight, scale))
    size = config.get("weight_block_size") or (128, 128)
    sound = isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    fits = sound and by_block and len(shape) == len(scales) >= 2 and shape[:-2] == scales[:-2]
    if not fits or any(-(-n // block) != m for n, m, block in zip(shape[-2:], scales[-2:], size, strict=True)):
        raise _damaged(where, f"{scale} {list(scales)} does not fit {weight} {list(shape)}, block size {size}")
    return ScaledFloat8(shape, (weight, scale), (int(size[0]), int(size[1])))


def _four_bit(weight: str, name: str, kind: str, shapes: Shapes, states: Mapping[str, Tensor], where: str) -> FourBit:
    try:
        state = json.loads(bytes(states[name].tolist()).decode("utf-8"))
        shape, blocksize = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        nested = int(state.get("nested_blocksize") or 0)
        offset = float(state.get("nested_offset") or 0.0)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise _damaged(where, f"{name} does not describe a weight: {error}") from None
    parts = [weight, f"{weight}.absmax", f"{weight}.quant_map"]
    if nested:
        parts += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
    missing = [part for part in parts if part not in shapes]
    count = math.prod(shape)
    sound = kind in ("nf4", "fp4") and 0 < blocksize <= _LARGEST_BLOCK and min(shape, default=0) > 0
    sound = sound and 0 <= nested <= _LARGEST_BLOCK and math.isfinite(offset)
    if missing or not sound or math.prod(shapes[weight]) != -(-count // 2):
        raise _damaged(where, f"{weight} is no {kind} tensor of shape {list(shape)}: {missing or 'its size differs'}")
    blocks = -(-count // blocksize)
    sizes = [blocks, 16] + ([-(-blocks // nested), 256] if nested else [])
    for part, size in zip(parts[1:], sizes, strict=True):
        if math.prod(shapes[part]) != size:
            raise _damaged(where, f"{part} {list(shapes[part])} must have {size} values")
    return FourBit(shape, tuple(parts), blocksize, nested, offset)


def _integers(prefix: str, shapes: Shapes, config: Mapping[str, Any], where: str) -> AwqWeight | GptqWeight:
    method, bits = config.get("quant_method"), config.get("bits", config.get("w_bit", 4))
    gemm = str(config.get("version", "gemm")).lower() == "gemm"
    if bits not in (2, 4, 8) or method not in ("gptq", "awq") or (method == "awq" and (bits != 4 or not gemm)):
        raise TesseraError(
            f"weights that {method!r} quantized to {bits} bits are not supported",
            where=where,
            allowed=["gptq with 2, 4 or 8 bits", "awq with 4 bits in the gemm layout", "fp8", "bitsandbytes"],
            code="weights.unsupported-quantization",
        )
    names = [prefix + part for part in ("qweight", "qzeros", "scales")]
    missing = [name for name in names if name not in shapes]
    if missing:
        raise _damaged(where, f"{missing[0]} is missing beside {names[0]}")
    packed, zeros, scales = (shapes[name] for name in names)
    fits = len(packed) == len(zeros) == len(scales) == 2 and 0 not in (*packed, *zeros, *scales)
    index, per_word = prefix + "g_idx", 32 // int(bits)
    if fits and method == "awq":
        fits = scales[1] == 8 * packed[1] and zeros == (scales[0], packed[1]) and packed[0] % scales[0] == 0
    elif fits:
        inputs = packed[0] * per_word
        fits = scales[1] == packed[1] and zeros == (scales[0], -(-scales[1] // per_word)) and scales[0] <= inputs
        fits = fits and shapes.get(index, (inputs,)) == (inputs,)
    if not fits:
        tensors = ", ".join(f"{name} {list(shapes[name])}" for name in [*names, index] if name in shapes)
        raise _damaged(where, f"the shapes do not describe one weight of {bits} bits: {tensors}")
    if method == "awq":
        return AwqWeight((scales[1], packed[0]), tuple(names))
    names += [index] * (index in shapes)
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    return GptqWeight((scales[1], packed[0] * per_word), tuple(names), int(bits), offset)
