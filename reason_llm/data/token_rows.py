"""Examples as rows of tokens, with a flag for each token that is learned.

A prompt has the ids that it has when completions are sampled. A completion is what the chat
template writes for the assistant's turn, up to and including its end token: template(messages and
turn) without template(messages, generation prompt). Of several turns each is learned, and nothing
between them. Where a template writes earlier turns in another way once later ones follow (Qwen3
drops their thinking), TRL's training template for it is taken, which keeps them; without one, each
turn is a row with what the model reads before it. Turns that a row leaves out of the loss are read
and not learned. Not here: the places of attachments in a prompt (``attachments``).
"""

import copy
import hashlib
from bisect import bisect_left
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from reason_llm.data.control_tokens import OPEN
from reason_llm.data.forms import SIDES, Completed, Learned, Sampled, TextDocument
from reason_llm.data.messages import THOUGHT_MEMBER, THOUGHTS, Message, Messages, Note
from reason_llm.data.render import AT_ONCE, RENDER_SECONDS, Renderer
from reason_llm.errors import DataError
from reason_llm.rollout import TokenRow
from reason_llm.workers import within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
THINK = "<think>"
_PROBE = "Yes, indeed."
_Row = tuple[list[int], list[bool]]
_Span = tuple[int, int]
_Rows = tuple[TokenRow, ...]
_Talks = tuple[Renderer, list[tuple[Messages, bool]]]
"""Conversations to render, each with whether up to where the next answer begins."""
_Asking = Generator[list[str] | _Talks, Any, T]
"""Function that yields texts and is sent the token ids of each, or conversations and is sent the
text of each, or None for one that has to be rendered alone."""
MOST_TURNS = 8
"""Turns of a conversation that is rendered with others: memory holds the texts of all."""


class _Rewritten(DataError):
    """The template writes earlier turns in another way once later ones follow."""


def render(
    examples: Sequence[Learned],
    renderer: Renderer,
    context_tokens: int,
    end_token_ids: Collection[int],
) -> Iterator[tuple[_Rows | DataError, list[str]]]:
    """The rows of each example: one, of a preference two (chosen, rejected), of a document as many
    of at most ``context_tokens`` as it needs; other rows are never cut. A demonstration whose
    template changes earlier turns is one row per turn. Groups count from 0 in each example. The
    texts of many examples are tokenised at once.

    Args:
        end_token_ids: the tokens that end an answer.

    Yields:
        The rows, or a DataError: a template that cannot be learned from, no end token or two of
        them; and members of messages that the template does not write.

    Raises:
        ConfigError: the template is not valid.
    """
    for start in range(0, len(examples), AT_ONCE):
        part = examples[start : start + AT_ONCE]
        notes = [list[str]() for _ in part]
        asking = [
            _rows(example, renderer, context_tokens, end_token_ids, noted.append)
            for example, noted in zip(part, notes, strict=True)
        ]
        yield from zip(_answered(part, asking, renderer), notes, strict=True)


def _answered(
    examples: Sequence[Learned], asking: Sequence[_Asking[_Rows]], renderer: Renderer
) -> list[_Rows | DataError]:
    """Run the generators side by side: the texts that they ask for are tokenised together."""
    found: dict[int, _Rows | DataError] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(asking)))
    while answers:
        asked: dict[int, list[str]] = {}
        talks: dict[Renderer, dict[int, list[tuple[Messages, bool]]]] = {}
        for number, answer in answers.items():
            try:
                wanted = asking[number].send(answer)
                if isinstance(wanted, tuple):
                    talks.setdefault(wanted[0], {})[number] = wanted[1]
                else:
                    asked[number] = wanted
            except StopIteration as ended:
                found[number] = ended.value
            except DataError as error:
                found[number] = error
        ids_of = renderer.ids_of(dict.fromkeys(chain.from_iterable(asked.values())))
        answers = {}
        for number, texts in asked.items():
            try:
                where = examples[number].where
                answers[number] = [
                    ids_of[text] if text in ids_of else renderer.marked_ids(where, text)
                    for text in texts
                ]
            except DataError as error:
                found[number] = error
        for by, of in talks.items():
            made = iter(by.marked_texts([*chain.from_iterable(of.values())]))
            answers |= {number: [*islice(made, len(each))] for number, each in of.items()}
    return [found[number] for number in range(len(asking))]


