"""Tiny diffusers pipelines with random weights, whole: tokenizers, encoders, VAE, transformer and scheduler."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn

WORDS = ("a", "the", "cat", "dog", "kite", "red", "blue", "moving", "left", "right")
TEXT = 16
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}


def write_wan(
    folder: Path, *, image: bool = False, embeds: int = 0, experts: int = 1, token_times: bool = False
) -> Any:
    """Write Wan: from text, or from an image; with embeddings of so many frames; one expert or two."""
    from diffusers import UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    channels = 48 if token_times else 4
    vision = CLIPVisionModel(
        CLIPVisionConfig(
            hidden_size=12,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=28,
            patch_size=14,
        )
    )
    parts: dict[str, Any] = {
        "tokenizer": tokenizer(first="", last="</s>"),
        "text_encoder": umt5(),
        "vae": video_vae(channels),
        "scheduler": UniPCMultistepScheduler(**FLOW),
    }
    given = 4 + channels if image and not token_times else 0
    for number in range(experts):
        parts["transformer_2" if number else "transformer"] = moved(
            WanTransformer3DModel(
                patch_size=(1, 2, 2),
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=channels + given,
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
    made = (WanImageToVideoPipeline if image else WanPipeline)(**parts, **options)
    return saved(made, folder)


def write_flux(folder: Path, *, guidance: bool = True) -> Any:
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    torch.manual_seed(1)
    size = {"hidden_size": TEXT, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = tokenizer(first="<s>", last="</s>", length=77)
    ends = {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id, "pad_token_id": words.pad_token_id}
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        norm_num_groups=2,
        latent_channels=4,
        scaling_factor=0.4,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
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
    t5 = T5EncoderModel(
        T5Config(vocab_size=64, d_model=TEXT, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    )
    made = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
        vae=vae,
        text_encoder=CLIPTextModel(CLIPTextConfig(vocab_size=64, max_position_embeddings=77, **size, **ends)),
        tokenizer=words,
        text_encoder_2=t5,
        tokenizer_2=tokenizer(first="", last="</s>"),
        transformer=moved(transformer),
    )
    return saved(made, folder)


def write_qwen_image(folder: Path, *, edit: bool = False) -> Any:
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImageEditPipeline,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
    )

    torch.manual_seed(2)
    special = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
    words = tokenizer(first="", last="", special=special)
    ids = {word: words.convert_tokens_to_ids(word) for word in special}
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": TEXT,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
            "rope_theta": 1000000.0,
            "vocab_size": 128,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": TEXT,
            "fullatt_block_indexes": [1],
        },
        vocab_size=128,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    parts: dict[str, Any] = {
        "scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02),
        "vae": AutoencoderKLQwenImage(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.0, 0.3],
            latents_std=[1.5, 0.5, 2.0, 1.0],
        ),
        "text_encoder": Qwen2_5_VLForConditionalGeneration(config),
        "tokenizer": words,
        "transformer": moved(
            QwenImageTransformer2DModel(
                patch_size=2,
                in_channels=16,
                out_channels=4,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=TEXT,
                axes_dims_rope=(4, 6, 6),
            )
        ),
    }
    made = saved(QwenImagePipeline(**parts), folder)
    if not edit:
        return made
    processor = ImagesAndText(words)
    processor.images.save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"_class_name": "QwenImageEditPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    made = QwenImageEditPipeline(**parts, processor=processor)
    made.set_progress_bar_config(disable=True)
    return made


class ImagesAndText:
    """Do what `Qwen2VLProcessor` does with images and text; the class itself asks for torchvision, for videos."""

    def __init__(self, words: Any) -> None:
        from transformers import Qwen2VLImageProcessor

        self.words = words
        self.images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        from transformers import BatchFeature

        shown = self.images(images=images, return_tensors=return_tensors)
        tokens = int(shown["image_grid_thw"][0].prod()) // 4
        texts = [one.replace("<|image_pad|>", "<|image_pad|>" * tokens) for one in text]
        return BatchFeature({**self.words(texts, padding=padding, return_tensors=return_tensors), **shown})


def tokenizer(first: str, last: str, special: Sequence[str] = (), length: int = 512) -> Any:
    """Return a tokenizer of a few words, which begins and ends a text with words of its own."""
    from transformers import PreTrainedTokenizerFast

    known = ("<pad>", "</s>", "<unk>", "<s>", *special, *WORDS)
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    around = [(word, known.index(word)) for word in (first, last) if word]
    if around:
        made.post_processor = processors.TemplateProcessing(
            single=" ".join(word for word in (first, "$A", last) if word), special_tokens=around
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
        model_max_length=length,
    )


def umt5() -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(vocab_size=64, d_model=TEXT, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    )


def video_vae(channels: int) -> nn.Module:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.0, 0.3] * (channels // 4),
        latents_std=[1.5, 0.5, 2.0, 1.0] * (channels // 4),
    )


def moved(module: nn.Module) -> nn.Module:
    """Draw every weight anew: published models begin with zeros in places, which would hide mistakes there."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.15)
    return module


def saved(pipeline: Any, folder: Path) -> Any:
    pipeline.save_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_sd3(folder: Path) -> Any:
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(3)
    words = tokenizer(first="<s>", last="</s>", length=77)
    ends = {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id, "pad_token_id": words.pad_token_id}
    size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    clip = CLIPTextConfig(vocab_size=64, max_position_embeddings=77, projection_dim=8, **size, **ends)
    t5 = T5Config(vocab_size=64, d_model=24, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        norm_num_groups=2,
        latent_channels=4,
        scaling_factor=0.4,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
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
    made = StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=CLIPTextModelWithProjection(clip),
        tokenizer=words,
        text_encoder_2=CLIPTextModelWithProjection(clip),
        tokenizer_2=words,
        text_encoder_3=T5EncoderModel(t5),
        tokenizer_3=tokenizer(first="", last="</s>"),
        transformer=moved(transformer),
    )
    return saved(made, folder)


def write_cogvideox(folder: Path) -> Any:
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
    from transformers import T5Config, T5EncoderModel

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
    )
    t5 = T5Config(vocab_size=64, d_model=TEXT, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0)
    made = CogVideoXPipeline(
        tokenizer=tokenizer(first="", last="</s>"),
        text_encoder=T5EncoderModel(t5),
        vae=vae,
        transformer=moved(transformer),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction", snr_shift_scale=3.0),
    )
    return saved(made, folder)
