"""The reasoning of an answer is split from its content, however the text arrives."""

from __future__ import annotations

import random

import pytest

from tessera.server.answer_parts import AnswerParts
from tessera.server.reasoning import ReasoningSplitter, reasoning_for
from tessera.server.tools import parser_for

# text, whether the prompt opened the reasoning, whether answers have tags -> reasoning, content
CASES: dict[str, tuple[str, bool, bool, str, str]] = {
    "no reasoning": ("Hello <b>.\n", False, False, "", "Hello <b>.\n"),
    "reasoning": ("<think>\nWell, 1 < 2.\n</think>\n\nYes.\n", False, False, "Well, 1 < 2.", "Yes.\n"),
    "whitespace before it": ("\n<think>a</think>b", False, False, "a", "b"),
    "empty reasoning": ("<think>\n\n</think>\n\nYes.", False, False, "", "Yes."),
    "opened by the prompt": ("\nWell.\n</think>\n\nYes.", True, False, "Well.", "Yes."),
    "opened by both": ("<think>\nWell.\n</think>\n\nYes.", True, False, "Well.", "Yes."),
    "cut in the reasoning": ("<think>a </thi", False, False, "a </thi", ""),
    "cut in the opened reasoning": ("a </thi", True, False, "a </thi", ""),
    "cut in the tag": ("<thi", False, False, "", "<thi"),
    "a tag in the content": ("See <think>a</think>", False, False, "", "See <think>a</think>"),
    "a second block": ("<think>a</think><think>b</think>", False, False, "a", "<think>b</think>"),
    "answer tags": ("<think>a</think>\n<answer>\nb <\n</answer>\n", False, True, "a", "b <\n"),
    "text behind the answer": ("<think>a</think><answer>b</answer> c", False, True, "a", "b c"),
    "no answer tags": ("<think>a</think>b</answer>", False, True, "a", "b</answer>"),
    "answer tags of other families": ("<think>a</think><answer>b</answer>", False, False, "a", "<answer>b</answer>"),
    "answer without reasoning": ("<answer>b</answer>", False, True, "", "<answer>b</answer>"),
}


def pieces(text: str, random_source: random.Random) -> list[str]:
    cuts = sorted(random_source.sample(range(len(text) + 1), random_source.randint(0, len(text))))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_any_split_of_the_text_gives_the_same_reasoning_and_content(name: str) -> None:
    text, opened, answer_tags, reasoning, content = CASES[name]
    source = random.Random(0)
    for parts in [[text], list(text), *(pieces(text, source) for _ in range(40))]:
        splitter = ReasoningSplitter(opened, answer_tags=answer_tags)
        result = [entry for part in parts for entry in splitter.add(part)] + splitter.close()
        assert "".join(text for kind, text in result if kind == "reasoning") == reasoning
        assert "".join(text for kind, text in result if kind == "content") == content
        assert all(text for _, text in result)


def test_text_is_returned_as_soon_as_it_can_be_no_tag() -> None:
    splitter = ReasoningSplitter(opened=False)
    assert splitter.add("<th") == []
    assert splitter.add("ink>a b ") == [("reasoning", "a b")]
    assert splitter.add("<") == []
    assert splitter.add("c") == [("reasoning", " <c")]
    assert splitter.add("</think>d </") == [("content", "d </")]


def test_families_that_do_not_reason_have_no_splitter() -> None:
    assert reasoning_for("qwen2_5_vl", "") is None
    opened = reasoning_for("qwen3_vl", "<|im_start|>assistant\n<think>\n")
    assert opened is not None
    assert opened.add("a") == [("reasoning", "a")]
    glm = reasoning_for("glm4v", "<|assistant|>\n")
    assert glm is not None
    assert glm.add("<think>a</think><answer>b") == [("reasoning", "a"), ("content", "b")]


def test_reasoning_and_tool_calls_are_split_in_one_pass() -> None:
    answer = AnswerParts(reasoning_for("glm4v", ""), parser_for("glm4v", ["now"]))
    deltas = answer.add("<think>now\n{}</think><answer>now\n{}</answer>") + answer.close()
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert [delta.get("reasoning") for delta in deltas] == ["now\n{}", None, None]
    assert calls[0]["function"] == {"name": "now", "arguments": ""}
    assert calls[0]["id"]
    assert calls[1] == {"index": 0, "function": {"arguments": "{}"}}
    assert AnswerParts(None, None).add("<think>") == [{"content": "<think>"}]
