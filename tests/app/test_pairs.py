"""Rows out of saved rollouts: which completions are chosen, that their tokens are learned as they
were sampled, and that what cannot be used is one line."""

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TINY
from reason_llm.app.cli import main
from reason_llm.app.pairs import write_pairs
from reason_llm.config import Config, PairForm, PairsSection
from reason_llm.data import Data, load_data
from reason_llm.errors import ConfigError, DataError, RolloutBufferError, WriteError
from reason_llm.model import load_tokenizer
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run import Document, RunIdentity, to_bytes

END = 2
tokenizer = load_tokenizer(str(TINY))
Sampled = tuple[str, float]
"""Text and reward; a text that ends with … was cut off."""


def ids_of(text: str) -> tuple[int, ...]:
    """One token a character, as no tokenizer would write it, and the end token."""
    ids = [token for character in text for token in tokenizer.encode(character)]
    return tuple(ids) if text.endswith("…") else (*ids, END)


def completion(text: str, reward: float) -> Completion:
    ids = ids_of(text)
    finish = "length" if text.endswith("…") else "stop"
    rewards = {"right": reward, "short": -float(len(text))}
    return Completion(ids, text, (-1.0,) * len(ids), finish, rewards, reward, 0.0)  # type: ignore[arg-type]


def group(question: str, *sampled: Sampled) -> Group:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = Prompt(f"x.jsonl:{question}", text, tuple(tokenizer.encode(text)), "4")
    return Group(prompt, tuple(completion(*each) for each in sampled))


def save(folder: Path, *steps: Sequence[Group], model: str = str(TINY)) -> Path:
    """A run's folder ``buffers`` with these steps."""
    run = RunIdentity("abc", "mine", {"model": {"path": model}})
    (folder / "buffers").mkdir(parents=True)
    for number, groups in enumerate(steps):
        document = Document(run, number, True, True, len(groups), list(groups))
        path = folder / "buffers" / f"step-{number:08d}.json.gz"
        path.write_bytes(to_bytes(document, compressed=True))
    return folder / "buffers"


def written(source: Path, form: PairForm, model: str | None = None, **options: Any) -> list[dict]:
    target = source.parent / f"{form}.jsonl"
    target.unlink(missing_ok=True)
    counts = write_pairs([source], target, form, PairsSection.model_validate(options), model)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert counts.rows == len(rows)
    return rows


MIXED = group("2+2?", ("five", 0.0), ("4", 1.0), ("six", 0.0), ("What", 1.0), ("4", 1.0))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [("4", "five")]),
        ({"by": "threshold"}, [("4", "five")]),
        ({"by": "threshold", "threshold": 1.5}, []),
        ({"by": "all"}, [("4", "five"), ("What", "six"), ("4", "six"), ("What", "five")]),
        ({"by": "all", "per_prompt": 2}, [("4", "five"), ("What", "six")]),
        ({"reward": "short"}, [("4", "five")]),
    ],
    ids=str,
)
def test_pairs_of_a_group(options: dict, expected: list, tmp_path: Path) -> None:
    source = save(tmp_path, [MIXED, group("equal?", ("a", 0.5), ("b", 0.5))])
    if "reward" in options:
        source = save(tmp_path / "other", [MIXED])
    if not expected:
        with pytest.raises(DataError, match="nothing to write: 7 rollouts hold no preferences"):
            written(source, "preferences", **options)
        return
    rows = written(source, "preferences", **options)
    assert [(row["chosen"], row["rejected"]) for row in rows] == expected
    assert all(row["chosen_reward"] > row["rejected_reward"] for row in rows)


@pytest.mark.parametrize(
    ("form", "options"),
    [("preferences", {"threshold": 2}), ("demonstrations", {"by": "best", "threshold": 2}),
     ("labels", {"bins": 3}),
     ("conditioned", {"threshold": 0.5})],
)  # fmt: skip
def test_an_option_that_a_way_does_not_read_is_refused(
    form: PairForm, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="would be ignored"):
        PairsSection.model_validate(options).way(form)


def test_what_was_cut_off_is_rejected_and_never_chosen(tmp_path: Path) -> None:
    only_cut = group("1?", ("12…", 1.0), ("no", 0.0))
    beside = group("2?", ("12…", 1.0), ("12", 1.0), ("34…", 0.0))
    source = save(tmp_path, [only_cut, beside])
    pairs = [(row["chosen"], row["rejected"]) for row in written(source, "preferences")]
    assert pairs == [("12", "34…")]
    assert [row["completion"] for row in written(source, "demonstrations")] == ["12"]
    labels = [(row["completion"], row["label"]) for row in written(source, "labels")]
    assert labels == [("no", False), ("12", True), ("34…", False)]


def test_what_a_stop_string_ended_gets_an_end_token(tmp_path: Path) -> None:
    sampled = group("2+2?", ("4", 1.0), ("five", 0.0))
    no_ends = tuple(
        replace(c, token_ids=c.token_ids[:-1], logprobs=c.logprobs[:-1])
        for c in sampled.completions
    )
    [row] = written(save(tmp_path, [replace(sampled, completions=no_ends)]), "preferences")
    assert (tuple(row["chosen_ids"]), tuple(row["rejected_ids"])) == (ids_of("4"), ids_of("five"))


