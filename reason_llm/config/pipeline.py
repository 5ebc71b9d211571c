"""A pipeline: a config with ``stages``, each an ordinary config and a run of its own, later ones
beginning from earlier ones.

    model: {path: model/tiny}            # sections that all stages share
    stages:
      sft: {stage: sft, data: {train: demonstrations.jsonl}}
      rm: {stage: reward, from: sft, data: {train: preferences.jsonl}}
      ppo: {from: sft, critic: {start: {stage: rm}}, algorithm: {name: ppo}, ...}

A stage's sections are merged into the shared ones, option by option; a list replaces the shared
list, and a null removes the shared section. ``from: sft`` is ``model.start`` with the adapter of
that run, and ``{stage: rm}`` stands for the folder of its adapter wherever an option takes one.
``data.train: {pairs_of: STAGE}``, with the options of the command pairs, are rows that are written
from the rollouts of that stage. The runs live in <run.directory>/<pipeline>/<stage>/.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reason_llm.config.command_line import WITHOUT_CONFIG, read_command_line
from reason_llm.config.file import Mistakes, build, read_yaml, without
from reason_llm.config.pairs import PAIR_FORMS, PairForm, PairsSection
from reason_llm.config.sections import Config
from reason_llm.config.stages import READ_BY, STAGES, usual_form
from reason_llm.config.wrong_values import nearest, wrong
from reason_llm.errors import ConfigError

Tree = dict[str, Any]
FROM, PAIRS_OF, STAGE = "from", "pairs_of", "stage"
SAMPLING = [name for name, stage in STAGES.items() if stage.samples]


@dataclass(frozen=True, slots=True)
class RowsOfRollouts:
    """Rows that are written from the rollouts of earlier stages before a stage begins."""

    sources: tuple[str, ...]
    """The stages whose rollouts are used."""
    form: PairForm
    section: PairsSection
    path: Path
    """The file of the rows."""


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
        """The folder of the stage's run."""
        return self.config.run.directory / self.name

    @property
    def begins_anew(self) -> bool:
        """Whether an earlier run of the stage is moved aside (``run.resume: never``)."""
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
    program: str,
    description: str,
    arguments: Sequence[str],
    switches: Mapping[str, str],
    mistakes: Mistakes,
) -> tuple[Config | Pipeline, set[str]]:
    """A positional config path (default: the quick start), then ``--section.key value`` for any
    option, read as YAML. The config may be a pipeline, of which ``--stage`` names one stage;
    ``mistakes`` are given what is wrong in its options, as by ``load``.

    Returns:
        The config or pipeline, and the switches that were given.
    """
    what = ("CONFIG.yaml", WITHOUT_CONFIG)
    line = read_command_line(program, description, what, arguments, switches, in_force=True)
    if line.what is not None and "stages" in read_yaml(Path(line.what)):
        return load_pipeline(Path(line.what), line.overrides, mistakes), line.given
    return line.config(mistakes), line.given


def load_pipeline(
    path: Path, overrides: Mapping[str, Any], mistakes: Mistakes | None = None
) -> Pipeline:
    """The pipeline in a YAML file.

    Args:
        overrides: dotted options for all stages that read them. ``stage`` names the only stage that
            is run, which alone takes the others; but for ``run.name``, the pipeline's, and
            ``run.directory``.
        mistakes: as ``load``.

    Raises:
        ConfigError: one line with stage, key, value, fix.
    """
    shared, options = read_yaml(path), dict(overrides)
    trees = shared.pop("stages")
    if not isinstance(trees, dict) or not trees or {*map(type, trees.values())} != {dict}:
        raise ConfigError(
            f"{path}: stages={trees!r:.100} are no stages; write stages: {{name: {{sections}}}}"
        )
    only = options.pop(STAGE, None)
    if only is not None and only not in trees:
        raise ConfigError(f"--stage {only!r:.60} is no stage of {path}; {_nearest(only, trees)}")
    run = _section(shared, "run")
    name = options.pop("run.name", None) or run.pop("name", None) or path.stem
    directory = options.pop("run.directory", None) or run.pop("directory", None) or "runs"
    if not isinstance(directory, str | Path):
        raise ConfigError(f"{path}: run.directory={directory!r:.60} is no path; name a folder")
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
    made: dict[str, PipelineStage] = {}
    for stage, tree in trees.items():
        given = options if only in (None, stage) else {}
        builder = _Builder(path, Path(directory) / str(name), stage, only, made, given)
        made[stage] = builder.build(shared, tree, mistakes)
    return Pipeline(path, tuple(made.values()), only)


