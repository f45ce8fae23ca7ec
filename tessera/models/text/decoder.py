"""The text decoder of a family: its configuration, modules, parallel plan and Hugging Face parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field, model_validator
from torch import nn

from tessera.config.reader import Section
from tessera.core.model_plan import PipelineUnit, StageActivation, Stream, TensorStyle
from tessera.nn.decoder import DecoderShape, SharedExpert, TextDecoder
from tessera.nn.layers import TiedHead
from tessera.nn.moe import MoE, MoEShape
from tessera.ops.pointwise import FrequencyScaling, LinearScaling, Rope, Scaling, YarnScaling, yarn_attention
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Stack, TensorChunk, TransposeIfNeeded


class ExpertsConfig(Section):
    num_experts: int = Field(gt=1, le=10**8)
    num_experts_per_tok: int = Field(gt=0, le=10**8)
    moe_intermediate_size: int = Field(gt=0, le=10**8, description="width of one expert")
    norm_topk_prob: bool = Field(True, description="the weights of a token's experts are normalised to sum 1")
    output_router_logits: bool = Field(False, description="train with the load balancing loss")
    router_aux_loss_coef: float = Field(0.001, ge=0, description="weight of the load balancing loss")
    decoder_sparse_step: int = Field(1, gt=0, le=10**8, description="interval of layers with experts")
    mlp_only_layers: tuple[int, ...] = Field((), description="layers without experts")

    @property
    def shared_width(self) -> int:
        """Return the width of the expert that all tokens use; 0 if there is none."""
        return 0

    def in_layer(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class RopeScaling(Section):
    """Scale rotary frequencies, for sequences that are longer than in pretraining.

    linear divides all frequencies by `factor`. llama3 and yarn divide low frequencies by `factor`, keep high ones, and
    interpolate between; yarn also scales queries and keys. dynamic scales nothing up to `max_position_embeddings`;
    longer samples are refused, because it would scale them by their length.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"] = "llama3"
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: fewer rotations in the original length count as low")
    high_freq_factor: float = Field(
        4.0, gt=0, description="llama3: more rotations in the original length count as high"
    )
    original_max_position_embeddings: int = Field(8192, gt=0, description="llama3, yarn: the length of pretraining")
    beta_fast: float = Field(32.0, gt=0, description="yarn: rotations above which nothing is scaled")
    beta_slow: float = Field(1.0, gt=0, description="yarn: rotations below which all is scaled")
    attention_factor: float | None = Field(
        None, gt=0, description="yarn: factor of queries and keys; default: computed from factor"
    )
    mscale: float | None = Field(None, description="yarn: with mscale_all_dim, another default of attention_factor")
    mscale_all_dim: float | None = None
    truncate: bool = Field(True, description="yarn: interpolation begins and ends at whole frequency indices")

    @property
    def used_fields(self) -> tuple[str, ...]:
        """Return the fields of this section that its `rope_type` uses."""
        further = {
            "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            "yarn": (
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "mscale",
                "mscale_all_dim",
                "truncate",
            ),
        }
        return ("rope_type", "factor", *further.get(self.rope_type, ()))


