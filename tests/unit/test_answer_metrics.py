"""Each metric gives what its definition says, on awkward answers too. Expectations are worked out by hand."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tessera.core.sample import Message, Part, Sample
from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark, together
from tessera.evaluation.metrics import judge
from tessera.evaluation.metrics.boxes import iou, predicted
from tessera.evaluation.metrics.choice import by_mmmu, by_vlmevalkit, chance_letter
from tessera.evaluation.metrics.ifeval import UNVERIFIED
from tessera.evaluation.metrics.overlap import whisper_basic, whisper_english
from tessera.evaluation.metrics.registry import METRICS, metric_of
from tessera.evaluation.metrics.texts import edit_distance, number_of
from tests.errors import raises


def ask(*expected: str, options: str = "", id: str = "q", **fields: Any) -> BenchmarkQuestion:
    listed = dict(zip("ABCDEFGHI", options.split("|"), strict=False)) if options else {}
    sample = Sample(id, (Message("user", (Part("text", "what?"),)),))
    return BenchmarkQuestion(id, sample, expected, listed, {}, fields)


def metric(name: str, **options: Any) -> AnswerMetric:
    return metric_of(name, options, "test", lambda: [("a red dog runs",), ("a blue cat sits",), ("a sun",)])


def first(name: str, answer: str, question: BenchmarkQuestion, **options: Any) -> float:
    each = metric(name, **options)
    return next(iter(each.summary(each.mark(answer, question).values).values()))


@pytest.mark.parametrize(
    ("name", "options", "answer", "expected", "score"),
    [
        ("exact", {}, " Red\n", ["Red"], 1),
        ("exact", {}, "red", ["Red"], 0),
        ("exact", {"ignore_case": True}, "red", ["blue", "Red"], 1),
        ("exact", {"ignore_punctuation": True}, "Red.", ["Red"], 1),
        ("exact", {}, "", ["x"], 0),
        ("contains", {}, "It is RED!", ["red"], 1),
        ("contains", {"ignore_case": False}, "It is RED!", ["red"], 0),
        ("regex", {"pattern": r"answer:\s*{expected}\b"}, "answer:  a.b", ["a.b"], 1),
        ("regex", {"pattern": r"answer:\s*{expected}\b"}, "answer: axb", ["a.b"], 0),  # no pattern comes from data
        ("numeric", {}, "about 1,200.50 metres", ["1200.5"], 1),
        ("numeric", {}, "1e400", ["3"], 0),
        ("numeric", {}, "", ["0"], 0),
        ("numeric", {"tolerance": 0.5}, "-3.4", ["-3"], 1),
        ("numeric", {"relative": 0.1}, "89", ["100"], 0),
        ("relaxed", {}, "52", ["50"], 1),
        ("relaxed", {}, "53", ["50"], 0),
        ("relaxed", {}, "48%", ["50%"], 1),
        ("relaxed", {}, "48%", ["50"], 0),
        ("relaxed", {}, "0.0", ["0"], 0),  # nothing is within five percent of 0: the texts differ
        ("relaxed", {}, "$5", ["5"], 0),
        ("relaxed", {}, "Blue", ["blue"], 1),
        ("relaxed", {}, "nan", ["5"], 0),
        ("anls", {}, "helo", ["hello", "x"], 0.8),
        ("anls", {}, "zzz", ["hello"], 0),
        ("anls", {}, "", ["hello"], 0),
        ("anls", {}, "a  b", ["a b"], 1),
        ("anls", {}, "a   x", ["a b"], 0.8),  # one edit; the longer raw text has five characters
        ("anls", {"length": "normalised"}, "a   x", ["a b"], 1 - 1 / 3),
        ("f1", {}, "the red dog", ["A red, red cat"], 0.4),  # red of 2 and 3 words
        ("f1", {}, "", [""], 1),
        ("vqa", {}, "Two dogs.", ["2 dogs"] * 3 + ["x"] * 7, (3 * 2 / 3 + 7) / 10),
        ("vqa", {}, "dont", ["don't"] * 10, 1),
        ("vqa", {}, "x", ["x"], 1),
        ("gsm8k", {}, "So 3. The answer is $1,018.", ["a #### 1018"], 1),
        ("gsm8k", {}, "The answer is 18. Next: 19", ["18"], 0),
        ("choice", {"rule": "first"}, "The answer is C.", ["C"], 1),
        ("cer", {}, "猫坐", ["猫 坐。"], 0),
        ("wer", {}, "The  CAT, sat", ["the cat sat"], 0),
        ("wer", {}, "cat sat down", ["the cat sat"], 2 / 3),
        ("wer", {"normalise": "none"}, "The cat", ["the cat"], 0.5),
        ("wer", {"normalise": "whisper"}, "It's (coughs) here. <noise>", ["it s here"], 0),
        ("wer", {"normalise": "whisper-english"}, "Mr. Bond's twenty-one.", ["mister bond is 21"], 0),
        ("cer", {"normalise": "whisper"}, "Ab-c!", ["ab d"], 1 / 3),
    ],
)
def test_scores_follow_their_definitions(
    name: str, options: dict[str, Any], answer: str, expected: list[str], score: float
) -> None:
    question = ask(*expected, options="a|b|c" if name == "choice" else "")
    assert first(name, answer, question, **options) == pytest.approx(score, abs=1e-12)


def test_edit_distance_equals_the_recursive_definition() -> None:
    def slow(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(slow(a[1:], b) + 1, slow(a, b[1:]) + 1, slow(a[1:], b[1:]) + (a[0] != b[0]))

    words = ("", "a", "abc", "acb", "bcda", "xayb")
    assert [edit_distance(a, b) for a in words for b in words] == [slow(a, b) for a in words for b in words]
    assert edit_distance("x" * 6000, "y" * 3000) == 6000  # a long answer takes no minutes


def test_numbers_are_finite_and_may_have_separators() -> None:
    texts = ("1,000", "-.5", "5.", "1e3", "$7", "12%", "", "1,00", "abc", "1e999", "nan", "--1")
    assert [number_of(text) for text in texts] == [1000, -0.5, 5, 1000, 7, 12, *[None] * 6]


OPTIONS = {"A": "red", "B": "deep blue", "C": "green"}


def test_letters_of_mmmu_and_a_chance_that_does_not_change() -> None:
    answers = ("(B)", "B.", "A or (C)", "I pick B ", "it is a deep blue colour of sea", "A (B) then (A)")
    assert [by_mmmu(answer, OPTIONS, "q") for answer in answers] == [*"BBCBBA"]
    letters = [by_mmmu("nothing", OPTIONS, f"q{number}") for number in range(300)]
    assert letters == [by_mmmu("", OPTIONS, f"q{number}") for number in range(300)]
    assert all(70 < letters.count(letter) < 130 for letter in "ABC")  # 100 expected, 4 sigma are 33
    assert chance_letter("AB", "x") in "AB"


def test_letters_of_vlmevalkit() -> None:
    answers = ("B", "(A) red", "deep blue", "D", "Because", "B it is, as one can see here", "A or B", "Z", "")
    assert [by_vlmevalkit(answer, OPTIONS) for answer in answers] == ["B", "A", "B", *[None] * 6]


@pytest.mark.parametrize(
    ("rule", "answers", "letters"),
    [
        ("mcq", ("The answer is B", "C", "(A) or so", "A cat. Final: B", "", "xyz"), ["B", "C", "A", "A", None, None]),
        ("mmbench", ("A red car is it", "B)", "green", "(C)."), ["A", "B", "C", "C"]),
        ("light", ("A. red", "(b)", "A) red", "B,"), ["A", "B", None, "B"]),
        ("scienceqa", ("a", "B. x", "B) x"), ["A", "B", None]),
        (
            "first",
            ("Answer: B", "the Dog and Cat", "one two three four five six seven eight nine ten b"),
            ["B", "D", None],
        ),
    ],
)
def test_letters_by_other_rules(rule: str, answers: tuple[str, ...], letters: list[str | None]) -> None:
    each, question = metric("choice", rule=rule), ask("A", options="red|deep blue|green")
    assert [each.mark(answer, question).extracted for answer in answers] == letters


def test_a_choice_without_options_compares_texts_and_means_of_categories() -> None:
    each = metric("choice", rule="mcq", letters="ABCD", mean_of="kind")
    assert each.mark("Two.", ask("two")).values["accuracy"] == 1
    questions = [BenchmarkQuestion(str(n), ask().sample, ("A",), {}, {"kind": kind}) for n, kind in enumerate("xxxy")]
    marks = [each.mark(answer, question).values for answer, question in zip("AABA", questions, strict=True)]
    names = {name for mark in marks for name in mark}
    means = {name: sum(mark.get(name, 0.0) for mark in marks) / 4 for name in names}
    assert each.summary(means) == pytest.approx({"mean of kind": (2 / 3 + 1) / 2, "accuracy": 0.75})


def test_yes_and_no() -> None:
    pairs = [("yes", "yes"), ("Yes.", "yes"), ("no", "no"), ("yes", "no"), ("no, yes", "yes"), ("No it is not", "no")]
    figures = {}
    for rule in ("equal", "words"):
        each = metric("yes_no", rule=rule)
        marks = [each.mark(answer, ask(expected)).values for answer, expected in pairs]
        figures[rule] = dict(each.summary({name: sum(m[name] for m in marks) / 6 for name in marks[0]}))
    assert figures["equal"] == pytest.approx(
        {"accuracy": 2 / 6, "precision": 0.5, "recall": 1, "f1": 2 / 3}
        | {"yes_ratio": 2 / 6, "expected_yes_ratio": 0.5, "neither_ratio": 3 / 6}
    )
    assert figures["words"]["accuracy"] == pytest.approx(4 / 6)
    assert figures["words"]["recall"] == pytest.approx(2 / 3)  # "no, yes" counts as no
    assert next(iter(metric("yes_no", score="f1").summary({}))) == "f1"


def test_open_answers_of_mmmu() -> None:
    each = metric("mmmu")
    for answer, expected, score in (
        ("So the area is 3,000.001 m", "3000", 1),  # rounded to two digits
        ("x = 5\nThe result is 7", "7", 1),
        ("The capital is Paris.", "paris", 1),
        ("The capital is Rome.", "paris", 0),
        ("", "x", 0),
    ):
        assert each.mark(answer, ask(expected)).values["accuracy"] == score, answer
    assert first("mmmu", "Other Answers", ask("5"), rule="vlmevalkit") == 0
    assert first("mmmu", "A", ask("5"), rule="vlmevalkit") == 1


def test_ocrbench_folds_widths_and_keeps_the_case_of_formulas() -> None:
    assert first("ocrbench", "it says ＡＢＣ", ask("abc", dataset="x")) == 1
    assert first("ocrbench", "it says ＡＢＣ", ask("abc", dataset="x"), fold=False) == 0
    assert first("ocrbench", "x ^ 2", ask("x^2", dataset="HME100k")) == 1
    assert first("ocrbench", "X^2", ask("x^2", dataset="HME100k")) == 0


# ---------------------------------------------------------------------------------------------- mathematics


def math_question(expected: str, kind: str, precision: Any = None, options: str = "") -> BenchmarkQuestion:
    question_type = "multi_choice" if options else "free_form"
    return ask(expected, options=options, question_type=question_type, answer_type=kind, precision=precision)


def test_mathematics_by_type_and_precision() -> None:
    for answer, question, published, last in (
        ("14", math_question("14", "integer"), 1, 1),
        ("It is 14.0", math_question("14", "integer"), 0, 1),
        ("1.449", math_question("1.45", "float", 2.0), 1, 1),
        ("about 1.4 or so", math_question("1.4", "float", 1), 0, 1),
        ("deep blue", math_question("deep blue", "text", options="red|deep blue"), 1, 1),
        ("The answer is (B)", math_question("deep blue", "text", options="red|deep blue"), 0, 1),
        ("so [1, 2]", math_question("[1, 2]", "list"), 0, 1),
        ("", math_question("14", "integer"), 0, 0),
    ):
        assert first("mathvista", answer, question) == published, answer
        assert first("mathvista", answer, question, rule="last") == last, answer


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A server that answers with the first of a list of replies; bytes are the whole body, a number is a status."""
    replies: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Authorization"] == "Bearer secret"
            assert body["model"] == "m"
            reply = replies.pop(0)
            self.send_response(reply if isinstance(reply, int) else 200)
            if reply == 302:
                self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
            text = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            self.wfile.write(reply if isinstance(reply, bytes) else text)

        def log_message(self, *arguments: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv(judge.URL, f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv(judge.MODEL, "m")
    monkeypatch.setenv(judge.KEY, "secret")
    monkeypatch.setattr(judge.Judge.__init__, "__defaults__", ("", 5.0, 2, 0.01, 256))
    yield replies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_judge_that_answers_nonsense_or_never_is_counted(endpoint: list[Any]) -> None:
    each, question = metric("mathvista", judge=True), math_question("14", "integer")
    for replies, values in (
        (["14"], {"accuracy": 1, "judge failed": 0, "judge nonsense": 0}),
        (["NONE"], {"accuracy": 0, "judge failed": 0, "judge nonsense": 0}),
        (["I believe that this is a hard question"], {"accuracy": 0, "judge failed": 0, "judge nonsense": 1}),
        ([500, "14"], {"accuracy": 1, "judge failed": 0, "judge nonsense": 0}),
        ([b"<html>", 302], {"accuracy": 0, "judge failed": 1, "judge nonsense": 0}),
        ([b"[" * 100_000, 500], {"accuracy": 0, "judge failed": 1, "judge nonsense": 0}),
        ([b'{"choices": []}', ""], {"accuracy": 0, "judge failed": 1, "judge nonsense": 0}),
    ):
        endpoint[:] = replies
        assert each.mark("it may be fourteen", question).values == {**values, "judged": 1}, replies
        assert endpoint == []
    assert each.mark("14", question).values == {"accuracy": 1}  # the judge is not asked
    assert "secret" not in repr(judge.judge_of_environment())


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("range 2-3", "3", 1),
        ("10-20", "20", 1),
        ("it is \u22123", "-3", 1),
        ("x = -3", "-3", 1),
        ("3", "3 m", 1),
        ("4", "$5", 0),
    ],
)
def test_numbers_are_read_with_their_sign(answer: str, expected: str, right: int) -> None:
    assert metric("numeric").mark(answer, ask(expected)).values == {"accuracy": right}


