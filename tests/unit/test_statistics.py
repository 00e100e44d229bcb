"""Ratio statistics against plain loops, and invariant to order, splits, padding and ranks, bit for bit."""

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import megatron_calclip.algorithms.histograms as histograms
from megatron_calclip.algorithms.bootstrap import poisson_weights
from megatron_calclip.algorithms.statistics import MAX_SUM, Precision, Quantity, RatioStatistics, Side

UNIT = 2.0**-28
LOWER = tuple(milli / 1000 for milli in range(500, 901, 20))
UPPER = tuple(milli / 1000 for milli in range(1200, 2001, 20))
NAMES = (
    "ratio8",
    "ratio16",
    "advantages",
    "importance_weights",
    "loss_weights",
    "response_mask",
    "sequence_ids",
)
Tokens = dict[str, torch.Tensor]


def add(statistics: RatioStatistics, tokens: Tokens, index: torch.Tensor | slice = slice(None), **kwargs):
    part = {name: values[index] for name, values in tokens.items()}
    statistics.update(part.pop("ratio8"), part.pop("ratio16"), **part, **kwargs)
    return statistics


def state_of(tokens: Tokens, *, lower=LOWER, upper=UPPER, num_replicates: int = 3, **kwargs) -> torch.Tensor:
    return add(RatioStatistics(lower, upper, num_replicates=num_replicates, **kwargs), tokens).state()


def random_tokens(num_tokens: int, *, num_sequences: int = 7, seed: int = 0) -> Tokens:
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, num_tokens, generator=random)
    return {
        "ratio8": (0.4 * noise[0]).exp(),
        "ratio16": (0.1 * noise[1]).exp(),
        "advantages": torch.randn(num_tokens, generator=random).round(decimals=1),
        "importance_weights": torch.rand(num_tokens, generator=random) * 2,
        "loss_weights": torch.rand(num_tokens, generator=random),
        "response_mask": torch.rand(num_tokens, generator=random) < 0.8,
        "sequence_ids": torch.randint(0, num_sequences, (num_tokens,), generator=random).sort().values + 100,
    }


def test_by_hand():
    # Edges 0.8 for A < 0 and 1.2 for A > 0, cap 2, weights exact in binary.
    #   token    r8    r16     A    w   loss weight   w * |A| * lw   * min(r8, 2)   * min(r16, 2)
    #     0     0.75   0.875  -1    1       1              1           0.75            0.875
    #     1     4.00   0.750  -2    2      0.5             2           4.00            1.500
    #     2     1.50   1.000   1   0.5      1             0.5          0.75            0.500
    #     3     1.00   1.250   4    1     0.25             1           1.00            1.250
    #     4     A = 0, and 5 outside the mask: nowhere.
    nan = math.nan
    statistics = RatioStatistics([0.8], [1.2], ratio_cap=2.0, num_replicates=0)
    statistics.update(
        torch.tensor([0.75, 4.0, 1.5, 1.0, 0.1, nan]),
        torch.tensor([0.875, 0.75, 1.0, 1.25, 9.0, nan]),
        advantages=torch.tensor([-1.0, -2.0, 1.0, 4.0, 0.0, nan]),
        importance_weights=torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, nan]),
        loss_weights=torch.tensor([1.0, 0.5, 1.0, 0.25, 1.0, nan]),
        response_mask=torch.tensor([True, True, True, True, True, False]),
        sequence_ids=torch.tensor([0, 0, 1, 1, 2, 2]),
    )
    fp8, bf16, negative, positive = Precision.FP8, Precision.BF16, Side.NEGATIVE, Side.POSITIVE
    expected = {
        # (precision, side): below the edge and total, of count, weighted ratio, weight.
        (fp8, negative): ((1, 2), (0.75, 4.75), (1.0, 3.0)),
        (bf16, negative): ((1, 2), (1.5, 2.375), (2.0, 3.0)),
        (fp8, positive): ((1, 2), (1.0, 1.75), (1.0, 1.5)),
        (bf16, positive): ((1, 2), (0.5, 1.75), (0.5, 1.5)),
    }
    for (precision, side), values in expected.items():
        for quantity, (below, total) in zip(Quantity, values, strict=True):
            unit = 1 if quantity is Quantity.COUNT else UNIT
            assert statistics.below(quantity, precision=precision, side=side).item() * unit == below
            assert statistics.total(quantity, precision=precision, side=side).item() * unit == total
    assert statistics.num_moved == 3
    assert statistics.num_nonfinite == 0


