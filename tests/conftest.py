"""What several tests share: one torch thread, the tiny model, a small run in its own folder.

What imports torch is imported where it is used: the process that only deals the tests needs none.
"""

import gc
import os
import runpy
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two threads are slower beside any other process
os.environ["HF_HUB_OFFLINE"] = "1"

import psutil
import pytest

from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.data import Data, load_data
from reason_llm.data.rows import raise_fault
from reason_llm.score.code import CodeTests
from reason_llm.score.code.sandbox import Sandbox

if TYPE_CHECKING:
    from chromium import Chromium
    from reason_llm.model.base import Model

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "model" / "tiny"

# A shell has what it starts in the background ignore it, and so would the processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """A command leaves its process for Ctrl-C to end, and here that is the tests'."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from reason_llm.model.base import load_tokenizer

    return load_tokenizer(str(TINY))


@pytest.fixture(scope="session")
def shared_model(tokenizer: Any) -> "Iterator[Model]":
    from reason_llm.model.base import Model

    section = ModelSection(
        path=str(TINY), dtype="float32", adapter=AdapterSection(rank=8, alpha=16)
    )
    with Model(section, tokenizer, seed=0) as model:
        yield model


@pytest.fixture(scope="session")
def half_billion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a random model of 0.5 B parameters in bfloat16, for tests/gpu."""
    from gpu_runs import make_model

    return make_model(tmp_path_factory.mktemp("half_billion"))


@pytest.fixture
def model(shared_model: "Model") -> "Model":
    """The tiny model with an adapter that changes something, the same for every test."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for parameter in shared_model.policy.parameters():
        if parameter.requires_grad:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
            parameter.grad = None
    shared_model.policy.eval()
    return shared_model


@pytest.fixture(scope="session", autouse=True)
def one_pass_of_shapes() -> Iterator[None]:
    """A pass of shapes that went well is not made again for the same config and adapter, nor is the
    pass of one token that shows the cache."""
    import torch

    from reason_llm.model import base
    from reason_llm.model.plan import shape

    torch.set_num_threads(1)
    made: set[str] = set()
    caches: dict[str, Any] = {}
    check_pass, cache_of = base._check_pass, shape.cache_of

    def once(path: str, policy: Any) -> None:
        kind = f"{policy.config.to_json_string()} {getattr(policy, 'peft_config', None)}"
        if kind not in made:
            check_pass(path, policy)
            made.add(kind)

    def found(policy: Any) -> Any:
        kind = f"{type(policy)} {policy.config.to_json_string()}"
        if kind not in caches:
            caches[kind] = cache_of(policy)
        return caches[kind]

    base._check_pass, shape.cache_of = once, found
    yield
    base._check_pass, shape.cache_of = check_pass, cache_of


def config_of(tree: dict[str, Any], **overrides: Any) -> Config:
    """A config of ``tree`` with dotted overrides, as keywords with ``__`` for the dot."""
    for key, value in overrides.items():
        *sections, leaf = key.split("__")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[leaf] = value
    return Config.model_validate(tree)


def small_config(folder: Path, **overrides: Any) -> Config:
    """A config for a run of seconds in ``folder``."""
    tree = {
        "run": {
            "name": "small",
            "directory": str(folder / "runs"),
            "buffer": str(folder / "buffer.json"),
            "steps": 3,
            "save_every": 1,  # whatever a checkpoint takes
        },
        "model": {"path": str(TINY), "dtype": "float32", "adapter": {"rank": 8}},
        "data": {
            "train": str(ROOT / "data" / "arithmetic_train.jsonl"),
            "system_prompt": "none",
            "limit": 64,
        },
        "sample": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 32},
        "score": {"rewards": [{"name": "think_answer_tags"}]},
        "algorithm": {"name": "grpo", "kl": "none"},
        "train": {"learning_rate": 1e-3, "gradient_checkpointing": False},
    }
    return config_of(tree, **overrides)


@pytest.fixture
def small_run(tmp_path: Path) -> Callable[..., Config]:
    """A config for a run of seconds in ``tmp_path``."""
    return partial(small_config, tmp_path)


