from pathlib import Path

import pytest

from conftest import TINY
from reason_llm.app.report.token_texts import TokenTexts
from reason_llm.errors import ModelError
from report_runs import END, TOKENIZER


@pytest.fixture(scope="module")
def texts() -> TokenTexts:
    return TokenTexts.load(str(TINY))


@pytest.mark.parametrize("text", ["<think>1+2=3</think>", "héllo €", "a 😀 b", "a\nb  c"])
def test_the_lengths_cut_the_text_into_its_tokens(texts: TokenTexts, text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    lengths = texts.lengths([*ids, END], text)
    assert lengths is not None
    assert len(lengths) == len(ids) + 1
    assert lengths[-1] == 0  # the end has no text
    assert sum(lengths) == len(text.encode("utf-16-le")) // 2
    units, place = text.encode("utf-16-le"), 0
    for id, length in zip(ids, lengths, strict=False):
        piece = units[2 * place : 2 * (place + length)].decode("utf-16-le")
        place += length
        if piece.isascii() and piece:
            assert piece == TOKENIZER.decode([id])


def test_tokens_that_spell_another_text_have_no_lengths(texts: TokenTexts) -> None:
    ids = TOKENIZER.encode("12", add_special_tokens=False).ids
    assert texts.lengths(ids, "13") is None
    assert texts.lengths([10_000_000], "x") is None


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "cannot be read"), ("{}", "cannot be read"), ("x", "cannot be read")],
)
def test_a_tokenizer_that_cannot_be_read_is_named(
    tmp_path: Path, content: str | None, told: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=told):
        TokenTexts.load(str(tmp_path))


def test_a_model_that_is_not_on_this_machine_is_named() -> None:
    with pytest.raises(ModelError, match=r"nobody/nothing has no .* on this machine"):
        TokenTexts.load("nobody/nothing")
    with pytest.raises(ModelError, match="on this machine"):
        TokenTexts.load("no//such name")
