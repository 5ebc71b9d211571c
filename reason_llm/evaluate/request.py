"""Command line of ``evaluate``, parsed: a run, a config, a model or an adapter determines prompts
and rewards; ``--model`` and ``--compare`` name the models, ``--sets`` the problems."""

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reason_llm.config import CODE_SETS, EVALUATION_SETS, CommandLine, Config, file as config_file
from reason_llm.data import GYM, is_played
from reason_llm.errors import ConfigError
from reason_llm.model import adapters, folder
from reason_llm.run.store import folder as run_folder

log = logging.getLogger(__name__)
HELD_OUT = "held_out"
"""The name of the set that ``data.eval`` gives."""
RUN_ADAPTERS = {"adapter", *run_folder.KEPT} - {"last"}
"""Names of a run's adapters in ``--model`` and ``--compare``."""
_FILE = re.compile(r".*\.(jsonl|json|csv|parquet)")


@dataclass(frozen=True, slots=True)
class Target:
    """A model that is evaluated."""

    label: str
    path: str
    """A folder or a Hub id."""
    adapter: Path | None
    """A folder; None: the model as it is."""


@dataclass(frozen=True, slots=True)
class Request:
    """An evaluation, not yet checked against models and data."""

    config: Config
    """``eval.sets`` has the sets to evaluate."""
    targets: tuple[Target, ...]
    """One, or two to compare."""
    num_samples: int
    """k; 0: greedy alone."""
    out: Path
    afresh: bool
    """Whether to move existing results aside: --run.resume never, which a run's config may also
    have from its start, so only the command line counts."""


def make_request(line: CommandLine) -> Request:
    """Parse a command line.

    Raises:
        ConfigError: nothing to evaluate, unknown sets, options that contradict one another.
        CheckpointError: a run without an adapter."""
    if line.what is None:
        raise ConfigError(
            "nothing to evaluate; name a run's folder such as runs/quickstart, a config, or a "
            "model's folder or Hub id"
        )
    # Options of eval without a set are an error, and the sets are not known yet.
    later = {k: v for k, v in line.overrides.items() if k.startswith("eval.") and k != "eval.sets"}
    which_adapter = run_folder.which_adapter(line.one("which"))
    own_overrides = {k: v for k, v in line.overrides.items() if k not in later}
    config, subject = _read(line.what, own_overrides, which_adapter, line.source)
    names = [line.one("model") or subject.label, line.one("compare")]
    run = Path(line.what) if run_folder.is_run(Path(line.what)) else None
    targets = tuple(_target(name, config, subject, run) for name in names if name is not None)
    if len({target.label for target in targets}) < len(targets):
        raise ConfigError(
            f"--compare {names[1]} is the model itself; name another, such as "
            + ("a run's folder" if names[1] == "base" else "base")
        )
    sets = _sets(line, config)
    tree = config.model_dump(mode="json")
    tree["score"]["rewards"] = list(config.score.rewards)  # with functions given in Python
    overrides = {"data.eval": None, "eval.sets": sets, **_judged(sets, config, line)} | later
    name = Path(str(config.run.name))
    config = config_file.build(tree, name, overrides, overrides_name=line.source)
    samples = line.one("k") or "0"
    if not samples.isdecimal() or len(samples) > 4 or int(samples) > 4096:
        raise ConfigError(f"--k {samples:.60} is not a number of samples; give one from 0 to 4096")
    out, home = line.one("out"), config.run.directory / str(config.run.name)
    if run is not None and not {"run.directory", "run.name"} & line.overrides.keys():
        home = run  # a copy's config names the place of the original
    return Request(
        config=config,
        targets=targets,
        num_samples=int(samples),
        out=Path(out) if out else home / "evaluation",
        afresh=line.overrides.get("run.resume") == "never",
    )


def _judged(sets: dict[str, str], config: Config, line: CommandLine) -> dict[str, Any]:
    """Reward and prompt for known sets: tests for programs, whatever the run's reward is, and a
    boxed number for a model without a config."""
    is_run = run_folder.is_run(Path(str(line.what))) or str(line.what).endswith((".yaml", ".yml"))
    code = [name for name in sets if name in CODE_SETS]
    judges_code = config.score.rewards[0].kind.startswith("code_tests")
    if "score.rewards" in line.overrides:
        return {}
    if code and len(code) < len(sets):
        raise ConfigError(
            f"--sets {' '.join(sets)} mixes programs and other answers, which no "
            f"reward judges together; evaluate {' and '.join(code)} alone"
        )
    name = "code_tests" if code and not judges_code else None
    if not is_run and not code and sets.keys() <= EVALUATION_SETS.keys():
        name = "boxed"
    if name is None:
        return {}
    if is_run:
        log.warning("%s: judged by %s, not by the run's reward", ", ".join(code), name)
    prompt = {} if "data.system_prompt" in line.overrides else {"data.system_prompt": "auto"}
    return {"score.rewards": [{"name": name}], **prompt}


