"""Resident memory of a learner over vLLM's weights, and beside a copy; run in a process of its own.

measure_sharing.py FOLDER        makes a 210 M-parameter model there and prints name=value lines
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config

from reason_llm.config import AdapterSection
from reason_llm.model import adapters
from reason_llm.model.base import read_config
from reason_llm.model.vllm import engine, shared_weights
from reason_llm.model.vllm.adapter_sync import AdapterSync
from reason_llm.model.vllm.engine import EngineSizes

TINY = Path(__file__).resolve().parents[2] / "model" / "tiny"


def resident_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def make(folder: Path) -> int:
    """A random model of about 210 M parameters; how many bytes its weights take."""
    config = Qwen2Config(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=13,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return sum(p.numel() * p.element_size() for p in model.parameters())


def train_once(policy: torch.nn.Module) -> None:
    policy(input_ids=torch.arange(3, 35)[None]).logits.float().logsumexp(-1).sum().backward()


class Written(TorchDispatchMode):
    """Counts the elements that torch's operations write; views write none."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(out, torch.Tensor):
            self.elements += out.numel()
        return out


def main(folder: Path) -> None:
    weights = make(folder)
    adapter = AdapterSection(rank=10, alpha=20)
    started = engine.start(str(folder), torch.float32, EngineSizes(128, 64 << 20, 4, 16), seed=0)
    loaded = resident_mib()
    shared = shared_weights.model_over(started, read_config(str(folder)), torch.float32)
    policy = adapters.attach(shared, adapter)
    sync = AdapterSync(started, policy)
    train_once(policy)
    shared = resident_mib()
    with Written() as written:
        sync()
    copied_before = resident_mib()
    copy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    train_once(adapters.attach(copy, adapter))
    copied = resident_mib()
    print(f"weights_mib={weights / 2**20:.0f}")
    print(f"added_mib={shared - loaded:.0f}")
    print(f"added_by_a_copy_mib={copied - copied_before:.0f}")
    lora = {name: p.numel() for name, p in policy.named_parameters() if p.requires_grad}
    print(f"lora_parameters={sum(lora.values())}")
    print(f"lora_b_parameters={sum(n for name, n in lora.items() if 'lora_B' in name)}")
    print(f"written_by_a_sync={written.elements}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
