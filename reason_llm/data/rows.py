"""Rows of files and Hub sets, each with its place. Their meaning is in ``forms``.

Files are others': only regular ones are read, a line and a ``.json`` file only within a bound. What
one batch of a Parquet file unpacks to is not bounded.
"""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson

from reason_llm.config import EVALUATION_SETS, PYTHON, RowSequence, installation
from reason_llm.data.played import is_played, played_rows
from reason_llm.errors import DataError, one_line
from reason_llm.files import (
    MIB,
    cached_repositories,
    check_nesting,
    hub_refusal,
    open_regular,
    read_bounded,
    similar,
)

Row = dict[str, Any]
Fault = Callable[[DataError], None]
Read = Iterator[tuple[str, Any]]
"""(where, row); a row that cannot be read is replaced by its DataError."""
MOST_LINE_CHARACTERS = 16 * MIB
"""Limit of a line, and of a field of a CSV file; Python takes up to thirty times as much memory."""
MOST_JSON_BYTES = 2048 * MIB
GYM, GYM_SIZE = "gym:", 2000
"""Beginning of a source of tasks from ``reasoning-gym``, and the default number of tasks."""
PARQUET_BATCH_ROWS = 1024
EMPTY: Mapping[str, RowSequence] = {}


def is_empty(value: Any) -> bool:
    """Whether a column or a member says nothing: null, blank text, an empty list or object."""
    return value is None or (
        isinstance(value, str | list | dict)
        and not (value.strip() if isinstance(value, str) else value)
    )


def raise_fault(error: DataError) -> None:
    """A ``Fault`` that raises."""
    raise error


def read_rows(
    source: str, split: str, fault: Fault = raise_fault, given: Mapping[str, RowSequence] = EMPTY
) -> Iterator[tuple[str, Row]]:
    """(``where``, row) pairs of a file, or of a Hub set's split; ``where`` is file:line for text
    files, file:row otherwise. ``fault`` is given what is no row, and reading goes on after it.

    Args:
        given: rows that were given in Python, by their source's name.

    Raises:
        DataError: the file as a whole cannot be read.
    """
    for where, row in _read(source, split, given):
        if isinstance(row, DataError):
            fault(row)
        elif not isinstance(row, dict):
            kind = type(row).__name__
            problem = f"{where}: holds {kind}; expected a JSON object"
            fault(DataError(f'{problem}, such as {{"question": …, "answer": …}}; rewrite the row'))
        else:
            yield where, row


def _read(source: str, split: str, given: Mapping[str, RowSequence]) -> Read:
    if source in given:
        yield from _given_rows(source, given[source])
        return
    if source.startswith(PYTHON):
        raise DataError(
            f"{source} are rows that Python passes; pass them, as in reason_llm.train(config, "
            "rows=rows), or name a file in data.train"
        )
    if source.startswith(GYM):
        asked = ("question", "answer")
        yield from _numbered(source, ({n: task[n] for n in asked} for task in gym_tasks(source)))
        return
    if is_played(source):
        yield from _numbered(source, played_rows(source))
        return
    path = Path(source)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        if path.is_file():
            raise DataError(
                f"{source} is not of a known kind; give a {', '.join(READERS)} file, a data set's "
                "folder or a Hub id"
            )
        yield from _hub_rows(source, split)
        return
    # Checked here, once for all formats: their libraries say it in words of their own.
    try:
        with open_regular(path) as file:
            if not file.read(1):
                raise DataError(f"data file {source} is empty; give one row a line")
        yield from reader(path)
    except FileNotFoundError as error:
        raise DataError(
            f"data file {source} does not exist{similar(source)}; check data.train, data.eval and "
            "eval.sets"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{source}: not UTF-8 at byte {error.start}; save it as UTF-8, in Excel as CSV UTF-8"
        ) from error
    except OSError as error:
        raise DataError(
            f"data file {source} cannot be read: {error.strerror or one_line(error)}; give a file "
            "that can"
        ) from error


def _jsonl_rows(path: Path) -> Read:
    name = str(path)
    with TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
        for number, line in enumerate(_lines(path, file), start=1):
            where = f"{name}:{number}"
            try:
                if not line.isspace():
                    yield where, _parsed(line)
            except (ValueError, RecursionError) as error:
                cut = "" if line.endswith("\n") else ", and the file ends here: it may be cut short"
                problem = f"{where}: not valid JSON ({one_line(error)}){cut}"
                yield where, DataError(f"{problem}; expected one JSON object a line")


def _json_rows(path: Path) -> Read:
    text = read_bounded(path, MOST_JSON_BYTES).decode("utf-8-sig")
    try:
        rows = _parsed(text)
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith("{") and "Extra data" in str(error):  # one object a line
            yield from _jsonl_rows(path)
            return
        raise DataError(
            f"{path}: not valid JSON ({one_line(error)}); expected a list of objects"
        ) from error
    if not isinstance(rows, list):
        raise DataError(
            f"{path}: holds {type(rows).__name__}; expected a list of objects, without another "
            "around it; of a DataFrame, write to_json(…, orient='records')"
        )
    yield from _numbered(str(path), rows)


