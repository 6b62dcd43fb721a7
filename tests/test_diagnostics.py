"""Estimators, scorer, draws, gradient probe, warnings and command line of diagnostics.py: against hand calculation, the
worked examples of the method's description, synthetic channels of known information, and slow float64 oracles."""

import copy
import doctest
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SMALL, VOCAB, make_model, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

import diagnostics
from diagnostics import (
    METRICS,
    TOP_K,
    Pair,
    bucket_gradients,
    collapse_metrics,
    collapse_warning,
    cross_logprobs,
    diagnose,
    draw_any_turns,
    draw_first_turns,
    early_warnings,
    moving_average,
    packs,
    quantile_buckets,
    read_rollouts,
    reasoning_regime,
    repeated_share,
    thinking_span,
)

NAN = float("nan")
LN2, LN3 = math.log(2), math.log(3)


def deterministic(test, examples=100):
    return settings(derandomize=True, database=None, deadline=None, max_examples=examples)(test)


# ------------------------------------------------------------------------------------------------ a slow oracle


def slow_marginal(row):
    """Log of the mean, shifted by the maximum."""
    top = max(row)
    return top + math.log(math.fsum(math.exp(score - top) for score in row) / len(row))


def slow_retrieval(rows, own, k):
    """Every order of the columns is as likely as any other; of equal scores the first in that order comes first."""
    hits, orders = 0, list(itertools.permutations(range(len(rows[0]))))
    for row, j in zip(rows, own, strict=True):
        hits += sum(j in sorted(order, key=lambda column, row=row: -row[column])[:k] for order in orders)
    return hits / len(orders) / len(rows)


def slow_metrics(scores, lengths, own):
    """All of METRICS for different prompts, one response at a time, from their definitions."""
    scores = [[float(score) for score in row] for row in scores]
    per_token = [[score / n for score in row] for row, n in zip(scores, lengths, strict=True)]
    mean, metrics = statistics.fmean, {"mi_upper_bound": math.log(len(scores[0]))}
    for rows, mi, suffix in ((per_token, "mi_estimate", ""), (scores, "mi_seq_estimate", "_seq")):
        matched = [row[j] for row, j in zip(rows, own, strict=True)]
        marginal = [slow_marginal(row) for row in rows]
        gains = [a - b for a, b in zip(matched, marginal, strict=True)]
        spread = statistics.pstdev(marginal)
        metrics |= {
            mi: mean(gains),
            f"conditional_entropy{suffix}_est": -mean(matched),
            f"reasoning_entropy{suffix}_est": -mean(marginal),
            f"marginal_std{suffix}": spread,
            f"mi_zscore{suffix}": mean(gain / (spread + 1e-3) for gain in gains),
        }
        if suffix:
            metrics["mi_token_estimate"] = mean(gain / n for gain, n in zip(gains, lengths, strict=True))
        else:
            metrics |= {"matched_log_prob_mean": mean(matched), "marginal_log_prob_mean": mean(marginal)}
    for k, suffix in ((1, ""), (2, "@2"), (4, "@4"), (8, "@8")):
        accuracy, chance = slow_retrieval(per_token, own, min(k, len(scores[0]))), min(k / len(scores[0]), 1)
        metrics |= {f"retrieval_accuracy{suffix}": accuracy, f"retrieval_chance_level{suffix}": chance}
        metrics[f"retrieval_above_chance{suffix}"] = accuracy - chance
    return metrics


# ------------------------------------------------------------------------------------------------ worked examples


HEALTHY = 10 * np.array([[-1, -1.5, -1.4], [-1.6, -0.9, -1.5], [-1.3, -1.4, -1.1]])
TEMPLATE = 10 * np.array([[-1.0] * 3, [-1.2] * 3, [-0.8] * 3])
TWO_GROUPS = [[-2, -3], [-4, -3.6], [-7.5, -5], [-12, -9]]
EXAMPLES = {
    "healthy": (HEALTHY, [10] * 3, [0, 1, 2]),
    "template": (TEMPLATE, [10] * 3, [0, 1, 2]),
    "two groups": (TWO_GROUPS, [2, 4, 5, 10], [0, 0, 1, 1]),
}


def test_collapse_metrics_match_the_healthy_example():
    metrics = collapse_metrics(*EXAMPLES["healthy"])
    expected = {
        "mi_estimate": 0.27254, "mi_upper_bound": 1.09861, "conditional_entropy_est": 1.0,
        "reasoning_entropy_est": 1.27254, "marginal_std": 0.01016, "retrieval_accuracy": 1.0,
        "retrieval_chance_level": 1 / 3, "retrieval_chance_level@2": 2 / 3, "retrieval_accuracy@2": 1.0,
        "matched_log_prob_mean": -1.0, "marginal_log_prob_mean": (-1.27582 - 1.28302 - 1.25878) / 3,
        "mi_seq_estimate": 1.03262, "conditional_entropy_seq_est": 10.0, "reasoning_entropy_seq_est": 11.03262,
        "marginal_std_seq": 0.74911, "mi_zscore_seq": 1.37663, "mi_token_estimate": 0.103262,
        "retrieval_above_chance": 2 / 3, "retrieval_above_chance@2": 1 / 3, "retrieval_chance_level@8": 1.0,
        "num_responses": 3, "num_prompts": 3,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=6e-6)
    assert metrics["mi_zscore"] == pytest.approx(24.41333, abs=6e-6)


def test_collapse_metrics_match_the_template_example():
    metrics = collapse_metrics(*EXAMPLES["template"])
    expected = {
        "mi_estimate": 0, "mi_seq_estimate": 0, "mi_token_estimate": 0, "conditional_entropy_est": 1,
        "reasoning_entropy_est": 1, "marginal_std": 0.1633, "marginal_std_seq": 1.63299, "mi_zscore": 0,
        "mi_zscore_seq": 0, "retrieval_accuracy": 1 / 3, "retrieval_above_chance": 0, "retrieval_accuracy@2": 2 / 3,
        "retrieval_above_chance@2": 0, "retrieval_accuracy@4": 1, "retrieval_above_chance@4": 0,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=6e-6)


def test_collapse_metrics_match_the_example_of_two_groups():
    metrics = collapse_metrics(*EXAMPLES["two groups"])
    expected = {
        "mi_estimate": 0.13142, "conditional_entropy_est": 0.975, "reasoning_entropy_est": 1.10642,
        "marginal_std": 0.11706, "mi_zscore": 1.11316, "retrieval_accuracy": 0.75, "retrieval_chance_level": 0.5,
        "retrieval_accuracy@2": 1, "retrieval_chance_level@2": 1, "mi_upper_bound": LN2,
        "marginal_log_prob_mean": (-1.21907 - 0.94875 - 1.21907 - 1.03879) / 4,
        "mi_seq_estimate": 0.35471, "conditional_entropy_seq_est": 5, "reasoning_entropy_seq_est": 5.35471,
        "marginal_std_seq": 2.72943, "mi_zscore_seq": 0.12991,
        # Gains .37989, -.21987, .61426, .64456 over the lengths.
        "mi_token_estimate": (0.37989 / 2 - 0.21987 / 4 + 0.61426 / 5 + 0.64456 / 10) / 4,
        "num_responses": 4, "num_prompts": 2,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=6e-6)


# ------------------------------------------------------------------------------------------------ collapse_metrics


@st.composite
def matrices(draw, most_prompts=4, least_prompts=2):
    """Scores in quarters, exact in binary and few different ones, so that many tie."""
    n, p = draw(st.integers(1, 6)), draw(st.integers(least_prompts, most_prompts))
    quarters = draw(st.lists(st.lists(st.integers(-12, -1), min_size=p, max_size=p), min_size=n, max_size=n))
    lengths = draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    own = draw(st.lists(st.integers(0, p - 1), min_size=n, max_size=n))
    return np.array(quarters) / 4, lengths, own


@deterministic
@given(matrices())
def test_collapse_metrics_equal_a_slow_oracle(case):
    metrics, (scores_NP, _, _) = collapse_metrics(*case), case
    counts = {"num_responses": len(scores_NP), "num_prompts": scores_NP.shape[1]}
    assert metrics == pytest.approx(slow_metrics(*case) | counts, rel=1e-9, abs=1e-9)
    assert set(metrics) == {*METRICS, *counts} and all(type(value) is float for value in metrics.values())


@deterministic
@given(matrices())
def test_entropy_of_thoughts_is_information_plus_conditional_entropy(case):
    metrics = collapse_metrics(*case)
    for mi, suffix in (("mi_estimate", ""), ("mi_seq_estimate", "_seq")):
        parts = metrics[mi] + metrics[f"conditional_entropy{suffix}_est"]
        assert metrics[f"reasoning_entropy{suffix}_est"] == pytest.approx(parts, abs=1e-6)


@deterministic
@given(matrices(), st.randoms(use_true_random=False))
def test_collapse_metrics_ignore_the_order_of_responses_and_of_prompts(case, random):
    scores_NP, lengths, own = case
    rows = random.sample(range(len(own)), len(own))
    columns = random.sample(range(scores_NP.shape[1]), scores_NP.shape[1])
    shuffled = scores_NP[np.ix_(rows, columns)], [lengths[n] for n in rows], [columns.index(own[n]) for n in rows]
    assert collapse_metrics(*shuffled) == pytest.approx(collapse_metrics(*case), rel=1e-9, abs=1e-9)


@deterministic
@given(matrices())
def test_mutual_information_never_exceeds_log_n(case):
    metrics = collapse_metrics(*case)
    for name in ("mi_seq_estimate", "mi_estimate"):
        assert metrics[name] <= math.log(case[0].shape[1]) + 1e-12


@deterministic
@given(matrices(most_prompts=9))
def test_mutual_information_is_zero_and_retrieval_at_chance_when_prompts_explain_alike(case):
    scores_NP, lengths, own = case
    alike_NP = np.repeat(scores_NP[:, :1], scores_NP.shape[1], axis=1)
    metrics = collapse_metrics(alike_NP, lengths, own)
    for name in ("mi_estimate", "mi_token_estimate", "mi_seq_estimate", "mi_zscore", "mi_zscore_seq"):
        assert metrics[name] == pytest.approx(0, abs=1e-9)
    for k, suffix in ((1, ""), (2, "@2"), (4, "@4"), (8, "@8")):
        assert metrics[f"retrieval_accuracy{suffix}"] == pytest.approx(min(k / scores_NP.shape[1], 1), abs=1e-12)
        assert metrics[f"retrieval_above_chance{suffix}"] == pytest.approx(0, abs=1e-12)


@deterministic
@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_mutual_information_is_log_n_when_each_prompt_has_its_own_responses(prompts, each, seed):
    own = np.repeat(np.arange(prompts), each)
    scores_NP = np.full((len(own), prompts), -1e4)
    scores_NP[np.arange(len(own)), own] = -np.random.default_rng(seed).random(len(own))
    metrics = collapse_metrics(scores_NP, [3] * len(own), own)
    assert metrics["mi_seq_estimate"] == pytest.approx(math.log(prompts), abs=1e-9)
    assert metrics["retrieval_accuracy"] == 1


def test_retrieval_shares_a_tie_out_evenly():
    # One prompt is better than the own one, two others tie with it: of the first 2 places 1 is left for 3.
    row = [[-2.0, -1.0, -2.0, -2.0, -9.0, -9.0]]
    metrics = collapse_metrics(row, [4], [2])
    names = [f"retrieval_accuracy{suffix}" for suffix in ("", "@2", "@4", "@8")]
    assert [metrics[name] for name in names] == pytest.approx([0, 1 / 3, 1, 1])
    # What differs by the rounding of a forward pass alone ties, either way; what differs by more does not.
    assert collapse_metrics([[-1.0, -1.0 - 5e-7]], [1], [0])["retrieval_accuracy"] == 0.5
    assert collapse_metrics([[-1.0, -1.0 - 5e-7]], [1], [1])["retrieval_accuracy"] == 0.5
    assert collapse_metrics([[-1.0, -1.0 - 1e-5]], [1], [1])["retrieval_accuracy"] == 0


def test_retrieval_ranks_by_the_share_of_each_token_not_by_another_row():
    assert collapse_metrics([[-9.0, -10.0], [-2.0, -1.0]], [100, 1], [0, 1])["retrieval_accuracy"] == 1


