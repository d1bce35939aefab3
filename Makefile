# The front door. Each target does its own set-up in .venv (from PyPI) and build/; nothing else is touched.
#
#   make demo    train a small Qwen3 with stock Transformers and with Bastile, and compare
#   make test    everything: lint, C tests under sanitizers, Python tests, kernels on the emulated GPU and for every chip
#   make test-oldest   the tests of models with the oldest Transformers that is supported; test-midway: with 5.17
#   make test-torch    the Python tests with the newest PyTorch, which is large
#   make test-trl      the trainers' tests with earlier releases of TRL and PEFT, DeepSpeed, torchao, Sentence Transformers
#   make test-chips    each variant of each kernel for every chip, where make test takes one or two chips for each
#   make test-models   one training step of each model type of Transformers
#   make lint    format and style only
#   make fuzz SECONDS=600 SEED=2   random calls of every operator function under sanitizers: more of what make test has
#   make fuzz-models SECONDS=600 SEED=2   random models, trained by stock Transformers and with Bastile: likewise
#   make fuzz-trainers SECONDS=600 SEED=2   random runs of TRL's and Transformers' trainers: likewise
#   make bench   time the operators on this machine
#   make wheel   the source and the wheel that are published, into dist/ (make sdist: the source alone)
#   make clean   remove what the above made
#
# VENV= (empty) uses $(PYTHON) and what it has installed, without touching the network.

PYTHON ?= python3
VENV ?= .venv
JOBS ?= $(shell nproc)

BIN := $(if $(VENV),$(VENV)/bin/,)
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
NVRTC := $$($(PY) tools/nvrtc_folder.py)
SITE := build/site

.PHONY: demo test test-oldest test-midway test-torch test-trl test-models test-chips lint fuzz fuzz-models fuzz-trainers bench sdist wheel clean install c-tests py-tests emulated-tests

demo: install
	PYTHONPATH=$(SITE) $(PY) -m bastile demo --out demo-out

# One part after the other, each on all processors; at the end, how long each took.
PARTS := lint c-tests py-tests emulated-tests
test: $(if $(VENV),$(VENV)/test.stamp)
	@for part in $(PARTS); do \
	    begin=$$(date +%s) && $(MAKE) --no-print-directory $$part || exit 1; \
	    took="$$took$$(printf '%6d s  %s' $$(($$(date +%s) - begin)) $$part)\n"; \
	done; printf "$$took%s\n" "make test: everything passed"

# ---- set-up ---------------------------------------------------------------------------------------------------------

$(VENV)/demo.stamp: requirements/demo.txt requirements/build.txt
	@echo "Setting up $(VENV) from PyPI: PyTorch is large, so this may take minutes"
	@$(PYTHON) -m venv $(VENV) || { echo "python3 with venv is needed (Debian, Ubuntu: apt install python3-venv)"; exit 1; }
	$(PY) -m pip install -q --upgrade pip
	$(PY) -m pip install -q -r requirements/demo.txt
	touch $@

$(VENV)/test.stamp: requirements/test.txt $(VENV)/demo.stamp
	$(PY) -m pip install -q -r requirements/test.txt
	touch $@

# The package as users get it, in a folder of its own.
install: $(if $(VENV),$(VENV)/demo.stamp)
	PATH="$(abspath $(BIN)):$$PATH" $(PY) -m pip install -q --no-build-isolation --no-deps --upgrade --target $(SITE) .

# ---- tests ----------------------------------------------------------------------------------------------------------

lint: $(if $(VENV),$(VENV)/test.stamp)
	$(PY) tools/lint.py

MESON := PATH="$(abspath $(BIN)):$$PATH" meson
define configure
	test -f build/$(1)/build.ninja || $(MESON) setup build/$(1) -Dwerror=true $(2)
	PATH="$(abspath $(BIN)):$$PATH" ninja -C build/$(1)
endef
# The text of CPU kernels is the same at each vector level.
SANITIZE := -Dbuildtype=debugoptimized -Db_sanitize=address,undefined -Db_lundef=false -Dlevels=false

c-tests: $(if $(VENV),$(VENV)/test.stamp)
	$(call configure,sanitized,-Dtests=true $(SANITIZE))
	BASTILE_NVRTC_FOLDER=$(NVRTC) $(MESON) test -C build/sanitized --print-errorlogs --num-processes $(JOBS)

test-chips: $(if $(VENV),$(VENV)/test.stamp)
	$(call configure,sanitized,-Dtests=true $(SANITIZE))
	BASTILE_TEST_EVERY_CHIP=1 BASTILE_NVRTC_FOLDER=$(NVRTC) $(MESON) test -C build/sanitized --suite chips --print-errorlogs \
	    --num-processes $(JOBS)

py-tests: install $(if $(VENV),$(VENV)/test.stamp)
	PYTHONPATH=$(SITE) $(PY) -m pytest tests/py -n $(JOBS) --durations=5

# Older releases of Transformers, and the newest PyTorch with what it brings, lie in folders of their own, before the
# others on Python's path.
OLD := build/oldest build/midway
TORCH := build/torch
MODEL_TESTS := autocast_linear between_steps chunked_attention chunks compile encoder_padding experts families forms fused_layers generation generation_graphs gpt_oss graphs_beside graphs_collected graphs_lengths graphs_masked graphs_packed graphs_seq2seq graphs_shared graphs_undifferentiated host_time in_place kept_calls logits_bias masks_of_segments model_types numbers_of_tokens outer_masks packed_mixers padding_free padding_routers padding_scores parameter_count patching running_loss sink_attention state_space switches token_masks trainer_optimizer trainer_sharded training transformers_versions waits walks
$(addsuffix /stamp,$(OLD) $(TORCH)): build/%/stamp: requirements/%.txt
	rm -rf $(@D)
	$(PY) -m pip install -q --target $(@D) -r $<
	touch $@

