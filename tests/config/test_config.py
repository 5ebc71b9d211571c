"""Options: files, overrides, and every kind of mistake as one line."""

import json
import re
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from reason_llm.config import Config, yaml_text
from reason_llm.config.command_line import read_command_line
from reason_llm.config.file import build, changes, leaves, load, schema, to_yaml, unknown_key
from reason_llm.config.other_names import equivalent_values, equivalents
from reason_llm.config.sections import CHANGES
from reason_llm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def write(folder: Path, text: str) -> Path:
    path = folder / "my_run.yaml"
    path.write_text(text)
    return path


def parse(*arguments: str) -> Config:
    what = ("CONFIG.yaml", "")
    return read_command_line("train.py", "", what, arguments, {}).config()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_shipped_config_loads_and_comes_back_the_same(path: Path, tmp_path: Path) -> None:
    config = load(path)
    assert config.run.name == path.stem
    again = load(write(tmp_path, to_yaml(config)))
    assert again == config


def test_shipped_critics_take_whole_returns_and_learn_alone_first() -> None:
    """PPO's lambdas are 1, and the critic is warmed up in at most a tenth of the steps."""
    configs = [load(path) for path in CONFIGS if "ppo_" in path.stem]
    assert len(configs) == 3
    for config in configs:
        assert config.critic.lam == 1
        assert 0 < config.critic.warmup_steps <= config.run.steps / 10


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
        parse("--help", "all")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for key, option in leaves(Config):
        assert option.description, key
        assert re.search(rf"--{key},? ", shown), key  # from Python 3.13 on, its value comes last
    with pytest.raises(SystemExit):
        parse("--help", "data")
    shown = capsys.readouterr().out
    of_data = {key for key, _ in leaves(Config) if key.startswith("data.")}
    assert {key for key, _ in leaves(Config) if f"  --{key} " in shown} == of_data


