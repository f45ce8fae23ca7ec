"""Tokenizers from `tokenizer.json`: load them, encode conversations, train a small one, write tokenizer files."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from tessera.errors import TesseraError, first_line
from tessera.models.processing.chat import ChatSpan
from tessera.models.processing.unicode_text import check_unicode
from tessera.runtime.files import read_json_mapping, read_text

# Regular expression by which Qwen's tokenizers split text before BPE merges. Tokenizers that Tessera trains use it too.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_MAX_BYTES = 256 << 20  # size limit of tokenizer.json
_MOST_IDS = 1 << 24  # published vocabularies are below 2**20; for huge ids the library aborts the process
_SHORT, _MANY = 64, 4096  # cache of tokenized texts: maximum characters of a text, maximum number of texts


def load_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file() and (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(folder)
    if not path.is_file():
        raise TesseraError(
            f"no tokenizer.json in {folder}",
            where="model.path or model.tokenizer",
            fix="use a folder with tokenizer.json, such as a downloaded Hugging Face model",
            code="tokenizer.no-file",
        )
    data = read_json_mapping(path, _MAX_BYTES)
    if (highest := _highest_id(data)) > _MOST_IDS:
        raise TesseraError(
            f"this tokenizer has a token with id {highest}, and the largest supported id is {_MOST_IDS}",
            where=str(path),
            fix=_PUBLISHED,
            code="tokenizer.id-too-high",
        )
    if _may_take_long(data):
        _try_out(path)
    with _library_errors(f"not readable as a tokenizer ({path})", code="tokenizer.unreadable-file"):
        return Tokenizer.from_file(str(path))


def _from_merges(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model folder with only vocab.json and merges.txt (first InternVL folders)."""
    config = read_json_mapping(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    kind = config.get("tokenizer_class")
    if kind not in ("Qwen2Tokenizer", "Qwen2TokenizerFast"):
        raise TesseraError(
            f"{kind} cannot be read from vocab.json and merges.txt, which do not define how it splits text",
            where=str(folder),
            allowed=["Qwen2Tokenizer"],
            fix="use a folder with tokenizer.json",
            code="tokenizer.unknown-class",
        )
    lines = read_text(folder / "merges.txt", _MAX_BYTES).splitlines()
    merges = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#version")]
    vocab = read_json_mapping(folder / "vocab.json", _MAX_BYTES)
    added = config.get("added_tokens_decoder") or {}
    with _library_errors(
        f"vocab.json and merges.txt are no valid tokenizer ({folder})", code="tokenizer.unreadable-file"
    ):
        tokenizer = _byte_level(BPE(vocab=vocab, merges=merges))
        for number, token in sorted(added.items(), key=lambda item: int(item[0])):
            add = tokenizer.add_special_tokens if token.get("special") else tokenizer.add_tokens
            add([AddedToken(**token)])
            if tokenizer.token_to_id(token["content"]) != int(number):
                raise ValueError(f"the library gives {token['content']} another id than {number}")
        return Tokenizer.from_str(tokenizer.to_str())  # the library finds duplicate ids only while it parses


@contextmanager
def _library_errors(what: str, *, code: str = "tokenizer.cannot-encode") -> Iterator[None]:
    """Turn exceptions of the tokenizers library, and panics in its Rust code, into a `TesseraError`."""
    try:
        yield
    except BaseException as error:  # `except Exception` does not catch a panic
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TesseraError(f"{what}: {first_line(error)}", fix=_PUBLISHED, code=code) from None


# A regular expression may take exponential time if it has a repeated group, or more than two unlimited repetitions in
# one alternative. Patterns of published tokenizers have neither.
_REPEATED_GROUP = re.compile(r"\)[+*{]")
_SET_OR_ESCAPE = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[(?:\\.|[^\]\\])*\]", re.DOTALL)
_REPEATED = re.compile(r"[+*]|\{\d*,\d*\}")
_MOST_REPEATED = 2
_MOST_STEPS = 10  # maximum number of steps in a normalizer or pre-tokenizer: each may double the length of a text
# Test texts that trigger backtracking: long runs of one character, then another one.
_TRIED = tuple(
    many * 60 + end for many in ("a", "A", "1", " ", "\n", ".", "a1", "a ", "\u00e9", "\u4e2d") for end in "!z\n"
)
_MOST_LENGTH = 1 << 16  # limit of the tokens that a test text becomes, and of the characters that these decode to
_MOST_COUNT = 1 << 20  # limit of any integer in the settings of a normalizer or pre-tokenizer step
_TRY_SECONDS = 30.0
_PUBLISHED = "use the published tokenizer of the model"


