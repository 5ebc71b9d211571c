"""Options: files, overrides, and every kind of mistake as one line."""

import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from reason_llm.config import Config, file as config_file
from reason_llm.config.command_line import read_command_line
from reason_llm.config.file import build, changes, leaves, load, to_yaml
from reason_llm.config.other_names import Equivalent, equivalents
from reason_llm.config.sections import CHANGES
from reason_llm.errors import ConfigError, ReasonError

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
RUNS = [path for path in CONFIGS if "stages" not in yaml.safe_load(path.read_text())]
"""Without the pipelines, which ``test_pipeline`` loads."""


def write(folder: Path, text: str) -> Path:
    path = folder / "my_run.yaml"
    path.write_text(text)
    return path


def parse(*arguments: str) -> Config:
    what = ("CONFIG.yaml", "")
    line = read_command_line("train.py", "", what, arguments, {}, in_force=True)
    return line.config()


@pytest.mark.parametrize("path", RUNS, ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_comes_back_the_same(path: Path, tmp_path: Path) -> None:
    config = load(path)
    assert config.run.name == path.stem
    again = load(write(tmp_path, to_yaml(config)))
    assert again == config


def test_overrides_win_and_are_read_as_yaml(tmp_path: Path) -> None:
    config = parse(
        "--train.learning_rate",
        "1e-4",
        "--run.steps=7",
        "--data.eval",
        "null",
        "--eval.every",
        "10",
        "--model.adapter.targets",
        "[q_proj, v_proj]",
    )
    assert config.train.learning_rate == 1e-4
    assert config.run.steps == 7
    assert config.data.eval is None
    assert config.model.adapter.targets == ["q_proj", "v_proj"]


def test_positional_config_path(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: x.jsonl}\nrun: {steps: 3}\n")
    assert parse(str(path)).run.steps == 3
    assert parse(str(path), "--run.steps", "4").run.steps == 4


def test_every_option_has_a_docstring_and_stands_in_help(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for key, option in leaves(Config):
        assert option.description, key
        assert f"--{key} " in shown


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("data: {train: x}\ntrain: {lerning_rate: 1}\n", ["lerning_rate", "train.learning_rate"]),
        ("data: {train: x}\nsteps: 3\n", ["'steps'", "run.steps"]),
        ("run: {steps: 3}\n", ["data", "missing"]),
        ("data: {train: x}\nrun: {steps: many}\n", ["run.steps='many'", "must be a valid integer"]),
        ("data: {train: x}\nrun: {steps: true}\n", ["run.steps=True"]),
        ("data: {train: x}\nrun: {steps: 0}\n", ["run.steps=0", "greater than or equal to 1"]),
        ("data: {train: x}\ntrain: {learning_rate: .nan}\n", ["learning_rate=nan"]),
        ("data: {train: x}\ntrain: {micro_batch_tokens: lots}\n", ["micro_batch_tokens='lots'"]),
        ("data: {train: x}\nrun: {name: ../up}\n", ["run.name='../up'", "folder name"]),
        ("data: {train: x}\nalgorithm: {name: grpoo}\n", ["algorithm.name='grpoo'", "grpo, dapo"]),
        ("data: {train: x}\nscore: {rewards: []}\n", ["score.rewards"]),
        ("data: {train: x}\nscore: {rewards: [{name: boxed}, {name: boxed}]}\n", ["twice"]),
        (
            "data: {train: x}\nscore: {rewards: [{custom: 'my.py:reward'}]}\n",
            ["score.rewards", "score/reward is a metric of its own; rename the function reward"],
        ),
        (
            "data: {train: x}\nscore: {rewards: [{nam: boxed}]}\n",
            ["score.rewards.0.nam", "score.rewards takes LIST: List of {name, weight, options}"],
        ),
        (
            "data: {train: x}\nscore: {rewards: [3]}\n",
            ["score.rewards.0=3", "List of {name, weight, options}"],
        ),
        (
            "data: {train: x}\nalgorithm: {name: dapo, kl_coefficient: 0.1}\n",
            ["kl_coefficient=0.1", "algorithm.kl"],
        ),
        ("data: {train: x}\neval: {sets: {a/b: x}}\n", ["eval.sets", "'a/b'"]),
        ("data: {train: 5}\n", ["data.train=5", "must be a valid string", "{source, weight}"]),
        ("data: {train: []}\n", ["data.train=[]", "at least 1"]),
        ("data: {train: [{weight: 1}]}\n", ["data.train.0.source is missing"]),
        (
            "data: {train: [{source: a, wieght: 1}]}\n",
            ["data.train.0.wieght", "a list of {source, weight}"],
        ),
        ("data: {train: [a, {source: a}]}\n", ["names a twice"]),
        ("data: {train: x, pass_rate: {column: r, min: 2}}\n", ["min=2", "pass_rate.max=1"]),
        ("data: {train: x, pass_rate: {min: 0.5}}\n", ["data.pass_rate.column"]),
        ("data: {train: x, contamination: no}\n", ["data.contamination", "warn"]),
        ("data: {train: x, form: sft}\n", ["data.form='sft'", "demonstrations", "labels"]),
        ("data: {train: x, max_tokens: 9}\n", ["data.max_tokens=9", "max_prompt_tokens"]),
        (
            "data: {train: x, form: texts, max_prompt_tokens: 9}\n",
            ["data.max_prompt_tokens=9", "data.max_tokens"],
        ),
        ("data: {train: x}\nstage: [rl]\n", ["stage=['rl']", "rl"]),
        ("stage:", ["stage=", "rl"]),
        ("data: [\n", ["not valid YAML", "my_run.yaml"]),
        ("- 1\n", ["holds list"]),
        ("", ["holds NoneType"]),
    ],
)
def test_a_mistake_is_one_line_with_key_and_value(
    text: str, named: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    message = str(caught.value)
    assert "\n" not in message
    for part in named:
        assert part in message


TEN = """
run: {steps: many, name: ../up}
model: {quantize: int4}
data: {trian: x}
sample: {temperature: 0, completions_per_prompt: 0}
score: {rewards: [3, {name: boxed, weight: x}]}
train: {lerning_rate: 1}
log: {trackers: wandbb}
"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TEN, ["unknown key 'data.trian'; did you mean data.train?", "'train.lerning_rate'",
               "run.name='../up'", "run.steps='many'", "model.quantize='int4'", "temperature=0",
               "completions_per_prompt=0", "score.rewards.0=3", "score.rewards.1.weight='x'",
               "log.trackers.0='wandbb'"]),
        # Options that contradict each other, and what only a section or the whole can tell.
        ("data: {train: x}\nstage: sft\nsample: {temperature: 0}\nalgorithm: {top_k: 3}\n"
         "run: {from_buffer: a}\ntrain: {optimizer_steps: 99}\ncritic: {gamma: 0.5}\n",
         ["sample.temperature=0", "algorithm.top_k=3", "the critic section", "run.from_buffer=a",
          "train.optimizer_steps=99"]),
        # No mistake that is only there for want of another option.
        ("data: {train: x}\nrun: {steps: many}\ntrain: {warmup_steps: 100}\n", ["run.steps="]),
        ("data: {train: x}\nalgorithm: {name: gropo}\nsample: {completions_per_prompt: 1}\n",
         ["'gropo'"]),
        ("data: {train: [{source: a, weight: x}, {wieght: 1}]}\neval: {every: x}\n",
         ["wieght'", "data.train.0.weight='x'", "data.train.1.source is missing", "eval.every"]),
    ],
)  # fmt: skip
def test_all_mistakes_are_told_at_once(text: str, told: list[str], tmp_path: Path) -> None:
    path, mistakes = write(tmp_path, text), list[ReasonError]()
    with pytest.raises(ConfigError) as caught:
        load(path)
    lines = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert len(lines) == len(told), "\n".join(lines)
    for part in told:
        assert sum(part in line for line in lines) == 1, part
    assert not any("\n" in line for line in lines)
    with suppress(ConfigError):  # where nothing is left
        left = load(path, {}, mistakes)
        assert list(map(str, mistakes)) == lines
        assert left.data.train == "x" and left.run.steps == 100


def test_what_is_given_in_python_stays_as_it_is() -> None:
    weighted = {"name": "boxed", "weight": "x"}
    given: list[Any] = [3, weighted]
    with pytest.raises(ConfigError, match=r"rewards\.0=3"):
        build({"data": {"train": "x"}}, Path("x"), {"score.rewards": given})
    assert (given, weighted) == ([3, weighted], {"name": "boxed", "weight": "x"})


def test_all_wrong_arguments_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"--run\.stesp") as caught:
        parse("--run.stesp", "3", "--train.lr", "1")
    (note,) = caught.value.__notes__
    assert "lr of verl is --train.learning_rate here" in note


def test_one_reward_is_taken_for_a_list_of_one(tmp_path: Path) -> None:
    for text in ("boxed", "{name: boxed}", "[boxed]"):
        path = write(tmp_path, f"data: {{train: x}}\nscore: {{rewards: {text}}}\n")
        assert [each.name for each in load(path).score.rewards] == ["boxed"]


def test_a_config_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*quickstart\.yaml"):
        load(ROOT / "configs" / "quickstrat.yaml")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--train.lerning_rate", "1"], "--train.learning_rate"),
        (["--learning_rate", "1"], "--train.learning_rate"),
        (["--run.steps"], "expected one argument"),
        (["--run.steps", "["], "not valid YAML"),
        (["a.yaml", "b.yaml"], "b.yaml"),
        (["--run.steps", "ten"], "command line: run.steps='ten'"),
        (["--score.rewards", "[{nam: boxed}]"], "command line: unknown key 'score.rewards.0.nam'"),
        # Names of other trainers, for which nothing here is nearly the same.
        (["--num_generations", "8"], "TRL is --sample.completions_per_prompt here"),
        (
            ["--algorithm.beta", "0"],
            "beta of TRL is --algorithm.kl_coefficient here (with algorithm.kl=k3; of",
        ),
        (["--train.lr", "1"], "'--train.lr'; lr of verl is --train.learning_rate here"),
        (["--max-completion-length=9"], "TRL is --sample.max_new_tokens here"),
        (["--vllm_gpu_memory_utilization", "0.9"], "is not needed here: leave it out; memory"),
        (["--warmup_ratio", "0.1"], "is --train.warmup_steps here (optimizer steps: the ratio"),
        (
            ["--per_device_train_batch_size", "8"],
            "is --sample.prompts_per_step here (prompts: per_device_train",
        ),
        (["actor_rollout_ref.rollout.n=8"], "rollout.n of verl is --sample.completions_per_prompt"),
        (["train.learning_rate=1e-5"], "is no config file; write --train.learning_rate 1e-5"),
        (["--algorithm.lorem_ipsum", "0"], "'--algorithm.lorem_ipsum'; see --help"),
        (["--trian.learning_rate", "1"], "did you mean --train.learning_rate?"),
        (["--algorithm.name", "gropo"], "opd; did you mean grpo?"),
        (["--train.gradient_checkpointing", "offlaod"], "takes; did you mean offload?"),
        (["--algorithm.clip_low", "5"], "command line: algorithm.clip_low=5.0 is above 1"),
        (["--sample.completions_per_prompt", "1"], "command line: sample.completions_per_prompt=1"),
        (["--score.rewards", "3"], "command line: score.rewards=3 must be a valid list"),
        (["--eval.sets.mine", "x"], "did you mean --eval.sets?"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_several_training_and_evaluation_sets(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "data: {train: [a.jsonl, {source: b.jsonl, weight: 3}], eval: c.jsonl}\n"
        "eval: {sets: {aime: d.jsonl, math-500: e.jsonl}}\n",
    )
    config = load(path)
    assert [(s.source, s.weight) for s in config.data.sources] == [("a.jsonl", 1), ("b.jsonl", 3)]
    assert list(config.evaluation_sets.items()) == [
        ("", "c.jsonl"), ("aime", "d.jsonl"), ("math-500", "e.jsonl"),
    ]  # fmt: skip
    assert load(write(tmp_path, to_yaml(config))) == config


def test_what_may_change_on_resuming_is_a_table() -> None:
    def dump(**options: Any) -> dict[str, Any]:
        return Config.model_validate({"data": {"train": "x"}, **options}).model_dump(mode="json")

    def changed(**options: Any) -> tuple[list[str], list[str]]:
        found = changes(dump(), dump(**options))
        return found.refused, found.warned

    free: list[dict[str, Any]] = [
        {"run": {"steps": 9, "keep_buffers": 3, "resume": "x"}, "log": {"console": "quiet"}},
        {"data": {"train": "x", "contamination": "drop", "eval": "y"}, "eval": {"every": 3}},
    ]
    assert [changed(**options) for options in free] == [([], []), ([], [])]
    assert changed(train={"learning_rate": 0.5}, memory={"budget_gib": 9.0}) == (
        [],
        ["memory.budget_gib: 'auto' -> 9.0", "train.learning_rate: 1e-05 -> 0.5"],
    )
    assert changed(run={"seed": 3, "from_buffer": "b"}, model={"adapter": {"rank": 4}}) == (
        ["model.adapter.rank: 32 -> 4", "run.from_buffer: None -> 'b'", "run.seed: 0 -> 3"],
        [],
    )
    assert changed(data={"train": "x", "template": "r1_zero"}) == (
        ["data.template: 'auto' -> 'r1_zero'"],
        [],
    )
    for mapping in ({"a": 1}, {}), ({}, {"a": 1}):  # an option is taken out, or comes
        old, new = (dump(data={"train": "x", "template_arguments": given}) for given in mapping)
        assert [key.partition(":")[0] for key in changes(old, new).refused] == [
            "data.template_arguments.a"
        ]


def test_more_steps_stretch_a_schedule_and_are_told() -> None:
    def dump(steps: int, schedule: str) -> dict[str, Any]:
        tree = {"data": {"train": "x"}, "run": {"steps": steps}, "train": {"schedule": schedule}}
        return Config.model_validate(tree).model_dump(mode="json")

    assert changes(dump(5, "constant"), dump(9, "constant")).warned == []
    assert changes(dump(5, "cosine"), dump(9, "cosine")).warned == ["run.steps: 5 -> 9"]


def test_every_line_of_the_table_is_an_option() -> None:
    of_identity = ["data.columns_sha256", "score.custom_sha256"]
    keys = [key for key, _ in leaves(Config)] + of_identity
    assert all(any(key.startswith(prefix) for key in keys) for prefix in CHANGES)


def test_shipped_yaml_is_safe_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "data: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ConfigError, match="not valid YAML"):
        config_file.load(path)
    assert all(yaml.safe_load(path.read_text()) for path in CONFIGS)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, "none"),
        ({"sample": {"engine": "vllm"}}, "token_truncate"),
        ({"sample": {"engine": "vllm", "top_p": 0.9}}, "none"),
        ({"run": {"from_buffer": "buffers"}}, "token_truncate"),
        ({"run": {"from_buffer": "buffers"}, "sample": {"top_p": 0.9}}, "token_truncate"),
        ({"run": {"from_buffer": "buffers"}, "algorithm": {"correction": "none"}}, "none"),
        (
            {"run": {"from_buffer": "buffers"}, "algorithm": {"correction": "token_mask"}},
            "token_mask",
        ),
        *(
            ({"run": {"max_staleness": 1}, "algorithm": {"name": name}}, "sequence_truncate")
            for name in ("gspo", "gspo_token", "luspo")
        ),
    ],
    ids=str,
)
def test_rollouts_of_another_policy_are_weighed_by_importance(
    sections: dict[str, dict[str, Any]], expected: str
) -> None:
    config = Config.model_validate({"data": {"train": "x"}, **sections})
    assert config.learned_row.correction == expected


def test_a_model_or_data_of_one_s_own_inherits_nothing_from_the_quick_start() -> None:
    own = parse("--model.path", "my/model", "--data.train", "mine.jsonl", "--run.steps", "7")
    tree = {"run": {"name": "my_run", "steps": 7}, "model": {"path": "my/model"}}
    assert own == Config.model_validate({**tree, "data": {"train": "mine.jsonl"}})
    assert (own.train.learning_rate, own.data.eval, own.score.rewards[0].name) == (
        1e-5, None, "boxed",
    )  # fmt: skip
    assert parse("--data.train", "mine.jsonl").train.learning_rate == 1e-5
    assert parse("--run.steps", "7").train.learning_rate == 2e-3  # the quick start
    with pytest.raises(ConfigError, match=r"^command line: --data\.train is missing; give it"):
        parse("--model.path", "my/model")


@pytest.mark.parametrize(
    ("arguments", "rate", "rewards"),
    [
        ([], "default: 1e-05; here: 0.002", "here: think_answer_tags * 1"),
        (["--data.train", "x"], "(default: 1e-05)", "(default: boxed * 1)"),
        (["--data.train", "x", "--train.learning_rate", "3e-6"], "here: 3e-06", "boxed * 1)"),
        (["{path}"], "here: 0.5", "(default: boxed * 1)"),
        (["{path}", "--train.learning_rate", "1e-5"], "(default: 1e-05)", "(default: boxed * 1)"),
        (["none.yaml"], "(default: 1e-05)", "(default: boxed * 1)"),
    ],
)
def test_the_help_tells_the_values_in_force(
    arguments: list[str],
    rate: str,
    rewards: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write(tmp_path, "data: {train: x}\ntrain: {learning_rate: 0.5}\n")
    with pytest.raises(SystemExit):
        parse(*(each.format(path=path) for each in arguments), "--help")
    shown = " ".join(capsys.readouterr().out.split())
    options = {part.split(" ", 1)[0]: part for part in shown.split(" --")}
    assert rate in options["train.learning_rate"]
    assert rewards in options["score.rewards"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data: {train: x}\nrun: 3\n", "run=3 must be a section, {option: value}"),
        ("data: {train: x}\ntrian: {learning_rate: 1}\n", "did you mean train?"),
        ("data: {train: x}\ntrain: {learning_rat: 1}\n", "did you mean train.learning_rate?"),
        ("data: {train: x}\ntrain: {warmup_ratio: 0.1}\n", "TRL is train.warmup_steps here"),
        ("data: {trian: x}\n", "did you mean data.train?"),
        ("data: {train: x, eval: 3}\n", "data.eval=3 must be a valid string"),
        ("data: {train: x}\nalgorithm: {clip_low: 5}\n", "my_run.yaml: algorithm.clip_low=5.0"),
        ("data: {train: x}\nsample: {temperature: .inf}\n", "must be less than or equal to 100"),
        (
            "data: {train: x}\nscore: {rewards: [{weight: x}]}\n",
            "score.rewards.0.weight='x' must be",
        ),
        ("data: {train: x}\nscore: {rewards: [{name: reward_model}]}\n", "'path' of reward_mo"),
    ],
)
def test_mistakes_are_told_in_words_of_their_own(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    told = str(caught.value)
    assert message in told
    assert not re.search(r"[Ii]nput should|pydantic|Section|Spec|valid dict|instance", told), told


def test_a_name_alone_is_a_reward(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: x}\nscore: {rewards: [boxed, mine.py:f]}\n")
    first, second = load(path).score.rewards
    assert (first.name, second.custom) == ("boxed", "mine.py:f")
    assert load(write(tmp_path, to_yaml(load(path)))) == load(path)


def test_names_of_others_lead_to_options_that_exist() -> None:
    options = {name for name, _ in leaves(Config)}
    named = {option for each in equivalents().values() for option in each.options}
    assert named <= options
    last = {name.rpartition(".")[2] for name in options}
    assert last & equivalents().keys() == {"beta"}  # preference.beta


def test_the_page_for_those_who_come_from_elsewhere_is_the_table() -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    found = {name: Equivalent("", tuple(re.findall(r"`([\w.]+)`", ours)), note)
             for name, ours, note in rows}  # fmt: skip
    assert len(rows) == len(found)
    for whose in ("TRL", "Unsloth", "verl"):
        assert whose in text
    assert found == {name: replace(each, whose="") for name, each in equivalents().items()}
