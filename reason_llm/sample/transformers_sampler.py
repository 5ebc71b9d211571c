"""Sampling with the Transformers model itself, on any machine, without a second engine.

Each prompt is read once (``kv_cache``) and finished completions leave the batch. Every token is
drawn by inverting the cumulative distribution at a number that depends only on the seed, the row
and the position. Not here: paged KV, and new rows in the places of finished ones (vLLM does both).

Shapes: P prompts, B rows in the batch, E rows that end, N rows in all, T prompt tokens, L longest
completion, V vocabulary, D hidden.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StopStringCriteria

from reason_llm.errors import ConfigError, TrainingError
from reason_llm.model import Model, PlacedRow, decode
from reason_llm.model.plan import READ_TOKENS
from reason_llm.rollout import Completion, FinishReason, Group, Prompt, shortest_decimals
from reason_llm.sample.kv_cache import ReservedCache, filling
from reason_llm.sample.protocol import Ended, Progress, SamplingParams, ignore_ended


class TransformersSampler:
    """The Sampler over a Model, with at most ``cache_tokens`` in the KV cache of all rows."""

    def __init__(self, model: Model, cache_tokens: int) -> None:
        self.model = model
        self.cache_tokens = cache_tokens

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = ignore_ended,
    ) -> list[Group]:
        """See ``Sampler.sample``."""
        size = params.num_completions
        num_rows = len(prompts) * size
        # Numbers for all rows at once: what is drawn does not depend on the size of a batch.
        uniforms_NL = self.uniforms(num_rows, params.max_new_tokens, seed).to(self.model.device)
        rows = self._rows_at_once(prompts, params)
        completions: dict[int, Completion] = {}
        groups: dict[int, Group] = {}
        for start in range(0, num_rows, rows):
            of_prompt = [row // size for row in range(start, min(start + rows, num_rows))]
            first, last = of_prompt[0], of_prompt[-1]
            with self.model.decoding():
                for row, completion in self._decode(
                    prompts[first : last + 1],
                    [p - first for p in of_prompt],
                    params,
                    uniforms_NL[start:],
                    progress,
                ):
                    completions[start + row] = completion
                    place = of_prompt[row]
                    own = range(place * size, (place + 1) * size)
                    if all(row in completions for row in own):
                        group = Group(prompts[place], tuple(completions[row] for row in own))
                        groups[place] = group
                        ended(place, group)
        return [groups[place] for place in range(len(prompts))]

    def uniforms(self, num_rows: int, num_tokens: int, seed: int) -> Tensor:
        """The sampler's only randomness: numbers (N, L) in [0, 1) of all tokens of all rows."""
        return torch.rand(num_rows, num_tokens, generator=torch.Generator().manual_seed(seed))

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """See ``Sampler.prompts_at_once``."""
        return max(1, self._rows_at_once(prompts, params) // params.num_completions)

    def _rows_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        longest = max(len(prompt.token_ids) for prompt in prompts) + params.max_new_tokens
        return max(1, self.cache_tokens // longest)

    @torch.inference_mode()
    def _decode(
        self,
        prompts: Sequence[Prompt],
        of_prompt: list[int],
        params: SamplingParams,
        uniforms_BL: Tensor,
        progress: Progress,
    ) -> Iterator[tuple[int, Completion]]:
        """Complete row b of the batch from prompt ``of_prompt[b]``, for all rows together; each row
        and its completion as soon as it has ended."""
        batch = _DecodingBatch.prefill(self.model, prompts, of_prompt, params.max_new_tokens)
        num_rows, device = len(of_prompt), self.model.device
        tokens_BL = torch.zeros(num_rows, params.max_new_tokens, dtype=torch.long, device=device)
        logprobs_BL = torch.zeros(num_rows, params.max_new_tokens, device=device)
        stopped_B = torch.zeros(num_rows, dtype=torch.bool, device=device)
        end_ids = torch.tensor(self.model.end_token_ids, device=device)
        completes_string = stop_strings(self.model.tokenizer, params.stop)
        for position in range(params.max_new_tokens):
            alive = batch.rows[~stopped_B[batch.rows]]
            tokens, logprobs = draw(
                self.model.logits(batch.hidden_BD), params, uniforms_BL[batch.rows, position]
            )
            tokens_BL[batch.rows, position] = tokens
            logprobs_BL[batch.rows, position] = logprobs
            stopped_B[batch.rows] |= torch.isin(tokens, end_ids)
            if completes_string is not None:
                so_far = tokens_BL[batch.rows, : position + 1]
                stopped_B[batch.rows] |= completes_string(so_far, None)
            is_last = position + 1 == params.max_new_tokens
            ended_E = alive if is_last else alive[stopped_B[alive]]
            progress(len(alive), len(ended_E))
            # Ended rows are given away and dropped at once: the batch gets smaller and faster.
            if len(ended_E):
                rows = tokens_BL[ended_E, : position + 1].tolist()
                texts = decode(self.model.tokenizer, rows, self.model.end_token_ids)
                values = shortest_decimals(logprobs_BL[ended_E, : position + 1].cpu().numpy())
                stops = stopped_B[ended_E].tolist()
                ended = zip(ended_E.tolist(), rows, texts, values, stops, strict=True)
                for row, ids, text, logprobs_L, stopped in ended:
                    why: FinishReason = "stop" if stopped else "length"
                    yield row, Completion(tuple(ids), text, tuple(logprobs_L), why)
            if len(ended_E) == len(alive):
                break
            batch.extend(batch.drop(stopped_B, tokens))


BLOCK = 256


@dataclass(slots=True)
class _DecodingBatch:
    """Rows that are still being decoded: their KV cache and the last hidden state of each."""

    model: Model
    rows: Tensor
    """(B,) which of the original rows these are."""
    cache: ReservedCache
    hidden_BD: Tensor
    positions_B: Tensor
    """(B,) position of each row's next token, padding not counted."""
    mask_BT: Tensor | None
    """(B, T) which cache entries are real; None if all are."""

    @classmethod
    def prefill(
        cls, model: Model, prompts: Sequence[Prompt], of_prompt: list[int], new_tokens: int
    ) -> "_DecodingBatch":
        """Read each prompt once, padded on the left, ``READ_TOKENS`` of all of them at a time, and
        hand its cache to each of its rows, with room for ``new_tokens`` more."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        longest = max(lengths)
        ids_PT = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_PT = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids_PT[row, longest - lengths[row] :] = torch.tensor(prompt.token_ids)
            mask_PT[row, longest - lengths[row] :] = True
        # Left padding: the next token of every row has the same place in the cache. Without any
        # there is no mask.
        padded = min(lengths) < longest
        ids_PT, mask_PT = ids_PT.to(model.device), mask_PT.to(model.device)
        cache = ReservedCache(model.text_config)
        positions_PT = (mask_PT.cumsum(-1) - 1).clamp(min=0)
        rows = [
            PlacedRow(prompt.attachments, length, row, longest - length)
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        for start in range(0, longest, size := max(1, READ_TOKENS // len(prompts))):
            part = slice(start, start + size)
            with model.attached(rows, longest):
                hidden_PTD = model.hidden_states(
                    ids_PT[:, part],
                    attention_mask=mask_PT[:, : part.stop] if padded else None,
                    position_ids=positions_PT[:, part],
                    cache=cache,
                )
        index = torch.tensor(of_prompt, device=model.device)
        cache.reserve(index, new_tokens)
        return cls(
            model=model,
            rows=torch.arange(len(of_prompt), device=model.device),
            cache=cache,
            hidden_BD=hidden_PTD[:, -1][index],
            positions_B=torch.tensor([*map(model.next_position, prompts)], device=model.device)[
                index
            ],
            mask_BT=mask_PT[index] if padded else None,
        )

    def drop(self, stopped_B: Tensor, tokens: Tensor) -> Tensor:
        """Drop the stopped rows, and return the tokens (B,) of the others. Where a layer copies its
        whole cache for that, they are dropped once they are an eighth of the batch."""
        keep = ~stopped_B[self.rows]
        num_stopped = len(keep) - int(keep.sum())
        if num_stopped == 0 or (not self.cache.is_reserved and 8 * num_stopped < len(keep)):
            return tokens
        index = filling(keep)
        self.cache.keep(index)
        self.rows, self.positions_B = self.rows[index], self.positions_B[index]
        if self.mask_BT is not None:
            self.mask_BT = self.mask_BT[index]
        return tokens[index]

    def extend(self, tokens: Tensor) -> None:
        """Feed the sampled tokens (B,) and store the hidden states that predict the next ones."""
        if self.mask_BT is not None:
            self.mask_BT = torch.cat([self.mask_BT, self.mask_BT.new_ones(len(tokens), 1)], dim=-1)
        hidden_B1D = self.model.hidden_states(
            tokens[:, None],
            attention_mask=self.mask_BT,
            position_ids=self.positions_B[:, None],
            cache=self.cache,
        )
        self.hidden_BD = hidden_B1D[:, -1]
        self.positions_B = self.positions_B + 1


@lru_cache(maxsize=1)
def stop_strings(
    tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]
) -> StopStringCriteria | None:
    """Criterion for rows of token ids (B, T): whether each has just completed one of the strings,
    across token borders; None if there are no strings. Raises ConfigError: a string's own tokens do
    not contain it."""
    if not strings:
        return None
    for string in strings:
        ids = tokenizer.encode(string, add_special_tokens=False)
        with suppress(ValueError):
            if ids and StopStringCriteria(tokenizer, [string])(torch.tensor([ids]), None):
                continue
        raise ConfigError(
            f"sample.stop={string!r:.110}: the tokenizer does not write it, so it would end no "
            "completion; remove it"
        )
    return StopStringCriteria(tokenizer, list(strings))


@torch.inference_mode()
def stream(
    model: Model, prompt: Prompt, params: SamplingParams, seed: int
) -> Generator[int, None, None]:
    """Tokens of one completion as they are drawn, the same as from ``sample`` for one prompt and
    ``num_completions=1``, including the end-of-sequence token."""
    completes_string = stop_strings(model.tokenizer, params.stop)
    so_far: list[int] = []
    uniforms_L = TransformersSampler(model, 0).uniforms(1, params.max_new_tokens, seed)[0]
    with model.decoding():
        batch = _DecodingBatch.prefill(model, [prompt], [0], params.max_new_tokens)
        for uniform in uniforms_L.to(model.device):
            tokens_B, _ = draw(model.logits(batch.hidden_BD), params, uniform[None])
            so_far.append(int(tokens_B))
            yield so_far[-1]
            if so_far[-1] in model.end_token_ids:
                return
            if completes_string is not None and completes_string(torch.tensor([so_far]), None):
                return
            batch.extend(tokens_B)


def draw(logits_BV: Tensor, params: SamplingParams, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
    """One token (B,) for each row, and its log-prob in nats under the distribution it was drawn
    from; greedy draws from a point mass: its log-probs are 0.

    Args:
        logits_BV: of the model, before temperature.
        uniforms_B: numbers in [0, 1), one for each row.

    Raises:
        TrainingError: the logits are not finite.
    """
    logits_BV = logits_BV.float()
    if params.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
        return tokens_B, torch.zeros_like(tokens_B, dtype=torch.float32)
    if params.temperature != 1:
        logits_BV = logits_BV / params.temperature
    if params.top_k or params.top_p < 1 or params.min_p > 0:
        logits_BV = filtered_logprobs(logits_BV, params)
    probs_BV = logits_BV.softmax(-1)
    # torch.multinomial would draw by the batch's order; a row's token depends on the row alone.
    tokens_B = _inverse_cumulative(probs_BV, uniforms_B)
    logprobs_B = probs_BV.gather(-1, tokens_B[:, None])[:, 0].log()
    if not torch.isfinite(logprobs_B).all():
        raise TrainingError(
            "the model's logits are not finite: its weights, or what was learned on them, "
            "diverged; start again with --run.resume never and a lower train.learning_rate"
        )
    return tokens_B, logprobs_B


def _inverse_cumulative(weights_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The first token (B,) whose cumulative weight exceeds ``u`` of the total, never one of weight
    0: in a large vocabulary, whose sums in float64 are costly, first among blocks, then within one.
    """
    vocabulary = weights_BV.shape[-1]
    whole = vocabulary - vocabulary % BLOCK
    if vocabulary <= 4 * BLOCK:
        return _first_beyond(weights_BV, uniforms_B)[0]
    sums_BN = weights_BV[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    if whole < vocabulary:
        sums_BN = torch.cat([sums_BN, weights_BV[:, whole:].sum(-1, keepdim=True)], dim=-1)
    blocks_B, within_B = _first_beyond(sums_BN, uniforms_B)
    places_BW = blocks_B[:, None] * BLOCK + torch.arange(BLOCK, device=weights_BV.device)
    inside_BW = weights_BV.gather(-1, places_BW.clamp(max=vocabulary - 1))
    index_B, _ = _first_beyond(inside_BW.masked_fill(places_BW >= vocabulary, 0), within_B)
    return (blocks_B * BLOCK + index_B).clamp_(max=vocabulary - 1)


def _first_beyond(weights_BN: Tensor, fractions_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first index (B,) whose cumulative weight exceeds a fraction of the total, and which
    fraction of its own weight lies before that point."""
    cumulative_BN = weights_BN.double().cumsum(-1)
    thresholds_B1 = fractions_B.double()[:, None] * cumulative_BN[:, -1:]
    index_B1 = torch.searchsorted(cumulative_BN, thresholds_B1, right=True)
    index_B1.clamp_(max=weights_BN.shape[-1] - 1)  # of weights that are not finite
    weight_B1 = weights_BN.gather(-1, index_B1).double()
    before_B1 = cumulative_BN.gather(-1, index_B1) - weight_B1
    within_B1 = (thresholds_B1 - before_B1) / weight_B1
    return index_B1[:, 0], within_B1.clamp_(0, 1 - 2**-52)[:, 0]


def filtered_logprobs(logits_BV: Tensor, params: SamplingParams) -> Tensor:
    """Normalised log-probs (B, V) after min-p, top-k and top-p; -inf for filtered tokens.

    The order is that of vLLM: top-p counts what min-p leaves as the whole. Source:
    vllm/v1/sample/sampler.py of vLLM 0.32.
    """
    if params.min_p > 0:
        probs_BV = logits_BV.softmax(-1)
        outside_BV = probs_BV < params.min_p * probs_BV.amax(-1, keepdim=True)
        logits_BV = logits_BV.masked_fill(outside_BV, -torch.inf)
    if 0 < params.top_k < logits_BV.shape[-1]:
        kth_B1 = logits_BV.topk(params.top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < kth_B1, -torch.inf)
    if params.top_p < 1:
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
        probs_BV = sorted_BV.softmax(-1)
        before_BV = probs_BV.cumsum(-1) - probs_BV
        outside_BV = torch.zeros_like(logits_BV, dtype=torch.bool).scatter(
            -1, order_BV, before_BV >= params.top_p
        )
        logits_BV = logits_BV.masked_fill(outside_BV, -torch.inf)
    return logits_BV.log_softmax(-1)
