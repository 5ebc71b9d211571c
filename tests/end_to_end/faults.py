"""The fault matrix as data, the runs that suffer it, and what must be the same afterwards."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
import yaml

from conftest import ROOT, TINY
from reason_llm import checkpoint, metrics
from reason_llm.archive import read_index
from reason_llm.buffer import read_document
from reason_llm.rollout import Group
from reason_llm.run_folder import read_config

TRAIN = ROOT / "scripts" / "train.py"
FAULTY_TRAIN = Path(__file__).with_name("faulty_train.py")
SECONDS = 120.0
"""The longest that a run may take."""


@dataclass(frozen=True)
class Fault:
    """One way for a run to end before its time.

    ``places``, ``call``, ``kind`` and ``target`` are those of ``faulty_train``; ``{folder}`` in
    them is the run's. Without ``places`` it comes from outside: a signal ``after_seconds``, or a
    disk that is so from the start.
    """

    phase: str
    kind: str
    places: tuple[str, ...] = ()
    call: int = 1
    target: str = ""
    exits: tuple[int, ...] = ()
    """Exit codes that it may have; empty: by its kind."""
    run: str = "plain"
    """Which of ``RUNS`` suffers it."""
    environment: dict[str, str] = field(default_factory=dict)
    damage: str = ""
    """Done to its files afterwards, one of ``DAMAGES``."""
    may_lose: int = 0
    """Prompts whose sampling had ended and whose rollouts were not on disk."""
    sets_aside: tuple[str, ...] = ()
    """Files that are kept under another name, since what they stood on is gone."""
    after_seconds: float = 0.0
    is_fresh: bool = False
    """In a process that imports everything itself."""

    @property
    def name(self) -> str:
        place = " or ".join(place.rpartition(":")[2] for place in self.places)
        if self.after_seconds:
            place = f"{self.after_seconds:.2f} s"
        number = f" #{self.call}" if self.places else ""
        damage = f" then {self.damage}" if self.damage else ""
        return f"{self.phase}: {self.kind} at {place}{number}{damage} ({self.run})"


EXITS = {
    "SIGKILL": (-signal.SIGKILL,),
    "torn write": (-signal.SIGKILL,),
    "SIGTERM": (128 + signal.SIGTERM,),
    "SIGTERM twice": (128 + signal.SIGTERM,),
    "SIGINT": (128 + signal.SIGINT,),
    "SIGINT twice": (128 + signal.SIGINT,),
    "SIGINT to the group": (128 + signal.SIGINT,),
    "RuntimeError": (1,),
    "MemoryError": (1,),
    "torch.OutOfMemoryError": (1,),
    "clock set back": (0,),
}
SAVES = ("SIGTERM", "SIGINT", "SIGINT to the group")
"""What a run is told once: it then finishes what is under way, and loses nothing at all."""


# --- the runs ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A small run with every phase."""

    options: dict[str, Any]
    wave: int
    """Prompts in it."""
    updates_per_checkpoint: int
    """Optimizer steps; a run that saves every step saves between its optimizer steps, too."""


def _tree(folder: Path) -> dict[str, Any]:
    return {
        "run": {"directory": str(folder / "runs"), "buffer": str(folder / "data" / "buffer.json"),
                "steps": 2, "name": "run", "seed": 3},
        "model": {"path": str(TINY), "dtype": "float32", "adapter": {"rank": 8, "dropout": 0.1}},
        "data": {"train": "{shared}/sums.jsonl", "system_prompt": "none",
                 "eval": "{shared}/held_out.jsonl"},
        "sample": {"prompts_per_step": 3, "completions_per_prompt": 4, "prompts_per_wave": 1,
                   "max_new_tokens": 32},
        "score": {"rewards": [{"name": "think_answer_tags"}, {"name": "tag_count", "weight": 0.1}]},
        "algorithm": {"name": "grpo"},
        "train": {"learning_rate": 1e-3, "optimizer_steps": 2, "micro_batch_tokens": 128,
                  "gradient_checkpointing": False},
        "eval": {"every": 1, "limit": 8},
        "log": {"console": "plain"},
    }  # fmt: skip


