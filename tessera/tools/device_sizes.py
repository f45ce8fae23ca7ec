"""The memory of known devices, by name, and the share that a run can use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tessera.errors import TesseraError, nearest
from tessera.runtime.device import ACCELERATORS

GIB = 2**30

# Name of a device -> (GiB that its driver reports, kind of accelerator). Drivers report less than vendors advertise.
_GPU, _NPU = ACCELERATORS
_TABLE = {
    "b200": (178.3, _GPU),
    "h200": (139.8, _GPU),
    "h20-96g": (95.1, _GPU),
    "h100": (79.1, _GPU),
    "h800": (79.1, _GPU),
    "a100-80g": (79.2, _GPU),
    "a800-80g": (79.2, _GPU),
    "a100-40g": (39.4, _GPU),
    "l40s": (44.4, _GPU),
    "a6000": (47.4, _GPU),
    "rtx5090": (31.3, _GPU),
    "rtx4090": (23.5, _GPU),
    "rtx3090": (23.6, _GPU),
    "a10": (22.0, _GPU),
    "l4": (22.0, _GPU),
    "80g": (79.1, _GPU),
    "48g": (44.4, _GPU),
    "40g": (39.4, _GPU),
    "32g": (31.3, _GPU),
    "24g": (23.5, _GPU),
    "16g": (15.5, _GPU),
    "12g": (11.6, _GPU),
    "910b-64g": (61.0, _NPU),
    "910b-32g": (29.5, _NPU),
    "910c-64g": (61.0, _NPU),
}
DEVICE_NAMES = tuple(_TABLE)

_RUNTIME = 0.8  # GiB for the driver, kernels and workspaces of libraries
_COLLECTIVES = 1.0  # further GiB if ranks communicate
_GAPS = 0.03  # share that the allocator cannot use because of fragmentation

_LARGEST = 10_000  # GiB; a larger number is probably in another unit, such as MiB


@dataclass(frozen=True)
class DeviceSize:
    """Hold the memory of a device in bytes, and the value of `train.device` for it."""

    name: str
    total: int
    device: str

    def usable(self, ranks: int = 1) -> int:
        """Return the bytes available for tensors: without the runtime and fragmentation."""
        taken = _RUNTIME + (_COLLECTIVES if ranks > 1 else 0.0)
        return max(0, int(self.total * (1 - _GAPS) - taken * GIB))


def find_size(name: str, where: str = "device") -> DeviceSize:
    """Return the size of a device from its name (`h200`, `24g`), or from a number of GiB (`96`)."""
    word = name.strip().lower().replace("_", "-").removeprefix("nvidia-").removeprefix("ascend-")
    word = word[:-1] if word.endswith("gb") else word
    # The user named a device without its memory size: list all sizes of that device.
    sizes = [device for device in DEVICE_NAMES if device.startswith(f"{word}-")]
    if len(sizes) > 1:
        raise TesseraError(
            f"{name} exists with several memory sizes", where=where, allowed=sizes, code="device.several-sizes"
        )
    word = sizes[0] if sizes else word
    if word in _TABLE:
        size, kind = _TABLE[word]
        return DeviceSize(word, int(size * GIB), kind)
    try:
        size = float(word.removesuffix("gib").removesuffix("g"))
    except ValueError:
        size = 0.0
    if not 0 < size < math.inf:
        raise TesseraError(
            f"unknown device {name!r}",
            where=where,
            allowed=[*DEVICE_NAMES, "a number of GiB, such as 96"],
            nearest=nearest(word, DEVICE_NAMES),
            code="device.unknown-model",
        )
    device = DeviceSize(f"{size:g} GiB", int(min(size, _LARGEST) * GIB), _GPU)
    if not device.usable() or size > _LARGEST:
        raise TesseraError(
            f"{name} means {size:g} GiB, and no device has that size",
            where=where,
            allowed=[*DEVICE_NAMES, f"a number of GiB above {_RUNTIME:g}, which the runtime takes"],
            code="device.unknown-size",
        )
    return device
