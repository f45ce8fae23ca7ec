"""Exported folders of text families: transformers' tokenizer of them gives the same ids, words and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chats import TEXTS, talk
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from tessera.config.run_config import ModelSection
from tessera.models import resolve
from tessera.models.internvl.processor import INTERNLM
from tessera.models.llama import LLAMA3, VICUNA
from tessera.models.processing.tokenizer import train_tokenizer
from tessera.models.qwen2 import CHATML

LEARNED = [*TEXTS, "USER: ASSISTANT: Be brief. 123456 I'LL go"]
READ = ["What is 1234567 été e\u0301 中文 I'LL  go\n\n  x", " leading", "USER: hi</b>\t<s>", ""]
TALK = talk(("system", "Be brief."), ("user", " What is 123456? e\u0301"), ("assistant", "A\n red."), ("user", "Sure?"))


def as_qwen() -> Tokenizer:
    return train_tokenizer(LEARNED * 20, 400, ["<|endoftext|>", *CHATML.special])


def as_llama3(words: tuple[str, ...] = ("<|end_of_text|>", *LLAMA3.special)) -> Tokenizer:
    """Digits by threes, no normalisation, and the beginning of a text written by itself."""
    tokenizer = Tokenizer(BPE(ignore_merges=True))
    cut = r"(?i:'s|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(cut), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(LEARNED * 20, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in words])
    if LLAMA3.begin in words:
        begin = (LLAMA3.begin, tokenizer.token_to_id(LLAMA3.begin))
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    return tokenizer


def as_llama2() -> Tokenizer:
    """Words begin with a mark in place of a space, and bytes stand for what has no letter."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = ["<unk>", *VICUNA.special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(LEARNED * 20, trainers.BpeTrainer(vocab_size=500, special_tokens=words))
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = data["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


CASES = {
    "llama 3": ("llama", as_llama3),
    "llama 2": ("llama", as_llama2),
    "qwen2": ("qwen2", as_qwen),
    "qwen3": ("qwen3", as_qwen),
    "qwen3 with another tokenizer": ("qwen3", lambda: as_llama3(("<|endoftext|>", *CHATML.special))),
}


def exported(family: str, tokenizer: Tokenizer, folder: Path, **config: Any) -> tuple[Any, Any]:
    """Our processor, and transformers' tokenizer of the folder that it writes."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    spec, settings = resolve(ModelSection(family=family, preset="quickstart", config=config))
    assert spec.processor is not None
    processor: Any = spec.processor(settings, folder)
    processor.save(folder / "out")
    (folder / "out" / "config.json").write_text(json.dumps(settings.to_hf()))  # type: ignore[attr-defined]
    return processor, AutoTokenizer.from_pretrained(folder / "out")


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_an_exported_tokenizer_to_the_same_ids(name: str, tmp_path: Path) -> None:
    family, make = CASES[name]
    tokenizer = make()
    processor, theirs = exported(family, tokenizer, tmp_path)
    for text in READ:
        ids = tokenizer.encode(text).ids
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == processor.decode(ids)
        assert theirs.decode(ids) == processor.spell(ids)
    said = [{"role": message.role, "content": message.parts[0].value} for message in TALK.messages]
    for start in (0, 1):  # with a system message, and without
        question = type(TALK)("one", TALK.messages[start:])
        told = theirs.apply_chat_template(said[start:], add_generation_prompt=True)["input_ids"]
        assert told == processor.prompt([question], [[]])["tokens"].tolist()
        whole = type(TALK)("one", TALK.messages[start:-1])
        told = theirs.apply_chat_template(said[start:-1])["input_ids"]
        assert told == processor.encode(whole, []).tokens.tolist()
    begin = processor.template.begin or None
    assert (theirs.bos_token, theirs.eos_token) == (begin, processor.template.stop_words[0])


def test_a_llama_folder_names_no_class_of_another_family(tmp_path: Path) -> None:
    exported("llama", as_llama3(), tmp_path)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )


def test_families_that_see_name_the_class_that_fits_the_tokenizer(tmp_path: Path) -> None:
    """InternVL's text may be Qwen's or InternLM's, and tokenizers differ with it."""
    words = [*INTERNLM.special, "<IMG_CONTEXT>"]
    for tokenizer, named in (
        (train_tokenizer(LEARNED * 20, 512, ["<|endoftext|>", *words[1:], "<video>"]), "Qwen2Tokenizer"),
        (as_llama3(("</s>", *words)), "PreTrainedTokenizerFast"),
    ):
        id = tokenizer.token_to_id("<IMG_CONTEXT>")
        folder = tmp_path / named
        _, theirs = exported("internvl", tokenizer, folder, image_token_id=id)
        assert json.loads((folder / "out" / "tokenizer_config.json").read_text())["tokenizer_class"] == named
        for text in READ:
            assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
