"""Makes model/tiny and its data: a 0.8 M-parameter Qwen2 that adds two numbers, right about a third
of the time.

    python scripts/make_tiny.py            # a minute and a half on one core
    git diff --stat                        # the same files again, on the same kind of machine

It overwrites model/tiny and data/arithmetic_*.jsonl. The recipe, whole: draw every pair (a, b) of
0..99 in a seeded order, hold some out, train a byte-level BPE on the template's own text, then
plain next-token training on the answers, stopped early: the format is known and the sums are not.
What it leaves to learn is what the quick start's reinforcement learning learns.

It needs only torch, transformers and tokenizers. make_countdown.py and make_wordle.py take its
tokenizer and model.
"""

import argparse
import itertools
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent
NUM_TRAIN, NUM_TEST = 3000, 256
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Pair = tuple[int, int]


def question(pair: Pair) -> str:
    """``(37, 45) -> 'What is 37 + 45?'``"""
    return f"What is {pair[0]} + {pair[1]}?"


def completion(pair: Pair) -> str:
    """Ones, then tens with the carry: ``<think>7+5=12 3+4+1=8</think><answer>82</answer>``."""
    (a_tens, a_ones), (b_tens, b_ones) = (divmod(number, 10) for number in pair)
    ones = a_ones + b_ones
    carry = ones // 10
    thoughts = f"{a_ones}+{b_ones}={ones} {a_tens}+{b_tens}+{carry}={a_tens + b_tens + carry}"
    return f"<think>{thoughts}</think><answer>{sum(pair)}</answer>"


def split_pairs(seed: int) -> tuple[list[Pair], list[Pair], list[Pair]]:
    """Disjoint (pretraining, train, test) pairs, so that the base has seen neither of the last."""
    pairs = list(itertools.product(range(100), range(100)))
    random.Random(seed).shuffle(pairs)
    test, train = pairs[:NUM_TEST], pairs[NUM_TEST : NUM_TEST + NUM_TRAIN]
    return pairs[NUM_TEST + NUM_TRAIN :], train, test


def write_rows(path: Path, pairs: list[Pair]) -> None:
    """One JSON object a line: question, answer."""
    rows = (json.dumps({"question": question(p), "answer": str(sum(p))}) for p in pairs)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def make_tokenizer(
    corpus: list[str],
    tags: Sequence[str] = TAGS,
    template: str = CHAT_TEMPLATE,
    roles: Sequence[str] = (),
    vocab_size: int = 320,
    digits_one_by_one: bool = True,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE that can spell any text, with the chat's tokens, among them ``roles``, and the
    tags as single tokens.

    Args:
        digits_one_by_one: False: a number that is frequent in the corpus is one token.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=digits_one_by_one),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[*SPECIALS, *roles],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    # After training: a tag is one token however rare it is in the corpus.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = template
    return wrapped


def make_model(tokenizer: PreTrainedTokenizerFast, **sizes: float) -> Qwen2ForCausalLM:
    """4 layers of width 128, tied embeddings, float32, where ``sizes`` say nothing else."""
    defaults: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        use_cache=True,
        **defaults | sizes,
    )
    return Qwen2ForCausalLM(config)


