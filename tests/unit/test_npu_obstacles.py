"""What is missing on a machine for Ascend NPUs, on imitated machines: each obstacle is named with its cure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tessera.cli import main as cli
from tessera.errors import TesseraError
from tessera.runtime import npu
from tessera.runtime.npu import Machine, obstacles


def machine(
    root: Path,
    npus: int = 2,
    environ: Mapping[str, str] | None = None,
    versions: tuple[str | None, str | None] = ("2.14.0+cpu", "2.14.0"),
) -> Machine:
    """A machine with driver, NPUs, CANN and the extension."""
    devices = root / "dev"
    devices.mkdir(parents=True)
    for name in ("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{number}" for number in range(npus))):
        (devices / name).touch()
    driver = root / "usr/local/Ascend/driver/version.info"
    driver.parent.mkdir(parents=True)
    driver.touch()
    toolkit = root / "usr/local/Ascend/ascend-toolkit"
    toolkit.mkdir()
    (toolkit / "set_env.sh").touch()
    return Machine(root, {"ASCEND_HOME_PATH": str(toolkit), **(environ or {})}, *versions)


def codes(examined: Machine) -> list[str]:
    return [error.code for error in obstacles(examined)]


def test_a_complete_machine_has_no_obstacle(tmp_path: Path) -> None:
    assert codes(machine(tmp_path)) == []
    assert codes(machine(tmp_path / "some", environ={"ASCEND_RT_VISIBLE_DEVICES": "1,0"})) == []
    assert codes(machine(tmp_path / "post", versions=("2.14.1", "2.14.0.post2"))) == []


def test_a_bare_machine_lists_everything_in_the_order_of_cure(tmp_path: Path) -> None:
    bare = Machine(tmp_path, {}, "2.13.0", None)
    assert codes(bare) == ["device.npu-no-driver", "device.npu-no-cann", "device.no-torch-npu"]
    error = npu.explained(None, bare)
    assert error.code == "device.npu-no-driver"
    assert "CANN is not installed" in str(error.fix)
    assert "needs the package torch_npu" in str(error.fix)


@pytest.mark.parametrize("value", ["2", "0,0", "a", "0;1", "", "0-1", "-1", "0, 1", "9" * 30])
def test_a_list_of_npus_that_are_not_there_is_refused(tmp_path: Path, value: str) -> None:
    (error,) = obstacles(machine(tmp_path, environ={"ASCEND_RT_VISIBLE_DEVICES": value}))
    assert error.code == "device.npu-visible-devices"
    assert "0,1" in str(error)


def test_an_environment_that_is_not_sourced_names_the_script(tmp_path: Path) -> None:
    complete = machine(tmp_path)
    (error,) = obstacles(Machine(tmp_path, {}, complete.torch, complete.torch_npu))
    assert error.code == "device.npu-no-cann"
    assert str(error.fix).startswith("source ")
    (error,) = obstacles(Machine(tmp_path, {"ASCEND_HOME_PATH": "/nowhere"}, complete.torch, complete.torch_npu))
    assert "/nowhere" in str(error)


def test_versions_must_be_of_one_release(tmp_path: Path) -> None:
    (error,) = obstacles(machine(tmp_path, versions=("2.13.0", "2.14.0")))
    assert error.code == "device.npu-torch-version"
    assert "torch==2.14.*" in str(error.fix)


def test_device_files_that_are_missing_or_closed_are_named(tmp_path: Path) -> None:
    incomplete = machine(tmp_path)
    (tmp_path / "dev/hisi_hdc").unlink()
    (error,) = obstacles(incomplete)
    assert error.code == "device.npu-no-access"
    assert "/dev/hisi_hdc" in str(error)
    for path in (tmp_path / "dev").glob("davinci*"):
        path.unlink()
    assert codes(incomplete) == ["device.npu-no-driver"]


def test_an_extension_that_fails_to_load_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = machine(tmp_path / "machine")
    package = tmp_path / "torch_npu"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(TesseraError, match=r"libhccl\.so") as raised:
        npu.load(complete)
    assert raised.value.code == "device.npu-not-usable"

    def import_torch() -> None:
        """torch raises this when it cannot load the extension by its entry point."""
        raise RuntimeError(
            "Failed to load the backend extension: torch_npu. You can disable"
        ) from raised.value.__cause__

    monkeypatch.setattr(cli, "_run_app", import_torch)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "device.n" in capsys.readouterr().err
