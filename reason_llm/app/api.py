"""The commands as functions, for notebooks and programs: ``reason_llm.train(config)``.

They behave, write and print like the commands (``log.console: quiet`` prints only warnings), raise
the errors that the commands print as one line, and restore logging and standard output.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reason_llm.config import PYTHON, CommandLine, Config, RowSequence, file as config_file
from reason_llm.errors import ConfigError, DataError, Stopped
from reason_llm.run import Record, Watch, check_unused
from reason_llm.run.store import folder as run_folder, metrics

if TYPE_CHECKING:
    from reason_llm.app.export.parity import Parity, ScoreParity

Reward = str | Mapping[str, Any] | Callable[..., Any]
"""Name of a reward, its options as in a config, or a function."""
ARGUMENTS = {"reward_funcs": "rewards", "train_dataset": "rows", "eval_dataset": "eval_rows",
             "args": "config", "model": "config, in model.path"}  # fmt: skip
"""Our names of the arguments of TRL's trainers."""
ARGUMENT = "argument"
"""How messages call an argument of ``train`` or ``evaluate`` that sets an option."""
ROWS, EVAL_ROWS = f"{PYTHON}rows", f"{PYTHON}eval_rows"
"""Names in the config of rows passed from Python."""


class Summary(dict[str, Any]):
    """Result of a run: the values of its ``summary.json``, such as ``accuracy_before`` and
    ``accuracy_after`` (fractions; None without a held-out set), and the paths of its files."""

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        super().__init__(values)
        self.folder = folder

    @property
    def adapter(self) -> Path:
        """Folder of the adapter in PEFT's form, or with model.train full of the model."""
        return run_folder.place_of(self.folder, "last")

    @property
    def report(self) -> Path:
        """HTML file of the report."""
        return self.folder / "report.html"

    @property
    def curves(self) -> Path:
        """Plot of reward and accuracy over the steps."""
        return self.folder / "curves.png"

    def records(self) -> list[Record]:
        """Return the metrics of each step, oldest first; step 0 is the untrained policy."""
        return metrics.read(self.folder)


def load_config(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Load the config in a YAML file; None: the quick start's or, with an override of
    ``model.path``, the defaults. ``overrides`` are options by dotted name, such as
    ``{"train.learning_rate": 1e-5}``. A config without ``data.train`` is for ``train(config,
    rows=rows)``.

    Raises:
        ConfigError: one line with the key, the value and the fix.
    """
    return config_file.load(
        None if path is None else Path(path),
        dict(overrides or {}),
        rows=ROWS,
        overrides_name="overrides",
    )


def train(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    rewards: Reward | Sequence[Reward] | None = None,
    rows: RowSequence | None = None,
    eval_rows: RowSequence | None = None,
    watch: Watch | None = None,
    **unknown: object,
) -> Summary:
    """Train, or resume a stopped run.

    Args:
        config: a config, its sections as a dict, the path of a YAML file, or YAML of several lines;
            None: the quick start. The default of ``run.name`` is the file's name, or "config".
        rewards: replace ``score.rewards``: functions, names of rewards, or dicts as in a config,
            with a function allowed as ``custom``; a list or one of them.
        rows: replace ``data.train``: a list of dicts, or a ``datasets.Dataset``.
        eval_rows: replace ``data.eval``.
        watch: receives lines, phases and steps instead of the console. None: the console, and in a
            notebook a plot at the end.
        unknown: arguments that do not exist; the error names ours.

    Raises:
        ReasonError: a problem that the user can fix; all progress is kept.
        Stopped: Ctrl-C or SIGTERM; everything is saved, and the same call resumes the run.
    """
    for name in unknown:
        problem, ours = f"train has no argument {name!r}", ARGUMENTS.get(name)
        translated = f"{problem}; {name} of TRL is {ours} here"
        raise ConfigError(translated if ours else config_file.unknown_key(name, problem))
    run_config = _config(config, _overrides(rewards, rows, eval_rows))
    data = run_config.data.with_rows(_rows_by_name(config, rows, eval_rows))
    run_config = run_config.with_options({"data": data})
    with _restored():
        from reason_llm.app.console import Console

        console = Console("quiet" if watch is not None else run_config.log.console)
        check_unused(run_config)
        # Libraries may print while they are imported, so the settings above come first.
        from reason_llm.app.training import run_training

        try:
            values = run_training(run_config, console if watch is None else watch)
        except Stopped:
            (console if watch is None else watch).line("stopped; the same call resumes it")
            raise
    summary = Summary(values, run_config.run.directory / str(run_config.run.name))
    if watch is None and run_config.log.console != "quiet":
        _show_in_notebook(summary.curves)
    return summary


def evaluate(
    what: str | Path,
    *,
    sets: Sequence[str] | None = None,
    k: int = 0,
    model: str | Path | None = None,
    compare: str | Path | None = None,
    which: str = "last",
    out: str | Path | None = None,
    rewards: Reward | Sequence[Reward] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Evaluate a run, a config or a model; return the summary in ``<out>/summary.json``.

    Args:
        what: a run's folder, a config's file, or a model's folder or Hub id.
        sets: names, files or ``name=file``; None: those of the config.
        k: samples per problem, in addition to the greedy answer.
        model: "base", "adapter", another value of ``--which``, a folder or a Hub id; None: the one
            that ``what`` names.
        compare: a second model, as ``model``.
        which: which adapter of a run, as ``--which``.
        out: folder of the results; None: a folder in the run.
        rewards: replace ``score.rewards``, as in ``train``; the first one scores.
        overrides: options of the config by dotted name.

    Raises:
        ReasonError: a problem that the user can fix; finished waves are kept.
    """
    texts = {"model": model, "compare": compare, "which": which, "out": out, "k": k}
    values = {name: [str(value)] for name, value in texts.items() if value is not None}
    if sets is not None:
        values["sets"] = [str(source) for source in ([sets] if isinstance(sets, str) else sets)]
    options = {**(overrides or {}), **_overrides(rewards)}
    line = CommandLine(str(what), options, set(), values, source=ARGUMENT)
    # The console sets up logging before libraries are imported, which may log at import.
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
    push: str | None = None,
    gguf: str | None = None,
) -> "Parity | ScoreParity | None":
    """Merge an adapter into its unquantised base; return the result of the parity check, or None if
    only the adapter is written.

    Args:
        source: a run's folder, or an adapter's.
        out: a new folder.
        base: folder or Hub id of the unquantised base; None: the run's own.
        which: which adapter of a run, as ``--which``.
        adapter_only: write the adapter in PEFT's format without merging.
        dtype: "bfloat16" or "float32".
        push: Hub repository to upload to.
        gguf: path of llama.cpp's ``convert_hf_to_gguf.py``, to convert to GGUF.

    Raises:
        ReasonError: a problem that the user can fix. Unless it says otherwise, nothing was written.
    """
    with _restored():
        from reason_llm.app.console import Console

        console = Console("plain")
        from reason_llm.app import export as exporting

        request = exporting.ExportRequest(
            source=Path(source),
            out=Path(out),
            base=None if base is None else str(base),
            adapter_only=adapter_only,
            dtype=dtype,
            push=push,
            gguf=gguf,
            which=run_folder.which_adapter(which),
        )
        return exporting.export(request, console)


