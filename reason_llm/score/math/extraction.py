"""Extraction of the final answer from a text; comparing it is done elsewhere.

Rewards use one strict finder each (the box, the tags): a model is not paid for an answer that it
did not mark as asked. ``extract_answer`` is the lenient one, for grading outputs of models that
were asked in other ways. Both take time in proportion to the text.
"""

import re
from dataclasses import dataclass
from itertools import islice

from reason_llm.score.math.answer_text import decide
from reason_llm.score.math.units import is_unit, word_set

_BOX = re.compile(r"\\(?:boxed|fbox)\s*+(?:\{|(?=[A-Za-z0-9\\]))")
_ONE_TOKEN = re.compile(r"\\[A-Za-z]++|[A-Za-z0-9]")
_BRACE = re.compile(r"[{}]")
_OPEN, _CLOSE = "<answer>", "</answer>"
_PHRASE = re.compile(
    r"\bans(?:wer)?+(?:[ \t]{1,9}+is\b[ \t]{0,9}+[:=]?|[ \t]{0,9}+(?:\*\*)?[:=])(?:\*\*)?",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"\.(?=\s|$|\*\*)|\sI hope it is correct")
_BOLD_END = re.compile(r"(?<=[^\s*])\*\*(?=[\s,;:!?]|$)")
"""Markdown's end of bold text, as in ``**Answer: 42**``; a power has more behind it."""
_BOLD = re.compile(
    r"(?:(?<=[\w:=] )|(?<=[^\W\d]\. )|(?<=[$)]\. ))"
    r"\*\*(?=[^\s*])([^*\n]{1,200}+)(?<!\s)\*\*(?![\w*:：])"
)
"""Text in Markdown's bold in a sentence; a heading and a power are none."""
_BOLD_LINE = re.compile(r"\A\*\*(?=[^*\d]*+\d)([^*\n]{1,200}+)\*\*\.?+\Z")
_SPECIAL_TOKEN = re.compile(r"<\|[a-z_]{1,40}+\|>|</?s>|<(?:eos|pad|bos)>", re.IGNORECASE)
_NUMBER = re.compile(
    r"(?<![A-Za-z\d.,])[+-]?\$?(?:\d{1,3}(?:,\d{3})++|\d++)(?:\.\d++)?+(?:/\d++)?+|(?<![A-Za-z\d])\.\d++"
)
_THOUSANDS = re.compile(r"[+-]?\$?\d{1,3}(?:,\d{3})++(?:\.\d++)?+%?")
_WORD = re.compile(r"(?<![\\{])(?<![^\W\d_])[^\W\d_]{3}")  # outside of commands
_MATHEMATICS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_BULLET = re.compile(r"\A\s*+[-*•]\s++")
_EMPTY_LINE = re.compile(r"\n[ \t\r]*+\n")
_WORDS = re.compile(r"[^\W\d_]{2,}+")
_COMMAND = re.compile(r"\\[A-Za-z]++")
_LAYOUT = re.compile(r"\\(?:[,;:! ]|quad|qquad|displaystyle)")
_CLAUSE_END = re.compile(r"[.,;:!?\n]")
_SENTENCE_MARK = re.compile(r"[.;:!?\n]")
_CLAUSE_WORD = re.compile(r"[^\W_]++(?:['’][^\W_]++)?+")
_NEGATIONS = word_set("not isn't aren't wasn't never neither nor cannot can't couldn't won't")
_BETWEEN = word_set("equal equals to the a an be exactly simply just correct right answer value")
"""Words that may stand between a negation and the box that it denies."""
_LEADING = word_set(
    """
    so thus hence therefore then that and but the final answer result value is was be my our i we
    think guess believe get got find
    """
)
"""Words before a box that leave it the subject of what follows it."""
_FALSE = "(?:wrong|incorrect|false|invalid|impossible)"
_ADVERB = "(?:then|clearly|obviously|certainly|definitely|just|simply|completely|probably)"
_DENIED_AFTER = re.compile(
    rf"(?:(?:{_ADVERB}|which|but|this|that|it|however) )*+"
    rf"(?:(?:is|was|would be|must be|seems|looks)(?: {_ADVERB})*+ {_FALSE}\b"
    r"|(?:(?:is|was|can|could|should|would|must|may) (?:not|never)|isn't|wasn't|cannot|can't"
    r"|couldn't|shouldn't|wouldn't)(?: be)?+(?: (?:the|my|our|a|quite)\b)*+"
    r" (?:answer|right|correct|true|it|valid|possible|final|solution|result)\b)"
)
"""Words behind a box, with one space between two, that deny it."""
_DENIED_BEFORE = re.compile(
    rf"{_FALSE} (?:answer|guess|result|solution)(?: (?:is|was|would|be))*+\Z"
)
_SAME = re.compile(
    r"or (?:equivalently|simply|approximately|about|roughly|in|else|we|you|using|by|because"
    r"|since)\b"
)
_RETRACTION = re.compile(
    r"(?:\A|[.;:!?\n(*,])[\s*$)\\\]]{0,8}+(?:(?:(?:no )?wait|actually|correction|oops|sorry|hmm+"
    r"|on second thought|hold on|let me correct|or (?:maybe|perhaps|rather)"
    r"|I made (?:a|an) (?:mistake|error))\b|no[,.!]"
    r"|alternatively[,:]?+[ ]\$?+-?+\d)",
    re.IGNORECASE,
)
"""Words that begin a sentence behind a box, after which another answer may follow."""
_CONCLUSION = re.compile(
    r"\b(?:thus|therefore|hence|so),?+ [$\\(]*+[a-z] ?+= ?+"
    r"(?=[$\\(]*+-?+[\d.]++[$\\)\]\s*]*+\Z)",
    re.IGNORECASE,
)
"""A last sentence that gives a name its value."""
_FALSE_BEFORE = re.compile(rf"\b{_FALSE} \Z", re.IGNORECASE)
_PREDICATE = re.compile(r" (?:is|are) (?:not )?+(?:an? )?+[a-z]{3}")
"""Words behind a formula that a sentence is about."""
_INSTEAD = re.compile(r"(?<=\s)(?:not|instead|rather)\b", re.IGNORECASE)
"""Words before text that the answer is not."""
_NOT = re.compile(r"(?<=[\d$)}*]), not (?=[\d$\\\\(*-])")
_DENIED_LATER = re.compile(
    r"\b(?:(?:above|previous|earlier|first|boxed) (?:answer|result|value|solution)"
    r"|(?:answer|result|value|solution|box) (?:above|before|in the box|I (?:gave|boxed|wrote)))"
    rf" (?:is|was) (?:{_FALSE}|not (?:correct|right|true|valid))\b",
    re.IGNORECASE,
)
_CONFIRMATION = re.compile(
    r"(?<!not )\b(?:yes|(?:correct|right)(?=[.!,)\n]|\Z)|confirm\w*+|verif\w*+"
    r"|match(?:es)?+|holds|works|consistent|same)\b|[✓✔]",
    re.IGNORECASE,
)
_OPEN_BEFORE = re.compile(
    r"(?:[\d^_+/]|(?<!\*)\*|(?<!-)-|[\^_]\{|\S[ ]*+[+/][ ]"
    r"|\\(?:cdot|times|div|pm|mp|neq?|not|sqrt|[dt]?frac|log|ln|sin|cos|tan|phantom)[ ]?\{?)\Z"
)
"""Text before a box that makes the box a part of a formula."""
_OPEN_AFTER = re.compile(r"\d|\^(?!\{?\\circ)|_|[ ]?[+/]|[*-]\d|[ ]?\\(?:cdot|times|div|pm)\b")
_MAX_AROUND = 200
_DENIAL = re.compile(rf"{_FALSE}|not")
_MAX_STATED = 100
_MAX_RIVALS = 8
"""Spellings of one answer in the boxes of one statement."""
_MAX_CHARACTERS = 200_000
"""Only so many characters from the end of an output are read."""
_MAX_SENTENCE = 20_000


