"""HuggingFace's own common model tests, run on patched models; `tests/test_hf_suite.py` starts them."""
