"""Makes model/countdown and its data: a 0.8 M-parameter Qwen2 that tries random expressions.

    python scripts/make_countdown.py       # seven minutes of one core

It overwrites model/countdown and data/countdown_*.jsonl. The base is taught to write an expression
of the three numbers, to work it out in two steps, to say ``no`` or ``yes``, and to answer with the
last one. Which expressions it tries is chance, and so is when it gives up: that is left to
reinforcement learning. The three numbers of a test problem occur together in no other data.

First traces that go on after the right try, whose ``yes`` counts eight times a ``no``, until the
verdict is learned (it was not where nine of ten are ``no``); then traces as they are to be. By then
the last steps are known by their triples: of those of unseen ones 37 in 100 are wrong. So half of a
second pass is drills: last steps alone, with verdicts. It leaves 8 in 100.
"""

import argparse
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from make_tiny import ROOT, TAGS, encode, make_model, make_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

NUMBERS = range(1, 13)
TARGETS = range(10, 100)
NUM_TEST_TRIPLES, NUM_TEST, NUM_TRAIN = 40, 256, 1000
MAX_TRIES = 11
NO, YES = " no\n", " yes\n"
"""Each is one token, as is each number, so that a try takes 13."""
APPLY = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

Numbers = tuple[int, ...]
Problem = tuple[Numbers, int]
"""Three numbers in increasing order, and what to make of them."""
Tries = dict[int, str]
"""An expression of each value, worked out: ``{20: '5*(6-2)=5*4=20'}``."""
Sums = dict[int, list[str]]
"""Of each value: ``{28: ['30-2=28', ...]}``."""


def tries_of(numbers: Numbers) -> Tries:
    """The shortest expression of each value of 1 to 99, with no negative number on the way."""
    found: Tries = {}
    for (a, b, c), one, two in itertools.product(itertools.permutations(numbers), APPLY, APPLY):
        left, right = APPLY[one](a, b), APPLY[two](b, c)
        is_sum_times = two == "*" != one
        first = f"({a}{one}{b})" if is_sum_times else f"{a}{one}{b}"
        last = f"{b}{two}{c}" if is_sum_times else f"({b}{two}{c})"
        for inner, value, text, working in (
            (left, APPLY[two](left, c), f"{first}{two}{c}", f"{left}{two}{c}"),
            (right, APPLY[one](a, right), f"{a}{one}{last}", f"{a}{one}{right}"),
        ):
            told = f"{text}={working}={value}"
            is_shorter = value not in found or len(told) < len(found[value])
            if 0 <= inner <= 99 and 1 <= value <= 99 and is_shorter:
                found[value] = told
    return found


def question(numbers: Sequence[int], target: int) -> str:
    """``'Make 20 from 2, 6 and 5.'``."""
    return "Make {3} from {0}, {1} and {2}.".format(*numbers, target)


def first_stage(tries: Tries, target: int, rng: random.Random) -> list[int]:
    """Values to try: 8, one of them the target."""
    others = sorted(tries.keys() - {target})
    values = [target, *rng.sample(others, min(7, len(others)))]
    return rng.sample(values, len(values))


def second_stage(tries: Tries, target: int, rng: random.Random) -> list[int]:
    """Values to try: random ones, none twice, until one is right or patience ends.

    The chance to try again is drawn for each trace, and in 3 of 10 the last try is right by design.
    """
    again, patience = rng.uniform(0.3, 1.0), 1
    while patience < min(MAX_TRIES, len(tries)) and rng.random() < again:
        patience += 1
    values = rng.sample(sorted(tries), patience)
    if rng.random() < 0.3 and target not in values:
        values[-1] = target
    return values[: values.index(target) + 1] if target in values else values


Stages = Sequence[tuple[Callable[[Tries, int, random.Random], list[int]], int, float, float]]
PASSES: Sequence[Stages] = (
    ((first_stage, 320, 8.0, 0.0), (second_stage, 256, 1.0, 0.0)),
    ((second_stage, 400, 1.0, 0.5),),
)
"""Values to try, number of steps, weight of ``yes`` in the loss, fraction of drills."""


def sums() -> Sums:
    """The last step of every try, whatever its three numbers."""
    found: Sums = {}
    inner = {
        apply(a, b) for a, b in itertools.product(NUMBERS, NUMBERS) for apply in APPLY.values()
    }
    for a, b, sign in itertools.product(sorted(inner), NUMBERS, APPLY):
        for left, right in {(a, b), (b, a)}:
            value = APPLY[sign](left, right)
            if 0 <= a <= 99 and 1 <= value <= 99:
                found.setdefault(value, []).append(f"{left}{sign}{right}={value}")
    return found


