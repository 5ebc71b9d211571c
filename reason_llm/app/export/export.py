"""Export of a run's adapter, alone or merged into the unquantised base, with tokenizer, generation
config and card. The folder is written under another name and renamed after all checks passed."""

import logging
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import torch
import transformers
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from reason_llm.app.console import Console
from reason_llm.app.export import gguf, merging, model_card, parity, patterns, reward_model, serving
from reason_llm.app.export.model_card import ModelCard
from reason_llm.app.export.parity import Parity, ScoreParity
from reason_llm.app.report.payload import shown_config
from reason_llm.config import Config
from reason_llm.data import chat_template, system_prompt
from reason_llm.errors import (
    ConfigError,
    ModelError,
    ReasonError,
    RolloutBufferError,
    WriteError,
    one_line,
)
from reason_llm.files import check_writable, regular, replacing_folder
from reason_llm.model import (
    Datum,
    adapters,
    base,
    end_token_ids,
    load_tokenizer,
    positions,
    quiet_libraries,
    to_data,
    tokenizer as model_tokenizer,
)
from reason_llm.readers import SCALE
from reason_llm.run import Document, read_document
from reason_llm.run.start import saved_rollouts
from reason_llm.run.store import folder as run_folder

logger = logging.getLogger(__name__)
SENTENCE_PIECES = "tokenizer.model"
"""File that llama.cpp's converter reads for Gemma; Transformers 5 does not write it."""
PROCESSORS = "*processor_config.json"
"""Files by which Transformers and vLLM prepare the images of a model that reads them."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
PUSH_ERRORS = (
    *(HTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled),
    *(OSError, ValueError),
)
"""Errors of the Hub's client: a bad name, no login, no network, a bad answer."""
ADAPTER_FILES = (run_folder.ADAPTER_CONFIG, adapters.WEIGHTS)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Options of an export."""

    source: Path
    """A run's folder, an adapter's, or a model in MXFP4, which is written in 16 or 32 bits."""
    out: Path
    base: str | None
    """None: what the run or the adapter names."""
    adapter_only: bool
    dtype: str
    push: str | None
    gguf: str | None
    which: run_folder.Which = "last"


@dataclass(frozen=True, slots=True)
class _CheckedExport:
    """A checked request."""

    adapter: Path
    """Or a whole model, of a run that trained all weights."""
    base: str
    base_folder: Path
    merged: tuple[Path, Path | None]
    """The model that is written, and the adapter that is merged into it."""
    run: Path | None
    config: Config | None
    tokenizer: Any
    rollouts: list[Datum]
    """Rollouts for the parity check; empty if none were found."""
    converter: Path | None
    is_extended: bool = False
    """Whether ``base_folder`` has a changed config.json, for a longer context."""


def export(request: ExportRequest, console: Console) -> Parity | ScoreParity | None:
    """Write the folder and return the result of the parity check; None for an adapter alone and
    for an unpacked model. After a ReasonError nothing is written, unless it says otherwise."""
    quiet_libraries()
    if _is_packed_model(request.source):
        _unpack(request, console)
        return None
    with _without_patterns(request, console) as source, TemporaryDirectory() as scratch:
        job = _prepare(replace(request, source=source), Path(scratch))
        return _export(request, job, console)


@contextmanager
def _without_patterns(request: ExportRequest, console: Console) -> Iterator[Path]:
    """Yield the source or, for an adapter with patterns, a plain copy."""
    if not patterns.are_in(request.source):
        yield request.source
        return
    with TemporaryDirectory() as folder:
        rank = patterns.write_plain(request.source, Path(folder))
        console.line(
            f"{' and '.join(patterns.PATTERNS)}: written as a plain adapter of rank {rank}"
        )
        yield Path(folder)


def _export(
    request: ExportRequest, job: _CheckedExport, console: Console
) -> Parity | ScoreParity | None:
    result: Parity | ScoreParity | None = None
    with replacing_folder(request.out, is_noted=False) as target:
        if request.adapter_only:
            heads = [name for name in reward_model.FILES if (job.adapter / name).is_file()]
            for name in (*ADAPTER_FILES, *heads):
                shutil.copyfile(regular(job.adapter / name), target / name)
            line = None if heads else serving.prove(job.base_folder, target, job.tokenizer)
            if line is not None:
                console.line(line)
        else:
            merge = _merge_reward_model if reward_model.is_one(job.adapter) else _merge
            result = merge(request, job, target, console)
        job.tokenizer.save_pretrained(target)
        kind = None if request.adapter_only else model_tokenizer.misread_by(target, job.tokenizer)
        processors = [] if request.adapter_only else job.base_folder.glob(PROCESSORS)
        for file in (job.base_folder / SENTENCE_PIECES, *processors):
            if file.is_file():
                shutil.copyfile(regular(file), target / file.name)
        _describe(request, job, target, result)
    # From here on the export is in its place, and a failure leaves it there.
    console.line(
        f"exported {job.adapter if job.run else request.source} over {job.base} to {request.out}"
    )
    if kind is not None:
        logger.warning(
            "Transformers %s reads the tokenizer in %s as %s, with other ids than those of "
            "training; load it with PreTrainedTokenizerFast.from_pretrained",
            *(transformers.__version__, request.out, kind),
        )
    if job.converter is not None:
        _convert(request, job, job.converter, console)
    if request.push is not None:
        console.line(f"pushed to {_push(request.out, request.push)}")
    return result


def _is_packed_model(source: Path) -> bool:
    """Whether this is a model in MXFP4, in a folder or on the Hub."""
    if run_folder.is_run(source) or run_folder.is_adapter(source) or source.is_file():
        return False
    file = source / "config.json"
    if not source.exists() and len(source.parts) == 2 and not source.parent.exists():
        try:
            file = Path(hf_hub_download(str(source), file.name))
        except PUSH_ERRORS:
            return False
    return file.is_file() and merging.is_mxfp4(merging.read_json(file))


def _unpack(request: ExportRequest, console: Console) -> None:
    """Write an MXFP4 model in 16 or 32 bits, with exactly the values that Transformers reads.
    ``save_pretrained`` of Transformers 5.17 would lose the experts of all layers but one."""
    options = ("adapter_only", "base", "gguf", "push")
    if unusable := [name for name in options if getattr(request, name)]:
        raise ConfigError(
            f"--{unusable[0].replace('_', '-')} contradicts {request.source}, a model in MXFP4, "
            "which is only written in another type; leave it out"
        )
    _check_dtype(request)
    _check_out(request)
    folder, dtype = merging.downloaded(str(request.source)), DTYPES[request.dtype]
    _check_room(request, merging.merged_bytes(folder, None, dtype))
    with replacing_folder(request.out, is_noted=False) as target:
        merging.merge(folder, None, target, dtype)
        for file in sorted({path for pattern in merging.FILES for path in folder.glob(pattern)}):
            is_weights = ".safetensors" in file.name
            if file.is_file() and not is_weights and not (target / file.name).exists():
                shutil.copyfile(regular(file), target / file.name)
    console.line(f"wrote {request.source} in {request.dtype} to {request.out}")


def _prepare(request: ExportRequest, scratch: Path) -> _CheckedExport:
    """Check all that can be checked before the export is written; only ``scratch`` is used."""
    source, run, config = request.source, None, None
    _check_dtype(request)
    if run_folder.is_run(source):
        run, config = source, run_folder.read_config(source)
        adapter = run_folder.find_adapter(source, request.which)
    else:
        run_folder.refuse_which(request.which, str(source))
        if not run_folder.is_adapter(source):
            raise ConfigError(f"{source} is neither a run's folder nor an adapter's; name one")
        adapter = source
    name = request.base or (config.model.path if config else adapters.base_of(adapter))
    if request.gguf is not None and reward_model.is_one(adapter):
        raise ConfigError(
            f"--gguf contradicts {source}, a reward model: llama.cpp's form holds models that "
            "write; leave it out"
        )
    if request.gguf is not None and request.adapter_only:
        raise ConfigError("--gguf contradicts --adapter-only: it converts merged weights")
    converter = None if request.gguf is None else gguf.find_converter(request.gguf)
    _check_out(request)
    if request.push is not None:
        _check_login(request.push)
    folder = merging.base_folder(name)
    if config is not None:
        folder = _extended(folder, config.model.context_tokens, scratch)
    merged: tuple[Path, Path | None] = (folder, adapter)
    if run_folder.is_adapter(adapter):
        if not (adapter / adapters.WEIGHTS).is_file():
            raise ModelError(f"{adapter} holds no {adapters.WEIGHTS}; name another adapter")
        adapters.read_config(adapter)
        if request.adapter_only:
            layers = base.meta_base(str(folder), trust_remote_code=False).named_modules()
            adapters.check_layers(adapter, {layer for layer, _ in layers}, name)
    elif request.adapter_only:
        raise ConfigError(
            f"--adapter-only contradicts {source}, which trained all weights; leave it out"
        )
    else:
        merged = (adapter, None)
    if not request.adapter_only:
        _check_room(request, merging.merged_bytes(*merged, DTYPES[request.dtype]))
    tokenizer = load_tokenizer(str(folder))
    if config is not None:
        template = chat_template(config.data.template, name, tokenizer.chat_template is not None)
        if template.jinja is not None:  # the exported model is used with the prompts of training
            tokenizer.chat_template = template.jinja
    samples = not request.adapter_only and not reward_model.is_one(adapter)
    rollouts = _rollouts(run, config, folder) if samples else []
    return _CheckedExport(
        adapter=adapter,
        base=name,
        base_folder=folder,
        merged=merged,
        run=run,
        config=config,
        tokenizer=tokenizer,
        rollouts=rollouts,
        converter=converter,
        is_extended=folder == scratch,
    )


def _extended(folder: Path, context_tokens: int | None, scratch: Path) -> Path:
    """The base's folder or, for a longer context, links to its files with a new config.json."""
    overrides = positions.keys(base.read_config(str(folder)), context_tokens)
    if not overrides:
        return folder
    for file in folder.iterdir():
        (scratch / file.name).symlink_to(file.resolve())
    described = merging.read_json(folder / "config.json") | overrides
    described.pop("rope_scaling", None)  # the older name
    (scratch / "config.json").unlink()
    (scratch / "config.json").write_bytes(orjson.dumps(described))
    return scratch