@dataclass(frozen=True, slots=True)
class Box:
    """A box in a text: ``text[start:end]``, and ``text[content]`` within it."""

    start: int
    end: int
    content: slice


def boxes(text: str) -> list[Box]:
    """All boxes that are closed, in the order of where they begin; some may stand in others."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        position = brace.start()
        if text[position - 1] == "\\":
            continue
        if brace[0] == "{":
            opened.append(position)
        elif opened:
            closing[opened.pop()] = position
    closed = []
    for box in _BOX.finditer(text):
        if not box[0].endswith("{"):
            if token := _ONE_TOKEN.match(text, box.end()):
                closed.append(Box(box.start(), token.end(), slice(*token.span())))
        elif (end := closing.get(box.end() - 1)) is not None:
            closed.append(Box(box.start(), end + 1, slice(box.end(), end)))
    return closed


def has_box(text: str) -> bool:
    """Whether a box begins anywhere in the text."""
    return _BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` (or ``\\fbox``), nested braces kept; None if there
    is none or it is not closed.

    TeX's own forms ``\\boxed {7}`` and ``\\boxed 7`` count too.

    Example: ``"so \\\\boxed{\\\\frac{1}{2}}" -> "\\\\frac{1}{2}"``
    """
    box = _last_closed(text, boxes(text))
    return None if box is None else text[box.content].strip()


