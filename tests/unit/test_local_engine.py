"""The embedded rollout engine against transformers' own generate, teacher forcing and hand-computed draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    TopPLogitsWarper,
)

from megatron_calclip.batch import Completion, SamplingParams
from megatron_calclip.rollout.engine import Request, RolloutEngine
from megatron_calclip.rollout.local import LocalEngine, _uniform, sample_tokens

SHAPE = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # spreads the logits of random weights, so that no two are nearly equal
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
}
PROMPTS = [(5, 6, 7), (9,), (11, 12, 13, 14, 15, 16), (5, 6, 7), (8, 3), (11, 12, 13, 14, 15, 17)]


def make_model(config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    return model


def make_engine(model: torch.nn.Module, **arguments: object) -> LocalEngine:
    engine = LocalEngine(model.config, device="cpu", **arguments)
    engine.load_weights(model.named_parameters(), policy_version=0)
    return engine


def make_requests(prompts: list[tuple[int, ...]], *, seed: int = 0, step: int = 0) -> list[Request]:
    return [Request(prompt, sample_id, (seed, step)) for sample_id, prompt in enumerate(prompts)]


def tokens_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def qwen3() -> torch.nn.Module:
    return make_model(CONFIGS["qwen3"]())


@pytest.fixture(scope="module")
def engine(qwen3: torch.nn.Module) -> LocalEngine:
    return make_engine(qwen3)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 100_000))
def test_uniform_numbers_stay_inside_the_open_interval(key: int, position: int) -> None:
    value = _uniform(torch.tensor([key]), position).item()
    assert 0 < value < 1
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    z = (key + (position + 1) * gamma) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    assert value == (((z ^ (z >> 31)) >> 12) + 0.5) / 2**52


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    values = torch.stack([_uniform(torch.arange(2000), position) for position in range(10)])
    counts = torch.histc(values.float(), 20, 0.0, 1.0)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, 99.9%
    correlation = torch.corrcoef(values) - torch.eye(10)
    assert correlation.abs().max() < 4.5 / math.sqrt(2000)


def draw(probabilities: list[float], uniform: list[float], **settings: float) -> tuple[list[int], Tensor]:
    logits = torch.tensor(probabilities).log().expand(len(uniform), -1)
    tokens, log_probs = sample_tokens(logits, torch.tensor(uniform, dtype=torch.float64), **settings)
    return tokens.tolist(), log_probs.exp()


PROBABILITIES = [0.125, 0.5, 0.0, 0.25, 0.125]  # cumulative: 0.125 0.625 0.625 0.875 1


def test_sample_tokens_inverts_the_cumulative_distribution() -> None:
    tokens, probabilities = draw(PROBABILITIES, [0.1, 0.13, 0.62, 0.63, 0.87, 0.88, 0.99])
    assert tokens == [0, 1, 1, 3, 3, 4, 4]
    torch.testing.assert_close(probabilities, torch.tensor([0.125, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]))


def test_sample_tokens_applies_the_temperature() -> None:
    # Temperature 0.5 squares: 1/64, 16/64, 0, 4/64, 1/64 of 22/64; cumulative 1/22 17/22 17/22 21/22 1.
    tokens, probabilities = draw(PROBABILITIES, [0.04, 0.05, 0.77, 0.78, 0.96], temperature=0.5)
    assert tokens == [0, 1, 1, 3, 4]
    torch.testing.assert_close(probabilities, torch.tensor([1.0, 16.0, 16.0, 4.0, 1.0]) / 22)


def test_sample_tokens_at_temperature_zero_takes_the_mode_and_reports_the_model() -> None:
    tokens, probabilities = draw(PROBABILITIES, [0.01, 0.99], temperature=0.0)
    assert tokens == [1, 1]
    torch.testing.assert_close(probabilities, torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.3, {1: 1.0}),
        (0.5, {1: 1.0}),  # 0.5 reaches 0.5
        (0.51, {1: 2 / 3, 3: 1 / 3}),
        (0.75, {1: 2 / 3, 3: 1 / 3}),
        (0.8, {0: 0.125, 1: 0.5, 3: 0.25, 4: 0.125}),  # tokens 0 and 4 tie: both or neither
    ],
)
def test_top_p_renormalises_over_the_nucleus(top_p: float, kept: dict[int, float]) -> None:
    uniform = [(i + 0.5) / 1000 for i in range(1000)]
    tokens, probabilities = draw(PROBABILITIES, uniform, top_p=top_p)
    assert {token: tokens.count(token) / 1000 for token in set(tokens)} == pytest.approx(kept, abs=2e-3)
    torch.testing.assert_close(probabilities, torch.tensor([kept[token] for token in tokens]))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_extreme_numbers_never_draw_an_impossible_token(top_p: float) -> None:
    # Zero probabilities first and last, and thousands of tokens, so that FP32 prefix sums would not end at 1.
    logits = torch.randn(2, 5000, generator=torch.Generator().manual_seed(0))
    logits[:, :3] = logits[:, -3:] = -torch.inf
    uniform = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    tokens, log_probs = sample_tokens(logits, uniform, top_p=top_p)
    assert log_probs.isfinite().all()
    if top_p == 1:
        assert tokens.tolist() == [3, 4996]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_spoils_itself_only(settings: dict[str, float], bad: float) -> None:
    logits = torch.tensor([[0.0, bad, 0.0], [0.0, 9.0, 0.0]])
    tokens, log_probs = sample_tokens(logits, torch.full((2,), 0.5, dtype=torch.float64), **settings)
    assert log_probs.isfinite().tolist() == [False, True]
    assert tokens[1] == 1
    assert 0 <= tokens[0] < 3


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=12), st.integers(0, 2**52 - 1))
def test_sample_tokens_agrees_with_float64_arithmetic(logits: list[float], bits: int) -> None:
    uniform = (2 * bits + 1) * 2.0**-53
    tokens, log_probs = sample_tokens(torch.tensor([logits]), torch.tensor([uniform], dtype=torch.float64))
    probabilities = torch.tensor([logits], dtype=torch.float32).double().softmax(-1)[0]
    upper = probabilities.cumsum(0)
    token = int(tokens)
    assert upper[token] - probabilities[token] - 1e-6 <= uniform <= upper[token] + 1e-6
    assert log_probs.item() == pytest.approx(probabilities[token].log().item(), abs=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_equal_transformers_generate(name: str) -> None:
    model = make_model(CONFIGS[name]())
    sampling = SamplingParams(40, temperature=0.0, stop_token_ids=(3, 20))
    completions = make_engine(model).generate(make_requests(PROMPTS), sampling)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor([prompt])
        expected = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=[3, 20],
        )
        assert completion.token_ids == tuple(expected[0, len(prompt) :].tolist())
    assert len({len(completion.token_ids) for completion in completions}) > 1  # rows really left the batch


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (0.0, 1.0)])
def test_log_probs_equal_teacher_forcing(name: str, temperature: float, top_p: float) -> None:
    model = make_model(CONFIGS[name]())
    sampling = SamplingParams(30, temperature=temperature, top_p=top_p, stop_token_ids=(3,))
    completions = make_engine(model).generate(make_requests(PROMPTS), sampling)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
        if top_p < 1:
            logits = TopPLogitsWarper(top_p)(None, logits)
        expected = logits.log_softmax(-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


def test_score_equals_a_forward_of_each_sequence_alone(qwen3: torch.nn.Module) -> None:
    sequences = [*PROMPTS, tuple(range(1, 31))]
    scores = make_engine(qwen3, max_batch_size=3).score(sequences, temperature=0.7)
    for sequence, score in zip(sequences, scores, strict=True):
        tokens = torch.tensor([sequence])
        with torch.no_grad():
            log_probs = (qwen3(tokens).logits[0, :-1] / 0.7).log_softmax(-1)
        expected = torch.cat([torch.zeros(1), log_probs.gather(1, tokens[0, 1:, None])[:, 0]])
        torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)


def test_samples_are_fixed_by_seed_step_and_sample_id(engine: LocalEngine) -> None:
    sampling = SamplingParams(12)
    first = engine.generate(make_requests(PROMPTS), sampling)
    torch.manual_seed(99)  # torch's own generator plays no part
    assert engine.generate(make_requests(PROMPTS), sampling) == first
    assert first[0].token_ids != first[3].token_ids  # same prompt, another sample id
    for seed, step in [(1, 0), (0, 1), (-1, 1)]:
        other = engine.generate(make_requests(PROMPTS, seed=seed, step=step), sampling)
        assert all(a != b for a, b in zip(tokens_of(other), tokens_of(first), strict=True))


@pytest.mark.parametrize("max_batch_size", [1, 2, 5, 100])
def test_samples_depend_neither_on_order_nor_on_batch_size(
    qwen3: torch.nn.Module, engine: LocalEngine, max_batch_size: int
) -> None:
    requests = make_requests(PROMPTS * 3)
    sampling = SamplingParams(16, temperature=0.9, top_p=0.95, stop_token_ids=(3, 4))
    expected = engine.generate(requests, sampling)
    order = torch.randperm(len(requests), generator=torch.Generator().manual_seed(1)).tolist()
    small = make_engine(qwen3, max_batch_size=max_batch_size)
    shuffled = small.generate([requests[i] for i in order], sampling)
    assert tokens_of(shuffled) == [expected[i].token_ids for i in order]
    for completion, i in zip(shuffled, order, strict=True):
        assert completion.log_probs == pytest.approx(expected[i].log_probs, abs=1e-5)


@pytest.mark.parametrize(("temperature", "top_p"), [(0.8, 1.0), (1.0, 0.6)])
def test_frequencies_follow_the_model(
    qwen3: torch.nn.Module, engine: LocalEngine, temperature: float, top_p: float
) -> None:
    num_samples, prompt = 4000, PROMPTS[0]
    completions = engine.generate(
        make_requests([prompt] * num_samples), SamplingParams(2, temperature=temperature, top_p=top_p)
    )
    drawn = torch.tensor(tokens_of(completions))
    favourite = int(drawn[:, 0].mode().values)
    after_favourite = drawn[drawn[:, 0] == favourite, 1]
    for context, tokens in [(prompt, drawn[:, 0]), ((*prompt, favourite), after_favourite)]:
        with torch.no_grad():
            logits = qwen3(torch.tensor([context])).logits[:, -1] / temperature
        if top_p < 1:
            logits = TopPLogitsWarper(top_p)(None, logits)
        expected = logits.softmax(-1)[0] * len(tokens)
        counts = torch.bincount(tokens, minlength=32)
        assert counts[expected == 0].sum() == 0
        common = expected >= 5  # the chi-square approximation needs 5 expected draws; the rest is one cell
        cells = torch.stack([torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, expected)])
        cells = cells[:, cells[1] > 0]
        assert ((cells[0] - cells[1]) ** 2 / cells[1]).sum() < 61.1  # 99.9% of chi-square with 31 degrees


def test_a_stop_token_ends_a_completion_and_belongs_to_it(engine: LocalEngine) -> None:
    # Stop tokens change nothing but where a completion ends, although finished rows leave the batch.
    requests = make_requests(PROMPTS * 4)
    free = engine.generate(requests, SamplingParams(24))
    stopped = engine.generate(requests, SamplingParams(24, stop_token_ids=(0, 7, 21)))
    for whole, cut in zip(free, stopped, strict=True):
        ends = [i for i, token in enumerate(whole.token_ids) if token in (0, 7, 21)]
        length = ends[0] + 1 if ends else 24
        assert cut.token_ids == whole.token_ids[:length]
        assert cut.log_probs == pytest.approx(whole.log_probs[:length], abs=1e-5)
        assert cut.finished == bool(ends)
        assert not whole.finished
    assert {cut.finished for cut in stopped} == {True, False}


def test_one_new_token(engine: LocalEngine) -> None:
    requests = make_requests(PROMPTS)
    long = engine.generate(requests, SamplingParams(5))
    short = engine.generate(requests, SamplingParams(1, stop_token_ids=(long[0].token_ids[0],)))
    assert tokens_of(short) == [completion.token_ids[:1] for completion in long]
    assert short[0].finished
    assert engine.generate([], SamplingParams(1)) == []


def test_bfloat16_reports_the_distribution_of_its_own_logits(qwen3: torch.nn.Module) -> None:
    engine = make_engine(qwen3, dtype=torch.bfloat16)
    completions = engine.generate(make_requests(PROMPTS), SamplingParams(8))
    scores = engine.score([(*p, *c.token_ids) for p, c in zip(PROMPTS, completions, strict=True)])
    for prompt, completion, score in zip(PROMPTS, completions, scores, strict=True):
        # BF16 keeps 8 bits: logits of up to about 8 are off by up to 2^-5, differently in the two forwards.
        assert completion.log_probs == pytest.approx(score[len(prompt) :].tolist(), abs=0.3)
    exact = make_engine(qwen3).score([PROMPTS[2]])[0]
    assert 1e-4 < (engine.score([PROMPTS[2]])[0] - exact).abs().max() < 0.3


class RoundingCache(DynamicCache):
    """transformers' own cache, which holds what an FP8 format can."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rounded = (states.to(self.dtype).float() for states in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


