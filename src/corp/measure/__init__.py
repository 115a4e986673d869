"""What a model costs: parameters and multiply-accumulates."""
