"""The config that a replica is sent."""

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from reason_llm.config import file as config_file
from reason_llm.replicas.replica import as_written


def counted(completion: str, lock: Any = threading.Lock()) -> float:  # noqa: B008
    with lock:
        return float(len(completion))


def test_a_config_with_functions_and_rows_can_be_sent_to_a_replica() -> None:
    given = config_file.build(
        {"data": {"train": "python:rows"}, "score": {"rewards": [counted]}}, Path("given"), {}
    )
    given = given.model_copy(
        update={"data": given.data.with_rows({"python:rows": [{"prompt": threading.Lock()}]})}
    )
    with pytest.raises(TypeError):
        pickle.dumps(given)
    sent = pickle.loads(pickle.dumps(as_written(given)))
    assert sent.model_dump() == given.model_dump()
    assert not sent.data.given
    assert sent.score.rewards[0].function is None