@pytest.mark.parametrize("kv_cache", ["fp8_e4m3", "fp8_e5m2"])
def test_an_fp8_cache_rounds_keys_and_values(qwen3: torch.nn.Module, kv_cache: str) -> None:
    engine = make_engine(qwen3, kv_cache=kv_cache)
    plain = make_engine(qwen3)
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kv_cache]
    sampling = SamplingParams(max_new_tokens=10, temperature=1.0)
    for prompt, completion in zip(PROMPTS, engine.generate(make_requests(PROMPTS), sampling), strict=True):
        cache = RoundingCache(dtype)
        argument = {engine._cache_argument: cache}
        logits = [qwen3(torch.tensor([prompt]), use_cache=True, **argument).logits[0, -1]]
        for token in completion.token_ids[:-1]:
            logits.append(qwen3(torch.tensor([[token]]), use_cache=True, **argument).logits[0, -1])
        expected = torch.log_softmax(torch.stack(logits), -1)[range(10), list(completion.token_ids)]
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)
        exact = plain.score([[*prompt, *completion.token_ids]])[0][len(prompt) :]
        assert (torch.tensor(completion.log_probs) - exact).abs().max() > 1e-3


def test_a_prompt_that_does_not_fit_is_refused(engine: LocalEngine) -> None:
    fits = make_requests([tuple([5] * 60)])
    assert len(engine.generate(fits, SamplingParams(4))[0].token_ids) == 4
    with pytest.raises(ValueError, match=r"sample 0: 60 tokens and 5 new ones exceed .* context of 64"):
        engine.generate(fits, SamplingParams(5))
    with pytest.raises(ValueError, match="sample 1 is empty"):
        engine.generate(make_requests([(5,), ()]), SamplingParams(5))
    with pytest.raises(ValueError, match=r"sample 0 has token ids in 5\.\.32, the model's vocabulary is 0\.\.31"):
        engine.generate(make_requests([(5, 32)]), SamplingParams(5))
    with pytest.raises(ValueError, match="context of 64"):
        engine.score([[5] * 65])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(0), "max_new_tokens is 0"),
        (SamplingParams(1, temperature=-1.0), "temperature is -1.0"),
        (SamplingParams(1, temperature=math.nan), "temperature is nan"),
        (SamplingParams(1, top_p=0.0), "top_p is 0.0"),
        (SamplingParams(1, top_p=1.5), "top_p is 1.5"),
    ],
)
def test_sampling_settings_out_of_range_are_refused(
    engine: LocalEngine, sampling: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate(make_requests(PROMPTS), sampling)


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        LocalEngine(CONFIGS["qwen3"](), device="cpu", dtype=torch.float16)
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        LocalEngine(CONFIGS["qwen3"](), device="cpu", max_batch_size=0)
    sliding = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="sliding_attention"):
        LocalEngine(sliding, device="cpu")


