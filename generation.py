"""The sampler: token ids in, token ids and their log-probs out. One small class per library, the same three methods.

    generate(prompts, seeds, max_new_tokens, temperature) -> list[Sampled]
    sync(model)     the sampler now speaks for these weights
    close()

A sampler never sees text. What it returns is stored and trained as it is.

Shapes: B rows, H key/value heads, L cache slots, D head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer


@dataclass
class Sampled:
    """One response: `token_ids` as sampled (the stop token included, if one came), `logprobs` in nats under the
    distribution that they were drawn from, `finish_reason` "stop" or "length"."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str


def draw(logits_BV: torch.Tensor, uniforms_B: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (B,) and their log-probs (B,) in nats at `temperature`; 0 takes the most likely token and reports
    its log-prob at temperature 1. One uniform number in [0, 1) decides one token, so that a row's draw does not
    depend on which other rows are in the batch."""
    logprobs_BV = (logits_BV.float() / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        ids_B = logprobs_BV.argmax(-1)
    else:
        # float64: over 150,000 entries a float32 cumulative sum is off by more than the tail's own mass.
        cdf_BV = logprobs_BV.to(uniforms_B.device).double().exp().cumsum(-1)
        ids_B = torch.searchsorted(cdf_BV, uniforms_B[:, None] * cdf_BV[:, -1:], right=True)[:, 0]
        ids_B = ids_B.clamp(max=logits_BV.shape[-1] - 1).to(logits_BV.device)
    return ids_B, logprobs_BV.gather(-1, ids_B[:, None])[:, 0]


class _SlotLayer(DynamicLayer):
    """A cache layer with room for `capacity` slots from the start. DynamicLayer grows by concatenation, which copies
    the whole cache once per token."""

    def __init__(self, capacity: int, keys: torch.Tensor | None = None, values: torch.Tensor | None = None):
        super().__init__()
        self.capacity = capacity
        if keys is not None:
            self._allocate(keys)
            self.update(keys, values)

    def _allocate(self, like: torch.Tensor):
        shape = (like.shape[0], like.shape[1], self.capacity, like.shape[3])
        self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
        self._keys, self._values = like.new_empty(shape), like.new_empty(shape)
        self.keys, self.values = self._keys[:, :, :0], self._values[:, :, :0]

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self._allocate(key_states)
        old = self.keys.shape[2]
        new = old + key_states.shape[2]
        self._keys[:, :, old:new], self._values[:, :, old:new] = key_states, value_states
        self.keys, self.values = self._keys[:, :, :new], self._values[:, :, :new]
        return self.keys, self.values

    def select(self, rows: torch.Tensor):
        used = self.keys.shape[2]
        self._keys, self._values = self._keys[rows], self._values[rows]
        self.keys, self.values = self._keys[:, :, :used], self._values[:, :, :used]


class HFSampler:
    """Batched sampling with a transformers model, in process and on the trained weights themselves.

    Three things make it quick without changing a single log-prob:
    - equal prompts (a group at its first turn) are encoded once;
    - keys and values of earlier turns are kept until `sync`, so a turn encodes only what is new in its prompt;
    - rows that have finished leave the batch.

    Slots of the cache that hold padding are hidden by the attention mask, and positions are given explicitly, so a
    row may have holes anywhere. `max_batch_tokens` bounds rows x slots of one batch, and what is kept between turns.

    Raises: ValueError for a model whose layers do not all attend to the whole context.
    """

    def __init__(self, model, stop_ids: set[int], max_batch_tokens: int = 65_536):
        windowed = getattr(model.config, "sliding_window", None) is not None
        kinds = set(
            getattr(model.config, "layer_types", None) or ["sliding_attention" if windowed else "full_attention"]
        )
        if kinds != {"full_attention"}:
            raise ValueError(
                f"HFSampler needs full attention in every layer; {type(model).__name__} has {sorted(kinds)}. "
                "Choose a model of the Qwen2, Qwen3 or Llama family."
            )
        self.stop_ids = sorted(stop_ids)
        self.max_batch_tokens = max_batch_tokens
        self.sync(model)

    def sync(self, model):
        """The sampler reads the trained weights in place; only the keys and values that older weights made must go."""
        self.model = model
        self._kept: dict[tuple[int, ...], torch.Tensor] = {}

    def close(self):
        self._kept.clear()
        self.model = None

    @torch.no_grad()
    def generate(
        self, prompts: list[list[int]], seeds: list[int], max_new_tokens: int, temperature: float = 1.0
    ) -> list[Sampled]:
        """One `Sampled` per prompt, in order. Row i depends on prompts[i] and seeds[i] alone, up to rounding."""
        results: list[Sampled | None] = [None] * len(prompts)
        batch: list[int] = []

        def flush():
            rows = self._generate_batch(
                [prompts[i] for i in batch], [seeds[i] for i in batch], max_new_tokens, temperature
            )
            for i, row in zip(batch, rows, strict=True):
                results[i] = row
            batch.clear()

        # Shortest first: neighbours are of about equal length, which keeps padding small.
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            if batch and (len(batch) + 1) * (len(prompts[i]) + max_new_tokens) > self.max_batch_tokens:
                flush()
            batch.append(i)
        if batch:
            flush()
        return results

    def _generate_batch(self, prompts, seeds, max_new_tokens, temperature) -> list[Sampled]:
        device = self.model.device
        uniforms_BT = torch.tensor(np.stack([np.random.default_rng(seed).random(max_new_tokens) for seed in seeds]))
        uniforms_BT = uniforms_BT.to("cpu" if device.type == "mps" else device)  # Apple's GPU has no float64
        stop_ids = torch.tensor(self.stop_ids, device=device)
        results = [Sampled([], [], "length") for _ in prompts]

        cache, mask_BL, positions_B, logits_BV = self._encode(prompts, max_new_tokens)
        rows = list(range(len(prompts)))  # rows[b]: the prompt that row b of the batch belongs to
        active_B = torch.ones(len(rows), dtype=torch.bool, device=device)
        for t in range(max_new_tokens):
            ids_B, logprobs_B = draw(logits_BV, uniforms_BT[rows, t], temperature)
            active = active_B.tolist()
            for row, is_active, token, logprob in zip(rows, active, ids_B.tolist(), logprobs_B.tolist(), strict=True):
                if is_active:
                    results[row].token_ids.append(token)
                    results[row].logprobs.append(logprob)
            stopped_B = active_B & torch.isin(ids_B, stop_ids)
            for b in stopped_B.nonzero()[:, 0].tolist():
                results[rows[b]].finish_reason = "stop"
            active_B = active_B & ~stopped_B
            num_active = int(active_B.sum())
            if num_active == 0 or t == max_new_tokens - 1:
                break
            # Leaving copies the cache of those who stay, so wait until a quarter of the batch has finished.
            if num_active <= 0.75 * len(rows):
                self._keep(cache, mask_BL, prompts, results, rows, (~active_B).nonzero()[:, 0])
                stay = active_B.nonzero()[:, 0]
                for layer in cache.layers:
                    layer.select(stay)
                mask_BL, positions_B, ids_B, active_B = mask_BL[stay], positions_B[stay], ids_B[stay], active_B[stay]
                rows = [rows[b] for b in stay.tolist()]
            mask_BL = torch.cat([mask_BL, active_B[:, None].long()], dim=1)
            logits_BV = self.model(
                input_ids=ids_B[:, None],
                attention_mask=mask_BL,
                position_ids=positions_B[:, None],
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
            positions_B = positions_B + 1
        self._keep(cache, mask_BL, prompts, results, rows, torch.arange(len(rows), device=device))
        return results

    def _encode(self, prompts, max_new_tokens):
        """Cache, mask (B, L), next positions (B,) and next-token logits (B, V) after the prompts."""
        device = self.model.device
        unique = list(dict.fromkeys(tuple(p) for p in prompts))
        kept = [self._longest_kept(p) for p in unique]
        starts = [0 if k is None else k.shape[2] for k in kept]
        news = [len(p) - s for p, s in zip(unique, starts, strict=True)]
        num_old, num_new = max(starts), max(news)
        capacity = num_old + num_new + max_new_tokens

        ids_BN = torch.zeros(len(unique), num_new, dtype=torch.long)
        mask_BL = torch.zeros(len(unique), num_old + num_new, dtype=torch.long)
        for b, (prompt, start, new) in enumerate(zip(unique, starts, news, strict=True)):
            ids_BN[b, :new] = torch.tensor(prompt[start:])
            mask_BL[b, :start] = 1
            mask_BL[b, num_old : num_old + new] = 1
        ids_BN, mask_BL = ids_BN.to(device), mask_BL.to(device)
        starts_B, news_B = torch.tensor(starts, device=device), torch.tensor(news, device=device)

        if num_old:
            like = next(k for k in kept if k is not None)
            old = like.new_zeros(like.shape[0], len(unique), like.shape[1], num_old, like.shape[3])
            for b, k in enumerate(kept):
                if k is not None:
                    old[:, b, :, : starts[b]] = k
            layers = [_SlotLayer(capacity, old[i], old[i + 1]) for i in range(0, len(old), 2)]
        else:
            layers = [_SlotLayer(capacity) for _ in range(self.model.config.num_hidden_layers)]
        cache = Cache(layers=layers)

        # Prompts are padded on the right, so the last token of a row stands in a column of its own.
        last_columns, column_B = torch.unique(news_B - 1, return_inverse=True)
        logits = self.model(
            input_ids=ids_BN,
            attention_mask=mask_BL,
            position_ids=starts_B[:, None] + torch.arange(num_new, device=device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last_columns,
        ).logits
        logits_BV = logits[torch.arange(len(unique), device=device), column_B]
        positions_B = starts_B + news_B
        if len(unique) < len(prompts):
            index = {prompt: b for b, prompt in enumerate(unique)}
            rows = torch.tensor([index[tuple(p)] for p in prompts], device=device)
            for layer in cache.layers:
                layer.select(rows)
            mask_BL, positions_B, logits_BV = mask_BL[rows], positions_B[rows], logits_BV[rows]
        return cache, mask_BL, positions_B, logits_BV

    def _longest_kept(self, prompt: tuple[int, ...]) -> torch.Tensor | None:
        # At least one token must be left to encode: its logits are what the next token is drawn from.
        for length in sorted({len(ids) for ids in self._kept if len(ids) < len(prompt)}, reverse=True):
            if (kept := self._kept.get(prompt[:length])) is not None:
                return kept
        return None

    def _keep(self, cache, mask_BL, prompts, results, rows, leaving):
        """Store the keys and values of the `leaving` rows, holes taken out, under the token ids that made them."""
        if len(leaving) == 0:
            return
        stacked = torch.stack([t[leaving] for layer in cache.layers for t in (layer.keys, layer.values)])
        for b, row in enumerate(leaving.tolist()):
            slots = mask_BL[row].bool()
            # The last token was drawn but never fed, so it has no keys and values yet.
            ids = (*prompts[rows[row]], *results[rows[row]].token_ids[:-1])
            self._kept[ids] = stacked[:, b, :, slots]
        while sum(map(len, self._kept)) > self.max_batch_tokens:
            self._kept.pop(next(iter(self._kept)))
