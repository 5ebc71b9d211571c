"""A teacher that is a model of its own: it gives a step's rollouts their column
``teacher_logprobs`` between sampling and learning. One that is loaded here is on the GPU in that
phase alone; one behind a URL is a vLLM server, which reads the rollouts' token ids."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError

from reason_llm.config import Config, ModelSection, TeacherSection
from reason_llm.errors import ModelError, TrainingError, one_line
from reason_llm.model import Datum, Model, collate, load_tokenizer, offload, policy_logprobs
from reason_llm.score import service
from reason_llm.train import Learner, MicroBatches, ending_out_of_memory

AT_ONCE = 16
"""Requests to a server at the same time."""
PROBED_TOKENS = 4096
"""Tokens of the vocabulary, evenly spread, whose text a server must read as the student does."""


class Teacher:
    """The teacher, read from disk when it is first asked and kept in host memory."""

    def __init__(self, section: ModelSection) -> None:
        self._section = section
        self._model: Model | None = None

    @torch.no_grad()
    def read(
        self, data: Sequence[Datum], learner: Learner, progress: Callable[[int], None]
    ) -> list[Datum]:
        """The rows with the teacher's log-probs, under the temperature of sampling; raises
        ModelError and OutOfMemory."""
        if (model := self._model) is None:
            with ending_out_of_memory("loading the teacher"):
                model = self._model = Model(self._section, learner.model.tokenizer, seed=0)
            model.policy.eval()
            offload.to_host(model.policy)
        asked = [learner.as_told_to_the_teacher(row) for row in data]
        settings = learner.settings
        tokens = learner.micro_batches.tokens
        found: list[torch.Tensor] = [torch.empty(0)] * len(data)
        told = f"the teacher {self._section.path}"
        with (
            offload.on_device(model.policy, model.device, told),
            model.fused_adapters(),
            model.using("reference"),
        ):
            for attempt in MicroBatches(tokens).attempts(asked):
                with attempt as batches:
                    for indices in batches:
                        ids_BT, mask_BT = collate([asked[i] for i in indices], model.device)
                        logprobs_BT, _ = policy_logprobs(
                            model, ids_BT, mask_BT, settings.temperature,
                            chunk_tokens=settings.chunk_tokens,
                        )  # fmt: skip
                        for row, i in enumerate(indices):
                            found[i] = logprobs_BT[row][mask_BT[row]].cpu()
                        progress(len(indices))
        return [
            datum.with_trained("teacher_logprobs", logprobs)
            for datum, logprobs in zip(data, found, strict=True)
        ]


class _Logprob(BaseModel):
    logprob: float


class _Choice(BaseModel):
    prompt_logprobs: list[dict[int, _Logprob] | None]


class _Completion(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


class _Tokens(BaseModel):
    tokens: list[int]


class TeacherService:
    """A teacher behind a URL, asked for the log-prob of each sampled token as one of a prompt."""

    def __init__(self, section: TeacherSection) -> None:
        self._model = section.model
        self._service = service.Service(
            "the teacher", f"{section.url}/completions", section, TrainingError
        )

    def read(
        self, data: Sequence[Datum], learner: Learner, progress: Callable[[int], None]
    ) -> list[Datum]:
        """As ``Teacher.read``, at temperature 1; raises TrainingError where the server does not
        give them."""
        asked, found = [learner.as_told_to_the_teacher(row) for row in data], list[Datum]()
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            for datum, logprobs in zip(data, pool.map(self._logprobs, asked), strict=True):
                found.append(datum.with_trained("teacher_logprobs", logprobs))
                progress(1)
        except (ValueError, ConnectionError, TimeoutError) as error:
            raise TrainingError(
                f"teacher.url: {one_line(error)}; set it to a vLLM server of teacher.model="
                f"{self._model}, and call the same command again: what was sampled is kept"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
        return found

    def _logprobs(self, row: Datum) -> torch.Tensor:
        """Log-probs of the row's trained tokens."""
        body = {"model": self._model, "prompt": row.ids, "max_tokens": 1, "prompt_logprobs": 0}
        answer = self._service.ask(body, (64 + row.num_tokens) << 10)
        try:
            given = _Completion.model_validate_json(answer).choices[0].prompt_logprobs
            pairs = zip(given, row.ids, row.trained, strict=True)
            found = [(at or {})[id].logprob for at, id, is_trained in pairs if is_trained]
        except (ValidationError, ValueError, KeyError) as error:
            raise ValueError(
                f"its answer has no prompt_logprobs of the {row.num_tokens} tokens of {row.name}"
            ) from error
        if not all(math.isfinite(each) and each <= 1e-3 for each in found):
            raise ValueError(f"its answer has something that is no log-prob, for {row.name}")
        return torch.tensor(found)


def teacher_of(config: Config) -> Teacher | TeacherService | None:
    """The run's teacher that is a model of its own; None without one."""
    if config.teacher.url is not None:
        return TeacherService(config.teacher)
    return None if config.teacher_model is None else Teacher(config.teacher_model)


def check_service(section: TeacherSection, tokenizer: Any) -> None:
    """Check that a teacher behind a URL has the student's tokenizer; raises ModelError if not."""
    if section.url is None:
        return
    if section.tokenizer is not None:
        is_same = load_tokenizer(section.tokenizer).get_vocab() == tokenizer.get_vocab()
    else:
        step = max(1, len(tokenizer) // PROBED_TOKENS)
        text = " ".join(tokenizer.decode([id]) for id in range(0, len(tokenizer), step))
        body = {"model": section.model, "prompt": text, "add_special_tokens": False}
        url = section.url.removesuffix("/v1") + "/tokenize"
        try:
            asked = service.Service("the teacher", url, section, TrainingError)
            answer = asked.ask(body, 1 << 20)
            told = _Tokens.model_validate_json(answer).tokens
        except (ValueError, ConnectionError, TimeoutError) as error:
            raise ModelError(
                f"teacher.url: it does not tell how it reads text ({one_line(error)[:300]}); start "
                "vLLM's server there, or set teacher.tokenizer to a folder with its tokenizer"
            ) from error
        is_same = told == tokenizer.encode(text, add_special_tokens=False)
    if not is_same:
        raise ModelError(
            f"teacher.url={section.url}: {section.model} has another tokenizer than the model that "
            "learns, so it cannot read the same token ids; serve a model of the same family"
        )
