"""The terminal side of a chat: messages typed, answers streamed, commands.

What a model says is data: whatever a terminal would act on is spelled out, character by character,
so that nothing can hide in the seam of two pieces. Lines and two styles, no cursor movement: it
works wherever a shell does.
"""

import difflib
import os
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TextIO

from reason_llm.app.chat import Chat, Options, parse_option
from reason_llm.data import system_prompt
from reason_llm.errors import ReasonError, printable, secrets, without_secrets

KEPT = "\n\t\u00a0\u202f\u3000\u200d"
"""Unprintable by Python's rule and harmless: line ends, tabs, spaces, the joiner inside emoji."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"

HELP = """\
/base, /adapter        who answers next; the conversation goes on
/again                 the last message once more
/new                   forget the conversation
/system TEXT           another system prompt (none: without)
/temperature 0.7       likewise /top_p /top_k /min_p /max_new_tokens /seed
/settings              all of these
/help, /quit           this, and the end (or Ctrl-D)
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one; so does
all between two lines of three quotes. What is pasted is one message. A message
that begins with / needs a space before it."""


class AnswerWriter:
    """Writes an answer's pieces without the environment's secrets; the thinking part is dim.

    Args:
        styled: whether the terminal takes styles.
        thinking: whether the answer begins within the thinking part.
    """

    def __init__(self, out: TextIO, styled: bool, thinking: bool) -> None:
        self._out = out
        self._styled = styled
        self._thinking = thinking
        self._held = ""
        self._secrets = secrets()
        if thinking:
            self._style(DIM)

    def write(self, piece: str) -> None:
        """Show a piece, except an end that may become a tag or a secret."""
        text = without_secrets(self._held + piece, self._secrets)
        while (at := text.find(self._tag)) >= 0:
            end = at + len(self._tag)
            if self._thinking:
                self._show(text[:end])
                self._style(PLAIN)
            else:
                self._show(text[:at])
                self._style(DIM)
                self._show(text[at:end])
            self._thinking, text = not self._thinking, text[end:]
        keep = max(_begun(text, each) for each in (self._tag, *self._secrets))
        self._held = text[len(text) - keep :]
        self._show(text[: len(text) - keep])
        self._out.flush()

    def end(self) -> None:
        """Show the rest and restore the terminal's own style."""
        self._show(self._held)
        self._held = ""
        self._style(PLAIN)
        self._out.flush()

    @property
    def _tag(self) -> str:
        return "</think>" if self._thinking else "<think>"

    def _show(self, text: str) -> None:
        self._out.write(printable(text, keep=KEPT))

    def _style(self, style: str) -> None:
        if self._styled:
            self._out.write(style)


def _begun(text: str, word: str) -> int:
    """Number of characters at the end of the text that may begin a word."""
    longest = min(len(word) - 1, len(text))
    return next(n for n in range(longest, -1, -1) if text.endswith(word[:n]))


class ChatTerminal:
    """Loop of messages and answers over standard input and output."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._out = sys.stdout
        self._thinking = chat.begins_thinking()
        self._styled = (
            self._out.isatty()
            and "NO_COLOR" not in os.environ
            and os.environ.get("TERM", "dumb") != "dumb"
        )
        set_option = dict.fromkeys(Options.model_fields, self._set_option)
        self._commands: dict[str, Callable[[str, str], None]] = {
            "base": self._switch, "adapter": self._switch, "again": self._again, "new": self._new,
            "system": self._system, "settings": self._settings, "help": self._help,
            "quit": self._quit, "exit": self._quit, **set_option,
        }  # fmt: skip
        self._ended = False

    def talk(self) -> None:
        """Answer messages until Ctrl-D or ``/quit``."""
        import readline  # line editing and history, for input()

        # Which Python turns off for its own prompt: pasted lines are one message.
        readline.parse_and_bind("set enable-bracketed-paste on")
        chat = self.chat
        adapter = f" with the adapter {chat.adapter}" if chat.adapter else ", without an adapter"
        self._say(
            printable(f"{chat.model.path}{adapter}. /help tells the commands; Ctrl-D leaves.")
        )
        while not self._ended:
            try:
                message = read_message(f"{chat.who}> ")
            except KeyboardInterrupt:
                self._say("")
                continue
            except EOFError:
                self._say("")
                return
            try:
                if message.startswith("/"):
                    self._command(message)
                elif message.strip():
                    self._answer(message.strip())
            except ReasonError as error:
                self._say(printable(str(error)))

    def answer_once(self, message: str) -> None:
        """Answer one message and end."""
        writer = AnswerWriter(self._out, self._styled, self._thinking)
        try:
            for piece in self.chat.answer(message):
                writer.write(piece)
        finally:
            writer.end()
            self._say("")

    def _say(self, text: str) -> None:
        self._out.write(f"{without_secrets(text)}\n")
        self._out.flush()

    def _answer(self, message: str) -> None:
        writer = AnswerWriter(self._out, self._styled, self._thinking)
        with closing(self.chat.answer(message)) as answer:
            try:
                for piece in answer:
                    writer.write(piece)
            except KeyboardInterrupt:
                writer.write(" (stopped)")
            finally:
                writer.end()
        self._say("")

    def _command(self, line: str) -> None:
        name, _, rest = line[1:].strip().partition(" ")
        if name in self._commands:
            self._commands[name](name, rest.strip())
            return
        near = difflib.get_close_matches(name, self._commands, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help tells them all"
        self._say(printable(f"/{name} is no command; {hint}"))

    def _switch(self, name: str, rest: str) -> None:
        if name == "adapter" and self.chat.adapter is None:
            self._say("there is no adapter; start the chat with a run, or with --adapter FOLDER")
            return
        self.chat.uses_adapter = name == "adapter"

    def _again(self, name: str, rest: str) -> None:
        asked = [each["content"] for each in self.chat.messages if each["role"] == "user"]
        if not asked:
            self._say("nothing was asked yet")
            return
        before = self.chat.messages
        self.chat.messages = before[:-2]
        try:
            self._answer(asked[-1])
        except ReasonError:
            self.chat.messages = before
            raise

    def _new(self, name: str, rest: str) -> None:
        self.chat.messages = []

    def _system(self, name: str, rest: str) -> None:
        if rest:
            text = system_prompt(rest, "")
            self.chat.renderer = replace(self.chat.renderer, system_prompt=text)
        shown = self.chat.renderer.system_prompt
        self._say("there is no system prompt" if shown is None else printable(shown, keep=KEPT))

    def _set_option(self, name: str, rest: str) -> None:
        if rest:
            self.chat.options = parse_option(self.chat.options, name, rest)
        else:
            value = self.chat.options.model_dump()[name]
            self._say(f"{name} {'null' if value is None else value}")

    def _settings(self, name: str, rest: str) -> None:
        for key, value in self.chat.options.model_dump().items():
            self._say(f"{key} {'null' if value is None else value}")

    def _help(self, name: str, rest: str) -> None:
        self._say(HELP)

    def _quit(self, name: str, rest: str) -> None:
        self._ended = True


def read_message(prompt: str) -> str:
    """One message from the terminal: one line, or several joined by backslashes or between quotes.

    Raises:
        EOFError: Ctrl-D.
    """
    line = input(prompt)
    if line.strip() == '"""':
        lines: list[str] = []
        while (line := input("... ")).strip() != '"""':
            lines.append(line)
        return "\n".join(lines)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("... "))
    return "\n".join(lines)
