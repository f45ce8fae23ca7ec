"""Render chat templates in a process with limited time and memory, because templates are untrusted programs.

`rendering` runs this file as a script. It imports only Jinja, so it starts in a tenth of a second. Each input line is a
request; each output line is the answer: the text, the template's error, or the limit that it exceeded. A template that
takes too long ends the process.
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
_LEAST_JINJA = (3, 1, 6)  # sandboxes of older versions have known vulnerabilities
# Signals to the process group that this process ignores: only the trainer handles them.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class _Generation(jinja2.ext.Extension):
    """Render the content of a generation block as if the block were absent."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _Namespace(jinja2.utils.Namespace):
    """Provide `namespace` in templates. Refuse attributes that begin with an underscore, as internals of Python do."""

    # no parameter names, so that templates may use any keyword, even `self`
    def __init__(*args: Any, **values: Any) -> None:
        attributes = dict(*args[1:], **values)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


class _Dict:
    """Create dictionaries for templates without giving them access to the class `dict`."""

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
    """Return a compiled template with the functions that transformers' `apply_chat_template` provides."""
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
        # The timer counts CPU time. SIGPROF ends the process, even during a single long call.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = json.dumps(_answer(request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
