#!/bin/bash
# Ask Qwen2-VL 7B about an image; inference_qwen2vl_7b.json names both.
# Start it in a folder that `tessera migrate workspace` has laid out. Every variable can be set before the script.
set -o pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TASK_QUEUE_ENABLE=2
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

NPUS_PER_NODE=${NPUS_PER_NODE:-1}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

MM_MODEL=${MM_MODEL:-./examples/qwen2vl/inference_qwen2vl_7b.json}
LOAD_PATH=${LOAD_PATH:-ckpt/hf_path/Qwen2-VL-7B-Instruct}

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
    --micro-batch-size 1 \
    --global-batch-size 1 \
    --tokenizer-type NullTokenizer \
    --seq-length 1024 \
    --make-vocab-size-divisible-by 1 \
    --seed 42 \
    --bf16 \
    --load $LOAD_PATH \
    --use-flash-attn \
    --no-load-optim \
    --no-load-rng
"

MM_ARGS="
    --mm-model $MM_MODEL
"

torchrun $DISTRIBUTED_ARGS inference_vlm.py \
    $GPT_ARGS \
    $MM_ARGS \
    --distributed-backend nccl
