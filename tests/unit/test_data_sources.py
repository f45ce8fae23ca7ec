"""Containers of rows: JSON, JSONL, CSV, text, Parquet, folders and tar shards, opened and read by number."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import tarfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import pictures, row, seen, texts, write_jsonl

from tessera.config.run_config import SourceSection
from tessera.core.sample import PLAIN, Part, Sample
from tessera.data.cache import CACHE_VARIABLE
from tessera.data.media.files import ArchiveMember
from tessera.data.sources import parquet as parquet_module
from tessera.data.sources import text as text_files
from tessera.data.sources.container import RecordError
from tessera.data.sources.parquet import _reader, open_parquet
from tessera.data.sources.source import Source, open_source
from tessera.data.tables import Tables, write_tables
from tessera.errors import TesseraError
from tests.errors import raises
from tests.quick import quick


def opened(path: Path, cache_folder: Path | None = None, **section: Any) -> Source:
    return open_source(SourceSection(path=path, **section), cache_folder)


def all_of(source: Source) -> list[Sample | RecordError]:
    scanned = list(source.scan(range(len(source))))
    assert [number for number, _ in scanned] == list(range(len(source)))
    return [sample for _, sample in scanned]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def bytes_within(value: Any) -> bytes:
    assert isinstance(value, ArchiveMember)
    with value.file.open("rb") as file:
        file.seek(value.start)
        return file.read(value.size)


# ---------------------------------------------------------------------------------------------- JSON and lines


def test_json_array_gives_the_same_rows_as_lines(tmp_path: Path) -> None:
    rows = [row(f"é中 {i}", 'ja\n"]},{\\', id=f"r{i}") for i in range(5)]
    lines = opened(write_jsonl(tmp_path / "a.jsonl", rows))
    for number, indent in enumerate((None, 2)):
        path = tmp_path / f"b{number}.json"
        path.write_text(json.dumps(rows, indent=indent, ensure_ascii=bool(number)), encoding="utf-8")
        array = opened(path)
        assert len(array) == len(lines) == 5
        assert [array.read(i) for i in (4, 0, 2)] == [lines.read(i) for i in (4, 0, 2)]
        assert all_of(array) == all_of(lines)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 4096])
def test_rows_are_found_whatever_the_chunks_cut_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(text_files, "CHUNK", chunk)
    chance = random.Random(chunk)

    def value(depth: int = 0) -> Any:
        drawn = chance.random()
        if depth > 3 or drawn < 0.5:
            return "".join(chance.choice('ab"\\{}[],:\n é中😀') for _ in range(chance.randint(0, 12)))
        if drawn < 0.75:
            return [value(depth + 1) for _ in range(chance.randint(0, 3))]
        return {str(i): value(depth + 1) for i in range(chance.randint(0, 3))}

    for turn in range(20):
        rows = [{"a": value(), "b": value()} for _ in range(chance.randint(0, 6))]
        path = tmp_path / f"{turn}.json"
        path.write_text(json.dumps(rows, indent=chance.choice([None, 1]), ensure_ascii=turn % 2 == 0), encoding="utf-8")
        data = path.read_bytes()
        assert [json.loads(data[a : a + n]) for a, n, _ in text_files.find_elements(path).tolist()] == rows
        lines = [json.dumps(one) if chance.random() < 0.8 else chance.choice(["", " ", "\t\r"]) for one in rows]
        path.write_text("\n".join(lines) + chance.choice(["", "\n"]), encoding="utf-8")
        data = path.read_bytes()
        spans = [(data[a : a + n].decode().strip(), number) for a, n, number in text_files.find_lines(path).tolist()]
        assert spans == [(line, number) for number, line in enumerate(lines, 1) if line.strip()]


def test_blank_lines_keep_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "gaps.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{json.dumps(row('a', 'b'))}\n\n  \r\n{json.dumps(row('c', 'd'))}".encode())
    source = opened(path)
    assert [source.read(i).id for i in range(len(source))] == ["gaps.jsonl:1", "gaps.jsonl:4"]
    assert len(opened(path, max_samples=1)) == 1


def test_a_line_that_is_not_json_is_one_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "torn.jsonl"
    good = [json.dumps(row("a", "b")).encode(), json.dumps(row("c", "d")).encode()]
    deep = b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    path.write_bytes(b"\n".join([good[0], b'{"messages": [', b"[1]", good[1], b'{"a": "\xff"}', b'{"a": "\0"}', deep]))
    outcomes = [one.code if isinstance(one, RecordError) else one.id for one in all_of(opened(path))]
    assert outcomes[0] == "torn.jsonl:1"
    assert outcomes[1:3] == ["data.damaged-json", "data.record-not-an-object"]
    assert outcomes[3] == "torn.jsonl:4"
    assert outcomes[4:] == ["data.not-utf8", "data.damaged-json", "data.damaged-json"]


def test_a_row_with_a_key_twice_is_bad(tmp_path: Path) -> None:
    path = tmp_path / "twice.jsonl"
    turns = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'
    inside = turns.replace('"content": "b"', '"content": "b", "content": "c"')
    path.write_text(f'{{"messages": {turns}}}\n{{"messages": {turns}, "messages": []}}\n{{"messages": {inside}}}\n')
    first, *twice = all_of(opened(path))
    assert isinstance(first, Sample)
    assert [(one.where, one.what.split("'")[1]) for one in twice if isinstance(one, RecordError)] == [
        ("twice.jsonl:2", "messages"),
        ("twice.jsonl:3", "content"),
    ]


def test_a_broken_element_of_an_array_is_one_bad_row(tmp_path: Path) -> None:
    good = json.dumps(row("a", "b"))
    (tmp_path / "a.json").write_text(f'[{good}, {{"b": }}, {good}]')
    outcomes = all_of(opened(tmp_path / "a.json"))
    assert isinstance(outcomes[1], RecordError)
    assert outcomes[1].where == "a.json:2"
    assert [isinstance(one, Sample) for one in outcomes] == [True, False, True]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('[{"a": 1}', "data.damaged-json"),
        ('[{"a": "1}]', "data.damaged-json"),
        ('[{"a": 1}, 5]', "data.damaged-json"),
        ('[{"a": 1}] x', "data.damaged-json"),
        ("[]", "data.no-records"),
        ("\n", "data.no-records"),
    ],
)
def test_files_whose_rows_cannot_be_found(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with raises(error):
        opened(tmp_path / "a.json")


def test_a_row_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tessera.data.sources.text.MAX_RECORD_BYTES", 1000)
    outcomes = all_of(opened(write_jsonl(tmp_path / "a.jsonl", [row("a", "b"), row("a" * 2000, "b")])))
    assert isinstance(outcomes[0], Sample)
    assert isinstance(outcomes[1], RecordError)
    assert outcomes[1].code == "data.record-too-large"


def test_an_array_is_looked_through_in_memory_that_does_not_grow(tmp_path: Path) -> None:
    first = json.dumps(row("What is it?", "A thing of many words. " * 400))
    with (tmp_path / "big.json").open("w") as out:
        out.write("[" + first)
        for _ in range(40):
            out.write((", " + first) * 100)
        out.write("]")
    assert (tmp_path / "big.json").stat().st_size > 32 << 20
    tracemalloc.start()
    try:
        assert len(text_files.find_elements(tmp_path / "big.json")) == 4001
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_million_lines_open_in_seconds(tmp_path: Path) -> None:
    line = json.dumps(row("What is it?", "A thing of many words. " * 4)) + "\n"
    with (tmp_path / "big.jsonl").open("w") as out:
        for _ in range(1000):
            out.write(line * 1000)
    began = time.process_time()
    source = opened(tmp_path / "big.jsonl", tmp_path / "cache")
    assert time.process_time() - began < 30  # a second or two where nothing else runs
    assert len(source) == 1_000_000
    assert source.read(999_999).id == "big.jsonl:1000000"
    assert len(pickle.dumps(source)) < 5000
    began = time.process_time()
    assert len(opened(tmp_path / "big.jsonl", tmp_path / "cache")) == 1_000_000
    assert time.process_time() - began < 10  # it is not read again


# ---------------------------------------------------------------------------------------------- travelling, caching


def test_reading_leaves_no_handle_open_and_sources_travel(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row("a", "b")] * 3)
    for cache in (None, tmp_path / "cache"):
        source = opened(path, cache)
        before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        for _ in range(20):
            source.read(1)
            next(iter(source.scan(range(3))))
        after = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
        assert after == before
        travelled = pickle.loads(pickle.dumps(source))  # noqa: S301 - our own object, as a spawned worker gets it
        assert travelled.read(2) == source.read(2)
        assert travelled.facts() == source.facts()


def test_tables_are_made_again_when_the_file_or_the_table_changed(tmp_path: Path) -> None:
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    write_jsonl(path, [row("a", "b")] * 3)
    facts = opened(path, cache).facts()
    assert opened(path, cache).facts() == facts
    (table,) = cache.glob("rows-*.safetensors")
    about = Tables(table).about
    for damage in (b"", b"x" * 500, table.read_bytes()[:-8]):
        table.write_bytes(damage)
        assert len(all_of(opened(path, cache))) == 3
    for lie in (np.full((3, 3), 1 << 40), np.zeros(3, dtype=np.int64)):
        write_tables(table, {"spans": lie}, about)
        assert len(all_of(opened(path, cache))) == 3
    write_jsonl(path, [row("longer", "b")] * 4)
    assert len(opened(path, cache)) == 4
    assert opened(path, cache).facts() != facts
    assert not list(cache.glob("*.part"))


def test_several_files_are_one_set(tmp_path: Path) -> None:
    for folder, count in (("x", 2), ("y", 3)):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder / "data.jsonl", [row("a", f"{folder}{i}") for i in range(count)])
    source = opened(tmp_path / "*" / "data.jsonl")
    ids = [one.id for one in all_of(source)]
    assert ids == ["x/data.jsonl:1", "x/data.jsonl:2", "y/data.jsonl:1", "y/data.jsonl:2", "y/data.jsonl:3"]
    assert [source.read(i).id for i in (4, 0, 2)] == [ids[i] for i in (4, 0, 2)]
    assert [number for number, _ in source.scan(range(1, 4))] == [1, 2, 3]
    assert len(opened(tmp_path / "*" / "data.jsonl", max_samples=3)) == 3
    assert source.root == tmp_path

    for number in range(8, 12):
        write_jsonl(tmp_path / f"shard-{number:03d}.jsonl", [row("a", str(number))])
    assert [one.id for one in all_of(opened(tmp_path / "shard-{008..011}.jsonl"))][::3] == [
        "shard-008.jsonl:1",
        "shard-011.jsonl:1",
    ]
    with raises("data.no-such-file", "shard-012.jsonl"):
        opened(tmp_path / "shard-{008..013}.jsonl")
    for name in ("shard-{9..1}.jsonl", "x{0..999}{0..999}{0..999}{0..999}.jsonl"):
        with raises("data.bad-file-range"):
            opened(tmp_path / name)


def test_files_that_are_not_there_or_not_known(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [row("a", "b")])
    with raises("data.no-such-file") as raised:
        opened(tmp_path / "trian.jsonl")
    assert raised.value.nearest == "train.jsonl"
    with raises("data.no-media-root"):
        opened(tmp_path / "train.jsonl", root=tmp_path / "nowhere")
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0")
    with raises("data.compressed-file"):
        opened(tmp_path / "a.jsonl.gz")
    pictures(tmp_path, ["a.png"])
    with raises("data.media-as-records"):
        opened(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    with raises("data.empty-folder"):
        opened(tmp_path / "empty")


# ---------------------------------------------------------------------------------------------- text, CSV, folders


def test_text_files_are_a_document_a_line_and_folders_one_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("één\r\n\ntwo <image>\nbad\0one\n".encode())
    outcomes = all_of(opened(tmp_path / "a.txt"))
    assert isinstance(outcomes[0], Sample)
    assert outcomes[0].messages[0].role == PLAIN
    assert outcomes[0].messages[0].parts == (Part("text", "één"),)
    assert isinstance(outcomes[1], Sample)
    assert outcomes[1].messages[0].parts == (Part("text", "two <image>"),)
    assert isinstance(outcomes[2], RecordError)
    assert outcomes[2].code == "data.not-a-text"

    (tmp_path / "docs" / "deep").mkdir(parents=True)
    (tmp_path / "docs" / "b.txt").write_text("first line\nsecond line\n")
    (tmp_path / "docs" / "deep" / "c.txt").write_text("alone")
    (tmp_path / "docs" / "deep" / "empty.txt").write_text("")
    outcomes = all_of(opened(tmp_path / "docs", tmp_path / "cache"))
    names = [outcome.id if isinstance(outcome, Sample) else outcome.where for outcome in outcomes]
    assert names == ["b.txt", "deep/c.txt", "deep/empty.txt"]
    assert isinstance(outcomes[0], Sample)
    assert outcomes[0].messages[0].parts == (Part("text", "first line\nsecond line"),)
    assert isinstance(outcomes[2], RecordError)


def test_csv_records_may_hold_line_breaks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('instruction,output\n"say, ""hi""\nplease",hi\n\nshort\nask,answer\n')
    for cache in (None, tmp_path / "cache"):
        source = pickle.loads(pickle.dumps(opened(tmp_path / "a.csv", cache)))  # noqa: S301 - our own object
        outcomes = all_of(source)
        assert isinstance(outcomes[0], Sample)
        assert outcomes[0].messages[0].parts == (Part("text", 'say, "hi"\nplease'),)
        assert isinstance(outcomes[1], RecordError)
        assert outcomes[1].code == "data.damaged-csv"
        assert isinstance(outcomes[2], Sample)


def test_a_csv_header_that_names_a_column_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("question,question,answer\na,b,c\n")
    with raises("data.column-twice"):
        opened(tmp_path / "twice.csv")
    (tmp_path / "empty.csv").write_text("question,answer,,\na,b,,\n")
    assert len(opened(tmp_path / "empty.csv")) == 1


def test_a_folder_of_pictures_with_words_beside(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "deep").mkdir(parents=True)
    pictures(folder, ["a.png", "b.jpg", "deep/c.png", "lone.png"])
    (folder / "a.txt").write_text("a red square\n")
    (folder / "b.json").write_text(json.dumps({**seen("b.jpg"), "id": "bee"} | {"text": "not this"}))
    (folder / "deep" / "c.json").write_text(json.dumps({"caption": "the third"}))
    (folder / "README.txt").write_text("about this set")
    for cache in (None, tmp_path / "cache"):
        source = pickle.loads(pickle.dumps(opened(folder, cache, format="text")))  # noqa: S301 - our own object
        a, b, c, lone = all_of(source)
        assert isinstance(a, Sample)
        assert a.id == "a"
        assert a.messages[0].role == PLAIN
        assert a.messages[0].parts == (Part("image", "a.png"), Part("text", "a red square"))
        assert isinstance(b, Sample)
        assert b.id == "bee"
        assert isinstance(c, Sample)
        assert c.messages[0].parts == (Part("image", "deep/c.png"), Part("text", "the third"))
        assert isinstance(lone, RecordError)
        assert lone.code == "data.no-text-file"
    with raises("data.mixed-formats"):
        all_of(opened(folder))
    before = source.facts()
    (folder / "a.txt").write_text("another square\n")
    assert opened(folder, format="text").facts() != before


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_folder_with_metadata(tmp_path: Path, kind: str) -> None:
    pictures(tmp_path, ["a.png", "b.png"])
    rows = [{"file_name": "a.png", "text": "first"}, {"file_name": "b.png", "text": "second"}, {"file_name": "n.bin"}]
    if kind == "jsonl":
        write_jsonl(tmp_path / "metadata.jsonl", rows)
    elif kind == "csv":
        (tmp_path / "metadata.csv").write_text("file_name,text\na.png,first\nb.png,second\nn.bin,\n")
    else:
        write_parquet(tmp_path / "metadata.parquet", rows)
    outcomes = all_of(opened(tmp_path))
    assert isinstance(outcomes[1], Sample)
    assert outcomes[1].messages[0].parts == (Part("image", "b.png"), Part("text", "second"))
    assert isinstance(outcomes[2], RecordError)
    assert outcomes[2].code == "data.bad-media-value"


def test_a_folder_of_files_of_rows(tmp_path: Path) -> None:
    texts(tmp_path, 3)
    write_jsonl(tmp_path / "more.jsonl", [row("a", "b")])
    assert [one.id for one in all_of(opened(tmp_path))] == ["more.jsonl:1", "s0", "s1", "s2"]


# ---------------------------------------------------------------------------------------------- Parquet


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), path, **options)
    return path


def test_parquet_rows_with_pictures_inside(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png"])
    data = (tmp_path / "a.png").read_bytes()
    turns = seen("a.png")["conversations"]
    rows = [
        {"id": "inside", "conversations": turns, "image": {"bytes": data, "path": "x.png"}},
        {"id": "beside", "conversations": turns, "image": {"bytes": None, "path": "a.png"}},
        {"id": "none", "conversations": turns[1:], "image": None},
        *({"id": f"r{i}", "conversations": turns, "image": {"bytes": data, "path": None}} for i in range(5)),
    ]
    source = opened(write_parquet(tmp_path / "a.parquet", rows, row_group_size=3))
    outcomes = all_of(source)
    assert all(isinstance(one, Sample) for one in outcomes)
    assert [source.read(i) for i in (7, 0, 3)] == [outcomes[i] for i in (7, 0, 3)]
    assert [part.value for part in source.read(0).media()] == [data]
    assert [part.value for part in source.read(1).media()] == ["a.png"]
    assert source.read(2).media() == []
    source.read(7)
    assert len(pickle.dumps(source)) < 5000  # the group that is held does not travel
    assert [number for number, _ in source.scan(range(2, 7))] == [2, 3, 4, 5, 6]
    assert len(opened(tmp_path / "a.parquet", max_samples=4)) == 4

    listed = [{"messages": row("<image>?", "b")["messages"], "images": [data]}]
    assert opened(write_parquet(tmp_path / "b.parquet", listed)).read(0).media()[0].value == data


PARQUET_FORMS: list[dict[str, Any]] = [
    {},
    {"compression": "none", "use_dictionary": False},
    {"compression": "zstd", "data_page_version": "2.0"},
    {"compression": "gzip", "data_page_version": "2.0", "use_dictionary": False},
    {"compression": "brotli"},
    {"compression": "lz4"},
]


@pytest.mark.parametrize("options", PARQUET_FORMS)
@pytest.mark.parametrize("place", quick(["struct", "own", "list", "text"], "struct", "list"))
def test_parquet_rows_of_spilled_groups_are_those_of_the_file(
    tmp_path: Path, options: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(parquet_module, "SPILL_BYTES", 1 << 10)
    chance = random.Random(7)
    visible = [chance.randbytes(chance.randint(0, 40_000)) for _ in range(12)]

    def cell(number: int) -> Any:
        data = None if number % 9 == 4 else visible[chance.randrange(len(visible))]
        if place == "text":
            return None if data is None else data.hex()
        if place == "struct":
            return None if number % 11 == 3 else {"bytes": data, "path": f"{number}.png"}
        return data if place == "own" else [data, b"x"]

    rows = [{"id": f"r{n}", "words": "w" * n, "image": cell(n)} for n in range(60)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=25, data_page_size=50_000, **options)
    file = open_parquet(path, "a", None)
    whole = [raw for _, raw in file.scan(range(60))]
    order = random.Random(3).sample(range(60), 60)
    assert [file.load(n) for n in order] == [whole[n] for n in order]
    assert whole[0].content == {key: value for key, value in rows[0].items() if value is not None}
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == 3
    monkeypatch.setattr(parquet_module.ParquetFile, "_read", None)
    again = open_parquet(path, "a", None)
    assert [again.load(n) for n in order] == [whole[n] for n in order]


def bytes_read() -> int:
    """By this process, from files of any kind."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_shuffled_parquet_does_not_read_a_group_for_each_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(1)
    rows = [{"id": f"r{n}", "text": "t", "image": chance.randbytes(20_000)} for n in range(800)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=200, data_page_size=100_000)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(parquet_module, "SPILL_BYTES", 1 << 20)
    file = open_parquet(path, "a", None)
    order = [group * 200 + chance.randrange(200) for _ in range(10) for group in range(4)]
    before = bytes_read()
    assert [file.load(n).content["image"] for n in order] == [rows[n]["image"] for n in order]
    assert bytes_read() - before < 2 * path.stat().st_size  # by groups: ten times the file
    for spilled in (tmp_path / "cache" / "parquet").iterdir():  # damaged: spilled again
        spilled.write_bytes(spilled.read_bytes()[:-100])
    assert open_parquet(path, "a", None).load(799).content["image"] == rows[799]["image"]
    monkeypatch.setattr(parquet_module, "SPILLED_BYTES", 5 << 20)
    open_parquet(path, "b", None).load(0)
    for number in (0, 200, 400, 600):
        file = open_parquet(write_parquet(tmp_path / f"{number}.parquet", rows[number : number + 200]), "c", None)
        assert file.load(7).content["image"] == rows[number + 7]["image"]
    assert sum(spilled.stat().st_size for spilled in (tmp_path / "cache" / "parquet").iterdir()) < 6 << 20


