"""The teaching example: the package's numbers on the same tokens, and a run from end to end."""

import importlib.util
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from megatron_calclip.algorithms.advantages import group_advantages
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.batch import ScoredTokens, TrainingBatch, Trajectories
from megatron_calclip.config import AlgorithmConfig, OptimizerConfig
from megatron_calclip.objective import policy_objective, policy_tokens

PATH = Path(__file__).parents[2] / "examples" / "teaching_loop.py"
PROMPT_LENGTH = 6
NUM_SAMPLES = 4
NUM_MINIBATCHES = 3
# (prompt, answers): an end at every position, none at all, tokens behind it; the last group is all wrong.
GROUPS = [
    ("37+48=", ["85$$", "85$9", "84$$", "9$12"]),
    ("10+11=", ["21$$", "22$+", "2121", "$111"]),
    ("99+99=", ["198$", "198$", "189$", "19$$"]),
    ("50+50=", ["100$", "10$$", "1000", "100$"]),
    ("12+34=", ["46$$", "46$$", "46$$", "45$="]),
    ("60+17=", ["78$$", "7$$$", "$$$$", "7777"]),
]
REWARDS = [1, 1, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]
LENGTHS = [3, 3, 3, 2, 3, 3, 4, 1, 4, 4, 4, 3, 4, 3, 4, 4, 3, 3, 3, 3, 3, 2, 1, 4]


