"""Rules of the architecture, read from the source: imports go down only, device names stay in one file."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

from tests.syntax import DEFINITIONS, FUNCTIONS, IMPORTS, NAMES, all_nodes

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tessera"
COMPAT = ROOT / "tessera_compat"  # the same distribution, another import package
MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 80

# What each package may import besides itself.
BASE = {"version", "errors", "config", "runtime", "weights", "core"}
MAY_IMPORT: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "config": {"errors"},
    "runtime": {"version", "errors", "config"},
    "weights": {"errors", "config", "runtime"},
    "core": {"errors", "config", "runtime", "weights"},
    "ops": {*BASE},
    "hub": {*BASE},
    "workers": {"errors"},
    "checkpoint": {*BASE},
    "nn": {*BASE, "ops"},
    "lora": {*BASE, "ops", "checkpoint", "nn"},
    "data": {*BASE, "hub", "workers"},
    "models": {*BASE, "ops", "nn", "lora", "data"},
    "parallel": {*BASE, "ops", "lora"},
    "optim": {*BASE, "lora"},
    "tasks": {*BASE, "ops", "nn", "lora", "models"},
    "mindspore": {*BASE, "ops", "nn", "lora", "checkpoint", "parallel", "optim", "tasks"},
    "diffusion": {*BASE, "hub", "ops", "nn", "lora", "data", "models", "parallel", "checkpoint", "tasks"},
    "engine": {*BASE, "ops", "nn", "lora", "models", "checkpoint"},
    "inference": {
        *BASE,
        "hub",
        "workers",
        "nn",
        "lora",
        "data",
        "models",
        "diffusion",
        "parallel",
        "checkpoint",
        "engine",
    },
    "server": {*BASE, "lora", "data", "models", "engine", "inference"},
    "batch": {*BASE, "hub", "data", "checkpoint", "engine", "inference", "server"},
    "observe": {*BASE, "data", "parallel", "checkpoint", "optim", "tasks"},
    "training": {
        *BASE,
        *("hub", "workers", "nn", "lora", "data", "models", "diffusion", "parallel", "checkpoint", "optim"),
        *("tasks", "engine", "inference", "observe", "evaluation", "mindspore"),
    },
    "evaluation": {
        *BASE,
        *("hub", "data", "models", "diffusion", "parallel", "checkpoint", "engine", "inference", "batch", "observe"),
    },
    "tools": {
        *BASE,
        *("hub", "workers", "ops", "lora", "data", "models", "diffusion", "checkpoint", "optim", "parallel"),
        *("tasks", "training", "engine", "inference", "evaluation", "observe"),
    },
    "api": {*BASE, "hub", "diffusion", "parallel", "training", "inference", "batch", "evaluation", "observe", "tools"},
    "cli": {*BASE, "diffusion", "training", "inference", "server", "batch", "evaluation", "observe", "tools", "api"},
}
DEVICE_WORDS = re.compile(r"torch\.(?:cuda|npu)\b|\btorch_npu\b|[\"'](?:cuda|npu|nccl|hccl)[\"':]|\.cuda\(\)")


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Return all nodes of a source. Most rules read every file: each is parsed once."""
    return all_nodes(source)


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Forget the nodes at the end: a million of them slow down every other file of this worker. Until then the garbage
    collector is off: it would look at all of them again and again."""
    gc.disable()
    yield
    nodes.cache_clear()
    gc.enable()


def statements(source: str) -> list[ast.stmt]:
    """Return the statements of a source outside of functions and classes."""
    module = nodes(source)[0]
    assert isinstance(module, ast.Module)
    return module.body


def imported_packages(source: str) -> set[str]:
    """Return the packages of tessera that a file imports, at any depth of the file; `tessera` is the root itself."""
    packages: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module] if node.module != "tessera" else [f"tessera.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name for a in node.names]
        else:
            continue
        packages.update(name.split(".")[1] for name in names if name.startswith("tessera."))
        packages.update(name for name in names if name == "tessera")
    return packages


def import_violations(package: str, source: str) -> set[str]:
    return imported_packages(source) - MAY_IMPORT[package] - {package}


def device_words(source: str) -> list[str]:
    return DEVICE_WORDS.findall(source)


def files() -> list[Path]:
    """Return the files of the library that belong to a package of `MAY_IMPORT`."""
    return sorted(
        p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name in ("api.py", "errors.py", "version.py")
    )


def both_packages() -> list[Path]:
    """Return the files of the library and of `tessera_compat`."""
    return [*files(), *sorted(COMPAT.rglob("*.py"))]


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_imports_go_down() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in files()}
    violations = {str(path): import_violations(package_of(path), source) for path, source in sources.items()}
    assert {path: packages for path, packages in violations.items() if packages} == {}


def test_the_order_of_packages_has_no_circle() -> None:
    seen: set[str] = set()
    while len(seen) < len(MAY_IMPORT):
        free = {package for package, below in MAY_IMPORT.items() if below <= seen} - seen
        assert free, f"packages import each other: {sorted(set(MAY_IMPORT) - seen)}"
        seen |= free


def other_libraries(source: str) -> set[str]:
    """Return the packages that a file imports, at any depth of the file."""
    names = {node.module or "" for node in nodes(source) if isinstance(node, ast.ImportFrom) and node.level == 0}
    names |= {alias.name for node in nodes(source) if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in names}


def test_one_package_imports_mindspore() -> None:
    users = {path for path in both_packages() if "mindspore" in other_libraries(path.read_text(encoding="utf-8"))}
    assert users
    assert {path.parent for path in users} == {PACKAGE / "mindspore"}
    assert other_libraries("def f():\n    from mindspore.nn import Cell") == {"mindspore"}


def test_a_planted_import_is_found() -> None:
    assert import_violations("core", "from tessera.models import FAMILIES") == {"models"}
    assert import_violations("nn", "def f():\n    import tessera.training.trainer") == {"training"}
    assert import_violations("cli", "import tessera") == {"tessera"}
    assert import_violations("cli", "from tessera import __version__") == {"__version__"}
    assert not import_violations("models", "from tessera.nn.multimodal import MultimodalModel")


SLOW_TO_IMPORT = re.compile(
    r"^(?:from|import) (?:torch\.(?:_dynamo|_inductor|compiler|distributed\.pipelining)|transformers|sklearn|scipy)\b"
    r"|^[ \t]*@torch\.compiler\.",
    re.MULTILINE,
)


def test_what_is_slow_to_import_is_imported_where_it_is_used() -> None:
    """Every command and every process of a run would wait for it: the compiler takes longer than all of Tessera."""
    slow = {path for path in both_packages() if SLOW_TO_IMPORT.search(path.read_text(encoding="utf-8"))}
    assert slow == {PACKAGE / "ops" / "uncompiled.py"}
    assert SLOW_TO_IMPORT.search("import torch\nfrom torch.distributed.pipelining import PipelineStage\n")
    assert SLOW_TO_IMPORT.search("class A:\n    @torch.compiler.disable\n    def f(self): ...\n")


def test_device_words_live_in_two_files() -> None:
    # The copied API itself says cuda; these files translate its words to the device of this machine.
    of_cuda = ("script_device.py", "device_transfer.py", "transfer.py", "migration/fix.py")
    copied_api = {COMPAT / name for name in of_cuda}
    named_here = {PACKAGE / "runtime" / "device.py", PACKAGE / "runtime" / "npu.py"}
    others = [path for path in both_packages() if path not in {*named_here, *copied_api}]
    assert {str(path): words for path in others if (words := device_words(path.read_text(encoding="utf-8")))} == {}


def test_a_planted_device_word_is_found() -> None:
    for line in ("x = x.cuda()", 'device = "cuda:0"', "torch.npu.synchronize()", "backend='nccl'", "import torch_npu"):
        assert device_words(line), line
    assert not device_words('device = torch.device("cpu")')


def folders_that_import_each_other(folder: Path) -> set[tuple[str, str]]:
    """Return pairs of packages below a folder of which each imports from the other."""
    faces = {folder / "__main__.py", folder / "__init__.py"}  # above all folders: nothing inside imports them
    sources = [path for path in folder.rglob("*.py") if path not in faces]
    packages = {".".join(p.parent.relative_to(ROOT).parts) for p in sources if p.name == "__init__.py"}
    packages.add(folder.name)
    edges: set[tuple[str, str]] = set()
    for path in sources:
        here = ".".join(path.parent.relative_to(ROOT).parts)
        for node in nodes(path.read_text(encoding="utf-8")):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            while name and name not in packages:
                name = name.rpartition(".")[0]
            if name and name not in (here, "tessera"):  # `tessera.errors` is a file of the root
                edges.add((here, name))
    return {(a, b) for a, b in edges if a < b and (b, a) in edges}


def test_folders_import_in_one_direction() -> None:
    assert folders_that_import_each_other(PACKAGE) == set()
    assert folders_that_import_each_other(COMPAT) == set()


def top_level_names(source: str) -> dict[str, ast.stmt]:
    """Return the public functions, classes and constants that a module defines."""
    names: dict[str, ast.stmt] = {}
    for node in statements(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    return {name: node for name, node in names.items() if not name.startswith("_")}


def names_of_one_package(core: dict[str, str], others: dict[str, list[str]]) -> dict[str, set[str]]:
    """Return the names of contracts that fewer than two packages import, with the packages.

    `core`: the sources of the contracts by module; `others`: the sources of each package. A name that another contract
    uses is a part of it.
    """
    users: dict[tuple[str, str], set[str]] = {}
    for package, sources in others.items():
        for node in (node for source in sources for node in nodes(source) if isinstance(node, ast.ImportFrom)):
            for alias in node.names:
                users.setdefault((node.module or "", alias.name), set()).add(package)
    parts: set[str] = set()
    for source in core.values():
        for name, node in top_level_names(source).items():
            parts |= {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id != name}
    return {
        f"{module}.{name}": users.get((module, name), set())
        for module, source in core.items()
        for name in top_level_names(source)
        if len(users.get((module, name), ())) < 2 and name not in parts
    }


def test_every_contract_serves_two_packages() -> None:
    """A user's own code, as `tests/toys` has it, counts as a package, and so does `tessera_compat`."""
    core = {
        f"tessera.core.{path.stem}": path.read_text(encoding="utf-8") for path in (PACKAGE / "core").glob("[!_]*.py")
    }
    others: dict[str, list[str]] = {}
    for path in files():
        if package_of(path) != "core":
            others.setdefault(package_of(path), []).append(path.read_text(encoding="utf-8"))
    for folder in (COMPAT, ROOT / "tests" / "toys"):
        others[folder.name] = [path.read_text(encoding="utf-8") for path in folder.rglob("*.py")]
    assert names_of_one_package(core, others) == {}


