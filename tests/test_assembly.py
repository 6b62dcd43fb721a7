"""Trajectory assembly: what is sampled is what is stored and trained, under any template that can be appended to."""

import itertools
from types import SimpleNamespace

import pytest
from conftest import (
    QWEN,
    TEMPLATES,
    Corridor,
    Script,
    Whole,
    make_args,
    make_tokenizer,
    make_trajectory,
    respond,
    scored,
)

from envs import make
from starpo_grpo import (
    CHANCE,
    SAMPLE,
    START,
    address,
    check_template,
    first_prompt,
    next_prompt,
    pad,
    rollout,
    rollout_metrics,
    stop_tokens,
    system_prompt,
)

RIGHT = respond("Right")


def run(tokenizer, answer, envs=None, num_groups=1, group_size=1, seed=1, update=1, **options):
    """(trajectories, script, envs) of a rollout in which `answer(trajectory, turn)` is what the model says."""
    envs = envs or [Corridor(max_turns=3) for _ in range(num_groups * group_size)]
    script, args = Script(tokenizer, answer), make_args(envs[0], **options)
    trajectories = rollout(envs, script, tokenizer, args, seed, update, num_groups, group_size)
    return [Whole(**vars(t)) for t in trajectories], script, envs


def sampled_ranges(trajectory, script):
    """(start, end) of each response, told from the prompts that the sampler saw, not from the mask."""
    prompts, given = script.prompts[trajectory.index], script.given[trajectory.index]
    return [(len(prompt), len(prompt) + len(sampled.token_ids)) for prompt, sampled in zip(prompts, given, strict=True)]


def varied(trajectory, turn):
    """Responses of all kinds: stopped, cut at the limit, invalid, two actions."""
    end = trajectory.samples[-1].ids[-1]  # the token of the prefilled tag, to be sure that it is no header
    kinds = [RIGHT, scored([40, 41, 42], "length"), "?", respond("Right", "Left"), scored([end, 43], "length")]
    return kinds[(trajectory.index + turn) % len(kinds)]


# ------------------------------------------------------------------------------------------------ ids and mask


def test_loss_mask_is_one_exactly_on_sampled_tokens(each_tokenizer):
    trajectories, script, _ = run(each_tokenizer, varied, num_groups=3, group_size=2, format_penalty=0.0)
    for t in trajectories:
        ranges, given = sampled_ranges(t, script), script.given[t.index]
        assert len(ranges) == 3
        expected_mask, expected_logprobs = [0] * len(t.ids), [0.0] * len(t.ids)
        for (start, end), sampled in zip(ranges, given, strict=True):
            assert t.ids[start:end] == sampled.token_ids
            expected_mask[start:end] = [1] * (end - start)
            expected_logprobs[start:end] = sampled.logprobs
        assert t.loss_mask == expected_mask
        # A log-prob on every trained token and on no other.
        assert t.sampler_logprobs == expected_logprobs
        assert [logprob != 0 for logprob in t.sampler_logprobs] == [bool(mask) for mask in t.loss_mask]
        assert len(t.turn_ids) == len(t.ids)


def test_prompts_only_grow(each_tokenizer):
    # Each prompt is the one before, the response as sampled, and something new.
    trajectories, script, _ = run(each_tokenizer, varied, num_groups=3, group_size=2)
    for t in trajectories:
        prompts = [*script.prompts[t.index], t.ids]
        for prompt, sampled, following in zip(prompts, script.given[t.index], prompts[1:], strict=False):
            assert following[: len(prompt) + len(sampled.token_ids)] == prompt + sampled.token_ids


