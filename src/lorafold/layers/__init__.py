"""Operators inside modules: what takes the place of a model's layers."""
