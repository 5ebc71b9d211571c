"""The one base copy: weights, the adapters over them, and the two halves of a forward pass:
``hidden_states`` runs the decoder, ``logits`` the head on as few positions as the caller needs, so
that full (B, T, V) logits never exist. Not here: vLLM's storage (``vllm``).
"""

import hashlib
import json
import logging
import math
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    Cache,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from reason_llm.config import ModelSection
from reason_llm.errors import ModelError, clear_frames, one_line
from reason_llm.model import (
    adapted_linear,
    adapters,
    folder,
    multimodal,
    nf4,
    positions,
    recurrent,
    score_head,
    weights,
)
from reason_llm.model.attention import Segments
from reason_llm.model.layout import PlacedRow
from reason_llm.model.tokenizer import (
    decode as decode,
    end_token_ids,
    load_tokenizer as load_tokenizer,
    reading,
)
from reason_llm.model.vllm import engine, shared_weights, unsloth
from reason_llm.model.vllm.adapter_sync import AdapterSync
from reason_llm.model.vllm.engine import Engine, EngineSizes
from reason_llm.model.vllm.folding import Folding
from reason_llm.rollout import Attachment, Prompt

log = logging.getLogger(__name__)

KEPT_KERNELS = 64
"""Kernels that oneDNN keeps on a CPU: it compiles one for each shape, keeps 1,024 by default, some
hundred MiB, and decoding needs a new shape whenever a row leaves."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}
"""Variables that cuBLAS and vLLM read once, when they start, with ``model.deterministic`` on a GPU:
cuBLAS may split a product over streams, and vLLM's kernels sum in an order that follows the batch.
Source: vllm/envs.py; https://docs.pytorch.org/docs/stable/notes/randomness.html. Never run on a
GPU."""


class Embedded(Protocol):
    """Interface of a batch's inputs where its rows have attachments."""

    def inputs(self, ids_BT: Tensor, start: int) -> dict[str, Any]:
        """Arguments of the decoder that replace ids and positions, from a column on."""


class Embedder(Protocol):
    """Interface of the part of a model that embeds attachments."""

    def embed(self, rows: Sequence[PlacedRow], width: int) -> Embedded:
        """Inputs of a batch with ``width`` columns."""

    def shift(self, attachments: Sequence[Attachment]) -> int:
        """Position of a token after these attachments, less its place in the row."""

    def request(self, prompt: Prompt) -> Any:
        """vLLM's input for a prompt with attachments."""


class Attachments(Protocol):
    """Interface of the attachments of a run's data (``reason_llm.data.attachments``)."""

    modules: Sequence[str]
    """Names of the model's modules that embed them."""

    def embedder(self, base: Any) -> Embedder:
        """The part of the whole model that embeds them, frozen."""


Role = str
"""The model that the one base copy currently is: ``policy``; ``reference``, the base alone; or an
added role, such as ``start``, ``critic``, ``teacher``, ``reward:<name>``: another adapter, some
with a head."""


