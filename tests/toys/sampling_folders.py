"""Tiny diffusers pipelines with random weights, whole: tokenizers, encoders, VAE, transformer and scheduler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.toys.pipeline_components import (
    LLAVA_WORDS,
    TEXT,
    VISION_WORDS,
    clip,
    clip_vision,
    clip_words,
    image_vae,
    llava,
    moved,
    qwen_vl,
    siglip_vision,
    t5,
    tokenizer,
    umt5,
    wan_vae,
)

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


def write_wan(
    folder: Path, *, image: bool = False, embeds: int = 0, experts: int = 1, token_times: bool = False
) -> Any:
    """Write Wan: from text, or from an image; with embeddings of so many frames; one expert or two."""
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
    from transformers import CLIPImageProcessor

    torch.manual_seed(0)
    channels = 48 if token_times else 4
    vision = clip_vision()
    parts: dict[str, Any] = {
        "tokenizer": tokenizer(first="", last="</s>"),
        "text_encoder": umt5(),
        "vae": wan_vae(channels),
        "scheduler": UniPCMultistepScheduler(**FLOW),
    }
    extra = 4 + channels if image and not token_times else 0
    for number in range(experts):
        parts["transformer_2" if number else "transformer"] = moved(
            WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=channels + extra,
                out_channels=channels,
                text_dim=TEXT,
                freq_dim=32,
                ffn_dim=32,
                num_layers=2,
                image_dim=12 if embeds else None,
                added_kv_proj_dim=24 if embeds else None,
                pos_embed_seq_len=10 if embeds == 2 else None,
            )
        )
    if embeds:
        crop = {"height": 28, "width": 28}
        parts |= {"image_encoder": vision, "image_processor": CLIPImageProcessor(size=crop, crop_size=crop)}
    options = {"boundary_ratio": 0.7 if experts > 1 else None, "expand_timesteps": token_times}
    pipeline = (WanImageToVideoPipeline if image else WanPipeline)(**parts, **options)
    return saved(pipeline, folder)


def write_flux(folder: Path, *, guidance: bool = True) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(1)
    words = clip_words()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        pooled_projection_dim=TEXT,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 4, 8),
    )
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=image_vae(),
        text_encoder=clip(words),
        tokenizer=words,
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(first="", last="</s>"),
        transformer=moved(transformer),
    )
    return saved(pipeline, folder)


def write_qwen_image(folder: Path, *, edit: bool = False, plus: bool = False) -> Any:
    """Write Qwen-Image. `edit`: as the pipeline that edits one image; `plus`: as the one that edits several."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        QwenImageEditPipeline,
        QwenImageEditPlusPipeline,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(2)
    words = tokenizer(first="", last="", special=VISION_WORDS)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=TEXT,
        axes_dims_rope=(4, 6, 6),
    )
    parts: dict[str, Any] = {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        "vae": wan_vae(images=True),
        "text_encoder": qwen_vl(words),
        "tokenizer": words,
        "transformer": moved(transformer),
    }
    pipeline = saved(QwenImagePipeline(**parts), folder)
    if not (edit or plus):
        return pipeline
    edits = QwenImageEditPlusPipeline if plus else QwenImageEditPipeline
    processor = ImagesAndText(words)
    processor.images.save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": edits.__name__, "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    pipeline = edits(**parts, processor=processor)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.text_encoder.register_forward_pre_hook(_with_kinds, with_kwargs=True)
    return pipeline


def _with_kinds(encoder: Any, args: Any, values: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Tell which tokens are those of images. Published models have learned positions along rows and columns, which
    transformers 5 gives image tokens only where it is told their kind, and diffusers 0.42 does not tell it."""
    if values.get("pixel_values") is not None:
        values["mm_token_type_ids"] = (values["input_ids"] == encoder.config.image_token_id).int()
    return args, values


class ImagesAndText:
    """Do what `Qwen2VLProcessor` does with images and text; the class itself asks for torchvision, for videos.

    Images are resized by Pillow, whatever is installed: pixels of torchvision differ by a few levels."""

    def __init__(self, words: Any) -> None:
        from transformers import Qwen2VLImageProcessorPil

        self.words = words
        self.images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        prepared = self.images(images=images, return_tensors=return_tensors)
        (before, *behind) = text[0].split("<|image_pad|>")
        for grid, rest in zip(prepared["image_grid_thw"], behind, strict=True):
            before += "<|image_pad|>" * (int(grid.prod()) // 4) + rest
        texts = [before]
        return BatchFeature({**self.words(texts, padding=padding, return_tensors=return_tensors), **prepared})


def write_sd3(folder: Path) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.manual_seed(3)
    words = clip_words()
    transformer = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_projection_dim=16,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        pos_embed_max_size=8,
    )
    pipeline = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(),
        text_encoder=clip(words, 8, 3, projected=True),
        tokenizer=words,
        text_encoder_2=clip(words, 8, 3, projected=True),
        tokenizer_2=words,
        text_encoder_3=t5(24),
        tokenizer_3=tokenizer(first="", last="</s>"),
        transformer=moved(transformer),
    )
    return saved(pipeline, folder)


def write_cogvideox(folder: Path, newer: bool = False) -> Any:
    """Write a pipeline. `newer`: as version 1.5, whose patches join two latent frames."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    torch.manual_seed(4)
    blocks = {"down_block_types": ("CogVideoXDownBlock3D",) * 4, "up_block_types": ("CogVideoXUpBlock3D",) * 4}
    vae = AutoencoderKLCogVideoX(
        **blocks, block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=2
    )
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=TEXT,
        num_layers=2,
        sample_width=6,
        sample_height=4,
        sample_frames=5,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=226,
        **({"patch_size_t": 2, "patch_bias": False, "use_rotary_positional_embeddings": True} if newer else {}),
    )
    pipeline = CogVideoXPipeline(
        tokenizer=tokenizer(first="", last="</s>"),
        text_encoder=t5(),
        vae=vae,
        transformer=moved(transformer),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", snr_shift_scale=3.0),
    )
    return saved(pipeline, folder)


