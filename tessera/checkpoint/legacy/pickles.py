"""Read the description in a pickle without building any object: no class is imported and no function is called.

`describe` walks the opcodes with `pickletools`, which only decodes them. Containers and scalars become themselves; an
object becomes a `Described` that holds the name of its class, its arguments and its state. Names that are not on the
caller's list are refused, so that a poisoned file ends in an error and not in a surprise.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tessera.errors import TesseraError

# Bounds for the memory that a file may take. The tensors of a model are outside of its pickle.
LARGEST_PICKLE = 256 << 20
MOST_OPCODES = 20_000_000
MOST_CHOSEN_KEYS = 1000
_SMALL = 1 << 20  # numbers of parameters, as optimizers keep them, are below it
_LONGEST_KEY = 64  # elements of a tuple, and bits of a number
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
    """Hold the name of a class or function, which is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Described:
    """Hold a pickle's description of an object: what would be called, with which arguments, and what would be set."""

    name: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    elements: list[Any] = field(default_factory=list)
    new: bool = False
    """Whether the class's `__new__` would be called, and not the name itself."""


@dataclass(frozen=True)
class PersistentId:
    """Refer to an object outside of the pickle, such as the bytes of a tensor."""

    value: Any


def describe(data: bytes, allowed: Callable[[Name], bool], where: str) -> Any:
    """Return the description in a pickle. `allowed` returns whether it may contain a name."""
    if len(data) > LARGEST_PICKLE:
        raise TesseraError(
            f"the pickle in it has {len(data):,} bytes; at most {LARGEST_PICKLE:,} are read",
            where=where,
            code="checkpoint.pickle-too-large",
        )
    machine = _Machine(allowed, where)
    try:
        for number, (opcode, argument, position) in enumerate(pickletools.genops(data)):
            if opcode.name == "STOP":
                return machine.result()
            if number == MOST_OPCODES:
                raise TesseraError(
                    f"the pickle in it has more than {MOST_OPCODES:,} opcodes",
                    where=where,
                    code="checkpoint.pickle-too-large",
                )
            machine.step(opcode.name, argument, position)
    except (ValueError, IndexError, KeyError, TypeError, UnicodeError, OverflowError, RecursionError) as error:
        raise TesseraError(
            f"this is not a pickle that can be read: {error}", where=where, code="checkpoint.damaged-pickle"
        ) from None
    raise TesseraError("the pickle in it ends too early", where=where, code="checkpoint.damaged-pickle")


class _Machine:
    """Hold the stack and the memo of the pickle virtual machine."""

    def __init__(self, allowed: Callable[[Name], bool], where: str) -> None:
        self.allowed, self.where = allowed, where
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.keys = Keys()

    def result(self) -> Any:
        (value,) = self.stack
        if value is _MARK:
            raise ValueError("nothing but a mark is left")
        return value

    def step(self, opcode: str, argument: Any, position: int | None) -> None:
        """Carry out one opcode."""
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
                    f"the pickle in it uses {opcode} at byte {position}, which is refused",
                    where=self.where,
                    code="checkpoint.forbidden-pickle",
                )

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise ValueError("a mark where a value belongs")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Return all values above the last mark, and take them and the mark off the stack."""
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
            raise ValueError("elements are appended to something that is no list")

    def update(self, items: Any) -> None:
        """Set items of the dictionary or the description on top of the stack."""
        target = self.top()
        if not isinstance(target, (dict, Described)) or not isinstance(items, dict):
            raise ValueError("items are set on something that is no dictionary")
        (target.items if isinstance(target, Described) else target).update(items)

    def put(self, argument: int) -> None:
        if not 0 <= argument < MOST_OPCODES:  # larger numbers could all have one hash
            raise ValueError("an entry of the memo beyond the limit")
        self.memo[argument] = self.top()

    def push_name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise ValueError("a name that is no text")
        full_name = Name(module, name)
        if not self.allowed(full_name):
            raise TesseraError(
                f"it refers to {full_name}, which has no business in a file of weights",
                where=self.where,
                fix="do not load this file with anything else either, unless you made it yourself; ask for safetensors",
                code="checkpoint.forbidden-pickle",
            )
        self.stack.append(full_name)

    def call(self, new: bool = False) -> None:
        """Describe a call; nothing is called."""
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Name) or not isinstance(arguments, tuple):
            raise ValueError("a call of something that is no name")
        self.stack.append(Described(function, arguments, new=new))

    def set_state(self, state: Any) -> None:
        target = self.top()
        if not isinstance(target, Described) or target.state is not None:
            raise ValueError("a state for something that has none")
        target.state = state


class Keys:
    """Check keys of dictionaries and elements of sets before they are hashed.

    Hashes of strings are different in every process, and those of objects are their addresses. Those of numbers and
    tuples are chosen by the author of a file: thousands with the same one would take hours to insert.
    """

    def __init__(self) -> None:
        self._chosen = 0

    def __call__(self, key: Any) -> Any:
        """Return a key after checking it."""
        if isinstance(key, (str, bytes, Name, Described)) or (type(key) is int and 0 <= key < _SMALL):
            return key
        if isinstance(key, PersistentId) or (isinstance(key, tuple) and not _flat(key)):
            raise ValueError("a key that is nested or long")
        if isinstance(key, int) and key.bit_length() > _LONGEST_KEY:
            raise ValueError("a number of many digits as a key")
        self._chosen += 1
        if self._chosen > MOST_CHOSEN_KEYS:
            raise ValueError(f"more than {MOST_CHOSEN_KEYS:,} keys are neither text nor numbers below {_SMALL:,}")
        return key

    def dictionary(self, values: list[Any]) -> dict[Any, Any]:
        """Return a dictionary of keys and values that follow each other."""
        return dict(zip(map(self, values[::2]), values[1::2], strict=True))


def _flat(key: tuple[Any, ...]) -> bool:
    """Return whether a tuple is short and holds no tuples: to hash these may take forever, or more stack than there
    is."""
    return len(key) <= _LONGEST_KEY and not any(isinstance(item, (tuple, PersistentId)) for item in key)