class TextConfig(Section):
    vocab_size: int = Field(gt=0, le=10**8)
    hidden_size: int = Field(gt=0, le=10**8)
    intermediate_size: int = Field(gt=0, le=10**8)
    num_hidden_layers: int = Field(gt=0, le=10**4)
    num_attention_heads: int = Field(gt=0, le=10**8)
    num_key_value_heads: int = Field(gt=0, le=10**8)
    head_dim: int | None = Field(None, gt=0, le=10**8, description="default: hidden_size / num_attention_heads")
    rms_norm_eps: float = Field(1e-6, gt=0)
    attention_bias: bool = Field(False, description="bias of query, key and value projections")
    qk_norm: bool = Field(False, description="RMS norm of queries and keys, per head")
    sandwich_norm: bool = Field(
        False, description="attention and MLP outputs are normalised before the residual addition"
    )
    rope_theta: float = Field(1e4, gt=0)
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = Field(1.0, gt=0, le=1, description="share of each head that is rotated")
    mrope_section: tuple[int, int, int] | None = Field(
        None, description="numbers of rotary frequencies for time, height and width; default: one axis"
    )
    mrope_interleaved: bool = Field(False, description="frequencies of the three axes are interleaved, not consecutive")
    experts: ExpertsConfig | None = None
    max_position_embeddings: int = Field(32768, gt=0, le=10**8)
    initializer_range: float = Field(0.02, ge=0)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def max_length(self) -> int | None:
        """Return the largest number of tokens of a sample, or None if there is no limit."""
        dynamic = self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic"
        return self.max_position_embeddings if dynamic else None

    def check_tokens(self, tokens: Mapping[str, int | None]) -> None:
        """Raise unless the vocabulary has these token ids. `tokens`: by field name; None: there is no such token."""
        for name, token in tokens.items():
            if token is not None and token >= self.vocab_size:
                raise ValueError(f"{name} {token} is outside the vocabulary of {self.vocab_size}")

    def experts_in(self, layer: int) -> ExpertsConfig | None:
        return self.experts if self.experts is not None and self.experts.in_layer(layer) else None

    @model_validator(mode="after")
    def _divides(self) -> TextConfig:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.num_attention_heads} heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads are not a multiple of {self.num_key_value_heads} key-value heads"
            )
        if self.rotary_dim % 2:
            raise ValueError(f"{self.rotary_dim} rotated dimensions of each head: the number must be even")
        if self.attention_bias and self.qk_norm:
            raise ValueError(
                "attention_bias with qk_norm is not supported, because transformers then adds a bias to the output "
                "projection of attention; use model.family=transformers"
            )
        sections = self.mrope_section
        if sections is not None and (min(sections) < 0 or 2 * sum(sections) != self.rotary_dim):
            raise ValueError(
                f"mrope_section {list(sections)} must sum to half of the rotated dimensions of a head, "
                f"{self.rotary_dim / 2:g}: change it too, or keep hidden_size / num_attention_heads"
            )
        if self.experts is not None and self.experts.num_experts_per_tok > self.experts.num_experts:
            raise ValueError(
                f"num_experts_per_tok {self.experts.num_experts_per_tok} is more than num_experts "
                f"{self.experts.num_experts}"
            )
        return self


def build_text(text: TextConfig, attention: str) -> TextDecoder:
    """Return the text decoder. `attention`: implementation of attention."""
    return TextDecoder(text_shape(text, attention), mlp=lambda layer: _experts(text, layer))


def build_head(decoder: TextDecoder, tied: bool) -> nn.Module:
    """Return the output projection of a text decoder."""
    return TiedHead(decoder.embed) if tied else nn.Linear(decoder.shape.hidden, decoder.shape.vocab, bias=False)


def text_shape(text: TextConfig, attention: str) -> DecoderShape:
    return DecoderShape(
        vocab=text.vocab_size,
        hidden=text.hidden_size,
        intermediate=text.intermediate_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_size,
        norm_eps=text.rms_norm_eps,
        rope=Rope(
            dim=text.rotary_dim,
            theta=text.rope_theta,
            sections=text.mrope_section or (),
            interleaved=text.mrope_interleaved,
            scaling=_scaling(text.rope_scaling),
        ),
        qkv_bias=text.attention_bias,
        qk_norm=text.qk_norm,
        sandwich_norm=text.sandwich_norm,
        attention=attention,
    )


def _scaling(config: RopeScaling | None) -> Scaling | None:
    if config is None or config.rope_type == "dynamic":
        return None  # dynamic scaling has no effect: it changes only longer samples, which are refused
    if config.rope_type == "linear":
        return LinearScaling(config.factor)
    original = config.original_max_position_embeddings
    if config.rope_type == "llama3":
        return FrequencyScaling(config.factor, config.low_freq_factor, config.high_freq_factor, original)
    attention = config.attention_factor or yarn_attention(config.factor, config.mscale, config.mscale_all_dim)
    return YarnScaling(config.factor, config.beta_fast, config.beta_slow, original, attention, config.truncate)


def _experts(text: TextConfig, layer: int) -> MoE | None:
    experts = text.experts_in(layer)
    if experts is None:
        return None
    return MoE(
        MoEShape(
            hidden=text.hidden_size,
            intermediate=experts.moe_intermediate_size,
            experts=experts.num_experts,
            top_k=experts.num_experts_per_tok,
            normalize=experts.norm_topk_prob,
            balance=experts.router_aux_loss_coef if experts.output_router_logits else 0.0,
        ),
        SharedExpert(text.hidden_size, experts.shared_width) if experts.shared_width else None,
    )


