"""Folders and files into batches."""
