"""Configs with several stages: what they share, what refers to what, and every mistake as one
line."""

import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from conftest import ROOT
from reason_llm.app import pipeline as runs
from reason_llm.config import Config, load, load_pipeline
from reason_llm.errors import ConfigError, Stopped
from reason_llm.run import StopSignal

TREE: dict[str, Any] = {
    "run": {"directory": "runs", "seed": 4},
    "model": {"path": "model/tiny", "adapter": {"rank": 4}},
    "data": {"system_prompt": "none", "eval": "e.jsonl"},
    "eval": {"every": 3},
    "algorithm": {"name": "ppo"},
    "stages": {
        "sft": {"stage": "sft", "data": {"train": "d.jsonl"}},
        "rm": {
            "stage": "reward",
            "from": "sft",
            "data": {"train": "p.jsonl", "eval": None},
            "eval": {"rows": "h.jsonl"},
        },
        "drawn": {"stage": "sample", "from": "sft", "data": {"train": "t.jsonl"}},
        "again": {
            "stage": "sft",
            "from": "sft",
            "data": {"train": {"pairs_of": "drawn", "per_prompt": 2}},
        },
        "ppo": {
            "from": "again",
            "data": {"train": "t.jsonl"},
            "critic": {"start": {"stage": "rm"}},
            "run": {"steps": 50},
        },
    },
}


def write(folder: Path, tree: dict[str, Any]) -> Path:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path


def changed(**stages: Any) -> dict[str, Any]:
    return TREE | {"stages": TREE["stages"] | stages}


@pytest.mark.parametrize("set_of", ["data.eval", "eval.sets", "eval.rows"])
def test_a_set_on_the_command_line_keeps_the_options_of_its_evaluation(
    set_of: str, tmp_path: Path
) -> None:
    one = {"sft": {"stage": "sft", "data": {"train": "d.jsonl", "eval": None}}}
    path = write(tmp_path, {"stages": one})
    held_out: Any = {"x": "h.jsonl"} if set_of == "eval.sets" else "h.jsonl"
    for given, every in (({}, 10), ({set_of: held_out}, 5)):
        (stage,) = load_pipeline(path, given | {"eval.every": 5}).stages
        assert stage.config.eval.every == every


def test_stages_share_and_refer(tmp_path: Path) -> None:
    pipeline = load_pipeline(write(tmp_path, TREE), {})
    configs = {stage.name: stage.config for stage in pipeline.stages}
    assert list(configs) == ["sft", "rm", "drawn", "again", "ppo"]
    home = Path("runs/mine")
    assert {str(config.run.directory) for config in configs.values()} == {str(home)}
    assert [config.run.name for config in configs.values()] == list(configs)
    assert [config.run.seed for config in configs.values()] == [4] * 5
    assert {config.run.buffer for config in configs.values()} == {
        home / name / "buffer.json" for name in configs
    }
    starts = [config.model.start for config in configs.values()]
    sft = home / "sft" / "adapter"
    assert starts == [None, sft, sft, sft, home / "again" / "adapter"]
    assert configs["sft"].model.adapter.rank == 4
    assert configs["rm"].model.adapter.rank == 32  # as the adapter that it begins from says
    assert (configs["rm"].data.eval, configs["rm"].eval.every) == (None, 3)
    assert configs["ppo"].critic.start == home / "rm" / "adapter"
    assert configs["ppo"].algorithm.name == "ppo"
    assert configs["again"].data.train == "runs/mine/again.jsonl"
    again = pipeline.stage("again")
    assert again.rows is not None
    assert (again.rows.form, again.rows.sources) == ("demonstrations", ("drawn",))
    assert again.rows.section.per_prompt == 2
    assert pipeline.stage("ppo").needs == ["again", "rm"]
    assert again.needs == ["sft", "drawn"]


