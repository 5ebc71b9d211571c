"""Every stage in short form on the tiny model.

1. It runs and learns in the right direction; killed in the middle, it goes on to the same bits of
   adapter, head, critic and optimizers.
2. PPO: the critic learns first, the policy moves after the warm-up, the KL's weight is adapted.
3. Bad input is one line with its cause, and nothing is learned.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import orjson
import pytest
from safetensors.torch import load_file, save_file

import fault_table
import waves
from faults import Ended, Fault, Trainer, differences, make_start, outcome, write_config
from reason_llm.app.cli import main
from reason_llm.run.store import metrics
from stage_runs import STAGES

Records = list[metrics.Record]
OPD = ("--sample.prompts_per_step", "16", "--run.steps", "4",
       "--train.optimizer_steps", "1", "--train.micro_batch_tokens", "512")  # fmt: skip
OPTIONS = {"ppo": ("--run.steps", "4"), "opd": OPD}
"""Of a run that is long enough to show where it goes."""
FAULTS = {
    "sft": Fault("learning", "SIGKILL", (fault_table.BACKWARD,), 5),
    "pretrain": Fault("learning", "SIGKILL", (fault_table.JUDGING,), 3),
    "reward": Fault("learning", "SIGKILL", (fault_table.TENSORS,), 6),
    "irpo": Fault("learning", "SIGKILL", (fault_table.UPDATE,), 4),
    "orpo": Fault("learning", "SIGKILL", (f"after {fault_table.UPDATE}",), 3),
    "kto": Fault("learning", "SIGKILL", (f"after {fault_table.UPDATE}",), 4),
    "ppo": Fault(
        "learning", "SIGKILL", (fault_table.UPDATE,), 8
    ),  # the critic's, of the third step
    "opd": Fault("learning", "SIGKILL", (fault_table.OLD_LOGPROBS,), 4),
}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer


class Here(Trainer):
    """Runs without a fault in this process, which has imported everything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def run(self, folder: Path, fault: Fault | None = None, *arguments: str) -> Ended:
        """The run whose config is in ``folder``, to its end."""
        assert fault is None
        count = waves.size_of(folder)
        assert count is not None
        with pytest.MonkeyPatch.context() as patched:
            waves.limit_waves(count, patched.setattr)
            status = main(["train", str(folder / "config.yaml"), *arguments])
        return Ended(status, "printed here", [], 0, False, 0, [], 0.0)


def options(stage: str, steps: int = 4) -> tuple[str, ...]:
    return OPTIONS.get(stage, ("--run.steps", str(steps)))


def finished(home: Path, steps: int) -> Callable[[str], Path]:
    """The folder of a stage's run that nothing interrupts, made when it is first asked for."""
    found: dict[str, Path] = {}

    def get(stage: str) -> Path:
        if stage not in found:
            make_start(Here(), home)
            folder = home / f"whole-{stage}"
            write_config(folder, stage)
            assert Here().run(folder, None, *options(stage, steps)).status == 0
            found[stage] = folder
        return found[stage]

    return get


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs that are long enough to learn, beside which the others have their folders."""
    return finished(tmp_path_factory.mktemp("stages"), 4)


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Runs of one step."""
    return finished(tmp_path_factory.mktemp("brief"), 1)


def records_of(folder: Path) -> Records:
    return metrics.read(folder / "runs" / "run")


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_learns(stage: str, whole: Callable[[str], Path]) -> None:
    DIRECTIONS[stage](records_of(whole(stage)))


@pytest.mark.long
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_stage_goes_on_to_the_same_bits(
    stage: str, trainer: Trainer, whole: Callable[[str], Path]
) -> None:
    like = whole(stage)
    folder = like.parent / f"killed-{stage}"
    write_config(folder, stage)
    killed = trainer.run(folder, FAULTS[stage], *options(stage))
    assert (killed.status, killed.struck) == (-9, True), killed.printed
    resumed = trainer.run(folder, None, *options(stage))
    assert resumed.status == 0, resumed.printed
    assert "resumes after step" in resumed.printed
    assert differences(outcome(folder), outcome(like)) == []


def falls(records: Records, name: str = "eval/loss", to: float = 1.0) -> None:
    """To this part of what it was."""
    first, *_, last = [record[name] for record in records if name in record]
    assert last < to * first, (first, last)


