"""LoRA adapters over the one base, through PEFT: attach, switch off, write, load.
Source: arXiv:2106.09685.
"""

import copy
import math
import re
import shutil
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from reason_llm.config import AdapterSection, matching
from reason_llm.errors import CheckpointError, ModelError, one_line
from reason_llm.files import MIB, read_object, regular, replacing_folder
from reason_llm.model import score_head
from reason_llm.model.families import UNADAPTED
from reason_llm.model.folder import check_written, header_shapes
from reason_llm.model.sizes import MAX_LORA_RANKS

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAY_VARY = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "lora_alpha", "lora_dropout", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    "target_parameters",
    *("init_lora_weights", "megatron_core", "ensure_weight_tying", "fan_in_fan_out"),
}
"""Fields of PEFT's LoraConfig that may differ between plain LoRA adapters."""
LINEAR = (torch.nn.Linear, Conv1D)
"""Layers that an adapter may be put on; the second is GPT-2's, whose weight is transposed."""
TAKEN_FOR_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names in mixtures that PEFT 0.21 takes for parts of the experts' fused weights, as they were
before Transformers 5, even where they are those of a shared expert."""
SHARED_EXPERT_GATE = "shared_expert_gate"
"""Layer of Qwen's mixtures with one output, for which vLLM 0.32 lists adapters and applies none."""
PLAIN_STARTS = (True, False, "gaussian", "orthogonal")
"""Ways to begin (init_lora_weights) that leave the base as it is."""
ADAPTED = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
MAX_BYTES = 64 << 30
"""Largest file of an adapter."""
POLICY = "default"
"""PEFT's name of the policy's adapter."""
RANGES = (
    ("r", 1, 4096, (int,)),
    ("lora_alpha", 1e-6, 1e6, (int, float)),
    ("lora_dropout", 0, 1, (int, float)),
)
"""Numbers of an adapter's config: lowest, highest, types."""
_BAD_CONFIG = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    SafetensorError,
    RecursionError,
)
"""Errors that PEFT raises about a config; the last for a part whose name it does not know."""


def attach(base: Any, config: AdapterSection, excluded: str | None = None) -> PeftModel:
    """The base with a fresh LoRA adapter in float32; its start is from torch's global seed.
    ``excluded`` is PEFT's ``exclude_modules``, for whoever loads the adapter over a larger model.
    Raises ModelError: a target that the model lacks."""
    experts = expert_weights(base)
    for target in config.target_parameters:
        if not any(f".{name}".endswith(f".{target}") for name in experts):
            ends = sorted({".".join(name.split(".")[-2:]) for name in experts})
            raise ModelError(
                f"model.adapter.target_parameters: {target!r} is not a weight of the experts of "
                f"{base.config.model_type}, whose are {', '.join(ends) or 'none: it is dense'}"
            )
    if config.target_parameters and config.dropout:
        raise ModelError(
            f"model.adapter.dropout={config.dropout} contradicts model.adapter.target_parameters: "
            "PEFT has no dropout before experts' weights; set it to 0"
        )
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rslora,
        lora_dropout=config.dropout,
        target_modules=find_targets(base, config.targets),
        target_parameters=list(config.target_parameters) or None,
        exclude_modules=excluded,
        task_type="CAUSAL_LM",
    )
    with _quiet_peft():
        policy = get_peft_model(base, lora)
    # PEFT reads some names of layers as the experts' weights, which vLLM would not apply.
    requested = {target.rpartition(".")[2] for target in config.target_parameters}
    for module in policy.modules():
        if isinstance(module, ParamWrapper) and module.parameter_name not in requested:
            raise ModelError(
                f"model.adapter.targets={config.targets!r}: in {base.config.model_type} PEFT takes "
                f"such names for the experts' {module.parameter_name}; name attention layers, and "
                "the experts in model.adapter.target_parameters"
            )
    _keep_input_types(policy)
    return policy


def _keep_input_types(policy: PeftModel) -> None:
    """Autocast converts where it must; PEFT would keep a float32 copy of every input."""
    for module in policy.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False


def add(policy: PeftModel, name: str, folder: Path | None, base: str) -> None:
    """Add an adapter, frozen and off: that in a folder, with its own rank and layers, or one like
    the policy's, whose values are from torch's global seed. Raises ModelError: it cannot be read,
    or does not fit the model named ``base``."""
    if folder is None:
        _add(policy, name, copy.deepcopy(policy.peft_config[POLICY]))
        return
    config = read_config(folder)
    config.inference_mode = False
    with _fitting(folder, base):  # or there is no layer of that name
        _add(policy, name, config)
    load_as_is(policy, folder, base, name)


