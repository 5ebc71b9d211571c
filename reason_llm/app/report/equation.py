"""Equation that a run maximises or minimises, as MathML with the config's numbers.

It is put together from the row's columns exactly as ``train.losses``, ``train.advantages``,
``train.values``, ``train.preferences`` and ``train.rewards`` are, whose docstrings name the
sources. Static LaTeX and numbers only: nothing of a run's words.
"""

from string import Template

from latex2mathml.converter import convert

from reason_llm.config import SURROGATES, Algorithm, Config, PreferenceRow

SUMS = {
    "sequence_mean": r"\frac{1}{N} \sum_i \frac{1}{|o_i|} \sum_t",
    "sequence_sum": r"\frac{1}{N} \sum_i \sum_t",
    "token_mean": r"\frac{1}{\sum_i |o_i|} \sum_i \sum_t",
    "constant": r"\frac{1}{N · $max_tokens} \sum_i \sum_t",
}
"""Over the tokens, by ``algorithm.aggregation``."""
BASELINES = {
    "group_mean": r"- \text{mean of its group}",
    "leave_one_out": r"- \text{mean of the others of its group}",
    "none": "",
}
DEVIATIONS = {"group": r"\text{deviation in its group}", "batch": r"\text{deviation in the step}"}
PER_REWARD = (
    r"A_i = \sum_k w_k \frac{R_{k,i} - \text{group mean of } R_k}"
    r"{\text{group deviation of } R_k + 0.0001}"
)
QUOTIENT = r"\frac{\pi_θ(o_{i,t})}{\pi_\text{old}(o_{i,t})}"
TEACHER = r"\log \frac{\pi_\text{teacher}(o_{i,t})}{\pi_\text{old}(o_{i,t})}"
RATIOS = {
    "token": rf"r_{{i,t}} = {QUOTIENT}",
    "sequence": rf"r_{{i,t}} = \exp\left(\frac{{1}}{{|o_i|}} \sum_t \log {QUOTIENT}\right)",
}
ESTIMATORS = {"k1": "-l", "k2": r"\frac{l^2}{2}", "k3": "e^l - 1 - l"}
"""Of the KL, with l = log ref - log policy."""


OF_TOKENS = r"-\log \pi_θ(o_{i,t})"
H = r"\log \frac{\pi_θ(c)}{\pi_\text{ref}(c)} - \log \frac{\pi_θ(r)}{\pi_\text{ref}(r)}"
MEANS = {side: rf"\frac{{1}}{{|{side}|}} \log \pi_θ({side})" for side in ("c", "r")}
"""Mean log-probs of the chosen and the rejected side."""


def equation(config: Config) -> str:
    """What is maximised or minimised, and what stands in it."""
    if config.stage == "sample":
        return ""
    if config.stage == "preference":
        lines, note = _preference(config.preference.row()), _PAIRS
        if not config.preference.row().needs_pairs:
            note = "L is minimised over the N labelled completions y of each optimizer step."
    elif config.stage == "reward":
        lines, note = _reward_model(config), _PAIRS
    elif config.stage != "rl":
        sums = SUMS[config.sft.aggregation]
        what = "tokens o" if config.stage == "pretrain" else "the assistant's tokens o"
        lines = [f"L = {sums} {OF_TOKENS}"]
        note = f"L is minimised over {what} of the N rows of each optimizer step."
    else:
        row = config.learned_row
        lines = [_objective(row, config), *_advantage(row, config), *_ratio(row), *_kl(row)]
        lines += _value_loss(config) if row.critic else []
        return _shown(lines) + _notes(row)
    return f'{_shown(lines)}<p class="muted">{note}</p>'


def _shown(lines: list[str]) -> str:
    found = (convert(line, display="block") for line in lines)
    return "".join(f'<div class="equation">{each}</div>' for each in found)


_PAIRS = "L is minimised over the N pairs (c chosen, r rejected) of each optimizer step."


