"""What jobs with FSDP2 load: experts of folders merged, names of several models, and adapters, by `mm-convert`.

Expected tensors are made here in plain torch, from the words of the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file, save_file

from tessera.checkpoint.legacy.dcp import read_dcp
from tessera_compat.mindspeed_mm.convert import run
from tests.errors import raises

LAYER = "language_model.model.layers.0.mlp.experts"
Tensors = dict[str, torch.Tensor]


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def write(folder: Path, tensors: Tensors, **config: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def experts(path: str, count: int = 3) -> Tensors:
    """Matrices of 4 inputs and 6 outputs, each with numbers of its own."""
    tensors = {}
    for n in range(count):
        tensors[f"{path}.{n}.gate_proj.weight"] = numbers(6, 4) + n
        tensors[f"{path}.{n}.up_proj.weight"] = numbers(6, 4) - n
        tensors[f"{path}.{n}.down_proj.weight"] = numbers(4, 6) + n
    return tensors


def merged(tensors: Tensors, path: str, count: int = 3) -> Tensors:
    both = [torch.cat([tensors[f"{path}.{n}.{kind}_proj.weight"] for kind in ("gate", "up")]).T for n in range(count)]
    down = [tensors[f"{path}.{n}.down_proj.weight"].T for n in range(count)]
    return {f"{path}.gate_up_proj": torch.stack(both), f"{path}.down_proj": torch.stack(down)}


def job(folder: Path) -> Tensors:
    """The tensors of a DCP folder, read by torch itself."""
    tensors = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in read_dcp(folder).items()}
    stock.load(tensors, checkpoint_id=str(folder))
    return tensors


def same(written: Tensors, expected: Tensors) -> None:
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name].dtype == tensor.dtype
        assert torch.equal(written[name], tensor), name


def weights(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def test_prefixes_are_replaced_and_names_without_them_stay(tmp_path: Path) -> None:
    tensors = {"model.a": numbers(2), "head": numbers(3), "model.x.gate_up_proj": numbers(2, 3, 4)}
    folder = write(tmp_path / "hf", tensors, model_type="anything")
    naming = ["--hf_prefix", "model.", "--dcp_prefix", "inner.", "--fused_linear_names", "gate_up_proj,down_proj"]
    tie = ["--tie_weight_mapping", '{"copy": "model.a"}']
    run(["GenericDCPConverter", "hf_to_dcp", f"--hf_dir={folder}", f"--dcp_dir={tmp_path / 'job'}", *naming, *tie])
    same(
        job(tmp_path / "job/release"),
        {
            "model.inner.a": tensors["model.a"],
            "model.head": tensors["head"],
            "model.inner.x.gate_up_proj": tensors["model.x.gate_up_proj"].reshape(6, 4),
            "model.copy": tensors["model.a"],
        },
    )
    words = ["--load_dir", str(tmp_path / "job/release"), "--save_dir", str(tmp_path / "back")]
    with raises("weights.model-mismatch"):
        run(["GenericDCPConverter", "dcp_to_hf", *words, "--model_assets_dir", str(folder), *naming])


# ---------------------------------------------------------------------------------------------- adapters


def test_adapters_become_shards_and_come_back(tmp_path: Path) -> None:
    """The command of the guide for Qwen2.5-VL, on two tensor ranks and two stages; the vision encoder has none."""
    kinds = {"self_attn.q_proj": (8, 4), "self_attn.o_proj": (4, 8), "mlp.down_proj": (4, 6)}
    peft: Tensors = {}
    for layer in range(3):
        for kind, (outputs, inputs) in kinds.items():
            name = f"base_model.model.model.language_model.layers.{layer}.{kind}.lora_"
            peft |= {f"{name}A.weight": torch.randn(2, inputs), f"{name}B.weight": torch.randn(outputs, 2)}
    folder = tmp_path / "lora"
    folder.mkdir()
    save_file(peft, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")
    common = """--cfg.common_model_config.enable_canonical_hf_struct true --cfg.common_model_config.model_prefix
      base_model.model. --cfg.common_model_config.new_transformers_weight_key true --cfg.parallel_config.tp_size 2"""
    lists = ["--cfg.parallel_config.llm_pp_layers", "[[1,2]]", "--cfg.parallel_config.vit_pp_layers", "[[32,0]]"]
    words = ["--cfg.mm_dir", str(tmp_path / "mm"), "--cfg.hf_config.hf_dir", str(folder), *common.split()]
    run(["Qwen2_5_VLConverter", "lora_hf_to_mm", *words, *lists])
    rank = torch.load(tmp_path / "mm/release/mp_rank_01_001/model_optim_rng.pt", weights_only=True)["model"]
    begin = "text_decoder.decoder.layers.0."  # the second layer of the model is the first one here
    whole = {kind: "base_model.model.model.language_model.layers.1." + kind for kind in kinds}
    q = peft[whole["self_attn.q_proj"] + ".lora_B.weight"]
    assert torch.equal(rank[begin + "self_attention.q_proj.lora_B.default.weight"], q[4:])
    o = peft[whole["self_attn.o_proj"] + ".lora_A.weight"]
    assert torch.equal(rank[begin + "self_attention.linear_proj.lora_A.default.weight"], o[:, 4:])
    down = peft[whole["mlp.down_proj"] + ".lora_B.weight"]
    assert torch.equal(rank[begin + "mlp.linear_fc2.lora_B.default.weight"], down)
    flat = [word.replace("[[", "[").replace("]]", "]") for word in lists]
    run(["Qwen2_5_VLConverter", "lora_mm_to_hf", "--cfg.save_hf_dir", str(tmp_path / "back"), *words, *flat])
    same(weights(tmp_path / "back"), peft)
    assert (tmp_path / "back/adapter_config.json").read_text() == "{}"
    (folder / "adapter_config.json").unlink()
    with raises("adapter.config-missing", "adapter_config.json"):
        run(["Qwen2_5_VLConverter", "lora_mm_to_hf", "--cfg.save_hf_dir", str(tmp_path / "no"), *words, *flat])
    words = [word for word in words if word != "base_model.model." and "model_prefix" not in word]
    with raises("adapter.unknown-layer") as raised:
        run(["Qwen2_5_VLConverter", "lora_hf_to_mm", *words, *lists])
    assert "base_model.model." in str(raised.value)
    with raises("adapter.separate-layers"):
        run(["Qwen2_5_VLConverter", "lora_hf_to_mm", *words[:4], *lists])


def test_a_folder_that_is_no_dcp_folder_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", {"a": numbers(2)}, model_type="x")
    (tmp_path / "trained").mkdir()
    for name, said in (("trainde", "checkpoint.folder-missing"), ("trained", "checkpoint.not-dcp-folder")):
        words = ["--load_dir", str(tmp_path / name), "--save_dir", str(tmp_path / "no")]
        with raises(said) as caught:
            run(["GenericDCPConverter", "dcp_to_hf", *words, "--model_assets_dir", str(folder)])
        assert caught.value.where == str(tmp_path / name)
        assert caught.value.nearest == ("trained" if name == "trainde" else None)