def _last_closed(text: str, closed: list[Box]) -> Box | None:
    """The last of the boxes, unless another one begins behind it and is not closed."""
    if not closed or _BOX.search(text, closed[-1].start + 1):
        return None
    return closed[-1]


def final_boxed(text: str) -> str | None:
    """The content of the last box, as ``last_boxed``; of several boxes in one statement, as
    ``\\boxed{4}, \\boxed{5}``, all their answers with commas between them. None also where the box
    is a part of a formula (``3+\\boxed{5}``), is denied (``not \\boxed{5}``), or stands in the
    thinking, and where another answer follows it.

    A new statement begins behind an empty line and with any word but ``and``, ``or`` and a unit:
    of ``\\boxed{4}, no, \\boxed{5}`` the last box counts.
    """
    text = outside_thinking(text)
    closed = boxes(text)
    last = _last_closed(text, closed)
    if last is None or not _stands_alone(text, last.start, last.end):
        return None
    answer = text[last.content].strip()
    if _is_withdrawn(answer, text[last.end : last.end + _MAX_SENTENCE]):
        return None
    statement = _boxes_of_statement(text, closed)
    if len(statement) > _MAX_RIVALS + 1 or not all(
        _stands_alone(text, box.start, box.end) for box in statement[:-1]
    ):
        return None
    contents = _distinct([text[box.content].strip() for box in statement])
    return ", ".join(contents) if len(contents) > 1 else answer


def _boxes_of_statement(text: str, closed: list[Box]) -> list[Box]:
    """The innermost boxes of the last statement, at most one more than ``_MAX_RIVALS`` allows."""
    statement = [closed[-1]]
    for box in reversed(closed[:-1]):
        if box.end <= statement[0].start:  # else it holds the later one
            between = text[box.end : statement[0].start]
            if _begins_statement(between) or len(statement) > _MAX_RIVALS + 1:
                break
            statement.insert(0, box)
    return statement


def _distinct(contents: list[str]) -> list[str]:
    """The contents of boxes without those that a later one has the value of."""
    distinct: list[str] = []
    for content in reversed(contents):
        if not any(content == other or decide(content, other) is True for other in distinct):
            distinct.insert(0, content)
    return distinct


