"""A tool for the model: it runs Python in the product's sandbox, without network or files.

    sample:
      environment: examples/tools.py:Python

Names of earlier calls are there: each call runs the rollout's earlier programs again before its
own, silently, so its 6 seconds of CPU time are for all of them.
"""

import json
from functools import cache
from typing import Any

from reason_llm.score.code import Sandbox

MOST_CHARACTERS = 4000
SESSION = """
import ast, contextlib, io, json

def run(source, names):
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "program", "exec"), names)
    value = last and eval(compile(ast.Expression(last.value), "program", "eval"), names)
    if value is not None:
        print(repr(value))

*earlier, newest = json.load(open("programs.json"))
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


class Python:
    """What a rollout has run so far."""

    def reset(self, **row: Any) -> None:
        """Begin anew."""
        self.programs: list[str] = []

    def python(self, code: str) -> str:
        """
        Run a Python program, and return what it prints and the value of its last line. Names of
        earlier calls are there.

        Args:
            code: The program.
        """
        self.programs.append(code)
        files = {"programs.json": json.dumps(self.programs)}
        ended = sandbox().run(SESSION, files=files)
        said = ended.stdout
        if ended.limit is not None:
            said += f"stopped: too much {ended.limit}"
        elif ended.status:
            said += ended.stderr.strip().rpartition("\n")[2]
        return said[:MOST_CHARACTERS] or "(nothing was printed)"
