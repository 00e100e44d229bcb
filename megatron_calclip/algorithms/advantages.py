"""Group-relative advantages, dynamic sampling and overlong shaping.

What: from one scalar reward per sampled answer to one advantage per answer. A *group* is the set of answers
to the same prompt. Left out on purpose: a value network (the methods of this project have none), and the
refilling of dropped groups, which is the rollout's business.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

AdvantageKind = Literal["group_norm", "mean_only", "leave_one_out"]


def group_advantages(rewards: Tensor, groups: Tensor, *, kind: AdvantageKind, epsilon: float = 1e-6) -> Tensor:
    """Advantage of each answer relative to its group.

    - `group_norm`: (r - mean) / (std + epsilon). GRPO (arXiv 2402.03300, section 4.1.2). The std is the
      SAMPLE standard deviation (divisor n - 1), as `torch.std` computes it in TRL and verl.
    - `mean_only`: r - mean. Dr. GRPO (arXiv 2503.20783, section 3.2): without the division, easy and hard
      prompts are not up-weighted.
    - `leave_one_out`: r minus the mean of the others = n / (n - 1) * (r - mean). RLOO (arXiv 2402.14740).

    A group of equal rewards gets exactly 0 for every kind.

    Args:
        rewards: [N], finite.
        groups: int64 [N], any labels; equal labels form a group, in any order.
        kind: see above.
        epsilon: added to the std, in units of reward.

    Returns:
        float32 [N].

    Raises:
        ValueError: for an unknown kind, a reward that is not finite, or, unless `mean_only`, a group of one.
    """
    if kind not in get_args(AdvantageKind):
        raise ValueError(f"advantage kind {kind!r} is unknown; choose from {get_args(AdvantageKind)}")
    if not torch.isfinite(rewards).all():
        raise ValueError("a reward is NaN or infinite; let the reward function return a finite value")
    labels, index, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    if kind != "mean_only" and bool((sizes < 2).any()):
        label = int(labels[sizes < 2][0])
        raise ValueError(
            f"group {label} has one answer, and {kind!r} needs two; sample at least 2 answers per prompt, "
            "or use 'mean_only'"
        )
    rewards = rewards.double()
    size = sizes[index].double()
    centred = rewards - _group_sum(rewards, index, len(labels)) / size
    # Rounding of the mean must not become an advantage once it is divided by epsilon.
    centred = torch.where(degenerate_groups(rewards, groups), 0.0, centred)
    if kind == "mean_only":
        return centred.float()
    if kind == "leave_one_out":
        return (centred * size / (size - 1)).float()
    std = (_group_sum(centred.square(), index, len(labels)) / (size - 1)).sqrt()
    return (centred / (std + epsilon)).float()


def degenerate_groups(rewards: Tensor, groups: Tensor) -> Tensor:
    """Answers whose whole group has the same reward, and so no gradient.

    DAPO's dynamic sampling (arXiv 2503.14476, section 3.2) drops them and samples other prompts.

    Args:
        rewards: [N].
        groups: int64 [N].

    Returns:
        bool [N], the same for all members of a group. A group of one is degenerate.
    """
    labels, index = torch.unique(groups, return_inverse=True)
    lowest = rewards.new_zeros(len(labels)).scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = rewards.new_zeros(len(labels)).scatter_reduce(0, index, rewards, "amax", include_self=False)
    return (lowest == highest)[index]


def overlong_penalty(response_lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """Soft length penalty, to be added to the reward (DAPO, arXiv 2503.14476, eq. 13).

    0 up to max_length - buffer, then falling linearly to -1 at max_length, -1 beyond.

    Args:
        response_lengths: [N] tokens.
        max_length: L_max in tokens.
        buffer: L_cache in tokens, 1..max_length: the interval in which the penalty grows.

    Returns:
        float32 [N] in [-1, 0].

    Raises:
        ValueError: if buffer is not within 1..max_length.
    """
    if not 1 <= buffer <= max_length:
        raise ValueError(f"overlong buffer {buffer} is outside 1..max_length={max_length}; choose it inside")
    return ((max_length - buffer - response_lengths).float() / buffer).clamp(-1.0, 0.0)


def _group_sum(values: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """Sum over the group of each member, [N] -> [N]."""
    return values.new_zeros(num_groups).index_add(0, index, values)[index]