REWARD = """
from pathlib import Path

def odd(completion, answer):
    if Path(__file__).with_name("broken").exists():
        raise RuntimeError("the reward's service is down")
    if len(completion) % 3 == 0:
        raise ValueError("it has no answer to this one")
    return len(completion) % 2
"""

RUNS = {
    # Two optimizer steps a step, with dropout, a KL and an evaluation.
    "plain": Run({}, wave=1, updates_per_checkpoint=1),
    # Comparisons by worker processes, a reward of the user's that fails now and then, 8-bit Adam,
    # and checkpoints so rare that rollouts must come back from the archive.
    "rare": Run(
        {
            "run": {"steps": 4, "save_every": 3, "keep_buffers_gib": 1e-6},
            "data": {"train": "{shared}/latex.jsonl", "eval": "{shared}/latex.jsonl"},
            "sample": {"prompts_per_step": 4, "prompts_per_wave": 2},
            "eval": {"every": 2},
            "score": {"on_error": "zero",
                      "rewards": [{"name": "think_answer_tags"},
                                  {"custom": "{folder}/reward.py:odd", "weight": 0.5}]},
            "train": {"optimizer": "adamw_8bit", "optimizer_steps": 1},
        },
        wave=2, updates_per_checkpoint=3,
    ),
    # As many waves as it takes to fill a step with groups that have a signal.
    "dynamic": Run(
        {
            "algorithm": {"name": "dapo", "dynamic_sampling": 4},
            "sample": {"prompts_per_step": 4, "prompts_per_wave": 2},
            "score": {"rewards": [{"name": "think_answer_tags"}]},
        },
        wave=2, updates_per_checkpoint=1,
    ),
    # A user's reward that stops the run when it fails.
    "strict": Run(
        {
            "score": {"rewards": [{"custom": "{folder}/strict.py:odd"}]},
        },
        wave=1, updates_per_checkpoint=1,
    ),
}  # fmt: skip


def write_config(folder: Path, run: str) -> Path:
    """The config of one of ``RUNS``, and the files that it names."""
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    (folder / "strict.py").write_text(REWARD.replace("% 3 == 0", "< 0"))
    for name, answer, numbers in (
        ("sums", "{0}", range(20, 80)),
        ("held_out", "{0}", range(80, 88)),
        ("latex", "\\frac{{{1}}}{{2}}", range(30, 80)),
    ):
        rows = [{"question": f"What is {a} + 7?", "answer": answer.format(a + 7, 2 * a + 14)}
                for a in numbers]  # fmt: skip
        lines = [orjson.dumps(row) + b"\n" for row in rows]
        (folder.parent / f"{name}.jsonl").write_bytes(b"".join(lines))
    tree = _tree(folder)
    for section, options in RUNS[run].options.items():
        tree[section] |= options
    path = folder / "config.yaml"
    path.write_text(
        yaml.safe_dump(tree)
        .replace("{folder}", str(folder))
        .replace("{shared}", str(folder.parent))
    )
    return path


# --- running them -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: int
    printed: str
    sampled: list[str]
    """Ids of the prompts whose sampling ended."""
    updates: int
    struck: bool
    left: list[str]
    """Processes of its that outlived it."""
    seconds: float