def test_whole_trajectory_of_the_qwen_template_matches_hand_written_text(tokenizer):
    (t,), _, envs = run(tokenizer, lambda _, turn: [RIGHT, "?"][turn], envs=[Corridor(max_turns=2)], max_actions=5)
    name = envs[0].resets[0][0] % 100_000
    trained = ["go</think><answer>Right</answer><|im_end|>", "?<|im_end|>"]
    expected = (
        "<|im_start|>system\nWalk to the right.\nActions: Left, Right; 5 in all, up to 2 a turn.\n"
        "Answer in this form: <think>your thoughts</think><answer>Left || Right</answer><|im_end|>\n"
        f"<|im_start|>user\nTurn 1, 5 actions left.\ncorridor {name} cell 0<|im_end|>\n"
        f"<|im_start|>assistant\n<think>{trained[0]}\n"
        f"<|im_start|>user\nReward: 0.25\nTurn 2, 4 actions left.\ncorridor {name} cell 1<|im_end|>\n"
        f"<|im_start|>assistant\n<think>{trained[1]}"
    )
    assert tokenizer.decode(t.ids) == expected
    assert tokenizer.decode([i for i, mask in zip(t.ids, t.loss_mask, strict=True) if mask]) == "".join(trained)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_equal_one_full_render_when_the_template_only_appends(name):
    tokenizer, args = make_tokenizer(TEMPLATES[name]), make_args()
    (t,), _, envs = run(tokenizer, lambda *_: RIGHT)
    messages = [{"role": "system", "content": system_prompt(envs[0], args)}]
    for turn in t.turns:
        messages += [{"role": "user", "content": turn["user"]}, {"role": "assistant", "content": turn["response"]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = tokenizer.encode(text.rstrip("\n"), add_special_tokens=False)
    if name == "qwen3":
        # This one drops the thinking of earlier turns; what was sampled stays all the same.
        assert text.count("go</think>") == 1
        assert tokenizer.decode(t.ids).count("go</think>") == 3
    else:
        assert t.ids == whole
    assert t.ids.count(tokenizer.bos_token_id) == (name == "llama3")


def test_sampled_ids_are_kept_even_where_text_would_be_encoded_otherwise(each_tokenizer):
    tokenizer = each_tokenizer
    merged = tokenizer.encode(RIGHT, add_special_tokens=False)
    right = tokenizer.encode("Right", add_special_tokens=False)
    assert len(right) == 1
    split = [tokenizer.convert_tokens_to_ids(letter) for letter in "Right"]
    where = merged.index(right[0])
    ids = [*merged[:where], *split, *merged[where + 1 :], tokenizer.eos_token_id]
    assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) != ids
    (t,), script, envs = run(tokenizer, lambda *_: scored(ids, "stop"))
    assert envs[0].steps == ["Right"] * 3
    for start, end in sampled_ranges(t, script):
        assert t.ids[start:end] == ids
    assert sum(t.loss_mask) == 3 * len(ids)


# ------------------------------------------------------------------------------------------------ ends of a turn


def between(trajectory, script, turn):
    """ids and mask from the end of the response of `turn` to the start of the next."""
    (_, start), (end, _) = sampled_ranges(trajectory, script)[turn : turn + 2]
    return trajectory.ids[start:end], trajectory.loss_mask[start:end]


def test_sampled_stop_token_appears_once_and_is_trained(each_tokenizer):
    (t,), script, _ = run(each_tokenizer, lambda *_: RIGHT)
    stop = each_tokenizer.eos_token_id
    for turn, (_, end) in enumerate(sampled_ranges(t, script)):
        assert (t.ids[end - 1], t.loss_mask[end - 1]) == (stop, 1)
        if turn < 2:
            ids, mask = between(t, script, turn)
            # The one stop token in between ends the user message.
            assert (ids[0] == stop, ids.count(stop), sum(mask)) == (False, 1, 0)


def test_turn_cut_at_its_limit_is_closed_by_untrained_tokens(each_tokenizer):
    cut = each_tokenizer.encode("go on and", add_special_tokens=False)
    (t,), script, _ = run(each_tokenizer, lambda *_: scored(cut, "length"))
    ids, mask = between(t, script, 0)
    assert (ids[0], ids.count(each_tokenizer.eos_token_id), sum(mask)) == (each_tokenizer.eos_token_id, 2, 0)
    assert sum(t.loss_mask) == 3 * len(cut)
    assert [turn["finish_reason"] for turn in t.turns] == ["length"] * 3
    assert rollout_metrics([t], 1, "")["cut_turns"] == 1.0
    # Nothing follows the last response.
    assert t.ids[-len(cut) :] == cut


def test_tokens_between_turns_are_the_same_whether_the_stop_token_was_sampled_or_not(each_tokenizer):
    responses = each_tokenizer.encode("go on", add_special_tokens=False)
    stopped, cut = scored([*responses, each_tokenizer.eos_token_id], "stop"), scored(responses, "length")
    (a,), _, _ = run(each_tokenizer, lambda *_: stopped)
    (b,), _, _ = run(each_tokenizer, lambda *_: cut)
    assert a.ids[:-1] == b.ids
    assert sum(a.loss_mask) == sum(b.loss_mask) + 3


def test_second_stop_token_ends_a_response_and_is_not_truncation(tokenizer):
    other = tokenizer.pad_token_id  # <|endoftext|>
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[other, tokenizer.eos_token_id]))
    assert stop_tokens(model, tokenizer) == {other, tokenizer.eos_token_id}
    ids = [*tokenizer.encode(RIGHT, add_special_tokens=False), other]
    (t,), script, envs = run(tokenizer, lambda *_: scored(ids, "stop"))
    assert envs[0].steps == ["Right"] * 3
    assert t.penalties == [0.0] * 3
    assert t.turns[0]["response"] == "<think>" + RIGHT
    assert rollout_metrics([t], 1, "")["cut_turns"] == 0.0
    # The template's own closing token follows, untrained; the sampled one is trained.
    gap, mask = between(t, script, 0)
    assert (gap[0], gap.count(other), sum(mask)) == (tokenizer.eos_token_id, 0, 0)
    assert sum(t.loss_mask) == 3 * len(ids)


