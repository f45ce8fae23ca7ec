"""Compute the loss of a language or vision-language model on MindSpore, from weights by their torch names.

The torch module has the sizes. What has no gradient is computed on the host: rotary angles, normalised pixels and
the indices of trained positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from mindspore import ops
from torch import nn

from tessera.core.batch import IGNORE, Batch, Segments
from tessera.errors import TesseraError
from tessera.lora.modules import adapted_layers
from tessera.mindspore.functions import (
    ACTIVATIONS,
    Spans,
    Tensor,
    attention,
    cross_entropy,
    from_torch,
    gelu,
    layer_norm,
    linear,
    rms_norm,
    rotate,
    silu,
)
from tessera.nn.causal_lm import CausalLMBase
from tessera.nn.decoder import DecoderShape
from tessera.nn.layers import TiedHead
from tessera.nn.projector import PatchMerger
from tessera.nn.vit import ACTIVATIONS as TORCH_ACTIVATIONS
from tessera.nn.vit import VisionEncoder, VisionShape
from tessera.ops.pointwise import Angles, axial_angles

_MAIN, _VISION, _PROJECTOR = "text", "vision", "projector"


@dataclass(frozen=True)
class Sequence:
    """Hold the rotary angles and attention spans of a packed sequence."""

    cos: Tensor
    sin: Tensor
    spans: Spans

    @staticmethod
    def of(angles: Angles, segments: Segments, causal: bool, dtype: torch.dtype) -> Sequence:
        cos, sin = (from_torch(of_all.to(dtype).unsqueeze(1)) for of_all in (angles.cos, angles.sin))
        return Sequence(cos, sin, Spans.of(segments.bounds.diff().tolist(), causal, dtype))


@dataclass(frozen=True)
class Images:
    """Hold the patches of a batch, and the positions of their embeddings among the tokens."""

    pixels: Tensor
    patches: Sequence
    slots: Tensor


@dataclass(frozen=True)
class LossInputs:
    """Hold a batch on the device: tokens, the trained positions with their labels, and images."""

    tokens: Tensor
    sequence: Sequence
    trained: Tensor
    labels: Tensor
    images: Images | None


class Network:
    """Compute the loss of a model from its weights. It has no state but the sizes of the model."""

    def __init__(self, module: nn.Module) -> None:
        assert isinstance(module, CausalLMBase)
        assert module.text is not None
        self._text: DecoderShape = module.text.shape
        self._tied = isinstance(module.head, TiedHead)
        self._adapters = {path: layer.adapter.scale for path, layer in adapted_layers(module).items()}
        self._vision: VisionShape | None = None
        encoder, projector = getattr(module, _VISION, None), getattr(module, _PROJECTOR, None)
        if isinstance(encoder, VisionEncoder) and isinstance(projector, PatchMerger):
            self._vision = encoder.shape
            self._merged, self._merger_eps = projector.joined, float(projector.norm.eps)  # type: ignore[arg-type]
            assert self._vision.activation in TORCH_ACTIVATIONS

    # ------------------------------------------------------------------------------------------ inputs

    def inputs(self, batch: Batch, dtype: torch.dtype) -> LossInputs:
        """Return the inputs for `loss`. Angles and pixels are cast to `dtype`, the dtype of the weights."""
        labels, trained = batch["labels"], batch.get("trained")
        trained = torch.nonzero(labels != IGNORE).flatten() if trained is None else trained
        angles = self._text.rope.angles(batch["positions"])
        return LossInputs(
            tokens=from_torch(batch["tokens"]),
            sequence=Sequence.of(angles, batch.segments["text"], True, dtype),
            trained=from_torch(trained),
            labels=from_torch(labels.index_select(0, trained)),
            images=self._images(batch, dtype),
        )

    def _images(self, batch: Batch, dtype: torch.dtype) -> Images | None:
        shape, pixels, slots = self._vision, batch.get("pixels"), batch.get("media_slots")
        if shape is None or pixels is None or slots is None or not pixels.shape[0]:
            return None
        if slots.shape[0] * shape.merge**2 != pixels.shape[0]:
            raise TesseraError(
                f"the batch has {slots.shape[0]} slots for {pixels.shape[0]} patches",
                where="batch tensors media_slots and pixels",
                fix="use the same patch size and merge size in processor and model",
                code="data.stream-slots-mismatch",
            )
        if not pixels.is_floating_point():
            scale = batch["pixel_scale"].to(dtype)
            pixels = pixels.to(dtype) * scale[0] + scale[1]
        assert shape.rope_theta is not None
        angles = axial_angles(batch["patch_positions"], shape.head_dim, shape.rope_theta)
        patches = Sequence.of(angles, batch.segments["vision"], False, dtype)
        return Images(from_torch(pixels.to(dtype)), patches, from_torch(slots.unsqueeze(-1).int()))

    # ------------------------------------------------------------------------------------------ the loss

    def loss(self, weights: Mapping[str, Tensor], inputs: LossInputs) -> Tensor:
        """Return the summed cross-entropy of the trained positions."""
        x = ops.gather(weights["text.embed.weight"], inputs.tokens, 0)
        if inputs.images is not None:
            x = ops.tensor_scatter_update(x, inputs.images.slots, self._encode(weights, inputs.images))
        for index in range(self._text.layers):
            x = self._decoder_layer(weights, f"text.layers.{index}", x, inputs.sequence)
        x = rms_norm(x, weights["text.norm.weight"], self._text.norm_eps)
        head = weights["text.embed.weight" if self._tied else "head.weight"]
        return cross_entropy(linear(ops.gather(x, inputs.trained, 0), head), inputs.labels)

    def _decoder_layer(self, weights: Mapping[str, Tensor], path: str, x: Tensor, sequence: Sequence) -> Tensor:
        shape = self._text
        normed = rms_norm(x, weights[f"{path}.attn_norm.weight"], shape.norm_eps)
        q, k, v = (
            self._linear(weights, f"{path}.attn.{name}", normed).reshape(normed.shape[0], -1, shape.head_dim)
            for name in ("q", "k", "v")
        )
        if shape.qk_norm:
            q = rms_norm(q, weights[f"{path}.attn.q_norm.weight"], shape.norm_eps)
            k = rms_norm(k, weights[f"{path}.attn.k_norm.weight"], shape.norm_eps)
        q, k = rotate(q, sequence.cos, sequence.sin), rotate(k, sequence.cos, sequence.sin)
        attended = self._linear(weights, f"{path}.attn.o", attention(q, k, v, sequence.spans))
        if shape.sandwich_norm:
            attended = rms_norm(attended, weights[f"{path}.attn_out_norm.weight"], shape.norm_eps)
        x = x + attended
        normed = rms_norm(x, weights[f"{path}.mlp_norm.weight"], shape.norm_eps)
        gate, up = (self._linear(weights, f"{path}.mlp.{name}", normed) for name in ("gate", "up"))
        update = self._linear(weights, f"{path}.mlp.down", silu(gate) * up)
        if shape.sandwich_norm:
            update = rms_norm(update, weights[f"{path}.mlp_out_norm.weight"], shape.norm_eps)
        return x + update

    def _encode(self, weights: Mapping[str, Tensor], images: Images) -> Tensor:
        """Return the embeddings of the images' patches."""
        shape = self._vision
        assert shape is not None
        x = self._linear(weights, f"{_VISION}.patch_embed", images.pixels)
        for index in range(shape.layers):
            x = self._vision_block(weights, f"{_VISION}.blocks.{index}", x, images.patches, shape)
        x = self._layer_norm(weights, f"{_PROJECTOR}.norm", x, self._merger_eps).reshape(-1, self._merged)
        return self._linear(weights, f"{_PROJECTOR}.down", gelu(self._linear(weights, f"{_PROJECTOR}.up", x)))

    def _vision_block(
        self, weights: Mapping[str, Tensor], path: str, x: Tensor, patches: Sequence, shape: VisionShape
    ) -> Tensor:
        normed = self._layer_norm(weights, f"{path}.attn_norm", x, shape.norm_eps)
        qkv = self._linear(weights, f"{path}.attn.qkv", normed).reshape(x.shape[0], shape.heads, 3, shape.head_dim)
        q, k, v = (part.squeeze(2) for part in ops.split(qkv, 1, 2))
        q, k = rotate(q, patches.cos, patches.sin), rotate(k, patches.cos, patches.sin)
        attended = attention(q, k, v, patches.spans)
        x = x + self._linear(weights, f"{path}.attn.proj", attended)
        normed = self._layer_norm(weights, f"{path}.mlp_norm", x, shape.norm_eps)
        inner = ACTIVATIONS[shape.activation](self._linear(weights, f"{path}.mlp.up", normed))
        return x + self._linear(weights, f"{path}.mlp.down", inner)

    # ------------------------------------------------------------------------------------------ layers

    def _linear(self, weights: Mapping[str, Tensor], path: str, x: Tensor) -> Tensor:
        """Return the output of a linear layer, with its adapter if it has one."""
        out = linear(x, weights[f"{path}.weight"], weights.get(f"{path}.bias"))
        scale = self._adapters.get(path)
        if scale is None:
            return out
        return out + linear(linear(x, weights[f"{path}.lora_a.weight"]), weights[f"{path}.lora_b.weight"]) * scale

    @staticmethod
    def _layer_norm(weights: Mapping[str, Tensor], path: str, x: Tensor, eps: float) -> Tensor:
        return layer_norm(x, weights[f"{path}.weight"], weights[f"{path}.bias"], eps)
