"""Folders are written in eight bits as vLLM and transformers read them, no further off than one rounding to fp8."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import randomize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear, replace_with_fp8_linear
from typer.testing import CliRunner

import tessera
from tessera.checkpoint import writer
from tessera.checkpoint.folder_tensors import FolderTensors
from tessera.cli.main import app
from tessera.config.run_config import ModelSection
from tessera.errors import TesseraError
from tessera.inference.export import export_folder
from tessera.models import resolve
from tessera.models.processing.tokenizer import train_tokenizer
from tests.errors import raises

FP8 = torch.float8_e4m3fn
WIDE = {"text": {"experts": {"moe_intermediate_size": 128}}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2": ("qwen2", "quickstart", {}),
    "qwen3 experts": ("qwen3", "quickstart-moe", WIDE),
    "qwen3_vl experts": ("qwen3_vl", "quickstart-moe", WIDE),
    "internvl": ("internvl", "quickstart", {"image_token_id": 3}),
}


def plain(case: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    family, preset, changes = CASES[case]
    spec, config = resolve(ModelSection(family=family, preset=preset, config=changes))
    module = spec.main.build(config)
    randomize(module, 0, 0.3)
    export_folder(module.to(dtype), spec, config, None, folder, prove="never")
    if case == "qwen2":  # the others are not loaded as models
        words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        train_tokenizer(["Say red blue."], 300, words).save(str(folder / "tokenizer.json"))
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def settings(folder: Path) -> dict[str, Any]:
    quantization: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return quantization


def means(stored: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return what an fp8 tensor means in float32, and how far a number may be from it: half of its last place."""
    weight = stored[name].float()
    if f"{name}_scale" in stored:
        scale = stored[f"{name}_scale"].expand(weight.shape)
    else:
        scale = stored[f"{name}_scale_inv"].repeat_interleave(128, -2).repeat_interleave(128, -1)
    last = torch.exp2(torch.floor(torch.log2(weight.abs().clamp(min=2**-6))) - 3)
    return weight * scale, scale * last / 2


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("qwen2", "fp8"),
        pytest.param("qwen2", "fp8-block", marks=pytest.mark.slow),
        pytest.param("qwen3 experts", "fp8", marks=pytest.mark.slow),
        ("qwen3_vl experts", "fp8-block"),
        pytest.param("internvl", "fp8-block", marks=pytest.mark.slow),
    ],
)
def test_projections_are_rounded_once_and_all_else_stays(case: str, kind: str, tmp_path: Path) -> None:
    before = tensors(plain(case, tmp_path / "hf"))
    written = tessera.convert(tmp_path / "hf", tmp_path / "fp8", quantize=kind)
    stored = tensors(written)
    eight = {name for name, tensor in stored.items() if tensor.dtype == FP8}
    scales = set(stored) - set(before)
    assert eight
    assert len(scales) == len(eight)
    with FolderTensors(written) as read:
        assert set(read.shapes) == set(before)
        for name, tensor in before.items():
            if name not in eight:
                assert stored[name].dtype == tensor.dtype, name
                assert torch.equal(read.read(name), tensor), name
                continue
            meant, apart = means(stored, name)
            # Quotient, product and difference are rounded to float32, each up to 32 times as large as the distance.
            assert bool(((tensor.float() - meant).abs() <= apart * (1 + 3 * 32 * 2**-24)).all()), name
            assert torch.equal(read.read(name), meant.bfloat16()), name
    said = settings(written)
    unquantized = set(said["ignore" if kind == "fp8" else "modules_to_not_convert"])
    matrices = {name.removesuffix(".weight") for name, tensor in before.items() if tensor.dim() > 1}
    assert {name.removesuffix(".weight") for name in eight} == {
        n for n in matrices - unquantized if "embeddings" not in n
    }
    assert not any(word in name for name in eight for word in ("embed", "lm_head", "vis", "mlp.gate.", "norm", "bias"))
    assert {"lm_head"} <= unquantized
    assert said["quant_method"] == ("compressed-tensors" if kind == "fp8" else "fp8")
    if "experts" in case:
        assert any(".experts." in name for name in eight)