def test_a_planted_contract_of_one_package_is_found() -> None:
    core = {"tessera.core.a": "class Part: ...\nclass Shared:\n    x: Part\nclass Lonely: ...\nLONELY = 1\n"}
    line = "from tessera.core.a import Shared, Lonely"
    assert names_of_one_package(core, {"nn": [line], "ops": ["from tessera.core.a import Shared"]}) == {
        "tessera.core.a.Lonely": {"nn"},
        "tessera.core.a.LONELY": set(),
    }


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules that each module imports, at any depth of the file and for types, too."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for node in nodes(source):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                graph[module] |= {name if name in sources else node.module for name in names}
            elif isinstance(node, ast.Import):
                graph[module] |= {alias.name for alias in node.names}
        graph[module] &= sources.keys() - {module}
    return graph


def files_in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that import themselves around a circle."""

    def below(module: str) -> set[str]:
        reached: set[str] = set()
        waiting = [module]
        while waiting:
            new = graph[waiting.pop()] - reached
            reached |= new
            waiting += new
        return reached

    return {module for module in graph if module in below(module)}


def test_no_files_import_each_other() -> None:
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert files_in_circles(import_graph(sources)) == set()


def test_a_planted_circle_of_files_is_found() -> None:
    sources = {
        "a": "import d",
        "b": "def f():\n    from d import c",
        "c": "if TYPE_CHECKING:\n    from b import x",
        "d": "from c import y",
    }
    assert files_in_circles(import_graph(sources)) == {"b", "c", "d"}
    assert files_in_circles(import_graph({"a": "import b", "b": "import os"})) == set()


def names_of_compat(source: str) -> list[str]:
    """Return the mentions of the second package: in imports, in strings for importlib, in comments."""
    return re.findall(r"\btessera_compat\b", source)


def test_the_library_never_names_the_package_that_stands_on_it() -> None:
    """It joins by the entry points of `tessera/config/extensions.py`."""
    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert [str(path) for path, source in sources.items() if names_of_compat(source)] == []


def test_a_planted_mention_of_the_second_package_is_found() -> None:
    for line in ("import tessera_compat", "from tessera_compat.run import main", "import_module('tessera_compat.run')"):
        assert names_of_compat(line), line
    assert not names_of_compat("from tessera.config.extensions import extensions")


def test_the_library_knows_no_other_trainer() -> None:
    """Names, files and flags of other trainers are in `tessera_compat`."""
    names = re.compile(r"megatron|mindspeed|mcore|swift|vllm", re.IGNORECASE)
    presets = {  # `parallel.backend: megatron` is a word of recipes
        PACKAGE / "config" / "parallel.py",
        PACKAGE / "parallel" / "make_plan.py",
    }
    others = [path for path in PACKAGE.rglob("*.py") if path not in presets]
    assert [str(path) for path in others if names.search(path.read_text(encoding="utf-8"))] == []


def test_parallel_names_no_modality() -> None:
    """Everything there works on the streams that a family declares."""
    words = re.compile(r"pixels|\bvision|image|audio|picture", re.IGNORECASE)
    texts = {path: path.read_text(encoding="utf-8") for path in (PACKAGE / "parallel").rglob("*.py")}
    assert {str(path): matches for path, text in texts.items() if (matches := words.findall(text))} == {}


def test_no_pickle_and_no_globals() -> None:
    bad = re.compile(
        r"^\s*(?:import pickle\b|from pickle\b|global )|torch\.(?:load|save)\(|allow_pickle=True", re.MULTILINE
    )
    between_processes = PACKAGE / "workers" / "messages.py"  # sockets of our own, never a file
    others = [path for path in both_packages() if path != between_processes]
    assert [str(path) for path in others if bad.search(path.read_text(encoding="utf-8"))] == []


def trusting_loads(source: str) -> list[str]:
    """Return the calls of `from_pretrained` that do not say: no code of the folder, and nothing from the network."""
    wanted = {"trust_remote_code": False, "local_files_only": True}
    calls = [
        node
        for node in nodes(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "from_pretrained"
    ]
    said = [{key.arg: key.value.value for key in c.keywords if isinstance(key.value, ast.Constant)} for c in calls]
    return [ast.unparse(c) for c, keys in zip(calls, said, strict=True) if not wanted.items() <= keys.items()]


def test_folders_are_loaded_without_their_code_and_without_the_network() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in both_packages()}
    assert {str(path): calls for path, source in sources.items() if (calls := trusting_loads(source))} == {}


def test_a_planted_trusting_load_is_found() -> None:
    assert trusting_loads("AutoTokenizer.from_pretrained(folder)")
    assert trusting_loads("AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)")
    assert not trusting_loads("x.from_pretrained(folder, trust_remote_code=False, local_files_only=True)")


PYTHON_OWN = {"_exit", "_current_frames", "_replace", "_asdict", "_fields", "_make"}  # of os, sys and named tuples


def own_private_names(sources: list[str]) -> set[str]:
    """Return the private names that some source gives to something: functions, attributes, fields, modules."""
    private_names: set[str] = set()
    for source in sources:
        for node in nodes(source):
            if isinstance(node, DEFINITIONS):
                private_names.add(node.name)
            elif isinstance(node, NAMES) and isinstance(node.ctx, ast.Store):
                private_names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in private_names if name.startswith("_")}


def private_symbols(source: str, ours: set[str]) -> list[str]:
    """Return private symbols of torch and transformers that a source imports or reads: those that nobody here gave."""

    def private(name: str) -> bool:
        return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))

    symbols: list[str] = []
    not_private = ours | PYTHON_OWN
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in nodes(source)
        if isinstance(node, IMPORTS)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).split(".")[0] in ("torch", "transformers")
    }
    for node in nodes(source):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node).split(".")[0] in modules:
            symbols.append(ast.unparse(node))  # also where an object of ours has an attribute of this name
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in not_private:
            symbols.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
            attribute = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            symbols += [attribute] if private(attribute) and attribute not in ours else []
        for name in names:
            root, *rest = name.split(".")
            symbols += [name] if root in ("torch", "transformers") and any(map(private, rest)) else []
    return symbols


def test_private_symbols_live_in_one_file() -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in both_packages()}
    del sources[PACKAGE / "runtime" / "torch_internals.py"]
    ours = own_private_names(list(sources.values()))
    assert {str(path): symbols for path, source in sources.items() if (symbols := private_symbols(source, ours))} == {}


def test_a_planted_private_symbol_is_found() -> None:
    for line in (
        "from torch._C import Graph",
        "from torch.distributed.distributed_c10d import _get_default_store",
        "import torch.utils._pytree",
        "x = torch._foreach_add_(a, 1)",
        "mesh['a', 'b']._flatten('c')",
        "class A(AdamW):\n    def step(self): self._init_group(1)",
        "getattr(module, '_no_split_modules', None)",
        "import torch.distributed as dist\ndist._mine()",
        "from torch.distributed import TCPStore\nTCPStore._mine",
    ):
        assert private_symbols(line, {"_mine"}), line
    assert not private_symbols("self._mine = other._mine; os._exit(1); from tessera.models._chat import x", {"_mine"})


# Attributes that objects of other libraries have or lack; objects of our own declare what they can do.
ASKED_BY_NAME = {
    ("runtime/process.py", "sched_getaffinity"): "os has it on Linux alone",
    ("runtime/torch_internals.py", "_no_split_modules"): "models of transformers",
    ("runtime/device.py", "pci_bus_id"): "properties of a device that not every backend of torch has",
    ("runtime/torch_internals.py", "_model_mapping"): "auto classes of transformers",
    ("config/values.py", "metadata"): "annotations of pydantic are a bound, or hold several",
    ("data/custom/rows.py", "sampler"): "a user's own batch sampler may have none inside",
    ("data/custom/rows.py", "generator"): "samplers of torch that draw at random have one",
    ("data/media/animation.py", "default_image"): "PNGs of Pillow",
    ("data/media/animation.py", "n_frames"): "formats of Pillow that hold several frames",
    ("data/media/files.py", "strerror"): "errors of PyAV that stand for errors of the system",
    ("models/transformers/library.py", "image_processor"): "processors of transformers",
    ("models/transformers/model.py", "sub_configs"): "configurations of transformers",
    ("models/transformers/model.py", "use_cache"): "configurations of transformers",
    ("models/transformers/model.py", "is_encoder_decoder"): "configurations of transformers",
    ("models/transformers/model.py", "get_decoder"): "classes of transformers",
    ("models/transformers/library.py", "chat_template"): "processors of transformers",
    ("models/transformers/processor.py", "image_processor"): "processors of transformers",
    ("models/transformers/processor.py", "tokenizer"): "processors of transformers",
    ("models/transformers/turns.py", "image_token"): "processors of transformers",
    ("optim/adamw.py", "found_inf"): "torch's gradient scaler sets it on optimizers and reads it by name",
    ("tasks/transformers.py", "logits"): "outputs of transformers",
    ("tasks/transformers.py", "encoder_last_hidden_state"): "outputs of transformers",
    ("inference/reference.py", "tokenizer"): "processors of transformers",
    ("inference/reference.py", "chat_template"): "processors of transformers",
    ("inference/reference.py", "architectures"): "configurations of transformers",
}


def attributes_asked_by_name(source: str) -> list[str]:
    """Return the names in `hasattr(x, "name")` and `getattr(x, "name", default)`, without Python's own protocols."""
    attributes: list[str] = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            optional = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
            if optional and isinstance(node.args[1], ast.Constant):
                attributes.append(str(node.args[1].value))
    return [name for name in attributes if not (name.startswith("__") and name.endswith("__"))]


