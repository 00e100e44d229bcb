#!/usr/bin/env bash
# verl 0.9.1: GRPO with an FP8 Megatron actor, an FP8 sampler and calibrated clipping. Arguments are further overrides, such as
# data.train_files, actor_rollout_ref.model.path and trainer.n_gpus_per_node. Not yet run on a GPU.
set -euo pipefail
settings=$(cd "$(dirname "$0")" && pwd)/calclip.yaml
environment=ray_kwargs.ray_init.runtime_env.env_vars
# Every process of the run registers the loss and puts the calibrating worker in place when it imports verl.
export VERL_USE_EXTERNAL_MODULES=megatron_calclip.integrations.verl MEGATRON_CALCLIP_SETTINGS=$settings
python -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.rollout_correction.bypass_mode=false \
    model_engine=megatron \
    actor_rollout_ref.actor.policy_loss.loss_mode=calclip \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    data.train_batch_size=256 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.fp8=hybrid \
    +actor_rollout_ref.actor.megatron.override_transformer_config.fp8_recipe=tensorwise \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.calculate_log_probs=true \
    +actor_rollout_ref.rollout.quantization=fp8 \
    "+$environment.VERL_USE_EXTERNAL_MODULES=$VERL_USE_EXTERNAL_MODULES" \
    "+$environment.MEGATRON_CALCLIP_SETTINGS=$MEGATRON_CALCLIP_SETTINGS" \
    "$@"
