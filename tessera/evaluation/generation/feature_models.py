"""Compute features of images with local weights: FID's Inception network, CLIP, DINO and DINOv2."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from tessera.checkpoint.files import hash_file, read_tensors
from tessera.checkpoint.legacy.old_torch_files import is_old_torch_file, read_old_torch_file
from tessera.checkpoint.legacy.torch_files import StoredTensor, read_torch_file
from tessera.errors import TesseraError, few_names, first_line, foreign_values
from tessera.evaluation.generation import inception
from tessera.hub.config import local_model
from tessera.runtime import device as devices
from tessera.runtime.files import read_json_mapping
from tessera.runtime.log import without_bars
from tessera.weights.layouts import CONFIG_FILE, folder_layout

BATCH = 32  # number of images in one call
INCEPTION = "inception"
CLIP = "clip"
# model_type of a configuration -> class of transformers. DINO is a ViT.
CLASSES = {
    CLIP: "CLIPModel",
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    "vit": "ViTModel",
}
_SIDE_FILES = (CONFIG_FILE, "preprocessor_config.json", "tokenizer.json", "vocab.json", "merges.txt")


class FeatureModel(ABC):
    """Compute a feature vector of each image. `kind`: the name in scores, such as clip. `digest`: hash of its files."""

    kind: str
    digest: str

    @abstractmethod
    def encode(self, images: Sequence[np.ndarray]) -> Tensor:
        """Return the features [N, D] of images, uint8 [H, W, 3], on the host."""

    def encode_all(self, images: Iterable[np.ndarray]) -> Tensor:
        """Return the features [N, D] of images, computed in batches."""
        parts, batch = [], list[np.ndarray]()
        for image in images:
            batch.append(image)
            if len(batch) == BATCH:
                parts.append(self.encode(batch))
                batch = []
        if batch:
            parts.append(self.encode(batch))
        return torch.cat(parts)

    def describe(self) -> dict[str, Any]:
        """Return the settings that determine the features, for the protocol."""
        return {"kind": self.kind, "digest": self.digest}


class InceptionFeatures(FeatureModel):
    """Compute the features of FID."""

    kind = INCEPTION

    def __init__(self, file: Path, device: torch.device) -> None:
        self._model = inception.Inception()
        wrong = inception.fill(self._model, _tensors(file))
        if wrong:
            raise TesseraError(
                f"the file is not a state dict of FID's Inception network: {few_names(wrong, 4)} missing, unknown or "
                "of another shape",
                where=str(file),
                fix="use pt_inception-2015-12-05-6726825d.pth of pytorch-fid; other networks are named by their folder",
                code="evaluation.wrong-feature-weights",
            )
        self._model.eval().requires_grad_(False).to(device)
        self.digest, self._device = hash_file(file).sha256, device

    @torch.no_grad()
    def encode(self, images: Sequence[np.ndarray]) -> Tensor:
        pixels = torch.stack([inception.prepared(torch.tensor(image)) for image in images])
        features: Tensor = self._model(pixels.to(self._device))
        return features.cpu()

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "preprocessing": "bilinear to 299x299 without antialiasing"}


class VisionFeatures(FeatureModel):
    """Compute features by a model folder of transformers: the projected embedding of CLIP, the class token of DINO."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.kind, self._device = _kind_of(folder), device
        with _readable(folder):
            from transformers import AutoImageProcessor, AutoTokenizer

            # Pillow's resizing does not depend on an installed torchvision.
            self._processor: Any = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True, trust_remote_code=False
            )
            self._model: Any = _load(folder, CLASSES[self.kind]).eval().requires_grad_(False).to(device)
            self._tokenizer: Any = None
            if self.kind == CLIP:
                self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        sides = [folder / name for name in _SIDE_FILES if (folder / name).is_file()]
        self.digest = digest_of([*folder_layout(folder).weight_files(), *sides])
        self.truncated = 0  # number of prompts that were longer than the context of CLIP

    @torch.no_grad()
    def encode(self, images: Sequence[np.ndarray]) -> Tensor:
        pixels = self._processor(list(images), input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        pixels = pixels.to(self._device)
        if self.kind == CLIP:
            pooled = self._model.vision_model(pixel_values=pixels).pooler_output
            features: Tensor = self._model.visual_projection(pooled)
        else:
            features = self._model(pixel_values=pixels).last_hidden_state[:, 0]
        return features.float().cpu()

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings [N, D] of texts. Longer texts than CLIP's context are cut, and counted."""
        assert self._tokenizer is not None, "only CLIP reads texts"
        limit = self._model.config.text_config.max_position_embeddings
        parts = []
        for start in range(0, len(texts), BATCH):
            batch = list(texts[start : start + BATCH])
            self.truncated += sum(len(ids) > limit for ids in self._tokenizer(batch)["input_ids"])
            tokens = self._tokenizer(batch, padding=True, truncation=True, max_length=limit, return_tensors="pt")
            names = ("input_ids", "attention_mask")
            pooled = self._model.text_model(**{name: tokens[name].to(self._device) for name in names}).pooler_output
            parts.append(self._model.text_projection(pooled).float().cpu())
        return torch.cat(parts)


def open_features(path: str | Path, device: str = "auto", where: str = "--features") -> FeatureModel:
    """Open a file of Inception weights, or the folder or hub name of a CLIP, DINO or DINOv2 model."""
    target = devices.resolve(device)
    if Path(path).is_file():
        return InceptionFeatures(Path(path), target)
    return VisionFeatures(local_model(path, where), target)


def open_clip(path: str | Path, device: str = "auto") -> VisionFeatures:
    """Open the folder or hub name of a CLIP model."""
    model = open_features(path, device, "--clip")
    if not isinstance(model, VisionFeatures) or model.kind != CLIP:
        raise TesseraError(
            f"{path} has a {model.kind} model, not a CLIP model",
            where="--clip",
            fix="name the folder of a CLIP model, such as openai/clip-vit-large-patch14",
            code="evaluation.not-clip",
        )
    return model


def digest_of(files: Iterable[Path]) -> str:
    """Return a hash of the names and contents of files."""
    records = sorted((record.name, record.sha256) for record in map(hash_file, files))
    return hashlib.sha256(repr(records).encode()).hexdigest()


def _kind_of(folder: Path) -> str:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise TesseraError(
            "there is no model that computes features of images",
            where=str(folder),
            allowed=["file of Inception weights", "folder with config.json"],
            code="evaluation.no-feature-model",
        )
    kind = str(read_json_mapping(file).get("model_type"))
    if kind not in CLASSES:
        raise TesseraError(
            f"models of the type {kind!r:.80} are not supported as feature models",
            where=str(file),
            allowed=CLASSES,
            code="evaluation.unknown-feature-model",
        )
    return kind


def _tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a state dict: of safetensors, or of a file of torch.save, read without unpickling."""
    if file.suffix == ".safetensors":
        return read_tensors(file)
    content = read_old_torch_file(file) if is_old_torch_file(file) else read_torch_file(file)
    if not isinstance(content, dict):
        return {}
    return {str(name): value.read() for name, value in content.items() if isinstance(value, StoredTensor)}


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Convert errors of transformers in the block to a `TesseraError`."""
    try:
        with foreign_values(str(folder)):
            yield
    except ImportError as error:
        raise TesseraError(
            f"transformers cannot be used: {first_line(error)}",
            where=str(folder),
            fix="pip install tessera-mm[hf]",
            code="environment.component-library-missing",
        ) from None
    except (OSError, RuntimeError, SafetensorError) as error:  # truncated files, tensors with wrong shapes
        raise TesseraError(
            f"transformers cannot read the feature model: {first_line(error)}",
            where=str(folder),
            fix="download or copy this folder again",
            code="evaluation.unreadable-feature-model",
        ) from error


def _load(folder: Path, name: str) -> nn.Module:
    """Return a model of transformers.

    Raise if the files lack one of its tensors: transformers would fill it with random values.
    """
    import transformers

    folder_layout(folder).weight_files()  # raises an error for pickles, and for files outside of the folder
    with without_bars(transformers):
        model, report = getattr(transformers, name).from_pretrained(
            folder,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    unused = "pooler."  # missing tensors of the pooler do not matter: only the class token is used
    missing = [key for key in report["missing_keys"] if not key.startswith(unused)]
    if missing:
        raise TesseraError(
            f"the files lack tensors of {name}: {few_names(sorted(missing), 4)}",
            where=str(folder),
            fix="name the folder of the complete model",
            code="evaluation.wrong-feature-weights",
        )
    loaded: nn.Module = model
    return loaded
