"""What vLLM's workers note of requests, from the orders and results that its scheduler and runner exchange.

Stand-ins for vLLM's SchedulerOutput and ModelRunnerOutput, with the fields and meanings of vLLM 0.32.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from probe.hooks.engines.vllm_requests import RequestLedger, places_of

NAN = float("nan")


def parameters(**more):
    return SimpleNamespace(**{"max_tokens": 16, "eos_token_id": 99, "stop_token_ids": [], **more})


def new(name, prompt, done=0, **more):
    """A request that is scheduled for the first time."""
    return SimpleNamespace(
        req_id=name, prompt_token_ids=prompt, num_computed_tokens=done, sampling_params=parameters(**more)
    )


def order(begun=(), going=(), finished=(), drafts=None, **scheduled):
    """A SchedulerOutput; ``going`` has (request, computed tokens, output tokens) of requests seen before."""
    names, computed, outputs = zip(*going) if going else ((), (), ())
    return SimpleNamespace(
        scheduled_new_reqs=list(begun),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(names), num_computed_tokens=list(computed), num_output_tokens=list(outputs)
        ),
        num_scheduled_tokens=scheduled,
        scheduled_spec_decode_tokens=drafts or {},
        finished_req_ids=set(finished),
    )


def result(logprobs=True, prompts=None, counts=None, **tokens):
    """A ModelRunnerOutput; the log-prob of token t is -t / 10."""
    flat = [t for sampled in tokens.values() for t in (sampled or [0])]
    table = SimpleNamespace(
        logprob_token_ids=np.array(flat)[:, None],
        logprobs=-np.array(flat)[:, None] / 10,
        cu_num_generated_tokens=counts,
    )
    return SimpleNamespace(
        req_ids=list(tokens),
        sampled_token_ids=list(tokens.values()),
        logprobs=table if logprobs else None,
        prompt_logprobs_dict=prompts or {},
    )


def step(ledger, ordered, sampled, version=0, known=None):
    """Run one pass; return every sequence that ended with it."""
    ended = list(ledger.finish(ordered.finished_req_ids))
    ended += ledger.schedule(ordered, version, known or {})[1]
    return ended + (ledger.sampled(sampled, places_of(ordered)) if sampled is not None else [])


def test_a_request_ends_with_its_last_token_that_no_forward_is_given():
    # GIVEN a prompt that runs in two chunks, of which only the second samples
    ledger = RequestLedger()
    assert not step(ledger, order([new("a", [5, 6, 7])], a=2), result(a=[]))
    assert not step(ledger, order(going=[("a", 2, 0)], a=1), result(a=[11]))
    assert ledger.busy
    # WHEN the end of text is sampled
    (ended,) = step(ledger, order(going=[("a", 3, 1)], a=1), result(a=[99]))
    # THEN the whole sequence is there with its log-probs, and the scheduler's word for it changes nothing
    assert ended.tokens.tolist() == [5, 6, 7, 11, 99] and ended.prompt_len == 3
    assert np.array_equal(ended.logprobs, [NAN, NAN, NAN, -1.1, -9.9], equal_nan=True)
    assert not ledger.busy
    assert not step(ledger, order(finished=["a"]), None)


@pytest.mark.parametrize(
    "more, kept",
    [
        ({"max_tokens": 2}, [11, 12]),
        ({"stop_token_ids": [11]}, [11]),
        ({"eos_token_id": None, "max_tokens": 3}, [11, 12, 99]),
    ],
)
def test_the_end_is_where_the_engine_puts_it(more, kept):
    ledger = RequestLedger()
    ended = step(ledger, order([new("a", [5], **more)], a=1), result(a=[11]))
    ended += step(ledger, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    ended += step(ledger, order(going=[("a", 2, 2)], a=1), result(a=[99]))
    ended += step(ledger, order(going=[("a", 3, 3)], a=1), result(a=[7]))
    assert [e.tokens.tolist() for e in ended] == [[5, *kept]]


def test_the_longest_sequence_is_the_engines():
    ledger = RequestLedger(max_model_len=3)
    (ended,) = step(ledger, order([new("a", [5, 6])], a=2), result(a=[11]))
    assert ended.tokens.tolist() == [5, 6, 11]


def test_what_an_engine_samples_ahead_of_a_stop_is_dropped():
    """With async scheduling the pass after the last token is ordered before that token is known."""
    ledger = RequestLedger()
    first, second, third = order([new("a", [5])], a=1), order(going=[("a", 1, 1)], a=1), order(going=[("a", 2, 2)], a=1)
    ledger.schedule(first, 0, {})
    ledger.schedule(second, 0, {})
    assert not ledger.sampled(result(a=[11]), places_of(first))
    ledger.schedule(third, 0, {})
    (ended,) = ledger.sampled(result(a=[99]), places_of(second))
    assert not ledger.sampled(result(a=[42]), places_of(third))
    assert ended.tokens.tolist() == [5, 11, 99]


def test_a_preempted_request_goes_on_where_it_was():
    """Its prompt and response run again as one prompt; only what comes after is sampled."""
    ledger = RequestLedger()
    step(ledger, order([new("a", [5, 6])], a=2), result(a=[11]))
    step(ledger, order(going=[("a", 2, 1)], a=1), result(a=[12]))
    # WHEN it is resumed from nothing, in two chunks
    step(ledger, order(going=[("a", 0, 2)], a=3), result(a=[]))
    step(ledger, order(going=[("a", 3, 2)], a=1), result(a=[13]))
    assert [e.tokens.tolist() for e in ledger.finish(["a"])] == [[5, 6, 11, 12, 13]]


def test_a_token_that_the_engine_takes_back_is_sampled_anew():
    ledger = RequestLedger()
    step(ledger, order([new("a", [5])], a=1), result(a=[11]))
    step(ledger, order(going=[("a", 1, 1)], a=1), result(a=[12]))
    step(ledger, order(going=[("a", 1, 1)], a=1), result(a=[13]))
    assert [e.tokens.tolist() for e in ledger.finish(["a"])] == [[5, 11, 13]]


def test_an_aborted_request_is_kept_as_far_as_it_came():
    ledger = RequestLedger()
    step(ledger, order([new("a", [5]), new("b", [6])], a=1, b=1), result(a=[11], b=[12]))
    ended = step(ledger, order(going=[("b", 1, 1)], finished=["a"], b=1), result(b=[13]))
    assert [e.tokens.tolist() for e in ended] == [[5, 11]]
    assert [e.tokens.tolist() for e in ledger.unfinished()] == [[6, 12, 13]]


def test_an_id_that_is_used_again_names_another_sequence():
    ledger = RequestLedger()
    step(ledger, order([new("a", [5])], a=1), result(a=[11]))
    ended = step(ledger, order([new("a", [6])], finished=["a"], a=1), result(a=[12]))
    ended += ledger.finish(["a"])
    assert [(e.piece.uid, e.tokens.tolist()) for e in ended] == [("a", [5, 11]), ("a#1", [6, 12])]


def test_responses_to_one_prompt_are_numbered():
    ledger = RequestLedger()
    begun = [new("0_a", [5]), new("1_a", [5]), new("b", [6])]
    pieces, _ = ledger.schedule(order(begun, **{"0_a": 1, "1_a": 1, "b": 1}), 0, {})
    assert [pieces[name].sample for name in ("0_a", "1_a", "b")] == [0, 1, 0]


def test_new_weights_cut_a_request_in_two_pieces():
    ledger = RequestLedger()
    step(ledger, order([new("a", [5, 6]), new("b", [7], max_tokens=1)], a=2, b=1), result(a=[11], b=[12]))
    # WHEN weights arrive, twice, between the first two passes
    older = ledger.renew(1, {}, {})
    assert ledger.renew(2, {}, {}) == []  # nothing was generated by the weights in between
    step(ledger, order(going=[("a", 2, 1)], a=1), result(a=[13]), version=2)
    (newer,) = ledger.finish(["a"])
    # THEN what each generated is its own: the other's tokens are prompt, their log-probs none
    assert [(e.piece.uid, e.piece.version, e.prompt_len, e.tokens.tolist()) for e in older] == [("a", 0, 2, [5, 6, 11])]
    assert (newer.piece.uid, newer.piece.version, newer.prompt_len) == ("a#2", 2, 3)
    assert newer.tokens.tolist() == [5, 6, 11, 13] and newer.request == "a"
    assert np.array_equal(newer.logprobs, [NAN, NAN, NAN, -1.3], equal_nan=True)


@pytest.mark.parametrize("told", ["at once", "late", "never"])
def test_every_rank_cuts_a_request_alike(told):
    """Some ranks hand out no output, and tokens arrive after the weights: the scheduler's word is the same for all."""
    ledger, second = RequestLedger(), order(going=[("a", 2, 1)], a=1)
    step(
        ledger, order([new("a", [5, 6]), new("b", [7, 8, 9, 3])], a=2, b=2), None if told == "never" else result(a=[11])
    )
    ledger.schedule(second, 0, {})
    if told == "at once":
        ledger.sampled(result(a=[12]), places_of(second))
    # WHEN weights arrive before the third pass, in the middle of b's prompt
    third = order(going=[("a", 3, 2), ("b", 2, 0)], a=1, b=2)
    state = SimpleNamespace(num_tokens=4)
    older = ledger.renew(1, places_of(third), {"a": state, "b": state})
    pieces, _ = ledger.schedule(third, 1, {})
    assert [(pieces[name].prompt_len, pieces[name].version) for name in "ab"] == [(4, 1), (4, 1)]
    assert {e.request for e in older} == {"a", "b"}
    # THEN what the older ones sampled has no log-prob among the newer one's, whenever it comes
    if told == "late":
        ledger.sampled(result(a=[12]), places_of(second))
    if told != "never":
        ledger.sampled(result(a=[13], b=[1]), places_of(third))
        ended = next(e for e in ledger.unfinished() if e.request == "a")
        assert ended.tokens.tolist() == [5, 6, 11, 12, 13] and np.isnan(ended.logprobs[:4]).all()
        assert ended.logprobs[4] == -1.3