class Model:
    """The resident base with its policy adapter.

    Args:
        seed: of the adapter's starting values.
        sizes: with them, vLLM holds the weights and the learner views them; None: without vLLM.
        checkpointing: whether activations are recomputed; Unsloth wants to know at loading.
        attachments: of the data; with them, the part that embeds them is loaded, too.

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
        attachments: Attachments | None = None,
    ) -> None:
        self.path = config.path
        self.is_full = config.train == "full"
        """Whether the base's own weights are trained, without an adapter."""
        self.weights_file = weights.FILES[config.train]
        self.deterministic = config.deterministic
        self.is_unsloth = sizes is not None and config.backend == "unsloth"
        """Whether Unsloth's layers and checkpointing are in place of Transformers'."""
        self.tokenizer = tokenizer
        self.device = default_device()
        self.engine: Engine | None = None
        self.sync: AdapterSync | None = None
        self.folding: Folding | None = None
        """With ``sample.fold``: the policy's adapter in the base weights while vLLM samples."""
        self.heads: dict[Role, nn.Linear] = {}
        """Heads of the roles that give one number per token, (1, D) in float32."""
        self.embedder: Embedder | None = None
        """The part that embeds attachments, where the data has some."""
        self._embedded: Embedded | None = None
        self._seed = seed
        self._adapter = adapters.POLICY
        try:
            self._load(config, seed, sizes, checkpointing, attachments)
        except BaseException as error:  # Ctrl-C too: no engine may stay behind
            self._give_back(error)
            raise

    def _load(
        self,
        config: ModelSection,
        seed: int,
        sizes: EngineSizes | None,
        checkpointing: bool,
        attachments: Attachments | None,
    ) -> None:
        """Load everything in a separate frame, which is cleared on failure."""
        dtype = weights_dtype(config, self.device)
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # ideep's
            os.environ.setdefault(name, str(KEPT_KERNELS))  # read at the first product
        if config.deterministic and self.device.type == "cuda":
            os.environ.update(DETERMINISTIC)
        if config.quantize == "nf4":
            nf4.make_tables(self.device)
        folder.check_weights(config.path)
        if sizes is not None and self.is_unsloth:
            if positions.keys(read_config(config.path), config.context_tokens):
                raise ModelError(
                    f"model.context_tokens={config.context_tokens} exceeds the model's positions, "
                    "which model.backend=unsloth scales in its own way; set it to native"
                )
            self.engine, self.policy = unsloth.load(config, sizes, dtype, seed, checkpointing)
        else:
            if sizes is None:
                loaded = _load_base(config, self.device, attachments)
            else:
                described = positions.extend(read_config(config.path), config.context_tokens)
                extend = partial(positions.extend, tokens=config.context_tokens)
                self.engine = engine.start(config.path, dtype, sizes, seed, extend)
                loaded = shared_weights.model_over(
                    self.engine, described, dtype, config.attention, attachments is not None
                )
                self.engine.release()  # verifying needs room; the first sampling phase wakes it
                shared_weights.verify(loaded, config.path)
            _disable_dropout(loaded)
            recurrent.separate_rows(loaded)
            torch.manual_seed(seed)
            self.policy = _policy_over(loaded, config)
        if self.engine is not None:
            self.engine.use(self.tokenizer)
            assert sizes is not None
            if not (self.is_full or sizes.lora_rank):
                self.folding = Folding(self.policy)
            self.sync = AdapterSync(self.engine, None if self.folding else self.policy)
        base = weights.base_of(self.policy)
        self.embedder = None if attachments is None else attachments.embedder(base)
        self.loader: str = multimodal.auto_class(base.config).__name__
        """Transformers' class that loads all of the checkpoint."""
        text: PretrainedConfig = base.config.get_text_config(decoder=True)
        self.text_config = text
        self.end_token_ids = end_token_ids(config.path, self.tokenizer)
        self.decoder: nn.Module = base.get_decoder()
        self.head: nn.Linear = base.get_output_embeddings()
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        granite: float = getattr(text, "logits_scaling", None) or 1.0
        self.logit_scale: float = (getattr(text, "logit_scale", None) or 1.0) / granite
        """Factor by which the model multiplies the head's output."""
        self._check_head()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._give_back(error)

    def _give_back(self, error: BaseException | None) -> None:
        """Free the views of vLLM's storage in the frames of ``error``, then vLLM. A failure here is
        logged, so that it does not hide that error."""
        if error is not None:
            clear_frames(error)
        if self.sync is not None:
            self.sync.close()
            self.sync = None
        self.folding = None
        self.embedder = None
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

    @contextmanager
    def using(self, role: Role) -> Iterator[None]:
        """Context in which the model is this role, whose adapter has gradients; the reference has
        none."""
        if role == "reference":
            is_full, policy = self.is_full, self.policy
            with weights.reference(policy, self.path) if is_full else adapters.reference(policy):
                yield
            return
        before, name = self._adapter, _adapter_name(role)
        if name == before:
            yield
            return
        self._adapter = name
        self.policy.base_model.set_adapter(name)
        try:
            yield
        finally:
            self._adapter = before
            self.policy.base_model.set_adapter(before)

    def folded(self) -> AbstractContextManager[None]:
        """Context of sampling: with ``sample.fold`` the adapter is in the base weights."""
        return nullcontext() if self.folding is None else self.folding.on()

    def unfolded(self) -> AbstractContextManager[None]:
        """Context in which the learner may read within ``folded``."""
        return nullcontext() if self.folding is None else self.folding.off()

    def as_sampled(self) -> AbstractContextManager[None]:
        """Context within ``folded`` in which the model is the policy as vLLM has it: rounded."""
        return nullcontext() if self.folding is None else self.folding.read()

    def add_role(
        self,
        role: Role,
        folder: Path | None = None,
        head: Literal["none", "score", "value"] = "none",
    ) -> None:
        """Add an adapter for a role, or a head and other values to the policy's.

        Args:
            folder: holds the adapter, and its head if it has one; None for a fresh one of the
                policy's kind, which changes nothing yet.
            head: a reward model's (score, without a bias) or a critic's (value), from zero where
                the folder holds none.

        Raises:
            ModelError: the adapter or the head cannot be read, or does not fit.
        """
        if role != "policy":
            # A role's start must not depend on the roles that were added before it.
            torch.manual_seed(random.Random(f"{self._seed}/{role}").getrandbits(63))
            adapters.add(self.policy, _adapter_name(role), folder, self.path)
        elif folder is not None:
            adapters.load_as_is(self.policy, folder, self.path)
        if head != "none":
            width = self.head.weight.shape[1]
            self.heads[role] = score_head.make(width, self.device, bias=head == "value")
            if folder is not None and (folder / score_head.FILE).exists():
                score_head.load(self.heads[role], folder)

    def snapshot(self) -> adapters.Snapshot | weights.WeightsSnapshot:
        """The policy, to be written for other programs: a copy of its adapter, or with ``is_full``
        all weights as they are until it is written."""
        if self.is_full:
            return weights.WeightsSnapshot(self.policy, self.path)
        return adapters.snapshot(self.policy)

    def adapter_of(self, role: Role) -> dict[str, Tensor]:
        """Copies of a role's adapter in host memory, by PEFT's names; with ``is_full`` of all
        weights."""
        if self.is_full:
            held = weights.state(self.policy)
            return {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in held.items()}
        return adapters.snapshot(self.policy, _adapter_name(role)).tensors

    def load_adapter(self, role: Role, tensors: dict[str, Tensor]) -> None:
        """Load what ``adapter_of`` returned. Raises CheckpointError: tensors are missing or of
        other shapes."""
        if self.folding is not None:
            self.folding.check()
        policy, is_full = self.policy, self.is_full
        own = weights.state(policy) if is_full else adapters.state(policy, _adapter_name(role))
        adapters.load_tensors(own, tensors)

    def parameters_of(self, role: Role) -> list[nn.Parameter]:
        """Parameters that a role trains: its adapter's, in the model's order, then its head's; or
        the weights'."""
        if self.is_full:
            return list(weights.parameters(self.policy).values())
        name = f".{_adapter_name(role)}."
        named = self.policy.named_parameters()
        own = [parameter for key, parameter in named if ".lora_" in key and name in key]
        return [*own, *(self.heads[role].parameters() if role in self.heads else ())]

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
        if self.folding is not None:
            self.folding.check()
        options: dict[str, Any] = {} if segments is None else {"segments": segments}
        if options:  # Transformers passes on a mask of four dimensions as it is
            attention_mask = ids_BT.new_empty(1, 1, 0, 0, dtype=torch.bool)
        inputs: dict[str, Any] = {"input_ids": ids_BT, "position_ids": position_ids}
        if self._embedded is not None:
            inputs = self._embedded.inputs(ids_BT, 0 if cache is None else cache.get_seq_length())
        with self._autocast():
            output = self.decoder(
                **inputs,
                attention_mask=attention_mask,
                past_key_values=cache,
                use_cache=cache is not None,
                **options,
            )
        hidden_BTD: Tensor = output.last_hidden_state
        return hidden_BTD

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Logits (N, V), in the base's dtype, scaled or capped where the model does so."""
        with self._autocast():
            logits_NV: Tensor = self.head(hidden_ND)
        if self.logit_scale != 1:
            logits_NV = logits_NV * self.logit_scale
        if self.softcap is None:
            return logits_NV
        return torch.tanh(logits_NV / self.softcap) * self.softcap

    @contextmanager
    def attached(self, rows: Sequence[PlacedRow], width: int) -> Iterator[None]:
        """Context in which the hidden states of these rows, in a batch of ``width`` columns,
        include their attachments. Raises ModelError: rows have attachments, and the part that
        embeds them is not loaded."""
        kinds = (attachment.kind for row in rows for attachment in row.attachments)
        if self.embedder is None and (kind := next(kinds, None)) is not None:
            raise ModelError(
                f"rollouts have {kind}, and no row of the run's data has one; name the data that "
                "they were sampled from as data.train"
            )
        self._embedded = None if self.embedder is None else self.embedder.embed(rows, width)
        try:
            yield
        finally:
            self._embedded = None

    def next_position(self, prompt: Prompt) -> int:
        """Position of the token after a prompt."""
        shift = 0 if self.embedder is None else self.embedder.shift(prompt.attachments)
        return len(prompt.token_ids) + shift

    def decoding(self) -> AbstractContextManager[None]:
        """Context in which hidden states and logits come without gradient, faster for few tokens at
        once; the role must not change within it."""
        return adapted_linear.lean(self.policy)

    def fused_adapters(self) -> AbstractContextManager[None]:
        """Context in which an adapted layer is one step of autograd; roles may change within it."""
        return adapted_linear.fused(self.policy)

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Context in which torch takes deterministic operators, with ``model.deterministic``, and
        refuses one that has no such form with a RuntimeError that names it."""
        options: Any = torch.utils.deterministic
        before = torch.are_deterministic_algorithms_enabled()
        fills = options.fill_uninitialized_memory
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
            options.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
            options.fill_uninitialized_memory = fills

    def head_adapter(self, hidden_ND: Tensor) -> tuple[Tensor, Tensor] | None:
        """Factors (N, R) and (V, R) of the head adapter's addition to the logits of N positions;
        None if there is no adapter or it is off."""
        with self._autocast():
            return adapters.factors(self.head, hidden_ND)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Autocast for a bfloat16 base, so that the float32 adapter computes as in vLLM."""
        reduced = self.head.weight.dtype == torch.bfloat16
        return torch.autocast(self.device.type, torch.bfloat16) if reduced else nullcontext()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a model that cannot make a pass, or whose logits are not ``logits``."""
        ids_BT = torch.tensor([[1, 2, 3, 4]], device=self.device)
        try:
            with self._autocast():
                theirs = self.policy(input_ids=ids_BT, use_cache=False).logits.float()
            ours = self.logits(self.hidden_states(ids_BT)).float()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _no_pass(self.path, error) from error
        if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-2):
            raise ModelError(
                f"model.path={self.path}: {self.text_config.model_type} changes its logits after "
                f"the head (by up to {float((ours - theirs).abs().max()):.3g}), which is not "
                "supported; use another model"
            )


def _policy_over(base: Any, config: ModelSection) -> Any:
    """The base with its adapter, or the base itself with gradients."""
    if config.train == "full":
        return base.requires_grad_(True)
    return adapters.attach(base, config.adapter, multimodal.excluded_modules(base))


def _adapter_name(role: Role) -> str:
    return adapters.POLICY if role == "policy" else role


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
    """The config of a model's folder or Hub id; log a line if the model also reads images. Raises
    ModelError: it cannot be read, or its text part cannot be trained."""
    allowed = folder.check(path, "config.json", runs=trust_remote_code)
    with reading(path, "config"):
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=allowed)
    if multimodal.is_multimodal(config):
        folder.say(multimodal.note(path, config.model_type))
    return config


def auto_class(path: str, trust_remote_code: bool = False) -> Any:
    """The class of Transformers that loads all of the model in a folder or a Hub id. Raises
    ModelError: its config cannot be read."""
    with reading(path, "config"):
        described = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    return multimodal.auto_class(described)


NOT_OF_THE_SHAPE = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "quantization_config",
}
"""Keys of a model's config that do not matter for the fit of an adapter."""


