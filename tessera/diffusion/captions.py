"""Captions as token ids of the text encoders that a generation model reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tessera.data.tokenizer import load_tokenizer
from tessera.diffusion.forms import TextForm
from tessera.errors import TesseraError, first_line

MAX_CHARACTERS = 100_000  # of a caption; what is longer is no caption


@dataclass(frozen=True)
class CaptionEncoder:
    """Turn captions into the ids that one text encoder is given: with its template and its own first and last words,
    cut to the length that the family reads, without padding."""

    form: TextForm
    json: str  # of the tokenizer

    @staticmethod
    def load(folder: Path, form: TextForm) -> CaptionEncoder:
        """Return the encoder of a diffusers folder. A folder with no more than the files of an older tokenizer class
        is read by transformers."""
        own = folder / form.tokenizer
        if not own.is_dir():
            raise TesseraError(
                f"no folder {form.tokenizer} in {folder}",
                where="model.path or model.tokenizer",
                fix="name the folder of a diffusers pipeline, which has its tokenizers",
            )
        tokenizer = load_tokenizer(own) if (own / "tokenizer.json").is_file() else _converted(own)
        return CaptionEncoder(form, tokenizer.to_str())

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        found = Tokenizer.from_str(self.json)
        found.no_truncation()
        found.no_padding()
        return found

    @cached_property
    def _control_words(self) -> tuple[str, ...]:
        added = self._tokenizer.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and token.content)

    def __getstate__(self) -> dict[str, Any]:
        return {"form": self.form, "json": self.json}

    def id_of(self, word: str) -> int | None:
        """Return the id of a word of the tokenizer's own; None if it has no such word."""
        found: int | None = self._tokenizer.token_to_id(word)
        return found

    def ids(self, caption: str, *, may_be_empty: bool = False, template: str | None = None) -> list[int]:
        """Return the ids of a caption, all of them. `may_be_empty`: as a prompt may, of which nothing is learned.
        `template`: another one than the form's own."""
        if len(caption) > MAX_CHARACTERS:
            raise TesseraError(
                f"a caption of {len(caption):,} characters; {MAX_CHARACTERS:,} are the most", fix="shorten the caption"
            )
        if not caption.strip() and not may_be_empty:
            raise TesseraError("the caption is empty")
        word = next((word for word in self._control_words if word in caption), None)
        if word is not None:
            raise TesseraError(f"the caption contains {word}, which {self.form.tokenizer} takes for a control word")
        return list(self._tokenizer.encode(self.form.prompt(caption, template)).ids)

    def cut(self, ids: list[int]) -> list[int]:
        """Return no more ids than the family reads. A tokenizer that ends every text with a word of its own keeps it,
        as truncation by transformers does."""
        most = self.form.length + self.form.skip
        if len(ids) <= most:
            return ids
        ends = self._tokenizer.encode("").ids
        last = ids[-1:] if ends and ids[-1] == ends[-1] else []
        return ids[: most - len(last)] + last


def _converted(folder: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TesseraError(
            f"{folder} has no tokenizer.json", where=str(folder), fix="pip install tessera-mm[hf], which converts it"
        ) from None
    try:
        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except Exception as error:  # what a foreign folder makes of this is listed nowhere
        raise TesseraError(
            f"no tokenizer can be read from {folder}: {first_line(error)}",
            where=str(folder),
            fix="put a tokenizer.json there",
        ) from None
