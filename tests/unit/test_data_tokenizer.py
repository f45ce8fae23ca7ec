"""Templates, tokens and small tokenizers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.core.errors import TesseraError
from tessera.core.types import Message, Part
from tessera.data.chat import ChatTemplate, Piece
from tessera.data.tokenizer import PieceEncoder, load_tokenizer, train_tokenizer, write_tokenizer

SPECIAL = ["<|endoftext|>", *ChatTemplate().special_words()]


def said(role: str, words: str) -> Message:
    return Message(role, (Part("text", words),))


def test_special_words_lie_at_the_end_and_sizes_are_exact() -> None:
    for texts in (["tiny"], ["the quick brown fox jumps over the lazy dog. " * 3] * 50):
        tokenizer = train_tokenizer(texts, 320, SPECIAL)
        assert tokenizer.get_vocab_size() == 320
        assert [tokenizer.token_to_id(word) for word in SPECIAL] == list(range(320 - len(SPECIAL), 320))
        assert tokenizer.decode(tokenizer.encode("the fox, 中文 été\n\n  ok").ids) == "the fox, 中文 été\n\n  ok"
    assert len(tokenizer.encode("the quick brown fox").ids) < 15  # merges were learnt
    with pytest.raises(TesseraError, match="too small") as raised:
        train_tokenizer(["x"], 200, SPECIAL)
    assert str(256 + len(SPECIAL)) in str(raised.value)


def test_writing_and_reading_a_folder(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["hello world"] * 9, 300, SPECIAL)
    write_tokenizer(tmp_path, tokenizer.to_str(), chat_template="x", end="<|im_end|>", pad="<|endoftext|>")
    assert load_tokenizer(tmp_path).encode("hello").ids == tokenizer.encode("hello").ids
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TesseraError, match="not readable as a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(TesseraError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path / "none")


def test_who_is_trained() -> None:
    pieces = ChatTemplate().render([said("user", "Hi"), said("assistant", "Yes")])
    assert "".join(p.text for p in pieces) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
    )
    assert [p.text for p in pieces if p.trained] == ["Yes", "<|im_end|>"]
    pieces = ChatTemplate(system=None).render([said("user", "Hi")], train_on=("user",), answer=True)
    assert [p.text for p in pieces if p.trained] == ["Hi", "<|im_end|>"]
    assert pieces[-1].text == "assistant\n"
    assert pieces[0].role == "user"


def test_a_token_across_a_header_and_an_answer_is_trained() -> None:
    encoder = PieceEncoder(train_tokenizer(["assistant\n\nyes\n\nno"] * 30, 300, SPECIAL))
    header, answer = Piece("assistant\n", "assistant"), Piece("\nyes", "assistant", trained=True)
    joined, trained, _ = encoder.encode([header, answer])
    plain, _, _ = encoder.encode([Piece("assistant\n\nyes", "assistant")])
    assert joined == plain
    apart = encoder.encode([header])[0] + encoder.encode([answer])[0]
    assert len(joined) < len(apart)  # "\n\n" is one token
    assert encoder.decode([t for t, flag in zip(joined, trained, strict=True) if flag]) == "\n\nyes"


def test_media_words_are_repeated_and_placed() -> None:
    encoder = PieceEncoder(train_tokenizer(["x"], 300, SPECIAL))
    message = Message("user", (Part("image", None), Part("text", "and"), Part("video", None)))
    tokens, trained, spans = encoder.encode(ChatTemplate(system=None).render([message], ["user"]), [3, 2])
    for (start, count), word, expected in zip(spans, ("<|image_pad|>", "<|video_pad|>"), (3, 2), strict=True):
        assert count == expected
        assert tokens[start : start + count] == [encoder.id_of(word)] * count
        assert tokens[start - 1] == encoder.id_of("<|vision_start|>")
        assert tokens[start + count] == encoder.id_of("<|vision_end|>")
        assert not any(trained[start - 1 : start + count + 1])
    with pytest.raises(TesseraError, match="does not know <nothing>"):
        encoder.id_of("<nothing>")
