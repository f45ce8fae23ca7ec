"""Files from strangers: no tar is unpacked, no header is believed, no link leads out, and no pipe is waited for."""

from __future__ import annotations

import io
import json
import os
import random
import tarfile
from pathlib import Path

import pytest

from tessera.config.run_config import SourceSection
from tessera.core.sample import Sample
from tessera.data.sources.container import RecordError, file_facts
from tessera.data.sources.file_names import source_files
from tessera.data.sources.source import open_source
from tessera.errors import TesseraError
from tests.errors import raises

ABOUT = json.dumps({"text": "a thing"}).encode()


def outcomes(path: Path) -> list[Sample | RecordError]:
    source = open_source(SourceSection(path=path))
    return [found for _, found in source.scan(range(len(source)))]


def write(path: Path, *members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return path


def plain(name: str, data: bytes = ABOUT) -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info, b""


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (plain("../evil.json"), "path outside"),
        (plain("a/../../evil.json"), "path outside"),
        (plain("/etc/passwd.json"), "path outside"),
        (plain("a\\..\\evil.json"), "path outside"),
        (special("link.json", tarfile.SYMTYPE, "/etc/passwd"), "is a link"),
        (special("hard.json", tarfile.LNKTYPE, "../x"), "is a link"),
        (special("device.json", tarfile.CHRTYPE), "is a device"),
        (special("pipe.json", tarfile.FIFOTYPE), "is a pipe"),
        (special("sparse.json", tarfile.GNUTYPE_SPARSE), "is a sparse file"),
        (special("odd.json", b"Z"), "unknown type"),
    ],
)
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_that_are_not_read(
    tmp_path: Path, member: tuple[tarfile.TarInfo, bytes], reason: str, format: int
) -> None:
    path = write(tmp_path / "s.tar", plain("000.json"), member, plain("002.json"), format=format)
    first, bad, last = outcomes(path)
    assert isinstance(first, Sample)
    assert isinstance(bad, RecordError)
    assert bad.code == "data.bad-tar-member"
    assert reason in bad.what
    assert isinstance(last, Sample)
    assert os.listdir(tmp_path) == ["s.tar"]


def test_names_may_be_long_and_folders_are_passed_over(tmp_path: Path) -> None:
    name = "d/" + "é" * 200 + ".json"
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path = write(tmp_path / "s.tar", special("d/", tarfile.DIRTYPE), plain(name), plain("x.json"), format=format)
        assert [one.id for one in outcomes(path)] == [name.removesuffix(".json"), "x"]
    path = write(tmp_path / "u.tar", plain("p" * 90 + "/" + "n" * 90 + ".json"), format=tarfile.USTAR_FORMAT)
    assert [one.id for one in outcomes(path)] == ["p" * 90 + "/" + "n" * 90]


def test_a_tar_that_is_cut_off_compressed_or_damaged(tmp_path: Path) -> None:
    whole = write(tmp_path / "s.tar", *(plain(f"{i:03d}.json", ABOUT * 80) for i in range(4))).read_bytes()
    for keep in (700, 1024 + 300, 3 * 512 + 1400):
        (tmp_path / "cut.tar").write_bytes(whole[:keep])
        with raises("data.damaged-tar"):
            outcomes(tmp_path / "cut.tar")
    (tmp_path / "torn.tar").write_bytes(b"x" * 20 + whole[20:])
    with raises("data.damaged-tar"):
        outcomes(tmp_path / "torn.tar")
    with tarfile.open(tmp_path / "z.tar", "w:gz") as tar:
        tar.addfile(*_opened(plain("000.json")))
    with raises("data.compressed-file"):
        outcomes(tmp_path / "z.tar")
    (tmp_path / "empty.tar").write_bytes(b"\0" * 10240)
    with raises("data.no-records"):
        outcomes(tmp_path / "empty.tar")


def _opened(member: tuple[tarfile.TarInfo, bytes]) -> tuple[tarfile.TarInfo, io.BytesIO]:
    member[0].size = len(member[1])
    return member[0], io.BytesIO(member[1])


def test_sizes_that_lie(tmp_path: Path) -> None:
    """A header may claim what the file does not have, in octal, in base 256 or in a pax record."""
    for claim in (b"77777777777\0", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"-0000000001\0"):
        info, data = plain("000.json")
        info.size = len(data)
        block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
        block[124:136] = claim
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        (tmp_path / "s.tar").write_bytes(bytes(block) + data.ljust(512, b"\0") + b"\0" * 1024)
        with raises("data.damaged-tar"):
            outcomes(tmp_path / "s.tar")
    info, data = plain("000.json")
    info.pax_headers = {"size": "99999999999999999999"}
    with raises("data.damaged-tar"):
        outcomes(write(tmp_path / "p.tar", (info, data)))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_name_record_of_gigabytes_is_not_read(tmp_path: Path, kind: bytes) -> None:
    info = tarfile.TarInfo("record")
    info.type, info.size = kind, 6 << 30
    with (tmp_path / "s.tar").open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(7 << 30)  # a sparse file takes no room on the disk
    with raises("data.damaged-tar"):
        outcomes(tmp_path / "s.tar")


