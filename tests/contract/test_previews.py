"""Samples during training: fixed prompts, files and a record, shown in the report, the same as a finished run makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tessera
from tests.dist.spawn import run_ranks
from tests.errors import raises
from tests.toys.callbacks import StopAt
from tests.toys.generation_set import write_image, write_jsonl
from tests.toys.sampling_folders import write_wan

PREVIEW = {"prompts": ["a red kite", "the <dog>"], "height": 32, "width": 32, "frames": 5, "steps": 2, "seed": 4}


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    write_wan(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set")
    for number in range(4):
        write_image(folder / f"{number}.png", shade=30 * number)
    return write_jsonl(folder / "set.jsonl", [{"path": f"{n}.png", "cap": "a red kite"} for n in range(4)])


def recipe(wan: Path, data: Path, out: Path, **train: Any) -> dict[str, Any]:
    return {
        "name": "run",
        "out": str(out),
        "model": {"path": str(wan)},
        "data": {"kind": "generation", "train": [{"path": str(data)}], "length": 16, "workers": 0},
        "train": {
            "steps": 4,
            "global_batch": 2,
            "task_options": {"encoders": {"text": {"dtype": "float32"}}},
            "generate_every": 2,
            "preview": PREVIEW,
            "device": "cpu",
            **train,
        },
        "optim": {"lr": 1e-3},
    }


def record(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "previews.jsonl").read_text().splitlines()]


def test_previews_show_what_is_learned_and_are_what_the_run_makes(wan: Path, data: Path, tmp_path: Path) -> None:
    run = tessera.train(recipe(wan, data, tmp_path / "whole"))
    rows = record(run.folder)
    assert [(row["step"], row["prompt"], row["seed"]) for row in rows] == [
        (step, prompt, 4 + number) for step in (2, 4) for number, prompt in enumerate(PREVIEW["prompts"])
    ]
    files = [run.folder / row["file"] for row in rows]
    assert files[0].read_bytes() != files[2].read_bytes(), "the weights have changed in between"
    samples = tessera.pipeline(run.folder, device="cpu").generate(
        PREVIEW["prompts"], **{key: value for key, value in PREVIEW.items() if key != "prompts"}
    )
    for path, sample in zip(files[2:], samples, strict=True):
        with Image.open(path) as image:
            last = np.asarray(image.convert("RGB")).astype(int)
        assert np.abs(last - sample.frames[0]).mean() < 4, "colours of a GIF are a palette"
    page = (run.folder / "report.html").read_text()
    assert page.count("data:image/gif;base64,") == 4
    assert "the &lt;dog&gt;" in page


@pytest.mark.slow
def test_a_resumed_run_makes_the_previews_of_one_that_never_stopped(wan: Path, data: Path, tmp_path: Path) -> None:
    whole = tessera.train(recipe(wan, data, tmp_path / "whole", generate_every=1))
    part = tessera.train(recipe(wan, data, tmp_path / "part", generate_every=1), callbacks=[StopAt(2)])
    with (part.folder / "previews.jsonl").open("a") as file:  # as of a step behind the checkpoint that is resumed
        file.write(json.dumps({"step": 3, "prompt": "a", "seed": 0, "file": "x.gif"}) + "\n")
    resumed = tessera.resume(part.folder)
    assert record(resumed.folder) == record(whole.folder)
    for row in record(whole.folder):
        assert (resumed.folder / row["file"]).read_bytes() == (whole.folder / row["file"]).read_bytes()


@pytest.mark.slow
def test_adapters_of_a_run_sample_as_the_run_does(wan: Path, data: Path, tmp_path: Path) -> None:
    chosen = recipe(wan, data, tmp_path, steps=2, generate_every=0)
    chosen["model"]["lora"] = {"rank": 2, "alpha": 64, "targets": ["blocks.*.cross.q", "blocks.*.cross.out"]}
    chosen["checkpoint"] = {"export": True, "prove": "never"}
    chosen["optim"]["lr"] = 0.1
    run = tessera.train(chosen)
    options = {key: value for key, value in PREVIEW.items() if key != "prompts"}
    samples = [
        tessera.pipeline(folder, device="cpu").generate("a red kite", **options)[0].frames.astype(int)
        for folder in (wan, run.folder, run.folder / "adapter")
    ]
    assert np.abs(samples[1] - samples[2]).max() <= 1, "adapters are stored in another order of their layers' columns"
    assert np.abs(samples[0] - samples[1]).max() > 1, "training has changed the weights"


@pytest.mark.slow
def test_a_run_of_one_expert_samples_with_the_other_of_its_folder(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wan"
    write_wan(folder, experts=2)
    chosen = recipe(folder / "transformer_2", data, tmp_path, steps=1, generate_every=0)
    chosen["train"]["task_options"] |= {"boundaries": [0, 0.7], "encoders": {"folder": str(folder)}}
    chosen["model"]["tokenizer"] = str(folder)
    chosen["optim"]["lr"] = 0.0
    options = {key: value for key, value in PREVIEW.items() if key != "prompts"}
    tuned, base = (
        tessera.pipeline(place, device="cpu").generate("a red kite", **options)[0]
        for place in (tessera.train(chosen).folder, folder)
    )
    assert np.array_equal(tuned.frames, base.frames), "nothing was learned, and both experts are where they belong"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"preview": None}, "recipe.previews-without-prompts train.preview.prompts"),
        ({"preview": {**PREVIEW, "height": 40}}, "generation.size-not-whole-patches --height 32 48"),
        ({"preview": {**PREVIEW, "prompts": []}}, "recipe.wrong-value"),
    ],
)
def test_previews_that_cannot_be_made_are_refused_before_training(
    wan: Path, data: Path, tmp_path: Path, change: dict[str, Any], error: str
) -> None:
    with raises(error):
        tessera.train(recipe(wan, data, tmp_path, **change))


def trained(rank: int, world: int, chosen: dict[str, Any]) -> Path:
    return tessera.train(chosen).folder


@pytest.mark.slow
def test_ranks_that_share_a_sequence_make_the_previews_of_one(wan: Path, data: Path, tmp_path: Path) -> None:
    alone = tessera.train(recipe(wan, data, tmp_path / "alone")).folder
    chosen = {**recipe(wan, data, tmp_path / "shared"), "parallel": {"cp": 2}}
    shared = run_ranks(trained, 2, chosen)[0]
    assert record(shared) == record(alone)
    for row in record(alone):
        images = [np.asarray(Image.open(folder / row["file"]).convert("RGB")).astype(int) for folder in (alone, shared)]
        assert np.abs(images[0] - images[1]).mean() < 4, "colours of a GIF are a palette"
