"""The loop: prompts -> rollout -> rewards -> advantages -> old log-probs -> updates -> weight sync -> metrics -> checkpoint.

It has no maths and no process groups of its own; every stage takes a typed batch and returns the next one. All
ranks run this same code, and hold the same trajectories; only log-probabilities and gradients are divided among
them.
"""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path
from typing import Any

import torch

import megatron_calclip
from megatron_calclip.algorithms.advantages import degenerate_groups, group_advantages
from megatron_calclip.algorithms.bapo import BAPOSettings, contribution_sums, search_bounds
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.diagnostics import PolicyMetricSums
from megatron_calclip.algorithms.ratio import bounded_exp
from megatron_calclip.batch import Prompt, SamplingParams, TrainingBatch, Trajectories
from megatron_calclip.calibrating import CalibrationLoop
from megatron_calclip.config import Config
from megatron_calclip.config_file import config_to_dict
from megatron_calclip.data import eval_prompts, train_stream
from megatron_calclip.experience import Experience, dynamic_sampling
from megatron_calclip.hf import load_hf_config, load_tokenizer
from megatron_calclip.learner import checkpoint
from megatron_calclip.learner.learner import Learner, PreparedBatch, UpdateResult
from megatron_calclip.learner.reference import ReferencePolicy
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.metrics import Stopwatch
from megatron_calclip.objective import PolicyTokens, policy_objective, policy_tokens
from megatron_calclip.precision.backend import remarks
from megatron_calclip.rewards import load_reward
from megatron_calclip.rollout.collect import collect
from megatron_calclip.rollout.make import make_engine
from megatron_calclip.rollout.sync import Canary, WeightSync
from megatron_calclip.tracking import Tracker, profiled
from megatron_calclip.warm_start import initial_weights

# On its first mini-batch the policy has not moved since pi_old was computed over the same micro-batches, so the ratio is 1
# bit for bit where kernels are deterministic; CUDA's may differ in the last bits of a log-probability.
ON_POLICY_TOLERANCE = 1e-3
# Evaluation draws its random numbers under a step of its own, so that it repeats whenever it is run.
_EVAL_SEED_STEP = 0


