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

from megatron_calclip.algorithms.advantages import group_advantages
from megatron_calclip.algorithms.bapo import BAPOSettings, contribution_sums, search_bounds
from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.ratio import bounded_exp
from megatron_calclip.batch import Prompt, TrainingBatch, Trajectories
from megatron_calclip.calibrating import CalibrationLoop
from megatron_calclip.checkpoint_files import read_state
from megatron_calclip.config import Config
from megatron_calclip.data import eval_sets, train_stream
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.evaluation import Evaluation, eval_metrics
from megatron_calclip.experience import Experience, dynamic_sampling
from megatron_calclip.guards.alarms import Alarms
from megatron_calclip.guards.preemption import Preemption
from megatron_calclip.guards.skipped import SkippedUpdates
from megatron_calclip.guards.watchdog import Watchdog
from megatron_calclip.hf import load_hf_config, load_tokenizer, stop_token_ids
from megatron_calclip.learner.learner import Learner, PreparedBatch, UpdateResult
from megatron_calclip.learner.reference import ReferencePolicy
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.metrics import Stopwatch
from megatron_calclip.objective import PolicyTokens, policy_objective, policy_tokens
from megatron_calclip.precision.backend import remarks
from megatron_calclip.rewards import make_scorer
from megatron_calclip.rollout.make import make_engine
from megatron_calclip.rollout.sampler import Sampler
from megatron_calclip.rollout.sync import Canary, WeightSync
from megatron_calclip.sample_log import sample_rows
from megatron_calclip.saving import RunCheckpoints, find_checkpoint, set_earlier_aside
from megatron_calclip.scoring import reward_samples, score_shares
from megatron_calclip.step_metrics import (
    batch_metrics,
    outlier_rows,
    sampler_metrics,
    sampler_mismatch,
    update_metrics,
)
from megatron_calclip.tracking import Tracker, profiled
from megatron_calclip.warm_start import initial_weights

