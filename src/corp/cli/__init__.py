"""The command line: one file per command, each of them thin. Nothing imports it.

It passes command-line arguments to the functions of `corp.api`, and prints tables or JSON and sets exit codes.
"""
