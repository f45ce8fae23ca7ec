"""Every file below recipes/ is a valid recipe, is planned on the ranks that it names, and fits into their memory."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tessera.config.reader import dump_yaml, parse_yaml
from tessera.config.run_config import RunConfig, load_config
from tessera.parallel.plan import Plan
from tessera.tools.device_sizes import find_size
from tessera.tools.dry_run import run_role
from tessera.training.setup import build_meta_model
from tests.toys.published_folders import MODELS, PIPELINES, write_published

ROOT = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(ROOT.glob("**/*.yaml"))
MEANT_FOR = re.compile(r"on (\d+) [GN]PUs? of (\d+) GB\.$", re.MULTILINE)


def named(recipe: Path) -> str:
    return str(recipe.relative_to(ROOT))


def prepared(recipe: Path, folders: Path, layers: int | None) -> RunConfig:
    """Return a recipe whose model lies in a folder without weights, on a device that is no CPU."""
    config = load_config(recipe)
    changes: dict[str, object] = {}
    path = config.model.path
    if path is not None:
        name = next((part for part in path.parts if part in PIPELINES or part in MODELS), path.name)
        write_published(folders, name, layers)
        changes["model.path"] = str(folders.joinpath(*path.parts[path.parts.index(name) :]))
    if layers is not None and config.model.config.get("trains_thinker"):  # a talker reads between layers of it
        few = {"text": {"num_hidden_layers": 3}, "vision": {"deepstack_visual_indexes": [0]}}
        changes["model.config"] = {**config.model.config, "accept_hidden_layer": 2, "thinker": few}
    if MEANT_FOR.search(recipe.read_text()):
        changes["train.device"] = "cuda"
    return load_config(recipe, changes)


@cache
def meant_for(recipe: Path) -> tuple[int, float | None]:
    """Return the ranks that a recipe is for, and the memory of each in bytes, as its first line says; one without such
    a line is for one process."""
    meant = MEANT_FOR.search(recipe.read_text().partition("\n")[0])
    return (1, None) if meant is None else (int(meant[1]), float(meant[2]) * 1e9)


def held_bytes(plan: Plan) -> int:
    """Return what the fullest rank holds all the time: the model in training, and frozen components on the device."""
    frozen = sum(part.size for part in plan.memory.frozen.values() if part.residence != "offloaded")
    return plan.memory.heaviest.total + frozen


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shallow")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole")


def planned() -> list[Any]:
    """Every recipe. In `make test` the first one of each folder."""
    first = {path.parent: path for path in RECIPES[::-1]}.values()
    return [pytest.param(path, marks=[] if path in first else [pytest.mark.slow], id=named(path)) for path in RECIPES]


@pytest.mark.parametrize("recipe", planned())
def test_recipe_is_planned_on_the_ranks_it_names(recipe: Path, shallow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(recipe.parent)  # where classes of a recipe's own lie
    config = prepared(recipe, shallow, layers=1)
    plan = build_meta_model(config, meant_for(recipe)[0]).plan
    assert plan.trained > 0
    assert plan.microbatches >= 1
    assert config.data.train or config.data.options, "a recipe says what it learns from"


@pytest.mark.slow  # all layers of models of up to twenty billion weights
@pytest.mark.parametrize("recipe", [path for path in RECIPES if meant_for(path)[1]], ids=named)
def test_recipe_fits_into_the_memory_it_names(recipe: Path, whole: Path) -> None:
    world, memory = meant_for(recipe)
    plan = build_meta_model(prepared(recipe, whole, layers=None), world).plan
    assert memory is not None
    assert held_bytes(plan) < memory


@pytest.mark.slow  # a step of all 40 blocks, on tensors without memory
def test_a_step_of_adapters_of_14b_fits_into_24_gb_with_activations_and_encoders(whole: Path) -> None:
    recipe = ROOT / "wan" / "lora-24gb.yaml"
    config = prepared(recipe, whole, layers=None)
    role = run_role(config, 1, 0)
    plan = build_meta_model(config, 1).plan
    assert plan.parameters + plan.memory.heaviest.host * 16 // 9 > 14e9  # 4.5 bits for a weight
    assert role.activations > 40 * config.data.length * 5120 * 2  # the input of every block is kept
    assert role.encoding > 5e9 * 2  # the text encoder, in bfloat16
    assert role.total < 24e9


SIZES = (24, 40, 48, 80)  # GB of devices that a recipe for one of them may name


@pytest.mark.slow  # a step of each, on tensors without memory
@pytest.mark.parametrize(
    "recipe", [path for path in RECIPES if meant_for(path)[1] and meant_for(path)[0] == 1], ids=named
)
def test_a_recipe_for_one_device_names_the_smallest_that_a_step_fits_on(recipe: Path, whole: Path) -> None:
    config = prepared(recipe, whole, layers=None)
    if config.train.task == "diffusion_dpo":
        pytest.skip("no example of a pair of images is there to run a step on")
    # From the second micro-batch on all are alike.
    few = load_config(parse_yaml(dump_yaml(config), "recipe"), {"train.global_batch": 2 * config.train.micro_batch})
    total = run_role(few, 1, 0).total
    fits = [size for size in SIZES if total <= find_size(f"{size}g").usable()]
    assert meant_for(recipe)[1] == fits[0] * 1e9


def begins_from_nothing(recipe: Path) -> bool:
    """Return whether a recipe is one for a CPU, of a model that begins from random weights."""
    return "quickstart" in recipe.parts[-2] or named(recipe) == "demo/tiny.yaml"


@pytest.mark.parametrize("recipe", [path for path in RECIPES if not begins_from_nothing(path)], ids=named)
def test_recipe_says_what_it_needs_and_how_it_is_started(recipe: Path) -> None:
    text = recipe.read_text()
    assert meant_for(recipe)[1], "the first line ends with: on N GPUs (or NPUs) of M GB."
    assert f"tessera train recipes/{recipe.relative_to(ROOT)}" in text


def listed(page: Path) -> set[str]:
    """Return the recipes that a page names; `a/{b,c}.yaml` are two."""
    names: set[str] = set()
    for name in re.findall(r"`([\w./{},-]+\.yaml)`", page.read_text(encoding="utf-8")):
        head, inside, tail = re.fullmatch(r"([^{]*)(?:\{([^}]*)\})?(.*)", name).groups()  # type: ignore[union-attr]
        names |= {f"{head}{one}{tail}" for one in (inside or "").split(",")}
    return names


@pytest.mark.parametrize("page", ["choose-a-recipe.md", "choose-a-recipe.zh.md"])
def test_the_page_of_recipes_lists_all_of_them(page: str) -> None:
    assert listed(ROOT.parent / "docs" / "how-to" / page) == {named(recipe) for recipe in RECIPES}
