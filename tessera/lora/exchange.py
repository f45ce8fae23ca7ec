"""Read LoRA adapters from files of PEFT, diffusers, ComfyUI and kohya.

| form | names of a layer |
|---|---|
| peft | `base_model.model.LAYER.lora_A.weight`, with `adapter_config.json` beside the file |
| diffusers | `transformer.LAYER.lora_A.weight`; PEFT's configuration in the header, `LAYER.alpha`, or neither |
| comfyui | `diffusion_model.LAYER.lora_down.weight`, `lora_up`, `alpha`; layers as in the original checkpoint |
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
from tessera.lora.factors import Factors, canonical, in_memory, modules_of
from tessera.lora.peft import CONFIG, PREFIX, WEIGHTS, is_adapter_folder, parse_config, ranks_and_alphas, read_config
from tessera.lora.select import Adapter
from tessera.runtime.files import check_inside
from tessera.weights.map import WeightMap

FILES = {
    "peft": WEIGHTS,
    "diffusers": "pytorch_lora_weights.safetensors",
    "comfyui": "comfyui_lora.safetensors",
    "kohya": "kohya_lora.safetensors",
}
MAGNITUDE_KEY = ".lora_magnitude_vector"  # suffix of DoRA's row norms
HEADER_KEY = "lora_adapter_metadata"  # key of PEFT's configuration in the header of diffusers' files
FIRST, SECOND = "transformer", "transformer_2"  # prefixes of the high-noise and low-noise expert of a pipeline
DOTTED = "diffusion_model."
UNDERSCORED = "lora_unet_"
_PREFIXES = (PREFIX, f"{FIRST}.", f"{SECOND}.", f"model.{DOTTED}", DOTTED, UNDERSCORED, "lora_transformer_")
_TEXT_ENCODERS = ("text_encoder", "lora_te", "text_model.", "conditioner.")
_SIDES = {"A": "A", "down": "A", "B": "B", "up": "B"}
_KEY = re.compile(r"(.+)\.lora[_.](A|B|down|up)(?:\.default)?\.weight")
_ALPHA = ".alpha"


def find_adapter_file(path: Path) -> Path | None:
    """Return the file of adapter weights: `path`, or a file in the folder `path`; None if there is none."""
    if path.is_file():
        return path if path.suffix == ".safetensors" and any(_KEY.fullmatch(key) for key in _keys(path)) else None
    if is_adapter_folder(path):
        if not (path / WEIGHTS).exists():
            raise TesseraError(
                f"the adapter folder has no {WEIGHTS}, and pickles are never read",
                where=str(path),
                fix="use a folder with this file; PEFT can write it from a pickle that you trust: "
                "PeftModel.from_pretrained(model, FOLDER).save_pretrained(OTHER)",
                code="adapter.weights-missing",
            )
        return path / WEIGHTS
    return next((path / name for form, name in FILES.items() if form != "peft" and (path / name).is_file()), None)


def damaged(where: str, what: str) -> TesseraError:
    """Return the error about an adapter file whose tensors or settings contradict each other."""
    fix = "download or export the adapters again: the file is damaged, or merged from two files"
    return TesseraError(f"damaged adapters: {what}", where=where, fix=fix, code="adapter.damaged-file")


def is_adapters(path: Path) -> bool:
    """Return whether `path` is an adapter file or folder."""
    return find_adapter_file(path) is not None


def _keys(path: Path) -> list[str]:
    with open_safetensors(path) as file:
        return list(file.keys())


@dataclass(frozen=True)
class StoredAdapters:
    """Hold the adapters of a file, by the layer names in the file."""

    where: str
    sides: Mapping[str, Mapping[str, Tensor]]  # layer -> {"A": matrix, "B": matrix}
    alphas: Mapping[str, float]
    underscored: bool
    config: Mapping[str, Any] | None  # PEFT's adapter configuration; None: the file has none
    config_where: str
    norms: Mapping[str, Tensor] = field(default_factory=dict)  # layer -> row norms of DoRA

    def factors(self, names: Mapping[str, str], weight_map: WeightMap) -> dict[str, Factors]:
        """Return canonical layer name -> adapter. `names`: layer in the file -> its canonical name."""
        modules = {layer: in_memory(name, weight_map) for layer, name in names.items()}
        stated: Mapping[str, tuple[float, float]] = {}
        if self.config is not None:
            stated = ranks_and_alphas(self.config, set(modules.values()), self.config_where)
        factors: dict[str, Factors] = {}
        for layer, name in names.items():
            a, b = matrices(layer, self.sides[layer], self.where)
            adapter = self.adapter(layer, modules[layer], a.shape[0], stated.get(modules[layer]))
            factors[name] = Factors(adapter, a, b, self._norms_of(layer, adapter, b))
        return factors

    def _norms_of(self, layer: str, adapter: Adapter, b: Tensor) -> Tensor | None:
        m = self.norms.get(layer)
        if adapter.dora and (m is None or m.shape != b.shape[:1] or not torch.isfinite(m.float()).all()):
            raise damaged(self.where, f"{layer}: use_dora is set, and {MAGNITUDE_KEY[1:]} is missing or wrong")
        return m if adapter.dora else None

    def adapter(self, layer: str, module: str, rank: int, stated: tuple[float, float] | None) -> Adapter:
        """Return the adapter settings of a layer. Raise if rank or alpha is invalid, or the configured rank differs.

        `stated`: (rank, alpha) of the configuration.
        """
        if stated is None:  # a layer without a stored alpha has the scale 1: alpha equals the rank
            alpha, rslora = self.alphas.get(layer, float(rank)), False
        else:
            if stated[0] != rank:
                raise damaged(self.config_where, f"{module} has rank {rank}, not {stated[0]} as configured")
            alpha, rslora = stated[1], bool((self.config or {}).get("use_rslora"))
        if rank > MAX_ADAPTER_RANK or not 0 < alpha <= MAX_ADAPTER_ALPHA:
            raise TesseraError(
                f"{layer} has an invalid rank {rank} or alpha {alpha:g}",
                where=self.where,
                allowed=[f"a rank up to {MAX_ADAPTER_RANK:,}", f"an alpha above 0 and up to {MAX_ADAPTER_ALPHA:,.0f}"],
                code="adapter.no-scale",
            )
        return Adapter(rank, alpha, rslora, bool((self.config or {}).get("use_dora")))


def matrices(layer: str, sides: Mapping[str, Tensor], where: str) -> tuple[Tensor, Tensor]:
    """Return the matrices A and B of a layer; raise if one is missing or their ranks differ."""
    if len(sides) != 2:
        raise damaged(where, f"{layer} has only lora_{next(iter(sides))}: the other matrix is missing")
    a, b = (_matrix(layer, side, sides[side], where) for side in ("A", "B"))
    if a.shape[0] != b.shape[1]:
        raise damaged(where, f"{layer}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}")
    return a, b


def _matrix(layer: str, side: str, tensor: Tensor, where: str) -> Tensor:
    if tensor.dim() > 2 and all(size == 1 for size in tensor.shape[2:]):
        tensor = tensor.flatten(1)  # a 1 x 1 convolution is a linear layer
    if tensor.dim() != 2 or not tensor.is_floating_point() or not tensor.numel():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise TesseraError(
            f"{layer}.lora_{side} is not a matrix of a linear layer: {kind} {list(tensor.shape)}",
            where=where,
            code="adapter.not-linear",
        )
    if not torch.isfinite(tensor.float()).all():
        raise damaged(where, f"{layer}.lora_{side} contains values that are not finite")
    return tensor


# ---------------------------------------------------------------------------------------------- names


def open_adapters(path: Path, part: str = FIRST) -> StoredAdapters:
    """Read the adapters at a path. `part`: which expert's adapters to return, if a file contains both."""
    file = find_adapter_file(path)
    if file is None:
        raise TesseraError(
            f"no adapters at {path}",
            where=str(path),
            allowed=[CONFIG, *FILES.values(), "a LoRA file"],
            code="adapter.not-here",
        )
    peft = is_adapter_folder(path)
    if path.is_dir():
        check_inside(file, path)
    sides: dict[str, dict[str, Tensor]] = {}
    alphas: dict[str, float] = {}
    norms: dict[str, Tensor] = {}
    stated, saved = read_config(path) if peft else {}, 0
    for key, tensor in read_tensors(file).items():
        if stated.get("use_dora") and key.endswith(MAGNITUDE_KEY):
            norms[key.removesuffix(MAGNITUDE_KEY)] = tensor
            continue
        if stated.get("modules_to_save") and ".lora_" not in key:
            saved += 1  # counts parameters of modules_to_save
            continue
        match = _KEY.fullmatch(key)
        if match is not None:
            halves, side = sides.setdefault(match[1], {}), _SIDES[match[2]]
            if side in halves:
                raise damaged(str(file), f"{match[1]} has lora_{side} twice, once as {key}")
            halves[side] = tensor
        elif key.endswith(_ALPHA):
            alphas[key.removesuffix(_ALPHA)] = _alpha(key, tensor, str(file))
        elif not (".diff" in key and not tensor.any()):  # a full weight difference is accepted if it is all zeros
            raise TesseraError(
                f"{key} is not part of a plain LoRA adapter: LoKr, LoHa, full differences, and DoRA outside of PEFT "
                "folders are not supported",
                where=str(file),
                allowed=["lora_A and lora_B", "lora_down, lora_up and alpha"],
                code="adapter.not-plain-lora",
            )
    if stated.get("modules_to_save") and not saved:
        named = f"{stated['modules_to_save']!r:.80}"
        raise damaged(str(path / CONFIG), f"modules_to_save names {named}, and the file contains none of these modules")
    if not sides:
        raise TesseraError("no adapters in this file", where=str(file), code="adapter.none-in-file")
    prefix, names = _stripped([*sides, *alphas, *norms], part, str(file))
    layers = {names[name]: halves for name, halves in sides.items() if name in names}
    layer_alphas = {names[name]: alpha for name, alpha in alphas.items() if name in names}
    _check_alphas(layers, layer_alphas, str(file))
    if not layers:
        raise TesseraError("no adapters in this file", where=str(file), code="adapter.none-in-file")
    config_where = str(path / CONFIG) if peft else f"{file}, {HEADER_KEY} of its header"
    with open_safetensors(file) as opened:
        header = (opened.metadata() or {}).get(HEADER_KEY, "{}")
    config = stated if peft else parse_config(header, config_where, prefix) or None
    if config is not None and config.get("use_dora") and not norms:
        raise damaged(config_where, f"use_dora is set, and the file has no {MAGNITUDE_KEY[1:]}")
    if config is not None and layer_alphas:
        raise damaged(str(file), "the scale is given twice: by alpha tensors and by PEFT's configuration")
    underscored = prefix in (UNDERSCORED, "lora_transformer_")
    layer_norms = {names[name]: tensor for name, tensor in norms.items() if name in names}
    return StoredAdapters(str(file), layers, layer_alphas, underscored, config, config_where, layer_norms)


