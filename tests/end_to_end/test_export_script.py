"""scripts/export.py: what is taken home says what the run's policy says, in Transformers and in
vLLM; a wrong merge never appears; to the Hub only when asked."""

import base64
import importlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import orjson
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT, TINY, small_config
from marks import most_are_long
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.export import merging, parity
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.data.templates import shipped
from reason_llm.errors import ModelError, WriteError
from reason_llm.model import adapters
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.vllm.engine import EngineSizes
from reason_llm.rollout import Prompt
from reason_llm.run.store.document import read_document
from reason_llm.run.store.folder import find_adapter
from reason_llm.sample import SamplingParams, sampling

Call = Callable[..., tuple[int, str, str]]
exporting: Any = importlib.import_module("reason_llm.app.export.export")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of three steps that changes its policy a lot."""
    folder = tmp_path_factory.mktemp("exported")
    config = small_config(
        folder, run__name="sums", sample__prompts_per_step=8, train__learning_rate=3e-3,
        data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"), eval__limit=16,
    )  # fmt: skip
    training.run_training(config, Console("quiet"))
    return folder / "runs" / "sums"


@pytest.fixture
def call(script: Call) -> Call:
    return partial(script, "export.py")


def policy_of(run: Path, dtype: torch.dtype) -> Any:
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype)
    return PeftModel.from_pretrained(base, run / "adapter").eval()


def rollouts_of(run: Path) -> list[Datum]:
    return to_data(read_document(run.parent.parent / "buffer.json").groups)


@pytest.mark.parametrize(
    ("dtype", "most"),
    most_are_long([("float32", 1e-4), ("bfloat16", 2.0)], [("float32", 1e-4)]),
)
def test_the_export_is_the_policy(
    call: Call, run: Path, tmp_path: Path, dtype: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sums"
    monkeypatch.setattr(merging, "SHARD_BYTES", 2**20)
    code, shown, error = call(run, "--out", out, "--dtype", dtype)
    assert (code, error) == (0, "")
    kind = getattr(torch, dtype)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert exported.dtype == kind
    assert len(list(out.glob("model-*.safetensors"))) > 1
    rollouts = rollouts_of(run)
    ours = parity.logprobs(exported, rollouts, 1.0)
    gap = parity.Gap.between(ours, parity.logprobs(policy_of(run, kind), rollouts, 1.0))
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=kind)
    learned = parity.Gap.between(ours, parity.logprobs(base, rollouts, 1.0))
    assert gap.largest < most
    assert learned.mean > 10 * gap.mean
    assert f"log-prob difference to base plus adapter in {dtype}: max" in shown
    assert "effect of the adapter: max" in shown
    assert f"{dtype} rounding changed the learned effect by " in shown
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    mine, theirs = (AutoTokenizer.from_pretrained(path) for path in (out, TINY))
    assert mine.apply_chat_template(question) == theirs.apply_chat_template(question)
    generation = (out / "generation_config.json").read_bytes()
    assert generation == (TINY / "generation_config.json").read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # vLLM warns of deprecations in what it imports
def test_vllm_loads_the_export_and_says_the_same(call: Call, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    out = tmp_path / "sums"
    assert call(run, "--out", out, "--dtype", "float32")[0] == 0
    sizes = EngineSizes(context_tokens=256, kv_cache_bytes=64 << 20, max_sequences=16, lora_rank=8)
    section = ModelSection(path=str(out), dtype="float32", adapter=AdapterSection(rank=8))
    prompts = [
        Prompt(rollout.name, "", rollout.prompt_ids, "") for rollout in rollouts_of(run)[::4]
    ]
    with Model(section, load_tokenizer(str(out)), 0, sizes) as model:
        with sampling(model, 0) as sampler:
            groups = sampler.sample(prompts, SamplingParams(2, 32), 0, lambda tokens, items: None)
        del sampler
    rollouts = to_data(groups)
    theirs = torch.cat([rollout.on_trained("sampler_logprobs") for rollout in rollouts])
    ours = parity.logprobs(policy_of(run, torch.float32), rollouts, 1.0)
    assert len(ours) > 200
    assert parity.Gap.between(theirs, ours).largest < 1e-4


def test_a_head_that_learned_is_exported_apart_from_the_embedding(
    call: Call, tmp_path: Path, small_run: Callable[..., Config]
) -> None:
    """Trained, gone on with from its checkpoint, merged, and loaded by Transformers."""
    options = {"model__adapter": {"rank": 8, "targets": ["down_proj", "lm_head"]},
               "train__learning_rate": 1e-2}  # fmt: skip
    training.run_training(small_run(run__steps=1, **options), Console("quiet"))
    training.run_training(small_run(run__steps=2, **options), Console("quiet"))
    run, out = tmp_path / "runs" / "small", tmp_path / "out"
    assert load_file(run / "adapter" / "adapter_model.safetensors").keys() == {
        f"base_model.model.{name}.lora_{factor}.weight"
        for name in ("lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(4)))
        for factor in "AB"
    }
    code, shown, error = call(run, "--out", out, "--dtype", "float32")
    assert (code, error) == (0, "")
    assert "effect of the adapter: max" in shown
    exported, base = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (out, TINY)
    )
    embedding = exported.get_input_embeddings().weight
    assert torch.equal(embedding, base.get_input_embeddings().weight)
    assert (exported.get_output_embeddings().weight - embedding).abs().max() > 1e-3
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(
            exported(input_ids=ids).logits,
            adapters.over(base, run / "adapter")(input_ids=ids).logits,
        )


@pytest.mark.parametrize("template", ["auto", "plain_chat"])
def test_the_export_is_prompted_as_in_training(
    call: Call, run: Path, tmp_path: Path, template: str
) -> None:
    """By the template of data.template, even where the base has its own."""
    other, out = shutil.copytree(run, tmp_path / "run"), tmp_path / "out"
    tree = yaml.safe_load((other / "resolved_config.yaml").read_text())
    tree["data"]["template"] = template
    (other / "resolved_config.yaml").write_text(yaml.safe_dump(tree))
    assert call(other, "--out", out, "--adapter-only")[0] == 0
    own = AutoTokenizer.from_pretrained(TINY).chat_template
    expected = shipped()["chat_templates"].get(template, own)
    assert AutoTokenizer.from_pretrained(out).chat_template == expected
    assert (expected == own) == (template == "auto")


CONVERTER = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument('model', type=pathlib.Path)
parser.add_argument('--outfile', type=pathlib.Path)
parser.add_argument('--outtype', choices=['f32', 'f16', 'bf16', 'q8_0', 'auto'])
args = parser.parse_args()
assert (args.model / 'model.safetensors').is_file()
assert (args.model / 'tokenizer.model').read_bytes() == b'pieces'
args.outfile.write_bytes(b'GGUF' + args.outtype.encode())
"""
"""A stand-in for llama.cpp's script, which is not on PyPI: it is called as that one is, and reads
Gemma's vocabulary from SentencePiece's own file."""


