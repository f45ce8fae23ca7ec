"""`tessera chat`: a conversation with a small model, from a terminal and from Python."""

from __future__ import annotations

import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
from chats import picture
from small_folders import small_folder

import tessera
from tessera.cli.chat import Terminal
from tessera.engine.scheduler import EngineLimits
from tessera.errors import TesseraError
from tessera.inference.chat import Chat


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tessera.load(small_folder("qwen2_vl", tmp_path_factory.mktemp("model")), device="cpu")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    picture(64, 48).save(tmp_path / "a cat.png")
    return tmp_path / "a cat.png"


def talk(loaded: Any) -> Chat:
    return Chat(*loaded, max_new_tokens=4)


def test_an_answer_sees_the_turns_before_it(loaded: Any, image: Path) -> None:
    model, processor = loaded
    chat = talk(loaded)
    first = chat.ask("What is this?", images=[image])
    parts: list[str] = []
    second = chat.ask("And now?", on_text=parts.append)
    assert "".join(parts) == second
    whole = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And now?"},
    ]
    assert second == model.generate(processor(whole), 4)
    assert model.chat("What is this?", image, max_new_tokens=4) == first


def test_a_turn_reads_only_what_the_turns_before_have_not(loaded: Any, image: Path) -> None:
    chat, block = talk(loaded), EngineLimits.block_size
    chat.ask("What is this? " * 4, images=[image])
    before = chat.engine.engine
    assert before is not None
    prefilled = before.stats().prefilled
    chat.ask("And now?")
    assert chat.engine.engine is before
    (_, processor) = loaded
    whole = processor(chat.messages[:-1])["tokens"].numel()
    read = before.stats().prefilled - prefilled
    assert read == whole - before.stats().prefix_hits < whole // 2
    assert before.stats().prefix_hits >= prefilled // block * block
    # A turn that needs more blocks than there are starts a larger engine, and the answer is the same.
    answer = chat.ask("Long " * (block * (before.limits.blocks or 0) // 3))
    assert chat.engine.engine is not before
    assert answer == loaded[0].generate(processor(chat.messages[:-1]), 4)
    freed = weakref.ref(chat.engine.engine)
    chat.clear()
    assert freed() is None


def test_a_turn_after_an_interruption_has_an_engine_of_its_own(loaded: Any) -> None:
    chat = talk(loaded)
    answer = chat.ask("one")

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.ask("two", on_text=interrupt)
    assert chat.engine.engine is None
    chat.undo()
    assert chat.ask("one") == answer


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(loaded: Any, tmp_path: Path) -> None:
    chat = talk(loaded)
    chat.ask("one")
    before = list(chat.turns)
    with pytest.raises(TesseraError):
        chat.ask("two", images=[tmp_path / "missing.png"])
    assert chat.turns == before
    assert chat.undo()
    assert not chat.turns
    assert not chat.undo()


def run(chat: Chat, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    Terminal(chat).run()


def test_lines_are_questions_and_commands(
    loaded: Any, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat, file = talk(loaded), tmp_path / "said.jsonl"
    lines = [
        "forget this",
        "/clear",
        "/system Be kind.",
        f"/image '{image}'",
        "What is this?",
        f"/save {file}",
        "/exit",
        "no",
    ]
    run(chat, lines, monkeypatch)
    (question, answer) = chat.turns
    assert [part["type"] for part in question["content"]] == ["image", "text"]
    assert answer["content"] in capsys.readouterr().out
    saved = json.loads(file.read_text())["messages"]
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[1]["content"][0] == {"type": "image", "image": str(image)}


@pytest.mark.parametrize(
    ("line", "word"), [("/imgae x.png", "/image"), ("/image nowhere.png", "no such file"), ("/save x.txt", "jsonl")]
)
def test_wrong_commands_are_explained(loaded: Any, line: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TesseraError) as raised:
        run(talk(loaded), [line], monkeypatch)
    assert word in str(raised.value)