def reward_model(records: Records) -> None:
    assert math.isclose(records[0]["eval/loss"], math.log(2), abs_tol=1e-6)  # a head of zeros
    falls(records, to=0.7)
    assert records[-1]["eval/pair_accuracy"] >= 0.9
    assert records[0]["eval/reward_std"] == 0.0 < records[-1]["eval/reward_std"]


def preferences(records: Records) -> None:
    falls(records)
    # The policy begins as the reference, which may be measured in other micro-batches.
    assert math.isclose(records[0]["eval/margin"], 0, abs_tol=1e-6)
    assert records[-1]["eval/margin"] > 0.3
    assert records[-1]["eval/pair_accuracy"] >= 0.9


def odds(records: Records) -> None:
    falls(records, to=0.9)
    assert records[-1]["eval/margin"] > records[0]["eval/margin"]
    assert "eval/chosen_log_ratio" not in records[-1]  # there is no reference


def labels(records: Records) -> None:
    assert math.isclose(records[0]["eval/loss"], 0.5, abs_tol=1e-6)
    falls(records, to=0.9)
    last = records[-1]
    assert last["eval/chosen_log_ratio"] > last["eval/rejected_log_ratio"] + 2


def critic(records: Records) -> None:
    falls(records, "critic/loss", to=0.7)
    learned = [record for record in records if "critic/value" in record]
    rewards = [record["score/reward"] for record in learned]
    values = [record["critic/value"] for record in learned]
    assert abs(values[-1] - rewards[-1]) < 0.5 * abs(values[0] - rewards[0])
    assert ["train/loss" in record for record in learned] == [False, True, True, True]
    kl = [record["train/kl_per_completion"] for record in learned]
    assert kl[0] == 0.0  # the policy is its start
    assert kl[-1] > 0


DIRECTIONS: dict[str, Callable[[Records], None]] = {
    "sft": lambda records: falls(records, to=0.9),
    "pretrain": lambda records: falls(records, to=0.8),
    "reward": reward_model,
    "irpo": preferences,
    "orpo": odds,
    "kto": labels,
    "ppo": critic,
    "opd": lambda records: falls(records, "train/teacher_kl", to=0.5),
}


@pytest.mark.long
def test_the_policy_begins_as_its_start_and_stays_so_in_the_warm_up(
    whole: Callable[[str], Path], trainer: Trainer
) -> None:
    """And the copy of the start is enough: the adapter that it was made from is not read again."""
    folder = whole("ppo").parent / "warm-up"
    shutil.copytree(whole("ppo").parent / "start", folder / "own")
    write_config(folder, "ppo")
    arguments = ("--model.start", str(folder / "own" / "adapter"), "--run.keep_checkpoints", "9")
    assert trainer.run(folder, None, *arguments, "--run.steps", "2").status == 0
    run = folder / "runs" / "run"
    names = ("step-00000000", "step-00000001", "step-00000002")
    start, *steps = (
        load_file(path / "adapter_model.safetensors")
        for path in (run / "start", *(run / "checkpoints" / name for name in names))
    )
    for step, is_start in zip(steps, (True, True, False), strict=True):
        assert all(step[name].equal(start[name]) for name in start) is is_start
    heads = [
        load_file(run / "checkpoints" / name / "critic.score.safetensors") for name in names[:2]
    ]
    assert not heads[0]["weight"].any()
    assert heads[1]["weight"].any()
    shutil.rmtree(folder / "own")
    longer = trainer.run(folder, None, *arguments, "--run.steps", "3")
    assert longer.status == 0, longer.printed


# --- bad input --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(brief: Callable[[str], Path]) -> Path:
    """A folder with finished runs of sft, irpo and reward, and the rows of all."""
    for stage in ("sft", "irpo", "reward"):
        brief(stage)
    return brief("sft").parent


