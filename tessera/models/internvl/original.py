"""Folders of InternVL in its authors' format (`internvl_chat`): config.json, preprocessing and weight names.

The Python code in such folders is never run. Their config.json is converted to the Hugging Face format; values that
Tessera does not support are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.errors import TesseraError
from tessera.models.internvl.config import InternVLConfig
from tessera.models.text.decoder import language_weights
from tessera.models.text.hf import check_supported
from tessera.runtime.files import read_json_mapping
from tessera.weights.layouts import CONFIG_FILE
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import GroupByHead, GroupedRows, Reshape

MODEL_TYPE = "internvl_chat"
CONTEXT = "<IMG_CONTEXT>"
WHERE = f"config.json ({MODEL_TYPE})"
# Id of <IMG_CONTEXT> in published models, for folders whose tokenizer files lack it.
_CONTEXT_IDS = {"qwen2": 151667, "qwen3": 151671, "qwen3_moe": 151671, "internlm2": 92546}
_MAX_BYTES = 256 << 20  # size limit of tokenizer.json


def hf_config(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the same model in Hugging Face format."""
    llm, vision = _section(data, "llm_config"), _section(data, "vision_config")
    text, side = _text(llm), vision.get("image_size", 448)
    check_supported(
        [
            ("select_layer", data.get("select_layer", -1), (-1,)),
            ("ps_version", data.get("ps_version", "v1"), ("v2",)),  # pixel shuffle of version v1 transposes images
            ("pad2square", bool(data.get("pad2square")), (False,)),
            ("force_image_size", data.get("force_image_size") or side, (side,)),
            ("use_backbone_lora", data.get("use_backbone_lora") or 0, (0,)),
            ("use_llm_lora", data.get("use_llm_lora") or 0, (0,)),
            ("vision_config.model_type", vision.get("model_type", "intern_vit_6b"), ("intern_vit_6b",)),
            ("vision_config.use_moe", bool(vision.get("use_moe")), (False,)),
            ("vision_config.dropout", vision.get("dropout") or 0.0, (0.0,)),
        ],
        WHERE,
    )
    tied = bool(llm.get("tie_word_embeddings", False))
    fields = {
        "model_type": "internvl",
        "downsample_ratio": data.get("downsample_ratio", 0.5),
        "tie_word_embeddings": tied,
        "text_config": {**text, "tie_word_embeddings": tied},
        "vision_config": {
            **{name: value for name, value in vision.items() if name not in _RENAMED},
            **{new: vision.get(old, default) for old, (new, default) in _RENAMED.items()},
            "model_type": "internvl_vision",
            "use_mean_pooling": True,  # with this, transformers has no norm after the last block
        },
    }
    context = _context_id(folder, str(llm.get("model_type")))
    return fields if context is None else {**fields, "image_token_id": context}


# Field of the authors' vision config -> (field of transformers, the authors' default).
_RENAMED = {
    "qkv_bias": ("attention_bias", False),
    "qk_normalization": ("use_qk_norm", True),
    "norm_type": ("norm_type", "rms_norm"),
    "initializer_factor": ("layer_scale_init_value", 0.1),
}


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = data.get(name)
    if not isinstance(section, Mapping):
        raise TesseraError(
            f"config.json has no section {name}",
            where=WHERE,
            fix="download the folder again, or use the folder whose name ends in -hf",
            code="model.section-missing",
        )
    return section


