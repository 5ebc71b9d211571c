"""Log-probs of a frozen reference: measured once, the bits of the step, and nothing believed that
was not written."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from marks import most_are_long
from reason_llm.config import Config
from reason_llm.data import order
from reason_llm.loop import train
from reason_llm.model import Datum
from reason_llm.readers import reference
from reason_llm.run import SILENT
from reason_llm.run.rows import Rows
from reason_llm.run.start.prepare import prepare
from reason_llm.run.watch import Progress, Silent
from reason_llm.train import Learner

Make = Callable[..., Config]


class Killed(BaseException):
    """In the place of kill -9."""


class Seen(Silent):
    """Lines and phases of a run; ends it after so many calls of the phase ``reference``."""

    def __init__(self, most: int = 10**9) -> None:
        self.most, self.told, self.total = most, 0, 0

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Progress]:
        """Count the rows of the phase."""

        def progress(tokens: int, items: int) -> None:
            self.told += items
            if self.told >= self.most:
                raise Killed

        if name == "reference":
            self.total = total
        yield progress if name == "reference" else lambda tokens, items: None


@pytest.fixture
def preferences(tmp_path: Path, small_run: Make) -> Make:
    """A run of pairs of unequal lengths: two passes over ten of them, and three held out."""
    rows = [
        {"prompt": f"What is {n} + {n}?", "chosen": f"<answer>{2 * n}</answer>" * (1 + n % 3),
         "rejected": "no " * (1 + n % 4)}
        for n in range(13)
    ]  # fmt: skip
    for name, part in (("train", rows[:10]), ("held", rows[10:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)

    def make(**more: Any) -> Config:
        return small_run(
            stage="preference", algorithm={}, sample={},
            data__train=str(tmp_path / "train.jsonl"), eval__rows=str(tmp_path / "held.jsonl"),
            train__rows_per_step=5, **{"preference__name": "dpo", "run__steps": 4} | more,
        )  # fmt: skip

    return make


def adapter(config: Config) -> dict[str, torch.Tensor]:
    return load_file(
        config.run.directory / str(config.run.name) / "adapter/adapter_model.safetensors"
    )


def file_of(config: Config) -> Path:
    (found,) = (config.run.directory / str(config.run.name)).glob("reference-*")
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(role, rows) of every measurement."""
    calls: list[tuple[str, int]] = []
    original = Learner.measure

    def measure(self: Learner, data: list[Datum], role: str, *output: Any) -> Any:
        if data:
            calls.append((role, len(data)))
        return original(self, data, role, *output)

    monkeypatch.setattr(Learner, "measure", measure)
    return calls


def test_rows_are_drawn_in_the_run_s_order(preferences: Make) -> None:
    job = prepare(preferences(run__seed=3), SILENT)
    found, (data_set,) = Rows(job), job.data.training
    drawn = [data_set.rows[2 * i + side] for i in order([10], [1.0], 3, 4, 5) for side in (0, 1)]
    assert [(tuple(d.ids), d.group) for d in found.drawn(4, 5)] == [
        (row.ids, n // 2) for n, row in enumerate(drawn)
    ]
    assert [tuple(d.ids) for d in found.held_out()] == [
        row.ids for row in job.data.held_out_rows.rows
    ]


def test_the_reference_is_passed_once_for_each_row(
    preferences: Make, measured: list[tuple[str, int]]
) -> None:
    """Ten pairs in two steps, and three held out, which are judged five times."""
    seen = Seen()
    train(preferences(eval__every=1), seen)
    assert measured == [("reference", 10), ("reference", 10), ("reference", 6)]
    assert seen.told == seen.total == 26


@pytest.mark.parametrize("packing", most_are_long(["padded", "varlen"], ["varlen"]))
def test_the_adapter_is_that_of_a_run_that_measures_in_its_steps(
    preferences: Make, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    """In the first pass, to the last bit."""
    with_file = preferences(run__name="with", run__steps=2, train__packing=packing)
    train(with_file)
    monkeypatch.setattr(Rows, "measure", lambda rows, learner, record, watch, stop: None)
    without = preferences(run__name="without", run__steps=2, train__packing=packing)
    train(without)
    assert same(adapter(with_file), adapter(without))


def test_a_kill_while_it_measures_goes_on_to_the_same_bits(
    preferences: Make, monkeypatch: pytest.MonkeyPatch, measured: list[tuple[str, int]]
) -> None:
    whole, killed = preferences(run__name="whole"), preferences(run__name="killed")
    train(whole)
    monkeypatch.setattr(reference, "SAVE_SECONDS", 0.0)
    with pytest.raises(Killed):
        train(killed, Seen(most=20))  # after the first step is written and before the second
    measured.clear()
    train(killed)
    assert measured == [("reference", 10), ("reference", 6)]
    assert same(adapter(whole), adapter(killed))
    assert file_of(whole).read_bytes() == file_of(killed).read_bytes()


def test_more_steps_measure_what_is_new(preferences: Make, measured: list[tuple[str, int]]) -> None:
    train(preferences(run__name="whole", run__steps=2))
    train(preferences(run__name="part", run__steps=1))
    measured.clear()
    train(preferences(run__name="part", run__steps=2))
    assert measured == [("reference", 10)]
    assert same(adapter(preferences(run__name="whole")), adapter(preferences(run__name="part")))


@pytest.mark.parametrize("damage", most_are_long(["cut", "bit", "empty", "tensors"], ["bit"]))
def test_a_damaged_file_is_measured_again(
    preferences: Make, measured: list[tuple[str, int]], caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:  # fmt: skip
    config = preferences(run__steps=2)
    train(config)
    file = file_of(config)
    content = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        from safetensors.torch import save_file

        save_file({"logprobs": torch.zeros(3)}, file)
    measured.clear()
    train(preferences(run__steps=4))
    assert len(measured) == 3
    (line,) = [r.getMessage() for r in caplog.records if "is damaged" in r.getMessage()]
    assert file.name in line
    assert "\n" not in line


def test_a_file_beyond_its_bound_is_not_read(
    preferences: Make, caplog: pytest.LogCaptureFixture
) -> None:
    config = preferences(run__steps=2)
    train(config)
    with file_of(config).open("ab") as opened:
        opened.truncate(1 << 22)
    train(preferences(run__steps=4))
    assert "larger than" in caplog.text


def test_another_reference_has_another_file(preferences: Make, tmp_path: Path) -> None:
    """By the base's dtype, by its config, by the adapter; and the base alone is another one."""
    config = preferences()
    folder, start = tmp_path / "run", tmp_path / "start"
    start.mkdir()
    (start / "adapter_model.safetensors").write_bytes(b"a" * 9)
    (start / "adapter_config.json").write_bytes(b"{}")
    started = preferences(model__start=str(start))
    plain = reference.path_of(config, folder, start)
    assert plain == reference.path_of(preferences(train__learning_rate=0.1), folder, start)
    from_start = reference.path_of(started, folder, start)
    (start / "adapter_model.safetensors").write_bytes(b"a" * 8 + b"b")
    others = {
        plain, from_start, reference.path_of(started, folder, start),
        reference.path_of(preferences(model__dtype="bfloat16"), folder, start),
    }  # fmt: skip
    (start / "adapter_config.json").write_bytes(b'{"r": 8}')
    others.add(reference.path_of(started, folder, start))
    assert len(others) == 5


def test_losses_without_a_reference_measure_none(
    preferences: Make, measured: list[tuple[str, int]]
) -> None:
    config = preferences(run__steps=1, preference__name="orpo")
    train(config)
    assert not measured
    assert not list((config.run.directory / str(config.run.name)).glob("reference-*"))
