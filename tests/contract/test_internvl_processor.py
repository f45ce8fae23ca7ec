"""The InternVL processor against transformers: pixels, tiles and token ids are identical, not close.

The reference's joint processor and its clip processor need torchvision, which the test machines do not have. Words are
compared with what the joint processor's own methods spell out; each frame of a clip with the image processor's tile.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from answers import export, same_answer
from chats import as_reference, asked_about, clip, conversation, grids, patches, picture, text, write_words
from parity import numbers
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor as ReferenceProcessor

import tessera
from tessera.core.batch import IGNORE
from tessera.core.sample import Encoded, MediaSize, Message, Sample
from tessera.data.tokenizer import train_tokenizer
from tessera.errors import TesseraError
from tessera.models.internvl import SPEC
from tessera.models.internvl.config import InternVLConfig
from tessera.models.internvl.processor import InternVLProcessor, TileCutter
from tessera.models.transformers.library import load_image_processor
from tessera.tools.compare import compare

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]
VOCAB = 400
CONTEXT = VOCAB - 2
TILE, TOKENS, ROWS = 32, 4, 17  # pixels along a side, tokens, patches and the class token
TEXTS = ["system user assistant\n\n Frame1: Frame2: ", "What is in the picture? A red square.", "été 中文 12345"]
# What published folders have, in our words: one word for each picture or clip, and a line end.
PUBLISHED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}"
    "{% elif c['type'] == 'video' %}{{ '<video>\n' }}{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

ANSWER = {"role": "assistant", "content": "A red square."}


def settings(**text: Any) -> dict[str, Any]:
    return {
        "text": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "eos_token_id": VOCAB - 5,
            **text,
        },
        "vision": {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 8,
        },
        "image_token_id": CONTEXT,
    }


CONFIG = InternVLConfig.model_validate(settings())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_words(tmp_path_factory.mktemp("tokenizer"), VOCAB, WORDS, TEXTS)


@pytest.fixture(scope="module")
def processor(folder: Path) -> InternVLProcessor:
    return InternVLProcessor.load(CONFIG, folder, max_tiles=6)


@pytest.fixture(scope="module")
def exported(processor: InternVLProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("exported")
    processor.save(where)
    return where


def block_rows(tiles: torch.Tensor) -> torch.Tensor:
    """Their tiles [n, 3, 32, 32] as our rows, block by block, written out."""
    rows = []
    for tile in tiles:
        rows.append(torch.zeros(3 * 64))
        for top in (0, 16):
            for left in (0, 16):
                for y, x in ((top, left), (top, left + 8), (top + 8, left), (top + 8, left + 8)):
                    rows.append(tile[:, y : y + 8, x : x + 8].flatten())
    return torch.stack(rows)


SIZES = [(32, 32), (61, 87), (300, 40), (500, 333), (9, 9), (64, 32), (40, 300), (1000, 20), (640, 480), (96, 64)]


def seen(processor: Any, encoded: Encoded) -> torch.Tensor:
    """Pixels as numbers; the rows of class tokens are only places."""
    return numbers(processor, patches(encoded)["pixels"]) * (patches(encoded)["patch_index"] > 0).unsqueeze(1)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_and_tiles_are_the_references(
    processor: InternVLProcessor, exported: Path, width: int, height: int
) -> None:
    reference = load_image_processor(exported)
    assert isinstance(reference, GotOcr2ImageProcessorPil)
    image = picture(width, height)
    theirs = reference(images=[image], return_tensors="pt")
    ours = processor.encode(conversation("image"), [image])
    assert int(grids(processor, conversation("image"), [image])[0, 0]) == int(theirs["num_patches"][0])
    assert torch.equal(seen(processor, ours), block_rows(theirs["pixel_values"]))
    assert patches(ours)["pixels"].dtype == torch.uint8
    assert reference.get_number_of_image_patches(height, width) == int(
        grids(processor, conversation("image"), [image])[0, 0]
    )


@pytest.mark.parametrize("bounds", [(1, 12), (1, 1), (2, 6), (4, 9), (1, 40)])
def test_arrangements_are_the_references(bounds: tuple[int, int]) -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    tiles = TileCutter(448, 14, 2, *bounds)
    rng = np.random.default_rng(0)
    sizes = [(448, 448), (896, 896), (1344, 448), (448, 1344), (100, 300), (600, 400)]
    for height, width in [*sizes, *rng.integers(1, 3000, (300, 2)).tolist()]:
        wanted = get_optimal_tiled_canvas((height, width), (448, 448), *bounds) if bounds[1] > 1 else (1, 1)
        assert tiles.fit(height, width) == wanted, (height, width)


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "1"])
def test_pixels_of_other_modes(processor: InternVLProcessor, exported: Path, mode: str) -> None:
    image = picture(61, 87, mode=mode)
    theirs = load_image_processor(exported)(images=[image], return_tensors="pt")
    ours = processor.encode(conversation("image"), [image])
    assert torch.equal(seen(processor, ours), block_rows(theirs["pixel_values"]))


def spelled(words: str, shown: list[tuple[str, int]]) -> str:
    """The words of a chat template, spelled out by the methods of transformers' own processor."""
    names = {"start_image_token": "<img>", "end_image_token": "</img>", "image_token": "<IMG_CONTEXT>"}
    self = SimpleNamespace(**names, image_seq_length=TOKENS)
    for kind, count in shown:
        if kind == "image":
            mark, told = "<IMG_CONTEXT>", ReferenceProcessor.replace_image_token(self, {"num_patches": [count]}, 0)
        else:
            clip = {"pixel_values_videos": [np.zeros((count, 1))]}
            mark, told = "<video>", ReferenceProcessor.replace_video_token(self, clip, 0)
        words = words.replace(mark, told.replace("<IMG_CONTEXT>", "@"), 1)
    return words.replace("@", "<IMG_CONTEXT>")