ATTENTION = "text.layers.{*}.attn.core"
BLOCKS = "text.layers.{*}"
# Names of the weight matrices in the layers, which are nearly all parameters of a model.
PROJECTIONS = (
    "text.layers.{*}.attn.{q,k,v,o}.weight",
    "text.layers.{*}.mlp.{gate,up,down}.weight",
    "text.layers.{*}.mlp.shared.mlp.{gate,up,down}.weight",
    "text.layers.{*}.mlp.experts.{gate,up,down}",
)
# The stream of tokens. Its tensors have an entry for each token in their last dimension (positions may be [3, T]).
TEXT_STREAM = Stream(
    tensors=("tokens", "labels", "positions"), segments="text", dim=-1, positions=("trained",), index="token_index"
)


def text_styles(text: TextConfig, tied: bool) -> dict[str, TensorStyle]:
    """Return the tensor-parallel style of every parameter of the text decoder and head."""
    styles: dict[str, TensorStyle] = {
        "text.embed.weight": "vocab",
        "text.layers.{*}.{attn_norm,mlp_norm}.weight": "sequence",
        "text.layers.{*}.attn.{q,k,v}.{weight,bias}": "column",
        "text.layers.{*}.attn.o.weight": "row",
        "text.norm.weight": "sequence",
    }
    if text.qk_norm:
        styles["text.layers.{*}.attn.{q_norm,k_norm}.weight"] = "heads"
    if text.sandwich_norm:
        styles["text.layers.{*}.{attn_out_norm,mlp_out_norm}.weight"] = "sequence"
    if any(text.experts_in(layer) is None for layer in range(text.num_hidden_layers)):
        styles["text.layers.{*}.mlp.{gate,up}.weight"] = "column"
        styles["text.layers.{*}.mlp.down.weight"] = "row"
    if text.experts is not None:
        styles["text.layers.{*}.mlp.router.weight"] = "sequence"
        styles["text.layers.{*}.mlp.experts.{gate,up}"] = "column"
        styles["text.layers.{*}.mlp.experts.down"] = "row"
        if text.experts.shared_width:
            styles["text.layers.{*}.mlp.shared.weigher.weight"] = "sequence"
            styles["text.layers.{*}.mlp.shared.mlp.{gate,up}.weight"] = "column"
            styles["text.layers.{*}.mlp.shared.mlp.down.weight"] = "row"
    return styles if tied else {**styles, "head.weight": "vocab"}


def text_experts(text: TextConfig) -> tuple[str, ...]:
    return () if text.experts is None else ("text.layers.{*}.mlp.experts",)


def text_heads(text: TextConfig) -> dict[str, int]:
    return {
        "text.layers.{*}.attn.q": text.num_attention_heads,
        "text.layers.{*}.attn.{k,v}": text.num_key_value_heads,
    }


def layer_weights(text: TextConfig) -> float:
    """Return how many weights a token is multiplied by in an average layer. It is the unit of pipeline costs."""
    attention = 2 * text.hidden_size * text.head_size * (text.num_attention_heads + text.num_key_value_heads)
    mlps = 0
    for layer in range(text.num_hidden_layers):
        experts = text.experts_in(layer)
        width = text.intermediate_size
        if experts is not None:
            width = experts.num_experts_per_tok * experts.moe_intermediate_size + experts.shared_width
        mlps += 3 * text.hidden_size * width
    return attention + mlps / text.num_hidden_layers


def text_units(text: TextConfig, whole: int = 0) -> tuple[PipelineUnit, ...]:
    """Return the pipeline units of the text decoder. `whole`: number of first layers that must be in the same stage."""
    carry = StageActivation(1, text.hidden_size)
    first = tuple(
        PipelineUnit(f"text.layers.{{{n}}}", 1.0, "text", carry if n == whole - 1 else None) for n in range(whole)
    )
    rest = f"text.layers.{{{whole}-{text.num_hidden_layers - 1}}}" if whole else "text.layers.{*}"
    others = (PipelineUnit(rest, 1.0, "text", carry),) if whole < text.num_hidden_layers else ()
    return (
        PipelineUnit("text.embed", 0.0, output=None if whole else carry),
        *first,
        *others,
        PipelineUnit("text.norm", 0.0),
        PipelineUnit("head", text.hidden_size * text.vocab_size / layer_weights(text)),
    )


