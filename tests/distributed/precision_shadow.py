"""The shadow pass against a BF16 learner on the rounded masters, and what else holds of FP8 weights and their masters.

Part of `check_precision.py`. The masters that the other learner gets are put together here from the slices that Megatron
hangs on each parameter, not by the code under test.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fp8_learners import (
    RECIPES,
    Training,
    check,
    precision_config,
    same,
    save,
    snapshot,
    started,
    weights,
    whole_masters,
)
from torch import Tensor

from megatron_calclip.learner import checkpoint
from megatron_calclip.learner.reference import ReferencePolicy
from megatron_calclip.precision.shadow import shadow_pass
from megatron_calclip.weights.stream import stream_hf


def shadow_cases(every: bool) -> Iterator[tuple[str, bool, str, str]]:
    """(recipe, fp8_param, layout, model)."""
    if every:
        yield from ((r, p, x, "two layers") for r in RECIPES for p in (True, False) for x in ("TP2", "PP2", "DP2"))
    yield "tensorwise_delayed", True, "DP2", "two layers"
    yield "tensorwise_delayed", False, "TP2", "two layers"
    yield "tensorwise", True, "DP2 overlap", "two layers"
    yield "tensorwise", False, "DP2", "tied"
    yield "rowwise", True, "PP2", "tied"
    yield "rowwise", False, "TP2 SP", "two layers"
    yield "blockwise", True, "TP2 SP", "two layers"
    yield "blockwise", False, "PP2", "two layers"
    yield "mxfp8", True, "PP2 VPP2", "four layers"
    yield "mxfp8", False, "DP2 overlap", "two layers"


class Interrupted(Exception):
    """Raised inside a shadow pass."""


def interrupt(training: Training) -> None:
    """A shadow pass that fails: in the last layer's MLP, or after the forward where ranks would wait for each other."""
    learner = training.learner
    failing = contextlib.ExitStack()
    if learner.runtime.pp_size == 1:

        def fail(*_: Any) -> None:
            raise Interrupted

        hook = training.bare[-1].decoder.layers[-1].mlp.register_forward_pre_hook(fail)
        failing.callback(hook.remove)
    streamed = learner.config.precision.shadow_streamed
    shadow = shadow_pass(training.bare, master=learner.masters.full, streamed=streamed)
    with failing, contextlib.suppress(Interrupted), shadow:
        learner.log_probs(training.batch)
        raise Interrupted


def stream(training: Training, masters: dict[int, Tensor]) -> dict[str, Tensor]:
    """HF tensors of the rounded masters."""
    learner = training.learner
    tensors = stream_hf(
        training.bare, learner.shape, learner.groups, source=lambda _, parameter: masters[id(parameter)].bfloat16()
    )
    return {name: tensor.clone() for name, tensor in tensors}


def check_first_ratio(name: str, training: Training, own: Tensor) -> None:
    """The first update's own forward gives the old log-probabilities, bit for bit: r = 1."""
    training.update()
    ratios = [torch.exp(s.log_probs.cpu() - own[s.index]) for s in training.scored]
    check(f"{name}: r = 1 on the first mini-batch", all((r == 1).all() for r in ratios))


def check_masters(name: str, training: Training, masters: dict[int, Tensor], *, fp8_param: bool) -> None:
    """Masters are whole, leave rounded to BF16, and live weights are lossy exactly where they should be."""
    parameters = [p for chunk in training.bare for p in chunk.parameters()]
    wrong = [p.shape for p in parameters if not same(training.learner.masters.full(p), masters[id(p)])]
    check(f"{name}: masters are the slices put together", not wrong, wrong)
    in_fp8 = {id(p) for p in training.fp8_weights}
    num_layers = sum(len(chunk.decoder.layers) for chunk in training.bare)
    check(f"{name}: which weights live in FP8", len(in_fp8) == (4 * num_layers if fp8_param else 0), len(in_fp8))
    lossy = {id(p) for p in parameters if not same(p.detach(), masters[id(p)].bfloat16())}
    check(f"{name}: live weights are lossy in FP8 alone", lossy == in_fp8, len(lossy ^ in_fp8))


def damage(training: Training) -> None:
    """Live FP8 weights and their codes become NaN."""
    with torch.no_grad():
        for parameter in training.fp8_weights:
            parameter.fill_(torch.nan)
            for operand in (parameter.fp8_codes.forward, parameter.fp8_codes.backward):
                operand.values.fill_(torch.nan)


def check_shadow(recipe: str, fp8_param: bool, layout: str, model: str) -> None:
    """Three updates in FP8, then shadow passes in every way, each compared and each leaving nothing behind."""
    name = f"{recipe} fp8_param={fp8_param} {layout} {model}"
    with started(config := precision_config(recipe, layout, fp8_param=fp8_param)) as runtime:
        training = Training.begin(config, runtime, model)
        learner = training.learner
        own = learner.log_probs(training.batch).log_probs
        if recipe == "tensorwise_delayed":
            training.update()
        else:
            check_first_ratio(name, training, own)
        training.update(2)
        fp8 = training.log_probs()  # also completes gathers that overlap with a forward pass
        masters = whole_masters(training)
        check_masters(name, training, masters, fp8_param=fp8_param)
        rounded = stream(training, masters)
        exported = {key: tensor.clone() for key, tensor in learner.stream_hf()}
        check(f"{name}: exports rounded masters", same(exported, rounded))

        bf16 = Training.begin(precision_config("bf16", layout), runtime, model, tensors=rounded)
        expected = bf16.log_probs()
        check(f"{name}: FP8 is not BF16", not torch.equal(fp8, expected))
        before = snapshot(training)

        def shadow_is_bf16(how: str) -> None:
            check(f"{name}: shadow {how}", same(training.shadow_log_probs(), expected))
            check(f"{name}: shadow {how} leaves nothing behind", same(snapshot(training), before))

        shadow_is_bf16("at once")
        interrupt(training)
        check(f"{name}: an interrupted shadow leaves nothing behind", same(snapshot(training), before))
        streamed = dataclasses.replace(config.precision, shadow_streamed=True)
        learner.config = dataclasses.replace(config, precision=streamed)
        shadow_is_bf16("streamed")
        interrupt(training)
        check(f"{name}: an interrupted streamed shadow leaves nothing behind", same(snapshot(training), before))
        if fp8_param:
            damage(training)
            before = snapshot(training)
            shadow_is_bf16("streamed, live weights damaged")
            learner.config = config
            shadow_is_bf16("at once, live weights damaged")
            if recipe != "tensorwise_delayed":  # whose scales have moved on
                learner.refresh_fp8_params()
                check(f"{name}: codes come from the masters", same(training.log_probs(), fp8))


