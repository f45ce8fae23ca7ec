"""Names and splits of vision-language models in the rank files of MindSpeed-MM jobs, one function per family."""

from __future__ import annotations

from collections.abc import Iterable

from tessera.models.internvl.config import InternVLConfig
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.text.decoder import TextConfig
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import GroupByHead, GroupedRows, Reshape, Stack, TensorChunk
from tessera_compat.shards.form import (
    COLUMNS,
    GATE_AND_UP,
    ROWS,
    EvenSplit,
    MegatronForm,
    PipelinePart,
    TensorSplit,
)

_TEXT = "text_decoder.decoder.layers.{i}."
_BLOCK = "image_encoder.encoder.blocks.layers.{i}."
_TEXT_PAIRS = (
    ("text.embed.weight", "text_decoder.embedding.word_embeddings.weight"),
    ("text.layers.{i}.attn_norm.weight", _TEXT + "input_layernorm.weight"),
    ("text.layers.{i}.attn.q_norm.weight", _TEXT + "self_attention.q_layernorm.weight"),
    ("text.layers.{i}.attn.k_norm.weight", _TEXT + "self_attention.k_layernorm.weight"),
    ("text.layers.{i}.attn.o.weight", _TEXT + "self_attention.linear_proj.weight"),
    ("text.layers.{i}.mlp_norm.weight", _TEXT + "pre_mlp_layernorm.weight"),
    ("text.layers.{i}.mlp.down.weight", _TEXT + "mlp.linear_fc2.weight"),
    ("text.layers.{i}.mlp.router.weight", _TEXT + "mlp.router.weight"),
    ("text.norm.weight", "text_decoder.decoder.final_layernorm.weight"),
)
_GRID_PAIRS = (
    ("vision.patch_embed.bias", "image_encoder.encoder.patch_embed.proj.bias"),
    ("vision.table.weight", "image_encoder.encoder.pos_embed.weight"),
    ("vision.blocks.{i}.attn_norm.{kind}", _BLOCK + "input_layernorm.{kind}"),
    # Tessera and Megatron both order the rows of this projection by head.
    ("vision.blocks.{i}.attn.qkv.{kind}", _BLOCK + "self_attention.linear_qkv.{kind}"),
    ("vision.blocks.{i}.attn.proj.{kind}", _BLOCK + "self_attention.linear_proj.{kind}"),
    ("vision.blocks.{i}.mlp_norm.{kind}", _BLOCK + "pre_mlp_layernorm.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", _BLOCK + "mlp.linear_fc2.{kind}"),
)
_PROJECTOR = "image_encoder.projector."
_TEXT_SPLITS: tuple[tuple[str, TensorSplit], ...] = (
    (r"text_decoder\.(embedding\.word_embeddings|output_layer)\.weight", ROWS),
    (r"text_decoder\.decoder\..*\.linear_qkv\.(weight|bias)", ROWS),
    (r"text_decoder\.decoder\..*\.linear_proj\.weight", COLUMNS),
    (r"text_decoder\.decoder\..*\.linear_fc1\.weight", GATE_AND_UP),
    (r"text_decoder\.decoder\..*\.linear_fc2\.weight", COLUMNS),
)


def _text_part(text: TextConfig) -> PipelinePart:
    """Describe how pipeline stages divide the text decoder."""
    last = ("text_decoder.decoder.final_layernorm.", "text_decoder.output_layer.")
    return PipelinePart(
        "llm", "text_decoder.decoder.layers.", ("text_decoder.embedding.",), last, text.num_hidden_layers
    )