@deterministic
@given(matrices(), st.data())
def test_collapse_metrics_count_equal_prompts_once(case, data):
    scores_NP, lengths, own = case
    prompts = scores_NP.shape[1]
    # Some columns again, at the end and in front, and rows that name the copy as their own.
    twins = data.draw(st.lists(st.integers(0, prompts - 1), min_size=1, max_size=3))
    keys = [*twins, *range(prompts), *twins]
    places = [data.draw(st.sampled_from([c for c, key in enumerate(keys) if key == j])) for j in own]
    names = [("prompt", key) for key in keys]
    merged = collapse_metrics(scores_NP[:, keys], lengths, places, names)
    assert merged == pytest.approx(collapse_metrics(*case), rel=1e-9, abs=1e-9)
    assert merged["num_prompts"] == prompts and merged["mi_upper_bound"] == math.log(prompts)


def test_collapse_metrics_without_keys_takes_all_columns_for_different():
    assert collapse_metrics([[-1.0, -2.0, -2.0]], [1], [0])["mi_upper_bound"] == LN3
    assert collapse_metrics([[-1.0, -2.0, -2.0]], [1], [0], "abb")["mi_upper_bound"] == LN2


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("scores", "lengths", "own", "keys", "counts"),
    [
        ([[-1.0], [-2.0]], [1, 2], [0, 0], None, (2, 1)),
        ([[-1.0, -1.0]], [1], [1], [(3, 4), (3, 4)], (1, 1)),
        (np.zeros((0, 3)), [], [], None, (0, 3)),
        (np.zeros((0, 0)), [], [], [], (0, 0)),
    ],
)
def test_collapse_metrics_are_nan_when_there_is_nothing_to_compare(scores, lengths, own, keys, counts):
    metrics = collapse_metrics(scores, lengths, own, keys)
    assert (metrics.pop("num_responses"), metrics.pop("num_prompts")) == counts
    assert set(metrics) == set(METRICS) and all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize(
    ("scores", "lengths", "own", "keys", "complaint"),
    [
        ([-1.0, -2.0], [1, 1], [0, 0], None, r"cross_logprobs \(2,\) must be \(N, P\)"),
        ([[-1.0, -2.0]], [1, 1], [0], None, r"\(1, 2\) must be \(N, P\), with lengths \(2,\)"),
        ([[-1.0, -2.0]], [1], [0, 1], None, r"own_column \(2,\) of shape \(N,\)"),
        ([[-1.0, -2.0]], [1], [0], ["a"], "prompt_keys has 1 entries for 2 prompts"),
        ([[-1.0, -2.0]], [0], [0], None, "least length is 0"),
        ([[-1.0, -2.0]], [1], [2], None, "a column below 2; .* columns go from 2 to 2"),
        ([[-1.0, -2.0]], [1], [-1], None, "columns go from -1 to -1"),
        ([[-1.0, NAN]], [1], [0], None, "cannot be NaN or above 0, but one is nan; correct the scorer"),
        ([[-1.0, 0.01]], [1], [0], None, "cannot be NaN or above 0, but one is 0.01"),
    ],
)
def test_collapse_metrics_refuse_what_does_not_fit(scores, lengths, own, keys, complaint):
    with pytest.raises(ValueError, match=complaint):
        collapse_metrics(scores, lengths, own, keys)


def test_collapse_metrics_accept_rounding_above_zero():
    assert collapse_metrics([[1e-4, -5.0]], [1], [0])["retrieval_accuracy"] == 1


def test_collapse_metrics_leave_what_they_are_given_as_it_is():
    scores_NP, own_N = HEALTHY.copy(), np.array([0, 1, 2])
    collapse_metrics(scores_NP, np.array([10] * 3), own_N, ["a", "b", "a"])
    assert (scores_NP == HEALTHY).all() and own_N.tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------------ synthetic channels


def sample_channel(log_channel_XZ, each, seed):
    """`each` responses a prompt, their scores under all, and the gains that a direct calculation gives them."""
    rng, channel_XZ = np.random.default_rng(seed), np.exp(log_channel_XZ)
    own = np.repeat(np.arange(len(channel_XZ)), each)
    z_N = np.array([rng.choice(channel_XZ.shape[1], p=channel_XZ[x]) for x in own])
    gains = [math.log(channel_XZ[x, z] / channel_XZ[:, z].mean()) for x, z in zip(own, z_N, strict=True)]
    return log_channel_XZ[:, z_N].T, [2] * len(own), own, np.array(gains)


def exact_information(channel_XZ):
    """Of prompts that are equally likely, by enumeration."""
    joint_XZ = channel_XZ / len(channel_XZ)
    apart_XZ = joint_XZ.sum(1, keepdims=True) * joint_XZ.sum(0)
    return math.fsum(p * math.log(p / q) for p, q in zip(joint_XZ.flat, apart_XZ.flat, strict=True) if p)


def noisy_copies(prompts, error):
    return np.where(np.eye(prompts) > 0, math.log(1 - error), math.log(error / (prompts - 1)))


def test_channel_that_ignores_its_prompt_has_no_information():
    log_channel_XZ = np.tile(np.log([0.5, 0.25, 0.125, 0.125]), (5, 1))
    metrics = collapse_metrics(*sample_channel(log_channel_XZ, each=40, seed=0)[:3])
    assert metrics["mi_seq_estimate"] == pytest.approx(0, abs=1e-12)
    assert [metrics[f"retrieval_above_chance{k}"] for k in ("", "@2", "@4", "@8")] == pytest.approx([0] * 4, abs=1e-12)
    assert metrics["conditional_entropy_seq_est"] == pytest.approx(1.75 * LN2, abs=0.2)  # of 200 draws
    assert metrics["conditional_entropy_seq_est"] == metrics["reasoning_entropy_seq_est"]


def test_channel_that_copies_its_prompt_has_all_information():
    log_channel_XZ = np.where(np.eye(6) > 0, 0.0, -1000.0)
    scores_NP, lengths, own, _ = sample_channel(log_channel_XZ, each=3, seed=0)
    metrics = collapse_metrics(scores_NP, lengths, own)
    assert metrics["mi_seq_estimate"] == pytest.approx(math.log(6), abs=1e-12)
    assert metrics["conditional_entropy_seq_est"] == 0
    assert metrics["retrieval_accuracy"] == 1


@pytest.mark.parametrize(("prompts", "error"), [(2, 0.1), (8, 0.2), (8, 0.6), (16, 0.5)])
def test_estimate_of_a_noisy_channel_is_within_three_standard_errors(prompts, error):
    scores_NP, lengths, own, gains_N = sample_channel(noisy_copies(prompts, error), each=400, seed=0)
    noise = -(1 - error) * math.log(1 - error) - error * math.log(error / (prompts - 1))
    exact, standard_error = math.log(prompts) - noise, gains_N.std(ddof=1) / math.sqrt(len(gains_N))
    metrics = collapse_metrics(scores_NP, lengths, own)
    assert standard_error < 0.2 * exact  # so that the interval says something
    assert metrics["mi_seq_estimate"] == pytest.approx(exact, abs=3 * standard_error)
    assert metrics["mi_seq_estimate"] == pytest.approx(gains_N.mean(), abs=1e-9)
    assert metrics["reasoning_entropy_seq_est"] == pytest.approx(math.log(prompts), abs=1e-9)
    assert metrics["retrieval_accuracy"] == pytest.approx((np.argmax(scores_NP, axis=1) == own).mean())


@pytest.mark.parametrize("seed", range(4))
def test_estimate_of_an_enumerated_joint_is_within_its_confidence_interval(seed):
    channel_XZ = np.random.default_rng(seed).dirichlet([0.7] * 8, size=3)
    scores_NP, lengths, own, gains_N = sample_channel(np.log(channel_XZ), each=500, seed=100 + seed)
    exact, standard_error = exact_information(channel_XZ), gains_N.std(ddof=1) / math.sqrt(len(gains_N))
    assert 0.05 < exact < LN3 and standard_error < 0.2 * exact
    assert collapse_metrics(scores_NP, lengths, own)["mi_seq_estimate"] == pytest.approx(exact, abs=3 * standard_error)


def test_template_of_high_entropy_has_no_information():
    # A thousand texts, all equally likely after any prompt.
    own, log_prob = np.arange(64) % 8, -math.log(1000)
    metrics = collapse_metrics(np.full((64, 8), log_prob), [5] * 64, own)
    assert metrics["conditional_entropy_seq_est"] == pytest.approx(math.log(1000))
    assert metrics["mi_seq_estimate"] == pytest.approx(0, abs=1e-12)
    assert metrics["retrieval_accuracy"] == pytest.approx(1 / 8)
    verdict = (metrics["conditional_entropy_est"], metrics["mi_seq_estimate"], metrics["mi_upper_bound"])
    assert reasoning_regime(*verdict, start_entropy=math.log(1000) / 5, start_mi=1.0) == "template_collapse"


def test_estimate_of_a_small_sample_may_dip_below_zero():
    # Three prompts that say their own word with .6; both samples happen to be slips, of .2.
    scores = np.log([[0.6, 0.2, 0.2], [0.2, 0.6, 0.2]])
    metrics = collapse_metrics(scores, [1, 1], [1, 2])
    assert metrics["mi_seq_estimate"] == pytest.approx(math.log(3 * 0.2))
    assert metrics["mi_seq_estimate"] < 0


# ------------------------------------------------------------------------------------------------ moving_average


def test_moving_average_matches_hand_values():
    average, seen = None, []
    for value in (0.5, 0.3, 0.1):
        average = moving_average(average, value)
        seen.append(average)
    assert seen == pytest.approx([0.5, 0.48, 0.442])
    assert moving_average(1.0, 0.0, decay=0.5) == 0.5
    assert moving_average(0.0, 1.0) == pytest.approx(0.1)  # an average of 0 is one


def test_moving_average_passes_over_nan():
    assert math.isnan(moving_average(None, NAN))
    assert moving_average(0.5, NAN) == 0.5
    assert moving_average(NAN, 0.3) == 0.3
    assert math.isnan(moving_average(NAN, NAN))


# ------------------------------------------------------------------------------------------------ reasoning_regime


@pytest.mark.parametrize(
    ("entropy", "mi", "start_mi", "regime"),
    [
        # The entropy starts at 2, so it is low below 1; ln N is 4, so I is low below .2 whatever its start.
        (2.0, 1.0, 1.0, "diverse"),
        (1.0, 0.5, 1.0, "diverse"),  # on both boundaries
        (1.0, 0.499, 1.0, "template_collapse"),
        (0.999, 0.5, 1.0, "compressed"),
        (0.999, 0.499, 1.0, "low_entropy_collapse"),
        (9.0, 0.0, 1.0, "template_collapse"),
        (1.0, 0.2, 0.1, "diverse"),  # the floor counts where the start was low
        (1.0, 0.199, 0.1, "template_collapse"),
        (0.5, 0.2, -0.3, "compressed"),
        (0.5, -0.1, -0.3, "low_entropy_collapse"),  # above half of its start, and nothing all the same
        (1.0, 0.3, 0.7, "template_collapse"),  # the share of the start counts where it is above the floor
    ],
)
def test_reasoning_regime_compares_with_the_start_and_with_log_n(entropy, mi, start_mi, regime):
    assert reasoning_regime(entropy, mi, mi_bound=4.0, start_entropy=2.0, start_mi=start_mi) == regime


@pytest.mark.parametrize(
    ("thresholds", "regime"),
    [
        ({}, "low_entropy_collapse"),
        ({"low_entropy": 0.25}, "template_collapse"),
        ({"low_entropy": 0.251}, "low_entropy_collapse"),
        ({"low_mi": 0.3}, "compressed"),
        ({"low_mi": 0.301}, "low_entropy_collapse"),
        ({"low_mi": 0.3, "floor": 0.075}, "compressed"),
        ({"low_mi": 0.3, "floor": 0.076}, "low_entropy_collapse"),
        ({"low_entropy": 0.0, "low_mi": 0.0, "floor": 0.0}, "diverse"),
    ],
)
def test_reasoning_regime_heeds_each_threshold(thresholds, regime):
    assert reasoning_regime(0.5, 0.3, mi_bound=4.0, start_entropy=2.0, start_mi=1.0, **thresholds) == regime


