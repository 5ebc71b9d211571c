"""A tokenizer.json that comes with a model: no text grows without bound in it, and what makes Rust
panic is our one line alone."""

import base64
import os
import sys
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from conftest import TINY
from hostile_cases import DOUBLING, with_tokenizer
from reason_llm.app.report.token_texts import TokenTexts
from reason_llm.data.render import Renderer
from reason_llm.data.templates import ChatTemplate
from reason_llm.errors import DataError, ModelError
from reason_llm.files import Panic, check_tokenizer, without_panics
from reason_llm.model import decode, load_tokenizer


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def template(times: int) -> dict[str, Any]:
    pieces = [{"Sequence": {"id": "A", "type_id": 0}}] * times
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}


def charsmap(content: bytes, size: int = 4) -> dict[str, Any]:
    packed = size.to_bytes(4, "little") + content
    text = base64.b64encode(packed).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


GROWING: list[tuple[dict[str, Any], str]] = [
    ({"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 3}}, "decoder .* over 4 times"),
    ({"decoder": replace({"String": "a"}, "b" * 5)}, "decoder .* over 4 times"),
    ({"decoder": replace({"String": ""}, "b" * 5)}, "decoder .* over 4 times"),
    ({"decoder": replace({"Regex": "(a|a)*b"}, "b")}, "regular expression"),
    ({"decoder": {"type": "Sequence", "decoders": [
        {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 3}]}}, "decoder"),
    ({"decoder": {"type": "Sequence", "decoders": [
        {"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": False}] * 3}},
     "decoder .* over 4 times"),
    ({"decoder": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 33}}, "33 steps, over 32"),
    ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 10}}, "over 512 times"),
    ({"normalizer": {"type": "Sequence", "normalizers": [replace({"Regex": ""}, "a")] * 10}},
     "over 512 times"),
    ({"normalizer": {"type": "Prepend", "prepend": "x" * 600}}, "over 512 times"),
    ({"normalizer": charsmap(b"1234" + b"x" * 600)}, "over 512 times"),
    ({"normalizer": {"type": "Sequence", "normalizers": [charsmap(b"1234a\0bcd\0")] * 6}},
     "over 512 times"),
    ({"normalizer": {"type": "ByteLevel"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "ByteLevel"}] * 9}}, "over 512 times"),
    ({"normalizer": charsmap(b"1234", size=400)}, "damaged"),
    ({"normalizer": charsmap(b"", size=0)}, "damaged"),
    ({"post_processor": {"type": "Sequence", "processors": [template(2)] * 3}}, "over 4 times"),
    ({"added_tokens": [{"id": 0, "content": "x" * 20_001}]}, "a text of 20001 characters"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "problem"), GROWING, ids=[str(n) for n in range(len(GROWING))])
def test_what_grows_is_refused_wherever_it_is_read(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((TINY / name).read_bytes())
    with_tokenizer(**changes)(tmp_path)
    for read in (load_tokenizer, TokenTexts.load):
        with pytest.raises(ModelError, match=problem) as caught:
            read(str(tmp_path))
        assert "\n" not in str(caught.value)


def test_pipelines_of_published_models_are_taken() -> None:
    """Those that Transformers makes for Llama, Gemma, SeamlessM4T, ALBERT and CLIP."""
    small = charsmap(b"1234" + "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647".encode() + b"\0a\0")
    strings = [{"type": "Replace", "pattern": {"String": "``"}, "content": '"'}] * 2
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    for normalizer in (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " ")]),
    ):
        tokenizer = Tokenizer(models.BPE({"a": 0}, []))
        tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
        check_tokenizer(orjson.loads(tokenizer.to_str()))
    for steps in ([small, spaces, spaces, spaces], [*strings, {"type": "NFKD"}, small, spaces]):
        check_tokenizer({"normalizer": {"type": "Sequence", "normalizers": steps}})
    check_tokenizer(orjson.loads((TINY / "tokenizer.json").read_bytes()))


PANICS = [
    {"normalizer": charsmap(b"\xff\xff\xff\x7f")},  # a trie that leads out of itself
    {"decoder": {"type": "Strip", "content": "W", "start": 9, "stop": 9}},
]


def spoilt(folder: Path, changes: dict[str, Any]) -> str:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    with_tokenizer(**changes)(folder)
    return str(folder)


@pytest.mark.parametrize("backtrace", ["0", "1"])
def test_a_panic_at_loading_is_our_line_alone(
    tmp_path: Path, backtrace: str, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUST_BACKTRACE", backtrace)
    path = spoilt(tmp_path, PANICS[0])
    with pytest.raises(ModelError, match="its tokenizer cannot be read") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_panic_at_decoding_is_our_line_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    changes = {"decoder": {"type": "Strip", "content": "7", "start": 9, "stop": 9}}
    vocab = orjson.loads((TINY / "tokenizer.json").read_bytes())["model"]["vocab"]
    path = spoilt(tmp_path, changes)
    tokens = TokenTexts.load(path)
    assert tokens.lengths([vocab["7"]], "7") is None
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Panic), without_panics():
        raw.decode([vocab["7"]])
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ModelError, match="cannot decode what the model wrote"):
        decode(PreTrainedTokenizerFast(tokenizer_object=raw), [[vocab["7"]]])
    assert capfd.readouterr() == ("", "")


def test_what_others_write_meanwhile_comes_through(capfd: pytest.CaptureFixture) -> None:
    """Also what a thread writes, and what stands before a panic."""
    raw = Tokenizer(models.BPE({"7": 0}, []))
    raw.decoder = decoders.Strip("7", 9, 9)

    def write() -> None:
        os.write(2, b"a thread\n")

    with without_panics():
        print("Python", file=sys.stderr)
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        with without_panics():
            pass
    assert capfd.readouterr().err == "Python\na thread\n"
    with pytest.raises(Panic), without_panics():
        print("before", file=sys.stderr)
        raw.decode([0])
    assert capfd.readouterr().err == "before\n"
    with pytest.raises(KeyboardInterrupt), without_panics():
        print("stopped", file=sys.stderr)
        raise KeyboardInterrupt
    assert capfd.readouterr().err == "stopped\n"
    os.write(2, b"as ever\n")
    assert capfd.readouterr().err == "as ever\n"


def test_a_pattern_that_takes_for_ever_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search stays below the library's own limit; there are thousands of them."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    tokenizer = load_tokenizer(spoilt(tmp_path, {"pre_tokenizer": split}))
    monkeypatch.setattr("reason_llm.data.render.ENCODE_SECONDS", 0.5)
    renderer = Renderer(tokenizer, ChatTemplate("x", "{{ messages[0].content }}"), None)
    with pytest.raises(DataError, match=r"took longer than 0\.5 s on its \d+ characters"):
        renderer.prompt("rows.jsonl:1", [{"role": "user", "content": ("a" * 21 + "c") * 100}], "3")