def test_a_request_that_waits_is_cut_where_the_runner_has_it():
    ledger = RequestLedger()
    step(ledger, order([new("a", [5, 6])], a=2), None)
    ledger.renew(1, {}, {"a": SimpleNamespace(num_tokens=3)})
    # WHEN it runs again from its first token on, in two chunks
    pieces, _ = ledger.schedule(order(going=[("a", 0, 1)], a=2), 1, {})
    assert pieces["a"].prompt_len == 3


def test_a_request_that_began_unrecorded_is_read_from_the_runner():
    ledger = RequestLedger()
    state = SimpleNamespace(prompt_token_ids=[5, 6], output_token_ids=[11, 12], sampling_params=parameters())
    step(ledger, order(going=[("a", 3, 2)], a=1), result(a=[13]), known={"a": state})
    (ended,) = ledger.finish(["a"])
    assert ended.tokens.tolist() == [5, 6, 11, 12, 13] and ended.prompt_len == 2
    assert np.isnan(ended.logprobs[:4]).all() and ended.logprobs[4] == -1.3


def test_accepted_drafts_are_tokens_like_others():
    ledger = RequestLedger()
    step(ledger, order([new("a", [5]), new("b", [6])], a=1, b=1), result(a=[11], b=[12]))
    # GIVEN two drafts each, of which a accepts one and b none
    drafts = {"a": [21, 22], "b": [23, 24]}
    ordered = order(going=[("a", 1, 1), ("b", 1, 1)], drafts=drafts, a=3, b=3)
    step(ledger, ordered, result(counts=[0, 2], a=[21, 31], b=[32]))
    ended = {e.request: e for e in ledger.unfinished()}
    assert ended["a"].tokens.tolist() == [5, 11, 21, 31] and ended["b"].tokens.tolist() == [6, 12, 32]
    assert ended["a"].logprobs[1:].tolist() == [-1.1, -2.1, -3.1] and ended["b"].logprobs[1:].tolist() == [-1.2, -3.2]


@pytest.mark.parametrize("raw", [True, False])
def test_log_probs_of_a_prompt_are_kept_where_they_are_of_the_same_distribution(raw):
    ledger = RequestLedger(raw=raw)
    found = SimpleNamespace(logprobs=np.array([[-0.6, 0.0], [-0.7, 0.0]]))
    step(ledger, order([new("a", [5, 6, 7])], a=3), result(prompts={"a": found}, a=[11]))
    (ended,) = ledger.finish(["a"])
    expected = [NAN, -0.6, -0.7, -1.1] if raw else [NAN, NAN, NAN, -1.1]
    assert np.array_equal(ended.logprobs, expected, equal_nan=True)


def test_a_request_that_asks_for_no_log_probs_has_none():
    ledger = RequestLedger()
    step(ledger, order([new("a", [5])], a=1), result(logprobs=False, a=[11]))
    (ended,) = ledger.finish(["a"])
    assert ended.tokens.tolist() == [5, 11] and np.isnan(ended.logprobs).all()