def test_optional_abilities_are_declared_and_not_found_by_name() -> None:
    read = {
        (str(path.relative_to(PACKAGE)), name)
        for path in files()
        for name in attributes_asked_by_name(path.read_text(encoding="utf-8"))
    }
    assert read - ASKED_BY_NAME.keys() == set()


def test_a_planted_ability_is_found() -> None:
    assert attributes_asked_by_name("getattr(task, 'reference', None)") == ["reference"]
    assert attributes_asked_by_name("if hasattr(task, 'compile'): task.compile()") == ["compile"]
    assert not attributes_asked_by_name("getattr(section, name); getattr(x, 'shape'); hasattr(x, '__len__')")


def test_test_files_have_names_of_their_own() -> None:
    """Of two that share one, pytest imports the first and refuses the second, or a rank finds the wrong one."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if "toys" not in path.parts]
    assert sorted(name for name in names if names.count(name) > 1 and name != "__init__.py") == []


def test_the_trainer_stays_small_and_knows_no_axis_or_modality() -> None:
    text = (PACKAGE / "training" / "trainer.py").read_text(encoding="utf-8")
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


GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def named(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))


def test_contributing_names_every_package_in_the_order_of_imports() -> None:
    table = re.findall(r"^\| `tessera/(\w+)(?:\.py)?` \|", CONTRIBUTING.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(table) == sorted(MAY_IMPORT)
    for number, package in enumerate(table):
        assert MAY_IMPORT[package] <= set(table[:number]), package


def test_paths_that_contributing_names_exist() -> None:
    folders = "tessera|tessera_compat|tests|docs|bench"
    paths = [one for one in named(CONTRIBUTING) if re.fullmatch(rf"(?:{folders})/[\w./-]*", one)]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", [CONTRIBUTING, GLOSSARY], ids=lambda page: page.name)
def test_classes_that_a_page_names_exist(page: Path) -> None:
    classes = {
        node.name
        for path in both_packages()
        for node in nodes(path.read_text(encoding="utf-8"))
        if isinstance(node, ast.ClassDef)
    }
    mentioned = [one.split(".")[0] for one in named(page) if re.fullmatch(r"[A-Z][a-z]\w*[A-Z]?\w*(?:\.\w+)?", one)]
    assert len(mentioned) > 5
    assert [name for name in mentioned if name not in classes] == []


def test_no_two_public_classes_share_a_name() -> None:
    names: dict[str, list[str]] = {}
    for path in both_packages():
        for node in statements(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in names.items() if len(paths) > 1} == {}


def long_functions(source: str) -> dict[str, int]:
    """Return the functions of a source that are longer than allowed, by name and first line, with their lines."""
    lengths = {
        f"{node.name} in line {node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes(source)
        if isinstance(node, FUNCTIONS)
    }
    return {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES}


def test_a_planted_long_function_is_found() -> None:
    long = "def run():\n" + MAX_FUNCTION_LINES * "    pass\n"
    assert long_functions(f"class A:\n    def run(self): ...\n\n{long}\ndef end(): ...\n")
    assert not long_functions(long.removesuffix("    pass\n"))


@pytest.mark.parametrize("folder", [COMPAT, PACKAGE], ids=lambda folder: folder.name)
def test_files_and_functions_stay_short(folder: Path) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    assert {str(path) for path, source in sources.items() if len(source.splitlines()) > MAX_FILE_LINES} == set()
    assert {str(path): long for path, source in sources.items() if (long := long_functions(source))} == {}


NAMES_WITHOUT_CONTENT = {"found", "one", "made", "own", "known", "given", "kept", "left", "shown", "asked"}
MORE_IN_PACKAGES = {"told", "seen", "place"}


def names_without_content(source: str, refused: Set[str] = NAMES_WITHOUT_CONTENT) -> list[str]:
    """Return the variables, arguments, fields, functions and aliases whose names do not tell what they hold, with their
    lines. Loop variables of one-line comprehensions may be short."""
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    short = {
        id(name)
        for node in nodes(source)
        if isinstance(node, comprehensions) and node.lineno == node.end_lineno
        for generator in node.generators
        for name in ast.walk(generator.target)
    }
    names: list[tuple[str | None, ast.AST]] = []
    for node in nodes(source):
        if isinstance(node, NAMES) and isinstance(node.ctx, ast.Store):
            names.append((node.id if isinstance(node, ast.Name) else node.attr, node))
        elif isinstance(node, ast.arg):
            names.append((node.arg, node))
        elif isinstance(node, DEFINITIONS):
            names.append((node.name, node))
        elif isinstance(node, ast.alias):
            names.append((node.asname, node))
    return [
        f"{name} in line {getattr(node, 'lineno', 0)}"
        for name, node in names
        if name and name.lstrip("_") in refused and id(node) not in short
    ]


# Names that are written in files of users, and so stay as they are.
RECIPE_KEYS = {(PACKAGE / "diffusion" / "objectives" / "options.py", "given")}  # `train.task_options.given`


@pytest.mark.parametrize("folder", ["tessera", "tessera_compat", "tests", "bench", "recipes"])
def test_a_name_tells_what_it_holds(folder: str) -> None:
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    refused = NAMES_WITHOUT_CONTENT | (set() if folder == "tests" else MORE_IN_PACKAGES)
    names = {(path, name) for path, source in sources.items() for name in names_without_content(source, refused)}
    assert {(str(path), name) for path, name in names if (path, name.split()[0]) not in RECIPE_KEYS} == set()


def test_a_planted_name_without_content_is_found() -> None:
    for line in (
        "found = 1",
        "def f(given): ...",
        "self.kept = 2",
        "def _made(): ...",
        "from a import b as own",
        "for one in x:\n    print(one)",
        "f(key=lambda one: one)",
    ):
        assert names_without_content(line), line
    assert names_without_content("told = seen(place)", MORE_IN_PACKAGES)
    assert not names_without_content("[one for one in x if one]; adapters = found()")


def test_tests_that_the_makefile_names_exist() -> None:
    """A renamed file would end `make test` with "no tests ran" after the whole suite has passed."""
    named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert named
    for path, test in named:
        assert (ROOT / path).is_file(), path
        assert not test or f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), test


def defined_names(source: str) -> set[str]:
    """Return the names that a module has: what it defines, assigns or imports outside of functions and classes."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(statements(source))
    while waiting:
        node = waiting.pop()
        if isinstance(node, DEFINITIONS):
            names.add(node.name)
            continue
        if isinstance(node, IMPORTS):
            names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        waiting += ast.iter_child_nodes(node)
    return names


