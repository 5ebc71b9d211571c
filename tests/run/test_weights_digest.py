"""What a run's identity holds of its base and of an adapter over it."""

from pathlib import Path

import pytest

from reason_llm.errors import ModelError
from reason_llm.run.store import folder as run_folder
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
    (model / "x.bin").mkdir()
    with pytest.raises(ModelError, match=r"model has weights that cannot be read .*restore them"):
        weights_digest(str(model))


def test_of_a_model_on_the_hub_the_commit_in_the_cache_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for commit in (None, "a", "b"):
        path = None if commit is None else Path(commit) / "config.json"
        monkeypatch.setattr(run_folder, "cached", lambda model, name, path=path: path)
        found += [weights_digest("some/model"), weights_digest("another/model")]
    assert len(set(found)) == 6
