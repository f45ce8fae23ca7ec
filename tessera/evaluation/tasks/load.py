"""Open a benchmark by the name or the path of its task file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.config.reader import build, read_mapping
from tessera.config.trust import Trust, check_trusted
from tessera.data.sources.container import RecordError
from tessera.engine.request import Sampling
from tessera.errors import TesseraError, nearest
from tessera.evaluation.benchmark import AnswerMetric, BenchmarkQuestion, Mark
from tessera.evaluation.metrics.registry import METRICS, is_code, metric_of
from tessera.evaluation.metrics.texts import checked_pattern
from tessera.evaluation.tasks.rows import Rows
from tessera.evaluation.tasks.sections import ExtractionSection, TaskSection
from tessera.evaluation.tasks.table import Table, check_sums, open_table
from tessera.evaluation.tasks.template import check_template

_FOLDER = Path(__file__).parent
_SUFFIXES = (".yaml", ".yml")
_REASONING = (("<think>", "</think>"), ("<analysis>", "</analysis>"))
_WITHOUT_ANSWERS = ("ifeval", "boxes")
_SUMS = ("wer", "cer", "bleu")  # metrics that are sums over all answers, so that a group has no worst answer
_NOT_OF_THE_PROTOCOL = {"about", "variants", "categories", "default_variant", "name"}


class TaskBenchmark:
    """Read the questions of a benchmark from its files, as its task file describes."""

    def __init__(self, task: TaskSection, variant: str, table: Table, folder: Path | None) -> None:
        self.task = task
        self.name = task.name
        self.variant = variant
        self.title = task.name if variant == task.default_variant else f"{task.name}:{variant}"
        self.table = table
        self.root = table.root
        self.rows = Rows(task, table)
        self.max_new_tokens = task.max_new_tokens
        self.sampling = Sampling(**task.sampling.model_dump())
        where = f"task {task.name}: metric"
        metric = metric_of(task.metric_name, task.metric_options, where, self.rows.references, folder)
        self.metric = _after_extraction(metric, task.extraction)
        self.published = check_sums(table, task.data.md5)

    def __len__(self) -> int:
        return len(self.rows)

    def questions(self, numbers: range) -> Iterator[tuple[int, BenchmarkQuestion | RecordError]]:
        """Yield consecutive questions with their index. An unusable row is yielded as a `RecordError`."""
        for number, question in self.rows.scan(numbers):
            if isinstance(question, BenchmarkQuestion):
                try:
                    # Score an empty answer: a row that the metric cannot score is reported before it is asked.
                    self.metric.mark("", question)
                except RecordError as error:
                    yield number, error
                    continue
            yield number, question

    def protocol(self) -> dict[str, Any]:
        """Return all settings that affect the scores, as a JSON mapping."""
        task = self.task.model_dump(mode="json", exclude=_NOT_OF_THE_PROTOCOL)
        names = [file.name for file in self.table.files]
        data = {"source": self.table.source, "files": names, "md5": self.table.sums, "published": self.published}
        task["data"] = data | {key: value for key, value in task["data"].items() if key in ("where", "explode")}
        task |= {"max_new_tokens": self.max_new_tokens, "scored_by": self.metric.name}
        task |= {"metric_code": self.metric.code} if self.metric.code else {}
        return {"task": self.name, "variant": self.variant, "questions": len(self), **task}


def task_names() -> list[str]:
    """Return the names of the task files that are part of this package."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def read_task(name: str | Path, where: str = "task") -> tuple[TaskSection, str, Path | None]:
    """Return a task, the name of its variant, and the folder of its file, which is None for a published benchmark.

    `name`: a name or the path of a task file, optionally followed by variants: mmbench:cn, my.yaml:short.
    """
    path, variants = _divided(str(name))
    is_path = path.endswith(_SUFFIXES)
    if not is_path and path.lower() not in task_names():
        raise TesseraError(
            f"there is no benchmark with the name {path!r:.200}",
            where=where,
            allowed=task_names(),
            nearest=nearest(path.lower(), task_names()),
            fix="for a task of your own, write the path of its file, which ends in .yaml",
            code="evaluation.unknown-benchmark",
        )
    file = Path(path) if is_path else _FOLDER / f"{path.lower()}.yaml"
    data = read_mapping(file)
    label = str(file) if is_path else path.lower()
    task = build(TaskSection, data, label)
    default = [task.default_variant] if "default_variant" in data or not is_path else []
    for variant in variants:
        if variant == task.default_variant:
            continue
        if variant not in task.variants:
            raise TesseraError(
                f"the benchmark {task.name} has no variant {variant!r:.100}",
                where=where,
                allowed=[*default, *task.variants],
                nearest=nearest(variant, task.variants),
                code="evaluation.unknown-variant",
            )
        data = merged(data, task.variants[variant])
    # check all variants, so that a misspelt key is reported before its variant is used
    for variant, changes in task.variants.items():
        build(TaskSection, merged({**data, "variants": {}}, changes), f"{label}: variants.{variant}")
    task = build(TaskSection, data, f"{label}: variant {':'.join(variants)}")
    _check(task, label)
    return task, ":".join(variants) or task.default_variant, file.parent if is_path else None


