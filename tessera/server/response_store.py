"""Keep responses in memory, so that clients can fetch them and continue their conversations."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.server.errors import ApiError


@dataclass(frozen=True)
class _Entry:
    response: Mapping[str, Any]
    items: Sequence[Mapping[str, Any]]  # input items of this response only, not of earlier ones
    size: int


class ResponseStore:
    """Hold the latest responses. Above a limit on their number or on their characters, the oldest are removed.

    If a conversation is continued, all of its responses count as new.
    """

    def __init__(self, most: int = 4096, most_characters: int = 256 << 20) -> None:
        self._most = most
        self._most_characters = most_characters
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._size = 0

    def put(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
        """Store a response and its input, unless it is larger than the limit."""
        size = _size(response) + _size(items)
        if size > self._most_characters:
            return
        self._entries[response["id"]] = _Entry(response, items, size)
        self._size += size
        while self._size > self._most_characters or len(self._entries) > self._most:
            self._size -= self._entries.popitem(last=False)[1].size

    def get(self, id: str, param: str = "response_id") -> Mapping[str, Any]:
        """Return a response. Raise if it is not stored."""
        return self._entry(id, param).response

    def delete(self, id: str) -> None:
        self._size -= self._entry(id, "response_id").size
        del self._entries[id]

    def conversation(self, id: str | None) -> list[Mapping[str, Any]]:
        """Return all items of a conversation up to a response, including its output."""
        rounds: list[list[Mapping[str, Any]]] = []
        while id is not None:
            entry = self._entry(id, "previous_response_id")
            self._entries.move_to_end(id)
            rounds.append([*entry.items, *entry.response["output"]])
            id = entry.response["previous_response_id"]
        return [item for items in reversed(rounds) for item in items]

    def _entry(self, id: str, param: str) -> _Entry:
        if id not in self._entries:
            raise ApiError(404, f"there is no response {id[:100]!r}", param=param, code="response_not_found")
        return self._entries[id]


def _size(value: Any) -> int:
    """Return the number of characters of all texts, and a flat rate for everything else."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return 64 + sum(_size(key) + _size(entry) for key, entry in value.items())
    if isinstance(value, Sequence):
        return 64 + sum(map(_size, value))
    return 8