@pytest.fixture
def script(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """A script called in this process: its exit code, standard output and error."""

    def call(name: str, *arguments: str | Path) -> tuple[int, str, str]:
        path = str(ROOT / "scripts" / name)
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(path, run_name="__main__")
        return int(ended.value.code or 0), *capfd.readouterr()

    return call


def tree_of(folder: Path) -> dict[str, bytes]:
    """The content of every file below ``folder``."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="session")
def shared_sandbox() -> Iterator[Sandbox]:
    with Sandbox("auto", num_workers=2) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(shared_sandbox: Sandbox) -> Iterator[Sandbox]:
    """The sandbox; afterwards nothing of the test may be left and the next program must run."""
    others = set(descendants(os.getpid()))  # workers that call checkers
    yield shared_sandbox
    ended = shared_sandbox.run("import os; print(6 * 7, os.listdir('.'))")
    assert (ended.stdout, ended.status) == ("42 ['program.py']\n", 0)
    # a launcher and its fork server each
    most = 2 * shared_sandbox.num_workers
    assert until(lambda: len(set(descendants(os.getpid())) - others) <= most)


@pytest.fixture(scope="module")
def code() -> Iterator[CodeTests]:
    """With so much time that no machine needs it."""
    with CodeTests("auto", timeout_seconds=10, num_workers=2) as code:
        yield code


def until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within five minutes."""
    deadline = time.monotonic() + 300
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie that its new parent has not buried yet."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``; of this process only the sandbox's, as other tests have some
    too."""
    found = children_of(pid)
    if pid == os.getpid():
        found = [each for each in found if is_run_by(each, "jail.launcher")]
    for child in list(found):
        found += children_of(child.pid, recursive=True)
    return [each.pid for each in found]


def children_of(pid: int, *, recursive: bool = False) -> list[psutil.Process]:
    """None where it has ended meanwhile."""
    try:
        return psutil.Process(pid).children(recursive)
    except psutil.NoSuchProcess:
        return []


def is_run_by(process: psutil.Process, name: str) -> bool:
    """Whether the name stands in its command, and it has not ended."""
    try:
        return name in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def load(tokenizer: Any) -> Callable[..., Data]:
    """``load_data`` with options by their dotted names, ``__`` for the dot."""

    def load(
        path: Path | list, room: int = 4000, fault: Any = raise_fault, by: Any = tokenizer,
        **options: Any,
    ) -> Data:  # fmt: skip
        train = path if isinstance(path, list) else str(path)
        tree = {"data": {"train": train, "system_prompt": "none"}, "sample": {"max_new_tokens": 1}}
        config = config_of(tree, **options)
        return load_data(config, by, room + 1, fault, end_token_ids=[by.eos_token_id])

    return load


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs first, so that no process is left with a long file when the others are done."""
    items.sort(key=lambda item: "end_to_end" not in item.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Function) -> None:
    """Spare an engine of vLLM, once that is imported, ten collections of all that was imported, of
    half a second each: it unfreezes as it ends. And a process that imports vLLM to look at a class
    of models, which is for CUDA's sake.

    Whichever files' tests ran in the process before, torch draws the same numbers and what is told
    once in a process is told."""
    sizes = vars(item.module).get("SIZES")
    if "vllm.v1.engine.core" in sys.modules and type(sizes).__name__ == "EngineSizes":
        gc.freeze()
    if registry := sys.modules.get("vllm.model_executor.models.registry"):
        vars(registry)["_run_in_subprocess"] = lambda look: look()
    if folder := sys.modules.get("reason_llm.model.folder"):
        folder.say.cache_clear()
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(crc32(item.nodeid.encode()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed, as text that can be sent from one process to another."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many faults of which phase were suffered, after ``make faults``."""
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    names = [r.nodeid.partition("test_fault[")[2] for r in reports if r.when == "call"]
    phases = Counter(name.partition(":")[0] for name in names if name)
    if phases.total() > 20:
        shown = ", ".join(f"{phase} {count}" for phase, count in sorted(phases.items()))
        terminalreporter.write_line(f"{phases.total()} faults by phase: {shown}")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Chromium]":
    from chromium import Chromium

    with Chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(browser: "Chromium") -> "Chromium":
    """The browser with an empty page."""
    browser.resize(1280, 900)
    browser.call("Page.navigate", url="about:blank")
    browser.wait("location.href === 'about:blank'")
    browser.requests.clear()
    browser.complaints.clear()
    return browser
