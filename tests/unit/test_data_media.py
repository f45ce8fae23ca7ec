"""Pictures from files: sizes from headers, pixels as they should be, and what is refused."""

from __future__ import annotations

import io
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import LetterProcessor, pictures, png_header
from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from tessera.core.sample import MediaSize, Message, Part, PartKind, Sample
from tessera.data.media.files import ArchiveMember, Limits, resolve
from tessera.data.media.images import to_rgb
from tessera.data.media.read import decode, probe, read_media
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tests.errors import raises
from tests.toys import media_zoo
from tests.toys.media_zoo import saved, scene

LIMITS = Limits()
SAMPLING = VideoSampling()


def size(root: Path, name: str) -> MediaSize:
    return probe(Part("image", name), root, LIMITS, SAMPLING)


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
    decoded = pixels(tmp_path, f"a.{form}")
    assert size(tmp_path, f"a.{form}") == MediaSize(decoded.shape[1], decoded.shape[0])
    assert decoded.shape[:2] == ((30, 20) if orientation >= 5 else (20, 30))
    corner = {1: (0, 0), 2: (0, -1), 3: (-1, -1), 4: (-1, 0), 5: (0, 0), 6: (0, -1), 7: (-1, -1), 8: (-1, 0)}
    red = [place for place in ((0, 0), (0, -1), (-1, -1), (-1, 0)) if decoded[place][0] > 128]
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
    assert np.asarray(to_rgb(Image.fromarray(np.full((2, 2), 0.5, np.float32)))).max() == 127  # 0 to 1 is in use, too
    holes = np.array([[np.nan, np.inf, 20.0]], np.float32)
    assert np.asarray(to_rgb(Image.fromarray(holes)))[0, :, 0].tolist() == [0, 0, 20]
    assert np.asarray(to_rgb(Image.fromarray(np.full((2, 2), 65535, np.int32)))).max() == 255


def test_a_header_that_claims_too_much_is_refused_before_decoding(tmp_path: Path) -> None:
    (tmp_path / "bomb.png").write_bytes(png_header(30000, 30000))
    for what in (probe, decode):
        with raises("media.too-many-pixels"):
            what(Part("image", "bomb.png"), tmp_path, LIMITS, SAMPLING)
    pictures(tmp_path, ["a.png"], (20, 30))
    with raises("media.too-many-pixels", "20x30", "599"):
        probe(Part("image", "a.png"), tmp_path, Limits(max_image_pixels=599), SAMPLING)
    assert probe(Part("image", "a.png"), tmp_path, Limits(max_image_pixels=600), SAMPLING) == MediaSize(20, 30)


def test_our_limit_holds_when_pillow_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    (tmp_path / "bomb.png").write_bytes(png_header(30000, 30000))
    with raises("media.too-many-pixels", "30000x30000"):
        size(tmp_path, "bomb.png")


def test_damaged_files(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for form in ("PNG", "JPEG"):
        buffer = io.BytesIO()
        noise.save(buffer, form)
        (tmp_path / f"cut.{form}").write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])
        assert size(tmp_path, f"cut.{form}") == MediaSize(64, 64)  # the header is whole
        with raises("media.damaged-file"):
            pixels(tmp_path, f"cut.{form}")
    (tmp_path / "text.png").write_text("not a picture")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "program.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    for name in ("text.png", "empty.png", "program.eps"):
        with raises("media.unknown-format"):
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
        with raises("media.outside-root"):
            resolve(name, root)
    for name in ("../outside/b.png", "x/../a.png"):
        with raises("media.path-leads-up"):
            resolve(name, root)
    for name in ("https://example.org/a.png", "file:///etc/passwd", "data:image/png;base64,xx", "s3://b/a.png"):
        with raises("media.url-not-allowed"):
            resolve(name, root)
    for name in ("none.png", "circle", "a\0b", "x" * 5000):
        with pytest.raises(TesseraError):
            resolve(name, root)
    with raises("media.not-a-file"):
        size(tmp_path, "root")


def test_decoded_objects_pass_through(tmp_path: Path) -> None:
    image = Image.new("L", (3, 5), 9)
    clip = np.zeros((2, 5, 3, 3), dtype=np.uint8)
    assert probe(Part("image", image), tmp_path, LIMITS, SAMPLING) == MediaSize(3, 5)
    assert probe(Part("video", clip), tmp_path, LIMITS, SAMPLING) == MediaSize(3, 5, 2)
    assert decode(Part("image", image), tmp_path, LIMITS, SAMPLING).mode == "RGB"
    assert decode(Part("video", clip), tmp_path, LIMITS, SAMPLING) is clip