# On its first mini-batch the policy has not moved since pi_old was computed over the same micro-batches, so the ratio is 1
# bit for bit where kernels are deterministic; CUDA's may differ in the last bits of a log-probability.
ON_POLICY_TOLERANCE = 1e-3


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
        held_out = eval_sets(config, self.tokenizer)
        self.prompts = train_stream(config, self.tokenizer, held_out)
        self.scorer = make_scorer(config.reward)
        resume_from = find_checkpoint(self.run_dir, config.checkpoint.resume, runtime, self.say_early)
        if resume_from is None:
            set_earlier_aside(self.run_dir, runtime, self.say_early)
        done: dict[str, Any] = read_state(resume_from) if resume_from else {"step": 0, "position": 0}
        self.step: int = done["step"]
        self.position: int = done["position"]
        self.tracker = Tracker(config, active=runtime.rank == 0, first_step=self.step)
        for line in [*self.prompts.report, *(line for one in held_out for line in one.report)]:
            self.tracker.say(f"data: {line}")
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
        self.reference = None
        if config.algorithm.kl.coefficient:
            self.reference = ReferencePolicy(self.learner, self.run_dir, resumes=resume_from is not None)
        for line in remarks(config, self.learner.shape):
            self.tracker.say(f"precision: {line}")
        if config.algorithm.old_log_probs == "mismatched":
            self.tracker.say("EXPERIMENT: pi_old is computed over other micro-batches than those that train")
        self.calibration = CalibrationLoop(config, self.learner, self.tracker)
        self.alarms = Alarms(config.alarms)
        self.checkpoints = RunCheckpoints(
            config, self.learner, self.calibration, self.alarms, self.tokenizer, best=done.get("best")
        )
        self.num_rollbacks = 0
        self.seconds_saving = 0.0
        self.skipped = SkippedUpdates(
            self.run_dir, max_in_a_row=config.train.max_skipped_updates, writes=runtime.rank == 0
        )
        if resume_from is not None:
            self.checkpoints.restore(resume_from)
            self.tracker.say(f"resumed from {resume_from} after step {self.step}")
        self.engine = make_engine(config, self.hf_config, self.tokenizer, runtime, self.tracker.say)
        stops = stop_token_ids(config.model, self.tokenizer)
        self.sampler = Sampler(config, self.engine, runtime, stop_token_ids=stops)
        self.evaluation = Evaluation(
            config,
            held_out,
            tokenizer=self.tokenizer,
            sampler=Sampler(config.for_evaluation, self.engine, runtime, stop_token_ids=stops),
            runtime=runtime,
        )
        # BF16 weights in an FP32 engine are the same numbers; they need not travel as FP32.
        fp32 = config.rollout.dtype == config.precision.params_dtype == "fp32"
        count = max(config.rollout.canary_prompts, runtime.dp_size) if config.rollout.canary_prompts else 0
        self.sync_weights = WeightSync(
            self.learner,
            self.engine,
            dtype=torch.float32 if fp32 else torch.bfloat16,
            canary=Canary.of_prompts(self.prompts.take(0, count)),
        )
        self.preemption = Preemption(runtime)
        self.watchdog = Watchdog(runtime.rank, runtime.world_size, config.train.hang_timeout_seconds)
        self.sync_weights(self.step)

    def run(self) -> None:
        """Train until `train.num_steps`, evaluate, save, and print a summary."""
        config = self.config
        with self.tracker, contextlib.ExitStack() as stack:
            for part in (self.engine, self.scorer, self.evaluation):
                stack.callback(part.close)
            if self.step >= config.train.num_steps:
                self.tracker.say(
                    f"nothing to do: {self.run_dir} has done {self.step} of train.num_steps = "
                    f"{config.train.num_steps}; raise it, or set checkpoint.resume=no"
                )
                return
            stack.callback(self.watchdog.close)
            if self.step == 0 and self.evaluation.sets:
                self.tracker.log({"step": 0, **self.evaluate()})
            while self.step < config.train.num_steps:
                with profiled(config, self.step, active=self.runtime.rank == 0):
                    row = self.train_step()
                if row is not None:
                    self.tracker.log(row)
                    self.answer_alarms(row)
                    self.save_where_due(row)
                if row is None or self.preemption.requested():
                    self.stop_early()
                    return
            self.checkpoints.finish()
            self.summarise()

    def train_step(self) -> dict[str, float] | None:
        """One RL step with its weight sync and, where due, evaluation.

        Returns:
            its row of metrics; None when the run was told to stop before the first update, and nothing has changed.
        """
        watch, position = Stopwatch(self.watchdog.enter), self.position
        experience, num_dropped = self.experience(watch)
        if self.preemption.requested():
            self.position = position
            return None
        trajectories = experience.trajectories
        self.engine.release()
        if self.config.rollout.vllm.colocated:
            self.runtime.barrier()  # only now the GPUs of all ranks are free
        if self.config.rollout.max_staleness and self.step + 1 < self.config.train.num_steps:
            # The position stays, so that a run that resumes from this step's checkpoint draws them again.
            self.sampler.draw_ahead(self.prompts.take(self.position, len(experience.prompts)), self.step + 2)
        batch = self.with_advantages(trajectories, experience.rewards)
        with watch.stage("log_probs"):
            prepared = self.learner.prepare(trajectories, num_minibatches=self.config.algorithm.num_minibatches)
            if self.step == 0 and self.learner.warm_up(prepared):
                self.sync_weights.restart_canary()
            matched = self.config.algorithm.old_log_probs == "matched"
            source = prepared if matched else self.learner.prepare(trajectories, num_minibatches=1)
            # Complete on every rank: sequence-level weights need whole sequences, which context parallelism divides.
            old = self.learner.gather_tokens(self.learner.log_probs(source).log_probs)
            batch = batch.with_log_probs(old_log_probs=old)
            if self.reference is not None:
                reference = self.learner.gather_tokens(self.reference.log_probs(prepared))
                batch = batch.with_log_probs(reference_log_probs=reference)
        with watch.stage("update"):
            self.learner.begin_step()
            bounds = self.calibration.bounds
            updates, measured, bounds = self.update(prepared, batch, bounds)
        self.step += 1
        self.calibration.ledger.run_tokens += trajectories.tokens.numel()
        with watch.stage("rollout"):
            self.sampler.wait()
        with watch.stage("sync"):
            canary = self.sync_weights(self.step)
        self.log_samples(experience, batch, updates, bounds)
        row = self.metrics(experience, batch, updates, bounds) | measured | canary
        if self.config.algorithm.dynamic_sampling.enabled:
            row["rollout/dropped_groups"] = num_dropped
        if self.evaluation.sets and self.due(self.config.eval.every):
            with watch.stage("eval"):
                row |= self.evaluate()
        for name, problem in self.alarms.check(row).items():
            self.tracker.say(f"ALARM after step {self.step}: {problem}")
            row[name] = 1.0
        timing = watch.finish()
        row["throughput/tokens_per_s"] = trajectories.tokens.numel() / timing["timing/step"]
        self.calibration.ledger.run_seconds += timing["timing/step"]
        timing["timing/checkpoint"] = self.seconds_saving
        return {"step": self.step, **row, **self.calibration.ledger.row(), **timing}

    def save_where_due(self, row: dict[str, float]) -> None:
        """A checkpoint of the step whose metrics these are. They are logged by then: when the run is killed in between, the step
        and its row come again, and no checkpoint is ever ahead of the log."""
        # What the run goes back to, or ends with, must not be the state that rang.
        if rings(row) and self.config.alarms.action != "warn":
            return
        started = time.perf_counter()
        self.watchdog.enter("checkpoint")
        self.checkpoints.finish_if_written()
        if self.checkpoints.is_best(self.step, row) or self.due(self.config.checkpoint.save_every):
            self.checkpoints.save(self.step, self.position)
        self.watchdog.enter("after checkpoint")
        self.seconds_saving = time.perf_counter() - started
        self.calibration.ledger.run_seconds += self.seconds_saving

    def say_early(self, line: str) -> None:
        """Before there is a tracker: the checkpoint tells it where to go on."""
        if self.runtime.rank == 0:
            print(line, flush=True)

    # The stages, in order.

    def experience(self, watch: Stopwatch) -> tuple[Experience, int]:
        """The step's scored completions, and how many groups dynamic sampling has dropped for them."""
        num_prompts, dynamic = self.config.train.prompts_per_step, self.config.algorithm.dynamic_sampling

        def sample(count: int) -> Experience:
            with watch.stage("rollout"):
                prompts = self.next_prompts(count)
                trajectories = self.sampler.sample_for_step(prompts, self.step + 1)
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

    def scored(self, prompts: list[Prompt], trajectories: Trajectories) -> Experience:
        """Completions with their rewards; each rank scores a share of them."""
        samples = reward_samples(prompts, trajectories, self.tokenizer)
        scores = score_shares(self.scorer, samples, self.runtime)
        return Experience.of_scores(prompts, trajectories, [sample.completion for sample in samples], scores)

    def with_advantages(self, trajectories: Trajectories, rewards: torch.Tensor) -> TrainingBatch:
        """Group-relative advantages, repeated over each response's tokens."""
        settings = self.config.algorithm.advantage
        advantages = group_advantages(rewards, trajectories.groups, kind=settings.kind, epsilon=settings.epsilon)
        per_token = advantages[trajectories.sequence_ids] * trajectories.response_mask
        return TrainingBatch(trajectories, rewards, per_token)

    def update(
        self, prepared: PreparedBatch, batch: TrainingBatch, bounds: ClipBounds
    ) -> tuple[list[UpdateResult], dict[str, float], ClipBounds]:
        """`num_epochs` passes of `num_minibatches` optimizer steps, with shadow passes where the step is measured.

        Returns:
            the updates, what a measured step adds to the metrics, and the bounds of the last update.
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
                if unmoved and result.applied and not self.skips_on_policy_check:
                    check_on_policy(result)
                if result.applied:
                    self.skipped.applied()
                else:
                    # Of pipelines only the last stages have it, of data-parallel ranks each its own share.
                    loss = result.loss if self.runtime.reports_tokens else torch.zeros_like(result.loss)
                    self.skipped.skipped(
                        self.step + 1,
                        index,
                        batch,
                        minibatches[index],
                        loss=float(self.runtime.sum_over_world(loss)),
                        grad_norm=result.grad_norm,
                    )
                if measurement is not None:
                    calibration.after_update(measurement, index, result, update=len(results), bounds=bounds)
                results.append(result)
        return results, calibration.finish(measurement) if measurement is not None else {}, bounds

    @property
    def skips_on_policy_check(self) -> bool:
        """Delayed scaling's scales move from pass to pass; other micro-batches for pi_old are the experiment itself."""
        return (
            self.config.precision.recipe == "tensorwise_delayed" or self.config.algorithm.old_log_probs == "mismatched"
        )

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
        """The mean score over the evaluation sets; report and completions go to `run_dir/eval/step_<step>`."""
        results = list(self.evaluation.run())
        self.tracker.evaluation(self.step, results, self.config)
        return eval_metrics(results)

    # Book-keeping.

    def due(self, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due after the present step."""
        return self.step == self.config.train.num_steps or (every > 0 and self.step % every == 0)

    def metrics(
        self, experience: Experience, batch: TrainingBatch, updates: list[UpdateResult], bounds: ClipBounds
    ) -> dict[str, float]:
        """The step's metrics; sequences on which sampler and learner disagree go to a file."""
        trajectories, apart = batch.trajectories, sampler_mismatch(batch)
        self.tracker.outliers(self.step, outlier_rows(apart, trajectories, experience.texts))
        row = sampler_metrics(apart, trajectories, policy_version=self.step - 1)
        assert row["rollout/staleness_max"] <= self.config.rollout.max_staleness, "samples are older than one step"
        return (
            {"lr": self.learner.lr}
            | batch_metrics(batch)
            | experience.component_means()
            | row
            | update_metrics(updates, bounds, self.runtime)
        )

    def log_samples(
        self, experience: Experience, batch: TrainingBatch, updates: list[UpdateResult], bounds: ClipBounds
    ) -> None:
        """A few completions with what training did to their tokens, spread over the step's prompts."""
        rows = sample_rows(
            experience,
            batch,
            [record for update in updates for record in update.extras],
            count=self.config.tracking.samples_per_step,
            bounds=bounds,
            decode=lambda ids: str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)),
            gather_tokens=self.learner.gather_tokens,
        )
        self.tracker.samples(self.step, rows)

    # Alarms, signals.

    def stop_early(self) -> None:
        """Told to stop: save what is done and leave, so that the same command goes on from here."""
        self.watchdog.enter("saving before the end")
        self.sampler.wait()
        self.checkpoints.finish()
        if self.checkpoints.newest_step != self.step:
            self.checkpoints.save(self.step, self.position)
            self.checkpoints.finish()
        self.tracker.say(f"stopped by a signal after step {self.step}; the same command resumes from there")

    def answer_alarms(self, row: dict[str, float]) -> None:
        """What `alarms.action` asks for when a step rings.

        Raises:
            UserError: to stop the run.
        """
        settings = self.config.alarms
        if not rings(row) or settings.action == "warn":
            return
        self.checkpoints.finish()
        back = settings.action == "rollback"
        folder = find_checkpoint(self.run_dir, "auto", self.runtime, self.tracker.say) if back else None
        if folder is None or self.num_rollbacks == settings.max_rollbacks:
            raise UserError(
                "alarms.action",
                f"the run stops after step {self.step}, which rang an alarm ({settings.action}, {self.num_rollbacks} "
                f"rollbacks so far); look at {self.run_dir / 'metrics.jsonl'}, then resume from a checkpoint",
                exit_code=EXIT_FAILED,
            )
        self.num_rollbacks += 1
        self.sampler.wait()
        self.sampler.discard()
        self.step = self.checkpoints.restore(folder)  # but the place in the data stays: other prompts come
        self.tracker.rewind(self.step)
        self.sync_weights.restart_canary()
        self.sync_weights(self.step)
        self.tracker.say(f"rolled back to {folder} ({self.num_rollbacks} of {settings.max_rollbacks})")

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


def rings(row: dict[str, float]) -> bool:
    """Whether a step rang an alarm."""
    return any(name.startswith("alarm/") for name in row)


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
