#!/bin/bash
#SBATCH --job-name=vtune
#SBATCH --array=0-7
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=02:00:00
#SBATCH --output=vtune-%A_%a.log
# Eight workers of one study, a GPU each. They need nothing of each other but the database.
set -euo pipefail

# The password is in ~/.pgpass (mode 600), where PostgreSQL's client library looks for it.
export VTUNE_STORAGE="postgresql+psycopg://vtune@db.cluster.internal:5432/vtune"

vtune optimize \
  --target vllm --model Qwen/Qwen3-8B \
  --flags 'vllm serve Qwen/Qwen3-8B --max-num-seqs 256' \
  --slo 'itl_p99<40ms,ttft_p95<500ms' --workload chat \
  --budget 90m \
  --study "vtune-$SLURM_ARRAY_JOB_ID" \
  --out "vtune-runs/$SLURM_ARRAY_JOB_ID/$SLURM_ARRAY_TASK_ID"
