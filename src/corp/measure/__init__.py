"""Costs and distances of models: parameters, operations, time, memory, and how far two outputs are apart.

Models come in, numbers go out; the steps use them to choose widths, so any package after surgery may import it.
"""