def _merge(request: ExportRequest, job: _CheckedExport, target: Path, console: Console) -> Parity:
    dtype = DTYPES[request.dtype]
    merging.merge(*job.merged, target, dtype)
    _write_generation_config(job, target)
    rollouts = _compared(job, job.rollouts, "rollouts", dtype, console)
    temperature = job.config.sample.temperature if job.config is not None else 1.0
    result = parity.check_parity(job.base_folder, job.adapter, target, rollouts, dtype, temperature)
    is_adapter = job.merged[1] is not None
    policy, cause = (
        ("base plus adapter", "the adapter") if is_adapter else ("the run's model", "training")
    )
    console.line(
        f"log-prob difference to {policy} in {request.dtype}: {result.gap}; effect of {cause}: "
        f"{result.learned}"
    )
    result.check(dtype)
    lost = (
        f"{request.dtype} rounding changed the learned effect by {-result.lost:+.1%} ± "
        f"{result.lost_error:.1%}"
    )
    finer = "" if dtype == torch.float32 else "; try --dtype float32"
    unknown = (
        "the check cannot tell whether the adapter was merged: its effect on these rollouts is "
        f"smaller than the rounding of {request.dtype}{finer}"
    )
    console.line(lost if result.tells_a_wrong_merge else unknown)
    return result


