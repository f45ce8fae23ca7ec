"""Read, check and write PEFT's configuration of adapters.

It is the file `adapter_config.json` in a PEFT folder, and a header entry in files of diffusers.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.config.hub_ids import HubId, find_hub_id
from tessera.errors import TesseraError
from tessera.lora.factors import Factors
from tessera.runtime.files import read_text
from tessera.weights.layouts import detect_layout

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_MAX_CONFIG_BYTES = 4 << 20
# PEFT options that would change the computation, with the values that are supported.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "fan_in_fan_out": (False, None),
}

_SECONDS = 20.0  # time limit for matching regular expressions
# Expressions without repetitions and alternatives match in linear time: they need no time limit.
_SAFE_EXPRESSION = re.compile(r"(?:[\w.^$-]|\\[.\-_])*")
_MATCHER = """
import json, re, sys
patterns, names = json.load(sys.stdin)
compiled = [re.compile(pattern) for pattern in patterns]
json.dump({name: next((n for n, p in enumerate(compiled) if p.match(name)), None) for name in names}, sys.stdout)
"""


def is_adapter_folder(path: Path) -> bool:
    """Return whether a folder contains `adapter_config.json`, as PEFT's adapter folders do."""
    return (path / CONFIG).is_file()


def base_of(folder: Path, downloaded: Callable[[HubId], Path | None] = lambda id: None) -> Path:
    """Return the local folder of the base model of adapters. Nothing is downloaded.

    `downloaded`: returns the local folder of a model on a hub; None if it was not downloaded.
    """
    usage = (
        f"tessera generate MODEL --adapter {folder}, tessera convert {folder} OUT --like MODEL, or "
        f"tessera.load({str(folder)!r}, base=MODEL)"
    )
    named = str(read_config(folder).get("base_model_name_or_path") or "") if is_adapter_folder(folder) else ""
    if not named:
        run = folder.absolute().parent
        of_run = (run / "config.yaml").is_file()
        from_seed = f"; or export the merged model of the run: tessera convert {run} OUT" if of_run else ""
        raise TesseraError(
            "the adapter folder does not name its base model",
            where=str(folder),
            fix=f"give the base model as MODEL: {usage}{from_seed}",
            code="adapter.base-unnamed",
        )
    for candidate in (Path(named), folder / named):
        if detect_layout(candidate) is not None:
            return candidate
    id = find_hub_id(named, "model", str(folder / CONFIG))
    cached = None if id is None else downloaded(id)
    if cached is not None and detect_layout(cached) is not None:
        return cached
    fetch = "" if id is None else f"`tessera download {id}` fetches it; or "
    raise TesseraError(
        f"the base model of the adapters, {named!r}, is not on this machine",
        where=str(folder / CONFIG),
        fix=f"{fetch}give the model's folder as MODEL: {usage}; in a recipe model.path=MODEL model.lora.path={folder}",
        code="adapter.base-missing",
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the checked configuration of a PEFT folder."""
    return parse_config(read_text(folder / CONFIG, _MAX_CONFIG_BYTES), str(folder / CONFIG))


def parse_config(text: str, where: str, prefix: str = "") -> dict[str, Any]:
    """Parse and check a configuration. `prefix`: the prefix of this model's keys; other keys are dropped."""
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError(f"it is a {type(config).__name__}, not a mapping")
    except (ValueError, RecursionError) as error:
        what = f"the adapter configuration is damaged: {error}"
        raise TesseraError(what, where=where, code="adapter.unreadable-config") from None
    config = {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}
    for key, allowed in _PLAIN.items():
        if key in config and config[key] not in allowed:
            raise TesseraError(
                f"{key} = {config[key]!r} is not supported",
                where=where,
                allowed=allowed[:1],
                code="adapter.unsupported-option",
            )
    return config


def target_parameters(config: Mapping[str, Any], where: str) -> list[str]:
    """Return `target_parameters` of a configuration: stacked parameters of experts."""
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise TesseraError("target_parameters must be a list of names", where=where, code="adapter.bad-config-value")
    return targets


def ranks_and_alphas(config: Mapping[str, Any], modules: Collection[str], where: str) -> dict[str, tuple[float, float]]:
    """Return (rank, alpha) of each module from a configuration with `rank_pattern` and `alpha_pattern`."""
    ranks = _by_pattern(config, "rank_pattern", modules, config.get("r", 8), where)
    alphas = _by_pattern(config, "alpha_pattern", modules, config.get("lora_alpha", 8), where)
    return {module: (ranks[module], float(alphas[module])) for module in modules}


def _by_pattern(
    config: Mapping[str, Any], key: str, modules: Collection[str], default: Any, where: str
) -> dict[str, Any]:
    """Return the value of each module in `config[key]`: the value of the first pattern that matches the name's end.

    The match begins after a dot. Modules without a matching pattern get `default`. This is PEFT's rule.
    """
    patterns = config.get(key) or {}
    numbers = list(patterns.values()) if isinstance(patterns, dict) else [None]
    name = "r" if key == "rank_pattern" else "lora_alpha"
    for stated, value, values in ((key, patterns, numbers), (name, default, [default])):
        if not all(map(_is_size, values)):
            what = f"{stated} = {str(value)[:40]!r} contains a value that is not a number above 0"
            raise TesseraError(what, where=where, code="adapter.bad-config-value")
    matched = first_matches(list(patterns), modules, within=r"(.*\.)?({})$", where=f"{where}, {key}")
    return {module: default if number is None else numbers[number] for module, number in matched.items()}


def _is_size(number: Any) -> bool:
    """Return whether a value is a positive finite number."""
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 < number <= sys.float_info.max


def make_config(
    adapted: Mapping[str, Factors],
    others: Collection[str] | None,
    base: str,
    dropout: float,
    task_type: str | None,
    saved: Sequence[str] = (),
    experts: Mapping[str, Factors] | None = None,
    other_experts: Collection[str] = (),
) -> dict[str, Any]:
    """Return PEFT's configuration of the adapters in `adapted`, by module.

    `others`: all module names; None: some modules are unknown, which may have experts. `saved`: fully trained modules.
    `experts`: adapters of stacked expert parameters; `other_experts`: names of all stacked expert parameters.
    """
    experts = experts or {}
    every = {**adapted, **experts}
    ranks = Counter(factors.adapter.rank for factors in every.values())
    alphas = Counter(factors.adapter.alpha for factors in every.values())
    rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": 0.0 if experts else dropout,  # PEFT does not support dropout with target_parameters
        "use_rslora": next(iter(every.values())).adapter.rslora,
        "use_dora": next(iter(every.values())).adapter.dora,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": list(saved) or None,
        "ensure_weight_tying": bool(saved),  # a tied head is saved with its embedding
        "target_modules": _targets(adapted, others),
        "target_parameters": _targets(experts, None if others is None else other_experts, parts=2) if experts else None,
        "rank_pattern": {m: f.adapter.rank for m, f in every.items() if f.adapter.rank != rank},
        "alpha_pattern": {m: _plain(f.adapter.alpha) for m, f in every.items() if f.adapter.alpha != alpha},
        "task_type": task_type,
    }


