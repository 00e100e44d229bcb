"""Names of everything that a run logs, each with its meaning, its reduction and its unit.

`metrics.jsonl`, TensorBoard and the other trackers hold these names and no others. A reduction says what was
combined over micro-batches, mini-batches and ranks: sums divided by global counts, never means of means;
extremes by min and max. `rank 0` marks what only one process measures.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """What one logged number is."""

    meaning: str
    reduction: str


_TOKENS = "sum over response tokens of all ranks / their count"
_PAIRED = "from sums over the response tokens with shadow ratios, all ranks"

METRICS: dict[str, Metric] = {
    "step": Metric("RL steps done, this one included", "rank 0"),
    "reward/mean": Metric("mean reward of the step's samples", "mean over all samples"),
    "reward/std": Metric("standard deviation of the rewards", "over all samples"),
    "reward/equal_groups": Metric(
        "share of groups whose rewards are all equal, so that they teach nothing", "mean over groups"
    ),
    "reward/task": Metric(
        "the reward before shaping: correct answers with `math` and `code`; each component of a reward of your own is "
        "logged as reward/<its name>, too",
        "mean over all samples",
    ),
    "reward/format": Metric("share of samples that match reward.format.pattern", "mean over all samples"),
    "reward/overlong": Metric("DAPO's penalty on length, at most 0", "mean over all samples"),
    "reward/timed_out": Metric(
        "share of samples whose scoring exceeded its limits of time or memory; they count as wrong",
        "mean over all samples",
    ),
    "rollout/dropped_groups": Metric("groups of equal reward that dynamic sampling replaced", "sum"),
    "response/mean_length": Metric("response tokens per sample", "mean over all samples"),
    "response/truncated": Metric("share of samples cut by the length limit", "mean over all samples"),
    "eval/score": Metric(
        "mean score of the answers to held-out prompts; with several sets that of each is eval/<set>/score",
        "mean over sets of the mean over all samples",
    ),
    "eval/stderr": Metric(
        "standard error of eval/score (prompts are independent, samples of a prompt are not)", "over prompts"
    ),
    "eval/mean_length": Metric("tokens per answer", "mean over sets of the mean over all samples"),
    "eval/truncated": Metric("share of answers cut by the length limit", "mean over sets of the mean over all samples"),
    "loss": Metric(
        "policy loss, KL and entropy terms included", "sum of globally normalised shares; mean over updates"
    ),
    "grad_norm": Metric("global L2 norm of the gradient before clipping", "mean over updates"),
    "lr": Metric("learning rate of the step", "rank 0"),
    "updates/applied": Metric("optimizer steps that moved the weights", "sum"),
    "updates/skipped": Metric("optimizer steps skipped because the gradient was not finite", "sum"),
    "alarm/entropy": Metric("1 in a step whose entropy surges (alarms); absent otherwise", "rank 0"),
    "alarm/loss": Metric("1 in a step whose loss spikes (alarms); absent otherwise", "rank 0"),
    "entropy": Metric("entropy of the policy's next-token distribution, nats", _TOKENS),
    "clip/low_negative": Metric(
        "share of tokens with A < 0 and ratio <= L (no gradient)", "sum / count of A < 0 tokens"
    ),
    "clip/high_positive": Metric(
        "share of tokens with A > 0 and ratio >= H (no gradient)", "sum / count of A > 0 tokens"
    ),
    "clip/dual_negative": Metric(
        "share of tokens with A < 0 at the dual clip (no gradient)", "sum / count of A < 0 tokens"
    ),
    "clip/lower": Metric("L in force during the step", "rank 0"),
    "clip/upper": Metric("H in force during the step", "rank 0"),
    "ratio/mean": Metric("pi_theta / pi_old", _TOKENS),
    "ratio/std": Metric("its standard deviation", "from sums over response tokens"),
    "ratio/min": Metric("its minimum", "min over ranks and updates"),
    "ratio/max": Metric("its maximum", "max over ranks and updates"),
    "kl/k3": Metric("K3 estimate of KL(pi_old, pi_theta), nats", _TOKENS),
    "mismatch/mean_abs_dlogp": Metric("|log pi_old - log mu|, nats", _TOKENS),
    "mismatch/p95_abs_dlogp": Metric("its 95th percentile", "over response tokens of all ranks"),
    "mismatch/max_abs_dlogp": Metric("its maximum", "max over ranks"),
    "mismatch/k3": Metric("K3 estimate of KL(mu, pi_old), nats", _TOKENS),
    "mismatch/token_mult_prob_error": Metric("exp |log pi_old - log mu|; 1 is no mismatch", _TOKENS),
    "mismatch/sequence_max": Metric("largest mean |log pi_old - log mu| of a sequence, nats", "max over all samples"),
    "mismatch/outliers": Metric(
        "sequences whose mean |log pi_old - log mu| stands out (algorithms/mismatch.py); the worst are in outliers.jsonl",
        "sum over all samples",
    ),
    "rollout/staleness_mean": Metric(
        "policy versions between the weights that drew a sample and those that began to train on it",
        "mean over samples",
    ),
    "rollout/staleness_max": Metric("its maximum", "max over samples"),
    "importance/truncated": Metric("share of tokens whose importance weight exceeds the cap", _TOKENS),
    "importance/ess": Metric(
        "effective sample size of the importance weights, as a share", "from sums over response tokens"
    ),
    "throughput/tokens_per_s": Metric(
        "tokens (prompts included) per second of the whole step", "global tokens / rank 0 seconds"
    ),
    "canary/mean_abs_dlogp": Metric(
        "|log pi_sampler - log pi_learner| of the canary's tokens after the weight sync, nats", "max over engines"
    ),
    "timing/rollout": Metric("seconds of sampling", "rank 0"),
    "timing/reward": Metric("seconds of scoring", "rank 0"),
    "timing/log_probs": Metric("seconds of old (and reference) log-probabilities", "rank 0"),
    "timing/update": Metric("seconds of the optimizer steps", "rank 0"),
    "timing/sync": Metric("seconds of the weight sync to the rollout engine", "rank 0"),
    "timing/eval": Metric("seconds of evaluation", "rank 0"),
    "timing/checkpoint": Metric("seconds that saving held up the run before this step", "rank 0"),
    "timing/step": Metric("seconds of the whole step", "rank 0"),
    "ledger/shadow_seconds": Metric("seconds in shadow passes for calibration, since the start", "rank 0"),
    "ledger/study_seconds": Metric("seconds in shadow passes for studies, since the start", "rank 0"),
    "ledger/shadow_tokens": Metric("tokens through shadow passes, since the start", "all ranks"),
    "ledger/shadow_share": Metric("ledger/shadow_seconds over the seconds of all steps", "rank 0"),
    "ledger/flops_share": Metric(
        "forward passes of shadow tokens over those of the whole run (5 a token and step)", "all ranks"
    ),
    "calibration/alpha": Metric("share of A < 0 tokens that BF16 clips at the lower reference", _PAIRED),
    "calibration/tail_tokens": Metric("those tokens", "sum"),
    "calibration/lower_choice": Metric("L*, before smoothing", _PAIRED),
    "calibration/upper_choice": Metric("H*, before smoothing", _PAIRED),
    "calibration/lower_after": Metric("L from the next step on", _PAIRED),
    "calibration/upper_after": Metric("H from the next step on", _PAIRED),
    "calibration/lower_multiple": Metric("FP8 over BF16 clips of A < 0 tokens, both at the reference", _PAIRED),
    "calibration/upper_multiple": Metric("FP8 over BF16 clips of A > 0 tokens, both at the reference", _PAIRED),
    "calibration/balance_target": Metric("positive over negative update that survives BF16's clip", _PAIRED),
    "calibration/balance_after": Metric("the same in FP8 at the new bounds", _PAIRED),
    "calibration/lower_at_edge": Metric("1 when L* lies at the end of its grid", _PAIRED),
    "calibration/upper_at_edge": Metric("1 when H* lies at the end of its grid", _PAIRED),
    "calibration/lower_held": Metric("1 when L was held; calibration.jsonl says why", _PAIRED),
    "calibration/upper_held": Metric("1 when H was held; calibration.jsonl says why", _PAIRED),
    "calibration/bytes": Metric("bytes of the one all-reduce of a calibration", "constant in tokens"),
    "clip_fp8/low": Metric("share of A < 0 tokens that FP8 clips at the bounds in force", _PAIRED),
    "clip_fp8/high": Metric("share of A > 0 tokens that FP8 clips at the bounds in force", _PAIRED),
    "clip_bf16/low": Metric("share of A < 0 tokens that BF16 clips at the reference", _PAIRED),
    "clip_bf16/high": Metric("share of A > 0 tokens that BF16 clips at the reference", _PAIRED),
    "clip_fp8/num_low": Metric("the tokens of clip_fp8/low", "sum"),
    "clip_fp8/num_high": Metric("the tokens of clip_fp8/high", "sum"),
    "clip_bf16/num_low": Metric("the tokens of clip_bf16/low", "sum"),
    "clip_bf16/num_high": Metric("the tokens of clip_bf16/high", "sum"),
    "overclip/low": Metric("clip_fp8/low over clip_bf16/low; 1 is no over-clipping", _PAIRED),
    "overclip/high": Metric("clip_fp8/high over clip_bf16/high", _PAIRED),
    "false_clip/low": Metric("P(FP8 clips | BF16 keeps), A < 0", _PAIRED),
    "false_clip/high": Metric("P(FP8 clips | BF16 keeps), A > 0", _PAIRED),
    "missed_clip/low": Metric("P(FP8 keeps | BF16 clips), A < 0", _PAIRED),
    "missed_clip/high": Metric("P(FP8 keeps | BF16 clips), A > 0", _PAIRED),
    "lost_penalty/mass": Metric("sum of w |A| r16 over A < 0 tokens that only FP8 clips", "sum"),
    "lost_penalty/share": Metric("the same over all A < 0 tokens that BF16 keeps", _PAIRED),
    "nmae/ratio": Metric("mean |r8 - r16| / mean r16", _PAIRED),
    "nmae/probability": Metric("mean |p8 - p16| / mean p16", _PAIRED),
    "nmae/amplification": Metric("nmae/ratio over nmae/probability", _PAIRED),
}


# Names that a run's own rewards and evaluation sets bring along.
_OPEN_NAMES = re.compile(r"reward/[^/]+|eval/[^/]+/score")


def is_known(name: str) -> bool:
    """Whether a run may log this name."""
    return name in METRICS or _OPEN_NAMES.fullmatch(name) is not None


class Stopwatch:
    """Seconds per stage of one step.

    Args:
        enter: told of each stage as it begins, and of the time between two.
    """

    def __init__(self, enter: Callable[[str], None] = lambda stage: None) -> None:
        self.enter = enter
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book the time of a block under `timing/<name>`."""
        start = time.perf_counter()
        self.enter(name)
        try:
            yield
        finally:
            self.enter(f"after {name}")
            key = f"timing/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start

    def finish(self) -> dict[str, float]:
        """All stages, and the whole as `timing/step`."""
        return {**self.seconds, "timing/step": time.perf_counter() - self._start}
