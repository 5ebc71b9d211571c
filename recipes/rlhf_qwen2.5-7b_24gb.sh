#!/usr/bin/env bash
# Rejection sampling, a reward model from the same rollouts and PPO rewarded by it: Qwen2.5-7B in
# NF4 (QLoRA) on GSM8K, on a card of 24 GB.
# Call it again after any kill: each command resumes its run, and finished ones answer at once.
set -e
trap 'exit 130' INT # also if a run ended in spite of Ctrl-C
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
name=qwen2.5-7b_24gb
sampled=runs/rlhf_sample_$name

python scripts/train.py configs/rlhf_sample_$name.yaml "$@"
python scripts/pairs.py $sampled/buffers --out $sampled/demonstrations.jsonl --as demonstrations --per-prompt 2
python scripts/train.py configs/rlhf_sft_$name.yaml "$@"
python scripts/pairs.py $sampled/buffers --out $sampled/preferences.jsonl --by all --per-prompt 4
python scripts/train.py configs/rlhf_rm_$name.yaml "$@"
python scripts/train.py configs/rlhf_ppo_$name.yaml "$@"