def _targets(adapted: Collection[str], others: Collection[str] | None, parts: int = 1) -> list[str]:
    """Return the last `parts` segments of the names of adapted modules: PEFT selects modules by name endings.

    Return full names if other modules have the same endings, or may have.
    """
    ends = {_ending(name, parts) for name in adapted}
    ambiguous = others is None or any(name not in adapted and _ending(name, parts) in ends for name in others)
    return sorted(adapted) if ambiguous or any(end.isdigit() for end in ends) else sorted(ends)


def _ending(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])


def _plain(number: float) -> float | int:
    return int(number) if float(number).is_integer() else number


# ---------------------------------------------------------------------------------------------- regular expressions


def first_matches(
    expressions: Sequence[str], names: Collection[str], *, within: str = "{}", where: str, seconds: float = _SECONDS
) -> dict[str, int | None]:
    """Return for each name the index of the first regular expression that matches its beginning; None if none does.

    Expressions of a file may take years to match, and Python cannot interrupt a match, so they run in a process that is
    killed after the time limit. `within`: a template whose braces are replaced by each expression.
    """
    patterns = [within.replace("{}", expression) for expression in expressions]
    if all(map(_SAFE_EXPRESSION.fullmatch, expressions)):
        compiled = [re.compile(pattern) for pattern in patterns]
        return {name: next((n for n, p in enumerate(compiled) if p.match(name)), None) for name in names}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            input=json.dumps([patterns, list(names)]),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise TesseraError(
            f"the regular expressions take longer than {seconds:g} s to match",
            where=where,
            fix="write them without nested repetitions, or list the modules",
            code="adapter.expression-too-slow",
        ) from None
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [str(error)])[-1][:300]
        raise TesseraError(
            f"a regular expression cannot be compiled: {reason}",
            where=where,
            fix="use the syntax of Python's re module",
            code="adapter.not-an-expression",
        ) from None
    numbers: dict[str, int | None] = json.loads(done.stdout)
    return numbers
