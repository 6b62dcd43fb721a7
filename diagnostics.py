"""Does the thinking still depend on the prompt? Cross log-probs -> H(Z|X), I(X;Z), retrieval, the regime of a run.

Entropy alone cannot tell a policy that thinks about its input from one that recites varied templates. RAGEN-2
(arXiv:2604.06268) splits it, for a prompt X (all tokens up to the opening tag of a turn) and the thinking Z after it:

    H(Z) = I(X;Z) + H(Z|X)

Each z_i is scored under every x_j of a batch. Under its own prompt that gives H(Z|X); the mean over prompts is a
mixture that stands for p(z), and gives H(Z). Where all prompts explain z equally well, I(X;Z) is 0; its bound is ln N.

    S_ij          sum of the token log-probs of z_i under x_j
    matched_i     S_ij at the prompt that z_i was sampled from
    marginal_i    log mean_j exp(S_ij)
    I(X;Z)        mean_i (matched_i - marginal_i), the sequence estimate: the only one that is a mutual information
    retrieval     how often the own prompt explains z_i best; 1/N by chance

Two proxies stand beside it, in nats per token: mi_estimate takes S_ij / length for S_ij (the reference code), and
mi_token_estimate divides each row's matched - marginal by its length (the paper).

`collapse_metrics` is exact and pure. `cross_logprobs` fills the matrix, `diagnose` draws what to score; the scripts
call it. For rollouts that another framework wrote:

    python diagnostics.py --model Qwen/Qwen2.5-0.5B-Instruct --rollouts step_1.jsonl step_100.jsonl

Shapes: N scored responses, P prompts (columns), B trajectories or prompts of one forward pass, T tokens of a prompt, L
tokens of a pack of responses, V vocabulary.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2
import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

import llm

Regime = Literal["diverse", "template_collapse", "compressed", "low_entropy_collapse"]
TOP_K = (2, 4, 8)
METRICS = (
    "mi_estimate mi_token_estimate mi_seq_estimate mi_upper_bound conditional_entropy_est conditional_entropy_seq_est "
    "reasoning_entropy_est reasoning_entropy_seq_est matched_log_prob_mean marginal_log_prob_mean marginal_std "
    "marginal_std_seq mi_zscore mi_zscore_seq retrieval_accuracy retrieval_chance_level retrieval_above_chance"
).split() + [f"retrieval_{what}@{k}" for k in TOP_K for what in ("accuracy", "chance_level", "above_chance")]


# ======================================================================================================================
# 1  Estimators
# ======================================================================================================================
def collapse_metrics(
    cross_logprobs_NP: np.ndarray, lengths_N: np.ndarray, own_column_N: np.ndarray, prompt_keys_P=None,
    std_eps: float = 1e-3,
) -> dict[str, float]:  # fmt: skip
    """The metrics named in METRICS, num_responses and num_prompts (columns with equal keys count once).

    `cross_logprobs_NP` are sums of token log-probs in nats, `lengths_N` tokens of each response, `own_column_N` the
    column of the prompt that it was sampled from. Names with _seq are in nats per response, mi_upper_bound is ln N of
    the prompts; the other entropies and log-probs are nats per token. A z-score is mean((matched - marginal) /
    (std_i marginal + std_eps)). Retrieval shares a tie out evenly, so that it is at chance where all prompts are alike.
    Fewer than two prompts, or no response: NaN, but for the counts.
    Raises: ValueError for shapes that do not fit, an empty response, a column that is not there, and a score that is
    NaN or above 0 by more than rounding.
    Source: arXiv:2604.06268; names and normalisations of its code, except ties, which it gives to the first column.

    >>> metrics = collapse_metrics([[-10.0, -20.0], [-20.0, -10.0]], [10, 10], [0, 1])
    >>> round(metrics["mi_seq_estimate"], 4), round(metrics["mi_upper_bound"], 4), metrics["retrieval_accuracy"]
    (0.6931, 0.6931, 1.0)
    """
    scores_NP = np.asarray(cross_logprobs_NP, dtype=np.float64)
    lengths_N, own_N = np.asarray(lengths_N, dtype=np.float64), np.asarray(own_column_N, dtype=np.int64)
    if scores_NP.ndim != 2 or lengths_N.shape != scores_NP.shape[:1] or own_N.shape != scores_NP.shape[:1]:
        raise ValueError(
            f"cross_logprobs {scores_NP.shape} must be (N, P), with lengths {lengths_N.shape} and own_column "
            f"{own_N.shape} of shape (N,)"
        )
    keys_P = list(range(scores_NP.shape[1])) if prompt_keys_P is None else list(prompt_keys_P)
    if len(keys_P) != scores_NP.shape[1]:
        raise ValueError(f"prompt_keys has {len(keys_P)} entries for {scores_NP.shape[1]} prompts; give one for each")
    if len(own_N) and not (lengths_N.min() >= 1 and own_N.min() >= 0 and own_N.max() < len(keys_P)):
        raise ValueError(
            f"each response needs a length of at least 1 and a column below {len(keys_P)}; the least length is "
            f"{lengths_N.min():g}, the columns go from {own_N.min()} to {own_N.max()}; leave empty responses out"
        )
    if not (scores_NP <= 1e-3).all():
        raise ValueError(f"log-probs cannot be NaN or above 0, but one is {scores_NP.max()}; correct the scorer")

    first_of: dict = {}  # key -> its column among the distinct ones
    distinct_P = np.array([first_of.setdefault(key, len(first_of)) for key in keys_P], dtype=np.int64)
    scores_NP = scores_NP[:, np.unique(distinct_P, return_index=True)[1]]
    num_responses, num_prompts = scores_NP.shape
    counts = {"num_responses": float(num_responses), "num_prompts": float(num_prompts)}
    if num_responses == 0 or num_prompts < 2:
        return dict.fromkeys(METRICS, float("nan")) | counts
    own_N, rows_N = distinct_P[own_N], np.arange(num_responses)

    def matched_and_marginal(scores_NP: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return scores_NP[rows_N, own_N], np.logaddexp.reduce(scores_NP, axis=1) - math.log(num_prompts)

    per_token_NP = scores_NP / lengths_N[:, None]
    matched_N, marginal_N = matched_and_marginal(per_token_NP)
    seq_matched_N, seq_marginal_N = matched_and_marginal(scores_NP)
    gain_N, seq_gain_N = matched_N - marginal_N, seq_matched_N - seq_marginal_N
    metrics = {
        "mi_estimate": gain_N.mean(),
        "mi_token_estimate": (seq_gain_N / lengths_N).mean(),
        "mi_seq_estimate": seq_gain_N.mean(),
        "mi_upper_bound": math.log(num_prompts),
        "conditional_entropy_est": -matched_N.mean(),
        "conditional_entropy_seq_est": -seq_matched_N.mean(),
        "reasoning_entropy_est": -marginal_N.mean(),
        "reasoning_entropy_seq_est": -seq_marginal_N.mean(),
        "matched_log_prob_mean": matched_N.mean(),
        "marginal_log_prob_mean": marginal_N.mean(),
        "marginal_std": marginal_N.std(),
        "marginal_std_seq": seq_marginal_N.std(),
        "mi_zscore": (gain_N / (marginal_N.std() + std_eps)).mean(),
        "mi_zscore_seq": (seq_gain_N / (seq_marginal_N.std() + std_eps)).mean(),
    }
    # Of equal scores each takes a place by lot: the chance that the own one is among the first k.
    tied_NP = np.isclose(per_token_NP, matched_N[:, None], rtol=0, atol=1e-6)  # a scorer's float32 is no finer
    better_N, tied_N = ((per_token_NP > matched_N[:, None]) & ~tied_NP).sum(1), tied_NP.sum(1)
    for k in (1, *TOP_K):
        k_eff, suffix = min(k, num_prompts), "" if k == 1 else f"@{k}"
        accuracy, chance = ((k_eff - better_N) / tied_N).clip(0, 1).mean(), k_eff / num_prompts
        metrics[f"retrieval_accuracy{suffix}"] = accuracy
        metrics[f"retrieval_chance_level{suffix}"] = chance
        metrics[f"retrieval_above_chance{suffix}"] = accuracy - chance
    return {name: float(value) for name, value in metrics.items()} | counts


def moving_average(old: float | None, new: float, decay: float = 0.9) -> float:
    """The exponential moving average after `new`; None: there was none before. NaN leaves it as it was.

    >>> round(moving_average(moving_average(0.5, 0.3), 0.1), 3)
    0.442
    """
    if math.isnan(new):
        return float("nan") if old is None else old
    return new if old is None or math.isnan(old) else decay * old + (1 - decay) * new


def reasoning_regime(
    entropy: float, mi: float, mi_bound: float, start_entropy: float, start_mi: float,
    low_entropy: float = 0.5, low_mi: float = 0.5, floor: float = 0.05,
) -> Regime:  # fmt: skip
    """Where a run stands on the two axes of RAGEN-2 (arXiv:2604.06268), which gives no thresholds; these are ours.

    H(Z|X) is low below `low_entropy` of what it was at the start. I(X;Z) is low below `low_mi` of its start, or below
    `floor` of ln N (`mi_bound`): a run may start without any. Entropies in one unit, informations in another.

        diverse               high H, high I    varied thinking about the input
        template_collapse     high H, low I     varied thinking, whatever the input: entropy alone looks fine
        compressed            low H, high I     one thought for each input
        low_entropy_collapse  low H, low I      one thought for all
    Raises: ValueError where one of the numbers is NaN.

    >>> reasoning_regime(1.04, 0.29, 2.77, start_entropy=1.0, start_mi=1.0)
    'template_collapse'
    """
    numbers = (entropy, mi, mi_bound, start_entropy, start_mi)
    if any(math.isnan(number) for number in numbers):
        raise ValueError(f"a regime needs five numbers, and one of {numbers} is NaN; log NaN for the regime too")
    varied = entropy >= low_entropy * start_entropy
    if mi >= max(low_mi * start_mi, floor * mi_bound):
        return "diverse" if varied else "compressed"
    return "template_collapse" if varied else "low_entropy_collapse"


def repeated_share(ids: list[int], longest_phrase: int = 8, times: int = 4) -> float:
    """The share of the tokens in the longest run of one phrase of up to `longest_phrase` tokens, at least `times` over.

    A policy that broke down writes "!!!!" or goes round in a sentence. Nothing repeated, or no token: 0.

    >>> repeated_share([7, 5, 6, 5, 6, 5, 6, 5, 6, 9]), repeated_share([1, 2, 3])
    (0.8, 0.0)
    """
    ids_T, most = np.asarray(ids), 0
    for phrase in range(1, min(longest_phrase, len(ids_T) // times) + 1):
        same = np.concatenate([[False], ids_T[phrase:] == ids_T[:-phrase], [False]])
        starts, ends = np.flatnonzero(same[1:] & ~same[:-1]), np.flatnonzero(same[:-1] & ~same[1:])
        run = int((ends - starts).max(initial=0)) + phrase  # the first time is not the same as anything before
        most = max(most, run if run >= times * phrase else 0)
    return most / max(len(ids_T), 1)


# ======================================================================================================================
# 2  Scoring every response under every prompt
# ======================================================================================================================
PACK = 256  # tokens of responses side by side in one row: each attends past all others, which costs with the length


@torch.no_grad()
def cross_logprobs(
    model, prompts: list[list[int]], responses: list[list[int]], temperature: float = 1.0, max_tokens: int = 4096
) -> np.ndarray:
    """(N, P) float64: the sum of the token log-probs, nats at `temperature`, of each response after each prompt.

    A prompt is encoded once. Its keys and values serve all responses, which stand packed in a row, each seeing the
    prompt and itself alone. `max_tokens` bounds prompts x (prompt + pack) tokens of a forward pass, and so its memory.
    Raises: ValueError for an empty prompt or response, and for a model without full attention in every layer.
    """
    config = model.config.get_text_config()
    windowed = getattr(config, "sliding_window", None) is not None
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"scoring needs full attention in every layer; {type(model).__name__} has {sorted(kinds)}")
    if not all(map(len, prompts)) or not all(map(len, responses)):
        raise ValueError("a prompt and a response need at least one token; leave empty ones out")
    scores_NP = np.zeros((len(responses), len(prompts)))
    by_length = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
    while by_length:
        longest = len(prompts[by_length[-1]])
        width = max(min(PACK, max_tokens - longest, sum(map(len, responses))), max(map(len, responses), default=0))
        columns_B = [by_length.pop() for _ in range(min(len(by_length), max(1, max_tokens // (longest + width))))]
        cache, seen_BT = encode([prompts[p] for p in columns_B], model)
        for rows in packs([len(z) for z in responses], width):
            logprobs_BN = score_pack([prompts[p] for p in columns_B], [responses[n] for n in rows], cache, seen_BT,
                                     model, temperature)  # fmt: skip
            scores_NP[np.ix_(rows, columns_B)] = logprobs_BN.T.double().cpu().numpy()
            cache.crop(-sum(len(responses[n]) for n in rows))
    return scores_NP


def packs(lengths: list[int], width: int) -> list[list[int]]:
    """Indices, in order, cut where the lengths would add up to more than `width`; a longer one is alone."""
    batches: list[list[int]] = []
    used = 0
    for i, length in enumerate(lengths):
        if not batches or used + length > width:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += length
    return batches


def encode(prompts: list[list[int]], model) -> tuple[DynamicCache, torch.Tensor]:
    """Keys and values of all tokens of the prompts but the last, and which of their slots hold one (B, T), bool."""
    # The last token is fed with each response instead: what follows it is the response's first token.
    ids_BT = pad_sequence([torch.tensor(ids[:-1], dtype=torch.long) for ids in prompts], batch_first=True)
    lengths_B = torch.tensor([len(ids) - 1 for ids in prompts])
    seen_BT = (torch.arange(ids_BT.shape[1]) < lengths_B[:, None]).to(model.device)
    cache = DynamicCache(config=model.config)
    if ids_BT.shape[1]:
        # Padding is on the right, so positions count from 0; its keys and values are never attended to.
        model(input_ids=ids_BT.to(model.device), attention_mask=seen_BT.long(), past_key_values=cache, use_cache=True,
              logits_to_keep=1)  # fmt: skip
    return cache, seen_BT


def score_pack(prompts, responses, cache, seen_BT: torch.Tensor, model, temperature: float) -> torch.Tensor:
    """(B, N) log-probs of the responses of one pack after each of the prompts in the cache."""
    device = model.device
    lengths_N = torch.tensor([len(z) for z in responses])
    segment_L = torch.repeat_interleave(torch.arange(len(responses)), lengths_N)
    offset_L = torch.cat([torch.arange(n) for n in lengths_N.tolist()])
    targets_L = torch.tensor([token for z in responses for token in z])
    last_B, ends_B = torch.tensor([ids[-1] for ids in prompts]), torch.tensor([len(ids) - 1 for ids in prompts])
    before_L = torch.cat([targets_L[:1], targets_L[:-1]])
    ids_BL = torch.where(offset_L == 0, last_B[:, None], before_L)  # each token predicts its target
    own_LL = (segment_L[:, None] == segment_L) & (offset_L[:, None] >= offset_L)
    visible_BLT = seen_BT[:, None].expand(-1, len(targets_L), -1)
    visible = torch.cat([visible_BLT, own_LL.to(device).expand(len(prompts), -1, -1)], dim=-1)[:, None]
    # Additive, for eager attention too.
    mask = torch.zeros(visible.shape, dtype=model.dtype, device=device)
    mask.masked_fill_(~visible, torch.finfo(model.dtype).min)
    logits_BLV = model(
        input_ids=ids_BL.to(device),
        attention_mask=mask,
        position_ids=(ends_B[:, None] + offset_L).to(device),
        past_key_values=cache,
        use_cache=True,
    ).logits
    logits_BLV = logits_BLV.float() if temperature == 1 else logits_BLV.float() / temperature
    targets_BL1 = targets_L.to(device).expand(len(prompts), -1)[..., None]
    logprobs_BL = logits_BLV.log_softmax(-1).gather(-1, targets_BL1)[..., 0]  # one fused pass, unlike logsumexp
    logprobs_BN = torch.zeros(len(prompts), len(responses), dtype=torch.float64)
    return logprobs_BN.index_add_(1, segment_L, logprobs_BL.double().cpu())


# ======================================================================================================================
# 3  What is scored
# ======================================================================================================================
def thinking_span(tokenizer, response_ids: list[int]) -> list[int]:
    """The tokens before the closing tag of the thought, as they were sampled; none where there is no tag, or no text.

    `response_ids` begin after the opening tag. A token in which the thought ends and the tag begins is the tag's.
    """
    closed = tokens_with(tokenizer, response_ids, "</think>")
    if closed > len(response_ids):
        return []
    thought, _, _ = decoded(tokenizer, response_ids[:closed]).partition("</think>")
    end = closed
    while len(decoded(tokenizer, response_ids[:end])) > len(thought):
        end -= 1
    return list(response_ids[:end]) if decoded(tokenizer, response_ids[:end]).strip() else []


def tokens_with(tokenizer, ids: list[int], tag: str) -> int:
    """How many of the first tokens it takes to spell `tag`; len(ids) + 1 where it does not occur."""
    return bisect.bisect_left(range(len(ids) + 1), True, key=lambda n: tag in decoded(tokenizer, ids[:n]))


def decoded(tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@dataclass
class Pair:
    """A prompt, up to and with the opening tag, and the thinking that was sampled after it; empty: not valid."""

    prompt: tuple[int, ...]
    thinking: tuple[int, ...]


def draw_first_turns(pairs_B: list[list[Pair]], num_pairs: int, seed: int) -> list[Pair]:
    """Up to `num_pairs` of the valid first turns, without replacement, in order."""
    valid = [pairs[0] for pairs in pairs_B if pairs and pairs[0].thinking]
    chosen = np.random.default_rng((seed, 0)).permutation(len(valid))[:num_pairs]
    return [valid[i] for i in sorted(chosen)]


def draw_any_turns(pairs_B: list[list[Pair]], num_pairs: int, seed: int) -> list[Pair]:
    """As many draws, with replacement, as there are valid turns, but at most `num_pairs`: a trajectory, then one of its
    valid turns; a draw of a trajectory without any is discarded. Long trajectories count no more than short ones."""
    valid_B = [[pair for pair in pairs if pair.thinking] for pairs in pairs_B]
    rng = np.random.default_rng((seed, 1))
    draws = rng.random((min(num_pairs, sum(map(len, valid_B))), 2))
    chosen = [(valid_B[int(u * len(valid_B))], v) for u, v in draws]
    return [turns[int(v * len(turns))] for turns, v in chosen if turns]


def score_pairs(model, pairs: list[Pair], temperature: float, max_tokens: int) -> tuple[dict[str, float], str]:
    """`collapse_metrics` of these pairs under each other's prompts, equal prompts and responses scored once; and why
    they are NaN, or ""."""
    prompts = list(dict.fromkeys(pair.prompt for pair in pairs))
    responses = list(dict.fromkeys(pair.thinking for pair in pairs))
    lengths_N = [len(pair.thinking) for pair in pairs]
    own_column_N = [prompts.index(pair.prompt) for pair in pairs]
    reason = ""
    if len(prompts) < 2:
        reason = f"needs thoughts after at least 2 different prompts; {len(pairs)} were closed, after {len(prompts)}"
    else:
        scores_NP = cross_logprobs(model, prompts, responses, temperature, max_tokens)
        scores_NP = scores_NP[[responses.index(pair.thinking) for pair in pairs]]
        if not np.isfinite(scores_NP).all():
            reason = "the model gave a log-prob that is not finite"
    if reason:
        counts = {"num_responses": float(len(pairs)), "num_prompts": float(len(prompts))}
        return dict.fromkeys(METRICS, float("nan")) | counts, reason
    return collapse_metrics(scores_NP, lengths_N, own_column_N), ""


def diagnose(
    model, pairs_B: list[list[Pair]], state: dict, num_pairs: int = 64, temperature: float = 1.0,
    max_tokens: int = 4096, seed: int = 0, low_entropy: float = 0.5, low_mi: float = 0.5, floor: float = 0.05,
) -> tuple[dict[str, float | str], dict[str, str]]:  # fmt: skip
    """Metrics under diagnostics/, and notes that say why one is NaN. `pairs_B`: the turns of each trajectory, in order.

    first_turn/ scores first turns, whose prompts a group shares; trajectory/ any turn of a trajectory. The regime is
    that of first_turn/. Which pairs are drawn depends on `seed`. `state` lives through the run and its checkpoints: the
    start that the regime is judged against, the best since then, and the moving averages.
    """
    turns, firsts = [pair for pairs in pairs_B for pair in pairs], [pairs[0] for pairs in pairs_B if pairs]
    metrics: dict[str, float | str] = {
        "diagnostics/valid_thinking_rate": share(turns),
        "diagnostics/first_turn/num_total": float(len(firsts)),
        "diagnostics/first_turn/num_valid": float(sum(bool(pair.thinking) for pair in firsts)),
        "diagnostics/first_turn/valid_rate": share(firsts),
    }
    notes = {} if turns else {"diagnostics/valid_thinking_rate": "no turn was played"}
    for name, draw in {"first_turn": draw_first_turns, "trajectory": draw_any_turns}.items():
        pairs = draw(pairs_B, num_pairs, seed)
        found, reason = score_pairs(model, pairs, temperature, max_tokens)
        for suffix in ("", "_seq"):
            spread = f"{name}/marginal_std{suffix}"
            state[spread] = moving_average(state.get(spread), found[f"marginal_std{suffix}"])
            gain = found[f"reasoning_entropy{suffix}_est"] - found[f"conditional_entropy{suffix}_est"]
            found[f"marginal_std_ema{suffix}"] = state[spread]
            found[f"mi_zscore_ema{suffix}"] = gain / (state[spread] + 1e-3)
        metrics |= {f"diagnostics/{name}/{key}": value for key, value in found.items()}
        if reason:
            notes[f"diagnostics/{name}/*"] = reason

    entropy, mi, bound = (
        metrics[f"diagnostics/first_turn/{key}"]
        for key in ("conditional_entropy_est", "mi_seq_estimate", "mi_upper_bound")
    )
    metrics["diagnostics/regime"] = float("nan")
    if math.isnan(mi):
        notes["diagnostics/regime"] = notes["diagnostics/first_turn/*"]
    else:
        start = state.setdefault("start", {"entropy": entropy, "mi": mi})
        if mi >= state.get("best", start)["mi"]:
            state["best"] = {"entropy": entropy, "mi": mi}
        metrics["diagnostics/regime"] = reasoning_regime(
            entropy, mi, bound, start["entropy"], start["mi"], low_entropy, low_mi, floor
        )
    return metrics, notes


def share(pairs: list[Pair]) -> float:
    """Of pairs whose thinking is not empty; of none: NaN."""
    return float(np.mean([bool(pair.thinking) for pair in pairs])) if pairs else float("nan")


def collapse_warning(metrics: dict, state: dict, low_mi: float = 0.5, floor: float = 0.05) -> str:
    """A line to print when a run enters template collapse; "" while it stays there, and in any other regime.

    A run may begin in that regime, as one that has not learned to look yet, or leave it and come back by noise. What
    is warned of is that a run which did look, with at least three times `floor` of ln N, has lost it: I(X;Z) is below
    `low_mi` of the best that it has had.
    """
    regime = metrics["diagnostics/regime"]
    if not isinstance(regime, str):
        return ""
    now = {key.removeprefix("diagnostics/first_turn/"): value for key, value in metrics.items()}
    entropy, mi, best = now["conditional_entropy_est"], now["mi_seq_estimate"], state["best"]
    looked = best["mi"] >= 3 * floor * now["mi_upper_bound"]
    collapsed = looked and regime == "template_collapse" and mi < low_mi * best["mi"]
    entered = collapsed and not state.get("collapsed", False)
    state["collapsed"] = collapsed
    if not entered:
        return ""
    return (
        f"template collapse: entropy is {change(entropy, best['entropy'], 'up', 'down')} while I(X;Z) "
        f"{change(mi, best['mi'], 'rose', 'fell')} from its best, to {mi:.2f} of {now['mi_upper_bound']:.2f} nats, and "
        f"retrieval is at {now['retrieval_accuracy']:.2f} (chance {now['retrieval_chance_level']:.2f}): thoughts vary, "
        "but ever less with the prompt"
    )


def change(now: float, before: float, up: str, down: str) -> str:
    """As in "up 4 percent", of `before`; without a number where that is not above 0."""
    direction = up if now >= before else down
    return f"{direction} {abs(now / before - 1):.0%}".replace("%", " percent") if before > 0 else direction


# ======================================================================================================================
# 4  Gradients by reward spread
# ======================================================================================================================
def quantile_buckets(scores_P: np.ndarray, count: int = 6) -> list[list[int]]:
    """Indices of groups in ascending order of score, ties by index, cut into up to `count` buckets of equal size; the
    rest goes to the last.

    >>> quantile_buckets([3.0, 0.0, 2.0], count=2)
    [[1], [2, 0]]
    """
    order = np.argsort(np.asarray(scores_P, dtype=np.float64), kind="stable").tolist()
    count = min(count, len(order))
    size = len(order) // max(count, 1)
    return [order[b * size : (b + 1) * size if b < count - 1 else None] for b in range(count)]


def bucket_gradients(
    parameters: list[torch.nn.Parameter], backward: Callable[[int, str], int], buckets: list[list[int]],
    components: list[str],
) -> dict[str, float]:  # fmt: skip
    """Norms of the gradient of each component, of each bucket of groups and of "all": "bucket_1/task", "all/entropy"...

    `backward(p, component)` adds to the .grad of the parameters the gradient of that component, summed over the tokens
    of group p, and returns how many those are. A norm is that of the mean over the bucket's own tokens, so buckets of
    any size compare. /ratio is task / (sum of the others): how loud the task is beside the regularisers. /snr is the
    norm of the mean task gradient over the spread between its groups, sqrt(sum ||g_p - mean||^2 / (n - 1)): about
    1 / sqrt(n) where groups have nothing in common, more where they agree. A ratio without regularisers, a spread of
    fewer than two groups: NaN.
    Nothing else is left behind: .grad is None afterwards. Source: the code of arXiv:2604.06268, whose norms depend on
    the size of the bucket; ratio and snr are ours.
    """
    metrics: dict[str, float] = {}

    def square(tensors: list[torch.Tensor]) -> float:
        return torch.stack(torch._foreach_norm(tensors)).cpu().double().square().sum().item()

    for component in components:
        whole = [torch.zeros_like(p) for p in parameters]
        tokens_all, squares_all, groups_all = 0, 0.0, 0
        for b, bucket in enumerate(buckets, start=1):
            summed, tokens, squares = [torch.zeros_like(p) for p in parameters], 0, 0.0
            for group in bucket:
                for p in parameters:
                    p.grad = None
                tokens += backward(group, component)
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
                squares += square(gradients)
                torch._foreach_add_(summed, gradients)
            metrics |= gradient_metrics(f"bucket_{b}", component, square(summed), squares, tokens, len(bucket))
            torch._foreach_add_(whole, summed)
            tokens_all, squares_all, groups_all = tokens_all + tokens, squares_all + squares, groups_all + len(bucket)
        metrics |= gradient_metrics("all", component, square(whole), squares_all, tokens_all, groups_all)
    for p in parameters:
        p.grad = None
    for name in ["all", *(f"bucket_{b}" for b in range(1, len(buckets) + 1))]:
        others = sum(metrics[f"{name}/{component}"] for component in components if component != "task")
        metrics[f"{name}/ratio"] = metrics[f"{name}/task"] / others if others > 0 else float("nan")
    return metrics


def gradient_metrics(
    name: str, component: str, square_of_sum: float, sum_of_squares: float, tokens: int, groups: int
) -> dict[str, float]:
    metrics = {f"{name}/{component}": math.sqrt(square_of_sum) / max(tokens, 1), f"{name}/tokens": float(tokens)}
    if component == "task":
        # sum ||g - mean||^2 = sum ||g||^2 - ||sum g||^2 / n, which never needs all gradients at once.
        spread = math.sqrt(max(sum_of_squares - square_of_sum / groups, 0.0) / (groups - 1)) if groups > 1 else 0.0
        metrics[f"{name}/snr"] = math.sqrt(square_of_sum) / groups / spread if spread > 0 else float("nan")
        metrics[f"{name}/groups"] = float(groups)
    return metrics


# ======================================================================================================================
# 5  Early warnings
# ======================================================================================================================
def early_warnings(
    metrics: dict, state: dict, spread: float = 0.1, success: float = 0.01, repeats: float = 0.5, window: int = 10
) -> dict[str, str]:
    """Name of each trouble that begins with this update -> a line that says what it means and what to try.

    reward_spread: the in-group std of the last `window` updates was, in each, below the share `spread` of the mean of
    the first `window`. low_validation_success: below `success` in the last 5 validations, of all or of one environment.
    repetition: more than the share `repeats` of the sampled tokens is one phrase over and over. 0 turns one off.
    A trouble that goes on is not told again, one that comes back is. `state` lives through the run and its checkpoints.
    Source: the first two from the code of arXiv:2604.06268, which ends the run there; the third after RAGEN issue 52.
    """
    troubles: dict[str, str] = {}
    std = metrics.get("rollout/in_group_std", float("nan"))
    if not math.isnan(std):
        state["first"] = [*state.get("first", []), std][:window]
        state["last"] = [*state.get("last", []), std][-window:]
        state["spreads"] = state.get("spreads", 0) + 1
    if spread and state.get("spreads", 0) >= 2 * window:
        start = sum(state["first"]) / window
        if max(state["last"]) < spread * start:
            troubles["reward_spread"] = (
                f"the members of a group fare ever more alike: in-group std of the last {window} updates at most "
                f"{max(state['last']):.3g}, of the first {window} {start:.3g} in the mean. Little is left to learn "
                "from, and the regularisers go on pushing; try harder tasks, --filter snr, or stop here"
            )
    lows = state.setdefault("low_validations", {})  # name -> how many in a row, also between two validations
    for name, value in metrics.items():
        if success and name.startswith("val/") and name.endswith("success"):
            lows[name] = lows.get(name, 0) + 1 if value < success else 0
    for name in [name for name, count in lows.items() if count >= 5]:
        troubles[f"low_{name.removeprefix('val/').replace('/', '_')}"] = (
            f"{name} was below {success:g} in {lows[name]} validations in a row: the task is out of reach of this "
            "policy, or it broke down; look at trajectories.jsonl, try an easier task or a better --model"
        )
    repeated = metrics.get("rollout/repeated_share", float("nan"))
    if repeats and repeated > repeats:
        troubles["repetition"] = (
            f"{repeated:.0%} of the sampled tokens are one phrase over and over: the policy breaks down. Go back to an "
            "earlier checkpoint with a lower --learning-rate, or more --kl-coef"
        )
    told, state["told"] = state.get("told", []), list(troubles)
    return {name: line for name, line in troubles.items() if name not in told}


# ======================================================================================================================
# 6  Rollouts of any framework
# ======================================================================================================================
@dataclass
class Args:
    model: str
    """what wrote the rollouts, or a checkpoint close to it: a folder, a hub name or a .gguf file"""
    rollouts: tuple[str, ...]
    """JSONL files, a line for each turn: a prompt and a response (see docs/reading_the_signals.md); several files are
    several steps of a run, in order"""
    span: Literal["think", "response"] = "think"
    """what counts as Z: the text before </think>, or the whole response"""
    num_pairs: int = 64
    """pairs drawn for each table; all of them where there are fewer"""
    temperature: float = 1.0
    """that the responses were sampled at"""
    max_tokens: int = 4096
    """prompts x tokens of one forward pass: memory and speed, no number depends on it"""
    seed: int = 1
    """of the draws"""
    regime_entropy: float = 0.5
    """H(Z|X) is low below this share of the first step's"""
    regime_mi: float = 0.5
    """I(X;Z) is low below this share of the first step's"""
    regime_floor: float = 0.05
    """I(X;Z) is low, too, below this share of ln N"""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """torch device"""
    bf16: bool = False
    """weights in bfloat16"""


