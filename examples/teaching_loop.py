"""GRPO in plain torch, on one process and in one file: the thing to read first.

The algorithm of the main job (`grpo_fp8.py`), from a prompt to an optimizer step, on a tiny decoder that
learns two-digit sums. A supervised start with a careless teacher leaves it right about once in four attempts;
reinforcement learning more than doubles that, in about a minute on one CPU core:

    python examples/teaching_loop.py [--seed 0]

It reads from top to bottom as the data flows: prompts -> rollout -> rewards -> advantages -> old log-probs ->
mini-batches (loss with clip bounds -> optimizer step) -> weight sync, which begins the next step. Three
policies meet in the loss:

- mu, the sampler, wrote the answers. It is another engine with other rounding, here a BF16 copy.
- pi_old is the learner at the start of the step.
- pi_theta is the learner now. Every mini-batch moves it further away from pi_old.

pi_old / mu is a weight that repairs the mismatch of the two engines. pi_theta / pi_old tells how far this
step has moved a token; the clip bounds limit it, and they are what this project calibrates.

Left out on purpose, and where `megatron_calclip` has it: parallelism, packing and checkpoints (`learner`);
FP8 and the BF16 shadow pass (`precision`); calibration of the bounds (`algorithms/calibration.py`; see also
the comment in `train_step`); other losses and averages, KL (`algorithms`); a KV cache (`rollout`). Nothing is
imported from the package; a test holds loss, gradient and advantages of both equal on equal tokens.

Legend for shapes: P prompts, G samples per prompt, B = P * G sequences, R response positions, V vocabulary.
"""

import argparse
import copy
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

Bounds = tuple[float, float]  # (lower, upper) clip bounds of the ratio pi_theta / pi_old


@dataclass(frozen=True)
class Settings:
    """All numbers of a run."""

    seed: int = 0
    num_layers: int = 2
    width: int = 64
    num_heads: int = 4
    num_warm_steps: int = 600
    warm_batch_size: int = 128
    warm_lr: float = 4e-3
    wrong_answers: float = 0.4  # share of wrong demonstrations in the last fifth of the warm start
    num_steps: int = 80
    num_prompts: int = 32  # P
    num_samples: int = 8  # G, the group that an answer is compared with
    num_minibatches: int = 4  # with one, pi_theta would always equal pi_old and nothing would be clipped
    lr: float = 2e-4
    bounds: Bounds = (0.8, 1.24)
    importance_cap: float = 2.0
    num_eval: int = 1024


# 1. Prompts: sums of two two-digit numbers. All prompts have 6 characters; only answers need padding.
VOCABULARY = "0123456789+=$"  # $ ends an answer
END = VOCABULARY.index("$")
MAX_ANSWER = 4  # R: three digits and the end


def draw_problems(
    num_problems: int, rng: random.Random, *, num_samples: int = 1, held_out: bool = False
) -> tuple[list[str], list[str]]:
    """Prompts (`37+48=`) and answers (`85$`), each `num_samples` times; one pair in eight is held out."""
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers if ((31 * a + 17 * b) % 8 == 0) == held_out]
    drawn = [pair for pair in rng.choices(pairs, k=num_problems) for _ in range(num_samples)]
    return [f"{a}+{b}=" for a, b in drawn], [f"{a + b}$" for a, b in drawn]


def encode(texts: list[str]) -> Tensor:
    """Texts of one length -> int64 [B, length]."""
    return torch.tensor([[VOCABULARY.index(character) for character in text] for text in texts])