def _add(policy: PeftModel, name: str, config: LoraConfig) -> None:
    with _quiet_peft():
        policy.add_adapter(name, config)
    _keep_input_types(policy)
    policy.base_model.set_adapter(POLICY)  # the only one with gradients


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Silence PEFT's warnings of a head tied to the embedding, which stays unchanged and is untied
    by merging, and of a transposed weight, which PEFT handles."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not")
        warnings.filterwarnings("ignore", message=".*`tie_word_embeddings=True` and a tied layer")
        yield


def find_targets(base: Any, targets: str | list[str]) -> str | list[str]:
    """Targets for PEFT: ``all-linear`` or a list of names, each of a linear layer. A regular
    expression is replaced by the names that it matches; ``all-linear`` of a mixture of experts by
    those that PEFT 0.21 does not take for the experts' weights, and that vLLM applies; of a family
    in ``UNADAPTED`` by all but that layer. Raises ModelError: one is no layer or that one, or a
    regular expression matches none."""
    linear = [name for name, module in base.named_modules() if isinstance(module, LINEAR)]
    unadapted = UNADAPTED.get(base.config.get_text_config(decoder=True).model_type)
    if targets == "all-linear" and (unadapted or expert_weights(base)):
        head = base.get_output_embeddings()
        # PEFT takes a target for every layer whose name ends in it.
        ends = {name.rpartition(".")[2] for name in linear if base.get_submodule(name) is not head}
        experts = TAKEN_FOR_EXPERTS | {SHARED_EXPERT_GATE} if expert_weights(base) else set()
        return sorted(ends - experts - {unadapted})
    if targets == "all-linear":
        return targets
    if isinstance(targets, str):
        names = matching_names("model.adapter.targets", targets, linear)
        bad = [] if names else [targets]
    else:
        names = targets
        bad = [t for t in targets if not any(f".{name}".endswith(f".{t}") for name in linear)]
    if bad:
        raise ModelError(
            f"model.adapter.targets={targets!r}: {bad[0]!r} is not one of the model's linear "
            f"layers, which are {', '.join(sorted({name.rpartition('.')[2] for name in linear}))}"
        )
    if past := [name for name in names if name.rpartition(".")[2] == unadapted]:
        raise ModelError(
            f"model.adapter.targets={targets!r}: the kernels of {base.config.model_type} read the "
            f"weight of {past[0]} past the layer, without its adapter; leave it out, or set "
            "all-linear"
        )
    return names


def matching_names(option: str, pattern: str, names: list[str]) -> list[str]:
    """The names that an option's regular expression matches. Raises ModelError: it is none."""
    try:
        return matching(pattern, names)
    except ValueError as error:
        raise ModelError(
            f"{option}={pattern!r} is not a regular expression that can be searched for ({error}); "
            "fix it"
        ) from error


def expert_weights(base: Any) -> dict[str, torch.nn.Parameter]:
    """The fused weights (experts, ., .) of a mixture's experts, by name; none of a dense model."""
    return {
        name: parameter
        for name, parameter in base.named_parameters()
        if ".experts." in name and parameter.dim() == 3
    }


@contextmanager
def reference(policy: PeftModel) -> Iterator[None]:
    """Context in which the model is the base alone, without adapter and without gradients."""
    with policy.disable_adapter(), torch.no_grad():
        yield


def factors(layer: Any, inputs_ND: Tensor) -> tuple[Tensor, Tensor] | None:
    """Scaled factors (N, R) and (outputs, R) of the adapter's addition to a layer's outputs; None
    if there is no adapter or it is off."""
    if not isinstance(layer, LoraLayer) or layer.disable_adapters:
        return None
    (name,) = layer.active_adapters
    if name not in layer.lora_A:
        return None
    low_NR = layer.lora_A[name](layer.lora_dropout[name](inputs_ND))
    return low_NR * layer.scaling[name], layer.lora_B[name].weight


def state(policy: PeftModel, name: str = POLICY) -> dict[str, Tensor]:
    """The adapter's tensors by PEFT's names, without the base's head, which PEFT may add."""
    tensors: dict[str, Tensor] = get_peft_model_state_dict(
        policy, adapter_name=name, save_embedding_layers=False
    )
    return tensors


