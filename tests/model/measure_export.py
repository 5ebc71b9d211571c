"""Not a test: what merging a random model of 200 M parameters costs and loses. Minutes on one core.

    python tests/model/measure_export.py FOLDER

FOLDER takes 2 GiB. Prints name=value lines: the gap of the log-probs between the export and base
with adapter, in Transformers and as the real vLLM reports them, for float32 and bfloat16; and the
peak memory that merging alone added. tests/model/test_merging.py and
tests/end_to_end/test_export_script.py hold the same for small models.
"""

import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

TINY = Path(__file__).resolve().parents[2] / "model" / "tiny"
MERGE = """
import resource, sys, time
from pathlib import Path
import torch
from reason_llm.model.plan import Meter
from reason_llm.model import merging
base, adapter, out = map(Path, sys.argv[1:4])
out.mkdir()
meter = Meter(torch.device("cpu"))
with meter.phase() as before:
    pass
started = time.perf_counter()
with meter.phase() as peak:
    merging.merge(base, adapter, out, getattr(torch, sys.argv[4]), 100 * 2**20)
print(f"added_mib={1024 * (peak.gib - before.gib):.0f}")
print(f"seconds={time.perf_counter() - started:.1f}")
"""


def make_base(folder: Path, dtype: torch.dtype) -> None:
    """12 layers of width 1024 and a vocabulary of 32,000, tied, random."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=config.hidden_size**-0.5)
    print(f"parameters={model.num_parameters()}")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())


def make_adapter(base: Path, folder: Path) -> None:
    """Rank 16 on every linear layer; it changes log-probs by tenths."""
    model = AutoModelForCausalLM.from_pretrained(base)
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    policy = get_peft_model(model, lora)
    for name, parameter in policy.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.002)
    policy.save_pretrained(folder)


def measure(folder: Path, dtype: str) -> None:
    """One dtype, its base in the same."""
    from reason_llm.app.export import parity
    from reason_llm.config import AdapterSection, ModelSection
    from reason_llm.model.base import Model, load_tokenizer
    from reason_llm.model.datum import to_data
    from reason_llm.model.vllm.engine import EngineSizes
    from reason_llm.rollout import Prompt
    from reason_llm.sample import SamplingParams, sampling

    kind = getattr(torch, dtype)
    base, adapter, out = (folder / f"{name}_{dtype}" for name in ("base", "adapter", "out"))
    make_base(base, kind)
    make_adapter(base, adapter)
    shown = subprocess.run(
        [sys.executable, "-c", MERGE, base, adapter, out, dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    print(f"{dtype}_merge: {' '.join(shown.stdout.split())}")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (out / name).write_bytes((base / name).read_bytes())
    sizes = EngineSizes(context_tokens=256, kv_cache_bytes=256 << 20, max_sequences=16, lora_rank=8)
    section = ModelSection(path=str(out), dtype=dtype, adapter=AdapterSection(rank=8))  # type: ignore[arg-type]
    prompts = [Prompt(str(i), "", tuple(range(10 * i + 3, 10 * i + 23)), "") for i in range(8)]
    with Model(section, load_tokenizer(str(out)), 0, sizes) as model:
        with sampling(model, 0) as sampler:
            groups = sampler.sample(prompts, SamplingParams(2, 48), 0, lambda tokens, items: None)
        del sampler
    rollouts = to_data(groups)
    found = parity.check_parity(base, adapter, out, rollouts, kind, 1.0)
    reported_N = torch.cat([rollout.on_trained("sampler_logprobs") for rollout in rollouts])
    policy = parity.adapters.over(parity.load(base, kind), adapter)
    of_vllm = parity.Gap.between(reported_N, parity.logprobs(policy, rollouts, 1.0))
    print(f"{dtype}_transformers: {found.gap}")
    print(f"{dtype}_vllm: {of_vllm}")
    print(f"{dtype}_learned: {found.learned}; lost {found.lost:.2%} +- {found.lost_error:.2%}")


if __name__ == "__main__":
    for dtype in ("float32", "bfloat16"):
        measure(Path(sys.argv[1]), dtype)
