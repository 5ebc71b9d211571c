"""Families of their own kind train: the real loop, log-probs, checkpoint and export."""

import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

import families
from conftest import ROOT
from marks import most_are_long
from reason_llm.app.console import Console
from reason_llm.app.export.export import ExportRequest, export
from reason_llm.app.training import run_training
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import adapters, attention, layout as layouts
from reason_llm.model.base import Model, load_tokenizer, meta_model
from reason_llm.model.datum import to_data
from reason_llm.model.families import WITHOUT_VLLM
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, sampling

pytestmark = pytest.mark.filterwarnings("default")  # PEFT warns of Conv1D


@pytest.mark.long
@pytest.mark.parametrize("name", [*families.OLDER, *families.TODAY, *families.MULTIMODAL])
def test_three_steps_and_an_export(
    name: str, small_run: Callable[..., Config], tmp_path: Path
) -> None:
    path = families.make(tmp_path / "base", name)
    adapter = {"rank": 4}
    options = {"path": path, "dtype": "float32", "context_tokens": 256, "adapter": adapter}
    reward = tmp_path / "mine.py"
    reward.write_text("def mine(token_ids):\n    return sum(token_ids) % 7 / 7\n")
    config = small_run(
        model=options,
        sample__max_new_tokens=8,
        train__learning_rate=1e-2,
        score__rewards=[{"custom": f"{reward}:mine"}],
    )
    run_training(config, Console("quiet"))
    run = config.run.directory / "small"
    records = metrics.read(run)
    assert [record["step"] for record in records][-1] == 3
    learned = [record for record in records if record["step"]]
    assert all(0 < record["train/grad_norm"] < math.inf for record in learned)
    loader = AutoModelForImageTextToText if name in families.MULTIMODAL else AutoModelForCausalLM
    base = loader.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        policy = PeftModel.from_pretrained(base, str(run / "adapter"))
        expected = policy(input_ids=ids).logits
    assert f"= {loader.__name__}.from_pretrained" in (run / "adapter" / "README.md").read_text()
    export(request(run, tmp_path / "out"), Console("quiet"))
    exported = loader.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert f"{loader.__name__}.from_pretrained" in (tmp_path / "out" / "README.md").read_text()
    with torch.no_grad():
        found = exported(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-4
    assert (expected - plain).abs().max() > 1e-3


def request(run: Path, out: Path) -> ExportRequest:
    return ExportRequest(
        source=run,
        out=out,
        base=None,
        adapter_only=False,
        dtype="float32",
        push=None,
        gguf=None,
    )


ROWS = re.findall(
    r"^\|.*\| `(\w+)` \| (yes|no) \| (yes|no) \| (yes|no) \|$",
    (ROOT / "docs" / "configs.md").read_text(),
    re.MULTILINE,
)


def test_the_table_of_families_is_what_the_code_does(tmp_path: Path) -> None:
    """And each family of it is run somewhere: here, or under vLLM."""
    known = {*families.OLDER, *families.TODAY, *(family for family, *_ in families.FAMILIES)}
    known |= families.MULTIMODAL.keys()
    assert {row[0] for row in ROWS} == known - {
        "falcon_new",
        "falcon_alibi",
        "granitemoehybrid_experts",
        "mistral3_24",
    }
    for name, *told in ROWS:
        text = CONFIG_MAPPING[name]().get_text_config(decoder=True)
        section = ModelSection(path=str(tmp_path / name), quantize="nf4")
        if name not in families.OLDER | families.TODAY | families.MULTIMODAL:
            families.make_model(tmp_path / name, name, False, "float32")
        else:
            families.make(tmp_path / name, name)
        is_packed = attention.unfit(text, torch.float32, torch.device("cpu")) is None
        found = [text.model_type not in WITHOUT_VLLM, is_packed, True]
        try:
            meta_model(section)
        except ModelError as error:
            assert "model.quantize=nf4" in str(error)
            found[2] = False
        assert told == ["yes" if each else "no" for each in found], name


@pytest.mark.parametrize("name", most_are_long(families.MIXTURES, ["qwen3_moe"]))
def test_adapters_on_experts_learn_and_are_what_samples(name: str, tmp_path: Path) -> None:
    """The policy's gradient reaches each kind of weight, one step along it makes the tokens more
    likely, the sampler gives the learner's log-probs, and PEFT loads what was saved."""
    path = families.make(tmp_path / "base", name)
    experts = ("experts.gate_up_proj", "experts.down_proj")
    adapter = AdapterSection(rank=4, target_parameters=experts)
    section = ModelSection(path=path, dtype="float32", context_tokens=256, adapter=adapter)
    tokenizer = load_tokenizer(path)
    with Model(section, tokenizer, seed=0) as model:
        families.randomize(model, 1)
        prompts = families.prompts_of(tokenizer, "What is 3 + 4?", "Why?")
        with sampling(model, 10**6) as sampler:
            groups = sampler.sample(prompts, SamplingParams(4, 24, 0.9), 3, families.quiet)
        rollouts = to_data(groups)
        ids, mask = layouts.collate(rollouts, model.device)
        logprobs, _ = policy_logprobs(model, ids, mask, 0.9)
        reported = torch.cat([r.on_trained("sampler_logprobs") for r in rollouts])
        assert (logprobs[mask] - reported).abs().max() < 5e-5
        logprobs[mask].sum().backward()
        of_experts = [p for n, p in model.policy.named_parameters() if ".experts." in n]
        adapted = [p for p in of_experts if p.requires_grad]
        assert len(adapted) == 2 * 2 * 2  # layers, weights, factors
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in adapted)
        with torch.no_grad():
            for parameter in adapted:
                parameter += 1e-4 * parameter.grad  # type: ignore[operator]
            model.policy.eval()
            after, _ = policy_logprobs(model, ids, mask, 0.9)
            assert after[mask].sum() > logprobs[mask].sum()
            expected = model.policy(input_ids=ids).logits
            with adapters.reference(model.policy):
                plain = model.policy.get_base_model()(input_ids=ids).logits
        adapters.snapshot(model.policy).write(tmp_path / "adapter")
        read = adapters.read_config(tmp_path / "adapter")
        assert sorted(read.target_parameters or ()) == sorted(experts)
    again = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if name == "gpt_oss" else None
    )
    with torch.no_grad():
        assert (again(input_ids=ids).logits - plain).abs().max() < 1e-4
        found = PeftModel.from_pretrained(again, str(tmp_path / "adapter"))(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-4
    assert (expected - plain).abs().max() > 1e-2


def test_names_that_peft_takes_for_experts_are_refused(tmp_path: Path) -> None:
    path = families.make(tmp_path / "base", "qwen3_moe", mlp_only_layers=[0])
    adapter = AdapterSection(rank=4, targets=["q_proj", "gate_proj", "up_proj"])
    with pytest.raises(ModelError, match="PEFT takes such names for the experts' gate_up_proj"):
        meta_model(ModelSection(path=path, adapter=adapter))
    dropping = AdapterSection(target_parameters=("experts.down_proj",), dropout=0.1)
    with pytest.raises(ModelError, match=r"model\.adapter\.dropout=0\.1 contradicts"):
        meta_model(ModelSection(path=path, adapter=dropping))
    policy = meta_model(ModelSection(path=path))  # all-linear: the attention
    lines = [n for n, m in policy.named_modules() if isinstance(m, LoraLayer)]
    assert {name.rpartition(".")[2] for name in lines} == {"q_proj", "k_proj", "v_proj", "o_proj"}


HEADS = [*families.OLDER, "granite", "cohere2", "gemma3"]
"""Families with heads of all kinds: tied, scaled, with a bias; that of ``gemma4_unified`` is
capped."""


@pytest.mark.parametrize(
    ("name", "target"),
    most_are_long(
        [
            *product([*families.OLDER, *families.TODAY, *families.MULTIMODAL], ["all-linear"]),
            *product([*HEADS, "gemma4_unified"], ["lm_head"]),
        ],
        [*product(HEADS, ["all-linear", "lm_head"])],
    ),
)
def test_chunked_log_probs_are_those_of_full_logits(name: str, target: str, tmp_path: Path) -> None:
    targets = [target] if target == "lm_head" else target
    path = families.make(tmp_path / "base", name, attention_dropout=0.1)
    loader = AutoModelForImageTextToText if name in families.MULTIMODAL else AutoModelForCausalLM
    section = ModelSection(
        path=path, dtype="float32", adapter=AdapterSection(rank=4, targets=targets)
    )
    with Model(section, load_tokenizer(path), seed=0) as model:
        for parameter in model.policy.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.2)
        model.policy.train()  # as while learning: the base's own dropout must not count
        ids_BT = torch.randint(3, 512, (2, 40))
        ids_BT[(ids_BT >= 300) & (ids_BT < 304)] = 7  # the whole class replaces images' tokens
        mask_BT = torch.ones(2, 40, dtype=torch.bool)
        mask_BT[:, 0] = False
        with torch.no_grad():
            found_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.7, chunk_tokens=7)
            model.policy.eval()
            logits_BTV = model.policy(input_ids=ids_BT).logits / 0.7
        expected_BT = logits_BTV.log_softmax(-1)[:, :-1].gather(-1, ids_BT[:, 1:, None])[..., 0]
        assert (found_BT[:, 1:] - expected_BT).abs().max() < 1e-5
        adapters.snapshot(model.policy).write(tmp_path / "adapter")
        again = loader.from_pretrained(path, dtype=torch.float32)
        reloaded = adapters.over(again, tmp_path / "adapter").eval()
        with torch.no_grad():
            theirs = reloaded(input_ids=ids_BT).logits / 0.7
        assert (theirs - logits_BTV).abs().max() < 1e-5
