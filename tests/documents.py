"""What README.md and docs/*.md hold beside prose: blocks, commands, quoted messages."""

import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conftest import ROOT

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = ("", "bash", "console", "sh", "shell", "text")
_PROGRAM = re.compile(
    r"(\$ )?(\w+=\S+ )*(echo .*\| *)?"
    r"((\.venv/bin/)?(python[\d.]*|pip\d?|pytest)|make|git|hf|scripts/\w+\.py) +[\w.<'\"/-]"
)
_LOOKS_LIKE_ONE = re.compile(r"\bpython3? |\.venv/bin/|\bpip install|\w+\.py --?\w")


@dataclass(frozen=True, slots=True)
class Block:
    """Indented or fenced lines."""

    where: str
    """File and line."""
    language: str
    """Empty for none."""
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A line that a reader types."""

    where: str
    words: tuple[str, ...]
    output: str
    """What the block shows below it; empty in most."""

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(path: Path) -> Iterator[Block]:
    """The code blocks of a document, in order; an empty line alone ends no indented one."""
    language: str | None = None  # of the fence that is open
    lines: list[str] = []
    start = 0

    def closed(name: str) -> Block:
        block = Block(f"{path.name}:{start}", name, textwrap.dedent("\n".join(lines)).rstrip())
        lines.clear()
        return block

    for number, line in enumerate([*path.read_text().splitlines(), "end"], start=1):
        stripped = line.strip()
        is_indented = line.startswith("    ") or (bool(lines) and not stripped)
        if language is not None and stripped != "```":
            lines.append(line)
        elif language is not None:
            yield closed(language)
            language = None
        elif is_indented:
            start = start if lines else number
            lines.append(line)
        else:
            if lines:
                yield closed("")
            if re.fullmatch(r"```\w*", stripped):
                language, start = stripped[3:], number
    assert language is None, f"{path.name}:{start} is not closed"


def commands(path: Path) -> list[Command]:
    """Every command of a document, in order: lines of shell blocks, and `code` within the text that
    begins with a program and an argument."""
    found: list[tuple[int, Command]] = []
    for block in blocks(path):
        if block.language not in SHELL:
            continue
        first = int(block.where.rpartition(":")[2]) + bool(block.language)
        lines = block.text.splitlines()
        for i, line in enumerate(lines):
            if _PROGRAM.match(line) is None:
                assert not _LOOKS_LIKE_ONE.search(line), f"{block.where}: {line!r} is no command?"
                continue
            rest = lines[i + 1 :]
            stop = next((n for n, each in enumerate(rest) if _PROGRAM.match(each)), len(rest))
            where = f"{path.name}:{first + i}"
            found.append((first + i, Command(where, _words(line), "\n".join(rest[:stop]))))
    for number, line in _prose(path):
        for code in re.findall(r"`([^`]+)`", line):
            if _PROGRAM.match(code):
                found.append((number, Command(f"{path.name}:{number}", _words(code), "")))
    return [command for _, command in sorted(found, key=lambda pair: pair[0])]


def quotes(path: Path) -> list[tuple[str, str]]:
    """(where, message) for each line ``> message``."""
    return [
        (f"{path.name}:{number}", line[2:].strip())
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if line.startswith("> ")
    ]


def _words(line: str) -> tuple[str, ...]:
    words = shlex.split(line.removeprefix("$ "), comments=True)
    return tuple(word.removeprefix(".venv/bin/") for word in words)


def _prose(path: Path) -> Iterator[tuple[int, str]]:
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        is_fence = re.fullmatch(r"\s*```\w*", line) is not None
        if not is_fence and not fenced and not line.startswith("    "):
            yield number, line
        fenced ^= is_fence
