"""GRPO in plain torch, on one process and one page: the thing to read first.

What: the algorithm of the main job (`grpo_fp8.py`) from a prompt to an optimizer step, on a tiny decoder that learns
two-digit sums. A short supervised start on partly wrong examples leaves it right about every third time; reinforcement
learning does the rest, in about a minute on one CPU core:

    python examples/teaching_loop.py [--seed 0]

Read it from top to bottom, as the data flows: prompts -> rollout -> rewards -> advantages -> old log-probs -> mini-batches
(loss with clip bounds -> optimizer step) -> weight sync to the sampler, which is the start of the next step.

Three policies meet in the loss, and keeping them apart is half of understanding it:

- mu, the sampler that wrote the answers: another engine, here in BF16;
- pi_old, the learner at the start of the step;
- pi_theta, the learner now: it moves away from pi_old with every mini-batch.

pi_old / mu repairs the mismatch between two engines (a weight, truncated). pi_theta / pi_old measures how far this step
has moved the policy; the clip bounds limit it, and they are what the project calibrates.

Left out on purpose, and where the package has it:

- parallelism, packing instead of padding, checkpoints: `megatron_calclip/learner`;
- FP8 training and the BF16 shadow pass: `megatron_calclip/precision`;
- moving the clip bounds: `megatron_calclip/algorithms/calibration.py` (a comment in `train_step` shows where);
- other losses and averages, KL to a reference, exact rules at ties: `megatron_calclip/algorithms`;
- a sampler with a KV cache: `megatron_calclip/rollout`.

Nothing here imports the package. A test holds loss, gradient and advantages of both equal on the same tokens.

Legend for shapes: P prompts, G samples per prompt, B = P * G sequences, R response positions, V vocabulary.
"""

import argparse
import copy
import random
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ClipBounds(NamedTuple):
    """Ratios between which a token keeps its gradient, whatever the sign of its advantage."""

    lower: float
    upper: float


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
    wrong_answers: float = 0.3  # share of wrong demonstrations: something must be left to learn
    num_steps: int = 40
    num_prompts: int = 32  # P
    num_samples: int = 8  # G, the group that an answer is compared with
    num_minibatches: int = 4  # with one, pi_theta would always equal pi_old and nothing would ever be clipped
    lr: float = 1e-4
    bounds: ClipBounds = ClipBounds(0.8, 1.24)
    importance_cap: float = 2.0
    num_eval: int = 1024


# 1. Prompts: sums of two two-digit numbers. All prompts have 6 characters, so that only answers need padding.

VOCABULARY = "0123456789+=$"  # $ ends an answer
END = VOCABULARY.index("$")
MAX_ANSWER = 4  # R: three digits and the end