@pytest.mark.parametrize("position", range(5))
def test_reasoning_regime_refuses_nan(position):
    numbers = [1.0] * 5
    numbers[position] = NAN
    with pytest.raises(ValueError, match="needs five numbers, and one of .*nan"):
        reasoning_regime(*numbers)


# ------------------------------------------------------------------------------------------------ repeated_share


def slow_repeated_share(ids, longest_phrase, times):
    """Every slice, every period."""
    most = 0
    for start, end in itertools.combinations(range(len(ids) + 1), 2):
        for phrase in range(1, longest_phrase + 1):
            repeats = all(ids[t] == ids[t - phrase] for t in range(start + phrase, end))
            if end - start >= times * phrase and repeats:
                most = max(most, end - start)
    return most / len(ids) if ids else 0.0


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([7], 0.0),
        ([7] * 3, 0.0),  # below four times
        ([7] * 4, 1.0),
        ([7] * 50, 1.0),
        ([1, 2, *[7, 8, 9] * 5, 3, 4, 5], 15 / 20),
        ([7, 8, 9] * 3, 0.0),
        ([7, 8, 9] * 4 + [7], 1.0),  # and a piece of the fifth time
        ([1, 2, 3, 4, 5, 6, 7, 8] * 4, 1.0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9] * 4, 0.0),  # longer than the longest phrase
        ([7] * 4 + [1, 2] * 4 + [9] * 4, 8 / 16),  # the longest of three
        ([7, 7, 7, 1, 7, 7, 7], 0.0),
        ([2] + [7] * 4, 4 / 5),
        ([7] * 4 + [2], 4 / 5),
    ],
)
def test_repeated_share_matches_hand_cases(ids, share):
    assert repeated_share(ids) == share


def test_repeated_share_heeds_its_options():
    assert repeated_share([1, 2, 3] * 4, longest_phrase=2) == 0
    assert repeated_share([1, 2, 3] * 3, times=3) == 1
    assert repeated_share([1, 2, 3] * 4, longest_phrase=3, times=5) == 0


@deterministic
@given(st.lists(st.integers(0, 2), max_size=14), st.integers(1, 4), st.integers(2, 4))
def test_repeated_share_equals_brute_force(ids, longest_phrase, times):
    assert repeated_share(ids, longest_phrase, times) == slow_repeated_share(ids, longest_phrase, times)


@deterministic
@given(
    st.lists(st.integers(0, 1), max_size=4), st.lists(st.integers(0, 1), min_size=1, max_size=4), st.integers(2, 6),
    st.lists(st.integers(0, 1), max_size=4),
)  # fmt: skip
def test_repeated_share_equals_brute_force_around_a_phrase(before, phrase, repeats, after):
    ids = before + phrase * repeats + after
    assert repeated_share(ids, 3, 3) == slow_repeated_share(ids, 3, 3)


# ------------------------------------------------------------------------------------------------ cross_logprobs


def random_ids(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]


PROMPTS, RESPONSES = random_ids((1, 6, 17)), random_ids((1, 2, 9, 4, 21), seed=1)


@torch.no_grad()
def teacher_forced(model, prompts, responses, temperature=1.0):
    """Each concatenation alone, in the precision of the model; the softmax in float64."""
    scores_NP = np.zeros((len(responses), len(prompts)))
    for (n, response), (p, prompt) in itertools.product(enumerate(responses), enumerate(prompts)):
        ids = torch.tensor([prompt + response])
        logprobs_TV = (model(input_ids=ids, use_cache=False).logits[0].double() / temperature).log_softmax(-1)
        taken = logprobs_TV[len(prompt) - 1 : -1].gather(-1, torch.tensor(response)[:, None])
        scores_NP[n, p] = taken.sum().item()
    return scores_NP


@torch.no_grad()
def padded(model, prompts, responses, side):
    """The same in one batch, padded on one side, each row with positions from 0."""
    rows = [prompt + response for response in responses for prompt in prompts]
    longest = max(map(len, rows))
    ids_BT, mask_BT = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest).long()
    for b, row in enumerate(rows):
        at = slice(longest - len(row), longest) if side == "left" else slice(0, len(row))
        ids_BT[b, at], mask_BT[b, at] = torch.tensor(row), 1
    positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
    logprobs_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT).logits.log_softmax(-1)
    scores = []
    for b, (response, prompt) in enumerate(itertools.product(responses, prompts)):
        start = len(prompt) + (longest - len(rows[b]) if side == "left" else 0)
        scores.append(sum(logprobs_BTV[b, start + t - 1, token].item() for t, token in enumerate(response)))
    return np.array(scores).reshape(len(responses), len(prompts))


def double(model):
    return copy.deepcopy(model).double()


@pytest.fixture(scope="module")
def exact(model):
    """(N, P) in float64."""
    return teacher_forced(double(model), PROMPTS, RESPONSES)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_what_teacher_forcing_says(model, exact, side):
    assert np.ptp(exact / [[len(z)] for z in RESPONSES]) > 1  # the scores tell prompts apart
    assert padded(double(model), PROMPTS, RESPONSES, side) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("tied", [False, True])
def test_cross_logprobs_equal_plain_teacher_forcing(attention, temperature, tied):
    model = make_model(tie_word_embeddings=tied)
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    expected_NP = teacher_forced(double(model), PROMPTS, RESPONSES, temperature)
    scores_NP = cross_logprobs(model, PROMPTS, RESPONSES, temperature)
    assert scores_NP.shape == (5, 3) and scores_NP.dtype == np.float64
    assert scores_NP == pytest.approx(expected_NP, abs=1e-4)


@pytest.mark.parametrize(
    "family",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SMALL, initializer_range=0.25)),
        lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None, initializer_range=0.25)),
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, initializer_range=0.25, n_positions=64)
        ),
    ],
    ids=["llama", "mistral", "gpt2"],
)
def test_cross_logprobs_equal_plain_teacher_forcing_in_other_families(family):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family().eval()
    expected_NP = teacher_forced(double(model), PROMPTS, RESPONSES)
    assert cross_logprobs(model, PROMPTS, RESPONSES) == pytest.approx(expected_NP, abs=1e-4)


def errors_per_token(scores_NP, exact_NP):
    return (scores_NP - exact_NP) / [[len(z)] for z in RESPONSES]


def rms(errors):
    return float(np.sqrt((errors**2).mean()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_cross_logprobs_in_bfloat16_err_no_more_than_plain_teacher_forcing_does(attention):
    """Logits of this model reach 8, where a step of bfloat16 is 1/32: a few of them for each token, the same as in a
    plain forward pass, and of either sign."""
    rounded = make_model().bfloat16()
    rounded.set_attn_implementation(attention)
    exact_NP = teacher_forced(double(rounded), PROMPTS, RESPONSES)
    plain = errors_per_token(teacher_forced(rounded, PROMPTS, RESPONSES), exact_NP)
    packed = errors_per_token(cross_logprobs(rounded, PROMPTS, RESPONSES), exact_NP)
    assert np.abs(packed).max() < 3 / 32 and rms(packed) < 0.03
    assert rms(packed) < 1.5 * rms(plain)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_cross_logprobs_under_autocast_err_no_more_than_plain_teacher_forcing_does(model, exact, attention):
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    with torch.autocast("cpu", torch.bfloat16):
        packed = errors_per_token(cross_logprobs(model, PROMPTS, RESPONSES), exact)
        plain = errors_per_token(teacher_forced(model, PROMPTS, RESPONSES), exact)
    assert np.abs(packed).max() < 3 / 32 and rms(packed) < 0.03
    assert rms(packed) < 1.5 * rms(plain)
    assert np.abs(packed).max() > 1e-4  # it was bfloat16


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 24, 40, 60, 100, 10_000])
@pytest.mark.parametrize("pack", [1, 5, 21, 256])
def test_cross_logprobs_do_not_depend_on_how_the_work_is_cut(model, exact, monkeypatch, max_tokens, pack):
    monkeypatch.setattr(diagnostics, "PACK", pack)
    assert cross_logprobs(model, PROMPTS, RESPONSES, max_tokens=max_tokens) == pytest.approx(exact, abs=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_cross_logprobs_do_not_depend_on_the_order(model, exact, monkeypatch, seed):
    monkeypatch.setattr(diagnostics, "PACK", 12)
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(len(RESPONSES)), rng.permutation(len(PROMPTS))
    scores_NP = cross_logprobs(model, [PROMPTS[p] for p in columns], [RESPONSES[n] for n in rows], max_tokens=70)
    assert scores_NP == pytest.approx(exact[np.ix_(rows, columns)], abs=1e-4)


def test_cross_logprobs_of_one_response_do_not_depend_on_the_others(model, exact):
    assert cross_logprobs(model, PROMPTS[1:2], RESPONSES[3:4]) == pytest.approx(exact[3:4, 1:2], abs=1e-4)
    twice_NP = cross_logprobs(model, PROMPTS[1:] * 2, RESPONSES[2:3] * 3)
    assert twice_NP == pytest.approx(np.tile(exact[2:3, 1:], (3, 2)), abs=1e-4)


def spied(model, monkeypatch):
    """Rows, tokens fed a row, and tokens in the cache, of each forward pass."""
    passes, forward = [], model.forward

    def spy(*args, **kwargs):
        passes.append((*kwargs["input_ids"].shape, kwargs["past_key_values"].get_seq_length()))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    return passes


@pytest.mark.parametrize("pack", [8, 256])
@pytest.mark.parametrize("max_tokens", [1, 30, 64, 128, 300, 10_000])
def test_max_tokens_bounds_prompts_times_tokens_of_a_forward_pass(monkeypatch, max_tokens, pack):
    model, prompts = make_model(), random_ids((3, 3, 5, 5, 8, 8, 12, 12))
    monkeypatch.setattr(diagnostics, "PACK", pack)
    passes = spied(model, monkeypatch)
    cross_logprobs(model, prompts, RESPONSES[:4], max_tokens=max_tokens)
    for rows, tokens, cached in passes:
        assert rows == 1 or rows * (cached + tokens) <= max_tokens
    widest = max(rows for rows, _, _ in passes)
    if max_tokens == 10_000:
        assert widest == 8
    elif pack == 8 and max_tokens >= 64:
        assert widest >= 3  # of the longest, 12 tokens and a pack of 9
    elif max_tokens == 1:
        assert widest == 1 and max(tokens for _, tokens, _ in passes) == 11  # of the longest prompt


def test_each_prompt_is_encoded_once(monkeypatch):
    model, prompts = make_model(), random_ids([10] * 6)
    monkeypatch.setattr(diagnostics, "PACK", 25)
    passes = spied(model, monkeypatch)
    cross_logprobs(model, prompts, RESPONSES, max_tokens=120)
    fed = sum(rows * tokens for rows, tokens, _ in passes)
    # The last token of a prompt goes with the response, whose own last one predicts nothing.
    assert fed == 6 * (9 + sum(map(len, RESPONSES)))


def test_each_prompt_is_encoded_once_when_all_go_alone(monkeypatch):
    model = make_model()
    passes = spied(model, monkeypatch)
    cross_logprobs(model, PROMPTS, RESPONSES, max_tokens=1)
    assert sum(rows * tokens for rows, tokens, _ in passes) == 0 + 5 + 16 + 3 * sum(map(len, RESPONSES))


def test_packs_are_as_full_as_they_can_be_in_order():
    assert packs([3, 4, 2, 9, 1, 1, 5, 5], width=7) == [[0, 1], [2], [3], [4, 5, 6], [7]]
    assert packs([], width=7) == []


def test_cross_logprobs_leave_no_gradient_and_no_cache_behind(model):
    scores_NP = cross_logprobs(model, PROMPTS, RESPONSES)
    assert cross_logprobs(model, PROMPTS, RESPONSES).tolist() == scores_NP.tolist()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_cross_logprobs_without_prompts_or_without_responses_are_empty(model):
    assert cross_logprobs(model, [], RESPONSES).shape == (5, 0)
    assert cross_logprobs(model, PROMPTS, []).shape == (0, 3)


@pytest.mark.parametrize(("prompts", "responses"), [([[3], []], [[4]]), ([[3]], [[4], []])])
def test_cross_logprobs_refuse_an_empty_prompt_or_response(model, prompts, responses):
    with pytest.raises(ValueError, match="a prompt and a response need at least one token; leave empty ones out"):
        cross_logprobs(model, prompts, responses)


def test_cross_logprobs_refuse_sliding_attention():
    model = make_model(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    with pytest.raises(ValueError, match="full attention in every layer; Qwen2ForCausalLM has .*sliding_attention"):
        cross_logprobs(model, PROMPTS, RESPONSES)


def test_cross_logprobs_refuse_sliding_attention_that_only_a_window_tells_of():
    """Mistral, Phi-3 and Starcoder2 have no `layer_types`."""
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4))
    with pytest.raises(ValueError, match="full attention in every layer; MistralForCausalLM has"):
        cross_logprobs(model, PROMPTS, RESPONSES)


