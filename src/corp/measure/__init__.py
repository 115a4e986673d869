"""Costs and distances of models: parameters, operations, time, memory, and how far two outputs are apart.

Models come in, numbers go out; allocation uses them to choose widths, so any package after calibration may import it.
"""
