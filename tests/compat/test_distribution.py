"""The second import package: its Python face, and what a wheel of the distribution holds."""

from __future__ import annotations

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tessera
import tessera_compat
from tessera_compat.mindspeed_mm.migrate import lay_out, migrate

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_python_face_offers_migrate_and_imports_it_on_first_use() -> None:
    assert tessera_compat.migrate is migrate
    assert "migrate" not in tessera.__all__
    with pytest.raises(AttributeError, match="no attribute 'migrat'"):
        tessera_compat.migrat  # type: ignore[attr-defined] # noqa: B018
    code = "import sys, tessera_compat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_wheel_holds_every_file_of_both_packages() -> None:
    packaging = SETTINGS["tool"]["setuptools"]
    include, data = packaging["packages"]["find"]["include"], packaging["package-data"]
    missing = []
    for path in [*(ROOT / "tessera").rglob("*"), *(ROOT / "tessera_compat").rglob("*")]:
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        packages = [p for p in path.parents if ROOT in p.parents and (p / "__init__.py").is_file()]
        names = [".".join(package.relative_to(ROOT).parts) for package in packages]
        assert any(fnmatch.fnmatch(names[0], pattern) for pattern in include), path
        inside = path.suffix == ".py" and packages[0] == path.parent
        patterns = [(p, pattern) for p, name in zip(packages, names, strict=True) for pattern in data.get(name, [])]
        if not inside and not any(path in package.glob(pattern) for package, pattern in patterns):
            missing.append(str(path.relative_to(ROOT)))
    assert missing == []


def test_both_programs_are_installed() -> None:
    assert SETTINGS["project"]["scripts"] == {
        "tessera": "tessera.cli.start:main",
        "mm-convert": "tessera_compat.mindspeed_mm.convert:main",
    }


def test_a_workspace_of_an_earlier_version_gets_the_imports_of_this_one(tmp_path: Path) -> None:
    lay_out(tmp_path)
    current = {name: (tmp_path / name).read_text() for name in ("pretrain_vlm.py", "megatron/__init__.py")}
    for name, text in current.items():
        earlier = f"# mine\n{text}".replace("from tessera_compat.", "from tessera.compat.")
        assert "tessera.compat" in earlier
        (tmp_path / name).write_text(earlier)
    assert sorted(lay_out(tmp_path)) == sorted(tmp_path / name for name in current)
    assert all((tmp_path / name).read_text() == f"# mine\n{text}" for name, text in current.items())
    assert lay_out(tmp_path) == []