def test_parquet_is_read_without_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(parquet_module, "SPILL_BYTES", 100)
    rows = [{"id": f"r{n}", "text": "t" * 99} for n in range(30)]
    file = open_parquet(write_parquet(tmp_path / "a.parquet", rows, row_group_size=10), "a", None)
    assert [file.load(n).content for n in (29, 3, 14)] == [rows[n] for n in (29, 3, 14)]


def test_parquet_pages_that_lie_are_refused(tmp_path: Path) -> None:
    chance = random.Random(5)
    rows = [{"id": f"r{n}", "text": "t", "image": chance.randbytes(12_000)} for n in range(20)]
    for compression in ("none", "snappy"):
        path = write_parquet(tmp_path / "a.parquet", rows, data_page_size=30_000, compression=compression)
        whole = path.read_bytes()
        column = _reader(path.open("rb")).metadata.row_group(0).column(2)
        for number in range(60):
            torn = bytearray(whole)
            at = column.dictionary_page_offset + (
                number if number < 40 else chance.randrange(column.total_compressed_size)
            )
            torn[at] ^= 1 << chance.randrange(8)
            path.write_bytes(torn)
            file = open_parquet(path, "a", None)
            for first in (0, 11, 19):
                with contextlib.suppress(RecordError):  # no other error
                    assert file.load(first).content["text"] == "t"


