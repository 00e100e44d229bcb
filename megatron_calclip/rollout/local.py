"""Embedded rollout engine: a transformers causal LM in the trainer's process, sampled with a KV cache.

Why not `model.generate`: it is slower for small models, prefills the G samples of a prompt G times, goes on
computing rows that are finished, and its random numbers depend on what else is in the batch. Here

- each distinct prompt is prefilled once and its cache is copied to the samples that share it;
- prompts are padded on the RIGHT, where causal attention cannot see the padding, so prefill needs no mask;
  the gap between a short prompt and its first new token is masked while decoding;
- rows that met a stop token leave the batch, so that work shrinks as completions end;
- random numbers are counter based, a hash of (seed, step, sample id, token position): a sample depends on the
  rest of the batch only through floating-point rounding of its logits.

The model is an unmodified transformers module whose linears are `torch.nn.Linear`. Weights arrive by HF name
through `load_weights`, exactly as an external server gets them.

Left out on purpose: continuous batching, prefix sharing beyond equal prompts, paged and sliding-window
caches, and mixtures of experts, whose HF checkpoint names differ from the module's. That is what vLLM is for.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.cache_utils import Cache, DynamicLayer

from megatron_calclip.batch import Completion, SamplingParams
from megatron_calclip.counter_random import GOLDEN_GAMMA, signed, splitmix64
from megatron_calclip.rollout import fp8
from megatron_calclip.rollout.engine import Health, Request, WeightsReceipt
from megatron_calclip.rollout.fingerprint import fingerprint

_COMPACTION_SHARE = 1 / 8
"""The batch is compacted when this share of it is finished. Compacting copies the cache of the other rows,
which costs about as much as their attention in one decoding step."""

_CACHE_DTYPES = {"auto": None, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}

_PROBABILITY_UNIT = 2.0**-52
"""Probabilities are counted in this unit, far below FP32's rounding; a row's sum is exact in float64 too."""


def _random_keys(requests: Sequence[Request], device: torch.device) -> Tensor:
    """int64 [N]: the generator state of each request, hashed from seed, step and sample id."""
    words = torch.tensor([(*request.seed_key, request.sample_id) for request in requests], device=device)
    key = torch.zeros(len(requests), dtype=torch.int64, device=device)
    for word in words.unbind(1):
        key = splitmix64(key + word)
    return key


def _uniform(keys: Tensor, position: int) -> Tensor:
    """float64 [N], strictly between 0 and 1: each key's random number for one token position."""
    bits = (splitmix64(keys + signed(position * GOLDEN_GAMMA)) >> 12) & ((1 << 52) - 1)
    return (2 * bits + 1).to(torch.float64) * 2.0**-53


