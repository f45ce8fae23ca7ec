"""The text decoder: pre-norm layers with grouped-query attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tessera.core.batch import Segments
from tessera.core.cache import CacheStep
from tessera.errors import TesseraError
from tessera.nn.cache import KVCache, LayerCache
from tessera.nn.layers import PackedAttention, RMSNorm, TokenEmbedding
from tessera.nn.moe import MoE, RowIds
from tessera.ops.cached_attention import cached_attention
from tessera.ops.decode_layers import LayerWeights, adjacent, can_decode, decode_layers, join
from tessera.ops.pointwise import Angles, Rope, rotate, swiglu
from tessera.ops.registry import AUTO
from tessera.runtime.modules import FusedLayers


@dataclass(frozen=True)
class DecoderShape:
    """Hold the sizes and options of a decoder."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    qkv_bias: bool = False
    qk_norm: bool = False  # RMS norm of queries and keys per head, before rotation
    sandwich_norm: bool = False  # normalise the outputs of attention and MLP before the residual addition
    attention: str = AUTO  # implementation of attention


class Attention(FusedLayers):
    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=shape.qkv_bias)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=shape.qkv_bias)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps) if shape.qk_norm else None
        self.core = PackedAttention(True, shape.attention, shape.head_dim)

    def forward(self, x: Tensor, angles: Angles, segments: Segments, cache: LayerCache | None) -> Tensor:
        # -1 infers the number of heads: under tensor parallelism a rank has only some of them.
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        keys, values = (k, v) if cache is None else cache.store(k, v)
        if cache is None or cache.step.prefill:
            out = self.core(q, k, v, segments)
        else:
            out = cached_attention(q, keys, values, cache.step)
        return self.o(out.flatten(1))


class GatedMLP(FusedLayers):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))


class SharedExpert(nn.Module):
    """Compute an MLP that all tokens use beside their experts. A sigmoid of each token scales its output."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.mlp = GatedMLP(hidden, intermediate)
        self.weigher = nn.Linear(hidden, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.weigher(x).sigmoid() * self.mlp(x)


class DecoderLayer(nn.Module):
    """Compute a decoder layer, with a gated MLP or the module `mlp`."""

    def __init__(self, shape: DecoderShape, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.attn = Attention(shape)
        self.mlp_norm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = GatedMLP(shape.hidden, shape.intermediate) if mlp is None else mlp
        self.routed = isinstance(mlp, MoE)  # stored now, because wrappers hide the class of `mlp` later
        self.attn_out_norm = RMSNorm(shape.hidden, shape.norm_eps) if shape.sandwich_norm else None
        self.mlp_out_norm = RMSNorm(shape.hidden, shape.norm_eps) if shape.sandwich_norm else None

    def forward(
        self,
        x: Tensor,
        angles: Angles,
        segments: Segments,
        cache: LayerCache | None = None,
        rows: RowIds | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output, and expert statistics if the model is trained with the balance loss."""
        attended = self.attn(self.attn_norm(x), angles, segments, cache)
        x = x + (attended if self.attn_out_norm is None else self.attn_out_norm(attended))
        normed = self.mlp_norm(x)
        update, used = self.mlp(normed, rows) if self.routed else (self.mlp(normed), None)
        out: Tensor = x + (update if self.mlp_out_norm is None else self.mlp_out_norm(update))
        return out if used is None else (out, used)

    def projections(self) -> list[list[nn.Linear]]:
        """Return groups of linear maps with the same input, without those of experts.

        The result is empty if the layer has adapters, output norms or another class of MLP, or if it is sharded.
        """
        attn, mlp = self.attn, self.mlp
        if attn.calls_layers or (isinstance(mlp, GatedMLP) and mlp.calls_layers):
            return []
        groups = [[attn.q, attn.k, attn.v], [attn.o]]
        if not self.routed:
            if type(mlp) is not GatedMLP:
                return []
            groups += [[mlp.gate, mlp.up], [mlp.down]]
        plain = type(self) is DecoderLayer and self.attn_out_norm is None and self.mlp_out_norm is None
        linears = [linear for group in groups for linear in group]
        plain = plain and all(type(x) is nn.Linear and type(x.weight) is nn.Parameter for x in linears)
        return groups if plain else []

    def decode_weights(self) -> LayerWeights | None:
        """Return the weights for `decode_layers`; None if `projections` is empty or its weights are not adjacent."""
        groups = self.projections()
        weights = [adjacent([linear.weight for linear in group]) for group in groups]
        if not groups or any(weight is None for weight in weights):
            return None
        attn = self.attn
        biases = [linear.bias for linear in groups[0] if linear.bias is not None]
        bias = adjacent(biases) if biases else None
        qkv, o, *rest = weights
        if qkv is None or o is None or (biases and bias is None):
            return None
        normed = attn.q_norm is not None and attn.k_norm is not None
        return LayerWeights(
            attn_norm=self.attn_norm.weight,
            qkv=qkv,
            qkv_bias=bias,
            qk_norms=(attn.q_norm.weight, attn.k_norm.weight) if attn.q_norm and attn.k_norm and normed else None,
            o=o,
            mlp_norm=self.mlp_norm.weight,
            gate_up=rest[0] if rest else None,
            down=rest[1] if rest else None,
            mlp=self._mlp_update,
            eps=self.attn_norm.eps,
        )

    def _mlp_update(self, normed: Tensor) -> Tensor:
        return self.mlp(normed, None)[0] if self.routed else self.mlp(normed)


