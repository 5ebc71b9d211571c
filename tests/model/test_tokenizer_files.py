"""A tokenizer.json that comes with a model: a panic of Rust is our error."""

import base64
from pathlib import Path
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer

from conftest import TINY
from hostile_cases import with_tokenizer
from reason_llm.data.render import Renderer
from reason_llm.data.templates import ChatTemplate
from reason_llm.errors import DataError, ModelError
from reason_llm.files import Panic, without_panics
from reason_llm.model import decode, load_tokenizer


def charsmap(content: bytes, size: int = 4) -> dict[str, Any]:
    packed = size.to_bytes(4, "little") + content
    text = base64.b64encode(packed).decode()
    return {"type": "Precompiled", "precompiled_charsmap": text}


def test_a_panic_at_reading_is_one_line(tmp_path: Path) -> None:
    """A trie that leads out of itself."""
    path = spoilt(tmp_path, {"normalizer": charsmap(b"\xff\xff\xff\x7f")})
    with pytest.raises(ModelError, match="index out of bounds") as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


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
