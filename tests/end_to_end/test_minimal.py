"""The examples on one page, and the numbers of ``docs/method.md``, which follows the first step of
``examples/minimal.py``."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import dpo
import minimal
import sft
from reason_llm import load_config
from reason_llm.data import load_data
from reason_llm.model import Datum, Model, collate, load_tokenizer, policy_logprobs
from reason_llm.rollout import Completion

PAGE = Path("docs/method.md").read_text()
ROWS = re.findall(r"^\| \d \| `(.+?)` \| (\d) \| (-?[\d.]+) \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(
    ("steps", "least"), [(2, 0.3), pytest.param(minimal.STEPS, 0.8, marks=pytest.mark.long)]
)
def test_the_example_learns_to_add_from_a_third_on(steps: int, least: float) -> None:
    assert minimal.train(load_config("configs/quickstart.yaml"), steps) >= least


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "config", "least"), [(sft, "sft_tiny", 0.9), (dpo, "preference_tiny", 0.45)]
)
def test_the_examples_of_rows_learn_to_add(example: ModuleType, config: str, least: float) -> None:
    assert example.train(load_config(f"configs/{config}.yaml")) >= least


def test_the_loss_of_sft_is_the_mean_over_the_tokens_of_all_rows() -> None:
    config = load_config("configs/sft_tiny.yaml")
    tokenizer = load_tokenizer(config.model.path)
    answers = [tokenizer.encode(text) for text in ("146", "<think>1+2=3</think><answer>3</answer>")]
    rows = [Datum.of(tokenizer.encode("What is 1 + 2?"), each) for each in answers]
    with Model(config.model, tokenizer, seed=0) as model:
        optimizer = torch.optim.SGD(model.parameters_of("policy"), lr=0.0)
        together = sft.learn(model, optimizer, rows)
        apart = [sft.learn(model, optimizer, [row]) * row.num_trained for row in rows]
    assert together == pytest.approx(sum(apart) / sum(row.num_trained for row in rows), rel=1e-4)


def test_dpo_has_no_lead_before_its_first_step_and_one_after_it() -> None:
    config = load_config("configs/preference_tiny.yaml")
    tokenizer = load_tokenizer(config.model.path)
    prompt, right, wrong = map(tokenizer.encode, ("What is 1 + 2?", "<answer>3", "<answer>4"))
    pair = Datum.of(prompt, right), Datum.of(prompt, wrong)
    with Model(config.model, tokenizer, seed=0) as model:
        optimizer = torch.optim.SGD(model.parameters_of("policy"), lr=0.1)
        pairs = dpo.with_reference(model, [pair])
        before = dpo.log_ratios(model, [pair]).item() - pairs[0][2]
        dpo.learn(model, optimizer, pairs)
        after = dpo.log_ratios(model, [pair]).item() - pairs[0][2]
    assert before == pytest.approx(0, abs=1e-5)
    assert after > 1e-4


def test_the_pages_advantages_and_gradients_are_those_of_its_rewards() -> None:
    rewards_N = torch.tensor([float(reward) for _, reward, _ in ROWS])
    advantages_N = minimal.group_advantages(rewards_N, minimal.G, scale="group")
    assert [f"{value:.4f}" for value in advantages_N.tolist()] == [told for _, _, told in ROWS]
    of_a_wrong_one, of_the_right_one = (-advantages_N[[0, 3]] / (20 * 256)).tolist()
    assert f"{of_a_wrong_one:.7f} " in PAGE and f"{of_the_right_one:.7f}\n" in PAGE
    assert 3 * of_a_wrong_one == pytest.approx(-of_the_right_one)


def test_the_pages_rollouts_and_probabilities_are_those_of_the_tiny_model() -> None:
    config = load_config("configs/quickstart.yaml")
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_data(config, tokenizer, context_tokens=128).prompts
    prompt = next(each for each in prompts if "21 + 62?" in each.text)
    assert len(prompt.token_ids) == 18 and prompt.text.replace("\n", "⏎") in PAGE
    with Model(config.model, tokenizer, seed=0) as model:
        end = tokenizer.eos_token_id
        ids = [[*tokenizer.encode(text), end] for text, _, _ in ROWS]
        assert [len(each) for each in ids] == [20] * 4
        data = [Datum.of(prompt.token_ids, each) for each in ids]
        ids_BT, mask_BT = collate(data, model.device)
        with torch.no_grad():
            logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)
    for (text, reward, _), each in zip(ROWS, ids, strict=True):
        completion = Completion(text=text, token_ids=tuple(each), logprobs=(), finish_reason="stop")
        assert minimal.reward(prompt, completion) == float(reward)
    place = next(t for t in range(20) if ids[0][t] != ids[3][t])
    own_BT = logprobs_BT[mask_BT].view(4, 20)
    told = [float(each) for each in re.search(r"log-prob \| (\S+) \| (\S+)", PAGE).groups()]
    assert own_BT[[0, 3], place].tolist() == pytest.approx(told, abs=0.002)
    sums = [float(each) for each in re.findall(r"from (-\d\.\d\d) to", PAGE)]
    assert [own_BT[3].sum().item(), own_BT[0].sum().item()] == pytest.approx(sums, abs=0.01)


def test_the_readme_shows_what_the_tiny_model_answers() -> None:
    readme = Path("README.md").read_text()
    config = load_config("configs/quickstart.yaml")
    tokenizer = load_tokenizer(config.model.path)
    held_out = load_data(config, tokenizer, context_tokens=128).held_out_prompts
    question = re.search(r"^    (What is \d+ \+ \d+\?)$", readme, re.MULTILINE)[1]
    prompt = next(each for each in held_out if question in each.text)
    with Model(config.model, tokenizer, seed=0) as model:
        (group,) = minimal.sample(model, [prompt], minimal.GREEDY, seed=0)
    assert f"before   {group.completions[0].text}\n" in readme
    after = re.search(r"^    after    .*<answer>(\d+)</answer>$", readme, re.MULTILINE)
    assert after[1] == prompt.answer
