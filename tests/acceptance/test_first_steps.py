"""What the tutorial "first steps" and the install page tell a new user to type is typed, in both languages."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from tessera.cli.main import main

ROOT = Path(__file__).parents[2]
FAST = ("train.steps=3", "train.device=cpu")  # what the words mean is the same after three steps


def commands(page: str, language: str) -> list[list[str]]:
    """Return the commands of a page that need no folder of a published model, in order."""
    text = (ROOT / "docs" / f"{page}{language}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("tessera ")]
    return [
        shlex.split(line, comments=True)[1:] for line in lines if "demo-lora" not in line and "model.path" not in line
    ]


@pytest.mark.slow
@pytest.mark.parametrize("language", ["", ".zh"])
@pytest.mark.parametrize("page", ["tutorials/first-steps", "how-to/install"])
def test_commands_of_the_page_work_one_after_another(
    page: str, language: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    typed = [words for words in commands(page, language) if words[:1] not in (["convert"], ["compare"])]
    assert ["data", "demo", "demo"] in typed
    assert [words[0] for words in typed].count("train") == 1
    for words in typed:
        monkeypatch.setattr(sys, "argv", ["tessera", *words, *(FAST if words[0] == "train" else ())])
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is this?\n"))  # tessera chat asks, and ends with its input
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, f"tessera {shlex.join(words)}"
    assert list((tmp_path / "runs").glob("*/report.html"))
