"""Compiled loops of a training step for R seeds, float32, on a CPU: products, and all that lies between them.

Kernel by kernel, a step carries every array through memory again and again. Here a block of rows goes
through all of a slot's refinement while it is in the cache. Arrays are contiguous and begin with the seed; a
function fills those named `*_out`, but adds to gradients of what it only reads. Compiled on first use and
kept beside this file or in the user's cache folder, where one can be written. All is in one file, as Numba's
cache does not see a change of what a function takes from another.

Reference for erf: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26 (error below 1.5e-7).
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numba import njit

Loop = Callable[..., Any]
Array = Any  # float32: what numba's compiler sees
BLOCK = 320  # rows whose arrays stay in the cache together
NORM_EPS = np.float32(1e-5)

_ZERO, _HALF, _ONE, _TWO = (np.float32(x) for x in (0, 0.5, 1, 2))
_LOWEST = np.float32(-np.inf)
_LOG2_E = np.float32(1 / np.log(2))
_LN2 = np.float32(np.log(2))
_LARGEST, _SMALLEST = np.float32(88), np.float32(-87)  # what exp can take
_EXP = tuple(np.float32(1 / x) for x in (5040, 720, 120, 24, 6, 2))  # Taylor on |x| <= ln(2) / 2
_ERF = tuple(np.float32(x) for x in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))
_ERF_SCALE = np.float32(0.3275911 * np.sqrt(0.5))
_DENSITY = np.float32(1 / np.sqrt(2 * np.pi))
_BIAS, _MANTISSA = np.int32(127), np.int32(23)

# Sums may be taken in any order, which is what lets a loop work on many columns at once. NaN stays NaN. One
# loop does one thing: of many arrays the compiler can't tell that they are apart.
_OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "fastmath": {"contract", "nsz", "arcp", "reassoc"},
    "nogil": True,
}


def _compiled(function: Loop) -> Loop:
    try:
        return cast(Loop, njit(function, cache=True, **_OPTIONS))
    except RuntimeError:  # there is no folder for the cache
        return cast(Loop, njit(function, **_OPTIONS))


def _inlined(function: Loop) -> Loop:
    return cast(Loop, njit(function, inline="always", error_model="numpy"))


@_inlined
def _exp(x: Array) -> Array:
    """e^x as 2^k e^r with |r| <= ln(2) / 2; of what is out of range, that of the end of the range."""
    x = _LARGEST if x > _LARGEST else x  # in this form NaN stays
    x = _SMALLEST if x < _SMALLEST else x
    k = np.floor(x * _LOG2_E + _HALF)
    r = x - k * _LN2
    p = _EXP[0]
    p = p * r + _EXP[1]
    p = p * r + _EXP[2]
    p = p * r + _EXP[3]
    p = p * r + _EXP[4]
    p = p * r + _EXP[5]
    power = np.int32((np.int32(k) + _BIAS) << _MANTISSA).view(np.float32)
    return (p * r * r + r + _ONE) * power


@_inlined
def _sigmoid(x: Array) -> Array:
    return _ONE / (_ONE + _exp(-x))


@_compiled
def affine(x: Array, weight: Array, bias: Array, out: Array) -> None:
    """Fill [R, n, out] with x [R, n, in] times weight [R, out, in] plus bias [R, out]."""
    n_seeds, n_rows, _ = x.shape
    for seed in range(n_seeds):
        for start in range(0, n_rows, BLOCK):
            rows = x[seed][start : start + BLOCK]
            _map(rows, weight[seed], bias[seed], out[seed][start : start + BLOCK])


@_compiled
def affine_backward(
    d_y: Array, x: Array, weight: Array, d_x_out: Array, d_weight_out: Array, d_bias_out: Array
) -> None:
    """Gradients of `affine`; an empty `d_x_out` is not filled."""
    n_seeds, n_rows, _ = x.shape
    product = np.empty_like(weight[0])
    for seed in range(n_seeds):
        for start in range(0, n_rows, BLOCK):
            given = d_y[seed][start : start + BLOCK]
            if d_x_out.size:
                np.dot(given, weight[seed], d_x_out[seed][start : start + BLOCK])
            rows = x[seed][start : start + BLOCK]
            _sum_up(given, rows, product, d_weight_out[seed], d_bias_out[seed])


@_compiled
def gelu_affine(x: Array, weight: Array, bias: Array, active_out: Array, slope_out: Array) -> None:
    """GELU of `affine`, and its slope [R, n, out]."""
    n_seeds, n_rows, _ = x.shape
    inner = np.empty((BLOCK, weight.shape[1]), np.float32)
    for seed in range(n_seeds):
        for start in range(0, n_rows, BLOCK):
            rows = x[seed][start : start + BLOCK]
            block = inner[: len(rows)]
            np.dot(rows, weight[seed].T, block)
            active, slope = active_out[seed][start : start + BLOCK], slope_out[seed][start : start + BLOCK]
            _gelu(block, bias[seed], active, slope)


@_compiled
def gelu_affine_backward(
    d_active: Array,
    slope: Array,
    x: Array,
    weight: Array,
    d_x_out: Array,
    d_weight_out: Array,
    d_bias_out: Array,
) -> None:
    """Gradients of `gelu_affine`; an empty `d_x_out` is not filled."""
    n_seeds, n_rows, _ = x.shape
    product = np.empty_like(weight[0])
    inner = np.empty((BLOCK, weight.shape[1]), np.float32)
    for seed in range(n_seeds):
        for start in range(0, n_rows, BLOCK):
            rows = x[seed][start : start + BLOCK]
            d_inner = inner[: len(rows)]
            _multiply(d_active[seed][start : start + BLOCK], slope[seed][start : start + BLOCK], d_inner)
            if d_x_out.size:
                np.dot(d_inner, weight[seed], d_x_out[seed][start : start + BLOCK])
            _sum_up(d_inner, rows, product, d_weight_out[seed], d_bias_out[seed])


@_compiled
def norm(x: Array, normed_out: Array, scale_out: Array) -> None:
    """Rows of x [n, D] with mean zero and variance one, and what they were multiplied by [n]."""
    _normalise(x, normed_out, scale_out)


@_compiled
def norm_backward(d_normed: Array, normed: Array, scale: Array, d_x_out: Array) -> None:
    """Gradient of `norm`."""
    _normalise_backward(d_normed, normed, scale, d_x_out)


@_compiled
def scaled_norm(x: Array, gain: Array, shift: Array, normed_out: Array, scale_out: Array, out: Array) -> None:
    """`norm` of x [R, n, D], times gain [R, D] plus shift [R, D]."""
    n_seeds, n_rows, d = x.shape
    for seed in range(n_seeds):
        _normalise(x[seed], normed_out[seed], scale_out[seed])
        for row in range(n_rows):
            for i in range(d):
                out[seed, row, i] = normed_out[seed, row, i] * gain[seed, i] + shift[seed, i]


@_compiled
def scaled_norm_backward(
    d_y: Array,
    gain: Array,
    normed: Array,
    scale: Array,
    d_x_out: Array,
    d_gain_out: Array,
    d_shift_out: Array,
) -> None:
    """Gradients of `scaled_norm`."""
    n_seeds, n_rows, d = normed.shape
    d_normed = np.empty((n_rows, d), np.float32)
    for seed in range(n_seeds):
        for row in range(n_rows):
            for i in range(d):
                d_normed[row, i] = d_y[seed, row, i] * gain[seed, i]
            for i in range(d):
                d_gain_out[seed, i] += d_y[seed, row, i] * normed[seed, row, i]
            for i in range(d):
                d_shift_out[seed, i] += d_y[seed, row, i]
        _normalise_backward(d_normed, normed[seed], scale[seed], d_x_out[seed])


@_compiled
def look(
    slot: Array,
    tokens: Array,
    scale: Array,
    bias: Array,
    query_weight: Array,
    query_bias: Array,
    normed_out: Array,
    norm_scale_out: Array,
    query_out: Array,
    score_out: Array,
    attn_out: Array,
    pooled_out: Array,
) -> None:
    """Attention [R, n, L] of slots [R, n, D] to tokens [R, B, L, D], and what it pools, [R, n, D].

    Logits are scale * <query, token> + bias, with scale and bias [R, B, L]; the tokens are pooled by
    scale * attention. n is a multiple of B: the slots of a sample follow one another.
    """
    n_seeds, n_rows, _ = slot.shape
    n_readers = n_rows // tokens.shape[1]
    for seed in range(n_seeds):
        normed, query = normed_out[seed], query_out[seed]
        _ask(slot[seed], query_weight[seed], query_bias[seed], normed, norm_scale_out[seed], query)
        looked = score_out[seed], attn_out[seed], pooled_out[seed]
        _attend(n_readers, query, tokens[seed], scale[seed], bias[seed], *looked)


@_compiled
def look_backward(
    d_attn: Array,
    d_pooled: Array,
    tokens: Array,
    scale: Array,
    query_weight: Array,
    normed: Array,
    norm_scale: Array,
    query: Array,
    score: Array,
    attn: Array,
    d_slot_out: Array,
    d_tokens_out: Array,
    d_scale_out: Array,
    d_bias_out: Array,
    d_query_weight_out: Array,
    d_query_bias_out: Array,
) -> None:
    """Gradients of `look`; all but that of the slots are added to."""
    n_seeds, n_rows, d = normed.shape
    n_readers = n_rows // tokens.shape[1]
    d_query = np.empty((n_rows, d), np.float32)
    for seed in range(n_seeds):
        _attend_backward(
            n_readers,
            d_attn[seed],
            d_pooled[seed],
            query[seed],
            tokens[seed],
            scale[seed],
            score[seed],
            attn[seed],
            d_query,
            d_tokens_out[seed],
            d_scale_out[seed],
            d_bias_out[seed],
        )
        _ask_backward(
            d_query,
            query_weight[seed],
            normed[seed],
            norm_scale[seed],
            d_slot_out[seed],
            d_query_weight_out[seed],
            d_query_bias_out[seed],
        )


@_compiled
def compete(
    slot: Array,
    tokens: Array,
    query_weight: Array,
    query_bias: Array,
    floor: Array,
    normed_out: Array,
    norm_scale_out: Array,
    query_out: Array,
    attn_out: Array,
    pooled_out: Array,
) -> None:
    """Attention [R, n, L] of slots [R, n, D] that compete for tokens [R, B, L, D]: a softmax over slots.

    The map gives queries and, as the last of D + 1, what is added to their scores. Fills pooled [R, n, D + 1]
    with the tokens' mean by attention, and the sum of the weights of that mean; attention is divided by its
    sum, or by `floor` if that is less.
    """
    n_seeds, n_rows, _ = slot.shape
    n_readers = n_rows // tokens.shape[1]
    for seed in range(n_seeds):
        normed, query = normed_out[seed], query_out[seed]
        _ask(slot[seed], query_weight[seed], query_bias[seed], normed, norm_scale_out[seed], query)
        _compete(n_readers, query, tokens[seed], floor, attn_out[seed], pooled_out[seed])


@_compiled
def compete_backward(
    d_attn: Array,
    d_pooled: Array,
    tokens: Array,
    query_weight: Array,
    floor: Array,
    normed: Array,
    norm_scale: Array,
    query: Array,
    attn: Array,
    pooled: Array,
    d_slot_out: Array,
    d_tokens_out: Array,
    d_query_weight_out: Array,
    d_query_bias_out: Array,
) -> None:
    """Gradients of `compete`; all but that of the slots are added to."""
    n_seeds, n_rows, d = normed.shape
    n_readers = n_rows // tokens.shape[1]
    d_query = np.empty((n_rows, d + 1), np.float32)
    for seed in range(n_seeds):
        _compete_backward(
            n_readers,
            d_attn[seed],
            d_pooled[seed],
            query[seed],
            tokens[seed],
            floor,
            attn[seed],
            pooled[seed],
            d_query,
            d_tokens_out[seed],
        )
        _ask_backward(
            d_query,
            query_weight[seed],
            normed[seed],
            norm_scale[seed],
            d_slot_out[seed],
            d_query_weight_out[seed],
            d_query_bias_out[seed],
        )


@_compiled
def refine(
    update: Array,
    slot: Array,
    input_weight: Array,
    input_bias: Array,
    hidden_weight: Array,
    hidden_bias: Array,
    first_weight: Array,
    first_bias: Array,
    second_weight: Array,
    second_bias: Array,
    gates_out: Array,
    gated_out: Array,
    new_out: Array,
    normed_out: Array,
    scale_out: Array,
    active_out: Array,
    slope_out: Array,
    out: Array,
) -> None:
    """Fill [R, n, D] with the slots after GRU and MLP, and what the gradients need."""
    n_seeds, n_rows, d = slot.shape
    from_input = np.empty((BLOCK, 3 * d), np.float32)
    from_hidden = np.empty((BLOCK, 3 * d), np.float32)
    product = np.empty((BLOCK, d), np.float32)
    for seed in range(n_seeds):
        for start in range(0, n_rows, BLOCK):
            stop = min(start + BLOCK, n_rows)
            x, h, p = from_input[: stop - start], from_hidden[: stop - start], product[: stop - start]
            old, state = slot[seed][start:stop], out[seed][start:stop]
            normed, active = normed_out[seed][start:stop], active_out[seed][start:stop]
            gates, gated = gates_out[seed][start:stop], gated_out[seed][start:stop]
            _map(update[seed][start:stop], input_weight[seed], input_bias[seed], x)
            _map(old, hidden_weight[seed], hidden_bias[seed], h)
            _gru(x, h, old, gates, gated, new_out[seed][start:stop], state)
            _normalise(state, normed, scale_out[seed][start:stop])
            np.dot(normed, first_weight[seed].T, p)
            _gelu(p, first_bias[seed], active, slope_out[seed][start:stop])
            _map(active, second_weight[seed], second_bias[seed], p)
            _add(p, state)


@_compiled
def refine_backward(
    d_out: Array,
    update: Array,
    slot: Array,
    input_weight: Array,
    hidden_weight: Array,
    first_weight: Array,
    second_weight: Array,
    gates: Array,
    gated: Array,
    new: Array,
    normed: Array,
    scale: Array,
    active: Array,
    slope: Array,
    d_update_out: Array,
    d_slot_out: Array,
    d_input_weight_out: Array,
    d_input_bias_out: Array,
    d_hidden_weight_out: Array,
    d_hidden_bias_out: Array,
    d_first_weight_out: Array,
    d_first_bias_out: Array,
    d_second_weight_out: Array,
    d_second_bias_out: Array,
) -> None:
    """Gradients of `refine`."""
    n_seeds, n_rows, d = slot.shape
    for_input = np.empty((BLOCK, 3 * d), np.float32)
    for_hidden = np.empty((BLOCK, 3 * d), np.float32)
    for_state, product = np.empty((BLOCK, d), np.float32), np.empty((BLOCK, d), np.float32)
    input_product, hidden_product = np.empty_like(input_weight[0]), np.empty_like(hidden_weight[0])
    square = np.empty((d, d), np.float32)
    for seed in range(n_seeds):
        for start in range(0, n_rows, BLOCK):
            stop = min(start + BLOCK, n_rows)
            x, h = for_input[: stop - start], for_hidden[: stop - start]
            d_state, p = for_state[: stop - start], product[: stop - start]
            given, old, d_old = d_out[seed][start:stop], slot[seed][start:stop], d_slot_out[seed][start:stop]
            normal = normed[seed][start:stop]
            d_second = d_second_weight_out[seed], d_second_bias_out[seed]
            _sum_up(given, active[seed][start:stop], square, *d_second)
            np.dot(given, second_weight[seed], d_state)
            _multiply(d_state, slope[seed][start:stop], p)  # the gradient of the first map's outcome
            _sum_up(p, normal, square, d_first_weight_out[seed], d_first_bias_out[seed])
            np.dot(p, first_weight[seed], d_state)
            _normalise_backward(d_state, normal, scale[seed][start:stop], p)
            _add(given, p)
            gate, reads, news = gates[seed][start:stop], gated[seed][start:stop], new[seed][start:stop]
            _gru_backward(p, old, gate, reads, news, d_old, x, h)
            np.dot(x, input_weight[seed], d_update_out[seed][start:stop])
            d_input = d_input_weight_out[seed], d_input_bias_out[seed]
            _sum_up(x, update[seed][start:stop], input_product, *d_input)
            np.dot(h, hidden_weight[seed], p)
            _add(p, d_old)
            _sum_up(h, old, hidden_product, d_hidden_weight_out[seed], d_hidden_bias_out[seed])


@_compiled
def match(
    params: Array,
    truth: Array,
    logits: Array,
    counts: Array,
    n_ranks: int,
    slots_out: Array,
    matched_out: Array,
) -> None:
    """Slots [n, K] of sources: by falling logits [n, S], each slot takes the nearest source that is left.

    `params` [n, S, P] are compared with `truth` [n, K, P], of which the first `counts` [n] are there. At most
    `n_ranks` slots take part; `matched_out` [n, K], at first False, tells whether a source was taken.
    """
    n_samples, n_slots, n_params = params.shape
    is_left = np.empty(n_slots, np.bool_)
    for sample in range(n_samples):
        matched, is_left[:] = matched_out[sample], True
        for _ in range(min(counts[sample], n_ranks)):
            slot = -1
            for other in range(n_slots):
                if is_left[other] and (slot < 0 or logits[sample, other] > logits[sample, slot]):
                    slot = other
            is_left[slot] = False
            nearest, source = _ZERO, -1
            for other in range(counts[sample]):
                if not matched[other]:
                    distance = _ZERO
                    for i in range(n_params):
                        distance += (params[sample, slot, i] - truth[sample, other, i]) ** 2
                    if source < 0 or distance < nearest:
                        nearest, source = distance, other
            matched[source], slots_out[sample, source] = True, slot


@_compiled
def _gru(x: Array, h: Array, old: Array, gates: Array, gated: Array, new: Array, state: Array) -> None:
    """r, z = sigmoid(x + h) of two thirds; n = tanh(x + r h) of the last; state = n + z (old - n)."""
    n_rows, d = old.shape
    for row in range(n_rows):
        for i in range(2 * d):
            gates[row, i] = _sigmoid(x[row, i] + h[row, i])
        for i in range(d):
            gated[row, i] = h[row, 2 * d + i]
        for i in range(d):
            at = x[row, 2 * d + i] + gates[row, i] * gated[row, i]
            new[row, i] = _TWO * _sigmoid(_TWO * at) - _ONE  # tanh
        for i in range(d):
            state[row, i] = new[row, i] + gates[row, d + i] * (old[row, i] - new[row, i])


@_compiled
def _gru_backward(
    d_state: Array, old: Array, gates: Array, gated: Array, new: Array, d_old: Array, d_x: Array, d_h: Array
) -> None:
    n_rows, d = old.shape
    for row in range(n_rows):
        for i in range(d):
            d_old[row, i] = d_state[row, i] * gates[row, d + i]
        for i in range(d):
            slope = gates[row, d + i] * (_ONE - gates[row, d + i])
            d_x[row, d + i] = d_state[row, i] * (old[row, i] - new[row, i]) * slope
        for i in range(d):
            d_x[row, 2 * d + i] = (d_state[row, i] - d_old[row, i]) * (_ONE - new[row, i] * new[row, i])
        for i in range(d):
            slope = gates[row, i] * (_ONE - gates[row, i])
            d_x[row, i] = d_x[row, 2 * d + i] * gated[row, i] * slope
        for i in range(d):
            d_h[row, 2 * d + i] = d_x[row, 2 * d + i] * gates[row, i]
        for i in range(2 * d):
            d_h[row, i] = d_x[row, i]


@_compiled
def _gelu(x: Array, bias: Array, active: Array, slope: Array) -> None:
    n_rows, d = x.shape
    for row in range(n_rows):
        for i in range(d):
            at = x[row, i] + bias[i]
            bell = _exp(-_HALF * at * at)
            t = _ONE / (_ONE + _ERF_SCALE * abs(at))
            tail = ((((_ERF[0] * t + _ERF[1]) * t + _ERF[2]) * t + _ERF[3]) * t + _ERF[4]) * t * bell
            below = _HALF * tail if at < _ZERO else _ONE - _HALF * tail
            active[row, i] = at * below
            slope[row, i] = below + at * _DENSITY * bell


@_compiled
def _normalise(x: Array, normed: Array, scale: Array) -> None:
    """Fill `normed` [n, D] and the factors `scale` [n]."""
    n_rows, d = x.shape
    for row in range(n_rows):
        mean = _ZERO
        for i in range(d):
            mean += x[row, i]
        mean /= np.float32(d)
        square = _ZERO
        for i in range(d):
            square += (x[row, i] - mean) * (x[row, i] - mean)
        factor = _ONE / np.sqrt(square / np.float32(d) + NORM_EPS)
        for i in range(d):
            normed[row, i] = (x[row, i] - mean) * factor
        scale[row] = factor


@_compiled
def _normalise_backward(given: Array, normed: Array, scale: Array, d_x: Array) -> None:
    n_rows, d = normed.shape
    for row in range(n_rows):
        mean = _ZERO
        along = _ZERO
        for i in range(d):
            mean += given[row, i]
            along += given[row, i] * normed[row, i]
        mean /= np.float32(d)
        along /= np.float32(d)
        for i in range(d):
            d_x[row, i] = scale[row] * (given[row, i] - mean - normed[row, i] * along)


@_compiled
def _map(rows: Array, weight: Array, bias: Array, out: Array) -> None:
    np.dot(rows, weight.T, out)
    n_rows, n_out = out.shape
    for row in range(n_rows):
        for i in range(n_out):
            out[row, i] += bias[i]


@_compiled
def _sum_up(given: Array, rows: Array, product: Array, d_weight: Array, d_bias: Array) -> None:
    """Add the gradients of the parameters of `_map`; `product` is room for that of the weight."""
    np.dot(given.T, rows, product)
    _add(product, d_weight)
    n_rows, n_out = given.shape
    for row in range(n_rows):
        for i in range(n_out):
            d_bias[i] += given[row, i]


@_compiled
def _add(rows: Array, out: Array) -> None:
    n_rows, d = rows.shape
    for row in range(n_rows):
        for i in range(d):
            out[row, i] += rows[row, i]


@_compiled
def _multiply(a: Array, b: Array, out: Array) -> None:
    n_rows, d = a.shape
    for row in range(n_rows):
        for i in range(d):
            out[row, i] = a[row, i] * b[row, i]


@_compiled
def _ask(slot: Array, weight: Array, bias: Array, normed: Array, scale: Array, query: Array) -> None:
    """Queries [n, out] of one seed's slots [n, D], which are normalised first."""
    for start in range(0, len(slot), BLOCK):
        stop = min(start + BLOCK, len(slot))
        _normalise(slot[start:stop], normed[start:stop], scale[start:stop])
        _map(normed[start:stop], weight, bias, query[start:stop])


