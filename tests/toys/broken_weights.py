"""Weight files broken on purpose: safetensors headers, files of `torch.save`, folders of torch DCP.

`broken(number, seed, folder)` writes one and says of which kind it is. What is broken is the structure, not only bytes:
offsets, shapes, names, opcodes and the lists of archives, each by what attackers and bad disks do to them.
"""

from __future__ import annotations

import functools
import io
import json
import pickletools
import struct
import tempfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

KINDS = ("safetensors", "torch", "safetensors", "dcp metadata", "dcp part", "torch", "safetensors", "dcp part")
NUMBERS = (0, 1, 2, 7, -1, 255, 1 << 16, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63)
NUMBERS = (*NUMBERS, (1 << 64) - 1, 1 << 64, -(1 << 63), 10**30)
WORDS = ("F32", "F64", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "F4", "C64", "U16", "f32", "", "F" * 99, None, 4)
NAMES = (
    b"os\nsystem",
    b"builtins\neval",
    b"torch\nload",
    b"torch.hub\nload",
    b"torch\nSize",
    b"collections\nOrderedDict",
)
NAMES = (*NAMES, b"torch._utils\n_rebuild_tensor_v3", b"torch\nint8", b"numpy\nndarray", b"torch\nFloatStorage")


def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 6, generator=chance)
    return {
        "layers.0.weight": wide,
        "layers.0.bias": torch.randn(6, generator=chance).bfloat16(),
        "layers.1.weight": wide.t().contiguous(),
        "count": torch.tensor([3, 1 << 40]),
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "mask": torch.tensor([True, False, True]),
    }


