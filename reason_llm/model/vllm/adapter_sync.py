"""Copying of the policy's LoRA adapter into vLLM's adapter slot, in place: its tensors' addresses
never change, so vLLM's CUDA graphs see the new values.

Read against vLLM 0.32.0: vllm/lora/worker_manager.py, vllm/lora/model_manager.py,
vllm/lora/layers/base_linear.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from reason_llm.errors import ModelError
from reason_llm.model.vllm.engine import Engine
from reason_llm.model.vllm.shared_weights import names_in_vllm, vllm_names

LORA_ID = 1


class AdapterSync:
    """Writes the policy's adapter into vLLM's slot. Nothing moves without an adapter: where the
    learner trains vLLM's own weights, or the adapter is folded into them."""

    def __init__(self, engine: Engine, policy: Any) -> None:
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights
        from vllm.lora.request import LoRARequest

        self.engine = engine
        self.request, self._pairs = None, list[Any]()
        if isinstance(policy, PeftModel):
            self.request = LoRARequest("policy", LORA_ID, "mem://policy")
            rpc = engine.llm.collective_rpc(lambda worker: worker.model_runner.lora_manager)
            manager, r = rpc[0]._adapter_manager, policy.peft_config["default"].r
            # Registered once, from memory, so that it has a slot: of zeros so far.
            empty = LoRALayerWeights("no layer", r, r, torch.zeros(r, 1), torch.zeros(1, r))
            manager.add_adapter(LoRAModel(LORA_ID, r, {empty.module_name: empty}))
            manager.activate_adapter(LORA_ID)
            self._pairs = _pair_up(manager, policy, vllm_names(engine.module))

    @torch.no_grad()
    def __call__(self) -> None:
        """Copy the policy's adapter into vLLM and drop cached prefixes of the old one."""
        for a, b, ours_a, ours_b, rows, scaling in self._pairs:
            a.copy_(ours_a)
            b.copy_(ours_b[rows] * scaling)
        if not self.engine.llm.reset_prefix_cache():
            raise ModelError("vLLM keeps cached prefixes of the old policy: a request is running")

    def close(self) -> None:
        """Free vLLM's slots."""
        self._pairs.clear()


def _pair_up(
    theirs: Any, policy: PeftModel, named: Callable[[str], str]
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, slice, float]]:
    """(their A, their B, our A, our B, rows of our B, scaling) for every adapted layer. What is one
    layer here may be several slices there, such as GLM 4's gate and up, or q, k and v of Qwen3.5's
    recurrent layers. ``named`` gives vLLM's names. Raises ModelError: a layer of ours that vLLM
    does not adapt."""
    slot = theirs.lora_index_to_id.index(LORA_ID)
    base = policy.get_base_model()
    rows_of = {
        named(name): module.out_features
        for name, module in base.named_modules()
        if hasattr(module, "out_features")
    }
    ours = {
        named(name.removeprefix("base_model.model.")): module
        for name, module in policy.named_modules()
        if isinstance(module, LoraLayer)
    }
    renamed = {other: name for name in ours for other in names_in_vllm(name)}
    pairs, left = [], set(ours)
    for name, module in theirs.modules.items():
        parts = [renamed.get(part, part) for part in theirs.packed_modules.get(name, [name])]
        part, start = "", 0
        for index, their_b in enumerate(module.lora_b_stacked):
            if start >= rows_of.get(part, 0) and part != name:  # the next of our layers
                part, start = name if name in ours or not parts else parts.pop(0), 0
            end = start + their_b.shape[2]
            if part in ours:
                layer = ours[part]
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                their_a = module.lora_a_stacked[index][slot, 0, : len(a), :]
                rows, scaling = slice(start, end), float(layer.scaling["default"])
                pairs.append((their_a, their_b[slot, 0, :, : len(a)], a, b, rows, scaling))
                left.discard(part)
            start = end
    if left:
        raise ModelError(f"vLLM does not adapt {sorted(left)[0]}; leave it out of the targets")
    return pairs
