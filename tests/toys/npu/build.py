"""Build the stand-in accelerator, and the environment in which `import torch` finds it as it finds torch_npu."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"
COMPILER = shutil.which("g++")


def library() -> Path:
    """Return the compiled library, from the user's cache if it was built before with this torch."""
    from torch.utils.cpp_extension import include_paths, library_paths

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    built_from = f"{torch.__version__} {torch.version.git_version} {suffix} {SOURCE.read_text(encoding='utf-8')}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tessera-tests"
    path = cache / f"stand-in-{hashlib.sha256(built_from.encode()).hexdigest()[:16]}" / f"_stand_in{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{os.getpid()}.so")
        folders = [*include_paths(), sysconfig.get_paths()["include"]]
        flags = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=_stand_in"]
        included, searched = [f"-I{folder}" for folder in folders], [f"-L{folder}" for folder in library_paths()]
        linked = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        subprocess.run(
            [str(COMPILER), *flags, *included, str(SOURCE), "-o", str(unfinished), *searched, *linked],
            check=True,
            timeout=900,
        )
        unfinished.rename(path)
    return path


def site(folder: Path) -> Path:
    """Write a folder for PYTHONPATH with the package, its library, and the entry point that torch imports it by."""
    (folder / "torch_npu-0.0.dist-info").mkdir(parents=True)
    version = torch.__version__.split("+")[0]
    metadata = f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {version}\n"
    (folder / "torch_npu-0.0.dist-info" / "METADATA").write_text(metadata)
    (folder / "torch_npu-0.0.dist-info" / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    )
    (folder / "torch_npu").symlink_to(HERE / "torch_npu")
    (folder / library().name).symlink_to(library())
    return folder


def environment(folder: Path, devices: int = 2) -> Mapping[str, str]:
    """Return the environment of a process that has the stand-in accelerator."""
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "STAND_IN_DEVICES": str(devices)}
