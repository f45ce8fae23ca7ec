"""Constrain answers to a language: compile grammars, and mask the tokens that would leave the language."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from tessera.engine.request import Constraint
from tessera.errors import TesseraError, first_line
from tessera.models.processing.tokenizer import ChatEncoder

_LONGEST = 128 << 10  # limit of the characters of a constraint
_QUICK = 2000  # a constraint of at most this many characters compiles in a tenth of a second
_SECONDS, _GIB = 3, 4  # limits of CPU time and memory to compile a constraint
_MOST_GRAMMARS = 32  # limit of compiled grammars in the cache
_LARGEST_MULTIPLE = 50_000  # limit of `multipleOf`, whose automaton has this many states
_MOST_LEXER_STATES = 50_000  # limit of lexer states per answer, which take 1 to 2 kB each
_STEP_FUEL = 100_000  # llguidance's limit of work per token: about 10 ms, and bounded memory
# White space between the elements of JSON. Without a limit, a weak model may fill the rest of its answer with it.
_BLANKS = {"whitespace_pattern": r"\n?[ ]{0,32}"}
_LONGEST_MESSAGE = 300  # maximum characters of an llguidance error in a message, since such errors repeat the grammar
_TOO_LARGE = re.compile(r"too (?:big|large|many|complex|deep)|limit|max is|nest", re.IGNORECASE)


class Grammars:
    """Compile constraints for one model. The library llguidance and its tokenizer are loaded at the first use."""

    def __init__(self, tokenizer: ChatEncoder, vocabulary: int, stop_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._stop_tokens = sorted(stop_tokens)
        self._view: Any = None
        self._compiled: OrderedDict[Constraint, Any] = OrderedDict()
        self._lock = Lock()  # needed because a server starts requests in several threads

    def start(self, constraint: Constraint) -> Matcher:
        """Return the state of an answer without tokens."""
        with self._lock:
            compiled = self._compiled.get(constraint)
        if compiled is None:  # compile without holding the lock
            compiled = self._compile(constraint)
        with self._lock:
            self._compiled[constraint] = compiled
            self._compiled.move_to_end(constraint)
            if len(self._compiled) > _MOST_GRAMMARS:
                self._compiled.popitem(last=False)
            return Matcher(compiled.deep_copy(), self._view.vocab_size)

    def _compile(self, constraint: Constraint) -> Any:
        if len(constraint.text) > _LONGEST:
            raise _too_large(f"it has {len(constraint.text)} characters, the limit is {_LONGEST}")
        library = _library()
        grammar = _grammar(library, constraint)
        if not is_quick(constraint):
            _check_effort(grammar)
        with self._lock:
            if self._view is None:
                self._view = self._make_view(library)
        limits = library.LLParserLimits(
            step_lexer_fuel=_STEP_FUEL, max_lexer_states=_MOST_LEXER_STATES, verbose_errors=False
        )
        matcher = library.LLMatcher(self._view, grammar, log_level=0, limits=limits)
        for state in (matcher, self._after_a_token(matcher)):
            if state.is_error():
                raise _refusal(state.get_error())
        return matcher

    def _after_a_token(self, matcher: Any) -> Any:
        """Return the state after one of the allowed first tokens.

        A first token causes much of the work, so a grammar that is too large already fails here, not during an answer.
        """
        trial = matcher.deep_copy()
        if trial.is_error():
            return trial
        bits = _words(matcher.compute_bitmask()).view(torch.uint8)
        for byte in bits.nonzero()[:, 0].tolist():
            for token in (byte * 8 + bit for bit in range(8) if bits[byte] >> bit & 1):
                if token not in self._stop_tokens:
                    trial.consume_token(token)
                    trial.compute_bitmask()
                    return trial
        return trial

    def _make_view(self, library: Any) -> Any:
        """Return the tokenizer as an `LLTokenizer` of llguidance.

        Control words of the chat template become special tokens. So the text of a constrained answer cannot have them.
        """
        copied = Tokenizer.from_str(self._tokenizer.json)
        copied.no_truncation()
        copied.no_padding()
        copied.add_special_tokens([AddedToken(w, special=True, normalized=False) for w in self._tokenizer.control])
        size = max(self._vocabulary, self._tokenizer.size)
        try:
            return library.LLTokenizer(copied.to_str(), n_vocab=size, eos_token=self._stop_tokens)
        except ValueError as error:
            raise TesseraError(
                f"answers of this model cannot be constrained: {first_line(error)[:_LONGEST_MESSAGE]}",
                where="tokenizer.json",
                fix="use a model with a byte-level tokenizer and a stop token, or leave the constraint out",
                code="generation.constraint-unsupported",
            ) from None


class Matcher:
    """Hold the state of an answer under its constraint."""

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher = matcher
        self._words = -(-vocabulary // 32)

    def fill(self, mask: Tensor) -> None:
        """Write the allowed next tokens as bits into a row of a mask: int32, contiguous, on the host."""
        count = mask.numel()
        if count == self._words:
            self._matcher.unsafe_compute_mask_ptr(mask.data_ptr(), count * 4)
        else:  # the tokenizer has more tokens than the model: drop the last bits
            mask.copy_(_words(self._matcher.compute_bitmask())[:count])
        self._check()

    def accept(self, token: int) -> None:
        """Advance the state by a token, which the mask must allow."""
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """Return whether the answer is complete, and nothing but a stop token may follow."""
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(self._matcher.get_error())


def is_quick(constraint: Constraint) -> bool:
    """Return whether a constraint compiles in a tenth of a second: it is short, without slow constructs."""
    slow = {"json_schema": ("allOf", "pattern", "$ref", "\\"), "grammar": ("%json", "\\")}.get(constraint.kind, ())
    return len(constraint.text) <= _QUICK and not any(word in constraint.text for word in slow)


def _check_effort(grammar: str) -> None:
    """Compile a grammar in another process, which ends when its limits of time and memory are reached."""
    # -P: keep the program's folder out of sys.path, because files in it have the names of other modules.
    program = [sys.executable, "-P", str(Path(__file__).with_name("grammar_check.py")), str(_SECONDS), str(_GIB)]
    done = subprocess.run(program, input=grammar.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if done.returncode < 0:
        raise _too_large(f"its compilation takes more than {_SECONDS} seconds or {_GIB} GiB")


def _words(mask: bytes) -> Tensor:
    return torch.frombuffer(bytearray(mask), dtype=torch.int32)


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise TesseraError(
            "constrained answers need llguidance",
            fix="pip install 'tessera-mm[serve]'",
            code="environment.no-llguidance",
        ) from None
    return llguidance


def _grammar(library: Any, constraint: Constraint) -> str:
    """Return a constraint in the form that the library compiles."""
    matcher, text = library.LLMatcher, constraint.text
    if constraint.kind == "json_object":
        return _from_schema(library, '{"type": "object"}', _BLANKS)
    if constraint.kind == "json_schema":
        schema = _json(text)  # raise unless the text is JSON: other text could add rules to the grammar
        _check_schema(schema)
        return _from_schema(library, text, _BLANKS if isinstance(schema, dict) else None)
    if constraint.kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if constraint.kind == "choice":
        choices = _json(text)
        if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
            raise _invalid("choices are a JSON list of one text or more")
        text = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    elif text.lstrip().startswith("{"):
        raise _invalid("a grammar has the form of Lark")
    else:
        _check_schemas_of_grammar(text)
    return str(matcher.grammar_from_lark(text))


def _from_schema(library: Any, schema: str, defaults: dict[str, str] | None) -> str:
    try:
        return str(library.LLMatcher.grammar_from_json_schema(schema, defaults=defaults))
    except ValueError as error:
        raise _refusal(first_line(error)) from None


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_large("its JSON is nested too deeply") from None
    except ValueError as error:
        raise _invalid(f"not valid JSON: {first_line(error)}") from None


def _check_schema(schema: Any) -> None:
    if _largest_automaton(schema) > _LARGEST_MULTIPLE:
        raise _too_large(f"the least common multiple of all `multipleOf` is above {_LARGEST_MULTIPLE}")


def _check_schemas_of_grammar(text: str) -> None:
    """Check the JSON schema after every `%json` of a grammar.

    The grammar is not parsed here. So even a `%json` in a string literal must have a schema.
    """
    for match in re.finditer(r"%json\s*", text):
        try:
            _check_schema(json.JSONDecoder().raw_decode(text, match.end())[0])
        except RecursionError:
            raise _too_large("its JSON is nested too deeply") from None
        except ValueError:
            raise _invalid("a grammar has a JSON schema behind every %json") from None


def _largest_automaton(schema: Any) -> int:
    """Return the number of states of the automaton for all `multipleOf` of a schema, or the first above the limit.

    It is their least common multiple, in units of their common denominator.
    """
    multiples = list(_multiples(schema))
    unit = math.lcm(*(multiple.denominator for multiple in multiples))
    largest = 1
    for multiple in multiples:
        largest = math.lcm(largest, int(multiple * unit) or 1)
        if largest > _LARGEST_MULTIPLE:
            break
    return largest


def _multiples(schema: Any) -> Iterator[Fraction]:
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        if not isinstance(part, dict):
            continue
        waiting += part.values()
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float):
            if not math.isfinite(multiple):
                raise _invalid("multipleOf is not finite")
            yield Fraction(str(multiple)) if isinstance(multiple, float) else Fraction(multiple)


def _refusal(message: str) -> TesseraError:
    """Return the error for a message of llguidance. After a quotation mark, the message quotes the grammar."""
    if "NoExtension" in message:
        return _invalid("no answer is possible")
    return _too_large(message) if _TOO_LARGE.search(message.partition('"')[0]) else _invalid(message)


def _too_large(reason: str) -> TesseraError:
    return TesseraError(
        f"the constraint of the answer is too large: {_shortened(reason)}",
        where="constraint",
        fix="make the schema or the grammar smaller",
        code="generation.constraint-too-large",
    )


def _invalid(reason: str) -> TesseraError:
    return TesseraError(
        f"the constraint of the answer is not valid: {_shortened(reason)}",
        where="constraint",
        fix="correct the schema, the regular expression or the grammar",
        code="generation.constraint-invalid",
    )


def _shortened(reason: str) -> str:
    return next(iter(reason.strip().splitlines()), "")[:_LONGEST_MESSAGE]
