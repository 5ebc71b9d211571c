"""Data that was read and rendered before, from a mapped file, so that a later start of a run, and
its resumption, neither parses nor tokenises a row.

A file is found by the digest of all that its content follows from: rows, options, tokenizer,
template and versions. Rows that user code makes or changes are always read anew, and so are rows
with attachments and small files."""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from functools import cache as once
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from reason_llm.config import Config, share_of
from reason_llm.data import cache
from reason_llm.data.load import load_data, renderer_of
from reason_llm.data.packed import Packed, Prompts, Units
from reason_llm.data.played import player_of
from reason_llm.data.render import Renderer
from reason_llm.data.rows import READERS
from reason_llm.data.sets import Data, DataSet
from reason_llm.errors import ReasonError, one_line
from reason_llm.files import MIB, read_bounded, sha256
from reason_llm.rollout import ROW

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
Told = Callable[[str], object]

LEAST_BYTES = 4 * MIB
"""Total size of the data files from which they are kept."""
UNSEEN = ("run", "log", "memory", "train")
"""Sections of the config that the data do not depend on."""
LIBRARIES = ("jinja2", "tokenizers", "transformers", "trl")


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
            tokenises_later=is_large,
        ).with_digests()

    files = _files(config, extra_columns)
    is_large = files is not None and sum(file.stat().st_size for file in files) >= LEAST_BYTES
    if files is None or not is_large:
        return load()
    options = (context_tokens, sorted(extra_columns), sorted(end_token_ids))
    known = _known(config, tokenizer, options)
    key = _key(known, files)
    path = cache.folder() / f"{key}.rows"
    try:
        data = _read(path, key, renderer_of(config, tokenizer))
    except FileNotFoundError:
        pass
    except (OSError, ValueError, LookupError, TypeError) as error:
        told(f"{path} is damaged ({one_line(error)[:100]}) and is written again")
    else:
        told(f"loaded tokenised data from {path}; delete the file to read the data again")
        return data
    data = load()
    if data.attachments is not None or _key(known, files) != key:
        return data  # each start checks the attachments' files, or a file was changed meanwhile
    try:
        _write(path, key, data)
        told(f"cached tokenised data in {path} for later starts")
        return _read(path, key, renderer_of(config, tokenizer))  # what was in memory is freed
    except (OSError, ReasonError, ValueError, TypeError, OverflowError) as error:
        logger.warning("data was not cached: %s", one_line(error)[:200])
    return data


def _files(config: Config, extra_columns: Collection[str]) -> list[Path] | None:
    """The data files; None where rows come from elsewhere, or user code makes or changes them."""
    section = config.data
    if section.preprocess or player_of(config) is not None or config.reader_prompts:
        return None
    if ROW in extra_columns or config.model.trust_remote_code:
        return None
    sources = [*(each.source for each in section.sources), *config.evaluation_sets.values()]
    given = filter(None, [*sources, config.eval.rows])
    found = [Path(source) for source in given if share_of(source) is None]
    is_file = all(each.suffix.lower() in READERS and each.is_file() for each in found)
    return found if is_file and not section.given else None


def _key(known: bytes, files: Iterable[Path]) -> str:
    """Digest of everything that the data follow from."""
    rows = [(str(file), sha256(file)) for file in files]
    return hashlib.sha256(orjson.dumps(rows) + known).hexdigest()


def _known(config: Config, tokenizer: "PreTrainedTokenizerBase", options: Any) -> bytes:
    """Digest of everything that the data follow from but for the rows."""
    tree = config.model_dump(mode="json")
    for section in UNSEEN:
        del tree[section]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = tokenizer.get_vocab() if backend is None else backend.to_str()
    tokens = [type(tokenizer).__name__, repr(tokenizer.init_kwargs), vocabulary]
    made_by = [_own_source(), *map(version, LIBRARIES)]
    template = renderer_of(config, tokenizer).digest
    return hashlib.sha256(orjson.dumps([tree, tokens, made_by, template, options])).digest()


@once
def _own_source() -> str:
    """Digest of this package's own source."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(read_bounded(file, MIB))
    return digest.hexdigest()


def _write(path: Path, key: str, data: Data) -> None:
    described, arrays = list[Any](), list[Any]()
    held = [] if data.held_out_rows is None else [data.held_out_rows]
    for data_set in (*data.training, *data.held_out, *held):
        described.append(
            {f.name: getattr(data_set, f.name) for f in fields(DataSet) if f.name not in _PACKED}
        )
        arrays += chain.from_iterable(getattr(data_set, name).arrays.values() for name in _PACKED)
    counts = [len(data.training), len(data.held_out), len(held)]
    head = [key, counts, data.weights, data.contamination, data.digests, described]
    cache.write(path, head, arrays)


_PACKED: dict[str, type[Packed[Any]]] = {"prompts": Prompts, "units": Units}


def _read(path: Path, key: str, renderer: Renderer) -> Data:
    """The data of a file. Raises ValueError or another error: it is not what was written."""
    head, arrays = cache.read(path)
    found, counts, weights, contamination, digests, described = head
    if found != key:
        raise ValueError("it holds other data")
    rest, sets = iter(arrays), []
    for kept in described:
        packed = {name: kind([*islice(rest, len(kind.KINDS))]) for name, kind in _PACKED.items()}
        counters = {name: Counter(kept[name]) for name in ("dropped", "ignored", "handed")}
        sets.append(DataSet(**kept | counters | packed))
    for data_set in sets:
        data_set.prompts.encode = renderer.with_ids
    training, held_out = sets[: counts[0]], sets[counts[0] : counts[0] + counts[1]]
    rows = sets[-1] if counts[2] else None
    pairs = [(ours, theirs) for ours, theirs in contamination]
    return Data(training, weights, held_out, rows, pairs, digests=tuple(digests))