def _csv_rows(path: Path) -> Read:
    csv.field_size_limit(MOST_LINE_CHARACTERS)  # of the whole process; its own is 128 KiB
    with TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
        lines = _lines(path, file)
        header = next(lines, "")
        mark = max(",;\t", key=header.count)  # a semicolon where the comma is in the numbers
        reader = csv.DictReader(chain([header], lines), delimiter=mark, strict=True)
        try:
            names = [name for name in reader.fieldnames or [] if name]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DataError(f"{path}:1: column {twice!r} occurs twice; rename one")
            for row in reader:
                where, count = f"{path}:{reader.line_num}", len(reader.fieldnames or [])
                odd = DataError(f"{where}: not {count} fields as in the header; fix the row")
                yield where, odd if None in row or None in row.values() else row
        except csv.Error as error:
            raise DataError(
                f"{path}:{reader.line_num}: not valid CSV ({error}); fix the row"
            ) from error


def _parquet_rows(path: Path) -> Read:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(batch_size=PARQUET_BATCH_ROWS)
            yield from _numbered(str(path), (row for batch in batches for row in _rows_of(batch)))
    except UnicodeDecodeError:
        raise  # a ValueError, too
    # ValueError, OverflowError: times that Python has none for, names that stand twice.
    except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{path}: not a whole Parquet file ({one_line(error)[:300]}); write it again"
        ) from error


def _rows_of(batch: Any) -> Iterable[Row]:
    """The rows of a batch of Arrow's; a number of half or single precision as it is written, 0.1,
    and not as the nearest double, 0.10000000149."""
    rows: list[Row] = batch.to_pylist()
    for field in batch.schema:
        if {"float", "halffloat"} & {*re.findall(r"\w+", str(field.type))}:
            for row in rows:
                row[field.name] = _shortest(field.type, row[field.name])
    return rows


def _shortest(kind: Any, value: Any) -> Any:
    """A value of an Arrow type with numbers of few digits."""
    import pyarrow

    if value is None:
        return None
    if pyarrow.types.is_float32(kind) or pyarrow.types.is_float16(kind):
        return float(str(kind.to_pandas_dtype()(value)))
    if pyarrow.types.is_struct(kind):
        return {field.name: _shortest(field.type, value[field.name]) for field in kind}
    if pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind):
        return [_shortest(kind.value_type, each) for each in value]
    return value


READERS: dict[str, Callable[[Path], Read]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
    ".parquet": _parquet_rows,
}


def _numbered(source: str, rows: Iterable[Any]) -> Read:
    for number, row in enumerate(rows, start=1):
        yield f"{source}:row {number}", row


def _given_rows(source: str, rows: RowSequence) -> Read:
    for where, row in _numbered(source, rows):
        try:
            if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
                raise DataError(
                    f"{where}: is {type(row).__name__} {str(row)[:60]!r}; expected a dict with the "
                    "names of columns; of a DataFrame give frame.to_dict('records')"
                )
            check_made(where, row)
            yield where, dict(row)
        except DataError as error:
            yield where, error


def check_made(where: str, row: Mapping[str, Any]) -> None:
    """Raise DataError for a row made in Python with what no file could hold: text that is not
    Unicode, nesting without end, a number of thousands of digits."""
    try:
        check_nesting(row)
        json.dumps(dict(row), ensure_ascii=False, default=str).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{where}: {one_line(error)}; fix it") from error


def _hub_rows(source: str, split: str) -> Read:
    import datasets

    name, _, subset = source.partition(":")
    if subset and Path(name, subset).is_dir():  # a folder as on the Hub, one for each subset
        name, subset = str(Path(name, subset)), ""
    prepared = Path(datasets.config.HF_DATASETS_CACHE).glob("*")
    is_cached = name.replace("/", "___") in {each.name for each in prepared}
    known = cached_repositories("dataset")
    near = similar(name, [*EVALUATION_SETS.values(), *known])
    asks = not (datasets.config.HF_HUB_OFFLINE or Path(name).exists() or is_cached)
    if asks and name not in known and (refusal := hub_refusal(name, "README.md", "dataset")):
        problem, fix = refusal
        raise DataError(
            f"{source} {problem}{near}; {fix}, a {', '.join(READERS)} file, or an id such as "
            "openai/gsm8k:main"
        )
    try:
        rows = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        problem = one_line(error)
        if (folder := Path(name)).is_dir():
            files = [file for file in sorted(folder.iterdir()) if file.suffix.lower() in READERS]
            if len(files) == 1 and "train" not in files[0].stem.lower():  # of no named split
                yield from _read(str(files[0]), split, EMPTY)
                return
            raise DataError(
                f"the folder {source} cannot be read as a data set ({problem}); name one of its "
                "files"
            ) from error
        if datasets.config.HF_HUB_OFFLINE:
            problem = "HF_HUB_OFFLINE is set, and the Hub's cache does not hold it"
        raise DataError(
            f"{source} is neither a file here nor a Hub data set that can be read ({problem})"
            f"{near}; give a .jsonl, .json, .csv or .parquet file, or an id such as "
            "openai/gsm8k:main"
        ) from error
    yield from _numbered(source, _as_written(rows))


