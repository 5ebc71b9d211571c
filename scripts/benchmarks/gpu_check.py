"""``benchmark.py gpu-check``: what this card can do of what the project needs, one verdict a line.

1. Triton's compiler, Python's headers and enough host memory are there; vLLM's CUDA extensions load
   and compute.
2. vLLM, views, adapter and learner start; every base weight lies in vLLM's pool of weights.
3. Three rounds: wake, sync, canary, sample; then release and learn.
4. Planned and measured memory; nothing stays in vLLM's pools after closing.

A line that needs CUDA is said to be skipped without it. A check that fails ends no other one that
can still run.
"""

import gc
import importlib.util
import os
import shutil
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import device, models, ours
from benchmarks.work import Work, prompts
from reason_llm.model import Model, default_device, load_tokenizer, to_data
from reason_llm.model.attention import INSTALL_FLA
from reason_llm.model.plan import Meter, Plan
from reason_llm.rollout import Group
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling
from reason_llm.train import Learner, Learners, learning, with_advantages

ROUNDS = 3
MIN_HOST_GIB = 8
PROMPTS, COMPLETIONS, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 4, 200, 64
Verdict = Literal["ok", "FAILS", "skipped"]


class Report:
    """The verdicts, printed one by one."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._started = time.perf_counter()
        self.verdicts: list[tuple[Verdict, str]] = []

    def check(self, name: str, act: Callable[[], str | None], needs_cuda: bool = False) -> bool:
        """Run one check; its result is printed after the verdict. Return whether it passed."""
        if needs_cuda and not device.has_gpu():
            self._tell("skipped", name, "needs CUDA")
            return False
        started = time.perf_counter()
        try:
            detail = act()
        except Exception:  # noqa: BLE001 - a check that fails is a line of the report
            self._tell("FAILS", name, traceback.format_exc())
            return False
        self._tell("ok", name, f"{time.perf_counter() - started:.1f} s", detail or "")
        return True

    def note(self, line: str) -> None:
        """A line without a verdict."""
        self._say(f"{'':>19}{line}")

    def skip(self, name: str, reason: str) -> None:
        """A check that cannot run, since an earlier one failed."""
        self._tell("skipped", name, reason)

    def end(self) -> int:
        """The last line; the number of checks that failed."""
        counts = {
            verdict: sum(passed == verdict for passed, _ in self.verdicts)
            for verdict in ("ok", "skipped", "FAILS")
        }
        self._say(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
        return counts["FAILS"]

    def _tell(self, verdict: Verdict, name: str, *details: str) -> None:
        self.verdicts.append((verdict, name))
        seconds = time.perf_counter() - self._started
        text = "; ".join(filter(None, details))
        self._say(f"[{seconds:6.1f} s] {verdict:<8} {name}: {text}")


def run(
    quantize: Literal["none", "nf4"], shape: str, folder: Path, say: Callable[[str], None]
) -> int:
    """All checks on a random model of a shape made in ``folder``; the number that failed."""
    report = Report(say)
    report.note(device.describe())
    report.check(
        "a C compiler and Python's headers, which Triton needs", _compiler, needs_cuda=True
    )
    report.check(f"{MIN_HOST_GIB} GiB of host memory", _host_memory, needs_cuda=True)
    if importlib.util.find_spec("fla") is None:
        report.note(f"fla is not installed: rows of Qwen3.5 are padded; {INSTALL_FLA}")
    else:
        report.note("fla is installed: rows of Qwen3.5 are packed")
    report.check("vLLM's extensions load", _extensions, needs_cuda=True)
    report.check("vLLM's rms_norm computes", _rms_norm, needs_cuda=True)
    if report.check(f"a random {shape}", lambda: models.make(shape, folder)):
        _stages(report, _work(str(folder), quantize))
    gc.collect()
    report.check("vLLM's pools are empty after closing", _pools_are_empty, needs_cuda=True)
    return report.end()


def _work(model: str, quantize: str) -> Work:
    return Work(
        model=model,
        kind="nf4" if quantize == "nf4" else "bf16",
        prompts=PROMPTS if device.has_gpu() else 2,
        completions=COMPLETIONS,
        prompt_tokens=PROMPT_TOKENS if device.has_gpu() else 24,
        completion_tokens=COMPLETION_TOKENS if device.has_gpu() else 16,
        rank=8,
        repeats=ROUNDS,
        warmup=False,
    )


def _compiler() -> str:
    """The compiler that Triton calls at the first use of a kernel (triton/runtime/build.py)."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise AssertionError("neither gcc nor clang is there; apt install gcc")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise AssertionError(f"{header} is missing; apt install python{version}-dev")
    return compiler


def _host_memory() -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / device.GIB
    if gib < MIN_HOST_GIB:
        raise AssertionError(f"it has {gib:.1f} GiB")
    return f"{gib:.0f} GiB"


def _extensions() -> str:
    """Kernels, the allocator that gives memory back, the FlashAttention that vLLM takes here."""
    import vllm._C_stable_libtorch
    import vllm.cumem_allocator  # noqa: F401
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    version = get_flash_attn_version()
    if version is None or not is_fa_version_supported(version):
        raise AssertionError(f"FlashAttention {version} does not load")
    return f"FlashAttention {version}"


def _rms_norm() -> None:
    """One of vLLM's kernels runs on this card, and is right."""
    import vllm._custom_ops as ops

    rows, weight = torch.randn(8, 896, device="cuda").bfloat16(), torch.ones(896, device="cuda")
    computed = torch.empty_like(rows)
    ops.rms_norm(computed, rows, weight.bfloat16(), 1e-6)
    expected = torch.nn.functional.rms_norm(rows.float(), (896,), eps=1e-6)
    difference = float((computed.float() - expected).abs().max())
    if difference > 0.05:
        raise AssertionError(f"it differs by {difference:.3f}")