def test_rows_that_no_answer_can_fit_are_unusable() -> None:
    with raises("evaluation.no-answer", "no number"):
        metric("numeric").mark("5", ask("five"))
    for box in ([math.nan] * 4, [1, 2, 3, math.inf], [10, 20, -30, -40]):
        question = BenchmarkQuestion("1", Sample("1", ()), (), fields={"box": box, "width": 100, "height": 100})
        with raises("evaluation.bad-box", "no area"):
            metric("boxes").mark("[1, 2, 3, 4]", question)
    rate = metric("wer")
    assert rate.summary(rate.mark("a b", ask("!!")).values)["wer"] == 1.0


@pytest.mark.parametrize("form", ["<|box_start|>({0},{1}),({2},{3})<|box_end|>", "({0}, {1}) ({2}, {3})"])
def test_corners_in_parentheses_are_boxes(form: str) -> None:
    assert predicted(form.format(100, 100, 400, 300), "thousandths", 100, 200) == [pytest.approx((10, 20, 40, 60))]
    assert predicted(form.format(10, 20, 40, 60), "pixels", 100, 200) == [(10, 20, 40, 60)]


def test_a_judge_that_sends_its_headers_slowly_is_given_up_at_the_deadline() -> None:
    listener, given_up = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def dribble() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while True:  # each part arrives long before the time limit of a socket
                connection.sendall(b"x")
                time.sleep(0.05)
        given_up.set()

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    slow_judge = judge.Judge(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "m", timeout_s=1.0, attempts=1)
    assert slow_judge.ask("is it?") is None
    assert given_up.wait(60)
    listener.close()