def _as_written(rows: Any) -> Iterator[Row]:
    """The rows of a ``datasets.Dataset``, with JSON columns as the file has them: of a column of
    mixed types ``datasets`` reads the text ``"007"`` as 7, and ``"1e3"`` as 1000.0."""
    names = [name for name, feature in rows.features.items() if _holds_json(feature)]
    if not names:
        kinds = rows.features.arrow_schema
        floats = [field for field in kinds if str(field.type) in ("float", "halffloat")]
        for row in rows:
            yield dict(row) | {f.name: _shortest(f.type, row[f.name]) for f in floats}
        return
    stored = rows.select_columns(names).with_format("arrow").iter(batch_size=PARQUET_BATCH_ROWS)
    texts = (row for table in stored for row in table.to_pylist())
    for row, text in zip(rows, texts, strict=True):
        yield dict(row) | {name: _read_stored(rows.features[name], text[name]) for name in names}


def _parts(feature: Any) -> Iterable[Any]:
    if isinstance(feature, dict):
        return feature.values()
    return [feature.feature] if hasattr(feature, "feature") else []


def _holds_json(feature: Any) -> bool:
    return type(feature).__name__ == "Json" or any(map(_holds_json, _parts(feature)))


def _read_stored(feature: Any, value: Any) -> Any:
    """A value of Arrow's storage. Numbers that JSON would write in another way were texts."""
    if value is None or not _holds_json(feature):
        return value
    if isinstance(feature, dict):
        return {name: _read_stored(part, value[name]) for name, part in feature.items()}
    if type(feature).__name__ != "Json":
        (part,) = _parts(feature)
        return [_read_stored(part, each) for each in value]
    try:
        found = _parsed(value)
    except (ValueError, RecursionError):
        return value
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return value if is_number and json.dumps(found) != value else found


def options_of(asked: str) -> dict[str, Any]:
    """Options after the ``?`` of a source: each is JSON, or else a text; ValueError for one without
    a value."""
    options: dict[str, Any] = dict(parse_qsl(asked, strict_parsing=True))
    for key, text in options.items():
        with suppress(orjson.JSONDecodeError):
            options[key] = orjson.loads(text)
    return options


def gym_maker(source: str) -> Callable[[], Any]:
    """A function that makes the data set of ``gym_tasks`` and can be pickled.

    Raises:
        ImportError: reasoning-gym is not installed. ValueError: an option has no value.
    """
    import reasoning_gym

    name, _, asked = source.removeprefix(GYM).partition("?")
    options = {"size": GYM_SIZE, "seed": 0} | options_of(asked)
    return partial(reasoning_gym.create_dataset, name, **options)


@cache
def gym_tasks(source: str) -> Any:
    """The data set that a generator of ``reasoning-gym`` makes, by number from 0, for
    ``gym:chain_sum?size=2000&seed=1`` with further options of the generator.

    Raises:
        DataError: it makes no such tasks, or is not installed.
    """
    try:
        return gym_maker(source)()
    except ImportError as error:
        raise DataError(
            f"{source} needs the package reasoning-gym; install it with: "
            f"{installation.install('gym')}"
        ) from error
    except Exception as error:  # the generators raise what they like
        raise DataError(
            f"{source}: reasoning-gym makes no such tasks ({one_line(error)[:200]}); write "
            "gym:NAME?size=2000&seed=1&OPTION=VALUE with options of that generator"
        ) from error


def _parsed(text: str) -> Any:
    """Strict JSON with integers of any length, which orjson rounds or refuses."""
    if (row := _row_of_texts(text)) is not None:
        return row
    if text.startswith("\ufeff"):
        json.loads(text)  # raises and says so
    value = check_nesting(_STRICT.decode(text))
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _row_of_texts(text: str) -> Row | None:
    """The object of JSON text whose members are texts, each name once; None for any other text. It
    has four quotes a member, beside those that one backslash escapes."""
    if '\\\\"' in text:  # a backslash that is escaped itself
        return None
    try:
        found = orjson.loads(text)
    except ValueError:
        return None
    num_quotes = text.count('"') - text.count('\\"')
    is_one = type(found) is dict and num_quotes == 4 * len(found)
    return found if is_one and {*map(type, found.values())} == {str} else None


def _refuse(constant: str) -> None:
    """Raise ValueError for NaN, Infinity and -Infinity, which Python's json would read."""
    raise ValueError(f"{constant} is not valid JSON")


def _object(pairs: list[tuple[str, Any]]) -> Row:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"key {twice!r} occurs twice in one object")
    return found


_STRICT = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_object)


def _lines(path: Path, file: TextIOWrapper) -> Iterator[str]:
    for number, line in enumerate(iter(partial(file.readline, MOST_LINE_CHARACTERS + 1), ""), 1):
        if len(line) > MOST_LINE_CHARACTERS:
            raise DataError(
                f"{path}:{number}: a line of more than {MOST_LINE_CHARACTERS:,} characters; "
                "break the file into one row a line"
            )
        yield line
