"""Parse records to messages, with one parser per format. Records are not trusted.

messages   {"messages": [{"role": "user", "content": "text" or [{"type": "image", "image": "a.jpg"}, ...]}, ...]}
sharegpt   {"conversations": [{"from": "human", "value": "<image> text"}, ...], "images": ["a.jpg"]}
llava      {"conversations": [{"from": "human", "value": "<image>\\n text"}, ...], "image": "a.jpg"}
alpaca     {"instruction": "ask", "input": "about", "output": "answer", "history": [["ask", "answer"], ...]}
query_response   {"query": "<image>ask", "response": "answer", "history": [["ask", "answer"], ...], "images": ["a.jpg"]}
question_answer  {"question": "ask", "answer": "answer", "image": "a.jpg"}
text       {"text": "a document", "images": ["a.jpg"]}
transcript {"audio_filepath", "audios" or "audio": "a.wav", "text", "sentence" or "transcription": "the words",
    "offset": 12.5, "duration": 4.75}, of which the last two name a part of a recording, in seconds
speech     {"text": "the words", "audio_codes": [[12, 7, ...], ...], "speaker": 0}: codes of a codec, frames x codebooks
preference a question with a chosen and a rejected answer: docs/how-to/train-from-preferences.md lists the spellings
unpaired_preference  a conversation whose answer has a label, true for a good and false for a bad answer: listed there
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
from tessera.data.media.clips import AudioClip
from tessera.data.sources.container import fail
from tessera.data.sources.fields import (
    MEDIA,
    QUESTION_FORMATS,
    WORSE_ANSWERS,
    ColumnMap,
    RecordMedia,
    column_map,
    has,
    has_worse_answer,
    media_kind,
    media_part,
    text_of,
    value_of,
    values_of,
)
from tessera.data.sources.speech_codes import codes_part, numbered_speaker, parse_speech, speaker_of, speaker_of_turn
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
            fail("data.not-a-text", f"{names.content} is a {type(content).__name__}, not a text or a list of parts")
        if calls:
            parts.append(Part("text", ("\n" if parts else "") + _checked(format_calls, calls)))
        messages.append(Message(role, tuple(parts), speaker_of_turn(turn, names)))
    media.check_used(messages)
    return _with_system(messages, record, names)


def _parse_conversations(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    # <image> is always a placeholder in this format. <video> may be plain text if the record lists no video.
    media = RecordMedia(record, names, always=("image",))
    messages = []
    for turn in _turns(record, names.messages):
        role, value = _role(turn, names), turn.get(names.content)
        if not isinstance(value, str):
            fail("data.not-a-text", f"{names.content} is a {type(value).__name__}")
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
        fail("data.bad-history", f"{names.history} is a {type(history).__name__}, not a list of pairs")
    for pair in history:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            fail("data.bad-history", f"{names.history} has an entry that is not a question with an answer")
        turns += [("user", text_of(pair[0])), ("assistant", text_of(pair[1]))]
    questions = [text_of(record.get(key)) for key in (names.prompt, names.query) if record.get(key) not in (None, "")]
    answer = text_of(record.get(names.response) or "")
    if not questions or not (answer or not names.answered):
        fail("data.empty-turn", f"{names.response if questions else names.prompt} is empty")
    turns += [("user", "\n".join(questions)), *([("assistant", answer)] if answer else [])]
    parts = [(role, media.fill(text)) for role, text in turns]
    parts[0] = (parts[0][0], [*media.rest_if_none_used(), *parts[0][1]])
    media.check_used()
    return _with_system([Message(role, tuple(filled)) for role, filled in parts], record, names)


def _parse_text(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    media = RecordMedia(record, names)
    text = next((record[key] for key in names.text if has(record, key)), None)
    if not isinstance(text, str) or not text.strip():
        fail("data.no-text", f"no text under {' or '.join(map(repr, names.text))}")
    parts = media.fill(text)
    parts = [*media.rest_if_none_used(), *parts]
    media.check_used()
    return (Message(PLAIN, tuple(parts)),)


def _parse_transcript(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    """Return the recording, and the user's text if there is one, as the question, and the transcript as the answer."""
    text = next((record[key] for key in names.text if has(record, key)), None)
    if not isinstance(text, str) or not text.strip():
        fail("data.no-text", f"no text under {' or '.join(map(repr, names.text))}")
    recordings = [media_part("audio", value) for value in _listed(record, names.media["audio"])]
    if not recordings:
        fail("data.no-audio", f"no recording under {' or '.join(map(repr, names.media['audio']))}")
    if has(record, names.offset):
        if len(recordings) > 1 or isinstance(recordings[0].value, AudioClip):
            fail("media.bad-clip", f"{names.offset!r} is for one recording without a part of its own")
        start, length = (_seconds(record, key) for key in (names.offset, names.duration))
        recordings = [media_part("audio", recordings[0].value, (start, round(start + length, 9)))]
    instruction = record.get(names.prompt)
    words = (Part("text", text_of(instruction)),) if instruction else ()
    answer = Message("assistant", (Part("text", text_of(text).strip()),), speaker_of(record, names))
    return (Message("user", (*recordings, *words)), answer)