@dataclass(frozen=True, slots=True)
class _Builder:
    """State while a stage is built."""

    path: Path
    folder: Path
    """The folder of the pipeline's runs."""
    name: str
    only: str | None
    """As in the pipeline."""
    earlier: Mapping[str, PipelineStage]
    overrides: Tree
    """Options of the command line for this stage."""
    adapters: dict[str, None] = field(default_factory=dict)
    """The stages that it names as ``{stage: NAME}``."""

    def build(self, shared: Tree, own: Tree, mistakes: Mistakes | None) -> PipelineStage:
        """The stage whose sections are ``own``, over the ``shared`` ones; errors as of
        ``load_pipeline``."""
        for key in ("name", "directory"):
            if (value := _section(dict(own), "run").get(key)) is not None:
                raise self._error(
                    f"run.{key}={value!s:.60} contradicts the stage, whose run is in "
                    f"{self.folder / self.name}; set run.{key} beside the stages, for all of them"
                )
        kind, start = own.get(STAGE, "rl"), own.pop(FROM, None)
        ignored = [key for key, readers in READ_BY.items() if kind not in readers]
        if start is not None:
            self._check_from(start, own)
            ignored.append("model.adapter")
        if kind in SAMPLING:
            ignored.append("train.rows_per_step")
        tree = _merged(without(shared, ignored), own)
        if start is not None:
            _section(tree, "model")["start"] = {STAGE: start}
        tree = self._resolved(tree)
        rows = self._rows(tree)
        run = _section(tree, "run")
        run |= {"name": self.name, "directory": str(self.folder)}
        run.setdefault("buffer", str(self.folder / self.name / "buffer.json"))
        overrides = self.overrides
        if self.only is None:
            held_out = (("data", "eval"), ("eval", "sets"), ("eval", "rows"))
            if not any(_section(tree, s).get(n) or f"{s}.{n}" in overrides for s, n in held_out):
                ignored.append("eval")
            overrides = {
                key: value
                for key, value in overrides.items()
                if not any(f"{key}.".startswith(f"{name}.") for name in ignored)
            }
        config = build(tree, Path(f"{self.path}, stage {self.name}"), overrides, mistakes)
        if self.only is None:  # a stage that is run alone finds the files of earlier ones
            self._check_reward_models(config)
        return PipelineStage(self.name, config, start, tuple(self.adapters), rows)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}, stage {self.name}: {problem}")

    def _check_reward_models(self, config: Config) -> None:
        """Check that reward models of earlier stages will have what their rewards need."""
        made = {stage.folder / "adapter": stage for stage in self.earlier.values()}
        for key, options in config.reward_models.items():
            stage = made.get(options.path)
            if stage is not None and not stage.config.of_stage.scores:
                raise self._error(
                    f"the reward {key} names stage {stage.name}, which is no reward model; name "
                    "one with stage: reward"
                )
            if stage and options.normalize == "fixed" and stage.config.eval.rows is None:
                raise self._error(
                    f"normalize=fixed of the reward {key} needs the mean and std of held-out "
                    f"rewards, and stage {stage.name} has no eval.rows; set its eval.rows, or the "
                    "reward's option normalize to none"
                )

    def _check_from(self, start: Any, own: Tree) -> None:
        self._check_stage(FROM, start)
        if _section(dict(own), "model").get("start") is not None:
            raise self._error(f"from={start} contradicts model.start, which it sets; leave one out")
        if self.earlier[start].config.of_stage.scores and own.get(STAGE) != "reward":
            raise self._error(
                f"from={start} is a reward model, which writes no answers; name it as "
                f"{{stage: {start}}} in critic.start or in a reward's options.path"
            )

    def _check_stage(self, key: str, name: Any) -> None:
        if not isinstance(name, str) or name not in self.earlier:
            raise self._error(
                f"{key}={name!r:.60} is no earlier stage; {_nearest(name, self.earlier)}"
            )

    def _resolved(self, tree: Any, key: str = "") -> Any:
        """The tree with the folder of an adapter in the place of each ``{stage: NAME}``."""
        if isinstance(tree, dict) and set(tree) == {STAGE}:
            self._check_stage(key, tree[STAGE])
            self.adapters[tree[STAGE]] = None
            return str(self.folder / tree[STAGE] / "adapter")
        if isinstance(tree, list):
            return [self._resolved(value, f"{key}.{n}") for n, value in enumerate(tree)]
        if not isinstance(tree, dict):
            return tree
        return {n: self._resolved(value, f"{key}.{n}" if key else n) for n, value in tree.items()}

    def _rows(self, tree: Tree) -> RowsOfRollouts | None:
        """Rows of ``data.train: {pairs_of: ...}``, which is replaced by their path."""
        data = _section(tree, "data")
        options = data.get("train")
        if not isinstance(options, dict) or PAIRS_OF not in options:
            return None
        named = options.pop(PAIRS_OF)
        sources = named if isinstance(named, list) else [named]
        for source in sources or [None]:
            self._check_source(source)
        kind = tree.get(STAGE, "rl")
        form = usual_form(kind, tree.get("preference"))
        if form not in PAIR_FORMS:
            raise self._error(
                f"data.train.{PAIRS_OF} contradicts stage={kind}, which learns from no rows of "
                "rollouts; set stage to sft, reward or preference"
            )
        try:
            section = PairsSection.model_validate(options)
            section.way(form)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            raise self._error(
                f"data.train.{key}={first['input']!r:.60} {wrong(first)}; beside {PAIRS_OF} there "
                f"may be {', '.join(PairsSection.model_fields)}"
            ) from error
        except ConfigError as error:
            raise self._error(f"data.train: {error}") from error
        path = self.folder / f"{self.name}.jsonl"
        data["train"] = str(path)
        return RowsOfRollouts(tuple(sources), form, section, path)

    def _check_source(self, source: Any) -> None:
        """Check that a stage keeps all its rollouts. A stage that has ended shows it by its
        files."""
        self._check_stage(f"data.train.{PAIRS_OF}", source)
        config = self.earlier[source].config
        if not config.samples:
            raise self._error(
                f"data.train.{PAIRS_OF}={source} is a stage without rollouts; name one of the kind "
                f"{' or '.join(SAMPLING)}"
            )
        run = config.run
        has_one_step = run.steps == 1 and run.epochs is None and run.from_buffer is None
        keeps_all = run.keep_buffers in ("all", 1) or (run.keep_buffers != "none" and has_one_step)
        if self.only is None and not keeps_all:
            raise self._error(
                f"data.train.{PAIRS_OF}={source} reads the rollouts of all steps, and stage "
                f"{source} has run.keep_buffers={run.keep_buffers}; set it to all there"
            )


def _merged(shared: Tree, own: Tree) -> Tree:
    """``own`` merged over ``shared``; a null removes the shared value."""
    merged = {**shared, **own}
    for name, value in own.items():
        if isinstance(value, dict) and isinstance(before := shared.get(name), dict):
            merged[name] = _merged(before, value)
    return merged


def _section(tree: Tree, name: str) -> Tree:
    """The section of a tree, created if missing; a wrong value is left for the later check."""
    section = tree.get(name)
    if section is None:
        section = tree[name] = {}
    return section if isinstance(section, dict) else {}


def _nearest(name: Any, names: Iterable[str]) -> str:
    if near := nearest(name, names):
        return f"did you mean {near}?"
    return f"name one of {', '.join(names)}" if names else "it is the first; leave it out"
