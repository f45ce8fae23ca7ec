"""Constrained answers are members of their language, whatever the model says; too large grammars are refused."""

from __future__ import annotations

import functools
import json
import random
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import Unigram

import tessera
from tessera.core.batch import Batch
from tessera.engine.constraint import Grammars, Matcher
from tessera.engine.engine import Engine
from tessera.engine.request import Answer, Constraint, Delta, Request, Sampling
from tessera.engine.sampler import Sampler
from tessera.errors import TesseraError
from tessera.models.processing.chat import ChatSpan
from tessera.models.processing.conversation import ConversationProcessor
from tessera.models.processing.tokenizer import ChatEncoder, train_tokenizer
from tessera.server.tools import constraint_for
from tests.errors import raises
from tests.quick import quick
from tests.toys.chat_service import write_model

pytest.importorskip("llguidance")
LEARNED = ['{"name": "Ada", "age": 36, "tags": ["a", "b"], "ok": true}', "yes no maybe 2026-11-18", "你好 café"]
VOCABULARY = 421  # larger than the tokenizer's, and no multiple of 32
END, CONTROL = "<|end|>", "<|start|>"


@functools.cache
def encoder() -> ChatEncoder:
    return ChatEncoder(train_tokenizer(LEARNED * 9, 400, [END, CONTROL]), [CONTROL])


@functools.cache
def grammars() -> Grammars:
    return Grammars(encoder(), VOCABULARY, frozenset({encoder().id_of(END)}))


def answer(constraint: Constraint, seed: int, temperature: float = 2.0) -> str:
    """Return the answer of a model with random logits."""
    end = encoder().id_of(END)
    generator = torch.Generator().manual_seed(seed)
    request = Request(
        Batch({"tokens": torch.tensor([0])}), Sampling(temperature, seed=seed), constraint=constraint, stop_tokens={end}
    )
    sampler, matcher, tokens = Sampler(1, VOCABULARY, torch.device("cpu")), grammars().start(constraint), list[int]()
    sampler.join(0, request)
    mask = torch.empty(1, -(-VOCABULARY // 32), dtype=torch.int32)
    while not matcher.finished:
        assert len(tokens) < 3000, "the grammar has ended by now"
        matcher.fill(mask[0])
        tokens.append(int(sampler.sample(4 * torch.randn(1, VOCABULARY, generator=generator), [0], mask).tokens))
        matcher.accept(tokens[-1])
    return encoder().spell(tokens[:-1] if tokens[-1] == end else tokens)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "你好", 'q"']}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", quick([0.0, 1.0, 2.0], 1.0))
def test_json_schema(temperature: float) -> None:
    for seed in range(4):
        person = json.loads(answer(Constraint("json_schema", json.dumps(PERSON)), seed, temperature))
        assert {"name", "age"} <= set(person) <= {"name", "age", "tags"}
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 130
        assert set(person.get("tags", [])) <= {"a", "你好", 'q"'}


