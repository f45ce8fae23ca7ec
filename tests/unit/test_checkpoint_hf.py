"""Hugging Face folders in and out: by a weight map, by slices, and never by a pickle."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessera.checkpoint.hf import load_folder
from tessera.checkpoint.publish import made_from
from tessera.errors import TesseraError
from tessera.weights.map import Rule, WeightMap
from tessera.weights.operations import Concat, Reshape, TransposeIfNeeded
from tests.errors import raises
from tests.toys.save_folder import save_folder

MAP = WeightMap(
    rules=(
        Rule("embed.weight", "model.embed.weight"),
        Rule("head.weight", "lm_head.weight"),
        Rule("layers.{i}.qkv", tuple(f"model.layers.{{i}}.{n}_proj" for n in "qkv"), Concat((4, 2, 2))),
        Rule("patch", "visual.patch.weight", Reshape((6, 8), (6, 2, 2, 2))),
        Rule("mix", "mix.weight", TransposeIfNeeded(3, 5)),
    ),
    renames=(("old.", "model."),),
    skip=("model.layers.{i}.rotary",),
)


def ours(seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    shapes = {"embed.weight": (7, 4), "layers.0.qkv": (8, 4), "layers.1.qkv": (8, 4), "patch": (6, 8), "mix": (3, 5)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def blank(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full(tensor.shape, -7.0, dtype=dtype) for name, tensor in ours().items()}


def theirs(seed: int = 0) -> dict[str, Tensor]:
    tensors = ours(seed)
    out = {"model.embed.weight": tensors["embed.weight"], "mix.weight": tensors["mix"].t().contiguous()}
    out["visual.patch.weight"] = tensors["patch"].reshape(6, 2, 2, 2)
    for i in range(2):
        pieces = tensors[f"layers.{i}.qkv"].split([4, 2, 2])
        out.update({f"model.layers.{i}.{n}_proj": p.contiguous() for n, p in zip("qkv", pieces, strict=True)})
    return out


def equal(first: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return first.keys() == right.keys() and all(torch.equal(first[name], right[name]) for name in first)


def test_one_file_in(tmp_path: Path) -> None:
    save_file({**theirs(), "model.layers.0.rotary": torch.ones(2)}, tmp_path / "model.safetensors")
    into = blank()
    load_folder(tmp_path, into, MAP)
    assert equal(into, ours())


def test_several_files_other_spelling_and_type(tmp_path: Path) -> None:
    everything = {name.replace("model.", "old."): tensor for name, tensor in theirs().items()}
    names = sorted(everything)
    save_file({n: everything[n] for n in names[:4]}, tmp_path / "a.safetensors")
    save_file({n: everything[n] for n in names[4:]}, tmp_path / "b.safetensors")
    into = blank(torch.bfloat16)
    load_folder(tmp_path, into, MAP)
    assert equal(into, {name: tensor.bfloat16() for name, tensor in ours().items()})


def test_out_and_in_again(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "export"
    save_folder(
        folder, ours(3), MAP, {"model_type": "x"}, shard_bytes=300, finish=lambda f: (f / "t.json").write_text("1")
    )
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 1
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    read = {}
    for name in files:
        here = load_file(folder / name)
        assert all(index["weight_map"][key] == name for key in here)
        read.update(here)
    assert equal(read, theirs(3))
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in read.values())
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "x"}
    assert (folder / "t.json").exists()
    into = blank()
    load_folder(folder, into, MAP)
    assert equal(into, ours(3))


def test_an_export_may_be_replaced_but_nothing_else(tmp_path: Path) -> None:
    origin = made_from("hf", "run")
    save_folder(tmp_path / "out", ours(1), MAP, {}, origin=origin)
    (tmp_path / ".staging-out~00").mkdir()  # of an export that was killed
    save_folder(tmp_path / "out", ours(2), MAP, {}, origin=origin)
    assert equal(load_file(tmp_path / "out" / "model.safetensors"), theirs(2))
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years")
    with raises("output.folder-not-empty"):
        save_folder(home, ours(), MAP, {})
    with raises("output.not-an-export"):
        save_folder(home, ours(), MAP, {}, overwrite=True)
    assert (home / "thesis.txt").read_text() == "years"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_tied_weight_by_either_name_or_both(tmp_path: Path) -> None:
    tied = {"head.weight": "embed.weight"}
    stored = theirs()
    for number, keep in enumerate(
        [("model.embed.weight",), ("lm_head.weight",), ("model.embed.weight", "lm_head.weight")]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        rest = {n: t for n, t in stored.items() if n != "model.embed.weight"}
        same = {n: stored["model.embed.weight"].clone() for n in keep}
        save_file({**rest, **same}, folder / "model.safetensors")
        into = blank()
        load_folder(folder, into, MAP, tied=tied)
        assert equal(into, ours())
    with raises("weights.model-mismatch", "lm_head.weight"):
        load_folder(tmp_path / "2", blank(), MAP)


def test_misfits_are_named(tmp_path: Path) -> None:
    stored = theirs()
    stored["model.embedd.weight"] = stored.pop("model.embed.weight")
    stored["model.layers.2.q_proj"] = torch.ones(4, 4)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(TesseraError) as caught:
        load_folder(tmp_path, blank(), MAP)
    told = str(caught.value)
    assert "missing: embed.weight (model.embed.weight); the folder has model.embedd.weight" in told
    assert "unexpected: model.layers.2.q_proj" in told


@pytest.mark.parametrize(("name", "shape"), [("embed.weight", (7, 5)), ("patch", (6, 9)), ("layers.0.qkv", (9, 4))])
def test_a_wrong_shape_is_named(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    save_file(theirs(), tmp_path / "model.safetensors")
    into = {**blank(), name: torch.zeros(shape)}
    with pytest.raises(TesseraError, match=name):
        load_folder(tmp_path, into, MAP)


def test_a_part_of_the_model(tmp_path: Path) -> None:
    save_file(theirs(), tmp_path / "model.safetensors")
    part = {"layers.1.qkv": torch.zeros(8, 4)}
    load_folder(tmp_path, part, MAP, expected=ours())
    assert torch.equal(part["layers.1.qkv"], ours()["layers.1.qkv"])


# ---------------------------------------------------------------------------------------------- hostile files


class Canary:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path(self.path),))

    def __init__(self, path: Path) -> None:
        self.path = str(path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "last.ckpt"])
def test_a_pickle_is_never_opened(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    pickle.loads(pickle.dumps(Canary(canary)))  # noqa: S301 - the canary does sing when opened
    assert canary.exists()
    canary.unlink()
    for place in (folder, folder / name):
        with raises("weights.pickle-refused"):
            load_folder(place, blank(), MAP)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with raises("weights.pickle-refused"):
        load_folder(folder, blank(), MAP)
    (folder / "model.safetensors.index.json").unlink()
    (folder / name).rename(folder / "model.safetensors")
    with raises("weights.unreadable-file"):
        load_folder(folder, blank(), MAP)
    assert not canary.exists()


def header(table: object, data: bytes = b"") -> bytes:
    text = json.dumps(table).encode() if not isinstance(table, bytes) else table
    return struct.pack("<Q", len(text)) + text + data


def entry(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


HOSTILE = {
    "empty": b"",
    "short": b"\x01\x00",
    "huge header": struct.pack("<Q", 1 << 62) + b"{}",
    "header beyond the file": struct.pack("<Q", 1 << 20) + b"{}",
    "not json": header(b"\xff\xfe{{{"),
    "overlapping": header({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12),
    "beyond the end": header({"a": entry(0, 1 << 40, [1 << 38])}, b"\0" * 8),
    "backwards": header({"a": entry(8, 0, [2])}, b"\0" * 8),
    "wrong size": header({"a": entry(0, 8, [3])}, b"\0" * 8),
    "overflow": header({"a": entry(0, 8, [1 << 63, 1 << 63])}, b"\0" * 8),
    "negative": header({"a": entry(0, 8, [-2])}, b"\0" * 8),
    "unknown type": header({"a": entry(0, 8, [2], "PICKLE")}, b"\0" * 8),
    "hole": header({"a": entry(4, 8, [1])}, b"\0" * 8),
    "trailing": header({"a": entry(0, 4, [1])}, b"\0" * 8),
    "deep": header(b"[" * 100_000),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_malformed_safetensors_are_a_clear_error(tmp_path: Path, case: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(HOSTILE[case])
    with raises("weights.unreadable-file"):
        load_folder(tmp_path, {"a": torch.zeros(2)}, WeightMap((Rule("a", "a"),)))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ""])
def test_an_index_cannot_point_outside(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with raises("weights.path-outside-folder"):
        load_folder(tmp_path, blank(), MAP)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": ["x"]}}', '{"weight_map": {"a": null}}', ""]
)
def test_a_broken_index_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with raises("weights.damaged-index"):
        load_folder(tmp_path, blank(), MAP)
