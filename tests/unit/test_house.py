"""The rules of the house, read from the source: imports go down only, device words stay in one file."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tessera"

# What each room may import, besides itself and whatever those rooms may import.
MAY_IMPORT = {
    "core": set(),
    "ops": {"core"},
    "nn": {"core", "ops"},
    "data": {"core"},
    "models": {"core", "ops", "nn", "data"},
    "parallel": {"core", "ops"},
    "checkpoint": {"core"},
    "optim": {"core"},
    "tasks": {"core", "ops", "nn", "models", "data", "parallel", "checkpoint", "optim"},
    "train": {"core", "models", "data", "parallel", "checkpoint", "optim", "tasks", "infer"},
    "infer": {"core", "models", "nn", "data", "parallel", "checkpoint"},
    "evaluate": {"core", "data", "infer", "train"},
    "tools": {"core", "data", "models", "checkpoint", "optim", "parallel", "tasks", "train", "infer", "evaluate"},
    "api": {"core", "parallel", "train", "infer", "evaluate", "tools"},
    "cli": {"core", "train", "infer", "evaluate", "tools", "api"},
}
DEVICE_WORDS = re.compile(r"torch\.(?:cuda|npu)\b|\btorch_npu\b|[\"'](?:cuda|npu|nccl|hccl)[\"':]|\.cuda\(\)")


def imported_rooms(source: str) -> set[str]:
    """Rooms of the package that a file imports, at any depth of the file."""
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != "tessera" else [f"tessera.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        rooms.update(name.split(".")[1] for name in names if name.startswith("tessera.") and name.count("."))
    return rooms


def import_violations(room: str, source: str) -> set[str]:
    return imported_rooms(source) - MAY_IMPORT[room] - {room}


def device_words(source: str) -> list[str]:
    return DEVICE_WORDS.findall(source)


def files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name == "api.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path: Path) -> None:
    assert not import_violations(room_of(path), path.read_text(encoding="utf-8"))


def test_the_order_of_rooms_has_no_circle() -> None:
    seen: set[str] = set()
    while len(seen) < len(MAY_IMPORT):
        free = {room for room, below in MAY_IMPORT.items() if below <= seen} - seen
        assert free, f"rooms import each other: {sorted(set(MAY_IMPORT) - seen)}"
        seen |= free


def test_a_planted_import_is_found() -> None:
    assert import_violations("core", "from tessera.models import FAMILIES") == {"models"}
    assert import_violations("nn", "def f():\n    import tessera.train.trainer") == {"train"}
    assert not import_violations("models", "from tessera.nn.vlm import VisionLanguageModel")


def test_device_words_live_in_one_file() -> None:
    others = [path for path in files() if path != PACKAGE / "core" / "device.py"]
    assert {str(path): words for path in others if (words := device_words(path.read_text(encoding="utf-8")))} == {}


def test_a_planted_device_word_is_found() -> None:
    for line in ("x = x.cuda()", 'device = "cuda:0"', "torch.npu.synchronize()", "backend='nccl'", "import torch_npu"):
        assert device_words(line), line
    assert not device_words('device = torch.device("cpu")')


def test_no_pickle_and_no_globals() -> None:
    bad = re.compile(
        r"^\s*(?:import pickle|from pickle|global )|torch\.(?:load|save)\(|allow_pickle=True", re.MULTILINE
    )
    between_processes = PACKAGE / "data" / "processes" / "messages.py"  # sockets of our own, never a file
    found = [p for p in files() if bad.search(p.read_text(encoding="utf-8"))]
    assert [str(p) for p in found if p != between_processes] == []


def test_test_files_have_names_of_their_own() -> None:
    """Of two that share one, pytest imports the first and refuses the second, or a rank finds the wrong one."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if "toys" not in path.parts]
    assert sorted(name for name in names if names.count(name) > 1 and name != "__init__.py") == []


def test_the_trainer_stays_small_and_knows_no_axis_or_modality() -> None:
    text = (PACKAGE / "train" / "trainer.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 350
    loop = next(
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == "_loop"
    )
    assert loop.end_lineno is not None
    assert loop.end_lineno - loop.lineno + 1 <= 60
    words = re.compile(
        r"token|image|pixel|vision|pipeline|parallel\.(?!engine)|\b[tpce]p\b|fsdp|shard|mesh", re.IGNORECASE
    )
    code = "\n".join(line.split("#")[0] for line in text.splitlines())
    assert words.findall(code) == []
