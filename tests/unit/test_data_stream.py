"""Data that is streamed: files are fetched as rows reach them, one ahead, and rows are those of any other way there."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from data_cases import LetterProcessor
from test_hub import hub  # noqa: F401 - a fixture

import tessera
from tessera.config.hub_ids import HubId
from tessera.config.reader import build
from tessera.config.run_config import DataSection, load_config
from tessera.data.kinds import RowRequest
from tessera.data.kinds.chat import build as chat_rows
from tessera.data.order.step_order import StepSize
from tessera.data.stream.rows import StreamedRows
from tessera.errors import TesseraError
from tessera.hub.clients import RemoteFile
from tessera.hub.config import with_local_folders
from tessera.hub.download import fetch, fetch_shard, held_shard, remote_shards, trim
from tests.errors import raises
from tests.toys.chat_set import chat_recipe, write_chat_set
from tests.toys.hub_server import HubServer, Repository

FILES, SAMPLES = 4, 6


def rows_of_file(number: int, samples: int = SAMPLES) -> bytes:
    rows = [
        {
            "id": f"{number}-{at}",
            "messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "x" * (2 + at)}],
        }
        for at in range(samples)
    ]
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def publish(server: HubServer) -> Repository:
    files = {f"data/train-{number:05d}.jsonl": rows_of_file(number) for number in range(FILES)}
    return server.add("datasets/org/set", {**files, "README.md": b"# rows"})


def streamed(folder: Path | None, path: str = "hf://datasets/org/set", seed: int = 3, **data: Any) -> StreamedRows:
    settings = {"train": [{"path": path}], "length": 12, "stream": True, "workers": 0, **data}
    section = build(DataSection, settings, "here")
    rows = chat_rows(RowRequest(section, "train", LetterProcessor(), seed, folder))
    assert isinstance(rows, StreamedRows)
    return rows


def settle(rows: StreamedRows) -> StreamedRows:
    """Wait for what is fetched ahead."""
    if rows._ahead is not None:
        rows._ahead.join()
    return rows


def ids(rows: StreamedRows, first: int, last: int) -> list[tuple[str, ...]]:
    return [rows.batch([row]).sample_ids for row in range(first, last)]


def epoch_of(rows: StreamedRows) -> int:
    return sum(rows._count(number) for number in range(len(rows.shards)))


def test_files_are_fetched_as_rows_reach_them_and_one_ahead(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    publish(hub)
    rows = streamed(tmp_path / "index")
    assert hub.downloads() == []
    rows.batch([0])
    settle(rows)
    assert len(hub.downloads()) == 2
    count = rows._count(rows._order(0)[0])
    rows.batch([count - 1])
    settle(rows)
    assert len(hub.downloads()) == 2
    rows.batch([count])
    settle(rows)
    assert len(hub.downloads()) == 3


def test_files_that_nobody_reads_are_removed_beyond_a_size_and_fetched_again(
    hub: HubServer,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    publish(hub)
    stream = tmp_path / "cache" / ".tessera" / "stream"
    rows = streamed(tmp_path / "index", stream_cache_gib=1e-9)
    length = epoch_of(rows)
    whole = ids(rows, 0, 2 * length)
    settle(rows)
    assert len(hub.downloads()) > FILES  # in the second epoch some are fetched again
    assert len(list(stream.rglob("train-*.jsonl"))) <= 3  # what is open
    assert sum(line.startswith("rows: ") for line in caplog.messages) == 1  # and not one for each file
    assert ids(streamed(tmp_path / "index", stream_cache_gib=None), 0, 2 * length) == whole
    assert len(list(stream.rglob("train-*.jsonl"))) == FILES


def test_a_file_that_somebody_reads_or_that_was_downloaded_stays(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    publish(hub)
    shards = remote_shards(HubId("hf", "dataset", "org/set"), "data")
    cache = tmp_path / "cache"
    with held_shard(shards.id, shards.files[1], "data"):
        read = fetch_shard(shards.id, shards.files[1], "data")
        for file in shards.files[2:]:
            with held_shard(shards.id, file, "data"):
                fetch_shard(shards.id, file, "data")
        removed = trim(cache, 0)
        assert read.is_file()
    assert sorted(path.name for path in removed) == ["train-00002.jsonl", "train-00003.jsonl"]
    assert trim(cache, 10**6) == []
    assert [path.name for path in trim(cache, 0)] == ["train-00001.jsonl"]
    full = fetch(shards.id, "data").folder
    hub.requests.clear()
    for file in shards.files:
        with held_shard(shards.id, file, "data"):
            assert full in fetch_shard(shards.id, file, "data", keep_bytes=0).parents
    assert trim(cache, 0) == hub.requests == []


def test_an_epoch_has_every_sample_once_and_the_next_another_order(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    publish(hub)
    rows = streamed(tmp_path / "index")
    length = epoch_of(rows)
    first, second = ids(rows, 0, length), ids(rows, length, 2 * length)
    everything = sorted(f"{number}-{at}" for number in range(FILES) for at in range(SAMPLES))
    assert sorted(one for row in first for one in row) == everything
    assert sorted(one for row in second for one in row) == everything
    assert first != second
    assert ids(streamed(tmp_path / "index", shuffle=False), 0, 1)[0][0].startswith("0-")
    assert ids(streamed(tmp_path / "other", seed=4), 0, length) != first


def test_rows_do_not_depend_on_processes_on_batches_or_on_what_was_read_before(
    hub: HubServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(hub)
    rows = streamed(tmp_path / "index")
    length = epoch_of(rows)
    expected = ids(rows, 0, 2 * length)
    fresh = streamed(None)  # without a folder for counts, backwards
    assert [fresh.batch([row]).sample_ids for row in reversed(range(length))] == expected[:length][::-1]
    copy = pickle.loads(pickle.dumps(rows))  # noqa: S301 - as a worker process gets it
    together = copy.batch(range(length))  # rows of all files in one micro-batch
    assert together.sample_ids == tuple(one for row in expected[:length] for one in row)
    assert [row for row, _ in together.rows] == list(range(length))
    assert together.seeds == tuple(rows.batch([row]).seeds[0] for row in range(length))
    # Elsewhere, with the counts that the run has kept, only the files that are needed are fetched.
    settle(rows)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "another cache"))
    hub.requests.clear()
    resumed = streamed(tmp_path / "index")
    assert resumed.batch([length - 1]).sample_ids == expected[length - 1]
    settle(resumed)
    last, following = rows._order(0)[-1], rows._order(1)[0]
    assert {int(name[6:11]) for name in hub.downloads()} == {last, following}
    assert resumed.identity == rows.identity != streamed(None, length=13).identity


def test_samples_that_are_left_out_and_those_that_crash_are_told_by_file(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    repository = publish(hub)
    for number in range(FILES):
        repository.files[f"data/train-{number:05d}.jsonl"] += b'{"id": "bad", "messages": 3}\n'
    rows = streamed(tmp_path / "index", max_bad_share=1)
    length = epoch_of(rows)
    problems = [one for row in range(2 * length) for one in rows.batch([row]).problems]
    assert [(bad.id, bad.code) for bad in problems] == [("bad", "data.no-turns")] * FILES
    noted: list[int] = []
    rows.guarded(range(length), {}, noted.append)
    assert len(set(noted)) == len(noted) == FILES * SAMPLES
    lost = rows.guarded(range(length), {noted[7]: "it crashed"}, noted.append)
    assert [bad.reason for bad in lost.problems if bad.code == "data.item-ends-worker"] == ["it crashed"]
    name = lost.problems[-1][0] if lost.problems[-1][1] == "it crashed" else "0-0"
    assert [bad.id for bad in rows.without({name: "asked"}).batch(range(length)).problems].count(name) == 1


def test_a_file_without_a_usable_sample_is_passed_over(
    hub: HubServer,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    repository = publish(hub)
    repository.files["data/train-00001.jsonl"] = b'{"id": "bad", "messages": 3}\n'
    rows = streamed(tmp_path / "index")
    sample_ids = [one for row in ids(rows, 0, epoch_of(rows)) for one in row]
    assert sorted(sample_ids) == sorted(f"{number}-{at}" for number in (0, 2, 3) for at in range(SAMPLES))
    assert "is skipped: none of the 1 samples is usable" in caplog.text
    with raises("data.bad-sample"):
        epoch_of(streamed(None, on_bad_sample="fail"))
    for number in range(FILES):
        repository.files[f"data/train-{number:05d}.jsonl"] = b'{"id": "bad", "messages": 3}\n'
    with raises("data.no-usable-sample"):
        streamed(tmp_path / "index", max_bad_share=1).batch([0])


def test_a_stream_ends_where_too_many_samples_of_its_files_so_far_are_bad(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    repository = publish(hub)
    repository.files["data/train-00003.jsonl"] += b'{"id": "bad", "messages": 3}\n' * 3
    for folder in (tmp_path / "index", None):
        rows = streamed(folder, shuffle=False)
        length = epoch_of(streamed(tmp_path / "another", shuffle=False, max_bad_share=1))
        rows.batch(range(length // 2))
        with raises("data.too-many-bad-samples") as raised:
            rows.batch(range(length))
        assert "tessera data doctor" in str(raised.value.fix)
    with raises("data.too-many-bad-samples"):  # what is known of the files holds after a resume
        streamed(tmp_path / "index", shuffle=False).batch(range(length))


def test_a_shard_is_verified_and_asked_for_again(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    repository = publish(hub)
    shards = remote_shards(HubId("hf", "dataset", "org/set"), "data")
    assert [file.name for file in shards.files] == [f"data/train-{number:05d}.jsonl" for number in range(FILES)]
    repository.faults["data/train-00001.jsonl"] = "altered"
    with raises("hub.bytes-differ"):
        fetch_shard(shards.id, shards.files[1], "data", waits=(0.0,))
    assert "next attempt in" in capsys.readouterr().err
    repository.faults.clear()
    assert fetch_shard(shards.id, shards.files[1], "data").read_bytes() == rows_of_file(1)
    hub.requests.clear()
    assert fetch_shard(shards.id, shards.files[1], "data").is_file()
    assert remote_shards(shards.id, "data") == shards  # a commit is listed once
    assert hub.requests == []


def test_a_shard_that_the_hub_refuses_is_not_asked_for_again(
    hub: HubServer,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    repository = publish(hub)
    shards = remote_shards(HubId("hf", "dataset", "org/set"), "data")
    repository.gated = True
    with raises("hub.terms-not-accepted"):
        fetch_shard(shards.id, shards.files[1], "data")
    repository.gated = False
    repository.faults["data/train-00001.jsonl"] = "gone"
    with raises("hub.no-such-files"):
        fetch_shard(shards.id, shards.files[1], "data")
    assert "next attempt in" not in capsys.readouterr().err


def test_off_line_what_is_there_serves_and_what_is_not_is_named(
    hub: HubServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(hub)
    path = str(with_stream({"train": [{"path": "hf://datasets/org/set"}]}).data.train[0].path)
    assert "@" in path
    rows = streamed(tmp_path / "index", path)
    expected = rows.batch([0]).sample_ids
    settle(rows)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert settle(streamed(tmp_path / "index", path)).batch([0]).sample_ids == expected
    with raises("hub.not-reachable", "HF_HUB_OFFLINE"):
        fetch_shard(rows.shards[0].id, RemoteFile("data/none.jsonl", 3), "data")  # type: ignore[attr-defined]
    with raises("hub.not-reachable"):
        streamed(None, "hf://datasets/org/other")


def with_stream(data: dict[str, Any]) -> Any:
    recipe = {"model": {"family": "qwen2_vl"}, "train": {"steps": 1}, "data": {"stream": True, **data}}
    return with_local_folders(load_config(recipe))


def test_files_of_this_machine_are_streamed_too(tmp_path: Path) -> None:
    for number in range(FILES):
        (tmp_path / f"part-{number}.jsonl").write_bytes(rows_of_file(number))
    rows = streamed(tmp_path / "index", str(tmp_path / "part-*.jsonl"))
    sample_ids = ids(rows, 0, epoch_of(rows))
    assert len([one for row in sample_ids for one in row]) == FILES * SAMPLES
    (tmp_path / "part-0.jsonl").write_bytes(rows_of_file(0, samples=2))
    assert streamed(None, str(tmp_path / "part-*.jsonl")).identity != rows.identity


def test_a_file_that_changes_during_a_run_is_told_though_it_has_as_many_rows(tmp_path: Path) -> None:
    for number in range(FILES):
        (tmp_path / f"{number}.jsonl").write_bytes(rows_of_file(number))
    rows = streamed(tmp_path / "index", str(tmp_path / "*.jsonl"), shuffle=False)
    rows.batch([0])
    settle(rows)
    (tmp_path / "3.jsonl").write_bytes(rows_of_file(4))  # of the same size
    with raises("data.file-changed", "3.jsonl"):
        rows.without({}).batch([rows._count(0) * 3])


def test_what_cannot_be_streamed_is_refused(hub: HubServer, tmp_path: Path) -> None:  # noqa: F811
    publish(hub)
    hub.add("datasets/org/pictures", {"train.jsonl": rows_of_file(0), "a.png": b"png"})
    path = "hf://datasets/org/set"
    for source, said in (
        ({"path": path, "weight": 2.0}, "data.stream-count-unknown"),
        ({"path": path, "max_samples": 5}, "data.stream-count-unknown max_samples"),
        ({"path": "hf://datasets/org/pictures"}, "hub.media-not-streamable"),
        ({"path": str(tmp_path)}, "data.stream-folder"),
    ):
        with raises(said):
            streamed(None, train=[source])
    section = build(DataSection, {"train": [{"path": path}], "stream": True}, "here")
    with raises("data.stream-lengths-unknown", "data.stream=false"):
        chat_rows(RowRequest(section, "train", LetterProcessor(), 0, step=StepSize(4, 4, 1)))
    with raises("recipe.wrong-value"):
        build(DataSection, {"kind": "generation", "stream": True}, "here")


@pytest.fixture
def recipe(hub: HubServer, tmp_path: Path) -> dict[str, Any]:  # noqa: F811
    data = write_chat_set(tmp_path / "chat", samples=9)
    lines = [line for line in (data / "train.jsonl").read_bytes().splitlines(True) if b"pictures" not in line]
    files = {f"train-{number}.jsonl": b"".join(lines) for number in range(3)}
    hub.add("datasets/org/chat", files)
    recipe_of_run = chat_recipe(data, tmp_path / "runs", steps=6)
    recipe_of_run["data"] |= {"train": [{"path": "hf://datasets/org/chat"}], "eval": [], "stream": True, "length": 96}
    recipe_of_run["train"] |= {"global_batch": 2}
    return recipe_of_run


@pytest.mark.slow
def test_a_streamed_run_that_was_stopped_goes_on_as_if_it_had_not_been(recipe: dict[str, Any], tmp_path: Path) -> None:
    whole = tessera.train(recipe)
    part = tessera.train({**recipe, "out": str(tmp_path / "stopped")}, {"train.steps": 2})
    saved = load_config(part.folder / "config.yaml").data.train[0]
    assert "@" in str(saved.path)
    again = tessera.resume(part.folder, {"train.steps": 6})
    assert [row["loss"] for row in again.metrics] == [row["loss"] for row in whole.metrics]
    assert "has changed" not in (part.folder / "logs/rank-00000.log").read_text()
    workers = tessera.train({**recipe, "out": str(tmp_path / "workers")}, {"data.workers": 2})
    assert [row["loss"] for row in workers.metrics] == [row["loss"] for row in whole.metrics]
    small = tessera.train({**recipe, "out": str(tmp_path / "small")}, {"data.stream_cache_gib": 1e-9, "train.steps": 4})
    trim(tmp_path / "cache", 0)
    again = tessera.resume(small.folder, {"train.steps": 6})
    assert [row["loss"] for row in again.metrics] == [row["loss"] for row in whole.metrics]
    with pytest.raises(TesseraError, match="epochs"):
        tessera.train({**recipe, "out": str(tmp_path / "epochs")}, {"train.steps": None, "train.epochs": 1})
