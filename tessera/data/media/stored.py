"""Features of samples in safetensors files, which are read sample by sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tessera.errors import TesseraError
from tessera.runtime.crc32 import crc32
from tessera.runtime.files import check_regular

ABOUT = "features"  # the only entry of a shard's metadata; several would be written in any order
KEY = "key"  # in it: the hash of all that the shard depends on
CHECKSUM = "crc32"  # of a sample, or of the tensors of a file that has none


def shard_about(shard: Any) -> dict[str, Any]:
    """Return the description in the metadata of an open shard. Raise ValueError if it has none."""
    about = json.loads((shard.metadata() or {}).get(ABOUT, "null"))
    if not isinstance(about, dict):
        raise ValueError("it has no description of its samples")
    return about


def checksum(tensors: Mapping[str, Tensor], about: Any = None) -> int:
    """Return a checksum of tensors, with their names, types and shapes, and of JSON that is stored about them."""
    crc = crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        crc = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), crc)
        crc = crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


@dataclass(frozen=True)
class StoredSample:
    """Locate the tensors of one sample in a shard, with their shapes from its metadata."""

    file: Path
    key: str  # that the shard must have
    prefix: str  # of the names of its tensors
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of its tensors, by their names without the prefix
    grids: tuple[tuple[int, int, int], ...]  # of the latents, in patches: the generated one, then images to edit
    id: str = ""
    checksum: int | None = None  # None: of a release that wrote none

    def shape(self, name: str) -> tuple[int, ...] | None:
        return dict(self.shapes).get(name)

    def load(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        try:
            check_regular(self.file)
            with safe_open(self.file, framework="pt") as shard:
                # Not parsed: the description of all samples can be larger than this sample.
                if self.key not in (shard.metadata() or {}).get(ABOUT, ""):
                    raise TesseraError(
                        f"the shard {self.file.name} was made with another model, other options or other data",
                        where=str(self.file.parent),
                        fix="make the features again: tessera data features",
                        code="data.features-of-another-make",
                    )
                tensors = {name: shard.get_tensor(f"{self.prefix}{name}") for name, _ in self.shapes}
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise TesseraError(f"damaged features: {self.file.name} ({error})", code="data.damaged-features") from None
        for name, shape in self.shapes:
            if tuple(tensors[name].shape) != shape:
                raise TesseraError(
                    f"damaged features: {name} in {self.file.name} is {tuple(tensors[name].shape)}",
                    code="data.damaged-features",
                )
        if self.checksum is not None and checksum(tensors, sample_facts(self.id, self.grids)) != self.checksum:
            raise TesseraError(
                f"damaged features: {self.file.name} (the bytes of this sample have changed)",
                code="data.damaged-features",
            )
        return tensors


def sample_facts(id: str, grids: Any) -> list[Any]:
    """Return the facts that the checksum of a sample covers beside its tensors."""
    return [id, [list(grid) for grid in grids]]
