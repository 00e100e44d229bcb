"""Plans and packed layouts: every token once, budgets kept, attention over groups as over each sequence."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_calclip.learner.packing import (
    MAX_ATTENTION_PADDING,
    AttentionGroup,
    PackedLayout,
    pack,
    plan_step,
)

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=24)


def offsets_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def layouts(sequences: list[int], lengths: list[int], *, cp: int, align: int = 1, least: int = 1) -> list[PackedLayout]:
    """The layout of one micro-batch on every context-parallel rank."""
    offsets = offsets_of(lengths)
    return [
        pack(sequences, lengths, offsets, cp_size=cp, cp_rank=rank, align=align, min_tokens=least) for rank in range(cp)
    ]


# plan_step


def test_plan_by_hand() -> None:
    # Mini-batch 0: 6 5 4 3, 18 tokens, two ranks, budget 9: one micro-batch a rank. Longest first to the
    # lighter bin: 6 -> a, 5 -> b, 4 -> b (9), 3 -> a (9). Mini-batch 1: 1 1 1 1 likewise, 2 tokens each.
    plan = plan_step([6, 5, 4, 3, 1, 1, 1, 1], num_minibatches=2, dp_size=2, tokens_per_microbatch=9)
    assert plan.minibatches == ((((0, 3),), ((1, 2),)), (((4, 6),), ((5, 7),)))
    assert plan.minibatches[1][0] == ((4, 6),)
    assert plan.sequences(1) == [4, 5, 6, 7]


def test_long_sequence_alone() -> None:
    # 20 exceeds the budget of 10 and must not lift it for the others: 5 5 | 5 5 | 20.
    plan = plan_step([20, 5, 5, 5, 5], num_minibatches=1, dp_size=1, tokens_per_microbatch=10)
    assert sorted(map(len, plan.minibatches[0][0])) == [1, 2, 2]
    assert (0,) in plan.minibatches[0][0]


def test_ranks_get_equal_loads() -> None:
    # Four micro-batches of 8, 7, 6, 5 tokens: dealt back and forth, 8 + 5 and 7 + 6.
    plan = plan_step([8, 7, 6, 5], num_minibatches=1, dp_size=2, tokens_per_microbatch=8)
    assert plan.minibatches == ((((0,), (3,)), ((1,), (2,))),)


def test_more_ranks_than_sequences() -> None:
    plan = plan_step([3, 2], num_minibatches=1, dp_size=4, tokens_per_microbatch=100)
    assert [plan.minibatches[0][rank] for rank in range(4)] == [((0,),), ((1,),), ((),), ((),)]


def test_interleaving_gets_a_multiple() -> None:
    plan = plan_step([4] * 5, num_minibatches=1, dp_size=1, tokens_per_microbatch=4, microbatch_multiple=4)
    assert sorted(map(len, plan.minibatches[0][0])) == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("count", "num_minibatches"), [(5, 2), (3, 4), (0, 1)])
def test_sequences_that_do_not_split(count: int, num_minibatches: int) -> None:
    with pytest.raises(ValueError, match=f"{count} sequences do not split into {num_minibatches} mini-batches"):
        plan_step([1] * count, num_minibatches=num_minibatches, dp_size=1, tokens_per_microbatch=8)


@given(
    lengths=LENGTHS,
    num_minibatches=st.integers(1, 4),
    dp_size=st.integers(1, 5),
    budget=st.integers(1, 60),
    multiple=st.integers(1, 3),
)
def test_plan(lengths: list[int], num_minibatches: int, dp_size: int, budget: int, multiple: int) -> None:
    lengths = lengths * num_minibatches
    plan = plan_step(
        lengths,
        num_minibatches=num_minibatches,
        dp_size=dp_size,
        tokens_per_microbatch=budget,
        microbatch_multiple=multiple,
    )
    size = len(lengths) // num_minibatches
    for index in range(num_minibatches):
        ranks = [plan.minibatches[index][rank] for rank in range(dp_size)]
        planned = [i for micros in ranks for micro in micros for i in micro]
        assert sorted(planned) == list(range(index * size, (index + 1) * size)) == plan.sequences(index)
        assert {len(micros) for micros in ranks} == {len(ranks[0])}
        assert len(ranks[0]) % multiple == 0
        for micro in (micro for micros in ranks for micro in micros):
            assert len(micro) == 1 or sum(lengths[i] for i in micro) <= budget
        loads = [sum(lengths[i] for micro in micros for i in micro) for micros in ranks]
        assert max(loads) - min(loads) <= max(lengths)


def test_only_keeps_the_plan() -> None:
    # The plan of `test_plan_by_hand` without sequences 1, 2 and 7: empty micro-batches stay.
    plan = plan_step([6, 5, 4, 3, 1, 1, 1, 1], num_minibatches=2, dp_size=2, tokens_per_microbatch=9)
    keep = [True, False, False, True, True, True, True, False]
    assert plan.only(keep).minibatches == ((((0, 3),), ((),)), (((4, 6),), ((5,),)))


# pack


def test_layout_by_hand() -> None:
    # Sequences 0 (3 tokens, from 0) and 1 (5 tokens, from 3), longest first, then padding up to 10.
    (layout,) = layouts([0, 1], [3, 5], cp=1, align=5)
    assert layout.source.tolist() == [3, 4, 5, 6, 7, 0, 1, 2, -1, -1]
    assert layout.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert layout.cu_seqlens.tolist() == [0, 5, 8, 10] and layout.cu_seqlens.dtype is torch.int32
    assert layout.max_seqlen == 5


def test_zigzag_by_hand() -> None:
    # 6 tokens padded to 8 in chunks of 2: rank 0 holds chunks 0 and 3 (padding), rank 1 chunks 1 and 2.
    first, second = layouts([0], [6], cp=2)
    assert first.positions.tolist() == [0, 1, 6, 7] and first.source.tolist() == [0, 1, -1, -1]
    assert second.positions.tolist() == [2, 3, 4, 5] and second.source.tolist() == [2, 3, 4, 5]
    assert first.cu_seqlens.tolist() == [0, 8]


@pytest.mark.parametrize(("cp", "align", "least", "size"), [(1, 1, 1, 1), (1, 4, 1, 4), (2, 1, 1, 2), (2, 3, 7, 12)])
def test_micro_batch_without_sequences(cp: int, align: int, least: int, size: int) -> None:
    # (2, 3, 7): 7 local tokens, a multiple of 3 and, for two chunks a rank, of 2: 12.
    for layout in layouts([], [5], cp=cp, align=align, least=least):
        assert layout.source.tolist() == [-1] * size
        assert sum(group.batch * group.num_queries for group in layout.groups) == size


def test_groups_of_similar_length() -> None:
    # 8 + 8 + 7: 24 / 23 padded. With 4: 32 / 27 = 1.19, too much. 4 with 1: 8 / 5, too.
    (layout,) = layouts([0, 1, 2, 3, 4], [1, 8, 4, 7, 8], cp=1)
    assert [(group.batch, group.num_queries) for group in layout.groups] == [(3, 8), (1, 4), (1, 1)]


def test_slots_by_hand() -> None:
    # 6 + 5 tokens in one group of two times 6 slots, 12 / 11 padded; then 1 alone.
    (layout,) = layouts([0, 1, 2], [6, 5, 1], cp=1)
    assert [(group.batch, group.num_queries, group.num_keys) for group in layout.groups] == [(2, 6, 6), (1, 1, 1)]
    slots = layout.query_slots
    assert slots is not None and slots is layout.key_slots
    assert slots.token[[*range(11), 12]].tolist() == list(range(12))  # slot 11 is padding
    assert slots.slot.tolist() == [*range(11), 12]


def test_slots_under_context_parallelism_by_hand() -> None:
    # 4 tokens on each of two ranks: sequence 0 has 2 of them, sequence 1 too. Keys lie rank after rank, 0..3 and
    # 4..7; sequence 0's are 0 1 4 5 at positions 0 3 1 2, sequence 1's 2 3 6 7 at the same positions.
    first, second = layouts([0, 1], [4, 4], cp=2)
    assert first.query_slots is not None and first.key_slots is not None
    assert first.query_slots.token.tolist() == [0, 1, 2, 3]
    assert first.key_slots.token.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert first.key_slots.slot.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    (group,) = second.groups  # its queries are at positions 1 and 2
    assert group.mask is not None
    assert group.mask[0, 0].tolist() == [[True, False, True, False], [True, False, True, True]]


def test_equal_lengths_need_no_tables() -> None:
    (layout,) = layouts([0, 1], [4, 4], cp=1)
    assert layout.groups == (AttentionGroup(batch=2, num_queries=4, num_keys=4, mask=None),)
    assert layout.query_slots is None and layout.key_slots is None


MICRO_BATCHES = {
    "lengths": st.lists(st.integers(1, 20), max_size=8),
    "cp": st.sampled_from([1, 2, 4]),
    "align": st.sampled_from([1, 2, 3, 8]),
    "least": st.sampled_from([1, 30]),
}


def check_slots(layout: PackedLayout, size: int, cp: int) -> None:
    """Every token and every key has one slot of its own, and padding stays small."""
    num_queries = sum(group.batch * group.num_queries for group in layout.groups)
    num_keys = sum(group.batch * group.num_keys for group in layout.groups)
    if layout.query_slots is None:
        assert layout.key_slots is None and cp == 1 and num_queries == num_keys == size
        return
    for slots, num_tokens, num_slots in (
        (layout.query_slots, size, num_queries),
        (layout.key_slots, size * cp, num_keys),
    ):
        assert slots is not None
        assert slots.token.numel() == num_slots <= MAX_ATTENTION_PADDING * num_tokens
        assert torch.equal(slots.token[slots.slot], torch.arange(num_tokens))


@given(**MICRO_BATCHES)
def test_every_token_once(lengths: list[int], cp: int, align: int, least: int) -> None:
    lengths = [2, *lengths]  # sequence 0 is not part of the micro-batch
    ranks = layouts(list(range(1, len(lengths))), lengths, cp=cp, align=align, least=least)
    sources = torch.cat([layout.source for layout in ranks])
    assert sorted(sources[sources >= 0].tolist()) == list(range(2, sum(lengths)))
    position_of = [position for length in lengths for position in range(length)]
    for layout in ranks:
        size = layout.source.numel()
        assert size == ranks[0].source.numel() and size % align == 0 and size >= least
        assert [position_of[s] for s in layout.source.tolist() if s >= 0] == layout.positions[
            layout.source >= 0
        ].tolist()
        edges = layout.cu_seqlens.tolist()
        assert edges == ranks[0].cu_seqlens.tolist()
        assert edges[-1] == size * cp and layout.max_seqlen == max(b - a for a, b in itertools.pairwise(edges))
        assert cp == 1 or all(edge % (2 * cp) == 0 for edge in edges)
        check_slots(layout, size, cp)
    # Padding beyond a whole multiple would be waste.
    padded = sum(-(-length // (2 * cp)) * 2 * cp if cp > 1 else length for length in lengths[1:]) // cp
    assert ranks[0].source.numel() < max(padded, least) + 2 * align


def grouped_attention(layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of local queries [t, d] over gathered keys [cp * t, d], as the layout says, in plain torch."""
    if layout.query_slots is not None and layout.key_slots is not None:
        query = query[layout.query_slots.token]
        key, value = key[layout.key_slots.token], value[layout.key_slots.token]
    parts, first_query, first_key = [], 0, 0
    for group in layout.groups:
        num_queries, num_keys = group.batch * group.num_queries, group.batch * group.num_keys
        q = query[first_query : first_query + num_queries].unflatten(0, (group.batch, -1))
        k, v = (x[first_key : first_key + num_keys].unflatten(0, (group.batch, -1)) for x in (key, value))
        visible = torch.ones(q.size(1), k.size(1)).tril().bool() if group.mask is None else group.mask[:, 0]
        scores = (q @ k.transpose(1, 2)).masked_fill(~visible, -torch.inf)
        parts.append((scores.softmax(-1) @ v).flatten(0, 1))
        first_query, first_key = first_query + num_queries, first_key + num_keys
    assert first_query == len(query) and first_key == len(key)
    out = torch.cat(parts)
    return out if layout.query_slots is None else out[layout.query_slots.slot]


