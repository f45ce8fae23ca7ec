"""Read files of requests in the form of OpenAI's batches: {"custom_id", "method", "url", "body"}."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tessera.batch.rows import UnusableRow
from tessera.data.sources.container import Container, RecordError
from tessera.data.sources.text import open_text_file
from tessera.errors import TesseraError
from tessera.runtime.files import open_regular, parse_row

Row = dict[str, Any]

URL = "/v1/chat/completions"
_KEYS = {"custom_id", "url", "body"}
_MAX_FIRST_ROW = 64 << 20


def is_request_file(data: Path) -> bool:
    """Return whether a file ends in `.jsonl` and its first line has the keys of a request in OpenAI's batches."""
    if not data.is_file() or data.suffix != ".jsonl":
        return False
    with open_regular(data) as file:
        row = parse_row(file.readline(_MAX_FIRST_ROW))
    return row is not None and row.keys() >= _KEYS


@dataclass(frozen=True)
class BodyRow:
    """Hold one request."""

    index: int
    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True)
class BodyRows:
    """Read the requests of a file. A request without a seed gets a seed derived from `seed` and its index."""

    records: Container
    root: Path  # folder of media that requests name by file: URLs
    seed: int

    @staticmethod
    def open(data: Path, root: Path | None, seed: int) -> BodyRows:
        return BodyRows(open_text_file(data, data.name, "json", None, None), root or data.parent, seed)

    def __len__(self) -> int:
        return len(self.records)

    def facts(self) -> Row:
        """Return a JSON mapping that is equal only if the requests are the same: file, media folder and seed."""
        return {"data": [self.records.facts, str(self.root.resolve())], "seed": self.seed}

    def read(self, numbers: range) -> Iterator[BodyRow | UnusableRow]:
        """Yield consecutive rows."""
        for index, record in self.records.scan(numbers):
            if isinstance(record, RecordError):
                yield UnusableRow(index, {"custom_id": None}, record)
                continue
            content = record.content
            name = content.get("custom_id")
            identity = {"custom_id": name if isinstance(name, str) else None}
            wrong = None
            if not isinstance(name, str):
                wrong = "custom_id must be a string"
            elif content.get("method", "POST") != "POST" or content.get("url") != URL:
                wrong = f"only POST {URL} is answered"
            elif not isinstance(content.get("body"), dict):
                wrong = "body must be an object"
            if wrong is not None:
                error = TesseraError(
                    wrong,
                    where=self.records.location(index),
                    fix=f'write {{"custom_id": "a", "method": "POST", "url": "{URL}", "body": {{"messages": [...]}}}}',
                    code="data.bad-request-row",
                )
                yield UnusableRow(index, identity, error)
            else:
                yield BodyRow(index, str(name), content["body"])


def response_row(index: int, custom_id: str | None, status: int, body: Mapping[str, Any]) -> Row:
    """Return an output row in OpenAI's form.

    A refused request has the error in its body, and also in the row itself.
    """
    error = body.get("error") if status != 200 else None
    return {
        "id": f"batch_req_{index}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": f"req_{index}", "body": body},
        "error": None if error is None else {"code": error["code"], "message": error["message"]},
    }
