"""The parts of an export without a model: what is read, refused, compared and told of."""

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
import torch

from reason_llm.app.export import model_card, parity, reward_model
from reason_llm.app.export.model_card import Card, is_hub_id, licence_of
from reason_llm.app.export.reward_model import ScoreParity
from reason_llm.config import Config
from reason_llm.errors import ConfigError, ModelError, RolloutBufferError, WriteError
from reason_llm.model import Datum

exporting: Any = importlib.import_module("reason_llm.app.export.export")
FINE = parity.Gap(9, 0.0, 0.0)


@pytest.mark.parametrize(
    ("dtype", "largest", "mean"), [(torch.float32, 1e-4, 1e-5), (torch.bfloat16, 2.0, 0.1)]
)
def test_what_rounding_explains_of_a_log_prob(
    dtype: torch.dtype, largest: float, mean: float
) -> None:
    found = parity.Parity(parity.Gap(9, largest, mean), FINE, 0.0, 0.1, 0.5)
    found.check(dtype)
    for worse in (
        replace(found, gap=parity.Gap(9, 1.01 * largest, mean)),
        replace(found, gap=parity.Gap(9, largest, 1.01 * mean)), replace(found, strayed=0.51),
    ):  # fmt: skip
        with pytest.raises(ModelError, match="nothing was written"):
            worse.check(dtype)
    replace(found, strayed=None).check(dtype)


@pytest.mark.parametrize(
    ("dtype", "largest", "mean"), [(torch.float32, 1e-3, 1e-4), (torch.bfloat16, 0.3, 0.1)]
)
def test_what_rounding_explains_of_a_score_is_in_deviations(
    dtype: torch.dtype, largest: float, mean: float
) -> None:
    for spread, unit in ((4.0, 4.0), (0.0, 1e-3)):
        ScoreParity(9, largest * unit, mean * unit, spread).check(dtype)
        for off in ((1.01, 1.0), (1.0, 1.01)):
            worse = ScoreParity(9, largest * unit * off[0], mean * unit * off[1], spread)
            with pytest.raises(ModelError, match="does not score as base, adapter and head do"):
                worse.check(dtype)


def test_a_gap_is_of_sizes_and_is_told_with_its_tokens() -> None:
    gap = parity.Gap.between(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, -1.0, 1.0]))
    assert gap == parity.Gap(3, 1.0, 0.5)
    assert str(gap) == "largest 1, mean 0.5 nats over 3 tokens"


def test_an_export_is_compared_with_the_policy_and_the_policy_with_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"base": [-2.0, -2.0, -3.0], "policy": [-1.0, -1.0, -1.0], "out": [-1.5, -1.0, -1.0]}
    asked: list[Any] = []

    def load(path: Path, dtype: torch.dtype) -> str:
        asked.append((str(path), dtype))
        return str(path)

    def logprobs(model: str, rollouts: Any, temperature: float) -> torch.Tensor:
        asked.append((model, temperature))
        return torch.tensor(numbers[model])

    def policy_over(model: str, adapter: Path, dtype: torch.dtype) -> str:
        assert (model, adapter, dtype) == ("base", Path("adapter"), torch.float32)
        return "policy"

    for name, fake in (("load", load), ("logprobs", logprobs), ("policy_over", policy_over)):
        monkeypatch.setattr(parity, name, fake)
    rows = [Datum.of([1], [2, 3, 4], columns={"sampler_logprobs": [-1.0, -0.5, -0.5]})]
    places = Path("base"), Path("adapter"), Path("out")
    found = parity.check_parity(*places, rows, torch.float32, 0.7)
    assert asked == [
        ("base", torch.float32), ("base", 0.7), ("policy", 0.7),
        ("out", torch.float32), ("out", 0.7),
    ]  # fmt: skip
    assert (found.gap.largest, found.gap.mean) == pytest.approx((0.5, 0.5 / 3))
    assert (found.gap.tokens, found.learned.largest) == (3, 2.0)
    assert found.lost == pytest.approx(0.5 / 6)  # on the way (-1, -1, -2) back to the base
    assert found.strayed == pytest.approx(0.5)
    numbers["base"] = numbers["policy"]  # nothing was learned
    found = parity.check_parity(*places, [Datum.of([1], [2, 3, 4])], torch.float32, 0.7)
    assert (found.lost, found.lost_error, found.strayed) == (0.0, math.inf, None)


