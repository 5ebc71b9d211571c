"""Files and Hub sets become rows, each with the place it stands at. What a row means is in
``row_forms``.

A line that is no row goes to ``fault``, and reading goes on after it where the format allows; a
training run's ``fault`` raises, the data check's takes notes.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from reason_llm.errors import DataError, one_line

Row = dict[str, Any]
Fault = Callable[[DataError], None]


def raise_fault(error: DataError) -> None:
    """The ``Fault`` that ends everything with the first error."""
    raise error


def read_rows(source: str, split: str, fault: Fault = raise_fault) -> Iterator[tuple[str, Row]]:
    """(``where``, row) pairs; ``where`` is file:line for text files, file:row otherwise.

    Args:
        source: a .jsonl, .json, .csv or .parquet file, or a Hub id.
        split: of a Hub set.

    Raises:
        DataError: the file as a whole cannot be read.
    """
    readers = {
        ".jsonl": _jsonl_rows,
        ".json": _json_rows,
        ".csv": _csv_rows,
        ".parquet": _parquet_rows,
    }
    path = Path(source)
    reader = readers.get(path.suffix.lower())
    if reader is None:
        if path.exists():
            raise DataError(
                f"{source} is of no known kind; give a {', '.join(readers)} file or a Hub id"
            )
        yield from _hub_rows(source, split)
        return
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise DataError(f"data file {source} {problem}; check data.train, data.eval and eval.sets")
    if path.stat().st_size == 0:
        raise DataError(f"data file {source} is empty; give one row a line")
    try:
        yield from reader(path, fault)
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(
            f"data file {source} cannot be read: {error.strerror or error}; check its permissions"
        ) from error


def _jsonl_rows(path: Path, fault: Fault) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = _parsed(line)
            except (ValueError, RecursionError) as error:
                cut = "" if line.endswith("\n") else ", and the file ends here: it may be cut short"
                fault(
                    DataError(
                        f"{where}: not valid JSON ({error}){cut}; expected one JSON object a line"
                    )
                )
                continue
            if _is_object(where, row, fault):
                yield where, row


def _json_rows(path: Path, fault: Fault) -> Iterator[tuple[str, Row]]:
    try:
        rows = _parsed(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise  # a ValueError, too
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); expected a list of objects") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds {type(rows).__name__}; expected a list of objects")
    for number, row in enumerate(rows, start=1):
        where = f"{path}:row {number}"
        if _is_object(where, row, fault):
            yield where, row


def _csv_rows(path: Path, fault: Fault) -> Iterator[tuple[str, Row]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    fault(
                        DataError(
                            f"{where}: not {len(reader.fieldnames or [])} fields as in the header; "
                            "mend the row"
                        )
                    )
                    continue
                yield where, row
        except csv.Error as error:
            raise DataError(
                f"{path}:{reader.line_num}: not valid CSV ({error}); mend the row"
            ) from error


def _parquet_rows(path: Path, fault: Fault) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:row {number}", row
    except pyarrow.ArrowException as error:
        raise DataError(
            f"{path}: not a whole Parquet file ({one_line(error)}); write it again"
        ) from error


def _hub_rows(source: str, split: str) -> Iterator[tuple[str, Row]]:
    import datasets

    try:
        name, _, subset = source.partition(":")
        rows = datasets.load_dataset(name, subset or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{source} is neither a file here nor a Hub data set that can be read "
            f"({one_line(error)}); "
            "give a .jsonl, .json, .csv or .parquet file, or an id such as openai/gsm8k:main"
        ) from error
    for number, row in enumerate(rows, start=1):
        yield f"{source}:row {number}", dict(row)


def _parsed(text: str) -> Any:
    """Strict JSON, and integers of any length: tests of programs have them, and orjson, which is
    faster, rounds or refuses those beyond 64 bits.

    Raises:
        ValueError: it is not, or holds half a character that no tokenizer takes.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    value = json.loads(text, parse_constant=refuse)
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _is_object(where: str, row: Any, fault: Fault) -> bool:
    if not isinstance(row, dict):
        fault(DataError(f"{where}: holds {type(row).__name__}; expected a JSON object"))
    return isinstance(row, dict)