class TextDecoder(nn.Module):
    """Compute final hidden states from embeddings. Callers look up tokens in its `embed`.

    Embeddings may be wider than the decoder: their further blocks of `hidden` channels (DeepStack features of images)
    are added to the hidden states after layer 0, 1 and so on. These layers must be in one pipeline stage.

    Modules that are None belong to another pipeline stage and are skipped. `mlp`: returns the module that replaces a
    layer's MLP (a mixture of experts), by layer index; None keeps the MLP.
    """

    def __init__(self, shape: DecoderShape, mlp: Callable[[int], nn.Module | None] = lambda layer: None) -> None:
        super().__init__()
        self.shape = shape
        self.embed: nn.Embedding = TokenEmbedding(shape.vocab, shape.hidden)
        layers = [DecoderLayer(shape, mlp(index)) for index in range(shape.layers)]
        routers = [layer.mlp.router.shape for layer in layers if isinstance(layer.mlp, MoE)]
        self.experts = routers[0] if routers else None  # expert sizes, equal in all layers; None: no layer has experts
        self.layers = nn.ModuleList(layers)
        self.norm: RMSNorm | None = RMSNorm(shape.hidden, shape.norm_eps)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        segments: Segments,
        rows: RowIds | None = None,
        returned: Sequence[int] = (),
        cache: KVCache | None = None,
        step: CacheStep | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return hidden states, and summed expert statistics if the model is trained with the balance loss.

        Hidden states after each layer in `returned` are concatenated to the final ones along the feature dimension, so
        hooks that shard or gather tokens get a single tensor. `cache` and `step`: see `core.cache`.
        """
        for index in returned:
            if not 0 <= index < len(self.layers) or self.layers[index] is None:
                raise TesseraError(
                    f"the task reads hidden states of layer {index}, which this pipeline stage does not have",
                    where="train.task",
                    fix=f"use layers 0 to {len(self.layers) - 1} of the full model; with parallel.pp, only those "
                    "of the last pipeline stage",
                    code="task.layer-on-other-stage",
                )
        states: dict[int, Tensor] = {}
        angles = self.shape.rope.angles(positions)
        if cache is not None and step is not None and not returned:
            decoded = self._decode(x, angles, cache, step)
            if decoded is not None:
                return decoded
        # Without DeepStack features keep `x` itself, not a view of it: pipeline schedules detach the output in place.
        x, *deeper = (x,) if x.shape[-1] == self.shape.hidden else torch.split(x, self.shape.hidden, dim=-1)
        used: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if layer is not None:
                of_layer = None if cache is None or step is None else cache.layer(index, step)
                out = layer(x, angles, segments, of_layer, rows)
                x, here = out if isinstance(out, tuple) else (out, None)
                if here is not None:
                    used = here if used is None else used + here
                if index < len(deeper):
                    x = x + deeper[index]
                if index in returned:
                    states[index] = x
        hidden = x if self.norm is None else self.norm(x)
        if returned:
            hidden = torch.cat([hidden, *(states[index] for index in returned)], dim=-1)
        return hidden if used is None else (hidden, used)

    def join_projections(self) -> None:
        """Make weights of linear maps with the same input adjacent in memory: decoding multiplies them at once.

        Parameters keep their names and values. Trained parameters are not moved, because optimizers may hold their
        addresses.
        """
        for layer in self.layers:
            for linears in layer.projections() if isinstance(layer, DecoderLayer) else ():
                join([linear.weight for linear in linears])
                join([linear.bias for linear in linears if linear.bias is not None])

    def _decode(self, x: Tensor, angles: Angles, cache: KVCache, step: CacheStep) -> Tensor | None:
        """Return hidden states by `decode_layers`; None if it does not support the call, the device or a layer."""
        shape = self.shape
        if step.single < step.rows or x.shape[-1] != shape.hidden or self.norm is None or not can_decode(x):
            return None
        layers = [layer.decode_weights() if isinstance(layer, DecoderLayer) else None for layer in self.layers]
        plain = [layer for layer in layers if layer is not None and layer.qkv.dtype == x.dtype]
        if len(plain) < len(layers):
            return None
        like = x.new_empty(0, shape.kv_heads, shape.head_dim)
        norm = (self.norm.weight, self.norm.eps)
        return decode_layers(plain, norm, x, angles, lambda layer: cache.allocate(layer, like), step)
