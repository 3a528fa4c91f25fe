"""Router kernels: scores, choice and weights of some tokens in registers, the logits read once in either direction.

T tokens, E experts, K chosen, G groups of S = E/G experts (one group where the choice is not limited to the best).
A tile's columns are the groups one after the other, each padded to a power of two; so they have gaps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TAKEN: tl.constexpr = tl.constexpr(-(2**63))


@triton.jit
def choice_keys(x, number):
    """int64 keys that order float32 x as the reference does: larger first (a NaN above all), of equal ones the lower
    number first; no two are equal. -inf counts as the smallest finite value."""
    x = tl.where(x < -3.4028234663852886e38, -3.4028234663852886e38, x)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    return (bits.to(tl.int64) << 32) - number.to(tl.int64)


@triton.jit
def expert_columns(E: tl.constexpr, G: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr):
    """The expert of each column of a tile, and whether there is one."""
    S: tl.constexpr = E // G
    column = tl.arange(0, BLOCK_G * BLOCK_S)
    group, place = column // BLOCK_S, column % BLOCK_S
    return group * S + place, (group < G) & (place < S)


@triton.jit
def scores_of(logits, exists, SIGMOID: tl.constexpr):
    """Softmax or sigmoid of a tile's rows; 0 where there is no expert."""
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        z = tl.where(exists, logits, float("-inf"))
        exponentials = tl.exp(z - tl.max(z, axis=1)[:, None])
        scores = exponentials / tl.sum(exponentials, axis=1)[:, None]
    return tl.where(exists, scores, 0.0)


