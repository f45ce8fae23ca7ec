"""The numbers of a text tower, under the names that Hugging Face folders use."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tessera.core.config import Section


class ExpertsConfig(Section):
    num_experts: int = Field(gt=1, le=10**8)
    num_experts_per_tok: int = Field(gt=0, le=10**8)
    moe_intermediate_size: int = Field(gt=0, le=10**8, description="width of one expert")
    norm_topk_prob: bool = Field(True, description="the weights of a token's experts add up to one")
    output_router_logits: bool = Field(False, description="trains with the loss that keeps experts evenly used")
    router_aux_loss_coef: float = Field(0.001, ge=0, description="weight of that loss")
    decoder_sparse_step: int = Field(1, gt=0, le=10**8, description="every so many layers have experts")
    mlp_only_layers: tuple[int, ...] = Field((), description="layers without experts")

    def in_layer(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class RopeScaling(Section):
    """A stretch of rotary frequencies, for texts longer than those of pretraining.

    linear stretches all by `factor`; llama3 and yarn slow ones by `factor`, fast ones not at all, and blend between;
    yarn also sharpens attention. dynamic stretches nothing up to `max_position_embeddings`, and longer samples, which
    it would stretch by their length, are refused.
    """

    rope_type: Literal["linear", "dynamic", "yarn", "llama3"] = "llama3"
    factor: float = Field(gt=0)
    low_freq_factor: float = Field(1.0, gt=0, description="llama3: fewer turns in the original length are slow")
    high_freq_factor: float = Field(4.0, gt=0, description="llama3: more turns in the original length are fast")
    original_max_position_embeddings: int = Field(8192, gt=0, description="llama3, yarn: the length of pretraining")
    beta_fast: float = Field(32.0, gt=0, description="yarn: turns above which nothing is stretched")
    beta_slow: float = Field(1.0, gt=0, description="yarn: turns below which all is stretched")
    attention_factor: float | None = Field(None, gt=0, description="yarn: of queries and keys; default: by factor")
    mscale: float | None = Field(None, description="yarn: with the next, another default of attention_factor")
    mscale_all_dim: float | None = None
    truncate: bool = Field(True, description="yarn: the blend begins and ends at whole frequencies")

    @property
    def told(self) -> tuple[str, ...]:
        """Fields that its type has."""
        own = {
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
        return ("rope_type", "factor", *own.get(self.rope_type, ()))


class TextConfig(Section):
    vocab_size: int = Field(gt=0, le=10**8)
    hidden_size: int = Field(gt=0, le=10**8)
    intermediate_size: int = Field(gt=0, le=10**8)
    num_hidden_layers: int = Field(gt=0, le=10**4)
    num_attention_heads: int = Field(gt=0, le=10**8)
    num_key_value_heads: int = Field(gt=0, le=10**8)
    head_dim: int | None = Field(None, gt=0, le=10**8, description="default: hidden_size / num_attention_heads")
    rms_norm_eps: float = Field(1e-6, gt=0)
    attention_bias: bool = Field(False, description="of the products that make queries, keys and values")
    qk_norm: bool = Field(False, description="queries and keys are normalised head by head")
    sandwich_norm: bool = Field(False, description="what attention and MLP give is normalised before it is added")
    rope_theta: float = Field(1e4, gt=0)
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = Field(1.0, gt=0, le=1, description="share of each head that turns with the position")
    mrope_section: tuple[int, int, int] | None = Field(
        None, description="how many rotary frequencies follow time, height and width; default: positions of one axis"
    )
    mrope_interleaved: bool = Field(False, description="the three take turns, instead of one after another")
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
    def longest(self) -> int | None:
        """Tokens of a sample, at most; None where every length is computed alike."""
        dynamic = self.rope_scaling is not None and self.rope_scaling.rope_type == "dynamic"
        return self.max_position_embeddings if dynamic else None

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
            raise ValueError(
                f"{self.rotary_dim} numbers of each head turn with the position: it must be an even number"
            )
        sections = self.mrope_section
        if sections is not None and (min(sections) < 0 or 2 * sum(sections) != self.rotary_dim):
            raise ValueError(f"mrope_section {list(sections)} must sum to half of what turns, {self.rotary_dim / 2:g}")
        if self.experts is not None and self.experts.num_experts_per_tok > self.experts.num_experts:
            raise ValueError(
                f"a token cannot have {self.experts.num_experts_per_tok} of {self.experts.num_experts} experts"
            )
        return self
