"""mm-convert for models of video generation: diffusers folders and makers' files to shards and back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_megatron_forms import hub_weights
from torch import Tensor, nn

import tessera
from tessera.errors import TesseraError
from tessera_compat.mindspeed_mm.convert import run
from tests.errors import raises
from tests.toys.sampling_folders import moved

SIZES: dict[str, dict[str, Any]] = {
    "wan": {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 8,
        "out_channels": 4,
        "text_dim": 16,
        "freq_dim": 8,
        "ffn_dim": 32,
        "num_layers": 4,
        "image_dim": 12,
        "added_kv_proj_dim": 24,
        "pos_embed_seq_len": 10,
    },
    "hunyuan_video": {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "num_refiner_layers": 2,
        "text_embed_dim": 16,
        "pooled_projection_dim": 16,
        "rope_axes_dim": (4, 6, 6),
    },
    "cogvideox": {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 8,
        "out_channels": 4,
        "time_embed_dim": 8,
        "ofs_embed_dim": 8,
        "text_embed_dim": 16,
        "num_layers": 4,
        "sample_width": 4,
        "sample_height": 4,
        "sample_frames": 5,
        "use_rotary_positional_embeddings": True,
        "use_learned_positional_embeddings": True,
    },
}
CONVERTERS = {"wan": "WanConverter", "hunyuan_video": "HunyuanVideoConverter", "cogvideox": "CogVideoConverter"}


def build(family: str) -> nn.Module:
    import diffusers

    names = {"wan": "WanTransformer3DModel", "hunyuan_video": "HunyuanVideoTransformer3DModel"}
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, names.get(family, "CogVideoXTransformer3DModel"))(**SIZES[family])
    return moved(model)


@pytest.fixture(scope="module", params=SIZES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    target = tmp_path_factory.mktemp(request.param) / "transformer"
    build(request.param).save_pretrained(target)  # type: ignore[operator]
    return request.param, target


def model_of(folder: Path, rank: str = "mp_rank_00", key: str = "model") -> dict[str, Tensor]:
    stored = torch.load(folder / "release" / rank / "model_optim_rng.pt", weights_only=True)
    return stored[key]  # type: ignore[no-any-return]


def convert(family: str, method: str, source: Path, target: Path, *more: str) -> Path:
    words = ["--cfg.source_path", str(source), "--cfg.target_path", str(target), *more]
    written = run([CONVERTERS[family], method, *words])
    assert written == target
    return target


def stages(value: str) -> tuple[str, str]:
    return "--cfg.target_parallel_config.pp_layers", value


def ranks(value: int) -> tuple[str, str]:
    return "--cfg.target_parallel_config.tp_size", str(value)


@pytest.mark.parametrize(
    "folder",
    ["cogvideox", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wan", "hunyuan_video"))],
    indirect=True,
)
def test_there_and_back_over_other_layouts(folder: tuple[str, Path], tmp_path: Path) -> None:
    family, source = folder
    shards = convert(family, "hf_to_mm", source, tmp_path / "mm")
    layouts: dict[str, list[tuple[str, ...]]] = {
        "wan": [stages("[1,2,1]"), stages("[[1,1],[0,2]]"), ()],
        "hunyuan_video": [ranks(2), ()],
        "cogvideox": [(*ranks(2), *stages("[3,1]")), stages("[1,3]"), ()],
    }
    for number, layout in enumerate(layouts[family]):
        shards = convert(family, "resplit", shards, tmp_path / f"split{number}", *layout)
    assert (tmp_path / "split0/release").is_dir()
    names = {path.name for path in (tmp_path / "split0/release").iterdir()}
    wanted = {"wan": 3, "hunyuan_video": 2, "cogvideox": 4}[family]
    assert len(names) == wanted
    first, last = model_of(tmp_path / "mm"), model_of(shards)
    assert first.keys() == last.keys()
    assert all(torch.equal(first[name], last[name]) for name in first)
    back = convert(family, "mm_to_hf", tmp_path / "split0", tmp_path / "back", "--cfg.hf_dir", str(source))
    written, expected = hub_weights(back), hub_weights(source)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert (back / "config.json").is_file()


def test_names_and_orders_are_those_of_jobs(folder: tuple[str, Path], tmp_path: Path) -> None:
    """Written out from what the converters of MindSpeed-MM do with these tensors."""
    family, source = folder
    model, hub = model_of(convert(family, "hf_to_mm", source, tmp_path / "mm")), hub_weights(source)
    expected: dict[str, Tensor]
    if family == "wan":
        block = "blocks.1."
        expected = {
            "text_embedding.linear_1.bias": hub["condition_embedder.text_embedder.linear_1.bias"],
            "img_emb.emb_pos": hub["condition_embedder.image_embedder.pos_embed"],
            "img_emb.proj.4.weight": hub["condition_embedder.image_embedder.norm2.weight"],
            "head.modulation": hub["scale_shift_table"],
            "head.head.weight": hub["proj_out.weight"],
            f"{block}self_attn.proj_q.weight": hub[f"{block}attn1.to_q.weight"],
            f"{block}cross_attn.k_norm_img.weight": hub[f"{block}attn2.norm_added_k.weight"],
            f"{block}cross_attn.k_img.weight": hub[f"{block}attn2.add_k_proj.weight"],
            f"{block}norm3.weight": hub[f"{block}norm2.weight"],
            f"{block}ffn.2.bias": hub[f"{block}ffn.net.2.bias"],
            "patch_embedding.weight": hub["patch_embedding.weight"],
        }
        assert len(model) == len(hub)
    elif family == "hunyuan_video":
        single = "single_transformer_blocks.1."
        scale, shift = hub["norm_out.linear.weight"].chunk(2)
        expected = {
            "double_blocks.0.txt_attn_qkv.bias": joined(hub, "transformer_blocks.0.attn.add_{}_proj.bias"),
            "single_blocks.1.linear1_qkv.weight": joined(hub, single + "attn.to_{}.weight"),
            "single_blocks.1.linear1_mlp.weight": hub[f"{single}proj_mlp.weight"],
            "single_blocks.1.linear2.weight": hub[f"{single}proj_out.weight"],
            "adaLN_modulation.1.weight": torch.cat([shift, scale]),
            "vector_in.fc1.weight": hub["time_text_embed.text_embedder.linear_1.weight"],
            "txt_in.individual_token_refiner.blocks.1.self_attn_qkv.weight": joined(
                hub, "context_embedder.token_refiner.refiner_blocks.1.attn.to_{}.weight"
            ),
        }
    else:
        first, second = (hub[f"transformer_blocks.2.norm{n}.linear.weight"].chunk(6) for n in (1, 2))
        expected = {
            "videodit_blocks.2.scale_shift_table.1.weight": torch.cat(
                [*first[:3], *second[:3], *first[3:], *second[3:]]
            ),
            "videodit_blocks.2.self_atten.proj_qkv.weight": joined(hub, "transformer_blocks.2.attn1.to_{}.weight"),
            "pos_embed.pos_embedding": hub["patch_embed.pos_embedding"],
            "caption_projection.bias": hub["patch_embed.text_proj.bias"],
            "norm_out.weight": hub["norm_out.norm.weight"],
            "ofs_embed.2.bias": hub["ofs_embedding.linear_2.bias"],
        }
    for name, tensor in expected.items():
        assert torch.equal(model[name], tensor), name


def joined(hub: dict[str, Tensor], template: str) -> Tensor:
    return torch.cat([hub[template.format(kind)] for kind in "qkv"])


def hunyuan_source(mm: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the file of HunyuanVideo's makers that a job's names stand for."""
    renamed = {}
    for name, tensor in mm.items():
        new = name.replace("time_embed.", "mlp.").replace("vector_in.fc1", "vector_in.in_layer")
        new = new.replace("vector_in.fc2", "vector_in.out_layer")
        if name.startswith(("proj_out.", "adaLN_modulation.")):
            new = "final_layer." + name.replace("proj_out", "linear")
        if "linear1_mlp" in name:
            continue
        if "linear1_qkv" in name:
            tensor = torch.cat([tensor, mm[name.replace("qkv", "mlp")]])
            new = name.replace("_qkv", "")
        renamed[new] = tensor
    return renamed


