"""A run that folds its adapter into the base weights, killed within the sampling phase."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TINY, small_config, tree_of
from reason_llm.config.file import to_yaml
from reason_llm.run.store import metrics


@pytest.mark.faults
def test_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    """As with Transformers: vLLM on a CPU samples the same tokens again."""
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    paths = {name: tmp_path / f"{name}.yaml" for name in ("killed", "whole")}
    for name, path in paths.items():
        config = small_config(
            tmp_path / name, run__steps=2, sample__engine="vllm", sample__fold=True
        )
        path.write_text(to_yaml(config))
    model = tree_of(TINY)
    place = ["reason_llm.model.vllm.folding:Folding._unfold", "4"]  # a canary in each phase
    order = [str(paths[name]) for name in ("killed", "killed", "whole")]
    program = Path(__file__).parents[1] / "fixtures" / "forked_runs.py"
    command = [sys.executable, str(program), *place, *order]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stdout.split() == ["-9", "0", "0"], ended.stderr
    killed, whole = (tmp_path / name / "runs" / "small" for name in paths)
    assert [record["step"] for record in metrics.read(killed)] == [0, 1, 2]
    first, second = (f / "adapter" / "adapter_model.safetensors" for f in (killed, whole))
    assert first.read_bytes() == second.read_bytes()
    assert tree_of(TINY) == model