def write_ltx_video(folder: Path) -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    torch.manual_seed(5)
    vae = AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=2,
        patch_size_t=1,
    )
    transformer = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=TEXT,
    )
    pipeline = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
        ),
        vae=vae,
        text_encoder=t5(),
        tokenizer=tokenizer(first="", last="</s>"),
        transformer=moved(transformer),
    )
    return saved(pipeline, folder)


def write_hunyuan_video(folder: Path) -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(6)
    words = clip_words()
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
        num_refiner_layers=1,
        text_embed_dim=TEXT,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    sizes = {"hidden_size": TEXT, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    pipeline = HunyuanVideoPipeline(
        text_encoder=LlamaModel(LlamaConfig(vocab_size=64, pad_token_id=0, **sizes)),
        tokenizer=tokenizer(first="<s>", last=""),
        transformer=moved(transformer),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip(words, 8),
        tokenizer_2=words,
    )
    return saved(pipeline, folder)


def write_parts(folder: Path, **parts: Any) -> Path:
    """Write parts of a pipeline that has further ones, such as a guider: what a model is trained with."""
    index: dict[str, Any] = {"_class_name": "Pipeline"}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        index[name] = [type(part).__module__.partition(".")[0], type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _hunyuan_video_1_5_parts(task: str) -> dict[str, Any]:
    from diffusers import AutoencoderKLHunyuanVideo15, HunyuanVideo15Transformer3DModel

    torch.manual_seed(7)
    words = tokenizer(first="", last="", special=VISION_WORDS, letters=True)
    words.chat_template = (
        "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1, scaling_factor=1.2
    )
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=TEXT,
        text_embed_2_dim=8,
        image_embed_dim=12,
        rope_axes_dim=(4, 6, 6),
        target_size=64,
        task_type=task,
    )
    text = qwen_vl(words, text_only=True)
    return {"vae": vae, "text_encoder": text, "tokenizer": words, "transformer": moved(transformer)}


def write_hunyuan_video_1_5(folder: Path) -> Path:
    return write_parts(folder, **_hunyuan_video_1_5_parts("t2v"))


def write_hunyuan_video_1_5_i2v(folder: Path) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, HunyuanVideo15ImageToVideoPipeline
    from diffusers.guiders import ClassifierFreeGuidance
    from transformers import ByT5Tokenizer, SiglipImageProcessor

    pipeline = HunyuanVideo15ImageToVideoPipeline(
        **_hunyuan_video_1_5_parts("i2v"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        text_encoder_2=t5(8),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
        image_encoder=siglip_vision(),
        feature_extractor=SiglipImageProcessor(size={"height": 28, "width": 28}),
    )
    return saved(pipeline, folder)


def saved(pipeline: Any, folder: Path) -> Any:
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_hunyuan_video_i2v(folder: Path, condition: str) -> Any:
    """Write HunyuanVideo I2V, whose text encoder reads the first frame, too. `condition`: as its config names it."""
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideoImageToVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPImageProcessor

    torch.manual_seed(8)
    concat = condition == "latent_concat"
    clip_tokens = clip_words()
    words = tokenizer(first="<s>", last="", special=LLAVA_WORDS, breaks=True)
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 4, 4), layers_per_block=1, norm_num_groups=2
    )
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=9 if concat else 4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=TEXT,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        guidance_embeds=not concat,
        image_condition_type=condition,
    )
    pipeline = HunyuanVideoImageToVideoPipeline(
        text_encoder=llava(words),
        tokenizer=words,
        transformer=moved(transformer),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=clip(clip_tokens, 8),
        tokenizer_2=clip_tokens,
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, do_center_crop=True
        ),
    )
    return saved(pipeline, folder)
