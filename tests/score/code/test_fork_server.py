"""A program is a fork of a warm interpreter: it starts and ends as in a fresh one, and finds
nothing of another program or of its tests."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from code_rewards import AMPLE, outcome
from reason_llm.score.code import CodeTests
from reason_llm.score.code.sandbox import Sandbox


@pytest.fixture(scope="module")
def single() -> Iterator[Sandbox]:
    """One worker: each program follows the other on it."""
    with Sandbox("auto", num_workers=1) as sandbox:
        yield sandbox


START = """
import ctypes, gc, os, resource, signal, sys, threading
attributes = ctypes.create_string_buffer(64)
size = ctypes.c_size_t()
ctypes.CDLL(None).pthread_getattr_default_np(attributes)
ctypes.CDLL(None).pthread_attr_getstacksize(attributes, ctypes.byref(size))
print(size.value, [resource.getrlimit(n) for n in range(16)])
print([signal.getsignal(n) for n in range(1, 32)], signal.pthread_sigmask(0, []))
print(sys.flags, sys.path, sys.executable, sys.prefix, sorted(os.environ.items()))
print(hash("a"), hash((1, "b")), __name__, gc.isenabled(), gc.get_threshold(), os.getcwd())
print(threading.active_count(), threading.current_thread() is threading.main_thread())
for stream in (sys.stdin, sys.stdout, sys.stderr):
    print(stream.encoding, stream.errors, stream.line_buffering, stream.seekable(), stream.mode)
    print(stream.fileno(), stream.name, stream.buffer.raw.closefd, stream.buffer.raw._blksize)
print(os.getuid(), os.getgid(), os.getgroups(), os.umask(0o22), ctypes.CDLL(None).prctl(39))
"""


def test_a_program_starts_as_in_a_fresh_interpreter(single: Sandbox) -> None:
    """It starts one, which is compared with its own."""
    program = (
        f"import subprocess, sys\nSTART = {START!r}\nexec(START)\n"
        "fresh = subprocess.Popen([sys.executable, '-s', '-S', '-c', START], stdin=-1, stdout=-1,"
        " stderr=-1)\n"
        "print('FRESH', *fresh.communicate(), sep='\\n')\n"
    )
    ended = single.run(program, limits=AMPLE)
    assert ended.stderr == ""
    own, _, fresh = ended.stdout.partition("FRESH\n")
    shown, errors = (eval(line) for line in fresh.splitlines())
    assert (own, errors) == (shown.decode(), b"")
    assert single.run("import sys; print(sys.argv, sys.getrecursionlimit())").stdout == (
        "['program.py'] 10000\n"
    )


ENDS = {
    "normal": "print(1, end='')",
    "exit": "import sys; print(1); sys.exit()",
    "exit code": "import sys; print(1); sys.exit(3)",
    "large code": "import sys; sys.exit(256 + 7)",
    "negative code": "import sys; sys.exit(-1)",
    "true": "import sys; sys.exit(True)",
    "text": "import sys; sys.exit('gone')",
    "own exit class": "class E(SystemExit): code = property(lambda s: 4)\nraise E(2)",
    "error": "1 / 0",
    "interrupt": "raise KeyboardInterrupt",
    "hook": "import sys\nsys.excepthook = lambda *given: print('hook', given[0])\n1 / 0",
    "hook that exits": "import sys\nsys.excepthook = lambda *given: sys.exit(5)\n1 / 0",
    "_exit": "import os; print(1); os._exit(2)",
    "own _exit": "import os; os._exit = lambda code: print('no')\nprint(1)",
    "own collect": "import gc; gc.collect = lambda *given: 1 / 0\nprint(1)",
    "atexit": "import atexit\nfor n in (1, 2): atexit.register(print, n)\nprint(0)",
    "atexit that raises": "import atexit; atexit.register(lambda: 1 / 0)\nprint(0)",
    "atexit that exits": "import atexit, os; atexit.register(os._exit, 5)\nprint(0, flush=True)",
    "atexit cleared": "import atexit; atexit.register(print, 1); atexit._clear()\nprint(0)",
    "thread": "import threading, time\ndef f():\n    time.sleep(.1); print(2)\n"
    "threading.Thread(target=f).start(); print(1)",
    "daemon": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(99,), daemon=True).start(); print(1)",
    "thread that raises": "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()",
    "finalizer": "class A:\n    def __del__(self): print('del')\na = A()\nprint(1)",
    "finalizer in a cycle": "class A:\n    def __del__(self): print('del')\n"
    "a = A(); a.own = a\ndef f(): return a\nprint(1)",
    "finalizer after an error": "class A:\n    def __del__(self): print('del')\na = A()\n1 / 0",
    "file": "f = open('/dev/stdout', 'w'); f.write('held')",
    "own stdout": "import sys, io\nprint(1)\n"
    "sys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint(2)",
    "stdout by descriptor": "import sys\nprint(1); sys.stdout = open(1, 'w'); print(2)",
    "no stdout": "import sys\nprint(1); sys.stdout = None",
    "stdout closed": "import sys; print(1); sys.stdout.close()",
    "descriptor closed": "import os; print(1); os.close(1)",
    "stdout that fails": "import sys\nclass A:\n    closed = False\n    def flush(self): 1 / 0\n"
    "sys.stdout = A()",
    "no modules": "import sys; sys.modules.clear(); print(1)",
    "fork": "import os\nif os.fork() == 0: print('child', flush=True)\nelse: os.wait(); print(1)",
    "syntax": "def f(:",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_as_in_a_fresh_interpreter(
    single: Sandbox, tmp_path: Path, name: str
) -> None:
    (tmp_path / "program.py").write_text(ENDS[name])
    command = "exec(compile(open('program.py').read(), 'program.py', 'exec'))"
    fresh = subprocess.run(
        [sys.executable, "-s", "-S", "-c", command],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
    )
    ended = single.run(ENDS[name])
    assert (ended.status, ended.stdout) == (fresh.returncode, fresh.stdout)
    assert ended.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_what_one_program_changes_the_next_does_not_see(single: Sandbox) -> None:
    change = """
