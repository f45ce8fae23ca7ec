"""Parse records to messages, with one parser per format. Records are not trusted.

messages   {"messages": [{"role": "user", "content": "text" or [{"type": "image", "image": "a.jpg"}, ...]}, ...]}
sharegpt   {"conversations": [{"from": "human", "value": "<image> text"}, ...], "images": ["a.jpg"]}
llava      {"conversations": [{"from": "human", "value": "<image>\\n text"}, ...], "image": "a.jpg"}
alpaca     {"instruction": "ask", "input": "about", "output": "answer", "history": [["ask", "answer"], ...]}
query_response   {"query": "<image>ask", "response": "answer", "history": [["ask", "answer"], ...], "images": ["a.jpg"]}
question_answer  {"question": "ask", "answer": "answer", "image": "a.jpg"}
text       {"text": "a document", "images": ["a.jpg"]}
preference a question with a chosen and a rejected answer, in one of these spellings:
    {"prompt": "ask", "chosen": "better", "rejected": "worse"}
    {"prompt": [messages], "chosen": [{"role": "assistant", ...}], "rejected": [...]}
    {"chosen": [the full conversation], "rejected": [another end of it]}
    {"messages": [messages], "chosen": {"role": "assistant", ...} or "better", "rejected": ...}
    {"conversations": [turns], "chosen": {"from": "gpt", "value": "better"}, "rejected": ...}, with images or image
    {"instruction": "ask", "input": "about", "chosen": "better", "rejected": "worse"}
    {"messages": [the full conversation], "rejected_response": "worse", or "rejected_messages": [another end of it]}
    {"query": "ask", "response": "better", "rejected_response": "worse"}
unpaired_preference  a conversation whose answer has a label, true for a good and false for a bad answer:
    {"prompt": "ask" or [messages], "completion": "answer" or [turns], "label": true}
    {"messages", "conversations" or "instruction" and "output": with the answer at the end, "label" or "kto_tag": false}
generation a caption with its image or video, or with a chosen and a rejected one, in one of these spellings:
    {"path": "a.mp4", "cap": "a caption" or ["a caption", another, ...], of which the first is used}
    {"image": "a.jpg" or "video": "a.mp4", "text", "caption" or "prompt": "a caption", "references": ["to edit.jpg"]}
    {"messages": [{"role": "user", ... text and images to edit}, {"role": "assistant", ... one image or video}]}
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tessera.config.run_config import RecordFormat
from tessera.core.sample import PLAIN, Message, Part, StoredTensors
from tessera.data.sources.fields import (
    MEDIA,
    WORSE_ANSWERS,
    ColumnMap,
    RecordMedia,
    column_map,
    fail,
    has,
    has_worse_answer,
    media_kind,
    text_of,
    value_of,
    values_of,
)
from tessera.data.tool_calls import format_calls, format_spoken_calls, with_tools

CHOSEN, REJECTED = "chosen", "rejected"  # roles of the two answers of a pair, or of an answer labelled good or bad
_PROMPT = "prompt"
_LABELS = {"true": True, "1": True, "false": False, "0": False}


def parse(record: Mapping[str, Any], record_format: RecordFormat, names: ColumnMap) -> tuple[Message, ...]:
    """Return the messages of a record, or raise `RecordError`."""
    return _PARSERS[record_format](record, names)


def _parse_messages(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    media = RecordMedia(record, names)
    messages = []
    for turn in _turns(record, names.messages):
        role, calls = _role(turn, names), turn.get("tool_calls")
        content = turn.get(names.content)
        if content is None and calls:
            content = ""
        if isinstance(content, str):
            parts = media.fill(format_spoken_calls(content) if turn.get(names.role) in names.callers else content)
        elif isinstance(content, list):
            parts = [_part(item, media) for item in content]
        else:
            fail(f"{names.content} is a {type(content).__name__}, not a text or a list of parts")
        if calls:
            parts.append(Part("text", ("\n" if parts else "") + _checked(format_calls, calls)))
        messages.append(Message(role, tuple(parts)))
    media.check_used(messages)
    return _with_system(messages, record, names)


def _parse_conversations(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    # <image> is always a placeholder in this format. <video> may be plain text if the record lists no video.
    media = RecordMedia(record, names, always=("image",))
    messages = []
    for turn in _turns(record, names.messages):
        role, value = _role(turn, names), turn.get(names.content)
        if not isinstance(value, str):
            fail(f"{names.content} is a {type(value).__name__}, not a text")
        if turn.get(names.role) in names.callers:
            value = format_spoken_calls(value)
        messages.append(Message(role, tuple(media.fill(value))))
    media.check_used()
    return _with_system(messages, record, names)


def _parse_alpaca(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    media = RecordMedia(record, names)
    turns: list[tuple[str, str]] = []
    history = record.get(names.history) or []
    if not isinstance(history, list):
        fail(f"{names.history} is a {type(history).__name__}, not a list of pairs")
    for pair in history:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            fail(f"{names.history} is a list of pairs of a question and an answer")
        turns += [("user", text_of(pair[0])), ("assistant", text_of(pair[1]))]
    questions = [text_of(record.get(key)) for key in (names.prompt, names.query) if record.get(key) not in (None, "")]
    answer = record.get(names.response)
    if not isinstance(answer, str) or not answer:
        fail(f"{names.response} is not a text" if answer else f"{names.response} is empty")
    if not questions:
        fail(f"{names.prompt} is empty")
    turns += [("user", "\n".join(questions)), ("assistant", answer)]
    parts = [(role, media.fill(text)) for role, text in turns]
    parts[0] = (parts[0][0], [*media.rest_if_none_used(), *parts[0][1]])
    media.check_used()
    return _with_system([Message(role, tuple(filled)) for role, filled in parts], record, names)


def _parse_text(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    media = RecordMedia(record, names)
    text = next((record[key] for key in names.text if has(record, key)), None)
    if not isinstance(text, str) or not text.strip():
        fail(f"no text under {' or '.join(repr(key) for key in names.text)}")
    parts = media.fill(text)
    parts = [*media.rest_if_none_used(), *parts]
    media.check_used()
    return (Message(PLAIN, tuple(parts)),)


def _parse_preference(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    """Return the question, then the chosen and the rejected answer with the roles `CHOSEN` and `REJECTED`."""
    _check_one_worse_answer(record, names)
    if not has(record, names.chosen) and has_worse_answer(record):
        record = _with_both_answers(record, names)
    elif not has(record, names.chosen) and not has(record, names.rejected):
        fail(f"the rejected answer is missing: add 'rejected_response', or {names.chosen!r} and {names.rejected!r}")
    answers = [record.get(names.chosen), record.get(names.rejected)]
    for key, answer in zip((names.chosen, names.rejected), answers, strict=True):
        if not isinstance(answer, (str, Mapping, list)) or not answer:
            fail(f"{key} must be a text, a turn or a list of turns")
    rest = {key: value for key, value in record.items() if key not in (names.chosen, names.rejected, _PROMPT)}
    better, worse = (parse(*_with_answer(record, rest, answer, names)) for answer in answers)
    if better[:-1] != worse[:-1]:
        fail("the two conversations differ before their last turn")
    for last in (better[-1], worse[-1]):
        if last.role != "assistant" or any(part.kind != "text" for part in last.parts):
            fail("an answer must be a text of the assistant")
    return (*better[:-1], Message(CHOSEN, better[-1].parts), Message(REJECTED, worse[-1].parts))


def _with_answer(
    record: Mapping[str, Any], rest: dict[str, Any], answer: Any, names: ColumnMap
) -> tuple[dict[str, Any], RecordFormat, ColumnMap]:
    """Return a record with only one of the two answers, the simpler record format that it has then, and its keys."""
    if isinstance(answer, list) and _is_full_conversation(answer, names):
        return {**rest, names.messages: answer}, "messages", names
    sharegpt = column_map("sharegpt", {})
    if record.get(names.messages) is not None:
        turns = list(_turns(record, names.messages))
        return {**rest, names.messages: [*turns, *_as_turns(answer, names, "assistant")]}, "messages", names
    if record.get(sharegpt.messages) is not None:
        chat: RecordFormat = "llava" if record.get("image") is not None else "sharegpt"
        turns = list(_turns(record, sharegpt.messages))
        return {**rest, sharegpt.messages: [*turns, *_as_turns(answer, sharegpt, "gpt")]}, chat, column_map(chat, {})
    prompt = record.get(_PROMPT)
    if isinstance(prompt, (str, list)) and prompt:
        turns = _as_turns(prompt, names, "user")
        return {**rest, names.messages: [*turns, *_as_turns(answer, names, "assistant")]}, "messages", names
    if record.get(names.prompt) is not None:
        if not isinstance(answer, str):
            fail(f"with {names.prompt!r} an answer must be a text")
        return {**rest, names.response: answer}, "alpaca", column_map("alpaca", {})
    fail(f"the question is missing: add {_PROMPT!r}, {names.messages!r} or {sharegpt.messages!r}")


def _parse_unpaired(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    """Return the conversation. Its last turn has the role `CHOSEN` if the label is true, otherwise `REJECTED`."""
    key = next((key for key in names.label if has(record, key)), names.label[0])
    good = _LABELS.get(str(record.get(key)).lower()) if isinstance(record.get(key), (bool, int, str)) else None
    if good is None:
        fail(f"{key}, the label of the answer, must be true or false, got {record.get(key)!r:.40}")
    rest = {one: value for one, value in record.items() if one not in (*names.label, names.completion)}
    answer = record.get(names.completion)
    if answer is not None:
        if not isinstance(answer, (str, Mapping, list)) or not answer:
            fail(f"{names.completion} must be a text, a turn or a list of turns")
        rest.pop(_PROMPT, None)
        messages = parse(*_with_answer(record, rest, answer, names))
    elif (turns := _parse_any_turns(rest, names)) is not None:
        messages = turns
    elif has(record, names.prompt):
        messages = _parse_alpaca(rest, names)
    else:
        fail(f"the answer is missing: add {names.completion!r}, or end {names.messages!r} or 'conversations' with it")
    last = messages[-1]
    if len(messages) < 2 or last.role != "assistant" or any(part.kind != "text" for part in last.parts):
        fail("the last turn must be the answer: a text of the assistant, after a question")
    return (*messages[:-1], Message(CHOSEN if good else REJECTED, last.parts))


def _parse_any_turns(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...] | None:
    """Parse a record with turns, under `messages` or `conversations`; None if it has neither."""
    if has(record, names.messages):
        return _parse_messages(record, names)
    if has(record, column_map("sharegpt", {}).messages):
        return _parse_conversations(record, column_map("llava" if has(record, "image") else "sharegpt", {}))
    return None


def _is_full_conversation(turns: list[Any], names: ColumnMap) -> bool:
    speaker = turns[0].get(names.role) if isinstance(turns[0], Mapping) else None
    return names.speakers.get(str(speaker)) in ("system", "user")


def _as_turns(value: Any, names: ColumnMap, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{names.role: role, names.content: value}]
    return [dict(value)] if isinstance(value, Mapping) else list(value)


def _parse_generation(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    """Return two messages: the request (caption, and images to edit if there are any), and the image or video."""
    features = record.get("features")
    if isinstance(features, StoredTensors):  # features encoded in advance; no JSON record can contain such an object
        return (Message("assistant", (Part("features", features),)),)
    if (turns := _parse_any_turns(record, names)) is not None:
        return _checked_pair(turns)
    caption = next((record[key] for key in names.text if has(record, key)), None)
    if isinstance(caption, list):
        caption = next((one for one in caption if isinstance(one, str) and one.strip()), "")
    if caption is None:
        fail(f"no caption under {' or '.join(repr(key) for key in names.text)}")
    if not isinstance(caption, str):
        key = next(key for key in names.text if has(record, key))
        fail(f"the caption under {key!r} must be a text, not a {type(caption).__name__} ({caption!r:.40})")
    wanted = [Part(kind, value) for kind in ("image", "video") for value in _listed(record, names.media[kind])]
    if not wanted and has(record, names.path):
        wanted = [_media_at(record, names.path)]
    references = tuple(Part("image", value) for value in _listed(record, (names.references,)))
    request = Message("user", (*references, Part("text", text_of(caption))))
    if not wanted and has(record, names.chosen) and has(record, names.rejected):
        answers = [(role, _media_at(record, key)) for role, key in ((CHOSEN, names.chosen), (REJECTED, names.rejected))]
        for _, answer in answers:
            _checked_pair((request, Message("assistant", (answer,))))
        return (request, *(Message(role, (answer,)) for role, answer in answers))
    if not wanted:
        keys = dict.fromkeys((names.path, *names.media["image"], *names.media["video"]))
        fail(f"the record has no image or video to learn: add its file under {' or '.join(map(repr, keys))}")
    return _checked_pair((request, Message("assistant", tuple(wanted))))


def _media_at(record: Mapping[str, Any], key: str) -> Part:
    """Return the image or video under a key. The suffix of its path tells which of the two it is."""
    value = value_of(record[key], key)
    kind = media_kind(value) if isinstance(value, str) else None
    if kind == "audio":
        fail(f"{key}: must be an image or a video, got {value!r:.80}")
    return Part(kind or "video", value)  # without a suffix: a folder of frames


def _checked_pair(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if [message.role for message in messages] != ["user", "assistant"]:
        roles = ", ".join(message.role for message in messages)
        fail(f"the turns must be a caption of the user and an image or video of the assistant, not {roles:.80}")
    request, answer = messages
    answered = [part for part in answer.parts if part.kind != "text" or part.value.strip()]
    if len(answered) != 1 or answered[0].kind not in ("image", "video"):
        fail(f"the answer must be one image or video, and has {len(answered)} parts")
    if any(part.kind not in ("text", "image") for part in request.parts):
        fail("a request has text and images; it cannot have videos or audio")
    if not "".join(part.value for part in request.parts if part.kind == "text").strip():
        fail("the caption is empty")
    return (request, Message("assistant", tuple(answered)))


def _listed(record: Mapping[str, Any], keys: Iterable[str]) -> list[Any]:
    key = next((key for key in keys if has(record, key)), None)
    return [] if key is None else values_of(record[key], key)


_PARSERS: dict[RecordFormat, Callable[[Mapping[str, Any], ColumnMap], tuple[Message, ...]]] = {
    "preference": _parse_preference,
    "unpaired_preference": _parse_unpaired,
    "generation": _parse_generation,
    "messages": _parse_messages,
    "sharegpt": _parse_conversations,
    "llava": _parse_conversations,
    "alpaca": _parse_alpaca,
    "query_response": _parse_alpaca,
    "question_answer": _parse_alpaca,
    "text": _parse_text,
}


def _with_system(messages: list[Message], record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    system, tools = record.get(names.system), record.get(names.tools)
    if system is not None and not isinstance(system, str):
        fail(f"{names.system} is a {type(system).__name__}, not a text")
    if not system and not tools:
        return tuple(messages)
    first: tuple[Part, ...] = (Part("text", text_of(system)),) if system else ()
    if messages[0].role == "system":
        if system:
            fail(f"a system prompt is given twice: under {names.system!r} and as the first turn")
        first, messages = messages[0].parts, messages[1:]
    if tools:
        if any(part.kind != "text" for part in first):
            fail("a system message with media cannot list tools")
        words = _checked(lambda given: with_tools("".join(part.value for part in first), given), tools)
        first = (Part("text", text_of(words)),) if words else ()
    return (Message("system", first), *messages) if first else tuple(messages)


def _turns(record: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        fail(f"{key} is not a list of turns" if turns != [] else f"{key} is empty")
    for turn in turns:
        if not isinstance(turn, dict):
            fail(f"a turn in {key} is a {type(turn).__name__}, not an object")
        yield turn


def _role(turn: dict[str, Any], names: ColumnMap) -> str:
    speaker = turn.get(names.role)
    if speaker is None:
        fail(f"a turn has no {names.role!r}, it has {sorted(turn)[:6]}; `columns` can name another key as role_tag")
    if not isinstance(speaker, str) or speaker not in names.speakers:
        what = "speaker" if names.role == "from" else "role"
        fail(f"unknown {what} {speaker!r:.40} (known: {', '.join(names.speakers)})")
    return names.speakers[speaker]


def _part(item: Any, media: RecordMedia) -> Part:
    if not isinstance(item, dict):
        fail(f"a part of a message is a {type(item).__name__}, not an object")
    named = item.get("type")
    if named == "text":
        return Part("text", text_of(item.get("text")))
    kind = next((kind for kind in MEDIA if named in (kind, f"{kind}_url")), None)
    if kind is None:
        fail(f"unknown type of part {named!r} (known: text, {', '.join(MEDIA)})")
    value = _first(item, (kind, "path", "url", f"{kind}_url"))
    if value is None and media.listed.get(kind):
        return media.next(kind)  # a part without a path stands for the next file of the record's list
    return Part(kind, value_of(value, kind))


def _first(item: dict[str, Any], keys: Iterable[str]) -> Any:
    value = next((item[key] for key in keys if item.get(key) is not None), None)
    return value.get("url") if isinstance(value, dict) and "url" in value else value


def _checked(work: Callable[[Any], str], value: Any) -> str:
    try:
        return work(value)
    except ValueError as error:
        fail(str(error))


# ---------------------------------------------------------------------------------------------- rejected answers


def _check_one_worse_answer(record: Mapping[str, Any], names: ColumnMap) -> None:
    """Raise if a record has rejected answers under more than one key."""
    keys = [key for key in dict.fromkeys((names.rejected, *WORSE_ANSWERS)) if has(record, key)]
    if len(keys) > 1:
        fail(f"the record has several rejected answers, under {' and '.join(keys)}: keep one of them")


def _with_both_answers(record: Mapping[str, Any], names: ColumnMap) -> dict[str, Any]:
    """Convert a full conversation with a rejected answer, as in ms-swift, to a question with two answers.

    The last turn of the assistant is the chosen answer, and the turns before it are the question. The rejected answer
    is a text, a turn, the last turns of a conversation, or a full conversation.
    """
    key = next(key for key in WORSE_ANSWERS if has(record, key))
    worse = record[key]
    if isinstance(worse, list) and len(worse) == 1 and isinstance(worse[0], str):
        worse = worse[0]  # a list with one rejected answer
    if isinstance(worse, list) and any(isinstance(record_format, str) for record_format in worse):
        fail(f"{key} has {len(worse)} answers: write one record for each rejected answer")
    if has(record, "rejected_images"):
        fail("rejected_images is not supported: both answers of a pair have the images under 'images'")
    rest = {record_format: value for record_format, value in record.items() if record_format not in WORSE_ANSWERS}
    if has(record, names.messages):
        turns = record[names.messages]
        last = turns[-1] if isinstance(turns, list) and len(turns) > 1 else None
        if not isinstance(last, dict) or names.speakers.get(str(last.get(names.role))) != "assistant":
            fail(f"with {key}, {names.messages} must end with the chosen answer, a turn of the assistant")
        return {**rest, names.messages: turns[:-1], names.chosen: [last], names.rejected: worse}
    for record_format in ("alpaca", "query_response", "question_answer"):
        columns = column_map(record_format, {})
        if has(record, columns.prompt) and has(record, columns.response):
            better, question = rest.pop(columns.response), rest.pop(columns.prompt)
            return {**rest, names.prompt: question, names.chosen: better, names.rejected: worse}
    fail(f"the chosen answer is missing: {key} needs {names.messages!r} that ends with it, or 'query' and 'response'")
