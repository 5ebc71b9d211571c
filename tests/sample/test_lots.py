"""What each process samples of a wave: one batch under vLLM, part by part with Transformers.

Who has what changes no token: ``test_batching.py``.
"""

from reason_llm.sample import Part, lots


def test_lots() -> None:
    parts = [Part(number, (), number) for number in range(8)]
    one_by_one = lots(parts, 3, in_batches=False)
    assert one_by_one == [(part,) for part in parts]
    batches = lots(parts, 3, in_batches=True)
    assert [[part.shard for part in lot] for lot in batches] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert lots(parts[:2], 3, in_batches=True) == [(parts[0],), (parts[1],)]
