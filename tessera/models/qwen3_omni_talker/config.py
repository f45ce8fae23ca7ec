"""The configuration of the talker of Qwen3-Omni, and its form in the config.json of Hugging Face folders.

A published folder contains a thinker, a talker and a vocoder. The configuration describes all of them, so that an
export of the talker is a full folder, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.models.qwen3_omni.config import FULL_MODEL, THINKER, Qwen3OmniConfig
from tessera.models.qwen3_vl.config import SECTIONS
from tessera.models.text.decoder import ExpertsConfig, TextConfig
from tessera.models.text.hf import (
    PLAIN_TEXT,
    HFTextFormat,
    check_model_type,
    check_supported,
    hf_defaults,
    hf_expert_defaults,
    override,
)
from tessera.ops.attention import AttentionBackend

TALKER = "qwen3_omni_moe_talker"
_SHARED = "shared_expert_intermediate_size"
TEXT = HFTextFormat(
    f"{TALKER}_text",
    override(PLAIN_TEXT, "experts", "mrope_section", attention_bias=False, qk_norm=True, mrope_interleaved=True),
    {**hf_defaults(3072, 1024, 2048, 20, 16, 2, 32768, head_dim=None), "mrope_section": SECTIONS},
    hf_expert_defaults(128, 8, 384, normalized=False),
)
PREDICTOR = HFTextFormat(
    f"{TALKER}_code_predictor",
    override(PLAIN_TEXT, attention_bias=False, qk_norm=True),
    hf_defaults(2048, 1024, 3072, 5, 16, 8, 32768, head_dim=128),
    extra_fields={"sliding_window": None},
)
# Every layer of transformers' talker has experts, whatever these fields say.
_IN_ALL_LAYERS: Mapping[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": ()}
# Fields of config.json -> default of transformers. Those of the first table are in `talker_config`.
_TALKER_FIELDS: Mapping[str, Any] = {
    "num_code_groups": 32,
    "accept_hidden_layer": 18,
    "codec_pad_id": 4196,
    "codec_bos_id": 4197,
    "codec_eos_token_id": 4198,
    "codec_nothink_id": 4203,
    "codec_think_bos_id": 4204,
    "codec_think_eos_id": 4205,
}
_TOKEN_FIELDS: Mapping[str, int] = {
    "im_start_token_id": 151644,
    "im_end_token_id": 151645,
    "tts_pad_token_id": 151671,
    "tts_bos_token_id": 151672,
    "tts_eos_token_id": 151673,
    "system_token_id": 8948,
    "user_token_id": 872,
    "assistant_token_id": 77091,
}


class TalkerExpertsConfig(ExpertsConfig):
    shared_expert_intermediate_size: int = Field(gt=0, le=10**8, description="width of the expert of all tokens")

    @property
    def shared_width(self) -> int:
        return self.shared_expert_intermediate_size


class TalkerTextConfig(TextConfig):
    """Configure the decoder of the talker. Its vocabulary is that of the first codebook and of control codes."""

    rope_theta: float = Field(1e6, gt=0)
    mrope_section: tuple[int, int, int] | None = SECTIONS
    mrope_interleaved: bool = True
    qk_norm: bool = True
    max_position_embeddings: int = Field(65536, gt=0, le=10**8)
    experts: TalkerExpertsConfig


class CodePredictorConfig(TextConfig):
    """Configure the decoder over codebooks. `vocab_size`: number of codes of each codebook but the first."""

    rope_theta: float = Field(1e6, gt=0)
    qk_norm: bool = True


class VocoderConfig(Section):
    """Describe the vocoder of a full folder, which decodes codes to sound. It is not trained."""

    codebook_size: int = Field(2048, gt=0, le=10**8)
    num_quantizers: int = Field(16, gt=0, le=1024)
    hidden_size: int = Field(1024, gt=0, le=10**8)
    intermediate_size: int = Field(3072, gt=0, le=10**8)
    num_hidden_layers: int = Field(8, gt=0, le=10**4)
    num_attention_heads: int = Field(16, gt=0, le=10**8)
    num_key_value_heads: int = Field(16, gt=0, le=10**8)
    sliding_window: int = Field(72, gt=0, le=10**8)
    rope_theta: float = Field(1e4, gt=0)
    max_position_embeddings: int = Field(8000, gt=0, le=10**8)
    layer_scale_initial_scale: float = 0.01
    rms_norm_eps: float = Field(1e-5, gt=0)
    upsample_rates: tuple[int, ...] = (8, 5, 4, 3)
    upsampling_ratios: tuple[int, ...] = (2, 2)
    decoder_dim: int = Field(1536, gt=0, le=10**8)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of this class from the `code2wav_config` of a config.json."""
        rope = data.get("rope_parameters") or {}
        fields = {name: data[name] for name in cls.model_fields if data.get(name) is not None}
        return {**fields, "rope_theta": rope.get("rope_theta", fields.get("rope_theta", 1e4))}

    def write(self) -> dict[str, Any]:
        fields = self.model_dump(mode="json", exclude={"rope_theta"})
        return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta}}


