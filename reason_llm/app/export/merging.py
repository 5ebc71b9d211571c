"""Merging of an adapter into its base weights: W + scale * B A, tensor by tensor.

The checkpoint's files are read one tensor at a time and written shard by shard, so that the host
holds a shard and never a model. Names and shapes are the checkpoint's own. Source of the merge:
arXiv:2106.09685 section 4.1; the scale alpha / sqrt(r) of rank-stabilised LoRA: arXiv:2312.03732.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from reason_llm.errors import ModelError, one_line
from reason_llm.files import read_object, regular
from reason_llm.model import adapters, base as base_model, folder as model_folder

FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.md")
"""Files of a Hub model that are downloaded."""
SHARD_BYTES = 5 << 30
"""Largest file of a result, unless one tensor is larger."""
HEAD = "lm_head.weight"
SCORE = "score.weight"
BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the two tensors that a weight in MXFP4 is stored as."""
_WHOLE_WEIGHT = re.compile(r"base_model\.model\.(.+?)(?:\.base_layer)?\.weight")
"""PEFT also saves whole embeddings if an embedding or the head is adapted."""
_FLOATS = {"F64", "F32", "F16", "BF16"}
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
          "BOOL": 1}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Update:
    """The change of one weight by an adapter."""

    a_RI: Tensor
    """(rank, in) the first factor."""
    b_OR: Tensor
    """(out, rank) the second."""
    scale: float

    @property
    def shape(self) -> list[int]:
        """(out, in) of the weight."""
        return [self.b_OR.shape[0], self.a_RI.shape[1]]

    def added_to(self, weight_OI: Tensor) -> Tensor:
        """The merged weight in float32."""
        return weight_OI.float().addmm_(self.b_OR.float(), self.a_RI.float(), alpha=self.scale)

    def transposed(self) -> "Update":
        """The update of a weight that is stored as (in, out)."""
        return Update(self.b_OR.T.contiguous(), self.a_RI.T.contiguous(), self.scale)


@dataclass(frozen=True, slots=True)
class _Source:
    """Origin of a tensor of the result: file, name in it, shape, and bytes in the result."""

    file: Path
    name: str
    shape: list[int]
    num_bytes: int
    scales: "_Source | None" = None
    """Scales of a weight in MXFP4, whose blocks this is."""

    def read(self) -> Tensor:
        """The stored tensor; MXFP4 is unpacked to bfloat16, which holds all its values."""
        with safe_open(regular(self.file), framework="pt") as opened:
            tensor = torch.as_tensor(opened.get_tensor(self.name))
        if self.scales is None:
            return tensor
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        unpacked: Tensor = convert_moe_packed_tensors(tensor, self.scales.read())
        return unpacked


def is_mxfp4(config: dict[str, Any]) -> bool:
    """Whether a config.json is of weights in MXFP4, as gpt-oss is published."""
    quantized = config.get("quantization_config")
    return isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"


def downloaded(path: str) -> Path:
    """Folder of a model; a Hub id is downloaded first. Raises a ModelError if it is neither."""
    folder = Path(path)
    if not folder.is_dir():
        try:  # gpt-oss has its weights once more in folders
            folder = Path(
                snapshot_download(path, allow_patterns=list(FILES), ignore_patterns=["*/*"])
            )
        except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
            raise ModelError(
                f"{path} is neither a folder here nor a model on the Hub that can be read "
                f"({one_line(error)[:200]}); name the base with --base"
            ) from error
    return folder


def base_folder(path: str) -> Path:
    """Folder of a base model, as ``downloaded``, whose weights are not quantised."""
    folder = downloaded(path)
    if read_json(folder / "config.json").get("quantization_config"):
        raise ModelError(
            f"{path} is quantised itself, and merging into rounded weights would lose what was "
            "learned; name the model it was made from with --base"
        )
    return folder


def read_json(file: Path) -> dict[str, Any]:
    """Content of a model's JSON file; raises a ModelError if it is missing or damaged."""
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({one_line(error)}); copy the model again") from (
            error
        )


