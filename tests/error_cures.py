"""Cures of errors whose messages have no `fix:` line, for docs/reference/error-codes.md."""

from __future__ import annotations

# cure: codes
_CODES_BY_CURE = {
    "restore the file from a backup, or export, convert or download it again": """
        adapter.unreadable-config adapter.none-in-file checkpoint.damaged-pickle checkpoint.damaged-torch-file
        checkpoint.dcp-metadata-unreadable checkpoint.dcp-part-differs checkpoint.unreadable-file
        data.damaged-media data.damaged-parquet data.unreadable-feature-list data.features-outside-folder
        environment.not-json environment.not-utf8 environment.not-a-mapping environment.wrong-value-in-file
        generation.unreadable-vae megatron.checkpoint-file-changed megatron.iteration-missing
        megatron.latest-iteration megatron.mixed-iterations megatron.no-layer-number megatron.no-rank-files
        megatron.other-layout megatron.rank-files-missing megatron.slice-missing megatron.slices-differ
        model.bad-native-config output.bad-export-record tokenizer.id-too-high weights.absurd-shape
        weights.damaged-index weights.damaged-quantization weights.duplicate-tensor weights.experts-incomplete
        weights.indexed-file-missing weights.invalid-safetensors weights.not-a-tensor weights.not-safetensors
        weights.path-outside-folder adapter.matrix-missing tokenizer.unreadable-file""",
    "load or resume from an earlier checkpoint: `tessera resume` does so by itself": """
        checkpoint.damaged checkpoint.damaged-manifest checkpoint.damaged-state checkpoint.damaged-table
        checkpoint.no-manifest checkpoint.part-differs checkpoint.parts-incomplete checkpoint.tensors-missing
        checkpoint.adapter-missing""",
    "wait for the first checkpoint, or name a run that has one": "checkpoint.none-yet job.checkpoint-missing",
    "save the file again as safetensors where it was written": """
        checkpoint.pickle-too-large checkpoint.dcp-compressed""",
    "write the value as the message describes it": """
        adapter.bad-config-value data.bad-csv-header data.empty-column-name environment.rank-variables
        job.converter-file job.converter-option-missing job.data-section job.encoder-tensor-parallel
        job.invalid-flag job.launch-number job.model-json-missing job.not-a-mapping job.patch-size job.section-type
        job.size-list job.width-not-multiple layout.expert-ranks layout.size-out-of-range layout.stages-not-lists
        layout.too-many-ranks media.bounds-crossed media.preprocessor-value media.wrong-array
        megatron.dataset-length megatron.input-not-parallel megatron.label-smoothing megatron.scaled-softmax
        megatron.sequence-not-divisible megatron.shard-axis megatron.several-models
        model.heads-do-not-divide-width model.invalid-value model.rope-fields-missing model.absurd-size
        recipe.no-list-entry recipe.not-a-mapping recipe.not-a-section recipe.not-callable recipe.several-problems
        recipe.too-deep task.zero-weights job.media-count megatron.axis-order megatron.interleaved-stages""",
    "correct the syntax at the place that the message names": "job.invalid-json job.invalid-yaml recipe.not-yaml",
    "leave the option, flag or argument out": """
        job.adapter-flags job.converter-option-refused job.converter-refused job.no-effect-here
        job.section-and-flag job.stray-word job.unknown-input job.unknown-option layout.not-for-this-form
        generation.levels-not-shifted generation.model-has-one-expert output.quantized-form megatron.async-save
        generation.model-edits-no-images generation.model-reads-no-image generation.model-reads-no-last-frame""",
    "give the number of images that the model takes": """
        generation.more-than-one-first-frame generation.wrong-edit-image-count""",
    "name a file or folder that exists": """
        evaluation.no-table job.image-missing media.no-such-file media.no-frames""",
    "check the permissions and the type of the file": """
        environment.cannot-open environment.not-regular-file media.cannot-open media.not-a-file media.not-a-path
        recipe.cannot-open output.cannot-write output.system-error output.target-is-file""",
    "split the file or make it smaller": """
        environment.file-too-large job.file-too-large job.script-too-large media.data-url-too-large
        media.download-too-large media.file-too-large data.tar-too-large recipe.file-too-large""",
    "name a text file of this kind": "job.file-unreadable",
    "free space on the disk, or write elsewhere": "output.disk-full",
    "check permissions and the free space of the disk, or write elsewhere": "output.write-failed",
    "run the command again": "output.interrupted media.download-failed",
    "index the data again, and do not change files while a run reads them": """
        data.archive-changed data.length-differs data.sample-changed weights.source-changed""",
    "write one <image>, <video> or <audio> for each file that the row lists, and name the column of the files": """
        data.placeholder-count data.media-column-unknown""",
    "add what the message names to the row, or remove the row": """
        data.no-answer data.no-caption data.no-media data.no-question data.no-rejected-answer data.no-role
        data.no-text data.no-text-file data.no-turns data.empty-caption data.empty-turn data.nothing-trained""",
    "use a known role, or name yours under `columns` of the data set": "data.unknown-speaker",
    "write the row as docs/reference/data-sets.md shows for its format": """
        data.bad-answer data.bad-history data.bad-label data.bad-media-value data.bad-part data.bad-tools
        data.bad-turn data.not-a-caption data.not-a-text data.pair-differs-early data.rejected-images
        data.record-not-an-object data.several-rejected-answers data.two-system-prompts""",
    "export the data set again": """
        data.bad-file-name data.bad-tar-member data.damaged-csv data.not-utf8 data.record-too-large""",
    "check the file, its permissions and the disk": "data.unreadable-sample",
    "see guard.jsonl in the run folder; nothing has to be done": "data.sample-excluded",
    "train on the data set as it is: this conversion cannot write the row": """
        data.media-not-a-file data.not-in-mllm-format""",
    "correct or remove the sample; by default a run skips it and lists it in quarantine.jsonl": """
        data.empty-answer data.invalid-unicode data.nested-too-deeply data.not-a-pair data.not-an-edit-image
        data.number-not-finite data.processor-refuses data.reserved-characters data.row-not-storable
        generation.control-word-in-caption generation.edit-image-not-whole-patches
        generation.edit-image-too-narrow generation.empty-caption media.bad-redirect media.bad-url
        media.compressed-header media.damaged-file media.fewer-frames-than-patch media.frame-sizes-differ
        media.header-claims-too-much media.image-too-narrow media.no-such-stream media.not-an-image
        media.unknown-format media.unreadable-file media.unreadable-image media.video-for-image-model
        tokenizer.forged-control-word tokenizer.template-refuses""",
    "add the host to data.urls.hosts if you trust it": "media.host-not-allowed",
    "remove the user name and the password from the URL": "media.url-with-password",
    "convert the file to a common codec, such as H.264 or FLAC": "media.no-decoder",
    "set data.kind=generation_preference": "data.pair-needs-preference-kind",
    "use one format per data set, or give each format a data set of its own": "data.mixed-formats",
    "check the path and the format of the data": """
        data.empty-dataset data.no-records data.no-row-written data.no-questions evaluation.empty-table
        evaluation.image-not-base64 evaluation.unreadable-table megatron.dataset-too-small
        megatron.no-data-on-first-rank""",
    "use a table with the columns of its benchmark": "evaluation.unknown-columns",
    "compare samples of text and images": "media.video-not-comparable",
    "install the package that the message names": "environment.processor-needs-package",
    "use the folder that belongs to this model": """
        generation.edit-captions-mismatch generation.frame-size-mismatch generation.model-input-mismatch
        generation.segment-length-mismatch job.model-family-differs job.model-not-built megatron.checkpoint-shape
        model.class-cannot-build model.no-class-for-type model.unreadable-config tokenizer.cannot-encode
        tokenizer.missing-image-token tokenizer.too-slow weights.expert-shape weights.mixed-dtypes
        adapter.rank-mismatch adapter.target-missing""",
    "write {% generation %} blocks around the answers in the chat template, or use another template": """
        tokenizer.generation-blocks-mismatch tokenizer.processor-changes-tokens tokenizer.template-changes-message
        tokenizer.template-refuses-messages tokenizer.template-writes-lists""",
    "choose linear layers or experts in model.lora.targets": "adapter.not-linear adapter.unsupported-layer",
    "add a weight map to the family: docs/how-to/add-a-model-family.md": "adapter.no-weight-map model.no-hf-form",
    "add a family with conversations to generate text: docs/how-to/add-a-model-family.md": """
        generation.no-conversations job.no-image-encoder""",
    "ask a question first": "generation.nothing-to-save",
    "train at least one module: check model.freeze": "model.all-frozen",
    "give every stage a layer, or use fewer stages": "layout.empty-stage",
    "declare another split of this module in the model's plan": "layout.feature-statistics layout.style-kind",
    "lower the learning rate, or look for bad samples": "megatron.gradient-not-finite",
    "use Tessera's attention with segments, without packed sequences of Megatron": "megatron.packed-sequences",
    "install a version of the library that reads this model": "weights.reference-fails",
    "use another seed": "megatron.random-seed-taken",
    "nothing is to be done: the folder has no such tensors": "weights.nothing-to-merge weights.nothing-to-split",
}
CURES = {code: cure for cure, codes in _CODES_BY_CURE.items() for code in codes.split()}
