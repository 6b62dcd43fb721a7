"""How long scoring every response under every prompt takes: `python benchmarks/scorer.py [--small]`.

64 prompts of 400 tokens and 64 responses of 60, through a Qwen2 model of the tiny model's size: through the cache
(diagnostics.cross_logprobs), and by teacher forcing each concatenation, one at a time and in batches of 16. Of the slow
ways a part is timed; ratios are taken in alternation, so that other load on the machine hits all alike.
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from diagnostics import cross_logprobs  # noqa: E402


@torch.no_grad()
def concatenated(model, prompts, responses, batch: int) -> np.ndarray:
    scores_NP = np.zeros((len(responses), len(prompts)))
    for p, prompt in enumerate(prompts):
        for first in range(0, len(responses), batch):
            rows = responses[first : first + batch]  # all of one length: no padding to spoil it
            ids_BT = torch.tensor([prompt + row for row in rows])
            columns = torch.arange(len(prompt) - 1, ids_BT.shape[1] - 1)
            logits = model(input_ids=ids_BT, use_cache=False, logits_to_keep=columns).logits.float()
            logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(rows)[..., None])[..., 0]
            scores_NP[first : first + batch, p] = logprobs.double().sum(-1)
    return scores_NP


def main():
    size = 8 if "--small" in sys.argv else 64
    config = Qwen2Config(
        vocab_size=2048, hidden_size=128, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    rng = np.random.default_rng(0)
    prompts = rng.integers(2048, size=(size, 400)).tolist()
    responses = rng.integers(2048, size=(size, 60)).tolist()
    part = prompts[: size // 8]
    ratios = {1: [], 16: []}
    for _ in range(3):
        started = time.time()
        fast_NP = cross_logprobs(model, prompts, responses)
        fast = time.time() - started
        for batch in ratios:
            started = time.time()
            slow_NP = concatenated(model, part, responses, batch)
            ratios[batch].append(8 * (time.time() - started) / fast)
        print(
            f"{fast:.1f} s through the cache, largest difference {np.abs(fast_NP[:, : len(part)] - slow_NP).max():.1e}"
        )
    for batch, values in ratios.items():
        each = ", ".join(f"{value:.1f}" for value in values)
        print(f"concatenations in batches of {batch}: {statistics.median(values):.1f} times as long ({each})")


if __name__ == "__main__":
    main()
