"""What the scripts measure beside the training: pairs of prompt and thought, records, what a filter ranks by, the
gradient probe. Against texts and against float64, one row at a time."""

import copy
import json
import math

import numpy as np
import pytest
import torch
from conftest import Corridor, Script, make_args, make_model, make_trajectory, respond
from test_loss import REWARDS, random_batch, slow_logprobs

import starpo_grpo
import starpo_ppo
from starpo_grpo import filter_values, kept_groups, prepare_batch, probe, rollout, thinking_pairs, trajectory_record

MODES = ["full", "window", "turn"]


def play(tokenizer, answer, context, group_size=1):
    envs = [Corridor(max_turns=3) for _ in range(2 * group_size)]
    args = make_args(envs[0], context=context, num_groups=2, group_size=group_size)
    script = Script(tokenizer, answer)
    return rollout(envs, script, tokenizer, args, 1, 1, 2, group_size), script, args


# ------------------------------------------------------------------------------------------------ thinking_pairs


@pytest.mark.parametrize("context", MODES)
def test_pairs_are_the_prompt_that_the_sampler_saw_and_the_thought_as_it_was_sampled(tokenizer, context):
    said = ["go</think><answer>Right</answer>", "look at it</think><answer>Left</answer>", "never closed"]
    thoughts = ["go", "look at it", ""]

    def answer(trajectory, turn):
        return said[(trajectory.index + turn) % 3]

    trajectories, script, _ = play(tokenizer, answer, context, group_size=2)
    for pairs, t in zip(thinking_pairs(trajectories, tokenizer), trajectories, strict=True):
        assert [list(pair.prompt) for pair in pairs] == script.prompts[t.index]
        assert all(tokenizer.decode(pair.prompt).endswith("<think>") for pair in pairs)
        expected = [thoughts[(t.index + turn) % 3] for turn in range(3)]
        assert [tokenizer.decode(pair.thinking) for pair in pairs] == expected
        for pair, sampled in zip(pairs, script.given[t.index], strict=True):
            assert list(pair.thinking) == sampled.token_ids[: len(pair.thinking)]


def test_members_of_a_group_share_their_first_prompt_and_groups_do_not(tokenizer):
    trajectories, _, _ = play(tokenizer, lambda *_: respond("Right"), "full", group_size=3)
    firsts = [pairs[0].prompt for pairs in thinking_pairs(trajectories, tokenizer)]
    assert firsts[0] == firsts[1] == firsts[2] != firsts[3] == firsts[4] == firsts[5]


# ------------------------------------------------------------------------------------------------ trajectory_record


@pytest.mark.parametrize("context", MODES)
def test_record_has_all_text_and_marks_what_is_trained(tokenizer, context):
    trajectories, script, _ = play(tokenizer, lambda *_: "go <script>x</script></think><answer>Left</answer>", context)
    t = trajectories[0]
    record = json.loads(json.dumps(trajectory_record(t, 7, "train", tokenizer)))
    assert (record["update"], record["phase"], record["env"], record["success"]) == (7, "train", "corridor", False)
    assert [turn["thinking"] for turn in record["turns"]] == ["go <script>x</script>"] * 3
    assert [turn["repeated"] for turn in record["turns"]] == [0.0] * 3
    assert len(record["samples"]) == len(t.samples)
    for pieces, sample in zip(record["samples"], t.samples, strict=True):
        assert "".join(piece["text"] for piece in pieces) == tokenizer.decode(sample.ids)
        assert sum(piece["tokens"] for piece in pieces) == len(sample.ids)
        assert sum(piece["tokens"] for piece in pieces if piece["trained"]) == sum(sample.loss_mask)
    trained = [piece["text"] for pieces in record["samples"] for piece in pieces if piece["trained"]]
    assert trained == [tokenizer.decode(sampled.token_ids) for sampled in script.given[0]]


# ------------------------------------------------------------------------------------------------ filters


