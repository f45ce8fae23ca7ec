"""Tiny random folders of vision-language classes of transformers that no family here reads, with all their files: a
tokenizer that is made here, the class's own processor, a chat template in the style of its makers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tessera.models.processing.tokenizer import train_tokenizer

VOCABULARY = 352
SIDE, PATCH = 16, 4  # of images, and 16 patches in each
TEXTS = ["What is this? Say red, blue, tall, small or old. Be brief. User Assistant model"]

LLAMA = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SIGHT = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
SIGLIP, CLIP = {**SIGHT, "model_type": "siglip_vision_model"}, {**SIGHT, "model_type": "clip_vision_model"}

# In the styles that are in use. `i` is the class's word for an image.
_PARTS = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n" + _PARTS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content[0].text + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for message in rest %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ first if loop.first else '' }}" + _PARTS + "<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
IDEFICS = (
    "{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}"
    "{% if message.content[0].type == 'image' %}:{% else %}: {% endif %}" + _PARTS + "<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
VICUNA = (  # turns have no end of their own
    "{% for message in messages %}{{ message.role | upper }}: " + _PARTS + " {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
GENERATION = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "{% generation %}"
    + _PARTS
    + "<|im_end|>{% endgeneration %}{% else %}"
    + _PARTS
    + "<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PALI = (  # the processor itself adds a line end at the end of the text
    "{% for message in messages %}{{ '\n' if message.role == 'assistant' else '' }}"
    + _PARTS
    + "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Class:
    """A class of transformers: its configuration, its processor, and what its samples may hold."""

    model: str
    config: dict[str, Any]
    template: str
    image_processor: str
    processor: str
    image_options: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    image: str = "<image>"  # as the template writes it
    words: tuple[str, ...] = ()  # further special words
    named: dict[str, str] = field(default_factory=dict)  # words that the processor asks the tokenizer for by name
    ids: dict[str, str] = field(default_factory=dict)  # field of the configuration -> word whose id it has
    text_only: bool = True  # samples without an image
    several: bool = True  # samples with several images
    system: bool = True


def _square(**more: Any) -> dict[str, Any]:
    return {"size": {"height": SIDE, "width": SIDE}, **more}


GEMMA_TEXT = {**LLAMA, "query_pre_attn_scalar": 8, "sliding_window": 16}
CLASSES = {
    "gemma3": Class(
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**GEMMA_TEXT, "model_type": "gemma3_text", "tie_word_embeddings": True},
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "tie_word_embeddings": True,
        },
        GEMMA,
        "Gemma3ImageProcessorPil",
        "Gemma3Processor",
        _square(),
        {"image_seq_length": 4},
        image="<start_of_image>",
        words=("<start_of_turn>", "<end_of_turn>"),
        named={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ids={
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
    ),
    "idefics3": Class(
        "Idefics3ForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": {**SIGHT}, "scale_factor": 2},
        IDEFICS,
        "Idefics3ImageProcessorPil",
        "Idefics3Processor",
        {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": SIDE}, "do_image_splitting": True},
        {"image_seq_len": 4},
        words=(
            "<fake_token_around_image>",
            "<end_of_utterance>",
            "<global-img>",
            *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
        ),
        ids={"image_token_id": "<image>"},
    ),
    "idefics2": Class(
        "Idefics2ForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "mistral"},
            "vision_config": {**SIGHT, "image_size": 32},
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
        },
        IDEFICS,
        "Idefics2ImageProcessorPil",
        "Idefics2Processor",
        {"size": {"shortest_edge": 12, "longest_edge": 32}},
        {"image_seq_len": 4},
        words=("<end_of_utterance>",),
        named={"image_token": "<image>", "image_boundary_token": "<fake_token_around_image>"},
        ids={"image_token_id": "<image>"},
    ),
    "paligemma": Class(
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "gemma", "num_image_tokens": 16, "tie_word_embeddings": True},
            "vision_config": {**SIGLIP, "projection_dim": 32, "vision_use_head": False},
            "projection_dim": 32,
            "hidden_size": 32,
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": True,
        },
        PALI,
        "SiglipImageProcessorPil",
        "PaliGemmaProcessor",
        _square(image_seq_length=16),
        named={"image_token": "<image>"},
        ids={"image_token_index": "<image>"},
        text_only=False,
        system=False,
    ),
    "llava_next": Class(
        "LlavaNextForConditionalGeneration",
        {
            "text_config": LLAMA,
            "vision_config": CLIP,
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
            "vision_feature_layer": -2,
            "image_seq_length": 16,
        },
        VICUNA,
        "LlavaNextImageProcessorPil",
        "LlavaNextProcessor",
        {
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
            "image_grid_pinpoints": [[16, 32], [32, 16], [32, 32]],
        },
        {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ids={"image_token_index": "<image>"},
    ),
    "vipllava": Class(
        "VipLlavaForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": {**CLIP, "num_hidden_layers": 3}, "vision_feature_layers": [-1, -2]},
        VICUNA,
        "CLIPImageProcessorPil",
        "LlavaProcessor",
        {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}},
        {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        ids={"image_token_index": "<image>"},
    ),
    "aya_vision": Class(
        "AyaVisionForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "cohere2", "sliding_window": 16, "tie_word_embeddings": True},
            "vision_config": {**SIGLIP, "vision_use_head": False},
            "downsample_factor": 2,
            "adapter_layer_norm_eps": 1e-6,
        },
        GENERATION,
        "GotOcr2ImageProcessorPil",
        "AyaVisionProcessor",
        _square(crop_to_patches=True, max_patches=3),
        {"patch_size": PATCH, "img_size": SIDE, "downsample_factor": 2},
        words=("<|im_start|>", "<|im_end|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"),
        ids={"image_token_index": "<|IMG_PATCH|>"},
    ),
    "janus": Class(
        "JanusForConditionalGeneration",
        {
            "text_config": LLAMA,
            "vision_config": {**SIGHT, "projection_dim": 32, "num_image_tokens": 16, "mlp_ratio": 2.0},
            "vq_config": {
                "embed_dim": 4,
                "num_embeddings": 8,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "num_patches": 4,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
            },
        },
        CHATML,
        "JanusImageProcessorPil",
        "JanusProcessor",
        _square(),
        {"num_image_tokens": 16},
        words=("<|im_start|>", "<|im_end|>"),
        named={"image_token": "<image>", "boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
        ids={"image_token_id": "<image>"},
    ),
    "deepseek_vl": Class(
        "DeepseekVLForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": {**SIGLIP, "vision_use_head": False}},
        GENERATION,
        "DeepseekVLImageProcessorPil",
        "DeepseekVLProcessor",
        _square(),
        {"num_image_tokens": 16},
        words=("<|im_start|>", "<|im_end|>"),
        named={"image_token": "<image>"},
        ids={"image_token_id": "<image>"},
    ),
    "ovis2": Class(
        "Ovis2ForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "qwen2"},
            "vision_config": {**SIGHT, "hidden_stride": 2, "vocab_size": 40},
            "hidden_size": 32,
            "vocab_size": VOCABULARY,
        },
        CHATML,
        "Ovis2ImageProcessorPil",
        "Ovis2Processor",
        _square(crop_to_patches=True, max_patches=2),
        {"image_seq_length": 4},
        words=(
            *("<|im_start|>", "<|im_end|>", "<image>"),
            *("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
        ),
        ids={"image_token_id": "<IMG_ATOM>"},
    ),
    "got_ocr2": Class(
        "GotOcr2ForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "qwen2"},
            "vision_config": {
                **{key: value for key, value in SIGHT.items() if key != "intermediate_size"},
                "image_size": 64,
                "output_channels": 8,
                "mlp_dim": 32,
                "window_size": 2,
                "global_attn_indexes": [1],
            },
            "image_seq_length": 16,
        },
        CHATML,
        "GotOcr2ImageProcessorPil",
        "GotOcr2Processor",
        {"size": {"height": 64, "width": 64}},
        image="<img><imgpad></img>",
        words=("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<imgpad>"),
        ids={"image_token_index": "<imgpad>"},
        text_only=False,
        several=False,
    ),
}


def write_class(name: str, folder: Path, seed: int = 0, weights: bool = True) -> Path:
    """Write the folder of a class, as the library saves it; without `weights`, only what a processor needs."""
    import torch
    import transformers

    case = CLASSES[name]
    words = dict.fromkeys(["<pad>", "<s>", "</s>", "<image>", *case.words, *case.named.values()])
    words |= dict.fromkeys(["<fake_token_around_image>"] if name == "idefics2" else [])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer(TEXTS, VOCABULARY, list(words)),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=case.named,
    )
    images = getattr(transformers, case.image_processor)(**case.image_options)
    if "image_seq_length" in case.image_options:
        images.image_seq_length = case.image_options["image_seq_length"]
    processor = getattr(transformers, case.processor)(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=case.template.replace("IMAGE", case.image),
        **case.options,
    )
    processor.save_pretrained(folder)
    torch.manual_seed(seed)
    kind = getattr(transformers, case.model)
    ids = {key: tokenizer.convert_tokens_to_ids(word) for key, word in case.ids.items()}
    if name == "ovis2":
        ids["visual_indicator_token_ids"] = tokenizer.convert_tokens_to_ids(list(case.words[4:]))
    config = kind.config_class(**case.config, **ids)
    for part in (config, config.get_text_config()):
        part.pad_token_id, part.bos_token_id, part.eos_token_id = (
            tokenizer.convert_tokens_to_ids(word) for word in ("<pad>", "<s>", "</s>")
        )
    if name == "paligemma":  # the processor adds a thousand words for places
        tokenizer = processor.tokenizer
        config.text_config.vocab_size = config.vocab_size = len(tokenizer)
    if not weights:
        config.architectures = [case.model]
        config.save_pretrained(folder)
        return folder
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too: those are alike in every fresh model
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def write_chats(name: str, folder: Path, count: int = 8) -> Path:
    """Write conversations that a class can be trained on: images of several sizes, several images, none, several
    turns, a system message."""
    case = CLASSES[name]
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        images = [1, 2, 0, 1][number % 4]
        images = max(images, 0 if case.text_only else 1)
        images = images if case.several else min(images, 1)
        parts = []
        for which in range(images):
            width, height = [(20, 20), (40, 17), (13, 30)][(number + which) % 3]
            pixels = np.random.default_rng(number * 3 + which).integers(0, 255, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{number}-{which}.png")
            parts.append({"type": "image", "image": f"{number}-{which}.png"})
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [*parts, {"type": "text", "text": f"What is number {number}?"}]},
            {"role": "assistant", "content": " ".join(["red", "blue", "tall"][: 1 + number % 3])},
        ]
        if number % 3 == 1:
            messages += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "old"}]
        if number % 4 == 3 and case.system:
            messages.insert(0, {"role": "system", "content": "Be brief."})
        rows.append({"id": f"{name}-{number}", "messages": messages})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "train.jsonl"
