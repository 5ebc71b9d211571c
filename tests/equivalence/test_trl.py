"""Losses and gradients of the offline stages are those of TRL's trainers.

TRL reads the same rows as text, makes its own ids, masks and batch, and its own ``compute_loss``
gives the loss and the gradient of an adapter with our values, in float32 and without dropout. Ours
is padded and packed, in one micro-batch and in many.

Where TRL differs by its own choice:
1. ORPO's negative log-likelihood covers the prompt, too: ours is compared with the same trainer's
   odds, and its NLL with the SFT trainer's.
2. IPO takes means over tokens: ``normalize_length`` of ours.
3. DPO's ``label_smoothing`` is ignored by the loss ``sigmoid``, whose answer is plain DPO's. The
   loss ``aot`` reads it, and of a batch of one pair, where nothing is sorted, it is cDPO's.
4. KTO's mismatched rows are those of a batch of the data set: the batch is the optimizer batch.
5. A row of several turns ends with the template's line break, which no learned token sees.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import (
    DPOConfig,
    DPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

with warnings.catch_warnings():  # that it is experimental
    warnings.simplefilter("ignore")
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from chat_templates import END
from conftest import TINY
from marks import most_are_long
from reason_llm.config import AdapterSection, Config, ModelSection, TrainSection
from reason_llm.config.preferences import resolve
from reason_llm.data import load_data
from reason_llm.model import Datum, Model
from reason_llm.train import Learner, Learners, LearningSettings, RoleReader, learning
from reason_llm.train.objectives import Objective
from reason_llm.train.stages import Labels, PairLoss, RewardModel, Supervised

TOLERANCE = 1e-5
RANK, ALPHA = 8, 16
NUM_ROWS = 12
MARGINS = [0.0, 0.5, 1.0, 0.25]
LAYOUTS = [("padded", 10**6), ("padded", 90), ("varlen", 10**6), ("varlen", 90)]
"""Packing and the tokens of a micro-batch."""
Found = tuple[float, dict[str, Tensor]]
"""A loss, and gradients by PEFT's names without the adapter's."""


def talk() -> list[dict[str, Any]]:
    """Pairs of unequal lengths; every third prompt is that of the row before."""
    rows = []
    for i in range(NUM_ROWS):
        a, b = 7 * (i - i % 3 // 2) + 3, 11 * (i - i % 3 // 2) + 5
        rows.append(
            {
                "prompt": f"What is {a} + {b}?" + " Take your time." * (i % 4),
                "chosen": "<think>" + "1+2=3 " * (i % 5) + f"</think><answer>{a + b}</answer>",
                "rejected": f"{a - b}" * (1 + i % 3),
                "margin": MARGINS[i % len(MARGINS)],
            }
        )
    return rows


PAIRS = talk()
LABELS = [
    {"prompt": row["prompt"], "completion": row["rejected" if i % 3 else "chosen"],
     "label": i % 3 == 0}
    for i, row in enumerate(PAIRS)
]  # fmt: skip
TURNS = [
    {"messages": [
        {"role": "user", "content": row["prompt"]},
        {"role": "assistant", "content": row["chosen"]},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": row["rejected"]},
    ]} for row in PAIRS
]  # fmt: skip
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>"
    "{% endgeneration %}{{ '\\n' }}{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The tiny model's template, with the assistant's turns marked."""