def test_a_model_is_loaded_as_any_user_loads_it(tmp_path: Path, monkeypatch: Any) -> None:
    """And runs no code of its own."""
    asked: list[Any] = []

    class Kind:
        @staticmethod
        def from_pretrained(*given: Any, **more: Any) -> Any:
            asked.append((given, more))
            return SimpleNamespace(eval=lambda: "model")

    assert parity.load(tmp_path, torch.bfloat16, Kind) == "model"
    place = {"device_map": {"": parity.default_device()}, "trust_remote_code": False}
    expected = place | {"dtype": torch.bfloat16, "use_safetensors": True}
    assert asked == [((tmp_path,), expected)]
    monkeypatch.setattr(parity, "load", lambda *given: given)
    monkeypatch.setattr(parity.adapters, "over", lambda *given: given)
    assert parity.policy_over("m", tmp_path, torch.float32) == (tmp_path, torch.float32)
    (tmp_path / "adapter_config.json").touch()
    assert parity.policy_over("m", tmp_path, torch.float32) == ("m", tmp_path)


class Model:
    """Prefers token 2 by one nat everywhere, of three, and notes how it samples."""

    device = "cpu"

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        logits = torch.zeros(*input_ids.shape, 3)
        logits[..., 2] = torch.arange(1, input_ids.shape[1] + 1)
        return SimpleNamespace(logits=logits)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self.options = options
        return torch.cat([input_ids, torch.full((1, 2), 7)], dim=1).repeat(4, 1)


def test_log_probs_are_of_the_trained_tokens_at_the_temperature() -> None:
    row = Datum.of([0, 1], [2, 0, 2], is_sampled=[True, False, True])
    found = parity.logprobs(Model(), [row, Datum.of([0], [2])], 2.0)
    # The token at place t is told by the logits of t - 1.
    expected = [n / 2 - math.log(2 + math.exp(n / 2)) for n in (2, 4, 1)]
    assert found.tolist() == pytest.approx(expected)


def test_where_no_rollouts_are_kept_the_policy_s_own_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = Model(), SimpleNamespace(eos_token_id=5)
    tokenizer.encode = lambda text, add_special_tokens: [len(text), int(add_special_tokens)]
    monkeypatch.setattr(parity, "load", lambda *given: given)
    monkeypatch.setattr(
        parity, "policy_over",
        lambda loaded, *more: model if (loaded, more) == (("b", "f"), ("a", "f")) else None,
    )  # fmt: skip
    rows = parity.sampled("b", "a", tokenizer, "f")  # type: ignore[arg-type]
    assert len(rows) == 16
    assert (rows[0].ids, rows[0].trained) == ((14, 0, 7, 7), (False, False, True, True))
    assert model.options == {
        "do_sample": True, "max_new_tokens": 32, "num_return_sequences": 4, "pad_token_id": 5,
        "top_k": 0, "top_p": 1.0,
    }  # fmt: skip


def test_rollouts_are_chosen_from_all_within_their_bounds() -> None:
    rows = [Datum.of([1], [number % 90]) for number in range(99)]
    found = parity.chosen(rows, 90)
    assert [row.ids[1] for row in found] == [3 * n % 90 for n in range(32)]
    with pytest.raises(ModelError, match="hold token 87 and the model knows 87"):
        parity.chosen(rows, 87)
    parity.chosen(rows[:88], 88)
    long = [Datum.of([1], [2] * 8191) for _ in range(3)]
    assert parity.chosen(long, 9) == long[:2]
    assert parity.chosen([Datum.of([1], [2] * 20_000), *long], 9) == [Datum.of([1], [2] * 20_000)]


