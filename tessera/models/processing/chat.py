"""How a conversation is written down for a model: a template as data, rendered into spans.

A span is text or one special word, and knows whether the model is trained to write it: what a trained role says and
the word that ends its turn are, headers and everyone else are not. The same template as Jinja goes into exported
folders, so that other tools write conversations the same way.

Control words are the words of the vocabulary that a template itself writes around what is said: headers, ends of turns,
`<tool_response>` where the tokenizer has it, the words that enclose and stand for media, the end of a plain text. They
come from the template alone. The same letters in what anyone says (system prompts and results of tools included) are
text, whatever the tokenizer calls special. Words that a model says within its turn, such as `<think>` and
`<tool_call>`, are no control words: they are written as the tokenizer has them, and end and begin no turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tessera.core.sample import PLAIN, Message, Part, PartKind
from tessera.data.tool_calls import JINJA_BLANK, JINJA_CALLS, JINJA_LISTING, JINJA_MACRO, lists_only_tools, with_listing
from tessera.errors import TesseraError


@dataclass(frozen=True)
class ChatSpan:
    """Hold a part of a rendered conversation.

    `special`: `text` is one word of the vocabulary; otherwise it is plain text, whatever it looks like.
    """

    text: str
    role: str
    trained: bool = False
    special: bool = False
    media: PartKind | None = None  # this special word is repeated as often as the media needs


@dataclass(frozen=True)
class Turn:
    """State which text a template writes before and after the words of a role.

    Of `after`, a trained role learns to write all up to the last special word. `text_before` and `text_after` enclose
    each text of a message, but not its media.
    """

    before: str
    after: str
    text_before: str = ""
    text_after: str = ""
    between: str = ""  # replaces `after` and `before` where the role speaks again


@dataclass(frozen=True)
class MediaWords:
    """State which words of the vocabulary a template writes for one kind of media.

    `word` stands for one visual token; `before` and `after` enclose all of an image or video. `mark` is what the chat
    templates of folders write in place of all three, where a family's processor replaces it later.
    """

    word: str
    before: str = ""
    after: str = ""
    mark: str = ""


_QWEN_MEDIA: Mapping[PartKind, MediaWords] = {
    "image": MediaWords("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "video": MediaWords("<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
}
_ANY = ""  # the turn of a role that has none of its own
_MARKUP = re.compile(r"[<\[{].*[>\]}]")  # a word that no one says by chance; tokenizers also add blanks and line ends
_UNLESS_SYSTEM = "{% if loop.first and message.role != 'system'"
_NO_TOOLS = " and not tools"


@dataclass(frozen=True)
class ChatTemplate:
    """Define how a conversation is written as text. The defaults are ChatML with the visual words of Qwen."""

    # Words of the vocabulary among what is written below, but those that stand for visual tokens.
    special: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
    turns: Mapping[str, Turn] = field(default_factory=lambda: {_ANY: Turn("<|im_start|>{role}\n", "<|im_end|>\n")})
    media: Mapping[PartKind, MediaWords] = field(default_factory=lambda: dict(_QWEN_MEDIA))
    begin: str = ""  # before everything
    system: str | None = "You are a helpful assistant."  # said first when the conversation has no system message
    end_of_text: str = "<|endoftext|>"  # what plain text ends with
    # Of families whose turns have no end of their own: words that begin the next turn, with which a model therefore
    # ends its own. The first of them ends a conversation.
    next_turns: tuple[str, ...] = ()
    media_first: bool = False  # in each turn, wherever they stand among its texts

    def special_words(self) -> list[str]:
        return [*self.special, *dict.fromkeys(media.word for media in self.media.values())]

    def control_words(self) -> list[str]:
        """Return all that this template may write as single words of the vocabulary."""
        return [word for word in (*self.special_words(), self.end_of_text, *self.next_turns) if word]

    def with_words_of(self, added: Collection[str]) -> ChatTemplate:
        """Return the template for a tokenizer with these added words.

        Those that the template writes around what is said become special, so that no one can say them.
        """
        turns = [text for turn in self.turns.values() for text in (turn.before, turn.after, turn.between)]
        turns += [text for turn in self.turns.values() for text in (turn.text_before, turn.text_after)]
        media = [text for words in self.media.values() for text in (words.before, words.after)]
        control, written = set(self.control_words()), "\n".join([self.begin, *turns, *media])
        more = [word for word in added if word in written and word not in control and _MARKUP.fullmatch(word)]
        return replace(self, special=(*self.special, *sorted(more))) if more else self

    @cached_property
    def _cut(self) -> re.Pattern[str]:
        """Return the pattern that finds special words in what a template writes."""
        return re.compile("(" + "|".join(re.escape(word) for word in self.special) + ")")

    @property
    def stop_words(self) -> list[str]:
        """Return the words that a model ends its answers with."""
        return [*self._cut.findall(self._turn("assistant").after), *self.next_turns]

    def render(
        self,
        messages: Sequence[Message],
        train_on: Collection[str] = ("assistant",),
        *,
        last_only: bool = False,
        answer: bool = False,
        show: Callable[[Part, str], list[ChatSpan]] | None = None,
    ) -> list[ChatSpan]:
        """Return a conversation as spans.

        `last_only`: train on the last of the turns that are trained on. `answer`: end with the header of the next turn
        of the assistant, for a model to go on from. `show`: how a media part in the turn of a role is written;
        default: its word between what encloses it.
        """
        messages = self._with_own_prompt(messages)
        spans = self._words(self.begin, "system")
        if self.system is not None and (not messages or messages[0].role not in ("system", PLAIN)):
            said = self._text(self.system, "system", trained=False) if self.system else []
            spans += [*self._header("system"), *said, *self._end("system", trained=False)]
        turns = [number for number, message in enumerate(messages) if message.role in train_on]
        trained_turns = set(turns[-1:] if last_only else turns)
        before: Message | None = None
        for number, message in enumerate(messages):
            trained = number in trained_turns or message.role == PLAIN
            content = self._content(message, trained, show or self.show)
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
        """Return messages with the template's prompt before a system message that does nothing but list tools."""
        said = messages[0].parts if self.system and messages and messages[0].role == "system" else ()
        if not self.system or not said or said[0].kind != "text" or not lists_only_tools(said[0].value):
            return messages
        both = Part("text", with_listing(self.system, said[0].value))
        return [Message("system", (both, *said[1:])), *messages[1:]]

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
                f"this model has no {part.kind} input", fix="leave such samples out", code="media.kind-not-supported"
            )
        return self.media[part.kind]

    def _content(self, message: Message, trained: bool, show: Callable[[Part, str], list[ChatSpan]]) -> list[ChatSpan]:
        spans: list[ChatSpan] = []
        parts = sorted(message.parts, key=lambda p: p.kind == "text") if self.media_first else message.parts
        for part in parts:
            if part.kind == "text":
                spans += self._text(part.value, message.role, trained)
            else:  # a model reads images, it does not write their placeholders
                spans += show(part, message.role)
        return spans

    def _text(self, text: str, role: str, trained: bool) -> list[ChatSpan]:
        said = ChatSpan(text, role, trained)
        if role == PLAIN:
            return [said]
        turn = self._turn(role)
        return [*self._words(turn.text_before, role), said, *self._words(turn.text_after, role)]

    def _turn(self, role: str) -> Turn:
        return self.turns[role] if role in self.turns else self.turns[_ANY]

    def _goes_on(self, before: Message | None, role: str) -> bool:
        """Return whether a turn goes on where the one before it ended."""
        return before is not None and before.role == role and bool(self._turn(role).between)

    def _header(self, role: str) -> list[ChatSpan]:
        spans = self._words(self._turn(role).before, role)  # cut before a role is filled in: its name is text
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
        """Return the system message that a folder's own template writes by default: `jinja` read backwards."""
        turn = self._turn("system")
        before = turn.before.replace("{role}", "system") + turn.text_before
        after = (turn.text_after + turn.after).rstrip("\n")
        if not before:  # nothing tells it from other words but where our own templates say it
            start = re.escape(_UNLESS_SYSTEM) + f"(?:{_NO_TOOLS})? %\\}}"
            branch = re.search(start + "(.*?)" + re.escape(after + "{% endif %}"), jinja, re.DOTALL)
            return None if branch is None else branch[1].removeprefix("{% raw %}").removesuffix("{% endraw %}")
        # Templates write line ends as they are, or as strings do. What holds Jinja of its own is another branch.
        # Where nothing ends a turn, the next tag does.
        said = r"(\{% raw %\}.+?\{% endraw %\}|.+?)(?=\{%)" if not after else "(.*?)" + re.escape(after)
        for match in re.findall(re.escape(before) + said, jinja.replace("\\n", "\n"), re.DOTALL):
            text = str(match).removeprefix("{% raw %}").removesuffix("{% endraw %}")
            if text != match or not re.search(r"\{[%{]|[%}]\}|^['\"] *\+", text):  # or a string that is put together
                return text
        return None

    def header(self, role: str) -> str:
        """Return what is written before the words of a role."""
        return self._turn(role).before.replace("{role}", role)

    def headers_in(self, jinja: str) -> bool:
        """Return whether a folder's own template has the header of any role of this one.

        One is enough: templates put the others together from the names of roles.
        """
        text = jinja.replace("\\n", "\n")
        parts = [self.header(role) for role in ("user", "assistant")]
        parts += [part for role in ("user", "assistant") for part in self._turn(role).before.split("{role}")]
        return any(len(word) > 3 and word in text for word in (one.strip() for one in parts))

    def jinja(self) -> str:
        """Return the template as Jinja, for tools that read it from the tokenizer's folder."""
        first = self._turn("system")
        header, said = first.before.replace("{role}", "system"), ""
        prompt = _raw(self.system) if self.system else ""
        if self.system is not None:
            words = first.text_before + prompt + first.text_after if prompt else ""
            said = _UNLESS_SYSTEM + _NO_TOOLS + " %}" + header + words + first.after + "{% endif %}"
        words = first.text_before + prompt + (JINJA_BLANK if prompt else "") + JINJA_LISTING + first.text_after
        said += _UNLESS_SYSTEM + " and tools %}" + header + words + first.after + "{% endif %}"
        return (
            JINJA_MACRO
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
        """Return how a text is written; `listed` is the condition under which tools are listed behind it."""
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
            also = " or 'image_url' in part" if kind == "image" else ""
            word = "if" if number == 0 else "elif"
            written = words.mark or f"{words.before}{words.word}{words.after}"
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
    # As strings: a line end that follows a tag would be taken for a part of it.
    again, end = (text.replace("\n", "\\n") for text in (turn.between, turn.after))
    same = "not loop.last and messages[loop.index0 + 1].role == message.role"
    return "{% if " + same + " %}{{ '" + again + "' }}{% else %}{{ '" + end + "' }}{% endif %}"


def _with_line_end(text: str) -> str:
    """Return text behind a tag: readers of templates would take away a line end that begins it."""
    return "{{ '\\n' }}" + text[1:] if text.startswith("\n") else text


def _raw(text: str) -> str:
    """Return a prompt such that it is no template, whatever it speaks of."""
    return "{% raw %}" + text + "{% endraw %}" if "{" in text else text
