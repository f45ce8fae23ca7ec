"""Find what the rules name in the tree of a program."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tessera_compat.migration.names import Program, Resolver, Scope
from tessera_compat.migration.rules import MigrationRule, RuleTable

_REPORTED_IMPORTS = ("library", "source")  # of other rules only the uses are reported
_IMPORTERS = ("importlib.import_module", "__import__")


@dataclass(frozen=True)
class Match:
    """Store a node that a rule matches."""

    rule: MigrationRule
    operation: str  # the dotted name, or what stands in the code
    node: ast.AST
    start: int
    end: int


@dataclass(frozen=True)
class Scanned:
    """Store the matches of a program, its calls, and the function around each node that matters."""

    program: Program
    matches: list[Match]
    calls: list[tuple[str, tuple[str, ...], int]]  # (calling function, names of the called one, line)
    inside: dict[ast.AST, str]  # node of a match -> dotted name of the function around it


class Scanner:
    """Walk over a tree with a stack: deeply nested expressions are no reason to fail."""

    def __init__(self, program: Program, resolver: Resolver, rules: RuleTable) -> None:
        self.program, self.resolver, self.rules = program, resolver, rules
        self.matches: list[Match] = []
        self.calls: list[tuple[str, tuple[str, ...], int]] = []
        self.inside: dict[ast.AST, str] = {}
        self.uses_torch = any(
            isinstance(node, (ast.Import, ast.ImportFrom)) and _imports_torch(node) for node in ast.walk(program.tree)
        )

    def run(self) -> Scanned:
        stack: list[tuple[ast.AST, Scope]] = [(self.program.tree, self.program.scope)]
        while stack:
            node, scope = stack.pop()
            before = len(self.matches)
            entered = self._visit(node, scope)
            for match in self.matches[before:]:
                self.inside[match.node] = scope.path
            inner = self.program.scopes.get(node, scope)
            outside = _outside_ids(node) if inner is not scope else frozenset()
            children = reversed(list(entered))
            stack.extend((child, scope if id(child) in outside else inner) for child in children)
        self.matches.sort(key=lambda match: (match.start, getattr(match.node, "col_offset", 0)))
        return Scanned(self.program, self.matches, self.calls, self.inside)

    def _visit(self, node: ast.AST, scope: Scope) -> Iterator[ast.AST]:
        """Match a node. Return the nodes below it that are still to be visited."""
        children = ast.iter_child_nodes(node)
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            return self._name(node, scope)
        elif isinstance(node, ast.Attribute) and (names := self.resolver.names_of(node, scope)):
            self._first(names, node)  # an assignment, such as that of torch.backends.cudnn.benchmark
            return iter(())
        elif isinstance(node, ast.Call):
            self._call(node, scope)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return iter(())  # a docstring
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._string(node.value, node)
        elif isinstance(node, ast.JoinedStr):
            self._formatted(node)
            return (part for part in node.values if isinstance(part, ast.FormattedValue))
        elif isinstance(node, ast.Subscript) and self.uses_torch and _is_mask(node.slice):
            self._add("index by comparison", "index by comparison", node)
        return children

    def _add(self, name: str, operation: str, node: ast.AST) -> None:
        if rule := self.rules.by_name(name):
            self._match(rule, operation, node)

    def _match(self, rule: MigrationRule, operation: str, node: ast.AST) -> None:
        start = getattr(node, "lineno", 1)
        self.matches.append(Match(rule, operation, node, start, getattr(node, "end_lineno", start) or start))

    def _rule(self, name: str) -> MigrationRule | None:
        """Return the rule of a name; None for modules of the analysed code, also if it is the library of a rule."""
        rule = self.rules.by_name(name)
        is_itself = rule is not None and rule.kind == "library" and name.partition(".")[0] in self.resolver.modules
        return None if is_itself else rule

    def _first(self, names: tuple[str, ...], node: ast.AST) -> bool:
        """Match the first name that has a rule; a name that has to change goes before advice."""
        rules = [(name, rule) for name in names if (rule := self._rule(name))]
        if rules:
            name, rule = min(rules, key=lambda pair: pair[1].work == "none")
            self._match(rule, name, node)
        return bool(rules)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        names = self.resolver.imported(self.program.imports[node])
        reported: set[int] = set()
        for name in names:
            rule = self._rule(name)
            if rule is not None and rule.kind in _REPORTED_IMPORTS and id(rule) not in reported:
                reported.add(id(rule))
                self._match(rule, name, node)

    def _name(self, node: ast.Attribute | ast.Name, scope: Scope) -> Iterator[ast.AST]:
        names = self.resolver.names_of(node, scope)
        if self._first(names, node):
            return iter(())
        if isinstance(node, ast.Name):
            return iter(())
        is_object = not names or names[0].rpartition(".")[0] == scope.owner  # an attribute of self may be torch's
        rule = self.rules.by_method(node.attr) if is_object else None
        if rule is not None and (self.uses_torch or rule.kind == "device"):  # its methods are torch's in any file
            self._match(rule, f".{node.attr}", node)
        return iter((node.value,))

    def _call(self, node: ast.Call, scope: Scope) -> None:
        names = self.resolver.names_of(node.func, scope)
        if names:
            self.calls.append((scope.path, names, node.lineno))
        builtin = node.func.id if isinstance(node.func, ast.Name) and not names else ""
        first = node.args[0] if node.args else None
        if (builtin == "__import__" or any(name in _IMPORTERS for name in names)) and isinstance(first, ast.Constant):
            rule = self.rules.by_name(str(first.value))
            if rule is not None and rule.kind in _REPORTED_IMPORTS:
                self._match(rule, str(first.value), node)
        elif builtin == "getattr" and len(node.args) > 1 and first is not None:
            if "torch" in self.resolver.names_of(first, scope):
                attribute = node.args[1]
                if isinstance(attribute, ast.Constant) and isinstance(attribute.value, str):
                    self._add(f"torch.{attribute.value}", f"torch.{attribute.value}", node)
                else:
                    self._add("getattr of torch", "getattr(torch, ...)", node)
        elif builtin in ("exec", "eval"):
            self._add("exec", builtin, node)
        elif "torch.where" in names and len(node.args) == 1 and not node.keywords:
            self._add("where with one argument", "torch.where", node)

    def _string(self, text: str, node: ast.AST) -> None:
        if rule := self.rules.by_string(text):
            self._match(rule, repr(text), node)

    def _formatted(self, node: ast.JoinedStr) -> None:
        """Match a device with an index, as the text before the first value."""
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.endswith(":"):
            rule = self.rules.by_string(first.value.rstrip(":"))
            if rule is not None:
                self._match(rule, f"f'{first.value}...'", node)


def _imports_torch(node: ast.Import | ast.ImportFrom) -> bool:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return any(name.partition(".")[0] == "torch" for name in names)


def _is_mask(index: ast.expr) -> bool:
    """Return whether an index is a comparison, such as `x > 0` or `(x > 0) & (y < 1)`."""
    if isinstance(index, ast.BinOp) and isinstance(index.op, (ast.BitAnd, ast.BitOr)):
        return _is_mask(index.left) or _is_mask(index.right)
    return isinstance(index, ast.Compare)


def _outside_ids(node: ast.AST) -> frozenset[int]:
    """Return the parts of a class or function that are evaluated in the scope around it."""
    parts = [*getattr(node, "decorator_list", []), *getattr(node, "bases", []), *getattr(node, "keywords", [])]
    parts += [part for name in ("args", "returns") if isinstance(part := getattr(node, name, None), ast.AST)]
    return frozenset(map(id, parts))
