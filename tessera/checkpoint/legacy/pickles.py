"""Decode a pickle without creating its objects: no class is imported and no function is called.

`describe` interprets the opcodes that `pickletools` decodes. Containers and scalars become Python values. An object
becomes a `Described` with the name of its class, its arguments and its state. A name that the caller does not allow
raises an error, so that a malicious file cannot run code.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import TesseraError

# Limits of the memory that a pickle may use. Tensor data is not part of the pickle.
LARGEST_PICKLE = 256 << 20
MOST_OPCODES = 20_000_000
MOST_CHOSEN_KEYS = 1000
_SMALL = 1 << 20  # integer keys below this do not count for MOST_CHOSEN_KEYS: optimizers have parameter indices as keys
_LONGEST_KEY = 64  # maximum number of elements of a tuple, or of bits of a number, as a dictionary key
_MARK = object()
_PUSHED = frozenset(
    (
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    )
)
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "EMPTY_SET": set}
_FIXED_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True)
class Name:
    """Hold the module and name of a class or function, which is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Described:
    """Describe a pickled object: the class or function, its arguments, state, items and elements."""

    name: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)
    new: bool = False
    """Whether pickle would create the object by `__new__` instead of a call."""


@dataclass(frozen=True)
class PersistentId:
    """Refer to data outside of the pickle, such as the bytes of a tensor."""

    value: Any


def describe(data: bytes, allowed: Callable[[Name], bool], where: str) -> Any:
    """Decode a pickle. `allowed` returns whether the pickle is permitted to refer to a class or function."""
    if len(data) > LARGEST_PICKLE:
        raise TesseraError(
            f"the pickle has {len(data):,} bytes; the limit is {LARGEST_PICKLE:,}",
            where=where,
            code="checkpoint.pickle-too-large",
        )
    return describe_next(io.BytesIO(data), allowed, where)


def describe_next(stream: io.BytesIO, allowed: Callable[[Name], bool], where: str) -> Any:
    """Decode the pickle at the position of a stream, and leave the position after its end."""
    machine = _Machine(allowed, where)
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(stream)):
            if opcode.name == "STOP":
                return machine.result()
            if number == MOST_OPCODES:
                raise TesseraError(
                    f"the pickle has more than {MOST_OPCODES:,} opcodes",
                    where=where,
                    code="checkpoint.pickle-too-large",
                )
            machine.step(opcode.name, argument, position)
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError, RecursionError) as error:
        raise TesseraError(f"the pickle is damaged: {error}", where=where, code="checkpoint.damaged-pickle") from None
    raise TesseraError("the pickle is damaged: it has no end", where=where, code="checkpoint.damaged-pickle")