def _text(llm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text decoder.

    InternLM2 is a Llama with a single projection for queries, keys and values.
    """
    if llm.get("model_type") != "internlm2":
        return dict(llm)
    check_supported([("llm_config.bias", bool(llm.get("bias", True)), (False,))], WHERE)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return {"vocab_size": 103168, **tokens, **llm, "model_type": "llama"}


def _context_id(folder: Path, model_type: str) -> int | None:
    """Return the id of the placeholder token of images: from the tokenizer files, else that of published models."""
    if (folder / "added_tokens.json").is_file():
        number = read_json_mapping(folder / "added_tokens.json").get(CONTEXT)
        if type(number) is int:
            return number
    if (folder / "tokenizer.json").is_file():
        added = read_json_mapping(folder / "tokenizer.json", _MAX_BYTES).get("added_tokens")
        for token in added if isinstance(added, list) else ():
            if isinstance(token, dict) and token.get("content") == CONTEXT and type(token.get("id")) is int:
                return int(token["id"])
    return _CONTEXT_IDS.get(model_type)


def is_original(folder: Path) -> bool:
    """Return whether a folder's config.json has the authors' format (`internvl_chat`)."""
    path = folder / CONFIG_FILE
    return path.is_file() and read_json_mapping(path).get("model_type") == MODEL_TYPE


def tile_settings(folder: Path) -> dict[str, Any]:
    """Return the folder's settings for cutting images into tiles, with the keys of Hugging Face preprocessor files."""
    data = read_json_mapping(folder / CONFIG_FILE)
    cut = bool(data.get("dynamic_image_size"))
    check_supported(
        [
            # Templates of earlier models have no newline after a turn.
            ("template", data.get("template"), ("internvl2_5",)),
            ("use_thumbnail", not cut or bool(data.get("use_thumbnail")), (True,)),
        ],
        WHERE,
    )
    least, most = data.get("min_dynamic_patch", 1), data.get("max_dynamic_patch", 6)
    if type(least) is not int or type(most) is not int or not 0 < least <= most:
        raise TesseraError(
            f"min_dynamic_patch = {least} and max_dynamic_patch = {most} must be 1 <= min <= max",
            where=WHERE,
            code="model.invalid-value",
        )
    return {"min_patches": least if cut else 1, "max_patches": most if cut else 1}


def system_message(folder: Path) -> str | None:
    """Return the system message in config.json.

    A system message in the folder's Python code is not used; recipes can set data.processor.system.
    """
    message = read_json_mapping(folder / CONFIG_FILE).get("system_message")
    return message if isinstance(message, str) and message else None


# ---------------------------------------------------------------------------------------------- names

_EMBEDDINGS = "vision_model.embeddings."
_LAYER = "vision_model.encoder.layers.{i}."
_PAIRS = (
    ("vision.patch_embed.bias", _EMBEDDINGS + "patch_embedding.bias"),
    ("vision.blocks.{i}.attn_norm.{kind}", _LAYER + "norm1.{kind}"),
    ("vision.blocks.{i}.attn.q_norm.weight", _LAYER + "attn.q_norm.weight"),
    ("vision.blocks.{i}.attn.k_norm.weight", _LAYER + "attn.k_norm.weight"),
    ("vision.blocks.{i}.attn.proj.{kind}", _LAYER + "attn.proj.{kind}"),
    ("vision.blocks.{i}.attn_scale.weight", _LAYER + "ls1"),
    ("vision.blocks.{i}.mlp_norm.{kind}", _LAYER + "norm2.{kind}"),
    ("vision.blocks.{i}.mlp.up.{kind}", _LAYER + "mlp.fc1.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", _LAYER + "mlp.fc2.{kind}"),
    ("vision.blocks.{i}.mlp_scale.weight", _LAYER + "ls2"),
    ("projector.norm.{kind}", "mlp1.0.{kind}"),
    ("projector.up.{kind}", "mlp1.1.{kind}"),
    ("projector.down.{kind}", "mlp1.3.{kind}"),
)
_TEXT = "language_model.model."
_LM_LAYER = _TEXT + "layers.{i}."
_INTERNLM_PAIRS = (
    ("text.embed.weight", _TEXT + "tok_embeddings.weight"),
    ("text.layers.{i}.attn_norm.weight", _LM_LAYER + "attention_norm.weight"),
    ("text.layers.{i}.attn.o.weight", _LM_LAYER + "attention.wo.weight"),
    ("text.layers.{i}.mlp_norm.weight", _LM_LAYER + "ffn_norm.weight"),
    ("text.layers.{i}.mlp.gate.weight", _LM_LAYER + "feed_forward.w1.weight"),
    ("text.layers.{i}.mlp.down.weight", _LM_LAYER + "feed_forward.w2.weight"),
    ("text.layers.{i}.mlp.up.weight", _LM_LAYER + "feed_forward.w3.weight"),
)


def original_weights(config: InternVLConfig) -> WeightMap:
    """Return the weight map of an `internvl_chat` folder with a Qwen or Llama decoder."""
    head = "language_model.lm_head.weight"
    table = language_weights(config.text, config.tie_word_embeddings, _vision(config), prefix=_TEXT, head=head)
    return replace(table, mark=_EMBEDDINGS + "class_embedding")


def internlm_weights(config: InternVLConfig) -> WeightMap:
    """Return the weight map of an `internvl_chat` folder with an InternLM2 decoder."""
    text, head = config.text, "language_model.output.weight"
    rows = (text.num_attention_heads // text.num_key_value_heads * text.head_size, text.head_size, text.head_size)
    rules = [Rule(native, foreign) for native, foreign in _INTERNLM_PAIRS]
    rules += [
        Rule(f"text.layers.{{i}}.attn.{kind}.weight", _LM_LAYER + "attention.wqkv.weight", GroupedRows(n, 3, rows=rows))
        for n, kind in enumerate("qkv")
    ]
    first = (*_vision(config), *rules)
    table = language_weights(text, config.tie_word_embeddings, first, prefix=_TEXT, head=head)
    return replace(table, mark=_TEXT + "tok_embeddings.weight")


def _vision(config: InternVLConfig) -> list[Rule]:
    names = (f"{_EMBEDDINGS}{name}" for name in ("patch_embedding.weight", "position_embedding", "class_embedding"))
    by_kind = GroupByHead(config.vision.num_attention_heads)
    qkv = Rule("vision.blocks.{i}.attn.qkv.{kind}", _LAYER + "attn.qkv.{kind}", by_kind)
    return [qkv, *embedding_rules(config, *names), *(Rule(native, foreign) for native, foreign in _PAIRS)]


def embedding_rules(config: InternVLConfig, patch_embed: str, table: str, class_token: str) -> list[Rule]:
    """Return the weight rules of tensors that folders store in another shape. Arguments: their names in folders."""
    vision = config.vision
    hidden, patch = vision.hidden_size, vision.patch_size
    as_convolution = Reshape((hidden, vision.patch_values), (hidden, vision.num_channels, patch, patch))
    as_table = Reshape((vision.tile_patches, hidden), (1, vision.tile_patches, hidden))
    return [
        Rule("vision.patch_embed.weight", patch_embed, as_convolution),
        Rule("vision.table.weight", table, as_table),
        Rule("vision.table.class_token", class_token, Reshape((hidden,), (1, 1, hidden))),
    ]
