"""Objectives of the stages on numbers worked by hand, and their gradients in every layout.

1. Supervised.   2. Pairs, each row of the table.   3. Labels.   4. Reward models.   5. The critic.
6. PPO's advantages and its order.   7. The teacher.   8. Micro-batches, packing, optimizer batches.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import TINY
from marks import most_are_long
from reason_llm.config import (
    AdapterSection,
    CriticSection,
    ModelSection,
    TrainSection,
)
from reason_llm.config.algorithms import ALGORITHMS, resolve as resolve_algorithm
from reason_llm.config.preferences import PREFERENCES, resolve
from reason_llm.model import Datum, Model
from reason_llm.readers.teacher import TeacherRole
from reason_llm.train import (
    BASE,
    Learner,
    Learners,
    LearningSettings,
    PolicyGradient,
    RoleReader,
    Values,
    learning,
)
from reason_llm.train.objectives import Batch, Objective, with_critic
from reason_llm.train.stages import Labels, PairLoss, RewardModel, Supervised

CHOSEN, REJECTED = [[-1.0, -2.0], [-4.0]], [[-0.5, -0.5, -2.0], [-1.0, -1.0]]
"""Sums -3, -4 and -3, -2; means -1.5, -4 and -1, -1."""
REF = {"ref_logprobs": [[-1.5, -2.0], [-0.5, -0.5, -1.5], [-3.0], [-1.0, -1.5]]}
"""Of chosen, rejected, chosen, rejected: log-ratios 0.5, -0.5 and -1, 0.5, so h is 1 and -1.5."""
H = (1.0, -1.5)
SIDES = [CHOSEN[0], REJECTED[0], CHOSEN[1], REJECTED[1]]


def logsigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def made(
    rows: Sequence[Sequence[float]],
    columns: dict[str, list[list[float]]] | None = None,
    rewards: Sequence[float] = (),
) -> Batch:
    """A batch with two tokens of prompt before each row's trained ones."""

    def padded(values: Sequence[Sequence[float]]) -> Tensor:
        parts = [torch.tensor([0.0, 0.0, *row]) for row in values]
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)

    mask = padded([[1.0] * len(row) for row in rows]).bool()
    values = {name: padded(column) for name, column in (columns or {}).items()}
    return Batch(
        mask, padded(rows).requires_grad_(), torch.zeros(mask.shape), values,
        torch.tensor(rewards or [0.0] * len(rows)), rewards,
    )  # fmt: skip


def data(rows: Sequence[Sequence[float]], rewards: Sequence[float] = ()) -> list[Datum]:
    """Rows of these lengths, for ``count``."""
    return [
        Datum.of((1, 2), (3,) * len(row), f"row{i}", reward=(rewards or [0.0] * len(rows))[i])
        for i, row in enumerate(rows)
    ]


def loss_of(objective: Objective, batch: Batch, rows: list[Datum]) -> tuple[float, Any, Tensor]:
    """The loss of a whole optimizer batch, with its record and its gradient."""
    counts = objective.count(rows)
    found = objective.loss(batch, counts)
    (gradient,) = torch.autograd.grad(found.total / counts.denominator, batch.logprobs_BT)
    return float(found.total.detach()) / counts.denominator, found, gradient


# --- 1. Supervised


def test_the_nll_is_a_mean_over_tokens() -> None:
    """-log p of (1, 2 | 4 | 0.5, 0.5, 2): 10 over 6 tokens."""
    rows = [[-1.0, -2.0], [-4.0], [-0.5, -0.5, -2.0]]
    loss, found, gradient = loss_of(Supervised(), made(rows), data(rows))
    assert loss == pytest.approx(10 / 6)
    assert gradient[1].tolist() == pytest.approx([0, 0, -1 / 6, 0, 0])
    assert float(found.values["nll"].detach().sum()) == pytest.approx(10)


# --- 2. Pairs

