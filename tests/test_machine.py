"""Budget and measurement on a card that a desktop uses, too; a stand-in is its driver."""

from types import SimpleNamespace

import pytest
import torch

from reason_llm.config import Config, DataSection
from reason_llm.model.plan.machine import GIB, Machine, others_bytes
from reason_llm.model.plan.meter import Meter

GPU = "cuda"
TOTAL = 24 * GIB


class Driver:
    """A card of 24 GiB: what others hold, what torch holds here, and a context of 0.65 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others_gib: float) -> None:
        self.others, self.own = int(others_gib * GIB), 0
        cuda = torch.cuda
        properties = SimpleNamespace(total_memory=TOTAL, name="a card")
        monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(cuda, "mem_get_info", lambda device=None: (self.free, TOTAL))
        monkeypatch.setattr(cuda, "memory_reserved", lambda device=None: self.own)
        monkeypatch.setattr(cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda, "empty_cache", lambda: None)

    @property
    def free(self) -> int:
        return TOTAL - self.others - self.own - int(0.65 * GIB)


def config(budget_gib: float | None = None) -> Config:
    made = Config(data=DataSection(train="nowhere.jsonl"))
    if budget_gib is None:
        return made
    section = made.memory.model_copy(update={"budget_gib": budget_gib})
    return made.model_copy(update={"memory": section})


@pytest.mark.parametrize(
    ("others_gib", "left_gib"), [(0.0, 24.0), (0.9, 23.0), (1.0, 23.0), (1.1, 22.75), (6.0, 18.0)]
)
def test_auto_is_what_other_programs_leave(
    others_gib: float, left_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    Driver(monkeypatch, others_gib)
    assert Machine.here(config(), GPU).budget_bytes == left_gib * GIB
    assert Machine.imagined(config(), GPU).budget_bytes == left_gib * GIB


def test_what_this_process_holds_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    Driver(monkeypatch, 1.0).own = 5 * GIB
    assert Machine.here(config(), GPU).budget_bytes == 23 * GIB


def test_a_budget_is_taken_as_it_is_and_no_larger_than_the_card(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Driver(monkeypatch, 6.0)
    assert Machine.here(config(20.0), GPU).budget_bytes == 20 * GIB
    assert Machine.here(config(80.0), GPU).budget_bytes == TOTAL


def test_the_meter_leaves_out_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(monkeypatch, 2.0)
    meter = Meter(torch.device(GPU))
    driver.own = 10 * GIB
    with meter.phase() as peak:
        pass
    assert peak.gib == pytest.approx(10.65)  # with the context, which the plan counts, too


def test_a_cpu_has_no_others() -> None:
    assert others_bytes("cpu") == 0
    here = Machine.here(config(), "cpu")
    assert here.budget_bytes == here.host_bytes
