"""How families write conversations down."""

from __future__ import annotations

from tessera.data.chat import ChatTemplate, MediaWords, Turn

# As Qwen2.5 and its followers write conversations: what functions answered comes as a user's turn, several answers in
# one.
QWEN_TURNS = {
    "tool": Turn(
        "<|im_start|>user\n<tool_response>\n",
        "\n</tool_response><|im_end|>\n",
        between="\n</tool_response>\n<tool_response>\n",
    ),
    "": Turn("<|im_start|>{role}\n", "<|im_end|>\n"),
}
CHATML = ChatTemplate(special=("<|im_start|>", "<|im_end|>"), turns=QWEN_TURNS, media={}, system=None)
LLAMA3 = ChatTemplate(
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    turns={"": Turn("<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")},
    media={},
    begin="<|begin_of_text|>",
    system=None,
    end_of_text="<|end_of_text|>",
)
VICUNA = ChatTemplate(
    special=("<s>", "</s>"),
    turns={
        "system": Turn("", " "),
        "assistant": Turn("ASSISTANT: ", "</s>"),
        "": Turn("USER: ", " "),
    },
    media={},
    begin="<s>",
    system="A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions.",
    end_of_text="</s>",
)
GLM4V = ChatTemplate(
    special=(
        "[gMASK]",
        "<sop>",
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|begin_of_image|>",
        "<|end_of_image|>",
        "<|begin_of_video|>",
        "<|end_of_video|>",
    ),
    turns={
        "system": Turn("<|system|>\n", ""),
        "user": Turn("<|user|>\n", ""),
        "assistant": Turn("<|assistant|>\n", ""),
        "tool": Turn("<|observation|>\n", ""),
    },
    media={
        "video": MediaWords("<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
        "image": MediaWords("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    },
    begin="[gMASK]<sop>",
    system=None,
    next_turns=("<|user|>", "<|observation|>"),
)
