"""Files of torch.save are read and written without a pickle being executed."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
import time
import zipfile
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tessera.checkpoint.files import read_tensors
from tessera.checkpoint.legacy.dcp import DcpTensor, plan_dcp, read_dcp
from tessera.checkpoint.legacy.pickles import Described
from tessera.checkpoint.legacy.torch_files import StoredTensor, read_torch_file
from tessera.checkpoint.legacy.torch_plan import plan_torch_file
from tessera.checkpoint.parts import check_cover
from tessera.checkpoint.writer import PlannedFolder
from tessera.errors import TesseraError
from tessera.weights.file_plan import FilePlan, FolderPlan, Place, PlannedTensor
from tessera.weights.rows import TensorRows
from tests.errors import raises

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def content() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors: dict[str, Any] = {str(dtype): (torch.rand(3, 5) * 9).to(dtype) for dtype in DTYPES}
    tensors |= {
        "transposed": base.t(),
        "slice": base[1:3, ::2],
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 4),
    }
    tensors["parameter"] = torch.nn.Parameter(torch.randn(2, 2))
    return tensors


def equal(stored: Any, expected: torch.Tensor) -> bool:
    assert isinstance(stored, StoredTensor)
    read = stored.read()
    return read.dtype == expected.dtype and read.shape == expected.shape and torch.equal(read, expected.detach())


def plans_of(tensors: dict[str, torch.Tensor]) -> dict[str, PlannedTensor]:
    return {name: PlannedTensor(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def write(folder: Path, plan: FolderPlan, tensors: dict[str, torch.Tensor]) -> None:
    with PlannedFolder(folder, plan) as files:
        for name in reversed(tensors):  # places are known: any order will do
            files.put(name, TensorRows.of(tensors[name]))


def torch_file(name: str, content: Any, tensors: Any) -> FolderPlan:
    planned = plan_torch_file(content)
    places = {key: [Place(name, t.offset, 0, t.checksums)] for key, t in zip(tensors, planned.tensors, strict=True)}
    return FolderPlan({name: FilePlan(planned.end, planned.pieces)}, places)


def test_every_kind_of_tensor_is_read(tmp_path: Path) -> None:
    state = content()
    torch.save({"model": state, "iteration": 12, "names": ["a", ("b", None)]}, tmp_path / "a.pt")
    stored = read_torch_file(tmp_path / "a.pt")
    assert (stored["iteration"], stored["names"]) == (12, ["a", ("b", None)])
    assert stored["model"].keys() == state.keys()
    assert all(equal(stored["model"][name], tensor) for name, tensor in state.items())


def test_a_module_s_own_state_and_an_eight_bit_type_are_read(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4))
    small = torch.randn(4, 4).to(torch.float8_e4m3fn)
    torch.save(module.state_dict() | {"small": small}, tmp_path / "a.pt")
    content = read_torch_file(tmp_path / "a.pt")
    assert all(equal(content[name], tensor) for name, tensor in module.state_dict().items())
    assert torch.equal(content["small"].read().view(torch.uint8), small.view(torch.uint8))


def test_what_a_training_job_stores_beside_weights_is_described_and_not_built(tmp_path: Path) -> None:
    beside = {"args": argparse.Namespace(lr=1e-5), "rng": [np.random.get_state()[1]], "model": {"w": torch.ones(2)}}
    torch.save(beside, tmp_path / "a.pt")
    content = read_torch_file(tmp_path / "a.pt")
    assert equal(content["model"]["w"], torch.ones(2))
    assert isinstance(content["args"], Described)
    assert str(content["args"].name) == "argparse.Namespace"


class Poison:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_poisoned_file_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    canary = tmp_path / "canary"
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({"model": Poison(canary)}, protocol=protocol))
    with raises("checkpoint.forbidden-pickle"):
        read_torch_file(tmp_path / "a.pt")
    assert not canary.exists()


@pytest.mark.parametrize(
    "name", ["torch.hub\nload", "torch.jit._script\nscript", "numpy.f2py\ncompile", "builtins\neval"]
)
def test_names_that_load_or_compile_are_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02c" + name.encode() + b"\n)R.")
    with raises("checkpoint.forbidden-pickle"):
        read_torch_file(tmp_path / "a.pt")


def test_what_we_write_torch_loads(tmp_path: Path) -> None:
    tensors = {name: tensor.detach().contiguous() for name, tensor in content().items()}
    path = tmp_path / "model_optim_rng.pt"
    beside = {"checkpoint_version": 3.0, "iteration": 300, "none": None}
    write(tmp_path, torch_file(path.name, {"model": plans_of(tensors), **beside}, tensors), tensors)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None  # all checksums are right
    loaded = torch.load(path, weights_only=True)
    assert (loaded["checkpoint_version"], loaded["iteration"], loaded["none"]) == (3.0, 300, None)
    assert all(torch.equal(loaded["model"][name], tensor) for name, tensor in tensors.items())
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert torch.equal(mapped["model"]["transposed"], tensors["transposed"])
    stored = read_torch_file(path)
    assert all(equal(stored["model"][name], tensor) for name, tensor in tensors.items())


def test_files_of_more_than_4_gigabytes_are_read(tmp_path: Path) -> None:
    plans = {"a": PlannedTensor(torch.int8, (5 << 30,)), "b": PlannedTensor(torch.int8, (7,))}
    write(tmp_path, torch_file("a.pt", plans, plans), {"b": torch.arange(7, dtype=torch.int8)})  # a hole in the file
    content = read_torch_file(tmp_path / "a.pt")
    assert content["a"].shape == (5 << 30,)
    assert equal(content["b"], torch.arange(7, dtype=torch.int8))
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    assert loaded["a"].shape == (5 << 30,)
    assert torch.equal(loaded["b"], torch.arange(7, dtype=torch.int8))


def test_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("pipe.pt", "missing.pt"):
        with pytest.raises(TesseraError):
            read_torch_file(tmp_path / name)


# ---------------------------------------------------------------------------------------------- torch DCP


def test_folders_of_dcp_are_read_whole_and_in_parts(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(3, 4), "b": torch.randn(4).bfloat16(), "n": torch.tensor(3)}, "step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    content = read_dcp(tmp_path / "a")
    assert content.keys() == {"model.w", "model.b", "model.n"}
    assert all(torch.equal(content[f"model.{name}"].read(), tensor) for name, tensor in state["model"].items())


def test_stock_dcp_loads_what_we_write(tmp_path: Path) -> None:
    tensors = {"w": torch.randn(3, 4), "b": torch.randn(4).bfloat16(), "n": torch.tensor(3.0), "e": torch.empty(0, 2)}
    write(tmp_path / "a", plan_dcp(plans_of(tensors)), tensors)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert all(torch.equal(tensor.read(), tensors[name]) for name, tensor in read_dcp(tmp_path / "a").items())


def test_poisoned_metadata_is_refused(tmp_path: Path) -> None:
    write(tmp_path, plan_dcp({"w": PlannedTensor(torch.float32, (2,))}), {"w": torch.ones(2)})
    good = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": Poison(tmp_path / "canary")}))
    with raises("checkpoint.forbidden-pickle"):
        read_dcp(tmp_path)
    assert not (tmp_path / "canary").exists()
    outside = good.replace(b"X\x0c\x00\x00\x00__0_0.distcp", b"X\x0c\x00\x00\x00../__0_0.dis")
    (tmp_path / ".metadata").write_bytes(outside)
    with raises("checkpoint.dcp-metadata-unreadable"):
        read_dcp(tmp_path)


def test_boxes_of_stored_tensors_are_those_of_the_tensors(tmp_path: Path) -> None:
    state = content()
    state |= {"odd": torch.arange(60.0).reshape(3, 4, 5).permute(2, 0, 1)}
    torch.save(state, tmp_path / "a.pt")
    dcp.save({name: tensor.detach() for name, tensor in state.items()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    chance = random.Random(0)
    for stored in (read_torch_file(tmp_path / "a.pt"), read_dcp(tmp_path / "dcp")):
        for name, tensor in state.items():
            for _ in range(5):
                offsets = [chance.randrange(size) if size else 0 for size in tensor.shape]
                sizes = [chance.randint(0, size - at) for size, at in zip(tensor.shape, offsets, strict=True)]
                box = tensor.detach()[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
                read = stored[name].read(offsets, sizes)
                assert read.is_contiguous()
                assert torch.equal(read, box)


def test_a_tensor_of_several_parts_is_read_by_those_it_needs(tmp_path: Path) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    corners = [(0, 0), (0, 5), (4, 0), (4, 5)]
    pieces = {f"{a}{b}": whole[a : a + 4, b : b + 5][: 4 - (a > 0) * 2, : 5 - (b > 0) * 2] for a, b in corners}
    write(tmp_path, plan_dcp(plans_of(pieces)), pieces)
    stored = [tensor.parts[0] for tensor in read_dcp(tmp_path).values()]
    parts = tuple(replace(part, offsets=corner) for part, corner in zip(stored, corners, strict=True))
    tensor = DcpTensor("w", torch.float32, (6, 8), parts)
    assert torch.equal(tensor.read(), whole)
    assert torch.equal(tensor.read((3, 4), (2, 3)), whole[3:5, 4:7])
    without = replace(tensor, parts=(parts[0], *(replace(part, file=tmp_path / "gone") for part in parts[1:])))
    assert torch.equal(without.read((1, 2), (3, 3)), whole[1:4, 2:5])
    with raises("environment.cannot-open"):
        without.read()


def test_sizes_that_a_folder_only_claims_take_no_memory(tmp_path: Path) -> None:
    """Fuzzing found a traceback of torch here, and a storage that was read as another type than it was saved in."""
    write(tmp_path, plan_dcp({"w": PlannedTensor(torch.float32, (200,))}), {"w": torch.ones(200)})
    good = (tmp_path / ".metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(
        good.replace(b"\x8a\x02\xc8\x00", b"\x8a\x06" + (1 << 40).to_bytes(6, "little"))
    )
    with raises("checkpoint.dcp-part-differs"):
        read_dcp(tmp_path)["w"].read()
    torch.save({"a": torch.ones(4), "b": torch.ones(1, dtype=torch.float64)}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for name in old.namelist():
            new.writestr(zipfile.ZipInfo(name), old.read(name).replace(b"X\x01\0\0\x001", b"X\x01\0\0\x000"))
    with raises("checkpoint.damaged-torch-file"):
        read_torch_file(tmp_path / "b.pt")
    save_file({"a": torch.empty(0, 4)}, tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes().replace(b"[0,4]", b"[0,9223372036854775808]")
    size = int.from_bytes(data[:8], "little") + len("9223372036854775808") - 1
    (tmp_path / "a.safetensors").write_bytes(size.to_bytes(8, "little") + data[8:])
    with raises("weights.absurd-shape"):
        read_tensors(tmp_path / "a.safetensors")


def test_ordered_dictionaries_in_one_file_keep_their_own_tensors(tmp_path: Path) -> None:
    chunks = {f"model{n}": OrderedDict(w=torch.full((2,), float(n)), b=torch.full((3,), n + 0.5)) for n in range(4)}
    torch.save(chunks, tmp_path / "a.pt")
    content = read_torch_file(tmp_path / "a.pt")
    assert all(equal(content[key][name], tensor) for key, chunk in chunks.items() for name, tensor in chunk.items())


HEAD, ORDERED, SIZE = b"\x80\x02", b"ccollections\nOrderedDict\n", b"ctorch\nSize\n"
DOUBLED = b")" + b"2\x86" * 40  # a tuple of two that are the same tuple of two, and so on: 2 ** 40 leaves


def tensor_pickle(shape: list[int], stride: list[int], key: bytes = b"X\x01\0\0\x000") -> bytes:
    numbers = [b"(" + b"".join(b"\x8a\x08" + n.to_bytes(8, "little") for n in ns) + b"t" for ns in (shape, stride)]
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + key + b"X\x03\0\0\0cpuK\x10tQ"
    return HEAD + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0" + b"".join(numbers) + b"tR."


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(HEAD + b"}" + DOUBLED + b"Ns.", id="a key that takes 2 ** 40 steps to hash"),
        pytest.param(
            HEAD + b"})" + b"\x85" * 10**6 + b"Ns.",
            id="a key that overflows the stack when hashed",
            marks=pytest.mark.slow,
        ),
        pytest.param(b"\x80\x04(" + DOUBLED + b"\x91.", id="such an element of a set"),
        pytest.param(HEAD + ORDERED + b"]" + DOUBLED + b"N\x86a\x85R.", id="such a key of an ordered dictionary"),
        pytest.param(HEAD + b"}" + SIZE + DOUBLED + b"\x85RNs.", id="such a key by way of a size"),
        pytest.param(HEAD + ORDERED + b"K\x05\x85R.", id="an ordered dictionary of a number"),
        pytest.param(HEAD + SIZE + b"K\x05\x85R.", id="a size that is no list"),
        pytest.param(HEAD + b"}" + ORDERED + b")RNs.", id="a dictionary as a key"),
        pytest.param(tensor_pickle([2], [1], DOUBLED), id="a storage named by a tuple"),
        pytest.param(tensor_pickle([0, 1 << 61, 1 << 61], [0, 0, 0]), id="sizes whose product overflows"),
        pytest.param(tensor_pickle([1] * 1000, [0] * 1000), id="a thousand axes"),
    ],
)
def test_pickles_made_to_hang_or_crash_are_refused(tmp_path: Path, pickled: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/data/0", bytes(64))
    with pytest.raises(TesseraError):
        read_torch_file(tmp_path / "a.pt")


def long_number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


ONE_HASH = [number * ((1 << 61) - 1) for number in range(1, 60_001)]


@pytest.mark.parametrize(
    "pickled",
    [
        pytest.param(HEAD + b"}(" + b"".join(long_number(n) + b"N" for n in ONE_HASH) + b"u.", id="keys"),
        pytest.param(HEAD + b"}" + b"".join(long_number(n) + b"Ns" for n in ONE_HASH) + b".", id="keys one by one"),
        pytest.param(b"\x80\x04\x8f(" + b"".join(map(long_number, ONE_HASH)) + b"\x90.", id="elements of a set"),
        pytest.param(
            HEAD + b"}(" + b"".join(long_number(n) + b"\x85N" for n in ONE_HASH) + b"u.", id="keys that are tuples"
        ),
        pytest.param(
            HEAD + b"}(" + b"".join(SIZE + b"(" + long_number(n) + b"t\x85RN" for n in ONE_HASH[:9999]) + b"u.",
            id="keys that are sizes",
        ),
        pytest.param(HEAD + b"N" + b"".join(b"p%d\n" % n for n in ONE_HASH) + b".", id="memo"),
    ],
)
def test_many_keys_of_one_hash_are_refused_at_once(tmp_path: Path, pickled: bytes) -> None:
    """To insert 60,000 of them takes minutes to hours."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    begin = time.process_time()
    with pytest.raises(TesseraError, match=r"checkpoint\.(damaged-pickle|not-torch-file)"):
        read_torch_file(tmp_path / "a.pt")
    assert time.process_time() - begin < 5


