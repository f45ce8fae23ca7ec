"""Values without sense: whatever is written under whatever key, the answer is a configuration or a readable error."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from tessera.config.reader import Section, build, dump_yaml, parse_overrides, parse_yaml, read_mapping
from tessera.config.run_config import RunConfig, load_config
from tessera.config.values import LARGEST, members_of
from tessera.data.kinds import KINDS
from tessera.errors import TesseraError
from tessera.models import FAMILIES
from tessera.models.processing.conversation import TextOptions
from tessera.models.vision.preprocessor_files import VideoOptions
from tessera.tasks import TASKS
from tessera.tasks.dpo import DpoTask
from tessera.tasks.returns_loss import ReturnsLossTask
from tessera.tasks.transformers import TransformersTask
from tests.errors import raises
from tests.quick import quick

BASE: dict[str, Any] = {
    "model": {"family": "qwen2_vl", "lora": {"targets": [{"modules": "x"}]}},
    "data": {"train": [{"path": "a.json"}], "eval": [{"path": "b.json"}]},
    "parallel": {"encoders": {"vision": {}}, "recompute": [{"modules": "x"}]},
    "train": {"steps": 3, "ema": {}},
    "optim": {"groups": [{"pattern": "x"}]},
    "log": {"trackers": [{"name": "wandb"}]},
}


def keys_of(kind: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a recipe, with its annotation; lists and mappings are entered where BASE has something in them."""
    for name, field in kind.model_fields.items():
        path = f"{at}{name}"
        yield path, field.annotation
        for member in members_of(field.annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from keys_of(member, f"{path}.")
            for inner in typing.get_args(member):
                for section in members_of(inner):
                    if isinstance(section, type) and issubclass(section, BaseModel):
                        entry = "vision" if typing.get_origin(member) is dict else "0"
                        yield from keys_of(section, f"{path}.{entry}.")


KEYS = dict(keys_of(RunConfig))
WORDS = {
    key: [word for member in members_of(annotation) for word in typing.get_args(member)]
    for key, annotation in KEYS.items()
    if any(typing.get_origin(member) is typing.Literal for member in members_of(annotation))
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**4000]),
    st.floats(),
    st.sampled_from([1e300, 5e-324, -0.0, math.inf, -math.inf, math.nan]),
    st.text(max_size=20),
    st.sampled_from(
        ["", "\0", "a\0b", "a" * 5000, "/" + "b" * 300, "\ud800", "off", "yes", "..", ".", ":", "os:system"]
    ),
    st.binary(max_size=4),
    st.dates(),
)
nonsense = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3)
    ),
    max_leaves=6,
)


# The same examples on every machine; raise max_examples and leave out `derandomize` to look for more. `make test` takes
# fewer (`tests/conftest.py`).
thrown = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def numbers_in(tree: Any) -> Iterator[float]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from numbers_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from numbers_in(value)
    elif isinstance(tree, (int, float)) and not isinstance(tree, bool):
        yield tree


FREE = ("model.config", "data.processor", "data.options", "train.task_options")  # what these hold, others check


def accepted_or_told(make: Any) -> RunConfig | None:
    try:
        config: RunConfig = make()
    except TesseraError as told:
        text = str(told)
        assert 0 < len(text) < 20_000
        return None
    again = load_config(parse_yaml(dump_yaml(config), "its own copy"))
    assert dump_yaml(again) == dump_yaml(config)  # not the objects: a number that is free may be nan, equal to nothing
    plain = config.model_dump(mode="json")
    for key in FREE:
        section, _, name = key.partition(".")
        plain[section][name] = None
    assert all(math.isfinite(number) and abs(number) <= LARGEST + 1 for number in numbers_in(plain))
    return config


@thrown
@given(key=st.sampled_from(sorted(KEYS)), value=nonsense)
def test_anything_under_any_key_of_a_mapping_is_taken_or_told(key: str, value: Any) -> None:
    accepted_or_told(lambda: load_config(BASE, {key: value}))


