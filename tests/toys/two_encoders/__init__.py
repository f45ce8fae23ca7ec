"""A family with two encoders and, if asked for, two heads: patches of images and frames of audio become elements of one
decoder's sequence, whose hidden states are read by a head for tokens and a head for codes of audio.

The encoders differ in everything that a split depends on: width, number of heads, layers, and elements that make one
token.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from tessera.config.reader import Section
from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, Stream, TensorStyle
from tessera.core.outputs import LANGUAGE_OUTPUTS
from tessera.core.spec import Component, ModelSpec
from tessera.models.text.decoder import TEXT_STREAM
from tessera.nn.decoder import DecoderShape, TextDecoder
from tessera.nn.multimodal import Encoder, MultimodalModel
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import VisionBlock, VisionShape
from tessera.ops.pointwise import Rope

PER_SLOT = 4  # elements of either encoder that make one token
CODES = "codes"  # the output of the second head


class TwoEncoderConfig(Section):
    vocab: int = 64
    hidden: int = 32
    layers: int = 2
    image_hidden: int = 32
    image_layers: int = 2
    audio_hidden: int = 16
    audio_layers: int = 2
    values: int = 6  # numbers in a patch, and in a frame
    codes: int = 0  # entries of the second head's vocabulary; 0: there is no second head


class SequenceEncoder(nn.Module):
    """Read `tensor` [elements, values] of a batch; attention stays inside of the segments of the same stream."""

    def __init__(self, tensor: str, segments: str, values: int, shape: VisionShape) -> None:
        super().__init__()
        self.tensor, self.segments, self.width = tensor, segments, shape.hidden
        self.embed: nn.Linear | None = nn.Linear(values, shape.hidden)
        self.blocks = nn.ModuleList(VisionBlock(shape) for _ in range(shape.layers))

    def forward(self, batch: Batch, carry: Tensor | None = None) -> Tensor:
        elements = batch[self.tensor]
        if self.embed is not None:
            x: Tensor = self.embed(elements)
        else:
            assert carry is not None
            x = carry[: elements.shape[0], : self.width]
        for block in self.blocks:
            if block is not None:
                x = block(x, None, batch.segments[self.segments])
        return x


def blank(tensor: str, segments: str, values: int, device: torch.device) -> Batch:
    bounds = torch.arange(2, device=device, dtype=torch.int32) * PER_SLOT
    zeros = torch.zeros(PER_SLOT, values, device=device)
    return Batch({tensor: zeros}, {segments: Segments(bounds, PER_SLOT, (PER_SLOT,))})


def streams(config: TwoEncoderConfig) -> dict[str, Stream]:
    return {
        "image": Stream(
            tensors=("patches",),
            segments="image",
            module="image",
            projector="image_projector",
            slots="image_slots",
            per_slot=PER_SLOT,
            width=config.image_hidden,
            blank=partial(blank, "patches", "image", config.values),
        ),
        "audio": Stream(
            tensors=("frames",),
            segments="audio",
            module="audio",
            projector="audio_projector",
            slots="audio_slots",
            per_slot=PER_SLOT,
            width=config.audio_hidden,
            blank=partial(blank, "frames", "audio", config.values),
        ),
        "text": TEXT_STREAM,
    }


def shape(values: int, hidden: int, layers: int, heads: int) -> VisionShape:
    return VisionShape(values, hidden, 2 * hidden, layers, heads, merge=2, activation="gelu", rope_theta=None)


def build(config: TwoEncoderConfig) -> MultimodalModel:
    image = shape(config.values, config.image_hidden, config.image_layers, 4)
    audio = shape(config.values, config.audio_hidden, config.audio_layers, 2)
    text = TextDecoder(
        DecoderShape(
            vocab=config.vocab,
            hidden=config.hidden,
            intermediate=2 * config.hidden,
            layers=config.layers,
            heads=4,
            kv_heads=2,
            head_dim=config.hidden // 4,
            norm_eps=1e-6,
            rope=Rope(config.hidden // 4, 1e4),
        )
    )
    inputs = streams(config)
    model = MultimodalModel(
        [Encoder(inputs[name], config.hidden) for name in ("image", "audio")],
        {
            "image": SequenceEncoder("patches", "image", config.values, image),
            "image_projector": PatchMerger(image.hidden, image.merge, config.hidden),
            "audio": SequenceEncoder("frames", "audio", config.values, audio),
            "audio_projector": PatchMerger(audio.hidden, audio.merge, config.hidden),
        },
        text,
        nn.Linear(config.hidden, config.vocab, bias=False),
        0.2,
    )
    if config.codes:
        model.add_head(CODES, "code_head", nn.Linear(config.hidden, config.codes, bias=False))
    return model


def plan(config: TwoEncoderConfig) -> ModelPlan:
    either = "{image,audio}"
    styles: dict[str, TensorStyle] = {
        f"{either}.embed.{{weight,bias}}": "replicate",
        f"{either}.blocks.{{*}}.{{attn_norm,mlp_norm}}.{{weight,bias}}": "replicate",
        f"{either}.blocks.{{*}}.attn.qkv.{{weight,bias}}": "column",
        f"{either}.blocks.{{*}}.attn.proj.weight": "row",
        f"{either}.blocks.{{*}}.attn.proj.bias": "replicate",
        f"{either}.blocks.{{*}}.mlp.up.{{weight,bias}}": "column",
        f"{either}.blocks.{{*}}.mlp.down.weight": "row",
        f"{either}.blocks.{{*}}.mlp.down.bias": "replicate",
        "{image_projector,audio_projector}.norm.{weight,bias}": "replicate",
        "{image_projector,audio_projector}.up.{weight,bias}": "column",
        "{image_projector,audio_projector}.down.weight": "row",
        "{image_projector,audio_projector}.down.bias": "replicate",
        "text.embed.weight": "vocab",
        "text.layers.{*}.{attn_norm,mlp_norm}.weight": "sequence",
        "text.layers.{*}.attn.{q,k,v}.weight": "column",
        "text.layers.{*}.attn.o.weight": "row",
        "text.layers.{*}.mlp.{gate,up}.weight": "column",
        "text.layers.{*}.mlp.down.weight": "row",
        "text.norm.weight": "sequence",
        "head.weight": "vocab",
        **({"code_head.weight": "vocab"} if config.codes else {}),
    }
    # Inside of the second encoder the embeddings of the first one travel along: at most one for each token.
    second = StageActivation(PER_SLOT + 1, max(config.hidden, config.audio_hidden))
    decoder = StageActivation(1, config.hidden)
    return ModelPlan(
        blocks=("{image,audio}.blocks.{*}", "text.layers.{*}"),
        tensor=styles,
        units=(
            PipelineUnit("image.embed", 0.0),
            PipelineUnit("image.blocks.{*}", 1.0, "image", StageActivation(PER_SLOT, config.image_hidden)),
            PipelineUnit("image_projector", 0.5),
            PipelineUnit("audio.embed", 0.0, output=second),
            PipelineUnit("audio.blocks.{*}", 1.0, "audio", second),
            PipelineUnit("audio_projector", 0.5),
            PipelineUnit("text.embed", 0.0, output=decoder),
            PipelineUnit("text.layers.{*}", 1.0, "text", decoder),
            PipelineUnit("text.norm", 0.0),
            PipelineUnit("head", 1.0),
            *([PipelineUnit("code_head", 1.0)] if config.codes else []),
        ),
        streams=streams(config),
        attention=("{image,audio}.blocks.{*}.attn.core", "text.layers.{*}.attn.core"),
        heads={
            "image.blocks.{*}.attn.qkv": 4,
            "audio.blocks.{*}.attn.qkv": 2,
            "text.layers.{*}.attn.q": 4,
            "text.layers.{*}.attn.{k,v}": 2,
        },
        fsdp_root=("text.embed", "head", *(["code_head"] if config.codes else [])),
    )


def example(config: TwoEncoderConfig, tokens: int) -> Batch:
    """Return one text, a quarter of it from each encoder. Inputs are four sequences, which ranks can share evenly."""
    words, quarter = torch.zeros(tokens, dtype=torch.int64), tokens // 4
    slots = torch.arange(tokens)
    elements = torch.zeros(quarter * PER_SLOT, config.values)
    return Batch(
        {
            "tokens": words,
            "labels": words,
            "positions": slots,
            "patches": elements,
            "image_slots": slots[:quarter].clone(),
            "frames": elements.clone(),
            "audio_slots": slots[quarter : 2 * quarter].clone(),
        },
        {"text": Segments.of([tokens]), **{name: Segments.of([len(elements) // 4] * 4) for name in ("image", "audio")}},
        counts={"tokens": tokens},
        seeds=(0,),
    )


SPEC = ModelSpec(
    name="two_encoders",
    config=TwoEncoderConfig,
    main=Component(build=build, plan=plan),
    presets={"tiny": {}},
    example=example,
    outputs=(*LANGUAGE_OUTPUTS, CODES),
)
