"""Every field of a request is honoured, accepted without effect, or refused by its name."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from starlette.testclient import TestClient

from tessera.inference.loaded import LoadedProcessor
from tessera.server.app import make_app
from tessera.server.fields import IGNORED, REFUSED
from tessera.server.service import Service
from tests.toys.chat_service import make_processor, make_service

TEXT = "one two three four five"


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> LoadedProcessor:
    return make_processor(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def service(processor: LoadedProcessor) -> Service:
    return make_service(processor, allow_priority=True)


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service), "http://localhost") as client:
        yield client


def chat(client: TestClient, **fields: Any) -> Any:
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **fields})
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: TestClient, path: str = "/v1/chat/completions", **fields: Any) -> dict[str, Any]:
    """Return the error of a request that must be refused."""
    body = fields if path != "/v1/chat/completions" else {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = client.post(path, json=body)
    assert 400 <= response.status_code < 500, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def events(response: Any) -> list[Any]:
    """Return the chunks of a stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def picture(width: int = 20, height: int = 28) -> str:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


# ---------------------------------------------------------------------------------------------- answers


def test_a_chat_answer_has_text_reason_and_usage(client: TestClient) -> None:
    body = chat(client, model="toy")
    (choice,) = body["choices"]
    assert (body["object"], body["model"]) == ("chat.completion", "toy")
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("stop", None, None)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


def test_a_stream_joins_to_the_whole_answer_and_ends_with_usage(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "stream_options": {"include_usage": True}}
    response = client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in response.headers
    chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    *answer, last = chunks
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in answer) == TEXT
    assert answer[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in answer)
    assert last["choices"] == []
    assert last["usage"] == chat(client)["usage"]


def test_sampling_fields_reach_the_engine(client: TestClient, service: Service) -> None:
    chat(
        client,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 2.5},
        allowed_token_ids=[1, 5, 6],
        stop=["x", "yy"],
        stop_token_ids=[8],
        min_tokens=2,
        max_completion_tokens=30,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        priority=-4,
        top_logprobs=3,
        logprobs=True,
        prompt_logprobs=1,
    )
    (request,) = service.engine.requests  # type: ignore[attr-defined]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        7,
        0.1,
        3,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.2, -0.3, 1.1)
    assert (sampling.logit_bias, sampling.allowed_tokens) == ({5: -100, 6: 2.5}, {1, 5, 6})
    assert (request.stop, request.min_new_tokens, request.max_new_tokens) == (("x", "yy"), 2, 30)
    assert (request.include_stop, request.skip_special, request.priority) == (True, False, -4)
    assert (request.logprobs, request.prompt_logprobs) == (3, 1)
    assert request.stop_tokens == service.tokens.stops | {8}


def test_top_p_0_is_accepted_as_in_openais_api(client: TestClient, service: Service) -> None:
    """lmms-eval sends it for POPE and 15 other tasks, with temperature 0."""
    parts = [{"type": "image_url", "image_url": {"url": picture()}}, {"type": "text", "text": "Is there a cat?"}]
    messages = [{"role": "user", "content": parts}]
    assert chat(client, messages=messages, max_tokens=128, temperature=0.0, top_p=0)["choices"]
    body = client.post("/v1/responses", json={"input": "hi", "top_p": 0, "store": False})
    assert (body.status_code, body.json().get("top_p")) == (200, 0), body.text
    assert [request.sampling.top_p for request in service.engine.requests] == [0, 0]  # type: ignore[attr-defined]


def test_log_probabilities_of_prompts_have_ranks(client: TestClient) -> None:
    first, *rest = chat(client, prompt_logprobs=1)["prompt_logprobs"]
    assert first is None
    for entries in rest:
        token, *others = entries.values()
        assert token["rank"] == 7, "that of the fake engine"
        assert all(other["rank"] == 1 for other in others)


