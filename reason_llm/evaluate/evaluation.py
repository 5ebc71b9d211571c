"""An evaluation without training, saved after each wave of prompts and scored by the first reward.

Everything is checked before a weight is read. Each wave's seed is a function of the run's seed, the
set and the wave's place in it, so an evaluation that was killed resumes to the same file, and two
models sample with the same random numbers."""

import hashlib
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from reason_llm.config import Config
from reason_llm.data import (
    DataSet,
    load_evaluation,
    own_sources,
    player_of,
    renderer_of,
    today,
)
from reason_llm.errors import ConfigError, printable
from reason_llm.evaluate import accuracy
from reason_llm.evaluate.outcomes import Answer, EvaluationWave, Outcome, OutcomeLog, answer_of
from reason_llm.evaluate.request import Request, Target
from reason_llm.files import (
    FileLock,
    check_writable,
    move_aside,
    read_bounded,
    read_object,
    write_atomically,
)
from reason_llm.model import (
    Model,
    adapters,
    digests,
    end_token_ids,
    folder as model_folder,
    quiet_libraries,
)
from reason_llm.model.plan import Plan, Subject, look_at
from reason_llm.rollout import LOGGED
from reason_llm.run import Watch
from reason_llm.run.start import dates
from reason_llm.run.store import checkpoint
from reason_llm.sample import (
    Episodes,
    Progress,
    Sampler,
    SamplingParams,
    episodes_of,
    prove_sampler_is_policy,
    sampling,
)
from reason_llm.score import Scorer

