"""Metadata and the pinned set; everything else about the tools is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

# requirements/lock-*.txt holds the whole tested set, and make installs it. Lower bounds are ones
# that were tested before; the lock has newer ones. Upper bounds are the next release that breaks or
# may break us: the next minor one for libraries whose internals we use, the next major one for the
# others. Move them only as a set:
# - vllm 0.32.0 pins torch 2.13.0 and caps transformers below 5.20;
# - unsloth 2026.10.9 caps transformers at 5.17.0, trl at 1.15.0 and datasets below 5, so the lower
#   bounds stay where it can be installed, as an extra of its own.
BASE = [
    "torch>=2.13,<2.14",
    "transformers>=5.17,<5.20",
    "trl>=1.14.2,<1.17",
    "peft>=0.21.2,<0.22",
    "accelerate>=1.15,<2",
    "datasets>=4.8.5,<6",
    "bitsandbytes>=0.50.2,<0.51",
    # These are bounded by the above; named because we import them, too.
    "huggingface_hub>=1.33,<3",
    "tokenizers>=0.23.3,<0.24",
    "safetensors>=0.8",
    "pyarrow>=21",
    "numpy>=2",
    "pillow>=12",
    "dill>=0.3.8",
    "jinja2>=3.1",
    "httpx>=0.28,<1",
    "aiohttp>=3.14.1,<4",
    "sympy>=1.14,<2",
    "regex>=2025.10.22",
    "pydantic>=2.12,<3",
    "typing_extensions>=4.14.1",
    "pyyaml>=6",
    "orjson>=3.11",
    "rich>=14",
    "matplotlib>=3.10",
]
# fla computes the recurrent layers of packed rows on a GPU (Qwen3.5, Qwen3-Next, OLMo Hybrid).
VLLM = [
    "vllm>=0.32,<0.33",
    "vllm-bnb-plugin>=0.0.3,<0.1",
    "flash-linear-attention>=0.6,<0.7",
]
UNSLOTH = ["unsloth>=2026.10.7,<2026.11", "unsloth-zoo>=2026.10.7,<2026.11"]
TRACKERS = ["tensorboard>=2.21,<3", "wandb>=0.31,<1", "trackio>=0.43,<1"]
GYM = ["reasoning-gym>=0.1.25,<0.2"]
# mcp 2.2 no longer opens addresses that a server's schema names (CVE-2026-116686); no call of ours
# comes to that place in an older one.
MCP = ["mcp>=2.2,<3", "mcp-types>=2.2,<3", "httpx2>=2.16,<3"]
# It pins mcp 2.0.0, so the extra mcp is installed without it (make extras), and asks for an openai
# below 3; it needs the renderers, with which turns are put together.
VERIFIERS = ["verifiers>=0.4,<0.5", "renderers>=0.1.12,<0.2"]
# For clients of OpenEnv's servers in one's own environments. It needs fastmcp below 4, and so mcp
# below 2, where verifiers 0.4.0 pins mcp 2.0.0 and vLLM needs mcp 2: an installation has this
# one, or those. verifiers[openenv] brings OpenEnv 0.4.1.
OPENENV = ["openenv>=0.10,<0.11"]
# Agents of docs/environments.md, which a test plays.
FRAMEWORKS = [
    "langchain-openai>=1.7.4,<2",
    "langgraph>=1.2.24,<2",
    "smolagents>=1.26,<2",
    "instructor>=1.17,<2",
]
# Ray's core alone. It needs click, filelock, jsonschema, msgpack, packaging, protobuf, pyyaml and
# requests, all small; nothing of it touches torch.
RAY = ["ray>=2.60,<3"]
TEST = [
    "pytest>=9",
    "pytest-timeout>=2.4",
    "pytest-xdist>=3.8",
    "ipykernel>=7",  # a test runs cells of a notebook
    "setuptools>=78.1.1,<81",  # a test builds the wheel without a network; what vLLM allows
    "hypothesis>=6.170.15,<7",
    "ruff>=0.17.5,<0.18",
    "mypy>=1.18",
    "types-PyYAML",
    *TRACKERS,
    *RAY,
    *GYM,
    *VERIFIERS,
    *FRAMEWORKS,
]


class BuildWithConfigs(build_py):
    """The package and, in a wheel, ``configs/`` with the data and the model that they name, and the
    lists in ``requirements/``: so ``reason-llm train configs/sft_tiny.yaml`` runs in an empty
    folder. A checkout and an editable install use the files where they are."""

    def run(self) -> None:
        """Build, then copy these files into ``reason_llm/quickstart/``."""
        super().run()
        if self.editable_mode:
            return
        for file in self._beside_the_package():
            target = Path(self.build_lib, "reason_llm", "quickstart", file)
            self.mkpath(str(target.parent))
            self.copy_file(file, target)

    def get_source_files(self) -> list[str]:
        """What a source distribution holds."""
        return [*super().get_source_files(), *self._beside_the_package()]

    def _beside_the_package(self) -> list[str]:
        patterns = (
            "configs/*", "data/arithmetic_*", "data/countdown_*", "data/wordle_*",
            "examples/countdown.py", "examples/tools.py", "examples/wordle.py",
            "model/countdown/*", "model/tiny/*", "model/wordle/*", "requirements/*",
        )  # fmt: skip
        return [str(file) for pattern in patterns for file in sorted(Path().glob(pattern))]


setup(
    name="reason_llm",
    version="0.1.0",
    description="Reinforcement learning and RLHF of language models on one GPU, with one copy of "
    "the base model",
    long_description=Path("README.md").read_text() if Path("README.md").is_file() else "",
    long_description_content_type="text/markdown",
    keywords="reinforcement learning, RLHF, GRPO, PPO, DPO, LoRA, QLoRA, language models, vLLM",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: GPU :: NVIDIA CUDA",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    license="Apache-2.0",
    python_requires=">=3.11,<3.15",
    packages=find_packages(include=["reason_llm", "reason_llm.*"]),
    package_data={
        "reason_llm": ["py.typed"],
        "reason_llm.config": ["other_names.yaml", "other_values.yaml"],
        "reason_llm.data": ["templates.yaml"],
        "reason_llm.app.export": ["model_card.md.jinja"],
        "reason_llm.app.report": ["page.*", "*.js"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    entry_points={"console_scripts": ["reason-llm = reason_llm.app.cli:main"]},
    install_requires=BASE,
    # vLLM without a GPU has no extra: its metadata asks for torch builds that PyPI does not hold.
    extras_require={
        "gpu": VLLM,
        "unsloth": UNSLOTH,
        "trackers": TRACKERS,
        "ray": RAY,
        "gym": GYM,
        "mcp": MCP,
        "verifiers": VERIFIERS,
        "openenv": OPENENV,
        "test": TEST,
    },
)