def test_demonstrations_are_the_right_ones_once(tmp_path: Path) -> None:
    """Over all buffers: the policy comes to the same prompt again."""
    boxed = group("3+3?", ("so \\boxed{6}", 1.0), ("thus \\boxed{6}", 1.0), ("\\boxed{7}", 0.2))
    source = save(tmp_path, [MIXED, boxed], [MIXED])

    def texts(**options: Any) -> list[str]:
        return [row["completion"] for row in written(source, "demonstrations", **options)]

    assert texts() == ["4", "What", "so \\boxed{6}", "thus \\boxed{6}"]
    assert texts(per_prompt=1) == ["4", "so \\boxed{6}"]
    assert texts(threshold=0.1)[-1] == "\\boxed{7}"
    assert texts(by="best") == ["4", "so \\boxed{6}"]
    assert texts(by="best", per_prompt=3)[2:] == ["so \\boxed{6}", "thus \\boxed{6}", "\\boxed{7}"]
    assert [row["score"] for row in written(source, "demonstrations", by="best")] == [1.0, 1.0]


def load(path: Path, form: str, **preference: Any) -> Data:
    kinds = {"demonstrations": "sft", "preferences": "reward", "labels": "preference"}
    tree: dict[str, Any] = {"stage": kinds[form], "data": {"train": str(path), "form": form}}
    if form == "labels":
        tree["preference"] = {"name": "kto"}
    return load_data(Config.model_validate(tree), tokenizer, 200, end_token_ids=[END])


@pytest.mark.parametrize("form", ["preferences", "labels", "demonstrations"])
def test_tokens_are_learned_as_they_were_sampled(form: PairForm, tmp_path: Path) -> None:
    source = save(tmp_path, [MIXED])
    rows = written(source, form)
    found = [row for unit in load(tmp_path / f"{form}.jsonl", form).units for row in unit]
    names = ("chosen", "rejected") if form == "preferences" else ("completion",)
    expected = [(tuple(row["prompt_ids"]), ids_of(row[name])) for row in rows for name in names]
    assert [row.ids for row in found] == [prompt + ids for prompt, ids in expected]
    assert [row.trained for row in found] == [
        (False,) * len(prompt) + (True,) * len(ids) for prompt, ids in expected
    ]
    whole = tokenizer.encode("What")
    assert len(whole) < len(ids_of("What")) - 1  # the texts alone would have other tokens


def test_of_a_row_with_token_ids_no_control_token_of_its_text_is_told(tmp_path: Path) -> None:
    [row, *_] = written(save(tmp_path, [MIXED]), "preferences")
    assert row["prompt"].startswith("<|im_start|>")
    path = tmp_path / "preferences.jsonl"
    said = [line for line in load(path, "preferences").notes() if "control tokens" in line]
    texts = {name: row[name] for name in ("prompt", "chosen", "rejected")}
    path.write_text(json.dumps(texts))
    [line] = [line for line in load(path, "preferences").notes() if "control tokens" in line]
    assert said == [] and "(<|im_start|>) are read as text" in line


def test_an_end_is_asked_only_of_what_is_imitated(tmp_path: Path) -> None:
    source = save(tmp_path, [group("1?", ("12", 1.0), ("34…", 0.0))])
    for form, name in (("preferences", "chosen_ids"), ("labels", "completion_ids")):
        rows = written(source, form)
        path = tmp_path / f"{form}.jsonl"
        assert len(load(path, form).units) == len(rows)
        rows[0][name] = rows[0][name][:-1]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(DataError, match="the completion has no end token"):
            load(path, form)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokenizer": "0123"}, "its token ids are of the tokenizer 0123 and this one is"),
        ({"chosen_ids": None}, "'chosen_ids' is None with 'prompt_ids'"),
        ({"prompt_ids": []}, "'prompt_ids' is []"),
        ({"rejected_ids": [1, -1]}, "'rejected_ids' is [1, -1]"),
        ({"rejected_ids": [1, True]}, "expected a list of token ids"),
        ({"rejected_ids": [1, 10**6]}, "its token ids are of the tokenizer"),
        ({"tokenizer": 5}, "'tokenizer' is 5"),
        ({"chosen": 5}, "'chosen' is 5 with 'prompt_ids'"),
    ],
    ids=str,
)
def test_ids_that_cannot_be_used_are_one_line(change: dict, told: str, tmp_path: Path) -> None:
    (row,) = written(save(tmp_path, [MIXED]), "preferences")
    path = tmp_path / "changed.jsonl"
    path.write_text(json.dumps(row | change) + "\n")
    with pytest.raises(DataError) as caught:
        load(path, "preferences")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def damaged(source: Path) -> None:
    path = source / "step-00000000.json.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b"What", b"Whet")))


