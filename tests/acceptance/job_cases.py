"""Folders in which the example jobs of MindSpeed-MM can be planned (real sizes) or run (tiny sizes)."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from tessera.config.run_config import ModelSection
from tessera.models import resolve

EXAMPLES = Path(__file__).parents[2] / "tessera_compat" / "mindspeed_mm" / "examples"
JOBS = Path(__file__).parent / "jobs"
# Script of a job at tiny size -> its purpose, variables and options that differ from those of `tensor_parallel.sh`.
SCRIPTS: dict[str, tuple[str, dict[str, str], tuple[str, ...]]] = {
    "hybrid_shard.sh": (
        "FSDP2 over two ranks with an ignored, frozen encoder.",
        {"MM_MODEL": '"./jobs/model_frozen.json"', "TP": "1"},
        (
            "--use-torch-fsdp2",
            "--fsdp2-config-path ./jobs/fsdp2_config.yaml",
            "--untie-embeddings-and-output-weights",
            "--ckpt-format torch_dcp",
        ),
    ),
    "packed.sh": (
        "Packed rows, a validation set, an average of the weights.",
        {"NPUS_PER_NODE": "1", "MM_DATA": '"./jobs/data_packed.json"', "TP": "1"},
        (
            "--eval-interval 1",
            "--eval-iters 1",
            "--optimizer-selection fused_ema_adamw",
            "--ema-decay 0.9",
            "--use-distributed-optimizer",
        ),
    ),
    "ring_context.sh": (
        "Ring attention over two ranks.",
        {"TP": "1", "CP": "2"},
        ("--context-parallel-algo megatron_cp_algo", "--use-cp-send-recv-overlap", "--use-distributed-optimizer"),
    ),
    "uneven_pipeline.sh": (
        "A pipeline of uneven stages with recomputed layers.",
        {"MM_MODEL": '"./jobs/model_uneven.json"', "TP": "1", "PP": "2"},
        (
            "--use-distributed-optimizer",
            "--recompute-granularity full",
            "--recompute-method block",
            "--recompute-num-layers 1",
        ),
    ),
    "virtual_pipeline.sh": (
        "Two virtual stages on each rank of a pipeline.",
        {"MM_MODEL": '"./jobs/model_vpp.json"', "TP": "1", "PP": "2"},
        ("--virtual-pipeline-model-parallel-size 2", "--use-distributed-optimizer"),
    ),
}
# Folder that an example loads -> family and preset of the published model.
PUBLISHED = {
    "Qwen2-VL-7B-Instruct": ("qwen2_vl", "7b"),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", "7b"),
    "Qwen3-VL-8B-Instruct": ("qwen3_vl", "8b"),
    "Qwen2.5-Omni-7B": ("qwen2_5_omni", "7b"),
    "Qwen3-Omni-30B-A3B-Instruct": ("qwen3_omni", "30b-a3b"),
    "InternVL3-8B-hf": ("internvl", "3-8b"),
    "GLM-4.1V-9B-Thinking": ("glm4v", "9b"),
    "llava-1.5-7b-hf": ("llava", "1.5-7b"),
    "Qwen3-8B": ("qwen3", "8b"),
    "Qwen2.5-7B-Instruct": ("qwen2", "7b"),
    "Llama-3.1-8B-Instruct": ("llama", "3.1-8b"),
    "Wan2.1-T2V-1.3B-Diffusers/transformer": ("wan", "2.1-t2v-1.3b"),
    "Wan2.2-T2V-A14B-Diffusers/transformer": ("wan", "2.2-t2v-a14b"),
    "Wan2.2-T2V-A14B-Diffusers/transformer_2": ("wan", "2.2-t2v-a14b"),
    "Wan2.2-TI2V-5B-Diffusers/transformer": ("wan", "2.2-ti2v-5b"),
    "HunyuanVideo-Diffusers/transformer": ("hunyuan_video", "13b"),
    "CogVideoX-5b/transformer": ("cogvideox", "5b"),
}


def _wan_vae(channels: int) -> dict[str, Any]:
    return {"z_dim": channels, "latents_mean": [0.0] * channels, "latents_std": [1.0] * channels}


# Folder of a pipeline -> its VAE with what differs from the class's defaults, and its text encoders.
PIPELINES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "Wan2.2-T2V-A14B-Diffusers": ("AutoencoderKLWan", _wan_vae(16), {"text_encoder": "UMT5EncoderModel"}),
    "Wan2.2-TI2V-5B-Diffusers": (
        "AutoencoderKLWan",
        {"scale_factor_spatial": 16, **_wan_vae(48)},
        {"text_encoder": "UMT5EncoderModel"},
    ),
    "CogVideoX-5b": (
        "AutoencoderKLCogVideoX",
        {"latent_channels": 16, "temporal_compression_ratio": 4, "scaling_factor": 0.7},
        {"text_encoder": "T5EncoderModel"},
    ),
}


def script_of(name: str) -> str:
    """Return the text of a script of `SCRIPTS`."""
    purpose, variables, options = SCRIPTS[name]
    text = (JOBS / "tensor_parallel.sh").read_text()
    text = re.sub(r"(?m)^# .*$", f"# {purpose}", text, count=1)
    for variable, value in {**variables, "SAVE_PATH": f'"save_{Path(name).stem}"'}.items():
        text = re.sub(rf"(?m)^{variable}=.*$", f"{variable}={value}", text)
    if "--use-torch-fsdp2" in options:
        text = text.replace("pretrain_vlm.py", "pretrain_transformers.py")
    return text.replace("--sequence-parallel", " \\\n    ".join(options))


def write_jobs(folder: Path) -> None:
    """Write the jobs at tiny size, with all files that they name."""
    shutil.copytree(JOBS, folder)
    for name in SCRIPTS:
        (folder / name).write_text(script_of(name))


def write_published_configs(root: Path) -> None:
    """Write the config.json of every published model below `ckpt/hf_path`: enough for a plan."""
    for name, (family, preset) in PUBLISHED.items():
        _, config = resolve(ModelSection(family=family, preset=preset))
        folder = root / "ckpt" / "hf_path" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config.to_hf()))
    for name, (vae, stride, encoders) in PIPELINES.items():
        folder = root / "ckpt" / "hf_path" / name
        index: dict[str, Any] = {"vae": ["diffusers", vae], "transformer": ["diffusers", "Any"]}
        index |= {part: ["transformers", encoder] for part, encoder in encoders.items()}
        (folder / "model_index.json").write_text(json.dumps(index))
        (folder / "vae").mkdir()
        (folder / "vae" / "config.json").write_text(json.dumps({"_class_name": vae, **stride}))
        for part in encoders:
            (folder / part).mkdir()
            sizes = {"d_model": 4096, "num_layers": 2}  # the width that the transformers read, and few layers
            (folder / part / "config.json").write_text(json.dumps(sizes))


def training_scripts() -> list[Path]:
    scripts = [path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.sh")]
    return sorted(path for path in scripts if not path.name.startswith(("inference", "evaluate", "feature_extraction")))


def is_job(path: Path) -> bool:
    """Return whether a file of the folder `jobs` is a job and no part of one."""
    return path.suffix == ".sh" or (path.suffix == ".yaml" and not path.stem.startswith("fsdp2"))


def write_mllm_data(root: Path, rows: int = 12) -> None:
    """Write conversations about images in the seed's folders, pairs of answers, and instructions."""
    pictures = root / "data" / "COCO2017" / "train2017"
    pictures.mkdir(parents=True, exist_ok=True)
    talks: list[dict[str, Any]] = []
    for number in range(rows):
        name = f"./data/COCO2017/train2017/{number:012d}.jpg"
        Image.new("RGB", (20 + number, 24), (10 * number, 90, 40)).save(root / name)
        question = {"role": "user", "content": "<image>\nSay red blue."}
        talks.append({"images": [name], "messages": [question, {"role": "assistant", "content": "red blue tall"}]})
    (root / "data" / "mllm_format_llava_instruct_data.json").write_text(json.dumps(talks))
    pairs = [
        {
            "images": talk["images"],
            "messages": talk["messages"][:1],
            "chosen": {"role": "assistant", "content": "red blue tall"},
            "rejected": {"role": "assistant", "content": "small old"},
        }
        for talk in talks
    ]
    (root / "data" / "rlhf-v.json").write_text(json.dumps(pairs))
    llava = [
        {
            "id": str(number),
            "image": f"{number:012d}.jpg",
            "conversations": [{"from": "human", "value": "<image>\nSay red."}, {"from": "gpt", "value": "red blue"}],
        }
        for number in range(rows)
    ]
    (root / "data" / "llava_instruct_150k.json").write_text(json.dumps(llava))
    alpaca = [{"instruction": f"Say {number}.", "input": "", "output": "red blue tall"} for number in range(rows)]
    (root / "data" / "alpaca_data.json").write_text(json.dumps(alpaca))


