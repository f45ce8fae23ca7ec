"""Compare metrics with the functions of lmms-eval, which is installed for another interpreter, on made-up answers.

    python bench/metrics_parity.py /path/to/environment/bin/python

Prints one line for each metric, and up to five differences. The exit code is 1 if there is a difference.
"""

# ruff: noqa: E501 - half of this file is a script for another interpreter
from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

from tessera.core.sample import Sample
from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion
from tessera.evaluation.metrics import boxes, choice, ifeval, reasoned, texts, vqa

COUNT = 100
# Runs in the other interpreter: reads cases from stdin, and writes the values that lmms-eval gives.
THEIRS = r"""
import json, random, re, sys, types
language = types.ModuleType("langdetect")  # is not needed by the checks that are compared
language.detect, language.LangDetectException = (lambda text: "en"), ValueError
sys.modules.setdefault("langdetect", language)
constants = types.ModuleType("immutabledict")
constants.immutabledict = dict
sys.modules.setdefault("immutabledict", constants)
random.choice = lambda letters: "chance"
cases = json.load(sys.stdin)
from lmms_eval.api.metrics import anls, exact_match_fn
from lmms_eval.tasks._task_utils.mcq_extract import extract_mcq_answer
from lmms_eval.tasks._task_utils.vqa_eval_metric import EvalAIAnswerProcessor
from lmms_eval.tasks.ai2d.utils import MultiChoiceRegexFilter
from lmms_eval.tasks.chartqa.utils import relaxed_correctness
from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator
from lmms_eval.tasks.mmmu import utils as mmmu
from lmms_eval.tasks.ocrbench.utils import ocrbench_process_results
from lmms_eval.tasks.pope import utils as pope
from lmms_eval.tasks.refcoco import utils_rec as rec
from lmms_eval.tasks.refcoco_grounding import utils as grounding
from lmms_eval.tasks.scienceqa.utils import sqa_process_results
from lmms_eval.tasks.textvqa.utils import textvqa_process_results
from lmms_eval.tasks.mathvista.mathvista_evals import MathVistaEvaluator
from lmms_eval.tasks.ifeval import utils as ifeval
from lmms_eval.filters.extraction import RegexFilter
MathVistaEvaluator.get_chat_response = lambda *a, **k: ""
math, bench = MathVistaEvaluator(), MMBench_Evaluator()
letters = lambda case: dict(zip("ABCDEFGHI", case["options"]))

def open_mmmu(case):
    return float(mmmu.eval_open(case["expected"], mmmu.parse_open_response(case["answer"])))

def choice_mmmu(case):
    return mmmu.parse_multi_choice_response(case["answer"], list(letters(case)), letters(case))

def mmbench(case):
    row = {letter: letters(case).get(letter, float("nan")) for letter in "ABCD"}
    return bench.prefetch_answer({**row, "prediction": case["answer"]}) or extract_mcq_answer(case["answer"], list("ABCD"))

def ai2d(case):
    (kept,) = MultiChoiceRegexFilter().apply([[case["answer"]]], [{"options": case["options"]}])
    match = dict(ignore_case=True, ignore_punctuation=True)
    return float(exact_match_fn(predictions=[kept], references=[case["letter"]], **match)["exact_match"])

def ocr(case):
    doc = {"answer": case["expected"], "dataset": case["dataset"], "question_type": "Doc-oriented VQA"}
    return float(ocrbench_process_results(doc, [case["answer"]])["ocrbench_accuracy"]["score"])

def science(case):
    doc = {"choices": case["options"], "answer": "ABCDEFGHI".index(case["letter"])}
    return float(sqa_process_results(doc, [case["answer"]])["exact_match"])

def text_vqa(case):
    return float(textvqa_process_results({"answers": list(case["expected"]), "question_id": 0}, [case["answer"]])["exact_match"])

def gsm8k(case):
    out = []
    for pattern, select in ((r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1), (r"The answer is (\-?[0-9\.\,]+).", 0)):
        ((number,),) = RegexFilter(regex_pattern=pattern, group_select=select).apply([[case["answer"]]], [{}])
        ignored = [",", "\\$", "(?s).*#### ", "\\.$"]
        out.append(float(exact_match_fn(predictions=[number], references=case["expected"], ignore_case=True, regexes_to_ignore=ignored)["exact_match"]))
    return out

def yes_no(cases):
    rows = [pope.pope_process_results({"answer": c["expected"][0], "question_id": 0}, [c["answer"]])["pope_accuracy"] for c in cases]
    return [f(rows) for f in (pope.pope_aggregate_accuracy, pope.pope_aggregate_precision, pope.pope_aggregate_recall, pope.pope_aggregate_f1_score)]

def boxes(module, predicted, gold):
    scorers = (module.compute_iou, module.compute_center_accuracy) if module is rec else (module._compute_iou, module._compute_center_accuracy)
    return [float(scorer(gold, predicted)) for scorer in scorers]

def shares(case):
    x, y, w, h = case["box"]
    gold = [x / case["width"], y / case["height"], (x + w) / case["width"], (y + h) / case["height"]]
    return boxes(rec, rec.parse_float_sequence_within(case["answer"]), gold)

def both_units(case):
    image = types.SimpleNamespace(size=(case["width"], case["height"]))
    doc = {"bbox": case["box"], "image": image, "answer": "x"}
    result = grounding.refcoco_grounding_process_result(doc, [case["answer"]])["refcoco_grounding_IoU"]
    return boxes(grounding, result["pred"], result["bbox"])

def mathvista(case):
    problem = {k: case[k] for k in ("question_type", "answer_type", "precision", "choices")} | {"query": ""}
    text = math.extract_answer(case["answer"], problem)
    text = math.normalize_extracted_answer(text, case["choices"], case["question_type"], case["answer_type"], case["precision"])
    return float(math.safe_equal(text, case["expected"][0]))

def instructions(case):
    doc = types.SimpleNamespace(instruction_id_list=[case["instruction"]], kwargs=[case["kwargs"]], prompt="", key=0)
    checks = (ifeval.test_instruction_following_strict, ifeval.test_instruction_following_loose)
    return [float(check(doc, case["answer"]).follow_all_instructions) for check in checks]

functions = {
    "anls": lambda c: float(anls(references=c["expected"], predictions=[c["answer"]])["anls"]),
    "relaxed": lambda c: float(relaxed_correctness(c["answer"], c["expected"][0])),
    "vqa": text_vqa, "ocrbench": ocr, "gsm8k": gsm8k,
    "choice mcq": lambda c: extract_mcq_answer(c["answer"], list(letters(c))),
    "choice mmbench": mmbench, "choice light": ai2d, "choice scienceqa": science,
    "mmmu choice": choice_mmmu, "mmmu open": open_mmmu,
    "mathvista": mathvista, "boxes shares": shares, "boxes any": both_units, "ifeval": instructions,
}
results = {name: [functions[name](case) for case in of] for name, of in cases.items() if name != "yes_no"}
results["yes_no"] = [yes_no(cases["yes_no"])]
print("RESULTS" + json.dumps(results))
"""

