"""Files of generated samples: PNG, GIF and MP4, and their metadata."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tessera.diffusion.sampling.files import Generated, Record, check_out, metadata_path, write_samples
from tessera.diffusion.sampling.request import MediaRequest, read_prompts
from tests.errors import raises


def moving_square(frames: int = 5, height: int = 32, width: int = 48) -> np.ndarray:
    video = np.full((frames, height, width, 3), 40, np.uint8)
    for number in range(frames):
        video[number, 8:24, 4 * number : 4 * number + 16] = (230, 60, 20)
    return video


def write(out: Path, request: MediaRequest, generated: list[Generated]) -> Path:
    record = Record(Path("model"), Path("parts"), "bfloat16", request)
    return write_samples(out, record, generated, {"device": "cpu"})


def samples(*videos: np.ndarray) -> list[Generated]:
    return [Generated(f"a square {number}", 7 + number, video) for number, video in enumerate(videos)]


def test_a_png_holds_the_pixels_and_its_metadata_the_request(tmp_path: Path) -> None:
    image = moving_square(1)
    request = MediaRequest(prompts=["a square"], steps=3, seed=7, height=32, width=48, frames=1)
    written = write(tmp_path / "new" / "x.png", request, samples(image))
    assert written == tmp_path / "new" / "x.json"
    assert np.array_equal(np.asarray(Image.open(tmp_path / "new" / "x.png")), image[0])
    described = json.loads(written.read_text())
    assert MediaRequest(**described["request"]) == request
    assert [described[key] for key in ("model", "parts", "dtype")] == [
        *(str(Path(name).absolute()) for name in ("model", "parts")),
        "bfloat16",
    ]
    assert described["samples"][0]["pixels"] == samples(image)[0].digest
    assert described["made_with"]["device"] == "cpu"
    assert not list(tmp_path.rglob("*.new"))


def test_a_gif_has_every_frame_at_its_rate(tmp_path: Path) -> None:
    video = np.concatenate([moving_square(4), moving_square(4)[-1:]])  # the last frame twice: it must not be dropped
    write(tmp_path / "x.gif", MediaRequest(prompts=["a"], fps=10.0), samples(video))
    with Image.open(tmp_path / "x.gif") as image:
        lengths = []
        for number in range(image.n_frames):  # type: ignore[attr-defined]
            image.seek(number)
            lengths.append(image.info["duration"])
            error = np.abs(np.asarray(image.convert("RGB")).astype(int) - video[number].astype(int)).mean()
            assert error < 2
        assert sum(lengths) == 500  # five frames of a tenth of a second; equal ones may be stored as one


def test_an_mp4_has_every_frame_at_its_rate(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    video = moving_square(5)
    write(tmp_path / "x.mp4", MediaRequest(prompts=["a"], fps=12.0), samples(video))
    with av.open(str(tmp_path / "x.mp4")) as container:
        assert container.streams.video[0].average_rate == 12
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert frames.shape == video.shape
    assert np.abs(frames.astype(int) - video.astype(int)).mean() < 6  # colours at half resolution blur its edges


def test_several_samples_are_numbered_beside_one_metadata_file(tmp_path: Path) -> None:
    generated = samples(*[moving_square(1)] * 11)
    write(tmp_path / "x.png", MediaRequest(prompts=["a"] * 11), generated)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["x-00.png", *(f"x-{n:02d}.png" for n in range(1, 11)), "x.json"]
    described = json.loads(metadata_path(tmp_path / "x.png").read_text())["samples"]
    assert [(one["file"], one["seed"]) for one in described[:2]] == [("x-00.png", 7), ("x-01.png", 8)]


def test_pixels_and_shape_make_the_digest() -> None:
    video = moving_square(4)
    changed = video.copy()
    changed[2, 3, 3, 1] += 1
    digests = {one.digest for one in samples(video, changed, video.reshape(4, 48, 32, 3))}
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("name", "frames", "error"),
    [
        ("x.avi", 1, "output.unknown-format"),
        ("x.mp5", 1, "output.unknown-format .mp4"),
        ("x", 1, "output.unknown-format"),
        ("x.png", 5, "output.png-holds-one-image"),
    ],
)
def test_names_that_cannot_hold_the_sample_are_refused_before_the_work(name: str, frames: int, error: str) -> None:
    with raises(error):
        check_out(Path(name), frames)


def test_odd_sizes_and_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("av")
    odd = samples(moving_square(2, height=31))
    with raises("output.mp4-odd-size"):
        write(tmp_path / "x.mp4", MediaRequest(prompts=["a"]), odd)
    (tmp_path / "file").write_text("")
    with raises("output.not-writable"):
        write(tmp_path / "file" / "x.gif", MediaRequest(prompts=["a"]), odd)
    (tmp_path / "y.gif").mkdir()
    with raises("output.is-a-folder"):
        check_out(tmp_path / "y.gif", 1)


def test_prompts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("a cat\n\n  a dog \n", encoding="utf-8")
    assert read_prompts(path) == ["a cat", "a dog"]
    assert MediaRequest(prompts=["a", "b"], count=2).texts == ["a", "a", "b", "b"]
    path.write_text("\n \n")
    with raises("generation.no-prompts-in-file"):
        read_prompts(path)
    with raises("environment.cannot-open"):
        read_prompts(tmp_path / "none.txt")
