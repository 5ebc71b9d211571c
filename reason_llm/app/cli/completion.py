"""Shell completion: ``reason-llm --print-completion bash|zsh`` prints a script that completes
commands, options, values of options with a fixed set, and else files."""

import re
from contextlib import redirect_stdout
from io import StringIO

from reason_llm.app.cli import COMMANDS, call
from reason_llm.config import option_choices
from reason_llm.errors import ConfigError

OPTION = re.compile(r"^  (?:-\w, )?(--[\w.-]+)", re.MULTILINE)
SCRIPT = """\
_reason_llm() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD - 1]}}" words=""
    if ((COMP_CWORD == 1)); then
        words="{commands}"
    elif [[ "$word" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    else
        case "$before" in
{choices}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _reason_llm reason-llm"""
SHELLS = {"bash": "", "zsh": "autoload -U +X bashcompinit && bashcompinit\n"}
"""What comes before the script in each shell."""


def script(shell: str) -> str:
    """The script of a shell. Raises ConfigError for another shell."""
    if shell not in SHELLS:
        raise ConfigError(f"--print-completion {shell!r:.40} is not one of {', '.join(SHELLS)}")
    listed = {name: _options(name) for name in COMMANDS}
    listed["rescore"] += listed["plan"]  # it takes them, and its help refers to that of train
    options = {name: " ".join(names) for name, names in listed.items()}
    choices = {f"--{name}": " ".join(names) for name, names in option_choices().items()}
    return SHELLS[shell] + SCRIPT.format(
        commands=" ".join(COMMANDS), options=_cases(options), choices=_cases(choices)
    )


def _options(command: str) -> list[str]:
    """The options of a command, as its help lists them."""
    help_text = StringIO()
    with redirect_stdout(help_text):
        call(command, f"reason-llm {command}", ["--help", "all"])
    return list(dict.fromkeys(OPTION.findall(help_text.getvalue())))


def _cases(words: dict[str, str]) -> str:
    return "\n".join(f'            {name}) words="{items}" ;;' for name, items in words.items())
