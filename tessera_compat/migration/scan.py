"""Find the code that the rules match in the syntax tree of a program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tessera_compat.migration.names import IMPORTERS, Program, Resolver, Scope
from tessera_compat.migration.rules import MigrationRule, RuleTable

# kinds of rules whose imports are reported; for other kinds only uses are reported
_REPORTED_IMPORTS = ("library", "source")
_PROSE_CALLS = frozenset(["print", "debug", "info", "warning", "warn", "error", "critical", "exception", "getLogger"])
_PROSE_NAMES = frozenset(["name", "title", "label", "color", "tag", "comment", "description", "help"])
_OF_PANDAS = ("unique", "nonzero")  # methods that pandas objects have, too
_SETTINGS = re.compile(r"(\w*_)?(args?|opts?|options?|cfg|conf|config|params|hparams|flags|settings)", re.IGNORECASE)


@dataclass(frozen=True)
class Match:
    """Store a node that a rule matches."""

    rule: MigrationRule
    operation: str  # what is reported: dotted name of a function or attribute, or a piece of the code
    node: ast.AST
    start: int
    end: int


@dataclass(frozen=True)
class Scanned:
    """Store what a scan of a program found: matches of rules, calls, and the function around each match."""

    program: Program
    matches: list[Match]
    calls: list[tuple[str, tuple[str, ...], int]]  # (calling function, names of the called one, line)
    inside: dict[ast.AST, str]  # node of a match -> dotted name of the function around it


class Scanner:
    """Walk over a tree with a stack, because recursion fails for deeply nested expressions."""

    def __init__(self, program: Program, resolver: Resolver, rules: RuleTable) -> None:
        self.program, self.resolver, self.rules = program, resolver, rules
        self.matches: list[Match] = []
        self.calls: list[tuple[str, tuple[str, ...], int]] = []
        self.inside: dict[ast.AST, str] = {}
        imported = {name.partition(".")[0] for names in program.imports.values() for name in names}
        self.uses_torch, self.uses_pandas = "torch" in imported, "pandas" in imported
        self.called: set[int] = set()  # ids of expressions that are called as functions
        # ids of called functions that are no match, because their arguments determine the size of the result
        self.sized: set[int] = set()
        self.tested: set[int] = set()  # ids of operands of tests, such as `args.cuda` in `if args.cuda:`

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
        self.tested.update(map(id, _tested(node)))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self._import(node)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            return self._name(node, scope)
        elif isinstance(node, ast.Attribute) and (names := self.resolver.names_of(node, scope)):
            self._first(names, node)  # the node is assigned to, as in torch.backends.cudnn.benchmark = True
            return iter(())
        elif isinstance(node, ast.Call):
            self.called.add(id(node.func))
            self._call(node, scope)
            if _last_name(node.func) in _PROSE_CALLS:
                return (child for child in children if not isinstance(child, ast.Constant))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and self._is_kernel(node, scope):
            return iter(node.decorator_list)
        elif isinstance(node, ast.keyword):
            self._keyword(node)
            if node.arg in _PROSE_NAMES and isinstance(node.value, ast.Constant):
                return iter(())
        elif isinstance(node, ast.Dict):
            return self._dict(node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            if all(_last_name(target) in _PROSE_NAMES for target in node.targets):
                return iter(node.targets)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return iter(())  # docstrings are not searched
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            self._string(node.value, node)
        elif isinstance(node, ast.JoinedStr):
            self._formatted(node)
            return (part for part in node.values if isinstance(part, ast.FormattedValue))
        elif isinstance(node, ast.Subscript) and self._selects(node, scope):
            self._add("index by comparison", "index by comparison", node)
        return children

    def _is_kernel(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> bool:
        """Return whether a function is a kernel of Triton. Only its decorator is reported, not its body."""
        makers = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
        return any(name.startswith("triton.") for maker in makers for name in self.resolver.names_of(maker, scope))

    def _add(self, name: str, operation: str, node: ast.AST) -> None:
        if rule := self.rules.by_name(name):
            self._match(rule, operation, node)

    def _match(self, rule: MigrationRule, operation: str, node: ast.AST) -> None:
        start = getattr(node, "lineno", 1)
        self.matches.append(Match(rule, operation, node, start, getattr(node, "end_lineno", start) or start))

    def _rule(self, name: str) -> MigrationRule | None:
        """Return the rule of a name; None if its rule is for a library, and this library is the analysed code."""
        rule = self.rules.by_name(name)
        is_itself = rule is not None and rule.kind == "library" and name.partition(".")[0] in self.resolver.modules
        return None if is_itself else rule

    def _first(self, names: tuple[str, ...], node: ast.AST) -> bool:
        """Match the first name that has a rule. Names that have to change take precedence over advice."""
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
        if id(node) in self.sized:
            return ast.iter_child_nodes(node)
        if self._first(names, node):
            return iter(())
        if isinstance(node, ast.Name):
            return iter(())
        is_object = not names or names[0].rpartition(".")[0] == scope.owner  # a class can inherit `self.x` from torch
        rule = self.rules.by_method(node.attr) if is_object else None
        # rules of kind `device` apply in any file, even without torch
        is_torchs = rule is not None and (self.uses_torch or rule.kind == "device")
        if rule is not None and is_torchs and not self._is_other_method(node, rule, scope):
            self._match(rule, f".{node.attr}", node)
        return iter((node.value,))

    def _is_other_method(self, node: ast.Attribute, rule: MigrationRule, scope: Scope) -> bool:
        """Return whether an attribute is not of torch, but of a class of the folder, of pandas or of settings."""
        if node.attr in _OF_PANDAS and self.uses_pandas:
            return True
        is_setting = id(node) in self.tested or _SETTINGS.fullmatch(_last_name(node.value)) is not None
        if rule.rewrite == "to_device" and id(node) not in self.called and is_setting:
            return True
        return self.resolver.defines(node.value, scope, node.attr)

    def _selects(self, node: ast.Subscript, scope: Scope) -> bool:
        """Return whether an expression reads elements by a boolean mask: `x[x > 0]`. The result has a dynamic size.

        An assignment to `x[x > 0]` changes no size, so the answer is False.
        """
        if not (isinstance(node.ctx, ast.Load) and self.uses_torch):
            return False
        values = self.resolver.values_of(node.slice, scope)
        is_mask = bool(values) and all(isinstance(value, ast.Compare) for value in values)
        return is_mask or _is_comparison(node.slice)

    def _call(self, node: ast.Call, scope: Scope) -> None:
        names = self.resolver.names_of(node.func, scope)
        if names:
            self.calls.append((scope.path, names, node.lineno))
        if _last_name(node.func) == "repeat_interleave" and _repeats_are_equal(node):
            self.sized.add(id(node.func))
        builtin = node.func.id if isinstance(node.func, ast.Name) and not names else ""
        first = node.args[0] if node.args else None
        if (builtin == "__import__" or any(name in IMPORTERS for name in names)) and isinstance(first, ast.Constant):
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

    def _dict(self, node: ast.Dict) -> Iterator[ast.AST]:
        """Yield the keys and values of a dict, except keys that are device names, and texts such as titles."""
        for key, value in zip(node.keys, node.values, strict=True):
            text = str(key.value) if isinstance(key, ast.Constant) else ""
            rule = self.rules.by_string(text)
            if key is not None and (rule is None or not rule.rewrite or ":" in text):
                yield key
            if not (text in _PROSE_NAMES and isinstance(value, ast.Constant)):
                yield value

    def _keyword(self, node: ast.keyword) -> None:
        if node.arg and (rule := self.rules.by_string(node.arg)) and rule.work == "line":
            # The keyword may name an environment variable: dict(os.environ, CUDA_VISIBLE_DEVICES="0").
            self._match(rule, node.arg, node)
        elif node.arg and isinstance(node.value, ast.Constant) and isinstance(node.value.value, (str, int)):
            text = f"{node.arg}={node.value.value}"
            if rule := self.rules.by_keyword(text):
                self._match(rule, text, node)

    def _formatted(self, node: ast.JoinedStr) -> None:
        """Match an f-string that formats a device with its index, such as f"device:{i}", by the text before the `{`."""
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and first.value.endswith(":"):
            rule = self.rules.by_string(first.value.rstrip(":"))
            if rule is not None:
                self._match(rule, f"f'{first.value}...'", node)


def _is_comparison(index: ast.expr) -> bool:
    """Return whether an index is a comparison, such as `x > 0` or `(x > 0) & (y < 1)`."""
    if isinstance(index, ast.BinOp) and isinstance(index.op, (ast.BitAnd, ast.BitOr)):
        return _is_comparison(index.left) or _is_comparison(index.right)
    return isinstance(index, ast.Compare)


def _repeats_are_equal(call: ast.Call) -> bool:
    """Return whether a call of repeat_interleave fixes the size of its result: constant repeats or `output_size`."""
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "repeats")]
    numbers = any(isinstance(value, ast.Constant) for value in values[:2])
    return numbers or any(keyword.arg == "output_size" for keyword in call.keywords)


def _last_name(node: ast.expr) -> str:
    """Return the last part of a name, such as `info` of `log.info`; empty for other expressions."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _tested(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a node tests for truth."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return node.values
    return [node.operand] if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else []


def _outside_ids(node: ast.AST) -> frozenset[int]:
    """Return the parts of a class or function that are evaluated in the scope around it."""
    parts = [*getattr(node, "decorator_list", []), *getattr(node, "bases", []), *getattr(node, "keywords", [])]
    parts += [part for name in ("args", "returns") if isinstance(part := getattr(node, name, None), ast.AST)]
    return frozenset(map(id, parts))
