"""The files beside the weights go with them: folder -> run -> checkpoint -> resume elsewhere -> export, as they are."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

import tessera
from tests.toys.chat_set import SPECIAL, chat_recipe, write_chat_set

# In the manner of a published folder: a switch that readers set, and tools.
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
IDS = {f"<|{word}|>": 512 - len(SPECIAL) + number for number, word in enumerate(SPECIAL)}
GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "eos_token_id": [IDS["<|im_end|>"], IDS["<|endoftext|>"]],
    "pad_token_id": IDS["<|endoftext|>"],
    "transformers_version": "4.51.0",
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 64,
    "max_pixels": 1024,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "a_note_of_theirs": "kept",
}
VIDEO = {
    **PREPROCESSOR,
    "video_processor_type": "Qwen2VLVideoProcessor",
    "fps": 1.0,
    "min_frames": 4,
    "max_frames": 16,
    "a_note_of_theirs": "kept too",
}
TOKENIZER = {
    "tokenizer_class": "Qwen2Tokenizer",
    "model_max_length": 131072,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": TEMPLATE,
}


def dress(folder: Path) -> dict[str, bytes]:
    """A folder as hubs have it; what of it is to be handed on."""
    theirs: dict[str, Any] = {
        "generation_config.json": GENERATION,
        "tokenizer_config.json": TOKENIZER,
        "preprocessor_config.json": PREPROCESSOR,
        "video_preprocessor_config.json": VIDEO,
        "special_tokens_map.json": {"eos_token": "<|im_end|>"},
    }
    texts = {name: json.dumps(data) for name, data in theirs.items()}
    texts |= {"LICENSE": "Do what you will.", "NOTICE.txt": "By them.", "merges.txt": "#version: 0.2\n"}
    for name in ("chat_template.jinja",):
        (folder / name).unlink(missing_ok=True)  # this folder has it in the tokenizer's settings
    for name, text in texts.items():
        (folder / name).write_text(text)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "a_note_of_theirs": "kept"}))
    (folder / "README.md").write_text("# about other weights")
    (folder / "trainer_state.json").write_text("{}")
    return {name: text.encode() for name, text in texts.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_set(tmp_path_factory.mktemp("chat"), samples=8)


@pytest.fixture(scope="module")
def published(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    recipe = chat_recipe(data, tmp_path_factory.mktemp("made"), steps=1)
    run = tessera.train(recipe)
    folder = tessera.convert(run.folder, tmp_path_factory.mktemp("hub") / "published", prove="never")
    return folder, dress(folder)


def recipe_from(folder: Path, data: Path, out: Path, **processor: Any) -> dict[str, Any]:
    recipe = chat_recipe(data, out, steps=1)
    recipe["model"] = {"path": str(folder)}
    recipe["data"]["processor"] = processor
    recipe["checkpoint"] |= {"every": 1, "export": True}
    return recipe


def check(folder: Path, theirs: dict[str, bytes]) -> None:
    assert {name: (folder / name).read_bytes() for name in theirs if (folder / name).is_file()} == theirs
    assert json.loads((folder / "config.json").read_text())["a_note_of_theirs"] == "kept"
    assert not (folder / "base_config.json").exists(), "a run's own copy of it"
    assert not (folder / "README.md").exists()
    assert not (folder / "trainer_state.json").exists()
    assert not (folder / "chat_template.jinja").exists(), "a template of ours would win over theirs"


def test_a_conversion_hands_every_file_on(published: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    folder, theirs = published
    check(tessera.convert(folder, tmp_path / "out", prove="never"), theirs)
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words.model_max_length == 131072
    question = [{"role": "user", "content": "Hi."}]
    told = words.apply_chat_template(question, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    assert told.endswith("<think>\n\n</think>\n\n")
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.6
    # A run of conversions ends where it began.
    check(tessera.convert(tmp_path / "out", tmp_path / "again", prove="never"), theirs)


@pytest.mark.slow
def test_a_run_keeps_them_through_a_resume_on_another_machine(
    published: tuple[Path, dict[str, bytes]], data: Path, tmp_path: Path
) -> None:
    folder, theirs = published
    begun = shutil.copytree(folder, tmp_path / "start")
    run = tessera.train(recipe_from(begun, data, tmp_path / "here"))
    check(run.folder / "hf", theirs)
    shutil.rmtree(begun)  # the other machine has never seen it
    moved = tmp_path / "there" / "run"
    moved.parent.mkdir()
    run.folder.rename(moved)
    resumed = tessera.resume(moved, {"train.steps": 2})
    assert resumed.checkpoint is not None
    check(moved / "hf", theirs)
    check(tessera.convert(resumed.checkpoint, tmp_path / "from-checkpoint", prove="never"), theirs)
    # A run begun from this run, which names no tokenizer.
    second = tessera.train(recipe_from(moved, data, tmp_path / "second"))
    check(second.folder / "hf", theirs)


def test_what_the_recipe_changed_is_changed_and_nothing_else(
    published: tuple[Path, dict[str, bytes]], data: Path, tmp_path: Path
) -> None:
    folder, theirs = published
    run = tessera.train(recipe_from(folder, data, tmp_path, max_pixels=512))
    out = run.folder / "hf"
    written = json.loads((out / "preprocessor_config.json").read_bytes())
    assert written["max_pixels"] == 512
    assert written["size"]["longest_edge"] == 512
    others = {name: text for name, text in theirs.items() if "preprocessor" not in name}
    check(out, others)
    _, processor = tessera.load(out)
    assert processor.processor.image.max_pixels == 512  # type: ignore[union-attr]
    assert processor.processor.sampling.max_frames == 16  # type: ignore[union-attr]


def test_another_system_prompt_needs_another_template(
    published: tuple[Path, dict[str, bytes]], data: Path, tmp_path: Path
) -> None:
    """Theirs would not say what the model was trained to hear."""
    folder, theirs = published
    out = tessera.train(recipe_from(folder, data, tmp_path, system="Be brief.")).folder / "hf"
    words = AutoTokenizer.from_pretrained(out)
    told = words.apply_chat_template([{"role": "user", "content": "Hi."}], tokenize=False)
    assert told.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert words.model_max_length == 131072
    assert (out / "generation_config.json").read_bytes() == theirs["generation_config.json"]


def test_the_tokenizer_of_another_folder_brings_its_own_template(
    published: tuple[Path, dict[str, bytes]], data: Path, tmp_path: Path
) -> None:
    folder, theirs = published
    recipe = recipe_from(folder, data, tmp_path, min_pixels=64, max_pixels=1024)
    recipe["model"]["tokenizer"] = str(data / "tokenizer")
    out = tessera.train(recipe).folder / "hf"
    assert (out / "generation_config.json").read_bytes() == theirs["generation_config.json"]
    assert (out / "LICENSE").is_file()
    words = AutoTokenizer.from_pretrained(out)
    assert "enable_thinking" not in words.chat_template
    assert words.model_max_length > 1e20, "nobody said how long a text may be"


def test_settings_of_a_base_model_learn_where_answers_end(
    published: tuple[Path, dict[str, bytes]], tmp_path: Path
) -> None:
    base = shutil.copytree(published[0], tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps({"top_p": 0.8, "eos_token_id": IDS["<|endoftext|>"]}))
    out = tessera.convert(base, tmp_path / "out", prove="never")
    written = GenerationConfig.from_pretrained(out)
    assert written.top_p == 0.8
    assert set(written.eos_token_id) == {IDS["<|endoftext|>"], IDS["<|im_end|>"]}


def test_files_in_one_are_kept_in_one(published: tuple[Path, dict[str, bytes]], data: Path, tmp_path: Path) -> None:
    """Newer folders keep both preprocessors in one file; a second place that says otherwise would win somewhere."""
    folder = shutil.copytree(published[0], tmp_path / "new")
    both = {"processor_class": "Qwen2VLProcessor", "image_processor": PREPROCESSOR, "video_processor": VIDEO}
    (folder / "processor_config.json").write_text(json.dumps(both))
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).unlink()
    out = tessera.convert(folder, tmp_path / "same", prove="never")
    assert json.loads((out / "processor_config.json").read_bytes()) == both
    assert not (out / "preprocessor_config.json").exists()
    changed = tessera.train(recipe_from(folder, data, tmp_path, max_pixels=512)).folder / "hf"
    assert json.loads((changed / "processor_config.json").read_bytes()) == {"processor_class": "Qwen2VLProcessor"}
    assert json.loads((changed / "preprocessor_config.json").read_bytes())["max_pixels"] == 512
    _, processor = tessera.load(changed)
    assert processor.processor.image.max_pixels == 512  # type: ignore[union-attr]


def test_links_out_of_a_folder_are_not_published(
    published: tuple[Path, dict[str, bytes]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(published[0], tmp_path / "hostile")
    secret = tmp_path / "secret"
    secret.write_text("-----BEGIN PRIVATE KEY-----")
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").symlink_to(secret)
    os.mkfifo(folder / "vocab.txt")
    with caplog.at_level(logging.WARNING, logger="tessera"):
        out = tessera.convert(folder, tmp_path / "out", prove="never")
    assert not (out / "LICENSE").exists()
    assert not (out / "vocab.txt").exists()
    assert "outside of its folder" in caplog.text


def test_the_cache_of_downloads_is_made_of_links(published: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    folder, theirs = published
    snapshot, blobs = tmp_path / "snapshots" / "0123abcd", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    check(tessera.convert(snapshot, tmp_path / "out", prove="never"), theirs)