def test_states_by_the_numbers_of_parameters_are_read(tmp_path: Path) -> None:
    states = {number: {"step": number} for number in range(5_000)} | {(1, "a"): 2, 0.5: 3, -1: 4, None: 5}
    torch.save(states, tmp_path / "a.pt")
    assert read_torch_file(tmp_path / "a.pt") == states


def broken_bytes(chance: random.Random, data: bytes) -> bytes:
    """Cut a file, draw it anew, or change, flip, insert, remove or turn around some of its bytes."""
    at, end = sorted(chance.sample(range(len(data)), 2))
    some = chance.randbytes(chance.choice((1, 2, 8, 100)))
    flipped = bytes([data[at] ^ 1 << chance.randrange(8)])
    wrong = (data[:at], chance.randbytes(end), data[:at] + some + data[at + len(some) :], data[:at] + some + data[at:])
    wrong += (data[:at] + flipped + data[at + 1 :], data[:at] + data[end:], data[:at] + data[at:end][::-1] + data[end:])
    return chance.choice(wrong)


def check_random_metadata(folder: Path, count: int) -> None:
    tensors = {f"layers.{n}.weight": torch.randn(4, 6) for n in range(3)}
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    whole, read = (folder / ".metadata").read_bytes(), 0
    for seed in range(count):
        (folder / ".metadata").write_bytes(broken_bytes(random.Random(seed), whole))
        begin = time.process_time()
        try:
            for tensor in read_dcp(folder).values():
                tensor.read()
            read += 1
        except TesseraError:
            pass
        assert time.process_time() - begin < 5, seed
    assert 0 < read < count / 5, "a byte of a name that nobody asks for is no fault"