@pytest.mark.parametrize(
    ("spoil", "options", "error", "told"),
    [
        (damaged, {}, RolloutBufferError, "is not what was written"),
        (lambda s: (s / "step-00000000.json.gz").write_bytes(b"x"), {}, RolloutBufferError,
         "cannot be read"),
        (lambda s: (s / "step-00000000.json.gz").unlink(), {}, RolloutBufferError, "holds no step"),
        (lambda s: None, {"reward": "wit"}, ConfigError, "no reward 'wit'; it has right, short"),
        (lambda s: None, {"by": "best"}, ConfigError, "by best makes no preferences"),
        (lambda s: None, {"threshold": 2}, ConfigError, "threshold=2.0 would be ignored"),
    ],
    ids=["edited", "cut", "missing", "reward", "way", "threshold"],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(
    spoil: Callable[[Path], Any], options: dict, error: type, told: str, tmp_path: Path
) -> None:
    source = save(tmp_path, [MIXED])
    spoil(source)
    with pytest.raises(error) as caught:
        written(source, "preferences", **options)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "preferences.jsonl").exists()


def test_buffers_of_two_models_are_told_apart(tmp_path: Path) -> None:
    sources = [save(tmp_path / "a", [MIXED]), save(tmp_path / "b", [MIXED], model="other")]
    target = tmp_path / "out.jsonl"
    with pytest.raises(RolloutBufferError, match="was sampled by other"):
        write_pairs(sources, target, "preferences", PairsSection())
    named = write_pairs(sources, target, "preferences", PairsSection(), str(TINY))
    assert (named.rows, named.left_out["that stand there already"]) == (1, 1)


def test_steps_that_are_not_there_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = save(tmp_path, [MIXED], [MIXED], [MIXED], [MIXED])
    written(source, "preferences")
    written(source / "step-00000002.json.gz", "preferences")
    assert not caplog.messages
    (source / "step-00000000.json.gz").unlink()
    (source / "step-00000002.json.gz").unlink()
    written(source, "preferences")
    [told] = caplog.messages
    assert told.startswith(f"{source} lacks 2 of its 4 steps, the first is step 0: no rows are")


def test_files_that_were_swapped_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = save(tmp_path, *([group(f"{n}", ("4", 1.0))] for n in range(2)))
    first, second = sorted(source.glob("*.gz"))
    first.write_bytes(second.read_bytes())
    written(source, "demonstrations")
    (told,) = caplog.messages
    assert told.startswith(f"{first} holds step 1 of the run")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = save(tmp_path, [MIXED]), tmp_path / "d.jsonl"
    arguments = ["pairs", str(source), "--out", str(target), "--as", "demonstrations"]
    assert main([*arguments, "--per-prompt", "1"]) == 0
    told = capsys.readouterr().out
    assert told == (
        f"1 demonstrations of 1 prompts, from 5 rollouts in 1 buffers, in {target}; left out: "
        "1 beyond per_prompt\n"
    )
    for change, problem in (
        (["--per-prompt", "2"], f"{target} exists and is not what is written from {source} with"),
        (["--out", "x.json"], "is not a .jsonl file"),
        (["--threshold", "x"], "--threshold x must be a valid number"),
        (["--as", "essays"], "invalid choice: 'essays'"),
    ):
        assert main([*arguments, *change]) == 2
        shown = capsys.readouterr().err
        assert problem in shown
        assert shown.count("\n") == 1


def test_the_same_command_again_changes_nothing(tmp_path: Path) -> None:
    """What a script needs that is called again."""
    source, target = save(tmp_path, [MIXED]), tmp_path / "learned.jsonl"
    section = PairsSection(by="all")

    def line() -> str:
        return write_pairs([source], target, "preferences", section).line

    assert line().startswith("4 preferences of 1 prompts")
    before = target.read_bytes()
    for _ in range(2):
        assert line() == f"{target} holds these rows already"
    target.unlink()
    assert line().startswith("4 preferences")
    assert target.read_bytes() == before


@pytest.mark.parametrize("changed", ["options", "rollouts", "rows"])
def test_other_rows_are_never_overwritten(changed: str, tmp_path: Path) -> None:
    source, target = save(tmp_path, [MIXED]), tmp_path / "learned.jsonl"
    section = PairsSection(by="all")
    write_pairs([source], target, "preferences", section)
    if changed == "options":
        section = PairsSection(by="all", per_prompt=2)
    if changed == "rollouts":
        shutil.rmtree(source)
        save(tmp_path, [group("2+2?", ("five", 0.0), ("4", 1.0))])
    if changed == "rows":
        target.write_bytes(target.read_bytes()[:-100])
    before = target.read_bytes()
    with pytest.raises(WriteError, match=r"is not what is written from .* with these options"):
        write_pairs([source], target, "preferences", section)
    assert target.read_bytes() == before


def test_the_committed_rows_are_what_their_script_writes(tmp_path: Path) -> None:
    for name in ("demonstrations", "preferences", "preferences_test"):
        path = ROOT / "data" / f"arithmetic_{name}.jsonl"
        assert path.stat().st_size < 150_000
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len({row["prompt"] for row in rows}) == len(rows)
        for row in rows:
            first, second = (int(word.strip("?")) for word in row["prompt"].split()[2::2])
            good = row.get("completion", row.get("chosen"))
            assert good.endswith(f"<answer>{first + second}</answer>")
            assert row.get("rejected") != good
