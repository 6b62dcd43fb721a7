"""The tiny model: a tokenizer that loses nothing, a teacher that errs as often as asked, a cache that knows its own."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import llm
import starpo_grpo as script
import tiny

TOKENIZER = tiny.build_tokenizer(["goal (0, 3)\nplayer (2, 0)", " Left Down Right Up", "assistant"] * 2)


@settings(derandomize=True, database=None, deadline=None, max_examples=500)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_tokenizer_gives_back_any_text(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_words_digits_and_tags_are_one_token_each():
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("<think>goal (0, 3)</think><answer> Left || Up</answer>"))
    expected = "<think> goal Ġ( 0 , Ġ3 ) </think> <answer> ĠLeft"
    assert tokens[:10] == expected.split()
    assert tokens[-2:] == ["ĠUp", "</answer>"]


def setup(env="frozen_lake", **options):
    args = script.Args(env=(env,), **options)
    return script.derive(args, script.make_envs(args, {env: 1}))


@pytest.mark.parametrize("env", ["frozen_lake", "sokoban", "bandit"])
def test_teacher_without_noise_always_succeeds_and_with_it_keeps_the_form(env):
    args = setup(env)
    envs, texts, play = script.practice(args)
    tokenizer = tiny.build_tokenizer(texts)
    perfect = play(tiny.noisy_solver(envs, tokenizer, args, noise=0.0), tokenizer, 0, "full")
    assert all(t.success for t in perfect)
    random = play(tiny.noisy_solver(envs, tokenizer, args, noise=1.0), tokenizer, 0, "full")
    assert sum(t.success for t in random) < len(random)
    assert all(turn["valid"] for t in perfect + random for turn in t.turns)


def test_single_turns_hold_every_sampled_token_after_the_first_turn():
    args = setup()
    envs, texts, play = script.practice(args)
    tokenizer = tiny.build_tokenizer(texts)
    episodes = play(tiny.noisy_solver(envs, tokenizer, args, noise=0.5), tokenizer, 0, "full")
    turns = tiny.single_turns(episodes)
    assert len(turns) == sum(len(t.rewards) - 1 for t in episodes)
    samples = [t.samples[0] for t in episodes]
    later = sum(m for s in samples for m, turn in zip(s.loss_mask, s.turn_ids, strict=True) if turn > 0)
    assert sum(sum(mask) for _, mask in turns) == later


def load(args):
    return tiny.load(args, *script.practice(args), script.console)


def test_small_remake_learns_is_cached_and_comes_back_the_same(monkeypatch, tmp_path):
    monkeypatch.setenv("STARPO_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny, "Recipe", lambda: dataclasses.replace(RECIPE, steps=12))
    losses = []
    imitate = tiny.imitate
    monkeypatch.setattr(tiny, "imitate", lambda *a: losses.extend(imitate(*a, progress=False)))
    made, _, key = load(setup())
    assert len(losses) == 12 and losses[-1] < 0.6 * losses[0]
    monkeypatch.setattr(tiny, "imitate", lambda *_: pytest.fail("made again"))
    again, _, same_key = load(setup())
    assert key == same_key
    for a, b in zip(made.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


RECIPE = tiny.Recipe()


def test_key_depends_on_prompt_and_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("STARPO_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny, "imitate", lambda *_: None)
    keys = [load(args)[2] for args in (setup(), setup(think=False), setup(env_options=("size=5",)), setup("bandit"))]
    assert len(set(keys)) == 4
    assert load(setup(num_groups=3, val_episodes=7, seed=9))[2] == keys[0]


def test_checkpoint_comes_back_with_the_same_tokenizer(tmp_path):
    # transformers takes a Qwen2 folder for one of Qwen's own, whose tokenizer splits " 4" into two.
    TOKENIZER.save_pretrained(tmp_path)
    tiny.build_model(TOKENIZER).save_pretrained(tmp_path)
    _, again = llm.load_model(str(tmp_path))
    text = "Turn 2, 4 actions left.\nplayer (2, 0)\ufb01 Left || Up</answer>"
    assert again.encode(text) == TOKENIZER.encode(text)
    assert again.chat_template == TOKENIZER.chat_template


@pytest.mark.parametrize("file", sorted(tiny.SHIPPED.glob("*.safetensors")), ids=lambda path: path.stem)
def test_shipped_weights_are_taken_and_say_where_they_come_from(file, monkeypatch, tmp_path):
    monkeypatch.setenv("STARPO_CACHE", str(tmp_path))
    monkeypatch.setattr(tiny, "imitate", lambda *_: pytest.fail("shipped, but made again: their key is not today's"))
    _, _, key = load(setup(file.stem))
    with safe_open(file, "pt") as weights:
        metadata = weights.metadata()
    assert metadata["key"] == key
    assert metadata["command"] == f"python tiny.py --env {file.stem}"
    assert {"seed", "validation success"} <= set(metadata)