def base_digest(policy: Any) -> str:
    """Digest of the base's config and of its head's shape, which an adapter and a score head over
    it must fit; the policy may be on the meta device."""
    base = weights.base_of(policy)
    fields = {k: v for k, v in base.config.to_dict().items() if k not in NOT_OF_THE_SHAPE}
    shape = list(base.get_output_embeddings().weight.shape)
    content = json.dumps([fields, shape], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def context_limit(config: ModelSection) -> int:
    """Longest prompt plus completion in tokens: the config's, at most the model's own limit. Raises
    ModelError: the model's config cannot be read, or is exceeded."""
    described = read_config(config.path, config.trust_remote_code)
    text_config = described.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None) or config.context_tokens
    if limit is None:
        raise ModelError(
            f"model.path={config.path}: its config has no max_position_embeddings; "
            "set model.context_tokens"
        )
    if (line := positions.note(config.path, described, config.context_tokens)) is not None:
        folder.say(line)
    return config.context_tokens or int(limit)


def meta_model(config: ModelSection) -> Any:
    """The model with its adapter on the meta device; only its config is read. Raises ModelError: it
    is no causal language model, lacks a target, or its weights are quantised in another way than
    the config asks for."""
    model = meta_base(config.path, config.trust_remote_code)
    if config.train == "full" and multimodal.is_multimodal(model.config):
        raise ModelError(
            f"model.train=full contradicts model.path={config.path}: model_type="
            f"{model.config.model_type} also reads images, and the part that reads them is not "
            "loaded and would be missing from what is written; train an adapter"
        )
    if (quantized := getattr(model.config, "quantization_config", None)) is not None:
        fields = quantized if isinstance(quantized, dict) else quantized.to_dict()
        head = model.get_output_embeddings()
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
        is_mixture = bool(adapters.expert_weights(model))
        if (reason := nf4.unfit(fields, linear, config.quantize, is_mixture)) is not None:
            raise ModelError(f"model.path={config.path}: {reason}")
    if config.quantize == "nf4":
        nf4.check(model, config.path)
    with reading(config.path, "config"), torch.device("meta"):
        return _policy_over(model, config)  # PEFT wants a linear layer