@_compiled
def _ask_backward(
    d_query: Array, weight: Array, normed: Array, scale: Array, d_slot: Array, d_weight: Array, d_bias: Array
) -> None:
    d_normed, product = np.empty((BLOCK, normed.shape[1]), np.float32), np.empty_like(weight)
    for start in range(0, len(normed), BLOCK):
        stop = min(start + BLOCK, len(normed))
        given, rows, d_rows = d_query[start:stop], normed[start:stop], d_normed[: stop - start]
        np.dot(given, weight, d_rows)
        _sum_up(given, rows, product, d_weight, d_bias)
        _normalise_backward(d_rows, rows, scale[start:stop], d_slot[start:stop])


@_compiled
def _attend(
    n_readers: int,
    query: Array,
    tokens: Array,
    scale: Array,
    bias: Array,
    score: Array,
    attn: Array,
    pooled: Array,
) -> None:
    """One seed of `look`."""
    n_tokens, d = tokens.shape[1:]
    total = np.empty(d, np.float32)
    for row in range(len(query)):
        sample = row // n_readers
        for token in range(n_tokens):
            product = _ZERO
            for i in range(d):
                product += query[row, i] * tokens[sample, token, i]
            score[row, token] = product
        largest = _LOWEST
        for token in range(n_tokens):
            attn[row, token] = score[row, token] * scale[sample, token] + bias[sample, token]
            largest = max(largest, attn[row, token])
        weight = _ZERO
        for token in range(n_tokens):
            attn[row, token] = _exp(attn[row, token] - largest)
            weight += attn[row, token]
        factor = _ONE / weight
        for token in range(n_tokens):
            attn[row, token] *= factor
        for i in range(d):
            total[i] = _ZERO
        for token in range(n_tokens):
            weight = attn[row, token] * scale[sample, token]
            for i in range(d):
                total[i] += weight * tokens[sample, token, i]
        for i in range(d):
            pooled[row, i] = total[i]