def test_what_is_given_decoded_is_checked(tmp_path: Path) -> None:
    with raises("media.wrong-array", "float64"):
        probe(Part("video", np.zeros((2, 5, 3, 3))), tmp_path, LIMITS, SAMPLING)
    with raises("media.wrong-array", "float32"):
        probe(Part("audio", np.zeros((2, 5))), tmp_path, LIMITS, SAMPLING)
    with raises("media.too-many-pixels", "3x5", "14"):
        decode(Part("image", Image.new("L", (3, 5))), tmp_path, Limits(max_image_pixels=14), SAMPLING)
    cut = Image.open(io.BytesIO(saved(Image.fromarray(scene()), "PNG")[:200]))
    with raises("media.damaged-file"):
        decode(Part("image", cut), tmp_path, LIMITS, SAMPLING)
    with raises("media.not-a-path"):
        probe(Part("image", 3.5), tmp_path, LIMITS, SAMPLING)


@pytest.mark.parametrize("name", sorted(media_zoo.pictures()))
def test_the_same_picture_from_everywhere(tmp_path: Path, name: str) -> None:
    """A file, bytes in memory, and bytes in the middle of another file."""
    data = media_zoo.pictures()[name]
    (tmp_path / name).write_bytes(data)
    (tmp_path / "shard.tar").write_bytes(b"before" * 100 + data + b"behind" * 100)
    within = ArchiveMember(tmp_path / "shard.tar", 600, len(data), name)
    decoded = pixels(tmp_path, name)
    turned = "turned" in name
    assert decoded.shape == ((media_zoo.WIDTH, media_zoo.HEIGHT) if turned else (media_zoo.HEIGHT, media_zoo.WIDTH)) + (
        3,
    )
    for value in (name, data, within):
        part = Part("image", value)
        assert probe(part, tmp_path, LIMITS, SAMPLING) == MediaSize(decoded.shape[1], decoded.shape[0])
        assert np.array_equal(np.asarray(decode(part, tmp_path, LIMITS, SAMPLING)), decoded)
    if not any(
        word in name for word in ("palette", "clear", "la.", "one", "turned", "gif", "cmyk", "grey", "deep.", "float")
    ):
        assert np.abs(decoded.astype(int) - scene()).mean() < 6
    if name in ("grey.jpg", "deep.png", "deep.tif", "float.tif"):
        grey = np.asarray(Image.fromarray(scene()).convert("L").convert("RGB"))
        assert np.abs(decoded.astype(int) - grey).mean() < 3


def test_a_member_that_the_archive_does_not_hold(tmp_path: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(bytes(100))
    for start, size in ((0, 101), (90, 20), (-5, 10), (0, -1)):
        with raises("data.archive-changed"):
            probe(
                Part("image", ArchiveMember(tmp_path / "shard.tar", start, size, "a.png")), tmp_path, LIMITS, SAMPLING
            )
    with raises("media.cannot-open", "a.png"):
        probe(Part("image", ArchiveMember(tmp_path / "none.tar", 0, 9, "a.png")), tmp_path, LIMITS, SAMPLING)


@pytest.mark.parametrize("name", sorted(media_zoo.pictures()))
def test_files_that_end_early(tmp_path: Path, name: str) -> None:
    """Nothing half decoded ever comes back as a picture."""
    data = media_zoo.pictures()[name]
    whole = np.asarray(decode(Part("image", data), tmp_path, LIMITS, SAMPLING))
    for share in (0.02, 0.3, 0.6, 0.9):
        part = Part("image", data[: int(len(data) * share)])
        try:
            decoded = np.asarray(decode(part, tmp_path, LIMITS, SAMPLING))
        except TesseraError:
            continue
        assert np.array_equal(decoded, whole)  # the missing part is a second image, or follows the pixels


def test_cmyk_is_inverted_when_adobe_says_so(tmp_path: Path) -> None:
    """Pillow writes CMYK inverted and with Adobe's mark. Without the mark the same bytes mean the opposite."""
    cyan = saved(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), "JPEG", quality=95)
    assert np.asarray(decode(Part("image", cyan), tmp_path, LIMITS, SAMPLING))[0, 0].tolist() == [0, 255, 255]
    start = cyan.index(b"\xff\xee")
    length = int.from_bytes(cyan[start + 2 : start + 4], "big")
    unmarked = cyan[:start] + cyan[start + 2 + length :]
    assert np.asarray(decode(Part("image", unmarked), tmp_path, LIMITS, SAMPLING))[0, 0].tolist() == [0, 0, 0]


