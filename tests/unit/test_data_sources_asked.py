"""Questions with answers in the spellings of other trainers, media named in the text, and folders of classes."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from data_cases import pictures, row
from PIL import Image
from test_data_sources_forms import opened, said, single_sample

from tessera.core.sample import Part
from tessera.data.media.data_urls import decode_data_url
from tessera.data.media.files import Limits
from tessera.data.media.read import decode, probe
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.inference.messages import sample_of
from tests.errors import raises


def png(colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 4), colour).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def test_query_and_response_of_ms_swift(tmp_path: Path) -> None:
    full = {
        "system": "Be brief.",
        "history": [["Hi", "Hello"]],
        "query": "<image>What?",
        "response": "A dog",
        "images": ["a.png"],
    }
    source = opened(tmp_path, [full, {"query": "Go", "response": "Gone"}, {"query": "Go", "response": ""}])
    assert source.record_format == "query_response"
    assert said(source.read(0)) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "[a.png]What?"),
        ("assistant", "A dog"),
    ]
    assert said(source.read(1)) == [("user", "Go"), ("assistant", "Gone")]
    with raises("data.empty-turn", "response"):
        source.read(2)


def test_question_and_answer(tmp_path: Path) -> None:
    source = opened(tmp_path, [{"question": "What?", "answer": "A dog", "image": "a.png", "input": "unused"}])
    assert source.record_format == "question_answer"
    assert said(source.read(0)) == [("user", "[a.png]What?"), ("assistant", "A dog")]
    renamed = {"question": "What?", "reply": "A dog", "pics": ["a.png"]}
    sample = single_sample(tmp_path, renamed, format="question_answer", columns={"response": "reply", "images": "pics"})
    assert said(sample) == [("user", "[a.png]What?"), ("assistant", "A dog")]
    with raises("data.unknown-format"):
        opened(tmp_path, [{"question": "What?"}])


def test_media_are_named_between_tags(tmp_path: Path) -> None:
    text = "Picture 1: <img>a b.PNG</img>\nand <video>c.mp4</video><image>d.jpg</image>?"
    told = [("user", "Picture 1: [a b.PNG]\nand [c.mp4][d.jpg]?"), ("assistant", "Yes.")]
    assert said(single_sample(tmp_path, row(text, "Yes."))) == told
    assert said(single_sample(tmp_path, {"query": text, "response": "Yes."})) == told
    talk = {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}]}
    assert said(single_sample(tmp_path, talk)) == told
    mixed = {"query": "<image> or <img>b.png</img>", "response": "b", "images": ["a.png"]}
    assert said(single_sample(tmp_path, mixed))[0] == ("user", "[a.png] or [b.png]")


def test_tags_around_words_are_words(tmp_path: Path) -> None:
    for text in ("<img>no file</img>", "<img>a.mp4</img>", "<img>\na.png</img>", "<img>a.png</video>", "<img></img>"):
        assert said(single_sample(tmp_path, row(text, "Yes.")))[0] == ("user", text)


def test_paths_between_tags_stay_below_the_root(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    pictures(tmp_path, ["secret.png"])
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    for path in ("../secret.png", str(tmp_path / "secret.png"), "link.png", "file:///secret.png"):
        source = opened(inside, [{"query": f"<img>{path}</img>?", "response": "No."}])
        with pytest.raises(TesseraError):
            probe(source.read(0).media()[0], source.root, Limits(), VideoSampling())


def test_images_written_into_a_row(tmp_path: Path) -> None:
    url = data_url(png())
    rows = [
        row("<image>What?", "Red.", images=[url]),
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]},
        row(f"<img>{url}</img>What?", "Red."),
    ]
    for content in rows:
        part = single_sample(tmp_path, content).media()[0]
        assert part == Part("image", png())
        assert decode(part, tmp_path, Limits(), VideoSampling()).getpixel((0, 0)) == (255, 0, 0)
    question = sample_of([{"role": "user", "content": [{"type": "image", "image": url}]}], "1", tmp_path)
    assert question.media()[0].value == png()


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png,abc",
        "data:text/html;base64,PGI+",
        "data:image/png;base64,",
        "data:image/png;base64,####",
        "data:image/png;base64,iVBOR",
        "data:image/png;base64,é",
    ],
)
def test_data_urls_that_are_no_media_are_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(TesseraError):
        decode_data_url(url)
    with raises("media.bad-data-url", "images: "):
        single_sample(tmp_path, row("<image>What?", "Red.", images=[url]))


def test_one_image_under_its_own_name_is_read_in_messages_and_never_dropped(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "A dog"}
    question = [{"role": "user", "content": "<image>What?"}, answer]
    inside = [
        {"role": "user", "content": [{"type": "image", "image": "b.png"}, {"type": "text", "text": "It?"}]},
        answer,
    ]
    rows = [
        {"messages": question, "image": "a.png"},
        {"messages": question, "image": ["a.png"], "images": None},
        {"messages": inside, "image": "b.png"},  # said twice
        {"messages": [{"role": "user", "content": "What?"}, answer], "image": "a.png"},
        {"messages": question, "image_path": "a.png"},
        {"messages": question, "id": "a word"},
    ]
    source = opened(tmp_path, rows)
    for number in (0, 1):
        assert said(source.read(number))[0] == ("user", "[a.png]What?")
    assert said(source.read(2))[0] == ("user", "[b.png]It?")
    with raises("data.placeholder-count"):
        source.read(3)
    with raises("data.media-column-unknown", "columns: {images: image_path}"):
        source.read(4)
    assert said(source.read(5))[0] == ("user", "<image>What?")
