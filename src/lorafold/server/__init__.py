"""An OpenAI-compatible HTTP server over one engine. `lorafold serve` runs it."""
