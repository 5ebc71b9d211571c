"""Pack the GPU packages of the lock into one archive, for a machine with a GPU and no network.

    python scripts/benchmark.py pack OUT [--arch 90] [--wheels FOLDER]

It downloads the wheels of ``PACKED`` for Python 3.12 at the versions of requirements/lock-gpu.txt,
leaves out files that a run of a dense model on one GPU never loads, keeps the GPU code of one
architecture, and writes OUT/stack.tar.xz. The other machine needs torch for CUDA 13, Transformers
and PEFT. Unpack the archive there into a folder, and set PYTHONPATH to that folder.
"""

import argparse
import mmap
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.utils import canonicalize_name

LOCK = Path(__file__).resolve().parents[2] / "requirements" / "lock-gpu.txt"
PACKED = """
annotated-doc annotated-types apache-tvm-ffi astor bitsandbytes blake3 cachetools cbor2
compressed-tensors datasets depyf dill dnspython docstring-parser einops email-validator fastapi
fla-core flash-linear-attention googleapis-common-protos httpcore2 httptools httpx2 ijson
interegular jiter jmespath jsonschema jsonschema-specifications lark llguidance lm-format-enforcer
loguru mistral-common model-hosting-container-standards msgspec multiprocess openai
opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp
opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common
opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http opentelemetry-proto
opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai orjson
oss-harmony outlines-core partial-json-parser prometheus-fastapi-instrumentator pybase64 pycountry
pydantic pydantic-core pydantic-extra-types pydantic-settings python-dotenv python-json-logger
python-multipart pyzmq referencing rpds-py sentencepiece setproctitle sniffio starlette trl
truststore typing-inspection uvicorn vllm vllm-bnb-plugin watchfiles websockets xgrammar
"""
"""Distributions in the archive, all of them in the lock."""
MORE = {
    "antlr4-python3-runtime": "4.13.2", "cut-cross-entropy": "25.1.1", "hf-transfer": "0.1.9",
    "importlib-metadata": "10.2.0", "lazy-importer": "0.1.0",
    "latex2sympy2-extended": "1.11.0", "liger-kernel": "0.8.5",
    "math-verify": "0.9.0", "nest-asyncio": "1.6.0", "structlog": "26.1.0", "torchao": "0.18.0",
    "typeguard": "4.6.1", "tyro": "1.0.17", "unsloth": "2026.10.7", "unsloth-zoo": "2026.10.7",
    "zipp": "4.1.2",
}  # fmt: skip
"""Distributions in the archive that the lock does not have, such as Unsloth's, with versions."""
DROPPED = (
    "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/third_party/deep_gemm",
    "vllm/third_party/fmha_sm100", "vllm/_moe_C", "vllm/_deepselect", "vllm/_fastsafetensors",
    "vllm/_flashmla", "vllm/_qutlass", "vllm/_flashkda", "unsloth/studio", "studio/",
    "vllm/model_executor/layers/fused_moe/configs/", "vllm/kernels/helion/configs/",
    "pycountry/locales/", "mistral_common/data/",
)  # fmt: skip
"""Files that a run of a dense model on one GPU never loads, by the start of their names."""
DROPPED_PARTS = ("/include/", "/static/", "/tests/", "/test/", "/cutlass/")
BITSANDBYTES = ("libbitsandbytes_cuda130", "libbitsandbytes_cpu")
MAX_MIB = 60
FATBIN, ELF, PTX = struct.pack("<I", 0xBA55ED50), 2, 1


def locked() -> dict[str, str]:
    """Versions of the packed distributions, by name."""
    pairs = re.findall(r"^([\w.-]+)==(\S+)", LOCK.read_text(encoding="utf-8"), re.M)
    versions = {str(canonicalize_name(name)): version for name, version in pairs}
    return {name: versions[name] for name in PACKED.split()} | MORE


def download(folder: Path) -> list[Path]:
    """Wheels of the packed distributions; those in the folder are not downloaded again."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp",
               *(f"--abi={abi}" for abi in ("cp312", "abi3", "none")), "--platform=any",
               *(f"--platform=manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17)),
               "--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]  # fmt: skip
    pinned = [f"{name}=={version}" for name, version in locked().items()]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *options, *pinned]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Iterable[Path], site: Path) -> None:
    """Unpack the wheels into ``site`` without what is dropped."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site, [name for name in archive.namelist() if is_wanted(name)])


def is_wanted(name: str) -> bool:
    """Whether a file of a wheel is packed."""
    if name.startswith(DROPPED) or any(part in f"/{name}" for part in DROPPED_PARTS):
        return False
    file = Path(name).name
    return not file.startswith("libbitsandbytes_") or file.startswith(BITSANDBYTES)


def keep_one_architecture(path: Path, arch: int) -> None:
    """Cut the code for other architectures out of every fat binary of a shared object.

    The kept entries move to the front, the header has the new size, and zeros follow. One without
    machine code for ``arch`` keeps the PTX that the driver can compile for it, or its smallest
    entry.
    """
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        position = 0
        while (position := image.find(FATBIN, position)) >= 0:
            version, header, size = struct.unpack_from("<HHQ", image, position + 4)
            start, end = position + header, position + header + size
            is_fat = version == 1 and header == 16 and end <= len(image)
            entries = _entries(image, start, end) if is_fat else []
            if not entries:
                position += 4
                continue
            selected = [e for e in entries if e[0] == ELF and e[1] == arch]
            selected = selected or [e for e in entries if e[0] == PTX and e[1] <= arch]
            selected = selected or [min(entries, key=lambda e: e[3] - e[2])]
            packed = b"".join(image[first:last] for _, _, first, last in selected)
            image[start:end] = packed + bytes(end - start - len(packed))
            struct.pack_into("<Q", image, position + 8, len(packed))
            position = end


def _entries(image: mmap.mmap, at: int, end: int) -> list[tuple[int, int, int, int]]:
    """Kind, architecture, start and end of each entry; [] if this is no fat binary."""
    entries = []
    while at < end:
        kind, _, header, payload = struct.unpack_from("<HHIQ", image, at)
        if not 32 <= header <= 4096 or at + header + payload > end:
            return []
        arch = struct.unpack_from("<I", image, at + 28)[0]
        entries.append((kind, arch, at, at + header + payload))
        at += header + payload
    return entries


def pack(args: argparse.Namespace) -> int:
    """Write the archive; return 1 if it is too large."""
    args.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        wheels, site = args.wheels or Path(scratch) / "wheels", Path(scratch) / "site"
        wheels.mkdir(parents=True, exist_ok=True)
        unpack(download(wheels), site)
        for library in site.rglob("*.so"):
            if library.stat().st_size > 1 << 20:
                keep_one_architecture(library, args.arch)
        archive = args.out / "stack.tar.xz"
        subprocess.run(["tar", "cf", str(archive), "-I", "xz -9e -T2", "--sort=name", "--owner=0",
                        "--group=0", "-C", str(site), "."], check=True)  # fmt: skip
    mib = archive.stat().st_size / 2**20
    print(f"{archive}: {mib:.1f} MiB ({MAX_MIB} at most)")
    return int(mib > MAX_MIB)
