"""Hubs that say odd things, and folders whose links lead elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.hub.files import is_plain
from tessera.tools.download import download
from tests.errors import raises
from tests.toys import hub_server as toy
from tests.toys.hub_server import HubServer, hub_server

FILES = {"config.json": b"{}", "model.safetensors": bytes(2000)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        server.add("o/m", dict(FILES))
        yield server


def test_a_link_out_of_the_folder_is_refused_and_what_it_leads_to_stays(hub: HubServer, tmp_path: Path) -> None:
    folder, precious = download("o/m", tmp_path / "to"), tmp_path / "precious"
    precious.write_bytes(b"mine")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(precious)
    with raises("weights.link-out-of-folder"):
        download("o/m", folder)
    assert precious.read_bytes() == b"mine"


def first_file(**said: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda listing: {**listing, "siblings": [{**listing["siblings"][0], **said}]}


@pytest.mark.parametrize(
    "change",
    [
        lambda listing: [1],
        lambda listing: {**listing, "sha": "../../../elsewhere"},
        lambda listing: {**listing, "sha": None},
        lambda listing: {**listing, "siblings": [1]},
        first_file(rfilename=5),
        first_file(size=-5),
        first_file(size=10**400),
        first_file(size=None),
    ],
)
def test_an_answer_that_is_none_of_a_hub_is_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], Any]
) -> None:
    def lie(handler: toy.Handler, name: str, what: str | None, revision: str) -> None:
        files = [toy.entry(file, content, "rfilename") for file, content in FILES.items()]
        handler.tell(change({"id": name, "sha": "0" * 40, "siblings": files}))

    monkeypatch.setattr(toy.Handler, "describe", lie)
    with raises("hub.not-reachable"):
        download("o/m", tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == [".tessera"]


def test_names_too_long_for_a_file_are_passed_over() -> None:
    assert is_plain("a" * 250 + ".json")
    assert not is_plain("a" * 251 + ".json")
