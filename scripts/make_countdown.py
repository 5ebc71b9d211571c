"""Makes model/countdown and its data: a 0.8 M-parameter Qwen2 that tries expressions in order.

    python scripts/make_countdown.py       # eighteen minutes of one core

It overwrites model/countdown and data/countdown_*.jsonl. The base is taught to write an expression
of the three numbers, to work it out in two steps, to say ``no`` or ``yes``, and to answer with the
last one. Its expressions have one order, from x+y+z to x*y*z, but it leaves out some by chance, and
gives up by chance: to leave out none and to go on is left to reinforcement learning. The three
numbers of a test problem occur together in no other data.

Half of its questions have a target under 10, which no try makes: those teach to write
expressions, for their patience does not end. Drills follow the end of the others: last steps alone,
with verdicts. Without drills last steps are known by their three numbers.
"""

import functools
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from make_tiny import SPECIALS, TAGS, MuonAndAdamW, begin, encode, make_model, make_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

NUMBERS = range(1, 13)
WIDER = range(1, 18)
"""The numbers of a question, and of one that only the base is taught with."""
TARGETS = range(10, 100)
NUM_TEST_TRIPLES, NUM_TEST, NUM_TRAIN = 40, 256, 1000
STEPS = 3600
END = SPECIALS[-1]
NO, YES = " no\n", " yes\n"
"""Each is one token, as is each number, so that a try takes 12 or 13."""
PATTERNS = (
    "x+y +z", "x*y +z", "x*z +y", "y*z x+", "x*y -z", "x*z -y",
    "(x+y) *z", "(x+z) *y", "(y+z) x*", "(x-y) *z", "(x-z) *y", "(y-z) x*",
    "x+y -z", "x+z -y", "x*y *z",
)  # fmt: skip
"""The two steps of each try, in order; ``x`` is the largest number and ``z`` the smallest."""

APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

Numbers = tuple[int, ...]
Problem = tuple[Numbers, int]
"""Three numbers, the largest first, and what to make of them."""
Tries = dict[int, str]
"""An expression of each value, worked out: ``{20: '(6-2)*5=4*5=20'}``."""


def worked_out(step: str) -> int:
    """Of one step: ``worked_out('(6-2)') == 4``."""
    match = re.fullmatch(r"\(?(\d+)([-+*])(\d+)\)?", step)
    assert match is not None
    return APPLY[match[2]](int(match[1]), int(match[3]))


@functools.cache
def tries_of(numbers: Numbers) -> Tries:
    """The first expression of each value of 10 to 99, in the order of the tries."""
    tries: Tries = {}
    names = dict(zip(map(ord, "xyz"), map(str, numbers), strict=True))
    for pattern in PATTERNS:
        first, last = pattern.translate(names).split()
        inner = worked_out(first)
        text, working = (
            f"{last}{step}" if last[-1] in "+*" else f"{step}{last}" for step in (first, inner)
        )
        value = worked_out(working)
        if inner <= 99 and value in TARGETS:
            tries.setdefault(value, f"{text}={working}={value}")
    return tries


def question(numbers: Sequence[int], target: int) -> str:
    """``'Make 20 from 6, 5 and 2.'``."""
    return "Make {3} from {0}, {1} and {2}.".format(*numbers, target)


def trace(tries: Tries, target: int, rng: random.Random) -> list[int]:
    """Values to try: some of them, in order, until one is right or patience ends.

    The chances to leave one out and to go on are drawn for each trace. Of a target that no try may
    make (under 10) patience does not end.
    """
    keep, again = rng.uniform(0.3, 1.0), rng.uniform(0.2, 1.0)
    values = []
    for value in tries:
        if rng.random() < keep:
            values.append(value)
            if value == target or (target in TARGETS and rng.random() > again):
                break
    return values or [next(iter(tries))]


def completion(tries: Tries, values: list[int], target: int) -> str:
    """The tries of these values, each with its verdict; the last one is the answer."""
    thoughts = "".join(tries[v] + (YES if v == target else NO) for v in values)
    return f"<think>{thoughts}</think><answer>{tries[values[-1]].partition('=')[0]}</answer>"


