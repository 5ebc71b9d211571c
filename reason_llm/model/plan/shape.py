"""Sizes of a model and its adapter, counted on the model itself, built without storage."""

from dataclasses import dataclass
from typing import Any

from reason_llm.model.plan.states import NO_STATES, States, cache_of
from reason_llm.model.sizes import max_keys, packed_bytes


@dataclass(frozen=True, slots=True)
class Kept:
    """Values that autograd keeps per token and layer, fitted to torch's allocations."""

    intermediate: float = 4.0
    """Vectors of the MLP's width."""
    hidden: float = 6.0
    """Vectors of the model's width."""
    in_tiles: float = 2.0
    """More vectors of the model's width, where the feed-forward passes in tiles; 2 where it was not
    measured."""
    score_elements: float = 0.0
    """Elements that each attention score costs, in the base's type."""
    score_bytes: float = 0.0
    passing_score_bytes: float = 0.0
    """Bytes per score of one layer while its gradient is computed."""

    @property
    def has_scores(self) -> bool:
        """Whether all attention scores are kept."""
        return self.score_bytes + self.score_elements > 0


EAGER = Kept(score_bytes=12.0, passing_score_bytes=2.0)
"""Families that store all attention scores and were not measured."""
KEPT = {
    **dict.fromkeys(("llama", "mistral", "qwen2"), Kept(in_tiles=0.0)),
    "gpt2": Kept(intermediate=5.0),
    "opt": Kept(intermediate=1.0, hidden=5.0),
    "bloom": Kept(intermediate=1.0, score_bytes=4.0, passing_score_bytes=12.0),
    "falcon": Kept(intermediate=1.0, score_bytes=4.0, passing_score_bytes=8.0),
    "gpt_oss": Kept(score_elements=1.5, passing_score_bytes=3.0),
    "gptj": Kept(score_elements=1.0, passing_score_bytes=2.0),
}
"""Kept values by model_type, where they differ (``tests/model/plan/test_memory.py``)."""


