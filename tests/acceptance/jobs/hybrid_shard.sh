#!/bin/bash
# FSDP2 over two ranks with an ignored, frozen encoder.
NPUS_PER_NODE=2
MASTER_ADDR=localhost
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

MM_DATA="./jobs/data.json"
MM_MODEL="./jobs/model_frozen.json"
LOAD_PATH="ckpt/tiny/hf"
SAVE_PATH="save_hybrid_shard"

TP=1
PP=1
CP=1
MBS=1
GRAD_ACC_STEP=2
DP=$(($WORLD_SIZE/$TP/$PP/$CP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))

DISTRIBUTED_ARGS="
    --nproc_per_node $NPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK \
    --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT
"

GPT_ARGS="
    --tensor-model-parallel-size ${TP} \
    --pipeline-model-parallel-size ${PP} \
    --context-parallel-size ${CP} \
    --micro-batch-size ${MBS} \
    --global-batch-size ${GBS} \
    --vocab-size 512 \
    --seq-length 128 \
    --lr 1.0e-4 \
    --lr-decay-style constant \
    --weight-decay 0.01 \
    --clip-grad 0.0 \
    --train-iters 2 \
    --num-workers 0 \
    --load $LOAD_PATH \
    --use-torch-fsdp2 \
    --fsdp2-config-path ./jobs/fsdp2_config.yaml \
    --untie-embeddings-and-output-weights \
    --ckpt-format torch_dcp
"

OUTPUT_ARGS="
    --log-interval 1 \
    --save-interval 2 \
    --save $SAVE_PATH
"

torchrun $DISTRIBUTED_ARGS pretrain_transformers.py \
    $GPT_ARGS \
    --mm-data $MM_DATA --mm-model $MM_MODEL \
    $OUTPUT_ARGS \
    --distributed-backend nccl
