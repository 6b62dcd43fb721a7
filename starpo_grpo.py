"""StarPO with group-relative advantages (GRPO): an LLM agent trained over many turns, in one file.

StarPO (State-Thinking-Actions-Reward Policy Optimization, RAGEN, arXiv:2504.20073) optimises whole trajectories. One
update rolls out P groups of G trajectories; the members of a group share their initial state. A trajectory is up to K
turns of observation -> <think> thinking </think> <answer> actions </answer> -> reward, kept as one list of tokens.

    return         R_i  = sum over turns of (environment reward + format penalty)
    advantage      A_i  = (R_i - mean_group R) / (std_group R + 1e-6), the same on every sampled token of trajectory i
    ratio          r_t  = exp(logprob_t - old_logprob_t)
    policy loss    L_t  = max(-A r_t, -A clip(r_t, 1 - clip_low, 1 + clip_high)), and at most -A dual_clip where A < 0
    loss           L_t - ent_coef * entropy_t + kl_coef * KL_t, averaged over the sampled tokens of a minibatch

    python starpo_grpo.py                              a tiny model learns FrozenLake on a laptop CPU
    python starpo_grpo.py --env sokoban                another environment
    accelerate launch starpo_grpo.py --env sokoban --model Qwen/Qwen2.5-3B-Instruct        one GPU

Shapes: P groups, G group size, B trajectories (P*G of them, or those of a microbatch), K turns, T tokens, S = T-1
next-token positions (index s predicts token s+1), C columns of S in which something was sampled, M sampled tokens, V
vocabulary.
"""

from __future__ import annotations

import ast
import copy
import difflib
import importlib.util
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

import gymnasium
import jinja2
import numpy as np
import torch
import tyro
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import envs as environments
import report
import tiny
from generation import HFSampler, Sampled

console = Console()
transformers_logging.disable_progress_bar()


# ======================================================================================================================
# 1  Arguments
# ======================================================================================================================
@dataclass
class Args:
    # ---- experiment
    env: str = "frozen_lake"
    """environment: a name or preset of envs/__init__.py, my_file.py:MyEnv, package.module:MyEnv, or a gymnasium id with
    text spaces"""
    env_options: tuple[str, ...] = ()
    """options of the environment as name=value, for example size=6 slippery=True"""
    model: str = "tiny"
    """tiny (about a million parameters, made on the spot), a folder, a hub name, or a path to a .gguf file"""
    seed: int = 1
    """of training; validation and the warm start of tiny have fixed seeds of their own"""
    run_root: str = "runs"
    """where run folders are made"""
    resume: str | None = None
    """a run folder to go on with; its arguments are taken over, only --updates and tracking may differ"""
    track: bool = False
    """also log to Weights & Biases (offline where there is no account or network)"""
    wandb_project: str = "starpo"
    """project under which --track logs"""
    show_trajectory: bool = False
    """print the first episode of the first update with its trained tokens highlighted"""

    # ---- rollout
    num_groups: int | None = None
    """P, groups per update; each has an initial state of its own; none: 128 / group_size"""
    group_size: int | None = None
    """G, trajectories per group, at least 2; none: 16, with --model tiny 8, or 32 where an episode is one turn"""
    max_turns: int | None = None
    """K, turns per trajectory; none: the environment's own"""
    max_actions: int | None = None
    """actions per trajectory; none: the environment's own"""
    max_actions_per_turn: int = 2
    """further actions of a response are dropped without penalty"""
    think: bool = True
    """ask for <think>...</think> before the answer"""
    separator: str = "||"
    """between the actions of one answer; an environment with free-text actions takes the answer whole"""
    format_penalty: float = -0.1
    """added to the return for each turn with no valid action, or with one that the environment does not know; 0: off"""
    max_new_tokens: int | None = None
    """tokens per response; none: 400, with --model tiny 24"""
    max_model_len: int = 3600
    """tokens per trajectory; one without room for another response ends there, it is never cut"""
    temperature: float = 1.0
    """of sampling in training; the trained log-probs are those at this temperature"""
    sampler_tokens: int = 65_536
    """rows x tokens of the sampler's batch; the keys and values that it keeps between turns take as much again"""

    # ---- algorithm
    normalize: Literal["std", "none", "rloo"] = "std"
    """group advantage: std (GRPO), none (Dr. GRPO: centred only), rloo (leave-one-out baseline)"""
    clip_low: float = 0.2
    """the ratio is clipped at 1 - clip_low"""
    clip_high: float = 0.28
    """the ratio is clipped at 1 + clip_high; higher than clip_low leaves room for unlikely tokens to grow"""
    dual_clip: float = 3.0
    """bounds the loss at -A * dual_clip where the advantage is negative; 0: off"""
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"] = "token-mean"
    """how per-token losses become one number, over the whole minibatch"""
    ent_coef: float = 0.001
    """entropy bonus per token, nats; 0: off"""
    kl_coef: float = 0.0
    """weight of KL(policy || ref_policy) per token, nats; 0: off, and no reference model is loaded"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1: d, k2: d^2/2, k3: exp(-d)+d-1, with d = logprob - ref_logprob"""
    kl_in: Literal["loss", "reward"] = "loss"
    """add the KL to the loss, or subtract its sum over the trajectory from the return"""

    # ---- optimisation
    updates: int | None = None
    """rollout-and-optimise rounds; none: 200, with --model tiny 40"""
    epochs: int = 1
    """passes over the trajectories of an update"""
    minibatch_size: int = 32
    """trajectories per optimizer step"""
    microbatch_tokens: int = 4096
    """rows x tokens of one forward pass: memory and speed, the gradient does not depend on it"""
    learning_rate: float | None = None
    """AdamW; none: 1e-6, with --model tiny 5e-4"""
    lr_warmup: int | None = None
    """optimizer steps of linear warm-up; none: 0, with --model tiny 8"""
    lr_decay: bool | None = None
    """let the learning rate fall linearly to 0 over the updates; none: only with --model tiny"""
    weight_decay: float = 0.01
    """AdamW"""
    max_grad_norm: float = 1.0
    """gradients are scaled down to this norm"""
    bf16: bool = False
    """autocast to bfloat16 in sampling and training; weights and optimizer stay in float32"""
    threads: int = 0
    """CPU threads of torch; 0: torch's own choice"""

    # ---- validation, checkpoints, logs
    val_every: int = 10
    """updates between validations; it also runs before the first and after the last update; 0: never"""
    val_episodes: int = 256
    """episodes of a validation, on initial states that are the same in every run"""
    val_temperature: float = 0.5
    """of sampling in validation"""
    save_every: int = 10
    """updates between checkpoints; the last update is always saved"""
    keep_checkpoints: int = 2
    """older ones are deleted; 0: keep all"""
    log_trajectories: int = 4
    """trajectories written to trajectories.jsonl at each update and each validation"""


# ======================================================================================================================
# 2  Prompt and response
# ======================================================================================================================
@dataclass
class ParsedResponse:
    thinking: str
    actions: list[str]
    valid: bool  # whether the tags were all there; says nothing about the actions


