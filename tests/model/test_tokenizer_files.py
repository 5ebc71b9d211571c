"""A tokenizer.json that comes with a model: it is tried within limits, and a panic of Rust is our
error."""

import base64
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers

from conftest import TINY
from hostile_cases import DOUBLING, with_tokenizer
from reason_llm.app.report.token_texts import TokenTexts
from reason_llm.data.render import Renderer
from reason_llm.data.templates import ChatTemplate
from reason_llm.errors import DataError, ModelError
from reason_llm.files import Panic, check_tokenizer, without_panics
from reason_llm.model import decode, load_tokenizer


def charsmap(content: bytes, size: int = 4) -> dict[str, Any]:
    packed = size.to_bytes(4, "little") + content
    text = base64.b64encode(packed).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


DOUBLES = [DOUBLING] * 40
GROWING: list[tuple[dict[str, Any], str]] = [
    ({"decoder": {"type": "Sequence", "decoders": DOUBLES}}, "memory|longer"),
    ({"normalizer": {"type": "Sequence", "normalizers": DOUBLES}}, "memory|longer"),
    (
        {"normalizer": charsmap(b"\xff\xff\xff\x7f")},
        "index out of bounds",
    ),  # a trie that leads out of itself
]


@pytest.mark.parametrize(("changes", "problem"), GROWING, ids=["decoder", "normalizer", "panic"])
def test_what_grows_is_refused_wherever_it_is_read(
    tmp_path: Path,
    changes: dict[str, Any],
    problem: str,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a process of its own: this one keeps its memory, and prints nothing."""
    monkeypatch.setattr("reason_llm.files.TOKENIZER_SECONDS", 1.0)
    path = spoilt(tmp_path, changes)
    for read in (load_tokenizer, TokenTexts.load):
        with pytest.raises(ModelError, match=problem) as caught:
            read(path)
        assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_pipelines_of_published_models_are_taken() -> None:
    """Those that Transformers makes for Llama and Gemma, and one that cannot read the probe."""
    for normalizer in (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " ")]),
    ):
        tokenizer = Tokenizer(models.BPE({"a": 0}, []))
        tokenizer.normalizer = normalizer
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
             decoders.Strip(" ", 1, 0)]
        )  # fmt: skip
        check_tokenizer(tokenizer.to_str().encode())
    check_tokenizer(Tokenizer(models.WordLevel({"a": 0}, unk_token="b")).to_str().encode())
    check_tokenizer((TINY / "tokenizer.json").read_bytes())


def spoilt(folder: Path, changes: dict[str, Any]) -> str:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    with_tokenizer(**changes)(folder)
    return str(folder)


def test_a_panic_at_decoding_is_an_error_of_ours(tmp_path: Path) -> None:
    changes = {"decoder": {"type": "Strip", "content": "7", "start": 9, "stop": 9}}
    vocab = orjson.loads((TINY / "tokenizer.json").read_bytes())["model"]["vocab"]
    spoilt(tmp_path, changes)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    with pytest.raises(Panic), without_panics():
        raw.decode([vocab["7"]])
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ModelError, match="cannot decode what the model wrote"):
        decode(PreTrainedTokenizerFast(tokenizer_object=raw), [[vocab["7"]]])


def test_a_pattern_that_takes_for_ever_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each search stays below the library's own limit; there are thousands of them."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated",
             "invert": False}  # fmt: skip
    spelled = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
               "use_regex": False}  # fmt: skip
    both = {"type": "Sequence", "pretokenizers": [split, spelled]}
    tokenizer = load_tokenizer(spoilt(tmp_path, {"pre_tokenizer": both}))
    monkeypatch.setattr("reason_llm.data.render.ENCODE_SECONDS", 0.5)
    renderer = Renderer(tokenizer, ChatTemplate("x", "{{ messages[0].content }}"), None)
    with pytest.raises(DataError, match=r"took longer than 0\.5 s on its \d+ characters"):
        renderer.prompt("rows.jsonl:1", [{"role": "user", "content": ("a" * 21 + "c") * 100}], "3")
