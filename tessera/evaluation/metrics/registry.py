"""Make the metric that a task file names: a built-in with its options, or a function of the user."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tessera.config.registry import IMPORT_PATH, check_callable, import_object
from tessera.errors import TesseraError, first_line, nearest
from tessera.evaluation.benchmark import LARGEST, AnswerMetric, BenchmarkQuestion, Mark
from tessera.evaluation.metrics import boxes, choice, ifeval, overlap, reasoned, texts, vqa
from tessera.runtime.files import check_regular, leads_out, read_bytes

_FINITE = ConfigDict(allow_inf_nan=False)
METRICS: Mapping[str, Callable[..., AnswerMetric]] = {
    "exact": texts.exact,
    "contains": texts.contains,
    "regex": texts.regex,
    "numeric": texts.numeric,
    "relaxed": texts.relaxed,
    "anls": texts.anls,
    "f1": texts.token_f1,
    "gsm8k": texts.gsm8k,
    "ocrbench": texts.ocrbench,
    "vqa": vqa.vqa,
    "yes_no": vqa.yes_no,
    "choice": choice.choice,
    "mmmu": reasoned.mmmu,
    "mathvista": reasoned.mathvista,
    "boxes": boxes.boxes,
    "wer": overlap.wer,
    "cer": overlap.cer,
    "bleu": overlap.bleu,
    "cider": overlap.cider,
    "ifeval": ifeval.ifeval,
}


def is_code(name: str) -> bool:
    """Return whether a metric is a function of the user: file.py:function or package.module:function."""
    return ":" in name


def metric_of(
    name: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    where: str = "--metric",
    references: overlap.References = list,
    folder: Path | None = None,
) -> AnswerMetric:
    """Return a metric. `references`: the expected answers of all questions. `folder`: the folder with the file of a
    user's function.

    A function of the user must be trusted before this is called.
    """
    if is_code(name):
        return _of_user(name, options, where, folder)
    if name not in METRICS:
        raise TesseraError(
            f"there is no metric with the name {name!r:.100}",
            where=where,
            allowed=METRICS,
            nearest=nearest(name, METRICS),
            fix="for a function of your own write file.py:function",
            code="evaluation.unknown-metric",
        )
    make = METRICS[name]
    fixed = {"references": references} if make is overlap.cider else {}
    return make(**fixed, **_checked(make, options, f"{where}.{name}"))


def _checked(make: Callable[..., AnswerMetric], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the options of a metric. Raise if one is unknown, missing or of a wrong type."""
    types = {name: kind for name, kind in get_type_hints(make).items() if name not in ("return", "references")}
    required = [name for name, each in inspect.signature(make).parameters.items() if each.default is each.empty]
    for name in (*options, *(name for name in required if name in types)):
        if name not in types or name not in options:
            unknown = name not in types
            what = f"unknown option of the metric: {name!r:.100}" if unknown else f"the option {name} is missing"
            near = nearest(name, types) if unknown else None
            raise TesseraError(what, where=where, allowed=types, nearest=near, code="evaluation.metric-option")
    try:
        return {
            name: TypeAdapter(types[name], config=_FINITE).validate_python(value) for name, value in options.items()
        }
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise TesseraError(
            f"an option of the metric is not usable: {problem['msg']}, got {problem.get('input')!r:.100}",
            where=where,
            code="evaluation.metric-option",
        ) from None


# ---------------------------------------------------------------------------------------------- functions of the user


def _of_user(name: str, options: Mapping[str, Any], where: str, folder: Path | None) -> AnswerMetric:
    """Return the metric of a user's function(answer, question), which returns a number or numbers by name."""
    path, _, attribute = name.rpartition(":")
    function = _from_file(path, attribute, where, folder) if path.endswith(".py") else import_object(name, where)
    check_callable(function, name, where)
    if not IMPORT_PATH.fullmatch(f"file:{attribute}") or inspect.isclass(function):
        raise TesseraError(f"{name} is not a function", where=where, code="evaluation.bad-metric-function")

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        try:
            result = function(answer, question, **options)
            values = result if isinstance(result, Mapping) else {"score": result}
            numbers = {str(key): float(value) for key, value in values.items()}
        except (Exception, SystemExit) as error:  # sys.exit(0) would end without results, and look like success
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise TesseraError(
                f"{name} failed: {problem}", where=f"question {question.id}", code="evaluation.bad-metric-function"
            ) from error
        # the comparison is also false for NaN
        if not numbers or not all(abs(number) < LARGEST for number in numbers.values()):
            raise TesseraError(
                f"{name} returned {result!r:.200}, not a finite number or a mapping to finite numbers",
                where=f"question {question.id}",
                code="evaluation.bad-metric-function",
            )
        return Mark(answer.strip() or None, numbers)

    return AnswerMetric(name, mark, code=_code_hash(function))


def _code_hash(function: Callable[..., Any]) -> str:
    """Return a hash of the file that a function is written in; empty for a function without one."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:
        return ""
    return hashlib.sha256(read_bytes(Path(file))).hexdigest()[:16] if file and Path(file).is_file() else ""


def _from_file(path: str, attribute: str, where: str, folder: Path | None) -> Callable[..., Any]:
    """Import a file beside the task file, and return its function."""
    file = (folder or Path()) / path
    if Path(path).is_absolute() or ".." in Path(path).parts or leads_out(file, folder or Path()):
        raise TesseraError(
            f"the file of a metric must be below the folder of the task file: {path:.200}",
            where=where,
            code="evaluation.bad-metric-function",
        )
    check_regular(file)
    name = f"tessera_task_metric_{file.stem}_{abs(hash(file.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # some classes in the file need their module in `sys.modules`
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise TesseraError(
            f"{path} cannot be imported: {type(error).__name__}: {first_line(error)}",
            where=where,
            code="evaluation.bad-metric-function",
        ) from error
    if attribute not in vars(module):
        raise TesseraError(
            f"{path} has no function {attribute!r:.100}",
            where=where,
            nearest=nearest(attribute, vars(module)),
            code="evaluation.bad-metric-function",
        )
    target: Callable[..., Any] = vars(module)[attribute]
    return target
