"""Export of a reward model as a sequence-classification model of Transformers.

The head of the language model gives way to ``score.weight`` (1, D). Transformers reads the score at
the last token that is not padding, found by its id, so the padding token must be one with which no
answer ends. Parity: the scores of held-out rows, by base, adapter and head, and by the export in
padded batches."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
)

from reason_llm.app.export import parity
from reason_llm.app.export.merging import SCORE
from reason_llm.config import Config
from reason_llm.data import load_data
from reason_llm.errors import ModelError, one_line
from reason_llm.files import regular
from reason_llm.model import Datum, adapters, base, end_token_ids, score_head
from reason_llm.readers import SCALE

BATCH_ROWS = 4
FILES = (score_head.FILE, SCALE)
"""Files that it has in addition to its adapter."""


def is_one(adapter: Path) -> bool:
    """Whether an adapter's folder holds a reward model's head."""
    return (adapter / score_head.FILE).is_file()


def head_of(adapter: Path) -> Tensor:
    """The head's weight, (1, D) in float32. Raises a ModelError for a critic's."""
    try:
        tensors = load_file(regular(adapter / score_head.FILE))
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{adapter / score_head.FILE} is damaged ({one_line(error)[:200]}); copy it again"
        ) from error
    weight: Tensor | None = tensors.get("weight")
    if set(tensors) != {"weight"} or weight is None or weight.dim() != 2 or len(weight) != 1:
        raise ModelError(
            f"{adapter / score_head.FILE} is not a reward model's head; name a reward run's folder"
        )
    return weight.float()


def configured(config: dict[str, Any], folder: Path, pad_token_id: int) -> dict[str, Any]:
    """The base's config.json as that of the sequence-classification model."""
    described = base.read_config(str(folder))
    kind = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(described), None)
    described.num_labels = 1
    described.pad_token_id = pad_token_id
    if kind is not None:
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(
                described, trust_remote_code=False
            )
    if kind is None or SCORE not in classifier.state_dict():
        raise ModelError(
            f"{described.model_type} has no sequence-classification model in Transformers with a "
            "head called score; take --adapter-only"
        )
    return config | {
        "architectures": [kind.__name__],
        "id2label": {"0": "reward"},
        "label2id": {"reward": 0},
        "problem_type": "regression",
        "pad_token_id": pad_token_id,
    }


def padding_token(tokenizer: Any, ends: Collection[int]) -> str:
    """A token with which no answer ends, the tokenizer's own padding token if it is one."""
    candidates = [tokenizer.pad_token, tokenizer.unk_token, *tokenizer.all_special_tokens]
    candidates += [str(token) for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    for token in candidates:
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in ends:
            return str(token)
    raise ModelError(
        "the tokenizer has no special token other than those that end an answer, and a padded row "
        "would be read at the wrong place; add one to the base's tokenizer"
    )


def held_out_rows(config: Config, tokenizer: Any) -> list[Datum]:
    """The run's held-out rows, or its training rows where it had none."""
    ends = end_token_ids(config.model.path, tokenizer)
    context = base.context_limit(config.model)
    data = load_data(config, tokenizer, context, end_token_ids=ends)
    sets = [data.held_out_rows] if data.held_out_rows is not None else data.training
    pairs = [[Datum.of_row(row) for row in unit] for data_set in sets for unit in data_set.units]
    return [pair[side] for side in (0, 1) for pair in pairs]  # evenly spread ones are of both


@torch.no_grad()
@parity.fitting()
def check_scores(
    folder: Path, adapter: Path, exported: Path, rows: Sequence[Datum], dtype: torch.dtype
) -> parity.ScoreParity:
    """Compare scores by base, adapter and head with those by the export. Raises a ModelError if a
    model cannot be loaded or does not fit."""
    policy = adapters.over(parity.load(folder, dtype), adapter)
    head, decoder = head_of(adapter), policy.get_base_model().get_decoder()
    scores = []
    for row in rows:
        ids_1T = torch.tensor(row.ids[None], device=policy.device)
        last_D = decoder(input_ids=ids_1T, use_cache=False).last_hidden_state[0, -1]
        scores.append(float(head[0] @ last_D.float().cpu()))
    del policy, decoder
    ours_N, theirs_N = torch.tensor(scores), _exported_scores(exported, rows, dtype)
    gap = parity.Gap.between(ours_N, theirs_N)
    spread = float(ours_N.std()) if len(rows) > 1 else 0.0
    return parity.ScoreParity(len(rows), gap.largest, gap.mean, spread)


def _exported_scores(exported: Path, rows: Sequence[Datum], dtype: torch.dtype) -> Tensor:
    """Scores as any user gets them: with Transformers' class, in padded batches."""
    model = parity.load(exported, dtype, AutoModelForSequenceClassification)
    scores = []
    for start in range(0, len(rows), BATCH_ROWS):
        part = [torch.tensor(row.ids) for row in rows[start : start + BATCH_ROWS]]
        ids_BT = pad_sequence(part, batch_first=True, padding_value=model.config.pad_token_id)
        mask_BT = pad_sequence([torch.ones_like(ids_T) for ids_T in part], batch_first=True)
        inputs = {"input_ids": ids_BT.to(model.device), "attention_mask": mask_BT.to(model.device)}
        scores.append(model(**inputs).logits[:, 0].float().cpu())
    return torch.cat(scores)