def _seconds(record: Mapping[str, Any], key: str) -> float:
    try:
        return float(record[key])
    except (KeyError, TypeError, ValueError):
        fail("media.bad-clip", f"{key} must be a number of seconds, got {record.get(key)!r:.40}")


def _parse_preference(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    """Return the question, then the chosen and the rejected answer with the roles `CHOSEN` and `REJECTED`."""
    worse = [key for key in dict.fromkeys((names.rejected, *WORSE_ANSWERS)) if has(record, key)]
    if len(worse) > 1:
        fail("data.several-rejected-answers", f"several rejected answers, under {' and '.join(worse)}: keep one")
    if not has(record, names.chosen) and has_worse_answer(record):
        record = _with_both_answers(record, names)
    elif not has(record, names.chosen) and not has(record, names.rejected):
        fail("data.no-rejected-answer", f"add 'rejected_response', or {names.chosen!r} and {names.rejected!r}")
    answers = [record.get(names.chosen), record.get(names.rejected)]
    for key, answer in zip((names.chosen, names.rejected), answers, strict=True):
        if not isinstance(answer, (str, Mapping, list)) or not answer:
            fail("data.bad-answer", f"{key} must be a text, a turn or a list of turns")
    rest = {key: value for key, value in record.items() if key not in (names.chosen, names.rejected, _PROMPT)}
    chosen, rejected = (parse(*_with_answer(record, rest, answer, names)) for answer in answers)
    if chosen[:-1] != rejected[:-1]:
        fail("data.pair-differs-early", "the two conversations differ before their last turn")
    for last in (chosen[-1], rejected[-1]):
        if last.role != "assistant" or any(part.kind != "text" for part in last.parts):
            fail("data.bad-answer", "an answer must be a text of the assistant")
    return (*chosen[:-1], Message(CHOSEN, chosen[-1].parts), Message(REJECTED, rejected[-1].parts))


def _with_answer(
    record: Mapping[str, Any], rest: dict[str, Any], answer: Any, names: ColumnMap
) -> tuple[dict[str, Any], RecordFormat, ColumnMap]:
    """Return a pair's record with only one of its answers, and the format and keys of this simpler record."""
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
            fail("data.bad-answer", f"with {names.prompt!r} an answer must be a text")
        return {**rest, names.response: answer}, "alpaca", column_map("alpaca", {})
    fail("data.no-question", f"a question is missing: add {_PROMPT!r}, {names.messages!r} or {sharegpt.messages!r}")


def _parse_unpaired(record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    """Return the conversation. Its last turn has the role `CHOSEN` if the label is true, otherwise `REJECTED`."""
    key = next((key for key in names.label if has(record, key)), names.label[0])
    good = _LABELS.get(str(record.get(key)).lower()) if isinstance(record.get(key), (bool, int, str)) else None
    if good is None:
        fail("data.bad-label", f"{key}, the label of the answer, must be true or false: {record.get(key)!r:.40}")
    rest = {name: value for name, value in record.items() if name not in (*names.label, names.completion)}
    answer = record.get(names.completion)
    if answer is not None:
        if not isinstance(answer, (str, Mapping, list)) or not answer:
            fail("data.bad-answer", f"{names.completion} must be a text, a turn or a list of turns")
        rest.pop(_PROMPT, None)
        messages = parse(*_with_answer(record, rest, answer, names))
    elif (turns := _parse_any_turns(rest, names)) is not None:
        messages = turns
    elif has(record, names.prompt):
        messages = _parse_alpaca(rest, names)
    else:
        fail("data.no-answer", f"add {names.completion!r}, or end {names.messages!r} or 'conversations' with an answer")
    last = messages[-1]
    if len(messages) < 2 or last.role != "assistant" or any(part.kind != "text" for part in last.parts):
        fail("data.bad-answer", "the last turn must be the answer: a text of the assistant, after a question")
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
        caption = next((text for text in caption if isinstance(text, str) and text.strip()), "")
    if caption is None:
        fail("data.no-caption", f"no caption under {' or '.join(map(repr, names.text))}")
    if not isinstance(caption, str):
        fail("data.not-a-text", f"the caption is a {type(caption).__name__}: {caption!r:.40}")
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
        fail("data.no-media", f"add the image or video to learn under {' or '.join(map(repr, keys))}")
    return _checked_pair((request, Message("assistant", tuple(wanted))))


def _media_at(record: Mapping[str, Any], key: str) -> Part:
    """Return the image or video under a key. The suffix of its path tells which of the two it is."""
    value = value_of(record[key], key)
    kind = media_kind(value) if isinstance(value, str) else None
    if kind == "audio":
        fail("data.bad-media-value", f"{key}: must be an image or a video, got {value!r:.80}")
    return Part(kind or "video", value)  # a path without suffix is a folder with the frames of a video


def _checked_pair(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    if [message.role for message in messages] != ["user", "assistant"]:
        roles = ", ".join(message.role for message in messages)
        fail("data.not-a-caption", f"the turns must be of user (caption) and assistant (media), not of {roles:.80}")
    request, answer = messages
    answered = [part for part in answer.parts if part.kind != "text" or part.value.strip()]
    if len(answered) != 1 or answered[0].kind not in ("image", "video"):
        fail("data.not-a-caption", f"the answer must be one image or video, and has {len(answered)} parts")
    if any(part.kind not in ("text", "image") for part in request.parts):
        fail("data.not-a-caption", "a request has text and images; it cannot have videos or audio")
    if not "".join(part.value for part in request.parts if part.kind == "text").strip():
        fail("data.empty-caption", "the caption is empty")
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
    "transcript": _parse_transcript,
    "speech": parse_speech,
}


def _with_system(messages: list[Message], record: Mapping[str, Any], names: ColumnMap) -> tuple[Message, ...]:
    system, tools = record.get(names.system), record.get(names.tools)
    if system is not None and not isinstance(system, str):
        fail("data.not-a-text", f"{names.system} is a {type(system).__name__}")
    if not system and not tools:
        return tuple(messages)
    first: tuple[Part, ...] = (Part("text", text_of(system)),) if system else ()
    if messages[0].role == "system":
        if system:
            fail("data.two-system-prompts", f"two system prompts: under {names.system!r} and as the first turn")
        first, messages = messages[0].parts, messages[1:]
    if tools:
        if any(part.kind != "text" for part in first):
            fail("data.bad-tools", "a system message with media cannot list tools")
        words = _checked(lambda tools: with_tools("".join(part.value for part in first), tools), tools)
        first = (Part("text", text_of(words)),) if words else ()
    return (Message("system", first), *messages) if first else tuple(messages)


def _turns(record: Mapping[str, Any], key: str) -> Iterator[dict[str, Any]]:
    turns = record.get(key)
    if not isinstance(turns, list) or not turns:
        fail("data.no-turns", f"{key} is not a list of turns" if turns != [] else f"{key} is empty")
    for turn in turns:
        if not isinstance(turn, dict):
            fail("data.bad-turn", f"a turn in {key} is a {type(turn).__name__}, not an object")
        yield turn


def _role(turn: dict[str, Any], names: ColumnMap) -> str:
    if numbered_speaker(turn, names):
        return "assistant"
    speaker = turn.get(names.role)
    if speaker is None:
        fail("data.no-role", f"a turn has no {names.role!r}: set columns: {{role_tag: one of {sorted(turn)[:6]}}}")
    if not isinstance(speaker, str) or speaker not in names.speakers:
        fail("data.unknown-speaker", f"unknown speaker {speaker!r:.40} (known: {', '.join(names.speakers)})")
    return names.speakers[speaker]


def _part(item: Any, media: RecordMedia) -> Part:
    if not isinstance(item, dict):
        fail("data.bad-part", f"a part of a message is a {type(item).__name__}, not an object")
    named = item.get("type")
    if named == "text":
        return Part("text", text_of(item.get("text")))
    if named == "codes":
        return codes_part(item.get("codes"), "codes")
    if named == "input_audio":
        return _input_audio(item.get("input_audio"))
    kind = next((kind for kind in MEDIA if named in (kind, f"{kind}_url")), None)
    if kind is None:
        fail("data.bad-part", f"unknown type of part {named!r} (known: text, {', '.join(MEDIA)}, codes, input_audio)")
    value = _first(item, (kind, "path", "url", f"{kind}_url"))
    if value is None and media.listed.get(kind):
        return media.next(kind)  # a part without a path stands for the next file of the record's list
    return media_part(kind, value_of(value, kind))


def _input_audio(content: Any) -> Part:
    """Return the recording of {"data": base64, "format": "wav"}, as OpenAI's API has it."""
    data, suffix = (content.get("data"), content.get("format")) if isinstance(content, dict) else (None, None)
    if not isinstance(data, str) or not isinstance(suffix, str) or not suffix.isalnum():
        fail("data.bad-part", 'input_audio must be {"data": ..., "format": "wav"}, with base64 as data')
    return Part("audio", value_of(f"data:audio/{suffix};base64,{data}", "input_audio"))


def _first(item: dict[str, Any], keys: Iterable[str]) -> Any:
    value = next((item[key] for key in keys if item.get(key) is not None), None)
    return value.get("url") if isinstance(value, dict) and "url" in value else value


def _checked(work: Callable[[Any], str], value: Any) -> str:
    try:
        return work(value)
    except ValueError as error:
        fail("data.bad-tools", str(error))


# ---------------------------------------------------------------------------------------------- rejected answers


def _with_both_answers(record: Mapping[str, Any], names: ColumnMap) -> dict[str, Any]:
    """Convert a full conversation with a rejected answer to a question with two answers.

    The last turn of the assistant is the chosen answer, and the turns before it are the question. The rejected answer
    is a text, a turn, the last turns of a conversation, or a full conversation.
    """
    key = next(key for key in WORSE_ANSWERS if has(record, key))
    worse = record[key]
    if isinstance(worse, list) and len(worse) == 1 and isinstance(worse[0], str):
        worse = worse[0]  # some data sets put the only rejected answer into a list
    if isinstance(worse, list) and any(isinstance(answer, str) for answer in worse):
        fail("data.several-rejected-answers", f"{key} has {len(worse)} answers: write one record for each")
    if has(record, "rejected_images"):
        fail("data.rejected-images", "rejected_images is not supported: both answers have the images under 'images'")
    rest = {name: value for name, value in record.items() if name not in WORSE_ANSWERS}
    if has(record, names.messages):
        turns = record[names.messages]
        last = turns[-1] if isinstance(turns, list) and len(turns) > 1 else None
        if not isinstance(last, dict) or names.speakers.get(str(last.get(names.role))) != "assistant":
            fail("data.no-answer", f"with {key}, {names.messages} must end with the chosen answer of the assistant")
        return {**rest, names.messages: turns[:-1], names.chosen: [last], names.rejected: worse}
    for record_format in QUESTION_FORMATS:
        columns = column_map(record_format, {})
        if has(record, columns.prompt) and has(record, columns.response):
            better, question = rest.pop(columns.response), rest.pop(columns.prompt)
            return {**rest, names.prompt: question, names.chosen: better, names.rejected: worse}
    fail("data.no-answer", f"beside {key}, add {names.messages!r} that ends with the answer, or 'query' and 'response'")