WORDS = (
    *(
        "the",
        "a",
        "An",
        "answer",
        "is",
        "none",
        "two",
        "ten",
        "dont",
        "can't",
        "she's",
        "it's",
        "1,000",
        "3.5",
        "-7",
        "12%",
    ),
    *(
        "$18",
        "0",
        "0.05",
        "1e3",
        "nan",
        "inf",
        "(A)",
        "(B)",
        "A",
        "B.",
        "C:",
        "D)",
        "E",
        "(C).",
        ":D",
        "red",
        "Red.",
        "blue",
    ),
    *(
        "deep",
        "blue",
        "x",
        "so",
        "Therefore",
        "=",
        "final",
        "The",
        "answer",
        "42",
        "42.0",
        "Yes",
        "no",
        "ＡＢＣ",
        "é",
        "ß",
    ),
    *(
        "，",
        "\n",
        "\n\n",
        "\t",
        "  ",
        "!",
        "?",
        "/",
        "-",
        "_",
        "'",
        '"',
        "`",
        "*bold*",
        "***",
        "[name]",
        "<<title>>",
        "- item",
    ),
    *(
        "答案是",
        "选",
        "the answer is",
        "The answer is 18.",
        "#### 18",
        "18",
        "18.",
        "P.S.",
        "{}",
        "******",
        "WORD",
        "cat, dog",
    ),
)
OPTIONS = (
    ["red", "deep blue", "18"],
    ["a", "b", "c", "d"],
    ["Cat", "Dog", "cat, dog", "none", "all of them"],
    ["3", "3.5"],
)


def answers(random_: random.Random, *more: str) -> str:
    if random_.random() < 0.1:
        return random_.choice(("", "A", "(B)", "C.", "42", "yes", "NO", "The answer is D", "a"))
    words = random_.choices((*WORDS, *more * 3), k=random_.choice((1, 1, 2, 3, 5, 8, 14)))
    return random_.choice((" ", " ", "")).join(words).strip()  # the frame of lmms-eval strips answers


def text_cases(random_: random.Random, wanted: int = 1) -> list[dict[str, Any]]:
    out = []
    for _ in range(COUNT):
        expected = [answers(random_) or "x" for _ in range(wanted)]
        near = random_.choice(expected)
        answer = random_.choice((answers(random_), near, near.upper(), near + ".", near[:-1], f"so it is {near}"))
        out.append({"answer": answer.strip(), "expected": expected})
    return out


