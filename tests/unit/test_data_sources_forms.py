"""Spellings of a sample, names of keys, and rows that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_cases import row, seen, write_jsonl

from tessera.config.run_config import SourceSection
from tessera.core.sample import PLAIN, Message, Part, Sample
from tessera.data.sources.container import RecordError
from tessera.data.sources.fields import COLUMNS
from tessera.data.sources.source import Source, open_source
from tests.errors import raises

SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "<image>and<image>: which? <video>"},
        {"from": "gpt", "value": "The first."},
    ],
    "images": ["a.png", "b.png"],
    "videos": ["c.mp4"],
}
PARTS = {
    "id": 7,
    "messages": [
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what <image>?"}]},
        {"role": "assistant", "content": "A thing."},
    ],
}
TOOL = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}


def opened(path: Path, rows: list[dict[str, Any]], **section: Any) -> Source:
    source = open_source(SourceSection(path=write_jsonl(path / "rows.jsonl", rows), **section))
    assert isinstance(source, Source)
    return source


def single_sample(path: Path, content: dict[str, Any], **section: Any) -> Sample:
    return opened(path, [content], **section).read(0)


def said(sample: Sample) -> list[tuple[str, str]]:
    return [
        (m.role, "".join(p.value if p.kind == "text" else f"[{p.value}]" for p in m.parts)) for m in sample.messages
    ]


def test_the_forms_of_conversations(tmp_path: Path) -> None:
    source = opened(tmp_path, [PARTS])
    assert source.record_format == "messages"
    sample = source.read(0)
    assert sample.id == "7"
    assert sample.messages[0] == Message("user", (Part("image", "a.png"), Part("text", "what <image>?")))
    assert sample.messages[1] == Message("assistant", (Part("text", "A thing."),))

    source = opened(tmp_path, [SHAREGPT])
    assert source.record_format == "sharegpt"
    sample = source.read(0)
    assert sample.id == "rows.jsonl:1"
    assert [m.role for m in sample.messages] == ["system", "user", "assistant"]
    assert [(p.kind, p.value) for p in sample.messages[1].parts] == [
        ("image", "a.png"),
        ("text", "and"),
        ("image", "b.png"),
        ("text", ": which? "),
        ("video", "c.mp4"),
    ]

    source = opened(tmp_path, [seen("a.png", id="x")])
    assert source.record_format == "llava"
    assert source.read(0).messages[0].parts == (Part("image", "a.png"), Part("text", "\nWhat?"))


def test_sound_and_lists_beside_messages(tmp_path: Path) -> None:
    heard = row("<audio>who? <video>", "You.", audios=["a.wav"])
    assert said(single_sample(tmp_path, heard)) == [("user", "[a.wav]who? <video>"), ("assistant", "You.")]
    # The part says where, the list says which: as Hugging Face data sets write it.
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image", "text": None}]
    listed = {"messages": [{"role": "user", "content": parts}], "images": ["a.png", "b.png"]}
    assert said(single_sample(tmp_path, listed)) == [("user", "[a.png]and[b.png]")]
    # A conversation without a list of videos may speak of the tag.
    plain = {"conversations": [{"from": "human", "value": "What is <video> in HTML?"}]}
    assert said(single_sample(tmp_path, plain)) == [("user", "What is <video> in HTML?")]


def test_alpaca(tmp_path: Path) -> None:
    full = {"instruction": "Add", "input": "1, 2", "output": "3", "system": "Be brief.", "history": [["Hi", "Hello"]]}
    source = opened(tmp_path, [full, {"instruction": "Go", "input": "", "output": "Gone"}])
    assert source.record_format == "alpaca"
    assert said(source.read(0)) == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add\n1, 2"),
        ("assistant", "3"),
    ]
    assert said(source.read(1)) == [("user", "Go"), ("assistant", "Gone")]
    visible = {"instruction": "What?", "output": "A dog", "image": "a.png"}
    assert said(single_sample(tmp_path, visible)) == [("user", "[a.png]What?"), ("assistant", "A dog")]


def test_text_is_a_message_that_nobody_says(tmp_path: Path) -> None:
    for key in ("text", "content"):
        sample = single_sample(tmp_path, {key: "Once upon <image> a time"})
        assert said(sample) == [(PLAIN, "Once upon <image> a time")]
    woven = {"text": "See <image> and <image>.", "images": ["a.png", "b.png"]}
    assert said(single_sample(tmp_path, woven)) == [(PLAIN, "See [a.png] and [b.png].")]
    assert said(single_sample(tmp_path, {"text": "a dog", "image": "a.png"})) == [(PLAIN, "[a.png]a dog")]


def test_calls_of_functions(tmp_path: Path) -> None:
    call, again = '{"name": "sum", "arguments": {"a": 1}}', "<tool_call>\n{}\n</tool_call>"
    chat = {
        "conversations": [
            {"from": "human", "value": "Add."},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "It is 3."},
        ],
        "system": "Count.",
        "tools": json.dumps([TOOL]),
    }
    sample = single_sample(tmp_path, chat)
    assert [role for role, _ in said(sample)] == ["system", "user", "assistant", "tool", "assistant"]
    system = said(sample)[0][1]
    assert system.startswith("Count.\n\n# Tools")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in system
    assert said(sample)[2][1] == again.format(call)

    listed = {
        "messages": [
            {"role": "user", "content": "Add."},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "sum", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "3"},
        ],
        "tools": [TOOL],
    }
    sample = single_sample(tmp_path, listed)
    assert said(sample)[0][1].startswith("# Tools")
    assert said(sample)[2:] == [("assistant", again.format(call)), ("tool", "3")]
    assert said(single_sample(tmp_path, {**row("a", "b"), "tools": "[]"})) == [("user", "a"), ("assistant", "b")]


def test_columns_name_what_is_called_differently(tmp_path: Path) -> None:
    odd = {
        "key": "x1",
        "dialogue": [{"who": "Q", "words": "<image>?"}, {"who": "A", "words": "Yes."}, {"who": "res", "words": "ok"}],
        "pics": ["a.png"],
        "rules": "Be kind.",
    }
    columns = {
        "id": "key",
        "messages": "dialogue",
        "role_tag": "who",
        "content_tag": "words",
        "user_tag": "Q",
        "assistant_tag": "A",
        "observation_tag": "res",
        "images": "pics",
        "system": "rules",
    }
    for form in ("auto", "messages", "sharegpt"):
        sample = single_sample(tmp_path, odd, columns=columns, format=form)
        assert sample.id == "x1"
        expected = [("system", "Be kind."), ("user", "[a.png]?"), ("assistant", "Yes."), ("tool", "ok")]
        assert said(sample) == expected
    question = {"question": "Why?", "answer": "So."}
    sample = single_sample(tmp_path, question, columns={"prompt": "question", "response": "answer"})
    assert said(sample) == [("user", "Why?"), ("assistant", "So.")]
    assert said(single_sample(tmp_path, {"body": "x"}, columns={"text": "body"})) == [(PLAIN, "x")]
    openai = {"conversations": row("a", "b")["messages"]}
    renamed = single_sample(tmp_path, openai, columns={"messages": "conversations"})
    assert said(renamed) == [("user", "a"), ("assistant", "b")]
    with raises("data.unknown-column") as raised:
        single_sample(tmp_path, odd, columns={"mesages": "dialogue"})
    assert raised.value.nearest == "messages"
    assert raised.value.allowed == list(COLUMNS)


def test_text_only_rows_do_not_hide_the_form(tmp_path: Path) -> None:
    plain = {"conversations": seen("a.png")["conversations"][1:]}
    source = opened(tmp_path, [plain, seen("a.png"), {**plain, "image": None}])
    assert source.record_format == "llava"
    assert [isinstance(sample, RecordError) for _, sample in source.scan(range(3))] == [False] * 3
    assert opened(tmp_path, [plain]).record_format == "sharegpt"
    # Only the first thousand rows and some others are asked; what is missed is an error that says what to write.
    late = opened(tmp_path, [plain] * 1001 + [seen("a.png")] + [plain] * 400)
    with raises("data.mixed-formats") as raised:
        late.read(1001)
    assert "`format: llava`" in str(raised.value.fix)
    assert opened(tmp_path, [plain] * 1001 + [seen("a.png")], format="llava").read(1001).media()


def test_mixed_forms_are_an_error_of_the_set(tmp_path: Path) -> None:
    source = opened(tmp_path, [seen("a.png"), row("q", "a")])
    with raises("data.mixed-formats") as raised:
        list(source.scan(range(2)))
    assert raised.value.where == f"{tmp_path / 'rows.jsonl'}, rows.jsonl:2"
    with raises("data.mixed-formats"):
        opened(tmp_path, [seen("a.png")], format="sharegpt").read(0)
    for other in ({"instruction": "a", "output": "b"}, {"text": "a"}):
        with raises("data.mixed-formats"):
            opened(tmp_path, [row("q", "a"), other]).read(1)
    # A form that the recipe names is taken where the row has it, whatever else the row has.
    both = {"text": "plain", **row("q", "a")}
    assert single_sample(tmp_path, both, format="text").messages[0].role == PLAIN
    # A row that has the keys of no form is that row's own trouble.
    with raises("data.no-turns", "messages"):
        opened(tmp_path, [row("q", "a"), {"unknown": 1}]).read(1)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"conversations": seen("a")["conversations"], "image": ["a", "b"]}, "data.placeholder-count 1 <image>"),
        ({**seen("a"), "image": []}, "data.placeholder-count"),
        ({"conversations": seen("a")["conversations"]}, "data.placeholder-count"),
        ({**SHAREGPT, "videos": []}, "data.placeholder-count <video>"),
        ({"messages": []}, "data.no-turns messages"),
        ({"messages": "hello"}, "data.no-turns messages"),
        ({"messages": ["hello"]}, "data.bad-turn"),
        ({"messages": [{"role": "king", "content": "x"}]}, "data.unknown-speaker 'king'"),
        ({"messages": [{"from": "user", "value": "x"}]}, "data.no-role ['from', 'value']"),
        ({"messages": [{"role": "user", "content": 5}]}, "data.not-a-text content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "data.bad-part 'smell'"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "data.bad-media-value"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "data.invalid-unicode"),
        ({"messages": [{"role": "user", "content": "<image>"}], "images": []}, "data.placeholder-count"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "data.bad-tools tool_calls"),
        ({**row("a", "b"), "tools": "{"}, "data.bad-tools"),
        ({**row("a", "b"), "tools": [5]}, "data.bad-tools"),
        ({**row("a", "b"), "system": 5}, "data.not-a-text system"),
        ({**SHAREGPT, "system": "Twice."}, "data.two-system-prompts"),
        ({"conversations": [{"from": "dog", "value": "x"}], "image": "a"}, "data.unknown-speaker 'dog'"),
        ({"conversations": [{"from": "gpt", "value": None}], "image": "a"}, "data.not-a-text"),
        ({"instruction": "a", "output": ""}, "data.empty-turn output"),
        ({"instruction": "a", "output": ["b"]}, "data.not-a-text"),
        ({"instruction": "", "output": "b"}, "data.empty-turn instruction"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "data.bad-history"),
        ({"text": "  "}, "data.no-text 'text'"),
        ({"text": "<image>", "images": ["a", "b"]}, "data.placeholder-count"),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, bad: dict[str, Any], reason: str) -> None:
    code, *named = reason.split(" ", 1)
    source = opened(tmp_path, [{**bad, "id": "it"}])
    with raises(code, *named) as raised:
        source.read(0)
    assert raised.value.where == "it"


def test_a_form_that_cannot_be_told(tmp_path: Path) -> None:
    with raises("data.unknown-format") as raised:
        opened(tmp_path, [{"prompt": "x"}])
    assert "llava (conversations, image)" in str(raised.value)
    assert "columns" in str(raised.value.fix)
    caption = {"caption": "A cat.", "picture": "a.png"}
    assert opened(tmp_path, [caption], columns={"text": "caption", "images": "picture"}).record_format == "text"
    (tmp_path / "rows.jsonl").write_text("{torn\n{torn\n")
    with raises("data.unknown-format"):
        open_source(SourceSection(path=tmp_path / "rows.jsonl"))