def draw_problems(count: int, rng: random.Random, *, held_out: bool = False) -> list[tuple[int, int]]:
    """Pairs of operands; every eighth possible pair is held out and never trained on."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if ((31 * a + 17 * b) % 8 == 0) == held_out]
    return rng.choices(pairs, k=count)


def encode(texts: list[str]) -> Tensor:
    """Texts of one length -> int64 [B, length]."""
    return torch.tensor([[VOCABULARY.index(character) for character in text] for text in texts])


def encode_prompts(problems: list[tuple[int, int]]) -> Tensor:
    """int64 [B, 6]."""
    return encode([f"{a}+{b}=" for a, b in problems])


# 2. The policy: a decoder-only transformer with RMSNorm, rotary positions and SwiGLU, as in Llama and Qwen.


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864): turn pairs of channels of x [B, heads, T, d] by their position."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Layer(nn.Module):
    """Attention and a gated MLP, each added to the residual stream."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 6 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.num_heads, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=1)
        attended = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Token ids [B, T] -> logits [B, T, V] of the next token."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(VOCABULARY), settings.width)
        self.layers = nn.Sequential(*[Layer(settings.width, settings.num_heads) for _ in range(settings.num_layers)])
        self.norm = nn.RMSNorm(settings.width)
        nn.init.normal_(self.embedding.weight, std=settings.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Input and output embedding are one matrix."""
        return F.linear(self.norm(self.layers(self.embedding(tokens))), self.embedding.weight).float()


# 3. Rollout: mu writes answers and reports the log-probability of every token it drew.


class Rollout(NamedTuple):
    """Answers of one step; nothing here carries a gradient."""

    tokens: Tensor  # int64 [B, 6 + R]
    sampler_log_probs: Tensor  # [B, R], log mu
    mask: Tensor  # [B, R], 1 for tokens up to and including the end, 0 for the padding behind it


@torch.no_grad()
def rollout(sampler: Decoder, prompts: Tensor) -> Rollout:
    """One answer to each of the prompts [B, 6], sampled at temperature 1."""
    tokens, log_probs, mask = prompts, [], []
    alive = torch.ones(len(prompts), 1, dtype=torch.bool)
    for _ in range(MAX_ANSWER):
        distribution = sampler(tokens)[:, -1].log_softmax(-1)
        drawn = torch.multinomial(distribution.exp(), 1)
        tokens = torch.cat([tokens, drawn], dim=1)
        log_probs.append(distribution.gather(1, drawn))
        mask.append(alive)
        alive = alive & (drawn != END)
    return Rollout(tokens, torch.cat(log_probs, dim=1), torch.cat(mask, dim=1).float())


# 4. Rewards: verifiable, 1 for exactly the right answer.


def rewards_of(problems: list[tuple[int, int]], answers: Rollout) -> Tensor:
    """[B], 0 or 1."""
    rewards = []
    for (a, b), row, mask in zip(problems, answers.tokens[:, -MAX_ANSWER:].tolist(), answers.mask.tolist(), strict=True):
        text = "".join(VOCABULARY[token] for token, kept in zip(row, mask, strict=True) if kept)
        rewards.append(float(text == f"{a + b}$"))
    return torch.tensor(rewards)


# 5. Advantages: better or worse than the other answers to the same prompt. This replaces a value network.


def group_advantages(rewards: Tensor) -> Tensor:
    """(reward - mean) / std within each group: [P, G] -> [P, G] (GRPO, arXiv 2402.03300, section 4.1.2).

    A group that is right, or wrong, throughout has nothing to compare: its advantages are 0.
    """
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


# 6. Log-probabilities under the learner: for pi_old without, for pi_theta with a gradient.


def response_log_probs(policy: Decoder, tokens: Tensor) -> Tensor:
    """log pi of the last R of tokens [B, 6 + R], each given those before it: [B, R]."""
    log_probs = policy(tokens[:, :-1])[:, -MAX_ANSWER:].log_softmax(-1)
    return log_probs.gather(2, tokens[:, -MAX_ANSWER:, None]).squeeze(2)


# 7. The loss: PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with separate bounds and an importance weight.


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    bounds: ClipBounds,
    importance_cap: float,
) -> tuple[Tensor, Tensor]:
    """Loss of a mini-batch.

    Args:
        log_probs: [B, R], log pi_theta; the only argument with a gradient.
        old_log_probs: [B, R], log pi_old.
        sampler_log_probs: [B, R], log mu.
        advantages: [B], one per answer, the same for all of its tokens.
        mask: [B, R].
        bounds: clip bounds of pi_theta / pi_old.
        importance_cap: largest weight pi_old / mu.

    Returns:
        (loss [], ratio [B, R] without gradient).
    """
    advantages = advantages[:, None]
    # exp of a difference of logs can overflow: bounding the logs first keeps value and gradient finite.
    weight = (old_log_probs - sampler_log_probs).clamp(-20, 20).exp().clamp(max=importance_cap)
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    # The minimum makes the clip one-sided. A good token (A > 0) stops being pushed up once ratio >= upper, a bad one (A < 0)
    # stops being pushed down once ratio <= lower; a token that moved the wrong way always keeps its gradient.
    clipped = ratio.clamp(bounds.lower, bounds.upper)
    token_loss = -weight * torch.minimum(ratio * advantages, clipped * advantages)
    # Mean over the tokens of each answer, then over answers: every answer counts the same, however long.
    return ((token_loss * mask).sum(1) / mask.sum(1)).mean(), ratio.detach()


# 8. One step of reinforcement learning: all of the above, in order.


class StepResult(NamedTuple):
    """What is printed of a step."""

    reward: float
    entropy: float  # nats per token, estimated as the mean of -log pi_old
    clipped_low: float  # share of the A < 0 tokens without gradient
    clipped_high: float  # share of the A > 0 tokens without gradient
    loss: float


def train_step(
    policy: Decoder, optimizer: torch.optim.Optimizer, rng: random.Random, settings: Settings, bounds: ClipBounds
) -> StepResult:
    """Sample, score, and update the policy `num_minibatches` times."""
    problems = [problem for problem in draw_problems(settings.num_prompts, rng) for _ in range(settings.num_samples)]
    sampler = copy.deepcopy(policy).bfloat16()  # the weight sync
    answers = rollout(sampler, encode_prompts(problems))
    rewards = rewards_of(problems, answers)
    advantages = group_advantages(rewards.view(-1, settings.num_samples)).flatten()

    # pi_old is computed over the very mini-batches that are trained on. Then the ratio of the first one, at weights that have
    # not moved, is exactly 1, and nothing but a moved policy is ever clipped.
    minibatches = torch.arange(len(problems)).chunk(settings.num_minibatches)
    with torch.no_grad():
        old_log_probs = torch.cat([response_log_probs(policy, answers.tokens[rows]) for rows in minibatches])

    losses, ratios = [], []
    for rows in minibatches:
        loss, ratio = policy_loss(
            response_log_probs(policy, answers.tokens[rows]),
            old_log_probs[rows],
            answers.sampler_log_probs[rows],
            advantages[rows],
            answers.mask[rows],
            bounds=bounds,  # one pair for the whole step
            importance_cap=settings.importance_cap,
        )
        update(policy, optimizer, loss)
        losses.append(loss.item())
        ratios.append(ratio)

    # Calibration would start from what is at hand here: the ratio of every token of the step, beside its advantage. In this file
    # both log-probs of a ratio are exact enough. In FP8 both carry rounding noise, more tokens than the update has moved fall
    # outside the bounds, and bad tokens lose their penalty. So every 20 steps the package takes a second ratio, r16, of the same
    # mini-batches from BF16 forwards, and moves the pair that the next steps are clipped with:
    #   lower: to where the share of A < 0 tokens with ratio <= lower equals that of r16 <= 0.8, by at most 0.05;
    #   upper: to where  sum(w * A * ratio over A > 0, ratio < upper) / sum(w * |A| * ratio over A < 0, ratio > lower)
    #          equals the same quotient of r16 within [0.8, 1.24], by at most 0.1.
    ratio, mask, advantage = torch.cat(ratios), answers.mask, advantages[:, None]
    negative, positive = mask * (advantage < 0), mask * (advantage > 0)
    return StepResult(
        reward=rewards.mean().item(),
        entropy=-((old_log_probs * mask).sum() / mask.sum()).item(),
        clipped_low=((negative * (ratio <= bounds.lower)).sum() / negative.sum().clamp(min=1)).item(),
        clipped_high=((positive * (ratio >= bounds.upper)).sum() / positive.sum().clamp(min=1)).item(),
        loss=sum(losses) / len(losses),
    )


def make_optimizer(policy: Decoder, lr: float) -> torch.optim.Optimizer:
    """AdamW with the main job's settings."""
    return torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)


