"""Conversations of classes of transformers: what is trained on, whatever a folder's template does; what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

import tessera
from tessera.config.run_config import ModelSection
from tessera.core.batch import IGNORE
from tessera.core.sample import MediaSize, Message, Part, Sample
from tessera.errors import TesseraError
from tessera.models import resolve
from tessera.models.glm4v.processor import GLM4V
from tessera.models.internvl.processor import INTERNLM
from tessera.models.llama import LLAMA3
from tessera.models.llava.processor import VICUNA
from tessera.models.processing.chat import ChatTemplate
from tessera.models.transformers import ClassProcessor, rendering
from tessera.models.transformers.library import checked_processor
from tessera.models.transformers.marks import BEGIN, END, Encoding, generation_marks, marked, with_marks, without_marks
from tessera.models.transformers.rendering import TemplateLimit, render
from tests.errors import raises
from tests.quick import quick
from tests.toys.text_classes import tokenizer
from tests.toys.vision_classes import CLASSES, write_class

transformers.utils.logging.disable_progress_bar()
ANSWER = "{% for message in messages %}{{ message.role }}: {{ message.content }}</s>\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_class("idefics3", tmp_path_factory.mktemp("class") / "idefics3")


@pytest.fixture
def with_template(folder: Path, tmp_path: Path) -> Any:
    def make(template: str | None) -> Path:
        copy = tmp_path / "model"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        (copy / "chat_template.jinja").unlink()
        if template is not None:
            (copy / "chat_template.jinja").write_text(template)
        return copy

    return make


def processor_of(folder: Path, **options: Any) -> ClassProcessor:
    spec, config = resolve(ModelSection(path=folder))
    assert spec.processor is not None
    processor = spec.processor(config, folder, **options)
    assert isinstance(processor, ClassProcessor)
    return processor


def sample(*turns: tuple[str, str]) -> Sample:
    return Sample("s", tuple(Message(role, (Part("text", text),)) for role, text in turns))


TALK = sample(("user", "What?"), ("assistant", "red"), ("user", "And?"), ("assistant", " blue \n"))


def trained(processor: ClassProcessor, talk: Sample = TALK) -> str:
    labels = processor.encode(talk, []).labels
    return processor.spell([label for label in labels.tolist() if label != IGNORE])


# ---------------------------------------------------------------------------------------------- marks


def test_marks_move_with_the_text() -> None:
    assert marked(" blue \n") == f" {BEGIN}blue{END} \n"
    assert marked("  ") == f"  {BEGIN}{END}"
    text, spans = without_marks("a" + marked("b") + "c" + marked("d"))
    assert (text, spans) == ("abcd", ((1, 2), (3, 4)))
    assert with_marks(text, spans) == "a" + marked("b") + "c" + marked("d")
    for broken in (BEGIN, END, END + BEGIN):
        with pytest.raises(ValueError, match="trained range"):
            without_marks(broken)


def test_a_token_with_any_marked_character_is_trained() -> None:
    encoding = Encoding("ab cd", ((3, 5),), [9, 1, 2, 3], [(0, 0), (0, 2), (2, 4), (4, 5)])
    assert encoding.trained() == [False, False, True, True]


def test_generation_blocks_write_marks_and_change_nothing_else() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for block in (
        "{% generation %}\n A{{ 1 }}\n{% endgeneration %}\n",
        "x  {%- generation -%}  A \n {%- endgeneration %} y",
    ):
        template = f"b{{% if true %}}\n  {block}\n{{% endif %}}\ne"
        marks = generation_marks(template)
        assert marks is not None
        plain, marked_text = (
            render_jinja_template([[{"role": "user", "content": ""}]], chat_template=jinja)[0][0]
            for jinja in (template, marks)
        )
        text, spans = without_marks(marked_text)
        assert text == plain
        assert len(spans) == 1
        assert "A" in text[slice(*spans[0])]
    assert generation_marks("no block") is None


# ---------------------------------------------------------------------------------------------- what is trained on


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # Turns end with a special word; content is removed white space from.
        ("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>\n{% endfor %}", " red</s> blue</s>"),
        # Nothing ends a turn: the end of a text is added after the last.
        ("{% for m in messages %}{{ m.role }}:\n{{ m.content }}\n{% endfor %}", "red blue</s>"),
        # Blocks say it, also what the template adds to an answer.
        (
            "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}<<{{ m.content }}>>"
            "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
            "<<red>><< blue \n>></s>",
        ),
        # The content is a list of parts, or a string: whatever the template takes.
        (
            "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}</s>{% endfor %}",
            "red</s> blue \n</s>",
        ),
    ],
)
def test_what_is_trained_on(with_template: Any, template: str, expected: str) -> None:
    assert trained(processor_of(with_template(template))) == expected


def test_a_template_that_changes_words_is_refused(with_template: Any) -> None:
    loud = "{% for m in messages %}[{{ m.role }}]{{ m.content | upper | trim }}</s>{% endfor %}"
    with raises("tokenizer.template-changes-message") as refused:
        trained(processor_of(with_template(loud)))
    assert "{% generation %}" in str(refused.value)
    with raises("recipe.renamed-key", "{% generation %}"):
        processor_of(with_template(loud), response_start="[assistant]")


@pytest.mark.parametrize(
    ("template", "error"),
    [
        (
            "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
            "tokenizer.template-changes-message",
        ),
        ("{% for m in messages %}{{ m.content.split('|')[-1] }}{% endfor %}", "tokenizer.template-changes-message"),
        ("{{ messages[-1].content }}", "tokenizer.template-changes-message"),
        ("{{ raise_exception('only users speak') }}", "tokenizer.template-refuses"),
        ("{{ 1 / 0 }}", "tokenizer.template-refuses"),
        (
            "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}",
            "tokenizer.generation-blocks-mismatch",
        ),
    ],
)
def test_a_template_that_drops_turns_is_refused(with_template: Any, template: str, error: str) -> None:
    talk = sample(("system", "Be brief."), ("user", "What?"), ("assistant", "think|red"))
    with raises(error):
        trained(processor_of(with_template(template)), talk)


def test_words_of_the_template_that_someone_says_are_refused(folder: Path) -> None:
    processor = processor_of(folder)
    for word in ("<image>", "<end_of_utterance>", "</s>", BEGIN):
        with pytest.raises(TesseraError, match=r"message 2|reserved"):
            processor.encode(sample(("user", "a"), ("assistant", f"b {word}")), [])
        with pytest.raises(TesseraError, match="message 1"):
            processor.prompt([sample(("user", f"a {word}"))], [[]])


def test_plain_text_is_trained_on_as_a_whole(folder: Path) -> None:
    assert trained(processor_of(folder), sample(("text", "red and blue"))) == " and blue</s>"


def test_an_answer_may_look_like_a_list_of_parts(folder: Path) -> None:
    talk = sample(("user", "Where?"), ("assistant", '[{"type": "box"}]'))
    assert trained(processor_of(folder), talk).strip() == '[{"type": "box"}]<end_of_utterance>'


def test_a_system_message_can_be_given(folder: Path) -> None:
    processor = processor_of(folder, system="Be brief.")
    spelled = processor.spell(processor.encode(TALK, []).tokens.tolist())
    assert spelled.startswith("<s>System: Be brief.<end_of_utterance>\nUser: What?")
    told = sample(("system", "Be long."), ("user", "What?"), ("assistant", "red"))
    assert "brief" not in processor.spell(processor.encode(told, []).tokens.tolist())


def test_a_video_is_read_as_its_frames(folder: Path) -> None:
    processor = processor_of(folder, max_frames=3)
    assert processor.sampling.count(100, 10.0) == 3
    talk = Sample("v", (Message("user", (Part("video", "v.mp4"), Part("text", "What?"))), *TALK.messages[1:]))
    frames = np.random.default_rng(0).integers(0, 255, (3, 20, 20, 3), dtype=np.uint8)
    encoded = processor.encode(talk, [frames])
    assert encoded.counts["frames"] == 3
    assert encoded.counts == processor.measure(talk, [MediaSize(20, 20, 3)])
    batch = processor.collate([[encoded]], 0)
    assert batch["pixel_values"].shape[1] == 3 * 5  # each is cut in four and shown whole
    with raises("data.unsupported-part"):
        processor.encode(Sample("a", (Message("user", (Part("audio", "a"),)),)), [np.zeros(4, np.float32)])


def test_a_processor_travels_to_workers_and_measures_the_same(folder: Path) -> None:
    processor = processor_of(folder).training_on(("assistant",))
    talk = Sample("i", (Message("user", (Part("image", None), Part("text", "What?"))), *TALK.messages[1:]))
    there = pickle.loads(pickle.dumps(processor))  # noqa: S301
    assert len(pickle.dumps(processor)) < 20_000
    assert there.fingerprint == processor.fingerprint
    size = [MediaSize(31, 12)]
    assert there.measure(talk, size) == processor.measure(talk, size)
    real = processor.encode(talk, [Image.new("RGB", (31, 12), "red")])
    assert real.counts == processor.measure(talk, size)


def test_a_hole_in_a_batch_is_padding(folder: Path) -> None:
    from tessera.data.order.packed_rows import hole

    processor = processor_of(folder)
    item = processor.encode(TALK, [])
    batch = processor.collate([[item], [hole("bad", 11)]], 0)
    assert (batch["labels"][1] == IGNORE).all()
    assert set(batch["input_ids"][1].tolist()) == {processor.library.pad}


# ---------------------------------------------------------------------------------------------- folders


def start(folder: Path, tmp_path: Path, **model: str) -> None:
    rows = [{"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]}] * 2
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tessera.train(
        {
            "name": "short",
            "out": str(tmp_path / "runs"),
            "model": {"path": str(folder), **model},
            "data": {"train": str(tmp_path / "rows.jsonl"), "length": 64, "workers": 0},
            "train": {"steps": 1, "global_batch": 1, "device": "cpu"},
        }
    )


def test_a_folder_without_a_template_is_refused_before_data_is_read(with_template: Any, tmp_path: Path) -> None:
    with raises("tokenizer.no-chat-template") as refused:
        start(with_template(None), tmp_path)
    assert "chat_template.jinja" in str(refused.value)
    with raises("tokenizer.template-image-count"):
        start(
            with_template("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"),
            tmp_path,
        )


def test_a_folder_without_a_tokenizer_is_refused(with_template: Any, tmp_path: Path) -> None:
    bare = with_template(None)
    for path in bare.glob("tokenizer*"):
        path.unlink()
    with raises("tokenizer.files-missing") as refused:
        start(bare, tmp_path)
    assert refused.value.fix is not None
    assert "model.tokenizer" in refused.value.fix


def test_a_processor_that_is_code_in_the_folder_is_never_run(with_template: Any, tmp_path: Path) -> None:
    other = with_template(ANSWER)
    (other / "own.py").write_text("raise SystemExit('code of the folder was run')\n")
    settings = json.loads((other / "processor_config.json").read_text())
    settings |= {"processor_class": "OwnProcessor", "auto_map": {"AutoProcessor": "own.OwnProcessor"}}
    (other / "processor_config.json").write_text(json.dumps(settings))
    config = json.loads((other / "config.json").read_text())
    config["model_type"] = "idefics3"
    (other / "config.json").write_text(json.dumps(config))
    (other / "preprocessor_config.json").write_text("{}")
    with raises("tokenizer.code-in-folder"):
        start(other, tmp_path)


@pytest.mark.parametrize("model_type", ["idefics3", "own_vl"])
def test_a_class_that_is_code_in_the_folder_is_refused(with_template: Any, model_type: str, tmp_path: Path) -> None:
    other = with_template(ANSWER)
    config = json.loads((other / "config.json").read_text()) | {"model_type": model_type}
    config |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModel": "own.OwnForCausalLM"}}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(TesseraError, match="never run"):
        start(other, tmp_path)


def test_images_given_flat_where_a_processor_wants_one_to_a_text(tmp_path: Path) -> None:
    folder = write_class("got_ocr2", tmp_path, weights=False)
    processor = processor_of(folder)
    talk = Sample("i", (Message("user", (Part("image", None), Part("text", "What?"))), *TALK.messages[1:]))
    items = [processor.encode(talk, [Image.new("RGB", size)]) for size in ((20, 30), (9, 9))]
    assert processor.collate([[item] for item in items], 0)["pixel_values"].shape[0] == 2
    assert CLASSES["got_ocr2"].several is False


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    from tests.toys.hf_folders import write_folder

    folder = write_folder("whisper", tmp_path / "whisper")
    with raises("model.encoder-decoder") as refused:
        start(folder, tmp_path, family="transformers")
    assert "data.kind" in str(refused.value.fix)


# ---------------------------------------------------------------------------------------------- other packages


@pytest.mark.parametrize(("options", "backend"), [({}, "pil"), ({"image_backend": "torchvision"}, "torchvision")])
def test_what_resizes_images_is_chosen_by_a_key_and_not_by_what_is_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], backend: str
) -> None:
    """torchvision is stubbed: it is found, and the library is asked for its preprocessor."""
    load, backends = transformers.AutoImageProcessor.from_pretrained, []

    def stub(place: Any, backend: str | None = None, **keys: Any) -> Any:
        backends.append(backend)
        return load(place, backend="pil", **keys)

    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", stub)
    if backend == "torchvision" and find_spec("torchvision") is None:
        with pytest.raises(TesseraError, match="torchvision is not installed"):
            assert processor_of(folder, **options).library
        monkeypatch.setattr(
            "importlib.util.find_spec", lambda name, find=find_spec: name == "torchvision" or find(name)
        )
    processor = processor_of(folder, **options)
    assert processor.sees
    assert backends[-1] == backend
    assert (processor.fingerprint == processor_of(folder).fingerprint) == (backend == "pil")


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_says_how_to_get_it(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    kinds = {"image_processor_type": "PixtralImageProcessorFast", "processor_class": "PixtralProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(kinds))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral3"}))
    with pytest.raises(TesseraError, match="Torchvision") as caught:
        checked_processor(tmp_path, {"model_type": "mistral3"})
    assert "pip install torchvision" in str(caught.value.fix)


# What templates use: loops with controls, macros, namespaces, dictionaries, JSON, generation blocks, white space.
FEATURES = """{% macro turn(m) %}{{ bos_token }}[{{ m.role | upper }}]{{ m['content'] | trim }}{% endmacro %}
{%- set ns = namespace(count=0, self=dict(a=1)) %}
    {% for m in messages %}
        {% if loop.first and m.role == 'system' %}{% continue %}{% endif %}
        {% set ns.count = ns.count + 1 %}
        {% generation %}{{ turn(m) }}{% endgeneration %}
        {{ {"n": ns.count, "é": [1, 2]} | tojson(indent=2) }}{{ ns.self | tojson }}
        {% if ns.count > 2 %}{% break %}{% endif %}
    {% endfor %}
{{ messages[-1].content.split('l') | join('-') }}{{ tools }}{% if add_generation_prompt %}<|answer|>{% endif %}
"""


@pytest.mark.parametrize("template", [ChatTemplate(), LLAMA3, VICUNA, INTERNLM, GLM4V])
def test_templates_are_rendered_as_transformers_does(template: ChatTemplate, folder: Path) -> None:
    words = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be \ud800 brief."}, {"role": "user", "content": " Hi\u2028 "}]
    whole = [*messages, {"role": "assistant", "content": "hello\n"}]
    for jinja in (template.jinja(), FEATURES):
        for chat, answer in ((messages, True), (whole, False)):
            expected = words.apply_chat_template(
                chat, chat_template=jinja, tokenize=False, add_generation_prompt=answer
            )
            assert render(jinja, chat, words.special_tokens_map, answer=answer) == expected


EXPLODING = {
    "takes too long": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory, when it is compiled": "{{ 'a' * 10 ** 10 }}",
    "memory, by doubling": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s * 2 %}{% endfor %}",
    "memory, by a method": "{{ messages[0].role.center(10 ** 10) }}",
    "memory, by a filter": "{{ messages | tojson(indent=10 ** 9) }}",
    "calls itself, in a macro": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "calls itself, in a loop": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "writes more than": "{% for i in range(90000) %}{{ messages[0].role * 1000 }}{% endfor %}",
}


@pytest.mark.parametrize(
    "kind", quick(EXPLODING, "takes too long", "memory, by a method", "calls itself, in a macro", "writes more than")
)
def test_a_template_that_explodes_is_refused_at_the_start(
    kind: str, with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "takes too long":
        monkeypatch.setattr(rendering, "_SECONDS", 0.2)
    processor = processor_of(with_template(EXPLODING[kind]))
    with pytest.raises(TemplateLimit, match=kind.partition(",")[0]) as refused:
        processor.library.check()
    assert str(processor.folder) in str(refused.value.where)


def test_the_first_limit_that_a_template_exceeds_ends_a_start(
    with_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit counts for a start, and not for each place that asks the template for something."""
    monkeypatch.setattr(rendering, "_SECONDS", 0.1)
    requests, ask = [], rendering._RenderProcess.ask
    monkeypatch.setattr(rendering._RenderProcess, "ask", lambda self, request: requests.append(1) or ask(self, request))
    with pytest.raises(TemplateLimit, match="takes too long"):
        start(with_template(EXPLODING["takes too long"]), tmp_path)
    assert len(requests) == 1


def test_a_template_that_explodes_for_one_conversation_alone_spoils_that_one(with_template: Any) -> None:
    bomb = "{% if 'boom' in messages[0].content %}{{ 'a' * (10 ** 10 + messages | length) }}{% endif %}"
    processor = processor_of(with_template(bomb + ANSWER))
    processor.library.check()
    with pytest.raises(TemplateLimit, match="memory"):
        processor.encode(sample(("user", "boom"), ("assistant", "red")), [])
    assert processor.encode(TALK, []).counts["trained"]
