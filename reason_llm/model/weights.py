"""All weights of the model as what is trained (``model.train: full``), in an adapter's place: the
base's own parameters, under vLLM its storage itself. Their reference is the checkpoint on disk.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from reason_llm.errors import ModelError
from reason_llm.files import cached, regular
from reason_llm.model import adapters
from reason_llm.model.folder import TOKENIZER, check_weights
from reason_llm.model.vllm.shared_weights import checkpoint_files

WEIGHTS = "model.safetensors"
FILES = {"adapter": adapters.WEIGHTS, "full": WEIGHTS}
"""File with what a policy trains, by ``model.train``."""
INDEX = f"{WEIGHTS}.index.json"
"""File that names the model's weights; without it vLLM reads every safetensors file."""
TOKENIZER_FILES = (*TOKENIZER, "chat_template*", "generation_config.json")
"""Files of a model that are copied as they are; its config is written."""


def base_of(policy: Any) -> Any:
    """The Transformers model of a policy, which has an adapter or is that model."""
    return policy.get_base_model() if isinstance(policy, PeftModel) else policy


def parameters(base: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name; tied ones once."""
    return {name: p for name, p in base.named_parameters() if p.requires_grad}


def state(base: nn.Module) -> dict[str, Tensor]:
    """All tensors of the model's file, trained or not, on their devices; tied tensors once."""
    own = dict(base.named_parameters())
    tied = dict(base.named_parameters(remove_duplicate=False)).keys() - own.keys()
    return {name: t for name, t in base.state_dict().items() if name not in tied}


@dataclass(frozen=True, slots=True)
class WeightsSnapshot:
    """The live model, to be written; its tensors are not copied."""

    base: Any
    path: str
    """The model that training began from, a folder or a Hub id."""

    def write(self, folder: Path) -> None:
        """Write weights, config and tokenizer."""
        tensors = {name: t.detach().contiguous() for name, t in state(self.base).items()}
        save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, WEIGHTS)}
        (folder / INDEX).write_bytes(orjson.dumps(index))
        self.base.config.save_pretrained(str(folder))
        copy_tokenizer_files(self.path, folder)


def copy_tokenizer_files(path: str, folder: Path) -> None:
    """Copy a model's tokenizer and its generation config."""
    config = cached(path, "config.json")
    source = Path(path) if config is None else config.parent
    for file in sorted({file for pattern in TOKENIZER_FILES for file in source.glob(pattern)}):
        shutil.copyfile(regular(file), folder / file.name)


@contextmanager
def reference(base: Any, path: str) -> Iterator[None]:
    """Context in which the trained parameters have the values of the checkpoint in ``path``,
    without gradients; the trained values wait in host memory and are restored bit by bit. Raises
    ModelError: the checkpoint lacks one of them, or was changed."""
    own = parameters(base)
    held = {name: p.detach().to("cpu", copy=True) for name, p in own.items()}
    try:
        with torch.no_grad():
            _read(own, path, base.base_model_prefix)
            yield
    finally:
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(held[name])


def _read(own: dict[str, nn.Parameter], path: str, prefix: str) -> None:
    check_weights(path)
    left = dict(own)
    for file in checkpoint_files(path):
        with safe_open(regular(file), framework="pt") as opened:
            stored = set(opened.keys())
            for name in list(left):
                # A checkpoint may leave the prefix out, as GPT-2's own does.
                key = name if name in stored else name.removeprefix(f"{prefix}.")
                if key in stored:
                    left.pop(name).copy_(opened.get_tensor(key))
    if left:
        raise ModelError(
            f"model.path={path}: {next(iter(left))} is not in its safetensors, so there is no "
            "reference; save the model with Transformers, or leave the KL out"
        )
