"""The teacher of opd, which adds the column ``teacher_logprobs`` to a step's rollouts. It is an
adapter over the base, or the base with a longer prompt; or another model, which is on the GPU only
between sampling and learning; or a vLLM server, which reads the rollouts' token ids."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError

from reason_llm.config import Config, ModelSection, TeacherSection
from reason_llm.data import Data
from reason_llm.errors import ModelError, TrainingError, one_line
from reason_llm.model import (
    Datum,
    MicroBatch,
    Model,
    adapters,
    base as model_base,
    digests,
    in_rows,
    load_tokenizer,
    offload,
    policy_logprobs,
)
from reason_llm.model.plan import Shape, Subject, naming_section
from reason_llm.readers.reader import Base, OutsideReader, Progress, Reader
from reason_llm.score import service
from reason_llm.train import (
    Learner,
    MicroBatches,
    RoleReader,
    ending_out_of_memory,
)

AT_ONCE = 16
"""Requests to a server at the same time."""
PROBED_TOKENS = 4096
"""Tokens of the vocabulary, evenly spread, whose text a server must read as the student does."""


COLUMN = "teacher_logprobs"
Prompts = Mapping[tuple[int, ...], tuple[int, ...]]
"""Token ids of the teacher's prompt by those of the student's; empty: the same prompt."""


class _Teacher(Reader):
    """A teacher, which may read another prompt than the student."""

    prompts: Prompts
    title = "the teacher reads"

    def take(self, data: Data) -> None:
        """See ``Reader``."""
        self.prompts = data.reader_prompts.get("teacher", {})

    def with_teacher_prompt(self, datum: Datum) -> Datum:
        """The row with the teacher's prompt, where it has one; raises TrainingError."""
        if not self.prompts:
            return datum
        if (prompt := self.prompts.get(datum.prompt_ids)) is None:
            raise TrainingError(
                f"{datum.name} asks what no row of data.train asks, so teacher.prompt cannot be "
                "filled in for it; set data.train to the file that the rollouts were sampled from, "
                "or leave teacher.prompt out"
            )
        return datum.with_prompt(prompt)


@dataclass(eq=False)
class TeacherRole(_Teacher):
    """An adapter over the base, or the base alone."""

    adapter: Path | None
    prompts: Prompts = field(default_factory=dict)

    def digests(self) -> Mapping[str, Any]:
        """See ``Reader``."""
        if self.adapter is None:
            return {}
        digest = digests.folder_digest(self.adapter, adapters.WEIGHTS)
        return {"teacher.adapter_sha256": digest[:16]}

    def add_roles(self, model: Model, run: Path) -> None:
        """See ``Reader``."""
        if self.adapter is not None:
            model.add_role("teacher", self.adapter)

    def column(self) -> RoleReader:
        """See ``Reader``."""
        role = "reference" if self.adapter is None else "teacher"
        return RoleReader(COLUMN, role, transform=self.with_teacher_prompt)


@dataclass(eq=False)
class TeacherModel(_Teacher, OutsideReader):
    """Another model, read from disk when it is first asked and kept in host memory."""

    section: ModelSection
    context_tokens: int | None
    prompts: Prompts = field(default_factory=dict)
    _model: Model | None = field(default=None, init=False)

    def digests(self) -> Mapping[str, Any]:
        """See ``Reader``."""
        return {"teacher.model_sha256": digests.weights_digest(self.section.path)}

    def lines(self) -> list[str]:
        """See ``Reader``."""
        path, quantize = self.section.path, self.section.quantize
        return [f"the teacher is {path}, a separate model, quantize {quantize}"]

    @torch.no_grad()
    def read(self, data: Sequence[Datum], learner: Learner, progress: Progress) -> list[Datum]:
        """The rows with the teacher's log-probs, under the temperature of sampling; raises
        ModelError and OutOfMemory."""
        # Loaded at its first step and kept in host memory: the GPU belongs to one phase at a time.
        if (model := self._model) is None:
            with ending_out_of_memory("loading the teacher"):
                model = self._model = Model(self.section, learner.model.tokenizer, seed=0)
            model.policy.eval()
            offload.to_host(model.policy)
        teacher_rows = [self.with_teacher_prompt(row) for row in data]
        settings = learner.settings
        name = f"the teacher {self.section.path}"

        def measure(batches: list[list[int]]) -> list[torch.Tensor]:
            trained_logprobs = []
            for indices in batches:
                of_batch = [replace(teacher_rows[i], columns={}) for i in indices]
                rows = MicroBatch.of(of_batch, model.device, is_packed=False)
                logprobs_BT, _ = policy_logprobs(
                    model,
                    rows.ids_BT,
                    rows.mask_BT,
                    settings.temperature,
                    chunk_tokens=settings.chunk_tokens,
                    places_M=rows.places_M,
                )
                trained_logprobs.append(logprobs_BT.flatten()[rows.places_M])
                progress(len(indices))
            return in_rows(
                teacher_rows, [i for indices in batches for i in indices], trained_logprobs
            )

        with (
            offload.on_device(model.policy, model.device, name),
            model.fused_adapters(),
            model.using("reference"),
        ):
            columns = MicroBatches(learner.micro_batches.tokens).run(teacher_rows, measure)
        return [
            datum.with_trained(COLUMN, logprobs)
            for datum, logprobs in zip(data, columns, strict=True)
        ]