def system_prompt(env, args: Args) -> str:
    """The first message: the task, the actions, the budget, the form of a response."""
    # EDIT HERE: the wording of your own prompt. Changing it makes the tiny model learn it anew.
    lines = [env.instruction.strip()]
    example = "your answer"
    if env.actions is not None:
        per_turn = min(args.max_actions_per_turn, args.max_actions)
        # Small models copy the example as it stands: where there is one action to give, it is one that can be played.
        example = f" {args.separator} ".join(["action"] * per_turn) if per_turn > 1 else env.actions[0]
        several = f", up to {per_turn} a turn" if per_turn > 1 else ""
        lines.append(f"Actions: {', '.join(env.actions)}; {args.max_actions} in all{several}.")
    think = "<think>your thoughts</think>" if args.think else ""
    lines.append(f"Answer in this form: {think}<answer>{example}</answer>")
    return "\n".join(line for line in lines if line)


NOTICE = "No valid action was given, the state is unchanged."


def user_message(turn: int, observation: str, actions_left: int, reward: float | None, notice: str) -> str:
    """What the model reads at the start of a turn. `reward` is the previous turn's, None at the first turn."""
    lines = [] if reward is None else [f"Reward: {reward:g}"]
    if notice:
        lines.append(notice)
    lines.append(f"Turn {turn}, {actions_left} actions left.")
    return "\n".join([*lines, observation])


BETWEEN = re.compile(r"</think>\s*<answer>")
TAGS = re.compile(r"</?(?:think|answer)>")


def parse_response(text: str, separator: str | None = "||", max_actions: int = 2, think: bool = True) -> ParsedResponse:
    """Thinking and actions of a response (its prefilled tag included). Never raises: text is data.

    The first well-formed pair of elements counts, case-sensitive, with nothing but white space between them; text
    around it is ignored. Missing tags: no actions, valid False. `separator` None: the answer is one action, whole.
    """
    # By steps, not by one pattern: backtracking over a thousand repeated tags, as a collapsed policy writes them, takes
    # minutes.
    nothing = ParsedResponse("", [], False)
    start = text.find("<think>" if think else "<answer>")
    between = BETWEEN.search(text, start) if think and start >= 0 else None
    if start < 0 or (think and between is None):
        return nothing
    thinking = text[start : between.start()] if think else ""
    answer, closed, _ = text[between.end() if think else start + len("<answer>") :].partition("</answer>")
    if not closed:
        return nothing
    # A stray tag inside an element is removed: "<think>a</think>b</think>" is one thought.
    thinking, answer = TAGS.sub("", thinking).strip(), TAGS.sub("", answer).strip()
    pieces = [answer] if separator is None else [piece.strip() for piece in answer.split(separator)]
    return ParsedResponse(thinking, [piece for piece in pieces if piece][:max_actions], True)


# ======================================================================================================================
# 3  Chat template: text becomes tokens once, and only at the end of the list
# ======================================================================================================================
def render(tokenizer, messages: list[dict], args: Args, add_generation_prompt: bool = True) -> list[int]:
    return tokenizer.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
        enable_thinking=args.think,  # read by the templates of Qwen3 and its kin, ignored by others
    )


def prefill(tokenizer, ids: list[int], args: Args) -> list[int]:
    """`ids` with the opening tag that every response starts from, unless the template has put it there already."""
    tag = "<think>" if args.think else "<answer>"
    if tokenizer.decode(ids[-8:]).rstrip().endswith(tag):
        return ids
    return ids + tokenizer.encode(tag, add_special_tokens=False)


def first_prompt(tokenizer, system: str, user: str, args: Args) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return prefill(tokenizer, render(tokenizer, messages, args), args)


REPLY = "ok"


def dummy(exchanges: int) -> list[dict]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": REPLY}] * exchanges


def next_prompt(tokenizer, user: str, args: Args, exchanges: int = 1) -> list[int]:
    """Token ids from the end of one response to the start of the next: closing tokens, user turn, assistant header.

    Cut from a dummy conversation, so that a template which rewrites earlier turns (Qwen3 drops old thinking) never
    touches the real one. Raises: ValueError where what follows a response cannot be told.
    """
    before = render(tokenizer, dummy(exchanges)[:-1], args, add_generation_prompt=False)
    ids = render(tokenizer, [*dummy(exchanges), {"role": "user", "content": user}], args)
    reply = tokenizer.encode(REPLY, add_special_tokens=False)
    if ids[: len(before)] != before:
        raise ValueError("it changes earlier messages when a message is added")
    for end in range(len(before) + len(reply), len(ids) + 1):
        if ids[end - len(reply) : end] == reply:
            return prefill(tokenizer, ids[end:], args)
    raise ValueError("it changes the text of a response, or drops it")


def check_template(tokenizer, stop_ids: set[int], args: Args):
    """Refuses a chat template under which a turn cannot be appended as a suffix. Raises: ValueError with the reason."""
    if not tokenizer.chat_template:
        raise ValueError(f"--model {args.model} has no chat template; take an instruct or chat model")
    refusal = f"--model {args.model}: its chat template cannot be used over several turns, because "
    remedy = "; take another model, or set tokenizer.chat_template to one that only appends"
    try:
        first_prompt(tokenizer, "system", "look", args)
        # The probe must not hold the dummy reply, or a template that drops responses would seem to keep it.
        once, twice = next_prompt(tokenizer, "?", args), next_prompt(tokenizer, "?", args, exchanges=2)
    except jinja2.TemplateError as error:
        raise ValueError(f"{refusal}it refuses a system message or an exchange ({error}){remedy}") from error
    except ValueError as error:
        raise ValueError(refusal + str(error) + remedy) from error
    if once != twice:
        raise ValueError(refusal + "what it writes after a response depends on the turns before" + remedy)
    if once[0] not in stop_ids:
        name = tokenizer.convert_ids_to_tokens(once[0])
        raise ValueError(refusal + f"a response is closed by {name!r}, which is no stop token of the model" + remedy)
    if not args.think and "<think>" in tokenizer.decode(once[-8:]) and "</think>" not in tokenizer.decode(once[-8:]):
        raise ValueError(f"--model {args.model}: its chat template opens a thought itself; leave out --no-think")


def check_room(env, tokenizer, args: Args):
    """Refuses a context in which not even the first response has room. Raises: ValueError with the lengths."""
    observation, _ = env.reset(seed=VAL_SEED)
    user = user_message(1, observation, args.max_actions, None, "")
    prompt = len(first_prompt(tokenizer, system_prompt(env, args), user, args))
    if prompt + args.max_new_tokens > args.max_model_len:
        raise ValueError(
            f"max_model_len {args.max_model_len} has no room for a first prompt of {prompt} tokens and a response of "
            f"max_new_tokens {args.max_new_tokens}; try --max-model-len {2 * (prompt + args.max_new_tokens)}"
        )


