"""oneDNN is told how many compiled kernels to keep before its first product, and who tells it
otherwise is heard."""

import os

import pytest

from conftest import TINY
from reason_llm.config import ModelSection
from reason_llm.model.base import KEPT_KERNELS, Model, load_tokenizer

NAMES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("given", "kept"), [(None, str(KEPT_KERNELS)), ("7", "7")])
def test_number_of_kept_kernels(
    name: str, given: str | None, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in NAMES:
        monkeypatch.delenv(each, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    with Model(ModelSection(path=str(TINY)), load_tokenizer(str(TINY)), seed=0):
        assert os.environ[name] == kept