def cog_source(mm: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the file of CogVideoX's makers that a job's names stand for."""
    layer = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "self_atten.proj_out": "attention.dense",
        "self_atten.proj_qkv": "attention.query_key_value",
        "ff.net.0.proj": "mlp.dense_h_to_4h",
        "ff.net.2": "mlp.dense_4h_to_h",
    }
    mixin = {"self_atten.q_norm": "query_layernorm_list", "self_atten.k_norm": "key_layernorm_list"}
    others = {
        "time_embed.time_embed": "time_embed",
        "caption_projection": "mixins.patch_embed.text_proj",
        "patch_embed.proj": "mixins.patch_embed.proj",
        "pos_embed": "mixins.pos_embed",
        "norm_final": "transformer.final_layernorm",
        "norm_out": "mixins.final_layer.norm_final",
        "proj_out_linear": "mixins.final_layer.linear",
        "adaLN_modulation": "mixins.final_layer.adaLN_modulation",
        "ofs_embed": "ofs_embed",
    }
    renamed, start = {}, "model.diffusion_model."
    for name, tensor in mm.items():
        if name.startswith("videodit_blocks."):
            _, number, rest = name.split(".", 2)
            inner, kind = rest.rsplit(".", 1)
            if inner in layer:
                new = f"transformer.layers.{number}.{layer[inner]}.{kind}"
            elif inner in mixin:
                new = f"mixins.adaln_layer.{mixin[inner]}.{number}.{kind}"
            else:
                new = f"mixins.adaln_layer.adaLN_modulations.{number}.1.{kind}"
        else:
            prefix = next(one for one in others if name.startswith(f"{one}."))
            new = others[prefix] + name[len(prefix) :]
        renamed[start + new] = tensor
    return renamed


SOURCES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "hunyuan_video": hunyuan_source,
    "cogvideox": cog_source,
}


@pytest.mark.slow
def test_files_of_the_makers_become_the_same_shards(folder: tuple[str, Path], tmp_path: Path) -> None:
    family, source = folder
    if family not in SOURCES:
        with raises("job.converter-unknown", "WanConverter"):
            convert(family, "source_to_mm", source, tmp_path / "x")
        return
    model = model_of(convert(family, "hf_to_mm", source, tmp_path / "mm"))
    file = tmp_path / "states.pt"
    extra = {"model.diffusion_model.dummy.weight": torch.zeros(2)} if family == "cogvideox" else {}
    torch.save({"module": {**SOURCES[family](model), **extra}}, file)
    for tp in (1, 2):
        written = convert(family, "source_to_mm", file, tmp_path / f"source{tp}", *ranks(tp))
        same = convert(family, "resplit", tmp_path / "mm", tmp_path / f"same{tp}", *ranks(tp))
        for rank in [f"mp_rank_{number:02d}" for number in range(tp)]:
            stored, expected = model_of(written, rank), model_of(same, rank)
            assert stored.keys() == expected.keys()
            assert all(torch.equal(stored[name], expected[name]) for name in expected)
    if family == "cogvideox":
        words = ["--cfg.source_path", str(file), "--cfg.target_path", str(tmp_path / "bare")]
        run(["CogVideoConverter", "--version", "i2v", "--remove_pos_emb", "true", "source_to_mm", *words])
        assert "pos_embed.pos_embedding" not in model_of(tmp_path / "bare")


@pytest.mark.slow
def test_adapters_are_merged_into_shards(tmp_path: Path) -> None:
    build("wan").save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    base = model_of(convert("wan", "hf_to_mm", tmp_path / "hf", tmp_path / "mm"))
    name = "blocks.2.ffn.0"
    a, b = torch.randn(2, 24), torch.randn(32, 2)
    adapters = tmp_path / "lora/release/mp_rank_00"
    adapters.mkdir(parents=True)
    (tmp_path / "lora/latest_checkpointed_iteration.txt").write_text("release")
    parts = {f"{name}.lora_A.default.weight": a, f"{name}.lora_B.default.weight": b}
    torch.save({"model": parts}, adapters / "model_optim_rng.pt")
    words = ["--cfg.lora_path", str(tmp_path / "lora"), "--lora_rank", "2", "--lora_alpha", "4"]
    merged = model_of(convert("wan", "merge_lora_to_base", tmp_path / "mm", tmp_path / "merged", *words))
    assert torch.equal(merged[f"{name}.weight"], base[f"{name}.weight"] + 2.0 * (b @ a))
    assert all(torch.equal(merged[one], base[one]) for one in base if one != f"{name}.weight")
    with raises("adapter.rank-mismatch"):
        convert("wan", "merge_lora_to_base", tmp_path / "mm", tmp_path / "x", *words[:2], "--lora_rank", "3")


PAIR = stages("[1,1]")


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("refused") / "transformer"
    build("wan").save_pretrained(target)  # type: ignore[operator]
    return target


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["WanConverter", "layerzero_to_mm"], "LayerZeRO writes pickled pieces"),
        (["HunyuanVideoConverter", "t2v_text_encoder"], "has its language model as text_encoder"),
        (["HunyuanVideoConverter", "--version", "t2", "source_to_mm"], "no version 't2'"),
        (["HunyuanVideoConverter", "--version", "t2v-lora", "hf_to_mm", "TWO"], "adapter.original-format"),
        (
            ["HunyuanVideoConverter", "hf_to_mm", "TWO", *PAIR],
            "layout.pipeline-refused",
        ),
        (
            ["WanConverter", "hf_to_mm", "TWO", *ranks(2)],
            "layout.tensor-ranks-refused",
        ),
        (["WanConverter", "hf_to_mm", "TWO", *PAIR], "sum to 2"),
        (["WanConverter", "--version", "t2v", "hf_to_mm", "TWO"], "no option"),
        (["WanConverter", "mm_to_hf", "TWO", "--cfg.hf_path", "x"], "hf_dir"),
        (["CogVideoConverter", "source_to_mm", "TWO"], "no such file"),
        (["VACEConverter", "hf_to_mm", "TWO"], "job.converter-refused"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], said: str, wan: Path, tmp_path: Path) -> None:
    two = ["--cfg.source_path", str(wan), "--cfg.target_path", str(tmp_path / "out")]
    typed = [one for word in words for one in (two if word == "TWO" else [word])]
    with pytest.raises(TesseraError) as caught:
        run(typed)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_shards_are_weights_of_a_recipe(folder: tuple[str, Path], tmp_path: Path) -> None:
    """A run may begin with them, beside the folder that says which model they are of."""
    family, source = folder
    shards = convert(family, "hf_to_mm", source, tmp_path / "mm")
    again = tessera.convert(shards, tmp_path / "dcp", to="dcp", like=source)
    assert (again / ".metadata").is_file() or (again / "release").is_dir()
