"""Read files that `torch.save` wrote before torch 1.6, without unpickling.

Such a file is five pickles one after another (a magic number, a version, facts of the machine, the content, the keys of
the storages), and then the length and the bytes of each storage.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tessera.checkpoint.legacy.pickles import Described, Name, PersistentId, describe_next
from tessera.checkpoint.legacy.torch_files import ITEM_BYTES, TorchReader, damaged, may_contain
from tessera.runtime.files import open_regular

_BEGINNING = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # pickle of the magic number with which such a file begins
_VERSION = 1001
_PICKLES_END = 16 << 20  # the pickles must end before this position; tensors are not part of them


def is_old_torch_file(path: Path) -> bool:
    """Return whether a file begins like those that torch before 1.6 wrote."""
    with open_regular(path) as opened:
        return opened.read(len(_BEGINNING)) == _BEGINNING


def read_old_torch_file(path: Path) -> Any:
    """Return the content of a file: containers, scalars and `StoredTensor`; other objects as `Described`."""
    with open_regular(path) as opened:
        size = os.fstat(opened.fileno()).st_size
        head = io.BytesIO(opened.read(min(size, _PICKLES_END)))
        pickles = [describe_next(head, may_contain, str(path)) for _ in range(5)]
        _, version, machine, described, keys = pickles
        if version != _VERSION or not isinstance(machine, dict) or machine.get("little_endian") is not True:
            raise damaged(path, "its version or byte order is not supported")
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise damaged(path, "its list of storages is invalid")
        reader = TorchReader(path, 0, "", {}, opened)
        classes = _storage_classes(described, path)
        position = head.tell()
        for key in keys:
            width = ITEM_BYTES.get(classes.get(key, ""))
            opened.seek(position)
            stored = opened.read(8)
            count = int.from_bytes(stored, "little", signed=True)
            if width is None or len(stored) != 8 or count < 0 or position + 8 + count * width > size:
                raise damaged(path, f"the storage {key!r:.80} is unknown or reaches beyond the end of the file")
            reader.storages[key] = position + 8, count * width
            position += 8 + count * width
        return reader.build(described)


def _storage_classes(described: Any, path: Path) -> dict[str, str]:
    """Return the class name of each storage that the content refers to."""
    classes: dict[str, str] = {}
    for value in _persistent(described):
        sound = isinstance(value, tuple) and len(value) == 6 and value[0] == "storage" and isinstance(value[1], Name)
        if not sound or not isinstance(value[2], str) or value[5] is not None:
            raise damaged(path, "the description of a storage is invalid, or a view of another storage")
        if classes.setdefault(value[2], value[1].name) != value[1].name:
            raise damaged(path, f"the storage {value[2]!r:.80} has two dtypes")
    return classes


def _persistent(described: Any) -> Iterator[Any]:
    """Yield the values of all persistent ids in the content."""
    waiting, visited = [described], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, PersistentId):
            yield value.value
        if id(value) in visited or not isinstance(value, (Described, dict, list, tuple)):
            continue
        visited.add(id(value))
        if isinstance(value, Described):
            waiting += [value.arguments, value.state, value.items, value.elements]
        elif isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        else:
            waiting += value
