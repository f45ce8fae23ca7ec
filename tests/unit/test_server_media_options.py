"""The number of frames that a request samples from its videos: `media_io_kwargs` of vLLM, which lmms-eval sends."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from tessera.server.app import make_app
from tests.toys.chat_service import make_processor, make_service


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    processor = make_processor(tmp_path_factory.mktemp("tokenizer"))
    with TestClient(make_app(make_service(processor, max_length=16384)), "http://localhost") as client:
        yield client


def video(frames: int) -> str:
    images = [Image.new("RGB", (16, 16), (9 * number, 0, 0)) for number in range(frames)]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=100)
    return "data:image/gif;base64," + base64.b64encode(file.getvalue()).decode()


def ask(client: TestClient, **fields: Any) -> Any:
    part = {"type": "video_url", "video_url": {"url": video(16)}}
    message = {"role": "user", "content": [part, {"type": "text", "text": "what"}]}
    return client.post("/v1/chat/completions", json={"messages": [message], **fields})


def test_a_request_chooses_the_number_of_frames(client: TestClient) -> None:
    counts = {
        frames: ask(client, media_io_kwargs={"video": {"num_frames": frames}}).json()["usage"]["prompt_tokens"]
        for frames in (2, 8, 16, 100)
    }
    tokens = (counts[8] - counts[2]) / 3  # of two frames, which Qwen2-VL merges
    assert tokens > 0
    assert counts[16] - counts[8] == 4 * tokens
    assert counts[100] == counts[16], "a video has no more frames than it has"
    default = ask(client).json()["usage"]["prompt_tokens"]  # two frames a second, and at least four
    assert default - counts[2] == tokens
    assert ask(client, media_io_kwargs={}).json()["usage"]["prompt_tokens"] == default


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"video": {"num_frames": 0}}, "media_io_kwargs.video.num_frames"),
        ({"video": {"num_frames": 4, "fps": 1}}, "media_io_kwargs.video.fps"),
        ({"image": {}}, "media_io_kwargs.image"),
    ],
)
def test_other_options_are_refused_by_name(client: TestClient, options: dict[str, Any], param: str) -> None:
    response = ask(client, media_io_kwargs=options)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
