"""The one base copy: tokenizer, weights, the policy adapter over them, and the two halves of a
forward pass.

The base never learns and is never copied. ``hidden_states`` runs the decoder, ``logits`` the head
on as few positions as the caller needs, so that full (B, T, V) logits never exist.

Not here: vLLM's storage, several devices.
"""

import logging
import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from reason_llm.config import ModelSection
from reason_llm.errors import ModelError, clear_frames, one_line
from reason_llm.model import adapters, folder, nf4
from reason_llm.model.attention import Segments
from reason_llm.model.vllm import engine, shared_weights, unsloth
from reason_llm.model.vllm.adapter_sync import AdapterSync
from reason_llm.model.vllm.engine import Engine, EngineSizes

log = logging.getLogger(__name__)

# What Transformers raises on a config.json that contradicts itself.
_BAD_CONFIG = (
    OSError,
    ImportError,
    StrictDataclassError,
    ValueError,
    LookupError,
    MemoryError,
    TypeError,
    AttributeError,
    RuntimeError,
    ArithmeticError,
    AssertionError,
)

MOST_TOKENS = 1 << 31
"""In a vocabulary."""
PROBE = "What is 3 + 4?"
"""Which a tokenizer must read."""


Role = Literal["policy", "reference"]
"""Who the one base copy is for a while, by the adapter that is on."""


