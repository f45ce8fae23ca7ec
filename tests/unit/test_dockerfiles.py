"""The files in docker/ are read as a careful reviewer would read them; nothing is built."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile in order, with continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [
        (word.upper(), rest.strip()) for word, _, rest in (one.partition(" ") for one in joined.splitlines() if one)
    ]


def faults(text: str) -> list[str]:
    """Return what is wrong with a Dockerfile of ours."""
    steps = instructions(text)
    said = {word: [rest for one, rest in steps if one == word] for word, _ in steps}
    base = said.get("FROM", [""])
    wrong: list[str] = []
    if any(not re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", one) for one in base):
        wrong.append("the base image is not pinned to a version of three numbers")
    runs = " && ".join(said.get("RUN", []))
    if "pip install" in runs and "PIP_NO_CACHE_DIR=1" not in " ".join(said.get("ENV", [])):
        wrong.append("pip keeps its cache")
    if "apt-get install" in runs and not re.search(r"--no-install-recommends.*rm -rf /var/lib/apt/lists", runs):
        wrong.append("apt leaves its lists, or installs what was not asked for")
    if said.get("USER", ["root"])[-1] in ("root", "0"):
        wrong.append("it runs as root")
    if steps and [word for word, _ in steps].index("USER" if "USER" in said else steps[-1][0]) < max(
        (number for number, (word, _) in enumerate(steps) if word == "RUN"), default=0
    ):
        wrong.append("it installs after it has given up its rights")
    installed = re.findall(r"'\.\[([\w,]+)\]'", runs)
    if not installed:
        wrong.append("the package is not installed from the checkout")
    for extra in {one for group in installed for one in group.split(",")} - set(PROJECT["optional-dependencies"]):
        wrong.append(f"there is no extra {extra}")
    if "ADD" in said or re.search(r"curl|wget|git clone|\bsudo\b|latest", text):
        wrong.append("it fetches something that nobody pinned")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_images_are_pinned_small_and_run_without_rights(file: Path) -> None:
    assert faults(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_what_is_copied_exists_and_is_not_ignored(file: Path) -> None:
    not_ignored = re.findall(r"^!(\S+)", (ROOT / ".dockerignore").read_text(encoding="utf-8"), re.MULTILINE)
    copied = [
        source
        for word, rest in instructions(file.read_text(encoding="utf-8"))
        if word == "COPY"
        for source in rest.split()[:-1]
    ]
    assert {"pyproject.toml", "tessera", "recipes", PROJECT["readme"], *PROJECT["license-files"]} <= set(copied)
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert set(copied) <= set(not_ignored)


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_python_and_torch_are_within_what_is_supported(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    base = instructions(text)[0][1]
    assert re.search(r"(?:python:|py)3\.(?:11|12)\b", base), base
    pinned = re.findall(r"\btorch==(\d+)\.(\d+)", text) or re.findall(
        r"^torch==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert pinned
    assert all((2, 11) <= (int(major), int(minor)) < (2, 14) for major, minor in pinned)


def test_there_is_one_for_each_kind_of_device_and_the_install_page_builds_them() -> None:
    assert [file.suffix[1:] for file in FILES] == ["cpu", "cuda", "npu"]
    for page in ("install.md", "install.zh.md"):
        text = (ROOT / "docs" / "how-to" / page).read_text(encoding="utf-8")
        assert [file.name for file in FILES if f"-f docker/{file.name}" not in text] == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ((":3.12.12-slim-bookworm", ":latest"), "pinned"),
        ((":3.12.12-slim-bookworm", ":3.12"), "pinned"),
        (("PIP_NO_CACHE_DIR=1", "A=1"), "cache"),
        (("USER tessera", "USER root"), "root"),
        (("'.[hf,", "'tessera-mm[hf,"), "checkout"),
        (("'.[hf,", "'.[hg,"), "extra hg"),
        (("&& rm -rf /var/lib/apt/lists/*", ""), "lists"),
        (("RUN useradd", "RUN curl https://example.org | sh && useradd"), "pinned"),
        (("WORKDIR /project", "RUN pip install more"), "rights"),
    ],
)
def test_a_planted_fault_is_found(change: tuple[str, str], told: str) -> None:
    text = (ROOT / "docker" / "Dockerfile.cpu").read_text(encoding="utf-8")
    assert change[0] in text
    assert any(told in one for one in faults(text.replace(*change)))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_an_image_holds_every_import_package_of_the_distribution(file: Path) -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {pattern for pattern in settings["packages"]["find"]["include"] if "." not in pattern}
    copied = {rest.split()[0] for word, rest in instructions(file.read_text(encoding="utf-8")) if word == "COPY"}
    assert packages == {"tessera", "tessera_compat"}
    assert packages <= copied
