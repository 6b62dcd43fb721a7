"""What each switch of memory and speed brings, in one run: `python benchmarks/memory.py` prints the table of memory.md.

Each case is a process of its own: one optimizer step of policy loss on the same rows, or the optimizer alone. Peak
memory is the highest resident size less that before the step; ratios are to the first line of each block.
"""

import gc
import json
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

import starpo_grpo as script  # noqa: E402

REPEATS = 3
# block -> {line: options}; the first line of a block is what the others are compared with.
CASES = {
    "vocabulary 150k, logits": {
        "at every token": {"vocab": 151_936, "everywhere": True},
        "where something was sampled": {"vocab": 151_936},
    },
    "microbatches": {
        "fixed, 8 rows in batch order": {"fixed": 8},
        "sorted by length, 4096 tokens": {},
    },
    "activations": {
        "kept": {"layers": 12},
        "--gradient-checkpointing": {"layers": 12, "checkpointing": True},
    },
    "precision": {
        "float32": {},
        "--bf16 (weights stay float32)": {"bf16": True},
    },
    "optimizer, 50M weights": {
        "adamw": {"optimizer": "adamw"},
        "adamw-fused": {"optimizer": "adamw-fused"},
        "adamw-8bit": {"optimizer": "adamw-8bit"},
    },
}


def make_rows(vocab: int, number: int = 32) -> list:
    """Trajectories of one to five turns, as FrozenLake has them: 40 prompt tokens a turn, a tenth of all sampled."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(number):
        sample = script.Sample()
        sample.append(rng.integers(0, vocab, 120).tolist(), 0)
        for turn in range(int(rng.integers(1, 6))):
            sample.append(rng.integers(0, vocab, 40).tolist(), turn)
            sample.append(rng.integers(0, vocab, 12).tolist(), turn, [-1.0] * 12)
        samples.append(sample)
    return samples


def logprobs_from_all(model, ids_BT, attention_mask_BT, loss_mask_BS, temperature):
    logits_BTV = model(input_ids=ids_BT, attention_mask=attention_mask_BT, use_cache=False).logits
    logprobs_BSV = (logits_BTV[:, :-1].float() / temperature).log_softmax(-1)
    entropies_BS = -(logprobs_BSV.exp() * logprobs_BSV).sum(-1) * loss_mask_BS
    return logprobs_BSV.gather(-1, ids_BT[:, 1:, None])[..., 0] * loss_mask_BS, entropies_BS


def step(model, samples, options) -> None:
    logprobs = logprobs_from_all if options.get("everywhere") else script.token_logprobs
    lengths = [len(sample.ids) for sample in samples]
    if size := options.get("fixed"):
        batches = [list(range(i, min(i + size, len(samples)))) for i in range(0, len(samples), size)]
    else:
        batches = script.microbatches(lengths, 4096)
    num_tokens = sum(sum(sample.loss_mask) for sample in samples)
    for rows in batches:
        ids_BT, attention_mask_BT, loss_mask_BS = script.pad([samples[i] for i in rows], "cpu")
        with torch.autocast("cpu", torch.bfloat16, enabled=options.get("bf16", False)):
            logprobs_BS, entropies_BS = logprobs(model, ids_BT, attention_mask_BT, loss_mask_BS, 1.0)
        loss, _ = script.policy_loss(
            logprobs_BS, logprobs_BS.detach(), loss_mask_BS, loss_mask_BS, 0.2, 0.28, 3.0, "token-mean", num_tokens, 1
        )
        (loss - 0.001 * (entropies_BS * loss_mask_BS).sum() / num_tokens).backward()
    model.zero_grad()


def measure(options: dict) -> tuple[float, float]:
    """Median seconds of a step, and its peak memory in MiB; for an optimizer, of its moments."""
    torch.manual_seed(0)
    if name := options.get("optimizer"):
        weights = [torch.nn.Parameter(torch.randn(1000, 1000)) for _ in range(50)]
        optimizer = script.make_optimizer(weights, script.Args(optimizer=name, learning_rate=1e-4))
        seconds = []
        for _ in range(REPEATS + 1):
            for p in weights:
                p.grad = torch.ones_like(p)
            started = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        tensors = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
        return statistics.median(seconds[1:]), sum(t.numel() * t.element_size() for t in tensors) / 2**20
    vocab = options.get("vocab", 1000)
    config = Qwen2Config(
        vocab_size=vocab, hidden_size=256, intermediate_size=768, num_hidden_layers=options.get("layers", 4),
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    model, samples = Qwen2ForCausalLM(config).eval(), make_rows(vocab)
    if options.get("checkpointing"):
        model.gradient_checkpointing_enable()
        script.recompute(model, True)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        step(model, samples, options)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main():
    context = multiprocessing.get_context("spawn")
    print("| | seconds | ratio | memory, MiB | ratio |\n|---|---|---|---|---|")
    for block, lines in CASES.items():
        base = None
        for line, options in lines.items():
            with context.Pool(1) as pool:
                seconds, memory = pool.apply(measure, (options,))
            base = base or (seconds, memory)
            ratios = f"{seconds / base[0]:.2f}", f"{memory / base[1]:.2f}"
            print(f"| {block}: {line} | {seconds:.2f} | {ratios[0]} | {memory:.0f} | {ratios[1]} |", flush=True)


if __name__ == "__main__":
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), file=sys.stderr)
    main()
