"""The adapter of a run's best evaluation, in ``<run>/adapter_best/``.

Its weights are in every checkpoint (``best.adapter_model.safetensors``), so that a run that goes on
from any of them has its best again. ``adapter_best/`` is made from the newest one, after that is on
disk.
"""

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import orjson

from reason_llm.data import Conditioning
from reason_llm.errors import NotAsWritten
from reason_llm.files import MIB, check_digests, compare, read_object, regular, replacing_folder
from reason_llm.model import adapters, score_head
from reason_llm.run.store.best import Best
from reason_llm.run.store.folder import BEST, BEST_RECORD

PREFIX = "best."
"""Of the best adapter's files in a checkpoint."""
FILES = (adapters.WEIGHTS, score_head.FILE)


def is_in(checkpoint: Path) -> bool:
    """Whether a checkpoint holds the best adapter."""
    return (checkpoint / f"{PREFIX}{adapters.WEIGHTS}").is_file()


def is_written(run: Path, checkpoint: Path, best: Best) -> bool:
    """Whether ``adapter_best/`` is what ``write`` makes of this checkpoint."""
    try:
        check_written(run, checkpoint, best)
    except (OSError, ValueError):
        return False
    return True


def check_written(run: Path, checkpoint: Path, best: Best) -> None:
    """Check that ``adapter_best/`` is what ``write`` makes of this checkpoint.

    Raises:
        ValueError: a file is missing or is another. OSError: one cannot be read.
    """
    folder = run / BEST
    noted = check_digests(folder)
    for name, digest in _noted_best(checkpoint).items():
        compare(f"{BEST}/{name}", noted.get(name, "missing"), digest)
    now = {k: v for k, v in asdict(best).items() if k != "evaluations_since"}
    if (found := read_object(folder / BEST_RECORD, MIB)) != now:
        raise NotAsWritten(f"{BEST}/{BEST_RECORD} tells of {found!s:.200}, and not of {now}")


def _noted_best(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of the best adapter's files in a checkpoint."""
    noted = check_digests(checkpoint)
    return {name: noted[f"{PREFIX}{name}"] for name in FILES if f"{PREFIX}{name}" in noted}


def write(
    run: Path,
    checkpoint: Path,
    best: Best,
    conditioning: Conditioning | None,
    others: Mapping[str, bytes],
) -> None:
    """Make ``adapter_best/`` from a checkpoint, whole or not at all.

    Args:
        conditioning: how scores are written into its prompts.
        others: further files by name.

    Raises:
        WriteError: the disk is full or read-only; the old folder is as it was.
    """
    with replacing_folder(run / BEST) as beside:
        shutil.copyfile(regular(checkpoint / adapters.CONFIG), beside / adapters.CONFIG)
        for name in FILES:
            if (source := checkpoint / f"{PREFIX}{name}").exists():
                shutil.copyfile(regular(source), beside / name)
        if conditioning is not None:
            conditioning.write(beside)
        for name, content in others.items():
            (beside / name).write_bytes(content)
        record = {k: v for k, v in asdict(best).items() if k != "evaluations_since"}
        content = orjson.dumps(record, option=orjson.OPT_INDENT_2)
        (beside / BEST_RECORD).write_bytes(content)
