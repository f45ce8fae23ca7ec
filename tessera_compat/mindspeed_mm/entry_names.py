"""Offer constants and functions that the entry files of MindSpeed-MM import, so that edited copies of them run.

A run does not need them: a flag or the trainer does their work. A function that would change a run raises an error
that names its replacement.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tessera.errors import TesseraError
from tessera_compat import state

# Names of keys in batches and data records.
PROMPT_IDS, PROMPT_MASK = "prompt_ids", "prompt_mask"
PROMPT_IDS_2, PROMPT_MASK_2 = "prompt_ids_2", "prompt_mask_2"
TEXT, PROMPT, CAPTIONS = "text", "prompt", "captions"
VIDEO, VIDEO_MASK, VIDEO_REJECTED = "video", "video_mask", "video_rejected"
LATENTS, MASKED_VIDEO, INPUT_MASK = "latents", "masked_video", "input_mask"
FILE_INFO, FILE_REJECTED_INFO = "file", "file_rejected"
SCORE, SCORE_REJECTED = "score", "score_rejected"
GLOBAL_STEP_TOKEN_NUM, AVG_PER_STEP_TOKEN_NUM = "global_step_token_num", "avg_per_step_token_num"


def get_num_microbatches() -> int:
    """Return the number of micro-batches of a rank in a step."""
    args = state.get_args()
    return int(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))


cal_gradient_accumulation_size = get_num_microbatches


def get_model_config(config: Any) -> Any:
    """Return a section of model.json unchanged: VLMModel parses it."""
    return config


def merge_mm_args(args: Any) -> None:
    """Do nothing: `args.mm` contains the JSON files after the command line is parsed."""
    assert args.mm is not None


def is_enable_lora() -> bool:
    """Return whether adapters are trained."""
    return bool(state.get_args().lora_target_modules)


def is_use_dynamic_dpcp() -> bool:
    """Return False: data and context parallelism do not change during a run."""
    return False


def get_dtype(dtype: str | torch.dtype | None) -> torch.dtype:
    """Return a torch dtype by its name; None means bfloat16."""
    names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: torch.bfloat16}
    if isinstance(dtype, torch.dtype):
        return dtype
    kind = names.get(dtype) or getattr(torch, str(dtype).removeprefix("torch."), None)
    if not isinstance(kind, torch.dtype):
        raise TesseraError(
            f"{dtype!r} is not a dtype",
            where="get_dtype",
            allowed=[n for n in names if n],
            code="job.unknown-dtype",
        )
    return kind


class _NotHere:
    """Replace a function of MindSpeed-MM that Tessera does not need. A call raises an error with the advice `fix`."""

    def __init__(self, name: str, fix: str) -> None:
        self.name, self.fix = name, fix

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TesseraError(
            f"{self.name} is not supported: runs of Tessera do not need it",
            where=self.name,
            fix=self.fix,
            code="job.no-effect-here",
        )

    apply = __call__


_ENCODERS = "leave out --hetero-parallel; parallel.encoders of a recipe splits encoders separately"
change_parallel_state = _NotHere("change_parallel_state", _ENCODERS)
apply_hetero_parallel_hooks = _NotHere("apply_hetero_parallel_hooks", _ENCODERS)
hetero_align_config = _NotHere("hetero_align_config", _ENCODERS)
get_dpcp_batch_for_step = _NotHere("get_dpcp_batch_for_step", "leave out use_dynamic_dpcp of model.json")
EncoderBalanceComm = _NotHere("EncoderBalanceComm", "leave out --encoder-dp-balance; data.balance does it in a recipe")
PrefetchGradAccDataLoader = _NotHere(
    "PrefetchGradAccDataLoader", "--calculate-per-token-loss counts the tokens of all ranks and micro-batches"
)
DynamicBatchingDataLoader = _NotHere(
    "DynamicBatchingDataLoader", "data.pack fills rows in the recipe that `tessera migrate JOB.sh` writes"
)
torch_fully_sharded_data_parallel_init = _NotHere(
    "torch_fully_sharded_data_parallel_init", "setup_model_and_optimizer shards the model by fsdp2_config.yaml"
)