NLL = (3 + 4) / 3
"""Of the chosen sides' three tokens."""
EXPECTED = {
    "dpo": -sum(logsigmoid(0.1 * h) for h in H) / 2,
    "irpo": -sum(logsigmoid(0.1 * h) for h in H) / 2 + NLL,
    "cdpo": -sum(0.9 * logsigmoid(0.1 * h) + 0.1 * logsigmoid(-0.1 * h) for h in H) / 2,
    "rdpo": -sum(0.9 * logsigmoid(0.1 * h) - 0.1 * logsigmoid(-0.1 * h) for h in H) / 2 / 0.8,
    "ipo": sum((h - 5) ** 2 for h in H) / 2,
    "orpo": NLL - 0.1 * sum(
        logsigmoid(
            (a - math.log(1 - math.exp(a))) - (b - math.log(1 - math.exp(b)))
        ) for a, b in ((-1.5, -1.0), (-4.0, -1.0))
    ) / 2,
    "simpo": -sum(logsigmoid(2 * (a + 1) - 1) for a in (-1.5, -4.0)) / 2,
}  # fmt: skip


def of_row(row: Any) -> tuple[float, Any, Tensor]:
    batch = made(SIDES, REF if row.needs_reference else None)
    return loss_of(PairLoss(row=row), batch, data(SIDES))


@pytest.mark.parametrize("name", sorted(set(PREFERENCES) - {"kto"}))
def test_each_row_of_the_table(name: str) -> None:
    """Its loss by hand; the chosen side's gradient is down the loss and the rejected side's up."""
    row = PREFERENCES[name]
    loss, found, gradient = of_row(row)
    assert loss == pytest.approx(EXPECTED[name], rel=1e-5)
    assert (gradient[::2].sum(1) < 0).all()
    assert (gradient[1::2].sum(1) > 0).all()
    metrics = {key: value.tolist() for key, value in found.of_units.items()}
    assert metrics["chosen_logprob"] == pytest.approx([-1.5, -4.0])
    assert metrics["rejected_logprob"] == pytest.approx([-1.0, -1.0])
    if row.needs_reference:
        assert metrics["chosen_log_ratio"] == pytest.approx([0.5, -1.0])
        assert metrics["rejected_log_ratio"] == pytest.approx([-0.5, 0.5])
        assert metrics["margin"] == pytest.approx([0.1, -0.15])
        assert metrics["pair_accuracy"] == [1.0, 0.0]
    else:
        scale = row.beta if name == "simpo" else 1.0
        assert metrics["margin"] == pytest.approx([-0.5 * scale, -3.0 * scale])
        assert metrics["pair_accuracy"] == [0.0, 0.0]
    assert not any(value.requires_grad for value in found.of_units.values())


def test_overrides_of_a_row() -> None:
    """Means of ipo: log-ratios 0.5 / 2 and -0.5 / 3, then -1 and 0.5 / 2."""
    loss, _, _ = of_row(resolve("ipo", {"normalize_length": True, "beta": 0.5}))
    means = (0.25 + 0.5 / 3, -1 - 0.25)
    assert loss == pytest.approx(sum((h - 1) ** 2 for h in means) / 2, rel=1e-5)
    loss, _, _ = of_row(resolve("simpo", {"margin": 0.25, "beta": 3.0, "nll_coefficient": 0.5}))
    margins = -sum(logsigmoid(3 * (a + 1) - 0.25) for a in (-1.5, -4.0)) / 2
    assert loss == pytest.approx(margins + 0.5 * NLL, rel=1e-5)
    loss, _, _ = of_row(resolve("rdpo", {"label_smoothing": 0.3, "beta": 1.0}))
    by_hand = -sum(0.7 * logsigmoid(h) - 0.3 * logsigmoid(-h) for h in H) / 2 / 0.4
    assert loss == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(PREFERENCES) - {"kto"}))