@thrown
@given(
    key=st.sampled_from(sorted(KEYS)),
    text=st.one_of(
        st.text(max_size=12),
        st.sampled_from(
            [
                ".inf",
                "-.inf",
                ".nan",
                "1e999",
                "9" * 5000,
                "0x" + "f" * 5000,
                "!!float x",
                "!!bool x",
                "!!int x",
                "!!set {a}",
                "!!timestamp x",
                "!!binary x",
                "2024-13-45",
                "12:30:99",
                "&a [*a]",
                "{a: 1, a: 2}",
                "[",
                '"\\0"',
                '"\\ud800"',
                "{}",
                "[]",
            ]
        ),
        nonsense.map(lambda value: json.dumps(value, default=str)),
    ),
)
def test_anything_under_any_key_of_the_shell_and_of_a_file_is_taken_or_told(
    tmp_path_factory: pytest.TempPathFactory, key: str, text: str
) -> None:
    accepted_or_told(lambda: load_config(BASE, parse_overrides([f"{key}={text}"])))
    file = tmp_path_factory.getbasetemp() / "nonsense.yaml"
    file.write_bytes((json.dumps(BASE)[:-1] + f', "{key.split(".")[0]}": {text}}}').encode(errors="surrogateescape"))
    accepted_or_told(lambda: load_config(file))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("optim.lr", math.inf, "finite"),
        ("optim.lr", 1e9, "at most 10000"),
        ("data.train.0.weight", math.inf, "finite"),
        ("optim.clip_norm", math.inf, "finite"),
        ("train.steps", True, "a number is needed, not true"),
        ("train.steps", 10**30, "bits"),
        ("train.steps", 10**15, "at most"),
        ("train.steps", 1e300, "train.steps"),
        ("data.workers", 10**6, "at most 4096"),
        ("data.workers", True, "not true"),
        ("data.workers", "atuo", "did you mean: auto"),
        ("optim.betas", [0.9, 1.5], "optim.betas.1"),
        ("optim.betas", [-0.1, 0.9], "optim.betas.0"),
        ("optim.betas", [0.9, math.nan], "optim.betas.1"),
        ("optim.weight_decay", math.nan, "finite"),
        ("optim.eps", math.inf, "finite"),
        ("model.path", "a\0b", "NUL"),
        ("model.path", "", "empty path"),
        ("out", "x" * 300, "255"),
        ("model.tokenizer", "\ud800", "Unicode"),
        ("model.lora.rank", True, "not true"),
        ("parallel.tp", True, "not true"),
        ("parallel.layers", {"text": [True]}, "not true"),
        ("parallel.timeout_s", math.inf, "finite"),
        ("parallel.timeout_s", 1e300, "at most"),
        ("parallel.reshard_after_forward", -3, "parallel.reshard_after_forward"),
        ("profile.ranks", [True], "not true"),
        ("train.seed", 2**64, "bits"),
        ("train.ema.decay", math.nan, "finite"),
        ("optim.schedule.final", math.nan, "finite"),
        ("data.length", 10**15, "at most"),
        ("checkpoint.keep", 10**9, "at most"),
        ("parallel.fsdp2_config", 3, "path"),
        (
            "data.eval",
            None,
            "data.eval: cannot be null; an empty list is []\n  where:   recipe given as a mapping with "
            "overrides data.eval=null",
        ),
        ("callbacks", [], "did you mean: train.callbacks"),
        ("every", 3, "did you mean train.ema.every or evaluation.every or checkpoint.every or log.every?"),
    ],
)
def test_values_without_sense_are_refused_with_what_is_allowed(key: str, value: Any, said: str) -> None:
    with pytest.raises(TesseraError) as raised:
        load_config(BASE, {key: value})
    assert said in str(raised.value)
    assert key.split(".")[0] in str(raised.value)
    assert raised.value.exit_code == 2


