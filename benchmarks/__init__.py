"""Measurements that anyone can repeat; what they printed is in results/."""
