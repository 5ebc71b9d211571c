"""Serve: ``reason-llm serve RUN|CONFIG.yaml|ADAPTER|MODEL [--port N]``."""

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec

from reason_llm.app.cli.chat import subject_of, subject_parser

DESCRIPTION = """\
Serve a run's adapter and its base, or a model, through OpenAI's API: chat completions, responses,
models, streaming, tools. On a GPU with vLLM, this starts vLLM's server; the vLLM
command is always printed. Requests without a system message get the run's, but not with vLLM.

  {program} runs/quickstart
  {program} runs/quickstart --which best --port 8001
  {program} exported/sums"""


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    from reason_llm.app.console import Console
    from reason_llm.errors import ConfigError

    Console("quiet")  # libraries show warnings only
    parser = subject_parser(program, DESCRIPTION)
    parser.add_argument("--host", default="127.0.0.1", help="address (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port (default: 8000; 0: any)")
    engines = ("auto", "transformers", "vllm")
    engine_help = f"{', '.join(engines)}: option of the config (default: the run's)"
    parser.add_argument(
        "--sample.engine", dest="engine", choices=engines, metavar="ENGINE", help=engine_help
    )
    args = parser.parse_args(arguments)
    from reason_llm.app import chat as chats, serve as serving  # heavy: after --help
    from reason_llm.model import default_device

    key, subject = serving.key_for(args.host), subject_of(args)
    config = subject.config
    engine = args.engine or config.sample.engine
    has_vllm = default_device().type == "cuda" and find_spec("vllm") is not None
    if engine == "vllm" and not has_vllm:
        raise ConfigError("sample.engine=vllm needs a GPU and vLLM; set it to transformers")
    template = serving.own_template(config)
    command = serving.vllm_command(subject, args.target, args.host, args.port, template)
    say = partial(print, flush=True)
    say(f"with vLLM: {shlex.join(command)}")
    if has_vllm and engine != "transformers":
        if key is not None:
            os.environ["VLLM_API_KEY"] = key
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "vllm.entrypoints.cli.main", *command[1:]])
    chat = chats.ChatSession(subject, chats.options_of(subject, {}))
    if (prompt := chat.renderer.system_prompt) is not None:
        say(f"requests without a system message get {prompt!r}")
    names = serving.names_of(subject, args.target)
    serving.serve(serving.PolicyServer(chat, names, key), args.host, args.port, say)
