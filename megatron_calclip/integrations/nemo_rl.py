"""NeMo-RL: its clipped policy-gradient loss with settable bounds, and the hooks that put it and a worker into its `setup`.

The driver ships a loss object to the workers with every `policy.train`; the worker sets the bounds on its copy, measures
(`nemo_rl_worker`), and calibrates. `calibrate(run_grpo)` makes NeMo-RL's own script do so. Settings are an extra key of the
loss's configuration, which accepts any: `++loss_fn.calclip.interval=20`, with the keys of `controller.SETTINGS`.

By default NeMo-RL takes one optimizer step per rollout. Nothing is clipped then and nothing can be calibrated, and the
controller says so: `policy.train_global_batch_size` has to be smaller than prompts times generations.

Left out on purpose: `DTensor` workers (their FP8 is not Megatron's), the split train-step of the single controller, and
sequence-level ratios; each is refused in one sentence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_calclip.algorithms.bounds import ClipBounds
from megatron_calclip.algorithms.policy_loss import clip_masks
from megatron_calclip.errors import UserError
from megatron_calclip.integrations import require
from megatron_calclip.integrations.controller import Measurement, PairedLogProbs, epsilons, settings_from

_FRAMEWORK, _HOW = (
    "NeMo-RL (its main branch of August 2026 or later)",
    "put a checkout of it on PYTHONPATH, since its wheel is a placeholder",
)
interfaces = require("nemo_rl.algorithms.loss.interfaces", framework=_FRAMEWORK, how=_HOW)
loss_functions = require("nemo_rl.algorithms.loss.loss_functions", framework=_FRAMEWORK, how=_HOW)
if not hasattr(interfaces, "MetricNormalizer"):
    raise ImportError(
        "this NeMo-RL is older than the adapter supports (0.7.0 is); use its main branch of August 2026 or later"
    )

WORKER = "megatron_calclip.integrations.nemo_rl_worker.CalibratedMegatronPolicyWorker"
MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
SHADOW_OLD, SHADOW_NEW, ROWS = "calclip_shadow_old", "calclip_shadow_new", "calclip_rows"
"""Tensors that a measured step adds to its batch: [B, S], [B, S], [B]."""
CLIP_FRACTIONS = ("calclip_low_negative", "calclip_high_positive")
"""Metrics: shares of all valid tokens that the lower bound clips (A < 0) and the upper bound clips (A > 0)."""


class CalibratedPGLossFn(loss_functions.ClippedPGLossFn):  # type: ignore[name-defined]
    """NeMo-RL's loss with bounds that can be set, clip fractions by sign, and an ear for measurements.

    Without a `calclip` mapping, or with `enabled: false` in it, value, gradient and metrics are the base class's own.

    Args:
        cfg: NeMo-RL's `ClippedPGLossConfig`, with the extra key `calclip`.
        use_fused_linear_logprobs: as in the base class.

    Raises:
        UserError: for settings that do not go together.
    """

    def __init__(self, cfg: Any, use_fused_linear_logprobs: bool = False) -> None:
        super().__init__(cfg, use_fused_linear_logprobs)
        self.calclip: dict[str, Any] = dict(getattr(cfg, "calclip", None) or {})
        self.enabled = settings_from(self.calclip, where="loss_fn.calclip") is not None
        self.measurement: Measurement | None = None
        self.weights_unmoved = False
        """Whether the update at hand is the step's first."""
        self.data_parallel_rank = 0
        self.counts_tokens = True
        """Whether this rank counts tokens: one rank of all that compute the same log-probabilities."""
        if not self.enabled:
            return
        for name in ("force_on_policy_ratio", "disable_ppo_ratio", "use_cispo", "sequence_level_importance_ratios"):
            if getattr(self, name):
                raise UserError(
                    f"loss_fn.{name}", "clips no token ratios, so there is nothing to calibrate; set it to false"
                )
        if self.truncated_importance_sampling_type == "seq-mask-tis":
            raise UserError(
                "loss_fn.truncated_importance_sampling_type", "seq-mask-tis is not measured; choose tis or icepop"
            )
        self.metric_normalizations |= dict.fromkeys(CLIP_FRACTIONS, interfaces.MetricNormalizer.TOKENS)

    @property
    def bounds(self) -> ClipBounds:
        """The bounds that the loss clips at."""
        return ClipBounds(1.0 - self.ratio_clip_min, 1.0 + self.ratio_clip_max)

    @bounds.setter
    def bounds(self, bounds: ClipBounds) -> None:
        self.ratio_clip_min, self.ratio_clip_max = epsilons(bounds)

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Loss and metrics of a micro-batch; see the base class."""
        loss, metrics = super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        if not self.enabled:
            return loss, metrics
        with torch.no_grad():
            mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
            ratio = (next_token_logprobs - data["prev_logprobs"][:, 1:]).exp()
            low, high = clip_masks(ratio, data["advantages"][:, 1:], self.bounds, response_mask=mask.bool())
            for name, clipped in zip(CLIP_FRACTIONS, (low, high), strict=True):
                # Metrics of micro-batches are added up, so each is divided by the global count.
                metrics[name] = (clipped.sum() / (global_valid_toks + 1e-8)).item()
            if self.measurement is not None and self.counts_tokens:
                self._add(self.measurement, next_token_logprobs, data, mask)
        return loss, metrics

    def _add(self, measurement: Measurement, log_probs: Tensor, data: Any, mask: Tensor) -> None:
        old, sampler = data["prev_logprobs"][:, 1:], data["generation_logprobs"][:, 1:]
        weights = torch.ones(())
        if self.use_importance_sampling_correction:
            weights = torch.nan_to_num((old - sampler).exp(), nan=0.0, posinf=0.0, neginf=0.0)
            cap, floor = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min or 0.0
            if self.truncated_importance_sampling_type == "tis":
                weights = weights.clamp(floor, cap)
            elif self.truncated_importance_sampling_type == "icepop":
                weights = weights * ((weights >= floor) & (weights <= cap))
        by_token = self.loss_type == interfaces.LossType.TOKEN_LEVEL
        measurement.add(
            PairedLogProbs(
                log_probs=log_probs,
                old_log_probs=old,
                shadow_log_probs=data[SHADOW_NEW][:, 1:],
                shadow_old_log_probs=data[SHADOW_OLD][:, 1:],
                advantages=data["advantages"][:, 1:],
                importance_weights=weights,
                loss_weights=torch.ones(()) if by_token else 1.0 / mask.sum(dim=1, keepdim=True).clamp(min=1),
                response_mask=mask,
                sequence_ids=data[ROWS],
            ),
            weights_unmoved=self.weights_unmoved,
        )

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a worker: a measurement belongs to one process."""
        return self.__dict__ | {"measurement": None}