@given(**MICRO_BATCHES, seed=st.integers(0, 100))
@example(lengths=[11, 10, 10, 1], cp=1, align=1, least=1, seed=0)
@example(lengths=[7, 6, 6, 1], cp=2, align=3, least=30, seed=0)
@settings(max_examples=50)
def test_attention_over_groups_is_attention_of_each_sequence(
    lengths: list[int], cp: int, align: int, least: int, seed: int
) -> None:
    lengths = [2, *lengths]
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, sum(lengths), 8, generator=generator, dtype=torch.float64)
    expected = torch.cat(
        [
            F.scaled_dot_product_attention(a[None], b[None], c[None], is_causal=True, scale=1.0)[0]
            for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        ]
    )
    ranks = layouts(list(range(1, len(lengths))), lengths, cp=cp, align=align, least=least)

    def local(x: Tensor, layout: PackedLayout) -> Tensor:
        junk = torch.full((1, x.size(1)), 1e3, dtype=x.dtype)  # where padding, index -1, points to
        return torch.cat([x, junk])[layout.source]

    keys, values = (torch.cat([local(x, layout) for layout in ranks]) for x in (k, v))
    for layout in ranks:
        out = grouped_attention(layout, local(q, layout), keys, values)
        assert out.shape == (layout.source.numel(), 8)
        real = layout.source >= 0
        torch.testing.assert_close(out[real], expected[layout.source[real]])
        assert torch.isfinite(out).all()  # a row that sees nothing would be NaN, and so would its gradient


def test_padding_and_its_gradient() -> None:
    # Sequences of 6 and 5 tokens in one group of two times 6 slots.
    (layout,) = layouts([0, 1], [6, 5], cp=1)
    slots = layout.query_slots
    assert slots is not None
    x = torch.arange(22.0).view(11, 1, 2).requires_grad_()
    padded = slots.pad(x)
    assert padded.shape == (12, 1, 2) and torch.equal(padded[:11], x)
    weights = torch.arange(24.0).view(12, 1, 2)
    weights[11] = torch.nan  # of padding: dropped
    assert torch.equal(torch.autograd.grad((padded * weights).sum(), x)[0], weights[:11])
    rows = torch.arange(24.0).view(12, 2).requires_grad_()
    assert torch.equal(slots.unpad(rows), rows[:11])
    weights = torch.arange(1.0, 23.0).view(11, 2)
    (gradient,) = torch.autograd.grad((slots.unpad(rows) * weights).sum(), rows)
    assert torch.equal(gradient, torch.cat([weights, torch.zeros(1, 2)]))
