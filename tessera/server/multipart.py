"""Read the fields and files of a body of the type multipart/form-data. The body is in memory, within the limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tessera.server.errors import ApiError

_MOST_PARTS = 32
_MOST_HEADERS = 1024  # limit of the bytes of the headers of a part
_BOUNDARY = re.compile(r'(?:^|;)\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))\s*(?:;|$)', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:\s*form-data\s*;(.*)$", re.IGNORECASE)
# Matches a parameter of the header Content-Disposition. Clients write quotes in names as %22 or \".
_PARAMETER = re.compile(rb'(?<![\w*-])([\w*-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')


@dataclass(frozen=True)
class FormPart:
    """Hold a field or a file of a form. `filename`: None for a field."""

    content: memoryview
    filename: str | None

    def text(self, name: str) -> str:
        """Return the text of a field. `name`: name of the field, for the error message."""
        try:
            return bytes(self.content).decode()
        except UnicodeDecodeError:
            raise ApiError(400, f"the field {name!r} is not UTF-8", param=name, code="invalid_form") from None


def read_form(body: bytes, content_type: str) -> Mapping[str, FormPart]:
    """Return the parts of a form by their names. Raise if the form is damaged, too large, or has a name twice."""
    match = _BOUNDARY.search(content_type.partition(";")[2])
    if match is None:
        raise ApiError(400, "the Content-Type has no boundary", code="invalid_form")
    boundary = b"--" + (match[1] or match[2]).encode("latin-1", "replace")
    if not body.startswith(boundary):
        raise _damaged("it does not begin with the boundary")
    parts: dict[str, FormPart] = {}
    view, at = memoryview(body), len(boundary)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise _damaged("a boundary is not followed by the end of the line")
        if len(parts) == _MOST_PARTS:
            raise ApiError(400, f"the form has more than {_MOST_PARTS} parts", code="invalid_form")
        begin = body.find(b"\r\n\r\n", at, at + _MOST_HEADERS)
        if begin < 0:
            raise _damaged("the headers of a part do not end")
        end = body.find(b"\r\n" + boundary, begin + 2)
        if end < 0:
            raise _damaged("a part does not end")
        name, filename = _names(body[at + 2 : begin])
        if name in parts:
            raise ApiError(400, f"the form has the field {name[:100]!r} twice", param=name[:100], code="invalid_form")
        parts[name] = FormPart(view[min(begin + 4, end) : end], filename)
        at = end + 2 + len(boundary)
    return parts


def _names(headers: bytes) -> tuple[str, str | None]:
    """Return a form part's field name, and its file name or None."""
    for line in headers.split(b"\r\n"):
        match = _DISPOSITION.match(line)
        if match is None:
            continue
        values = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(match[1])}
        name, filename = values.get(b"name"), values.get(b"filename", values.get(b"filename*"))
        if name:
            return name.decode("utf-8", "replace"), None if filename is None else filename.decode("utf-8", "replace")
    raise _damaged("a part has no name")


def _damaged(why: str) -> ApiError:
    return ApiError(400, f"the form is not valid: {why}", code="invalid_form")
