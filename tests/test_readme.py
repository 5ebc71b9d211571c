"""What the README lists is what there is."""

from conftest import ROOT
from reason_llm.app.report.alarms import CHECKS
from reason_llm.config.algorithms import ALGORITHMS
from reason_llm.score.table import REWARDS

README = (ROOT / "README.md").read_text()


def test_every_algorithm_has_its_row() -> None:
    for name, row in ALGORITHMS.items():
        assert f"| `{name}` | {row.idea} | {row.source} |" in README, name


def test_every_reward_is_named() -> None:
    assert all(f"`{name}`" in README for name in REWARDS)


def test_every_config_is_there() -> None:
    named = {word for word in README.split() if word.startswith("configs/") and ".yaml" in word}
    assert named
    assert all((ROOT / word.strip("`,.;:)")).is_file() for word in named)


def test_every_alarm_is_explained() -> None:
    explained = (ROOT / "docs" / "report.md").read_text()
    assert all(f"| {title} |" in explained for title in CHECKS)