def test_help_is_one_screen_and_names_every_section(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse("configs/none.yaml", "--help")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert {line.split()[0] for line in lines if line} >= set(Config.model_fields)


X = "data: {train: x}\n"


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
        {"run": {"steps": 9, "keep_buffers_gib": 3, "resume": "x"}, "log": {"console": "quiet"}},
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
    assert last & equivalents().keys() == {"beta", "packing"}  # preference.beta, train.packing


@pytest.mark.filterwarnings("ignore")  # of TRL, for what is experimental
def test_each_option_of_trl_and_peft_has_an_answer() -> None:
    """Each field of the installed config classes, and each argument of the trainers."""
    import trl
    from peft import LoraConfig
    from transformers import TrainingArguments

    stages = ("GRPO", "RLOO", "SFT", "DPO", "Reward", "KTO")
    kinds = [getattr(trl, f"{name}Config") for name in (*stages, "Model")]
    kinds += [trl.ScriptArguments, TrainingArguments, LoraConfig]
    names = {field.name for kind in kinds for field in fields(kind)}
    trainers = [getattr(trl, f"{name}Trainer") for name in stages]
    names |= {name for each in trainers for name in signature(each).parameters} - {"args", "model"}
    assert len(names) > 290
    answers = {name: unknown_key(name, "", "--") for name in names}
    assert [name for name, answer in answers.items() if "see --help" in answer] == []
    told = {name for name, answer in answers.items() if " of " in answer and " here" in answer}
    for name in names - told:  # options of one name
        assert answers[name].endswith(f".{name}?"), answers[name]
    assert len(told) > 180


def test_steps_on_the_command_line_win_over_epochs_of_the_file(tmp_path: Path) -> None:
    (file := tmp_path / "mine.yaml").write_text("{run: {epochs: 2}, data: {train: x, eval: 5%}}")
    assert load(file).run.epochs == 2
    config = load(file, {"run.steps": 3})
    assert (config.run.epochs, config.run.steps, config.data.eval) == (None, 3, "5%")
    assert load(file, {"run.steps": 3, "run.epochs": 1}).run.epochs == 1


def test_the_page_for_those_who_come_from_elsewhere_is_the_table() -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \|$", text, re.MULTILINE)
    found = {name: (re.findall(r"`([\w.]+)`", ours), note) for name, ours, note in rows}
    assert len(rows) == len(found)
    for whose in ("TRL", "Unsloth", "verl"):
        assert whose in text
    table = equivalents().items()
    assert found == {name: (each["options"], each.get("note", "")) for name, each in table}
    values = re.findall(r"^\| `([\w.]+): ([\w-]+)` \| `\1: (\w+)` \|$", text, re.MULTILINE)
    assert values == [
        (option, *pair) for option, ours in equivalent_values().items() for pair in ours.items()
    ]


def test_values_of_others_lead_to_values_that_exist() -> None:
    for option, ours in equivalent_values().items():
        stage = "preference" if option.startswith("preference.") else "rl"
        for theirs, value in ours.items():
            options = {"model.path": "x", "data.train": "x", "stage": stage}
            assert load(None, {**options, option: value})
            with pytest.raises(
                ConfigError, match=rf"is a value of another trainer; set it to {value}( \(|$)"
            ):
                load(None, {**options, option: yaml_text.parse(theirs)})


def test_a_file_of_verl_is_answered_as_its_dotted_names_are(tmp_path: Path) -> None:
    text = (
        "actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 1e-6}, hybrid: true}}\n"
        "trainer: {save_freq: 20}\n"
        "algorithm: {adv_estimator: grpo, kl_ctrl: {kl_coef: 0.001}}\n"
        "data: {train: x, train_batch_size: 64}\ntrian: {a: {b: 1}}\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    for key, answer in (
        ("actor_rollout_ref.rollout.n", "rollout.n of verl is sample.completions_per_prompt here"),
        ("actor_rollout_ref.actor.optim.lr", "lr of verl is train.learning_rate here"),
        ("actor_rollout_ref.actor.hybrid", "see --help for the options"),
        ("trainer.save_freq", "save_freq of verl is run.save_every here"),
        ("algorithm.kl_ctrl.kl_coef", "kl_coef of verl is algorithm.kl_coefficient here"),
        ("data.train_batch_size", "train_batch_size of verl is sample.prompts_per_step here"),
        ("trian", "did you mean train?"),
    ):
        (line,) = [each for each in told.splitlines() if f"unknown key {key!r}" in each]
        assert answer in line
    assert (
        "write algorithm.name: grpo, algorithm.aggregation: token_mean, algorithm.kl: none" in told
    )


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("algorithm.adv_estimator=grpo", "--algorithm.aggregation token_mean --algorithm.kl none"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=64", "train_batch_size divided by ppo_mini"),
        ("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean", "aggregation sequence_mean"),
        ("actor_rollout_ref.actor.kl_loss_type=low_var_kl", "write --algorithm.kl k3"),
        ("actor_rollout_ref.actor.use_kl_loss=False", "write --algorithm.kl none"),
        ("algorithm.adv_estimator=gae", "write --algorithm.name ppo --algorithm.kl none"),
        ("algorithm.kl_ctrl.kl_coef=0.001", "here (only if use_kl_in_reward is True"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "verl trains all weights unless lora_rank > 0"),
        ("actor_rollout_ref.model.lora_rank=0", "write --model.train full"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=-1", "write --train.warmup_steps 0"),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", "write --train.schedule cosine"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload=False", "no option here: nothing need"),
        ("actor_rollout_ref.rollout.mode=async", "has no option here: nothing needed"),
        ("trainer.max_actor_ckpt_to_keep=3", "is --run.keep_checkpoints here"),
        ("actor_rollout_ref.rollout.val_kwargs.n=4", "val_kwargs.n of verl is --eval.samples here"),
        ("actor_rollout_ref.rollout.name=vllm", "rollout.name of verl is --sample.engine here"),
        ("custom_reward_function.path=a.py", "is --score.rewards here"),
        ("custom_reward_function.name=f", "is --score.rewards here"),
        ("data.truncation=error", "has no option here: longer prompts are dropped"),
        ("trainer.save_freq=-1", "-1 (never) has no equivalent"),
    ],
)
def test_verls_form_is_answered_with_what_to_write(word: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(word)
    assert answer in str(caught.value)


def test_a_rank_of_zero_is_answered_with_how_to_train_all_weights() -> None:
    with pytest.raises(ConfigError, match=r"rank=0 must be 1 or more; .* set model\.train to full"):
        load(None, {"data.train": "x", "model.adapter.rank": 0})


def test_packing_of_trl_is_answered_with_what_it_does_to_the_batch() -> None:
    rows = "max_length divided by the mean row tokens that --data-check prints"
    for name, value in (
        ("--packing", "True"), ("--sft.packing", "True"), ("--train.packing", "true"),
        ("--per_device_train_batch_size", "2"), ("--gradient_accumulation_steps", "1"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rows):
            parse(name, value)


@pytest.mark.filterwarnings("ignore")  # of TRL, for what is experimental
def test_values_of_trl_are_written_as_options_that_exist() -> None:
    """Each value of TRL's loss_type and scale_rewards has ours, and the page shows them."""
    from trl import GRPOConfig

    text = (ROOT / "docs" / "coming_from.md").read_text()
    table = re.findall(r"^\| `([\w.]+): ([\w-]+)` \| `(.+)` \|$", text, re.MULTILINE)
    shown = {
        (name, value): ours.split("`, `") for name, value, ours in table if name in equivalents()
    }
    for name, each in equivalents().items():
        for theirs, ours in each.get("values", {}).items():
            named = {key: 0.5 if value == "number" else value for key, value in ours.items()}
            stage = "preference" if any(key.startswith("preference.") for key in ours) else "rl"
            whole = ("sample.", "algorithm.delta")
            named = {key: 2 if key.startswith(whole) else value for key, value in named.items()}
            load(None, {"model.path": "x", "data.train": "x", "stage": stage, **named})
            if theirs != "number":
                assert shown.pop((name, theirs)) == [f"{k}: {v}" for k, v in ours.items()]
    assert not shown
    said = {field.name: field.metadata.get("help", "") for field in fields(GRPOConfig)}
    losses = re.findall(
        r"'(\w+)'", said["loss_type"].split("Supported values are")[1].split(". ")[0]
    )
    assert len(losses) == 8 and {*losses} <= equivalents()["loss_type"]["values"].keys()


def test_the_schema_for_editors_is_current() -> None:
    """After a change of options: ``make schema``."""
    assert json.loads((ROOT / "configs" / "schema.json").read_text()) == json.loads(schema())


SCHEMA = "# yaml-language-server: $schema=schema.json"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_shipped_configs_name_the_schema_and_fit_it(path: Path) -> None:
    first, *_ = path.read_text().splitlines()
    assert first == SCHEMA
    assert mistakes_by_schema(path.read_text()) == []


def test_the_schema_takes_short_forms_and_finds_mistakes() -> None:
    short = "data: {train: [a, {source: b}]}\nscore: {rewards: boxed}\nlog: {trackers: wandb}"
    assert mistakes_by_schema(short) == []
    assert mistakes_by_schema("data: {train: x}\nscore: {rewards: [boxed, {name: cosine}]}") == []
    assert mistakes_by_schema("data: {train: x}\nrun: {stps: 1}") == ["$.run"]
    assert mistakes_by_schema("data: {train: x}\ntrain: {epochs: 0}") == ["$.train.epochs"]


def mistakes_by_schema(text: str) -> list[str]:
    """Places of what an editor would mark."""
    jsonschema = pytest.importorskip("jsonschema")
    found = jsonschema.Draft202012Validator(json.loads(schema()))
    return [error.json_path for error in found.iter_errors(yaml_text.parse(text))]
