"""Prompts and rows of tokens in a few arrays, in memory or mapped from a file: token ids end to end
as int32, the rest of an item as JSON, and where each ends. An item is made when it is asked for."""

from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any, ClassVar, TypeVar, overload

import numpy as np
import orjson

from reason_llm.rollout import Attachment, Prompt, TokenRow, record_from_json

T = TypeVar("T")


class Items(Sequence[T]):
    """A sequence whose items are made when they are asked for."""

    @abstractmethod
    def make(self, number: int) -> T:
        """The item of a number from 0."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [*map(self.make, range(len(self))[index])]
        return self.make(range(len(self))[index])

    def __iter__(self) -> Iterator[T]:
        return map(self.make, range(len(self)))


class Joined(Items[T]):
    """Sequences one after the other."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(map(len, parts))]

    def __len__(self) -> int:
        return self._starts[-1]

    def make(self, number: int) -> T:
        """See ``Items``."""
        part = bisect_right(self._starts, number) - 1
        return self._parts[part][number - self._starts[part]]


class Packed(Items[T]):
    """Items in arrays, which grow by ``append`` unless they are given, as bytes."""

    KINDS: ClassVar[Mapping[str, str]] = {"ids": "i", "ends": "q", "text": "B", "text_ends": "q"}
    """The arrays and their type codes."""

    def __init__(self, content: Sequence[Any] = ()) -> None:
        self.arrays = {name: _empty(name, kind) for name, kind in self.KINDS.items()}
        for (name, kind), given in zip(self.KINDS.items(), content, strict=False):
            view: Any = memoryview(given)
            self.arrays[name] = view.cast(kind)

    def __reduce__(self) -> Any:
        return type(self), ([bytes(memoryview(each).cast("B")) for each in self.arrays.values()],)

    @property
    def lengths(self) -> Any:
        """Tokens of each prompt, or of each row of all units, as an array."""
        return np.diff(np.frombuffer(self.arrays["ends"], np.int64))

    @property
    def sizes(self) -> Any:
        """Bytes of each prompt, or of each row of all units, without token ids, as an array."""
        return np.diff(np.frombuffer(self.arrays["text_ends"], np.int64))

    def _add(self, ids: Sequence[int], rest: list[Any]) -> None:
        arrays, text = self.arrays, orjson.dumps(rest)
        arrays["ids"].extend(ids)
        arrays["text"] += text
        arrays["ends"].append(arrays["ends"][-1] + len(ids))
        arrays["text_ends"].append(arrays["text_ends"][-1] + len(text))

    def _ids(self, number: int) -> tuple[int, ...]:
        ends = self.arrays["ends"]
        return tuple(self.arrays["ids"][ends[number] : ends[number + 1]].tolist())

    def _rest(self, number: int) -> Any:
        ends = self.arrays["text_ends"]
        return orjson.loads(self.arrays["text"][ends[number] : ends[number + 1]])


class Prompts(Packed[Prompt]):
    """Prompts of a set. Those that were added without token ids are tokenised by ``encode`` each
    time they are asked for, and have 0 ``lengths``."""

    encode: Callable[[Prompt], Prompt] | None = None

    def __reduce__(self) -> Any:
        whole = Prompts()
        for prompt in self:
            whole.append(prompt)
        return super(Prompts, whole).__reduce__()

    def __len__(self) -> int:
        return len(self.arrays["ends"]) - 1

    def append(self, prompt: Prompt) -> None:
        """Add a prompt."""
        self._add(prompt.token_ids, [prompt.id, prompt.text, prompt.answer, prompt.extra])

    def make(self, number: int) -> Prompt:
        """See ``Items``."""
        prompt = self.kept(number)
        return self.encode(prompt) if self.encode and not prompt.token_ids else prompt

    def without_ids(self) -> Iterator[list[Any]]:
        """The id, text, answer and columns of each prompt."""
        return map(self._rest, range(len(self)))

    def kept(self, number: int) -> Prompt:
        """The prompt as it was added."""
        name, text, answer, extra = self._rest(number)
        return Prompt(name, text, self._ids(number), answer, extra)


class Units(Packed[tuple[TokenRow, ...]]):
    """Units of a set: rows of tokens that are trained together."""

    KINDS: ClassVar[Mapping[str, str]] = {
        **Packed.KINDS, "trained": "B", "asked": "i", "values": "d", "unit_ends": "q",
    }  # fmt: skip

    def __len__(self) -> int:
        return len(self.arrays["unit_ends"]) - 1

    @property
    def asked(self) -> Any:
        """Tokens of each row before the first learned one, as an array."""
        return np.array(self.arrays["asked"], np.int32)

    @property
    def values(self) -> Any:
        """The value of each row, as an array."""
        return np.array(self.arrays["values"], np.float64)

    def append(self, rows: tuple[TokenRow, ...]) -> None:
        """Add a unit."""
        for row in rows:
            self._add(row.ids, [row.name, row.group, [*map(asdict, row.attachments)]])
            self.arrays["trained"] += bytes(row.trained)
            self.arrays["asked"].append(bytes(row.trained).find(1))
            self.arrays["values"].append(row.value)
        ends = self.arrays["unit_ends"]
        ends.append(ends[-1] + len(rows))

    def make(self, number: int) -> tuple[TokenRow, ...]:
        """See ``Items``."""
        ends = self.arrays["unit_ends"]
        return tuple(map(self._row, range(ends[number], ends[number + 1])))

    def _row(self, number: int) -> TokenRow:
        name, group, attachments = self._rest(number)
        start, end = self.arrays["ends"][number : number + 2]
        flags: list[bool] = memoryview(self.arrays["trained"])[start:end].cast("?").tolist()  # type: ignore[assignment]
        made = record_from_json(tuple[Attachment, ...], attachments) if attachments else ()
        value = self.arrays["values"][number]
        return TokenRow(name, self._ids(number), tuple(flags), group, value, made)


def _empty(name: str, kind: str) -> Any:
    first = [0] if name.endswith("ends") else []
    return bytearray() if kind == "B" else array(kind, first)