# Ratios on the edges, next to them in float32, and far away; a third of the tokens share a few values.
EDGES32 = torch.tensor(LOWER + UPPER)
NEAR_EDGES = torch.cat(
    [EDGES32, torch.nextafter(EDGES32, torch.tensor(0.0)), torch.nextafter(EDGES32, torch.tensor(9.0))]
)
ratios = st.one_of(
    st.sampled_from(NEAR_EDGES.tolist()),
    st.sampled_from([0.0, 1.0, 75.0, 4.8e8]),
    st.floats(0.25, 2.5, width=32),
)
token = st.tuples(
    ratios,
    ratios,
    st.sampled_from([-2.0, -0.3, 0.0, 0.7, 1.5]),
    st.floats(0, 2, width=32),
    st.floats(0, 1, width=32),
    st.booleans(),
    st.integers(0, 3),
)


def tensors(rows: list[tuple]) -> Tokens:
    dtypes = [torch.float32] * 5 + [torch.bool, torch.int64]
    columns = zip(*rows, strict=True)
    return {name: torch.tensor(column, dtype=dtype) for name, column, dtype in zip(NAMES, columns, dtypes, strict=True)}


def float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]


OUTLIER = (4.8e8, 75.0, -2.0, 2.0, 1.0, True, 0)


@settings(max_examples=50)
@example([OUTLIER, (1.0, 4.8e8, 1.5, 2.0, 1.0, True, 1)], None, True, 37.0)
@example([OUTLIER], 2.0, True, 1.0)
@given(
    st.lists(token, min_size=1, max_size=25),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.sampled_from([1.0, 37.0]),
)
def test_equals_plain_loops(rows, cap, use_loss_weights, scale):
    num_replicates = 2
    statistics = RatioStatistics(
        LOWER,
        UPPER,
        ratio_cap=cap,
        use_loss_weights=use_loss_weights,
        weight_scale=scale,
        num_replicates=num_replicates,
    )
    add(statistics, tensors(rows))
    weights = poisson_weights(torch.arange(4), num_replicates=num_replicates).tolist()
    limit = 2**42  # 2^14 in units of 2^-28
    for precision in Precision:
        for side, edges in ((Side.NEGATIVE, LOWER), (Side.POSITIVE, UPPER)):
            for replicate in range(1 + num_replicates):
                expected = [[0] * len(edges) for _ in Quantity]
                totals = [0] * len(Quantity)
                for ratio8, ratio16, advantage, importance, loss, inside, sequence in rows:
                    sign = -1 if side is Side.NEGATIVE else 1
                    if not inside or advantage * sign <= 0:
                        continue
                    ratio = ratio8 if precision is Precision.FP8 else ratio16
                    weight = float32(float32(abs(advantage)) * importance)
                    weight = float32(weight * loss) if use_loss_weights else weight
                    weight = min(float32(weight * float32(scale * 2**28)), limit)
                    weighted = min(float32(min(ratio, cap or math.inf) * weight), limit)
                    times = weights[sequence][replicate - 1] if replicate else 1
                    for quantity, value in enumerate((1, int(weighted), int(weight))):
                        totals[quantity] += times * value
                        for index, edge in enumerate(edges):
                            edge = float32(edge)
                            below = ratio <= edge if side is Side.NEGATIVE else ratio < edge
                            expected[quantity][index] += times * value if below else 0
                for quantity in Quantity:
                    below = statistics.below(quantity, precision=precision, side=side)
                    assert below[replicate].tolist() == expected[quantity]
                    total = statistics.total(quantity, precision=precision, side=side)
                    assert total[replicate].item() == totals[quantity]


