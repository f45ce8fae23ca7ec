#!/bin/bash
# Train Wan 2.1 1.3B on features, which feature_extract/feature_extraction.sh writes.
# Start it in a folder that `tessera migrate workspace` has laid out. Every variable can be set before the script.
set -o pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TASK_QUEUE_ENABLE=1
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

MM_DATA=${MM_DATA:-./examples/wan2.1/1.3b/t2v/feature_data.json}
MM_MODEL=${MM_MODEL:-./examples/wan2.1/1.3b/t2v/pretrain_model.json}
MM_TOOL=${MM_TOOL:-./mindspeed_mm/tools/tools.json}
LOAD_PATH=${LOAD_PATH:-ckpt/hf_path/Wan2.1-T2V-1.3B-Diffusers/transformer}
SAVE_PATH=${SAVE_PATH:-save_dir}

TP=${TP:-1}
PP=${PP:-1}
VP=${VP:-1}
CP=${CP:-1}
MBS=1
GRAD_ACC_STEP=${GRAD_ACC_STEP:-1}
DP=$(($WORLD_SIZE/$TP/$PP/$CP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))
TRAIN_ITERS=${TRAIN_ITERS:-5000}
SAVE_INTERVAL=${SAVE_INTERVAL:-5000}
NUM_WORKERS=${NUM_WORKERS:-8}

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"

GPT_ARGS="
    --tensor-model-parallel-size $TP \
    --pipeline-model-parallel-size $PP \
    --virtual-pipeline-model-parallel-size $VP \
    --context-parallel-size $CP \
    --context-parallel-algo ulysses_cp_algo \
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --num-workers $NUM_WORKERS \
    --lr 1e-5 \
    --min-lr 1e-5 \
    --adam-beta1 0.9 \
    --adam-beta2 0.999 \
    --adam-eps 1e-8 \
    --lr-decay-style constant \
    --weight-decay 1e-2 \
    --lr-warmup-init 0 \
    --lr-warmup-iters 0 \
    --clip-grad 1.0 \
    --train-iters $TRAIN_ITERS \
    --seed 42 \
    --no-gradient-accumulation-fusion \
    --no-load-optim \
    --no-load-rng \
    --no-save-optim \
    --no-save-rng \
    --recompute-granularity full \
    --recompute-method block \
    --recompute-num-layers 20 \
    --use-distributed-optimizer \
    --overlap-grad-reduce \
    --overlap-param-gather \
    --attention-mask-type general \
    ${PRECISION---bf16}
"

MM_ARGS="
    --mm-data $MM_DATA \
    --mm-model $MM_MODEL \
    --mm-tool $MM_TOOL
"

OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval $SAVE_INTERVAL \
    --eval-interval 10000 \
    --eval-iters 10 \
    --load $LOAD_PATH \
    --save $SAVE_PATH \
    --ckpt-format torch
"

mkdir -p logs
LOG_FILE=${LOG_FILE:-logs/train_$(date +%Y%m%d_%H%M%S).log}
torchrun $DISTRIBUTED_ARGS pretrain_sora.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl \
    2>&1 | tee $LOG_FILE || exit 1

STEP_TIME=$(grep "elapsed time per iteration" $LOG_FILE | awk -F ':' '{print $5}' | awk -F '|' '{sum += $1} END {if (NR) printf("%.1f", sum / NR)}')
echo "Elapsed Time Per iteration: $STEP_TIME"
awk "BEGIN {printf(\"Average Samples per Second: %.3f\\n\", $GBS * 1000 / $STEP_TIME)}"
