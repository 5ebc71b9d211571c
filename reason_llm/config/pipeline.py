"""A pipeline: a config with ``stages``, each an ordinary config and a run of its own, later ones
beginning from earlier ones.

    model: {path: model/tiny}            # sections that all stages share
    stages:
      sft: {stage: sft, data: {train: demonstrations.jsonl}}
      rm: {stage: reward, from: sft, data: {train: preferences.jsonl}}
      ppo: {from: sft, critic: {start: {stage: rm}}, algorithm: {name: ppo}, ...}

A stage's sections are merged into the shared ones, option by option; a list takes the other's
place, and a section that is null begins anew. ``from: sft`` is ``model.start`` with the adapter of
that run, and ``{stage: rm}`` stands for the folder of its adapter wherever an option takes one.
``data.train: {pairs_of: STAGE}``, with the options of the command pairs, are rows that are written
from the rollouts of that stage. The runs live in <run.directory>/<pipeline>/<stage>/.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reason_llm.config.command_line import WITHOUT_CONFIG, config_of_line, read_command_line
from reason_llm.config.file import build, read_yaml
from reason_llm.config.pairs import PairForm, PairsSection
from reason_llm.config.sections import READ_BY, SAMPLING, Config
from reason_llm.config.wrong_values import wrong
from reason_llm.errors import ConfigError

Tree = dict[str, Any]
STAGES, FROM, PAIRS_OF, STAGE = "stages", "from", "pairs_of", "stage"


@dataclass(frozen=True, slots=True)
class RowsOfRollouts:
    """Rows that are written from the rollouts of earlier stages before a stage begins."""

    sources: tuple[str, ...]
    """Stages."""
    form: PairForm
    section: PairsSection
    path: Path
    """Where they are written."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One run of a pipeline."""

    name: str
    config: Config
    start: str | None
    """The stage whose adapter it begins from."""
    adapters: tuple[str, ...]
    """Stages whose adapters it reads, ``start`` included."""
    rows: RowsOfRollouts | None

    @property
    def needs(self) -> list[str]:
        """Stages that must have ended before."""
        rows = () if self.rows is None else self.rows.sources
        return list(dict.fromkeys([*self.adapters, *rows]))

    @property
    def folder(self) -> Path:
        """The run's."""
        return self.config.run.directory / self.name

    @property
    def begins_anew(self) -> bool:
        """Whether a run that is there is moved aside (``run.resume: never``)."""
        return self.config.run.resume == "never"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages in their order."""

    path: Path
    """The config file."""
    stages: tuple[PipelineStage, ...]
    only: str | None
    """The one stage that was asked for; None: all."""

    @property
    def selected(self) -> list[PipelineStage]:
        """The stages that were asked for."""
        return [stage for stage in self.stages if self.only in (None, stage.name)]

    def stage(self, name: str) -> PipelineStage:
        """The stage of this name."""
        return next(stage for stage in self.stages if stage.name == name)


def parse_training_line(
    program: str, description: str, arguments: Sequence[str], switches: Mapping[str, str]
) -> tuple[Config | Pipeline, set[str]]:
    """As ``parse_command_line``; the config may be a pipeline, of which ``--stage`` names one
    stage.

    Returns:
        The config or pipeline, and the switches that were given.
    """
    line = read_command_line(
        program, description, ("CONFIG.yaml", WITHOUT_CONFIG), arguments, switches,
        in_force=config_of_line,
    )  # fmt: skip
    if line.what is not None and STAGES in read_yaml(Path(line.what)):
        return load_pipeline(Path(line.what), line.overrides), line.given
    return config_of_line(line), line.given


def load_pipeline(path: Path, overrides: Mapping[str, Any]) -> Pipeline:
    """The pipeline in a YAML file.

    Args:
        overrides: dotted options for all stages that read them. ``stage`` names the only stage that
            is run, which alone takes the others; but for ``run.name``, the pipeline's, and
            ``run.directory``.

    Raises:
        ConfigError: one line with stage, key, value, fix.
    """
    shared, options = read_yaml(path), dict(overrides)
    trees = shared.pop(STAGES)
    if not isinstance(trees, dict) or not trees or not all(map(_is_tree, trees.values())):
        raise ConfigError(
            f"{path}: stages={trees!r:.100} are no stages; write stages: {{name: {{sections}}}}"
        )
    only = options.pop(STAGE, None)
    if only is not None and only not in trees:
        raise ConfigError(f"--stage {only!r:.60} is none of {path}; {_nearest(str(only), trees)}")
    run = _section(shared, "run")
    name = options.pop("run.name", None) or run.pop("name", None) or path.stem
    directory = options.pop("run.directory", None) or run.pop("directory", None) or "runs"
    if not isinstance(directory, str | Path):
        raise ConfigError(f"{path}: run.directory={directory!r:.60} is no path; name a folder")
    folder = Path(directory) / str(name)
    _check_overrides(path, options, trees, only)
    made: dict[str, PipelineStage] = {}
    for stage, tree in trees.items():
        its_own = options if only in (None, stage) else {}
        made[stage] = _Builder(path, folder, stage, only, made, its_own).build(shared, tree)
    return Pipeline(path, tuple(made.values()), only)


def _check_overrides(path: Path, options: Tree, trees: Mapping[str, Tree], only: Any) -> None:
    kinds = {tree.get(STAGE, "rl") for name, tree in trees.items() if only in (None, name)}
    for key in options:
        readers = READ_BY.get(key.partition(".")[0])
        if readers is not None and not kinds.intersection(readers):
            raise ConfigError(
                f"--{key} acts on no stage of {path}; it is read by stages of the kind "
                f"{' or '.join(readers)}"
            )
    if only is None and options.get("run.resume", "auto") not in ("auto", "never"):
        raise ConfigError(
            f"--run.resume {options['run.resume']} is a checkpoint of one run and {path} has "
            f"{len(trees)}; name its stage with --stage, or write it into run.resume of a stage"
        )


@dataclass(frozen=True, slots=True)
class _Builder:
    """What is known while a stage is built."""

    path: Path
    folder: Path
    """Of the pipeline's runs."""
    name: str
    only: str | None
    """As in the pipeline."""
    earlier: Mapping[str, PipelineStage]
    overrides: Tree
    """Options of the command line for this stage."""

    @property
    def place(self) -> Path:
        """What an error calls the stage."""
        return Path(f"{self.path}, stage {self.name}")

    def build(self, shared: Tree, own: Tree) -> PipelineStage:
        """The stage whose sections are ``own``, over the ``shared`` ones.

        Raises:
            ConfigError: as ``load_pipeline``.
        """
        own = dict(own)
        self._check_run(own.get("run"))
        kind = own.get(STAGE, "rl")
        start = own.pop(FROM, None)
        base = {k: v for k, v in deepcopy(shared).items() if kind in READ_BY.get(k, (kind,))}
        if start is not None:
            self._check_from(start, own)
            _section(base, "model").pop("adapter", None)
        if kind in SAMPLING:
            _section(base, "train").pop("rows_per_step", None)
        tree = _merged(base, own)
        run, model = _section(tree, "run"), _section(tree, "model")
        if start is not None:
            model["start"] = {STAGE: start}
        needs = [*self._resolved(tree)]
        rows = self._rows(tree)
        run |= {"name": self.name, "directory": str(self.folder)}
        run.setdefault("buffer", str(self.folder / self.name / "buffer.json"))
        config = build(tree, self.place, self._options(tree, kind, start is not None))
        self._check_reward_models(config)
        return PipelineStage(self.name, config, start, tuple(dict.fromkeys(needs)), rows)

    def _options(self, tree: Tree, kind: str, has_start: bool) -> Tree:
        """The overrides that this stage reads; all of them, if they are for it alone."""
        if self.only is not None:
            return self.overrides
        section, data = _section(tree, "eval"), _section(tree, "data")
        judged_by = (data.get("eval"), section.get("sets"), section.get("rows"))
        sets_one = {"data.eval", "eval.sets", "eval.rows"} & self.overrides.keys()
        dropped = []
        if has_start:
            dropped.append("model.adapter")
        if not any(judged_by) and not sets_one:
            dropped.append("eval")
        if kind in SAMPLING:
            dropped.append("train.rows_per_step")
        return {
            key: value
            for key, value in self.overrides.items()
            if kind in READ_BY.get(key.partition(".")[0], (kind,))
            and not any(f"{key}.".startswith(f"{name}.") for name in dropped)
        }

    def _check_run(self, run: Any) -> None:
        """Whether the stage's own section ``run`` leaves its folder to the pipeline."""
        for key in ("name", "directory"):
            value = run.get(key) if isinstance(run, dict) else None
            if value is not None:
                raise ConfigError(
                    f"{self.place}: run.{key}={value!s:.60} contradicts the stage, whose run is in "
                    f"{self.folder / self.name}; set run.{key} beside the stages, for all of them"
                )

    def _check_reward_models(self, config: Config) -> None:
        """Whether reward models of earlier stages will have what their rewards need. A stage that
        is run alone finds their files."""
        made = {stage.folder / "adapter": stage for stage in self.earlier.values()}
        for key, options in config.reward_models.items():
            stage = made.get(options.path)
            if stage is None or self.only is not None:
                continue
            if stage.config.stage != "reward":
                raise ConfigError(
                    f"{self.place}: the reward {key} names stage {stage.name}, which is no reward "
                    "model; name one with stage: reward"
                )
            if options.normalize == "fixed" and stage.config.eval.rows is None:
                raise ConfigError(
                    f"{self.place}: normalize=fixed of the reward {key} needs the mean and std of "
                    f"held-out rewards, and stage {stage.name} has no eval.rows; set its "
                    "eval.rows, or the reward's option normalize to none"
                )

    def _check_kept(self, source: str) -> None:
        """Whether a stage keeps the rollouts of all its steps. One that has ended says so by its
        files."""
        run = self.earlier[source].config.run
        kept = 1 if run.keep_buffers == "all" else run.keep_buffers
        has_one_step = run.steps == 1 and run.epochs is None and run.from_buffer is None
        if self.only is None and kept != 1 and (kept == "none" or not has_one_step):
            raise ConfigError(
                f"{self.place}: data.train.{PAIRS_OF}={source} reads the rollouts of all steps, "
                f"and stage {source} has run.keep_buffers={run.keep_buffers}; set it to all there"
            )

    def _check_from(self, start: Any, own: Tree) -> None:
        self._check_stage(FROM, start)
        if _section(dict(own), "model").get("start") is not None:
            raise ConfigError(
                f"{self.place}: from={start} contradicts model.start, which it sets; leave one out"
            )
        if self.earlier[start].config.stage == "reward" and own.get(STAGE) != "reward":
            raise ConfigError(
                f"{self.place}: from={start} is a reward model, which writes no answers; name it "
                f"as {{stage: {start}}} in critic.start or in a reward's options.path"
            )

    def _check_stage(self, key: str, name: Any) -> None:
        if not isinstance(name, str) or name not in self.earlier:
            raise ConfigError(
                f"{self.place}: {key}={name!r:.60} is no earlier stage; "
                f"{_nearest(str(name), self.earlier)}"
            )

    def _resolved(self, tree: Tree) -> Iterator[str]:
        """Put paths in the place of ``{stage: NAME}``, and tell the names."""
        for key, value in _mappings(tree):
            for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
                if isinstance(inner, dict) and set(inner) == {STAGE}:
                    stage = inner[STAGE]
                    self._check_stage(f"{key}{name}", stage)
                    value[name] = str(self.folder / stage / "adapter")
                    yield stage

    def _rows(self, tree: Tree) -> RowsOfRollouts | None:
        """Rows of ``data.train: {pairs_of: ...}``, whose place is put there."""
        data = _section(tree, "data")
        train = data.get("train")
        if not isinstance(train, dict) or PAIRS_OF not in train:
            return None
        options = dict(train)
        named = options.pop(PAIRS_OF)
        sources = named if isinstance(named, list) else [named]
        for source in sources or [None]:
            self._check_stage(f"data.train.{PAIRS_OF}", source)
            if not self.earlier[source].config.samples:
                raise ConfigError(
                    f"{self.place}: data.train.{PAIRS_OF}={source} is a stage without rollouts; "
                    "name one of the kind rl or sample"
                )
            self._check_kept(source)
        form = self._form(tree)
        try:
            section = PairsSection.model_validate(options)
            section.way(form)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            known = ", ".join(PairsSection.model_fields)
            raise ConfigError(
                f"{self.place}: data.train.{key}={first['input']!r:.60} {wrong(first)}; beside "
                f"{PAIRS_OF} there may be {known}"
            ) from error
        except ConfigError as error:
            raise ConfigError(f"{self.place}: data.train: {error}") from error
        path = self.folder / f"{self.name}.jsonl"
        data["train"] = str(path)
        return RowsOfRollouts(tuple(sources), form, section, path)

    def _form(self, tree: Tree) -> PairForm:
        kind = tree.get(STAGE, "rl")
        preference = tree.get("preference")
        row = preference.get("name") if isinstance(preference, dict) else None
        match kind:
            case "sft":
                return "demonstrations"
            case "reward":
                return "preferences"
            case "preference":
                return "labels" if row == "kto" else "preferences"
        raise ConfigError(
            f"{self.place}: data.train.{PAIRS_OF} contradicts stage={kind}, which learns from no "
            "rows; set stage to sft, reward or preference"
        )


def _mappings(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every mapping and list within the sections, with what stands before its keys."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for name, value in children:
        if isinstance(value, dict | list):
            yield f"{prefix}{name}.", value
            yield from _mappings(value, f"{prefix}{name}.")


def _merged(shared: Tree, own: Tree) -> Tree:
    """``own`` over ``shared``, mapping by mapping; a null takes away what is shared."""
    found = dict(shared)
    for key, value in own.items():
        before = found.get(key)
        both = isinstance(before, dict) and isinstance(value, dict)
        found[key] = _merged(before, value) if both else deepcopy(value)  # type: ignore[arg-type]
    return found


def _section(tree: Tree, name: str) -> Tree:
    """The section of a tree, made if it is not there; one that is no section is left for the check
    of the whole."""
    section = tree.get(name)
    if section is None:
        section = tree[name] = {}
    return section if isinstance(section, dict) else {}


def _is_tree(value: Any) -> bool:
    return isinstance(value, dict)


def _nearest(name: str, names: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return f"name one of {', '.join(names)}" if names else "it is the first; leave it out"
