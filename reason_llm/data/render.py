"""Rendering of messages as Prompts, by a chat template and the tokenizer, and the order of the
prompts, a pure function of the seed and the position, so that resuming needs only a number.

A chat template comes with a model and is a program. It runs in Transformers' Jinja sandbox, with a
limit on its time and on the length of its text. Not limited: the memory of a single operation.
"""

import hashlib
import logging
import random
import re
import sys
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from math import floor
from typing import TYPE_CHECKING, Any

import orjson

from reason_llm.data import cache
from reason_llm.data.attachments import MARK, with_parts
from reason_llm.data.control_tokens import (
    OPEN,
    TALK,
    ControlTokens,
    control_tokens,
    reader_of_text,
)
from reason_llm.data.families import ANSWER, ASKED, PROBES, Family, family_of
from reason_llm.data.forms import NO_EXTRAS, TemplateExtras
from reason_llm.data.messages import SYSTEM_ROLES, Messages
from reason_llm.data.templates import ChatTemplate, date_argument
from reason_llm.data.tools import Call, calls_of
from reason_llm.errors import ConfigError, DataError, ReasonError, one_line
from reason_llm.files import Panic, without_panics
from reason_llm.rollout import Prompt
from reason_llm.workers import within

logger = logging.getLogger(__name__)

RENDER_SECONDS = 10.0
"""Seconds for one conversation, and for those rendered at once."""
MOST_TEXT_CHARACTERS = 16 << 20
"""Longest text of one conversation."""
ENCODE_SECONDS = 20.0
"""Seconds for one text. The tokenizer lets other threads run meanwhile."""
MOST_NAMED = 5
"""Control tokens that an error names."""
AT_ONCE = 256
"""Conversations that share one time limit and one call of the tokenizer."""
AT_ONCE_CHARACTERS = 1 << 20
"""Characters after which a call of the tokenizer takes no further text."""

