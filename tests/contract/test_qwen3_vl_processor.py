"""The Qwen3-VL processor against transformers: pixels, tokens and positions are identical, not close.

Resizing clips needs torchvision in transformers, which the test machines do not have: sizes of frames are compared with
its formula, their pixels with what its image processor makes of them one by one. Transformers 5 puts what a clip
expands to between the words that the chat template encloses clips with; the release the models came with (4.57) put it
in their place, and so do we. What a clip expands to is the same in both, and compared.

What is shared with Qwen2-VL's (packing, training labels, special words in a text) is tested there.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
import transformers
from chats import (
    TEXTS,
    VOCAB,
    WORDS,
    as_reference,
    by_kind,
    clip,
    conversation,
    grids,
    in_pairs,
    patches,
    picture,
    talk,
    text,
    write_words,
)
from parity import numbers
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as ReferenceProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.media.files import Limits
from tessera.data.media.read import probe, read_media
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.processor import Qwen3VLProcessor

SIDE = 32  # pixels along each side of a token
CONFIG = Qwen3VLConfig.model_validate(
    {
        "text": {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "mrope_section": (4, 2, 2),
        },
        "vision": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "num_position_embeddings": 81,
            "deepstack_visual_indexes": [0],
        },
        "vision_start_token_id": VOCAB - 4,
        "vision_end_token_id": VOCAB - 3,
        "image_token_id": VOCAB - 2,
        "video_token_id": VOCAB - 1,
    }
)
# The instruct template of the published folders, written down again with the same tests and the same words.
PUBLISHED = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + shown(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + shown(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + shown(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = [*TEXTS, "<0.3 seconds><12.5 seconds>"]
    return write_words(tmp_path_factory.mktemp("tokenizer"), VOCAB, WORDS, texts)


def loaded(folder: Path, **options: Any) -> Qwen3VLProcessor:
    bounds = {"min_pixels": SIDE**2, "max_pixels": 60 * SIDE**2}
    clips = {"video_min_pixels": 4 * SIDE**2, "video_max_pixels": 60 * SIDE**2}
    return Qwen3VLProcessor.load(CONFIG, folder, **{**bounds, **clips, **options})


@pytest.fixture(scope="module")
def processor(folder: Path) -> Qwen3VLProcessor:
    return loaded(folder)


@pytest.fixture(scope="module")
def exported(processor: Qwen3VLProcessor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("exported")
    processor.save(where)
    return where


class Unchecked(ReferenceProcessor):
    """To look up which class a processor of clips should have, transformers needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        return type(argument)


@pytest.fixture(scope="module")
def reference(exported: Path) -> ReferenceProcessor:
    return Unchecked(
        Qwen2VLImageProcessorPil.from_pretrained(exported),
        transformers.AutoTokenizer.from_pretrained(exported),
        Qwen3VLVideoProcessor.from_pretrained(exported),
        chat_template=PUBLISHED,
    )


