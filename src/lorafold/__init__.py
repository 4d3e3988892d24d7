"""lorafold: many LoRA adapters over one base model, the same bits whatever else is in the batch."""