# ======================================================================================================================
# 4  Trajectory assembly and rollout
# ======================================================================================================================
@dataclass
class Trajectory:
    """One episode. The four token lists are of equal length and are written together, in `append` alone."""

    index: int  # position in the batch, and of its environment
    group: int
    member: int
    ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)  # 1 exactly on sampled tokens
    turn_ids: list[int] = field(default_factory=list)  # the turn in which the token was appended, from 0
    sampler_logprobs: list[float] = field(default_factory=list)  # nats; 0 where nothing was sampled
    rewards: list[float] = field(default_factory=list)  # environment reward of each turn
    penalties: list[float] = field(default_factory=list)  # format penalty of each turn
    turns: list[dict] = field(default_factory=list)  # what a person reads: texts, actions, flags
    num_actions: int = 0
    success: bool = False
    ended: str = ""  # done (by the environment) | actions | turns | context: which budget ran out

    def append(self, ids: list[int], turn: int, logprobs: list[float] | None = None):
        """Token ids at the end; sampled ones come with their log-probs."""
        self.ids += ids
        self.loss_mask += [int(logprobs is not None)] * len(ids)
        self.turn_ids += [turn] * len(ids)
        self.sampler_logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


# Streams of random numbers. Every draw has an address: (seed, stream, update, group, member, turn).
START, CHANCE, SAMPLE, SHUFFLE = range(4)
VAL_SEED = 123


def address(seed: int, stream: int, update: int, group: int = 0, member: int = 0, turn: int = 0) -> int:
    """A 63-bit seed for one draw. The path always has six parts: SeedSequence cannot tell (1, 2) from (1, 2, 0)."""
    return int(np.random.SeedSequence((seed, stream, update, group, member, turn)).generate_state(1, np.uint64)[0] >> 1)


Generate = Callable[[list[Trajectory], list[int]], list[Sampled]]


def sample_with(sampler, args: Args, temperature: float) -> Generate:
    return lambda active, seeds: sampler.generate([t.ids for t in active], seeds, args.max_new_tokens, temperature)


def rollout(
    envs: list, generate: Generate, tokenizer, args: Args, seed: int, update: int, num_groups: int, group_size: int,
    first_start: int | None = None,
) -> list[Trajectory]:  # fmt: skip
    """num_groups x group_size finished trajectories, in order of group, then member.

    `generate(trajectories, seeds)` returns one response for each. The initial state of a group depends on (seed,
    update, group), or is `first_start + group`; chance afterwards, and the sampling, depend on the member too.
    """
    trajectories = []
    for index in range(num_groups * group_size):
        group, member = divmod(index, group_size)
        start = address(seed, START, update, group) if first_start is None else first_start + group
        chance = address(seed, CHANCE, update, group, member)
        env = envs[index]
        observation, _ = env.reset(seed=start, options={"chance_seed": chance})
        trajectory = Trajectory(index, group, member)
        user = user_message(1, observation, args.max_actions, None, "")
        trajectory.append(first_prompt(tokenizer, system_prompt(env, args), user, args), turn=0)
        trajectory.turns.append({"user": user, "observation": observation})
        trajectories.append(trajectory)

    for turn in range(args.max_turns):
        for trajectory in trajectories:
            if not trajectory.ended and len(trajectory.ids) + args.max_new_tokens > args.max_model_len:
                trajectory.ended = "context"
        active = [t for t in trajectories if not t.ended]
        if not active:
            break
        seeds = [address(seed, SAMPLE, update, t.group, t.member, turn) for t in active]
        for trajectory, sampled in zip(active, generate(active, seeds), strict=True):
            trajectory.append(sampled.token_ids, turn, sampled.logprobs)
            play_turn(envs[trajectory.index], trajectory, sampled, tokenizer, turn, args)
    return trajectories


def play_turn(env, trajectory: Trajectory, sampled: Sampled, tokenizer, turn: int, args: Args):
    """One response is parsed and played; then the next user turn is appended, or the trajectory ends."""
    sampled_ids = sampled.token_ids[:-1] if sampled.finish_reason == "stop" else sampled.token_ids
    text = ("<think>" if args.think else "<answer>") + tokenizer.decode(sampled_ids)
    free_text = env.actions is None
    limit = 1 if free_text else args.max_actions_per_turn
    parsed = parse_response(text, None if free_text else args.separator, limit, args.think)
    names = {} if free_text else {name.lower(): name for name in env.actions}
    actions = parsed.actions if free_text else [names[a.lower()] for a in parsed.actions if a.lower() in names]
    malformed = not actions or len(actions) < len(parsed.actions)

    reward, terminated, truncated, info, played, effective = 0.0, False, False, {}, [], False
    for action in actions[: args.max_actions - trajectory.num_actions]:
        observation, action_reward, terminated, truncated, info = env.step(action)
        reward += float(action_reward)
        played.append(action)
        effective = effective or bool(info.get("action_is_effective", False))
        if terminated or truncated:
            break
    trajectory.num_actions += len(played)
    trajectory.rewards.append(reward)
    trajectory.penalties.append(args.format_penalty if malformed else 0.0)
    if played:
        trajectory.success = bool(info.get("success", False))
    trajectory.turns[-1] |= {
        "response": text,
        "actions": played,
        "reward": reward,
        "penalty": trajectory.penalties[-1],
        "valid": not malformed,
        "effective": effective,
        "tokens": len(sampled.token_ids),
        "finish_reason": sampled.finish_reason,
        "info": {k: v for k, v in info.items() if isinstance(v, int | float)},
    }
    if terminated or truncated:
        trajectory.ended = "done"
    elif trajectory.num_actions >= args.max_actions:
        trajectory.ended = "actions"
    elif turn + 1 >= args.max_turns:
        trajectory.ended = "turns"
    if trajectory.ended:
        return

    notice = "" if actions else NOTICE
    if not played:
        observation = trajectory.turns[-1]["observation"]
    user = user_message(turn + 2, observation, args.max_actions - trajectory.num_actions, reward, notice)
    suffix = next_prompt(tokenizer, user, args)
    # The suffix starts with the token that closes a response; most responses were sampled with it.
    trajectory.append(suffix[1:] if sampled.token_ids[-1:] == suffix[:1] else suffix, turn + 1)
    trajectory.turns.append({"user": user, "observation": observation})


