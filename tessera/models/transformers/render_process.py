"""Render chat templates in a process whose time and memory are limited: they are programs that strangers wrote.

This file is run as a script by `rendering`. It imports Jinja alone, so that it begins in a tenth of a second. Each line
that it reads is a request, and it answers each with a line: the text, the error of the template, or the limit that the
template exceeds. One that takes too long ends the process, in whatever it is.
"""

from __future__ import annotations

import functools
import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

_MEMORY_BYTES = 1 << 30
_LEAST_JINJA = (3, 1, 6)  # older sandboxes have known holes
# Sent to a whole group of processes, these are the trainer's to answer.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Generation(jinja2.ext.Extension):
    """Write what is inside of a generation block as if the block were not there."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """Refuse names with an underscore, by which a template could pass for a class of Python."""

    def __init__(*args: Any, **values: Any) -> None:  # without a name for the first one, so that `self=` is a value
        attributes = dict(*args[1:], **values)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")


class _Dict:
    """Make dictionaries for a template, which gets no hold of the class."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compiled(text: str) -> jinja2.Template:
    """Return a template with all that `apply_chat_template` of transformers offers to one."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    return environment.from_string(text)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    pieces, length = [], 0
    try:
        for piece in _compiled(request["template"]).generate(**request["variables"]):
            pieces.append(piece)
            length += len(piece)
            if length > request["most"]:
                return {"limit": f"writes more than {request['most']} characters"}
    except MemoryError:
        return {"limit": f"needs more than {_MEMORY_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"limit": "calls itself without an end"}
    except Exception as error:
        return {"error": str(error) or type(error).__name__}
    return {"text": "".join(pieces)}


def main() -> None:
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    assert tuple(map(int, jinja2.__version__.split(".")[:3])) >= _LEAST_JINJA
    for line in sys.stdin:
        request = json.loads(line)
        # It counts computing, not waiting. SIGPROF then ends the process, also inside of one long call.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = json.dumps(_answer(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
