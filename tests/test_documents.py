"""What README.md and docs/ say is what there is: configs load, rewards run, rows are read, quoted
messages are in the code. Their commands are run by ``end_to_end/test_docs.py``."""

import ast
import contextlib
import io
import json
import re
from itertools import filterfalse
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT
from documents import DOCUMENTS, Block, blocks, commands, quotes
from reason_llm.config import Config, file as config_file
from reason_llm.config.data import ColumnsSection
from reason_llm.config.other_names import equivalents
from reason_llm.config.score import ScoreSection
from reason_llm.data import forms as row_forms
from reason_llm.data.golds import ANSWER_COLUMNS
from reason_llm.rollout import ROW, Completion, Group, Prompt
from reason_llm.score import Scorer
from reason_llm.score.code.cases import EXTRA_COLUMNS, read_tests
from slices import installed, is_gone

YAML, PYTHON, ROWS = (
    [block for path in DOCUMENTS for block in blocks(path) if block.language == language]
    for language in ("yaml", "python", "json")
)
OWN_REWARDS = [
    block.text
    for block in PYTHON
    if block.where.startswith("rewards.md") and "reason_llm" not in block.text
]
OF_DATA = [block.text for block in PYTHON if block.where.startswith("data.md")]


def test_the_site_has_every_page_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [page for each in (entry.values() if isinstance(entry, dict) else entry)
                for page in pages(each)]  # fmt: skip

    found = [page for page in pages(site["nav"]) if page != "log/README.md"]
    assert sorted(found) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.fixture
def beside_my_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder where my_rewards.py holds the functions of the docs."""
    (tmp_path / "my_rewards.py").write_text("\n\n".join(OWN_REWARDS))
    monkeypatch.chdir(tmp_path)


PLAYED = "environments.md"
"""The page of a folder of the package that a copy may lack."""


@pytest.mark.parametrize(
    "block",
    [each for each in YAML if installed("environments") or not each.where.startswith(PLAYED)],
    ids=lambda block: block.where,
)
@pytest.mark.usefixtures("beside_my_rewards")
def test_yaml_is_a_config_with_rewards_that_can_be_made(block: Block) -> None:
    tree = yaml.safe_load(block.text)
    tree.setdefault("data", {}).setdefault("train", "my_problems.jsonl")
    config = config_file.build(tree, Path("my_config.yaml"), {})
    with Scorer(config.score, config.sample.max_new_tokens) as scorer:
        assert len(scorer.rewards) == len(config.score.rewards)


def score(rewards: list[Any], texts: list[str], **extra: Any) -> list[dict[str, float]]:
    completions = tuple(Completion((1,) * len(text), text, (0.0,), "stop") for text in texts)
    group = Group(Prompt("mine:1", "What is 9 * 2?", (), "18", extra), completions)
    with Scorer(ScoreSection.model_validate({"rewards": rewards}), 512) as scorer:
        (scored,) = scorer.score([group])
    return [dict(completion.rewards) for completion in scored.completions]


@pytest.mark.usefixtures("beside_my_rewards")
def test_the_custom_rewards_of_the_docs_do_what_they_say() -> None:
    names = [
        node.name
        for node in ast.parse("\n\n".join(OWN_REWARDS)).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    rewards = [{"custom": f"my_rewards.py:{name}"} for name in names]
    texts = ["It is 18 cm", "18" + "." * 300, "a\nb\nc"]
    row = {"prompt": "How long?", "columns": {"unit": "cm"}}
    found = score(rewards, texts, unit="cm", **{ROW: row})
    ours = {"is_brief", "three_lines", "shorter_is_better", "in_the_right_unit"}
    assert set(found[0]) == {*ours, "reward_len", "reward_unit"}
    assert [each["reward_len"] for each in found] == [-9, -282, -15]
    assert [each["reward_unit"] for each in found] == [1, 0, 0]
    assert [each["is_brief"] for each in found] == [1, 0, 0]
    assert [each["three_lines"] for each in found] == [0, 0, 1]
    assert [each["in_the_right_unit"] for each in found] == [1, 0, 0]
    brief, long, wrong = (each["shorter_is_better"] for each in found)
    assert brief > long > wrong == 0


def test_the_recipe_for_a_reward_of_verl_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe,) = [block.text for block in PYTHON if "compute_score(" in block.text]
    theirs = (
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    right = ground_truth in solution_str\n"
    )
    monkeypatch.chdir(tmp_path)
    columns = {"data_source": "sums", "reward_model": {"ground_truth": "18"}, "extra_info": {}}
    assert recipe.rstrip().endswith("extra_info)")
    for ends, call in (("right", recipe), ('{"score": right}', f'{recipe.rstrip()}["score"]\n')):
        (tmp_path / "my_rewards.py").write_text(f"{theirs}    return {ends}\n\n\n{call}")
        found = score(["my_rewards.py:score"], ["It is 18", "19"], **columns)
        assert [each["score"] for each in found] == [1, 0]


@pytest.mark.usefixtures("beside_my_rewards")
def test_the_other_python_of_the_docs_runs() -> None:
    others = [block for block in PYTHON if "from reason_llm" in block.text]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        for block in others:
            exec(compile(block.text, block.where, "exec"), {})
    *of_math, first, last = shown.getvalue().splitlines()
    assert of_math == ["1.0", "0.0", "1.0", "True"]
    assert [first, last] == [
        "2 2 None",
        "[{'boxed': 1.0, 'is_brief': 1.0}, {'boxed': 0.0, 'is_brief': 0.0}]",
    ]


def test_the_python_of_the_page_on_data_makes_the_files_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problems = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(20)]
    lines = [json.dumps(row) + "\n" for row in problems]
    (tmp_path / "my_problems.jsonl").write_text("".join(lines))
    judged = tmp_path / "evaluations" / "base_on_train"
    judged.mkdir(parents=True)
    outcomes = [
        {"id": f"my_problems.jsonl:{n}", "samples": [{"reward": 1.0}, {"reward": n % 2}]}
        for n in range(1, 21)
    ]
    (judged / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in outcomes))
    assert len(OF_DATA) == 2
    for text in OF_DATA:
        exec(compile(text, "data.md", "exec"), {})

    def read(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    train, held_out = read("my_train.jsonl"), read("my_held_out.jsonl")
    assert (len(train), len(held_out)) == (18, 2)
    assert sorted(map(str, train + held_out)) == sorted(map(str, problems))
    assert read("my_kept_problems.jsonl") == problems[1::2]  # the others are always solved


def test_the_rows_of_the_docs_are_read() -> None:
    columns, found = ColumnsSection(), []
    for block in ROWS:
        for line in block.text.splitlines():
            row = json.loads(line)
            has_tests = bool({"test_cases", "test", "test_list", *EXTRA_COLUMNS} & row.keys())
            has_answer = has_tests or bool(set(ANSWER_COLUMNS) & row.keys())
            is_talk = bool({*row_forms.CHAT_COLUMNS} & row.keys()) and not has_answer
            if "label" in row:
                row_forms.read_labelled(block.where, row, columns)
            elif {"completion", "output"} & row.keys() or is_talk:
                row_forms.read_demonstration(block.where, row, columns)
            elif "chosen" in row:
                row_forms.read_preference(block.where, row, columns)
            elif "text" in row:
                row_forms.read_document(block.where, row, columns)
            else:
                read = row_forms.read_problem(
                    block.where, row, columns, tests=has_tests, answer=has_answer
                )
                found.append(type(read_tests(read.answer)).__name__ if has_tests else read.answer)
    assert found == ["18", "\\frac{1}{4}", "7", "18", "34", "B", "True", "ProgramTests",
                     "CallTests", "CallTests", "AssertTests", "AssertTests", ""]  # fmt: skip


def said() -> list[str]:
    """Every string of the project, with … for what is filled in."""
    found: list[str] = []
    for path in sorted((ROOT / "reason_llm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sd]|%\.\d[fg]", "…", node.value))
    return found


QUOTES = [quote for path in DOCUMENTS for quote in quotes(path)]


def test_every_quoted_message_is_one_that_the_code_says() -> None:
    strings = said()
    assert len(QUOTES) > 30
    # The parts of a message stand in order in one and the same string.
    unsaid = [
        f"{where}: {message}"
        for where, message in QUOTES
        if not any(map(re.compile(".*".join(map(re.escape, message.split("…")))).search, strings))
    ]
    assert unsaid == []


def anchors(path: Path) -> set[str]:
    """The fragments that a page's headings get, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


