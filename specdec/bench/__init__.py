"""`python -m specdec.bench`: specdec beside `transformers`: the same weights, prompts and process.

* `prompts.py`: questions of several kinds, built in or from a file in the layout of Spec-Bench.
* `engines.py`: our models as those of `transformers`, and how either engine decodes a prompt.
* `measure.py`: interleaved repetitions; medians, spreads, divergences.
* `bandwidth.py`: what a step has to read, and how fast this machine reads.
* `report.py`, `plot.py`: tables, JSON, a picture.

`specdec.benchmark` does the predictions, here as for the embedded bundle's own table.
"""