class Trainer:
    """``with Trainer() as trainer``: scripts/train.py as often as needed, imported once."""

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, str(FAULTY_TRAIN)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.communicate()

    def run(self, folder: Path, fault: Fault | None = None, *arguments: str) -> Ended:
        """The run whose config is in ``folder``, to its end or to the fault's."""
        number = len(list(folder.glob("log-*")))
        log, trace = folder / f"log-{number}", folder / f"trace-{number}"
        log.touch()
        trace.touch()
        fault = fault or Fault("", "")
        is_inside = bool(fault.places)
        request = {
            "arguments": [str(folder / "config.yaml"), *arguments],
            "log": str(log),
            "trace": str(trace),
            "environment": {n: v.format(folder=folder) for n, v in fault.environment.items()},
            "places": list(fault.places),
            "call": fault.call,
            "kind": fault.kind if is_inside else "",
            "target": fault.target.format(folder=folder),
        }
        started = time.perf_counter()
        if fault.is_fresh:
            command = [str(FAULTY_TRAIN), orjson.dumps(request).decode()]
            if fault.after_seconds:  # while it imports: nothing of ours may stand before that
                command = [str(TRAIN), *request["arguments"]]
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    cwd=ROOT,
                    process_group=0,
                    stdout=output,
                    stderr=output,
                )
            _strike_from_outside(fault, process.pid)
            status, left = process.wait(SECONDS), []
        else:
            assert self._server.stdin is not None
            self._server.stdin.write(orjson.dumps(request) + b"\n")
            self._server.stdin.flush()
            _strike_from_outside(fault, self._answer()["pid"])
            ended = self._answer()
            status, left = ended["status"], ended["left"]
        done = trace.read_text().splitlines()
        return Ended(
            status,
            log.read_text(),
            [i for line in done if line.startswith("sampled ") for i in line.split()[1:]],
            done.count("updated"),
            "struck" in done,
            left,
            time.perf_counter() - started,
        )

    def _answer(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        answer: dict[str, Any] = orjson.loads(self._server.stdout.readline())
        return answer


def _strike_from_outside(fault: Fault, pid: int) -> None:
    if not fault.after_seconds:
        return
    time.sleep(fault.after_seconds)
    kind = fault.kind.removesuffix(" to the group")
    try:
        if kind == fault.kind:
            os.kill(pid, signal.Signals[kind])
        else:
            os.killpg(pid, signal.Signals[kind])
    except ProcessLookupError:
        pass  # it had ended


# --- what must be the same --------------------------------------------------------------------


def rollouts(folder: Path) -> dict[str, object]:
    """What was sampled, by prompt, of all that is on disk."""
    run, buffer = folder / "runs" / "run", folder / "data" / "buffer.json"
    files = sorted((run / "buffers").glob("step-*.json.gz")) + [buffer] * buffer.exists()
    groups = [group for file in files for group in read_document(file).groups]
    return {group.prompt.id: [(c.token_ids, c.logprobs) for c in group.completions]
            for group in groups}  # fmt: skip


def outcome(folder: Path) -> dict[str, object]:
    """Everything that must not depend on interruptions."""
    run = folder / "runs" / "run"
    checkpoints = sorted(path.name for path in (run / "checkpoints").iterdir())
    newest = run / "checkpoints" / checkpoints[-1]
    state = orjson.loads((newest / "state.json").read_bytes())
    buffer = read_document(folder / "data" / "buffer.json")
    return {
        "adapter": (run / "adapter" / "adapter_model.safetensors").read_bytes(),
        "adapter in the checkpoint": (newest / "adapter_model.safetensors").read_bytes(),
        "optimizer": (newest / "optimizer.safetensors").read_bytes(),
        "checkpoints": checkpoints,
        "state": {name: state[name] for name in ("step", "drawn", "micro_batch_tokens")},
        "metrics": [_timeless(record) for record in metrics.read(run / "metrics.jsonl")],
        "curves": (run / "curves.png").read_bytes(),
        "summary": {
            name: value
            for name, value in orjson.loads((run / "summary.json").read_bytes()).items()
            if not name.endswith(("_seconds", "_mib", "_gib", "adapter"))
        },
        "buffer": (buffer.step, buffer.trained, buffer.complete, buffer.drawn),
        "rollouts": buffer.groups,
        "archive": _archived(run),
        "beside": sorted(
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if ".writing" in path.name or ".old-" in path.name
        ),
    }


def _archived(run: Path) -> dict[str, list[Group]]:
    """The archive, which its index must tell of truly. Under a bound, what must be there: a signal
    may have left a checkpoint of its own, since which more is kept or less."""
    folder, oldest = run / "buffers", 0
    if read_config(run).run.keep_buffers_gib < 1:
        oldest = checkpoint.needed_from(run)
    index = read_index(folder)
    files = sorted(folder.glob("step-*.json.gz"))
    assert [entry.file for entry in index] == [file.name for file in files]
    assert len((folder / "index.jsonl").read_bytes().splitlines()) == len(index)
    documents = {file.name: read_document(file) for file in files}
    return {name: each.groups for name, each in documents.items() if each.step >= oldest}


def _timeless(record: metrics.Record) -> metrics.Record:
    measured = ("time/", "memory/", "sample/tokens_per_second")
    return {key: value for key, value in record.items() if not key.startswith(measured)}


def differences(found: dict[str, object], expected: dict[str, object]) -> list[str]:
    """Where two outcomes differ, shortly."""
    lines = []
    for name in expected:
        if found[name] == expected[name]:
            continue
        if name == "metrics":
            mine, theirs = found[name], expected[name]
            assert isinstance(mine, list)
            assert isinstance(theirs, list)
            lines.append(f"metrics of steps {[r['step'] for r in mine]}")
            for one, other in zip(mine, theirs, strict=False):
                keys = [key for key in one | other if one.get(key) != other.get(key)]
                lines += [f"  step {one['step']} {k}: {one.get(k)} {other.get(k)}" for k in keys]
        elif isinstance(expected[name], bytes):
            lines.append(f"{name} is not the same")
        else:
            lines.append(f"{name}: {str(found[name])[:300]} instead of {str(expected[name])[:300]}")
    return lines


# --- damage to files, while no process is there -----------------------------------------------


def newest(folder: Path) -> Path:
    return sorted((folder / "runs" / "run" / "checkpoints").glob("step-*"))[-1]


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def _future(folder: Path) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (4e9, 4e9))