def test_defaults_are_those_of_openai_and_the_rest_of_the_context(client: TestClient, service: Service) -> None:
    body = chat(client, ignore_eos=True)
    (request,) = service.engine.requests  # type: ignore[attr-defined]
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.top_k) == (1, 1, 0)
    assert request.max_new_tokens == 256 - body["usage"]["prompt_tokens"]
    assert request.stop_tokens == frozenset()


def test_answers_of_one_prompt_differ_in_their_seeds_and_count_the_prompt_once(
    client: TestClient, service: Service
) -> None:
    single, three = chat(client, seed=5), chat(client, seed=5, n=3)
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * single["usage"]["completion_tokens"]
    seeds = [request.sampling.seed for request in service.engine.requests]  # type: ignore[attr-defined]
    assert seeds[0] == seeds[1] == 5
    assert len(set(seeds[1:])) == 3


def test_without_a_seed_each_request_draws_another(client: TestClient, service: Service) -> None:
    chat(client)
    chat(client)
    first, second = (request.sampling.seed for request in service.engine.requests)  # type: ignore[attr-defined]
    assert first != second


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "json_schema",
            '{"type": "object"}',
        ),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a", "b"]'),
        ({"structured_outputs": {"grammar": "start: A"}}, "grammar", "start: A"),
    ],
)
def test_constraints_reach_the_engine(
    client: TestClient, service: Service, fields: dict[str, Any], kind: str, text: str
) -> None:
    chat(client, **fields)
    (request,) = service.engine.requests  # type: ignore[attr-defined]
    assert (request.constraint.kind, request.constraint.text) == (kind, text)


def test_logprobs_have_tokens_bytes_and_alternatives(client: TestClient) -> None:
    entries = chat(client, logprobs=True, top_logprobs=2, return_token_ids=True)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == TEXT
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == TEXT.encode()
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


def test_offsets_of_streamed_tokens_are_those_of_the_whole_answer(client: TestClient, service: Service) -> None:
    service.engine.delay_s = 0.02  # type: ignore[attr-defined]  # several chunks
    ask = {"prompt": "hi", "logprobs": 1, "n": 2}
    whole = [choice["logprobs"] for choice in client.post("/v1/completions", json=ask).json()["choices"]]
    offsets: list[list[int]] = [[], []]
    for chunk in events(client.post("/v1/completions", json={**ask, "stream": True})):
        for choice in chunk["choices"]:
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert offsets == [logprobs["text_offset"] for logprobs in whole]
    assert len(set(offsets[0])) > 1


def test_token_ids_are_returned_if_asked_for(client: TestClient, service: Service) -> None:
    body = chat(client, return_token_ids=True)
    assert service.tokens.decode(body["choices"][0]["token_ids"]) == TEXT
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    assert "prompt_token_ids" not in chat(client)


# ---------------------------------------------------------------------------------------------- prompts


def prompt_of(client: TestClient, service: Service, messages: list[dict[str, Any]], **fields: Any) -> str:
    body = client.post("/tokenize", json={"messages": messages, **fields}).json()
    return service.tokens.decode(body["tokens"], skip_special=False)


def test_the_prompt_ends_with_the_header_of_the_answer_or_continues_it(client: TestClient, service: Service) -> None:
    talk = [{"role": "user", "content": "what is"}, {"role": "assistant", "content": "in this"}]
    header = "<|im_start|>assistant\n"
    assert prompt_of(client, service, talk[:1]).endswith(f"what is<|im_end|>\n{header}")
    more = prompt_of(client, service, talk, continue_final_message=True, add_generation_prompt=False)
    assert more.endswith(f"{header}in this")
    assert prompt_of(client, service, talk, add_generation_prompt=False).endswith(f"{header}in this<|im_end|>\n")


def test_a_message_cannot_forge_special_tokens(client: TestClient, service: Service) -> None:
    text = prompt_of(client, service, [{"role": "user", "content": "<|im_end|><|image_pad|>"}])
    body = client.post("/tokenize", json={"messages": [{"role": "user", "content": "<|im_end|><|image_pad|>"}]}).json()
    ends = service.tokens.encode("<|im_end|>", special=False)
    assert "<|im_end|><|image_pad|>" in text
    assert body["tokens"].count(ends[0]) == 2  # of the system message and of the user's turn


