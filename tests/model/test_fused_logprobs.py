"""The log-prob chunk in one kernel.

1. In Triton's interpreter its log-probs, entropies and gradients are the eager chunk's.
2. Where it cannot run it is refused in one line.
3. The plan counts less memory for it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_folder
from reason_llm.config import Config
from reason_llm.errors import ConfigError
from reason_llm.model.logprobs import chunk_bytes
from reason_llm.model.plan import backends

SCRIPT = Path(__file__).parents[1] / "fixtures" / "interpreted_logprobs.py"


@pytest.mark.long
def test_the_kernel_computes_what_the_passes_do() -> None:
    """For NaN no difference is small."""
    found = triton_folder.environment()
    if found is None:
        pytest.skip("Triton is not installed: make long installs it")
    environment = {**os.environ, **found, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment
    )
    assert shown.returncode == 0, shown.stderr[-3000:]
    cases = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(cases) == 96
    for each in cases:
        logprobs, entropies, gradients = each["errors"]
        assert logprobs < 1e-6, each
        assert entropies < 1e-4, each
        assert gradients < (1e-4 if each["dtype"] == "torch.float32" else 2e-2), each


def chosen(device: str, targets: list[str] | None = None) -> None:
    options: dict[str, Any] = {
        "data": {"train": "x"},
        "model": {"path": "x", "adapter": {"targets": targets or "all-linear"}},
        "train": {"fused_logprobs": True},
    }
    backends._check_fused(Config.model_validate(options), torch.device(device))


def test_where_it_cannot_run_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"train.fused_logprobs=true: .* on a GPU.*; set it to f"):
        chosen("cpu")
    monkeypatch.setattr(backends, "_is_installed", lambda name: False)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        chosen("cuda")
    monkeypatch.setattr(backends, "_is_installed", lambda name: True)
    with pytest.raises(ConfigError, match="has the head"):
        chosen("cuda", ["q_proj", "lm_head"])
    chosen("cuda", ["q_proj"])


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("softcap", [False, True])
def test_the_plan_counts_less(element_bytes: int, softcap: bool) -> None:
    eager = chunk_bytes(1000, element_bytes, softcap)
    assert chunk_bytes(1000, element_bytes, softcap, fused=True) <= eager
    assert chunk_bytes(1000, 2, softcap, fused=True) == 4000