def test_a_judge_needs_an_address_and_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge.judge_of_environment() is None
    monkeypatch.setenv(judge.URL, "file:///etc/passwd")
    monkeypatch.setenv(judge.MODEL, "m")
    with raises("evaluation.no-judge"):
        metric("mathvista", judge=True)


# ---------------------------------------------------------------------------------------------- boxes


def test_overlap_of_boxes() -> None:
    assert iou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7)
    assert iou((0, 0, 2, 2), (2, 0, 4, 2)) == iou((2, 2, 0, 0), (0, 0, 2, 2)) == iou((1, 1, 1, 1), (1, 1, 1, 1)) == 0


@pytest.mark.parametrize(
    ("unit", "answer"),
    [
        ("shares", "It is [0.1, 0.2, 0.5, 0.8]."),
        ("thousandths", '```json\n[{"bbox_2d": [100, 200, 500, 800], "label": "dog"}]\n```'),
        ("thousandths", "(100, 200) to (500, 800), so 100, 200, 500, 800"),
        ("pixels", "[20, 20, 100, 80]"),
        ("loc", "<loc0205><loc0102><loc0819><loc0512> dog"),
        ("any", '{"box": [20, 20, 100, 80]}'),
        ("any", "100,200,500,800"),
        ("size", "0.5 0.8 0.1 0.2"),  # corners in the wrong order
        ("size", "[100 200 500 800]"),
    ],
)
def test_each_family_writes_the_same_box(unit: Any, answer: str) -> None:
    question = ask(box=[20, 20, 80, 60], width=200, height=100)
    values = metric("boxes", unit=unit).mark(answer, question).values
    assert values["iou"] > 0.98, values  # <loc> has 1024 steps
    assert (values["acc@0.9"], values["centre"], values["no box"]) == (1, 1, 0)
    for nothing in ("", "no", "[1, 2]", "{" * 5000, "[" * 5000, "9" * 400 + ",1,2,3"):
        assert metric("boxes", unit=unit).mark(nothing, question).values["acc@0.1"] == 0
    assert math.isfinite(sum(values.values()))


