"""The command `mm-convert CONVERTER METHOD --cfg.key value ...` of MindSpeed-MM, in front of `tessera.convert`.

Converters, methods and options have the names that users know. Every method works or refuses with a reason. Options
come from dotted words, from `--config FILE.yaml`, and, where JSONARGPARSE_DEFAULT_ENV is true, from variables such as
MM_CONVERT_QWEN2VLCONVERTER__HF_TO_MM__CFG__MM_DIR.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from tessera.checkpoint.forms import DcpFolder, SafetensorsForm
from tessera.checkpoint.hf import publish, save_folder
from tessera.checkpoint.legacy.dcp import write_dcp
from tessera.checkpoint.legacy.megatron import LATEST
from tessera.checkpoint.legacy.torch_files import PlannedTensor
from tessera.core.config import parse_yaml, read_mapping
from tessera.core.errors import TesseraError, nearest
from tessera.core.weightmap import WeightMap
from tessera.models import FAMILIES
from tessera.models.common.side_files import copy_side_files
from tessera.tools.convert import convert, resplit

Options = Mapping[str, Any]  # by dotted key, without the leading `cfg.`
_PARALLEL = ("llm_pp_layers", "vit_pp_layers", "audio_pp_layers", "tp_size", "vit_tp_size", "audio_tp_size", "ep_size")
_SOURCE = tuple(f"parallel_config.{key}" for key in _PARALLEL)
# Accepted and without meaning here: code of folders is never run, and sizes come from config.json.
_MEANINGLESS = ("trust_remote_code", "common_model_config.*", "num_workers", "use_npu")
_REFUSED = {
    "llm_hf_config.hf_dir": "a decoder of another folder is not joined in: make one Hugging Face folder first",
    "save_vit_only": "an encoder alone is not written",
    "audio_pp_layers": "none of these models has an audio encoder",
}


@dataclass(frozen=True)
class Method:
    """Describe a method of a converter: its arguments, and the conversion that it does."""

    run: Callable[[str, Options], Path]
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    prefix: str = "cfg."  # of its options


@dataclass(frozen=True)
class Converter:
    """Describe a converter: its family (empty: any) and its methods."""

    family: str
    methods: Mapping[str, Method] = field(default_factory=dict)
    refused: str | None = None


# ---------------------------------------------------------------------------------------------- the methods


def _hf_to_mm(family: str, options: Options) -> Path:
    source = _folder_of(family, options["hf_config.hf_dir"])
    target = Path(options["mm_dir"])
    return convert(source, target, to="mm", layout=_layout(options, "parallel_config.", family, two_levels=True))


def _mm_to_hf(family: str, options: Options) -> Path:
    like = _folder_of(family, options["hf_config.hf_dir"])
    layout = _layout(options, "parallel_config.", family, two_levels=False)
    return convert(options["mm_dir"], options["save_hf_dir"], to="hf", like=like, source_layout=layout)


def _resplit(family: str, options: Options) -> Path:
    before = _layout(options, "source_parallel_config.", family, two_levels=False)
    after = _layout(options, "target_parallel_config.", family, two_levels=False)
    like = options.get("hf_config.hf_dir")
    return resplit(
        options["source_dir"], options["target_dir"], family, before, after, like=None if like is None else Path(like)
    )


def _hf_to_dcp(family: str, options: Options) -> Path:
    """Write the tensors of a Hugging Face folder under `DIR/release`, as jobs with FSDP2 load them.

    A tensor is called `model.`, then `dcp_prefix`, then its own name without `hf_prefix`. Stacked experts lose their
    first dimension.
    """
    source, target = _folder_of(family, options["hf_dir"]), Path(options["dcp_dir"])
    names, own = _DcpNames.of(family, options), options.get("hf_prefix", "")
    with SafetensorsForm(source) as stored:
        read: dict[str, str] = {}  # names in the DCP folder -> names in the folder
        for name in stored.tensors():
            read[names.prefix + name.removeprefix(own)] = name
        for copy, original in names.tied(options).items():
            if original in stored.tensors():
                read.setdefault(names.prefix + copy.removeprefix(own), original)
        plans = {name: names.flat_plan(name, stored.tensors()[original]) for name, original in read.items()}
        tensors = (names.flat(name, stored.read(original)) for name, original in read.items())

        def write(staging: Path) -> None:
            write_dcp(staging / "release", plans, tensors)
            (staging / LATEST).write_text("release", encoding="utf-8")

        publish(target, write)
    return target


def _dcp_to_hf(family: str, options: Options) -> Path:
    """Write a Hugging Face folder from what `_hf_to_dcp`, or a job, wrote."""
    like, target = _folder_of(family, options["model_assets_dir"]), Path(options["save_dir"])
    names, own = _DcpNames.of(family, options), options.get("hf_prefix", "")
    with SafetensorsForm(like) as published, DcpFolder(Path(options["load_dir"]), names.prefix) as stored:
        expected = published.tensors()
        found = {own + name: plan for name, plan in stored.tensors().items()}
        missing = sorted(set(expected) - set(found))
        # A job stores a tied head as a tensor of its own; the published folder says whether it belongs there.
        extra = sorted(set(found) - set(expected) - set(names.tied({"tie_weight": True})))
        if missing or extra:
            raise TesseraError(
                f"these are not the tensors of {like}: missing {missing[:5]}, unexpected {extra[:5]}",
                where=stored.where,
                fix="check model_assets_dir, dcp_prefix and hf_prefix",
            )
        blanks = {
            name: torch.empty(plan.shape, dtype=found[name].dtype, device="meta") for name, plan in expected.items()
        }
        save_folder(
            target,
            blanks,
            WeightMap((), same_names=True),
            read_mapping(like / "config.json"),
            prepare=lambda name, blank: stored.read(name.removeprefix(own)).reshape(blank.shape),
            extras=functools.partial(copy_side_files, like),
        )
    return target


@dataclass(frozen=True)
class _DcpNames:
    """State how tensors are named in a DCP folder, and which ones lose a dimension."""

    prefix: str
    fused: tuple[str, ...]
    pairs: Mapping[str, str]

    @staticmethod
    def of(family: str, options: Options) -> _DcpNames:
        known = family == "qwen3_vl"
        fused = options.get("fused_linear_names", ["gate_up_proj", "down_proj"] if known else [])
        pairs = {"lm_head.weight": "model.language_model.embed_tokens.weight"} if known else {}
        given = options.get("tie_weight_mapping") or {}
        if not isinstance(fused, list) or not isinstance(given, Mapping):
            raise TesseraError(
                "fused_linear_names is a list, tie_weight_mapping a mapping",
                where="mm-convert",
                fix="--fused_linear_names [gate_up_proj,down_proj]",
            )
        prefix = str(options.get("dcp_prefix", "model." if known else ""))
        return _DcpNames("model." + prefix, tuple(map(str, fused)), {**pairs, **given})

    def tied(self, options: Options) -> Mapping[str, str]:
        """Return copies to write: their names -> the names of what they copy."""
        return self.pairs if options.get("tie_weight") or options.get("tie_weight_mapping") else {}

    def flat(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1]) if self._is_fused(name, tensor.dim()) else tensor

    def flat_plan(self, name: str, plan: PlannedTensor) -> PlannedTensor:
        if not self._is_fused(name, len(plan.shape)):
            return plan
        return PlannedTensor(plan.dtype, (math.prod(plan.shape[:-1]), plan.shape[-1]))

    def _is_fused(self, name: str, dims: int) -> bool:
        return dims == 3 and any(part in name for part in self.fused)


_SHARDS = {
    "hf_to_mm": Method(
        _hf_to_mm,
        ("mm_dir", "hf_config.hf_dir", "parallel_config.llm_pp_layers", "parallel_config.vit_pp_layers"),
        _SOURCE,
    ),
    "mm_to_hf": Method(
        _mm_to_hf,
        ("save_hf_dir", "mm_dir", "hf_config.hf_dir", "parallel_config.llm_pp_layers", "parallel_config.vit_pp_layers"),
        _SOURCE,
    ),
    "resplit": Method(
        _resplit,
        (
            *(
                "source_dir",
                "target_dir",
                "source_parallel_config.llm_pp_layers",
                "source_parallel_config.vit_pp_layers",
            ),
            *("target_parallel_config.llm_pp_layers", "target_parallel_config.vit_pp_layers"),
        ),
        ("hf_config.hf_dir", *(f"{side}_{key}" for side in ("source", "target") for key in _SOURCE)),
    ),
}
_NAMING = ("dcp_prefix", "hf_prefix", "fused_linear_names")
_DCP = {
    "hf_to_dcp": Method(_hf_to_dcp, ("hf_dir", "dcp_dir"), (*_NAMING, "tie_weight", "tie_weight_mapping"), ""),
    "dcp_to_hf": Method(_dcp_to_hf, ("load_dir", "save_dir", "model_assets_dir"), _NAMING, ""),
}
_GENERATION = "image and video generation has no family here yet"
_OMNI = "no family here reads or writes sound yet"
CONVERTERS: dict[str, Converter] = {
    "Qwen2VLConverter": Converter("qwen2_vl", _SHARDS),
    "Qwen2_5_VLConverter": Converter("qwen2_5_vl", _SHARDS),
    "Qwen3VLMegatronConverter": Converter("qwen3_vl", _SHARDS),
    "Qwen3VLConverter": Converter("qwen3_vl", _DCP),
    "InternVLConverter": Converter("internvl", _SHARDS),
    "GenericDCPConverter": Converter("", _DCP),
    "ExpertMergeDcpConverter": Converter(
        "", refused="experts are not stacked here: our families read and write folders in either form"
    ),
    "GlmConverter": Converter("glm4v", refused="GLM-4.1V has no Megatron-style form here: use its Hugging Face folder"),
    "DeepSeekVLConverter": Converter("", refused="DeepSeek-VL2 has no family here"),
    "VideoAlignConverter": Converter("", refused="VideoAlign has no family here"),
    "Mistral3Converter": Converter("", refused="Mistral 3 has no family here"),
    "Qwen35Converter": Converter("", refused="Qwen3.5 has no family here"),
    **dict.fromkeys(("Qwen2_5_OmniConverter", "Qwen3TTSConverter", "MOSSTTSConverter"), Converter("", refused=_OMNI)),
    **dict.fromkeys(
        (
            *("WanConverter", "VACEConverter", "HunyuanVideoConverter", "OpenSoraPlanConverter", "OpenSoraConverter"),
            *("CogVideoConverter", "LuminaConverter", "BagelConverter", "StepVideoConverter"),
        ),
        Converter("", refused=_GENERATION),
    ),
}


def _folder_of(family: str, folder: Any) -> Path:
    """Return a Hugging Face folder after checking that it is of the converter's family."""
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise TesseraError("no config.json here", where=str(path), fix="name a Hugging Face folder")
    kind = str(read_mapping(path / "config.json").get("model_type", ""))
    if family and kind not in FAMILIES.get(family).hf_types:
        raise TesseraError(
            f"this converter is for {family}, the folder's model_type is {kind!r}",
            where=str(path / "config.json"),
            allowed=FAMILIES.get(family).hf_types,
        )
    return path