def _read(
    source_name: str, overrides: dict[str, Any], which: run_folder.Which, source: str
) -> tuple[Config, Target]:
    """Config and model of this name; ``source`` names the overrides in errors."""
    path = Path(source_name)
    run_folder.check_writes(path, "evaluate")
    if run_folder.is_run(path):
        config = run_folder.read_config(path, overrides, source)
        run_folder.check_writes(config, "evaluate")
        label = "adapter" if which == "last" else which
        return config, _trained_target(label, config, run_folder.find_adapter(path, which))
    run_folder.refuse_which(which, source_name)
    if path.suffix in (".yaml", ".yml"):
        config = config_file.load(path, overrides, overrides_name=source)
        run_folder.check_writes(config, "evaluate")
        return config, Target("base", config.model.path, None)
    if path.is_dir() and not any(path.iterdir()):
        raise ConfigError(f"{source_name} is empty; name a run's folder, a config or a model")
    beside_runs = any(path.parent.glob(f"*/{run_folder.CONFIG}")) or path.parent == Path("runs")
    if not path.exists() and beside_runs:
        raise ConfigError(run_folder.no_run(path))
    is_adapter = run_folder.is_adapter(path)
    if not is_adapter:
        folder.check(source_name, "config.json")
    # Adapters and models have no config: this one has the defaults, and its rows are not read.
    base = str(adapters.base_of(path)) if is_adapter else source_name
    tree = {"run": {"name": path.name}, "model": {"path": base}, "data": {"train": source_name}}
    config = config_file.build(tree, path, overrides, overrides_name=source)
    if is_adapter:
        return config, Target("adapter", config.model.path, path)
    return config, Target("base", config.model.path, None)


def _trained_target(label: str, config: Config, folder: Path) -> Target:
    """The result of a run: an adapter over the model, or a model."""
    if run_folder.is_adapter(folder):
        return Target(label, config.model.path, folder)
    return Target(label, str(folder), None)


def _target(name: str, config: Config, default: Target, run: Path | None) -> Target:
    """Model that ``--model`` or ``--compare`` names; ``run`` is the folder of the run, if any."""
    if name == default.label:
        return default
    if name == "base":
        return Target("base", config.model.path, None)
    if run is not None and name in RUN_ADAPTERS:
        which = run_folder.which_adapter(None if name == "adapter" else name)
        return _trained_target(name, config, run_folder.find_adapter(run, which))
    path = Path(name)
    run_folder.check_writes(path, "evaluate")
    if run_folder.is_run(path):
        run_folder.check_writes(run_folder.read_config(path), "evaluate")
        return _trained_target(name, config, run_folder.find_adapter(path))
    if run_folder.is_adapter(path):
        return Target(name, config.model.path, path)
    if name in RUN_ADAPTERS:
        raise ConfigError("there is no adapter: name a run's folder, or an adapter's")
    return Target(name, name, None)


def _sets(line: CommandLine, config: Config) -> dict[str, str]:
    """Sources of the sets by name."""
    names = line.values.get("sets")
    config_sets = {name or HELD_OUT: source for name, source in config.evaluation_sets.items()}
    if names is None:
        if not config_sets:
            raise ConfigError(
                f"no set to evaluate on; name some with --sets: {', '.join(EVALUATION_SETS)}, "
                "or a file"
            )
        return config_sets
    sources: dict[str, str] = {}
    for name in names:
        label, equals, source = name.partition("=")
        if not equals or "?" in label:  # verifiers:TASKSET?size=200
            label, source = _named_set(name, EVALUATION_SETS | config_sets)
        if label in sources:
            raise ConfigError(
                f"--sets names {label} twice; give one of them another name, as in other={source}"
            )
        sources[label] = source
    return sources


def _named_set(name: str, named: dict[str, str]) -> tuple[str, str]:
    if name in named:
        return name, named[name]
    if is_played(name) or "/" in name or _FILE.fullmatch(name.lower()) or name.startswith(GYM):
        return re.sub(r"[^A-Za-z0-9_.-]", "_", Path(name).stem), name
    raise ConfigError(
        f"--sets {name} is not one of {', '.join(named)}, and not a file; name one of these, "
        f"a file, or {name}=FILE"
    )
