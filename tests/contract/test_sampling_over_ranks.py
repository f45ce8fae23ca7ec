"""Ranks that share tokens, layers, weights or passes of guidance sample the pixels of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tessera
from tessera.errors import TesseraError
from tests.contract.test_sampling_pipelines import (
    NEGATIVE,
    PROMPTS,
    SEED,
    SIZE,
    VIDEO,
    as_drawn,
    as_tokens,
    assert_same_pixels,
    image,
    reference_pixels,
)
from tests.dist.spawn import run_ranks
from tests.toys.sampling_folders import write_cogvideox, write_flux, write_qwen_image, write_wan

LAYOUTS: dict[str, dict[str, Any]] = {
    "ulysses": {"cp": 2},
    "ring": {"cp": 2, "ulysses": 1},
    "passes in turn": {},
    "replicated": {"shard": 1},
    "tensor": {"tp": 2},
    "pipeline": {"pp": 2},
}
OURS = {"frames": 5, "guidance": 5.0}
Noise = Callable[[Any, Any], Any]
FAMILIES: dict[str, tuple[Callable[[Path], Any], Noise, dict[str, Any], dict[str, Any]]] = {
    "flux": (write_flux, as_tokens, {"guidance_scale": 3.5, "true_cfg_scale": 2.0}, {"true_guidance": 2.0}),
    "cogvideox": (write_cogvideox, as_drawn, {**VIDEO, "guidance_scale": 6.0}, {"frames": 5, "guidance": 6.0}),
    "qwen_image": (write_qwen_image, as_tokens, {"true_cfg_scale": 4.0}, {"guidance": 4.0}),
}


def sampled(rank: int, world: int, folder: Path, layouts: list[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
    samples = []
    for layout in layouts:
        pipeline = tessera.pipeline(folder, device="cpu", parallel=layout)
        (sample,) = pipeline.generate(PROMPTS[0], negative=NEGATIVE, steps=3, seed=SEED, **SIZE, **options)
        samples.append(sample.frames)
    return samples


def assert_ranks_sample_alike(
    folder: Path, reference: tuple[np.ndarray, np.ndarray], layouts: dict[str, dict[str, Any]], options: dict[str, Any]
) -> None:
    by_rank = run_ranks(sampled, 2, folder, list(layouts.values()), options)
    for samples in by_rank:
        for name, frames in zip(layouts, samples, strict=True):
            assert_same_pixels(frames, *reference, name)
    for first, other in zip(*by_rank, strict=True):
        assert np.array_equal(first, other), "all ranks get the same samples"


@pytest.mark.slow
def test_wan_over_ranks_samples_the_pixels_of_diffusers(tmp_path: Path) -> None:
    reference = reference_pixels(write_wan(tmp_path), as_drawn, VIDEO, OURS)
    # Over stages, a small video beside a caption of 512 embeddings is refused, in training as well.
    layouts = {name: layout for name, layout in LAYOUTS.items() if name != "pipeline"}
    assert_ranks_sample_alike(tmp_path, reference, layouts, OURS)


@pytest.mark.slow
def test_given_frames_are_shared_by_ranks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v

    # The second is written as if ftfy were always there; the first does without it.
    monkeypatch.setattr(pipeline_wan_i2v, "prompt_clean", pipeline_wan.prompt_clean)
    pipeline = write_wan(tmp_path, image=True, token_times=True)
    theirs, ours = {**VIDEO, "image": image(0)}, {**OURS, "images": [image(0)]}
    layouts = {name: LAYOUTS[name] for name in ("ulysses", "ring")}
    assert_ranks_sample_alike(tmp_path, reference_pixels(pipeline, as_drawn, theirs, ours), layouts, ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_joint_families_over_ranks_sample_the_pixels_of_diffusers(tmp_path: Path, name: str) -> None:
    write, noise, theirs, ours = FAMILIES[name]
    reference = reference_pixels(write(tmp_path), noise, theirs, ours)
    layouts = {kind: LAYOUTS[kind] for kind in ("ulysses", "ring", "passes in turn", "pipeline")}
    assert_ranks_sample_alike(tmp_path, reference, layouts, ours)


def refused(rank: int, world: int, folder: Path) -> list[str]:
    words = []
    for layout, options in (({"cp": 2, "ulysses": 1}, {"height": 16, "width": 16}), ({"cp": 3}, {})):
        with pytest.raises(TesseraError) as caught:
            tessera.pipeline(folder, device="cpu", parallel=layout).generate(
                "a cat", steps=1, **{"frames": 1, **SIZE, **options}
            )
        words.append(f"{caught.value.what} {caught.value.fix}")
    return words


@pytest.mark.slow
def test_ranks_refuse_what_they_cannot_share(tmp_path: Path) -> None:
    write_wan(tmp_path)
    small, three = run_ranks(refused, 2, tmp_path)[0]
    assert "a batch of 1 tokens cannot be split" in small
    assert "cp 3" in three