def policy_factory(**kwargs: Any) -> Any:
    """NeMo-RL's `Policy` on calibrating workers; for `setup(..., policy_factory=...)`.

    Raises:
        UserError: when the policy is not trained by Megatron workers.
    """
    if not (kwargs["config"].get("megatron_cfg") or {}).get("enabled", False):
        raise UserError("policy.megatron_cfg.enabled", "calibration needs Megatron workers; set it to true")
    registry = require("nemo_rl.distributed.ray_actor_environment_registry", framework=_FRAMEWORK, how=_HOW)
    lm_policy = require("nemo_rl.models.policy.lm_policy", framework=_FRAMEWORK, how=_HOW)
    environments = registry.ACTOR_ENVIRONMENT_REGISTRY
    environments[WORKER] = environments[MEGATRON_WORKER]
    return lm_policy.Policy(**kwargs, worker_extension_cls_fqn=WORKER)


def calibrate(script: Any) -> Any:
    """Let NeMo-RL's `examples/run_grpo.py` train with calibrated clipping where its configuration asks for it.

    Args:
        script: the imported script; call its `main()` afterwards.
    """
    setup = script.setup
    grpo = require("nemo_rl.algorithms.grpo", framework=_FRAMEWORK, how=_HOW)

    def calibrated_setup(config: Any, *args: Any, **kwargs: Any) -> Any:
        settings = getattr(config.loss_fn, "calclip", None) or {}
        if settings_from(settings, where="loss_fn.calclip") is None:
            return setup(config, *args, **kwargs)
        if kwargs.pop("policy_factory", None) is not None:
            raise UserError(
                "data_plane.enabled", "calibration works with NeMo-RL's plain policy alone; set it to false"
            )
        grpo.ClippedPGLossFn = CalibratedPGLossFn
        return setup(config, *args, **kwargs, policy_factory=policy_factory)

    script.setup = calibrated_setup
    return script