def test_transformers_reads_blocks_as_we_do_and_converts_the_same_modules(tmp_path: Path) -> None:
    plain("qwen3 experts", tmp_path / "hf")
    written = tessera.convert(tmp_path / "hf", tmp_path / "fp8", quantize="fp8-block")
    model = AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16)
    weights = model.state_dict()
    with FolderTensors(written) as read:
        for name in read.shapes:
            if ".experts." not in name:
                assert torch.equal(weights[name], read.read(name)), name
        expert = "model.layers.0.mlp.experts."
        both = [read.read(f"{expert}1.{part}_proj.weight") for part in ("gate", "up")]
        assert torch.equal(weights[f"{expert}gate_up_proj"][1], torch.cat(both))
    said = FineGrainedFP8Config(**settings(written))
    with torch.device("meta"):
        bare = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_pretrained(written))
    replace_with_fp8_linear(bare, said.modules_to_not_convert, said, pre_quantized=True)
    theirs = {name for name, module in bare.named_modules() if isinstance(module, FP8Linear | FP8Experts)}
    ours = {name.removesuffix(".weight") for name, tensor in tensors(written).items() if tensor.dtype == FP8}
    assert theirs == {name.partition(".experts.")[0] + ".experts" * (".experts." in name) for name in ours}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_other_types_zeros_and_tiny_numbers_keep_what_they_mean(dtype: torch.dtype, tmp_path: Path) -> None:
    plain("qwen2", tmp_path / "hf", dtype)
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    changed = load_file(path)
    name = "model.layers.0.mlp.down_proj.weight"
    changed[name][:, :128] = 0
    changed[name][0] = 0
    changed[name][1] = torch.finfo(dtype).smallest_normal
    save_file(changed, path, metadata={"format": "pt"})
    for kind in ("fp8", "fp8-block"):
        written = tessera.convert(tmp_path / "hf", tmp_path / kind, quantize=kind)
        stored = tensors(written)
        assert all(bool((tensor > 0).all()) for key, tensor in stored.items() if "_scale" in key)
        with FolderTensors(written) as read:
            assert read.kinds[name] == {torch.float32: "F32", torch.float16: "F16"}[dtype]
            assert bool((read.read(name)[:, :128][0] == 0).all())
            if kind == "fp8":
                assert bool((read.read(name)[1, 128:] > 0).all())
        again = tensors(tessera.convert(written, tmp_path / f"back-{kind}", prove="never"))
        with FolderTensors(written) as read:  # the numbers that the eight bits stand for
            assert all(torch.equal(read.read(key), tensor) for key, tensor in again.items())
        meant, _ = means(stored, name)
        assert torch.equal(again[name], meant.to(dtype))


def test_a_model_that_is_loaded_first_is_written_in_the_type_asked_for(tmp_path: Path) -> None:
    plain("qwen2", tmp_path / "hf", torch.float32)
    written = tessera.convert(tmp_path / "hf", tmp_path / "out", quantize="fp8", dtype="bfloat16")
    assert json.loads((written / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors(written).values()} == {FP8, torch.bfloat16, torch.float32}


def test_a_tied_head_and_modules_without_whole_blocks_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain("qwen2", tmp_path / "hf")
    with caplog.at_level("WARNING", logger="tessera"):
        written = tessera.convert(tmp_path / "hf", tmp_path / "fp8", quantize="fp8-block")
    assert "not multiples of 128" in caplog.text
    assert "attn." in caplog.text
    said = settings(written)["modules_to_not_convert"]
    # Queries are made of whole blocks, keys and values are not: vLLM joins the three into one layer.
    assert {f"model.layers.0.self_attn.{kind}_proj" for kind in "qkvo"} <= set(said)
    assert "lm_head" in said
    assert "lm_head.weight" not in tensors(written)
    assert tessera.load(written, device="cpu") is not None


def test_what_cannot_be_written_in_eight_bits_is_refused_by_name(tmp_path: Path) -> None:
    plain("qwen3_vl experts", tmp_path / "vl")
    with raises("weights.stacked-experts-quantization"):
        tessera.convert(tmp_path / "vl", tmp_path / "out", quantize="fp8")
    plain("qwen2", tmp_path / "hf")
    for options, said in (
        ({"quantize": "fp9"}, "weights.unknown-quantization"),
        ({"quantize": "fp8", "to": "dcp"}, "output.quantized-form"),
        ({"quantize": "fp8", "adapters": True}, "output.option-without-effect"),
    ):
        with raises(said):
            tessera.convert(tmp_path / "hf", tmp_path / "out", **options)  # type: ignore[arg-type]
    (path,) = (tmp_path / "hf").glob("*.safetensors")
    changed = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    changed[name][3, 4] = float("nan")
    save_file(changed, path, metadata={"format": "pt"})
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "hf"), str(tmp_path / "out"), "--quantize", "fp8"])
    assert isinstance(result.exception, TesseraError)
    assert name in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_changed_byte_is_found_before_the_folder_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain("qwen2", tmp_path / "hf")

    plain_write, spoiled = writer._write_at, list[int]()

    def spoil(handle: int, data: Any, position: int) -> None:
        changed = bytearray(data)
        if position > 1 << 16 and not spoiled:  # behind the header: a tensor
            changed[-7] ^= 1
            spoiled.append(position)
        plain_write(handle, changed, position)  # type: ignore[arg-type]

    monkeypatch.setattr(writer, "_write_at", spoil)
    with raises("output.bytes-differ"):
        tessera.convert(tmp_path / "hf", tmp_path / "out", quantize="fp8")
    assert not (tmp_path / "out").exists()
