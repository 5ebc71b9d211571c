"""Makes the rows that the stages sft and reward learn from: demonstrations and preferences about
the additions of data/arithmetic_train.jsonl.

    python scripts/make_arithmetic.py      # a second; git diff --stat tells that nothing changed

It overwrites these files in data/:

arithmetic_demonstrations.jsonl: sums in the form that model/tiny knows.
arithmetic_mixed.jsonl: demonstrations of which every third one leaves out the working.
arithmetic_preferences.jsonl, arithmetic_preferences_test.jsonl: the chosen side is a sum in that
form; the rejected one breaks the form, or gives an answer that its own working contradicts.

No question stands in two of the files, and none is of data/arithmetic_test.jsonl.
"""

import json
import random
from pathlib import Path
from typing import Any

from make_tiny import Pair, completion, question, split_pairs

ROOT = Path(__file__).resolve().parent.parent
NUM_DEMONSTRATIONS, NUM_PREFERENCES, NUM_HELD_OUT, NUM_MIXED = 600, 800, 160, 600


def contradicted(text: str, rng: random.Random) -> str:
    """``<think>…</think><answer>82</answer> -> <think>…</think><answer>72</answer>``: one digit of
    the answer is another."""
    working, _, answer = text.partition("<answer>")
    digits = list(answer.removesuffix("</answer>"))
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([each for each in "0123456789" if each != digits[place]])
    return f"{working}<answer>{''.join(digits)}</answer>"


def formless(text: str, rng: random.Random) -> str:
    """The answer alone, the working alone, or tags that do not close."""
    working, _, answer = text.partition("<answer>")
    answer = answer.removesuffix("</answer>")
    return rng.choice(
        [
            answer,
            working,
            f"<answer>{answer}</answer>",
            text.removesuffix("</answer>"),
            text.replace("</think>", ""),
        ]
    )


def demonstration(pair: Pair) -> dict[str, Any]:
    """``{"prompt", "completion"}``"""
    return {"prompt": question(pair), "completion": completion(pair)}


def mixed(pair: Pair, number: int) -> dict[str, Any]:
    """``{"prompt", "completion"}``, every third one with the answer alone."""
    bare = {"prompt": question(pair), "completion": f"<answer>{sum(pair)}</answer>"}
    return bare if number % 3 == 2 else demonstration(pair)


def preference(pair: Pair, number: int, rng: random.Random) -> dict[str, Any]:
    """``{"prompt", "chosen", "rejected"}``"""
    chosen = completion(pair)
    spoil = formless if number % 2 else contradicted
    return {"prompt": question(pair), "chosen": chosen, "rejected": spoil(chosen, rng)}


def write(name: str, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (ROOT / "data" / f"arithmetic_{name}.jsonl").write_text(text, encoding="utf-8")


def main() -> None:
    """Write the files."""
    _, train, _ = split_pairs(seed=0)
    first, second = NUM_DEMONSTRATIONS, NUM_DEMONSTRATIONS + NUM_PREFERENCES
    rng = random.Random(0)
    preferences = [
        preference(pair, number, rng)
        for number, pair in enumerate(train[first : second + NUM_HELD_OUT])
    ]
    write("demonstrations", [demonstration(pair) for pair in train[:first]])
    write("preferences", preferences[:NUM_PREFERENCES])
    write("preferences_test", preferences[NUM_PREFERENCES:])
    third = second + NUM_HELD_OUT
    write("mixed", [mixed(pair, n) for n, pair in enumerate(train[third : third + NUM_MIXED])])


if __name__ == "__main__":
    main()
