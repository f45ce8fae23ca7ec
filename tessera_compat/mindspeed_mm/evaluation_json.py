"""Run the benchmark that an evaluation JSON names."""

from __future__ import annotations

import json
from pathlib import Path

from tessera.engine.request import Sampling
from tessera.errors import TesseraError
from tessera.evaluation.benchmarks import benchmark_of, score_table
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
    table = Path(str(data.get("dataset_path")))
    benchmark = benchmark_of(name, table, f"{source}: evaluation_dataset")
    settings = read_settings({key: value for key, value in data.items() if key not in OWN_KEYS}, source, report)
    report.check()
    model, processor = load_model(args, settings)
    options = dict(settings.generation)
    most = options.pop("max_new_tokens", 32)
    sampling = Sampling(seed=args.seed, **options)
    records = score_table(model, processor, benchmark, max_new_tokens=most, sampling=sampling)
    mean = float(sum(record["score"] for record in records) / len(records))
    folder = Path(str(data.get("result_output_path") or "evaluation_outputs"))
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / f"{name}.json").write_text(json.dumps({"score": mean, "questions": len(records)}), encoding="utf-8")
    return mean
