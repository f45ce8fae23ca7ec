"""Weights in four bits (QLoRA) and in eight under adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tessera
from tessera.config.model import WeightBits
from tessera.lora.modules import QuantizedLoraLinear, adapted_layers
from tessera.ops.linear import BLOCK, dequantize, packed_sizes, quantize, quantized_linear
from tessera.training.run import resume, train
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.chat_set import write_chat_set
from tests.unit.test_lora import Watcher, losses, recipe, tensors_of


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("shape", [(16, 64), (7, 5), (1, 1), (33, 31)])
def test_no_number_is_further_off_than_the_table_allows(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, scales = quantize(weight)
    assert packed.dtype is torch.uint8
    assert packed.numel() == -(-weight.numel() // BLOCK) * BLOCK // 2
    actual = dequantize(packed, scales, *shape, torch.float32)
    widest = (1 - 0.6961928) / 2  # half of the widest step between two entries
    block_scales = scales.repeat_interleave(BLOCK)[: weight.numel()].view(shape)
    assert bool(((actual - weight).abs() <= widest * block_scales + 1e-6).all())
    assert torch.equal(quantize(actual)[0], packed)  # what is in the table stays what it is


def test_zeros_stay_zeros() -> None:
    assert not dequantize(*quantize(torch.zeros(4, 40)), 4, 40, torch.float32).any()


@pytest.mark.parametrize("shape", [(16, 64), (7, 5), (1, 1)])
def test_eight_bits_are_off_by_a_sixteenth_at_most(shape: tuple[int, int]) -> None:
    """Three bits of mantissa: half a step is 1/16 of a normal number, and 2^-10 of a subnormal one."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, shape[0])[:, None]
    packed, scales = quantize(weight, "fp8")
    assert packed.dtype is torch.uint8
    assert (packed.numel(), scales.numel()) == packed_sizes(*shape, "fp8")
    actual = dequantize(packed, scales, *shape, torch.float32, "fp8")
    near = (weight.abs() / 16).maximum(scales.unsqueeze(1) * 2**-10)
    assert bool(((actual - weight).abs() <= near * (1 + 1e-6)).all())
    assert torch.equal(quantize(actual, "fp8")[0], packed)  # what the type can say stays what it is
    zeros = torch.zeros(2, 3)
    assert torch.equal(dequantize(*quantize(zeros, "fp8"), 2, 3, torch.float32, "fp8"), zeros)


@pytest.mark.parametrize("bits", ["nf4", "fp8"])
def test_the_product_and_its_gradient_are_those_of_the_whole_weight(bits: WeightBits) -> None:
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(5, 24, generator=chance).requires_grad_()
    bias = torch.randn(12, generator=chance)
    packed, scales = quantize(torch.randn(12, 24, generator=chance), bits)
    weight = dequantize(packed, scales, 12, 24, torch.float32, bits)
    plain = torch.nn.functional.linear(x, weight, bias)
    actual = quantized_linear(x, packed, scales, (12, 24), bias, bits)
    torch.testing.assert_close(actual, plain)
    slope = torch.randn(5, 12, generator=chance)
    torch.testing.assert_close(*(torch.autograd.grad((out * slope).sum(), x)[0] for out in (actual, plain)))


def test_the_numbers_are_those_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(2))
    theirs, state = functional.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    packed, scales = quantize(weight)
    assert torch.equal(packed, theirs.flatten())
    torch.testing.assert_close(scales, state.absmax.flatten())
    torch.testing.assert_close(
        dequantize(packed, scales, 48, 64, torch.float32), functional.dequantize_4bit(theirs, state)
    )


# ---------------------------------------------------------------------------------------------- a run


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["nf4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_run_trains_stops_goes_on_and_exports(data: Path, tmp_path: Path, bits: str) -> None:
    lora = {"rank": 4, "quantize": bits}
    watch, whole = Watcher(), train(recipe(data, tmp_path / "whole", lora, steps=4), {"checkpoint.export": True})
    train(recipe(data, tmp_path / "cut", lora, steps=4), callbacks=[StopAt(2), watch])
    again = resume(tmp_path / "cut" / "chat")
    assert losses(again) == losses(whole)
    saved = tensors_of(whole)
    assert all(torch.equal(saved[name], other) for name, other in tensors_of(again).items())
    assert "model.text.layers.0.attn.q.packed" in saved
    assert "model.text.layers.0.attn.q.weight" not in saved

    model, processor = tessera.load(whole.folder, device="cpu", dtype="bfloat16")
    layers = adapted_layers(model.module)
    assert all(isinstance(layer, QuantizedLoraLinear) for layer in layers.values())
    name = "text.layers.0.attn.q"
    assert torch.equal(layers[name].scales, saved[f"model.{name}.scales"])  # type: ignore[arg-type]  # not in bf16
    assert model(processor([{"role": "user", "content": "red"}]))["logits"].isfinite().all()
    assert (whole.folder / "adapter" / "adapter_config.json").is_file()
    with raises("adapter.merge-into-quantized"):
        tessera.convert(whole.folder, tmp_path / "merged")


@pytest.mark.parametrize("bits", ["nf4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_it_begins_near_the_whole_model_and_from_the_same_folder(data: Path, tmp_path: Path, bits: str) -> None:
    """Random weights from the seed, and the same from a folder, give the same bits."""
    base = train(recipe(data, tmp_path / "base", None, steps=1), {"optim.lr": 0.0, "checkpoint.export": True})
    from_seed = train(recipe(data, tmp_path / "seed", {"quantize": bits}, steps=2))
    settings = recipe(data, tmp_path / "folder", {"quantize": bits}, steps=2)
    settings["model"] = {
        "path": str(base.folder / "hf"),
        "tokenizer": settings["model"]["tokenizer"],
        "lora": {"quantize": bits},
    }
    from_folder = train(settings)
    assert losses(from_folder) == pytest.approx(losses(from_seed), rel=1e-6)
    assert losses(from_seed)[0] == pytest.approx(losses(base)[0], rel=0.02)
    assert losses(from_seed)[0] != losses(base)[0]


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"parallel.tp": 2}, "layout.quantized-with-tp"), ({"model.lora.merge": True}, "recipe.wrong-value")],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], error: str, data: Path, tmp_path: Path) -> None:
    with raises(error):
        train(recipe(data, tmp_path, {"quantize": "nf4"}), settings)
