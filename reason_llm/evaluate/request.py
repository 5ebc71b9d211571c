"""Command line of ``scripts/evaluate.py``, parsed: a run's folder, a config, a model or an adapter
says how problems are asked and judged; ``--model`` and ``--compare`` name the models, ``--sets``
the problems."""

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
OF_A_RUN = {"adapter", *run_folder.KEPT} - {"last"}
"""What ``--model`` and ``--compare`` call a run's adapters."""
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
    """Its ``eval.sets`` are the sets, and nothing else of it says what is evaluated."""
    targets: tuple[Target, ...]
    """One, or two to compare."""
    num_samples: int
    """k; 0: greedy alone."""
    generate_only: bool
    out: Path
    afresh: bool
    """Whatever is there is to be moved aside. By the command line alone: a run that was begun with
    run.resume=never has that in its config."""
    selected_on: str | None
    """The set on which the run's best adapter, one of the targets, was selected."""
    may_move_aside: bool
    """Nobody named ``out``, so a finished evaluation that is there may give way."""


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
    # Options of eval without a set are an error, and the sets are not made out yet.
    later = {k: v for k, v in line.overrides.items() if k.startswith("eval.") and k != "eval.sets"}
    which = run_folder.which_adapter(line.one("which"))
    own_overrides = {k: v for k, v in line.overrides.items() if k not in later}
    config, own = _read(line.what, own_overrides, which, line.source)
    wanted = [line.one("model") or own.label, line.one("compare")]
    run = Path(line.what) if run_folder.is_run(Path(line.what)) else None
    targets = tuple(_target(name, config, own, run) for name in wanted if name is not None)
    if len({target.label for target in targets}) < len(targets):
        raise ConfigError(
            f"{line.named('compare')} {wanted[1]} is the model itself; name another, such as "
            + ("a run's folder" if wanted[1] == "base" else "base")
        )
    sets = _sets(line, config)
    own_sources = [*config.evaluation_sets.values()]
    tree = config.model_dump(mode="json")
    tree["score"]["rewards"] = list(config.score.rewards)  # with functions given in Python
    overrides = {"data.eval": None, "eval.sets": sets, **_judged(sets, config, line)} | later
    name = Path(str(config.run.name))
    config = config_file.build(tree, name, overrides, overrides_name=line.source)
    samples = line.one("k") or "0"
    if not samples.isdecimal() or len(samples) > 4 or int(samples) > 4096:
        raise ConfigError(
            f"{line.named('k')} {samples:.60} is no number of samples; give one from 0 to 4096"
        )
    out, generate_only = line.one("out"), "generate-only" in line.given
    results = "completions" if generate_only else "evaluation"
    home = config.run.directory / str(config.run.name)
    if run is not None and not {"run.directory", "run.name"} & line.overrides.keys():
        home = run  # a copy's config names the place of the original
    return Request(
        config=config,
        targets=targets,
        num_samples=int(samples),
        generate_only=generate_only,
        out=Path(out) if out else home / results,
        afresh=line.overrides.get("run.resume") == "never",
        selected_on=_selected_on(own_sources, sets, targets),
        may_move_aside=out is None,
    )