def update(policy: Decoder, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One optimizer step with the gradient's norm bounded to 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


# 9. Around it: the supervised start, the evaluation, the run.


def warm_start(policy: Decoder, rng: random.Random, settings: Settings) -> None:
    """Supervised learning on worked examples, of which a share has some wrong answer of the right length."""
    optimizer = make_optimizer(policy, settings.warm_lr)
    for step in range(settings.num_warm_steps):
        optimizer.param_groups[0]["lr"] = settings.warm_lr * (1 - step / settings.num_warm_steps)
        answers = []
        problems = draw_problems(settings.warm_batch_size, rng)
        for a, b in problems:
            digits = str(a + b)
            if rng.random() < settings.wrong_answers:
                digits = "".join(rng.choice("0123456789") for _ in digits)
            answers.append(digits.ljust(MAX_ANSWER, "$"))
        targets = encode(answers)
        mask = (targets != END).float()
        mask = F.pad(mask[:, :-1], (1, 0), value=1.0)  # a token counts if the one before it is not the end
        log_probs = response_log_probs(policy, torch.cat([encode_prompts(problems), targets], dim=1))
        update(policy, optimizer, -(log_probs * mask).sum() / mask.sum())


def evaluate(policy: Decoder, settings: Settings) -> float:
    """Share of held-out problems that one sampled answer solves."""
    problems = draw_problems(settings.num_eval, random.Random(settings.seed), held_out=True)
    return rewards_of(problems, rollout(policy, encode_prompts(problems))).mean().item()


def run(settings: Settings) -> tuple[float, float, list[StepResult]]:
    """The whole run, printed line by line: (held-out success before, after, every step)."""
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    started = time.perf_counter()
    policy = Decoder(settings)
    warm_start(policy, rng, settings)
    before = evaluate(policy, settings)
    print(f"warm start done after {time.perf_counter() - started:.0f} s: held-out success {before:.3f}")
    optimizer = make_optimizer(policy, settings.lr)
    history = []
    for step in range(1, settings.num_steps + 1):
        result = train_step(policy, optimizer, rng, settings, settings.bounds)
        history.append(result)
        print(
            f"step {step:3d}  reward {result.reward:.3f}  entropy {result.entropy:.3f}  loss {result.loss:+.4f}  "
            f"clipped: A<0 {result.clipped_low:6.2%}  A>0 {result.clipped_high:6.2%}"
        )
    after = evaluate(policy, settings)
    print(f"held-out success {before:.3f} -> {after:.3f} in {time.perf_counter() - started:.0f} s")
    return before, after, history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO in plain torch on two-digit sums.")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    run(Settings(seed=parser.parse_args().seed))