@pytest.fixture(scope="module")
def policy(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """The tiny model with an adapter that changes something, and another one as ``start``."""
    section = ModelSection(
        path=str(TINY), dtype="float32", adapter=AdapterSection(rank=RANK, alpha=ALPHA)
    )
    with Model(section, tokenizer, seed=0) as model:
        model.add_role("start")
        for seed, role in enumerate(("policy", "start")):
            generator = torch.Generator().manual_seed(seed)
            for parameter in model.parameters_of(role):
                parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        yield model


@pytest.fixture
def rows(tokenizer: Any, tmp_path: Path) -> Callable[..., list[Datum]]:
    """Our rows of these, by our own reading and rendering."""

    def read(rows: list[dict[str, Any]], form: str) -> list[Datum]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tree: dict[str, Any] = {
            "stage": "sft" if form == "demonstrations" else "preference",
            "data": {"train": str(path), "form": form, "system_prompt": "none"},
        }
        if form == "labels":
            tree["preference"] = {"name": "kto"}
        found = load_data(Config.model_validate(tree), tokenizer, 400, end_token_ids=[END])
        return [Datum.of_row(row) for unit in found.units for row in unit]

    return read


def ours(model: Model, objective: Objective, data: list[Datum], layout: tuple[str, int],
         reference: str = "reference") -> Found:  # fmt: skip
    """Loss and gradient that an optimizer step of ours sees."""
    packing, budget = layout
    section = TrainSection(
        learning_rate=0.0, gradient_checkpointing=False, max_grad_norm=1e9, packing=packing
    )
    readers = (RoleReader("ref_logprobs", reference),)
    made = Learner(model, LearningSettings(objective, section, 1.0, budget, 0, 8, readers=readers))
    names = {id(p): n.replace(".default", "") for n, p in model.policy.named_parameters()}
    names |= {id(head.weight): "base_model.model.score.weight" for head in model.heads.values()}
    seen: list[dict[str, Tensor]] = []
    made.optimizer.register_step_pre_hook(
        lambda *_: seen.append({names[id(p)]: p.grad.clone() for p in made.parameters})
    )
    with learning(made):
        metrics = Learners(made).learn(0, data, lambda rows: None)
    assert len(seen) == 1
    return metrics["train/loss"], seen[0]


def same(found: Found, expected: Found) -> None:
    """The loss, and the gradient as a whole and of each factor, to ``TOLERANCE``."""
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE, abs=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    whole = torch.cat([g.flatten() for g in expected[1].values()]).norm()
    assert whole > 1e-3
    for name, gradient in expected[1].items():
        difference = (found[1][name] - gradient).norm()
        assert difference <= TOLERANCE * max(gradient.norm(), 0.1 * whole), name


def lora(task: str = "CAUSAL_LM") -> LoraConfig:
    return LoraConfig(
        r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, task_type=task,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj",
                        "down_proj"],
    )  # fmt: skip


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": NUM_ROWS, "use_cpu": True,
        "bf16": False, "gradient_checkpointing": False, "report_to": [], "disable_tqdm": True,
        "dataloader_pin_memory": False, "max_length": 400, **more,
    }  # fmt: skip


def theirs(
    trainer: Any,
    adapter: dict[str, Tensor],
    data: list[Datum] | None = None,
    batch: list[int] | None = None,
) -> Found:
    """Loss and gradient of TRL's trainer with our adapter's values.

    Args:
        data: our rows, whose ids must be those of TRL's batch (the sides one after the other).
        batch: numbers of TRL's rows; None for all.
    """
    model = trainer.model.train()
    set_peft_model_state_dict(model, adapter, adapter_name="default")
    batch = list(range(len(trainer.train_dataset))) if batch is None else batch
    examples = [trainer.train_dataset[i] for i in batch]
    inputs = trainer._prepare_inputs(trainer.data_collator(examples))
    if data is not None:
        pad = trainer.processing_class.pad_token_id
        ids = [[i for i in row if i != pad] for row in inputs["input_ids"].tolist()]
        assert ids == [list(datum.ids) for datum in data]
    model.zero_grad()
    loss = trainer.compute_loss(model, inputs)
    loss.backward()
    gradients = {
        name.replace(".default", "").replace("modules_to_save.", ""): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return float(loss.detach()), gradients


def texts(tokenizer: Any, rows: list[dict[str, Any]]) -> Dataset:
    """The rows with their prompts as the template writes them."""

    def prompt(row: dict[str, Any]) -> str:
        talk = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)
        return text

    return Dataset.from_list([{**row, "prompt": prompt(row)} for row in rows])


def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)


def sides(data: list[Datum]) -> list[Datum]:
    """All chosen sides, then all rejected ones, as TRL has them."""
    return [*data[::2], *data[1::2]]


@pytest.fixture
def reader(tokenizer: Any) -> Any:
    """A tokenizer of TRL's own, which its trainers change."""
    return copy.deepcopy(tokenizer)


Rows = Callable[..., list[Datum]]


def test_sft(policy: Model, rows: Rows, reader: Any, tmp_path: Path) -> None:
    given = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]
    data = rows(given, "demonstrations")
    trainer = SFTTrainer(
        base(), SFTConfig(**options(tmp_path, completion_only_loss=True)),
        train_dataset=texts(reader, given), processing_class=reader, peft_config=lora(),
    )  # fmt: skip
    expected = theirs(trainer, policy.adapter_of("policy"), data)
    for layout in LAYOUTS:
        same(ours(policy, Supervised(), data, layout), expected)
    whole = [replace(d, trained=(False, *(True,) * (len(d.ids) - 1))) for d in data]
    with pytest.raises(AssertionError):  # the prompt is masked
        same(ours(policy, Supervised(), whole, LAYOUTS[0]), expected)


