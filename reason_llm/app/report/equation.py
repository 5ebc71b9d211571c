"""Equation that a run's algorithm row maximises, as MathML with the config's numbers.

It is put together from the row's columns exactly as ``train.losses`` and ``train.advantages`` are,
whose docstrings name the sources. Static text and numbers only: nothing of a run's words.
"""

from reason_llm.config import Algorithm, Config


def equation(config: Config) -> str:
    """The objective, then the advantage and the ratio in it."""
    row = config.learned_row
    lines = [_objective(row, config), *_advantage(row, config), *_ratio(row)]
    if row.kl != "none":
        lines.append(_kl(row))
    body = "".join(
        f'<div class="equation"><math displaystyle="true">{line}</math></div>' for line in lines
    )
    return body + _notes(row)


def _i(name: str) -> str:
    return f"<mi>{name}</mi>"


def _o(sign: str) -> str:
    return f"<mo>{sign}</mo>"


def _n(value: float) -> str:
    return f"<mn>{value:g}</mn>"


def _t(text: str) -> str:
    return f"<mtext>{text}</mtext>"


def _row(*parts: str) -> str:
    return f"<mrow>{''.join(parts)}</mrow>"


def _sub(base: str, below: str) -> str:
    return f"<msub>{base}{below}</msub>"


def _frac(top: str, bottom: str) -> str:
    return f"<mfrac>{top}{bottom}</mfrac>"


def _sum(below: str) -> str:
    return f"<munder>{_o('∑')}{below}</munder>"


def _call(name: str, *arguments: str) -> str:
    inner = _o(",").join(arguments)
    return _row(_i(name), _o("("), inner, _o(")"))


def _abs(inner: str) -> str:
    return _row(_o("|"), inner, _o("|"))


IT = _row(_i("i"), _o(","), _i("t"))
RATIO, SURROGATE = _sub(_i("r"), IT), _sub(_i("s"), IT)
PI, OLD, REF = (_row(_sub(_i("π"), _i(name))) for name in ("θ", "old", "ref"))
LENGTH = _abs(_sub(_i("o"), _i("i")))


def _advantage_name(row: Algorithm) -> str:
    has_tokens = row.kl != "none" and row.kl_place == "token_reward"
    return _sub(_i("A"), IT if has_tokens else _i("i"))


def _objective(row: Algorithm, config: Config) -> str:
    # Not beside VESPO's, which has it in its ratio; and never beside the KL or the entropy.
    is_beside = row.correction != "none" and row.surrogate != "vespo"
    terms = [*([_sub(_i("w"), IT)] if is_beside else []), _surrogate(row)]
    if row.kl != "none" and row.kl_place == "loss":
        terms += [_o("−"), _n(row.kl_coefficient), _sub(_i("D"), IT)]
    if row.entropy_coefficient:
        terms += [_o("+"), _n(row.entropy_coefficient), _sub(_i("H"), IT)]
    is_sum = len(terms) > 1 + is_beside
    inner = _row(_o("("), *terms, _o(")")) if is_sum else _row(*terms)
    tokens, completions = _sum(_i("t")), _sum(_i("i"))
    if row.aggregation == "sequence_mean":
        parts = [_frac(_n(1), _i("N")), completions, _frac(_n(1), LENGTH), tokens]
    elif row.aggregation == "sequence_sum":
        parts = [_frac(_n(1), _i("N")), completions, tokens]
    elif row.aggregation == "token_mean":
        total = _row(_sum(_i("i")), LENGTH)
        parts = [_frac(_n(1), total), completions, tokens]
    else:
        most = _row(_i("N"), _o("·"), _n(config.sample.max_new_tokens))
        parts = [_frac(_n(1), most), completions, tokens]
    return _row(_i("J"), _o("="), *parts, inner)


def _surrogate(row: Algorithm) -> str:
    advantage = _advantage_name(row)
    log = _row(_i("log"), PI, _o("("), _sub(_i("o"), IT), _o(")"))
    one_less, one_more = f"1 − {row.clip_low:g}", f"1 + {row.clip_high:g}"
    bounds = (f"<mn>{one_less}</mn>", f"<mn>{one_more}</mn>")
    match row.surrogate:
        case "reinforce":
            return _row(advantage, log)
        case "cispo":
            return _row(_call("sg", _call("clip", RATIO, *bounds)), advantage, log)
        case "vespo":
            weight = _row(_sub(_i("φ"), _i("i")))
            return _row(_call("sg", weight), advantage, log)
        case "sapo":
            slope = _sub(_i("τ"), _i("A"))
            inner = _row(slope, _o("("), RATIO, _o("−"), _n(1), _o(")"))
            return _row(_frac(_n(4), slope), _call("σ", inner), advantage)
        case "gmpo":
            mean = _row(_frac(_n(1), LENGTH), _sum(_i("t")), _call("clip", _row(_i("log"), RATIO)))
            return _row(advantage, _call("exp", mean))
        case "clip":
            plain = RATIO
            if row.delta:
                plain = _call("min", RATIO, _n(row.delta))
            return _call(
                "min", _row(plain, advantage), _row(_call("clip", RATIO, *bounds), advantage)
            )


