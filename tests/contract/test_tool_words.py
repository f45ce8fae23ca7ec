"""Conversations with tools: what we train on is what the exported chat template writes for the same row in
transformers, and what Qwen's published one does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import TEXTS
from transformers import AutoTokenizer

from tessera.config.run_config import ModelSection, SourceSection
from tessera.core.sample import Sample
from tessera.data.sources.source import open_source
from tessera.data.tool_calls import format_calls, format_spoken_calls
from tessera.models import resolve
from tessera.models.glm4v.processor import GLM4V
from tessera.models.llama import LLAMA3, VICUNA
from tessera.models.processing.chat import ChatTemplate
from tessera.models.processing.tokenizer import train_tokenizer

TAGS = ("<tool_call>", "</tool_call>")  # words of the vocabulary that any text may hold
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = (*ChatTemplate().special_words(), "<|endoftext|>")
WORDS = {
    "glm4v": ("<|endoftext|>", *GLM4V.special, "<|image|>", "<|video|>"),
    "internvl": (*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    "llama": ("<|end_of_text|>", *LLAMA3.special),
    "llava": (*CHATML, "<image>", "<video>"),
    "qwen2": CHATML,
    "qwen2_5_vl": QWEN,
    "qwen2_vl": QWEN,
    "qwen3": CHATML,
    "qwen3_vl": QWEN,
    "vicuna": VICUNA.special,
}
FUNCTION = {
    "name": "weather",
    "description": "What's it like in São Paulo & elsewhere?",
    "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}, {"name": "now", "parameters": {}}]
SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Is it warm in Århus?"}


def call(arguments: Any, name: str = "weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


ANSWER = {"role": "tool", "content": '{"t": 21}'}
SAID = {"role": "assistant", "content": "It is."}
ROWS: dict[str, list[dict[str, Any]]] = {
    "asked": [ASKED],
    "told how": [SYSTEM, ASKED],
    "called": [ASKED, calling(call({"where": "Århus"})), ANSWER],
    "called with words": [SYSTEM, ASKED, calling(call({"where": "Århus"}), content="Let me see."), ANSWER],
    "called twice": [SYSTEM, ASKED, calling(call({"where": "a"}), call({}, "now")), ANSWER, ANSWER, SAID, ASKED],
    "called in text": [ASKED, calling(call('{"where":"Århus"}')), ANSWER],
}


def sample_of(row: dict[str, Any], folder: Path) -> Sample:
    """As training reads it from a file."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return open_source(SourceSection(path=folder / "rows.jsonl")).read(0)


@pytest.fixture(scope="module")
def processors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Of every family, and transformers' tokenizer of what it exports."""
    processors = {}
    for name, words in WORDS.items():
        root = tmp_path_factory.mktemp(name)
        tokenizer = json.loads(train_tokenizer(TEXTS * 20, 512, [*TAGS, *words]).to_str())
        for token in tokenizer["added_tokens"]:
            token["special"] = token["content"] not in TAGS
        (root / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
        spec, config = resolve(ModelSection(family="llama" if name == "vicuna" else name, preset="quickstart"))
        assert spec.processor is not None
        processor = spec.processor(config, root)
        processor.save(root / "out")  # type: ignore[attr-defined]
        (root / "out" / "config.json").write_text(json.dumps(config.to_hf()))  # type: ignore[attr-defined]
        processors[name] = (processor, AutoTokenizer.from_pretrained(root / "out"))
    return processors


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("name", WORDS)
def test_prompts_are_what_the_exported_template_writes(name: str, row: str, processors: Any, tmp_path: Path) -> None:
    processor, tokenizer = processors[name]
    ours = processor.prompt([sample_of({"messages": ROWS[row], "tools": TOOLS}, tmp_path)], [[]])["tokens"].tolist()
    told = tokenizer.apply_chat_template(ROWS[row], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert ours == tokenizer(told, add_special_tokens=False)["input_ids"]
    spread = [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]} if turn["content"] else turn
        for turn in ROWS[row]
    ]
    assert tokenizer.apply_chat_template(spread, tools=TOOLS, tokenize=False, add_generation_prompt=True) == told
    if row != "asked" and row != "told how":
        assert tokenizer.convert_tokens_to_ids("<tool_call>") in ours


@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl", "qwen3", "qwen3_vl"])
def test_whole_conversations_are_trained_on_as_the_exported_template_writes_them(
    name: str, processors: Any, tmp_path: Path
) -> None:
    processor, tokenizer = processors[name]
    said = [*ROWS["called with words"], SAID]
    ours = processor.encode(sample_of({"messages": said, "tools": TOOLS}, tmp_path), [])
    told = tokenizer.apply_chat_template(said, tools=TOOLS, tokenize=False)
    assert ours.tokens.tolist() == tokenizer(told)["input_ids"]
    trained = processor.spell(ours.tokens[ours.labels >= 0].tolist())
    spoken = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"where": "Århus"}}\n</tool_call><|im_end|>'
    assert trained == spoken + "It is.<|im_end|>"


LISTED = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    + "\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS)
    + "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)
CALLED = (
    "<|im_start|>user\nIs it warm in Århus?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
    '{"name": "weather", "arguments": {"where": "Århus"}}\n</tool_call><|im_end|>\n'
    '<|im_start|>user\n<tool_response>\n{"t": 21}\n</tool_response><|im_end|>\n<|im_start|>assistant\n'
)


@pytest.mark.parametrize("system", [None, "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."])
def test_qwens_published_words(system: str | None, processors: Any, tmp_path: Path) -> None:
    """Qwen3 has no prompt of its own; that of Qwen2.5 comes before the tools."""
    root = tmp_path / "words"
    processor, _ = processors["qwen2"]
    processor.save(root)
    spec, config = resolve(ModelSection(family="qwen2", preset="quickstart"))
    processor: Any = spec.processor(config, root, system=system)  # type: ignore[misc]
    sample = sample_of({"messages": ROWS["called"], "tools": TOOLS}, tmp_path)
    opening = f"<|im_start|>system\n{system}\n\n{LISTED}" if system else f"<|im_start|>system\n{LISTED}"
    wanted = f"{opening}<|im_end|>\n{CALLED}"
    assert "".join(piece.text for piece in processor.template.render(sample.messages, answer=True)) == wanted
    processor.save(tmp_path / "out")
    told = AutoTokenizer.from_pretrained(tmp_path / "out").apply_chat_template(
        ROWS["called"], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert told == wanted
    assert spec.processor(config, tmp_path / "out").template == processor.template  # type: ignore[misc, attr-defined]


def test_arguments_that_are_no_json() -> None:
    """Rows that list such calls say so; a turn that holds another manner of calling stays as it is."""
    with pytest.raises(ValueError, match="arguments of a call are not readable as JSON: 'Århus'"):
        format_calls([call("Århus")])
    said = '{"name": "weather", "arguments": "Århus"}'
    assert format_spoken_calls(said) == said
    assert format_spoken_calls("weather(Århus)") == "weather(Århus)"
    assert format_spoken_calls('[{"name": "now"}]') == '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
