"""Run the benchmark that an evaluation JSON names."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.engine.request import Sampling
from tessera.errors import TesseraError
from tessera.evaluation.answers import read_answers
from tessera.evaluation.run import EvaluationOptions, evaluate_tasks
from tessera.evaluation.tasks.load import open_task, published_task
from tessera.runtime.distributed import World
from tessera.runtime.files import replacing
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.inference_json import load_model, read_settings
from tessera_compat.mindspeed_mm.report import JobReport

log = logging.getLogger("tessera")

LONGEST_CELL = 32_767  # maximum number of characters in a cell of Excel
OWN_KEYS = {"dataset_path", "evaluation_dataset", "evaluation_model", "result_output_path", "use_custom_prompt"}


def evaluate(args: Args, world: World) -> float:
    """Ask every question of the benchmark, write the answers, and return the mean score.

    Each rank holds the whole model and answers a share of the questions.
    """
    if not args.mm.model.keys():
        raise TesseraError(
            "--mm-model, the evaluation JSON, is missing or empty", where="command line", code="job.model-json-missing"
        )
    data, source, report = args.mm.model.to_dict(), str(args.mm_model), JobReport()
    name = str(data.get("evaluation_dataset"))
    table, where = Path(str(data.get("dataset_path"))), f"{source}: evaluation_dataset"
    benchmark = open_task(published_task(name, where), data=table, where=where)
    settings = read_settings({key: value for key, value in data.items() if key not in OWN_KEYS}, source, report)
    report.check()
    model, processor = load_model(args, settings)
    options = dict(settings.generation)
    most = options.pop("max_new_tokens", 32)
    sampling = Sampling(seed=args.seed, **options)
    folder = Path(str(data.get("result_output_path") or "evaluation_outputs"))
    (result,) = evaluate_tasks(
        model,
        processor,
        [benchmark],
        folder,
        EvaluationOptions(max_new_tokens=most, sampling=sampling, overwrite=True, world=world),
        name=str(data.get("evaluation_model") or table.stem),
        weights=str(args.load or settings.folders),
    )
    if not world.is_main:
        return result.score.value
    records = [
        {
            "index": row["id"],
            "question": row["prompt"],
            "answer": row["answer"],
            "expected": row["expected"],
            "score": benchmark.metric.score(row["values"]),
        }
        for row in read_answers(result.answers)
        if "unusable" not in row
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    try:
        with replacing(folder / f"{name}.xlsx") as path:
            write_sheet(path, records)
    except ImportError:
        log.warning("no %s.xlsx: it needs openpyxl (pip install openpyxl)", name)
    summary = {"score": result.score.value, "questions": len(records)}
    (folder / f"{name}.json").write_text(json.dumps(summary), encoding="utf-8")
    return result.score.value


def write_sheet(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write answers as an Excel sheet with the columns of VLMEvalKit.

    A text that begins like a formula is stored as text, and control characters are replaced.
    """
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    book = Workbook(write_only=True)
    sheet = book.create_sheet("answers")

    def cell(value: str | float) -> Any:
        if isinstance(value, float):
            return value
        text = ILLEGAL_CHARACTERS_RE.sub("\ufffd", value)[:LONGEST_CELL]
        written = WriteOnlyCell(sheet, text)
        written.data_type = "s"
        return written

    sheet.append(["index", "question", "answer", "prediction", "hit"])
    for row in records:
        expected = " | ".join(row["expected"])
        sheet.append([*map(cell, (row["index"], row["question"], expected, row["answer"], float(row["score"])))])
    book.save(path)
