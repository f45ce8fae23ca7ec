"""What is particular to the LLaVA processor: squares and tiles, which features become tokens, published prompts.

The reference's OneVision processor needs torchvision, which the test machines do not have, only to be made: its own
methods that count tokens run without.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chats import as_reference, clip, patches, picture, text
from llava_cases import (
    SHAPES,
    Shape,
    as_squares,
    config_of,
    conversation,
    media_of,
    processor_of,
    write_words,
)
from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor as ReferenceProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from tessera.config.run_config import ModelSection
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.models import resolve
from tessera.models.llava.config import PINPOINTS, LlavaConfig
from tessera.models.llava.preprocessing import AnyResTiles
from tessera.models.llava.processor import LlavaProcessor
from tessera.models.processing.streams import media_size
from tests.errors import raises

PLAIN, STRETCHED, TILED, TILED_CLIP, LEFTOVER = SHAPES[0], SHAPES[2], SHAPES[3], SHAPES[4], SHAPES[5]
SIZES = [(8, 8), (31, 17), (17, 31), (100, 9), (9, 100), (1, 7), (640, 480)]

# As published with llava-hf/llava-1.5-7b-hf, with llava-hf/llava-onevision-qwen2-0.5b-ov-hf, and by transformers'
# converter of OneVision.
_SHOWN = "{% for content in message['content'] | selectattr('type', 'equalto', 'KIND') %}{{ 'WORD' }}{% endfor %}"
_SAID = "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ WORDS }}{% endfor %}"
PUBLISHED_PLAIN = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    + _SHOWN.replace("KIND", "image").replace("WORD", "<image>\\n")
    + _SAID.replace("WORDS", "content['text'] + ' '")
    + "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
PUBLISHED_SPACED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + ' '}}"
    + _SHOWN.replace("KIND", "image").replace("WORD", "<image>")
    + _SHOWN.replace("KIND", "video").replace("WORD", "<video>")
    + _SAID.replace("WORDS", "'\\n' + content['text']")
    + "{{'<|im_end|>'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PUBLISHED_CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n'}}"
    + _SHOWN.replace("KIND", "image").replace("WORD", "<image>\\n")
    + _SHOWN.replace("KIND", "video").replace("WORD", "<video>\\n")
    + _SAID.replace("WORDS", "content['text']")
    + "{{'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def seen(config: LlavaConfig, pixels: torch.Tensor) -> torch.Tensor:
    """What patches cover of squares [.., 3, size, size]."""
    side = config.vision.side * config.vision.patch_size
    return pixels[..., :side, :side]


def ours(processor: LlavaProcessor, media: list[Any]) -> torch.Tensor:
    config = processor.config
    return seen(config, as_squares(processor, patches(processor.encode(conversation(media), media))["pixels"]))


# ---------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("pad", [False, True])
def test_a_picture_is_cropped_as_the_references(width: int, height: int, pad: bool, tmp_path: Path) -> None:
    where = write_words(tmp_path, vicuna=True)
    files = {"do_pad": pad, "size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(files))
    processor = LlavaProcessor.load(config_of(PLAIN), where)
    processor.save(tmp_path / "out")
    reference = LlavaImageProcessorPil.from_pretrained(tmp_path / "out")
    image = picture(width, height)
    theirs = reference(images=[image], return_tensors="pt")["pixel_values"]
    assert torch.equal(ours(processor, [image]), theirs)
    if not pad:
        plain = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
        assert torch.equal(plain(images=[image], return_tensors="pt")["pixel_values"], theirs)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("shape", [TILED, TILED_CLIP, LEFTOVER], ids=["siglip", "clip", "leftover"])
def test_tiles_are_the_references(shape: Shape, width: int, height: int, tmp_path: Path) -> None:
    processor = processor_of(shape, tmp_path)
    processor.save(tmp_path / "out")
    reference = LlavaOnevisionImageProcessorPil.from_pretrained(tmp_path / "out")
    image = picture(width, height)
    theirs = reference(images=[image], return_tensors="pt")
    assert theirs["image_sizes"].tolist() == [[height, width]]
    assert torch.equal(ours(processor, [image]), seen(processor.config, theirs["pixel_values"][0]))
    pictures = [image, picture(13, 29, 1), picture(30, 30, 2)]
    several = reference(images=[pictures], return_tensors="pt")
    assert several["batch_num_images"].tolist() == [3]
    assert torch.equal(ours(processor, pictures), seen(processor.config, several["pixel_values"][:, 0]))


# ---------------------------------------------------------------------------------------------- which feature where


@pytest.mark.parametrize(
    ("width", "height"), [(384, 384), (1024, 899), (4000, 3000), (3000, 400), (37, 1900), (10, 9), (2304, 2304)]
)
def test_features_of_the_published_tiles_are_packed_as_the_references(width: int, height: int) -> None:
    """The reference's own packing of random features, in the published geometry; large ones are interpolated."""
    tiles = AnyResTiles(27, 384, PINPOINTS, 9)
    down, across = tiles.grid(height, width)
    features = torch.randn(1 + down * across, 27 * 27, 2, generator=torch.Generator().manual_seed(0))
    newline = torch.tensor([7.0, -7.0])
    config = SimpleNamespace(
        vision_config=SimpleNamespace(image_size=384, patch_size=14),
        image_grid_pinpoints=[list(size) for size in PINPOINTS],
    )
    model: Any = SimpleNamespace(config=config)
    (expected,), _ = LlavaOnevisionModel.pack_image_features(
        model, [features], [[height, width]], image_newline=newline, vision_aspect_ratio="anyres_max_9"
    )
    interpolation = tiles.tiled_image(height, width)
    table = torch.cat([newline[None], features.flatten(0, 1)])
    gathered = table[torch.from_numpy(interpolation.index + 1)]
    if interpolation.weights is None:
        assert torch.equal(gathered[:, 0], expected)
    else:
        shares = torch.from_numpy(interpolation.weights)
        torch.testing.assert_close((gathered * shares[..., None]).sum(1), expected, rtol=1e-5, atol=1e-5)
    assert (interpolation.weights is not None) == (down * across > 9)