import builtins, decimal, gc, math, os, random, re, signal, sys, threading, typing, functools
math.sqrt = builtins.sorted = re.match = functools.reduce = lambda *given: 7
random.random = random._inst.random = lambda: 7
sys.modules["json"] = math
sys.path.append("/left"); sys.argv.append("left"); os.environ["LEFT"] = "left"
sys.setrecursionlimit(50); gc.disable(); decimal.getcontext().prec = 3
signal.signal(signal.SIGINT, signal.SIG_IGN); threading.stack_size(1 << 20)
typing.left = sys.left = builtins.left = 7
re.compile("left"); os.chdir("/"); os.umask(0o77)
"""
    look = """
import builtins, decimal, gc, json, math, os, random, re, signal, sys, threading, typing
print(math.sqrt(4), sorted([2, 1]), bool(re.match("a", "a")), random.random() < 1, json.dumps([1]))
print("left" in str((sys.path, sys.argv, os.environ, re._cache)), gc.isenabled())
print(sys.getrecursionlimit(), decimal.getcontext().prec, threading.stack_size(), os.getcwd())
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, os.umask(0))
print(any(hasattr(module, "left") for module in (typing, sys, builtins)))
"""
    before = single.run(look).stdout
    assert single.run(change).status == 0
    assert single.run(look).stdout == before
    assert before.splitlines()[1:] == ["False True", "10000 28 0 /tmp", "True 18", "False"]


def test_random_numbers_differ_from_one_program_to_the_next(single: Sandbox) -> None:
    program = "import random, os; print(random.random(), os.urandom(4))"
    assert len({single.run(program).stdout for _ in range(3)}) == 3


def test_a_program_cannot_report_its_own_end(single: Sandbox) -> None:
    program = """
import os
for number in range(3, 1024):
    for text in (b'{"status": 0, "cpu_seconds": 0}', b"ended", b"2"):
        try: os.write(number, text)
        except OSError: pass
os._exit(3)
"""
    assert single.run(program).status == 3


FOUND = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
def found(*words):
    '''Which of these are in this process's memory; each is given by its next letters.'''
    table = bytes((n + 1) % 256 for n in range(256))
    words, seen = [word.encode() for word in words], set()
    file = os.open("/tmp/page", os.O_RDWR | os.O_CREAT)
    tops = (libc.sbrk(0), id(words), id(os.__dict__), ctypes.addressof(ctypes.c_char()))
    starts = {top + n * 4096 & -4096 for top in tops for n in range(-4096, 4096)}
    page = b""
    for start in sorted(starts):
        last = page[-64:]
        os.lseek(file, 0, 0)
        size = libc.write(file, ctypes.c_void_p(start), 4096)  # no fault where there is no memory
        page = os.pread(file, size, 0) if size > 0 else b""
        seen |= {word for word in words if word in (last + page).translate(table)}
        if seen == set(words): break
    return [word in seen for word in words]
"""


def coded(*words: str) -> str:
    """The words in a form in which the program that looks for them does not hold them."""
    return str(["".join(chr(ord(letter) + 1) for letter in word) for word in words])[1:-1]


def test_nothing_of_another_program_is_in_memory(single: Sandbox) -> None:
    """Neither its source nor its input and output; the program's own is found."""
    for _ in range(3):
        single.run("print('marker-of-source', input())", stdin="marker-of-input\n")
    look = f"{FOUND}\nmine = 'my-own-marker'\n"
    look += f"print(found({coded('marker-of-source', 'marker-of-input', 'my-own-marker')}))"
    ended = single.run(look, stdin="marker-of-this-input\n")
    assert (ended.stdout, ended.stderr) == ("[False, False, True]\n", "")
    own_input = f"{FOUND}\nprint(found({coded('marker-of-this-input')}))"
    assert single.run(own_input, stdin="marker-of-this-input\n").stdout == "[False]\n"


def test_nothing_of_its_tests_is_in_the_memory_of_a_program() -> None:
    program = f"{FOUND}\nmine = 'my-own-marker'\n"
    program += f"def f(): return found({coded('marker-expected', 'my-own-marker')})\n"
    with CodeTests("auto", num_workers=1) as code:
        asserts = {"test": "assert f() != 'marker-expected'\nassert f() == [False, True]\n"}
        assert outcome(code, asserts, program).passed == 2
        calls = {"fn_name": "f", "inputs": [[], []], "outputs": ["marker-expected", [False, True]]}
        assert outcome(code, calls, program).passed == 1