@_compiled
def _attend_backward(
    n_readers: int,
    d_attn: Array,
    d_pooled: Array,
    query: Array,
    tokens: Array,
    scale: Array,
    score: Array,
    attn: Array,
    d_query: Array,
    d_tokens: Array,
    d_scale: Array,
    d_bias: Array,
) -> None:
    """One seed of `look_backward`."""
    n_tokens, d = tokens.shape[1:]
    through, d_logits = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    total = np.empty(d, np.float32)
    for row in range(len(query)):
        sample = row // n_readers
        for token in range(n_tokens):
            product = _ZERO
            for i in range(d):
                product += d_pooled[row, i] * tokens[sample, token, i]
            through[token] = product
        mean = _ZERO
        for token in range(n_tokens):
            d_logits[token] = d_attn[row, token] + scale[sample, token] * through[token]
            mean += attn[row, token] * d_logits[token]
        for token in range(n_tokens):
            d_logits[token] = attn[row, token] * (d_logits[token] - mean)
            d_bias[sample, token] += d_logits[token]
        for token in range(n_tokens):
            d_scale[sample, token] += attn[row, token] * through[token] + d_logits[token] * score[row, token]
        for i in range(d):
            total[i] = _ZERO
        for token in range(n_tokens):
            of_score = scale[sample, token] * d_logits[token]
            of_pooled = scale[sample, token] * attn[row, token]
            for i in range(d):
                total[i] += of_score * tokens[sample, token, i]
            for i in range(d):
                d_tokens[sample, token, i] += of_score * query[row, i] + of_pooled * d_pooled[row, i]
        for i in range(d):
            d_query[row, i] = total[i]