# 2. The policy: a decoder-only transformer with RMSNorm, rotary positions and SwiGLU, as in Llama and Qwen.
def rotate(x: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864): turn pairs of channels of x [B, heads, T, d] by their position."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Layer(nn.Module):
    """Attention and a gated MLP, each added to the residual stream [B, T, width]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.gate_up, self.down = linear(width, 6 * width), linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids [B, T] -> logits [B, T, V] of the next token."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), settings.width)  # also the output matrix
        nn.init.normal_(self.embedding.weight, std=settings.width**-0.5)
        layers = [Layer(settings.width, settings.num_heads) for _ in range(settings.num_layers)]
        self.body = nn.Sequential(*layers, nn.RMSNorm(settings.width))

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        return F.linear(self.body(self.embedding(tokens)), self.embedding.weight).float()


# 3. Rollout: mu writes the answers, and reports the log-probability of every token that it drew.
@torch.no_grad()
def rollout(sampler: Decoder, prompts: Tensor) -> tuple[Tensor, Tensor]:
    """Answers to prompts [B, 6] at temperature 1: (tokens int64 [B, 6 + R], log mu [B, R])."""
    tokens, log_probs = prompts, []
    for _ in range(MAX_ANSWER):  # goes on behind an end, which the mask cuts off
        distribution = sampler(tokens)[:, -1].log_softmax(-1)
        drawn = torch.multinomial(distribution.exp(), 1)
        tokens = torch.cat([tokens, drawn], dim=1)
        log_probs.append(distribution.gather(1, drawn))
    return tokens, torch.cat(log_probs, dim=1)


def response_mask(tokens: Tensor) -> Tensor:
    """int64 [B, 6 + R] -> float [B, R]: 1 up to and including the first end, 0 for what follows it."""
    is_end = (tokens[:, -MAX_ANSWER:] == END).int()
    return (is_end.cumsum(1) - is_end == 0).float()


# 4. Rewards: verifiable, 1 for exactly the right answer and nothing for less.
def rewards_of(tokens: Tensor, answers: list[str]) -> Tensor:
    """int64 [B, 6 + R] -> float [B]. Answers include their end."""
    texts = ["".join(VOCABULARY[token] for token in row) for row in tokens[:, -MAX_ANSWER:].tolist()]
    return torch.tensor([float(t.startswith(a)) for t, a in zip(texts, answers, strict=True)])


# 5. Advantages: better or worse than the other answers to the same prompt. This replaces a value network.
def group_advantages(rewards: Tensor) -> Tensor:
    """(reward - mean) / std of each group, [P, G] -> [P, G] (GRPO, arXiv 2402.03300, section 4.1.2)."""
    # A group that is right throughout, or wrong throughout, has nothing to compare: its advantages are 0.
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


# 6. Log-probabilities of given tokens: pi_old without a gradient, pi_theta with it.
def response_log_probs(policy: Decoder, tokens: Tensor) -> Tensor:
    """log pi of the last R of tokens [B, 6 + R], each given those before it: [B, R]."""
    log_probs = policy(tokens[:, :-1])[:, -MAX_ANSWER:].log_softmax(-1)
    return log_probs.gather(2, tokens[:, -MAX_ANSWER:, None]).squeeze(2)


# 7. The loss: PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with two bounds and an importance weight.
class Batch(NamedTuple):
    """A step or a mini-batch of it, without gradients."""

    tokens: Tensor  # int64 [B, 6 + R]
    mask: Tensor  # [B, R], see `response_mask`
    advantages: Tensor  # [B, 1], one per answer, shared by its tokens
    sampler_log_probs: Tensor  # [B, R], log mu
    old_log_probs: Tensor  # [B, R], log pi_old


def policy_loss(log_probs: Tensor, batch: Batch, bounds: Bounds, *, importance_cap: float) -> tuple[Tensor, Tensor]:
    """From log pi_theta [B, R] to (loss [], ratios pi_theta / pi_old [B, R] without gradient)."""
    # Logs are bounded before exp, so that neither a value nor a gradient can overflow.
    weight = (batch.old_log_probs - batch.sampler_log_probs).clamp(-20, 20).exp().clamp(max=importance_cap)
    ratio = (log_probs - batch.old_log_probs).clamp(-20, 20).exp()
    # The minimum makes the clip one-sided: a good token (A > 0) is no longer pushed up once ratio >= upper, a
    # bad one no longer down once ratio <= lower, and one that moved the wrong way always keeps its gradient.
    surrogate = torch.minimum(ratio * batch.advantages, ratio.clamp(*bounds) * batch.advantages)
    # Mean over the tokens of an answer, then over answers: each answer counts the same, however long.
    sequence_loss = (-weight * surrogate * batch.mask).sum(1) / batch.mask.sum(1)
    return sequence_loss.mean(), ratio.detach()


def update(policy: Decoder, optimizer: Optimizer, loss: Tensor) -> None:
    """One optimizer step, the gradient's norm bounded to 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