def test_features_of_frames_are_pooled_as_the_references() -> None:
    features = torch.randn(3, 27 * 27, 2, generator=torch.Generator().manual_seed(0))
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(image_size=384, patch_size=14)))
    expected = LlavaOnevisionModel.apply_pooling(model, features).flatten(0, 1)
    interpolation = AnyResTiles(27, 384, PINPOINTS, 9).video(3)
    assert interpolation.weights is not None
    assert interpolation.index[-1].tolist() == [-1] * 4
    assert interpolation.weights[-1].tolist() == [1, 0, 0, 0]
    gathered = (
        features.flatten(0, 1)[torch.from_numpy(interpolation.index[:-1])]
        * torch.from_numpy(interpolation.weights[:-1])[..., None]
    )
    torch.testing.assert_close(gathered.sum(1), expected, rtol=1e-5, atol=1e-5)


def reference_tiled(config: LlavaConfig, folder: Path) -> LlavaOnevisionProcessor:
    reference = object.__new__(LlavaOnevisionProcessor)
    fields = json.loads((folder / "processor_config.json").read_text())
    for name in ("num_image_tokens", "vision_feature_select_strategy", "image_token", "video_token"):
        setattr(reference, name, fields[name])
    reference.vision_aspect_ratio = fields["vision_aspect_ratio"]
    reference.image_processor = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    return reference


@pytest.mark.parametrize("shape", [TILED, TILED_CLIP, LEFTOVER], ids=["siglip", "clip", "leftover"])
def test_tokens_of_pictures_are_as_many_as_the_references(shape: Shape, tmp_path: Path) -> None:
    processor = processor_of(shape, tmp_path)
    processor.save(tmp_path)
    reference = reference_tiled(processor.config, tmp_path)
    images = reference.image_processor
    for width, height in [*SIZES, (24, 25), (29, 24), (60, 7)]:
        item = picture(width, height)
        told = images(images=[item], return_tensors="pt")
        words = reference.replace_image_token(told, 0)
        encoded = processor.encode(conversation([item]), [item])
        assert int((encoded.tokens == processor.config.image_token_id).sum()) == words.count("<image>")
    many = [picture(9, 8), picture(30, 7)]
    told = images(images=[many], return_tensors="pt")
    words = "".join(reference.replace_image_token(told, n) for n in range(2))
    encoded = processor.encode(conversation(many), many)
    assert int((encoded.tokens == processor.config.image_token_id).sum()) == words.count("<image>")
    frames = clip(3, 9, 9)
    words = reference.replace_video_token({"pixel_values_videos": [torch.zeros(3, 3, 8, 8)]}, 0)
    encoded = processor.encode(conversation([frames]), [frames])
    assert int((encoded.tokens == processor.config.video_token_id).sum()) == words.count("<video>")