def drill(sums: Sums, target: int, rng: random.Random) -> str:
    """Twelve last steps with their verdicts, a good third of them right."""
    values = [rng.choice((target, *rng.sample(sorted(sums), 2))) for _ in range(12)]
    return "".join(rng.choice(sums[v]) + (YES if v == target else NO) for v in values)


def completion(tries: Tries, values: list[int], target: int) -> str:
    """The tries of these values, each with its verdict; the last one is the answer."""
    thoughts = "".join(tries[v] + (YES if v == target else NO) for v in values)
    return f"<think>{thoughts}</think><answer>{tries[values[-1]].partition('=')[0]}</answer>"


def texts(
    tries: dict[Numbers, Tries],
    problems: list[Problem],
    stages: Stages,
    batch: int,
    rng: random.Random,
) -> Iterator[list[tuple[str, str]]]:
    """Batches of questions with completions, stage by stage; those of a batch are of like length,
    so that little is padding."""
    known = sums()
    for stage, steps, _, part in stages:
        for _ in range(0, steps, 16):
            pool = []
            for numbers, target in rng.choices(problems, k=16 * batch):
                asked = question(rng.sample(numbers, 3), target)
                if part and rng.random() < part:
                    pool.append((asked, drill(known, target, rng)))
                else:
                    values = stage(tries[numbers], target, rng)
                    pool.append((asked, completion(tries[numbers], values, target)))
            pool.sort(key=lambda text: len(text[1]))
            batches = [pool[i : i + batch] for i in range(0, len(pool), batch)]
            yield from rng.sample(batches, 16)


def write_rows(path: Path, problems: list[Problem], rng: random.Random) -> None:
    """One JSON object a line: question, numbers, target."""
    rows = []
    for numbers, target in problems:
        mixed = rng.sample(numbers, 3)
        row = {"question": question(mixed, target), "numbers": mixed, "target": target}
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


def pretrain(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batches: Iterator[list[tuple[str, str]]],
    yes_weights: Sequence[float],
) -> None:
    """Muon for the matrices, AdamW for the rest; the rates decay over the last half. Of drills only
    results and verdicts are learned."""
    no_id, yes_id, equals_id, think_id = tokenizer.convert_tokens_to_ids([NO, YES, "=", TAGS[0]])
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    optimizers = {
        1e-2: torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        3e-3: torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.95)),
    }
    weights_V = torch.ones(model.config.vocab_size)
    for step, batch in enumerate(batches):
        ids_BT, labels_BT = encode(tokenizer, batch)
        weights_V[yes_id], told_BT = yes_weights[step], labels_BT[:, 1:]
        is_drill_B1 = (ids_BT != think_id).all(1, keepdim=True)
        is_sum_BT = (ids_BT[:, :-1] == equals_id) | (told_BT == yes_id) | (told_BT == no_id)
        told_BT[is_drill_B1 & ~is_sum_BT] = -100
        logits_NV = model(input_ids=ids_BT).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits_NV, told_BT.flatten(), weights_V)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = min((step + 1) / 30, 1.0, max(0.05, 2 * (1 - step / len(yes_weights))))
        for rate, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Make the data, the tokenizer and the model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--out", type=Path, default=ROOT)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tries: dict[Numbers, Tries] = {n: tries_of(n) for n in itertools.combinations(NUMBERS, 3)}
    triples = rng.sample(sorted(tries), len(tries))
    test, train = (
        [(numbers, value) for numbers in part for value in tries[numbers] if value in TARGETS]
        for part in (triples[:NUM_TEST_TRIPLES], triples[NUM_TEST_TRIPLES:])
    )
    folder = args.out / "model" / "countdown"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (args.out / "data").mkdir(exist_ok=True)
    write_rows(args.out / "data" / "countdown_train.jsonl", rng.sample(train, NUM_TRAIN), rng)
    write_rows(args.out / "data" / "countdown_test.jsonl", rng.sample(test, NUM_TEST), rng)

    drawn = texts(tries, train, PASSES[0], args.batch, rng)
    corpus = [text for batch in itertools.islice(drawn, 8) for pair in batch for text in pair]
    numbers = [str(number) for number in range(10, 100)]
    corpus += ["system\nuser\nassistant\n", *numbers] * 9  # each a token
    # Added tokens, too: Transformers splits all others into digits in a model of Qwen2's type.
    whole = (*TAGS, NO, YES, *numbers)
    tokenizer = make_tokenizer(corpus, whole, vocab_size=420, digits_one_by_one=False)
    model = make_model(tokenizer, initializer_range=0.08)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    for stages in PASSES:
        weights = [weight for _, steps, weight, _ in stages for _ in range(steps)]
        pretrain(model, tokenizer, texts(tries, train, stages, args.batch, rng), weights)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
