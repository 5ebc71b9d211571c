"""Formulas that a question states, with all their parts, in normal form.

An answer that is written as the question writes it is copied, unless the gold answer is written so
too. Formulas are found between TeX's marks of mathematics, and in plain text between words.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from reason_llm.score.math.answer_form import FREE, form_of
from reason_llm.score.math.answer_tree import (
    FUNCTIONS,
    Tree,
    UnreadableError,
    read,
    subtrees,
    variables,
)
from reason_llm.score.math.latex_tokens import Token, tokenize
from reason_llm.score.math.numeric import Value, direction_of, is_near, value_of
from reason_llm.score.math.units import canonical, word_set

MAX_CHARACTERS = 6000
_MAX_PROMPT = 200_000
_MAX_FORMULAS = 60
_MAX_PARTS = 300
_MAX_TOKENS = 400
"""Longest formula."""
_USER_TURN = re.compile(
    r"<\|im_start\|>user|<\|start_header_id\|>user<\|end_header_id\|>|<\|turn>user|<start_of_turn>user"
    r"|<\|start\|>user(?:<\|message\|>)?+|<\|user\|>|<｜User｜>|\[INST\]|(?:\A|\n)(?:User|Human):"
)
"""The start of a user's message, as chat templates write it."""
_TURN_END = re.compile(r"<\|[a-z_]|<｜|<end_of_turn>|<turn\||\[/INST\]|\n(?:Assistant|AI|Model):")
_LABEL = re.compile(
    r"(?:\A|\n)[ \t#*]*+(Problem|Question|Q|Exercise|Task|Input)(?:[ ]?\d++)?+[ *]*+:[ *]*+",
    re.IGNORECASE,
)
_ANSWER_LABEL = re.compile(
    r"\n[ \t#*]*+(?:Solution|Answer|A|Output|Response)[ *]*+:", re.IGNORECASE
)
_HAS_WORDS = re.compile(r"[^\W\d_]{2}|\d")
_DIGIT_OR_SIGN = re.compile(r"[0-9+=^\\]")
_OPENING, _CLOSING = frozenset(["(", "{", "[", "\\{"]), frozenset([")", "}", "]", "\\}"])
_MARKS = re.compile(r"\$\$?+|\\[\[\]()]")
_WORD = re.compile(r"(?<![^\W\d_]['’])[^\W\d_]++(?:/[^\W\d_]++)?+")
_DOLLAR = re.compile(r"\\\$|\$\d[\d,]*+(?:\.\d++)?+(?![\d$^_=*+/\\])")
"""The sign of a currency, and no mark of mathematics."""
_SIGNS = {"€": "eur", "£": "gbp", "¥": "jpy", "₹": "inr", "¢": "cent", "°": "deg"}
_COINS = word_set("dime dimes nickel nickels")
_LETTER = re.compile(r"(?<![^\W\d_])(?<!\\)[^\W\d_](?![^\W\d_]|['’][a-z])")
_SPLITTING = word_set(", ; . ? :")
_ROWS = re.compile(
    r"\\(?:begin|end) *+\{(?:align|aligned|gather|gathered|equation|split|cases)\*?+\}"
)
"""LaTeX environments around rows of formulas."""
_SENTENCE_END = re.compile(r"[.!?:]\s|\n")
AUXILIARIES = word_set("is are do does did can could will would was were has have had should must")
_ASKS_WHETHER = ("true", "whether", "yes or no", "determine if", "decide if", "check if")
_ALIKE = FREE | {"a product of powers"}
_WRITTEN = word_set(
    """
    num rep mixed pct add mul neg frac pow root call tuple list set interval matrix ratio cup
    cap setminus rel based
    """
)


@dataclass(frozen=True, slots=True)
class QuestionPart:
    """A formula of the question, or a part of one."""

    tree: Tree
    value: Value | None
    """For a relation: the value that it shares with its multiples."""
    is_whole: bool


