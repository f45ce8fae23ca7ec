"""A checkpoint exists wholly or not at all, whatever kills the writer and whatever happens to its bytes."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera.checkpoint.manager import CheckpointManager
from tessera.errors import TesseraError
from tessera.inference.weight_source import newest_names
from tests.dist.spawn import fork_context
from tests.errors import raises

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool)


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = {f"model.{str(t)[6:]}": torch.randint(0, 2, (3, 5), generator=generator).to(t) for t in TYPES}
    values["model.weight"] = torch.randn(7, 4, generator=generator).requires_grad_()
    values["model.strided"] = torch.randn(4, 7, generator=generator).t()
    values["model.empty"] = torch.zeros(0, 3)
    values["optim.weight.step"] = torch.tensor(float(seed))
    values["model.odd"] = torch.tensor([float("nan"), -0.0, float("inf")])
    return values


def blank() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors(0).items()}


def same_bits(first: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> bytes:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

    return first.keys() == right.keys() and all(bits(first[name]) == bits(right[name]) for name in first)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint whose bytes are all as written."""
    manager = CheckpointManager(folder, 1)
    manager.load_newest({})
    return manager.newest


def save(folder: Path, step: int, keep: int = 2, fault: Callable[[str], None] = lambda point: None) -> Path:
    return CheckpointManager(folder, keep, fault=fault).save(
        step, tensors(step), {"rows": step * 10}, f"step: {step}\n"
    )


def test_round_trip_is_bitwise(tmp_path: Path) -> None:
    state = {"rng": [1, 2**62], "loss": 0.1 + 0.2, "best": float("inf"), "callbacks": {"a": {"on": True, "x": None}}}
    manager = CheckpointManager(tmp_path / "run", 1)
    path = manager.save(7, tensors(7), state, "model: größer\n")
    assert path == tmp_path / "run" / "step-00000007"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.yaml",
        "manifest.json",
        "shard-00000.safetensors",
        "state.json",
        "tensors.json",
    ]
    assert (path / "config.yaml").read_text(encoding="utf-8") == "model: größer\n"
    assert (tmp_path / "run" / "latest").read_text() == "step-00000007\n"
    assert manager.report is not None
    assert manager.report.bytes > 300
    into = blank()
    assert CheckpointManager(tmp_path / "run", 1).resume(into) == (7, state)
    assert same_bits(into, tensors(7))
    assert newest(tmp_path / "run") == path


def test_no_checkpoint_is_no_error(tmp_path: Path) -> None:
    assert CheckpointManager(tmp_path / "none", 1).resume(blank()) is None
    assert newest(tmp_path / "none") is None


def test_the_checkpoint_that_is_protected_no_longer_is_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, 1)
    save(tmp_path, 1, keep=9)
    save(tmp_path, 2, keep=9)
    (tmp_path / "step-00000009").mkdir()  # without a manifest: it is no newest one
    manager.protect(1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000001", "step-00000002"]
    manager.protect(2)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]


def test_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000003", "step-00000004"]


def test_after_going_back_the_newly_saved_is_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 15):
        save(tmp_path, step, keep=2)
    into = blank()
    resumed = CheckpointManager(tmp_path, 2).resume(into)
    assert resumed is not None
    assert resumed[0] == 15
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-00000015", "step-00000020"]


def test_the_same_step_again_replaces_without_a_gap(tmp_path: Path) -> None:
    first = save(tmp_path, 5)
    second = CheckpointManager(tmp_path, 2).save(5, tensors(9), {"again": 1}, "")
    assert not first.exists()
    assert second.name == "step-00000005.2"
    assert CheckpointManager(tmp_path, 2).resume(blank()) == (5, {"again": 1})


# ---------------------------------------------------------------------------------------------- killed while saving


def in_child(work: Callable[..., None], *args: object) -> int:
    """How a process that runs `work` (a module's function) ended.

    It comes from a server without threads: a fork of the test process, with the threads that torch started in it, may
    crash before it comes to the point.
    """
    child = fork_context().Process(target=work, args=args)
    child.start()
    child.join()
    assert child.exitcode is not None
    return int(child.exitcode)


def save_and_die(folder: Path, number: int) -> None:
    """Killed at this point of the save."""
    remaining = iter(range(number, -1, -1))

    def die(point: str) -> None:
        if next(remaining) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    save(folder, 5, fault=die)


