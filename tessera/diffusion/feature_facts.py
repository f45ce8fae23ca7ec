"""What features depend on: how a family reads latents and captions, and the weights of the encoders that made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tessera.config.run_config import RunConfig
from tessera.data.sources.features import MANIFEST
from tessera.diffusion.forms import EditForm, GenerationForm
from tessera.diffusion.frame_encoder import IMAGE_ENCODER
from tessera.diffusion.pipeline_parts import VAE
from tessera.errors import TesseraError
from tessera.weights.layouts import DiffusersFolder

_KINDS = ("generation", "generation_preference")
_BLOCK, _BLOCKS = 1 << 16, 128  # bytes, and how many of them are read of a file of weights


def form_facts(form: GenerationForm, edit: EditForm | None = None) -> dict[str, Any]:
    """Return what a family says about its input, as JSON. `edit`: of a pipeline whose text encoder reads images."""
    later = {"blank": "", "shown": None}  # fields that came later: features that are there already do not name them
    text = [
        {key: value for key, value in asdict(one).items() if key not in later or value != later[key]}
        for one in form.text
    ]
    facts = {"channels": form.channels, "patch": list(form.patch), "joint": form.joint, "text": text}
    facts |= {} if edit is None else {"edit": asdict(edit)}
    return dict(json.loads(json.dumps(facts)))


def component_hashes(folder: Path | None, form: GenerationForm) -> dict[str, str]:
    """Return a hash of the weights of each encoder that lies in a diffusers folder. Those that are not there, as beside
    a transformer alone, are left out."""
    if folder is None or not DiffusersFolder.detect(folder):
        return {}
    layout = DiffusersFolder(folder)
    names = [
        name for name in (VAE, IMAGE_ENCODER, *(text.encoder for text in form.text)) if name in layout.components()
    ]
    return {
        name: weights_hash(layout.weight_files(name)) for name in names if any((folder / name).glob("*.safetensors"))
    }


def weights_hash(files: Sequence[Path]) -> str:
    """Return a hash of files of weights: their sizes, their headers, and blocks spread over each of them. A text
    encoder of 20 GB is read in moments, and no fine-tuning leaves all these blocks as they were."""
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for number in range(_BLOCKS):
                opened.seek(number * max(_BLOCK, size // _BLOCKS))
                digest.update(opened.read(_BLOCK))
            opened.seek(max(0, size - _BLOCK))
            digest.update(opened.read(_BLOCK))
    return digest.hexdigest()


def check_made_for(
    form: GenerationForm,
    edit: EditForm | None,
    folder: Path | None,
    facts: Mapping[str, Any],
    where: str,
    *,
    knows_pipeline: bool,
) -> None:
    """Raise unless features that were made from `facts` are for the model of a family's form, with the encoders in its
    folder. `knows_pipeline`: whether that folder says which pipeline the model belongs to."""
    own = {"form": form_facts(form, edit), "components": component_hashes(folder, form)}
    made = facts.get("form")
    if not knows_pipeline and isinstance(made, dict):  # a transformer alone does not say whose pipeline it is
        own["form"] |= {"edit": made["edit"]} if "edit" in made else {}
    if made != own["form"]:
        known = made if isinstance(made, dict) else {}
        other = [name for name, value in own["form"].items() if known.get(name) != value]
        raise TesseraError(
            f"these features are not for this model: {', '.join(other)} differ ("
            + "; ".join(f"{known.get(name)} there, {own['form'][name]} here" for name in other)[:300]
            + ")",
            where=where,
            fix="make features with a recipe of this model: tessera data features",
        )
    components = facts.get("components")
    for name, found in own["components"].items():
        theirs = components.get(name) if isinstance(components, dict) else None
        if theirs != found:
            raise TesseraError(
                f"these features were made with another {name} than the one in {folder}",
                where=where,
                fix="make features with this one: tessera data features; or name the folder that they were made "
                "with as model.path",
            )


def reads_features(config: RunConfig) -> bool:
    """Return whether all that a run reads are features."""
    sets = [*config.data.train, *(config.data.eval if config.train.eval_interval else [])]
    return bool(sets) and all((source.path / MANIFEST).is_file() for source in sets)


def reads_media(config: RunConfig) -> bool:
    """Return whether a run reads images or videos. A folder that is not on this machine may hold either."""
    sets = [source.path for source in config.data.train if not (source.path / MANIFEST).is_file()]
    return config.data.kind in _KINDS and any(path.suffix or path.exists() for path in sets)