test-oldest test-midway: test-%: install build/%/stamp $(if $(VENV),$(VENV)/test.stamp)
	PYTHONPATH=build/$*:$(SITE) $(PY) -m pytest -n $(JOBS) $(addprefix tests/py/test_,$(addsuffix .py,$(MODEL_TESTS)))

test-torch: install $(TORCH)/stamp $(if $(VENV),$(VENV)/test.stamp)
	PYTHONPATH=$(TORCH):$(SITE) $(PY) -m pytest tests/py -n $(JOBS)

# Each release of TRL lies in a folder of its own, before the newest on Python's path; what they share in another.
TRL := build/trl
TRL_RELEASES := 0.24.0 1.0.0 1.4.0 1.6.0 1.14.2
PEFT_OLDEST := 0.18.0
$(TRL)/stamp: requirements/trl.txt
	rm -rf $(TRL)
	$(PY) -m pip install -q --no-deps --no-build-isolation --target $(TRL)/beside -r $<
	for release in $(TRL_RELEASES); do $(PY) -m pip install -q --no-deps --target $(TRL)/$$release trl==$$release || exit; done
	$(PY) -m pip install -q --no-deps --target $(TRL)/peft peft==$(PEFT_OLDEST)
	touch $@

test-trl: install $(TRL)/stamp $(if $(VENV),$(VENV)/test.stamp)
	PYTHONPATH=$(TRL)/beside:$(SITE) $(PY) -m pytest -n $(JOBS) tests/py/test_trl.py tests/py/test_peft_deepspeed.py \
	    tests/py/test_graphs_deepspeed.py tests/py/test_zero3.py tests/py/test_peft_torchao.py \
	    tests/py/test_shardings.py tests/py/test_sentence_transformers.py
	PYTHONPATH=$(TRL)/peft:$(SITE) $(PY) -m pytest -n $(JOBS) tests/py/test_peft.py tests/py/test_peft_experts.py \
	    tests/py/test_walks.py tests/py/test_switches.py
	for release in $(TRL_RELEASES); do \
	    PYTHONPATH=$(TRL)/$$release:$(TRL)/beside:$(SITE) $(PY) -m pytest -n $(JOBS) tests/py/test_trl.py || exit; \
	done

# One training step of each language model type of Transformers, stock and patched. A few types need more packages, which
# lie in a folder of their own: Transformers goes other ways where torchvision is there.
MODELS := build/models
$(MODELS)/stamp: requirements/models.txt
	rm -rf $(MODELS)
	$(PY) -m pip install -q --no-deps --target $(MODELS) -r $<
	touch $@

test-models: install $(if $(VENV),$(MODELS)/stamp $(VENV)/test.stamp)
	PYTHONPATH=$(SITE) $(PY) -m pytest -n $(JOBS) -m every_type tests/py/test_model_types.py \
	    tests/py/test_masks_of_segments.py tests/py/test_padding_free.py
	PYTHONPATH=$(MODELS):$(SITE) $(PY) -m pytest -n $(JOBS) -m needs_more tests/py/test_model_types.py

# The same Python tests of the operators, with the CUDA kernels run on the CPU under AddressSanitizer and UBSan.
emulated-tests: $(if $(VENV),$(VENV)/test.stamp)
	$(call configure,emulated,-Demulate=true -Dtests=true $(SANITIZE))
	$(MESON) test -C build/emulated --print-errorlogs --num-processes $(JOBS)
	sh tests/emu/run.sh build/emulated $(PY) $(JOBS)

SECONDS := 600
SEED := 1
fuzz: $(if $(VENV),$(VENV)/test.stamp)
	$(call configure,sanitized,-Dtests=true $(SANITIZE))
	build/sanitized/tests/fuzz/fuzz --seed $(SEED) --seconds $(SECONDS)

fuzz-models: install $(if $(VENV),$(VENV)/test.stamp)
	PYTHONPATH=$(SITE) $(PY) tools/random_models.py --seed $(SEED) --seconds $(SECONDS)

fuzz-trainers: install $(if $(VENV),$(VENV)/test.stamp)
	PYTHONPATH=$(SITE) $(PY) tools/random_trainers.py --seed $(SEED) --seconds $(SECONDS)

# ---- the rest -------------------------------------------------------------------------------------------------------

bench: install
	PYTHONPATH=$(SITE) $(PY) -m bastile bench --out bench-out

$(VENV)/wheel.stamp: requirements/wheel.txt requirements/build.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements/wheel.txt
	touch $@

BUILD := PATH="$(abspath $(BIN)):$$PATH" $(PY) -m build --no-isolation --outdir dist
# What is committed, and no more.
sdist: $(if $(VENV),$(VENV)/wheel.stamp)
	rm -rf dist
	$(BUILD) --sdist .

# From that source. auditwheel then looks whether the wheel needs what no manylinux system has.
wheel: $(if $(VENV),$(VENV)/wheel.stamp)
	rm -rf dist
	$(BUILD) .
	$(PY) -m auditwheel show dist/*.whl | tr '\n' ' ' | grep -o 'platform tag: "manylinux_[^"]*"'

clean:
	rm -rf build .venv demo-out bench-out dist
