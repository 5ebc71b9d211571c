"""Proof that vLLM serves an exported adapter: log-probs of a few texts with and without it, from
another process, because one that has started vLLM keeps its memory.

Only for models whose layers have other names in vLLM than in Transformers: vLLM 0.31 silently
serves the base if no name of the adapter is a layer's.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file

from reason_llm.app.export.parity import Gap
from reason_llm.errors import ModelError, one_line
from reason_llm.files import regular
from reason_llm.model import adapters, base, families, multimodal, tokenizer as model_tokenizer
from reason_llm.model.plan import backends

MAX_SECONDS = 600
MAX_BYTES_ON_CPU = 4 << 30
"""Largest weights that are tried without a GPU."""
PROGRAM = "reason_llm.model.vllm.served"


def prove(base_folder: Path, adapter: Path, tokenizer: Any) -> str | None:
    """A line on the adapter's effect under vLLM, or on why it is not proven; None if the layers
    have the same names in vLLM. Raises a ModelError if vLLM serves the base instead."""
    described = base.read_config(str(base_folder))
    if not multimodal.is_multimodal(described) and described.model_type not in backends.IMPORTING:
        return None
    if (why_not := _why_not(base_folder, adapter, described)) is None:
        texts = [
            tokenizer.encode(text, add_special_tokens=False) for text in model_tokenizer.PROBES
        ]
        try:
            gap = _measure(base_folder, adapter, texts)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            why_not = one_line(error)[:300]
        else:
            if gap.largest == 0:
                raise ModelError(
                    f"vLLM serves {base_folder} without the adapter: every log-prob is the base's; "
                    "nothing was written; export it merged, without --adapter-only"
                )
            return f"vLLM serves the adapter: its effect on log-probs is {gap}"
    return f"that vLLM serves the adapter is not proven: {why_not}"


def _why_not(base_folder: Path, adapter: Path, described: Any) -> str | None:
    """Reason not to try."""
    factors = load_file(regular(adapter / adapters.WEIGHTS))
    if not any(bool(factor.any()) for name, factor in factors.items() if ".lora_B." in name):
        return "it is untrained and changes nothing"
    family = described.get_text_config(decoder=True).model_type
    if family in families.WITHOUT_VLLM:
        return families.WITHOUT_VLLM[family]
    if not backends.is_installed("vllm"):
        return "vLLM is not installed"
    if missing := backends.missing_imports(described):
        return f"vLLM's class of this model imports {missing}, which is not installed"
    size = sum(file.stat().st_size for file in base_folder.glob("*.safetensors"))
    if torch.cuda.is_available():
        room = torch.cuda.mem_get_info()[0] - 3 * 2**30  # of libraries and graphs
    else:
        size *= 2  # in float32
        room = MAX_BYTES_ON_CPU
    if size > room:
        where = "free on the GPU" if torch.cuda.is_available() else "tried without a GPU"
        return f"its base takes {size / 2**30:.1f} GiB, and {room / 2**30:.1f} GiB is {where}"
    return None


def _measure(base_folder: Path, adapter: Path, texts: list[list[int]]) -> Gap:
    job = orjson.dumps([str(base_folder), str(adapter), texts])
    process = subprocess.run(
        [sys.executable, "-m", PROGRAM], input=job, capture_output=True, timeout=MAX_SECONDS
    )
    lines = process.stdout.splitlines()
    if process.returncode != 0 or not lines:
        errors = process.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(errors[-1] if errors else f"vLLM ended with {process.returncode}")
    with_adapter, without = orjson.loads(lines[-1])
    return Gap.between(torch.tensor(with_adapter), torch.tensor(without))