def _layout(options: Options, prefix: str, family: str, *, two_levels: bool) -> dict[str, Any]:
    """Return a layout from the options of a parallel configuration.

    Converting to shards takes a list of lists, one for each virtual stage; reading them takes a list.
    """
    found: dict[str, Any] = {}
    for key, part in (("llm_pp_layers", "llm"), ("vit_pp_layers", "vit")):
        lists = options.get(prefix + key)
        if lists is None:
            continue
        nested = isinstance(lists, list) and bool(lists) and isinstance(lists[0], list)
        if nested != two_levels:
            shape = "a list of lists, such as [[28]]" if two_levels else "a list, such as [28]"
            raise TesseraError(f"{prefix}{key} must be {shape}, not {lists!r}", where="mm-convert")
        found[part] = lists
    tp = options.get(prefix + "tp_size", 1)
    for key in ("vit_tp_size", "audio_tp_size"):
        if options.get(prefix + key, 0) not in (0, None, tp):
            raise TesseraError(
                f"{prefix}{key} must be tp_size: encoders are divided as the decoder is", where="mm-convert"
            )
    return {**found, "tp": tp, "ep": options.get(prefix + "ep_size", 1)}


# ---------------------------------------------------------------------------------------------- the command line


def main(words: Sequence[str] | None = None) -> None:
    """Run `mm-convert` and exit as every command here does: 2 for a mistake of the user."""
    try:
        written = run(sys.argv[1:] if words is None else list(words))
    except TesseraError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if written is not None:
        print(f"wrote {written}")