def test_filter_ranks_by_length_entropy_or_returns_with_penalties(model, accelerator):
    trajectories = random_batch(rewards=REWARDS, number=6)
    trajectories[4].penalties[-1] = -0.3
    options = dict(num_groups=2, group_size=3, minibatch_size=6, filter="snr")

    def of(**changes):
        return filter_values(model, trajectories, accelerator, make_args(**options, **changes))

    assert of().tolist() == [REWARDS[:3], REWARDS[3:]]
    total = [*REWARDS[3:4], pytest.approx(REWARDS[4] - 0.3), REWARDS[5]]
    assert of(filter_reward="total").tolist() == [REWARDS[:3], total]
    lengths = [[sum(t.loss_mask) for t in trajectories[:3]], [sum(t.loss_mask) for t in trajectories[3:]]]
    assert of(filter_metric="length").tolist() == lengths
    model64, means = copy.deepcopy(model).double(), []
    for t in trajectories:
        mask_S = torch.tensor(t.loss_mask[1:], dtype=torch.bool)
        means.append(slow_logprobs(model64, t, 1.0)[1][mask_S].mean().item())
    for metric in ("entropy", "entropy_variance", "entropy_std"):
        assert of(filter_metric=metric).ravel().tolist() == pytest.approx(means, rel=1e-5)

    longest = int(np.mean(lengths[1]) > np.mean(lengths[0]))
    args = make_args(**options, filter_metric="length", filter_strategy="top_k_abs", filter_value=1)
    assert kept_groups(of(filter_metric="length"), trajectories, args) == [longest]
    args.filter_direction = "smallest"
    assert kept_groups(of(filter_metric="length"), trajectories, args) == [1 - longest]


def test_entropy_of_a_trajectory_without_a_token_is_zero(model, accelerator):
    trajectories = random_batch(number=3)
    trajectories[1].samples = []
    args = make_args(num_groups=1, group_size=3, minibatch_size=3, filter="snr", filter_metric="entropy")
    scores_PG = filter_values(model, trajectories, accelerator, args)
    assert scores_PG[0, 1] == 0 and scores_PG[0, 0] > 0


# ------------------------------------------------------------------------------------------------ probe


def flat(gradients) -> torch.Tensor:
    return torch.cat([g.flatten() for g in gradients])


def slow_gradients(model, ref, trajectories, advantages, temperature):
    """Per trajectory the gradients, summed over its tokens, of task loss, -entropy and k3 KL, in float64."""
    model, ref = copy.deepcopy(model).double(), copy.deepcopy(ref).double()
    found = []
    for t, advantage_S in zip(trajectories, advantages, strict=True):
        mask_S = torch.tensor(t.loss_mask[1:], dtype=torch.bool)
        logprobs_S, entropies_S = slow_logprobs(model, t, temperature)
        with torch.no_grad():
            ref_S, _ = slow_logprobs(ref, t, temperature)
        # At ratio 1 the gradient of -A * ratio is that of -A * logprob; weighted k3 adds its value times dlogprob.
        d_S = logprobs_S - ref_S
        k3_S = (-d_S).exp() + d_S - 1
        terms = {
            "task": -(advantage_S.double() * logprobs_S)[mask_S].sum(),
            "entropy": -entropies_S[mask_S].sum(),
            "kl": (k3_S + k3_S.detach() * logprobs_S)[mask_S].sum(),
        }
        found.append({})
        for name, term in terms.items():
            found[-1][name] = flat(torch.autograd.grad(term, list(model.parameters()), retain_graph=True))
    return found