def load() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("teaching_loop", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["teaching_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


example = load()


@pytest.fixture(autouse=True)
def _own_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@dataclass
class Case:
    """One step, padded as the example has it and flat as the package has it."""

    log_probs: Tensor
    """[B, R], a leaf."""
    batch: Any
    """The example's `Batch`."""
    training_batch: TrainingBatch
    keep: Tensor
    """bool [B, 6 + R]: what of the padded layout is in the flat one."""

    def flat(self, values: Tensor) -> Tensor:
        """[B, R] -> [T], 0 at the prompt."""
        return F.pad(values, (PROMPT_LENGTH, 0))[self.keep]


def make_case(policy: torch.nn.Module) -> Case:
    """Noisy log-probabilities of `GROUPS` under three policies."""
    tokens = example.encode([prompt + answer for prompt, answers in GROUPS for answer in answers])
    mask = example.response_mask(tokens)
    solutions = [f"{int(p[:2]) + int(p[3:5])}$" for p, answers in GROUPS for _ in answers]
    rewards = example.rewards_of(tokens, solutions)
    advantages = example.group_advantages(rewards.view(-1, NUM_SAMPLES)).view(-1, 1)
    log_probs = example.response_log_probs(policy, tokens).detach()
    old = log_probs + 0.4 * torch.randn_like(log_probs)
    mu = old + 0.6 * torch.randn_like(old)

    keep = F.pad(mask, (PROMPT_LENGTH, 0), value=1.0).bool()
    groups = torch.arange(len(GROUPS)).repeat_interleave(NUM_SAMPLES)
    response_mask = F.pad(mask, (PROMPT_LENGTH, 0))[keep].bool()
    trajectories = Trajectories(
        tokens=tokens[keep],
        lengths=keep.sum(1),
        response_mask=response_mask,
        sampler_log_probs=F.pad(mu, (PROMPT_LENGTH, 0))[keep],
        groups=groups,
        sample_ids=torch.arange(len(groups)),
        policy_versions=torch.zeros_like(groups),
        finished=(tokens[:, PROMPT_LENGTH:] == example.END).any(1),
    )
    per_sequence = group_advantages(rewards, groups, kind="group_norm")
    per_token = per_sequence[trajectories.sequence_ids] * response_mask
    return Case(
        log_probs=log_probs.requires_grad_(),
        batch=example.Batch(tokens, mask, advantages, mu, old),
        training_batch=TrainingBatch(
            trajectories, rewards, per_token, old_log_probs=F.pad(old, (PROMPT_LENGTH, 0))[keep]
        ),
        keep=keep,
    )


@pytest.fixture
def policy() -> torch.nn.Module:
    return example.Decoder(example.Settings(num_layers=1, width=16, num_heads=2))


@pytest.fixture
def case(policy: torch.nn.Module) -> Case:
    return make_case(policy)


def test_it_is_short_and_self_contained() -> None:
    source = PATH.read_text()
    assert len(source.splitlines()) < 300
    assert "import megatron" not in source and "from megatron" not in source


def test_masks_and_rewards_by_hand(case: Case) -> None:
    assert case.batch.mask.sum(1).tolist() == LENGTHS
    assert case.training_batch.rewards.tolist() == REWARDS
    assert case.training_batch.trajectories.response_lengths.tolist() == LENGTHS


def test_settings_are_those_of_the_main_job() -> None:
    algorithm, optimizer = AlgorithmConfig(), OptimizerConfig()
    assert example.Settings.bounds == (algorithm.clip.lower, algorithm.clip.upper)
    assert example.Settings.importance_cap == algorithm.importance.cap
    assert example.Settings.num_minibatches == algorithm.num_minibatches
    assert algorithm.loss == "clip" and algorithm.importance.level == "token"
    assert algorithm.aggregation == "sequence_mean" and algorithm.advantage.kind == "group_norm"
    assert example.make_optimizer.keywords == {
        "betas": (optimizer.beta1, optimizer.beta2),
        "weight_decay": optimizer.weight_decay,
    }


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=12, max_size=12))
def test_advantages_equal_the_packages(values: list[float]) -> None:
    rewards = torch.tensor(values)
    groups = torch.arange(3).repeat_interleave(4)
    expected = group_advantages(rewards, groups, kind="group_norm")
    actual = example.group_advantages(rewards.view(3, 4)).flatten()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_advantages_by_hand() -> None:
    # mean .5, sample std sqrt(4 * .25 / 3) = .57735: +-.5 / .57735 = +-.86603.
    advantages = example.group_advantages(torch.tensor([[1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]]))
    expected = torch.tensor([[0.86603, -0.86603, 0.86603, -0.86603], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-5)


def test_log_probs_are_those_of_each_sequence_alone(case: Case, policy: torch.nn.Module) -> None:
    trajectories = case.training_batch.trajectories
    for i, tokens in enumerate(trajectories.tokens.split(trajectories.lengths.tolist())):
        log_probs = policy(tokens[None, :-1])[0].log_softmax(-1)
        alone = log_probs.gather(1, tokens[1:, None])[PROMPT_LENGTH - 1 :, 0]
        torch.testing.assert_close(case.log_probs[i, : LENGTHS[i]], alone, rtol=1e-5, atol=1e-6)


def test_loss_and_gradient_equal_the_packages(case: Case) -> None:
    algorithm = AlgorithmConfig()
    num_sequences = len(REWARDS)
    size = num_sequences // NUM_MINIBATCHES
    minibatches = [list(range(start, start + size)) for start in range(0, num_sequences, size)]
    step = policy_tokens(case.training_batch, minibatches, algorithm, example.MAX_ANSWER)
    objective = policy_objective(step, ClipBounds(*example.Settings.bounds), algorithm)
    trajectories = case.training_batch.trajectories

    for rows in minibatches:
        minibatch = example.Batch(*(field[rows] for field in case.batch))
        loss, ratio = example.policy_loss(
            case.log_probs[rows],
            minibatch,
            example.Settings.bounds,
            importance_cap=example.Settings.importance_cap,
        )
        (gradient,) = torch.autograd.grad(loss, case.log_probs)

        chosen = trajectories.response_mask & torch.isin(trajectories.sequence_ids, torch.tensor(rows))
        index = chosen.nonzero()[:, 0]
        scored = ScoredTokens(index=index, log_probs=case.flat(case.log_probs)[index], entropy=torch.zeros(len(index)))
        expected_loss, _ = objective(scored)
        (expected_gradient,) = torch.autograd.grad(expected_loss, case.log_probs)
        torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-6)

        # The comparison means something only where all cases occur: both signs of the advantage with ratios
        # below, inside and above the bounds, and importance weights on both sides of the cap.
        lower, upper = example.Settings.bounds
        kept = minibatch.mask.bool()
        for sign in (-1, 1):
            of_sign = kept & (sign * minibatch.advantages > 0)
            for side in (ratio <= lower, (ratio > lower) & (ratio < upper), ratio >= upper):
                assert (of_sign & side).any()
        clipped = kept & (minibatch.advantages < 0) & (ratio <= lower)
        clipped |= kept & (minibatch.advantages > 0) & (ratio >= upper)
        assert (gradient[rows][clipped] == 0).all()
        assert (gradient[rows][kept & ~clipped & (minibatch.advantages != 0)] != 0).all()
        weight = (minibatch.old_log_probs - minibatch.sampler_log_probs).exp()[kept]
        assert (weight > example.Settings.importance_cap).any() and (weight < 1).any()


def test_a_short_run_from_end_to_end(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    short = example.Settings(
        num_layers=1, width=16, num_warm_steps=5, warm_batch_size=8, num_steps=3, num_prompts=8, num_eval=16
    )
    policy_loss, ratios = example.policy_loss, []

    def recording_loss(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        loss, ratio = policy_loss(*args, **kwargs)
        ratios.append(ratio)
        return loss, ratio

    monkeypatch.setattr(example, "policy_loss", recording_loss)
    # An untrained policy is hardly ever right; reward odd first digits, so that there is something to learn.
    monkeypatch.setattr(example, "rewards_of", lambda tokens, answers: (tokens[:, PROMPT_LENGTH] % 2).float())
    history = example.run(short)

    assert len(history) == short.num_steps
    assert all(math.isfinite(value) for metrics in history for value in metrics.values())
    assert any(metrics["loss"] != 0 for metrics in history)
    # The first mini-batch of a step is at pi_old; the later ones have moved.
    assert len(ratios) == short.num_steps * short.num_minibatches
    for number, ratio in enumerate(ratios):
        deviation = (ratio - 1).abs().max().item()
        assert deviation < 1e-5 if number % short.num_minibatches == 0 else deviation > 1e-5
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == short.num_steps + 2
    assert lines[-1].startswith("held-out success: ")
