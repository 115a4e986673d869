"""Costs and distances of models: parameters, operations, time, memory, and how far two outputs are apart.

It takes models and returns numbers, which the steps use to choose widths; any package after surgery may import it.
"""