def sample_tokens(
    logits: Tensor, uniform: Tensor, *, temperature: float = 1.0, top_p: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution.

    Prefix sums run over integers, which makes them exact on every device: a token of probability 0 is never
    drawn, and the index never leaves the vocabulary. A probability below 2^-53 counts as 0.

    Args:
        logits: [N, V], any floating type; the softmax is FP32.
        uniform: float64 [N] strictly between 0 and 1; not used at temperature 0.
        temperature: divides the logits; 0 takes the most probable token.
        top_p: nucleus mass in (0, 1], applied after the temperature. The nucleus is the smallest set of most
            probable tokens whose mass reaches it, and any token exactly as probable as its last one, so that
            it does not depend on the order of ties.

    Returns:
        Tokens int64 [N] and their log-probabilities float32 [N] under the distribution that was drawn from:
        over the nucleus with top_p < 1, the model's own at temperature 0, NaN for logits that are not finite.
    """
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        tokens = log_probs.argmax(-1, keepdim=True)
        return tokens.squeeze(1), log_probs.gather(1, tokens).squeeze(1)
    # A NaN row (logits that are not finite) gets weight 0 throughout, draws the last token and stays NaN.
    weights = (log_probs.exp().double().nan_to_num(0.0) / _PROBABILITY_UNIT).round().to(torch.int64)
    total = weights.sum(-1, keepdim=True)
    if top_p < 1:
        descending = weights.sort(-1, descending=True).values
        mass_before = descending.cumsum(-1) - descending
        last = (mass_before < top_p * total.double()).sum(-1, keepdim=True) - 1
        weights = weights.where(weights >= descending.gather(1, last.clamp_(min=0)), 0)
    cumulative = weights.cumsum(-1)
    mass = cumulative[:, -1:]
    target = (uniform[:, None] * mass).to(torch.int64)  # 0 .. mass - 1
    tokens = torch.searchsorted(cumulative, target, right=True)  # the first token with cumulative > target
    tokens.clamp_(max=logits.shape[1] - 1)  # a NaN row
    chosen = log_probs.gather(1, tokens)
    if top_p < 1:
        chosen -= (mass.double() / total).log()
    return tokens.squeeze(1), chosen.squeeze(1)


class _CacheLayer(DynamicLayer):
    """Keys and values of one layer in buffers that grow by doubling.

    transformers' dynamic cache copies all of them for every token instead, and its static one attends over
    the whole buffer.
    """

    def __init__(self, max_length: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.is_initialized: bool = False
        self.max_length = max_length
        self.cache_dtype = dtype
        self.length = 0

    def get_seq_length(self) -> int:
        """Tokens held, padding included."""
        return self.length

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [rows, heads, new tokens, head dim]; return views of all keys and values so far."""
        end = self.length + key_states.shape[2]
        if self.cache_dtype is not None:
            key_states, value_states = (_rounded(states, self.cache_dtype) for states in (key_states, value_states))
        if not self.is_initialized:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
        else:
            if end > self.keys.shape[2]:
                self._reallocate(slice(None))
            self.keys[:, :, self.length : end] = key_states
            self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may be named several times."""
        self._reallocate(indices)

    def _reallocate(self, rows: Tensor | slice) -> None:
        capacity = min(2 * self.length, self.max_length)
        for name in ("keys", "values"):
            held = getattr(self, name)[rows, :, : self.length]
            buffer = held.new_empty(*held.shape[:2], capacity, held.shape[3])
            buffer[:, :, : self.length] = held
            setattr(self, name, buffer)


def _rounded(states: Tensor, dtype: torch.dtype) -> Tensor:
    """What an FP8 cache with a scale of 1 (vLLM's, where a checkpoint brings none) gives back; it saturates."""
    largest = torch.finfo(dtype).max
    return states.clamp(-largest, largest).to(dtype).to(states.dtype)


class LocalEngine:
    """Rollout engine that samples from a transformers model in this process.

    Args:
        hf_config: the model's transformers configuration: dense, full attention in every layer. It is copied.
        device: where the model lives.
        dtype: of weights and activations, torch.float32 or torch.bfloat16. Log-probabilities are always FP32.
        precision: `bf16` computes in `dtype` throughout; an FP8 scheme quantises the decoder's linears (`rollout.fp8`).
        max_batch_size: most completions decoded at once; more requests are served in several batches.
        kv_cache: values that the cache holds: those of `dtype` (`auto`) or of an FP8 format (emulated).

    Raises:
        ValueError: for a dtype, attention pattern or batch size that is not supported.
    """

    def __init__(
        self,
        hf_config: PreTrainedConfig,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        precision: Literal["bf16"] | fp8.Scheme = "bf16",
        max_batch_size: int = 256,
        kv_cache: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto",
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the local engine runs in float32 or bfloat16, not {dtype}; choose one of these")
        layer_types = sorted(set(getattr(hf_config, "layer_types", None) or ["full_attention"]))
        if layer_types != ["full_attention"]:
            raise ValueError(
                f"the local engine needs full attention in every layer, this model has {layer_types}; "
                "use the vllm engine"
            )
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; it must be at least 1")
        self._config = copy.deepcopy(hf_config)
        # The initial values get overwritten: do not spend the caller's random numbers on them.
        with torch.random.fork_rng(devices=[]):
            model = AutoModelForCausalLM.from_config(self._config, dtype=dtype)
        self._fp8 = precision != "bf16"
        if precision != "bf16":
            fp8.convert(model, precision)
        self._model: Any = model.to(device).eval().requires_grad_(False)
        self._device = torch.device(device)
        self._dtype = dtype
        self._max_batch_size = max_batch_size
        self._cache_dtype = _CACHE_DTYPES[kv_cache]
        # `past_key_values` in older transformers 5, renamed by 5.24; drop it with the support for those.
        parameters = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._policy_version: int | None = None
        self._not_ready = "no weights have been loaded"

    @property
    def policy_version(self) -> int | None:
        """Version of the loaded weights; None while there are none, or only a part of them."""
        return self._policy_version

    @property
    def works_beside_training(self) -> bool:
        """Not on a CPU: which kernels multiply FP32 matrices is a setting of the whole process there, and FP8 products set it."""
        return self._device.type != "cpu"

    def health(self) -> Health:
        """Whether `generate` can be called now."""
        ready = self._policy_version is not None
        return Health(ready, f"serves policy version {self._policy_version}" if ready else self._not_ready)

    def close(self) -> None:
        """Free the model."""
        self._model, self._policy_version, self._not_ready = None, None, "it is closed"

    def release(self) -> None:
        """Nothing to leave: caches go with the call that made them, and weights stay."""

    @torch.no_grad()
    def load_weights(self, stream: Iterator[tuple[str, Tensor]], *, policy_version: int) -> WeightsReceipt:
        """Copy a complete set of HF-named tensors into the model, cast to its dtype.

        After an error the engine holds a mixture of weights and refuses to generate until a complete load.

        Args:
            stream: (HF name, tensor) pairs; of tied weights one name is enough.
            policy_version: stored with every completion drawn from these weights.

        Returns:
            the policy version, and the fingerprint of each tensor in the dtype that it came in.

        Raises:
            ValueError: for an unknown or missing name, a wrong shape, a second tensor for the same parameter
                (tied or repeated) that differs from the first, or a closed engine.
        """
        if self._model is None:
            raise ValueError("the local engine cannot load weights: it is closed; make a new one")
        self._policy_version = None
        self._not_ready = f"loading the weights of policy version {policy_version} did not complete"
        parameters: dict[str, Tensor] = self._model.state_dict(keep_vars=True)
        loaded: dict[int, str] = {}  # id of a parameter, which tied names share -> the name that set it
        dtypes: dict[str, torch.dtype] = {}
        for name, tensor in stream:
            parameter = parameters.get(name)
            if parameter is None:
                raise ValueError(f"unexpected weight {name!r}: no such name in a {self._config.model_type} model")
            if tensor.shape != parameter.shape:
                shapes = f"{tuple(tensor.shape)} instead of {tuple(parameter.shape)}"
                raise ValueError(f"weight {name!r} has shape {shapes}")
            dtypes[name] = tensor.dtype
            if id(parameter) not in loaded:
                parameter.copy_(tensor)
                loaded[id(parameter)] = name
            elif not torch.equal(parameter, tensor.to(parameter)):
                raise ValueError(f"weight {name!r} differs from {loaded[id(parameter)]!r}, the same parameter")
        missing = [name for name, parameter in parameters.items() if id(parameter) not in loaded]
        if missing:
            raise ValueError(f"{len(missing)} weights are missing from the stream, {missing[0]!r} first")
        if self._fp8:
            fp8.quantize_weights(self._model)
        self._policy_version = policy_version
        # Of what the model holds now, as it came.
        return WeightsReceipt(policy_version, {name: fingerprint(parameters[name].to(dtypes[name])) for name in dtypes})

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Draw one completion for each request; see `RolloutEngine.generate`.

        Raises:
            ValueError: when no complete weights are loaded, for sampling settings out of range, for a prompt
                that is empty, has ids outside the vocabulary or does not fit into the context together with
                `max_new_tokens`, for logits that are not finite.
        """
        self._check_ready()
        _check_sampling(sampling)
        for request in requests:
            self._check_fits(request.prompt_token_ids, sampling.max_new_tokens, f"prompt of sample {request.sample_id}")
        # Similar lengths together waste little padding, and equal prompts become neighbours.
        prompts = [(len(request.prompt_token_ids), request.prompt_token_ids) for request in requests]
        order = sorted(range(len(requests)), key=prompts.__getitem__)
        completions: dict[int, Completion] = {}
        for start in range(0, len(order), self._max_batch_size):
            batch = order[start : start + self._max_batch_size]
            tokens, log_probs = self._decode([requests[i] for i in batch], sampling)
            completions |= zip(batch, self._completions(tokens, log_probs, sampling), strict=True)
        return [completions[i] for i in range(len(requests))]

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities of given tokens, teacher forced; see `RolloutEngine.score`."""
        self._check_ready()
        for index, sequence in enumerate(sequences):
            self._check_fits(sequence, 0, f"sequence {index}")
        scores: list[Tensor] = []
        for start in range(0, len(sequences), self._max_batch_size):
            batch = sequences[start : start + self._max_batch_size]
            tokens, _ = self._pad(batch)
            log_probs = torch.log_softmax(self._forward(tokens).float() / temperature, dim=-1)
            log_probs = log_probs[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
            rows = torch.nn.functional.pad(log_probs, (1, 0)).cpu()
            scores += [row[: len(sequence)] for row, sequence in zip(rows, batch, strict=True)]
        return scores

    def _decode(self, requests: Sequence[Request], sampling: SamplingParams) -> tuple[Tensor, Tensor]:
        """One batch: tokens int64 and log-probs float32 [N, max_new_tokens], junk behind a stop token."""
        num_new = sampling.max_new_tokens
        logits, cache, lengths, mask = self._prefill([r.prompt_token_ids for r in requests], num_new)
        longest = cache.get_seq_length()
        keys = _random_keys(requests, self._device)
        stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=self._device)
        all_tokens = torch.zeros(len(requests), num_new, dtype=torch.int64, device=self._device)
        all_log_probs = torch.zeros(len(requests), num_new, device=self._device)
        rows = torch.arange(len(requests), device=self._device)  # output row of each row of the batch
        alive = torch.ones_like(rows, dtype=torch.bool)
        for step in range(num_new):
            tokens, log_probs = sample_tokens(
                logits, _uniform(keys, step), temperature=sampling.temperature, top_p=sampling.top_p
            )
            all_tokens[rows, step], all_log_probs[rows, step] = tokens, log_probs
            alive &= ~torch.isin(tokens, stop)
            num_alive = int(alive.sum())
            if num_alive == 0 or step == num_new - 1:
                break
            if num_alive <= (1 - _COMPACTION_SHARE) * len(rows):
                keep = alive.nonzero().squeeze(1)
                cache.batch_select_indices(keep)
                rows, alive, tokens = rows[keep], alive[keep], tokens[keep]
                keys, lengths, mask = keys[keep], lengths[keep], mask[keep]
            logits = self._forward(
                tokens[:, None],
                cache=cache,
                position_ids=(lengths + step)[:, None],
                attention_mask=mask[..., : longest + step + 1],
            )[:, -1]
        return all_tokens, all_log_probs

    def _prefill(self, prompts: Sequence[tuple[int, ...]], num_new: int) -> tuple[Tensor, Cache, Tensor, Tensor]:
        """Run each distinct prompt once.

        Returns:
            For the N prompts: logits of the first new token [N, V]; the filled cache; prompt lengths int64
            [N]; the additive attention mask [N, 1, 1, longest + num_new - 1] of decoding (a step takes the
            columns so far), which is -inf between the end of a prompt and that of the longest.
        """
        distinct = {prompt: index for index, prompt in enumerate(dict.fromkeys(prompts))}
        sources = torch.tensor([distinct[prompt] for prompt in prompts], device=self._device)
        tokens, lengths = self._pad(list(distinct))
        longest = tokens.shape[1]
        num_columns = longest + num_new - 1  # the last new token is never fed back
        cache = Cache(
            layers=[_CacheLayer(num_columns, self._cache_dtype) for _ in range(self._config.num_hidden_layers)]
        )
        # Only a prompt's last token needs logits, but a model keeps the same positions for every row.
        kept, kept_index = (lengths - 1).unique(return_inverse=True)
        logits = self._forward(tokens, cache=cache, logits_to_keep=kept)
        logits = logits[torch.arange(len(distinct), device=self._device), kept_index]
        cache.batch_select_indices(sources)
        lengths = lengths[sources]
        columns = torch.arange(num_columns, device=self._device)
        mask = torch.zeros(len(prompts), num_columns, dtype=self._dtype, device=self._device)
        mask.masked_fill_((columns >= lengths[:, None]) & (columns < longest), -torch.inf)
        return logits[sources], cache, lengths, mask[:, None, None]

    def _forward(self, tokens: Tensor, *, cache: Cache | None = None, **arguments: Any) -> Tensor:
        """Logits [N, positions kept, V] of tokens [N, length], padded on the right."""
        arguments[self._cache_argument] = cache
        return self._model(tokens, use_cache=cache is not None, **arguments).logits

    def _pad(self, sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Tokens int64 [N, longest], padded on the right with 0 (any would do), and lengths int64 [N]."""
        lengths = [len(sequence) for sequence in sequences]
        padded = [[*sequence, *[0] * (max(lengths) - len(sequence))] for sequence in sequences]
        return torch.tensor(padded, device=self._device), torch.tensor(lengths, device=self._device)

    def _completions(self, tokens: Tensor, log_probs: Tensor, sampling: SamplingParams) -> list[Completion]:
        """Cut each row [max_new_tokens] behind its first stop token."""
        assert self._policy_version is not None
        if not log_probs.isfinite().all():
            raise ValueError(
                f"the weights of policy version {self._policy_version} give logits that are not finite; they "
                "are damaged, or training has diverged"
            )
        stop = torch.tensor(sampling.stop_token_ids, dtype=torch.int64, device=tokens.device)
        is_stop = torch.isin(tokens, stop)
        finished = is_stop.any(1)
        lengths = torch.where(finished, is_stop.int().argmax(1) + 1, tokens.shape[1])
        columns = (tokens.tolist(), log_probs.tolist(), lengths.tolist(), finished.tolist())
        return [
            Completion(tuple(row[:length]), tuple(values[:length]), done, self._policy_version)
            for row, values, length, done in zip(*columns, strict=True)
        ]

    def _check_ready(self) -> None:
        if self._policy_version is None:
            raise ValueError(f"the local engine cannot run: {self._not_ready}; load complete weights first")

    def _check_fits(self, tokens: Sequence[int], num_new: int, what: str) -> None:
        limit = self._config.max_position_embeddings
        if not tokens:
            raise ValueError(f"{what} is empty; give at least one token")
        if not 0 <= min(tokens) <= max(tokens) < self._config.vocab_size:
            raise ValueError(
                f"{what} has token ids in {min(tokens)}..{max(tokens)}, the model's vocabulary is "
                f"0..{self._config.vocab_size - 1}; use the tokenizer that belongs to the model"
            )
        if len(tokens) + num_new > limit:
            raise ValueError(
                f"{what}: {len(tokens)} tokens and {num_new} new ones exceed the model's context of {limit} "
                "(max_position_embeddings); shorten it or lower max_new_tokens"
            )


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
    if not sampling.temperature >= 0:
        raise ValueError(f"temperature is {sampling.temperature}; it must be 0 (greedy) or above")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p is {sampling.top_p}; it must be above 0 and at most 1")
