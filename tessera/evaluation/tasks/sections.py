"""Define the keys of a task file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from tessera.config.reader import Section


class BenchmarkData(Section):
    """Declare the source of the questions. `hub` or `path` is needed, unless the user names a file or a folder."""

    hub: str | None = None  # data set on Hugging Face, org/name
    config: str | None = None  # configuration of the data set: a part of its file names
    split: str | None = None
    file: str | None = None  # published file name, such as ChartQA_TEST.tsv
    path: str | None = None  # file, folder or pattern, relative to the task file
    media: str | None = None  # folder of media, relative to the data; default: the folder of the data
    md5: tuple[str, ...] = ()  # MD5 sums of the published file
    where: Mapping[str, str] = {}  # column -> value, with * for any text: use only these rows
    explode: str | None = None  # column with a list: a question for each of its items


class ColumnsSection(Section):
    """Declare the columns to read."""

    id: str | None = None  # template of the question's id; default: the index of the row
    empty: tuple[str, ...] = ()  # texts that stand for an empty cell, such as nan
    answer: str | None = "answer"  # a text or a list of texts; null: questions without expected answers
    # what `answer` contains: a text; a list, also written as text; or the index of the right option, from 0
    answer_is: Literal["text", "list", "number"] = "text"
    options: str | list[str] | None = None  # a column with a list, or columns whose names are letters
    images: tuple[str, ...] = ()  # columns with paths, or templates of paths
    image_paths: str | None = None  # column with paths, used in place of `images` if the file has it
    video: tuple[str, ...] = ()  # templates of paths, of which the first that exists is used
    audio: tuple[str, ...] = ()  # columns with paths of recordings, or templates of such paths
    media_needed: bool = True  # if the task names columns of media, a row without any of these media is unusable
    group: str | None = None  # template: questions with the same text form a group, which is scored by its worst answer
    # name of a field for the metric -> column, or columns whose values form a list
    fields: Mapping[str, str | list[str]] = {}
    image_size: bool = False  # give the metric `width` and `height` of the first image


class CasesSection(Section):
    """Declare a text that depends on the row: `cases` maps patterns to texts; the first match of `of` counts."""

    of: str
    cases: Mapping[str, str]


class ExtractionSection(Section):
    """Declare which part of an answer is scored."""

    reasoning: bool = True  # delete <think>...</think> and <analysis>...</analysis>
    pattern: str | None = None  # regular expression: its first group (or all of it) in the last match
    otherwise: Literal["all", "nothing"] = "all"  # what is scored if the pattern has no match


class MetricChoice(Section):
    name: str
    options: Mapping[str, Any] = {}


class SamplingSection(Section):
    temperature: float = Field(0.0, ge=0)
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0


class TaskSection(Section):
    """Declare the keys of a benchmark."""

    name: str = Field(min_length=1, max_length=200)
    about: str = ""
    data: BenchmarkData = BenchmarkData()
    columns: ColumnsSection = ColumnsSection()
    option_line: str = "{letter}. {text}"
    texts: Mapping[str, CasesSection] = {}  # name -> text: further fields for the prompt
    system: str | None = None
    prompt: str | list[str]  # if it is a list, texts with an empty field are left out
    images: Literal["first", "last", "in order", "by number"] = "first"
    extraction: ExtractionSection = ExtractionSection()
    metric: str | MetricChoice
    max_new_tokens: int = Field(1024, ge=1)
    sampling: SamplingSection = SamplingSection()
    categories: Mapping[str, str] = {}  # table of the report -> template
    default_variant: str = "lmms-eval"
    variants: Mapping[str, Mapping[str, Any]] = {}  # name -> keys of this file with other values

    @property
    def metric_name(self) -> str:
        return self.metric if isinstance(self.metric, str) else self.metric.name

    @property
    def metric_options(self) -> Mapping[str, Any]:
        return {} if isinstance(self.metric, str) else self.metric.options