def kept_by(family: str, is_eager: bool) -> Kept:
    """The values of a family, with eager attention or its usual one."""
    kept = KEPT.get(family, Kept())
    return EAGER if is_eager and not kept.has_scores else kept


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that memory depends on. Counts of elements unless said otherwise."""

    layers: int
    hidden: int
    intermediate: int
    query: int
    """Query heads times their size, in the layer with the largest heads."""
    key_value: int
    """Key heads times their size, likewise."""
    cached: int
    """Elements of the keys of one token in all layers that have a cache."""
    attention_layers: int
    """Layers that have keys, their own or an earlier layer's."""
    heads: int
    vocabulary: int
    packable: tuple[int, ...]
    """Weights of each linear layer but the head, which NF4 packs."""
    dense: int
    """All other base parameters, which are no inner matrix; tied ones count once."""
    adapter: int
    """Parameters of the adapter; 0 without one."""
    trained: int
    """Trained parameters: the adapter's, or those of the base."""
    largest: int
    """The largest of them."""
    adapter_lines: int
    """Inputs and outputs of all adapted layers: a rank more costs so many parameters."""
    adapted: tuple[str, ...]
    """Last names of the adapted layers."""
    adapter_outputs: int
    """Sum of the ranks over the adapted layers of one decoder layer."""
    adapted_experts: int
    """Elements of the adapted experts' weights in a layer, which PEFT merges for every pass."""
    kept: Kept
    has_softcap: bool
    """The logits are soft-capped."""
    experts: int = 0
    """Elements of the weights of all experts."""
    active_experts: int = 0
    """Those of the experts that one token passes."""
    routed: int = 0
    """Experts of all routers together."""
    untiled: bool = False
    """Whether feed-forwards do not pass backward in tiles (``recompute``)."""
    states: States = NO_STATES
    """Of layers that keep a state in place of keys."""
    windows: tuple[tuple[int, int], ...] = ()
    """Elements of a token's keys and the window in tokens of each layer that has a window."""

    @classmethod
    def of(cls, policy: Any, attention: str = "auto") -> "Shape":
        """Shape of a model with what is trained, which may be on the meta device.

        Args:
            attention: ``model.attention``.
        """
        from peft.tuners.lora import LoraLayer
        from peft.tuners.lora.layer import ParamWrapper
        from torch import nn

        from reason_llm.model import adapters, nf4, recompute, weights
        from reason_llm.model.attention import head_size, layer_configs
        from reason_llm.model.routing import routers
        from reason_llm.model.vllm.shared_weights import attention_for

        # Counted on the modules, not read from the config: families name their sizes differently,
        # and the adapter is part of the count.
        base: Any = weights.base_of(policy)
        is_full = base is policy
        config = base.config.get_text_config(decoder=True)
        head = base.get_output_embeddings()
        lora = {n: m for n, m in base.named_modules() if isinstance(m, LoraLayer)}
        linear = {
            id(m.weight): m.weight.numel()
            for m in base.modules()
            if nf4.can_pack(m)
            and m.weight is not head.weight
            and (is_full or not m.weight.requires_grad)
        }
        trained = [p for p in base.parameters() if p.requires_grad]
        own = {id(p): p.numel() for p in base.parameters() if is_full or not p.requires_grad}
        heads = config.num_attention_heads
        layers = layer_configs(config)
        query = max(heads * head_size(layer) for layer in layers)
        key_heads = getattr(layers[0], "num_key_value_heads", None)
        size_of_keys = key_heads * head_size(layers[0]) if key_heads else query
        cache = cache_of(base) or [(size_of_keys, 0, 0, 0)] * len(layers)
        keys, states, inputs = ([each[i] for each in cache if each[i]] for i in range(3))
        held = kept_by(config.model_type, attention_for(config, attention) == "eager")
        rank = sum(m.r["default"] for m in lora.values())
        drops = any(type(m) is nn.Dropout for each in lora.values() for m in each.modules())
        experts = adapters.expert_weights(base).values()
        asked = config.num_experts_per_tok if experts else 0
        wrapped = [m for m in lora.values() if isinstance(m, ParamWrapper)]
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=_widest_input(base, config),
            query=query,
            key_value=max(keys, default=0),
            cached=sum(keys),
            attention_layers=len(layers) - len(cache) + len(keys),
            heads=heads,
            vocabulary=head.weight.shape[0],
            packable=tuple(linear.values()),
            dense=sum(own.values()) - sum(linear.values()),
            adapter=0 if is_full else sum(p.numel() for p in trained),
            trained=sum(p.numel() for p in trained),
            largest=max(p.numel() for p in trained),
            adapter_lines=sum(_lines(m) for m in lora.values()),
            adapted=tuple(sorted({n.rpartition(".")[2] for n in lora if lora[n] not in wrapped})),
            adapter_outputs=rank // config.num_hidden_layers,
            adapted_experts=sum(m.get_param().numel() for m in wrapped) // config.num_hidden_layers,
            kept=held,
            has_softcap=getattr(config, "final_logit_softcapping", None) is not None,
            experts=sum(each.numel() for each in experts),
            active_experts=asked * sum(each[0].numel() for each in experts),
            routed=sum(router.num_experts for router in routers(base)),
            untiled=held.has_scores or drops or not recompute.has_tiles(base.get_decoder()),
            states=States(max(len(states), len(inputs)), sum(states), sum(inputs)),
            windows=tuple((each[0], each[3]) for each in cache if each[3]),
        )

    @property
    def can_pack(self) -> bool:
        """Whether NF4 packs the base: ``nf4.check`` refuses mixtures and layers of other kinds."""
        return bool(self.packable) and not self.experts

    def weight_bytes(self, element_bytes: int, quantize: str, under_vllm: bool) -> int:
        """Bytes of the base weights in memory."""
        if quantize == "none":
            return (sum(self.packable) + self.dense) * element_bytes
        packed = sum(packed_bytes(count, nested=not under_vllm) for count in self.packable)
        return packed + self.dense * element_bytes

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of keys and values of one token in all layers that have them."""
        return 2 * self.cached * element_bytes

    def key_elements(self, tokens: float, more: int = 0) -> float:
        """Elements of the keys of so many tokens in the cache, which of a layer with a window holds
        the window and so many ``more``."""
        in_windows = sum(size * min(tokens, window + more) for size, window in self.windows)
        return (self.cached - sum(size for size, _ in self.windows)) * tokens + in_windows

    def read_elements(self, tokens: int) -> float:
        """Elements of the keys that so many decoded tokens read, of those before them."""
        all_of_them = tokens**2 / 2
        beyond = (size * max(0, tokens - window) ** 2 / 2 for size, window in self.windows)
        return self.cached * all_of_them - sum(beyond)

    def activation_bytes(
        self,
        tokens: int,
        row_tokens: int,
        element_bytes: int,
        checkpointing: bool | str,
        is_packed: bool = False,
        is_flash: bool = False,
        tile_tokens: int | None = None,
        skip_every: int = 0,
    ) -> int:
        """Peak bytes of a forward and backward pass over so many tokens, fitted to what torch
        allocates with LoRA on every linear layer (``tests/model/plan/test_memory.py``).

        Args:
            row_tokens: of the longest row, for attention that holds all its scores.
            checkpointing: ``train.gradient_checkpointing``.
            is_packed: a shared prompt's keys and values are copied for its completions.
            is_flash: FlashAttention 2's backward pass makes the gradients of keys and values for
                every query head, and sums the queries' in float32. Read, not measured.
            tile_tokens: of a tile of feed-forwards, where they have any.
            skip_every: of so many layers one keeps no input; 0: all keep theirs.
        """
        held, size = self.kept, element_bytes
        keys = max_keys(tokens) / tokens if is_packed else 1
        gathered = 2 * keys * self.key_value if is_packed else 0
        attention = 2 * self.query + 2 * self.key_value + self.adapter_outputs + gathered
        heads = 2 * keys * (self.query + self.key_value) + 3 * self.query if is_flash else 0
        # In flight: gradients of a layer's widest vectors, and hidden states at both ends.
        in_tiles = tile_tokens is not None and tile_tokens < tokens and not self.untiled
        if in_tiles and checkpointing:
            wide = (held.intermediate + 1) * self.intermediate * (tile_tokens or 0) / tokens
            if not is_flash:  # keys and values, and their gradients, for every query head
                attention += 0 if is_packed else 2 * (self.query - self.key_value)
                heads = 4 * self.query + 2.5 * gathered
            one_layer = (attention + (1 + held.in_tiles) * self.hidden) * size
            one_layer += 1.5 * self.hidden if size < 4 else 0
            passing = max(4 * self.hidden + wide, self.hidden + heads) * size
        else:
            one_layer = (
                attention + held.intermediate * self.intermediate + held.hidden * self.hidden
            )
            one_layer = one_layer * size + (8 * self.hidden if size < 4 else 0)  # norms in float32
            passing = 1.5 * self.intermediate + 3 * self.hidden
            # The vectors between gate, up and down are gone by then.
            passing = max(passing, heads and heads + 3 * self.hidden - 4 * self.intermediate) * size
        scores = self.heads * row_tokens
        one_layer += (held.score_elements * size + held.score_bytes) * scores
        passing += held.passing_score_bytes * scores
        merged = self.adapted_experts * size
        if not checkpointing:
            kept = self.layers * one_layer
        elif checkpointing == "offload":
            kept = one_layer
        else:
            kept = self.kept_bytes_per_token(size, skip_every) + one_layer
        merged *= 3 if checkpointing else self.layers + 2  # with a gradient, and their sum
        return int(tokens * (kept + passing)) + merged

    def kept_bytes_per_token(self, element_bytes: int, skip_every: int = 0) -> int:
        """Bytes per token of the layers' inputs, which gradient checkpointing keeps."""
        inputs = self.layers
        if skip_every:
            inputs += 1 - self.layers // skip_every  # one is computed again
        return inputs * self.hidden * element_bytes

    def pinned_bytes(self, tokens: int, element_bytes: int) -> int:
        """Bytes of the same for so many tokens in pinned host memory, which torch hands out in
        blocks of a power of two."""
        block = tokens * self.hidden * element_bytes
        return self.layers * (1 << (block - 1).bit_length())


def _lines(layer: Any) -> int:
    """Inputs and outputs of an adapted layer, of all its experts."""
    from peft.tuners.lora.layer import ParamWrapper

    experts = layer.num_experts if isinstance(layer, ParamWrapper) else 1
    return int(experts * (layer.in_features + layer.out_features))


def _widest_input(base: Any, config: Any) -> int:
    """Inputs of the decoder's widest linear layer, which is the down projection in every family; of
    a mixture those of all experts of one token."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    from reason_llm.model import adapters

    head = base.get_output_embeddings()
    weights = [
        (module.in_features if hasattr(module, "in_features") else module.weight.shape[0])
        for module in base.modules()
        if isinstance(module, (*adapters.LINEAR, LoraLayer))
        and not isinstance(module, ParamWrapper)
        and module.weight is not head.weight
    ]
    for name, parameter in adapters.expert_weights(base).items():
        if name.endswith("down_proj"):
            sizes = sorted(parameter.shape[1:], key=lambda size: size == config.hidden_size)
            weights.append(config.num_experts_per_tok * sizes[0])
    return max(weights)