_REPLY = "a reply"
"""What the problem of a reply is told of, where its caller gives no better name."""
_ANSWERS = {
    "<think>\n\n</think>\n\n": ".",
    "<think>\n": ".\n</think>\n\n.",
    "": "<think>\n.\n</think>\n\n.",
}
"""By what of a thought a template writes before it."""
MOST_MARKS = 600
"""Most ``<`` in an answer whose calls are read by a family: its patterns backtrack, with the cube
of the tags that are left open."""
LEAST_CACHED = 1 << 16
"""Size of a set from which its order is read from the cache's folder."""
ANCHORS = ("", "\n", ".")
"""Texts before a part of a text that is tokenised alone: some tokenizers put a space before the
first word."""
LEAST_FRAMED = 32
"""Questions from which a frame is looked for, if there are tools or arguments of the template."""
FRAMED = [3 << n for n in range(12)]
"""Characters of questions with which it is found: a template may look at the length."""
OTHER_SCRIPTS = "éßЖ\u05d0\u0e01中あ가\u00a0\u200b\u2019\u2028\ufb01\uff11\U0001f600"
"""Characters that are not ASCII, from one to four bytes long."""
_Rendering = tuple[str | None, str, int | None]
"""The text; or the problem, with the template's line that has wrong syntax."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renderer of messages as the text that the model reads."""

    tokenizer: "PreTrainedTokenizerBase"
    template: ChatTemplate
    system_prompt: str | None
    """Text put before each conversation that has none; None for no text."""
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """JSON schemas of the tools that are offered to the model."""
    tools_of: Mapping[str, tuple[dict[str, Any], ...]] = field(default_factory=dict, hash=False)
    """Schemas by the name that a row has for its tools."""

    def of(self, toolset: str) -> "Renderer":
        """The renderer of rows that name these tools; itself where none does."""
        return replace(self, tools=self.tools_of[toolset]) if self.tools_of else self

    def on(self, date: str | None) -> "Renderer":
        """The renderer whose template reads this date."""
        return replace(self, template=replace(self.template, date=date))

    def with_extras(self, extras: TemplateExtras) -> "Renderer":
        """The renderer of rows that bring tools or arguments; itself where they bring none.

        Raises:
            DataError: the config has tools, too.
        """
        if extras is NO_EXTRAS:
            return self
        if extras.tools and self.tools:
            raise DataError(
                "the row has tools and sample.environment has others; name the row's column in "
                "data.columns.ignore"
            )
        if extras == NO_EXTRAS:
            return self
        arguments = tuple({**dict(self.template.arguments), **extras.arguments}.items())
        template = replace(self.template, arguments=arguments)
        return replace(self, template=template, tools=extras.tools or self.tools)

    def check_generation_prompt(self) -> None:
        """Check that a prompt ends where the assistant's answer begins.

        Raises:
            ConfigError: the template ignores ``add_generation_prompt``, so the model would have to
                write the header of its turn.
        """
        where = "a short conversation"
        with suppress(DataError):
            prompt = self.text(where, ASKED)
            if prompt != self.text(where, ASKED, generation=False):
                return
            whole = self.text(where, [*ASKED, ANSWER], generation=False)
            header = whole.removeprefix(prompt).partition(str(ANSWER["content"]))[0]
            if whole.startswith(prompt) and header.strip():
                raise ConfigError(
                    f"{self.template.source} does not write {header.strip()!r:.60} with "
                    "add_generation_prompt, so the model would have to write it before each "
                    "answer; set data.template to one that does"
                )

    def check_written(self, where: str, messages: Messages, text: str) -> list[str]:
        """Check that a rendered text holds what the messages say, and return the members of
        messages that it does not hold: a template may leave out a thought or a name.

        Raises:
            DataError: the content of a user's or a system message, or a tool call, is not there.
        """
        ignored: dict[str, None] = {}
        text = self._controls.plain(text) if OPEN in text else text
        if self.template.arguments:
            jinja = self.tokenizer.get_chat_template(self.template.jinja)
            names = _names_in(jinja)
            unused = [name for name, _ in self.template.arguments if name not in names]
            ignored |= dict.fromkeys(f"the template argument {name}" for name in unused)
        # A template drops what it does not know without an error, so the text is searched.
        for tool in self.tools:
            if (name := str(tool.get("function", tool).get("name"))) not in text:
                raise DataError(
                    f"{where}: {self.template.source} does not write tools, such as {name!r:.60}; "
                    "take a model whose template does, or name the row's column in "
                    "data.columns.ignore"
                )
        for message in self.with_system_prompt(messages):
            role, content = message["role"], message["content"].strip()
            if len(message) == 2 and role != "assistant" and content in text:
                continue
            parts = content.split(MARK) if message.get("attachments") else [content]
            if role == "assistant" and content.rpartition("</think>")[2].strip() not in text:
                ignored.setdefault("messages[].content of the assistant's earlier turns")
            if not (
                role == "assistant"
                or all(part in text for part in parts)
                or (role == "tool" and _holds_words(text, content))
            ):
                fix = "set data.template to one that writes it"
                if message == {"role": "system", "content": self.system_prompt}:
                    fix += ", or data.system_prompt=none"
                raise DataError(
                    f"{where}: {self.template.source} leaves out or changes the message of the "
                    f"{role}, {content[:60]!r}; {fix}"
                )
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    raise DataError(
                        f"{where}: {self.template.source} does not write tool calls of a message "
                        "with an empty content and arguments as an object, such as "
                        f"{call['function']['name']!r:.60}; set data.template to one that does"
                    )
            for member in ("name", "reasoning_content"):
                if str(message.get(member, "")).strip() not in text:
                    ignored.setdefault(f"messages[].{member}")
        return list(ignored)

    def prompt(self, where: str, messages: Messages, answer: str) -> Prompt:
        """The Prompt of these messages; errors as of ``marked_text`` and
        ``marked_ids``."""
        text = self.marked_text(where, self.with_system_prompt(messages))
        ids = self.marked_ids(where, text)
        return Prompt(where, self._controls.plain(text), tuple(ids), answer)

    def with_ids(self, prompt: Prompt) -> Prompt:
        """The prompt with the token ids of its text, which spells no control token of a row."""
        return replace(prompt, token_ids=tuple(self.token_ids(prompt.id, prompt.text)))

    def prompts(
        self, asked: Sequence[tuple[str, Messages, str]], surely_fit: int = 0
    ) -> dict[str, Prompt | DataError]:
        """``prompt`` of many rows, or the error that it raises, by ``where``. Texts of fewer
        ``most_tokens`` than ``surely_fit`` get no token ids: they are for ``with_ids``."""
        found: dict[str, Prompt | DataError] = {}
        for start in range(0, len(asked), AT_ONCE):
            part = asked[start : start + AT_ONCE]
            with suppress(TimeoutError, Panic, ValueError):
                texts = self._texts([talk for _, talk, _ in part])
                # What all texts have in common, such as the system message, is read once.
                cut = [
                    [] if text is None or most_tokens(text) < surely_fit else self.pieces(text)
                    for text in texts
                ]
                each = [*dict.fromkeys(chain.from_iterable(cut))]
                ids_of = dict(zip(each, self._encoded(each) if each else [], strict=True))
                for (where, _, answer), text, parts in zip(part, texts, cut, strict=True):
                    if text is not None:
                        ids = [id for piece in parts for id in ids_of[piece]] if parts else ()
                        found[where] = Prompt(where, text, tuple(ids), answer)
            for where, talk, answer in part:
                if where not in found:
                    try:
                        found[where] = self.prompt(where, talk, answer)
                    except DataError as error:
                        found[where] = error
        return found

    def _texts(self, talks: Sequence[Messages]) -> list[str | None]:
        """Texts of conversations: None for those that spell a control token, and for all that have
        to be rendered where one fails."""
        texts: list[str | None] = [None] * len(talks)
        spells = self._controls.are_in
        questions = [n for n, talk in enumerate(talks) if _is_question(talk) and not spells(talk)]
        framed = self.framed([talks[n][0]["content"] for n in questions])
        for number, text in zip(questions, framed, strict=True):
            texts[number] = text
        full = {
            n: self.with_system_prompt(talks[n]) for n, text in enumerate(texts) if text is None
        }
        usual = [n for n, talk in full.items() if not self.spells_controls(talk)]
        made = [text for text, _, _ in self._rendered([full[n] for n in usual])] if usual else []
        if all(text is not None and text.strip() for text in made):
            for number, text in zip(usual, made, strict=True):
                texts[number] = text
        return texts

    def framed(self, questions: Sequence[str]) -> list[str | None]:
        """The text of each question, without control tokens, as a conversation, where the template
        only writes the same around them, and ``check_written`` returns nothing; None for others."""
        is_usual = not (self.tools or self.template.arguments)  # each row may bring others
        frame = _frame(self) if is_usual or len(questions) >= LEAST_FRAMED else None
        return [None if frame is None else frame.around(each) for each in questions]

    @property
    def digest(self) -> str:
        """Digest of the template and the system prompt."""
        jinja = self.template.jinja or self.tokenizer.chat_template
        content = f"{jinja}\0{self.system_prompt}"
        if self.template.arguments:
            content += f"\0{self.template.arguments}"
        if self.tools or self.tools_of:
            content += f"\0{self.tools or self.tools_of}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def with_system_prompt(self, messages: Messages) -> Messages:
        """The messages after ``system_prompt``, where they have no system message of their own."""
        if self.system_prompt is None or messages[0]["role"] in SYSTEM_ROLES:
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def text(self, where: str, messages: Messages, generation: bool = True) -> str:
        """The messages as the template writes them, with ``generation`` up to where the
        assistant's answer begins.

        Raises:
            DataError: the template cannot take them.
            ConfigError: the template is not valid.
        """
        text: str | None
        source = self.template.source
        try:
            ((text, problem, line),) = self._rendered([messages], generation)
        except TimeoutError as error:
            raise ConfigError(f"{error} on {where}; take another template") from error
        except ValueError as error:
            text, problem, line = None, one_line(error), None
        if line is not None:
            raise ConfigError(f"{source}, line {line}: {problem}; fix that line")
        if text is None:
            raise DataError(
                f"{where}: {source} fails on it ({problem}); fix the row, set "
                "data.template_arguments to what the template asks for, or take another "
                "data.template (of a system message that it refuses, remove it, or set "
                "data.system_prompt=none)"
            )
        if not text.strip():
            raise DataError(f"{where}: {source} writes no text for it; fix it")
        return text

    def marked(self, messages: Messages) -> Messages:
        """The messages with marks for the control tokens that they spell: all of them, but in the
        assistant's only those that begin or end a turn. ``system_prompt`` is the user's own."""
        own = {"role": "system", "content": self.system_prompt}
        return [
            message if message == own else self._controls.marked(message, _is_assistant(message))
            for message in messages
        ]

    def marked_text(self, where: str, messages: Messages, generation: bool = True) -> str:
        """``text`` with a mark for each control token that a message, or a tool, spells; also a
        DataError where the template writes it in another way."""
        text = self.text(where, messages, generation)
        if not self.spells_controls(messages):
            return text
        tools = tuple(self._controls.marked(self.tools))
        marked = replace(self, tools=tools).text(where, self.marked(messages), generation)
        return self._as_written(where, marked, text)

    def marked_texts(self, talks: Sequence[tuple[Messages, bool]]) -> list[str | None]:
        """``marked_text`` of conversations, each with its ``generation``; None where it has to be
        called, as for those that spell a control token, and where one fails."""
        texts: list[str | None] = [None] * len(talks)
        for generation in (False, True):
            asked = [n for n, (_, each) in enumerate(talks) if each is generation]
            asked = [n for n in asked if not self.spells_controls(talks[n][0])]
            with suppress(TimeoutError, ValueError):
                made = self._rendered([talks[n][0] for n in asked], generation)
                for number, (text, _, _) in zip(asked, made, strict=True):
                    texts[number] = text if text and text.strip() else None
        return texts

    def escaped(self, text: str) -> str:
        """A text that writes its control tokens itself, for ``marked_ids``."""
        return self._controls.escaped(text)

    def token_ids(self, where: str, text: str) -> list[int]:
        """Token ids of a text that writes its control tokens itself, without special tokens added;
        DataError where the tokenizer, whose patterns come with the model, gives up or takes too
        long."""
        return self.marked_ids(where, self.escaped(text))

    def marked_ids(self, where: str, marked: str) -> list[int]:
        """Token ids of a ``marked_text``, whose marks are read as text; also a DataError where the
        tokenizer cannot read one so."""
        try:
            return self._marked_ids(marked) if OPEN in marked else self._encoded([marked])[0]
        except (TimeoutError, Panic) as error:
            raise DataError(
                f"{where}: {error} on its {len(marked)} characters; take another model, or leave "
                "this row out"
            ) from error
        except ValueError as error:
            raise DataError(
                f"{where}: the text spells control tokens{self._named(marked)} that the model's "
                "tokenizer cannot read as text; remove them"
            ) from error

    def pieces(self, text: str) -> list[str]:
        """The text, cut before control tokens that the tokenizer finds before it reads what is
        around them, so that the pieces' token ids, one after the other, are those of the text."""
        cuts = _cuts(self.tokenizer, self._template)
        return [piece for piece in cuts.split(text) if piece] if cuts and text else [text]

    def ids_of(self, texts: Iterable[str]) -> dict[str, list[int]]:
        """Token ids of texts that are tokenised together; without those that have marks or on
        which the tokenizer fails."""
        found: dict[str, list[int]] = {}
        plain = [text for text in texts if OPEN not in text]
        part, size = list[str](), 0
        for number, text in enumerate(plain, start=1):
            part.append(text)
            size += len(text)
            if size > AT_ONCE_CHARACTERS or number == len(plain):
                with suppress(TimeoutError, Panic, ValueError):
                    found |= zip(part, self._encoded(part), strict=True)
                part, size = [], 0
        return found

    def check_tools(self, what: str) -> None:
        """Raise a ConfigError if the template does not write the tools that ``what`` offers."""
        if _writes_tools(self.tokenizer, self._template):
            return
        raise ConfigError(
            f"{what} offers tools to the model, and {self.template.source} writes the same text "
            "with and without them, so the model would not know of any; name a template that "
            "writes them as data.template (TRL has such files in its chat_templates), or leave the "
            "tools out"
        )

    @property
    def _template(self) -> ChatTemplate:
        """The template with its text, also where it is the tokenizer's own."""
        if self.tokenizer.chat_template is None:
            return self.template
        return replace(self.template, jinja=self.tokenizer.get_chat_template(self.template.jinja))

    @property
    def controls(self) -> Collection[str]:
        """Names of the control tokens."""
        return self._controls.ids.keys()

    @property
    def _controls(self) -> ControlTokens:
        own = self.tokenizer.chat_template
        if isinstance(own, str):  # asked for with each message
            return _controls_with(self.tokenizer, self.template, own)
        return _controls(self.tokenizer, self._template)

    def spells_controls(self, messages: Messages) -> bool:
        """Whether a message or a tool spells a control token that is to be read as text."""
        controls = self._controls
        if self.tools and controls.are_in(self.tools):
            return True
        return controls.are_in(messages) and self.marked(messages) != list(messages)

    def controls_in(self, messages: Messages) -> list[str]:
        """Control tokens that the messages spell, each once."""
        contents = [each["content"] for each in messages]
        if not self._controls.are_in(contents) or not self.spells_controls(messages):
            return []
        return self._controls.names_in("".join(each["content"] for each in self.marked(messages)))

    def _as_written(self, where: str, marked: str, text: str) -> str:
        """Text that the template made of marks; DataError where it does not write their tokens as
        it wrote ``text``."""
        found = self._controls.as_in(marked, text)
        if found is None:
            raise DataError(
                f"{where}: {self.template.source} reads or changes the control tokens that the "
                f"text spells{self._named(marked)}; remove them from the text"
            )
        return found

    def _named(self, marked: str) -> str:
        names = self._controls.names_in(marked)
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        return f" ({', '.join(names[:MOST_NAMED])}{more})" if names else ""

    def replies(
        self, replies: Sequence[Messages], most_tokens: int, where: str = _REPLY
    ) -> list[list[int]]:
        """Token ids of what follows an assistant's answer when these messages reply to it: the end
        of the answer, the reply, and what comes before the next answer. A content of more than
        ``most_tokens`` is cut in its middle, which says so; control tokens that it spells are text.
        ``where`` names it in an error.

        Raises:
            ConfigError: the template does not write an answer before a reply as it was sampled.
            DataError: the tokenizer gives up or takes too long, or cannot read them as text.
        """
        cut = [
            [{**each, "content": self._cut(each["content"], most_tokens, where)} for each in reply]
            for reply in replies
        ]
        marked = list(map(self.marked, cut))
        spells = [number for number, reply in enumerate(marked) if reply != cut[number]]
        family = _family(self.tokenizer, self.template)
        if family is None or not all(map(family.knows, marked)):
            texts = self._after_answers([*marked, *(cut[number] for number in spells)])
            for number, plain in zip(spells, texts[len(cut) :], strict=True):
                texts[number] = self._as_written(where, texts[number], plain)
            return [self.marked_ids(where, text) for text in texts[: len(cut)]]
        found = list(map(family.reply, marked))
        for number in spells:
            text = _decoded(self.tokenizer, found[number])
            plain = _decoded(self.tokenizer, family.reply(cut[number]))
            text = self._as_written(where, text, plain)
            found[number] = self.marked_ids(where, text)
        return found

    def after(
        self, ids: Sequence[int], reply: Messages, most_tokens: int, where: str = _REPLY
    ) -> list[int]:
        """``replies`` of one reply to an answer of these ids, and what is not yet in them."""
        (added,) = self.replies([reply], most_tokens, where)
        return self.not_yet_in(ids, added)

    def not_yet_in(self, ids: Sequence[int], added: list[int]) -> list[int]:
        """Result of ``replies``, without the end of the answer where the model wrote it itself;
        some templates end the last answer (gpt-oss: ``<|return|>``) as no earlier one."""
        _, end = _form_of_answers(self.tokenizer, self._template)
        return added[ids[-1] in (added[0], end) :]

    def content_of(self, text: str) -> str:
        """The content of a message that holds an answer of the model: what stands after the header
        that the model writes itself (gpt-oss: ``<|channel|>final<|message|>``)."""
        header, _ = _form_of_answers(self.tokenizer, self._template)
        if not header or not self._controls.are_in(text):
            return text
        return text.rpartition(header)[2] if header in text else ""

    def calls(self, text: str, ids: Sequence[int]) -> list[Call | None]:
        """The calls in an answer; None stands for one that cannot be read."""
        family = _family(self.tokenizer, self.template)
        if family is None or "tool" not in family.turns:
            return calls_of(text)
        if self.tokenizer.decode(ids).count("<") > MOST_MARKS:
            return [None]
        return family.calls(ids, self.tools)

    def _after_answers(self, replies: Sequence[Messages]) -> list[str]:
        ((begin, _, _),) = self._rendered([ASKED])
        opened, rest = next(each for each in _ANSWERS.items() if str(begin).endswith(each[0]))
        answer = {"role": "assistant", "content": opened + rest}
        header, _ = _form_of_answers(self.tokenizer, self._template)
        if header:  # with which the model opens each part of its answer
            answer, rest = ANSWER, f"{header}{ANSWER['content']}"
        wholes = self._rendered([[*ASKED, answer, *reply] for reply in replies])
        answered, found = f"{begin}{rest}", []
        for whole, problem, _ in wholes:
            if whole is None or not whole.startswith(answered):
                raise ConfigError(
                    f"{self.template.source} {problem or 'writes an earlier answer anew'}, so what "
                    "the model sampled would not be what it reads in its next turn; name one that "
                    "keeps whole answers, thoughts and all, as data.template: TRL has such files "
                    "in its chat_templates"
                )
            found.append(whole[len(answered) :])
        return found

    def _cut(self, text: str, most_tokens: int, where: str) -> str:
        """The text, without its middle where it has more tokens."""
        ids = self.token_ids(where, text)
        if len(ids) <= most_tokens:
            return text
        half = most_tokens // 2
        begin, end = (_decoded(self.tokenizer, part) for part in (ids[:half], ids[-half:]))
        return f"{begin}\n[{len(ids) - 2 * half:,} tokens are left out here]\n{end}"

    def _rendered(self, talks: Sequence[Messages], generation: bool = True) -> list[_Rendering]:
        """Return what ``_render`` makes of each; TimeoutError if all together take longer than
        ``RENDER_SECONDS``, or ValueError for a tokenizer without a template."""
        tokenizer = self.tokenizer
        arguments: dict[str, Any] = {
            "chat_template": tokenizer.get_chat_template(
                self.template.jinja, list(self.tools) or None
            ),
            "add_generation_prompt": generation,
            **dict(self.template.arguments),
            **date_argument(self.template.date),
        }
        if self.tools:
            arguments["tools"] = list(self.tools)
        return within(
            RENDER_SECONDS,
            self.template.source,
            lambda: [_render(tokenizer, with_parts(talk), arguments) for talk in talks],
        )

    def _encoded(self, texts: list[str], as_text: bool = False) -> list[list[int]]:
        """The token ids of each, with special tokens read as text if ``as_text``; TimeoutError or
        Panic as ``token_ids`` tells."""
        tokenizer = reader_of_text(self.tokenizer) if as_text else self.tokenizer

        def encode() -> list[list[int]]:
            """The ids of all texts."""
            if (backend := _backend(tokenizer, as_text)) is not None:
                found = backend.encode_batch_fast(texts, add_special_tokens=False)
                return [each.ids for each in found]
            options = {"split_special_tokens": True} if as_text else {}
            return list(tokenizer(texts, add_special_tokens=False, **options)["input_ids"])

        with without_panics():
            return within(ENCODE_SECONDS, "the model's tokenizer", encode)

    def _marked_ids(self, marked: str) -> list[int]:
        """Token ids of a text with marks: each part with a mark as text alone. A ValueError where
        they have other control tokens than the template wrote, or spell another text."""
        controls = self._controls
        pieces, written = controls.pieces(marked), controls.written_ids(marked)
        expected = _decoded(self.tokenizer, self._encoded([controls.plain(marked)])[0])
        spelled: list[int] | None = None
        for anchor in ANCHORS:
            parts: list[list[int]] = []
            for text, as_text in pieces:
                before = self._encoded([anchor], as_text)[0] if parts and anchor else []
                ids = self._encoded([anchor + text if before else text], as_text)[0]
                if ids[: len(before)] != before:
                    break
                parts.append(ids[len(before) :])
            found = [id for part in parts for id in part]
            if [id for id in found if id in controls.known_ids] != written:
                continue
            if _decoded(self.tokenizer, found) == expected:
                return found
            if len(parts) == len(pieces) and all(
                _decoded(self.tokenizer, ids) == text
                for ids, (text, as_text) in zip(parts, pieces, strict=True)
                if as_text
            ):  # a control token takes the white space around it, and its name does not
                spelled = spelled or found
        if spelled is None:
            raise ValueError("some are control tokens there, too")
        return spelled


