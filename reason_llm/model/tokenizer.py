"""Tokenizers, loaded without PyTorch for the families of ``CLASSES``, decoding, and the tokens that
end an answer. Not here: chat templates (``data.templates``)."""

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from reason_llm.errors import ModelError, one_line
from reason_llm.files import Panic, read_bounded, without_panics
from reason_llm.model import folder

MAX_TOKENS = 1 << 31
"""Largest vocabulary."""
PROBE = "What is 3 + 4?"
"""A text that every tokenizer must be able to read."""
PROBES = [PROBE, "def f(x):\n    return 12345 * x\n\n\tx = [1,  2]", "Это 世界, café… مرحبا 🙂"]
"""Texts whose ids a tokenizer must have in common with its tokenizer.json."""
TOKENIZER = "tokenizer.json"
_QWEN, _GEMMA, _FILE = "Qwen2Tokenizer", "GemmaTokenizer", "TokenizersBackend"
CLASSES = {
    "qwen2": {_QWEN: _QWEN, _FILE: _QWEN},
    "qwen3": {_QWEN: _QWEN, _FILE: _FILE},
    "qwen3_5": dict.fromkeys((_QWEN, _FILE), "Qwen3_5Tokenizer"),
    "llama": {_FILE: _FILE},
    "gpt_oss": {_FILE: _FILE},
    **{name: {_GEMMA: _GEMMA, _FILE: _FILE} for name in ("gemma4", "gemma4_unified")},
}
"""Name of the class that ``AutoTokenizer`` takes, whose module imports PyTorch, by the model_type
and by the class that tokenizer_config.json names."""


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer of a folder or a Hub id. Its chat template is checked in ``data.templates``. Raises
    ModelError: no such folder, no tokenizer, or one that cannot be used."""
    allowed = folder.check(path, "config.json", "tokenizer_config.json", runs=trust_remote_code)
    with reading(path, "tokenizer"):
        own = Path(path) / TOKENIZER
        file = str(own) if own.is_file() else None
        if not Path(path).is_dir():
            file = cached_file(path, TOKENIZER, _raise_exceptions_for_missing_entries=False)
            if file is not None:
                folder.check_json(Path(file))
        with without_panics():
            tokenizer = class_of(path, allowed).from_pretrained(path, trust_remote_code=allowed)
            if file is not None and isinstance(tokenizer, PreTrainedTokenizerFast):
                tokenizer = _as_in_file(path, tokenizer, file)
            spelled = tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False))
        limit = tokenizer.model_max_length
        if not isinstance(limit, int | float) or not limit > 0:
            raise ValueError(f"model_max_length={limit!r:.60} is not a number of tokens")
    # A damaged tokenizer may load without an error, and only its texts show it.
    is_same = "".join(spelled.split()).casefold() == "".join(PROBE.split()).casefold()
    if not is_same or len(spelled.split()) < len(PROBE.split()):
        raise ModelError(
            f"model.path={path}: its tokenizer reads {PROBE!r} as {spelled!r}; a file of it, "
            "such as tokenizer.json, is missing or damaged: save it again"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.path={path}: its tokenizer has no eos_token, so no answer could end; set one"
        )
    return tokenizer


def class_of(path: str, runs_code: bool = False) -> Any:
    """The class that reads a tokenizer: the one that ``AutoTokenizer`` chooses, if ``CLASSES``
    lists it, else ``AutoTokenizer``."""
    described, wanted = (_read(path, name) for name in ("config.json", "tokenizer_config.json"))
    named = str(wanted.get("tokenizer_class")).removesuffix("Fast")
    plain = {_FILE: _FILE, "PreTrainedTokenizer": _FILE}
    class_name = CLASSES.get(str(described.get("model_type")), {}).get(plain.get(named, named))
    known = class_name is not None and not runs_code and "auto_map" not in wanted
    return getattr(transformers, str(class_name) if known else "AutoTokenizer")


def _read(path: str, name: str) -> dict[str, Any]:
    """An object in a JSON file of a model; empty where there is none. Raises ValueError."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
    value = {} if file is None else json.loads(read_bounded(Path(file), folder.MAX_JSON_BYTES))
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def _as_in_file(
    path: str, tokenizer: PreTrainedTokenizerFast, file: str
) -> PreTrainedTokenizerFast:
    """The tokenizer, or a plain one from its tokenizer.json if Transformers' class encodes texts
    differently: LlamaTokenizer of Transformers 5 replaces a byte-level file's pre-tokenizer and
    loses every blank (DeepSeek-R1's distillates). Raises ValueError: the file cannot be loaded as
    it is."""
    if type(tokenizer) is PreTrainedTokenizerFast:  # which has read that file alone
        return tokenizer
    whole = tokenizers.Tokenizer.from_file(file)
    whole.no_truncation()
    whole.no_padding()
    expected = [whole.encode(text, add_special_tokens=False).ids for text in PROBES]
    loaded_ids = _probe_ids(tokenizer)
    if loaded_ids == expected:
        return tokenizer
    named = {
        name: token
        for name, token in tokenizer.special_tokens_map.items()
        if isinstance(token, str) and whole.token_to_id(token) is not None
    }
    plain = PreTrainedTokenizerFast.from_pretrained(path, **named)
    if _probe_ids(plain) == loaded_ids:  # as tokenizer_config.json asks
        return tokenizer
    kind = type(tokenizer).__name__
    if _probe_ids(plain) != expected:
        raise ValueError(f"{kind} reads texts with other ids than {TOKENIZER} gives them")
    folder.say(
        f"model.path={path}: Transformers' {kind} gives texts other ids than tokenizer.json, "
        "which is used"
    )
    return plain


