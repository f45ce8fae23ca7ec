"""Tool calls in the text of an answer: however the text arrives, the same calls and the same plain text come out."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tessera.data.tool_calls import format_calls
from tessera.errors import TesseraError
from tessera.server.tools import ToolPiece, constraint_for, parser_for

NAMES = ("weather", "weather_now", "now")
Calls = list[tuple[str, str]]  # name and text of the arguments

# family, text -> plain text, calls
CASES: dict[str, tuple[str, str, str, Calls]] = {
    "plain text": ("qwen3", "1 < 2 and <b> {x}\n\n", "1 < 2 and <b> {x}\n\n", []),
    "a call": (
        "qwen3",
        'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"where": "Århus"}}\n</tool_call>',
        "Let me see.",
        [("weather", '{"where": "Århus"}')],
    ),
    "two calls": (
        "internvl",
        '<tool_call>\n{"name": "a b", "arguments": {}}\n</tool_call>\n<tool_call>{"name":"now","parameters":{}}'
        "</tool_call>\n",
        "",
        [("a b", "{}"), ("now", "{}")],
    ),
    "brackets and tags in strings": (
        "qwen2",
        '<tool_call>{"name": "a", "arguments": {"x": "}\\"{</tool_call>\\\\", "y": [{"z": {}}]}}</tool_call> end',
        " end",
        [("a", '{"x": "}\\"{</tool_call>\\\\", "y": [{"z": {}}]}')],
    ),
    "a call of another shape": (
        "qwen3",
        '<tool_call>{"call": "a"}</tool_call>',
        '<tool_call>{"call": "a"}</tool_call>',
        [],
    ),
    "arguments that are no object": (
        "qwen3",
        'x <tool_call>{"name": "a", "arguments": 3}</tool_call>',
        'x <tool_call>{"name": "a", "arguments": 3}</tool_call>',
        [],
    ),
    "a malformed call before a call": (
        "qwen3",
        '<tool_call>weather</tool_call> <tool_call>{"name": "a", "arguments": {}}</tool_call>',
        "<tool_call>weather</tool_call>",
        [("a", "{}")],
    ),
    "a name that does not end": ("qwen3", '<tool_call>{"name": "' + "a" * 300, '<tool_call>{"name": "' + "a" * 300, []),
    "a longest name": (
        "qwen3",
        f'<tool_call>{{"name": "{"a" * 256}", "arguments": {{}}}}</tool_call>',
        "",
        [("a" * 256, "{}")],
    ),
    "text where the tag should close": (
        "qwen3",
        '<tool_call>{"name": "a", "arguments": {}, "id": 1}</tool_call>',
        ', "id": 1}</tool_call>',
        [("a", "{}")],
    ),
    "cut in the tag": ("qwen3", "a\n<tool_c", "a\n<tool_c", []),
    "cut in the name": ("qwen3", 'a <tool_call>{"name": "wea', 'a <tool_call>{"name": "wea', []),
    "cut in the arguments": ("qwen3", '<tool_call>{"name": "a", "arguments": {"x": "\\', "", [("a", '{"x": "\\')]),
    "cut in the closing tag": ("qwen3", '<tool_call>{"name": "a", "arguments": {}}\n</tool', "", [("a", "{}")]),
    "llama": ("llama", '{"name": "weather", "parameters": {"x": "}"}}', "", [("weather", '{"x": "}"}')]),
    "llama with a tag and a type": (
        "llama",
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"x": 1}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [("weather", '{"x": 1}'), ("now", "{}")],
    ),
    "llama as prompted": ("llama", '<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>', "", [("a", "{}")]),
    "llama answers in JSON": (
        "llama",
        '{"name": "Bob", "parameters": {}}',
        '{"name": "Bob", "parameters": {}}',
        [],
    ),
    "llama quotes a call": (
        "llama",
        'So {"name": "now", "parameters": {}}',
        'So {"name": "now", "parameters": {}}',
        [],
    ),
    "llama's form from another family": (
        "qwen3",
        '{"name": "now", "parameters": {}}',
        '{"name": "now", "parameters": {}}',
        [],
    ),
    "glm": ("glm4v", '\nweather_now\n{"x": {"y": 1}}\n', "", [("weather_now", '{"x": {"y": 1}}')]),
    "glm begins with a name": ("glm4v", "weather\nis {fine}", "weather\nis {fine}", []),
    "glm names another function": ("glm4v", "while\n{}", "while\n{}", []),
}


def parsed(family: str, parts: list[str]) -> tuple[str, Calls]:
    parser = parser_for(family, NAMES)
    pieces = [piece for part in parts for piece in parser.add(part)] + parser.close()
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    heads = [piece for piece in pieces if isinstance(piece, ToolPiece) and piece.name is not None]
    rest = [piece for piece in pieces if isinstance(piece, ToolPiece) and piece.name is None]
    assert [head.index for head in heads] == list(range(len(heads)))
    assert len({head.id for head in heads}) == len(heads)
    assert all(heads[piece.index].id == piece.id for piece in rest)
    assert all(piece if isinstance(piece, str) else piece.name or piece.arguments for piece in pieces)
    calls = [(str(head.name), "".join(p.arguments for p in rest if p.index == head.index)) for head in heads]
    return text, calls


def split(text: str, source: random.Random) -> list[str]:
    cuts = sorted(source.sample(range(len(text) + 1), source.randint(0, len(text))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_any_split_of_the_text_gives_the_same_calls(name: str) -> None:
    family, text, plain, calls = CASES[name]
    source = random.Random(0)
    for parts in [[text], list(text), *(split(text, source) for _ in range(15))]:
        assert parsed(family, parts) == (plain, calls)


@pytest.mark.parametrize("family", ["qwen3", "llama", "glm4v"])
def test_any_split_of_random_text_gives_the_same_calls_and_loses_nothing(family: str) -> None:
    source = random.Random(1)
    words = [
        *("<tool_call>", "</tool_call>", "<tool_", '{"name": ', '"weather"', ', "arguments": ', ', "parameters": '),
        *(
            "{",
            "}",
            '"',
            "\\",
            "\n",
            " ",
            "now",
            "weather",
            '{"x": "y"}',
            ";",
            "<|python_tag|>",
            '"type": "function", ',
        ),
        *('{"name": "now", "arguments": {}}', '<tool_call>{"name": "now", "arguments": {', "now\n{", "</tool", "text"),
    ]
    calls = 0
    for _ in range(100):
        text = "".join(source.choices(words, k=source.randint(1, 14)))
        whole = parsed(family, [text])
        assert parsed(family, list(text)) == whole
        assert parsed(family, split(text, source)) == whole
        assert all(name in text and arguments in text for name, arguments in whole[1])
        assert whole[1] or whole[0] == text
        calls += len(whole[1])
    assert calls > 2


def test_names_and_arguments_are_returned_as_they_arrive() -> None:
    parser = parser_for("qwen3")
    assert parser.add("Hi <") == ["Hi"]
    assert parser.add("b>") == [" <b>"]
    assert parser.add('<tool_call>\n{"name": "now", "arguments": ') == []
    name, brace = parser.add("{")
    assert isinstance(name, ToolPiece)
    assert (name.index, name.name, name.arguments) == (0, "now", "")
    assert brace == ToolPiece(0, name.id, None, "{")
    assert parser.add('"x": "a') == [ToolPiece(0, name.id, None, '"x": "a')]
    assert parser.add('"}}\n</tool_call>') == [ToolPiece(0, name.id, None, '"}')]
    assert parser.close() == []


# ---------------------------------------------------------------------------------------------- forced calls

PARAMETERS = {
    "type": "object",
    "properties": {"where": {"type": "string", "maxLength": 5}, "days": {"$ref": "#/$defs/days"}},
    "$defs": {"days": {"type": "integer"}},
    "required": ["where", "days"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "nöw"}},
]
WEATHER = {"name": "weather", "arguments": {"where": 'a"b', "days": 3}}
NOW = {"name": "nöw", "arguments": {}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def accepted(grammar: str, text: str) -> bool:
    """Return whether a text is a complete answer in the grammar. Each byte is a token."""
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.get_error()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_forced_calls_are_written_as_in_the_prompts_and_parsed_again() -> None:
    constraint = constraint_for(TOOLS, "required")
    assert constraint is not None
    assert constraint.kind == "grammar"
    for calls in ([WEATHER], [NOW], [WEATHER, NOW, WEATHER]):
        text = format_calls(calls)
        assert accepted(constraint.text, text)
        expected = [(call["name"], json.dumps(call["arguments"])) for call in calls]
        assert parsed("qwen3", [text]) == ("", expected)


@pytest.mark.parametrize(
    "text",
    [
        "It is warm.",
        "",
        format_calls([{"name": "other", "arguments": {}}]),
        format_calls([{"name": "weather", "arguments": {"where": "here"}}]),
        format_calls([{"name": "weather", "arguments": {"where": "too long", "days": 3}}]),
        format_calls([{"name": "weather", "arguments": {"where": "here", "days": "3"}}]),
        format_calls([{"name": "nöw", "arguments": 3}]),
        format_calls([NOW]) + " and",
    ],
)
def test_answers_that_are_no_call_of_an_offered_tool_are_excluded(text: str) -> None:
    constraint = constraint_for(TOOLS, "required")
    assert constraint is not None
    assert not accepted(constraint.text, text)


def test_a_named_tool_is_called_once() -> None:
    constraint = constraint_for(TOOLS, named("weather"))
    assert constraint is not None
    assert accepted(constraint.text, format_calls([WEATHER]))
    assert not accepted(constraint.text, format_calls([NOW]))
    assert not accepted(constraint.text, format_calls([WEATHER, WEATHER]))
    single = constraint_for(TOOLS, "required", parallel=False)
    assert single is not None
    assert not accepted(single.text, format_calls([NOW, NOW]))


def test_a_free_choice_has_no_constraint_and_an_impossible_choice_is_refused() -> None:
    assert constraint_for(TOOLS, "auto") is constraint_for(TOOLS, "none") is constraint_for(TOOLS, None) is None
    with pytest.raises(TesseraError) as error:
        constraint_for(TOOLS, named("wether"))
    assert (error.value.code, error.value.nearest) == ("generation.unknown-tool", "weather")
    with pytest.raises(TesseraError) as error:
        constraint_for([], "required")
    assert error.value.code == "generation.no-tools"
