"""What features depend on: how a family reads latents and captions, and the weights of the encoders that made them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tessera.core.generation import EditForm, GenerationForm
from tessera.core.layouts import DiffusersFolder
from tessera.core.run_config import RunConfig
from tessera.data.sources.features import MANIFEST
from tessera.models.common.pipeline_parts import IMAGE_ENCODER, VAE

_BLOCK, _BLOCKS = 1 << 16, 128  # bytes, and how many of them are read of a file of weights


def form_facts(form: GenerationForm, edit: EditForm | None = None) -> dict[str, Any]:
    """Return what a family says about its input, as JSON. `edit`: of a pipeline whose text encoder reads images."""
    text = [asdict(one) for one in form.text]
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


def reads_features(config: RunConfig) -> bool:
    """Return whether all that a run reads are features."""
    sets = [*config.data.train, *(config.data.eval if config.train.eval_interval else [])]
    return bool(sets) and all((source.path / MANIFEST).is_file() for source in sets)
