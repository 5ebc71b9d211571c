"""Strings that end a completion, ``sample.stop``: found across token borders by Transformers' own
criterion, which reads the tokens' texts and never decodes a row."""

from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from reason_llm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, StopStringCriteria


@lru_cache(maxsize=1)
def stop_strings(
    tokenizer: "PreTrainedTokenizerBase", strings: tuple[str, ...]
) -> "StopStringCriteria | None":
    """Criterion that tells of rows of token ids (B, T) whether each has just completed one of the
    strings; None without strings.

    Raises:
        ConfigError: a string is not found in its own tokens.
    """
    if not strings:
        return None
    from transformers import StopStringCriteria

    for string in strings:
        ids = tokenizer.encode(string, add_special_tokens=False)
        with suppress(ValueError):
            if ids and StopStringCriteria(tokenizer, [string])(torch.tensor([ids]), None):
                continue
        raise ConfigError(
            f"sample.stop={string!r:.110}: the tokenizer does not write it, so it would end no "
            "completion; remove it"
        )
    return StopStringCriteria(tokenizer, list(strings))
