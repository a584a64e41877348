"""What vLLM's workers know of requests: ids and log-probs as they are sampled, cut where the weights changed.

A worker never hears the driver's view of a request. It sees the scheduler's orders and what it samples itself, which
is enough for the whole sequence, also for its last token, which no forward is ever given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

NAN = float("nan")
MOST_KNOWN = 1 << 16
"""Requests that have ended, and prompts, that are remembered: a server may run for months."""


@dataclass
class Piece:
    """What a request runs under one weight version: its uid in the dump, its number among the request's pieces.

    ``prompt_len`` counts the tokens that this piece did not generate; ``sample`` numbers the responses to one prompt;
    ``prompt`` is the prompt's ids, empty where they are not known.
    """

    uid: str
    number: int
    version: int
    prompt_len: int = 0
    sample: int = 0
    prompt: tuple[int, ...] = ()


@dataclass
class Ended:
    """One whole sequence as a piece of a request leaves it: ids and, per token, the engine's log-prob (NaN: none)."""

    piece: Piece
    request: str
    tokens: np.ndarray
    logprobs: np.ndarray
    prompt_len: int


@dataclass
class _Request:
    """A request that has not ended."""

    piece: Piece
    prompt_len: int
    tokens: list[int]
    logprobs: list[float]
    stops: frozenset[int] = frozenset()
    longest: int = 1 << 62
    over: bool = False

    def put(self, position: int | None, tokens: Iterable[int], logprobs: Iterable[float]) -> None:
        """Note sampled tokens from a position on (None: at the end) until one of them ends the request.

        An engine that schedules ahead of its own results samples tokens past the end, and drops them.
        """
        if position is not None and self.prompt_len <= position < len(self.tokens):
            del self.tokens[position:], self.logprobs[position:]  # discarded by the engine, and sampled anew
            self.over = False
        while position is not None and len(self.tokens) < position:  # sampled while nothing was recorded
            self.tokens.append(-1)
            self.logprobs.append(NAN)
        for token, logprob in zip(tokens, logprobs):
            if self.over:
                return
            older = len(self.tokens) < self.piece.prompt_len  # arrived after the weights that took over
            self.tokens.append(int(token))
            self.logprobs.append(NAN if older else float(logprob))
            self.over = int(token) in self.stops or len(self.tokens) >= self.longest


@dataclass
class RequestLedger:
    """The requests of one model runner, from its scheduler's outputs and its own.

    ``max_model_len`` is where the engine ends any sequence. Not thread-safe: results that another thread receives are
    handed over by the caller. ``raw`` says that log-probs of prompts are of the distribution that all others are of.
    """

    max_model_len: int = 1 << 62
    raw: bool = True
    _open: dict[str, _Request] = field(default_factory=dict)
    _pieces: Counter[str] = field(default_factory=Counter)
    _samples: Counter[int] = field(default_factory=Counter)

    @property
    def busy(self) -> bool:
        """Return whether any request still waits for tokens."""
        return any(not request.over for request in self._open.values())

    def finish(self, ids: Iterable[str]) -> Iterator[Ended]:
        """Yield, and forget, the requests that the scheduler calls finished: stopped, aborted or cut."""
        for name in ids:
            request = self._open.pop(name, None)
            if request is not None and not request.over:  # those that are over were handed out when they were
                yield _ended(name, request)

    def renew(self, version: int, places: dict[str, int | None], known: dict[str, Any]) -> list[Ended]:
        """Cut every request where newer weights take over; return what the older ones generated.

        ``places`` (:func:`places_of`) are of the first pass under the newer weights, ``known`` the runner's own states:
        with them all ranks cut alike, also those that are not told, or not yet, what was sampled.
        """
        ended = []
        for name, request in self._open.items():
            if not request.over:
                if len(request.tokens) > request.piece.prompt_len or not request.piece.number:
                    ended.append(_ended(name, request))
                place, state = places.get(name), known.get(name)
                held = len(request.tokens) if state is None else int(state.num_tokens)
                self._continue(name, request, version, max(held, place or 0))
        return ended

    def schedule(self, output: Any, version: int, known: dict[str, Any]) -> tuple[dict[str, Piece], list[Ended]]:
        """Note what a pass will run; return each request's piece, and requests whose ids now name other ones.

        ``output`` is vLLM's SchedulerOutput; ``known`` the runner's own states by request id, from which requests are
        read that began while nothing was recorded.
        """
        ended = list(self.finish(new.req_id for new in output.scheduled_new_reqs))
        for new in output.scheduled_new_reqs:
            self._open[new.req_id] = self._begun(new, version)
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            if name not in self._open and name in known:
                self._open[name] = self._met(name, known[name], version)
            request = self._open.get(name)
            if request is None:
                continue
            held = len(request.tokens) - request.prompt_len
            counted = int(cached.num_output_tokens[at]) if len(cached.num_output_tokens) > at else held
            if counted < held:  # the scheduler took tokens back
                request.put(request.prompt_len + counted, (), ())
        return {name: self._open[name].piece for name in output.num_scheduled_tokens if name in self._open}, ended

    def sampled(self, output: Any, places: dict[str, int | None]) -> list[Ended]:
        """Note what a pass sampled (vLLM's ModelRunnerOutput); return the requests that are over with it.

        ``places`` has, per request of the pass, the position of its first sampled token (:func:`places_of`).
        """
        rows, ended = output.logprobs, []
        prompts = getattr(output, "prompt_logprobs_dict", None) or {}
        for at, name in enumerate(output.req_ids):
            request, tokens = self._open.get(name), _ids(output.sampled_token_ids, at)
            if request is None:
                continue
            if self.raw and prompts.get(name) is not None:
                _put_prompt(request, prompts[name])
            was = request.over
            if len(tokens):
                request.put(places.get(name), tokens, _logprobs(rows, at, tokens))
            if request.over and not was:
                ended.append(_ended(name, request))
        return ended

    def unfinished(self) -> list[Ended]:
        """Return every request that is not over, as far as it has come."""
        return [_ended(name, request) for name, request in self._open.items() if not request.over]

    def number_samples(self) -> None:
        """Number the responses to each prompt from 0 again."""
        self._samples.clear()

    def forget(self) -> None:
        """Drop all requests: nothing is recorded any more."""
        self._open.clear()

    def _begun(self, new: Any, version: int) -> _Request:
        prompt = [int(token) for token in new.prompt_token_ids or [-1] * _prompt_len(new)]
        return self._opened(new.req_id, prompt, [], new.sampling_params, version)

    def _met(self, name: str, state: Any, version: int) -> _Request:
        prompt = [int(token) for token in state.prompt_token_ids or [-1] * int(state.num_prompt_tokens)]
        return self._opened(name, prompt, state.output_token_ids, state.sampling_params, version)

    def _opened(self, name: str, prompt: list[int], generated: Iterable[int], params: Any, version: int) -> _Request:
        number, sample = next_number(self._pieces, name), next_number(self._samples, digest_of(prompt))
        tokens = [*prompt, *(int(token) for token in generated)]
        most = getattr(params, "max_tokens", None)
        stops = {getattr(params, "eos_token_id", None), *(getattr(params, "stop_token_ids", None) or ())} - {None}
        return _Request(
            Piece(f"{name}#{number}" if number else name, number, version, len(prompt), sample, tuple(prompt)),
            len(prompt),
            tokens,
            [NAN] * len(tokens),
            frozenset(int(token) for token in stops),
            min(self.max_model_len, len(prompt) + int(most) if most is not None else 1 << 62),
        )

    def _continue(self, name: str, request: _Request, version: int, held: int) -> None:
        """Begin the piece that newer weights generate: what older ones did is its prompt, without log-probs."""
        number, old = next_number(self._pieces, name), request.piece
        length = max(request.prompt_len, held)
        request.piece = Piece(f"{name}#{number}", number, version, length, old.sample, old.prompt)
        request.logprobs = [NAN] * len(request.tokens)


