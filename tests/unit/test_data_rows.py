"""Index, rows and what happens to samples that cannot be used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_cases import LetterProcessor, pictures, png_header, row, seen, texts, write_jsonl
from PIL import Image

from tessera.core.errors import TesseraError
from tessera.core.run_config import DataSection
from tessera.core.types import Batch
from tessera.data.index import SplitIndex
from tessera.data.kinds import KINDS
from tessera.data.rows import ChatRows


def build(
    path: Path | list[Path], *, cache: Path | None = None, seed: int = 0, split: str = "train", **options: Any
) -> ChatRows:
    paths = path if isinstance(path, list) else [path]
    section = DataSection.model_validate({"length": 64, **options, split: [{"path": p} for p in paths]})
    rows = KINDS.get("chat")(section, split, LetterProcessor(), seed, cache)
    assert isinstance(rows, ChatRows)
    return rows


def epoch_ids(rows: ChatRows, epoch: int) -> list[str]:
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


BAD = {
    "missing": "no such file",
    "noise": "unreadable image",
    "bomb": "too many pixels",
    "absolute": "outside the data root",
    "dots": "'..'",
    "link": "outside the data root",
    "url": "not from URLs",
    "two": "1 <image> placeholders, 2 images",
    "silent": "nothing to train on",
    "long": "tokens do not fit into data.length 64",
    "wide": "too wide",
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
    rows = build(path)
    assert epoch_ids(rows, 0) == ["good"]
    reasons = dict(rows.bad_samples)
    assert set(reasons) == set(BAD)
    for id, reason in BAD.items():
        assert reason in reasons[id], id


@pytest.mark.parametrize("which", range(len(BAD)))
def test_by_policy_a_bad_sample_ends_the_run(tmp_path: Path, which: int) -> None:
    pictures(tmp_path, ["good.png"])
    bad = bad_rows(tmp_path)[which]
    path = write_jsonl(tmp_path / "l.jsonl", [seen("good.png", id="good"), bad])
    with pytest.raises(TesseraError) as raised:
        build(path, on_bad_sample="fail")
    assert f"sample {bad['id']} cannot be used" in raised.value.what
    assert BAD[bad["id"]] in raised.value.what
    assert raised.value.fix is not None


def test_when_nothing_is_left_the_reasons_are_told(tmp_path: Path) -> None:
    pictures(tmp_path, ["good.png"])
    with pytest.raises(TesseraError, match="no usable sample is left of 11") as raised:
        build(write_jsonl(tmp_path / "l.jsonl", bad_rows(tmp_path)))
    assert "missing: no such file" in raised.value.what
    with pytest.raises(TesseraError, match="no data files"):
        build([])
    with pytest.raises(TesseraError, match="no such data file"):
        build(tmp_path / "none.jsonl")
    with pytest.raises(TesseraError, match="not roles to train on"):
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
    assert [id for id, _ in after.problems] == ["3.png"]
    assert "damaged image" in after.problems[0][1]
    assert after.counts["samples"] == before.counts["samples"] - 1
    assert after.counts["trained"] == before.counts["trained"] - len("A thing.")
    kept = samples_of(after)
    for id, tokens in samples_of(before).items():
        assert kept[id] == ([0] * len(tokens) if id == "3.png" else tokens)
    strict = build(path, on_bad_sample="fail")
    with pytest.raises(TesseraError, match=r"sample 3\.png cannot be used: damaged image"):
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
    assert [id for id, _ in problems] == ["b"]
    assert "headers promised" in problems[0][1]


def test_repeated_ids_become_unique(tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "a.jsonl", [row("q", "a", id="x"), row("q", "b", id="y"), row("q", "c", id="x")])
    second = write_jsonl(tmp_path / "b.jsonl", [row("q", "d", id="x"), row("q", "e")])
    rows = build([first, second], shuffle=False)
    assert epoch_ids(rows, 0) == ["x", "y", "x~2", "x~3", "b.jsonl:2"]


def index_files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_the_index_is_kept_and_remade_when_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    path = texts(tmp_path, 30)
    fresh = build(path, cache=cache)
    (kept,) = index_files(cache)
    assert kept.endswith(".safetensors")

    def never(*_: Any) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patched:
        patched.setattr(LetterProcessor, "measure", never)
        again = build(path, cache=cache, length=128)  # the length of a row is not part of the index
        assert_same_index(again.index, fresh.index)
        again = build(path, cache=cache, length=40)
        assert 0 < len(again.index) < 30
        assert len(again.bad_samples) + len(again.index) == 30
    build(path, cache=cache, train_on=["user"])
    assert len(index_files(cache)) == 2
    os.utime(path, ns=(1, 1))
    build(path, cache=cache)
    assert len(index_files(cache)) == 3
    texts(tmp_path, 29)
    assert len(build(path, cache=cache).index) == 29
    assert len(index_files(cache)) == 4


def assert_same_index(one: SplitIndex, other: SplitIndex) -> None:
    assert len(one) == len(other)
    assert np.array_equal(one.column("tokens"), other.column("tokens"))
    assert one.bad == other.bad
    assert [one.read(i)[0] for i in range(len(one))] == [other.read(i)[0] for i in range(len(other))]


def test_bad_samples_survive_the_cache(tmp_path: Path) -> None:
    pictures(tmp_path, ["good.png"])
    path = write_jsonl(tmp_path / "l.jsonl", [seen("good.png"), *bad_rows(tmp_path)])
    fresh, kept = build(path, cache=tmp_path / "cache"), build(path, cache=tmp_path / "cache")
    assert sorted(kept.bad_samples) == sorted(fresh.bad_samples)
    assert len(kept.bad_samples) == len(BAD)
    with pytest.raises(TesseraError, match="and 10 more"):
        build(path, cache=tmp_path / "cache", on_bad_sample="fail")


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_a_damaged_cache_is_made_again(tmp_path: Path, damage: bytes | None) -> None:
    cache = tmp_path / "cache"
    path = texts(tmp_path, 10)
    fresh = build(path, cache=cache)
    file = cache / index_files(cache)[0]
    file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
    assert_same_index(build(path, cache=cache).index, fresh.index)


def test_an_unknown_kind_is_explained() -> None:
    with pytest.raises(TesseraError, match="unknown data kind") as raised:
        KINDS.get("chatt")
    assert raised.value.nearest == "chat"
    with pytest.raises(TesseraError, match="cannot serve conversations"):
        KINDS.get("chat")(DataSection(), "train", object(), 0, None)


def test_json_rows_are_not_kept_in_memory(tmp_path: Path) -> None:
    """What travels to a worker is small: positions of rows, not rows."""
    rows = [row("q" * 20_000, f"{i}") for i in range(50)]
    path = tmp_path / "big.json"
    path.write_text(json.dumps(rows))
    import pickle

    assert len(pickle.dumps(build(path, length=30_000))) < 20_000