def test_a_dictionary_of_parquet_is_not_copied_for_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("tessera.data.sources.parquet.MAX_GROUP_BYTES", 8 << 20)
    indices = arrow.array([0, 1] * 50, arrow.int32())
    long = arrow.DictionaryArray.from_arrays(indices, arrow.array(["long " * 40_000, "short"]))
    nested = arrow.StructArray.from_arrays([long], ["content"])
    table = arrow.table({"text": long, "about": nested, "id": [str(number) for number in range(100)]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", store_schema=False)
    file = open_parquet(tmp_path / "a.parquet", "a", None)
    before = arrow.total_allocated_bytes()
    first, *_ = scanned = [record for _, record in file.scan(range(100))]
    assert file._read(0).nbytes < 4 << 20  # 10 MB for each column, if copied
    assert arrow.total_allocated_bytes() - before < 1 << 20
    assert not isinstance(first, RecordError)
    assert first.content == {"text": "long " * 40_000, "about": {"content": "long " * 40_000}, "id": "0"}
    assert [file.load(number) for number in (0, 1, 99)] == [scanned[number] for number in (0, 1, 99)]


@pytest.mark.slow
def test_parquet_that_lies(tmp_path: Path) -> None:
    rows = [row("a" * 50, "b", id=f"r{i}") for i in range(400)]
    whole = write_parquet(tmp_path / "a.parquet", rows, row_group_size=100, compression="none").read_bytes()
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and nothing more")
    with raises("data.damaged-parquet"):
        opened(tmp_path / "b.parquet")
    chance = random.Random(0)
    read = refused = 0
    for _ in range(60):
        torn = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            torn[chance.randrange(len(torn))] ^= 1 << chance.randrange(8)
        (tmp_path / "c.parquet").write_bytes(
            torn[: len(torn) if chance.random() < 0.8 else chance.randrange(len(torn))]
        )
        try:
            outcomes = all_of(opened(tmp_path / "c.parquet"))
        except TesseraError:
            refused += 1
        else:
            read += 1
            assert all(isinstance(one, (Sample, RecordError)) for one in outcomes)
    assert read > 5
    assert refused > 5


# ---------------------------------------------------------------------------------------------- tar shards


def test_tar_shards_are_read_in_place(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png"])
    data = (tmp_path / "a.png").read_bytes()
    chat = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "Yes."}]
    long = "d/" + "n" * 150
    members = {
        "d/000.json": json.dumps({"conversations": chat, "image": "000.png"}).encode(),
        "d/000.png": data,
        "d/001.left.png": data,
        "d/001.json": json.dumps({"conversations": chat, "image": "left.png"}).encode(),
        f"{long}.json": json.dumps({"conversations": chat, "image": f"{long}.png"}).encode(),
        f"{long}.png": data + b"!",
        "d/003.cls": b"7",
    }
    write_tar(tmp_path / "s-0.tar", members)
    for cache in (None, tmp_path / "cache"):
        source = pickle.loads(pickle.dumps(opened(tmp_path / "s-0.tar", cache)))  # noqa: S301 - our own object
        outcomes = all_of(source)
        assert [one.id for one in outcomes[:3]] == ["d/000", "d/001", long]
        held = [one.media()[0].value for one in outcomes[:3] if isinstance(one, Sample)]
        assert [bytes_within(value) for value in held] == [data, data, data + b"!"]
        assert held[2].name == f"{long}.png"
        assert isinstance(outcomes[3], RecordError)
        assert outcomes[3].code == "data.no-text-file"
        assert "d/003.cls" in outcomes[3].what
    assert source.read(1) == outcomes[1]
    assert len(opened(tmp_path / "s-0.tar", max_samples=2)) == 2
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.png", "cache", "s-0.tar"]  # nothing was unpacked


def test_tar_pairs_of_pictures_and_captions(tmp_path: Path) -> None:
    write_tar(tmp_path / "s-0.tar", {"0.jpg": b"jpg", "0.txt": b"a dog"})
    write_tar(tmp_path / "s-1.tar", {"0.jpg": b"gif", "0.txt": b"a cat", "0.json": b'{"caption": "x", "url": "y"}'})
    source = opened(tmp_path / "s-{0..1}.tar")
    dog, cat = all_of(source)
    assert isinstance(dog, Sample)
    assert isinstance(cat, Sample)
    assert [part.kind for part in cat.messages[0].parts] == ["image", "text"]
    assert cat.messages[0].parts[1].value == "a cat"
    assert bytes_within(dog.media()[0].value) == b"jpg"
    parts = {
        "messages": [{"role": "user", "content": [{"type": "image", "image": "7.jpg"}]}, *row("", "b")["messages"]]
    }
    write_tar(tmp_path / "p.tar", {"7.json": json.dumps(parts).encode(), "7.jpg": b"x"})
    assert bytes_within(opened(tmp_path / "p.tar").read(0).media()[0].value) == b"x"
