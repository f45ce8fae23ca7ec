"""How Hugging Face folders spell a text tower: fields of config.json to ours, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.core.errors import TesseraError
from tessera.models._text.config import ExpertsConfig, TextConfig

_SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "attention_bias",
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


Check = tuple[str, Any, tuple[Any, ...]]  # what a folder says of something, and what it may say


def but(fixed: Mapping[str, Any], *free: str, **other: Any) -> dict[str, Any]:
    """The same, without some and with others."""
    return {**{name: value for name, value in fixed.items() if name not in free}, **other}


@dataclass(frozen=True)
class Spelling:
    """One `model_type` of a text tower: what it fixes, what of ours it can say, and what it takes for granted."""

    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)  # ours, whatever the folder says
    defaults: Mapping[str, Any] = field(default_factory=dict)  # ours, when the folder says nothing
    silent: tuple[str, ...] = ()  # fields this type does not have: they are not written
    extra: Mapping[str, Any] = field(default_factory=dict)  # written beside ours

    def read(self, data: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Fields of a `TextConfig`."""
        _refuse_unsupported(data, where)
        rope = _rope(data)
        told = [name for name in _SAME if name in data and name not in self.silent]
        # That there is no such token is said by null; of a number, null says nothing.
        fields = {name: data[name] for name in told if data[name] is not None or name.endswith("_token_id")}
        fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
        if "head_dim" not in self.defaults and fields.get("head_dim") == _derived_head(data):
            del fields["head_dim"]  # said, but it goes without saying
        theta = rope.get("rope_theta") or data.get("rope_theta")
        if theta is not None:
            fields["rope_theta"] = theta
        for name in ("mrope_section", "partial_rotary_factor"):
            value = rope.get(name, data.get(name))
            if value is not None:
                fields[name] = value
        if rope.get("rope_type", rope.get("type")) == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            fields["rope_scaling"] = {name: rope[name] for name in names if name in rope}
        experts = _read_experts(data)
        if experts:
            fields["experts"] = experts
        for name, value in self.fixed.items():
            if fields.get(name, value) != value:
                raise TesseraError(f"{name} = {fields[name]!r} is not supported", where=where, allowed=[value])
        return {**self.defaults, **fields, **self.fixed}

    def fits(self, text: TextConfig) -> bool:
        return all(getattr(text, name) == value for name, value in self.fixed.items())

    def write(self, text: TextConfig, where: str = "model.config.text") -> dict[str, Any]:
        """The text's part of a config.json that transformers 5 reads."""
        for name, value in self.fixed.items():
            if getattr(text, name) != value:
                raise TesseraError(
                    f"a {self.model_type} has {name} = {value}, this model {getattr(text, name)}",
                    where=f"{where}.{name}",
                    fix="leave it as it is in the family, or do without an export",
                )
        if "head_dim" in self.silent and text.head_size * text.num_attention_heads != text.hidden_size:
            raise TesseraError(
                f"transformers has no {self.model_type} whose heads ({text.num_attention_heads} x {text.head_size}) do "
                f"not fill hidden_size ({text.hidden_size})",
                where=f"{where}.head_dim",
            )
        plain = text.model_dump(mode="json")
        fields = {name: plain[name] for name in _SAME if name not in self.silent and name != "head_dim"}
        if "head_dim" not in self.silent:
            fields["head_dim"] = text.head_size
        return {
            "model_type": self.model_type,
            **fields,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_parameters": _write_rope(text),
            **_write_experts(text.experts),
            **self.extra,
        }


# What most towers have in common; each spelling says where it differs.
PLAIN: Mapping[str, Any] = {
    "qk_norm": False,
    "sandwich_norm": False,
    "experts": None,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "mrope_section": None,
    "mrope_interleaved": False,
}
NO_WINDOW = {"use_sliding_window": False}
LLAMA = Spelling("llama", but(PLAIN, "rope_scaling", attention_bias=False), extra={"mlp_bias": False})
QWEN2 = Spelling("qwen2", but(PLAIN, attention_bias=True), silent=("attention_bias", "head_dim"), extra=NO_WINDOW)
QWEN3 = Spelling("qwen3", but(PLAIN, qk_norm=True), {"head_dim": 128}, extra=NO_WINDOW)
QWEN3_MOE = Spelling("qwen3_moe", but(PLAIN, "experts", qk_norm=True), {"head_dim": None}, extra=NO_WINDOW)
LANGUAGE = {one.model_type: one for one in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}


def _derived_head(data: Mapping[str, Any]) -> int | None:
    heads = data.get("num_attention_heads")
    return data["hidden_size"] // heads if heads and "hidden_size" in data else None


def _rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}


def _write_rope(text: TextConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": text.rope_theta}
    if text.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **text.rope_scaling.model_dump(mode="json")}
    if text.mrope_section is not None:
        rope["mrope_section"] = list(text.mrope_section)
    if text.mrope_interleaved:
        rope["mrope_interleaved"] = True
    if text.partial_rotary_factor != 1:
        rope["partial_rotary_factor"] = text.partial_rotary_factor
    return rope


def _read_experts(data: Mapping[str, Any]) -> dict[str, Any]:
    count = data.get("num_experts", data.get("num_local_experts"))
    if not count:
        return {}
    names = [name for name in ExpertsConfig.model_fields if name != "num_experts" and data.get(name) is not None]
    return {"num_experts": count, **{name: data[name] for name in names}}


def _write_experts(experts: ExpertsConfig | None) -> dict[str, Any]:
    if experts is None:
        return {}
    plain = experts.model_dump(mode="json")
    return {**plain, "num_local_experts": experts.num_experts}


def _refuse_unsupported(data: Mapping[str, Any], where: str) -> None:
    rope = _rope(data)
    checks: list[Check] = [
        ("hidden_act", data.get("hidden_act", "silu"), ("silu",)),
        ("attention_dropout", data.get("attention_dropout") or 0.0, (0.0,)),
        ("use_sliding_window", bool(data.get("use_sliding_window")), (False,)),
        ("mlp_bias", bool(data.get("mlp_bias")), (False,)),
        ("rope type", rope.get("rope_type", rope.get("type", "default")), ("default", "mrope", "llama3")),
        ("quantization_config", data.get("quantization_config"), (None,)),
    ]
    refuse(checks, where)


def refuse(checks: Sequence[Check], where: str) -> None:
    """Values that change what the model computes and that we do not compute are errors, not surprises."""
    for name, value, allowed in checks:
        if value not in allowed:
            raise TesseraError(f"{name} = {value!r} is not supported", where=where, allowed=allowed)
