"""A run before it is run: everything that can be checked before a weight is read, and its locks."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import transformers
from transformers import PreTrainedTokenizerBase

from reason_llm import backends, checkpoint, config_file, memory
from reason_llm.buffer import RolloutBuffer
from reason_llm.checkpoint import RunState
from reason_llm.config import Config
from reason_llm.console import Console
from reason_llm.data import Data, load_data
from reason_llm.errors import BusyError, ConfigError
from reason_llm.files import FileLock, check_writable, move_aside, write_atomically
from reason_llm.memory import Machine, Plan
from reason_llm.metrics import MetricsLog
from reason_llm.model import base
from reason_llm.model.shape import Shape
from reason_llm.score import Scorer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A run that was checked and has not loaded a weight yet."""

    config: Config
    folder: Path
    state: RunState
    tokenizer: PreTrainedTokenizerBase
    data: Data
    scorer: Scorer
    plan: Plan

    @contextmanager
    def held(self) -> Iterator[RolloutBuffer]:
        """The run's buffer, with the run and the buffer locked against other processes."""
        run, never = self.config.run, self.config.run.resume == "never"
        run_lock = FileLock(run.directory / f".{run.name}.lock", what=f"the run {self.folder}")
        with RolloutBuffer(run.buffer, self.state.run, discard=never) as buffer, run_lock:
            if not never:
                # Another process may have gone on since ``prepare`` looked.
                found = checkpoint.find(self.folder, str(run.name), self.state.run.config)
                if (found.step, found.folder) != (self.state.step, self.state.folder):
                    raise BusyError(
                        f"another process has just gone on with {self.folder}; call again"
                    )
            yield buffer

    def begin(self, started: float) -> MetricsLog:
        """Make the first changes on disk, now that everything is known to be good.

        Args:
            started: ``time.perf_counter()`` from which the first record's seconds count.
        """
        if self.config.run.resume == "never":
            move_aside(self.folder)
            move_aside(self.config.run.buffer)
        resolved = config_file.to_yaml(self.config).encode()
        write_atomically(self.folder / "resolved_config.yaml", resolved)
        return MetricsLog(self.folder, self.state.step if self.state.folder else None, started)

    def finished(self) -> dict[str, Any] | None:
        """The summary of a run that is finished where it stands; a run writes it last."""
        try:
            summary = orjson.loads((self.folder / "summary.json").read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        is_current = isinstance(summary, dict) and summary.get("steps") == self.state.step
        return summary if is_current else None


def prepare(config: Config, console: Console) -> Job:
    """Check rewards, model, data, the run's folder and its buffer, in this order; write nothing."""
    quiet_libraries()
    device = base.default_device()
    scorer = Scorer(config.score, config.sample.max_new_tokens)
    tokenizer = base.load_tokenizer(config.model.path)
    text_config = base.read_config(config.model.path).get_text_config(decoder=True)
    config, why = backends.choose(config, text_config, device)
    shape = Shape.of(base.check_model(config.model))
    context = base.context_limit(config.model)
    if config.data.form in ("demonstrations", "preferences"):
        raise ConfigError(
            f"data.form={config.data.form} can be checked with --data-check and not trained on "
            "yet; take rows of the form problems or prompts"
        )
    data = load_data(config, tokenizer, context, extra_columns=scorer.columns)
    folder = config.run.directory / str(config.run.name)
    check_writable(folder)
    check_writable(config.run.buffer.parent)
    identity = config.model_dump(mode="json")
    identity["data"]["prompts_sha256"] = _digest(data)
    if config.run.resume == "never":
        state = checkpoint.fresh(str(config.run.name), identity)
    else:
        state = checkpoint.find(folder, str(config.run.name), identity)
        RolloutBuffer(config.run.buffer, state.run).check()
    where = f"goes on after step {state.step}" if state.folder else "begins"
    console.line(
        f"run {config.run.name} {where}: {len(data.prompts)} prompts, "
        f"{len(data.held_out_prompts)} held out, model {config.model.path}"
    )
    for line in data.notes():
        console.line(line)
    if warning := data.contamination_warning():
        logger.warning("%s", warning)
    for line in (*why, *scorer.descriptions):
        console.line(line)
    longest = max(len(each.token_ids) for each in (*data.prompts, *data.held_out_prompts))
    plan = memory.plan(config, shape, Machine.here(config, device), context, longest)
    return Job(config, folder, state, tokenizer, data, scorer, plan)


def plan_only(config: Config) -> Plan:
    """The memory plan from the model's config alone: on any machine, for any budget.

    With ``memory.budget_gib`` it is for a GPU of that size with vLLM, else for this machine.
    """
    quiet_libraries()
    device = base.default_device()
    machine = Machine.imagined(config, device)
    if config.sample.engine == "auto":
        engine = "vllm" if machine.kind == "cuda" and config.model.dtype != "float32" else None
        sample = config.sample.model_copy(update={"engine": engine or "transformers"})
        config = config.model_copy(update={"sample": sample})
    shape = Shape.of(base.meta_model(config.model))
    return memory.plan(config, shape, machine, base.context_limit(config.model))


def _digest(data: Data) -> str:
    """Changes with any prompt or gold answer, so that a run is not resumed on other data."""
    content = [
        [(prompt.token_ids, prompt.answer) for prompt in each.prompts] for each in data.training
    ]
    return hashlib.sha256(orjson.dumps(content)).hexdigest()[:16]


def quiet_libraries() -> None:
    """Let no library print beside the console."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
