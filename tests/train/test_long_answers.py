"""PPO where the first of 220 tokens decides and the reward comes with the last one.

A table of logits in the place of a model: each token has two choices, and all after the first are
noise. Advantages, whitening and loss are the product's own; the critic is a table, too, which takes
over a tenth of its error in each step.
"""

import pytest
import torch

from reason_llm.config import CriticSection
from reason_llm.config.algorithms import resolve
from reason_llm.model.datum import Datum
from reason_llm.train.objectives import Batch, PolicyGradient

TOKENS, ROLLOUTS, STEPS = 220, 32, 25


def right_after_learning(critic: CriticSection) -> float:
    """Probability of the right first token, which is 0.35 before."""
    generator = torch.Generator().manual_seed(0)
    objective = PolicyGradient(resolve("ppo", {"kl": "none"}), TOKENS, critic=critic)
    logits_T = torch.zeros(TOKENS)
    logits_T[0] = torch.logit(torch.tensor(0.35))
    optimizer = torch.optim.Adam([logits_T.requires_grad_()], lr=0.15)
    values_2T = torch.zeros(2, TOKENS)  # by the first token, which the first value does not know
    mask_BT = torch.ones(ROLLOUTS, TOKENS, dtype=torch.bool)
    for _ in range(STEPS):
        drawn_BT = torch.rand(ROLLOUTS, TOKENS, generator=generator) < torch.sigmoid(logits_T)
        signs_BT = torch.where(drawn_BT, 1.0, -1.0)
        logprobs_BT = torch.nn.functional.logsigmoid(signs_BT * logits_T)
        first_B = drawn_BT[:, 0].long()
        old = {"old_values": values_2T[first_B], "old_logprobs": logprobs_BT.detach()}
        data = []
        for i, tokens in enumerate(drawn_BT.long().tolist()):
            row = {name: column_BT[i].tolist() for name, column_BT in old.items()}
            data.append(Datum.of((), tokens, reward=float(first_B[i]), columns=row))
        data = objective.prepared(data)
        columns = {
            name: torch.stack([datum.columns[name] for datum in data])
            for name in ("advantages", "returns", "old_logprobs")
        }
        batch = Batch(mask_BT, logprobs_BT, torch.zeros_like(logprobs_BT), columns, first_B.float())
        counts = objective.count(data)
        optimizer.zero_grad()
        (objective.loss(batch, counts).total / counts.denominator).backward()
        optimizer.step()
        for choice in (0, 1):
            if (of_choice := first_B == choice).any():
                error_T = columns["returns"][of_choice].mean(0) - values_2T[choice]
                values_2T[choice, 1:] += 0.1 * error_T[1:]
        values_2T[:, 0] += 0.1 * (columns["returns"][:, 0].mean() - values_2T[0, 0])
    return torch.sigmoid(logits_T[0]).item()


@pytest.mark.parametrize("lam", [1.0, 0.95])
def test_a_critic_of_whole_returns_teaches_the_first_token(lam: float) -> None:
    assert right_after_learning(CriticSection(lam=lam)) > 0.85
