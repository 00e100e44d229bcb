"""Rollouts from vLLM servers over HTTP: token ids in, token ids and log-probabilities out.

One or many servers (replicas of the same model) answer; a prompt goes to the one with the fewest prompts in hand. What a
server may do wrong is bounded: it can be slow, die, restart with old weights, or answer nonsense, and then its prompts
go to another replica, a limited number of times, with growing pauses. An answer counts only if its server held the
wanted weights both before and after: nothing is ever trained on that came from others.

Weights travel through a file or a broadcast (`vllm_transfer.py`; `vllm_worker.py` is the other end). A server that failed
in the middle of an update holds no version and gets no prompts until it has been brought up to date: by rank 0, which
alone can, when its own prompts need it, and every few seconds for those of other ranks.

Left out on purpose: tokenisation. Prompts and answers are ids on both sides.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_calclip.batch import Completion, SamplingParams
from megatron_calclip.counter_random import splitmix64
from megatron_calclip.errors import EXIT_FAILED, UserError
from megatron_calclip.rollout.engine import Health, Request, WeightsReceipt
from megatron_calclip.rollout.fingerprint import fingerprint
from megatron_calclip.rollout.vllm_http import Server, ServerError
from megatron_calclip.rollout.vllm_transfer import Transfer

MAX_CONCURRENT_PROMPTS = 256
"""HTTP requests in flight from one rank; a server queues what it cannot batch."""
_FIRST_PAUSE_SECONDS = 0.5
_KEEPER_SECONDS = 10.0
"""Between two looks at the servers; each asks all their workers."""
_LOG_PROB_SLACK = 1e-3  # rounding may put a probability a little over 1


@dataclass(frozen=True)
class _Group:
    """Samples of one prompt: one HTTP request. vLLM seeds the i-th of them with seed + i."""

    indices: list[int]
    """Positions in the caller's list."""
    prompt: tuple[int, ...]
    seed: int


