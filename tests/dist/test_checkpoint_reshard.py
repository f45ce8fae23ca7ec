"""A checkpoint knows nothing of the layout that wrote it; a failure of one rank is a failure of all, at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tessera.checkpoint import stored
from tessera.checkpoint.files import RecordedFile, read_box
from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.manager import CheckpointManager
from tessera.checkpoint.state import model_tensors, tied_names, training_tensors
from tessera.checkpoint.storage import read_table
from tessera.checkpoint.weights import TensorSource, fill
from tessera.errors import TesseraError
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Concat, Identity
from tests.dist.spawn import RankError, run_ranks
from tests.toys.save_folder import save_folder


class Net(nn.Module):
    """Sizes that no number of ranks divides, a vector shorter than the world, a buffer and a tied weight."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("seen", torch.arange(5) + seed)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale.sum()
        return self.head(x)


def build(world: int, seed: int, replicate: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed)
    if world > 1:
        if replicate > 1:
            mesh = init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (world,))
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1, foreach=True)


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        tokens = (torch.arange(8) * 5 + step) % 13  # the same on every rank, so that the layout does not matter
        torch.nn.functional.cross_entropy(net(tokens), tokens.roll(1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in tensors.items()}


def same(first: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return first.keys() == right.keys() and all(torch.equal(first[name], right[name]) for name in first)


def pass_on(rank: int, world: int, folder: Path, step: int, replicate: int) -> dict[str, list[float]]:
    """Loads what the last layout saved and saves it again in this layout."""
    net, optimizer = build(world, seed=step, replicate=replicate)
    if step == 0:
        train(net, optimizer, 3)
    tensors = training_tensors(net, optimizer)
    manager = CheckpointManager(folder, keep=9)
    if step > 0:
        resumed = manager.resume(tensors)
        assert resumed == (step - 1, {"word": f"by {step - 1}"})
    manager.save(step, tensors, {"word": f"by {step}"}, "a: 1\n")
    return {name: tensor.double().flatten().tolist() for name, tensor in whole(tensors).items()}


def test_every_layout_reads_every_other(tmp_path: Path) -> None:
    seen = []
    for step, (world, replicate) in enumerate([(1, 1), (2, 1), (4, 2), (4, 1), (1, 1)]):
        results = run_ranks(pass_on, world, tmp_path, step, replicate)
        assert all(result == results[0] for result in results)
        seen.append(results[0])
    assert "optim.embed.weight.exp_avg" in seen[0]
    assert any(value != 0 for value in seen[0]["optim.embed.weight.exp_avg"])
    assert all(values == seen[0] for values in seen)
    shards = sorted(path.name for path in (tmp_path / "step-00000003").glob("shard-*"))
    assert shards == [f"shard-{rank:05d}.safetensors" for rank in range(4)]
    # HSDP holds two copies, each in two parts; every part is written once.
    table = read_table(tmp_path / "step-00000002").state_dict_metadata
    assert [list(chunk.sizes) for chunk in table["model.embed.weight"].chunks] == [[7, 6], [6, 6]]


def resume_midway(rank: int, world: int, folder: Path) -> bool:
    straight, optimizer = build(world, seed=1)
    train(straight, optimizer, 2)
    CheckpointManager(folder, 1).save(2, training_tensors(straight, optimizer), {}, "")
    train(straight, optimizer, 2)
    again, its_optimizer = build(world, seed=7)
    tensors = training_tensors(again, its_optimizer)
    CheckpointManager(folder, 1).resume(tensors)
    train(again, its_optimizer, 2)
    return same(whole(training_tensors(straight, optimizer)), whole(tensors))


def test_same_layout_resumes_bitwise(tmp_path: Path) -> None:
    assert run_ranks(resume_midway, 2, tmp_path) == [True, True]


def one_rank_fails(rank: int, world: int, folder: Path) -> str:
    net, optimizer = build(world, seed=1)
    tensors = training_tensors(net, optimizer)
    CheckpointManager(folder, 2).save(1, tensors, {}, "")

    def full(point: str) -> None:
        if rank == 1 and point == "fsync shard-00001.safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        CheckpointManager(folder, 2, fault=full).save(2, tensors, {}, "")
    except TesseraError as error:
        assert CheckpointManager(folder, 2).resume(tensors) == (1, {})
        return str(error)
    return "no error"


def test_disk_full_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(one_rank_fails, 2, tmp_path, timeout=60)
    assert first == second
    assert "rank 1: No space left on device" in first
    assert "bytes) are free" in first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def damaged_share(rank: int, world: int, folder: Path) -> list[object]:
    net, optimizer = build(world, seed=1)
    tensors = training_tensors(net, optimizer)
    manager = CheckpointManager(folder, 3)
    manager.save(1, tensors, {"n": 1}, "")
    newest = manager.save(2, tensors, {"n": 2}, "")
    if rank == 0:
        file = newest / "shard-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    torch.distributed.barrier()
    resumed = manager.resume(tensors)
    assert resumed is not None
    return [resumed[0], resumed[1]]


def test_ranks_agree_on_the_last_good_one(tmp_path: Path) -> None:
    assert run_ranks(damaged_share, 2, tmp_path) == [[1, {"n": 1}]] * 2


def bytes_of_a_resume(rank: int, world: int, folder: Path) -> tuple[int, int]:
    """Bytes that this rank reads in order and hashes, and bytes of slices of files that the other rank hashes."""
    net, optimizer = build(world, seed=1)
    tensors = training_tensors(net, optimizer)
    CheckpointManager(folder, 1).save(1, tensors, {}, "")
    torch.distributed.barrier()
    hashed, sliced = [0], [0]

    class Counted(RecordedFile):
        def read(self, count: int) -> memoryview:
            hashed[0] += count * self._path.name.startswith("shard")
            return super().read(count)

    def counted(*arguments: Any) -> Tensor:
        box = read_box(*arguments)
        sliced[0] += box.nbytes
        return box

    with mock.patch.object(stored, "RecordedFile", Counted), mock.patch.object(stored, "read_box", counted):
        assert CheckpointManager(folder, 1).resume(tensors) == (1, {})
    return hashed[0], sliced[0]


def test_in_the_same_layout_ranks_read_each_shard_once_together(tmp_path: Path) -> None:
    counts = run_ranks(bytes_of_a_resume, 2, tmp_path)
    shards = [path.stat().st_size for path in sorted((tmp_path / "step-00000001").glob("shard-*"))]
    assert [hashed for hashed, _ in counts] == shards
    replicated = 5 * 8 + 7 * 4  # the buffer, and the step of each parameter: one rank stores them
    assert sum(sliced for _, sliced in counts) <= replicated


def boxes_read(rank: int, world: int) -> list[list[int]]:
    net, _ = build(world, seed=1)
    boxes: list[list[int]] = []

    def read(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        boxes.append([*offsets, *sizes])
        return torch.arange(13.0 * 6).reshape(13, 6)[offsets[0] : offsets[0] + sizes[0]]

    fill(net.embed.weight, TensorSource("embed.weight", ("e",), Identity()), {"e": (13, 6)}, read, "here")
    assert torch.equal(whole({"w": net.embed.weight})["w"], torch.arange(13.0 * 6).reshape(13, 6))
    return boxes


def test_a_rank_reads_only_what_it_holds() -> None:
    assert run_ranks(boxes_read, 4) == [[[0, 0, 4, 6]], [[4, 0, 4, 6]], [[8, 0, 4, 6]], [[12, 0, 1, 6]]]


MAP = WeightMap(
    (
        Rule("embed.weight", "model.embed_tokens.weight"),
        Rule("head.weight", "lm_head.weight"),
        Rule("layers.{i}.weight", ("model.l.{i}.a.weight", "model.l.{i}.b.weight"), Concat((2, 4))),
        Rule("layers.{i}.bias", "model.l.{i}.bias"),
        Rule("scale", "model.scale"),
        Rule("seen", "model.seen"),
    )
)


def export_and_back(rank: int, world: int, folder: Path) -> bool:
    net, _ = build(world, seed=3)
    save_folder(folder / f"out-{world}", model_tensors(net), MAP, {"model_type": "net"}, shard_bytes=300)
    other, _ = build(world, seed=4)
    load_folder(folder / f"out-{world}", model_tensors(other), MAP, tied=tied_names(other))
    return same(whole(model_tensors(net)), whole(model_tensors(other)))


def test_exports_are_the_same_from_any_layout(tmp_path: Path) -> None:
    assert run_ranks(export_and_back, 1, tmp_path) == [True]
    assert run_ranks(export_and_back, 4, tmp_path) == [True] * 4
    files = sorted(path.name for path in (tmp_path / "out-1").glob("*.safetensors"))
    assert len(files) > 1
    for name in files:
        assert same(load_file(tmp_path / "out-1" / name), load_file(tmp_path / "out-4" / name))


def export_without_room(rank: int, world: int, folder: Path) -> str:
    net, _ = build(world, seed=3)

    def full(point: str) -> None:
        if point == "write scale":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(TesseraError) as caught:
        save_folder(folder / "out", model_tensors(net), MAP, {}, fault=full)
    return str(caught.value)


def test_a_failed_export_leaves_nothing_and_hangs_nobody(tmp_path: Path) -> None:
    first, second = run_ranks(export_without_room, 2, tmp_path, timeout=60)
    assert first == second
    assert "No space left on device" in first
    assert list(tmp_path.iterdir()) == []


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("a word of rank one")
    torch.distributed.barrier()


def test_the_helper_shows_the_error_of_a_rank() -> None:
    with pytest.raises(RankError, match=r"rank 1 failed(.|\n)*a word of rank one"):
        run_ranks(fail_on_one, 2, timeout=60)