PROMPTS = ("prompt_ids", "prompt", "input")
RESPONSES = ("response_ids", "completion_ids", "response", "completion", "output")


def is_chat(value) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(message, dict) for message in value)


def content(message: dict) -> str:
    """The text of a message, whose content may be a list of parts. Raises: ValueError for any other content."""
    parts = message.get("content") or ""
    if isinstance(parts, str):
        return parts
    if not is_chat(parts):
        raise ValueError(f"the content of a message must be text or a list of parts, not {parts!r}")
    return "".join(part.get("text") or "" for part in parts)


def check_tokens(kind: str, value, vocabulary: int):
    """Raises: ValueError for what is neither text nor token ids of the model."""
    ids = value if isinstance(value, list) else []
    bad = [token for token in ids if type(token) is not int or not 0 <= token < vocabulary]
    if not isinstance(value, str | list) or bad:
        shown = bad[0] if bad else value
        raise ValueError(f"the {kind} must be text, messages, or token ids from 0 to {vocabulary - 1}, not {shown!r}")


def read_pairs(record: dict, tokenizer, span: str, vocabulary: int | None = None) -> list[Pair]:
    """The pairs of one line: one, or of a conversation one for each message of the assistant.

    Token ids are taken as they are, text is encoded, messages are rendered by the chat template, each prompt with all
    messages before it. Raises: ValueError that says what is missing.
    """
    prompt = next((record[name] for name in PROMPTS if record.get(name) is not None), None)
    response = next((record[name] for name in RESPONSES if record.get(name) is not None), None)
    if prompt is None or response is None:
        raise ValueError(
            f"has {', '.join(record)}; needs one of {', '.join(PROMPTS)} and one of {', '.join(RESPONSES)}"
        )
    if not is_chat(response):
        return [read_pair(prompt, response, tokenizer, span, vocabulary)]
    history = prompt if is_chat(prompt) else [{"role": "user", "content": prompt}]
    return [
        read_pair([*history, *response[:n]], content(message), tokenizer, span, vocabulary)
        for n, message in enumerate(response)
        if message.get("role") == "assistant"
    ]