def run(words: Sequence[str]) -> Path | None:
    """Carry out a command line and return the folder that was written; None if only help was asked for."""
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return None
    converter = _named(words[0], CONVERTERS, "converter")
    if converter.refused is not None:
        raise TesseraError(f"{words[0]}: {converter.refused}", where="mm-convert")
    if len(words) < 2 or words[1] in ("-h", "--help"):
        print(f"mm-convert {words[0]} METHOD\n  methods: {', '.join(converter.methods)}")
        return None
    method: Method = _named(words[1], converter.methods, f"method of {words[0]}")
    given, show = _words(words[2:], method.prefix)
    options = {**_variables(f"MM_CONVERT_{words[0]}__{words[1]}__".upper(), method.prefix), **given}
    checked = _checked(options, method, " ".join(words[:2]))
    if show:
        shown = {"cfg": _nested(checked)} if method.prefix else _nested(checked)
        print(yaml.safe_dump(shown, sort_keys=False), end="")
        return None
    missing = [key for key in method.required if key not in checked]
    if missing:
        raise TesseraError(
            f"missing: {', '.join(f'--{method.prefix}{key}' for key in missing)}",
            where=f"mm-convert {' '.join(words[:2])}",
        )
    return method.run(converter.family, checked)


def _named(name: str, known: Mapping[str, Any], kind: str) -> Any:
    if name not in known:
        raise TesseraError(
            f"no {kind} {name!r}", where="mm-convert", allowed=sorted(known), nearest=nearest(name, known)
        )
    return known[name]


