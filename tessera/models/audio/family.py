"""Declare families with audio input: a family states its differences; model, plan and FLOPs follow."""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import PipelineUnit, StageActivation, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.models.audio.config import ChunkAudioConfig
from tessera.models.audio.processor import AUDIO, AUDIO_STREAMS, MEL
from tessera.models.media_family import MediaFamily, Tower
from tessera.models.text.costs import Measures, example_batch
from tessera.models.text.decoder import TextConfig, layer_weights
from tessera.nn.audio import AudioEncoder, AudioShape, blank_clip, stored_sinusoids
from tessera.nn.multimodal import Encoder
from tessera.nn.projector import MLPProjector
from tessera.weights.map import Rule
from tessera.weights.operations import Reshape

AUDIO_BLOCKS = "audio.blocks.{*}"
EXAMPLE_CLIPS = 16  # minimum number of recordings in an example batch: usual numbers of data-parallel ranks divide it


class AudioFamily(MediaFamily):
    """Declare a family with an audio encoder, a projector and a text decoder. Its configuration has the field
    `audio`."""

    @abstractmethod
    def audio_shape(self, config: Any) -> AudioShape: ...

    @abstractmethod
    def audio_projector(self, config: Any, shape: AudioShape) -> nn.Module: ...

    def example(self, config: Any, tokens: int) -> Batch:
        """Return a batch in which recordings of one length make up about half of the tokens."""
        return with_clips(example_batch(tokens), self.audio_shape(config), tokens // 2)

    def towers(self, config: Any) -> dict[str, Tower]:
        shape = self.audio_shape(config)
        stream = replace(MEL, per_slot=shape.pool, width=shape.hidden, blank=functools.partial(blank_clip, shape))
        projector = _projector_parameters(self, config)
        costs = AudioCosts(shape, sum(parameter.numel() for parameter in projector.values() if parameter.dim() == 2))
        initial = {"audio.table.weight": stored_sinusoids} if shape.positions else {}
        audio = Tower(
            media=replace(AUDIO_STREAMS[AUDIO], stream=stream),
            encoder=Encoder(stream, config.text.hidden_size, initial=initial),
            build=lambda: {AUDIO: AudioEncoder(shape), "audio_projector": self.audio_projector(config, shape)},
            blocks=AUDIO_BLOCKS,
            heads={f"{AUDIO_BLOCKS}.attn.{{q,k,v}}": shape.heads},
            styles={**audio_styles(shape), **{f"audio_projector.{name}": _style(name) for name in projector}},
            units=_units(config.text, costs),
            work=costs.work,
        )
        return {**super().towers(config), AUDIO: audio}


class ChunkAudioFamily(AudioFamily):
    """Declare a family whose audio encoder has a `ChunkAudioConfig`, followed by an MLP projector."""

    def audio_shape(self, config: Any) -> AudioShape:
        audio: ChunkAudioConfig = config.audio
        return audio.shape(config.attention, channels=audio.downsample_hidden_size, key_bias=True)

    def audio_projector(self, config: Any, shape: AudioShape) -> nn.Module:
        return MLPProjector(shape.hidden, config.text.hidden_size, inner=shape.hidden, activation=shape.activation)


@dataclass(frozen=True)
class AudioCosts:
    """Hold the sizes that determine the FLOPs of an audio encoder and its projector."""

    shape: AudioShape
    projector_weights: int  # number of weights that a token is multiplied by in the projector

    def work(self, measures: Measures, training: Training) -> np.ndarray:
        """Return the FLOPs of encoder and projector for each sample."""
        shape = self.shape
        elements, pairs = (measures[name].astype(np.float64) for name in ("audio_frames", "audio_pairs"))
        encoder, projector = training.get(AUDIO, FULL), training.get("audio_projector", FULL)
        first, *others = shape.conv_products
        total: np.ndarray = (
            encoder.weights * 2 * elements * (shape.layers * shape.block_weights + sum(others))
            + projector.weights * 2 * elements / shape.pool * self.projector_weights
            + encoder.attention * 4 * shape.layers * shape.hidden * pairs
            + encoder.first * 2 * elements * first
        )
        return total


def audio_styles(shape: AudioShape) -> dict[str, TensorStyle]:
    """Return the tensor-parallel style of every parameter of an audio encoder."""
    styles: dict[str, TensorStyle] = {
        "audio.convs.{*}.{weight,bias}": "replicate",
        "audio.blocks.{*}.{attn_norm,mlp_norm}.{weight,bias}": "replicate",
        "audio.blocks.{*}.attn.{q,v}.{weight,bias}": "column",
        f"audio.blocks.{{*}}.attn.k.{'{weight,bias}' if shape.key_bias else 'weight'}": "column",
        "audio.blocks.{*}.attn.proj.weight": "row",
        "audio.blocks.{*}.attn.proj.bias": "replicate",
        "audio.blocks.{*}.mlp.up.{weight,bias}": "column",
        "audio.blocks.{*}.mlp.down.weight": "row",
        "audio.blocks.{*}.mlp.down.bias": "replicate",
    }
    replicated = {"table.weight": shape.positions > 0, "norm_after.{weight,bias}": shape.norm_after}
    return {**styles, **{f"audio.{name}": "replicate" for name, present in replicated.items() if present}}


def audio_rules(shape: AudioShape, prefix: str, last_norm: str) -> list[Rule]:
    """Return the weight rules of an audio encoder.

    `prefix`: prefix of its parameter names in weight files. `last_norm`: path of the norm after the last block in the
    model.
    """
    pairs = [
        ("audio.blocks.{i}.attn_norm.{kind}", "layers.{i}.self_attn_layer_norm.{kind}"),
        ("audio.blocks.{i}.attn.proj.{kind}", "layers.{i}.self_attn.out_proj.{kind}"),
        ("audio.blocks.{i}.attn.{part}.{kind}", "layers.{i}.self_attn.{part}_proj.{kind}"),
        ("audio.blocks.{i}.mlp_norm.{kind}", "layers.{i}.final_layer_norm.{kind}"),
        ("audio.blocks.{i}.mlp.up.{kind}", "layers.{i}.fc1.{kind}"),
        ("audio.blocks.{i}.mlp.down.{kind}", "layers.{i}.fc2.{kind}"),
    ]
    rules = [Rule(native, prefix + foreign) for native, foreign in pairs]
    if shape.channels:
        names = (("first", "conv2d1"), ("second", "conv2d2"), ("third", "conv2d3"), ("proj", "conv_out"))
        rules += [Rule(f"audio.convs.{ours}.{{kind}}", f"{prefix}{theirs}.{{kind}}") for ours, theirs in names]
        return [*rules, Rule(f"{last_norm}.{{kind}}", prefix + "ln_post.{kind}")]
    for ours, theirs, before in (("first", "conv1", shape.bins), ("second", "conv2", shape.hidden)):
        as_convolution = Reshape((shape.hidden, 3 * before), (shape.hidden, before, 3))
        rules.append(Rule(f"audio.convs.{ours}.weight", f"{prefix}{theirs}.weight", as_convolution))
        rules.append(Rule(f"audio.convs.{ours}.bias", f"{prefix}{theirs}.bias"))
    stored = [Rule("audio.table.weight", prefix + "embed_positions.weight")] if shape.positions else []
    norm = "layer_norm" if shape.positions else "ln_post"
    return [*rules, *stored, Rule(f"{last_norm}.{{kind}}", f"{prefix}{norm}.{{kind}}")]


def with_clips(batch: Batch, shape: AudioShape, tokens: int) -> Batch:
    """Add recordings of equal length to an example batch. Their embeddings replace about the last `tokens` tokens.

    No recording has more audio frames than the encoder has stored position embeddings.
    """
    longest = shape.positions // shape.pool if shape.positions else max(1, tokens)
    count = max(1, min(max(EXAMPLE_CLIPS, -(-tokens // longest)), tokens))
    each = max(1, tokens // count)
    elements = each * shape.pool
    index = torch.arange(elements).repeat(count)
    total = batch["tokens"].shape[0]
    media = {
        "mel": torch.zeros(count * elements, shape.bins * shape.window),
        "mel_positions": torch.stack([index, torch.full_like(index, elements * shape.stride)], dim=1),
        "audio_slots": torch.arange(total - count * each, total),
    }
    segments = {**batch.segments, AUDIO: Segments.of([elements] * count)}
    return replace(batch, tensors={**batch.tensors, **media}, segments=segments)


@functools.lru_cache(maxsize=8)
def _projector_parameters(family: AudioFamily, config: Any) -> dict[str, nn.Parameter]:
    """Return the projector's parameters on the meta device. Cached, because costs are computed for every batch."""
    with torch.device("meta"):
        return dict(family.audio_projector(config, family.audio_shape(config)).named_parameters())


def _style(name: str) -> TensorStyle:
    """Return the tensor-parallel style of a projector's parameter: column-parallel `up`, then row-parallel `down`."""
    layer, kind = name.rpartition(".")[::2]
    return "column" if layer == "up" else "row" if (layer, kind) == ("down", "weight") else "replicate"


def _units(text: TextConfig, costs: AudioCosts) -> tuple[PipelineUnit, ...]:
    """Return the pipeline units of the encoder. Their cost is the number of multiplications per audio token, divided by
    that of a text layer."""
    shape, layer = costs.shape, layer_weights(text)
    output = StageActivation(shape.pool, shape.hidden)
    return (
        PipelineUnit("audio.convs", shape.pool * sum(shape.conv_products) / layer),
        *([PipelineUnit("audio.table", 0.0)] if shape.positions else []),
        PipelineUnit(AUDIO_BLOCKS, shape.pool * shape.block_weights / layer, AUDIO, output),
        *([PipelineUnit("audio.norm_after", 0.0)] if shape.norm_after else []),
        PipelineUnit("audio_projector", costs.projector_weights / layer),
    )
