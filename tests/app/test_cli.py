"""``reason-llm COMMAND``: what all commands share, and what is told before one is known."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from conftest import ROOT, TINY
from reason_llm.app.cli import COMMANDS, main, run_command
from reason_llm.config import command
from reason_llm.config.file import load
from reason_llm.errors import DataError, Stopped

CALL = "import sys; from reason_llm.app.cli import main; code = main(); "


@pytest.mark.parametrize("arguments", [["--help"], ["trian"], []])
def test_help_and_mistakes_are_told_before_anything_heavy_is_loaded(arguments: list[str]) -> None:
    code = CALL + "print({'torch', 'transformers', 'pydantic'} & set(sys.modules)); sys.exit(code)"
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT
    )
    assert ended.stdout.splitlines()[-1] == "set()"
    assert ended.returncode == (0 if arguments == ["--help"] else 2)
    assert len(ended.stderr.splitlines()) == (0 if arguments == ["--help"] else 1)


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert set(COMMANDS) - {"plan"} == scripts - {
        "benchmark", "make_countdown", "make_digits", "make_tiny", "make_wordle",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["trian"], "error: unknown command 'trian'; did you mean train?\n"),
        (["\x1b[31m"], "error: unknown command '\\x1b[31m'; name one of train, plan, evaluate, "
         "chat, serve, export, report, rescore, pairs\n"),
        ([], "error: no command; name one of train, plan, evaluate, chat, serve, export, report, "
         "rescore, pairs, or see reason-llm --help\n"),
        (["report"], "error: the following arguments are required: RUN; see --help\n"),
        (["plan", "--run.stesp", "3"], "error: unknown argument '--run.stesp'; did you mean "
         "--run.steps?\n"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(given) == 2
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"usage: reason-llm {name} ")
    assert "scripts/" not in shown.out
    assert "{" not in shown.out.partition("options:")[0]
    assert shown.err == ""


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (DataError("no rows in x"), 2, "error: no rows in x\n"),
        (KeyboardInterrupt(), 130, "it goes on\n"),
        (Stopped(143), 143, "it goes on\n"),
        (SystemExit(0), 0, ""),
    ],
)
def test_how_a_command_ends(
    error: BaseException, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(raising(error), "it goes on") == code
    assert capsys.readouterr().err == told
    assert run_command(lambda: None) == 0
    assert run_command(lambda: 2) == 2


@pytest.mark.parametrize("error", [RuntimeError("a bug"), SystemExit(3)])
def test_a_bug_keeps_its_traceback(error: BaseException) -> None:
    with pytest.raises(type(error)):
        run_command(raising(error))


def test_a_reader_that_goes_away_ends_the_help_as_other_programs() -> None:
    # argparse ignores the error where the text is longer than the output's buffer.
    reader, output = os.pipe()
    os.close(reader)
    for arguments, codes in ((["--help"], {141}), (["train", "--help"], {0, 141})):
        command = [sys.executable, "-c", CALL + "sys.exit(code)", *arguments]
        ended = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, cwd=ROOT)
        assert ended.stderr == b""
        assert ended.returncode in codes
    os.close(output)


def test_the_quick_start_of_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    here = load(None, {"run.steps": 3})
    assert (here.model.path, here.data.eval) == ("model/tiny", "data/arithmetic_test.jsonl")
    monkeypatch.chdir(tmp_path)
    config = load(None, {"run.steps": 3, "data.eval": None})
    assert config.run.name == here.run.name == "quickstart"
    assert config.run.steps == 3
    assert config.model.path == str(TINY)
    assert config.data.sources[0].source == str(ROOT / "data" / "arithmetic_train.jsonl")
    assert config.data.eval is None
    assert not config.run.directory.is_absolute()


def test_a_folder_of_its_own_quick_start_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.yaml").write_text("data: {train: mine.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    assert load(None, {}).data.sources[0].source == "mine.jsonl"


def test_commands_are_called_as_this_one_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/reason-llm", "train", "a.yaml", "--quiet"])
    assert command("rescore") == "reason-llm rescore"
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "a.yaml"])
    monkeypatch.chdir(ROOT)
    assert command("rescore") == "python scripts/rescore.py"


def test_outside_of_the_clone_the_installed_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts are called by their path there, and ``python scripts/report.py`` names none."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "train.py"), "a.yaml"])
    for folder in (tmp_path, ROOT / "docs"):
        monkeypatch.chdir(folder)
        assert command("report") == "reason-llm report"


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    called = [sys.executable, "-m", "reason_llm", "report", "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(called, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: reason-llm report")


AT_EXIT = """
import atexit, os, signal, sys, threading, time
from reason_llm.app.cli import run_command

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

def body():
    {body}

{when}
sys.exit(run_command(body, "stopped; the same command resumes it"))
"""
BODIES = {
    "after Ctrl-C": ("raise KeyboardInterrupt", "stopped; the same command resumes it\n"),
    "after its end": ("return 0", ""),
}
MOMENTS = {
    "in what runs at exit": "atexit.register(interrupt)",
    "while threads are awaited": "threading.Thread(target=lambda: (threading.main_thread().join(), "
    "os.kill(os.getpid(), signal.SIGINT), time.sleep(60))).start()",
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("body", BODIES)
def test_ctrl_c_while_a_command_exits_shows_no_traceback(body: str, moment: str) -> None:
    does, told = BODIES[body]
    code = AT_EXIT.format(body=does, when=MOMENTS[moment])
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.stderr == told
    assert ended.returncode == -signal.SIGINT


def test_ctrl_c_while_a_command_is_imported_shows_no_traceback() -> None:
    code = (
        "import importlib, sys; from reason_llm.app.cli import call\n"
        "def interrupted(name): raise KeyboardInterrupt\n"
        "importlib.import_module = interrupted\n"
        "sys.exit(call('train', 'train', []))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ended.stderr == "stopped; the same command resumes it\n"
    assert ended.returncode == 130


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("reason-llm ev", {"evaluate"}),
        ("reason-llm train --run.se", {"--run.seed"}),
        ("reason-llm export --gg", {"--gguf"}),
        ("reason-llm serve --wh", {"--which"}),
        ("reason-llm rescore --sc", {"--score.rewards", "--score.sandbox"}),
        ("reason-llm train --algorithm.name dr", {"dr_grpo"}),
        ("reason-llm plan --data.contamination ", {"warn", "drop", "ignore"}),
        ("reason-llm train --model.trust_remote_code t", {"true"}),
    ],
)
def test_bash_completes_commands_options_and_values(
    line: str, completed: set[str], completion: Path
) -> None:
    words = " ".join(f"'{word}'" for word in line.split(" "))
    program = f"""
        source {completion}
        COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        [[ $(complete -p reason-llm) == *"-F "* ]] && _reason_llm && echo "${{COMPREPLY[@]}}"
    """
    ended = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert (completed <= {*ended.stdout.split()}, ended.stderr) == (True, "")
    assert all(each.startswith(line.split(" ")[-1]) for each in ended.stdout.split())


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script that is printed."""
    file = tmp_path_factory.mktemp("completion") / "reason-llm.bash"
    with file.open("w") as out, redirect_stdout(out):
        assert main(["--print-completion", "bash"]) == 0
    return file


def test_a_shell_without_a_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-completion", "fish"]) == 2
    assert capsys.readouterr().err == "error: --print-completion 'fish' is not one of bash, zsh\n"