class Trainer:
    """A run: everything that is built once, and the loop.

    Args:
        config: checked configuration.
        runtime: this rank.

    Raises:
        UserError: for data, weights, rewards or folders that cannot be used.
    """

    def __init__(self, config: Config, runtime: Runtime) -> None:
        self.started = time.perf_counter()
        self.config, self.runtime = config, runtime
        self.run_dir = Path(config.run_dir)
        self.tokenizer = load_tokenizer(config.model)
        self.hf_config = load_hf_config(config, self.tokenizer)
        self.prompts = train_stream(config, self.tokenizer)
        self.held_out = eval_prompts(config, self.tokenizer)
        self.reward = load_reward(config.reward)
        resume_from = checkpoint.find(self.run_dir, config.checkpoint.resume)
        done = checkpoint.read_state(resume_from) if resume_from else {"step": 0, "position": 0}
        self.step: int = done["step"]
        self.position: int = done["position"]
        self.tracker = Tracker(config, active=runtime.rank == 0, first_step=self.step)
        source = initial_weights(config, self.hf_config, self.tokenizer, runtime, self.tracker.say)
        self.learner = Learner(
            config,
            self.hf_config,
            runtime,
            source=source,
            lr=config.optimizer.lr,
            num_steps=config.train.num_steps,
            warmup_steps=config.schedule.warmup_steps,
            decay=config.schedule.decay,
            min_lr=config.schedule.min_lr,
        )
        self.reference = ReferencePolicy(self.learner, self.run_dir) if config.algorithm.kl.coefficient else None
        for line in remarks(config, self.learner.shape):
            self.tracker.say(f"precision: {line}")
        self.calibration = CalibrationLoop(config, self.learner, self.tracker)
        if resume_from is not None:
            self.calibration.load_state_dict(*checkpoint.load(resume_from, self.learner))
            self.tracker.say(f"resumed from {resume_from} after step {self.step}")
        self.engine = make_engine(config, self.hf_config, self.tokenizer, runtime, self.tracker.say)
        # BF16 weights in an FP32 engine are the same numbers; they need not travel as FP32.
        fp32 = config.rollout.dtype == config.precision.params_dtype == "fp32"
        count = max(config.rollout.canary_prompts, runtime.dp_size) if config.rollout.canary_prompts else 0
        self.sync_weights = WeightSync(
            self.learner,
            self.engine,
            dtype=torch.float32 if fp32 else torch.bfloat16,
            canary=Canary.of_prompts(self.prompts.take(0, count)),
        )
        self.sync_weights(self.step)

    def run(self) -> None:
        """Train until `train.num_steps`, evaluate, save, and print a summary."""
        config = self.config
        with self.tracker, contextlib.closing(self.engine):
            if self.step >= config.train.num_steps:
                self.tracker.say(
                    f"nothing to do: {self.run_dir} has done {self.step} of train.num_steps = "
                    f"{config.train.num_steps}; raise it, or set checkpoint.resume=no"
                )
                return
            if self.step == 0 and self.held_out:
                self.tracker.log({"step": 0, **self.evaluate()})
            while self.step < config.train.num_steps:
                with profiled(config, self.step, active=self.runtime.rank == 0):
                    row = self.train_step()
                self.tracker.log(row)
            self.summarise()

    def train_step(self) -> dict[str, float]:
        """One RL step with its weight sync and, where due, evaluation and checkpoint; returns its row of metrics."""
        watch = Stopwatch()
        experience, num_dropped = self.experience(watch)
        trajectories = experience.trajectories
        batch = self.with_advantages(trajectories, experience.rewards)
        with watch.stage("log_probs"):
            prepared = self.learner.prepare(trajectories, num_minibatches=self.config.algorithm.num_minibatches)
            if self.step == 0 and self.learner.warm_up(prepared):
                self.sync_weights.restart_canary()
            # Complete on every rank: sequence-level weights need whole sequences, which context parallelism divides.
            old = self.learner.gather_tokens(self.learner.log_probs(prepared).log_probs)
            batch = batch.with_log_probs(old_log_probs=old)
            if self.reference is not None:
                reference = self.learner.gather_tokens(self.reference.log_probs(prepared))
                batch = batch.with_log_probs(reference_log_probs=reference)
        with watch.stage("update"):
            self.learner.begin_step()
            bounds = self.calibration.bounds
            updates, measured = self.update(prepared, batch, bounds)
        self.step += 1
        self.calibration.ledger.run_tokens += trajectories.tokens.numel()
        with watch.stage("sync"):
            canary = self.sync_weights(self.step)
        self.log_samples(experience)
        row = self.metrics(batch, updates, bounds) | measured | canary
        if self.config.algorithm.dynamic_sampling.enabled:
            row["rollout/dropped_groups"] = num_dropped
        if self.held_out and self.due(self.config.eval.every):
            with watch.stage("eval"):
                row |= self.evaluate()
        if self.due(self.config.checkpoint.save_every):
            with watch.stage("checkpoint"):
                self.save()
        timing = watch.finish()
        row["throughput/tokens_per_s"] = trajectories.tokens.numel() / timing["timing/step"]
        self.calibration.ledger.run_seconds += timing["timing/step"]
        return {"step": self.step, **row, **self.calibration.ledger.row(), **timing}

    # The stages, in order.

    def experience(self, watch: Stopwatch) -> tuple[Experience, int]:
        """The step's scored completions, and how many groups dynamic sampling has dropped for them."""
        num_prompts, dynamic = self.config.train.prompts_per_step, self.config.algorithm.dynamic_sampling

        def sample(count: int) -> Experience:
            with watch.stage("rollout"):
                prompts = self.next_prompts(count)
                trajectories = self.sample(
                    prompts,
                    samples_per_prompt=self.config.train.samples_per_prompt,
                    temperature=self.config.rollout.temperature,
                    seed_step=self.step + 1,
                )
            with watch.stage("reward"):
                experience = self.scored(prompts, trajectories)
                buffer, longest = self.config.reward.overlong_buffer, self.config.rollout.max_new_tokens
                return experience if buffer is None else experience.with_overlong_penalty(longest, buffer=buffer)

        if not dynamic.enabled:
            return sample(num_prompts), 0
        return dynamic_sampling(sample, num_prompts=num_prompts, max_rounds=dynamic.max_rounds)

    def next_prompts(self, count: int) -> list[Prompt]:
        """So many prompts from where the run stands in its data."""
        prompts = self.prompts.take(self.position, count)
        self.position += count
        return prompts

    def sample(
        self, prompts: list[Prompt], *, samples_per_prompt: int, temperature: float, seed_step: int
    ) -> Trajectories:
        """Completions from the engine's present weights, the same on every rank."""
        return collect(
            self.engine,
            prompts,
            samples_per_prompt=samples_per_prompt,
            sampling=SamplingParams(
                max_new_tokens=self.config.rollout.max_new_tokens,
                temperature=temperature,
                top_p=self.config.rollout.top_p,
                stop_token_ids=(self.tokenizer.eos_token_id,),
            ),
            seed_key=(self.config.train.seed, seed_step),
            rank=self.runtime.rank,
            world_size=self.runtime.world_size,
            gather_objects=self.runtime.gather_objects,
        )

    def decode(self, tokens: torch.Tensor) -> str:
        """Text of a response."""
        return str(self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def scored(self, prompts: list[Prompt], trajectories: Trajectories) -> Experience:
        """Completions with their rewards."""
        texts = [self.decode(response) for response in trajectories.responses()]
        groups = trajectories.groups.tolist()
        rewards = torch.tensor([self.reward(prompts[g], text) for g, text in zip(groups, texts, strict=True)])
        return Experience(prompts, trajectories, texts, rewards)

    def with_advantages(self, trajectories: Trajectories, rewards: torch.Tensor) -> TrainingBatch:
        """Group-relative advantages, repeated over each response's tokens."""
        settings = self.config.algorithm.advantage
        advantages = group_advantages(rewards, trajectories.groups, kind=settings.kind, epsilon=settings.epsilon)
        per_token = advantages[trajectories.sequence_ids] * trajectories.response_mask
        return TrainingBatch(trajectories, rewards, per_token)

    def update(
        self, prepared: PreparedBatch, batch: TrainingBatch, bounds: ClipBounds
    ) -> tuple[list[UpdateResult], dict[str, float]]:
        """`num_epochs` passes of `num_minibatches` optimizer steps, with shadow passes where the step is measured.

        Returns:
            the updates, and what a measured step adds to the metrics.
        """
        algorithm, calibration = self.config.algorithm, self.calibration
        minibatches = [prepared.plan.sequences(index) for index in range(algorithm.num_minibatches)]
        tokens = policy_tokens(batch, minibatches, algorithm, self.config.rollout.max_new_tokens)
        measurement = calibration.begin(self.step + 1, prepared, tokens, batch.trajectories)
        results: list[UpdateResult] = []
        for epoch in range(algorithm.num_epochs):
            order = list(range(algorithm.num_minibatches))
            if epoch > 0:  # the same micro-batches in another order
                random.Random(f"{self.config.train.seed}:{self.step}:{epoch}").shuffle(order)
            for index in order:
                unmoved = not results
                if measurement is not None:
                    calibration.before_update(measurement, index, weights_unmoved=unmoved)
                if algorithm.loss == "bapo":
                    bounds = self.bapo_bounds(prepared, index, tokens)
                oracle = measurement is not None and algorithm.loss == "oracle"
                objective = policy_objective(
                    tokens,
                    bounds,
                    algorithm,
                    weights_unmoved=unmoved,
                    reference_ratio=measurement.ratio16() if oracle else None,  # type: ignore[union-attr]
                )
                result = self.learner.update(prepared, index, objective, entropy_grad=algorithm.entropy_bonus > 0)
                if unmoved and not self.skips_on_policy_check:
                    check_on_policy(result)
                if measurement is not None:
                    calibration.after_update(measurement, index, result, weights_unmoved=unmoved, bounds=bounds)
                results.append(result)
        return results, calibration.finish(measurement) if measurement is not None else {}

    @property
    def skips_on_policy_check(self) -> bool:
        """Delayed scaling's scales move from pass to pass, so its ratios are near 1, not at 1."""
        return self.config.precision.recipe == "tensorwise_delayed"

    def bapo_bounds(self, prepared: PreparedBatch, minibatch: int, tokens: PolicyTokens) -> ClipBounds:
        """BAPO's bounds for one update, from a forward pass over its mini-batch."""
        settings = BAPOSettings()
        log_probs = self.learner.log_probs(prepared, minibatch=minibatch).log_probs
        index = torch.cat([micro.index for micro in prepared.minibatches[minibatch]])
        sums = contribution_sums(
            bounded_exp(log_probs[index] - tokens.old_log_probs[index]),
            tokens.advantages[index],
            tokens.importance.weights[index] * tokens.loss_weights[index],
            torch.ones_like(index, dtype=torch.bool),
            settings=settings,
        )
        own = sums if self.runtime.reports_tokens else torch.zeros_like(sums)
        return search_bounds(self.runtime.sum_over_world(own).cpu(), settings=settings)

    def evaluate(self) -> dict[str, float]:
        """Mean reward on the held-out prompts, with its standard error over prompts."""
        settings = self.config.eval
        trajectories = self.sample(
            self.held_out,
            samples_per_prompt=settings.samples_per_prompt,
            temperature=settings.temperature,
            seed_step=_EVAL_SEED_STEP,
        )
        scores = self.scored(self.held_out, trajectories).rewards.view(len(self.held_out), -1).mean(1)
        stderr = float(scores.std()) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
        return {"eval/score": float(scores.mean()), "eval/stderr": stderr}

    # Book-keeping.

    def due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due after the present step."""
        return self.step == self.config.train.num_steps or (every > 0 and self.step % every == 0)

    def metrics(self, batch: TrainingBatch, updates: list[UpdateResult], bounds: ClipBounds) -> dict[str, float]:
        """The step's metrics, reduced over ranks; see `metrics.METRICS`."""
        trajectories, rewards = batch.trajectories, batch.rewards
        lengths = trajectories.response_lengths.float()
        row = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "reward/equal_groups": float(degenerate_groups(rewards, trajectories.groups).float().mean()),
            "response/mean_length": float(lengths.mean()),
            "response/truncated": float((~trajectories.finished).float().mean()),
            "grad_norm": sum(result.grad_norm for result in updates) / len(updates),
            "lr": self.learner.lr,
            "updates/applied": sum(result.applied for result in updates),
            "updates/skipped": sum(not result.applied for result in updates),
            "clip/lower": bounds.lower,
            "clip/upper": bounds.upper,
        }
        total = PolicyMetricSums.empty()
        loss = torch.zeros((), dtype=torch.float64)
        if self.runtime.reports_tokens:
            loss = torch.stack([result.loss for result in updates]).mean()
            for result in updates:
                for record in result.extras:
                    total = total.merge(record.metrics.cpu())
        sums, minima, maxima = total.pack()
        row["loss"] = float(self.runtime.sum_over_world(loss))
        reduced = PolicyMetricSums(
            self.runtime.sum_over_world(sums).cpu(),
            -self.runtime.max_over_world(-minima).cpu(),
            self.runtime.max_over_world(maxima).cpu(),
        )
        return row | reduced.finalize()

    def log_samples(self, experience: Experience) -> None:
        """A few completions with their rewards, spread over the step's prompts."""
        prompts, trajectories, texts = experience.prompts, experience.trajectories, experience.texts
        count = min(self.config.tracking.samples_per_step, len(texts))
        chosen = [index * len(texts) // count for index in range(count)]
        groups, rewards = trajectories.groups.tolist(), experience.rewards.tolist()
        rows: list[dict[str, Any]] = [
            {
                "prompt": prompts[groups[i]].text,
                "completion": texts[i],
                "answer": prompts[groups[i]].answer,
                "reward": rewards[i],
                "finished": bool(trajectories.finished[i]),
            }
            for i in chosen
        ]
        self.tracker.samples(self.step, rows)

    def save(self) -> None:
        """A checkpoint after the present step."""
        state, tensors = self.calibration.state_dict()
        state |= {
            "position": self.position,
            "config": config_to_dict(self.config),
            "version": megatron_calclip.__version__,
        }
        checkpoint.save(
            self.run_dir,
            self.step,
            self.learner,
            tokenizer=self.tokenizer,
            state=state,
            tensors=tensors,
            keep=self.config.checkpoint.keep,
        )

    def summarise(self) -> None:
        """The closing table in the terminal."""
        first, last = self.tracker.first_row, self.tracker.last_row
        rows = {"steps": f"{self.step}", "seconds": f"{time.perf_counter() - self.started:.0f}"}
        for title, row in (("held-out score, start", first), ("held-out score, end", last)):
            if "eval/score" in row:
                rows[title] = f"{row['eval/score']:.3f} +- {row['eval/stderr']:.3f} (step {int(row['step'])})"
        if "reward/mean" in last:
            rows["reward, last step"] = f"{last['reward/mean']:.3f}"
            bounds = self.calibration.bounds
            rows["clip bounds, now"] = f"[{bounds.lower:.2f}, {bounds.upper:.2f}]"
            if self.config.calibration.enabled:
                ledger = self.calibration.ledger
                share = ledger.row()["ledger/shadow_share"]
                rows["calibration"] = (
                    f"{ledger.shadow_seconds:.1f} s in shadow passes ({share:.1%} of the steps), "
                    f"{ledger.shadow_tokens:,} tokens"
                )
        rows["metrics"] = str(self.run_dir / "metrics.jsonl")
        rows["checkpoint"] = str(self.run_dir / f"step_{self.step}")
        self.tracker.summary(rows)


def check_on_policy(result: UpdateResult) -> None:
    """Assert that the first mini-batch's ratios are 1: the weights have not moved since pi_old.

    Raises:
        AssertionError: when they are not, which means that pi_old was computed over other micro-batches, at other
        weights or
            by kernels that do not repeat; every clip statistic of the run would be wrong.
    """
    for record in result.extras:
        sums = record.metrics
        if sums.num_tokens:
            low, high = float(sums.minima[0]), float(sums.maxima[0])
            assert 1 - ON_POLICY_TOLERANCE <= low <= high <= 1 + ON_POLICY_TOLERANCE, (
                f"importance ratios of unmoved weights lie in [{low}, {high}] instead of at 1"
            )
