"""Adapters as PEFT keeps them: `adapter_config.json` beside `adapter_model.safetensors`, under the names that modules
have in the classes of `transformers`. Read into any layout, written from any.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tessera.checkpoint.adapter_forms import Factors, check_operation, join_to_ours, to_peft
from tessera.checkpoint.files import write_file
from tessera.checkpoint.hf import gather, publish
from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.manifest import MANIFEST
from tessera.checkpoint.ranks import Ranks
from tessera.checkpoint.safetensors_file import Entry, SafetensorsStream, open_safetensors
from tessera.checkpoint.weights import Recipe, fill
from tessera.core.adapters import Adapter, Adapters, factor_names, spelled_out
from tessera.core.config import read_mapping
from tessera.core.errors import TesseraError, nearest
from tessera.core.foreign_regex import first_matches
from tessera.core.run_config import LoraSection, load_config
from tessera.core.weightmap import Same, WeightMap

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
    """The folder of the model that adapters belong to. Only what lies on this machine is opened."""
    named = _read_config(folder).get("base_model_name_or_path")
    base = Path(str(named or ""))
    for candidate in (base, folder / base):
        if named and (candidate / "config.json").is_file():
            return candidate
    raise TesseraError(
        f"the adapters belong to {named!r}, which is no folder here",
        where=str(folder / CONFIG),
        fix="set base_model_name_or_path to the model's folder, or give that as model.path and this as model.lora.path",
    )


# ---------------------------------------------------------------------------------------------- reading


def settled(section: LoraSection, parameters: Iterable[str], weight_map: WeightMap | None) -> LoraSection:
    """The section with its targets, where it only says which adapters to start from. `parameters`: of the model."""
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
        theirs = load_config(read_mapping(path / "config.yaml")).model.lora
        if theirs is not None:
            return theirs.model_copy(update={"path": path, "dropout": section.dropout, "merge": section.merge})
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
    """Fills the factors among `tensors` (plain or sharded) from a PEFT folder, a run or a checkpoint. `adapters`: those
    of the whole model, when `tensors` is only a part of it."""
    wanted = {name for layer in adapters for name in factor_names(layer)}
    here = {name: tensor for name, tensor in tensors.items() if name in wanted}
    if not is_adapter_folder(path):
        checkpoint = path if (path / MANIFEST).is_file() else CheckpointManager(path / "checkpoints", keep=1).latest()
        if checkpoint is None:
            raise TesseraError("this run has no checkpoint yet", where=str(path))
        CheckpointManager(checkpoint.parent, keep=1).load(checkpoint, {f"model.{n}": t for n, t in here.items()})
        return
    Ranks.current().each(lambda: _fill(path, here, adapters, list(parameters), weight_map))


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
                fix="leave out model.lora.targets: the folder says which layers it adapts",
            )
    whole: dict[str, Tensor] = {}
    for path, factors in found.items():
        if not math.isclose(factors.adapter.scale, adapters[path].scale):
            raise TesseraError(
                f"{path}: the folder scales by {factors.adapter.scale:g}, the recipe by {adapters[path].scale:g}",
                where="model.lora.alpha",
                fix="leave out model.lora.targets, rank and alpha: the folder says them",
            )
        a, b = factor_names(path)
        whole |= {a: factors.a, b: factors.b}
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}

    def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        return whole[name][tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]

    for name, target in tensors.items():
        fill(target, Recipe(name, (name,), Same()), shapes, read, str(folder))


def read_adapters(folder: Path, paths: Sequence[str], weight_map: WeightMap | None) -> dict[str, Factors]:
    """By the paths of our layers, which are among `paths`. They are small: each rank reads all of them."""
    table, where = _needed(weight_map, str(folder)), str(folder / WEIGHTS)
    config = _read_config(folder)
    theirs = _read_factors(folder, config, table)
    used: set[str] = set()
    found: dict[str, Factors] = {}
    for path in paths:
        match = table.to_foreign(f"{path}.weight")
        if match is None:
            continue
        rule, foreign = match
        modules = [name.removesuffix(".weight") for name in foreign]
        present = [theirs.get(module) for module in modules]
        if any(present):
            check_operation(rule.op, path, where)
            used.update(modules)
            found[path] = join_to_ours(rule.op, present)
    left = [module for module in theirs if module not in used]
    if left:
        known = [
            n.removesuffix(".weight") for path in paths for n in (table.to_foreign(f"{path}.weight") or (0, ()))[1]
        ]
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
    """By the names of their layers in the spelling that the rules use."""
    path = folder / WEIGHTS
    with open_safetensors(path):  # says so where this is no such file
        tensors = load_file(path)
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
                f"{own}: {CONFIG} says rank {ranks[own]}, the weights have {rank}",
                where=str(folder / CONFIG),
                fix="check that the two files belong together",
            )
        found[module] = Factors(Adapter(rank, float(alphas[own]), bool(config.get("use_rslora"))), a, b)
    return found


def _by_pattern(
    config: Mapping[str, Any], key: str, modules: Collection[str], default: Any, path: Path
) -> dict[str, Any]:
    """A number for each module by the rule of PEFT: the first of the patterns that matches the end of its name from a
    dot on, each a regular expression; `default` where none does."""
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
    overwrite: bool = False,
) -> None:
    """Every rank calls this with what it has of the model; `adapters` are those of all of it."""
    table = _needed(weight_map, str(folder))
    wanted = {name for path in adapters for name in factor_names(path)}
    whole = gather({name: tensor for name, tensor in tensors.items() if name in wanted})

    def write(staging: Path) -> None:
        made = to_peft({path: _factors(path, adapters, whole) for path in adapters}, table, str(folder))
        config = _config(made, _all_modules(tensors, table), base, dropout)
        write_file(staging / CONFIG, (json.dumps(config, indent=2) + "\n").encode())
        sides = {
            f"{_PREFIX}{module}.{side}.weight": tensor.contiguous()
            for module, factors in made.items()
            for side, tensor in (("lora_A", factors.a), ("lora_B", factors.b))
        }
        stream = SafetensorsStream(staging / WEIGHTS, [Entry(key, t.dtype, tuple(t.shape)) for key, t in sides.items()])
        stream.open()
        for key, tensor in sides.items():
            stream.put(key, tensor)
        stream.close()

    publish(folder, write, overwrite=overwrite)


def _config(made: Mapping[str, Factors], others: Collection[str], base: str, dropout: float) -> dict[str, Any]:
    ranks = Counter(factors.adapter.rank for factors in made.values())
    alphas = Counter(factors.adapter.alpha for factors in made.values())
    rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
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
    """By how their names end, where no other module ends so; PEFT would adapt that one too."""
    ends = {module.rpartition(".")[2] for module in made}
    ambiguous = any(module not in made and module.rpartition(".")[2] in ends for module in others)
    return sorted(made) if ambiguous or any(end.isdigit() for end in ends) else sorted(ends)


def _all_modules(tensors: Mapping[str, Tensor], weight_map: WeightMap) -> set[str]:
    """Of what this rank has of the model: its other stages are alike."""
    found = [weight_map.to_foreign(name) for name in tensors if name.endswith(".weight")]
    return {weight_map.in_memory(name).removesuffix(".weight") for match in found if match for name in match[1]}


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


def _factors(path: str, adapters: Adapters, whole: Mapping[str, Tensor]) -> Factors:
    a, b = factor_names(path)
    return Factors(adapters[path], whole[a].cpu(), whole[b].cpu())


def _needed(weight_map: WeightMap | None, where: str) -> WeightMap:
    if weight_map is None:
        raise TesseraError("this family has no weight map: it cannot exchange adapters with PEFT", where=where)
    return weight_map
