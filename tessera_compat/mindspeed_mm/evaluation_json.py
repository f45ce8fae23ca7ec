"""Run the benchmark that an evaluation JSON names."""

from __future__ import annotations

import json
from pathlib import Path

from tessera.engine.request import Sampling
from tessera.errors import TesseraError
from tessera.evaluation.answers import read_answers
from tessera.evaluation.run import evaluate_tasks
from tessera.evaluation.scores import row_score
from tessera.evaluation.tasks.load import open_task, published_task
from tessera_compat.mindspeed_mm.arguments import Args
from tessera_compat.mindspeed_mm.inference_json import load_model, read_settings
from tessera_compat.mindspeed_mm.report import JobReport

OWN_KEYS = {"dataset_path", "evaluation_dataset", "evaluation_model", "result_output_path", "use_custom_prompt"}


def evaluate(args: Args) -> float:
    """Ask every question of the benchmark, write the answers, and return the mean score."""
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
        name=str(data.get("evaluation_model") or table.stem),
        weights=str(args.load or settings.folders),
        max_new_tokens=most,
        sampling=sampling,
        overwrite=True,
    )
    records = [
        {
            "index": row["id"],
            "answer": row["answer"],
            "expected": row["expected"],
            "score": row_score(row, benchmark.metric),
        }
        for row in read_answers(result.answers)
        if "unusable" not in row
    ]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    summary = {"score": result.score.value, "questions": len(records)}
    (folder / f"{name}.json").write_text(json.dumps(summary), encoding="utf-8")
    return result.score.value