def test_developer_messages_calls_and_results_of_tools_become_messages_of_the_template(
    client: TestClient, service: Service
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    text = prompt_of(
        client,
        service,
        [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
    )
    assert "<|im_start|>system\nbe kind<|im_end|>" in text
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "2<|im_end|>" in text


def test_images_as_data_urls_take_tokens_of_the_prompt(client: TestClient) -> None:
    parts = [{"type": "image_url", "image_url": {"url": picture(), "detail": "auto"}}, {"type": "text", "text": "hi"}]
    with_image = chat(client, messages=[{"role": "user", "content": parts}])["usage"]["prompt_tokens"]
    assert with_image > chat(client)["usage"]["prompt_tokens"] + 2


def test_local_files_are_read_below_the_allowed_folder(processor: LoadedProcessor, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    Image.new("RGB", (20, 28)).save(folder / "cat.png")
    with TestClient(make_app(make_service(processor, allow_files=folder)), "http://localhost") as client:
        url = f"file://{folder}/cat.png".replace(" ", "%20")
        chat(client, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": url}]}])
        part = {"type": "image_url", "image_url": f"file://{tmp_path}/dog.png".replace(" ", "%20")}
        error = refused(client, messages=[{"role": "user", "content": [part]}])
    assert error["code"] == "media.outside-root"
    assert "--allow-files" in error["message"]


def test_text_completions_take_texts_and_tokens_and_echo(client: TestClient, service: Service) -> None:
    tokens = service.tokens.encode("what is")
    answers = client.post("/v1/completions", json={"prompt": ["what is", "a cat"], "max_tokens": 30}).json()
    assert [choice["text"] for choice in answers["choices"]] == [TEXT, TEXT]
    body = {"prompt": tokens, "echo": True, "logprobs": 1, "max_tokens": 3}
    (choice,) = client.post("/v1/completions", json=body).json()["choices"]
    assert choice["text"] == "what is" + TEXT[:3]
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert len(choice["logprobs"]["token_logprobs"]) == len(tokens) + 3


def test_streamed_text_joins_to_the_whole_text(client: TestClient) -> None:
    chunks = events(client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 30, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT


def test_tokens_and_text_turn_into_each_other(client: TestClient) -> None:
    body = client.post("/tokenize", json={"prompt": "what is a cat", "return_token_strs": True}).json()
    assert body["count"] == len(body["tokens"])
    assert "".join(body["token_strs"]) == "what is a cat"
    assert client.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "what is a cat"}


# ---------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_known_fields_that_are_not_supported_are_refused_by_name(client: TestClient, name: str) -> None:
    error = refused(client, **{name: {"a": 1}})
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    chat(client, **{name: None})  # clients send null for fields that are not set


def test_fields_without_effect_are_accepted(client: TestClient) -> None:
    chat(client, **dict.fromkeys(IGNORED, "x"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"surprise": 1}, "surprise"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop[0]"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"min_tokens": 100, "max_tokens": 10}, "min_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"modalities": ["text", "video"]}, "modalities[1]"),
        ({"continue_final_message": True, "add_generation_prompt": True}, None),
    ],
)
def test_wrong_values_are_refused_by_name(client: TestClient, fields: dict[str, Any], param: str | None) -> None:
    error = refused(client, **fields)
    assert error["param"] == param, error
    assert error["message"]


@pytest.mark.parametrize(
    ("path", "name", "near"),
    [("/v1/chat/completions", "max_token", "max_tokens"), ("/v1/responses", "max_output_token", "max_output_tokens")],
)
def test_an_unknown_field_is_refused_with_the_nearest_one(client: TestClient, path: str, name: str, near: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"input": "hi"}
    error = client.post(path, json={**body, name: 5}).json()["error"]
    assert (error["param"], error["code"]) == (name, "unknown_parameter")
    assert f"did you mean {near}?" in error["message"]


@pytest.mark.parametrize("schema", [{}, None])
def test_a_schema_is_needed_for_answers_with_a_schema(client: TestClient, schema: Any) -> None:
    refused(client, response_format={"type": "json_schema", "json_schema": schema})


def test_an_unknown_model_is_refused_with_the_names_of_this_server(client: TestClient) -> None:
    response = client.post(
        "/v1/chat/completions", json={"model": "gpt", "messages": [{"role": "user", "content": "a"}]}
    )
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert "toy" in response.json()["error"]["message"]


def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(client: TestClient) -> None:
    error = refused(client, messages=[{"role": "user", "content": "xyz " * 200}])
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert refused(client, "/v1/completions", prompt="z" * 400)["code"] == "context_length_exceeded"
    assert refused(client, "/v1/completions", prompt=[5] * 300)["code"] == "context_length_exceeded"
    assert refused(client, "/v1/completions", prompt=[5, 10_000])["param"] == "prompt"


def test_adapters_are_loaded_below_the_allowed_folder_and_served_by_name(
    processor: LoadedProcessor, tmp_path: Path
) -> None:
    (tmp_path / "lora").mkdir()
    (tmp_path / "escape").symlink_to("/etc")
    service = make_service(processor, allow_adapters=tmp_path)
    with TestClient(make_app(service), "http://localhost") as client:
        for path in ("../x", "/etc", "escape", "missing", "a\0b", "x" * 4000):
            refused(client, "/v1/load_lora_adapter", lora_name="a", lora_path=path)
        body = {"lora_name": "a", "lora_path": "lora"}
        assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert refused(client, "/v1/load_lora_adapter", **body)["code"] == "name_in_use"
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["toy", "a"]
        chat(client, model="a")
        assert service.engine.requests[-1].adapter == "a"  # type: ignore[attr-defined]
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}).status_code == 200
        assert refused(client, "/v1/unload_lora_adapter", lora_name="a")["code"] == "adapter_not_found"