def _rows(
    example: Learned,
    renderer: Renderer,
    context_tokens: int,
    end_token_ids: Collection[int],
    note: Note,
    group: int = 0,
) -> _Asking[_Rows]:
    where = example.where
    if isinstance(example, TextDocument):
        return (yield from _document(example, renderer, context_tokens, end_token_ids))
    with_extras = renderer.with_extras(example.extras)
    if example.sampled is None and len(example.completions) == 1:
        completion = example.completions[0]
        try:
            row = yield from _row(where, example, completion, with_extras, end_token_ids, note)
        # A template that rewrites earlier turns, as by leaving out their thoughts, gives no row
        # with all turns: each turn becomes a row, with the text that the model would have read.
        except _Rewritten:
            parts = _turns(example)
            if len(parts) == len(completion) == 1:
                raise
            note_read = note if _has_untrained_thought(example) else _without_thoughts(note)
            made: list[TokenRow] = []
            for number, part in enumerate(parts):
                made += yield from _rows(
                    part, renderer, context_tokens, end_token_ids, note_read, number
                )
            return tuple(made)
        return (TokenRow(where, tuple(row[0]), tuple(row[1]), group, example.value),)
    rows = []
    for number, completion in enumerate(example.completions):
        name = f"{where}, {SIDES[number]}" if len(example.completions) > 1 else where
        if example.sampled is not None:
            ids, trained = _as_sampled(name, example.sampled, number, renderer)
            if number == 0 <= example.value and ids[-1] not in end_token_ids:
                raise DataError(
                    f"{name}: the completion has no end token, so a policy would learn never to "
                    "stop; remove the row"
                )
        else:
            ids, trained = yield from _row(
                name, example, completion, with_extras, end_token_ids, note
            )
        value = 0.0 if number else example.value
        rows.append(TokenRow(where, tuple(ids), tuple(trained), group, value))
    if len(rows) > 1 and rows[0].ids == rows[1].ids:
        raise DataError(f"{where}: 'chosen' and 'rejected' have the same tokens; remove the row")
    return tuple(rows)


def _has_untrained_thought(example: Completed) -> bool:
    """Whether a thought is in a message that is only read."""
    only_read = [each for n, each in enumerate(example.completions[0]) if n in example.untrained]
    return any(each.keys() & {*THOUGHTS} for each in (*example.messages, *only_read))


def _without_thoughts(note: Note) -> Note:
    """The note without thoughts: later turns are read without those of earlier rows."""
    return lambda member: None if member == THOUGHT_MEMBER else note(member)


def _turns(example: Completed) -> list[Completed]:
    """The trained turns of a demonstration, each with all messages before it as its prompt."""
    messages, completion = example.messages, example.completions[0]
    return [
        replace(
            example,
            messages=[*messages, *completion[:number]],
            completions=([message],),
            untrained=frozenset(),
        )
        for number, message in enumerate(completion)
        if message["role"] == "assistant" and number not in example.untrained
    ]


def prompt_tokens(row: TokenRow) -> int:
    """The number of tokens before the first learned one."""
    return row.trained.index(True)


