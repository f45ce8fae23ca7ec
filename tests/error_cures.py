"""Cures of errors whose messages have no `fix:` line, for docs/reference/error-codes.md."""

from __future__ import annotations

# cure: codes
_CODES_BY_CURE = {
    "restore the file from a backup, or export, convert or download it again": """
        adapter.unreadable-config adapter.none-in-file checkpoint.damaged-pickle checkpoint.damaged-torch-file
        checkpoint.dcp-metadata-unreadable checkpoint.dcp-part-differs
        data.damaged-media data.damaged-parquet data.unreadable-feature-list data.features-outside-folder
        environment.not-json environment.not-utf8 environment.not-a-mapping environment.wrong-value-in-file
        generation.unreadable-vae megatron.checkpoint-file-changed megatron.iteration-missing
        megatron.latest-iteration megatron.mixed-iterations megatron.no-layer-number megatron.no-rank-files
        megatron.other-layout megatron.rank-files-missing megatron.slice-missing megatron.slices-differ
        model.bad-native-config output.bad-export-record tokenizer.id-too-high weights.absurd-shape
        weights.damaged-index weights.damaged-quantization weights.duplicate-tensor weights.experts-incomplete
        weights.indexed-file-missing weights.invalid-safetensors weights.not-a-tensor
        weights.path-outside-folder adapter.matrix-missing tokenizer.unreadable-file""",
    "load or resume from an earlier checkpoint: `tessera resume` does so by itself": """
        checkpoint.damaged checkpoint.damaged-manifest checkpoint.damaged-state checkpoint.damaged-table
        checkpoint.no-manifest checkpoint.part-differs checkpoint.parts-incomplete checkpoint.tensors-missing
        checkpoint.adapter-missing""",
    "wait for the first checkpoint, or name a run that has one": "job.checkpoint-missing",
    "save the file again as safetensors where it was written": "checkpoint.pickle-too-large checkpoint.dcp-compressed",
    "write the value as the message describes it": """
        adapter.bad-config-value environment.rank-variables job.converter-file job.data-section
        job.encoder-tensor-parallel job.launch-number job.not-a-mapping job.section-type job.size-list
        layout.size-out-of-range layout.stages-not-lists media.preprocessor-value media.wrong-array
        megatron.label-smoothing model.invalid-value job.media-count megatron.axis-order
        megatron.interleaved-stages""",
    "correct the syntax at the place that the message names": "job.invalid-json job.invalid-yaml recipe.not-yaml",
    "leave the option, flag or argument out": """
        job.adapter-flags job.converter-option-refused job.converter-refused job.no-effect-here
        job.section-and-flag job.stray-word job.unknown-input job.unknown-option layout.not-for-this-form
        generation.levels-not-shifted generation.model-has-one-expert output.quantized-form
        megatron.async-save generation.model-reads-no-image generation.model-reads-no-last-frame""",
    "give the number of images that the model takes": """
        generation.more-than-one-first-frame generation.wrong-edit-image-count""",
    "name a file or folder that exists": "evaluation.no-table job.image-missing media.no-such-file",
    "check the permissions and the type of the file": """
        environment.cannot-open environment.not-regular-file media.cannot-open media.not-a-file
        recipe.cannot-open output.cannot-write output.system-error""",
    "split the file or make it smaller": """
        environment.file-too-large job.file-too-large job.script-too-large media.file-too-large
        data.tar-too-large recipe.file-too-large""",
    "name a text file of this kind": "job.file-unreadable",
    "free space on the disk, or write elsewhere": "output.disk-full",
    "check permissions and the free space of the disk, or write elsewhere": "output.write-failed",
    "name another output file, or add --overwrite to answer all rows again": "output.changed output.other-settings",
    "write a row for each recording, with its text": "data.several-recordings",
    "run the command again": "output.interrupted media.download-failed",
    "index the data again, and do not change files while a run reads them": """
        data.archive-changed data.sample-changed weights.source-changed""",
    "write one <image>, <video> or <audio> for each file that the row lists, and name the column of the files": """
        data.placeholder-count data.media-column-unknown""",
    "add what the message names to the row, or remove the row": """
        data.no-answer data.no-audio data.no-caption data.no-codes data.no-media data.no-question
        data.no-rejected-answer data.no-role data.no-text data.no-text-file data.no-turns data.empty-caption
        data.empty-turn data.nothing-trained""",
    "use a known role, or name yours under `columns` of the data set": "data.unknown-speaker",
    "write the row as docs/reference/data-sets.md shows for its format": """
        data.bad-answer data.bad-codes data.bad-history data.bad-label data.bad-media-value data.bad-part
        data.bad-speaker data.bad-tools data.bad-turn data.not-a-caption data.not-a-text data.pair-differs-early
        data.bad-objects data.rejected-images data.region-count data.region-image data.region-outside
        data.record-not-an-object data.several-rejected-answers data.two-system-prompts""",
    "export the data set again": """
        data.bad-file-name data.bad-tar-member data.damaged-csv data.not-utf8 data.record-too-large""",
    "check the file, its permissions and the disk": "data.unreadable-sample",
    "see guard.jsonl in the run folder; nothing has to be done": "data.sample-excluded",
    "train on the data set as it is: this conversion cannot write the row": """
        data.media-not-a-file data.not-in-mllm-format""",
    "correct or remove the sample; by default a run skips it and lists it in quarantine.jsonl": """
        data.invalid-unicode data.nested-too-deeply data.number-not-finite data.processor-refuses
        data.row-not-storable generation.edit-image-not-whole-patches""",
    "use one format per data set, or give each format a data set of its own": "data.mixed-formats",
    "check the path and the format of the data": """
        data.empty-dataset data.no-records data.no-row-written data.no-questions evaluation.empty-table
        megatron.dataset-too-small megatron.no-data-on-first-rank""",
    "use a table with the columns of its benchmark": """
        evaluation.unknown-columns evaluation.bad-box evaluation.bad-instruction evaluation.bad-options
        evaluation.no-answer evaluation.no-media evaluation.empty-question""",
    "correct the task file": "evaluation.bad-pattern evaluation.bad-variant",
    "install the package that the message names": "environment.processor-needs-package",
    "use the folder that belongs to this model": """
        generation.edit-captions-mismatch generation.frame-size-mismatch generation.model-input-mismatch
        generation.segment-length-mismatch job.model-family-differs job.model-not-built
        megatron.checkpoint-shape model.class-cannot-build model.no-class-for-type model.unreadable-config
        tokenizer.cannot-encode tokenizer.too-slow weights.expert-shape weights.mixed-dtypes
        adapter.rank-mismatch adapter.target-missing""",
    "write {% generation %} blocks around the answers in the chat template, or use another template": """
        tokenizer.generation-blocks-mismatch tokenizer.template-changes-message
        tokenizer.template-refuses-messages""",
    "choose linear layers or experts in model.lora.targets": "adapter.not-linear adapter.unsupported-layer",
    "add a weight map to the family: docs/how-to/add-a-model-family.md": "adapter.no-weight-map",
    "add a family with conversations to generate text: docs/how-to/add-a-model-family.md": "job.no-image-encoder",
    "ask a question first": "generation.nothing-to-save",
    "train at least one module: check model.freeze": "model.all-frozen",
    "give every stage a layer, or use fewer stages": "layout.empty-stage",
    "declare another split of this module in the model's plan": "layout.feature-statistics layout.style-kind",
    "lower the learning rate, or look for bad samples": "megatron.gradient-not-finite",
    "use Tessera's attention with segments, without packed sequences of Megatron": "megatron.packed-sequences",
    "install a version of the library that reads this model": "weights.reference-fails",
    "use another seed": "megatron.random-seed-taken",
    "nothing is to be done: the folder has no such tensors": "weights.nothing-to-merge weights.nothing-to-split",
    "replace the file or remove the sample; by default a run skips it and lists it in quarantine.jsonl": """
        media.bad-redirect media.compressed-header media.damaged-file media.header-claims-too-much
        media.no-such-stream media.not-an-image media.unreadable-file media.unreadable-image""",
    "use a rank and an alpha above 0": "adapter.no-scale adapter.invalid-rank",
    "use a finite number as the strength": "adapter.bad-strength",
    "choose linear layers or the path of experts in model.lora.targets": "adapter.expert-pattern",
    "train the adapters of experts without DoRA": "adapter.experts-dora",
    "write the adapters as a PEFT folder": """
        adapter.generation-form-only adapter.no-original-names adapter.peft-form-only""",
    "check the path: it must be a PEFT folder or a safetensors file of adapters": "adapter.not-here",
    "use a plain LoRA adapter, or merge this one with the tool that trained it": """
        adapter.not-plain-lora adapter.unsupported-option""",
    "set the prefix to a beginning of the names that the message lists": "checkpoint.unknown-name-prefix",
    "write a first line with the names of the columns": "data.bad-csv-header",
    "write the name of a column": "data.empty-column-name",
    "set data.truncate=never": "data.cannot-truncate",
    "put files of a format that the message lists into the folder": "data.empty-folder",
    "return a mapping of names to values for each row": "data.row-no-mapping",
    "choose one that the message lists, or auto": "device.implementation-unusable",
    "name the size, too, as the message lists it": "device.several-sizes",
    "list cores that this machine has": "environment.affinity-unknown-core",
    "set MASTER_PORT to a free port from 1 to 65535": "environment.master-port",
    "name ranks of this run": "environment.no-such-rank",
    "name ranks by number": "environment.rank-count-unknown",
    "pip install torchvision, or set data.processor.image_backend=pil": "environment.torchvision-missing",
    "correct the scheduler's config.json, or choose another solver": """
        generation.bad-scheduler-settings generation.unsupported-scheduler""",
    "set frames to 1, or use a model for videos": "generation.image-model-makes-no-video",
    "set temperature to 0": "generation.own-sampling",
    "leave the solver out: the folder names it": "generation.solver-needs-velocity",
    "split the file of prompts": "generation.too-many-prompts",
    "use the VAE and the encoders that belong to this family": """
        generation.unknown-component-class generation.unknown-vae""",
    "choose a weighting that the message lists, or another objective": "generation.weighting-without-levels",
    "name a folder with a model or adapters": "hub.nothing-to-push",
    "name one of the data sets that the message lists": "hub.several-datasets",
    "give all options that the message names": "job.converter-option-missing",
    "rename or remove the variable": "job.converter-variable",
    "write the flag as its help describes it": "job.invalid-flag",
    "pass a JSON file to --mm-model": "job.model-json-missing",
    "make the number of ranks a multiple of the group": "job.group-size",
    "select one loss": "job.loss-ambiguous",
    "name a launch script, or a YAML job with gpt_args or training": "job.not-a-job",
    "add the section to the YAML job": "job.section-missing",
    "use patches with equal sides": "job.patch-size",
    "choose sizes that divide evenly": "job.width-not-multiple model.heads-do-not-divide-width",
    "use parallel.tp or parallel.pp to generate text over several ranks": "layout.axis-not-for-generation",
    "choose a number of ranks that divides the number in the message": """
        layout.expert-ranks layout.encoder-tp layout.encoder-tp-mixed layout.ep-not-divisor
        layout.expert-width-not-divisible layout.experts-not-divisible layout.reshard-size
        layout.shard-not-divisor layout.ulysses-not-divisor""",
    "set it to 1 or to parallel.cp": "layout.encoder-cp",
    "use the styles column and row for weights of experts": "layout.expert-style",
    "set ep to 1": "layout.experts-refused layout.model-without-experts",
    "set parallel.cp=1": "layout.pairs-with-cp task.no-context-parallel",
    "set parallel.accumulate=local": "layout.pipeline-grad-sync",
    "set pp to 1": "layout.pipeline-refused",
    "set dtype to float32 or bfloat16": "layout.quantized-over-ranks",
    "declare such parameters in the model's plan, or set parallel.sequence_parallel=false": """
        layout.sequence-style-missing""",
    "match every parameter with one pattern of the model's plan": "layout.style-count",
    "use a layout of fewer ranks": "layout.too-many-ranks",
    "use fewer stages": "layout.too-many-stages",
    "set the smaller bound to at most the larger one": "media.bounds-crossed",
    "build the model of the checkpoint, or drop the key": "megatron.checkpoint-key-missing",
    "set sequence_length to 1 or more": "megatron.dataset-length",
    "set input_is_parallel=True": "megatron.input-not-parallel",
    "set softmax_in_fp32=True": "megatron.scaled-softmax",
    "use a sequence length that the ranks divide": "megatron.sequence-not-divisible",
    "shard an axis that the tensor has": "megatron.shard-axis",
    "pass one model instead of a list": "megatron.several-models",
    "derive the class from the one that the message names": "model.class-not-subclass",
    "correct the number in config.json, or download the folder again": "model.absurd-size",
    "add a rule to the family's weight map: docs/how-to/add-a-model-family.md#the-weight-map": "model.no-weight-rule",
    "name the family that reads this folder in model.family": "model.other-model-type",
    "add both fields to rope_scaling in config.json": "model.rope-fields-missing",
    "set the field to a value that the message lists, or use model.family=transformers": "model.unsupported-value",
    "remove the field, or correct its name": "model.unknown-config-field",
    "name your own family (model.family, --family), or use model.family=module for your own class": """
        model.unknown-model-type""",
    "set optimizer=adamw for this group of parameters": "recipe.muon-not-matrix",
    "correct the import path": "recipe.no-attribute",
    "use an index that is in the list": "recipe.no-list-entry",
    "check the path of the recipe": "recipe.no-such-file",
    "write keys and values, such as `train: {steps: 100}`": "recipe.not-a-mapping",
    "set this key as a whole, or correct the path of the key below it": "recipe.not-a-section",
    "name a class or a function": "recipe.not-callable",
    "correct each problem that the message lists": "recipe.several-problems",
    "write the recipe with fewer levels": "recipe.too-deep",
    "pass the arguments that the message lists": "recipe.wrong-options",
    "name a run folder, as `tessera train` prints it": "run.not-a-run",
    "pass an object of a type that the message lists": "run.wrong-object-type",
    "return the tensor in the batch, or name another one": "task.no-labels-to-count",
    "use a model that gives this output, or another task": "task.output-not-given",
    "return this count from `counts` of the task": "task.unknown-count",
    "set one of the weights above 0": "task.zero-weights",
    "check the path": "weights.folder-missing",
    "name a folder with config.json and weights, a run or a checkpoint": "weights.no-model-here",
    "convert the weights to a type that the message lists": "weights.unsupported-dtype",
    "use a folder with weights that are not quantized": "weights.unsupported-quantization",
}
CURES = {code: cure for cure, codes in _CODES_BY_CURE.items() for code in codes.split()}

