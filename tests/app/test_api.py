"""``reason_llm.train`` and the other public names, called from a program."""

import copy
import logging
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

import reason_llm
import reason_llm.app.training  # what is imported later may set up loggers of its own
from conftest import ROOT
from reason_llm.app.api import _config
from reason_llm.config import Config, file as config_file
from reason_llm.errors import ConfigError, Stopped
from reason_llm.train import losses


@pytest.fixture
def unchanged() -> Iterator[None]:
    """Logging, signals and standard output are the same before and after."""
    package = logging.getLogger("reason_llm")
    mine = logging.NullHandler()
    package.addHandler(mine)
    package.setLevel(logging.DEBUG)
    transformers.logging.set_verbosity_info()
    try:
        names = ["", *logging.root.manager.loggerDict]  # those of what is imported later are new
        before = state(names)
        yield
        assert state(names) == before
    finally:
        package.removeHandler(mine)
        package.setLevel(logging.NOTSET)
        transformers.logging.set_verbosity_warning()


def state(names: list[str]) -> dict[str, Any]:
    return {
        "loggers": {
            name: (logger.level, list(logger.handlers), logger.propagate, logger.disabled)
            for name, logger in zip(names, map(logging.getLogger, names), strict=True)
        },
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "output": [(id(each), each.errors) for each in (sys.stdout, sys.stderr)],
        "bars": transformers.utils.logging.is_progress_bar_enabled(),
        "hooks": (sys.excepthook, sys.displayhook),
    }


def test_train_twice_then_evaluate_and_export(
    small_run: Callable[..., Config], tmp_path: Path, unchanged: None
) -> None:
    config = small_run(run__steps=1, run__name=None)
    summary = reason_llm.train(config)
    assert summary["steps"] == 1
    run = tmp_path / "runs" / "config"
    assert (run / "report.html").exists()
    tree = config.model_dump(mode="json")
    tree["run"] |= {"name": "again", "steps": 1, "buffer": str(tmp_path / "again.json")}
    given = copy.deepcopy(tree)
    assert reason_llm.train(tree)["steps"] == 1
    assert tree == given
    path = tmp_path / "third.yaml"
    path.write_text(config_file.to_yaml(config))
    overrides = {"run.name": "third", "run.buffer": str(tmp_path / "third.json")}
    assert reason_llm.load_config(str(path), overrides).run.name == "third"

    sums = ROOT / "data" / "arithmetic_test.jsonl"
    found = reason_llm.evaluate(
        run,
        sets=[f"sums={sums}"],
        k=2,
        compare="base",
        out=tmp_path / "evaluated",
        overrides={"eval.limit": 2, "log.console": "quiet"},
    )
    assert found["k"] == 2
    assert set(found["models"]) == {"adapter", "base"}
    parity = reason_llm.export(run, tmp_path / "merged", dtype="float32")
    assert parity is not None
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_what_is_given_stays_as_it_is() -> None:
    tree: dict[str, Any] = {"data": {"limit": 3}, "score": {"rewards": ["boxed"]}, "run": {}}
    tree["eval"] = None
    given, config = copy.deepcopy(tree), Config.model_validate({"data": {"train": "x"}})
    overrides = {"score.rewards": ["format"], "data.train": "y", "run.seed": 7}
    for what, limit in ((tree, 3), (config, None), ("data:\n  limit: 3\n", 3)):
        made = _config(what, dict(overrides))
        assert (made.run.name, made.run.seed, made.data.train) == ("config", 7, "y")
        assert made.data.limit == limit
        assert [each.name for each in made.score.rewards] == ["format"]
    assert (tree, config.run.name, config.data.train) == (given, None, "x")


def test_mistakes_are_raised_and_change_nothing(tmp_path: Path, unchanged: None) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'run.stesp'"):
        reason_llm.train({"run": {"stesp": 1}, "data": {"train": "x.jsonl"}})
    with pytest.raises(ConfigError, match=r"does not exist"):
        reason_llm.train(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"neither a run's folder nor"):
        reason_llm.export(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"is empty"):
        reason_llm.evaluate(tmp_path)
    assert list(tmp_path.iterdir()) == []
    config = {"overrides": {"data.train": "x.jsonl", "train.learning_rate": "much"}}
    for what in ("configs/quickstart.yaml", "model/tiny"):
        with pytest.raises(ConfigError, match=r"^argument: train.learning_rate='much'"):
            reason_llm.evaluate(what, **config)
    with pytest.raises(ConfigError, match=r"^--k -1 is not a number of samples"):
        reason_llm.evaluate("configs/quickstart.yaml", k=-1)
    with pytest.raises(ConfigError, match=r"^--sets gsm9k is not one of gsm8k"):
        reason_llm.evaluate("configs/quickstart.yaml", sets=["gsm9k"])
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "resolved_config.yaml").touch()
    with pytest.raises(ConfigError, match=r"there is no run .*mien; did you mean .*runs/mine\?"):
        reason_llm.evaluate(tmp_path / "runs" / "mien")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"reward_funcs": len}, "train has no argument 'reward_funcs'; reward_funcs of TRL is re"),
        ({"train_dataset": []}, "train_dataset of TRL is rows here"),
        ({"num_generations": 8}, "num_generations of TRL is sample.completions_per_prompt here"),
        ({"steps": 8}, "train has no argument 'steps'; did you mean run.steps?"),
    ],
)
def test_arguments_of_others_are_told_by_our_names(given: dict, told: str, unchanged: None) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        reason_llm.train(**given)


def test_a_run_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python and on the command line, before anything is asked of the Hub."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^there is no run runs/none; name a run's folder"):
        reason_llm.evaluate("runs/none")


def test_an_interrupt_changes_nothing(
    small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, unchanged: None
) -> None:
    """A signal in the first step ends the run after what is under way."""
    original = reason_llm.app.training._WatchAndTrackers.step

    def step(*args: Any) -> None:
        original(*args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(reason_llm.app.training._WatchAndTrackers, "step", step)
    with pytest.raises(Stopped):
        reason_llm.train(small_run(run__steps=3))


def test_names_win_over_folders_and_folders_are_still_found() -> None:
    """Both ``reason_llm.train`` and ``reason_llm/train/`` are there; the order of imports is
    nothing to either."""
    assert losses.__name__ == "reason_llm.train.losses"
    assert callable(reason_llm.train) and callable(reason_llm.evaluate)
    from reason_llm import Completion, Group, Prompt, evaluate, train

    assert train is reason_llm.train and evaluate is reason_llm.evaluate
    assert {each.__module__ for each in (Completion, Group, Prompt)} == {"reason_llm.rollout"}
    assert set(reason_llm.__all__) <= set(dir(reason_llm))
    assert all(getattr(reason_llm, name) is not None for name in reason_llm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        reason_llm.trian  # noqa: B018
