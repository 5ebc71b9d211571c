#!/usr/bin/env bash
# Two rounds of rejection sampling on model/tiny: 2,000 rollouts, SFT on the right ones, and again.
# Call it again after any kill: each command resumes its run, and finished ones answer at once.
set -e
trap 'exit 130' INT # also if a run ended in spite of Ctrl-C
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"

adapter=(--model.adapter.rank 32 --model.adapter.alpha 64)
for round in 1 2; do
    sampled=runs/rejection_sample_$round learned=runs/rejection_sft_$round
    python scripts/train.py configs/sample_tiny.yaml --run.name rejection_sample_$round \
        "${adapter[@]}" "$@"
    python scripts/pairs.py $sampled/buffers --out $sampled/right.jsonl --as demonstrations
    python scripts/train.py configs/sft_tiny.yaml --run.name rejection_sft_$round --run.steps 20 \
        --data.train $sampled/right.jsonl "${adapter[@]}" "$@"
    adapter=(--model.adapter.rank 32 --model.adapter.alpha 64 --model.start $learned/adapter)
done