# ---------------------------------------------------------------------------------------------- words


ASKED = {
    "text": Sample("one", (Message("user", (text("Hi"),)),)),
    "system": Sample("one", (Message("system", (text("Be brief."),)), Message("user", (text("Hi"),)))),
    "one": Sample("one", (Message("user", (Part("image", None), text("What is it?"))),)),
    "later": Sample("one", (Message("user", (text("What is\n it?"), Part("image", None), text("Say."))),)),
    "several": Sample("one", (Message("user", (Part("image", None), text("and"), Part("image", None))),)),
}
CLIPS = {"clip": Sample("one", (Message("user", (Part("image", None), Part("video", None), text("What?"))),))}
TALK = Sample(
    "one",
    (
        Message("user", (Part("image", None), text("What is it?"))),
        Message("assistant", (text("A red square."),)),
        Message("user", (text("Sure?"),)),
    ),
)


def spelled(processor: LlavaProcessor, sample: Sample) -> str:
    """The prompt, with one word for each picture or clip."""
    media = [picture(9, 8) if part.kind == "image" else clip(2, 9, 9) for part in sample.media()]
    tokens = processor.prompt([sample], [media])["tokens"].tolist()
    marks = (processor.config.image_token_id, processor.config.video_token_id)
    once = [token for n, token in enumerate(tokens) if not (n and token in marks and tokens[n - 1] == token)]
    return processor.spell(once)


def rendered(folder: Path, template: str | None, sample: Sample, tokenizer_adds: str = "") -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = tokenizer.apply_chat_template(
        as_reference(sample), chat_template=template, tokenize=False, add_generation_prompt=True
    )
    # Pictures next to each other are one run of the same word.
    return tokenizer_adds + str(words).replace("<image><image>", "<image>")


@pytest.mark.parametrize("name", ASKED)
def test_prompts_of_1_5_are_the_published_ones(name: str, tmp_path: Path) -> None:
    processor = processor_of(PLAIN, tmp_path)
    processor.save(tmp_path / "out")
    for template in (PUBLISHED_PLAIN, None):  # as published, and as we export it
        assert spelled(processor, ASKED[name]) == rendered(tmp_path / "out", template, ASKED[name], "<s>")


@pytest.mark.parametrize("name", [*ASKED, *CLIPS])
@pytest.mark.parametrize("published", [PUBLISHED_SPACED, PUBLISHED_CHATML], ids=["hub", "chatml"])
def test_prompts_of_onevision_are_the_published_ones(name: str, published: str, tmp_path: Path) -> None:
    where = write_words(tmp_path / "words", vicuna=False)
    (where / "chat_template.json").write_text(json.dumps({"chat_template": published}))
    processor = LlavaProcessor.load(config_of(TILED), where)
    processor.save(tmp_path / "out")
    for template in (published, None):
        assert spelled(processor, {**ASKED, **CLIPS}[name]) == rendered(
            tmp_path / "out", template, {**ASKED, **CLIPS}[name]
        )
    assert LlavaProcessor.load(config_of(TILED), tmp_path / "out").template == processor.template


def test_longer_conversations(tmp_path: Path) -> None:
    """ChatML is as published all along. Where a published template ends no answer, or opens it otherwise than the model
    goes on from, ours does as the model was trained."""
    processor = processor_of(TILED, tmp_path / "a")
    processor.save(tmp_path / "a")
    assert spelled(processor, TALK) == rendered(tmp_path / "a", PUBLISHED_CHATML, TALK)
    plain = processor_of(PLAIN, tmp_path / "b")
    plain.save(tmp_path / "b")
    theirs = rendered(tmp_path / "b", PUBLISHED_PLAIN, TALK, "<s>")
    assert spelled(plain, TALK) == theirs.replace("A red square. ", "A red square.</s>")
    assert spelled(plain, TALK) == rendered(tmp_path / "b", None, TALK, "<s>")