DAMAGES = {
    "the newest adapter is cut short": lambda f: _cut(newest(f) / "adapter_model.safetensors"),
    "a bit of the newest optimizer flips": lambda f: _flip(newest(f) / "optimizer.safetensors"),
    "the newest state is cut short": lambda f: _cut(newest(f) / "state.json"),
    "the newest adapter is gone": lambda f: (newest(f) / "adapter_model.safetensors").unlink(),
    "the last metrics are torn": lambda f: _append(f / "runs/run/metrics.jsonl", b'{"step": 1, "s'),
    "the archive's index is torn": lambda f: _cut(f / "runs/run/buffers/index.jsonl"),
    "the newest archived buffer is torn": lambda f: _cut(
        sorted((f / "runs/run/buffers").glob("*.gz"))[-1]
    ),
    "all files are of the future": _future,
    "the disk is freed": lambda f: [p.unlink() for p in f.rglob("filler")],
    "the reward is mended": lambda f: (f / "broken").unlink(),
}


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """``folder`` on a disk of its own, in memory.

    Raises:
        PermissionError: only root may.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)],
        capture_output=True, text=True,
    )  # fmt: skip
    if made.returncode:
        raise PermissionError(made.stderr.strip())
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def remount(how: str, folder: Path) -> None:
    """Make a small disk read-only, ``ro``, or writable, ``rw``."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def done_twice(ends: Sequence[Ended]) -> list[str]:
    """Prompts that were sampled to their end in one process and again in a later one."""
    found: list[str] = []
    for index, ended in enumerate(ends):
        later = {prompt for other in ends[index + 1 :] for prompt in other.sampled}
        found += [prompt for prompt in ended.sampled if prompt in later]
    return found
