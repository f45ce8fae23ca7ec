"""What is particular to the InternVL processor: tiles, the words of InternLM, exports."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
from answers import export, same_answer
from chats import as_reference, asked_about, conversation, picture
from processor_families import PROCESSORS
from processors import sizes_of
from transformers import AutoTokenizer

import tessera
from tessera.core.sample import MediaSize
from tessera.models.internvl import SPEC
from tessera.models.internvl.processor import InternVLProcessor, TileCutter
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.models.transformers.library import load_image_processor
from tessera.tools.compare import compare
from tests.errors import raises

VOCAB, TILE, ROWS = 400, 32, 17  # pixels along a side of a tile, its patches and the class token
# What published folders have, in our words: one word for each picture or clip, and a line end.
PUBLISHED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif c['type'] == 'video' %}{{ '<video>\n' }}{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ANSWER = {"role": "assistant", "content": "A red square."}


CASE = PROCESSORS["internvl"]


@pytest.fixture(scope="module")
def folder() -> Path:
    return CASE.folder


@pytest.fixture(scope="module")
def processor() -> InternVLProcessor:
    loaded: InternVLProcessor = CASE.processor
    return loaded


@pytest.fixture(scope="module")
def exported() -> Path:
    return CASE.exported


@pytest.mark.parametrize("answer", [False, True])
def test_exported_templates_write_what_published_ones_do(exported: Path, answer: bool) -> None:
    messages = as_reference(conversation("image", "video", "image"))
    ours = AutoTokenizer.from_pretrained(exported).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=answer
    )
    assert ours == jinja2.Environment().from_string(PUBLISHED).render(messages=messages, add_generation_prompt=answer)


@pytest.mark.parametrize("bounds", [(1, 12), (1, 1), (2, 6), (4, 9), (1, 40)])
def test_arrangements_are_the_references(bounds: tuple[int, int]) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    tiles = TileCutter(448, 14, 2, *bounds)
    rng = np.random.default_rng(0)
    sizes = [(448, 448), (896, 896), (1344, 448), (448, 1344), (100, 300), (600, 400)]
    for height, width in [*sizes, *rng.integers(1, 3000, (300, 2)).tolist()]:
        wanted = get_optimal_tiled_canvas((height, width), (448, 448), *bounds) if bounds[1] > 1 else (1, 1)
        assert tiles.fit(height, width) == wanted, (height, width)


def test_pictures_are_decoded_whole_only_if_they_are_cut(processor: InternVLProcessor) -> None:
    assert processor.target("image", MediaSize(640, 480)) is None
    assert processor.target("image", MediaSize(40, 41)) == (TILE, TILE)


def test_system_prompts_and_the_internlm_words(folder: Path, tmp_path: Path) -> None:
    saved = CASE.load(folder, system="Be {brief}.", frames=8, min_tiles=2, max_tiles=5)
    saved.save(tmp_path)
    read = CASE.load(tmp_path)
    assert (read.template, read.sampling, read.image, read.video) == (
        saved.template,
        saved.sampling,
        saved.image,
        saved.video,
    )
    assert read.fingerprint == saved.fingerprint
    rated = CASE.load(folder, fps=3.0, max_frames=9)
    rated.save(tmp_path)
    assert CASE.load(tmp_path).sampling == rated.sampling
    llama = tmp_path / "llama"
    llama.mkdir()
    train_tokenizer(list(CASE.texts) * 20, VOCAB, ["<s>", "</s>", *CASE.words[1:6]]).save(str(llama / "tokenizer.json"))
    spoken = InternVLProcessor.load(CASE.configure(image_token_id=VOCAB - 1), llama)
    tokens = spoken.encode(conversation(), []).tokens.tolist()
    assert tokens[:2] == [VOCAB - 7, VOCAB - 5]
    assert spoken.stop_tokens == (VOCAB - 4, VOCAB - 6)


def test_collate_packs_rows(processor: InternVLProcessor) -> None:
    a = processor.encode(conversation("image"), [picture(64, 32)])
    b = processor.encode(conversation(), [])
    c = processor.encode(conversation("image", "video"), [picture(32, 32), np.zeros((2, 56, 56, 3), dtype=np.uint8)])
    length = max(len(a.tokens) + len(b.tokens), len(c.tokens)) + 5
    batch = processor.collate([[a, b], [c]], length)
    assert batch["positions"].shape == (2 * length,)
    assert torch.equal(batch["media_slots"], (batch["tokens"] == CASE.config.image_token_id).nonzero().flatten())
    assert batch.segments["vision"].lengths == (ROWS,) * 6
    assert torch.equal(batch["media_patches"], batch["patch_index"].nonzero().flatten())
    assert len(batch["media_slots"]) * 4 == len(batch["media_patches"])
    assert batch["patch_index"][:6].tolist() == [0, 1, 2, 5, 6, 3]
    assert SPEC.main.build(CASE.config)(batch)["logits"].hidden.shape == (2 * length, 32)


def test_tables_do_not_travel_to_workers(processor: InternVLProcessor) -> None:
    assert len(pickle.dumps(processor.image)) < 1000


def test_mistakes_are_explained(folder: Path, tmp_path: Path) -> None:
    with raises("media.bounds-crossed", "max_tiles"):
        CASE.load(folder, min_tiles=5, max_tiles=2)
    CASE.load(folder).save(tmp_path)
    stored = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stored, "size": {"height": 64, "width": 64}}))
    with raises("media.preprocessor-mismatch"):
        CASE.load(tmp_path)
    short = CASE.configure(text={"max_position_embeddings": 20}, dynamic_rope_factor=2.0)
    with raises("data.sample-beyond-rope", "20"):
        InternVLProcessor.load(short, folder).encode(conversation("image"), [picture(32, 32)])


@pytest.mark.slow
def test_an_exported_folder_gives_identical_greedy_tokens(processor: InternVLProcessor, tmp_path: Path) -> None:
    folder = export(SPEC, CASE.config, processor, tmp_path)
    tokenizer, images = AutoTokenizer.from_pretrained(folder), load_image_processor(folder)
    assert tokenizer.context_image_token == "<IMG_CONTEXT>"
    assert (tokenizer.start_image_token, tokenizer.video_token) == ("<img>", "<video>")
    for number, sizes in enumerate([[], [(64, 32)], [(61, 87), (300, 40)]]):
        pictures = [picture(*size, seed=number) for size in sizes]
        messages = asked_about(*pictures, question="What is in the picture?")
        seen = images(images=pictures, return_tensors="pt") if pictures else {}
        words = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        sample = conversation(*["image"] * len(pictures))
        words = CASE.expand(words, sample, pictures, sizes_of(pictures))
        inputs = dict(tokenizer(words, return_tensors="pt"))
        if pictures:
            inputs["pixel_values"] = seen["pixel_values"]
        _, processor_of_folder = tessera.load(folder, device="cpu")
        assert processor_of_folder(messages)["tokens"].tolist() == inputs["input_ids"][0].tolist()
        same_answer(folder, messages, lambda reference, batch, inputs=inputs: inputs)
    assert compare(folder, questions(tmp_path / "data"), max_new_tokens=8).complete


def questions(folder: Path) -> Path:
    """Questions in a file, about none, one and two pictures."""
    folder.mkdir()
    rows = []
    for number in range(3):
        names = [f"{number}-{which}.png" for which in range(number)]
        for which, name in enumerate(names):
            picture(61 + 40 * which, 87, seed=which).save(folder / name)
        images = [{"type": "image", "image": name} for name in names]
        said = [*images, {"type": "text", "text": "What is in the picture?"}]
        rows.append({"id": str(number), "messages": [{"role": "user", "content": said}, ANSWER]})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"