# ------------------------------------------------------------------------------------------------ thinking_span


def byte_level_bpe(texts, merges):
    """Any text is split into bytes, and those joined again by the first merges of `texts`, across words and tags."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + merges, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


ONE_TOKEN = make_tokenizer()  # for the whole tag
SPLIT_TAG = byte_level_bpe(["go.</"] * 9 + ["think"] * 9 + ["x</"] * 9, 12)
ONE_STRADDLES = byte_level_bpe(["x</think>"] * 50 + ["y.</think>"] * 40 + [".</think>"] * 20, 12)
EMOJI_STRADDLES = byte_level_bpe(["\U0001f600</"] * 9 + ["think>"] * 3, 12)
BYTES = byte_level_bpe([], 0)
TOKENIZERS = {
    "one token": ONE_TOKEN, "split": SPLIT_TAG, "straddling": ONE_STRADDLES, "emoji": EMOJI_STRADDLES, "bytes": BYTES,
}  # fmt: skip


def ids_of(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    return ids


def test_tokenizers_split_the_tag_as_the_tests_need_it():
    assert ONE_TOKEN.tokenize("go</think>") == ["go", "</think>"]
    assert SPLIT_TAG.tokenize("go x</think>") == ["go", "Ġ", "x</", "think", ">"]
    assert ONE_STRADDLES.tokenize("go.</think>") == ["g", "o", ".</think>"]
    assert EMOJI_STRADDLES.tokenize("\U0001f600</think>")[0] == "ðŁĺĢ</"
    assert len(BYTES.tokenize("</think>")) == 8


@pytest.mark.parametrize(
    ("name", "text", "tokens"),
    [
        ("one token", "go look</think><answer>Left</answer>", 2),
        ("one token", "go look</think> then </think>", 2),  # a second tag
        ("one token", "go \n</think>x", 3),  # spaces at the end were sampled too
        ("split", "go</think>", 1),
        ("split", "go x</think>", 2),  # go, space; "x</" is the tag's
        ("split", "go.</think>a</think>", 0),  # "go.</"
        ("split", "x</x</think>a", 1),  # half a tag is text
        ("straddling", "go x</think><answer>", 3),
        ("straddling", "go.</think>a", 2),
        ("straddling", "<think</think>", 5),
        ("emoji", "go\U0001f600</think>", 2),
        ("emoji", "\U0001f600 </think>", 4),  # three tokens, one character
        ("bytes", "a\U0001f600</think>", 5),
        ("bytes", "é\U0001f468\u200d\U0001f469</think>\U0001f600", 2 + 4 + 3 + 4),
    ],
)
def test_thinking_span_ends_where_the_tag_begins(name, text, tokens):
    ids = ids_of(TOKENIZERS[name], text)
    expected = ids[:tokens]
    if name == "emoji" and text.startswith("\U0001f600"):
        expected = ids[: next(n for n in range(len(ids)) if TOKENIZERS[name].decode(ids[:n]).endswith(" "))]
    span = thinking_span(TOKENIZERS[name], ids)
    assert span == expected and type(span) is list


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    ["", "go look", "go</thin", "</think>go", " \n</think>Left", "<answer>Left</answer>", "</ think>", "</THINK>"],
)
def test_thinking_span_is_empty_when_no_thought_is_closed_or_it_is_blank(name, text):
    assert thinking_span(TOKENIZERS[name], ids_of(TOKENIZERS[name], text)) == []


PIECES = ["</think>", "</", "think>", "<", ">", "go", ".", "x", " ", "\n", "\U0001f600", "é", "\u4e2d", "</think"]


@deterministic
@given(st.sampled_from(sorted(TOKENIZERS)), st.lists(st.sampled_from(PIECES), max_size=9).map("".join))
def test_thinking_span_is_all_whole_tokens_before_the_first_tag(name, text):
    tokenizer, ids = TOKENIZERS[name], ids_of(TOKENIZERS[name], text)
    thought, closed, _ = text.partition("</think>")
    span = thinking_span(tokenizer, ids)
    assert span == ids[: len(span)]
    if not closed or not thought.strip():
        assert span == []
        return
    # Byte offsets, which no half character blurs.
    ends = np.cumsum([len(token) for token in tokenizer.convert_ids_to_tokens(ids)])
    if name != "one token":  # whose added tokens are not spelt in bytes
        whole = int((ends <= len(thought.encode())).sum())
        assert span == ids[:whole]
    decoded = tokenizer.decode(span, clean_up_tokenization_spaces=False)
    assert thought.startswith(decoded.rstrip("\ufffd"))  # a character may be cut by the token that straddles


@deterministic
@given(st.lists(st.integers(0, 255), max_size=12), st.lists(st.integers(0, 255), max_size=4))
def test_thinking_span_of_any_sampled_bytes_is_what_stands_before_the_tag(before, after):
    """A policy samples tokens, not text: bytes that are no characters too."""
    assert len(BYTES) == 256
    span = thinking_span(BYTES, before + ids_of(BYTES, "</think>") + after)
    assert span == (before if BYTES.decode(before).strip() else [])


# ------------------------------------------------------------------------------------------------ draws


def turns(trajectory, *lengths):
    """A turn for each length of its thinking; 0: none."""
    return [Pair((trajectory, turn), (7,) * length) for turn, length in enumerate(lengths)]


def test_first_turns_are_all_valid_ones_in_order_when_there_are_few():
    pairs_B = [turns(0, 2, 1), turns(1, 0, 3), [], turns(3, 1), turns(4, 5, 0)]
    firsts = [pairs_B[b][0] for b in (0, 3, 4)]
    assert draw_first_turns(pairs_B, 3, seed=0) == draw_first_turns(pairs_B, 64, seed=5) == firsts
    assert draw_first_turns([], 4, seed=0) == draw_first_turns([turns(0, 0)], 4, seed=0) == []


def test_first_turns_are_drawn_without_replacement_and_in_order():
    pairs_B = [turns(b, 1, 1) for b in range(8)]
    drawn_of = np.zeros(8)
    for seed in range(300):
        drawn = [pair.prompt for pair in draw_first_turns(pairs_B, 3, seed)]
        assert len(drawn) == 3 and drawn == sorted(set(drawn)) and all(turn == 0 for _, turn in drawn)
        drawn_of[[trajectory for trajectory, _ in drawn]] += 1
    # Each has 3 / 8 of 300 draws, with a standard deviation of 8.4.
    assert np.abs(drawn_of - 112.5).max() < 4 * 8.4


def test_draws_depend_on_their_seed_alone():
    pairs_B = [turns(b, 1, 1, 1) for b in range(30)]
    for draw in (draw_first_turns, draw_any_turns):
        states = np.random.get_state()[1].copy(), torch.get_rng_state()
        first = draw(pairs_B, 8, seed=3)
        assert (np.random.get_state()[1] == states[0]).all() and torch.equal(torch.get_rng_state(), states[1])
        np.random.random(5)
        assert draw(pairs_B, 8, seed=3) == first
        assert len({tuple(pair.prompt for pair in draw(pairs_B, 8, seed)) for seed in range(10)}) == 10
        assert draw(pairs_B, 8, seed=2**63 - 1)  # as large as an address


def test_any_turns_are_as_many_as_valid_turns_or_as_asked_for():
    pairs_B = [turns(0, 1, 1, 0, 1), turns(1, 2)]
    assert len(draw_any_turns(pairs_B, 64, seed=0)) == 4
    assert len(draw_any_turns(pairs_B, 3, seed=0)) == 3
    assert draw_any_turns([], 4, seed=0) == draw_any_turns([[], turns(0, 0, 0)], 4, seed=0) == []


def test_any_turns_draw_a_trajectory_then_one_of_its_valid_turns():
    pairs_B = [turns(0, *[1] * 10, 0), turns(1, 1)]
    drawn = [pair.prompt for seed in range(200) for pair in draw_any_turns(pairs_B, 64, seed)]
    assert len(drawn) == 200 * 11
    assert any(len(set(draw_any_turns_of(pairs_B, seed))) < 11 for seed in range(5))  # with replacement
    of_short = drawn.count((1, 0))
    assert abs(of_short - 1100) < 4 * math.sqrt(2200 / 4)  # as often as the long one
    counts = np.array([drawn.count((0, turn)) for turn in range(11)])
    assert counts[10] == 0 and np.abs(counts[:10] - 110).max() < 4 * math.sqrt(110)


def draw_any_turns_of(pairs_B, seed):
    return [pair.prompt for pair in draw_any_turns(pairs_B, 64, seed)]


def test_any_turns_discard_the_draws_of_a_trajectory_without_a_valid_one():
    pairs_B = [turns(0, 1, 1, 1), turns(1, 0, 0), turns(2, 1, 1, 1)]
    sizes = [len(draw_any_turns(pairs_B, 6, seed)) for seed in range(300)]
    drawn = [prompt for seed in range(300) for prompt in draw_any_turns_of(pairs_B, seed)]
    assert max(sizes) <= 6 and min(sizes) < 6
    assert abs(sum(sizes) - 1200) < 4 * math.sqrt(1800 * 2 / 9)  # two thirds of 1800
    assert not any(trajectory == 1 for trajectory, _ in drawn)


# ------------------------------------------------------------------------------------------------ diagnose


BOTH = ["first_turn", "trajectory"]
EMA = ["marginal_std_ema", "marginal_std_ema_seq", "mi_zscore_ema", "mi_zscore_ema_seq"]


def played(seed, members=2, groups=3, num_turns=2):
    """Groups whose members share their first prompt, and no other."""
    rng, pairs_B = np.random.default_rng(seed), []
    for _ in range(groups):
        first = rng.integers(3, VOCAB, 4 + int(rng.integers(5))).tolist()
        for _ in range(members):
            pairs, prompt = [], first
            for _ in range(num_turns):
                thinking = rng.integers(3, VOCAB, 1 + int(rng.integers(6))).tolist()
                pairs.append(Pair(tuple(prompt), tuple(thinking)))
                prompt = prompt + thinking + rng.integers(3, VOCAB, 3).tolist()
            pairs_B.append(pairs)
    return pairs_B


def slow_of(model, pairs, temperature=1.0):
    prompts = [list(prompt) for prompt in dict.fromkeys(pair.prompt for pair in pairs)]
    responses, own = [list(pair.thinking) for pair in pairs], [prompts.index(list(pair.prompt)) for pair in pairs]
    scores_NP = teacher_forced(double(model), prompts, responses, temperature)
    return slow_metrics(scores_NP, [len(z) for z in responses], own)


def under(metrics, name):
    prefix = f"diagnostics/{name}/"
    return {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_diagnose_equals_a_slow_oracle(model, temperature):
    pairs_B = played(seed=1)
    metrics, notes = diagnose(model, pairs_B, {}, 64, temperature, seed=4)
    assert notes == {}
    drawn = {"first_turn": [pairs[0] for pairs in pairs_B], "trajectory": draw_any_turns(pairs_B, 64, 4)}
    assert len({pair.prompt for pair in drawn["trajectory"]}) < len(drawn["trajectory"])  # some were drawn twice
    for name, pairs in drawn.items():
        expected = slow_of(model, pairs, temperature)
        found = under(metrics, name)
        assert {key: found[key] for key in METRICS} == pytest.approx(expected, abs=2e-4, rel=1e-4)
        assert found["num_responses"] == len(pairs)
        assert found["num_prompts"] == len({pair.prompt for pair in pairs})
        for suffix, mi in (("", "mi_estimate"), ("_seq", "mi_seq_estimate")):
            assert found[f"marginal_std_ema{suffix}"] == found[f"marginal_std{suffix}"]
            z = expected[mi] / (expected[f"marginal_std{suffix}"] + 1e-3)
            assert found[f"mi_zscore_ema{suffix}"] == pytest.approx(z, abs=1e-3)
    assert under(metrics, "first_turn")["num_prompts"] == 3  # groups, not trajectories


def test_diagnose_depends_on_the_seed_when_pairs_are_drawn(model):
    pairs_B = played(seed=1, groups=4)
    one, again, other = (diagnose(model, pairs_B, {}, 5, seed=seed)[0] for seed in (1, 1, 2))
    assert one == again
    for name in BOTH:
        assert under(one, name)["mi_estimate"] != under(other, name)["mi_estimate"]
        assert under(one, name)["num_responses"] == 5
    fewer, _ = diagnose(model, pairs_B, {}, 5, max_tokens=1, seed=1)
    assert {k: v for k, v in fewer.items() if v != one[k]} == pytest.approx(
        {k: one[k] for k, v in fewer.items() if v != one[k]}, abs=1e-4
    )


def test_diagnose_counts_valid_and_empty_thinking(model):
    pairs_B = played(seed=2)
    pairs_B[0][0].thinking = pairs_B[3][0].thinking = pairs_B[3][1].thinking = ()
    metrics, _ = diagnose(model, [*pairs_B, []], {}, 64)
    assert metrics["diagnostics/valid_thinking_rate"] == 9 / 12
    expected = {"num_total": 6, "num_valid": 4, "valid_rate": 4 / 6, "num_responses": 4, "num_prompts": 3}
    found = under(metrics, "first_turn")
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def alike(pairs_B):
    return [[Pair((5, 6), pair.thinking) for pair in pairs] for pairs in pairs_B]


@pytest.mark.parametrize(
    ("pairs_B", "valid", "reason"),
    [
        ([], NAN, "2 different prompts; 0 were closed, after 0"),
        ([[], []], NAN, "2 different prompts; 0 were closed, after 0"),
        ([turns(3, 0, 0), turns(4, 0)], 0.0, "2 different prompts; 0 were closed, after 0"),
        (alike(played(seed=3)), 1.0, r"2 different prompts; \d+ were closed, after 1"),
    ],
    ids=["none", "no turn", "never closed", "one prompt"],
)
def test_diagnose_is_complete_and_says_why_a_number_is_missing(model, pairs_B, valid, reason):
    state = {}
    metrics, notes = diagnose(model, pairs_B, state, 64)
    healthy, _ = diagnose(model, played(seed=1), {}, 64)
    assert set(metrics) == set(healthy)
    for name in BOTH:
        found = under(metrics, name)
        assert {*METRICS, *EMA, "num_responses", "num_prompts"} <= set(found)
        assert all(math.isnan(found[key]) for key in [*METRICS, *EMA])
        assert re.search(reason, notes[f"diagnostics/{name}/*"])
    assert math.isnan(metrics["diagnostics/regime"]) and re.search(reason, notes["diagnostics/regime"])
    assert metrics["diagnostics/valid_thinking_rate"] == pytest.approx(valid, nan_ok=True)
    assert ("diagnostics/valid_thinking_rate" in notes) == math.isnan(valid)
    assert "start" not in state


def test_diagnose_notes_only_the_set_that_is_missing(model):
    """First prompts may all be alike, and later ones not."""
    pairs_B = [[Pair((5, 6), pairs[0].thinking), pairs[1]] for pairs in played(seed=5, groups=2)]
    metrics, notes = diagnose(model, pairs_B, {}, 64, seed=1)
    assert set(notes) == {"diagnostics/first_turn/*", "diagnostics/regime"}
    assert "2 different prompts; 4 were closed, after 1" in notes["diagnostics/first_turn/*"]
    assert math.isfinite(under(metrics, "trajectory")["mi_estimate"])


def test_diagnose_keeps_moving_averages_and_its_start_through_checkpoints(model, tmp_path):
    batches = [played(seed=1), alike(played(seed=2)), played(seed=7), played(seed=15)]
    oracle = [slow_of(model, [pairs[0] for pairs in pairs_B]) for pairs_B in batches]
    state, found = {}, []
    for n, pairs_B in enumerate(batches):
        metrics, _ = diagnose(model, pairs_B, state, 64, seed=n)
        found.append(under(metrics, "first_turn"))
        state = json.loads(json.dumps(state))
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        assert state["start"] == pytest.approx(
            {"entropy": oracle[0]["conditional_entropy_est"], "mi": oracle[0]["mi_seq_estimate"]}, abs=1e-4
        )
    for suffix, mi in (("", "mi_estimate"), ("_seq", "mi_seq_estimate")):
        a, c, d = (oracle[n][f"marginal_std{suffix}"] for n in (0, 2, 3))
        averages = [a, a, 0.9 * a + 0.1 * c, 0.81 * a + 0.09 * c + 0.1 * d]
        assert min(abs(averages[n] - averages[n + 1]) for n in (1, 2)) > 0.01
        for n, average in enumerate(averages):
            assert found[n][f"marginal_std_ema{suffix}"] == pytest.approx(average, abs=1e-4)
            z = oracle[n][mi] / (average + 1e-3) if n != 1 else NAN
            assert found[n][f"mi_zscore_ema{suffix}"] == pytest.approx(z, abs=1e-3, nan_ok=True)


def test_diagnose_starts_at_the_first_finite_measurement(model):
    state = {}
    diagnose(model, alike(played(seed=2)), state, 64)
    assert "start" not in state
    state = json.loads(json.dumps(state))
    metrics, _ = diagnose(model, played(seed=1), state, 64)
    found = under(metrics, "first_turn")
    assert state["start"] == {"entropy": found["conditional_entropy_est"], "mi": found["mi_seq_estimate"]}
    assert found["marginal_std_ema"] == found["marginal_std"]  # a NaN before is none
    diagnose(model, played(seed=4), state, 64)
    assert state["start"] == {"entropy": found["conditional_entropy_est"], "mi": found["mi_seq_estimate"]}


def matching(model, best=True):
    """Prompts, each with the response that it explains best among some, or worst, compared with the other prompts."""
    prompts, responses = random_ids([6, 4, 9, 7], seed=8), random_ids([6] * 40, seed=9)
    gains_NP = teacher_forced(double(model), prompts, responses)
    gains_NP = gains_NP - np.logaddexp.reduce(gains_NP, axis=1, keepdims=True)
    rows = gains_NP.argmax(0) if best else gains_NP.argmin(0)
    return [[Pair(tuple(p), tuple(responses[n]))] for p, n in zip(prompts, rows, strict=True)]


def test_diagnose_judges_the_regime_of_first_turns_against_the_start(model):
    pairs_B = matching(model)
    oracle = slow_of(model, [pair for (pair,) in pairs_B])
    entropy, mi = oracle["conditional_entropy_est"], oracle["mi_seq_estimate"]
    assert entropy > 0.5 and mi > 0.5  # so that each factor below decides
    expected = {
        (1, 1): "diverse", (1.99, 1.99): "diverse", (2.01, 1.99): "compressed", (1.99, 2.01): "template_collapse",
        (2.01, 2.01): "low_entropy_collapse",
    }  # fmt: skip
    for (h, i), regime in expected.items():
        state = {"start": {"entropy": h * entropy, "mi": i * mi}}
        assert diagnose(model, pairs_B, state, 64)[0]["diagnostics/regime"] == regime
    start = {"entropy": entropy, "mi": mi}
    strict = [
        ({"low_entropy": 1.01}, "compressed"),
        ({"low_mi": 1.01}, "template_collapse"),
        ({"floor": (mi + 0.01) / math.log(4)}, "template_collapse"),
        ({"floor": (mi - 0.01) / math.log(4)}, "diverse"),
    ]
    for thresholds, regime in strict:
        assert diagnose(model, pairs_B, {"start": start}, 64, **thresholds)[0]["diagnostics/regime"] == regime


def test_diagnose_keeps_the_best_since_the_start(model):
    little, much, state = matching(model, best=False), matching(model), {}
    for pairs_B, best in ((little, little), (much, much), (little, much)):
        diagnose(model, pairs_B, state, 64)
        oracle = slow_of(model, [pair for (pair,) in best])
        expected = {"entropy": oracle["conditional_entropy_est"], "mi": oracle["mi_seq_estimate"]}
        assert state["best"] == pytest.approx(expected, abs=1e-4)
        state = json.loads(json.dumps(state))


def test_diagnose_says_so_when_the_model_is_no_longer_finite():
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight[5] = NAN
    state = {}
    metrics, notes = diagnose(model, played(seed=1), state, 64)
    assert math.isnan(metrics["diagnostics/first_turn/mi_estimate"]) and "start" not in state
    reason = "the model gave a log-prob that is not finite"
    names = ["diagnostics/first_turn/*", "diagnostics/trajectory/*", "diagnostics/regime"]
    assert notes == dict.fromkeys(names, reason)
    assert metrics["diagnostics/first_turn/num_responses"] == 6


def test_diagnose_changes_nothing_but_its_state():
    model, pairs_B = make_model(), played(seed=1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    weights, before = copy.deepcopy(model.state_dict()), copy.deepcopy(pairs_B)
    numpy_state, torch_state = np.random.get_state(), torch.get_rng_state()
    diagnose(model, pairs_B, {}, 4, seed=2)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_state, strict=True))
    assert all(p.requires_grad and p.grad.eq(1).all() for p in model.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert pairs_B == before and not model.training


# ------------------------------------------------------------------------------------------------ collapse_warning


def measured(regime, entropy=1.04, mi=0.29, bound=2.77, accuracy=0.07, chance=0.0625):
    found = {
        "conditional_entropy_est": entropy, "mi_seq_estimate": mi, "mi_upper_bound": bound,
        "retrieval_accuracy": accuracy, "retrieval_chance_level": chance,
    }  # fmt: skip
    metrics = {f"diagnostics/first_turn/{key}": value for key, value in found.items()}
    others = {f"diagnostics/trajectory/{key}": 99.0 for key in found}
    return metrics | others | {"diagnostics/regime": regime}


def test_collapse_warning_says_what_changed_since_the_best():
    state = {"start": {"entropy": 9.0, "mi": 0.1}, "best": {"entropy": 1.0, "mi": 1.0}}
    assert collapse_warning(measured("template_collapse"), state) == (
        "template collapse: entropy is up 4 percent while I(X;Z) fell 71 percent from its best, to 0.29 of 2.77 nats, "
        "and retrieval is at 0.07 (chance 0.06): thoughts vary, but ever less with the prompt"
    )
    state = {"start": {"entropy": 1.0, "mi": 1.0}, "best": {"entropy": 1.3, "mi": 2.0}}
    line = collapse_warning(measured("template_collapse", mi=-0.02), state)
    assert "entropy is down 20 percent while I(X;Z) fell 101 percent from its best, to -0.02 of 2.77" in line


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("dtttd", "01000"),
        ("dtdtt", "01010"),
        ("ct", "01"),
        ("lt", "01"),
        ("tt", "10"),  # it has had a best before, as after --resume
        ("dlcd", "0000"),
        ("dTTd", "0000"),  # by noise: it has not lost half of its best
        ("dTtTt", "00101"),
        ("ndt", "001"),
        ("dtnt", "0100"),  # not measured is not left
        ("dnt", "001"),
    ],
)
def test_collapse_warning_is_told_once_when_the_regime_is_entered(steps, told):
    numbers = {
        "d": ("diverse", 0.9), "t": ("template_collapse", 0.29), "T": ("template_collapse", 0.5),
        "c": ("compressed", 0.29), "l": ("low_entropy_collapse", 0.29), "n": (NAN, NAN),
    }  # fmt: skip
    state, seen = {"start": {"entropy": 1.0, "mi": 1.0}, "best": {"entropy": 1.0, "mi": 1.0}}, ""
    for letter in steps:
        regime, mi = numbers[letter]
        seen += "1" if collapse_warning(measured(regime, mi=mi), state) else "0"
        state = json.loads(json.dumps(state))
    assert seen == told


@pytest.mark.parametrize(
    ("best", "mi", "thresholds", "told"),
    [
        (1.0, 0.49, {}, True),
        (1.0, 0.5, {}, False),
        (1.0, 0.29, {"low_mi": 0.29}, False),
        (1.0, 0.29, {"low_mi": 0.3}, True),
        (0.41, 0.0, {}, False),  # a run that never looked has lost nothing: three times .05 ln N is .4155
        (0.42, 0.0, {}, True),
        (0.42, 0.0, {"floor": 0.06}, False),
        (-0.1, -0.1, {}, False),  # below half of itself
    ],
)
def test_collapse_warning_is_told_where_a_run_that_did_look_lost_it(best, mi, thresholds, told):
    state = {"best": {"entropy": 1.0, "mi": best}}
    assert (collapse_warning(measured("template_collapse", mi=mi), state, **thresholds) != "") == told


def test_collapse_warning_is_not_told_of_a_run_that_begins_there(model):
    """Noise puts its estimate below 0, which is below half of itself. When it has learned to look, it can lose it."""
    state, seen = {}, []
    for pairs_B in (matching(model, best=False), matching(model), matching(model, best=False)):
        metrics, _ = diagnose(model, pairs_B, state, 64)
        assert seen or metrics["diagnostics/first_turn/mi_seq_estimate"] < 0
        seen.append((metrics["diagnostics/regime"], collapse_warning(metrics, state) != ""))
    assert seen == [("template_collapse", False), ("diverse", False), ("template_collapse", True)]


def test_collapse_warning_is_not_told_when_nothing_was_measured():
    state = {}
    assert collapse_warning({"diagnostics/regime": NAN}, state) == "" and state == {}


# ------------------------------------------------------------------------------------------------ quantile_buckets


@pytest.mark.parametrize(
    ("scores", "count", "buckets"),
    [
        ([5, 3, 1, 4, 2, 0], 3, [[5, 2], [4, 1], [3, 0]]),
        ([0.3, 0.1, 0.2, 0.5, 0.4, 0.0, 0.7, 0.6], 3, [[5, 1], [2, 0], [4, 3, 7, 6]]),  # the rest goes to the last
        ([1, 0, 1, 0, 1, 0], 2, [[1, 3, 5], [0, 2, 4]]),  # ties by index
        ([1, 0, 1, 0, 0], 2, [[1, 3], [4, 0, 2]]),
        ([2, 2, 2], 3, [[0], [1], [2]]),
        ([3, 1], 6, [[1], [0]]),  # fewer groups than buckets
        ([7], 6, [[0]]),
        ([1, 0, 2], 1, [[1, 0, 2]]),
        ([], 6, []),
    ],
)
def test_quantile_buckets_match_hand_cases(scores, count, buckets):
    assert quantile_buckets(np.array(scores, dtype=float), count) == buckets
    assert all(type(group) is int for bucket in buckets for group in bucket)


@deterministic
@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 8))
def test_quantile_buckets_are_equal_ascending_and_complete(scores, count):
    buckets = quantile_buckets(scores, count)
    assert sorted(group for bucket in buckets for group in bucket) == list(range(len(scores)))
    assert len(buckets) == min(count, len(scores))
    assert len({len(bucket) for bucket in buckets[:-1]}) <= 1
    assert not buckets or len(buckets[0]) <= len(buckets[-1]) < len(buckets[0]) + len(buckets)
    ranked = [scores[group] for bucket in buckets for group in bucket]
    assert ranked == sorted(scores)


# ------------------------------------------------------------------------------------------------ bucket_gradients


class Table:
    """Gradients that are written down, over two parameters; a third takes no part."""

    def __init__(self, gradients, tokens):
        self.gradients, self.tokens, self.calls = gradients, tokens, []
        self.parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, 1))]
        self.parameters.append(torch.nn.Parameter(torch.zeros(3)))

    def backward(self, group, component):
        self.calls.append((group, component))
        a, b, c = self.gradients[component][group]
        # In two parts, as microbatches do.
        for part in (0.25, 0.75):
            (part * (self.parameters[0] @ torch.tensor([a, b]) + c * self.parameters[1].sum())).backward()
        return self.tokens[group]


HAND = {
    "task": [(3.0, 4.0, 0.0), (1.0, 2.0, 2.0), (-1.0, -2.0, 2.0), (0.0, 0.0, 6.0)],
    "entropy": [(0.0, 0.0, 1.0), (0.0, 0.0, 2.0), (0.0, 0.0, -1.0), (0.0, 3.0, 0.0)],
    "kl": [(0.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (0.0, 0.0, 4.0)],
}


def test_bucket_gradients_match_hand_values():
    table = Table(HAND, tokens=[5, 2, 8, 4])
    metrics = bucket_gradients(table.parameters, table.backward, [[0], [2, 1], [3]], ["task", "entropy", "kl"])
    expected = {
        "bucket_1/task": 5 / 5, "bucket_1/entropy": 1 / 5, "bucket_1/kl": 0, "bucket_1/ratio": 5,
        "bucket_1/tokens": 5, "bucket_1/groups": 1,
        # (0, 0, 4), (0, 0, 1) and (2, 0, 0) over ten tokens.
        "bucket_2/task": 4 / 10, "bucket_2/entropy": 1 / 10, "bucket_2/kl": 2 / 10, "bucket_2/ratio": 4 / 3,
        "bucket_2/tokens": 10, "bucket_2/groups": 2,
        # The mean is (0, 0, 2), and each is sqrt(5) from it.
        "bucket_2/snr": 2 / math.sqrt(10),
        "bucket_3/task": 6 / 4, "bucket_3/entropy": 3 / 4, "bucket_3/kl": 4 / 4, "bucket_3/ratio": 6 / 7,
        "bucket_3/tokens": 4, "bucket_3/groups": 1,
        # (3, 4, 10), (0, 3, 2) and (2, 0, 4) over 19 tokens.
        "all/task": math.sqrt(125) / 19, "all/entropy": math.sqrt(13) / 19, "all/kl": math.sqrt(20) / 19,
        "all/ratio": math.sqrt(125) / (math.sqrt(13) + math.sqrt(20)), "all/tokens": 19, "all/groups": 4,
        # Mean (.75, 1, 2.5): squared distances 20.3125, 1.3125, 12.3125, 13.8125.
        "all/snr": math.sqrt(125) / 4 / math.sqrt(47.75 / 3),
    }  # fmt: skip
    assert math.isnan(metrics.pop("bucket_1/snr")) and math.isnan(metrics.pop("bucket_3/snr"))
    assert metrics == pytest.approx(expected, rel=1e-6)
    groups = [(group, component) for component in HAND for group in (0, 2, 1, 3)]
    assert sorted(table.calls) == sorted(groups)  # each once
    assert all(p.grad is None for p in table.parameters)


def test_bucket_gradients_do_not_see_gradients_from_before():
    clean, dirty = Table(HAND, [5, 2, 8, 4]), Table(HAND, [5, 2, 8, 4])
    for p in dirty.parameters:
        p.grad = torch.full_like(p, 7.0)
    expected, found = (
        bucket_gradients(table.parameters, table.backward, [[0, 1], [2, 3]], ["task", "kl"]) for table in (clean, dirty)
    )
    assert found == expected and all(p.grad is None for p in dirty.parameters)


def test_bucket_gradients_compare_buckets_of_any_size():
    """Groups that say the same thing are as loud together as one of them."""
    table = Table({"task": [(3.0, 4.0, 0.0)] * 5, "entropy": [(0.0, 0.0, 2.0)] * 5}, tokens=[5] * 5)
    metrics = bucket_gradients(table.parameters, table.backward, [[0], [1, 2, 3, 4]], ["task", "entropy"])
    for name in ("bucket_1", "bucket_2", "all"):
        found = [metrics[f"{name}/{key}"] for key in ("task", "entropy", "ratio")]
        assert found == pytest.approx([1.0, 0.4, 2.5])


def test_bucket_gradients_are_nan_when_there_is_nothing_to_divide_by():
    table = Table(HAND | {"kl": [(0.0, 0.0, 0.0)] * 4}, tokens=[5, 0, 8, 4])
    alone = bucket_gradients(table.parameters, table.backward, [[0], [1]], ["task"])
    assert all(math.isnan(alone[f"{name}/ratio"]) for name in ("bucket_1", "bucket_2", "all"))
    assert math.isnan(alone["bucket_1/snr"]) and math.isfinite(alone["all/snr"])
    silent = bucket_gradients(table.parameters, table.backward, [[0], [1]], ["task", "kl"])
    assert math.isnan(silent["all/ratio"]) and silent["all/kl"] == 0
    assert silent["bucket_2/tokens"] == 0 and math.isfinite(silent["bucket_2/task"])  # no token: no division by 0


def test_bucket_gradients_snr_of_groups_that_contradict_each_other_is_zero():
    table = Table({"task": [(3.0, 4.0, 0.0), (-3.0, -4.0, 0.0)]}, tokens=[1, 1])
    metrics = bucket_gradients(table.parameters, table.backward, [[0, 1]], ["task"])
    assert metrics["all/snr"] == metrics["bucket_1/snr"] == metrics["all/task"] == 0


def test_bucket_gradients_equal_float64_gradients_of_a_model():
    """Squared error and an L2 penalty of the outputs, summed over the rows of a group; the whole batch is one loss."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    sizes = [1, 4, 2, 6, 3, 5, 2]
    x = [torch.randn(n, 3, generator=generator) for n in sizes]
    y = [torch.randn(n, 2, generator=generator) for n in sizes]

    def loss(model, groups, component):
        outputs = [model(x[g].to(model.weight.dtype)) for g in groups]
        if component == "task":
            return sum(((out - y[g]) ** 2).sum() for out, g in zip(outputs, groups, strict=True))
        return 0.01 * sum((out**2).sum() for out in outputs)

    def backward(group, component):
        loss(model, [group], component).backward()
        return sizes[group]

    def slow(groups, component):
        gradients = torch.autograd.grad(loss(slow_model, groups, component), list(slow_model.parameters()))
        return torch.cat([g.flatten() for g in gradients])

    slow_model, buckets = copy.deepcopy(model).double(), [[4, 0], [2, 6], [1, 3, 5]]
    metrics = bucket_gradients(list(model.parameters()), backward, buckets, ["task", "kl"])
    named = {"all": list(range(7))} | {f"bucket_{b}": bucket for b, bucket in enumerate(buckets, start=1)}
    for name, groups in named.items():
        tokens = sum(sizes[g] for g in groups)
        task, kl = (slow(groups, component).norm().item() / tokens for component in ("task", "kl"))
        each = torch.stack([slow([g], "task") for g in groups])
        spread = (each - each.mean(0)).square().sum().div(len(groups) - 1).sqrt()
        expected = {
            "task": task, "kl": kl, "ratio": task / kl, "tokens": tokens, "groups": len(groups),
            "snr": (each.mean(0).norm() / spread).item(),
        }  # fmt: skip
        found = {key: metrics[f"{name}/{key}"] for key in expected}
        assert found == pytest.approx(expected, rel=1e-5)
    assert model.weight.grad is None and model.bias.grad is None