@functools.cache
def names_of_module(module: str) -> set[str] | None:
    """Return the names of one of our modules, submodules of a package included; None if there is no such module."""
    path = ROOT.joinpath(*module.split("."))
    if path.with_suffix(".py").is_file():
        return defined_names(path.with_suffix(".py").read_text(encoding="utf-8"))
    if not path.is_dir():
        return None
    inside = {one.stem if one.suffix == ".py" else one.name for one in path.iterdir()}
    init = path / "__init__.py"
    return inside | (defined_names(init.read_text(encoding="utf-8")) if init.is_file() else set())


OWN_IMPORT = re.compile(
    r"^[ \t]*(?:from (?:tessera|tests)[\w.]* import (?:\([^)]*\)|[^\n(#]*)|import (?:tessera|tests)[\w.]*)",
    re.MULTILINE,
)


def broken_imports(source: str) -> list[str]:
    """Return the imports of our packages and of `tests` that name a module or a symbol that does not exist."""
    broken: list[str] = []
    # Only these statements are parsed: walking whole trees takes many seconds.
    imports = [re.sub(r"(?:#[^\n]*)?\s+", " ", found).strip() for found in OWN_IMPORT.findall(source)]
    for node in ast.parse("\n".join(imports)).body:
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            wanted = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.split(".")[0] in ("tessera", "tessera_compat", "tests"):
                names = names_of_module(module)
                if names is None or (name not in ("", "*") and name not in names):
                    broken.append(f"{module}.{name}".rstrip("."))
    return broken