@pytest.mark.parametrize("script", [starpo_grpo, starpo_ppo])
def test_probe_equals_float64_gradients_of_each_bucket(script, accelerator):
    model, ref = make_model(seed=3), make_model(seed=4)
    # Groups of three with a spread of 0.1, 1, none, 0.5.
    rewards = [0.0, 0.1, 0.2, 1.0, 0.0, -1.0, 0.3, 0.3, 0.3, 0.5, 0.0, 0.5]
    trajectories = random_batch(number=12, rewards=rewards)
    options = dict(num_groups=4, group_size=3, minibatch_size=12, temperature=0.8, microbatch_tokens=30)
    options |= dict(ent_coef=0.01, kl_coef=0.2, probe_buckets=2)
    args = script.derive(script.Args(lr_warmup=0, lr_decay=False, **options), [Corridor()])
    if script is starpo_ppo:
        critic = starpo_ppo.Critic(model, shared=False)
        batch = starpo_ppo.prepare_batch(model, critic, ref, accelerator, trajectories, args)
    else:
        batch = prepare_batch(model, ref, accelerator, trajectories, args)
    notes = {}
    metrics = script.probe(model, batch, trajectories, accelerator, args, notes)
    assert notes == {}
    assert all(p.grad is None for p in model.parameters())

    advantages = [batch.advantages[i] for i in range(12)]
    slow = slow_gradients(model, ref, trajectories, advantages, 0.8)
    tokens = [sum(t.loss_mask) for t in trajectories]
    for name, groups in {"all": [0, 1, 2, 3], "bucket_1": [2, 0], "bucket_2": [3, 1]}.items():
        members = [3 * p + g for p in groups for g in range(3)]
        count = sum(tokens[i] for i in members)
        norms = {}
        for component, coefficient in {"task": 1.0, "entropy": 0.01, "kl": 0.2}.items():
            norms[component] = coefficient * sum(slow[i][component] for i in members).norm().item() / count
            assert metrics[f"grad_norm/{name}/{component}"] == pytest.approx(norms[component], rel=1e-4), component
        ratio = norms["task"] / (norms["entropy"] + norms["kl"])
        assert metrics[f"grad_norm/{name}/ratio"] == pytest.approx(ratio, rel=1e-4)
        of_groups = torch.stack([sum(slow[3 * p + g]["task"] for g in range(3)) for p in groups])
        spread = (of_groups - of_groups.mean(0)).square().sum().div(len(groups) - 1).sqrt()
        snr = (of_groups.mean(0).norm() / spread).item()
        assert metrics[f"grad_norm/{name}/snr"] == pytest.approx(snr, rel=1e-3)
        stds = [np.std(rewards[3 * p : 3 * p + 3], ddof=1) for p in groups]
        assert metrics[f"grad_norm/{name}/reward_std_mean"] == pytest.approx(np.mean(stds))
        assert metrics[f"grad_norm/{name}/reward_std_max"] == pytest.approx(np.max(stds))
        assert (metrics[f"grad_norm/{name}/groups"], metrics[f"grad_norm/{name}/tokens"]) == (len(groups), count)


def test_probe_without_regularisers_has_no_ratio_and_says_why(accelerator):
    model, trajectories = make_model(), random_batch(rewards=REWARDS)
    args = make_args(num_groups=2, group_size=3, minibatch_size=6, ent_coef=0.0)
    notes, batch = {}, prepare_batch(model, None, accelerator, trajectories, args)
    metrics = probe(model, batch, trajectories, accelerator, args, notes)
    assert math.isnan(metrics["grad_norm/all/ratio"]) and "regulariser" in notes["grad_norm/all/ratio"]
    # Two groups in six buckets: one each, and no spread between groups in any.
    assert math.isnan(metrics["grad_norm/bucket_1/snr"]) and "two groups" in notes["grad_norm/bucket_1/snr"]
    assert "grad_norm/all/entropy" not in metrics and metrics["grad_norm/all/task"] > 0


def test_probe_of_a_group_of_equal_returns_has_no_task_gradient(accelerator):
    trajectories = [make_trajectory([[5, 6], [7, 8 + i]], i, i // 2, i % 2, [1.0, 1.0, 1.0, 0.0][i]) for i in range(4)]
    model, args = make_model(), make_args(num_groups=2, group_size=2, minibatch_size=4, probe_buckets=2)
    batch = prepare_batch(model, None, accelerator, trajectories, args)
    metrics = probe(model, batch, trajectories, accelerator, args, {})
    assert metrics["grad_norm/bucket_1/task"] == 0 == metrics["grad_norm/bucket_1/ratio"]
    assert metrics["grad_norm/bucket_1/entropy"] > 0 and metrics["grad_norm/bucket_2/task"] > 0
