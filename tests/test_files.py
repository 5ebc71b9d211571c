"""Reading within a bound."""

from pathlib import Path

import pytest

from reason_llm.files import read_bounded


def test_a_bound_takes_no_memory(tmp_path: Path) -> None:
    """Of a small file under a bound that is larger than any machine's memory."""
    path = tmp_path / "small"
    path.write_bytes(b"abc")
    assert read_bounded(path, 1 << 45) == b"abc"
    assert read_bounded(Path("/proc/self/stat"), 1 << 45)  # whose size is 0
    assert read_bounded(path, 3) == b"abc"
    with pytest.raises(OSError, match="it is larger than"):
        read_bounded(path, 2)