def points_of_a_save(folder: Path) -> list[str]:
    seen: list[str] = []
    save(folder, 1)
    save(folder, 2)
    save(folder, 3, fault=seen.append)
    return seen


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_point_a_whole_checkpoint_remains(every: int, tmp_path: Path) -> None:
    points = points_of_a_save(tmp_path / "dry")
    assert len(points) > 40
    assert len(set(points)) > 35
    outcomes = set()
    for number in range(0, len(points), every):
        folder = tmp_path / f"kill-{number}"
        shutil.copytree(tmp_path / "dry", folder)
        shutil.rmtree(folder / "step-00000002")
        save(folder, 4)

        assert in_child(save_and_die, folder, number) == -signal.SIGKILL
        into = blank()
        resumed = CheckpointManager(folder, 2).resume(into)
        assert resumed is not None, points[number]
        step, state = resumed
        assert step in (4, 5), points[number]
        assert state == {"rows": step * 10}
        assert same_bits(into, tensors(step)), points[number]
        outcomes.add(step)
        assert not list(folder.glob(".*")), "left-overs are cleaned at the next start"
        save(folder, 6)
        assert len(list(folder.glob("step-*"))) == 2
        shutil.rmtree(folder)
    assert outcomes == {4, 5}


# ---------------------------------------------------------------------------------------------- no room


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def test_old_checkpoints_go_first_where_that_makes_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=9)
    each = sum(path.stat().st_size for path in (tmp_path / "step-00000001").iterdir())
    room = 4 * each  # of a disk that holds four

    def free(folder: Path) -> int:
        return room - sum(path.stat().st_size for path in folder.glob("step-*/*"))

    manager = CheckpointManager(tmp_path, 9, free=free)
    manager.save(5, tensors(5), {"rows": 50}, "")
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004", "step-00000005"]
    assert "removing step-00000001 early" in caplog.text
    room = each  # it would not help: nothing is removed for it
    manager.save(6, tensors(6), {"rows": 60}, "")
    assert len(names(tmp_path)) == 5


def test_the_newest_good_checkpoint_stays_whatever_room_it_takes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    flip(tmp_path / "step-00000003" / "shard-00000.safetensors")
    calls: list[str] = []

    def full(point: str) -> None:
        if point == "open shard-00000.safetensors":
            calls.append(point)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with raises("output.write-failed"):
        save(tmp_path, 4, keep=9, fault=full)
    assert len(calls) == 2, "tried again after something was removed"
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert CheckpointManager(tmp_path, 9).resume(blank()) == (2, {"rows": 20})
    with raises("output.write-failed"):
        save(tmp_path, 4, keep=9, fault=full)
    assert len(calls) == 3, "nothing more to remove"