def open_task(
    name: str | Path,
    *,
    data: str | Path | None = None,
    root: str | Path | None = None,
    trust: Trust = False,
    where: str = "--tasks",
) -> TaskBenchmark:
    """Open a benchmark. `data`: its file or folder, in place of a download. `root`: folder of its media.

    `name` may also be that of a published file, such as AI2D_TEST. A file that is published for a variant selects this
    variant, unless `name` has one.
    """
    name = str(name)
    if not name.partition(":")[0].endswith(_SUFFIXES) and name.lower() not in task_names():
        name = task_of_file(name) or name
    if data is not None and not Path(data).exists():
        raise TesseraError(
            f"the data file or folder {data} does not exist",
            where="--data" if where == "--tasks" else where,
            fix="name the file or folder of the downloaded data; docs/reference/benchmarks.md lists its sources",
            code="evaluation.no-table",
        )
    if data is not None and not _divided(name)[1]:
        name = task_of_file(Path(data).name, [name]) or name
    task, chosen, folder = read_task(name, where)
    if is_code(task.metric_name):
        check_trusted(folder or _FOLDER, {task.metric_name: f"{name}: metric"}, trust)
    file, media = (None if path is None else Path(path) for path in (data, root))
    return TaskBenchmark(task, chosen, open_table(task.data, folder, file, media, where), folder)


def published_files(names: Sequence[str] | None = None) -> dict[str, str]:
    """Return the names of published files, each with its task and variant. `names`: the tasks; by default all."""
    files: dict[str, str] = {}
    for name in task_names() if names is None else names:
        path, _ = _divided(name)
        data = read_mapping(Path(path) if path.endswith(_SUFFIXES) else _FOLDER / f"{path.lower()}.yaml")
        for variant, keys in (("", data), *data.get("variants", {}).items()):
            if file := keys.get("data", {}).get("file"):
                files.setdefault(str(file), f"{name}:{variant}" if variant else name)
    return files


def task_of_file(file: str, names: Sequence[str] | None = None) -> str | None:
    """Return the task and variant whose published file has this name; None if there is none. Case does not matter."""
    stem = Path(file).stem.lower()
    return next((task for each, task in published_files(names).items() if Path(each).stem.lower() == stem), None)


def published_task(file: str, where: str) -> str:
    """Return the task and variant whose published file has this name. Raise if there is none."""
    task = task_of_file(file)
    if task is None:
        names = [Path(each).stem.lower() for each in published_files()]
        raise TesseraError(
            f"there is no benchmark with a published file {file!r:.200}",
            where=where,
            allowed=names,
            nearest=nearest(file.lower(), names),
            fix="name the benchmark: tessera eval --tasks NAME, or the path of a task file of your own",
            code="evaluation.unknown-benchmark",
        )
    return task


def merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a task file with the changes of a variant.

    `data`, `columns` and `texts` are merged by key. Other values, also sections, are replaced.
    """
    out = dict(data)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping) and key in ("data", "columns", "texts")
        out[key] = merged(out[key], value) if both else value
    return out


def _divided(name: str) -> tuple[str, list[str]]:
    """Split `name:variant:variant`. Colons before `.yaml` belong to the path of a task file."""
    match = re.fullmatch(r"(.*?\.ya?ml)((?::[^:/]+)*)", name)
    path, rest = (match[1], match[2]) if match else (name.partition(":")[0], "".join(name.partition(":")[1:]))
    return path, [variant for variant in rest.split(":") if variant]


def _check(task: TaskSection, where: str) -> None:
    """Raise for templates, patterns, metrics and variants that cannot be used, before any file is opened."""
    prompts = [task.prompt] if isinstance(task.prompt, str) else task.prompt
    templates = [("prompt", prompt) for prompt in prompts] + [("option_line", task.option_line)]
    templates += [(f"categories.{key}", template) for key, template in task.categories.items()]
    templates += [(f"texts.{key}.of", choice.of) for key, choice in task.texts.items()]
    templates += [("columns.video", template) for template in task.columns.video]
    templates += [("columns.audio", name) for name in task.columns.audio if "{" in name]
    templates += [("columns.images", name) for name in task.columns.images if "{" in name]
    templates += [("columns", text) for text in (task.columns.id, task.columns.group) if text is not None]
    for key, template in templates:
        check_template(template, f"{where}: {key}")
    if task.extraction.pattern is not None:
        checked_pattern(task.extraction.pattern, f"{where}: extraction.pattern")
    if task.columns.answer is None and task.metric_name in METRICS and task.metric_name not in _WITHOUT_ANSWERS:
        raise TesseraError(
            f"the metric {task.metric_name} needs expected answers", where=where, code="evaluation.no-answer"
        )
    if task.columns.group is not None and task.metric_name in _SUMS:
        raise TesseraError(
            f"the metric {task.metric_name} cannot score groups of questions, of which the worst answer counts",
            where=f"{where}: columns.group",
            fix="leave columns.group out, or use another metric",
            code="evaluation.metric-without-groups",
        )
    if any(key in changes for changes in task.variants.values() for key in ("variants", "name")):
        raise TesseraError(
            "a variant cannot change the name or the variants of its task", where=where, code="evaluation.bad-variant"
        )


def _after_extraction(metric: AnswerMetric, extraction: ExtractionSection) -> AnswerMetric:
    """Return a metric that scores the extracted part of an answer."""

    def mark(answer: str, question: BenchmarkQuestion) -> Mark:
        return metric.mark(extracted(answer, extraction), question)

    return dataclasses.replace(metric, mark=mark)


def extracted(answer: str, extraction: ExtractionSection) -> str:
    """Return the part of an answer that is scored.

    Reasoning is removed, unless `reasoning` is false. If `pattern` is set, the result is its last match (of this, the
    first group, if it has groups). Without a match, `otherwise` decides.
    """
    if extraction.reasoning:
        for start, end in _REASONING:
            answer = re.sub(f"{start}.*?{end}", "", answer, flags=re.DOTALL)
            if start not in answer:  # the answer may lack the opening tag: some templates put it into the prompt
                answer = answer.rpartition(end)[2]
        answer = answer.strip()
    if extraction.pattern is not None:
        matches = list(re.finditer(extraction.pattern, answer, re.DOTALL))
        if not matches:
            return answer if extraction.otherwise == "all" else ""
        answer = matches[-1][1 if matches[-1].re.groups else 0] or ""
    return answer