def test_stop_tokens_takes_one_id_or_none_from_the_model(tokenizer):
    for eos, expected in ((7, {7, tokenizer.eos_token_id}), (None, {tokenizer.eos_token_id})):
        model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=eos))
        assert stop_tokens(model, tokenizer) == expected


def test_padding_never_counts_as_sampled_when_no_stop_token_came():
    cut = make_trajectory([[5, 6], [9, 9, 9, 9]])
    longer = make_trajectory([[5, 6], [9, 9, 9, 9], [7] * 5])
    ids_BT, attention_mask_BT, loss_mask_BS = pad([cut, longer], "cpu")
    assert loss_mask_BS.sum(1).tolist() == [4, 4]
    assert attention_mask_BT.sum(1).tolist() == [6, 11]
    assert ids_BT[0].tolist() == [5, 6, 9, 9, 9, 9, 0, 0, 0, 0, 0]
    # Index s belongs to the token at s + 1.
    assert loss_mask_BS[0].tolist() == [0, 1, 1, 1, 1, 0, 0, 0, 0, 0]


def test_turn_ids_name_the_turn_in_which_a_token_was_appended(each_tokenizer):
    trajectories, script, _ = run(each_tokenizer, varied, num_groups=3, group_size=2)
    for t in trajectories:
        ends = [end for _, end in sampled_ranges(t, script)]
        assert t.turn_ids == [sum(end <= i for end in ends) for i in range(len(t.ids))]


# ------------------------------------------------------------------------------------------------ templates


def changed(old: str, new: str) -> str:
    assert old in QWEN
    return QWEN.replace(old, new)


CONTENT = "{{ m['content'] }}"
REFUSED = {
    "it changes earlier messages when a message is added": [
        "{{ messages | length }} messages\n" + QWEN,
        changed(CONTENT, "{% if loop.last %}{{ m['content'] }}{% endif %}"),
    ],
    "it changes the text of a response, or drops it": [
        changed(CONTENT, "{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}"),
        changed(CONTENT, "{{ m['content'] | upper }}"),
    ],
    "what it writes after a response depends on the turns before": [
        changed("<|im_start|>{{ m['role'] }}", "<|im_start|>{{ m['role'] }} {{ loop.index }}"),
    ],
    "a response is closed by 'Ċ', which is no stop token of the model": [changed("<|im_end|>", "")],
}


@pytest.mark.parametrize(("reason", "template"), [(reason, t) for reason, ts in REFUSED.items() for t in ts])
def test_template_that_cannot_be_appended_to_is_refused_with_the_reason(reason, template):
    tokenizer = make_tokenizer(template)
    with pytest.raises(ValueError) as error:
        check_template(tokenizer, {tokenizer.eos_token_id}, make_args())
    assert f"because {reason}; take another model" in str(error.value)


