"""Weights of every family with lines of `mm-convert`: converted, loaded by a job, trained, and converted back.

A job that begins from converted weights trains exactly as one from the Hugging Face folder, and what it saves goes back
by the line that the guides print, from the folder of `--save` or from an iteration in it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from generation_cases import (
    COG,
    WAN,
    example,
    put,
    tiny_parts,
    tiny_predictor,
    tiny_videos,
    write_cogvideox,
    write_hunyuan,
    write_videos,
    write_wan,
)
from internvl_original import original_folder
from job_cases import EXAMPLES, tiny_data_json, tiny_model_json, write_mllm_data
from small_folders import small_folder
from test_jobs import environment
from test_megatron_forms import hub_weights

import tessera
from tessera.config.reader import read_mapping
from tessera.runtime.distributed import free_port
from tessera.runtime.files import read_metrics
from tessera_compat.mindspeed_mm.convert import run as mm_convert
from tessera_compat.mindspeed_mm.entry_points import pretrain, pretrain_fsdp2
from tessera_compat.mindspeed_mm.migrate import lay_out
from tessera_compat.state import destroy
from tests.dist.layouts import LIMIT
from tests.toys.hf_folders import IMAGE_TOKEN, TEXT

FLAGS = "--lr 1e-3 --train-iters 2 --micro-batch-size 1 --global-batch-size 2 --num-workers 0 --log-interval 1"
Words = Callable[[Path, Path, Path], list[str]]  # source, target, the Hugging Face folder


@dataclass(frozen=True)
class Case:
    """One line there and one back. `train` trains from a folder (`load`), described by another, into a third."""

    name: str
    folder: Callable[[Path], Path]
    there: Words
    back: Words
    train: Callable[[Path, Path, Path], None]
    slow: bool = True


# ---------------------------------------------------------------------------------------------- lines of mm-convert


def dcp(converter: str, *, assets: str = "model_assets_dir", to: str = "dcp_dir", **named: str) -> tuple[Words, Words]:
    source, target = named.get("source", "load_dir"), named.get("target", "save_dir")

    def there(folder: Path, written: Path, like: Path) -> list[str]:
        return [converter, "hf_to_dcp", "--hf_dir", str(folder), f"--{to}", str(written)]

    def back(folder: Path, written: Path, like: Path) -> list[str]:
        read = folder / "release" if (folder / "release").is_dir() else folder
        return [converter, "dcp_to_hf", f"--{source}", str(read), f"--{target}", str(written), f"--{assets}", str(like)]

    return there, back


def shards(converter: str) -> tuple[Words, Words]:
    def lists(like: Path, template: str) -> list[str]:
        text, vision = layers_of(like)
        layers = {"llm": text, "vit": vision}
        return [
            word
            for part, count in layers.items()
            for word in (f"--cfg.parallel_config.{part}_pp_layers", template.format(count))
        ]

    def there(folder: Path, written: Path, like: Path) -> list[str]:
        words = ["--cfg.mm_dir", str(written), "--cfg.hf_config.hf_dir", str(folder)]
        return [converter, "hf_to_mm", *words, *lists(like, "[[{}]]")]

    def back(folder: Path, written: Path, like: Path) -> list[str]:
        words = ["--cfg.mm_dir", str(folder), "--cfg.save_hf_dir", str(written), "--cfg.hf_config.hf_dir", str(like)]
        return [converter, "mm_to_hf", *words, *lists(like, "[{}]")]

    return there, back


def layers_of(folder: Path) -> tuple[int, int]:
    config = read_mapping(folder / "config.json")
    text = config.get("text_config") or config.get("llm_config") or config
    vision = config["vision_config"]
    return text["num_hidden_layers"], vision.get("depth") or vision["num_hidden_layers"]


def video_shards(converter: str) -> tuple[Words, Words]:
    def words(method: str, folder: Path, written: Path) -> list[str]:
        return [converter, method, "--cfg.source_path", str(folder), "--cfg.target_path", str(written)]

    def back(folder: Path, written: Path, like: Path) -> list[str]:
        return [*words("mm_to_hf", folder, written), "--cfg.hf_dir", str(like)]

    return lambda folder, written, like: words("hf_to_mm", folder, written), back


# ---------------------------------------------------------------------------------------------- jobs


def by_yaml(load: Path, described: Path, save: Path, **training: Any) -> None:
    """Train as the FSDP2 trainer does, by a file of six sections."""
    pretrain_fsdp2([str(yaml_job(load, described, save, {}, training))])


def yaml_job(load: Path, described: Path, save: Path, parallel: dict[str, Any], training: dict[str, Any]) -> Path:
    sees = "vision_config" in read_mapping(described / "config.json")
    attr = {"messages": "messages", "role_tag": "role", "content_tag": "content"}
    attr |= {"user_tag": "user", "assistant_tag": "assistant", **({"images": "images"} if sees else {})}
    data = "mllm_format_llava_instruct_data" if sees else "talks"
    job = {
        "parallel": {"fully_shard_parallel_size": "auto", "fsdp_plan": {"param_dtype": "fp32"}, **parallel},
        "data": {
            "dataset_param": {
                "dataset_type": "huggingface",
                "attr": attr,
                "preprocess_parameters": {
                    "model_name_or_path": str(described),
                    **({"image_max_pixels": 4096} if sees else {}),
                },
                "basic_parameters": {"dataset": f"./data/{data}.json", "cutoff_len": 384},
            },
            "dataloader_param": {
                "dataloader_mode": "sampler",
                "sampler_type": "BaseRandomBatchSampler",
                "num_workers": 0,
                "collate_param": {"model_name": "qwen3vl"},
            },
        },
        "model": {"model_id": "any", "model_name_or_path": str(described)},
        "training": {
            **{"micro_batch_size": 1, "gradient_accumulation_steps": 2, "lr": 1e-3, "lr_decay_style": "constant"},
            **{"train_iters": 2, "save_interval": 2, "save": str(save), "load": str(load), "load_format": "auto"},
            **training,
        },
    }
    file = save.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(job))
    return file


def by_flags(folder: str, size: str) -> Callable[[Path, Path, Path], None]:
    """Return a function that trains by flags and JSON files of an example."""

    def train(load: Path, described: Path, save: Path) -> None:
        source = EXAMPLES / folder
        model = tiny_model_json(json.loads((source / f"model_{size}.json").read_text()), described)
        data = tiny_data_json(json.loads((source / f"data_{size}.json").read_text()), described)
        files = [put(save.with_suffix(f".{kind}.json"), one) for kind, one in (("model", model), ("data", data))]
        words = ["--mm-model", files[0], "--mm-data", files[1], "--load", str(load), "--save", str(save)]
        pretrain([*FLAGS.split(), *words, "--save-interval", "2", "--seq-length", "384"])

    return train


def by_video_flags(model: dict[str, Any], data: dict[str, Any]) -> Callable[[Path, Path, Path], None]:
    def train(load: Path, described: Path, save: Path) -> None:
        parts = described.parent
        contents = (("model", tiny_parts(model, parts)), ("data", tiny_videos(data, parts)))
        files = [put(save.with_suffix(f".{kind}.json"), content) for kind, content in contents]
        words = ["--mm-model", files[0], "--mm-data", files[1], "--load", str(load), "--save", str(save)]
        pretrain([*FLAGS.split(), *words, "--save-interval", "2"])

    return train


def by_recipe(load: Path, described: Path, save: Path) -> None:
    """Train a class of transformers, which no job of MindSpeed-MM is translated for, by a recipe."""
    model: dict[str, Any] = {"family": "transformers", "path": str(described)}
    if load != described:
        model["weights"] = str(load)
    tessera.train(
        {
            **{"name": save.name, "out": str(save.parent), "model": model, "guard": {"coverage": "warn"}},
            "data": {"kind": "tests.toys.keyword_rows", "options": {"make": "words"}, "workers": 0},
            "train": {"steps": 2, "global_batch": 2, "task": "returns_loss"},
            "optim": {"lr": 1e-3},
        }
    )
    (save / "iter_0000002").symlink_to(next((save / "checkpoints").glob("step-*2")).absolute())  # as jobs have it


# ---------------------------------------------------------------------------------------------- models


def small(name: str) -> Callable[[Path], Path]:
    return lambda root: small_folder(name, root)


def library(kind: str, **fields: Any) -> Callable[[Path], Path]:
    """Return a function that writes a folder of a class of transformers."""

    def folder(root: Path) -> Path:
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**fields)
        getattr(transformers, f"{kind}ForConditionalGeneration")(config).save_pretrained(root / "hf")
        return root / "hf"

    return folder


def transformer(write: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def folder(root: Path) -> Path:
        write(root / "pipeline")
        return root / "pipeline" / "transformer"

    return folder


EYE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
HUNYUAN = {"in_channels": 4, "out_channels": 4, "num_heads": 2, "head_dim": 16, "text_states_dim": [16, 16]}
HUNYUAN |= {"mm_double_blocks_depth": 1, "mm_single_blocks_depth": 1, "rope_dim_list": [4, 6, 6]}


def hunyuan_job() -> Callable[[Path, Path, Path], None]:
    model = tiny_predictor(example("hunyuanvideo/t2v/model_hunyuanvideo.json"), **HUNYUAN)
    model |= {"load_video_features": False, "load_text_features": False}
    model["predictor"] |= {"double_stream_full_recompute_layers": 1, "single_stream_full_recompute_layers": 1}
    data = example("hunyuanvideo/t2v/feature_data.json")
    data["dataset_param"] |= {"dataset_type": "t2v", "basic_parameters": {"data_path": "examples/wan2.2/data.txt"}}
    return by_video_flags(model, data)


def cog_job() -> Callable[[Path, Path, Path], None]:
    sizes = {**COG, "in_channels": 4, "out_channels": 4, "input_size": [2, 4, 6], "use_rope": False}
    model = tiny_predictor(example("cogvideox/t2v_1.0/model_cogvideox_t2v.json"), **sizes)
    return by_video_flags(model, example("cogvideox/data.json"))


def wan_job() -> Callable[[Path, Path, Path], None]:
    model = tiny_predictor(example("wan2.2/A14B/t2v/pretrain_model_high.json"), **WAN, in_dim=4, out_dim=4)
    return by_video_flags(model, example("wan2.2/A14B/t2v/data.json"))


GENERIC = dcp("GenericDCPConverter")
CASES = [
    Case("Qwen3VLConverter, experts", small("qwen3_vl experts"), *dcp("Qwen3VLConverter"), by_yaml),
    Case("Qwen3VLConverter", small("qwen3_vl"), *dcp("Qwen3VLConverter"), by_yaml),
    *(
        Case(f"GenericDCPConverter, {name}", small(name), *GENERIC, by_yaml)
        for name in ("qwen2_vl", "qwen2_5_vl", "internvl", "glm4v", "llava one vision", "llava 1.5")
    ),
    *(
        Case(f"GenericDCPConverter, {name}", small(name), *GENERIC, by_yaml, slow=name != "llama")
        for name in ("qwen2", "qwen3", "llama")
    ),
    Case(
        "GenericDCPConverter, InternVL of its makers",
        lambda root: original_folder("qwen2", root / "hf"),
        *GENERIC,
        by_yaml,
    ),
    Case(
        "ExpertMergeDcpConverter, qwen3 experts",
        small("qwen3 experts"),
        *dcp("ExpertMergeDcpConverter", assets="hf_dir", to="save_dir", source="dcp_dir"),
        by_yaml,
    ),
    Case(
        "Mistral3Converter",
        library(
            "Mistral3",
            text_config={**TEXT, "model_type": "mistral", "head_dim": 8},
            vision_config={**EYE, "model_type": "pixtral", "image_size": 28, "patch_size": 14},
            image_token_index=IMAGE_TOKEN,
        ),
        *dcp("Mistral3Converter"),
        by_recipe,
    ),
    Case(
        "Qwen35Converter",
        library(
            "Qwen3_5",
            text_config={**TEXT, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
            | {
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
            },
            vision_config={**EYE, "depth": 1, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4},
            image_token_id=IMAGE_TOKEN,
        ),
        *dcp("Qwen35Converter", assets="origin_hf_dir", source="dcp_dir", target="save_hf_dir"),
        by_recipe,
    ),
    Case("Qwen2VLConverter", small("qwen2_vl"), *shards("Qwen2VLConverter"), by_flags("qwen2vl", "7b")),
    Case("Qwen2_5_VLConverter", small("qwen2_5_vl"), *shards("Qwen2_5_VLConverter"), by_flags("qwen2.5vl", "7b")),
    Case("Qwen3VLMegatronConverter", small("qwen3_vl"), *shards("Qwen3VLMegatronConverter"), by_flags("qwen3vl", "8b")),
    Case("InternVLConverter", small("internvl"), *shards("InternVLConverter"), by_flags("internvl3", "8b")),
    Case("WanConverter", transformer(write_wan), *video_shards("WanConverter"), wan_job()),
    Case("HunyuanVideoConverter", transformer(write_hunyuan), *video_shards("HunyuanVideoConverter"), hunyuan_job()),
    Case("CogVideoConverter", transformer(write_cogvideox), *video_shards("CogVideoConverter"), cog_job()),
]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    lay_out(root)
    write_mllm_data(root)
    write_videos(root)
    messages = [{"role": "user", "content": "Say red."}, {"role": "assistant", "content": "red blue tall"}]
    (root / "data" / "talks.json").write_text(json.dumps([{"messages": messages}] * 8))
    return root


@pytest.fixture
def here(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(workspace)
    return tmp_path


def same(written: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert written.keys() == expected.keys()
    assert [name for name in written if not written[name].equal(expected[name])] == []


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=[pytest.mark.slow] * case.slow) for case in CASES]
)
def test_weights_are_converted_loaded_trained_and_converted_back(case: Case, here: Path) -> None:
    folder = case.folder(here / "model")
    before = hub_weights(folder)
    converted = mm_convert(case.there(folder, here / "converted", folder))
    assert converted is not None
    mm_convert(case.back(converted, here / "unchanged", folder))
    same(hub_weights(here / "unchanged"), before)
    trained = []
    for name, load in (("folder", folder), ("converted", converted)):
        try:
            case.train(load, folder, here / f"from-{name}")
        finally:
            destroy()
        saved = here / f"from-{name}" / ("iter_0000002" if name == "converted" else "")
        mm_convert(case.back(saved, here / f"back-{name}", folder))
        trained.append(hub_weights(here / f"back-{name}"))
    same(*trained)
    assert trained[0].keys() == before.keys()
    assert any(not trained[0][name].equal(before[name]) for name in before)


@pytest.mark.slow
def test_adapters_that_a_job_saved_become_a_folder_of_peft(here: Path) -> None:
    folder = small_folder("qwen2_5_vl", here / "model")
    lora = {"enable": True, "rank": 2, "alpha": 4, "target_modules": "q_proj,v_proj"}
    try:
        by_yaml(folder, folder, here / "run", lora=lora)
    finally:
        destroy()
    text, vision = layers_of(folder)
    lists = {"llm_pp_layers": [text], "vit_pp_layers": [vision]}
    words = [word for key, value in lists.items() for word in (f"--cfg.parallel_config.{key}", json.dumps(value))]
    words += ["--cfg.common_model_config.enable_canonical_hf_struct", "true"]
    for number, saved in enumerate((here / "run", here / "run" / "iter_0000002")):
        target = here / f"peft{number}"
        places = ["--cfg.mm_dir", str(saved), "--cfg.save_hf_dir", str(target)]
        mm_convert(["Qwen2_5_VLConverter", "lora_mm_to_hf", *places, *words])
        expected = hub_weights(tessera.convert(here / "run", here / f"expected{number}", adapters=True))
        same(hub_weights(target), expected)
        assert len(expected) == 2 * 2 * text
        assert json.loads((target / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.slow
def test_the_modules_of_a_published_file_train_on_two_ranks_as_on_one(here: Path) -> None:
    """From DCP, with groups around both towers and recomputation where 26.0.0 has it."""
    folder = small_folder("qwen3_vl experts", here / "model")
    dcp_folder = mm_convert(dcp("Qwen3VLConverter")[0](folder, here / "dcp", folder))
    assert dcp_folder is not None
    towers = {"visual": ["blocks.{*}", "merger", "deepstack_merger_list.{*}"], "language_model": ["layers.{*}"]}
    named = [f"model.{tower}.{part}" for tower, parts in towers.items() for part in parts]
    wrapped = [*named, "model.visual", "model.language_model.embed_tokens", "model.language_model", "lm_head"]
    plan = {"fsdp_plan": {"param_dtype": "fp32", "apply_modules": wrapped}}
    plan |= {"recompute": True, "recompute_plan": ["model.language_model.layers.{*}"]}
    losses = []
    for ranks, load in ((1, folder), (2, dcp_folder)):
        save = here / f"ranks-{ranks}"
        file = yaml_job(load, folder, save, plan, {"gradient_accumulation_steps": 4 // ranks})
        words = ["torchrun", "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
        words += ["mindspeed_mm/fsdp/train/trainer.py", str(file)]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        losses.append([row["loss"] for row in read_metrics(save / "metrics.jsonl") if row["kind"] == "train"])
    assert losses[1] == pytest.approx(losses[0], rel=LIMIT)
