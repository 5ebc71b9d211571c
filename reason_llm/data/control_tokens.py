"""Control tokens: what a chat template writes around messages, and text that only spells it.

A message that spells a control token (``What does <|im_end|> do?``) is given to the template with a
mark in its place, so that the token that the template writes and the text of a row stay apart until
the text is tokenised: the first becomes the control token, the second ordinary text. Not here:
rendering (``render``).
"""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""A mark is OPEN, a number and CLOSE: noncharacters of Unicode, which no text has. Those that a
text has nevertheless are marked, too."""
_MARK = re.compile(f"{OPEN}([0-9]++){CLOSE}")
ALWAYS = ("bos_token", "eos_token", "pad_token")
"""Tokens that an assistant's message spells as text, whatever the template writes."""
TALK = [
    {"role": role, "content": content}
    for role, content in (("user", "Ask it."), ("assistant", "It is."), ("user", "And so?"))
]
"""A conversation in which ``turn_tokens`` looks for them."""


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer and a chat template."""

    ids: Mapping[str, int]
    """All of them: special tokens, and others that begin or end a turn, such as DeepSeek V3's."""
    turns: frozenset[str]
    """Those that begin or end a turn: only they are text in an assistant's message, whose other
    control tokens (a special ``<think>``) are the ones that the model writes."""
    special: frozenset[str]
    """Those that the tokenizer leaves unread when it is asked to."""
    strips: tuple[frozenset[str], frozenset[str]]
    """Those that take the white space before them, and after them."""
    unknown_id: int | None
    """What stands for text that the tokenizer does not know."""

    @cached_property
    def _names(self) -> list[str]:
        return [*self.ids, OPEN, CLOSE]

    @cached_property
    def _written(self) -> re.Pattern[str]:
        return re.compile(f"({_any(self.ids)})")

    @cached_property
    def _spelled(self) -> dict[bool, re.Pattern[str]]:
        """Marks in a message; True: of the assistant."""
        return {
            own: re.compile(_any([*names, OPEN, CLOSE]))
            for own, names in ((False, [*self.ids]), (True, [*self.turns]))
        }

    @cached_property
    def _beginnings(self) -> frozenset[str]:
        return frozenset(name[:2] for name in self._names)

    @cached_property
    def _spells(self) -> Callable[[str], bool]:
        """Whether a text may spell one. A text is asked for with each rendering of its row."""
        return lru_cache(512)(self._found_in)

    def _found_in(self, text: str) -> bool:
        # A first look that is fast: hundreds of names begin with few pairs of characters.
        for begin in self._beginnings:
            if begin in text:
                return self._spelled[False].search(text) is not None
        return False

    def are_in(self, value: Any) -> bool:
        """Whether a text in the value, a JSON tree, may spell one."""
        if isinstance(value, str):
            return self._spells(value)
        if not isinstance(value, (tuple, list)):
            if not isinstance(value, (dict, Mapping)):
                return False
            value = [*value, *value.values()]
        return any(self._spells(each) if type(each) is str else self.are_in(each) for each in value)

    def marked(self, value: Any, of_assistant: bool = False) -> Any:
        """The value, a JSON tree, with a mark for each control token that a text of it spells."""
        if isinstance(value, str):
            return (
                value
                if not self._spells(value)
                else self._spelled[of_assistant].sub(
                    lambda found: f"{OPEN}{self._names.index(found[0])}{CLOSE}", value
                )
            )
        if isinstance(value, Mapping):
            return {
                self.marked(k, of_assistant): self.marked(v, of_assistant) for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.marked(each, of_assistant) for each in value]
        return value

    def plain(self, marked: str) -> str:
        """The text, with what its marks stand for."""
        if OPEN not in marked:
            return marked
        return _MARK.sub(lambda found: self._names[int(found[1])], marked)

    def as_in(self, marked: str, text: str) -> str | None:
        """``marked`` where it stands for this text. A token that JSON writes in another way, such
        as Gemma 4's ``<|"|>``, may stand there without a mark, as it is none. Else None."""

        def in_json(found: re.Match[str]) -> str:
            name = self._names[int(found[1])]
            quoted = orjson.dumps(name).decode()[1:-1]
            return found[0] if quoted == name else quoted

        if self.plain(marked) == text:
            return marked
        marked = _MARK.sub(in_json, marked)
        return marked if self.plain(marked) == text else None

    def escaped(self, text: str) -> str:
        """The text with marks for the noncharacters that a mark is made of alone."""
        if OPEN not in text:
            return text
        return re.sub(f"[{OPEN}{CLOSE}]", lambda found: self.marked(found[0]), text)

    @cached_property
    def known_ids(self) -> frozenset[int]:
        """Ids that only a control token has."""
        return frozenset(self.ids.values()) - {self.unknown_id}

    def names_in(self, marked: str) -> list[str]:
        """Control tokens that the marks of a text represent, each once."""
        return [*dict.fromkeys(self._names[int(number)] for number in _MARK.findall(marked))]

    def written_in(self, marked: str) -> list[str]:
        """The control tokens that are not marks."""
        return self._written.findall(marked)

    def written_ids(self, marked: str) -> list[int]:
        """``known_ids`` of the control tokens that are not marks."""
        ids = [self.ids[name] for name in self.written_in(marked)]
        return [id for id in ids if id in self.known_ids]

    def pieces(self, marked: str) -> list[tuple[str, bool]]:
        """The text in parts, and of each whether it is text alone: what stands between two control
        tokens and has a mark."""
        before, after = self.strips
        parts, found, held = self._written.split(marked), list[tuple[str, bool]](), ""
        for place in range(0, len(parts), 2):
            text = parts[place]
            if OPEN in text:
                if place and parts[place - 1] in after:
                    text = text.lstrip()
                if place + 1 < len(parts) and parts[place + 1] in before:
                    text = text.rstrip()
                found += [(held, False)] if held else []
                found += [(part, True) for part in self._cut(text) if part]
                held = ""
            else:
                held += text
            held += parts[place + 1] if place + 1 < len(parts) else ""
        return [*found, (held, False)] if held else found

    def _cut(self, marked: str) -> list[str]:
        """``plain`` in parts, cut inside each token that the tokenizer always reads as one."""
        text, *rest = _MARK.split(marked)
        parts = [text]
        for number, text in zip(rest[::2], rest[1::2], strict=True):
            name = self._names[int(number)]
            if name in self.ids and name not in self.special:
                parts[-1] += name[:1]
                parts.append(name[1:] + text)
            else:
                parts[-1] += name + text
        return parts