def _begins_statement(between: str) -> bool:
    """Whether another statement begins between two boxes."""
    if _EMPTY_LINE.search(between):
        return True
    words = _WORDS.findall(_COMMAND.sub(" ", between))
    return any(word.lower() not in ("and", "or") and not is_unit(word) for word in words)


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether a box is a complete answer: no operator, function or denial around it."""
    before = _LAYOUT.sub("", text[max(0, start - _MAX_AROUND) : start])
    after = _LAYOUT.sub("", text[end : end + _MAX_AROUND])
    if _OPEN_BEFORE.search(before) or _OPEN_AFTER.match(after):
        return False
    return not _is_denied(before, after)


def _is_denied(before: str, after: str) -> bool:
    """Whether a word denies the box between two texts. ``The number of false ones is``, ``of these
    are not prime`` and ``statement B is false`` speak of other things."""
    before = before.lower().replace("’", "'").rstrip(" $\\([*\n")
    if before.endswith(("answer:", "result:", "solution:")):
        before = before[:-1]
    words = _CLAUSE_WORD.findall(_CLAUSE_END.split(before)[-1])
    if _DENIED_BEFORE.search(" ".join(words)):
        return True
    place = len(words)
    while place and (words[place - 1] in _BETWEEN or len(words[place - 1]) == 1):
        place -= 1
    if place and words[place - 1] in _NEGATIONS:
        return True
    clause = _SENTENCE_MARK.split(after.lower().replace("’", "'"))[0]
    if not (follows := _CLAUSE_WORD.findall(clause)):
        return False
    is_subject = all(word in _LEADING or len(word) == 1 for word in words)
    is_bare = len(follows) == 1 and _DENIAL.fullmatch(follows[0])
    return is_subject and (bool(is_bare) or bool(_DENIED_AFTER.match(" ".join(follows))))


def _is_withdrawn(answer: str, tail: str) -> bool:
    """Whether the text behind a box gives another answer: ``or 6``, ``The answer is 6``, or, behind
    a word such as ``Wait``, another number that nothing confirms."""
    if not _WORDS.search(tail) and "####" not in tail:
        return False
    words = " ".join(_CLAUSE_WORD.findall(tail[:_MAX_AROUND].lower()))
    if words.startswith("or ") and not _SAME.match(words):
        rest = tail[:_MAX_AROUND].lstrip(" $,(})\\").removeprefix("or").strip()
        rest = _SENTENCE_END.split(rest)[0].strip(" .")
        if rest.count("(") < rest.count(")"):  # (or 25%)
            rest = rest.rpartition(")")[0]
        return not _is_restated(answer, rest, is_sure=True)
    if _DENIED_LATER.search(tail):
        return True
    phrases = [*islice(_PHRASE.finditer(tail), _MAX_STATED), *_CONCLUSION.finditer(tail)]
    stated = [
        tail[phrase.end() :]
        for phrase in sorted(phrases, key=lambda phrase: phrase.end())
        if not _FALSE_BEFORE.search(tail[max(0, phrase.start() - _MAX_AROUND) : phrase.start()])
    ]
    stated = [_phrase_answer(rest[:_MAX_AROUND].lstrip().partition("\n")[0]) for rest in stated]
    if (hashed := hashed_answer(tail)) is not None:
        stated.append(hashed)
    if stated and not _is_restated(answer, stated[-1]):
        return True
    retraction = _RETRACTION.search(tail)
    if retraction is None or _CONFIRMATION.search(tail, retraction.end()):
        return False
    numbers = _NUMBER.findall(tail[retraction.end() - 1 :])
    return bool(numbers) and not _is_restated(answer, numbers[-1])


def _is_restated(answer: str, stated: str, is_sure: bool = False) -> bool:
    """Whether the text behind a box repeats the answer or, unless ``is_sure``, gives none."""
    if decide(answer, stated) is not False:
        return True
    if is_sure:
        return False
    stated = _INSTEAD.split(stated, maxsplit=1)[0]
    boxed, other = ("".join(text.split()).strip("$.*") for text in (answer, stated))
    if boxed in _NUMBER.findall(stated) or (len(boxed) > 1 and boxed in other):
        return True
    is_choice = len(other.strip("()")) == 1 and other.strip("()").isupper()
    return not (is_choice or any(map(str.isdigit, stated)))


def outside_thinking(text: str) -> str:
    """Text behind the last ``</think>`` and before another ``<think>``."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def texts_in_tags(text: str) -> list[str] | None:
    """The texts between ``<answer>`` and ``</answer>`` outside of the thinking; None where the tags
    are no pairs."""
    first, *parts = outside_thinking(text).split(_OPEN)
    if _CLOSE in first or any(part.count(_CLOSE) != 1 for part in parts):
        return None
    return [part.partition(_CLOSE)[0].strip() for part in parts]


