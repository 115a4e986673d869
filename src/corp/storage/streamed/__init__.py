"""Models larger than memory: one block at a time, from a folder of weights to a folder of smaller ones.

Takes a folder of safetensors, batches and a recipe; writes a folder like corp.save's. Every step is the ordinary one
(steps, surgery, storage), applied to one block. The command line imports it.
"""