@_compiled
def _compete(n_readers: int, query: Array, tokens: Array, floor: Array, attn: Array, pooled: Array) -> None:
    """One seed of `compete`."""
    n_samples, n_tokens, d = tokens.shape
    most, weight = np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    vectors = np.empty((n_readers, d), np.float32)  # the queries of a sample, then what they pool
    for sample in range(n_samples):
        start, stop = sample * n_readers, (sample + 1) * n_readers
        for slot in range(n_readers):
            for i in range(d):
                vectors[slot, i] = query[start + slot, i]
        np.dot(vectors, tokens[sample].T, attn[start:stop])
        most[:] = _LOWEST
        for row in range(start, stop):
            for token in range(n_tokens):
                attn[row, token] += query[row, d]
            for token in range(n_tokens):
                most[token] = max(most[token], attn[row, token])
        weight[:] = _ZERO
        for row in range(start, stop):
            for token in range(n_tokens):
                attn[row, token] = _exp(attn[row, token] - most[token])
            for token in range(n_tokens):
                weight[token] += attn[row, token]
        for token in range(n_tokens):
            weight[token] = _ONE / weight[token]
        for row in range(start, stop):
            for token in range(n_tokens):
                attn[row, token] *= weight[token]
        np.dot(attn[start:stop], tokens[sample], vectors)
        for slot in range(n_readers):
            share = _ZERO
            for token in range(n_tokens):
                share += attn[start + slot, token]
            factor = _ONE / max(share, floor)
            for i in range(d):
                pooled[start + slot, i] = vectors[slot, i] * factor
            pooled[start + slot, d] = share * factor


