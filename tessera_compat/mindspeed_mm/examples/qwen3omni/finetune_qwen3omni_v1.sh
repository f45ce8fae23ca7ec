#!/bin/bash
# Fine-tune the thinker of Qwen3-Omni 30B-A3B with the FSDP2 trainer.
# Start it in a folder that `tessera migrate workspace` has laid out. Every variable can be set before the script.
set -o pipefail
export NON_MEGATRON=true
export CUDA_DEVICE_MAX_CONNECTIONS=2
export TASK_QUEUE_ENABLE=2
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

CONFIG=${CONFIG:-./examples/qwen3omni/qwen3omni_v1.yaml}
GBS=${GBS:-$WORLD_SIZE}

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"

mkdir -p logs
LOG_FILE=${LOG_FILE:-logs/train_$(date +%Y%m%d_%H%M%S).log}
torchrun $DISTRIBUTED_ARGS mindspeed_mm/fsdp/train/trainer.py \
    $CONFIG $MORE_ARGS \
    2>&1 | tee $LOG_FILE || exit 1

STEP_TIME=$(grep "elapsed time per iteration" $LOG_FILE | awk -F ':' '{print $5}' | awk -F '|' '{sum += $1} END {if (NR) printf("%.1f", sum / NR)}')
echo "Elapsed Time Per iteration: $STEP_TIME"
awk "BEGIN {printf(\"Average Samples per Second: %.3f\\n\", $GBS * 1000 / $STEP_TIME)}"