def choice_cases(random_: random.Random) -> list[dict[str, Any]]:
    out = []
    for _ in range(COUNT):
        options = random_.choice(OPTIONS)
        letter = "ABCDEFGHI"[random_.randrange(len(options))]
        answer = random_.choice(
            (answers(random_, *options), letter, f"({letter})", f"{letter}. {options[0]}", f"{letter}.")
        )
        out.append({"answer": answer.strip(), "options": options, "letter": letter})
    return out


def box_cases(random_: random.Random) -> list[dict[str, Any]]:
    out = []
    for _ in range(COUNT):
        width, height = random_.randrange(50, 900), random_.randrange(50, 900)
        x, y = random_.uniform(0, width * 0.7), random_.uniform(0, height * 0.7)
        box = [x, y, random_.uniform(1, width - x), random_.uniform(1, height - y)]
        corners = [x, y, x + box[2], y + box[3]]
        scale = random_.choice(((1, 1), (1 / width, 1 / height), (1000 / width, 1000 / height)))
        shifted = [value * scale[i % 2] * random_.uniform(0.85, 1.15) for i, value in enumerate(corners)]
        written = [f"{value:.{random_.choice((0, 2, 4))}f}" for value in random_.choice((shifted, shifted[::-1]))]
        form = random_.choice(
            ("[{}]", "({})", '```json\n[{{"bbox_2d": [{}]}}]\n```', "{}", '{{"bbox": [{}]}} and [1, 2]')
        )
        answer = random_.choice(("", "no box", "The box is ")) + form.format(random_.choice((", ", ",")).join(written))
        out.append({"answer": answer.strip(), "box": box, "width": width, "height": height})
    return out


def math_cases(random_: random.Random) -> list[dict[str, Any]]:
    out = []
    for _ in range(COUNT):
        choices = random_.choice(OPTIONS)
        kind = random_.choice(("text", "integer", "float", "list"))
        number = random_.choice((18, 3.5, 0.049, -7, 42))
        asks_choice = kind == "text"
        expected = (
            random_.choice(choices) if asks_choice else str(int(number) if kind == "integer" else round(number, 2))
        )
        answer = random_.choice((answers(random_), expected, f"({expected})", "(B) x", f"{number}", "1e400", "nan"))
        question_type = "multi_choice" if asks_choice else "free_form"
        case = {"choices": choices, "question_type": question_type, "answer_type": kind, "precision": 2}
        out.append({"answer": answer.strip(), "expected": [expected], **case})
    return out


def instruction_cases(random_: random.Random) -> list[dict[str, Any]]:
    relation = ("less than", "at least")
    fields = {
        "keywords:existence": lambda: {"keywords": ["red", "answer"]},
        "keywords:frequency": lambda: {"keyword": "blue", "frequency": 2, "relation": random_.choice(relation)},
        "keywords:forbidden_words": lambda: {"forbidden_words": ["cat", "no"]},
        "keywords:letter_frequency": lambda: {
            "letter": "e",
            "let_frequency": 3,
            "let_relation": random_.choice(relation),
        },
        "length_constraints:number_paragraphs": lambda: {"num_paragraphs": random_.randrange(1, 4)},
        "length_constraints:number_words": lambda: {"num_words": 6, "relation": random_.choice(relation)},
        "length_constraints:nth_paragraph_first_word": lambda: {
            **{
                "num_paragraphs": random_.randrange(1, 3),
                "nth_paragraph": 1,
                "first_word": random_.choice(("the", "a", "it")),
            }
        },
        "detectable_content:number_placeholders": lambda: {"num_placeholders": 1},
        "detectable_content:postscript": lambda: {"postscript_marker": random_.choice(("P.S.", "P.P.S"))},
        "detectable_format:number_bullet_lists": lambda: {"num_bullets": 1},
        "detectable_format:constrained_response": dict,
        "detectable_format:number_highlighted_sections": lambda: {"num_highlights": 1},
        "detectable_format:multiple_sections": lambda: {"section_spliter": "Section", "num_sections": 2},
        "detectable_format:json_format": dict,
        "detectable_format:title": dict,
        "combination:two_responses": dict,
        "combination:repeat_prompt": lambda: {"prompt_to_repeat": "The answer"},
        "startend:end_checker": lambda: {"end_phrase": "The end."},
        "startend:quotation": dict,
        "change_case:english_capital": dict,
        "change_case:english_lowercase": dict,
        "punctuation:no_comma": dict,
    }
    more = (
        "Section 1",
        "My answer is yes.",
        "red",
        "blue",
        "answer",
        "* item",
        "\nP.S. x",
        '{"a": 1}',
        "\n\n",
        "\n- a\n",
    )
    out = []
    for name, make in fields.items():
        for _ in range(COUNT):
            answer = answers(random_, *more)
            answer = random_.choice(
                (answer, f'"{answer}"', f"The answer {answer} the end.", answer.upper(), answer.lower())
            )
            out.append({"answer": answer.strip(), "instruction": name, "kwargs": make()})
    return out