_PAIRS = (
    ("text.embed.weight", "embed_tokens.weight"),
    ("text.layers.{i}.attn_norm.weight", "layers.{i}.input_layernorm.weight"),
    ("text.layers.{i}.attn.q.{kind}", "layers.{i}.self_attn.q_proj.{kind}"),
    ("text.layers.{i}.attn.k.{kind}", "layers.{i}.self_attn.k_proj.{kind}"),
    ("text.layers.{i}.attn.v.{kind}", "layers.{i}.self_attn.v_proj.{kind}"),
    ("text.layers.{i}.attn.q_norm.weight", "layers.{i}.self_attn.q_norm.weight"),
    ("text.layers.{i}.attn.k_norm.weight", "layers.{i}.self_attn.k_norm.weight"),
    ("text.layers.{i}.attn.o.weight", "layers.{i}.self_attn.o_proj.weight"),
    ("text.layers.{i}.mlp_norm.weight", "layers.{i}.post_attention_layernorm.weight"),
    ("text.layers.{i}.mlp.gate.weight", "layers.{i}.mlp.gate_proj.weight"),
    ("text.layers.{i}.mlp.up.weight", "layers.{i}.mlp.up_proj.weight"),
    ("text.layers.{i}.mlp.down.weight", "layers.{i}.mlp.down_proj.weight"),
    ("text.layers.{i}.mlp.router.weight", "layers.{i}.mlp.gate.weight"),
    ("text.layers.{i}.mlp.shared.weigher.weight", "layers.{i}.mlp.shared_expert_gate.weight"),
    ("text.layers.{i}.mlp.shared.mlp.gate.weight", "layers.{i}.mlp.shared_expert.gate_proj.weight"),
    ("text.layers.{i}.mlp.shared.mlp.up.weight", "layers.{i}.mlp.shared_expert.up_proj.weight"),
    ("text.layers.{i}.mlp.shared.mlp.down.weight", "layers.{i}.mlp.shared_expert.down_proj.weight"),
    ("text.norm.weight", "norm.weight"),
)
_BUFFERS = ("rotary_emb.inv_freq", "layers.{i}.self_attn.rotary_emb.inv_freq")


def text_rules(text: TextConfig, prefix: str = "model.", *, stacked: bool = False) -> list[Rule]:
    """Return the weight rules of the text decoder.

    `prefix`: first part of names in weight files. `stacked`: files stack each weight of a layer's experts.
    """
    rules = [Rule(native, prefix + foreign) for native, foreign in _PAIRS]
    if text.experts is not None and stacked:
        width = text.experts.moe_intermediate_size
        foreign, both = prefix + "layers.{i}.mlp.experts.", TransposeIfNeeded(2 * width, text.hidden_size)
        rules += [
            Rule("text.layers.{i}.mlp.experts.gate", foreign + "gate_up_proj", TensorChunk(0, 2, 1, both)),
            Rule("text.layers.{i}.mlp.experts.up", foreign + "gate_up_proj", TensorChunk(1, 2, 1, both)),
            Rule("text.layers.{i}.mlp.experts.down", foreign + "down_proj", TransposeIfNeeded(text.hidden_size, width)),
        ]
    elif text.experts is not None:
        numbers = range(text.experts.num_experts)
        for part in ("gate", "up", "down"):
            names = tuple(f"{prefix}layers.{{i}}.mlp.experts.{n}.{part}_proj.weight" for n in numbers)
            rules.append(Rule(f"text.layers.{{i}}.mlp.experts.{part}", names, Stack()))
    return rules


def language_weights(
    text: TextConfig,
    tied: bool,
    rules: Iterable[Rule] = (),
    *,
    prefix: str = "model.",
    head: str = "lm_head.weight",
    stacked: bool = False,
    renames: tuple[tuple[str, str], ...] = (),
    ignored: tuple[str, ...] = (),
) -> WeightMap:
    """Return the weight map of a text decoder and head, after the `rules` of other modules.

    The first matching rule is used. `prefix`, `stacked`: see `text_rules`. `ignored`: further names that are not read,
    besides rotary buffers of old folders. Some folders contain a tied head as a copy of the embedding: it is ignored if
    it is equal (transformers would read a different one as an untied head).
    """
    buffers = tuple(prefix + name for name in _BUFFERS)
    heads, copies = ((), (head,)) if tied else ((Rule("head.weight", head),), ())
    return WeightMap(
        (*rules, *text_rules(text, prefix, stacked=stacked), *heads),
        renames,
        (*ignored, *buffers, *copies),
        copies=tuple((name, "text.embed.weight") for name in copies),
    )