def test_blanks_between_elements_of_json_are_limited() -> None:
    """A weak model would write them until its answer is at its longest."""
    for text, allowed in (('{"age": 1}', True), ('{\n  "age": 1\n}', True), ("{" + 33 * " ", False), ("{\r", False)):
        matcher = grammars().start(Constraint("json_schema", json.dumps({"type": "object"})))
        mask = torch.empty(-(-VOCABULARY // 32), dtype=torch.int32)
        fits = True
        for token in encoder().encode([ChatSpan(text, "assistant")])[0]:
            matcher.fill(mask)
            fits = fits and bool(mask[token // 32] >> (token % 32) & 1)
            if not fits:
                break
            matcher.accept(token)
        assert fits == allowed, text


def test_json_object() -> None:
    seeds = range(3)
    assert all(isinstance(json.loads(answer(Constraint("json_object"), seed)), dict) for seed in seeds)


def test_regex() -> None:
    pattern = r"[a-z]{2,5}(-[0-9]+){1,2} (é|你)"
    answers = {answer(Constraint("regex", pattern), seed) for seed in range(5)}
    assert all(re.fullmatch(pattern, text) for text in answers)
    assert len(answers) == 5


def test_choice() -> None:
    choices = ["yes", "no", "maybe not", 'a "quoted\\" \n line', "%json", "你好🙂"]
    answers = {answer(Constraint("choice", json.dumps(choices)), seed) for seed in range(20)}
    assert answers <= set(choices)
    assert len(answers) > 3


def test_grammar() -> None:
    sums = 'start: term ("+" term){1,3}\nterm: /[1-9][0-9]{0,2}/ | "(" start ")"'
    for seed in range(5):
        text = answer(Constraint("grammar", sums), seed)
        assert set(text) <= set("0123456789+()")
        assert eval(text, {"__builtins__": {}}) > 0  # noqa: S307


def allowed(matcher: Matcher, vocabulary: int = VOCABULARY) -> set[int]:
    mask = torch.empty(-(-vocabulary // 32), dtype=torch.int32)
    matcher.fill(mask)
    return set(numpy.unpackbits(mask.numpy().view(numpy.uint8), bitorder="little").nonzero()[0].tolist())


def test_masks_leave_out_control_words_and_ids_without_a_token() -> None:
    end, control = encoder().id_of(END), encoder().id_of(CONTROL)
    tokens = allowed(grammars().start(Constraint("regex", r"(.|\n)*")))
    assert end in tokens, "the empty answer is complete"
    assert control not in tokens
    assert max(tokens) < 400
    plain = Tokenizer.from_str(encoder().json.replace('"special":true', '"special":false').replace(" true", " false"))
    unmarked = Grammars(ChatEncoder(plain, [CONTROL]), VOCABULARY, frozenset({end}))
    assert control not in allowed(unmarked.start(Constraint("regex", r"(.|\n)*")))


def test_a_tokenizer_may_have_more_tokens_than_the_model() -> None:
    small = Grammars(encoder(), 300, frozenset({encoder().id_of(END)}))
    anything = Constraint("regex", r"(.|\n)*")
    tokens, expected = allowed(small.start(anything), 300), allowed(grammars().start(anything))
    assert tokens == {token for token in expected if token < 320}
    assert tokens != expected


def test_answers_end_where_nothing_can_follow_and_only_there() -> None:
    a, b, end = (encoder().find(word) for word in ("a", "b", END))
    matcher = grammars().start(Constraint("regex", "a|ab"))
    assert a is not None
    assert b is not None
    assert end is not None
    assert not matcher.finished
    matcher.accept(a)
    assert not matcher.finished
    assert allowed(matcher) == {b, end}
    other = grammars().start(Constraint("regex", "a|ab"))
    matcher.accept(b)
    assert matcher.finished
    assert not other.finished, "answers share the grammar, not their state"
    other.accept(a)
    other.accept(end)
    assert other.finished


def nested(depth: int) -> str:
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


HOSTILE = {
    "schema-megabyte": ("json_schema", json.dumps({"enum": ["x" * 100] * 20_000}), "too-large"),
    "schema-deep": ("json_schema", nested(200), "too-large"),
    "schema-deeper": ("json_schema", nested(5000), "too-large"),
    "schema-alternatives": (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{n}": {"type": "string"}}}, {"properties": {f"b{n}": {}}}]}
                    for n in range(20)
                ]
            }
        ),
        "too-large",
    ),
    "schema-patterns": (
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f".*{chr(97 + n)}.{{{n % 7}}}"} for n in range(18)]}),
        "too-large",
    ),
    "schema-properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(4500)}}),
        "too-large",
    ),
    "schema-multiples": ("json_schema", '{"type": "integer", "multipleOf": 1000003}', "too-large"),
    "schema-two-multiples": (
        "json_schema",
        '{"allOf": [{"type":"integer","multipl\\u0065Of": 9973}, {"multipleOf": 9967}]}',
        "too-large",
    ),
    "regex-megabyte": ("regex", "ab|" * 400_000, "too-large"),
    "regex-repeated": ("regex", "a{1000000}", "too-large"),
    "regex-repeated-thrice": ("regex", "((a{1000}){1000}){1000}", "too-large"),
    "regex-deep": ("regex", "(" * 5000 + "a" + ")" * 5000, "invalid"),
    "grammar-deep": ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too-large"),
    "grammar-repeated": ("grammar", 'start: "a"{100000000}', "too-large"),
    "grammar-doubling": (
        "grammar",
        "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40: "a"',
        "too-large",
    ),
    "grammar-schema": ("grammar", 'start: %json {"multipleOf": 1000003}', "too-large"),
    "grammar-schema-behind-a-quote": ("grammar", 'start: /%json "/ %json {"multipleOf": 1000003}', "too-large"),
    "grammar-schema-not-json": ("grammar", "start: %json {", "invalid"),
    "grammar-raw": ("grammar", ' {"grammars":[{"json_schema":{"multipleOf":1000003}}]}', "invalid"),
    "grammar-endless": ("grammar", "start: r\nr: r", "invalid"),
    "schema-not-json": ("json_schema", "{", "invalid"),
    "schema-added-grammar": ("json_schema", '{} }, {"json_schema": {}', "invalid"),
    "schema-list": ("json_schema", "[]", "invalid"),
    "schema-false": ("json_schema", "false", "invalid"),
    "schema-keyword": ("json_schema", '{"type":"array","contains":{}}', "invalid"),
    "schema-file": ("json_schema", '{"$ref":"file:///etc/passwd"}', "invalid"),
    "schema-infinite": ("json_schema", '{"multipleOf": 1e999}', "invalid"),
    "schema-impossible": ("json_schema", '{"$ref":"#"}', "invalid"),
    "regex-open": ("regex", "(", "invalid"),
    "regex-impossible": ("regex", r"[^\s\S]", "invalid"),
    "choice-none": ("choice", "[]", "invalid"),
    "choice-numbers": ("choice", "[1, 2]", "invalid"),
    "choice-text": ("choice", '"yes"', "invalid"),
    "grammar-empty": ("grammar", "", "invalid"),
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "count"}}])
def test_forced_calls_of_tools_can_be_compiled_and_follow_the_schema(choice: Any) -> None:
    arguments = {"properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
    tools = [
        {"type": "function", "function": {"name": "count", "parameters": arguments | {"additionalProperties": False}}}
    ]
    constraint = constraint_for(tools, choice, parallel=False)
    assert constraint is not None
    text = answer(constraint, seed=0).removeprefix("<tool_call>").removesuffix("</tool_call>")
    call = json.loads(text)
    assert (call["name"], call["arguments"]["n"] in range(1, 10)) == ("count", True)


@pytest.mark.parametrize("name", quick(HOSTILE, *list(HOSTILE)[::4]))
def test_hostile_constraints_are_refused_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, text, reason = HOSTILE[name]
    monkeypatch.setattr("tessera.engine.constraint._SECONDS", 1)
    grammars().start(Constraint("json_object"))
    began = time.process_time()
    with raises(f"generation.constraint-{reason}") as info:
        matcher = grammars().start(Constraint(kind, text))  # type: ignore[arg-type]
        for _ in range(3):  # a few grow with the first tokens alone: the error ends this answer, and no other
            matcher.accept(min(allowed(matcher) - {encoder().id_of(END)}))
    assert len(str(info.value)) < 1000, "the message does not repeat the grammar"
    assert time.process_time() - began < 10, "the longest needs less than a second; without the limits it is minutes"


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("regex", "(a|b)*a(a|b){60}"),
        Constraint("regex", "(.*a){50}"),
        Constraint("json_schema", '{"type":"array","minItems":100000}'),
        Constraint("json_schema", '{"type":"string","minLength":100000}'),
        Constraint("grammar", 'start: s\ns: s s | "a" | "b" |'),
    ],
)
def test_each_token_of_an_ambiguous_grammar_takes_bounded_time(constraint: Constraint) -> None:
    matcher, choose, slowest = grammars().start(constraint), random.Random(0), 0.0
    for _ in range(20):
        began = time.process_time()
        tokens = sorted(allowed(matcher))
        matcher.accept(choose.choice(tokens))
        slowest = max(slowest, time.process_time() - began)
        if matcher.finished:
            break
    assert slowest < 5, "milliseconds; an exponential grammar would take minutes"


