"""Resolve the names of a program to dotted names, such as `torch.nn.DataParallel`, without running it.

Imports with other names, imports from a module, assignments of a name to another one and re-exports by modules of the
same folder are followed. A name may resolve to several dotted names: `try: import a except ImportError: a = None`.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tessera_compat.migration.sources import SourceFile

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
SCOPES = (*FUNCTIONS, *COMPREHENSIONS, ast.ClassDef)
IMPORTERS = ("importlib.import_module", "__import__")
# types of assigned values that are resolved; a name with a value of another type is unknown
_FOLLOWED = (ast.Name, ast.Attribute, ast.Call, ast.Compare)
MAX_NAMES = 60  # maximum number of dotted names of an expression, with the names from re-exports
_Visited = set[tuple[int, str]]  # (id of the scope, name) of the lookups for an expression


@dataclass
class Scope:
    """Hold the names that a module, class or function binds."""

    parent: Scope | None = None
    is_class: bool = False
    path: str = ""  # dotted name of the module, class or function
    owner: str = ""  # dotted name of the class that contains the function
    # What a name is bound to: a dotted name, an expression, or None if it is unknown.
    bindings: dict[str, list[str | ast.expr | None]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)  # modules of `from module import *`

    def bind(self, name: str, value: str | ast.expr | None) -> None:
        self.bindings.setdefault(name, []).append(value)

    def find(self, name: str) -> Scope | None:
        """Return the scope that binds a name, as Python looks it up; None if no scope binds it."""
        if name in self.bindings:
            return self
        scope = self.parent
        while scope is not None:
            if name in scope.bindings and not scope.is_class:
                return scope
            scope = scope.parent
        return None

    def root(self) -> Scope:
        return self if self.parent is None else self.parent.root()


@dataclass
class Program:
    """Hold the parsed tree of a file with the scopes of its nodes."""

    file: SourceFile
    tree: ast.Module
    modules: tuple[str, ...]  # dotted names under which other files import it; the first is its own name
    scopes: dict[ast.AST, Scope]
    imports: dict[ast.AST, list[str]]  # import statement -> dotted names

    @property
    def scope(self) -> Scope:
        return self.scopes[self.tree]


def module_names(file: Path, root: Path) -> tuple[str, ...]:
    """Return the dotted names of a file: relative to the folder that contains its top package, and to `root`."""
    folder = file.absolute().parent
    while (folder / "__init__.py").is_file() and folder.parent != folder:
        folder = folder.parent
    names = []
    for base in (folder, root.absolute()):
        if file.absolute().is_relative_to(base):
            parts = list(file.absolute().relative_to(base).with_suffix("").parts)
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return tuple(dict.fromkeys(name for name in names if name))


def parse(file: SourceFile, root: Path) -> Program:
    """Parse a file and collect the bindings of its scopes. Raise SyntaxError, ValueError or RecursionError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ignore warnings about invalid escapes in strings
        tree = ast.parse(file.text, filename=file.name)
    modules = module_names(file.path, root) if file.kind == "python" else ()
    is_package = file.path.name == "__init__.py"
    own_path = modules[0] if modules else f"<{file.name}>"
    collector = _Collector(own_path, own_path if is_package else own_path.rpartition(".")[0])
    scope = Scope(path=own_path)
    collector.scopes[tree] = scope
    collector.collect(tree.body, scope)
    return Program(file, tree, modules, collector.scopes, collector.imports)


