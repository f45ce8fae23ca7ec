"""The text of an answer is the decoded tokens, cut at the first stop string, in parts that never change later."""

from __future__ import annotations

import functools
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

from tessera.core.batch import Batch
from tessera.engine.request import Request
from tessera.engine.text import AnswerText
from tessera.models.processing.tokenizer import train_tokenizer

LEARNED = [
    "the cat sat on the mat, the end. ",
    "你好世界 你好 ",
    "naïve café ",
    "🙂🙂👩‍👩‍👧 ",
    "STOP the ENDING END\n\n",
]
LETTERS = [*"abc STOPENDcath.,\n", "你", "好", "世", "é", "🙂", "\u0301", "\ufffd", " the", "STOP", "END", "  ", "界"]


@functools.cache
def byte_level() -> Tokenizer:
    return train_tokenizer(LEARNED * 9, 420, ["<|end|>", "<|pad|>"])


def sentencepiece(decoder: Any, first: bool) -> Tokenizer:
    """Return a tokenizer with a mark in place of spaces, and with tokens for the bytes of rare characters."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if first else []), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(LEARNED[:1] * 20, trainers.BpeTrainer(vocab_size=360, special_tokens=words))
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # the tokens of bytes are ordinary tokens
    return Tokenizer.from_str(json.dumps(data))


@functools.cache
def llama() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return sentencepiece(decoders.Sequence(steps), first=True)


@functools.cache
def gemma() -> Tokenizer:
    return sentencepiece(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), first=False
    )


@functools.cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], initial_alphabet=[x for x in LETTERS if len(x) == 1]
    )
    tokenizer.train_from_iterator(LEARNED * 9, trainer)
    return tokenizer


def request(**options: Any) -> Request:
    return Request(Batch({"tokens": torch.tensor([0])}), **options)


def stream(
    tokens: Sequence[int], decode: Callable[[Sequence[int]], str], **options: Any
) -> tuple[list[str], str | None, int]:
    """Return the parts of an answer, its stop string, and the number of its tokens."""
    text, parts = AnswerText(request(**options), decode), list[str]()
    for count, token in enumerate(tokens, 1):
        part, stop = text.add(token)
        parts.append(part)
        if stop is not None:
            assert text.close() == ""
            return parts, stop, count
    return [*parts, text.close()], None, len(tokens)


def cut(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Return a text up to the stop string that ends first."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


STOPS: tuple[tuple[str, ...], ...] = (
    *((), ("END",), ("STOP", "TO", "OPE"), ("\n\n", "好世"), ("aab", "ab", "b."), ("🙂",)),
)


@pytest.mark.parametrize("make", [byte_level, llama, gemma, metaspace])
def test_parts_join_to_the_decoded_text_up_to_the_first_stop_string(make: Callable[[], Tokenizer]) -> None:
    tokenizer, choose = make(), random.Random(4)
    ended = 0
    for number in range(150):
        tokens = []
        for _ in range(choose.randint(0, 6)):
            text = "".join(choose.choices(LETTERS, k=choose.randint(1, 8)))
            if make is not byte_level:
                text = text.replace("\ufffd", "")  # a decoder of byte tokens returns the same for half a character
            tokens += tokenizer.encode(text, add_special_tokens=False).ids
            tokens += [tokenizer.token_to_id("<|end|>" if make is byte_level else "</s>")] * choose.choice([0, 0, 1, 3])
        stops, include = STOPS[number % len(STOPS)], choose.random() < 0.5
        expected, stop = cut(tokenizer.decode(tokens), stops, include)
        parts, ending, _ = stream(tokens, tokenizer.decode, stop=stops, include_stop=include)
        assert ("".join(parts), ending) == (expected, stop), tokens
        ended += stop is not None
    assert ended > 20


def test_random_bytes_become_the_replacement_characters_of_the_whole_text() -> None:
    tokenizer, choose = byte_level(), random.Random(1)
    size = tokenizer.get_vocab_size()
    for length in [*range(12)] * 15 + [200] * 5:
        tokens = choose.choices(range(size), k=length)
        assert "".join(stream(tokens, tokenizer.decode)[0]) == tokenizer.decode(tokens), tokens


def test_random_bytes_of_a_byte_fallback_lose_no_other_text() -> None:
    """Its decoder takes a run of bytes as text only as a whole, which an answer that is sent early cannot wait for."""
    tokenizer, choose = llama(), random.Random(1)
    high = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(128, 256)]
    words = range(tokenizer.token_to_id("<0xFF>") + 1, tokenizer.get_vocab_size())
    for length in [*range(12)] * 15 + [200] * 5:
        tokens = [choose.choice(choose.choice([high, words])) for _ in range(length)]
        text = "".join(stream(tokens, tokenizer.decode)[0])
        assert [c for c in text if c.isascii()] == [c for c in tokenizer.decode(tokens) if c.isascii()]


def test_a_token_costs_the_decoding_of_a_few() -> None:
    tokenizer, longest = byte_level(), 0

    def decode(tokens: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return str(tokenizer.decode(tokens))

    half = tokenizer.encode("ÿ").ids[:1]  # bytes that never become a character
    for tokens in (
        tokenizer.encode("你好世界 the cat 🙂" * 40).ids,
        half * 300,
        [tokenizer.token_to_id("<|end|>")] * 300,
        [tokenizer.token_to_id("<|end|>"), *half] * 150,
        [*tokenizer.encode("12").ids, *half, *[tokenizer.token_to_id("<|end|>")] * 8],
    ):
        parts = stream(tokens, decode)[0]
        assert "".join(parts) == tokenizer.decode(tokens)
        assert sum(len(part) > 0 for part in parts[:-1]) >= (tokenizer.decode(tokens) != "")
    assert longest <= 12


def spelled(tokens: Sequence[int]) -> str:
    return "".join(chr(token) for token in tokens)


def test_text_is_sent_as_early_as_it_is_sure() -> None:
    text = AnswerText(request(stop=("abc", "cd")), spelled)
    assert [text.add(ord(letter))[0] for letter in "xabxabaxc"] == ["x", "", "", "abx", "", "", "ab", "ax", ""]
    assert text.close() == "c"


def test_the_stop_string_that_ends_first_ends_the_answer() -> None:
    assert stream([*map(ord, "xabc")], spelled, stop=("abc", "b"))[:2] == (["x", "", "a"], "b")
    assert stream([*map(ord, "xabc")], spelled, stop=("bc", "abc"))[:2] == (["x", "", "", ""], "abc")
    words = ["he", "llo EN", "D of ENDS"]
    for include, expected in ((False, "hello "), (True, "hello END")):
        parts, stop, count = stream(
            range(3), lambda tokens: "".join(words[t] for t in tokens), stop=("END", "S"), include_stop=include
        )
        assert ("".join(parts), stop, count) == (expected, "END", 3)


def test_stop_strings_before_min_new_tokens_are_text() -> None:
    parts, stop, count = stream([*map(ord, "ab.ab.ab.")], spelled, stop=("ab",), min_new_tokens=4)
    assert ("".join(parts), stop, count) == ("ab.", "ab", 5)
    parts, stop, count = stream([*map(ord, "xabab")], spelled, stop=("ab",), min_new_tokens=3)
    assert ("".join(parts), stop, count) == ("x", "ab", 3), "the answer has three tokens"


def test_special_tokens_are_text_where_the_request_wants_them() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokens = tokenizer.encode("the<|end|> cat").ids

    def spell(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    assert "".join(stream(tokens, spell)[0]) == "the<|end|> cat"
    assert "".join(stream(tokens, tokenizer.decode)[0]) == "the cat"


def test_text_that_is_not_streamed_comes_at_the_end_and_stop_strings_end_it_all_the_same() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("the cat 🙂 sat END on", add_special_tokens=False).ids
    parts, stop, _ = stream(tokens, tokenizer.decode, stream=False)
    assert parts == [""] * len(tokens) + [tokenizer.decode(tokens)]
    assert stop is None
    parts, stop, _ = stream(tokens, tokenizer.decode, stream=False, stop=("END",))
    assert ("".join(parts), stop) == ("the cat 🙂 sat ", "END")


def test_stop_strings_cost_the_same_for_every_text() -> None:
    stops = ("x" * 1000 + "!", *("x" * count + "y" * (1000 - count) for count in range(1, 64)))
    began = time.process_time()
    parts, stop, _ = stream([120] * 3000, lambda tokens: "".join(map(chr, tokens)), stop=stops)
    assert ("".join(parts), stop) == ("x" * 3000, None)
    assert time.process_time() - began < 5, "0.07 s; 25 s if each beginning of each stop string is compared"
