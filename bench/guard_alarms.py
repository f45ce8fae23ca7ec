"""False alarms of the guard on healthy runs, and planted faults: a table of what it does.

    python bench/guard_alarms.py [--jobs N] [--cases PATTERN] [--limit N] [--policy clip] [--steps 160] [--faults-only]

Every healthy case is trained twice from the same seed, without the guard and with it. A case is lost if the run without
the guard succeeds (exit code 0, finite losses) and the one with it does not: another exit code, a loss that is not
finite, or a final loss that is worse beyond noise. Where the guard raised no alarm, both runs must be equal bit by bit.
Prints one JSON line per case and one for the summary; the exit code is 1 if a case is lost, more than one step in a
thousand was dropped, or a planted fault was not found. Run it in the root of the repository: data is from tests/toys.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.toys, also in the processes that are started

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_VL = (*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_pad|>")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01}
SQUARE = {"hidden_size": 24, "intermediate_size": 44, "num_attention_heads": 2, "patch_size": 4}
DEPTH = {"depth": 2, "hidden_size": 24, "intermediate_size": 20, "num_heads": 2, "patch_size": 4}
# Of each family: the tiny model, the special words at the end of its vocabulary, options of its processor.
FAMILIES: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "llama": ({"family": "llama", "config": {"text": TEXT}}, ("llama",), {}),
    "qwen2": ({"family": "qwen2", "config": {"text": TEXT}}, QWEN_VL, {}),
    "qwen3": ({"family": "qwen3", "config": {"text": {**TEXT, "head_dim": 8}}}, QWEN_VL, {}),
    "qwen3-experts": (
        {"family": "qwen3", "config": {"text": {**TEXT, "head_dim": 8, "experts": EXPERTS}}},
        QWEN_VL,
        {},
    ),
    "qwen2_vl": (
        {
            "family": "qwen2_vl",
            "config": {
                "text": {**TEXT, "mrope_section": [1, 1, 2]},
                "vision": {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 4},
            },
        },
        QWEN_VL,
        {"min_pixels": 64, "max_pixels": 512},
    ),
    "qwen2_5_vl": (
        {
            "family": "qwen2_5_vl",
            "config": {
                "text": {**TEXT, "mrope_section": [1, 1, 2]},
                "vision": {**DEPTH, "window_size": 16, "fullatt_block_indexes": [1]},
            },
        },
        QWEN_VL,
        {"min_pixels": 64, "max_pixels": 512},
    ),
    "qwen3_vl": (
        {
            "family": "qwen3_vl",
            "config": {
                "text": {**TEXT, "head_dim": 8, "mrope_section": [2, 1, 1]},
                "vision": {**DEPTH, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            },
        },
        QWEN_VL,
        {"min_pixels": 64, "max_pixels": 512},
    ),
    "glm4v": (
        {
            "family": "glm4v",
            "config": {"text": {**TEXT, "mrope_section": [0, 1, 1]}, "vision": {**DEPTH, "image_size": 20}},
        },
        ("glm4v",),
        {"min_pixels": 64, "max_pixels": 512},
    ),
    "internvl": (
        {
            "family": "internvl",
            "config": {"text": TEXT, "vision": {**SQUARE, "num_hidden_layers": 2, "image_size": 16}},
        },
        (*CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        {"max_tiles": 2},
    ),
    "llava": (
        {
            "family": "llava",
            "config": {
                "text": TEXT,
                "vision": {**SQUARE, "num_hidden_layers": 3, "image_size": 8},
                "tiles": {"pinpoints": [[8 * h, 8 * w] for h in (1, 2) for w in (1, 2, 3)], "most": 2},
            },
        },
        (*CHATML, "<image>", "<video>"),
        {},
    ),
}
WORDY = ("llama", "qwen2", "qwen3", "qwen3-experts")  # read no images
RATES = (1e-4, 1e-3, 5e-3, 2e-2)  # from timid to the edge of stability
BATCHES = (1, 8)
Case = dict[str, Any]


# ---------------------------------------------------------------------------------------------- cases


def healthy(steps: int) -> Iterator[Case]:
    """The grid: families x ways to train x learning rates x batch sizes x seeds, and runs that are healthy but odd."""
    for family, rate, batch, seed in itertools.product(FAMILIES, RATES, BATCHES, (1, 2)):
        yield _case(f"full/{family}/lr{rate:g}/batch{batch}/seed{seed}", family, seed, rate, batch, steps)
    for family, rate in itertools.product(FAMILIES, (1e-3, 1e-2, 5e-2)):
        yield _case(f"lora/{family}/lr{rate:g}", family, 1, rate, 4, steps, lora=4)
    for family, rate in itertools.product(FAMILIES, (1e-3, 1e-2)):
        yield _case(f"dpo/{family}/lr{rate:g}", family, 1, rate, 2, steps, lora=4, pairs=True)
    for family, seed in itertools.product(("qwen2", "qwen2_vl"), (1, 2)):
        odd: dict[str, dict[str, Any]] = {
            "no-clip": {"optim.clip_norm": None},
            "tight-clip": {"optim.clip_norm": 0.05},
            "long-warmup": {"optim.schedule.warmup": steps // 2},
            "few-samples": {"data.train.0.max_samples": 4},  # learnt by heart: the loss falls to nothing
            "slow-beta2": {"optim.betas": [0.9, 0.999]},
            "data-change": {"other_data": True},  # the second half is of another kind
        }
        for name, changes in odd.items():
            yield _case(f"odd/{name}/{family}/seed{seed}", family, seed, 3e-3, 2, 2 * steps, **changes)


def _case(
    name: str,
    family: str,
    seed: int,
    rate: float,
    batch: int,
    steps: int,
    lora: int = 0,
    pairs: bool = False,
    **more: Any,
) -> Case:
    return {
        "case": name,
        "family": family,
        "seed": seed,
        "lr": rate,
        "batch": batch,
        "steps": steps,
        "lora": lora,
        "pairs": pairs,
        "changes": more,
    }


def write_data(folder: Path) -> None:
    """Conversations and pairs of answers, with images and without, and a tokenizer for each family."""
    from tessera.models.glm4v.processor import GLM4V
    from tessera.models.llama import LLAMA3
    from tessera.models.processing.tokenizer import train_tokenizer
    from tests.toys.pair_set import write_pair_set

    write_pair_set(folder, samples=96)
    for file in ("train.jsonl", "pairs.jsonl"):
        rows = [json.loads(line) for line in (folder / file).read_text().splitlines()]
        wordy = [row | {"messages": [_without_images(turn) for turn in row["messages"]]} for row in rows]
        (folder / f"wordy-{file}").write_text("".join(json.dumps(row) + "\n" for row in wordy))
    other = []
    for number, line in enumerate((folder / "wordy-train.jsonl").read_text().splitlines()):
        row = json.loads(line)
        row["messages"][-1]["content"] = " ".join(str(number * k % 97) for k in range(1, 8))
        other.append(json.dumps(row | {"id": f"other-{number}"}) + "\n")
    (folder / "other.jsonl").write_text("".join(other))
    texts = ["red blue tall small old Say", "system\nuser\nassistant\n", "0 1 2 3 4 5 6 7 8 9 12 34 56 78 90"]
    words = {"llama": LLAMA3.special, "glm4v": ("<|endoftext|>", *GLM4V.special, "<|image|>", "<|video|>")}
    for family, (_, special, _) in FAMILIES.items():
        tokenizer = train_tokenizer(texts * 20, 512, words.get(special[0], special))
        (folder / "words" / family).mkdir(parents=True)
        tokenizer.save(str(folder / "words" / family / "tokenizer.json"))


def _without_images(turn: dict[str, Any]) -> dict[str, Any]:
    if isinstance(turn["content"], str):
        return turn
    return turn | {"content": "".join(part["text"] for part in turn["content"] if part["type"] == "text")}


def recipe(case: Case, data: Path, out: Path, policy: str) -> dict[str, Any]:
    model, _, processor = FAMILIES[case["family"]]
    prefix = "wordy-" if case["family"] in WORDY else ""
    train = str(data / f"{prefix}{'pairs' if case['pairs'] else 'train'}.jsonl")
    changes = dict(case["changes"])
    settings: dict[str, Any] = {
        "name": "run",
        "out": str(out),
        "model": {**model, "preset": "quickstart", "tokenizer": str(data / "words" / case["family"])},
        "data": {
            "train": [{"path": train}],
            "eval": [] if case["pairs"] else [{"path": train, "max_samples": 24}],
            "length": 160,
            "workers": 0,
            "processor": processor,
        },
        "train": {
            "steps": case["steps"],
            "global_batch": case["batch"],
            "micro_batch": case["batch"],
            "seed": case["seed"],
            "device": "cpu",
            "eval_rows": 4,
        },
        "optim": {"lr": case["lr"], "schedule": {"kind": "cosine", "warmup": 10}},
        "checkpoint": {"every": 0, "at_end": False},
        "guard": {"policy": policy},
        "log": {"every": 10**6},
    }
    if case["lora"]:
        settings["model"]["lora"] = {"rank": case["lora"]}
    if case["pairs"]:
        settings["data"]["kind"] = "preference"
        settings["train"]["task"] = "dpo"
    if changes.pop("other_data", False):
        rows = case["steps"] * case["batch"]
        first = {"path": train, "max_samples": 96}
        settings["data"] |= {"train": [first, {"path": str(data / "other.jsonl")}], "shuffle": False, "pack": False}
        settings["train"]["steps"] = min(rows, 192) // case["batch"]
    return {**settings, "changes": changes}


# ---------------------------------------------------------------------------------------------- one case


def run_once(settings: dict[str, Any], callbacks: list[Any] | None = None) -> dict[str, Any]:
    """Train; return the exit code, the losses and what the guard recorded."""
    import tessera
    from tessera.errors import TesseraError
    from tessera.runtime.files import read_jsonl

    folder = Path(settings["out"]) / settings["name"]
    changes = settings.pop("changes", {})
    code, words, began = 0, "", time.perf_counter()
    with _silence():
        try:
            run = tessera.train(settings, changes, overwrite=True, callbacks=callbacks or [])
            if run.stopped:  # by a signal: half a run says nothing
                raise KeyboardInterrupt(run.stopped)
        except TesseraError as error:
            code, words = error.exit_code, f"{error.what} ({error.fix})"
    rows = list(read_jsonl(folder / "metrics.jsonl"))
    events = list(read_jsonl(folder / "guard.jsonl"))
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "exit": code,
        "error": words,
        "seconds": round(time.perf_counter() - began, 2),
        "losses": [row["loss"] for row in rows if row["kind"] == "train"],
        "held_out": next((row["eval_loss"] for row in reversed(rows) if "eval_loss" in row), None),
        "events": events,
    }


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def compare(case: Case, data: str, policy: str) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        free = run_once(recipe(case, Path(data), Path(folder) / "free", "off"))
        watched = run_once(recipe(case, Path(data), Path(folder) / "watched", policy))
    actions = [event["action"] for event in watched["events"]]
    result = {
        "case": case["case"],
        "steps": len(watched["losses"]),
        "exit": [free["exit"], watched["exit"]],
        "final": [_final(free), _final(watched)],
        "first": free["losses"][0] if free["losses"] else None,
        "alarms": len(actions),
        "clipped": actions.count("clipped"),
        "dropped": actions.count("skipped"),
        "diverged": sum(event["kind"] == "diverged" for event in watched["events"]),
        "seconds": [free["seconds"], watched["seconds"]],
    }
    result["succeeds"] = free["exit"] == 0 and _finite(free)
    result["lost"] = result["succeeds"] and not _as_good(free, watched)
    if result["lost"]:
        result["error"] = watched["error"]
    if free["error"] and not watched["events"]:
        result["error"] = free["error"]
    return result


def _finite(run: dict[str, Any]) -> bool:
    return bool(run["losses"]) and all(map(math.isfinite, run["losses"])) and math.isfinite(_final(run))


def _final(run: dict[str, Any]) -> float:
    """The held-out loss; of pairs, which have none here, the mean loss of the last tenth."""
    if run["held_out"] is not None:
        return float(run["held_out"])
    return fmean(run["losses"][-max(5, len(run["losses"]) // 10) :]) if run["losses"] else math.nan


def _as_good(free: dict[str, Any], watched: dict[str, Any]) -> bool:
    if watched["exit"] != free["exit"] or len(watched["losses"]) != len(free["losses"]) or not _finite(watched):
        return False
    if not watched["events"]:
        return bool(watched["losses"] == free["losses"] and watched["held_out"] == free["held_out"])
    # Noise: two runs that differ by one clipped step drift apart by what a batch differs from the next.
    late = free["losses"][-20:]
    noise = max(late) - min(late)
    return _final(watched) <= 1.1 * _final(free) + max(noise, 0.02 * abs(free["losses"][0]))


# ---------------------------------------------------------------------------------------------- planted faults


WEIGHT = "text.layers.1.mlp.down.weight"
EVERYONE = [f"sample-{number}" for number in range(96)]
# What is planted: samples that are spoiled, a step before which a bit flips, changes of the recipe.
FAULTS: dict[str, tuple[dict[str, list[str]], int, dict[str, Any]]] = {
    "nothing": ({}, 0, {}),
    "an image of nan": ({"nan_pixels": ["sample-7"]}, 0, {}),
    "a flipped bit": ({}, 45, {}),
    "every image is nan": ({"nan_pixels": EVERYONE}, 0, {}),
    "absurd labels": ({"absurd_labels": EVERYONE[90:]}, 0, {}),
    "a far too high learning rate": ({}, 0, {"optim.lr": 3.0, "train.steps": 120}),
}


def plant(name: str, data: str, policy: str) -> dict[str, Any]:
    """Plant one fault; tell whether it was found, and whether the run ended as it should."""
    import torch

    from tests.toys.faults import FlipBit

    torch.set_num_threads(1)
    options, flip, changes = FAULTS[name]
    plain = _case("fault", "qwen2_vl", 1, 3e-3, 4, 80)
    ran = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind, spoilt in (("clean", False), ("spoilt", True)) if not changes else (("spoilt", True),):
            settings = recipe(plain, Path(data), Path(folder) / kind, policy)
            settings["data"] |= {"kind": "tests.toys.faults", "options": options if spoilt else {}}
            settings["checkpoint"] = {"every": 10}
            settings["changes"] = changes
            ran[kind] = run_once(settings, [FlipBit(flip, WEIGHT)] if spoilt and flip else None)
    got, clean = ran["spoilt"], ran.get("clean", ran["spoilt"])
    events = [[event["step"], event["kind"], event["action"]] for event in got["events"]]
    detected = _was_found(name, got, clean)
    return {"fault": name, "found": detected, "exit": got["exit"], "events": events[:12], "error": got["error"][:500]}


def _was_found(name: str, got: dict[str, Any], clean: dict[str, Any]) -> bool:
    events, ended = got["events"], got["exit"] == 0
    if name == "nothing":
        return ended and not events
    if name == "an image of nan":
        named = all(event["samples"] == ["sample-7"] for event in events)
        where = all("forward of vision.patch_embed" in (event["module"] or "") for event in events)
        return ended and bool(events) and named and where and got["held_out"] < 1.3 * clean["held_out"] + 0.1
    if name == "a flipped bit":
        blamed_weights = [bad["name"] for event in events for bad in event["parameters"]]
        return ended and blamed_weights == [WEIGHT] and bool(got["held_out"] == clean["held_out"])
    if name == "every image is nan":
        return got["exit"] == 3 and "in a row" in got["error"]
    if name == "absurd labels":
        return ended and bool(got["held_out"] < clean["held_out"] + 1.0)
    circles = sum(event["action"] == "went back" for event in events) > 1
    blamed = any(event["samples"] for event in events)
    advised = any("optim.lr" in event.get("note", "") for event in events) or "optim.lr" in got["error"]
    return got["exit"] in (0, 3) and advised and not circles and not blamed


# ---------------------------------------------------------------------------------------------- all of it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cases", default="*", help="pattern of case names, such as 'dpo/*'")
    parser.add_argument("--limit", type=int, default=0, help="only so many, spread over the grid")
    parser.add_argument("--policy", default="clip", choices=("clip", "skip", "rollback"))
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--faults-only", action="store_true")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    cases = [case for case in healthy(options.steps) if fnmatch.fnmatch(case["case"], options.cases)]
    if options.limit and options.limit < len(cases):
        cases = [cases[number * len(cases) // options.limit] for number in range(options.limit)]
    cases = [] if options.faults_only else cases
    began, done, planted = time.perf_counter(), [], []
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as data, ProcessPoolExecutor(options.jobs, mp_context=spawn) as pool:
        pool.submit(write_data, Path(data)).result()
        waiting = {pool.submit(plant, name, data, options.policy): name for name in FAULTS}
        waiting |= {pool.submit(compare, case, data, options.policy): case["case"] for case in cases}
        for ready in as_completed(waiting):
            try:
                result = ready.result()
            except Exception as error:
                result = {"case": waiting[ready], "broken": f"{type(error).__name__}: {error}"[:300]}
            for line in result if isinstance(result, list) else [result]:
                (planted if "fault" in line else done).append(line)
                print(json.dumps(line), flush=True)
    whole = [line for line in done if "broken" not in line]
    steps = sum(line["steps"] for line in whole)
    dropped = sum(line["dropped"] for line in whole)
    summary = {
        "policy": options.policy,
        "runs": len(done),
        "succeed without the guard": sum(line["succeeds"] for line in whole),
        "lost with it": [line["case"] for line in whole if line["lost"]],
        "broken": len(done) - len(whole),
        "with alarms": sum(line["alarms"] > 0 for line in whole),
        "told as diverged": sum(line["diverged"] for line in whole),
        "steps": steps,
        "clipped": sum(line["clipped"] for line in whole),
        "dropped": dropped,
        "dropped %": round(100 * dropped / max(steps, 1), 4),
        "faults found": f"{sum(line['found'] for line in planted)} of {len(planted)}",
        "minutes": round((time.perf_counter() - began) / 60, 2),
    }
    print(json.dumps({"summary": summary}), flush=True)
    lost = summary["lost with it"] or summary["broken"] or 1000 * dropped > steps
    return int(bool(lost) or any(not line["found"] for line in planted))


if __name__ == "__main__":
    sys.exit(main())