def test_a_column_is_refused_where_it_would_change_nothing(name: str) -> None:
    changes: dict[str, Any] = {
        "label_smoothing": 0.2, "margin": 0.7, "normalize_length": True,
        "nll_coefficient": 0.3, "desirable_weight": 2.0, "undesirable_weight": 2.0,
    }  # fmt: skip
    for column, value in changes.items():
        changed = of_row(replace(PREFERENCES[name], **{column: value}))[0]
        if changed == of_row(PREFERENCES[name])[0]:
            with pytest.raises(ValueError, match="would be ignored"):
                resolve(name, {column: value})


# --- 3. Labels


def test_kto_by_hand() -> None:
    """Labels +, -, +; log-ratios 0.5, -0.5, -1; z0 the mean log-ratio of the rows beside."""
    rows, labels = [SIDES[0], SIDES[1], SIDES[2]], [1.0, -1.0, 1.0]
    objective = Labels(row=resolve("kto", {"desirable_weight": 1.5, "undesirable_weight": 0.5}))
    batch = made(rows, {"ref_logprobs": REF["ref_logprobs"][:3]}, labels)
    beside = [
        (torch.tensor([-1.0, -1.0]), torch.tensor([-2.0, -3.0])),  # 3
        (torch.tensor([-2.0]), torch.tensor([-1.0])),  # -1
        (torch.tensor([-0.5]), torch.tensor([-1.5])),  # 1
    ]
    counts = objective.count(data(rows, labels), beside)
    assert (counts.denominator, counts.baseline) == (3.0, pytest.approx(1.0))
    found = objective.loss(batch, counts)
    expected = (
        1.5 * sigmoid(0.1 * (1 - 0.5)) + 0.5 * sigmoid(0.1 * (-0.5 - 1))
        + 1.5 * sigmoid(0.1 * (1 + 1))
    )  # fmt: skip
    assert float(found.total.detach()) == pytest.approx(expected, rel=1e-5)
    (gradient,) = torch.autograd.grad(found.total, batch.logprobs_BT)
    assert (gradient.sum(1).sign() == torch.tensor([-1.0, 1.0, -1.0])).all()
    assert found.of_units["chosen_log_ratio"].tolist() == pytest.approx([0.5, -1.0])
    assert found.of_units["rejected_log_ratio"].tolist() == pytest.approx([-0.5])
    assert found.of_units["kl_baseline"].tolist() == pytest.approx([1.0] * 3)
    below = [(torch.tensor([-2.0]), torch.tensor([-1.0]))] * 3
    assert objective.count(data(rows, labels), below).baseline == 0.0
    assert objective.measured(data(rows), 3) == ([0, 1, 2], ("ref_logprobs",))


def test_kto_pairs_each_prompt_with_the_completion_before() -> None:
    rows = [Datum.of((n,), (10 * n,) * n, str(n)) for n in (1, 2, 3)]
    found = Labels(row=PREFERENCES["kto"]).extra_rows(rows)
    assert [d.ids.tolist() for d in found] == [[1, 30, 30, 30], [2, 10], [3, 20, 20]]
    assert [d.num_trained for d in found] == [3, 1, 2]


# --- 4. Reward models


def test_bradley_terry_by_hand() -> None:
    """Scores 2 and 1 with a margin of 0.5; -1 and 0.5 with none. The rejected side's is ignored."""
    rows = [[0.0, 2.0], [1.0], [0.0, -1.0], [0.0, 0.5]]
    batch = made(rows, rewards=[0.5, 9.0, 0.0, 9.0])
    objective = RewardModel(centering=0.1)
    loss, found, gradient = loss_of(objective, batch, data(rows))
    margin = 0.5
    expected = -(logsigmoid(1 - margin) + logsigmoid(-1.5)) + 0.1 * (9 + 0.25)
    assert loss == pytest.approx(expected / 2, rel=1e-5)
    assert (gradient[0, 3] < 0) == (sigmoid(margin - 1) > 2 * 0.1 * 3)
    assert {name: value.tolist() for name, value in found.of_units.items()} == {
        "pair_accuracy": [1.0, 0.0], "margin": [1.0, -1.5], "chosen_reward": [2.0, -1.0],
        "rejected_reward": [1.0, 0.5],
    }  # fmt: skip
    plain = RewardModel(centering=0.0)
    _, _, gradient = loss_of(plain, made(rows), data(rows))
    assert gradient.sum(1).sign().tolist() == [-1, 1, -1, 1]
    assert (plain.output, objective.count(data(rows)).denominator) == ("scores", 2.0)


