"""GGUF, llama.cpp's form, of an exported model: converted, quantised, and described for Ollama."""

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch

from reason_llm.app.export import parity
from reason_llm.errors import ConfigError, ModelError, one_line
from reason_llm.model import Datum

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
TYPE = "Q4_K_M"
MAX_COMPARED_ROLLOUTS = 10
_WORDS = ("SYSTEMTEXT", "FIRSTTEXT", "ANSWERTEXT", "SECONDTEXT", "OTHERTEXT", "THIRDTEXT")
_ROLES = ("system", "user", "assistant", "user", "assistant", "user")


def find_converter(named: str) -> Path:
    """llama.cpp's converter: its path, on PATH, or in a checkout here or in the home folder."""
    checkouts = (Path("llama.cpp", named), Path.home() / "llama.cpp" / named)
    places = (Path(which(named) or named), *checkouts)
    converter = next((place for place in places if place.is_file()), None)
    if converter is None:
        raise ConfigError(
            f"--gguf: {named} is neither on PATH nor a file nor in ./llama.cpp; call git clone "
            f"--depth 1 https://github.com/ggml-org/llama.cpp, or name its {CONVERTER}"
        )
    return converter


def convert(converter: Path, folder: Path, dtype: str) -> list[Path]:
    """Convert the model in ``folder`` to GGUF, and quantise it if llama.cpp's program is found."""
    kind = {"bfloat16": "bf16", "float32": "f32"}[dtype]
    target = folder / f"{folder.name}-{kind}.gguf"
    outputs: list[str | Path] = ["--outfile", target, "--outtype", kind]
    _call([sys.executable, converter, folder, *outputs], target)
    built = converter.parent / "build" / "bin" / QUANTIZER
    program = which(QUANTIZER) or (built if built.is_file() else None)
    small = folder / f"{folder.name}-{TYPE.lower()}.gguf"
    if program is None:
        return [target]
    _call([program, target, small, TYPE], small)
    return [target, small]


def _call(command: list[Any], target: Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if ended.returncode != 0 or not target.is_file():
        target.unlink(missing_ok=True)
        program = command[command[0] == sys.executable]
        last = (ended.stderr.strip().splitlines() or ["it wrote no file"])[-1]
        raise ModelError(
            f"{program} failed on {target.parent} ({last[:300]}); the export itself is whole; call "
            "the program by hand"
        )


def modelfile(
    file: str, tokenizer: Any, end_token_ids: list[int], system: str | None, temperature: float
) -> str:
    """Ollama's Modelfile, with a TEMPLATE if a Go template can express the model's."""
    lines = [f"FROM ./{file}"]
    if (template := go_template(tokenizer)) is not None:
        lines.append(f'TEMPLATE """{template}"""')
    if system is not None and '"""' not in system:
        lines.append(f'SYSTEM """{system}"""')
    ends = [tokenizer.convert_ids_to_tokens(token) for token in end_token_ids]
    lines += [f'PARAMETER stop "{token}"' for token in ends if '"' not in token]
    return "\n".join([*lines, f"PARAMETER temperature {temperature:g}", ""])


def go_template(tokenizer: Any) -> str | None:
    """The chat template as a Go template for Ollama, without the BOS token, which llama.cpp adds;
    None unless it is a sequence of messages with fixed text around each."""
    parts = _between(tokenizer, 0)
    later = _between(tokenizer, 1)
    if parts is None or later is None:
        return None
    head, after_system, before_answer, user, *again, end = parts
    is_regular = [user, before_answer, user] == [after_system, *again] and parts[2:] == later[1:]
    pieces = [head, later[0], user, before_answer, end]
    if not is_regular or any("{{" in piece or '"""' in piece for piece in pieces):
        return None
    bos = tokenizer.bos_token or ""
    head, first = head.removeprefix(bos), later[0].removeprefix(bos)
    return (
        "{{ range $i, $m := .Messages }}"
        f'{{{{ if eq $m.Role "system" }}}}{head}'
        f'{{{{ else if eq $m.Role "assistant" }}}}{before_answer}'
        f"{{{{ else if $i }}}}{user}{{{{ else }}}}{first}{{{{ end }}}}"
        "{{ $m.Content }}{{ end }}"
        f"{end}"
    )


def _between(tokenizer: Any, start: int) -> list[str] | None:
    """Text of the template before, between and after the messages of a conversation."""
    talk = [{"role": r, "content": w} for r, w in zip(_ROLES, _WORDS, strict=True)][start:]
    try:
        text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    except Exception:  # noqa: BLE001  (a template that knows no system message)
        return None
    parts = []
    for word in _WORDS[start:]:
        before, separator, text = text.partition(word)
        if not separator:
            return None
        parts.append(before)
    return [*parts, text]


def gap(file: Path, folder: Path, rollouts: list[Datum], dtype: torch.dtype) -> parity.Gap | None:
    """Gap of the log-probs by GGUF and by the export; None without llama-cpp-python."""
    if find_spec("llama_cpp") is None:
        return None
    llama_cpp = import_module("llama_cpp")
    rows = rollouts[:MAX_COMPARED_ROLLOUTS]
    ours_N = parity.logprobs(parity.load(folder, dtype), rows, 1.0)
    longest = max(len(row.ids) for row in rows)
    sizes = {"n_ctx": longest + 8, "n_batch": longest + 8}
    cache = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)  # float16 by default
    try:
        model = llama_cpp.Llama(str(file), logits_all=True, verbose=False, **sizes, **cache)
    except ValueError as error:
        raise ModelError(
            f"llama.cpp cannot load {file} ({one_line(error)[:300]}); the export itself is whole; "
            "take the converter and llama-cpp-python of one version"
        ) from error
    exported_logprobs = []
    for row in rows:
        model.reset()
        model.eval(row.ids.tolist())
        logprobs_TV = torch.tensor(model.scores[: len(row.ids)]).log_softmax(-1)
        trained_T, ids_T = torch.tensor(row.trained), torch.tensor(row.ids)
        places = trained_T.nonzero()[:, 0]
        exported_logprobs.append(logprobs_TV[places - 1, ids_T[places]])
    model.close()
    return parity.Gap.between(torch.cat(exported_logprobs), ours_N)
