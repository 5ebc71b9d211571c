"""``benchmark.py symbols``: is every name of vLLM, bitsandbytes, Unsloth and TRL that this project
touches there, in installed packages or unpacked wheels? Nothing of them is imported.

1. What the repository imports from them, found in its own sources.
2. What is reached through objects, listed in ``REACHED``.

Not here: parameters and meanings.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from reason_llm.files import MIB, read_bounded

SOURCE_BYTES = 16 * MIB
ROOTS = ("vllm", "vllm_bnb_plugin", "bitsandbytes", "unsloth", "unsloth_zoo", "trl")
REACHED = {
    "vllm.entrypoints.llm.LLM": "llm_engine apply_model collective_rpc sleep wake_up "
    "release_kv_cache_memory reset_prefix_cache generate request_counter",
    "vllm.engine.arg_utils.EngineArgs": "model trust_remote_code dtype quantization seed "
    "max_model_len max_num_seqs max_num_batched_tokens kv_cache_memory_bytes enforce_eager "
    "gpu_memory_utilization compilation_config enable_prefix_caching enable_sleep_mode enable_lora "
    "max_loras max_lora_rank lora_target_modules logprobs_mode generation_config disable_log_stats "
    "use_tqdm_on_load language_model_only limit_mm_per_prompt mm_processor_kwargs "
    "mm_processor_cache_gb mm_device_do_normalize skip_mm_profiling",
    "vllm.config.compilation.CompilationConfig": "cudagraph_mode cudagraph_capture_sizes",
    "vllm.config.compilation.CUDAGraphMode": "FULL_DECODE_ONLY",
    "vllm.v1.engine.llm_engine.LLMEngine": "engine_core step vllm_config abort_request "
    "add_request reset_encoder_cache",
    "vllm.v1.engine.core_client.InprocClient": "engine_core shutdown",
    "vllm.v1.engine.core.EngineCore": "scheduler batch_queue release_kv_cache_memory",
    "vllm.v1.core.sched.scheduler.Scheduler": "has_requests",
    "vllm.platforms.interface.Platform": "is_cpu is_sleep_mode_available",
    "vllm.v1.worker.gpu_worker.Worker": "sleep wake_up discard",
    "vllm.device_allocator.cumem.CuMemAllocator": "instance pointer_to_data discard wake_up",
    "vllm.device_allocator.cumem.AllocationData": "handle tag is_asleep",
    "vllm.lora.ops.triton_ops.utils": "_LORA_A_PTR_DICT _LORA_B_PTR_DICT",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "lora_manager",
    "vllm.lora.worker_manager.LRUCacheWorkerLoRAManager": "_adapter_manager lora_config device",
    "vllm.lora.model_manager.LoRAModelManager": "add_adapter activate_adapter lora_index_to_id "
    "modules packed_modules",
    "vllm.lora.lora_model.LoRAModel": "from_lora_tensors loras",
    "vllm.lora.peft_helper.PEFTHelper": "from_dict validate_legal r lora_alpha target_modules bias",
    "vllm.lora.request.LoRARequest": "lora_name lora_int_id lora_path",
    "vllm.sampling_params.SamplingParams": "n seed max_tokens temperature top_p top_k min_p "
    "logprobs flat_logprobs stop_token_ids detokenize ignore_eos",
    "vllm.logprobs.FlatLogprobs": "token_ids logprobs",
    "vllm.model_executor.layers.utils": "dispatch_cpu_unquantized_gemm",
    "vllm.model_executor.models.qwen2.Qwen2ForCausalLM": "packed_modules_mapping",
    "vllm.distributed.device_communicators.cuda_wrapper.CudaRTLibrary": "cudaMalloc",
    "bitsandbytes.functional": "name2qmap create_dynamic_map quantize_4bit dequantize_blockwise",
    "bitsandbytes.functional.QuantState": "absmax nested state2 offset shape from_dict",
    "bitsandbytes.nn.modules.Linear4bit": "support_avx512bf16_for_cpu compute_dtype quant_state",
    "bitsandbytes.optim.optimizer.Optimizer2State": "init_state",
    "unsloth.models.loader.FastLanguageModel": "from_pretrained",
    "unsloth.models.llama.FastLlamaModel": "get_peft_model",
    "unsloth.models._utils": "HAS_FLASH_ATTENTION xformers",
    "trl.trainer.grpo_config.GRPOConfig": "num_generations max_completion_length beta loss_type "
    "generation_kwargs scale_rewards vllm_importance_sampling_correction use_vllm vllm_mode "
    "vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_max_model_length use_liger_kernel",
    "trl.trainer.grpo_trainer.GRPOTrainer": "_generate_single_turn",
}
"""A class or a module, and the names that it must have."""


class Sources:
    """The modules below a folder of packages, read and not imported."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.tree = cache(self._tree)

    def has_package(self, root: str) -> bool:
        """Whether it is there at all."""
        return (self.site / root).is_dir()

    def has(self, owner: str, name: str) -> bool:
        """Whether a module or a class, by its full name, has ``name``."""
        if self._file(owner) is not None:
            return self.defines(owner, name)
        module, _, cls = owner.rpartition(".")
        return name in self._members(module, cls, set())

    def defines(self, module: str, name: str) -> bool:
        """Whether ``from module import name`` would find it."""
        if self._file(f"{module}.{name}") is not None:
            return True
        tree = self.tree(module)
        if tree is None:  # a compiled module
            return self._file(module) is not None
        if any(bound == name for bound, _ in _names(tree.body)):
            return True
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        stars = [node for node in imports if node.names[0].name == "*"]
        if any(self.defines(self._target(module, node), name) for node in stars):
            return True
        is_lazy = "_LazyModule" in ast.dump(tree) or any(
            bound == "__getattr__" for bound, _ in _names(tree.body)
        )
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        return is_lazy and name in constants

    def _file(self, module: str) -> Path | None:
        base = self.site.joinpath(*module.split("."))
        for path in (base / "__init__.py", base.with_suffix(".py")):
            if path.is_file():
                return path
        return next(iter(base.parent.glob(f"{base.name}.*so")), None)

    def _tree(self, module: str) -> ast.Module | None:
        path = self._file(module)
        return (
            ast.parse(read_bounded(path, SOURCE_BYTES))
            if path is not None and path.suffix == ".py"
            else None
        )

    def _target(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._file(module)
        is_package = path is not None and path.name == "__init__.py"
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + is_package]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def _members(self, module: str, cls: str, seen: set[tuple[str, str]]) -> set[str]:
        """Names of a class, what its methods set on self and its bases included."""
        tree = self.tree(module)
        if tree is None or (module, cls) in seen:
            return set()
        seen.add((module, cls))
        for name, node in _names(tree.body):
            if name == cls and isinstance(node, ast.ImportFrom):
                original = next(a.name for a in node.names if (a.asname or a.name) == cls)
                return self._members(self._target(module, node), original, seen)
            if name == cls and isinstance(node, ast.ClassDef):
                members = {inner for inner, _ in _names(node.body)} | set(_set_on_self(node))
                for base in node.bases:
                    spelled = ast.unparse(base).split("[")[0].rpartition(".")[2]
                    members |= self._members(module, spelled, seen)
                return members
        return set()


