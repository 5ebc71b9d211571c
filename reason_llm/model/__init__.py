"""The one copy of the base and the adapters over it."""

from reason_llm.model import offload
from reason_llm.model.attention import MOST_KEYS_PER_TOKEN
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
    read_config,
    reading,
)
from reason_llm.model.canary import prove_logprobs, prove_packing, share_of_base
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.layout import PlacedRow, collate, collate_columns, lay_out, placed
from reason_llm.model.logprobs import (
    chunk_bytes,
    policy_logprobs,
    row_scores,
    target_logprobs,
    token_values,
)
from reason_llm.model.multimodal import reads_images
from reason_llm.model.sequence_classifier import SequenceClassifier

__all__ = [
    "MOST_KEYS_PER_TOKEN",
    "Datum",
    "Model",
    "PlacedRow",
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
    "placed",
    "policy_logprobs",
    "prove_logprobs",
    "prove_packing",
    "quiet_libraries",
    "read_config",
    "reading",
    "reads_images",
    "row_scores",
    "share_of_base",
    "target_logprobs",
    "to_data",
    "token_values",
]