@pytest.fixture
def refusal(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line that a config leads to."""

    def call(stage: str, *arguments: str, folder: Path | None = None, is_early: bool = True) -> str:
        victim = folder or tmp_path / "run"
        if folder is None:
            shutil.copytree(good / "start", tmp_path / "start")
            write_config(victim, stage)
        before = sorted(victim.rglob("*"))
        assert main(["train", str(victim / "config.yaml"), *arguments]) == 2
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, said
        assert "Traceback" not in said
        if is_early:
            assert sorted(victim.rglob("*")) == before, "something was written"
        return lines[0]

    return call


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path.parent


def copy_of(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


SIMPLE: list[tuple[str, tuple[str, ...], tuple[str, ...]]] = [
    ("sft", ("--data.form", "problems"), ("data.form=problems contradicts stage=sft",)),
    ("irpo", ("--data.form", "labels"), ("labels contradicts stage=preference (irpo)",)),
    ("sft", ("--data.train", "{shared}/pairs.jsonl"), (":1", "preference.name=dpo")),
    ("pretrain", ("--data.train", "{shared}/pairs.jsonl"), ("pairs.jsonl:1", "text")),
    ("reward", ("--data.train", "{shared}/labels.jsonl"), (":1", "preference.name=kto")),
    ("kto", ("--data.train", "{shared}/demonstrations.jsonl"), (":1", "label")),
    ("sft", ("--eval.rows", "{shared}/none.jsonl"), ("none.jsonl",)),
    ("sft", ("--eval.rows", "{shared}/texts.jsonl"), ("texts.jsonl:1",)),
    ("sft", ("--run.from_buffer", "{shared}/b.json"), ("run.from_buffer", "stage=sft")),
    ("reward", ("--data.eval", "{shared}/held_out.jsonl"), ("data.eval", "stage=reward")),
    ("sft", ("--critic.updates", "2"), ("critic section contradicts", "leave it out")),
    ("irpo", ("--model.start", "{shared}/none"), ("none", "name the adapter/ of a run")),
    ("irpo", ("--model.adapter.rank", "4"), ("model.adapter.rank=4 contradicts", "rank is 8")),
    ("ppo", ("--critic.start", "{shared}/none"), ("none", "name the adapter/ of a run")),
    ("ppo", ("--critic.start", "{shared}/start/adapter"), ("score.", "not a reward model")),
    ("opd", ("--teacher.adapter", "{shared}/none"), ("none", "name the adapter/ of a run")),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "arguments", "said"), SIMPLE)
def test_bad_input_is_one_line(
    stage: str, arguments: tuple[str, ...], said: tuple[str, ...], refusal: Callable[..., str],
    tmp_path: Path,
) -> None:  # fmt: skip
    line = refusal(stage, *(each.format(shared=tmp_path) for each in arguments))
    assert [each for each in said if each not in line] == [], line


def test_kto_s_longest_prompt_and_completion_must_fit_together(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    """Its baseline takes the prompt of one row with the completion of another."""
    long = "9+9=18 " * 10
    rows = [
        {"prompt": f"What is 3 + 4? {long}", "completion": "7", "label": True},
        {"prompt": "What is 3 + 5?", "completion": f"{long}8", "label": False},
    ]
    labels = tmp_path / "long.jsonl"
    labels.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    arguments = ("--data.train", str(labels))
    line = refusal("kto", *arguments, "--model.context_tokens", "100")
    assert "kto passes each prompt with the completion of another row" in line
    assert "more than the context of 100; drop long rows with data.max_tokens" in line


@pytest.mark.parametrize("option", ["model.start", "critic.start", "teacher.adapter"])
def test_a_damaged_adapter_is_one_line(
    option: str, refusal: Callable[..., str], good: Path, tmp_path: Path
) -> None:
    stage = {"model.start": "irpo", "critic.start": "ppo", "teacher.adapter": "opd"}[option]
    adapter = copy_of(good / "whole-reward" / "runs" / "run" / "adapter", tmp_path / "damaged")
    cut(adapter / "adapter_model.safetensors")
    (adapter / "digests.json").unlink()  # as another program's
    line = refusal(stage, f"--{option}", str(adapter))
    assert f"{adapter}/adapter_model.safetensors is damaged or no adapter of" in line


def test_a_damaged_head_is_one_line(
    refusal: Callable[..., str], good: Path, tmp_path: Path
) -> None:
    adapter = copy_of(good / "whole-reward" / "runs" / "run" / "adapter", tmp_path / "damaged")
    cut(adapter / "score.safetensors")
    line = refusal("ppo", "--critic.start", str(adapter))
    assert f"{adapter}: score.safetensors is not what was written" in line


def test_a_teacher_over_another_base_is_one_line(
    refusal: Callable[..., str], good: Path, tmp_path: Path
) -> None:
    adapter = copy_of(good / "start" / "adapter", tmp_path / "wide")
    tensors = load_file(adapter / "adapter_model.safetensors")
    wide = {name: tensor.repeat(1, 2) for name, tensor in tensors.items()}
    save_file(wide, adapter / "adapter_model.safetensors")
    (adapter / "digests.json").unlink()
    line = refusal("opd", "--teacher.adapter", str(adapter))
    assert "name the model that it was trained on" in line


def begun(good: Path, tmp_path: Path, stage: str) -> Path:
    """A finished run of this stage, copied to where it can be spoiled, with its rows beside it."""
    for name in ("start", f"whole-{stage}"):
        copy_of(good / name, tmp_path / name)
    folder = tmp_path / f"whole-{stage}"
    for path in folder.glob("data/.*"):
        path.unlink()
    write_config(folder, stage)
    return folder


@pytest.mark.parametrize(
    ("stage", "changed", "said"),
    [
        ("sft", ("--stage", "pretrain", "--data.form", "texts",
                 "--data.train", "{shared}/texts.jsonl", "--eval.rows", "{shared}/texts.jsonl"),
         "stage: 'sft' -> 'pretrain'"),
        ("irpo", ("--preference.name", "dpo"), "preference.name: 'irpo' -> 'dpo'"),
        ("sft", ("--data.train", "{shared}/held_out_demonstrations.jsonl"), "prompts_sha256"),
    ],
)  # fmt: skip
def test_a_run_is_not_resumed_as_another(
    stage: str, changed: tuple[str, ...], said: str, refusal: Callable[..., str], good: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = begun(good, tmp_path, stage)
    arguments = (each.format(shared=tmp_path) for each in changed)
    line = refusal(stage, "--run.steps", "5", *arguments, folder=folder)
    assert said in line
    assert "--run.name" in line


def test_a_damaged_copy_of_the_start_is_one_line(
    refusal: Callable[..., str], good: Path, tmp_path: Path
) -> None:
    folder = begun(good, tmp_path, "irpo")
    copied = folder / "runs" / "run" / "start" / "adapter_model.safetensors"
    content = copied.read_bytes()
    copied.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
    line = refusal("irpo", "--run.steps", "5", folder=folder)
    assert f"{copied.parent}: " in line and "; restore it" in line
    (copied.parent / "digests.json").unlink()
    line = refusal("irpo", "--run.steps", "5", folder=folder)
    assert "model.start_sha256" in line
    cut(copied)
    line = refusal("irpo", "--run.steps", "5", folder=folder)
    assert str(copied.parent) in line


def test_a_run_begun_anew_begins_from_the_adapter_that_it_names(good: Path, tmp_path: Path) -> None:
    """And not from the copy that the run before made of its own."""
    folder = begun(good, tmp_path, "irpo")
    other = good / "whole-irpo" / "runs" / "run" / "adapter"
    begins = ("--model.start", str(other))
    anew = ("--run.resume", "never", "--run.steps", "1")
    assert Here().run(folder, None, *begins, *anew).status == 0
    assert Here().run(folder, None, *begins, "--run.steps", "2").status == 0
    name = "adapter_model.safetensors"
    copied = folder / "runs" / "run" / "start" / name
    assert copied.read_bytes() == (other / name).read_bytes()


@pytest.mark.long
def test_a_teacher_that_has_changed_is_one_line(
    refusal: Callable[..., str], good: Path, brief: Callable[[str], Path], tmp_path: Path
) -> None:
    brief("opd")
    folder = begun(good, tmp_path, "opd")
    path = tmp_path / "start" / "adapter" / "adapter_model.safetensors"
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)
    (path.parent / "digests.json").unlink()
    line = refusal("opd", *OPD, "--run.steps", "5", folder=folder)
    assert "teacher.adapter_sha256" in line


def test_a_head_that_is_missing_from_every_checkpoint_is_one_line(
    refusal: Callable[..., str], good: Path, tmp_path: Path
) -> None:
    folder = begun(good, tmp_path, "reward")
    for path in folder.glob("runs/run/checkpoints/*/score.safetensors"):
        path.unlink()
    line = refusal("reward", "--run.steps", "5", folder=folder, is_early=False)
    assert "holds no checkpoint that is whole" in line


def test_a_checkpoint_of_another_stage_is_no_beginning(
    refusal: Callable[..., str], good: Path
) -> None:
    """An SFT run's checkpoint has no critic; its adapter can be begun from all the same."""
    source = good / "whole-sft" / "runs" / "run" / "checkpoints" / "step-00000001"
    line = refusal("ppo", "--run.resume", str(source), "--run.steps", "9")
    assert "stage: 'sft' -> 'rl'" in line
    assert "name its adapter as model.start" in line
