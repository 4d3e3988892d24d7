"""The demo: several adapters in one batch over a real model, with the proof underneath."""
