"""Packed rows through Gated DeltaNet and Mamba 2, with Transformers' torch functions.

1. A layer gives each row what it gives that row alone, and the same gradient; the equations by
   hand.
2. A model's packed rows have the log-probs and the gradient of padded ones, in fewer tokens.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.granitemoehybrid import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridMambaLayer,
)
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

import families
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.model import layout as layouts
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.model.datum import Datum
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.recurrent import rounds, separate_rows

LONG, SHORT, NEVER_SHARED = tuple(range(3, 80)), (40, 41), (50,)
ROWS = [
    Datum.of(prompt, tuple(range(100, 100 + tokens)))
    for prompt, tokens in (
        *((LONG, 40), (SHORT, 1), (LONG, 3), (NEVER_SHARED, 70), (SHORT, 5), (LONG, 66)),
        (SHORT, 2),
    )
]
"""Completions shorter than the convolution, a prompt shorter than it, rows longer than a chunk."""
CPU = torch.device("cpu")


def made_layer(kind: Any = Qwen3_5GatedDeltaNet) -> Any:
    torch.manual_seed(0)
    configs = {Qwen3_5GatedDeltaNet: (Qwen3_5TextConfig, families.DELTA),
               GraniteMoeHybridMambaLayer: (GraniteMoeHybridConfig, families.GRANITE)}  # fmt: skip
    config, options = configs[kind]
    options = families.SIZES_TODAY | options
    if kind is GraniteMoeHybridMambaLayer:  # rows of several chunks, and steps of a least length
        options |= {"mamba_chunk_size": 32, "time_step_limit": (0.1, 2.0)}
    layer = kind(config(**options), 0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    separate_rows(layer)
    return layer


@pytest.mark.parametrize("kind", [Qwen3_5GatedDeltaNet, GraniteMoeHybridMambaLayer])
def test_each_row_is_read_alone(kind: Any) -> None:
    layer, layout = made_layer(kind), layouts.lay_out(ROWS, CPU)
    embedded_VD = torch.randn(200, 64, requires_grad=True)
    parameters = [*layer.parameters(), embedded_VD]
    alone = [layer(embedded_VD[None, list(row.ids)])[0][skipped:]
             for row, skipped in zip(ROWS, layout.skipped, strict=True)]  # fmt: skip
    packed_ND = layer(embedded_VD[layout.ids_1N], segments=layout.segments)[0]
    assert sum(layout.skipped) == 2 * len(LONG) + 2 * len(SHORT)
    assert (packed_ND - torch.cat(alone)).abs().max() < 1e-5
    weights_ND = torch.randn_like(packed_ND)
    wanted = torch.autograd.grad((torch.cat(alone) * weights_ND).sum(), parameters)
    found = torch.autograd.grad((packed_ND * weights_ND).sum(), parameters)
    for own, theirs in zip(found, wanted, strict=True):
        assert (own - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_the_rule_is_the_equation_token_by_token() -> None:
    """S = exp(g) S + beta k (v - exp(g) S^T k)^T, o = S^T q / sqrt(K); arXiv:2412.06464, 3.1."""
    layer, layout = made_layer(), layouts.lay_out(ROWS, CPU)
    x_1ND = torch.randn(200, 64)[layout.ids_1N]
    with torch.no_grad():
        packed_ND = layer(x_1ND, segments=layout.segments)[0]
        start = 0
        for row, skipped in zip(ROWS, layout.skipped, strict=True):
            own = range(start, start + row.num_tokens - skipped)
            start = own.stop
            at = next(i for i in range(len(ROWS)) if ROWS[i].prompt_ids == row.prompt_ids)
            first = sum(
                ROWS[i].num_tokens - layout.skipped[i] for i in range(at)
            )  # where the prompt begins
            places = [*range(first, first + skipped), *own]
            by_hand_TD = one_row(layer, x_1ND[0, places])
            assert (by_hand_TD[skipped:] - packed_ND[list(own)]).abs().max() < 1e-5


def one_row(layer: Qwen3_5GatedDeltaNet, x_TD: Tensor) -> Tensor:
    """The layer's output of one row, a token at a time."""
    mixed_TC = layer.in_proj_qkv(x_TD)
    beta_TH, gate_TV = layer.in_proj_b(x_TD).sigmoid(), layer.in_proj_z(x_TD)
    decay_TH = nn.functional.softplus(layer.in_proj_a(x_TD) + layer.dt_bias) * -layer.A_log.exp()
    states_HKV, outputs = torch.zeros(4, 16, 16), []
    for t in range(len(x_TD)):
        seen = [mixed_TC[t - i] if t >= i else torch.zeros_like(mixed_TC[0]) for i in (3, 2, 1, 0)]
        qkv_C = nn.functional.silu((torch.stack(seen, 1) * layer.conv1d.weight[:, 0]).sum(1))
        q_HK, k_HK = (each.view(2, 16) for each in qkv_C.split([32, 32, 64])[:2])
        q_HK, k_HK = (each.repeat_interleave(2, 0) for each in (q_HK, k_HK))
        q_HK, k_HK = (each / (each.square().sum(-1, True) + 1e-6).sqrt() for each in (q_HK, k_HK))
        states_HKV = states_HKV * decay_TH[t].exp()[:, None, None]
        missing_HV = qkv_C[64:].view(4, 16) - torch.einsum("hkv,hk->hv", states_HKV, k_HK)
        states_HKV = states_HKV + beta_TH[t, :, None, None] * k_HK[..., None] * missing_HV[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", states_HKV, q_HK) / 4)
    core = layer.norm(torch.stack(outputs).view(-1, 16), gate_TV.view(-1, 16))
    projected: Tensor = layer.out_proj(core.view(len(x_TD), -1))
    return projected


def test_the_scan_is_the_equation_token_by_token() -> None:
    """S = exp(A dt) S + dt x B^T, y = S C + D x; arXiv:2405.21060 eq. 1."""
    layer, layout = made_layer(GraniteMoeHybridMambaLayer), layouts.lay_out(ROWS, CPU)
    x_1ND = torch.randn(200, 64)[layout.ids_1N]
    with torch.no_grad():
        packed_ND = layer(x_1ND, segments=layout.segments)[0]
        first = ROWS[0].num_tokens
        for start, own in ((0, range(first)), (0, range(len(LONG)))):
            assert (scanned(layer, x_1ND[0, own]) - packed_ND[list(own)]).abs().max() < 1e-4, start
        # The third row follows the prompt of the first one.
        start = first + ROWS[1].num_tokens
        places = [*range(len(LONG)), *range(start, start + 3)]
        assert layout.skipped[2] == len(LONG)
        found_TD = scanned(layer, x_1ND[0, places])[len(LONG) :]
        assert (found_TD - packed_ND[start : start + 3]).abs().max() < 1e-4


def scanned(layer: Any, x_TD: Tensor) -> Tensor:
    """The layer's output of one row, a token at a time."""
    gate_TD, mixed_TC, step_TH = layer.in_proj(x_TD).split([128, 160, 4], -1)
    steps_TH = nn.functional.softplus(step_TH + layer.dt_bias).clamp(0.1, 2.0)
    states_HDN, outputs = torch.zeros(4, 32, 16), []
    for t in range(len(x_TD)):
        seen = [mixed_TC[t - i] if t >= i else torch.zeros_like(mixed_TC[0]) for i in (3, 2, 1, 0)]
        conv_C = (torch.stack(seen, 1) * layer.conv1d.weight[:, 0]).sum(1) + layer.conv1d.bias
        x_D, B_N, C_N = nn.functional.silu(conv_C).split([128, 16, 16])
        x_HD, step_H = x_D.view(4, 32), steps_TH[t]
        states_HDN = states_HDN * (-layer.A_log.exp() * step_H).exp()[:, None, None]
        states_HDN = states_HDN + (step_H[:, None] * x_HD)[..., None] * B_N
        outputs.append((states_HDN @ C_N + layer.D[:, None] * x_HD).flatten())
    found: Tensor = layer.out_proj(layer.norm(torch.stack(outputs), gate_TD))
    return found


def test_rounds() -> None:
    """Two rows of one prompt, one of another; the convolution sees two tokens before its own."""
    data = [Datum.of((7, 8, 9), (1, 2)), Datum.of((5,), (6,)), Datum.of((7, 8, 9), (3,))]
    plan = rounds(layouts.lay_out(data, CPU).segments, 2)
    assert plan.lengths == (3, 2, 2, 1)
    assert (plan.first, plan.second) == ((0, 2), (1, 3))
    assert plan.parents_S.tolist() == [0, 0]
    assert plan.inputs_M.tolist() == [0, 0, 1, 2, 3, 4, 5, 0, 0, 6, 7, 2, 3, 8]
    assert plan.outputs_N.tolist() == [2, 3, 4, 5, 6, 9, 10, 13]


@pytest.mark.parametrize(
    "name",
    most_are_long(
        [
            *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"),
            *("granitemoehybrid", "granitemoehybrid_experts"),
        ],
        ["qwen3_5_text", "granitemoehybrid"],
    ),
)
def test_packed_rows_of_a_model_are_padded_ones(name: str, tmp_path: Path) -> None:
    path = families.make(tmp_path, name)
    section = ModelSection(path=path, dtype="float32", adapter=AdapterSection(rank=4))
    ids_BT, mask_BT = layouts.collate(ROWS, CPU)
    with Model(section, load_tokenizer(path), seed=0) as model:
        families.randomize(model, seed=1)
        trained, layout = model.parameters_of("policy"), layouts.lay_out(ROWS, CPU)
        assert layout.ids_1N.numel() == 267 < ids_BT.numel() == 1001
        weights_N, found = torch.randn(int(mask_BT.sum())), []
        for rows in (layout, None):
            logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.9, layout=rows)
            logprobs_N = logprobs_BT[mask_BT]
            gradient = torch.autograd.grad((logprobs_N * weights_N).sum(), trained)
            found.append((logprobs_N.detach(), torch.cat([each.flatten() for each in gradient])))
    (packed_N, packed), (padded_N, padded) = found
    assert (packed_N - padded_N).abs().max() < 1e-5
    assert (packed - padded).norm() < 1e-4 * padded.norm()