def test_a_mistake_inside_a_mapping_is_told_once_where_a_text_may_stand_too() -> None:
    with pytest.raises(TesseraError) as error:
        load_config(BASE, {"model.lora": {"targets": [{"modules": "text", "rank": 0}]}})
    assert error.value.what == "model.lora.targets.0.rank: must be above 0, got 0"


def test_clipping_is_turned_off_by_null_and_large_norms_are_room_enough() -> None:
    assert load_config(BASE, parse_overrides(["optim.clip_norm=null"])).optim.clip_norm is None
    assert load_config(BASE, {"optim.clip_norm": 1e6}).optim.clip_norm == 1e6


def test_a_number_of_5000_digits_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {family: qwen2_vl}\ntrain: {steps: " + "9" * 5000 + "}\n")
    with pytest.raises(TesseraError) as raised:
        load_config(tmp_path / "recipe.yaml")
    assert "recipe.yaml:2:16" in str(raised.value)
    with raises("recipe.unusable-value", "train.steps"):
        load_config(BASE, {"train.steps": 10**5000})


# ---------------------------------------------------------------------------------------------- documented words


@pytest.mark.parametrize("key", quick(sorted(WORDS), *sorted(WORDS)[::3]))
def test_every_documented_word_can_be_said_in_shell_and_file(key: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    for word in WORDS[key]:
        # What is float16 beside the computation needs the loss scale, which a computation in float16 brings.
        base = merged(BASE, {"precision": {"compute": "float16"}}) if word == "float16" else BASE
        if key.startswith("optim.groups"):  # the rest of a model beside Muon
            base = merged(base, {"optim": {"name": "muon"}})
        if word == "mindspore":
            base = {name: base[name] for name in ("model", "data")} | {"train": {"steps": 3}}
        expected = value_at(load_config(base, {key: word}), key)
        assert expected == word
        assert value_at(load_config(base, parse_overrides([f"{key}={word}"])), key) == word
        tree: Any = word
        for part in reversed(key.split(".")):
            tree = [tree] if part == "0" else {part: tree}
        spelled = yaml.safe_dump(merged(base, tree), sort_keys=False).replace(f"'{word}'", word)  # as a person writes
        file.write_text(spelled)
        config = load_config(file)
        assert value_at(config, key) == word
        file.write_text(dump_yaml(config))
        assert value_at(load_config(file), key) == word


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = (
            config[int(part)] if part.isdigit() else config[part] if isinstance(config, dict) else getattr(config, part)
        )
    return config


def merged(base: Any, tree: Any) -> Any:
    if isinstance(tree, dict) and isinstance(base, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in tree.items()}}
    if isinstance(tree, list) and isinstance(base, list) and isinstance(tree[0], dict):
        return [merged(base[0], tree[0])]
    return tree


def test_only_true_and_false_are_booleans(tmp_path: Path) -> None:
    words = "a: off, b: no, c: on, d: yes, e: y, f: true, g: False"
    numbers = "h: 12:30:45, i: 2024-01-01, j: 010, k: 0x10, l: ~, m: 1_000"
    assert parse_yaml(f"{{{words}, {numbers}}}", "t") == {
        "a": "off", "b": "no", "c": "on", "d": "yes", "e": "y", "f": True, "g": False,
        "h": "12:30:45", "i": "2024-01-01", "j": 10, "k": 16, "l": None, "m": 1000,
    }  # fmt: skip
    assert load_config(BASE, parse_overrides(["data.pack=off"])).data.pack is False  # a key of the kind still takes it
    assert load_config(BASE, parse_overrides(["guard.policy=off"])).guard.policy == "off"