@_compiled
def _compete_backward(
    n_readers: int,
    d_attn: Array,
    d_pooled: Array,
    query: Array,
    tokens: Array,
    floor: Array,
    attn: Array,
    pooled: Array,
    d_query: Array,
    d_tokens: Array,
) -> None:
    """One seed of `compete_backward`."""
    n_samples, n_tokens, d = tokens.shape
    # Two ways lead to a token: it is scored, and it is pooled. Each has half of the rows.
    weights, vectors = (
        np.empty((2 * n_readers, n_tokens), np.float32),
        np.empty((2 * n_readers, d), np.float32),
    )
    d_score, d_sum = weights[:n_readers], vectors[n_readers:]
    of_rows, of_tokens = np.empty((n_readers, d), np.float32), np.empty((n_tokens, d), np.float32)
    mean, d_shares = np.empty(n_tokens, np.float32), np.empty(n_readers, np.float32)
    for sample in range(n_samples):
        start = sample * n_readers
        for slot in range(n_readers):
            row = start + slot
            share = _ZERO
            for token in range(n_tokens):
                share += attn[row, token]
            factor = _ONE / max(share, floor)
            for i in range(d):
                d_sum[slot, i] = d_pooled[row, i] * factor
            d_share = d_pooled[row, d] * factor
            if share > floor:
                along = _ZERO
                for i in range(d + 1):
                    along += d_pooled[row, i] * pooled[row, i]
                d_share -= along * factor
            d_shares[slot] = d_share
        np.dot(d_sum, tokens[sample].T, d_score)
        mean[:] = _ZERO
        for slot in range(n_readers):
            row = start + slot
            for token in range(n_tokens):
                d_score[slot, token] += d_attn[row, token] + d_shares[slot]
            for token in range(n_tokens):
                mean[token] += attn[row, token] * d_score[slot, token]
        for slot in range(n_readers):
            row = start + slot
            for token in range(n_tokens):
                d_score[slot, token] = attn[row, token] * (d_score[slot, token] - mean[token])
            offset = _ZERO
            for token in range(n_tokens):
                offset += d_score[slot, token]
            d_query[row, d] = offset
        np.dot(d_score, tokens[sample], of_rows)
        for slot in range(n_readers):
            row = start + slot
            for i in range(d):
                d_query[row, i] = of_rows[slot, i]
            for i in range(d):
                vectors[slot, i] = query[row, i]
            for token in range(n_tokens):
                weights[n_readers + slot, token] = attn[row, token]
        np.dot(weights.T, vectors, of_tokens)
        _add(of_tokens, d_tokens[sample])
