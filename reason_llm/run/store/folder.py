"""Contents of a run's folder for other programs: config, adapter, number of learned steps."""

import difflib
import hashlib
from pathlib import Path
from typing import Any, Literal

from reason_llm.config import MOST_CONFIG_BYTES, Config, file as config_file
from reason_llm.errors import CheckpointError, ConfigError, NotAsWritten
from reason_llm.files import compare, read_object, read_text

CONFIG = "resolved_config.yaml"
ADAPTER_CONFIG = "adapter_config.json"
MODEL = "model.safetensors"
SCORE_HEAD = "score.safetensors"
ANSWERS = "judge_answers.jsonl"
"""File with the answers of judges."""
Which = Literal["last", "best"]
"""Names of a run's adapters."""


KEPT: dict[Which, str] = {"last": "adapter", "best": "adapter_best"}
"""Their folders in the run's."""
BEST_RECORD = "best.json"
"""File in the best adapter's folder: its step, metric and value."""
WHICH = "|".join(KEPT)
"""Values of ``--which``."""
WHICH_HELP = "which adapter of the run: its last one, or that in adapter_best/ (default: last)"


def kept_name(which: Which, train: str) -> str:
    """Name of a kept adapter, or whole model, in the folder of a run with this ``model.train``."""
    return KEPT[which].replace("adapter", "model") if train == "full" else KEPT[which]


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    return (path / CONFIG).is_file()


def no_run(path: Path) -> str:
    """Message that there is no such run, with similar names in its folder and in runs/."""
    runs = [
        file.parent
        for file in (*path.parent.glob(f"*/{CONFIG}"), *Path("runs").glob(f"*/{CONFIG}"))
    ]
    near = difflib.get_close_matches(path.name, [run.name for run in runs], 3, 0.3)
    similar = " or ".join(dict.fromkeys(str(run) for run in runs if run.name in near))
    fix = f"did you mean {similar}?" if similar else "name a run's folder, such as runs/quickstart"
    return f"there is no run {path}; {fix}"


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's form."""
    return (path / ADAPTER_CONFIG).is_file()


def holds_policy(path: Path) -> bool:
    """Whether a folder holds a run's result: an adapter, or a whole model."""
    return is_adapter(path) or (path / MODEL).is_file()


def place_of(run: Path, which: Which) -> Path:
    """Folder of an adapter, or a whole model, that a run keeps."""
    whole = run / kept_name(which, "full")
    return whole if whole.is_dir() else run / KEPT[which]


def read_config(
    run: Path,
    overrides: dict[str, Any] | None = None,
    overrides_name: str = config_file.COMMAND_LINE,
) -> Config:
    """The config of a run, with dotted ``overrides``, as ``load`` of a config's file."""
    _check_config(run)
    return config_file.load(run / CONFIG, overrides, overrides_name=overrides_name)


def config_to_bytes(config: Config) -> bytes:
    """The content of a run's ``resolved_config.yaml``, with its SHA-256 in the first line."""
    content = config_file.to_yaml(config).encode()
    return f"{_CONFIG_DIGEST}{hashlib.sha256(content).hexdigest()}\n".encode() + content


_CONFIG_DIGEST = "# SHA-256 of the lines below: "


def _check_config(run: Path) -> None:
    """Compare a run's config with the SHA-256 that it carries."""
    try:
        first, _, rest = read_text(run / CONFIG, MOST_CONFIG_BYTES).partition("\n")
        if first.startswith(_CONFIG_DIGEST):
            recorded = first.removeprefix(_CONFIG_DIGEST)
            compare("it", hashlib.sha256(rest.encode()).hexdigest(), recorded)
    except NotAsWritten as error:
        raise ConfigError(
            f"{run / CONFIG} is damaged ({error}); call the command of the run again, which writes "
            "it, or remove its first line if it was edited on purpose"
        ) from error
    except (OSError, UnicodeDecodeError):
        return  # the reader reports it