# code: cause, where the source has no words for it
CAUSES = {
    "data.damaged-transcripts": "a line of a file with texts of recordings is too long, or there are too many lines",
    "data.damaged-media": "an image, a video or a recording of a sample cannot be decoded",
    "data.processor-refuses": "the processor of transformers raised an error for this sample",
    "environment.affinity-invalid": "an entry of the variable for CPU affinity is not valid",
    "environment.ranks-differ": "ranks differ in their command, folder, versions or data, or a rank is missing",
    "generation.sampling-out-of-range": "an option of sampling is outside of its range",
    "job.adapter-part": "--lora-apply-modules names a part that the model does not have",
    "job.contradicting-flags": "two flags of the job contradict each other",
    "job.converter-option-refused": "an option of the converter is not supported",
    "job.converter-refused": "a command of the converter is not supported",
    "job.data-formatting": "attr.formatting of a data set is not supported",
    "job.decay-style": "training.lr_decay_style is not supported",
    "job.flag-too-small": "the number of a flag is too small",
    "job.flag-value": "the value of a flag is not supported",
    "job.invalid-flag": "the command line has a flag without a value, or a value of the wrong type",
    "job.refused-flag": "a flag is not supported, or is not supported behind the name of the script",
    "job.sample-method": "diffusion.sample_method is not supported",
    "job.storage-mode": "data_storage_mode is not supported",
    "media.damaged-file": "an image, a video or a recording is truncated, or its content does not fit its header",
    "media.unreadable-file": "an image, a video or a recording has a header that cannot be read",
    "output.option-without-effect": "an option has no effect on this kind of source",
    "output.system-error": "the operating system refused to read or write a file",
    "recipe.unusable-value": "a value is a number of more than 63 bits, or text with NUL or invalid Unicode",
    "recipe.wrong-value": "the value of a key has the wrong type, or is outside of its range",
    "run.damage-returns": "weights or optimizer state are not finite again after a rollback",
    "run.weights-damaged": "weights or optimizer state are not finite after a step",
    "run.bad-step": "the loss or the norm of the gradients of a step is not finite, or far above the steps before it",
}
