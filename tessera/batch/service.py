"""Answer a file of requests with the service of the server, without a network."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from tessera.batch.answer import count_missing
from tessera.batch.bodies import BodyRow, BodyRows, response_row
from tessera.batch.output import BatchOutput, PartFile
from tessera.batch.rows import UnusableRow
from tessera.errors import TesseraError
from tessera.inference.answering import stops_all
from tessera.runtime.progress import TokenProgress
from tessera.runtime.rng import derive
from tessera.server.errors import ApiError, of_tessera, of_validation
from tessera.server.fields import REFUSED, ChatRequest
from tessera.server.render import chat_completion
from tessera.server.service import Service
from tessera.server.settings import Settings
from tessera.server.start import ModelOptions, start_service

_AT_ONCE = 320  # requests that are prepared or answered at a time; the engine runs 256 of them


@contextlib.contextmanager
def service_answers(rows: BodyRows, out: Path, options: ModelOptions) -> Iterator[ServiceAnswers]:
    """Load the model and start the service for a batch."""
    limits = Settings(options.path.name, max_length=0, allow_files=rows.root.resolve(), allow_priority=True)
    service = start_service(options, limits)
    try:
        yield ServiceAnswers(rows, service, BatchOutput.joined(out).began)
    finally:
        service.close()


@dataclass(frozen=True)
class ServiceAnswers:
    """Answer requests with a service.

    `created`: creation time in all answers, so that a resumed batch gives the same output.
    """

    rows: BodyRows
    service: Service
    created: int

    def run(self, numbers: list[range], answered: np.ndarray, part: PartFile) -> None:
        """Answer the rows in `numbers` that are not answered."""
        total = count_missing(numbers, answered)
        source = (row for block in numbers for row in self.rows.read(block) if not answered[row.index])

        async def answer_some() -> None:
            for row in source:  # all tasks take their rows from one generator
                status, body = await self._answer(row)
                custom_id = row.custom_id if isinstance(row, BodyRow) else row.identity["custom_id"]
                part.write(row.index, response_row(row.index, custom_id, status, body), error=status != 200)
                progress.count_tokens(body.get("usage", {}).get("completion_tokens", 0))
                progress.count()

        async def answer_all() -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(_AT_ONCE, total)):
                    tasks.create_task(answer_some())

        with TokenProgress("answering", total, "rows") as progress:
            try:
                asyncio.run(answer_all())
            except ExceptionGroup as group:  # raise the first error, which ended all other tasks
                raise group.exceptions[0] from None

    async def _answer(self, row: BodyRow | UnusableRow) -> tuple[int, dict[str, Any]]:
        """Return status and body of the response to one request."""
        try:
            if isinstance(row, UnusableRow):
                raise row.error
            seed = {"seed": derive(self.rows.seed, "row", row.index)}
            wanted = ChatRequest.model_validate({**seed, **row.body, "model": None})
            if wanted.stream:
                raise ApiError(400, "answers in a file are not streamed", param="stream", code="invalid_value")
            job = await self.service.chat_job(wanted)
            name = str(row.body.get("model") or job.model)
            job = replace(job, id=str(row.index), created=self.created, model=name)
            body = await chat_completion(self.service, job, wanted)
            body["usage"].pop("prompt_tokens_details", None)  # dropped: it depends on other rows
            return 200, body
        except ApiError as error:
            refusal = error
        except ValidationError as error:
            refusal = of_validation(error, REFUSED, ChatRequest.model_fields)
        except TesseraError as error:
            if stops_all(error):
                raise
            refusal = of_tessera(error)
        return refusal.status, refusal.body()