@dataclass(frozen=True, slots=True)
class QuestionFormulas:
    """The formulas that a question states."""

    parts: tuple[QuestionPart, ...]
    letters: frozenset[str] = frozenset()
    """The single letters in it."""

    def similar(self, tree: Tree) -> Iterator[QuestionPart]:
        """The parts that may be the same as an expression, or a relation, in some form."""
        value, is_relation = _value(tree), tree[0] == "rel"
        for part in self.parts:
            if (part.tree[0] == "rel") == is_relation and is_near(part.value, value):
                yield part

    def has_variable(self, name: str) -> bool:
        """Whether a letter is a whole formula."""
        return any(part.tree in (["var", name], ["const", name]) for part in self.parts)

    def states(self, tree: Tree) -> bool:
        """Whether it states an expression, or a relation, in this form."""
        form = form_of(tree)
        return any(form_of(part.tree) == form for part in self.similar(tree))

    def asks_for(self, tree: Tree) -> bool:
        """Whether an expression is a whole formula of the question."""
        form = form_of(tree)
        return any(
            part.is_whole and form_of(part.tree).is_same(form) for part in self.similar(tree)
        )

    def asks_for_form(self, gold: Tree, answer: Tree) -> bool:
        """Whether it states the gold answer in another form, so that it asks for the form, and the
        answer does not have that form. The answer's numbers may be written in a third way."""
        wanted, form = form_of(gold), form_of(answer)
        others = [form_of(part.tree) for part in self.similar(gold)]
        others = [other for other in others if not other.is_same(wanted)]
        is_alike = form.value == wanted.value and not (form.steps ^ wanted.steps) - _ALIKE
        if not variables(gold) and not any(other.is_same(form) for other in others):  # 3(√3 - 1)
            is_alike |= (form.steps, form.operations) == (wanted.steps, wanted.operations)
        added = form.steps - wanted.steps
        return any(not is_alike or other.steps & added for other in others)


@functools.lru_cache(maxsize=1024)
def asks_yes_or_no(question: str) -> bool:
    """Whether yes and no are answers: a sentence, or its last clause, begins with an auxiliary
    verb, or the question says ``true`` or ``whether``."""
    text = question.lower()
    clauses = [clause.split() for part in _SENTENCE_END.split(text) for clause in part.split(", ")]
    return any(words and words[0] in AUXILIARIES for words in clauses) or any(
        phrase in text for phrase in _ASKS_WHETHER
    )


_ALONE = re.compile(r" ?\$\^(?:([23])|\{([23])\})\$")
"""The exponent of a unit as a separate formula: ``cm$^2$``."""


@functools.lru_cache(maxsize=1024)
def last_question(prompt: str) -> str:
    """The last question of a prompt: the user's last message of a rendered chat, or the text behind
    the last of equal labels, ``Problem:``; at most ``MAX_CHARACTERS`` characters."""
    prompt = prompt[-_MAX_PROMPT:]
    turns = list(_USER_TURN.finditer(prompt))
    if turns:
        prompt = _TURN_END.split(prompt[turns[-1].end() :], maxsplit=1)[0]
    labels = list(_LABEL.finditer(prompt))
    if labels and not _HAS_WORDS.search(prompt, labels[-1].end()):
        labels.pop()
    if labels and sum(label[1].lower() == labels[-1][1].lower() for label in labels) > 1:
        prompt = _ANSWER_LABEL.split(prompt[labels[-1].end() :], maxsplit=1)[0]
    return _ALONE.sub(lambda match: f"^{match[1] or match[2]}", prompt[-MAX_CHARACTERS:])


@functools.lru_cache(maxsize=1024)
def read_question(text: str) -> QuestionFormulas:
    """The formulas of a question's last ``MAX_CHARACTERS`` characters, with their parts."""
    parts = (
        QuestionPart(part, _value(part), part is tree)
        for tree in formulas(text[-MAX_CHARACTERS:])
        for part in subtrees(tree)
        if part is tree or part[0] in _WRITTEN
    )
    letters = frozenset(_LETTER.findall(text[-MAX_CHARACTERS:]))
    return QuestionFormulas(tuple(islice(parts, _MAX_PARTS)), letters)