def tiny_model_json(example: dict[str, Any], folder: Path, stages: int = 1) -> dict[str, Any]:
    """Return the model.json of an example with the sizes of the model in a folder, split evenly over the stages."""
    _, config = resolve(ModelSection(path=folder))
    text, vision = config.text, config.vision
    sizes = {
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "ffn_hidden_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_query_groups": text.num_key_value_heads,
        "vocab_size": text.vocab_size,
        "max_position_embeddings": text.max_position_embeddings,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "pipeline_num_layers": split_layers(text.num_hidden_layers, stages),
        "rope_theta": text.rope_theta,
        "rotary_base": text.rope_theta,
        "mrope_section": list(text.mrope_section or ()),
        "rms_norm_eps": text.rms_norm_eps,
        "layernorm_epsilon": text.rms_norm_eps,
    }
    seen = {
        "num_layers": vision.model_dump().get("depth") or vision.model_dump().get("num_hidden_layers"),
        "hidden_size": vision.model_dump().get("embed_dim") or vision.model_dump().get("hidden_size"),
        "num_attention_heads": vision.model_dump().get("num_heads") or vision.model_dump().get("num_attention_heads"),
        "patch_size": vision.patch_size,
        "image_size": vision.model_dump().get("image_size"),
        "ffn_hidden_size": vision.model_dump().get("intermediate_size") or 4 * vision.model_dump().get("embed_dim", 0),
    }
    seen["pipeline_num_layers"] = [seen["num_layers"], *[0] * (stages - 1)]
    shrunk = json.loads(json.dumps(example))
    for section, values in ((shrunk["text_decoder"], sizes), (shrunk["image_encoder"]["vision_encoder"], seen)):
        section.update({key: value for key, value in values.items() if key in section})
    for key, name in (
        ("img_context_token_id", "image_token_id"),
        ("video_token_id", "video_token_id"),
        ("vision_start_token_id", "vision_start_token_id"),
    ):
        if key in shrunk:
            shrunk[key] = config.model_dump().get(name)
    if "init_from_hf_path" in shrunk:
        shrunk["init_from_hf_path"] = str(folder)
    return shrunk