# --- 5. The critic


def test_the_value_loss_is_clipped_and_masked() -> None:
    """V 1, 2 | 0; old 0.5, 1.9 | 0; returns 3, 1 | 2. Clip 0.2: the first moved too far and its
    clipped error (0.7 - 3)^2 is the larger one; the second's is (2 - 1)^2."""
    rows = [[1.0, 2.0], [0.0]]
    columns = {"old_values": [[0.5, 1.9], [0.0]], "returns": [[3.0, 1.0], [2.0]]}
    loss, found, gradient = loss_of(Values(clip=0.2), made(rows, columns), data(rows))
    assert loss == pytest.approx((2.3**2 + 1 + 4) / 2 / 3)
    assert gradient[0].tolist() == pytest.approx([0, 0, 0, 1 / 3])
    assert gradient[1].tolist() == pytest.approx([0, 0, -2 / 3, 0])
    assert found.values["clip_fraction"][0].tolist() == [False, False, True, False]
    outside = made(rows, columns)
    dirty = {name: value.clone() for name, value in outside.columns.items()}
    dirty["returns"][:, :2] = dirty["returns"][1, 3] = 100.0
    dirtied = replace(outside, columns=dirty)
    assert loss_of(Values(clip=0.2), dirtied, data(rows))[0] == pytest.approx(loss)
    assert Values().output == "values"


# --- 6. PPO's advantages and its order

GAP = Datum("x", (1, 2, 3, 4, 5), (False, True, False, True, True), reward=2.0)
"""A tool's token between the first and the second trained one."""
ONE = Datum("y", (1, 2), (False, True), reward=-1.0)


def with_columns(**columns: tuple[list[float], list[float]]) -> list[Datum]:
    rows = [GAP, ONE]
    for name, values in columns.items():
        rows = [
            row.with_trained(name, torch.tensor(value))
            for row, value in zip(rows, values, strict=True)
        ]
    return rows


def test_advantages_are_over_trained_tokens_with_the_kl_of_each() -> None:
    """KL coefficient 0.5, k1: rewards -0.5 (0.2, -0.4, 0) + (0, 0, 2); gamma 1, lambda 0.5.

    deltas: -0.1 + 0.6 - 0.5, 0.2 + 0.1 - 0.6, 2 - 0.1; advantages 0 - 0.15 + 0.475 and so on."""
    row = resolve_algorithm(
        "ppo", {"kl": "k1", "kl_coefficient": 0.5, "kl_place": "token_reward", "scale": "none"}
    )
    rows = with_columns(
        old_values=([0.5, 0.6, 0.1], [0.3]),
        old_logprobs=([-1.0, -1.0, -1.0], [-2.0]),
        ref_logprobs=([-1.2, -0.6, -1.0], [-2.0]),
    )
    found = with_critic(rows, row, CriticSection(gamma=1.0, lam=0.5))
    last, middle = 2 - 0.1, 0.2 + 0.1 - 0.6
    first = -0.1 + 0.6 - 0.5
    by_hand = [first + 0.5 * (middle + 0.5 * last), middle + 0.5 * last, last]
    assert found[0].on_trained("advantages").tolist() == pytest.approx(by_hand, abs=1e-6)
    assert found[0].columns["advantages"][[0, 2]].tolist() == [0, 0]
    assert found[1].on_trained("advantages").tolist() == pytest.approx([-1.3])
    whole = [2 - 0.1 + 0.2, 2 + 0.2, 2.0]
    assert found[0].on_trained("whole_returns").tolist() == pytest.approx(whole, abs=1e-6)
    assert found[0].on_trained("returns").tolist() == pytest.approx(whole, abs=1e-6)
    discounted = with_critic(rows, row, CriticSection(gamma=0.5, lam=1.0))
    assert discounted[0].on_trained("advantages")[1] == pytest.approx(
        0.2 + 0.05 - 0.6 + 0.5 * last, abs=1e-6
    )
    assert discounted[0].on_trained("whole_returns").tolist() == pytest.approx([0.5, 1.2, 2.0])
    squares = with_critic(rows, replace(row, kl="k2"), CriticSection())
    taken = [2 - 0.5 * kl for kl in (0.04 / 2 + 0.16 / 2, 0.16 / 2, 0.0)]
    assert squares[0].on_trained("whole_returns").tolist() == pytest.approx(taken, abs=1e-6)


