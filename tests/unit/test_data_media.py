"""Pictures and clips from files: sizes from headers, pixels as they should be, and what is refused."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from data_cases import pictures, png_header
from PIL import Image

from tessera.core.errors import TesseraError
from tessera.core.types import MediaSize, Part
from tessera.data.images import Limits, to_rgb
from tessera.data.media import decode, probe, resolve
from tessera.data.video import VideoSampling

LIMITS = Limits()
SAMPLING = VideoSampling()


def size(root: Path, name: str, kind: str = "image", sampling: VideoSampling = SAMPLING) -> MediaSize:
    return probe(Part(kind, name), root, LIMITS, sampling)  # type: ignore[arg-type]


def pixels(root: Path, name: str) -> np.ndarray:
    return np.asarray(decode(Part("image", name), root, LIMITS, SAMPLING))


@pytest.mark.parametrize("form", ["png", "jpg", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_turned_and_headers_know_it(tmp_path: Path, form: str, orientation: int) -> None:
    stored = Image.new("RGB", (30, 20), (0, 0, 255))
    stored.paste((255, 0, 0), (0, 0, 15, 10))  # the stored picture's upper left quarter is red
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored.save(tmp_path / f"a.{form}", exif=exif)
    shown = pixels(tmp_path, f"a.{form}")
    assert size(tmp_path, f"a.{form}") == MediaSize(shown.shape[1], shown.shape[0])
    assert shown.shape[:2] == ((30, 20) if orientation >= 5 else (20, 30))
    corner = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}
    red = [place for place in ((0, 0), (0, -1), (-1, -1), (-1, 0)) if shown[place][0] > 128]
    assert red == [corner[orientation]]


def test_every_mode_becomes_rgb(tmp_path: Path) -> None:
    grey = np.full((4, 4), 128, dtype=np.uint8)
    Image.fromarray(grey.astype(np.uint16) * 256).save(tmp_path / "deep.png")
    assert pixels(tmp_path, "deep.png")[0, 0].tolist() == [128, 128, 128]
    Image.new("CMYK", (4, 4), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    red = pixels(tmp_path, "cmyk.jpg")[0, 0].tolist()
    assert red[0] > 240
    assert max(red[1:]) < 15
    Image.new("RGBA", (4, 4), (255, 0, 0, 0)).save(tmp_path / "clear.png")
    assert pixels(tmp_path, "clear.png")[0, 0].tolist() == [255, 255, 255]
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    palette.save(tmp_path / "p.png")
    assert pixels(tmp_path, "p.png")[0, 0].tolist() == [10, 20, 30]
    palette.save(tmp_path / "pt.png", transparency=1)
    assert pixels(tmp_path, "pt.png")[0, 0].tolist() == [255, 255, 255]
    Image.new("1", (4, 4), 1).save(tmp_path / "one.png")
    assert pixels(tmp_path, "one.png")[0, 0].tolist() == [255, 255, 255]
    assert np.asarray(to_rgb(Image.fromarray(np.full((2, 2), 300.0, np.float32)))).max() == 255
    assert np.asarray(to_rgb(Image.fromarray(np.full((2, 2), 65535, np.int32)))).max() == 255


def test_a_header_that_claims_too_much_is_refused_before_decoding(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(30000, 30000))
    for what in (probe, decode):
        with pytest.raises(TesseraError, match="header claims too many pixels"):
            what(Part("image", "bomb.png"), tmp_path, LIMITS, SAMPLING)
    pictures(tmp_path, ["a.png"], (20, 30))
    with pytest.raises(TesseraError, match="20x30, 599 are allowed"):
        probe(Part("image", "a.png"), tmp_path, Limits(max_image_pixels=599), SAMPLING)
    assert probe(Part("image", "a.png"), tmp_path, Limits(max_image_pixels=600), SAMPLING) == MediaSize(20, 30)


def test_our_limit_holds_when_pillow_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "bomb.png").write_bytes(png_header(30000, 30000))
    with pytest.raises(TesseraError, match="30000x30000"):
        size(tmp_path, "bomb.png")


def test_damaged_files(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for form in ("PNG", "JPEG"):
        buffer = io.BytesIO()
        noise.save(buffer, form)
        (tmp_path / f"cut.{form}").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        assert size(tmp_path, f"cut.{form}") == MediaSize(64, 64)  # the header is whole
        with pytest.raises(TesseraError, match="damaged image"):
            pixels(tmp_path, f"cut.{form}")
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    for name in ("text.png", "empty.png", "program.eps"):
        with pytest.raises(TesseraError, match="unreadable image"):
            size(tmp_path, name)


def test_paths_stay_under_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    pictures(root, ["a.png"])
    pictures(outside, ["b.png"])
    (root / "link.png").symlink_to(outside / "b.png")
    (root / "linked").symlink_to(outside)
    (root / "inner.png").symlink_to(root / "a.png")
    (root / "circle").symlink_to(root / "circle")
    assert resolve("a.png", root) == (root / "a.png").resolve()
    assert resolve(str(root / "a.png"), root) == (root / "a.png").resolve()
    assert resolve("inner.png", root) == (root / "a.png").resolve()
    for name in (str(outside / "b.png"), "link.png", "linked/b.png"):
        with pytest.raises(TesseraError, match="outside the data root"):
            resolve(name, root)
    for name in ("../outside/b.png", "x/../a.png"):
        with pytest.raises(TesseraError, match=r"with '\.\.'"):
            resolve(name, root)
    for name in ("https://example.org/a.png", "file:///etc/passwd", "data:image/png;base64,xx", "s3://b/a.png"):
        with pytest.raises(TesseraError, match="not from URLs"):
            resolve(name, root)
    for name in ("none.png", "circle", "a\0b", "x" * 5000):
        with pytest.raises(TesseraError):
            resolve(name, root)
    with pytest.raises(TesseraError, match="not a file"):
        size(tmp_path, "root")


def test_frames_are_taken_evenly() -> None:
    sampling = VideoSampling(fps=2, min_frames=4, max_frames=12)
    assert sampling.count(300, 30.0) == 12  # 20 wanted
    assert sampling.count(100, 30.0) == 6  # 6.7 wanted, two to a patch
    assert sampling.count(30, 30.0) == 4
    assert sampling.count(3, 30.0) == 2
    assert sampling.count(1, 30.0) == 1
    assert sampling.count(9, None) == 8  # a folder: all, two to a patch
    assert sampling.choose(100, 30.0) == [0, 16, 33, 50, 66, 83]
    assert sampling.choose(1, 30.0) == [0]


def write_clip(path: Path, frames: int, rate: int = 10, noise: bool = False) -> None:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for number in range(frames):
            shade = np.full((48, 64, 3), 10 * number, dtype=np.uint8)
            if noise:
                shade = np.random.default_rng(number).integers(0, 256, shade.shape, dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(shade, format="rgb24")))
        container.mux(stream.encode())


@pytest.mark.parametrize("form", ["mp4", "mkv", "avi"])
def test_a_clip(tmp_path: Path, form: str) -> None:
    write_clip(tmp_path / f"clip.{form}", 20)
    assert size(tmp_path, f"clip.{form}", "video") == MediaSize(64, 48, 4)
    frames = decode(Part("video", f"clip.{form}"), tmp_path, LIMITS, SAMPLING)
    assert frames.shape == (4, 48, 64, 3)
    assert frames.dtype == np.uint8
    assert np.abs(frames.mean((1, 2, 3)) - [0, 50, 100, 150]).max() < 6
    with pytest.raises(TesseraError, match="video header claims too many pixels"):
        probe(Part("video", f"clip.{form}"), tmp_path, Limits(max_video_pixels=64 * 48 * 3), SAMPLING)


def test_a_clip_that_ends_early(tmp_path: Path) -> None:
    """A frame that the header promised and the file lacks is filled up; a clip that was cut is damaged."""
    write_clip(tmp_path / "whole.avi", 20, noise=True)
    data = (tmp_path / "whole.avi").read_bytes()
    every = VideoSampling(fps=10, min_frames=20)
    place = data.rindex(b"00dc", 0, data.rindex(b"idx1"))  # where the last frame begins
    (tmp_path / "short.avi").write_bytes(data[:place])
    assert size(tmp_path, "short.avi", "video", every) == MediaSize(64, 48, 20)
    frames = decode(Part("video", "short.avi"), tmp_path, LIMITS, every)
    assert len(frames) == 20
    assert np.array_equal(frames[18], frames[19])
    assert not np.array_equal(frames[17], frames[18])
    (tmp_path / "cut.avi").write_bytes(data[: int(len(data) * 0.6)])
    with pytest.raises(TesseraError, match=r"damaged video: cut.avi \(\d+ of 20 frames"):
        decode(Part("video", "cut.avi"), tmp_path, LIMITS, every)


def test_a_clip_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("av")
    (tmp_path / "noise.mp4").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "list.m3u8").write_text("#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/x.ts\n")
    for name in ("noise.mp4", "list.m3u8"):
        with pytest.raises(TesseraError, match="unreadable video"):
            size(tmp_path, name, "video")


def test_a_folder_of_pictures_is_a_clip(tmp_path: Path) -> None:
    clip = tmp_path / "clip"
    clip.mkdir()
    for number in (1, 2, 9, 10):
        Image.new("RGB", (8, 6), (number * 10,) * 3).save(clip / f"{number}.png")
    assert size(tmp_path, "clip", "video") == MediaSize(8, 6, 4)
    frames = decode(Part("video", "clip"), tmp_path, LIMITS, SAMPLING)
    assert frames[:, 0, 0, 0].tolist() == [10, 20, 90, 100]
    Image.new("RGB", (9, 6)).save(clip / "2.png")
    with pytest.raises(TesseraError, match="different sizes"):
        decode(Part("video", "clip"), tmp_path, LIMITS, SAMPLING)
    (clip / "3.png").symlink_to(tmp_path / "elsewhere.png")
    pictures(tmp_path, ["elsewhere.png"])
    with pytest.raises(TesseraError, match="link to somewhere else"):
        size(tmp_path, "clip", "video")
    (tmp_path / "bare").mkdir()
    with pytest.raises(TesseraError, match="no pictures"):
        size(tmp_path, "bare", "video")


def test_decoded_objects_pass_through(tmp_path: Path) -> None:
    image = Image.new("L", (3, 5), 9)
    clip = np.zeros((2, 5, 3, 3), dtype=np.uint8)
    assert probe(Part("image", image), tmp_path, LIMITS, SAMPLING) == MediaSize(3, 5)
    assert probe(Part("video", clip), tmp_path, LIMITS, SAMPLING) == MediaSize(3, 5, 2)
    assert decode(Part("image", image), tmp_path, LIMITS, SAMPLING).mode == "RGB"
    assert decode(Part("video", clip), tmp_path, LIMITS, SAMPLING) is clip
