"""Implementations of the attention ops. Each file stands alone, imported when its backend first runs."""