# ------------------------------------------------------------------------------------------------ early_warnings


def told(history, name, **options):
    """The updates, counted from 1, at which a warning of this name is told; the state passes through json each time."""
    state, at = {}, []
    for update, metrics in enumerate(history, start=1):
        if name in early_warnings(metrics, state, **options):
            at.append(update)
        state = json.loads(json.dumps(state))
    return at


def spreads(*values):
    return [{"rollout/in_group_std": value} for value in values]


def test_reward_spread_warns_when_ten_updates_are_below_a_tenth_of_the_first_ten():
    rising = [0.55 + 0.1 * n for n in range(10)]  # 1.0 in the mean
    assert told(spreads(*rising, *[0.0999] * 12), "reward_spread") == [20]
    assert told(spreads(*rising, *[0.1] * 12), "reward_spread") == []  # on the boundary
    assert told(spreads(*rising, *[0.0999] * 9, 0.2, *[0.05] * 9), "reward_spread") == []
    assert told(spreads(*rising, *[0.0999] * 9, 0.2, *[0.05] * 10), "reward_spread") == [30]
    assert told(spreads(*[0.01] * 30), "reward_spread") == []  # low from the start is not a change
    assert told(spreads(*[0.0] * 30), "reward_spread") == []


def test_reward_spread_heeds_its_options():
    history = spreads(1.0, 3.0, 0.9, 0.9)  # mean 2 of the first two
    assert told(history, "reward_spread", window=2, spread=0.5) == [4]
    assert told(history, "reward_spread", window=2, spread=0.45) == []
    assert told(spreads(*[1.0] * 10, *[0.0] * 20), "reward_spread", spread=0) == []


