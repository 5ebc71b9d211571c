"""Text training of a checkpoint that also reads images: the learner is the checkpoint's whole
class, whose names Transformers, PEFT and vLLM share, without the modules that only images pass
through. Not here: images (``reason_llm.images``), for which those modules are loaded.
"""

import re
from typing import TYPE_CHECKING, Any

from reason_llm.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = (
    *("gemma3", "gemma4", "gemma4_unified", "internvl", "lfm2_vl", "mistral3", "qwen2_5_vl"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_vl", "smolvlm"),
)
"""Families whose text part is trained, by the ``model_type`` of the whole."""
LLAMA4 = "vLLM permutes its weights for its rotary embedding, so that they cannot be shared"
"""Reason why Llama 4 is refused."""


def is_multimodal(config: "PretrainedConfig") -> bool:
    """Whether a config describes a model with a vision tower."""
    return "vision_config" in config.sub_configs


def note(path: str, family: str) -> str:
    """A line on what is trained of a model that also reads images. Raises ModelError: its text part
    cannot be trained."""
    if family not in FAMILIES:
        why = LLAMA4 if family == "llama4" else "its text part was not tried"
        raise ModelError(
            f"model.path={path}: model_type={family} also reads images, and {why}; of such models "
            f"the text part of {', '.join(FAMILIES)} can be trained"
        )
    return (
        f"model.path={path}: model_type={family} also reads images; only its text part is "
        "trained, and its vision tower is loaded only if rows have images"
    )


def auto_class(config: "PretrainedConfig") -> Any:
    """The class of Transformers that loads the whole checkpoint under its own names, where
    AutoModelForCausalLM refuses some of these families and renames the parts of others."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM


def text_class(config: "PretrainedConfig") -> Any:
    """``auto_class``'s class without the modules of ``drop_towers``, whose weights it does not read
    from a checkpoint."""
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForCausalLM

    if not is_multimodal(config):
        return AutoModelForCausalLM
    whole = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]

    def build(self: Any, *arguments: Any, **options: Any) -> None:
        whole.__init__(self, *arguments, **options)
        drop_towers(self)

    # By its name Transformers finds the names that the weights have in a checkpoint.
    return type(whole.__name__, (whole,), {"__init__": build, "__module__": whole.__module__})


def drop_towers(model: Any) -> Any:
    """The model, without the modules that are neither the decoder, nor the head, nor on the way to
    them: vision and audio towers and their projectors."""
    if not is_multimodal(model.config):
        return model
    text_modules = {id(model.get_decoder()), id(model.get_output_embeddings())}
    ends = {name for name, module in model.named_modules() if id(module) in text_modules}
    way = {end.rsplit(".", i)[0] for end in ends for i in range(1, end.count(".") + 1)} | {""}
    for parent in way - ends:
        for child, _ in list(model.get_submodule(parent).named_children()):
            if f"{parent}.{child}".lstrip(".") not in way | ends:
                setattr(model.get_submodule(parent), child, None)
    return model


def excluded_modules(model: Any) -> str | None:
    """PEFT's ``exclude_modules`` for an adapter on the text part: whoever loads it over the whole
    model gets no layers in the towers, some of whose names are the text part's. None for a model of
    text."""
    if not is_multimodal(model.config):
        return None
    decoder = model.get_decoder()
    name = next(name for name, module in model.named_modules() if module is decoder)
    return rf"(?!{re.escape(name)}\.|lm_head$).*"
