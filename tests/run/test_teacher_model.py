"""A teacher that is a model of its own (teacher.model).

1. It reads the rollouts as Transformers alone would, in full and in NF4, with its own prompt too.
2. The base in its place teaches as the base itself does, to the bit.
3. What does not fit is one line, before a weight is read.
4. It is planned with the bytes that it has: on a GPU in the scoring phase alone.
5. On the device it is another set of tensors; afterwards the ones that were loaded.
6. An evaluation does without it.
7. kill -9 in its phase or after it, and the run goes on to the same adapter (long).
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reason_llm
from conftest import ROOT, TINY
from reason_llm.config import Config, ModelSection, file as config_file
from reason_llm.errors import ConfigError, ModelError
from reason_llm.loop import train
from reason_llm.model import Datum, Model, load_tokenizer, meta_model, nf4, offload
from reason_llm.model.plan import GIB, Machine, memory, outside_models
from reason_llm.model.plan.shape import Shape
from reason_llm.run import SILENT
from reason_llm.run.opening import open_run
from reason_llm.run.start.prepare import prepare

Small = Callable[..., Config]
OPD: dict[str, Any] = {"algorithm": {"name": "opd"}, "sample__completions_per_prompt": 1}


def teacher(folder: Path, layers: int = 2) -> Path:
    """Another model of fewer layers, with the tiny model's tokenizer."""
    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    kept = {
        k: v for k, v in weights.items() if ".layers." not in k or int(k.split(".")[2]) < layers
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("quantize", ["none", pytest.param("nf4", marks=pytest.mark.long)])
def test_it_reads_rollouts_as_transformers_alone_does(
    quantize: str, small_run: Small, tmp_path: Path
) -> None:
    folder = teacher(tmp_path / "teacher")
    hint = "{prompt} It is {answer}."
    told = {"model": str(folder), "quantize": quantize, "prompt": hint}
    job = prepare(small_run(**OPD, teacher=told, run__steps=1, sample__temperature=0.7), SILENT)
    prompts = [prompt.token_ids for prompt in job.data.prompts[:2]]
    data = [
        Datum.of(ids, answer, columns={"sampler_logprobs": [-1.0] * len(answer)})
        for ids, answer in zip(prompts, [(5, 6, 2), (7, 8, 9, 10, 2)], strict=True)
    ]
    with open_run(job, SILENT) as run:
        seen = run.read(data)
        assert run.phases.record["memory/scoring_peak_gib"] >= 0
        learned = run.learners.policy.prepared(seen)
    options: dict[str, Any] = {"dtype": torch.float32}
    if quantize == "nf4":
        options = {"quantization_config": nf4.config_for(torch.float32)}
    plain = AutoModelForCausalLM.from_pretrained(folder, **options)
    if quantize == "nf4":
        nf4.keep_layouts(plain, torch.float32)
    for row, ids, after in zip(seen, prompts, learned, strict=True):
        answer = row.ids[len(ids) :]
        asked = [*job.data.reader_prompts["teacher"][ids], *answer]
        with torch.no_grad():
            logits = plain(torch.tensor([asked])).logits[0, -len(answer) - 1 : -1].float()
        wanted = (logits / 0.7).log_softmax(-1)[range(len(answer)), list(answer)]
        close = {"atol": 1e-4, "rtol": 1e-4} if quantize == "none" else {"atol": 0.05, "rtol": 0.02}
        torch.testing.assert_close(row.on_trained("teacher_logprobs"), wanted, **close)
        assert tuple(row.ids) == (*ids, *answer)  # the student's own prompt
        assert torch.equal(after.on_trained("teacher_logprobs"), row.on_trained("teacher_logprobs"))
        ratio = after.on_trained("teacher_logprobs") - after.on_trained("old_logprobs")
        assert float(ratio.abs().max()) > 0.01
        torch.testing.assert_close(after.on_trained("advantages"), ratio)


def test_the_base_in_its_place_teaches_as_the_base_does(small_run: Small, tmp_path: Path) -> None:
    """Padded as it is, where the learner packs its rows: so the learner pads here, too."""
    options = OPD | {"run__steps": 1, "train__packing": "padded", "sample__max_new_tokens": 8}
    found = []
    for name, given in (("base", {}), ("model", {"model": str(TINY)})):
        told = {"prompt": "{prompt} It is {answer}."} | given
        train(small_run(**options, teacher=told, run__name=name))
        found.append(load_file(tmp_path / "runs" / name / "adapter" / "adapter_model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert any(tensor.any() for name, tensor in found[1].items() if "lora_B" in name)


def _other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tree = json.loads(path.read_text())
    vocabulary = tree["model"]["vocab"]
    one, two = list(vocabulary)[100:102]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    path.write_text(json.dumps(tree))


def _fewer_ids(folder: Path) -> None:
    path = folder / "model.safetensors"
    config = json.loads((folder / "config.json").read_text())
    size = config["vocab_size"] - 1
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    names = ("embed_tokens", "lm_head")
    save_file({k: v[:size].clone() if any(n in k for n in names) else v
               for k, v in load_file(path).items()}, path)  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_other_tokenizer, r"teacher\.model=\S+ has another tokenizer than model\.path="),
        (_fewer_ids, r"teacher\.model=\S+ has \d+ token ids and model\.path=\S+ may write"),
        (shutil.rmtree, r"teacher\.model=\S+ does not exist"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), r"model\.safetensors"),
    ],
)
def test_a_teacher_that_does_not_fit_is_one_line(
    spoil: Callable[[Path], Any], said: str, small_run: Small, tmp_path: Path
) -> None:
    folder = teacher(tmp_path / "teacher")
    spoil(folder)
    with pytest.raises(ModelError, match=said) as told:
        prepare(small_run(**OPD, teacher={"model": str(folder)}), SILENT)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_it_is_planned_with_the_bytes_that_it_has(
    quantize: str, small_run: Small, tmp_path: Path
) -> None:
    told = {"model": str(teacher(tmp_path / "teacher")), "quantize": quantize}
    config = small_run(**OPD, teacher=told, sample__engine="transformers")
    section = config.reader_models["teacher"]
    assert section is not None
    with Model(section, load_tokenizer(section.path), 0) as model:
        base = [(h, t) for h, _, t in offload._places(model.policy) if not _is_adapter(model, h)]
        held = sum(tensor.nbytes for _, tensor in base)
    shape = Shape.of(meta_model(config.model))
    for kind in ("cpu", "cuda"):
        machine = Machine(kind, 8 * GIB, 64 * GIB)
        outside = [*outside_models(config, machine)]
        plan = memory.plan(config, shape, machine, 128, 18, outside=outside)
        (line,) = (line for line in plan.lines if line.name.startswith("teacher"))
        if kind == "cpu":
            assert (line.sampling, line.learning) == (line.scoring,) * 2
            assert line.scoring == pytest.approx(held, rel=0.03)
        else:
            assert (line.sampling, line.learning) == (0, 0)
            assert plan.host_bytes == memory.HOST_BYTES + line.scoring
    machine, large = Machine("cuda", 2 * GIB, 64 * GIB), wide(tmp_path).path
    outside = [*outside_models(config.with_options({"teacher.model": large}), machine)]
    with pytest.raises(ConfigError, match=r"scoring needs .*(teacher|while it reads)"):
        memory.plan(config, shape, machine, 128, 18, outside=outside)


