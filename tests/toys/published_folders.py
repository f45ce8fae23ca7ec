"""Folders of published models without their weights: the configurations that a plan reads, under their own names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.models import FAMILIES

# Folder -> family, preset of each component that is trained, and the other components.
Parts = Mapping[str, tuple[str, str]]  # name of a component -> library and class
_T5, _UMT5 = ("transformers", "T5EncoderModel"), ("transformers", "UMT5EncoderModel")
_CLIP, _PROJECTED = ("transformers", "CLIPTextModel"), ("transformers", "CLIPTextModelWithProjection")
_QWEN = ("transformers", "Qwen2_5_VLForConditionalGeneration")
_WAN: Parts = {"vae": ("diffusers", "AutoencoderKLWan"), "text_encoder": _UMT5}
_WAN_IMAGE: Parts = {**_WAN, "image_encoder": ("transformers", "CLIPVisionModel")}
_IMAGES = ("diffusers", "AutoencoderKL")
_FLUX: Parts = {"vae": _IMAGES, "text_encoder": _CLIP, "text_encoder_2": _T5}
_SD3: Parts = {"vae": _IMAGES, "text_encoder": _PROJECTED, "text_encoder_2": _PROJECTED, "text_encoder_3": _T5}
_HUNYUAN: Parts = {
    "vae": ("diffusers", "AutoencoderKLHunyuanVideo"),
    "text_encoder": ("transformers", "LlamaModel"),
    "text_encoder_2": _CLIP,
}
_HUNYUAN_IMAGE: Parts = {**_HUNYUAN, "text_encoder": ("transformers", "LlavaForConditionalGeneration")}
_HUNYUAN_15: Parts = {
    "vae": ("diffusers", "AutoencoderKLHunyuanVideo15"),
    "text_encoder": ("transformers", "Qwen2_5_VLTextModel"),
    "text_encoder_2": _T5,
}
_HUNYUAN_15_IMAGE: Parts = {**_HUNYUAN_15, "image_encoder": ("transformers", "SiglipVisionModel")}
_COG: Parts = {"vae": ("diffusers", "AutoencoderKLCogVideoX"), "text_encoder": _T5}
_LTX: Parts = {"vae": ("diffusers", "AutoencoderKLLTXVideo"), "text_encoder": _T5}
_QWEN_IMAGE: Parts = {"vae": ("diffusers", "AutoencoderKLQwenImage"), "text_encoder": _QWEN}
PIPELINES: Mapping[str, tuple[str, str, Parts]] = {
    "Wan2.1-T2V-1.3B-Diffusers": ("wan", "2.1-t2v-1.3b", _WAN),
    "Wan2.1-T2V-14B-Diffusers": ("wan", "2.1-t2v-14b", _WAN),
    "Wan2.1-I2V-14B-480P-Diffusers": ("wan", "2.1-i2v-14b", _WAN_IMAGE),
    "Wan2.1-FLF2V-14B-720P-diffusers": ("wan", "2.1-flf2v-14b", _WAN_IMAGE),
    "Wan2.2-T2V-A14B-Diffusers": ("wan", "2.2-t2v-a14b", _WAN),
    "Wan2.2-I2V-A14B-Diffusers": ("wan", "2.2-i2v-a14b", _WAN),
    "Wan2.2-TI2V-5B-Diffusers": ("wan", "2.2-ti2v-5b", _WAN),
    "HunyuanVideo": ("hunyuan_video", "13b", _HUNYUAN),
    "HunyuanVideo-I2V": ("hunyuan_video", "13b-i2v", _HUNYUAN_IMAGE),
    "HunyuanVideo-1.5-Diffusers-480p_t2v": ("hunyuan_video_1_5", "480p-t2v", _HUNYUAN_15),
    "HunyuanVideo-1.5-Diffusers-480p_i2v": ("hunyuan_video_1_5", "480p-i2v", _HUNYUAN_15_IMAGE),
    "FLUX.1-dev": ("flux", "dev", _FLUX),
    "FLUX.1-Kontext-dev": ("flux", "dev", _FLUX),
    "Qwen-Image": ("qwen_image", "20b", _QWEN_IMAGE),
    "Qwen-Image-Edit": ("qwen_image", "20b", _QWEN_IMAGE),
    "Qwen-Image-Edit-2509": ("qwen_image", "20b", _QWEN_IMAGE),
    "stable-diffusion-3.5-medium": ("sd3", "3.5-medium", _SD3),
    "stable-diffusion-3.5-large": ("sd3", "3.5-large", _SD3),
    "CogVideoX-2b": ("cogvideox", "2b", _COG),
    "CogVideoX-5b": ("cogvideox", "5b", _COG),
    "CogVideoX-5b-I2V": ("cogvideox", "5b-i2v", _COG),
    "LTX-Video": ("ltx_video", "2b", _LTX),
    "LTX-Video-0.9.7-dev": ("ltx_video", "13b", _LTX),
}
# Folders of one model: family and preset.
MODELS: Mapping[str, tuple[str, str]] = {
    "GLM-4.1V-9B-Thinking": ("glm4v", "9b"),
    "InternVL3-2B-hf": ("internvl", "3-2b"),
    "InternVL3-8B-hf": ("internvl", "3-8b"),
    "Llama-3.1-8B-Instruct": ("llama", "3.1-8b"),
    "Qwen2-VL-2B-Instruct": ("qwen2_vl", "2b"),
    "Qwen2-VL-7B-Instruct": ("qwen2_vl", "7b"),
    "Qwen2.5-7B-Instruct": ("qwen2", "7b"),
    "Qwen2-Audio-7B-Instruct": ("qwen2_audio", "7b"),
    "Qwen2.5-Omni-7B": ("qwen2_5_omni", "7b"),
    "Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", "3b"),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", "7b"),
    "Qwen2.5-VL-32B-Instruct": ("qwen2_5_vl", "32b"),
    "Qwen2.5-VL-72B-Instruct": ("qwen2_5_vl", "72b"),
    "Qwen3-ASR-0.6B": ("qwen3_asr", "0.6b"),
    "Qwen3-ASR-1.7B": ("qwen3_asr", "1.7b"),
    "Qwen3-Omni-30B-A3B-Instruct": ("qwen3_omni_talker", "30b-a3b"),
    "Qwen3-4B": ("qwen3", "4b"),
    "Qwen3-8B": ("qwen3", "8b"),
    "Qwen3-VL-2B-Instruct": ("qwen3_vl", "2b"),
    "Qwen3-VL-4B-Instruct": ("qwen3_vl", "4b"),
    "Qwen3-VL-8B-Instruct": ("qwen3_vl", "8b"),
    "Qwen3-VL-30B-A3B-Instruct": ("qwen3_vl", "30b-a3b"),
    "llava-1.5-7b-hf": ("llava", "1.5-7b"),
    "llava-onevision-qwen2-7b-ov-hf": ("llava", "onevision-7b"),
    "csm-1b": ("csm", "1b"),
    "whisper-large-v3": ("whisper", "large-v3"),
    "whisper-large-v3-turbo": ("whisper", "large-v3-turbo"),
}
_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "UMT5EncoderModel": {**_XXL, "vocab_size": 256384, "feed_forward_proj": "gated-gelu"},
    "T5EncoderModel": {**_XXL, "vocab_size": 32128, "feed_forward_proj": "gated-gelu"},
    "CLIPTextModel": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    "CLIPTextModelWithProjection": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 20,
        "projection_dim": 1280,
    },
    "CLIPVisionModel": {
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
    "SiglipVisionModel": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 384,
        "patch_size": 14,
    },
    "LlamaModel": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128320,
    },
}
_QWEN_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
}
_VAES: Mapping[str, Mapping[str, Any]] = {
    "AutoencoderKL": {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "latent_channels": 16,
        "layers_per_block": 2,
    }
}
_WAN_22 = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
_DEPTHS = (
    *("num_layers", "num_single_layers", "num_hidden_layers", "depth", "dual_attention_layers"),
    *("encoder_layers", "decoder_layers", "accept_hidden_layer"),
    *("num_res_blocks", "layers_per_block"),  # of VAEs
)


def write_published(root: Path, name: str, layers: int | None = None) -> Path:
    """Write the configurations of a published folder below `root`. `layers`: of everything, where fewer will do."""
    folder = root / name
    if folder.exists():
        return folder
    if name in MODELS:
        family, preset = MODELS[name]
        _write(folder, _config(family, preset), layers)
        return folder
    if name not in PIPELINES:
        raise KeyError(f"a recipe names the folder {name}: say here which family and preset it holds")
    family, preset, parts = PIPELINES[name]
    config = _config(family, preset)
    trained = ("transformer", "transformer_2") if "A14B" in name else ("transformer",)
    index: dict[str, Any] = {"_class_name": "Pipeline"}
    for part in trained:
        index[part] = ["diffusers", config["_class_name"]]
        _write(folder / part, config, layers)
    for part, (library, made_by) in parts.items():
        index[part] = [library, made_by]
        settings = _vae(made_by, name) if library == "diffusers" else _encoder(made_by)
        _write(folder / part, settings, layers)
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _config(family: str, preset: str) -> dict[str, Any]:
    spec = FAMILIES.get(family)
    return dict(spec.config(**spec.presets[preset]).to_hf())  # type: ignore[attr-defined]


def _vae(made_by: str, name: str) -> dict[str, Any]:
    import diffusers

    chosen = _WAN_22 if "TI2V" in name else _VAES.get(made_by, {})
    return {"_class_name": made_by, **_defaults(getattr(diffusers, made_by)), **chosen}


def _defaults(made_by: Any) -> dict[str, Any]:
    import inspect

    parameters = inspect.signature(made_by.__init__).parameters.values()
    return {one.name: one.default for one in parameters if one.default not in (inspect.Parameter.empty, None)}


def _encoder(made_by: str) -> dict[str, Any]:
    import transformers

    if made_by == "LlavaForConditionalGeneration":  # its vision model has the usual sizes
        text = {"model_type": "llama", **_ENCODERS["LlamaModel"]}
        return {"model_type": "llava", **transformers.LlavaConfig(text_config=text).to_dict()}
    if made_by.startswith("Qwen2_5_VL"):
        whole = transformers.Qwen2_5_VLConfig(text_config=dict(_QWEN_TEXT)).to_dict()
        return whole["text_config"] if made_by.endswith("TextModel") else whole
    config = getattr(transformers, made_by).config_class
    return dict(config(**_ENCODERS[made_by]).to_dict())


def _write(folder: Path, config: Mapping[str, Any], layers: int | None) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config if layers is None else _shallow(config, layers)))


def _shallow(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return a configuration with fewer layers, wherever it says how many there are."""
    shallow: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            shallow[key] = _shallow(value, layers)
        elif key == "layer_types" and isinstance(value, list):
            shallow[key] = value[:layers]
        elif key == "dual_attention_layers":
            shallow[key] = [number for number in value if number < layers]
        elif key == "deepstack_visual_indexes":  # blocks whose features enter the decoder
            shallow[key] = list(range(min(layers, len(value))))
        elif key == "vision_feature_layer" and isinstance(value, int):  # counted from the last block
            shallow[key] = max(value, -layers)
        else:
            shallow[key] = min(value, layers) if key in _DEPTHS and isinstance(value, int) else value
    return shallow
