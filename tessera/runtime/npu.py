"""Load torch's extension for Ascend NPUs, and explain why it does not load or has no device: driver, CANN, versions.

Nothing here needs torch: the extension can fail while torch is imported, because torch loads it by its entry point.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tessera.errors import TesseraError, first_line

_HOME = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by `set_env.sh` of CANN
_TOOLKITS = ("usr/local/Ascend/ascend-toolkit", "usr/local/Ascend/cann")
_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")  # device files that every process on an NPU opens
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_AUTOLOAD = re.compile(r"Failed to load the backend extension: torch_npu\b")
TABLE = "docs/how-to/install.md has the versions"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Machine:
    """Hold the inputs of the checks, so that tests can simulate any machine."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    torch: str | None = field(default_factory=lambda: _version("torch"))
    torch_npu: str | None = field(default_factory=lambda: _version("torch_npu"))

    @property
    def numbers(self) -> list[int]:
        """Return the numbers of the NPUs that have a device file."""
        files = (re.fullmatch(r"davinci(\d+)", path.name) for path in (self.root / "dev").glob("davinci*"))
        return sorted(int(match[1]) for match in files if match)


def obstacles(machine: Machine | None = None) -> list[TesseraError]:
    """Return the obstacles to using an NPU on this machine, in the order in which to remove them."""
    machine = machine or Machine()
    checks = (_driver, _access, _visible, _toolkit, _extension)
    return [error for check in checks if (error := check(machine)) is not None]


def _driver(machine: Machine) -> TesseraError | None:
    installed = (machine.root / "usr/local/Ascend/driver/version.info").is_file()
    if installed and machine.numbers:
        return None
    return TesseraError(
        "the Ascend driver is not installed" if not installed else "the Ascend driver shows no NPU under /dev",
        fix="install driver and firmware, and check them with `npu-smi info`; in a container pass "
        "--device /dev/davinci0 and mount /usr/local/Ascend/driver",
        code="device.npu-no-driver",
    )


def _access(machine: Machine) -> TesseraError | None:
    if not machine.numbers:
        return None
    names = [*_NODES, *(f"davinci{number}" for number in machine.numbers)]
    files = [machine.root / "dev" / name for name in names]
    missing = [path for path in files if not path.exists()]
    closed = [path for path in files if path.exists() and not os.access(path, os.R_OK | os.W_OK)]
    if not missing and not closed:
        return None
    names = [f"/dev/{path.name}" for path in missing or closed]
    return TesseraError(
        f"{', '.join(names)}: " + ("missing" if missing else "this user may not read and write"),
        fix="in a container pass --device for each of them"
        if missing
        else "add the user to the group of the driver: sudo usermod -aG HwHiAiUser $USER, then log in again",
        code="device.npu-no-access",
    )


def _visible(machine: Machine) -> TesseraError | None:
    value = machine.environ.get(_VISIBLE)
    if value is None or not machine.numbers:
        return None
    listed = value.split(",")
    numbers = [int(text) for text in listed if re.fullmatch(r"\d{1,4}", text)]
    if len(numbers) == len(listed) and len(set(numbers)) == len(numbers) and set(numbers) <= set(machine.numbers):
        return None
    return TesseraError(
        f"{_VISIBLE}={value} does not name NPUs of this machine",
        where="environment",
        allowed=[",".join(map(str, machine.numbers)), "or fewer of them, separated by commas"],
        fix=f"change or unset {_VISIBLE}",
        code="device.npu-visible-devices",
    )


def _toolkit(machine: Machine) -> TesseraError | None:
    homes = [machine.environ[name] for name in _HOME if machine.environ.get(name)]
    if any(Path(home).is_dir() for home in homes):
        return None
    scripts = [machine.root / folder / "set_env.sh" for folder in _TOOLKITS]
    script = next((path for path in scripts if path.is_file()), None)
    if homes:
        what = f"{_HOME[0]} names a folder that does not exist: {homes[0]}"
    else:
        what = "CANN is not installed" if script is None else "the environment of CANN is not set"
    return TesseraError(
        what,
        where="environment",
        fix=f"install CANN; {TABLE}" if script is None else f"source {script}",
        code="device.npu-no-cann",
    )


def _extension(machine: Machine) -> TesseraError | None:
    if machine.torch_npu is None:
        return TesseraError(
            "device npu needs the package torch_npu", fix="pip install tessera-mm[npu]", code="device.no-torch-npu"
        )
    if machine.torch is None or _release(machine.torch) == _release(machine.torch_npu):
        return None
    return TesseraError(
        f"torch_npu {machine.torch_npu} does not fit torch {machine.torch}: both need the same release",
        fix=f"pip install torch=={_release(machine.torch_npu)}.* from the CPU index of torch; {TABLE}",
        code="device.npu-torch-version",
    )


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def load(machine: Machine | None = None) -> None:
    """Import the extension, which registers the device in torch; raise the first obstacle if it fails."""
    try:
        import torch_npu  # noqa: F401
    # a library of CANN is missing, or torch has another accelerator
    except (ImportError, RuntimeError, OSError) as error:
        raise explained(error, machine) from error


def explained(error: BaseException | None, machine: Machine | None = None) -> TesseraError:
    """Return an error about the first obstacle; its `fix` names the others. `error`: error of the extension, if any."""
    reasons = obstacles(machine)
    if not reasons:
        said = f": {first_line(error)}" if error is not None else ""
        return TesseraError(
            f"torch_npu finds no NPU, although driver, CANN and versions look right{said}",
            fix="run `npu-smi info` and python -c 'import torch_npu', which print more; use the CPU build of torch",
            code="device.npu-not-usable",
        )
    first, *others = reasons
    if not others:
        return first
    more = "; then: " + "; ".join(other.what for other in others)
    return TesseraError(first.what, where=first.where, allowed=first.allowed, fix=f"{first.fix}{more}", code=first.code)


def autoload_failed(error: BaseException) -> bool:
    """Return whether `import torch` failed because it could not load torch_npu."""
    return isinstance(error, RuntimeError) and _AUTOLOAD.search(str(error)) is not None
