"""Data sets and loaders of `data.json`: tensors under the names of transformers, one part of them for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tessera.core.batch import IGNORE
from tessera.data.media.files import resolve
from tessera_compat import state
from tessera_compat.mindspeed_mm.arguments import parse_args
from tessera_compat.mindspeed_mm.data import (
    ConversationDataset,
    PaddingCollator,
    build_iterations,
    build_mm_dataloader,
    build_mm_dataset,
)
from tessera_compat.mindspeed_mm.data_json import read_data
from tessera_compat.mindspeed_mm.report import JobReport
from tests.contract.small_folders import small_folder
from tests.errors import raises
from tests.toys import pretrain_parts as toy

LOADER = {
    "dataloader_mode": "sampler",
    "sampler_type": "BaseRandomBatchSampler",
    "shuffle": False,
    "drop_last": True,
    "pin_memory": True,
    "collate_param": {"model_name": "qwen2vl", "ignore_pad_token_for_loss": True, "pad_to_multiple_of": 8},
}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    state.set_args(parse_args(toy.flags(None)))
    yield
    state.destroy()


@pytest.fixture(scope="module", params=[pytest.param("qwen2_vl", marks=pytest.mark.slow), "qwen2_5_vl"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder, and a file of six conversations of which every second one has images."""
    folder = tmp_path_factory.mktemp(request.param)
    model = small_folder(request.param, folder / "model")
    rows = []
    for number in range(6):
        images = [str(folder / f"{number}-{which}.png") for which in range(2 * (number % 2))]
        for path in images:
            pixels = np.random.default_rng(number).integers(0, 255, (40 + 8 * number, 61, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
        words = "<image>" * len(images) + "Say red " * (number + 1)
        turns = [{"role": "user", "content": words}, {"role": "assistant", "content": "blue"}]
        rows.append({"messages": turns, "images": images})
    (folder / "data.json").write_text(json.dumps(rows))
    return model, folder / "data.json"


def dataset_param(model: Path, data: Path, **basic: Any) -> dict[str, Any]:
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    return {
        "dataset_type": "huggingface",
        "preprocess_parameters": {"model_name_or_path": str(model), "image_min_pixels": 1024, "image_max_pixels": 4096},
        "basic_parameters": {"dataset": str(data), "cutoff_len": 512, "max_samples": None, **basic},
        "attr": {"formatting": "sharegpt", "messages": "messages", "images": "images", **tags},
    }


def test_samples_are_what_the_reference_processor_makes(job: tuple[Path, Path]) -> None:
    transformers = pytest.importorskip("transformers")
    dataset = build_mm_dataset(dataset_param(*job))
    assert isinstance(dataset, ConversationDataset)
    assert len(dataset) == 6
    sample = dataset[3]
    assert set(sample) == {"input_ids", "attention_mask", "labels", "pixel_values", "image_grid_thw"}
    prepare = transformers.AutoImageProcessor.from_pretrained(job[0], backend="pil")
    images = [Image.open(job[1].parent / f"3-{which}.png") for which in range(2)]
    expected = prepare(images, return_tensors="pt", min_pixels=1024, max_pixels=4096)
    assert torch.equal(sample["image_grid_thw"], expected["image_grid_thw"])
    assert torch.equal(sample["pixel_values"], expected["pixel_values"])
    trained = sample["labels"] != IGNORE
    assert torch.equal(sample["labels"][trained], sample["input_ids"][trained])
    assert 0 < int(trained.sum()) < len(trained)
    assert set(dataset[0]) == {"input_ids", "attention_mask", "labels"}


def test_media_lie_in_a_folder_that_data_json_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def root(dataset: Path | str, **basic: Any) -> Path:
        param = dataset_param(tmp_path, Path(dataset), **basic)
        (section,) = read_data({"dataset_param": param}, "data.json", JobReport(), None).section["train"]
        return Path(section["root"])

    start, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    for folder in (start / "data", elsewhere / "images"):
        folder.mkdir(parents=True)
    (elsewhere / "images" / "1.png").touch()
    monkeypatch.chdir(start)
    (start / "linked").symlink_to(elsewhere)
    picture, private = str(elsewhere / "images" / "1.png"), str(tmp_path / "private.png")
    Path(private).touch()
    # With the file in the job's folder, paths begin there; with a file elsewhere, or behind a link, in its folder.
    assert root("./data/a.json") == Path(".")
    assert root(elsewhere / "a.json") == elsewhere
    assert resolve(picture, root(elsewhere / "a.json")) == Path(picture)
    assert resolve(picture, root("linked/a.json")) == Path(picture)
    assert resolve("./linked/images/1.png", root("linked/a.json")).samefile(picture)
    # dataset_dir names another one. Records cannot.
    assert resolve("images/1.png", root("./data/a.json", dataset_dir="../elsewhere")).samefile(picture)
    assert resolve(picture, root("./data/a.json", dataset_dir=str(tmp_path))) == Path(picture)
    for folder in (root("./data/a.json"), root(elsewhere / "a.json")):
        with raises("media.outside-root", "data.json", "dataset_dir"):
            resolve(private, folder)
    monkeypatch.chdir("/")
    assert root(elsewhere / "a.json") == elsewhere


def test_loader_pads_and_begins_again(job: tuple[Path, Path]) -> None:
    datasets = build_mm_dataset(dataset_param(*job, val_dataset=str(job[1])))
    assert isinstance(datasets, tuple)
    loader = build_mm_dataloader(datasets[0], LOADER, consumed_samples=0)
    batches = list(loader)
    assert [len(batch["input_ids"]) for batch in batches] == [2, 2, 2]
    for batch in batches:
        length = batch["input_ids"].shape[1]
        assert length % 8 == 0
        padded = batch["attention_mask"] == 0
        assert (batch["labels"][padded] == IGNORE).all()
        assert len(batch["image_grid_thw"]) == 2  # of the one sample with images
    train, valid, test = build_iterations(loader, build_mm_dataloader(datasets[1], LOADER))
    assert train is not None
    assert valid is not None
    assert test is None
    again = [next(train) for _ in range(4)][3]
    assert torch.equal(again["input_ids"], batches[0]["input_ids"])


def test_collator_pads_with_what_it_is_told() -> None:
    samples = [
        {name: torch.ones(n, dtype=torch.int64) for name in ("input_ids", "attention_mask", "labels")} for n in (3, 5)
    ]
    batch = PaddingCollator(pad_id=9, multiple=4)(samples)
    assert batch["input_ids"].tolist()[0] == [1, 1, 1, 9, 9, 9, 9, 9]
    assert batch["labels"].tolist()[1][5:] == [IGNORE] * 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"dataset_type": "t2v"}, "job.data-type t2v"),
        ({"dataset_type": None}, "job.data-type dataset_type"),
        ({"basic_parameters": {}}, "job.data-file-missing"),
        ({"basic_parameters": {"dataset": "a.json", "packing": True}}, "job.data-form build_mm_dataset"),
        ({"basic_parameters": {"dataset": "a.json", "cutof_len": 3}}, "job.refused-settings cutoff_len"),
        ({"preprocess_parameters": {}}, "job.tokenizer-missing"),
    ],
)
def test_what_data_json_gets_wrong_is_named(change: dict[str, Any], error: str) -> None:
    with raises(error):
        build_mm_dataset({**dataset_param(Path("model"), Path("a.json")), **change})
    with raises("job.data-key-missing", "dataset_param", "preprocess_parameters"):
        build_mm_dataset({"dataset_type": "huggingface", "basic_parameters": {}})


def test_a_loader_without_a_mode_is_refused() -> None:
    with raises("job.data-key-missing", "dataloader_mode"):
        build_mm_dataloader([1, 2], {"shuffle": True})
    with raises("job.refused-settings"):
        build_mm_dataloader([1, 2], {"dataloader_mode": "sampler", "sampler_type": "AESampler"})