@functools.lru_cache(maxsize=1024)
def words_of(text: str) -> frozenset[str]:
    """The words of a question in one spelling each, ``km/h`` also in parts, ``km per hour`` also as
    ``km/h``, and its currencies. Not ``in``, which is rarely the unit; ``inches`` is."""
    matches = _WORD.findall(text[-MAX_CHARACTERS:].lower())
    words = {part for word in matches for part in (word, *word.split("/"))} - {"in"}
    threes = zip(matches, matches[1:], matches[2:], strict=False)
    words |= {f"{of}/{unit}" for of, per, unit in threes if per == "per"}
    spelled = (canonical("/".join(map(canonical, word.split("/")))) for word in words)
    signs = {unit for sign, unit in _SIGNS.items() if sign in text}
    if _DOLLAR.search(text) or not words.isdisjoint(_COINS):
        signs.add("usd")
    return frozenset([*words, *spelled, *signs])


def _value(tree: Tree) -> Value | None:
    if tree[0] == "rel":
        return direction_of(tree) if len(tree) == 4 else None
    return value_of(tree)


def formulas(text: str) -> Iterator[Tree]:
    """The formulas of a text that can be read, its last ones first."""
    num_found = 0
    for piece, is_mathematics in reversed(list(_pieces(text))):
        for row in _ROWS.sub(" ", piece).split("\\\\") if _ROWS.search(piece) else [piece]:
            if not is_mathematics and not _DIGIT_OR_SIGN.search(row):
                continue
            tokens = [token for token in tokenize(row) if token.kind != "currency"]
            for run in _runs(tokens, is_mathematics):
                tree = _read(run)
                if tree is not None:
                    yield tree
                    num_found += 1
                if num_found >= _MAX_FORMULAS:
                    return


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """The text between marks of mathematics, and whether it is mathematics."""
    start, is_mathematics = 0, False
    for mark in _MARKS.finditer(text):
        if text[max(0, mark.start() - 1) : mark.start()] == "\\":
            continue  # \$, or the end of a row and its spacing
        yield text[start : mark.start()], is_mathematics
        start = mark.end()
        is_mathematics = mark[0] in ("\\[", "\\(") or (mark[0][0] == "$" and not is_mathematics)
    yield text[start:], is_mathematics


def _runs(tokens: list[Token], is_mathematics: bool) -> Iterator[list[Token]]:
    """A formula, and its parts between words and outer commas; of plain text only the parts."""
    runs: list[list[Token]] = [[]]
    depth = 0
    for index, token in enumerate(tokens):
        name = str(token)
        depth += (name in _OPENING) - (name in _CLOSING)
        is_word = token.kind == "text" or (
            not is_mathematics and token.kind == "letters" and _is_word(tokens, index)
        )
        if is_word or (name in _SPLITTING and depth <= 0):
            runs.append([])
            depth = 0
        else:
            runs[-1].append(token)
    if is_mathematics and len(runs) > 1:
        yield tokens
    yield from filter(None, runs)


def _is_word(tokens: list[Token], index: int) -> bool:
    """Whether letters of plain text are a word, and no variables."""
    token = tokens[index]
    if token.text in FUNCTIONS or token.text in ("pi", "sqrt"):
        return False
    stands_alone = index + 1 >= len(tokens) or tokens[index + 1].is_spaced
    if len(token.text) > 1:
        return len(token.text) > 3 or stands_alone
    before = str(tokens[index - 1]) if index else ""
    after = str(tokens[index + 1]) if index + 1 < len(tokens) else ""
    return token.text in "aAI" and not ({before, after} & set("+-*/^=<>()"))


def _read(tokens: list[Token]) -> Tree | None:
    end = len(tokens)
    while end and str(tokens[end - 1]) in (".", ",", ";", ":", "?"):
        end -= 1
    tokens = tokens[:end]
    if not any(str(token) == "\\begin" for token in tokens):  # rows whose environment is gone
        tokens = [token for token in tokens if str(token) != "&"]
    if not tokens or len(tokens) > _MAX_TOKENS:
        return None
    try:
        return read(list(tokens), letters_are_units=False).tree
    except UnreadableError:
        return None
