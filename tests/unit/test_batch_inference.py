"""A batch is answered once, whatever interrupts it: resumed output equals undisturbed output byte by byte."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.batch import output as output_module
from tessera.batch.answer import BatchResult, SampleAnswers, _missing, answer_file
from tessera.batch.output import BatchOutput
from tessera.batch.rows import AnswerOptions, SampleRows
from tessera.core.batch import Batch, Segments
from tessera.core.sample import Sample
from tessera.engine.failures import call_failed
from tessera.engine.request import Delta, Finish, Request, Sampling
from tessera.errors import TesseraError
from tessera.inference.prepare import PromptPool
from tessera.runtime.distributed import World
from tests.errors import raises

ALONE = World(0, 1, 0, torch.device("cpu"))


class Killed(BaseException):
    """What a process does not survive."""


class TextPrompts:
    """Prompts whose tokens are the characters of the question."""

    def prompt(self, samples: Sequence[tuple[Sample, Path]], **_: Any) -> Batch:
        text = "".join(str(part.value) for message in samples[0][0].messages for part in message.parts)
        if "unreadable" in text:
            raise TesseraError("the image is damaged", code="media.damaged-file")
        return Batch({"tokens": torch.tensor([*text.encode()])}, {"text": Segments.of([len(text)])})


@dataclass
class Parrot:
    """An engine whose answers consist of the question and its seed, and that take different numbers of steps."""

    on_step: Callable[[], None] = lambda: None
    questions: list[str] = field(default_factory=list)
    open: dict[int, tuple[Request, int]] = field(default_factory=dict)
    fails_after: int | None = None  # a step fails when so many rows have ended

    @property
    def busy(self) -> bool:
        return bool(self.open)

    def add(self, request: Request) -> int:
        text = bytes(request.prompt["tokens"].tolist()).decode()
        if "too long" in text:
            raise TesseraError("the prompt does not fit", code="generation.prompt-too-long")
        self.questions.append(text)
        self.open[len(self.questions)] = request, 0
        return len(self.questions)

    def step(self) -> list[Delta]:
        self.on_step()
        if self.fails_after is not None and len(self.questions) - len(self.open) >= self.fails_after:
            error = call_failed(torch.OutOfMemoryError("the device is out of memory"))
            finishes = [Delta(number, finish=Finish("error", error=error)) for number in self.open]
            self.open.clear()
            return finishes
        deltas = []
        for number, (request, steps) in list(self.open.items()):
            text = bytes(request.prompt["tokens"].tolist()).decode()
            last = steps == len(text) % 3
            self.open[number] = request, steps + 1
            finish = None
            if last:
                del self.open[number]
                broken = "explode" in text
                error = TesseraError("the logits are NaN", code="generation.output-not-finite") if broken else None
                finish = Finish("error" if broken else "stop", error=error, prompt_tokens=len(text), new_tokens=steps)
            part = f" seed {request.sampling.seed}" if last else text[steps]
            deltas.append(Delta(number, (7,), part, finish=finish))
        return deltas


def rows_of(folder: Path, count: int = 11) -> Path:
    path = folder / "questions.jsonl"
    rows: list[Any] = []
    for number in range(count):
        turns = [{"role": "user", "content": f"question {'?' * number} {number}"}]
        rows.append({"id": f"q{number}", "messages": [*turns, {"role": "assistant", "content": f"answer {number}"}]})
    rows[2]["messages"] = rows[2]["messages"][:1]
    rows[4]["messages"] = rows[4]["messages"][1:]
    rows[5]["messages"][0]["content"] = "unreadable"
    rows[6]["messages"][0]["content"] = "too long"
    rows[7]["messages"][0]["content"] = "explode"
    rows[9] = {"id": "q9", "messages": "nonsense"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer(
    data: Path,
    out: Path,
    *,
    engine: Parrot | None = None,
    options: AnswerOptions | None = None,
    overwrite: bool = False,
    world: World = ALONE,
) -> BatchResult:
    rows = SampleRows.open(data, None, options or AnswerOptions())

    @contextlib.contextmanager
    def start() -> Iterator[SampleAnswers]:
        with PromptPool(TextPrompts(), 0) as prompts:  # type: ignore[arg-type]
            yield SampleAnswers(rows, engine or Parrot(), prompts, frozenset())

    return answer_file(len(rows), out, rows.facts(), start, overwrite=overwrite, world=world)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_have_the_order_of_the_rows_and_bad_rows_have_their_reason(tmp_path: Path) -> None:
    result = answer(rows_of(tmp_path), tmp_path / "a.jsonl")
    rows = read(tmp_path / "a.jsonl")
    assert [row["index"] for row in rows] == list(range(11))
    assert [row["id"] for row in rows if row["index"] != 9] == [f"q{n}" for n in range(11) if n != 9]
    assert rows[0]["answer"].startswith("q"[: len("question  0") % 3])
    assert (rows[0]["finish"], rows[0]["prompt_tokens"], rows[0]["expected"]) == ("stop", 11, "answer 0")
    assert "expected" not in rows[2]
    errors = {row["index"]: row["error"]["code"] for row in rows if "error" in row}
    assert errors == {
        4: "data.no-question",
        5: "media.damaged-file",
        6: "generation.prompt-too-long",
        7: "generation.output-not-finite",
        9: "data.no-turns",
    }
    assert all(rows[index]["answer"] is None for index in errors)
    assert (result.rows, result.errors, result.answered) == (11, 5, 11)


@pytest.mark.parametrize(
    "row",
    [
        {"question": "what?"},
        {"query": "what?"},
        {"instruction": "what?", "output": ""},
        {"messages": [{"role": "user", "content": "what?"}]},
        {"conversations": [{"from": "human", "value": "what?"}]},
    ],
    ids=lambda row: next(iter(row)),
)
def test_every_form_of_a_question_may_come_without_an_answer(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps(row) + "\n")
    engine = Parrot()
    answer(tmp_path / "q.jsonl", tmp_path / "a.jsonl", engine=engine)
    assert engine.questions == ["what?"]
    assert "expected" not in read(tmp_path / "a.jsonl")[0]


def test_the_system_prompt_precedes_each_question_once(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "b"}]
    rows = [{"messages": turns}, {"messages": [{"role": "system", "content": "a"}, *turns]}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = Parrot()
    answer(tmp_path / "q.jsonl", tmp_path / "a.jsonl", engine=engine, options=AnswerOptions(system="s"))
    assert engine.questions == ["sb", "ab"]


def test_a_call_of_the_engine_that_fails_ends_the_batch_and_the_next_start_continues(tmp_path: Path) -> None:
    """Rows that were running have no answer, not an error."""
    data = rows_of(tmp_path)
    answer(data, tmp_path / "undisturbed.jsonl")
    first = Parrot(fails_after=2)
    with raises("generation.engine-failed"):
        answer(data, tmp_path / "a.jsonl", engine=first)
    assert not (tmp_path / "a.jsonl").exists()
    second = Parrot()
    result = answer(data, tmp_path / "a.jsonl", engine=second)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    assert 0 < len(second.questions) < 7, "some rows had ended"
    assert result.errors == 5


def test_each_row_has_a_seed_of_its_own_that_depends_on_the_seed_of_the_batch(tmp_path: Path) -> None:
    data = rows_of(tmp_path)
    seeds = []
    for number, seed in enumerate((0, 0, 1)):
        answer(data, tmp_path / f"{number}.jsonl", options=AnswerOptions(sampling=Sampling(1.0, seed=seed)))
        seeds.append([row["answer"].split()[-1] for row in read(tmp_path / f"{number}.jsonl") if row["answer"]])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0], *seeds[2]}) == 12


# ---------------------------------------------------------------------------------------------- interruptions


class Countdown:
    """End the process at the n-th write, rename or removal of a file, or step of the engine."""

    def __init__(self, events: int, patch: pytest.MonkeyPatch) -> None:
        self.remaining = events
        for owner, name in ((os, "replace"), (Path, "unlink"), (Path, "write_bytes"), (os, "fsync")):
            patch.setattr(owner, name, self.counted(getattr(owner, name)))
        self.write = output_module.PartFile.write
        patch.setattr(output_module.PartFile, "write", lambda *arguments, **options: self.torn(*arguments, **options))

    def event(self) -> None:
        self.remaining -= 1
        if self.remaining == 0:
            raise Killed

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.event()
            return function(*arguments, **options)

        return call

    def torn(self, part: Any, index: int, row: Any, **options: Any) -> None:
        try:
            self.event()
        except Killed:
            self.write(part, index, row, **options)
            size = part._file.tell()
            part._file.truncate(size - random.Random(index).randrange(1, 40))
            raise
        self.write(part, index, row, **options)


def test_a_batch_that_is_killed_anywhere_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows_of(tmp_path)
    answer(data, tmp_path / "undisturbed.jsonl")
    expected = (tmp_path / "undisturbed.jsonl").read_bytes()
    events = 0
    finished = False
    while not finished:
        events += 1
        out = tmp_path / f"{events}.jsonl"
        engines = []
        for attempt in range(2):
            with monkeypatch.context() as patch:
                countdown = Countdown(events if attempt == 0 else 10**6, patch)
                engines.append(Parrot(countdown.event))
                with contextlib.suppress(Killed):
                    answer(data, out, engine=engines[-1])
                    finished |= attempt == 0
        assert out.read_bytes() == expected, f"killed at event {events}"
        assert [path.name for path in out.with_name(f"{out.name}.parts").iterdir() if "rank" in path.name] == []
    assert events > 20, "the batch writes, renames and removes files"


def killed(data: Path, out: Path, lines: int, engine: Parrot | None = None) -> Path:
    """Answer rows until so many lines are written, and return the part file."""
    part = out.with_name(f"{out.name}.parts") / "rank-00000.jsonl"
    engine = engine or Parrot()

    def kill() -> None:
        if part.read_bytes().count(b"\n") >= lines:
            raise Killed

    engine.on_step = kill
    with pytest.raises(Killed):
        answer(data, out, engine=engine)
    return part


def test_finished_rows_are_not_asked_again(tmp_path: Path) -> None:
    data, engines = rows_of(tmp_path), [Parrot(), Parrot(), Parrot()]
    part = killed(data, tmp_path / "a.jsonl", 5, engines[0])
    finished = {line.split(b" ")[1].decode() for line in part.read_bytes().splitlines()}
    assert not (tmp_path / "a.jsonl").exists()
    result = answer(data, tmp_path / "a.jsonl", engine=engines[1])
    assert result.answered == 11 - len(finished) < 11
    assert not finished & {text.split()[-1] for text in engines[1].questions}
    assert answer(data, tmp_path / "a.jsonl", engine=engines[2]).answered == 0
    assert engines[2].questions == []


@pytest.mark.parametrize("damage", ["flip", "cut", "garbage", "twice", "foreign index"])
def test_rows_whose_lines_are_damaged_are_asked_again(tmp_path: Path, damage: str) -> None:
    data = rows_of(tmp_path)
    answer(data, tmp_path / "whole.jsonl")
    part = killed(data, tmp_path / "a.jsonl", 6)
    lines = part.read_bytes().splitlines(keepends=True)
    if damage == "flip":
        lines[1] = lines[1].replace(b'"index"', b'"indax"')
    elif damage == "cut":
        lines[1] = lines[1][:20]
    elif damage == "garbage":
        lines[1:1] = [b"\xff\0 nonsense\n", b"\n", b"x" * 5000 + b"\n"]
    elif damage == "twice":
        lines += lines
    else:
        with output_module.PartFile(part) as file:
            file.write(10**9, {})
        lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines))
    answer(data, tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


# ---------------------------------------------------------------------------------------------- refusals


def test_other_options_and_other_rows_are_refused_by_name(tmp_path: Path) -> None:
    data, out = rows_of(tmp_path), tmp_path / "a.jsonl"
    answer(data, out)
    before = out.read_bytes()
    with raises("output.other-settings", "max_new_tokens"):
        answer(data, out, options=AnswerOptions(max_new_tokens=3))
    with raises("output.other-settings", "temperature"):
        answer(data, out, options=AnswerOptions(sampling=Sampling(0.5)))
    with raises("generation.option-without-effect", "min_p"):
        AnswerOptions(sampling=Sampling(min_p=0.1))
    data.write_text(data.read_text() + data.read_text())
    with raises("output.other-settings", "data"):
        answer(data, out)
    assert out.read_bytes() == before
    assert answer(data, out, overwrite=True).rows == 22
    assert len(read(out)) == 22


def test_a_file_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with raises("output.exists"):
        answer(rows_of(tmp_path), tmp_path / "a.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == "mine"
    assert not (tmp_path / "a.jsonl.parts").exists()


def test_a_finished_file_that_was_changed_is_refused_and_one_that_was_removed_is_written_again(tmp_path: Path) -> None:
    data, out = rows_of(tmp_path), tmp_path / "a.jsonl"
    answer(data, out)
    before = out.read_bytes()
    out.write_bytes(before[:-5])
    with raises("output.changed"):
        answer(data, out)
    out.unlink()
    assert answer(data, out).answered == 11
    assert out.read_bytes() == before
    (tmp_path / "a.jsonl.parts" / "settings.json").write_text("{}")
    with raises("environment.wrong-value-in-file"):
        answer(data, out)


def test_two_batches_may_not_write_one_file(tmp_path: Path) -> None:
    data, out = rows_of(tmp_path), tmp_path / "a.jsonl"
    with BatchOutput.claimed(out, 11, {}), raises("output.in-use"):
        answer(data, out)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_of_the_file_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    with output_module.PartFile(path) as part, open("/dev/full", "wb", buffering=0) as full:
        part._file = full
        with pytest.raises(OSError) as error:  # the number is compared
            part.write(0, {"index": 0})
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(path))


def test_an_empty_input_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("\n")
    with raises("data.no-records"):
        answer(tmp_path / "q.jsonl", tmp_path / "a.jsonl")
    with raises("generation.max-tokens-too-small"):
        AnswerOptions(max_new_tokens=0)


# ---------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("rows", [1, 7, 100, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_missing_row_belongs_to_exactly_one_rank(rows: int, ranks: int) -> None:
    answered = torch.rand(rows, generator=torch.Generator().manual_seed(rows)).numpy() < 0.5
    shares = []
    for rank in range(ranks):
        blocks = [*_missing(answered, World(rank, ranks, rank, torch.device("cpu")))]
        shares.append([index for block in blocks for index in block if not answered[index]])
    assert sorted(index for share in shares for index in share) == [n for n in range(rows) if not answered[n]]
    if rows >= 100:
        assert max(map(len, shares)) < 2 * min(map(len, shares))


def answer_on_rank(rank: int, size: int, data: Path, out: Path, kill: bool) -> int:
    steps = [0]

    def count() -> None:
        steps[0] += 1
        if kill and steps[0] == 2:
            raise Killed

    try:
        world = World(rank, size, rank, torch.device("cpu"))
        return answer(data, out, engine=Parrot(count), world=world).answered
    except Killed:
        return -1


@pytest.mark.slow
def test_two_ranks_write_what_one_rank_writes_also_after_a_kill_with_another_number_of_ranks(tmp_path: Path) -> None:
    from tests.dist.spawn import run_ranks

    data = rows_of(tmp_path, 40)
    answer(data, tmp_path / "one.jsonl")
    expected = (tmp_path / "one.jsonl").read_bytes()
    counts = run_ranks(answer_on_rank, 2, data, tmp_path / "two.jsonl", False)
    assert sum(counts) == 40
    assert min(counts) > 10
    assert (tmp_path / "two.jsonl").read_bytes() == expected
    assert run_ranks(answer_on_rank, 2, data, tmp_path / "three.jsonl", True) == [-1, -1]
    result = answer(data, tmp_path / "three.jsonl")
    assert 0 < result.answered < 40
    assert (tmp_path / "three.jsonl").read_bytes() == expected


def answer_loading_together(rank: int, size: int, data: Path, out: Path) -> int:
    """Answer on ranks that load the model together, as ranks read weights."""
    rows = SampleRows.open(data, None, AnswerOptions())

    @contextlib.contextmanager
    def start() -> Iterator[SampleAnswers]:
        torch.distributed.barrier()
        with PromptPool(TextPrompts(), 0) as prompts:  # type: ignore[arg-type]
            yield SampleAnswers(rows, Parrot(), prompts, frozenset())

    world = World(rank, size, rank, torch.device("cpu"))
    return answer_file(len(rows), out, rows.facts(), start, world=world).answered


@pytest.mark.slow
def test_a_rank_whose_rows_are_answered_loads_the_model_with_the_others(tmp_path: Path) -> None:
    from tests.dist.spawn import run_ranks

    data, out = rows_of(tmp_path, 40), tmp_path / "two.jsonl"
    answer(data, tmp_path / "one.jsonl")
    lines = (tmp_path / "one.jsonl").read_text().splitlines()
    rows = SampleRows.open(data, None, AnswerOptions())
    with BatchOutput.claimed(out, 40, rows.facts()) as output, output.part(1) as part:
        for block in _missing(output.answered(), World(1, 2, 1, torch.device("cpu"))):
            for index in block:
                part.write(index, json.loads(lines[index]))
    assert run_ranks(answer_loading_together, 2, data, out) == [20, 0]
    assert out.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


# ---------------------------------------------------------------------------------------------- requests as in batches


def request(name: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    body = {"messages": [{"role": "user", "content": "what is this"}], "max_tokens": 9, **body}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}) + "\n"


def answer_bodies(data: Path, out: Path, engine: Any = None) -> tuple[BatchResult, Any]:
    pytest.importorskip("prometheus_client", reason="the service of the server needs it")
    from tessera.batch.bodies import BodyRows
    from tessera.batch.service import ServiceAnswers
    from tests.toys.chat_service import make_processor, make_service

    rows = BodyRows.open(data, None, 0)
    service = make_service(make_processor(data.parent / "words"), engine, allow_files=data.parent)

    @contextlib.contextmanager
    def start() -> Iterator[ServiceAnswers]:
        yield ServiceAnswers(rows, service, 1_700_000_000)
        service.close()

    return answer_file(len(rows), out, rows.facts(), start, world=ALONE), service.engine


def test_requests_of_the_batch_api_get_responses_of_the_batch_api(tmp_path: Path) -> None:
    from tessera.batch.bodies import is_request_file

    data, out = tmp_path / "batch.jsonl", tmp_path / "a.jsonl"
    data.write_text(
        request("a", model="any")
        + request("b", temperature=-1)
        + request("c", n=2, seed=5)
        + request("d", url="/v1/embeddings")
        + "nonsense\n"
        + request("e", stream=True)
        + request(
            "f", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc/hosts"}]}]
        )
    )
    assert is_request_file(data)
    assert not is_request_file(rows_of(tmp_path))
    result, engine = answer_bodies(data, out)
    rows = read(out)
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "d", None, "e", "f"]
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 200, 400, 400, 400, 400]
    assert all((row["error"] is None) == (row["response"]["status_code"] == 200) for row in rows)
    assert all(row["response"]["body"]["error"]["message"] for row in rows if row["error"])
    body = rows[0]["response"]["body"]
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "any", 1_700_000_000)
    assert body["choices"][0]["message"]["content"].startswith("one two")
    assert len(rows[2]["response"]["body"]["choices"]) == 2
    assert (result.rows, result.errors, result.answered) == (7, 5, 7)
    seeds = {request.sampling.seed for request in engine.requests}
    assert len(seeds) == 3
    before = out.read_bytes()
    out.unlink()
    answer_bodies(data, out)
    assert out.read_bytes() == before, "ids, times and seeds do not depend on the run"


def test_a_failed_engine_ends_a_batch_of_requests_with_its_error(tmp_path: Path) -> None:
    from tests.toys.fake_engine import FakeEngine

    data = tmp_path / "batch.jsonl"
    data.write_text(request("a") + request("b"))

    def encode(text: str) -> list[int]:
        return [5, 6, 7, 8]

    failing = FakeEngine(encode, lambda tokens: "x", fails=call_failed(RuntimeError("the device is out of memory")))
    with raises("generation.engine-failed"):
        answer_bodies(data, tmp_path / "a.jsonl", failing)
    result, _ = answer_bodies(data, tmp_path / "a.jsonl")
    assert (result.answered, result.errors) == (2, 0)