def copy_folder(source: Path, target: Path) -> None:
    """Copy an adapter's files, and its head where it has one. Raises ModelError: a file is missing
    or cannot be read, or as ``check_written``."""
    check_written(source)
    names = [CONFIG, WEIGHTS, *([score_head.FILE] if (source / score_head.FILE).exists() else [])]
    with replacing_folder(target) as temporary:
        for name in names:
            with _reading(source / name):
                file = regular(source / name)
            shutil.copyfile(file, temporary / name)  # a piece at a time


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Context that turns errors of unreadable files into one-line ModelErrors."""
    try:
        yield
    except _BAD_CONFIG as error:
        raise ModelError(
            f"{file} cannot be read ({one_line(error)[:200]}); name a folder that holds a LoRA "
            "adapter in PEFT's form"
        ) from error


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copy of the adapter at one moment, in host memory."""

    tensors: dict[str, torch.Tensor]
    config: LoraConfig

    def write(self, folder: Path) -> None:
        """Write it in PEFT's format, for ``PeftModel.from_pretrained``."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
        self.config.save_pretrained(str(folder))


def snapshot(policy: PeftModel, name: str = POLICY) -> Snapshot:
    """Copy of the adapter that the next optimizer step does not change."""
    config = copy.deepcopy(policy.peft_config[name])
    config.inference_mode = True
    for field, value in vars(config).items():
        if isinstance(value, set):  # PEFT would write it in the order of Python's hash seed
            setattr(config, field, sorted(value))
    tensors = state(policy, name)
    return Snapshot({k: v.detach().to("cpu", copy=True) for k, v in tensors.items()}, config)


@torch.no_grad()
def load_tensors(own: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Write saved values into the tensors that learn. Raises CheckpointError: some are missing or
    of other shapes."""
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in tensors.items()}:
        raise CheckpointError(
            "the saved weights do not fit the model; start with --run.resume never"
        )
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def check_fits(policy: PeftModel, folder: Path, base: str, name: str = POLICY) -> None:
    """Check by names and shapes that ``load_as_is`` will succeed; on the meta device, too. Raises
    ModelError: as ``load_as_is``."""
    check_written(folder)
    expected = {key: list(tensor.shape) for key, tensor in state(policy, name).items()}
    with _fitting(folder, base):
        if header_shapes(folder / WEIGHTS) != expected:
            raise CheckpointError(WEIGHTS)


def check_layers(folder: Path, layers: Collection[str], base: str) -> None:
    """Check that the base has all layers of an adapter. vLLM 0.32 silently serves the base alone if
    the names are those of another class of the model. Raises ModelError: one is missing."""
    with _reading(folder / WEIGHTS):
        stored = header_shapes(folder / WEIGHTS)
    for match in filter(None, map(ADAPTED.fullmatch, stored)):
        if (name := match[1].replace(".base_layer", "")) not in layers:
            raise ModelError(
                f"{folder / WEIGHTS}: {name} is not a layer of {base} as Transformers and vLLM "
                "load it, and vLLM would serve the base without the adapter; name the model that "
                "it was trained on with --base, or train it again over this one"
            )


def check_over(policy: PeftModel, folder: Path, base: str) -> None:
    """Check that ``add`` will succeed, over a policy on the meta device. Raises ModelError: as
    ``add``."""
    name, config = "checked", read_config(folder)
    with _fitting(folder, base), torch.device("meta"):
        _add(policy, name, config)
    try:
        check_fits(policy, folder, base, name)
    finally:
        policy.delete_adapter(name)


def load_as_is(policy: PeftModel, folder: Path, base: str, name: str = POLICY) -> None:
    """Load the values of an adapter of any origin. Raises ModelError: it does not fit the model in
    ``base``, or as ``check_written``."""
    check_written(folder)
    with _fitting(folder, base):
        load_tensors(state(policy, name), load_file(regular(folder / WEIGHTS)))


