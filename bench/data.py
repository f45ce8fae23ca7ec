"""The whole road of data on the host, against `transformers`' processor in a torch DataLoader: same files, same bounds.

    python bench/data.py            # two worker processes each; some minutes
    python bench/data.py --quick    # a few tiny pictures: shows that it runs, measures nothing

Prints one JSON line per case. Pictures are scikit-learn's two photographs, cut and scaled. Ours is index -> order ->
packed rows -> loader; theirs is chat template -> processor -> padded batch, without labels. `--no-reference` leaves
theirs out. Without torchvision their processor cannot be made, and its two halves (the Pillow image processor and the
tokenizer) are called the way it calls them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from tessera.config.run_config import DataSection, ModelSection, SourceSection
from tessera.core.row_source import RowSource
from tessera.core.sample import Part
from tessera.core.spec import Processor
from tessera.data.index.build import IndexMaker
from tessera.data.kinds import KINDS, RowRequest
from tessera.data.loader.loader import Loader
from tessera.data.media.files import Limits
from tessera.data.media.read import probe
from tessera.models import resolve
from tessera.models.processing.tokenizer import train_tokenizer

SPECIAL = ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad", "vision_pad")
VOCABULARY = 2048
PIXELS = {"min_pixels": 56 * 56, "max_pixels": 1280 * 28 * 28}
QUESTION = "What can be seen in this picture, and where was it taken? Answer in one or two sentences."
ANSWER = "A tall old building with a curved roof stands behind trees, and people walk on the square before it. "
LENGTH = 8192
WORKERS = 2


@dataclass(frozen=True)
class Scale:
    sizes: tuple[tuple[int, int], ...]
    files: int  # of each size
    rows: int  # of each set
    rounds: int
    seconds: float  # each measurement goes on for
    headers: int
    index_rows: int


FULL = Scale(
    ((640, 480), (1280, 960), (4000, 3000)), files=12, rows=600, rounds=3, seconds=6.0, headers=4000, index_rows=20_000
)
QUICK = Scale(((64, 48), (128, 96)), files=2, rows=24, rounds=1, seconds=0.2, headers=40, index_rows=60)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-reference", action="store_true")
    options = parser.parse_args(arguments)
    scale = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        processor = _processor(folder / "processor")
        sets = {size: _write_set(folder / f"{size[0]}x{size[1]}", size, scale) for size in scale.sizes}
        for size, data in sets.items():
            _print(compare(data, size, processor, folder, scale, reference=not options.no_reference))
        _print(headers(folder / "headers", scale))
        for case in index_speed(next(iter(sets.values())), processor, folder, scale):
            _print(case)
        _print(seek(next(iter(sets.values())), processor, folder))
        _print(written(next(iter(sets.values())), processor, folder, scale))


def _print(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


# ---------------------------------------------------------------------------------------------- what is measured on


def _processor(folder: Path) -> Processor:
    """Qwen2-VL's, with a tokenizer made here; written to `folder` in the form that transformers reads."""
    tokenizer = train_tokenizer([QUESTION, ANSWER] * 8, VOCABULARY, [f"<|{word}|>" for word in SPECIAL])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {word: VOCABULARY - len(SPECIAL) + at for at, word in enumerate(SPECIAL)}
    changes = {
        "image_token_id": ids["image_pad"],
        "video_token_id": ids["video_pad"],
        "vision_start_token_id": ids["vision_start"],
        "vision_end_token_id": ids["vision_end"],
        "text": {"vocab_size": VOCABULARY},
    }
    spec, config = resolve(ModelSection(family="qwen2_vl", preset="2b", config=changes))
    assert spec.processor is not None
    processor = spec.processor(config, folder, **PIXELS)
    processor.save(folder)
    return processor


def _photographs() -> list[Image.Image]:
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(pixels) for pixels in load_sample_images().images]


def _write_pictures(folder: Path, size: tuple[int, int], count: int, kinds: tuple[str, ...] = ("jpg",)) -> list[Path]:
    """Different cuts of the photographs, so that no two files are alike."""
    folder.mkdir(parents=True)
    photographs, chance = _photographs(), np.random.default_rng(0)
    files = []
    for number, kind in zip(range(count), itertools.cycle(kinds), strict=False):
        picture = photographs[number % len(photographs)]
        x, y = int(chance.integers(0, 60)), int(chance.integers(0, 40))
        cut = picture.crop((x, y, x + 560, y + 380)).resize(size, Image.Resampling.BICUBIC)
        files.append(folder / f"{number}.{kind}")
        cut.save(files[-1], **({"quality": 90} if kind == "jpg" else {"compress_level": 1}))
    return files


