PYTHON ?= python

test:
	$(PYTHON) -m pytest

prove:            # 2,000 random decodings against plain decoding, in float64
	SPECDEC_EXAMPLES=2000 $(PYTHON) -m pytest tests/test_prove.py -q

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath "$$(command -v $(PYTHON))"

docs:
	$(PYTHON) -m mkdocs build --strict

examples:
	for file in examples/[0-9]*.py; do echo "== $$file"; $(PYTHON) $$file || exit 1; done

bench:            # what the docs' tables hold; minutes on a quiet machine
	$(PYTHON) -m benchmarks.loop
	$(PYTHON) -m benchmarks.batch

.PHONY: test prove lint docs examples bench
