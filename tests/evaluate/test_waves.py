"""Whom an evaluation asks, in what waves, and what the sampler is asked for a wave."""

import json
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from conftest import TINY
from reason_llm.config import Config
from reason_llm.config.command_line import CommandLine
from reason_llm.data import DataSet
from reason_llm.errors import ConfigError
from reason_llm.evaluate import evaluation
from reason_llm.evaluate.evaluation import (
    _by_base,
    _config_for,
    _finish,
    _identity,
    _open,
    _run_stage,
    _Stage,
    _wave_outcomes,
)
from reason_llm.evaluate.outcomes import Wave
from reason_llm.evaluate.request import (
    HELD_OUT,
    Request,
    Target,
    _sets,
    _target,
    make_request,
)
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.store import folder as run_folder

PROMPTS = [Prompt(f"rows.jsonl:{n}", "q", (1, 2), "4") for n in range(3)]
SAMPLE = {"stop": ["</answer>"], "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}


class Noted:
    """A sampler that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, int]] = []

    def sample(self, prompts: Any, params: Any, seed: int, progress: Any) -> list[Group]:
        self.asked.append((params, seed))
        said = Completion((5,), "x", (-1.0,), "stop")
        return [Group(prompt, (said,) * params.num_completions) for prompt in prompts]


def asked(model: str, start: int = 0, **run: Any) -> list[tuple[Any, int]]:
    given = {"data": {"train": "x"}, "sample": {**SAMPLE, "max_new_tokens": 7}, "run": run}
    config, sampler = Config.model_validate(given), Noted()
    scorer: Any = type("Scorer", (), {"score": lambda self, groups, only_first: groups,
                                      "rewards": [Scored()]})()  # fmt: skip
    request = Request(config, (), 4, False, None, False, False)  # type: ignore[arg-type]
    wave = Wave(model, "held_out", start, PROMPTS)
    found = _wave_outcomes(request, config, wave, sampler, scorer, lambda *told: None)  # type: ignore[arg-type]
    assert [len(each["samples"]) for each in found] == [4, 4, 4]
    return sampler.asked


class Scored:
    def __init__(self) -> None:
        self.reward = type("Reward", (), {"answer": None})()


def test_greedy_and_drawn_end_where_a_run_s_completions_end() -> None:
    (greedy, _), (drawn, _) = asked("adapter")
    assert (greedy.temperature, greedy.num_completions, greedy.max_new_tokens) == (0.0, 1, 7)
    assert greedy.stop == drawn.stop == ("</answer>",)
    assert drawn == replace(
        greedy, num_completions=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1
    )


def test_models_that_are_compared_have_the_same_random_numbers() -> None:
    seeds = [seed for _, seed in asked("adapter")]
    assert seeds == [seed for _, seed in asked("base")]
    assert seeds != [seed for _, seed in asked("base", 3)]
    assert seeds != [seed for _, seed in asked("base", seed=1)]


@pytest.mark.parametrize(
    ("sample", "engine", "sizes"),
    [({}, None, [3, 2, 1]), ({}, "vllm", [5, 1]), ({"prompts_per_wave": 2}, None, [2, 2, 1, 1]),
     ({"completions_per_prompt": 99}, None, [1] * 6)],
)  # fmt: skip
def test_waves_hold_what_fits_at_once(sample: Any, engine: Any, sizes: list[int]) -> None:
    """Ten completions fit; of each problem three are sampled."""
    config = Config.model_validate(
        {"data": {"train": "x"}, "sample": {"completions_per_prompt": 3} | sample}
    )
    prompts = [Prompt(str(n), "q", (1,), "4") for n in range(6)]
    sets = [DataSet("a", "a", "problems", prompts=prompts[:5])]
    sets.append(DataSet("b", "b", "problems", prompts=prompts[5:]))
    targets = [Target("adapter", "m", Path("x")), Target("base", "m", None)]
    plan: Any = SimpleNamespace(cache_tokens=1099, context_tokens=100, engine=engine)
    waves = list(_Stage(config, targets, None, sets, plan, None).waves())
    assert [(of.label, wave.model) for of, wave in waves] == [
        (label, label) for label in ("adapter", "base") for _ in sizes
    ]
    first = [wave for _, wave in waves[: len(sizes)]]
    assert [len(wave.prompts) for wave in first] == sizes
    assert [prompt for wave in first for prompt in wave.prompts] == prompts
    assert [wave.start for wave in first] == [*accumulate(sizes[:-2], initial=0), 0]
    assert [wave.set for wave in first] == ["a"] * (len(sizes) - 1) + ["b"]


def test_models_share_a_base_copy_that_serves_them_all(tmp_path: Path) -> None:
    """With adapters of one shape."""
    made = {name: tmp_path / name for name in ("a", "b", "wide")}
    for name, folder in made.items():
        folder.mkdir()
        rank = 9 if name == "wide" else 8
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    of = {name: Target(name, "m", folder) for name, folder in made.items()}
    base, other = Target("base", "m", None), Target("other", "n", None)
    for first, second, is_shared in (
        (of["a"], of["b"], True), (of["a"], base, True), (base, of["a"], True),
        (of["a"], of["wide"], False), (base, other, False),
    ):  # fmt: skip
        request: Any = SimpleNamespace(targets=(first, second))
        assert _by_base(request) == ([[first, second]] if is_shared else [[first], [second]])
    tree = {"data": {"train": "x", "eval": "y"}, "eval": {"max_new_tokens": 5}}
    config = Config.model_validate(tree | {"model": {"train": "full"}})
    asked = Request(config, (), 0, False, Path("o"), False, False)
    for targets, rank, train in (([base, of["wide"]], 9, "adapter"), ([base], 32, "full")):
        found = _config_for(asked, targets)
        assert (found.model.path, found.model.adapter.rank, found.model.train) == ("m", rank, train)
        sample = found.sample
        assert (sample.prompts_per_step, sample.completions_per_prompt) == (64, 1)
        assert sample.max_new_tokens == 5
    several = replace(asked, num_samples=4)
    assert _config_for(several, [base]).sample.completions_per_prompt == 4


def test_a_model_is_named_by_its_run_its_adapter_or_itself(tmp_path: Path) -> None:
    run, whole, adapter = (tmp_path / name for name in ("run", "whole", "mine"))
    config = Config.model_validate({"data": {"train": "x"}, "model": {"path": "m"}})
    for folder in (run / "adapter", run / "adapter_best", adapter, whole / "model"):
        folder.mkdir(parents=True)
        name = "model.safetensors" if folder.name == "model" else "adapter_config.json"
        (folder / name).write_text("{}")
    for folder in (run, whole):
        tree = {"data": {"train": "x"}, "model": {"train": "full"} if folder == whole else {}}
        (folder / "resolved_config.yaml").write_text(yaml.safe_dump(tree))
    own = Target("adapter", "m", run / "adapter")
    for name, of_run, expected in (
        ("adapter", None, own),
        ("base", run, Target("base", "m", None)),
        ("best", run, Target("best", "m", run / "adapter_best")),
        (str(run), None, Target(str(run), "m", run / "adapter")),
        (str(whole), run, Target(str(whole), str(whole / "model"), None)),
        (str(adapter), run, Target(str(adapter), "m", adapter)),
        ("org/model", run, Target("org/model", "org/model", None)),
    ):
        assert _target(name, config, own, of_run) == expected
    tree = {"stage": "reward", "data": {"train": "x"}}
    (run / "resolved_config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"is a reward model \(stage=reward\)"):
        _target(str(run), config, own, None)
    with pytest.raises(ConfigError, match="there is no adapter: name a run's folder"):
        _target("best", config, own, None)


def requested(*targets: Target, k: int = 0, generate: bool = False, **tree: Any) -> Request:
    config = Config.model_validate({"data": {"train": "x", "eval": "y"}} | tree)
    return Request(config, targets, k, generate, Path("out"), False, False)


@pytest.mark.parametrize(
    ("k", "generate", "greedy", "drawn"),
    [(0, False, 1, 0), (4, False, 1, 4), (0, True, 1, 0), (4, True, 0, 4)],
)
def test_a_problem_has_a_greedy_answer_unless_samples_alone_are_generated(
    k: int, generate: bool, greedy: int, drawn: int
) -> None:
    sampler, wave = Noted(), Wave("a", "hard", 3, PROMPTS)
    request = requested(k=k, generate=generate)
    judged = []

    def score(groups: list[Group], only_first: bool) -> list[Group]:
        assert only_first
        judged.append(groups)
        said = [replace(c, reward=0.5) for c in groups[0].completions]
        return [replace(group, completions=tuple(said)) for group in groups]

    find = SimpleNamespace(reward=SimpleNamespace(answer=lambda text: f"{text}!"))
    scorer: Any = SimpleNamespace(score=score, rewards=[find])
    found = _wave_outcomes(request, request.config, wave, sampler, scorer, lambda *told: None)  # type: ignore[arg-type]
    assert [params.num_completions for params, _ in sampler.asked] == [n for n in (1, k) if n][
        1 - greedy : 1 + bool(drawn)
    ]
    one = {"text": "x", "tokens": 1, "finish_reason": "stop"}
    one |= {"reward": None, "answer": None} if generate else {"reward": 0.5, "answer": "x!"}
    assert found == [
        {"model": "a", "set": "hard", "id": prompt.id, "prompt": "q", "gold": "4",
         "greedy": one if greedy else None, "samples": [one] * drawn} for prompt in PROMPTS
    ]  # fmt: skip
    assert len(judged) == (0 if generate else greedy + bool(drawn))


@pytest.mark.parametrize(
    ("k", "generate", "each"), [(0, False, 1), (4, False, 5), (4, True, 4), (0, True, 1)]
)
def test_a_stage_asks_each_target_by_its_own_weights(
    k: int, generate: bool, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, base, done = Target("a", "m", Path("a")), Target("base", "m", None), Target("d", "m", None)
    did: list[Any] = []

    @contextmanager
    def model(section: Any, tokenizer: Any, seed: int, engine: Any) -> Any:
        assert (section, tokenizer, seed, engine) == (request.config.model, "t", 7, None)
        yield SimpleNamespace(policy="p", engine=None)

    @contextmanager
    def sampling(of: Any, tokens: int) -> Any:
        did.append(tokens)
        yield "sampler"

    @contextmanager
    def phase(label: str, total: int) -> Any:
        did.append((label, total))
        yield "progress"

    monkeypatch.setattr(evaluation, "Model", model)
    monkeypatch.setattr(evaluation, "sampling", sampling)
    monkeypatch.setattr(evaluation.adapters, "clear", lambda policy: did.append(policy))
    monkeypatch.setattr(evaluation.adapters, "load_as_is", lambda *given: did.append(given))
    monkeypatch.setattr(evaluation, "in_environment", lambda sampler, played: (sampler, played))
    monkeypatch.setattr(evaluation, "_wave_outcomes", lambda *given: [given[2], *given[3:]])
    request = requested(own, base, done, k=k, generate=generate, run={"seed": 7})
    waves = [(of, Wave(of.label, "s", n, PROMPTS[n:])) for of in (own, base) for n in (0, 2)]
    plan: Any = SimpleNamespace(engine=None, cache_tokens=99)
    stage = _Stage(request.config, [own, base, done], "t", [], plan, None)  # type: ignore[arg-type]
    logged: list[Any] = []
    log: Any = SimpleNamespace(append=logged.append)
    scorer: Any = SimpleNamespace(take_counts=dict)
    _run_stage(request, stage, waves, log, scorer, SimpleNamespace(phase=phase))  # type: ignore[arg-type]
    assert did == [
        ("p", Path("a"), "m"), 99, ("a", 4 * each), "p", 99, ("base", 4 * each),
    ]  # fmt: skip
    assert logged == [[wave, ("sampler", None), scorer, "progress"] for _, wave in waves]


def test_an_evaluation_is_known_by_all_that_its_lines_depend_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation.run_folder, "weights_digest", lambda path, adapter: f"{path}!")
    own, base = Target("a", "m", Path("f")), Target("base", "n", None)

    def identity(
        k: int = 2, seed: int = 0, ids: tuple[int, ...] = (1,), answer: str = "4", **tree: Any
    ) -> Any:
        request = requested(own, base, k=k, run={"seed": seed}, **tree)
        sets = [DataSet("s", "s", "problems", prompts=[Prompt("p", "q", ids, answer)])]
        tokenizer = SimpleNamespace(eos_token_id=2)
        stage: Any = SimpleNamespace(
            config=request.config, sets=sets, targets=request.targets, tokenizer=tokenizer
        )
        return _identity(request, [stage])

    usual = identity()
    assert usual == identity()
    assert {*usual["config"]} == {"model", "data", "sample", "score", "eval", "memory"}
    assert (usual["seed"], usual["k"]) == (0, 2)
    read = {"files_sha256": {}, "end_token_ids": [2]}
    assert usual["models"] == {
        "a": {"path": "m", "adapter": "f", "sha256": "m!", **read},
        "base": {"path": "n", "adapter": None, "sha256": "n!", **read},
    }
    changes: list[dict[str, Any]] = [
        {"k": 3}, {"seed": 1}, {"ids": (2,)}, {"answer": "5"}, {"sample": {"temperature": 0.5}},
        {"eval": {"sets": {"hard": "z"}}}, {"score": {"rewards": [{"name": "format"}]}},
    ]  # fmt: skip
    for change in changes:
        assert identity(**change) != usual, change


@pytest.mark.parametrize(("k", "temperature"), [(0, 0.0), (2, 0.7)])
def test_the_summary_says_whom_it_is_of_and_how_they_were_asked(
    k: int, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, base = Target("a", "m", Path("f")), Target("base", "m", None)
    rewards = [{"name": "boxed"}, {"name": "format"}]
    tree: Any = {"sample": {"temperature": 0.7}, "eval": {"max_new_tokens": 5}}
    request = replace(requested(own, base, k=k, score={"rewards": rewards}, **tree), out=tmp_path)
    asked: list[Any] = []

    def summarize(*given: Any) -> dict[str, Any]:
        asked.append(given)
        return {"results": {}, "comparisons": {}}

    monkeypatch.setattr(evaluation.accuracy, "summarize", summarize)
    log: Any = SimpleNamespace(outcomes=["one"], path=tmp_path / "p", digest=lambda: "d")
    watch: Any = SimpleNamespace(line=lambda text: None)
    found = _finish(request, log, True, watch)
    _finish(replace(request, targets=(own,)), log, False, watch)
    assert asked == [(["one"], k, True, True), (["one"], k, False, False)]
    assert found == {
        "models": {"a": "f", "base": "m"}, "judged_by": "boxed", "k": k, "sha256": "d",
        "temperature": temperature, "max_new_tokens": 5, "results": {}, "comparisons": {},
    }  # fmt: skip
    assert json.loads((tmp_path / "summary.json").read_bytes())["models"] == {"a": "f"}


@pytest.mark.parametrize(
    ("same", "finished", "named", "afresh", "ends"),
    [  # goes on, moves aside or refuses
        (True, False, True, False, "goes on"), (False, False, False, False, "refuses"),
        (False, True, False, False, "moves"), (False, True, True, False, "refuses"),
        (True, False, True, True, "moves"),
    ],
)  # fmt: skip
def test_another_evaluation_gives_way_only_if_it_is_finished_and_nobody_named_its_folder(
    same: bool,
    finished: bool,
    named: bool,
    afresh: bool,
    ends: str,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(evaluation, "_identity", lambda request, stages: {"now": 1})
    out = tmp_path / "out"
    out.mkdir()
    (out / "problems.jsonl").write_text("")
    (out / "evaluation.json").write_text('{\n  "now": 1\n}' if same else "{}")
    if finished:
        (out / "summary.json").write_text("{}")
    request = replace(requested(), out=out, afresh=afresh, may_move_aside=not named)
    if ends == "refuses":
        with pytest.raises(ConfigError, match="holds an evaluation with other options"):
            _open(request, [])
        return
    log = _open(request, [])
    assert (log.path, log.num_samples, log.judged) == (out / "problems.jsonl", 0, True)
    assert log.path.exists() == (ends == "goes on")
    assert json.loads((out / "evaluation.json").read_bytes()) == {"now": 1}
    assert len(list(tmp_path.iterdir())) == (2 if ends == "moves" else 1)


def test_completions_alone_have_a_file_of_their_own(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(evaluation, "_identity", lambda request, stages: {})
    log = _open(replace(requested(k=3, generate=True), out=tmp_path / "out"), [])
    assert (log.path.name, log.num_samples, log.judged) == ("completions.jsonl", 3, False)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, {HELD_OUT: "y", "hard": "z"}),
        (["gsm8k", "hard"], {"gsm8k": "openai/gsm8k:main", "hard": "z"}),
        (["math500"], {"math500": "HuggingFaceH4/MATH-500"}),
        (["aime2024", "aime2025"], {"aime2024": "math-ai/aime24", "aime2025": "math-ai/aime25"}),
        (["mine=a/b"], {"mine": "a/b"}),
        (["org/my set:x"], {"my_set_x": "org/my set:x"}),
        (["rows.JSONL"], {"rows": "rows.JSONL"}),
        (["verifiers:a-b?size=2"], {"verifiers_a-b_size_2": "verifiers:a-b?size=2"}),
    ],
)
def test_sets_are_named_by_the_run_a_preset_or_a_file(names: Any, expected: dict[str, str]) -> None:
    tree = {"data": {"train": "x", "eval": "y"}, "eval": {"sets": {"hard": "z"}}}
    assert _sets(names, Config.model_validate(tree)) == expected


def test_a_set_of_the_run_goes_before_a_preset_of_its_name() -> None:
    tree = {"data": {"train": "x"}, "eval": {"sets": {"gsm8k": "mine"}}}
    assert _sets(["gsm8k"], Config.model_validate(tree)) == {"gsm8k": "mine"}
    with pytest.raises(ConfigError, match=r"names rows twice; .* as in other=b/rows.csv"):
        _sets(["a/rows.csv", "b/rows.csv"], Config.model_validate(tree))
    with pytest.raises(ConfigError, match="is none of gsm8k, math500, aime2024, aime2025, and no"):
        _sets(["nothing"], Config.model_validate(tree))


@pytest.mark.parametrize(
    ("k", "number"),
    [(None, 0), ("0", 0), ("4096", 4096), ("4097", None), ("-1", None), ("00001", None)],
)
def test_a_request_says_what_is_asked_and_where_it_is_kept(
    k: str | None, number: int | None, tmp_path: Path
) -> None:
    tree = {"run": {"name": "r", "directory": "runs"}, "data": {"train": "x", "eval": "y"}}
    (path := tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    values = {} if k is None else {"k": [k]}
    if number is None:
        with pytest.raises(ConfigError, match="is no number of samples; give one from 0 to 4096"):
            make_request(CommandLine(str(path), {}, set(), values))
        return
    found = make_request(CommandLine(str(path), {"eval.limit": 3}, set(), values))
    assert (found.num_samples, found.generate_only) == (number, False)
    assert (found.out, found.may_move_aside, found.afresh) == (
        Path("runs/r/evaluation"),
        True,
        False,
    )
    assert found.targets == (Target("base", found.config.model.path, None),)
    assert (found.config.data.eval, dict(found.config.eval.sets)) == (None, {HELD_OUT: "y"})
    assert found.config.eval.limit == 3
    again = CommandLine(str(path), {"run.resume": "never"}, {"generate-only"}, values)
    assert make_request(again).out == Path("runs/r/completions")
    assert make_request(again).generate_only and make_request(again).afresh
    named = replace(again, values=values | {"out": ["o"], "compare": ["org/m"], "model": ["org/n"]})
    found = make_request(named)
    assert (found.out, found.may_move_aside) == (Path("o"), False)
    assert [each.label for each in found.targets] == ["org/n", "org/m"]


def test_an_evaluation_of_a_copied_run_is_kept_in_the_copy(tmp_path: Path) -> None:
    tree = {
        "run": {"name": "r", "directory": str(tmp_path / "runs")},
        "model": {"path": str(TINY)},
        "data": {"train": "x", "eval": "y"},
    }
    copied = tmp_path / "elsewhere" / "copied"
    (copied / "adapter").mkdir(parents=True)
    (copied / "adapter" / "adapter_config.json").write_text("{}")
    config = Config.model_validate(tree)
    (copied / "resolved_config.yaml").write_bytes(run_folder.config_to_bytes(config))
    line = CommandLine(str(copied), {}, set(), {})
    assert make_request(line).out == copied / "evaluation"
    assert make_request(replace(line, given={"generate-only"})).out == copied / "completions"
    moved = replace(line, overrides={"run.name": "other"})
    assert make_request(moved).out == tmp_path / "runs" / "other" / "evaluation"
