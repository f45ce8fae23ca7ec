"""The files of the chat page: served without a key, with a strict policy, in two languages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

import tessera.server
from tessera.server.app import make_app
from tests.toys.chat_service import make_processor, make_service

FOLDER = Path(tessera.server.__file__).parent / "page"
FILES = sorted(FOLDER.iterdir())
KINDS = {".js": "text/javascript", ".css": "text/css", ".json": "application/json"}
WORDS = json.loads((FOLDER / "words.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    service = make_service(make_processor(tmp_path_factory.mktemp("tokenizer")), api_key="secret", max_body=1234)
    with TestClient(make_app(service), "http://localhost") as client:
        yield client


def test_the_page_needs_no_key_and_its_policy_forbids_foreign_code(client: TestClient) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(line.split(" ", 1) for line in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["img-src"] == "data:"
    assert policy["require-trusted-types-for"] == "'script'"
    assert 'content="1234"' in response.text  # the limit by which images are made smaller
    assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix in KINDS], ids=lambda path: path.name)
def test_each_file_is_served_by_its_type(client: TestClient, path: Path) -> None:
    response = client.get(f"/page/{path.name}")
    assert response.content == path.read_bytes()
    assert response.headers["content-type"].startswith(KINDS[path.suffix])
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/page/", "/page/index.html", "/page/..%2fapp.py", "/page/%2e%2e/app.py", "/app.py"])
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(path, headers={"Authorization": "Bearer secret"}).status_code == 404


def test_every_text_has_two_languages_and_is_used() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in FILES if path.suffix in (".js", ".html"))
    for english, chinese in WORDS.values():
        assert english
        assert chinese
        assert set(re.findall(r"\{\w+\}", english)) == set(re.findall(r"\{\w+\}", chinese))
    assert [word for word in WORDS if f'"{word}"' not in sources] == []
    named = re.findall(r'data-(?:word|label|placeholder)="(\w+)"', sources)
    assert set(named) <= set(WORDS)


def test_the_page_names_no_foreign_address_and_parses_no_markup() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in FILES)
    assert set(re.findall(r"https?://[\w.]+", sources)) == {"http://www.w3.org", "http://host"}  # names, never fetched
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|<style| style=", sources)
    assert re.findall(r"<script[^>]*>(.*?)</script>", sources) == [""]