def meta_base(path: str, trust_remote_code: bool) -> Any:
    """The model without storage and without an adapter. Raises ModelError: it is no causal language
    model."""
    described = read_config(path, trust_remote_code)
    with reading(path, "config"), torch.device("meta"), warnings.catch_warnings():
        # The shapes of the weights show a layer of size 0.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        model = multimodal.auto_class(described).from_config(
            described,
            trust_remote_code=trust_remote_code,
            experts_implementation="batched_mm",  # torch's grouped_mm has no float32 there
        )
        return multimodal.drop_towers(model)


def stored_bytes(path: str, trust_remote_code: bool) -> int:
    """Size of a model's weights on the Hub, towers included. Raises ModelError: its config cannot
    be read."""
    described = read_config(path, trust_remote_code)
    with reading(path, "config"), torch.device("meta"):
        kind = multimodal.auto_class(described)
        whole = kind.from_config(described, trust_remote_code=trust_remote_code)
    dtype = getattr(described, "dtype", None) or torch.bfloat16
    weights: int = sum(parameter.numel() for parameter in whole.parameters())
    return weights * int(dtype.itemsize)


def check_model(config: ModelSection) -> Any:
    """``meta_model``, compared with the headers of the model's weights. Raises ModelError: also
    numbers with which no forward pass is possible, and weights that are missing, cut short or of
    other shapes. A Hub id's weights are left to loading."""
    folder.refuse_adapter(config.path)
    policy = meta_model(config)
    if not config.trust_remote_code:
        _check_pass(config.path, policy)
    shapes = {
        name.replace(".base_layer.", "."): list(tensor.shape)
        for name, tensor in weights.base_of(policy).state_dict().items()
    }
    if not Path(config.path).is_dir():
        return policy
    packs = getattr(policy.config, "quantization_config", None) is not None
    own_name = folder.names_of(weights.base_of(policy))
    for file, stored in folder.stored_shapes(config):
        for name, shape in ((own_name(name), shape) for name, shape in stored.items()):
            # A quantised checkpoint may hold two 4-bit numbers a byte, in a single column.
            is_packed = packs and shape == [-(-math.prod(shapes.get(name, [])) // 2), 1]
            if name in shapes and shapes[name] != shape and not is_packed:
                raise ModelError(
                    f"{file}: {name} is of shape {shape} and config.json makes it {shapes[name]}; "
                    "take weights and config from the same model"
                )
    return policy


@torch.no_grad()
def _check_pass(path: str, policy: Any) -> None:
    """Refuse a config.json with contradictory numbers, by a forward pass on the meta device. If
    Transformers needs values to make its mask, a ready mask of four dimensions is passed.
    ``Model._check_head`` checks what needs values elsewhere."""
    ids_BT = torch.zeros(1, 4, dtype=torch.long, device="meta")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool, device="meta")
    for attention_mask in (None, mask):
        try:
            is_whole = weights.base_of(policy) is policy
            alone = nullcontext() if is_whole else adapters.reference(policy)
            with torch.device("meta"), alone:
                policy(input_ids=ids_BT, attention_mask=attention_mask, use_cache=False)
        except NotImplementedError:
            continue
        except Exception as error:
            if "meta tensor" not in str(error):
                raise _no_pass(path, error) from error
        else:
            return


def _no_pass(path: str, error: BaseException) -> ModelError:
    return ModelError(
        f"model.path={path}: no forward pass is possible with the numbers of its config.json "
        f"({one_line(error)[:300]}); download the model again, or fix that file"
    )


def _load_base(
    config: ModelSection, device: torch.device, attachments: Attachments | None = None
) -> Any:
    dtype = weights_dtype(config, device)
    unpacked = () if attachments is None else (*attachments.modules, "lm_head")
    quantization = nf4.config_for(dtype, unpacked) if config.quantize == "nf4" else None
    folder.refuse_adapter(config.path)
    trusted = config.trust_remote_code
    described = positions.extend(read_config(config.path, trusted), config.context_tokens)
    attention = shared_weights.attention_for(described, config.attention)
    with reading(config.path, "weights"):
        kind = multimodal.text_class if attachments is None else multimodal.auto_class
        base, report = kind(described).from_pretrained(
            config.path,
            config=described,
            dtype=dtype,
            use_safetensors=True,  # pickled weights could run code
            trust_remote_code=trusted,
            output_loading_info=True,
            quantization_config=quantization,
            device_map={"": device},
            attn_implementation=attention,
        )
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"model.path={config.path}: its weights lack {len(missing)} tensors, "
            f"{missing[0]} among them; save it whole"
        )
    nf4.keep_layouts(base, dtype)
    return base


def _disable_dropout(base: Any) -> None:
    """Switch off the base's own dropout, such as GPT-2's, with which the learner would differ from
    the sampler. The adapter's dropout is model.adapter.dropout."""
    for holder in (*base.modules(), base.config.get_text_config(decoder=True)):  # Falcon reads that
        if isinstance(holder, nn.Dropout):
            holder.p = 0.0
        for name, value in vars(holder).items():
            if "drop" in name and isinstance(value, float):
                setattr(holder, name, 0.0)