def _is_adapter(model: Model, holder: Any) -> bool:
    return any(holder is p for n, p in model.policy.named_parameters() if ".lora_" in n)


def wide(folder: Path) -> ModelSection:
    path = teacher(folder / "wide")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 1 << 20}))
    return ModelSection(path=str(path))


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_on_the_device_it_is_other_tensors(
    quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = ModelSection(path=str(teacher(tmp_path / "teacher")), quantize=quantize)
    with Model(section, load_tokenizer(section.path), 0) as model, torch.no_grad():

        def places() -> list[int]:
            return [tensor.data_ptr() for _, _, tensor in offload._places(model.policy)]

        ids = torch.tensor([[1, 2, 3, 4]])
        before, wanted = places(), model.hidden_states(ids)
        packed = [m for m in model.policy.modules() if isinstance(m, nf4.Linear4bit)]
        assert len(packed) == (14 if quantize == "nf4" else 0)
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "to", lambda tensor, device: tensor.clone())
            moved = offload.on_device(model.policy, torch.device("cpu"), "it")
            with pytest.raises(ZeroDivisionError), moved:
                assert not set(places()) & set(before)
                patched.undo()
                assert torch.equal(model.hidden_states(ids), wanted)
                raise ZeroDivisionError
        assert places() == before
        assert torch.equal(model.hidden_states(ids), wanted)


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_adapter(
    tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    """Killed as the teacher reads and as the policy learns; of weights that have changed it is
    told."""
    folder = teacher(tmp_path / "teacher")
    quick_start, steps = str(ROOT / "configs" / "quickstart.yaml"), ("--run.steps", "2")
    options = ["--sample.prompts_per_step", "4", "--run.keep_buffers_gib", "0",
               "--sample.completions_per_prompt", "2", "--sample.max_new_tokens", "12",
               "--run.directory", str(tmp_path / "runs"), "--model.adapter.dropout", "0.1",
               "--algorithm.name", "opd", "--teacher.model", str(folder), "--eval.every", "0",
               "--teacher.quantize", "nf4", "--log.console", "plain"]  # fmt: skip

    def given(name: str, *more: str) -> list[str]:
        buffer = str(tmp_path / f"{name}.json")
        return [quick_start, *options, "--run.name", name, "--run.buffer", buffer, *more]

    def adapter(name: str) -> bytes:
        code, _, error = script("train.py", *given(name, *steps))
        assert code == 0, error
        path = tmp_path / "runs" / name / "adapter" / "adapter_model.safetensors"
        return path.read_bytes()

    die_at = str(ROOT / "tests" / "fixtures" / "die_at.py")
    for place, count in (
        ("reason_llm.readers.teacher:policy_logprobs", "2"),
        ("reason_llm.train.learner:Learner._update", "1"),
    ):
        command = [sys.executable, die_at, place, count, *given("killed", *steps)]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == -9, ended.stderr
    assert adapter("killed") == adapter("whole")
    path = folder / "model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)
    code, _, error = script("train.py", *given("killed", "--run.steps", "3"))
    assert (code, "teacher.model_sha256" in error) == (2, True)


def test_an_evaluation_needs_no_teacher(small_run: Small, tmp_path: Path) -> None:
    told = {"model": str(tmp_path / "gone")}
    path = tmp_path / "distill.yaml"
    path.write_text(config_file.to_yaml(small_run(**OPD, teacher=told)))
    found = reason_llm.evaluate(
        path,
        sets=[f"sums={ROOT / 'data' / 'arithmetic_test.jsonl'}"],
        out=tmp_path / "evaluated",
        overrides={"eval.limit": 1, "log.console": "quiet"},
    )
    assert set(found["models"]) == {"base"}
    with pytest.raises(ModelError, match=r"teacher\.model=.*gone"):
        reason_llm.train(path)
