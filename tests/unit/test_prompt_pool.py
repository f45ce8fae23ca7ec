"""Prompts are prepared beside the process that asks: each future has its own prompt or its own error."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image

from tessera.core.batch import Batch, Segments
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.data.media.files import Limits
from tessera.data.media.video_frames import VideoSampling
from tessera.errors import TesseraError
from tessera.inference import prepare
from tessera.inference.loaded import LoadedProcessor
from tessera.inference.prepare import PromptPool
from tessera.models.qwen2_vl import SPEC
from tests.errors import raises

WAIT_S = 300  # never reached: a loaded machine takes a minute to start the processes
SAMPLING = VideoSampling()


@dataclass(frozen=True)
class Probe:
    """A processor whose prompt says in which process it was prepared; words in the text make it fail."""

    mark: str = "fine"
    go_on: ClassVar[threading.Event] = threading.Event()  # of texts that wait

    fingerprint = "probe"
    sampling = SAMPLING
    stop_tokens = (0,)

    def target(self, kind: str, size: MediaSize) -> None:
        return None

    def prompt(self, samples: Sequence[Sample], media: Sequence[Sequence[Any]], sizes: Any = None) -> Batch:
        text = "".join(str(part.value) for m in samples[0].messages for part in m.parts if part.kind == "text")
        if "die" in text:
            os._exit(9)
        if "hang" in text:
            time.sleep(60)
        if "nap" in text:
            time.sleep(0.3)
        if "wait" in text:
            Probe.go_on.wait(WAIT_S)
        widths = [image.width for image in media[0]]
        return Batch({"tokens": torch.tensor([os.getpid(), len(text), *widths])}, {"text": Segments.of([2])})

    def encode(self, *_: Any, **__: Any) -> Any: ...
    def collate(self, *_: Any, **__: Any) -> Any: ...
    def measure(self, *_: Any, **__: Any) -> Any: ...
    def decode(self, tokens: Sequence[int]) -> str: ...  # type: ignore[empty-body]
    def training_on(self, *_: Any, **__: Any) -> Any: ...
    def save(self, *_: Any, **__: Any) -> Any: ...
    def spell(self, tokens: Sequence[int]) -> str: ...  # type: ignore[empty-body]


def processor_of(probe: Probe) -> LoadedProcessor:
    return LoadedProcessor(probe, SPEC, Limits())  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pool() -> Iterator[PromptPool]:
    with PromptPool(processor_of(Probe()), 2) as pool:
        pool.start()
        yield pool


def jpeg(width: int = 40) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, 30), "red").save(file, "JPEG")
    return file.getvalue()


def talk(text: str, *images: Any) -> list[dict[str, Any]]:
    content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


def process(future: Future[Batch]) -> int:
    return int(future.result(WAIT_S)["tokens"][0])


def test_images_are_decoded_in_other_processes_and_texts_in_this_one(pool: PromptPool) -> None:
    assert process(pool.submit(talk("look", jpeg()))) != os.getpid()
    assert process(pool.submit(talk("look"))) == os.getpid()
    sample = Sample("a", (Message("user", (Part("image", jpeg(50)), Part("text", "look"))),))
    batch = pool.submit(sample).result(WAIT_S)
    assert batch["tokens"].tolist()[1:] == [4, 50]
    assert int(batch["tokens"][0]) != os.getpid()
    assert batch.segments["text"].lengths == (2,)


@pytest.mark.parametrize(
    ("image", "code"),
    [
        (jpeg()[:-200], "media.unreadable-file"),
        (b"nothing", "media.unknown-format"),
        ("no-such.jpg", "media.no-such-file"),
        (17, "generation.bad-messages"),
    ],
)
def test_a_bad_image_is_the_error_of_its_own_prompt(pool: PromptPool, image: Any, code: str) -> None:
    bad, good = pool.submit(talk("look", image)), pool.submit(talk("look", jpeg()))
    with raises(code):
        bad.result(WAIT_S)
    assert process(good) != os.getpid()


def test_limits_of_a_prompt_replace_those_of_the_processor(pool: PromptPool) -> None:
    with raises("media.too-many-pixels"):
        pool.submit(talk("look", jpeg()), limits=Limits(max_image_pixels=1000)).result(WAIT_S)
    assert process(pool.submit(talk("look", jpeg())))


def test_an_image_bomb_is_refused_by_its_header(pool: PromptPool) -> None:
    data = bytearray(jpeg())
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = (60000).to_bytes(2, "big") * 2
    with raises("media.too-many-pixels"):
        pool.submit(talk("look", bytes(data))).result(WAIT_S)


def test_paths_may_not_leave_the_root(pool: PromptPool, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(jpeg())
    (tmp_path / "b.jpg").write_bytes(jpeg())
    assert process(pool.submit(talk("look", "a.jpg"), tmp_path / "in"))
    for name in ("../b.jpg", str(tmp_path / "b.jpg")):
        with pytest.raises(TesseraError):
            pool.submit(talk("look", name), tmp_path / "in").result(WAIT_S)


def test_a_prompt_that_kills_its_worker_costs_only_itself(pool: PromptPool) -> None:
    futures = [pool.submit(talk("die" if n == 3 else "look", jpeg())) for n in range(8)]
    with raises("media.ends-worker"):
        futures[3].result(WAIT_S)
    assert all(process(future) for n, future in enumerate(futures) if n != 3)


@pytest.mark.slow
def test_a_server_of_processes_that_is_killed_now_and_then_costs_no_prompt(pool: PromptPool) -> None:
    for _ in range(4):
        worker = process(pool.submit(talk("look", jpeg())))
        server = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
        waiting = pool.submit(talk("nap", jpeg()))
        os.kill(server, signal.SIGKILL)
        assert process(waiting) != worker


def test_a_prompt_that_takes_too_long_is_given_up() -> None:
    with PromptPool(processor_of(Probe()), 1, timeout_s=0.3) as pool, raises("data.sample-too-slow"):
        pool.submit(talk("hang", jpeg())).result(WAIT_S)


def test_without_workers_everything_is_prepared_here() -> None:
    with PromptPool(processor_of(Probe()), 0) as pool:
        assert process(pool.submit(talk("look", jpeg()))) == os.getpid()


def test_a_short_text_does_not_wait_for_long_ones() -> None:
    """Also as a sample of a data set, and with messages whose content is a plain text."""
    pool = PromptPool(processor_of(Probe()), 0)
    words = "wait" + "x" * prepare.LONG_TEXT
    sample = Sample("a", (Message("user", (Part("text", words),)),))
    held = [pool.submit(long) for long in (talk(words), [{"role": "user", "content": words}], sample)]
    assert process(pool.submit(talk("short"))) == os.getpid()
    assert not any(future.done() for future in held)
    Probe.go_on.set()
    assert [process(future) for future in held] == [os.getpid()] * 3
    pool.close()


def test_a_processor_that_cannot_be_sent_works_here(caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe()
    object.__setattr__(probe, "mark", threading.Lock())
    with PromptPool(processor_of(probe), 1) as pool:
        assert [process(pool.submit(talk("look", jpeg()))) for _ in range(2)] == [os.getpid()] * 2
    assert len(caplog.records) == 1


def test_after_processes_that_were_killed_at_their_start_the_next_prompt_starts_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        raise TesseraError("died at its start", fix="try again", code="environment.workers-killed")

    with PromptPool(processor_of(Probe()), 1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(prepare, "Pool", killed)
            with raises("environment.workers-killed"):
                pool.submit(talk("look", jpeg())).result(WAIT_S)
        assert process(pool.submit(talk("look", jpeg()))) != os.getpid()


def test_many_threads_may_submit_at_once(pool: PromptPool) -> None:
    widths: dict[int, int] = {}

    def ask(first: int) -> None:
        for width in range(first, first + 8):
            widths[width] = int(pool.submit(talk("look", jpeg(width))).result(WAIT_S)["tokens"][2])

    threads = [threading.Thread(target=ask, args=(10 + 8 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert widths == {width: width for width in range(10, 42)}


def test_a_cancelled_prompt_is_not_prepared_and_close_ends_what_hangs() -> None:
    pool = PromptPool(processor_of(Probe()), 1, timeout_s=60)
    assert process(pool.submit(talk("look", jpeg())))
    hanging = [pool.submit(talk("hang", jpeg())) for _ in range(2)]
    late = pool.submit(talk("look", jpeg()))
    assert late.cancel()
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 10
    for future in hanging:
        with pytest.raises(CancelledError):
            future.result(0)
    with pytest.raises(RuntimeError):
        pool.submit(talk("look"))
