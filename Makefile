# Two commands on a fresh machine: `make quickstart` and `make test`. Each makes its own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: quickstart quickstart-video quickstart-audio test test-all test-mindspore margins layouts lint types clean help

help:
	@echo "make quickstart  set up and train a small vision-language model on handwritten digits (a few minutes on 2 cores)"
	@echo "make quickstart-video  the same for a small video model: moving digits from captions"
	@echo "make quickstart-audio  the same for a small speech model: spoken digits of many voices"
	@echo "make test        set up and run style, type and unit tests"
	@echo "make test-all    the same with the slow tests: more kills, a longer soak"
	@echo "make test-mindspore  the tests of training on MindSpore, in an environment of their own (.venv-mindspore)"
	@echo "make margins     how near every numeric comparison came to its limit"
	@echo "make layouts     every layout and memory form against one process, as a table"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 14) else "Tessera needs Python 3.11 to 3.14; say make PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(VENV)
	@echo 'installing into $(VENV): some minutes and 2 GB, and pip says nothing meanwhile'
	@# As a plain path: otherwise `import tessera` finds nothing in the folder above a checkout named tessera.
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --config-settings editable_mode=compat -e '.[dev]'
	@touch $@

quickstart: $(READY)
	$(BIN)/python recipes/quickstart/run.py

quickstart-video: $(READY)
	$(BIN)/python recipes/quickstart-video/run.py

quickstart-audio: $(READY)
	$(BIN)/python recipes/quickstart-audio/run.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# Files go to workers in the order of tests/conftest.py. Bytecode is written, whatever the surroundings say: without it
# every worker takes 10 s to read tests that another one has read, and every process that a test starts compiles again.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder
# Beside the tests, which leave parts of a core idle, one process checks types and then compares numbers a second time.
# What it says comes after the tests. Each worker imports and prepares the same again: three are for slow tests, which
# wait more. $(1): how many workers. $(2): which tests. $(3): which of them compare numbers.
define TYPES_AND_TESTS
	@mkdir -p build
	@echo '($(BIN)/mypy; $(PLAINEST) ...) &'; ($(BIN)/mypy; types=$$?; $(PLAINEST) $(2) $(3) && [ $$types = 0 ]) > build/beside.txt 2>&1 & beside=$$!; \
	echo '$(PYTEST) -n $(1) $(2)'; $(PYTEST) -n $(1) $(2); tests=$$?; wait $$beside; beside=$$?; \
	cat build/beside.txt; [ $$tests = 0 ] && [ $$beside = 0 ]
endef
PLAINEST := ATEN_CPU_CAPABILITY=default $(PYTEST) -n 0 -k "not compiled"
# Compared a second time with the plainest kernels that torch has for this CPU, which add in another order. Not what is
# compiled: the compiler takes the instructions of the machine all the same, and mixes them up with headers for others.
NUMERIC := tests/unit/test_ops_attention.py tests/unit/test_ops_loss.py tests/unit/test_ops_pointwise.py \
	tests/unit/test_ops_linear.py tests/unit/test_ops_block_attention.py \
	tests/unit/test_preference.py::test_loss_and_gradients_are_those_of_the_formula \
	tests/contract/test_vision_language_numerics.py::test_bf16_weights_take_fp32_pixels_and_stay_near_fp32 \
	'tests/contract/test_generation_families.py::test_predictions_loss_and_gradients_are_those_of_diffusers[cogvideox-sines]'
PACKED := tests/contract/test_vision_language_numerics.py::test_packed_batches_of_everything
SOME_PACKED := '$(PACKED)[qwen2_5_vl-0]' '$(PACKED)[qwen3_omni-0]' '$(PACKED)[llava-0]'

test: lint
	$(call TYPES_AND_TESTS,3,-m "not slow and not gpu",$(NUMERIC) $(SOME_PACKED))

test-all: lint
	$(call TYPES_AND_TESTS,3,-m "not gpu",$(NUMERIC) $(PACKED))

# MindSpore needs NumPy 1 and Python up to 3.12, so it has its own environment, with its own constraints.
MS_VENV := .venv-mindspore
$(MS_VENV)/.ready: pyproject.toml constraints-mindspore.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "MindSpore needs Python 3.11 or 3.12; say make PYTHON=/path/to/it")'
	$(PYTHON) -m venv $(MS_VENV)
	@echo 'installing into $(MS_VENV): 4 GB, or 8 GB where pip finds no torch for CPUs (docs/how-to/mindspore.md)'
	$(MS_VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints-mindspore.txt --config-settings editable_mode=compat -e '.[hf,mindspore]' pytest pytest-xdist hypothesis
	@touch $@

test-mindspore: $(MS_VENV)/.ready
	OMP_NUM_THREADS=1 $(MS_VENV)/bin/python -m pytest -p no:xdist -m "not slow" tests/mindspore

margins: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.margins -o enable_assertion_pass_hook=true -m "not slow and not gpu"

layouts: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.dist.layouts

clean:
	find tessera tessera_compat tests -name __pycache__ -prune -exec rm -rf {} +
	rm -rf $(VENV) $(MS_VENV) build runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
