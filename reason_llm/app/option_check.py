"""Check of all options of a run at once, for ``--plan`` and ``--data-check``: the checks of its
start that read neither weights nor rows.

Not covered: the state of the run's folder and the headers of the weights.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from reason_llm.app import trackers
from reason_llm.config import Config, RewardSpec
from reason_llm.data import chat_template, check_files, check_lengths, load_function, system_prompt
from reason_llm.errors import ReasonError
from reason_llm.files import check_writable
from reason_llm.model.plan import plan_only
from reason_llm.run.start import processes
from reason_llm.run.store import folder as run_folder
from reason_llm.score import Scorer

ON_THIS_CPU = (
    "planned for the CPU of this machine, which has no GPU: for a GPU, name its memory in GiB, "
    "such as --memory.budget_gib 24"
)

MANY_TOKENS = 2**20
"""Longest completion of a config that may lack the option."""


def check_options(
    config: Config, mistakes: list[ReasonError], is_plan: bool = False
) -> tuple[Config, set[str], list[str]]:
    """Add the mistakes in the options to ``mistakes``; return the config without wrong options, the
    columns that its rewards read, and the lines of the memory plan, if its options are right."""
    data, score, table, is_whole = config.data, config.score, list[str](), not mistakes
    without: dict[str, Any] = {}

    def check(call: Callable[[], object], **usual: object) -> None:
        try:
            call()
        except ReasonError as error:
            mistakes.append(error)
            without.update({f"data.{name}": value for name, value in usual.items()})

    wrong: list[ReasonError] = []
    # an option that contradicts another one is left out, and with it its value
    most = config.sample.max_new_tokens if is_whole else MANY_TOKENS
    with Scorer(score, most, runs_programs=False, mistakes=wrong) as scorer:
        columns = scorer.columns
    if wrong:  # which say what rows have to hold
        mistakes += wrong
        without |= {"score.rewards": [RewardSpec(name="boxed")], "data.eval": None, "eval.sets": {}}
        without |= {"data.form": "prompts"} if data.form == "problems" else {}
    names = data.template, config.model.path, True, data.template_arguments
    check(lambda: chat_template(*names), template="auto")
    check(lambda: system_prompt(data.system_prompt, config.prompting_reward), system_prompt="none")
    if data.preprocess is not None:
        check(partial(load_function, data.preprocess, "data.preprocess"), preprocess=None)
    check_files(config, mistakes.append)
    num_before = len(mistakes)
    for option, folder in config.other_adapters.items():
        if is_plan and not folder.exists() and folder.name in run_folder.KEPT.values():
            table.append(f"{folder} does not exist yet: planned like the policy's adapter")
        elif not folder.is_dir():
            check(partial(run_folder.check_exists, option, folder))
        else:
            check(partial(import_module("reason_llm.model.adapters").read_config, folder))
    is_whole = is_whole and len(mistakes) == num_before  # the plan counts these adapters
    check(lambda: trackers.check_installed(config.log.trackers))
    check(lambda: processes.processes_of(config))
    check(lambda: check_writable(config.run.directory / str(config.run.name)))
    is_whole = is_whole and not wrong  # without the rewards the plan would differ
    check(lambda: table.extend(_planned(config, is_whole, is_plan)))
    return config.with_options(without), columns, table if is_whole else []


def _planned(config: Config, is_whole: bool, is_plan: bool) -> list[str]:
    """Lines of the memory plan. Of a config that lacks wrong options only the model is checked, on
    a machine with any amount of memory: the memory may be too little for lack of an option. The
    lengths are checked for ``--plan``; else where the rows are read."""
    if not is_whole:
        config = config.with_options({"memory.budget_gib": 4096, "memory.host_gib": 4096})
    plan = plan_only(config)
    if is_whole and is_plan:
        check_lengths(config, plan.limit_tokens)
    return plan.table() + ([ON_THIS_CPU] if plan.machine.kind == "cpu" else [])
