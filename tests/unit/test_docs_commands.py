"""What the pages say is asked of the code: every command, every recipe and every key that they show."""

from __future__ import annotations

import importlib
import re
import shlex
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from test_config_values import KEYS

from tessera.cli.main import app
from tessera.config.reader import build, parse_overrides, parse_yaml
from tessera.config.run_config import RunConfig, load_config
from tessera.errors import TesseraError
from tessera.evaluation.tasks.sections import TaskSection
from tessera.models import FAMILIES
from tessera.training.setup import build_meta_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The diary has keys that are gone, the list of codes has parts of messages.
PAGES = [page for page in PAGES if page.name not in ("log.md", "error-codes.md")]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
BASE: dict[str, Any] = {"model": {"family": "qwen2_vl"}, "train": {"steps": 1000, "global_batch": 96}}
SECTIONS = [name for name, field in RunConfig.model_fields.items() if hasattr(field.annotation, "model_fields")]
FREE = ("model.config", "data.processor", "data.options", "train.task_options")
# Paths of modules in transformers, which begin like a section of a recipe.
FOREIGN = tuple(
    f"model.{name}" for name in ("visual", "layers", "norm", "embed_tokens", "rotary_emb", "language_model")
)


def blocks(page: Path, *languages: str) -> Iterator[str]:
    for _, language, text in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language in languages:
            yield textwrap.dedent(text)


def spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", page.read_text(encoding="utf-8")))


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


# ---------------------------------------------------------------------------------------------- commands


def commands(page: Path) -> list[tuple[str, bool]]:
    """Each with whether it is whole: in a block it is, in a sentence it may be a name alone."""
    lines = []
    for text in blocks(page, "bash", "sh", ""):
        for line in text.splitlines():
            line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line.strip())
            if line.startswith("tessera "):
                lines.append((line, True))
    return lines + [(span, False) for span in spans(page) if span.startswith("tessera ")]


@cache
def program() -> Any:
    """Return the parser of the command line: making it takes longer than parsing all pages."""
    return typer.main.get_command(app)


@cache  # pages in two languages show the same commands
def parse(line: str, whole: bool) -> tuple[str, ...]:
    """Parse a command by the real parser and run nothing. Return its key=value words."""
    words = [
        "0" if word == "R" else word
        for word in shlex.split(line, comments=True)[1:]
        if word not in ("…", "...", "VERB")
    ]
    command = program()
    context = command.make_context("tessera", [], resilient_parsing=True)
    while words and hasattr(command, "get_command"):  # a group; newer releases of typer have a click of their own
        default = getattr(command, "default_command", "")  # `tessera migrate FILE` is `tessera migrate job FILE`
        name = default if default and words[0] not in command.commands else words.pop(0)
        if any(name in one.opts for one in command.params):  # an option of tessera itself
            return ()
        subcommand = command.get_command(context, name)
        assert subcommand is not None, f"{line}: no command {name}"
        command, context = subcommand, subcommand.make_context(name, [], parent=context, resilient_parsing=True)
    if hasattr(command, "get_command"):
        return ()
    try:
        context = command.make_context(command.name, list(words))
    except Exception as wrong:
        kinds = {kind.__name__ for kind in type(wrong).__mro__}
        if "MissingParameter" in kinds and not whole:
            return ()
        raise AssertionError(f"{line}: {wrong}") from None
    return tuple(word for word in context.params.get("overrides") or [] if "=" in word)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_command_of_the_pages_is_one(page: Path) -> None:
    for line, whole in commands(page):
        words = parse(line, whole)
        if not words:
            continue
        if "# error" in line:
            with pytest.raises(TesseraError):
                load_config(BASE, parse_overrides(list(words)))
        else:
            base = {**BASE, "data": {"train": [{"path": "a.json"}]}}
            load_config(base, parse_overrides([word.replace("NEW", "new") for word in words]))


