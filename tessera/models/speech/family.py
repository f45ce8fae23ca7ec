"""Declare families that speak: a family states its differences; model, plan and FLOPs follow."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tessera.core.batch import IGNORE, Batch
from tessera.core.model_plan import ModelPlan, PipelineUnit, Stream, TensorStyle
from tessera.core.outputs import LANGUAGE_OUTPUTS
from tessera.core.spec import FULL, Training
from tessera.models.family import Family
from tessera.models.text.costs import Measures, example_batch, measures_of, text_work
from tessera.models.text.decoder import (
    ATTENTION,
    BLOCKS,
    TEXT_STREAM,
    TextConfig,
    build_text,
    layer_weights,
    text_experts,
    text_heads,
    text_rules,
    text_shape,
    text_styles,
    text_units,
)
from tessera.nn.codes import CODE_OUTPUTS, CODED, CODES, NEXT_CODES, CodeEmbedding, DepthDecoder, SpeechModel
from tessera.weights.map import Rule

DEPTH_BLOCKS = "depth.layers.{*}"
CODED_FRAMES = "coded_frames"  # measure: number of frames whose codes are trained on
SPEECH_STREAM: Stream = replace(
    TEXT_STREAM,
    tensors=(*TEXT_STREAM.tensors, CODES, NEXT_CODES),
    positions=(*TEXT_STREAM.positions, CODED),
)


@dataclass(frozen=True)
class SpeechShape:
    """Hold the sizes of the parts of a model that speaks."""

    text: TextConfig
    depth: TextConfig  # the depth decoder; its vocabulary size and its maximum length are not used
    sizes: tuple[int, ...]  # number of codes of each codebook
    head: int  # number of outputs of the main head
    projected: bool  # whether inputs of the depth decoder are projected to its width
    replaces: bool  # see `SpeechModel`
    attention: str
    shared_codes: bool = True  # whether the depth decoder reads the text decoder's table of codes

    @property
    def costed_text(self) -> TextConfig:
        """Return the configuration of the decoder with the main head's outputs as vocabulary, for costs."""
        return self.text.model_copy(update={"vocab_size": self.head})

    @property
    def depth_weights(self) -> float:
        """Return how many weights of the depth decoder a frame is multiplied by."""
        depth, steps = self.depth, len(self.sizes)
        projected = steps * self.text.hidden_size * depth.hidden_size if self.projected else 0
        heads = depth.hidden_size * sum(self.sizes[1:])
        return steps * depth.num_hidden_layers * layer_weights(depth) + projected + heads

    def work(self, measures: Measures, training: Training) -> np.ndarray:
        """Return the FLOPs of decoder, head and depth decoder for each sample."""
        depth, steps = self.depth, len(self.sizes)
        frames, passes = measures[CODED_FRAMES].astype(np.float64), training.get("depth", FULL)
        pairs = depth.num_hidden_layers * depth.num_attention_heads * depth.head_size * steps**2 / 2
        total: np.ndarray = text_work(self.costed_text, measures, training) + frames * (
            passes.weights * 2 * self.depth_weights + passes.attention * 4 * pairs
        )
        return total


class SpeechFamily(Family):
    """Declare a family that speaks."""

    task: ClassVar[str] = "speech"
    outputs: ClassVar[tuple[str, ...]] = (*LANGUAGE_OUTPUTS, CODE_OUTPUTS)

    @abstractmethod
    def shape(self, config: Any) -> SpeechShape: ...

    def build(self, config: Any) -> SpeechModel:
        shape = self.shape(config)
        text = build_text(shape.text, shape.attention)
        codes = CodeEmbedding(shape.sizes, shape.text.hidden_size)
        table = codes if shape.shared_codes else CodeEmbedding(shape.sizes, shape.text.hidden_size)
        sizes, depth_shape = shape.sizes, text_shape(shape.depth, shape.attention)
        depth = DepthDecoder(depth_shape, sizes, table, shape.projected, shape.shared_codes)
        head = nn.Linear(shape.text.hidden_size, shape.head, bias=False)
        return SpeechModel(text, head, codes, depth, shape.text.initializer_range, shape.replaces)

    def plan(self, config: Any) -> ModelPlan:
        """Return the plan. Tensor parallelism does not split the depth decoder, whose sequences are short, and the
        tables and heads of codes."""
        shape = self.shape(config)
        text = shape.text
        depth = {
            name.replace("text.", "depth.", 1): "replicate"
            for name in text_styles(shape.depth, True)
            if name != "text.embed.weight"
        }
        styles: dict[str, TensorStyle] = {
            **text_styles(text, True),
            "head.weight": "replicate",
            "codes.weight": "replicate",
            "depth.heads.{*}.weight": "replicate",
            **({"depth.proj.weight": "replicate"} if shape.projected else {}),
            **({} if shape.shared_codes else {"depth.codes.weight": "replicate"}),
            **depth,  # type: ignore[dict-item]
        }
        return ModelPlan(
            blocks=(BLOCKS, DEPTH_BLOCKS),
            tensor=styles,
            units=(
                PipelineUnit("codes", 0.0),
                *text_units(shape.costed_text),
                PipelineUnit("depth", shape.depth_weights / layer_weights(text)),
            ),
            streams={"text": SPEECH_STREAM},
            experts=text_experts(text),
            attention=(ATTENTION,),
            heads=text_heads(text),
            # The loss reads the heads, and the depth decoder reads the table of codes.
            fsdp_root=("text.embed", "head", "codes", "depth.heads", *(() if shape.shared_codes else ("depth.codes",))),
            tied={"depth": "codes"} if shape.shared_codes else {},
        )

    def work(self, config: Any, measures: Measures, training: Training = MappingProxyType({})) -> dict[str, np.ndarray]:
        return {"text": self.shape(config).work(measures, training)}

    def flops(self, config: Any, batch: Batch, training: Training = MappingProxyType({})) -> float:
        frames = batch[CODED].shape[0] if CODED in batch else 0
        measures = {**measures_of(batch, {}), CODED_FRAMES: np.array(frames)}
        return float(sum(part.sum() for part in self.work(config, measures, training).values()))

    def example(self, config: Any, tokens: int) -> Batch:
        """Return a batch of one conversation, whose second half is speech."""
        batch, first = example_batch(tokens), tokens - max(1, tokens // 2)
        codes = torch.full((len(self.shape(config).sizes), tokens), IGNORE)
        codes[:, first:] = 0
        following = torch.nn.functional.pad(codes[:, 1:], (0, 1), value=IGNORE)
        coded = torch.arange(first - 1, tokens - 1)  # computed from sizes: on the meta device, `codes` has no values
        media = {CODES: codes, NEXT_CODES: following, CODED: coded}
        return batch.with_tensors(labels=following[0].clone(), trained=coded, **media)


def depth_rules(depth: TextConfig, prefix: str) -> list[Rule]:
    """Return the weight rules of the layers and the norm of a depth decoder. `prefix`: start of names in folders."""
    rules = [rule for rule in text_rules(depth, prefix) if rule.native != "text.embed.weight"]
    return [replace(rule, native=rule.native.replace("text.", "depth.", 1)) for rule in rules]


def coded_positions(following: Tensor) -> Tensor:
    """Return the positions that the codes of a frame follow. `following`: [codebooks, T]."""
    return (following != IGNORE).all(0).nonzero().squeeze(1)
