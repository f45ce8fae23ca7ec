"""The GLM-4.1V processor against transformers: pixels, grids, token ids and positions are identical, not close.

The reference's clip processor needs torchvision, which the test machines do not have. Clips are compared with what its
public formulas give from the image processor's arithmetic: each frame as an image, pairs of frames joined along the
patch's time.
"""

from __future__ import annotations

import json
import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from chats import by_kind, clip, grids, in_pairs, patches, picture, text, write_words
from chats import conversation as any_conversation
from parity import numbers
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.glm4v.configuration_glm4v import Glm4vConfig as ReferenceConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil, smart_resize
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor as ReferenceProcessor
from transformers.video_utils import VideoMetadata

from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Sample
from tessera.errors import TesseraError
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.model import bicubic_positions
from tessera.models.glm4v.processor import GLM4V, Glm4vProcessor

WORDS = ["<|endoftext|>", "</answer>", *GLM4V.special_words()]
VOCAB = 400
IDS = {word: VOCAB - len(WORDS) + number for number, word in enumerate(WORDS)}
TEXTS = ["What is in the picture? A red square. <think>\n</think>", "été 中文 12345"]
SIDE = 28  # of the picture that one token is
# What the folder of GLM-4.1V-9B-Thinking holds.
PUBLISHED = """[gMASK]<sop>
{%- for msg in messages %}
    {%- if msg.role == 'system' %}
<|system|>
{{ msg.content }}
    {%- elif msg.role == 'user' %}
<|user|>{{ '\\n' }}

        {%- if msg.content is string %}
{{ msg.content }}
        {%- else %}
            {%- for item in msg.content %}
                {%- if item.type == 'video' or 'video' in item %}
<|begin_of_video|><|video|><|end_of_video|>
                {%- elif item.type == 'image' or 'image' in item %}
<|begin_of_image|><|image|><|end_of_image|>
                {%- elif item.type == 'text' %}
{{ item.text }}
                {%- endif %}
            {%- endfor %}
        {%- endif %}
    {%- elif msg.role == 'assistant' %}
        {%- if msg.metadata %}
<|assistant|>{{ msg.metadata }}
{{ msg.content }}
        {%- else %}
<|assistant|>
{{ msg.content }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def tiny_config(**changes: Any) -> Glm4vConfig:
    return Glm4vConfig.model_validate(
        {
            "text": {
                "vocab_size": VOCAB,
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "mrope_section": (2, 3, 3),
                "eos_token_id": (IDS["<|endoftext|>"], IDS["<|user|>"], IDS["<|observation|>"], IDS["</answer>"]),
                "pad_token_id": IDS["<|endoftext|>"],
            },
            "vision": {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "image_size": 84},
            "image_start_token_id": IDS["<|begin_of_image|>"],
            "image_end_token_id": IDS["<|end_of_image|>"],
            "video_start_token_id": IDS["<|begin_of_video|>"],
            "video_end_token_id": IDS["<|end_of_video|>"],
            "image_token_id": IDS["<|image|>"],
            "video_token_id": IDS["<|video|>"],
            **changes,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where, kind = tmp_path_factory.mktemp("tokenizer"), Glm4vProcessor.tokenizer_kind
    return write_words(where, VOCAB, WORDS, TEXTS, end="<|endoftext|>", chat_template=PUBLISHED, kind=kind)


@pytest.fixture(scope="module")
def processor(folder: Path) -> Glm4vProcessor:
    """As long as one token's picture takes: bounds count both frames of a patch."""
    one = 2 * SIDE * SIDE
    bounds = {"min_pixels": one, "max_pixels": 20 * one, "video_min_pixels": one, "video_max_pixels": 12 * one}
    return Glm4vProcessor.load(tiny_config(), folder, **bounds)


