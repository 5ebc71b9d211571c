"""oneDNN is told how many compiled kernels to keep before its first product, and who tells it
otherwise is heard."""

import os

import pytest

from conftest import TINY
from reason_llm.config import ModelSection
from reason_llm.model.base import KEPT_KERNELS, Model, load_tokenizer

NAME = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


@pytest.mark.parametrize(("given", "kept"), [(None, str(KEPT_KERNELS)), ("7", "7")])
def test_number_of_kept_kernels(
    given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, given or "")
    if given is None:
        monkeypatch.delenv(NAME)
    with Model(ModelSection(path=str(TINY)), load_tokenizer(str(TINY)), seed=0):
        assert os.environ[NAME] == kept
