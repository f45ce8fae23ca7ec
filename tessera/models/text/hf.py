"""Convert the text fields of a Hugging Face config.json to a `TextConfig`, and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import TesseraError
from tessera.models.text.decoder import ExpertsConfig, RopeScaling, TextConfig

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


Check = tuple[str, Any, tuple[Any, ...]]  # name of a field, its value in config.json, supported values


class UnsupportedValueError(TesseraError):
    """Report a value of config.json for which Tessera's family would compute different outputs than transformers."""


def override(fields: Mapping[str, Any], *removed: str, **changed: Any) -> dict[str, Any]:
    """Return a copy of the fields, with some removed and some changed."""
    return {**{name: value for name, value in fields.items() if name not in removed}, **changed}


@dataclass(frozen=True)
class HFTextFormat:
    """Describe one `model_type` of a text decoder: its fixed fields, its defaults, and the fields that are written.

    A field that is missing in config.json has the default of transformers' class, not the default of a recipe:
    `defaults` has a value for every field (see `hf_defaults`).
    """

    model_type: str
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields of `TextConfig` with one value for all such models
    defaults: Mapping[str, Any] = field(default_factory=dict)  # values of fields that are missing in config.json
    expert_defaults: Mapping[str, Any] | None = None  # defaults of missing fields about experts; None: no experts
    omitted_fields: tuple[str, ...] = ()  # fields that this model_type lacks; they are not written
    extra_fields: Mapping[str, Any] = field(default_factory=dict)  # constant fields that `write` adds

    def read(self, data: Mapping[str, Any], where: str, dynamic: bool = False) -> dict[str, Any]:
        """Return the fields of a `TextConfig` from a config.json.

        `dynamic`: accept dynamic rope scaling. The family then refuses samples that are long enough to be scaled.
        """
        _check_text_fields(data, where, dynamic)
        rope = _rope(data)
        present = [name for name in _SAME if name in data and name not in self.omitted_fields]
        # A null token id means that there is no such token. Null in other fields means the default.
        fields = {name: data[name] for name in present if data[name] is not None or name.endswith("_token_id")}
        fields = {**self.defaults, **fields}
        if fields["num_key_value_heads"] is None or ("num_key_value_heads" in data and not data["num_key_value_heads"]):
            fields["num_key_value_heads"] = fields["num_attention_heads"]
        if "head_dim" not in self.defaults and fields.get("head_dim") == _derived_head(fields):
            fields.pop("head_dim", None)  # redundant: it equals hidden_size / num_attention_heads
        # Not written with `or`, because 0 is a valid value.
        theta = data.get("rope_theta") if rope.get("rope_theta") is None else rope["rope_theta"]
        if theta is not None:
            fields["rope_theta"] = theta
        for name in ("mrope_section", "partial_rotary_factor"):
            value = rope.get(name, data.get(name))
            if value is not None:
                fields[name] = value
        scaling = _read_scaling(rope, fields["max_position_embeddings"], where)
        if scaling is not None:
            fields["rope_scaling"] = scaling
        experts = self._read_experts(data)
        if experts:
            fields["experts"] = experts
        check_supported([(name, fields.get(name, value), (value,)) for name, value in self.fixed.items()], where)
        return {**fields, **self.fixed}

    def _read_experts(self, data: Mapping[str, Any]) -> dict[str, Any]:
        defaults = self.expert_defaults or {}
        count = data.get("num_experts", data.get("num_local_experts", defaults.get("num_experts")))
        if not count:
            return {}
        names = [name for name in ExpertsConfig.model_fields if name != "num_experts" and data.get(name) is not None]
        return {**defaults, "num_experts": count, **{name: data[name] for name in names}}

    def hidden_and_head(self, data: Mapping[str, Any]) -> tuple[int, float]:
        """Return `hidden_size`, and its quotient by the number of heads, with defaults for missing fields."""
        fields = {**self.defaults, **{name: value for name, value in data.items() if value is not None}}
        return fields["hidden_size"], fields["hidden_size"] / (fields["num_attention_heads"] or 1)

    def fits(self, text: TextConfig) -> bool:
        """Return whether this format can describe the text decoder."""
        return all(getattr(text, name) == value for name, value in self.fixed.items())

    def write(self, text: TextConfig, where: str = "model.config.text") -> dict[str, Any]:
        """Return the text fields of a config.json for transformers 5."""
        for name, value in self.fixed.items():
            if getattr(text, name) != value:
                raise TesseraError(
                    f"{name} is {getattr(text, name)}, and transformers' class for {self.model_type} has {value}",
                    where=f"{where}.{name}",
                    fix="keep the family's value, or set checkpoint.export=false",
                    code="model.not-exportable",
                )
        if "head_dim" in self.omitted_fields and text.head_size * text.num_attention_heads != text.hidden_size:
            raise TesseraError(
                f"{text.num_attention_heads} heads x {text.head_size} do not equal hidden_size {text.hidden_size}, as "
                f"transformers requires for {self.model_type}",
                where=f"{where}.head_dim",
                code="model.not-exportable",
            )
        plain = text.model_dump(mode="json")
        fields = {name: plain[name] for name in _SAME if name not in self.omitted_fields and name != "head_dim"}
        if "head_dim" not in self.omitted_fields:
            fields["head_dim"] = text.head_size
        return {
            "model_type": self.model_type,
            **fields,
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "rope_parameters": _write_rope(text),
            **_write_experts(text.experts),
            **self.extra_fields,
        }