def read_saved(path: Path, parameters: Sequence[str], weight_map: WeightMap | None) -> dict[str, Tensor]:
    """Return the fully trained parameters (`modules_to_save`) that a PEFT folder contains, by their native names.

    `parameters`: all parameter names of the model.
    """
    if not is_adapter_folder(path) or weight_map is None or not read_config(path).get("modules_to_save"):
        return {}
    check_inside(path / WEIGHTS, path)
    stored = {key.removeprefix(PREFIX): tensor for key, tensor in read_tensors(path / WEIGHTS).items()}
    by_foreign = {weight_map.canonical(key): tensor for key, tensor in stored.items() if ".lora_" not in key}
    saved: dict[str, Tensor] = {}
    used: set[str] = set()
    for name in parameters:
        match = weight_map.rule_for(name)
        if match is not None and all(foreign in by_foreign for foreign in match[1]):
            used.update(match[1])
            saved[name] = match[0].op.to_native([by_foreign[foreign] for foreign in match[1]])
    # The file may contain a copy of a tied head.
    used.update(key for key, native in weight_map.copies if native in saved)
    if unused := [key for key in by_foreign if key not in used]:
        what = f"{unused[0]} belongs neither to an adapter nor to a parameter of this model"
        raise TesseraError(what, where=str(path / WEIGHTS), code="adapter.unknown-tensor")
    tied = "head.weight" not in parameters and any(name.endswith(".embed.weight") for name in saved)
    if tied and not read_config(path).get("ensure_weight_tying"):
        raise TesseraError(
            "the adapters train the embedding, but not the head that shares its weight in this model",
            where=str(path / CONFIG),
            fix="train with ensure_weight_tying=True in PEFT",
            code="adapter.tied-head",
        )
    return saved


