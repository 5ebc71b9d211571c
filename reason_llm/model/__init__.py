"""The one copy of the base and the adapters over it."""

from reason_llm.model.attention import MOST_KEYS_PER_TOKEN
from reason_llm.model.base import Model, default_device, load_tokenizer, meta_model
from reason_llm.model.canary import prove_logprobs, prove_packing, share_of_base
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.layout import collate, collate_columns, lay_out
from reason_llm.model.logprobs import policy_logprobs, token_logprobs
from reason_llm.model.quiet import quiet_libraries

__all__ = [
    "MOST_KEYS_PER_TOKEN",
    "Datum",
    "Model",
    "collate",
    "collate_columns",
    "default_device",
    "lay_out",
    "load_tokenizer",
    "meta_model",
    "policy_logprobs",
    "prove_logprobs",
    "prove_packing",
    "quiet_libraries",
    "share_of_base",
    "to_data",
    "token_logprobs",
]
