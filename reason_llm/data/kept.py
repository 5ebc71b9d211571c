"""Data that was read and rendered before, from a mapped file, so that a later start of a run, and
its resumption, neither parses nor tokenises a row.

A file is found by the digest of all that its content follows from: rows, options, tokenizer,
template and versions. Rows that user code makes or changes are always read anew, and so are rows
with images and small files. Prompts and rows are made when they are asked for."""

import hashlib
import logging
import mmap
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import numpy as np
import orjson

from reason_llm.config import Config, share_of
from reason_llm.data.load import load_data, renderer_of
from reason_llm.data.rows import READERS
from reason_llm.data.sets import Data, DataSet
from reason_llm.errors import ReasonError, one_line
from reason_llm.files import MIB, open_regular, read_bounded, sha256, write_atomically
from reason_llm.rollout import ROW, Prompt, TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")
Told = Callable[[str], object]

LEAST_BYTES = 4 * MIB
"""Total size of the data files from which they are kept."""
MOST_FILES, MOST_BYTES = 16, 8192 * MIB
"""Limits of the folder; the files that were read the longest ago are removed."""
FORMAT = b"reason_llm data 1\n"
UNSEEN = ("run", "log", "memory", "train")
"""Sections of the config that the data do not depend on."""
LIBRARIES = ("jinja2", "tokenizers", "transformers", "trl")
_HEAD = len(FORMAT) + 32 + 8  # and the digest of the rest, and the length of the description


def load_kept(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    extra_columns: Collection[str],
    end_token_ids: Collection[int],
    told: Told,
) -> Data:
    """``load_data``, from the file of an earlier start where there is one.

    Args:
        told: takes the line that says so.
    """

    def load() -> Data:
        """The data, read and tokenised anew."""
        return load_data(
            config,
            tokenizer,
            context_tokens,
            extra_columns=extra_columns,
            end_token_ids=end_token_ids,
        )

    files = _files(config, extra_columns)
    if files is None or sum(file.stat().st_size for file in files) < LEAST_BYTES:
        return load()
    options = (context_tokens, sorted(extra_columns), sorted(end_token_ids))
    key = _key(config, tokenizer, files, options)
    path = folder() / f"{key}.rows"
    try:
        data = _read(path, key)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError) as error:
        told(f"{path} is damaged ({one_line(error)[:100]}) and is written again")
    else:
        told(f"data as read and tokenised before, from {path}; remove it to read them anew")
        with suppress(OSError):
            os.utime(path)
        return data
    data = load()
    if data.images is not None or _key(config, tokenizer, files, options) != key:
        return data  # each start checks the images' files, or a file was changed meanwhile
    try:
        _write(path, key, data)
        _keep_bounds(path)
        told(f"data as read and tokenised are kept in {path} for later starts")
    except (OSError, ReasonError, ValueError, TypeError, OverflowError) as error:
        logger.warning("data are not kept for later starts: %s", one_line(error)[:200])
    return data


def folder() -> Path:
    """The folder of the files: ``$XDG_CACHE_HOME/reason_llm/data``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "reason_llm" / "data"


def _files(config: Config, extra_columns: Collection[str]) -> list[Path] | None:
    """The data files; None where rows come from elsewhere, or user code makes or changes them."""
    section = config.data
    if section.preprocess or config.sample.environment or config.teacher.prompt:
        return None
    if ROW in extra_columns or config.model.trust_remote_code:
        return None
    sources = [*(each.source for each in section.sources), *config.evaluation_sets.values()]
    given = filter(None, [*sources, config.eval.rows])
    found = [Path(source) for source in given if share_of(source) is None]
    is_file = all(each.suffix.lower() in READERS and each.is_file() for each in found)
    return found if is_file and not section.given else None


def _key(
    config: Config, tokenizer: "PreTrainedTokenizerBase", files: Iterable[Path], options: Any
) -> str:
    """Digest of everything that the data follow from."""
    tree = config.model_dump(mode="json")
    for section in UNSEEN:
        del tree[section]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab() if backend is None else backend.to_str()
    tokens = [type(tokenizer).__name__, repr(tokenizer.init_kwargs), vocabulary]
    rows = [(str(file), sha256(file)) for file in files]
    if config.held_out_shares:
        options = [options, config.run.seed]
    made_by = [_own_source(), *map(version, LIBRARIES)]
    template = renderer_of(config, tokenizer).digest
    content = orjson.dumps([tree, tokens, rows, made_by, template, options])
    return hashlib.sha256(content).hexdigest()


@cache
def _own_source() -> str:
    """Digest of this package's own source."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(read_bounded(file, MIB))
    return digest.hexdigest()


class MappedRows(Sequence[T]):
    """Items that are made from a mapped file when they are asked for."""

    def __init__(self, make: Callable[[int], T], places: range) -> None:
        self._make = make
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> "MappedRows[T]": ...
    def __getitem__(self, index: int | slice) -> "T | MappedRows[T]":
        if isinstance(index, slice):
            return MappedRows(self._make, self._places[index])
        return self._make(self._places[index])

    def __iter__(self) -> Iterator[T]:
        return map(self._make, self._places)

    def __reduce__(self) -> Any:
        return list, ([*self],)


_PARTS = {"ids": "i", "trained": "?", "text": "B", "ends": "q", "text_ends": "q", "unit_ends": "q"}
"""Arrays of a set: token ids and flags end to end, the rest as JSON, and where each ends."""
_Arrays = Mapping[str, Any]


