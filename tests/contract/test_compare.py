"""`tessera compare` of every family, through transformers' own processors; and what AutoProcessor makes of exports."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from small_folders import CASES, LANGUAGE, small_folder
from transformers import AutoProcessor

import tessera
from tessera.errors import TesseraError
from tessera.models.transformers.library import load_processor
from tests.errors import raises
from tests.toys.chat_set import write_chat_set

TORCHVISION = importlib.util.find_spec("torchvision") is not None
WITH_VIDEO = [name for name in CASES if name not in (*LANGUAGE, "llava 1.5")]
# Text, an image of tiles, and a folder of everything; tests of a family compare its answers and its processor, too.
QUICK = ("qwen2", "internvl", "qwen3_omni")
SAMPLES = 3  # with no image, with one and with two
FOLDERS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_chat_set(tmp_path_factory.mktemp("chat"), samples=6)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows[1]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    text = [row for row in rows if isinstance(row["messages"][0]["content"], list)]
    text = [row for row in text if all(part["type"] == "text" for part in row["messages"][0]["content"])]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in text))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:SAMPLES]))
    return folder


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, small_folder(request.param, tmp_path_factory.mktemp("made"))


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_every_family_is_compared_through_their_own_processor(folder: tuple[str, Path], data: Path) -> None:
    name, exported = folder
    rows = data / ("text.jsonl" if name in LANGUAGE else "train.jsonl")
    agreement = tessera.compare(exported, rows, max_new_tokens=4)
    told = "\n".join(agreement.lines())
    assert "transformers computes the same logits" in told
    assert ("with an image" in told) == (name not in LANGUAGE)
    assert len(agreement.answers) == (2 if name in LANGUAGE else SAMPLES)
    assert agreement.complete, agreement.lines()
    assert len({ours for _, ours, _ in agreement.answers}) > 1, (
        "answers that do not depend on the question prove nothing"
    )


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_auto_processor_loads_an_export(folder: tuple[str, Path]) -> None:
    """With torchvision; without it, transformers can make no processor that has a part for videos, of any folder."""
    name, exported = folder
    if TORCHVISION or name not in WITH_VIDEO:
        assert AutoProcessor.from_pretrained(exported) is not None
        return
    with pytest.raises(ImportError, match="VideoProcessor requires the Torchvision"):
        AutoProcessor.from_pretrained(exported)
    processor = load_processor(exported)
    assert type(processor).__mro__[1].__module__.startswith("transformers.")
    assert processor.image_processor is not None
    # Those of thinkers read a size of their part for videos for images, too.
    assert processor.video_processor is (processor.image_processor if "omni" in name else None)


@pytest.mark.parametrize("folder", ["internvl"], indirect=True)
def test_a_folder_without_a_file_for_videos_has_a_processor(folder: tuple[str, Path], tmp_path: Path) -> None:
    """Without torchvision transformers refuses such folders with an error of another type."""
    without = tmp_path / "without"
    shutil.copytree(folder[1], without, ignore=shutil.ignore_patterns("video_preprocessor_config.json"))
    assert load_processor(without).image_processor is not None


def test_what_cannot_be_compared_is_said(data: Path, tmp_path: Path) -> None:
    folder = small_folder("qwen3", tmp_path)
    (folder / "tessera_export.json").unlink()  # it would tell that files were changed
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with raises("tokenizer.template-refuses-messages"):
        tessera.compare(folder, data / "text.jsonl", max_new_tokens=1)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TesseraError):
        tessera.compare(folder, data / "text.jsonl", max_new_tokens=1)


def test_a_template_that_forgets_the_image_ends_in_a_sentence(data: Path, tmp_path: Path) -> None:
    """The model of transformers then raises from its depths: it has features, and no tokens to put them in."""
    folder = small_folder("qwen2_vl", tmp_path)
    (folder / "tessera_export.json").unlink()  # it would tell that files were changed
    words = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}" + words + "{% endfor %}")
    with raises("weights.reference-fails"):
        tessera.compare(folder, data / "train.jsonl", max_new_tokens=1, prove="never")


def test_sampling_advice_of_a_folder_does_not_change_the_comparison(data: Path, tmp_path: Path) -> None:
    """A penalty on repetitions, as published folders advise, would make greedy answers differ."""
    folder = small_folder("qwen3", tmp_path)
    (folder / "tessera_export.json").unlink()  # it would tell that files were changed
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 5.0, "do_sample": True, "temperature": 0.1}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    assert tessera.compare(folder, data / "text.jsonl", max_new_tokens=8).complete


def test_a_run_folder_is_refused_with_the_way_to_a_hugging_face_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: mine\n", encoding="utf-8")
    with raises("weights.not-hf-folder") as refused:
        tessera.compare(tmp_path, tmp_path / "held_out.jsonl")
    assert "tessera convert" in str(refused.value)


def test_a_folder_without_a_file_for_videos_normalises_them_as_images(tmp_path: Path) -> None:
    folder = small_folder("qwen3_vl", tmp_path)
    (folder / "video_preprocessor_config.json").unlink()
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_mean": [0.4, 0.4, 0.4]}))
    _, processor = tessera.load(folder)
    assert processor.processor.video.mean == processor.processor.image.mean == (0.4, 0.4, 0.4)


def test_a_folder_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    with raises("weights.folder-missing"):
        tessera.compare(tmp_path / "nowhere")
