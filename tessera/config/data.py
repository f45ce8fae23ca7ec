"""Declare the keys of `data`: the sources, how rows are read and packed, and where images may come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from tessera.config.hub_ids import hub_spelling
from tessera.config.reader import Section
from tessera.config.values import HubName, Seconds

RecordFormat = Literal[
    "messages",
    "sharegpt",
    "llava",
    "alpaca",
    "query_response",
    "question_answer",
    "text",
    "preference",
    "unpaired_preference",
    "generation",
]


class SourceSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"question": "a column of metadata.csv, beside file_name and answer"}

    path: Path = Field(
        description="JSON, JSONL, Parquet, CSV, TSV or text file, tar shards, a folder; {000..127} and * name several; "
        "or hf://org/name[@revision][/files] (ms:// for ModelScope), which is downloaded"
    )
    hub_id: HubName | None = Field(
        None, description="id and commit of the hub that `path` was downloaded from, as a run notes them"
    )
    root: Path | None = Field(
        None, description="media paths must lie under this folder; default: the file's own folder"
    )
    format: Literal["auto"] | RecordFormat = Field("auto", description="format of the records")
    columns: dict[str, str] = Field(
        default_factory=dict, description="our name of a key or tag -> the name it has in these rows"
    )
    weight: float | None = Field(
        None, ge=1e-9, le=1e9, description="share of the samples drawn from this set; given for all sets or for none"
    )
    max_samples: int | None = Field(None, gt=0, le=10**12, description="use only the first so many rows")

    @field_serializer("path", when_used="json")
    def _written_path(self, path: Path) -> str:
        return hub_spelling(path)


Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.\-]+$", max_length=253)]


class UrlSection(Section):
    """Allow images that data names by http(s) URLs to be fetched, and say within which limits."""

    hosts: list[Host] = Field(
        default_factory=list, max_length=1000, description="only these hosts and those below them; default: any"
    )
    max_bytes: int = Field(32 << 20, gt=0, le=1 << 32, description="a larger image is refused")
    timeout_s: Seconds = Field(20, description="for one image, from the first question to the last byte")
    private: bool = Field(
        False, description="also addresses of private networks and of this machine, for data that you trust"
    )
    cache: Path | None = Field(None, description="folder of fetched images; default: tessera/media in ~/.cache")


class DataSection(Section):
    kind: str = Field("chat", description="kind of data set, or an import path to one")
    train: list[SourceSection] = Field(default_factory=list, description="data sets; also written a.json,b.json")
    eval: list[SourceSection] = Field(default_factory=list)
    length: int = Field(2048, gt=0, le=2**28, description="tokens of one packed row")
    truncate: Literal["never", "turns"] = Field(
        "never",
        description="samples longer than a row: never cut, but left out and listed; or cut after the last turn that "
        "fits",
    )
    shuffle: bool = True
    stream: bool = Field(
        False,
        description="fetch files of data.train as the run reaches them, and pack and shuffle within each file; off: "
        "all of it is fetched and measured before the first step, and shuffled as a whole",
    )
    stream_cache_gib: float | None = Field(
        100,
        gt=0,
        le=1e9,
        description="with stream: of the fetched files of all streams so many GiB stay on disk; beyond that the one "
        "read longest ago is removed, unless a run reads it, and fetched again when it is needed; null: all stay",
    )
    pack: bool = Field(True, description="several samples to a row; off: one each")
    balance: bool = Field(True, description="rows of equal work, and equal work for every rank")
    workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = Field(
        "auto", description="loader processes; 0 loads in the training process; auto: as many as keep the device busy"
    )
    prefetch: int = Field(2, gt=0, le=10**4, description="batches each worker keeps ready")
    sample_timeout_s: Seconds = Field(60, description="a sample that twice takes longer to read counts as bad")
    on_bad_sample: Literal["skip", "fail"] = Field("skip", description="skip: counted and listed in quarantine.jsonl")
    max_bad_share: float = Field(
        0.05,
        gt=0,
        le=1,
        description="with on_bad_sample skip: a data set with a larger share of samples that cannot be used, and more "
        "than one, is refused, and a run that meets so many ends; those longer than a row do not count. 1: any share",
    )
    train_on: list[str] = Field(default_factory=lambda: ["assistant"], description="roles whose words are trained on")
    mask_history: bool = Field(False, description="train only on the last turn of each conversation")
    max_image_pixels: int = Field(
        64_000_000, gt=0, le=10**12, description="larger images are refused from their header"
    )
    urls: UrlSection | None = Field(
        None, description="fetch images that are named by URLs; {} takes every default. Left out: none is fetched"
    )
    jpeg_draft: bool = Field(
        False,
        description="decode JPEGs at 1/2, 1/4 or 1/8 of their size where that is still enough; photos of 12 megapixels "
        "load some 2.5 times as fast, and pixels are near those of the reference processors, no longer equal",
    )
    processor: dict[str, Any] = Field(default_factory=dict, description="preprocessor options, such as min_pixels")
    options: dict[str, Any] = Field(default_factory=dict, description="options of a data kind of your own")

    @field_validator("processor")
    @classmethod
    def _roles_are_said_in_one_place(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "train_on" in value:
            raise ValueError("processors take no `train_on`; say data.train_on, which every kind of data set follows")
        return value

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """Accept `a.json,b.json` as two sets, and a path in place of a set of which nothing else is given."""
        if isinstance(value, (str, Path, Mapping)):
            value = [value]
        if not isinstance(value, (list, tuple)):
            return value
        spread: list[Any] = []
        for entry in value:
            settings = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
            path = settings.get("path")
            paths = [one.strip() for one in path.split(",")] if isinstance(path, str) else [path]
            if "" in paths:
                raise ValueError(f"an empty name in {path!r}")
            spread += [entry] if isinstance(entry, SourceSection) else [{**settings, "path": one} for one in paths]
        return spread

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> DataSection:
        if self.kind in ("chat", "preference", "unpaired_preference", "generation") and self.options:
            raise ValueError(f"`options` has no effect with kind {self.kind}; it is for a data kind of your own")
        if self.stream and self.kind not in ("chat", "preference", "unpaired_preference"):
            raise ValueError(
                f"`stream` is for conversations and pairs of answers, and has no effect with kind {self.kind}"
            )
        if self.on_bad_sample == "fail" and self.max_bad_share != type(self).model_fields["max_bad_share"].default:
            raise ValueError("`max_bad_share` has no effect with on_bad_sample: fail, which allows no bad sample")
        if not self.stream and self.stream_cache_gib != type(self).model_fields["stream_cache_gib"].default:
            raise ValueError("`stream_cache_gib` has no effect without stream: true; set that too, or leave it out")
        if self.kind == "custom" and (self.train or self.eval):
            raise ValueError(
                "`train` and `eval` have no effect with kind custom; data.options says what the data is, and "
                "data.options.eval what is held out"
            )
        return self

    @model_validator(mode="after")
    def _weights_for_all_or_none(self) -> DataSection:
        for name, sets in (("train", self.train), ("eval", self.eval)):
            if len({one.weight is None for one in sets}) > 1:
                raise ValueError(f"give every set of data.{name} a weight, or none")
        return self