# ======================================================================================================================
# 5  Log-probs
# ======================================================================================================================
def pad(trajectories: list[Trajectory], device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids_BT, attention_mask_BT, loss_mask_BS, padded on the right; S is shifted to the target token."""
    ids = [torch.tensor(t.ids) for t in trajectories]
    loss_masks = [torch.tensor(t.loss_mask, dtype=torch.float32) for t in trajectories]
    ids_BT, loss_mask_BT = pad_sequence(ids, batch_first=True), pad_sequence(loss_masks, batch_first=True)
    attention_mask_BT = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return ids_BT.to(device), attention_mask_BT.to(device), loss_mask_BT[:, 1:].to(device)


def token_logprobs(
    model, ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor, loss_mask_BS: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs (B, S) of the sampled tokens and entropies (B, S) of the distributions they came from, nats, at
    `temperature`; 0 where loss_mask is 0."""
    # The product with the vocabulary dominates memory: it is made only in columns where some row was sampled.
    columns_C = loss_mask_BS.any(0).nonzero()[:, 0]
    mask_BC = loss_mask_BS[:, columns_C].bool()
    logits_BCV = model(
        input_ids=ids_BT, attention_mask=attention_mask_BT, use_cache=False, logits_to_keep=columns_C
    ).logits
    logprobs_MV = (logits_BCV[mask_BC].float() / temperature).log_softmax(-1)
    targets_M = ids_BT[:, 1:][:, columns_C][mask_BC]
    rows_M, picked_M = mask_BC.nonzero(as_tuple=True)
    logprobs_BS, entropies_BS = torch.zeros_like(loss_mask_BS), torch.zeros_like(loss_mask_BS)
    at = (rows_M, columns_C[picked_M])
    logprobs_BS = logprobs_BS.index_put(at, logprobs_MV.gather(-1, targets_M[:, None])[:, 0])
    entropies_BS = entropies_BS.index_put(at, -(logprobs_MV.exp() * logprobs_MV).sum(-1))
    return logprobs_BS, entropies_BS


def microbatches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows, shortest first, cut where rows x longest would exceed `max_tokens`; a longer row is alone."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not batches or (len(batches[-1]) + 1) * lengths[i] > max_tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


# ======================================================================================================================
# 6  Advantages
# ======================================================================================================================
def dead_groups(returns_PG: np.ndarray) -> np.ndarray:
    """(P,) bool: whether all returns of a group are equal, up to the rounding of a sum of rewards.

    Such a group says nothing: R - mean is rounding error, which division by a tiny std would turn into a signal.
    """
    spread_P = returns_PG.max(1) - returns_PG.min(1)
    return spread_P <= 1e-9 * np.abs(returns_PG).max(1)


def group_advantages(returns_PG: np.ndarray, normalize: str = "std") -> np.ndarray:
    """Advantages (P, G), float64: std (R - mean) / (std + 1e-6) with ddof 1; none R - mean; rloo G/(G-1) (R - mean).

    A group whose returns are all equal gets exactly 0. Source: GRPO, arXiv:2402.03300, Sec. 4.1.2, except ddof 1 and
    the 1e-6; Dr. GRPO, arXiv:2503.20783; RLOO, arXiv:2402.14740.
    Raises: ValueError for groups of one.

    >>> group_advantages(np.array([[1.0, 0.0], [3.0, 3.0]]), "none").tolist()
    [[0.5, -0.5], [0.0, 0.0]]
    """
    returns_PG = np.asarray(returns_PG, dtype=np.float64)
    group_size = returns_PG.shape[1]
    if group_size < 2:
        raise ValueError(f"a group of {group_size} has nothing to compare with; group_size must be at least 2")
    # EDIT HERE: another baseline or another scale.
    advantages_PG = returns_PG - returns_PG.mean(1, keepdims=True)
    if normalize == "std":
        advantages_PG /= returns_PG.std(1, ddof=1, keepdims=True) + 1e-6
    elif normalize == "rloo":
        advantages_PG *= group_size / (group_size - 1)
    return np.where(dead_groups(returns_PG)[:, None], 0.0, advantages_PG)


# ======================================================================================================================
# 7  Loss
# ======================================================================================================================
def token_weights(
    loss_mask_BS: torch.Tensor, aggregation: str, num_tokens: float | None = None, num_sequences: float | None = None
) -> torch.Tensor:
    """Weights (B, S) with which per-token values are summed into one number.

    token-mean: 1/tokens; seq-mean-token-mean: 1/(tokens of the row x rows); seq-mean-token-sum: 1/rows.
    `num_tokens` and `num_sequences` count the whole minibatch of which these rows are a part (default: they are all of
    it), so the sum over microbatches does not depend on how they were cut. Nothing sampled: all 0.
    """
    tokens_B1 = loss_mask_BS.sum(-1, keepdim=True)
    num_tokens = tokens_B1.sum().item() if num_tokens is None else num_tokens
    num_sequences = (tokens_B1 > 0).sum().item() if num_sequences is None else num_sequences
    if aggregation == "token-mean":
        return loss_mask_BS / max(num_tokens, 1)
    if aggregation == "seq-mean-token-mean":
        return loss_mask_BS / tokens_B1.clamp(min=1) / max(num_sequences, 1)
    return loss_mask_BS / max(num_sequences, 1)


def policy_loss(
    logprobs_BS: torch.Tensor, old_logprobs_BS: torch.Tensor, advantages_BS: torch.Tensor, loss_mask_BS: torch.Tensor,
    clip_low: float, clip_high: float, dual_clip: float, aggregation: str,
    num_tokens: float | None = None, num_sequences: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """The clipped loss (scalar) and its statistics (token means over the minibatch; sum them over microbatches).

    clipfrac: share of tokens where the clip decides; dual_clipfrac: where dual_clip does; approx_kl: k3 of the update's
    own drift, nats per token. Source: PPO, arXiv:1707.06347, Eq. 7, with two clip bounds (DAPO, arXiv:2503.14476) and
    dual clip (arXiv:1912.09729, Eq. 5).
    """
    logratio_BS = (logprobs_BS - old_logprobs_BS).clamp(-20, 20)
    ratio_BS = logratio_BS.exp()
    unclipped_BS = -advantages_BS * ratio_BS
    clipped_BS = -advantages_BS * ratio_BS.clamp(1 - clip_low, 1 + clip_high)
    loss_BS = torch.maximum(unclipped_BS, clipped_BS)
    ceiling_BS = -advantages_BS * dual_clip
    dual_BS = (advantages_BS < 0) & (loss_BS > ceiling_BS) & (dual_clip > 0)
    loss_BS = torch.where(dual_BS, ceiling_BS, loss_BS)
    loss = (loss_BS * token_weights(loss_mask_BS, aggregation, num_tokens, num_sequences)).sum()
    with torch.no_grad():
        mean_BS = token_weights(loss_mask_BS, "token-mean", num_tokens)
        stats = {
            "policy/clipfrac": ((clipped_BS > unclipped_BS) * mean_BS).sum(),
            "policy/dual_clipfrac": (dual_BS * mean_BS).sum(),
            "policy/approx_kl": ((ratio_BS - 1 - logratio_BS) * mean_BS).sum(),
            "policy/ratio": (ratio_BS * mean_BS).sum(),
        }
    return loss, stats


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    """KL(policy || ref_policy) per token, nats, of the same shape: k1 d, k2 d^2/2, k3 exp(-d)+d-1, d clamped to +-20.
    Source: J. Schulman, "Approximating KL divergence" (2020)."""
    d = (logprobs - ref_logprobs).clamp(-20, 20)
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() + d - 1}[estimator]


def kl_loss(
    logprobs_BS: torch.Tensor, old_logprobs_BS: torch.Tensor, ref_logprobs_BS: torch.Tensor, estimator: str
) -> torch.Tensor:
    """Per-token KL (B, S) whose mean gradient over samples is the gradient of KL(policy || ref_policy).

    The tokens were drawn from the old policy, so the estimates are weighted by the ratio. For k1 and k3 its own
    gradient counts: without it k1 has none on average, and k3 that of the reverse divergence. k2 has the right one as
    it stands, d * grad(logprob).
    """
    ratio_BS = (logprobs_BS - old_logprobs_BS).clamp(-20, 20).exp()
    return (ratio_BS.detach() if estimator == "k2" else ratio_BS) * kl_estimate(logprobs_BS, ref_logprobs_BS, estimator)


# ======================================================================================================================
# 8  Optimisation
# ======================================================================================================================
POLICY_METRICS = (
    "loss pg_loss entropy kl grad_norm clipfrac dual_clipfrac approx_kl ratio advantage_abs learning_rate "
    "nonfinite_steps"
)


@torch.no_grad()
def score(model, trajectories: list[Trajectory], args: Args, accelerator) -> list[torch.Tensor]:
    """Log-probs (S,) of each trajectory under `model` as it is now."""
    logprobs: list[torch.Tensor] = [torch.empty(0)] * len(trajectories)
    for rows in microbatches([len(t.ids) for t in trajectories], args.microbatch_tokens):
        ids_BT, attention_mask_BT, loss_mask_BS = pad([trajectories[i] for i in rows], accelerator.device)
        with accelerator.autocast():
            logprobs_BS, _ = token_logprobs(model, ids_BT, attention_mask_BT, loss_mask_BS, args.temperature)
        for i, row in zip(rows, logprobs_BS, strict=True):
            logprobs[i] = row[: len(trajectories[i].ids) - 1]
    return logprobs


def sampler_gap(trajectories: list[Trajectory], logprobs: list[torch.Tensor]) -> dict[str, float]:
    """How far the sampler's log-probs are from the trainer's on the same tokens, nats; kl is the k3 estimate."""
    masks = [torch.tensor(t.loss_mask[1:], dtype=torch.bool) for t in trajectories]
    trainer_M = torch.cat([row.cpu()[mask] for row, mask in zip(logprobs, masks, strict=True)])
    sampler_M = torch.cat([torch.tensor(t.sampler_logprobs[1:])[m] for t, m in zip(trajectories, masks, strict=True)])
    gap_M = trainer_M - sampler_M if len(trainer_M) else torch.tensor([float("nan")])
    return {
        "sampler/gap_mean": gap_M.abs().mean().item(),
        "sampler/gap_max": gap_M.abs().max().item(),
        "sampler/kl": (gap_M.exp() - 1 - gap_M).mean().item(),
    }


def optimise(
    policy, ref_policy, optimizer, accelerator, trajectories: list[Trajectory], args: Args, update: int, state: dict,
    notes: dict[str, str],
) -> dict[str, float]:  # fmt: skip
    """One update of the policy: advantages, then epochs x minibatches of the clipped loss. Returns the metrics; `state`
    counts steps, and `notes` says why a metric is NaN."""
    device = accelerator.device
    # The ratio is taken against the trainer's own log-probs: a sampler's kernels differ, and it would not start at 1.
    old_logprobs = score(policy, trajectories, args, accelerator)
    ref_logprobs = score(ref_policy, trajectories, args, accelerator) if ref_policy is not None else None
    metrics = sampler_gap(trajectories, old_logprobs)

    returns_B = np.array([sum(t.rewards) + sum(t.penalties) for t in trajectories])
    if ref_logprobs is not None and args.kl_in == "reward":
        # Where nothing was sampled both log-probs are 0, and so is every estimate.
        kl_B = [
            kl_estimate(old, ref, args.kl_estimator).sum().item()
            for old, ref in zip(old_logprobs, ref_logprobs, strict=True)
        ]
        returns_B = returns_B - args.kl_coef * np.array(kl_B)
    advantages_B = group_advantages(returns_B.reshape(args.num_groups, args.group_size), args.normalize).reshape(-1)
    if not advantages_B.any():
        state["skipped_updates"] += 1
        notes["policy/*"] = f"update skipped: in each of the {args.num_groups} groups all returns are equal"
        return metrics | {f"policy/{name}": float("nan") for name in POLICY_METRICS.split()}

    steps: list[dict[str, float]] = []
    for epoch in range(args.epochs):
        order = np.random.default_rng(address(args.seed, SHUFFLE, update, epoch)).permutation(len(trajectories))
        for minibatch in np.split(order, len(order) // args.minibatch_size):
            chosen = [trajectories[i] for i in minibatch]
            num_tokens = sum(sum(t.loss_mask) for t in chosen)
            num_sequences = sum(any(t.loss_mask) for t in chosen)
            totals: Counter = Counter()
            for picked in microbatches([len(t.ids) for t in chosen], args.microbatch_tokens):
                rows = minibatch[picked]  # their positions in the batch
                ids_BT, attention_mask_BT, loss_mask_BS = pad([trajectories[i] for i in rows], device)
                old_logprobs_BS = pad_sequence([old_logprobs[i] for i in rows], batch_first=True)
                advantages_BS = (
                    torch.tensor(advantages_B[rows], dtype=torch.float32, device=device)[:, None] * loss_mask_BS
                )
                logprobs_BS, entropies_BS = token_logprobs(
                    policy, ids_BT, attention_mask_BT, loss_mask_BS, args.temperature
                )

                weights_BS = token_weights(loss_mask_BS, args.aggregation, num_tokens, num_sequences)
                pg_loss, stats = policy_loss(
                    logprobs_BS, old_logprobs_BS, advantages_BS, loss_mask_BS, args.clip_low, args.clip_high,
                    args.dual_clip, args.aggregation, num_tokens, num_sequences,
                )  # fmt: skip
                entropy = (entropies_BS * weights_BS).sum()
                mean_BS = token_weights(loss_mask_BS, "token-mean", num_tokens)
                stats["policy/entropy"] = (entropies_BS * mean_BS).sum()
                kl = stats["policy/kl"] = torch.zeros((), device=device)
                if ref_logprobs is not None:
                    ref_logprobs_BS = pad_sequence([ref_logprobs[i] for i in rows], batch_first=True)
                    kl_BS = kl_loss(logprobs_BS, old_logprobs_BS, ref_logprobs_BS, args.kl_estimator)
                    kl = (kl_BS * weights_BS).sum()
                    stats["policy/kl"] = (kl_BS * mean_BS).sum()
                loss = pg_loss - args.ent_coef * entropy
                if args.kl_in == "loss":
                    loss = loss + args.kl_coef * kl
                accelerator.backward(loss)
                stats |= {"policy/loss": loss, "policy/pg_loss": pg_loss}
                totals.update({name: value.item() for name, value in stats.items()})  # a Counter adds

            warmup = min(1.0, (state["optimizer_steps"] + 1) / max(args.lr_warmup, 1))
            decay = 1 - (update - 1) / args.updates if args.lr_decay else 1.0
            learning_rate = args.learning_rate * warmup * decay
            for parameters in optimizer.param_groups:
                parameters["lr"] = learning_rate
            grad_norm = float(accelerator.clip_grad_norm_(policy.parameters(), args.max_grad_norm))
            finite = bool(np.isfinite(grad_norm) and np.isfinite(totals["policy/loss"]))
            if finite:
                optimizer.step()
                state["optimizer_steps"] += 1
            optimizer.zero_grad()
            state["nonfinite_in_a_row"] = 0 if finite else state["nonfinite_in_a_row"] + 1
            cause = f"loss {totals['policy/loss']}, gradient norm {grad_norm}"
            if not finite:
                notes["policy/nonfinite_steps"] = f"optimizer step skipped: {cause}"
            if state["nonfinite_in_a_row"] >= 10:
                raise FloatingPointError(
                    f"10 optimizer steps in a row had a loss or gradient that is not finite (update {update}: {cause})"
                    "; lower --learning-rate or --max-grad-norm"
                )
            steps.append(totals | {"policy/grad_norm": grad_norm, "policy/nonfinite_steps": float(not finite)})
    for name in steps[0]:
        metrics[name] = mean([step[name] for step in steps])
    metrics["policy/nonfinite_steps"] = sum(step["policy/nonfinite_steps"] for step in steps)
    metrics["policy/advantage_abs"] = mean(np.abs(advantages_B))
    metrics["policy/learning_rate"] = learning_rate
    return metrics


# ======================================================================================================================
# 9  Run folder and screen
# ======================================================================================================================
def mean(values: list[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def rollout_metrics(trajectories: list[Trajectory], group_size: int, prefix: str) -> dict[str, float]:
    """What happened in the environments; rates are shares of trajectories, or of turns where they say so."""
    turns = [turn for t in trajectories for turn in t.turns if "response" in turn]
    returns_B = np.array([sum(t.rewards) for t in trajectories])
    metrics = {
        "success": mean([t.success for t in trajectories]),
        "return": mean(returns_B),  # of the environment
        "penalty": mean([sum(t.penalties) for t in trajectories]),
        "turns": mean([len(t.rewards) for t in trajectories]),
        "actions": mean([t.num_actions for t in trajectories]),
        "valid_turns": mean([turn["valid"] for turn in turns]),
        "effective_turns": mean([turn["effective"] for turn in turns]),
        "cut_turns": mean([turn["finish_reason"] == "length" for turn in turns]),  # hit max_new_tokens
        "context_ended": mean([t.ended == "context" for t in trajectories]),
        "response_tokens": mean([turn["tokens"] for turn in turns]),
        "trajectory_tokens": mean([len(t.ids) for t in trajectories]),
    }
    if group_size > 1:
        returns_PG = returns_B.reshape(-1, group_size)
        successes_PG = np.array([t.success for t in trajectories]).reshape(-1, group_size)
        metrics |= {
            f"pass@{group_size}": mean(successes_PG.any(1)),
            "in_group_std": mean(returns_PG.std(1, ddof=1)),
            "dead_groups": mean(dead_groups(returns_PG)),  # whose returns are all equal
        }
    for name in sorted({name for turn in turns for name in turn["info"]} - {"success"}):
        metrics[f"info/{name}"] = mean([turn["info"][name] for turn in turns if name in turn["info"]])
    return {prefix + name: value for name, value in metrics.items()}


def append_line(path: Path, record: dict):
    """One JSON object on a line of its own. A number that could not be had is null; "notes" says why."""
    clean = {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in record.items()}
    with path.open("a") as file:
        file.write(json.dumps(clean) + "\n")  # in ASCII: some characters that a model writes would end the line


def cut_lines(path: Path, last_update: int):
    """Drops the lines after `last_update`, and one that was half written when the run was killed."""
    kept = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["update"] <= last_update:
            kept.append(line + "\n")
    write_file(path, "".join(kept))


def write_file(path: Path, text: str):
    """All of it or nothing: the file gets its name only when complete."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def save_checkpoint(run_dir: Path, update: int, model, tokenizer, trainer_state: dict, keep: int):
    """A plain Hugging Face folder, plus trainer.pt. It gets its name only when complete: none is ever half written."""
    folder = run_dir / "checkpoints"
    temporary = folder / f".{update}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    tokenizer.save_pretrained(temporary)
    torch.save(trainer_state, temporary / "trainer.pt")
    final = folder / str(update)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for old in checkpoints(run_dir)[:-keep] if keep else []:
        shutil.rmtree(old)


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in (run_dir / "checkpoints").glob("*") if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def trajectory_record(trajectory: Trajectory, update: int, phase: str) -> dict:
    keys = ("group", "member", "success", "ended", "rewards", "penalties", "turns")
    return {"update": update, "phase": phase} | {key: getattr(trajectory, key) for key in keys}


def status_line(metrics: dict[str, float], notes: dict[str, str]) -> str:
    line = (
        f"success {metrics['rollout/success']:.3f}  return {metrics['rollout/return']:+.2f}  "
        f"entropy {metrics['policy/entropy']:.3f}  {metrics['time/sampled_tokens_per_s']:.0f} tokens/s"
    )
    return "  ".join([line, *notes.values()])


def print_header(args: Args, model, run_dir: Path):
    """What this run is, with the paper's symbols beside their flags."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    minibatches = args.num_groups * args.group_size // args.minibatch_size
    console.print(
        f"[bold]{args.env}[/] with {args.model} ({size:.1f}M parameters), seed {args.seed} -> {run_dir}\n"
        f"P = {args.num_groups} groups (--num-groups) x G = {args.group_size} (--group-size), up to K = "
        f"{args.max_turns} turns (--max-turns); {args.updates} updates of {args.epochs} x {minibatches} steps",
        highlight=False,
        soft_wrap=True,
    )


def start_tracking(args: Args, run_dir: Path):
    """A Weights & Biases run; offline without an account or a network, so that tracking never stops training."""
    import wandb

    run = dict(project=args.wandb_project, name=run_dir.name, dir=str(run_dir), config=asdict(args))
    mode = os.environ.get("WANDB_MODE", "online")
    if mode == "online" and not (os.environ.get("WANDB_API_KEY") or wandb.login(prompt=False)):
        mode = "offline"
    try:
        return wandb.init(**run, mode=mode, settings=wandb.Settings(init_timeout=30))
    except wandb.errors.Error as error:
        console.print(f"[yellow]wandb: {error}; tracking offline[/]")
        return wandb.init(**run, mode="offline")


def print_trajectory(trajectory: Trajectory, tokenizer):
    """The tokens of an episode as the model saw them; those that are trained stand out."""
    text = Text()
    for token, trained in zip(trajectory.ids, trajectory.loss_mask, strict=True):
        text.append(tokenizer.decode([token]), style="bold black on green" if trained else "dim")
    console.rule(f"group {trajectory.group}, member {trajectory.member}: tokens on green are trained")
    console.print(text)
    console.rule(
        f"return {sum(trajectory.rewards):g}, penalty {sum(trajectory.penalties):g}, ended: {trajectory.ended}"
    )


# ======================================================================================================================
# 10  Main
# ======================================================================================================================
def refuse(message: str):
    console.print(Text(f"error: {message}", style="red"), soft_wrap=True)
    raise SystemExit(2)


def derive(args: Args, env) -> Args:
    """The arguments, with those filled in that depend on the model or the environment."""
    small = args.model == "tiny"
    # One turn, one draw: where a rare payout is compared with a sure one, a small group most often sees no payout, and
    # dividing by its small spread makes the policy shun the better arm (benchmarks/cpu.md).
    group_size = args.group_size or ((32 if env.max_turns == 1 else 8) if small else 16)
    defaults = {
        "group_size": group_size,
        "num_groups": max(1, 128 // group_size),
        "updates": 40 if small else 200,
        "max_new_tokens": 24 if small else 400,
        "learning_rate": 5e-4 if small else 1e-6,
        "lr_warmup": 8 if small else 0,
        "lr_decay": small,
        "max_turns": env.max_turns,
        "max_actions": env.max_actions,
    }
    return replace(args, **{name: value for name, value in defaults.items() if getattr(args, name) is None})


def make_envs(args: Args, number: int) -> list:
    options = {}
    for option in args.env_options:
        name, equals, value = option.partition("=")
        if not equals:
            refuse(f"--env-options takes name=value, got {option!r}; for example size=6")
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    try:
        envs = [environments.make(args.env, **options) for _ in range(number)]
        observation, _ = envs[0].reset(seed=0)  # options can be impossible in ways that only a reset finds out
    except (ValueError, TypeError, ImportError, gymnasium.error.Error) as error:
        refuse(f"--env {args.env}: {error}")
    if not isinstance(observation, str):
        refuse(f"--env {args.env}: observations must be text, reset returned a {type(observation).__name__}; wrap it")
    return envs


def check(args: Args, env):
    """Refuses arguments that cannot work, before any model loads: the rule, the values, a remedy."""
    at_least_one = "num_groups epochs minibatch_size microbatch_tokens max_actions_per_turn max_new_tokens "
    at_least_one += "sampler_tokens val_episodes max_turns max_actions save_every"
    not_negative = "seed updates threads lr_warmup val_every keep_checkpoints log_trajectories "
    not_negative += "ent_coef kl_coef weight_decay clip_high val_temperature"
    values = {name: getattr(args, name) for name in f"{at_least_one} {not_negative}".split()}
    rules = [(name, values[name] >= 1, "must be at least 1; try 1") for name in at_least_one.split()]
    rules += [(name, values[name] >= 0, "must not be negative; try 0") for name in not_negative.split()]
    rules += [
        ("group_size", args.group_size >= 2, "must be at least 2: a trajectory is judged against others of its group"),
        ("temperature", args.temperature > 0, "must be above 0: at 0 nothing is explored; try 1.0"),
        ("learning_rate", args.learning_rate > 0, "must be above 0; try 1e-6 for a language model, 5e-4 for tiny"),
        ("max_grad_norm", args.max_grad_norm > 0, "must be above 0; try 1.0"),
        ("clip_low", 0 <= args.clip_low < 1, "must be in [0, 1); try 0.2"),
        ("dual_clip", args.dual_clip == 0 or args.dual_clip > 1, "must be above 1, or 0 for off; try 3.0"),
        ("format_penalty", args.format_penalty <= 0, "is added to the return and must not be positive; try -0.1"),
        ("separator", bool(args.separator.strip()), "must not be blank; try '||'"),
    ]
    for name, holds, rule in rules:
        if not holds:
            refuse(f"{name} {rule} (got {getattr(args, name)!r})")
    batch = args.num_groups * args.group_size
    if batch % args.minibatch_size:
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - args.minibatch_size))[:2])
        refuse(
            f"minibatch_size {args.minibatch_size} must divide num_groups*group_size = {batch}; "
            f"try {' or '.join(map(str, near))}"
        )
    if args.max_model_len <= args.max_new_tokens:
        refuse(
            f"max_model_len {args.max_model_len} must exceed max_new_tokens {args.max_new_tokens} by room for the "
            f"prompt; try --max-model-len {args.max_new_tokens + 1000}"
        )
    if args.model == "tiny" and (env.actions is None or env.solve() is None):
        refuse(
            f"--model tiny is warm-started by imitating env.solve(), and {args.env} has no solver or no list of "
            "actions; name a real model, for example --model Qwen/Qwen2.5-0.5B-Instruct"
        )
    if args.track and importlib.util.find_spec("wandb") is None:
        refuse("--track needs wandb; pip install -e '.[track]'")
    hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", args.model) and not args.model.endswith(".gguf")
    if args.model != "tiny" and not Path(args.model).exists() and not hub_name:
        refuse(
            f"--model {args.model}: no such file or folder, and hub names have the form owner/name; near names: "
            f"{near_models(args.model)}; or take tiny"
        )


def near_models(name: str) -> str:
    cache = Path(os.environ.get("HF_HUB_CACHE", Path.home() / ".cache/huggingface/hub"))
    known = ["tiny", *(p.name.removeprefix("models--").replace("--", "/") for p in cache.glob("models--*"))]
    known += [str(p) for p in Path(name).parent.glob("*")]
    return ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.5)) or "none"