def test_a_run_s_own_copy_keeps_words_that_look_like_numbers(tmp_path: Path) -> None:
    odd = [
        "1e5",
        "0o17",
        "off",
        "~",
        "12:30",
        "2024-01-01",
        "1_000",
        "\x85",
        "\u2028x",
        " a ",
        "a: b",
        "#",
        "é",
        "a\nb",
        "\ufeff",
    ]
    config = load_config(BASE, {"data.options": {}, "model.freeze": odd, "name": "1e5"})
    (tmp_path / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    assert load_config(read_mapping(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"data.processor": {"train_on": ["user"]}},
        {"data.options": {"x": 1}},
        {"data.kind": "custom", "data.options": {"dataset": "a:b"}},
        {"optim.schedule.kind": "constant", "optim.schedule.final": 0.5},
        {"data.stream_cache_gib": 5},
        {"data.on_bad_sample": "fail", "data.max_bad_share": 0.5},
    ],
)
def test_a_key_without_effect_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(TesseraError):
        load_config(BASE, changes)


# ---------------------------------------------------------------------------------------------- options of others


def test_no_key_is_advised_that_is_refused_next() -> None:
    with pytest.raises(TesseraError) as told:
        build(TextOptions, {"train_onn": ["user"], "train_on": ("user",)}, "data.processor")
    assert told.value.allowed == ["system"]
    assert told.value.nearest is None


OPTION_KEYS = [(VideoOptions, name) for name in VideoOptions.model_fields] + [(TextOptions, "system")]


@thrown
@given(option=st.sampled_from(OPTION_KEYS), value=nonsense)
def test_options_of_processors_are_taken_or_told(option: tuple[type[Section], str], value: Any) -> None:
    kind, name = option
    try:
        options = build(kind, {name: value}, "data.processor")
    except TesseraError:
        return
    assert all(math.isfinite(number) for number in numbers_in(options.model_dump()))


@thrown
@given(
    option=st.sampled_from(
        [
            (DpoTask, "beta"),
            (DpoTask, "label_smoothing"),
            (DpoTask, "reference_free"),
            (ReturnsLossTask, "reduction"),
            (ReturnsLossTask, "count_labels"),
            (TransformersTask, "shift"),
        ]
    ),
    value=nonsense,
)
def test_options_of_tasks_are_taken_or_told(option: tuple[Any, str], value: Any) -> None:
    make, name = option
    try:
        task = make(**{name: value})
    except TesseraError:
        return
    assert all(math.isfinite(number) for number in numbers_in(vars(task)))


@thrown
@given(
    name=st.one_of(st.text(max_size=12), st.sampled_from(["", ".", "..", "...x", ":", "a:", ":a", "a b", "os", "1.2"]))
)
def test_names_that_name_nothing_are_told(name: str) -> None:
    for registry in (TASKS, KINDS, FAMILIES):
        if name not in registry.names():
            with pytest.raises(TesseraError):
                registry.get(name)


FAMILY_KEYS = [
    (family, key)
    for family in (
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "internvl",
        "llava",
        "glm4v",
        "qwen2",
        "qwen3",
        "llama",
        "module",
    )
    for key, _ in keys_of(FAMILIES.get(family).config)
]


@thrown
@given(chosen=st.sampled_from(FAMILY_KEYS), value=nonsense)
def test_fields_of_models_are_taken_or_told(chosen: tuple[str, str], value: Any) -> None:
    from tessera.models import resolve

    family, key = chosen
    presets = sorted(FAMILIES.get(family).presets)
    try:
        section = load_config(
            {
                "model": {"family": family, "preset": presets[0] if presets else None, "config": {key: value}},
                "train": {"steps": 1},
            }
        ).model
        _, config = resolve(section)
    except TesseraError:
        return
    if family != "module":
        assert all(math.isfinite(number) for number in numbers_in(config.model_dump()))


def test_ten_to_the_nine_layers_are_refused_and_not_built() -> None:
    from tessera.models import resolve

    section = load_config(
        {
            "model": {
                "family": "qwen3",
                "preset": sorted(FAMILIES.get("qwen3").presets)[0],
                "config": {"text.num_hidden_layers": 10**9},
            },
            "train": {"steps": 1},
        }
    ).model
    with raises("recipe.wrong-value", "num_hidden_layers"):
        resolve(section)
