"""Model text that would act on a terminal or a page if it were let, and a model that says such."""

import json
import shutil
from pathlib import Path

from conftest import TINY

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\u2066<script>alert(1)</script>\r\b\x00\u2028"


def hostile_model(folder: Path) -> Path:
    """The tiny model with a vocabulary in which its 7 is ESC and its 0 is the byte CSI."""
    shutil.copytree(TINY, folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    for digit, byte in zip("70", (0x1B, 0x9B), strict=True):
        other = next(c for c, b in byte_alphabet().items() if b == byte)
        vocab[digit], vocab[other] = vocab[other], vocab[digit]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    return folder


def byte_alphabet() -> dict[str, int]:
    """How a byte-level vocabulary spells bytes. Source: bytes_to_unicode of GPT-2's encoder."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}
