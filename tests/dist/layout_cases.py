"""The rows of the table of layouts, which `make layouts` compares. The first list of each kind is tested as well."""

from __future__ import annotations

from typing import Any

from tests.dist.layouts import Case
from tests.toys.chat_set import MODEL

LAYERS, BLOCKS = "text.layers.{*}", "vision.blocks.{*}"
TWO_ROWS: dict[str, Any] = {"train.global_batch": 2}  # torch derives the placements for each length of a row anew
UNTIED = {"model.config": {**MODEL, "tie_word_embeddings": False}}
FROZEN = {"model.freeze": ["vision"]}
CLIPPED = {"optim.clip_norm": 0.05}
SEQUENCE = {"tp": 2, "sequence_parallel": True}
RING = {"cp": 2, "ulysses": 1}
WHOLE_ENCODER = {"encoders": {"vision": {"tp": 1}}}

# ---------------------------------------------------------------------------------------------- sharding and memory

MEMORY = [
    Case("fsdp 2", 2, slow=True),
    Case("fsdp 4", 4, slow=True),
    Case("hsdp 2x2", 4, {"shard": 2}, slow=True),
    Case(
        "hsdp 2x2, recompute all but products",
        4,
        {"shard": 2, "recompute": [{"modules": LAYERS, "keep": "matmul"}]},
        slow=True,
    ),
    Case("fsdp 2, kept after forward", 2, {"reshard_after_forward": False}, slow=True),
    Case("fsdp 4, 2 ranks share after forward", 4, {"reshard_after_forward": 2}, slow=True),
    Case("prefetch 2 forward, 2 backward", 2, {"prefetch_forward": 2, "prefetch_backward": 2}, slow=True),
    Case("recompute all", 2, {"recompute": [LAYERS, BLOCKS]}, slow=True),
    Case("recompute reentrant", 2, {"recompute": [LAYERS, BLOCKS], "use_reentrant": True}, slow=True),
    Case("recompute all but products", 2, {"recompute": [{"modules": LAYERS, "keep": "matmul"}]}, slow=True),
    Case(
        "recompute all but attention", 2, {"recompute": [{"modules": LAYERS, "keep": "attention"}, BLOCKS]}, slow=True
    ),
    Case("offload attention", 2, {"activation_offload": [LAYERS + ".attn", BLOCKS + ".attn"]}, slow=True),
    Case("offload", 2, {"offload": True}, slow=True),
    Case("offload on one rank", 1, {"offload": True}, slow=True),
    Case("accumulate locally", 2, {"accumulate": "local"}, slow=True),
    Case("groups around the towers", 2, {"wrap": ["vision", "text"]}),
    Case("frozen vision", 2, {}, FROZEN, slow=True),
    Case("frozen vision, ignored", 2, {"ignore": ["vision"]}, FROZEN),
    Case("untied head", 2, {}, UNTIED, slow=True),
    Case("fsdp 2, clipped", 2, {}, CLIPPED, slow=True),
]
MORE_MEMORY = [
    Case("replicated 2", 2, {"shard": 1}),
    Case("replicated 4", 4, {"shard": 1}),
    Case("hsdp 2x2, kept after forward", 4, {"shard": 2, "reshard_after_forward": False}),
    *(Case(f"prefetch {f}/{b}", 2, {"prefetch_forward": f, "prefetch_backward": b}) for f, b in ((1, 0), (0, 1))),
    Case("prefetch 9/9", 2, {"prefetch_forward": 9, "prefetch_backward": 9}),
    Case("hsdp 2x2, prefetch 1/1", 4, {"shard": 2, "prefetch_forward": 1, "prefetch_backward": 1}),
    Case("recompute activations", 2, {"recompute": [{"modules": LAYERS + ".mlp", "keep": "matmul"}]}),
    Case("recompute norms", 2, {"recompute": [{"modules": part, "keep": "matmul"} for part in (LAYERS, BLOCKS)]}),
    Case("offload layers", 2, {"activation_offload": [LAYERS, BLOCKS]}),
    Case("offload attention, recompute mlp", 2,
         {"activation_offload": [LAYERS + ".attn"], "recompute": [LAYERS + ".mlp"]}),
    Case("offload, hsdp 2x2", 4, {"offload": True, "shard": 2}),
    Case("offload, recompute, prefetch", 2, {"offload": True, "recompute": [LAYERS], "prefetch_forward": 1}),
    Case("accumulate locally, hsdp 2x2", 4, {"accumulate": "local", "shard": 2}),
    Case("wrap mlps alone", 2, {"wrap": [LAYERS + ".mlp"]}),
    Case("groups around the towers, recomputed as one", 2,
         {"wrap": ["vision", "text", LAYERS], "recompute": ["text"], "prefetch_forward": 1, "prefetch_backward": 1}),
    Case("groups around the towers, untied head", 2, {"wrap": ["vision", "text"]}, UNTIED),
    Case("wrap layers and their mlps", 2, {"wrap": [LAYERS, LAYERS + ".mlp"], "recompute": [LAYERS]}),
    Case("groups half frozen", 2, {"prefetch_backward": 1}, {"model.freeze": [LAYERS + ".mlp", "vision.patch_embed"]}),
    Case("frozen behind trained", 2, {"recompute": [BLOCKS], "use_reentrant": True},
         {"model.freeze": ["vision.patch_embed"]}),
    Case("frozen vision, prefetch 2/2", 2, {"prefetch_forward": 2, "prefetch_backward": 2}, FROZEN),
    Case("frozen vision, offload", 2, {"offload": True}, FROZEN),
    Case("frozen vision, ignored, offload", 2, {"offload": True, "ignore": ["vision"]}, FROZEN),
    Case("frozen text", 2, {"recompute": [LAYERS]}, {"model.freeze": ["text"]}),
    Case("untied head, fsdp 4, offload", 4, {"offload": True}, UNTIED),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------- tensor


def text(**settings: Any) -> dict[str, Any]:
    return {"model.config": {**MODEL, "text": {**MODEL["text"], **settings}}}


FOUR_HEADS = {
    "model.config": {
        "text": {**MODEL["text"], "num_key_value_heads": 4},
        "vision": {**MODEL["vision"], "num_heads": 4, "embed_dim": 32},
    }
}
ALL_BUT_PRODUCTS = {"recompute": [{"modules": LAYERS, "keep": "matmul"}, BLOCKS]}
TENSOR = [
    Case("tp 2", 2, {"tp": 2}, slow=True),
    Case("tp 2, sequence, untied", 2, SEQUENCE, UNTIED, slow=True),
    Case(
        "tp 2, sequence, untied, recompute all but products",
        2,
        {**SEQUENCE, **ALL_BUT_PRODUCTS},
        {**UNTIED, **TWO_ROWS},
    ),
    Case("tp 2, whole encoder, images distributed", 2, {"tp": 2, **WHOLE_ENCODER}, slow=True),
    Case("tp 2 x fsdp 2, sequence, clipped", 4, SEQUENCE, CLIPPED, slow=True),
    Case(
        "tp 2 x fsdp 2, sequence, clipped, untied, recompute all but products",
        4,
        {**SEQUENCE, **ALL_BUT_PRODUCTS},
        {**UNTIED, **CLIPPED, **TWO_ROWS},
        slow=True,
    ),
    Case("tp 4, sequence", 4, {**SEQUENCE, "tp": 4}, FOUR_HEADS, slow=True),
]
MORE_TENSOR = [
    Case("tp 2, sequence", 2, SEQUENCE),
    Case("tp 2, untied", 2, {"tp": 2}, UNTIED),
    Case("tp 2, sequence, frozen text", 2, SEQUENCE, {"model.freeze": ["text"]}),
    Case("tp 2, frozen vision", 2, {"tp": 2}, FROZEN),
    Case("tp 2, recompute reentrant", 2, {"tp": 2, "recompute": [LAYERS, BLOCKS], "use_reentrant": True}),
    Case("tp 2, offload", 2, {"tp": 2, "offload": True}),
    Case("tp 2, offload attention", 2, {"tp": 2, "activation_offload": [LAYERS + ".attn", BLOCKS + ".attn"]}),
    Case("tp 2, backend megatron", 2, {"tp": 2, "backend": "megatron"}),
    Case("tp 2 x fsdp 2, recompute", 4, {"tp": 2, "recompute": [LAYERS, BLOCKS]}),
    Case("tp 2 x fsdp 2, sequence, untied", 4, SEQUENCE, UNTIED),
    Case("tp 2 x replicated 2", 4, {"tp": 2, "shard": 1}),
    Case("tp 4, encoder tp 2, images distributed", 4, {"tp": 4, "encoders": {"vision": {"tp": 2}}}, FOUR_HEADS),
    Case("tp 2 x fsdp 2, whole encoder, images distributed", 4, {"tp": 2, **WHOLE_ENCODER}),
]

# ---------------------------------------------------------------------------------------------- pipeline

# One sample to a row, in order: every third is text alone, so that it falls into the middle of a step.
ORDERED: dict[str, Any] = {"data.pack": False, "data.shuffle": False}
FOUR_LAYERS = {"text": {**MODEL["text"], "num_hidden_layers": 4}, "vision": MODEL["vision"]}
DEEP: dict[str, Any] = {**ORDERED, "model.config": FOUR_LAYERS}  # 2 vision and 4 text layers, tied
APART: dict[str, Any] = {**ORDERED, "model.config": {**FOUR_LAYERS, "tie_word_embeddings": False}}
# Frozen vision, and a rate of its own for what only the last stage has.
STILL: dict[str, Any] = {**APART, **FROZEN, "optim.groups": [{"pattern": "head", "lr": 1e-4}]}
WIDE: dict[str, Any] = {**DEEP, "train.global_batch": 8}
IN_ENCODER = {"vision": [1, 1, 0, 0], "text": [0, 0, 3, 1]}
ZB = {"pp": 2, "schedule": "interleaved-zb"}
ZBV = {"pp": 2, "schedule": "zbv"}
PIPELINE = [
    Case(
        "gpipe, empty lists",
        2,
        {"pp": 2, "schedule": "gpipe", "layers": {"vision": [2, 0], "text": [0, 4]}},
        DEEP,
        slow=True,
    ),
    Case("1f1b, uneven", 2, {"pp": 2, "layers": {"vision": [2, 0], "text": [1, 3]}}, DEEP, slow=True),
    Case(
        "interleaved",
        2,
        {"pp": 2, "virtual": 2, "layers": {"vision": [2, 0, 0, 0], "text": [0, 1, 1, 2]}},
        DEEP,
        slow=True,
    ),
    Case("interleaved-zb, split in the encoder", 2, {**ZB, "virtual": 2, "layers": IN_ENCODER}, DEEP, slow=True),
    Case("zbv, split in the encoder", 2, {**ZBV, "layers": IN_ENCODER}, DEEP),
    Case("1f1b, frozen vision", 2, {"pp": 2, "layers": {"vision": [2, 0], "text": [0, 4]}}, STILL, slow=True),
    Case("pp 2 x fsdp 2, clipped", 4, {"pp": 2}, {**WIDE, **CLIPPED}, slow=True),
]
MORE_PIPELINE = [
    Case("gpipe, by cost", 2, {"pp": 2, "schedule": "gpipe"}, APART),
    Case("1f1b, by cost, untied", 2, {"pp": 2}, APART),
    Case("1f1b, split in the encoder", 2, {"pp": 2, "layers": {"vision": [1, 1], "text": [0, 4]}}, DEEP),
    Case("interleaved, by cost, untied", 2, {"pp": 2, "virtual": 2}, APART),
    Case("interleaved-zb, one stage each", 2, {**ZB, "layers": {"vision": [1, 1], "text": [0, 4]}}, DEEP),
    Case("interleaved-zb, by cost, untied", 2, {**ZB, "virtual": 2}, APART),
    Case("zbv, by cost, untied", 2, ZBV, APART),
    Case("zbv, frozen vision", 2, {**ZBV, "layers": IN_ENCODER}, STILL),
    Case(
        "1f1b, recompute and activation offload",
        2,
        {"pp": 2, "recompute": [BLOCKS], "activation_offload": [LAYERS + ".attn"]},
        APART,
    ),
    Case("1f1b, offload", 2, {"pp": 2, "offload": True}, APART),
    Case("pp 2 x replicated 2, zbv", 4, {**ZBV, "shard": 1}, WIDE),
    Case("pp 2 x fsdp 2, interleaved-zb", 4, {**ZB, "virtual": 2}, WIDE),
    Case("pp 4", 4, {"pp": 4}, DEEP),
]

# ---------------------------------------------------------------------------------------------- context


def heads(queries: int, keys: int) -> dict[str, Any]:
    return text(num_attention_heads=queries, num_key_value_heads=keys, head_dim=8)


KEEP_ATTENTION = {"recompute": [{"modules": LAYERS, "keep": "attention"}]}
CONTEXT = [
    Case("ulysses 2, 3 heads, 1 key head, 191 tokens", 2, {"cp": 2}, {**heads(3, 1), "data.length": 191}, slow=True),
    Case("ring 2", 2, RING, slow=True),
    Case("ring 2, two rows of 189, recompute", 2, {**RING, "recompute": [LAYERS, BLOCKS]},
         {"data.length": 189, "train.micro_batch": 2, **TWO_ROWS}),
    Case("ring 2, patches shared", 2, {**RING, "encoders": {"vision": {"cp": 2}}}, slow=True),
    Case("ring 2 x ulysses 2, 3 heads, 1 key head, 191 tokens", 4, {"cp": 4, "ulysses": 2},
         {**heads(3, 1), "data.length": 191, **TWO_ROWS}, slow=True),
    Case("ring 2 x ulysses 2, 3 heads, 190 tokens", 4, {"cp": 4, "ulysses": 2}, {**heads(3, 3), "data.length": 190},
         slow=True),
    Case("ulysses 2 x fsdp 2, clipped", 4, {"cp": 2}, CLIPPED, slow=True),
]  # fmt: skip
MORE_CONTEXT = [
    Case("ulysses 2", 2, {"cp": 2}),
    Case("ulysses 2, recompute all but attention", 2, {"cp": 2, **KEEP_ATTENTION}),
    Case("ulysses 2, patches shared", 2, {"cp": 2, "encoders": {"vision": {"cp": 2}}}),
    Case("ulysses 2, frozen vision", 2, {"cp": 2}, FROZEN),
    Case("ulysses 2, offload", 2, {"cp": 2, "offload": True}),
    Case("ring 2, offload attention", 2, {**RING, "activation_offload": [LAYERS + ".attn"]}),
    Case("ring 2, reentrant", 2, {**RING, "recompute": [LAYERS], "use_reentrant": True}),
    Case("ring 4", 4, {"cp": 4, "ulysses": 1}),
    Case("ring 2 x replicated 2", 4, {**RING, "shard": 1}),
]

# ---------------------------------------------------------------------------------------------- experts


def experts(
    name: str,
    world: int,
    parallel: dict[str, Any],
    split: dict[str, Any] | None = None,
    slow: bool = False,
    rows: int = 8,
    **config: Any,
) -> Case:
    freeze = config.pop("freeze", None)
    model: dict[str, Any] = {"model.config": config} if config else {}
    model |= {"model.freeze": freeze} if freeze else {}
    model |= {"train.global_batch": rows} if rows != 8 else {}
    return Case(name, world, parallel, model, "experts", split or {}, slow)


UNBALANCED = {"balance": 0.0}
DEEPER = {**UNBALANCED, "layers": 4}
EXPERTS = [
    experts("experts, other micro-batches", 1, {}, {"train.micro_batch": 4}, rows=4, slow=True),
    experts("ep 2", 2, {"ep": 2}, slow=True),
    experts("ep 2, no balance loss, recompute", 2, {"ep": 2, "recompute": [LAYERS]}, rows=4, **UNBALANCED),
    experts("experts, tp 2, sequence, no balance loss", 2, SEQUENCE, **UNBALANCED, slow=True),
    experts("experts, cp 2 ring", 2, RING, {"train.micro_batch": 2}, rows=4, slow=True),
    experts("experts, interleaved-zb, no balance loss", 2, {**ZB, "virtual": 2}, **DEEPER, slow=True),
    experts("ep 2 x fsdp 2, uneven shards", 4, {"ep": 2}, experts=6, slow=True),
    experts("experts, tp 2, sequence, balance loss", 2, SEQUENCE, rows=4, slow=True),
    experts("ep 2 x tp 2, sequence, balance loss", 4, {**SEQUENCE, "ep": 2}, rows=4, slow=True),
    experts("fewer experts than ranks, fsdp 4", 4, {}, experts=2, slow=True),
    experts("fewer experts than ranks, ep 2 x fsdp 2", 4, {"ep": 2}, experts=2, slow=True),
]
MORE_EXPERTS = [
    experts("one expert, tp 2 x fsdp 2, sequence", 4, SEQUENCE, experts=1, top_k=1),
    experts("one expert, fsdp 2 x replicated 2, offload", 4, {"shard": 2, "offload": True}, experts=1, top_k=1),
    experts("experts, fsdp 2", 2, {}),
    experts("ep 2, dense first layer, tied, accumulate locally", 2, {"ep": 2, "accumulate": "local"},
            layers=3, dense_layers=1, tied=True),
    experts("ep 2, micro-batches of 2", 2, {"ep": 2}, {"train.micro_batch": 2}),
    experts("ep 2, recompute experts alone", 2, {"ep": 2, "recompute": ["text.layers.{*}.mlp"]}),
    experts("ep 2, reentrant", 2, {"ep": 2, "recompute": [LAYERS], "use_reentrant": True}),
    experts("ep 2, offload, no balance loss", 2, {"ep": 2, "offload": True}, **UNBALANCED),
    experts("ep 2, frozen experts", 2, {"ep": 2}, freeze=["text.layers.{*}.mlp.experts"], **UNBALANCED),
    experts("ep 2, frozen routers", 2, {"ep": 2}, freeze=["text.layers.{*}.mlp.router", "text.embed"]),
    experts("ep 2, activation offload", 2, {"ep": 2, "activation_offload": ["text.layers.{*}.mlp"]}),
    experts("ep 2, eager", 2, {"ep": 2}, implementation="eager"),
    experts("experts, tp 2", 2, {"tp": 2}),
    experts("experts, tp 2, no balance loss", 2, {"tp": 2}, **UNBALANCED),
    experts("experts, ulysses 2, no balance loss", 2, {"cp": 2}, **UNBALANCED),
    experts("experts, pp 2", 2, {"pp": 2}, balance=0.0),
    experts("experts, interleaved, tied, no balance loss", 2, {"pp": 2, "virtual": 2}, tied=True, **DEEPER),
    experts("ep 4", 4, {"ep": 4}),
    experts("ep 2 x replicated 2, no balance loss", 4, {"ep": 2, "shard": 2}, **UNBALANCED),
    experts("ep 2 x tp 2, no balance loss", 4, {"ep": 2, "tp": 2}, **UNBALANCED),
    experts("ep 2 x ulysses 2", 4, {"ep": 2, "cp": 2}),
    experts("ep 2 x pp 2", 4, {"ep": 2, "pp": 2}, balance=0.0),
    experts("experts, cp 2 x tp 2, sequence, no balance loss", 4, {**SEQUENCE, "cp": 2}, **UNBALANCED),
]  # fmt: skip

# ---------------------------------------------------------------------------------------------- videos


def videos(
    name: str, world: int, parallel: dict[str, Any], model: dict[str, Any] | None = None, slow: bool = True
) -> Case:
    return Case(f"wan, {name}", world, parallel, model or {}, "videos", slow=slow)


WAN_BLOCKS = "blocks.{*}"
IMAGES = {
    "model.config.image_dim": 10,
    "model.config.added_kv_proj_dim": 32,
    "model.config.pos_embed_seq_len": 6,
    "data.options.images": 6,
}
HALF = {"precision.compute": "bfloat16"}  # ranks that have whole rows compute the same numbers as one process
VIDEOS = [
    videos("tp 2", 2, {"tp": 2}, TWO_ROWS),
    videos("pp 2", 2, {"pp": 2}, TWO_ROWS, slow=False),
    videos("ring 2", 2, RING, TWO_ROWS),
    videos("fsdp 2, bf16 beside weights in fp32", 2, {}, {**HALF, **TWO_ROWS}),
    videos("fsdp 2", 2, {}),
    videos("ulysses 2", 2, {"cp": 2}),
    videos("fsdp 2 x tp 2", 4, {"tp": 2}),
    videos("fsdp 2 x pp 2", 4, {"pp": 2}),
    videos("tp 2 x pp 2", 4, {"tp": 2, "pp": 2}),
    videos("tp 2 x ulysses 2", 4, {"tp": 2, "cp": 2}),
    videos("tp 2 x ring 2", 4, {"tp": 2, **RING}),
    videos("pp 2 x ulysses 2", 4, {"pp": 2, "cp": 2}),
    videos("pp 2 x ring 2", 4, {"pp": 2, **RING}),
    videos("ring 2 x ulysses 2", 4, {"cp": 4, "ulysses": 2}),
]
MORE_VIDEOS = [
    videos("recompute", 2, {"recompute": [WAN_BLOCKS]}),
    videos("recompute all but attention", 2, {"recompute": [{"modules": WAN_BLOCKS, "keep": "attention"}]}),
    videos("offload", 2, {"offload": True}),
    videos("offload, bf16 beside weights in fp32", 2, {"offload": True}, HALF),
    videos("given images, tp 2", 2, {"tp": 2}, IMAGES),
    videos("given images, pp 2", 2, {"pp": 2}, IMAGES),
    videos("given images, ring 2", 2, RING, IMAGES),
    videos("fsdp 2 x ulysses 2", 4, {"cp": 2}),
]

# ---------------------------------------------------------------------------------------------- several at once

DEEP_WIDE = {**WIDE, "model.config": FOUR_LAYERS}
MIXED = [
    Case("pp 2 x tp 2, sequence", 4, {"pp": 2, **SEQUENCE}, DEEP, slow=True),
    Case("tp 2 x ring 2, sequence, images distributed", 4, {**SEQUENCE, **RING, **WHOLE_ENCODER}, slow=True),
]
MORE_MIXED = [
    Case("tp 2 x ulysses 2", 4, {"tp": 2, "cp": 2}),
    Case("tp 2 x ulysses 2, sequence", 4, {**SEQUENCE, "cp": 2}),
    Case("tp 2 x ulysses 2, distributed, patches shared", 4,
         {"cp": 2, "tp": 2, "encoders": {"vision": {"tp": 1, "cp": 2}}}),
    Case("pp 2 x tp 2", 4, {"pp": 2, "tp": 2}, DEEP),
    Case("pp 2 x tp 2, zbv, sequence", 4, {**ZBV, **SEQUENCE}, DEEP),
    Case("pp 2 x tp 2, images distributed", 4, {"pp": 2, "tp": 2, **WHOLE_ENCODER}, DEEP),
    Case("pp 2 x ulysses 2", 4, {"pp": 2, "cp": 2}, DEEP),
    Case("pp 2 x ring 2, inside the encoder", 4, {"pp": 2, **RING, "layers": {"vision": [1, 1], "text": [0, 4]}}, DEEP),
    Case("zbv x ulysses 2", 4, {**ZBV, "cp": 2}, DEEP),
    Case("interleaved-zb x ring 2", 4, {**ZB, "virtual": 2, **RING}, DEEP),
    Case("pp 2 x tp 2 x fsdp 2", 8, {"pp": 2, "tp": 2}, WIDE),
    Case("tp 2 x ring 2 x fsdp 2, sequence", 8, {**SEQUENCE, **RING}, {"train.global_batch": 8}),
    Case("pp 2 x ulysses 2 x tp 2", 8, {"pp": 2, "cp": 2, "tp": 2}, DEEP),
    experts("ep 2 x tp 2 x fsdp 2", 8, {"ep": 2, "tp": 2}),
    experts("ep 2 x pp 2 x ulysses 2", 8, {"ep": 2, "pp": 2, "cp": 2}, balance=0.0),
]  # fmt: skip

ESSENTIAL = [*MEMORY, *TENSOR, *PIPELINE, *CONTEXT, *EXPERTS, *VIDEOS, *MIXED]
EVERY = [
    *MEMORY, *MORE_MEMORY, *TENSOR, *MORE_TENSOR, *PIPELINE, *MORE_PIPELINE, *CONTEXT, *MORE_CONTEXT,
    *EXPERTS, *MORE_EXPERTS, *VIDEOS, *MORE_VIDEOS, *MIXED, *MORE_MIXED,
]  # fmt: skip
