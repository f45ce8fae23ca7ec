"""The index: found from headers alone, by several processes, kept, gone on with, and never believed blindly."""

from __future__ import annotations

import json
import logging
import os
import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from data_cases import LetterProcessor, TroubleProcessor, pictures, row, seen, texts, write_jsonl
from PIL import Image, ImageFile

from tessera.config.run_config import SourceSection
from tessera.core.sample import PLAIN, MediaSize, Message, Part, Sample
from tessera.data.index import measure as measure_module
from tessera.data.index.build import IndexMaker
from tessera.data.index.measure import MAX_BAD
from tessera.data.index.split import SplitIndex, TruncateToLength, Truncation, find_repeats
from tessera.data.media.files import Limits
from tessera.data.order.order import PackingConfig, Samples, row_table
from tessera.data.tables import Tables
from tessera.errors import TesseraError
from tests.dist.spawn import fork_context
from tests.errors import raises


def build(path: Path | Sequence[Path], *, processor: LetterProcessor | None = None, **options: Any) -> SplitIndex:
    paths = [path] if isinstance(path, Path) else path
    chosen = {"length": 64, "limits": Limits(), "on_bad_sample": "skip", "cache_folder": None, **options}
    return IndexMaker(processor or LetterProcessor(), **chosen).index([SourceSection(path=p) for p in paths])


def many(folder: Path, count: int, name: str = "many.jsonl") -> Path:
    rows = [row("q" * (1 + i % 7), "a" * (1 + i % 31), id=f"s{i}") for i in range(count)]
    return write_jsonl(folder / name, rows)


def everything(index: SplitIndex) -> list[tuple[int, Sample]]:
    return [(int(tokens), index.read(i)[0]) for i, tokens in enumerate(index.column("tokens"))]


def assert_same(first: SplitIndex, other: SplitIndex) -> None:
    assert first.identity == other.identity
    assert first.names == other.names
    for name in first.names:
        assert np.array_equal(first.column(name), other.column(name)), name
    assert first.bad == other.bad
    assert everything(first) == everything(other)


def travelled(index: SplitIndex) -> Any:
    return pickle.loads(pickle.dumps(index))  # noqa: S301 - our own object, as a worker gets it


def files(folder: Path, kind: str) -> list[Path]:
    return sorted(folder.glob(f"{kind}-*.safetensors"))


# ---------------------------------------------------------------------------------------------- finding


