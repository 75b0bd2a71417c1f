"""Compiled loops of a training step for R seeds, float32, on a CPU: products, and all that lies between them.

Kernel by kernel, a step spends half of its time carrying arrays through memory. Here a block of rows goes
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
BLOCK = 128  # rows whose arrays stay in the cache together
NORM_EPS = np.float32(1e-5)

_ZERO, _HALF, _ONE, _TWO = (np.float32(x) for x in (0, 0.5, 1, 2))
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
    for row in range(len(x)):
        scale_out[row] = _normalise(x[row], normed_out[row])


@_compiled
def norm_backward(d_normed: Array, normed: Array, scale: Array, d_x_out: Array) -> None:
    """Gradient of `norm`."""
    for row in range(len(normed)):
        _normalise_backward(d_normed[row], normed[row], scale[row], d_x_out[row])


@_compiled
def scaled_norm(x: Array, gain: Array, shift: Array, normed_out: Array, scale_out: Array, out: Array) -> None:
    """`norm` of x [R, n, D], times gain [R, D] plus shift [R, D]."""
    n_seeds, n_rows, d = x.shape
    for seed in range(n_seeds):
        for row in range(n_rows):
            normed, values = normed_out[seed, row], out[seed, row]
            scale_out[seed, row] = _normalise(x[seed, row], normed)
            for i in range(d):
                values[i] = normed[i] * gain[seed, i] + shift[seed, i]


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
    d_normed = np.empty(d, np.float32)
    for seed in range(n_seeds):
        for row in range(n_rows):
            given, unit = d_y[seed, row], normed[seed, row]
            for i in range(d):
                d_normed[i] = given[i] * gain[seed, i]
            for i in range(d):
                d_gain_out[seed, i] += given[i] * unit[i]
            for i in range(d):
                d_shift_out[seed, i] += given[i]
            _normalise_backward(d_normed, unit, scale[seed, row], d_x_out[seed, row])


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
        for sample in range(tokens.shape[1]):
            start, stop = sample * n_readers, (sample + 1) * n_readers
            _attend(
                query_out[seed, start:stop],
                tokens[seed, sample],
                scale[seed, sample],
                bias[seed, sample],
                score_out[seed, start:stop],
                attn_out[seed, start:stop],
                pooled_out[seed, start:stop],
            )


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
    n_samples = tokens.shape[1]
    n_readers = n_rows // n_samples
    d_query = np.empty((n_rows, d), np.float32)
    through, d_logits = np.empty(tokens.shape[2], np.float32), np.empty(tokens.shape[2], np.float32)
    for seed in range(n_seeds):
        for sample in range(n_samples):
            start, stop = sample * n_readers, (sample + 1) * n_readers
            _attend_backward(
                d_attn[seed, start:stop],
                d_pooled[seed, start:stop],
                query[seed, start:stop],
                tokens[seed, sample],
                scale[seed, sample],
                score[seed, start:stop],
                attn[seed, start:stop],
                d_query[start:stop],
                d_tokens_out[seed, sample],
                d_scale_out[seed, sample],
                d_bias_out[seed, sample],
                through,
                d_logits,
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
    product = np.empty((n_readers, tokens.shape[3]), np.float32)
    for seed in range(n_seeds):
        normed, query = normed_out[seed], query_out[seed]
        _ask(slot[seed], query_weight[seed], query_bias[seed], normed, norm_scale_out[seed], query)
        for sample in range(tokens.shape[1]):
            start, stop = sample * n_readers, (sample + 1) * n_readers
            attn = attn_out[seed, start:stop]
            pooled = pooled_out[seed, start:stop]
            _compete(query_out[seed, start:stop], tokens[seed, sample], floor, attn, pooled, product)


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
    n_samples = tokens.shape[1]
    n_readers = n_rows // n_samples
    d_query = np.empty((n_rows, d + 1), np.float32)
    left = np.empty((2 * n_readers, tokens.shape[2]), np.float32)
    right = np.empty((2 * n_readers, d), np.float32)
    product = np.empty((tokens.shape[2], d), np.float32)
    for seed in range(n_seeds):
        for sample in range(n_samples):
            start, stop = sample * n_readers, (sample + 1) * n_readers
            _compete_backward(
                d_attn[seed, start:stop],
                d_pooled[seed, start:stop],
                query[seed, start:stop],
                tokens[seed, sample],
                floor,
                attn[seed, start:stop],
                pooled[seed, start:stop],
                d_query[start:stop],
                d_tokens_out[seed, sample],
                left,
                right,
                product,
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
            for row in range(stop - start):
                scale_out[seed, start + row] = _normalise(state[row], normed[row])
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
            for row in range(stop - start):
                _normalise_backward(d_state[row], normal[row], scale[seed, start + row], p[row])
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
def _gru(x: Array, h: Array, old: Array, gates: Array, gated: Array, new: Array, state: Array) -> None:
    """r, z = sigmoid(x + h) of two thirds; n = tanh(x + r h) of the last; state = n + z (old - n)."""
    n_rows, d = old.shape
    for row in range(n_rows):
        x_row, h_row, old_row = x[row], h[row], old[row]
        gate, reads, news, states = gates[row], gated[row], new[row], state[row]
        for i in range(2 * d):
            gate[i] = _sigmoid(x_row[i] + h_row[i])
        for i in range(d):
            reads[i] = h_row[2 * d + i]
        for i in range(d):
            news[i] = _TWO * _sigmoid(_TWO * (x_row[2 * d + i] + gate[i] * reads[i])) - _ONE  # tanh
        for i in range(d):
            states[i] = news[i] + gate[d + i] * (old_row[i] - news[i])


@_compiled
def _gru_backward(
    d_state: Array, old: Array, gates: Array, gated: Array, new: Array, d_old: Array, d_x: Array, d_h: Array
) -> None:
    n_rows, d = old.shape
    for row in range(n_rows):
        given, old_row, gate, reads, news = d_state[row], old[row], gates[row], gated[row], new[row]
        d_old_row, x, h = d_old[row], d_x[row], d_h[row]
        for i in range(d):
            d_old_row[i] = given[i] * gate[d + i]
        for i in range(d):
            x[d + i] = given[i] * (old_row[i] - news[i]) * gate[d + i] * (_ONE - gate[d + i])
        for i in range(d):
            x[2 * d + i] = (given[i] - d_old_row[i]) * (_ONE - news[i] * news[i])
        for i in range(d):
            x[i] = x[2 * d + i] * reads[i] * gate[i] * (_ONE - gate[i])
        for i in range(d):
            h[2 * d + i] = x[2 * d + i] * gate[i]
        for i in range(2 * d):
            h[i] = x[i]


@_compiled
def _gelu(x: Array, bias: Array, active: Array, slope: Array) -> None:
    for row in range(len(x)):
        values, actives, slopes = x[row], active[row], slope[row]
        for i in range(len(values)):
            at = values[i] + bias[i]
            bell = _exp(-_HALF * at * at)
            t = _ONE / (_ONE + _ERF_SCALE * abs(at))
            tail = ((((_ERF[0] * t + _ERF[1]) * t + _ERF[2]) * t + _ERF[3]) * t + _ERF[4]) * t * bell
            below = _HALF * tail if at < _ZERO else _ONE - _HALF * tail
            actives[i] = at * below
            slopes[i] = below + at * _DENSITY * bell


@_compiled
def _normalise(values: Array, normed: Array) -> Array:
    """Fill `normed` and return the factor."""
    mean = _ZERO
    for i in range(len(values)):
        mean += values[i]
    mean /= np.float32(len(values))
    square = _ZERO
    for i in range(len(values)):
        square += (values[i] - mean) * (values[i] - mean)
    scale = _ONE / np.sqrt(square / np.float32(len(values)) + NORM_EPS)
    for i in range(len(values)):
        normed[i] = (values[i] - mean) * scale
    return scale


@_compiled
def _normalise_backward(given: Array, normed: Array, scale: Array, d_x: Array) -> None:
    mean = _ZERO
    along = _ZERO
    for i in range(len(normed)):
        mean += given[i]
        along += given[i] * normed[i]
    mean /= np.float32(len(normed))
    along /= np.float32(len(normed))
    for i in range(len(normed)):
        d_x[i] = scale * (given[i] - mean - normed[i] * along)


@_compiled
def _map(rows: Array, weight: Array, bias: Array, out: Array) -> None:
    np.dot(rows, weight.T, out)
    for row in range(len(out)):
        values = out[row]
        for i in range(len(values)):
            values[i] += bias[i]


@_compiled
def _sum_up(given: Array, rows: Array, product: Array, d_weight: Array, d_bias: Array) -> None:
    """Add the gradients of the parameters of `_map`; `product` is room for that of the weight."""
    np.dot(given.T, rows, product)
    _add(product, d_weight)
    for row in range(len(given)):
        values = given[row]
        for i in range(len(values)):
            d_bias[i] += values[i]


@_compiled
def _add(rows: Array, out: Array) -> None:
    for row in range(len(rows)):
        values, sums = rows[row], out[row]
        for i in range(len(values)):
            sums[i] += values[i]


@_compiled
def _multiply(a: Array, b: Array, out: Array) -> None:
    for row in range(len(a)):
        a_row, b_row, products = a[row], b[row], out[row]
        for i in range(len(a_row)):
            products[i] = a_row[i] * b_row[i]


@_compiled
def _ask(slot: Array, weight: Array, bias: Array, normed: Array, scale: Array, query: Array) -> None:
    """Queries [n, out] of one seed's slots [n, D], which are normalised first."""
    for start in range(0, len(slot), BLOCK):
        rows, queries = normed[start : start + BLOCK], query[start : start + BLOCK]
        for row in range(len(rows)):
            scale[start + row] = _normalise(slot[start + row], rows[row])
        _map(rows, weight, bias, queries)


