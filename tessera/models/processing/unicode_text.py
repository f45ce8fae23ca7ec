"""Refuse texts that are not Unicode, which no tokenizer can encode."""

from __future__ import annotations

from tessera.errors import TesseraError


def check_unicode(text: str) -> None:
    """Raise if a text contains half surrogates, as bytes of the command line that are not UTF-8 become."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError:
        raise TesseraError(
            "the text is not valid Unicode", fix="write the text as UTF-8", code="tokenizer.text-not-unicode"
        ) from None