class Model:
    """The resident base with its policy adapter.

    Args:
        seed: of the adapter's starting values.
        sizes: with them, vLLM holds the weights and the learner views them; None: without vLLM.
        checkpointing: whether activations are recomputed; Unsloth wants to know at loading.

    Raises:
        ModelError: the weights, a target module or the head cannot be used.
    """

    def __init__(
        self,
        config: ModelSection,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        sizes: EngineSizes | None = None,
        checkpointing: bool = True,
    ) -> None:
        self.path = config.path
        self.tokenizer = tokenizer
        self.device = default_device()
        self.engine: Engine | None = None
        self.sync: AdapterSync | None = None
        try:
            self._load(config, seed, sizes, checkpointing)
        except BaseException as error:  # Ctrl-C too: no engine may stay behind
            self._give_back(error)
            raise

    def _load(
        self, config: ModelSection, seed: int, sizes: EngineSizes | None, checkpointing: bool
    ) -> None:
        """Load weights, adapter and head, in a frame of its own that is cleared on failure."""
        dtype = weights_dtype(config, self.device)
        if config.quantize == "nf4":
            nf4.make_tables(self.device)
        if sizes is not None and config.backend == "unsloth":
            self.engine, self.policy = unsloth.load(config, sizes, dtype, seed, checkpointing)
        else:
            if sizes is None:
                loaded = _load_base(config, self.device)
            else:
                self.engine = engine.start(config.path, dtype, sizes, seed)
                loaded = shared_weights.model_over(self.engine, dtype)
                self.engine.release()  # verifying needs room; the first sampling phase wakes it
                shared_weights.verify(loaded, config.path)
            _disable_dropout(loaded)
            torch.manual_seed(seed)
            self.policy = adapters.attach(loaded, config.adapter)
        if self.engine is not None:
            self.sync = AdapterSync(self.engine, self.policy)
        base = self.policy.get_base_model()
        self.text_config: PretrainedConfig = base.config.get_text_config(decoder=True)
        self.end_token_ids = end_token_ids(config.path, self.tokenizer)
        self.decoder: nn.Module = base.get_decoder()
        self.head: nn.Linear = base.get_output_embeddings()
        self.softcap: float | None = getattr(self.text_config, "final_logit_softcapping", None)
        self._check_head()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the memory without hiding the error that ended the run."""
        self._give_back(error)

    def _give_back(self, error: BaseException | None) -> None:
        """Free every view of vLLM's storage first, then vLLM.

        Args:
            error: that this happens after. What its frames hold goes first, and what fails here is
                logged, so that it is not hidden.
        """
        if error is not None:
            clear_frames(error)
        if self.sync is not None:
            self.sync.close()
            self.sync = None
        for name in ("policy", "decoder", "head"):
            self.__dict__.pop(name, None)
        try:
            if self.engine is not None:
                started, self.engine = self.engine, None
                started.close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        except RuntimeError as another:
            if error is None:
                raise
            log.warning("closing vLLM failed: %s", one_line(another))

    def using(self, role: Role) -> AbstractContextManager[Any]:
        """Within: the model as this role has it. The policy is the base with its adapter, the
        reference the base without."""
        return adapters.reference(self.policy) if role == "reference" else nullcontext()

    def hidden_states(
        self,
        ids_BT: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        segments: Segments | None = None,
    ) -> Tensor:
        """The decoder's last hidden states (B, T, D), after the final norm.

        Args:
            ids_BT: int64 token ids.
            attention_mask: (B, past + T), True for real tokens; None if all are.
            position_ids: (B, T); None for 0 .. T.
            cache: extended in place by these tokens; None to keep none.
            segments: of the one row that ids_BT then is, with position_ids and without a mask.
        """
        packed: dict[str, Any] = {}
        if segments is not None:  # Transformers passes on a mask of four dimensions as it is
            attention_mask = ids_BT.new_empty(1, 1, 0, 0, dtype=torch.bool)
            packed["segments"] = segments
        with self._autocast():
            output = self.decoder(
                input_ids=ids_BT,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=cache is not None,
                **packed,
            )
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits (N, V) of N positions, in the base's dtype, capped where the model caps them."""
        with self._autocast():
            logits_NV: Tensor = self.head(hidden_ND)
        if self.softcap is None:
            return logits_NV
        return torch.tanh(logits_NV / self.softcap) * self.softcap

    def head_adapter(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor] | None:
        """Factors (N, R) and (V, R) of what an adapter on the head adds to the logits of N
        positions; None without one or while it is off."""
        with self._autocast():
            return adapters.factors(self.head, hidden_ND)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Autocast to bfloat16 for a bfloat16 base, so that the float32 adapter's products are
        computed as in vLLM."""
        reduced = self.head.weight.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16) if reduced else nullcontext()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a model whose logits are not the head's output, such as scaled ones."""
        ids_BT = torch.tensor([[1, 2, 3, 4]], device=self.device)
        with self._autocast():
            theirs = self.policy(input_ids=ids_BT, use_cache=False).logits.float()
        ours = self.logits(self.hidden_states(ids_BT)).float()
        if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
            raise ModelError(
                f"model.path={self.path}: {self.text_config.model_type} changes its logits after "
                f"the head "
                f"(by up to {float((ours - theirs).abs().max()):.3g}), which is not supported; use "
                f"another model"
            )


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer of a folder or a Hub id. Its chat template is checked in ``data.templates``.

    Args:
        trust_remote_code: as ``model.trust_remote_code``.

    Raises:
        ModelError: no such folder, no tokenizer.
    """
    folder.check(path, "config.json", "a model")
    folder.check(path, "tokenizer_config.json", "a tokenizer")
    folder.check_files(path)
    allowed = folder.code_allowed(path, trust_remote_code)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=allowed)
        spelled = tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False))
        limit = tokenizer.model_max_length
        if not isinstance(limit, int | float) or not limit > 0:
            raise ValueError(f"model_max_length={limit!r:.60} is no number of tokens")
    except _BAD_CONFIG as error:
        raise _unreadable(path, "tokenizer", error) from error
    except BaseException as error:
        # What the Rust library raises on a panic is no Exception, and has no class to name.
        if type(error).__name__ not in ("PanicException", "Exception"):
            raise
        raise _unreadable(path, "tokenizer", error) from error
    if "".join(spelled.split()).casefold() != "".join(PROBE.split()).casefold():
        raise ModelError(
            f"model.path={path}: its tokenizer reads {PROBE!r} as {spelled!r}; a file of it, "
            "such as tokenizer.json, is missing or damaged: save it again"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"model.path={path}: its tokenizer has no eos_token, so no answer could end; set one"
        )
    return tokenizer


def default_device() -> torch.device:
    """The GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights_dtype(config: ModelSection, device: torch.device) -> torch.dtype:
    """Compute type of the base; ``auto`` is bfloat16 on a GPU and for NF4, else float32."""
    automatic = "bfloat16" if device.type == "cuda" or config.quantize == "nf4" else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[
        automatic if config.dtype == "auto" else config.dtype
    ]