def _highest_id(data: Mapping[str, Any]) -> int:
    """Return the highest token id in a tokenizer.json. Skip ids that are not integers: the library checks them."""
    model, added = data.get("model"), data.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: list[Any] = [*vocab.values()] if isinstance(vocab, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return max((number for number in ids if isinstance(number, int)), default=0)


def _may_take_long(data: Any) -> bool:
    if isinstance(data, dict):
        pattern = data.get("Regex")
        if isinstance(pattern, str) and _may_backtrack(pattern):
            return True
        written = [data.get("content") if data.get("type") == "Replace" else None, data.get("prepend")]
        # Text that a step inserts may multiply the length of the input.
        if any(isinstance(text, str) and len(text) > 1 for text in written):
            return True
        if any(isinstance(value, int) and value > _MOST_COUNT for value in data.values()):
            return True
        return any(
            _may_take_long(value) for key, value in data.items() if key not in ("vocab", "merges", "added_tokens")
        )
    if not isinstance(data, list):
        return False
    steps = sum(isinstance(value, dict) and "type" in value for value in data)
    return steps > _MOST_STEPS or any(_may_take_long(value) for value in data)


def _may_backtrack(pattern: str) -> bool:
    plain = _SET_OR_ESCAPE.sub("x", pattern)
    most = max(len(_REPEATED.findall(part)) for part in plain.split("|"))
    return _REPEATED_GROUP.search(plain) is not None or most > _MOST_REPEATED


def _try_out(path: Path) -> None:
    """Encode and decode test texts in a process with a time limit, which can stop a running regular expression."""
    code = (
        "import resource as r, sys, tokenizers as t; r.setrlimit(r.RLIMIT_AS, (1 << 32, 1 << 32)); "
        "file, *texts = sys.argv[1:]; it = t.Tokenizer.from_file(file)\n"
        "for ids in (it.encode(text).ids for text in texts):\n"
        f"    if max(len(ids), len(it.decode(ids, skip_special_tokens=False))) > {_MOST_LENGTH}: sys.exit(1)"
    )
    command = [sys.executable, "-P", "-c", code, str(path), *_TRIED]
    where = str(path)
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TRY_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        what = f"this tokenizer takes more than {_TRY_SECONDS:g} s to encode short texts"
        raise TesseraError(what, where=where, fix=_PUBLISHED, code="tokenizer.too-slow") from None
    if done.returncode:
        what = "this tokenizer cannot encode short texts"
        raise TesseraError(what, where=where, fix=_PUBLISHED, code="tokenizer.cannot-encode")


class UnknownConversationError(TesseraError):
    """Report that conversations cannot be encoded: the tokenizer lacks special tokens of all chat templates."""


class ChatEncoder:
    """Turn text spans into token ids, each with a flag whether the loss includes it.

    Text between two special tokens is encoded as a unit, because BPE merges may cross the border between header and
    content. A token with any trained character is trained. Text never becomes a special token of the tokenizer or of
    the template: a message with "<|im_end|>" ends no turn, and placeholders of media cannot be forged.
    """

    def __init__(self, tokenizer: Tokenizer, control: Iterable[str] = ()) -> None:
        self.json = tokenizer.to_str()
        with _library_errors("this tokenizer cannot be saved and read again", code="tokenizer.unreadable-file"):
            self._text = Tokenizer.from_str(self.json)
        self._text.encode_special_tokens = True
        self._text.no_truncation()
        self._text.no_padding()
        self.added_words = tuple(token.content for token in self._text.get_added_tokens_decoder().values())
        self.unmarked: tuple[str, ...] = ()  # special tokens of the template that are not special in the tokenizer
        self._control(control)

    def with_control(self, words: Iterable[str]) -> ChatEncoder:
        """Return the encoder with further special tokens of a template."""
        changed = copy.copy(self)
        changed._control([*self.control, *words])
        return self if changed.control == self.control else changed

    def _control(self, words: Iterable[str]) -> None:
        self.control = tuple(sorted({word for word in words if self.find(word) is not None}))
        self._control_ids = frozenset(map(self.id_of, self.control))
        self._encoded: dict[str, tuple[list[int], list[tuple[int, int]]]] = {}
        marked = {token.content for token in self._text.get_added_tokens_decoder().values() if token.special}
        more = [word for word in self.control if word not in marked]
        if more:  # add the words as special tokens, or the text of users could become such a token
            self._text = Tokenizer.from_str(self._text.to_str())  # a copy, because several encoders share the original
            self._text.encode_special_tokens = True
            self._text.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in more])
            self.unmarked = tuple(sorted([*self.unmarked, *more]))

    def __getstate__(self) -> dict[str, Any]:
        return {"json": self.json, "control": self.control}

    def __copy__(self) -> ChatEncoder:
        copied = ChatEncoder.__new__(ChatEncoder)
        copied.__dict__.update(self.__dict__)
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(Tokenizer.from_str(state["json"]), state["control"])  # type: ignore[misc]

    def id_of(self, word: str) -> int:
        number = self._text.token_to_id(word)
        if number is None:
            raise UnknownConversationError(
                f"the tokenizer has no token {word}",
                where="tokenizer.json",
                fix="use the tokenizer of the model's family",
                code="tokenizer.unknown-word",
            )
        return int(number)

    def find(self, word: str) -> int | None:
        return self._text.token_to_id(word)

    @property
    def size(self) -> int:
        """Return the size of the vocabulary: the highest token id plus one."""
        return max(self._text.get_vocab(with_added_tokens=True).values()) + 1

    def encode(
        self, spans: Sequence[ChatSpan], repeats: Sequence[int] = ()
    ) -> tuple[list[int], list[bool], list[tuple[int, int]]]:
        """Return token ids, trained flags, and (start, length) of each placeholder run. `repeats`: the lengths."""
        tokens: list[int] = []
        trained: list[bool] = []
        run: list[ChatSpan] = []
        media = iter(repeats)
        media_spans: list[tuple[int, int]] = []
        for span in spans:
            if not span.special:
                run.append(span)
                continue
            self._encode_text(run, tokens, trained)
            run = []
            times = 1 if span.media is None else next(media)
            if span.media is not None:
                media_spans.append((len(tokens), times))
            tokens += [self.id_of(span.text)] * times
            trained += [span.trained] * times
        self._encode_text(run, tokens, trained)
        assert next(media, None) is None, "every media part has a span"
        placeholders = {span.text for span in spans if span.media is not None}
        written = sum(tokens.count(self.id_of(word)) for word in placeholders)
        assert written == sum(times for _, times in media_spans), "each placeholder stands for a token of some media"
        return tokens, trained, media_spans

    def _encode_text(self, run: Sequence[ChatSpan], tokens: list[int], trained: list[bool]) -> None:
        text = "".join(span.text for span in run)
        if not text:
            return
        ids, offsets = self._ids_and_offsets(text)
        tokens += ids
        if not any(span.trained for span in run):
            trained += [False] * len(ids)
            return
        marks = [False] * len(ids)
        at = 0
        for span in run:
            end = at + len(span.text)
            if span.trained:  # find the tokens that overlap the span by bisection, as offsets are sorted
                low = bisect_right(offsets, at, key=itemgetter(1))
                high = bisect_left(offsets, end, key=itemgetter(0))
                marks[low:high] = [True] * (high - low)
            at = end
        trained += marks

    def _ids_and_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return tokens and character offsets of a text, with a cache for short texts."""
        encoded = self._encoded.get(text)
        if encoded is None:
            check_unicode(text)
            with _library_errors("the tokenizer cannot encode this text"):
                encoding = self._text.encode(text, add_special_tokens=False)
            encoded = (encoding.ids, encoding.offsets)
            if not self._control_ids.isdisjoint(encoding.ids):
                encoded = self._in_parts(text, *encoded)
            if len(text) <= _SHORT and len(self._encoded) < _MANY:
                self._encoded[text] = encoded
        return encoded

    def _in_parts(
        self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Encode a plain text again of which `ids`, its first encoding, contains special tokens (Unigram models).

        The text is split inside each special token, and the parts are encoded separately.
        """
        cuts = [first + 1 for id, (first, _) in zip(ids, offsets, strict=True) if id in self._control_ids]
        tokens: list[int] = []
        token_offsets: list[tuple[int, int]] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            with _library_errors("the tokenizer cannot encode this text"):
                encoding = self._text.encode(text[start:end], add_special_tokens=False)
            tokens += encoding.ids
            token_offsets += [(first + start, last + start) for first, last in encoding.offsets]
        if not self._control_ids.isdisjoint(tokens):
            raise TesseraError(
                "the tokenizer encodes text of a message as a special token",
                fix="remove special tokens from the text",
                code="tokenizer.forged-control-word",
            )
        return tokens, token_offsets

    def decode(self, tokens: Sequence[int]) -> str:
        with _library_errors("the tokenizer cannot decode these tokens"):
            return str(self._text.decode(list(tokens), skip_special_tokens=True))

    def spell(self, tokens: Sequence[int]) -> str:
        """Decode token ids to text and keep special tokens, for display."""
        with _library_errors("the tokenizer cannot decode these tokens"):
            return str(self._text.decode(list(tokens), skip_special_tokens=False))