@_compiled
def _ask_backward(
    d_query: Array, weight: Array, normed: Array, scale: Array, d_slot: Array, d_weight: Array, d_bias: Array
) -> None:
    d_normed, product = np.empty((BLOCK, normed.shape[1]), np.float32), np.empty_like(weight)
    for start in range(0, len(normed), BLOCK):
        given, rows = d_query[start : start + BLOCK], normed[start : start + BLOCK]
        d_rows = d_normed[: len(rows)]
        np.dot(given, weight, d_rows)
        _sum_up(given, rows, product, d_weight, d_bias)
        for row in range(len(rows)):
            _normalise_backward(d_rows[row], rows[row], scale[start + row], d_slot[start + row])


@_compiled
def _attend(
    query: Array, tokens: Array, scale: Array, bias: Array, score: Array, attn: Array, pooled: Array
) -> None:
    """One sample of `look`."""
    (n_readers, d), n_tokens = query.shape, len(tokens)
    for row in range(n_readers):
        for token in range(n_tokens):
            total = _ZERO
            for i in range(d):
                total += query[row, i] * tokens[token, i]
            score[row, token] = total
        largest = np.float32(-np.inf)
        for token in range(n_tokens):
            attn[row, token] = score[row, token] * scale[token] + bias[token]
            largest = max(largest, attn[row, token])
        total = _ZERO
        for token in range(n_tokens):
            attn[row, token] = _exp(attn[row, token] - largest)
            total += attn[row, token]
        factor = _ONE / total
        for token in range(n_tokens):
            attn[row, token] *= factor
        for i in range(d):
            pooled[row, i] = _ZERO
        for token in range(n_tokens):
            weight = attn[row, token] * scale[token]
            for i in range(d):
                pooled[row, i] += weight * tokens[token, i]