def question(case: dict[str, Any], expected: list[str] | None = None) -> BenchmarkQuestion:
    named = case.get("options") or (case.get("choices") if case.get("question_type") == "multi_choice" else None) or []
    options = dict(zip("ABCDEFGHI", named, strict=False))
    wanted = expected if expected is not None else case.get("expected", [case.get("letter", "")])
    fields = {key: value for key, value in case.items() if key not in ("answer", "expected")}
    if "instruction" in case:
        fields = {"instruction_id_list": [case["instruction"]], "kwargs": [case["kwargs"]]}
    return BenchmarkQuestion("id", Sample("id", ()), tuple(wanted), options, {}, fields)


def mean_figures(metric: AnswerMetric, cases: list[dict[str, Any]]) -> list[float]:
    marks = [metric.mark(case["answer"], question(case)).values for case in cases]
    means = {name: sum(mark[name] for mark in marks) / len(marks) for name in marks[0]}
    return list(metric.summary(means).values())[:4]


def ours(name: str, cases: list[dict[str, Any]]) -> list[Any]:
    if name == "yes_no":
        return [mean_figures(vqa.yes_no(), cases)]
    if name.startswith("choice m") or name == "mmmu choice":
        find = {"choice mcq": choice.by_mcq, "choice mmbench": choice.by_mmbench, "mmmu choice": choice.by_mmmu}[name]
        return [find(case["answer"], question(case).options, "id") or "" for case in cases]
    make, values = {
        "anls": (texts.anls(), ["anls"]),
        "relaxed": (texts.relaxed(), ["relaxed_accuracy"]),
        "vqa": (vqa.vqa(), ["vqa_accuracy"]),
        "ocrbench": (texts.ocrbench(), ["accuracy"]),
        "gsm8k": (texts.gsm8k(), ["flexible", "strict"]),
        "choice light": (choice.choice(rule="light"), ["accuracy"]),
        "choice scienceqa": (choice.choice(rule="scienceqa"), ["accuracy"]),
        "mmmu open": (reasoned.mmmu(), ["accuracy"]),
        "mathvista": (reasoned.mathvista(), ["accuracy"]),
        "boxes shares": (boxes.boxes(unit="shares"), ["iou", "centre"]),
        "boxes any": (boxes.boxes(unit="any"), ["iou", "centre"]),
        "ifeval": (ifeval.ifeval(), ["prompts strict", "prompts loose"]),
    }[name]
    marks = [make.mark(case["answer"], question(case)).values for case in cases]
    return [mark[values[0]] if len(values) == 1 else [mark[value] for value in values] for mark in marks]


def same(name: str, first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return len(first) == len(second) and all(same(name, a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, float):
        return abs(first - second) <= 1e-9  # both compute in float64, in another order
    if second == "chance":
        return first == choice.chance_letter("ABCDE", "id") or name == "mmmu choice"
    return first == second


def main() -> None:
    random_ = random.Random(29)
    choices = choice_cases(random_)
    cases: dict[str, list[dict[str, Any]]] = {
        **{name: text_cases(random_) for name in ("relaxed", "gsm8k")},
        **{name: text_cases(random_, 3) for name in ("anls", "mmmu open")},
        "vqa": text_cases(random_, 10),
        "ocrbench": [{**case, "dataset": random_.choice(("HME100k", "IIIT"))} for case in text_cases(random_, 2)],
        **dict.fromkeys(("choice mcq", "choice mmbench", "choice light", "choice scienceqa", "mmmu choice"), choices),
        "yes_no": [
            {"answer": answers(random_, "yes", "no"), "expected": [random_.choice(("yes", "no"))]} for _ in range(COUNT)
        ],
        "mathvista": math_cases(random_),
        **{name: box_cases(random_) for name in ("boxes shares", "boxes any")},
        "ifeval": instruction_cases(random_),
    }
    environment = {**os.environ, "OPENAI_API_KEY": "none", "PYTHONPATH": ""}  # a client is made, and never used
    run = subprocess.run(
        [sys.argv[1], "-c", THEIRS],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if "RESULTS" not in run.stdout:
        sys.exit(run.stderr[-4000:])
    results = json.loads(run.stdout.rpartition("RESULTS")[2])
    differences = 0
    for name, theirs in results.items():
        values = ours(name, cases[name])
        wrong = [number for number, value in enumerate(values) if not same(name, value, theirs[number])]
        differences += len(wrong)
        print(f"{name:18} {len(values):5} compared, {len(wrong)} differ, {sum(map(bool, theirs))} not zero or empty")
        for number in wrong[:5]:
            print(f"    ours {values[number]!r}, lmms-eval {theirs[number]!r}: {cases[name][number]}")
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
