"""The memory plan from a model's config alone, without PyTorch where its shape is counted by
``outline``."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from reason_llm.config import Config, ModelSection
from reason_llm.errors import ConfigError, ModelError
from reason_llm.files import cached
from reason_llm.model import folder
from reason_llm.model.plan import bound, memory
from reason_llm.model.plan.bound import OutsideModel
from reason_llm.model.plan.machine import Machine, may_have_gpu
from reason_llm.model.plan.memory import Plan, element_bytes
from reason_llm.model.plan.outline import outline
from reason_llm.model.plan.shape import Shape
from reason_llm.model.sizes import chunk_bytes

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Names of a model's weights, or of their list, on the Hub."""
NO_VLLM = (
    "{} contradicts sample.engine=vllm, which needs safetensors of a model that it knows, and no "
    "adapter on head or experts; set sample.engine to transformers"
)
"""Error, after its reason."""


def plan_only(config: Config) -> Plan:
    """The memory plan from the model's config alone, on any machine: for a GPU of
    ``memory.budget_gib`` with vLLM, or for this machine. An adapter that an earlier run has yet to
    write counts as the policy's kind. A model of ``SHAPES`` is planned without the Hub, too. The
    plan has the sizes of what a run would download.
    """
    start = config.model.start
    if start is not None and start.exists():
        config = import_module("reason_llm.model.plan.subject").with_start(config, start)
    device = "cpu"
    if config.memory.budget_gib == "auto" and may_have_gpu():
        device = _base().default_device().type
    machine = Machine.imagined(config, device)
    if not config.judges_answers:
        config = config.with_options({"sample.engine": "transformers"})
    elif config.sample.engine != "transformers":
        on_gpu = machine.kind == "cuda" and config.model.dtype != "float32"
        can_share = _fits_vllm(config)
        engine = "vllm" if on_gpu and can_share else "transformers"
        if config.sample.engine == "auto":
            config = config.with_options({"sample.engine": engine})
    shape = shape_of(config.model, config.model.attention)
    limit = context_limit(config.model)
    models = [*outside_models(config, machine)]
    plan = memory.plan(config, shape, machine, limit, learns=config.learns, outside=models)
    sections = [config.model, *config.reader_models.values()]
    downloads = tuple(
        (section.path, _stored_bytes(section))
        for section in sections
        if not Path(section.path).is_dir() and section.path.count("/") == 1
        if not section.path.startswith("model/")
        if not any(cached(section.path, name) for name in WEIGHTS)
    )
    return replace(plan, downloads=downloads)


def _stored_bytes(section: ModelSection) -> int:
    if (found := outline(section)) is not None and found.stored_bytes is not None:
        return found.stored_bytes
    return int(_base().stored_bytes(section.path, section.trust_remote_code))


def context_limit(section: ModelSection) -> int:
    """Longest prompt plus completion in tokens. Raises ModelError: as ``base.context_limit``."""
    found = outline(section)
    return int(_base().context_limit(section)) if found is None else found.context_tokens


def shape_of(section: ModelSection, attention: str = "auto") -> Shape:
    """The shape of a model with what is trained, by its config.json or, built without storage, on
    itself. Raises ModelError: as ``base.meta_model``."""
    if (found := outline(section, attention)) is not None:
        for note in found.notes:
            folder.say(note)
        return found.shape
    return Shape.of(_base().meta_model(section), attention)


def _base() -> Any:
    """The module that reads models by Transformers, which is slow to import."""
    import_module("reason_llm.model.tokenizer").quiet_libraries()
    return import_module("reason_llm.model.base")


def _fits_vllm(config: Config) -> bool:
    if (found := outline(config.model, config.model.attention)) is not None:
        why_not = found.without_vllm
    else:
        described = _base().read_config(config.model.path, config.model.trust_remote_code)
        backends = import_module("reason_llm.model.plan.backends")
        why_not = backends.unfit_for_vllm(config, described)
    if why_not is not None and config.sample.engine == "vllm":
        raise ConfigError(NO_VLLM.format(why_not))
    return why_not is None


def outside_models(config: Config, machine: Machine) -> Iterator[OutsideModel]:
    """Readers with separate weights. Raises ModelError: as ``shape_of``."""
    for reader, folders in config.classifiers.items():
        for key, path in folders.items():
            yield _classifier(f"{reader.replace('_', ' ')} {key}", path)
    for name, section in config.reader_models.items():
        with naming_section(name):
            shape = shape_of(section)
        size = element_bytes(config, machine, section.quantize)
        yield _like_the_base(name, section.quantize, shape, size)


def _like_the_base(name: str, kind: str, shape: Shape, size: int) -> OutsideModel:
    def passing_bytes(tokens: int, chunk_tokens: int) -> int:
        chunk = chunk_bytes(shape.vocabulary, size, shape.has_softcap) * chunk_tokens
        widest = max(shape.packable) * 2 * 2 if kind == "nf4" else 0
        return tokens * (4 * shape.intermediate + 8 * shape.hidden) * size + chunk + widest

    return OutsideModel(
        f"{name}{' (NF4)' if kind == 'nf4' else ''}",
        shape.weight_bytes(size, kind, under_vllm=False),
        passing_bytes,
        partial(bound.reading, f"the {name}", kind, shape),
    )


def _classifier(name: str, folder: Path) -> OutsideModel:
    shape = import_module("reason_llm.model.sequence_classifier").look_at(folder)

    def passing_bytes(tokens: int, chunk_tokens: int) -> int:
        return int(shape.passing_bytes_per_token) * tokens

    sizes = shape.passed_weights, shape.query_elements, shape.element_bytes
    phase = partial(bound.classifying, f"the {name}", *sizes)
    return OutsideModel(name, shape.weight_bytes, passing_bytes, phase)


@contextmanager
def naming_section(name: str) -> Iterator[None]:
    """Context in which an error of a model's options names those of this section."""
    try:
        yield
    except ModelError as error:
        text = str(error).replace("model.path=", f"{name}.model=")
        raise ModelError(text.replace("model.quantize", f"{name}.quantize")) from error
