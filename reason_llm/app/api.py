"""The commands as functions, for notebooks and programs: ``reason_llm.train(config)``.

They do, write and show what the commands do (``log.console: quiet`` shows warnings alone), raise
what the commands print as one line, and leave logging and standard output as they were.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reason_llm.config import CommandLine, Config, file as config_file

if TYPE_CHECKING:
    from reason_llm.app.export.parity import Parity
    from reason_llm.app.export.reward_model import ScoreParity


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """The config in a YAML file.

    Args:
        overrides: options by dotted names, such as ``{"train.learning_rate": 1e-5}``.

    Raises:
        ConfigError: one line with the key, the value and the fix.
    """
    return config_file.load(Path(path), dict(overrides or {}))


def train(config: Config | Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """Train, or go on where the run stopped; the summary that is also in ``summary.json``.

    Args:
        config: a config, its sections as a dict, or the path of a YAML file. A run without a
            ``run.name`` is called by its file, or "config".

    Raises:
        ReasonError: anything that the user can fix; what was sampled and learned so far is kept.
        Stopped: Ctrl-C or SIGTERM; everything is saved.
    """
    config = _config(config)
    with _restored():
        from reason_llm.app.console import Console

        console = Console(config.log.console)  # sets up what libraries may say as they are imported
        from reason_llm.app.training import run_training

        return run_training(config, console)


def evaluate(
    what: str | Path,
    *,
    sets: Sequence[str] | None = None,
    k: int = 0,
    model: str | Path | None = None,
    compare: str | Path | None = None,
    which: str = "last",
    out: str | Path | None = None,
    generate_only: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a run, a config or a model; the summary that is also in ``<out>/summary.json``.

    Args:
        what: a run's folder, a config's file, or a model's folder or Hub id.
        sets: names, files or ``name=file``; None: those of the config.
        k: samples drawn of each problem beside the greedy answer.
        model: "base", "adapter", "best", a folder or a Hub id; None: what ``what`` is.
        compare: a second model, as ``model``.
        which: "last" or "best", of a run's adapters.
        out: folder of the results; None: one beside the run.
        generate_only: write completions and judge nothing.
        overrides: options of the config by dotted names.

    Raises:
        ReasonError: anything that the user can fix; finished waves are kept.
    """
    texts = {"model": model, "compare": compare, "which": which, "out": out, "k": k}
    values = {name: [str(value)] for name, value in texts.items() if value is not None}
    if sets is not None:
        values["sets"] = [str(each) for each in ([sets] if isinstance(sets, str) else sets)]
    switches = {"generate-only"} if generate_only else set()
    line = CommandLine(str(what), dict(overrides or {}), switches, values)
    with _restored():
        from reason_llm.app.console import Console

        Console("plain")
        from reason_llm.evaluate import make_request, run_evaluation

        request = make_request(line)
        return run_evaluation(request, Console(request.config.log.console))


def export(
    source: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    which: str = "last",
    adapter_only: bool = False,
    dtype: str = "bfloat16",
    max_shard_gib: float = 5,
    rollouts: str | Path | None = None,
    push: str | None = None,
    gguf: str | None = None,
) -> "Parity | ScoreParity | None":
    """Merge an adapter into its unquantised base; what the parity check measured, None for an
    adapter alone.

    Args:
        source: a run's folder, or an adapter's.
        out: a new folder.
        base: folder or Hub id of the unquantised base; None: the run's own.
        which: "last" or "best", of a run's adapters.
        adapter_only: write the adapter in PEFT's form and merge nothing.
        dtype: "bfloat16" or "float32".
        max_shard_gib: largest weights file.
        rollouts: file of the rollouts for the parity check; None: those of the run.
        push: repository of the Hub to upload to, too.
        gguf: llama.cpp's ``convert_hf_to_gguf.py``, to convert to GGUF, too.

    Raises:
        ReasonError: anything that the user can fix. Unless it says otherwise nothing was written.
    """
    with _restored():
        from reason_llm.app.console import Console

        console = Console("plain")
        from reason_llm.app import export as exporting
        from reason_llm.run import folder as run_folder

        request = exporting.Request(
            source=Path(source),
            out=Path(out),
            base=None if base is None else str(base),
            adapter_only=adapter_only,
            dtype=exporting.dtype_name(dtype),
            shard_bytes=exporting.shard_bytes(str(max_shard_gib)),
            rollouts=None if rollouts is None else Path(rollouts),
            push=push,
            gguf=gguf,
            which=run_folder.which_adapter(which),
        )
        return exporting.export(request, console)


def _config(given: Config | Mapping[str, Any] | str | Path) -> Config:
    if isinstance(given, str | Path):
        return load_config(given)
    unnamed = Path("config")
    if isinstance(given, Mapping):
        return config_file.build(copy.deepcopy(dict(given)), unnamed, {})
    if given.run.name is None:
        return given.model_copy(update={"run": given.run.model_copy(update={"name": unnamed.name})})
    return given


@contextmanager
def _restored() -> Iterator[None]:
    """Nothing of the process's logging and output is changed after the block."""
    from transformers.utils import logging as of_transformers

    from reason_llm.app.console import restored_output

    verbosity = of_transformers.get_verbosity()
    had_bars = of_transformers.is_progress_bar_enabled()
    try:
        with restored_output():
            yield
    finally:
        of_transformers.set_verbosity(verbosity)
        if had_bars:
            of_transformers.enable_progress_bar()
