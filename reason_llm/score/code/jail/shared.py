"""Lists, dicts, sets and deques of the tests that the program has, the same on both sides.

Each side has its own copy, under one number. With each message go the changes since the last one:
the tests see what the program does to a list in the call that got it, in a later one or in
``__exit__``. What one side no longer holds is dropped on both.
"""

import operator
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

MAX_ITEMS = 1 << 12
"""Limit for everything shared between two calls: beyond it the oldest is dropped, and changes
within a call are seen at its end, or each message would take longer than the program."""
KINDS: dict[str, type] = {kind.__name__: kind for kind in (list, dict, set, deque)}

Json = dict[str, Any]


class Shared:
    """The copies of one side, numbered from ``first``, 0 or 1, in steps of 2."""

    def __init__(
        self, first: int, to_json: Callable[[Any], Any], from_json: Callable[[Any], Any]
    ) -> None:
        self.copies: dict[int, Any] = {}
        self.shortened: dict[int, Any] = {}
        """Objects that the other side made shorter, by ``id``."""
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, Any] = {}
        self._unsent: list[int] = []
        self._used: set[int] = set()
        self._first = self._next = first
        self._to_json, self._from_json = to_json, from_json

    def refer(self, value: Any) -> Json:
        """The form in which a list or its like crosses."""
        number = self._numbers.get(id(value))
        if number is None:
            number, self._next = self._next, self._next + 2
            self._add(number, value)
            self._unsent.append(number)
        self._used.add(number)
        return {"shared": number}

    def has(self, value: Any) -> bool:
        """Whether it is shared already."""
        return id(value) in self._numbers

    def message(self, is_end: bool = False) -> Json:
        """Changes and drops since the last message; ``is_end``: of an outermost call."""
        if is_end or self._size() <= MAX_ITEMS:
            changed = (n for n in self._seen if not _same(self._seen[n], _items(self.copies[n])))
            self._unsent += changed
        sent: list[list[Any]] = []
        dropped: list[int] = []
        try:
            for number in self._unsent:  # which grows by what the copies hold
                try:
                    sent.append([number, *self._content(self.copies[number])])
                except TypeError:  # it has got what cannot be given to the other side
                    if number not in self._seen:
                        raise
                    dropped.append(number)
            self._seen |= {number: _items(self.copies[number]) for number in self._unsent}
        finally:
            for number in [*dropped, *(self.copies.keys() - self._seen.keys())]:
                self._drop(number)
            self._unsent, used, self._used = [], self._used, set()
        size = self._size() if is_end else 0
        for number in [n for n in self._seen if n not in used]:
            if size > MAX_ITEMS or sys.getrefcount(self.copies[number]) == 2:  # held here alone
                size -= len(self._seen[number]) + 1
                self._drop(number)
                dropped.append(number)
        message = {"shared": sent, "dropped": dropped}
        return {name: numbers for name, numbers in message.items() if numbers}

    def take(self, message: Json) -> None:
        """Apply the other side's message; ValueError, TypeError or KeyError if it is invalid."""
        sent = message.get("shared", ())
        for number, kind, _ in sent:
            if number not in self.copies:
                if type(number) is not int or number % 2 == self._first:
                    raise ValueError("no number of the other side's")
                self._add(number, KINDS[kind]())
                self._seen[number] = _items(self.copies[number])
            if kind_of(self.copies[number]) != kind:
                raise ValueError("a copy of another kind")
        decoded = [
            (number, KINDS[kind](map(self._from_json, content))) for number, kind, content in sent
        ]
        for number, content in decoded:
            mine = self.copies[number]
            if len(content) < len(mine):
                self.shortened[id(mine)] = mine
            mine.clear()
            (mine.extend if isinstance(mine, list | deque) else mine.update)(content)
            self._seen[number] = _items(mine)
        for number in message.get("dropped", ()):
            self._drop(number)

    def _size(self) -> int:
        return sum(map(len, self._seen.values())) + len(self._seen)

    def _add(self, number: int, value: Any) -> None:
        self.copies[number] = value
        self._numbers[id(value)] = number

    def _drop(self, number: int) -> None:
        if number in self.copies:
            del self._numbers[id(self.copies.pop(number))]
            self._seen.pop(number, None)

    def _content(self, value: Any) -> tuple[str | None, list[Any]]:
        items = value.items() if isinstance(value, dict) else value
        return kind_of(value), [self._to_json(item) for item in items]


def kind_of(value: Any) -> str | None:
    """The kind of what can be shared; None for anything else."""
    return next((name for name, kind in KINDS.items() if isinstance(value, kind)), None)


def _items(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))
