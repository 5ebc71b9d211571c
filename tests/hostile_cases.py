"""Bad input that somebody made on purpose, or a disk damaged: how it is made, what must be said.

Each case spoils a folder that holds config.yaml and rows.jsonl, and gives arguments to call with.
"""

import gzip
import os
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson

from conftest import TINY

Case = tuple[Callable[[Path], list[str]], list[str]]


def config(text: str | bytes) -> Callable[[Path], list[str]]:
    """The config is this text."""

    def spoil(folder: Path) -> list[str]:
        (folder / "config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
        return []

    return spoil


def option(*arguments: str) -> Callable[[Path], list[str]]:
    """These arguments; FOLDER stands for the folder."""
    return lambda folder: [each.replace("FOLDER", str(folder)) for each in arguments]


def data(name: str, content: bytes | Callable[[Path], object]) -> Callable[[Path], list[str]]:
    """The training data is a file of this name with this content, or made by this function."""

    def spoil(folder: Path) -> list[str]:
        path = folder / name
        path.unlink(missing_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
        return ["--data.train", str(path)]

    return spoil


def file(name: str, content: bytes | Callable[[Path], object], *arguments: str) -> Any:
    """Beside config.yaml a file of this name, perhaps in a folder of its own, and arguments."""

    def spoil(folder: Path) -> list[str]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            content(path)
        return option(*arguments)(folder)

    return spoil


def model(spoil: Callable[[Path], object], *arguments: str) -> Callable[[Path], list[str]]:
    """The model is a copy of model/tiny, spoilt."""

    def make(folder: Path) -> list[str]:
        shutil.copytree(TINY, folder / "my_model")
        spoil(folder / "my_model")
        return ["--model.path", str(folder / "my_model"), *arguments]

    return make


def configured(**changes: Any) -> Callable[[Path], object]:
    """Changes in the model's config.json."""

    def spoil(folder: Path) -> None:
        value = orjson.loads((folder / "config.json").read_bytes()) | changes
        (folder / "config.json").write_bytes(orjson.dumps(value))

    return spoil


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def unfolded(text: str) -> str:
    """``{c}`` and ``{p}``: a letter and the one before it."""
    letters = "abcdefghi"
    return "".join(text.format(c=c, p=p) for p, c in pairwise(letters))


BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + unfolded("{c}: &{c} [*{p}, *{p}, *{p}, *{p}, *{p}]\n")
GOOD = b'{"question": "a", "answer": "1"}\n'
STEP = "runs/config/checkpoints/step-00000001"

CONFIGS: dict[str, Case] = {
    "an alias bomb": (config(BOMB), ["config.yaml", "20,000 values"]),
    "an alias that holds itself": (config("data: &a [*a]\n"), ["line 1", "holds itself"]),
    "YAML without bottom": (config("data: " + "[" * 30_000), ["nested more than 64 levels"]),
    "a Python object in YAML": (
        config("data: !!python/object/apply:os.system [id]\n"), ["python/object/apply", "line 1"],
    ),
    "a bad date in YAML": (config("data: 2001-99-99\n"), ["month must be in 1..12", "quote it"]),
    "a date for a name": (config("run: {name: 2024-01-01}\n"), ["read as a date", "quote it"]),
    "two documents in YAML": (config("data: a\n---\nrun: b\n"), ["single document"]),
    "a key that is no text": (config("1: 2\n"), ["key 1", "type int"]),
    "a list for a config": (config("[a, b]\n"), ["holds list, not sections"]),
    "control characters in YAML": (config(b"data: \x1b[2J\n"), ["special characters"]),
    "a config in another encoding": (config(b"data: \xff\xfe\n"), ["config.yaml cannot be read"]),
    "a config of megabytes": (config("# " + "x" * 300_000), ["larger than 0.25 MiB"]),
    "a FIFO for a config": (
        lambda f: (f / "config.yaml").unlink() or os.mkfifo(f / "config.yaml") or [],
        ["it is a FIFO"],
    ),
    "a folder for a config": (
        lambda f: (f / "config.yaml").unlink() or (f / "config.yaml").mkdir() or [],
        ["it is a folder"],
    ),
    "an integer beyond 64 bits": (option("--run.seed", "9" * 30), ["--run.seed", "beyond 64 bits"]),
    "an integer of 5,000 digits": (option("--run.steps", "9" * 5000), ["--run.steps", "digits"]),
    "no number for a number": (
        option("--sample.temperature", ".nan"), ["sample.temperature=nan"],
    ),
    "a NUL in a path": (option("--data.train", '"a\\0.jsonl"'), ["--data.train", "NUL"]),
    "half a character": (
        option("--data.system_prompt", '"a \\ud800"'), ["--data.system_prompt", "half a character"],
    ),
    "a run's name that climbs": (option("--run.name", "../x"), ["run.name='../x'", "plain folder"]),
    "a run's name that is a path": (option("--run.name", "/tmp/x"), ["run.name='/tmp/x'"]),
    "a run's name that is a parent": (option("--run.name", ".."), ["run.name='..'"]),
    "a run's name with an escape": (option("--run.name", '"a\\e[2J"'), ["run.name='a\\x1b[2J'"]),
    "a run's name that turns text": (
        option("--run.name", '"a\\u202eb"'), ["run.name='a\\u202eb'", "plain folder"],
    ),
    "a run's name too long for a disk": (option("--run.name", "é" * 60), ["at most 100 bytes"]),
}  # fmt: skip

DATA: dict[str, Case] = {
    "a FIFO for data": (data("pipe.jsonl", os.mkfifo), ["pipe.jsonl", "it is a FIFO"]),
    "an endless device for data": (
        data("zero.jsonl", lambda p: p.symlink_to("/dev/zero")), ["zero.jsonl", "it is a device"],
    ),
    "a folder for data": (data("rows.csv", lambda p: p.mkdir()), ["rows.csv", "it is a folder"]),
    "data of no known kind": (data("rows.txt", GOOD), ["rows.txt is of no known kind"]),
    "data in another encoding": (
        data("rows.csv", b"question,answer\n\xff,1\n"), ["rows.csv: not UTF-8 at byte"],
    ),
    "a key twice in a row": (
        data("r.jsonl", b'{"answer": 1, "answer": 2}\n'), ["r.jsonl:1", "'answer' stands twice"],
    ),
    "a row without bottom": (
        data("r.jsonl", GOOD + b'{"question": ' + b"[" * 500 + b"]" * 500 + b"}\n"),
        ["r.jsonl:2", "nested more than 64 levels"],
    ),
    "no number in a row": (data("r.jsonl", b'{"answer": NaN}\n'), ["r.jsonl:1", "NaN is no JSON"]),
    "half a character in a row": (
        data("r.jsonl", b'{"question": "\\ud800", "answer": "1"}\n'), ["r.jsonl:1", "surrogates"],
    ),
    "an integer of 5,000 digits in a row": (
        data("r.jsonl", b'{"answer": ' + b"9" * 5000 + b"}\n"), ["r.jsonl:1", "4300 digits"],
    ),
    "a row that is a list": (data("r.jsonl", b"[1]\n"), ["r.jsonl:1: holds list"]),
    "JSON that is no list": (data("r.json", b"{}"), ["r.json: holds dict", "list of objects"]),
    "CSV with a field too many": (
        data("r.csv", b"question,answer\na,1,2\n"), ["r.csv:2", "2 fields as in the header"],
    ),
    "CSV with a column twice": (
        data("r.csv", b"answer,answer\na,1\n"), ["r.csv:1", "'answer' stands twice"],
    ),
    "CSV with an open quote": (data("r.csv", b'question,answer\n"a,1\n'), ["not valid CSV"]),
    "damaged Parquet": (data("r.parquet", b"PAR1" + b"\0" * 40 + b"PAR1"), ["r.parquet"]),
    "a FIFO for a template": (
        file("own.jinja", os.mkfifo, "--data.template", "FOLDER/own.jinja"), ["it is a FIFO"],
    ),
    "a template that computes for ever": (
        file("own.jinja", b"{{ 9 ** 9 ** 9 }}", "--data.template", "FOLDER/own.jinja"),
        ["own.jinja computes a power"],
    ),
    "a template that reaches out": (
        file("own.jinja", b"{{ cycler.__init__.__globals__ }}",
             "--data.template", "FOLDER/own.jinja"),
        ["own.jinja", "unsafe"],
    ),
}  # fmt: skip

SAVED: dict[str, Case] = {
    "a FIFO for a buffer": (file("buffer.json", os.mkfifo), ["buffer.json", "it is a FIFO"]),
    "a folder for a buffer": (file("buffer.json", Path.mkdir), ["buffer.json", "it is a folder"]),
    "a buffer of another version": (
        file("buffer.json", b'{"format": 99}'), ["format 99", "this version reads 1"],
    ),
    "a buffer that is a list": (file("buffer.json", b"[]"), ["format 'list'"]),
    "a buffer without bottom": (file("buffer.json", b"[" * 5000), ["buffer.json is cut short"]),
    "a buffer without a run": (
        file("buffer.json", b'{"format": 1, "step": 0}'), ["buffer.json is damaged", "'run'"],
    ),
    "a lock that is a link": (
        file(".buffer.json.lock", lambda p: p.symlink_to(p.with_name("rows.jsonl"))),
        ["cannot be written"],
    ),
    "an archive that unpacks without end": (
        file("bomb.json.gz", gzip.compress(b"0" * (100 << 20), 6),
             "--run.from_buffer", "FOLDER/bomb.json.gz"),
        ["bomb.json.gz cannot be read", "larger than"],
    ),
    "an archive cut short": (
        file("cut.json.gz", gzip.compress(b"{}" * 99)[:15],
             "--run.from_buffer", "FOLDER/cut.json.gz"),
        ["cut.json.gz cannot be read"],
    ),
    "no such archive": (option("--run.from_buffer", "FOLDER/no.json"), ["no.json does not exist"]),
    "a checkpoint that is no JSON": (file(f"{STEP}/state.json", b"{"), ["no checkpoint that is"]),
    "a FIFO in a checkpoint": (file(f"{STEP}/state.json", os.mkfifo), ["no checkpoint that is"]),
    "a checkpoint that is a link": (
        file(STEP, lambda p: p.symlink_to("/tmp")), ["no checkpoint that is whole"],
    ),
    "no such checkpoint": (option("--run.resume", "FOLDER/none"), ["none is neither auto nor"]),
}  # fmt: skip

MODELS: dict[str, Case] = {
    "a model with code": (
        model(configured(model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})),
        ["my_model", "set model.trust_remote_code to true"],
    ),
    "code for vLLM": (
        option("--model.trust_remote_code", "true", "--sample.engine", "vllm"),
        ["model.trust_remote_code=true contradicts sample.engine=vllm"],
    ),
    "pickled weights": (model(pickled), ["pickled weights only (pytorch_model.bin)"]),
    "damaged pickled weights": (
        model(pickled, "--model.allow_pickle", "true"), ["pytorch_model.bin is damaged"],
    ),
    "an adapter beside the model": (
        model(lambda f: (f / "adapter_config.json").write_text('{"peft_type": "LORA"}')),
        ["my_model holds an adapter"],
    ),
    "a FIFO in the model": (
        model(lambda f: os.mkfifo(f / "added_tokens.json")), ["added_tokens.json", "regular file"],
    ),
    "an index that leads out of the model": (
        model(lambda f: (f / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../../x.safetensors"}}')),
        ["model.safetensors.index.json", "'../../x.safetensors'"],
    ),
    "a model's JSON without bottom": (
        model(lambda f: (f / "tokenizer.json").write_text("[" * 99_999)),
        ["tokenizer.json cannot be read"],
    ),
    "a billion layers": (model(configured(num_hidden_layers=10**9)), ["num_hidden_layers=1000000"]),
    "a billion layers by another name": (
        model(configured(model_type="gpt2", n_layer=10**9)), ["n_layer=1000000"],
    ),
    "a billion layers in a section": (
        model(configured(text_config={"num_hidden_layers": 10**9})), ["num_hidden_layers=1000000"],
    ),
    "a billion experts": (
        model(configured(model_type="mixtral", num_local_experts=10**9)), ["num_local_experts=1"],
    ),
    "a billion labels": (model(configured(num_labels=10**9)), ["num_labels=1000000"]),
    "no layer at all": (
        model(configured(num_hidden_layers=0, layer_types=[])), ["my_model", "cannot be read"],
    ),
    "a padding beyond the vocabulary": (
        model(configured(pad_token_id=10**12)), ["my_model", "cannot be read"],
    ),
    "outputs without names": (model(configured(return_dict=False)), ["return_dict=false"]),
    "a mixture of experts": (
        model(configured(model_type="mixtral", num_local_experts=2)), ["mixture of experts"],
    ),
    "an end beyond any vocabulary": (
        model(lambda f: (f / "generation_config.json").write_text(
            '{"eos_token_id": 10000000000000000000000}')),
        ["generation_config.json has eos_token_id=1000000"],
    ),
    "an attention that is not installed": (
        model(configured(attn_implementation="flash_attention_2")), ["my_model", "config"],
    ),
    "a dtype that is a function": (model(configured(dtype="load")), ["my_model", "cannot be read"]),
}  # fmt: skip

HOSTILE = CONFIGS | DATA | SAVED | MODELS