@pytest.mark.long
def test_sft_of_several_turns(policy: Model, rows: Rows, reader: Any, tmp_path: Path) -> None:
    data = rows(TURNS, "demonstrations")
    assert all(sum(a < b for a, b in zip(d.trained, d.trained[1:], strict=False)) == 2
               for d in data)  # fmt: skip
    reader.chat_template = MARKED
    trainer = SFTTrainer(
        base(), SFTConfig(**options(tmp_path, assistant_only_loss=True)),
        train_dataset=Dataset.from_list(TURNS), processing_class=reader, peft_config=lora(),
    )  # fmt: skip
    after = reader.encode("\n")
    ended = [replace(d, ids=(*d.ids, *after), trained=(*d.trained, False)) for d in data]
    expected = theirs(trainer, policy.adapter_of("policy"), ended)
    for layout in LAYOUTS:
        same(ours(policy, Supervised(), data, layout), expected)


DPO = {
    "sigmoid": (resolve("dpo", {"beta": 0.3}), {"loss_type": ["sigmoid"]}),
    "sigmoid and sft": (
        resolve("irpo", {"beta": 0.3, "nll_coefficient": 0.7}),
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7]},
    ),
    "ipo": (resolve("ipo", {"beta": 0.3, "normalize_length": True}), {"loss_type": ["ipo"]}),
    "robust": (
        resolve("rdpo", {"beta": 0.3, "label_smoothing": 0.2}),
        {"loss_type": ["robust"], "label_smoothing": 0.2},
    ),
    "label_smoothing without effect": (
        resolve("dpo", {"beta": 0.3}),
        {"loss_type": ["sigmoid"], "label_smoothing": 0.2},
    ),
}


@pytest.mark.parametrize("reference", most_are_long(["reference", "start"], ["reference"]))
@pytest.mark.parametrize("name", most_are_long(DPO, ["sigmoid", "ipo"]))
def test_dpo(
    policy: Model, rows: Rows, reader: Any, tmp_path: Path, name: str, reference: str
) -> None:
    """Against the base, and against another adapter, of which TRL makes its own copy."""
    row, of_theirs = DPO[name]
    data = rows(PAIRS, "preferences")
    given = texts(reader, PAIRS).remove_columns("margin")
    config = DPOConfig(**options(tmp_path, beta=0.3, **of_theirs))
    if reference == "start":
        started = get_peft_model(base(), lora())
        set_peft_model_state_dict(started, policy.adapter_of("start"))
        trainer = DPOTrainer(started, args=config, train_dataset=given, processing_class=reader)
    else:
        trainer = DPOTrainer(
            base(), args=config, train_dataset=given, processing_class=reader, peft_config=lora()
        )
    expected = theirs(trainer, policy.adapter_of("policy"), sides(data))
    for layout in LAYOUTS:
        same(ours(policy, PairLoss(row=row), data, layout, reference), expected)
    swapped = [data[i ^ 1] for i in range(len(data))]
    with pytest.raises(AssertionError):
        same(ours(policy, PairLoss(row=row), swapped, LAYOUTS[0], reference), expected)


@pytest.mark.long
def test_cdpo(policy: Model, rows: Rows, reader: Any, tmp_path: Path) -> None:
    """A pair at a time by TRL; ours of all of them is the mean."""
    row = resolve("cdpo", {"beta": 0.3, "label_smoothing": 0.2})
    data, adapter = rows(PAIRS, "preferences"), policy.adapter_of("policy")
    config = DPOConfig(**options(tmp_path, beta=0.3, loss_type=["aot"], label_smoothing=0.2))
    given = texts(reader, PAIRS).remove_columns("margin")
    trainer = DPOTrainer(
        base(), args=config, train_dataset=given, processing_class=reader, peft_config=lora()
    )
    pairs = [theirs(trainer, adapter, data[2 * i : 2 * i + 2], [i]) for i in range(NUM_ROWS)]
    mean = sum(loss for loss, _ in pairs) / NUM_ROWS
    gradients = {
        name: torch.stack([found[name] for _, found in pairs]).mean(0) for name in pairs[0][1]
    }
    for layout in LAYOUTS:
        same(ours(policy, PairLoss(row=row), data, layout), (mean, gradients))


def test_kto(policy: Model, rows: Rows, reader: Any, tmp_path: Path) -> None:
    """All rows are one batch of both, so the mismatched rows are the same."""
    data = rows(LABELS, "labels")
    weights = {"desirable_weight": 1.3, "undesirable_weight": 0.8}
    trainer = KTOTrainer(
        base(), args=KTOConfig(**options(tmp_path, beta=0.3, loss_type="kto", **weights)),
        train_dataset=texts(reader, LABELS), processing_class=reader, peft_config=lora(),
    )  # fmt: skip
    expected = theirs(trainer, policy.adapter_of("policy"), data)
    kl = trainer._metrics["train"]["kl"][-1]
    assert kl > 0.01  # else the baseline would not count
    row = resolve("kto", {"beta": 0.3, **weights})
    for layout in LAYOUTS:
        same(ours(policy, Labels(row=row), data, layout), expected)
    turned = [*data[1:], data[0]]  # in another order, each prompt gets another completion
    with pytest.raises(AssertionError):
        same(ours(policy, Labels(row=row), [*turned[::-1]], LAYOUTS[0]), expected)