@contextmanager
def _fitting(folder: Path, base: str) -> Iterator[None]:
    """Context that turns an adapter's mismatch with the model into a one-line ModelError."""
    try:
        yield
    except ModelError:
        raise  # a ValueError, too
    except (CheckpointError, RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise ModelError(
            f"{folder / WEIGHTS} is damaged or no adapter of {base}; name the model that it was "
            "trained on"
        ) from error


def over(base: Any, folder: Path) -> PeftModel:
    """The base (not copied) with the adapter in ``folder``, built by PEFT, on any layers. Raises
    ModelError: it does not fit."""
    with _fitting(folder, str(base.config.name_or_path)), _quiet_peft():
        regular(folder / WEIGHTS)
        return PeftModel.from_pretrained(base, str(folder), config=read_config(folder))


def clear(policy: PeftModel) -> None:
    """Reset the policy's adapter: with B = 0 it equals the base to the last bit."""
    for name, parameter in policy.named_parameters():
        if f".lora_B.{POLICY}." in name:
            parameter.data.zero_()


def read_config(folder: Path) -> LoraConfig:
    """The adapter_config.json of a plain LoRA adapter: W + scale * B A, and nothing else. Regular
    expressions, by which PEFT would search the layers, are replaced by the names of the layers that
    have weights in the adapter. Raises ModelError: it cannot be read, is of another kind, or as
    ``check_written``."""
    check_written(folder)
    with _reading(folder / CONFIG):
        value = read_object(folder / CONFIG, MIB)
        for name, low, high, kinds in RANGES:
            number = value.get(name, low)
            if type(number) not in kinds or not low <= number <= high:
                raise ValueError(f"{name}={number!r:.60} cannot be")
        if not isinstance(base := value.get("base_model_name_or_path"), str | None):
            raise ValueError(f"base_model_name_or_path={base!r:.60} cannot be")
        with warnings.catch_warnings():  # of options that are refused below
            warnings.simplefilter("ignore")
            config = LoraConfig.from_pretrained(str(folder))
        if not _has_plain_targets(config):
            adapted = map(ADAPTED.fullmatch, header_shapes(folder / WEIGHTS))
            config.target_modules = {match[1] for match in adapted if match is not None}
            if not config.target_modules:
                raise ValueError(f"{WEIGHTS} holds no factor of a linear layer")
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    plain = LoraConfig().to_dict()
    # What a later PEFT added counts, too, unless it is off.
    options = {name: value[name] for name in value if value[name]} | config.to_dict()
    odd = [n for n in options if n not in MAY_VARY and (n not in plain or options[n] != plain[n])]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA":
        odd.insert(0, "peft_type")
    if config.init_lora_weights not in PLAIN_STARTS:
        odd.append("init_lora_weights")
    if odd:
        raise ModelError(
            f"{folder} is not a plain LoRA adapter: {odd[0]}={options.get(odd[0])!r}; merge it "
            "with the library that made it"
        )
    return config


def _has_plain_targets(config: LoraConfig) -> bool:
    targets = config.target_modules
    if config.exclude_modules or config.layers_to_transform is not None or config.layers_pattern:
        return False
    if isinstance(targets, str):
        return targets == "all-linear"
    return bool(targets) and all(isinstance(target, str) for target in targets)


def base_of(folder: Path) -> str:
    """Name of the base model in an adapter's config. Raises ModelError: as ``read_config``, or the
    name is missing."""
    path = read_config(folder).base_model_name_or_path
    if not path:
        raise ModelError(
            f"{folder}/adapter_config.json names no base model; give the run's folder or a config"
        )
    return str(path)


def num_parameters(folder: Path) -> int:
    """Parameters of the adapter in ``folder``, by the header of its file. Raises ModelError: it
    cannot be read."""
    with _reading(folder / WEIGHTS):
        return sum(map(math.prod, header_shapes(folder / WEIGHTS).values()))


def vllm_options(folder: Path, name: str, place: str) -> list[str]:
    """Options of ``vllm serve`` for the adapter in ``folder``, which it loads from ``place``: a
    folder or a name on the Hub. Raises ModelError: as ``read_config``."""
    rank = read_config(folder).r
    max_rank = next((limit for limit in MAX_LORA_RANKS if limit >= rank), MAX_LORA_RANKS[-1])
    modules = f"{name}={place}"
    return ["--enable-lora", "--max-lora-rank", str(max_rank), "--lora-modules", modules]


def section_of(folder: Path) -> AdapterSection:
    """Config section that describes the adapter in ``folder``. Raises ModelError: as
    ``read_config``."""
    config = read_config(folder)
    targets = config.target_modules
    return AdapterSection(
        rank=config.r,
        alpha=config.lora_alpha,
        rslora=config.use_rslora,
        targets=targets if isinstance(targets, str) else sorted(targets),
        target_parameters=tuple(sorted(config.target_parameters or ())),
    )