def _arrays(data_set: DataSet) -> dict[str, bytes]:
    rows = [row for unit in data_set.units for row in unit]
    ids = [each.token_ids for each in data_set.prompts] or [row.ids for row in rows]
    texts = [orjson.dumps([p.id, p.text, p.answer, p.extra]) for p in data_set.prompts]
    texts = texts or [orjson.dumps([row.name, row.group, row.value]) for row in rows]
    made = {
        "ids": np.fromiter(chain.from_iterable(ids), np.int32),
        "trained": np.fromiter(chain.from_iterable(row.trained for row in rows), np.bool_),
        "text": b"".join(texts),
        "ends": _ends(ids),
        "text_ends": _ends(texts),
        "unit_ends": _ends(data_set.units),
    }
    return {name: made[name] if name == "text" else made[name].tobytes() for name in _PARTS}


def _ends(parts: Sequence[Sequence[Any]]) -> Any:
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


def _items(arrays: _Arrays) -> tuple[Callable[[int], Prompt], Callable[[int], Any]]:
    """Functions that make the prompt and the unit of a number."""
    ids, trained, text, ends, text_ends, unit_ends = (arrays[name] for name in _PARTS)

    def rest(number: int) -> Any:
        """The part of an item that is kept as JSON."""
        return orjson.loads(text[text_ends[number] : text_ends[number + 1]])

    def prompt(number: int) -> Prompt:
        """The prompt of a number."""
        name, written, answer, extra = rest(number)
        tokens = ids[ends[number] : ends[number + 1]].tolist()
        return Prompt(name, written, tuple(tokens), answer, extra)

    def row(number: int) -> TokenRow:
        """The row of tokens of a number."""
        name, group, value = rest(number)
        place = slice(ends[number], ends[number + 1])
        flags = tuple(trained[place].tolist())
        return TokenRow(name, tuple(ids[place].tolist()), flags, group, value)

    def unit(number: int) -> tuple[TokenRow, ...]:
        """The rows that are trained together, by their unit's number."""
        return tuple(map(row, range(unit_ends[number], unit_ends[number + 1])))

    return prompt, unit


_PACKED = {"prompts", "units"}


def _write(path: Path, key: str, data: Data) -> None:
    """Write all sets into a file, at once for whoever reads it."""
    described: list[Any] = []
    parts: list[bytes] = []
    held = [] if data.held_out_rows is None else [data.held_out_rows]
    for data_set in (*data.training, *data.held_out, *held):
        arrays = _arrays(data_set)
        parts += arrays.values()
        kept = {f.name: getattr(data_set, f.name) for f in fields(DataSet) if f.name not in _PACKED}
        sizes = [len(array) for array in arrays.values()]
        described.append([kept, sizes, len(data_set.prompts)])
    counts = [len(data.training), len(data.held_out), len(held)]
    head = orjson.dumps([key, counts, data.weights, data.contamination, described])
    content = b"".join([len(head).to_bytes(8, "little"), head, *map(_padded, parts)])
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_suffix(f".{os.getpid()}")  # another process may write the same
    write_atomically(own, FORMAT + hashlib.sha256(content).digest() + content)
    own.replace(path)


def _padded(part: bytes) -> bytes:
    return part + bytes(-len(part) % 8)


def _read(path: Path, key: str) -> Data:
    """The data of a file. Raises ValueError or another error: it is not what was written."""
    with open_regular(path) as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    begin = len(FORMAT)
    if mapped[:begin] != FORMAT or hashlib.sha256(mapped[begin + 32 :]).digest() != bytes(
        mapped[begin : begin + 32]
    ):
        raise ValueError("its digest is another")
    place = _HEAD + int.from_bytes(mapped[_HEAD - 8 : _HEAD], "little")
    found, counts, weights, contamination, described = orjson.loads(mapped[_HEAD:place])
    if found != key:
        raise ValueError("it holds other data")
    sets = []
    for kept, sizes, num_prompts in described:
        arrays: dict[str, Any] = {}
        for (name, kind), size in zip(_PARTS.items(), sizes, strict=True):
            part: Any = mapped[place : place + size]
            arrays[name] = part.cast(kind)
            place += -(-size // 8) * 8
        prompt, unit = _items(arrays)
        counters = {name: Counter(kept[name]) for name in ("dropped", "ignored")}
        prompts = MappedRows(prompt, range(num_prompts))
        units = MappedRows(unit, range(len(arrays["unit_ends"]) - 1))
        sets.append(
            DataSet(
                **kept | counters,
                prompts=cast("list[Prompt]", prompts),
                units=cast("list[tuple[TokenRow, ...]]", units),
            )
        )
    training, held_out = sets[: counts[0]], sets[counts[0] : counts[0] + counts[1]]
    rows = sets[-1] if counts[2] else None
    pairs = [(ours, theirs) for ours, theirs in contamination]
    return Data(training, weights, held_out, rows, pairs)


def _keep_bounds(written: Path) -> None:
    """Remove the files that were read the longest ago, until the rest is within the limits."""
    found = sorted(written.parent.glob("*.rows"), key=lambda file: -file.stat().st_mtime)
    total = 0
    for number, file in enumerate(found):
        total += file.stat().st_size
        if file != written and (number >= MOST_FILES or total > MOST_BYTES):
            file.unlink(missing_ok=True)
