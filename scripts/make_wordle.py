"""Makes model/wordle and its data: a 0.36 M-parameter Qwen2 that plays the game of
examples/wordle.py carelessly.

    python scripts/make_wordle.py            # a minute and a half on one core

It overwrites model/wordle and data/wordle_*.jsonl. The recipe, whole: hold out a quarter of the
words, which are the answer in no game below; have a player guess, 30 % of the time, a word that
agrees with all replies so far, and otherwise any word; teach the model the player's distribution of
each letter. To agree always is left to reinforcement learning.

N games, T turns, W words, L letters of a word, A letters of the alphabet.
"""

import json
import random
import sys
import time

import numpy as np
import torch
from make_tiny import ROOT, MuonAndAdamW, begin, make_model, make_tokenizer
from torch.nn.functional import one_hot
from transformers import PreTrainedTokenizerFast

sys.path.append(str(ROOT / "examples"))
from wordle import GUESSES, LENGTH, LETTERS, WORDS, feedback

NUM_TEST = 128
CARELESS, CAREFUL = 0.3, 0.9
"""Fractions of guesses that agree with all replies: in the games, and in the learned player."""
ROLES = ["<|user|>", "<|assistant|>"]
QUESTION = "WORDLE"
PAIRS = [letter + mark for letter in LETTERS for mark in "-YG"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
A = len(LETTERS)


class Games:
    """The player's games, as tables over all pairs of words."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        marks = [[feedback(guess, word) for word in WORDS] for guess in WORDS]
        kinds = sorted({reply for row in marks for reply in row})
        self.reply_WW = np.array([[kinds.index(reply) for reply in row] for row in marks])
        self.letters_WL = np.array([[LETTERS.index(letter) for letter in word] for word in WORDS])
        self.marks_KL = np.array([["-YG".index(mark) for mark in kind] for kind in kinds])
        self.begin = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
        )
        self.user, self.assistant = tokenizer.convert_tokens_to_ids(ROLES)
        self.end, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id
        self.letter_ids_A = np.array(tokenizer.convert_tokens_to_ids(list(LETTERS)))
        self.pair_ids = np.array(tokenizer.convert_tokens_to_ids(PAIRS))

    def play(self, words: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Games about these words.

        Returns:
            Token ids; which turns were played (N, T); the player's distribution of each letter of
            each guess (N, T, L, A).
        """
        N, stride = len(words), 2 * LENGTH + 4
        ids = np.full((N, len(self.begin) + GUESSES * stride), self.pad)
        ids[:, : len(self.begin)] = self.begin
        agrees_NW, goes_N = np.ones((N, len(WORDS)), bool), np.ones(N, bool)
        agreed, guessed, played = [], [], []
        for turn in range(GUESSES):
            agreed.append(agrees_NW / agrees_NW.sum(-1, keepdims=True))
            played.append(goes_N)
            is_free_N = self.rng.random(N) >= CARELESS
            # The largest of random numbers at the allowed words is a uniform draw of one of them.
            allowed_NW = agrees_NW | is_free_N[:, None]
            guess_N = (self.rng.random((N, len(WORDS))) * allowed_NW).argmax(-1)
            guessed.append(guess_N)
            at = len(self.begin) + turn * stride
            letters_NL, reply_N = self.letters_WL[guess_N], self.reply_WW[guess_N, words]
            reply_ids_NL = self.pair_ids[3 * letters_NL + self.marks_KL[reply_N]]
            guess_ids_NL, column = self.letter_ids_A[letters_NL], np.ones((N, 1), int)
            end, user, assistant = (i * column for i in (self.end, self.user, self.assistant))
            row = np.concatenate([guess_ids_NL, end, user, reply_ids_NL, end, assistant], 1)
            ids[goes_N, at : at + stride] = row[goes_N]
            agrees_NW = agrees_NW & (self.reply_WW[guess_N] == reply_N[:, None])
            goes_N = goes_N & (guess_N != words)
        chances_NTW = CAREFUL * np.stack(agreed, 1) + (1 - CAREFUL) / len(WORDS)
        return (
            torch.tensor(ids),
            torch.tensor(np.stack(played, 1)),
            self._of_letters(chances_NTW, np.stack(guessed, 1)),
        )

    def _of_letters(self, chances_NTW: np.ndarray, guessed_NT: np.ndarray) -> torch.Tensor:
        """Of the distribution of words: that of each letter, given those before it."""
        remaining = torch.tensor(chances_NTW, dtype=torch.float32).unflatten(-1, (A,) * LENGTH)
        letters_NTL = torch.tensor(self.letters_WL[guessed_NT])
        letter_chances = []
        for place in range(LENGTH):
            chances = remaining.flatten(3).sum(-1) if place < LENGTH - 1 else remaining
            letter_chances.append(chances / chances.sum(-1, keepdim=True))
            picked = one_hot(letters_NTL[..., place], A).bool()
            remaining = remaining[picked].unflatten(0, guessed_NT.shape)
        return torch.stack(letter_chances, 2)


def main() -> None:
    """Make the data, the tokenizer and the model."""
    args, folder = begin(__doc__, "wordle", batch=32, steps=450)
    order = list(range(len(WORDS)))
    random.Random(args.seed).shuffle(order)
    for name, part in (("test", order[:NUM_TEST]), ("train", order[NUM_TEST:])):
        rows = [json.dumps({"question": QUESTION, "answer": WORDS[index]}) for index in part]
        (args.out / "data" / f"wordle_{name}.jsonl").write_text("\n".join(rows) + "\n")

    tokenizer = make_tokenizer([QUESTION] * 10, PAIRS, CHAT_TEMPLATE, ROLES)
    model = make_model(
        tokenizer, hidden_size=96, intermediate_size=256, num_hidden_layers=3,
        num_key_value_heads=4, initializer_range=0.08,
    )  # fmt: skip
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    optimizer = MuonAndAdamW(model)
    games = Games(tokenizer, args.seed)
    train, began = np.array(order[NUM_TEST:]), time.process_time()
    at_TL = (
        torch.arange(GUESSES)[:, None] * (2 * LENGTH + 4) + torch.arange(LENGTH) + len(games.begin)
    )
    for step in range(1, args.steps + 1):
        ids, played_NT, chances_NTLA = games.play(games.rng.choice(train, args.batch))
        logprobs = model(input_ids=ids).logits.log_softmax(-1)
        told_NTL = (chances_NTLA * logprobs[:, at_TL - 1][..., games.letter_ids_A]).sum(-1)
        end_NT = logprobs[:, at_TL[:, -1], games.end]
        loss = -(told_NTL.sum(-1) + end_NT)[played_NT].mean()
        optimizer.step(loss, min(1.0, step / 30, 3.05 - 3 * step / args.steps))
        if step % 25 == 0:
            best = -chances_NTLA.xlogy(chances_NTLA).sum((-1, -2))[played_NT].mean()
            seconds = f"{time.process_time() - began:.0f} s"
            print(
                f"step {step}  {loss.item() - best.item():.3f} over the player, {seconds}",
                flush=True,
            )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
