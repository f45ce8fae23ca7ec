"""Folders whose weights are kept in fewer bits are read as the weights that they stand for."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_folders import small_folder
from torch import Tensor

import tessera
from tessera.checkpoint.files import CODES
from tessera.checkpoint.quantized import find_quantized
from tests.errors import raises

Packed = tuple[dict[str, Tensor], Tensor]  # what a folder stores instead of a weight, and what it stands for
NF4 = [-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626,
       0.723, 1.0]  # fmt: skip


def blocks(name: str, weight: Tensor) -> Packed:
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // 16), -(-columns // 16))
    stored, means = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
    for r in range(scale.shape[0]):
        for c in range(scale.shape[1]):
            at = (slice(16 * r, 16 * r + 16), slice(16 * c, 16 * c + 16))
            scale[r, c] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scale[r, c]).to(torch.float8_e4m3fn)
            means[at] = stored[at].float() * scale[r, c]
    return {name: stored, f"{name}_scale_inv": scale}, means


def whole(name: str, weight: Tensor) -> Packed:
    scale = weight.abs().max().reshape(1) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    inputs = {name.replace("weight", "input_scale"): torch.ones(1)}
    return {name: stored, f"{name}_scale": scale, **inputs}, stored.float() * scale


def by_row(name: str, weight: Tensor) -> Packed:
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {name: stored, f"{name}_scale": scale}, stored.float() * scale


def four_bits(name: str, weight: Tensor, nested: bool = False) -> Packed:
    flat, table = weight.reshape(-1), torch.tensor(NF4)
    scales = torch.stack([block.abs().max() for block in flat.split(64)])
    stored: dict[str, Tensor] = {f"{name}.absmax": scales}
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    if nested:
        outer_table, offset = torch.linspace(-1, 1, 256), float(scales.mean())
        outer = torch.stack([block.abs().max() for block in (scales - offset).split(256)])
        codes = [(outer_table - (scales[n] - offset) / outer[n // 256]).abs().argmin() for n in range(len(scales))]
        stored = {f"{name}.absmax": torch.stack(codes).to(torch.uint8)}
        stored |= {f"{name}.nested_absmax": outer, f"{name}.nested_quant_map": outer_table}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        scales = torch.stack([outer_table[int(code)] * outer[n // 256] + offset for n, code in enumerate(codes)])
    codes = [int((table - value / scales[n // 64]).abs().argmin()) for n, value in enumerate(flat)]
    means = torch.stack([table[code] * scales[n // 64] for n, code in enumerate(codes)]).reshape(weight.shape)
    pairs = [high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True)]
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    stored |= {f"{name}.quant_map": table, f"{name}.quant_state.bitsandbytes__nf4": told}
    return {name: torch.tensor(pairs, dtype=torch.uint8).reshape(-1, 1), **stored}, means


def words(values: list[list[int]]) -> Tensor:
    """Rows of eight values of four bits each, as 32-bit words, the first value lowest."""
    packed = [
        [struct.unpack("<i", struct.pack("<I", sum(v << 4 * n for n, v in enumerate(row[at : at + 8]))))[0]
         for at in range(0, len(row), 8)]
        for row in values
    ]  # fmt: skip
    return torch.tensor(packed, dtype=torch.int32)


def gptq(name: str, weight: Tensor) -> Packed:
    outputs, inputs = weight.shape
    prefix, chance = name.removesuffix("weight"), torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (inputs, outputs), generator=chance)
    zeros = torch.randint(1, 16, (4, outputs), generator=chance)
    scales = torch.rand(4, outputs, generator=chance).half() * 0.05
    groups = torch.randint(0, 4, (inputs,), generator=chance)
    means = torch.stack([(values[i] - zeros[groups[i]]) * scales[groups[i]].float() for i in range(inputs)], dim=1)
    stored = {
        "qweight": words(values.t().tolist()).t().contiguous(),
        "qzeros": words((zeros - 1).tolist()),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }
    return {prefix + key: tensor for key, tensor in stored.items()}, means


def awq(name: str, weight: Tensor) -> Packed:
    outputs, inputs = weight.shape
    prefix, chance = name.removesuffix("weight"), torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (inputs, outputs), generator=chance)
    zeros = torch.randint(0, 16, (2, outputs), generator=chance)
    scales = torch.rand(2, outputs, generator=chance).half() * 0.05
    group = [i * 2 // inputs for i in range(inputs)]
    means = torch.stack([(values[i] - zeros[group[i]]) * scales[group[i]].float() for i in range(inputs)], dim=1)

    def ordered(rows: Tensor) -> list[list[int]]:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that each place of a word holds
        return [[int(row[at + n]) for at in range(0, len(row), 8) for n in order] for row in rows]

    stored = {"qweight": words(ordered(values)), "qzeros": words(ordered(zeros)), "scales": scales}
    return {prefix + key: tensor for key, tensor in stored.items()}, means


FORMS: dict[str, tuple[Callable[[str, Tensor], Packed], dict[str, Any]]] = {
    "fp8 in blocks": (blocks, {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "fp8, one scale": (whole, {"quant_method": "fp8"}),
    "fp8, one scale for each row": (by_row, {"quant_method": "compressed-tensors"}),
    "nf4": (four_bits, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "nf4, nested": (lambda n, w: four_bits(n, w, nested=True), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
}


def quantized(folder: Path, form: str) -> dict[str, Tensor]:
    """Quantizes one projection of a folder, and returns what all of its weights mean now."""
    pack, settings = FORMS[form]
    (path,) = folder.glob("*.safetensors")
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        if name.startswith("model.layers.0.") and name.endswith("k_proj.weight"):
            packed, means = pack(name, tensor.float())
            stored |= packed
            meant[name] = means.bfloat16()
        else:
            stored[name] = meant[name] = tensor
    save_file(stored, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": settings, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_folder("qwen2", tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.slow] if form == "nf4" else []) for form in FORMS]
)
def test_a_quantized_folder_is_read_as_what_it_means(form: str, plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    meant = quantized(folder, form)
    tessera.convert(folder, tmp_path / "out", dtype="float32", prove="never")
    (written,) = (tmp_path / "out").glob("*.safetensors")
    actual = load_file(written)
    assert actual.keys() == meant.keys()
    for name, tensor in meant.items():
        # The product of two numbers is rounded to float32 once here and once there, and then to bfloat16 in both.
        assert torch.allclose(actual[name], tensor.float(), rtol=2**-7, atol=1e-7), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize(
    ("form", "spoil", "error"),
    [
        (
            "fp8 in blocks",
            lambda t: t.pop(next(n for n in t if n.endswith("_scale_inv"))),
            "weights.damaged-quantization",
        ),
        ("gptq", lambda t: t.pop(next(n for n in t if n.endswith("qzeros"))), "weights.damaged-quantization"),
        ("nf4", lambda t: t.pop(next(n for n in t if n.endswith("absmax"))), "weights.damaged-quantization"),
        (
            "fp8, one scale",
            lambda t: t.update({n: torch.ones(3) for n in t if n.endswith("weight_scale")}),
            "weights.damaged-quantization",
        ),
    ],
)
def test_what_does_not_fit_is_named(
    form: str, spoil: Callable[[Any], Any], error: str, plain: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in plain.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    quantized(folder, form)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with raises(error):
        tessera.convert(folder, tmp_path / "out")


def headers(stored: dict[str, Tensor]) -> tuple[dict[str, tuple[int, ...]], dict[str, str], dict[str, Tensor]]:
    states = {name: tensor for name, tensor in stored.items() if ".quant_state." in name}
    return (
        {name: tuple(t.shape) for name, t in stored.items()},
        {name: CODES[t.dtype] for name, t in stored.items()},
        states,
    )


def told(**changes: Any) -> Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [16, 128], **changes}
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


STATE = "w.weight.quant_state.bitsandbytes__nf4"
DEEP = torch.tensor(list(b"[" * 60000), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("form", "changes", "settings", "error"),
    [
        ("gptq", {"w.qzeros": torch.zeros(4, 3, dtype=torch.int32)}, {}, "weights.damaged-quantization"),
        ("gptq", {"w.scales": torch.ones(16)}, {}, "weights.damaged-quantization"),
        ("gptq", {"w.scales": torch.ones(4, 15)}, {}, "weights.damaged-quantization"),
        ("gptq", {"w.g_idx": torch.zeros(64, dtype=torch.int32)}, {}, "weights.damaged-quantization"),
        ("gptq", {"w.qweight": torch.zeros(16, 16)}, {}, "weights.damaged-quantization F32"),
        ("gptq", {}, {"bits": 8}, "weights.damaged-quantization"),
        ("gptq", {}, {"bits": 3}, "weights.unsupported-quantization"),
        ("gptq", {}, {"bits": [4]}, "weights.unsupported-quantization"),
        ("awq", {"w.qzeros": torch.zeros(0, 2, dtype=torch.int32)}, {}, "weights.damaged-quantization"),
        (
            "awq",
            {"w.scales": torch.ones(3, 16), "w.qzeros": torch.zeros(3, 2, dtype=torch.int32)},
            {},
            "weights.damaged-quantization",
        ),
        ("awq", {}, {"version": 3}, "weights.unsupported-quantization"),
        ("awq", {}, {"quant_method": "hqq"}, "weights.unsupported-quantization"),
        ("nf4", {"w.weight.quant_map": torch.ones(15)}, {}, "weights.damaged-quantization 16"),
        ("nf4", {"w.weight": torch.zeros(1024, 1, dtype=torch.int8)}, {}, "weights.damaged-quantization I8"),
        ("nf4", {STATE: told(blocksize=2**40)}, {}, "weights.damaged-quantization"),
        ("nf4", {STATE: told(shape=[1e999, 1])}, {}, "weights.damaged-quantization"),
        ("nf4", {STATE: told(nested_blocksize=256)}, {}, "weights.damaged-quantization nested_absmax"),
        ("nf4", {STATE: DEEP}, {}, "weights.damaged-quantization"),
        ("nf4, nested", {"w.weight.nested_quant_map": torch.ones(16)}, {}, "weights.damaged-quantization 256"),
        (
            "fp8 in blocks",
            {"w.weight_scale_inv": torch.ones(1, 8, dtype=torch.uint8)},
            {},
            "weights.damaged-quantization U8",
        ),
        ("fp8, one scale", {"w.weight": torch.ones((), dtype=torch.float8_e4m3fn)}, {}, "weights.damaged-quantization"),
    ],
)
def test_parts_that_do_not_make_a_weight_are_refused_by_their_headers(
    form: str, changes: dict[str, Tensor], settings: dict[str, Any], error: str
) -> None:
    pack, kind = FORMS[form]
    stored, _ = pack("w.weight", torch.randn(16, 128, generator=torch.Generator().manual_seed(0)))
    find_quantized(*headers(stored), kind, "here")
    with raises(error):
        find_quantized(*headers({**stored, **changes}), {**kind, **settings}, "here")


def test_groups_and_blocks_beyond_the_weight_are_refused_or_cost_nothing() -> None:
    stored, _ = gptq("w.weight", torch.randn(16, 128))
    weights, _ = find_quantized(*headers(stored), FORMS["gptq"][1], "here")
    for wrong in (-1, 4):
        stored["w.g_idx"][5] = wrong
        with raises("weights.damaged-quantization"):
            weights["w.weight"].dequantize([stored[part] for part in weights["w.weight"].parts])
    stored = {"w.weight": torch.ones(16, 32).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(1, 2)}
    weights, _ = find_quantized(*headers(stored), {"weight_block_size": [1 << 50, 16]}, "here")
    assert torch.equal(weights["w.weight"].dequantize(list(stored.values())), torch.ones(16, 32))