def test_a_save_that_meets_a_full_quota_is_tried_again(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    remaining = [1]

    def full_once(point: str) -> None:
        if point == "flush shard-00000.safetensors" and remaining[0]:
            remaining[0] -= 1
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    save(tmp_path, 3, fault=full_once)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert not list(tmp_path.glob(".*"))


# ---------------------------------------------------------------------------------------------- damaged afterwards


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def swap(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000001" / path.name, path)


FILES = ("shard-00000.safetensors", "tensors.json", "state.json", "config.yaml", "manifest.json")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [flip, truncate, swap, Path.unlink])
def test_damage_is_found_and_the_older_one_used(
    tmp_path: Path, damage: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    if damage is swap and name == "tensors.json":
        (newest.parent / "step-00000001" / name).write_text("{}")  # the tables of both steps are alike: use another
    before = (newest / name).read_bytes()
    damage(newest / name)
    assert not (newest / name).exists() or (newest / name).read_bytes() != before
    if damage is swap and name == "tensors.json":
        (newest.parent / "step-00000001" / name).write_bytes(before)
    into = blank()
    with caplog.at_level(logging.WARNING, logger="tessera"):
        assert CheckpointManager(tmp_path, 2).resume(into) == (1, {"rows": 10})
    assert same_bits(into, tensors(1))
    assert "step-00000002" in caplog.text
    with raises("checkpoint.damaged"):
        CheckpointManager(tmp_path, 2).load(newest, into)


def test_every_single_bit_of_the_manifest_counts(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "manifest.json"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(TesseraError):
            newest(tmp_path)
    path.write_bytes(whole)
    assert newest(tmp_path) == path.parent


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_at_any_place_is_found(tmp_path: Path, name: str) -> None:
    """Also in a header, in a tensor that is not asked for and between tensors; `load` asks for one tensor alone."""
    path = save(tmp_path, 1) / name
    data = path.read_bytes()
    for position in {0, 7, *range(0, len(data), max(1, len(data) // 25)), len(data) - 1}:
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with raises("checkpoint.damaged"):
            CheckpointManager(tmp_path, 1).load(path.parent, {"model.weight": torch.zeros(7, 4)})
    path.write_bytes(data)
    CheckpointManager(tmp_path, 1).load(path.parent, {"model.weight": torch.zeros(7, 4)})


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_resume_reads_every_byte_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System calls are counted, and nothing is mapped: SHA-256 and tensors come from the same bytes."""
    large = {
        "model.a": torch.randn(3, 400_000),
        "model.b": torch.randn(900_000).bfloat16(),
        "optim.step": torch.ones(()),
    }
    path = CheckpointManager(tmp_path, 1).save(1, large, {}, "")
    size = sum(file.stat().st_size for file in path.iterdir())
    monkeypatch.setattr("tessera.checkpoint.stored.CHUNK_BYTES", 1 << 20)
    monkeypatch.setattr("tessera.checkpoint.stored.read_box", None)  # it maps the file
    into = {name: torch.zeros_like(tensor) for name, tensor in large.items()}
    before = bytes_read()
    assert CheckpointManager(tmp_path, 1).resume(into) == (1, {})
    assert size <= bytes_read() - before < size + 20_000  # manifests and headers are read more than once
    assert same_bits(into, large)


def test_names_are_listed_without_reading_the_tensors(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints", 2)
    manager.save(1, {"model.a": torch.zeros(100_000), "optim.step": torch.ones(())}, {}, "")
    newest = manager.save(2, {"model.b": torch.zeros(100_000)}, {}, "")
    before = bytes_read()
    assert newest_names(tmp_path) == newest_names(newest) == ["b"]
    assert bytes_read() - before < 100_000
    flip(newest / "tensors.json")
    assert newest_names(tmp_path) == ["a"]


def test_only_damaged_ones_is_an_error(tmp_path: Path) -> None:
    flip(save(tmp_path, 1) / "shard-00000.safetensors")
    with raises("checkpoint.all-damaged"):
        CheckpointManager(tmp_path, 1).resume(blank())


def test_a_checkpoint_of_a_newer_tessera_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    older = save(folder, 1)
    with monkeypatch.context() as patch:
        patch.setattr("tessera.checkpoint.files.VERSION", 99)
        newer = save(folder, 2)
    manager = CheckpointManager(folder, 1)
    uses: list[Callable[[], object]] = [
        lambda: manager.resume(blank()),
        lambda: manager.load_newest(blank()),
        lambda: manager.load(newer, blank()),
        lambda: newest_names(tmp_path),  # the recipe of the newest checkpoint is looked up in the same way
    ]
    for use in uses:
        with raises("checkpoint.newer-format", newer.name):
            use()
    manager.load(older, blank())  # named explicitly
    saved = [save(folder, step, keep=1) for step in (2, 3)]
    manager.protect(3)
    assert set(folder.glob("step-*")) == {newer, saved[1]}


# ---------------------------------------------------------------------------------------------- cannot be written


def save_with_little_room(folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with pytest.raises(TesseraError, match=r"File too large(.|\n)*1200000 bytes"):
        CheckpointManager(folder, 1).save(2, {"model.large": torch.ones(300_000)}, {}, "")
    os._exit(42)


def test_a_real_write_error_leaves_everything_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert in_child(save_with_little_room, tmp_path) == 42
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert not list(tmp_path.glob(".staging*"))


def test_an_error_at_any_point_before_publishing_leaves_the_old(tmp_path: Path) -> None:
    points = points_of_a_save(tmp_path / "dry")
    published = points.index("renamed .staging-step-00000003")
    for number in range(0, published, 3):

        def fail(point: str, remaining: list[int] = [number]) -> None:  # noqa: B006 - a counter of this save alone
            remaining[0] -= 1
            if remaining[0] == -1:
                raise OSError(5, "Input/output error")

        folder = tmp_path / str(number)
        save(folder, 1)
        with raises("output.write-failed", "Input/output"):
            save(folder, 2, fault=fail)
        assert sorted(p.name for p in folder.iterdir()) == ["latest", "step-00000001"]
        assert (folder / "latest").read_text() == "step-00000001\n"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with raises("output.write-failed"):
        save(tmp_path / "file" / "checkpoints", 1)


# ---------------------------------------------------------------------------------------------- misfits


def test_a_missing_tensor_is_named_with_the_nearest(tmp_path: Path) -> None:
    save(tmp_path, 1)
    wanted = {"model.wieght": torch.zeros(7, 4), "model.weight": torch.zeros(7, 5)}
    with pytest.raises(TesseraError) as caught:
        CheckpointManager(tmp_path, 1).resume(wanted)
    assert "model.wieght is not in the checkpoint (it has model.weight)" in str(caught.value)
    assert "model.weight has shape [7, 5] here, [7, 4] in the checkpoint" in str(caught.value)


def test_a_part_can_be_loaded_and_cast(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    part = {"model.weight": torch.zeros(7, 4, dtype=torch.bfloat16)}
    CheckpointManager(tmp_path, 1).load(path, part)
    assert torch.equal(part["model.weight"], tensors(1)["model.weight"].to(torch.bfloat16))


@pytest.mark.parametrize("bad", [{"a": object()}, {"a": {1: 2}}, {"a": [torch.zeros(1)]}])
def test_state_that_json_would_lose_is_refused(tmp_path: Path, bad: dict[str, object]) -> None:
    with raises("checkpoint.state-not-json"):
        CheckpointManager(tmp_path, 1).save(1, tensors(1), bad, "")
    assert not list(tmp_path.iterdir())


def test_other_things_than_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="only tensors"):
        CheckpointManager(tmp_path, 1).save(1, {"model.x": 3}, {}, "")  # type: ignore[dict-item]