def test_a_grammar_is_compiled_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, compile_grammar = list[Constraint](), Grammars._compile

    def counted(self: Grammars, constraint: Constraint) -> Any:
        compiled.append(constraint)
        return compile_grammar(self, constraint)

    monkeypatch.setattr(Grammars, "_compile", counted)
    cache = Grammars(encoder(), VOCABULARY, frozenset({encoder().id_of(END)}))
    for _ in range(3):
        cache.start(Constraint("regex", "abc"))
    assert len(compiled) == 1
    for number in range(40):
        cache.start(Constraint("regex", f"a{{{number + 1}}}"))
    cache.start(Constraint("regex", "abc"))
    assert len(compiled) == 42, "the oldest was dropped"


def test_what_cannot_be_constrained_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(Unigram([("a", -1.0), ("<u>", -2.0)], unk_id=1))
    for tokenizer, stops in ((ChatEncoder(words), {0}), (encoder(), set())):
        with raises("generation.constraint-unsupported"):
            Grammars(tokenizer, 420, frozenset(stops)).start(Constraint("json_object"))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with raises("environment.no-llguidance", "tessera-mm[serve]"):
        Grammars(encoder(), 420, frozenset({1})).start(Constraint("json_object"))


def test_constrained_and_other_requests_run_together_and_one_that_grows_too_large_ends_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, processor = tessera.load(write_model(tmp_path / "model"), device="cpu")
    assert isinstance(processor.processor, ConversationProcessor)
    stops = frozenset(processor.processor.stop_tokens)
    batch = processor([{"role": "user", "content": "what is this"}])
    schema = {"type": "object", "properties": {"a": {"enum": ["cat", "dog"]}, "b": {"type": "boolean"}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    plain = [Request(batch, Sampling(1.0, seed=seed), 20) for seed in range(3)]
    person = [
        Request(batch, Sampling(1.0, seed=seed), 60, stop_tokens=stops, constraint=_schema(schema)) for seed in range(3)
    ]
    digits = Request(batch, Sampling(1.0), 60, stop_tokens=stops, constraint=Constraint("regex", "[0-9]{3}-[0-9]{3}"))
    alone = [answer.tokens for request in plain for answer in Engine(model).run([request])]
    engine = Engine(model)
    failing = engine.prepare(replace(digits, constraint=Constraint("regex", "[a-z]{40}")))
    matcher = failing.matcher
    assert matcher is not None
    accepted: list[int] = []

    def grow(token: int) -> None:
        """Report after three tokens what the library reports when its automaton has too many states."""
        accepted.append(token)
        if len(accepted) == 3:
            raise TesseraError("the automaton has too many states", code="generation.constraint-too-large")
        Matcher.accept(matcher, token)

    monkeypatch.setattr(matcher, "accept", grow)
    numbers = [engine.add(request) for request in (*plain, *person, digits)]
    numbers.append(engine.enqueue(failing))
    deltas: dict[int, list[Delta]] = {number: [] for number in numbers}
    while engine.busy:
        for delta in engine.step():
            deltas[delta.request].append(delta)
    answers = [Answer.of(deltas[number]) for number in numbers]
    assert [answer.tokens for answer in answers[:3]] == alone
    for answer in answers[3:6]:
        values = json.loads(answer.text)
        assert values.keys() == {"a", "b"}
        assert (values["a"] in ("cat", "dog"), type(values["b"])) == (True, bool)
    assert re.fullmatch("[0-9]{3}-[0-9]{3}", answers[6].text)
    error = answers[7].finish.error
    assert error is not None
    assert error.code == "generation.constraint-too-large"
    assert engine.stats().blocks_used == 0


def _schema(schema: dict[str, Any]) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


def test_a_constraint_that_cannot_be_compiled_is_refused_before_it_waits(tmp_path: Path) -> None:
    model, processor = tessera.load(write_model(tmp_path / "model"), device="cpu")
    assert isinstance(processor.processor, ConversationProcessor)
    stops, engine = frozenset(processor.processor.stop_tokens), Engine(model)
    batch = processor([{"role": "user", "content": "what is this"}])
    with raises("generation.constraint-invalid"):
        engine.add(Request(batch, stop_tokens=stops, constraint=Constraint("regex", "(")))
    assert not engine.busy