def test_every_document_is_linked_and_every_link_leads_somewhere() -> None:
    readme, *pages = DOCUMENTS
    index = ROOT / "docs" / "README.md"
    assert f"(docs/{index.name})" in readme.read_text()
    linked = set(re.findall(r"\]\(([\w.]+\.md)\)", index.read_text()))
    assert {path.name for path in pages if path != index} == linked
    for path in DOCUMENTS:
        text = path.read_text()
        links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(
            r"`((?:docs|configs|reason_llm|tests|scripts)/[\w./-]+)`", text
        )
        for link in filterfalse(is_gone, links):
            target, _, anchor = link.partition("#")
            here = [each for each in (path.parent / target, ROOT / target) if each.exists()]
            assert here, f"{path.name}: {link}"
            page = path if not target else here[0]
            assert not anchor or anchor in anchors(page), f"{path.name}: {link}"


def test_every_option_that_is_named_exists() -> None:
    options = {key for key, _ in config_file.leaves(Config)} | equivalents().keys()
    sections = set(Config.model_fields)
    for path in DOCUMENTS:
        for code in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`", path.read_text()):
            if code.split(".")[0] in sections and not code.endswith(
                (".py", ".yaml", ".json", ".jsonl")
            ):
                known = code in options or any(key.startswith(f"{code}.") for key in options)
                assert known, f"{path.name}: {code}"


def test_commands_are_found() -> None:
    found = {
        str(path.relative_to(ROOT)).removeprefix("docs/"): [str(each) for each in commands(path)]
        for path in DOCUMENTS
        if path != ROOT / "docs" / "README.md"
    }
    assert "make train" in found["README.md"]
    assert "python scripts/train.py --help" in found["configs.md"]
    assert (
        "python scripts/train.py my_config.yaml --data-check" in found["README.md"]
    )  # in the text
    assert "pytest tests/gpu/test_native.py -s" in found["gpu.md"]
    assert sum(map(len, found.values())) > 60
