"""Rows that a pipeline's stage learns from, made of the rollouts of earlier ones.

    <pipeline>/<stage>.jsonl        the rows
    <pipeline>/<stage>.rows.json    their origin: form, options, digests of rollouts and rows

If any of these changed, the rows are written again. The same rollouts and options give the same
bytes."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from reason_llm.app.pairs import Written, write_pairs
from reason_llm.config import RowsOfRollouts
from reason_llm.errors import RolloutBufferError
from reason_llm.files import read_object, sha256, write_atomically
from reason_llm.run import buffer_files


def update_rows(
    rows: RowsOfRollouts, archives: Mapping[str, Path], *, anew: bool
) -> tuple[Written, bool] | None:
    """Write the rows, unless those that are there have the same origin; then None. Else what was
    written, and whether other rows were there before.

    Args:
        archives: folder of the archived rollouts of each source. Of one that was deleted, the rows
            that are there count as made.
        anew: write them in any case.
    """
    record, before = rows.path.with_suffix(".rows.json"), _sha256(rows.path)
    known: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        known = read_object(record)
    noted = known.get("rollouts")
    noted = noted if isinstance(noted, dict) else {}
    origin = {
        "form": rows.form,
        "pairs": rows.section.model_dump(mode="json"),
        "rollouts": {n: _digest(archive) or noted.get(n) for n, archive in archives.items()},
    }
    if before is not None and not anew and known == {**origin, "rows_sha256": before}:
        return None
    written = write_pairs([*archives.values()], rows.path, rows.form, rows.section)
    after = _sha256(rows.path)
    content = orjson.dumps({**origin, "rows_sha256": after}, option=orjson.OPT_INDENT_2)
    write_atomically(record, content)
    return written, before not in (None, after)


def _digest(archive: Path) -> str | None:
    """Digest of the names and contents of all archived rollouts; None without any."""
    try:
        files = buffer_files(archive)
    except RolloutBufferError:
        return None
    lines = [f"{file.name} {_sha256(file)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _sha256(file: Path) -> str | None:
    try:
        return sha256(file)
    except OSError:
        return None