class _Machine:
    """Interpret pickle opcodes with a stack and a memo, like the pickle virtual machine."""

    def __init__(self, allowed: Callable[[Name], bool], where: str) -> None:
        self.allowed, self.where = allowed, where
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.keys = Keys()

    def result(self) -> Any:
        (value,) = self.stack
        if value is _MARK:
            raise ValueError("the stack ends with a mark")
        return value

    def step(self, opcode: str, argument: Any, position: int | None) -> None:
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case _ if opcode in _PUSHED:
                self.stack.append(argument)
            case _ if opcode in _CONSTANTS:
                self.stack.append(_CONSTANTS[opcode])
            case _ if opcode in _EMPTY:
                self.stack.append(_EMPTY[opcode]())
            case _ if opcode in _FIXED_TUPLES:
                self.stack.append(tuple(reversed([self.pop() for _ in range(_FIXED_TUPLES[opcode])])))
            case "MARK":
                self.stack.append(_MARK)
            case "POP":
                self.stack.pop()
            case "POP_MARK":
                self.pop_to_mark()
            case "DUP":
                self.stack.append(self.top())
            case "TUPLE":
                self.stack.append(tuple(self.pop_to_mark()))
            case "LIST":
                self.stack.append(self.pop_to_mark())
            case "DICT":
                self.stack.append(self.keys.dictionary(self.pop_to_mark()))
            case "FROZENSET":
                self.stack.append(frozenset(map(self.keys, self.pop_to_mark())))
            case "APPEND":
                self.extend([self.pop()])
            case "APPENDS" | "ADDITEMS":
                self.extend(self.pop_to_mark())
            case "SETITEM":
                value, key = self.pop(), self.pop()
                self.update(self.keys.dictionary([key, value]))
            case "SETITEMS":
                self.update(self.keys.dictionary(self.pop_to_mark()))
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.put(argument)
            case "MEMOIZE":
                self.put(len(self.memo))
            case "GET" | "BINGET" | "LONG_BINGET":
                self.stack.append(self.memo[argument])
            case "GLOBAL":
                self.push_name(*argument.partition(" ")[::2])
            case "STACK_GLOBAL":
                name, module = self.pop(), self.pop()
                self.push_name(module, name)
            case "REDUCE":
                self.call()
            case "NEWOBJ":
                self.call(new=True)
            case "NEWOBJ_EX":
                keywords = self.pop()
                self.call(new=True)
                self.update(keywords)
            case "BUILD":
                self.set_state(self.pop())
            case "BINPERSID":
                self.stack.append(PersistentId(self.pop()))
            case _:
                raise TesseraError(
                    f"the pickle uses the opcode {opcode} at byte {position}, which is not allowed",
                    where=self.where,
                    code="checkpoint.forbidden-pickle",
                )

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value belongs")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Pop all values above the last mark, and the mark; return the values."""
        for index in range(len(self.stack) - 1, -1, -1):
            if self.stack[index] is _MARK:
                values = self.stack[index + 1 :]
                del self.stack[index:]
                return values
        raise ValueError("a mark is missing")

    def top(self) -> Any:
        value = self.stack[-1]
        if value is _MARK:
            raise ValueError("a mark where a value belongs")
        return value

    def extend(self, values: list[Any]) -> None:
        """Append values to the list, the set or the description on top of the stack."""
        target = self.top()
        if isinstance(target, list):
            target.extend(values)
        elif isinstance(target, set):
            target.update(map(self.keys, values))
        elif isinstance(target, Described):
            target.elements.extend(values)
        else:
            raise ValueError("elements are appended to a value that is not a list")

    def update(self, items: Any) -> None:
        """Set items of the dictionary or the description on top of the stack."""
        target = self.top()
        if not isinstance(target, (dict, Described)) or not isinstance(items, dict):
            raise ValueError("items are set on a value that is not a dictionary")
        (target.items if isinstance(target, Described) else target).update(items)

    def put(self, argument: int) -> None:
        if not 0 <= argument < MOST_OPCODES:  # larger numbers could have equal hashes, which makes dictionaries slow
            raise ValueError("a memo index above the limit")
        self.memo[argument] = self.top()

    def push_name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is not a string")
        full_name = Name(module, name)
        if not self.allowed(full_name):
            raise TesseraError(
                f"the pickle refers to {full_name}, which a file of weights must not contain",
                where=self.where,
                fix="do not load this file with other tools, unless you trust its author; use safetensors instead",
                code="checkpoint.forbidden-pickle",
            )
        self.stack.append(full_name)

    def call(self, new: bool = False) -> None:
        """Push the description of a call. Nothing is called."""
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError("a call of a value that is not a name")
        self.stack.append(Described(function, arguments, new=new))

    def set_state(self, state: Any) -> None:
        target = self.top()
        if not isinstance(target, Described) or target.state is not None:
            raise ValueError("a state for a value that takes no state")
        target.state = state


class Keys:
    """Check keys of dictionaries and elements of sets before they are hashed.

    A file can contain thousands of numbers or tuples with equal hashes, which would take hours to insert. Strings and
    objects are safe: Python randomizes their hashes.
    """

    def __init__(self) -> None:
        self._chosen = 0

    def __call__(self, key: Any) -> Any:
        """Return a key. Raise if hashing it may be slow, or if the file has too many keys whose hashes it chooses."""
        if isinstance(key, (str, bytes, Name, Described)) or (type(key) is int and 0 <= key < _SMALL):
            return key
        if isinstance(key, PersistentId) or (isinstance(key, tuple) and not _flat(key)):
            raise ValueError("a key is nested or too long")
        if isinstance(key, int) and key.bit_length() > _LONGEST_KEY:
            raise ValueError("a key has too many digits")
        self._chosen += 1
        if self._chosen > MOST_CHOSEN_KEYS:
            raise ValueError(
                f"the file has more than {MOST_CHOSEN_KEYS:,} keys other than strings and numbers below {_SMALL:,}"
            )
        return key

    def dictionary(self, values: list[Any]) -> dict[Any, Any]:
        """Make a dictionary from a list of alternating keys and values."""
        return dict(zip(map(self, values[::2]), values[1::2], strict=True))


def _flat(key: tuple[Any, ...]) -> bool:
    """Return whether a tuple is short and contains no tuples, so that hashing it is fast."""
    return len(key) <= _LONGEST_KEY and not any(isinstance(item, (tuple, PersistentId)) for item in key)