def _names(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Every name that statements bind, under conditions, too."""
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    yield alias.asname or alias.name.split(".")[0], node
            case ast.Assign():
                for target in node.targets:
                    yield from ((n.id, node) for n in ast.walk(target) if isinstance(n, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node
            case ast.If() | ast.Try() | ast.With():
                parts = [getattr(node, part, []) for part in ("body", "orelse", "finalbody")]
                parts += [handler.body for handler in getattr(node, "handlers", [])]
                for part in parts:
                    yield from _names(part)


def _set_on_self(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def imported(repository: Path) -> dict[tuple[str, str], str]:
    """(module, name) that the repository imports of those packages, and where."""
    imports: dict[tuple[str, str], str] = {}
    for pattern in ("reason_llm/**/*.py", "scripts/**/*.py", "tests/gpu*/*.py", "tests/gpu*.py"):
        for file in sorted(repository.glob(pattern)):
            for node in ast.walk(ast.parse(read_bounded(file, SOURCE_BYTES))):
                if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                    continue
                if node.module.split(".")[0] in ROOTS:
                    where = f"{file.relative_to(repository)}:{node.lineno}"
                    for alias in node.names:
                        imports.setdefault((node.module, alias.name), where)
    return imports


def run(site: Path, repository: Path, say: Callable[[str], None]) -> int:
    """Look all names up; return the number of missing ones, or 1 without any package."""
    sources, missing, looked_up = Sources(site), 0, 0
    to_find = dict(imported(repository))
    for owner, names in REACHED.items():
        to_find |= {(owner, name): "through an object" for name in names.split()}
    for root in ROOTS:
        if not sources.has_package(root):
            say(f"skipped  {root} is not in {site.name}")
    for (owner, name), where in sorted(to_find.items()):
        if sources.has_package(owner.split(".")[0]):
            looked_up += 1
            if not sources.has(owner, name):
                missing += 1
                say(f"MISSING  {owner}.{name} ({where})")
    say(f"{looked_up} looked up, {missing} missing")
    return missing if looked_up else 1
