"""Decode `data:` URLs, such as `data:image/png;base64,iVBOR...`."""

from __future__ import annotations

import binascii
import re

from tessera.errors import TesseraError

MAX_BYTES = 256 << 20  # size limit of the decoded content
_HEAD = re.compile(
    r"data:(?:(?:image|video|audio)/[\w.+-]+|application/octet-stream)?(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE
)


def is_data_url(text: str) -> bool:
    return text[:5].lower() == "data:"


def decode_data_url(text: str) -> bytes:
    """Return the content of a `data:` URL in base64.

    The media type must be image, video or audio, application/octet-stream, or missing.
    """
    head = _HEAD.match(text)
    if head is None:
        raise TesseraError(
            f"not a data: URL of media in base64: {text:.60}",
            fix="write data:image/png;base64,...",
            code="media.bad-data-url",
        )
    if (len(text) - head.end()) // 4 * 3 > MAX_BYTES:
        raise TesseraError(
            f"the data: URL has more than {MAX_BYTES >> 20} MiB",
            fix="store the content in a file, and name the file",
            code="media.data-url-too-large",
        )
    try:
        content = binascii.a2b_base64(text[head.end() :].encode("ascii"), strict_mode=True)
    except (ValueError, binascii.Error) as error:
        raise TesseraError(
            f"the data: URL is not valid base64 ({error})",
            fix="encode the content in base64 again",
            code="media.bad-data-url",
        ) from None
    if not content:
        raise TesseraError(
            "the data: URL has no content", fix="encode the content in base64 again", code="media.bad-data-url"
        )
    return content