@pytest.mark.long
def test_orpo(policy: Model, rows: Rows, reader: Any, tmp_path: Path) -> None:
    """TRL's loss is an NLL of prompt and chosen side plus the odds: ours with the chosen sides'
    whole rows as NLL is the same, and so are the odds of both."""
    data, row = rows(PAIRS, "preferences"), resolve("orpo", {"beta": 0.3})
    trainer = ORPOTrainer(
        base(), args=ORPOConfig(**options(tmp_path, beta=0.3)), processing_class=reader,
        train_dataset=texts(reader, PAIRS).remove_columns("margin"), peft_config=lora(),
    )  # fmt: skip
    adapter = policy.adapter_of("policy")
    both = theirs(trainer, adapter)
    whole = [replace(d, trained=(False, *(True,) * (len(d.ids) - 1))) for d in data[::2]]
    odds_alone = PairLoss(row=resolve("orpo", {"beta": 0.3, "nll_coefficient": 0.0}))
    for layout in LAYOUTS:
        odds = ours(policy, odds_alone, data, layout)
        nll = ours(policy, Supervised(), whole, layout)
        sums = {name: odds[1][name] + nll[1][name] for name in odds[1]}
        same((odds[0] + nll[0], sums), both)
        chosen = ours(policy, Supervised(), data[::2], layout)
        sums = {name: odds[1][name] + chosen[1][name] for name in odds[1]}
        same(ours(policy, PairLoss(row=row), data, layout), (odds[0] + chosen[0], sums))


@pytest.mark.parametrize("alpha", most_are_long([0.0, 0.6], [0.6]))
def test_simpo(policy: Model, rows: Rows, reader: Any, tmp_path: Path, alpha: float) -> None:
    data = rows(PAIRS, "preferences")
    trainer = CPOTrainer(
        base(), processing_class=reader, peft_config=lora(),
        args=CPOConfig(**options(
            tmp_path, loss_type="simpo", beta=2.0, simpo_gamma=0.7, cpo_alpha=alpha
        )),
        train_dataset=texts(reader, PAIRS).remove_columns("margin"),
    )  # fmt: skip
    expected = theirs(trainer, policy.adapter_of("policy"))
    row = resolve("simpo", {"beta": 2.0, "margin": 0.7, "nll_coefficient": alpha})
    for layout in LAYOUTS:
        same(ours(policy, PairLoss(row=row), data, layout), expected)


@pytest.mark.parametrize("centering", most_are_long([0.0, 0.05], [0.05]))
@pytest.mark.parametrize("margin", most_are_long([True, False], [True]))
def test_reward(
    tokenizer: Any, rows: Rows, reader: Any, tmp_path: Path, centering: float, margin: bool
) -> None:
    """Bradley-Terry: the gradient of the adapter and of the head, which is not zero here."""
    data = rows(PAIRS, "preferences")
    section = ModelSection(
        path=str(TINY), dtype="float32", adapter=AdapterSection(rank=RANK, alpha=ALPHA)
    )
    scored = AutoModelForSequenceClassification.from_pretrained(
        TINY, num_labels=1, dtype=torch.float32
    )
    given = texts(reader, PAIRS)
    trainer = RewardTrainer(
        scored,
        RewardConfig(**options(tmp_path, center_rewards_coefficient=centering or None)),
        train_dataset=given if margin else given.remove_columns("margin"),
        processing_class=reader, peft_config=lora("SEQ_CLS"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    with Model(section, tokenizer, seed=0) as model:
        model.add_role("policy", head="score")
        for parameter in model.parameters_of("policy"):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
        weight = model.heads["policy"].weight.data
        adapter = model.adapter_of("policy") | {"base_model.model.score.weight": weight}
        expected = theirs(trainer, adapter, sides(data))
        objective = RewardModel(centering=centering)
        plain = [replace(row, reward=0.0) for row in data]
        for layout in LAYOUTS:
            same(ours(model, objective, data if margin else plain, layout), expected)
        if margin:
            with pytest.raises(AssertionError):
                same(ours(model, objective, plain, LAYOUTS[0]), expected)
