"""Score generated images and videos: CLIP score, Fréchet and kernel distance, and consistency of frames."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tessera.errors import TesseraError
from tessera.evaluation.generation.distances import (
    FEWEST_GROUPS,
    SUBSETS,
    Moments,
    SampleEstimate,
    frechet_distance,
    grouped_mean,
    kernel_distance,
)
from tessera.evaluation.generation.feature_models import (
    BATCH,
    INCEPTION,
    FeatureModel,
    VisionFeatures,
    open_clip,
    open_features,
)
from tessera.evaluation.generation.reference import ReferenceFeatures, read_reference, write_features
from tessera.evaluation.generation.samples import GeneratedSample, SampleSet, read_samples
from tessera.runtime.progress import WorkProgress
from tessera.version import package_versions

ENOUGH_SAMPLES = 10_000  # with fewer samples the Fréchet distance has a large bias
CLIP_SCORE = "clip_score"
_VERSION = 1
_LIBRARIES = ("tessera-mm", "torch", "transformers", "pillow", "av")
_DEFINITIONS = {
    CLIP_SCORE: "100 max(0, cosine of the embeddings of image and prompt), mean over frames, then over samples",
    "consistency": "mean over frames after the first of (max(0, cosine to the frame before) + max(0, cosine to the "
    "first frame)) / 2",
    "frechet": "squared Fréchet distance of Gaussians, covariance with divisor N - 1; of a video the middle frame",
    "kernel": f"mean of the unbiased MMD^2 with (x . y / D + 1)^3 over {SUBSETS} subsets; of a video the middle frame",
}


@dataclass(frozen=True)
class ScoreOptions:
    """Choose the scores. `clip`: model of the CLIP score. `features`, `reference`: feature model and reference of the
    distances. `consistency`: model of the consistency of frames. `save_features`: file to write, for use as a
    reference.
    """

    prompts: Path | None = None
    clip: str | Path | None = None
    features: str | Path | None = None
    reference: Path | None = None
    consistency: str | Path | None = None
    save_features: Path | None = None

    def check(self) -> None:
        """Raise if no score is requested, or one of two options that belong together is missing."""
        distance = self.reference is not None or self.save_features is not None
        if distance != (self.features is not None):
            raise TesseraError(
                "a distance needs a feature model and a reference",
                where="--reference" if self.features is not None else "--features",
                fix="--features pt_inception-2015-12-05-6726825d.pth --reference FOLDER, or --save-features FILE",
                code="evaluation.distance-needs-both",
            )
        if self.save_features is not None and self.save_features.suffix != ".safetensors":
            raise TesseraError(
                f"{self.save_features.name} does not end in .safetensors",
                where="--save-features",
                fix=f"--save-features {self.save_features.with_suffix('.safetensors')}",
                code="evaluation.features-not-safetensors",
            )
        if self.clip is None and self.features is None and self.consistency is None:
            raise TesseraError(
                "no score was requested",
                where="tessera score",
                allowed=["--clip MODEL", "--features MODEL --reference FOLDER", "--consistency MODEL"],
                code="evaluation.no-score-requested",
            )


@dataclass
class Scores:
    """Hold the scores of a set of samples by name, values of each sample, warnings, and the protocol."""

    samples: SampleSet
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    protocol: dict[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Return a hash of the protocol. Scores with equal fingerprints were computed in the same way.

        Their samples were generated in the same way, too, if the protocol states the generation.

        The name of the model is left out: the hash of its weights identifies it.
        """
        generation = self.protocol.get("generation")
        if isinstance(generation, Mapping):
            generation = {key: value for key, value in generation.items() if key != "model"}
        hashed = {**self.protocol, "generation": generation}
        canonical = json.dumps(hashed, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def add(self, name: str, estimate: SampleEstimate, **facts: Any) -> None:
        interval = None if estimate.interval is None else list(estimate.interval)
        self.values[name] = {"value": estimate.value, "interval_95": interval, **facts}

    def dump(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        samples = self.samples
        return {
            "version": _VERSION,
            "fingerprint": self.fingerprint,
            "scores": self.values,
            "warnings": self.warnings,
            "samples": {
                "kind": "videos" if samples.are_videos else "images",
                "count": len(samples.samples),
                "content": samples.content_digest(),
            },
            "protocol": self.protocol,
            "per_sample": self.rows,
        }

    def lines(self) -> list[str]:
        out = []
        for name, score in self.values.items():
            interval = score["interval_95"]
            between = "" if interval is None else f"  [{interval[0]:.5g}, {interval[1]:.5g}]"
            out.append(f"{name} {score['value']:.5g}{between}")
        return [*out, *(f"warning: {text}" for text in self.warnings), f"protocol {self.fingerprint}"]


def score(folder: str | Path, options: ScoreOptions, device: str = "auto") -> Scores:
    """Score the images or videos of a folder."""
    options.check()
    samples = read_samples(Path(folder), options.prompts)
    result = Scores(samples)
    _check_samples(samples, options)
    models = _Models(options, device)
    reference = None
    if options.reference is not None:
        assert models.features is not None, "the options were checked"
        reference = read_reference(options.reference, models.features)
    collected = _collect(samples, models)
    prompts = [sample.prompt or "" for sample in samples.samples]
    if models.clip is not None:
        estimate = grouped_mean(collected.clip, prompts, [1.0] * len(prompts))
        result.add(CLIP_SCORE, estimate, prompts=len(set(prompts)))
        if models.clip.truncated:
            result.warnings.append(f"{models.clip.truncated} prompts are longer than CLIP reads, and were cut")
    if models.consistency is not None:
        groups = [sample.prompt or sample.path.name for sample in samples.samples]
        estimate = grouped_mean(collected.consistency, groups, [length - 1.0 for length in collected.lengths])
        result.add(f"frame_consistency_{models.consistency.kind}", estimate)
    if reference is not None and models.features is not None:
        _distances(result, models.features, collected.features, reference)
    if options.save_features is not None and models.features is not None:
        write_features(options.save_features, collected.features, models.features)
    _warn(result, options)
    result.rows = _rows(samples, collected)
    result.protocol = _protocol(samples, models, reference)
    return result


def _check_samples(samples: SampleSet, options: ScoreOptions) -> None:
    if options.clip is not None and any(not sample.prompt for sample in samples.samples):
        raise TesseraError(
            "the CLIP score needs the prompts of the samples",
            where="--prompts",
            fix="--prompts FILE: VBench_full_info.json, JSON {file: prompt}, or a line for each file",
            code="evaluation.no-prompts",
        )
    if options.consistency is not None and not samples.are_videos:
        raise TesseraError(
            "the consistency of frames needs videos, and these samples are images",
            where="--consistency",
            fix="leave --consistency out",
            code="evaluation.consistency-of-images",
        )
    if options.reference is not None and len(samples.samples) < 2:
        raise TesseraError(
            "a distance needs at least two samples",
            where=str(samples.folder),
            fix="generate more samples: a meaningful distance needs a thousand or more",
            code="evaluation.too-few-samples",
        )


class _Models:
    """Open each feature model once, even if two scores use it."""

    def __init__(self, options: ScoreOptions, device: str) -> None:
        opened: dict[str, FeatureModel] = {}

        def shared(path: str | Path | None, where: str) -> FeatureModel | None:
            if path is None:
                return None
            if str(path) not in opened:
                opened[str(path)] = open_features(path, device, where)
            return opened[str(path)]

        self.clip: VisionFeatures | None = None
        if options.clip is not None:
            self.clip = open_clip(options.clip, device)
            opened[str(options.clip)] = self.clip
        self.consistency = shared(options.consistency, "--consistency")
        self.features = shared(options.features, "--features")


@dataclass
class _Collected:
    """Hold the values that were computed for each sample, in the order of the samples."""

    clip: list[float] = field(default_factory=list)
    consistency: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # number of frames of each sample
    features: Tensor = field(default_factory=lambda: torch.zeros(0))


def _collect(samples: SampleSet, models: _Models) -> _Collected:
    """Read every sample once, and compute the values that the scores need."""
    result, rows, texts = _Collected(), list[Tensor](), dict[str, Tensor]()
    if models.clip is not None:
        prompts = list(dict.fromkeys(sample.prompt or "" for sample in samples.samples))
        texts = dict(zip(prompts, models.clip.encode_texts(prompts), strict=True))
    with WorkProgress("scoring", len(samples.samples), "samples") as progress:
        for chunk, videos in _chunks(samples.samples):
            lengths = [len(video) for video in videos]
            encode = _once(videos)
            if models.clip is not None:
                for sample, frames in zip(chunk, torch.split(encode(models.clip), lengths), strict=True):
                    result.clip.append(clip_score(frames, texts[sample.prompt or ""]))
            if models.consistency is not None:
                for sample, frames in zip(chunk, torch.split(encode(models.consistency), lengths), strict=True):
                    result.consistency.append(frame_consistency(frames, sample))
            if models.features is not None:
                rows.append(models.features.encode_all(video[len(video) // 2] for video in videos))
            result.lengths += lengths
            progress.count(len(chunk))
    result.features = torch.cat(rows) if rows else result.features
    return result


def _chunks(samples: Sequence[GeneratedSample]) -> Iterator[tuple[list[GeneratedSample], list[np.ndarray]]]:
    """Yield lists of samples with their frames. Each list except the last has enough frames for a batch."""
    chunk, videos = list[GeneratedSample](), list[np.ndarray]()
    for sample in samples:
        chunk.append(sample)
        videos.append(sample.frames())
        if sum(map(len, videos)) >= BATCH:
            yield chunk, videos
            chunk, videos = [], []
    if chunk:
        yield chunk, videos


def _once(videos: Sequence[np.ndarray]) -> Callable[[FeatureModel], Tensor]:
    """Return a function that encodes all frames of the videos by a model, and caches the features of each model."""
    encoded: dict[str, Tensor] = {}

    def encode(model: FeatureModel) -> Tensor:
        if model.digest not in encoded:
            encoded[model.digest] = model.encode_all(frame for video in videos for frame in video)
        return encoded[model.digest]

    return encode


def clip_score(frames: Tensor, text: Tensor) -> float:
    """Return the CLIP score of a sample: embeddings [F, D] of its frames, and [D] of its prompt."""
    cosines = F.cosine_similarity(frames.double(), text.double()[None], dim=-1)
    return float(100 * cosines.clamp(min=0).mean())


def frame_consistency(frames: Tensor, sample: GeneratedSample) -> float:
    """Return the consistency of the frames of a video by their features [F, D], as VBench defines it."""
    if len(frames) < 2:
        raise TesseraError(
            "the consistency of frames needs two frames, and this video has one",
            where=str(sample.path),
            fix="generate videos of more frames",
            code="evaluation.video-of-one-frame",
        )
    values = frames.double()
    before = F.cosine_similarity(values[1:], values[:-1], dim=-1).clamp(min=0)
    first = F.cosine_similarity(values[1:], values[:1], dim=-1).clamp(min=0)
    return float((before + first).mean() / 2)


def _distances(result: Scores, model: FeatureModel, features: Tensor, reference: ReferenceFeatures) -> None:
    width = features.shape[1]
    if len(reference.moments.mean) != width:
        raise TesseraError(
            f"the reference has {len(reference.moments.mean)} features, and the feature model computes {width}",
            where="--reference",
            fix="use the feature model that the reference was computed with",
            code="evaluation.reference-of-other-model",
        )
    published = model.kind == INCEPTION
    count = reference.moments.count
    name = "fid" if published else f"fd_{model.kind}"
    result.add(name, SampleEstimate(frechet_distance(Moments.of(features), reference.moments)), reference=count)
    fewest = min(len(features), len(features) if count is None else count)
    if fewest < ENOUGH_SAMPLES:
        rank = f"; {fewest} samples are fewer than the {width} features" if fewest <= width else ""
        result.warnings.append(
            f"{name} of {fewest} samples is too high: its bias falls with their number, so compare it only with values "
            f"of as many samples; {ENOUGH_SAMPLES:,} or more are usual{rank}"
        )
    if not reference.digest:
        result.warnings.append("the reference does not state its feature model and preprocessing")
    kernel = "kid" if published else f"kd_{model.kind}"
    if reference.features is None:
        result.warnings.append(f"{kernel} is left out: the reference has mean and covariance, not features")
        return
    if fewest < 4:
        result.warnings.append(f"{kernel} is left out: it needs four samples")
        return
    distance = kernel_distance(features, reference.features)
    result.add(kernel, distance.estimate, reference=count, deviation=distance.deviation, subset=distance.size)


def _warn(result: Scores, options: ScoreOptions) -> None:
    if result.samples.unsampled:
        result.warnings.append(f"{result.samples.unsampled} prompts of {options.prompts} have no sample")
    absent = [name for name, value in result.values.items() if value["interval_95"] is None]
    without = [name for name in absent if name != "fid" and not name.startswith("fd_")]
    if without:
        result.warnings.append(f"no interval for {', '.join(without)}: it needs {FEWEST_GROUPS} prompts or samples")


def _rows(samples: SampleSet, collected: _Collected) -> list[dict[str, Any]]:
    rows = []
    for number, sample in enumerate(samples.samples):
        row: dict[str, Any] = {"file": sample.path.name, "prompt": sample.prompt, "seed": sample.seed}
        if collected.clip:
            row[CLIP_SCORE] = collected.clip[number]
        if collected.consistency:
            row["frame_consistency"] = collected.consistency[number]
        rows.append({**row, "frames": collected.lengths[number]})
    return rows


def _protocol(samples: SampleSet, models: _Models, reference: ReferenceFeatures | None) -> dict[str, Any]:
    """Return how the samples were made, as far as known, and how they were scored. The result contains no paths."""
    scoring: dict[str, Any] = {}
    if models.clip is not None:
        scoring[CLIP_SCORE] = {"model": models.clip.describe(), "definition": _DEFINITIONS[CLIP_SCORE]}
    if models.consistency is not None:
        definition = _DEFINITIONS["consistency"]
        scoring["frame_consistency"] = {"model": models.consistency.describe(), "definition": definition}
    if models.features is not None and reference is not None:
        moments = reference.moments
        content = hashlib.sha256(moments.mean.double().numpy().tobytes()).hexdigest()
        scoring["distance"] = {
            "model": models.features.describe(),
            "frechet": _DEFINITIONS["frechet"],
            "kernel": _DEFINITIONS["kernel"],
            "reference": content,
            "reference_count": moments.count,
        }
    prompts = repr([sample.prompt for sample in samples.samples]).encode()
    return {
        "generation": samples.generation if samples.generation is not None else "unknown",
        "samples": {"count": len(samples.samples), "prompts": hashlib.sha256(prompts).hexdigest()},
        "scoring": scoring,
        "versions": package_versions(_LIBRARIES),
    }
