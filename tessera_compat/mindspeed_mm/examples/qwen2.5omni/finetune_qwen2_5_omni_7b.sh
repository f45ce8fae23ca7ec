#!/bin/bash
# Fine-tune the thinker of Qwen2.5-Omni 7B: a pipeline of two uneven stages, with both encoders on the first.
# Start it in a folder that `tessera migrate workspace` has laid out. Every variable can be set before the script.
set -o pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
export TASK_QUEUE_ENABLE=2
export CPU_AFFINITY_CONF=${CPU_AFFINITY_CONF:-1}

NPUS_PER_NODE=${NPUS_PER_NODE:-8}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-6000}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
WORLD_SIZE=$(($NPUS_PER_NODE*$NNODES))

MM_DATA=${MM_DATA:-./examples/qwen2.5omni/data_7b.json}
MM_MODEL=${MM_MODEL:-./examples/qwen2.5omni/model_7b.json}
MM_TOOL=${MM_TOOL:-./mindspeed_mm/tools/tools.json}
LOAD_PATH=${LOAD_PATH:-ckpt/hf_path/Qwen2.5-Omni-7B}
SAVE_PATH=${SAVE_PATH:-save_dir}

TP=${TP:-1}
PP=${PP:-2}
CP=${CP:-1}
MBS=1
GRAD_ACC_STEP=${GRAD_ACC_STEP:-48}
DP=$(($WORLD_SIZE/$TP/$PP/$CP))
GBS=$(($MBS*$GRAD_ACC_STEP*$DP))
SEQ_LENGTH=${SEQ_LENGTH:-3072}
TRAIN_ITERS=${TRAIN_ITERS:-10000}
SAVE_INTERVAL=${SAVE_INTERVAL:-10000}
NUM_WORKERS=${NUM_WORKERS:-2}

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
    --context-parallel-size $CP \
    --context-parallel-algo ulysses_cp_algo \
    --micro-batch-size $MBS \
    --global-batch-size $GBS \
    --seq-length $SEQ_LENGTH \
    --tokenizer-type NullTokenizer \
    --make-vocab-size-divisible-by 1 \
    --normalization RMSNorm \
    --swiglu \
    --use-fused-rmsnorm \
    --use-fused-swiglu \
    --use-flash-attn \
    --no-masked-softmax-fusion \
    --no-gradient-accumulation-fusion \
    --variable-seq-lengths \
    --lr 1.0e-5 \
    --min-lr 0.0 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.1 \
    --weight-decay 0 \
    --clip-grad 1.0 \
    --adam-beta1 0.9 \
    --adam-beta2 0.999 \
    --train-iters $TRAIN_ITERS \
    --seed 42 \
    --load $LOAD_PATH \
    --no-load-optim \
    --no-load-rng \
    --no-save-optim \
    --no-save-rng \
    --num-workers $NUM_WORKERS \
    --distributed-timeout-minutes 600 \
    --use-distributed-optimizer \
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
    --save $SAVE_PATH \
    --ckpt-format torch \
    --log-tps
"

mkdir -p logs
LOG_FILE=${LOG_FILE:-logs/train_$(date +%Y%m%d_%H%M%S).log}
torchrun $DISTRIBUTED_ARGS pretrain_omni.py \
    $GPT_ARGS \
    $MM_ARGS \
    $OUTPUT_ARGS \
    --distributed-backend nccl \
    2>&1 | tee $LOG_FILE || exit 1

STEP_TIME=$(grep "elapsed time per iteration" $LOG_FILE | awk -F ':' '{print $5}' | awk -F '|' '{sum += $1} END {if (NR) printf("%.1f", sum / NR)}')
echo "Elapsed Time Per iteration: $STEP_TIME"
awk "BEGIN {printf(\"Average Samples per Second: %.3f\\n\", $GBS * 1000 / $STEP_TIME)}"
