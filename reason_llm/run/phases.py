"""The memory phases of a run: what is on the device, and the record of what each took."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from reason_llm.errors import Stopped
from reason_llm.model import Model
from reason_llm.model.plan import Meter
from reason_llm.run.start.prepare import Job
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store.metrics import Record, timed
from reason_llm.run.team import Team
from reason_llm.run.watch import Watch
from reason_llm.sample import CANARY_PROMPTS, Sampler, prove_sampler_is_policy, sampling
from reason_llm.train import Learner, learning


@dataclass(eq=False)
class Phases:
    """One memory phase at a time over the resident base."""

    job: Job
    policy: Learner
    team: Team
    watch: Watch
    stop: StopSignal
    meter: Meter
    save: Callable[[], None]
    """Saves the steps that are not saved yet."""
    record: Record = field(default_factory=dict)
    """The record of the current step, as far as it is known."""

    @property
    def model(self) -> Model:
        """The resident base with its roles."""
        return self.policy.model

    @contextmanager
    def sampling(self, version: int) -> Iterator[Sampler]:
        """Weights and KV cache: this process's sampler, with the policy of the given number of
        learned steps, after the check that both engines have the same policy."""
        with (
            self.team.at(version),
            sampling(self.model, self.job.plan.cache_tokens) as sampler,
            self._measured("sampling"),
        ):
            if self.model.engine is not None:
                short = self.job.data.shortest(CANARY_PROMPTS)
                proof = prove_sampler_is_policy(sampler, self.model, short)
                self.record |= proof
                share = proof.get("sample/route_agreement")
                if share is not None and version == self.team.version_of(self.job.state.step):
                    self.watch.line(
                        f"routes: sampler and learner choose the same experts for {share:.1%} of "
                        "tokens and layers"
                    )
            yield sampler

    @contextmanager
    def reading(self, title: str, count: int) -> Iterator[Callable[[int], None]]:
        """Weights and another model that reads ``count`` rollouts; yields its progress callback."""
        with self.saved_if_stopped():
            self.stop.check()
            with (
                timed(self.record, "scoring"),
                learning(self.policy),
                self._measured("scoring"),
                self.watch.phase(title, count) as progress,
            ):
                yield lambda rows: progress(0, rows)

    @contextmanager
    def learning(self, rows: int) -> Iterator[Callable[[int], None]]:
        """Weights, activations and optimizer; yields the callback of the progress over ``rows``."""
        with (
            timed(self.record, "learning"),
            learning(self.policy),
            self._measured("learning"),
            self.watch.phase("learning", rows) as progress,
        ):
            yield lambda learned: progress(0, learned)

    @contextmanager
    def saved_if_stopped(self) -> Iterator[None]:
        """If a signal ends the run in this block, save the steps that are not saved yet."""
        try:
            yield
        except Stopped:
            self.save()
            raise

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        """Record the peak of memory in the block; a step may be sampled or scored in several."""
        with self.meter.phase() as peak:
            yield
        name = f"memory/{phase}_peak_gib"
        self.record[name] = max(peak.gib, float(self.record.get(name) or 0))