def test_a_stage_s_part_of_a_section_leaves_the_shared_rest(tmp_path: Path) -> None:
    tree = changed(sft={"stage": "sft", "data": {"train": "d.jsonl"},
                        "model": {"adapter": {"alpha": 3}}})  # fmt: skip
    adapter = load_pipeline(write(tmp_path, tree), {}).stages[0].config.model.adapter
    assert (adapter.rank, adapter.alpha) == (4, 3)


def test_overrides_go_to_the_stages_that_read_them(tmp_path: Path) -> None:
    path = write(tmp_path, TREE)
    overrides = {"run.steps": 7, "critic.updates": 3, "run.name": "other", "run.directory": "r",
                 "model.adapter.rank": 8, "critic.warmup_steps": 2}  # fmt: skip
    pipeline = load_pipeline(path, overrides)
    configs = {stage.name: stage.config for stage in pipeline.stages}
    assert {config.run.steps for config in configs.values()} == {7}
    assert configs["ppo"].critic.updates == 3
    assert configs["sft"].model.adapter.rank == 8
    assert configs["rm"].model.start == Path("r/other/sft/adapter")
    plain = changed(rm={"stage": "reward", "from": "sft", "data": {"train": "p", "eval": None},
                        "eval": None})  # fmt: skip
    shorter = load_pipeline(write(tmp_path, plain), {"eval.limit": 2})
    assert [s.config.eval.limit for s in shorter.stages] == [2, None, 2, 2, 2]
    path = write(tmp_path, TREE)
    one = load_pipeline(path, {"stage": "rm", "reward.centering": 0.5})
    assert [stage.name for stage in one.selected] == ["rm"]
    assert one.selected[0].config.reward.centering == 0.5


def test_options_with_a_stage_go_to_it_alone(tmp_path: Path) -> None:
    """But for the folder of all runs."""
    overrides = {"stage": "again", "run.steps": 7, "run.resume": "never", "run.directory": "r"}
    before = load_pipeline(write(tmp_path, TREE), {"run.directory": "r"})
    pipeline = load_pipeline(write(tmp_path, TREE), overrides)
    for old, stage in zip(before.stages, pipeline.stages, strict=True):
        assert stage.folder == Path("r/mine") / stage.name
        assert (stage.name == "again") or stage == old
    run = pipeline.stage("again").config.run
    assert (run.steps, run.resume) == (7, "never")
    assert [stage.name for stage in pipeline.stages if stage.begins_anew] == ["again"]
    begun = load_pipeline(write(tmp_path, TREE), {"stage": "ppo", "run.resume": "runs/x"})
    assert begun.selected[0].config.run.resume == "runs/x"


def test_options_that_a_stage_would_ignore_are_refused_with_it(tmp_path: Path) -> None:
    plain = changed(rm={"stage": "reward", "data": {"train": "p", "eval": None}, "eval": None})
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        load_pipeline(write(tmp_path, plain), {"stage": "rm", "eval.limit": 2})


def test_rows_of_a_step_are_for_the_stages_that_read_them(tmp_path: Path) -> None:
    tree = changed() | {"train": TREE.get("train", {}) | {"rows_per_step": 8}}
    for overrides, expected in (({}, 8), ({"train.rows_per_step": 4}, 4)):
        pipeline = load_pipeline(write(tmp_path, tree), overrides)
        assert pipeline.stage("sft").config.train.rows_per_step == expected
    of_ppo = changed(ppo=TREE["stages"]["ppo"] | {"train": {"rows_per_step": 8}})
    with pytest.raises(ConfigError, match=r"stage ppo: train\.rows_per_step=8 contradicts"):
        load_pipeline(write(tmp_path, of_ppo), {})


def test_the_folder_of_all_runs_is_not_a_stage_s(tmp_path: Path) -> None:
    """A stage whose section run begins anew is there, too."""
    tree = changed(ppo=TREE["stages"]["ppo"] | {"run": None}) | {"run": {"directory": "r"}}
    assert load_pipeline(write(tmp_path, tree), {}).stage("ppo").folder == Path("r/mine/ppo")


