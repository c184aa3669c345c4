#!/usr/bin/env bash
# One learner, one actor and a proxy in one Hugging Face Job; N vLLM samplers in N others; a storage bucket between them.
#
#   DRY_RUN=1 NAMESPACE=me MODEL=Qwen/Qwen2.5-1.5B-Instruct DATA=gsm8k.jsonl examples/hf_jobs.sh    # prints every command
#   NAMESPACE=me MODEL=Qwen/Qwen2.5-1.5B-Instruct DATA=gsm8k.jsonl STEPS=300 examples/hf_jobs.sh
#
# Before: `hf auth login`; HF_TOKEN (write); S3 credentials of that token in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
# (huggingface.co/settings/tokens, "Generate S3 credentials"). Jobs cost money by the minute: every job here is cancelled
# when this script ends, however it ends, and by TIMEOUT when this machine itself is lost.
#
# The learner, the actor and the proxy speak S3 with the bucket, where If-None-Match is honoured. The samplers only read
# adapters, from the bucket mounted at /bucket. All jobs are in one network group: the proxy reaches sampler 0 as host s0.
# The same command again goes on where the run stopped.
set -euo pipefail

NAMESPACE=${NAMESPACE:?user or organisation} MODEL=${MODEL:?hub id of the base} DATA=${DATA:?JSON lines with prompt and answer}
BUCKET=${BUCKET:-async-grpo} RUN=${RUN:-run1} STEPS=${STEPS:-200} TASK_FLAGS=${TASK_FLAGS:-} TIMEOUT=${TIMEOUT:-12h}
SAMPLERS=${SAMPLERS:-2} SAMPLER_FLAVOR=${SAMPLER_FLAVOR:-l4x1} TRAINER_FLAVOR=${TRAINER_FLAVOR:-l40sx1}
RANK=${RANK:-16} MAX_STALENESS=${MAX_STALENESS:-2} VLLM_IMAGE=${VLLM_IMAGE:-vllm/vllm-openai:v0.32.0} DRY_RUN=${DRY_RUN:-}
here=$(cd "$(dirname "$0")/.." && pwd)

# Versions served at once; as many slots, so that vLLM never evicts one that a request still uses. vLLM knows few ranks.
live=$((MAX_STALENESS + 2))
for max_rank in 1 8 16 32 64 128 256 320 512; do [ "$max_rank" -ge "$RANK" ] && break; done

run() {  # prints a command; runs it unless DRY_RUN
  printf '+' >&2; printf ' %q' "$@" >&2; printf '\n' >&2
  if [ -n "$DRY_RUN" ]; then echo "job$RANDOM"; else "$@"; fi
}

jobs_started=()
finish() {  # subtle: to the bash of macOS an empty array is "unbound"
  for job in ${jobs_started[@]+"${jobs_started[@]}"}; do run hf jobs cancel "$NAMESPACE/$job" >/dev/null || true; done
}
trap finish EXIT

: "${HF_TOKEN:?}" "${AWS_ACCESS_KEY_ID:?}" "${AWS_SECRET_ACCESS_KEY:?}"
export GRPO_TOKEN=${GRPO_TOKEN:-$(python3 -c 'import secrets; print(secrets.token_hex(16))')} VLLM_API_KEY
VLLM_API_KEY=$GRPO_TOKEN  # one secret: clients to proxy, proxy to vLLM
group=grpo-$BUCKET-$RUN

run hf buckets create "$NAMESPACE/$BUCKET" --private --exist-ok >/dev/null
run hf buckets sync "$here" "hf://buckets/$NAMESPACE/$BUCKET/code" --include '*.py' --include '*.txt' --include '*.html' --exclude 'runs/*' >/dev/null
run hf buckets cp "$DATA" "hf://buckets/$NAMESPACE/$BUCKET/data/$RUN.jsonl" >/dev/null

replicas=()
for ((i = 0; i < SAMPLERS; i++)); do
  job=$(run hf jobs run -d -q --namespace "$NAMESPACE" --flavor "$SAMPLER_FLAVOR" --timeout "$TIMEOUT" --network-group "$group" --network-alias "s$i" \
    -v "hf://buckets/$NAMESPACE/$BUCKET:/bucket:ro" --secrets HF_TOKEN --secrets VLLM_API_KEY \
    -e VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 -e VLLM_SERVER_DEV_MODE=1 "$VLLM_IMAGE" \
    vllm serve "$MODEL" --port 8000 --enable-lora --max-lora-rank "$max_rank" --max-loras "$live" --max-cpu-loras $((2 * live)) \
    --logprobs-mode processed_logprobs --generation-config vllm)
  jobs_started+=("$job")
  replicas+=(--replica "http://\${HF_NETWORK_GROUP_PREFIX}s$i:8000")
done

at="s3://$BUCKET/$RUN"
trainer="set -e; cd /bucket/code; pip install -q -r requirements.txt
python grpo_async.py --role proxy --bucket $at --adapter-dir /bucket/$RUN --listen 127.0.0.1:8080 ${replicas[*]} &
python grpo_async.py --role actor --bucket $at --sampler http://127.0.0.1:8080 &
exec python grpo_async.py --role learner --bucket $at --model $MODEL --data /bucket/data/$RUN.jsonl --steps $STEPS --lora-r $RANK --max-staleness $MAX_STALENESS $TASK_FLAGS"
job=$(run hf jobs run -d -q --namespace "$NAMESPACE" --flavor "$TRAINER_FLAVOR" --timeout "$TIMEOUT" --network-group "$group" \
  -v "hf://buckets/$NAMESPACE/$BUCKET:/bucket:ro" --secrets HF_TOKEN --secrets GRPO_TOKEN --secrets AWS_ACCESS_KEY_ID --secrets AWS_SECRET_ACCESS_KEY \
  -e "AWS_ENDPOINT_URL_S3=https://s3.hf.co/$NAMESPACE" -e AWS_REGION=us-east-1 python:3.11 bash -c "$trainer")
jobs_started+=("$job")

run hf jobs logs -f "$NAMESPACE/$job"
run hf jobs wait "$NAMESPACE/$job"
