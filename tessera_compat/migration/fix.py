"""Rewrite code that is bound to CUDA devices to torch's calls for any accelerator.

Only the text of the matched expressions changes, at the positions of the syntax tree: all other bytes of a file,
comments and formatting included, stay as they are.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tessera_compat.migration.names import Resolver, Scope
from tessera_compat.migration.scan import Match, Scanned

DEVICE = 'torch.accelerator.current_accelerator() or torch.device("cpu")'
_NAMES = ("ACCELERATOR", "TORCH_ACCELERATOR", "ACCELERATOR_OF_TORCH")
_INDEX = re.compile(r"rank|gpu|idx|index|device_id", re.IGNORECASE)
_DEVICE_KEYWORDS = ("device", "device_type", "map_location", "device_map", "default")
_GROUPS = ("torch.distributed.init_process_group", "torch.distributed.new_group")
_POSITIONAL_EVENT = "torch.cuda.Event"


@dataclass(frozen=True)
class Change:
    """Describe code that was rewritten, or that a rule could rewrite but that is not changed."""

    file: str
    start: int
    end: int
    operation: str  # INSERT, MODIFY or KEEP
    message: str


@dataclass(frozen=True)
class FixedFile:
    """Store the new text of a file and its changes."""

    name: str
    before: str
    after: str
    changes: list[Change]
    by_hand: frozenset[int] = frozenset()  # indices of matches that a rule could rewrite but that are not changed

    def diff(self) -> str:
        """Return a unified diff."""
        before, after = (re.findall(r"[^\n]*\n|[^\n]+\Z", text) for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, f"a/{self.name}", f"b/{self.name}")
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


class _ByHand(Exception):
    """Raised if a place cannot be rewritten. The message is the reason."""


def fix(scanned: Scanned, resolver: Resolver) -> FixedFile:
    """Rewrite a program. Places that cannot be rewritten are not changed, and are listed with the reason."""
    return _Fixer(scanned, resolver).run()


class _Fixer:
    def __init__(self, scanned: Scanned, resolver: Resolver) -> None:
        self.program, self.matches, self.resolver = scanned.program, scanned.matches, resolver
        self.text = self.program.file.text.encode("utf-8", "surrogatepass")
        self.starts = [0]
        for line in self.program.file.lines():
            self.starts.append(self.starts[-1] + len(line.encode("utf-8", "surrogatepass")))
        self.parents: dict[ast.AST, ast.AST] = {}
        self.edits: list[tuple[int, int, bytes]] = []
        self.changes: list[Change] = []
        self.needs_device = False
        self.device = self._device_name()

    def run(self) -> FixedFile:
        rewritable = [number for number, match in enumerate(self.matches) if match.rule.work == "fix"]
        name, before = self.program.file.name, self.program.file.text
        if not rewritable:
            return FixedFile(name, before, before, [])
        self.parents = {child: node for node in ast.walk(self.program.tree) for child in ast.iter_child_nodes(node)}
        by_hand = frozenset(number for number in rewritable if not self._rewrite(self.matches[number]))
        self._header()
        parts: list[bytes] = []  # parts of the new text, the last part of the file first
        rest = len(self.text)
        for start, end, replacement in sorted(self.edits, key=lambda edit: edit[:2], reverse=True):
            parts += [self.text[end:rest], replacement]
            rest = start
        after = b"".join([self.text[:rest], *reversed(parts)]).decode("utf-8", "surrogatepass")
        try:
            ast.parse(after)
        # unexpected: the result is not valid Python, so keep the original file
        except (SyntaxError, ValueError) as error:
            reason = f"the rewritten file would not parse: {error}"
            return FixedFile(name, before, before, [Change(name, 1, 1, "KEEP", reason)], frozenset(rewritable))
        return FixedFile(name, before, after, self.changes, by_hand)

    # ------------------------------------------------------------------------------------------ one place

    def _rewrite(self, match: Match) -> bool:
        """Collect the edits of a matched expression. Return whether the expression can be rewritten."""
        forms: Mapping[str, Callable[[ast.expr], list[tuple[int, int, str]]]] = {
            "to_device": self._to_device, "is_device": self._is_device, "device_text": self._device_text,
            "backend": self._backend, "autocast": self._autocast, "grad_scaler": self._grad_scaler,
        }  # fmt: skip
        node, rule = match.node, match.rule
        assert isinstance(node, ast.expr)
        name, needed = self.program.file.name, self.needs_device
        try:
            self._check(node)
            edits = self._renamed(node, match) if rule.rename else forms[rule.rewrite](node)
        except _ByHand as reason:
            self.needs_device = needed
            self.changes.append(Change(name, match.start, match.end, "KEEP", f"{match.operation}: {reason}"))
            return False
        self.edits += [(start, end, text.encode()) for start, end, text in edits]
        self.changes.append(Change(name, match.start, match.end, "MODIFY", f"{match.operation}: {rule.tip}"))
        return True

    def _check(self, node: ast.expr) -> None:
        """Raise if the text at the node's position is not the node, as in f-strings, or if `torch` is no module."""
        start, end = self._span(node)
        try:
            segment = ast.parse(b"(" + self.text[start:end] + b"\n)", mode="eval").body
        except (SyntaxError, ValueError):
            raise _ByHand("inside of an f-string") from None
        if ast.dump(segment) != ast.dump(node):
            raise _ByHand("inside of an f-string")
        scope = self._scope(node)
        torch = self.resolver.names_of(ast.Name("torch", ast.Load()), scope)
        if scope.find("torch") is not None and "torch" not in torch:
            raise _ByHand("the name torch is not the module there")

    def _renamed(self, node: ast.expr, match: Match) -> list[tuple[int, int, str]]:
        call = self.parents.get(node)
        positional = isinstance(call, ast.Call) and call.func is node and call.args
        if match.operation == _POSITIONAL_EVENT and positional:
            raise _ByHand("name its arguments: torch.Event(enable_timing=...)")
        start, end = self._span(node)
        return [(start, end, match.rule.rename)]

    def _to_device(self, node: ast.expr) -> list[tuple[int, int, str]]:
        call = self._call_of(node)
        _, end = self._span(node)
        edits = [(end - len("cuda"), end, "to")]
        keyword = next((one.value for one in call.keywords if one.arg == "device"), None)
        device = call.args[0] if call.args else keyword
        if len(call.args) > 1:
            at = self._span(call.args[1])[0]
            edits.append((at, at, "non_blocking="))
        if device is None:
            more = ", " if call.keywords else ""
            return [*edits, (*self._opening(call), f"{self._use_device()}{more}")]
        if isinstance(device, ast.Constant) and device.value is None:
            raise _ByHand("None is the current device: write .to(device)")
        start, end = self._span(device)
        is_number = isinstance(device, ast.Constant) and isinstance(device.value, int)
        is_index = isinstance(device, (ast.Name, ast.Attribute)) and _INDEX.search(ast.unparse(device).split(".")[-1])
        if is_number or is_index:
            edits += [(start, start, f"torch.device({self._use_device()}.type, "), (end, end, ")")]
        if call.args and "storage" in ast.unparse(node):
            edits.append((start, start, "device="))  # methods of torch's storages take the device as a keyword argument
        return edits

    def _is_device(self, node: ast.expr) -> list[tuple[int, int, str]]:
        start, end = self._span(node)
        return [(start, start, "("), (end - len("is_cuda"), end, 'device.type != "cpu")')]

    def _device_text(self, node: ast.expr) -> list[tuple[int, int, str]]:
        if not self._is_device_place(node):
            raise _ByHand("a text that may not name a device")
        start, end = self._span(node)
        source = self.text[start:end].decode()
        if isinstance(node, ast.JoinedStr):
            if not (match := re.match(r"([fF]|[fF][rR]|[rR][fF])(['\"]{3}|['\"])(?=cuda:)", source)):
                raise _ByHand("a text of several parts")
            at = start + match.end()
            return [(at, at + len("cuda"), f"{{{self._use_device()}.type}}")]
        if not (match := re.fullmatch(r"[rRuU]?(['\"]{3}|['\"])cuda(:.*)?\1", source, re.DOTALL)):
            raise _ByHand("a text of several parts")
        if self._formatting(node) is not node:
            device = f"{self._use_device()}.type"
            return [(start, end, f"({device} + {match[1]}{match[2]}{match[1]})")]
        if match[2] and not match[2][1:].isdecimal():
            raise _ByHand("a text of several parts")
        if isinstance(parent := self.parents.get(node), ast.Compare) and not match[2]:
            return self._compared(node, parent)
        device = f"{self._use_device()}.type"
        return [(start, end, f'f"{{{device}}}{match[2]}"' if match[2] else device)]

    def _formatting(self, node: ast.expr) -> ast.expr:
        """Return the expression that formats the text `node`, such as `"cuda:%d" % rank`; without one, the node."""
        parent = self.parents.get(node)
        if isinstance(parent, ast.BinOp) and parent.left is node:
            return parent
        if isinstance(parent, ast.Attribute) and parent.attr == "format":
            call = self.parents.get(parent)
            return call if isinstance(call, ast.Call) and call.func is parent else node
        return node

    def _compared(self, node: ast.expr, parent: ast.Compare) -> list[tuple[int, int, str]]:
        """Rewrite a comparison with "cuda", so that it is true for any accelerator. On a CPU nothing changes."""
        if len(parent.ops) != 1:
            raise _ByHand("a comparison of several parts")
        device = f"{self._use_device()}.type"
        first, last = self._span(parent)
        if isinstance(parent.ops[0], ast.Eq) and node is not parent.left:
            return [(*self._span(node), f'{device} != "cpu"')]
        is_other = isinstance(parent.ops[0], (ast.NotEq, ast.NotIn))
        guard = f'{device} == "cpu" or' if is_other else f'{device} != "cpu" and'
        return [(first, first, f"({guard} "), (*self._span(node), device), (last, last, ")")]

    def _backend(self, node: ast.expr) -> list[tuple[int, int, str]]:
        parent = self.parents.get(node)
        call = self.parents.get(parent) if isinstance(parent, ast.keyword) else parent
        names = self.resolver.names_of(call.func, self._scope(call)) if isinstance(call, ast.Call) else ()
        if not any(name in names for name in _GROUPS):
            raise _ByHand("write the backend of the device, such as hccl")
        start, end = self._span(node)
        return [(start, end, f"torch.distributed.get_default_backend_for_device({self._use_device()})")]

    def _autocast(self, node: ast.expr) -> list[tuple[int, int, str]]:
        call = self._call_of(node)
        edits = [(*self._span(node), "torch.autocast")]
        for name, argument in zip(("enabled", "dtype", "cache_enabled"), call.args, strict=False):
            at = self._span(argument)[0]
            edits.append((at, at, f"{name}="))
        return [*edits, self._first_argument(call)]

    def _grad_scaler(self, node: ast.expr) -> list[tuple[int, int, str]]:
        call = self._call_of(node)
        return [(*self._span(node), "torch.amp.GradScaler"), self._first_argument(call)]

    # ------------------------------------------------------------------------------------------ positions

    def _span(self, node: ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _scope(self, node: ast.AST) -> Scope:
        while node not in self.program.scopes:
            node = self.parents[node]
        return self.program.scopes[node]

    def _call_of(self, node: ast.expr) -> ast.Call:
        call = self.parents.get(node)
        if not isinstance(call, ast.Call) or call.func is not node:
            raise _ByHand("not called there")
        if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
            raise _ByHand("its arguments contain * or **")
        return call

    def _opening(self, call: ast.Call) -> tuple[int, int]:
        """Return the position after the opening parenthesis of a call, as an empty span."""
        _, end = self._span(call.func)
        blanks = re.match(rb"\s*\(", self.text[end:])
        if blanks is None:
            raise _ByHand("its parenthesis does not follow its name directly")
        return end + blanks.end(), end + blanks.end()

    def _first_argument(self, call: ast.Call) -> tuple[int, int, str]:
        more = ", " if call.args or call.keywords else ""
        return (*self._opening(call), f"{self._use_device()}.type{more}")

    def _is_device_place(self, node: ast.expr) -> bool:
        """Return whether a text is used as a device: passed as one, compared with one, or assigned to one."""
        node = self._formatting(node)
        parent = self.parents.get(node)
        if isinstance(parent, ast.IfExp) and parent.test is not node:
            return self._is_device_place(parent)
        if isinstance(parent, ast.keyword):
            return parent.arg in _DEVICE_KEYWORDS
        if isinstance(parent, ast.Call):
            names = self.resolver.names_of(parent.func, self._scope(parent))
            is_method = isinstance(parent.func, ast.Attribute) and parent.func.attr in ("to", "cuda", "autocast")
            return is_method or any(name.startswith("torch.") for name in names)
        if isinstance(parent, ast.Compare):
            return any(re.search("device|type", ast.unparse(one)) for one in (parent.left, *parent.comparators))
        if isinstance(parent, (ast.Assign, ast.AnnAssign)):
            targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
            return any("device" in ast.unparse(target).lower() for target in targets)
        if isinstance(parent, ast.arguments):
            positional = [*parent.posonlyargs, *parent.args]
            defaults = zip(positional[len(positional) - len(parent.defaults) :], parent.defaults, strict=True)
            pairs = [*defaults, *zip(parent.kwonlyargs, parent.kw_defaults, strict=True)]
            return any(value is node and "device" in argument.arg for argument, value in pairs)
        return False

    # ------------------------------------------------------------------------------------------ the new constant

    def _use_device(self) -> str:
        self.needs_device = True
        return self.device

    def _device_name(self) -> str:
        """Return the name of the device constant: that of an earlier rewrite, or a name that the file does not use."""
        source = self.program.file.text
        earlier = re.search(rf"^(\w+) = {re.escape(DEVICE)}$", source, re.MULTILINE)
        free = (name for name in _NAMES if not re.search(rf"\b{name}\b", source))
        return earlier[1] if earlier else next(free, f"ACCELERATOR_{len(source)}")

    def _header(self) -> None:
        """Insert `import torch` and the device constant after the first imports, if the changes need them."""
        if not self.edits:
            return
        body = self.program.tree.body
        count = next((at for at, node in enumerate(body) if not _is_head(node)), len(body))
        line = max([getattr(node, "end_lineno", 0) or 0 for node in body[:count]], default=0)
        if not count:
            line = min(part.lineno for part in (body[0], *getattr(body[0], "decorator_list", ()))) - 1
        for node in body:  # do not insert inside of a statement of several lines
            if node.lineno <= line < (node.end_lineno or 0):
                line = node.end_lineno or line
        imported = any(isinstance(node, ast.Import) and _binds_torch(node) for node in body[:count])
        constant = f"{self.device} = {DEVICE}"
        lines = [] if imported else ["import torch"]
        if self.needs_device and constant not in self.program.file.text:
            lines += ["", constant]
        elif not imported and "torch" in self.program.scope.bindings:
            lines = []  # the file imports torch further down, before any function runs
        if not lines:
            return
        newline = "\r\n" if b"\r\n" in self.text else "\n"
        at = self.starts[min(line, len(self.starts) - 1)]
        before = "" if not at or self.text[:at].endswith((b"\n", b"\r")) else newline
        self.edits.append((at, at, (before + newline.join(lines) + newline).encode()))
        self.changes.append(Change(self.program.file.name, line + 1, line + len(lines), "INSERT", lines[-1]))


def _is_head(node: ast.stmt) -> bool:
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, (ast.Import, ast.ImportFrom))


def _binds_torch(node: ast.Import) -> bool:
    return any(alias.name.partition(".")[0] == "torch" and not alias.asname for alias in node.names)
