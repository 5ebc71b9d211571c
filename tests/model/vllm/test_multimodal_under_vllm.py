"""Text training of models that also read images, of Qwen3.5 saved as a text model and of Granite 4,
over the real vLLM's weights on the CPU.

1. Every weight is vLLM's own and the checkpoint's; sampler and learner agree after a sync.
2. The adapter serves from disk, and the merged model, by vLLM: to the policy.
3. Two steps of GRPO, with NF4; a run that is killed.
4. The check of a card by the shapes of Gemma 4 and Qwen3.5.

vLLM's classes of these models import torchvision and mistral_common, though no image is read. Both
have to be on PYTHONPATH, before them tests/fixtures/torchvision_on_cpu where torch has no CUDA.
"""

import gc
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import families
from conftest import ROOT
from families import SIZES, prompts_of, quiet, randomize
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.export import serving
from reason_llm.app.export.export import ExportRequest, export
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import adapters, layout as layouts
from reason_llm.model.base import Model, check_model, load_tokenizer, meta_base
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.plan.backends import IMPORTING, IMPORTS
from reason_llm.model.plan.shape import Shape
from reason_llm.model.vllm import engine, shared_weights
from reason_llm.model.vllm.engine import EngineSizes
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling

vllm: Any = pytest.importorskip(
    "vllm", reason="the real vLLM is not installed: make test installs it"
)
from vllm.lora.request import LoRARequest  # noqa: E402

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in IMPORTS),
        reason=f"{' or '.join(IMPORTS)} is not installed",
    ),
]

HYBRIDS = ["granitemoehybrid", "granitemoehybrid_experts"]
SHARED = [name for name in families.MULTIMODAL if name not in families.HYBRIDS]


def engine_sizes(section: ModelSection, **options: Any) -> EngineSizes:
    return replace(SIZES, lora_targets=Shape.of(check_model(section)).adapted, **options)


def served(path: Path | str, row: Datum, adapter: Path | None = None) -> torch.Tensor:
    """Log-probs of a row's tokens as vLLM serves them to any user."""
    llm = vllm.LLM(
        model=str(path), dtype="float32", max_model_len=512, max_num_seqs=4, seed=0,
        enable_chunked_prefill=False, kv_cache_memory_bytes=64 << 20, gpu_memory_utilization=0.01,
        enforce_eager=True, enable_prefix_caching=False, language_model_only=True,
        generation_config="vllm", disable_log_stats=True, enable_lora=adapter is not None,
        **({} if adapter is None else {"max_loras": 1, "max_lora_rank": 8}),
    )  # fmt: skip
    request = None if adapter is None else LoRARequest("policy", 1, str(adapter))
    params = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompt = {"prompt_token_ids": row.ids.tolist()}
    (found,) = llm.generate([prompt], params, lora_request=request, use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    engine.forget_configs()
    pairs = zip(found.prompt_logprobs[1:], row.ids[1:], strict=True)
    return torch.tensor([each[token].logprob for each, token in pairs])


def stored(folder: Path | str) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and data types of a checkpoint's tensors, by name."""
    files = (load_file(path) for path in Path(folder).glob("*.safetensors"))
    return {n: (tuple(t.shape), t.dtype) for tensors in files for n, t in tensors.items()}


@pytest.mark.parametrize("name", [*SHARED, *IMPORTING, *HYBRIDS])
def test_the_text_part_is_shared_synced_served_and_merged(name: str, tmp_path: Path) -> None:
    path = families.make(tmp_path / "base", name)
    section = ModelSection(path=path, dtype="float32", adapter=AdapterSection(rank=8, alpha=16))
    tokenizer = load_tokenizer(path)
    with Model(section, tokenizer, 0, engine_sizes(section)) as model:
        assert model.engine is not None
        storages = {p.untyped_storage().data_ptr() for p in model.engine.module.parameters()}
        named = model.policy.named_parameters()
        base = [p for n, p in named if not (p.requires_grad or n.endswith(shared_weights.DECAY))]
        assert all(p.untyped_storage().data_ptr() in storages for p in base)
        randomize(model, seed=1)
        model.sync()
        randomize(model, seed=2)
        long = "What is 3 + 4? " * 16  # beyond the window, and the positions Ministral 3 began with
        with sampling(model, 0) as sampler:
            prompts = prompts_of(tokenizer, long, "Why?")
            prove_sampler_is_policy(sampler, model, prompts)
            rollouts = to_data(sampler.sample(prompts, SamplingParams(4, 24, 0.9), 3, quiet))
        assert max(row.num_tokens for row in rollouts) > 140
        ids_BT, mask_BT = layouts.collate(rollouts, model.device)
        model.policy.eval()
        reported_N = torch.cat([row.on_trained("sampler_logprobs") for row in rollouts])
        layout = layouts.lay_out(rollouts, model.device)
        with torch.no_grad():
            padded_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.9)
            packed_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.9, layout=layout)
            with adapters.reference(model.policy):
                plain_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.9)
            # Stock vLLM drops the growth of Ministral 3's queries (``engine._with_query_scale``).
            row = min(rollouts, key=lambda each: each.num_tokens)
            assert row.num_tokens < 128
            all_1T = torch.ones(1, row.num_tokens, dtype=torch.bool)
            all_1T[0, 0] = False
            own_T, _ = policy_logprobs(model, torch.tensor(row.ids[None]), all_1T, 1.0)
        assert (padded_BT[mask_BT] - reported_N).abs().max() < 1e-5
        assert (packed_BT[mask_BT] - reported_N).abs().max() < 1e-5
        assert (plain_BT[mask_BT] - reported_N).abs().max() > 0.1
        model.snapshot().write(tmp_path / "adapter")
        del sampler, base
    gc.collect()
    own_T = own_T[0, 1:]
    assert (served(path, row, tmp_path / "adapter") - own_T).abs().max() < 1e-5
    request = ExportRequest(
        source=tmp_path / "adapter", out=tmp_path / "out", base=path, adapter_only=False,
        dtype="float32", push=None, gguf=None,
    )  # fmt: skip
    export(request, Console("quiet"))
    assert stored(tmp_path / "out") == stored(path)
    assert (served(tmp_path / "out", row) - own_T).abs().max() < 1e-5