def last_answer_tags(text: str) -> str | None:
    """The text between ``<answer>`` and ``</answer>`` outside of the thinking; None if there is no
    such pair, one that is not closed, or a second one with another answer."""
    answers = texts_in_tags(text)
    others = {*(answers or [])[:-1]} - {*(answers or [])[-1:]}
    if not answers or len(others) > _MAX_RIVALS:
        return None
    if not all(decide(answers[-1], other) is True for other in others):
        return None
    return final_boxed(answers[-1]) if has_box(answers[-1]) else answers[-1]


def extract_answer(text: str) -> str | None:
    """The final answer of a whole model output, however it was marked; None if it was not.

    Tried in this order, the last of each kind: ``\\boxed{}``, ``<answer>`` tags, GSM8K's
    ``#### 42``, ``the answer is 42`` or ``Answer: 42``, what the last line has in bold, and, of a
    text without any of these marks, its last sentence or formulas. Where the output closes its
    thinking with ``</think>``, only what follows counts. A box that is not closed is no answer.

    For evaluation; a training reward that took all of these would pay for ignoring the format.
    """
    text = outside_thinking(_SPECIAL_TOKEN.sub("", text[-_MAX_CHARACTERS:]))
    if (marked := _marked_answer(text)) is not None:
        return marked
    is_marked = has_box(text) or any(mark in text for mark in (_OPEN, _CLOSE, "####"))
    return None if is_marked else _last_statement(text) or None


def _marked_answer(text: str) -> str | None:
    """The answer that a text marks; None without a valid mark."""
    if has_box(text):
        return final_boxed(text)
    tagged = last_answer_tags(text)
    if tagged is not None:
        return tagged
    if (hashed := hashed_answer(text)) is not None:
        return hashed
    phrases = [
        match for match in _PHRASE.finditer(text) if text[match.end() : match.end() + 99].strip()
    ]
    if phrases:
        return _phrase_answer(text[phrases[-1].end() :].lstrip().partition("\n")[0])
    line = text.strip().rpartition("\n")[2]
    bold = _BOLD.findall(line) or _BOLD_LINE.findall(line)
    return str(bold[-1]).strip("$") if bold else None


def _last_statement(text: str) -> str:
    """The last sentence, or the formulas of the last lines, joined by commas: ``x = 3, y = 2``."""
    text = text.strip()
    for mark, end in _MATHEMATICS[::3]:  # displayed formulas
        start = text.rfind(mark, 0, -len(end)) if text.endswith(end) else -1
        if start >= 0:
            return text[start + len(mark) : -len(end)].strip()
    formulas: dict[str, str] = {}
    for line in reversed(text[-_MAX_SENTENCE:].split("\n")):
        formula = _BULLET.sub("", line).strip("$ .,")
        name, sign, _ = map(str.strip, formula.partition("="))
        is_value = sign and not _WORD.search(line) and name not in formulas
        if not is_value or (formulas and len(name) > 1):
            break
        formulas[name] = formula
        if len(name) != 1:
            break
    if formulas:
        return ", ".join(reversed(formulas.values()))
    line = text.rpartition("\n")[2].removesuffix(".")
    return _SENTENCE_END.split(line)[-1].strip()