def test_reward_spread_counts_no_update_without_a_number():
    history = spreads(*[1.0] * 10, *[0.01] * 9, NAN) + [{}] + spreads(0.01)
    assert told(history, "reward_spread") == [22]


def test_reward_spread_is_told_once_and_again_when_it_comes_back():
    history = spreads(*[1.0] * 10, *[0.01] * 12, 0.5, *[0.01] * 9) + [{}, *spreads(*[0.01] * 3)]
    assert told(history, "reward_spread") == [20, 34]


def test_reward_spread_says_what_it_saw():
    state = {}
    for metrics in spreads(*[0.5] * 10, *[0.02] * 9, 0.0314):
        lines = early_warnings(metrics, state)
    assert (
        "in-group std of the last 10 updates at most 0.0314, of the first 10 0.5 in the mean" in lines["reward_spread"]
    )


def validations(*values, name="val/success"):
    """With two updates in between that validate nothing."""
    return [record for value in values for record in ({name: value}, {}, {"rollout/success": 0.0})]


def test_validation_success_warns_after_five_low_ones_in_a_row():
    name = "low_success"
    assert told(validations(*[0.0] * 4, 0.01), name) == []  # on the boundary
    assert told(validations(*[0.0] * 4, 0.0099), name) == [13]
    assert told(validations(0.0, 0.0, 0.5, *[0.0] * 4), name) == []
    assert told(validations(0.0, 0.0, 0.5, *[0.0] * 5), name) == [22]
    assert told(validations(*[0.0] * 9), name) == [13]
    assert told(validations(*[0.0] * 6, 0.3, *[0.0] * 6), name) == [13, 34]
    assert told(validations(*[0.0] * 9), name, success=0) == []
    assert told(validations(*[0.2] * 9), name, success=0.25) == [13]