def practice(args: Args) -> tuple[list, list[str], Callable]:
    """What the tiny model is made from: environments, texts with the words that it will read, and
    `play(generate, tokenizer, n)`, the n-th batch of episodes in these environments."""
    # A number of its own: the demonstrations must not depend on --num-groups.
    envs = make_envs(args, 64)
    texts = []
    for seed in range(200):
        observation, _ = envs[0].reset(seed=seed)
        texts += [system_prompt(envs[0], args), user_message(seed % 9, observation, seed % 9, -0.1, NOTICE)]
        texts.append(" ".join(["", *envs[0].actions]))

    def play(generate: Generate, tokenizer, n: int) -> list[Trajectory]:
        return rollout(envs, generate, tokenizer, args, tiny.SEED, n, len(envs), 1)

    return envs, texts, play


def load_model(args: Args, source: str):
    """Model (float32, dropout off) and tokenizer from "tiny", a folder, a hub name or a .gguf file."""
    if source == "tiny":
        return tiny.load(args, *practice(args), console)[:2]
    path = Path(source)
    where, options = (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (source, {})
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
        refuse(f"--model {source} cannot be loaded: {reason}; near names on this machine: {near_models(source)}")
    if options:
        # The weights come out of a .gguf file as plain float32, but the model counts as quantised and cannot be saved.
        del model.config.quantization_config
        plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
        plain.load_state_dict(model.state_dict())
        plain.generation_config = model.generation_config
        model = plain
    return model.eval(), tokenizer


def stop_tokens(model, tokenizer) -> set[int]:
    """Every token that ends a response: families differ in which of their end tokens the tokenizer names."""
    ids = model.generation_config.eos_token_id
    return {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])} - {None}