def adapted(adapter: Path) -> tuple[dict[str, Update], dict[str, Tensor]]:
    """The changes by a plain LoRA adapter, and the weights that it holds whole, by name."""
    config, file = adapters.read_config(adapter), adapter / adapters.WEIGHTS
    if config.target_parameters:
        raise ModelError(
            f"{adapter} adapts experts ({', '.join(sorted(config.target_parameters))}), which is "
            "not merged here; export it with --adapter-only, or merge it with PEFT"
        )
    try:
        tensors = load_file(regular(file))
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read ({one_line(error)}); copy it again") from error
    factors: dict[str, dict[str, Tensor]] = {}
    whole = {}
    for name, tensor in tensors.items():
        if match := adapters.ADAPTED.fullmatch(name):
            factors.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
        elif match := _WHOLE_WEIGHT.fullmatch(name):
            whole[f"{match[1]}.weight"] = tensor
        else:
            raise ModelError(
                f"{file}: {name} is not a factor of a linear layer; merge it elsewhere"
            )
    scale = config.lora_alpha / (config.r**0.5 if config.use_rslora else config.r)
    # The scale is that of the config's rank, so a factor of another rank would be merged wrongly.
    for name, both in factors.items():
        if both.keys() != {"A", "B"} or {len(both["A"]), both["B"].shape[1]} != {config.r}:
            raise ModelError(f"{file}: {name} lacks a factor, or is not of rank {config.r}")
    return {name: Update(both["A"], both["B"], scale) for name, both in factors.items()}, whole


def merged_bytes(base: Path, adapter: Path | None, dtype: torch.dtype) -> int:
    """Size of the merged weights in bytes, if every update has its weight; raises as ``merge``."""
    return sum(source.num_bytes for source in _plan(base, adapter, dtype)[1].values())