@dataclass(frozen=True, slots=True)
class _Frame:
    """What a chat template writes around a question, the only message of a conversation."""

    before: str
    after: str
    own: tuple[str, ...]
    """Texts of the template, for which it may look at the ends of a question."""

    def around(self, question: str) -> str | None:
        """The text with this question; None where the template may write it in another way."""
        is_plain = FRAMED[0] <= len(question) <= FRAMED[-1] and question == question.strip()
        if not is_plain or question.startswith(self.own) or question.endswith(self.own):
            return None
        return f"{self.before}{question}{self.after}"


@lru_cache(maxsize=4)
def _frame(renderer: Renderer) -> _Frame | None:
    """The frame of a template that writes some questions alike and unchanged: words, and one with
    all characters of ASCII and all texts of the template, for which it may look in a question.
    None for another template."""
    import jinja2.sandbox

    words, spells = ["Qz7" * (length // 3) for length in FRAMED], renderer._controls.are_in
    with suppress(TimeoutError, ValueError, DataError, jinja2.TemplateError):
        jinja = renderer.tokenizer.get_chat_template(
            renderer.template.jinja, list(renderer.tools) or None
        )
        tokens = jinja2.sandbox.ImmutableSandboxedEnvironment().lexer.tokenize(jinja)
        own = [*dict.fromkeys(each.value for each in tokens if each.type == "string")]
        own = [each for each in own if each and not spells(each)]
        every = "a".join(["", *map(chr, range(128)), *OTHER_SCRIPTS, *own, *own, ""])
        asked: list[Messages] = [[{"role": "user", "content": each}] for each in (*words, every)]
        texts = [
            text for text, _, _ in renderer._rendered([*map(renderer.with_system_prompt, asked)])
        ]
        before, *rest = (texts[0] or "").split(words[0])
        expected = [f"{before}{each}{after}" for after in rest for each in (*words, every)]
        is_one = texts == expected and not spells(every)  # the question is written once
        if is_one and not renderer.check_written("", asked[0], expected[0]):
            return _Frame(before, rest[0], tuple(own))
    return None


def most_tokens(text: str) -> int:
    """Bound of the tokens of a text: each has a byte or more, and normalization makes up to 33
    bytes of a character that is not ASCII (U+FDFA)."""
    return len(text) if text.isascii() else len(text) + 33 * (len(text.encode()) - len(text))


def _is_question(talk: Messages) -> bool:
    """Whether a conversation is one message of the user, without attachments."""
    return len(talk) == 1 and talk[0].keys() == {"role", "content"} and talk[0]["role"] == "user"


def _holds_words(text: str, content: str) -> bool:
    """Whether a text has all words of a tool's result, which templates may write as JSON."""
    words = {*re.findall(r"\w+", text.replace("\\n", " ").replace("\\t", " "))}
    return words.issuperset(re.findall(r"\w+", content))


def _backend(tokenizer: "PreTrainedTokenizerBase", as_text: bool) -> Any:
    """The tokenizer's Rust tokenizer where Transformers' class hands texts to it as they are; its
    ``encode_batch_fast``, which Transformers does not call, makes no offsets. Else None, as before
    the first call, which sets truncation and padding."""
    from transformers import PreTrainedTokenizerFast

    kind, plain = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, plain) or kind.__call__ is not plain.__call__:
        return None
    backend = tokenizer.backend_tokenizer
    is_set = backend.truncation is None and backend.padding is None
    is_set = is_set and backend.encode_special_tokens == as_text
    return backend if is_set and kind._encode_plus is plain._encode_plus else None


def _is_assistant(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _decoded(tokenizer: "PreTrainedTokenizerBase", ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


@lru_cache(maxsize=4)
def _controls(tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate) -> ControlTokens:
    """The control tokens of a template, which is not asked with a message that spells one."""
    text = None
    with suppress(TimeoutError, ValueError):  # said when a row is rendered
        ((text, _, _),) = Renderer(tokenizer, template, None)._rendered([TALK], False)
    return control_tokens(tokenizer, text or "")


@lru_cache(maxsize=4)
def _controls_with(
    tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate, own: str
) -> ControlTokens:
    """``_controls`` of a template, or else of the tokenizer's own."""
    return _controls(tokenizer, Renderer(tokenizer, template, None)._template)


@lru_cache(maxsize=4)
def _names_in(jinja: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", jinja))


@lru_cache(maxsize=4)
def _cuts(tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate) -> re.Pattern[str] | None:
    """The places before those tokens of turns that are found in any text as it is, whatever is
    around them, and share no characters with another token; None without any."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    added = [] if backend is None else [*backend.get_added_tokens_decoder().values()]
    turns = _controls(tokenizer, template).turns
    found = [
        each.content
        for each in added
        if each.content in turns
        and not (each.normalized or each.lstrip or each.rstrip or each.single_word)
        and not any(_overlap(other.content, each.content) for other in added)
    ]
    return re.compile(f"(?={'|'.join(map(re.escape, found))})") if found else None


def _overlap(first: str, second: str) -> bool:
    """Whether the second may begin inside of the first."""
    return any(
        second.startswith(first[n:]) or first.startswith(second, n) for n in range(1, len(first))
    )


@lru_cache(maxsize=4)
def _form_of_answers(
    tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate
) -> tuple[str, int | None]:
    """Text of the template, with its control tokens, between where an answer begins and its
    content, else an empty text; and the last token of an answer that nothing follows."""
    renderer = Renderer(tokenizer, template, None)
    begin = end = None
    with suppress(TimeoutError, ValueError):
        ((begin, _, _),) = renderer._rendered([ASKED])
        ((end, _, _),) = renderer._rendered([[*ASKED, ANSWER]], False)
    if not begin or not end or not end.startswith(begin):
        return "", None
    header, said, _ = end[len(begin) :].partition(ANSWER["content"])
    controls = renderer._controls
    has_own = said and controls.turns & set(controls.written_in(header))
    ids = renderer.token_ids(_REPLY, end)
    return (header, ids[-1]) if has_own else ("", None)


@lru_cache(maxsize=4)
def _writes_tools(tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate) -> bool:
    """Whether the template writes another text with a tool than without one; ConfigError if it
    cannot be asked."""
    tools, _, _ = PROBES["tool"]
    without, with_tools = (
        Renderer(tokenizer, template, None, tuple(offered)) for offered in ((), tools)
    )
    try:
        return with_tools.text("a tool", ASKED) != without.text("a tool", ASKED)
    except DataError as error:
        raise ConfigError(str(error)) from error


@lru_cache(maxsize=2)
def _family(tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate) -> Family | None:
    """The family whose turns are those of the template."""

    def written(messages: Messages, tools: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, as the template writes it."""
        renderer = Renderer(tokenizer, template, None, tuple(tools))
        return renderer.token_ids(_REPLY, renderer.text(_REPLY, messages))

    return family_of(tokenizer, written, template.date)


def _render(
    tokenizer: "PreTrainedTokenizerBase", talk: Messages, arguments: Mapping[str, Any]
) -> _Rendering:
    """Return the text that the template writes of a conversation, or the problem."""
    import jinja2

    try:
        text = str(tokenizer.apply_chat_template(talk, tokenize=False, **arguments))
    except jinja2.TemplateSyntaxError as error:
        return None, one_line(error), error.lineno
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the template's)
        return None, one_line(error)[:1000] or type(error).__name__, None
    if len(text) > MOST_TEXT_CHARACTERS:
        return None, f"it writes more than {MOST_TEXT_CHARACTERS:,} characters", None
    return text, "", None


def order(
    sizes: Sequence[int], weights: Sequence[float], seed: int, start: int, count: int
) -> list[int]:
    """Indices of the prompts at positions ``start .. start + count`` of an endless shuffled order;
    index ``sizes[0]`` is the first prompt of the second set.

    The sets take turns, so that any stretch of it holds each set in the proportion of its weight,
    to within one prompt for each set. Each pass over a set is a fresh permutation of it.
    """
    indices: list[int] = []
    for position in range(start, start + count):
        number, turn = _turn(weights, position)
        epoch, offset = divmod(turn, sizes[number])
        salt = f"/{number}" if number else ""  # two sets of one size are shuffled differently
        shuffled = _permutation(sizes[number], f"{seed}/{epoch}{salt}")
        indices.append(sum(sizes[:number]) + shuffled[offset])
    return indices


@lru_cache(maxsize=32)
def _permutation(size: int, seed: str) -> Sequence[int]:
    """The shuffled numbers below ``size``; long ones are read from the cache's folder."""
    if size < LEAST_CACHED:
        return _shuffled(size, seed)
    described = [size, seed, [*sys.version_info[:2]]]
    name = hashlib.sha256(orjson.dumps(described)).hexdigest()
    path = cache.folder() / f"{name}.order"
    try:
        found, (numbers,) = cache.read(path)
        if found == described:
            return numbers.cast("i")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError) as error:
        logger.warning("%s is damaged (%s) and is written again", path, one_line(error)[:100])
    shuffled = _shuffled(size, seed)
    try:
        cache.write(path, described, [shuffled])
    except (OSError, ReasonError) as error:
        logger.warning("the order is not kept for later starts: %s", one_line(error)[:200])
    return shuffled


def _shuffled(size: int, seed: str) -> "array[int]":
    permutation = list(range(size))
    random.Random(seed).shuffle(permutation)
    return array("i", permutation)


def _turn(weights: Sequence[float], position: int) -> tuple[int, int]:
    """Index of the set at this position, and number of its earlier turns: of the first ``p``
    positions the first set has ``floor(p * share)``, and what it leaves is shared out among the
    others likewise. Fractions, since a rounded product could grow by 2."""
    if len(weights) == 1:
        return 0, position
    rest = sum(map(Fraction, weights))
    for number, weight in enumerate(weights):
        share = Fraction(weight) / rest
        before = floor(position * share)
        if floor((position + 1) * share) > before:
            return number, before
        position -= before
        rest -= Fraction(weight)
    raise AssertionError("the last set takes all that is left")
