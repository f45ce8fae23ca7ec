"""Write the model card of a published model: base model, data, recipe and results."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any, Literal

import yaml

from tessera.config.hub_ids import is_hub_id, parse_hub_id
from tessera.config.run_config import RunConfig, SourceSection, load_config
from tessera.config.saved_recipe import read_saved
from tessera.errors import TesseraError
from tessera.runtime.files import read_metrics
from tessera.version import __version__, package_versions

Library = Literal["transformers", "diffusers", "peft"]
_PACKAGES = ("torch", "transformers", "diffusers", "peft")
# sections of the recipe in the card; other sections may contain local paths
_SECTIONS = ("precision", "parallel", "optim")


def model_card(name: str, library: Library, run: Path | None, base: str | None) -> str:
    """Return the text of a model card. `run`: the run folder; `base`: org/name of the base model.

    Local paths are private: the card contains only the last part of a path.
    """
    config = None if run is None else load_config(read_saved(run / "config.yaml"))
    text = [_header(library, config, base), f"# {name.rpartition('/')[2]}", ""]
    text += [_first_sentence(config, library, base), ""]
    if config is not None and run is not None:
        text += _trained_on(config) + _results(run) + _recipe(config)
    versions = {"Tessera": __version__, "Python": platform.python_version(), **package_versions(_PACKAGES)}
    text += ["## Versions", "", ", ".join(f"{package} {number}" for package, number in versions.items()), ""]
    return "\n".join(text)


def _header(library: Library, config: RunConfig | None, base: str | None) -> str:
    said: dict[str, Any] = {"library_name": library, "tags": ["tessera"]}
    if config is not None and config.model.lora is not None:
        said["tags"] += ["lora"]
    if base is not None:
        said |= {"base_model": base, "base_model_relation": "adapter" if library == "peft" else "finetune"}
    sets = (
        {} if config is None else {_public_name(source): None for source in config.data.train if _public_name(source)}
    )
    if sets:
        said["datasets"] = list(sets)
    return f"---\n{yaml.safe_dump(said, sort_keys=False)}---\n"


def _first_sentence(config: RunConfig | None, library: Library, base: str | None) -> str:
    kind = "LoRA adapters" if library == "peft" else "A model"
    word = "for" if library == "peft" else "that was fine-tuned from"
    began = "" if base is None else f" {word} [{base}](https://huggingface.co/{base})"
    steps = "" if config is None or config.train.steps is None else f", trained for {config.train.steps} steps"
    return f"{kind}{began}{steps} with Tessera."


def _public_name(source: SourceSection) -> str | None:
    """Return org/name of a data set on Hugging Face; None for a local data set."""
    for value in (source.hub_id, source.path):
        if value is not None and is_hub_id(value):
            id = parse_hub_id(value, "dataset", "data")
            return id.name if id.hub == "hf" else None
    return None


def _trained_on(config: RunConfig) -> list[str]:
    lines = ["## Data", ""]
    for title, sets in (("trained on", config.data.train), ("held out", config.data.eval)):
        for source in sets:
            name = source.hub_id or source.path.name
            weight = "" if source.weight is None else f", weight {source.weight:g}"
            lines.append(f"- {title}: `{_plain(name)}`{weight}")
    return [*lines, ""] if len(lines) > 2 else []


def _results(run: Path) -> list[str]:
    """Return a table with the last metrics of each kind (step, evaluation)."""
    try:
        rows = read_metrics(run / "metrics.jsonl")
    except (OSError, TesseraError):
        return []
    last: dict[str, dict[str, Any]] = {}
    for row in rows:
        last[str(row.get("kind", "step"))] = row
    lines = []
    for kind, row in last.items():
        for key, value in row.items():
            is_shown = key == "accuracy" or "loss" in key or key.startswith("eval") or key == "tokens"
            if is_shown and isinstance(value, (int, float)) and not isinstance(value, bool):
                lines.append(f"| {_plain(kind)} | {row.get('step', '')} | {_plain(key)} | {value:.6g} |")
    if not lines:
        return []
    return ["## Results", "", "| | step | | |", "|---|---|---|---|", *lines, ""]


def _recipe(config: RunConfig) -> list[str]:
    """Return the sections of a recipe that cannot contain local paths, as YAML."""
    dumped = config.model_dump(mode="json", exclude_defaults=True)
    text = yaml.safe_dump({name: dumped[name] for name in _SECTIONS if dumped.get(name)}, sort_keys=False)
    return ["## Recipe", "", "```yaml", text.replace("```", "'''").rstrip(), "```", ""]


def _plain(text: str) -> str:
    """Replace characters that would end a code span or a table row in Markdown."""
    return "".join(letter if letter.isprintable() and letter not in "`|" else " " for letter in str(text))[:300]