def _help() -> str:
    lines = ["mm-convert CONVERTER METHOD --cfg.key value ... [--config FILE.yaml] [--print_config]", "", "converters:"]
    for name, converter in CONVERTERS.items():
        lines.append(f"  {name}: {converter.refused or ', '.join(converter.methods)}")
    return "\n".join(lines)


def _words(words: Sequence[str], prefix: str) -> tuple[dict[str, Any], bool]:
    """Return the options of a command line by dotted key, and whether they are only to be shown. `prefix`: what options
    of this method begin with."""
    found: dict[str, Any] = {}
    show = False
    rest = list(words)
    while rest:
        word = rest.pop(0)
        key, sign, value = word.partition("=")
        if key == "--print_config":
            show = True
            continue
        if not key.startswith("--"):
            raise TesseraError(f"what is {word!r}?", where="mm-convert", fix=f"--{prefix}key value")
        if not sign:
            if not rest:
                raise TesseraError(f"{key} has no value", where="mm-convert")
            value = rest.pop(0)
        if key == "--config":
            content = read_mapping(Path(value))
            found |= _flat(content.get("cfg", {}) if prefix else content)
        elif key.startswith("--" + prefix):
            found[key.removeprefix("--" + prefix)] = _value(value, key)
        else:
            raise TesseraError(f"no option {key}", where="mm-convert", fix=f"options begin with --{prefix}")
    return found, show


def _variables(start: str, prefix: str) -> dict[str, Any]:
    if os.environ.get("JSONARGPARSE_DEFAULT_ENV", "").lower() != "true":
        return {}
    start += prefix.upper().replace(".", "__")
    return {
        name[len(start) :].lower().replace("__", "."): _value(value, name)
        for name, value in os.environ.items()
        if name.upper().startswith(start)
    }


def _value(text: str, where: str) -> Any:
    """Return numbers, lists and true or false as such; everything else is text."""
    if text[:1] in "[{" or text in ("true", "false", "null"):
        return parse_yaml(text, where)
    return int(text) if text.isdecimal() else text


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _nested(options: Options) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in options.items():
        *path, last = key.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def _checked(options: Options, method: Method, where: str) -> dict[str, Any]:
    """Return the options that have a meaning; refuse those that nobody knows, or that would be silently dropped."""
    known = (*method.required, *method.optional)
    kept: dict[str, Any] = {}
    for key, value in options.items():
        refused = next((why for name, why in _REFUSED.items() if key == name or key.endswith("." + name)), None)
        if refused is not None and value not in (None, False, [], [[]]):
            raise TesseraError(f"--{method.prefix}{key}: {refused}", where=f"mm-convert {where}")
        if key in known:
            kept[key] = value
        elif refused is None and not any(key == name or key.startswith(name.rstrip("*")) for name in _MEANINGLESS):
            raise TesseraError(
                f"no option --{method.prefix}{key}",
                where=f"mm-convert {where}",
                allowed=sorted(known),
                nearest=nearest(key, known),
            )
    return kept
