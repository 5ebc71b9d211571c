"""Copying of the policy's LoRA adapter into vLLM's adapter slot, in place: no disk, no merge.

vLLM reads the slot's tensors, whose addresses never change, so its CUDA graphs see the new values.

Read against vLLM 0.31.0: vllm/lora/worker_manager.py, vllm/lora/model_manager.py,
vllm/lora/layers/base_linear.py.
"""

from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

from reason_llm.errors import ModelError
from reason_llm.model.vllm.engine import Engine
from reason_llm.model.vllm.shared_weights import names_in_vllm

LORA_ID = 1


class AdapterSync:
    """Writes the policy's adapter into vLLM's slot, in place: two small copies for each layer."""

    def __init__(self, engine: Engine, policy: PeftModel) -> None:
        from vllm.lora.request import LoRARequest

        self.engine = engine
        self.request = LoRARequest("policy", LORA_ID, "mem://policy")
        manager = engine.llm.collective_rpc(lambda worker: worker.model_runner.lora_manager)[0]
        _register(manager, policy.peft_config["default"].r)
        self._pairs = _pair_up(manager._adapter_manager, policy)

    @torch.no_grad()
    def __call__(self) -> None:
        """Copy the policy's adapter into vLLM and drop cached prefixes of the old one."""
        for a, b, ours_a, ours_b, rows, scaling in self._pairs:
            a.copy_(ours_a)
            b.copy_(ours_b[rows] * scaling)
        _forget_prefixes(self.engine)

    def close(self) -> None:
        """Free vLLM's slots."""
        self._pairs.clear()


class InPlace:
    """In the place of a copy where the learner trains vLLM's own weights: nothing moves."""

    request = None

    def __init__(self, engine: Engine, policy: Any) -> None:
        self.engine = engine

    def __call__(self) -> None:
        """Drop cached prefixes of the old weights."""
        _forget_prefixes(self.engine)

    def close(self) -> None:
        """Nothing is held."""


def _forget_prefixes(engine: Engine) -> None:
    if not engine.llm.reset_prefix_cache():
        raise ModelError("vLLM keeps cached prefixes of the old policy: a request is running")


def _register(manager: Any, rank: int) -> None:
    """Register an adapter with vLLM once, from memory, so that it has a slot: of zeros so far."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    empty = LoRALayerWeights("no layer", rank, rank, torch.zeros(rank, 1), torch.zeros(1, rank))
    manager._adapter_manager.add_adapter(LoRAModel(LORA_ID, rank, {empty.module_name: empty}))
    manager._adapter_manager.activate_adapter(LORA_ID)


def _pair_up(
    theirs: Any, policy: PeftModel
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, slice, float]]:
    """(their A, their B, our A, our B, rows of our B, scaling) for every adapted layer. What is one
    layer here may be several there, such as GLM 4's gate and up.

    Raises:
        ModelError: a layer of ours that vLLM does not adapt.
    """
    slot = theirs.lora_index_to_id.index(LORA_ID)
    ours = {
        name.removeprefix("base_model.model."): module
        for name, module in policy.named_modules()
        if isinstance(module, LoraLayer)
    }
    renamed = {other: name for name in ours for other in names_in_vllm(name)}
    pairs, left = [], set(ours)
    for name, module in theirs.modules.items():
        end = 0
        for index, part in enumerate(theirs.packed_modules.get(name, [name])):
            part = renamed.get(part, part)
            rows = slice(None)
            if part not in ours and name in ours:
                start, end = end, end + module.output_slices[index]
                part, rows = name, slice(start, end)
            if part in ours:
                layer = ours[part]
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                rank = a.shape[0]
                pairs.append(
                    (
                        module.lora_a_stacked[index][slot, 0, :rank, :],
                        module.lora_b_stacked[index][slot, 0, :, :rank],
                        a,
                        b,
                        rows,
                        float(layer.scaling["default"]),
                    )
                )
                left.discard(part)
    if left:
        raise ModelError(f"vLLM does not adapt {sorted(left)[0]}; leave it out of the targets")
    return pairs