def paid_by(stage: str, **options: Any) -> dict[str, Any]:
    rewards = [
        {"name": "boxed"},
        {"name": "reward_model", "options": {"path": {"stage": stage}, **options}},
    ]
    return TREE["stages"]["ppo"] | {"score": {"rewards": rewards}}


UNMEASURED = {"stage": "reward", "data": {"train": "p.jsonl", "eval": None}, "eval": None}


def drawn(**run: Any) -> dict[str, Any]:
    return {"stage": "sample", "data": {"train": "t.jsonl"}, "run": run}


def test_what_later_stages_need_is_kept(tmp_path: Path) -> None:
    """A stage alone reads what is there, whatever the config says of how it is made."""
    for tree in (
        changed(drawn=drawn(keep_buffers=2, steps=1)),
        changed(drawn=drawn(keep_buffers=1)),
        changed(ppo=paid_by("rm")),
        changed(ppo=paid_by("rm", path="of_another_run")),
        changed(rm=UNMEASURED, ppo=paid_by("rm", normalize="none")),
    ):
        assert load_pipeline(write(tmp_path, tree), {}).stages
    for tree in (changed(drawn=drawn(keep_buffers=2)), changed(rm=UNMEASURED, ppo=paid_by("rm"))):
        assert load_pipeline(write(tmp_path, tree), {"stage": "ppo"}).stages


