"""README.md beside a run's adapter: what it is and how it is loaded. The card of an exported model,
with its evaluation, is made by export."""

from reason_llm.config import Config

NAME = "README.md"


def readme(config: Config, step: int, told: str = "") -> bytes:
    """The file of the adapter after ``step`` steps.

    Args:
        told: a sentence on why it was kept.
    """
    method, run, base = config.method, str(config.run.name), config.model.path
    kind = "reward model's adapter and head" if config.of_stage.scores else "LoRA adapter"
    load = (
        "    from peft import PeftModel\n"
        "    from transformers import AutoModelForCausalLM\n\n"
        f"    base = AutoModelForCausalLM.from_pretrained({base!r})\n"
        "    model = PeftModel.from_pretrained(base, THIS_FOLDER)\n"
    )
    text = (
        "---\nlibrary_name: peft\ntags: [reason_llm, lora]\n---\n\n"
        f"# {run}\n\n"
        f"A {kind} over `{base}`, made with reason_llm: {method.name} ({method.idea}), "
        f"after step {step} of {config.run.steps}."
        f"{' ' if told else ''}{told}\n\n"
        f"{load}\n"
        "It computes over the base as that was loaded in training. To have one model without an "
        "adapter, with a card that tells its data and its evaluation, export the run.\n"
    )
    return text.encode()