def read_pair(prompt, response, tokenizer, span: str, vocabulary: int | None = None) -> Pair:
    if is_chat(prompt):
        messages = [{"role": message.get("role"), "content": content(message)} for message in prompt]
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    check_tokens("prompt", prompt, vocabulary or len(tokenizer))
    check_tokens("response", response, vocabulary or len(tokenizer))
    if not isinstance(response, str):
        prompt = encoded(prompt, tokenizer) if isinstance(prompt, str) else prompt
        opened, closed = (tokens_with(tokenizer, response, tag) for tag in ("<think>", "</think>"))
        if span == "think" and opened < closed:
            prompt, response = [*prompt, *response[:opened]], response[opened:]
        thinking = thinking_span(tokenizer, response) if span == "think" else response
    elif span == "response":
        thinking = encoded(response, tokenizer)
    else:
        # A prompt that has no opening tag yet gets the one that the response begins with.
        opening, tag, rest = response.partition("<think>")
        if tag:
            prompt = prompt + (opening + tag if isinstance(prompt, str) else encoded(opening + tag, tokenizer))
        thought, closed, _ = (rest if tag else response).partition("</think>")
        thinking = encoded(thought.rstrip(), tokenizer) if closed and thought.strip() else []
    if isinstance(prompt, str):
        prompt = encoded(prompt, tokenizer)
    if not prompt:
        raise ValueError("the prompt is empty; a thought needs something to follow")
    return Pair(tuple(prompt), tuple(thinking))