def _write_set(folder: Path, size: tuple[int, int], scale: Scale) -> Path:
    files = _write_pictures(folder, size, scale.files)
    lines = [json.dumps(_row(number, files[number % len(files)].name)) for number in range(scale.rows)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "train.jsonl"


def _row(number: int, picture: str) -> dict[str, Any]:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
    answer = ANSWER * (1 + number % 3)
    talk = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"id": f"s{number}", "messages": talk}


# ---------------------------------------------------------------------------------------------- samples a second


def compare(
    data: Path, size: tuple[int, int], processor: Processor, folder: Path, scale: Scale, *, reference: bool
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "case": "samples/s",
        "picture": f"{size[0]}x{size[1]} jpeg",
        **PIXELS,
        "workers": WORKERS,
        "cores": len(os.sched_getaffinity(0)),
    }
    measured: dict[str, Callable[[], float]] = {
        "ours": lambda: _ours(data, processor, folder / "index", False, scale.seconds),
        "ours_with_draft": lambda: _ours(data, processor, folder / "index", True, scale.seconds),
    }
    if reference:
        facts["backend"], call = _their_processor(folder / "processor")
        samples = _samples_in_a_row(data, processor, folder)
        measured["transformers"] = lambda: _theirs(data, call, samples, scale.seconds)
    rates: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(scale.rounds):  # by turns: what else the machine does meets all of them
        for name, measure in measured.items():
            rates[name].append(measure())
    facts |= {name: round(statistics.median(values), 2) for name, values in rates.items()}
    if reference:
        facts["ratio"] = round(facts["ours"] / facts["transformers"], 2)
        facts["ratio_with_draft"] = round(facts["ours_with_draft"] / facts["transformers"], 2)
    return facts


def _rows(data: Path, processor: Processor, cache: Path, draft: bool = False, length: int = LENGTH) -> RowSource:
    section = DataSection(train=[SourceSection(path=data)], length=length, jpeg_draft=draft)
    return KINDS.get("chat")(RowRequest(section, "train", processor, 0, cache))


def _ours(data: Path, processor: Processor, cache: Path, draft: bool, seconds: float) -> float:
    rows = _rows(data, processor, cache, draft)
    with Loader(rows, global_batch=1, workers=WORKERS) as loader:
        return _rate((len(batch.sample_ids) for step in loader for batch in step), seconds)


def _samples_in_a_row(data: Path, processor: Processor, folder: Path) -> int:
    """Their batches hold as many samples as our rows, rounded down: less padding for them."""
    rows = _rows(data, processor, folder / "index")
    return max(1, len(data.read_text().splitlines()) // len(rows))


def _rate(counts: Iterator[int], seconds: float) -> float:
    """Samples a second of a loader that runs already: what it had ready when it began does not count."""
    for _ in range(2 * WORKERS + 1):
        next(counts)
    began, samples, now = time.perf_counter(), 0, 0.0
    while now < seconds:
        samples += next(counts)
        now = time.perf_counter() - began
    return samples / now


class _Talks(Dataset[Any]):
    def __init__(self, data: Path) -> None:
        self.folder = data.parent
        self.rows = [json.loads(line) for line in data.read_text().splitlines()]

    def __len__(self) -> int:
        return 1 << 30  # again and again: a pass is shorter than a measurement

    def __getitem__(self, number: int) -> tuple[list[dict[str, Any]], Image.Image]:
        talk = self.rows[number % len(self.rows)]["messages"]
        return talk, Image.open(self.folder / talk[0]["content"][0]["image"]).convert("RGB")


Call = Callable[[list[list[dict[str, Any]]], list[Image.Image]], Any]


def _theirs(data: Path, call: Call, samples: int, seconds: float) -> float:
    def collate(items: list[tuple[list[dict[str, Any]], Image.Image]]) -> tuple[int, dict[str, torch.Tensor]]:
        return len(items), dict(call([talk for talk, _ in items], [picture for _, picture in items]))

    loader = DataLoader(
        _Talks(data),
        batch_size=samples,
        num_workers=WORKERS,
        collate_fn=collate,
        worker_init_fn=_one_thread,
        multiprocessing_context="fork",
    )
    return _rate((count for count, _ in loader), seconds)


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)