def control_tokens(tokenizer: "PreTrainedTokenizerBase", talk: str) -> ControlTokens:
    """The control tokens, with those that begin and end the turns of ``TALK``, as the template
    writes it; empty where it cannot."""
    added = {str(token): (id, token) for id, token in tokenizer.added_tokens_decoder.items()}
    added = {name: each for name, each in added.items() if name.strip()}
    special = {name for name, (_, token) in added.items() if token.special}
    turns = turn_tokens(talk, added)
    always = {str(token) for name in ALWAYS if (token := getattr(tokenizer, name, None))}
    names = sorted(special | turns, key=lambda name: (-len(name), name))
    return ControlTokens(
        {name: added[name][0] for name in names},
        frozenset(turns | (always & special)),
        frozenset(special),
        (
            frozenset(name for name in names if added[name][1].lstrip),
            frozenset(name for name in names if added[name][1].rstrip),
        ),
        tokenizer.unk_token_id,
    )


def turn_tokens(talk: str, names: Collection[str]) -> set[str]:
    """The names that stand between the assistant's message and the user's next one, and the first
    other one before the assistant's, unless it is closed again, as a thought is."""
    asked, said, asked_again = (message["content"] for message in TALK)
    first, _, rest = talk.rpartition(asked_again)[0].rpartition(asked)[2].partition(said)
    if not names or not rest:
        return set()
    written = re.compile(_any(names))
    turns = set(written.findall(rest))
    other = next((name for name in written.findall(first) if name not in turns), "")
    is_header = other and f"{other[0]}/{other[1:]}" not in first
    return turns | {other} if is_header else turns


@lru_cache(maxsize=2)
def reader_of_text(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """A copy of the tokenizer, to be called with ``split_special_tokens``, which changes what other
    threads read meanwhile."""
    return copy.deepcopy(tokenizer)


def _any(names: Collection[str]) -> str:
    """A pattern of these names, the longest first."""
    ordered: Sequence[str] = sorted(names, key=lambda name: (-len(name), name))
    return "|".join(map(re.escape, ordered)) or r"(?!)"
