"""The training loop: sample -> score -> buffer -> train -> evaluate -> save, until all steps are
done. The stage sample ends a step before it learns; the others but rl learn from a set of rows.

Kill it at any moment; it resumes from its last checkpoint and its buffer.
"""

from typing import Any

from reason_llm.config import Config
from reason_llm.model import to_data
from reason_llm.rollout import Group
from reason_llm.run import SILENT, Watch
from reason_llm.run.collect import collect, sampled_before, with_model_rewards
from reason_llm.run.opening import open_run
from reason_llm.run.run import Run
from reason_llm.run.start.prepare import prepare


def train(config: Config, watch: Watch = SILENT) -> dict[str, Any]:
    """Train to ``run.steps`` and return the summary that is also written to ``summary.json``.

    Raises:
        ReasonError: anything that the user can fix; what was sampled and learned so far is kept.
        Stopped: Ctrl-C or SIGTERM; everything is saved.
    """
    job = prepare(config, watch)
    if (summary := job.finished(watch)) is not None:
        return summary
    with open_run(job, watch) as run:
        for step in run.remaining():
            groups = rollouts(run, step) if config.samples else []
            if not config.learns:
                run.end(step, {})
                continue
            data = to_data(groups) if config.samples else run.batch(step)
            data = run.read(data)  # GPU: weights + one model that reads the rollouts after another
            with run.learning(step, data) as learn:  # GPU: weights + activations + optimizer
                metrics = learn()
            run.end(step, metrics)  # archive, evaluate, log, save
        return run.finish()


def rollouts(run: Run, number: int) -> list[Group]:
    """The scored groups of a step: those on disk, or newly sampled ones."""
    step = run.step(number)
    saved = step.begin()  # a killed run resumes here
    if saved is not None and saved.complete:
        return saved.groups
    if (groups := sampled_before(step)) is None:
        with run.sampling(number) as sampler:  # GPU: weights + KV cache
            groups = collect(step, sampler)
    # GPU: weights, one reward model after another
    return with_model_rewards(step, groups, run.rewards_of)
