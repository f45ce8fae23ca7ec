"""Whisper: its encoder and decoder from the blocks in `nn`, its plan, costs and names in folders."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.core.batch import Batch, Segments
from tessera.core.model_plan import ModelPlan, PipelineUnit, StageActivation, Stream, TensorStyle
from tessera.core.spec import FULL, Training
from tessera.models.audio.family import AUDIO_BLOCKS, AudioCosts, audio_rules, audio_styles
from tessera.models.audio.processor import AUDIO
from tessera.models.text.costs import Measures, example_batch
from tessera.models.text.decoder import TEXT_STREAM
from tessera.models.whisper.config import LEAST_TOKENS, REACH, STRIDE, WhisperConfig
from tessera.nn.audio import AudioEncoder, blank_clip, stored_sinusoids
from tessera.nn.cross_decoder import CrossDecoder
from tessera.nn.encoder_decoder import MEMORY, EncoderDecoder
from tessera.nn.layers import TiedHead
from tessera.weights.map import Rule, WeightMap

# Tensors of the recordings in a batch. Recordings have no placeholder tokens: the decoder attends to the outputs of the
# encoder.
RECORDINGS = Stream(tensors=("mel", "mel_positions"), segments=AUDIO, module=AUDIO)
_WEIGHT_AND_BIAS = "{weight,bias}"


class Whisper(EncoderDecoder):
    def __init__(self, config: WhisperConfig) -> None:
        text = CrossDecoder(config.decoder)
        assert text.embed is not None
        head = (
            TiedHead(text.embed)
            if config.tie_word_embeddings
            else torch.nn.Linear(config.text.hidden_size, config.text.vocab_size, bias=False)
        )
        super().__init__(AudioEncoder(config.encoder), stream(config), text, head, config.text.initializer_range)

    @torch.no_grad()
    def initialize(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if name == f"{AUDIO}.table.weight":
            tensor.copy_(stored_sinusoids(tensor))
        else:
            super().initialize(name, tensor, generator)


def stream(config: WhisperConfig) -> Stream:
    return replace(RECORDINGS, width=config.text.hidden_size, blank=functools.partial(blank_clip, config.encoder))


def plan(config: WhisperConfig) -> ModelPlan:
    shape, text, tied = config.encoder, config.decoder, config.tie_word_embeddings
    positions = config.audio.max_source_positions
    # A stage of the decoder also passes on the outputs of the encoder, for the maximum number of recordings in a row.
    encoded = -(-positions // LEAST_TOKENS)
    inside, carry = StageActivation(encoded, shape.hidden), StageActivation(encoded + 1, shape.hidden)
    # Weights of a layer per token, for a transcript of only `LEAST_TOKENS` tokens: then cross-attention projects
    # `encoded` positions of the encoder for each token.
    layer = text.layer_weights + encoded * text.memory_weights
    layers = "text.layers.{*}"
    styles: dict[str, TensorStyle] = {
        **audio_styles(shape),
        f"{layers}.{{attn_norm,cross_norm,mlp_norm}}.{_WEIGHT_AND_BIAS}": "replicate",
        f"{layers}.attn.{{q,v}}.{_WEIGHT_AND_BIAS}": "column",
        f"{layers}.attn.k.weight": "column",
        f"{layers}.cross.q.{_WEIGHT_AND_BIAS}": "column",
        f"{layers}.cross.kv.v.{_WEIGHT_AND_BIAS}": "column",
        f"{layers}.cross.kv.k.weight": "column",
        f"{layers}.{{attn,cross}}.o.weight": "row",
        f"{layers}.{{attn,cross}}.o.bias": "replicate",
        f"{layers}.mlp.up.{_WEIGHT_AND_BIAS}": "column",
        f"{layers}.mlp.down.weight": "row",
        f"{layers}.mlp.down.bias": "replicate",
        "text.positions.weight": "replicate",
        f"text.norm.{_WEIGHT_AND_BIAS}": "replicate",
        # Replicated: sizes of published vocabularies have few divisors, and the encoder takes most of the time.
        "text.embed.weight": "replicate",
        **({} if tied else {"head.weight": "replicate"}),
    }
    return ModelPlan(
        blocks=(AUDIO_BLOCKS, layers),
        tensor=styles,
        units=(
            PipelineUnit("audio.convs", encoded * sum(shape.conv_products) / layer),
            PipelineUnit("audio.table", 0.0),
            PipelineUnit(AUDIO_BLOCKS, encoded * shape.block_weights / layer, AUDIO, inside),
            PipelineUnit("audio.norm_after", 0.0),
            PipelineUnit("text.embed", 0.0),
            PipelineUnit("text.positions", 0.0, output=carry),
            PipelineUnit(layers, 1.0, "text", carry),
            PipelineUnit("text.norm", 0.0),
            PipelineUnit("head", text.hidden * text.vocab / layer),
        ),
        streams={AUDIO: stream(config), "text": TEXT_STREAM},
        heads={
            f"{AUDIO_BLOCKS}.attn.{{q,k,v}}": shape.heads,
            f"{layers}.attn.{{q,k,v}}": text.heads,
            f"{layers}.cross.q": text.heads,
            f"{layers}.cross.kv.{{k,v}}": text.heads,
        },
        fsdp_root=("text.embed", "head"),
        tied={"head": "text.embed"} if tied else {},
    )


# ---------------------------------------------------------------------------------------------- names in folders

_PAIRS = (
    ("text.embed.weight", "decoder.embed_tokens.weight"),
    ("text.positions.weight", "decoder.embed_positions.weight"),
    ("text.layers.{i}.attn_norm.{kind}", "decoder.layers.{i}.self_attn_layer_norm.{kind}"),
    ("text.layers.{i}.attn.q.{kind}", "decoder.layers.{i}.self_attn.q_proj.{kind}"),
    ("text.layers.{i}.attn.k.{kind}", "decoder.layers.{i}.self_attn.k_proj.{kind}"),
    ("text.layers.{i}.attn.v.{kind}", "decoder.layers.{i}.self_attn.v_proj.{kind}"),
    ("text.layers.{i}.attn.o.{kind}", "decoder.layers.{i}.self_attn.out_proj.{kind}"),
    ("text.layers.{i}.cross_norm.{kind}", "decoder.layers.{i}.encoder_attn_layer_norm.{kind}"),
    ("text.layers.{i}.cross.q.{kind}", "decoder.layers.{i}.encoder_attn.q_proj.{kind}"),
    ("text.layers.{i}.cross.kv.k.{kind}", "decoder.layers.{i}.encoder_attn.k_proj.{kind}"),
    ("text.layers.{i}.cross.kv.v.{kind}", "decoder.layers.{i}.encoder_attn.v_proj.{kind}"),
    ("text.layers.{i}.cross.o.{kind}", "decoder.layers.{i}.encoder_attn.out_proj.{kind}"),
    ("text.layers.{i}.mlp_norm.{kind}", "decoder.layers.{i}.final_layer_norm.{kind}"),
    ("text.layers.{i}.mlp.up.{kind}", "decoder.layers.{i}.fc1.{kind}"),
    ("text.layers.{i}.mlp.down.{kind}", "decoder.layers.{i}.fc2.{kind}"),
    ("text.norm.{kind}", "decoder.layer_norm.{kind}"),
)
_HEAD = "proj_out.weight"


def weights(config: WhisperConfig) -> WeightMap:
    tied = config.tie_word_embeddings
    heads = () if tied else (Rule("head.weight", _HEAD),)
    pairs = [Rule(ours, f"model.{theirs}") for ours, theirs in _PAIRS]
    return WeightMap(
        (*audio_rules(config.encoder, "model.encoder.", "audio.norm_after"), *pairs, *heads),
        # names in a base model that was saved without its head
        renames=(("encoder.", "model.encoder."), ("decoder.", "model.decoder.")),
        skip=(_HEAD,) if tied else (),
        copies=((_HEAD, "text.embed.weight"),) if tied else (),
    )


# ---------------------------------------------------------------------------------------------- mel frames


def frames_of(mel: Tensor) -> Tensor:
    """Return the mel frames [frames, bins] of a recording from the tensor `mel`, in which they overlap."""
    middle = mel.view(mel.shape[0], -1, 2 * REACH + 1)[:, :, REACH : REACH + STRIDE]
    return middle.transpose(1, 2).flatten(0, 1)


def windows_of(frames: Tensor, positions: int) -> Tensor:
    """Return the tensor `mel` for `positions` audio frames that begin with these mel frames, padded with zeros."""
    frames = frames[: positions * STRIDE]
    padded = F.pad(frames, (0, 0, REACH, REACH + positions * STRIDE - len(frames)))
    return padded.unfold(0, 2 * REACH + 1, STRIDE)[:positions].flatten(1)


def stock_inputs(batch: Batch, _: Any) -> dict[str, Tensor]:
    """Return the input of transformers' class for a batch with one recording."""
    return {"input_features": frames_of(batch["mel"]).T[None], "decoder_input_ids": batch["tokens"][None]}


