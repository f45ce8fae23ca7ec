"""Processors of families that cut pictures of any size into a grid of patches, beside those of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from chats import (
    TEXTS,
    VOCAB,
    as_published,
    by_kind,
    conversation,
    grids,
    in_pairs,
    write_words,
)
from omni_cases import rope_index_of
from PIL import Image
from processors import TEXT, ProcessorCase
from torch import Tensor
from transformers import AutoTokenizer, Qwen2_5OmniThinkerConfig, Qwen3OmniMoeThinkerConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor as ReferenceGlm4v
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessor as ReferenceOmni
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor as ReferenceOmni3
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as ReferenceQwen3
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata
from transformers.vision_utils import get_vision_window_index

from tessera.core.sample import Encoded, MediaSize, Sample
from tessera.models.glm4v.config import Glm4vConfig
from tessera.models.glm4v.processor import GLM4V, Glm4vProcessor
from tessera.models.processing.streams import media_size
from tessera.models.qwen2_5_omni.config import Qwen25OmniConfig
from tessera.models.qwen2_5_omni.processor import OMNI, Qwen25OmniProcessor
from tessera.models.qwen2_5_vl.config import Qwen25VLConfig
from tessera.models.qwen2_5_vl.processor import Qwen25VLProcessor
from tessera.models.qwen2_vl.config import Qwen2VLConfig
from tessera.models.qwen2_vl.processor import Qwen2VLProcessor
from tessera.models.qwen3_omni.config import Qwen3OmniConfig
from tessera.models.qwen3_omni.processor import QWEN3_OMNI, Qwen3OmniProcessor
from tessera.models.qwen3_vl.config import Qwen3VLConfig
from tessera.models.qwen3_vl.processor import Qwen3VLProcessor

QWEN_TOKENS = {
    "vision_start_token_id": VOCAB - 4,
    "vision_end_token_id": VOCAB - 3,
    "image_token_id": VOCAB - 2,
    "video_token_id": VOCAB - 1,
}


class GridCase(ProcessorCase):
    """Families that cut pictures of any size into a grid of patches."""

    model: ClassVar[Any]
    side: ClassVar[int] = 28  # pixels along each side of a token

    def reference_pixels(self, images: list[Image.Image]) -> Tensor:
        seen = self.images(images=images, return_tensors="pt")
        assert torch.equal(
            grids(self.processor, conversation(*["image"] * len(images)), images), seen["image_grid_thw"]
        )
        pixels: Tensor = seen["pixel_values"]
        return pixels

    def exact_size(self, pixels: int) -> dict[str, int]:
        """Bounds that leave a frame of so many pixels as it is."""
        return {"shortest_edge": pixels, "longest_edge": pixels}

    def reference_clip(self, frames: np.ndarray, encoded: Encoded) -> Tensor:
        ((_, h, w),) = grids(self.processor, conversation("video"), [frames]).tolist()
        patch = self.processor.video.patch
        resized = [Image.fromarray(f).resize((w * patch, h * patch), Image.Resampling.BICUBIC) for f in frames]
        size = self.exact_size(h * w * patch**2)
        return in_pairs([self.images(images=[f], size=size, return_tensors="pt")["pixel_values"] for f in resized])

    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        shapes = grids(self.processor, sample, media, sizes)
        for part, grid in zip(sample.media(), shapes, strict=True):
            words = words.replace(f"<|{part.kind}_pad|>", f"<|{part.kind}|>" * (int(grid.prod()) // 4), 1)
        return words.replace("<|image|>", "<|image_pad|>").replace("<|video|>", "<|video_pad|>")

    def token_kinds(self, tokens: Tensor) -> Tensor:
        return (tokens == VOCAB - 2).int() + 2 * (tokens == VOCAB - 1).int()

    def reference_positions(self, encoded: Encoded, sample: Sample, media: Sequence[Any]) -> Tensor:
        with torch.device("meta"):
            model = self.model(self.model.config_class(**self.config.to_hf()))
        kinds = self.token_kinds(encoded.tokens)
        shapes = grids(self.processor, sample, media)
        images, videos = by_kind(shapes, [part.kind for part in sample.media()])
        seen: dict[str, Any] = {"image_grid_thw": images, "video_grid_thw": videos, **self.seconds(videos)}
        positions, _ = model.get_rope_index(encoded.tokens[None], kinds[None], **seen)
        return self.published(positions[:, 0], kinds)

    def seconds(self, videos: Tensor | None) -> dict[str, Any]:
        return {}

    def published(self, positions: Tensor, kinds: Tensor) -> Tensor:
        return positions


class Qwen2VLCase(GridCase):
    kind, image_class, model = Qwen2VLProcessor, Qwen2VLImageProcessorPil, Qwen2VLModel
    options: ClassVar[dict[str, Any]] = {
        "min_pixels": 28 * 28,
        "max_pixels": 28 * 28 * 20,
        "video_min_pixels": 28 * 28,
        "video_max_pixels": 28 * 28 * 6,
    }

    def configure(self, **changes: Any) -> Qwen2VLConfig:
        vision = {"depth": 1, "embed_dim": 32, "num_heads": 2}
        text = {**TEXT, "mrope_section": (2, 3, 3)}
        return Qwen2VLConfig.model_validate({"text": text, "vision": vision, **QWEN_TOKENS, **changes})

    def published(self, positions: Tensor, kinds: Tensor) -> Tensor:
        return as_published(positions, kinds)


class Qwen25VLCase(Qwen2VLCase):
    kind, model = Qwen25VLProcessor, Qwen2_5_VLModel
    options: ClassVar[dict[str, Any]] = {
        "min_pixels": 28 * 28,
        "max_pixels": 60 * 28 * 28,
        "video_min_pixels": 28 * 28,
        "video_max_pixels": 24 * 28 * 28,
    }

    def configure(self, **changes: Any) -> Qwen25VLConfig:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "window_size": 84}
        text = {**TEXT, "mrope_section": (2, 3, 3)}
        of_vision = {name: changes.pop(name) for name in ("window_size", "tokens_per_second") if name in changes}
        fields = {"text": text, "vision": {**vision, **of_vision}, **QWEN_TOKENS, **changes}
        return Qwen25VLConfig.model_validate(fields)

    def in_windows(self, shapes: Tensor, pixels: Tensor) -> tuple[Tensor, list[int]]:
        """Patches in the order in which the reference's encoder will put them, and the sizes of windows."""
        index, bounds = get_vision_window_index(shapes, spatial_merge_size=2, window_size=84, patch_size=14)
        return pixels.reshape(-1, 4, pixels.shape[1])[index].flatten(0, 1), bounds.diff().tolist()

    def reference_pixels(self, images: list[Image.Image]) -> Tensor:
        shapes = grids(self.processor, conversation(*["image"] * len(images)), images)
        return self.in_windows(shapes, super().reference_pixels(images))[0]

    def reference_clip(self, frames: np.ndarray, encoded: Encoded) -> Tensor:
        shapes = grids(self.processor, conversation("video"), [frames])
        return self.in_windows(shapes, super().reference_clip(frames, encoded))[0]

    def seconds(self, videos: Tensor | None) -> dict[str, Any]:
        """Frames of unknown rate count as sampled at the processor's rate: two a second, in pairs."""
        return {"second_per_grid_ts": None if videos is None else torch.ones(len(videos))}


