"""Open the files in which people exchange LoRA adapters, whoever wrote them, and understand their names.

| form | names of a layer |
|---|---|
| peft | `base_model.model.LAYER.lora_A.weight`, with `adapter_config.json` beside the file |
| diffusers | `transformer.LAYER.lora_A.weight`; PEFT's configuration in the header, `LAYER.alpha`, or neither |
| comfyui | `diffusion_model.LAYER.lora_down.weight`, `lora_up`, `alpha`; layers as the makers of the model call them |
| kohya | `lora_unet_LAYER.lora_down.weight`, with underscores for dots |
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.checkpoint.files import open_safetensors, read_tensors
from tessera.config.run_config import MAX_ADAPTER_ALPHA, MAX_ADAPTER_RANK
from tessera.errors import TesseraError, few_names, nearest
from tessera.lora.factors import Factors
from tessera.lora.parts import MAGNITUDE_KEY, native_saved
from tessera.lora.peft import CONFIG, PREFIX, WEIGHTS, is_adapter_folder, parse_config, ranks_and_alphas, read_config
from tessera.lora.select import Adapter, UnknownLayersError
from tessera.runtime.files import PICKLE_SUFFIXES, check_inside
from tessera.weights.map import WeightMap

FILES = {
    "peft": WEIGHTS,
    "diffusers": "pytorch_lora_weights.safetensors",
    "comfyui": "comfyui_lora.safetensors",
    "kohya": "kohya_lora.safetensors",
}
HEADER_KEY = "lora_adapter_metadata"  # in the header of a file of diffusers
FIRST, SECOND = "transformer", "transformer_2"  # the models of a pipeline that files name
DOTTED = "diffusion_model."
UNDERSCORED = "lora_unet_"
_PREFIXES = (PREFIX, f"{FIRST}.", f"{SECOND}.", f"model.{DOTTED}", DOTTED, UNDERSCORED, "lora_transformer_")
_TEXT_ENCODERS = ("text_encoder", "lora_te", "text_model.", "conditioner.")
_SIDES = {"A": "A", "down": "A", "B": "B", "up": "B"}
_KEY = re.compile(r"(.+)\.lora[_.](A|B|down|up)(?:\.default)?\.weight")
_ALPHA = ".alpha"
_OTHER_KINDS = (
    ("dora_scale", "DoRA"),
    ("magnitude", "DoRA"),
    ("lokr_", "LoKr"),
    ("hada_", "LoHa"),
    ("lora_mid", "a convolution"),
    (".bias", "a bias"),
    (".diff", "a difference of whole weights"),
)


def find_adapter_file(path: Path) -> Path | None:
    """Return the file of weights at a path: itself, or the one that a folder has; None where there are no adapters."""
    if path.is_file():
        return path if path.suffix == ".safetensors" and any(_KEY.fullmatch(key) for key in _keys(path)) else None
    if is_adapter_folder(path):
        if not (path / WEIGHTS).exists():
            _refuse_without_weights(path)
        return path / WEIGHTS
    return next((path / name for form, name in FILES.items() if form != "peft" and (path / name).is_file()), None)


def _refuse_without_weights(folder: Path) -> None:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    what = f"the adapters are a pickle, {pickles[0]}, which is never read" if pickles else "the adapters are missing"
    raise TesseraError(
        f"{what}: {WEIGHTS} is needed",
        where=str(folder),
        fix="where you trust the file, PEFT writes it: PeftModel.from_pretrained(model, FOLDER).save_pretrained(OTHER)"
        if pickles
        else "name the folder that has the file",
    )


def is_adapters(path: Path) -> bool:
    """Return whether adapters lie at a path."""
    return find_adapter_file(path) is not None


def _keys(path: Path) -> list[str]:
    with open_safetensors(path) as file:
        return list(file.keys())


@dataclass(frozen=True)
class StoredAdapters:
    """Hold the adapters of a file by the names of their layers there."""

    where: str
    sides: Mapping[str, Mapping[str, Tensor]]  # layer -> {"A", "B"}
    alphas: Mapping[str, float]
    underscored: bool
    config: Mapping[str, Any] | None  # what PEFT says about them
    config_where: str
    lengths: Mapping[str, Tensor] = field(default_factory=dict)  # layer -> lengths of rows, of DoRA

    def factors(self, names: Mapping[str, str], weight_map: WeightMap) -> dict[str, Factors]:
        """Return the adapters by the names that the rules of a weight map use. `names`: layer -> that name."""
        stated: Mapping[str, tuple[float, float]] = {}
        own = {layer: weight_map.in_memory(f"{name}.weight").removesuffix(".weight") for layer, name in names.items()}
        if self.config is not None:
            stated = ranks_and_alphas(self.config, set(own.values()), self.config_where)
        found: dict[str, Factors] = {}
        for layer, name in names.items():
            a, b = matrices(layer, self.sides[layer], self.where)
            adapter = self.adapter(layer, own[layer], a.shape[0], stated.get(own[layer]))
            found[name] = Factors(adapter, a, b, self._lengths(layer, adapter, b))
        return found

    def _lengths(self, layer: str, adapter: Adapter, b: Tensor) -> Tensor | None:
        m = self.lengths.get(layer)
        if adapter.dora and (m is None or m.shape != b.shape[:1] or not torch.isfinite(m.float()).all()):
            raise TesseraError(f"{layer}: use_dora, and its lengths of rows are missing or wrong", where=self.where)
        return m if adapter.dora else None

    def adapter(self, layer: str, own: str, rank: int, stated: tuple[float, float] | None) -> Adapter:
        """Return the adapter of a layer whose weights have a rank; raise if another one is stated, or an absurd one."""
        if stated is None:  # without any alpha the product is taken as it is
            alpha, rslora = self.alphas.get(layer, float(rank)), False
        else:
            if stated[0] != rank:
                raise TesseraError(
                    f"{own}: rank {stated[0]} is stated, the weights have {rank}",
                    where=self.config_where,
                    fix="check that the configuration and the weights belong together",
                )
            alpha, rslora = stated[1], bool((self.config or {}).get("use_rslora"))
        if rank > MAX_ADAPTER_RANK or not 0 < alpha <= MAX_ADAPTER_ALPHA:
            raise TesseraError(
                f"{layer} has rank {rank} and alpha {alpha:g}",
                where=self.where,
                allowed=[f"a rank up to {MAX_ADAPTER_RANK:,}", f"an alpha above 0 and up to {MAX_ADAPTER_ALPHA:,.0f}"],
            )
        return Adapter(rank, alpha, rslora, bool((self.config or {}).get("use_dora")))


def matrices(layer: str, sides: Mapping[str, Tensor], where: str) -> tuple[Tensor, Tensor]:
    """Return A and B of a layer; raise if they are not two matrices that belong together."""
    if len(sides) != 2:
        raise TesseraError(f"of the adapter of {layer} only lora_{next(iter(sides))} is there", where=where)
    a, b = (_matrix(layer, side, sides[side], where) for side in ("A", "B"))
    if a.shape[0] != b.shape[1]:
        raise TesseraError(
            f"{layer}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}",
            where=where,
            fix="the file is damaged, or was put together from two: fetch or export it again",
        )
    return a, b


def _matrix(layer: str, side: str, tensor: Tensor, where: str) -> Tensor:
    if tensor.dim() > 2 and all(size == 1 for size in tensor.shape[2:]):
        tensor = tensor.flatten(1)  # a convolution over single points is a linear layer
    if tensor.dim() != 2 or not tensor.is_floating_point() or not tensor.numel():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise TesseraError(
            f"{layer}.lora_{side}, {kind} {list(tensor.shape)}, is no part of a linear layer's adapter", where=where
        )
    if not torch.isfinite(tensor.float()).all():
        raise TesseraError(f"{layer}.lora_{side} holds numbers that are not finite", where=where)
    return tensor


# ---------------------------------------------------------------------------------------------- names


def open_adapters(path: Path, part: str = FIRST) -> StoredAdapters:
    """Read the adapters at a path. `part`: the model of the pipeline whose adapters are wanted, where a file has those
    of both experts."""
    file = find_adapter_file(path)
    if file is None:
        raise TesseraError(f"no adapters at {path}", where=str(path), allowed=[CONFIG, *FILES.values(), "a LoRA file"])
    peft = is_adapter_folder(path)
    if path.is_dir():
        check_inside(file, path)
    sides: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    lengths: dict[str, Tensor] = {}
    stated, saved = read_config(path) if peft else {}, 0
    for key, tensor in read_tensors(file).items():
        if stated.get("use_dora") and key.endswith(MAGNITUDE_KEY):
            lengths[key.removesuffix(MAGNITUDE_KEY)] = tensor
            continue
        if stated.get("modules_to_save") and ".lora_" not in key:
            saved += 1  # a parameter that was trained whole
            continue
        match = _KEY.fullmatch(key)
        if match is not None:
            halves, side = sides.setdefault(match[1], {}), _SIDES[match[2]]
            if side in halves:
                raise TesseraError(
                    f"{match[1]} has its lora_{side} twice, once as {key}",
                    where=str(file),
                    fix="the file was put together from two: fetch or export it again",
                )
            halves[side] = tensor
        elif key.endswith(_ALPHA):
            alphas[key.removesuffix(_ALPHA)] = _alpha(key, tensor, str(file))
        elif not (".diff" in key and not tensor.any()):  # differences of zero change nothing
            raise _not_plain(key, str(file))
    if stated.get("modules_to_save") and not saved:
        raise TesseraError(
            f"modules_to_save names {stated['modules_to_save']!r:.80}, and the weights have none of them",
            where=str(path / CONFIG),
            fix="check that the two files belong together",
        )
    if not sides:
        raise TesseraError("no adapters here", where=str(file), fix="export them again: the file holds no LoRA weights")
    prefix, names = _stripped([*sides, *alphas, *lengths], part, str(file))
    layers = {names[name]: halves for name, halves in sides.items() if name in names}
    _check_alphas(layers, known := {names[name]: alpha for name, alpha in alphas.items() if name in names}, str(file))
    if not layers:
        raise TesseraError("no adapters here", where=str(file))
    config_where = str(path / CONFIG) if peft else f"{file}, {HEADER_KEY} of its header"
    config = read_config(path) if peft else _header_config(file, config_where, prefix)
    if config is not None and config.get("use_dora") and not lengths:
        raise TesseraError(
            "use_dora, and the weights have no lengths of rows",
            where=config_where,
            allowed=[f"LAYER{MAGNITUDE_KEY} in a PEFT folder"],
        )
    if config is not None and known:
        raise TesseraError(
            "the scale of adapters is stated twice, by alpha beside the weights and by PEFT's configuration",
            where=str(file),
            fix=f"remove {HEADER_KEY} from the header, or the alphas",
        )
    underscored = prefix in (UNDERSCORED, "lora_transformer_")
    own_lengths = {names[name]: tensor for name, tensor in lengths.items() if name in names}
    return StoredAdapters(str(file), layers, known, underscored, config, config_where, own_lengths)


def read_saved(path: Path, parameters: Sequence[str], weight_map: WeightMap | None) -> dict[str, Tensor]:
    """Return the parameters of a PEFT folder that were trained whole, by native names; `parameters`: of the model."""
    if not is_adapter_folder(path) or weight_map is None or not read_config(path).get("modules_to_save"):
        return {}
    check_inside(path / WEIGHTS, path)
    stored = {key.removeprefix(PREFIX): tensor for key, tensor in read_tensors(path / WEIGHTS).items()}
    saved = {name: tensor for name, tensor in stored.items() if ".lora_" not in name}
    found = native_saved(saved, parameters, weight_map, str(path / WEIGHTS))
    tied = "head.weight" not in parameters and any(name.endswith(".embed.weight") for name in found)
    if tied and not read_config(path).get("ensure_weight_tying"):
        raise TesseraError(
            "the embedding was trained and the head, which shares its weight here, was not",
            where=str(path / CONFIG),
            fix="train with ensure_weight_tying=True in PEFT",
        )
    return found


def parts_in(path: Path) -> set[str]:
    """Return the models of a pipeline, one or both experts, that the adapters at a path are for."""
    file = find_adapter_file(path)
    names = [] if file is None else _keys(file)
    return {SECOND if name.startswith(f"{SECOND}.") else FIRST for name in names}


def _stripped(names: Sequence[str], part: str, where: str) -> tuple[str, dict[str, str]]:
    """Return the prefix that names have in a file, and the names without it. Those of the other expert are left out."""
    texts = [name for name in names if name.startswith(_TEXT_ENCODERS)]
    if texts:
        raise TesseraError(
            f"the file also adapts a text encoder ({texts[0]}): text encoders are used as they are",
            where=where,
            fix="take a file with the adapters of the transformer alone",
        )
    prefixes = {name: next((one for one in _PREFIXES if name.startswith(one)), "") for name in names}
    present = set(prefixes.values())
    if present == {f"{FIRST}.", f"{SECOND}."}:
        present = {f"{part}."}
    if len(present) > 1:
        examples = [next(name for name, one in prefixes.items() if one == prefix) for prefix in sorted(present)]
        raise TesseraError(f"names of {len(present)} forms are mixed: {', '.join(examples)}", where=where)
    (prefix,) = present
    if prefix == f"{SECOND}." and part != SECOND:
        raise TesseraError(
            f"these adapters are for {SECOND}, the expert for little noise", where=where, fix=f"give them to {SECOND}"
        )
    return prefix, {name: name.removeprefix(prefix) for name, one in prefixes.items() if one == prefix}


def _alpha(key: str, tensor: Tensor, where: str) -> float:
    if tensor.numel() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise TesseraError(f"{key}, {kind} {list(tensor.shape)}, is not one number", where=where)
    return float(tensor)


def _check_alphas(layers: Collection[str], alphas: Collection[str], where: str) -> None:
    """Raise if some layers have an alpha and others do not: nothing would say how these are scaled."""
    for one, other, what in ((layers, alphas, "no alpha"), (alphas, layers, "an alpha and no weights")):
        missing = [name for name in one if name not in other]
        if missing and alphas:
            raise TesseraError(
                f"{few_names(missing, 3)}: {what}, unlike other layers",
                where=where,
                fix="the file is damaged, or was put together from two: fetch or export it again",
            )


def _not_plain(key: str, where: str) -> TesseraError:
    kind = next((kind for part, kind in _OTHER_KINDS if part in key), None)
    reason = "is no part of a linear layer's adapter" if kind is None else f"is {kind}, and plain LoRA alone is read"
    return TesseraError(f"{key} {reason}", where=where, allowed=["lora_A and lora_B", "lora_down, lora_up and alpha"])


def _header_config(file: Path, where: str, prefix: str) -> dict[str, Any] | None:
    with open_safetensors(file) as opened:
        text = (opened.metadata() or {}).get(HEADER_KEY)
    return None if text is None else parse_config(text, where, prefix) or None


def match_names(
    stored: StoredAdapters, paths: Sequence[str], weight_map: WeightMap
) -> tuple[WeightMap, dict[str, str]]:
    """Return the table of the form that a file has, and for each of its layers the name that the table's rules use.

    `paths`: the native layers of the model. The form is the one that knows most names; all must be known to it.
    """
    best: tuple[WeightMap, dict[str, str]] | None = None
    known: set[str] = set()
    for table in (weight_map, *weight_map.others.values()):
        names = [name for path in paths for name in (table.rule_for(f"{path}.weight") or (0, ()))[1]]
        modules = {name.removesuffix(".weight") for name in names}
        known |= modules
        spelled = {module.replace(".", "_"): module for module in modules} if stored.underscored else {}
        found: dict[str, str] = {}
        for layer in stored.sides:
            name = spelled.get(layer) or table.canonical(f"{layer}.weight").removesuffix(".weight")
            if name in modules:
                found[layer] = name
        if best is None or len(found) > len(best[1]):
            best = table, found
    assert best is not None
    left = [layer for layer in stored.sides if layer not in best[1]]
    if left:
        raise _unknown(left, stored, known)
    return best


def _unknown(left: Sequence[str], stored: StoredAdapters, known: Collection[str]) -> TesseraError:
    near = nearest(left[0], sorted(name.replace(".", "_") if stored.underscored else name for name in known))
    error = UnknownLayersError(
        f"adapters for {few_names(left, 5)}, which this model does not have",
        where=stored.where,
        nearest=near,
        fix="check that the adapters belong to this model",
    )
    error.layers = tuple(stored.sides)
    return error
