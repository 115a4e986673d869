"""Changes modules, knowing only torch.nn."""