class TalkerConfig(Section):
    """Configure a talker, and describe the other parts of its folder."""

    text: TalkerTextConfig
    depth: CodePredictorConfig
    thinker: Qwen3OmniConfig
    vocoder: VocoderConfig = Field(default_factory=lambda: VocoderConfig.model_validate({}))
    attention: AttentionBackend = Field("auto", description="implementation of attention")
    num_code_groups: int = Field(16, gt=1, le=1024, description="number of codebooks")
    accept_hidden_layer: int = Field(
        24,
        gt=0,
        le=10**4,
        description="number of layers of the thinker that compute what the talker reads in place of media",
    )
    reads_media: bool = Field(
        False, description="train on questions with images, videos and sound: the layers of the thinker run, too"
    )
    trains_thinker: bool = Field(
        False, description="train the thinker, too: on the text of all answers, and through what the talker reads of it"
    )
    speaker_id: dict[str, int] = Field(default_factory=dict, description="control codes of the voices, by name")
    codec_pad_id: int = Field(2148, ge=0)
    codec_bos_id: int = Field(2149, ge=0)
    codec_eos_token_id: int = Field(2150, ge=0)
    codec_nothink_id: int = Field(2155, ge=0)
    codec_think_bos_id: int = Field(2156, ge=0)
    codec_think_eos_id: int = Field(2157, ge=0)
    im_start_token_id: int = Field(151644, ge=0)
    im_end_token_id: int = Field(151645, ge=0)
    tts_pad_token_id: int = Field(151671, ge=0)
    tts_bos_token_id: int = Field(151672, ge=0)
    tts_eos_token_id: int = Field(151673, ge=0)
    system_token_id: int = Field(8948, ge=0)
    user_token_id: int = Field(872, ge=0)
    assistant_token_id: int = Field(77091, ge=0)

    tie_word_embeddings: ClassVar[bool] = False

    @property
    def can_read_media(self) -> bool:
        """Return whether the talker reads states of the thinker from between its DeepStack layers and its last layer.

        At these bounds, releases of transformers differ in what the talker reads.
        """
        layers, taps = self.thinker.text.num_hidden_layers, len(self.thinker.vision.deepstack_visual_indexes)
        return taps < self.accept_hidden_layer < layers

    @property
    def code_sizes(self) -> tuple[int, ...]:
        """Return the number of codes of each codebook."""
        return (self.text.vocab_size, *(self.depth.vocab_size,) * (self.num_code_groups - 1))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.depth.hidden_size != self.text.hidden_size:
            raise ValueError(
                f"depth.hidden_size {self.depth.hidden_size} differs from text.hidden_size "
                f"{self.text.hidden_size}: the code predictor reads hidden states of the talker as they are"
            )
        layers, taps = self.thinker.text.num_hidden_layers, len(self.thinker.vision.deepstack_visual_indexes)
        if self.trains_thinker:
            self._check_training()
        if (self.reads_media or self.trains_thinker) and not self.can_read_media:
            raise ValueError(
                f"accept_hidden_layer {self.accept_hidden_layer} must be more than the {taps} layers that images "
                f"enter, and less than the {layers} layers of the thinker"
            )
        if self.accept_hidden_layer > layers:
            raise ValueError(f"accept_hidden_layer is {self.accept_hidden_layer}, but the thinker has {layers} layers")
        codes = [name for name in type(self).model_fields if name.startswith("codec_")]
        self._check_ids({name: getattr(self, name) for name in codes}, self.text.vocab_size, "codes")
        self._check_ids(
            {f"speaker_id.{name}": code for name, code in self.speaker_id.items()}, self.text.vocab_size, "codes"
        )
        self._check_voices({getattr(self, name): name for name in codes})
        tokens = {name: getattr(self, name) for name in _TOKEN_FIELDS}
        self._check_ids(tokens, self.thinker.text.vocab_size, "tokens of the thinker")
        return self

    def _check_voices(self, control: Mapping[int, str]) -> None:
        """Raise if the name or the code of a voice has another meaning. `control`: names of control codes, by code."""
        if len({name.lower() for name in self.speaker_id}) < len(self.speaker_id):
            raise ValueError("speaker_id: two names are equal except for case, which is ignored")
        for name, code in self.speaker_id.items():
            if code < self.depth.vocab_size:
                raise ValueError(
                    f"speaker_id.{name}: {code} is a code of speech; those below {self.depth.vocab_size} are"
                )
            if code in control:
                raise ValueError(f"speaker_id.{name}: {code} is {control[code]}")

    def _check_training(self) -> None:
        if self.reads_media:
            raise ValueError("trains_thinker: the trained thinker always reads media; leave out reads_media")
        if self.thinker.text.experts.output_router_logits:
            raise ValueError(
                "thinker.text.experts.output_router_logits: a thinker that is trained with its talker has no load "
                "balancing loss"
            )

    def _check_ids(self, ids: Mapping[str, int], count: int, what: str) -> None:
        for name, number in ids.items():
            if not 0 <= number < count:
                raise ValueError(f"{name} {number} is outside the {count} {what}")

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """Read the config.json of a full folder."""
        check_model_type(str(data.get("model_type")), [FULL_MODEL])
        where = f"config.json ({TALKER})"
        talker = data.get("talker_config") or {}
        text, predictor = talker.get("text_config") or {}, talker.get("code_predictor_config") or {}
        groups = talker.get("num_code_groups", _TALKER_FIELDS["num_code_groups"])
        width = (data.get("thinker_config") or {}).get("text_config", {}).get("hidden_size", 2048)
        check_supported(
            [
                ("enable_audio_output", data.get("enable_audio_output", True), (True,)),
                ("talker_config.thinker_hidden_size", talker.get("thinker_hidden_size", 2048), (width,)),
                ("code_predictor_config.num_code_groups", predictor.get("num_code_groups", 32), (groups,)),
                ("code_predictor_config.sliding_window", predictor.get("sliding_window"), (None,)),
            ],
            where,
        )
        fields = TEXT.read({**text, **_IN_ALL_LAYERS}, where)
        fields["experts"] = {**fields["experts"], **({_SHARED: text[_SHARED]} if _SHARED in text else {})}
        thinker = Qwen3OmniConfig.from_hf({"model_type": FULL_MODEL, "thinker_config": data.get("thinker_config")})
        return build(
            cls,
            {
                "text": fields,
                "depth": PREDICTOR.read(predictor, where),
                "thinker": thinker.model_dump(),
                "vocoder": VocoderConfig.read(data.get("code2wav_config") or {}),
                "speaker_id": talker.get("speaker_id") or {},
                **{name: talker.get(name, default) for name, default in _TALKER_FIELDS.items()},
                **{name: data.get(name, default) for name, default in _TOKEN_FIELDS.items()},
            },
            where,
        )

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json of a full folder."""
        thinker = {name: value for name, value in self.thinker.to_hf().items() if name != "architectures"}
        text = TEXT.write(self.text)
        talker = {
            "model_type": TALKER,
            "thinker_hidden_size": self.thinker.text.hidden_size,
            "text_config": {**text, _SHARED: self.text.experts.shared_expert_intermediate_size},
            "code_predictor_config": {
                **PREDICTOR.write(self.depth, "model.config.depth"),
                "num_code_groups": self.num_code_groups,
            },
            "speaker_id": dict(self.speaker_id),
            "spatial_merge_size": self.thinker.vision.spatial_merge_size,
            **{name: getattr(self, name) for name in _TALKER_FIELDS},
            **{name: getattr(self.thinker, name) for name in _SHARED_WITH_THINKER},
        }
        return {
            "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
            "model_type": FULL_MODEL,
            "enable_audio_output": True,
            "thinker_config": {**thinker, "model_type": THINKER},
            "talker_config": talker,
            "code2wav_config": self.vocoder.write(),
            **{name: getattr(self, name) for name in _TOKEN_FIELDS},
        }


# Fields that `talker_config` repeats from `thinker_config`, for positions of media.
_SHARED_WITH_THINKER = (
    "audio_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "audio_start_token_id",
    "position_id_per_seconds",
)