def _preference(row: PreferenceRow) -> list[str]:
    """The loss as ``train.preferences`` has it, and what h is."""
    beta, smoothing = _number(row.beta), _number(row.label_smoothing)
    mean, nll = r"L = \frac{1}{N} \sum_i", ""
    if row.nll_coefficient:
        weight = "" if row.nll_coefficient == 1 else _number(row.nll_coefficient)
        nll = rf"- {weight} \frac{{1}}{{\sum_i |c_i|}} \sum_i \log \pi_θ(c_i)"
    right, swapped = rf"\log σ({beta} h_i)", rf"\log σ(-{beta} h_i)"
    h = f"h = {H}"
    match row.loss:
        case "sigmoid" if row.label_smoothing:
            keep = _number(1 - row.label_smoothing)
            term = rf"\left(- {keep} {right} - {smoothing} {swapped}\right)"
        case "sigmoid":
            term = f"- {right}"
        case "robust":
            keep, whole = _number(1 - row.label_smoothing), _number(1 - 2 * row.label_smoothing)
            term = rf"\frac{{- {keep} {right} + {smoothing} {swapped}}}{{{whole}}}"
        case "ipo":
            term = rf"\left(h_i - \frac{{1}}{{2 · {beta}}}\right)^2"
        case "orpo":
            term = rf"- {beta} \log σ(h_i)"
            odds = {side: rf"\frac{{p_{side}}}{{1 - p_{side}}}" for side in ("c", "r")}
            h = rf"h = \log {odds['c']} - \log {odds['r']}, \quad p_y = "
            h += r"\exp\left(\frac{1}{|y|} \log \pi_θ(y)\right)"
        case "simpo":
            term = rf"- \log σ({beta} h_i - {_number(row.margin)})"
            h = f"h = {MEANS['c']} - {MEANS['r']}"
        case "kto":
            return _kto(row)
    lines = [f"{mean} {term} {nll}", h]
    if row.normalize_length:
        lines.append(r"\text{each log-ratio divided by its side's length}")
    return lines


def _kto(row: PreferenceRow) -> list[str]:
    beta = _number(row.beta)
    good, bad = _number(row.desirable_weight), _number(row.undesirable_weight)
    return [
        rf"L = \frac{{1}}{{N}} \left(\sum_\text{{good}} {good} (1 - σ({beta} (l_i - z))) + "
        rf"\sum_\text{{bad}} {bad} (1 - σ({beta} (z - l_i)))\right)",
        r"l_i = \log \frac{\pi_θ(y_i)}{\pi_\text{ref}(y_i)}",
        r"z = \max\left(0, \text{mean of } l \text{ over mismatched prompts and answers}\right)",
    ]


def _reward_model(config: Config) -> list[str]:
    section = config.reward
    margin = "- m_i" if section.margin else ""
    centred = rf"+ {_number(section.centering)} (R(c_i) + R(r_i))^2" if section.centering else ""
    return [rf"L = \frac{{1}}{{N}} \sum_i - \log σ(R(c_i) - R(r_i) {margin}) {centred}"]


def _value_loss(config: Config) -> list[str]:
    """The critic's loss, as ``train.values`` has it."""
    clip = config.critic.value_clip
    name, error = r"\hat{V}_{i,t}", r"(V_{i,t} - \hat{V}_{i,t})^2"
    lam = config.critic.lam if config.critic.value_lam is None else config.critic.value_lam
    returns = rf"{name} = V_{{i,t}}^\text{{old}} + A_{{i,t}}"
    if lam != config.critic.lam:
        returns += rf" \text{{, with }} {_number(lam)} \text{{ in the place of }} "
        returns += _number(config.critic.lam)
    if clip:
        moved = r"V_{i,t}^\text{old} + \operatorname{clip}(V_{i,t} - "
        moved += rf"V_{{i,t}}^\text{{old}}, -{_number(clip)}, {_number(clip)})"
        error = rf"\max\left({error}, ({moved} - {name})^2\right)"
    return [rf"L_V = {SUMS['token_mean']} \frac{{1}}{{2}} {error}", returns]


def _number(value: float) -> str:
    digits, _, power = f"{value:g}".partition("e")
    return rf"{digits} · 10^{{{int(power)}}}" if power else digits


def _advantage_name(row: Algorithm) -> str:
    has_tokens = row.kl != "none" and row.kl_place == "token_reward"
    return "A_{i,t}" if has_tokens or row.critic or row.teacher else "A_i"


def _objective(row: Algorithm, config: Config) -> str:
    term = Template(SURROGATES[row.surrogate].latex).substitute(
        A=_advantage_name(row),
        low=_number(row.clip_low),
        high=_number(row.clip_high),
        unclipped=rf"\min(r_{{i,t}}, {_number(row.delta)})" if row.delta else "r_{i,t}",
    )
    # Not beside VESPO's, which has it in its ratio; and never beside the KL or the entropy.
    if row.correction != "none" and not SURROGATES[row.surrogate].weights_inside:
        term = f"w_{{i,t}} {term}"
    parts = [term]
    if row.kl != "none" and row.kl_place == "loss":
        parts.append(f"- {_number(row.kl_coefficient)} D_{{i,t}}")
    if row.entropy_coefficient:
        parts.append(f"+ {_number(row.entropy_coefficient)} H_{{i,t}}")
    if len(parts) > 1:
        parts = [r"\left(", *parts, r"\right)"]
    sums = Template(SUMS[row.aggregation]).substitute(max_tokens=config.sample.max_new_tokens)
    return f"J = {sums} {' '.join(parts)}"


