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
    "transcript",
    "speech",
    "preference",
    "unpaired_preference",
    "generation",
]


class SourceSection(Section):
    renamed: ClassVar[Mapping[str, str]] = {"question": "a column of metadata.csv, beside file_name and answer"}

    path: Path = Field(
        description="JSON, JSONL, Parquet, CSV, TSV or text file, tar shards or a folder; {000..127} and * match "
        "several; or hf://org/name[@revision][/files] (ms:// for ModelScope), which is downloaded"
    )
    hub_id: HubName | None = Field(None, description="hub id and commit of `path`, which a run records")
    root: Path | None = Field(None, description="folder that contains all media; default: the folder of the file")
    format: Literal["auto"] | RecordFormat = Field("auto", description="format of the records")
    columns: dict[str, str] = Field(
        default_factory=dict, description="standard name of a key or tag -> its name in these rows"
    )
    instruction: str | None = Field(
        None, description="text of the user behind each recording, such as `Transcribe.`; for format: transcript"
    )
    weight: float | None = Field(
        None, ge=1e-9, le=1e9, description="relative number of samples from this set; for all sets or none"
    )
    max_samples: int | None = Field(None, gt=0, le=10**12, description="use only the first rows, up to this number")

    @field_serializer("path", when_used="json")
    def _written_path(self, path: Path) -> str:
        return hub_spelling(path)


Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.\-]+$", max_length=253)]


class UrlSection(Section):
    """Allow downloads of images that samples refer to by http(s) URLs, and set limits for them."""

    hosts: list[Host] = Field(
        default_factory=list, max_length=1000, description="allowed hosts, with their subdomains; default: all"
    )
    max_bytes: int = Field(32 << 20, gt=0, le=1 << 32, description="maximum size of an image")
    timeout_s: Seconds = Field(20, description="time limit for one image")
    private: bool = Field(False, description="also allow addresses of private networks and of this machine")
    cache: Path | None = Field(
        None, description="folder of downloaded images; default: media in the cache (~/.cache/tessera)"
    )


class DataSection(Section):
    kind: str = Field("chat", description="kind of data set, or its import path")
    train: list[SourceSection] = Field(default_factory=list, description="data sets; a.json,b.json names two")
    eval: list[SourceSection] = Field(default_factory=list)
    length: int = Field(2048, gt=0, le=2**28, description="tokens of one packed row")
    truncate: Literal["never", "turns"] = Field(
        "never",
        description="samples longer than a row: never: leave them out and list them; turns: cut after the last "
        "turn that fits",
    )
    shuffle: bool = True
    stream: bool = Field(
        False,
        description="download files of data.train when the run reaches them, and pack and shuffle inside of each "
        "file; off: download and index all files before the first step, and shuffle all samples",
    )
    stream_cache_gib: float | None = Field(
        100,
        gt=0,
        le=1e9,
        description="with stream: size of the cache of downloaded files in GiB; beyond it the least recently used "
        "file is removed, unless a run reads it; null: no limit",
    )
    pack: bool = Field(True, description="pack several samples into a row; off: one sample per row")
    balance: bool = Field(True, description="balance the computation of rows and of ranks")
    workers: Annotated[int, Field(ge=0, le=4096)] | Literal["auto"] = Field(
        "auto", description="loader processes; 0: load in the training process; auto: as many as the device needs"
    )
    prefetch: int = Field(2, gt=0, le=10**4, description="batches that each worker prepares ahead")
    sample_timeout_s: Seconds = Field(60, description="a sample that exceeds this time twice counts as bad")
    on_bad_sample: Literal["skip", "fail"] = Field(
        "skip", description="skip: leave out bad samples and list them in quarantine.jsonl; fail: stop"
    )
    max_bad_share: float = Field(
        0.05,
        gt=0,
        le=1,
        description="with on_bad_sample=skip: largest fraction of bad samples that a data set or a run may have; "
        "one bad sample is always allowed, and samples longer than a row do not count",
    )
    train_on: list[str] = Field(
        default_factory=lambda: ["assistant"], description="roles whose messages are trained on"
    )
    mask_history: bool = Field(False, description="train only on the last turn of each conversation")
    max_image_pixels: int = Field(
        64_000_000, gt=0, le=10**12, description="larger images are refused before they are decoded"
    )
    urls: UrlSection | None = Field(
        None, description="download images that are named by URLs; {}: with defaults; default: no downloads"
    )
    jpeg_draft: bool = Field(
        False,
        description="decode JPEGs at 1/2, 1/4 or 1/8 of their size if the model needs no more; photos of 12 "
        "megapixels load about 2.5 times as fast, and pixels differ slightly from those of the "
        "reference processors",
    )
    processor: dict[str, Any] = Field(default_factory=dict, description="preprocessor options, such as min_pixels")
    options: dict[str, Any] = Field(default_factory=dict, description="options of a custom data kind")

    @field_validator("processor")
    @classmethod
    def _roles_are_said_in_one_place(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "train_on" in value:
            raise ValueError("data.processor has no key `train_on`; set data.train_on")
        return value

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        """Accept the text `a.json,b.json` as two data sets, and a path as a data set without other settings."""
        if isinstance(value, (str, Path, Mapping)):
            value = [value]
        if not isinstance(value, (list, tuple)):
            return value
        spread: list[Any] = []
        for entry in value:
            settings = dict(entry) if isinstance(entry, Mapping) else {"path": entry}
            path = settings.get("path")
            paths = [part.strip() for part in path.split(",")] if isinstance(path, str) else [path]
            if "" in paths:
                raise ValueError(f"an empty name in {path!r}")
            spread += [entry] if isinstance(entry, SourceSection) else [{**settings, "path": part} for part in paths]
        return spread

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> DataSection:
        if self.kind in ("chat", "preference", "unpaired_preference", "generation") and self.options:
            raise ValueError(f"`options` has no effect with kind {self.kind}; it is for custom data kinds")
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
                "`train` and `eval` have no effect with kind custom; set data.options and data.options.eval"
            )
        return self

    @model_validator(mode="after")
    def _weights_for_all_or_none(self) -> DataSection:
        for name, sets in (("train", self.train), ("eval", self.eval)):
            if len({source.weight is None for source in sets}) > 1:
                raise ValueError(f"give every set of data.{name} a weight, or none")
        return self
