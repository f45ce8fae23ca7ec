#!/bin/bash
# Sample videos with Wan 2.1 1.3B; inference_model.json names the prompts.
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

MM_MODEL=${MM_MODEL:-./examples/wan2.1/1.3b/t2v/inference_model.json}
LOAD_PATH=${LOAD_PATH:-ckpt/hf_path/Wan2.1-T2V-1.3B-Diffusers/transformer}

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
    --global-batch-size 1 \
    --seed 42 \
    --no-load-optim \
    --no-load-rng \
    --load $LOAD_PATH \
    ${PRECISION---bf16}
"

MM_ARGS="
    --mm-model $MM_MODEL
"

torchrun $DISTRIBUTED_ARGS inference_sora.py \
    $MM_ARGS \
    $GPT_ARGS \
    --distributed-backend nccl