def _advantage(row: Algorithm, config: Config) -> list[str]:
    """Advantage of a completion, from the rewards of the group or the step."""
    name = _advantage_name(row)
    reward = _sub(_i("R"), _i("i"))
    if row.normalization == "per_reward":
        part = _row(_i("R"), _o("k"))
        centred = _row(_sub(_i("R"), _row(_i("k"), _o(","), _i("i"))), _o("−"),
                       _t("group mean of "), part)  # fmt: skip
        spread = _row(_t("group deviation of "), part, _o("+"), _n(1e-4))
        line = _row(name, _o("="), _sum(_i("k")), _sub(_i("w"), _i("k")), _frac(centred, spread))
        return [line]
    beta, kl = _n(row.kl_coefficient), _sub(_i("D"), IT)
    lines = []
    if row.kl != "none" and row.kl_place == "token_reward":
        line = _row(name, _o("="), reward, _o("−"), beta, _sum(_i("u ≥ t")), kl)
        return [line]
    if row.kl != "none" and row.kl_place == "reward":
        taken = _row(_sub(_i("R′"), _i("i")), _o("="), reward, _o("−"), beta, _sum(_i("t")), kl)
        lines.append(taken)
        reward = _sub(_i("R′"), _i("i"))
    base = {
        "group_mean": [_o("−"), _t("mean of its group")],
        "leave_one_out": [_o("−"), _t("mean of the others of its group")],
        "none": [],
    }[row.baseline]
    centred = _row(reward, *base)
    over = {"group": "deviation in its group", "batch": "deviation in the step"}
    if row.scale in over:
        centred = _frac(centred, _row(_t(over[row.scale]), _o("+"), _n(1e-4)))
    return [_row(name, _o("="), centred), *lines]


def _ratio(row: Algorithm) -> list[str]:
    if row.surrogate in ("reinforce",):
        return []
    quotient = _frac(_row(PI, _o("("), _sub(_i("o"), IT), _o(")")),
                     _row(OLD, _o("("), _sub(_i("o"), IT), _o(")")))  # fmt: skip
    if row.surrogate == "vespo":
        power = _row("<msup>", _i("w"), _i("k"), "</msup>")
        decay = _row("<msup>", _i("e"), _row(_i("λ"), _o("("), _n(1), _o("−"), _i("w"), _o(")")),
                     "</msup>")  # fmt: skip
        product = _row(_i("w"), _o("="), f"<munder>{_o('∏')}{_i('t')}</munder>", quotient)
        return [_row(_sub(_i("φ"), _i("i")), _o("="), power, decay), product]
    if row.ratio == "token" or row.surrogate == "gmpo":
        return [_row(RATIO, _o("="), quotient)]
    mean = _row(_frac(_n(1), LENGTH), _sum(_i("t")), _i("log"), quotient)
    return [_row(RATIO, _o("="), _call("exp", mean))]


def _kl(row: Algorithm) -> str:
    """The estimator, with l = log ref - log policy."""
    log = _i("l")
    value = {
        "k1": _row(_o("−"), log),
        "k2": _frac(f"<msup>{log}{_n(2)}</msup>", _n(2)),
        "k3": _row(f"<msup>{_i('e')}{log}</msup>", _o("−"), _n(1), _o("−"), log),
    }[row.kl]
    name = _sub(_i("D"), IT)
    policy = PI if row.kl_place == "loss" else OLD
    where = _row(_t(",  "), log, _o("="), _i("log"), _frac(REF, policy))
    return _row(name, _o("="), value, where)


def _notes(row: Algorithm) -> str:
    """Notes on what the equations do not show."""
    notes = ["J is maximised over the N completions o of each optimizer step."]
    if row.scale == "whiten":
        notes.append("Advantages are then whitened: mean 0 and deviation 1 over the step.")
    if row.correction != "none":
        corrects = "also corrects" if row.surrogate == "vespo" else "corrects"
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
    if row.dynamic_sampling > 1:
        notes.append(
            "Groups whose rewards are all equal are dropped, and others sampled: up to "
            f"{row.dynamic_sampling} times the prompts of a step."
        )
    return f'<p class="muted">{" ".join(notes)}</p>'
