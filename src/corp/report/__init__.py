"""What was done and what it cost, for people and for machines."""