def test_where_keys_are_values_the_other_layers_are_adapted(tmp_path: Path) -> None:
    """As configs/math_gemma-4-12b_48gb.yaml does: global layers of Gemma 4 12B have no v_proj."""
    keys_as_values = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    path = families.make(tmp_path / "base", "gemma4_unified", **keys_as_values)
    described = yaml.safe_load((ROOT / "configs" / "math_gemma-4-12b_48gb.yaml").read_text())
    targets = described["model"]["adapter"]["targets"]
    section = ModelSection(
        path=path, dtype="float32", adapter=AdapterSection(rank=8, alpha=16, targets=targets)
    )
    names = [name for name, _ in meta_base(path, False).named_modules()]
    assert len([name for name in names if name.endswith("v_proj")]) == 1
    tokenizer = load_tokenizer(path)
    with Model(section, tokenizer, 0, engine_sizes(section)) as model:
        randomize(model, seed=1)
        model.sync()
        with sampling(model, 0) as sampler:
            prompts = prompts_of(tokenizer, "What is 3 + 4? " * 16, "Why?")
            found = prove_sampler_is_policy(sampler, model, prompts)
        assert found["sample/canary_difference_max"] < 1e-5


def test_an_exported_adapter_is_proven_by_vllm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under other names vLLM 0.32 serves the base without a word; once it does not, their refusal
    can go."""
    path = families.make(tmp_path / "base", "qwen3_vl")
    section = ModelSection(path=path, dtype="float32", adapter=AdapterSection(rank=8, alpha=16))
    with Model(section, load_tokenizer(path), 0) as model:
        randomize(model, seed=1)
        model.snapshot().write(tmp_path / "adapter")
    request = ExportRequest(
        source=tmp_path / "adapter", out=tmp_path / "out", base=path, adapter_only=True,
        dtype="float32", push=None, gguf=None,
    )  # fmt: skip
    export(request, Console("plain"))
    found = re.search(
        r"vLLM serves the adapter: .* max ([\d.]+), mean .* nats over", capsys.readouterr().out
    )
    assert found is not None and float(found[1]) > 0.1
    file = tmp_path / "adapter" / adapters.WEIGHTS
    renamed = {n.replace(".language_model.", "."): t for n, t in load_file(file).items()}
    save_file(renamed, file)
    with pytest.raises(ModelError, match=r"vLLM serves .* without the adapter: every log-prob is"):
        serving.prove(Path(path), tmp_path / "adapter", load_tokenizer(path))


@pytest.mark.parametrize("name", [*SHARED, *HYBRIDS])
def test_two_steps_of_grpo(name: str, small_run: Callable[..., Config], tmp_path: Path) -> None:
    """In NF4 where the weights can be packed: every packed byte is what quantising the checkpoint
    gives (``verify``, at the start)."""
    is_packed = name not in ("qwen3_5_moe", "granitemoehybrid_experts")
    dtype = torch.bfloat16 if is_packed else torch.float32
    model = {"path": families.make(tmp_path / "base", name, dtype), "dtype": "auto",
             "quantize": "nf4" if is_packed else "none", "context_tokens": 256,
             "adapter": {"rank": 4}}  # fmt: skip
    reward = tmp_path / "mine.py"
    reward.write_text("def mine(token_ids):\n    return sum(token_ids) % 7 / 7\n")
    config = small_run(
        model=model,
        run__steps=2,
        sample__engine="vllm",
        sample__max_new_tokens=8,
        score__rewards=[{"custom": f"{reward}:mine"}],
    )
    training.run_training(config, Console("quiet"))
    gc.collect()
    records = metrics.read(tmp_path / "runs" / "small")[1:]
    assert [record["step"] for record in records] == [1, 2]
    most = 0.5 if is_packed else 1e-4
    assert all(record["sample/canary_difference_max"] < most for record in records)
    assert all(record["train/grad_norm"] > 0 for record in records)


@pytest.mark.parametrize("name", [*SHARED, *HYBRIDS])
def test_a_run_that_is_killed_resumes_from_its_buffer(
    name: str, tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    path = families.make(tmp_path / "base", name)
    families.killed_and_resumed(tmp_path, path, script, "--sample.engine", "vllm")


@pytest.mark.parametrize("shape", ["gemma4-tiny", "qwen3.5-tiny"])
def test_the_check_of_a_card_by_a_shape(shape: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "benchmark.py"),
        "gpu-check",
        "--shape",
        shape,
    ]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stdout + shown.stderr[-2000:]
    lines = shown.stdout.splitlines()
    assert lines[-1].startswith("10 ok, ") and lines[-1].endswith(", 0 FAILS")
    assert any("ok       learner, rows end to end proven" in line for line in lines)
