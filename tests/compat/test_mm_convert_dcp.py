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


def test_experts_are_merged_and_split_again(tmp_path: Path) -> None:
    tensors = {**experts(LAYER), "language_model.lm_head.weight": numbers(8, 4), "vision.x": numbers(3)}
    folder = write(tmp_path / "hf", tensors, model_type="internvl_chat", llm_config={"num_experts": 3})
    run(["ExpertMergeDcpConverter", "hf_to_dcp", "--hf_dir", str(folder), "--save_dir", str(tmp_path / "job")])
    assert (tmp_path / "job/latest_checkpointed_iteration.txt").read_text() == "release"
    flat = {name: tensor.reshape(-1, tensor.shape[-1]) for name, tensor in merged(tensors, LAYER).items()}
    rest = {name: tensor for name, tensor in tensors.items() if LAYER not in name}
    same(job(tmp_path / "job/release"), {f"model.model.{name}": t for name, t in {**rest, **flat}.items()})
    back = ["--hf_dir", str(folder), "--dcp_dir", str(tmp_path / "job/release"), "--save_dir", str(tmp_path / "back")]
    run(["ExpertMergeDcpConverter", "dcp_to_hf", *back])
    same(weights(tmp_path / "back"), tensors)
    assert (tmp_path / "back/tokenizer.json").is_file()
    size = ["--max_shard_size", "100B"]
    run(["moe_expert", "--style", "merge", f"--hf_dir={folder}", f"--save_dir={tmp_path / 'merged'}", *size])
    same(weights(tmp_path / "merged"), {**rest, **flat})
    assert len(list((tmp_path / "merged").glob("*.safetensors"))) > 1
    run(["moe_expert", "--style=split", f"--hf_dir={tmp_path / 'merged'}", f"--save_dir={tmp_path / 'split'}"])
    same(weights(tmp_path / "split"), tensors)


def test_experts_of_an_omni_model_stay_stacked_and_leave_the_thinker(tmp_path: Path) -> None:
    path = "thinker.model.layers.0.mlp.experts"
    tensors = {**experts(path), "thinker.visual.x": numbers(3), "talker.x": numbers(2)}
    settings = {"thinker_config": {"text_config": {"num_experts": 3}}}
    folder = write(tmp_path / "hf", tensors, model_type="qwen3_omni_moe", **settings)
    words = ["--hf_dir", str(folder), "--save_dir", str(tmp_path / "job"), "--dcp_prefix", ""]
    run(["ExpertMergeDcpConverter", "hf_to_dcp", *words])
    expected = {name.removeprefix("thinker."): tensor for name, tensor in merged(tensors, path).items()}
    expected |= {"visual.x": tensors["thinker.visual.x"], "talker.x": tensors["talker.x"]}
    same(job(tmp_path / "job/release"), {f"model.{name}": tensor for name, tensor in expected.items()})
    words = ["--hf_dir", str(folder), "--dcp_dir", str(tmp_path / "job/release"), "--save_dir", str(tmp_path / "back")]
    run(["ExpertMergeDcpConverter", "dcp_to_hf", *words, "--dcp_prefix", ""])
    same(weights(tmp_path / "back"), tensors)