def candidates(text: str) -> tuple[list[str], str]:
    """Possible answers of a whole output, the likeliest first: the marked one, or else all
    of it, and of a sentence its last mathematics; and the last number of a sentence, or nothing."""
    text = _SPECIAL_TOKEN.sub("", text[-_MAX_CHARACTERS:])
    marked = _marked_answer(outside_thinking(text))
    text = text if marked is None else marked
    texts, sentence = [text.strip()], text[-_MAX_SENTENCE:]
    if has_box(text) or not _WORD.search(sentence):
        return texts, ""
    if mathematics := _last_mathematics(sentence):
        texts.extend([mathematics, mathematics.rpartition("=")[2].strip()])
    numbers = _NUMBER.findall(sentence)
    return texts, numbers[-1].replace("$", "") if numbers else ""


def _last_mathematics(text: str) -> str | None:
    """Text between the last pair of dollar signs or TeX's brackets."""
    text = text.replace("\\$", "")
    formulas = []
    for start, end in _MATHEMATICS:
        closing = text.rfind(end)
        opening = text.rfind(start, 0, closing) if closing > 0 else -1
        inner = text[opening + len(start) : closing].strip() if opening >= 0 else ""
        if inner and not _WORD.search(inner):
            formulas.append((closing, inner))
    return max(formulas, key=lambda pair: pair[0])[1] if formulas else None


def hashed_answer(text: str) -> str | None:
    """The answer after the last ``####`` that is GSM8K's mark; None without one. Where the line is
    a sentence, its last number is the answer.

    A Markdown heading is no mark: a line that begins with a word, with text below it.
    """
    parts = text.split("####")
    for number in range(len(parts) - 1, 0, -1):
        line, _, below = parts[number].lstrip(" \t").partition("\n")
        line = line.strip()
        if not line:
            continue
        words = [word for word in line.split() if len(word) > 1 and word.isalpha()]
        is_heading = words[:1] == line.split()[:1]
        if is_heading and (below.strip() or any(part.strip() for part in parts[number + 1 :])):
            continue
        numbers = _NUMBER.findall(line)
        return str(numbers[-1]).replace("$", "") if len(words) > 1 and numbers else line
    return None


def gold_answer(text: str) -> str:
    """The final answer in a gold text: what follows GSM8K's ``####``, without commas between groups
    of three digits, else MATH's last ``\\boxed{}``, else the whole text. Several boxes in the last
    statement are one answer, with commas between them. Empty if the mark or the box holds nothing.

    Example: ``"9 * 2 = 18\\n#### 1,018" -> "1018"``; ``"\\boxed{3} and \\boxed{-3}" -> "3, -3"``
    """
    if (hashed := hashed_answer(text)) is not None:
        return hashed.replace(",", "") if _THOUSANDS.fullmatch(hashed) else hashed
    if text.rstrip().endswith("####"):
        return ""
    if has_box(text):
        return ", ".join(last_boxes(text))
    return text.strip()


def last_boxes(text: str) -> list[str]:
    """Distinct contents of the boxes in the last statement, as in ``final_boxed``; none if the last
    box is not closed."""
    if last_boxed(text) is None:
        return []
    statement = _boxes_of_statement(text, boxes(text))[-_MAX_RIVALS - 1 :]
    return _distinct([text[box.content].strip() for box in statement])


def _closing(text: str, start: str, end: str) -> int:
    """The place of a mark that ends mathematics, and is no sign of a currency; -1 for none."""
    place = text.find(end, len(start))
    while place > 0 and end == "$" and text[place - 1] == "\\":
        place = text.find(end, place + 1)
    return place


def _phrase_answer(rest: str) -> str:
    """The answer after ``answer is``: LaTeX at its start, else all up to the sentence's end."""
    rest = _NOT.split(rest.strip().removeprefix("**").strip(), maxsplit=1)[0].rstrip(" ,")
    for start, end in _MATHEMATICS:
        closing = _closing(rest, start, end) if rest.startswith(start) else -1
        if closing > len(start) and not _PREDICATE.match(rest, closing + len(end)):
            return rest[len(start) : closing].strip()
    return _BOLD_END.sub("", _SENTENCE_END.split(rest, maxsplit=1)[0]).strip()