def test_the_whole_processor_of_1_5_gives_the_same(tmp_path: Path) -> None:
    processor = processor_of(PLAIN, tmp_path)
    processor.save(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    fields = json.loads((tmp_path / "out" / "processor_config.json").read_text())
    del fields["processor_class"]
    images = LlavaImageProcessorPil.from_pretrained(tmp_path / "out")
    reference = ReferenceProcessor(images, tokenizer, chat_template=tokenizer.chat_template, **fields)
    for name in ("text", "one", "several"):
        media = media_of(PLAIN)[name]
        question = Sample("one", conversation(media).messages[:1])
        words = reference.apply_chat_template(as_reference(question), add_generation_prompt=True)
        theirs = reference(text=[words], images=media or None, return_tensors="pt")
        batch = processor.prompt([question], [media])
        assert batch["tokens"].tolist() == theirs["input_ids"][0].tolist()
        if media:
            assert torch.equal(as_squares(processor, batch["pixels"]), theirs["pixel_values"])


# ---------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("shape", SHAPES, ids=range(len(SHAPES)))
def test_measure_is_what_encode_gives_and_batches_fit_together(shape: Shape, tmp_path: Path) -> None:
    processor = processor_of(shape, tmp_path)
    items = []
    for number, media in enumerate(media_of(shape).values()):
        sample = conversation(media, number)
        measured = processor.measure(sample, [media_size(item) for item in media])
        items.append(processor.encode(sample, media))
        assert {name: measured[name] for name in items[-1].counts} == items[-1].counts
        assert measured["tokens"] == len(items[-1].tokens)
    half = len(items) // 2
    length = max(sum(len(item.tokens) for item in row) for row in (items[:half], items[half:])) + 3
    batch = processor.collate([items[:half], items[half:]], length)
    config = processor.config
    marks = torch.tensor([id for id in (config.image_token_id, config.video_token_id) if id is not None])
    assert torch.equal(batch["media_slots"], torch.isin(batch["tokens"], marks).nonzero()[:, 0])
    patches = len(batch["pixels"])
    assert set(batch.segments["vision"].lengths) == {config.vision.patches}
    assert batch.segments["vision"].bounds[-1] == patches == len(batch["patch_index"])
    selected = batch.get("media_patches")
    features = patches if selected is None else len(selected)
    assert features == patches // config.vision.patches * config.features
    if config.tiles is None:
        assert features == len(batch["media_slots"])
    else:
        index = batch["media_index"]
        assert len(index) == len(batch["media_slots"])
        assert index.min() == 0
        assert index.max() == features
        if "media_weights" in batch:
            torch.testing.assert_close(batch["media_weights"].sum(1), torch.ones(len(index)))
    assert len(pickle.loads(pickle.dumps(processor)).fingerprint) == 64  # noqa: S301 - as a worker gets it


def test_mistakes_are_explained(tmp_path: Path) -> None:
    words = write_words(tmp_path / "words", vicuna=False)
    with raises("media.kind-not-supported"):
        processor_of(PLAIN, tmp_path / "plain").measure(conversation([clip(2, 8, 8)]), [MediaSize(8, 8, 2)])
    for content, told in (
        ({"resample": 2}, "media.preprocessor-mismatch"),
        ({"image_grid_pinpoints": [[12, 12]]}, "media.preprocessor-mismatch"),
        ({"size": {"height": 14, "width": 14}}, "media.preprocessor-mismatch 12"),
    ):
        (words / "preprocessor_config.json").write_text(json.dumps(content))
        with raises(told):
            LlavaProcessor.load(config_of(TILED), words)
    (words / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 6}}))
    with raises("media.preprocessor-mismatch", "8x8"):
        LlavaProcessor.load(config_of(SHAPES[1]), words)
    _, config = resolve(ModelSection(family="llava", preset="quickstart"))
    assert isinstance(config, LlavaConfig)
    nothing = write_words(tmp_path / "other", vicuna=True, vocab=512)
    data = json.loads((nothing / "tokenizer.json").read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if t["content"] != "</s>"]
    data["post_processor"] = None
    (nothing / "tokenizer.json").write_text(json.dumps(data))
    with raises("tokenizer.no-control-words"):
        LlavaProcessor.load(config, nothing)