@pytest.mark.parametrize("sizes", [[(64, 64)], [(300, 40)], [(9, 9)], [(1000, 20)], [(61, 87), (500, 333), (32, 96)]])
def test_pixels_and_their_places_are_the_references(
    processor: Qwen3VLProcessor, exported: Path, sizes: list[tuple[int, int]]
) -> None:
    images = [picture(*size, seed=number) for number, size in enumerate(sizes)]
    theirs = Qwen2VLImageProcessorPil.from_pretrained(exported)(images=images, return_tensors="pt")
    ours = processor.encode(conversation(*["image"] * len(images)), images)
    assert torch.equal(grids(processor, conversation(*["image"] * len(images)), images), theirs["image_grid_thw"])
    assert torch.equal(numbers(processor, patches(ours)["pixels"]), theirs["pixel_values"])
    index, weights = get_vision_interpolation_indices_and_weights(
        theirs["image_grid_thw"], 9, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    assert torch.equal(patches(ours)["patch_index"], index)
    assert torch.equal(patches(ours)["patch_weights"], weights)


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize(("width", "height"), [(64, 64), (640, 360), (20, 50), (1000, 300), (33, 31), (400, 12)])
def test_frames_of_a_clip_are_resized_by_the_references_formula(
    processor: Qwen3VLProcessor, frames: int, width: int, height: int
) -> None:
    """The bounds are those of all frames together. A single frame stands for a pair."""
    video = processor.video
    wanted = smart_resize(
        max(frames, 2), height, width, factor=SIDE, min_pixels=video.min_pixels, max_pixels=video.max_pixels
    )
    assert video.fit(height, width, frames) == wanted
    assert processor.target("video", MediaSize(width, height, frames)) == wanted[::-1]
    with pytest.raises(TesseraError, match="too narrow"):
        video.fit(20_000, 50, frames)


def test_a_clip_is_pairs_of_frames(processor: Qwen3VLProcessor, exported: Path) -> None:
    """Five frames: the last temporal patch holds the fifth twice."""
    ours = processor.encode(conversation("video"), [clip(5)])
    _, h, w = grids(processor, conversation("video"), [clip(5)])[0].tolist()
    assert grids(processor, conversation("video"), [clip(5)]).tolist() == [[3, h, w]]
    reference = Qwen2VLImageProcessorPil.from_pretrained(exported)
    size = {"shortest_edge": h * w * 256, "longest_edge": h * w * 256}
    resized = [Image.fromarray(f).resize((w * 16, h * 16), Image.Resampling.BICUBIC) for f in clip(5)]
    stills = [reference(images=[f], size=size, return_tensors="pt")["pixel_values"] for f in resized]
    assert torch.equal(numbers(processor, patches(ours)["pixels"]), in_pairs(stills))
    batch = processor.collate([[ours]], len(ours.tokens))
    assert batch.segments["vision"].lengths == (h * w,) * 3


def expanded(reference: ReferenceProcessor, words: str, sizes: list[MediaSize], grids: list[list[int]]) -> str:
    """A chat with its pictures and clips written out, each by transformers' own words for it."""
    seen = {"image_grid_thw": torch.tensor(grids), "video_grid_thw": torch.tensor(grids)}
    metadata = []
    for size in sizes:
        chosen = VideoSampling(rule="ends").spread(size.frames, size.total or size.frames)  # see test_sampled_frames
        metadata.append(VideoMetadata(total_num_frames=size.total or size.frames, fps=size.rate, frames_indices=chosen))
    seen["video_metadata"] = metadata  # type: ignore[assignment]
    start, end = reference.vision_start_token, reference.vision_end_token
    for number, size in enumerate(sizes):
        if size.frames > 1:
            shown = reference.replace_video_token(seen, number)
            words = words.replace(f"{start}<|video_pad|>{end}", shown.replace("<|video_pad|>", "<|shown|>"), 1)
        else:
            words = words.replace(
                "<|image_pad|>", reference.replace_image_token(seen, number).replace("image_pad", "seen"), 1
            )
    return words.replace("<|shown|>", "<|video_pad|>").replace("<|seen|>", "<|image_pad|>")


@pytest.mark.parametrize(
    "media", [(), ("image",), ("image", "image"), ("video",), ("image", "video", "image", "video")]
)
@pytest.mark.parametrize("rate", [None, 3.0, 29.97])
def test_tokens_and_positions_are_the_references(
    processor: Qwen3VLProcessor, reference: ReferenceProcessor, media: tuple[str, ...], rate: float | None
) -> None:
    things: list[Any] = [clip(5 + n) if kind == "video" else picture(61 + 30 * n, 87) for n, kind in enumerate(media)]
    sizes = [
        MediaSize(70, 90, 5 + n, total=31 + 100 * n, rate=rate) if kind == "video" else MediaSize(61 + 30 * n, 87)
        for n, kind in enumerate(media)
    ]
    sample = conversation(*media)
    ours = processor.encode(sample, things, sizes)
    shapes = grids(processor, sample, things, sizes).tolist() if media else []
    words = reference.apply_chat_template(as_reference(sample), tokenize=False)
    words = expanded(reference, words, sizes, shapes)
    assert ours.tokens.tolist() == list(reference.tokenizer(words)["input_ids"])
    measured = processor.measure(sample, sizes)
    assert {name: measured[name] for name in ours.counts} == ours.counts

    with torch.device("meta"):
        model = Qwen3VLModel(transformers.Qwen3VLConfig(**CONFIG.to_hf()))
    kinds = (ours.tokens == VOCAB - 2).int() + 2 * (ours.tokens == VOCAB - 1).int()
    images, videos = by_kind(shapes, media)
    expected, _ = model.get_rope_index(ours.tokens[None], kinds[None], image_grid_thw=images, video_grid_thw=videos)
    assert torch.equal(ours.positions, expected[:, 0])


def test_pictures_through_the_references_own_processor(
    processor: Qwen3VLProcessor, reference: ReferenceProcessor
) -> None:
    images, sample = [picture(61, 87), picture(120, 60, seed=1)], conversation("image", "image")
    asked = Sample("one", sample.messages[:-1])
    words = reference.apply_chat_template(as_reference(asked), tokenize=False, add_generation_prompt=True)
    theirs = reference(text=[words], images=images, return_tensors="pt")
    ours = processor.prompt([sample], [images])
    assert torch.equal(ours["tokens"], theirs["input_ids"][0])
    assert torch.equal(numbers(processor, ours["pixels"]), theirs["pixel_values"])


CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
TALKS = [
    talk(("user", "Hi"), ("assistant", "Yes.")),
    talk(("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes.")),
    talk(("user", "Look"), ("assistant", CALL), ("tool", "blue"), ("assistant", "It is blue.")),
    talk(("user", "Look"), ("assistant", CALL), ("tool", "blue"), ("tool", "\ngrey\n"), ("tool", ""), ("user", "And?")),
]


@pytest.mark.parametrize("sample", TALKS)
@pytest.mark.parametrize("asked", [True, False])
def test_conversations_are_written_as_published(
    processor: Qwen3VLProcessor, exported: Path, sample: Sample, asked: bool
) -> None:
    pieces = processor.template.render(sample.messages, answer=asked)
    ours = "".join(piece.text for piece in pieces)
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(PUBLISHED)
    assert ours == template.render(messages=as_reference(sample), add_generation_prompt=asked)
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    again = tokenizer.apply_chat_template(as_reference(sample), tokenize=False, add_generation_prompt=asked)
    assert ours == again
    plain = [{"role": m.role, "content": m.parts[0].value} for m in sample.messages]
    assert tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=asked) == ours
    trained = "".join(piece.text for piece in pieces if piece.trained)
    assert trained == "".join(m.parts[0].value + "<|im_end|>" for m in sample.messages if m.role == "assistant")