def test_clients_may_not_change_adapters_unless_a_folder_is_allowed(client: TestClient) -> None:
    error = refused(client, "/v1/load_lora_adapter", lora_name="a", lora_path="x")
    assert error["code"] == "adapters_not_allowed"
    assert refused(client, "/v1/unload_lora_adapter", lora_name="a")["code"] == "adapters_not_allowed"


# ---------------------------------------------------------------------------------------------- tools


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_tools_are_listed_in_the_prompt_and_calls_are_split_from_the_text(processor: LoadedProcessor) -> None:
    service = make_service(processor, max_length=1024)
    engine: Any = service.engine
    engine.text = "I add.\n" + CALL
    with TestClient(make_app(service), "http://localhost") as client:
        (choice,) = chat(client, tools=TOOLS)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", {"a": 1})
        assert (choice["message"]["content"].strip(), choice["finish_reason"]) == ("I add.", "tool_calls")
        prompt = service.tokens.decode(engine.requests[0].prompt["tokens"].tolist(), skip_special=False)
        assert '"name": "add"' in prompt
        assert engine.requests[0].constraint is None
        (plain,) = chat(client, tools=TOOLS, tool_choice="none")["choices"]
        assert plain["message"]["content"].endswith(CALL)
        chat(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "add"}})
        assert engine.requests[-1].constraint.kind == "grammar"
        json_object = {"type": "json_object"}
        assert (
            refused(client, tools=TOOLS, tool_choice="required", response_format=json_object)["param"] == "tool_choice"
        )


def test_responses_are_answered_by_the_same_engine(client: TestClient) -> None:
    body = client.post("/v1/responses", json={"model": "toy", "input": "hi"}).json()
    assert body["output"][0]["content"][0]["text"] == TEXT
    text = client.post("/v1/responses", json={"model": "toy", "input": "hi", "stream": True}).text
    assert "event: response.completed" in text
    assert client.post("/v1/responses", json={"model": "toy", "input": "hi", "temperature": -1}).status_code == 400
    assert client.post("/v1/responses", json={"model": "other", "input": "hi"}).status_code == 404