def sums(problems: Sequence[Problem]) -> dict[int, list[str]]:
    """The last steps that make each target: ``{28: ['30-2=28', ...]}``."""
    steps_by_target: dict[int, list[str]] = {}
    for numbers, value in problems:
        steps_by_target.setdefault(value, []).append(tries_of(numbers)[value].partition("=")[2])
    return steps_by_target


def drill(sums: dict[int, list[str]], target: int, rng: random.Random) -> str:
    """Twelve last steps with their verdicts, a good third of them right."""
    values = [rng.choice((target, *rng.sample(TARGETS, 2))) for _ in range(12)]
    return "".join(rng.choice(sums[v]) + (YES if v == target else NO) for v in values)


def texts(
    problems: Sequence[Problem], batch: int, rng: random.Random
) -> Iterator[list[tuple[str, str]]]:
    """Batches of questions with completions; drills follow every second one."""
    steps_by_target = sums(problems)
    while True:
        rows = []
        for numbers, target in rng.choices(problems, k=batch):
            tries, goal, suffix = tries_of(numbers), target, ""
            if rng.random() < 0.5:
                goal = rng.randrange(1, 10)
            else:
                suffix = END + drill(steps_by_target, target, rng)
            answer = completion(tries, trace(tries, goal, rng), goal)
            rows.append((question(numbers, goal), answer + suffix))
        yield rows


def write_rows(path: Path, problems: Sequence[Problem]) -> None:
    """One JSON object a line: question, numbers, target."""
    rows = (
        {"question": question(numbers, target), "numbers": numbers, "target": target}
        for numbers, target in problems
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pretrain(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterator[list[tuple[str, str]]],
) -> None:
    """The rates decay over the last half. Only results and verdicts of drills are learned."""
    no_id, yes_id, equals_id, eos_id = tokenizer.convert_tokens_to_ids([NO, YES, "=", END])
    optimizer = MuonAndAdamW(model)
    for step, batch in enumerate(itertools.islice(batches, STEPS)):
        ids_BT, labels_BT = encode(tokenizer, batch)
        told_BT = labels_BT[:, 1:]
        is_drill_BT = (ids_BT[:, :-1] == eos_id).cumsum(1) > 1  # the prompt has one
        is_sum_BT = (ids_BT[:, :-1] == equals_id) | (told_BT == yes_id) | (told_BT == no_id)
        told_BT[is_drill_BT & ~is_sum_BT] = -100
        logits_NV = model(input_ids=ids_BT).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits_NV, told_BT.flatten())
        optimizer.step(loss, min((step + 1) / 30, 1.0, max(0.05, 2 * (1 - step / STEPS))))
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Make the data, the tokenizer and the model."""
    args, folder = begin(__doc__, "countdown", batch=16)
    rng = random.Random(args.seed)
    triples = list(itertools.combinations(reversed(NUMBERS), 3))
    rng.shuffle(triples)
    wider = set(itertools.combinations(reversed(WIDER), 3)) - set(triples)
    test, train, base = (
        [(numbers, value) for numbers in part for value in tries_of(numbers)]
        for part in (
            triples[:NUM_TEST_TRIPLES],
            triples[NUM_TEST_TRIPLES:],
            [*triples[NUM_TEST_TRIPLES:], *sorted(wider)],
        )
    )
    write_rows(args.out / "data" / "countdown_train.jsonl", rng.sample(train, NUM_TRAIN))
    write_rows(args.out / "data" / "countdown_test.jsonl", rng.sample(test, NUM_TEST))

    batches = texts(base, args.batch, rng)
    corpus = [text for batch in itertools.islice(batches, 8) for pair in batch for text in pair]
    numbers = [str(number) for number in range(10, 100)]
    corpus += ["system\nuser\nassistant\n", *numbers] * 9  # each a token
    # Added tokens, too: Transformers splits all others into digits in a model of Qwen2's type.
    merged = (*TAGS, NO, YES, " from ", ", ", " and ", *numbers)
    tokenizer = make_tokenizer(corpus, merged, vocab_size=420, digits_one_by_one=False)
    model = make_model(tokenizer, initializer_range=0.08)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    pretrain(model, tokenizer, batches)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