@settings(max_examples=25)
@given(st.integers(1, 200), st.integers(0, 10**6), st.data())
def test_order_splits_ranks_and_padding_do_not_matter(num_tokens, seed, data):
    tokens = random_tokens(num_tokens, seed=seed)
    expected = state_of(tokens)

    permutation = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(state_of({name: values[permutation] for name, values in tokens.items()}), expected)

    cuts = sorted(data.draw(st.lists(st.integers(0, num_tokens), max_size=4)))
    pieces = [slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, num_tokens], strict=True)]
    micro_batches = RatioStatistics(LOWER, UPPER, num_replicates=3)
    ranks = [RatioStatistics(LOWER, UPPER, num_replicates=3) for _ in pieces]
    for rank, piece in zip(ranks, pieces, strict=True):
        add(micro_batches, tokens, piece)
        add(rank, tokens, piece)
    assert torch.equal(micro_batches.state(), expected)
    # An all-reduce adds buffers up.
    assert torch.equal(torch.stack([rank.state() for rank in ranks]).sum(dim=0), expected)

    garbage = torch.tensor([math.nan, math.inf, -math.inf, -1.0, 1e38])
    padding = {name: garbage for name in NAMES[:5]}
    padding |= {"response_mask": torch.zeros(5, dtype=torch.bool), "sequence_ids": torch.zeros(5).long()}
    padded = {name: torch.cat([padding[name], values, padding[name]]) for name, values in tokens.items()}
    assert torch.equal(state_of(padded), expected)


@pytest.mark.parametrize("num_sequences", [20, 5_000])
def test_many_tokens_and_many_sequences(num_sequences):
    # More tokens, or more sequences, than a block: the result is that of a direct count.
    tokens = random_tokens(histograms.MAX_TOKENS + 1_000, num_sequences=num_sequences)
    statistics = add(RatioStatistics(LOWER, UPPER, num_replicates=2), tokens)
    ids = torch.arange(100, 100 + num_sequences)
    weights = torch.cat([torch.ones(num_sequences, 1), poisson_weights(ids, num_replicates=2)], dim=1).long()
    times = weights[tokens["sequence_ids"] - 100]
    negative = tokens["response_mask"] & (tokens["advantages"] < 0)
    for edge in (0, 7, 20):
        clipped = negative & (tokens["ratio8"] <= LOWER[edge])
        below = statistics.below(Quantity.COUNT, precision=Precision.FP8, side=Side.NEGATIVE)[:, edge]
        assert below.tolist() == times[clipped].sum(dim=0).tolist()
    weight = tokens["advantages"].abs() * tokens["importance_weights"] * tokens["loss_weights"]
    fixed = (weight * 2.0**28).long().unsqueeze(1) * times
    total = statistics.total(Quantity.WEIGHT, precision=Precision.BF16, side=Side.NEGATIVE)
    assert total.tolist() == fixed[negative].sum(dim=0).tolist()


@settings(max_examples=30)
@given(
    st.integers(1, 3_000),
    st.integers(1, 600),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.sampled_from([0, 2]),
    st.integers(0, 10**6),
)
def test_the_loop_is_the_operations(num_tokens, num_sequences, cap, use_loss_weights, num_replicates, seed):
    """CPU tensors go through a compiled loop, others through torch operations: the same integers, counters too."""
    tokens = random_tokens(num_tokens, num_sequences=num_sequences, seed=seed)
    some = torch.arange(0, num_tokens, 97)
    tokens["ratio8"][some] = NEAR_EDGES[some % len(NEAR_EDGES)]
    tokens["ratio16"][some] = torch.tensor([math.nan, 0.0, 1e38, math.inf])[some % 4]
    states = []
    for by_operations in (False, True):
        statistics = RatioStatistics(
            LOWER, UPPER, ratio_cap=cap, use_loss_weights=use_loss_weights, num_replicates=num_replicates
        )
        if by_operations:
            statistics._histograms._add_in_loop = statistics._histograms._add_by_operations
        states.append(add(statistics, tokens, weights_unmoved=True).state())
    assert torch.equal(*states)


def test_tokens_outside_the_mask_are_passed_over_in_any_number():
    num_tokens = histograms.MAX_TOKENS + 5
    tokens = {name: torch.ones(1).expand(num_tokens) for name in NAMES[:5]}
    tokens |= {
        "response_mask": torch.zeros(1, dtype=torch.bool).expand(num_tokens),
        "sequence_ids": torch.zeros(1, dtype=torch.int64).expand(num_tokens),
    }
    assert not bool(state_of(tokens).any())