# Fixed fields of `TextConfig` for most values of `model_type`. Each format lists its differences.
PLAIN_TEXT: Mapping[str, Any] = {
    "qk_norm": False,
    "sandwich_norm": False,
    "experts": None,
    "partial_rotary_factor": 1.0,
    "mrope_section": None,
    "mrope_interleaved": False,
}
NO_SLIDING_WINDOW = {"use_sliding_window": False}


def hf_defaults(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int | None, length: int, **other: Any
) -> dict[str, Any]:
    """Return the defaults of transformers' class for fields that are missing in config.json.

    A test compares them with the installed release.
    """
    sizes = dict(zip(_SAME, (vocab, hidden, intermediate, layers, heads, kv_heads), strict=False))
    rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": length, "initializer_range": 0.02}
    return {**sizes, **rest, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **other}


def hf_expert_defaults(count: int, chosen: int, width: int, normalized: bool) -> dict[str, Any]:
    return {
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "norm_topk_prob": normalized,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
    }


LLAMA = HFTextFormat(
    "llama",
    override(PLAIN_TEXT, attention_bias=False),
    hf_defaults(32000, 4096, 11008, 32, 32, None, 2048, bos_token_id=1, eos_token_id=2),
    extra_fields={"mlp_bias": False},
)
QWEN2 = HFTextFormat(
    "qwen2",
    override(PLAIN_TEXT, attention_bias=True),
    hf_defaults(151936, 4096, 22016, 32, 32, 32, 32768),
    omitted_fields=("attention_bias", "head_dim"),
    extra_fields=NO_SLIDING_WINDOW,
)
QWEN3 = HFTextFormat(
    "qwen3",
    override(PLAIN_TEXT, qk_norm=True, attention_bias=False),
    hf_defaults(151936, 4096, 22016, 32, 32, 32, 32768, head_dim=128),
    extra_fields=NO_SLIDING_WINDOW,
)
QWEN3_MOE = HFTextFormat(
    "qwen3_moe",
    override(PLAIN_TEXT, "experts", qk_norm=True, attention_bias=False),
    hf_defaults(151936, 2048, 6144, 24, 32, 4, 32768, head_dim=None),
    hf_expert_defaults(128, 8, 768, normalized=False),
    extra_fields=NO_SLIDING_WINDOW,
)
LANGUAGE_FORMATS = {form.model_type: form for form in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}


