"""What ends and begins again: a second engine in the same process, and the whole run from a shell.

1. A second engine after the first is closed, awake or asleep.
2. The quick start with vLLM learns.
"""

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import torch

from conftest import ROOT
from gpu_runs import NEEDS_GPU, quiet, randomize, stage
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("asleep", [False, True])
def test_a_second_engine_after_the_first_is_closed(half_billion: str, asleep: bool) -> None:
    free = []
    for _ in range(2):
        with stage(half_billion) as run:
            randomize(run.model, seed=1)
            with sampling(run.model, 0) as sampler:
                prove_sampler_is_policy(sampler, run.model, run.prompts)
                sampler.sample(run.prompts, SamplingParams(2, 16), 0, quiet)
            if asleep:
                run.engine.release()
            del run, sampler
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    print(f"free after the first {free[0]:,}, after the second {free[1]:,} bytes")
    assert free[1] > free[0] - 2**30, "an engine leaves its memory behind"


def test_the_quick_start_with_vllm_learns(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--sample.engine", "vllm",
               "--run.directory", str(tmp_path / "runs"), "--run.buffer",
               str(tmp_path / "buffer.json"), "--run.name", "quickstart"]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert shown.returncode == 0, shown.stderr[-3000:]
    print(shown.stdout[-2000:])
    summary = orjson.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_bytes())
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.1