def test_size_is_constant_in_the_number_of_tokens():
    statistics = RatioStatistics(LOWER, UPPER, num_replicates=100)
    # 5 counters; 101 rows of 3 quantities, 2 precisions and (21 + 1) + (41 + 1) bins.
    assert statistics.num_bytes == 8 * (5 + 101 * 3 * 2 * 64)
    add(statistics, random_tokens(70_000))
    assert statistics.state().numel() * 8 == statistics.num_bytes
    assert RatioStatistics(LOWER, UPPER, with_weights=False).num_bytes == 8 * (5 + 101 * 2 * 2 * 64)


def test_without_weights_the_rest_is_the_same():
    tokens = random_tokens(200)
    full = add(RatioStatistics(LOWER, UPPER, num_replicates=3), tokens)
    part = add(RatioStatistics(LOWER, UPPER, num_replicates=3, with_weights=False), tokens)
    for quantity in (Quantity.COUNT, Quantity.WEIGHTED_RATIO):
        for side in Side:
            expected = full.below(quantity, precision=Precision.FP8, side=side)
            assert torch.equal(part.below(quantity, precision=Precision.FP8, side=side), expected)
    with pytest.raises(AssertionError, match="left out"):
        part.total(Quantity.WEIGHT, precision=Precision.FP8, side=Side.NEGATIVE)


def test_without_replicates_the_plain_sums_are_the_same():
    tokens = random_tokens(70_000, num_sequences=600)  # more than one chunk
    plain = add(RatioStatistics(LOWER, UPPER, num_replicates=0), tokens)
    resampled = add(RatioStatistics(LOWER, UPPER, num_replicates=2), tokens)
    for quantity in Quantity:
        for precision in Precision:
            for side in Side:
                expected = resampled.below(quantity, precision=precision, side=side)[:1]
                assert torch.equal(plain.below(quantity, precision=precision, side=side), expected)


def test_edges_that_are_neighbours_in_float32():
    # A grid for sequence ratios: around 1 the edges are a few float32 steps apart.
    one = torch.tensor(1.0)
    below, above = torch.nextafter(one, torch.tensor(0.0)), torch.nextafter(one, torch.tensor(2.0))
    lower, upper = [0.999, below.item(), 1.0], [1.0, above.item(), 1.001]
    ratio = torch.stack([one, below, above, torch.tensor(0.999), torch.tensor(1.001)])
    tokens = {name: torch.ones(10) for name in NAMES[:5]}
    tokens["ratio8"] = tokens["ratio16"] = ratio.repeat(2)
    tokens["advantages"] = torch.tensor([-1.0] * 5 + [1.0] * 5)
    tokens |= {"response_mask": torch.ones(10, dtype=torch.bool), "sequence_ids": torch.zeros(10).long()}
    statistics = add(RatioStatistics(lower, upper, num_replicates=0), tokens)
    count = Quantity.COUNT
    # r <= 0.999, r <= 1 - ulp, r <= 1; then r < 1, r < 1 + ulp, r < 1.001.
    assert statistics.below(count, precision=Precision.FP8, side=Side.NEGATIVE).tolist() == [[1, 2, 3]]
    assert statistics.below(count, precision=Precision.FP8, side=Side.POSITIVE).tolist() == [[2, 3, 4]]


def test_values_saturate_instead_of_wrapping():
    tokens = random_tokens(3)
    tokens |= {"advantages": torch.tensor([-1e30, 1e30, 1.0]), "response_mask": torch.ones(3).bool()}
    statistics = add(RatioStatistics(LOWER, UPPER, num_replicates=0), tokens)
    total = statistics.total(Quantity.WEIGHT, precision=Precision.FP8, side=Side.NEGATIVE).item()
    assert total * UNIT == 2.0**14
    assert not statistics.is_saturated

    # 2^11 tokens at the largest value reach the largest sum of a bin, and so do more.
    for num_tokens, saturated in ((2**11 - 1, False), (2**11, True), (2**12, True)):
        huge = {name: torch.full((num_tokens,), 1e30) for name in NAMES[:5]}
        huge |= {
            "response_mask": torch.ones(num_tokens).bool(),
            "sequence_ids": torch.zeros(num_tokens).long(),
        }
        statistics = add(RatioStatistics(LOWER, UPPER, num_replicates=0), huge)
        total = statistics.total(Quantity.WEIGHT, precision=Precision.FP8, side=Side.POSITIVE).item()
        assert total == min(num_tokens * 2**42, MAX_SUM)
        assert statistics.is_saturated is saturated


