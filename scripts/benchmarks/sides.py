"""Systems that take turns, each in a separate process, and their results.

A system takes one step when it receives a message, and answers with what it measured. One that
fails, dies or takes too long keeps the steps that it measured, and its error is a cell of the
table, never an end.
"""

import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import device
from benchmarks.work import Work
from reason_llm.files import MIB, read_text

SYSTEMS = {
    "reason_llm": "reason_llm",
    "reason_llm_unsloth": "reason_llm over Unsloth",
    "vllm": "vLLM alone",
    "vllm_lora": "vLLM alone, LoRA",
    "trl": "TRL",
    "unsloth": "Unsloth",
}
"""What can be measured, and its name in the table."""
ALONE_FIRST = ("unsloth", "reason_llm_unsloth")
"""Those that measure the GPU's free memory as they load, and so load before the others."""
PEERS = ("trl", "unsloth")
"""Not ours, and with vLLM of no use without a GPU."""
SPAWN = multiprocessing.get_context("spawn")
MAX_CLOSING_SECONDS = 30
MAX_TRACE_CHARACTERS = 20_000
"""Of the end of a process's own words, where it failed."""


@dataclass(slots=True)
class Outcome:
    """Result of one system."""

    warm_up: dict[str, float] = field(default_factory=dict)
    """What the first step measured, if it is not to count."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """What each other one measured."""
    largest_gib: float = 0.0
    """The most memory in use: of the GPU; without one, of the process."""
    before_gib: float = 0.0
    """The same with the libraries imported and nothing loaded."""
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    """Why there is nothing more, in one line."""
    trace: str = ""
    """The whole error, as its process printed it."""

    def values(self, measure: str) -> list[float]:
        """One measure of every step that has it."""
        return [step[measure] for step in self.steps if measure in step]

    def take(self, answer: dict[str, Any], is_counted: bool) -> None:
        """Add a step's answer, or the error in its place."""
        memory = answer.pop("memory")
        self.largest_gib, self.before_gib = memory["largest_gib"], memory["before_gib"]
        self.notes = answer.pop("notes", self.notes)
        if "error" in answer:
            self.error, self.trace = answer["error"], answer["trace"]
        elif is_counted:
            self.steps.append(answer)
        else:
            self.warm_up = answer


class Turns:
    """A system's end of the conversation."""

    def __init__(self, connection: Connection, largest_bytes: Callable[[], int]) -> None:
        self._connection = connection
        self._largest_bytes = largest_bytes
        self._before = device.process_bytes() or device.used_bytes()
        self._is_loaded = False
        self.notes: list[str] = []

    def wait(self) -> None:
        """Until it is this side's turn; the first call says that everything is loaded."""
        if not self._is_loaded:
            self._is_loaded = True
            self._connection.send({})
        try:
            self._connection.recv()
        except EOFError:  # the other end is gone
            raise SystemExit(0) from None

    def answer(self, values: Mapping[str, Any]) -> None:
        """The turn is over."""
        largest, before = self._largest_bytes() / device.GIB, self._before / device.GIB
        memory = {"largest_gib": largest, "before_gib": before}
        self._connection.send({**values, "memory": memory, "notes": self.notes})