def places_of(output: Any, *, ahead: bool = False) -> dict[str, int | None]:
    """Return the position of the token that a pass will sample first, per request of vLLM's SchedulerOutput.

    Drafts of speculative decoding are scheduled too; the token comes before them. ``ahead``: the engine schedules
    drafts before it knows which of the last ones were accepted, so that no position is certain (None).
    """
    started = {new.req_id: int(new.num_computed_tokens) for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    started |= {name: int(count) for name, count in zip(cached.req_ids, cached.num_computed_tokens)}
    drafts = getattr(output, "scheduled_spec_decode_tokens", None) or {}
    return {
        name: None if (ahead and drafts) or name not in started else started[name] + count - len(drafts.get(name, ()))
        for name, count in output.num_scheduled_tokens.items()
    }


def digest_of(prompt: Iterable[int]) -> int:
    """Return the 64 bits that stand for a prompt's ids."""
    return xxhash.xxh3_64_intdigest(np.array(tuple(prompt), "<i8").data)


def next_number(counter: Counter[Any], key: Any) -> int:
    """Return how often a key was asked for before, and forget the one that was last asked for the longest ago."""
    count = counter.pop(key, 0)
    counter[key] = count + 1
    if len(counter) > MOST_KNOWN:
        del counter[next(iter(counter))]
    return count


def _prompt_len(new: Any) -> int:
    embeds = getattr(new, "prompt_embeds", None)
    return 0 if embeds is None else len(embeds)


def _ids(sampled: Any, at: int) -> list[int]:
    return list(sampled[at]) if sampled is not None and len(sampled) > at else []


def _logprobs(rows: Any, at: int, tokens: list[int]) -> list[float]:
    """Return the log-prob of each sampled token: the first column is that of the token itself."""
    if rows is None:
        return [NAN] * len(tokens)
    counts = getattr(rows, "cu_num_generated_tokens", None)
    first = at if counts is None else int(counts[at])
    ids, values = rows.logprob_token_ids[first : first + len(tokens)], rows.logprobs[first : first + len(tokens)]
    found = [float(v[0]) if int(i[0]) == token else NAN for i, v, token in zip(ids, values, tokens)]
    return found + [NAN] * (len(tokens) - len(found))


def _put_prompt(request: _Request, found: Any) -> None:
    """Note the log-probs of a prompt's tokens; the first one has none."""
    values = np.asarray(found.logprobs, np.float64)
    for position, value in enumerate(values[: request.prompt_len - 1, 0].tolist(), 1):
        request.logprobs[position] = value


def _ended(name: str, request: _Request) -> Ended:
    tokens, logprobs = np.array(request.tokens, np.int64), np.array(request.logprobs, np.float64)
    return Ended(request.piece, name, tokens, logprobs, request.piece.prompt_len)
