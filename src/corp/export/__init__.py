"""A pruned model written so that its own library loads it, without corp."""
