"""The memory plan from a model's config alone, without PyTorch where its shape is counted by
``outline``."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from reason_llm.config import Config, ModelSection, installation
from reason_llm.errors import ModelError, ReasonError
from reason_llm.files import cached
from reason_llm.model import folder
from reason_llm.model.plan import bound, memory
from reason_llm.model.plan.bound import OutsideModel
from reason_llm.model.plan.machine import Machine, may_have_gpu
from reason_llm.model.plan.memory import Plan, element_bytes
from reason_llm.model.plan.outline import outline
from reason_llm.model.plan.shape import Shape
from reason_llm.model.plan.shipped import converted, known, write_config
from reason_llm.model.sizes import chunk_bytes

WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Names of a model's weights, or of their list, on the Hub."""


MXFP4_BYTES = 17 / 32
"""Bytes of an expert's weight in MXFP4: 4 bits, and 8 bits of scale for every 32 weights."""
LEAST_PROMPT_TOKENS = 64
"""Room for a prompt below which a plan, which reads no data, warns."""


def _paths(config: Config) -> dict[str, str]:
    """The paths of all models by the options that name them."""
    others = {f"{name}.model": section.path for name, section in config.reader_models.items()}
    return {"model.path": config.model.path, **others}


def _with_copies(config: Config) -> tuple[Config, dict[str, str]]:
    """The config with the copy in bfloat16 in the place of each known model in MXFP4, and the names
    that were asked for by those of the copies; a line says how to make one that is not there."""
    options, copies = _paths(config), dict[str, str]()
    for option, path in options.items():
        if (copy := converted(path)) is None:
            continue
        copies[option] = copy
        if not Path(copy).is_dir():
            export = installation.command("export")
            size = _stored_bytes(ModelSection(path=copy))
            folder.say(
                f"{option}={path} is in MXFP4 and is planned as its copy in bfloat16, which a run "
                f"needs: {export} {known(path)} --out {copy} writes it once, {size / 1e9:.1f} GB"
            )
    return config.with_options(copies), {copy: options[option] for option, copy in copies.items()}


def plan_only(config: Config) -> Plan:
    """The memory plan from the model's config alone, on any machine: for a GPU of
    ``memory.budget_gib`` with vLLM, or for this machine. An adapter that an earlier run has yet to
    write counts as the policy's kind. A model of ``SHAPES`` is planned without the Hub, too, and
    one in MXFP4 as the copy in bfloat16 that a run needs. The plan has the sizes of what a run
    would download.
    """
    config, copies = _with_copies(config)
    try:
        plan = _of_readable(config)
    except ReasonError as error:
        text = str(error)
        for copy, asked in copies.items():
            text = text.replace(copy, asked)
        raise type(error)(text) from error
    left = plan.context_tokens - config.sample.max_new_tokens
    if config.samples and config.model.context_tokens and left < LEAST_PROMPT_TOKENS:
        folder.say(
            f"sample.max_new_tokens={config.sample.max_new_tokens} leaves {left} tokens of "
            f"model.context_tokens={plan.context_tokens} for a prompt; the plan reads no data, and "
            "a run ends at a longer prompt unless data.max_prompt_tokens leaves it out"
        )
    missing = {copy: known(asked) for copy, asked in copies.items() if not Path(copy).is_dir()}
    packed = [
        (str(name), _packed_bytes(ModelSection(path=copy)))
        for copy, name in missing.items()
        if not any(cached(str(name), file) for file in WEIGHTS)
    ]
    copied = sum(_stored_bytes(ModelSection(path=copy)) for copy in missing)
    return replace(plan, downloads=(*packed, *plan.downloads), copies_bytes=copied)


def _of_readable(config: Config) -> Plan:
    """The plan of a config without models in MXFP4."""
    options, sections = _paths(config), [config.model, *config.reader_models.values()]
    plain = [found is not None and found.context_tokens <= found.positions
             for found in map(outline, sections)]  # fmt: skip
    if all(plain) and not (config.model.start and config.model.start.exists()):
        return replace(_plan_only(config), downloads=_downloads(config, config))
    made: dict[str, str] = {}
    with ExitStack() as folders:
        for option, path in options.items():
            if Path(path).is_dir() or cached(path, "config.json"):
                continue
            if (name := known(path)) is not None:
                made[option] = folders.enter_context(TemporaryDirectory())
                write_config(name, Path(made[option]))

        def original(text: str) -> str:
            for option, folder in made.items():
                text = text.replace(folder, options[option])
            return text

        folders.enter_context(_warnings_through(original))
        try:
            readable = config.with_options(made)
            plan = _plan_only(readable)
            return replace(plan, downloads=_downloads(config, readable))
        except ReasonError as error:
            raise type(error)(original(str(error))) from error