def test_pooling_adds_and_saturates():
    tokens = random_tokens(50)
    statistics = add(RatioStatistics(LOWER, UPPER, num_replicates=3), tokens)
    pooled = RatioStatistics(LOWER, UPPER, num_replicates=3)
    pooled.load(statistics.state())
    pooled.add(statistics.state())
    assert torch.equal(pooled.state(), 2 * statistics.state())
    limit = torch.iinfo(torch.int64).max
    pooled.add(torch.full_like(statistics.state(), limit))
    assert bool((pooled.state() == limit).all())


@pytest.mark.parametrize("name", NAMES[:5])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nonfinite_response_tokens_are_counted_and_left_out(name, value):
    tokens = random_tokens(40)
    tokens["response_mask"][:] = True
    clean = {key: values[torch.arange(40) != 17] for key, values in tokens.items()}
    tokens[name][17] = value
    statistics = add(RatioStatistics(LOWER, UPPER, num_replicates=3), tokens)
    assert statistics.num_nonfinite == 1
    num_counters = 5
    assert torch.equal(statistics.state()[num_counters:], state_of(clean)[num_counters:])


def test_unmoved_ratios_and_weights():
    tokens = random_tokens(40)
    num_counted = int((tokens["response_mask"] & (tokens["advantages"] != 0)).sum())
    tokens["ratio8"][:] = 1.0
    statistics = add(RatioStatistics(LOWER, UPPER), tokens, weights_unmoved=True)
    assert statistics.num_moved == 0
    assert (statistics.num_unmoved_weights, statistics.num_unmoved_weights_off_one) == (num_counted, 0)

    counted = (tokens["response_mask"] & (tokens["advantages"] != 0)).nonzero()[:2].squeeze(1)
    tokens["ratio8"][counted] = torch.nextafter(torch.tensor(1.0), torch.tensor([0.0, 2.0]))
    add(statistics, tokens, weights_unmoved=True)
    add(statistics, tokens)
    assert statistics.num_moved == 4
    assert (statistics.num_unmoved_weights, statistics.num_unmoved_weights_off_one) == (2 * num_counted, 2)


def test_other_dtypes_and_strides():
    tokens = random_tokens(64)
    exact = {name: values.bfloat16() if name in NAMES[:5] else values for name, values in tokens.items()}
    widened = {name: values.double() if name in NAMES[:5] else values for name, values in exact.items()}
    strided = {name: torch.stack([values, values], dim=1)[:, 0] for name, values in exact.items()}
    assert torch.equal(state_of(exact), state_of(widened))
    assert torch.equal(state_of(exact), state_of(strided))
    assert torch.equal(state_of(tokens | {"ratio8": tokens["ratio8"].clone().requires_grad_()}), state_of(tokens))


def test_errors_name_the_problem():
    tokens = random_tokens(4)
    statistics = RatioStatistics(LOWER, UPPER, num_replicates=0)
    with pytest.raises(ValueError, match=r"1-D tensors of one length.*advantages.*\(3,\)"):
        add(statistics, tokens | {"advantages": torch.ones(3)})
    with pytest.raises(ValueError, match=r"response_mask is torch\.int64"):
        add(statistics, tokens | {"response_mask": torch.ones(4).long()})
    with pytest.raises(ValueError, match="same edges"):
        statistics.load(torch.zeros(3, dtype=torch.int64))
    for edges in ([0.8, 0.7], [0.5, 0.5 + 1e-9], [0.0, 0.5], [0.5, math.inf], []):
        with pytest.raises(ValueError, match="lower edges"):
            RatioStatistics(edges, UPPER)
