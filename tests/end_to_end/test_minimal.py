"""``examples/minimal.py`` and the numbers of ``docs/method.md``, which follows its first step."""

import re
from pathlib import Path

import pytest
import torch

import minimal
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