def train_tokenizer(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer with exactly `vocab_size` ids; the last ids are `special_tokens`.

    If the texts give too few merges, unused tokens fill the vocabulary, so that the size does not depend on the texts.
    """
    plain = vocab_size - len(special_tokens)
    if plain < 256:
        raise TesseraError(
            f"a vocabulary of {vocab_size} is too small",
            fix=f"use at least {256 + len(special_tokens)}: 256 bytes and {len(special_tokens)} special tokens",
            code="tokenizer.vocabulary-too-small",
        )
    tokenizer = _byte_level(BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=plain, show_progress=False, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    for number in range(len(vocab), plain):
        vocab[f"<|unused_{number}|>"] = number
    tokenizer = _byte_level(BPE(vocab=vocab, merges=[tuple(pair) for pair in model["merges"]]))
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special_tokens])
    return tokenizer


def _byte_level(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def read_chat_template(folder: Path) -> str | None:
    """Return the Jinja chat template of a model folder; None if the folder has no template."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            template = read_json_mapping(folder / name).get("chat_template")
            if isinstance(template, list):  # older folders have several named templates
                named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
                template = named.get("default")
            if isinstance(template, str):
                return template
    return None


def class_for(tokenizer_json: str) -> str:
    """Return the tokenizer class of transformers that reads this tokenizer.json with the same ids for every text.

    `Qwen2Tokenizer` ignores the pre-tokenizer of the file; `PreTrainedTokenizerFast` uses it.
    """
    said = json.loads(tokenizer_json)
    cuts = said.get("pre_tokenizer") or {}
    steps = cuts.get("pretokenizers", [cuts])
    alike = (
        said["model"].get("type") == "BPE"
        and not said["model"].get("ignore_merges")
        and not said["model"].get("byte_fallback")
        and (said.get("normalizer") or {}).get("type") == "NFC"
        and [step.get("type") for step in steps] == ["Split", "ByteLevel"]
        and steps[0]["pattern"] == {"Regex": _SPLIT}
        and not steps[1]["add_prefix_space"]
        and (said.get("post_processor") or {"type": "ByteLevel"})["type"] == "ByteLevel"
    )
    return "Qwen2Tokenizer" if alike else "PreTrainedTokenizerFast"


def write_tokenizer(
    folder: Path,
    tokenizer_json: str,
    *,
    chat_template: str | None,
    end: str,
    pad: str,
    kind: str = "Qwen2Tokenizer",
    named: Mapping[str, str] | None = None,
    begin: str | None = None,
) -> None:
    """Write tokenizer files that `transformers.AutoTokenizer` loads.

    `end`: token that stops generation. `begin`: token at the beginning of every text. `named`: special tokens that a
    family's processor looks up by attribute name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    added = json.loads(tokenizer_json).get("added_tokens", [])
    keys = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    config: dict[str, Any] = {
        "tokenizer_class": kind,
        "added_tokens_decoder": {str(token["id"]): {key: token[key] for key in keys} for token in added},
        "additional_special_tokens": [t["content"] for t in added if t["special"] and t["content"] not in (end, pad)],
        "add_prefix_space": False,
        "bos_token": begin,
        "clean_up_tokenization_spaces": False,
        "eos_token": end,
        "errors": "replace",
        "pad_token": pad,
        "split_special_tokens": False,
        "unk_token": None,
    }
    if named:
        config["extra_special_tokens"] = dict(named)
    if chat_template is not None:
        config["chat_template"] = chat_template
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")