def check_shadows(every: bool) -> None:
    """All of `shadow_cases`."""
    for case in shadow_cases(every):
        check_shadow(*case)


def check_reference(root: Path, recipe: str, layout: str) -> None:
    """A KL reference policy: the policy's first codes, for ever, in a learner whose own FP8 weights do not notice."""
    name = f"reference {recipe} {layout}"
    folder = root / name.replace(" ", "_")
    config = precision_config(recipe, layout, fp8_param=True)

    def scores(training: Training, reference: ReferencePolicy) -> Tensor:
        return training.learner.gather_tokens(reference.log_probs(training.batch))

    with started(config) as runtime:
        training = Training.begin(config, runtime)
        first, before = training.log_probs(), snapshot(training)
        reference = ReferencePolicy(training.learner, folder, resumes=False)
        check(f"{name}: making it leaves nothing behind", same(snapshot(training), before))
        check(f"{name}: the policy's own codes at the start", same(scores(training, reference), first))
        check(f"{name}: scoring leaves nothing behind", same(snapshot(training), before))
        training.update(2)
        check(f"{name}: stays when the policy moves", same(scores(training, reference), first))
        moved, before = training.log_probs(), snapshot(training)
        check(f"{name}: the policy has moved", not torch.equal(moved, first))
        check(f"{name}: still stays", same(scores(training, reference), first))
        check(f"{name}: scoring a moved policy leaves nothing behind", same(snapshot(training), before))

        resumed = Training.begin(config, runtime, tensors=weights("two layers", seed=1))
        own, before = resumed.log_probs(), snapshot(resumed)
        reference = ReferencePolicy(resumed.learner, folder, resumes=True)
        check(f"{name}: reading it leaves nothing behind", same(snapshot(resumed), before))
        check(f"{name}: comes back from disk", same(scores(resumed, reference), first))
        check(f"{name}: the other policy stays", same(resumed.log_probs(), own) and not torch.equal(own, first))


def check_checkpoint(root: Path, *, saved: str, loaded: str) -> None:
    """FP8 weights are derived from the loaded masters, not from what the model held before."""
    name = f"fp8_param checkpoint {saved} -> {loaded}"
    with started(config := precision_config("rowwise", saved, fp8_param=True)) as runtime:
        training = Training.begin(config, runtime)
        training.update(2)
        folder, before = save(training, root / name.replace(" ", "_").replace(">", "")), training.log_probs()
    with started(config := precision_config("rowwise", loaded, fp8_param=True)) as runtime:
        other = Training.begin(config, runtime, tensors=weights("two layers", seed=1))
        checkpoint.load(folder, other.learner)
        after = other.log_probs()
        close = same(after, before) if saved == loaded else (after - before).abs().mean() < 2e-3
        check(name, close, (after - before).abs().max())


def check_edge_layers() -> None:
    """`first_last_layers_bf16`: with FP8 in the middle two of four layers, over pipeline stages and virtual ones."""
    results = {}
    for edge in (0, 1):
        config = precision_config("tensorwise", "PP2 VPP2", fp8_param=True, first_last_layers_bf16=edge)
        with started(config) as runtime:
            training = Training.begin(config, runtime, "four layers")
            training.update()
            numbers = {
                layer.layer_number
                for chunk in training.bare
                for layer in chunk.decoder.layers
                if any(hasattr(p, "fp8_codes") for p in layer.parameters())
            }
            mine = {layer.layer_number for chunk in training.bare for layer in chunk.decoder.layers}
            check(
                f"edge layers {edge}: which layers are in FP8",
                numbers == mine & set(range(1 + edge, 5 - edge)),
                numbers,
            )
            results[edge] = training.log_probs()
    check("edge layers: make a difference", not torch.equal(results[0], results[1]))


def check_output_layer() -> None:
    """The quantised output layer: a difference to plain FP8, the same over tensor parallelism, off in a shadow pass."""
    results: dict[Any, Tensor] = {}
    for layout in ("DP2", "TP2"):
        for output_layer in (False, True):
            config = precision_config("rowwise", layout, dtype="fp32", output_layer=output_layer)
            with started(config) as runtime:
                training = Training.begin(config, runtime)
                own = training.learner.log_probs(training.batch).log_probs
                results[layout, output_layer] = training.log_probs()
                results[layout, output_layer, "shadow"] = training.shadow_log_probs()
                check_first_ratio(f"output layer {layout} {output_layer}", training, own)
    plain, quantised = results["DP2", False], results["DP2", True]
    check("output layer: makes a difference", not torch.allclose(plain, quantised, atol=1e-4))
    check("output layer: does not depend on TP", (results["TP2", True] - quantised).abs().median() < 1e-5)
    check("output layer: BF16 in a shadow pass", same(results["DP2", True, "shadow"], results["DP2", False, "shadow"]))