def parts_in(path: Path) -> set[str]:
    """Return for which experts of a video pipeline a file has adapters: FIRST, SECOND or both."""
    file = find_adapter_file(path)
    names = [] if file is None else _keys(file)
    return {SECOND if name.startswith(f"{SECOND}.") else FIRST for name in names}


def _stripped(names: Sequence[str], part: str, where: str) -> tuple[str, dict[str, str]]:
    """Return the prefix of a file's names, and name -> name without prefix.

    If the file has adapters of both experts, return only those of `part`.
    """
    texts = [name for name in names if name.startswith(_TEXT_ENCODERS)]
    if texts:
        raise TesseraError(
            f"the file also contains adapters of a text encoder ({texts[0]}), which are not supported",
            where=where,
            fix="use a file that contains adapters of the transformer only",
            code="adapter.text-encoder",
        )
    prefixes = {name: next((start for start in _PREFIXES if name.startswith(start)), "") for name in names}
    present = set(prefixes.values())
    if present == {f"{FIRST}.", f"{SECOND}."}:
        present = {f"{part}."}
    if len(present) > 1:
        examples = [next(name for name, start in prefixes.items() if start == prefix) for prefix in sorted(present)]
        raise damaged(where, f"it mixes names of {len(present)} formats: {', '.join(examples)}")
    (prefix,) = present
    if prefix == f"{SECOND}." and part != SECOND:
        raise TesseraError(
            f"these adapters are for {SECOND}, the expert of low noise levels",
            where=where,
            fix=f"load them for {SECOND}",
            code="adapter.other-expert",
        )
    return prefix, {name: name.removeprefix(prefix) for name, start in prefixes.items() if start == prefix}