def validate(envs: list, sampler, tokenizer, args: Args) -> list[Trajectory]:
    """One episode from each of the fixed initial states, which are the same in every run."""
    return rollout(
        envs, sample_with(sampler, args, args.val_temperature), tokenizer, args, VAL_SEED, 0, args.val_episodes, 1,
        first_start=VAL_SEED,
    )  # fmt: skip


def main(args: Args):
    started = time.time()
    name = f"{re.sub(r'[^A-Za-z0-9_]+', '-', args.env).strip('-')}-grpo-{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(args.resume or Path(args.run_root) / f"{name}-{os.getpid()}")
    probe = make_envs(args, 1)[0]
    args = derive(args, probe)
    check(args, probe)
    if args.threads:
        torch.set_num_threads(args.threads)
    accelerator = Accelerator(mixed_precision="bf16" if args.bf16 else "no")
    if accelerator.num_processes > 1:
        refuse(f"one process for now, got {accelerator.num_processes}; try accelerate launch --num_processes 1")
    torch.manual_seed(args.seed)  # nothing of ours draws from it; a model with weights missing from its folder does
    batch_size = args.num_groups * args.group_size
    envs = make_envs(args, max(batch_size, args.val_episodes))

    # ---- models
    latest = next(reversed(checkpoints(run_dir)), None)
    policy, tokenizer = load_model(args, str(latest or args.model))
    stop_ids = stop_tokens(policy, tokenizer)
    try:
        check_template(tokenizer, stop_ids, args)
        check_room(probe, tokenizer, args)
    except ValueError as error:
        refuse(str(error))
    ref_policy = None
    if args.kl_coef > 0:
        ref_policy = load_model(args, args.model)[0] if latest else copy.deepcopy(policy)
        ref_policy = ref_policy.to(accelerator.device).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    try:
        sampler = HFSampler(accelerator.unwrap_model(policy), stop_ids, args.sampler_tokens)
    except ValueError as error:
        refuse(f"--model {args.model}: {error}")

    # ---- run folder
    counters = "update optimizer_steps tokens skipped_updates nonfinite_in_a_row seconds"
    state = dict.fromkeys(counters.split(), 0)  # in every checkpoint, together with the optimizer
    run_dir.mkdir(parents=True, exist_ok=True)
    if latest:
        saved = torch.load(latest / "trainer.pt", weights_only=True, map_location=accelerator.device)
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
        if args.updates < state["update"]:
            done = state["update"]
            refuse(f"updates {args.updates} is below the {done} that are done; try --updates {2 * done}")
    if not args.resume:
        shutil.copy(__file__, run_dir)
    write_file(run_dir / "args.json", json.dumps(asdict(args), indent=1))  # on resume too: --updates may have grown
    first_update = state["update"] + 1 if latest else 0
    for file in ("metrics.jsonl", "trajectories.jsonl"):
        cut_lines(run_dir / file, first_update - 1)
    started -= state["seconds"]
    tracker = start_tracking(args, run_dir) if args.track else None
    print_header(args, policy, run_dir)

    stopping = []

    def on_interrupt(signum, frame):
        if stopping:
            raise KeyboardInterrupt
        stopping.append(signum)
        console.print("[yellow]stopping after this update; Ctrl-C again: at once, back to the last checkpoint[/]")

    previous_handler = signal.signal(signal.SIGINT, on_interrupt)
    progress = Progress(
        TextColumn("update {task.completed}/{task.total}"), BarColumn(20), TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
    )  # fmt: skip
    task = progress.add_task("train", total=args.updates, completed=max(first_update - 1, 0), status="")
    with progress:
        for update in range(first_update, args.updates + 1):
            update_started = time.time()
            metrics: dict[str, float] = {"update": update}
            notes: dict[str, str] = {}

            if update > 0:
                # ---- roll out
                sampler.sync(accelerator.unwrap_model(policy))
                generate = sample_with(sampler, args, args.temperature)
                trajectories = rollout(
                    envs, generate, tokenizer, args, args.seed, update, args.num_groups, args.group_size
                )
                sampler.sync(sampler.model)  # drops the kept keys and values: their memory is the optimiser's now
                metrics |= rollout_metrics(trajectories, args.group_size, "rollout/")
                sampled_tokens = sum(sum(t.loss_mask) for t in trajectories)
                metrics["time/rollout"] = time.time() - update_started
                for trajectory in trajectories[: args.log_trajectories]:
                    append_line(run_dir / "trajectories.jsonl", trajectory_record(trajectory, update, "train"))
                if args.show_trajectory and update == max(first_update, 1):
                    print_trajectory(trajectories[0], tokenizer)

                # ---- optimise
                train_started = time.time()
                metrics |= optimise(
                    policy, ref_policy, optimizer, accelerator, trajectories, args, update, state, notes
                )
                metrics["time/train"] = time.time() - train_started
                metrics["time/sampled_tokens_per_s"] = sampled_tokens / metrics["time/rollout"]
                metrics["time/trained_tokens_per_s"] = sum(len(t.ids) for t in trajectories) / metrics["time/train"]
                state["tokens"] += sampled_tokens
            metrics |= {f"total/{k}": state[k] for k in ("optimizer_steps", "tokens", "skipped_updates")}

            # ---- validate
            if args.val_every and (update % args.val_every == 0 or update == args.updates):
                val_started = time.time()
                sampler.sync(accelerator.unwrap_model(policy))
                episodes = validate(envs, sampler, tokenizer, args)
                metrics |= rollout_metrics(episodes, 1, "val/")
                metrics["time/val"] = time.time() - val_started
                for trajectory in episodes[: args.log_trajectories]:
                    append_line(run_dir / "trajectories.jsonl", trajectory_record(trajectory, update, "val"))
                success = metrics["val/success"]
                progress.print(
                    f"update {update}: validation success [bold]{success:.3f}[/] of {len(episodes)} episodes"
                )

            # ---- log, save
            state |= {"update": update, "seconds": time.time() - started}
            metrics |= {"time/update": time.time() - update_started, "time/total": state["seconds"]}
            append_line(run_dir / "metrics.jsonl", metrics | ({"notes": notes} if notes else {}))
            if tracker:
                tracker.log(metrics, step=update)
            if update > 0:
                status = status_line(metrics, notes)
                progress.update(task, completed=update, status=status)
                if progress.disable or notes:
                    progress.print(f"update {update}/{args.updates} {status}")
            if update == args.updates or stopping or (update > 0 and update % args.save_every == 0):
                trainer_state = {"optimizer": optimizer.state_dict(), "state": state}
                model = accelerator.unwrap_model(policy)
                save_checkpoint(run_dir, update, model, tokenizer, trainer_state, args.keep_checkpoints)
            if stopping:
                break

    signal.signal(signal.SIGINT, previous_handler)
    sampler.close()
    if tracker:
        tracker.finish()
    report.curves(run_dir)
    if stopping and update < args.updates:
        message = f"stopped after update {update}, saved; go on with: python {Path(__file__).name} --resume {run_dir}"
    else:
        message = f"done in {(time.time() - started) / 60:.1f} minutes: {run_dir}/curves.png"
    console.print(message, soft_wrap=True, highlight=False)


