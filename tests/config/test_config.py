"""Options: files, overrides, and every kind of mistake as one line."""

import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from reason_llm.config import Config
from reason_llm.config.command_line import read_command_line
from reason_llm.config.file import build, changes, leaves, load, to_yaml, unknown_key
from reason_llm.config.other_names import equivalents
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


def test_a_config_s_path_and_overrides_that_are_read_as_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "data: {train: x.jsonl, eval: y}\nrun: {steps: 3}\n")
    assert parse(str(path)).run.steps == 3
    config = parse(
        *(str(path), "--train.learning_rate", "1e-4", "--run.steps=7", "--data.eval", "null"),
        *("--model.adapter.targets", "[q_proj, v_proj]"),
    )
    assert (config.train.learning_rate, config.run.steps, config.data.eval) == (1e-4, 7, None)
    assert config.model.adapter.targets == ["q_proj", "v_proj"]


def test_every_option_has_a_docstring_and_stands_in_help(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for key, option in leaves(Config):
        assert option.description, key
        assert f"--{key} " in shown


X = "data: {train: x}\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            f"{X}train: {{lerning_rate: 1}}",
            "'train.lerning_rate'; did you mean train.learning_rate?",
        ),
        (f"{X}train: {{learning_rat: 1}}", "did you mean train.learning_rate?"),
        (f"{X}train: {{warmup_ratio: 0.1}}", "TRL is train.warmup_steps here"),
        (f"{X}trian: {{learning_rate: 1}}", "did you mean train?"),
        ("data: {trian: x}", "did you mean data.train?"),
        (f"{X}steps: 3", "'steps'; did you mean run.steps?"),
        ("run: {steps: 3}", "data.train is missing"),
        (f"{X}run: 3", "run=3 must be a section, {option: value}"),
        (f"{X}run: {{steps: many}}", "run.steps='many' must be a valid integer"),
        (f"{X}run: {{steps: true}}", "run.steps=True"),
        (f"{X}run: {{steps: 0}}", "run.steps=0 must be greater than or equal to 1"),
        (f"{X}train: {{learning_rate: .nan}}", "learning_rate=nan"),
        (f"{X}sample: {{temperature: .inf}}", "must be less than or equal to 100"),
        (f"{X}train: {{micro_batch_tokens: lots}}", "micro_batch_tokens='lots'"),
        (f"{X}run: {{name: ../up}}", "run.name='../up' must be one plain folder name"),
        (f'{X}run: {{name: "a\\tb"}}', "must be one plain folder name"),
        (f"{X}run: {{name: {'é' * 51}}}", "must be one plain folder name of at most 100 bytes"),
        (
            f"{X}run: {{steps: {'x' * 200}}}",
            f"run.steps='{'x' * 199}… must be a valid integer; run",
        ),
        *(
            (f"{X}run: {{{name}: {path}}}", f"run.{name}=")
            for name in ("directory", "buffer")
            for path in ("/", ".", '"a\\tb"')
        ),
        (f"{X}eval: {{limit: x}}", "eval.limit takes INT|null: Take only"),
        (f"{X}algorithm: {{name: grpoo}}", "algorithm.name='grpoo' is none of pg, grpo, dapo"),
        (f"{X}algorithm: {{clip_low: 5}}", "my_run.yaml: algorithm.clip_low=5.0"),
        (f"{X}algorithm: {{name: dapo, kl_coefficient: 0.1}}", "kl_coefficient=0.1 would be"),
        (f"{X}score: {{rewards: []}}", "score.rewards"),
        (f"{X}score: {{rewards: [{{name: boxed}}, {{name: boxed}}]}}", "twice"),
        (
            f"{X}score: {{rewards: [{{custom: 'my.py:reward'}}]}}",
            "score/reward is a metric of its own; rename the function reward",
        ),
        (
            f"{X}score: {{rewards: [{{nam: boxed}}]}}",
            "score.rewards.0.nam'; score.rewards takes LIST: List of {name, weight, options}",
        ),
        (f"{X}score: {{rewards: [3]}}", "score.rewards.0=3"),
        (f"{X}score: {{rewards: [{{weight: x}}]}}", "score.rewards.0.weight='x' must be"),
        (f"{X}score: {{rewards: [{{name: reward_model}}]}}", "'path' of reward_mo"),
        (f"{X}eval: {{sets: {{a/b: x}}}}", "eval.sets='a/b' must match pattern '^[A-Za-z0-9]"),
        ("data: {train: 5}", "data.train=5 must be a valid string; data.train takes"),
        ("data: {train: []}", "data.train=[]"),
        ("data: {train: [{weight: 1}]}", "data.train.0.source is missing"),
        ("data: {train: [{source: a, wieght: 1}]}", "data.train.0.wieght"),
        ("data: {train: [a, {source: a}]}", "names a twice"),
        ("data: {train: x, eval: 3}", "data.eval=3 must be a valid string"),
        ("data: {train: x, contamination: no}", "data.contamination"),
        ("data: {train: x, form: sft}", "data.form='sft' is none of problems, prompts, demonstra"),
        (f"{X}stage: [rl]", "stage=['rl']"),
        ("stage:", "stage="),
        ("data: [", "my_run.yaml is not valid YAML"),
        ("- 1", "holds list"),
        ("", "holds NoneType"),
    ],
)
def test_a_mistake_is_one_line_with_key_and_value(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    message = str(caught.value)
    assert told in message
    assert not re.search(r"\n|[Ii]nput should|pydantic|Section|Spec|valid dict|instance", message)


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
        ("data: {train: x}\nstage: sft\nsample: {temperature: 0}\n"
         "algorithm: {missing_eos_penalty: 1}\nrun: {from_buffer: a}\n"
         "train: {optimizer_steps: 99}\ncritic: {gamma: 0.5}\n",
         ["sample.temperature=0", "algorithm.missing_eos_penalty=1", "the critic section",
          "run.from_buffer=a", "train.optimizer_steps=99"]),
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
        (["--algorithm.beta", "0"], "TRL is --algorithm.kl_coefficient here (with algorithm.kl=k3"),
        (["--train.lr", "1"], "'--train.lr'; lr of verl is --train.learning_rate here"),
        (["--max-completion-length=9"], "TRL is --sample.max_new_tokens here"),
        (["--vllm_gpu_memory_utilization", "0.9"], "has no option here: leave it out; memory"),
        (["--warmup_ratio", "0.1"], "is --train.warmup_steps here (optimizer steps: the ratio"),
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
        (["--run.step", "3"], "did you mean --run.steps?"),
        (["--modl", "x"], "did you mean --teacher.model?"),  # a section takes no value
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
    for old, new in (({"shards": 8}, {"replicas": 4}), ({"shards": 8}, {"samplers": 2}),
                     ({"replicas": 2, "ray": "auto"}, {"replicas": 4})):  # fmt: skip
        found = changes(dump(run=old), dump(run=new))
        assert (found.refused, found.warned) == ([], [])
    assert changed(run={"max_staleness": 1}) == (["run.max_staleness: 0 -> 1"], [])
    assert changed(run={"replicas": 2}) == ([], ["run.shards: 1 -> 8"])
    for schedule, told in ("constant", []), ("cosine", ["run.steps: 5 -> 9"]):  # is stretched
        old, new = (dump(run={"steps": n}, train={"schedule": schedule}) for n in (5, 9))
        assert changes(old, new).warned == told
    found = changes(dump(run={"steps": 5}), dump(run={"steps": 9}, train={"schedule": "cosine"}))
    assert found.warned == ["run.steps: 5 -> 9", "train.schedule: 'constant' -> 'cosine'"]
    for mapping in ({"a": 1}, {}), ({}, {"a": 1}):  # an option is taken out, or comes
        old, new = (dump(data={"train": "x", "template_arguments": given}) for given in mapping)
        assert [key.partition(":")[0] for key in changes(old, new).refused] == [
            "data.template_arguments.a"
        ]


def test_every_line_of_the_table_is_an_option() -> None:
    of_identity = ["data.columns_sha256", "score.custom_sha256"]
    keys = [key for key, _ in leaves(Config)] + of_identity
    assert all(any(key.startswith(prefix) for key in keys) for prefix in CHANGES)


def test_yaml_makes_no_objects(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        load(write(tmp_path, "data: !!python/object/apply:os.system ['true']\n"))


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
    arguments: list[str], rate: str, rewards: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = write(tmp_path, "data: {train: x}\ntrain: {learning_rate: 0.5}\n")
    with pytest.raises(SystemExit):
        parse(*(each.format(path=path) for each in arguments), "--help")
    shown = " ".join(capsys.readouterr().out.split())
    options = {part.split(" ", 1)[0]: part for part in shown.split(" --")}
    assert rate in options["train.learning_rate"]
    assert rewards in options["score.rewards"]


def test_one_reward_is_a_list_of_one_and_a_name_alone_a_reward(tmp_path: Path) -> None:
    for text in ("boxed", "{name: boxed}", "[boxed, mine.py:f]"):
        path = write(tmp_path, f"{X}score: {{rewards: {text}}}\n")
        rewards = load(path).score.rewards
        assert [rewards[0].name, *(each.custom for each in rewards[1:])] in (
            ["boxed"], ["boxed", "mine.py:f"],
        )  # fmt: skip
    assert load(write(tmp_path, to_yaml(load(path)))) == load(path)


def test_names_of_others_lead_to_options_that_exist() -> None:
    options = {name for name, _ in leaves(Config)}
    named = {option for each in equivalents().values() for option in each["options"]}
    assert named <= options
    last = {name.rpartition(".")[2] for name in options}
    assert last & equivalents().keys() == {"beta"}  # preference.beta


@pytest.mark.filterwarnings("ignore")  # of TRL, for what is experimental
def test_each_option_of_trl_has_an_answer() -> None:
    from trl import (
        DPOConfig,
        GRPOConfig,
        KTOConfig,
        ModelConfig,
        RewardConfig,
        ScriptArguments,
        SFTConfig,
    )

    kinds = (GRPOConfig, SFTConfig, DPOConfig, RewardConfig, KTOConfig, ModelConfig)
    names = {field.name for kind in (*kinds, ScriptArguments) for field in fields(kind)}
    assert len(names) > 200
    answers = {name: unknown_key(name, "", "--") for name in names}
    assert [name for name, answer in answers.items() if "see --help" in answer] == []
    told = {name for name, answer in answers.items() if " of " in answer and " here" in answer}
    for name in names - told:  # options of one name
        assert answers[name].endswith(f".{name}?"), answers[name]
    assert len(told) > 180


def test_the_page_for_those_who_come_from_elsewhere_is_the_table() -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    found = {name: (re.findall(r"`([\w.]+)`", ours), note) for name, ours, note in rows}
    assert len(rows) == len(found)
    for whose in ("TRL", "Unsloth", "verl"):
        assert whose in text
    table = equivalents().items()
    assert found == {name: (each["options"], each.get("note", "")) for name, each in table}
