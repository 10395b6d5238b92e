"""The only package that knows transformers: what a model supports, its forwards, its identity."""