@pytest.mark.parametrize(
    ("config", "generation", "ends", "expected"),
    [  # None: the base's own file as it is
        ({}, {"eos_token_id": 2, "x": 1}, [2], None),
        ({}, {"eos_token_id": [1, 2]}, [2], None),
        ({}, {"eos_token_id": 1, "x": 1}, [1, 2], {"eos_token_id": [1, 2], "x": 1}),
        ({"eos_token_id": 1, "bos_token_id": 3, "pad_token_id": 0, "y": 1}, None, [2],
         {"bos_token_id": 3, "eos_token_id": [2], "pad_token_id": 0}),
        ({"eos_token_id": 1}, None, [1, 2], {"eos_token_id": [1, 2]}),
    ],
)  # fmt: skip
def test_the_generation_config_has_every_end_of_training(
    config: Any, generation: Any, ends: list[int], expected: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    base, out, name = tmp_path / "base", tmp_path / "out", "generation_config.json"
    for folder in (base, out):
        folder.mkdir()
    (base / "config.json").write_bytes(orjson.dumps(config))
    if generation is not None:
        (base / name).write_bytes(orjson.dumps(generation))
    monkeypatch.setattr(
        exporting.base, "end_token_ids",
        lambda path, tokenizer: ends if (path, tokenizer) == (str(base), "t") else None,
    )  # fmt: skip
    job = SimpleNamespace(base_folder=base, tokenizer="t")
    exporting._write_generation_config(job, out)
    assert orjson.loads((out / name).read_bytes()) == (generation if expected is None else expected)


@pytest.mark.parametrize(
    ("sample", "is_kept"),
    [({}, True), ({"top_p": 0.9}, False), ({"top_k": 5}, False), ({"min_p": 0.1}, False),
     (None, False)],
)  # fmt: skip
def test_recorded_log_probs_count_where_the_whole_distribution_was_sampled(
    sample: Any, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the newest archive, unless others are named, or of the run's own buffer."""
    asked: list[Any] = []
    row = Datum.of([1], [2], columns={"sampler_logprobs": [-1.0]})

    def read(path: Path, *more: Any) -> Any:
        asked.append((path, *more))
        if path.name == "broken":
            raise RolloutBufferError("x")
        return SimpleNamespace(groups=[], run=SimpleNamespace(name=path.name))

    monkeypatch.setattr(exporting, "_read_fitting", read)
    monkeypatch.setattr(exporting, "to_data", lambda groups: [row])
    config: Any = None
    if sample is not None:
        run: Any = SimpleNamespace(name="mine", buffer_path=tmp_path / "mine")
        given = {"top_p": 1.0, "top_k": 0, "min_p": 0.0} | sample
        config = SimpleNamespace(sample=SimpleNamespace(**given), run=run)
    for name in ("step-00000002", "step-00000010", "step-00000009"):
        (tmp_path / "run" / "buffers").mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / "buffers" / f"{name}.json.gz").touch()
    (tmp_path / "none").mkdir()
    for name in ("mine", "others", "broken"):
        (tmp_path / name).touch()

    def found(named: Path | None, run: Path | None) -> Any:
        asked.clear()
        request = SimpleNamespace(rollouts=named)
        return exporting._rollouts(request, run, config, Path("base"))

    expected = [row if is_kept else replace(row, columns={})]
    newest = tmp_path / "run" / "buffers" / "step-00000010.json.gz"
    for named, path in ((None, newest), (tmp_path / "named", tmp_path / "named")):
        assert found(named, tmp_path / "run") == expected
        assert asked == [(path, config, Path("base"))]
    assert found(None, None) == (expected if config else [])
    if config:
        assert asked == [(tmp_path / "mine", config, Path("base"))]
        for name in ("others", "broken", "gone"):
            config.run.buffer_path = tmp_path / name
            assert found(None, tmp_path / "none") == []
        with pytest.raises(RolloutBufferError):  # where they are named, it is told
            found(tmp_path / "broken", None)


@pytest.mark.parametrize(("free", "fits"), [(1050, True), (1049, False)])
def test_there_is_room_for_the_weights_and_a_twentieth(
    free: int, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return SimpleNamespace(free=free)

    monkeypatch.setattr(exporting.shutil, "disk_usage", usage)
    request = SimpleNamespace(out=tmp_path / "a" / "b")
    if fits:
        exporting._check_room(request, 1000)
    else:
        with pytest.raises(WriteError, match="free or choose another place"):
            exporting._check_room(request, 1000)
    assert asked == [tmp_path]


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "bf16"), ("float32", "f32")])
def test_the_converter_is_asked_for_the_type_of_the_export(
    dtype: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def run(command: list[Any], **options: Any) -> Any:
        asked.append(command)
        (tmp_path / f"{tmp_path.name}-{kind}.gguf").touch()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(exporting.subprocess, "run", run)
    target = exporting._convert(Path("c.py"), SimpleNamespace(out=tmp_path, dtype=dtype))
    more = ["--outfile", target, "--outtype", kind]
    assert asked == [[sys.executable, Path("c.py"), tmp_path, *more]]
    assert target == tmp_path / f"{tmp_path.name}-{kind}.gguf"


@pytest.mark.parametrize(
    ("gib", "size"), [("1", 2**30), (0.5, 2**29), ("1e-12", 1), ("999999", 999999 * 2**30)]
)
def test_a_shard_s_size_is_in_bytes(gib: Any, size: int) -> None:
    assert exporting.shard_bytes(gib) == size


@pytest.mark.parametrize("gib", ["0", "-1", "big", "nan", "1e6", "inf"])
def test_a_shard_of_no_size_is_refused(gib: str) -> None:
    with pytest.raises(ConfigError, match=f"--max-shard-gib {gib} is no size"):
        exporting.shard_bytes(gib)


@pytest.mark.parametrize(
    ("text", "licence"),
    [("---\nlicense: mit\n---\n", "mit"), ("---\r\na: b\r\nlicense: mit\r\n---\r\n", "mit"),
     ("license: mit\n", None), ("---\nlicense: [a]\n---\n", None), ("---\na: b\n---\n", None),
     ("x\n---\nlicense: mit\n---\n", None), (None, None)],
)  # fmt: skip
def test_a_licence_is_that_of_the_card_s_header(
    text: str | None, licence: str | None, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "README.md").write_bytes(text.encode())
    assert licence_of(tmp_path) == licence


@pytest.mark.parametrize(
    ("source", "is_one"),
    [("org/name", True), ("org/name:main", True), ("org/rows.JSONL", False), ("name", False),
     ("a/b/c", False), ("-org/name", False), ("tests/app", False), ("org/name.csv", False)],
)  # fmt: skip
def test_a_hub_id_is_no_file(source: str, is_one: bool, monkeypatch: Any) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert is_hub_id(source) is is_one


@pytest.mark.parametrize(
    ("merged", "is_reward", "library", "task"),
    [("float32", False, "transformers", "text-generation"),
     (None, False, "peft", "text-generation"),
     ("float32", True, "transformers", "text-classification")],
)  # fmt: skip
def test_a_card_s_header_is_what_the_hub_reads(
    merged: str | None, is_reward: bool, library: str, task: str
) -> None:
    tree = {"data": {"train": ["org/rows:main", "mine.jsonl"]}, "run": {"name": "a", "steps": 9}}
    config = Config.model_validate(tree)
    card = Card("mine", "org/base", "mit", merged, "the gap", config, None, Path("a"), is_reward)
    text = model_card.render(card)
    for line in (
        "base_model: org/base", f"library_name: {library}", f"pipeline_tag: {task}", "license: mit",
        "- reason_llm\n- grpo\n", "datasets:\n- org/rows\n", "- unknown of 9 planned steps",
        ": the gap.", "- data: org/rows:main, mine.jsonl", "names `mit`",
    ):  # fmt: skip
        assert line in text, line
    local = model_card.render(replace(card, base="./here", config=None))
    assert "base_model" not in local
    assert "datasets" not in local and "## Training" not in local


@pytest.mark.parametrize(
    ("judged_by", "shown"),
    [("accuracy", ("25.0% before training, 50.0%", "25.0% before training, 50.0% after")),
     ("mine", ("0.25 before training, 0.5 after", "0.25 before training, 0.5 after"))],
)  # fmt: skip
def test_a_card_tells_what_the_run_was_judged_by(
    judged_by: str, shown: tuple[str, str], tmp_path: Path
) -> None:
    """Only an accuracy is a percentage, also that of a named set."""
    summary = {"judged_by": judged_by, "accuracy_before": 0.25, "accuracy_after": 0.5,
               "accuracy_of_sets": {"hard": [0.25, 0.5]}, "accuracy_samples": 2,
               "held_out_loss": [1.5, 1.25], "held_out_pair_accuracy": [0.5, 0.75]}  # fmt: skip
    (tmp_path / "summary.json").write_bytes(orjson.dumps(summary))
    config = Config.model_validate({"data": {"train": "x"}})
    adapter = tmp_path / "adapter"
    text = model_card.render(Card("a", "b", None, None, None, config, tmp_path, adapter))
    assert f"Held-out {judged_by}, mean of 2 samples: {shown[0]}" in text
    assert f"- hard: {shown[1]}" in text
    assert "Held-out loss: 1.5 before training, 1.25 after." in text
    assert "Held-out pairs in order: 50.0% before training, 75.0% after." in text
    other = model_card.render(
        Card("a", "b", None, None, None, config, tmp_path, tmp_path / "adapter_best")
    )
    assert "Not evaluated" in other


def test_held_out_rows_are_of_both_sides_or_the_training_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Datum, "of_row", lambda row: row)
    monkeypatch.setattr(reward_model.base, "end_token_ids", lambda path, tokenizer: [path])
    monkeypatch.setattr(reward_model.base, "context_limit", lambda model: 77)
    held, train = (SimpleNamespace(units=[(f"{n}c", f"{n}r"), ("C", "R")]) for n in "ht")
    config: Any = SimpleNamespace(model=SimpleNamespace(path="m"))
    for rows, expected in ((held, ["hc", "C", "hr", "R"]), (None, ["tc", "C", "tr", "R"])):
        data = SimpleNamespace(held_out_rows=rows, training=[train])

        def load(*given: Any, found: Any = data, **more: Any) -> Any:
            assert (given, more) == ((config, "t", 77), {"end_token_ids": ["m"]})
            return found

        monkeypatch.setattr(reward_model, "load_data", load)
        assert reward_model.held_out_rows(config, "t") == expected
