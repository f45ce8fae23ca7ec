"""The configuration of CSM, and its form in the config.json of Hugging Face folders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from tessera.config.reader import Section, build
from tessera.models.text.decoder import TextConfig
from tessera.models.text.hf import PLAIN_TEXT, HFTextFormat, check_model_type, check_supported, hf_defaults, override
from tessera.ops.attention import AttentionBackend

MODEL_TYPE, DEPTH_TYPE = "csm", "csm_depth_decoder_model"
_SAME: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "rope_theta": 5e5}
BACKBONE = HFTextFormat(
    MODEL_TYPE,
    override(PLAIN_TEXT, attention_bias=False),
    hf_defaults(128256, 2048, 8192, 16, 32, 8, 2048, **_SAME, bos_token_id=128000, pad_token_id=128002),
    extra_fields={"mlp_bias": False},
)
DEPTH = HFTextFormat(
    DEPTH_TYPE,
    override(PLAIN_TEXT, attention_bias=False),
    hf_defaults(2051, 1024, 8192, 4, 8, 2, 33, **_SAME),
    extra_fields={"mlp_bias": False},
)


class CSMConfig(Section):
    kept_ids: ClassVar[tuple[str, ...]] = (
        "audio_token_id",
        "audio_eos_token_id",
        "codebook_eos_token_id",
        "codebook_pad_token_id",
    )

    text: TextConfig = Field(description="the backbone; its vocabulary is that of texts")
    depth: TextConfig = Field(description="the depth decoder; its vocabulary is the codes of one codebook")
    num_codebooks: int = Field(32, gt=1, le=1024)
    codec_codes: int = Field(
        2048, gt=0, le=10**8, description="codes that the codec writes in each codebook; later ones are control codes"
    )
    tie_codebooks_embeddings: bool = Field(True, description="backbone and depth decoder read one table of codes")
    audio_token_id: int = Field(128002, ge=0, description="the token at the position of a frame")
    audio_eos_token_id: int = Field(128003, ge=0, description="the token at the position of the end of speech")
    codebook_eos_token_id: int = Field(0, ge=0, description="the code of every codebook at the end of speech")
    codebook_pad_token_id: int | None = Field(2050, description="kept for exports: the model does not use it")
    attention: AttentionBackend = Field("auto", description="implementation of attention")

    @property
    def codebook_size(self) -> int:
        return self.depth.vocab_size

    @property
    def special_token_ids(self) -> dict[str, int]:
        return {"<|AUDIO|>": self.audio_token_id, "<|audio_eos|>": self.audio_eos_token_id}

    @model_validator(mode="after")
    def _fits(self) -> CSMConfig:
        for name in ("audio_token_id", "audio_eos_token_id"):
            if getattr(self, name) >= self.text.vocab_size:
                raise ValueError(
                    f"{name} {getattr(self, name)} is outside the vocabulary of {self.text.vocab_size} tokens"
                )
        if self.codebook_eos_token_id >= self.codebook_size:
            raise ValueError(
                f"codebook_eos_token_id {self.codebook_eos_token_id} is outside of the {self.codebook_size} codes"
            )
        return self

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> CSMConfig:
        kind = str(data.get("model_type"))
        check_model_type(kind, (MODEL_TYPE,))
        where = f"config.json ({kind})"
        depth = dict(data.get("depth_decoder_config") or {})
        codebooks = data.get("num_codebooks", 32)
        text = BACKBONE.read({**data, "vocab_size": data.get("text_vocab_size", 128256)}, where)
        check_supported(
            [
                ("depth_decoder_config.model_type", depth.get("model_type", DEPTH_TYPE), (DEPTH_TYPE,)),
                ("depth_decoder_config.num_codebooks", depth.get("num_codebooks", 32), (codebooks,)),
                (
                    "depth_decoder_config.backbone_hidden_size",
                    depth.get("backbone_hidden_size", 2048),
                    (text["hidden_size"],),
                ),
                ("depth_decoder_config.vocab_size", depth.get("vocab_size", 2051), (data.get("vocab_size", 2051),)),
            ],
            where,
        )
        codec, tied = data.get("codec_config"), data.get("tie_codebooks_embeddings")
        size = codec.get("codebook_size") if isinstance(codec, Mapping) else None
        fields = {
            **{name: data[name] for name in cls.kept_ids if name in data},
            "num_codebooks": codebooks,
            **({} if size is None else {"codec_codes": size}),
            "tie_codebooks_embeddings": True if tied is None else tied,
            "text": text,
            "depth": DEPTH.read(depth, f"{where}: depth_decoder_config"),
        }
        return build(cls, fields, where)

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json that transformers 5 writes and reads, without the codec."""
        shared = {"vocab_size": self.codebook_size, "num_codebooks": self.num_codebooks}
        depth = DEPTH.write(self.depth, "model.config.depth")
        return {
            "architectures": ["CsmForConditionalGeneration"],
            **BACKBONE.write(self.text),
            **{name: getattr(self, name) for name in self.kept_ids},
            **shared,
            "text_vocab_size": self.text.vocab_size,
            "tie_codebooks_embeddings": self.tie_codebooks_embeddings,
            "depth_decoder_config": {**depth, **shared, "backbone_hidden_size": self.text.hidden_size},
        }