def encoded(text: str, tokenizer) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def read_rollouts(file: str, tokenizer, span: str, vocabulary: int | None = None) -> list[list[Pair]]:
    """The turns of each trajectory. Lines with one "trajectory" (any value) belong together; without it, each line is a
    trajectory of its own. Raises: ValueError that names file and line."""
    trajectories: dict[str, list[Pair]] = {}
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8: {error}; write it anew with encoding='utf-8'") from error
    # Not splitlines: JSON may hold U+2028 and its kin as they are, which that takes for ends of lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("is no JSON object")
            pairs = read_pairs(record, tokenizer, span, vocabulary)
        except (ValueError, TypeError, jinja2.TemplateError) as error:
            raise ValueError(f"{file} line {number}: {error}") from error
        name = record.get("trajectory")
        trajectories.setdefault(f"line {number}" if name is None else json.dumps(name), []).extend(pairs)
    if not trajectories:
        raise ValueError(f"{file} is empty; it needs a JSON object a line")
    return list(trajectories.values())


ROWS = {
    "H(Z|X), nats per token": "conditional_entropy_est",
    "H(Z|X), nats per response": "conditional_entropy_seq_est",
    "I(X;Z), nats": "mi_seq_estimate",
    "its bound, ln N": "mi_upper_bound",
    "I(X;Z) proxy, per token before the mean": "mi_estimate",
    "I(X;Z) proxy, per token after the mean": "mi_token_estimate",
    "z-score of the proxy": "mi_zscore",
    "retrieval accuracy": "retrieval_accuracy",
    "  by chance": "retrieval_chance_level",
    "retrieval accuracy @4": "retrieval_accuracy@4",
    "  by chance @4": "retrieval_chance_level@4",
    "responses": "num_responses",
    "different prompts": "num_prompts",
}


