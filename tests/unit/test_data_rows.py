"""Index, rows and what happens to samples that cannot be used."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import LetterProcessor, pictures, png_header, row, seen, texts, write_jsonl
from PIL import Image

from tessera.config.run_config import DataSection
from tessera.core.batch import Batch
from tessera.core.row_source import RowSource
from tessera.data.kinds import KINDS, RowRequest, Work
from tessera.data.order.packed_rows import PackedRows
from tessera.errors import TesseraError
from tessera.parallel.mesh import CONTEXT, Axes
from tessera.parallel.sequence_sharding import RankDataset
from tests.errors import raises


def build(
    path: Path | list[Path],
    *,
    cache: Path | None = None,
    seed: int = 0,
    split: str = "train",
    weights: tuple[float, ...] | None = None,
    work: Work | None = None,
    **options: Any,
) -> PackedRows:
    paths = path if isinstance(path, list) else [path]
    sets = [{"path": p, **({"weight": weights[at]} if weights else {})} for at, p in enumerate(paths)]
    section = DataSection.model_validate({"length": 64, **options, split: sets})
    rows = KINDS.get("chat")(RowRequest(section, split, LetterProcessor(), seed, cache, work))
    assert isinstance(rows, PackedRows)
    return rows


def letters_and_pictures(measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"text": 2.0 * measures["tokens"], "vision": 100.0 * measures["images"]}


def epoch_ids(rows: PackedRows, epoch: int) -> list[str]:
    return [i for r in range(epoch * len(rows), (epoch + 1) * len(rows)) for i in rows.batch([r]).sample_ids]


def test_every_sample_once_in_each_epoch(tmp_path: Path) -> None:
    rows = build(texts(tmp_path, 40))
    everything = sorted(f"s{i}" for i in range(40))
    first, second = epoch_ids(rows, 0), epoch_ids(rows, 1)
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert epoch_ids(build(texts(tmp_path, 40), seed=1), 0) != first
    assert epoch_ids(build(texts(tmp_path, 40), seed=1, split="eval"), 0) == epoch_ids(rows, 0)  # held out: seed 0
    straight = build(texts(tmp_path, 40), shuffle=False, pack=False)
    assert epoch_ids(straight, 0) == epoch_ids(straight, 1) == [f"s{i}" for i in range(40)]


def test_a_batch_says_what_it_holds(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png"])
    rows = build(write_jsonl(tmp_path / "l.jsonl", [seen("a.png", id="x"), seen("a.png", id="y")]))
    batch = rows.batch([0])
    assert sorted(batch.sample_ids) == ["x", "y"]
    said = len("\nWhat?A thing.")
    assert batch.counts == {
        "samples": 2,
        "tokens": 2 * (4 + said),
        "trained": 2 * len("A thing."),
        "images": 2,
        "frames": 0,
        "patches": 0,
    }
    assert batch.problems == ()
    assert batch.seeds == (rows.order.row_seed(0),)
    assert rows.batch([0, 1]).seeds == (rows.order.row_seed(0), rows.order.row_seed(1))
    assert rows.batch([0]).seeds != rows.batch([len(rows)]).seeds  # another draw of the same row
    assert batch.rows == ((0, 2),)
    assert rows.batch([3, 1]).rows == ((3, 2), (1, 2))


BAD = {
    "missing": "media.no-such-file",
    "noise": "media.unknown-format",
    "bomb": "media.too-many-pixels",
    "absolute": "media.outside-root",
    "dots": "media.path-leads-up",
    "link": "media.outside-root",
    "url": "media.url-not-allowed",
    "two": "data.placeholder-count",
    "silent": "data.nothing-trained",
    "long": "data.sample-too-long",
    "wide": "media.image-too-narrow",
}


def bad_rows(folder: Path) -> list[dict[str, Any]]:
    elsewhere = folder.parent / f"{folder.name}-elsewhere.png"
    Image.new("RGB", (20, 20)).save(elsewhere)
    (folder / "noise.png").write_bytes(b"noise")
    (folder / "bomb.png").write_bytes(png_header(30000, 30000))
    (folder / "link.png").symlink_to(elsewhere)
    pictures(folder, ["wide.png"], (300, 2))
    silent = {"conversations": [{"from": "human", "value": "<image> hello?"}], "image": "good.png", "id": "silent"}
    long = seen("good.png", id="long")
    long = {**long, "conversations": [*long["conversations"], {"from": "gpt", "value": "x" * 99}]}
    return [
        seen("none.png", id="missing"),
        seen("noise.png", id="noise"),
        seen("bomb.png", id="bomb"),
        seen(str(elsewhere), id="absolute"),
        seen(f"../{elsewhere.name}", id="dots"),
        seen("link.png", id="link"),
        seen("https://example.org/a.png", id="url"),
        {**seen("good.png", id="two"), "image": ["good.png", "good.png"]},
        silent,
        long,
        seen("wide.png", id="wide"),
    ]


def test_bad_samples_are_listed_and_left_out(tmp_path: Path) -> None:
    pictures(tmp_path, ["good.png"])
    bad = bad_rows(tmp_path)
    path = write_jsonl(tmp_path / "l.jsonl", [*bad[:4], seen("good.png", id="good"), *bad[4:]])
    rows = build(path, max_bad_share=1)
    assert epoch_ids(rows, 0) == ["good"]
    assert {bad.id: bad.code for bad in rows.bad_samples} == BAD


@pytest.mark.parametrize("which", range(len(BAD)))
def test_by_policy_a_bad_sample_ends_the_run(tmp_path: Path, which: int) -> None:
    pictures(tmp_path, ["good.png"])
    bad = bad_rows(tmp_path)[which]
    path = write_jsonl(tmp_path / "l.jsonl", [seen("good.png", id="good"), bad])
    with pytest.raises(TesseraError) as raised:
        build(path, on_bad_sample="fail")
    assert raised.value.code == "data.bad-sample"
    assert f"sample {bad['id']}: " in raised.value.what
    assert f"[{BAD[bad['id']]}]" in raised.value.what
    assert raised.value.fix is not None


def test_when_nothing_is_left_the_reasons_are_told(tmp_path: Path) -> None:
    pictures(tmp_path, ["good.png"])
    with raises("data.no-usable-sample", "11") as raised:
        build(write_jsonl(tmp_path / "l.jsonl", bad_rows(tmp_path)), max_bad_share=1)
    assert "[media.no-such-file]" in raised.value.what
    with raises("data.no-files"):
        build([])
    with raises("data.no-such-file"):
        build(tmp_path / "none.jsonl")
    with raises("data.unknown-role"):
        build(texts(tmp_path, 2), train_on=["king"])


def test_a_sample_that_fails_in_decoding_leaves_a_hole(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(6)]
    pictures(tmp_path, names)
    path = write_jsonl(tmp_path / "l.jsonl", [seen(name, id=name) for name in names])
    whole = build(path)
    before = whole.batch([0, 1])
    data = (tmp_path / "3.png").read_bytes()
    (tmp_path / "3.png").write_bytes(data[:45])  # the header survives, the pixels do not
    holed = build(path)
    after = holed.batch([0, 1])
    assert after.sample_ids == before.sample_ids
    assert after.segments["text"].bounds.tolist() == before.segments["text"].bounds.tolist()
    assert [(bad.id, bad.code) for bad in after.problems] == [("3.png", "media.damaged-file")]
    assert after.counts["samples"] == before.counts["samples"] - 1
    assert after.counts["trained"] == before.counts["trained"] - len("A thing.")
    stored = samples_of(after)
    for id, tokens in samples_of(before).items():
        assert stored[id] == ([0] * len(tokens) if id == "3.png" else tokens)
    strict = build(path, on_bad_sample="fail")
    with raises("data.bad-sample", "3.png"):
        strict.batch([0, 1])


def samples_of(batch: Batch) -> dict[str, list[int]]:
    """Tokens of each sample; in these rows every sample is as long as the others."""
    size = int(batch.segments["text"].bounds[1])
    rows = batch["tokens"].reshape(-1, 64)
    pieces = [r[i * size : (i + 1) * size].tolist() for r in rows for i in range(64 // size)]
    return dict(zip(batch.sample_ids, pieces, strict=True))


def test_a_picture_that_was_exchanged_is_noticed(tmp_path: Path) -> None:
    pictures(tmp_path, ["a.png", "b.png"])
    rows = build(write_jsonl(tmp_path / "l.jsonl", [seen("a.png", id="a"), seen("b.png", id="b")]))
    pictures(tmp_path, ["b.png"], (40, 20))
    problems = rows.batch([0]).problems
    assert [(bad.id, bad.code) for bad in problems] == [("b", "data.sample-changed")]


def test_a_sample_that_breaks_its_reader_is_left_out_by_name(tmp_path: Path) -> None:
    """The pool tells what a process was at when it died; the rows are then made again without that sample."""
    rows = build(texts(tmp_path, 40))
    noted: list[int] = []
    whole = rows.guarded([0, 1], {}, noted.append)
    assert noted == rows.order.samples(0) + rows.order.samples(1)
    bad = noted[1]
    question: list[int] = []
    holed = rows.guarded([0, 1], {bad: "its reader crashed: signal 11"}, question.append)
    assert question == [number if number != bad else ~bad for number in noted]
    died = "its reader crashed: signal 11"
    assert holed.problems == ((whole.sample_ids[1], died, "data.item-ends-worker"),)
    assert holed.sample_ids == whole.sample_ids
    assert holed.rows == whole.rows
    assert holed.segments["text"].lengths == whole.segments["text"].lengths
    assert holed.counts["samples"] == whole.counts["samples"] - 1
    question.clear()
    nameless = rows.guarded([0, 1], {bad: "crashed", ~bad: "crashed again"}, question.append)  # by its row alone
    assert question == [number for number in noted if number != bad]
    assert nameless.problems == ((f"texts.jsonl:{bad + 1}", "crashed", "data.item-ends-worker"),)
    strict = build(tmp_path / "texts.jsonl", on_bad_sample="fail")
    with raises("data.bad-sample", str(whole.sample_ids[1])):
        strict.guarded([0, 1], {bad: "crashed"}, question.append)


@pytest.mark.parametrize("tries", [1, 2])
def test_a_sample_that_twice_takes_too_long_leaves_a_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    rows = build(texts(tmp_path, 20), sample_timeout_s=1.5)  # other samples are not slow, on a crowded machine either
    slow_tries = iter(range(tries))  # a process that was stopped for a while is slow once
    plain = rows.batch([0])
    slow = rows.order.samples(0)[0]
    encode = LetterProcessor.encode

    def dawdle(self: LetterProcessor, sample: Any, *media: Any) -> Any:
        if sample.id == plain.sample_ids[0] and next(slow_tries, None) is not None:
            time.sleep(600)
        return encode(self, sample, *media)

    monkeypatch.setattr(LetterProcessor, "encode", dawdle)
    assert rows.index.read(slow)[0].id == plain.sample_ids[0]
    masked = ((plain.sample_ids[0], "took longer than 1.5 s", "data.sample-too-slow"),)
    assert rows.batch([0]).problems == (masked if tries == 2 else ())


def test_sets_are_drawn_by_weight(tmp_path: Path) -> None:
    many = write_jsonl(tmp_path / "many.jsonl", [row("q", "a" * (i % 7), id=f"many-{i}") for i in range(1, 31)])
    few = write_jsonl(tmp_path / "few.jsonl", [row("q", "a" * (i % 5), id=f"few-{i}") for i in range(1, 11)])
    many_words = [i for i in range(1, 31) if i % 7]
    few_words = [i for i in range(1, 11) if i % 5]
    rows = build([many, few], weights=(1.0, 1.0), max_bad_share=1)
    size = len(many_words) + len(few_words)
    for epoch in range(3):
        drawn = Counter(id.split("-")[0] for id in epoch_ids(rows, epoch))
        assert drawn == {"many": size // 2, "few": size // 2}
    all_drawn = Counter(id for epoch in range(13) for id in epoch_ids(rows, epoch))
    assert {all_drawn[f"few-{i}"] for i in few_words} <= {13 * (size // 2) // 8, 13 * (size // 2) // 8 + 1}
    assert {all_drawn[f"many-{i}"] for i in many_words} <= {13 * (size // 2) // 26, 13 * (size // 2) // 26 + 1}


def test_rows_weigh_what_their_samples_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pictures(tmp_path, ["a.png"])
    path = [
        write_jsonl(tmp_path / "seen.jsonl", [seen("a.png", id=f"seen-{i}") for i in range(30)]),
        write_jsonl(tmp_path / "read.jsonl", [row("q", "a" * 17, id=f"read-{i}") for i in range(30)]),
    ]
    caplog.set_level("INFO", logger="tessera")
    rows = build(path, work=letters_and_pictures)
    works = rows.work(range(len(rows)))
    assert works is not None
    for number, work in enumerate(works):
        batch = rows.batch([number])
        assert work == pytest.approx(2 * 64 + 100 * batch.counts["images"])
    assert any("rows: " in line and "work at most 1." in line for line in caplog.messages)
    off = build(path, work=letters_and_pictures, balance=False)
    assert off.work([0, 1]) is None
    assert build(path).work([0, 1]) is None

    def wants_more(measures: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"sound": measures["samples_of_sound"] * 1.0}

    with raises("model.work-not-measured", "samples_of_sound"):
        build(path, work=wants_more)


def test_repeated_ids_become_unique(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [row("q", "a", id="x"), row("q", "b", id="y"), row("q", "c", id="x")])
    second = write_jsonl(tmp_path / "b.jsonl", [row("q", "d", id="x"), row("q", "e")])
    rows = build([first, second], shuffle=False)
    assert epoch_ids(rows, 0) == ["x", "y", "x~2", "x~3", "b.jsonl:2"]


def test_an_unknown_kind_is_explained() -> None:
    with raises("recipe.unknown-name") as raised:
        KINDS.get("chatt")
    assert raised.value.nearest == "chat"
    with raises("recipe.unknown-name", "write zebra_rows:KIND"):
        KINDS.get("zebra_rows")
    with raises("data.no-chat-processor"):
        KINDS.get("chat")(RowRequest(DataSection(), "train", None, 0))


def test_what_travels_to_a_worker_is_small(tmp_path: Path) -> None:
    """Names of files with positions and numbers in them; neither those nor any row."""
    rows = build(texts(tmp_path, 5000), cache=tmp_path / "cache", work=letters_and_pictures)
    travelled = pickle.dumps(rows)
    assert len(travelled) < 20_000
    assert pickle.loads(travelled).batch([3]).sample_ids == rows.batch([3]).sample_ids  # noqa: S301


class Bare(RowSource):
    """A source that knows neither work nor danger."""

    def __len__(self) -> int:
        return 4

    def batch(self, rows: Sequence[int]) -> Batch:
        return Batch({}, sample_ids=tuple(map(str, rows)), rows=tuple((row, 1) for row in rows), counts={"samples": 2})


def test_ranks_that_share_rows_weigh_and_guard_them_alike(tmp_path: Path) -> None:
    rows = build(texts(tmp_path, 40), work=letters_and_pictures)
    axes = Axes({"dp_shard": 2}, {CONTEXT: ()})
    speaks, silent = (RankDataset(rows, axes, 0, reports=reports, flops=lambda _: 7.0) for reports in (True, False))
    assert speaks.work([0, 3]) == silent.work([0, 3]) == rows.work([0, 3])
    noted: list[int] = []
    lost = {rows.order.samples(0)[0]: "crashed"}
    first, other = (local.guarded([0], lost, noted.append) for local in (speaks, silent))
    assert noted == 2 * [~number if number in lost else number for number in rows.order.samples(0)]
    assert (first.rows, first.flops, len(first.problems)) == (rows.batch([0]).rows, 7.0, 1)
    assert (other.rows, other.sample_ids, other.flops, other.problems) == ((), (), 0.0, ())
    bare = RankDataset(Bare(), axes, 0)
    assert bare.work([0, 1]) is None
    assert bare.guarded([0, 1], {}, noted.append).sample_ids == ("0", "1")
    with raises("data.batch-failed"):
        bare.guarded([0, 1], {5: "crashed"}, noted.append)
