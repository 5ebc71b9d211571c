"""The one copy of the base and the adapters over it."""

from reason_llm.model import offload, recompute
from reason_llm.model.attention import most_keys
from reason_llm.model.base import (
    Model,
    Role,
    base_digest,
    decode,
    default_device,
    end_token_ids,
    load_tokenizer,
    meta_model,
    quiet_libraries,
)
from reason_llm.model.canary import prove_logprobs, prove_packing, share_of_base
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.layout import collate, collate_columns, lay_out
from reason_llm.model.logprobs import (
    chunk_bytes,
    policy_logprobs,
    row_scores,
    target_logprobs,
    token_values,
)
from reason_llm.model.sequence_classifier import SequenceClassifier

__all__ = [
    "Datum",
    "Model",
    "Role",
    "SequenceClassifier",
    "base_digest",
    "chunk_bytes",
    "collate",
    "collate_columns",
    "decode",
    "default_device",
    "end_token_ids",
    "lay_out",
    "load_tokenizer",
    "meta_model",
    "offload",
    "policy_logprobs",
    "prove_logprobs",
    "prove_packing",
    "quiet_libraries",
    "row_scores",
    "share_of_base",
    "target_logprobs",
    "to_data",
    "token_values",
]