@pytest.mark.parametrize("media", [(), ("image",), ("image", "image"), ("video",), ("image", "video", "image")])
def test_tokens_are_the_references(processor: InternVLProcessor, exported: Path, media: tuple[str, ...]) -> None:
    things = [clip(3) if kind == "video" else picture(61 + 40 * i, 87, seed=i) for i, kind in enumerate(media)]
    sample = conversation(*media)
    ours = processor.encode(sample, things)
    shown = [(kind, int(grid[0])) for kind, grid in zip(media, grids(processor, sample, things), strict=True)]
    tokenizer = AutoTokenizer.from_pretrained(exported)
    plain = jinja2.Environment().from_string(PUBLISHED)
    for asked, got in (
        (False, ours.tokens),
        (True, processor.prompt([sample], [things])["tokens"]),
    ):
        messages = as_reference(Sample("one", sample.messages[:-1]) if asked else sample)
        words = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked)
        assert words == plain.render(messages=messages, add_generation_prompt=asked)
        assert got.tolist() == list(tokenizer(spelled(words, shown))["input_ids"])
    assert torch.equal(ours.positions, torch.arange(len(ours.tokens)))
    assert int((ours.tokens == CONTEXT).sum()) == TOKENS * sum(count for _, count in shown)


def test_a_clip_is_a_tile_for_each_frame(processor: InternVLProcessor, exported: Path) -> None:
    frames = [Image.fromarray(frame) for frame in clip(5)]
    ours = processor.encode(conversation("video"), [clip(5)])
    reference = load_image_processor(exported)
    stills = reference(images=frames, crop_to_patches=False, return_tensors="pt")["pixel_values"]
    assert torch.equal(seen(processor, ours), block_rows(stills))
    assert list(ours.streams["vision"].lengths) == [ROWS] * 5
    small = np.stack([np.asarray(f.resize(processor.target("video", MediaSize(70, 90, 5)), 3)) for f in frames])
    again = processor.encode(conversation("video"), [small], [MediaSize(70, 90, 5)])
    assert torch.equal(patches(again)["pixels"], patches(ours)["pixels"])


def test_pictures_are_decoded_whole_only_if_they_are_cut(processor: InternVLProcessor) -> None:
    assert processor.target("image", MediaSize(640, 480)) is None
    assert processor.target("image", MediaSize(40, 41)) == (TILE, TILE)


def test_system_prompts_and_the_internlm_words(folder: Path, tmp_path: Path) -> None:
    made = InternVLProcessor.load(CONFIG, folder, system="Be {brief}.", frames=8, min_tiles=2, max_tiles=5)
    made.save(tmp_path)
    read = InternVLProcessor.load(CONFIG, tmp_path)
    assert (read.template, read.sampling, read.image, read.video) == (
        made.template,
        made.sampling,
        made.image,
        made.video,
    )
    assert read.fingerprint == made.fingerprint
    rated = InternVLProcessor.load(CONFIG, folder, fps=3.0, max_frames=9)
    rated.save(tmp_path)
    assert InternVLProcessor.load(CONFIG, tmp_path).sampling == rated.sampling
    llama = tmp_path / "llama"
    llama.mkdir()
    train_tokenizer(TEXTS * 20, VOCAB, ["<s>", "</s>", *WORDS[1:6]]).save(str(llama / "tokenizer.json"))
    spoken = InternVLProcessor.load(InternVLConfig.model_validate(settings() | {"image_token_id": VOCAB - 1}), llama)
    tokens = spoken.encode(conversation(), []).tokens.tolist()
    assert tokens[:2] == [VOCAB - 7, VOCAB - 5]
    assert spoken.stop_tokens == (VOCAB - 4, VOCAB - 6)


