"""What every site keeps and what that costs: rank, choose, predict. No data, no change to the model."""
