"""The one copy of the base and the adapters over it. Each name is imported on its
first use, so that a plan needs no PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reason_llm.model.sizes import Line, max_keys

if TYPE_CHECKING:
    from reason_llm.model import offload, recompute
    from reason_llm.model.base import (
        Model,
        Role,
        base_digest,
        default_device,
        meta_model,
        read_config,
    )
    from reason_llm.model.canary import prove_logprobs, prove_packing, share_of_base
    from reason_llm.model.datum import Datum, to_data
    from reason_llm.model.layout import (
        MicroBatch,
        PlacedRow,
        collate,
        in_rows,
        lay_out,
        placed,
        places_of,
    )
    from reason_llm.model.logprobs import policy_logprobs, row_scores, token_values
    from reason_llm.model.multimodal import is_multimodal
    from reason_llm.model.sequence_classifier import SequenceClassifier
    from reason_llm.model.tokenizer import (
        decode,
        end_token_ids,
        load_tokenizer,
        quiet_libraries,
        reading,
    )

_HOMES = {
    "base": "Model Role base_digest default_device meta_model read_config",
    "canary": "prove_logprobs prove_packing share_of_base",
    "datum": "Datum to_data",
    "layout": "MicroBatch PlacedRow collate in_rows lay_out placed places_of",
    "logprobs": "policy_logprobs row_scores token_values",
    "multimodal": "is_multimodal",
    "sequence_classifier": "SequenceClassifier",
    "tokenizer": "decode end_token_ids load_tokenizer quiet_libraries reading",
}
"""The names of each module."""


def __getattr__(name: str) -> Any:
    """A name of another module, on its first use."""
    home = next((home for home, names in _HOMES.items() if name in names.split()), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return globals()[name]
