"""What a run's identity holds of its base and of an adapter over it."""

from pathlib import Path

import pytest

from reason_llm.run.store.folder import weights_digest


@pytest.mark.parametrize(
    "name", ["model.safetensors", "more.safetensors", "pytorch_model.bin", "config.json"]
)
def test_any_other_weight_or_config_is_another_digest(name: str, tmp_path: Path) -> None:
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
        for each in (
            "config.json",
            "model.safetensors",
            "pytorch_model.bin",
            "adapter_config.json",
        ):
            (folder / each).write_bytes(each.encode())
    known = {weights_digest(str(model)), weights_digest(str(model), adapter)}
    assert len(known) == 2
    (model / "README.md").write_bytes(b"")
    assert weights_digest(str(model)) in known
    for folder in (model, adapter):
        before = (folder / name).read_bytes() if (folder / name).exists() else b""
        (folder / name).write_bytes(before + b"x")
        known.add(weights_digest(str(model), adapter))
    assert len(known) == 4
    (adapter / "adapter_config.json").write_bytes(b"{}")
    assert weights_digest(str(model), adapter) not in known