@lru_cache(maxsize=1)
def tokenizer_digest(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Digest of a tokenizer's tokens and their ids."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(orjson.dumps(vocabulary)).hexdigest()[:16]


def _as_sampled(where: str, sampled: Sampled, number: int, renderer: Renderer) -> _Row:
    ids = [*sampled.prompt, *sampled.completions[number]]
    known = len(renderer.tokenizer)
    if sampled.tokenizer != tokenizer_digest(renderer.tokenizer) or max(ids) >= known:
        raise DataError(
            f"{where}: its token ids are of the tokenizer {sampled.tokenizer:.40} and this one is "
            f"{tokenizer_digest(renderer.tokenizer)}; train the model that sampled them, or give "
            "rows of texts"
        )
    return ids, [False] * len(sampled.prompt) + [True] * len(sampled.completions[number])


def _row(
    where: str,
    example: Completed,
    completion: Messages,
    renderer: Renderer,
    end_token_ids: Collection[int],
    note: Note,
) -> _Asking[_Row]:
    tokenizer, messages = renderer.tokenizer, example.messages
    names = tokenizer.convert_ids_to_tokens(sorted(end_token_ids))
    ends = [name for name in names if name]  # None for an id beyond the vocabulary
    if (renderer.template.jinja or tokenizer.chat_template) is not None:
        text, spans = yield from _spans(where, messages, completion, renderer, ends)
        for member in renderer.check_written(where, messages, text[: spans[0][0]]):
            note(member)
        read = [each for each in completion if each["role"] != "assistant"]
        if read:
            replace(renderer, system_prompt=None).check_written(where, read, text)
        for message in renderer.marked(completion):
            content = message["content"]
            if content != content.strip() and content not in text:
                note(f"white space around a message of the {message['role']}")
        ids: list[int] = []
    elif example.is_text:
        prompt, answer = (renderer.escaped(each[-1]["content"]) for each in (messages, completion))
        text, spans = _plain(where, prompt, answer, renderer, ends)
        ids = _begin(tokenizer)
    else:
        raise DataError(
            f"{where}: the row is a conversation and {renderer.template.source} does not exist; "
            "set data.template, or give texts as prompt and completion"
        )
    borders = [0, *(border for span in spans for border in span)]
    begin = len(ids)
    pieces, stops = yield from _joined(where, text, borders, renderer)
    ids += pieces
    trained = [False] * len(ids)
    turns = [n for n, message in enumerate(completion) if message["role"] == "assistant"]
    for turn, first, stop in zip(turns, stops[::2], stops[1::2], strict=True):
        if turn in example.untrained:
            continue
        if ids[begin + stop - 1] not in end_token_ids:
            raise DataError(
                f"{where}: the tokenizer does not read {', '.join(ends)} as end tokens at the end "
                "of a turn, so a policy would learn never to stop; fix the tokenizer's files"
            )
        trained[begin + first : begin + stop] = [True] * (stop - first)
    trained[0] = False  # where the tokenizer reads nothing in the prompt
    _check_begin(where, ids, _bos(tokenizer, end_token_ids))
    return ids, trained


def _plain(
    where: str, prompt: str, completion: str, renderer: Renderer, ends: Sequence[str]
) -> tuple[str, list[_Span]]:
    """Spans as of ``_spans``, for texts without a template."""
    if not completion.endswith(tuple(ends)):
        completion += renderer.tokenizer.eos_token
    if sum(map(completion.count, ends)) > 1:
        raise DataError(
            f"{where}: the completion holds an end token ({', '.join(ends)}) before its end; "
            "remove it, as a policy would learn to go on after it"
        )
    return prompt + completion, [(len(prompt), len(prompt) + len(completion))]


def _document(
    document: TextDocument,
    renderer: Renderer,
    context_tokens: int,
    end_token_ids: Collection[int],
) -> _Asking[_Rows]:
    """Rows of the context's length; a last row of one token is left out."""
    (text_ids,) = yield [renderer.escaped(document.text)]
    ids = _begin(renderer.tokenizer) + text_ids
    if ids[-1] not in end_token_ids:
        ids.append(renderer.tokenizer.eos_token_id)
    _check_begin(document.where, ids, _bos(renderer.tokenizer, end_token_ids))
    starts = [n for n in range(0, len(ids), context_tokens) if len(ids) - n > 1]
    flags = (False, *[True] * (min(len(ids), context_tokens) - 1))  # one object for all whole rows
    parts = [tuple(ids[start : start + context_tokens]) for start in starts]
    return tuple(
        TokenRow(document.where, part, flags[: len(part)], number)
        for number, part in enumerate(parts)
    )


def _spans(
    where: str, messages: Messages, completion: Messages, renderer: Renderer, ends: Sequence[str]
) -> _Asking[tuple[str, list[_Span]]]:
    """The conversation's text, and the spans in it that are learned: as the template writes it, as
    TRL's training template does, or, for one turn, as the model is sampled to write it."""
    messages = renderer.with_system_prompt(messages)
    talk, first = [*messages, *completion], len(messages)
    _check_spelled_thoughts(where, talk, completion, renderer)
    problem: DataError | None = None
    written = None
    try:
        written = yield from _prefix_spans(where, talk, first, renderer, ends)
    except DataError as error:
        problem = error
    if written is None and (training := _training(renderer)) is not None:
        with suppress(DataError):
            written = yield from _prefix_spans(where, talk, first, training, ends)
        prompt = renderer.marked_text(where, messages)
        if written is not None and written[0][: written[1][0][0]] != prompt:
            written = None  # the policy would read another prompt when it is sampled
    if written is None and len(completion) == 1:
        written = _as_written_by_the_model(where, messages, completion[0], renderer, ends)
        if written is None:
            written = yield from _after_thoughts(where, messages, completion, renderer, ends)
    if written is not None:
        return written
    whole = renderer.marked_text(where, talk, generation=False)
    (last,) = renderer.marked(completion[-1:])
    if problem is None and last["content"].rpartition("</think>")[2].strip() not in whole:
        raise DataError(
            f"{where}: {renderer.template.source} leaves out the message of the assistant, "
            f"{completion[-1]['content'][:60]!r}; set data.template to one that writes it"
        )
    if problem is None and len([each for each in talk if each["role"] == "assistant"]) == 1:
        raise DataError(
            f"{where}: {renderer.template.source} does not write the answer as the model would "
            f"after the prompt, up to an end token of the model ({', '.join(ends)}); set "
            "data.template to one that was made for this model"
        )
    raise problem or _Rewritten(
        f"{where}: {renderer.template.source} does not write the assistant's turns as the "
        "model reads and writes them (it changes them as the conversation goes on), and TRL "
        "has no training template that keeps them; give rows with one turn of the assistant, or "
        "a data.template that keeps the turns"
    )


def _check_spelled_thoughts(
    where: str, talk: Messages, completion: Messages, renderer: Renderer
) -> None:
    """Refuse an answer that speaks of ``</think>`` within a line, where the template takes what
    stands before it for a thought. Raises DataError."""
    for message in renderer.marked(completion):
        content = message["content"].strip()
        is_thought = content.startswith(THINK) or "</think>\n" in f"{content}\n"
        if "</think>" not in content or is_thought:
            continue
        if content not in renderer.marked_text(where, talk, generation=False):
            raise DataError(
                f"{where}: the assistant's message spells </think> within a line, and "
                f"{renderer.template.source} takes the text before it for a thought; begin the "
                "message with <think>, end the thought's line with </think>, or reword it"
            )


def _as_written_by_the_model(
    where: str, messages: Messages, answer: Message, renderer: Renderer, ends: Sequence[str]
) -> tuple[str, list[_Span]] | None:
    """``_spans`` of one turn with its thought, for a template that leaves a thought out or opens it
    in the prompt: the prompt, what the model writes after it, and the end token of a turn. None
    where there is no thought.

    Raises:
        DataError: the prompt opens a thought, and the row has none.
    """
    prompt = renderer.marked_text(where, messages)
    (answer,) = renderer.marked([answer])
    content = answer["content"]
    is_open = prompt.rstrip().endswith(THINK)
    if "reasoning_content" in answer and is_open:
        content = f"{THINK}\n{answer['reasoning_content'].strip()}\n</think>\n\n{content}"
    if "</think>" not in content or answer.get("tool_calls"):
        if is_open:
            raise DataError(
                f"{where}: {renderer.template.source} opens a thought, {THINK}, after the prompt, "
                "and the assistant's message has none; write '<think>…</think>' before the answer, "
                "or set data.template to one without it"
            )
        return None
    _check_ends(where, content, ends)
    if is_open:
        content = content.lstrip().removeprefix(THINK)
        content = content.removeprefix("\n") if prompt.endswith("\n") else content
    probe = {"role": "assistant", "content": _PROBE}
    whole = renderer.marked_text(where, [*messages, probe], generation=False)
    _, found, after = whole.rpartition(_PROBE)
    stops = [after.find(end) + len(end) for end in ends if end in after]
    if not found or not stops:
        return None
    text = prompt + content + after[: min(stops)]
    return text, [(len(prompt), len(text))]


def _after_thoughts(
    where: str, messages: Messages, completion: Messages, renderer: Renderer, ends: Sequence[str]
) -> _Asking[tuple[str, list[_Span]] | None]:
    """``_spans`` of one turn, for a template that leaves out the prompt's thoughts once the turn
    follows them (gpt-oss's, of a tool call before the answer): the prompt as it is sampled, and the
    turn as it follows the prompt without them. None where no thought is before the turn."""
    bare = [{key: each[key] for key in each if key not in THOUGHTS} for each in messages]
    if bare == messages:
        return None
    written = yield from _prefix_spans(where, [*bare, *completion], len(bare), renderer, ends)
    if written is None:
        return None
    whole, ((start, stop),) = written
    prompt = renderer.marked_text(where, messages)
    text = prompt + whole[start:stop]
    return text, [(len(prompt), len(text))]


def _check_ends(where: str, content: str, ends: Sequence[str]) -> None:
    if inside := [end for end in ends if end in content]:
        raise DataError(
            f"{where}: a message of the assistant holds the end token {inside[0]}; remove it, "
            "as a policy would learn to go on after it"
        )


def _prefix_spans(
    where: str, talk: Messages, first: int, renderer: Renderer, ends: Sequence[str]
) -> _Asking[tuple[str, list[_Span]] | None]:
    """Spans as of ``_spans``; None if the whole text does not begin with what the template writes
    up to a turn's beginning or its end, or lacks a thought or an earlier turn's end token."""
    turns = [n for n in range(first, len(talk)) if talk[n]["role"] == "assistant"]
    parts = [(talk, False), *((talk[:turn], True) for turn in turns)]
    parts += [(talk[: turn + 1], False) for turn in turns if turn + 1 < len(talk)]
    made = (yield renderer, parts) if len(turns) <= MOST_TURNS else [None] * len(parts)

    def text(number: int) -> str:
        """The text of a part; raises DataError."""
        return made[number] or renderer.marked_text(where, *parts[number])

    whole, *prompts = map(text, range(1 + len(turns)))
    starts = [len(prompt) for prompt in prompts]
    if not all(map(whole.startswith, prompts)) or starts != sorted(starts):
        return None
    spans: list[_Span] = []
    for number, (start, stop) in enumerate(pairwise([*starts, len(whole)])):
        turn = turns[number]
        message = talk[turn]
        _check_ends(where, message["content"], ends)
        stops = [
            whole.find(end, start, stop) + len(end) for end in ends if end in whole[start:stop]
        ]
        if not stops and turn + 1 < len(talk):
            return None  # gpt-oss ends earlier turns in another way
        if not stops:
            raise DataError(
                f"{where}: {renderer.template.source} writes no end token ({', '.join(ends)}) "
                "after the assistant's turn, so a policy would learn never to stop; write "
                "{{ eos_token }} there in a template of your own, and name it in data.template"
            )
        span = start, min(stops)
        is_last = turn + 1 == len(talk)
        if not is_last and not text(1 + len(turns) + number).startswith(whole[: span[1]]):
            return None
        (marked,) = renderer.marked([message])
        if not _holds_thought(where, marked, whole[slice(*span)], renderer):
            return None
        spans.append(span)
    return whole, spans


def _holds_thought(where: str, message: Message, written: str, renderer: Renderer) -> bool:
    """Whether an assistant's turn holds the message's thought.

    Raises:
        DataError: it does not hold the answer, the tool calls, or a thought in a member.
    """
    thought, _, answer = message["content"].rpartition("</think>")
    if answer.strip() not in written:
        raise DataError(
            f"{where}: {renderer.template.source} leaves out the content of the assistant's "
            "message, or changes it; set data.template to one that writes it"
        )
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in written:
            raise DataError(
                f"{where}: {renderer.template.source} does not write tool calls of a message with "
                "an empty content and arguments as an object; set data.template to one that does, "
                "or write them into 'content' as the model should write them"
            )
    if message.get("reasoning_content", "").strip() not in written:
        raise DataError(
            f"{where}: {renderer.template.source} does not write the thought in "
            "'reasoning_content'; write it into 'content' as the model should write it"
        )
    return thought.strip().removeprefix(THINK).strip() in written


@lru_cache(maxsize=1)
def _training(renderer: Renderer) -> Renderer | None:
    """The renderer with TRL's training template for its chat template, which TRL knows by its text;
    None if it has none."""
    import jinja2
    from trl.chat_template_utils import get_training_chat_template

    tokenizer = copy.copy(renderer.tokenizer)
    tokenizer.chat_template = tokenizer.get_chat_template(renderer.template.jinja)
    source = f"TRL's training template for {renderer.template.source}"
    try:
        jinja = within(RENDER_SECONDS, source, lambda: get_training_chat_template(tokenizer))
    except (
        *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError, TimeoutError),
        *(LookupError, AttributeError, RecursionError, MemoryError),
    ):  # it is not known, or cannot take the conversation that TRL tries it with
        return None
    if jinja is None:
        return None
    template = replace(renderer.template, source=source, jinja=jinja)
    return replace(renderer, template=template)


