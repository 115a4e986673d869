"""How well a pruned model does what the dense one did."""