def _alpha(key: str, tensor: Tensor, where: str) -> float:
    if tensor.numel() != 1 or tensor.is_complex() or tensor.dtype == torch.bool:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise damaged(where, f"{key} must be a single number, not {kind} {list(tensor.shape)}")
    return float(tensor)


def _check_alphas(layers: Collection[str], alphas: Collection[str], where: str) -> None:
    """Raise if some layers have an alpha and others do not: their scale would be unknown."""
    for names, others, what in ((layers, alphas, "no alpha"), (alphas, layers, "an alpha and no weights")):
        missing = [name for name in names if name not in others]
        if missing and alphas:
            raise damaged(where, f"{few_names(missing, 3)}: {what}, unlike other layers")


def match_names(
    stored: StoredAdapters, paths: Sequence[str], weight_map: WeightMap
) -> tuple[WeightMap, dict[str, str]]:
    """Return the weight map of the file's format, and the canonical name of each layer in the file.

    `paths`: the native layers of the model. The format that matches most names is chosen; it must match all of them.
    """
    best: tuple[WeightMap, dict[str, str]] | None = None
    every: set[str] = set()
    for table in (weight_map, *weight_map.others.values()):
        modules = {name for path in paths for name in (modules_of(path, table) or (0, ()))[1]}
        every |= modules
        spelled = {module.replace(".", "_"): module for module in modules} if stored.underscored else {}
        names = {layer: spelled.get(layer) or canonical(layer, table) for layer in stored.sides}
        names = {layer: name for layer, name in names.items() if name in modules}
        if best is None or len(names) > len(best[1]):
            best = table, names
    assert best is not None
    if unmatched := [layer for layer in stored.sides if layer not in best[1]]:
        spellings = sorted(name.replace(".", "_") if stored.underscored else name for name in every)
        raise TesseraError(
            f"the file has adapters for layers that this model does not have: {few_names(unmatched, 5)}",
            where=stored.where,
            nearest=nearest(unmatched[0], spellings),
            fix="check that the adapters belong to this model",
            code="adapter.unknown-layers",
        )
    return best