def test_advantages_are_whitened_over_all_trained_tokens() -> None:
    row = resolve_algorithm("ppo", {"kl": "none"})
    assert row.scale == "whiten"
    rows = with_columns(old_values=([0.5, 0.6, 0.1], [0.3]), old_logprobs=([-1.0] * 3, [-2.0]))
    plain = with_critic(rows, replace(row, scale="none"), CriticSection())
    white = with_critic(rows, row, CriticSection())
    before = torch.cat([d.on_trained("advantages") for d in plain]).double()
    after = torch.cat([d.on_trained("advantages") for d in white]).double()
    assert after.mean() == pytest.approx(0, abs=1e-6)
    expected = (before - before.mean()) / before.std()
    assert torch.allclose(after, expected, atol=1e-2)
    assert torch.equal(plain[0].columns["returns"], white[0].columns["returns"])


@pytest.fixture(scope="module")
def roles(tokenizer: Any) -> Iterator[Model]:
    """The tiny model with adapters and heads that change something."""
    section = ModelSection(path=str(TINY), dtype="float32", adapter=AdapterSection(rank=4))
    with Model(section, tokenizer, seed=0) as model:
        model.add_role("critic", head="value")
        model.add_role("scorer", head="score")
        yield model


@pytest.fixture
def model(roles: Model) -> Model:
    generator = torch.Generator().manual_seed(5)
    for role in ("policy", "critic", "scorer"):
        for parameter in roles.parameters_of(role):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
            parameter.grad = None
    return roles


def moved(model: Model, role: str, before: list[Tensor]) -> bool:
    return any(
        not torch.equal(a, b) for a, b in zip(model.parameters_of(role), before, strict=True)
    )


def rollouts(count: int = 6) -> list[Datum]:
    generator = torch.Generator().manual_seed(2)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 250, (count,), generator=generator).tolist()

    prompts = [ids(3 + n) for n in range(2)]
    return [
        Datum.of(prompts[n % 2], ids(2 + 2 * n), f"r{n}", group=n, rollout=n, reward=n % 3)
        for n in range(count)
    ]


def settings(
    objective: Objective, role: str = "policy", budget: int = 10**6, **train: Any
) -> LearningSettings:
    section = TrainSection(
        **{"learning_rate": 1e-3, "gradient_checkpointing": False, "max_grad_norm": 1e9} | train
    )
    return LearningSettings(objective, section, 1.0, budget, 0, 8, role=role, readers=READERS)


READERS = (BASE, RoleReader("old_values", "critic", "values"))
BY_CRITIC = (RoleReader("ref_logprobs", "critic"), RoleReader("teacher_logprobs", "critic"))


PPO = resolve_algorithm("ppo", {"kl": "k1", "kl_coefficient": 0.3, "kl_place": "token_reward"})


def ppo(model: Model, warmup_steps: int = 0) -> Learners:
    policy = Learner(model, settings(PolicyGradient(PPO, 32, critic=CriticSection())))
    critic = Learner(model, settings(Values(), "critic", epochs=2))
    return Learners(policy, critic, warmup_steps)


