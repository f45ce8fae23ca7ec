"""Chat templates as data, which render conversations as text spans.

A span is text or a special token. Its flag `trained` says whether the loss includes it: the loss includes the text of
trained roles and the token that ends their turn, but no headers and no other roles. Exports contain the same template
as Jinja, so that other tools write conversations in the same way.

Control words are the special tokens that a template writes around messages: headers, ends of turns, `<tool_response>`
if the tokenizer has it, tokens around and in place of media, the end of plain text. The same characters in a message
(system messages and results of tools included) stay text. Tokens that a model writes within its turn, such as `<think>`
and `<tool_call>`, are not control words: the tokenizer encodes them, and they do not end a turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tessera.core.sample import PLAIN, Message, Part, PartKind
from tessera.data.tool_calls import lists_only_tools, with_listing
from tessera.errors import TesseraError
from tessera.models.processing.tool_jinja import JINJA_BLANK, JINJA_CALLS, JINJA_LISTING, JINJA_MACRO


@dataclass(frozen=True)
class ChatSpan:
    """Hold a part of a rendered conversation.

    `special`: `text` is a special token; otherwise it is plain text, even if it looks like a special token.
    """

    text: str
    role: str
    trained: bool = False
    special: bool = False
    media: PartKind | None = None  # kind of media that this placeholder stands for; it is repeated for each token


@dataclass(frozen=True)
class Turn:
    """Define the text before and after the messages of a role.

    The loss of a trained role includes `after` up to its last special token. `text_before` and `text_after` enclose
    each text of a message, but not its media.
    """

    before: str
    after: str
    text_before: str = ""
    text_after: str = ""
    between: str = ""  # replaces `after` and `before` between consecutive turns of the same role


@dataclass(frozen=True)
class MediaWords:
    """Define the special tokens that represent an image, a video or a recording.

    `word`: placeholder of a single token; empty if no token stands for media. `before` and `after`: tokens around all
    placeholders. `mark`: text that chat templates of folders write instead, if the family's processor expands it later.
    `label`: text before these tokens; `{number}` in it counts the media of this kind in a conversation.
    """

    word: str
    before: str = ""
    after: str = ""
    mark: str = ""
    label: str = ""


_QWEN_MEDIA: Mapping[PartKind, MediaWords] = {
    "image": MediaWords("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "video": MediaWords("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
_ANY = ""  # key in `turns` for all roles that have no key of their own
_MARKUP = re.compile(r"[<\[{].*[>\]}]")  # matches markup such as <|im_start|>; tokenizers also add spaces and newlines
_UNLESS_SYSTEM = "{% if loop.first and message.role != 'system'"
_NO_TOOLS = " and not tools"


@dataclass(frozen=True)
class ChatTemplate:
    """Define how a conversation is written as text. The defaults are ChatML with the media tokens of Qwen."""

    # Special tokens that occur in the template's texts, except placeholders of media.
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    turns: Mapping[str, Turn] = field(default_factory=lambda: {_ANY: Turn("<|im_start|>{role}\n", "<|im_end|>\n")})
    media: Mapping[PartKind, MediaWords] = field(default_factory=lambda: dict(_QWEN_MEDIA))
    begin: str = ""  # text before the first message of a conversation
    system: str | None = "You are a helpful assistant."  # system message of conversations without one
    end_of_text: str = "<|endoftext|>"  # token that ends plain text
    # For templates without an end-of-turn token: tokens that begin a turn. The model learns to write them after its
    # answer. The first of them ends a conversation.
    next_turns: tuple[str, ...] = ()
    media_first: bool = False  # write all media of a turn before its texts

    def special_words(self) -> list[str]:
        return [*self.special, *dict.fromkeys(media.word for media in self.media.values() if media.word)]

    def control_words(self) -> list[str]:
        """Return all special tokens that this template may write."""
        return [word for word in (*self.special_words(), self.end_of_text, *self.next_turns) if word]

    def with_words_of(self, added: Collection[str]) -> ChatTemplate:
        """Return the template for a tokenizer with these added tokens.

        Added tokens in the template's own texts become special, so that messages cannot contain them.
        """
        turns = [text for turn in self.turns.values() for text in (turn.before, turn.after, turn.between)]
        turns += [text for turn in self.turns.values() for text in (turn.text_before, turn.text_after)]
        media = [text for words in self.media.values() for text in (words.before, words.after)]
        control, written = set(self.control_words()), "\n".join([self.begin, *turns, *media])
        more = [word for word in added if word in written and word not in control and _MARKUP.fullmatch(word)]
        return replace(self, special=(*self.special, *sorted(more))) if more else self

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        """Return a regular expression that matches any special token, to split texts of the template at them."""
        return re.compile("(" + "|".join(re.escape(word) for word in self.special) + ")")

    @property
    def stop_words(self) -> list[str]:
        """Return the tokens that end an answer."""
        return [*self._cut.findall(self._turn("assistant").after), *self.next_turns]

    def render(
        self,
        messages: Sequence[Message],
        train_on: Collection[str] = ("assistant",),
        *,
        last_only: bool = False,
        answer: bool = False,
        show: Callable[[Part, str], list[ChatSpan]] | None = None,
        write: Callable[[Part, ChatSpan], list[ChatSpan]] | None = None,
    ) -> list[ChatSpan]:
        """Return a conversation as text spans.

        `last_only`: train only the last of the trained turns. `answer`: end with the header of an assistant's turn,
        which a model continues. `show`: returns the spans of a media part; default: its placeholder with the enclosing
        tokens. `write`: turns the span of a text with boxes or points into spans that contain their coordinates.
        """
        messages = self._with_own_prompt(messages)
        spans = self._words(self.begin, "system")
        if self.system is not None and (not messages or messages[0].role not in ("system", PLAIN)):
            said = self._text(self.system, "system", trained=False) if self.system else []
            spans += [*self._header("system"), *said, *self._end("system", trained=False)]
        turns = [number for number, message in enumerate(messages) if message.role in train_on]
        trained_turns = set(turns[-1:] if last_only else turns)
        before: Message | None = None
        numbers: Counter[PartKind] = Counter()
        for number, message in enumerate(messages):
            trained = number in trained_turns or message.role == PLAIN
            content = self._content(message, trained, show or self.show, write, numbers)
            if message.role == PLAIN:
                spans += [*content, ChatSpan(self.end_of_text, PLAIN, True, special=True)]
                before = message
                continue
            header = [] if self._goes_on(before, message.role) else self._header(message.role)
            if self.next_turns and header and number - 1 in trained_turns:
                header[0] = replace(header[0], trained=header[0].special)
            again = number + 1 < len(messages) and self._goes_on(message, messages[number + 1].role)
            end = self._words(self._turn(message.role).between, message.role) if again else None
            spans += [*header, *content, *(self._end(message.role, trained) if end is None else end)]
            before = message
        if answer:
            return spans + self._header("assistant")
        if self.next_turns and messages and messages[-1].role == "assistant":
            last = len(messages) - 1 in trained_turns
            spans.append(ChatSpan(self.next_turns[0], "assistant", last, special=True))
        return spans

    def _with_own_prompt(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Put the template's default system message before a system message that only lists tools."""
        said = messages[0].parts if self.system and messages and messages[0].role == "system" else ()
        if not self.system or not said or said[0].kind != "text" or not lists_only_tools(said[0].value):
            return messages
        both = Part("text", with_listing(self.system, said[0].value))
        return [Message("system", (both, *said[1:])), *messages[1:]]

    def beginning(self, answer: Message) -> list[ChatSpan]:
        """Return the spans of an unfinished answer, without the header of its turn. The model continues them."""
        text = "".join(part.value for part in answer.parts if part.kind == "text")
        return [*self._words(self._turn(answer.role).text_before, answer.role), ChatSpan(text, answer.role)]

    def show(self, part: Part, role: str) -> list[ChatSpan]:
        words = self.words_of(part)
        return [
            *self._words(words.before, role),
            ChatSpan(words.word, role, special=True, media=part.kind),
            *self._words(words.after, role),
        ]

    def words_of(self, part: Part) -> MediaWords:
        if part.kind not in self.media:
            raise TesseraError(
                f"this model does not support {part.kind} input",
                fix="remove such samples",
                code="media.kind-not-supported",
            )
        return self.media[part.kind]

    def _content(
        self,
        message: Message,
        trained: bool,
        show: Callable[[Part, str], list[ChatSpan]],
        write: Callable[[Part, ChatSpan], list[ChatSpan]] | None,
        numbers: Counter[PartKind],
    ) -> list[ChatSpan]:
        """Return the spans of a message. `numbers`: counts the media of the conversation by kind."""
        spans: list[ChatSpan] = []
        parts = sorted(message.parts, key=lambda p: p.kind == "text") if self.media_first else message.parts
        for part in parts:
            if part.kind == "text":
                said = ChatSpan(part.value, message.role, trained)
                written = write(part, said) if part.regions and write is not None else [said]
                spans += self._enclosed(written, message.role)
            else:  # placeholders of media are not trained
                numbers[part.kind] += 1
                label = self.words_of(part).label.format(number=numbers[part.kind])
                spans += [*([ChatSpan(label, message.role)] if label else []), *show(part, message.role)]
        return spans

    def _text(self, text: str, role: str, trained: bool) -> list[ChatSpan]:
        return self._enclosed([ChatSpan(text, role, trained)], role)

    def _enclosed(self, said: list[ChatSpan], role: str) -> list[ChatSpan]:
        """Return the spans of a message's text between `text_before` and `text_after` of its turn."""
        if role == PLAIN:
            return said
        turn = self._turn(role)
        return [*self._words(turn.text_before, role), *said, *self._words(turn.text_after, role)]

    def _turn(self, role: str) -> Turn:
        return self.turns[role] if role in self.turns else self.turns[_ANY]

    def _goes_on(self, before: Message | None, role: str) -> bool:
        """Return whether a message continues the turn of the previous message, which has the same role.

        Then no new header is written. Only roles with a `between` text have such turns.
        """
        return before is not None and before.role == role and bool(self._turn(role).between)

    def _header(self, role: str) -> list[ChatSpan]:
        # Find special tokens before {role} is replaced, so that a role name never counts as a special token.
        spans = self._words(self._turn(role).before, role)
        return [p if p.special else replace(p, text=p.text.replace("{role}", role)) for p in spans]

    def _end(self, role: str, trained: bool) -> list[ChatSpan]:
        spans = self._words(self._turn(role).after, role)
        last = max((number for number, span in enumerate(spans) if span.special), default=-1)
        return [ChatSpan(p.text, p.role, trained and n <= last, p.special) for n, p in enumerate(spans)]

    def _words(self, text: str, role: str) -> list[ChatSpan]:
        parts = self._cut.split(text) if self.special else [text]
        return [ChatSpan(part, role, special=bool(number % 2)) for number, part in enumerate(parts) if part]

    # ------------------------------------------------------------------------------------------ folders

    def system_in(self, jinja: str) -> str | None:
        """Return the default system message in the chat template of a model folder, extracted from its Jinja text."""
        turn = self._turn("system")
        before = turn.before.replace("{role}", "system") + turn.text_before
        after = (turn.text_after + turn.after).rstrip("\n")
        if not before:  # without a header to search for, only templates that Tessera wrote are recognised
            start = re.escape(_UNLESS_SYSTEM) + f"(?:{_NO_TOOLS})? %\\}}"
            branch = re.search(start + "(.*?)" + re.escape(after + "{% endif %}"), jinja, re.DOTALL)
            return None if branch is None else branch[1].removeprefix("{% raw %}").removesuffix("{% endraw %}")
        # A newline may be written as \n. The system message ends where `after` begins, or at the next Jinja tag if the
        # template has no text after a message. A match that contains Jinja tags is not the system message.
        said = r"(\{% raw %\}.+?\{% endraw %\}|.+?)(?=\{%)" if not after else "(.*?)" + re.escape(after)
        for match in re.findall(re.escape(before) + said, jinja.replace("\\n", "\n"), re.DOTALL):
            text = str(match).removeprefix("{% raw %}").removesuffix("{% endraw %}")
            # Skip a match that is a part of a Jinja expression, such as concatenated strings: it is not the message.
            if text != match or not re.search(r"\{[%{]|[%}]\}|^['\"] *\+", text):
                return text
        return None

    def header(self, role: str) -> str:
        """Return the text before a message of a role."""
        return self._turn(role).before.replace("{role}", role)

    def headers_in(self, jinja: str) -> bool:
        """Return whether the chat template of a model folder contains this template's header of users or assistants.

        One header is enough, because templates build the headers of all roles from the role names. If this template has
        no headers, return True.
        """
        text = jinja.replace("\\n", "\n")
        parts = [self.header(role) for role in ("user", "assistant")]
        parts += [part for role in ("user", "assistant") for part in self._turn(role).before.split("{role}")]
        words = [word for part in parts if len(word := part.strip()) > 3]
        return not words or any(word in text for word in words)

    def jinja(self) -> str:
        """Return the template as Jinja, for exports."""
        first = self._turn("system")
        header, said = first.before.replace("{role}", "system"), ""
        prompt = _raw(self.system) if self.system else ""
        if self.system is not None:
            words = first.text_before + prompt + first.text_after if prompt else ""
            said = _UNLESS_SYSTEM + _NO_TOOLS + " %}" + header + words + first.after + "{% endif %}"
        words = first.text_before + prompt + (JINJA_BLANK if prompt else "") + JINJA_LISTING + first.text_after
        said += _UNLESS_SYSTEM + " and tools %}" + header + words + first.after + "{% endif %}"
        counted = [kind for kind, words in self.media.items() if words.label]
        counts = f"{{% set shown = namespace({', '.join(f'{kind}=0' for kind in counted)}) %}}" if counted else ""
        return (
            JINJA_MACRO
            + counts
            + self.begin
            + "{% for message in messages %}"
            + said
            + "{% set listed = tools and loop.first and message.role == 'system' %}"
            + self._by_role(_jinja_before)
            + "{% if message.content is string %}"
            + self._jinja_text("message.content", "listed")
            + "{% elif message.content %}{% for part in message.content %}"
            + self._jinja_media()
            + "{% endfor %}{% endif %}"
            + "{% if message.tool_calls %}"
            + self._jinja_enclosed(JINJA_CALLS)
            + "{% endif %}"
            + self._by_role(_jinja_after)
            + "{% endfor %}"
            + "{% if add_generation_prompt %}"
            + self._turn("assistant").before.replace("{role}", "assistant")
            + "{% endif %}"
        )

    def _by_role(self, text: Callable[[Turn], str]) -> str:
        other = text(self.turns[_ANY]) if _ANY in self.turns else ""
        named = {role: text(turn) for role, turn in self.turns.items() if role != _ANY}
        if all(text_of == other for text_of in named.values()):
            return other
        tests = "".join(
            ("{% if" if n == 0 else "{% elif") + f" message.role == '{role}' %}}{text_of}"
            for n, (role, text_of) in enumerate(named.items())
        )
        return tests + ("{% else %}" + other if other else "") + "{% endif %}"

    def _jinja_text(self, value: str, listed: str) -> str:
        """Return Jinja that writes the text `value`, then the list of tools if the Jinja condition `listed` holds."""
        tools = "{% if " + value + " %}" + JINJA_BLANK + "{% endif %}" + JINJA_LISTING
        return self._jinja_enclosed("{{ " + value + " }}{% if " + listed + " %}" + tools + "{% endif %}")

    def _jinja_enclosed(self, text: str) -> str:
        before = self._by_role(lambda turn: _with_line_end(turn.text_before))
        return before + text + self._by_role(lambda turn: turn.text_after)

    def _jinja_media(self) -> str:
        text = self._jinja_text("part.text", "listed and loop.last")
        if not self.media:
            return text
        out = ""
        for number, (kind, words) in enumerate(self.media.items()):
            also = f" or '{kind}_url' in part" if kind in ("image", "audio") else ""
            word = "if" if number == 0 else "elif"
            written = words.mark or f"{words.before}{words.word}{words.after}"
            if words.label:
                count = f"{{% set shown.{kind} = shown.{kind} + 1 %}}"
                written = count + words.label.format(number=f"{{{{ shown.{kind} }}}}") + written
            out += f"{{% {word} part.type == '{kind}' or '{kind}' in part{also} %}}{written}"
        if self.media_first:
            again = "{% endif %}{% endfor %}{% for part in message.content %}"
            return out + again + "{% if 'text' in part %}" + text + "{% endif %}"
        return out + "{% elif 'text' in part %}" + text + "{% endif %}"


def _jinja_before(turn: Turn) -> str:
    before = turn.before.replace("{role}", "{{ message.role }}")
    if not turn.between:
        return before
    return "{% if loop.first or messages[loop.index0 - 1].role != message.role %}" + before + "{% endif %}"


def _jinja_after(turn: Turn) -> str:
    if not turn.between:
        return turn.after
    # Written as Jinja strings, because Jinja removes a newline after a tag.
    again, end = (text.replace("\n", "\\n") for text in (turn.between, turn.after))
    same = "not loop.last and messages[loop.index0 + 1].role == message.role"
    return "{% if " + same + " %}{{ '" + again + "' }}{% else %}{{ '" + end + "' }}{% endif %}"


def _with_line_end(text: str) -> str:
    """Return the text with its first newline written as a Jinja string, because Jinja removes a newline after a tag."""
    return "{{ '\\n' }}" + text[1:] if text.startswith("\n") else text


def _raw(text: str) -> str:
    """Return a text for use in a Jinja template, escaped if it contains braces."""
    return "{% raw %}" + text + "{% endraw %}" if "{" in text else text
