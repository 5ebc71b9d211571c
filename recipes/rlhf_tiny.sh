#!/usr/bin/env bash
# RLHF of model/tiny on a CPU, minutes on two cores: SFT, a reward model, PPO rewarded by it.
# Call it again after any kill: each command resumes its run, and finished runs answer at once.
# Options are passed to every run: recipes/rlhf_tiny.sh --run.seed 1
set -e
trap 'exit 130' INT # also if a run ended in spite of Ctrl-C
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

python scripts/train.py configs/rlhf_sft_tiny.yaml "$@"
python scripts/train.py configs/rlhf_rm_tiny.yaml "$@"
python scripts/train.py configs/rlhf_ppo_tiny.yaml "$@"
