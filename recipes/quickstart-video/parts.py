"""Write the frozen parts of the pipeline as a diffusers folder: the trained VAE, a text encoder and a tokenizer.

The text encoder is a small umT5 with random weights that is never trained. Captions have a dozen words, and what it
makes of them differs from caption to caption: the transformer learns to read that.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import digits
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import UMT5Config, UMT5EncoderModel
from vae import VideoVae, as_pixels

TEXT = 64  # width of the text encoder
LOUD = 10.0  # spread of its embeddings
SHIFT = 2.0  # of the noise levels, as in recipe.yaml


def write(folder: Path, weights: Path, arguments: dict[str, Any]) -> Path:
    """Write the folder anew. `weights`: what the training of the VAE exported; `arguments`: those of `VideoVae`."""
    shutil.rmtree(folder, ignore_errors=True)
    trained = load_vae(weights, arguments)
    _describe_latents(trained)
    trained.vae.save_pretrained(folder / "vae")
    words = ("<pad>", "</s>", "<unk>", "a", *map(str, range(10)), "moving", *digits.WAYS)
    torch.manual_seed(1)  # always the same encoder, as one that somebody published
    size = {"d_model": TEXT, "d_kv": 16, "d_ff": 2 * TEXT, "num_layers": 2, "num_heads": 4}
    encoder = UMT5EncoderModel(UMT5Config(vocab_size=len(words), **size))
    # Wan's layer for text begins with small weights: larger embeddings let captions weigh from the first step.
    torch.nn.init.constant_(encoder.encoder.final_layer_norm.weight, LOUD)
    encoder.save_pretrained(folder / "text_encoder")
    _write_tokenizer(folder / "tokenizer", words)
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")
    index = {
        "_class_name": "WanPipeline",
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder


def load_vae(weights: Path, arguments: dict[str, Any]) -> VideoVae:
    """Return the VAE with the weights that its training exported."""
    vae = VideoVae(**arguments)
    vae.load_state_dict(load_file(weights))
    return vae.eval()


@torch.no_grad()
def _describe_latents(trained: VideoVae) -> None:
    """Keep mean and spread of the latents, by channel, in the configuration: transformers read latents of spread 1."""
    videos, _, _ = digits.drawn(digits.split(held_out=False), 512, seed=0)
    latents = trained.vae.encode(as_pixels(torch.from_numpy(videos))).latent_dist.mode()
    dims = (0, 2, 3, 4)
    trained.vae.register_to_config(latents_mean=latents.mean(dims).tolist(), latents_std=latents.std(dims).tolist())


def _write_tokenizer(folder: Path, words: tuple[str, ...]) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2), encoding="utf-8")