def test_only_the_unit_any_reads_several_boxes() -> None:
    answer = "[[1, 1, 2, 2], [3, 3, 9, 9]]"
    assert len(predicted(answer, "any", 10, 10)) == 4
    assert predicted(answer, "pixels", 10, 10) == [(1, 1, 2, 2)]


# ---------------------------------------------------------------------------------------------- longer texts


def test_bleu_of_several_questions_is_that_of_all_texts_together() -> None:
    each = metric("bleu", order=2)
    marks = [each.mark("the cat sat", ask("the cat sat down")), each.mark("a dog", ask("a dog", "one dog"))]
    means = {name: sum(mark.values[name] for mark in marks) / 2 for name in marks[0].values}
    # All 5 words and all 3 pairs match; 5 words against 6 expected.
    assert each.summary(means)["bleu"] == pytest.approx(math.exp(1 - 6 / 5))
    assert each.summary(each.mark("", ask("x")).values)["bleu"] == 0


def test_cider_weighs_rare_words_and_equals_ten_for_the_expected_text() -> None:
    each, question = metric("cider"), ask("a red dog runs")
    assert each.mark("A red dog runs.", question).values["cider"] == pytest.approx(10)
    assert each.mark("", question).values["cider"] == 0
    assert each.mark("a", question).values["cider"] == 0  # a word of all texts weighs nothing
    # Words: red and dog of red, dog, runs, each with the weight log 3; "a" weighs nothing. Pairs: "a red" and "red dog"
    # of these and "dog runs". Triples: "a red dog" of two. No four words.
    penalty = math.exp(-1 / (2 * 6**2))
    parts = (2 / math.sqrt(2 * 3), 2 / math.sqrt(2 * 3), 1 / math.sqrt(1 * 2), 0)
    assert each.mark("a red dog", question).values["cider"] == pytest.approx(10 * penalty * sum(parts) / 4)