def test_validation_success_is_told_of_each_environment():
    history = [{"val/success": 0.25, "val/sokoban/success": 0.0, "val/bandit/success": 0.5, "val/return": 0.0}] * 6
    assert told(history, "low_sokoban_success") == [5]
    assert told(history, "low_success") == told(history, "low_bandit_success") == []
    lines, state = [], {}
    for metrics in history:
        lines += early_warnings(metrics, state).items()
    (name, line), *others = lines
    assert name == "low_sokoban_success" and others == []
    assert line.startswith("val/sokoban/success was below 0.01 in 5 validations in a row")


def test_validation_success_of_an_environment_is_told_again_while_another_stays_low():
    history = [{"val/sokoban/success": 0.0, "val/bandit/success": bandit} for bandit in [0.0] * 5 + [0.5] + [0.0] * 5]
    assert told(history, "low_sokoban_success") == [5]
    assert told(history, "low_bandit_success") == [5, 11]


def repeats(*values):
    return [{"rollout/repeated_share": value} for value in values]


def test_repetition_warns_above_one_half():
    assert told(repeats(0.5, 0.501), "repetition") == [2]
    assert told(repeats(0.9, 0.9, 0.1, 0.9, 0.9), "repetition") == [1, 4]
    assert told(repeats(1.0), "repetition", repeats=0) == []
    assert told(repeats(0.3), "repetition", repeats=0.2) == [1]
    assert told(repeats(NAN), "repetition") == []
    line = early_warnings({"rollout/repeated_share": 0.512}, {})["repetition"]
    assert line.startswith("51% of the sampled tokens are one phrase over and over")


def test_warnings_of_a_healthy_update_are_none():
    healthy = {"rollout/in_group_std": 0.4, "val/success": 0.5, "rollout/repeated_share": 0.01}
    state = {}
    assert all(early_warnings(healthy, state) == {} for _ in range(30))
    assert early_warnings({}, {}) == {}


# ------------------------------------------------------------------------------------------------ rollouts of any kind