# 8. One step of reinforcement learning: all of the above, in order.
def train_step(
    policy: Decoder, optimizer: Optimizer, bounds: Bounds, rng: random.Random, settings: Settings
) -> dict[str, float]:
    """Sample, score, and update the policy `num_minibatches` times; returns the step's metrics."""
    prompts, answers = draw_problems(settings.num_prompts, rng, num_samples=settings.num_samples)
    sampler = copy.deepcopy(policy).bfloat16()  # the weight sync
    tokens, sampler_log_probs = rollout(sampler, encode(prompts))
    mask = response_mask(tokens)
    rewards = rewards_of(tokens, answers)
    advantages = group_advantages(rewards.view(-1, settings.num_samples)).view(-1, 1)

    # pi_old is computed over the very mini-batches that are trained on: the ratios of the first one, whose
    # weights have not moved, are then 1, and only a token that an update has moved is ever clipped.
    split = partial(torch.chunk, chunks=settings.num_minibatches)
    with torch.no_grad():
        old_log_probs = torch.cat([response_log_probs(policy, part) for part in split(tokens)])

    batch = Batch(tokens, mask, advantages, sampler_log_probs, old_log_probs)
    losses, ratios = [], []
    for minibatch in map(Batch, *map(split, batch)):
        log_probs = response_log_probs(policy, minibatch.tokens)
        loss, ratio = policy_loss(log_probs, minibatch, bounds, importance_cap=settings.importance_cap)
        update(policy, optimizer, loss)
        losses.append(loss.item())
        ratios.append(ratio)

    # Calibration acts here, on the ratios of a step's tokens beside their advantages. In this file both
    # log-probs of a ratio are exact enough. With FP8 in the learner they carry rounding noise: tokens that
    # hardly moved fall outside the bounds, and bad ones escape their penalty. So every 20 steps the package
    # takes the ratios from BF16 forwards too, r16, and moves the bounds of the steps that follow:
    #   lower, by at most 0.05, to where the share of A < 0 tokens with ratio <= lower is that of r16 <= 0.8;
    #   upper, by at most 0.1, to where the kept tokens' sum of weight * A * ratio over A > 0, divided by that
    #   of weight * |A| * ratio over A < 0, is what r16 gives within [0.8, 1.24].
    ratio = torch.cat(ratios)
    negative, positive = mask * (advantages < 0), mask * (advantages > 0)
    low, high = negative * (ratio <= bounds[0]), positive * (ratio >= bounds[1])
    return {
        "reward": rewards.mean().item(),
        "loss": sum(losses) / len(losses),
        "entropy": -((old_log_probs * mask).sum() / mask.sum()).item(),  # an estimate, nats per token
        "clip/low_negative": (low.sum() / negative.sum().clamp(min=1)).item(),
        "clip/high_positive": (high.sum() / positive.sum().clamp(min=1)).item(),
    }


# 9. Around it: the supervised start, the evaluation, the run.
make_optimizer = partial(AdamW, betas=(0.9, 0.95), weight_decay=0.01)


def warm_start(policy: Decoder, rng: random.Random, settings: Settings) -> None:
    """Learn from worked examples; in the last fifth some have random digits: a habit for RL to unlearn."""
    optimizer = make_optimizer(policy.parameters())
    for step in range(settings.num_warm_steps):
        remaining = 1 - step / settings.num_warm_steps
        optimizer.param_groups[0]["lr"] = settings.warm_lr * remaining
        prompts, answers = draw_problems(settings.warm_batch_size, rng)
        for i, answer in enumerate(answers):
            if remaining <= 0.2 and rng.random() < settings.wrong_answers:
                answers[i] = "".join(rng.choices("0123456789", k=len(answer) - 1)) + "$"
        tokens = encode([p + a.ljust(MAX_ANSWER, "$") for p, a in zip(prompts, answers, strict=True)])
        mask = response_mask(tokens)
        update(policy, optimizer, -(response_log_probs(policy, tokens) * mask).sum() / mask.sum())


def evaluate(policy: Decoder, settings: Settings) -> float:
    """Share of held-out problems that one sampled answer solves."""
    prompts, answers = draw_problems(settings.num_eval, random.Random(settings.seed), held_out=True)
    tokens, _ = rollout(policy, encode(prompts))
    return rewards_of(tokens, answers).mean().item()


def run(settings: Settings) -> list[dict[str, float]]:
    """The whole run, with a line per step; returns the metrics of the steps."""
    torch.manual_seed(settings.seed)
    rng, policy, started = random.Random(settings.seed), Decoder(settings), time.perf_counter()
    warm_start(policy, rng, settings)
    before = evaluate(policy, settings)
    print(f"warm start: {time.perf_counter() - started:.0f} s, held-out success {before:.3f}")
    optimizer = make_optimizer(policy.parameters(), lr=settings.lr)
    bounds = settings.bounds  # fixed here; calibration would replace the pair every 20 steps
    history = []
    for step in range(1, settings.num_steps + 1):
        history.append(train_step(policy, optimizer, bounds, rng, settings))
        print(f"step {step:3d}", *(f" {name} {value:.4f}" for name, value in history[-1].items()))
    after = evaluate(policy, settings)
    print(f"held-out success: {before:.3f} -> {after:.3f} in {time.perf_counter() - started:.0f} s")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO in plain torch on two-digit sums.")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    run(Settings(seed=parser.parse_args().seed))
