"""Conversations as the published chat templates write them: by our processors' templates, and by those we export.

The texts below are what public copies of the published templates give. Docs: docs/reference/presets.md names them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jinja2.sandbox
import pytest

from tessera.core.sample import Message, Part
from tessera.models.glm4v.processor import GLM4V
from tessera.models.internvl.processor import INTERNLM, QWEN
from tessera.models.llama import LLAMA3
from tessera.models.llava.processor import CHATML as ONEVISION
from tessera.models.llava.processor import VICUNA
from tessera.models.processing.chat import ChatTemplate
from tessera.models.qwen2 import CHATML
from tessera.models.qwen3_vl.processor import TEMPLATE as QWEN3_VL

QWEN2_VL = ChatTemplate()  # Qwen2.5-VL's is the same
IMAGE, CLIP = Part("image", None), Part("video", None)


def said(role: str, *parts: str | Part) -> Message:
    return Message(role, tuple(Part("text", part) if isinstance(part, str) else part for part in parts))


SYSTEM = said("system", "Be brief.")
ASKED, ANSWERED = said("user", "Hi"), said("assistant", "Hello.")
SEEN = said("user", IMAGE, "What is it?")
COMPARED = said("user", IMAGE, "and", IMAGE, " differ?")
WATCHED = said("user", CLIP, "What happens?")
CALLED = [ASKED, said("assistant", "<tool_call>"), said("tool", "1"), said("tool", "2")]

# template, conversation, what the published template writes, with the header of the answer
PROMPTS: dict[str, tuple[ChatTemplate, list[Message], str]] = {
    "qwen3_vl text": (QWEN3_VL, [ASKED], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
    "qwen3_vl system and turns": (
        QWEN3_VL,
        [SYSTEM, ASKED, ANSWERED, ASKED],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_vl image": (
        QWEN3_VL,
        [SEEN],
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_vl images": (
        QWEN3_VL,
        [COMPARED],
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>and"
        "<|vision_start|><|image_pad|><|vision_end|> differ?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_vl clip": (
        QWEN3_VL,
        [WATCHED],
        "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What happens?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_vl answers of functions": (
        QWEN3_VL,
        CALLED,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<tool_call><|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3 answers of functions": (
        CHATML,
        CALLED,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<tool_call><|im_end|>\n<|im_start|>user\n"
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_vl a picture as an answer": (
        QWEN3_VL,
        [ASKED, said("tool", IMAGE, "seen")],
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>user\n<tool_response>\n"
        "<|vision_start|><|image_pad|><|vision_end|>seen\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "glm4v text": (GLM4V, [ASKED], "[gMASK]<sop><|user|>\nHi<|assistant|>\n"),
    "glm4v system and turns": (
        GLM4V,
        [SYSTEM, ASKED, ANSWERED, ASKED],
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHello.<|user|>\nHi<|assistant|>\n",
    ),
    "glm4v image": (
        GLM4V,
        [SEEN],
        "[gMASK]<sop><|user|>\n<|begin_of_image|><|image|><|end_of_image|>What is it?<|assistant|>\n",
    ),
    "glm4v images": (
        GLM4V,
        [COMPARED],
        "[gMASK]<sop><|user|>\n<|begin_of_image|><|image|><|end_of_image|>and"
        "<|begin_of_image|><|image|><|end_of_image|> differ?<|assistant|>\n",
    ),
    "glm4v clip": (
        GLM4V,
        [WATCHED],
        "[gMASK]<sop><|user|>\n<|begin_of_video|><|video|><|end_of_video|>What happens?<|assistant|>\n",
    ),
    "qwen2_vl image": (
        QWEN2_VL,
        [SEEN],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>What is it?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen2_vl system": (
        QWEN2_VL,
        [SYSTEM, ASKED],
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    ),
    "onevision texts stand behind media": (
        ONEVISION,
        [said("user", "What is it?", IMAGE)],
        "<|im_start|>user\n<image>\nWhat is it?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "onevision clip": (
        ONEVISION,
        [WATCHED],
        "<|im_start|>user\n<video>\nWhat happens?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llava 1.5": (dataclasses.replace(VICUNA, begin=""), [SEEN], "USER: <image>\nWhat is it? ASSISTANT:"),
    "llama 3": (
        LLAMA3,
        [ASKED, ANSWERED, ASKED],
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
}


def exported(template: ChatTemplate, messages: list[Message]) -> str:
    """What readers of the exported template make of it: they drop line ends behind tags, and spaces before."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    spelled: list[dict[str, Any]] = [
        {
            "role": message.role,
            "content": [
                {"type": p.kind, "text": p.value} if p.kind == "text" else {"type": p.kind} for p in message.parts
            ],
        }
        for message in messages
    ]
    return environment.from_string(template.jinja()).render(messages=spelled, add_generation_prompt=True)


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_the_published_ones(name: str) -> None:
    template, messages, expected = PROMPTS[name]
    assert "".join(piece.text for piece in template.render(messages, answer=True)) == expected
    assert exported(template, messages) == expected