class _Collector:
    """Collect the bindings of all scopes of a module."""

    def __init__(self, module: str, package: str) -> None:
        self.module, self.package = module, package
        self.scopes: dict[ast.AST, Scope] = {}
        self.imports: dict[ast.AST, list[str]] = {}

    def collect(self, nodes: Iterable[ast.AST], scope: Scope) -> None:
        """Collect the bindings of nodes without entering classes and functions; then enter those."""
        inner: list[ast.AST] = []
        stack = list(nodes)
        while stack:
            node = stack.pop()
            self._bind(node, scope)
            if isinstance(node, SCOPES):
                inner.append(node)
                stack.extend(_evaluated_outside(node))
            else:
                stack.extend(ast.iter_child_nodes(node))
        for node in inner:
            self._enter(node, scope)

    def _enter(self, node: ast.AST, scope: Scope) -> None:
        name = getattr(node, "name", "")
        path = f"{scope.path}.{name}" if name else scope.path
        owner = path if isinstance(node, ast.ClassDef) else scope.path if scope.is_class else scope.owner
        child = Scope(scope, isinstance(node, ast.ClassDef), path, owner)
        self.scopes[node] = child
        if isinstance(node, FUNCTIONS):
            arguments = node.args
            for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                child.bind(argument.arg, None)
            for argument in filter(None, (arguments.vararg, arguments.kwarg)):
                child.bind(argument.arg, None)
        if isinstance(node, COMPREHENSIONS):
            self.collect(ast.iter_child_nodes(node), child)
        else:
            body = node.body if isinstance(node, (*FUNCTIONS, ast.ClassDef)) else []
            self.collect(body if isinstance(body, list) else [body], child)

    def _bind(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Import):
            self.imports[node] = [alias.name for alias in node.names]
            for alias in node.names:
                scope.bind(alias.asname or alias.name.partition(".")[0],
                           alias.name if alias.asname else alias.name.partition(".")[0])  # fmt: skip
        elif isinstance(node, ast.ImportFrom):
            module = self._absolute(node)
            self.imports[node] = [f"{module}.{alias.name}".removesuffix(".*") for alias in node.names]
            for alias in node.names:
                if alias.name == "*":
                    scope.stars.append(module)
                else:
                    scope.bind(alias.asname or alias.name, f"{module}.{alias.name}")
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            scope.bind(node.targets[0].id, node.value if isinstance(node.value, _FOLLOWED) else None)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            scope.bindings.setdefault(node.id, [])  # an assignment with one target was bound above
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            scope.bind(node.name, f"{scope.path}.{node.name}")
        elif isinstance(node, ast.ExceptHandler) and node.name:
            scope.bind(node.name, None)
        elif isinstance(node, ast.Global):
            for name in node.names:
                scope.bindings.pop(name, None)

    def _absolute(self, node: ast.ImportFrom) -> str:
        """Return the dotted name of the module of `from ... import`."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".") if self.package else []
        parts = parts[: len(parts) - (node.level - 1)]
        return ".".join([*parts, *filter(None, [node.module])])


def _evaluated_outside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a class or function that are evaluated in the scope around it."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        yield from node.decorator_list
        yield from (node.args, *filter(None, [node.returns]))
    elif isinstance(node, ast.Lambda):
        yield node.args
    elif isinstance(node, ast.ClassDef):
        yield from (*node.decorator_list, *node.bases, *node.keywords)


class Resolver:
    """Resolve expressions to dotted names, over all programs of a folder."""

    def __init__(self, programs: Iterable[Program]) -> None:
        programs = list(programs)
        self.modules = {name: program.scope for program in programs for name in program.modules}
        scopes = (scope for program in programs for scope in program.scopes.values())
        self._classes = {scope.path: scope for scope in scopes if scope.is_class}

    def names_of(self, node: ast.expr, scope: Scope) -> tuple[str, ...]:
        """Return the dotted names of an expression, and the original names of those that the folder re-exports."""
        visited: _Visited = set()
        return tuple(dict.fromkeys(self._expand(self._local(node, scope, visited), visited)))

    def imported(self, names: list[str]) -> tuple[str, ...]:
        """Return the dotted names that an import statement imports.

        If a file of the scanned folder only re-exports one of them, its original name follows it.
        """
        return tuple(dict.fromkeys(self._expand(names, set())))

    def values_of(self, node: ast.expr, scope: Scope) -> list[str | ast.expr | None]:
        """Return the values that the name `node` is bound to; an empty list if it is not a name, or not bound."""
        holder = scope.find(node.id) if isinstance(node, ast.Name) else None
        return holder.bindings[node.id] if holder is not None and isinstance(node, ast.Name) else []

    def defines(self, node: ast.expr, scope: Scope, attribute: str) -> bool:
        """Return whether `node` is an object of a class of the folder, and that class itself defines the attribute."""
        makers = [node] if isinstance(node, ast.Call) else self.values_of(node, scope)
        return any(
            isinstance(maker, ast.Call)
            and any(
                attribute in self._classes[name].bindings
                for name in self.names_of(maker.func, scope)
                if name in self._classes
            )
            for maker in makers
        )

    def _local(self, node: ast.expr, scope: Scope, visited: _Visited) -> list[str]:
        attributes: list[str] = []
        while True:
            if isinstance(node, ast.Attribute):
                attributes.append(node.attr)
                node = node.value
            elif (attribute := constant_attribute(node)) is not None:
                attributes.append(attribute[1])
                node = attribute[0]
            else:
                break
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = [*self._local(node.func, scope, visited), getattr(node.func, "id", "")]
            imported = any(name in IMPORTERS for name in called)  # such as importlib.import_module("torch")
            return [".".join([str(node.args[0].value), *reversed(attributes)])] if imported else []
        if not isinstance(node, ast.Name):
            return []
        tail = "".join(f".{name}" for name in reversed(attributes))
        if node.id in ("self", "cls") and scope.owner and len(attributes) == 1:
            return [scope.owner + tail]
        return [base + tail for base in self._bound(node.id, scope, visited)]

    def _bound(self, name: str, scope: Scope, visited: _Visited) -> list[str]:
        holder = scope.find(name)
        if holder is None:
            names = [f"{module}.{name}" for module in scope.root().stars]
            # An unbound name `torch` is the module: `import *` or code that is not analysed imports it.
            return [*names, "torch"] if name == "torch" else names
        if (id(holder), name) in visited:  # two names that are bound to each other form a cycle
            return []
        visited.add((id(holder), name))
        bases: list[str] = []
        for value in holder.bindings[name]:
            if isinstance(value, ast.expr):
                # `x = x.y` inside of a function would resolve to itself: look in the scope around it.
                start = holder.parent if _root_name(value) == name else holder
                bases += self._local(value, start, visited) if start is not None else []
            elif value is not None:
                bases.append(value)
        return bases

    def _expand(self, names: list[str], visited: _Visited) -> Iterator[str]:
        """Yield dotted names, and the original names of those that modules of the folder re-export."""
        waiting = list(reversed(names))
        for _ in range(MAX_NAMES):
            if not waiting:
                return
            name = waiting.pop()
            yield name
            waiting += reversed([one for one in self._sources(name, visited) if one != name])

    def _sources(self, dotted: str, visited: _Visited) -> list[str]:
        """Return the dotted names that `dotted`, a name in a module of the folder, is bound to."""
        parts = dotted.split(".")
        for size in range(len(parts) - 1, 0, -1):
            scope = self.modules.get(".".join(parts[:size]))
            if scope is None:
                continue
            tail = "".join(f".{part}" for part in parts[size + 1 :])
            if parts[size] in scope.bindings:
                return [base + tail for base in self._bound(parts[size], scope, visited)]
            return [f"{module}.{parts[size]}{tail}" for module in scope.stars]
        return []


def constant_attribute(node: ast.expr) -> tuple[ast.expr, str] | None:
    """Return the object and the name of `getattr(object, "name")`; None for all other expressions."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"):
        return None
    name = node.args[1].value if len(node.args) == 2 and isinstance(node.args[1], ast.Constant) else None
    return (node.args[0], name) if isinstance(name, str) else None


def _root_name(node: ast.expr) -> str:
    while isinstance(node, ast.Attribute) or constant_attribute(node) is not None:
        attribute = constant_attribute(node)
        node = node.value if isinstance(node, ast.Attribute) else attribute[0] if attribute else node
    return node.id if isinstance(node, ast.Name) else ""