def _their_processor(folder: Path) -> tuple[str, Call]:
    import transformers
    from transformers import AutoTokenizer
    from transformers.utils import is_torchvision_available

    version = f"transformers {transformers.__version__}"
    if is_torchvision_available():
        whole = transformers.AutoProcessor.from_pretrained(folder)

        def both(talks: list[list[dict[str, Any]]], pictures: list[Image.Image]) -> Any:
            texts = [whole.apply_chat_template(talk, tokenize=False) for talk in talks]
            return whole(text=texts, images=pictures, padding=True, return_tensors="pt")

        return f"{version}, {type(whole.image_processor).__name__} (torchvision)", both
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(folder)
    image_processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def halves(talks: list[list[dict[str, Any]]], pictures: list[Image.Image]) -> Any:
        inputs = image_processor(images=pictures, return_tensors="pt")
        texts = []
        for talk, grid in zip(talks, inputs["image_grid_thw"], strict=True):
            text = tokenizer.apply_chat_template(talk, tokenize=False)
            texts.append(text.replace("<|image_pad|>", "<|image_pad|>" * (int(grid.prod()) // 4), 1))
        return {**inputs, **tokenizer(texts, padding=True, return_tensors="pt")}

    return f"{version}, {type(image_processor).__name__} (Pillow: no torchvision)", halves


# ---------------------------------------------------------------------------------------------- headers, index


def headers(folder: Path, scale: Scale) -> dict[str, Any]:
    """Sizes of pictures from headers, on one core, files in the page cache: JPEG of two sizes and PNG."""
    from tessera.data.media.video_frames import VideoSampling

    count = min(200, scale.headers)
    names = []
    for size, kinds in (((640, 480), ("jpg",)), ((1280, 960), ("jpg", "jpg", "jpg", "png"))):
        below = f"{size[0]}"
        names += [f"{below}/{file.name}" for file in _write_pictures(folder / below, size, count // 2, kinds)]
    limits, sampling = Limits(), VideoSampling()
    parts = [Part("image", name) for name in names]
    best = 0.0
    for _ in range(4):
        began = time.perf_counter()
        for number in range(scale.headers):
            probe(parts[number % len(parts)], folder, limits, sampling)
        best = max(best, scale.headers / (time.perf_counter() - began))
    return {"case": "headers/s/core", "value": round(best), "files": len(names), "of": "3 jpeg : 1 png, best of 4"}


def index_speed(data: Path, processor: Any, folder: Path, scale: Scale) -> Iterator[dict[str, Any]]:
    files = sorted(file.name for file in data.parent.glob("*.jpg"))
    many = data.parent / "many.jsonl"
    lines = (json.dumps(_row(number, files[number % len(files)])) for number in range(scale.index_rows))
    many.write_text("\n".join(lines) + "\n")
    for workers in (1, 2):
        began = time.perf_counter()
        maker = IndexMaker(processor, LENGTH, Limits(), "fail", folder / f"many-{workers}", workers=workers)
        index = maker.index([SourceSection(path=many)])
        seconds = time.perf_counter() - began
        facts = {"case": "index rows/s", "workers": workers, "value": round(len(index) / seconds), "rows": len(index)}
        yield {**facts, "of": "one picture, two turns; starting the processes included"}


# ---------------------------------------------------------------------------------------------- seeking, writing


def seek(data: Path, processor: Processor, folder: Path, step: int = 10**9, global_batch: int = 64) -> dict[str, Any]:
    """Which samples the first row of a far step holds, of rows that were never asked before; then all its rows."""
    rows: Any = _rows(data, processor, folder / "index")
    first = step * global_batch
    began = time.perf_counter()
    rows.order.samples(first)
    first_row = time.perf_counter()
    held = sum(len(rows.order.samples(row)) for row in range(first, first + global_batch))
    whole = time.perf_counter()
    return {
        "case": "seek ms",
        "step": step,
        "value": round((first_row - began) * 1e3, 3),
        "whole_step": round((whole - first_row) * 1e3, 3),
        "rows": global_batch,
        "samples": held,
    }


def written(data: Path, processor: Processor, folder: Path, scale: Scale) -> dict[str, Any]:
    """What indexing and loading leave on the disk: in the cache folder, beside the data, and as temporary files."""
    watched = {"cache": folder / "watched", "data": data.parent, "temporary": folder / "temporary"}
    watched["temporary"].mkdir()
    before = {name: _bytes_below(place) for name, place in watched.items()}
    default_folder, tempfile.tempdir = tempfile.tempdir, str(watched["temporary"])
    largest = 0
    try:
        rows = _rows(data, processor, watched["cache"])
        indexed = {name: _bytes_below(place) - before[name] for name, place in watched.items()}
        pixels = steps = 0
        with Loader(rows, global_batch=1, workers=WORKERS) as loader:
            for step in itertools.islice(loader, 4 if scale is QUICK else 16):
                pixels += sum(batch["pixels"].nbytes for batch in step)
                steps += 1
                largest = max(largest, sum(_bytes_below(place) for place in watched.values()))
    finally:
        tempfile.tempdir = default_folder
    grown = largest - sum(before.values()) - sum(indexed.values())
    return {
        "case": "bytes written",
        "by_indexing": indexed,
        "by_loading": grown,
        "pixel_bytes_loaded": pixels,
        "samples": len(data.read_text().splitlines()),
    }


def _bytes_below(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main(sys.argv[1:])
