"""Rows in the forms of the most used data sets: each is read right, or refused with the option that
reads it. Columns are those of the sets' cards; every content is made up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.data import Data, load_data
from reason_llm.errors import DataError
from stages import OF_FORM

SETS = [
    json.loads(line)
    for line in Path(__file__).with_name("known_sets.jsonl").read_text().splitlines()
]
END = 2


@pytest.fixture
def read(small_run: Callable[..., Config], tokenizer: Any, tmp_path: Path) -> Callable[..., Data]:
    def read(known: dict[str, Any], **options: Any) -> Data:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(known["row"]) + "\n")
        form = options.pop("form", known["form"])
        given = {"score__rewards": [{"name": known.get("reward", "boxed")}]}
        if form != "problems":
            given = {**OF_FORM[form], "algorithm": {}}
        config = small_run(data__train=str(path), data__form=form, **given, **options)
        return load_data(config, tokenizer, 30_000, end_token_ids=[END])

    return read


def test_there_are_at_least_forty_sets() -> None:
    assert len({known["set"] for known in SETS}) >= 60


@pytest.mark.parametrize("known", SETS, ids=[known["set"] for known in SETS])
def test_a_known_set(known: dict[str, Any], read: Callable[..., Data], tokenizer: Any) -> None:
    if "refused" in known:
        with pytest.raises(DataError) as caught:
            read(known)
        assert known["refused"].removeprefix("F") in str(caught.value)
        return
    data = read(known)
    assert list(data.training[0].ignored) == known["ignored"]
    for name in known["ignored"]:
        assert f"{name} (1 row)" in data.notes()[0]
    if known["form"] == "problems":
        (prompt,) = data.prompts
        assert ([prompt.text], prompt.answer) == (known["read"], known["gold"])
        return
    rows = [row for unit in data.units for row in unit]
    trained = [
        [token for token, is_trained in zip(row.ids, row.trained, strict=True) if is_trained]
        for row in rows
    ]
    assert [tokenizer.decode(row.ids) for row in rows] == known["read"]
    assert list(map(tokenizer.decode, trained)) == known["learned"]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "nvidia/OpenMathReasoning",
            {"data__columns": {"answer": "generated_solution"}},
            "height = 4",
        ),
        ("nvidia/OpenCodeReasoning", {"data__columns": {"prompt": "input"}}, "<think>"),
        ("GAIR/LIMO", {"data__columns": {"answer": "solution"}}, "boxed"),
        ("simplescaling/s1K-1.1", {"data__columns": {"answer": "deepseek_attempt"}}, "144"),
        (
            "allenai/winogrande",
            {"data__columns": {"prompt": "sentence"}},
            "\n\nA. shelf\nB. jar\n",
        ),
        ("openlifescienceai/medmcqa", {"data__columns": {"answer": "cop"}}, "A. "),
        ("PrimeIntellect/SYNTHETIC-1", {"data__columns": {"answer": "llm_response"}}, "54"),
        ("timdettmers/openassistant-guanaco", {"form": "texts"}, "### Human:"),
    ],
)
def test_the_option_that_a_refusal_names_reads_the_row(
    name: str, options: dict[str, Any], says: str, read: Callable[..., Data], tokenizer: Any
) -> None:
    known = next(each for each in SETS if each["set"] == name)
    data = read(known, **options)
    texts = [prompt.text for prompt in data.prompts]
    texts += [tokenizer.decode(row.ids) for unit in data.units for row in unit]
    assert says in texts[0]
