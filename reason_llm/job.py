"""A run before it is run: everything that can be checked before a weight is read, and its locks."""

import hashlib
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
from reason_llm.errors import BusyError, ConfigError
from reason_llm.files import FileLock, check_writable, move_aside, write_atomically
from reason_llm.memory import Machine, Plan
from reason_llm.metrics import MetricsLog
from reason_llm.model import base
from reason_llm.model.shape import Shape
from reason_llm.prompts import load_prompts, resolve_system_prompt
from reason_llm.rollout import Prompt
from reason_llm.score import Scorer


@dataclass(frozen=True, slots=True)
class Job:
    """A run that was checked and has not loaded a weight yet."""

    config: Config
    folder: Path
    state: RunState
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    held_out: list[Prompt]
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
    _quiet_libraries()
    device = base.default_device()
    scorer = Scorer(config.score, config.sample.max_new_tokens)
    tokenizer = base.load_tokenizer(config.model.path)
    text_config = base.read_config(config.model.path).get_text_config(decoder=True)
    config, why = backends.choose(config, text_config, device)
    shape = Shape.of(base.check_model(config.model))
    context = base.context_limit(config.model)
    data, first = config.data, config.score.rewards[0].label
    system_prompt = resolve_system_prompt(data.system_prompt, first)
    if config.sample.max_new_tokens >= context:
        raise ConfigError(
            f"sample.max_new_tokens={config.sample.max_new_tokens} leaves no prompt room in the "
            f"context of {context} tokens; lower it"
        )
    prompts = load_prompts(
        data.train,
        data.split,
        data.columns,
        system_prompt,
        tokenizer,
        context - config.sample.max_new_tokens,
    )
    held_out = []
    if data.eval is not None:
        room = context - config.eval_max_new_tokens
        if room < 1:
            raise ConfigError(
                f"eval.max_new_tokens={config.eval_max_new_tokens} leaves no prompt room in the "
                f"context of {context} tokens; lower it"
            )
        held_out = load_prompts(
            data.eval, "test", data.columns, system_prompt, tokenizer, room, config.eval.limit
        )
    folder = config.run.directory / str(config.run.name)
    check_writable(folder)
    check_writable(config.run.buffer.parent)
    identity = config.model_dump(mode="json")
    identity["data"]["prompts_sha256"] = _digest(prompts)
    if config.run.resume == "never":
        state = checkpoint.fresh(str(config.run.name), identity)
    else:
        state = checkpoint.find(folder, str(config.run.name), identity)
        RolloutBuffer(config.run.buffer, state.run).check()
    where = f"goes on after step {state.step}" if state.folder else "begins"
    console.line(
        f"run {config.run.name} {where}: {len(prompts)} prompts, {len(held_out)} held out, model "
        f"{config.model.path}"
    )
    for line in (*why, *scorer.descriptions):
        console.line(line)
    longest = max(len(prompt.token_ids) for prompt in (*prompts, *held_out))
    plan = memory.plan(config, shape, Machine.here(config, device), context, longest)
    return Job(config, folder, state, tokenizer, prompts, held_out, scorer, plan)


def plan_only(config: Config) -> Plan:
    """The memory plan from the model's config alone: on any machine, for any budget.

    With ``memory.budget_gib`` it is for a GPU of that size with vLLM, else for this machine.
    """
    _quiet_libraries()
    device = base.default_device()
    machine = Machine.imagined(config, device)
    if config.sample.engine == "auto":
        engine = "vllm" if machine.kind == "cuda" and config.model.dtype != "float32" else None
        sample = config.sample.model_copy(update={"engine": engine or "transformers"})
        config = config.model_copy(update={"sample": sample})
    shape = Shape.of(base.meta_model(config.model))
    return memory.plan(config, shape, machine, base.context_limit(config.model))


def _digest(prompts: list[Prompt]) -> str:
    """Changes with any prompt or gold answer, so that a run is not resumed on other data."""
    content = orjson.dumps([(prompt.token_ids, prompt.answer) for prompt in prompts])
    return hashlib.sha256(content).hexdigest()[:16]


def _quiet_libraries() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
