"""Tools for the model: Python in the product's sandbox, a calculator, a search in one's own file.

    sample:
      environment: examples/tools.py:Python

Several together, or a search in another file, are a class of one's own:

    from examples.tools import Calculator, Search

    class Mine(Calculator, Search):
        file = "my_texts.jsonl"

To try one without a GPU: examples/play.py.
"""

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from reason_llm.score.code import Sandbox

MOST_CHARACTERS = 4000
SESSION = """
import ast, contextlib, io, json, sys

def run(source, names):
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "program", "exec"), names)
    value = last and eval(compile(ast.Expression(last.value), "program", "eval"), names)
    if value is not None:
        print(repr(value))

*earlier, newest = json.load(sys.stdin)
names = {"__name__": "__main__"}
for program in earlier:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        run(program, names)
run(newest, names)
"""


@cache
def sandbox() -> Sandbox:
    """One for all rollouts."""
    return Sandbox("auto")


class Tools:
    """What the tools below begin with, so that a class may have several of them."""

    def reset(self, **row: Any) -> None:
        """Begin anew."""
        self.programs: list[str] = []


class Python(Tools):
    """A session: names of earlier calls are there. Each call runs the rollout's earlier programs
    again before its own, silently, so its 6 seconds of CPU time are for all of them. A program that
    was stopped at a limit is not run again."""

    def python(self, code: str) -> str:
        """
        Run a Python program, and return what it prints and the value of its last line. Names of
        earlier calls are there.

        Args:
            code: The program.
        """
        programs = [*self.programs, code]
        ended = sandbox().run(SESSION, stdin=json.dumps(programs))
        if ended.limit is None:
            self.programs = programs
        said = ended.stdout
        if ended.limit is not None:
            said += f"stopped: too much {ended.limit}"
        elif ended.status:
            said += ended.stderr.strip().rpartition("\n")[2]
        return said[:MOST_CHARACTERS] or "(nothing was printed)"


OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,  # a whole power could be a number of any length
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def value_of(node: ast.AST) -> float:
    """Value of an expression of numbers.

    Raises:
        ValueError: it has something else. ArithmeticError: it has no value.
    """
    match node:
        case ast.Constant(int(value) | float(value)) if abs(value) < 1e100:
            return value
        case ast.UnaryOp(sign, inner) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value_of(inner))
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value_of(left), value_of(right))
    raise ValueError("write numbers, + - * / // % ** and parentheses")


class Calculator(Tools):
    """Arithmetic, for models that write no programs."""

    def calculate(self, expression: str) -> str:
        """
        Compute an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses.
        """
        if len(expression) > 1000:
            raise ValueError("the expression has more than 1,000 characters")
        return f"{value_of(ast.parse(expression.strip(), mode='eval').body):.12g}"


Entry = tuple[str, Counter[str]]


def words_of(text: str) -> list[str]:
    """Its words in lower case."""
    return re.findall(r"\w+", text.lower())


@cache
def index(file: str) -> tuple[list[Entry], Counter[str], float]:
    """The texts of a JSONL file with their words; in how many texts each word is; mean length."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    entries = [(text, Counter(words_of(text))) for text in texts]
    found_in = Counter(word for _, words in entries for word in words)
    return entries, found_in, sum(words.total() for _, words in entries) / len(entries)


class Search(Tools):
    """The texts of a file that fit a query best, by BM25.

    Source: Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009, eq. 3.15, with
    k1 = 1.2 and b = 0.75, and the idf of Lucene, which is never negative.
    """

    file = "documents.jsonl"
    """With a column ``text``."""
    most = 3

    def search(self, query: str) -> str:
        """
        Find texts about something.

        Args:
            query: A few words.
        """
        entries, found_in, mean_length = index(self.file)
        idf = {
            word: math.log(1 + (len(entries) - found_in[word] + 0.5) / (found_in[word] + 0.5))
            for word in set(words_of(query))
            if word in found_in
        }

        def score(entry: Entry) -> float:
            words = entry[1]
            norm = 1.2 * (0.25 + 0.75 * words.total() / mean_length)
            return sum(idf[word] * words[word] * 2.2 / (words[word] + norm) for word in idf)

        best = sorted(filter(score, entries), key=score, reverse=True)[: self.most]
        return "\n\n".join(text[:MOST_CHARACTERS] for text, _ in best) or "nothing was found"
