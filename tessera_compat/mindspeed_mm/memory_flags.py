"""Translate the flags that save memory: recomputation and activation offload.

MindSpeed can combine them in one layer. Here a layer is fully recomputed, or its attention is offloaded, or parts of it
are recomputed: of several flags, the one that saves most memory applies. No result changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tessera.config.pattern import matches
from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.model_json import ModelFile, recompute_patterns
from tessera_compat.mindspeed_mm.model_keys import AUDIO, TEXT, VISION
from tessera_compat.mindspeed_mm.report import JobReport


def set_memory(section: dict[str, Any], args: Args, model: ModelFile, report: JobReport) -> None:
    """Set recomputation and activation offload in the section `parallel` of a recipe."""
    stages = section.get("layers", {})
    recompute = _whole_layers(section, args, model)
    patterns = [one["modules"] if isinstance(one, dict) else one for one in recompute]
    for part, blocks in (("vision", VISION), ("audio", AUDIO)):
        if part in model.recompute:
            recompute += recompute_patterns(model.recompute[part], blocks, stages.get(part))
    offload = list(model.offload)
    every = range(_depth(args, model))
    stored = {layer for layer in every if not any(matches(pattern, f"{TEXT}.{layer}") for pattern in patterns)}
    if args.swap_attention and stored:
        offload.append(f"{_layers(stored, every)}.attn")
    if args.recompute_norm:
        norms = stored & set(every[: args.recompute_norm_num_layers])
        if args.swap_attention:
            report.change("--recompute-norm", "--swap-attention offloads the outputs of norms, too")
        elif norms:
            recompute.append({"modules": _layers(norms, every), "keep": "matmul"})
            stored -= norms  # the setting above recomputes the activation functions of these layers, too
    if args.recompute_activation_function:
        functions = stored & set(every[: args.recompute_activation_function_num_layers])
        if functions:
            recompute.append({"modules": f"{_layers(functions, every)}.mlp", "keep": "matmul"})
        else:
            report.change("--recompute-activation-function", "other flags recompute it in these layers already")
    if recompute:
        section["recompute"] = recompute
    if offload:
        section["activation_offload"] = offload


def _whole_layers(section: dict[str, Any], args: Args, model: ModelFile) -> list[Any]:
    """Return the entries of `parallel.recompute` for text layers.

    A pattern recomputes layers completely. A section with `keep` recomputes all but their attention.
    """
    settings = {
        "recompute_granularity": args.recompute_granularity,
        "recompute_method": args.recompute_method,
        "recompute_num_layers": args.recompute_num_layers,
        **model.recompute.get("text", {}),
    }
    stages = section.get("layers", {}).get("text")
    patterns = recompute_patterns(settings, TEXT, stages)
    if not args.recompute_skip_core_attention:
        return list(patterns)
    number = args.recompute_num_layers_skip_core_attention or settings["recompute_num_layers"]
    keeps = recompute_patterns({**settings, "recompute_num_layers": number}, TEXT, stages)
    return [{"modules": one, "keep": "attention"} if one in keeps else one for one in patterns]


def _depth(args: Args, model: ModelFile) -> int:
    """Return the number of text layers. If the model's folder is on another machine, return a large upper bound."""
    depth = model.fields.get("text.num_hidden_layers")
    folder = Path(args.load_base_model or args.load or model.folder or "")
    if depth is None and ((folder / "config.json").is_file() or (folder / "config.yaml").is_file()):
        config: Any = resolve(ModelSection(path=folder))[1]
        depth = config.text.num_hidden_layers
    return depth or 1000


def _layers(chosen: Iterable[int], every: range) -> str:
    """Return the pattern of module paths that selects the text layers with these numbers. `every`: all numbers."""
    numbers = sorted(chosen)
    if numbers == list(every):
        return f"{TEXT}.{{*}}"
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][1] == number - 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in groups]
    return f"{TEXT}.{{{','.join(words)}}}"
