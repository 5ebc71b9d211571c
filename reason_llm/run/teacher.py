"""A teacher that is a model of its own: it gives a step's rollouts their column
``teacher_logprobs`` between sampling and learning, on the GPU in that phase alone."""

from collections.abc import Callable, Sequence

import torch

from reason_llm.config import ModelSection
from reason_llm.model import Datum, Model, collate, offload, policy_logprobs
from reason_llm.train import Learner, MicroBatches, ending_out_of_memory


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
