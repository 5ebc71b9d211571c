"""What the README and the tables of docs/ list is what there is."""

import re
from typing import get_args

from conftest import ROOT
from house import PACKAGE
from reason_llm.app.report.alarms import ALARMS
from reason_llm.config import StageName
from reason_llm.config.algorithms import ALGORITHMS
from reason_llm.config.preferences import PREFERENCES
from reason_llm.config.sections import CHANGES
from reason_llm.config.surrogates import SURROGATES
from reason_llm.model.families import WITHOUT_VLLM
from reason_llm.score.rewards import REWARDS

README = (ROOT / "README.md").read_text()
LOG = "\n".join(path.read_text() for path in sorted((ROOT / "docs" / "log").glob("2*.md")))


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_every_algorithm_has_its_row() -> None:
    algorithms = page("algorithms.md")
    for name, row in ALGORITHMS.items():
        assert f"| `{name}` | {row.idea} | {row.source} |" in algorithms, name
    assert f"GRPO, DAPO and {len(ALGORITHMS) - 2} relatives" in README


def test_every_algorithm_has_its_values() -> None:
    algorithms = page("algorithms.md")
    for name, row in ALGORITHMS.items():
        reads_clips = "clip_low" in SURROGATES[row.surrogate].columns
        clips = f"{row.clip_low:g}, {row.clip_high:g}" if reads_clips else "–"
        kl = f"{row.kl}, {row.kl_coefficient:g}, {row.kl_place}, {row.kl_reference}"
        cells = [row.baseline, row.scale, row.surrogate, clips, row.aggregation,
                 "none" if row.kl == "none" else kl]  # fmt: skip
        assert f"| `{name}` | {' | '.join(cells)} |\n" in algorithms, name
    # What the table leaves out differs where the text below it says so.
    assert {name for name, row in ALGORITHMS.items() if row.dynamic_sampling > 1} == {"dapo"}
    assert {name for name, row in ALGORITHMS.items() if row.normalization != "total"} == {"gdpo"}
    ratios = {name: row.ratio for name, row in ALGORITHMS.items() if row.ratio != "token"}
    sequence = dict.fromkeys(("gspo", "luspo"), "sequence")
    assert ratios == sequence | {"gspo_token": "sequence_token"}


def test_every_preference_loss_has_its_values() -> None:
    algorithms = page("algorithms.md")
    for name, row in PREFERENCES.items():
        numbers = (row.beta, row.label_smoothing, row.margin, row.nll_coefficient)
        assert f"| `{name}` | {' | '.join(f'{n:g}' for n in numbers)} |\n" in algorithms, name


def test_what_may_change_when_a_run_goes_on_is_the_table() -> None:
    resuming = page("resuming.md")
    rows = dict(
        re.findall(r"^\| (freely|freely, if .*?|with a warning) \| (.*) \|$", resuming, re.M)
    )
    found = {how: set(re.findall(r"`([\w.]+)\*?`", text)) for how, text in rows.items()}
    warned = found.pop("with a warning")
    assert len(found) == 2
    assert set.union(*found.values()) == {key for key, how in CHANGES.items() if how == "free"}
    assert warned == {key for key, how in CHANGES.items() if how == "warn"}


def test_every_preference_loss_has_its_row() -> None:
    algorithms = page("algorithms.md")
    for name, row in PREFERENCES.items():
        assert f"| `{name}` | {row.idea} | {row.source} |" in algorithms, name
        assert f"`{name}`" in page("algorithms.md").partition("\n## RLHF")[2]


def test_every_stage_is_explained() -> None:
    assert all(f"| `{stage}`" in page("algorithms.md") for stage in get_args(StageName))


def test_every_reward_is_named() -> None:
    assert all(f"| `{name}` |" in page("rewards.md") for name in REWARDS)


def test_it_is_read_in_a_minute() -> None:
    lines = README.splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100


def test_every_number_of_the_readme_is_on_the_other_pages() -> None:
    table = README[README.index("| measured on two") :].partition("\n\n")[0]
    others = page("benchmarks.md") + page("gpu.md") + LOG
    numbers = re.findall(r"\d[\d.]*\d", table)
    assert len(numbers) > 10
    assert [n for n in numbers if n not in others] == []


def test_the_cards_of_the_readme_are_those_of_the_page() -> None:
    text = page("gpu.md")
    table = text[text.index("| model | base weights |") :].partition("\n\n")[0]
    lines = (line.strip("|").split("|") for line in table.splitlines())
    (_, _, *cards), _, *rows = ([cell.strip() for cell in line] for line in lines)
    fits = {
        (card, model.rpartition("-")[2], weights, context.strip("*"))
        for model, weights, *contexts in rows
        for card, context in zip(cards, contexts, strict=True)
    }
    named = re.findall(r"^\| (\d+ GB) \| (.*) \|$", README, re.M)
    assert [card for card, _ in named] == cards
    for card, models in named:
        claims = re.findall(r"(\d+B) in (\w+) \((\d+)\)", models)
        assert claims and {(card, *claim) for claim in claims} <= fits


def test_every_config_is_there() -> None:
    named = {word for word in README.split() if word.startswith("configs/") and ".yaml" in word}
    assert named
    assert all((ROOT / word.strip("`,.;:)")).is_file() for word in named)


def test_every_alarm_is_explained() -> None:
    assert all(f"| {title} |" in page("report.md") for title in ALARMS)


def test_every_family_that_vllm_cannot_share_is_named() -> None:
    assert all(f"`{family}` | no |" in page("configs.md") for family in WITHOUT_VLLM)


def test_the_tree_names_every_folder_and_module() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().partition("## Layout")[2]
    entries = {
        e.name + "/" * e.is_dir() for e in PACKAGE.iterdir() if e.name[:2] not in ("__", "py")
    }
    assert entries <= set(re.findall(r"(?<=\s)\w+(?:\.py|/)(?=\s)", tree))


def beside_other_trainers() -> list[list[str]]:
    """The table of docs/benchmarks.md: what is compared, ours, TRL."""
    text = page("benchmarks.md")
    table = text[text.index("| | reason_llm |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_every_number_beside_other_trainers_is_in_the_log() -> None:
    cells = [cell for row in beside_other_trainers() for cell in row[1:]]
    numbers = [n for cell in cells for n in re.findall(r"\d[\d.,]*\d", cell)]
    assert len(numbers) > 15
    assert [n for n in numbers if not re.search(rf"(?<![\d.]){re.escape(n)}(?!\d)", LOG)] == []


def test_what_was_not_measured_is_said() -> None:
    rows = beside_other_trainers()
    assert len(rows) > 5
    assert "Unsloth and verl were not measured." in page("benchmarks.md")
    (on_a_gpu,) = (row for row in rows if "on an H200" in row[0])
    assert on_a_gpu[1:] == ["11.9 s; 25.2 GiB", "14.0 s; 36.5 GiB"]
    assert "11.9, TRL 14.0; 25.2, TRL 36.5" in (ROOT / "README.md").read_text()


def test_every_entry_of_the_log_is_in_both_of_its_tables() -> None:
    index = page("log/README.md")
    entries = {path.name for path in (ROOT / "docs" / "log").glob("2*.md")}
    for table in index.split("## By ")[1:]:
        assert set(re.findall(r"\]\(([\w.-]+\.md)\)", table)) == entries
