"""Tiny parts of diffusers pipelines with random weights: tokenizers, text and image encoders, VAEs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import nn

WORDS = ("a", "the", "cat", "dog", "kite", "red", "blue", "moving", "left", "right")
TEXT = 16  # width of embeddings
LLAVA_WORDS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<image>")
VISION_WORDS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def tokenizer(
    first: str,
    last: str,
    special: Sequence[str] = (),
    length: int = 512,
    *,
    letters: bool = False,
    breaks: bool = False,
) -> Any:
    """Return a tokenizer of a few words, which begins and ends a text with words of its own. `letters`: every letter is
    a token, so that a template has as many as the published one, or more. `breaks`: an empty line is a token."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = ("<pad>", "</s>", "<unk>", "<s>", *special, *WORDS)
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unk>"))
    pattern = (r"\n\n|" if breaks else "") + (r"\w|[^\w\s]" if letters else r"\w+|[^\w\s]")
    words.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    around = [(word, vocabulary.index(word)) for word in (first, last) if word]
    if around:
        words.post_processor = processors.TemplateProcessing(
            single=" ".join(word for word in (first, "$A", last) if word), special_tokens=around
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="</s>",
        bos_token="<s>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
        model_max_length=length,
    )


def umt5() -> nn.Module:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**_t5_sizes(TEXT)))


def t5(width: int = TEXT) -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**_t5_sizes(width)))


def _t5_sizes(width: int) -> dict[str, Any]:
    sizes = {"d_model": width, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return {"vocab_size": 64, "dropout_rate": 0.0, **sizes}


def clip(words: Any, width: int = TEXT, layers: int = 2, *, projected: bool = False) -> nn.Module:
    """Return CLIP's text encoder, for a tokenizer whose words of beginning and end it must know."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers}
    ends = {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id, "pad_token_id": words.pad_token_id}
    config = CLIPTextConfig(
        vocab_size=64, max_position_embeddings=77, num_attention_heads=2, projection_dim=width, **sizes, **ends
    )
    return CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)


def clip_words() -> Any:
    """Return a tokenizer as CLIP has it."""
    return tokenizer(first="<s>", last="</s>", length=77)


def clip_vision() -> nn.Module:
    from transformers import CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    return CLIPVisionModel(CLIPVisionConfig(image_size=28, patch_size=14, **sizes))


def siglip_vision() -> nn.Module:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    return SiglipVisionModel(SiglipVisionConfig(image_size=28, patch_size=14, **sizes))


def llava(words: Any) -> nn.Module:
    """Return LLaVA for a tokenizer with `LLAVA_WORDS`; an image of 336 x 336 pixels is 576 tokens."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": TEXT, "intermediate_size": 32, "num_attention_heads": 2}
    text = {**sizes, "model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": 64}
    vision = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = LlavaConfig(
        text_config={**text, "pad_token_id": 0},
        vision_config={**vision, "model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
        image_token_id=words.convert_tokens_to_ids("<image>"),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )
    return LlavaForConditionalGeneration(config)


def qwen_vl(words: Any, *, text_only: bool = False) -> nn.Module:
    """Return Qwen2.5-VL for a tokenizer with `VISION_WORDS`, or its text decoder alone."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLTextModel

    ids = [words.convert_tokens_to_ids(word) for word in VISION_WORDS]
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": TEXT,
            "intermediate_size": 32,
            "num_hidden_layers": 4 if text_only else 2,
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
        vision_start_token_id=ids[2],
        image_token_id=ids[3],
        vision_end_token_id=ids[4],
        video_token_id=ids[5],
    )
    return Qwen2_5_VLTextModel(config.text_config) if text_only else Qwen2_5_VLForConditionalGeneration(config)


def image_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
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


def wan_vae(channels: int = 4, *, images: bool = False) -> nn.Module:
    """Return the VAE of Wan, or the one that Qwen-Image has made of it."""
    from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

    return (AutoencoderKLQwenImage if images else AutoencoderKLWan)(
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