@_compiled
def _attend_backward(
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
    through: Array,
    d_logits: Array,
) -> None:
    """One sample of `look_backward`; `through` and `d_logits` [L] are room to work in."""
    (n_readers, d), n_tokens = query.shape, len(tokens)
    for row in range(n_readers):
        for token in range(n_tokens):
            total = _ZERO
            for i in range(d):
                total += d_pooled[row, i] * tokens[token, i]
            through[token] = total
        mean = _ZERO
        for token in range(n_tokens):
            d_logits[token] = d_attn[row, token] + scale[token] * through[token]
            mean += attn[row, token] * d_logits[token]
        for token in range(n_tokens):
            d_logits[token] = attn[row, token] * (d_logits[token] - mean)
            d_bias[token] += d_logits[token]
        for token in range(n_tokens):
            d_scale[token] += attn[row, token] * through[token] + d_logits[token] * score[row, token]
        for i in range(d):
            d_query[row, i] = _ZERO
        for token in range(n_tokens):
            of_score, of_pooled = scale[token] * d_logits[token], scale[token] * attn[row, token]
            for i in range(d):
                d_query[row, i] += of_score * tokens[token, i]
            for i in range(d):
                d_tokens[token, i] += of_score * query[row, i] + of_pooled * d_pooled[row, i]


