"""Data rows become Prompts: files and Hub sets read, columns found, the chat template applied, an
order drawn.

No torch here. A row that cannot be used is an error with its file and line; nothing is dropped
silently. The order is a pure function of the seed and the position, so resuming needs only a
number.
"""

import codecs
import csv
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from reason_llm.config import ColumnsSection
from reason_llm.errors import DataError, one_line
from reason_llm.rollout import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM_PROMPTS: dict[str, str | None] = {
    "think_answer_tags": (
        "Think first, then answer. Put your reasoning between <think> and </think>, and only the "
        "final answer between "
        "<answer> and </answer>."
    ),
    "boxed": "Reason step by step, and put your final answer within \\boxed{}.",
    "none": None,
}
SYSTEM_PROMPT_OF_REWARD = {
    "boxed": "boxed",
    "think_answer_tags": "think_answer_tags",
    "format": "think_answer_tags",
    "tag_count": "think_answer_tags",
}
PROMPT_COLUMNS = ("messages", "question", "problem", "prompt")
ANSWER_COLUMNS = ("gt_answer", "answer", "solution")

Row = tuple[str, dict[str, Any]]
Messages = list[dict[str, str]]


def load_prompts(
    source: str,
    split: str,
    columns: ColumnsSection,
    system_prompt: str | None,
    tokenizer: "PreTrainedTokenizerBase",
    max_prompt_tokens: int,
    limit: int | None = None,
) -> list[Prompt]:
    """Every row of ``source`` (a file or a Hub id) as a Prompt, in the file's order.

    Args:
        system_prompt: text put before each conversation that has no system message of its own; None
        for none.
        max_prompt_tokens: what the context leaves for a prompt.
        limit: take only this many rows; None for all.

    Raises:
        DataError: with file, line and what was expected.
    """
    prompts: list[Prompt] = []
    for where, row in _rows(source, split):
        if limit is not None and len(prompts) == limit:
            break
        messages, answer = _read_row(where, row, columns)
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        text = _render(where, messages, tokenizer)
        token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
        if len(token_ids) > max_prompt_tokens:
            raise DataError(
                f"{where}: the prompt has {len(token_ids)} tokens and the context leaves "
                f"{max_prompt_tokens} for it; "
                "shorten or remove the row, lower sample.max_new_tokens or raise "
                "model.context_tokens"
            )
        prompts.append(Prompt(id=where, text=text, token_ids=token_ids, answer=answer))
    if not prompts:
        raise DataError(f"{source} holds no rows; give a file with at least one")
    return prompts


def resolve_system_prompt(name: str, first_reward: str) -> str | None:
    """The text that ``data.system_prompt`` names: a named default, ``auto`` by the reward, or the
    text itself."""
    if name == "auto":
        name = SYSTEM_PROMPT_OF_REWARD[first_reward]
    return SYSTEM_PROMPTS.get(name, name)


def _render(where: str, messages: Messages, tokenizer: "PreTrainedTokenizerBase") -> str:
    import jinja2

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise DataError(
            f"{where}: the model's chat template fails on it ({one_line(error)}); mend the template"
            ", or set data.system_prompt=none if it takes no system message"
        ) from error
    if not str(text).strip():
        raise DataError(f"{where}: the model's chat template makes nothing of it; mend it")
    return str(text)


def order(num_prompts: int, seed: int, start: int, count: int) -> list[int]:
    """Indices of the prompts at positions ``start .. start + count`` of an endless shuffled order.

    Each pass over the set is a fresh permutation of it; any slice can be drawn without drawing what
    came before.
    """
    indices: list[int] = []
    while len(indices) < count:
        epoch, offset = divmod(start + len(indices), num_prompts)
        permutation = list(range(num_prompts))
        random.Random(f"{seed}/{epoch}").shuffle(permutation)
        indices += permutation[offset : offset + count - len(indices)]
    return indices


def _rows(source: str, split: str) -> Iterator[Row]:
    """(``where``, row) pairs; ``where`` is file:line for text files, file:row otherwise."""
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
        raise DataError(f"data file {source} {problem}; check data.train and data.eval")
    if path.stat().st_size == 0:
        raise DataError(f"data file {source} is empty; give one row a line")
    try:
        yield from reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise DataError(
            f"data file {source} cannot be read: {error.strerror or error}; check its permissions"
        ) from error


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                cut = "" if line.endswith("\n") else ", and the file ends here: it may be cut short"
                raise DataError(
                    f"{where}: not valid JSON ({error}){cut}; expected one JSON object a line"
                ) from error
            yield where, _as_object(where, row)


def _json_rows(path: Path) -> Iterator[Row]:
    try:
        rows = orjson.loads(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path}: not valid JSON ({error}); expected a list of objects") from error
    if not isinstance(rows, list):
        raise DataError(f"{path}: holds {type(rows).__name__}; expected a list of objects")
    for number, row in enumerate(rows, start=1):
        where = f"{path}:row {number}"
        yield where, _as_object(where, row)


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            for row in reader:
                where = f"{path}:{reader.line_num}"
                if None in row or None in row.values():
                    raise DataError(
                        f"{where}: not {len(reader.fieldnames or [])} fields as in the header; "
                        "mend the row"
                    )
                yield where, row
        except csv.Error as error:
            raise DataError(
                f"{path}:{reader.line_num}: not valid CSV ({error}); mend the row"
            ) from error


def _parquet_rows(path: Path) -> Iterator[Row]:
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


def _hub_rows(source: str, split: str) -> Iterator[Row]:
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


def _as_object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"{where}: holds {type(row).__name__}; expected a JSON object")
    return row


def _read_row(where: str, row: dict[str, Any], columns: ColumnsSection) -> tuple[Messages, str]:
    prompt_column = _column(where, row, columns.prompt, PROMPT_COLUMNS, "data.columns.prompt")
    answer_column = _column(where, row, columns.answer, ANSWER_COLUMNS, "data.columns.answer")
    answer = row[answer_column]
    if (
        isinstance(answer, bool)
        or not isinstance(answer, str | int | float)
        or not gold_answer(str(answer))
    ):
        raise DataError(
            f"{where}: {answer_column!r} is {answer!r}; expected text or a number that is the gold "
            f"answer"
        )
    return _messages(where, prompt_column, row[prompt_column]), gold_answer(str(answer))


def gold_answer(text: str) -> str:
    """The final answer in a gold text: after GSM8K's ``####`` where there is one, else the whole.

    Example: ``"9 * 2 = 18\\n#### 1,018" -> "1018"``
    """
    _, mark, final = text.rpartition("####")
    return final.strip().replace(",", "") if mark else text.strip()


def _column(
    where: str, row: dict[str, Any], named: str | None, usual: Sequence[str], option: str
) -> str:
    candidates = (named,) if named is not None else usual
    for name in candidates:
        if name in row:
            return name
    wanted = f"column {named!r}" if named is not None else f"any of the columns {', '.join(usual)}"
    raise DataError(
        f"{where}: lacks {wanted}; it has {', '.join(map(str, row))}; set {option} to one of these"
    )


def _messages(where: str, column: str, value: Any) -> Messages:
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    messages = [value] if isinstance(value, dict) else value
    is_good = isinstance(messages, list) and messages and all(map(_is_message, messages))
    if not is_good or messages[-1]["role"] != "user":
        raise DataError(
            f"{where}: {column!r} is {str(value)[:60]!r}; expected text, a message "
            '{"role": …, "content": …} or a list of such that ends with a user message'
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
        and bool(value["content"].strip())
    )
