"""Tokenizers whose class in Transformers reads texts otherwise than their tokenizer.json."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from conftest import TINY
from families import SIZES, changed, make_model, prompts_of, quiet
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import load_tokenizer
from reason_llm.model.base import Model
from reason_llm.model.tokenizer import CLASSES, class_of, misread_by
from reason_llm.sample import SamplingParams, sampling

TEXT = "def f(x):\n    return 12345 * x\n\n\tЭто 世界,  café… 🙂 <|im_end|>\n"


def as_llama(folder: Path) -> str:
    """A Llama model whose byte-level tokenizer.json is to be read as LlamaTokenizerFast, as that of
    DeepSeek-R1-Distill-Llama."""
    return changed(
        make_model(folder, "llama", False, "float32", vocab_size=512),
        "tokenizer_config.json",
        tokenizer_class="LlamaTokenizerFast",
    )


def test_a_byte_level_file_under_llama_s_class_keeps_its_blanks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = as_llama(tmp_path / "model")
    lost = AutoTokenizer.from_pretrained(path)  # Transformers 5.17; if this fails, it is mended
    assert " " not in lost.decode(lost.encode("def f(x): return x"))
    with caplog.at_level(logging.WARNING):
        found, again = load_tokenizer(path), load_tokenizer(path)
    own = Tokenizer.from_file(f"{path}/tokenizer.json")
    assert found.encode(TEXT, add_special_tokens=False) == own.encode(TEXT).ids
    assert found.decode(found.encode(TEXT, add_special_tokens=False)) == TEXT
    assert (found.chat_template, found.eos_token_id, found.pad_token_id) == (
        lost.chat_template, lost.eos_token_id, lost.pad_token_id,
    )  # fmt: skip
    assert again.get_vocab() == found.get_vocab()
    (line,) = [line for line in caplog.messages if path in line]  # once, though it is loaded twice
    assert line == (
        f"model.path={path}: Transformers' LlamaTokenizer gives texts other ids than "
        "tokenizer.json, which is used"
    )
    found.save_pretrained(tmp_path / "saved")
    shutil.copyfile(f"{path}/config.json", tmp_path / "saved" / "config.json")
    assert misread_by(tmp_path / "saved", found) is None  # what an export holds
    assert misread_by(Path(path), found) == "LlamaTokenizer"


def test_a_file_that_only_a_class_reads_is_refused(tmp_path: Path) -> None:
    path = as_llama(tmp_path / "model")
    token = {"content": "return", "special": False, "normalized": False, "lstrip": False,
             "rstrip": False, "single_word": False}  # fmt: skip
    changed(path, "tokenizer_config.json", added_tokens_decoder={"500": token})
    with pytest.raises(ModelError, match=r"LlamaTokenizer reads texts with other ids than tokeni"):
        load_tokenizer(path)


def test_tokenizers_that_agree_with_their_file_stay_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert type(load_tokenizer(str(TINY))) is type(AutoTokenizer.from_pretrained(str(TINY)))
    assert not caplog.messages


@pytest.mark.parametrize("family", CLASSES)
def test_the_class_without_pytorch_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    """Every class that a tokenizer_config.json may name, and one that only ``AutoTokenizer``
    reads."""
    for file in TINY.glob("tokenizer*"):
        shutil.copyfile(file, tmp_path / file.name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    for named in (*CLASSES[family], "PreTrainedTokenizerFast", "LlamaTokenizerFast", None):
        path = changed(tmp_path, "tokenizer_config.json", tokenizer_class=named)
        expected, found = AutoTokenizer.from_pretrained(path), class_of(path).from_pretrained(path)
        assert type(found) is type(expected), named
        assert found.init_kwargs == expected.init_kwargs
        assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    mapped = {"AutoTokenizer": [None, "x.Own"]}
    changed(tmp_path, "tokenizer_config.json", tokenizer_class="Qwen2Tokenizer", auto_map=mapped)
    assert class_of(path) is AutoTokenizer


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # vLLM warns of its own
def test_stop_strings_with_blanks_end_completions_under_vllm(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    path = as_llama(tmp_path / "model")
    tokenizer = load_tokenizer(path)
    section = ModelSection(path=path, dtype="float32", adapter=AdapterSection(rank=8, alpha=16))
    with Model(section, tokenizer, 0, SIZES) as model, sampling(model, 0) as sampler:
        asked = prompts_of(tokenizer, "What is 3 + 4?", "What is 5 + 4?")
        (one, two) = sampler.sample(asked, SamplingParams(8, 100, stop=(" ",)), 3, quiet)
    texts = [each.text for group in (one, two) for each in group.completions]
    ended = [text for text in texts if " " in text]
    assert ended and all(text.index(" ") > len(text) - 8 for text in ended)