ROOT = Path(__file__).parent.parent
OBSERVATIONS = ["look corridor", "go cell Left", "Turn and look", "Reward and grow on"]
THOUGHTS = ["go cell", "look Left on", "ok", "Right and on and on"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Folder, model and tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("model"), make_tokenizer()
    model = make_model(vocab_size=len(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder, model, tokenizer


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def as_lines(tokenizer, kind):
    """The same four turns, as each framework writes them."""
    lines = []
    for question, thought in zip(OBSERVATIONS, THOUGHTS, strict=True):
        chat = [{"role": "system", "content": "ok"}, {"role": "user", "content": question}]
        text = f"<|im_start|>system\nok<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        response = f"{thought}</think><answer>Left</answer>"
        lines.append(
            {
                "text": {"prompt": text + "<think>", "response": response, "score": 1.0},
                "opened by the response": {"prompt": text, "response": "<think>" + response},
                "verl": {"input": text, "output": "<think>" + response, "step": 3, "gts": None},
                "messages": {
                    "prompt": chat,
                    "completion": [{"role": "assistant", "content": "<think>" + response}],
                    "reward": 0.5,
                },
                "parts": {
                    "prompt": [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in chat],
                    "completion": [{"role": "assistant", "content": [{"text": "<think>"}, {"text": response}]}],
                },
                "ids": {
                    "prompt_ids": encode(tokenizer, text + "<think>"),
                    "response_ids": encode(tokenizer, response),
                    "prompt": "not this one",
                    "response": None,
                },
                "ids opened by the response": {
                    "prompt_ids": encode(tokenizer, text),
                    "response_ids": encode(tokenizer, "<think>" + response),
                },
                "text and ids": {"prompt": text, "completion_ids": encode(tokenizer, "<think>" + response)},
                "ids and messages": {"prompt": chat, "completion_ids": None, "response": "<think>" + response},
            }[kind]
        )
    return lines


KINDS = [
    "text",
    "opened by the response",
    "verl",
    "messages",
    "parts",
    "ids",
    "ids opened by the response",
    "text and ids",
    "ids and messages",
]


def expected_pairs(tokenizer):
    pairs = []
    for question, thought in zip(OBSERVATIONS, THOUGHTS, strict=True):
        text = f"<|im_start|>system\nok<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        pairs.append(Pair((*encode(tokenizer, text), *encode(tokenizer, "<think>")), tuple(encode(tokenizer, thought))))
    return pairs


def write(folder, name, lines):
    file = folder / name
    text = "\n".join(line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines)
    file.write_text(text + "\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("kind", KINDS)
def test_rollouts_of_each_kind_are_read_as_the_same_pairs(small, tmp_path, kind):
    _, _, tokenizer = small
    lines = as_lines(tokenizer, kind)
    file = write(tmp_path, "a.jsonl", [*lines[:2], "", *lines[2:]])  # an empty line is none
    assert read_rollouts(file, tokenizer, "think") == [[pair] for pair in expected_pairs(tokenizer)]


@pytest.mark.parametrize("kind", KINDS[:2])
def test_span_response_is_the_whole_response(small, tmp_path, kind):
    _, _, tokenizer = small
    lines = as_lines(tokenizer, kind)
    pairs = read_rollouts(write(tmp_path, "a.jsonl", lines), tokenizer, "response")
    assert pairs == [
        [Pair(tuple(encode(tokenizer, line["prompt"])), tuple(encode(tokenizer, line["response"])))] for line in lines
    ]


def test_lines_of_one_trajectory_belong_together(small, tmp_path):
    _, _, tokenizer = small
    lines = as_lines(tokenizer, "text")
    for line, trajectory in zip(lines, ["a", 7, "a", None], strict=True):
        line |= {} if trajectory is None else {"trajectory": trajectory}
    first, second, third, fourth = expected_pairs(tokenizer)
    found = read_rollouts(write(tmp_path, "a.jsonl", lines), tokenizer, "think")
    assert found == [[first, third], [second], [fourth]]


def test_each_message_of_the_assistant_is_a_turn_with_all_before_it(small, tmp_path):
    _, _, tokenizer = small
    completion = [
        {"role": "assistant", "content": "<think>go</think>Left"},
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "never closed"},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "<think>on</think>Right"},
    ]
    text = "<|im_start|>user\ncell<|im_end|>\n<|im_start|>assistant\n"
    later = (
        "<think>go</think>Left<|im_end|>\n<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n",
        "never closed<|im_end|>\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n",
    )
    expected = [
        Pair(tuple(encode(tokenizer, text + "<think>")), tuple(encode(tokenizer, "go"))),
        Pair(tuple(encode(tokenizer, text + later[0])), ()),
        Pair(tuple(encode(tokenizer, text + later[0] + later[1] + "<think>")), tuple(encode(tokenizer, "on"))),
    ]
    for prompt in ("cell", [{"role": "user", "content": "cell"}]):
        file = write(tmp_path, "a.jsonl", [{"prompt": prompt, "completion": completion}])
        assert read_rollouts(file, tokenizer, "think") == [expected]


@pytest.mark.parametrize(
    ("response", "thought"),
    [
        (
            "<think>\ngo\n</think>",
            "\ngo",
        ),  # what was sampled, but for the end, which may belong to the tag
        ("<think> </think>Left", ""),
        ("</think>Left", ""),
        ("go on", ""),
        ("", ""),
        ("go</think>on</think>", "go"),
    ],
)
def test_thought_of_a_text_is_what_stands_before_the_closing_tag(small, tmp_path, response, thought):
    _, _, tokenizer = small
    file = write(tmp_path, "a.jsonl", [{"prompt": "look", "response": response}])
    ((pair,),) = read_rollouts(file, tokenizer, "think")
    assert pair.thinking == tuple(encode(tokenizer, thought))
    assert pair.prompt == tuple(encode(tokenizer, "look<think>" if "<think>" in response else "look"))


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85"])
def test_line_separators_within_a_text_do_not_cut_a_line(small, tmp_path, character):
    """They may stand in a JSON string: verl writes with ensure_ascii=False."""
    _, _, tokenizer = small
    file = write(tmp_path, "a.jsonl", [{"prompt": "look", "response": f"go{character}on</think>Left"}] * 2)
    pairs = read_rollouts(file, tokenizer, "think")
    assert [pair.thinking for (pair,) in pairs] == [tuple(encode(tokenizer, f"go{character}on"))] * 2


# ------------------------------------------------------------------------------------------------ command line


def invoke(arguments, capsys, monkeypatch):
    """In this process, which has everything imported: exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "250")
    code, device = 0, [] if "--device" in arguments else ["--device", "cpu"]
    try:
        diagnostics.main(diagnostics.tyro.cli(diagnostics.Args, args=[*map(str, arguments), *device]))
    except SystemExit as stop:
        code = stop.code
    return code, capsys.readouterr().out


def launch(*arguments, cwd):
    environment = os.environ | {"COLUMNS": "250", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "diagnostics.py"), *map(str, arguments), "--device", "cpu"]
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240
    )
    return done.returncode, done.stdout


def tables(output):
    """Title -> label -> the numbers of its row."""
    found, title = {}, ""
    for line in output.splitlines():
        if line.strip() in ("first turns", "any turn"):
            title = line.strip()
            found[title] = {}
        if line.startswith("│"):
            label, *cells = (cell.strip() for cell in line.strip("│").split("│"))
            label = label if label not in found[title] else f"{label} again"
            found[title][label] = [float(cell) for cell in cells]
    return found


LABELS = {
    "H(Z|X), nats per token": "conditional_entropy_est",
    "H(Z|X), nats per response": "conditional_entropy_seq_est",
    "I(X;Z), nats": "mi_seq_estimate",
    "its bound, ln N": "mi_upper_bound",
    "I(X;Z) proxy, per token before the mean": "mi_estimate",
    "I(X;Z) proxy, per token after the mean": "mi_token_estimate",
    "z-score of the proxy": "mi_zscore",
    "retrieval accuracy": "retrieval_accuracy",
    "by chance": "retrieval_chance_level",
    "retrieval accuracy @4": "retrieval_accuracy@4",
    "by chance @4": "retrieval_chance_level@4",
}


def test_command_prints_a_table_of_all_steps_and_the_regime_of_each(small, tmp_path):
    folder, model, tokenizer = small
    pairs = expected_pairs(tokenizer)
    files = ["text.jsonl", "verl.jsonl", "messages.jsonl", "ids.jsonl", "mixed.jsonl"]
    for file in files[:4]:
        write(tmp_path, file, as_lines(tokenizer, file.removesuffix(".jsonl")))
    # The same thoughts after other prompts, and one that never closes.
    mixed = as_lines(tokenizer, "text")
    for n in range(4):
        mixed[n]["response"] = f"{THOUGHTS[n - 1]}</think>"
    write(tmp_path, files[4], [*mixed, {"prompt": "look", "response": "go"}])

    code, output = launch("--model", folder, "--rollouts", *files, "--temperature", 0.8, cwd=tmp_path)
    assert code == 0, output
    found = tables(output)
    assert set(found) == {"first turns", "any turn"}
    same = slow_of(model, pairs, 0.8)
    shifted = [Pair(pairs[n].prompt, pairs[n - 1].thinking) for n in range(4)]
    other = slow_of(model, shifted, 0.8)
    rows = {label: [same[key]] * 4 + [other[key]] for label, key in LABELS.items()}
    for label, numbers in rows.items():
        assert found["first turns"][label] == pytest.approx(numbers, abs=1.1e-3), label
    assert found["first turns"]["responses"] == found["first turns"]["different prompts"] == [4] * 5
    # The same seed draws the same turns in each file.
    assert all(len(set(numbers[:4])) == 1 for numbers in found["any turn"].values())
    start = (same["conditional_entropy_est"], same["mi_seq_estimate"])
    regimes = [
        reasoning_regime(m["conditional_entropy_est"], m["mi_seq_estimate"], math.log(4), *start)
        for m in [same] * 4 + [other]
    ]
    for file, regime in zip(files, regimes, strict=True):
        assert f"\n{file}: {regime}\n" in output
    assert "no response has a thought" not in output and "error" not in output


def test_command_ends_at_a_line_that_it_cannot_read(small, tmp_path):
    folder, _, tokenizer = small
    write(tmp_path, "good.jsonl", as_lines(tokenizer, "text"))
    write(tmp_path, "bad.jsonl", [*as_lines(tokenizer, "text"), "", '{"prompt": "look", "resp'])
    code, output = launch("--model", folder, "--rollouts", "good.jsonl", "bad.jsonl", cwd=tmp_path)
    assert code == 2 and "Traceback" not in output
    assert re.search(r"^error: bad\.jsonl line 6: Unterminated string", output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('["look", "go"]', "is no JSON object"),
        ({"prompt": "look", "score": 1}, "has prompt, score; needs one of prompt_ids, prompt, input and one of"),
        ({"input": None, "output": "go"}, "has input, output; needs one of"),
        ({"prompt": 5, "response": "go"}, "the prompt must be text, messages, or token ids from 0 to"),
        ({"prompt_ids": [3], "response_ids": ["go"]}, "the response must be text, messages, or token ids"),
    ],
)
def test_command_names_file_and_line_of_what_it_cannot_use(small, tmp_path, capsys, monkeypatch, line, complaint):
    folder, _, tokenizer = small
    file = write(tmp_path, "a.jsonl", [as_lines(tokenizer, "text")[0], line])
    code, output = invoke(["--model", folder, "--rollouts", file], capsys, monkeypatch)
    assert code == 2 and output.startswith(f"error: {file} line 2: ") and complaint in output


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": [{"role": "user", "content": "look"}, "look"], "response": "go</think>"},
        {"prompt": [{"role": "user", "content": ["look"]}], "response": "go</think>"},
        {"prompt": {"role": "user"}, "response": "go</think>"},
        {"prompt_ids": ["look"], "response": "go</think>"},
        {"prompt_ids": [3.5], "response": "go</think>"},
        {"prompt_ids": [3, 99_999], "response": "go</think>"},  # of another tokenizer
        {"prompt_ids": [3, -5], "response": "go</think>"},
        {"prompt_ids": [3, 5], "completion": [{"role": "assistant", "content": "go</think>"}]},
    ],
    ids=[
        "messages and text",
        "parts that are text",
        "one message",
        "words",
        "fractions",
        "too high",
        "negative",
        "before messages",
    ],
)
def test_command_names_file_and_line_of_what_is_no_prompt(small, tmp_path, capsys, monkeypatch, line):
    folder, _, tokenizer = small
    file = write(tmp_path, "a.jsonl", [as_lines(tokenizer, "text")[0], line])
    code, output = invoke(["--model", folder, "--rollouts", file], capsys, monkeypatch)
    assert code == 2 and output.startswith(f"error: {file} line 2: ")


def test_command_names_the_file_of_an_empty_prompt_or_of_another_encoding(small, tmp_path, capsys, monkeypatch):
    folder, _, tokenizer = small
    file = write(tmp_path, "a.jsonl", [as_lines(tokenizer, "text")[0], {"prompt": "", "response": "go</think>"}])
    code, output = invoke(["--model", folder, "--rollouts", file], capsys, monkeypatch)
    assert code == 2 and f"{file} line 2" in output
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "\u00e9", "response": "go"}'.encode("latin-1"))
    code, output = invoke(["--model", folder, "--rollouts", tmp_path / "latin.jsonl"], capsys, monkeypatch)
    assert code == 2 and "latin.jsonl" in output


def test_command_names_a_missing_file_before_it_loads_a_model(tmp_path, capsys, monkeypatch):
    file = tmp_path / "none.jsonl"
    code, output = invoke(["--model", tmp_path / "no-model", "--rollouts", file], capsys, monkeypatch)
    assert code == 2 and output.startswith(f"error: --rollouts {file}: no such file")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "tiny"], "--model tiny is made by each run for itself; give the run's: runs/NAME/checkpoints/N"),
        (["--model", "m", "--device", "cuda:0"], "--device cuda:0: this torch sees no GPU; try --device cpu"),
        (["--model", "m", "--num-pairs", "1"], "--num-pairs must be at least 2, not 1; leave it out for the default"),
        (["--model", "m", "--max-tokens", "0"], "--max-tokens must be at least 1, not 0"),
        (["--model", "m", "--temperature", "0"], "--temperature must be above 0, not 0.0; leave it out for 1.0"),
    ],
)
def test_command_refuses_arguments_before_it_loads_a_model(tmp_path, capsys, monkeypatch, arguments, complaint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = write(tmp_path, "a.jsonl", [{"prompt": "look", "response": "go"}])
    code, output = invoke([*arguments, "--rollouts", file], capsys, monkeypatch)
    assert code == 2 and output.startswith("error: " + complaint)


def test_command_needs_files_with_lines(small, tmp_path, capsys, monkeypatch):
    code, output = invoke(["--model", small[0], "--rollouts"], capsys, monkeypatch)
    assert code == 2 and output.startswith("error: --rollouts needs at least one file")
    (tmp_path / "empty.jsonl").write_text("\n")
    code, output = invoke(["--model", small[0], "--rollouts", tmp_path / "empty.jsonl"], capsys, monkeypatch)
    assert code == 2 and "empty.jsonl is empty; it needs a JSON object a line" in output


def test_command_points_from_a_run_to_its_checkpoints(tmp_path, capsys, monkeypatch):
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)
    file = write(tmp_path, "a.jsonl", [{"prompt": "look", "response": "go"}])
    code, output = invoke(["--model", tmp_path / "run", "--rollouts", file], capsys, monkeypatch)
    assert code == 2 and f"it is a run; its models are in {tmp_path / 'run' / 'checkpoints'}/N" in output


def test_command_names_a_missing_model(small, tmp_path, capsys, monkeypatch):
    file = write(tmp_path, "a.jsonl", [{"prompt": "look", "response": "go"}])
    code, output = invoke(["--model", tmp_path / "no-model", "--rollouts", file], capsys, monkeypatch)
    assert code == 2 and output.startswith(f"error: --model {tmp_path / 'no-model'} cannot be loaded")


def test_command_points_to_the_whole_response_when_there_are_no_thoughts(small, tmp_path, capsys, monkeypatch):
    folder, model, tokenizer = small
    lines = [{"prompt": q, "response": t} for q, t in zip(OBSERVATIONS, THOUGHTS, strict=True)]
    file = write(tmp_path, "a.jsonl", lines)
    code, output = invoke(["--model", folder, "--rollouts", file], capsys, monkeypatch)
    assert code == 0 and f"{file}: no regime, see below" in output
    assert f"{file}: no response has a thought before </think>; for all of it: --span response" in output
    assert all(math.isnan(cell) for cell in tables(output)["first turns"]["I(X;Z), nats"])
    assert f"{file}: needs thoughts after at least 2 different prompts; 0 were closed" in output

    code, output = invoke(["--model", folder, "--rollouts", file, "--span", "response"], capsys, monkeypatch)
    assert code == 0 and "--span response" not in output
    pairs = [
        Pair(tuple(encode(tokenizer, q)), tuple(encode(tokenizer, t)))
        for q, t in zip(OBSERVATIONS, THOUGHTS, strict=True)
    ]
    expected = slow_of(model, pairs)
    for label, key in LABELS.items():
        assert tables(output)["first turns"][label] == pytest.approx([expected[key]], abs=1.1e-3)


def test_command_tells_of_template_collapse_between_two_files(small, tmp_path, capsys, monkeypatch):
    folder, model, _ = small
    files = []
    for name in ("best", "worst"):
        pairs = [pair for (pair,) in matching(model, name == "best")]
        lines = [{"prompt_ids": pair.prompt, "response_ids": pair.thinking} for pair in pairs]
        files.append(write(tmp_path, f"{name}.jsonl", lines))
    arguments = ["--model", folder, "--span", "response", "--rollouts"]
    code, output = invoke([*arguments, *files], capsys, monkeypatch)
    assert code == 0
    assert f"{files[0]}: diverse" in output and f"{files[1]}: template_collapse" in output
    assert re.search(rf"^{re.escape(files[1])}: template collapse: entropy is .* I\(X;Z\) fell", output, re.MULTILINE)
    code, output = invoke([*arguments, *reversed(files)], capsys, monkeypatch)
    assert code == 0 and "thoughts vary, but not with the prompt" not in output  # it began there
    thresholds = ["--regime-entropy", 99, "--regime-mi", -99, "--regime-floor", -99]
    code, output = invoke([*arguments, *files, *thresholds], capsys, monkeypatch)
    assert code == 0 and output.count(": compressed") == 2


def test_command_draws_and_cuts_as_it_is_told(small, tmp_path, capsys, monkeypatch):
    folder, _, tokenizer = small
    file = write(tmp_path, "a.jsonl", as_lines(tokenizer, "text") * 2)
    arguments = ["--model", folder, "--rollouts", file, "--num-pairs", 3]

    def of(*more):
        code, output = invoke([*arguments, *more], capsys, monkeypatch)
        assert code == 0
        return tables(output)

    tokens = of("--max-tokens", 1)
    assert tokens == of() and tokens["first turns"]["responses"] == [3]
    assert len({str(of("--seed", seed)) for seed in range(4)}) > 1
    rounded, exact = of("--bf16"), of()
    assert rounded["first turns"]["I(X;Z), nats"] != exact["first turns"]["I(X;Z), nats"]
    assert rounded["first turns"]["H(Z|X), nats per token"] == pytest.approx(
        exact["first turns"]["H(Z|X), nats per token"], abs=0.1
    )


# ------------------------------------------------------------------------------------------------ names


def test_metrics_are_named_as_in_the_reference_with_ours_beside_them():
    assert len(METRICS) == len(set(METRICS)) == 17 + 9 and TOP_K == (2, 4, 8)


def test_docstring_examples_run():
    results = doctest.testmod(diagnostics)
    assert results.attempted >= 6 and results.failed == 0
