"""Reference features for distances: a folder of images, a file of features, or published statistics."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from tessera.checkpoint.files import open_safetensors, stored_shape
from tessera.errors import TesseraError, first_line
from tessera.evaluation.generation.distances import Moments
from tessera.evaluation.generation.feature_models import FeatureModel
from tessera.evaluation.generation.samples import GeneratedSample, media_files
from tessera.runtime.files import replace_file
from tessera.runtime.progress import WorkProgress

FEATURES = "features"
MEAN, COVARIANCE = "mu", "sigma"  # names of mean and covariance in published files
_MOST_BYTES = 1 << 30  # limit of the total size of all arrays in a numpy archive


@dataclass(frozen=True)
class ReferenceFeatures:
    """Hold the moments of the reference features, and the features themselves if the file has them."""

    moments: Moments
    features: Tensor | None
    digest: str = ""  # hash of the feature model; empty: the file does not state it


def read_reference(path: Path, model: FeatureModel) -> ReferenceFeatures:
    """Read or compute a reference.

    A folder is encoded. A safetensors file of `write_features` has features. An `.npz` of pytorch-fid has mean and
    covariance, and states neither the model nor the number of images.
    """
    if path.is_dir():
        files = media_files(path)
        features = encode_progress(model, [GeneratedSample(file) for file in files])
        return ReferenceFeatures(_moments(features, path), features, model.digest)
    if path.suffix == ".safetensors":
        return _stored_features(path, model)
    if path.suffix == ".npz":
        return ReferenceFeatures(_published(path), None)
    raise TesseraError(
        "the reference is no folder, and no .safetensors or .npz file",
        where=str(path),
        allowed=["folder of images or videos", ".safetensors of --save-features", ".npz with mu and sigma"],
        code="evaluation.no-reference",
    )


def encode_progress(model: FeatureModel, samples: list[GeneratedSample]) -> Tensor:
    """Return the features of samples: of images, or of the middle frames of videos."""
    with WorkProgress(f"{model.kind} features", len(samples), "samples") as progress:

        def middle_frames() -> Iterator[np.ndarray]:
            for sample in samples:
                frames = sample.frames()
                yield frames[len(frames) // 2]
                progress.count()

        return model.encode_all(middle_frames())


def write_features(path: Path, features: Tensor, model: FeatureModel) -> None:
    """Write features as safetensors, for use as a reference."""
    metadata = {"kind": model.kind, "digest": model.digest}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, save({FEATURES: features.float().contiguous()}, metadata))
    except OSError as error:
        raise TesseraError(
            f"{path} cannot be written: {first_line(error)}", where="--save-features", code="output.not-writable"
        ) from None


def _stored_features(path: Path, model: FeatureModel) -> ReferenceFeatures:
    with open_safetensors(path) as file:
        metadata = file.metadata() or {}
        names = list(file.keys())
        if names != [FEATURES] or len(stored_shape(file, FEATURES)) != 2:
            raise _not_features(path, "it has no matrix `features`")
        features: Tensor = file.get_tensor(FEATURES)
    if metadata.get("digest") != model.digest:
        raise TesseraError(
            f"the features are of another model: {metadata.get('kind', 'unknown')}, not {model.kind}, or other weights",
            where=str(path),
            fix="compute them again with the same --features, or name the folder of reference images",
            code="evaluation.reference-of-other-model",
        )
    if not features.is_floating_point() or not features.isfinite().all():
        raise _not_features(path, "its features are not finite floating-point numbers")
    return ReferenceFeatures(_moments(features, path), features, model.digest)


def _published(path: Path) -> Moments:
    """Read mean and covariance of a numpy archive. Pickled objects are refused, and sizes checked before reading."""
    try:
        with zipfile.ZipFile(path) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
                raise _not_features(path, "it is too large")
        with np.load(path, allow_pickle=False) as stored:
            mean, covariance = np.asarray(stored[MEAN]), np.asarray(stored[COVARIANCE])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError, MemoryError) as error:
        raise _not_features(path, first_line(error)) from None
    numeric = mean.dtype.kind == covariance.dtype.kind == "f"
    if not numeric or mean.ndim != 1 or covariance.shape != (len(mean), len(mean)):
        raise _not_features(path, f"mu is {mean.dtype} {mean.shape}, sigma is {covariance.dtype} {covariance.shape}")
    tensors = torch.from_numpy(mean.astype(np.float64)), torch.from_numpy(covariance.astype(np.float64))
    symmetric = torch.allclose(tensors[1], tensors[1].T, rtol=1e-4, atol=1e-6 * float(tensors[1].abs().max()))
    if not all(bool(tensor.isfinite().all()) for tensor in tensors) or not symmetric:
        raise _not_features(path, "its covariance is not finite or not symmetric")
    if bool((tensors[1].diagonal() < 0).any()):
        raise _not_features(path, "its covariance has negative variances")
    return Moments(*tensors, None)


def _moments(features: Tensor, path: Path) -> Moments:
    if len(features) < 2:
        raise TesseraError(
            "a distance needs at least two samples",
            where=str(path),
            fix="name more samples: a meaningful distance needs a thousand or more",
            code="evaluation.too-few-samples",
        )
    return Moments.of(features)


def _not_features(path: Path, problem: str) -> TesseraError:
    return TesseraError(
        f"the file has no features or statistics: {problem}",
        where=str(path),
        fix="name a folder of images, a file of --save-features, or an .npz with mu and sigma",
        code="evaluation.unreadable-reference",
    )