def broken(number: int, seed: int, folder: Path) -> str:
    """Write a broken file, or folder, number `number` into an empty folder, and return its kind."""
    chance, kind = Random(seed * 1_000_003 + number), KINDS[number % len(KINDS)]
    if kind == "safetensors":
        (folder / "model.safetensors").write_bytes(broken_safetensors(chance))
    elif kind == "torch":
        (folder / "model.pt").write_bytes(broken_archive(chance, torch_files()[number // 2 % 3]))
    else:
        for name, data in dcp_files().items():
            touched = (name == ".metadata") == (kind == "dcp metadata")
            change = broken_pickle if name == ".metadata" else broken_parts
            (folder / name).write_bytes(change(chance, data) if touched else data)
    return kind


# ---------------------------------------------------------------------------------------------- safetensors


def broken_safetensors(chance: Random) -> bytes:
    data = save(tensors(), {"format": "pt"})
    size = struct.unpack("<Q", data[:8])[0]
    pairs = list(json.loads(data[8 : 8 + size]).items())
    for _ in range(chance.choice((1, 1, 2, 3))):
        chance.choice(_HEADER)(chance, pairs)
    text = "{" + ",".join(f"{json.dumps(name)}:{json.dumps(entry)}" for name, entry in pairs) + "}"
    header, body = text.encode("utf-8", "surrogatepass"), data[8 + size :]
    return chance.choice(_FRAMES)(chance, header, body)


def _entry(chance: Random, pairs: list[Any]) -> Any:
    return chance.choice(
        [entry for name, entry in pairs if isinstance(entry, dict) and "data_offsets" in entry] or [{}]
    )


def _move_offsets(chance: Random, pairs: list[Any]) -> None:
    entry, other = _entry(chance, pairs), _entry(chance, pairs)
    offsets = entry.get("data_offsets")
    begin, end = offsets if isinstance(offsets, list) and list(map(type, offsets)) == [int, int] else (0, 0)
    wrong: list[Any] = [other.get("data_offsets"), [begin, end + 8], [begin - 8, end], [begin + 4, end], [end, begin]]
    wrong += [[begin + (1 << 60), end + (1 << 60)], [chance.choice(NUMBERS), chance.choice(NUMBERS)], [begin, end, end]]
    wrong += [[float(begin), float(end)], [str(begin), str(end)], [], None, [[begin, end]], [begin, begin]]
    entry["data_offsets"] = chance.choice(wrong)


def _reshape(chance: Random, pairs: list[Any]) -> None:
    entry = _entry(chance, pairs)
    shape = entry.get("shape") or [1]
    if not isinstance(shape, list) or not all(type(size) is int for size in shape):  # changed already
        return
    wrong: list[Any] = [[*shape, 1], [1] * chance.choice((64, 65, 1000, 5000)), [-1], [-n for n in shape], None, "4"]
    wrong += [shape[::-1], [chance.choice(NUMBERS) for _ in range(3)], [1 << 32, 1 << 32], [float(n) for n in shape]]
    wrong += [[(1 << 62) + 6, 4], [0, 1 << 63], [0, (1 << 64) - 1, 2], [shape], [*shape[:-1], shape[-1] + 1]]
    entry["shape"] = chance.choice(wrong)


def _retype(chance: Random, pairs: list[Any]) -> None:
    _entry(chance, pairs)["dtype"] = chance.choice(WORDS)


def _rename(chance: Random, pairs: list[Any]) -> None:
    place = chance.randrange(len(pairs))
    names = ["", "\ud800", "a\0b", "x" * 100_000, "../../etc", "__metadata__", "é", pairs[0][0], pairs[-1][0]]
    pairs[place] = (chance.choice(names), pairs[place][1])


def _repeat(chance: Random, pairs: list[Any]) -> None:
    name, entry = chance.choice(pairs)
    pairs.insert(chance.randrange(len(pairs) + 1), (name, dict(entry) if isinstance(entry, dict) else entry))


def _drop(chance: Random, pairs: list[Any]) -> None:
    if len(pairs) > 1:
        pairs.pop(chance.randrange(len(pairs)))


def _nest(chance: Random, pairs: list[Any]) -> None:
    deep: Any = 1
    for _ in range(chance.choice((3, 100, 900))):
        deep = [deep] if chance.random() < 0.5 else {"a": deep}
    wrong: list[Any] = [deep, {"format": 3}, {"format": None}, [], "pt", {"a" * 9: "b" * 50_000}]
    pairs.append((chance.choice(("__metadata__", "deep")), chance.choice(wrong)))


def _more_keys(chance: Random, pairs: list[Any]) -> None:
    _entry(chance, pairs)[chance.choice(("size", "offset", "shape ", "DTYPE"))] = chance.choice(NUMBERS)


_HEADER = (_move_offsets, _move_offsets, _reshape, _reshape, _retype, _rename, _repeat, _drop, _nest, _more_keys)


def _plain(chance: Random, header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body


def _false_length(chance: Random, header: bytes, body: bytes) -> bytes:
    lengths = (0, 1, 8, len(header) - 1, len(header) + 1, len(header) + len(body) + 1, 100_000_001, 1 << 31, 1 << 60)
    return struct.pack("<Q", chance.choice((*lengths, 1 << 63, (1 << 64) - 1))) + header + body


def _cut(chance: Random, header: bytes, body: bytes) -> bytes:
    data = _plain(chance, header, body)
    return data[: chance.randrange(len(data))] if chance.random() < 0.8 else data + bytes(chance.choice((1, 64)))


def _flip(chance: Random, header: bytes, body: bytes) -> bytes:
    data = bytearray(header)
    for _ in range(chance.choice((1, 2, 8))):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return _plain(chance, bytes(data), body)


def _around(chance: Random, header: bytes, body: bytes) -> bytes:
    wrong = (b" " + header, header + b" " * 8, b"\xef\xbb\xbf" + header, header + header, b"[" * 100_000, b"[" + header)
    wrong = (*wrong, header[:-1], header.replace(b'"', b"'"), header.replace(b":", b"\xff", 1), b"{}", b"", b"null")
    return _plain(chance, chance.choice(wrong), body)


_FRAMES = (_plain, _plain, _plain, _plain, _plain, _false_length, _cut, _flip, _around)


# ---------------------------------------------------------------------------------------------- torch.save


@functools.cache
def torch_files() -> list[bytes]:
    """A state dictionary, one of a training job, and a file in the form that torch had before 1.6."""
    files = []
    for content, old in (
        (tensors(), False),
        ({"model": OrderedDict(tensors()), "iteration": 3}, False),
        (tensors(), True),
    ):
        file = io.BytesIO()
        torch.save(content, file, _use_new_zipfile_serialization=not old)
        files.append(file.getvalue())
    return files


def broken_archive(chance: Random, data: bytes) -> bytes:
    """Break the pickle of an archive, its list of entries, or any byte."""
    if not zipfile.is_zipfile(io.BytesIO(data)) or chance.random() < 0.25:
        return _flip_anything(chance, data)
    entries = [
        (name, archive.read(name)) for archive in [zipfile.ZipFile(io.BytesIO(data))] for name in archive.namelist()
    ]
    how = chance.random()
    if how < 0.6:
        entries = [(name, broken_pickle(chance, body) if name.endswith("data.pkl") else body) for name, body in entries]
    elif how < 0.8:
        place = chance.randrange(len(entries))
        name, body = entries[place]
        names = [entries[0][0], "data.pkl", name + "/", "../" + name, "/etc/passwd", "", "a" * 60_000, name.upper()]
        changed: list[list[tuple[str, bytes]]] = [[], [(name, body), (name, body)], [(name, body[:-1])], [(name, b"")]]
        changed += [[(chance.choice(names), body)], [(name, body * 2)], [(name, body), ("b/data.pkl", b"N.")]]
        entries[place : place + 1] = chance.choice(changed)
    return _zipped(chance, entries, lists=how >= 0.8)


def _zipped(chance: Random, entries: list[tuple[str, bytes]], lists: bool) -> bytes:
    file = io.BytesIO()
    squeezed = lists and chance.random() < 0.3
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if squeezed else zipfile.ZIP_STORED) as archive:
        for name, body in entries:
            archive.writestr(zipfile.ZipInfo(name) if not squeezed else name, body)
    data = bytearray(file.getvalue())
    if lists and not squeezed:  # sizes, offsets and lengths in the list of entries, or in the record of its end
        places = [
            at for at in range(len(data) - 4) if data[at : at + 4] in (b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04")
        ]
        at = chance.choice(places) + chance.choice((8, 10, 12, 16, 20, 24, 26, 28, 30, 42))
        wrong = struct.pack("<q", chance.choice(NUMBERS[:12]))[: chance.choice((2, 4))]
        data[at : at + len(wrong)] = wrong
    return bytes(data)


def _flip_anything(chance: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice((1, 2, 8, 32))):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed[: chance.choice((len(changed), len(changed), chance.randrange(len(changed))))])


# ---------------------------------------------------------------------------------------------- opcodes


def broken_pickle(chance: Random, data: bytes) -> bytes:
    """Change, repeat, drop or swap opcodes, put hostile ones between them, or cut the pickle."""
    places = [place for _, _, place in pickletools.genops(data) if place is not None]
    codes = [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(1, len(codes))
        chance.choice(_OPCODES)(chance, codes, at)
    changed = b"".join(codes)
    return changed[: chance.randrange(1, len(changed))] if chance.random() < 0.05 else changed


def _number(chance: Random) -> bytes:
    value = chance.choice(NUMBERS)
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def _other_number(chance: Random, codes: list[bytes], at: int) -> None:
    numbers = [place for place, code in enumerate(codes) if code[:1] in (b"K", b"M", b"J", b"\x8a", b"\x88", b"\x89")]
    codes[chance.choice(numbers or [at])] = _number(chance)


def _everywhere(chance: Random, codes: list[bytes], at: int) -> None:
    """The size of a tensor stands in several places, which would contradict each other."""
    replaced = chance.choice([code for code in codes if code[:1] in (b"K", b"M", b"J", b"\x8a")] or [codes[at]])
    other = _number(chance)
    codes[:] = [other if code == replaced else code for code in codes]


def _other_name(chance: Random, codes: list[bytes], at: int) -> None:
    names = [place for place, code in enumerate(codes) if code[:1] == b"c"]
    codes[chance.choice(names or [at])] = b"c" + chance.choice(NAMES) + b"\n"


def _other_text(chance: Random, codes: list[bytes], at: int) -> None:
    texts = [place for place, code in enumerate(codes) if code[:1] == b"X"]
    word = chance.choice(
        (b"", b"../../x", b"/etc/passwd", b"\xff\xfe", b"cuda:0", b"data/0", b"0", b"99", b"x" * 70_000)
    )
    codes[chance.choice(texts or [at])] = b"X" + len(word).to_bytes(4, "little") + word


def _repeat_code(chance: Random, codes: list[bytes], at: int) -> None:
    codes[at:at] = [codes[at]] * chance.choice((1, 1, 3, 500))


def _drop_code(chance: Random, codes: list[bytes], at: int) -> None:
    del codes[at : at + chance.choice((1, 1, 2, 9))]
    codes or codes.append(b".")


def _swap(chance: Random, codes: list[bytes], at: int) -> None:
    other = chance.randrange(len(codes))
    codes[at], codes[other] = codes[other], codes[at]


def _insert(chance: Random, codes: list[bytes], at: int) -> None:
    bomb = b")" + b"2\x86" * 50
    hostile = (bomb, b"(" * 3000, b"]" * 3000, b"}2s", b"2a", b"h\xff", b"j\xff\xff\xff\x7f", b"q\0", b"0", b"1", b"2")
    hostile += (b"X\xff\xff\xff\xff", b"\x8d" + b"\xff" * 8, b"\x8e" + b"\xff" * 7 + b"\x7f", b"\x8b\xff\xff\xff\x7f1")
    hostile += (
        b"I" + b"9" * 6000 + b"\n",
        b"L" + b"9" * 6000 + b"L\n",
        b"F1e999\n",
        b"P0\n",
        b"Q",
        b"R",
        b"b",
        b"\x81",
    )
    hostile += (
        b"\x92",
        b"\x93",
        b"i" + b"os\nsystem\n",
        b"(S'x'\nios\nsystem\n",
        b"o",
        b"\x82\1",
        b"\x84\1\0\0\0",
        b"s",
        b"u",
    )
    hostile += (
        b"cos\nsystem\n(S'touch canary'\ntR",
        b"c\xff\xff\n\xff\n",
        b"t",
        b"l",
        b"d",
        b"\x90",
        b"\x91",
        b"\x8f",
        b"\x97",
    )
    codes.insert(at, chance.choice(hostile))


def _flip_code(chance: Random, codes: list[bytes], at: int) -> None:
    code = bytearray(codes[at])
    code[chance.randrange(len(code))] = chance.randrange(256)
    codes[at] = bytes(code)


_OPCODES: tuple[Callable[[Random, list[bytes], int], None], ...] = (
    *(_other_number, _other_number, _everywhere, _everywhere, _other_name, _other_text, _other_text),
    *(_repeat_code, _drop_code, _swap, _insert, _flip_code),
)


# ---------------------------------------------------------------------------------------------- torch DCP


@functools.cache
def dcp_files() -> dict[str, bytes]:
    """What torch itself writes for these tensors, by names of files."""
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": tensors(), "step": 5}, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def broken_parts(chance: Random, data: bytes) -> bytes:
    """Break one of the archives that follow each other in a file, without moving the others; or anything."""
    if chance.random() < 0.5:
        return _flip_anything(chance, data)
    starts = [at for at in range(len(data) - 4) if data[at : at + 4] == b"PK\x05\x06"]
    at = chance.choice(starts) + chance.choice((8, 10, 12, 16))
    wrong = struct.pack("<q", chance.choice(NUMBERS[:12]))[:4]
    return data[:at] + wrong + data[at + 4 :]