def mixed(folder: Path, count: int = 2500) -> Path:
    """Text and pictures, some of them missing, over several chunks."""
    pictures(folder, ["a.png", "b.png"], (30, 20))
    names = ["a.png", "b.png", "none.png"]
    rows = [seen(names[i // 5 % 3], id=f"p{i}") if i % 5 == 0 else seen("a.png", id=f"t{i}") for i in range(count)]
    return write_jsonl(folder / "mixed.jsonl", rows)


@pytest.mark.slow
def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    path = mixed(tmp_path)
    alone = build(path, workers=0)
    together = build(path, workers=2)
    cached_index = build(path, workers=2, cache_folder=tmp_path / "cache")
    again = build(path, workers=0, cache_folder=tmp_path / "cache")
    for other in (together, cached_index, again):
        assert_same(other, alone)
    assert alone.bad_count == len(alone.bad) == 2500 // 15
    assert [bad.id for bad in alone.bad[:2]] == ["p10", "p25"]
    assert not list((tmp_path / "cache").glob("*.parts"))


def test_small_sets_need_no_process_and_large_ones_get_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    class Watched(measure_module.Pool):
        def __init__(self, work: Any, workers: int, **more: Any) -> None:
            started.append(workers)
            super().__init__(work, workers, **more)

    monkeypatch.setattr(measure_module, "Pool", Watched)
    monkeypatch.setattr(measure_module, "SOON", 1e9)  # seconds: however slow this machine is just now
    path = many(tmp_path, 1500)
    build(path, workers="auto")
    assert started == []
    monkeypatch.setattr(measure_module, "SOON", 0.0)
    build(path, workers="auto")
    assert started == [min(measure_module.default_workers(), 2)]


@dataclass(frozen=True)
class Where(LetterProcessor):
    """Writes down which processes measure."""

    tally: Path | None = None

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        assert self.tally is not None
        with self.tally.open("a") as file:
            file.write(f"{sample.id} {os.getpid()}\n")
        return super().measure(sample, sizes)


def test_clips_are_looked_at_by_processes_that_may_crash(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    pictures(tmp_path, ["a.png", "clip/0.png", "clip/1.png"], (30, 20))
    question = row("<image>?", "b")["messages"]
    rows: list[dict[str, Any]] = [{"id": f"p{i}", "messages": question, "images": ["a.png"]} for i in range(90)]
    rows[80] = {"id": "clip", "messages": row("<video>?", "b")["messages"], "videos": ["clip"]}
    path = write_jsonl(tmp_path / "l.jsonl", rows)
    results = {}
    for workers in ("auto", 0):
        tally = tmp_path / f"tally-{workers}"
        index = build(path, processor=Where(tally=tally), workers=workers)
        assert len(index) == 90
        places = dict(line.split() for line in tally.read_text().splitlines())
        results[workers] = places["clip"] == str(os.getpid())
        assert places["p0"] == str(os.getpid())  # text and pictures take no process
    assert results == {"auto": False, 0: True}


def test_no_pixel_is_decoded_and_none_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (480, 640, 3), dtype=np.uint8)
    for name, options in {"a.jpg": {}, "b.png": {}, "c.webp": {}, "d.gif": {}, "e.tiff": {}}.items():
        Image.fromarray(noise).save(tmp_path / name, **options)
    names = ["a.jpg", "b.png", "c.webp", "d.gif", "e.tiff"]
    path = write_jsonl(tmp_path / "l.jsonl", [seen(names[i % 5], id=str(i)) for i in range(100)])

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a pixel was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    monkeypatch.setattr(Image.Image, "load", never)
    index = build(path, length=4000, cache_folder=tmp_path / "cache", workers=0)
    assert len(index) == 100
    assert set(index.column("images").tolist()) == {1}
    written = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert written < 100 * 100 + 8192


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("tessera.runtime.progress._EVERY", 0.0)
    with caplog.at_level(logging.INFO, "tessera"):
        build(many(tmp_path, 1100), workers=0)
    lines = [r.getMessage() for r in caplog.records]
    assert any("64 of 1,100 rows" in line and "left" in line for line in lines)


# ---------------------------------------------------------------------------------------------- rows that do harm


def test_a_row_that_kills_its_reader_is_a_bad_row(tmp_path: Path) -> None:
    rows = [row("q", f"a{i}", id=f"s{i}") for i in range(400)]
    for at in (70, 71, 300, 399):
        rows[at] = row("q", "CRASH", id=f"s{at}")
    path = write_jsonl(tmp_path / "l.jsonl", rows)
    index = build(path, processor=TroubleProcessor(), workers=2, cache_folder=tmp_path / "cache")
    assert len(index) == 396
    assert [bad.id for bad in index.bad] == ["l.jsonl:71", "l.jsonl:72", "l.jsonl:301", "l.jsonl:400"]
    assert {bad.code for bad in index.bad} == {"data.item-ends-worker"}
    assert all("SIGSEGV" in bad.reason for bad in index.bad)
    again = build(path, processor=TroubleProcessor(), workers=0, cache_folder=tmp_path / "cache")
    assert_same(again, index)
    with raises("data.bad-sample", "l.jsonl:71"):
        build(path, processor=TroubleProcessor(), workers=2, on_bad_sample="fail")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_row_that_takes_too_long_is_a_bad_row_until_it_gets_more_time(tmp_path: Path, workers: int) -> None:
    rows = [row("q", "a", id="x"), row("q", "SLOW", id="slow"), row("q", "b", id="y")]
    path, cache = write_jsonl(tmp_path / "l.jsonl", rows), tmp_path / "cache"
    # The limit leaves the other rows time on a crowded machine.
    hasty = build(path, processor=TroubleProcessor(slow=600), workers=workers, timeout_s=1.5, cache_folder=cache)
    assert [s.id for _, s in everything(hasty)] == ["x", "y"]
    assert hasty.bad == (("slow", "took longer than 1.5 s", "data.sample-too-slow"),)
    assert len(build(path, processor=TroubleProcessor(slow=600), workers=0, timeout_s=1.5, cache_folder=cache)) == 2
    patient = build(path, processor=TroubleProcessor(slow=0), workers=workers, timeout_s=300.0, cache_folder=cache)
    assert len(patient) == 3
    assert patient.identity != hasty.identity


@pytest.mark.slow
def test_a_row_that_never_lets_go_is_a_bad_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "l.jsonl", [row("q", "a", id="x"), row("q", "STUCK"), row("q", "b", id="y")])
    index = build(path, processor=TroubleProcessor(), workers=1, timeout_s=1.5)
    assert [s.id for _, s in everything(index)] == ["x", "y"]
    (bad,) = index.bad
    assert (bad.id, bad.code) == ("l.jsonl:2", "data.item-ends-worker")
    assert "1.5 s" in bad.reason


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_by_policy_the_first_bad_row_is_named(tmp_path: Path, workers: int) -> None:
    rows = [row("q", "a", id=f"s{i}") for i in range(3000)]
    rows[200] = row("SLOW", "", id="first")  # done after those that follow
    rows[2000] = row("q", "", id="later")
    path = write_jsonl(tmp_path / "l.jsonl", rows)
    for _ in range(2):  # also when what was found before is looked at again
        with raises("data.bad-sample") as raised:
            build(
                path,
                processor=TroubleProcessor(),
                workers=workers,
                on_bad_sample="fail",
                cache_folder=tmp_path / "cache",
            )
        assert raised.value.fix is not None
    index = build(path, processor=TroubleProcessor(), workers=workers, cache_folder=tmp_path / "cache")
    assert [bad.id for bad in index.bad] == ["first", "later"]
    with raises("data.bad-sample"):
        build(path, processor=TroubleProcessor(), on_bad_sample="fail", cache_folder=tmp_path / "cache")


@pytest.mark.slow
def test_bad_rows_beyond_the_list_are_counted(tmp_path: Path) -> None:
    count = MAX_BAD + 500
    path = write_jsonl(tmp_path / "l.jsonl", [row("q", "a"), *(row("q", "", id=f"b{i}") for i in range(count))])
    for _ in range(2):
        index = build(path, workers=0, cache_folder=tmp_path / "cache")
        assert len(index.bad) == MAX_BAD
        assert index.bad_count == count
        assert index.bad[-1][0] == f"b{MAX_BAD - 1}"


# ---------------------------------------------------------------------------------------------- going on


def build_slowly(path: Path, cache: Path, workers: int) -> None:
    build(path, processor=TroubleProcessor(pause=0.001), cache_folder=cache, workers=workers)


def start_slowly(path: Path, cache: Path, workers: int) -> Any:
    child = fork_context().Process(target=build_slowly, args=(path, cache, workers))
    child.start()
    return child


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_killed_in_the_middle_it_goes_on(tmp_path: Path, workers: int) -> None:
    path, cache, tally = many(tmp_path, 4000), tmp_path / "cache", tmp_path / "tally"
    child = start_slowly(path, cache, workers)
    deadline = time.monotonic() + 300
    while len(list(cache.glob("index-*.parts/*.safetensors"))) < 2:
        assert child.exitcode is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.kill()
    child.join()
    time.sleep(0.5 if workers else 0.0)  # workers see that they are alone and end
    finished = list(cache.glob("index-*.parts/*.safetensors"))
    rows = sum(64 if int(file.name.split(".")[0]) == 0 else 1024 for file in finished)
    assert 0 < rows < 4000
    index = build(path, processor=TroubleProcessor(tally=tally), workers=0, cache_folder=cache)
    assert tally.stat().st_size == 4000 - rows
    assert_same(index, build(path, processor=TroubleProcessor(), workers=0))
    assert not list(cache.glob("*.parts"))


@pytest.mark.slow
def test_a_damaged_chunk_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache, tally = many(tmp_path, 3000), tmp_path / "cache", tmp_path / "tally"
    whole = build(path, processor=TroubleProcessor(), workers=0)
    with monkeypatch.context() as patched:  # the end never comes
        patched.setattr(
            "tessera.data.index.build.keep_tables", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            build(path, processor=TroubleProcessor(), workers=0, cache_folder=cache)
    (folder,) = cache.glob("*.parts")
    first, second, third, _ = sorted(folder.iterdir())
    first.write_bytes(b"")
    second.write_bytes(second.read_bytes()[:-30])
    third.write_bytes((folder / sorted(folder.iterdir())[3].name).read_bytes())  # of another place
    index = build(path, processor=TroubleProcessor(tally=tally), workers=0, cache_folder=cache)
    assert_same(index, whole)
    assert tally.stat().st_size == 64 + 1024 + 1024


def test_two_at_once_do_no_harm(tmp_path: Path) -> None:
    path, cache = many(tmp_path, 1500), tmp_path / "cache"
    children = [start_slowly(path, cache, 0) for _ in range(2)]
    mine = build(path, processor=TroubleProcessor(), workers=0, cache_folder=cache)
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert_same(build(path, processor=TroubleProcessor(), workers=0, cache_folder=cache), mine)
    assert len(files(cache, "index")) == 1


# ---------------------------------------------------------------------------------------------- what is kept


def test_an_index_is_named_by_what_it_was_made_from(tmp_path: Path) -> None:
    path, cache, tally = many(tmp_path, 80), tmp_path / "cache", tmp_path / "tally"
    processor = TroubleProcessor(tally=tally)

    def measured(**options: Any) -> int:
        tally.write_bytes(b"")
        section = SourceSection(path=path, **{k: options.pop(k) for k in ("weight", "max_samples") if k in options})
        chosen = {"length": 64, "limits": Limits(), "on_bad_sample": "skip", "cache_folder": cache, **options}
        IndexMaker(processor, **chosen).index([section])
        return tally.stat().st_size

    assert measured() == 80
    assert measured() == measured(length=100) == measured(weight=2.0) == measured(length=20) == 0
    assert measured(max_samples=50) == 50
    assert measured(limits=Limits(max_image_pixels=99)) == 80
    os.utime(path, ns=(1, 1))
    assert measured() == 80
    many(tmp_path, 79)
    assert measured() == 79
    assert measured() == 0


def test_an_index_of_another_set_under_this_name_is_not_believed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first_index = build(many(tmp_path, 30, "one.jsonl"), cache_folder=cache)
    (first,) = files(cache, "index")
    build(many(tmp_path, 40, "two.jsonl"), cache_folder=cache)
    (second,) = set(files(cache, "index")) - {first}
    first.unlink()
    first.write_bytes(second.read_bytes())
    assert_same(build(tmp_path / "one.jsonl", cache_folder=cache), first_index)


@pytest.mark.parametrize("kind", ["index", "fit", "ids"])
@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_file_is_made_again(tmp_path: Path, kind: str, damage: bytes | None) -> None:
    cache, path = tmp_path / "cache", many(tmp_path, 60)
    fresh = build(path, cache_folder=cache, length=30)
    (file,) = files(cache, kind)
    whole = file.read_bytes()
    file.unlink()  # not written over: it is mapped
    file.write_bytes(whole[:-10] if damage is None else damage)
    assert_same(build(path, cache_folder=cache, length=30), fresh)
    assert file.stat().st_size == len(whole)
    file.unlink()
    assert_same(build(path, cache_folder=cache, length=30), fresh)


def cached(path: Path, cache: Path) -> tuple[SplitIndex, list[list[int]]]:
    """An index and the rows packed from it: every kind of file that a run keeps about its data."""
    index = build(path, cache_folder=cache, length=30)
    rules = PackingConfig(30, seed=1, pack=True, shuffle=True, balance=False)
    table = row_table(Samples(index.column("tokens"), np.asarray(index.starts)), rules, cache)
    return index, [table[row].tolist() for row in range(len(table))]


@pytest.mark.slow
def test_a_flipped_bit_anywhere_in_a_cache_changes_nothing_but_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    path = write_jsonl(tmp_path / "many.jsonl", [row("q", "a" * (1 + i % 40), id=f"s{i % 50}") for i in range(60)])
    fresh, rows = cached(path, cache)
    stored = sorted(cache.iterdir())
    assert {file.name.partition("-")[0] for file in stored} >= {"index", "fit", "ids", "rows"}
    for file in stored:
        whole = file.read_bytes()
        header = 8 + int.from_bytes(whole[:8], "little")
        places = [0, 9, header // 2, header - 40, *np.linspace(header, len(whole) - 1, 8).astype(int).tolist()]
        for number, at in enumerate(places):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << number % 8
            file.unlink()  # not written over: it is mapped
            file.write_bytes(damaged)
            caplog.clear()
            index, found_rows = cached(path, cache)
            assert_same(index, fresh)
            assert found_rows == rows
            assert any(file.name in message for message in caplog.messages), (file.name, at)
            assert file.stat().st_size == len(whole)


def test_a_cache_without_a_hash_is_made_again_and_anyone_may_read_it(tmp_path: Path) -> None:
    cache, path = tmp_path / "cache", many(tmp_path, 20)
    fresh = build(path, cache_folder=cache)
    (file,) = files(cache, "index")
    about = {name: fact for name, fact in Tables(file).about.items() if name != "sha256"}
    arrays = {name: np.array(array) for name, array in Tables(file).items()}
    file.unlink()
    safetensors.numpy.save_file({**arrays, "column.tokens": arrays["column.tokens"] + 1}, file, metadata=about)
    assert_same(build(path, cache_folder=cache), fresh)
    assert file.stat().st_mode == path.stat().st_mode


@pytest.mark.slow
def test_what_travels_to_a_worker_is_small_and_the_same(tmp_path: Path) -> None:
    path = many(tmp_path, 2000)
    index = build(path, cache_folder=tmp_path / "cache", length=30, workers=0)
    assert len(pickle.dumps(index)) < 6000  # 3 bytes for each sample
    assert_same(travelled(index), index)
    held = build(path, length=30, workers=0)
    assert_same(travelled(held), index)
    assert held.parts[0].rows.dtype == held.parts[0].columns["tokens"].dtype == np.int32
    assert isinstance(index.parts[0].rows, np.memmap)
    assert [index.measure("tokens", i) for i in range(50)] == index.column("tokens")[:50].tolist()


# ---------------------------------------------------------------------------------------------- what changes later


def test_a_file_that_changes_after_indexing_is_noticed(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "l.jsonl", [row("q", f"a{i}", id=f"s{i}") for i in range(5)])
    index = build(path)
    same_places = [row("q", f"a{i}", id=f"s{i}") for i in range(5)]
    same_places[1] = row("q", "a1", id="t1")  # another sample, as long as the one before
    same_places[3] = row("q", "b3", id="s3")  # the same id, other words
    write_jsonl(path, same_places)
    for sample in range(5):
        if sample in (1, 3):
            with raises("data.sample-changed", f"l.jsonl:{sample + 1}"):
                index.read(sample)
        else:
            assert index.read(sample)[0].id == f"s{sample}"
    longer = [row("before", "all others", id="new"), *(row("q", f"a{i}", id=f"s{i}") for i in range(5))]
    write_jsonl(path, longer)
    for sample in range(5):
        with pytest.raises(TesseraError):
            index.read(sample)
    write_jsonl(path, longer[:1])
    for sample in range(5):
        with pytest.raises(TesseraError):
            index.read(sample)


def test_rows_without_ids_are_known_by_what_they_say(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "l.jsonl", [row("q", "one"), row("q", "two")])
    index = build(path)
    write_jsonl(path, [row("q", "one"), row("q", "six")])
    assert index.read(0)[0].id == "l.jsonl:1"
    with raises("data.sample-changed"):
        index.read(1)


# ---------------------------------------------------------------------------------------------- strange sets


def test_repeated_ids_become_unique_over_all_sets(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [row("q", "a", id="x"), row("q", "b", id="y"), row("q", "c", id="x")])
    second = write_jsonl(tmp_path / "b.jsonl", [row("q", "d", id="x"), row("q", "e")])
    for _ in range(2):
        index = build([first, second], cache_folder=tmp_path / "cache")
        assert [s.id for _, s in everything(index)] == ["x", "y", "x~2", "x~3", "b.jsonl:2"]
        assert index.starts.tolist() == [0, 3, 5]
        assert index.locate(3) == (index.parts[1].source, 0)


def test_repeats_are_counted_without_a_dictionary() -> None:
    hashes = np.random.default_rng(0).integers(0, 50, 300).astype(np.uint64)
    repeats = find_repeats(hashes)
    before: dict[int, int] = {}
    expected = {}
    for sample, value in enumerate(hashes.tolist()):
        if value in before:
            expected[sample] = before[value]
        before[value] = before.get(value, 0) + 1
    assert dict(zip(repeats["sample"].tolist(), repeats["times"].tolist(), strict=True)) == expected
    assert np.all(np.diff(repeats["sample"]) > 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_mixed_forms_are_an_error_of_the_set(tmp_path: Path, workers: int) -> None:
    pictures(tmp_path, ["a.png"])
    path = write_jsonl(tmp_path / "l.jsonl", [row("q", "a"), row("q", "b"), seen("a.png")])
    with raises("data.mixed-formats") as raised:
        build(path, workers=workers)
    assert "l.jsonl:3" in str(raised.value)


def test_empty_sets_are_refused(tmp_path: Path) -> None:
    with raises("data.no-files"):
        build([])
    with raises("data.no-records"):
        build(write_jsonl(tmp_path / "empty.jsonl", []))
    silent = write_jsonl(tmp_path / "silent.jsonl", [row("q", "", id=f"b{i}") for i in range(3)])
    with raises("data.no-usable-sample", "b0"):
        build(silent)
    index = build([silent, texts(tmp_path, 5)])  # one empty set beside another is only counted
    assert len(index) == 5
    assert index.starts.tolist() == [0, 0, 5]
    assert index.locate(0) == (index.parts[1].source, 0)
    assert index.bad_count == 3


# ---------------------------------------------------------------------------------------------- too long


def talk(*lengths: int, id: str = "talk") -> dict[str, Any]:
    """Turns of so many letters, user and assistant in turn."""
    roles = ("user", "assistant")
    return {"id": id, "messages": [{"role": roles[i % 2], "content": "x" * n} for i, n in enumerate(lengths)]}


def test_long_samples_are_dropped_and_named_or_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        talk(5, 5, id="short"),
        talk(5, 5, 5, 5, 60, 5, id="two"),  # two exchanges fit
        talk(90, 5, 5, 5, id="none"),  # not even the first does
        talk(5, 5, 5, 90, id="asked"),  # the question of the second would fit: what is left ends with an answer
        talk(10, 10, id="last"),
    ]
    path, cache = write_jsonl(tmp_path / "l.jsonl", rows), tmp_path / "cache"
    with caplog.at_level(logging.INFO, "tessera"):
        dropped = build(path, length=40, cache_folder=cache)
    assert "0 were truncated, 3 were dropped" in caplog.records[-1].getMessage()
    assert [s.id for _, s in everything(dropped)] == ["short", "last"]
    assert dropped.bad == tuple(
        (id, f"{tokens} tokens do not fit into data.length 40", "data.sample-too-long")
        for id, tokens in (("two", 85), ("none", 105), ("asked", 105))
    )
    with caplog.at_level(logging.INFO, "tessera"):
        cut = build(path, length=40, cache_folder=cache, truncate="turns")
    assert "2 were truncated, 1 were dropped" in caplog.records[-1].getMessage()
    assert [(tokens, s.id, len(s.messages)) for tokens, s in everything(cut)] == [
        (10, "short", 2),
        (20, "two", 4),
        (10, "asked", 2),
        (20, "last", 2),
    ]
    assert cut.column("trained").tolist() == [5, 10, 5, 10]
    assert [(bad.id, bad.code) for bad in cut.bad] == [("none", "data.sample-too-long")]
    assert len({dropped.identity, cut.identity, build(path, length=41, truncate="turns").identity}) == 3
    assert_same(travelled(cut), cut)


@pytest.mark.parametrize("workers", [0, 2])
def test_cuts_are_kept_and_found_by_any_number_of_processes(tmp_path: Path, workers: int) -> None:
    rows = [talk(5, 5, 5, 40 if i % 3 else 1, id=f"s{i}") for i in range(400)]
    rows[7] = talk(5, 5, 90, 1, id="bad")  # cut as well
    rows[8] = row("q" * 99, "a", id="hopeless")
    path, cache, tally = write_jsonl(tmp_path / "l.jsonl", rows), tmp_path / "cache", tmp_path / "tally"
    index = build(path, truncate="turns", length=30, processor=TroubleProcessor(), workers=workers, cache_folder=cache)
    assert len(index) == 399
    assert index.column("tokens").tolist() == [10 if i % 3 or i == 7 else 16 for i in range(400) if i != 8]
    assert [len(s.messages) for _, s in everything(index)] == [2 if i % 3 else 4 for i in range(400) if i != 8]
    cached_index = build(path, truncate="turns", length=30, processor=TroubleProcessor(tally=tally), cache_folder=cache)
    assert not tally.exists()
    assert_same(cached_index, index)
    assert not list(cache.glob("*.parts"))


def test_media_stay_with_their_turns(tmp_path: Path) -> None:
    pictures(tmp_path, ["small.png"], (20, 20))  # 4 tokens
    pictures(tmp_path, ["large.png"], (100, 100))  # 100 tokens
    turns = [
        {"from": "human", "value": "<image>one?"},
        {"from": "gpt", "value": "yes"},
        {"from": "human", "value": "<image>two?"},
        {"from": "gpt", "value": "no"},
    ]
    path = write_jsonl(
        tmp_path / "l.jsonl",
        [
            {"conversations": turns, "images": ["small.png", "large.png"], "id": "a"},
            {"conversations": turns, "images": ["large.png", "small.png"], "id": "b"},
        ],
    )
    index = build(path, truncate="turns")
    ((tokens, sample),) = everything(index)
    assert tokens == 4 + len("one?yes")
    assert [part.value for part in sample.media()] == ["small.png"]
    assert index.column("images").tolist() == [1]
    assert index.bad[0][0] == "b"


class Words(LetterProcessor):
    """A token for each word and one at the end, so that tokens and characters differ."""

    def measure(self, sample: Sample, sizes: Sequence[MediaSize]) -> dict[str, int]:
        words = sum(len(str(part.value).split()) for message in sample.messages for part in message.parts)
        return {"tokens": words + 1, "trained": words + 1}


@pytest.mark.parametrize("words", [10, 11, 500])
def test_plain_text_is_cut_between_words(words: int) -> None:
    text = " ".join("w" * (1 + i * 7 % 5) for i in range(words))
    sample = Sample("d", (Message(PLAIN, (Part("text", text),)),))
    measures = TruncateToLength(Words(), 10)(sample, [])
    assert measures["tokens"] == 10
    cut = Truncation(measures["cut_messages"], measures["cut_characters"])(sample)
    said = str(cut.messages[0].parts[0].value)
    assert said.split() == text.split()[:9]
    assert text.startswith(said)


def test_a_cut_is_the_longest_that_is_right() -> None:
    chance = np.random.default_rng(0)
    for _ in range(200):
        count = int(chance.integers(2, 9))
        roles = [str(chance.choice(["user", "assistant", "tool"])) for _ in range(count)]
        messages = tuple(
            Message(role, (Part("text", "x" * int(chance.integers(1, 12))), *[Part("image", "i.png")] * (i % 2)))
            for i, role in enumerate(roles)
        )
        sample, sizes = Sample("s", messages), [MediaSize(20, 10)] * (count // 2)
        length = int(chance.integers(5, 60))
        right = [
            k
            for k in range(1, count + 1)
            if roles[k - 1] == "assistant"
            and LetterProcessor().measure(Sample("s", messages[:k]), sizes[: k // 2])["tokens"] <= length
        ]
        if not right:
            with raises("data.sample-too-long"):
                TruncateToLength(LetterProcessor(), length)(sample, sizes)
            continue
        measures = TruncateToLength(LetterProcessor(), length)(sample, sizes)
        assert measures["cut_messages"] == right[-1]
        assert replace(sample, messages=messages[: right[-1]]) == Truncation(right[-1])(sample)


def test_json_rows_are_not_kept_in_memory(tmp_path: Path) -> None:
    """What travels to a worker is small: positions of rows, not rows."""
    path = tmp_path / "big.json"
    path.write_text(json.dumps([row("q" * 20_000, f"{i}") for i in range(50)]))
    assert len(pickle.dumps(build(path, length=30_000))) < 20_000
