"""Read and write LoRA adapters as PEFT keeps them, in any layout, and merge them into weights.

A folder holds `adapter_config.json` and `adapter_model.safetensors`, under the names that modules have in the classes
of `transformers`. Where one native layer is several foreign ones, or the other way round, matrices are put side by
side: their ranks add up, and the product is exactly the same.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tessera.checkpoint.collective import Ranks
from tessera.checkpoint.files import MANIFEST, Entry, SafetensorsFile, box_slices, read_tensors, write_file
from tessera.checkpoint.hf import gather_on_rank0
from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.publish import Origin, publish
from tessera.checkpoint.weights import TensorSource, add_product, fill
from tessera.core.adapters import Adapter, Adapters, factor_names, spelled_out
from tessera.core.config import read_mapping
from tessera.core.errors import TesseraError, nearest
from tessera.core.files import check_inside
from tessera.core.layouts import detect_layout
from tessera.core.pattern import first_matches
from tessera.core.run_config import LoraSection, load_config
from tessera.core.weightmap import (
    ColumnsByHead,
    Concat,
    GroupByHead,
    Identity,
    InterleavedToHalfRope,
    Operation,
    TensorChunk,
    WeightMap,
)


@dataclass(frozen=True)
class Factors:
    """Hold one adapter with its two matrices."""

    adapter: Adapter
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]


def to_peft(native: Mapping[str, Factors], weight_map: WeightMap, where: str) -> dict[str, Factors]:
    """Return adapters by the names that modules have in the classes of transformers."""
    made: dict[str, Factors] = {}
    for path, factors in native.items():
        match = weight_map.rule_for(f"{path}.weight")
        if match is None:
            raise TesseraError(f"the weight map has no rule for {path}.weight", where=where)
        rule, foreign = match
        check_operation(rule.op, path, where)
        modules = [weight_map.in_memory(name).removesuffix(".weight") for name in foreign]
        if isinstance(rule.op, TensorChunk):
            if modules[0] not in made:
                members = [native.get(n.removesuffix(".weight")) for n in weight_map.group_of(f"{path}.weight")]
                adapter, a, blocks = _side_by_side(members, [factors.b.shape[0]] * len(members))
                made[modules[0]] = Factors(adapter, a, rule.op.join_chunks(blocks)[0].whole())
            continue
        if isinstance(rule.op, ColumnsByHead):
            made[modules[0]] = Factors(factors.adapter, rule.op.to_foreign(factors.a)[0], factors.b)
            continue
        for module, b in zip(modules, rule.op.to_foreign(factors.b), strict=True):
            made[module] = Factors(factors.adapter, factors.a, b)
    return made


def _side_by_side(present: Sequence[Factors | None], rows: Sequence[int]) -> tuple[Adapter, Tensor, list[Tensor]]:
    """Return an adapter whose rank is the sum of all ranks, matrix A, and a block of matrix B for each layer.

    `rows`: how many outputs each layer has. A layer without an adapter has a block of zeros.
    """
    given = [factors for factors in present if factors is not None]
    like, rank = given[0].adapter, sum(factors.adapter.rank for factors in given)
    blocks, at = [], 0
    for factors, outputs in zip(present, rows, strict=True):
        block = given[0].b.new_zeros(outputs, rank)
        if factors is not None:
            block[:, at : at + factors.adapter.rank] = factors.b * (factors.adapter.scale / like.scale)
            at += factors.adapter.rank
        blocks.append(block)
    # Of the rank that adds up, and with the scale of the first.
    adapter = Adapter(rank, like.scale * (math.sqrt(rank) if like.rslora else rank), like.rslora)
    return adapter, torch.cat([factors.a for factors in given]), blocks


def join_to_native(op: Operation, present: Sequence[Factors | None]) -> Factors:
    """Return one native adapter from those of the foreign layers that the native layer is made of."""
    given = [factors for factors in present if factors is not None]
    first = given[0]
    if isinstance(op, ColumnsByHead):
        return Factors(first.adapter, op.to_native([first.a]), first.b)
    alike = all(torch.equal(one.a, first.a) and one.adapter == first.adapter for one in given)
    if len(given) == len(present) and alike:
        return Factors(first.adapter, first.a, op.to_native([factors.b for factors in given]))
    rows = op.sizes if isinstance(op, Concat) else [first.b.shape[0]] * len(present)
    adapter, a, blocks = _side_by_side(present, rows)
    return Factors(adapter, a, op.to_native(blocks))


def check_operation(op: Operation, path: str, where: str) -> None:
    if not (_of_outputs(op) or isinstance(op, ColumnsByHead)):  # columns are reordered in matrix A
        raise TesseraError(
            f"{path} is no linear layer there ({type(op).__name__}): its adapter has no PEFT form",
            where=where,
            fix="leave it out of model.lora.targets, or export with model.lora.merge",
        )


def _of_outputs(op: Operation) -> bool:
    """Return whether an operation only reorders and joins the outputs of layers: then it does the same to matrix B."""
    if isinstance(op, TensorChunk):
        return op.dim == 0 and _of_outputs(op.op)
    return isinstance(op, (Identity, GroupByHead, InterleavedToHalfRope)) or (isinstance(op, Concat) and op.dim == 0)


@torch.no_grad()
def merge_adapter(name: str, weight: Tensor, tensors: Mapping[str, Tensor], adapters: Adapters) -> Tensor:
    """Return a new weight with its adapter added; the weight itself if it has none.

    All ranks that hold the weight call this together.
    """
    path = name.removesuffix(".weight")
    if path not in adapters or path == name:
        return weight
    factors = (tensors[factor] for factor in factor_names(path))
    a, b = (factor.full_tensor() if isinstance(factor, DTensor) else factor.detach() for factor in factors)
    return add_product(weight.detach().clone(), b, a, adapters[path].scale)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_CONFIG_BYTES = 4 << 20
# What changes how an adapter computes, and the values of it that mean: as plain LoRA does.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "fan_in_fan_out": (False, None),
}


def is_adapter_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def base_of(folder: Path) -> Path:
    """Return the folder of the model that adapters belong to. Only folders of this machine are opened."""
    named = _read_config(folder).get("base_model_name_or_path")
    base = Path(str(named or ""))
    for candidate in (base, folder / base):
        if named and detect_layout(candidate) is not None:
            return candidate
    raise TesseraError(
        f"the adapters belong to {named!r}, which is no folder here",
        where=str(folder / CONFIG),
        fix="set base_model_name_or_path to the model's folder, or give that as model.path and this as model.lora.path",
    )


# ---------------------------------------------------------------------------------------------- reading


def settled(section: LoraSection, parameters: Iterable[str], weight_map: WeightMap | None) -> LoraSection:
    """Return the section with its targets filled in if it only names adapters to start from.

    `parameters`: names of all parameters of the model.
    """
    path = section.path
    if path is None or section.targets:
        return section
    if is_adapter_folder(path):
        paths = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
        found = read_adapters(path, paths, weight_map)
        adapters = {layer: factors.adapter for layer, factors in found.items()}
        rslora = bool(_read_config(path).get("use_rslora"))
        first = next(iter(adapters.values()))
        section = section.model_copy(update={"rank": first.rank, "alpha": first.alpha, "rslora": rslora})
        return spelled_out(section, adapters)
    if (path / "config.yaml").is_file():
        trained = load_config(read_mapping(path / "config.yaml")).model.lora
        if trained is not None:
            return trained.model_copy(update={"path": path, "dropout": section.dropout, "merge": section.merge})
    raise TesseraError(
        f"no adapters at {path}",
        where="model.lora.path",
        allowed=[f"a PEFT folder ({CONFIG})", "a run or checkpoint that trained adapters"],
    )


def fill_adapters(
    path: Path,
    tensors: Mapping[str, Tensor],
    adapters: Adapters,
    parameters: Iterable[str],
    weight_map: WeightMap | None,
) -> None:
    """Fill the matrices of adapters among `tensors` (plain or sharded) from a PEFT folder, a run or a checkpoint.

    `tensors` may belong to a pipeline stage; `adapters`, and `parameters`, the names of all parameters, are those of
    the whole model. A PEFT folder must have the same adapters as `adapters`; `weight_map` translates its names.
    """
    wanted = {name for layer in adapters for name in factor_names(layer)}
    here = {name: tensor for name, tensor in tensors.items() if name in wanted}
    if not is_adapter_folder(path):
        checkpoint = path if (path / MANIFEST).is_file() else CheckpointManager(path / "checkpoints", keep=1).latest()
        if checkpoint is None:
            raise TesseraError("this run has no checkpoint yet", where=str(path))
        CheckpointManager(checkpoint.parent, keep=1).load(checkpoint, {f"model.{n}": t for n, t in here.items()})
        return
    Ranks.current().on_all(lambda: _fill(path, here, adapters, list(parameters), weight_map))


def _fill(
    folder: Path,
    tensors: Mapping[str, Tensor],
    adapters: Adapters,
    parameters: Sequence[str],
    weight_map: WeightMap | None,
) -> None:
    paths = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    found = read_adapters(folder, paths, weight_map)
    for one, other, what in ((adapters, found, "has no adapter for"), (found, adapters, "also has an adapter for")):
        missing = [path for path in one if path not in other]
        if missing:
            raise TesseraError(
                f"the folder {what} {', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" * (len(missing) > 5)),
                where=str(folder),
                fix="leave out model.lora.targets: the folder names the layers that it adapts",
            )
    whole: dict[str, Tensor] = {}
    for path, factors in found.items():
        if not math.isclose(factors.adapter.scale, adapters[path].scale):
            raise TesseraError(
                f"{path}: the folder scales by {factors.adapter.scale:g}, the recipe by {adapters[path].scale:g}",
                where="model.lora.alpha",
                fix="leave out model.lora.targets, rank and alpha: the folder states them",
            )
        a, b = factor_names(path)
        whole |= {a: factors.a, b: factors.b}
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}

    def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return whole[name][box_slices(offsets, sizes)]

    for name, target in tensors.items():
        fill(target, TensorSource(name, (name,), Identity()), shapes, read, str(folder))


def read_adapters(folder: Path, paths: Sequence[str], weight_map: WeightMap | None) -> dict[str, Factors]:
    """Read all adapters of a PEFT folder and return them by the paths of native layers.

    `paths`: the layers of the model. An adapter for a layer that is not among them is an error; one for a layer that
    nothing is computed with is passed over.
    """
    table, where = _needed(weight_map, str(folder)), str(folder / WEIGHTS)
    config = _read_config(folder)
    foreign_factors = _read_factors(folder, config, table)
    used: set[str] = set()
    found: dict[str, Factors] = {}
    for path in paths:
        match = table.rule_for(f"{path}.weight")
        if match is None:
            continue
        rule, foreign = match
        modules = [name.removesuffix(".weight") for name in foreign]
        present = [foreign_factors.get(module) for module in modules]
        if any(present):
            used.update(modules)
            if path not in table.idle:
                check_operation(rule.op, path, where)
                found[path] = join_to_native(rule.op, present)
    left = [module for module in foreign_factors if module not in used]
    if left:
        known = [n.removesuffix(".weight") for path in paths for n in (table.rule_for(f"{path}.weight") or (0, ()))[1]]
        raise TesseraError(
            f"adapters for {', '.join(left[:5])}, which this model does not have",
            where=where,
            nearest=nearest(left[0], known),
            fix="check that the adapters belong to this model",
        )
    if not found:
        raise TesseraError("no adapters here", where=where)
    return found


def _read_factors(folder: Path, config: Mapping[str, Any], weight_map: WeightMap) -> dict[str, Factors]:
    """Return the matrices by the names of their layers, in the spelling that the rules use."""
    path = folder / WEIGHTS
    check_inside(path, folder)
    tensors = read_tensors(path)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        side = next((side for side in ("lora_A", "lora_B") if name.endswith(f".{side}.weight")), None)
        if side is None or tensor.dim() != 2:
            raise TesseraError(f"{key} is no part of a linear layer's adapter", where=str(path))
        module = name.removesuffix(f".{side}.weight")
        halves.setdefault(weight_map.canonical(f"{module}.weight").removesuffix(".weight"), {})[side] = tensor
    found: dict[str, Factors] = {}
    names = {weight_map.in_memory(f"{module}.weight").removesuffix(".weight") for module in halves}
    alphas = _by_pattern(config, "alpha_pattern", names, config.get("lora_alpha", 8), folder / CONFIG)
    ranks = _by_pattern(config, "rank_pattern", names, config.get("r", 8), folder / CONFIG)
    for module, sides in halves.items():
        if len(sides) != 2:
            raise TesseraError(f"of the adapter of {module} only {next(iter(sides))} is there", where=str(path))
        a, b = sides["lora_A"], sides["lora_B"]
        if a.shape[0] != b.shape[1]:
            raise TesseraError(f"{module}: lora_A has rank {a.shape[0]}, lora_B {b.shape[1]}", where=str(path))
        rank = a.shape[0]
        own = weight_map.in_memory(f"{module}.weight").removesuffix(".weight")
        if ranks[own] != rank:
            raise TesseraError(
                f"{own}: {CONFIG} states rank {ranks[own]}, the weights have {rank}",
                where=str(folder / CONFIG),
                fix="check that the two files belong together",
            )
        found[module] = Factors(Adapter(rank, float(alphas[own]), bool(config.get("use_rslora"))), a, b)
    return found


def _by_pattern(
    config: Mapping[str, Any], key: str, modules: Collection[str], default: Any, path: Path
) -> dict[str, Any]:
    """Return a number for each module by PEFT's rule: that of the first pattern that matches the end of its name.

    The match begins at a dot. `default` is for modules that no pattern matches.
    """
    patterns = config.get(key) or {}
    numbers = list(patterns.values()) if isinstance(patterns, dict) else [None]
    if any(isinstance(n, bool) or not isinstance(n, int | float) or not 0 < n < math.inf for n in [*numbers, default]):
        raise TesseraError(f"{key} is a mapping of patterns to numbers above 0", where=str(path))
    found = first_matches(list(patterns), modules, within=r"(.*\.)?({})$", where=f"{path}, {key}")
    return {module: default if number is None else numbers[number] for module, number in found.items()}


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError("far too large")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TesseraError(f"not readable as a configuration of adapters: {error}", where=str(path)) from None
    if not isinstance(config, dict):
        raise TesseraError(f"a configuration is a mapping, this is a {type(config).__name__}", where=str(path))
    for key, allowed in _PLAIN.items():
        if key in config and config[key] not in allowed:
            raise TesseraError(f"{key} = {config[key]!r} is not supported", where=str(path), allowed=allowed[:1])
    return config


# ---------------------------------------------------------------------------------------------- writing


def save_adapters(
    folder: Path,
    tensors: Mapping[str, Tensor],
    adapters: Adapters,
    weight_map: WeightMap | None,
    *,
    base: str = "",
    dropout: float = 0.0,
    language: bool = True,
    origin: Origin | None = None,
    overwrite: bool = False,
) -> None:
    """Write adapters as a PEFT folder. Every rank calls this with its part of the model and all `adapters`.

    `language`: whether the model is one that PEFT gives the methods of a language model.
    """
    table = _needed(weight_map, str(folder))
    wanted = {name for path in adapters for name in factor_names(path)}
    whole = gather_on_rank0({name: tensor for name, tensor in tensors.items() if name in wanted})

    def write(staging: Path) -> None:
        native = {}
        for path, adapter in adapters.items():
            a, b = factor_names(path)
            native[path] = Factors(adapter, whole[a].cpu(), whole[b].cpu())
        made = to_peft(native, table, str(folder))
        config = _config(made, _all_modules(tensors, table), base, dropout)
        config["task_type"] = "CAUSAL_LM" if language else None
        write_file(staging / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        sides = {
            f"{_PREFIX}{module}.{side}.weight": tensor.contiguous()
            for module, factors in made.items()
            for side, tensor in (("lora_A", factors.a), ("lora_B", factors.b))
        }
        entries = [Entry(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in sides.items()]
        with SafetensorsFile(staging / WEIGHTS, entries) as file:
            for key, tensor in sides.items():
                file.put(key, tensor)

    publish(folder, write, origin=origin, overwrite=overwrite)


def _config(made: Mapping[str, Factors], others: Collection[str], base: str, dropout: float) -> dict[str, Any]:
    ranks = Counter(factors.adapter.rank for factors in made.values())
    alphas = Counter(factors.adapter.alpha for factors in made.values())
    rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": dropout,
        "use_rslora": next(iter(made.values())).adapter.rslora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "target_modules": _targets(made, others),
        "rank_pattern": {m: f.adapter.rank for m, f in made.items() if f.adapter.rank != rank},
        "alpha_pattern": {m: _plain(f.adapter.alpha) for m, f in made.items() if f.adapter.alpha != alpha},
    }


def _targets(made: Collection[str], others: Collection[str]) -> list[str]:
    """Return the endings of names by which PEFT finds the adapted modules; whole names if others end alike."""
    ends = {module.rpartition(".")[2] for module in made}
    ambiguous = any(module not in made and module.rpartition(".")[2] in ends for module in others)
    return sorted(made) if ambiguous or any(end.isdigit() for end in ends) else sorted(ends)


def _all_modules(tensors: Mapping[str, Tensor], weight_map: WeightMap) -> set[str]:
    """Return the modules that this rank has of the model: those of other stages have the same endings."""
    found = [weight_map.rule_for(name) for name in tensors if name.endswith(".weight")]
    return {weight_map.in_memory(name).removesuffix(".weight") for match in found if match for name in match[1]}


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _needed(weight_map: WeightMap | None, where: str) -> WeightMap:
    if weight_map is None:
        raise TesseraError("this family has no weight map: it cannot exchange adapters with PEFT", where=where)
    return weight_map