def run(system: str, work: Work, connection: Connection, log: Path) -> None:
    """Be that system's process; what its libraries print goes to ``log``."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, as ours is
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if importlib.util.find_spec("flashinfer") is None:  # vLLM 0.32 would import its sampler
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if work.engine == "transformers":
        sys.modules["vllm"] = None  # type: ignore[assignment] # TRL would import it
    if system == "unsloth":
        _import_unsloth(log.parent)
    from benchmarks import bare, ours, peers  # heavy

    systems: dict[str, Callable[[Work, Turns], None]] = {
        "reason_llm": ours.measure,
        "reason_llm_unsloth": partial(ours.measure, backend="unsloth"),
        "vllm": bare.measure,
        "vllm_lora": partial(bare.measure, lora=True),
        "trl": peers.measure_trl,
        "unsloth": peers.measure_unsloth,
    }
    with device.watch() as largest_bytes:
        turns = Turns(connection, largest_bytes)
        try:
            if system in PEERS and work.engine == "vllm" and not device.has_gpu():
                raise RuntimeError("needs a CUDA GPU, and this machine has none")
            systems[system](work, turns)
        except Exception as error:  # noqa: BLE001 - a system that fails is a cell of the table
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            turns.answer({"error": message, "trace": traceback.format_exc()})


def _import_unsloth(folder: Path) -> None:
    """Before all that it patches, and before CUDA begins; the environment is read at import."""
    os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
    os.environ["UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"] = "1"  # it would take the whole card
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(folder / "compiled")
    with suppress(ImportError):  # the error of its first step reports it
        import unsloth  # noqa: F401


class Side:
    """A system's process, from outside."""

    def __init__(self, system: str, work: Work, log: Path, max_seconds: float) -> None:
        self.outcome = Outcome()
        self._work = work
        self._log = log
        self._max_seconds = max_seconds
        self._taken = 0.0
        self._connection, other_end = SPAWN.Pipe()
        self._process = SPAWN.Process(target=run, args=(system, work, other_end, log))
        self._process.start()
        other_end.close()

    def load(self) -> None:
        """Wait until it has loaded everything."""
        if (answer := self._answer()) is not None and "error" in answer:
            self.outcome.take(answer, False)

    def step(self, number: int) -> None:
        """Give it its turn and wait for the end of it; one that failed has no more turns."""
        if self.outcome.error is not None:
            return
        with suppress(BrokenPipeError):  # it died: then it has no answer
            self._connection.send("go")
        if (answer := self._answer()) is not None:
            self.outcome.take(answer, number > 0 or not self._work.warmup)

    def _answer(self) -> dict[str, Any] | None:
        """Return its next answer; None if it died or took too long, which is then its error."""
        started = time.perf_counter()
        try:
            if self._connection.poll(self._max_seconds - self._taken):
                answer: dict[str, Any] = self._connection.recv()
                return answer
            self.outcome.error = f"took more than {self._max_seconds:g} s"
            self._process.kill()
        except (EOFError, ConnectionResetError):
            self._process.join()
            trace = read_text(self._log, 64 * MIB)[-MAX_TRACE_CHARACTERS:]
            last = (trace.strip().splitlines() or ["it said nothing"])[-1].strip()[:300]
            self.outcome.error = f"ended with {self._process.exitcode}: {last}"
            self.outcome.trace = trace
        finally:
            self._taken += time.perf_counter() - started
        return None

    def close(self) -> None:
        """End it, if it has not ended: it reads that nobody is there any more."""
        self._connection.close()
        self._process.join(MAX_CLOSING_SECONDS)
        self._process.kill()
        self._process.join()


def take_turns(
    work_by_side: Mapping[str, tuple[str, Work]],
    max_seconds: float,
    keep: Callable[[dict[str, Outcome]], None] = lambda outcomes: None,
    threads: int | None = None,
) -> dict[str, Outcome]:
    """Run systems at their work, a step each in turn, so that other load falls on all of them.

    They load at the same time, but for those of ``ALONE_FIRST``.

    Args:
        work_by_side: system and work by name of a side; all have as many steps.
        max_seconds: for all the turns of one side, its loading with the first.
        keep: is called after every turn.
        threads: of each process; None: as they are.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    os.environ |= {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with TemporaryDirectory() as folder, ExitStack() as stack:
        sides: dict[str, Side] = {}
        # One that measures free memory would count what the others are just loading.
        alone_first = sorted(work_by_side.items(), key=lambda item: item[1][0] not in ALONE_FIRST)
        for name, (system, work) in alone_first:
            sides[name] = Side(system, work, Path(folder) / f"{name}.txt", max_seconds)
            stack.callback(sides[name].close)
            if system in ALONE_FIRST:
                sides[name].load()
        for name, (system, _) in work_by_side.items():
            if system not in ALONE_FIRST:
                sides[name].load()
        sides = {name: sides[name] for name in work_by_side}
        outcomes = {name: side.outcome for name, side in sides.items()}
        keep(outcomes)
        for number in range(max(work.steps for _, work in work_by_side.values())):
            for side in sides.values():
                side.step(number)
                keep(outcomes)
    return outcomes