def test_construction_leaves_the_generator_and_the_configuration_alone() -> None:
    config = CONFIGS["qwen3"]()
    before = config.to_dict()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    LocalEngine(config, device="cpu", dtype=torch.bfloat16)
    assert torch.equal(torch.rand(3), expected)
    assert config.to_dict() == before


def test_new_weights_change_outputs_and_version(qwen3: torch.nn.Module) -> None:
    engine: RolloutEngine = make_engine(qwen3)
    requests, sampling = make_requests(PROMPTS), SamplingParams(8)
    old = engine.generate(requests, sampling)
    assert {completion.policy_version for completion in old} == {0} and not engine.works_beside_training
    other = make_model(CONFIGS["qwen3"](), seed=1)
    engine.load_weights(other.named_parameters(), policy_version=7)
    assert engine.policy_version == 7
    assert engine.health().ready
    new = engine.generate(requests, sampling)
    assert new == [
        Completion(c.token_ids, c.log_probs, c.finished, 7) for c in make_engine(other).generate(requests, sampling)
    ]
    assert tokens_of(new) != tokens_of(old)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda weights: weights.pop("model.norm.weight"),
            "1 weights are missing .* 'model.norm.weight' first",
        ),
        (lambda weights: weights.update(extra=torch.zeros(1)), "unexpected weight 'extra'"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.zeros(31)}),
            r"'model.norm.weight' has shape \(31,\) instead of \(32,\)",
        ),
    ],
)
def test_an_incomplete_load_stops_generation_until_a_complete_one(
    qwen3: torch.nn.Module, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    engine = make_engine(qwen3)
    weights = dict(qwen3.named_parameters())
    edit(weights)
    with pytest.raises(ValueError, match=message):
        engine.load_weights(iter(weights.items()), policy_version=1)
    assert engine.policy_version is None
    assert not engine.health().ready
    with pytest.raises(ValueError, match="policy version 1 did not complete"):
        engine.generate(make_requests(PROMPTS), SamplingParams(1))
    engine.load_weights(qwen3.named_parameters(), policy_version=2)
    assert engine.generate(make_requests(PROMPTS), SamplingParams(1))[0].policy_version == 2


def test_an_engine_without_weights_or_closed_refuses(qwen3: torch.nn.Module) -> None:
    engine = LocalEngine(qwen3.config, device="cpu")
    for call in (lambda: engine.generate([], SamplingParams(1)), lambda: engine.score([[1]])):
        with pytest.raises(ValueError, match="no weights have been loaded"):
            call()
    engine.close()
    engine.close()
    assert "closed" in engine.health().detail
    with pytest.raises(ValueError, match="closed"):
        engine.load_weights(qwen3.named_parameters(), policy_version=0)


def test_a_stream_that_breaks_off_counts_as_incomplete(qwen3: torch.nn.Module) -> None:
    def broken():
        yield from list(qwen3.named_parameters())[:3]
        raise ConnectionError("lost")

    engine = make_engine(qwen3)
    with pytest.raises(ConnectionError):
        engine.load_weights(broken(), policy_version=1)
    assert engine.policy_version is None


def test_tied_weights_may_arrive_once_or_twice_but_not_differ() -> None:
    model = make_model(CONFIGS["qwen2"]())
    engine = make_engine(model)  # named_parameters leaves the tied lm_head out
    expected = engine.generate(make_requests(PROMPTS), SamplingParams(4))
    both = model.state_dict()
    assert "lm_head.weight" in both
    engine.load_weights(iter(both.items()), policy_version=0)
    assert engine.generate(make_requests(PROMPTS), SamplingParams(4)) == expected
    both["lm_head.weight"] = both["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        engine.load_weights(iter(both.items()), policy_version=1)


def test_damaged_weights_are_reported(qwen3: torch.nn.Module) -> None:
    weights = {name: parameter.detach().clone() for name, parameter in qwen3.named_parameters()}
    weights["model.norm.weight"][0] = math.nan
    engine = LocalEngine(qwen3.config, device="cpu")
    engine.load_weights(iter(weights.items()), policy_version=3)
    for sampling in (SamplingParams(4), SamplingParams(4, top_p=0.5), SamplingParams(4, temperature=0.0)):
        with pytest.raises(ValueError, match="policy version 3 give logits that are not finite"):
            engine.generate(make_requests(PROMPTS), sampling)