def _merge_reward_model(
    request: ExportRequest, job: _CheckedExport, target: Path, console: Console
) -> ScoreParity:
    """Merge into a sequence-classification model of one label."""
    dtype, score = DTYPES[request.dtype], reward_model.head_of(job.adapter)
    rows: list[Datum] = []
    if job.config is not None and job.config.of_stage.scores:
        try:
            rows = reward_model.held_out_rows(job.config, job.tokenizer)
        except ReasonError as error:
            console.line(f"the run's rows cannot be read ({one_line(error)[:200]})")
    rows = _compared(job, rows, "rows", torch.float32, console)
    ends = {int(row.ids[-1]) for row in rows}
    ends |= set(end_token_ids(str(job.base_folder), job.tokenizer))
    job.tokenizer.pad_token = reward_model.padding_token(job.tokenizer, ends)
    merging.merge(job.base_folder, job.adapter, target, dtype, score)
    config = reward_model.configured(
        merging.read_json(target / "config.json"), job.base_folder, job.tokenizer.pad_token_id
    )
    (target / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
    result = reward_model.check_scores(job.base_folder, job.adapter, target, rows, dtype)
    console.line(f"score difference to base, adapter and head in {request.dtype}: {result.gap}")
    result.check(dtype)
    if (described := job.adapter / SCALE).is_file():  # for use as a reward elsewhere
        shutil.copyfile(regular(described), target / described.name)
    return result


def _compared(
    job: _CheckedExport, rows: list[Datum], kind: str, dtype: torch.dtype, console: Console
) -> list[Datum]:
    """An even sample of the rows or, if there are none, of new samples."""
    if not rows:
        console.line(f"there are no {kind} of it here: the parity check samples new ones")
        rows = parity.sampled(job.base_folder, job.adapter, job.tokenizer, dtype)
    return parity.chosen(rows, base.read_config(str(job.base_folder)).get_text_config().vocab_size)


def _write_generation_config(job: _CheckedExport, target: Path) -> None:
    """Write the base's generation config with every token that ended an answer in training."""
    file = job.base_folder / "generation_config.json"
    if file.is_file():
        config = merging.read_json(file)
    else:  # Transformers takes these from there, then
        base_config = merging.read_json(job.base_folder / "config.json")
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        config = {name: base_config[name] for name in names if name in base_config}
    base_ends, ends = config.get("eos_token_id"), end_token_ids(str(file.parent), job.tokenizer)
    if not set(ends) <= set(base_ends if isinstance(base_ends, list) else [base_ends]):
        content = orjson.dumps(config | {"eos_token_id": ends}, option=orjson.OPT_INDENT_2)
        (target / file.name).write_bytes(content)
    elif file.is_file():
        shutil.copyfile(regular(file), target / file.name)


def _describe(
    request: ExportRequest, job: _CheckedExport, target: Path, result: Parity | ScoreParity | None
) -> None:
    extended: dict[str, Any] = {}
    if job.is_extended:  # whoever loads the adapter over the original base must set the same
        described = merging.read_json(job.base_folder / "config.json")
        names = ("rope_parameters", "max_position_embeddings")
        extended = {name: described[name] for name in names}
    command: list[str] = []
    if request.adapter_only and not adapters.read_config(job.adapter).target_parameters:
        command = ["vllm", "serve", job.base]  # vLLM reads no adapter of experts in PEFT's form
        if extended:
            command += ["--hf-overrides", orjson.dumps(extended).decode()]
        place = request.push or str(request.out)
        command += adapters.vllm_options(job.adapter, request.out.name, place)
    is_reward = reward_model.is_one(job.adapter)
    card = ModelCard(
        name=request.push or request.out.name,
        place=request.push or str(request.out),
        base=job.base,
        merged=None if request.adapter_only else request.dtype,
        parity=None if result is None else str(result.gap),
        config=job.config,
        run=job.run,
        adapter=job.adapter,
        is_reward=is_reward,
        loader=base.auto_class(str(job.base_folder)).__name__,
        base_options=extended,
        serve="" if is_reward else shlex.join(command),
    )
    (target / "README.md").write_text(model_card.render(card), encoding="utf-8")
    if job.run is not None:
        config = shown_config(job.run / run_folder.CONFIG)
        (target / "training_config.yaml").write_text(config, encoding="utf-8")
        if (curves := job.run / "curves.png").is_file():
            shutil.copyfile(regular(curves), target / curves.name)


def _rollouts(run: Path | None, config: Config | None, base_folder: Path) -> list[Datum]:
    """The newest archived rollouts of the run, or those of its buffer; empty if there are none."""
    if run is None or config is None:
        return []
    rollouts: list[Datum] = []
    if archives := sorted((run / "buffers").glob("*.json.gz")):
        rollouts = to_data(_read_fitting(archives[-1], config, base_folder).groups)
    elif config.run.buffer_path.exists():
        try:
            document = _read_fitting(config.run.buffer_path, config, base_folder)
        except RolloutBufferError:  # it may be any run's by now
            return []
        if document.run.name == config.run.name:
            rollouts = to_data(document.groups)
    if config.sample.top_p < 1 or config.sample.top_k or config.sample.min_p:
        # The recorded log-probs may belong to another distribution than the model's.
        rollouts = [replace(rollout, columns={}) for rollout in rollouts]
    return rollouts


def _read_fitting(path: Path, config: Config, base_folder: Path) -> Document:
    """The rollouts in ``path``, which the base can read."""
    document = read_document(path)
    described = base.read_config(str(base_folder), config.model.trust_remote_code)
    text_config = described.get_text_config(decoder=True)
    limit = getattr(text_config, "max_position_embeddings", None)
    saved_rollouts.check_fits(path, document, limit, text_config.vocab_size)
    return document


def _check_dtype(request: ExportRequest) -> None:
    if request.dtype not in DTYPES:
        raise ConfigError(
            f"--dtype {request.dtype} is not one of {', '.join(DTYPES)}; give one of these"
        )


def _check_out(request: ExportRequest) -> None:
    out = request.out
    if out.is_symlink():
        raise WriteError(f"--out {out} is a link to {out.readlink()}; name a new folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WriteError(f"--out {out} exists and is not empty; name a new folder, or remove it")
    check_writable(out)


def _check_room(request: ExportRequest, num_bytes: int) -> None:
    existing = next(p for p in (request.out, *request.out.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < 1.05 * num_bytes:
        raise WriteError(
            f"--out {request.out} needs {num_bytes / 2**30:.1f} GiB and {free / 2**30:.1f} GiB is "
            "free there; free or choose another place"
        )


def _convert(
    request: ExportRequest, job: _CheckedExport, converter: Path, console: Console
) -> None:
    """Write GGUF files and a Modelfile; compare log-probs if llama-cpp-python is installed."""
    config, out = job.config, request.out
    files = gguf.convert(converter, out, request.dtype)
    if len(files) == 1:
        console.line(f"not quantised: {gguf.QUANTIZER} of llama.cpp is not on PATH")
    system, temperature = None, 1.0
    if config is not None:  # otherwise Ollama would use its own defaults
        system = system_prompt(config.data.system_prompt, config.prompting_reward)
        temperature = config.sample.temperature
    ends = end_token_ids(str(job.base_folder), job.tokenizer)
    described = gguf.modelfile(files[-1].name, job.tokenizer, ends, system, temperature)
    (out / "Modelfile").write_text(described, encoding="utf-8")
    if "TEMPLATE" not in described:
        console.line("Modelfile: no TEMPLATE, since Go's templates cannot write this chat template")
    dtype = DTYPES[request.dtype]
    rollouts = _compared(job, job.rollouts, "rollouts", dtype, console)
    for file in files:
        gap = gguf.gap(file, out, rollouts, dtype)
        outcome = f"log-probs of the export: {gap}" if gap else "not compared: no llama-cpp-python"
        console.line(f"converted to {file} ({outcome})")


def _check_login(repo: str) -> None:
    try:
        HfApi().whoami()
    except PUSH_ERRORS as error:
        raise ConfigError(
            f"--push {repo}: the Hub does not let you in ({one_line(error)[:200]}); log in with "
            "`hf auth login`, or leave --push out"
        ) from error


def _push(folder: Path, repo: str) -> str:
    """Upload the folder to a repository on the Hub, private if new, and return its address."""
    api = HfApi()
    try:
        url = api.create_repo(repo, private=True, exist_ok=True)
        api.upload_folder(folder_path=str(folder), repo_id=repo, commit_message="Exported model")
    except PUSH_ERRORS as error:
        raise WriteError(
            f"--push {repo} failed ({one_line(error)[:300]}); the export in {folder} is whole; log "
            "in with `hf auth login` and upload it"
        ) from error
    return str(url)