def _text_rules(text: TextConfig, tied: bool) -> list[Rule]:
    """Return the name rules of a text decoder and its output layer."""
    rules = [Rule(native, foreign) for native, foreign in _TEXT_PAIRS]
    head = text.head_size
    rows = (head * text.num_attention_heads // text.num_key_value_heads, head, head)
    for number, kind in enumerate("qkv"):
        native, foreign = f"text.layers.{{i}}.attn.{kind}.{{kind}}", _TEXT + "self_attention.linear_qkv.{kind}"
        rules.append(Rule(native, foreign, GroupedRows(number, 3, rows=rows)))
    for number, kind in enumerate(("gate", "up")):
        foreign = _TEXT + "mlp.linear_fc1.weight"
        rules.append(Rule(f"text.layers.{{i}}.mlp.{kind}.weight", foreign, TensorChunk(number, 2)))
    if text.experts is not None:
        expert = _TEXT + "mlp.experts.local_experts.{n}."
        both, down = (
            tuple(expert.replace("{n}", str(number)) + name for number in range(text.experts.num_experts))
            for name in ("linear_fc1.weight", "linear_fc2.weight")
        )
        rules += [
            Rule("text.layers.{i}.mlp.experts.gate", both, TensorChunk(0, 2, 1, Stack())),
            Rule("text.layers.{i}.mlp.experts.up", both, TensorChunk(1, 2, 1, Stack())),
            Rule("text.layers.{i}.mlp.experts.down", down, Stack()),
        ]
    if not tied:
        rules.append(Rule("head.weight", "text_decoder.output_layer.weight"))
    return rules


_MERGER = (
    ("projector.norm.{kind}", "layernorm.{kind}"),
    ("projector.up.{kind}", "encoder.linear_fc1.{kind}"),
    ("projector.down.{kind}", "encoder.linear_fc2.{kind}"),
)


def grid_form(
    config: Qwen2VLConfig | Qwen25VLConfig | Qwen3VLConfig | Qwen25OmniConfig,
    width: int,
    *,
    gated: bool = False,
    projector: Iterable[tuple[str, str]] = _MERGER,
    more: Iterable[tuple[str, str]] = (),
    extra_splits: Iterable[tuple[str, TensorSplit]] = (),
) -> MegatronForm:
    """Describe the rank files of a family with a grid vision encoder. `width`: hidden size of the encoder.

    `gated`: the encoder's MLPs have a gate. `projector`: pairs (name in Tessera, Megatron name) of the projector's
    tensors. `more`: pairs of other tensors.
    """
    text, tied, vision = config.text, config.tie_word_embeddings, config.vision
    patch = (vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    as_convolution = Reshape((width, vision.patch_values), (width, *patch))
    rules = [Rule("vision.patch_embed.weight", "image_encoder.encoder.patch_embed.proj.weight", as_convolution)]
    rules += [Rule(native, foreign) for native, foreign in (*_GRID_PAIRS, *more)]
    rules += [Rule(native, _PROJECTOR + foreign) for native, foreign in projector]
    first = _BLOCK + "mlp.linear_fc1.{kind}"
    if gated:
        for number, kind in enumerate(("gate", "up")):
            rules.append(Rule(f"vision.blocks.{{i}}.mlp.{kind}.{{kind}}", first, TensorChunk(number, 2)))
    else:
        rules.append(Rule("vision.blocks.{i}.mlp.up.{kind}", first))
    encoder = r"image_encoder\.encoder\.blocks\.layers\.\d+\."
    splits: tuple[tuple[str, TensorSplit], ...] = (
        (encoder + r"self_attention\.linear_qkv\.(weight|bias)", ROWS),
        (encoder + r"self_attention\.linear_proj\.weight", COLUMNS),
        (encoder + r"mlp\.linear_fc1\.(weight|bias)", GATE_AND_UP if gated else ROWS),
        (encoder + r"mlp\.linear_fc2\.weight", COLUMNS),
        (r"image_encoder\.projector\.encoder\.linear_fc1\.(weight|bias)", ROWS),
        (r"image_encoder\.projector\.encoder\.linear_fc2\.weight", COLUMNS),
    )
    begin = ("image_encoder.encoder.patch_embed.", "image_encoder.encoder.pos_embed.")
    part = PipelinePart("vit", "image_encoder.encoder.blocks.layers.", begin, (_PROJECTOR,), vision.depth)
    return MegatronForm(
        WeightMap((*rules, *_text_rules(text, tied))),
        (*splits, *extra_splits, *_TEXT_SPLITS),
        (part, _text_part(text)),
        kv_heads=text.num_key_value_heads,
        experts=text.experts.num_experts if text.experts is not None else 0,
        tied=tied,
    )


def qwen2_vl(config: Qwen2VLConfig) -> MegatronForm:
    """Describe the rank files of Qwen2-VL."""
    return grid_form(config, config.vision.embed_dim)


def qwen2_5_vl(config: Qwen25VLConfig) -> MegatronForm:
    """Describe the rank files of Qwen2.5-VL."""
    return grid_form(config, config.vision.hidden_size, gated=True)


def qwen3_vl(config: Qwen3VLConfig) -> MegatronForm:
    """Describe the rank files of Qwen3-VL. A DeepStack merger is stored in the block whose output it reads."""
    vision, deep = config.vision, "image_encoder.encoder.blocks.layers.{block}.deepstack_layer."
    more = [
        (f"projector.taps.{tap}.{native}.{{kind}}", deep.replace("{block}", str(block)) + f"{theirs}.{{kind}}")
        for tap, block in enumerate(vision.deepstack_visual_indexes)
        for native, theirs in (("norm", "layernorm"), ("up", "encoder.linear_fc1"), ("down", "encoder.linear_fc2"))
    ]
    return grid_form(
        config,
        vision.hidden_size,
        projector=[(native.replace("projector.", "projector.last."), theirs) for native, theirs in _MERGER],
        more=more,
        extra_splits=(
            (r".*\.deepstack_layer\.encoder\.linear_fc1\.(weight|bias)", ROWS),
            (r".*\.deepstack_layer\.encoder\.linear_fc2\.weight", COLUMNS),
        ),
    )


_INTERN_LAYER = "image_encoder.encoder.encoder.layers.{i}."
_INTERN_EMBEDDINGS = "image_encoder.encoder.embeddings."
_INTERN_PAIRS = (
    ("vision.patch_embed.bias", _INTERN_EMBEDDINGS + "patch_embedding.bias"),
    ("vision.blocks.{i}.attn_norm.{kind}", _INTERN_LAYER + "input_layernorm.{kind}"),
    ("vision.blocks.{i}.attn.q_norm.weight", _INTERN_LAYER + "self_attention.q_layernorm.weight"),
    ("vision.blocks.{i}.attn.k_norm.weight", _INTERN_LAYER + "self_attention.k_layernorm.weight"),
    ("vision.blocks.{i}.attn.proj.{kind}", _INTERN_LAYER + "self_attention.linear_proj.{kind}"),
    ("vision.blocks.{i}.attn_scale.weight", _INTERN_LAYER + "ls1"),
    ("vision.blocks.{i}.mlp_norm.{kind}", _INTERN_LAYER + "pre_mlp_layernorm.{kind}"),
    ("vision.blocks.{i}.mlp.up.{kind}", _INTERN_LAYER + "mlp.linear_fc1.{kind}"),
    ("vision.blocks.{i}.mlp.down.{kind}", _INTERN_LAYER + "mlp.linear_fc2.{kind}"),
    ("vision.blocks.{i}.mlp_scale.weight", _INTERN_LAYER + "ls2"),
    ("projector.norm.{kind}", "image_encoder.projector.norm.{kind}"),
    ("projector.up.{kind}", "image_encoder.projector.linear_fc1.{kind}"),
    ("projector.down.{kind}", "image_encoder.projector.linear_fc2.{kind}"),
)


def internvl(config: InternVLConfig) -> MegatronForm:
    """Describe the rank files of InternVL.

    The encoder has the names of the original repository; its fused projection contains queries, then keys, then values.
    If heads do not divide evenly, the first ranks have one head more.
    """
    vision = config.vision
    hidden, patch, heads = vision.hidden_size, vision.patch_size, vision.num_attention_heads
    rules = [
        Rule(
            "vision.patch_embed.weight",
            _INTERN_EMBEDDINGS + "patch_embedding.weight",
            Reshape((hidden, vision.patch_values), (hidden, vision.num_channels, patch, patch)),
        ),
        Rule(
            "vision.table.weight",
            _INTERN_EMBEDDINGS + "position_embedding",
            Reshape((vision.tile_patches, hidden), (1, vision.tile_patches, hidden)),
        ),
        Rule("vision.table.class_token", _INTERN_EMBEDDINGS + "class_embedding", Reshape((hidden,), (1, 1, hidden))),
        Rule(
            "vision.blocks.{i}.attn.qkv.{kind}", _INTERN_LAYER + "self_attention.linear_qkv.{kind}", GroupByHead(heads)
        ),
        *(Rule(native, foreign) for native, foreign in _INTERN_PAIRS),
    ]
    layer = r"image_encoder\.encoder\.encoder\.layers\.\d+\."
    part = PipelinePart(
        "vit",
        "image_encoder.encoder.encoder.layers.",
        (_INTERN_EMBEDDINGS,),
        ("image_encoder.projector.",),
        vision.num_hidden_layers,
    )
    return MegatronForm(
        WeightMap((*rules, *_text_rules(config.text, config.tie_word_embeddings))),
        (
            (layer + r"self_attention\.linear_qkv\.(weight|bias)", EvenSplit(blocks=3, units=heads)),
            (layer + r"self_attention\.linear_proj\.weight", EvenSplit(dim=1, units=heads)),
            (layer + r"mlp\.linear_fc1\.(weight|bias)", ROWS),
            (layer + r"mlp\.linear_fc2\.weight", COLUMNS),
            *_TEXT_SPLITS,
        ),
        (part, _text_part(config.text)),
        kv_heads=config.text.num_key_value_heads,
        tied=config.tie_word_embeddings,
    )