def main(args: Args):
    """Prints a table for each set of pairs, and the regime of each step."""
    console = Console()
    try:
        if not args.rollouts:
            raise ValueError(
                "--rollouts needs at least one file, and 0 were given; give JSONL files, a line for each turn"
            )
        for file in args.rollouts:
            if not Path(file).is_file():
                raise ValueError(f"--rollouts {file}: no such file; give JSONL files, a line for each turn")
        if args.model == "tiny":
            raise ValueError("--model tiny is made by each run for itself; give the run's: runs/NAME/checkpoints/N")
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(f"--device {args.device}: this torch sees no GPU; try --device cpu")
        for flag, value, least in (("num-pairs", args.num_pairs, 2), ("max-tokens", args.max_tokens, 1)):
            if value < least:
                raise ValueError(f"--{flag} must be at least {least}, not {value}; leave it out for the default")
        if not args.temperature > 0:
            raise ValueError(f"--temperature must be above 0, not {args.temperature}; leave it out for 1.0")
        model, tokenizer = llm.load_model(args.model)
        vocabulary = model.get_input_embeddings().num_embeddings
        model = model.to(args.device, torch.bfloat16 if args.bf16 else torch.float32)
        state: dict = {}
        columns, warnings = [], []
        for file in args.rollouts:
            pairs_B = read_rollouts(file, tokenizer, args.span, vocabulary)
            metrics, notes = diagnose(
                model, pairs_B, state, args.num_pairs, args.temperature, args.max_tokens, args.seed,
                args.regime_entropy, args.regime_mi, args.regime_floor,
            )  # fmt: skip
            columns.append(metrics)
            lines = dict.fromkeys(
                [collapse_warning(metrics, state, args.regime_mi, args.regime_floor), *notes.values()]
            )
            warnings += [f"{file}: {line}" for line in lines if line]
            if metrics["diagnostics/valid_thinking_rate"] == 0:
                warnings.append(f"{file}: no response has a thought before </think>; for all of it: --span response")
    except ValueError as error:
        console.print(Text(f"error: {error}", style="red"), soft_wrap=True)
        raise SystemExit(2) from None
    for name, title in {"first_turn": "first turns", "trajectory": "any turn"}.items():
        table = Table("", *(Path(file).name for file in args.rollouts), title=title)
        for label, key in ROWS.items():
            digits = 0 if key.startswith("num_") else 3
            table.add_row(label, *(f"{metrics[f'diagnostics/{name}/{key}']:.{digits}f}" for metrics in columns))
        console.print(table)
    for file, metrics in zip(args.rollouts, columns, strict=True):
        regime = metrics["diagnostics/regime"]
        regime = regime if isinstance(regime, str) else "no regime, see below"
        console.print(f"{file}: {regime}", markup=False, soft_wrap=True)
    for line in warnings:
        console.print(Text(line, style="yellow"), soft_wrap=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
