"""Packages join Tessera by entry points of an installation or of a source tree; a missing package is no error."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import tessera
from tessera.checkpoint.weight_forms import detect_form
from tessera.config import extensions as module
from tessera.config.extensions import extension, extensions
from tessera.config.run_config import load_config
from tests.errors import raises

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
GROUPS: dict[str, dict[str, str]] = {
    group: points for group, points in PROJECT["entry-points"].items() if group.startswith("tessera.")
}


@pytest.fixture(autouse=True)
def fresh_entry_points() -> Iterator[None]:
    module._entry_points.cache_clear()
    yield
    module._entry_points.cache_clear()


def install(folder: Path, group: str, value: str) -> None:
    """Write the metadata that an installer would write."""
    info = folder / "guest-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nguest = {value}\n")


def test_an_installed_package_is_imported_only_when_its_object_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "tessera.prepare_rank", "guest_package:prepare")
    (tmp_path / "guest_package.py").write_text("def prepare():\n    return ['bound']\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert extension("tessera.prepare_rank", "nobody") is None
    assert "guest_package" not in sys.modules
    prepare = extension("tessera.prepare_rank", "guest")
    assert prepare is not None
    assert prepare() == ["bound"]
    assert prepare in extensions("tessera.prepare_rank")


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "tessera.prepare_rank", "guest_package:gone")
    (tmp_path / "guest_package.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "guest_package", raising=False)
    with raises("environment.broken-extension", "guest_package:gone"):
        extension("tessera.prepare_rank", "guest")


@pytest.mark.parametrize(
    "point", [EntryPoint(n, v, g) for g, points in GROUPS.items() for n, v in points.items()], ids=lambda p: p.value
)
def test_every_entry_point_of_this_tree_can_be_imported(point: EntryPoint) -> None:
    """Also where an older version is installed: the source tree declares its own."""
    assert extension(point.group, point.name) is point.load()


def test_the_groups_of_this_tree_are_those_that_the_library_reads() -> None:
    assert module.__doc__ is not None
    assert all(f"`{group}`" in module.__doc__ for group in GROUPS)
    assert module.__doc__.count("| `tessera.") == len(GROUPS)


def test_the_library_works_without_the_other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tessera_compat", None)  # as if it were not installed
    assert [extensions(group) for group in GROUPS] == [[]] * len(GROUPS)
    assert detect_form(Path("shards")) is None
    with raises("output.unknown-form", "tessera.weight_forms"):
        tessera.convert(tmp_path, tmp_path / "target", to="mm")
    recipe = {"model": {"family": "qwen2_vl", "preset": "quickstart"}, "train": {"steps": 1}}
    with raises("recipe.no-reader-installed", "parallel.fsdp2_config"):
        load_config({**recipe, "parallel": {"fsdp2_config": "fsdp2_config.yaml"}})


def test_a_command_of_a_missing_package_is_refused_by_name() -> None:
    code = (
        "import sys; sys.modules['tessera_compat'] = None; sys.argv[0] = 'tessera'\n"
        "from tessera.cli.main import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, "migrate", "job.sh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "No such command 'migrate'" in done.stderr
    assert "Traceback" not in done.stderr
