"""Mean of (risky arm's advantage - safe arm's) under group normalisation, by enumeration of a group's outcomes.

`python benchmarks/bandit_bias.py` prints the table of benchmarks/cpu.md. Below 0 the better arm is unlearned.
"""

from math import comb

import numpy as np

WIN, SAFE = 0.25, 0.1  # the risky arm pays 1.0 with probability WIN, the safe arm SAFE


def advantage_gap(group_size: int, p: float) -> float:
    """`p`: probability with which the policy pulls the risky arm. Groups in which all pull the same arm have no gap."""
    gap = 0.0
    for risky in range(1, group_size):
        for wins in range(risky + 1):
            chance = comb(group_size, risky) * p**risky * (1 - p) ** (group_size - risky)
            chance *= comb(risky, wins) * WIN**wins * (1 - WIN) ** (risky - wins)
            returns = np.array([1.0] * wins + [0.0] * (risky - wins) + [SAFE] * (group_size - risky))
            gap += chance * (returns[:risky].mean() - returns[risky:].mean()) / (returns.std(ddof=1) + 1e-6)
    return gap


if __name__ == "__main__":
    probabilities = (0.2, 0.44, 0.6, 0.8)
    print("| group size | " + " | ".join(f"p = {p}" for p in probabilities) + " |")
    print("|---" * (len(probabilities) + 1) + "|")
    for group_size in (8, 16, 32, 64):
        print(f"| {group_size} | " + " | ".join(f"{advantage_gap(group_size, p):+.3f}" for p in probabilities) + " |")