def encode(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[tuple[str, str]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels (N, T) of questions with their answers; prompts and padding are -100 in
    the labels."""
    rows = []
    for question_text, answer_text in texts:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question_text}],
            add_generation_prompt=True,
            tokenize=False,
        )
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = tokenizer.encode(answer_text, add_special_tokens=False)
        answer_ids.append(tokenizer.eos_token_id)
        rows.append((prompt_ids, answer_ids))
    longest = max(len(p) + len(a) for p, a in rows)
    ids_NT = torch.full((len(rows), longest), tokenizer.pad_token_id)
    labels_NT = torch.full((len(rows), longest), -100)
    for row, (prompt_ids, answer_ids) in enumerate(rows):
        end = len(prompt_ids) + len(answer_ids)
        ids_NT[row, :end] = torch.tensor(prompt_ids + answer_ids)
        labels_NT[row, len(prompt_ids) : end] = torch.tensor(answer_ids)
    return ids_NT, labels_NT


@torch.no_grad()
def greedy_accuracy(
    model: Qwen2ForCausalLM, ids_NT: torch.Tensor, labels_NT: torch.Tensor
) -> float:
    """Accuracy of greedy decoding: fraction of rows whose every answer token is the arg max."""
    hits_NT = model(input_ids=ids_NT).logits[:, :-1].argmax(-1) == labels_NT[:, 1:]
    return float((hits_NT | (labels_NT[:, 1:] < 0)).all(-1).float().mean())


def pretrain(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    pairs: list[Pair],
    args: argparse.Namespace,
) -> None:
    """AdamW at a constant rate, until the accuracy on held-back pairs reaches the target.

    A decaying rate was tried: the model then is sure of its wrong answers, and reinforcement
    learning has nothing to choose from (docs/log/2026-11-21-first-light.md).
    """
    texts = [(question(pair), completion(pair)) for pair in pairs]
    probe = encode(tokenizer, texts[:512])
    ids_NT, labels_NT = encode(tokenizer, texts[512:])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    for step in range(1, args.max_steps + 1):
        rows = torch.randint(len(ids_NT), (args.batch,))
        loss = model(input_ids=ids_NT[rows], labels=labels_NT[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:  # a warm-up of 20 steps, then a constant rate
            group["lr"] = args.learning_rate * min(1.0, step / 20)
        optimizer.step()
        if step % 10 == 0:
            accuracy = greedy_accuracy(model, *probe)
            print(f"step {step}  loss {loss.item():.4f}  accuracy {accuracy:.3f}", flush=True)
            if accuracy >= args.stop_at:
                break


def begin(description: str, name: str, **defaults: float) -> tuple[argparse.Namespace, Path]:
    """The options, after ``usual``, and an empty folder for the model; sets the seed."""
    parser = argparse.ArgumentParser(description=description.split("\n\n")[0])
    for option, value in {"seed": 0, **defaults}.items():
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--out", type=Path, default=ROOT)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    folder = args.out / "model" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (args.out / "data").mkdir(exist_ok=True)
    return args, folder


class MuonAndAdamW:
    """Muon for the matrices, AdamW for the rest, each with a peak rate."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self.model = model
        named = [(p, p.ndim == 2 and "embed" not in name) for name, p in model.named_parameters()]
        matrices = [p for p, is_matrix in named if is_matrix]
        vectors = [p for p, is_matrix in named if not is_matrix]
        self.optimizers = {
            1e-2: torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            3e-3: torch.optim.AdamW(vectors, weight_decay=0.0, betas=(0.9, 0.95)),
        }

    def step(self, loss: torch.Tensor, factor: float) -> None:
        """One step at this part of the peak rates."""
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for rate, optimizer in self.optimizers.items():
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()


def main() -> None:
    """Make the data, the tokenizer and the model, and say how good it is."""
    defaults = {"learning_rate": 3e-3, "batch": 128, "max_steps": 1000, "stop_at": 0.37}
    args, folder = begin(__doc__, "tiny", **defaults)
    pretraining, train, test = split_pairs(args.seed)
    write_rows(args.out / "data" / "arithmetic_train.jsonl", train)
    write_rows(args.out / "data" / "arithmetic_test.jsonl", test)

    corpus = [f"system\nuser\n{question(p)}\nassistant\n" for p in pretraining[:500]]
    tokenizer = make_tokenizer(corpus)
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    pretrain(model, tokenizer, pretraining, args)
    test_rows = encode(tokenizer, [(question(pair), completion(pair)) for pair in test])
    print(f"test accuracy {greedy_accuracy(model, *test_rows):.3f}")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