def _stages(report: Report, work: Work) -> None:
    """Start, rounds, plan and measurement; the model is closed before this returns."""
    meter, plan = Meter(default_device()), ours.plan_of(work)
    config = ours.config_of(work)
    models: list[Model] = []  # ``close`` empties it: no name here keeps the model alive

    def start() -> str:
        tokenizer = load_tokenizer(work.model)
        models.append(Model(config.model, tokenizer, 0, plan.engine, checkpointing=True))
        return _in_use()

    if not report.check("vLLM, views that are the checkpoint's, adapter", start):
        report.skip("rounds", "there is no model")
        return

    def close() -> str:
        models.pop().__exit__(None, None, None)
        return _in_use()

    report.check(
        "every base weight lies in vLLM's pool of weights",
        lambda: _weights_lie_in_their_pool(models[0]),
        needs_cuda=True,
    )
    rounds = _Rounds(report, work, plan, meter, models[0])
    rows = "padded rows" if config.train.packing == "padded" else "rows end to end proven"
    if report.check(f"learner, {rows}", rounds.make_learner):
        rounds.run()
    del rounds
    report.check("close", close)
    for line in plan.table():
        report.note(line)


class _Rounds:
    """Check sampling and learning in turn."""

    def __init__(self, report: Report, work: Work, plan: Plan, meter: Meter, model: Model) -> None:
        self.report = report
        self.work = work
        self.plan = plan
        self.meter = meter
        self.model = model
        self.groups: list[Group] = []
        self.prompts = prompts(work, 0)

    def make_learner(self) -> None:
        config = ours.config_of(self.work)
        self.learner = Learner(self.model, ours.settings_of(config, self.work, self.plan))

    def run(self) -> None:
        """Each with another adapter: what is sampled must follow it."""
        for number in range(1, ROUNDS + 1):
            _randomize(self.model, number)
            name = f"round {number}: wake, sync, canary, sample"
            if not self.report.check(name, partial(self._sample, number)):
                self.report.skip(f"round {number}: release, learn", "nothing was sampled")
                return
            self.report.check(f"round {number}: release", self._release, needs_cuda=True)
            self.report.check(f"round {number}: learn", partial(self._learn, number))

    def _sample(self, seed: int) -> str:
        params = SamplingParams(self.work.completions, self.work.completion_tokens)
        with sampling(self.model, self.plan.cache_tokens) as sampler, self.meter.phase() as peak:
            checks = prove_sampler_is_policy(sampler, self.model, self.prompts)
            self.groups = sampler.sample(self.prompts, params, seed, lambda tokens, items: None)
        text = ", ".join(f"{name.split('/')[-1]} {value:.4f}" for name, value in checks.items())
        return f"{text}; {_of_planned(peak.gib, self.plan.peak.sampling)}"

    def _release(self) -> str:
        engine: Any = self.model.engine
        before = device.free_bytes()
        engine.release()
        gained = device.free_bytes() - before
        if gained < 0.9 * engine.kv_cache_bytes:
            raise AssertionError(f"{gained:,} of {engine.kv_cache_bytes:,} bytes came back")
        return f"{gained / device.GIB:.2f} GiB came back"

    def _learn(self, step: int) -> str:
        scored = to_data(with_advantages(ours.rewarded(self.groups), ours.ROW))
        with learning(self.learner), self.meter.phase() as peak:
            metrics = Learners(self.learner).learn(step, scored, lambda items: None)
        norm = metrics["train/grad_norm"]
        if not norm > 0:
            raise AssertionError(f"the gradient's norm is {norm}")
        return f"gradient {norm:.3g}; {_of_planned(peak.gib, self.plan.peak.learning)}"


def _of_planned(measured_gib: float, planned_bytes: int) -> str:
    return f"{measured_gib:.2f} GiB of {planned_bytes / device.GIB:.2f} planned"


@torch.no_grad()
def _randomize(model: Model, seed: int) -> None:
    """An adapter that changes something, another one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.policy.named_parameters():
        if parameter.requires_grad:
            scale = 0.05 if "lora_B" in name else 0.4 * parameter.shape[1] ** -0.5
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def _in_use() -> str:
    device.settle()
    return f"{device.used_bytes() / device.GIB:.2f} GiB in use"


def _pool_allocations() -> dict[int, Any]:
    """vLLM's allocations by address."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    return {} if allocator is None else dict(allocator.pointer_to_data)


def _weights_lie_in_their_pool(model: Model) -> str:
    """No parameter of the base in memory that is given back while learning."""
    spans = [(start, start + a.handle[1], a.tag) for start, a in _pool_allocations().items()]
    counts: dict[str, int] = {}
    for name, parameter in model.policy.named_parameters():
        where = (tag for start, end, tag in spans if start <= parameter.data_ptr() < end)
        tag = next(where, "torch's own memory")
        counts[tag] = counts.get(tag, 0) + 1
        if not parameter.requires_grad and tag != "weights":
            raise AssertionError(f"{name} lies in {tag}")
    return ", ".join(f"{count} parameters in {tag}" for tag, count in counts.items())


def _pools_are_empty() -> None:
    remaining = _pool_allocations()
    if remaining:
        size = sum(a.handle[1] for a in remaining.values())
        raise AssertionError(
            f"{len(remaining)} allocations, {size:,} bytes: no second engine can start"
        )