class VllmEngine:
    """Client of vLLM servers; every rank has one, rank 0's moves the weights.

    Args:
        urls: of the servers, at least one.
        transfer: how weights get to the servers.
        leader: whether this rank updates the servers.
        model: name under which the servers serve.
        vocab_size: ids beyond it are nonsense.
        timeout_seconds: for the answers to one prompt.
        num_retries: further attempts for a prompt whose server failed.
        recovery_seconds: how long to wait for a server when none is left.
        say: prints a line for people.
        revive: starts servers anew that were started for this engine and have ended.
        stop: ends them.
        sleeps: whether the servers share the learner's GPUs, see `release`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        transfer: Transfer,
        leader: bool,
        model: str,
        vocab_size: int,
        timeout_seconds: float,
        num_retries: int,
        recovery_seconds: float,
        say: Callable[[str], None],
        revive: Callable[[], None] = lambda: None,
        stop: Callable[[], None] = lambda: None,
        sleeps: bool = False,
    ) -> None:
        self.servers = [Server(url.rstrip("/")) for url in urls]
        self.transfer, self.leader, self.model, self.vocab_size = transfer, leader, model, vocab_size
        self.timeout_seconds, self.num_retries, self.recovery_seconds = timeout_seconds, num_retries, recovery_seconds
        self.say, self._revive, self._stop, self.sleeps = say, revive, stop, sleeps
        self._policy_version: int | None = None
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        """Held while weights go to servers, or servers are started, woken or put to sleep."""
        self._asleep = False
        self._closed = threading.Event()
        self._keeper: threading.Thread | None = None

    @property
    def policy_version(self) -> int | None:
        """See `RolloutEngine`."""
        return self._policy_version

    @property
    def works_beside_training(self) -> bool:
        """Servers are processes of their own."""
        return True

    def health(self) -> Health:
        """Ready when one server holds the newest weights."""
        current = self._current_servers()
        detail = f"{len(current)} of {len(self.servers)} servers serve policy version {self._policy_version}"
        return Health(bool(current), detail)

    def close(self) -> None:
        """Stop what was started for this engine."""
        self._closed.set()
        with self._moving:
            self._policy_version = None
            self._stop()

    # Weights.

    def load_weights(self, stream: Iterator[tuple[str, Tensor]], *, policy_version: int) -> WeightsReceipt:
        """Hand the stream to every server; see `RolloutEngine.load_weights`.

        Servers that fail are left out until they have been brought up to date. When all fail, all are tried again: those
        that were started for this run and have ended are started anew.

        Raises:
            UserError: when none of them could load it after all attempts.
        """
        if not self.leader:
            self._policy_version = None
            seen = {name: fingerprint(tensor) for name, tensor in stream}
            self._policy_version = policy_version
            return WeightsReceipt(policy_version, seen)  # what the servers hold is the leader's to see
        with self._moving:
            receipt = self._update(stream, policy_version)
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep_up_to_date, name="vllm keeper", daemon=True)
            self._keeper.start()
        return receipt

    def _update(self, stream: Iterator[tuple[str, Tensor]], policy_version: int) -> WeightsReceipt:
        """The leader's part of `load_weights`."""
        self._policy_version = None
        self.transfer.publish(
            {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in stream}, policy_version
        )
        for attempt in range(self.num_retries + 1):
            receipts, problems = self._deliver(policy_version, attempt)
            for problem in problems:
                self.say(f"rollout: {problem}")
            if receipts:
                break
        else:
            raise UserError(
                "rollout.vllm",
                f"no server could load the weights: {problems[0]}; look at their logs",
                exit_code=EXIT_FAILED,
            )
        self._policy_version, self._asleep = policy_version, False
        # Servers that differ from each other show as one that differs from what was sent.
        return next((receipt for receipt in receipts if receipt != receipts[0]), receipts[0])

    def _deliver(self, policy_version: int, attempt: int) -> tuple[list[WeightsReceipt], list[str]]:
        """One attempt at all servers, those that ended started anew: who holds the weights now, and what went wrong."""
        _pause(attempt)
        self._revive()
        problems = self._wake_up() + self.transfer.deliver(self.servers)
        receipts = []
        for server in self.servers:
            try:
                receipt = server.receipt()
            except ServerError as error:
                problems.append(str(error))
                continue
            if receipt is not None and receipt.policy_version == policy_version:
                receipts.append(receipt)
            else:
                problems.append(f"{server.url} holds no complete weights after its update")
        return receipts, problems

    def release(self) -> None:
        """Colocated servers sleep until the next `load_weights`. One that does not is a memory fault to come.

        Raises:
            UserError: when a server does not go to sleep.
        """
        if not (self.leader and self.sleeps):
            return
        with self._moving:
            self._asleep = True
            for server in self._current_servers():
                try:
                    server.sleep()
                except ServerError as error:
                    raise UserError(
                        "rollout.vllm.colocated",
                        f"{error}; sleep mode needs a GPU, use colocated: false without one",
                        exit_code=EXIT_FAILED,
                    ) from None

    def _wake_up(self) -> list[str]:
        """Wake colocated servers; what went wrong."""
        problems = []
        for server in self.servers if self.sleeps else ():
            try:
                server.wake_up()
            except ServerError as error:
                problems.append(str(error))
        return problems

    def _is_current(self, server: Server) -> bool:
        try:
            receipt = server.receipt()
        except ServerError:
            return False
        return receipt is not None and receipt.policy_version == self._policy_version

    def _current_servers(self) -> list[Server]:
        """Servers that hold the newest weights now."""
        return [] if self._policy_version is None else [server for server in self.servers if self._is_current(server)]

    def _bring_up_to_date(self) -> None:
        """Start servers anew that have ended, and give those that came back since the last update its weights."""
        if not self.leader:
            return
        with self._moving:
            if self._policy_version is None or self._asleep:
                return
            self._revive()
            for server in self.servers:
                try:
                    receipt = server.receipt()
                except ServerError as error:
                    self.say(f"rollout: {error}")
                    continue
                if receipt is None or receipt.policy_version != self._policy_version:
                    for problem in (problems := self.transfer.deliver([server])):
                        self.say(f"rollout: {problem}")
                    if not problems:
                        self.say(f"rollout: {server.url} is back, and has the weights of step {self._policy_version}")

    def _keep_up_to_date(self) -> None:
        """The leader's thread: another rank may wait for a server while this one has all its answers."""
        while not self._closed.wait(_KEEPER_SECONDS):
            try:
                self._bring_up_to_date()
            except UserError as error:  # a server does not come up: who waits for one gives up, and says so
                self.say(f"rollout: {error}")
                return

    def _servers_for_a_round(self, attempt: int) -> list[Server]:
        """Servers with the newest weights; waits for one when there is none, none after `recovery_seconds`."""
        deadline = time.monotonic() + self.recovery_seconds
        _pause(attempt)
        if attempt:
            self._bring_up_to_date()
        while not (servers := self._current_servers()) and time.monotonic() < deadline:
            self._bring_up_to_date()
            time.sleep(_FIRST_PAUSE_SECONDS)
        return servers

    # Sampling.

    def generate(self, requests: Sequence[Request], sampling: SamplingParams) -> list[Completion]:
        """Draw one completion for each request; see `RolloutEngine.generate`.

        Raises:
            ValueError: when no complete weights are loaded.
            UserError: when prompts stayed unanswered after all attempts.
        """
        if self._policy_version is None:
            raise ValueError("the vLLM servers cannot run: no complete weights; load complete weights first")
        body = {
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
        }

        def ask(server: Server, group: _Group) -> list[Completion]:
            answer = self._complete(
                server, {**body, "prompt": list(group.prompt), "n": len(group.indices), "seed": group.seed}
            )
            return self._completions(server, answer, len(group.indices), sampling)

        groups = _group(requests)
        results = self._distribute(groups, ask)
        completions: dict[int, Completion] = {}
        for group, answers in zip(groups, results, strict=True):
            completions |= zip(group.indices, answers, strict=True)
        return [completions[index] for index in range(len(requests))]

    def score(self, sequences: Sequence[Sequence[int]], *, temperature: float = 1.0) -> list[Tensor]:
        """See `RolloutEngine.score`; vLLM has no temperature for tokens that are given.

        Raises:
            ValueError: for a temperature that is not 1, or when no complete weights are loaded.
            UserError: when sequences stayed unanswered after all attempts.
        """
        if temperature != 1.0:
            raise ValueError(f"vLLM scores given tokens at temperature 1 only, not {temperature}")
        if self._policy_version is None:
            raise ValueError("the vLLM servers cannot run: no complete weights; load complete weights first")

        def ask(server: Server, tokens: Sequence[int]) -> Tensor:
            answer = self._complete(
                server, {"prompt": list(tokens), "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
            )
            try:
                entries = answer["choices"][0]["prompt_logprobs"]
                values = [0.0] + [float(e[str(t)]["logprob"]) for e, t in zip(entries[1:], tokens[1:], strict=True)]
            except (TypeError, KeyError, ValueError, IndexError) as error:
                raise ServerError(f"{server.url}: prompt log-probs cannot be read ({error!r})") from None
            return torch.tensor(values)

        return self._distribute(list(sequences), ask)

    def _distribute(self, jobs: Sequence[Any], ask: Callable[[Server, Any], Any]) -> list[Any]:
        """Let the servers do the jobs; what a failed or stale server did is done again by another."""
        results: dict[int, Any] = {}
        problems: list[str] = ["no server holds the newest weights"]
        for attempt in range(self.num_retries + 1):
            servers = self._servers_for_a_round(attempt)
            todo = [index for index in range(len(jobs)) if index not in results]
            if servers and todo:
                done, problems = self._round(servers, {index: jobs[index] for index in todo}, ask)
                still_current = {id(server) for server in servers if self._is_current(server)}
                results |= {index: result for index, (server, result) in done.items() if id(server) in still_current}
                stale = [server.url for server in servers if id(server) not in still_current]
                problems += [f"{url} lost its weights while it answered" for url in stale]
            if len(results) == len(jobs):
                return [results[index] for index in range(len(jobs))]
            for problem in problems[:1]:
                self.say(f"rollout: {len(jobs) - len(results)} prompts unanswered ({problem})")
        raise UserError(
            "rollout.vllm",
            f"{len(jobs) - len(results)} prompts have no answer after {self.num_retries + 1} attempts ({problems[0]}); "
            "look at the servers' logs. Nothing of this step was trained on",
            exit_code=EXIT_FAILED,
        )

    def _round(
        self, servers: list[Server], jobs: dict[int, Any], ask: Callable[[Server, Any], Any]
    ) -> tuple[dict[int, tuple[Server, Any]], list[str]]:
        """One attempt at every job: who did it with what result, and what went wrong. A server that failed gets no more."""
        done: dict[int, tuple[Server, Any]] = {}
        problems: list[str] = []
        usable = list(servers)

        def work(index: int, job: Any) -> None:
            with self._lock:
                if not usable:
                    return
                server = min(usable, key=lambda one: one.num_in_hand)
                server.num_in_hand += 1
            try:
                result = ask(server, job)
                with self._lock:
                    done[index] = server, result
            except ServerError as error:
                with self._lock:
                    problems.append(str(error))
                    if server in usable:
                        usable.remove(server)
            finally:
                with self._lock:
                    server.num_in_hand -= 1

        with ThreadPoolExecutor(min(MAX_CONCURRENT_PROMPTS, len(jobs))) as pool:
            list(pool.map(work, jobs.keys(), jobs.values()))
        return done, problems

    def _complete(self, server: Server, body: dict[str, Any]) -> Any:
        common = {"model": self.model, "logprobs": 0, "return_token_ids": True}
        return server.call("/v1/completions", common | body, timeout=self.timeout_seconds)

    def _completions(self, server: Server, answer: Any, count: int, sampling: SamplingParams) -> list[Completion]:
        """The answers to one prompt, if they are what was asked for.

        Raises:
            ServerError: otherwise.
        """
        assert self._policy_version is not None
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            if [choice["index"] for choice in choices] != list(range(count)):
                raise ServerError(f"{server.url} gave {len(choices)} answers in place of {count}")
            return [self._completion(server, choice, sampling) for choice in choices]
        except (TypeError, KeyError, ValueError) as error:
            raise ServerError(f"{server.url}: its answer cannot be read ({error!r})") from None

    def _completion(self, server: Server, choice: Any, sampling: SamplingParams) -> Completion:
        tokens = [int(token) for token in choice["token_ids"]]
        log_probs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        finished = choice["finish_reason"] == "stop"
        assert self._policy_version is not None
        sensible = (
            0 < len(tokens) == len(log_probs) <= sampling.max_new_tokens
            and all(0 <= token < self.vocab_size for token in tokens)
            and all(math.isfinite(value) and value <= _LOG_PROB_SLACK for value in log_probs)
            and choice["finish_reason"] in ("stop", "length")
            and (tokens[-1] in sampling.stop_token_ids if finished else len(tokens) == sampling.max_new_tokens)
        )
        if not sensible:
            raise ServerError(
                f"{server.url} gave an answer that makes no sense: {len(tokens)} tokens, {len(log_probs)} log-probs, "
                f"finish_reason {choice['finish_reason']!r}, last token {tokens[-1:]}, stop tokens {sampling.stop_token_ids}"
            )
        return Completion(tuple(tokens), tuple(min(value, 0.0) for value in log_probs), finished, self._policy_version)


def _pause(attempt: int) -> None:
    """None before the first attempt (0), then twice as long before each further one."""
    if attempt:
        time.sleep(_FIRST_PAUSE_SECONDS * 2 ** (attempt - 1))


def _group(requests: Sequence[Request]) -> list[_Group]:
    """Runs of neighbouring requests for the same prompt, which share one HTTP request."""
    groups = []
    runs = itertools.groupby(enumerate(requests), key=lambda item: (item[1].prompt_token_ids, item[1].seed_key))
    for (prompt, _), run in runs:
        members = list(run)
        groups.append(_Group([index for index, _ in members], prompt, _seed(members[0][1])))
    return groups


def _seed(request: Request) -> int:
    """A non-negative 32-bit seed from (seed, step, sample id)."""
    key = torch.zeros((), dtype=torch.int64)
    for word in (*request.seed_key, request.sample_id):
        key = splitmix64(key + word)
    return int(key & 0x7FFFFFFF)
