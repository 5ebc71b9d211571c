"""The stages of a pipeline, one after the other, each as a run of its own.

A stage that has ended is passed over, and one that was killed goes on. Rows that are made of
rollouts, <pipeline>/<stage>.jsonl, are written anew where <stage>.rows.json beside them, what they
were made of, does not hold any more: of the same rollouts and options they have the same bytes, and
a run that has begun with others refuses them. Before anything is learned, data, rewards and memory
of all stages to come are checked, as far as they do not depend on what earlier ones make.
"""

import gc
import logging
from collections.abc import Collection, Iterator
from typing import Any

from reason_llm.app import lines
from reason_llm.app.console import Console
from reason_llm.app.data_check import check_data
from reason_llm.app.rows_of_rollouts import update_rows
from reason_llm.app.training import run_training
from reason_llm.config import Config, Pipeline, PipelineStage, command
from reason_llm.errors import CheckpointError, DataError
from reason_llm.files import check_writable
from reason_llm.model.plan import plan_only
from reason_llm.run.store import checkpoint, folder, metrics

logger = logging.getLogger(__name__)


def run_pipeline(pipeline: Pipeline, console: Console) -> dict[str, dict[str, Any]]:
    """Run the selected stages, and return their summaries by name.

    Raises:
        ReasonError: anything that the user can fix; what was learned so far is kept.
        Stopped: Ctrl-C or SIGTERM; everything is saved.
    """
    _check(pipeline)
    summaries: dict[str, dict[str, Any]] = {}
    for stage in pipeline.selected:
        console.line(f"stage {stage.name} of {pipeline.path}: {stage.config.stage}")
        _check_needs(pipeline, stage, ended=summaries)
        _warn_of_another_start(pipeline, stage)
        is_passed_over = not is_to_come(stage)
        _update_rows(pipeline, stage, console)
        summaries[stage.name] = run_training(stage.config, console)
        if is_passed_over:
            records = metrics.read_all(stage.folder)
            judged = [told for each in records if (told := lines.judged(each))]
            console.line(f"  {', '.join(judged[-1])}" if judged else "  nothing was held out")
        gc.collect()  # the model's views of its storage, before the next stage's
    return summaries


def plan_pipeline(pipeline: Pipeline) -> Iterator[str]:
    """Lines with the memory plan of each selected stage, from the model's config alone."""
    for stage in pipeline.selected:
        yield f"stage {stage.name}: {stage.config.stage}"
        yield from plan_only(planned(pipeline, stage)).table()


def check_pipeline(pipeline: Pipeline) -> tuple[list[str], int]:
    """Lines of the data check of each selected stage, and the number of errors."""
    found, num_errors = [], 0
    for stage in pipeline.selected:
        found.append(f"stage {stage.name}: {stage.config.stage}")
        if stage.rows is not None and not stage.rows.path.exists():
            found.append(
                f"its rows are written from the rollouts of {', '.join(stage.rows.sources)}, which "
                "come first"
            )
            continue
        report = check_data(without_what_is_made(pipeline, stage))
        found += report.lines
        num_errors += report.num_errors
    return found, num_errors


def is_finished(stage: PipelineStage) -> bool:
    """Whether the run that is there has ended where its config asks."""
    run = stage.config.run
    is_counted = run.epochs is None and run.from_buffer is None
    steps = run.steps if is_counted else None
    return folder.has_ended(stage.folder, steps, stage.config.eval.patience)


def is_to_come(stage: PipelineStage) -> bool:
    """Whether there is something to learn."""
    return stage.begins_anew or not is_finished(stage)


def planned(pipeline: Pipeline, stage: PipelineStage) -> Config:
    """The stage's config with the adapter section of the stage that it begins from."""
    if stage.start is None:
        return stage.config
    source = pipeline.stage(stage.start)
    decided: dict[str, Any] = {"model.adapter": planned(pipeline, source).model.adapter}
    if source.begins_anew and pipeline.only is None:  # the adapter there will be moved aside
        decided["model.start"] = source.folder / "adapter to come"
    return stage.config.with_options(decided)


def without_what_is_made(pipeline: Pipeline, stage: PipelineStage) -> Config:
    """The stage's config without the rewards whose models earlier stages make."""
    adapters = {str(pipeline.stage(name).folder / "adapter") for name in stage.adapters}
    rewards = stage.config.score.rewards
    kept = [each for each in rewards if adapters.isdisjoint(map(str, each.options.values()))]
    return stage.config.with_options({"score.rewards": kept or rewards})


def _check(pipeline: Pipeline) -> None:
    """Check what can be known of the stages after the first that has not ended, which its own run
    checks.

    Raises:
        ReasonError: the first problem, with its stage.
    """
    for stage in [stage for stage in pipeline.selected if is_to_come(stage)][1:]:
        check_writable(stage.folder)
        plan_only(planned(pipeline, stage))
        if stage.rows is not None:
            continue
        report = check_data(without_what_is_made(pipeline, stage))
        if report.num_errors:
            first = next(line for line in report.lines[::-1] if "errors, the first" in line)
            problem = report.lines[report.lines.index(first) + 1].strip()
            raise DataError(f"stage {stage.name}: {problem}")


def _check_needs(pipeline: Pipeline, stage: PipelineStage, ended: Collection[str] = ()) -> None:
    """Whether the stages that this one reads have ended.

    Args:
        ended: those that this call has run to their end.

    Raises:
        CheckpointError: one has not.
    """
    for name in stage.needs:
        if name not in ended and not is_finished(pipeline.stage(name)):
            raise CheckpointError(
                f"stage {stage.name} needs {name}, which has not ended in "
                f"{pipeline.stage(name).folder}; run {command('train')} {pipeline.path} --stage "
                f"{name}, or leave --stage out"
            )


def _warn_of_another_start(pipeline: Pipeline, stage: PipelineStage) -> None:
    """Say so, if a run began from another adapter than the earlier stage has now."""
    begun = stage.folder / "start"
    if stage.start is None or stage.begins_anew or not begun.is_dir():
        return
    now = pipeline.stage(stage.start).folder / "adapter"
    if folder.weights_digest(str(begun)) != folder.weights_digest(str(now)):
        logger.warning(
            "stage %s began from an earlier adapter of %s; to begin anew: --stage %s --run.resume "
            "never", stage.name, stage.start, stage.name,
        )  # fmt: skip


def _update_rows(pipeline: Pipeline, stage: PipelineStage, console: Console) -> None:
    """Write the stage's rows where they are not those of its sources' rollouts, and say so."""
    if stage.rows is None:
        return
    archives = {name: pipeline.stage(name).folder / "buffers" for name in stage.rows.sources}
    update = update_rows(stage.rows, archives, anew=stage.begins_anew)
    if update is None:
        return
    console.line(update.written.line)
    has_begun = bool(checkpoint.listing(stage.folder))
    if update.others_before and has_begun and not stage.begins_anew:
        logger.warning(
            "stage %s began with other rows: the rollouts of %s or the options of pairs_of were "
            "others; to begin anew: --stage %s --run.resume never",
            stage.name, ", ".join(archives), stage.name,
        )  # fmt: skip