def _overrides(rewards: object, rows: object = None, eval_rows: object = None) -> dict[str, Any]:
    arguments = {
        "score.rewards": (rewards, rewards),
        "data.train": (rows, ROWS),
        "data.eval": (eval_rows, EVAL_ROWS),
    }
    return {option: value for option, (passed, value) in arguments.items() if passed is not None}


def _rows_by_name(config: object, rows: Any, eval_rows: Any) -> dict[str, RowSequence]:
    """Return the rows by their names in the config."""
    rows_by_name = dict(config.data.given) if isinstance(config, Config) else {}
    for name, passed in ((ROWS, rows), (EVAL_ROWS, eval_rows)):
        is_counted = isinstance(passed, Sized) and isinstance(passed, Iterable)
        if isinstance(passed, str | bytes | Mapping) or not (is_counted or passed is None):
            raise DataError(
                f"{name} is of type {type(passed).__name__}; pass a list of dicts or a "
                "datasets.Dataset: one split of a DatasetDict, list(rows) of an iterator"
            )
        if passed is not None:
            rows_by_name[name] = passed
    return rows_by_name


def _config(
    source: Config | Mapping[str, Any] | str | Path | None, overrides: dict[str, Any]
) -> Config:
    unnamed = Path("config")
    if isinstance(source, str) and "\n" in source:
        source = config_file.parse(source, "the config")
    if source is None or isinstance(source, str | Path):
        return config_file.load(
            None if source is None else Path(source), overrides, overrides_name=ARGUMENT
        )
    if isinstance(source, Mapping):
        return config_file.build(_copied(source), unnamed, overrides, overrides_name=ARGUMENT)
    if overrides:
        tree = source.model_dump(mode="json")
        tree["score"]["rewards"] = list(source.score.rewards)  # with functions given in Python
        return config_file.build(tree, unnamed, overrides, overrides_name=ARGUMENT)
    if source.run.name is None:
        return source.with_options({"run.name": unnamed.name})
    return source


def _copied(tree: Any) -> Any:
    """Return a copy of the sections and lists with the same functions and objects in them."""
    if isinstance(tree, Mapping):
        return {name: _copied(value) for name, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


def _show_in_notebook(picture: Path) -> None:
    ipython = sys.modules.get("IPython")  # every notebook has it, and nothing else needs it
    is_notebook = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
    if ipython is not None and is_notebook and picture.is_file():
        ipython.display.display(ipython.display.Image(filename=str(picture)))


@contextmanager
def _restored() -> Iterator[None]:
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
