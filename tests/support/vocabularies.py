"""Two small vocabularies, texts, and the ids that llama.cpp gives for them (tests/llama/make_tokenizer_samples.py)."""

import json
from pathlib import Path

SAMPLES = json.loads((Path(__file__).parents[1] / "data" / "vocab" / "samples.json").read_text())