@triton.jit
def within_groups(
    choice,
    column,
    exists,
    G: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """choice with the experts outside a token's best groups at -inf."""
    ROWS: tl.constexpr = choice.shape[0]
    keys = tl.where(exists, choice_keys(choice, column), _TAKEN)
    keys = tl.reshape(keys, (ROWS, BLOCK_G, BLOCK_S))
    values = tl.reshape(choice, (ROWS, BLOCK_G, BLOCK_S))
    best = tl.max(keys, axis=2)
    # A sum with one term: the best's value, whatever the others are.
    value = tl.sum(tl.where(keys == best[:, :, None], values, 0.0), axis=2)
    if TOP2_SUM:
        keys = tl.where(keys == best[:, :, None], _TAKEN, keys)
        second = tl.max(keys, axis=2)
        of_second = tl.sum(tl.where(keys == second[:, :, None], values, 0.0), axis=2)
        value += tl.where(second == _TAKEN, 0.0, of_second)
    groups = tl.arange(0, BLOCK_G)[None, :]
    keys = tl.where(groups < G, choice_keys(value, groups), _TAKEN)
    selected = tl.zeros([ROWS, BLOCK_G], tl.int32)
    for _ in tl.static_range(TOPK_GROUPS):
        hit = keys == tl.max(keys, axis=1)[:, None]
        selected += hit.to(tl.int32)
        keys = tl.where(hit, _TAKEN, keys)
    values = tl.where(selected[:, :, None] > 0, values, float("-inf"))
    return tl.reshape(values, (ROWS, BLOCK_G * BLOCK_S))


@triton.jit
def normalizer_of(chosen, slots, eps, K: tl.constexpr, NORMALIZE: tl.constexpr):
    """What a token's weights are divided by."""
    divisor = tl.full([chosen.shape[0]], 1.0, tl.float32)
    if NORMALIZE:
        divisor = tl.sum(tl.where(slots < K, chosen, 0.0), axis=1) + eps
    return divisor[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def router_topk_fwd_kernel(
    logits_ptr,
    bias_ptr,
    weight_ptr,
    index_ptr,
    num_tokens,
    eps,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    SIGMOID: tl.constexpr,
    AFTER: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, exists = expert_columns(E, G, BLOCK_G, BLOCK_S)
    inside = (tokens < num_tokens)[:, None] & exists[None, :]
    logits = tl.load(logits_ptr + tokens[:, None] * E + expert[None, :], mask=inside, other=0.0).to(tl.float32)
    expert, exists = expert[None, :], exists[None, :]
    scores = logits if AFTER else scores_of(logits, exists, SIGMOID)
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + expert, mask=exists, other=0.0).to(tl.float32)
    if TOPK_GROUPS > 0:
        choice = within_groups(choice, expert, exists, G, TOPK_GROUPS, TOP2_SUM, BLOCK_G, BLOCK_S)
    keys = tl.where(exists, choice_keys(choice, expert), _TAKEN)
    slots = tl.arange(0, BLOCK_K)[None, :]
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    indices = tl.zeros([BLOCK_T, BLOCK_K], tl.int64)
    for k in tl.static_range(K):
        hit = keys == tl.max(keys, axis=1)[:, None]
        chosen = tl.where(slots == k, tl.sum(tl.where(hit, scores, 0.0), axis=1)[:, None], chosen)
        indices = tl.where(slots == k, tl.sum(tl.where(hit, expert, 0), axis=1)[:, None], indices)
        keys = tl.where(hit, _TAKEN, keys)
    if AFTER:
        chosen = scores_of(chosen, slots < K, SIGMOID)
    weights = chosen / normalizer_of(chosen, slots, eps, K, NORMALIZE) * scaling
    inside = (tokens < num_tokens)[:, None] & (slots < K)
    tl.store(weight_ptr + tokens[:, None] * K + slots, weights, mask=inside)
    tl.store(index_ptr + tokens[:, None] * K + slots, indices, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def router_topk_bwd_kernel(
    grad_ptr,
    logits_ptr,
    index_ptr,
    d_logits_ptr,
    num_tokens,
    eps,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    AFTER: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, slots = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_K)[None, :]
    row_inside = tokens < num_tokens
    inside = row_inside[:, None] & (expert < E)
    logits = tl.load(logits_ptr + tokens[:, None] * E + expert, mask=inside, other=0.0).to(tl.float32)
    scores = logits if AFTER else scores_of(logits, expert < E, SIGMOID)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for k in tl.static_range(K):
        index = tl.load(index_ptr + tokens * K + k, mask=row_inside, other=-1)[:, None]
        chosen = tl.where(slots == k, tl.sum(tl.where(expert == index, scores, 0.0), axis=1)[:, None], chosen)
    if AFTER:
        chosen = scores_of(chosen, slots < K, SIGMOID)
    slot_inside = row_inside[:, None] & (slots < K)
    grad = tl.load(grad_ptr + tokens[:, None] * K + slots, mask=slot_inside, other=0.0) * scaling
    if NORMALIZE:
        # of chosen / (sum + eps)
        divisor = normalizer_of(chosen, slots, eps, K, NORMALIZE)
        products = tl.where(slots < K, grad * chosen, 0.0)
        grad = (grad - (tl.sum(products, axis=1)[:, None] / divisor)) / divisor
    grad = tl.where(slots < K, grad, 0.0)
    if AFTER:
        grad = score_gradient(grad, chosen, SIGMOID)
    d_logits = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for k in tl.static_range(K):
        index = tl.load(index_ptr + tokens * K + k, mask=row_inside, other=-1)[:, None]
        of_slot = tl.sum(tl.where(slots == k, grad, 0.0), axis=1)[:, None]
        d_logits = tl.where(expert == index, of_slot, d_logits)
    if not AFTER:
        d_logits = score_gradient(d_logits, scores, SIGMOID)
    tl.store(d_logits_ptr + tokens[:, None] * E + expert, d_logits.to(d_logits_ptr.dtype.element_ty), mask=inside)


@triton.jit
def score_gradient(grad, scores, SIGMOID: tl.constexpr):
    """The gradient in the logits of `scores_of`, from that in the scores."""
    if SIGMOID:
        return grad * scores * (1.0 - scores)
    return scores * (grad - tl.sum(grad * scores, axis=1)[:, None])


def _tokens_of_tile(columns: int) -> int:
    """Return how many tokens a program takes: few, since choosing is a chain of reductions that other programs hide."""
    return max(1, 512 // columns)


def router_topk_fwd(
    logits: Tensor,
    expert_bias: Tensor | None,
    topk: int,
    sigmoid: bool,
    after: bool,
    normalize: bool,
    eps: float,
    scaling: float,
    groups: int | None,
    topk_groups: int | None,
    top2_sum: bool,
) -> tuple[Tensor, Tensor]:
    """Return weights [T, K] float32 and experts [T, K] int64, as the reference's `router_topk`."""
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, topk, dtype=torch.float32)
    indices = logits.new_empty(tokens, topk, dtype=torch.int64)
    if tokens:
        count, best = 1, 0
        if groups is not None and topk_groups is not None:
            count, best = groups, topk_groups
        block_g, block_s = (triton.next_power_of_2(n) for n in (count, experts // count))
        block_t = _tokens_of_tile(block_g * block_s)
        router_topk_fwd_kernel[(triton.cdiv(tokens, block_t),)](
            logits.contiguous(),
            None if expert_bias is None else expert_bias.contiguous(),
            weights,
            indices,
            tokens,
            eps,
            scaling,
            E=experts,
            K=topk,
            G=count,
            TOPK_GROUPS=best,
            TOP2_SUM=top2_sum,
            SIGMOID=sigmoid,
            AFTER=after,
            NORMALIZE=normalize,
            BLOCK_T=block_t,
            BLOCK_G=block_g,
            BLOCK_S=block_s,
            BLOCK_K=triton.next_power_of_2(topk),
            num_warps=1 if block_g * block_s <= 128 else 4,
        )
    return weights, indices


def router_topk_bwd(
    grad: Tensor,
    logits: Tensor,
    indices: Tensor,
    sigmoid: bool,
    after: bool,
    normalize: bool,
    eps: float,
    scaling: float,
) -> Tensor:
    """Return the gradient in logits [T, E] of the weights that `router_topk_fwd` gave; grad, indices: [T, K]."""
    tokens, experts = logits.shape
    d_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if tokens:
        block_e = triton.next_power_of_2(experts)
        block_t = _tokens_of_tile(block_e)
        router_topk_bwd_kernel[(triton.cdiv(tokens, block_t),)](
            grad.contiguous(),
            logits.contiguous(),
            indices.contiguous(),
            d_logits,
            tokens,
            eps,
            scaling,
            E=experts,
            K=indices.shape[1],
            SIGMOID=sigmoid,
            AFTER=after,
            NORMALIZE=normalize,
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            BLOCK_K=triton.next_power_of_2(indices.shape[1]),
            num_warps=1 if block_e <= 128 else 4,
        )
    return d_logits
