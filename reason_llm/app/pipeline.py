"""The stages of a pipeline, one after the other, each as a run of its own.

A stage that has ended is skipped, and one that was killed goes on. Before anything is learned,
data, rewards and memory of all stages to come are checked, as far as they do not depend on what
earlier ones make."""

import gc
import logging
from collections.abc import Collection
from typing import Any

from reason_llm.app import lines
from reason_llm.app.console import Console
from reason_llm.app.data_check import DataReport, check_data
from reason_llm.app.option_check import check_options
from reason_llm.app.report.stages import Stage, write as write_stages
from reason_llm.app.rows_of_rollouts import update_rows
from reason_llm.app.training import run_training, write_report_of
from reason_llm.config import Config, Pipeline, PipelineStage, command
from reason_llm.errors import CheckpointError, DataError, ReasonError, Stopped, raise_all
from reason_llm.files import check_writable
from reason_llm.model import digests
from reason_llm.run import SILENT, StopSignal
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
    home = pipeline.stages[0].config.run.directory
    noted = [Stage(each.name, each.config.stage, each.needs) for each in pipeline.stages]
    StopSignal.unheeded = None
    for stage in pipeline.selected:
        if StopSignal.unheeded is not None:  # by the stage before, if it had ended
            raise Stopped(128 + StopSignal.unheeded)
        console.line(f"stage {stage.name} of {pipeline.path}: {stage.config.stage}")
        _check_needs(pipeline, stage, ended=summaries)
        _warn_of_another_start(pipeline, stage)
        is_passed_over = not is_to_come(stage)
        write_stages(home, noted)
        _update_rows(pipeline, stage, console)
        summaries[stage.name] = run_training(_with_date(pipeline, stage), console)
        if is_passed_over:
            records = metrics.read(stage.folder)
            by = stage.config.score.judged_by
            judged = [told for record in records if (told := lines.judged(record, by))]
            console.line(f"  {', '.join(judged[-1])}" if judged else "  nothing was held out")
        write_report_of(home, console if stage is pipeline.selected[-1] else SILENT)
        gc.collect()  # the model's views of its storage, before the next stage's
    return summaries


def check_pipeline(
    pipeline: Pipeline, mistakes: list[ReasonError], is_plan: bool
) -> tuple[list[str], int]:
    """Lines with the memory plan of each selected stage, or else of its data check, and the number
    of errors in rows; ``mistakes`` are given what is wrong with options."""
    lines, num_errors = list[str](), 0
    for stage in pipeline.selected:
        lines.append(f"stage {stage.name}: {stage.config.stage}")
        config, subject = without_what_is_made(pipeline, stage), planned(pipeline, stage)
        if is_plan:
            lines += check_options(config, mistakes, subject)[2]
        elif stage.rows is not None and not stage.rows.path.exists():
            sources = ", ".join(stage.rows.sources)
            lines.append(f"its rows are written from the rollouts of {sources}, which come first")
            check_options(config, mistakes, subject)
        else:
            report = check_data(config, mistakes, subject)
            lines += report.lines
            num_errors += report.num_errors
    return lines, num_errors


def is_finished(stage: PipelineStage) -> bool:
    """Whether the stage's run has ended where its config says."""
    run = stage.config.run
    is_counted = run.epochs is None and run.from_buffer is None
    steps = run.steps if is_counted else None
    return folder.has_ended(stage.folder, steps, stage.config.eval.patience)


def is_to_come(stage: PipelineStage) -> bool:
    """Whether the stage still has steps to take, or begins anew."""
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
    """The stage's config without the rows, adapters and rewards that earlier stages make."""
    adapters = {str(pipeline.stage(name).folder / "adapter") for name in stage.adapters}
    rewards = stage.config.score.rewards
    kept = [each for each in rewards if adapters.isdisjoint(map(str, each.options.values()))]
    without: dict[str, Any] = {"score.rewards": kept or rewards}
    for section, option in (("model", "start"), ("critic", "start"), ("teacher", "adapter")):
        if str(getattr(getattr(stage.config, section), option)) in adapters:
            without[f"{section}.{option}"] = None
    if stage.rows is not None and not stage.rows.path.exists():
        without["data.train"] = []
    return stage.config.with_options(without)


def _check(pipeline: Pipeline) -> None:
    """Check what can be known of the stages after the first that has not ended, which its own run
    checks; raises a ReasonError."""
    for stage in [stage for stage in pipeline.selected if is_to_come(stage)][1:]:
        check_writable(stage.folder)
        mistakes: list[ReasonError] = []
        check = check_options if stage.rows is not None else check_data
        found = check(without_what_is_made(pipeline, stage), mistakes, planned(pipeline, stage))
        raise_all(mistakes)
        if isinstance(found, DataReport) and found.num_errors:
            raise DataError(f"stage {stage.name}: {found.errors[0]}")


def _with_date(pipeline: Pipeline, stage: PipelineStage) -> Config:
    """The stage's config, for a stage that begins with the date that templates of earlier stages
    read."""
    config, number = stage.config, pipeline.stages.index(stage)
    has_record = folder.is_run(stage.folder) or checkpoint.listing(stage.folder)
    if config.data.date is not None or (has_record and not stage.begins_anew):
        return config
    dates = [checkpoint.date_of(each.folder) for each in pipeline.stages[:number]]
    return config.with_options({"data.date": next(filter(None, dates), None)})


def _check_needs(pipeline: Pipeline, stage: PipelineStage, ended: Collection[str] = ()) -> None:
    """Raise a CheckpointError if a stage that this one reads has not ended."""
    for name in stage.needs:
        if name not in ended and not is_finished(pipeline.stage(name)):
            raise CheckpointError(
                f"stage {stage.name} needs {name}, which has not ended in "
                f"{pipeline.stage(name).folder}; run {command('train')} {pipeline.path} --stage "
                f"{name}, or leave --stage out"
            )


def _warn_of_another_start(pipeline: Pipeline, stage: PipelineStage) -> None:
    begun = stage.folder / "start"
    if stage.start is None or stage.begins_anew or not begun.is_dir():
        return
    now = pipeline.stage(stage.start).folder / "adapter"
    if digests.weights_digest(str(begun)) != digests.weights_digest(str(now)):
        logger.warning(
            "stage %s began from an earlier adapter of %s; to begin anew: --stage %s --run.resume "
            "never", stage.name, stage.start, stage.name,
        )  # fmt: skip


def _update_rows(pipeline: Pipeline, stage: PipelineStage, console: Console) -> None:
    if stage.rows is None:
        return
    archives = {name: pipeline.stage(name).folder / "buffers" for name in stage.rows.sources}
    update = update_rows(stage.rows, archives, anew=stage.begins_anew)
    if update is None:
        return
    written, had_others = update
    console.line(written.line)
    if had_others and checkpoint.listing(stage.folder) and not stage.begins_anew:
        logger.warning(
            "stage %s began with other rows: the rollouts of %s or the options of pairs_of were "
            "others; to begin anew: --stage %s --run.resume never",
            stage.name, ", ".join(archives), stage.name,
        )  # fmt: skip