def _judged(sets: dict[str, str], config: Config, line: CommandLine) -> dict[str, Any]:
    """The reward and the prompt of known sets: programs are judged by their tests whatever the run
    learns, and a model without a config is asked for a box around a number."""
    is_run = run_folder.is_run(Path(str(line.what))) or str(line.what).endswith((".yaml", ".yml"))
    code = [name for name in sets if name in CODE_SETS]
    judges_code = config.score.rewards[0].kind.startswith("code_tests")
    if "score.rewards" in line.overrides or "generate-only" in line.given:
        return {}
    if code and len(code) < len(sets):
        raise ConfigError(
            f"{line.named('sets')} {' '.join(sets)} mixes programs and other answers, which no "
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
    what: str, overrides: dict[str, Any], which: run_folder.Which, source: str
) -> tuple[Config, Target]:
    """Config and model that ``what`` names; ``source`` of the overrides in errors."""
    path = Path(what)
    run_folder.check_writes(path, "evaluate")
    if run_folder.is_run(path):
        config = run_folder.read_config(path, overrides, source)
        run_folder.check_writes(config, "evaluate")
        label = "adapter" if which == "last" else which
        return config, _kept(label, config, run_folder.find_adapter(path, which))
    run_folder.refuse_which(which, what)
    if path.suffix in (".yaml", ".yml"):
        config = config_file.load(path, overrides, overrides_name=source)
        run_folder.check_writes(config, "evaluate")
        return config, Target("base", config.model.path, None)
    if path.is_dir() and not any(path.iterdir()):
        raise ConfigError(f"{what} is empty; name a run's folder, a config or a model")
    beside_runs = any(path.parent.glob(f"*/{run_folder.CONFIG}")) or path.parent == Path("runs")
    if not path.exists() and beside_runs:
        raise ConfigError(run_folder.no_run(path))
    is_adapter = run_folder.is_adapter(path)
    if not is_adapter:
        folder.check(what, "config.json")
    base = str(adapters.base_of(path)) if is_adapter else what
    tree = {"run": {"name": path.name}, "model": {"path": base}, "data": {"train": what}}
    config = config_file.build(tree, path, overrides, overrides_name=source)
    if is_adapter:
        return config, Target("adapter", config.model.path, path)
    return config, Target("base", config.model.path, None)


def _kept(label: str, config: Config, folder: Path) -> Target:
    """The result of a run: an adapter over the model, or a model."""
    if run_folder.is_adapter(folder):
        return Target(label, config.model.path, folder)
    return Target(label, str(folder), None)


def _target(name: str, config: Config, own: Target, run: Path | None) -> Target:
    """Model that ``--model`` or ``--compare`` names; ``run`` is the folder of the run, if any."""
    if name == own.label:
        return own
    if name == "base":
        return Target("base", config.model.path, None)
    if run is not None and name in OF_A_RUN:
        which = run_folder.which_adapter(None if name == "adapter" else name)
        return _kept(name, config, run_folder.find_adapter(run, which))
    path = Path(name)
    run_folder.check_writes(path, "evaluate")
    if run_folder.is_run(path):
        run_folder.check_writes(run_folder.read_config(path), "evaluate")
        return _kept(name, config, run_folder.find_adapter(path))
    if run_folder.is_adapter(path):
        return Target(name, config.model.path, path)
    if name in OF_A_RUN:
        raise ConfigError("there is no adapter: name a run's folder, or an adapter's")
    return Target(name, name, None)


def _selected_on(
    own_sources: list[str], sets: dict[str, str], targets: tuple[Target, ...]
) -> str | None:
    """Name of the set whose accuracy selected the run's best adapter, if that is evaluated on it;
    a run is judged by its first set."""
    if not own_sources or all(target.label != "best" for target in targets):
        return None
    return next((name for name, source in sets.items() if source == own_sources[0]), None)


def _sets(line: CommandLine, config: Config) -> dict[str, str]:
    """Sources of the sets by name."""
    names, option = line.values.get("sets"), line.named("sets")
    own = {name or HELD_OUT: source for name, source in config.evaluation_sets.items()}
    if names is None:
        if not own:
            raise ConfigError(
                f"no set to evaluate on; name some with {option}: {', '.join(EVALUATION_SETS)}, "
                "or a file"
            )
        return own
    found: dict[str, str] = {}
    for name in names:
        label, equals, source = name.partition("=")
        if not equals or "?" in label:  # verifiers:TASKSET?size=200
            label, source = _of_name(name, EVALUATION_SETS | own, option)
        if label in found:
            raise ConfigError(f"{option} names {label} twice; give one of them another name, as in "
                              f"other={source}")  # fmt: skip
        found[label] = source
    return found


def _of_name(name: str, known: dict[str, str], option: str) -> tuple[str, str]:
    if name in known:
        return name, known[name]
    if is_played(name) or "/" in name or _FILE.fullmatch(name.lower()) or name.startswith(GYM):
        return re.sub(r"[^A-Za-z0-9_.-]", "_", Path(name).stem), name
    raise ConfigError(
        f"{option} {name} is none of {', '.join(known)}, and no file; name one of these, a file, "
        f"or {name}=FILE"
    )