def parse_args(argv: list[str] | None = None) -> Args:
    """The command line; with --resume, the arguments of that run, of which only a few may differ."""
    args = tyro.cli(Args, args=argv, description=__doc__)
    if args.resume is None:
        return args
    file = Path(args.resume) / "args.json"
    if not file.is_file():
        runs = sorted(str(path.parent) for path in Path(args.run_root).glob("*/args.json"))
        near = difflib.get_close_matches(args.resume, runs, n=3) or runs[-3:]
        refuse(f"--resume {args.resume}: no run there ({file} is missing); near: {', '.join(near) or 'none'}")
    try:
        saved = Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(file.read_text()).items()})
    except (TypeError, ValueError) as error:
        refuse(f"--resume {args.resume}: args.json is not of this version ({error}); run the script in the run folder")
    args = tyro.cli(Args, args=argv, default=saved)
    for f in fields(Args):
        old, new = getattr(saved, f.name), getattr(args, f.name)
        if old != new and f.name not in ("resume", "updates", "track", "wandb_project"):
            refuse(
                f"--resume goes on with a run as it was: {f.name} is {old!r} there and {new!r} here; leave it out, or "
                f"start a new run from its weights with --model {args.resume}/checkpoints/N"
            )
    return args


if __name__ == "__main__":
    try:
        main(parse_args())
    except KeyboardInterrupt:
        raise SystemExit(
            "interrupted; a run that had begun goes on from its last checkpoint with --resume RUN"
        ) from None