def test_random_bytes_in_metadata_of_dcp_are_refused_or_change_nothing(tmp_path: Path) -> None:
    check_random_metadata(tmp_path, 300)


@pytest.mark.slow
def test_many_random_bytes_in_metadata_of_dcp(tmp_path: Path) -> None:
    check_random_metadata(tmp_path, 20_000)


def test_parts_that_are_named_again_and_again_are_refused() -> None:
    """A list of a million empty parts, which a thousand tensors share, is a file of two megabytes."""
    with raises("checkpoint.parts-incomplete"):
        check_cover("a", (0,), [((0,), (0,))] * 2, "here")


def test_shared_parts_are_built_once_and_expanded_tensors_are_not_read(tmp_path: Path) -> None:
    doubled = HEAD + ORDERED + b")Rq\0" + (b"0" + ORDERED + b")R(K\1h\0K\2h\0uq\0") * 40 + b"."
    for pickled in (doubled, tensor_pickle([1 << 40], [0])):
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/data/0", bytes(64))
        content = read_torch_file(tmp_path / "a.pt")
    with raises("checkpoint.damaged-torch-file"):
        content.read()


def test_parts_of_dcp_that_overlap_are_refused() -> None:
    folder = Path("folder")
    check_cover("w", (4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 2)), ((2, 2), (2, 2))], str(folder))
    check_cover("w", (), [((), ())], str(folder))
    with raises("checkpoint.parts-incomplete"):
        check_cover("w", (4,), [((0,), (2,)), ((1,), (2,))], str(folder))  # as many elements as there are, and a hole