def test_template_that_drops_responses_is_refused_when_words_are_spelt_in_bytes():
    template = changed(CONTENT, "{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}")
    tokenizer = make_tokenizer(template, words=[])
    with pytest.raises(ValueError, match="it changes the text of a response, or drops it"):
        check_template(tokenizer, {tokenizer.eos_token_id}, make_args())


def test_template_without_a_system_role_is_refused():
    role = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    tokenizer = make_tokenizer(role + QWEN)
    with pytest.raises(ValueError, match="System role not supported"):
        check_template(tokenizer, {tokenizer.eos_token_id}, make_args())


def test_model_without_chat_template_is_refused():
    bare = make_tokenizer()
    bare.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        check_template(bare, {bare.eos_token_id}, make_args())


def test_templates_of_three_families_are_accepted(each_tokenizer):
    stops = {each_tokenizer.eos_token_id}
    assert check_template(each_tokenizer, stops, make_args()) == stops


def test_token_that_closes_a_response_stops_a_base_model_too(tokenizer):
    # Base models of the Qwen2.5 family have the template, and <|endoftext|> for their only end.
    base = {tokenizer.pad_token_id}
    assert check_template(tokenizer, base, make_args()) == base | {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_template_that_cannot_be_appended_to_serves_one_message_a_prompt():
    tokenizer = make_tokenizer("{{ messages | length }} messages\n" + QWEN)
    args = make_args(context="turn")
    assert check_template(tokenizer, {tokenizer.eos_token_id}, args) == {tokenizer.eos_token_id}


@pytest.mark.parametrize("think", [True, False])
def test_opening_tag_is_prefilled_once(think):
    tag = "<think>" if think else "<answer>"
    args = make_args(think=think)
    template_with_tag = QWEN.replace("assistant\n{% endif %}", "assistant\n" + tag + "\n{% endif %}")
    for template in (QWEN, template_with_tag):
        tokenizer = make_tokenizer(template)
        for ids in (first_prompt(tokenizer, "a", "b", args), next_prompt(tokenizer, "b", args)):
            text = tokenizer.decode(ids)
            assert text.count(tag) == 1
            assert text.rstrip().endswith("<|im_start|>assistant\n" + tag)


# ------------------------------------------------------------------------------------------------ budgets


def test_context_budget_ends_the_trajectory_and_never_cuts_it(each_tokenizer):
    def play(max_model_len):
        envs = [Corridor(max_turns=50, growth=4)]
        return run(each_tokenizer, lambda *_: RIGHT, envs, max_actions=99, max_model_len=max_model_len)

    (t,), script, envs = play(260)
    (free,), free_script, _ = play(1000)
    assert (t.ended, t.success) == ("context", False)
    assert 2 <= len(t.rewards) == len(envs[0].steps) < 50
    # Room for a whole response at every turn that was played, and none for the next.
    assert all(len(prompt) + 24 <= 260 for prompt in script.prompts[0])
    # The next prompt is not stored: nothing was sampled after it.
    assert t.loss_mask[-1] == 1
    assert len(free_script.prompts[0][len(t.rewards)]) + 24 > 260
    # The same tokens as without a budget, from the first one on.
    assert t.ids == free.ids[: len(t.ids)]
    assert sum(t.loss_mask) == sum(len(sampled.token_ids) for sampled in script.given[0])


def test_context_budget_when_the_first_prompt_does_not_fit(tokenizer):
    (t,), script, envs = run(tokenizer, lambda *_: RIGHT, max_model_len=30, max_new_tokens=24)
    assert (t.ended, t.rewards, t.samples, script.given) == ("context", [], [], {})
    assert envs[0].steps == []
    assert rollout_metrics([t], 1, "")["context_ended"] == 1.0


def test_trajectory_that_has_ended_is_not_sampled_again(tokenizer):
    envs = [Corridor(goal=goal, max_turns=4) for goal in (1, 100, 2, 100)]
    trajectories, script, _ = run(tokenizer, lambda *_: RIGHT, envs=envs, num_groups=2, group_size=2)
    assert [len(script.given[i]) for i in range(4)] == [1, 4, 2, 4]
    assert [t.ended for t in trajectories] == ["done", "turns", "done", "turns"]
    assert [t.success for t in trajectories] == [True, False, True, False]


# ------------------------------------------------------------------------------------------------ groups and seeds


def test_first_observation_is_in_the_first_prompt(each_tokenizer):
    trajectories, script, envs = run(each_tokenizer, lambda *_: RIGHT, num_groups=2, group_size=2)
    for t in trajectories:
        name = envs[t.index].resets[0][0] % 100_000
        assert f"corridor {name} cell 0" in each_tokenizer.decode(script.prompts[t.index][0])
        assert f"corridor {name} cell 1" in each_tokenizer.decode(script.prompts[t.index][1])


def test_rollout_returns_trajectories_by_group_then_member(tokenizer):
    # Trajectories end in another order than they began; advantages are taken by position.
    envs = [Corridor(goal=1 + (5 * i) % 4, max_turns=4) for i in range(6)]
    trajectories, _, _ = run(tokenizer, lambda *_: RIGHT, envs=envs, num_groups=2, group_size=3)
    assert [(t.index, t.group, t.member) for t in trajectories] == [
        (0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2),
    ]  # fmt: skip
    assert [len(t.rewards) for t in trajectories] == [1, 2, 3, 4, 1, 2]


def test_group_shares_its_start_and_differs_in_chance(tokenizer):
    _, script, envs = run(tokenizer, lambda *_: RIGHT, num_groups=3, group_size=4)
    starts = [env.resets[0][0] for env in envs]
    chances = [env.resets[0][1] for env in envs]
    for group in range(3):
        members = range(4 * group, 4 * group + 4)
        assert len({starts[i] for i in members}) == 1
        assert len({tuple(script.prompts[i][0]) for i in members}) == 1
    assert len(set(starts)) == 3
    assert len(set(chances)) == 12
    assert len({seed for seeds in script.seeds.values() for seed in seeds}) == 12 * 3


def test_group_on_slippery_ice_ends_in_different_cells(tokenizer):
    options = {"desc": ("SFFF", "FFFF", "FFFF", "FFFG"), "slippery": True, "success_rate": 0.5}
    envs = [make("frozen_lake", **options) for _ in range(8)]
    trajectories, script, _ = run(tokenizer, lambda *_: respond("Right", "Down"), envs=envs, group_size=8)
    assert len({tuple(script.prompts[i][0]) for i in range(8)}) == 1
    assert len({t.turns[-1]["observation"] for t in trajectories}) > 1


def test_rollout_depends_on_its_address_alone(tokenizer):
    def resets_and_seeds(seed, update, num_groups=2):
        envs = [Corridor(max_turns=3) for _ in range(6)]
        _, script, _ = run(tokenizer, lambda *_: RIGHT, envs, num_groups, 3, seed, update)
        return [(envs[i].resets, script.seeds[i]) for i in range(3 * num_groups)]

    first = resets_and_seeds(1, 1)
    assert resets_and_seeds(1, 1) == first
    assert resets_and_seeds(1, 1, num_groups=1) == first[:3]
    for other in (resets_and_seeds(2, 1), resets_and_seeds(1, 2)):
        assert all(a[0] != b[0] and set(a[1]).isdisjoint(b[1]) for a, b in zip(first, other, strict=True))


def test_first_start_fixes_the_initial_states(tokenizer):
    envs = [Corridor() for _ in range(4)]
    rollout(envs, Script(tokenizer, lambda *_: RIGHT), tokenizer, make_args(envs[0]), 1, 1, 2, 2, first_start=123)
    assert [env.resets[0][0] for env in envs] == [123, 123, 124, 124]


def test_addresses_are_distinct_non_negative_and_the_same_on_every_machine():
    paths = itertools.product((0, 1, 2), (START, CHANCE, SAMPLE), (0, 1, 2), (0, 1, 2), (0, 1, 2), (0, 1, 2))
    seeds = [address(*path) for path in paths]
    assert len(set(seeds)) == 3**6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert all(type(seed) is int for seed in seeds)
