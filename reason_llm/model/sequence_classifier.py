"""A separate reward model, not over the base: a folder with a sequence-classification model of
one label, in safetensors, with its own tokenizer and chat template. It is in host memory, and on
the GPU only in the scoring phase.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
)

from reason_llm.config import ModelSection
from reason_llm.errors import ModelError, RewardError
from reason_llm.model import folder, offload
from reason_llm.model.base import load_tokenizer, read_config, reading

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class ClassifierShape:
    """Sizes of a sequence classifier, from its files."""

    weight_bytes: int
    passing_bytes_per_token: int
    """Memory of a forward pass without gradients: a few of a layer's widest vectors."""
    element_bytes: int
    passed_weights: int
    """Weights that each token passes; those of experts are not counted."""
    query_elements: int
    """Elements of the queries of one token in all layers."""
    max_tokens: int | None
    """Longest text; None where the config has no limit."""


@cache
def look_at(path: Path) -> ClassifierShape:
    """The sizes of the model in a folder; no weight is read. Raises ModelError: it is no such
    model, or needs its own Python code."""
    folder.refuse_adapter(str(path))
    config = read_config(str(path))
    if config.num_labels != 1:
        raise ModelError(
            f"{path} has {config.num_labels} labels, and a reward model has one; name another"
        )
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ModelError(
            f"{path}: {config.model_type} has no sequence-classification model in Transformers; "
            "name another"
        )
    # The memory plan needs the sizes before anything is loaded: they are in the files' headers.
    shapes: dict[str, list[int]] = {}
    for _, stored in folder.stored_shapes(ModelSection(path=str(path))):
        shapes |= stored
    text = config.get_text_config()
    element = ELEMENT_BYTES.get(str(config.dtype).removeprefix("torch."), 4)
    widest = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    passed = [
        shape
        for name, shape in shapes.items()
        if len(shape) == 2 and shape[0] != text.vocab_size
        if not any(part in name for part in ("embed", "expert", "wpe"))
    ]
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ClassifierShape(
        weight_bytes=sum(math.prod(shape) for shape in shapes.values()) * element,
        element_bytes=element,
        passed_weights=sum(map(math.prod, passed)),
        query_elements=text.num_hidden_layers * text.num_attention_heads * head,
        passing_bytes_per_token=(4 * widest + 8 * text.hidden_size) * element,
        max_tokens=getattr(text, "max_position_embeddings", None),
    )


class SequenceClassifier:
    """The model with its tokenizer, in host memory. Raises ModelError: it cannot be loaded, or
    lacks a tensor."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self.device = device
        self.max_tokens = look_at(path).max_tokens
        self.tokenizer = load_tokenizer(str(path))
        folder.check_weights(str(path))
        with reading(str(path), "weights"):
            model, report = AutoModelForSequenceClassification.from_pretrained(
                str(path),
                dtype="auto",
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        if missing := sorted(report["missing_keys"]):
            raise ModelError(
                f"{path}: its weights lack {missing[0]}, which would be random; save it whole"
            )
        self._model: Any = model.eval()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Context in which the weights are on the GPU, if there is one. Raises OutOfMemory: they do
        not fit."""
        with offload.on_device(self._model, self.device, f"the reward model {self.path}"):
            yield

    @torch.no_grad()
    def scores(
        self, rows: Sequence[Sequence[int]], budget_tokens: int
    ) -> Iterator[tuple[int, float]]:
        """Index and score of each row, the longest first, while ``on_device``.

        Args:
            rows: token ids, by its own tokenizer, of whole conversations.
            budget_tokens: of a batch, padding included.

        Raises:
            RewardError: one is longer than the model reads.
        """
        longest = max(map(len, rows), default=0)
        if self.max_tokens is not None and longest > self.max_tokens:
            raise RewardError(
                f"a rollout has {longest} tokens for the reward model {self.path}, which reads "
                f"{self.max_tokens}; lower sample.max_new_tokens, or take another model"
            )
        # Transformers finds a row's last token by the padding token: without one, no row is padded.
        pad = self._model.config.get_text_config().pad_token_id
        for batch in _batches([len(ids) for ids in rows], budget_tokens if pad is not None else 1):
            ids = [torch.tensor(rows[i], dtype=torch.long) for i in batch]
            ids_BT = pad_sequence(ids, batch_first=True, padding_value=pad or 0)
            mask_BT = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
            output = self._model(
                input_ids=ids_BT.to(self.device), attention_mask=mask_BT.to(self.device)
            )
            yield from zip(batch, output.logits[:, 0].float().cpu().tolist(), strict=True)


def _batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices in batches of rows * longest row <= budget, the longest first."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