def test_measure_is_what_encode_gives(processor: InternVLProcessor) -> None:
    sample = conversation("image", "video")
    measured = processor.measure(sample, [MediaSize(333, 91), MediaSize(80, 50, 7)])
    encoded = processor.encode(sample, [picture(333, 91), clip(7, 80, 50)])
    assert {name: measured[name] for name in encoded.counts} == encoded.counts
    assert measured["tokens"] == len(encoded.tokens)
    assert measured["patches"] == len(patches(encoded)["pixels"]) == len(patches(encoded)["patch_index"])
    assert measured["patch_pairs"] == measured["patches"] * ROWS
    assert measured["trained"] == int((encoded.labels != IGNORE).sum())


def test_collate_packs_rows(processor: InternVLProcessor) -> None:
    a = processor.encode(conversation("image"), [picture(64, 32)])
    b = processor.encode(conversation(), [])
    c = processor.encode(conversation("image", "video"), [picture(32, 32), np.zeros((2, 56, 56, 3), dtype=np.uint8)])
    length = max(len(a.tokens) + len(b.tokens), len(c.tokens)) + 5
    batch = processor.collate([[a, b], [c]], length)
    assert batch["positions"].shape == (2 * length,)
    assert torch.equal(batch["media_slots"], (batch["tokens"] == CONTEXT).nonzero().flatten())
    assert batch.segments["vision"].lengths == (ROWS,) * 6
    assert torch.equal(batch["media_patches"], batch["patch_index"].nonzero().flatten())
    assert len(batch["media_slots"]) * 4 == len(batch["media_patches"])
    assert batch["patch_index"][:6].tolist() == [0, 1, 2, 5, 6, 3]
    assert SPEC.main.build(CONFIG)(batch)["logits"].hidden.shape == (2 * length, 32)


def test_workers_and_words_that_look_special(processor: InternVLProcessor) -> None:
    travelled = pickle.loads(pickle.dumps(processor))  # noqa: S301 - our own object, as a spawned worker gets it
    assert travelled.fingerprint == processor.fingerprint
    assert len(pickle.dumps(processor.image)) < 1000
    said = Message("user", (text("a <img><IMG_CONTEXT> b"),))
    tokens = processor.encode(Sample("one", (said, Message("assistant", (text("ok"),)))), []).tokens.tolist()
    assert CONTEXT not in tokens
    assert VOCAB - 4 not in tokens


def test_mistakes_are_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TesseraError, match="unknown key: max_tile"):
        InternVLProcessor.load(CONFIG, folder, max_tile=5)
    with pytest.raises(TesseraError, match="is more than max_tiles"):
        InternVLProcessor.load(CONFIG, folder, min_tiles=5, max_tiles=2)
    with pytest.raises(TesseraError, match="<IMG_CONTEXT> is 398 for the tokenizer and 397 for the model"):
        InternVLProcessor.load(CONFIG.model_copy(update={"image_token_id": 397}), folder)
    InternVLProcessor.load(CONFIG, folder).save(tmp_path)
    stored = json.loads((tmp_path / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**stored, "size": {"height": 64, "width": 64}}))
    with pytest.raises(TesseraError, match="the model needs"):
        InternVLProcessor.load(CONFIG, tmp_path)
    short = InternVLConfig.model_validate(settings(max_position_embeddings=20) | {"dynamic_rope_factor": 2.0})
    with pytest.raises(TesseraError, match="up to 20"):
        InternVLProcessor.load(short, folder).encode(conversation("image"), [picture(32, 32)])
    with pytest.raises(TesseraError, match="no audio input"):
        InternVLProcessor.load(CONFIG, folder).measure(conversation("audio"), [MediaSize(0, 0, 0, 16000)])


def test_an_exported_folder_gives_identical_greedy_tokens(processor: InternVLProcessor, tmp_path: Path) -> None:
    folder = export(SPEC, CONFIG, processor, tmp_path)
    tokenizer, images = AutoTokenizer.from_pretrained(folder), load_image_processor(folder)
    assert tokenizer.context_image_token == "<IMG_CONTEXT>"
    assert (tokenizer.start_image_token, tokenizer.video_token) == ("<img>", "<video>")
    for number, sizes in enumerate([[], [(64, 32)], [(61, 87), (300, 40)]]):
        pictures = [picture(*size, seed=number) for size in sizes]
        messages = asked_about(*pictures, question="What is in the picture?")
        seen = images(images=pictures, return_tensors="pt") if pictures else {}
        words = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        words = spelled(words, [("image", int(count)) for count in seen.get("num_patches", ())])
        inputs = dict(tokenizer(words, return_tensors="pt"))
        if pictures:
            inputs["pixel_values"] = seen["pixel_values"]
        _, own = tessera.load(folder, device="cpu")
        assert own(messages)["tokens"].tolist() == inputs["input_ids"][0].tolist()
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
        shown = [{"type": "image", "image": name} for name in names]
        said = [*shown, {"type": "text", "text": "What is in the picture?"}]
        rows.append({"id": str(number), "messages": [{"role": "user", "content": said}, ANSWER]})
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "data.jsonl"