def python_sources() -> dict[str, str]:
    """Return all Python files by path, and the Python blocks of the docs that can be parsed by page and number."""
    sources = {}
    for folder in ("tessera", "tessera_compat", "tests", "bench", "recipes"):
        sources |= {str(path): path.read_text(encoding="utf-8") for path in (ROOT / folder).rglob("*.py")}
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        for number, block in enumerate(blocks):
            with contextlib.suppress(SyntaxError):  # a block may show a part of a statement
                ast.parse(block)
                sources[f"{page}, block {number}"] = block
    return sources


def test_imports_name_modules_and_symbols_that_exist() -> None:
    """The type checker reads no tests, and takes a module that was removed for one that is not installed."""
    sources = python_sources()
    assert len(sources) > 400
    assert {path: broken for path, source in sources.items() if (broken := broken_imports(source))} == {}


def test_a_planted_broken_import_is_found() -> None:
    for line in (
        "from tessera.training.trainer import NoSuchTrainer",
        "def f():\n    from tessera.training.no_such_module import Trainer",
        "import tessera.no_such_package",
        "from tessera_compat.megatron import no_such_module",
        "import tessera_compat.no_such_package",
        "from tests.toys import no_such_toy",
    ):
        assert broken_imports(line), line
    assert not broken_imports("import tessera.cli.main\nfrom tessera.training import trainer\nfrom torch import no")