@pytest.fixture(scope="module")
def exported(processor: Glm4vProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("exported")
    processor.save(where)
    return where


conversation = partial(any_conversation, answer="<think>\nLet me look.</think>\nA red square.\n")


def as_reference(sample: Sample) -> list[dict[str, Any]]:
    """The same conversation in transformers' spelling; the published template takes what is no user's as one text."""
    said: list[dict[str, Any]] = []
    for message in sample.messages:
        parts = [{"type": p.kind, "text": p.value} if p.kind == "text" else {"type": p.kind} for p in message.parts]
        content = parts if message.role == "user" else "".join(p.value for p in message.parts)
        said.append({"role": message.role, "content": content})
    return said


def reference_ids(
    where: Path, sample: Sample, image_grids: Any, clips: list[tuple[VideoMetadata, Any]], **kwargs: Any
) -> list[int]:
    """Words by the template that lies in the folder, placeholders by transformers' own methods."""
    tokenizer = AutoTokenizer.from_pretrained(where)
    words = tokenizer.apply_chat_template(as_reference(sample), tokenize=False, **kwargs)
    for grid in image_grids:
        words = words.replace("<|image|>", "<|placeholder|>" * (int(grid.prod()) // 4), 1)
    theirs = SimpleNamespace(
        image_token="<|placeholder|>",
        video_processor=SimpleNamespace(merge_size=2),
        replace_frame_token_id=lambda *args, **kw: ReferenceProcessor.replace_frame_token_id(theirs, *args, **kw),
    )
    for metadata, grid in clips:
        inputs = {"video_grid_thw": [grid], "video_metadata": [metadata]}
        words = words.replace("<|video|>", ReferenceProcessor.replace_video_token(theirs, inputs, 0), 1)
    return list(tokenizer(words.replace("<|placeholder|>", "<|image|>"))["input_ids"])


def reference_positions(tokens: torch.Tensor, images: Any, videos: Any) -> torch.Tensor:
    with torch.device("meta"):
        model = Glm4vModel(ReferenceConfig(**tiny_config().to_hf()))
    theirs = SimpleNamespace(
        video_start_id=IDS["<|begin_of_video|>"],
        video_end_id=IDS["<|end_of_video|>"],
        image_token_id=IDS["<|image|>"],
    )
    kinds = torch.tensor(ReferenceProcessor.create_mm_token_type_ids(theirs, [tokens.tolist()]))
    positions, _ = model.get_rope_index(tokens[None], kinds, image_grid_thw=images, video_grid_thw=videos)
    return positions[:, 0]


SIZES = [(56, 56), (61, 87), (300, 40), (500, 333), (9, 9), (28, 28), (1000, 20), (14, 56)]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_pixels_and_grids_are_the_references(
    processor: Glm4vProcessor, exported: Path, width: int, height: int
) -> None:
    reference = Glm4vImageProcessorPil.from_pretrained(exported)
    image = picture(width, height)
    theirs = reference(images=[image], return_tensors="pt")
    ours = processor.encode(conversation("image"), [image])
    assert torch.equal(grids(processor, conversation("image"), [image]), theirs["image_grid_thw"])
    assert torch.equal(numbers(processor, patches(ours)["pixels"]), theirs["pixel_values"])


@pytest.mark.parametrize("frames", [2, 3, 5, 7, 8, 30])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_clips_have_the_size_of_the_references(processor: Glm4vProcessor, frames: int, width: int, height: int) -> None:
    video = processor.video
    theirs = smart_resize(frames, height, width, factor=SIDE, min_pixels=video.min_pixels, max_pixels=video.max_pixels)
    assert video.fit(height, width, frames) == theirs
    assert processor.target("video", MediaSize(width, height, frames)) == theirs[::-1]


def test_a_clip_is_pairs_of_frames(processor: Glm4vProcessor, exported: Path) -> None:
    """Five frames: the last temporal patch holds the fifth twice."""
    ours = processor.encode(conversation("video"), [clip(5)])
    t, h, w = grids(processor, conversation("video"), [clip(5)])[0].tolist()
    assert t == 3
    reference = Glm4vImageProcessorPil.from_pretrained(exported)
    # One frame alone, asked for in the size that the clip has.
    exact = {"shortest_edge": 2 * h * w * 196, "longest_edge": 2 * h * w * 196}
    resized = [Image.fromarray(f).resize((w * 14, h * 14), Image.Resampling.BICUBIC) for f in clip(5)]
    stills = [reference(images=[f], size=exact, return_tensors="pt")["pixel_values"] for f in resized]
    assert torch.equal(numbers(processor, patches(ours)["pixels"]), in_pairs(stills))
    assert int((ours.tokens == IDS["<|image|>"]).sum()) == 3 * h * w // 4
    assert not bool((ours.tokens == IDS["<|video|>"]).any())


def test_patches_read_the_table_where_they_lie(processor: Glm4vProcessor) -> None:
    ours = processor.encode(conversation("image", "video"), [picture(61, 87), clip(4)])
    parts = []
    for t, h, w in grids(processor, conversation("image", "video"), [picture(61, 87), clip(4)]).tolist():
        count = sum(len(one[0]) for one in parts)
        places = patches(ours)["patch_positions"][count : count + h * w].numpy()
        parts += [bicubic_positions(places, h, w, 6)] * t  # a table for pictures of 84 x 84
    assert torch.equal(patches(ours)["patch_index"], torch.from_numpy(np.concatenate([index for index, _ in parts])))
    assert torch.equal(patches(ours)["patch_weights"], torch.from_numpy(np.concatenate([w for _, w in parts])))


@pytest.mark.parametrize("where", ["folder", "exported"])
def test_tokens_are_the_references(processor: Glm4vProcessor, where: str, request: pytest.FixtureRequest) -> None:
    """By the published template, and by the one we export. What ends the conversation is ours to add: there, nobody
    has spoken yet."""
    at: Path = request.getfixturevalue(where)
    images = [picture(61, 87), picture(120, 60, seed=1)]
    sample = conversation("image", "image")
    ours = processor.encode(sample, images)
    shapes = grids(processor, sample, images)
    assert ours.tokens.tolist() == [*reference_ids(at, sample, shapes, []), IDS["<|user|>"]]
    asked = Sample("one", sample.messages[:-1])
    prompt = processor.prompt([sample], [images])
    assert prompt["tokens"].tolist() == reference_ids(at, asked, shapes, [], add_generation_prompt=True)


@pytest.mark.parametrize("where", ["folder", "exported"])
@pytest.mark.parametrize(
    ("total", "rate", "frames"),
    [(90, 29.97, 6), (300, 12.5, 48), (7, 1.0, 7), (100, None, 4), (5, 30.0, 5), (1, 2.0, 1)],
)
def test_seconds_are_written_behind_frames(
    processor: Glm4vProcessor, where: str, total: int, rate: float | None, frames: int, request: pytest.FixtureRequest
) -> None:
    size = MediaSize(56, 56, frames, total=total, rate=rate)
    sample = conversation("image", "video")
    ours = processor.encode(sample, [picture(61, 87), clip(frames, 56, 56)], [MediaSize(61, 87), size])
    chosen = processor.sampling.choose(total, rate)  # see test_sampled_frames
    chosen = chosen if len(chosen) == frames else processor.sampling.spread(frames, total)
    metadata = VideoMetadata(total_num_frames=total, fps=rate, frames_indices=chosen)
    image, video = grids(processor, sample, [picture(61, 87), clip(frames, 56, 56)], [MediaSize(61, 87), size])
    expected = reference_ids(request.getfixturevalue(where), sample, [image], [(metadata, video)])
    assert ours.tokens.tolist() == [*expected, IDS["<|user|>"]]
    assert processor.measure(sample, [MediaSize(61, 87), size])["tokens"] == len(ours.tokens)


def test_frames_that_come_decoded_are_timed_as_there(processor: Glm4vProcessor, folder: Path) -> None:
    sample = conversation("video")
    ours = processor.encode(sample, [clip(60, 30, 30)])
    metadata = VideoMetadata(total_num_frames=60, fps=None, frames_indices=list(range(60)))
    expected = reference_ids(folder, sample, [], [(metadata, grids(processor, sample, [clip(60, 30, 30)])[0])])
    assert ours.tokens.tolist() == [*expected, IDS["<|user|>"]]


def test_text_alone_with_and_without_a_system_message(processor: Glm4vProcessor, folder: Path, exported: Path) -> None:
    for opening in (Message("system", (text("Be brief."),)), Message("user", (text("Hi"),))):
        sample = Sample("one", (opening, Message("assistant", (text("Yes."),))))
        ours = processor.encode(sample, [])
        for where in (folder, exported):
            assert ours.tokens.tolist()[:-1] == reference_ids(where, sample, [], [])
        assert torch.equal(ours.positions, torch.arange(len(ours.tokens)).expand(3, -1))
        assert "pixels" not in processor.collate([[ours]], 128)


@pytest.mark.parametrize("system", [None, "Answer briefly.", "Answer in {{ braces }}."])
def test_a_folder_with_a_system_prompt_of_its_own(folder: Path, tmp_path: Path, system: str | None) -> None:
    made = Glm4vProcessor.load(tiny_config(), folder, system=system, fps=3.0, max_frames=10)
    made.save(tmp_path)
    sample = Sample("one", (Message("user", (text("Hi"),)), Message("assistant", (text("Yes."),))))
    assert made.encode(sample, []).tokens.tolist()[:-1] == reference_ids(tmp_path, sample, [], [])
    read = Glm4vProcessor.load(tiny_config(), tmp_path)
    assert (read.template, read.sampling) == (made.template, made.sampling)


@pytest.mark.parametrize("media", [("image",), ("image", "image"), ("video",), ("image", "video", "image")])
def test_positions_are_the_references(processor: Glm4vProcessor, media: tuple[str, ...]) -> None:
    things = [clip(6) if kind == "video" else picture(61 + 30 * i, 87, i) for i, kind in enumerate(media)]
    ours = processor.encode(conversation(*media), things)
    assert torch.equal(
        ours.positions,
        reference_positions(ours.tokens, *by_kind(grids(processor, conversation(*media), things), media)),
    )


def test_what_is_trained(processor: Glm4vProcessor) -> None:
    """An answer, and the word with which the next turn begins: it is how a model of this family stops."""
    sample = conversation("image")
    ours = processor.encode(sample, [picture(56, 56)])
    trained = ours.labels != IGNORE
    assert torch.equal(ours.labels[trained], ours.tokens[trained])
    spoken = processor.spell(ours.tokens[trained].tolist())
    assert spoken.replace("\n<think>", "<think>") == (
        "<think>\nLet me look.</think>\nA red square.\n<|user|>中文 12345<|user|>"
    )
    last = processor.training_on(["assistant"], last_only=True).encode(sample, [picture(56, 56)])
    assert processor.spell(last.tokens[last.labels != IGNORE].tolist()) == "中文 12345<|user|>"
    called = Sample("two", (*sample.messages[:2], Message("tool", (text("red"),)), *sample.messages[3:]))
    ours = processor.encode(called, [picture(56, 56)])
    assert processor.spell(ours.tokens[ours.labels != IGNORE].tolist()).count("<|observation|>") == 1
    both = processor.training_on(["assistant", "user"]).encode(sample, [picture(56, 56)])
    assert not bool((both.labels == IDS["<|image|>"]).any())


def test_measure_is_what_encode_gives(processor: Glm4vProcessor) -> None:
    sample = conversation("image", "video")
    measured = processor.measure(sample, [MediaSize(333, 91), MediaSize(80, 50, 7)])
    encoded = processor.encode(sample, [picture(333, 91), np.zeros((7, 50, 80, 3), dtype=np.uint8)])
    assert {name: measured[name] for name in encoded.counts} == encoded.counts
    assert measured["patches"] == len(patches(encoded)["pixels"]) == len(patches(encoded)["patch_index"])


def test_collate_packs_rows(processor: Glm4vProcessor) -> None:
    a = processor.encode(conversation("image"), [picture(56, 84)])
    b = processor.encode(conversation(), [])
    c = processor.encode(conversation("image", "video"), [picture(56, 56), np.zeros((4, 56, 56, 3), dtype=np.uint8)])
    length = len(a.tokens) + len(b.tokens) + 5
    batch = processor.collate([[a, b], [c]], max(length, len(c.tokens)))
    media = (batch["tokens"] == IDS["<|image|>"]).nonzero()[:, 0]
    assert torch.equal(batch["media_slots"], media)
    assert len(media) * 4 == len(batch["pixels"]) == len(batch["patch_weights"]) == len(batch["patch_index"])
    assert batch.segments["vision"].lengths == (24, 16, 16, 16)


def test_save_and_load_again(processor: Glm4vProcessor, exported: Path) -> None:
    again = Glm4vProcessor.load(tiny_config(), exported)
    assert (again.image, again.video, again.template) == (processor.image, processor.video, processor.template)
    assert again.fingerprint == processor.fingerprint
    words = ("<|user|>", "<|observation|>", "</answer>", "<|endoftext|>")
    assert processor.stop_tokens == tuple(IDS[word] for word in words)
    travelled = pickle.loads(pickle.dumps(processor))  # noqa: S301 - our own object, as a spawned worker gets it
    assert travelled.fingerprint == processor.fingerprint
    assert travelled.stop_tokens == processor.stop_tokens


def test_the_rate_wins_over_a_number_of_frames_that_the_reference_ignores(folder: Path, tmp_path: Path) -> None:
    Glm4vProcessor.load(tiny_config(), folder).save(tmp_path)
    path = tmp_path / "video_preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fps": 1.5, "num_frames": 16}))
    sampling = Glm4vProcessor.load(tiny_config(), tmp_path).sampling
    assert (sampling.frames, sampling.fps) == (None, 1.5)
    assert Glm4vProcessor.load(tiny_config(), folder, frames=8).sampling.frames == 8


def test_mistakes_are_explained(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TesseraError, match=r"<\|image\|> is \d+ for the tokenizer and 5 for the model"):
        Glm4vProcessor.load(tiny_config(image_token_id=5), folder)
    with pytest.raises(TesseraError, match="too narrow"):
        Glm4vProcessor.load(tiny_config(), folder).measure(conversation("image"), [MediaSize(30000, 30)])
    Glm4vProcessor.load(tiny_config(), folder).save(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "processor_class": "Glm46VProcessor"}))
    with pytest.raises(TesseraError, match="written by a Glm46VProcessor"):
        Glm4vProcessor.load(tiny_config(), tmp_path)