def test_explained_variance_is_that_of_whole_returns_whatever_lambda_is(model: Model) -> None:
    short = CriticSection(lam=0.5)
    policy = Learner(model, settings(PolicyGradient(PPO, 32, critic=short)))
    learners = Learners(policy, Learner(model, settings(Values(), "critic")), warmup_steps=1)
    rows = rollouts()
    rows[1] = replace(rows[1], has_reward=False)  # which says nothing of the critic
    old, _ = learners.policy.measure(rows, "critic", "values")
    with learning(learners.policy):
        found = learners.learn(0, rows, lambda rows: None)
        expected = ppo(model, warmup_steps=1).policy.prepared(
            [row.with_trained("old_values", each) for row, each in zip(rows, old, strict=True)]
        )
    scored = [i for i, row in enumerate(rows) if row.has_reward]
    returns = torch.cat([expected[i].on_trained("returns") for i in scored]).double()
    left = returns - torch.cat([old[i] for i in scored]).double()
    explained = 1 - float(left.var() / returns.var())
    assert found["critic/explained_variance"] == pytest.approx(explained, abs=1e-3)


def test_learners_go_back_to_a_state_and_learn_the_same_from_there(model: Model) -> None:
    """Adapters, heads and moments of both; what was taken stays as it was."""
    learners, rows = ppo(model), rollouts(2)
    assert list(learners.optimizers) == ["policy", "critic"]
    with learning(learners.policy):
        taken = learners.state()
        kept = {name: value.clone() for name, value in taken.items()}
        first, after = learners.learn(1, rows, lambda count: None), learners.state()
        learners.load(taken)
        assert [each.updates_in_step for each in learners.by_role.values()] == [0, 0]
        again = learners.state()
        assert all(torch.equal(again[name], value) for name, value in kept.items())
        assert learners.learn(1, rows, lambda count: None) == first
    again = learners.state()
    for name in taken.keys() | after.keys() | again.keys():
        assert torch.equal(again[name], after[name]) and torch.equal(taken[name], kept[name])
        assert not torch.equal(after[name], taken[name]), name


# --- 7. The teacher


def test_the_teacher_s_advantage_is_how_much_likelier_it_finds_a_token() -> None:
    rows = with_columns(
        old_logprobs=([-1.0, -1.0, -1.0], [-2.0]), teacher_logprobs=([-0.5, -1.0, -3.0], [-1.0])
    )
    objective = PolicyGradient(ALGORITHMS["opd"], 32)
    assert "teacher_logprobs" in objective.measured(rows, 1)[1]
    prepared = objective.prepared(rows)
    assert prepared[0].on_trained("advantages").tolist() == pytest.approx([0.5, 0.0, -2.0])
    assert prepared[1].on_trained("advantages").tolist() == pytest.approx([1.0])
    assert objective.describe(prepared, [0, 1])["train/teacher_kl"] == pytest.approx(
        (-0.5 + 2 - 1) / 4
    )


def test_a_teacher_s_prompt_stands_in_the_prompt_s_place(model: Model) -> None:
    rows = rollouts(2)
    prompts = {rows[0].prompt_ids: (9, 8, 7), rows[1].prompt_ids: rows[1].prompt_ids}
    transform = TeacherRole(None, prompts).with_teacher_prompt
    readers = (BASE, RoleReader("teacher_logprobs", "critic", transform=transform))
    made = Learner(model, replace(settings(PolicyGradient(ALGORITHMS["opd"], 32)), readers=readers))
    with learning(made):
        prepared = made.prepared(rows)
        asked, _ = made.measure([rows[0].with_prompt((9, 8, 7)), rows[1]], "critic")
        policy, _ = made.measure(rows, "policy")
    for row, teacher, own in zip(prepared, asked, policy, strict=True):
        assert torch.allclose(row.on_trained("teacher_logprobs"), teacher)
        assert torch.allclose(row.on_trained("advantages"), teacher - own, atol=1e-5)