def merge(
    base: Path,
    adapter: Path | None,
    out: Path,
    dtype: torch.dtype,
    score: Tensor | None = None,
) -> None:
    """Write the merged safetensors, their index and config.json into ``out``.

    Args:
        base: a folder with an unquantised checkpoint.
        adapter: None where nothing is added to it.
        dtype: of the result; the sum is made in float32.
        score: weight (1, D) of a reward model's head, instead of the language model's.

    Raises:
        ModelError: the adapter does not fit the checkpoint.
    """
    to_add, sources = _plan(base, adapter, dtype)
    if score is not None:
        to_add.pop(HEAD, None)
        sources.pop(HEAD, None)
    shards = split_state_dict_into_shards_factory(
        sources,
        get_storage_size=lambda source: source.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=SHARD_BYTES,
    )
    weight_map = dict(shards.tensor_to_filename)
    for file, names in shards.filename_to_tensors.items():
        tensors = dict(_merged(sources, to_add, names, dtype))
        if score is not None and SCORE not in weight_map:
            tensors[SCORE], weight_map[SCORE] = score.to(dtype), file
        save_file(tensors, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # safetensors makes it readable for its owner alone
        del tensors  # before the next ones are read
    if shards.is_sharded:
        index = {"metadata": shards.metadata, "weight_map": weight_map}
        content = orjson.dumps(index, option=orjson.OPT_INDENT_2)
        (out / "model.safetensors.index.json").write_bytes(content)
    config = read_json(base / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
    if "torch_dtype" in config:  # of Transformers before 5
        config["torch_dtype"] = config["dtype"]
    if is_mxfp4(config):
        del config["quantization_config"]
    if HEAD in to_add:  # the embedding stays as it is, so the two are tied no longer
        config["tie_word_embeddings"] = False
    (out / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))


def _merged(
    sources: dict[str, _Source], to_add: dict[str, Update], names: list[str], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        tensor = sources[name].read()
        if name in to_add:
            tensor = to_add[name].added_to(tensor)
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        # A tied head that is adapted and its embedding come from the same stored tensor.
        yield name, tensor.clone() if name != sources[name].name else tensor.contiguous()


def _plan(
    base: Path, adapter: Path | None, dtype: torch.dtype
) -> tuple[dict[str, Update], dict[str, _Source]]:
    """The updates, and every tensor of the result in the checkpoint's order, by name."""
    sources = {}
    for file in _files(base):
        try:
            with safe_open(regular(file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    part = opened.get_slice(name)
                    kind, shape = part.get_dtype(), part.get_shape()
                    if kind not in _BYTES:
                        raise ModelError(
                            f"{file}: {name} is of type {kind}; name an unquantised base with "
                            "--base"
                        )
                    size = dtype.itemsize if kind in _FLOATS else _BYTES[kind]
                    sources[name] = _Source(file, name, shape, math.prod(shape) * size)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} is damaged ({one_line(error)}); copy it again") from error
    if is_mxfp4(read_json(base / "config.json")):
        sources = dict(_unpacked(sources, dtype))
    model = base_model.meta_base(str(base), trust_remote_code=False)
    prefix, own_name = f"{model.base_model_prefix}.", model_folder.names_of(model)
    earlier = {own_name(name): name for name in sources}

    def stored(name: str) -> str:
        """A checkpoint may leave out the prefix, such as ``transformer.`` in GPT-2's own, or have
        the names of an earlier version of Transformers, such as Gemma 3's and Mistral 3's."""
        short = name.removeprefix(prefix)
        return short if name not in sources and short in sources else earlier.get(name, name)

    updates, whole = adapted(adapter) if adapter is not None else ({}, {})
    embedding = model.get_input_embeddings()
    is_tied = model.config.tie_word_embeddings
    for name, module in model.named_modules():
        weight = f"{name}.weight"
        if isinstance(module, Conv1D) and weight in updates:
            updates[weight] = updates[weight].transposed()
        if module is embedding and is_tied and HEAD in updates and stored(weight) in sources:
            sources.setdefault(HEAD, sources[stored(weight)])  # its tensor is also the head's
    to_add = {stored(name): update for name, update in updates.items()}
    for name, update in to_add.items():
        shape = sources[name].shape if name in sources else "missing"
        if shape != update.shape:
            raise ModelError(
                f"the adapter makes {name} {update.shape}, and in {base} it is {shape}; name the "
                "model that it was trained on with --base"
            )
    for name, tensor in whole.items():
        source = sources.get(stored(name))
        if source is None or not torch.equal(source.read().to(tensor.dtype), tensor):
            raise ModelError(
                f"{adapter}/{adapters.WEIGHTS}: {name} is not that of {base}: it was trained or "
                "resized with the adapter; merge it with the library that made it"
            )
    return to_add, sources


def _unpacked(sources: dict[str, _Source], dtype: torch.dtype) -> Iterator[tuple[str, _Source]]:
    """The sources, with one weight (E, I, O) for each pair of blocks (E, O, I / 32, 16), of two
    four-bit numbers a byte, and scales."""
    for name, source in sources.items():
        weight = name.removesuffix(BLOCKS)
        scales = sources.get(f"{weight}{SCALES}")
        if name != weight:
            if scales is None or scales.shape != source.shape[:-1] or len(source.shape) != 4:
                raise ModelError(f"{source.file}: {name} has no scales; download the model again")
            experts, outputs, groups, size = source.shape
            shape = [experts, groups * size * 2, outputs]
            num_bytes = math.prod(shape) * dtype.itemsize
            yield weight, replace(source, shape=shape, num_bytes=num_bytes, scales=scales)
        elif not name.endswith(SCALES):
            yield name, source


def _files(base: Path) -> list[Path]:
    """Weight files of a folder in the order of Transformers, which ignores other files."""
    model_folder.check_weights(str(base))
    single, index = base / "model.safetensors", base / "model.safetensors.index.json"
    if not single.is_file() and not index.is_file():
        raise ModelError(f"{base} holds no model.safetensors; save the model in that form")
    names = {single.name} if single.is_file() else {*read_json(index)["weight_map"].values()}
    return [base / name for name in sorted(names)]