def _advantage(row: Algorithm, config: Config) -> list[str]:
    """Advantage of a completion, from the rewards of the group or the step, or of a token."""
    if row.normalization == "per_reward":
        return [PER_REWARD]
    name, beta = _advantage_name(row), _number(row.kl_coefficient)
    if row.teacher:
        return [f"{name} = {TEACHER}"]
    if row.critic:
        gamma, lam = _number(config.critic.gamma), _number(config.critic.lam)
        off = f"- {beta} D_{{i,t}}" if row.kl != "none" and row.kl_place != "loss" else ""
        return [
            rf"{name} = \sum_{{u ≥ t}} ({gamma} · {lam})^{{u - t}} δ_{{i,u}}",
            f"δ_{{i,t}} = ρ_{{i,t}} + {gamma} · V_{{i,t+1}} - V_{{i,t}}",
            f"ρ_{{i,t}} = [t = |o_i|] R_i {off}",
        ]
    if row.kl != "none" and row.kl_place == "token_reward":
        return [rf"{name} = R_i - {beta} \sum_{{u ≥ t}} D_{{i,u}}"]
    is_in_reward = row.kl != "none" and row.kl_place == "reward"
    reward = r"R_i^\text{KL}" if is_in_reward else "R_i"
    centred = f"{reward} {BASELINES[row.baseline]}"
    if row.scale in DEVIATIONS:
        centred = rf"\frac{{{centred}}}{{{DEVIATIONS[row.scale]} + 0.0001}}"
    lines = [f"{name} = {centred}"]
    if is_in_reward:
        lines.append(rf"R_i^\text{{KL}} = R_i - {beta} \sum_t D_{{i,t}}")
    return lines


def _ratio(row: Algorithm) -> list[str]:
    if row.surrogate == "reinforce":
        return []
    if row.surrogate == "vespo":
        return [r"φ_i = w^k e^{λ (1 - w)}", rf"w = \prod_t {QUOTIENT}"]
    is_token = row.ratio == "token" or row.surrogate == "gmpo"
    return [RATIOS["token" if is_token else "sequence"]]


def _kl(row: Algorithm) -> list[str]:
    """The estimator of the KL to the base, which is ``ref``."""
    if row.kl == "none":
        return []
    policy = "θ" if row.kl_place == "loss" else r"\text{old}"
    log = rf"l = \log \frac{{\pi_\text{{ref}}}}{{\pi_{{{policy}}}}}"
    return [rf"D_{{i,t}} = {ESTIMATORS[row.kl]}, \quad {log}"]


def _notes(row: Algorithm) -> str:
    """Notes on what the equations do not show."""
    notes = ["J is maximised over the N completions o of each optimizer step."]
    if row.scale == "whiten":
        notes.append("Advantages are then whitened: mean 0 and deviation 1 over the step.")
    if row.correction != "none":
        is_inside = SURROGATES[row.surrogate].weights_inside
        corrects = "also corrects" if is_inside else "corrects"
        notes.append(
            f"w {corrects} for the sampler's log-probs: {row.correction} at {row.correction_cap:g}."
        )
    if row.entropy_coefficient:
        notes.append("The entropy H is averaged over all trained tokens, whatever the sums.")
    if row.surrogate in ("cispo", "vespo"):
        notes.append("sg: no gradient goes through it.")
    if row.surrogate == "sapo":
        notes.append(
            f"τ is {row.temperature_positive:g} for positive advantages and "
            f"{row.temperature_negative:g} for others."
        )
    if row.surrogate == "gmpo":
        notes.append(
            f"log r is clipped to [−{row.clip_low:g}, {row.clip_high:g}] on the side where the "
            "advantage asks for more."
        )
    if row.dual_clip:
        notes.append(f"For A &lt; 0 the term is at least {row.dual_clip:g} A.")
    if row.ratio == "sequence_token":
        notes.append("The ratio has the completion's value and each token's own gradient.")
    if row.kl == "none" and not row.teacher:
        notes.append("There is no KL to the base in it.")
    if row.min_reward_std > 0:
        notes.append(
            "Groups whose rewards have a standard deviation below "
            f"{row.min_reward_std:g} teach nothing."
        )
    if row.dynamic_sampling > 1:
        notes.append(
            "Groups whose rewards are all equal are dropped, and others sampled: up to "
            f"{row.dynamic_sampling} times the prompts of a step."
        )
    return f'<p class="muted">{" ".join(notes)}</p>'
