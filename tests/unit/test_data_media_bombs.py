"""Small files that ask for much: refused from their header, and no other file or address is ever opened."""

from __future__ import annotations

import functools
import io
import json
import os
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features

from tessera.core.sample import Part
from tessera.data.media.audio import AudioSampling
from tessera.data.media.files import Limits
from tessera.data.media.read import MediaSampling, decode, probe
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tests.errors import raises
from tests.toys import media_zoo
from tests.toys.media_zoo import png_chunk, saved, scene

ROOT = Path(__file__).parents[2]
SAMPLING = MediaSampling(audio=AudioSampling(16_000))
PNG = b"\x89PNG\r\n\x1a\n"
MANY = 128 << 20  # bytes that a bomb unpacks to


@functools.cache
def packed() -> bytes:
    return zlib.compress(bytes(MANY), 1)


def png(width: int, height: int, *chunks: bytes) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return PNG + head + b"".join(chunks) + png_chunk(b"IEND", b"")


def with_chunks(*chunks: bytes) -> bytes:
    """A sound PNG with something between its header and its pixels."""
    data = saved(Image.fromarray(scene()), "PNG")
    return data[:33] + b"".join(chunks) + data[33:]


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(saved(Image.fromarray(scene()), "JPEG"))
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", height, width)
    return bytes(data)


def tiff(width: int, height: int, tile: tuple[int, int] | None = None) -> bytes:
    """Deflated; with a tile, one that unpacks to its whole claimed size."""
    pixels = packed() if tile else zlib.compress(bytes(64))
    where = 8 + 2 + 12 * 10 + 4
    tags = [(256, 4, width), (257, 4, height), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1)]
    if tile:
        tags += [(322, 4, tile[0]), (323, 4, tile[1]), (324, 4, where), (325, 4, len(pixels))]
    else:
        tags += [(273, 4, where), (278, 4, height), (279, 4, len(pixels)), (284, 3, 1)]
    tags.sort()
    body = b"".join(
        struct.pack("<HHI", tag, kind, 1) + (struct.pack("<HH", value, 0) if kind == 3 else struct.pack("<I", value))
        for tag, kind, value in tags
    )
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + body + b"\0\0\0\0" + pixels


def webp(width: int, height: int) -> bytes:
    data = bytearray(saved(Image.fromarray(scene()), "WEBP", exif=media_zoo.exif(1)))
    data[24:27], data[27:30] = ((n - 1).to_bytes(3, "little") for n in (width, height))
    return bytes(data)


