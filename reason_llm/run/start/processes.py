"""The processes of a run before they start: this one, or those of the package ``replicas``."""

from collections.abc import Sequence
from pathlib import Path

from reason_llm.config import Config
from reason_llm.run.store.buffer import RolloutBuffer, Source
from reason_llm.run.store.document import RunIdentity
from reason_llm.run.store.writer import BackgroundWriter


class Processes:
    """This process alone, which does one thing after the other."""

    is_alone = True

    def buffer(
        self,
        path: Path,
        folder: Path,
        run: RunIdentity,
        sources: Sequence[Source],
        writer: BackgroundWriter,
        discard: bool,
    ) -> RolloutBuffer:
        """The run's buffer; ``folder`` is the run's."""
        return RolloutBuffer(path, run, sources, writer, discard)


def processes_of(config: Config) -> Processes:
    """The processes that the config asks for."""
    if (several := config.run.several()) is None:
        return Processes()
    found: Processes = several.processes_of(config)
    return found
