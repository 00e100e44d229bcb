"""Where first weights come from: a HF folder, random values, or random values after a short supervised start.

The supervised start gives the tiny CPU run a policy that succeeds sometimes, so that there is something to
reinforce. It runs on the same learner as everything else, and its result is cached as a HF folder keyed by
every setting that shapes it; a run always loads that folder, whether it has just been made or not, so that
both start from the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.batch import Completion, Prompt, Trajectories
from megatron_calclip.config import Config
from megatron_calclip.data import template_text, train_stream
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.initial import random_weights
from megatron_calclip.learner.learner import Learner
from megatron_calclip.learner.runtime import Runtime
from megatron_calclip.objective import supervised_objective
from megatron_calclip.tasks import GeneratedTask, generated_task
from megatron_calclip.weights.load import HFSource
from megatron_calclip.weights.mapping import ModelShape, hf_specs
from megatron_calclip.weights.save import save_hf

# Positions of the prompt stream used by the warm start lie far behind those of any RL run.
_FIRST_POSITION = 1 << 30


def cached_folder(config: Config) -> Path:
    """The HF folder that holds a configuration's warm start, once it has been made."""
    root = Path(os.environ.get("MEGATRON_CALCLIP_CACHE", Path.home() / ".cache" / "megatron_calclip"))
    return root / "warm_start" / _cache_key(config)


def _cache_key(config: Config) -> str:
    """Hash of everything that shapes the result; the layout does so only by rounding and is left out."""
    m, template = config.model, config.data.chat_template
    assert m.shape is not None
    optimizer = dataclasses.asdict(config.optimizer)
    del optimizer["lr"]  # the warm start has its own
    shaping = {
        "format": 4,
        "shape": dataclasses.asdict(m.shape),
        "init": m.init,
        "tokenizer": [m.tokenizer, m.characters, m.max_sequence_length],
        "warm_start": dataclasses.asdict(m.warm_start),
        "task": [config.data.train, getattr(config.data, config.data.train)],
        "template": [template_text(template) if isinstance(template, str) else template, config.data.system_prompt],
        "temperature": config.rollout.temperature,  # the learner divides its logits by it
        "precision": dataclasses.asdict(config.precision),
        "optimizer": optimizer,
        "seed": config.train.seed,
    }
    return hashlib.sha256(json.dumps(shaping, sort_keys=True, default=dataclasses.asdict).encode()).hexdigest()[:16]


def initial_weights(
    config: Config, hf_config: Any, tokenizer: Any, runtime: Runtime, say: Callable[[str], None]
) -> HFSource:
    """The weights that the run starts from; collective.

    Raises:
        UserError: for unreadable weights, or a cache that cannot be written.
    """
    if config.model.hf is not None:
        return _named(config.model.hf, "model.hf")
    if config.model.warm_start.num_steps == 0:
        return _random_weights(config, hf_config)
    folder = cached_folder(config)
    # One rank looks, so that all decide alike even while another run is writing.
    if not runtime.gather_objects(runtime.rank == 0 and _is_whole(folder))[0]:
        _train(config, hf_config, tokenizer, runtime, folder, say)
    else:
        say(f"warm start: cached in {folder}")
    return _named(folder, "MEGATRON_CALCLIP_CACHE")


def _is_whole(folder: Path) -> bool:
    """Whether a cache entry can be read; a damaged one is removed, to be made again."""
    try:
        HFSource.from_folder(folder)
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def _named(folder: str | Path, setting: str) -> HFSource:
    """The tensors of a folder, with errors that name the setting behind it."""
    try:
        source = HFSource.from_folder(folder)
    except UserError as error:
        raise UserError(setting, str(error), exit_code=error.exit_code) from None
    return source.named(f"{setting}: {source.where}")


def _random_weights(config: Config, hf_config: Any) -> HFSource:
    """Random weights under the run's seed."""
    return HFSource.from_tensors(random_weights(hf_config, init=config.model.init, seed=config.train.seed))


def _demonstrations(
    task: GeneratedTask, tokenizer: Any, prompts: Sequence[Prompt], *, noise: float, seed: int
) -> Trajectories:
    """Worked examples, some of them wrong."""
    answers = []
    for prompt in prompts:
        rng = random.Random(f"demonstration:{seed}:{prompt.id}")
        answer = task.demonstrate(prompt.text, prompt.answer, rng, noise=noise)
        ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        answers.append([Completion(tuple(ids), (0.0,) * len(ids), finished=True, policy_version=0)])
    return Trajectories.from_completions(prompts, answers)


def _train(
    config: Config, hf_config: Any, tokenizer: Any, runtime: Runtime, folder: Path, say: Callable[[str], None]
) -> None:
    settings = config.model.warm_start
    learner = Learner(
        config,
        hf_config,
        runtime,
        source=_random_weights(config, hf_config),
        lr=settings.lr,
        num_steps=settings.num_steps,
        warmup_steps=settings.num_steps // 10,
        decay="linear",
        min_lr=settings.lr / 10,
    )
    stream = train_stream(config, tokenizer)
    task = generated_task(config.data.train, config, held_out=False)
    assert task is not None  # checked with the configuration
    report_every = max(settings.num_steps // 5, 1)
    for step in range(settings.num_steps):
        prompts = stream.take(_FIRST_POSITION + step * settings.batch_size, settings.batch_size)
        # Errors come late: mixed in from the start, they would keep a small model from learning at all.
        noisy = step >= (1 - settings.noise_share) * settings.num_steps
        noise = settings.noise if noisy else 0.0
        trajectories = _demonstrations(task, tokenizer, prompts, noise=noise, seed=config.train.seed)
        learner.set_fp8(step >= settings.bf16_share * settings.num_steps)
        weights = trajectories.response_mask.float() / trajectories.num_response_tokens
        learner.begin_step()
        batch = learner.prepare(trajectories, num_minibatches=1)
        result = learner.update(batch, 0, supervised_objective(weights))
        if (step + 1) % report_every == 0:
            share = result.loss if runtime.reports_tokens else torch.zeros_like(result.loss)
            say(f"warm start {step + 1}/{settings.num_steps}  loss {float(runtime.sum_over_world(share)):.3f}")
    problem = None
    stream_of_weights = learner.stream_hf(dtype=torch.float32)
    if runtime.rank == 0:
        try:
            _publish(stream_of_weights, folder, hf_config)
        except (OSError, UserError) as error:
            problem = str(error)
    for _ in stream_of_weights:  # the other ranks of the model take part in the gathers
        pass
    problem = runtime.gather_objects(problem)[0]
    if problem is not None:
        raise UserError(
            "MEGATRON_CALCLIP_CACHE",
            f"cannot write the warm start ({problem}); set it to a writable folder",
            exit_code=EXIT_FAILED,
        )


def _publish(stream: Iterator[tuple[str, Tensor]], folder: Path, hf_config: Any) -> None:
    """Write the cache entry under a name of this process's own, then rename; another run may make it, too."""
    own = folder.with_name(f"{folder.name}.{os.getpid()}")
    save_hf(stream, own, specs=hf_specs(ModelShape.from_hf_config(hf_config), torch.float32), hf_config=hf_config)
    try:
        own.rename(folder)
    except OSError:
        shutil.rmtree(own, ignore_errors=True)
        if not (folder / "config.json").is_file():
            raise