def gif(width: int, height: int) -> bytes:
    data = bytearray(saved(Image.fromarray(scene()).quantize(16), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def bmp(width: int, height: int) -> bytes:
    data = bytearray(saved(Image.fromarray(scene()), "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def avif(claimed: tuple[int, int], real: tuple[int, int] = (40, 28)) -> bytes:
    data = bytearray(saved(Image.new("RGB", real), "AVIF", speed=10))
    place = data.index(b"ispe") + 8
    data[place : place + 8] = struct.pack(">II", *claimed)
    return bytes(data)


def mp4_of(count: int) -> bytes:
    """A header that claims so many samples of one byte each, in a file that has none of them."""
    data = bytearray(media_zoo.clip("mpeg4.mp4", 4))
    place = data.index(b"stsz") + 8
    data[place : place + 8] = struct.pack(">II", 1, count)
    place = data.index(b"stsc") + 12
    data[place : place + 12] = struct.pack(">III", 1, count, 1)
    place = data.index(b"stts") + 12
    data[place : place + 8] = struct.pack(">II", count, 1)
    return bytes(data)


def mp4_sized(width: int, height: int) -> bytes:
    """The container claims a size that its stream does not have."""
    data = bytearray(media_zoo.clip("mpeg4.mp4", 4))
    place = data.index(b"mp4v") + 28
    data[place : place + 4] = struct.pack(">HH", width, height)
    return bytes(data)


def mov_of_large_frames(width: int, height: int) -> bytes:
    """The container is modest; each frame in it claims to be huge."""
    data = bytearray(media_zoo.clip("mjpeg.mov", 4))
    at = 0
    while (at := data.find(b"\xff\xc0\0\x11", at)) >= 0:
        data[at + 5 : at + 9] = struct.pack(">HH", height, width)
        at += 9
    return bytes(data)


def compressed_header() -> bytes:
    inner = struct.pack(">I4s4s", 12, b"dcom", b"zlib")
    inner += struct.pack(">I4sI", 12 + len(packed()), b"cmvd", MANY) + packed()
    inner = struct.pack(">I4s", 8 + len(inner), b"cmov") + inner
    return struct.pack(">I4s4sI", 16, b"ftyp", b"qt  ", 0) + struct.pack(">I4s", 8 + len(inner), b"moov") + inner


def bombs(lie: bool) -> dict[str, bytes]:
    files = {
        "image-size.png": png(60_000, 60_000, png_chunk(b"IDAT", packed())),
        "image-size.jpg": jpeg(65_500, 65_500),
        "image-size.tif": tiff(100_000, 100_000),
        "image-tile.tif": tiff(16, 16, (50_000, 50_000)),
        "image-size.gif": gif(65_535, 65_535),
        "image-size.bmp": bmp(50_000, 50_000),
        "image-size.ppm": b"P6 60000 60000 255\n" + b"\0" * 100,
        "image-plain.ppm": b"P3 60000 60000 255\n" + b"0 " * 100,
        "video-size.png": png(
            60_000, 60_000, png_chunk(b"acTL", struct.pack(">II", 9, 0)), png_chunk(b"IDAT", packed())
        ),
        "video-size.gif": gif(65_535, 65_535),
        "video-size.y4m": b"YUV4MPEG2 W60000 H60000 F25:1 Ip A1:1 C420jpeg\nFRAME\n" + b"\0" * 1000,
        "video-samples.mp4": mp4_of(200_000_000),
        "video-frames.mov": mov_of_large_frames(60_000, 60_000),
        "video-packed.mov": compressed_header(),
    }
    if features.check("webp"):
        files |= {"image-size.webp": webp(16_000, 16_000), "video-size.webp": webp(16_000, 16_000)}
    if features.check("avif"):
        files |= {"image-size.avif": avif((16_000, 16_000))}
        files |= {"image-lie.avif": avif((40, 28), (9000, 7000))} if lie else {}
    return files


def harmless() -> dict[str, bytes]:
    """What is packed into these is never unpacked: the picture is read."""
    almost = zlib.compress(bytes((1 << 20) - 100), 9)  # just below what Pillow allows for one text
    return {
        "image-itxt.png": with_chunks(png_chunk(b"iTXt", b"k\0\1\0\0\0" + packed())),
        "image-ztxt.png": with_chunks(png_chunk(b"zTXt", b"k\0\0" + packed())),
        "image-many-ztxt.png": with_chunks(*(png_chunk(b"zTXt", b"k%d\0\0" % i + almost) for i in range(60))),
        "image-iccp.png": with_chunks(png_chunk(b"iCCP", b"k\0\0" + packed())),
        "image-idat.png": png(10, 10, png_chunk(b"IDAT", packed())),
    }


# To write the picture that is larger than it says takes as long as all others together.
@pytest.mark.parametrize("lie", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_bombs_take_no_memory(lie: bool, tmp_path: Path) -> None:
    pytest.importorskip("av")
    folder, sound = tmp_path / "bombs", tmp_path / "sound"
    folder.mkdir()
    sound.mkdir()
    refused, read = bombs(lie), harmless()
    for name, data in {**refused, **read}.items():
        (folder / name).write_bytes(data)
    with (folder / "image-endless.webp").open("wb") as file:  # claims nothing, and is 8 GiB of nothing
        file.write(saved(Image.fromarray(scene()), "WEBP"))
        file.truncate(8 << 30)
    for name, data in {**media_zoo.pictures(), **media_zoo.clips(4)}.items():
        kind = "video" if name in media_zoo.CLIPS or name.startswith("moving") else "image"
        (sound / f"{kind}-{name}").write_bytes(data)
    words = [sys.executable, "-m", "tests.toys.bomb_media", str(folder), str(sound)]
    told = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    rows = {row["name"]: row for row in map(json.loads, told.splitlines())}
    assert set(rows) == {*refused, *read, "image-endless.webp"}
    assert not [row for row in rows.values() if row["rise_mib"] > 64 or row["seconds"] > 10]
    assert not [row for row in rows.values() if "escaped" in str(row["said"])]
    assert not [row for name, row in rows.items() if name in refused and row["said"][1] == "read"]
    assert not [row for name, row in rows.items() if name in read and row["said"] != ["read", "read"]]


@pytest.fixture
def listener() -> Iterator[tuple[str, list[bytes]]]:
    """An address that somebody listens at, and what was said to it."""
    heard: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    yield f"127.0.0.1:{server.getsockname()[1]}", heard
    try:
        heard.append(server.accept()[0].recv(10))
    except TimeoutError:
        pass
    finally:
        server.close()
    assert not heard, "a media file made us open a connection"


def strangers(path: Path, address: str) -> dict[str, bytes]:
    url = f"http://{address}/x.ts"
    return {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{url}\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n".encode(),
        "concat": f"ffconcat version 1.0\nfile '{path}'\n".encode(),
        "dash": f'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" mediaPresentationDuration="PT9S">'
        f"<Period><AdaptationSet><Representation><BaseURL>{url}</BaseURL></Representation></AdaptationSet></Period>"
        "</MPD>".encode(),
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        b"a=rtpmap:96 H264/90000\n",
        "asx": f'<asx version="3.0"><entry><ref href="{url}"/></entry></asx>'.encode(),
        "subtitle index": b"# VobSub index file, v7\nid: en, index: 0\n",
        "lavfi": b"testsrc=size=64x48",
        "svg": f'<svg xmlns="http://www.w3.org/2000/svg"><image href="{url}"/></svg>'.encode(),
        "eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
        "pdf": b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n",
    }


def test_no_other_file_is_opened(tmp_path: Path, listener: tuple[str, list[bytes]]) -> None:
    pytest.importorskip("av")
    good = tmp_path / "good.mp4"
    good.write_bytes(media_zoo.clip("mpeg4.mp4", 6))
    assert probe(Part("video", "good.mp4"), tmp_path, Limits(), VideoSampling()).frames == 4
    for name, data in strangers(good, listener[0]).items():
        for suffix in (".mp4", ".m3u8", ".jpg"):
            (tmp_path / f"file{suffix}").write_bytes(data)
            for kind in ("image", "video", "audio"):
                for what in (probe, decode):
                    with pytest.raises(TesseraError, match="unreadable") as caught:
                        what(Part(kind, f"file{suffix}"), tmp_path, Limits(), SAMPLING)  # type: ignore[arg-type]
                    assert caught.value.what, name


def test_names_are_names_and_not_patterns(tmp_path: Path) -> None:
    """FFmpeg would read frame%d.png as all frames of that name, and concat:a|b as two files."""
    pytest.importorskip("av")
    for number in range(3):
        (tmp_path / f"frame{number}.png").write_bytes(saved(Image.fromarray(scene(at=number)), "PNG"))
    for name in ("frame%d.png", "concat:frame0.png|frame1.png", "subfile,,start,0,end,0,,:frame0.png", "pipe:0"):
        with raises("media.no-such-file"):
            probe(Part("video", name), tmp_path, Limits(), VideoSampling())


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for kind in ("image", "video", "audio"):
        with raises("media.not-a-file"):
            probe(Part(kind, "pipe.png"), tmp_path, Limits(), SAMPLING)  # type: ignore[arg-type]


def test_a_stream_larger_than_its_container_says(tmp_path: Path) -> None:
    pytest.importorskip("av")
    large = bytearray(media_zoo.clip("h264.mp4", 8, width=640, height=480))
    place = large.index(b"avc1") + 28
    large[place : place + 4] = struct.pack(">HH", 64, 48)
    for data in (bytes(large), mp4_sized(640, 480)):
        try:
            size = probe(Part("video", data), tmp_path, Limits(), VideoSampling())
            frames = decode(Part("video", data), tmp_path, Limits(), VideoSampling())
        except TesseraError:
            continue
        assert frames.shape == (size.frames, size.height, size.width, 3)


def test_more_text_than_picture_changes_nothing(tmp_path: Path) -> None:
    plain = decode(Part("image", with_chunks()), tmp_path, Limits(), VideoSampling())
    for data in harmless().values():
        if b"iTXt" in data or b"zTXt" in data or b"iCCP" in data:
            decoded = decode(Part("image", data), tmp_path, Limits(), VideoSampling())
            assert np.array_equal(np.asarray(decoded), np.asarray(plain))
    exif = io.BytesIO()
    Image.fromarray(scene()).save(exif, "PNG", exif=media_zoo.exif(6))
    assert probe(Part("image", exif.getvalue()), tmp_path, Limits(), VideoSampling()).width == media_zoo.HEIGHT