def test_commands_with_a_recipe_that_needs_no_folder_are_planned_as_they_are_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That a key exists is not enough: its value must go with the rest of the recipe."""
    monkeypatch.chdir(ROOT)
    planned = set()
    for page in PAGES:
        for line, whole in commands(page):
            recipe = next(
                (word for word in line.split() if word.startswith("recipes/") and word.endswith(".yaml")), None
            )
            if recipe is None or line.split()[1] not in ("train", "plan") or "# error" in line:
                continue
            config = load_config(recipe, parse_overrides(list(parse(line, whole))))
            if config.model.path is None and (recipe, parse(line, whole)) not in planned:
                build_meta_model(config, 1)
                planned.add((recipe, parse(line, whole)))
    assert len(planned) >= 3


def test_every_command_in_a_recipe_is_one() -> None:
    """Recipes say in their first lines how they are started."""
    recipes = sorted((ROOT / "recipes").rglob("*.yaml"))
    count = 0
    for recipe in recipes:
        for line in re.findall(r"^#\s+(tessera .*)$", recipe.read_text(encoding="utf-8"), re.MULTILINE):
            for command in line.split(" && "):
                if command.startswith("tessera "):
                    parse(command, True)
                    count += 1
    assert count >= len(recipes) - 3  # the recipes of the two quick starts are started by programs


def test_a_command_that_is_none_is_found() -> None:
    for line in ("tessera trian recipe.yaml", "tessera train recipe.yaml --nprocs 2", "tessera data docter x"):
        with pytest.raises(AssertionError):
            parse(line, True)
    assert parse("tessera train recipe.yaml optim.lr=1e-4 --nproc 2", True) == ("optim.lr=1e-4",)


# ---------------------------------------------------------------------------------------------- recipes and keys


def is_recipe(tree: dict[str, Any]) -> str | None:
    """None, or what is wrong with it, read as a recipe or as the inside of one of its sections."""
    told = []
    for wrapped in [tree, *({name: tree} for name in SECTIONS)]:
        merged = dict(BASE)
        for name, section in wrapped.items():
            merged[name] = {**BASE[name], **section} if name in BASE and isinstance(section, dict) else section
        if isinstance(wrapped.get("train"), dict) and "epochs" in wrapped["train"]:  # in the place of steps
            merged["train"] = {key: value for key, value in merged["train"].items() if key != "steps"}
        if "path" in merged["model"] and "family" not in (tree.get("model") or {}):
            merged["model"] = {key: value for key, value in merged["model"].items() if key != "family"}
        try:
            load_config(merged)
        except TesseraError as error:
            told.append(str(error))
        else:
            return None
    return told[0]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_recipe_of_the_pages_is_one(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fsdp2_config.yaml").write_text("sharding_size: 2\n")
    monkeypatch.chdir(tmp_path)
    for text in blocks(page, "yaml"):
        tree = parse_yaml(text, str(page))
        assert isinstance(tree, dict), text
        if {"prompt", "metric"} <= tree.keys():
            build(TaskSection, tree, str(page))
            continue
        assert is_recipe(tree) is None, f"{text}\n{is_recipe(tree)}"
        if isinstance(tree.get("model"), dict):
            assert not {"preset", "path"} <= set(tree["model"]), f"preset and path together:\n{text}"


def test_a_recipe_that_is_none_is_found() -> None:
    assert is_recipe({"train": {"stepz": 3}}) is not None
    assert is_recipe({"kind": "custom", "optoins": {}}) is not None
    assert is_recipe({"tp": 2}) is None


def test_every_import_of_the_pages_and_of_the_notebook_resolves() -> None:
    imports = 0
    for page in [*PAGES, ROOT / "examples" / "quickstart.ipynb"]:
        for module, names in re.findall(
            r"from (tessera[\w.]*) import (\w+(?:, *\w+)*)", page.read_text(encoding="utf-8")
        ):
            imports += 1
            for name in names.split(","):
                assert hasattr(importlib.import_module(module), name.strip()), f"{page.name}: {module}.{name.strip()}"
    assert imports > 10


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_key_of_the_pages_exists(page: Path) -> None:
    keys = {re.sub(r"\.(?:0|vision)(?=\.|$)", "", key) for key in KEYS}
    shape = re.compile(rf"(?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+(?=$|[=: ])")
    for span in spans(page):
        match = shape.match(span)
        if match is None or match[0].endswith((".py", ".json", ".jsonl", ".html", ".yaml")):
            continue
        key = re.sub(r"\.\d+(?=\.|$)", "", match[0])
        if key.startswith(FREE + FOREIGN):
            continue
        exists = key in keys or (ROOT / "tessera" / key.replace(".", "/")).with_suffix(".py").exists()
        exists = exists or (ROOT / "tessera" / key.replace(".", "/")).is_dir()
        assert exists, f"{ids(page)} names {span!r}, which is no key"


# ---------------------------------------------------------------------------------------------- words


NAMES = {
    "cogvideox": "CogVideoX",
    "csm": "CSM",
    "flux": "Flux",
    "glm4v": "GLM-4.1V",
    "hunyuan_video": "HunyuanVideo",
    "hunyuan_video_1_5": "1.5",
    "internvl": "InternVL",
    "llama": "Llama",
    "llava": "LLaVA",
    "ltx_video": "LTX-Video",
    "module": "nn.Module",
    "qwen2": "Qwen2",
    "qwen2_5_omni": "Qwen2.5-Omni",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_audio": "Qwen2-Audio",
    "qwen2_vl": "Qwen2-VL",
    "qwen3": "Qwen3",
    "qwen3_asr": "Qwen3-ASR",
    "qwen3_omni": "Qwen3-Omni",
    "qwen3_omni_talker": "talker",
    "qwen3_vl": "Qwen3-VL",
    "qwen_image": "Qwen-Image",
    "sd3": "Stable Diffusion 3",
    "transformers": "transformers",
    "wan": "Wan",
    "whisper": "Whisper",
}


@pytest.mark.parametrize("page", PAGES[:2], ids=ids)
def test_the_readme_names_every_family_and_every_section_is_in_the_reference(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(FAMILIES.names()) == set(NAMES)
    assert [name for name in NAMES.values() if name not in text] == []
    for word in ("LoRA", "QLoRA", "DPO", "EMA", "data doctor", "preflight", "SECURITY.md", "compile"):
        assert word in text, word
    reference = (ROOT / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    counted = {10: "ten", 11: "eleven", 12: "twelve"}[len(SECTIONS)]
    assert f"{counted} sections" in reference
    assert all(f"| `{name}` |" in reference for name in SECTIONS)


def test_every_extra_is_used_by_something() -> None:
    imported = {"scikit-learn": "sklearn", "tensorboard": "torch.utils.tensorboard"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = [path for folder in ("tessera", "tessera_compat", "recipes") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for extra, packages in extras.items():
        for package in packages if extra != "dev" else []:
            name = re.split(r"[<>=\[]", package)[0]
            word = imported.get(name, name.replace("-", "_"))
            assert re.search(rf"^\s*(?:import|from) {word}\b", code, re.MULTILINE), (
                f"extra {extra}: nothing uses {name}"
            )


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?://)([^)#\s]+)", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            assert (page.parent / target).exists(), f"{ids(page)} links to {target}"