@pytest.mark.parametrize(
    ("instruction", "fields", "good", "bad"),
    [
        ("keywords:existence", {"keywords": ["red", "dog"]}, "A Red dog", "a red cat"),
        ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a b", "a a"),
        ("keywords:forbidden_words", {"forbidden_words": ["no"]}, "nothing", "oh No!"),
        ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "Eve", "he"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "a-b c", "a b"),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb", "a\n***\n\n***\nb"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"},
            "a\n\n'Well, b",
            "Well\n\nb",
        ),
        ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b]", "[a]"),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}, "a\nP. S. b", "a\nPS b"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n** b"),
        ("detectable_format:constrained_response", {}, "My answer is maybe.", "maybe"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "an *a*", "* a\nb *"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Part", "num_sections": 2},
            "Part 1 a Part 2",
            "Part 1",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
        ("detectable_format:title", {}, "<<A>> b", "<< >> b"),
        ("combination:two_responses", {}, "a******b", "a******a"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Say a"}, "say a. A", "A. say a"),
        ("startend:end_checker", {"end_phrase": "The end."}, 'a the END."', "the end. a"),
        ("startend:quotation", {}, '"a"', '"'),
        ("change_case:english_capital", {}, "A B", "A b"),
        ("change_case:english_lowercase", {}, "a b", "A b"),
        ("punctuation:no_comma", {}, "a b", "a, b"),
    ],
)
def test_instructions(instruction: str, fields: dict[str, Any], good: str, bad: str) -> None:
    question = ask(instruction_id_list=[instruction, UNVERIFIED[0]], kwargs=[{**fields, "other": None}, None])
    assert first("ifeval", good, question) == 1
    assert first("ifeval", bad, question) == first("ifeval", " ", question) == 0
    assert metric("ifeval").mark(good, question).values["unverified"] == 1