def test_the_adapter_alone(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in of the Hub, which is asked before anything is written."""
    out, asked, hub = tmp_path / "adapter", list[Any](), Mock()
    hub.whoami.side_effect = lambda: asked.append(out.exists())
    hub.create_repo.return_value = "https://hub/me/sums"
    monkeypatch.setattr(exporting, "HfApi", lambda: hub)
    code, shown, error = call(run, "--out", out, "--adapter-only", "--push", "me/sums")
    assert (code, error, asked) == (0, "", [False])
    assert "pushed to https://hub/me/sums\n" in shown
    hub.create_repo.assert_called_once_with("me/sums", private=True, exist_ok=True)
    hub.upload_folder.assert_called_once_with(
        folder_path=str(out), repo_id="me/sums", commit_message="Exported model"
    )
    hub.upload_folder.side_effect = OSError("no network")
    with pytest.raises(WriteError, match=r"--push a/b failed \(no network\); the export in out is"):
        exporting._push(Path("out"), "a/b")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ours = parity.logprobs(PeftModel.from_pretrained(model, out), rollouts_of(run), 1.0)
    assert torch.equal(ours, parity.logprobs(policy_of(run, torch.float32), rollouts_of(run), 1.0))
    assert not list(out.glob("model*.safetensors"))
    card = (out / "README.md").read_text()
    assert "PeftModel.from_pretrained" in card
    options = "--enable-lora --max-lora-rank 8 --lora-modules adapter=me/sums"
    assert f"\n```bash\nvllm serve {TINY} {options}\n```\n" in card
    # And exported again, from itself, and converted: there are no rollouts, so some are sampled.
    base = shutil.copytree(TINY, tmp_path / "base")
    (base / "tokenizer.model").write_bytes(b"pieces")
    (converter := tmp_path / "convert.py").write_text(CONVERTER)
    merged = tmp_path / "merged"
    more = ("--base", base, "--gguf", converter, "--dtype", "float32")
    code, shown, error = call(out, "--out", merged, *more)
    assert (code, error) == (0, "")
    assert (merged / "merged-f32.gguf").read_bytes() == b"GGUFf32"
    assert f"converted to {merged}/merged-f32.gguf (not compared" in shown
    assert "not quantised: llama-quantize of llama.cpp is not on PATH" in shown
    assert (merged / "Modelfile").read_text().startswith("FROM ./merged-f32.gguf\nTEMPLATE")
    assert "the parity check samples new ones" in shown


def test_the_card_tells_what_is_known(call: Call, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "sums"
    base = shutil.copytree(TINY, tmp_path / "base")
    assert call(run, "--out", out, "--base", base)[0] == 0
    text = (out / "README.md").read_text()
    summary = orjson.loads((run / "summary.json").read_bytes())
    assert "license" not in yaml.safe_load(text.split("---")[1])
    assert "licence of the base applies" in text
    for part in (
        "arithmetic_train.jsonl",
        "grpo: advantages normalised",
        "arXiv:2402.03300",
        "think_answer_tags * 1",
        "steps: 3 of 3 planned; 8 prompts",
        "curves.png",
        f"held-out accuracy {summary['accuracy_before']:.1%} -> ",
        "parity",
    ):
        assert part.lower() in text.lower(), part
    assert (out / "curves.png").read_bytes() == (run / "curves.png").read_bytes()


def test_the_card_is_of_the_adapter_that_is_exported(call: Call, run: Path, tmp_path: Path) -> None:
    """Not of an earlier end, from which the run went on."""
    gone_on = shutil.copytree(run, tmp_path / "run")
    out = ["--out", tmp_path / "then", "--adapter-only"]
    assert call(gone_on, *out)[0] == 0
    card = (tmp_path / "then" / "README.md").read_text()
    assert "- steps: 3 of 3 planned" in card
    assert "- held-out accuracy" in card
    _, _, config = (gone_on / "resolved_config.yaml").read_text().partition("\n")  # its digest
    (gone_on / "resolved_config.yaml").write_text(config.replace("steps: 3", "steps: 9"))
    newer = shutil.copytree(run / "adapter", gone_on / "checkpoints" / "step-00000005")
    state = load_file(newer / "adapter_model.safetensors")
    save_file({k: 2 * v for k, v in state.items()}, newer / "adapter_model.safetensors")
    (newer / "digests.json").unlink()
    shutil.copytree(newer, gone_on / "checkpoints" / "step-00000004.0002")
    code, shown, _ = call(gone_on, "--out", tmp_path / "now", "--adapter-only")
    assert code == 0
    assert f"exported {newer} over" in shown
    card = (tmp_path / "now" / "README.md").read_text()
    assert "- steps: 5 of 9 planned" in card
    assert "Not evaluated" in card
    shutil.rmtree(
        newer
    )  # the run's end is again as far as it got: a part of a step is no checkpoint
    assert find_adapter(gone_on) == gone_on / "adapter"


def wrong_sign(update: merging.Update, weight: torch.Tensor) -> torch.Tensor:
    return replace(update, scale=-update.scale).right(weight)  # type: ignore[attr-defined]


def left_out(update: merging.Update, weight: torch.Tensor) -> torch.Tensor:
    return weight.float()


@pytest.mark.parametrize("wrong", [wrong_sign, left_out])
def test_a_wrong_merge_never_appears(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    monkeypatch.setattr(merging.Update, "right", merging.Update.added_to, raising=False)
    monkeypatch.setattr(merging.Update, "added_to", wrong)
    code, _, error = call(run, "--out", tmp_path / "out", "--dtype", "float32")
    assert code == 2
    assert "the export" in error
    assert "nothing was written" in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("theirs", [1, None])
def test_what_ended_an_answer_in_training_ends_one_of_the_export(
    call: Call, run: Path, tmp_path: Path, theirs: int | None
) -> None:
    """The tokenizer's end, which the base's generation config may not name."""
    base = shutil.copytree(TINY, tmp_path / "base")
    if theirs is None:
        (base / "generation_config.json").unlink()
    name = "config.json" if theirs is None else "generation_config.json"
    config = orjson.loads((base / name).read_bytes()) | {"eos_token_id": theirs}
    (base / name).write_bytes(orjson.dumps(config))
    assert call(run, "--out", tmp_path / "out", "--base", base)[0] == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert found.eos_token_id == ([2] if theirs is None else [1, 2])
    assert found.pad_token_id == 0


def test_a_check_that_cannot_tell_says_so(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter whose effect drowns in rounding: without it the export looks the same."""
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")
    state = load_file(adapter / "adapter_model.safetensors")
    save_file({k: 0.002 * v for k, v in state.items()}, adapter / "adapter_model.safetensors")
    (adapter / "digests.json").unlink()
    told = "the check cannot tell whether the adapter was merged"
    assert told not in call(run, "--out", tmp_path / "sums")[1]
    monkeypatch.setattr(merging.Update, "added_to", left_out)
    code, shown, _ = call(adapter, "--out", tmp_path / "small")
    assert code == 0
    assert told in shown and "try --dtype float32" in shown


def test_the_wrong_base_is_told_by_the_rollouts(call: Call, run: Path, tmp_path: Path) -> None:
    base = shutil.copytree(TINY, tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(base)
    code, _, error = call(run, "--out", tmp_path / "out", "--base", base)
    assert code == 2
    assert "less likely under the export than when they were sampled" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["load", "logprobs"])
def test_a_check_that_does_not_fit_is_one_line(
    place: str, call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    owner: Any = AutoModelForCausalLM if place == "load" else torch.Tensor
    monkeypatch.setattr(owner, "from_pretrained" if place == "load" else "log_softmax", full)
    code, _, error = call(run, "--out", tmp_path / "out")
    assert code == 2
    assert "the parity check does not fit on the GPU" in error
    assert not (tmp_path / "out").exists()


def test_the_check_itself() -> None:
    gap = parity.Gap(100, 1e-5, 1e-6)
    good = parity.Parity(gap, gap, 0.0, 0.1, 0.01)
    good.check(torch.float32)
    good.check(torch.bfloat16)
    for bad in (
        replace(good, gap=parity.Gap(100, 2e-4, 1e-6)),
        replace(good, gap=parity.Gap(100, 1e-5, 2e-5)),
        replace(good, gap=parity.Gap(100, float("nan"), float("nan"))),
        replace(good, lost=1.0),
        replace(good, lost=-1.0),
        replace(good, strayed=0.6),
        replace(good, strayed=float("nan")),
    ):
        with pytest.raises(ModelError, match="nothing was written"):
            bad.check(torch.float32)
    replace(good, lost=1.0, lost_error=0.3).check(torch.float32)  # within its error
    coarse = replace(good, gap=parity.Gap(100, 2.0, 0.1), lost_error=0.125, strayed=0.5)
    for dtype, at_most in ((torch.bfloat16, coarse), (torch.float32, replace(coarse, gap=gap))):
        for lost in (1.0, -1.0):
            replace(at_most, lost=lost).check(dtype)
            with pytest.raises(
                ModelError, match=f"has lost {lost * 1.1:.0%} of .*{str(dtype)[6:]}"
            ):
                replace(at_most, lost=lost * 1.1).check(dtype)
    tells = [replace(good, lost_error=error).tells_a_wrong_merge for error in (0.12, 0.125, 0.13)]
    assert tells == [True, False, False]


def test_what_was_trained_over_nf4_is_merged_into_the_base(
    call: Call, run: Path, tmp_path: Path
) -> None:
    packed = shutil.copytree(run, tmp_path / "packed")
    tree = yaml.safe_load((packed / "resolved_config.yaml").read_text())
    tree["model"] |= {"quantize": "nf4", "dtype": "auto"}
    (packed / "resolved_config.yaml").write_text(yaml.safe_dump(tree))
    outs = [tmp_path / "of_nf4", tmp_path / "plain"]
    code, _, error = call(packed, "--out", outs[0])
    assert (code, error) == (0, "")
    assert call(run, "--out", outs[1])[0] == 0
    files = [out / "model.safetensors" for out in outs]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "in NF4 (QLoRA)" in (outs[0] / "README.md").read_text()


TOKEN = "hf_" + "s" * 34


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's API as an upload of small files takes."""

    files: dict[str, bytes]
    created: list[dict[str, Any]]

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path.startswith("/api/whoami-v2"):
            self.answer({"name": "me", "type": "user"})
        else:
            self.answer({"id": "me/sums", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            self.created.append(json.loads(body))
            self.answer({"url": f"http://{self.headers['Host']}/me/sums", "id": "me/sums"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            self.answer(
                {
                    "files": [
                        {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for each in asked
                    ]
                }
            )
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            url = f"http://{self.headers['Host']}/me/sums/commit/0"
            self.answer({"commitUrl": url, "commitOid": "0" * 40, "success": True})
        else:  # the card's header, checked by the Hub
            self.answer({"errors": [], "warnings": []})


@contextmanager
def hub() -> Iterator[tuple[str, type[Hub]]]:
    handler = type("OneHub", (Hub,), {"files": {}, "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.long
def test_pushed_to_the_hub_when_asked(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is what HF_ENDPOINT sets when huggingface_hub is imported."""
    out, asked = tmp_path / "sums", ["--push", "me/sums", "--adapter-only"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()  # or it would still be one that is offline
    with hub() as (endpoint, server):
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        code, shown, error = call(run, "--out", out, *asked)
        assert code == 0, error
        monkeypatch.setenv("HF_TOKEN", "hf_wrong" + "x" * 29)
        code, _, refused = call(run, "--out", tmp_path / "other", *asked)
    cut_code, _, cut = call(run, "--out", tmp_path / "other", *asked)  # nobody listens any more
    huggingface_hub.close_session()
    assert (cut_code, cut.count("\n")) == (2, 1)
    assert "leave --push out" in cut
    (created,) = server.created
    assert (created["name"], created["visibility"]) == ("sums", "private")
    assert server.files == {file.name: file.read_bytes() for file in out.iterdir()}
    assert "README.md" in server.files
    assert TOKEN not in shown + error
    assert not any(TOKEN.encode() in content for content in server.files.values())
    assert code == 2
    assert "--push me/sums: the Hub does not let you in" in refused
    assert refused.count("\n") == 1
    assert "hf_wrong" not in refused
    assert not (tmp_path / "other").exists()


def occupied(folder: Path) -> Path:
    folder.mkdir()
    (folder / "mine.txt").write_text("do not touch")
    return folder


CASES: dict[str, tuple[Callable[[Path, Path], list[Any]], list[str]]] = {
    "nothing": (lambda run, f: [], ["there is nothing to export", "--out"]),
    "no place": (lambda run, f: [run], ["--out FOLDER"]),
    "no run": (lambda run, f: [f / "no", "--out", f / "out"], ["neither a run's folder nor"]),
    "no type": (lambda run, f: [run, "--out", f / "out", "--dtype", "int4"], ["int4", "bfloat16"]),
    "no option": (lambda run, f: [run, "--out", f / "out", "--shard", "1"], ["--shard"]),
    "a folder in use": (lambda run, f: [run, "--out", occupied(f / "out")], ["is not empty"]),
    "no converter": (
        lambda run, f: [run, "--out", f / "out", "--gguf"],
        ["convert_hf_to_gguf.py", "llama.cpp"],
    ),
    "no converter there": (
        lambda run, f: [run, "--out", f / "out", "--gguf", f / "no.py"],
        ["no.py", "llama.cpp"],
    ),
    "gguf of an adapter": (
        lambda run, f: [run, "--out", f / "out", "--gguf", "--adapter-only"],
        ["--gguf contradicts --adapter-only"],
    ),
    "type of an adapter": (
        lambda run, f: [run, "--out", f / "out", "--dtype", "float32", "--adapter-only"],
        ["--dtype contradicts --adapter-only"],
    ),
    "no base": (lambda run, f: [run, "--out", f / "out", "--base", f / "no"], ["--base"]),
    "offline": (
        lambda run, f: [run, "--out", f / "out", "--push", "me/sums"],
        ["--push me/sums", "leave --push out"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_changes(name: str, call: Call, run: Path, tmp_path: Path) -> None:
    arguments, named = CASES[name]
    listed = arguments(run, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, _, error = call(*listed)
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for part in named:
        assert part in error
    assert sorted(tmp_path.rglob("*")) == before