def test_mutated_tar_files_are_read_or_refused(tmp_path: Path) -> None:
    members = [member for i in range(6) for member in (plain(f"{i}.json"), plain(f"{i}.png", b"x" * 700))]
    whole = write(tmp_path / "s.tar", *members).read_bytes()
    chance = random.Random(0)
    read = refused = 0
    for _ in range(300):
        torn = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            torn[chance.randrange(len(torn))] = chance.randrange(256)
        (tmp_path / "m.tar").write_bytes(torn)
        try:
            records = outcomes(tmp_path / "m.tar")
        except TesseraError:
            refused += 1
            continue
        read += 1
        for first in records:
            for part in first.media() if isinstance(first, Sample) else []:
                assert 0 <= part.value.start <= part.value.start + part.value.size <= len(torn)
    assert read > 30
    assert refused > 30


# ---------------------------------------------------------------------------------------------- links and pipes

ROW = json.dumps({"text": "a thing"}) + "\n"


def refused(path: Path, number: int = 0) -> str | None:
    outcome = outcomes(path)[number]
    return outcome.code if isinstance(outcome, RecordError) else None


@pytest.mark.parametrize("name", ["o.txt", "o.caption", "o.json"])
def test_texts_of_a_folder_are_read_from_the_folder_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for stem in "op":
        (folder / f"{stem}.png").write_bytes(b"")
    (folder / "p.txt").write_text("a thing")
    (tmp_path / "secret").write_text(ROW)
    text = folder / name
    for target, code in [
        (tmp_path / "secret", "media.outside-root"),
        (Path("/dev/zero"), "media.outside-root"),
        (folder / "gone", "media.no-such-file"),
        (text, "media.not-a-path"),
    ]:
        text.symlink_to(target)
        assert refused(folder) == code
        assert refused(folder, 1) is None
        text.unlink()
    os.mkfifo(text)
    assert refused(folder) == "media.not-a-file"
    text.unlink()
    (folder / "inner").write_text(ROW)
    text.symlink_to(folder / "inner")
    assert refused(folder) is None


def test_links_to_no_media_are_bad_samples(tmp_path: Path) -> None:
    for stem in "abc":
        (tmp_path / f"{stem}.txt").write_text("a thing")
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "b.png").symlink_to("gone.png")
    (tmp_path / "c.png").symlink_to("c.png")
    assert len(outcomes(tmp_path)) == 3  # the media are opened later
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "a.txt").write_text("a thing")
    (documents / "b.txt").symlink_to("gone.txt")
    assert refused(documents) is None
    assert refused(documents, 1) == "media.no-such-file"


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "txt", "parquet", "tar"])
def test_pipes_and_devices_are_no_data_sets(tmp_path: Path, suffix: str) -> None:
    pipe = tmp_path / f"pipe.{suffix}"
    os.mkfifo(pipe)
    device = tmp_path / f"device.{suffix}"
    device.symlink_to("/dev/zero")
    for path in (pipe, device, tmp_path / f"p*.{suffix}"):
        with raises("environment.not-regular-file"):
            source_files(path)
        with raises("environment.not-regular-file"):
            open_source(SourceSection(path=path))
    with raises("environment.not-regular-file"):  # it became a pipe after the names were checked
        file_facts(pipe)
    device.unlink()
    if suffix != "txt":  # a folder of texts is a data set of documents
        with raises("environment.not-regular-file"):
            open_source(SourceSection(path=tmp_path))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "metadata.jsonl"])
def test_a_link_to_records_is_followed_if_the_recipe_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").write_text(ROW)
    folder = tmp_path / "set"
    folder.mkdir()
    link = folder / name
    link.symlink_to(tmp_path / "elsewhere")
    assert len(outcomes(link)) == 1
    assert len(outcomes(folder / f"*{link.suffix}")) == 1
    with raises("data.link-out-of-folder", name):
        open_source(SourceSection(path=folder))
    link.unlink()
    link.symlink_to("gone")
    with raises("environment.cannot-open", name):
        open_source(SourceSection(path=folder))
    link.unlink()
    (folder / "inner").write_text(ROW)
    link.symlink_to("inner")
    (tmp_path / "linked").symlink_to(folder)  # a link to a whole data set, such as on another disk
    assert len(outcomes(tmp_path / "linked")) == 1