def misread_by(path: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Name of the class as which Transformers reads a tokenizer that was saved in a folder, if it
    has other ids there; None where they are the same."""
    loaded = transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    same = _probe_ids(loaded) == _probe_ids(tokenizer)
    return None if same else type(loaded).__name__


def _probe_ids(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=False) for text in PROBES]


def decode(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Sequence[int]],
    end_token_ids: Collection[int] = (),
) -> list[str]:
    """Texts of rows of token ids, as rewards and environments see them: all tokens, special ones by
    their names, except an end token that is the row's last. Raises ModelError: the tokenizer
    panics."""
    texts = (ids[:-1] if ids and ids[-1] in end_token_ids else ids for ids in rows)
    try:
        with without_panics():
            return [
                tokenizer.decode(
                    list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
                for ids in texts
            ]
    except Panic as error:
        raise ModelError(
            f"the tokenizer of {tokenizer.name_or_path} cannot decode what the model wrote "
            f"({error}); take the tokenizer.json that the model was published with"
        ) from error


def quiet_libraries() -> None:
    """Silence the libraries' own messages and progress bars."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def end_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that end an answer, from the tokenizer and generation_config.json. Raises
    ModelError: that file is damaged."""
    theirs = None
    with reading(path, "generation config"), suppress(OSError):  # there is no such file
        theirs = _read(path, "generation_config.json").get("eos_token_id")
    more = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    if not all(type(id) is int and 0 <= id < MAX_TOKENS for id in more):
        raise ModelError(
            f"model.path={path}: generation_config.json has eos_token_id={str(theirs)[:60]}; give "
            "ids"
        )
    return sorted({tokenizer.eos_token_id, *more})


@contextmanager
def reading(path: str, what: str) -> Iterator[None]:
    """Context that makes one ModelError of whatever reading a part of the model raises: the
    tokenizers' Rust library raises nothing narrower than an Exception."""
    try:
        yield
    except ModelError:
        raise  # a ValueError, too
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"model.path={path}: its {what} needs Python code that comes with it; set "
                "model.trust_remote_code to true if you trust that code, or take another model "
                "(it is never run for a reward model)"
            ) from error
        fix = "the folder" if Path(path).is_dir() else "the Hub id and the network"
        raise ModelError(
            f"model.path={path}: its {what} cannot be read ({one_line(error)[:300]}); check {fix}"
        ) from error