def split_layers(layers: int, stages: int) -> list[int]:
    """Return layers of each stage; the first stage gets the fewest, as it also has the vision encoder."""
    rest = [layers // stages] * stages
    rest[-1] += layers - sum(rest)
    if stages > 1 and rest[0] > 1:
        rest[0] -= 1
        rest[-1] += 1
    return rest


def tiny_data_json(example: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the data.json of an example with the processor of a folder and small images."""
    shrunk = json.loads(json.dumps(example))
    param = shrunk["dataset_param"]
    if "tokenizer_config" in param:
        param["tokenizer_config"]["from_pretrained"] = str(folder)
    else:
        param["preprocess_parameters"].update({"model_name_or_path": str(folder), "image_max_pixels": 4096})
    return shrunk


def tiny_yaml(example: str, folder: Path, save: Path) -> str:
    """Return a YAML job with the model of a folder, short sequences, float32 and two steps."""
    text = re.sub(r"\./ckpt/hf_path/\S+", str(folder), example)
    for key, value in (
        *(("train_iters", 2), ("save_interval", 2), ("seq_length", 128), ("cutoff_len", 384), ("num_workers", 0)),
        *(("image_max_pixels", 4096), ("param_dtype", "fp32"), ("bf16", "false"), ("save", save)),
    ):
        text = re.sub(rf"^(\s+){key}: \S+$", rf"\g<1>{key}: {value}", text, flags=re.MULTILINE)
    return text