@_compiled
def _compete(query: Array, tokens: Array, floor: Array, attn: Array, pooled: Array, product: Array) -> None:
    """One sample of `compete`; `product` [N, D] is room to work in."""
    n_readers = len(query)
    n_tokens, d = tokens.shape
    for row in range(n_readers):
        for token in range(n_tokens):
            total = query[row, d]
            for i in range(d):
                total += query[row, i] * tokens[token, i]
            attn[row, token] = total
    for token in range(n_tokens):
        largest = attn[0, token]
        for row in range(1, n_readers):
            largest = max(largest, attn[row, token])
        total = _ZERO
        for row in range(n_readers):
            attn[row, token] = _exp(attn[row, token] - largest)
            total += attn[row, token]
        for row in range(n_readers):
            attn[row, token] /= total
    np.dot(attn, tokens, product)
    for row in range(n_readers):
        total = _ZERO
        for token in range(n_tokens):
            total += attn[row, token]
        floored = max(total, floor)
        for i in range(d):
            pooled[row, i] = product[row, i] / floored
        pooled[row, d] = total / floored


@_compiled
def _compete_backward(
    d_attn: Array,
    d_pooled: Array,
    query: Array,
    tokens: Array,
    floor: Array,
    attn: Array,
    pooled: Array,
    d_query: Array,
    d_tokens: Array,
    left: Array,
    right: Array,
    product: Array,
) -> None:
    """One sample of `compete_backward`; `left` [2 N, L], `right` [2 N, D], `product` [L, D] are working room.

    The gradient of the tokens is attention times that of the sums, plus that of the scores times the queries.
    """
    n_readers = len(query)
    n_tokens, d = tokens.shape
    d_sum, d_score = right[:n_readers], left[n_readers:]
    for row in range(n_readers):
        total = _ZERO
        for token in range(n_tokens):
            total += attn[row, token]
            left[row, token] = attn[row, token]
        floored = max(total, floor)
        for i in range(d):
            d_sum[row, i] = d_pooled[row, i] / floored
            right[n_readers + row, i] = query[row, i]
        d_total = d_pooled[row, d] / floored
        if total > floor:
            along = _ZERO
            for i in range(d + 1):
                along += d_pooled[row, i] * pooled[row, i]
            d_total -= along / floored
        for token in range(n_tokens):
            given = d_attn[row, token] + d_total
            for i in range(d):
                given += d_sum[row, i] * tokens[token, i]
            d_score[row, token] = given
    for token in range(n_tokens):
        mean = _ZERO
        for row in range(n_readers):
            mean += attn[row, token] * d_score[row, token]
        for row in range(n_readers):
            d_score[row, token] = attn[row, token] * (d_score[row, token] - mean)
    np.dot(left.T, right, product)
    _add(product, d_tokens)
    np.dot(d_score, tokens, d_sum)
    for row in range(n_readers):
        d_query[row, d] = _ZERO
        for token in range(n_tokens):
            d_query[row, d] += d_score[row, token]
        for i in range(d):
            d_query[row, i] = d_sum[row, i]