# --- 8. Micro-batches, packing, optimizer batches


def pairs(count: int = 5) -> list[Datum]:
    """Pairs with one prompt for both sides, of unequal lengths; margins on the chosen side."""
    generator = torch.Generator().manual_seed(4)

    def ids(count: int) -> list[int]:
        return torch.randint(3, 250, (count,), generator=generator).tolist()

    return [
        Datum.of(prompt, ids(length), f"p{n}", group=n, reward=0.25 * n if side == 0 else 0.0)
        for n in range(count)
        for prompt in [ids(3 + n % 3)]
        for side, length in enumerate((3 + 4 * (n % 3), 9 - n))
    ]


def labelled() -> list[Datum]:
    return [replace(row, reward=1.0 if n % 3 else -1.0) for n, row in enumerate(pairs())]


def returned() -> list[Datum]:
    generator = torch.Generator().manual_seed(6)
    rows = rollouts()
    for name in ("old_values", "returns"):
        rows = [d.with_trained(name, torch.randn(d.num_trained, generator=generator)) for d in rows]
    return rows


Case = tuple[Objective, str, Callable[[], list[Datum]]]
CASES: dict[str, Case] = {
    "token_mean": (Supervised(), "policy", pairs),
    **{
        name: (PairLoss(row=row), "policy", pairs)
        for name, row in PREFERENCES.items() if name != "kto"
    },
    "kto": (Labels(row=PREFERENCES["kto"]), "policy", labelled),
    "reward": (RewardModel(), "scorer", pairs),
    "values": (Values(), "critic", returned),
    "opd": (PolicyGradient(ALGORITHMS["opd"], 32), "policy", rollouts),
}  # fmt: skip


def learned(
    model: Model, case: Case, budget: int, **train: Any
) -> tuple[dict[str, float], list[Tensor], Learner]:
    """Metrics, the gradients that the optimizer saw, and the learner; nothing moves."""
    objective, role, rows = case
    chosen = settings(objective, role, budget, learning_rate=0.0, **train)
    made = Learner(model, replace(chosen, readers=(*READERS, BY_CRITIC[1])))
    seen: list[Tensor] = []
    made.optimizer.register_step_pre_hook(
        lambda *_: seen.append(torch.cat([p.grad.flatten() for p in made.parameters]).clone())
    )
    with learning(made):
        metrics = Learners(made).learn(0, rows(), lambda count: None)
    return metrics, seen, made


@pytest.mark.parametrize("name", most_are_long(CASES, ["dpo", "kto", "opd", "token_mean"]))
def test_no_split_and_no_packing_changes_the_gradient(model: Model, name: str) -> None:
    metrics, (whole,), _ = learned(model, CASES[name], 10**6, packing="padded")
    assert whole.norm() > 1e-4
    assert metrics.get("train/kl_baseline", 1.0) > 0
    for packing in ("padded", "varlen"):
        for budget in (1, 40):
            found, (split,), _ = learned(model, CASES[name], budget, packing=packing)
            assert (split - whole).norm() <= 1e-5 * whole.norm(), (packing, budget)
            for key in ("loss", "pair_accuracy", "margin", "kl_baseline", "nll", "value"):
                expected = metrics.get(f"train/{key}", 0.0)
                told = found.get(f"train/{key}", 0.0)
                assert told == pytest.approx(expected, rel=1e-4, abs=1e-5), key


@pytest.mark.parametrize("packing", ["padded", "varlen"])
@pytest.mark.parametrize("name", ["dpo", "orpo", "reward"])
def test_a_pair_is_never_split(
    model: Model, monkeypatch: pytest.MonkeyPatch, name: str, packing: str
) -> None:
    passed: list[list[str]] = []
    original = Learner._backward

    def backward(self: Learner, data: list[Datum], indices: list[int], *more: Any) -> Any:
        passed.append([data[i].name for i in indices])
        return original(self, data, indices, *more)

    monkeypatch.setattr(Learner, "_backward", backward)
    learned(model, CASES[name], 1, packing=packing)
    assert sorted(passed) == [[f"p{n}", f"p{n}"] for n in range(5)]


