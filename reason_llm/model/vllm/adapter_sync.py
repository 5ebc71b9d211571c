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
from reason_llm.model import adapters
from reason_llm.model.vllm.engine import Engine

LORA_ID = 1


class AdapterSync:
    """Writes the policy's adapter into vLLM's slot, in place: two small copies for each layer."""

    def __init__(self, engine: Engine, policy: PeftModel) -> None:
        from vllm.lora.request import LoRARequest

        self.engine = engine
        self.request = LoRARequest("policy", LORA_ID, "mem://policy")
        manager = engine.llm.collective_rpc(lambda worker: worker.model_runner.lora_manager)[0]
        _register(manager, policy)
        self._pairs = _pair_up(manager._adapter_manager, policy)

    @torch.no_grad()
    def __call__(self) -> None:
        """Copy the policy's adapter into vLLM and drop cached prefixes of the old one."""
        for a, b, ours_a, ours_b, scaling in self._pairs:
            a.copy_(ours_a)
            b.copy_(ours_b * scaling)
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


def _register(manager: Any, policy: PeftModel) -> None:
    """Register the adapter with vLLM once, from memory, so that it has a slot."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    config = policy.peft_config["default"]
    helper = PEFTHelper.from_dict(
        {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "use_rslora": config.use_rslora,
            "target_modules": sorted(config.target_modules),
            "bias": config.bias,
        }
    )
    helper.validate_legal(manager.lora_config)
    dtype = manager.lora_config.lora_dtype
    # A copy: vLLM scales lora_b in place.
    tensors = {
        name: tensor.detach().to(dtype, copy=True)
        for name, tensor in adapters.state(policy).items()
    }
    lora = LoRAModel.from_lora_tensors(
        LORA_ID, tensors, helper, device=str(manager.device), dtype=dtype
    )
    manager._adapter_manager.add_adapter(lora)
    manager._adapter_manager.activate_adapter(LORA_ID)
    lora.loras.clear()  # the slot holds the values now; a request asks only for the id


def _pair_up(theirs: Any, policy: PeftModel) -> list[tuple[Tensor, Tensor, Tensor, Tensor, float]]:
    """(their A, their B, our A, our B, scaling) for every adapted layer.

    Raises:
        ModelError: a layer of ours that vLLM does not adapt.
    """
    slot = theirs.lora_index_to_id.index(LORA_ID)
    ours = {
        name.removeprefix("base_model.model."): module
        for name, module in policy.named_modules()
        if isinstance(module, LoraLayer)
    }
    pairs, left = [], set(ours)
    for name, module in theirs.modules.items():
        for index, part in enumerate(theirs.packed_modules.get(name, [name])):
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
                        float(layer.scaling["default"]),
                    )
                )
                left.discard(part)
    if left:
        raise ModelError(f"vLLM does not adapt {sorted(left)[0]}; leave it out of the targets")
    return pairs