def test_a_published_folder_has_no_system_prompt_of_its_own(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text(PUBLISHED)
    assert loaded(tmp_path).template.system is None
    assert loaded(tmp_path, system="Be brief.").template.system == "Be brief."


def test_seconds_follow_the_frames_that_are_taken(processor: Qwen3VLProcessor, folder: Path, tmp_path: Path) -> None:
    """From the header of a file to the words before each pair of frames."""
    av = pytest.importorskip("av")
    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(60):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), 4 * number, dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    sample = Sample("one", (Message("user", (Part("video", "clip.mp4"),)), Message("assistant", (text("Yes."),))))
    media, sizes = read_media(sample, tmp_path, Limits(), processor)
    assert probe(sample.media()[0], tmp_path, Limits(), processor.sampling, processor.target) == sizes[0]
    assert sizes[0].frames == 12
    spelled = processor.spell(processor.encode(sample, media, sizes).tokens.tolist())
    told = [word.split(" seconds>")[0] for word in spelled.split("<")[1:] if " seconds>" in word]
    # Of frames 0, 5, 11, 16, 21, 27, 32, 38, 43, 48, 54 and 59, at ten a second.
    assert told == ["0.2", "1.4", "2.4", "3.5", "4.5", "5.7"]


def test_only_what_the_assistant_says_is_trained(processor: Qwen3VLProcessor) -> None:
    ours = processor.encode(conversation("video", "image"), [clip(4), picture(64, 64)])
    spoken = processor.decode(ours.tokens[ours.labels != IGNORE].tolist())
    assert "A red square." in spoken
    assert "seconds" not in spoken
    assert not bool(((ours.labels == VOCAB - 1) | (ours.labels == VOCAB - 2)).any())


def test_save_and_load_again(processor: Qwen3VLProcessor, exported: Path) -> None:
    again = Qwen3VLProcessor.load(CONFIG, exported)
    assert (again.image, again.video, again.table_side) == (processor.image, processor.video, 9)
    assert again.fingerprint == processor.fingerprint
    assert pickle.loads(pickle.dumps(processor)).fingerprint == processor.fingerprint  # noqa: S301 - our own object
    assert json.loads((exported / "preprocessor_config.json").read_text())["processor_class"] == "Qwen3VLProcessor"
    clips = json.loads((exported / "video_preprocessor_config.json").read_text())
    assert clips["video_processor_type"] == "Qwen3VLVideoProcessor"
    assert clips["size"] == {"shortest_edge": 4 * SIDE**2, "longest_edge": 60 * SIDE**2}


def test_what_a_bare_folder_means_is_what_the_published_files_say(folder: Path) -> None:
    bare = Qwen3VLProcessor.load(CONFIG, folder)
    assert (bare.image.min_pixels, bare.image.max_pixels) == (65536, 16777216)
    assert (bare.video.min_pixels, bare.video.max_pixels) == (4096, 25165824)
    assert bare.image.mean == bare.image.std == bare.video.mean == bare.video.std == (0.5, 0.5, 0.5)
    assert (bare.sampling.fps, bare.sampling.min_frames, bare.sampling.max_frames) == (2.0, 4, 768)