def read_language(text: Mapping[str, Any], default: str, where: str) -> dict[str, Any]:
    """Return the fields of a `TextConfig` from the `text_config` of a model that may contain any language model.
    `default`: its `model_type` if it names none."""
    kind = str(text.get("model_type", default))
    check_supported([("text_config.model_type", kind, tuple(LANGUAGE_FORMATS))], where)
    return LANGUAGE_FORMATS[kind].read(text, f"{where}: text_config")


def write_language(text: TextConfig, default: str, tied: bool) -> dict[str, Any]:
    """Return the `text_config` in the first format that can describe the text decoder, or raise the error of the
    default format."""
    form = next((form for form in LANGUAGE_FORMATS.values() if form.fits(text)), LANGUAGE_FORMATS[default])
    return {**form.write(text), "tie_word_embeddings": tied}


def _derived_head(fields: Mapping[str, Any]) -> int | None:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _rope(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of `rope_scaling` (old key), else of `rope_parameters` (new key), as transformers does."""
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    return rope if isinstance(rope, Mapping) else {}


def _read_scaling(rope: Mapping[str, Any], max_positions: Any, where: str) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):
        return None
    if kind == "llama3" and not {"low_freq_factor", "high_freq_factor"} <= rope.keys():
        raise TesseraError(
            "rope type llama3 needs low_freq_factor and high_freq_factor", where=where, code="model.rope-fields-missing"
        )
    names = [name for name in RopeScaling.model_fields if rope.get(name) is not None]
    defaults = {"original_max_position_embeddings": max_positions} if kind in ("llama3", "yarn") else {}
    scaling = {**defaults, **{name: rope[name] for name in names}, "rope_type": kind}
    if kind == "yarn" and "factor" in rope and rope["factor"] is None:  # null: new length / original length
        scaling["factor"] = max_positions / scaling["original_max_position_embeddings"]
    return scaling


def _write_rope(text: TextConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": text.rope_theta}
    if text.rope_scaling is not None:
        scaling = text.rope_scaling.model_dump(mode="json")
        rope |= {name: scaling[name] for name in text.rope_scaling.used_fields if scaling[name] is not None}
    if text.mrope_section is not None:
        rope["mrope_section"] = list(text.mrope_section)
    if text.mrope_interleaved:
        rope["mrope_interleaved"] = True
    if text.partial_rotary_factor != 1:
        rope["partial_rotary_factor"] = text.partial_rotary_factor
    return rope


def _write_experts(experts: ExpertsConfig | None) -> dict[str, Any]:
    if experts is None:
        return {}
    plain = experts.model_dump(mode="json")
    return {**plain, "num_local_experts": experts.num_experts}


def _check_text_fields(data: Mapping[str, Any], where: str, dynamic: bool) -> None:
    rope = _rope(data)
    ropes = ("default", "mrope", "llama3", "linear", "yarn", *(("dynamic",) if dynamic else ()))
    checks: list[Check] = [
        ("hidden_act", data.get("hidden_act", "silu"), ("silu",)),
        ("attention_dropout", data.get("attention_dropout") or 0.0, (0.0,)),
        ("use_sliding_window", bool(data.get("use_sliding_window")), (False,)),
        ("mlp_bias", bool(data.get("mlp_bias")), (False,)),
        ("rope type", rope.get("rope_type", rope.get("type", "default")), ropes),
    ]
    check_supported(checks, where)


def check_model_type(kind: str, allowed: Iterable[str]) -> None:
    """Raise an error for a `model_type` of another family."""
    if kind not in allowed:
        raise TesseraError(
            f"model_type {kind!r} belongs to another family",
            where="config.json",
            allowed=allowed,
            code="model.other-model-type",
        )


def check_supported(checks: Sequence[Check], where: str) -> None:
    """Raise an error for the first value that is not in its list of supported values."""
    for name, value, allowed in checks:
        if value not in allowed:
            raise UnsupportedValueError(
                f"{name} = {value!r} is not supported", where=where, allowed=allowed, code="model.unsupported-value"
            )