def test_loose_instructions_and_keywords_that_would_take_forever() -> None:
    question = ask(instruction_id_list=["punctuation:no_comma"], kwargs=[{}])
    values = metric("ifeval").mark("Sure, here it is:\nan answer", question).values
    assert (values["strict"], values["loose"]) == (0, 1)
    slow = ask(instruction_id_list=["keywords:existence"], kwargs=[{"keywords": ["(a+)+$"]}])
    assert first("ifeval", "a" * 40 + "b", slow) == 0
    for names, fields in (
        (["no such"], [{}]),
        (["keywords:existence"], [{}]),
        (["startend:quotation"], []),
        (None, None),
    ):
        with raises("evaluation.bad-instruction"):
            metric("ifeval").mark("a", ask(instruction_id_list=names, kwargs=fields))


# ---------------------------------------------------------------------------------------------- names and functions


def test_metrics_are_named_and_their_options_checked() -> None:
    with raises("evaluation.unknown-metric", "anls"):
        metric("anlss")
    with raises("evaluation.metric-option", "tolerance"):
        metric("numeric", tolerence=1)
    with raises("evaluation.metric-option"):
        metric("numeric", tolerance="much")
    with raises("evaluation.metric-option", "pattern"):
        metric("regex")
    with raises("evaluation.bad-pattern"):
        metric("regex", pattern="(")
    assert len(METRICS) == 20


def test_functions_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def length(answer, question, most=9):\n    return min(len(answer), most)\n"
        "def several(answer, question):\n    return {'a': 1, 'b': 0.5}\n"
        "def broken(answer, question):\n    return 1 / len(answer)\n"
        "def endless(answer, question):\n    return float('inf')\nVALUE = 3\n"
    )

    def of_user(name: str, **options: Any) -> AnswerMetric:
        return metric_of(name, options, "test", list, tmp_path)

    assert of_user("mine.py:length", most=2).mark("abc", ask("x")) == Mark("abc", {"score": 2.0})
    assert of_user("mine.py:several").mark("", ask("x")) == Mark(None, {"a": 1.0, "b": 0.5})
    for name in ("broken", "endless"):
        with raises("evaluation.bad-metric-function"):
            of_user(f"mine.py:{name}").mark("", ask("x"))
    for name in ("../mine.py:length", "/etc/x.py:f", "mine.py:lengths"):
        with raises("evaluation.bad-metric-function"):
            of_user(name)
    for name, code in (("mine.py:VALUE", "recipe.not-callable"), ("os:system", "recipe.part-of-python")):
        with raises(code):
            of_user(name)


def test_marks_of_a_group_are_the_least() -> None:
    assert together([{"accuracy": 1.0}, {"accuracy": 0.0, "other": 1.0}]) == {"accuracy": 0.0, "other": 0.0}


def test_whisper_normalisation_equals_that_of_transformers() -> None:
    whisper = pytest.importorskip("transformers.models.whisper.english_normalizer")
    basic, english = whisper.BasicTextNormalizer(), whisper.EnglishTextNormalizer({})
    letters = [
        *"aB ()<>[]'’.,-$%é\u0301ﬁß\u00a0\u3000你好！ıİ\t\n",
        "(a)",
        "<b>",
        "()",
        "((",
        "))",
        "Mr. ",
        "two hundred ",
        "£5",
        "1,5",
    ]
    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choices(letters, k=chance.randint(0, 24)))
        assert whisper_basic(text) == basic(text).strip(), repr(text)
        assert whisper_english(text) == english(text).strip(), repr(text)
    for normalise in (whisper_basic, whisper_english):
        assert normalise("<" * 200_000 + "(" * 200_000) == ""  # in linear time
        assert normalise("9" * 5000) == "9" * 5000