class _Logprob(BaseModel):
    logprob: float


class _TeacherChoice(BaseModel):
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _TeacherAnswer(BaseModel):
    choices: Annotated[list[_TeacherChoice], Field(min_length=1)]


class _Tokens(BaseModel):
    tokens: list[int]


@dataclass(eq=False)
class TeacherService(_Teacher, OutsideReader):
    """A teacher behind a URL, asked for the log-prob of each sampled token as one of a prompt."""

    section: TeacherSection
    server: service.Service
    prompts: Prompts = field(default_factory=dict)

    def lines(self) -> list[str]:
        """See ``Reader``."""
        return [f"the teacher is {self.section.model} at {self.section.url}"]

    def read(self, data: Sequence[Datum], learner: Learner, progress: Progress) -> list[Datum]:
        """See ``TeacherModel.read``; at temperature 1. Raises TrainingError: the server returns no
        log-probs."""
        teacher_rows = [self.with_teacher_prompt(row) for row in data]
        rows = list[Datum]()
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            for datum, logprobs in zip(data, pool.map(self._logprobs, teacher_rows), strict=True):
                rows.append(datum.with_trained(COLUMN, logprobs))
                progress(1)
        except (ValueError, ConnectionError, TimeoutError) as error:
            raise TrainingError(
                f"teacher.url: {one_line(error)}; set it to a vLLM server of teacher.model="
                f"{self.section.model}, and call the same command again: what was sampled is kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
        return rows

    def _logprobs(self, row: Datum) -> torch.Tensor:
        """Log-probs of the row's trained tokens."""
        body = {
            "model": self.section.model,
            "prompt": row.ids.tolist(),
            "max_tokens": 1,
            "prompt_logprobs": 0,
        }
        answer = self.server.ask(body, (64 + row.num_tokens) << 10)
        try:
            prompt_logprobs = _TeacherAnswer.model_validate_json(answer).choices[0].prompt_logprobs
            pairs = zip(prompt_logprobs, row.ids.tolist(), row.trained, strict=True)
            logprobs = [(at or {})[id].logprob for at, id, is_trained in pairs if is_trained]
        except (ValidationError, ValueError, KeyError) as error:
            raise ValueError(
                f"its answer has no prompt_logprobs of the {row.num_tokens} tokens of {row.name}"
            ) from error
        if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in logprobs):
            raise ValueError(f"its answer has a value that is not a log-prob, for {row.name}")
        return torch.tensor(logprobs)


def opened(config: Config, subject: Subject, base: Base) -> Sequence[Reader]:
    """The teacher of an algorithm that has one; raises ModelError."""
    section = config.teacher
    if config.stage != "rl" or not config.algorithm.row().teacher:
        return ()
    if section.url is not None:
        check_service(section.url, section, subject.tokenizer)
        url = f"{section.url}/completions"
        server = service.Service("the teacher", url, section, TrainingError)
        return (TeacherService(section, server),)
    if (other := config.reader_models.get("teacher")) is not None:
        return (_checked(other, subject),)
    if section.adapter is not None:
        adapters.check_over(subject.policy, section.adapter, config.model.path)
    return (TeacherRole(section.adapter),)


def _checked(section: ModelSection, subject: Subject) -> TeacherModel:
    """A teacher that is another model; its weights unread. Raises ModelError: its files cannot be
    used, or it has another tokenizer or fewer token ids."""
    student = subject.config.model.path
    with naming_section("teacher"):
        tokenizer, policy = load_tokenizer(section.path), model_base.check_model(section)
        context = model_base.context_limit(section)
    if tokenizer.get_vocab() != subject.tokenizer.get_vocab():
        raise ModelError(
            f"teacher.model={section.path} has another tokenizer than model.path={student}, so it "
            "cannot read the same token ids; name a model of the same family"
        )
    if (vocabulary := Shape.of(policy).vocabulary) < subject.vocabulary:
        raise ModelError(
            f"teacher.model={section.path} has {vocabulary} token ids and model.path={student} may "
            f"write {subject.vocabulary}; name another teacher"
        )
    return TeacherModel(section, context)


def check_service(url: str, section: TeacherSection, tokenizer: Any) -> None:
    """Check that a teacher behind a URL has the student's tokenizer; raises ModelError if not."""
    step = max(1, len(tokenizer) // PROBED_TOKENS)
    text = " ".join(tokenizer.decode([id]) for id in range(0, len(tokenizer), step))
    body = {"model": section.model, "prompt": text, "add_special_tokens": False}
    url = url.removesuffix("/v1") + "/tokenize"
    server = service.Service("the teacher", url, section, TrainingError)
    try:
        answer = server.ask(body, 1 << 20)
        tokens = _Tokens.model_validate_json(answer).tokens
    except (ValueError, ConnectionError, TimeoutError) as error:
        raise ModelError(
            f"teacher.url: it does not answer on /tokenize ({one_line(error)[:300]}); start vLLM's "
            "server there"
        ) from error
    is_same = tokens == tokenizer.encode(text, add_special_tokens=False)
    if not is_same:
        raise ModelError(
            f"teacher.url={section.url}: {section.model} has another tokenizer than the model that "
            "learns, so it cannot read the same token ids; serve a model of the same family"
        )
