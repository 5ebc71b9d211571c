"""Plays one rollout with turns that you write in place of the model, to try an environment or tools
on any machine: of the model, only the tokenizer and the config are read.

    python examples/play.py configs/wordle_tiny.yaml abc def

It prints what the model would read, your turns, the replies and the rewards. The question is the
first one of ``data.train``.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from reason_llm import load_config
from reason_llm.data import load_data, renderer_of
from reason_llm.errors import ReasonError, printable
from reason_llm.model import end_token_ids, load_tokenizer
from reason_llm.model.plan import context_limit
from reason_llm.rollout import Completion, FinishReason, Group, Prompt
from reason_llm.sample import Ended, Progress, SamplingParams, episodes_of, ignore_ended
from reason_llm.score import Scorer


class Written:
    """A sampler whose answers are the given texts, in order. Shows what each of them answers."""

    def __init__(self, tokenizer: Any, end: int, turns: Sequence[str]) -> None:
        self.tokenizer, self.end, self.turns = tokenizer, end, list(turns)
        self.num_shown = 0

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = ignore_ended,
    ) -> list[Group]:
        """See ``Sampler``; of one prompt."""
        (prompt,) = prompts
        show(self.tokenizer.decode(prompt.token_ids[self.num_shown :]))
        if not self.turns:
            sys.exit("error: the rollout waits for another turn; give one more")
        text = self.turns.pop(0)
        show(text)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.end]
        why: FinishReason = "stop" if len(ids) <= params.max_new_tokens else "length"
        ids = ids[: params.max_new_tokens]
        self.num_shown = len(prompt.token_ids) + len(ids)
        return [Group(prompt, (Completion(tuple(ids), text, (0.0,) * len(ids), why),))]

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """See ``Sampler``."""
        return len(prompts)


def play(config_file: str, turns: Sequence[str]) -> Completion:
    """The scored rollout, whose turns are shown.

    Raises:
        ReasonError: in the config, the data, the environment or a reward.
    """
    config = load_config(config_file)
    path = config.model.path
    tokenizer, context = load_tokenizer(path), context_limit(config.model)
    ends = end_token_ids(path, tokenizer)
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else min(ends)
    params = SamplingParams(1, config.sample.max_new_tokens)
    with Scorer(config.score, config.sample.max_new_tokens) as scorer:
        data = load_data(config, tokenizer, context, extra_columns=scorer.columns)
        episodes = episodes_of(config, renderer_of(config, tokenizer), context)
        with closing(episodes):
            over = episodes.over(Written(tokenizer, end, turns))
            groups = over.sample(data.prompts[:1], params, 0, lambda tokens, ended: None)
        ((completion,),) = (group.completions for group in scorer.score(groups))
    return completion


def show(text: str) -> None:
    """Print a text with control characters escaped."""
    print(printable(text, keep="\n\t"))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: {sys.argv[0]} CONFIG TURN...")
    try:
        ended = play(sys.argv[1], sys.argv[2:])
    except ReasonError as error:
        sys.exit(f"error: {printable(str(error))}")
    show(f"ended by: {ended.finish_reason}; {dict(ended.environment)}")
    show(f"rewards: {dict(ended.rewards)}")
