"""Implementations of the attention ops. Each file stands alone and is imported when its backend first runs."""