@pytest.mark.parametrize(("name", "sizes"), [("dpo", [2, 4, 4]), ("kto", [3, 3, 4])])
def test_optimizer_steps_and_epochs_divide_units(
    model: Model, monkeypatch: pytest.MonkeyPatch, name: str, sizes: list[int]
) -> None:
    """Five pairs, or ten rows, in three optimizer steps; each once in each epoch."""
    counted: list[list[str]] = []
    objective = type(CASES[name][0])
    original = objective.count

    def count(self: Any, data: list[Datum], beside: Any = ()) -> Any:
        counted.append([f"{row.name}/{row.reward}" for row in data])
        return original(self, data, beside)

    monkeypatch.setattr(objective, "count", count)
    learned(model, CASES[name], 60, optimizer_steps=3, epochs=2)
    everything = sorted(f"{row.name}/{row.reward}" for row in CASES[name][2]())
    for epoch in (counted[:3], counted[3:]):
        assert sorted(map(len, epoch)) == sizes
        assert sorted(each for part in epoch for each in part) == everything
    assert counted[:3] != counted[3:]
    if name == "dpo":
        names = [[row.split("/")[0] for row in part] for part in counted]
        assert all(part[::2] == part[1::2] for part in names)


def test_labels_of_one_kind_alone_can_be_learned(model: Model) -> None:
    good = [replace(row, reward=1.0) for row in pairs()]
    metrics, (gradient,), _ = learned(model, (CASES["kto"][0], "policy", lambda: good), 10**6)
    assert gradient.norm() > 0
    assert "train/chosen_log_ratio" in metrics
    assert "train/rejected_log_ratio" not in metrics


@pytest.mark.parametrize("name", ["dpo", "kto", "reward", "token_mean"])
def test_judged_rows_have_the_loss_of_the_step(model: Model, name: str) -> None:
    metrics, _, made = learned(model, CASES[name], 10**6)
    with learning(made):
        found = made.judge(CASES[name][2]())
    for key, value in found.items():
        assert value == pytest.approx(metrics[f"train/{key}"], rel=1e-4, abs=1e-5), key
    assert "loss" in found


def test_what_is_measured_is_not_measured_again(model: Model) -> None:
    """Rows that have the column keep it, whatever it is."""
    made = Learner(model, replace(settings(PairLoss(row=PREFERENCES["dpo"])), readers=BY_CRITIC))
    rows = pairs()
    rows[1] = rows[1].with_trained("ref_logprobs", torch.full((rows[1].num_trained,), -7.0))
    with learning(made):
        prepared = made.prepared(rows)
        measured, _ = made.measure([rows[0]], "critic")
    assert set(prepared[1].on_trained("ref_logprobs").tolist()) == {-7.0}
    assert torch.allclose(prepared[0].on_trained("ref_logprobs"), measured[0], atol=1e-5)


def test_the_baseline_of_kto_is_against_the_reference_that_is_asked_for(model: Model) -> None:
    made, rows = Learner(model, settings(Labels(row=PREFERENCES["kto"]))), labelled()
    extra = made.settings.objective.extra_rows(rows)
    sums = [sum(map(torch.sum, made.measure(extra, role)[0])) for role in ("policy", "critic")]
    for role, other, ratio in (("policy", "critic", sums[0] - sums[1]),
                               ("critic", "policy", sums[1] - sums[0])):  # fmt: skip
        made.settings = replace(
            made.settings, role=role, readers=(RoleReader("ref_logprobs", other),)
        )
        assert made._count(rows).baseline == pytest.approx(max(0.0, float(ratio) / 10), rel=1e-4)