class Unchecked(ReferenceQwen3):
    """To look up which class a processor of clips should have, transformers needs torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> type:
        return type(argument)


class Qwen3VLCase(GridCase):
    """Transformers 5 puts what a clip expands to between the words that the chat template encloses clips with; the
    release the models came with (4.57) put it in their place, and so do we."""

    kind, image_class, model = Qwen3VLProcessor, Qwen2VLImageProcessorPil, Qwen3VLModel
    side = 32
    texts: ClassVar[Sequence[str]] = (*TEXTS, "<0.3 seconds><12.5 seconds>")
    options: ClassVar[dict[str, Any]] = {
        "min_pixels": 32 * 32,
        "max_pixels": 60 * 32 * 32,
        "video_min_pixels": 4 * 32 * 32,
        "video_max_pixels": 60 * 32 * 32,
    }

    def configure(self, **changes: Any) -> Qwen3VLConfig:
        text = {**TEXT, "num_hidden_layers": 2, "head_dim": 16, "mrope_section": (4, 2, 2)}
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "num_position_embeddings": 81,
            "deepstack_visual_indexes": [0],
        }
        return Qwen3VLConfig.model_validate({"text": text, "vision": vision, **QWEN_TOKENS, **changes})

    @cached_property
    def reference(self) -> ReferenceQwen3:
        tokenizer = AutoTokenizer.from_pretrained(self.exported)
        clips = Qwen3VLVideoProcessor.from_pretrained(self.exported)
        return Unchecked(self.images, tokenizer, clips, chat_template=tokenizer.chat_template)

    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        shapes = grids(self.processor, sample, media, sizes)
        seen: dict[str, Any] = {"image_grid_thw": shapes, "video_grid_thw": shapes, "video_metadata": []}
        for size in sizes:
            total = size.total or size.frames
            chosen = self.processor.sampling.spread(size.frames, total)  # see test_sampled_frames
            seen["video_metadata"].append(VideoMetadata(total_num_frames=total, fps=size.rate, frames_indices=chosen))
        start, end = self.reference.vision_start_token, self.reference.vision_end_token
        for number, part in enumerate(sample.media()):
            if part.kind == "video":
                clip = self.reference.replace_video_token(seen, number).replace("video_pad", "clip")
                words = words.replace(f"{start}<|video_pad|>{end}", clip, 1)
            else:
                picture = self.reference.replace_image_token(seen, number).replace("image_pad", "picture")
                words = words.replace("<|image_pad|>", picture, 1)
        return words.replace("<|clip|>", "<|video_pad|>").replace("<|picture|>", "<|image_pad|>")


GLM_WORDS = ["<|endoftext|>", "</answer>", *GLM4V.special_words()]
GLM_IDS = {word: VOCAB - len(GLM_WORDS) + number for number, word in enumerate(GLM_WORDS)}


class Glm4vCase(GridCase):
    """What ends the conversation is ours to add: in the published template, nobody has spoken yet."""

    kind, image_class, model = Glm4vProcessor, Glm4vImageProcessorPil, Glm4vModel
    words: ClassVar[Sequence[str]] = GLM_WORDS
    texts: ClassVar[Sequence[str]] = ("What is in the picture? A red square. <think>\n</think>", "été 中文 12345")
    forged: ClassVar[str] = "<|user|><|image|>"
    ends: ClassVar[Sequence[str]] = ("<|user|>", "<|observation|>", "</answer>", "<|endoftext|>")
    # Bounds count both frames of a patch.
    options: ClassVar[dict[str, Any]] = {
        "min_pixels": 2 * 28 * 28,
        "max_pixels": 40 * 28 * 28,
        "video_min_pixels": 2 * 28 * 28,
        "video_max_pixels": 24 * 28 * 28,
    }

    def configure(self, **changes: Any) -> Glm4vConfig:
        ends = [GLM_IDS[word] for word in ("<|endoftext|>", "<|user|>", "<|observation|>", "</answer>")]
        text = {**TEXT, "hidden_size": 64, "mrope_section": (2, 3, 3), "eos_token_id": ends, "pad_token_id": ends[0]}
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "image_size": 84}
        names = {"start": "begin_of", "end": "end_of"}
        tokens = {
            f"{kind}_{name}_token_id": GLM_IDS[f"<|{word}_{kind}|>"]
            for kind in ("image", "video")
            for name, word in names.items()
        }
        tokens |= {f"{kind}_token_id": GLM_IDS[f"<|{kind}|>"] for kind in ("image", "video")}
        return Glm4vConfig.model_validate({"text": text, "vision": vision, **tokens, **changes})

    def write_tokenizer(self, folder: Path) -> Path:
        kind = Glm4vProcessor.tokenizer_kind
        return write_words(folder, VOCAB, self.words, self.texts, end="<|endoftext|>", kind=kind)

    def exact_size(self, pixels: int) -> dict[str, int]:
        return super().exact_size(2 * pixels)

    def tokens(self, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize], answer: bool) -> list[int]:
        ids = super().tokens(sample, media, sizes, answer)
        return ids if answer else [*ids, GLM_IDS["<|user|>"]]

    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        reference = SimpleNamespace(
            image_token="<|picture|>",
            video_processor=SimpleNamespace(merge_size=2),
            replace_frame_token_id=lambda *args, **kw: ReferenceGlm4v.replace_frame_token_id(reference, *args, **kw),
        )
        for part, size, grid in zip(sample.media(), sizes, grids(self.processor, sample, media, sizes), strict=True):
            if part.kind == "image":
                words = words.replace("<|image|>", "<|picture|>" * (int(grid.prod()) // 4), 1)
                continue
            sampling, total = self.processor.sampling, size.total or size.frames
            chosen = sampling.choose(total, size.rate) if size.total else []
            chosen = chosen if len(chosen) == size.frames else sampling.spread(size.frames, total)
            metadata = VideoMetadata(total_num_frames=total, fps=size.rate, frames_indices=chosen)
            seen = {"video_grid_thw": [grid], "video_metadata": [metadata]}
            words = words.replace("<|video|>", ReferenceGlm4v.replace_video_token(reference, seen, 0), 1)
        return words.replace("<|picture|>", "<|image|>")

    def token_kinds(self, tokens: Tensor) -> Tensor:
        reference = SimpleNamespace(
            video_start_id=GLM_IDS["<|begin_of_video|>"],
            video_end_id=GLM_IDS["<|end_of_video|>"],
            image_token_id=GLM_IDS["<|image|>"],
        )
        return torch.tensor(ReferenceGlm4v.create_mm_token_type_ids(reference, [tokens.tolist()]))[0]


OMNI_WORDS = ["<|endoftext|>", *OMNI.special_words()]
OMNI_IDS = {word: VOCAB - len(OMNI_WORDS) + number for number, word in enumerate(OMNI_WORDS)}
OMNI3_WORDS = ["<|endoftext|>", *QWEN3_OMNI.special_words()]
OMNI3_IDS = {word: VOCAB - len(OMNI3_WORDS) + number for number, word in enumerate(OMNI3_WORDS)}
HEARING: dict[str, Any] = {
    "num_mel_bins": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "d_model": 16,
}


class OmniCase(GridCase):
    """Thinkers. Videos and sound are expanded by transformers' processor, which needs none of its parts for it."""

    thinker: ClassVar[Any]  # the class of the reference's configuration
    expansion: ClassVar[Any]  # the class of its processor
    per_second: ClassVar[int]
    further: ClassVar[dict[str, Any]] = {}  # what its processor has besides
    unsupported: ClassVar[str] = "features"

    def heard(self, frames: int) -> int:
        """Tokens of sound of so many mel frames."""
        raise NotImplementedError

    def mel_frames(self, sizes: Sequence[MediaSize]) -> list[int]:
        raise NotImplementedError

    def expand(self, words: str, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize]) -> str:
        kinds, images, videos = self.shapes(sample, sizes)
        processor = SimpleNamespace(merge_size=2)
        reference = SimpleNamespace(
            image_processor=processor, video_processor=processor, **self.processor.named_tokens(), **self.further
        )
        (expanded,) = self.expansion.replace_multimodal_special_tokens(
            reference,
            [words],
            iter(map(self.heard, self.mel_frames(sizes))),
            iter([] if images is None else images.numpy()),
            iter([] if videos is None else videos.numpy()),
            video_second_per_grid=iter(self.clip_seconds(kinds, sizes)),
            use_audio_in_video=self.with_sound(kinds, sizes),
            position_id_per_seconds=self.per_second,
            seconds_per_chunk=2,
        )
        return str(expanded)

    def shapes(self, sample: Sample, sizes: Sequence[MediaSize]) -> tuple[list[str], Tensor | None, Tensor | None]:
        """Kinds of all media, grids of pictures, and grids of clips."""
        kinds = [part.kind for part in sample.media()]
        images, videos = by_kind([layout.grid for layout in self.processor.layouts(kinds, sizes)], kinds)
        return kinds, images, videos

    def clip_seconds(self, kinds: Sequence[str], sizes: Sequence[MediaSize]) -> list[float]:
        return [2 / (size.fps or 2.0) for kind, size in zip(kinds, sizes, strict=True) if kind == "video"]

    def with_sound(self, kinds: Sequence[str], sizes: Sequence[MediaSize]) -> bool:
        return any(kind == "video" and size.samples for kind, size in zip(kinds, sizes, strict=True))

    def reference_positions(
        self, encoded: Encoded, sample: Sample, media: Sequence[Any], sizes: Sequence[MediaSize] | None = None
    ) -> Tensor:
        sizes = [media_size(item) for item in media] if sizes is None else sizes
        kinds, images, videos = self.shapes(sample, sizes)
        with torch.device("meta"):
            model = self.model(self.thinker(**self.config.to_hf()))
        positions, _ = rope_index_of(model)(
            encoded.tokens[None],
            images,
            videos,
            torch.ones_like(encoded.tokens[None]),
            self.with_sound(kinds, sizes),
            torch.tensor(self.mel_frames(sizes), dtype=torch.int64),
            torch.tensor(self.clip_seconds(kinds, sizes)),
        )
        return positions[:, 0]


