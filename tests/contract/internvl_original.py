"""A tiny folder of InternVL in the form of its makers, by published names, and the same weights by other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tessera.models.processing.tokenizer import train_tokenizer

LAYERS, HIDDEN, WIDTH, HEADS, KV, VOCAB = 2, 32, 48, 4, 2, 400
EYES, EYE_WIDTH, EYE_HEADS, EYE_LAYERS, TILE, PATCH = 16, 24, 2, 2, 32, 8
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<quad>"]
LEARNED = ["system user assistant\n\n What is in this picture? A red square. 12345"]
CANARY = "import pathlib; pathlib.Path(__file__).with_name('canary').write_text('run')\n"


def head_size(kind: str) -> int:
    return 16 if kind == "qwen3" else HIDDEN // HEADS


def config(kind: str, **changes: Any) -> dict[str, Any]:
    llm: dict[str, Any] = {
        "model_type": kind,
        "architectures": [{"qwen2": "Qwen2", "qwen3": "Qwen3", "internlm2": "InternLM2"}[kind] + "ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_bfloat16": True,
    }
    llm |= {"head_dim": 16} if kind == "qwen3" else {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    llm |= {"bias": False} if kind == "internlm2" else {"use_sliding_window": False, "sliding_window": None}
    vision = {
        "architectures": ["InternVisionModel"],
        "model_type": "intern_vit_6b",
        "hidden_size": EYES,
        "intermediate_size": EYE_WIDTH,
        "num_hidden_layers": EYE_LAYERS,
        "num_attention_heads": EYE_HEADS,
        "image_size": TILE,
        "patch_size": PATCH,
        "num_channels": 3,
        "qkv_bias": kind != "qwen3",
        "qk_normalization": kind == "qwen3",
        "norm_type": "rms_norm" if kind == "qwen3" else "layer_norm",
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu",
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "drop_path_rate": 0.1,
        "initializer_factor": 0.1,
        "use_flash_attn": True,
    }
    return {
        "architectures": ["InternVLChatModel"],
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "model_type": "internvl_chat",
        "downsample_ratio": 0.5,
        "dynamic_image_size": True,
        "force_image_size": TILE,
        "llm_config": llm,
        "max_dynamic_patch": 4,
        "min_dynamic_patch": 1,
        "pad2square": False,
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "torch_dtype": "float32",
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "use_thumbnail": True,
        "vision_config": vision,
        **changes,
    }


def weights(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights by the names of the makers, and by those of Hugging Face, each cut apart row by row."""
    chance = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance) * 0.3

    theirs: dict[str, Tensor] = {}
    hub: dict[str, Tensor] = {}

    def put(name: str, other: str, *shape: int) -> None:
        theirs[name] = hub[other] = random(*shape)

    eyes, tower = "vision_model.", "vision_tower."
    put(eyes + "embeddings.class_embedding", tower + "embeddings.cls_token", 1, 1, EYES)
    places = (TILE // PATCH) ** 2 + 1
    put(eyes + "embeddings.position_embedding", tower + "embeddings.position_embeddings", 1, places, EYES)
    patches = tower + "embeddings.patch_embeddings.projection."
    put(eyes + "embeddings.patch_embedding.weight", patches + "weight", EYES, 3, PATCH, PATCH)
    put(eyes + "embeddings.patch_embedding.bias", patches + "bias", EYES)
    for n in range(EYE_LAYERS):
        here, there = f"{eyes}encoder.layers.{n}.", f"{tower}encoder.layer.{n}."
        for part in ("weight", "bias")[: 1 if kind == "qwen3" else 2]:
            put(here + f"norm1.{part}", there + f"layernorm_before.{part}", EYES)
            put(here + f"norm2.{part}", there + f"layernorm_after.{part}", EYES)
            packed = random(3 * EYES, EYES) if part == "weight" else random(3 * EYES)
            theirs[here + f"attn.qkv.{part}"] = packed
            for at, name in enumerate("qkv"):
                hub[there + f"attention.{name}_proj.{part}"] = packed[at * EYES : (at + 1) * EYES].clone()
        if kind == "qwen3":
            put(here + "attn.q_norm.weight", there + "attention.q_norm.weight", EYES)
            put(here + "attn.k_norm.weight", there + "attention.k_norm.weight", EYES)
        put(here + "attn.proj.weight", there + "attention.projection_layer.weight", EYES, EYES)
        put(here + "attn.proj.bias", there + "attention.projection_layer.bias", EYES)
        put(here + "ls1", there + "lambda_1", EYES)
        put(here + "ls2", there + "lambda_2", EYES)
        for name, shape in (("fc1", (EYE_WIDTH, EYES)), ("fc2", (EYES, EYE_WIDTH))):
            put(here + f"mlp.{name}.weight", there + f"mlp.{name}.weight", *shape)
            put(here + f"mlp.{name}.bias", there + f"mlp.{name}.bias", shape[0])
    for number, name, shape in ((0, "layer_norm", (4 * EYES,)), (1, "linear_1", (HIDDEN, 4 * EYES)),
                                (3, "linear_2", (HIDDEN, HIDDEN))):  # fmt: skip
        put(f"mlp1.{number}.weight", f"multi_modal_projector.{name}.weight", *shape)
        put(f"mlp1.{number}.bias", f"multi_modal_projector.{name}.bias", shape[0])
    llm, head = "language_model.model.", head_size(kind)
    intern = kind == "internlm2"
    put(
        llm + ("tok_embeddings.weight" if intern else "embed_tokens.weight"), llm + "embed_tokens.weight", VOCAB, HIDDEN
    )
    put(
        "language_model." + ("output" if intern else "lm_head") + ".weight",
        "language_model.lm_head.weight",
        VOCAB,
        HIDDEN,
    )
    put(llm + "norm.weight", llm + "norm.weight", HIDDEN)
    for n in range(LAYERS):
        at = f"{llm}layers.{n}."
        norms = ("attention_norm", "ffn_norm") if intern else ("input_layernorm", "post_attention_layernorm")
        put(f"{at}{norms[0]}.weight", f"{at}input_layernorm.weight", HIDDEN)
        put(f"{at}{norms[1]}.weight", f"{at}post_attention_layernorm.weight", HIDDEN)
        names = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
        for mine, name, shape in zip(
            names, ("gate", "up", "down"), [(WIDTH, HIDDEN)] * 2 + [(HIDDEN, WIDTH)], strict=True
        ):
            put(f"{at}{mine if intern else f'mlp.{name}_proj'}.weight", f"{at}mlp.{name}_proj.weight", *shape)
        put(
            f"{at}{'attention.wo' if intern else 'self_attn.o_proj'}.weight",
            f"{at}self_attn.o_proj.weight",
            HIDDEN,
            HEADS * head,
        )
        if not intern:
            for name, rows in (("q", HEADS), ("k", KV), ("v", KV)):
                put(f"{at}self_attn.{name}_proj.weight", f"{at}self_attn.{name}_proj.weight", rows * head, HIDDEN)
                if kind == "qwen2":
                    put(f"{at}self_attn.{name}_proj.bias", f"{at}self_attn.{name}_proj.bias", rows * head)
            if kind == "qwen3":
                put(f"{at}self_attn.q_norm.weight", f"{at}self_attn.q_norm.weight", head)
                put(f"{at}self_attn.k_norm.weight", f"{at}self_attn.k_norm.weight", head)
            continue
        # For each key-value head: the rows of its queries, then those of the key, then those of the value.
        packed = random((HEADS + 2 * KV) * head, HIDDEN)
        theirs[f"{at}attention.wqkv.weight"] = packed
        rows = {"q": [], "k": [], "v": []}  # type: dict[str, list[Tensor]]
        for group in packed.split((HEADS // KV + 2) * head):
            rows["q"].append(group[: HEADS // KV * head])
            rows["k"].append(group[-2 * head : -head])
            rows["v"].append(group[-head:])
        for name, parts in rows.items():
            hub[f"{at}self_attn.{name}_proj.weight"] = torch.cat(parts)
    return theirs, hub


def original_folder(kind: str, folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    save_file(weights(kind)[0], folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(kind, **changes), indent=2))
    single = {"crop_size": TILE, "do_center_crop": True, "do_normalize": True, "do_resize": True, "resample": 3}
    norm = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "size": TILE}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**single, **norm, "feature_extractor_type": "CLIPFeatureExtractor"})
    )
    (folder / "modeling_internvl_chat.py").write_text(CANARY)
    words = ["<s>", "</s>", *WORDS[1:]] if kind == "internlm2" else WORDS
    tokenizer = train_tokenizer(LEARNED, VOCAB, words)
    if kind == "internlm2":
        tokenizer.save(str(folder / "tokenizer.json"))
        return folder
    told = json.loads(tokenizer.to_str())
    (folder / "vocab.json").write_text(json.dumps(told["model"]["vocab"]))
    (folder / "merges.txt").write_text(
        "\n".join(["#version: 0.2", *(" ".join(m) for m in told["model"]["merges"]), ""])
    )
    keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = {str(token["id"]): {key: token[key] for key in keys} for token in told["added_tokens"]}
    chat = "{{ 'You are somebody else.' }}"  # the template of the decoder alone
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added, "eos_token": "<|im_end|>",
                    "pad_token": "<|endoftext|>", "chat_template": chat})
    )  # fmt: skip
    (folder / "added_tokens.json").write_text(
        json.dumps({token["content"]: token["id"] for token in told["added_tokens"]})
    )
    return folder