@pytest.mark.parametrize(
    ("tree", "overrides", "told"),
    [
        (changed(), {"stage": "pop"}, "--stage 'pop' is no stage of"),
        (changed(), {"teacher.prompt": "{prompt}", "stage": "sft"}, "--teacher.prompt acts on no"),
        (changed(), {"run.resume": "runs/x"}, "is a checkpoint of one run"),
        (changed(), {"train.lr": 2}, "unknown key 'train.lr'"),
        (TREE | {"stages": []}, {}, "stages=[] are no stages"),
        (TREE | {"stages": {}}, {}, "stages={} are no stages"),
        (TREE | {"stages": {"a": 3}}, {}, "are no stages"),
        (changed() | {"model": 3}, {}, "stage sft: model=3 must be a section"),
        (changed(ppo={"data": {"train": {"a": 1}}}), {}, "data.train={'a': 1} must be a valid str"),
        (changed(ppo={"from": "stf"}), {}, "stage ppo: from='stf' is no earlier stage; did you "
         "mean sft?"),
        (changed(sft={"from": "ppo"}), {}, "stage sft: from='ppo' is no earlier stage; it is the"),
        (changed(ppo={"from": "rm", "data": {"train": "t"}}), {}, "from=rm is a reward model"),
        (changed(ppo={"from": "sft", "model": {"start": "x"}}), {}, "contradicts model.start"),
        (changed(ppo={"data": {"train": "t"}, "critic": {"start": {"stage": "rmm"}}}), {},
         "critic.start='rmm' is no earlier stage; did you mean rm?"),
        (changed(again={"stage": "sft", "data": {"train": {"pairs_of": "sft"}}}), {},
         "pairs_of=sft is a stage without rollouts"),
        (changed(again={"stage": "sft", "data": {"train": {"pairs_of": "drawn", "bye": 1}}}), {},
         "data.train.bye=1"),
        (changed(again={"stage": "sft", "data": {"train": {"pairs_of": "drawn", "by": "all"}}}),
         {}, "by all makes no demonstrations"),
        (changed(again={"stage": "rl", "data": {"train": {"pairs_of": "drawn"}}}), {},
         "pairs_of contradicts stage=rl"),
        (changed(**{"a/b": {"data": {"train": "t"}}}), {}, "run.name='a/b' must be one plain"),
        (changed(ppo={"data": {"train": "t"}, "run": {"stesp": 2}}), {}, "did you mean run.steps?"),
        (changed(ppo={"data": {"train": "t"}, "run": {"name": "x"}}), {},
         "stage ppo: run.name=x contradicts the stage, whose run is in runs/mine/ppo; set"),
        (changed(ppo={"data": {"train": "t"}, "run": {"directory": "x"}}), {},
         "stage ppo: run.directory=x contradicts the stage"),
        (changed(), {"run.directory": 5}, "run.directory=5 is no path"),
        (changed(drawn=drawn(keep_buffers="none")), {}, "stage again: data.train.pairs_of=drawn "
         "reads the rollouts of all steps, and stage drawn has run.keep_buffers=none; set it to"),
        (changed(drawn=drawn(keep_buffers="none", steps=1)), {}, "has run.keep_buffers=none"),
        (changed(drawn=drawn(keep_buffers=2)), {}, "stage drawn has run.keep_buffers=2"),
        (changed(drawn=drawn(keep_buffers=2, steps=1, epochs=1)), {}, "run.keep_buffers=2"),
        (changed(rm=UNMEASURED, ppo=paid_by("rm")), {}, "stage ppo: normalize=fixed of the reward "
         "reward_model needs the mean and std of held-out rewards, and stage rm has no eval.rows"),
        (changed(ppo=paid_by("sft")), {}, "names stage sft, which is no reward model"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_stage(
    tree: dict[str, Any], overrides: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_pipeline(write(tmp_path, tree), overrides)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_commands_say_what_a_pipeline_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a pipeline of stages, which the commands train and"):
        load(write(tmp_path, TREE))


def test_kto_learns_labels(tmp_path: Path) -> None:
    stage = {"stage": "preference", "preference": {"name": "kto"},
             "data": {"train": {"pairs_of": ["drawn"], "threshold": 0.5}}}  # fmt: skip
    rows = load_pipeline(write(tmp_path, changed(kto=stage)), {}).stage("kto").rows
    assert rows is not None
    assert (rows.form, rows.section.threshold) == ("labels", 0.5)


def test_a_stage_that_begins_anew_is_planned_over_the_adapter_to_come(tmp_path: Path) -> None:
    tree = changed(rm=TREE["stages"]["rm"] | {"model": {"adapter": {"rank": 9}}})
    for options, start in (
        ({}, "adapter"),
        ({"run.resume": "never"}, "adapter to come"),
        ({"run.resume": "never", "stage": "rm"}, "adapter"),
    ):
        pipeline = load_pipeline(write(tmp_path, tree), options)
        model = runs.planned(pipeline, pipeline.stage("rm")).model
        assert (model.start, model.adapter.rank) == (Path("runs/mine/sft", start), 4)


def test_a_stage_that_began_from_what_was_there_before_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From another adapter, or with other rows, unless it begins anew."""
    path, asked = write(tmp_path, TREE), list[Any]()
    for name, content in (("sft/adapter", "a"), ("again/start", "b")):
        (folder := tmp_path / "runs" / "mine" / name).mkdir(parents=True)
        (folder / "config.json").write_text(content)
    updates = [
        None,
        (SimpleNamespace(line="written"), False),
        (SimpleNamespace(line="w"), True),
    ] * 2
    rows = Mock(side_effect=lambda *given, **also: asked.append((given, also)) or updates.pop(0))
    monkeypatch.setattr(runs, "update_rows", rows)
    monkeypatch.setattr(runs.checkpoint, "listing", lambda folder: [folder])
    for resume, told in (("auto", 2), ("never", 0)):
        lines, given = list[str](), {"run.directory": str(tmp_path / "runs"), "run.resume": resume}
        pipeline = load_pipeline(path, given)
        stage, console = pipeline.stage("again"), SimpleNamespace(line=lines.append)
        runs._warn_of_another_start(pipeline, stage)
        for _ in range(3):
            runs._update_rows(pipeline, stage, console)  # type: ignore[arg-type]
        runs._update_rows(pipeline, pipeline.stage("sft"), console)  # type: ignore[arg-type]
        assert lines == ["written", "w"]
        archives = {"drawn": tmp_path / "runs" / "mine" / "drawn" / "buffers"}
        assert asked == [((stage.rows, archives), {"anew": resume == "never"})] * 3
        assert [record.getMessage()[:33] for record in caplog.records] == [
            "stage again began from an earlier",
            "stage again began with other rows",
        ][:told]
        caplog.clear()
        asked.clear()
    (tmp_path / "runs" / "mine" / "again" / "start" / "config.json").write_text("a")
    pipeline = load_pipeline(path, {"run.directory": str(tmp_path / "runs")})
    runs._warn_of_another_start(pipeline, pipeline.stage("again"))
    assert not caplog.records


def test_the_shipped_pipelines_load() -> None:
    found = [
        path for path in sorted((ROOT / "configs").glob("*.yaml"))
        if "stages" in yaml.safe_load(path.read_text())
    ]  # fmt: skip
    assert "rlhf_tiny" in [path.stem for path in found]
    for path in found:
        assert len(load_pipeline(path, {}).stages) > 1


def test_shipped_critics_take_whole_returns_and_learn_alone_first() -> None:
    """PPO's lambdas are 1, and the critic is warmed up in at most a tenth of the steps."""
    stages = [load_pipeline(path, {}).stage("ppo").config for path in (
        ROOT / "configs" / "rlhf_tiny.yaml", ROOT / "configs" / "rlhf_qwen2.5-7b_24gb.yaml"
    )]  # fmt: skip
    for config in [*stages, load(ROOT / "configs" / "ppo_qwen2.5-7b_24gb.yaml")]:
        assert config.critic.lam == 1
        assert 0 < config.critic.warmup_steps <= config.run.steps / 10


@pytest.mark.parametrize(
    ("last", "ended"), [(None, []), ("drawn", ["sft"]), ("ppo", ["sft", "rm", "drawn"])]
)
def test_stages_run_one_after_the_other_until_a_signal(
    last: str | None, ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes while ``last`` ends by itself ends the pipeline before the next stage; one of
    an earlier run does not. What is to come is checked, but for the first, which its run checks.
    Of one that has ended it is said what was held out."""
    tree = TREE | {"score": {"rewards": ["format"]}}
    pipeline = load_pipeline(write(tmp_path, tree), {"run.directory": str(tmp_path / "runs")})
    names, told, lines = [stage.name for stage in pipeline.stages], [], list[str]()
    for name in ended:
        (folder := tmp_path / "runs" / "mine" / name).mkdir(parents=True)
        (folder / "summary.json").write_text('{"steps": 10000}')
        if name == "sft":
            (folder / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.5}\n')

    def trained(config: Config, console: object) -> dict[str, Any]:
        told.append(config.run.name)
        StopSignal.unheeded = signal.SIGINT if config.run.name == last else None
        return {}

    checked = Mock(return_value=SimpleNamespace(num_errors=0))
    for name in ("check_data", "check_options", "_update_rows", "write_report_of", "gc"):
        monkeypatch.setattr(runs, name, checked if name.startswith("check") else Mock())
    monkeypatch.setattr(runs, "run_training", trained)
    monkeypatch.setattr(StopSignal, "unheeded", signal.SIGTERM)
    is_stopped = last == "drawn"
    console: Any = SimpleNamespace(line=lines.append)
    with pytest.raises(Stopped) if is_stopped else nullcontext() as stopped:
        assert list(runs.run_pipeline(pipeline, console)) == names
    assert told == (names[:3] if is_stopped else names)
    assert [call.args[0].run.name for call in checked.mock_calls] == [
        name for name in names if name not in ended
    ][1:]
    held_out = {"sft": "  held-out format 0.500"}
    assert [text for text in lines if not text.startswith("stage ")] == [
        held_out.get(name, "  nothing was held out") for name in ended
    ]
    assert not is_stopped or stopped.value.exit_code == 130
