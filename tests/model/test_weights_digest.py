"""What a run's identity holds of its base and of an adapter over it."""

import json
from pathlib import Path

import pytest

from reason_llm.errors import ModelError
from reason_llm.files import replacing_folder
from reason_llm.model import Model, adapters, digests
from reason_llm.model.digests import weights_digest


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
            (folder / each).write_bytes(f'{{"of": "{each}"}}'.encode())
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
    with pytest.raises(ModelError, match=r"model has a file that cannot be read .*restore it"):
        weights_digest(str(model))


def test_the_order_of_an_adapters_layers_is_no_other_adapter(tmp_path: Path) -> None:
    found = []
    for number, config in enumerate((
        {"r": 4, "target_modules": ["k", "q"], "peft_version": "0.20"},
        {"r": 4, "target_modules": ["q", "k"], "base_model_name_or_path": "moved"},
        {"r": 8, "target_modules": ["k", "q"]},
        {"r": 4, "target_modules": ["k", "v"]},
        {"r": 4, "target_modules": ["k", "q"], "lora_alpha": 2},
    )):  # fmt: skip
        adapter = tmp_path / str(number)
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        found.append(weights_digest("some/model", adapter))
    assert found[0] == found[1] and len(set(found)) == 4


def test_a_folder_that_is_not_as_written_has_another_digest(tmp_path: Path) -> None:
    """That it has digests changes nothing; those who load it compare them."""
    folder = tmp_path / "model"
    with replacing_folder(folder) as beside:
        (beside / "model.safetensors").write_bytes(b"weights")
    whole = weights_digest(str(folder))
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert weights_digest(str(folder)) != whole
    (folder / "model.safetensors").write_bytes(b"weights")
    assert weights_digest(str(folder)) == whole
    (folder / "digests.json").unlink()
    assert weights_digest(str(folder)) == whole


def test_an_adapter_is_written_alike_under_any_hash_seed(model: Model, tmp_path: Path) -> None:
    """PEFT holds the names of the layers in a set."""
    adapters.snapshot(model.policy).write(tmp_path)
    names = json.loads((tmp_path / "adapter_config.json").read_bytes())["target_modules"]
    assert len(names) == 7 and names == sorted(names)


def test_of_a_model_on_the_hub_the_commit_in_the_cache_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for commit in (None, "a", "b"):
        path = None if commit is None else Path(commit) / "config.json"
        monkeypatch.setattr(digests, "cached", lambda model, name, path=path: path)
        found += [weights_digest("some/model"), weights_digest("another/model")]
    assert len(set(found)) == 6
