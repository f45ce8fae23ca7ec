"""What a request may name and set: tools, adapters, parts, priority, and fields whose empty value means something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from tessera.inference.loaded import LoadedProcessor
from tessera.server.app import make_app
from tessera.server.service import Service
from tests.toys.chat_service import make_processor, make_service

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> LoadedProcessor:
    return make_processor(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def service(processor: LoadedProcessor, tmp_path: Path) -> Service:
    (tmp_path / "lora").mkdir()
    return make_service(processor, allow_adapters=tmp_path, max_length=1024)


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service), "http://localhost") as client:
        yield client


def refused(client: TestClient, path: str = CHAT, **fields: Any) -> Any:
    response = client.post(path, json={**HELLO, **fields} if path == CHAT else fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_an_empty_text_has_no_tokens(client: TestClient) -> None:
    body = client.post("/tokenize", json={"prompt": "", "return_token_strs": True}).json()
    assert (body["count"], body["tokens"], body["token_strs"]) == (0, [], [])
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert refused(client, "/v1/completions", prompt="")["param"] == "prompt"


def test_empty_values_mean_that_a_field_is_not_set_unless_they_ask_for_something(client: TestClient) -> None:
    empty = {"functions": [], "documents": [], "bad_words": [], "suffix": "", "use_beam_search": False}
    assert client.post(CHAT, json={**HELLO, **empty, "chat_template_kwargs": {}}).status_code == 200
    for name in ("web_search_options", "guided_json"):
        assert refused(client, **{name: {}})["param"] == name


@pytest.mark.parametrize("name", ["bad name!", "", "a" * 65, "a\n", "é", 'a"b'])
def test_names_of_tools_are_those_of_openais_api(client: TestClient, name: str) -> None:
    function = {"name": name, "parameters": {"type": "object"}}
    error = refused(client, tools=[{"type": "function", "function": function}])
    assert error["param"] == "tools[0].function.name"
    error = refused(client, "/v1/responses", input="hi", tools=[{"type": "function", **function}])
    assert error["param"] == "tools[0].name"


@pytest.mark.parametrize(
    ("part", "words"), [({"type": "file", "file": {}}, "'file'"), ({"text": "hi"}, "no type"), ("hi", "no type")]
)
def test_an_unknown_part_is_refused_by_its_type(client: TestClient, part: Any, words: str) -> None:
    error = refused(client, messages=[{"role": "user", "content": [part]}])
    assert error["param"] == "messages[0].content[0]"
    assert words in error["message"]
    assert "image_url" in error["message"]


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", " a", "a\u202eb", "\x00"])
def test_names_of_adapters_have_no_control_characters(client: TestClient, name: str) -> None:
    assert refused(client, "/v1/load_lora_adapter", lora_name=name, lora_path="lora")["param"] == "lora_name"


def test_clients_set_no_priority_unless_the_server_allows_it(processor: LoadedProcessor, client: TestClient) -> None:
    assert refused(client, priority=-1)["code"] == "priority_not_allowed"
    assert client.post(CHAT, json={**HELLO, "priority": 0}).status_code == 200
    service = make_service(processor, allow_priority=True)
    with TestClient(make_app(service), "http://localhost") as allowed:
        assert allowed.post(CHAT, json={**HELLO, "priority": -1}).status_code == 200
    assert service.engine.requests[-1].priority == -1  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_only_the_first_call_is_returned(
    client: TestClient, service: Service, stream: bool
) -> None:
    service.engine.text = CALL % 1 + "\n" + CALL % 2  # type: ignore[attr-defined]
    tools = [{"type": "function", "function": {"name": "add"}}]
    for parallel, calls in ((True, 2), (False, 1)):
        body = {**HELLO, "tools": tools, "parallel_tool_calls": parallel, "stream": stream}
        response = client.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        assert response.text.count('"name":"add"') == calls
        assert '"finish_reason":"tool_calls"' in response.text


def test_metrics_have_no_times_of_creation(client: TestClient) -> None:
    client.post(CHAT, json=HELLO)
    page = client.get("/metrics").text
    assert "tessera_requests_total" in page
    assert "_created" not in page