def read_config(path: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of the model in a folder or a Hub id.

    Args:
        trust_remote_code: as ``model.trust_remote_code``.

    Raises:
        ModelError: it cannot be read.
    """
    folder.check_files(path)
    try:
        allowed = folder.code_allowed(path, trust_remote_code)
        found: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=allowed)
    except _BAD_CONFIG as error:
        raise _unreadable(path, "config", error) from error
    if not found.return_dict:
        raise ModelError(
            f"model.path={path}: its config.json has return_dict=false, which is not supported; "
            "remove that"
        )
    return found


def context_limit(config: ModelSection) -> int:
    """Longest prompt plus completion in tokens: the config's, at most the model's own limit.

    Raises:
        ModelError: the model's config cannot be read, or is exceeded.
    """
    text_config = read_config(config.path, config.trust_remote_code).get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None) or config.context_tokens
    if limit is None:
        raise ModelError(
            f"model.path={config.path}: its config has no max_position_embeddings; "
            "set model.context_tokens"
        )
    if config.context_tokens is not None and config.context_tokens > limit:
        raise ModelError(
            f"model.context_tokens={config.context_tokens} exceeds the {limit} positions of "
            f"{config.path}; "
            f"set it to {limit} or less"
        )
    return config.context_tokens or int(limit)


def meta_model(config: ModelSection) -> PeftModel:
    """The model with its adapter and without storage; only its config is read.

    Raises:
        ModelError: no causal language model, a target that it lacks, or weights that are quantised
            already in another way than asked for.
    """
    model = meta_base(config.path, config.trust_remote_code)
    _check_quantized(config, model)
    if config.quantize == "nf4":
        nf4.check(model, config.path)
    try:
        with torch.device("meta"):
            return adapters.attach(model, config.adapter)
    except ModelError:
        raise  # a ValueError, too
    except _BAD_CONFIG as error:  # of PEFT, where there is no linear layer
        raise _unreadable(config.path, "config", error) from error


def meta_base(path: str, trust_remote_code: bool) -> Any:
    """The model without storage and without an adapter.

    Raises:
        ModelError: it is no causal language model.
    """
    described = read_config(path, trust_remote_code)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # A layer of size 0 is told by the shapes of the weights.
            warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            return AutoModelForCausalLM.from_config(described, trust_remote_code=trust_remote_code)
    except _BAD_CONFIG as error:
        raise _unreadable(path, "config", error) from error


def _check_quantized(config: ModelSection, model: Any) -> None:
    quantized = getattr(model.config, "quantization_config", None)
    if quantized is None:
        return
    fields = quantized if isinstance(quantized, dict) else quantized.to_dict()
    head = model.get_output_embeddings()
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if (reason := nf4.unfit(fields, linear, config.quantize)) is not None:
        raise ModelError(f"model.path={config.path}: {reason}")


def check_model(config: ModelSection) -> PeftModel:
    """``meta_model``, compared with the headers of the model's weights.

    Raises:
        ModelError: also weights that are missing, cut short or of other shapes. A Hub id's weights
            are left to loading.
    """
    folder.refuse_adapter(config.path)
    policy = meta_model(config)
    shapes = {
        name.replace(".base_layer.", "."): list(tensor.shape)
        for name, tensor in policy.get_base_model().state_dict().items()
    }
    if not Path(config.path).is_dir():
        return policy
    packs = getattr(policy.config, "quantization_config", None) is not None
    for file, stored in folder.stored_shapes(config):
        for name, shape in stored.items():
            is_packed = packs and shape == [-(-math.prod(shapes.get(name, [])) // 2), 1]
            if name in shapes and shapes[name] != shape and not is_packed:
                raise ModelError(
                    f"{file}: {name} is of shape {shape} and config.json makes it {shapes[name]}; "
                    "take weights and config from the same model"
                )
    return policy


def _load_base(config: ModelSection, device: torch.device) -> Any:
    dtype = weights_dtype(config, device)
    quantization = nf4.config_for(dtype) if config.quantize == "nf4" else None
    folder.refuse_adapter(config.path)
    trusted = config.trust_remote_code
    try:
        base, report = AutoModelForCausalLM.from_pretrained(
            config.path,
            dtype=dtype,
            use_safetensors=folder.use_safetensors(config),
            trust_remote_code=trusted,
            output_loading_info=True,
            quantization_config=quantization,
            device_map={"": device},
            attn_implementation=shared_weights.attention_for(read_config(config.path, trusted)),
        )
    except _BAD_CONFIG as error:
        raise _unreadable(config.path, "weights", error) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model.path={config.path}: its weights lack {len(missing)} tensors, "
            f"{missing[0]} among them; save it whole"
        )
    nf4.keep_layouts(base)
    nf4.compute_in(base, dtype)
    return base


def _disable_dropout(base: nn.Module) -> None:
    """Switch off the base's own dropout, such as GPT-2's, with which the learner would differ from
    the sampler. The adapter's dropout is model.adapter.dropout."""
    for module in base.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def end_token_ids(path: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all tokens that end an answer: the tokenizer's and those of generation_config.json.

    Raises:
        ModelError: that file is damaged.
    """
    try:
        theirs = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # there is no such file
        theirs = None
    except _BAD_CONFIG as error:
        raise _unreadable(path, "generation config", error) from error
    more = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    if not all(type(each) is int and 0 <= each < MOST_TOKENS for each in more):
        raise ModelError(
            f"model.path={path}: generation_config.json has eos_token_id={str(theirs)[:60]}; give "
            "ids"
        )
    return sorted({tokenizer.eos_token_id, *more})


def _unreadable(path: str, what: str, error: BaseException) -> ModelError:
    reason = one_line(error)[:300]
    if "trust_remote_code" in str(error):
        return ModelError(
            f"model.path={path}: its {what} needs Python code that comes with it; set "
            "model.trust_remote_code to true if you trust that code, or take another model"
        )
    return ModelError(
        f"model.path={path}: its {what} cannot be read ({reason}); check the folder or the Hub id"
    )
