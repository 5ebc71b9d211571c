"""Strings that end a completion, ``sample.stop``: found across token borders by Transformers' own
criterion, which reads the tokens' texts and never decodes a row."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from reason_llm.errors import ConfigError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, StopStringCriteria


@lru_cache(maxsize=2)
def _criterion(
    tokenizer: "PreTrainedTokenizerBase", strings: tuple[str, ...]
) -> "StopStringCriteria":
    from transformers import StopStringCriteria

    return StopStringCriteria(tokenizer, list(strings))


def stop_strings(
    tokenizer: "PreTrainedTokenizerBase", strings: Sequence[str]
) -> "StopStringCriteria | None":
    """Criterion that tells of rows of token ids (B, T) whether each has just completed one of the
    strings; None without strings.

    Raises:
        ConfigError: the tokenizer cannot write one of them.
    """
    if not strings:
        return None
    for each in strings:
        try:
            _criterion(tokenizer, (each,))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"sample.stop={each!r:.80}: the tokenizer cannot write it, so it would end no "
                f"answer ({one_line(error)}); remove it"
            ) from error
    return _criterion(tokenizer, tuple(strings))
