"""Folders in which the generation jobs of MindSpeed-MM can be run at tiny sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from job_cases import EXAMPLES

from tests.toys.generation_set import write_video
from tests.toys.sampling_folders import moved, tokenizer, write_cogvideox, write_wan

WAN = {"hidden_size": 24, "num_heads": 2, "ffn_dim": 32, "num_layers": 2, "freq_dim": 32, "text_dim": 16}
COG = {"num_heads": 2, "head_dim": 16, "num_layers": 2, "text_hidden_size": 16, "time_embed_dim": 8}
SIZE = {"num_frames": 5, "max_height": 32, "max_width": 48, "max_hxw": 32 * 48, "train_fps": 8}


def write_videos(root: Path, count: int = 3) -> None:
    """Write videos with captions as `data.json` and as `data.jsonl` below `data/videos`."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        write_video(root / f"data/videos/{number}.mp4", 5 + 4 * (number == 0), size=(48, 32))
        size = {"height": 32, "width": 48}
        rows.append({"path": f"{number}.mp4", "cap": "a red kite", "num_frames": 5, "fps": 8, "resolution": size})
    (root / "data/videos/data.json").write_text(json.dumps(rows))
    (root / "data/videos/data.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")


def example(name: str) -> dict[str, Any]:
    return json.loads((EXAMPLES / name).read_text())  # type: ignore[no-any-return]


def tiny_predictor(model: dict[str, Any], **sizes: Any) -> dict[str, Any]:
    """Return a model.json with the sizes of a tiny transformer."""
    predictor = model["predictor"]
    predictor |= {key: value for key, value in sizes.items() if key in predictor}
    if predictor.get("pipeline_num_layers"):
        predictor["pipeline_num_layers"] = [1, 1]
    return model


def tiny_parts(model: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a model.json whose VAE and text encoders are parts of a folder, in float32."""
    for name in ("ae", "text_encoder"):
        sections = model.get(name, [])
        for number, section in enumerate(sections if isinstance(sections, list) else [sections]):
            part = "vae" if name == "ae" else "text_encoder" + (f"_{number + 1}" if number else "")
            section |= {"from_pretrained": str(folder / part), "dtype": "fp32"}
    return model


def tiny_videos(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a data.json with small videos and the tokenizers of a folder."""
    param = data["dataset_param"]
    preprocess = param["preprocess_parameters"]
    preprocess |= {key: value for key, value in SIZE.items() if key in preprocess}
    tokenizers = param["tokenizer_config"]
    for number, section in enumerate(tokenizers if isinstance(tokenizers, list) else [tokenizers]):
        section["from_pretrained"] = str(folder / ("tokenizer" + (f"_{number + 1}" if number else "")))
    return data


def put(path: Path, content: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return str(path)


def write_hunyuan(folder: Path) -> None:
    """Write HunyuanVideo: Llama, CLIP, a VAE of four channels and a transformer with guidance."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    torch.manual_seed(3)
    words = tokenizer(first="<s>", last="", length=512)
    clip = tokenizer(first="<s>", last="</s>", length=77)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    ends = {"eos_token_id": clip.eos_token_id, "bos_token_id": clip.bos_token_id, "pad_token_id": clip.pad_token_id}
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=2,
        text_embed_dim=16,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(vocab_size=128, num_key_value_heads=2, **size)),
        tokenizer=words,
        transformer=moved(transformer),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=CLIPTextModel(CLIPTextConfig(vocab_size=64, max_position_embeddings=77, **size, **ends)),
        tokenizer_2=clip,
    ).save_pretrained(folder)


__all__ = ["write_cogvideox", "write_hunyuan", "write_wan"]
