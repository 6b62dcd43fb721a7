# The reference's main table (RAGEN-2, arXiv:2604.06268), one line a run: Qwen2.5-3B, 8 groups of 16, minibatches of 32,
# 400 updates, without a filter and with softmax top-p 0.9 (--filter main-table). Each line is a command of its own, for
# one GPU of 80 GB or more: PPO at 3B takes about 60 GB for weights, gradients and moments of both models. The
# reference's PPO and DAPO are the same run under two names; dapo here is DAPO. WebShop, MetaMathQA and Countdown have
# the same lines with another --env, as soon as those environments are here.

# Algorithms
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-3B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-3B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset dapo --env CoordSokoban --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset dapo --env CoordFrozenLake --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset grpo --env CoordSokoban --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset grpo --env CoordSokoban --model Qwen/Qwen2.5-3B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset grpo --env CoordFrozenLake --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset grpo --env CoordFrozenLake --model Qwen/Qwen2.5-3B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset dr-grpo --env CoordSokoban --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset dr-grpo --env CoordSokoban --model Qwen/Qwen2.5-3B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset dr-grpo --env CoordFrozenLake --model Qwen/Qwen2.5-3B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_grpo.py --preset dr-grpo --env CoordFrozenLake --model Qwen/Qwen2.5-3B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit

# Sizes (7B needs more than one process, for which the scripts are not ready yet)
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-0.5B --updates 400
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-0.5B --updates 400 --filter main-table
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-0.5B --updates 400
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-0.5B --updates 400 --filter main-table
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-1.5B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-1.5B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-1.5B --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-1.5B --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit

# Models
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-3B-Instruct --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model Qwen/Qwen2.5-3B-Instruct --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-3B-Instruct --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model Qwen/Qwen2.5-3B-Instruct --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model meta-llama/Llama-3.2-3B-Instruct --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordSokoban --model meta-llama/Llama-3.2-3B-Instruct --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model meta-llama/Llama-3.2-3B-Instruct --updates 400 --bf16 --gradient-checkpointing --optimizer adamw-8bit
accelerate launch starpo_ppo.py --preset ppo --env CoordFrozenLake --model meta-llama/Llama-3.2-3B-Instruct --updates 400 --filter main-table --bf16 --gradient-checkpointing --optimizer adamw-8bit

# The table is that of version 2. The main comparison of version 1 (StarPO, StarPO-S; Qwen2.5-0.5B-Instruct, 200 updates):
accelerate launch starpo_ppo.py --preset starpo --env SimpleSokoban --model Qwen/Qwen2.5-0.5B-Instruct --max-actions-per-turn 5
accelerate launch starpo_ppo.py --preset starpo-s --env SimpleSokoban --model Qwen/Qwen2.5-0.5B-Instruct --max-actions-per-turn 5
accelerate launch starpo_ppo.py --preset starpo --env FrozenLakeGrid --model Qwen/Qwen2.5-0.5B-Instruct --max-actions-per-turn 5
accelerate launch starpo_ppo.py --preset starpo-s --env FrozenLakeGrid --model Qwen/Qwen2.5-0.5B-Instruct --max-actions-per-turn 5
accelerate launch starpo_ppo.py --preset starpo --env Bandit --model Qwen/Qwen2.5-0.5B-Instruct
accelerate launch starpo_ppo.py --preset starpo-s --env Bandit --model Qwen/Qwen2.5-0.5B-Instruct