def check_writes(target: Config | Path, what: str) -> None:
    """Raise ConfigError for a model that gives scores, since ``what`` needs completions.

    Args:
        target: the config of a run, or the folder of an adapter; a run's folder passes.
    """
    if isinstance(target, Path):
        if not is_run(target) and (target / SCORE_HEAD).exists():
            raise ConfigError(
                f"{target} is a reward model's adapter, which scores completions and writes none; "
                "name it as a reward, or export it"
            )
    elif target.of_stage.scores:
        raise ConfigError(
            f"{target.run.name} is a reward model (stage={target.stage}): it scores completions "
            f"and writes none, so {what} does not take it; name a run of another stage"
        )


def which_adapter(text: str | None) -> Which:
    """The value of ``--which``; None: last; raises ConfigError."""
    for which in KEPT:
        if text in (which, None):
            return which
    raise ConfigError(f"--which {text:.60} is not one of {', '.join(KEPT)}; give one")


def refuse_which(which: Which, what: str) -> None:
    """Raise ConfigError if ``--which`` asks for more than the single adapter of a folder that is no
    run."""
    if which != "last":
        raise ConfigError(f"--which {which} needs a run, and {what} is none; leave it out")


def find_adapter(run: Path, which: Which = "last") -> Path:
    """Folder of a run's latest adapter: the final one, or that of the newest checkpoint while the
    run has not ended or continues from its end; or that of its best evaluation.

    Raises:
        CheckpointError: the run has none.
    """
    final = place_of(run, which)
    if which != "last":
        if holds_policy(final):
            return final
        raise CheckpointError(
            f"{run} holds no {KEPT[which]}/: it has evaluated nothing, or had run.keep_best=false; "
            f"leave --which {which} out for its last adapter"
        )
    newest = _newest_checkpoint(run)
    if holds_policy(final) and (newest is None or step_of(newest) <= (finished_steps(run) or 0)):
        return final
    if newest is None:
        raise CheckpointError(
            f"{run} holds neither adapter/ nor a checkpoint; let the run take a step first"
        )
    return newest


def learned_steps(run: Path, adapter: Path) -> int | None:
    """Number of steps that an adapter from ``find_adapter`` has learned; None if unknown."""
    if adapter == place_of(run, "best"):
        return best_step(run)
    return finished_steps(run) if adapter == place_of(run, "last") else step_of(adapter)


def best_step(run: Path) -> int | None:
    """Step of the adapter in ``adapter_best/``; None if there is none."""
    step = best_record(run).get("step")
    return step if type(step) is int else None


def best_record(run: Path) -> dict[str, Any]:
    """Step, metric and value in ``adapter_best/best.json``; empty if it cannot be read."""
    return _object_in(place_of(run, "best") / BEST_RECORD)


def _object_in(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}


def finished_steps(run: Path) -> int | None:
    """Step at which the run last ended; None if it never did."""
    steps = _object_in(run / "summary.json").get("steps")
    return steps if type(steps) is int else None


def has_ended(run: Path) -> bool:
    """Whether the run has ended, and has taken no step since."""
    learned, newest = finished_steps(run), _newest_checkpoint(run)
    return learned is not None and (newest is None or step_of(newest) <= learned)


def check_exists(option: str, adapter: Path) -> None:
    """Raises ConfigError if the option names no folder."""
    if not adapter.is_dir():
        raise ConfigError(
            f"{option}={adapter} is not a folder; name the adapter/ of a run, or fetch it from the "
            f"Hub: hf download {adapter} --local-dir model/{adapter.name}"
        )


def check_ended(option: str, adapter: Path) -> None:
    """Raises CheckpointError if the option names the adapter of a run that has not ended."""
    run = adapter.parent
    if adapter.name == KEPT["last"] and is_run(run) and not has_ended(run):
        raise CheckpointError(
            f"{option}={adapter} belongs to a run that has not ended; finish it with its own "
            "command, or copy the adapter to another folder to use it as it is"
        )


def listing(run: Path) -> list[Path]:
    """Checkpoints of a run, oldest first, without other files, such as copies."""
    return sorted((run / "checkpoints").glob("step-" + 8 * "[0-9]"))


def _newest_checkpoint(run: Path) -> Path | None:
    checkpoints = listing(run)
    return checkpoints[-1] if checkpoints and holds_policy(checkpoints[-1]) else None


def step_of(checkpoint: Path) -> int:
    """Learned steps of a checkpoint, by its name."""
    return int(checkpoint.name.removeprefix("step-"))