# ---------------------------------------------------------------------------------------------- costs


def work(config: WhisperConfig, measures: Measures, training: Training = MappingProxyType({})) -> dict[str, np.ndarray]:
    """Return the FLOPs of each sample by stream. Projecting encoder outputs to keys and values counts as text."""
    text = config.decoder
    tokens, elements = (measures[name].astype(np.float64) for name in ("tokens", "audio_frames"))
    layers, head = (training.get(part, FULL) for part in ("text", "head"))
    # Every token attends to the recording of its own sample, and all recordings have the same length.
    crossed = measures.get("crossed", tokens) * config.audio.max_source_positions
    pairs = measures.get("token_pairs", tokens**2)
    return {
        "text": (
            layers.weights * 2 * text.layers * (tokens * text.layer_weights + elements * text.memory_weights)
            + layers.attention * 4 * text.layers * text.hidden * (pairs / 2 + crossed)
            + head.weights * 2 * measures.get("trained", tokens) * text.hidden * text.vocab
        ),
        AUDIO: AudioCosts(config.encoder, 0).work(measures, training),
    }


def flops(config: WhisperConfig, batch: Batch, training: Training = MappingProxyType({})) -> float:
    """Return the FLOPs of a batch. Padding attends to no recording."""
    text, memory = batch.segments["text"].lengths, batch.segments[MEMORY].lengths
    recordings = batch.segments.get(AUDIO)
    measures: Mapping[str, float] = {
        "tokens": sum(text),
        "trained": len(batch["trained" if "trained" in batch else "tokens"]),
        "token_pairs": sum(length**2 for length in text),
        "crossed": sum(a * b for a, b in zip(text, memory, strict=True)) / config.audio.max_source_positions,
        "audio_frames": sum(memory),
        "audio_pairs": 0 if recordings is None else sum(length**2 for length in recordings.lengths),
    }
    arrays = {name: np.array(float(value)) for name, value in measures.items()}
    return float(sum(part.sum() for part in work(config, arrays, training).values()))


def example(config: WhisperConfig, tokens: int) -> Batch:
    """Return a batch with the maximum number of recordings for this number of tokens."""
    shape = config.encoder
    count = max(1, tokens // LEAST_TOKENS)
    lengths = [tokens // count + (number < tokens % count) for number in range(count)]
    batch = example_batch(tokens)
    frames = torch.arange(shape.positions * STRIDE).unsqueeze(1) * torch.arange(shape.bins)
    index = torch.arange(shape.positions)
    mel_positions = torch.stack([index, torch.full_like(index, len(frames))], dim=1)
    media = {
        "positions": torch.cat([torch.arange(length) for length in lengths]),
        "mel": windows_of((frames % 7) / 7.0, shape.positions).repeat(count, 1),
        "mel_positions": mel_positions.repeat(count, 1),
    }
    recordings = Segments.of([shape.positions] * count)
    segments = {"text": Segments.of(lengths), AUDIO: recordings, MEMORY: recordings}
    return replace(batch, tensors={**batch.tensors, **media}, segments=segments)