@pytest.mark.parametrize(("template", "begin"), [(QWEN, ""), (INTERNLM, "<s>")])
def test_internvl_spells_pictures_out_where_its_published_template_has_a_mark(
    template: ChatTemplate, begin: str
) -> None:
    header, end = "<|im_start|>user\n", "What is it?<|im_end|>\n<|im_start|>assistant\n"
    ours = "".join(piece.text for piece in template.render([SEEN], answer=True))
    assert ours == f"{begin}{header}<img><IMG_CONTEXT></img>\n{end}"
    assert exported(template, [SEEN]) == f"{begin}{header}<IMG_CONTEXT>\n{end}"
    assert exported(template, [WATCHED]).startswith(f"{begin}{header}<video>\nWhat happens?")


@pytest.mark.parametrize(
    ("written", "system"),
    [
        # Qwen2.5: a branch with functions and one with a system message come before the words that are looked for.
        (
            "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- messages[0]['content'] }}"
            "{{- '</tool_call><|im_end|>\\n' }}"
            "{%- else %}{%- if messages[0]['role'] == 'system' %}"
            "{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}{%- else %}"
            "{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. "
            "You are a helpful assistant.<|im_end|>\\n' }}"
            "{%- endif %}{%- endif %}",
            "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
        ),
        # Qwen3 and Qwen3-VL say nothing of their own.
        (
            "{%- if tools %}{{- '<|im_start|>system\\n' }}{{- '</tool_call><|im_end|>\\n' }}{%- else %}"
            "{%- if messages[0].role == 'system' %}"
            "{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
            "{%- endif %}{%- endif %}",
            None,
        ),
        (
            "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' }}"
            "{%- if messages[0].content is string %}"
            "{{- messages[0].content }}{%- endif %}{{- '<|im_end|>\\n' }}{%- endif %}",
            None,
        ),
        (
            "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
            "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ message['role'] }}\n{% endfor %}",
            "You are a helpful assistant.",
        ),
    ],
)
def test_the_system_prompt_of_a_published_template_is_found(written: str, system: str | None) -> None:
    assert CHATML.system_in(written) == system


@pytest.mark.parametrize("template", [QWEN2_VL, QWEN3_VL, CHATML, LLAMA3, ONEVISION, VICUNA, QWEN, INTERNLM, GLM4V])
def test_a_template_knows_its_own_headers_in_a_folder(template: ChatTemplate) -> None:
    assert template.headers_in(template.jinja())


@pytest.mark.parametrize(
    ("template", "written", "is_own"),
    [
        (LLAMA3, "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}", True),
        (VICUNA, "{{ message['role'].upper() }}: {% if add_generation_prompt %}ASSISTANT:{% endif %}", True),
        (GLM4V, "[gMASK]<sop><|{{ m.role }}|>{% if add_generation_prompt %}<|assistant|>\n{% endif %}", True),
        (LLAMA3, "<|im_start|>{{ message.role }}\n", False),
        (CHATML, "### {{ message.role }}: {{ message.content }}", False),
        (VICUNA, "[INST] {{ message.content }} [/INST]", False),
    ],
)
def test_the_template_of_another_model_is_told_apart(template: ChatTemplate, written: str, is_own: bool) -> None:
    assert template.headers_in(written) is is_own