@contextmanager
def _warnings_through(change: Callable[[str], str]) -> Iterator[None]:
    """Context in which the warnings of ``model.folder.say`` are changed."""

    def changed(record: logging.LogRecord) -> bool:
        record.msg, record.args = change(record.getMessage()), ()
        return True

    logger = logging.getLogger("reason_llm.model.folder")
    logger.addFilter(changed)
    try:
        yield
    finally:
        logger.removeFilter(changed)


def _plan_only(config: Config) -> Plan:
    start = config.model.start
    if start is not None and start.exists():
        config = import_module("reason_llm.model.plan.subject").with_start(config, start)
    found = outline(config.model, config.model.attention)
    device = "cpu"
    if config.memory.budget_gib == "auto" and may_have_gpu():
        device = _base().default_device().type
    machine = Machine.imagined(config, device)
    if not config.judges_answers:
        config = config.with_options({"sample.engine": "transformers"})
    elif config.sample.engine != "transformers":
        on_gpu = machine.kind == "cuda" and config.model.dtype != "float32"
        can_share = found is not None or _fits_vllm(config)
        engine = "vllm" if on_gpu and can_share else "transformers"
        if config.sample.engine == "auto":
            config = config.with_options({"sample.engine": engine})
    shape = shape_of(config.model, config.model.attention)
    limit = context_limit(config.model)
    models = [*outside_models(config, machine)]
    return memory.plan(config, shape, machine, limit, learns=config.learns, outside=models)


def _downloads(config: Config, readable: Config) -> tuple[tuple[str, int], ...]:
    """Names and bytes of the models whose weights a run would download; ``readable`` is the same
    config, with a folder for each model of ``SHAPES``."""
    asked_for = [config.model, *config.reader_models.values()]
    return tuple(
        (asked.path, _stored_bytes(section))
        for asked, section in zip(
            asked_for, [readable.model, *readable.reader_models.values()], strict=True
        )
        if not Path(asked.path).is_dir() and asked.path.count("/") == 1
        if not asked.path.startswith("model/")
        if not any(cached(asked.path, name) for name in WEIGHTS)
    )


def _stored_bytes(section: ModelSection) -> int:
    if (found := outline(section)) is not None and found.stored_bytes is not None:
        return found.stored_bytes
    return int(_base().stored_bytes(section.path, section.trust_remote_code))


def _packed_bytes(copy: ModelSection) -> int:
    """Bytes of the model in MXFP4 of which this is the copy in bfloat16: its experts are packed."""
    experts = shape_of(copy).experts
    return int(_stored_bytes(copy) - 2 * experts + MXFP4_BYTES * experts)


def context_limit(section: ModelSection) -> int:
    """Longest prompt plus completion in tokens; where it exceeds the model's positions, with one
    line that says so. Raises ModelError: as ``base.context_limit``."""
    found = outline(section)
    if found is not None and found.context_tokens <= found.positions:
        return found.context_tokens
    return int(_base().context_limit(section))


def shape_of(section: ModelSection, attention: str = "auto") -> Shape:
    """The shape of a model with what is trained, by its config.json or, built without storage, on
    itself. Raises ModelError: as ``base.meta_model``."""
    if (found := outline(section, attention)) is not None:
        if found.note is not None:
            folder.say(found.note)
        return found.shape
    return Shape.of(_base().meta_model(section), attention)


def _base() -> Any:
    """The module that reads models by Transformers, which is slow to import."""
    import_module("reason_llm.model.tokenizer").quiet_libraries()
    return import_module("reason_llm.model.base")


def _fits_vllm(config: Config) -> bool:
    described = _base().read_config(config.model.path, config.model.trust_remote_code)
    backends = import_module("reason_llm.model.plan.backends")
    why_not = backends.unfit_for_vllm(config, described)
    if why_not is not None and config.sample.engine == "vllm":
        raise backends.contradiction(why_not)
    return why_not is None


def outside_models(config: Config, machine: Machine) -> Iterator[OutsideModel]:
    """Readers with separate weights. Raises ModelError: as ``shape_of``."""
    for reader, folders in config.classifiers.items():
        for key, path in folders.items():
            yield _classifier(f"{reader.replace('_', ' ')} {key}", path)
    for name, section in config.reader_models.items():
        with naming_section(name):
            shape = shape_of(section)
        kinds = [section.quantize]
        if kinds == ["none"] and machine.kind == "cuda" and shape.can_pack:
            kinds.append("nf4")
        found, *packed = (
            _like_the_base(name, kind, shape, element_bytes(config, machine, kind))
            for kind in kinds
        )
        yield replace(found, packed=packed[0] if packed else None)


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
