"""The date that chat templates read with ``strftime_now``: decided once, at a run's first start, so
that its prompts are the same on later days."""

from contextlib import suppress
from pathlib import Path

from reason_llm.config import Config
from reason_llm.data import Renderer, reads_date, today
from reason_llm.errors import RolloutBufferError
from reason_llm.files import MIB, read_text
from reason_llm.run.store import checkpoint
from reason_llm.run.store.document import read_document

TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")
"""Files of a model's folder that may hold its chat template."""


def with_date(config: Config, renderer: Renderer, buffer: Path) -> Config:
    """The config in which ``data.date`` is that of the run's record (of a run without a folder its
    ``buffer``) or, where a template reads the date in a new run, that of the run it begins from, or
    today's."""
    run, date = config.run, config.data.date
    goes_on = run.resume != "never"
    if date is None and goes_on:
        date = checkpoint.date_of(run.directory / str(run.name))
    if date is None and reads_date_in(config, renderer):
        date = _date_in_buffer(buffer, str(run.name)) if goes_on else None
        begins_from = [Path(run.resume)] if run.resume not in ("auto", "never") else []
        begins_from += [config.model.start.parent] if config.model.start is not None else []
        dates = [checkpoint.date_of(each) for each in begins_from]
        date = date or next(filter(None, dates), None) or today()
    return config.with_options({"data.date": date})


def reads_date_in(config: Config, renderer: Renderer) -> bool:
    """Whether the template of the prompts or that of a separate reward model reads the date."""
    texts: list[object] = [renderer.template.jinja or renderer.tokenizer.chat_template]
    for options in config.score.by_readers.values():
        for name in TEMPLATE_FILES if options.is_outside else ():
            with suppress(OSError, UnicodeDecodeError):  # the reader of the model reports it
                texts.append(read_text(options.path / name, 64 * MIB))
    return any(map(reads_date, texts))


def _date_in_buffer(path: Path, name: str) -> str | None:
    if not path.exists():
        return None
    try:
        document = read_document(path)
    except RolloutBufferError:  # reported when the rollouts are read
        return None
    return checkpoint.date_in(document.run.config) if document.run.name == name else None
