"""Check that stored features fit a model: the format of latents and captions, and the weights of the encoders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.config.run_config import RunConfig
from tessera.diffusion.autoencoders import VAE
from tessera.diffusion.edit_images import EditPipeline
from tessera.diffusion.family import GenerationFamily
from tessera.diffusion.feature_folder import MANIFEST
from tessera.diffusion.frame_encoder import IMAGE_ENCODER
from tessera.errors import TesseraError
from tessera.weights.layouts import DiffusersFolder

_KINDS = ("generation", "generation_preference")
_BLOCK, _BLOCKS = 1 << 16, 128  # bytes of a block, and number of blocks that are hashed of each file


def form_facts(family: GenerationFamily, edit: EditPipeline | None = None) -> dict[str, Any]:
    """Return the format of latents and captions of a family, as JSON. `edit`: set for a pipeline that edits images."""
    return dict(json.loads(json.dumps(family.facts() | ({} if edit is None else {"edit": edit.facts()}))))


def component_hashes(folder: Path | None, family: GenerationFamily) -> dict[str, str]:
    """Return a hash of the weights of each encoder in a diffusers folder. Components without weights are left out."""
    if folder is None or not DiffusersFolder.detect(folder):
        return {}
    layout = DiffusersFolder(folder)
    names = (VAE, IMAGE_ENCODER, *(reader.encoder for reader in family.captions))
    present = [name for name in names if name in layout.components() and any((folder / name).glob("*.safetensors"))]
    return {name: weights_hash(layout.weight_files(name)) for name in present}


def weights_hash(files: Sequence[Path]) -> str:
    """Return a hash of weight files: of their sizes, headers, and blocks spread over each file. This takes less than a
    second for a text encoder of 20 GB. Fine-tuning changes at least one of the blocks."""
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
    family: GenerationFamily,
    edit: EditPipeline | None,
    folder: Path | None,
    facts: Mapping[str, Any],
    where: str,
    *,
    knows_pipeline: bool,
) -> None:
    """Raise unless stored features were made for this family, with the encoders in `folder`. `facts`: from
    features.json. `knows_pipeline`: whether the folder identifies the pipeline of the model."""
    expected, stored = form_facts(family, edit), facts.get("form")
    # A folder with only the transformer does not name a pipeline: accept features of any pipeline.
    if not knows_pipeline and isinstance(stored, dict):
        expected |= {"edit": stored["edit"]} if "edit" in stored else {}
    if stored != expected:
        fields = stored if isinstance(stored, dict) else {}
        other = [name for name, value in expected.items() if fields.get(name) != value]
        raise TesseraError(
            f"these features were made for another model: {', '.join(other)} differ ("
            + "; ".join(f"{fields.get(name)} in the features, {expected[name]} in the model" for name in other)[:300]
            + ")",
            where=where,
            fix="make features with a recipe of this model: tessera data features",
            code="data.features-of-another-model",
        )
    hashes = facts.get("components")
    for name, digest in component_hashes(folder, family).items():
        if (hashes.get(name) if isinstance(hashes, dict) else None) != digest:
            raise TesseraError(
                f"these features were made with other weights of {name} than those in {folder}",
                where=where,
                fix="make features with these weights: tessera data features; or set model.path to the folder "
                "whose weights made these features",
                code="data.features-of-another-encoder",
            )


def reads_features(config: RunConfig) -> bool:
    """Return whether all data sets of a run are stored features."""
    sets = [*config.data.train, *(config.data.eval if config.train.eval_interval else [])]
    return bool(sets) and all((source.path / MANIFEST).is_file() for source in sets)


def reads_media(config: RunConfig) -> bool:
    """Return whether a run reads images or videos. A missing data folder counts as features, since its content is
    unknown."""
    sets = [source.path for source in config.data.train if not (source.path / MANIFEST).is_file()]
    return config.data.kind in _KINDS and any(path.suffix or path.exists() for path in sets)