def test_folders_without_such_experts_are_refused(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", {"a": numbers(2)}, model_type="x", num_experts=3)
    for style, said in (("merge", "weights.nothing-to-merge"), ("split", "weights.nothing-to-split")):
        with raises(said):
            run(["moe_expert", "--style", style, "--hf_dir", str(plain), "--save_dir", str(tmp_path / "no")])
    holes = experts(LAYER)
    del holes[f"{LAYER}.1.up_proj.weight"]
    folder = write(tmp_path / "holes", holes, model_type="x")
    with raises("weights.experts-incomplete"):
        run(["ExpertMergeDcpConverter", "hf_to_dcp", "--hf_dir", str(folder), "--save_dir", str(tmp_path / "no")])
    with raises("output.replaces-source"):
        run(["moe_expert", "--style", "merge", "--hf_dir", str(plain), "--save_dir", str(tmp_path)])
    words = ["--hf_dir", str(plain), "--save_dir", str(tmp_path / "no"), "--max_shard_size", "4"]
    with raises("job.shard-size"):
        run(["moe_expert", "--style", "merge", *words])
    assert not (tmp_path / "no").exists()


def test_qwen3_5_has_its_experts_transposed_and_keeps_heads_for_several_tokens(tmp_path: Path) -> None:
    stacked, mtp = "model.language_model.layers.0.mlp.experts.gate_up_proj", "mtp.layers.0.mlp.experts"
    tensors = {stacked: numbers(3, 6, 4), "model.language_model.norm.weight": numbers(4), **experts(mtp)}
    folder = write(tmp_path / "hf", tensors, model_type="qwen3_5_moe", dtype="float16")
    run(["Qwen35Converter", "hf_to_dcp", f"--hf_dir={folder}", f"--dcp_dir={tmp_path / 'job'}", "--num_workers=4"])
    expected = merged(tensors, mtp) | {stacked: tensors[stacked].permute(0, 2, 1)}
    expected["model.language_model.norm.weight"] = tensors["model.language_model.norm.weight"]
    same(job(tmp_path / "job/release"), {f"model.{name}": tensor.contiguous() for name, tensor in expected.items()})
    words = ["--save_hf_dir", str(tmp_path / "back"), "--origin_hf_dir", str(folder)]
    run(["Qwen35Converter", "dcp_to_hf", "--dcp_dir", str(tmp_path / "job/release"), *words])
    same(weights(tmp_path / "back"), tensors)
    trained = {f"model.{stacked}": expected[stacked].float(), "model.model.language_model.norm.weight": torch.ones(4)}
    stock.save(trained, checkpoint_id=str(tmp_path / "iter_0000002"))  # of a job that trains in float32, without mtp
    words = ["--dcp_dir", str(tmp_path / "iter_0000002"), "--save_hf_dir", str(tmp_path / "kept"), *words[2:]]
    with raises("weights.model-mismatch", "mtp.layers.0"):
        run(["Qwen35Converter", "dcp_to_hf", *words])
    run(["Qwen35Converter", "dcp_to_hf", *words, "--keep_origin_mtp_weights", "true", "--to_bf16", "true"])
    same(weights(tmp_path / "kept"), tensors | {"model.language_model.norm.weight": torch.ones(4).bfloat16()})
    assert json.loads((tmp_path / "kept/config.json").read_text())["dtype"] == "bfloat16"


def test_names_of_mistral_3_go_to_those_of_its_class_and_back(tmp_path: Path) -> None:
    q = "language_model.model.layers.0.self_attn.q_proj.weight"
    tensors = {q: numbers(4, 4), "vision_tower.x": numbers(2), "language_model.lm_head.weight": numbers(8, 4)}
    folder = write(tmp_path / "hf", tensors, model_type="mistral3")
    run(["Mistral3Converter", "hf_to_dcp", f"--hf_dir={folder}", f"--dcp_dir={tmp_path / 'job'}"])
    expected = {
        "model.model.model.language_model.layers.0.self_attn.q_proj.weight": tensors[q],
        "model.model.model.vision_tower.x": tensors["vision_tower.x"],
        "model.model.lm_head.weight": tensors["language_model.lm_head.weight"],
    }
    same(job(tmp_path / "job/release"), expected)
    words = ["--save_dir", str(tmp_path / "back"), "--model_assets_dir", str(folder)]
    run(["Mistral3Converter", "dcp_to_hf", "--load_dir", str(tmp_path / "job/release"), *words])
    same(weights(tmp_path / "back"), tensors)
    lora = ["--dcp_dir", str(tmp_path / "lora"), "--is_lora_base", "true"]
    run(["Mistral3Converter", "hf_to_dcp", f"--hf_dir={folder}", *lora])
    same(
        job(tmp_path / "lora/release"),
        {n.replace("model.", "model.base_model.model.", 1): t for n, t in expected.items()},
    )
    other = write(tmp_path / "other", tensors, model_type="qwen2_vl")
    with raises("job.converter-family", "mistral3"):
        run(["Mistral3Converter", "hf_to_dcp", f"--hf_dir={other}", f"--dcp_dir={tmp_path / 'no'}"])


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


def test_adapters_of_a_job_are_merged(tmp_path: Path) -> None:
    q = "language_model.model.layers.0.self_attn.q_proj.weight"
    tensors = {q: numbers(4, 4), "vision_tower.x": numbers(2)}
    folder = write(tmp_path / "hf", tensors, model_type="mistral3")
    a, b = torch.randn(2, 4), torch.randn(4, 2)
    layer = "model.language_model.layers.0.self_attn.q_proj"
    peft = {f"base_model.model.{layer}.lora_{side}.weight": factor for side, factor in (("A", a), ("B", b))}
    adapters = tmp_path / "peft"
    adapters.mkdir()
    save_file(peft, adapters / "adapter_model.safetensors")
    run(["Mistral3Converter", "lora_hf_to_dcp", f"--hf_dir={adapters}", f"--dcp_dir={tmp_path / 'lora'}"])
    names = {f"model.base_model.model.model.{layer}.lora_{side}.default.weight" for side in "AB"}
    assert job(tmp_path / "lora/release").keys() == names
    words = ["--base_hf_dir", str(folder), "--lora_dcp_dir", str(tmp_path / "lora/release")]
    words += ["--save_merged_hf_dir", str(tmp_path / "merged"), "--scaling", "0.5", "--lora_target_modules"]
    method = ["Mistral3Converter", "merge_mm_lora_dcp_weight_to_base_hf"]
    for modules, said in (
        ("q_proj,k_proj", "adapter.target-missing k_proj"),
        ("o_proj", "adapter.target-missing o_proj"),
    ):
        with raises(said):
            run([*method, *words, modules])
    run([*method, *words, "q_proj"])
    expected = torch.addmm(tensors[q].float(), b, a, alpha=0.5).bfloat16()
    merged = weights(tmp_path / "merged")
    assert torch.equal(merged["vision_tower.x"], tensors["vision_tower.x"])
    torch.testing.assert_close(merged[q], expected)  # one rounding of the sum apart
    save_file({"a": a}, adapters / "adapter_model.safetensors")
    with raises("adapter.unknown-tensor"):
        run(["Mistral3Converter", "lora_hf_to_dcp", f"--hf_dir={adapters}", f"--dcp_dir={tmp_path / 'no'}"])


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
    for name, said in (("trainde", "weights.folder-missing"), ("trained", "checkpoint.not-dcp-folder")):
        words = ["--load_dir", str(tmp_path / name), "--save_dir", str(tmp_path / "no")]
        with raises(said) as caught:
            run(["GenericDCPConverter", "dcp_to_hf", *words, "--model_assets_dir", str(folder)])
        assert str(tmp_path / name) in str(caught.value)
        assert caught.value.nearest == (str(tmp_path / "trained") if name == "trainde" else None)
