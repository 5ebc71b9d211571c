"""gpt-oss in MXFP4, as it is published, written in bfloat16 by the export."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

import families
from reason_llm.app.console import Console
from reason_llm.app.export import merging
from reason_llm.app.export.export import ExportRequest, export
from reason_llm.config import ModelSection
from reason_llm.errors import ConfigError, ModelError
from reason_llm.model.base import check_model

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(folder: Path) -> Path:
    """A random model in the published layout: of the experts blocks of 32 numbers of four bits,
    two a byte, and a power of two for each."""
    path = Path(families.make(folder, "gpt_oss", torch.bfloat16))
    stored = load_file(path / "model.safetensors")
    for name in [each for each in stored if ".experts." in each and each.endswith("_proj")]:
        rows = stored.pop(name).float().transpose(1, 2)
        rows = rows.reshape(*rows.shape[:2], -1, 32)
        power = torch.floor(torch.log2(rows.abs().amax(-1).clamp(min=1e-8))) - 2
        code = ((rows / power.exp2()[..., None])[..., None] - VALUES).abs().argmin(-1).byte()
        stored[f"{name}_blocks"] = code[..., ::2] | (code[..., 1::2] << 4)
        stored[f"{name}_scales"] = (power + 127).byte()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    left = [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ]
    kind = {"quant_method": "mxfp4", "modules_to_not_convert": left}
    families.changed(path, quantization_config=kind)
    return path


def test_its_numbers_are_those_that_transformers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = packed(tmp_path / "packed")
    monkeypatch.setattr(merging, "SHARD_BYTES", 2**17)
    with pytest.raises(ModelError, match=r"by mxfp4.*; write them in bfloat16 once"):
        check_model(ModelSection(path=str(source)))
    request = ExportRequest(
        source=source, out=tmp_path / "out", base=None, adapter_only=False, dtype="bfloat16",
        push=None, gguf=None,
    )  # fmt: skip
    assert export(request, Console("quiet")) is None
    expected = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    assert len([*request.out.glob("*.safetensors")]) > 1
    found = AutoModelForCausalLM.from_pretrained(request.out, dtype=torch.bfloat16).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())
    assert any(each.abs().max() > 0 for name, each in found.items() if "experts" in name)
    check_model(ModelSection(path=str(request.out)))  # with its tokenizer and generation config
    assert {file.name for file in source.iterdir()} <= {
        *(file.name for file in request.out.iterdir()), "model.safetensors",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"--adapter-only contradicts .*a model in MXFP4"):
        export(replace(request, out=tmp_path / "no", adapter_only=True), Console("quiet"))


def test_blocks_without_their_scales_are_one_line(tmp_path: Path) -> None:
    source = packed(tmp_path / "packed")
    file = source / "model.safetensors"
    stored = {n: each for n, each in load_file(file).items() if not n.endswith("down_proj_scales")}
    save_file(stored, file, metadata={"format": "pt"})
    request = ExportRequest(
        source=source, out=tmp_path / "out", base=None, adapter_only=False, dtype="bfloat16",
        push=None, gguf=None,
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"down_proj_blocks has no scales; download"):
        export(request, Console("quiet"))
    assert not request.out.exists()
    assert json.loads((source / "config.json").read_text())["quantization_config"]