MAX_WAVE_PROMPTS = 64
"""Max prompts of a wave; a kill loses at most one wave."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _SharedBase:
    """Targets that share one base copy."""

    config: Config
    targets: list[Target]
    tokenizer: Any
    sets: list[DataSet]
    plan: Plan
    episodes: Episodes

    def waves(self) -> Iterator[tuple[Target, EvaluationWave]]:
        """Yield the waves, which only the config and the plan determine, also when resumed."""
        at_once = self.plan.cache_tokens // self.plan.context_tokens
        at_once //= self.config.sample.completions_per_prompt
        size = MAX_WAVE_PROMPTS if self.plan.engine else max(1, min(MAX_WAVE_PROMPTS, at_once))
        for target in self.targets:
            for data_set in self.sets:
                for start in range(0, len(data_set.prompts), size):
                    part = data_set.prompts[start : start + size]
                    yield target, EvaluationWave(target.label, data_set.name, start, part)


def run_evaluation(request: Request, watch: Watch) -> dict[str, Any]:
    """Evaluate; return the summary, which ``<out>/summary.json`` gets at the end. A ReasonError
    keeps the finished waves."""
    quiet_libraries()
    scoring = request.config.score
    scoring = scoring.with_options({"rewards": scoring.rewards[:1]})
    with Scorer(scoring, request.config.eval_max_new_tokens) as scorer:
        stages, lines = _prepare(request, scorer)
        scorer.try_custom(stages[0].sets[0].prompts, stages[0].tokenizer)
        check_writable(request.out)
        lock = request.out.parent / f".{request.out.name}.lock"
        with FileLock(lock, f"the evaluation {request.out}", "give this one another --out"):
            log = _open(request, stages)
            for line in (*lines, *scorer.descriptions):
                watch.line(line)
            # All waves are known before any is run: the file's lines must be their beginning.
            planned = [list(stage.waves()) for stage in stages]
            done = log.resume([wave for waves in planned for _, wave in waves])
            if done:
                watch.line(f"{len(log.outcomes)} problems are done already")
            for stage, waves in zip(stages, planned, strict=True):
                skipped = min(done, len(waves))
                done -= skipped
                if skipped < len(waves):
                    _run_stage(request, stage, waves[skipped:], log, scorer, watch)
        first = scorer.rewards[0].reward
    return _finish(request, log, None if first.answer is None else first.vote, watch)


def _prepare(request: Request, scorer: Scorer) -> tuple[list[_SharedBase], list[str]]:
    """The stages, and lines that describe them. Reads no weights and writes nothing."""
    stages, lines = [], []
    subjects = [(targets, look_at(_config_for(request, targets))) for targets in _by_base(request)]
    date = _date(request, [subject for _, subject in subjects])
    for targets, subject in subjects:
        config = subject.config.with_options({"data.date": date})
        for adapter in (target.adapter for target in targets if target.adapter is not None):
            adapters.check_fits(subject.policy, adapter, config.model.path)
        sets = load_evaluation(config, subject.tokenizer, subject.context_tokens, scorer.columns)
        attachments = None
        for data_set in sets:
            if data_set.attachments is not None:
                data_set.attachments.check(config)
                attachments = data_set.attachments.sizes
        longest = max(len(prompt.token_ids) for data_set in sets for prompt in data_set.prompts)
        plan = subject.plan(longest, learns=False, attachments=attachments, reads=False)
        renderer = renderer_of(config, subject.tokenizer)
        episodes = episodes_of(config, renderer, subject.context_tokens)
        stages.append(_SharedBase(config, targets, subject.tokenizer, sets, plan, episodes))
        problems = ", ".join(f"{data_set.name} {len(data_set.prompts)}" for data_set in sets)
        labels = " and ".join(target.label for target in targets)
        lines += [printable(f"evaluating {labels} of {config.model.path}: {problems}")]
        lines += [line for data_set in sets if data_set.skipped for line in data_set.notes]
        lines += subject.why[:-1]  # the last is of learning
    return stages, lines


def _date(request: Request, subjects: Sequence[Subject]) -> str | None:
    """The date for chat templates: the config's, the stored evaluation's, the run's or today's;
    None if no template reads it."""
    config = request.config
    renderers = [renderer_of(subject.config, subject.tokenizer) for subject in subjects]
    reads_date = any(dates.reads_date_in(config, renderer) for renderer in renderers)
    if config.data.date is not None or not reads_date:
        return config.data.date
    run, earlier = config.run.directory / str(config.run.name), None
    if not request.afresh:
        with suppress(OSError, ValueError, LookupError):
            earlier = checkpoint.date_in(read_object(request.out / "evaluation.json")["config"])
    return earlier or checkpoint.date_of(run) or today()


def _by_base(request: Request) -> list[list[Target]]:
    """One group for all targets, if one base with one shape of adapter serves them."""
    targets = list(request.targets)
    shapes = [adapters.section_of(t.adapter) for t in targets if t.adapter is not None]
    if all(t.path == targets[0].path for t in targets) and all(s == shapes[0] for s in shapes):
        return [targets]
    return [[target] for target in targets]


def _config_for(request: Request, targets: list[Target]) -> Config:
    config, num = request.config, max(1, request.num_samples)
    section = next((adapters.section_of(t.adapter) for t in targets if t.adapter), None)
    return config.with_options(
        {
            "model.path": targets[0].path,
            "model.adapter": section or config.model.adapter,
            "model.train": "adapter" if section else config.model.train,
            "sample.prompts_per_step": MAX_WAVE_PROMPTS,
            "sample.completions_per_prompt": num,
            "sample.max_new_tokens": config.eval_max_new_tokens,
        }
    )


def _open(request: Request, stages: list[_SharedBase]) -> OutcomeLog:
    """The log, in its new folder; nothing is written before this."""
    header = request.out / "evaluation.json"
    log = OutcomeLog(request.out / "problems.jsonl", request.num_samples)
    identity = orjson.dumps(_identity(request, stages), option=orjson.OPT_INDENT_2)
    is_other = log.path.exists() and not _holds(header, identity)
    is_finished = (request.out / "summary.json").exists()
    if request.afresh or (is_other and is_finished):
        move_aside(request.out)
    elif is_other:
        raise ConfigError(
            f"{request.out} holds an evaluation with other options, data, weights or reward, or "
            "its evaluation.json is damaged; set another --out, or --run.resume never, which moves "
            "it aside"
        )
    write_atomically(header, identity)
    return log


def _holds(file: Path, content: bytes) -> bool:
    try:
        return read_bounded(file, len(content)) == content
    except OSError:  # larger, not there, or no regular file
        return False


def _identity(request: Request, stages: list[_SharedBase]) -> dict[str, Any]:
    """Everything that determines the outcomes."""
    sections = ("model", "data", "sample", "score", "eval", "memory")
    first = stages[0].config.model_dump(mode="json")
    rewards, player = request.config.score.rewards[:1], player_of(request.config)
    # Prompts are compared by their tokens: a changed chat template is another evaluation, too.
    content = [
        [
            data_set.name,
            [(p.token_ids, p.answer, *(a.sha256 for a in p.attachments)) for p in data_set.prompts],
        ]
        for stage in stages
        for data_set in stage.sets
    ]
    return {
        "config": {name: first[name] for name in sections},
        "seed": request.config.run.seed,
        "k": request.num_samples,
        "sets": dict(request.config.eval.sets),
        "sources_sha256": own_sources(rewards, player, request.config.eval.sets.values()),
        "prompts_sha256": hashlib.sha256(orjson.dumps(content)).hexdigest()[:16],
        "models": {
            target.label: {
                "path": target.path,
                "adapter": None if target.adapter is None else str(target.adapter),
                "sha256": digests.weights_digest(target.path, target.adapter),
                "files_sha256": model_folder.digests_of_small_files(
                    target.path, stage.config.model.trust_remote_code
                ),
                "end_token_ids": end_token_ids(target.path, stage.tokenizer),
            }
            for stage in stages
            for target in stage.targets
        },
    }


def _run_stage(
    request: Request,
    stage: _SharedBase,
    waves: Sequence[tuple[Target, EvaluationWave]],
    log: OutcomeLog,
    scorer: Scorer,
    watch: Watch,
) -> None:
    """Sample and score these waves, target by target."""
    config, plan = stage.config, stage.plan
    sources = (s.attachments for s in stage.sets if s.attachments is not None)
    with Model(
        config.model, stage.tokenizer, config.run.seed, plan.engine, attachments=next(sources, None)
    ) as model:
        for target in stage.targets:
            # The base is loaded once for all targets; only the adapter changes in between.
            todo = [wave for owner, wave in waves if owner is target]
            if not todo:
                continue
            if target.adapter is None:
                adapters.clear(model.policy)
            else:
                adapters.load_as_is(model.policy, target.adapter, target.path)
            total = sum(len(wave.prompts) for wave in todo) * (1 + request.num_samples)
            with (
                sampling(model, plan.cache_tokens) as sampler,
                closing(stage.episodes),
                watch.phase(target.label, total) as progress,
            ):
                if model.engine is not None:
                    prove_sampler_is_policy(sampler, model, todo[0].prompts)
                playing = stage.episodes.over(sampler)
                for wave in todo:
                    log.append(_wave_outcomes(request, config, wave, playing, scorer, progress))
    for name, count in scorer.take_counts().items():
        if count and not name.startswith(LOGGED):
            logger.warning("%s: %.0f", name, count)


def _wave_outcomes(
    request: Request,
    config: Config,
    wave: EvaluationWave,
    sampler: Sampler,
    scorer: Scorer,
    progress: Progress,
) -> list[Outcome]:
    section, k = config.sample, request.num_samples
    seed = random.Random(f"{config.run.seed}/evaluate/{wave.set}/{wave.start}").getrandbits(63)
    greedy = SamplingParams(1, section.max_new_tokens, temperature=0.0, stop=tuple(section.stop))
    drawn = replace(
        greedy,
        num_completions=k,
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        min_p=section.min_p,
    )
    answer_in = scorer.rewards[0].reward.answer

    def answers_by_problem(params: SamplingParams) -> list[list[Answer]]:
        """Answers of each problem."""
        groups = sampler.sample(wave.prompts, params, seed=seed, progress=progress)
        return [
            [
                answer_of(c, answer_in(group.prompt.continued_by(c)) if answer_in else None)
                for c in group.completions
            ]
            for group in scorer.score(groups, only_first=True)
        ]

    first = answers_by_problem(greedy)
    samples = answers_by_problem(drawn) if k else [[] for _ in wave.prompts]
    return [
        {
            "model": wave.model,
            "set": wave.set,
            "id": prompt.id,
            "prompt": prompt.text,
            "gold": prompt.answer,
            "greedy": greedy_answer,
            "samples": sampled,
        }
        for prompt, (greedy_answer,), sampled in zip(wave.prompts, first, samples, strict=True)
    ]


def _finish(
    request: Request, log: OutcomeLog, vote: accuracy.Vote | None, watch: Watch
) -> dict[str, Any]:
    k, config = request.num_samples, request.config
    summary = {
        "models": {t.label: str(t.adapter or t.path) for t in request.targets},
        "judged_by": config.score.rewards[0].key,
        "k": k,
        "temperature": config.sample.temperature if k else 0.0,
        "max_new_tokens": config.eval_max_new_tokens,
        **accuracy.summarize(log.outcomes, k, vote, len(request.targets) > 1),
    }
    content = orjson.dumps(summary, option=orjson.OPT_INDENT_2)
    write_atomically(request.out / "summary.json", content)
    for line in accuracy.table(summary):
        watch.line(line)
    watch.line(f"results per problem: {log.path}; summary: {request.out / 'summary.json'}")
    return summary