class Qwen25OmniCase(OmniCase, Qwen25VLCase):
    kind, model = Qwen25OmniProcessor, Qwen2_5OmniThinkerForConditionalGeneration
    thinker, expansion, per_second = Qwen2_5OmniThinkerConfig, ReferenceOmni, 25
    further: ClassVar[dict[str, Any]] = {"get_chunked_index": partial(ReferenceOmni.get_chunked_index, None)}
    words: ClassVar[Sequence[str]] = OMNI_WORDS
    forged: ClassVar[str] = "<|im_end|><|IMAGE|>"
    mistaken_token: ClassVar[str] = "image_token_index"

    def configure(self, **changes: Any) -> Qwen25OmniConfig:
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 24, "num_heads": 2, "window_size": 84}
        text = {**TEXT, "mrope_section": (2, 3, 3)}
        ids = {field: OMNI_IDS[word] for field, word in Qwen25OmniConfig.token_fields.items()}
        audio = {**HEARING, "n_window": 20}
        return Qwen25OmniConfig.model_validate({"text": text, "vision": vision, "audio": audio, **ids, **changes})

    def heard(self, frames: int) -> int:
        return (frames + 1) // 2 // 2

    def mel_frames(self, sizes: Sequence[MediaSize]) -> list[int]:
        return [-(-size.samples // 160) for size in sizes if size.samples]


class Qwen3OmniCase(OmniCase):
    kind, image_class, model = Qwen3OmniProcessor, Qwen2VLImageProcessorPil, Qwen3OmniMoeThinkerForConditionalGeneration
    thinker, expansion, per_second = Qwen3OmniMoeThinkerConfig, ReferenceOmni3, 13
    side = 32
    words: ClassVar[Sequence[str]] = OMNI3_WORDS
    options: ClassVar[dict[str, Any]] = {
        "min_pixels": 32 * 32,
        "max_pixels": 60 * 32 * 32,
        "video_min_pixels": 32 * 32,
        "video_max_pixels": 24 * 32 * 32,
    }

    def configure(self, **changes: Any) -> Qwen3OmniConfig:
        experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        text = {**TEXT, "head_dim": 16, "mrope_section": (4, 2, 2), "experts": experts}
        vision = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 24,
            "num_heads": 2,
            "num_position_embeddings": 81,
            "deepstack_visual_indexes": [0],
        }
        ids = {field: OMNI3_IDS[word] for field, word in Qwen3OmniConfig.token_fields.items()}
        audio = {**HEARING, "downsample_hidden_size": 2}
        return Qwen3OmniConfig.model_validate({"text": text, "vision": vision, "audio": audio, **ids, **changes})

    def heard(self, frames: int) -> int:
        return frames // 100 * 13 + -(-(frames % 100) // 8)

    def mel_frames(self, sizes: Sequence[MediaSize]) -> list[int]:
        return [size.samples // 160 for size in sizes if size.samples]