def _joined(
    where: str, text: str, borders: Sequence[int], renderer: Renderer
) -> _Asking[tuple[list[int], list[int]]]:
    """Token ids of a text up to the last border, and how many of them there are up to each border
    after the first. Where tokens reach over one, the parts between are tokenised apart, as in
    sampling."""
    text = text[: borders[-1]]
    if OPEN not in text:
        # Each text once: its pieces together have the ids of the whole, and a border is one of the
        # tokens where the beginning of its piece has ids with which the piece begins.
        pieces = renderer.pieces(text)
        starts = [0, *accumulate(map(len, pieces))]
        places = [max(0, bisect_left(starts, border) - 1) for border in borders[1:]]
        heads = [
            pieces[place][: border - starts[place]]
            for place, border in zip(places, borders[1:], strict=True)
        ]
        found = yield [*pieces, *heads]
        made, begins = found[: len(pieces)], found[len(pieces) :]
        if all(made[at][: len(ids)] == ids for at, ids in zip(places, begins, strict=True)):
            firsts = [0, *accumulate(map(len, made))]
            ends = [firsts[at] + len(ids) for at, ids in zip(places, begins, strict=True)]
            return [*chain.from_iterable(made)], ends
    encode = partial(renderer.marked_ids, where)
    parts = [text[a:b] for a, b in pairwise(borders)]
    whole = encode(text)
    apart = [encode(part) for part in parts]
    ids, ends = [token for part in apart for token in part], list(accumulate(map(len, apart)))
    if ids == whole:
        return ids, ends
    # Some tokenizers put a space before each text, so a piece alone is not what it is in the text.
    prefixes = [encode(text[:end]) for end in accumulate(map(len, parts))]
    if all(whole[: len(prefix)] == prefix for prefix in prefixes):
        return whole, [len(prefix) for prefix in prefixes]
    decode = renderer.tokenizer.decode
    if decode(ids, clean_up_tokenization_spaces=False) == decode(
        whole, clean_up_tokenization_spaces=False
    ):
        return ids, ends
    raise DataError(
        f"{where}: the tokens of prompt and completion are not those of the whole text; end the "
        "prompt at a token's border, or change data.template"
    )


def _begin(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The token ids that the tokenizer adds before a text without a template."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and bos in tokenizer.encode("")[:1] else []


def _bos(tokenizer: "PreTrainedTokenizerBase", end_token_ids: Collection[int]) -> int | None:
    """The token that begins a sequence; None if there is none, or it ends one, too."""
    bos: int | None = tokenizer.bos_token_id
    return None if bos in end_token_ids else bos


def _check_begin(where: str, ids: Sequence[int], bos: int | None) -> None:
    if bos is not None and tuple(ids[:2]) == (bos, bos):
        raise DataError(
            f"{where}: begins with two BOS tokens; remove one from the row or from data.template"
        )
