#!/bin/bash
# Write latents and embeddings of videos to the folder that tools.json names (sorafeature.save_path).
# Start it in a folder that `tessera migrate workspace` has laid out. Every variable can be set before the script.
set -o pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TASK_QUEUE_ENABLE=1
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

NPUS_PER_NODE=${NPUS_PER_NODE:-1}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

MM_DATA=${MM_DATA:-./examples/wan2.1/feature_extract/data.json}
MM_MODEL=${MM_MODEL:-./examples/wan2.1/feature_extract/model_t2v.json}
MM_TOOL=${MM_TOOL:-./mindspeed_mm/tools/tools.json}

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"

GPT_ARGS="
    --tensor-model-parallel-size 1 \
    --pipeline-model-parallel-size 1 \
    --context-parallel-size 1 \
    --micro-batch-size 1 \
    --global-batch-size $WORLD_SIZE \
    --num-workers ${NUM_WORKERS:-8}
"

MM_ARGS="
    --mm-data $MM_DATA \
    --mm-model $MM_MODEL \
    --mm-tool $MM_TOOL
"

torchrun $DISTRIBUTED_ARGS ./mindspeed_mm/tools/feature_extraction/get_wan_feature.py \
    $GPT_ARGS \
    $MM_ARGS \
    --distributed-backend nccl
