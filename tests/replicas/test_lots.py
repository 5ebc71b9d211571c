"""What each process samples of a wave: one batch under vLLM, part by part with Transformers.

Who has what changes no token.
"""

import pytest

from conftest import TINY
from families import SIZES, prompts_of, quiet
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.replicas.sharded_sampler import Part, lots, sample_lot
from reason_llm.sample import SamplingParams, sampling


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # vLLM warns of its own
def test_together_and_alone_are_the_same_tokens() -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    tokenizer = load_tokenizer(str(TINY))
    prompts = prompts_of(tokenizer, *(f"What is {n} + 68?" for n in (3, 57, 41, 9)))
    parts = tuple(Part(i, tuple(prompts[i::2]), seed) for i, seed in enumerate((7, 2**62)))
    params = SamplingParams(3, 12)
    section = ModelSection(path=str(TINY), adapter=AdapterSection(rank=8, alpha=16))
    with (
        Model(section, tokenizer, 0, SIZES) as model,
        sampling(model, 0) as sampler,
    ):
        steps = []
        together = sample_lot(sampler, parts, params, lambda tokens, items: steps.append(items))
        (first,), (second,) = (sample_lot(sampler, (part,), params, quiet) for part in parts)
    assert [group.prompt for group in together[1]] == list(parts[1].prompts)
    assert together == [first, second]
    drawn = [c.token_ids for groups in together for group in groups for c in group.completions]
    assert len(set(drawn)) > 4 and len(drawn) == 12 == sum(steps)


def test_lots() -> None:
    parts = [Part(number, (), number) for number in range(8)]
    one_by_one = lots(parts, 3, in_batches=False)
    assert one_by_one == [(part,) for part in parts]
    batches = lots(parts, 3, in_batches=True)
    assert [[part.shard for part in lot] for lot in batches] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert lots(parts[:2], 3, in_batches=True) == [(parts[0],), (parts[1],)]