def to_size(width: int, height: int) -> Callable[[PartKind, MediaSize], tuple[int, int]]:
    return lambda kind, size: (width, height)


def test_only_what_is_used_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JPEG is decoded at the smallest size that is still enough, turned or not; its size stays the header's."""
    decoded: list[tuple[int, int]] = []
    load = JpegImageFile.load

    def watched(self: JpegImageFile) -> Any:
        decoded.append(self.size)
        return load(self)

    monkeypatch.setattr(JpegImageFile, "load", watched)
    large = Image.fromarray(scene(400, 240))
    cases = [
        ((100, 60), (100, 60)),
        ((99, 60), (100, 60)),
        ((101, 60), (200, 120)),
        ((60, 50), (100, 60)),
        ((401, 240), (400, 240)),
    ]
    for turn in (1, 6):
        data = saved(large, "JPEG", exif=media_zoo.exif(turn), quality=95)
        full = np.asarray(decode(Part("image", data), tmp_path, LIMITS, SAMPLING))
        for wanted, expected in cases:
            question = wanted[::-1] if turn == 6 else wanted
            decoded.clear()
            small = decode(Part("image", data), tmp_path, Limits(jpeg_draft=True), SAMPLING, to_size(*question))
            assert set(decoded) == {expected}
            assert small.size == (question if expected != (400, 240) else full.shape[1::-1])
            decoded.clear()
            exact = decode(Part("image", data), tmp_path, LIMITS, SAMPLING, to_size(*question))  # by default
            assert set(decoded) == {(400, 240)}
            if expected != (400, 240):
                assert np.array_equal(np.asarray(exact), np.asarray(Image.fromarray(full).resize(question, 3)))
                assert np.abs(np.asarray(small).astype(int) - np.asarray(exact)).mean() < 2


def test_a_sample_is_read_as_its_processor_wants_it(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Small(LetterProcessor):
        def target(self, kind: str, size: MediaSize) -> tuple[int, int]:  # type: ignore[override]
            return (20, 10) if kind == "image" else (8, 8)

    (tmp_path / "a.jpg").write_bytes(media_zoo.pictures()["plain.jpg"])
    clip = np.zeros((2, 5, 3, 3), dtype=np.uint8)
    parts = (Part("image", "a.jpg"), Part("text", "and"), Part("video", clip), Part("image", Image.new("L", (64, 64))))
    media, sizes = read_media(Sample("s", (Message("user", parts),)), tmp_path, LIMITS, Small())
    assert sizes == [MediaSize(40, 28), MediaSize(3, 5, 2), MediaSize(64, 64)]
    assert media[0].size == media[2].size == (20, 10)
    assert media[1] is clip


def test_headers_are_read_without_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 headers a second are asked for; that few pictures take longer than a header shows that none is decoded."""

    def no_pixels(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pixel was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", no_pixels)
    for name, data in media_zoo.pictures().items():
        (tmp_path / name).write_bytes(data)
        assert size(tmp_path, name).frames == 1
    Image.fromarray(scene(1280, 960)).save(tmp_path / "large.jpg", exif=media_zoo.exif(6))
    size(tmp_path, "large.jpg")
    began = time.process_time()
    for _ in range(200):
        size(tmp_path, "large.jpg")
    assert time.process_time() - began < 2  # with pixels it would take 10 s


def test_xmp_and_odd_exif(tmp_path: Path) -> None:
    image = Image.fromarray(scene())
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    for form in ("JPEG", "WEBP"):
        assert probe(Part("image", saved(image, form, xmp=xmp)), tmp_path, LIMITS, SAMPLING) == MediaSize(28, 40)
    assert (
        probe(Part("image", saved(image, "JPEG", xmp=xmp, exif=media_zoo.exif(3))), tmp_path, LIMITS, SAMPLING).width
        == 40
    )
    for exif in (b"Exif\0\0", b"Exif\0\0II*\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"):
        assert probe(Part("image", saved(image, "JPEG", exif=exif)), tmp_path, LIMITS, SAMPLING).width == 40
    big = b"Exif\0\0MM\0*" + struct.pack(">IHHHIHH", 8, 1, 0x0112, 3, 1, 6, 0) + bytes(4)
    assert probe(Part("image", saved(image, "JPEG", exif=big)), tmp_path, LIMITS, SAMPLING) == MediaSize(28, 40)
    stuffed = saved(image, "JPEG").replace(b"\xff\xdb", b"\xff\xff\xff\xdb")
    assert probe(Part("image", stuffed), tmp_path, LIMITS, SAMPLING).width == 40
